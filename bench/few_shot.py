"""Measure what pretraining on other tasks is worth for a new equation with few trajectories.

    python -m bench.few_shot --task reacdiff1d --parent runs/without_three --seeds 0 1 2   # resumable
    python -m bench.few_shot --table

One task is held out; the parent is an operator trained on others (`make operator`; if it is missing, the
command is printed). Every row gets N trajectories of the training split and the same time of one thread. Each
seed samples its own trajectories; smaller samples are parts of larger ones. N starts at 1 for a task with one
parameter value (task.cfd1d.parameters=[0.01] data.root=.. cache.root=..).

    scratch     ours, from random weights
    full        ours from the parent, the trunk at --trunk of the learning rates
    fno         bench/rivals.py
    base        ours without its network

The token mixing of a block is private to a task (ups/models/backbones/): it starts as the mean of the
parent's. Weights, bases and network weights are selected on N trajectories of the validation split, the same
for all rows. The codec's statistics come from all training data, for all rows. No model is tuned: all have
the settings that a search starts from. The bases are fitted once for our two rows, and the time is charged to
each; a fit of more than half of the budget is an error.

A ratio of `full` to `scratch` above 1 is printed as negative transfer. Every result is written to
bench/results/few_shot.json; a result for the same settings, data, parent, budget and seed is not computed
again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.baselines import Problem, Stopwatch, Trained
from bench.command import parse
from bench.ours import fit_bases, train_ours
from bench.rivals import settings_for
from bench.score import Split, load, rollout, summary
from bench.tune import train_rival
from ups.common.files import value_hash, write_json
from ups.common.place import ROOT
from ups.config.load import load_config, to_dict
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.models.head import TaskHead
from ups.models.operator import Operator
from ups.models.warm import copy_weights
from ups.report.tables import markdown_table
from ups.training.artifact import finished_stage

RESULTS = ROOT / "bench" / "results" / "few_shot.json"
COUNTS = (1, 4, 16, 64, 256)
ROWS = ("full", "scratch", "fno")
CPU = torch.device("cpu")


# ---- what is shown -----------------------------------------------------------------------------------------


def sampled_rows(cache: Cache, split: str, count: int, seed: int) -> Tensor:
    """Return `count` rows of a split in an order given by the seed, values of a parameter in turn.

    Fewer rows are the first of more.
    """
    rows, order = cache.split[split], torch.Generator().manual_seed(seed)
    # numbers of initial conditions, each with every parameter value
    numbers, place = cache.trajectory[rows].unique(return_inverse=True)
    turn = torch.randperm(len(numbers), generator=order)[place]
    return (
        rows[(turn * len(cache.parameter_values) + cache.parameter_index[rows]).argsort()][:count]
        .sort()
        .values
    )


def counts_of(cache: Cache) -> range:
    """Return the smallest and largest possible number of trajectories."""
    return range(max(1, len(cache.parameter_values)), len(cache.split["train"]) + 1)


def few(cache: Cache, count: int, seed: int) -> Cache:
    """Return the cache with `count` rows to train on and at most as many to validate on; the test split is
    unchanged.

    Raises ValueError for fewer rows than parameter values, since bases and scales are fitted for each value,
    or for more than exist.
    """
    if count not in (sizes := counts_of(cache)):
        raise ValueError(
            f"{cache.task.name} has {sizes[0]} parameter values and {sizes[-1]} trajectories to train on; "
            f"expected a number between, not {count}. Leave {count} out of --counts, or hold out fewer "
            f"values with task.{cache.task.name}.parameters=[..] and make their cache."
        )
    part = copy.copy(cache)
    part.split = cache.split | {name: sampled_rows(cache, name, count, seed) for name in ("train", "val")}
    return part


def few_of(problem: Problem, splits: dict[str, Split], cache: Cache, part: Cache) -> tuple[Problem, Split]:
    """Return the training problem of a baseline and its validation rows, limited to the rows of `part`."""
    is_shown, is_chosen = (torch.isin(cache.split[name], part.split[name]) for name in ("train", "val"))
    inputs = problem.train_inputs[is_shown] if problem.train_inputs is not None else None
    shown = dataclasses.replace(
        problem,
        train=problem.train[is_shown],
        train_parameters=problem.train_parameters[is_shown],
        train_inputs=inputs,
    )
    val = splits["val"]
    return shown, Split(*(rows[is_chosen] for rows in (val.given, val.truth, val.parameters, val.groups)))


# ---- rows --------------------------------------------------------------------------------------------------


class Ours:
    """Our operator on few trajectories.

    Bases are fitted once for all rows of a sample; the network starts from the parent or from random weights.
    """

    def __init__(self, config: Config, budget: float, parent: Path, trunk: float) -> None:
        self.config, self.budget, self.parent, self.trunk = config, budget, parent, trunk
        self.kept: tuple[Any, ...] = ()

    def fitted(self, cache: Cache, count: int, seed: int) -> tuple[TaskHead, float, float]:
        """Return (head, its validation error, seconds).

        Raises ValueError if the fit takes too much of the budget.
        """
        if self.kept[:3] != (cache.task.name, count, seed):
            watch = Stopwatch(time.process_time)
            self.kept = (
                cache.task.name,
                count,
                seed,
                *fit_bases(cache, self.config, seed, CPU, watch),
                watch(),
            )
        head, error, seconds = self.kept[3:]
        if seconds > self.budget / 2:
            raise ValueError(
                f"the bases of {cache.task.name} took {seconds:.0f} s to fit to {count} trajectories, of a "
                f"budget of {self.budget:g}; expected at most half of it. Give more (--budget), or fewer "
                f"(task.{cache.task.name}.base=[persistence,propagator])."
            )
        return copy.deepcopy(head), error, seconds

    def __call__(self, row: str, cache: Cache, count: int, seed: int) -> tuple[Trained, float]:
        """Return (trained model, seconds of the fit within its budget)."""
        head, error, seconds = self.fitted(cache, count, seed)
        modify: Callable[[Operator], Any] | None = None
        if row != "scratch":
            modify = partial(copy_weights, directory=self.parent, trunk_factor=self.trunk)
        return train_ours(
            self.config,
            cache.task.name,
            self.budget - seconds,
            seed,
            fitted=(head, error),
            modify=modify,
            cache=cache,
        ), seconds


# ---- what is kept ------------------------------------------------------------------------------------------


def parent_of(config: Config, folder: Path, task: str) -> tuple[Path, str]:
    """Return folder and fingerprint of the parent's operator.

    Raises ValueError or FileNotFoundError if it is missing, was trained on the held-out task, or has another
    network than the configuration.
    """
    rest = ",".join(name for name in config.data.tasks if name != task)
    make = (
        f"make operator CONFIG=configs/{config.run.name}.yaml RUN={folder.name} RUNS={folder.parent} "
        f'ARGS="data.tasks=[{rest}]"'
    )
    done = finished_stage(folder / "operator")
    if done is None:
        raise FileNotFoundError(
            f"{folder} holds no finished operator; expected one of all tasks but {task}. Run: {make}"
        )
    description = json.loads((folder / "operator" / "config.json").read_text(encoding="utf-8"))
    if task in [entry["name"] for entry in description["tasks"]] or description["model"] != to_dict(
        config.operator.model
    ):
        raise ValueError(
            f"{folder} knows {task}, or its network is not that of {config.run.name}; expected one that was "
            f"trained without it. Run, under another name: {make}"
        )
    return folder / "operator", done["fingerprint"]


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def settings_of(
    config: Config, args: argparse.Namespace, cache: Cache, parent: Path, fingerprint: str
) -> dict[str, Any]:
    """Return the settings that all rows of one table share."""
    known = [
        entry["name"] for entry in json.loads((parent / "config.json").read_text(encoding="utf-8"))["tasks"]
    ]
    asked = {
        "operator": to_dict(config.operator),
        "task": to_dict(config.task[args.task]),
        "rival": dataclasses.asdict(settings_for("fno", args.task, cache.task.ndim)),
        "context": config.context(args.task),
    }
    return {
        "data": cache.fingerprint,
        "parent": fingerprint,
        "known": known,
        "budget_s": args.budget,
        "trunk": args.trunk,
        "bases": list(config.task[args.task].base),
        "settings": value_hash(asked),
    }


def measure(
    config: Config, args: argparse.Namespace, row: str, count: int, seed: int, ours: Ours
) -> dict[str, Any]:
    """Return the test result of one row."""
    cache = open_cache(config, args.task)
    problem, splits = load(config, args.task)
    test, (batch, num_bootstrap) = splits["test"], (config.evaluate.batch_size, config.evaluate.num_bootstrap)

    def scored(predict: Any) -> dict[str, Any]:
        return summary(
            rollout(Trained(predict, 0, 0, 0.0, 0.0), test, batch)[0], test, problem.is_steady, num_bootstrap
        )

    part = few(cache, count, seed)
    limited, val = few_of(problem, splits, cache, part)
    facts: dict[str, Any] = {"trajectories": len(limited.train), "validated": len(val.truth)}
    if row == "fno":
        given, fit_s = argparse.Namespace(clock="cpu", device="cpu"), 0.0
        trained = train_rival(
            given, config, limited, val, settings_for(row, args.task, problem.ndim), seed, args.budget
        )
    else:
        trained, fit_s = ours(row, part, count, seed)
        facts["base"] = scored(trained.predict_base)["error"]
    return (
        scored(trained.predict)
        | facts
        | {"steps": trained.steps, "seconds": trained.seconds + fit_s, "fit_s": fit_s}
    )


def fill(config: Config, args: argparse.Namespace) -> None:
    """Measure all missing results of the request; each is written at once."""
    (folder, fingerprint), cache = parent_of(config, args.parent, args.task), open_cache(config, args.task)
    counts = args.counts or [count for count in COUNTS if count in counts_of(cache)]
    for count in counts:
        few(cache, count, 0)  # refused before anything is measured
    common = {"task": args.task} | settings_of(config, args, cache, folder, fingerprint)
    ours = Ours(config, args.budget, folder, args.trunk)
    for seed in args.seeds:
        for count in counts:
            for row in args.rows:
                key = common | {"row": row, "count": count, "seed": seed}
                if any(entry["key"] == key for entry in read(args.results)):
                    continue
                found = measure(config, args, row, count, seed, ours)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                write_json(
                    args.results,
                    [*read(args.results), {"key": key, "result": found, "torch": torch.__version__}],
                )
                print(
                    f"{args.task}, {row}, {count} trajectories, seed {seed}: error {found['error']:.3g}",
                    flush=True,
                )


def table(entries: list[dict[str, Any]]) -> str:
    """Return Markdown: test errors by row and count, geometric means over seeds, and after a comma those of
    the median over trajectories, which a single far start does not dominate; then gains and harm of
    pretraining.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        common = {key: value for key, value in entry["key"].items() if key not in ("row", "count", "seed")}
        groups.setdefault(json.dumps(common, sort_keys=True), []).append(entry)
    return "\n".join(part_of_table(json.loads(common), members) for common, members in groups.items())


