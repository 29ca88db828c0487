"""Which rank holds up the others, from the heartbeats of all ranks.

A rank that waits for others (in a collective) is never at fault. At fault is a rank that does not wait and
has made no progress for its limit, or that entered fewer collectives than the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RankStatus:
    """A rank that has not ended. quiet_s: time since its last progress or, if later, since a signal; is_deaf:
    whether even its guard is silent.
    """

    rank: int
    quiet_s: float
    limit_s: float
    is_waiting: bool
    is_deaf: bool
    doing: str
    collectives: int


def find_stall(
    ranks: list[RankStatus], describe: Callable[[int], str], grace_s: float = math.inf
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
