"""Search the settings of a model on validation: hill climbing, then successive halving.

A third of the time is for climbing, in equal parts for every start: changes are tried one after the other
on top of the best settings so far, each for the same time, and kept if validation improves. Points of every
climb share the second third of the time, and the best two of them the last. So the winner was trained from
the start for a sixth of the time, with all of its costs included.

The finals compare predicted errors at the end of a whole training, not those of their trials: a small
network leads after a short time and a large one in the end. An error falls as a power of the time; its
exponent is that between the two longest trials of the settings (`predicted`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Changes = dict[str, Any]  # setting -> value
FINALISTS = 6
MAX_EXPONENT = 1.0  # of error over time; short trials, before the first learning, seem to fall faster


@dataclass
class Trial:
    """Result of one training of a search. error: on validation; seconds: charged to the search."""

    error: float
    steps: int
    seconds: float


def ends_of(points: list[Changes], num: int) -> list[Changes]:
    """At most `num` points of a climb: the last ones, and its start if that is not the only one."""
    return points[-1:] if num == 1 else [*points[:1], *points[1:][1 - num :]]


def predicted(trials: list[dict], settings: Changes, budget: float) -> float:
    """The error of `settings` after `budget` seconds, from their trials of different length. It is that of
    the longest trial if there is no other, or if more time made it worse.

    e(budget) = e(t) (budget / t)^-b, with b of the two longest trials and at most MAX_EXPONENT.
    """
    of_settings = {trial["given"]: trial["val"] for trial in trials if trial["settings"] == settings}
    (last, error), *before = sorted(of_settings.items(), reverse=True)
    if not before or not math.isfinite(error) or not math.isfinite(before[0][1]) or error <= 0:
        return error
    exponent = math.log(before[0][1] / error) / math.log(last / before[0][0])
    return error * max(1.0, budget / last) ** -min(max(exponent, 0.0), MAX_EXPONENT)


def search(
    starts: list[Changes],
    changes: list[Changes],
    run: Callable[[Changes, float, bool], Trial],
    seconds: float,
    budget: float,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Return the best settings found in `seconds` for a training of `budget` seconds: changes, val, tried,
    seconds, trials.

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
    each = max(1, FINALISTS // len(starts))
    finalists = [point for points in branches for point in ends_of(points, each)]
    error = min(trial["val"] for trial in trials)
    for num_left in (2, 1):
        if len(finalists) == 1:
            break
        length = third / len(finalists)
        scored = sorted(
            (predicted(trials, settings, budget), number)
            for number, settings in enumerate(finalists)
            if attempt(settings, length, True) is not None
        )
        if not scored:
            raise ValueError(
                f"no settings train for {length:g} s without an error; expected some that do. Look at what "
                "was left out."
            )
        say(f"  predicted from {length:.1f} s: " + ", ".join(f"{value:.2e}" for value, _ in scored))
        error = scored[0][0]
        finalists = [finalists[number] for _, number in scored[:num_left]]
    return {
        "changes": finalists[0],
        "val": error,
        "tried": len(trials),
        "seconds": sum(trial["seconds"] for trial in trials),
        "trials": trials,
        "made": time.strftime("%Y-%m-%d"),
    }
