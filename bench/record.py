"""Race to a fixed error: seconds on this machine from a finished cache to forecasts as good as those of the
best published network.

    make record TASK=burgers1d BUDGET=90
    python -m bench.record --task burgers1d --model fno --budget 90
    python -m bench.record --write     # docs/records.md

The clock is the one on the wall. It starts with the cache open, and ends when all is decided: fits, steps,
validations, compilation, the network weight. Training ends early where a validation finds an error of at most
MARGIN of the threshold. The test split is forecast once, afterwards, and scored as published: mean over
trajectories, frames and channels of the relative error of a frame; frames that were given do not count.

Thresholds (bench/thresholds.csv) are aims: they were measured on published files, and ours are made by our
solvers from the same recipe, by default fewer (bench/records.yaml). Every attempt is appended to
records/TASK.json, also one that misses, with all that must be equal before two are compared.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from bench.command import parse, parser_of
from bench.eleven import identity
from bench.entries import described, keep, read
from bench.score import Split, load, rollout, summary, with_cache
from bench.tune import MODELS, add_arguments, contestant, key_of, prepare
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.tasks import get_task

RECORDS, PAGE = ROOT / "records", ROOT / "docs" / "records.md"
MARGIN = 0.5  # share of the threshold at which validation, which is no test, ends a training
HEADER = """# Records

Seconds from a finished cache to forecasts as good as those of the best published network
(`bench/record.py` says what counts). Thresholds are of published files and from their authors' pages; the
data here are of the same recipe by our solvers and fewer, so a row says how long UPS needs for such an error,
not that it was better on the same files. Seconds are of the wall, in brackets of the processor (all threads).

    make record TASK=burgers1d BUDGET=90
    python -m bench.record --write

| task | threshold, by | model | seconds (processor's) | nRMSE | below | data | machine | commit, seed |
|---|---|---|---|---|---|---|---|---|
"""


def threshold_of(task: str, parameters: list[float]) -> dict[str, str]:
    """Return the row of bench/thresholds.csv. Raises ValueError for a task or parameters without one."""
    with (ROOT / "bench" / "thresholds.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == task]
    values = {float(row["parameter"]) if row["parameter"] else None: row for row in rows}
    wanted = parameters[0] if len(parameters) == 1 else None if not parameters else "several"
    if wanted not in values:
        known = ", ".join(str(value) for value in values) or "none for this task"
        raise ValueError(
            f"{task} with parameters {parameters} has no threshold in bench/thresholds.csv; expected one of: "
            f"{known}. Set task.{task}.parameters=[VALUE]."
        )
    return values[wanted]


def protocol(config: Config, task: str, test: Split) -> str:
    """Return what of the data must be equal before two errors are compared."""
    wanted, spec = config.task[task], get_task(task)
    parameters = "".join(f"{spec.parameters[0]} {value:g}, " for value in wanted.parameters)
    frames = f"{test.given.shape[1]} frames given, {test.truth.shape[1]} scored"
    return (
        f"{parameters}{config.data.source}, {wanted.num_trajectories} of {spec.num_trajectories} "
        f"trajectories, {' x '.join(map(str, test.truth.shape[3:]))} cells, strides {wanted.space_stride} "
        f"and {wanted.time_stride}, {'steady' if spec.is_steady else frames}, tested on {len(test.truth)}"
    )


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def race(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Train one model, score it, and append the attempt to records/."""
    task, seed = args.task, args.seeds[0]
    threshold = threshold_of(task, config.task[task].parameters)
    with_cache(config, task)
    problem, splits = load(config, task)
    model = contestant(args.model, config, problem, splits["val"], args)
    settings = model.settings()
    enough = MARGIN * float(threshold["nrmse"])
    begun, cpu_begun = time.perf_counter(), time.process_time()
    trained = model.train(settings, seed, args.budget, enough)
    trained.predict(splits["val"].given[:1], splits["val"].parameters[:1], 1)  # decides the network weight
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun

    errors, _ = rollout(trained, splits["test"], config.evaluate.batch_size)
    found = summary(errors, splits["test"], problem.is_steady, config.evaluate.num_bootstrap)
    row = trained.costs() | {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "nrmse": found["nrmse"],
        "threshold": float(threshold["nrmse"]),
        "by": threshold["network"],
        "is_below": found["nrmse"] <= float(threshold["nrmse"]),
        "history": trained.history,
        "protocol": protocol(config, task, splits["test"]),
        "machine": machine(args.device),
    }
    record, key = read(task, RECORDS), key_of(args, args.model, seed, identity(config, task))
    one = {"key": key, "settings": settings, "row": row, "environment": described(args.device)}
    keep(record | {"entries": [*record["entries"], one]}, RECORDS)
    print(
        f"{task} {args.model}: nRMSE {row['nrmse']:.2e} after {seconds:.1f} s ({cpu_seconds:.1f} of the "
        f"processor), {'below' if row['is_below'] else 'NOT below'} the {row['threshold']:.2e} of "
        f"{row['by']} ({row['protocol']}; {row['machine']})",
        flush=True,
    )
    return row


def page(folder: Path = RECORDS) -> str:
    """Return docs/records.md: of every task, model and machine the fastest attempt that is below its
    threshold, or the most exact one that is not."""
    best: dict[tuple, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        for entry in read(path.stem, folder)["entries"]:
            row = entry["row"]
            place = path.stem, row["threshold"], entry["key"]["column"], row["machine"], row["protocol"]
            order = (not row["is_below"], row["seconds"] if row["is_below"] else row["nrmse"])
            if place not in best or order < best[place]["order"]:
                best[place] = {**entry, "order": order}
    lines = []
    for (task, *_), entry in best.items():
        row, key, commit = entry["row"], entry["key"], entry["environment"]["git_revision"][:7]
        lines.append(
            f"| {task} | {row['threshold']:.2g}, {row['by']} | {key['column']} | {row['seconds']:.1f} "
            f"({row['cpu_seconds']:.1f}) | {row['nrmse']:.2g} | {'yes' if row['is_below'] else 'no'} | "
            f"{row['protocol']} | {row['machine']} | {commit}, {key['seed']} |"
        )
    return HEADER + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", help="a task of bench/records.yaml")
    parser.add_argument("--model", default="ours", choices=MODELS)
    parser.add_argument("--write", action="store_true", help="write docs/records.md alone")
    add_arguments(parser, budget=90.0)
    parser.set_defaults(
        config=ROOT / "bench" / "records.yaml",
        search=0.0,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    args = parse(parser, argv)
    if not args.write:
        if args.task is None:
            parser.error("--task is missing, such as --task burgers1d")
        threads = torch.get_num_threads()
        prepare(args, clock="wall")
        torch.set_num_threads(threads)  # a record is of the whole machine
        race(load_config(args.config, args.overrides), args)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
