"""Every acceptance criterion of the corrector, the student and the steady prior, from the results of a finished run.

    python -m bench.acceptance --run runs/small

Reads RUN/report/results.json (`make report`). Prints criterion, figure, bound, and pass or MISS; exit status 1 if any is missed.
The bounds are those that the stages were designed to; none is read from the run's configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str, float | None, str, bool]   # task, criterion, figure, bound, passed


def transient(name: str, entry: dict[str, Any]) -> Iterator[Row]:
    """Criteria of the corrector and of its students."""
    models, checks, versus = entry["models"], entry["checks"], entry["comparisons"]
    ours, operator = models["corrector"], models["operator"]

    def row(what: str, value: float | None, low: float | None, high: float | None) -> Row:
        bound = f">= {low:g}" if high is None else f"<= {high:g}" if low is None else f"{low:g} to {high:g}"
        passed = value is not None and (low is None or value >= low) and (high is None or value <= high)
        return name, what, value, bound, passed

    cheap = versus[f"corrector / {entry['best_cheap']}"]["crps"]["value"]
    dressed = versus["corrector / dressed_conditional"]
    structure = min(dressed[key]["value"] for key in ("energy_score", "residual_spectrum_error") if key in dressed)
    is_tie = cheap is not None and cheap <= 1.0 and structure <= 0.9
    yield name, f"2a fair CRPS over the best cheap ensemble ({entry['best_cheap']})", cheap, "<= 0.97, or the tie clause", bool(
        cheap is not None and cheap <= 0.97) or is_tie
    yield row("2a tie clause: energy score or residual spectrum over B2", structure, None, 0.9)
    yield row("2b spread/skill one step ahead", ours["one_step"]["ssr"]["value"], 0.9, 1.1)
    leads = [value for value in ours["ssr_by_lead"] if value is not None]
    yield row("2b spread/skill over the rollout, smallest", min(leads), 0.8, None)
    yield row("2b spread/skill over the rollout, largest", max(leads), None, 1.2)
    yield row("2b rank histogram ratio one step ahead", ours["one_step"]["rank_ratio"]["value"], 0.5, 2.0)
    yield row("2b outliers over their expectation", ours["one_step"]["outlier_share"]["value"], 0.75, 1.25)
    excess = [a / b for a, b in zip(ours["nrmse_mean_by_lead"], operator["nrmse_mean_by_lead"], strict=True)]
    yield row("2c nRMSE of the mean over the operator's, first lead", excess[0], None, 1.01)
    yield row("2c nRMSE of the mean over the operator's, worst later lead", max(excess[1:], default=excess[0]), None, 1.0)
    yield row("2d spectrum error of members over the operator's",
              ours["spectrum_error"]["value"] / operator["spectrum_error"]["value"], None, 1.0)
    yield row("2e CRPS lost by shuffled conditions, of the gain over B1", checks["shuffled_crps_rise_over_gain"], 0.2, None)
    yield row("2f spread/skill, 16 steps less 64", abs(checks["ssr_same_cases"] - checks["ssr_of_64_steps"]), None, 0.02)
    yield row("2g trajectories with NaN or inf", float(ours["nonfinite_trajectories"]), None, 0.0)
    for student, bound in (("student_1", 1.05), ("student_2", 1.03)):
        if student not in models:
            continue
        its = models[student]
        yield row(f"3a {student}: evaluations per state", its["evaluations_per_state"], None, 2.0)
        yield row(f"3a {student}: times faster than the teacher", ours["ms_per_state"] / its["ms_per_state"], 8.0, None)
        yield row(f"3b {student}: CRPS over the teacher's", versus[f"{student} / corrector"]["crps"]["value"], None, bound)
        yield row(f"3b {student}: spread/skill less the teacher's, one step", abs(
            its["one_step"]["ssr"]["value"] - ours["one_step"]["ssr"]["value"]), None, 0.05)
        floor = checks["energy_distance_floor"]
        yield row(f"3b {student}: energy distance less 1.1 teacher's less noise floor", its["one_step"]["energy_distance"]
                  - 1.1 * max(ours["one_step"]["energy_distance"], 0.0) - floor, None, 0.0)
        ratio = versus[f"{student} / corrector"].get("residual_spectrum_error", {}).get("value")
        yield row(f"3b {student}: residual spectrum error over the teacher's", ratio, None, 1.2)
    for student, found in checks["pairing"].items():
        if student == "student_1":
            yield row("3c pairing: squared distance to the teacher's draw over its variance", found["error"], None, 0.30)
            yield row("3c pairing: correlation", found["correlation"], 0.85, None)
    if {"student_1", "rival"} <= models.keys():
        yield row("3f student_1 CRPS over the rival's (B4)", versus["student_1 / rival"]["crps"]["value"], None, 1.0)
        yield row("3f student_1 energy score over the rival's", versus["student_1 / rival"]["energy_score"]["value"], None, 1.0)


def steady(name: str, entry: dict[str, Any]) -> Iterator[Row]:
    """Criteria of the steady prior."""
    full = entry["cases"]["full"]
    ratio = full["corrector"]["nrmse_mean"]["value"] / full["operator"]["nrmse_mean"]["value"]
    yield name, "all observed: nRMSE of the mean over the operator's", ratio, "<= 1", ratio <= 1.0
    slope = full["corrector"]["spread_skill_bins"]["slope"]
    yield name, "all observed: slope of error against spread", slope, "0.9 to 1.1", slope is not None and 0.9 <= slope <= 1.1
    for case, models in entry["cases"].items():
        if "exact" not in models["corrector"]:
            continue
        prior, dressed = models["corrector"]["exact"], models["dressed"]["exact"]
        limit = 1.5 * prior["between"] + 0.05 * dressed["distance"]
        yield (name, f"{case}: energy distance to {entry['truth_members']} exact draws", prior["distance"], f"<= {limit:.4f}",
               prior["distance"] <= limit)
        # of log u, what the prior models: that of u is told to a factor of trace_between by as many exact draws
        yield (name, f"{case}: variance of log u over the exact one (of u: {prior['trace']:.2f}; exact halves "
               f"{prior['trace_between']:.2f})", prior["log_trace"], "0.9 to 1.1", 0.9 <= prior["log_trace"] <= 1.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    path = parser.parse_args().run / "report" / "results.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for name, entry in results["ensembles"].items() for row in transient(name, entry)]
    rows += [row for name, entry in results["steady"].items() for row in steady(name, entry)]
    for task, what, value, bound, passed in rows:
        shown = "undefined" if value is None else f"{value:9.4f}"
        print(f"{task:20} {what:83} {shown} {bound:28} {'pass' if passed else 'MISS'}")
    missed = sum(not row[-1] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} criteria met")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
