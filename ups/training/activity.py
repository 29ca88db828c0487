"""What this rank does, and whether it is told to stop. Without torch.

ups_launch is optional, and only this file imports it. Where it is installed, its guard watches the activity
of every rank: one that hangs or dies is named, and the job ends; and its supervisor gets events. Without it
nobody watches, and only train.timeout_s limits a wait for other ranks.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ups.common import progress

try:
    import ups_launch
except ImportError:
    ups_launch = None

SAME_S = 1.0  # signals this close are one: make, Slurm, a terminal and a launcher may all forward it
LEAVE_S = 10.0  # from a failure to the end of the process
EXIT_STOPPED = 128 + signal.SIGTERM


def send_event(event: str, **facts: Any) -> bool:
    """Send an event to the supervisor of this process; False if there is none."""
    return ups_launch is not None and ups_launch.send_event(event, **facts)


class Activity:
    """The activity of this rank. hang_s: longest time without progress, unless a phase sets another limit.

    on_end(code, kind, cause, stack): called by the guard before it ends this process, to record the failure.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        stage: str,
        hang_s: float,
        on_end: Callable[[int, str, str, str], None] = lambda *facts: None,
    ) -> None:
        self.rank, self.world, self.stage, self.hang_s, self.on_end = rank, world, stage, hang_s, on_end
        self.step, self.doing, self.limit_s, self.is_waiting = 0, "starting", hang_s, False
        self.num_collectives = self.num_beats = 0
        self.beat_at = time.monotonic()
        self.stop_signal, self.is_in_loop, self.is_leaving = 0, False, False
        self.has_failed = False  # for ranks that wait for files and enter no collective
        self.code: int | None = None  # the exit code, once this rank is about to end
        self.is_agreed, self.cause = False, ""
        self._signal_at = 0.0  # when the first signal came
        self._handlers: dict[int, Any] = {}
        self.guard = ups_launch.Guard(self) if ups_launch is not None else None

    def start(self) -> None:
        """Handle SIGTERM and SIGINT, and start the guard. Call it in the main thread of the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._on_signal)
        progress.watched = self
        self.beat()
        if self.guard is not None:
            self.guard.start()

    def open(self, directory: Path) -> None:
        """Exchange heartbeats with the other ranks in `directory`."""
        if self.guard is not None:
            self.guard.open(directory)

    def leave(self, code: int, is_agreed: bool, cause: str = "") -> None:
        """This rank is about to end: from here on signals and lost peers are ignored, and only LEAVE_S limits
        it.

        is_agreed: the others end in the same way. If not, and code is not 0, they count it as lost, by cause.
        """
        self.doing, self.is_leaving = "leaving", True
        # others may still send numbers to a tracker
        self.limit_s = max(LEAVE_S, self.hang_s) if code == 0 else LEAVE_S
        self.is_agreed, self.cause = is_agreed, cause or self.cause
        self.code = code
        self.beat()

    def close(self, code: int) -> None:
        """Stop the guard, whose last heartbeat holds the exit code, and handle signals as before."""
        if not self._handlers:
            return
        progress.watched = None
        self.code = code if self.code is None else self.code
        if self.guard is not None:
            self.guard.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    @property
    def place(self) -> str:
        """Where this rank is, in words."""
        return f"rank {self.rank}, stage {self.stage}, step {self.step}"

    def beat(self) -> None:
        """Record progress."""
        self.num_beats += 1
        self.beat_at = time.monotonic()

    @contextlib.contextmanager
    def _while(self, **facts: Any) -> Iterator[None]:
        """Inside, these attributes are `facts`; both ends are progress."""
        before = {name: getattr(self, name) for name in facts}
        vars(self).update(facts)
        self.beat()
        try:
            yield
        finally:
            vars(self).update(before)
            self.beat()

    def phase(self, doing: str, limit_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Around an activity named `doing`, which may take `limit_s` without progress."""
        return self._while(doing=doing, limit_s=limit_s or self.limit_s)

    def in_loop(self) -> contextlib.AbstractContextManager[None]:
        """Around the loop: a signal stops all ranks after the step, with a checkpoint. Elsewhere it ends the
        process.
        """
        return self._while(doing="between updates", is_in_loop=True)

    def waiting(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Around a wait for other ranks, in a collective or for their files."""
        self.num_collectives += 1
        return self._while(doing=doing, is_waiting=True)

    def lost_peer(self, wait_s: float) -> str | None:
        """The first other rank that fails or dies within `wait_s`, in words."""
        return self.guard.lost_peer(wait_s) if self.guard is not None else None

    def peer_failed(self) -> bool:
        """Whether another rank has failed."""
        return self.guard is not None and self.guard.peer_failed()

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.is_leaving:
            return
        if self.stop_signal:  # only a second Ctrl-C means more than the first signal
            if number == signal.SIGINT and time.monotonic() - self._signal_at > SAME_S:
                raise KeyboardInterrupt
            return
        self.stop_signal, self._signal_at = number, time.monotonic()
        if not self.is_in_loop:  # there is no step to finish and nothing to save
            raise SystemExit(EXIT_STOPPED)
