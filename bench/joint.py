"""Compare one model of all tasks with one model per task, for the same total time.

    OMP_NUM_THREADS=1 python -m bench.joint --config configs/small_11task.yaml --steps 4400 --seeds 0

A separate model takes as many steps as the joint model takes of its task, with the same rows in the same
order and its own schedule of learning rates, so both sides cost the same; their processor time is recorded.
Bases are fitted once per task and seed, for both sides. Weights are the final average; the network weight
is selected on validation as in the stage. Printed is the pooled nRMSE of rollouts on test.

Reads the caches (`make cache`). Writes bench/results/joint.json after every model; a model for the same
data, settings and steps is not trained again. The table says if the steps are fewer than the
configuration's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.command import parse
from bench.ours import loss_of, select_network_weight
from ups.common.files import write_json
from ups.common.place import ROOT
from ups.config.load import load_config, to_dict
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.models.base_selection import fit_base
from ups.models.head_setup import build_operator
from ups.models.loss import squared_errors
from ups.models.operator import Operator
from ups.models.windows import Windows
from ups.select import pooled
from ups.training.optim import fit_averaged

RESULTS = ROOT / "bench" / "results" / "joint.json"
SEPARATE = "separate"
DEVICE = torch.device("cpu")

Bases = dict[str, tuple[dict[str, Any], dict[str, Tensor]]]


def train(config: Config, caches: dict[str, Cache], bases: Bases, steps: int, seed: int) -> Operator:
    """Train one operator of these tasks for `steps` steps; return it with averaged weights.

    Raises ValueError if a gradient is not finite.
    """
    settings = dataclasses.replace(
        config.operator, train=dataclasses.replace(config.operator.train, steps=steps)
    )
    contexts = {name: config.context(name) for name in caches}
    torch.manual_seed(seed)
    # what is found of one stays with it
    operator = build_operator(copy.deepcopy(bases), settings.model, settings.train.precision)
    windows = Windows(caches, config.task, contexts, settings, seed)

    def loss(step: int) -> Tensor:
        batch = windows.schedule.batch(step)
        return loss_of(operator, windows, batch, slice(0, len(batch)))[0]

    stopped, ema = fit_averaged(operator, loss, steps, settings.optim)
    if stopped is not None:
        raise ValueError(
            f"the gradient of {', '.join(caches)} is not finite at step {stopped}; expected numbers. Lower "
            "the learning rates of the operator."
        )
    operator.load_state_dict(ema.snapshot(), strict=False)
    return operator.eval()


def evaluate(operator: Operator, config: Config, cache: Cache, seed: int) -> dict[str, float]:
    """Return pooled nRMSE on test of the operator and of its base, and the network weight."""
    name, context = cache.task.name, config.context(cache.task.name)
    num_validated = config.operator.train.validate_trajectories
    weight, compared = select_network_weight(operator, cache, num_validated, context, seed, DEVICE)
    operator.heads[name].facts = replace(operator.heads[name].facts, network_weight=weight)
    errors = pooled(squared_errors(operator, cache, cache.split["test"], context, DEVICE))
    return {
        "error": errors["network"],
        "base": errors["base"],
        "share": weight,
        "validation": pooled(compared)["network"],
    }


def conditions(config: Config, caches: dict[str, Cache], steps: int) -> dict[str, Any]:
    """Return the settings that make two runs comparable."""
    return {
        "steps": steps,
        "steps of the stage": config.operator.train.steps,
        "torch": torch.__version__,
        "operator": to_dict(config.operator),
        "data": {name: cache.fingerprint for name, cache in caches.items()},
    }


class Record:
    """bench/results/joint.json: per set of conditions, variant/seed/task -> result."""

    def __init__(self, path: Path, given: dict[str, Any]):
        self.path, self.all = path, json.loads(path.read_text()) if path.is_file() else []
        given = json.loads(json.dumps(given))
        self.mine = next((part for part in self.all if part["conditions"] == given), None)
        if self.mine is None:
            self.mine = {"conditions": given, "runs": {}}
            self.all.append(self.mine)

    def add(self, rows: dict[str, dict[str, float]]) -> None:
        self.mine["runs"] |= rows
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, self.all)


def run(
    config: Config,
    caches: dict[str, Cache],
    bases: Bases,
    variant: str,
    steps: int,
    seed: int,
    record: Record,
) -> None:
    """Train and score the models of a variant and seed that are not recorded yet.

    bases: fitted ones of this seed; missing ones are fitted and added.
    """
    missing = {
        name: cache for name, cache in caches.items() if f"{variant}/{seed}/{name}" not in record.mine["runs"]
    }
    if not missing:
        return
    for name, cache in (missing if variant == SEPARATE else caches).items():
        if name not in bases:
            bases[name] = fit_base(cache, config.operator.base_steps, config.context(name), seed, DEVICE)
            print(f"base of {name}, seed {seed}: {bases[name][0]['description']['base']['kind']}", flush=True)
    schedule = Windows(
        caches,
        config.task,
        {name: config.context(name) for name in caches},
        config.operator,
        seed,
    ).schedule
    counts = Counter(schedule.task(step) for step in range(steps))
    groups = [{name: cache} for name, cache in missing.items()] if variant == SEPARATE else [caches]
    for group in groups:
        begun, own = time.process_time(), counts[next(iter(group))] if variant == SEPARATE else steps
        operator = train(config, group, {name: bases[name] for name in group}, own, seed)
        seconds = time.process_time() - begun
        record.add(
            {
                f"{variant}/{seed}/{name}": {
                    **evaluate(operator, config, cache, seed),
                    "steps": own,
                    "seconds": seconds,
                }
                for name, cache in group.items()
            }
        )
        print(
            f"{variant}, seed {seed}, {', '.join(group)}: {own} steps in {seconds:.0f} processor seconds",
            flush=True,
        )


def table(runs: dict[str, dict[str, float]], variants: list[str], seeds: list[int], names: list[str]) -> str:
    """Return test errors, geometric means over seeds, and their ratios to the separate models."""

    def mean(variant: str, name: str, key: str = "error") -> float:
        values = [runs[f"{variant}/{seed}/{name}"][key] for seed in seeds]
        return float(torch.tensor(values, dtype=torch.float64).log().mean().exp())

    lines = [f"{'task':<18}{'base':>10}" + "".join(f"{variant:>14}{'':>8}" for variant in variants)]
    for name in names:
        line = f"{name:<18}{mean(variants[0], name, 'base'):>10.2e}"
        for variant in variants:
            versus = f"{mean(variant, name) / mean(SEPARATE, name):.2f}" if SEPARATE in variants else ""
            line += f"{mean(variant, name):>14.2e}{versus:>8}"
        lines.append(line)
    for variant in variants:
        # a model of several tasks is named by each of them
        taken = {(seed, runs[f"{variant}/{seed}/{name}"]["seconds"]) for seed in seeds for name in names}
        lines.append(
            f"{variant}: {sum(seconds for _, seconds in taken) / len(seeds):.0f} processor seconds a seed"
        )
        if SEPARATE in variants and variant != SEPARATE:
            ratios = torch.tensor(
                [mean(variant, name) / mean(SEPARATE, name) for name in names], dtype=torch.float64
            )
            lines[-1] += (
                f"; over {SEPARATE}: geometric mean {float(ratios.log().mean().exp()):.2f}, at most 1 on "
                f"{int((ratios <= 1).sum())} of {len(names)}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "small_11task.yaml")
    parser.add_argument("--steps", type=int, default=0, help="of the joint model (default: the stage's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", default=["joint", SEPARATE], choices=["joint", SEPARATE])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parse(parser)
    config = load_config(args.config, args.overrides)
    caches = {name: open_cache(config, name) for name in config.data.tasks}
    steps = args.steps or config.operator.train.steps
    record = Record(args.results, conditions(config, caches, steps))
    for seed in args.seeds:
        bases: Bases = {}
        for variant in args.variants:
            run(config, caches, bases, variant, steps, seed, record)
    print(table(record.mine["runs"], args.variants, args.seeds, list(caches)))


if __name__ == "__main__":
    main()
