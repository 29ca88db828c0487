"""Search the settings of a model on validation: whole settings first, then single changes, then finals.

Two thirds of the time are for trials of equal length: first settings that differ in kind, then changes on
top of the best of them, each kept if validation improves. The best start and the two best others share the
last third, each trained anew with all of its costs: changes that win in short trials can lose in the end,
all of them together. Few long trials rank better than many: 70 trials of 1 s for 180 s ended on noise.

The finals compare errors at the end of a whole training (`predicted`), not those of their trials: a small
network leads after a short time and a large one in the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Changes = dict[str, Any]  # setting -> value
FINALISTS = 3
MAX_EXPONENT = 1.0  # of error over time; short trials, before the first learning, seem to fall faster


@dataclass
class Trial:
    """Result of one training of a search. error: on validation; seconds: charged to the search."""

    error: float
    steps: int
    seconds: float


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

    starts: whole settings, all of them tried. changes: single ones, the most promising first; no more are
    tried when two thirds of the time are spent. run(settings, seconds, is_whole) trains; with is_whole all
    costs of the settings are charged, in other trials only steps. It raises ValueError for settings that do
    not fit the data. Raises ValueError if fewer than two settings reached a step.
    """
    trials: list[dict] = []
    length = 2 / 3 * seconds / (len(starts) + len(changes))

    def attempt(settings: Changes, length: float, is_whole: bool) -> float:
        """Return the validation error of one trial; inf if the settings do not fit or reach no step."""
        try:
            trial = run(settings, length, is_whole)
        except ValueError as misfit:  # a grid that does not halve so often, more modes than it has
            say(f"  left out {settings}: {misfit}")
            return math.inf
        error = trial.error if trial.steps and math.isfinite(trial.error) else math.inf
        trials.append(
            {
                "settings": settings,
                "given": length,
                "val": error,
                "steps": trial.steps,
                "seconds": trial.seconds,
            }
        )
        say(f"  {error:9.2e} after {trial.steps} steps: {settings or 'as it starts'}")
        return error

    error, best = min(((attempt(start, length, False), start) for start in starts), key=lambda pair: pair[0])
    for number, change in enumerate(changes):
        if sum(trial["seconds"] for trial in trials) >= 2 / 3 * seconds:
            say(f"  no time for {len(changes) - number} of {len(changes)} changes")
            break
        settings = {**best, **change}
        if settings not in [trial["settings"] for trial in trials]:
            found = attempt(settings, length, False)
            error, best = (found, settings) if found < error else (error, best)
    ranked = [trial["settings"] for trial in sorted(trials, key=lambda trial: trial["val"]) if trial["steps"]]
    if len(ranked) < 2:
        raise ValueError(
            f"a search of {seconds:g} s for {len(starts) + len(changes)} settings came to a training step in "
            f"fewer than two; expected time to compare some that fit. Give more (--search), or a smaller "
            f"task."
        )
    start = next((settings for settings in ranked if settings in starts), None)
    finalists = sorted(ranked, key=lambda settings: settings != start)[:FINALISTS]
    for settings in finalists:
        attempt(settings, seconds / 3 / len(finalists), True)
    scored = [(predicted(trials, settings, budget), settings) for settings in finalists]
    say("  predicted: " + ", ".join(f"{value:.2e}" for value, _ in scored))
    error, best = min(scored, key=lambda pair: pair[0])
    return {
        "changes": best,
        "val": error,
        "tried": len(trials),
        "seconds": sum(trial["seconds"] for trial in trials),
        "trials": trials,
        "made": time.strftime("%Y-%m-%d"),
    }
