"""Check every acceptance criterion of corrector, students and steady prior on the results of a finished run.

    python -m bench.acceptance --run runs/small

Reads RUN/report/results.json (`make report`). Prints criterion, value with its 95 % interval over initial
conditions, bound, and pass or MISS; a question mark means that the bound lies inside the interval. The exit
status is 1 if a criterion is missed or undefined, if the report has no record of passed gates, or if
results.json is not the file of that record. Bounds are fixed here; none comes from the run's configuration.
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

from ups.evaluation.claims import Interval, at, point
from ups.report.leaderboard import read_report


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


def by_lead(row: dict[str, Any], name: str) -> dict[str, list]:
    return {
        end: row[f"{name}_by_lead{suffix}"]
        for end, suffix in (("value", ""), ("low", "_low"), ("high", "_high"))
    }


def extreme(lists: dict[str, list], choose: Any) -> Interval:
    """The smallest or largest entry with its interval; undefined if one is."""
    known = [value for value in lists["value"] if value is not None]
    return (
        at(lists, lists["value"].index(choose(known))) if len(known) == len(lists["value"]) else point(None)
    )


def calibration(
    number: str, model: str, row: dict[str, Any], where: str, exact: dict[str, Any]
) -> Iterator[tuple]:
    """Yield the criteria of a calibrated ensemble.

    exact: the same row of exact draws, or {}. Refuses the mean in place of samples, one spread for all,
    members of another law.
    """
    yield f"{number} {model}: outliers over their expectation, {where}", row["outlier_fraction"], 0.75, 1.25
    yield (
        f"{number} {model}: rank histogram ratio, {where}",
        row["rank_ratio"],
        *reach(exact.get("rank_ratio"), 0.5, 2.0, 0.5),
    )
    # one spread for all
    yield (
        f"{number} {model}: slope of error over binned spread, {where}",
        row["spread_slope"],
        *near(exact.get("spread_slope"), 0.9, 1.1),
    )
    for level in (50, 90):
        low, high = level / 100 - 0.05, min(level / 100 + 0.05, 1.0)
        yield (
            f"{number} {model}: share in the {level} % interval, {where}",
            row[f"coverage_{level}"],
            low,
            high,
        )


def rollout(number: str, model: str, entry: dict[str, Any]) -> Iterator[tuple]:
    """Yield the criteria of a corrected rollout.

    Refuses spread that does not grow with the error, and a mean that the correction spoils: the mean of M
    members of the right law has sqrt(1 + 1 / M) times the error of the best single forecast.
    """
    row, versus = entry["models"][model], entry["comparisons"][f"{model} / operator"]
    law = entry["comparisons"].get("exact / operator", {})
    leads, means, best = (
        by_lead(row, "ssr"),
        versus["nrmse_mean_by_lead"],
        math.sqrt(1 + 1 / entry["members"]),
    )
    # the closer bound is for chaos that is observed coarsely
    slack = 0.1 if entry["checks"]["long"].get("climate") else 0.2
    yield f"{number}b {model}: spread/skill over the rollout, smallest", extreme(leads, min), 1 - slack, None
    yield f"{number}b {model}: spread/skill over the rollout, largest", extreme(leads, max), None, 1 + slack
    yield from calibration(f"{number}b", model, row, "rollout", entry["models"].get("exact", {}))
    exact = law.get("nrmse_mean_by_lead")
    yield (
        f"{number}c {model}: nRMSE of the mean over the operator's, first lead",
        at(means, 0),
        *reach(exact and at(exact, 0), None, 1.01 * best, 0.01),
    )
    later, exact = (
        {end: values[1:] or values for end, values in lists.items()} if lists else None
        for lists in (means, exact)
    )
    yield (
        f"{number}c {model}: nRMSE of the mean over the operator's, worst later lead",
        extreme(later, max),
        *reach(exact and extreme(exact, max), None, best, 0.01),
    )
    yield f"{number}g {model}: trajectories with NaN or inf", point(row["nonfinite_trajectories"]), None, 0.0
    long = entry["checks"]["long"]
    yield (
        f"{number}g {model}: members blown up within {long['frames']} frames, where the operator's are not",
        point(float(max(0, long["blown_up"][model] - long["blown_up"]["operator"]))),
        None,
        0.0,
    )
    # refuses members that smooth as their operator does, that freeze, that grow
    if climate := long.get("climate"):
        ours, operator = (climate[name]["spectrum_error"] for name in (model, "operator"))
        ratio = None if None in (ours, operator) else ours / operator
        # one half of the data beside the other has this
        chance = 2 * climate["truth"]["spectrum_error"] / operator if "truth" in climate and operator else 0.0
        yield (
            f"{number}j {model}: spectrum error of long rollouts over the operator's",
            point(ratio),
            None,
            max(0.5, chance),
        )
        for what in ("memory", "variance"):
            yield (
                f"{number}j {model}: {what} of long rollouts over the truth's",
                point(climate[model][what]),
                0.8,
                1.25,
            )


def exact(number: str, model: str, entry: dict[str, Any], bound: float) -> Iterator[tuple]:
    """Yield the criteria where the law is known.

    Refuses an ensemble twice too wide, a single forecast, and a forecast that ignores its state, at the lead
    where it fails.
    """
    if versus := entry["comparisons"].get(f"{model} / exact"):
        leads, law = (by_lead(entry["models"][name], "ssr") for name in (model, "exact"))
        yield (
            f"{number}h {model}: CRPS over that of exact draws, worst lead",
            extreme(versus["crps_by_lead"], max),
            None,
            bound,
        )
        for score in ("energy_score", "trajectory_score"):
            yield (
                f"{number}h {model}: {score.replace('_', ' ')} over that of exact draws",
                versus[score],
                None,
                bound,
            )
        one_step = entry["checks"]["crps_over_exact"][model]
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


def corrector(entry: dict[str, Any]) -> Iterator[tuple]:
    ours, checks, versus = entry["models"]["corrector"]["one_step"], entry["checks"], entry["comparisons"]
    cheap, dressed = versus[f"corrector / {entry['best_cheap']}"], versus["corrector / dressed_conditional"]
    law = entry["models"].get("exact", {}).get("one_step", {})
    # refuse the conditional Gaussian in its place, which has the marginals and no structure
    if not law:  # else a cheap one may be the exact law: the corrector is held to that itself (2h)
        yield f"2a fair CRPS over the best cheap ensemble ({entry['best_cheap']})", cheap["crps"], None, 0.97
        yield "2a energy score over the conditional Gaussian's (B2)", dressed["energy_score"], None, 0.9
    yield (
        "2a residual spectrum error over B2's",
        dressed.get("residual_spectrum_error", point(None)),
        None,
        0.9,
    )
    # refuse spreads that are right on average and wrong at every start
    yield "2b spread/skill one step ahead, all starts", ours["ssr"], 0.9, 1.1
    yield "2b spread/skill one step ahead, 64 sampler steps", checks["ssr_of_64_steps"], 0.9, 1.1
    slack = 0.05 if law else 0.1  # where the law is known, the closer bound
    for index, part in enumerate(ours["by_start"]):
        where = f"{part['first']}" if part["first"] == part["last"] else f"{part['first']} to {part['last']}"
        exact_part = law["by_start"][index]["ssr"] if law else None  # of few windows
        yield (
            f"2b spread/skill one step ahead, from frame {where}",
            part["ssr"],
            *reach(exact_part, 1 - slack, 1 + slack, slack),
        )
    yield from calibration("2b", "corrector", ours, "one step", law)
    yield from rollout("2", "corrector", entry)
    yield from exact("2", "corrector", entry, 1.05)
    spectrum = versus.get("exact / operator", {}).get("spectrum_error")
    yield (
        "2d spectrum error of members over the operator's",
        versus["corrector / operator"]["spectrum_error"],
        *reach(spectrum, None, 1.0, 0.1),
    )
    # refuses a network that ignores its conditions, and the Gaussian alone: mean and scale keep theirs
    if not law:
        yield (
            "2e CRPS lost by showing the network other conditions, of the gain over B1",
            checks["shuffled_crps_rise_over_gain"],
            0.2,
            None,
        )
    # refuses a sampler that takes spread away
    yield ("2f spread/skill, 16 steps less 64", checks["ssr_less_64_steps"], -0.02, 0.02)


def student(name: str, entry: dict[str, Any], bound: float) -> Iterator[tuple]:
    models, checks, versus = entry["models"], entry["checks"], entry["comparisons"][f"{name} / corrector"]
    its, paired = models[name], checks["pairing"][name]
    # refuse the teacher in its place
    yield f"3a {name}: evaluations per state", point(its["evaluations_per_state"]), None, 2.0
    # calls of the Gaussian and the operator count, too
    every = [models[model].get("networks_per_state") for model in ("corrector", name)]
    # two evaluations, the operator and the Gaussian are 3.1 of 34.1
    yield (
        f"3a {name}: times fewer calls of every network",
        point(every[0] / every[1] if all(every) else None),
        16.0 if name == "student_1" else 10.0,
        None,
    )
    yield (
        f"3a {name}: times faster than the teacher",
        point(models["corrector"]["ms_per_state"] / its["ms_per_state"]),
        8.0,
        None,
    )
    yield f"3b {name}: CRPS over the teacher's", versus["crps"], None, bound
    yield (
        f"3b {name}: spread/skill less the teacher's, one step",
        checks["less_than_teacher"][name],
        -0.05,
        0.05,
    )
    # refuses a student that is blind to its condition
    yield (f"3b {name}: response to another condition over the teacher's", checks["response"][name], 0.5, 1.5)
    # refuses the mean, and the teacher in one evaluation without distillation
    yield (
        f"3b {name}: energy distance less 1.1 of the teacher's",
        checks["energy_distance_excess"][name],
        None,
        checks["energy_distance_floor"],
    )
    yield (
        f"3b {name}: residual spectrum error over the teacher's",
        versus.get("residual_spectrum_error", point(None)),
        None,
        1.2,
    )
    if name == "student_1":  # of the same noise; two evaluations add noise that the teacher never saw
        yield (
            f"3c {name}: squared distance to the teacher's draw over its variance",
            paired["error"],
            None,
            0.30,
        )
        yield f"3c {name}: correlation with the teacher's draw", paired["correlation"], 0.85, None
    # refuses noise that is dead, or blown up
    yield (f"3d {name}: variance over that of the teacher", paired["variance_ratio"], 0.9, 1.1)
    yield from rollout("3e ", name, entry)
    yield from exact("3e ", name, entry, 1.08)
    if name == "student_1" and "rival" in models:
        for score in ("crps", "energy_score"):
            yield (
                f"3f {name}: {score} over the rival's (B4)",
                entry["comparisons"][f"{name} / rival"][score],
                None,
                1.0,
            )


def transient(name: str, entry: dict[str, Any]) -> Iterator[Row]:
    """Yield the criteria of the corrector and of its students."""
    rows = [
        *corrector(entry),
        *(
            row
            for which, bound in (("student_1", 1.05), ("student_2", 1.03))
            if which in entry["models"]
            for row in student(which, entry, bound)
        ),
    ]
    return (Row(name, *row) for row in rows)


def missing(results: dict[str, Any]) -> Iterator[Row]:
    """Yield a failed row for every requested stage that is missing, so that a shorter list is no better."""
    for gate in results["gates"]:
        if gate["name"].startswith("made/") and not gate["passed"]:
            yield Row(gate["task"], f"stage {gate['stage']}: there to be judged", point(None), 1.0, None)
    for name, entry in results["ensembles"].items():
        for which in ("student_1", "student_2"):
            if which not in entry["models"]:
                yield Row(name, f"3  {which}: there to be judged", point(None), 1.0, None)


def steady(name: str, entry: dict[str, Any]) -> Iterator[Row]:
    """Yield the criteria of the steady prior.

    Limits come from exact draws and from a Gaussian fitted to each case, so that a deterministic guess is
    refused also where little is uncertain.
    """
    full, nothing = entry["cases"]["full"], entry["cases"]["none"]
    mean = {
        end: None
        if full["corrector"]["nrmse_mean"][end] is None
        else full["corrector"]["nrmse_mean"][end] / full["operator"]["nrmse_mean"]["value"]
        for end in ("value", "low", "high")
    }
    yield Row(name, "all observed: nRMSE of the mean over the operator's", mean, None, 1.0)
    yield Row(
        name, "all observed: slope of error against spread", full["corrector"]["spread_slope"], 0.9, 1.1
    )
    spreads = [case["corrector"]["spread_by_lead"][0] for case in (full, nothing)]
    ratio = spreads[0] / spreads[1] if None not in spreads and spreads[1] else None
    # refuses a prior that ignores the mask
    yield Row(name, "all observed: spread over that with nothing observed", point(ratio), None, 0.1)
    for case, models in entry["cases"].items():
        if "exact" not in models["corrector"]:
            continue
        prior, dressed = models["corrector"]["exact"], models["dressed"]["exact"]
        chance = entry.get("chance", {}).get(case, {})  # of as many exact draws in the prior's place
        limit = prior["floor"] + 0.05 * max(dressed["distance"]["value"], 0.0)
        yield Row(
            name,
            f"{case}: energy distance to exact draws, {prior['fields']} fields",
            prior["distance"],
            *reach(chance.get("distance"), None, limit),
        )
        others = [
            row["exact"]["distance"]["value"]
            for model, row in models.items()
            if model not in ("corrector", "operator", entry.get("same_as"))
        ]
        cheap = min(value for value in others if value is not None)
        # refuses what is far where a cheap one is near; equal but for chance passes: one of the cheap ones
        # may be the exact law
        yield Row(
            name,
            f"{case}: energy distance to exact draws less the least of the other cheap ensembles'",
            {end: value if value is None else value - cheap for end, value in prior["distance"].items()},
            None,
            prior["floor"],
        )
        yield Row(
            name,
            f"{case}: variance of log u over the exact one",
            prior["log_trace"],
            *reach(chance.get("log_trace"), 0.9, 1.1, 0.05),
        )
        yield Row(
            name,
            f"{case}: variance of log u along the leading exact pattern",
            prior["leading"],
            *reach(chance.get("leading"), 0.9, 1.1, 0.05),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True)
    results, is_recorded = read_report(parser.parse_args().run / "report")
    rows = [row for name, entry in results["ensembles"].items() for row in transient(name, entry)]
    rows += [row for name, entry in results["steady"].items() for row in steady(name, entry)]
    rows += missing(results)
    for row in rows:
        value, low, high = row.found.values()
        shown = "undefined" if value is None else f"{value:9.4f}"
        ends = "" if low is None or low == high else f"[{low:.4f}, {high:.4f}]"
        verdict = ("pass" if row.passed else "MISS") + ("" if row.is_sure else "?")
        print(f"{row.task:17} {row.criterion:83} {shown:9} {ends:20} {row.bound:14} {verdict}")
    for name, entry in results["steady"].items():
        if entry.get("same_as"):
            print(
                f"{name}: the prior serves by {entry['same_as']}, which is left out of the cheap ensembles "
                "beside it: no criterion compares it with itself"
            )
    if not is_recorded:
        print(
            "The report has no record (done.json), as a gate failed: whether results.json was altered is not "
            "known"
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
