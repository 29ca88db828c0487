"""Progress of a command: its position in make's chain, and one progress bar, on the main process.

A terminal shows the bar; elsewhere a line is printed every half minute. `note` shows a text beside the open
bar and does nothing without one (on another process, in a test), so deep code needs no handle on the bar.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

RECENT = 50  # updates whose mean loss is shown: losses of single updates differ from task to task

_shown: Any = None  # the open Bar, or what shows notes instead


watched: Any = None  # the guard of this rank, which watches for progress


def beat() -> None:
    """Report progress to the guard, if there is one."""
    if watched is not None:
        watched.beat()


def waiting(doing: str) -> contextlib.AbstractContextManager[None]:
    """A context in which this process waits for others; the guard does not count it as a hang."""
    return contextlib.nullcontext() if watched is None else watched.waiting(doing)


def peer_failed() -> bool:
    """Whether another rank has failed; for loops that wait for its files."""
    return watched is not None and watched.peer_failed()


def position(stage: str, trained: Sequence[str]) -> str:
    """The position of a stage between data and report, such as "operator (3 of 8)"; the name alone of a stage
    that the report does not need. trained: the stages that it needs (`Config.trained`).
    """
    chain = ["data", "cache", *trained, "report"]
    return f"{stage} ({chain.index(stage) + 1} of {len(chain)})" if stage in chain else stage


class Bar(tqdm):
    """The progress bar of this process; hidden unless it is the main process."""

    def __init__(
        self,
        title: str,
        total: int,
        is_main: bool = True,
        count: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        """count: returns how much of `total` is done, if several processes work on it; then the bar estimates
        no remaining time.
        """
        global _shown
        is_terminal = sys.stderr.isatty()
        if count is not None:
            options["bar_format"] = "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]"
        super().__init__(
            total=total,
            desc=title,
            disable=not is_main,
            dynamic_ncols=is_terminal,
            mininterval=0.5 if is_terminal else 30.0,
            **options,
        )
        if not self.disable and self.ncols is not None and self.ncols < 1:  # a terminal of no size
            self.dynamic_ncols, self.ncols, self.nrows = None, 80, None
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._count, self._noted_at = count, -math.inf
        _shown = self if is_main else None

    def lost(self, loss: float) -> None:
        """Show the mean of the last losses, this one included."""
        self._losses.append(loss)
        self.set_postfix_str(
            f"mean loss of {len(self._losses)}: {sum(self._losses) / len(self._losses):.3e}", refresh=False
        )

    def say(self, text: str) -> None:
        """Show `text` beside the bar, and the current count."""
        self.set_postfix_str(text, refresh=False)
        if time.monotonic() - self._noted_at >= self.mininterval:
            self._noted_at, self.n = time.monotonic(), self._count() if self._count else self.n
            self.refresh()

    def close(self) -> None:
        global _shown
        if _shown is self:
            _shown = None
        self.n = self._count() if self._count and not self.disable else self.n
        super().close()


def show_notes_by(say: Callable[[str], None]) -> None:
    """`note` calls `say`, in a process without a bar."""
    global _shown
    _shown = SimpleNamespace(say=say)


def note(text: str) -> None:
    """Show `text` beside the open bar."""
    if _shown is not None:
        _shown.say(text)
