"""Does a trunk that was trained on many simulated problems help with few trajectories of a new one?

    python -m bench.transfer --problems 0 4 16 64 --seeds 0 1    # 0: from scratch
    python -m bench.table                                        # the table of docs/results.md

A problem is an equation in 1D with random terms (transport, Burgers, u_x^2, diffusion, dispersion,
hyperdiffusion, growth up to the third power), coefficients, starts, time step, and grid, order and steps of
the solver; every second one has walls without flux. One operator with the shared backbone `flat` is trained
on the first K problems by the stage itself (`train_operator.py`), for STEPS updates whatever K is. It gets
four frames and no parameter, so that it must read the equation in these. Then `operator.init` starts
trainings on few trajectories of FAMILIES, which it never saw, for --budget processor seconds of one thread;
the same without `init` is K = 0. Bases: persistence (bare), or persistence and propagator (generic). Tests:
NUM_TEST other starts, 20 frames; also by the solver of other numerics (bench/numerics.py).
Results: bench/results/transfer/FAMILY.json, one entry per training, written at once, not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from bench.command import parse, parser_of, run_scripts
from bench.entries import RESULTS, is_there, processor, put
from bench.numerics import frames, means, solve
from bench.ours import train_ours
from bench.score import Split, rollout, summary, with_cache
from bench.tune import OUT
from bench.user_data import CONFIG, random_waves, write, write_config
from ups.config.load import load_config
from ups.config.schema import Config
from ups.models.warm import copy_weights
from ups_discovery.boundary import NO_FLUX, PERIODIC
from ups_discovery.equation import Equation
from ups_solvers import SOLVERS

FOLDER, KEPT, STEPS = OUT / "transfer", RESULTS / "transfer", 3000
NUM_CELLS, NUM_FRAMES, CONTEXT = 128, 24, 4
NUM_STARTS, NUM_TEST, BATCH = 32, 40, 64
LARGEST = 4.0  # a solution with larger values is no problem of unit size
WARM_UP = 1.0  # seconds of a first training, for what a process does once
TASKS = {"ring": PERIODIC, "walls": NO_FLUX}
# parameter, time of the last frame and task of the trunk whose private weights serve
FAMILIES = {
    "burgers1d": (0.1, 1.0, "ring"),
    "reacdiff1d": (0.01, 1.0, "ring"),
    "diff_sorp1d": (None, 500.0, "walls"),
}
BASES = {"bare": ["persistence"], "generic": ["persistence", "propagator"]}
NETWORK = ("operator.model.kind=flat", f"evaluate.context_frames={CONTEXT}")


# ---- problems ----------------------------------------------------------------------------------------------


def drawn(number: int, seed: int) -> Tensor | None:
    """Return solutions of problem `number`, (n, time, 1, x); None if they are not of unit size."""
    rng, boundary = np.random.default_rng((seed, number)), list(TASKS.values())[number % 2]
    slope = [(0, (0,) * order) for order in range(5)]
    # sign of the coefficient (0: either) and term
    optional = [
        (0, ((0,), (slope[1],))),
        (0, ((1,), (slope[1],))),
        (0, ((0,), (slope[1], slope[1]))),
        (0, ((0,), (slope[3],))),
        (-1, ((0,), (slope[4],))),
        (0, ((1,), ())),
        (0, ((2,), ())),
        (-1, ((3,), ())),
    ]
    if boundary == NO_FLUX:  # odd derivatives of odd order are not fields of these walls
        optional = [one for one in optional if one[1][1] not in ((slope[1],), (slope[3],))]
    chosen = [(1, ((0,), (slope[2],))), *(one for one in optional if rng.random() < 0.4)]
    cells = NUM_CELLS * int(rng.choice((1, 2)))
    rows = range(NUM_STARTS * number, NUM_STARTS * (number + 1))
    u = random_waves(rows, seed, int(rng.integers(2, 7)), cells, 1, boundary)[:, None]
    u = rng.uniform(-0.5, 0.5) + rng.uniform(0.3, 1) * u
    scheme = {"is_finer": bool(rng.integers(2)), "num_steps": int(rng.choice((8, 16, 32))), "is_stiff": True}
    equation = Equation(1, 1, (cells,), boundary, terms=[term for _, term in chosen], **scheme).double()
    signs = torch.tensor([sign or rng.choice((-1, 1)) for sign, _ in chosen], dtype=torch.float64)
    size = equation.terms(u).square().mean((0, 2)).sqrt()
    weight = signs * torch.from_numpy(rng.lognormal(0, 1, len(chosen))) / size
    # the RMS of a frame's change over that of the start: 2 to 20 %
    change = (weight @ equation.terms(u)).square().mean().sqrt() / u.square().mean().sqrt()
    weight *= np.exp(rng.uniform(np.log(0.02), np.log(0.2))) / change
    advance = partial(equation.advance, weight=weight.view(1, 1, -1))
    out = frames(u, advance, NUM_FRAMES, lambda u: means(u, cells // NUM_CELLS, 1))
    return out if float(out.abs().nan_to_num(nan=torch.inf).max()) < LARGEST else None


def trunk(count: int, seed: int) -> Path:
    """Return the finished stage of an operator that is trained on `count` problems."""
    place = FOLDER / f"{count}-{seed}"
    stage = place / "runs" / "zoo" / "operator"
    if (stage / "done.json").is_file():
        return stage
    numbers, found = {name: itertools.count(row, 2) for row, name in enumerate(TASKS)}, {}
    for name, own in numbers.items():
        kept = (u for u in (drawn(number, seed) for number in own) if u is not None)
        u = torch.stack(list(itertools.islice(kept, count // 2)), 1).flatten(0, 1)  # all problems in a split
        write(place / f"{name}.npz", {"u": u[:, :, 0].numpy()})
        path = write_config(place / f"{name}.npz", CONFIG, name, 1.0, TASKS[name], settings=settings("bare"))
        found[name] = yaml.safe_load(path.read_text(encoding="utf-8"))
    whole = found["ring"]
    whole["task"] |= found["walls"]["task"]
    whole["data"]["tasks"] = list(TASKS)
    whole["run"] = {"name": "zoo", "root": str(place / "runs"), "seed": seed}
    (place / "zoo.yaml").write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    own = [*NETWORK, f"operator.train.steps={STEPS}", f"operator.train.validate_every={STEPS}"]
    config = load_config(place / "zoo.yaml", own)
    for name in TASKS:
        with_cache(config, name)
    run_scripts(place / "zoo.yaml", own, "train_operator")
    return stage


def settings(column: str) -> dict[str, Any]:
    return {"history": CONTEXT, "base": BASES[column], "symmetries": []}


# ---- few trajectories --------------------------------------------------------------------------------------


def solved(family: str, indices: range, is_other: bool) -> Tensor:
    """Return trajectories by our solver or by other numerics, (n, time, 1, x)."""
    parameter, t_end, _ = FAMILIES[family]
    given = {"seed": 0, "resolution": 2 * NUM_CELLS, "num_frames": NUM_FRAMES}
    solver = partial(solve, family) if is_other else SOLVERS[family].simulate
    return means(torch.as_tensor(solver(indices, parameter=parameter, t_end=t_end, **given)), 2, 1)


def prepared(family: str, count: int, column: str, overrides: list[str]) -> Config:
    """Return the configuration of `count` trajectories, of which a fifth selects. One more is the test split,
    which nothing reads."""
    task = FAMILIES[family][2]
    path = FOLDER / family / f"{task}-{count}-{column}.npz"
    if not path.is_file():
        write(path, {"u": solved(family, range(count + 1), False)[:, :, 0].numpy()})
    dt = FAMILIES[family][1] / (NUM_FRAMES - 1)
    config = write_config(path, CONFIG, task, dt, TASKS[task], settings=settings(column))
    fractions = [f"data.val_fraction={count // 5 / (count + 1)}", f"data.test_fraction={1 / (count + 1)}"]
    return with_cache(load_config(config, [*NETWORK, *fractions, *overrides]), task)


def tests(family: str) -> dict[str, Split]:
    """Return home and other -> test trajectories from starts that no training has."""
    found = {}
    for name in ("home", "other"):
        u = solved(family, range(1000, 1000 + NUM_TEST), name == "other")
        given, none = (u[:, :CONTEXT], u[:, CONTEXT:]), torch.zeros(len(u), 0, dtype=torch.float64)
        found[name] = Split(*given, none, torch.arange(len(u)))
    return found


def run(family: str, count: int, column: str, problems: int, seed: int, args: argparse.Namespace) -> None:
    """Train and score unless the result exists."""
    key = {"column": f"{column} {count}", "problems": problems, "seed": seed}
    key |= {
        "budget_s": args.budget,
        "steps": STEPS,
        "processor": processor("cpu"),
        "overrides": args.overrides,
    }
    if is_there(family, KEPT, key):
        return
    config = prepared(family, count, column, args.overrides)
    init = trunk(problems, seed) if problems else None
    start = None if init is None else lambda operator: print(copy_weights(operator, init, 1.0), flush=True)
    trained = train_ours(config, FAMILIES[family][2], args.budget, seed, modify=start)
    row: dict[str, Any] = {"steps": trained.steps, "validation": trained.history[-1]["val"]}
    for name, split in args.tests[family].items():
        found = summary(rollout(trained, split, BATCH)[0], split, False, 1)
        row[name] = {"error": found["error"]}
    put(family, KEPT, key, {"row": row})
    print(family, json.dumps(key | row), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--count", nargs="+", type=int, default=(5, 20), help="trajectories")
    parser.add_argument("--column", nargs="+", choices=tuple(BASES), default=list(BASES))
    parser.add_argument("--problems", nargs="+", type=int, default=(0, 4, 16, 64), help="even; 0: no trunk")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    parser.add_argument("--budget", type=float, default=10.0, help="processor seconds of one thread")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    train_ours(prepared("burgers1d", 5, "bare", args.overrides), "ring", WARM_UP, 0)
    args.tests = {family: tests(family) for family in args.family}
    given = (args.seeds, args.problems, args.column, args.count, args.family)
    for seed, problems, column, count, family in itertools.product(*given):
        run(family, count, column, problems, seed, args)


if __name__ == "__main__":
    main()
