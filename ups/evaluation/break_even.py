"""What `python -m bench.pays` and the trust of derivatives compare a forecast with: the task's own solver
from stored frames, on this grid or another; and the time of both."""

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import benchmark

from ups.config.schema import Config
from ups.data.generate import solver_of
from ups.evaluation.truth import Truth
from ups.tasks import Task
from ups_discovery.spectral import resample

MIN_CELLS = 8  # per axis; the solvers take no coarser grid (ups_solvers/solver.py)
MEASURED_S = 0.1  # calls are repeated for so long; a call that takes longer is measured once


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
