"""Search the settings of a model on validation: hill climbing, then successive halving.

A third of the time is for climbing, in equal parts for every start: changes are tried one after the other
on top of the best settings so far, each for the same time, and kept if validation improves. Short trainings
prefer small networks and bases that are good before training. Therefore points of the climb, every start
among them, share the second third of the time; and the best of each branch, or the best two of a single
branch, share the last. So the winner was trained from the start for a sixth of the time, with all of its
costs included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Changes = dict[str, Any]  # setting -> value
FINALISTS = 4


@dataclass
class Trial:
    """Result of one training of a search. error: on validation; seconds: charged to the search."""

    error: float
    steps: int
    seconds: float


def search(
    starts: list[Changes],
    changes: list[Changes],
    run: Callable[[Changes, float, bool], Trial],
    seconds: float,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return the best settings found in `seconds`: changes, val, tried, seconds, trials.

    starts: settings so different that short trials cannot rank them; changes: {} is the start itself.
    run(settings, seconds, is_whole) trains; with is_whole all costs of the settings are charged, in a short
    trial of the climb only steps. It raises ValueError for settings that do not fit the data. Raises
    ValueError if fewer than two settings reached a step.
    """
    trials: list[dict] = []

    def attempt(settings: Changes, share: float, is_whole: bool) -> Trial | None:
        try:
            trial = run(settings, share, is_whole)
        except ValueError as misfit:  # a grid that does not halve so often, more modes than it has
            say(f"  left out {settings}: {misfit}")
            return None
        error = trial.error if math.isfinite(trial.error) else math.inf
        trials.append(
            {
                "settings": settings,
                "given": share,
                "val": error,
                "steps": trial.steps,
                "seconds": trial.seconds,
            }
        )
        return Trial(error, trial.steps, trial.seconds)

    def climb(start: Changes, until: float) -> list[Changes]:
        """Return the points of a climb that improved, beginning with the start if it fits."""
        best, error, points = start, math.inf, []
        for number, change in enumerate(changes):
            left = until - sum(trial["seconds"] for trial in trials)
            if left <= 0:
                say(f"  no time for {len(changes) - number} of {len(changes)} changes")
                break
            settings = {**best, **change}
            if settings == best and number:
                continue
            trial = attempt(settings, left / (len(changes) - number), False)
            if trial is not None and trial.steps and (trial.error < error or not points):
                best, error = settings, trial.error
                points.append(settings)
                say(f"  {error:9.2e} {best or 'as it starts'}")
        return points

    third = seconds / 3
    branches = [climb(start, third * (number + 1) / len(starts)) for number, start in enumerate(starts)]
    if sum(trial["steps"] > 0 for trial in trials) < 2:
        raise ValueError(
            f"a search of {seconds:g} s for {len(changes)} settings came to a training step in fewer than "
            f"two; "
            f"expected time to compare some that fit. Give more (--search), or a smaller task."
        )
    each = FINALISTS // len(starts)
    branches = [
        points if len(points) <= each else [points[0], *points[1 - each :]] for points in branches if points
    ]
    error = min(trial["val"] for trial in trials)
    for num_left in (1 if len(branches) > 1 else 2, 1):
        num = sum(map(len, branches))
        if num == 1:
            break
        scored = [
            sorted(
                (trial.error, number)
                for number, settings in enumerate(points)
                if (trial := attempt(settings, third / num, True)) is not None
            )
            for points in branches
        ]
        if not any(scored):
            raise ValueError(
                f"no settings train for {third / num:g} s without an error; expected some that do. Look at "
                f"what "
                "was left out."
            )
        say(
            f"  at {third / num:.1f} s: "
            + "; ".join(", ".join(f"{value:.2e}" for value, _ in part) for part in scored)
        )
        error = min(part[0][0] for part in scored if part)
        branches = [
            [points[number] for _, number in part[:num_left]]
            for points, part in zip(branches, scored, strict=True)
        ]
        if num_left == 1:  # of the branches' best: the best of all comes first
            order = sorted((part[0][0], number) for number, part in enumerate(scored) if part)
            branches = [branches[number] for _, number in order]
    return {
        "changes": branches[0][0],
        "val": error,
        "tried": len(trials),
        "seconds": sum(trial["seconds"] for trial in trials),
        "trials": trials,
        "made": time.strftime("%Y-%m-%d"),
    }
