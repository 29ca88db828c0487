"""Compare ensembles with exact draws, over runs with different seeds: a table of docs/results.md.

    make train CONFIG=configs/uncertain.yaml RUN=uncertain
    make train CONFIG=configs/uncertain.yaml RUN=uncertain_1 ARGS="run.seed=1"
    python -m bench.uncertain --runs runs/uncertain runs/uncertain_1

Reads RUN/report/results.json and RUN/STAGE/metrics.jsonl. For every task and model it prints: the ratio of
fair CRPS to that of exact draws (to the operator's if no law is known), over all leads and at the worst
lead, as the mean over runs with the widest interval of any run; smallest and largest spread/skill over
leads and runs, also of exact draws; evaluations per state of the sampling network and of all networks;
seconds of training, a student's with its teacher's. For chaotic tasks it adds the long rollouts. The exit
status is 1 if the runs differ in data, trajectories, leads or members, or if two have the same seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.acceptance import extreme
from evaluate import train_seconds
from ups.report.tables import label, markdown_table

TRAINED_BY = {
    "rival": ("rival",),
    "corrector": ("diffusion",),
    "student_1": ("diffusion", "consistency"),
    "student_2": ("diffusion", "consistency"),
}
HEAD = (
    "model",
    "CRPS over {}",
    "worst lead",
    "spread/skill by lead",
    "evaluations",
    "networks",
    "trained, s",
)
LONG_HEAD = (
    "model",
    "blown up",
    "spectrum error",
    "over the operator's",
    "memory over the truth's",
    "variance",
)

Run = dict[str, Any]  # results.json, and "seconds": stage -> of its training


def read(folder: Path) -> Run:
    """Return a run's results and training times. Raises ValueError for a run without a report."""
    path = folder / "report" / "results.json"
    if not path.is_file():
        raise ValueError(
            f"there is no {path}; expected the report of a finished run. Run make report RUN={folder.name}."
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    seconds = {
        stage: train_seconds([json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()])
        for stage in ("diffusion", "consistency", "rival")
        if (lines := folder / stage / "metrics.jsonl").is_file()
    }
    return found | {"seconds": seconds}


def require_alike(runs: list[Run]) -> None:
    """Raise ValueError if the runs are not repetitions of each other."""
    kinds = [
        {
            "split": run["protocol"]["split"],
            "context": run["protocol"]["context_frames"],
            "data": run["training"].get("data_seed"),
            **{
                name: (entry["num_trajectories"], entry["members"], entry["times"], sorted(entry["models"]))
                for name, entry in run["ensembles"].items()
            },
        }
        for run in runs
    ]
    for run, kind in zip(runs, kinds, strict=True):
        if differ := [key for key in kinds[0].keys() | kind if kinds[0].get(key) != kind.get(key)]:
            raise ValueError(
                f"{run['run']} and {runs[0]['run']} differ in {', '.join(sorted(differ))}; expected runs of "
                "the same data, judged alike. Name others."
            )
    seeds = [run["protocol"]["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"the runs have the seeds {seeds}; expected each once. A run that is there twice is no second "
            f"one."
        )


def spread_over(found: list[dict[str, float | None]]) -> str:
    """Return the mean of the values and the widest interval of any."""
    if any(None in entry.values() for entry in found):
        return "-"
    values = [entry["value"] for entry in found]
    return (
        f"{sum(values) / len(values):.3f} [{min(entry['low'] for entry in found):.3f}, "
        f"{max(entry['high'] for entry in found):.3f}]"
    )


def mean(values: list[float | None]) -> str:
    return "-" if None in values or not values else f"{sum(values) / len(values):.3g}"


def row(runs: list[Run], task: str, model: str, other: str) -> list[str]:
    entries = [run["ensembles"][task] for run in runs]
    rows, versus = (
        [entry["models"][model] for entry in entries],
        [entry["comparisons"].get(f"{model} / {other}") for entry in entries],
    )
    crps = (
        ["-", "-"]
        if None in versus
        else [
            spread_over([part["crps"] for part in versus]),
            spread_over([extreme(part["crps_by_lead"], max) for part in versus]),
        ]
    )
    ratios = [value for part in rows for value in part["ssr_by_lead"]]
    trained = (
        [sum(run["seconds"][stage] for stage in TRAINED_BY[model]) for run in runs]
        if model in TRAINED_BY
        else []
    )
    return [
        label(model),
        *crps,
        "-" if None in ratios else f"{min(ratios):.2f} to {max(ratios):.2f}",
        *(mean([part.get(key) for part in rows]) for key in ("evaluations_per_state", "networks_per_state")),
        mean(trained),
    ]


def long_row(runs: list[Run], task: str, model: str) -> list[str]:
    longs = [run["ensembles"][task]["checks"]["long"] for run in runs]
    climates = [long["climate"][model] for long in longs]
    errors, plain = (
        [found[name]["spectrum_error"] for found in (long["climate"] for long in longs)]
        for name in (model, "operator")
    )
    ratios = [None if None in pair else pair[0] / pair[1] for pair in zip(errors, plain, strict=True)]
    return [
        label(model),
        mean([float(long["blown_up"].get(model, 0)) for long in longs]),
        mean(errors),
        mean(ratios),
        mean([found["memory"] for found in climates]),
        mean([found["variance"] for found in climates]),
    ]


def table(runs: list[Run]) -> str:
    """Return a Markdown table. Raises as `require_alike`."""
    require_alike(runs)
    parts = []
    for task, entry in runs[0]["ensembles"].items():
        other = "exact" if "exact" in entry["models"] else "operator"
        head = [cell.format("exact draws'" if other == "exact" else "the operator's") for cell in HEAD]
        lines = [
            row(runs, task, model, other) for model in entry["models"] if model != other or other == "exact"
        ]
        title = (
            f"{task}: {entry['num_trajectories']} initial conditions, {len(entry['times'])} leads, "
            f"{entry['members']} "
            f"members, {len(runs)} runs, seeds {', '.join(str(run['protocol']['seed']) for run in runs)}"
        )
        parts += [title, "\n".join(markdown_table(head, lines))]
        if climate := entry["checks"]["long"].get("climate"):
            parts += [
                f"Rollouts of {entry['checks']['long']['frames']} frames:",
                "\n".join(markdown_table(LONG_HEAD, [long_row(runs, task, model) for model in climate])),
            ]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    try:
        print(table([read(folder) for folder in parser.parse_args().runs]))
    except ValueError as error:
        print(f"uncertain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
