"""Few trajectories of a new equation: what pretraining on the other families is worth.

    python -m bench.few_shot --task cfd1d --parent runs/without_cfd1d --seeds 0 1 2       (one held-out family; resumable)
    python -m bench.few_shot --table

From one trajectory on where the task has one parameter value (task.cfd1d.parameters=[0.01] data.root=.. cache.root=..). Meant:
a parabolic family (reacdiff1d), a hyperbolic one (cfd1d) and one with another boundary (diff_react2d).

One family is held out; an operator of the others is the parent (`make operator`, the command is printed where it is missing).
From N trajectories of the training split, spread over the parameter values, and equal time of one thread each:

    naive       the last frame, or the mean of the N solutions       scratch   ours, from nothing
    zero_shot   the parent with the head of another of its tasks     frozen    ours from the parent, its trunk as it is
                (of the same patches; the best on validation) over   full      ours from the parent, the trunk at --trunk of
                persistence: N = 0, nothing is fitted                          the rates; fno, unet: bench/networks.py

All rows but zero_shot see the N trajectories alone; statistics of the codec (mean and standard deviation of each channel, and a
basis that is complete where task.TASK.energy is 1) and the choice of weights on validation are the same for all. A ratio above
1 of `full` over `scratch` is negative transfer, and is printed as such. Reads caches and data of --config; every result is kept
in bench/results/few_shot.json, and what is there for the same data, parent, budget and seed is not run again.
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

from bench.baselines import Problem, Stopwatch, Trained
from bench.networks import settings_for
from bench.ours import fit_bases, train_ours
from bench.score import Errors, Split, load, rollout, summary
from bench.tune import train_rival
from ups.config import ROOT, Config, ModelConfig, load_config, to_dict
from ups.data.cache import Cache, open_cache
from ups.files import write_json
from ups.forecaster import Forecaster
from ups.models.choose import base_settings as settings_of_base
from ups.models.choose import fitted_part, head_with, spread
from ups.models.operator import Operator, load_operator, over_bases
from ups.models.warm import can_translate, start_from, take_trunk, translate_maps
from ups.models.windows import Windows
from ups.training.folder import finished_stage

RESULTS = ROOT / "bench" / "results" / "few_shot.json"
COUNTS = (1, 4, 16, 64, 256)
ROWS = ("naive", "zero_shot", "frozen", "full", "scratch", "fno", "unet")
OURS_FROM, RIVALS = ("frozen", "full", "scratch"), ("fno", "unet")
CPU = torch.device("cpu")


# ---- what is shown -------------------------------------------------------------------------------------------------------


def few(cache: Cache, count: int) -> Cache:
    """The cache with `count` rows in its training split; validation and test as they are. Raises ValueError for fewer than there
    are parameter values, which our bases and scales are fitted for one by one."""
    if count < len(cache.parameter_values):
        raise ValueError(f"{cache.task.name} has {len(cache.parameter_values)} parameter values; expected at least as many "
                         f"trajectories, not {count}. Leave {count} out of --counts, or hold out fewer values with "
                         f"task.{cache.task.name}.parameters=[..] and make their cache.")
    part = copy.copy(cache)
    part.split = {**cache.split, "train": spread(cache, "train", count).sort().values}
    return part


class FewWindows(Windows):
    """Windows of the first rows alone."""

    count = 0

    def __init__(self, caches: dict[str, Cache], *settings: Any) -> None:
        super().__init__({name: few(cache, self.count) for name, cache in caches.items()}, *settings)


def few_of(problem: Problem, cache: Cache, count: int) -> Problem:
    """The training problem of a rival with the same rows."""
    rows = torch.isin(cache.split["train"], few(cache, count).split["train"])
    inputs = problem.train_inputs[rows] if problem.train_inputs is not None else None
    return dataclasses.replace(problem, train=problem.train[rows], train_parameters=problem.train_parameters[rows],
                               train_inputs=inputs)


# ---- rows ----------------------------------------------------------------------------------------------------------------


def naive(problem: Problem, test: Split) -> Errors:
    """The last frame, or the mean of the solutions that are shown."""
    trivial = problem.train.mean(0, keepdim=True) if problem.is_steady else test.given[:, -1:]
    return Errors.of(trivial.expand_as(test.truth), test.truth)


def borrowed(parent: Operator, cache: Cache, sibling: str) -> Operator:
    """An operator of the cache's task with the head of `sibling` in its terms, over persistence."""
    head = head_with(cache, "persistence", settings_of_base(cache), CPU)
    bases = {cache.task.name: ({"description": head.description}, fitted_part(head))}
    operator = over_bases(bases, ModelConfig(**parent.description["model"]), parent.precision)
    take_trunk(operator, parent, sibling)
    operator.task_embedding.data[0] = parent.task_embedding.data[parent.names.index(sibling)]
    translate_maps(operator.heads[cache.task.name], parent.heads[sibling])
    operator.heads[cache.task.name].scale.fill_(float(parent.heads[sibling].scale.mean()))
    return operator.eval()


