"""Break-even: the number of forecasts after which data, training and inference cost less than the solver.

    N* = (data + base + training) / (seconds of the solver - seconds of the operator)    (arXiv 2605.15399)

Data: training and validation trajectories. Training: shared equally by the tasks of the stage. Seconds: per
forecast of one trajectory from the last context frame to the end, both in one batch and on one thread, of
processor time (operator on a GPU: wall-clock time). The solver is the task's own (`Solver.integrate`) on the
coarsest of the grids n, n/2, n/4, .. where its error is at most the operator's; interpolation is not timed.
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark

from ups.common.text import number
from ups.config.schema import Config
from ups.data.generate import solver_of
from ups.evaluation.forecast import rolled_out
from ups.evaluation.gates import horizon_of
from ups.evaluation.truth import Truth
from ups.metrics.errors import nrmse_per_trajectory, score
from ups.metrics.intervals import number as finite
from ups.models.operator import Operator
from ups.results import Entry
from ups.tasks import Task
from ups_discovery.spectral import resample

NUM_TRAJECTORIES, NUM_SOLVED = 16, 4  # in the batch; solved again, to estimate the cost of the data
MIN_CELLS = 8  # per axis; the solvers take no coarser grid (ups_solvers/solver.py)
MEASURED_S = 0.1  # calls are repeated for so long; a call that takes longer is measured once
Cost = dict[str, Any]  # "error": nRMSE, "seconds": per forecast; of a solver also "grid": cells


@torch.no_grad()
def assess_break_even(
    entry: Entry, operator: Operator, truth: Truth, config: Config, folder: Path, train_s: float
) -> None:
    """Add the case "break-even" of a task, and the fact "break_even". folder: of the operator stage; train_s:
    seconds in its loop."""
    task, cache, settings = truth.task, truth.cache, truth.cache.settings
    if reason := why_unknown(task, config):
        words = {"n_star": "unknown", "words": f"N* is unknown: {reason}"}
        return add_costs(entry, {"forecasts": None, **words})
    rows = cache.split[truth.split][truth.one_of_each(min(NUM_TRAJECTORIES, config.evaluate.batch_size))]
    u_ref, head = truth.future(rows), operator.head(task.name)
    u = truth.inputs(rows) if task.is_steady else truth.frames(rows, truth.context - 1, 1)
    given = truth.given(rows, head.input_codec, head.scale.device)
    known, used = settings.parameters or [None], torch.cat([cache.split["train"], cache.split["val"]])
    sizes = {key: getattr(settings, key) for key in ("resolution", "num_frames", "t_end")}
    sizes |= {"num_trajectories": NUM_SOLVED, "seed": config.data.seed}
    fit = json.loads((folder / "bases" / f"{task.name}.json").read_text(encoding="utf-8"))
    with benchmark.set_torch_threads(1):
        clock = time.perf_counter if given.is_cuda else time.process_time
        u_pred, seconds = timed(partial(rolled_out, operator, truth, rows, given), clock)
        ours = {"error": mean_error(u_pred, u_ref, task), "seconds": seconds / len(rows)}
        tried = error_matched(partial(integrate, truth, rows), u[:, 0].double(), u_ref, task, ours["error"])
        each = torch.tensor([solver_of(task).seconds({"parameter": value, **sizes}) for value in known])
    data = float(each[cache.parameter_index[used]].sum())
    budget = {"data": data, "base": fit["facts"]["seconds"], "training": train_s / len(operator.heads)}
    add_costs(entry, conclude(budget, tried, ours, horizon_of(entry.facts)))


def add_costs(entry: Entry, found: dict[str, Any]) -> None:
    entry.facts["break_even"] = {key: found[key] for key in ("n_star", "words")}
    costs = {key: value for key, value in found.items() if key not in ("n_star", "words")}
    entry.add("", costs, "break-even")


def why_unknown(task: Task, config: Config) -> str:
    """Why the costs cannot be compared; "" if they can."""
    solver = solver_of(task)
    reasons = {
        "the task has no solver that starts from a stored frame": solver is None or solver.integrate is None,
        "the task's solver did not make the data": config.data.source != "generate",
        "the solver needs the parameter, which is hidden": task.hides,
        "the weights are from elsewhere": bool(config.evaluate.weights),
        "the training started from the weights of another run": bool(config.operator.init),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def conclude(budget: dict[str, float], tried: Sequence[Cost], ours: Cost, horizon: str) -> dict[str, Any]:
    """Costs of a task and words on them. tried: of the solver, from the coarsest grid to the one that is
    compared; horizon: of the forecasts, in words."""
    solver, total = tried[-1], sum(budget.values())
    gain = solver["seconds"] - ours["seconds"]
    found = total / gain if gain > 0 else None
    if solver["error"] > ours["error"]:  # an equally accurate solver takes longer
        bound = "at most" if found else "unknown"
    else:  # on a coarser grid it takes less
        bound = ("at least" if len(tried) == 1 else "about") if found else "never"
    n_star = f"{bound} {float(f'{found:.2g}'):,.0f}" if found else bound
    takes = [f"{number(row['seconds'])} (nRMSE {number(row['error'])})" for row in (solver, ours)]
    words = (
        f"N* is {n_star}; seconds per forecast{horizon}: the solver on "
        f"{' × '.join(map(str, solver['grid']))} cells {takes[0]}, the operator {takes[1]}; data, base and "
        f"training: {number(total)} s"
    )
    solver, ours = ({**row, "error": finite(row["error"])} for row in (solver, ours))
    costs = {"budget_s": budget, "solver": solver, "operator": ours}
    return {"forecasts": found, "n_star": n_star, "words": words, **costs}


def error_matched(
    solve: Callable[[Tensor], Tensor], u: Tensor, u_ref: Tensor, task: Task, error: float
) -> list[Cost]:
    """The solver from the coarsest grid to the first on which its error is at most `error`, or the full one;
    inf where it refuses. solve: start (n, C, *any grid) -> frames (n, T, C, *its grid); u: start, float64."""
    grids, tried = [tuple(u.shape[-task.ndim :])], []
    while min(grids[0]) >= 2 * MIN_CELLS:
        grids.insert(0, tuple(cells // 2 for cells in grids[0]))
    for grid in grids:
        start = regridded(u, grid, task, task.inputs or task.fields)
        tried.append({"grid": list(grid), "error": math.inf, "seconds": 0.0})
        with contextlib.suppress(ValueError):
            frames, seconds = timed(partial(solve, start))
            found = mean_error(regridded(frames, grids[-1], task, task.fields), u_ref, task)
            tried[-1] |= {"error": found, "seconds": seconds / len(u)}
        if tried[-1]["error"] <= error:
            break
    return tried


def regridded(u: Tensor, grid: Sequence[int], task: Task, names: Sequence[str]) -> Tensor:
    """Fields `names` (.., C, *space) interpolated to another grid; positive ones as logarithms."""
    is_log = torch.tensor([name in task.inputs + task.positive for name in names]).view(-1, *[1] * task.ndim)
    v = resample(torch.where(is_log, u.clamp_min(1e-30).log(), u), grid, task.boundary)
    return torch.where(is_log, v.exp(), v)


def integrate(truth: Truth, rows: Tensor, u: Tensor, count: int = 0) -> Tensor:
    """The `count` frames (0: as many as are scored) (n, T, C, *space), all fields, after u (n, C, *space), by
    the task's solver."""
    cache, task = truth.cache, truth.task
    index, known = cache.parameter_index[rows], cache.settings.parameters or [None]
    count = count or truth.num_frames
    out = u.new_empty(len(u), count, len(task.fields), *u.shape[-task.ndim :])
    for place in index.unique().tolist():
        same, times = index == place, {"dt": cache.dt, "num_frames": count}
        out[same] = solver_of(task).integrate(u[same], parameter=known[place], **times)
    return out


def mean_error(u_pred: Tensor, u_ref: Tensor, task: Task) -> float:
    """nRMSE, mean over trajectories; inf if it is undefined."""
    scores = score(task.predicted(u_pred).to(u_ref.dtype), u_ref, task.boundary)
    return float(nrmse_per_trajectory(scores).mean().nan_to_num(math.inf, math.inf))


def timed(call: Callable[[], Tensor], clock: Callable[[], float] = time.process_time) -> tuple[Tensor, float]:
    """The result of a call and its seconds on one thread: the median after a warm-up."""
    started = clock()
    result, seconds = call(), clock() - started
    if seconds < MEASURED_S:
        timer = benchmark.Timer("call()", timer=clock, globals={"call": call}, num_threads=1)
        seconds = timer.blocked_autorange(min_run_time=MEASURED_S).median
    return result, seconds


def train_seconds(history: list[dict]) -> float:
    """Wall-clock seconds in the training loop, from the log lines with a rate."""
    rated = [line for line in history if "steps_per_s" in line]
    steps = itertools.pairwise([0, *(line["step"] for line in rated)])
    return round(
        sum(
            (now - before) / max(line["steps_per_s"], 1e-9)
            for (before, now), line in zip(steps, rated, strict=True)
        ),
        1,
    )
