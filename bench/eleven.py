"""Compare all models on all eleven families, by task, seed and column. An interrupted comparison continues.

    python -m bench.numerics                          # data from independent solvers
    python -m bench.eleven --budget 180 --seeds 0 1   # all tasks and columns; days of one core
    python -m bench.eleven --budget 180 --task cfd1d --column ours fno  # side by side with another task
    python -m bench.table                             # write the tables of docs/results.md and README.md

Every column is trained for the same processor time of one thread, with settings found by the same search
(bench/tune.py). Columns: ours_generic (persistence and propagator, or the mean, as bases), ours (all
bases), fno, unet. Every result is written to bench/results/TASK.json at once, with the
revision that made it; a result for the same data, seed, time, search and kind of processor is not computed
again. Times of two kinds of processors are never compared.
Long rollouts start from other states and cover three times the trained horizon.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

from bench.command import parse, parser_of
from bench.entries import RESULTS, is_there, put
from bench.numerics import CONFIG, HORIZONS, NUMERICS, long_folder, settings_of
from bench.rivals import Problem, Trained
from bench.score import Split, by_lead, load, persistence, rollout, summary, trivial, with_cache
from bench.tune import MODELS, add_arguments, contestant, key_of, prepare
from ups.common.files import value_hash
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.cache import open_cache
from ups.data.generate import generation_settings
from ups.data.pdebench import open_data
from ups.tasks import get_task


def long_split(config: Config, task: str) -> Split | None:
    """Return the long trajectories of a task, all frames after the context as truth; None if it is steady."""
    spec, context = get_task(task), config.context(task)
    if spec.is_steady:
        return None
    folder = long_folder(config, task)
    u, parameters = [], []
    for value in config.task[task].parameters or [None]:
        source = open_data(folder / spec.file_for(value), task)
        u.append(torch.from_numpy(source.read(0, source.num_trajectories)))
        attributes = spec.attributes(value)
        parameters += [[attributes[name] for name in spec.parameters]] * len(u[-1])
    joined = torch.cat(u)
    return Split(
        joined[:, :context],
        spec.predicted(joined[:, context:]),
        torch.tensor(parameters, dtype=torch.float64).view(len(joined), -1),
        torch.arange(len(u[0])).repeat(len(u)),
    )


@torch.no_grad()
def long_rollout(trained: Trained, split: Split, batch_size: int) -> dict[str, Any]:
    """Return the pooled error of the last frame of each horizon, with persistence."""
    scores, _ = rollout(trained, split, batch_size)
    num_frames = split.truth.shape[1]
    marks = [num_frames * part // HORIZONS - 1 for part in range(1, HORIZONS + 1)]
    error, still = ([by_lead(one)[mark] for mark in marks] for one in (scores, persistence(split)))
    return {"error": error, "persistence": still}


def row_of(
    trained: Trained, test: Split, long: Split | None, problem: Problem, config: Config
) -> dict[str, Any]:
    """Return the record of one training."""

    def scored(predict: Any, num_bootstrap: int) -> dict[str, Any]:
        errors, _ = rollout(Trained(predict), test, config.evaluate.batch_size)
        return summary(errors, test, problem.is_steady, num_bootstrap)

    row = scored(trained.predict, config.evaluate.num_bootstrap)
    row |= trained.costs()
    if trained.predict_base is not None:
        row["base"] = scored(trained.predict_base, 1)["error"]
    if long is not None:
        row["long"] = long_rollout(trained, long, config.evaluate.batch_size)
    return row


def identity(config: Config, task: str) -> str:
    """Return what identifies a task's data: for those of bench/numerics.py their settings, because their last
    bits depend on the processor; for others a hash of the contents.
    """
    if task not in NUMERICS or config.data.source != "user":
        return open_cache(config, task).fingerprint
    wanted = config.task[task]
    made = [
        generation_settings(task, parameter=value, **settings_of(config, task))
        for value in wanted.parameters or [None]
    ]
    read = {
        key: getattr(wanted, key)
        for key in ("space_stride", "time_stride", "first_frame", "train_from", "reserve")
    }
    return value_hash([made, read, config.data.val_fraction, config.data.test_fraction])


def evaluate_column(config: Config, args: argparse.Namespace, task: str, seed: int, column: str) -> None:
    """Train and score one column unless its result exists."""
    with_cache(config, task)
    key = key_of(args, column, seed, identity(config, task))
    if is_there(task, RESULTS, key):
        return
    problem, splits = load(config, task)
    model = contestant(column, config, problem, splits["val"], args)
    settings = model.settings()
    trained = model.train(settings, seed, args.budget)
    row = row_of(trained, splits["test"], long_split(config, task), problem, config)
    name, errors = trivial(problem, splits["test"])
    facts = {"trivial": {"name": name, **summary(errors, splits["test"], problem.is_steady, 1)}}
    facts["data"] = describe_data(config, task, problem, splits)
    put(task, RESULTS, key, {"settings": settings, "row": row}, args.device, **facts)
    print(
        f"{task} {column} seed {seed}: {row['error']:.3g} [{row['low']:.3g}, {row['high']:.3g}], "
        f"{row['steps']} steps in {row['seconds']:.0f} s",
        flush=True,
    )


def describe_data(config: Config, task: str, problem: Problem, splits: dict[str, Split]) -> dict[str, Any]:
    """Return the facts about the data that the table shows."""
    wanted = config.task[task]
    return {
        "grid": list(problem.train.shape[3:]),
        "frames_scored": splits["test"].truth.shape[1],
        "context_frames": 0 if problem.is_steady else problem.context,
        "t_end": wanted.t_end,
        "train": len(problem.train),
    }


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="+", choices=tuple(NUMERICS), default=list(NUMERICS))
    parser.add_argument("--column", nargs="+", choices=MODELS, default=list(MODELS))
    add_arguments(parser)
    parser.set_defaults(config=CONFIG)
    args = parse(parser, argv)
    prepare(args)
    config = load_config(args.config, args.overrides)
    seeds, args.seeds = args.seeds, [0]  # settings are searched from one seed, whichever are asked for
    for seed, task, column in itertools.product(seeds, args.task, args.column):
        evaluate_column(config, args, task, seed, column)


if __name__ == "__main__":
    main()