def siblings(parent: Operator, cache: Cache) -> list[str]:
    """Tasks of the parent whose heads can speak of this cache's fields."""
    history, bundle = cache.settings.history, cache.settings.bundle
    return [] if cache.task.is_steady else [
        name for name, head in parent.heads.items() if not head.task.is_steady
        and (head.history, head.bundle) == (history, bundle) and can_translate(cache.tokenizer, head.codec)]


def zero_shot(parent: Operator, cache: Cache, splits: dict[str, Split], config: Config) -> tuple[Errors, str] | None:
    """Errors on test of the borrowed head that is best on validation, and whose; None where none fits."""
    def errors(name: str, split: Split) -> Errors:
        operator = borrowed(parent, cache, name)
        predict = partial(Forecaster(operator).forecast, cache.task.name)
        return rollout(Trained(predict, 0, 0, 0.0, 0.0), split, config.evaluate.batch_size)[0]

    found = {name: float(errors(name, splits["val"]).pooled().mean()) for name in siblings(parent, cache)}
    if not found:
        return None
    best = min(found, key=found.get)
    return errors(best, splits["test"]), best


def ours(row: str, config: Config, task: str, count: int, seed: int, budget: float, parent: Path, trunk: float) -> Trained:
    """Ours from `count` trajectories: its bases fitted to them, its network from the parent or from nothing."""
    cache = few(open_cache(config, task), count)
    watch = Stopwatch(time.process_time)
    fitted = fit_bases(cache, config, seed, CPU, watch, budget)
    modify: Callable[[Operator], Any] | None = None
    if row != "scratch":
        factor = 0.0 if row == "frozen" else trunk
        modify = partial(start_from, directory=parent, trunk_factor=factor)
    windows = type("Windows", (FewWindows,), {"count": count})
    left = max(budget - watch(), budget / 10)
    return train_ours(config, task, left, seed, fitted=fitted, modify=modify, windows_of=windows)


# ---- what is kept --------------------------------------------------------------------------------------------------------


def parent_of(config: Config, folder: Path, task: str) -> tuple[Path, str]:
    """The operator's folder and fingerprint of the parent run. Raises ValueError or FileNotFoundError where it is missing, knows
    the held-out task, or has another network than the configuration."""
    rest = ",".join(name for name in config.data.tasks if name != task)
    make = (f"make operator CONFIG=configs/{config.run.name}.yaml RUN={folder.name} RUNS={folder.parent} "
            f'ARGS="data.tasks=[{rest}]"')
    done = finished_stage(folder / "operator")
    if done is None:
        raise FileNotFoundError(f"{folder} holds no finished operator; expected one of all tasks but {task}. Run: {make}")
    description = json.loads((folder / "operator" / "config.json").read_text(encoding="utf-8"))
    if task in [entry["name"] for entry in description["tasks"]] or description["model"] != to_dict(config.operator.model):
        raise ValueError(f"{folder} knows {task}, or its network is not that of {config.run.name}; expected one that was trained "
                         f"without it. Run, under another name: {make}")
    return folder / "operator", done["fingerprint"]


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def measure(config: Config, args: argparse.Namespace, row: str, count: int, seed: int, parent: Path) -> dict[str, Any] | None:
    """What one row comes to on test; None for a row that this task has not."""
    cache = open_cache(config, args.task)
    problem, splits = load(config, args.task)
    limited = few_of(problem, cache, max(count, 1))
    facts: dict[str, Any] = {"trajectories": len(limited.train)}
    if row == "naive":
        errors = naive(limited, splits["test"])
    elif row == "zero_shot":
        found = zero_shot(load_operator(parent), cache, splits, config)
        if found is None:
            return None
        errors, facts["head of"], facts["trajectories"] = *found, 0
    else:
        if row in RIVALS:
            given = argparse.Namespace(clock="cpu", device="cpu")
            settings = settings_for(row, args.task, problem.ndim)
            trained = train_rival(given, config, limited, splits["val"], settings, seed, args.budget)
        else:
            trained = ours(row, config, args.task, count, seed, args.budget, parent, args.trunk)
        errors = rollout(trained, splits["test"], config.evaluate.batch_size)[0]
        facts |= {"steps": trained.steps, "seconds": trained.seconds}
    return summary(errors, splits["test"], problem.is_steady, config.evaluate.num_bootstrap) | facts


