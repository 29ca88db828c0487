"""The examples' coarse solvers, corrected, against their full grids: errors, seconds and runs until it pays.

    python -m bench.corrector --example fipy_burgers --data data/burgers_fipy \\
        --run corrected=runs/burgers_fipy fno=runs/fipy_fno

The truth is the example's solver on a grid twice as fine as its full one, which has four times the coarse
grid's cells per axis; from new starts; all are restricted to the coarse grid by means over cells. Columns:
the solver on the coarse grid ("coarse": its interpolation has the same cell means), twice it ("half") and the
full one; corrected by the operator, and by an FNO. nRMSE after the trained frames, three and ten times as
many; processor seconds of a run over the trained frames, batch 1, one thread, checks included.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ups
from bench.command import parser_of
from bench.table import RESULTS
from ups.commands.corrector_costs import paying_runs, require_unseen, run_of, training_seconds
from ups.commands.corrector_data import restricted
from ups.metrics.errors import nrmse
from ups.models.rollout import NUM_FIRST_CALLS

FOLDER = RESULTS / "corrector"
HORIZONS, UNSEEN = (1, 3, 10), 1000  # times the trained frames; seed of the starts
GRIDS = {"coarse": 1, "half": 2, "full": 4}  # cells per axis over those of the coarse grid


def runs(step: Callable, u: np.ndarray, leads: list[int], cells: int) -> tuple[np.ndarray, list[float]]:
    """(states (n, leads, channel, *coarse) of runs from u (n, channel, *space), seconds of each to the first
    lead)."""
    states, seconds = [], []
    for one in u:
        first, took = run_of(step, one, leads[0])
        later, _ = run_of(step, first[-1], leads[-1] - leads[0])
        kept = np.concatenate([first, later])[[lead - 1 for lead in leads]]
        states.append(restricted(kept, kept.shape[-1] // cells, "means"))
        seconds.append(took)
    return np.stack(states), seconds


def scores(states: np.ndarray, truth: np.ndarray) -> list[list[float]]:
    """nRMSE by lead and start of states and truth (n, leads, channel, *space)."""
    return nrmse(*(torch.from_numpy(np.asarray(u, np.float64)) for u in (states, truth))).mean(-1).T.tolist()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record of an example."""
    example, task = importlib.import_module(f"examples.{args.example}"), args.data.name
    made = json.loads((args.data / "made.json").read_text(encoding="utf-8"))
    coarse, num = example.FULL // 4, made["facts"]["frames"] - 1
    leads = [num * horizon for horizon in args.horizons]
    starts = example.starts(args.starts, 2 * example.FULL, seed=UNSEEN)
    require_unseen(starts, example.starts(cells=2 * example.FULL))
    truth, _ = runs(example.step, starts, leads, coarse)
    print(f"{args.example}: the truth is solved", flush=True)
    trained = dict(pair.split("=") for pair in args.run)
    entries, seconds = [], {}
    for name in (*GRIDS, *trained):
        step, cells, correct = example.step, coarse * GRIDS.get(name, 1), None
        if name in trained:
            correct = step = ups.corrector(trained[name], example.coarse, task)
            cells = correct.head.codec.space[0]
        u = restricted(starts, starts.shape[-1] // cells, "means")
        for _ in range(2 if name in GRIDS else NUM_FIRST_CALLS):  # compiles what is compiled
            step(u[:1])
        states, seconds[name] = runs(step, u, leads, coarse)
        entry = {"column": name, "cells": cells, "seconds": seconds[name], "errors": scores(states, truth)}
        if correct is not None:
            invested = sum(made["parts"].values()) + training_seconds(Path(trained[name]), task)
            entry["paid"] = paying_runs(invested, seconds["full"], seconds[name])
        entries.append(entry)
        print(name, np.mean(entry["errors"], 1), np.mean(seconds[name]), entry.get("paid"), flush=True)
    return {"task": args.example, "leads": leads, "starts": args.starts, "entries": entries}


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--example", help="a module of examples/")
    parser.add_argument("--data", type=Path, help="the folder that make corrector wrote")
    parser.add_argument("--run", nargs="+", default=[], metavar="COLUMN=FOLDER")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--horizons", nargs="+", type=int, default=HORIZONS, help="times the trained frames")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = measure(args)
    (FOLDER / f"{args.example}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
