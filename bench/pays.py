"""When a forecast pays: seconds of the cheapest solver that is as accurate, seconds of the forecast, and N*.

    OMP_NUM_THREADS=1 python -m bench.pays    # all rows; a few minutes if idle and weights are there
    python -m bench.pays --row cfd2d pypde --python other/bin/python
    python -m bench.table                     # the table of docs/forecasts.md

    N* = (seconds of data, cache and training) / (seconds of the solver - seconds of the forecast)

Rows: the eleven families with our solvers, and Burgers' equation with the solvers of three other authors
(bench/authors.py), Starts that no training saw; the
truth is the solver on its full grid, which made the data. The solver that is compared is the cheapest whose
error is at most the forecast's, of several grids (other authors: times steps of a frame or tolerances; ours
choose their steps themselves). The forecast is `Forecaster.forecast` with all it does; "base" is the same
without the network. Seconds: processor time per trajectory of one thread, of all starts in one batch and of
one start alone. Intervals: 95 %, over starts and repeated measurements.

Weights: pretrained/ but for the families of TRAINED. Its data are timed again, its training is that of its
log times its two processes, and FITS_S stands for its fits. The other weights stay in bench/out/pays and are
made where they are missing; all that their processes computed counts. Writes bench/results/pays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import benchmark

import ups
from bench import authors
from bench.command import parser_of, run_scripts
from bench.entries import RESULTS, processor, put
from bench.tune import OUT
from bench.user_data import CONFIG, write, write_config
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.evaluation.parts import train_seconds
from ups.forecaster import Forecaster
from ups.metrics.errors import nrmse_per_trajectory, score
from ups.tasks import TASKS, Task
from ups_discovery.boundary import PERIODIC
from ups_discovery.spectral import resample
from ups_solvers import SOLVERS

ELEVEN, SCRIPTS = ROOT / "configs" / "small_11task.yaml", ("prepare_data", "prepare_cache", "train_operator")
TRAINED = {  # families with a short training of their own -> trajectories per parameter value, steps
    "reacdiff1d": (100, 300),
    "cfd1d": (60, 300),
    "cfd3d": (12, 60),
    "diff_react2d": (40, 200),
    "shallow_water2d": (60, 300),
}
PROCESSES = 2  # of the training of pretrained/
FITS_S = 120.0  # of a family of pretrained/, assumed, since its log lacks them; 70 s in the default run then
UNSEEN = 10_000  # the first trajectory that no training saw
NUM_STARTS, NUM_REPEATS, LONG_S, NUM_DRAWS = 8, 5, 1.0, 400
MIN_CELLS = 8  # per axis; the solvers take no coarser grid (ups_solvers/solver.py)
MEASURED_S = 0.1  # calls are repeated for so long; a call that takes longer is measured once
FRACTIONS = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of the cells per axis of the full grid
# the other authors' rows: cells and steps of the truth, trajectories, steps of training; what is tried
EQUATION, FINE, NUM_FILMS, NUM_STEPS = "burgers", (256, 40), 48, 200
CELLS = (32, 64, 96, 128, 192, 256)
STEPS = {"pypde": (1, 100), "exponax": (2, 5, 10, 20), "phiflow": (2, 5, 20)}
# "errors" (n,); "batch", "alone": measured seconds per trajectory; of a solver also "grid"
Cost = dict[str, Any]
Found = tuple[dict[str, float], dict[str, Cost], list[Cost]]  # budget, of the forecasts, of the solvers


def spent() -> float:
    """Processor seconds of the processes that this one has started and that are done."""
    return sum(os.times()[2:4])


def trained(name: str, config: Path, *overrides: str) -> tuple[Forecaster, dict[str, float]]:
    """The operator of a row, and the processor seconds of every script that led to it."""
    folder, seconds = OUT / "pays" / name, {}
    kept = folder / "seconds.json"
    if not kept.is_file():
        places = [f"run.root={folder}", "run.name=run"]
        if config == ELEVEN:
            places += [f"data.root={folder}/data", f"cache.root={folder}/cache", f"data.tasks=[{name}]"]
        for script in SCRIPTS[config != ELEVEN :]:
            more = ["--workers", "1"] if script == "prepare_data" else []
            before = spent()
            run_scripts(config, [*places, *overrides, *more], script)
            seconds[script] = spent() - before
        kept.write_text(json.dumps(seconds), encoding="utf-8")
    return ups.load(folder / "run"), json.loads(kept.read_text(encoding="utf-8"))


def regridded(u: Tensor, grid: Sequence[int], task: Task, names: Sequence[str]) -> Tensor:
    """Fields `names` (.., C, *space) interpolated to another grid; positive ones as logarithms."""
    is_log = torch.tensor([name in task.inputs + task.positive for name in names]).view(-1, *[1] * task.ndim)
    v = resample(torch.where(is_log, u.clamp_min(1e-30).log(), u), grid, task.boundary)
    return torch.where(is_log, v.exp(), v)


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result of a call and its seconds on one thread: the median after a warm-up."""
    started = time.process_time()
    result, seconds = call(), time.process_time() - started
    if seconds < MEASURED_S:
        timer = benchmark.Timer("call()", timer=time.process_time, globals={"call": call}, num_threads=1)
        seconds = timer.blocked_autorange(min_run_time=MEASURED_S).median
    return result, seconds


