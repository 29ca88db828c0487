"""Shift grid: how errors grow when dynamics and starts leave the trained regime.

    python -m bench.shift_grid --budget 60 --search 60                       # four families
    python -m bench.shift_grid --budget 60 --search 60 --family burgers
    python -m bench.table                                                    # the table of docs/results.md

Every model is trained on starts of one highest wave number and on scales within a factor of sqrt(2) of 1
(TRAINED), and is tested on SCALES times five highest wave numbers. scale: time between frames over the usual
one, which is a factor on all rates of the equation; it is a parameter of the data that every model gets. As
it takes many values, our bases that are fitted to one value each (propagator, equation) do not serve.
Solutions are those of our own solvers (`Solver.step`); the input is the first frame.

Columns: ours, fno, unet; settings are searched on validation data of the trained regime, where the weights
are selected, too (bench/tune.py). Results: bench/results/shift_grid/FAMILY.json, one entry per training, with
errors[scale][wave number] and those of persistence.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.command import parser_of
from bench.entries import RESULTS, is_there, put
from bench.numerics import frames, means
from bench.score import Split, error_of, load, persistence, rollout, with_cache
from bench.tune import OUT, add_arguments, contestant, key_of, prepare
from bench.user_data import CONFIG, random_waves, write, write_config
from ups.common.files import value_hash
from ups.config.load import load_config
from ups.metrics.intervals import Scores
from ups.tasks import get_task
from ups_solvers import SOLVERS

FOLDER = RESULTS / "shift_grid"
COLUMNS = ("ours", "fno", "unet")
SCALES, MIDDLE = (0.25, 0.5, 1.0, 2.0, 4.0), 2
TRAINED = tuple(np.geomspace(2**-0.5, 2**0.5, 20).tolist())
SEED, NUM_STARTS, NUM_TEST, NUM_FRAMES = 36, 160, 16, 21
BATCH = 64
Tests = dict[tuple[int, int], Split]  # (index of scale, index of wave number) -> test trajectories


@dataclass(frozen=True)
class Family:
    """A registered task with one value of its parameter.

    num_modes: highest wave numbers, the middle one is trained. dt: time between frames at scale 1. refine:
    cells of the solver per stored cell and axis. offset, amplitude: of the starts.
    """

    task: str
    num_modes: tuple[int, ...]
    resolution: int
    dt: float
    parameter: float | None = None
    refine: int = 1
    offset: float = 0.0
    amplitude: float = 1.0

    def solutions(self, indices: Sequence[int], num_modes: int, scale: float) -> Tensor:
        """Return trajectories, (n, time, channel, *space) float32; the start depends on index and
        num_modes.
        """
        task = get_task(self.task)
        num_cells, num_channels = self.refine * self.resolution, len(task.fields)
        rows = [num_channels * index + channel for index in indices for channel in range(num_channels)]
        waves = random_waves(rows, SEED, num_modes, num_cells, task.ndim, task.boundary)
        u = self.offset + self.amplitude * waves.unflatten(0, (len(indices), num_channels))
        advance = partial(SOLVERS[self.task].step, parameter=self.parameter, dt=scale * self.dt)
        return frames(u, advance, NUM_FRAMES, lambda u: means(u, self.refine, task.ndim))


FAMILIES = {
    "advection": Family("advection1d", (1, 2, 4, 8, 16), 128, dt=0.05, parameter=0.4),
    "burgers": Family("burgers1d", (1, 2, 4, 8, 16), 128, dt=0.025, parameter=0.03, refine=8),
    "reaction": Family(
        "reacdiff1d", (1, 2, 4, 8, 16), 128, dt=0.1, parameter=0.002, offset=0.5, amplitude=0.4
    ),
    "diff_react": Family("diff_react2d", (1, 2, 3, 5, 8), 32, dt=0.2),
}


# ---- one family --------------------------------------------------------------------------------------------


def identity(family: str) -> str:
    """Return what identifies the data of a family."""
    return value_hash([asdict(FAMILIES[family]), SCALES, TRAINED, SEED, NUM_STARTS, NUM_TEST, NUM_FRAMES])


def training_config(family: str, parent: Path) -> Path:
    """Return the configuration of the trained regime; solve unless the data are there."""
    facts, path = FAMILIES[family], OUT / "shift_grid" / identity(family)[:8] / f"{family}.npz"
    task = get_task(facts.task)
    if not path.is_file():
        modes = facts.num_modes[MIDDLE]
        rows = [range(first, NUM_STARTS, len(TRAINED)) for first in range(len(TRAINED))]
        parts = [facts.solutions(own, modes, scale) for own, scale in zip(rows, TRAINED, strict=True)]
        u = torch.stack(parts, 1).flatten(0, 1).numpy()  # in the order of the starts
        fields = {name: u[:, :, channel] for channel, name in enumerate(task.fields)}
        write(path, fields, scale=np.tile(TRAINED, NUM_STARTS // len(TRAINED)))
    return write_config(path, parent, family, facts.dt, task.boundary, task.spans[0])


@cache
def cells(family: str) -> Tests:
    """Return test trajectories, whose starts no model has seen."""
    facts, indices, out = FAMILIES[family], range(NUM_STARTS, NUM_STARTS + NUM_TEST), {}
    for (row, scale), (column, modes) in itertools.product(enumerate(SCALES), enumerate(facts.num_modes)):
        u = facts.solutions(indices, modes, scale)
        values = torch.full((len(u), 1), scale, dtype=torch.float64)
        out[row, column] = Split(u[:, :1], u[:, 1:], values, torch.arange(len(u)))
    return out


def errors_on(tests: Tests, scores_of: Callable[[Split], Scores]) -> list[list[float]]:
    """Return the errors [scale][wave number]."""
    found = [error_of(scores_of(split), False) for _, split in sorted(tests.items())]
    return np.reshape(found, (len(SCALES), -1)).tolist()


def evaluate(args: argparse.Namespace, column: str, seed: int) -> None:
    """Train a column in the trained regime and score it on the grid, unless the result exists."""
    family = args.task
    key = key_of(args, column, seed, identity(family))
    if is_there(family, FOLDER, key):
        return
    config = with_cache(load_config(args.config), family)
    problem, splits = load(config, family)
    model = contestant(column, config, problem, splits["val"], args)
    settings = model.settings()
    trained = model.train(settings, seed, args.budget)
    still = errors_on(cells(family), persistence)
    errors = errors_on(cells(family), lambda split: rollout(trained, split, BATCH)[0])
    found = trained.costs() | {"settings": settings, "errors": errors}
    put(family, FOLDER, key, found, args.device, persistence=still)
    shown = np.array_str(np.array(errors), precision=3)
    print(f"{family} {column} seed {seed}, scales down, wave numbers across:\n{shown}", flush=True)


# ---- command -----------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--column", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    add_arguments(parser)
    parser.set_defaults(config=CONFIG, overrides=[])
    args = parser.parse_args(argv)
    prepare(args)
    seeds, args.seeds = args.seeds, [0]  # settings are searched from one seed
    for family in args.family:
        mine = vars(args) | {"task": family, "config": training_config(family, args.config)}
        for seed, column in itertools.product(seeds, args.column):
            evaluate(argparse.Namespace(**mine), column, seed)


if __name__ == "__main__":
    main()
