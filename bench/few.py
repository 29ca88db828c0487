"""How few trajectories suffice: our operator after N of them, beside networks after many.

    python -m bench.few --count 1 5 --budget 60           # APEBench's scenarios and the eleven families
    python -m bench.few --name burgers cfd1d --count 5 --column full
    python -m bench.table                                 # write the table of docs/peers.md

N trajectories are all that there is: one tenth of them, at least one, selects weights. One or two films are
cut into WINDOWS windows in time, the last of which selects. Columns: full (all usual bases) and bare (base:
persistence), both with the usual settings. Tests: those of bench/apebench.py; of a family NUM_TEST
trajectories of other starts, per parameter value. Rivals: the best network of bench/apebench.py (50
trajectories) and the FNO of bench/eleven.py. Every result goes to bench/results/few/NAME.json at once and is
not computed again.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.apebench import BASES, SCENARIOS, environment, made, ours, write_parts
from bench.command import parse, parser_of
from bench.eleven import row_of
from bench.entries import RESULTS, is_there, processor, put
from bench.numerics import CONFIG, NUMERICS, generate
from bench.ours import train_ours
from bench.score import load, with_cache
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.tasks import get_task

OUT, FOLDER = ROOT / "bench" / "out" / "few", RESULTS / "few"
NAMES, WINDOWS, FEWEST = (*SCENARIOS, *NUMERICS), 4, 3  # from FEWEST films on none is cut
NUM_TEST, SEED = 40, 7


def windows(u: np.ndarray) -> tuple[np.ndarray, int]:
    """Return what trains and, last, what selects of films (n, time, ...), and the number of the latter."""
    if len(u) >= FEWEST:
        return u, max(1, len(u) // 10)
    size = u.shape[1] // WINDOWS
    parts = [u[:, part * size : (part + 1) * size] for part in range(WINDOWS)]
    return np.concatenate(parts), len(u)


def scenario(name: str, count: int, column: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a scenario of APEBench."""
    folder = made(name, args.python)
    with np.load(folder / "data.npz") as data:
        train, test = data["train"][:count], data["test"]
    own, (some, num_validated) = OUT / name / str(count), windows(train)
    write_parts(own, some, test, num_validated)
    return ours(name, column, own, test, args.seed, args)


def family_data(task: str, seed: int, num: int, args: argparse.Namespace, *overrides: str) -> Config:
    """Return the configuration of `num` trajectories per parameter value, solved unless they are there."""
    places = (f"{key}.root={OUT / key / f'{task}-{seed}-{num}'}" for key in ("data", "cache"))
    own = [*places, f"data.seed={seed}", f"task.{task}.num_trajectories={num}", f"data.tasks=[{task}]"]
    config = load_config(CONFIG, [*own, *overrides, *args.overrides])
    generate(config, task, is_long_needed=False)
    return with_cache(config, task)


def family(task: str, count: int, column: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one of the eleven families. One trajectory more than `count` is the test split of the
    training's data, which nothing reads."""
    base = "mean" if get_task(task).is_steady else "persistence"
    fractions = {"val": max(1, count // 10) / (count + 1), "test": 1 / (count + 1)}
    own = [f"data.{part}_fraction={fraction}" for part, fraction in fractions.items()]
    own += [f"task.{task}.base=[{base}]"] * (column == "bare")
    config = family_data(task, SEED, count + 1, args, *own)
    tested = family_data(task, SEED + 1, NUM_TEST, args, "data.test_fraction=0.9", "data.val_fraction=0.05")
    problem, splits = load(tested, task)
    trained = train_ours(config, task, args.budget, args.seed)
    return row_of(trained, splits["test"], None, problem, config)


def run(name: str, count: int, column: str, args: argparse.Namespace) -> None:
    """Train and score unless the result exists."""
    key = {"column": f"{column} {count}", "seed": args.seed, "budget_s": args.budget}
    key |= {"processor": processor("cpu"), "overrides": args.overrides}
    if is_there(name, FOLDER, key):
        return
    row = (scenario if name in SCENARIOS else family)(name, count, column, args)
    put(name, FOLDER, key, {"row": row})
    print(f"{name} {key['column']}: {row['error']:.3g}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--name", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--count", nargs="+", type=int, default=(1, 2, 5, 20))
    parser.add_argument("--column", nargs="+", choices=tuple(BASES), default=tuple(BASES))
    parser.add_argument("--budget", type=float, default=60.0, help="processor seconds of one thread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", type=Path, help="an interpreter that has APEBench")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    if any(name in SCENARIOS for name in args.name):
        args.python = environment(args.python)
    for name, count, column in itertools.product(args.name, args.count, args.column):
        if name in SCENARIOS or count >= FEWEST:  # fewer trajectories of a family of PDEBench cannot be split
            run(name, count, column, args)


if __name__ == "__main__":
    main()
