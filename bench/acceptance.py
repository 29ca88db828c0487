"""Check every acceptance criterion of corrector, students and steady prior on the results of a finished run.

    python -m bench.acceptance --run runs/small

Reads the results in RUN/report/ (`make report`). Prints criterion, value with its 95 % interval over initial
conditions, bound, and pass or MISS; a question mark means that the bound lies inside the interval. The exit
status is 1 if a criterion is missed or undefined, if the report has no record of passed gates, or if its
results are not the files of that record. Bounds are fixed here; none comes from the run's configuration.
Where the law is known, exact draws set the bound of criteria that they could miss: the ends of their
interval and a margin. tests/test_acceptance.py has a fake that each criterion refuses, and
tests/test_fakes.py has exact draws that pass all of them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.evaluation.claims import at, point, unlike
from ups.report.leaderboard import read_report
from ups.results import CHANCE, OBSERVED, START, Entry, Interval, Results, Series


@dataclass(frozen=True)
class Row:
    task: str
    criterion: str
    found: Interval
    low: float | None
    high: float | None

    @property
    def passed(self) -> bool:
        value = self.found["value"]
        return (
            value is not None
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )

    @property
    def is_sure(self) -> bool:
        """Whether both ends of the interval give the same verdict as the value."""
        ends = [
            Row(self.task, self.criterion, point(self.found[end]), self.low, self.high)
            for end in ("low", "high")
        ]
        return all(end.passed == self.passed for end in ends)

    @property
    def bound(self) -> str:
        if self.low is None or self.high is None:
            return f"<= {self.high:g}" if self.low is None else f">= {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


Bounds = tuple[float | None, float | None]


def reach(exact: Interval | None, low: float | None, high: float | None, margin: float = 0.0) -> Bounds:
    """Return the given bounds, widened to the interval of exact draws and `margin` beyond it.

    Unchanged if no law is known.
    """
    if exact is None or exact["value"] is None:
        return low, high
    return (
        None if low is None else min(low, exact["low"] - margin),
        None if high is None else max(high, exact["high"] + margin),
    )


def near(exact: Interval | None, low: float, high: float) -> Bounds:
    """Return bounds around the interval of exact draws, for values that are not 1 for exact draws, such as
    the slope of error over a constant spread. They are as far from the ends of the interval as the given
    bounds from 1.
    """
    if exact is None or exact["value"] is None:
        return low, high
    return exact["low"] - (1 - low), exact["high"] + (high - 1)


def extreme(lists: Series, choose: Any) -> Interval:
    """The smallest or largest entry with its interval; undefined if one is."""
    known = [value for value in lists["value"] if value is not None]
    return (
        at(lists, lists["value"].index(choose(known))) if len(known) == len(lists["value"]) else point(None)
    )


def calibration(number: str, model: str, entry: Entry, where: str, case: str) -> Iterator[tuple]:
    """Yield the criteria of a calibrated ensemble.

    Refuses the mean in place of samples, one spread for all, members of another law.
    """
    yield (
        f"{number} {model}: outliers over their expectation, {where}",
        entry.value(model, "outlier_fraction", case),
        0.75,
        1.25,
    )
    yield (
        f"{number} {model}: rank histogram ratio, {where}",
        entry.value(model, "rank_ratio", case),
        *reach(entry.value("exact", "rank_ratio", case), 0.5, 2.0, 0.5),
    )
    # one spread for all
    yield (
        f"{number} {model}: slope of error over binned spread, {where}",
        entry.value(model, "spread_slope", case),
        *near(entry.value("exact", "spread_slope", case), 0.9, 1.1),
    )
    for level in (50, 90):
        low, high = level / 100 - 0.05, min(level / 100 + 0.05, 1.0)
        yield (
            f"{number} {model}: share in the {level} % interval, {where}",
            entry.value(model, f"coverage_{level}", case),
            low,
            high,
        )


def rollout(number: str, model: str, entry: Entry) -> Iterator[tuple]:
    """Yield the criteria of a corrected rollout.

    Refuses spread that does not grow with the error, and a mean that the correction spoils: the mean of M
    members of the right law has sqrt(1 + 1 / M) times the error of the best single forecast.
    """
    leads = entry.by_lead(model, "ssr")
    means, exact = (entry.by_lead(f"{name} / operator", "nrmse_mean") for name in (model, "exact"))
    best = math.sqrt(1 + 1 / entry.number("", "members"))
    # the closer bound is for chaos that is observed coarsely
    late = unlike(entry, model, "long")
    slack = 0.1 if late else 0.2
    yield f"{number}b {model}: spread/skill over the rollout, smallest", extreme(leads, min), 1 - slack, None
    yield f"{number}b {model}: spread/skill over the rollout, largest", extreme(leads, max), None, 1 + slack
    yield from calibration(f"{number}b", model, entry, "rollout", "rollout")
    yield (
        f"{number}c {model}: nRMSE of the mean over the operator's, first lead",
        at(means, 0),
        *reach(at(exact, 0) if exact else None, None, 1.01 * best, 0.01),
    )
    later, exact = ({end: part[1:] or part for end, part in lists.items()} for lists in (means, exact))
    yield (
        f"{number}c {model}: nRMSE of the mean over the operator's, worst later lead",
        extreme(later, max),
        *reach(extreme(exact, max) if exact else None, None, best, 0.01),
    )
    broken = entry.number(model, "nonfinite_trajectories")
    yield f"{number}g {model}: trajectories with NaN or inf", point(broken), None, 0.0
    blown_up, plain = (entry.number(name, "blown_up", "long") for name in (model, "operator"))
    yield (
        f"{number}g {model}: members blown up within {entry.number('', 'frames', 'long')} frames, where the "
        "operator's are not",
        point(float(max(0, blown_up - plain))),
        None,
        0.0,
    )
    if late:  # refuses members that smooth as their operator does, that freeze, that grow
        yield (
            f"{number}j {model}: largest difference beyond the scored leads, in margins",
            late,
            None,
            1.0,
        )


def exact(number: str, model: str, entry: Entry, bound: float) -> Iterator[tuple]:
    """Yield the criteria where the law is known.

    Refuses an ensemble twice too wide, a single forecast, and a forecast that ignores its state, at the lead
    where it fails.
    """
    if versus := entry.by_lead(f"{model} / exact", "crps"):
        leads, law = (entry.by_lead(name, "ssr") for name in (model, "exact"))
        yield (
            f"{number}h {model}: CRPS over that of exact draws, worst lead",
            extreme(versus, max),
            None,
            bound,
        )
        for score in ("energy_score", "trajectory_score"):
            yield (
                f"{number}h {model}: {score.replace('_', ' ')} over that of exact draws",
                entry.value(f"{model} / exact", score),
                None,
                bound,
            )
        one_step = entry.value(model, "crps_over_exact", "one step")
        yield f"{number}h {model}: CRPS over that of exact draws, one step", one_step, None, bound
        yield (
            f"{number}h {model}: spread/skill beside exact draws, smallest",
            extreme(leads, min),
            *reach(extreme(law, min), 0.95, None),
        )
        yield (
            f"{number}h {model}: spread/skill beside exact draws, largest",
            extreme(leads, max),
            *reach(extreme(law, max), None, 1.05),
        )


def corrector(entry: Entry) -> Iterator[tuple]:
    one, name = "one step", entry.facts["best_cheap"]
    cheap, dressed = f"corrector / {name}", "corrector / dressed_conditional"
    has_law = "exact" in entry.models(one)
    # refuse the conditional Gaussian in its place, which has the marginals and no structure
    if not has_law:  # else a cheap one may be the exact law: the corrector is held to that itself (2h)
        yield f"2a fair CRPS over the best cheap ensemble ({name})", entry.value(cheap, "crps"), None, 0.97
        found = entry.value(dressed, "energy_score")
        yield "2a energy score over the conditional Gaussian's (B2)", found, None, 0.9
    yield (
        "2a residual spectrum error over B2's",
        entry.value(dressed, "residual_spectrum_error") or point(None),
        None,
        0.9,
    )
    # refuse spreads that are right on average and wrong at every start
    yield "2b spread/skill one step ahead, all starts", entry.value("corrector", "ssr", one), 0.9, 1.1
    slack = 0.05 if has_law else 0.1  # where the law is known, the closer bound
    for case in entry.cases(START):
        first, last = case.removeprefix(START).split("-")
        yield (
            f"2b spread/skill one step ahead, from frame {first if first == last else f'{first} to {last}'}",
            entry.value("corrector", "ssr", case),
            *reach(entry.value("exact", "ssr", case), 1 - slack, 1 + slack, slack),  # of few windows
        )
    yield from calibration("2b", "corrector", entry, "one step", one)
    yield from rollout("2", "corrector", entry)
    yield from exact("2", "corrector", entry, 1.05)
    yield (
        "2d spectrum error of members over the operator's",
        entry.value("corrector / operator", "spectrum_error"),
        *reach(entry.value("exact / operator", "spectrum_error"), None, 1.0, 0.1),
    )
    # refuses a network that ignores its conditions, and the Gaussian alone: mean and scale keep theirs
    if not has_law:
        yield (
            "2e CRPS lost by showing the network other conditions, of the gain over B1",
            entry.value("", "shuffled_crps_rise_over_gain", one),
            0.2,
            None,
        )
    # refuses a sampler that takes spread away
    yield ("2f spread/skill, 16 steps less 64", entry.value("", "ssr_less_64_steps", one), -0.02, 0.02)


def student(name: str, entry: Entry, bound: float) -> Iterator[tuple]:
    one, versus = "one step", f"{name} / corrector"
    # refuse the teacher in its place
    yield f"3a {name}: evaluations per state", point(entry.number(name, "evaluations_per_state")), None, 2.0
    # calls of the Gaussian and the operator count, too
    every = [entry.number(model, "networks_per_state") for model in ("corrector", name)]
    # two evaluations, the operator and the Gaussian are 3.1 of 34.1
    yield (
        f"3a {name}: times fewer calls of every network",
        point(every[0] / every[1] if all(every) else None),
        16.0 if name == "student_1" else 10.0,
        None,
    )
    yield (
        f"3a {name}: times faster than the teacher",
        point(entry.number("corrector", "ms_per_state") / entry.number(name, "ms_per_state")),
        8.0,
        None,
    )
    yield f"3b {name}: CRPS over the teacher's", entry.value(versus, "crps"), None, bound
    yield (
        f"3b {name}: spread/skill less the teacher's, one step",
        entry.value(name, "less_than_teacher", one),
        -0.05,
        0.05,
    )
    # refuses a student that is blind to its condition
    found = entry.value(name, "response", one)
    yield (f"3b {name}: response to another condition over the teacher's", found, 0.5, 1.5)
    yield (
        f"3b {name}: residual spectrum error over the teacher's",
        entry.value(versus, "residual_spectrum_error") or point(None),
        None,
        1.2,
    )
    if name == "student_1":  # of the same noise; two evaluations add noise that the teacher never saw
        yield (
            f"3c {name}: squared distance to the teacher's draw over its variance",
            entry.value(name, "pairing/error", one),
            None,
            0.30,
        )
        found = entry.value(name, "pairing/correlation", one)
        yield f"3c {name}: correlation with the teacher's draw", found, 0.85, None
    # refuses noise that is dead, or blown up
    found = entry.value(name, "pairing/variance_ratio", one)
    yield (f"3d {name}: variance over that of the teacher", found, 0.9, 1.1)
    yield from rollout("3e ", name, entry)
    yield from exact("3e ", name, entry, 1.08)
    if name == "student_1" and "scoring" in entry.models():
        for score in ("crps", "energy_score"):
            yield (
                f"3f {name}: {score} over that of `scoring` (B4)",
                entry.value(f"{name} / scoring", score),
                None,
                1.0,
            )


def transient(entry: Entry) -> Iterator[Row]:
    """Yield the criteria of the corrector and of its students."""
    rows = [*corrector(entry)]
    for which, bound in (("student_1", 1.05), ("student_2", 1.03)):
        rows += student(which, entry, bound) if which in entry.models() else ()
    for criterion, found, low, high in rows:  # what the report does not have is undefined, and missed
        yield Row(entry.name, criterion, found or point(None), low, high)


def missing(results: Results) -> Iterator[Row]:
    """Yield a failed row for every requested stage that is missing, so that a shorter list is no better."""
    for gate in results.facts["gates"]:
        if gate["name"].startswith("made/") and not gate["passed"]:
            yield Row(gate["task"], f"stage {gate['stage']}: there to be judged", point(None), 1.0, None)
    for name, entry in results.ensembles.items():
        for which in ("student_1", "student_2"):
            if which not in entry.models():
                yield Row(name, f"3  {which}: there to be judged", point(None), 1.0, None)


def steady(entry: Entry) -> Iterator[Row]:
    """Yield the criteria of the steady prior.

    Limits come from exact draws and from a Gaussian fitted to each case, so that a deterministic guess is
    refused also where little is uncertain.
    """
    name, full, nothing = entry.name, f"{OBSERVED}full", f"{OBSERVED}none"
    plain, mean = entry.number("operator", "nrmse_mean", full), entry.value("corrector", "nrmse_mean", full)
    mean = {end: None if value is None else value / plain for end, value in mean.items()}
    yield Row(name, "all observed: nRMSE of the mean over the operator's", mean, None, 1.0)
    slope = entry.value("corrector", "spread_slope", full)
    yield Row(name, "all observed: slope of error against spread", slope, 0.9, 1.1)
    spreads = [entry.by_lead("corrector", "spread", case)["value"][0] for case in (full, nothing)]
    ratio = spreads[0] / spreads[1] if None not in spreads and spreads[1] else None
    # refuses a prior that ignores the mask
    yield Row(name, "all observed: spread over that with nothing observed", point(ratio), None, 0.1)
    for case in entry.cases(OBSERVED):
        if (distance := entry.value("corrector", "distance", case)) is None:
            continue
        words, floor = case.removeprefix(OBSERVED), entry.number("corrector", "floor", case)
        # of as many exact draws in the prior's place
        chance = {
            metric: entry.value("", metric, f"{CHANCE}{words}")
            for metric in ("distance", "log_trace", "leading")
        }
        yield Row(
            name,
            f"{words}: energy distance to exact draws, {entry.number('corrector', 'fields', case)} fields",
            distance,
            *reach(
                chance["distance"], None, floor + 0.05 * max(entry.number("dressed", "distance", case), 0.0)
            ),
        )
        others = [
            entry.number(model, "distance", case)
            for model in entry.models(case)
            if model not in ("corrector", "operator", entry.facts.get("same_as"))
        ]
        cheap = min(value for value in others if value is not None)
        # refuses what is far where a cheap one is near; equal but for chance passes: one of the cheap ones
        # may be the exact law
        yield Row(
            name,
            f"{words}: energy distance to exact draws less the least of the other cheap ensembles'",
            {end: value if value is None else value - cheap for end, value in distance.items()},
            None,
            floor,
        )
        yield Row(
            name,
            f"{words}: variance of log u over the exact one",
            entry.value("corrector", "log_trace", case),
            *reach(chance["log_trace"], 0.9, 1.1, 0.05),
        )
        yield Row(
            name,
            f"{words}: variance of log u along the leading exact pattern",
            entry.value("corrector", "leading", case),
            *reach(chance["leading"], 0.9, 1.1, 0.05),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True)
    try:
        results, is_recorded = read_report(parser.parse_args().run / "report")
    except (ValueError, OSError) as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 1
    rows = [row for entry in results.ensembles.values() for row in transient(entry)]
    rows += [row for entry in results.steady.values() for row in steady(entry)]
    rows += missing(results)
    for row in rows:
        value, low, high = row.found.values()
        shown = "undefined" if value is None else f"{value:9.4f}"
        ends = "" if low is None or low == high else f"[{low:.4f}, {high:.4f}]"
        verdict = ("pass" if row.passed else "MISS") + ("" if row.is_sure else "?")
        print(f"{row.task:17} {row.criterion:83} {shown:9} {ends:20} {row.bound:14} {verdict}")
    for name, entry in results.steady.items():
        if same := entry.facts.get("same_as"):
            print(
                f"{name}: the prior serves by {same}, which is left out of the cheap ensembles "
                "beside it: no criterion compares it with itself"
            )
    if not is_recorded:
        print(
            "The report has no record (done.json), as a gate failed: whether its results were altered is "
            "not known"
        )
    missed = sum(not row.passed for row in rows)
    unsure = sum(not row.is_sure for row in rows)
    print(
        f"{len(rows) - missed} of {len(rows)} criteria met ({unsure} marked ?: within their interval of the "
        f"bound)"
    )
    return int(missed > 0 or not rows or not is_recorded)


if __name__ == "__main__":
    sys.exit(main())
