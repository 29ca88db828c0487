"""One search of settings for every model of a comparison, on validation alone: climb, then halve.

A third of the time climbs: one change after the other is tried on top of what is best so far, each in an equal share of what
is left, and kept where validation improves. So short a training prefers small networks and fast fits, so the start and the
last points of the climb, four at most, then share the second third, and the best two of these the last: the winner has been
trained for a sixth of the time, from the start, everything that it costs included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Changes = dict[str, Any]   # setting -> value
FINALISTS = 4


@dataclass
class Trial:
    """What one training of a search came to. error: on validation; seconds: of the clock that it took of the search."""

    error: float
    steps: int
    seconds: float


def search(start: Changes, changes: list[Changes], run: Callable[[Changes, float, bool], Trial], seconds: float,
           say: Callable[[str], None] = print) -> dict[str, Any]:
    """The best settings found in `seconds`, and how: changes, val, tried, seconds, trials.

    run(settings, seconds, is_whole): trains; is_whole: everything is counted that settings cost, for a short trial of the
    climb only steps are. It raises ValueError for settings that do not fit the data. Raises ValueError itself where fewer
    than two settings got as far as a step.
    """
    trials: list[dict] = []

    def attempt(settings: Changes, share: float, is_whole: bool) -> Trial | None:
        try:
            trial = run(settings, share, is_whole)
        except ValueError as misfit:   # a grid that does not halve so often, more modes than it has
            say(f"  left out {settings}: {misfit}")
            return None
        error = trial.error if math.isfinite(trial.error) else math.inf
        trials.append({"settings": settings, "given": share, "val": error, "steps": trial.steps, "seconds": trial.seconds})
        return Trial(error, trial.steps, trial.seconds)

    best, error, points, third, is_start_sound = start, math.inf, [], seconds / 3, False
    for number, change in enumerate(changes):
        left = third - sum(trial["seconds"] for trial in trials)
        if left <= 0:
            say(f"  no time for {len(changes) - number} of {len(changes)} changes")
            break
        settings = {**best, **change} if change else start   # no change: the start, wherever it stands in the list
        if settings == best and points:
            continue
        trial = attempt(settings, left / (len(changes) - number), False)
        if trial is None or not trial.steps:
            continue
        is_start_sound |= settings == start
        if trial.error < error or not points:
            best, error = settings, trial.error
            points.append(settings)
            say(f"  {error:9.2e} {best or 'as it starts'}")
    if sum(trial["steps"] > 0 for trial in trials) < 2:
        raise ValueError(f"a search of {seconds:g} s for {len(changes)} settings came to a training step in fewer than two; "
                         f"expected time to compare some that fit. Give more (--search), or a smaller task.")
    latest = [settings for settings in points if settings != start]
    finalists = [start, *latest[1 - FINALISTS:]] if is_start_sound else latest[-FINALISTS:]
    for count in (FINALISTS, FINALISTS // 2) if len(finalists) > 1 else ():
        share = third / len(finalists)
        scored = [(trial.error, number) for number, settings in enumerate(finalists)
                  if (trial := attempt(settings, share, True)) is not None]
        if not scored:
            raise ValueError(f"no settings train for {share:g} s without an error; expected some that do. Look at what was "
                             "left out.")
        say(f"  at {share:.1f} s: " + ", ".join(f"{value:.2e}" for value, _ in scored))
        finalists = [finalists[number] for _, number in sorted(scored)[:count // 2]]
        error = min(scored)[0]
    return {"changes": finalists[0], "val": error, "tried": len(trials),
            "seconds": sum(trial["seconds"] for trial in trials), "trials": trials,
            "made": time.strftime("%Y-%m-%d")}
