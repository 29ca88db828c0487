"""Correct a coarse solver: our operator, an FNO or a U-Net learn the error of its step.

The solver is the task's own scheme (`Solver.step`), one call per frame on the stored grid. If the data come
from this scheme on that grid (data.source=generate without a stride), it runs on half the grid: means of
two cells, with its change interpolated back. Its result is one more input frame, and every model adds to
it. Results for the training frames are computed before the clock starts, because no model is trained
through the solver; rollouts call it.

Does not apply to steady Darcy flow, nor to shallow water, whose fields are not the whole state.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baselines import CLOCKS, Problem, Trained
from bench.numerics import means
from bench.score import fields
from bench.search import Changes
from bench.tune import OUT, changed
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.data.schedule import Batch
from ups.models.base_selection import evaluate_candidate
from ups.models.bases.base import Base, ParameterBatch
from ups.models.head import TaskHead
from ups.models.head_setup import MAX_TRAJECTORIES, base_settings, conserved_facts, unfitted_head
from ups.models.operator import Operator
from ups.models.windows import Windows, augment
from ups.tasks import Task
from ups_discovery.boundary import PERIODIC
from ups_discovery.seeds import generator
from ups_solvers import SOLVERS

# u (row, channel, *space) physical, parameters (row, P) -> the next frame
Step = Callable[[Tensor, Tensor], Tensor]
AT_ONCE = 256


def coarse_step(task: Task, dt: float, is_halved: bool, low: Tensor, high: Tensor) -> Step:
    """Return the solver's step. Raises ValueError for a task without one.

    low, high: range (C,) of the training data. For a state outside by its width or more (positive channels:
    below a tenth) the step returns NaN, because a lost rollout may take the solver arbitrarily many time
    steps.
    """
    solver = SOLVERS[task.files_of or task.name]
    if solver.step is None:
        raise ValueError(
            f"{task.name} has no step from a given state; expected a task whose fields are its whole state. "
            "Leave the columns of the correction out."
        )

    is_positive = torch.tensor([name in task.positive for name in task.fields])
    shape = (1, -1, *[1] * task.ndim)
    floor = torch.where(is_positive, low / 10, 2 * low - high).view(shape)
    ceiling = (2 * high - low).view(shape)

    def step(u: Tensor, parameters: Tensor) -> Tensor:
        first = parameters[:, 0] if parameters.shape[1] else torch.zeros(len(u))
        out, is_sound = torch.full_like(u, torch.nan), ((u > floor) & (u < ceiling)).flatten(1).all(1)
        for value in first[is_sound].unique():
            rows = (first == value) & is_sound
            given = means(u[rows], 2, task.ndim) if is_halved else u[rows]
            later = solver.step(given, parameter=float(value) if parameters.shape[1] else None, dt=dt)
            out[rows] = (
                u[rows] + doubled(later - given, task.ndim, task.boundary == PERIODIC) if is_halved else later
            )
        return out

    return step


def doubled(u: Tensor, ndim: int, is_periodic: bool) -> Tensor:
    """Interpolate linearly to the centres of half cells; constant at walls, or periodic."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[ndim]
    if not is_periodic:
        return F.interpolate(u, scale_factor=2, mode=mode, align_corners=False)
    finer = F.interpolate(
        F.pad(u, (1, 1) * ndim, mode="circular"), scale_factor=2, mode=mode, align_corners=False
    )
    return finer[(..., *[slice(2, -2)] * ndim)]


def solver_of(config: Config, cache: Cache, u: Tensor) -> Step:
    """u: training data (row, time, channel, *space)."""
    is_own = config.data.source == "generate" and config.task[cache.task.name].space_stride == 1
    values = u.movedim(2, 0).flatten(1)
    return coarse_step(cache.task, cache.dt, is_own, values.amin(1), values.amax(1))


def answers(config: Config, cache: Cache, u: Tensor, parameters: Tensor) -> Tensor:
    """Return the solver's step from every frame of u (row, time, channel, *space), kept in bench/out/coarse/
    by a hash of u.
    """
    digest = hashlib.sha256(u.contiguous().numpy()).hexdigest()[:16]
    path = OUT / "coarse" / f"{cache.task.name}-{digest}.npy"
    if not path.is_file():
        step, rows = solver_of(config, cache, u), parameters.repeat_interleave(u.shape[1], 0)
        with torch.no_grad():
            parts = [
                step(*some) for some in zip(u.flatten(0, 1).split(AT_ONCE), rows.split(AT_ONCE), strict=True)
            ]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, torch.cat(parts).view_as(u).numpy())
        partial.replace(path)
    return torch.from_numpy(np.load(path))


