"""Compare our operator with an FNO and a U-Net on the same cache, splits, protocol and time.

    python -m bench.compare --task burgers1d --budget 300 --seeds 0 1 --models ours fno unet

Time is processor time of one thread, so that runs side by side on a busy machine get the same; with
--device cuda it is wall-clock time. Settings of every model are searched first, on validation, by the same
search in the same time (bench/tune.py, which also writes ours as an overlay); without it (--search 0) no
ratio is printed. ours_generic has only the bases that know no equation: persistence and the linear or
polynomial propagator.

Reads data and caches of the configuration (`make cache`); writes bench/out/TASK_*.json. Context frames
(evaluate.context_frames, more of noisy user data) are input of every model and never scored. Weights are
selected on validation rollouts; all printed numbers are on test. Errors: bench/score.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.baselines import Problem, Trained
from bench.command import parse, parser_of
from bench.rivals import Settings, settings_for
from bench.score import Errors, Split, load, paired_ratio, report_row, rollout, summary, trivial
from bench.search import Changes
from bench.tune import (
    BASELINES,
    add_arguments,
    best_error,
    found,
    generic,
    prepare,
    search_seconds,
    train_ours,
    train_rival,
)
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.cache import open_cache
from ups.report.bench_rows import FOLDER, NETWORKS, data_key

OUT = FOLDER
OURS = ("ours", "ours_generic")
MODELS = (*OURS, *BASELINES)
TOLERANCE = 1.05  # a model that took more than this share of its budget is marked, and so are its ratios


def fit(
    model: str,
    config: Config,
    problem: Problem,
    val: Split,
    settings: Settings | Changes,
    args: argparse.Namespace,
    seed: int,
    budget: float,
    enough: float = -math.inf,
) -> Trained:
    """Train one model and return it with weights selected on validation. An error of at most `enough` there
    ends the training early.

    All models get physical context frames and parameters, and nothing else of the test trajectories. Ours may
    have the structure of an equation built in by its bases: this compares tools, not generic networks.
    """
    if model in OURS:
        changes = settings if model == "ours" else generic(settings, config, problem.name)
        return train_ours(args, changes, seed, budget, enough=enough)
    return train_rival(args, config, problem, val, settings, seed, budget, enough)


def settings_of(
    model: str, config: Config, problem: Problem, val: Split, args: argparse.Namespace
) -> Settings | Changes:
    """Return the settings that a search finds for a model; without one (0 s) those that it would start
    from."""
    changes = found(model, args, config, problem, val)["changes"] if search_seconds(args) else {}
    return changes if model in OURS else settings_for(model, problem.name, problem.ndim, changes)


def number(value: float) -> str:
    return f"{value:9.2e}" if math.isfinite(value) else " diverged"


def line(name: str, seed: str, row: dict[str, Any], trained: Trained | None = None) -> str:
    cost = (
        ""
        if trained is None
        else (
            f" {trained.num_parameters / 1e3:8.0f}k {trained.steps:6d} {trained.step_ms:8.1f} "
            f"{row['state_ms']:9.3f} {trained.seconds:7.1f} {trained.cpu_seconds:7.1f}"
            + (f"  {trained.skipped} skipped" if trained.skipped else "")
            + ("  OVER BUDGET" if row["is_over_budget"] else "")
        )
    )
    return (
        f"{name:14} {seed:>4} {number(row['error'])} [{number(row['low']).strip()}, "
        f"{number(row['high']).strip()}]"
        + "".join(f" {number(row[key])}" for key in ("nrmse", "median", "first_frame", "last_frame"))
        + cost
    )


HEADER = (
    f"{'model':14} {'seed':>4} {'error':>9} {'[95 %: low, high]':>20} {'nrmse':>9} {'median':>9} "
    f"{'first':>9} {'last':>9}"
    f" {'params':>9} {'steps':>6} {'ms/step':>8} {'ms/state':>9} {'seconds':>7} {'cpu s':>7}"
)


def describe(args: argparse.Namespace, problem: Problem, splits: dict[str, Split]) -> dict[str, Any]:
    """Return machine, data and protocol of this comparison."""
    return {
        "task": problem.name,
        "budget_s": args.budget,
        "clock": args.clock,
        "device": args.device,
        "search_s": search_seconds(args),
        "config": str(args.config),
        "overrides": args.overrides,
        "torch": torch.__version__,
        "machine": platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": {"train": len(problem.train), **{name: len(split.truth) for name, split in splits.items()}},
        "frames_scored": splits["test"].truth.shape[1],
        "context_frames": 0 if problem.is_steady else problem.context,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def clean(value: Any) -> Any:
    """Return `value` for JSON: null for NaN and inf (the model diverged, or the number is undefined)."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(clean(result), indent=1), encoding="utf-8")


