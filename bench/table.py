"""The tables of docs/results.md and README.md that derive from the registry of tasks and bench/results/.

    python -m bench.table           # writes both
    python -m bench.table --check   # exit 1 where a page differs from what this would write

Each table stands between two comments of its page. A number is the mean over the seeds that are there; a cell
without a result yet reads "-"."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ups.config import ROOT
from ups.tasks import TASKS, Task

RESULTS = ROOT / "bench" / "results"
MISSING, NONE = "-", "none"  # none: there is no solver that goes on from the stored fields
CORRECTION = ("ours_correction", "fno_correction", "unet_correction")


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Task -> what bench/eleven.py kept of it on one kind of processor: the one with most results, of equal
    ones the latest."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {
        record["task"]: of_one_processor(record)
        for record in records
        if "entries" in record and "task" in record
    }


def of_one_processor(record: dict[str, Any]) -> dict[str, Any]:
    kinds = [entry["key"]["processor"] for entry in record["entries"]]
    chosen = max(reversed(kinds), key=kinds.count, default="")
    entries = [entry for entry in record["entries"] if entry["key"]["processor"] == chosen]
    return record | {"processor": chosen, "entries": entries}


def rows(record: dict[str, Any], column: str) -> dict[int, dict[str, Any]]:
    """Seed -> row of a column, of the longest training that is there."""
    mine = [entry for entry in record.get("entries", []) if entry["key"]["column"] == column]
    longest = max((entry["key"]["budget_s"] for entry in mine), default=0)
    return {entry["key"]["seed"]: entry["row"] for entry in mine if entry["key"]["budget_s"] == longest}


def mean(values: Iterable[float | None]) -> float | None:
    """None where there is no value; inf where one diverged."""
    found = [math.inf if value is None else value for value in values]
    return sum(found) / len(found) if found else None


def number(value: float | None, is_percent: bool = False) -> str:
    if value is None:
        return MISSING
    return (
        "diverged"
        if not math.isfinite(value)
        else f"{value:.2g}"
        if is_percent or 1e-2 <= value < 1e3
        else f"{value:.1e}"
    )


def error(record: dict[str, Any], column: str, key: str = "error") -> float | None:
    return mean(row.get(key) for row in rows(record, column).values())


def ratio(record: dict[str, Any], one: str, others: tuple[str, ...]) -> float | None:
    """Error of a column over the best of others, by the seeds that all have; None where one is missing."""
    found = [rows(record, name) for name in (one, *others)]
    seeds = set.intersection(*map(set, found))
    values = [mean(part[seed]["error"] for seed in seeds) for part in found]
    if not seeds or not math.isfinite(min(values[1:])):
        return None
    return values[0] / min(values[1:])


def grid(task: Task, record: dict[str, Any]) -> str:
    """As published and, where it was judged, as judged."""
    published = " x ".join([str(task.resolution)] * task.ndim)
    judged = " x ".join(map(str, record["data"]["grid"])) if "data" in record else published
    return published if judged == published else f"{published}, judged on {judged}"


def horizon(task: Task, record: dict[str, Any]) -> str:
    if task.is_steady:
        return "steady"
    data = record.get("data")
    num, end = (data["frames_scored"], data["t_end"]) if data else (task.num_frames - 1, task.t_end)
    return f"{num} frames to t = {end:g}"


def source(task: Task) -> str:
    """Where data come from: published files, our solver, and of what is judged here the numerics."""
    kinds = [
        *(["published"] if task.published and not task.of else []),
        *(["generated"] if task.simulate else []),
    ]
    return (" or ".join(kinds) or "yours") + (f", files of {task.of}" if task.of else "")


def table(header: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def task_table(found: dict[str, dict[str, Any]]) -> str:
    """README's: every task of the registry."""

    def line(task: Task) -> tuple[str, ...]:
        record = found.get(task.name, {})
        seconds = {f"{row['seconds']:.0f}" for row in rows(record, "ours").values()}
        return (
            f"`{task.name}`",
            source(task),
            grid(task, record),
            horizon(task, record),
            number(error(record, "ours")),
            number(error(record, "ours", "base")),
            number(error(record, "fno")),
            number(error(record, "unet")),
            min(seconds, default=MISSING),
        )

    return table(
        ("task", "source", "grid", "horizon", "ours", "its base", "FNO", "U-Net", "seconds"),
        map(line, TASKS.values()),
    )