def conditions(row: str, count: int, seed: int, args: argparse.Namespace, data: str, parent: str) -> dict[str, Any]:
    """What makes a result the same one: a row that is not trained has neither seed nor budget."""
    is_trained, has_parent = row in (*OURS_FROM, *RIVALS), row in ("zero_shot", "frozen", "full")
    return {"task": args.task, "row": row, "count": 0 if row == "zero_shot" else count, "data": data,
            "seed": seed if is_trained else 0, "budget_s": args.budget if is_trained else 0,
            "trunk": args.trunk if row == "full" else 0, "parent": parent if has_parent else ""}


def fill(config: Config, args: argparse.Namespace) -> None:
    """Measure what is asked for and not there; every result is written when it is found."""
    (folder, fingerprint), cache = parent_of(config, args.parent, args.task), open_cache(config, args.task)
    few(cache, min(args.counts))   # refused before anything is measured
    data = cache.fingerprint
    for seed in args.seeds:
        for count in args.counts:
            for row in args.rows:
                key = conditions(row, count, seed, args, data, fingerprint)
                if any(entry["key"] == key for entry in read(args.results)):
                    continue
                found = measure(config, args, row, count, seed, folder)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                write_json(args.results, [*read(args.results), {"key": key, "result": found, "torch": torch.__version__}])
                words = "has no head to borrow" if found is None else f"error {found['error']:.3g}"
                print(f"{args.task}, {row}, {key['count']} trajectories, seed {seed}: {words}", flush=True)


def table(entries: list[dict[str, Any]]) -> str:
    """Per task errors on test by row and count, geometric means over seeds; what pretraining saves, and where it harms."""
    found: dict[tuple, list[float]] = {}
    for entry in entries:
        if entry["result"] is not None:
            key = entry["key"]
            found.setdefault((key["task"], key["row"], key["count"]), []).append(entry["result"]["error"])
    mean = {key: float(torch.tensor(values, dtype=torch.float64).log().mean().exp()) for key, values in found.items()}
    lines = []
    for task in dict.fromkeys(key[0] for key in mean):
        counts = sorted({count for name, _, count in mean if name == task})
        lines += [f"| {task} | {' | '.join(f'N = {count}' for count in counts)} |", f"|{' --- |' * (len(counts) + 1)}"]
        for row in [row for row in ROWS if any((task, row, count) in mean for count in counts)]:
            cells = [f"{mean[key]:.3g} ({len(found[key])})" if (key := (task, row, count)) in mean
                     else "" if (row == "zero_shot") != (count == 0) else "not run" for count in counts]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        harmed = [str(count) for count in counts
                  if mean.get((task, "full", count), 0) > mean.get((task, "scratch", count), 1e300)]
        lines += ["", "Negative transfer, full worse than scratch, at N = " + ", ".join(harmed) + "." if harmed
                  else "No negative transfer among what was run."]
        if {(task, "full", 16), (task, "fno", 256)} <= mean.keys():
            lines.append(f"From 16 by fine-tuning over an FNO from 256: {mean[task, 'full', 16] / mean[task, 'fno', 256]:.2f}.")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "small_11task.yaml")
    parser.add_argument("--task", help="the family that is held out")
    parser.add_argument("--parent", type=Path, help="folder of a run whose operator was trained without it")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--budget", type=float, default=60.0, help="processor seconds of one thread per training")
    parser.add_argument("--trunk", type=float, default=0.3, help="multiple of the rates for the trunk of full")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there and run nothing")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_intermixed_args(argv)
    torch.set_num_threads(1)
    if not args.table:
        if args.task is None or args.parent is None:
            parser.error("--task and --parent are missing; expected a family and the run that does not know it, or --table")
        fill(load_config(args.config, args.overrides), args)
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