def cost_of(
    call: Callable[[Tensor], Tensor], task: Task, truth: Tensor, scored_fraction: float = 1.0
) -> Cost:
    """Errors and seconds of call(rows) -> frames (n, T, C, *space), of which `scored_fraction` counts."""
    rows = torch.arange(len(truth))
    u, seconds = timed(partial(call, rows))
    repeats = range(NUM_REPEATS - 1 if seconds < LONG_S else 0)
    batch = [seconds, *(timed(partial(call, rows))[1] for _ in repeats)]
    alone = [timed(partial(call, rows[[at]]))[1] for at in (0, len(rows) // 2, -1)]
    scores = score(task.predicted(u).float(), task.predicted(truth))
    return {
        "errors": nrmse_per_trajectory(scores).nan_to_num(math.inf, math.inf).tolist(),
        "batch": [scored_fraction * value / len(rows) for value in batch],
        "alone": [scored_fraction * value for value in alone],
    }


def forecasts(model: Forecaster, task: Task, u: Tensor, values: Tensor | None, truth: Tensor) -> dict:
    """The costs of the forecasts from u (n, T, C, *space), and of those of the base alone."""

    def call(rows: Tensor) -> Tensor:
        parameters = None if values is None else values[rows]
        return model.forecast(task.name, u[rows], parameters, truth.shape[1], extrapolate=True)

    head, found = model.operator.heads[task.name], {"UPS": cost_of(call, task, truth)}
    head.facts = dataclasses.replace(head.facts, network_weight=0.0)
    return found | {"base": cost_of(call, task, truth)}


def family(name: str) -> Found:
    """The costs of a family and of our solver on its grids."""
    overrides = []
    if name in TRAINED:
        num, steps = TRAINED[name]
        overrides = [f"task.{name}.num_trajectories={num}", f"operator.train.steps={steps}"]
    config, task, solver = load_config(ELEVEN, overrides), TASKS[name], SOLVERS[name]
    settings, context, known = config.task[name], config.context(name), config.task[name].parameters or [None]
    sizes = {"seed": config.data.seed, "num_frames": settings.num_frames, "t_end": settings.t_end}
    starts = [(UNSEEN + at, value) for value in known for at in range(NUM_STARTS // len(known))]

    def simulate(rows: Tensor, cells: int) -> Tensor:
        each = (([starts[row][0]], starts[row][1]) for row in rows)
        return torch.cat(
            [solver.simulate(at, **sizes, resolution=cells, parameter=value) for at, value in each]
        )

    if name in TRAINED:
        model, budget = trained(name, ELEVEN, *overrides)
    else:
        model, budget = ups.load(ROOT / "pretrained"), {"bases": FITS_S}
        lines = (ROOT / "pretrained" / "operator" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        budget["training"] = PROCESSES * train_seconds([*map(json.loads, lines)]) / len(model.tasks)
        each = sizes | {"resolution": settings.resolution, "num_trajectories": settings.num_trajectories}
        seconds = [solver.seconds(each | {"parameter": value}) for value in known]
        budget["data"] = settings.num_trajectories * sum(seconds)
    path = OUT / "pays" / name / "films.npy"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, simulate(torch.arange(len(starts)), settings.resolution).numpy())
    films = torch.from_numpy(np.load(path))
    split = (2, len(task.inputs)) if task.is_steady else (1, context)
    u, truth = films.tensor_split((split[1],), dim=split[0])
    ranges, full = model.tasks[name]["parameters"].values(), list(u.shape[-task.ndim :])
    values = torch.tensor([[low if low == high else of for low, high in ranges] for _, of in starts])
    ours = forecasts(model, task, u, values if len(ranges) else None, truth)

    def solve(start: Tensor, rows: Tensor) -> Tensor:
        if solver.integrate is None:  # the fields are not the whole state: from where the trajectory begins
            frames = simulate(rows, start.shape[-1])[:, context:]
        else:
            out, times = [], {"dt": task_dt, "num_frames": truth.shape[1]}
            for value in known:  # rows are in the order of their parameters
                same = [int(row) for row in rows % len(starts) if starts[row][1] == value]
                out += [solver.integrate(start[same], parameter=value, **times)] if same else []
            frames = torch.cat(out)
        return regridded(frames, full, task, task.fields)

    task_dt, tried = settings.t_end / max(settings.num_frames - 1, 1), []
    scored_fraction = 1.0 if solver.integrate else truth.shape[1] / (settings.num_frames - 1)
    grids = dict.fromkeys(max(MIN_CELLS, int(fraction * full[0]) // 2 * 2) for fraction in FRACTIONS)
    for cells in grids:
        start = regridded(u[:, -1].double(), [cells] * task.ndim, task, task.inputs or task.fields)
        with contextlib.suppress(ValueError):  # too coarse for the solver
            one = cost_of(partial(solve, start), task, truth, scored_fraction)
            tried.append(one | {"grid": " x ".join([str(cells)] * task.ndim)})
            if all(mine <= other for mine, other in zip(one["errors"], ours["UPS"]["errors"], strict=True)):
                break
    return budget, ours, tried


def stranger(author: str, python: Path | None) -> Found:
    """The costs of Burgers' equation and of another author's solver on its grids, by its steps."""
    folder, starts = OUT / "pays" / author, torch.from_numpy(authors.starts(FINE[0]))
    stored, films, kept = (authors.NUM_CELLS,), folder / "films.npz", folder / "data.json"

    def solved(rows: slice, tried: Sequence[tuple[int, int]], **more: Any) -> dict[str, np.ndarray]:
        cells = {cells for cells, _ in tried}
        grids = [resample(starts[rows], (num,), PERIODIC).numpy() for num in cells]
        return authors.solve(author, python, folder / "work", tried, grids, **more)

    def seen(u: np.ndarray) -> Tensor:
        """Frames (n, T, x) of any grid on the stored one, (n, T, 1, x)."""
        return resample(torch.from_numpy(u).nan_to_num(1e30), stored, PERIODIC)[:, :, None].float()

    if not kept.is_file():
        before = spent()
        write(films, {"u": seen(solved(slice(NUM_FILMS), [FINE])["u0"])[:, :, 0].numpy()})
        kept.write_text(json.dumps({"prepare_data": spent() - before}), encoding="utf-8")
    config = write_config(films, CONFIG, EQUATION, authors.DT)
    model, budget = trained(author, config, f"operator.train.steps={NUM_STEPS}")
    tried = [*((cells, steps) for cells in CELLS for steps in STEPS[author]), FINE]
    found = solved(slice(-NUM_STARTS, None), tried, is_measured=True)
    task, truth, solvers = model.operator.heads[EQUATION].task, seen(found[f"u{len(tried) - 1}"]), []
    for at, ((cells, steps), (batch, alone)) in enumerate(zip(tried, found["seconds"].tolist(), strict=True)):
        scores = score(seen(found[f"u{at}"])[:, 1:], truth[:, 1:])
        grid = f"{cells}, tolerance {0.01 / steps:g}" if author == "pypde" else f"{cells}, {steps} steps"
        errors = nrmse_per_trajectory(scores).tolist()
        solvers.append({"errors": errors, "batch": [batch], "alone": [alone], "grid": grid})
    ours = forecasts(model, task, truth[:, :1], None, truth[:, 1:])
    return json.loads(kept.read_text(encoding="utf-8")) | budget, ours, solvers


def n_star(
    budget: float, ours: Cost, tried: list[Cost], kind: str, rows: Sequence[int], pick: Callable
) -> dict:
    """What is compared on the starts `rows`, and N*, inf for never. kind: "batch" or "alone"."""
    error, *errors = (float(np.mean(np.take(one["errors"], rows))) for one in (ours, *tried))
    seconds, *others = (float(pick(one[kind])) for one in (ours, *tried))
    solvers = [*zip(others, errors, (one["grid"] for one in tried), strict=True)]
    accurate = [one for one in solvers if one[1] <= error] or [min(solvers, key=lambda one: one[1])]
    solver_s, solver_error, grid = min(accurate)
    return {
        "solver": {"seconds": solver_s, "error": solver_error, "grid": grid},
        "forecast": {"seconds": seconds, "error": error},
        "n_star": budget / (solver_s - seconds) if solver_s > seconds else math.inf,
    }


def concluded(budget: dict[str, float], ours: dict[str, Cost], tried: list[Cost]) -> dict[str, Any]:
    """N* of the forecast and of its base, in a batch and alone, with intervals."""
    rng, found = np.random.default_rng(0), {"budget": budget}
    for name, kind in ((name, kind) for name in ours for kind in ("batch", "alone")):
        same, num = (sum(budget.values()), ours[name], tried, kind), len(ours[name]["errors"])
        draws = [n_star(*same, rng.integers(num, size=num), rng.choice)["n_star"] for _ in range(NUM_DRAWS)]
        low, high = np.quantile(draws, (0.025, 0.975), method="nearest").tolist()
        found[f"{name} {kind}"] = n_star(*same, range(num), np.median) | {"low": low, "high": high}
    return found


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    families = load_config(ELEVEN, []).data.tasks
    names = [*families, *authors.AUTHORS]
    parser.add_argument("--row", nargs="+", choices=names, default=names)
    parser.add_argument("--python", type=Path, help="an interpreter that has the other authors' packages")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "XLA_FLAGS": flags}
    for name in args.row:
        found = concluded(*(family(name) if name in families else stranger(name, args.python)))
        key = {"column": "pays", "seed": 0, "processor": processor("cpu"), "budget_s": 0}
        put(name, RESULTS / "pays", key, {"row": found})
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
