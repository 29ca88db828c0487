"""What a person sees while something runs: where it stands in make's chain, and one bar, on the main process.

In a terminal the bar is drawn; elsewhere a line comes every half minute. `note` says beside the bar what is
being done, without a bar (on another process, in a test) nothing; so whoever works deep inside needs no
handle on it.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

RECENT = 50  # updates whose mean loss is shown: that of one jumps with the task that was drawn

_shown: "Bar | None" = None


watched: Any = None  # who wants to know that this process makes progress: the guard of a rank


def beat() -> None:
    """Progress was made; for loops that know nothing of a run. Costs nothing where nobody watches."""
    if watched is not None:
        watched.beat()


def waiting(doing: str) -> contextlib.AbstractContextManager[None]:
    """Inside, this process waits for others, which is no want of progress."""
    return contextlib.nullcontext() if watched is None else watched.waiting(doing)


def peer_failed() -> bool:
    """Whether another rank has failed, and waits to tell so; for loops that wait for its files."""
    return watched is not None and watched.peer_failed()


def position(stage: str, trained: Sequence[str]) -> str:
    """ "operator (3 of 8)": a stage and where it stands from data to report; the name alone of a stage that
    the report does not need. trained: the stages that it needs (`Config.trained`).
    """
    chain = ["data", "cache", *trained, "report"]
    return f"{stage} ({chain.index(stage) + 1} of {len(chain)})" if stage in chain else stage


class Bar(tqdm):
    """The bar of this process while it is open; hidden unless this is the main one."""

    def __init__(
        self,
        title: str,
        total: int,
        is_main: bool = True,
        count: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        """count: how much of `total` is done, where several processes do it; then the time that is left is
        not foretold.
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
        """Show `text` beside the bar, and how much is done by now."""
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


def note(text: str) -> None:
    """Say beside the open bar what is being done."""
    if _shown is not None:
        _shown.say(text)
