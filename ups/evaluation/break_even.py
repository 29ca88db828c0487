"""Break-even: the number of forecasts after which data, training and inference cost less than the solver.

    N* = budget / (seconds of an equally accurate solver - seconds of the operator)    (arXiv 2605.15399)

budget: seconds to solve the training and validation trajectories, to fit the base and to train. The training
of a stage is shared equally by its tasks. seconds: per forecast of one trajectory, from the last context
frame to the end; median, on one thread, in one batch of the same trajectories. solver: the task's own
(`Task.integrate`, on the CPU), on the coarsest of the grids n, n/2, n/4, .. on which its error is at most the
operator's. Its start is interpolated to that grid and its frames back; that time is not counted.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark

from ups.common.formatting import number
from ups.common.spectral import resample
from ups.config import Config
from ups.data.generate import generation_settings, solver_seconds
from ups.evaluation.forecast import rolled_out
from ups.evaluation.truth import Truth
from ups.metrics.errors import nrmse_per_trajectory, score
from ups.metrics.intervals import number as finite
from ups.models.operator import Operator
from ups.tasks import Task

NUM_TRAJECTORIES = 16  # in the batch, each of another initial condition
MIN_CELLS = 8  # per axis; the solvers take no coarser grid (ups/tasks/initial.py)
MEASURED_S = 0.3  # calls are repeated for so long
SIZES = ("num_trajectories", "resolution", "num_frames", "t_end")

Cost = dict[str, Any]  # error: nRMSE, mean over trajectories; seconds: per forecast; grid, of a solver


@torch.no_grad()
def assess_break_even(
    operator: Operator, truth: Truth, config: Config, folder: Path, train_s: float
) -> dict[str, Any]:
    """The entry "break_even" of a task. folder: of the operator stage; train_s: seconds in its loop."""
    task, cache, settings = truth.task, truth.cache, truth.cache.settings
    if reason := why_unknown(task, config):
        return {"bound": "unknown", "forecasts": None, "words": f"N* is unknown: {reason}"}
    rows = cache.split[truth.split][truth.one_of_each(min(NUM_TRAJECTORIES, config.evaluate.batch_size))]
    u_ref, head = truth.future(rows), operator.head(task.name)
    u = truth.inputs(rows) if task.is_steady else truth.frames(rows, truth.context - 1, 1)
    given = truth.given(rows, head.input_codec, head.scale.device)
    predict = partial(rolled_out, operator, truth, rows, given)
    known, used = settings.parameters or [None], torch.cat([cache.split["train"], cache.split["val"]])
    sizes = {key: getattr(settings, key) for key in SIZES} | {"seed": config.data.seed}
    fit = json.loads((folder / "bases" / f"{task.name}.json").read_text(encoding="utf-8"))
    with benchmark.set_torch_threads(1):
        ours = {"error": mean_error(predict(), u_ref, task), "seconds": median_seconds(predict) / len(rows)}
        tried = error_matched(partial(integrate, truth, rows), u[:, 0].double(), u_ref, task, ours["error"])
        data = sum(
            int((cache.parameter_index[used] == place).sum())
            * solver_seconds(task.name, generation_settings(task.name, parameter=value, **sizes))
            for place, value in enumerate(known)
        )
    budget = {"data": data, "base": fit["facts"]["seconds"], "training": train_s / len(operator.heads)}
    return conclude(budget, tried, ours)


def why_unknown(task: Task, config: Config) -> str:
    """Why the costs cannot be compared; "" if they can."""
    reasons = {
        "the task has no solver that starts from a stored frame": task.integrate is None,
        "the task's solver did not make the data": config.data.source != "generate",
        "the solver needs the parameter, which is hidden": task.hides,
        "the weights are from elsewhere": bool(config.evaluate.weights),
        "the training started from the weights of another run": bool(config.operator.init),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def break_even(budget_s: float, solver_s: float, operator_s: float) -> float | None:
    """N*; None for never: a forecast of the operator takes at least as long as one of the solver."""
    return budget_s / (solver_s - operator_s) if solver_s > operator_s else None


def conclude(budget: dict[str, float], tried: Sequence[Cost], ours: Cost) -> dict[str, Any]:
    """The entry of a task. tried: of the solver, from the coarsest grid to the one that is compared."""
    solver, total = tried[-1], sum(budget.values())
    found = break_even(total, solver["seconds"], ours["seconds"])
    if solver["error"] > ours["error"]:  # an equally accurate solver takes longer
        bound = "at most" if found else "unknown"
    else:  # on a coarser grid it takes less
        bound = ("at least" if len(tried) == 1 else "about") if found else "never"
    words = f"N* is {bound}{f' {number(found)} forecasts' if found else ''}: seconds per forecast"
    for name, row in (
        (f"the solver on {' × '.join(map(str, solver['grid']))} cells", solver),
        ("the operator", ours),
    ):
        words += f", {name} {number(row['seconds'])} (nRMSE {number(row['error'])})"
        row["error"] = finite(row["error"])
    words += f"; data, base and training took {number(total)} s"
    made = {"bound": bound, "forecasts": found, "words": words, "budget_s": budget}
    return made | {"solver": solver, "operator": ours}


def error_matched(
    solve: Callable[[Tensor], Tensor], u: Tensor, u_ref: Tensor, task: Task, error: float
) -> list[Cost]:
    """The solver from the coarsest grid to the first on which its error is at most `error`, or the full one.

    solve: u (n, C, *space of any grid) -> frames (n, T, C, *space). u: start, float64; u_ref: truth. A solver
    that refuses a grid has the error inf there, in no time.
    """
    grids, tried = [tuple(u.shape[-task.ndim :])], []
    while min(grids[0]) >= 2 * MIN_CELLS:
        grids.insert(0, tuple(cells // 2 for cells in grids[0]))
    for grid in grids:
        start = regridded(u, grid, task, task.inputs or task.fields)
        tried.append({"grid": list(grid), "error": math.inf, "seconds": 0.0})
        with contextlib.suppress(ValueError, RuntimeError):
            tried[-1]["error"] = mean_error(
                regridded(solve(start), grids[-1], task, task.fields), u_ref, task
            )
            if tried[-1]["error"] <= error or grid == grids[-1]:
                tried[-1]["seconds"] = median_seconds(partial(solve, start)) / len(u)
                break
    return tried


def regridded(u: Tensor, grid: Sequence[int], task: Task, names: Sequence[str]) -> Tensor:
    """Fields `names` (.., C, *space) interpolated to another grid; positive ones as logarithms."""
    is_log = [name in (*task.inputs, *task.positive) for name in names]
    is_log = torch.tensor(is_log).view(-1, *[1] * task.ndim)
    v = resample(torch.where(is_log, u.clamp_min(1e-30).log(), u), grid, task.boundary)
    return torch.where(is_log, v.exp(), v)


def integrate(truth: Truth, rows: Tensor, u: Tensor) -> Tensor:
    """The scored frames (n, T, C, *space), all fields, by the task's solver from u (n, C, *space)."""
    cache, task = truth.cache, truth.task
    index, known = cache.parameter_index[rows], cache.settings.parameters
    out = u.new_empty(len(u), truth.num_frames, len(task.fields), *u.shape[-task.ndim :])
    for place in index.unique().tolist():
        value, same = known[place] if known else None, index == place
        out[same] = task.integrate(u[same], parameter=value, dt=cache.dt, num_frames=truth.num_frames)
    return out


def mean_error(u_pred: Tensor, u_ref: Tensor, task: Task) -> float:
    """nRMSE, mean over trajectories; inf if it is undefined."""
    scores = score(task.predicted(u_pred).to(u_ref.dtype), u_ref, task.boundary)
    return float(nrmse_per_trajectory(scores).mean().nan_to_num(math.inf, math.inf))


def median_seconds(call: Callable[[], Any]) -> float:
    """Median wall-clock seconds of a call after a warm-up, on one thread."""
    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=1)
    return timer.blocked_autorange(min_run_time=MEASURED_S).median
