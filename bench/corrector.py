"""The examples' coarse solvers, corrected, against their full grids: errors, seconds and runs until it pays.

    python -m bench.corrector --example fipy_burgers --data data/burgers_fipy \\
        --run corrected=runs/burgers_fipy fno=runs/burgers_fipy_fno alone=runs/burgers_fipy_alone

The truth is the example's solver on a grid twice as fine as its full one, which has four times the coarse
grid's cells per axis; from new starts. Columns: the solver on the coarse grid, twice it ("half") and the full
one, and runs that were trained: correctors, or networks without the solver (those with another base). nRMSE
after --horizons times the trained frames: restricted to the coarse grid as in training, and interpolated to
the full one (cubic; of waves exact). Variance and energy in octaves are those after the last of these frames
over the truth's. Runs on the coarse grid go on without a truth, to --far times the trained frames: "grown" is
their largest value there over that of the start. Processor seconds of a run over the trained frames, batch 1,
one thread, checks included; those of training are of the whole process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import zoom

import ups
from bench.command import parser_of
from bench.entries import RESULTS, processor
from bench.starts import ratio
from ups.commands.corrector_costs import data_seconds, paying_runs, require_unseen, run_of, training_seconds
from ups.commands.corrector_data import restricted
from ups.forecaster import Forecaster
from ups.metrics.errors import nrmse
from ups.metrics.spectra import octaves
from ups.models.rollout import NUM_FIRST_CALLS
from ups_discovery.boundary import PERIODIC
from ups_discovery.spectral import resample

FOLDER = RESULTS / "corrector"
HORIZONS, FAR, UNSEEN = (1, 3), 10, 1000  # times the trained frames; without a truth; seed of the starts
GRIDS = {"coarse": 1, "half": 2, "full": 4}  # cells per axis over those of the coarse grid
LEAST = 0.01  # of the energy: octaves with less are not compared
Run = Callable[[np.ndarray, int], tuple[np.ndarray, float]]  # as `run_of` one step


def runs(run: Run, u: np.ndarray, leads: list[int]) -> tuple[np.ndarray, list[float]]:
    """(states (n, leads, channel, *space) after u (n, channel, *space), seconds of each to lead one)."""
    states, seconds = [], []
    for one in u:
        first, took = run(one, leads[0])
        later = run(first[-1], leads[-1] - leads[0])[0] if len(leads) > 1 else first[:0]
        states.append(np.concatenate([first, later])[[lead - 1 for lead in leads]])
        seconds.append(took)
    return np.stack(states), seconds


def forecasts(model: Forecaster, task: str) -> Run:
    """Those of a network without the solver."""

    def run(u: np.ndarray, num: int) -> tuple[np.ndarray, float]:
        started = time.process_time()
        frames = model.forecast(task, u[None, None], num_frames=num, extrapolate=True)
        return np.asarray(frames)[0], time.process_time() - started

    return run


def on_grid(u: np.ndarray, cells: int, how: str) -> np.ndarray:
    """u (n, leads, channel, *space) with `cells` per axis."""
    flat, ndim = u.reshape(-1, *u.shape[2:]).astype(float), u.ndim - 3
    if how == "waves":
        found = resample(torch.from_numpy(flat), [cells] * ndim, PERIODIC).numpy()
    elif cells <= u.shape[-1]:
        found = restricted(flat, u.shape[-1] // cells, how)
    else:
        factors = 1, 1, *[cells / u.shape[-1]] * ndim
        found = zoom(flat, factors, order=3, mode="grid-wrap", grid_mode=True)
    return found.reshape(*u.shape[:2], *found.shape[1:])


def scores(u: np.ndarray, truth: np.ndarray, coarse: int, how: str) -> dict[str, Any]:
    """Errors by lead and start, and the variance and the energy in octaves after the last lead over those of
    the truth; u, truth (n, leads, channel, *space)."""
    found = {}
    for name, cells in (("errors", coarse), ("on the full grid", 4 * coarse)):
        mine, ref = (torch.from_numpy(on_grid(one, cells, how)) for one in (u, truth))
        found[name] = nrmse(mine, ref).mean(-1).T.tolist()
        if cells == coarse:
            over = [octaves(one[:, -1:], PERIODIC).mean((0, 1, 2)) for one in (mine, ref)]
            deviations = [(one[:, -1] - one[:, -1].mean()).square().mean() for one in (mine, ref)]
            found["octaves"] = (over[0] / over[1])[over[1] >= LEAST * over[1].sum()].tolist()
            found["variance"] = float(deviations[0] / deviations[1])
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record of an example."""
    example, task = importlib.import_module(f"examples.{args.example}"), args.data.name
    made = json.loads((args.data / "made.json").read_text(encoding="utf-8"))
    coarse, num, how = example.FULL // 4, made["facts"]["frames"] - 1, made["facts"]["restrict"]
    leads = [num * horizon for horizon in args.horizons]
    starts = example.starts(args.starts, 2 * example.FULL, seed=UNSEEN)
    require_unseen(starts, example.starts(cells=2 * example.FULL))
    truth, _ = runs(partial(run_of, example.step), starts, leads)
    print(f"{args.example}: the truth is solved", flush=True)
    trained = dict(pair.split("=") for pair in args.run)
    rows: dict[str, dict[str, Any]] = {}
    for name in (*GRIDS, *trained):
        run, cells = partial(run_of, example.step), coarse * GRIDS.get(name, 1)
        model = ups.load(trained[name], solvers=example.coarse) if name in trained else None
        if model is not None and model.operator.head(task).base.is_user_solver:
            correct = ups.corrector(trained[name], example.coarse, task)
            run, cells = partial(run_of, correct), correct.head.codec.space[0]
        elif model is not None:
            run = forecasts(model, task)
        u = on_grid(starts[:, None], cells, how)[:, 0]
        run(u[0], 2 if name in GRIDS else NUM_FIRST_CALLS)  # compiles what is compiled
        is_far = cells == coarse
        states, seconds = runs(run, u, [*leads, args.far * num] if is_far else leads)
        row = {"cells": cells, "seconds": seconds} | scores(states[:, : len(leads)], truth, coarse, how)
        if is_far:
            largest = [abs(one).reshape(len(u), -1).max(1) for one in (states[:, -1], u)]
            row["grown"] = (largest[0] / largest[1]).tolist()
        if name in trained:
            row |= {"data": data_seconds(made), "training": training_seconds(Path(trained[name]))}
            row["paid"] = paying_runs(row["data"] + row["training"], rows["full"]["seconds"], seconds)
            pairs = zip(rows["full"]["errors"], row["errors"], strict=True)
            row["over the full grid"] = [ratio(np.transpose(pair)) for pair in pairs]
        rows[name] = row
        print(name, *(np.mean(row[key]) for key in ("seconds", "variance")), np.mean(row["errors"], 1))
        print(*(row.get(key) for key in ("over the full grid", "octaves", "paid")), flush=True)
    kind = processor("cpu")
    entries = [{"key": {"column": name, "processor": kind}, "row": row} for name, row in rows.items()]
    facts = {"task": args.example, "leads": leads, "far": args.far * num, "starts": args.starts}
    return facts | {"entries": entries}


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--example", help="a module of examples/")
    parser.add_argument("--data", type=Path, help="the folder that make corrector wrote")
    parser.add_argument("--run", nargs="+", default=[], metavar="COLUMN=FOLDER")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--horizons", nargs="+", type=int, default=HORIZONS, help="times the trained frames")
    parser.add_argument("--far", type=int, default=FAR, help="of runs without a truth; beyond the horizons")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = measure(args)
    (FOLDER / f"{args.example}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