def compare(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Train and score every model and seed; print and save the table."""
    problem, splits = load(config, args.task)
    test, num_bootstrap = splits["test"], config.evaluate.num_bootstrap
    steady = problem.is_steady
    settings = {model: settings_of(model, config, problem, splits["val"], args) for model in args.models}
    result = {
        "kind": "compare",
        **describe(args, problem, splits),
        "judged_by": "nrmse" if steady else "pooled",
        "settings": {model: value if model in OURS else asdict(value) for model, value in settings.items()},
        "rows_printed": [],
        "ratios": {},
    }
    cache = open_cache(config, args.task)
    result |= {"data": data_key(cache.fingerprint, cache.context(config)), "models": {}}
    path = OUT / f"{args.task}_{args.budget:g}s_{'-'.join(args.models)}_{time.strftime('%m%d-%H%M%S')}.json"
    name, errors = trivial(problem, test)
    result["trivial"] = {"name": name, **summary(errors, test, steady, num_bootstrap)}
    print(
        f"{args.task}: {result['rows']} rows, {test.truth.shape[1]} frames scored, {args.budget:g} s of "
        f"{args.clock} each, "
        f"one thread, judged by {result['judged_by']} on test\n{HEADER}"
    )
    print(line(name, "-", result["trivial"]), flush=True)
    scored: dict[str, list[Errors]] = {}
    for seed in args.seeds:
        for model in args.models:
            trained = fit(model, config, problem, splits["val"], settings[model], args, seed, args.budget)
            errors, state_ms = rollout(trained, test, config.evaluate.batch_size)
            scored.setdefault(model, []).append(errors)
            row = {
                "model": model,
                "seed": seed,
                **summary(errors, test, steady, num_bootstrap),
                "state_ms": state_ms,
                **{
                    key: getattr(trained, key)
                    for key in "num_parameters steps step_ms seconds cpu_seconds skipped history".split()
                },
                "is_over_budget": trained.seconds > TOLERANCE * args.budget,
            }
            result["rows_printed"].append(row)
            print(line(model, str(seed), row, trained), flush=True)
            # the report shows the best seed, and no network that was not tuned
            if model in NETWORKS and search_seconds(args):
                validation = best_error(trained)
                if validation < result["models"].get(model, {"validation": math.inf})["validation"]:
                    entry = {
                        "validation": validation,
                        "row": report_row(trained, test, config, cache, state_ms),
                    }
                    result["models"][model] = entry
            save(path, result)
    for model, parts in scored.items():
        rows = [row for row in result["rows_printed"] if row["model"] == model]
        by_parameter = {
            key: sum(row["by_parameter"][key] for row in rows) / len(rows) for key in rows[0]["by_parameter"]
        }
        print(
            f"{model}: mean over seeds {number(sum(row['error'] for row in rows) / len(rows)).strip()}"
            + "".join(f", {key}: {number(value).strip()}" for key, value in by_parameter.items())
        )
        if model == args.models[0]:
            continue
        if not search_seconds(args):
            print(
                f"no ratio {args.models[0]} / {model}: their settings were not searched; expected settings "
                "that validation chose. Leave out --search 0."
            )
        else:
            unequal = [row["model"] for row in result["rows_printed"] if row["is_over_budget"]]
            ratio = paired_ratio(scored[args.models[0]], parts, test, steady, num_bootstrap)
            result["ratios"][f"{args.models[0]}/{model}"] = ratio
            print(
                f"{args.models[0]} / {model}: {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] "
                f"(below 1: "
                f"{args.models[0]} is better; interval over trajectories, not seeds)"
                + (f" NOT AT EQUAL TIME: {', '.join(sorted(set(unequal)))} over budget" if unequal else "")
            )
    save(path, result)
    print(f"wrote {path}")
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = parser_of(__doc__)
    parser.add_argument("--task", required=True)
    parser.add_argument("--models", nargs="+", default=["ours", "fno", "unet"], choices=MODELS)
    add_arguments(parser)
    args = parse(parser, argv)
    prepare(args)
    return compare(load_config(args.config, args.overrides), args)


if __name__ == "__main__":
    main()
