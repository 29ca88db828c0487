"""The leaderboard: the reports of all runs on one split. Runs with the same protocol and data share a table.

python -m bench.leaderboard [--runs runs] [--split val]
"""

import json
import math
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ups.common.files import DamagedError, file_hash, read_sealed
from ups.common.text import markdown, number, printable
from ups.config.command import read_command, run_script
from ups.evaluation.gates import error_of, horizon_of, not_passed
from ups.report.report import COMPARED, check_results
from ups.report.tables import markdown_table
from ups.results import AGAIN, FACTS, TABLE, Entry, Results, load
from ups.training.artifact import DONE

OPTIONS = {
    "--runs": {"default": "runs", "help": "folder of all runs"},
    "--split": {"default": "test", "choices": ["test", "val"]},
}
SHARED = ("grid", "parameters")  # of a task that is compared
COLUMNS = ("base", "network", "rates", "seed", "parameters", "seconds", "git")  # beside the errors
COUNTED = ("num_frames_predicted", "num_trajectories")
MEASURE = "RMS of the truth"  # reference of relative errors in reports of older versions


def read_report(folder: Path) -> Results:
    """The results in a report's folder, as its record, done.json, confirms them.

    A report with a failed gate has no record. Raises FileNotFoundError, and DamagedError if a file is not
    readable, is not the one of the record, or has no failed gate and no record."""
    results = load(folder)
    check_results(results.record, COMPARED, str(folder / FACTS))
    try:
        record = read_sealed(folder / DONE, "the record of a report", AGAIN, files=dict)
    except FileNotFoundError:
        if not not_passed(results.facts["gates"])[0]:
            raise DamagedError(
                f"no gate of {folder / FACTS} failed and {DONE} is missing; expected the record of a "
                "report without a failed gate. The results were altered, or the report was not finished. "
                f"{AGAIN}"
            ) from None
        return results
    for path in (folder / FACTS, folder / TABLE):
        if record["files"].get(path.name) != file_hash(path):
            raise DamagedError(
                f"{path} was altered: its digest is not that in {folder / DONE}; expected the "
                f"original results. {AGAIN}"
            )
    return results


def figure(task: Entry) -> float | None:
    """The error by which the task is judged."""
    return task.number("operator", error_of(task))


def mean_of(results: Results) -> float | None:
    """Geometric mean of the error over the tasks of a run: easy and hard tasks have the same weight."""
    values = [figure(entry) for entry in results.tasks.values()]
    return geometric_mean(values) if values and all(value and value > 0 for value in values) else None


def table(runs: str | Path, split: str = "test") -> str:
    """Markdown, the lowest mean over tasks first.

    Runs with another protocol, tasks, grid, frames, parameters, number of trajectories or reference of errors
    are not comparable and have tables of their own. A missing value or one that is not finite sorts last.
    Reports that are not readable are named below. Raises DamagedError if none is readable.
    """
    groups, refused = {}, []
    name = "report" if split == "test" else "report-val"
    for path in sorted(Path(runs).glob(f"*/{name}/results.json")):
        try:
            results = read_report(path.parent)
        except (ValueError, OSError) as error:
            refused.append(f"Not listed: {printable(error)}")
            continue
        data = {
            name: [
                *[entry.facts[key] for key in SHARED],
                *[entry.number("", key) for key in COUNTED],
                entry.facts.get("measure", MEASURE),
            ]
            for name, entry in results.tasks.items()
        }
        groups.setdefault(json.dumps([protocol_of(results), data], sort_keys=True), []).append(results)
    if not groups and refused:
        raise DamagedError("\n".join(refused))
    return "\n\n".join([*map(_markdown, groups.values()), *refused]) or f"No reports in {runs}."


def protocol_of(results: Results) -> dict[str, Any]:
    return {key: value for key, value in results.facts["protocol"].items() if key != "seed"}


def _markdown(rows: list[Results]) -> str:
    """One table of comparable runs."""
    tasks = dict(sorted(rows[0].tasks.items()))
    horizon = ", ".join(
        f"{name} {'×'.join(map(str, entry.facts['grid']))} cells"
        + (horizon_of(entry.facts) or f", {entry.number('', 'num_frames_predicted')} frames")
        + f", relative to the {entry.facts.get('measure')}" * bool(entry.facts.get("offset"))
        for name, entry in tasks.items()
    )
    settings = ", ".join(f"{name} {value}" for name, value in sorted(protocol_of(rows[0]).items()))
    cells = [
        [
            row.facts["run"],
            in_words(row.facts["gates"]),
            number(mean_of(row)),
            *[number(figure(row.tasks[name])) for name in tasks],
            *_settings(row),
            number(row.facts["training"].get("parameters")),
            number(row.facts["training"].get("seconds")),
            str(row.facts["environment"].get("git_revision") or "–")[:10],
        ]
        for row in sorted(rows, key=lambda row: mean_of(row) or math.inf)
    ]
    head = ["run", "gates", "nRMSE (geometric mean)", *tasks, *COLUMNS]
    return "\n".join([markdown(f"{horizon} ({settings})"), "", *markdown_table(head, cells)])


def in_words(gates: list[dict]) -> str:
    failed, undecided = not_passed(gates)
    return "FAIL" if failed else f"{len(undecided)} undecided" if undecided else "pass"


def _settings(results: Results) -> list[str]:
    """Selected bases, tasks with a network, learning rates of Muon and AdamW, seed; a dash if an older report
    has none."""
    tasks, training = results.tasks, results.facts["training"]
    bases = list(dict.fromkeys(tasks[name].facts.get("base", "–") for name in sorted(tasks)))
    used = [task.facts.get("network_is_used") for task in tasks.values()]
    rates = [number(training.get(key)) for key in ("muon_lr", "adamw_lr")]
    return [
        ", ".join(bases),
        "–" if None in used else f"{sum(used)} of {len(used)}",
        ", ".join(rates),
        number(training.get("seed")),
    ]


def main() -> None:
    arguments = read_command(__doc__, OPTIONS)
    print(table(arguments.runs, arguments.split))


if __name__ == "__main__":
    run_script(main, "leaderboard")