def part_of_table(common: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    """Return the table of one task and one set of settings."""
    found: dict[tuple[str, int], list[float]] = {}
    medians: dict[tuple[str, int], list[float]] = {}
    for entry in entries:
        key, result = entry["key"], entry["result"]
        if key["row"] in ROWS:
            found.setdefault((key["row"], key["count"]), []).append(result["error"])
            medians.setdefault((key["row"], key["count"]), []).append(result["median"])
            if key["row"] == "scratch":
                found.setdefault(("base", key["count"]), []).append(result["base"])
    mean, median = (
        {
            key: float(torch.tensor(values, dtype=torch.float64).log().mean().exp())
            for key, values in part.items()
        }
        for part in (found, medians)
    )
    task, counts = common["task"], sorted({count for _, count in mean})
    bases, known = ", ".join(common["bases"]), ", ".join(common["known"])

    def cell(key: tuple[str, int]) -> str:
        if key not in mean:
            return "not run"
        return (
            f"{mean[key]:.3g}" + (f", {median[key]:.2g}" if key in median else "") + f" ({len(found[key])})"
        )

    rows = [
        [row, *(cell((row, count)) for count in counts)]
        for row in ("base", *ROWS)
        if any((row, count) in mean for count in counts)
    ]
    lines = [
        f"{task}, bases {bases}; {common['budget_s']:g} s each; a parent of {known}:",
        "",
        *markdown_table([task, *(f"N = {count}" for count in counts)], rows),
    ]
    both = [count for count in counts if {("full", count), ("scratch", count)} <= mean.keys()]
    harmed = [str(count) for count in both if mean["full", count] > mean["scratch", count]]
    if both:
        lines += [
            "",
            "Negative transfer, full worse than scratch, at N = " + ", ".join(harmed) + "."
            if harmed
            else f"No negative transfer at N = {', '.join(map(str, both))}.",
        ]
    for row in ("full", "scratch"):
        if {(row, 16), ("fno", 256)} <= mean.keys():
            lines.append(
                f"{row} from 16 over an FNO from 256: {mean[row, 16] / mean['fno', 256]:.2g}, of the medians "
                f"{median[row, 16] / median['fno', 256]:.2g}."
            )
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "small_11task.yaml")
    parser.add_argument("--task", help="the family that is held out")
    parser.add_argument("--parent", type=Path, help="folder of a run whose operator was trained without it")
    parser.add_argument("--counts", type=int, nargs="+", help=f"of {COUNTS} those that the data have")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--budget", type=float, default=60.0, help="processor seconds of one thread per training"
    )
    parser.add_argument(
        "--trunk", type=float, default=0.3, help="multiple of the rates for the trunk of full"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there and run nothing")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    if not args.table:
        if args.task is None or args.parent is None:
            parser.error(
                "--task and --parent are missing; expected a family and the run that does not know it, or "
                "--table"
            )
        fill(load_config(args.config, args.overrides), args)
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