def judge_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/results.md: what was judged, column by column."""

    def line(record: dict[str, Any]) -> tuple[str, ...]:
        rivals = ("fno", "unet")
        seeds = sorted(rows(record, "ours"))
        corrects = [
            *(number(error(record, name)) for name in CORRECTION),
            number(ratio(record, CORRECTION[0], CORRECTION[1:]), True),
        ]
        return (
            record["task"],
            number(record["trivial"]["error"]),
            *(number(error(record, name)) for name in ("ours_generic", "ours", "fno", "unet")),
            number(ratio(record, "ours_generic", rivals), True),
            number(ratio(record, "ours", rivals), True),
            *(corrects if TASKS[record["task"]].step else (NONE,) * 4),
            " ".join(map(str, seeds)) or MISSING,
            record["processor"],
        )

    return table(
        (
            "task",
            "trivial",
            "ours, generic bases",
            "ours",
            "FNO",
            "U-Net",
            "generic / best",
            "ours / best",
            "ours corrects",
            "FNO corrects",
            "U-Net corrects",
            "ours / best",
            "seeds",
            "processor",
        ),
        map(line, found.values()),
    )


def long_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/results.md: rollouts over three times the horizon."""

    def line(record: dict[str, Any], column: str) -> tuple[str, ...] | None:
        long = [row["long"] for row in rows(record, column).values() if "long" in row]
        if not long:
            return None
        return (
            record["task"],
            column,
            f"{sum(part['is_finite'] for part in long)} of {len(long)}",
            *(number(mean(part["error"][mark] for part in long)) for mark in range(3)),
            *(number(mean(part["persistence"][mark] for part in long)) for mark in (0, 2)),
        )

    lines = [line(record, column) for record in found.values() for column in ("ours", "fno", "unet")]
    return table(
        ("task", "model", "finite, of seeds", "after 1 horizon", "2", "3", "persistence after 1", "3"),
        [entry for entry in lines if entry],
    )


TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "tasks": ("README.md", task_table),
    "judge": ("docs/results.md", judge_table),
    "long": ("docs/results.md", long_table),
}


def between(name: str) -> re.Pattern:
    return re.compile(
        rf"(<!-- table {name}: python -m bench.table -->\n).*?(<!-- end of table {name} -->)", re.S
    )


def written(root: Path = ROOT) -> dict[str, tuple[str, str]]:
    """Page -> (as it is, as it should be). Raises ValueError for a page without its two comments."""
    found, pages = results(root / "bench" / "results"), {}
    for name, (page, make) in TABLES.items():
        before, after = pages.get(page) or [(root / page).read_text(encoding="utf-8")] * 2
        text = make(found)
        after, num = between(name).subn(lambda match: f"{match[1]}{text}\n{match[2]}", after)  # noqa: B023
        if num != 1:
            raise ValueError(
                f"{page} has {num} places for the table {name}; expected one, between <!-- table {name}: "
                f"python -m "
                f"bench.table --> and <!-- end of table {name} -->. Put the comments where the table belongs."
            )
        pages[page] = before, after
    return pages


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page differs")
    args = parser.parse_args(argv)
    differing = {page: after for page, (before, after) in written(root).items() if before != after}
    for page, after in differing.items():
        print(f"{page}: {'differs; run python -m bench.table' if args.check else 'written'}")
        if not args.check:
            (root / page).write_text(after, encoding="utf-8")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
