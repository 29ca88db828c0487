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
import math
import time
from typing import Any

from bench.command import parse, parser_of
from bench.entries import described, save
from bench.rivals import COSTS
from bench.score import load, paired_ratio, report_row, rollout, summary, trivial
from bench.tune import MODELS, add_arguments, contestant, key_of, prepare, search_seconds
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.cache import open_cache
from ups.metrics.intervals import Scores
from ups.report.bench_rows import FOLDER, NETWORKS, data_key

OUT = FOLDER
TOLERANCE = 1.05  # a model that took more than this fraction of its budget is marked, and so are its ratios
NUMBERS = ("error", "low", "high", "nrmse", *COSTS, "state_ms")  # of a line of the table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if math.isfinite(value) else "diverged"


def show(*cells: str, row: dict[str, Any]) -> None:
    """Print a line of the table."""
    numbers = (number(row.get(key)) for key in NUMBERS)
    print("| " + " | ".join((*cells, *numbers)) + " |", flush=True)


def compare(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Train and score every model and seed; print and save the table."""
    problem, splits = load(config, args.task)
    test, cache, is_steady = splits["test"], open_cache(config, args.task), problem.is_steady
    key, num_bootstrap = data_key(cache.fingerprint, cache.context(config)), config.evaluate.num_bootstrap
    models = {name: contestant(name, config, problem, splits["val"], args) for name in args.models}
    settings = {name: model.settings() for name, model in models.items()}
    name, errors = trivial(problem, test)
    result: dict[str, Any] = {
        "key": key_of(args, "-".join(models), args.seeds[0], cache.fingerprint),
        "environment": described(args.device),
        "rows": {"train": len(problem.train), **{name: len(split.truth) for name, split in splits.items()}},
        "frames_scored": test.truth.shape[1],
        "judged_by": "nrmse" if is_steady else "pooled",
        "settings": settings,
        "trivial": {"name": name, **summary(errors, test, is_steady, num_bootstrap)},
        "rows_printed": [],
        "ratios": {},
        "data": key,
        "models": {},
    }
    path = OUT / f"{args.task}_{args.budget:g}s_{'-'.join(models)}_{time.strftime('%m%d-%H%M%S')}.json"
    print(
        f"{args.task}: {result['rows']} rows, {result['frames_scored']} frames scored, {args.budget:g} s of "
        f"{args.clock} each, one thread, judged by {result['judged_by']} on test\n\n"
        f"| model | seed | {' | '.join(NUMBERS)} |\n{'| --- ' * (2 + len(NUMBERS))}|"
    )
    show(name, "-", row=result["trivial"])
    scored: dict[str, list[Scores]] = {name: [] for name in models}
    for seed in args.seeds:
        for name, model in models.items():
            trained = model.train(settings[name], seed, args.budget)
            errors, state_ms = rollout(trained, test, config.evaluate.batch_size)
            scored[name].append(errors)
            row = {"model": name, "seed": seed, **summary(errors, test, is_steady, num_bootstrap)}
            row |= trained.costs() | {"state_ms": state_ms, "history": trained.history}
            result["rows_printed"].append(row)
            show(name, str(seed), row=row)
            # the report shows the best seed, and no network that was not tuned
            best = result["models"].get(name, {"validation": math.inf})["validation"]
            if name in NETWORKS and search_seconds(args) and row["validation"] < best:
                costs = {"ms_per_state": state_ms, "train_seconds": round(trained.seconds, 1)}
                shown = report_row(errors, test, config, cache) | costs
                result["models"][name] = {"validation": row["validation"], "row": shown}
            save(path, result)
    first, *others = models
    for name in models:
        errors = [row["error"] for row in result["rows_printed"] if row["model"] == name]
        print(f"{name}: mean over seeds {number(sum(errors) / len(errors))}")
    late = {row["model"] for row in result["rows_printed"] if row["seconds"] > TOLERANCE * args.budget}
    for name in others if search_seconds(args) else ():
        found = paired_ratio(scored[first], scored[name], test, is_steady, num_bootstrap)
        result["ratios"][f"{first}/{name}"] = found
        print(
            f"{first} / {name}: {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}] (below 1: "
            f"{first} is better; interval over trajectories, not seeds)"
            + f" NOT AT EQUAL TIME: {', '.join(sorted(late))} over budget"
            * bool(late)
        )
    if others and not search_seconds(args):
        print(
            f"no ratio {first} / {', '.join(others)}: their settings were not searched; expected settings "
            "that validation chose. Leave out --search 0."
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