def corrected(problem: Problem, config: Config, cache: Cache) -> Problem:
    """Return the problem of a baseline that corrects the solver."""
    return dataclasses.replace(
        problem,
        step=solver_of(config, cache, problem.train),
        train_step=answers(config, cache, problem.train, problem.train_parameters),
    )


# ---- ours --------------------------------------------------------------------------------------------------


class Coarse(Base):
    """The solver as a base predictor."""

    kind = "coarse"

    def __init__(self, codec: Any, step: Step, values: Tensor):
        super().__init__()
        # in a list: not a module of the base's own
        self.codec, self.step, self.parameters_of = [codec], step, values

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        codec = self.codec[0]
        rows = self.parameters_of[parameters.index] if len(self.parameters_of) else torch.zeros(len(u), 0)
        return codec.normalise(self.step(codec.denormalise(u[:, -1]), rows))


class CoarseWindows(Windows):
    """Windows with the solver's step from the last input frame, which the head uses while gradients are
    computed.
    """

    answers: Tensor  # (training row, time, channel, *space), physical

    def read(self, head: TaskHead, batch: Batch, part: slice) -> tuple[Tensor, Tensor, ParameterBatch]:
        cache, rows = self.caches[batch.task], self.caches[batch.task].split["train"][batch.rows[part]]
        starts = batch.starts[part] + self.tasks[batch.task].train_from
        window = head.codec.decode(cache.batch(rows, starts, head.history + 1))
        coarse = self.answers[batch.rows[part], starts + head.history - 1]
        coarse = head.codec.normalise(coarse[:, None])
        window, coarse = augment(
            head.task,
            [(window, head.codec), (coarse, head.codec)],
            generator(self.seed, batch.step, "augment"),
        )
        head.base_frames = lambda u, *parameters: (
            coarse if torch.is_grad_enabled() else TaskHead.base_frames(head, u, *parameters)
        )
        return (
            window[:, : head.history],
            window[:, head.history :],
            head.parameter_batch(cache.parameters[rows]),
        )


def train_ours(args: argparse.Namespace, changes: Changes, seed: int, budget: float) -> Trained:
    """Train our operator with the solver as its base and other `changes` to the configuration."""
    from bench.ours import (
        train_ours as train_operator,  # it imports the operator, which the rivals do not need
    )

    key = f"task.{args.task}"
    mine = {name: value for name, value in changes.items() if name not in (f"{key}.base", f"{key}.reach")}
    config = changed(args, mine | {"operator.unroll_fraction": 0.0, f"{key}.bundle": 1})
    cache = open_cache(config, args.task)
    u, _ = fields(config, cache, "train")
    parameters = cache.parameters[cache.split["train"]]
    found = answers(config, cache, u, parameters)
    values = (
        torch.stack(
            [
                cache.parameters[cache.parameter_index == index][0]
                for index in range(len(cache.parameter_values))
            ]
        )
        if len(cache.parameter_values)
        else torch.zeros(0, 0)
    )
    step = solver_of(config, cache, u)
    head = unfitted_head(cache, "persistence", base_settings(cache), torch.device("cpu"))

    head = head.with_facts(**conserved_facts(head, cache))

    def to_solver(part: TaskHead) -> None:
        part.base = Coarse(part.codec, step, values)

    to_solver(head)
    normalise = head.codec.normalise
    left = head.codec.encode(normalise(u[:, 1:]) - normalise(found[:, :-1])).square().flatten(1).mean(1)
    index = cache.parameter_index[cache.split["train"]]
    for value in range(len(head.scale)):
        head.scale[value] = left[index == value].mean().sqrt().clamp_min(1e-7)

    def modify(operator: Operator) -> None:
        to_solver(operator.heads[args.task])

    class MyWindows(CoarseWindows):
        answers = found

    rows = cache.rows_by_parameter("val", MAX_TRAJECTORIES)
    error = evaluate_candidate("", head, cache, config.context(args.task), rows).error()
    return train_operator(
        config,
        args.task,
        budget,
        seed,
        args.device,
        CLOCKS[args.clock],
        fitted=(head, error),
        modify=modify,
        windows_of=MyWindows,
    )
