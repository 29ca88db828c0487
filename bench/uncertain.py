"""Compare ensembles with exact draws, over runs with different seeds: a table of docs/results.md.

    make train CONFIG=configs/uncertain.yaml RUN=uncertain
    make train CONFIG=configs/uncertain.yaml RUN=uncertain_1 ARGS="run.seed=1"
    python -m bench.uncertain --runs runs/uncertain runs/uncertain_1

Reads the results in RUN/report/. For every task and model it prints: the ratio of fair CRPS to that of exact
draws (to the operator's if no law is known), over all leads and at the worst lead, as the mean over runs with
the widest interval of any run; smallest and largest spread/skill over leads and runs, also of exact draws;
evaluations per state of the sampling network and of all networks. The exit status is 1 if the runs differ in
data, trajectories, leads or members, or if two have the same seed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.command import parser_of
from bench.table import interval, mean
from ups.evaluation.claims import at
from ups.report.report import check_results
from ups.report.tables import label, markdown_table
from ups.results import FACTS, Entry, Interval, Results, Series, load

HEAD = ("model", "CRPS over {}", "worst lead", "spread/skill by lead", "evaluations")
NEEDED = {  # of results.json
    "run": str,
    "protocol": {"split": str, "context_frames": int, "seed": int},
    "training": dict,
    "ensembles": {"*": dict},
}


def read(folder: Path) -> Results:
    """Return a run's results. Raises ValueError for a run without a report, or with one
    that is damaged or has no ensembles."""
    path = folder / "report" / FACTS
    try:
        found = load(path.parent)
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {error.filename}; expected the report of a finished run. Run make report "
            f"RUN={folder.name}."
        ) from None
    check_results(found.record, NEEDED, str(path))
    return found


def require_alike(runs: list[Results]) -> None:
    """Raise ValueError if the runs are not repetitions of each other."""
    kinds = [
        {
            "split": run.facts["protocol"]["split"],
            "context": run.facts["protocol"]["context_frames"],
            "data": run.facts["training"].get("data_seed"),
            **{name: alike(entry) for name, entry in run.ensembles.items()},
        }
        for run in runs
    ]
    for run, kind in zip(runs, kinds, strict=True):
        if differ := [key for key in kinds[0].keys() | kind if kinds[0].get(key) != kind.get(key)]:
            raise ValueError(
                f"{run.facts['run']} and {runs[0].facts['run']} differ in {', '.join(sorted(differ))}; "
                "expected runs of the same data, judged alike. Name others."
            )
    seeds = [run.facts["protocol"]["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"the runs have the seeds {seeds}; expected each once. A run that is there twice is no second "
            f"one."
        )


def alike(entry: Entry) -> tuple[Any, ...]:
    """What is the same for repetitions: trajectories, members, leads, models."""
    counts = [entry.number("", name) for name in ("num_trajectories", "members")]
    return *counts, leads_of(entry), sorted(entry.models())


def leads_of(entry: Entry) -> list[float]:
    return entry.by_lead("operator", "ssr").get("lead", [])


def worst_of(leads: Series) -> Interval | None:
    """The lead with the largest value; None if one is undefined or there are none."""
    values = leads.get("value") or [None]
    return None if None in values else at(leads, values.index(max(values)))


def spread_over(found: list[Interval | None]) -> str:
    """Return the mean of the values and the widest interval of any."""
    return "-" if any(one is None or None in one.values() for one in found) else interval(found)


def row(entries: list[Entry], model: str, other: str) -> list[str]:
    pair = f"{model} / {other}"
    ratios = [value for entry in entries for value in entry.by_lead(model, "ssr").get("value", [None])]
    calls = [entry.number(model, "evaluations_per_state") for entry in entries]
    return [
        label(model),
        spread_over([entry.value(pair, "crps") for entry in entries]),
        spread_over([worst_of(entry.by_lead(pair, "crps")) for entry in entries]),
        "-" if None in ratios else f"{min(ratios):.2f} to {max(ratios):.2f}",
        "-" if None in calls else f"{mean(calls):.3g}",
    ]


def table(runs: list[Results]) -> str:
    """Return a Markdown table. Raises as `require_alike`."""
    require_alike(runs)
    parts, seeds = [], ", ".join(str(run.facts["protocol"]["seed"]) for run in runs)
    for task, entry in runs[0].ensembles.items():
        is_known = "exact" in entry.models()
        other, others = ("exact", "exact draws'") if is_known else ("operator", "the operator's")
        entries, models = [run.ensembles[task] for run in runs], [*entry.models()]
        lines = [row(entries, model, other) for model in models if is_known or model != other]
        numbers = entry.number("", "num_trajectories"), len(leads_of(entry)), entry.number("", "members")
        counts = "{} initial conditions, {} leads, {} members".format(*numbers)
        head = [cell.format(others) for cell in HEAD]
        parts += [f"{task}: {counts}, {len(runs)} runs, seeds {seeds}"]
        parts += ["\n".join(markdown_table(head, lines))]
    return "\n\n".join(parts)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    try:
        print(table([read(folder) for folder in parser.parse_args().runs]))
    except ValueError as error:
        print(f"uncertain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
