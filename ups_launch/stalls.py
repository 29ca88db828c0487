"""Which rank holds up the others, from the heartbeats of all ranks. Without torch.

A rank that waits for others (in a collective) is never at fault. At fault is a rank that does not wait and
has made no progress for its limit, or that entered fewer collectives than the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# of a rank that has written no heartbeat yet
NO_HEARTBEAT = {
    "is_waiting": False,
    "collectives": 0,
    "doing": "",
    "beats": -1,
    "pulse": -1,
    "has_failed": False,
    "code": None,
    "machine": "",
}


@dataclass(frozen=True)
class Finding:
    """Why the job must end. kind: a word for the supervisor; ranks: those at fault."""

    code: int
    kind: str
    cause: str
    ranks: tuple[int, ...] = ()


class Peer:
    """The last heartbeat of another rank and when, by this rank's clock, it changed."""

    def __init__(self, now: float, hang_s: float) -> None:
        self.record: dict[str, Any] = NO_HEARTBEAT | {"limit_s": hang_s}
        self.progress_at = self.pulse_at = now
        self.lost_at: float | None = None
        self.why_lost = ""

    def update(self, record: dict[str, Any] | None, now: float) -> None:
        """record: None if there is none yet, or it is being written."""
        before, self.record = self.record, record or self.record
        if self.record["beats"] != before["beats"]:
            self.progress_at = now
        if self.record["pulse"] != before["pulse"]:
            self.pulse_at = now

    def restart_clocks(self, now: float) -> None:
        self.progress_at = self.pulse_at = now

    @property
    def has_ended(self) -> bool:
        return self.record["code"] is not None


@dataclass(frozen=True)
class Activity:
    """A rank that has not ended. quiet_s: time since its last progress or, if later, since a signal."""

    rank: int
    quiet_s: float
    limit_s: float
    is_waiting: bool
    is_deaf: bool
    doing: str
    collectives: int


def activity_of(rank: int, peer: Peer, now: float, since: float) -> Activity:
    """The activity of a peer. since: time of a signal, else 0. A peer whose guard does not run is deaf."""
    record = peer.record
    is_deaf = now - peer.pulse_at > record["limit_s"] / 2
    return Activity(
        rank,
        now - max(peer.progress_at, since),
        record["limit_s"],
        record["is_waiting"] and not is_deaf,
        is_deaf,
        record["doing"],
        record["collectives"],
    )


def find_stall(
    ranks: list[Activity], describe: Callable[[int], str], grace_s: float = math.inf
) -> tuple[str, tuple[int, ...]] | None:
    """(cause, ranks at fault) if a rank holds up the job, else None. ranks: this rank first.

    describe(rank): its step and activity in words; grace_s: limit of all ranks after a signal.
    """
    late = [one for one in ranks if one.quiet_s >= min(one.limit_s, grace_s)]
    stuck = [one for one in late if not one.is_waiting]
    if not stuck and len(late) < len(ranks):
        return None
    if stuck:
        worst = max(stuck, key=lambda one: one.quiet_s)
        note = "its process does not answer; " if worst.is_deaf else ""
        cause = f"no progress for {worst.quiet_s:.0f} s; the laggard is rank {worst.rank}: {note}"
        return cause + describe(worst.rank), tuple(one.rank for one in stuck)
    behind, ahead = (extreme(ranks, key=lambda one: one.collectives) for extreme in (min, max))
    if behind.collectives < ahead.collectives:
        cause = (
            f"the ranks are out of step: rank {behind.rank} entered {behind.collectives} collectives, "
            f"another {ahead.collectives}; it is {describe(behind.rank)}"
        )
        return cause, (behind.rank,)
    if len({one.doing for one in ranks}) > 1:
        words = sorted(f"rank {one.rank} is {describe(one.rank)}" for one in ranks)
        return f"the ranks are out of step: {'; '.join(words)}", ()
    cause = (
        f"no progress for {min(one.quiet_s for one in ranks):.0f} s: every rank waits in the same place "
        f"({ranks[0].doing}); the connection between them may be lost"
    )
    return cause, ()
