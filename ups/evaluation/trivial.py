"""Forecasts without a model, as references: the last input frame, the training mean and its annual cycle."""

import math

import torch
from torch import Tensor

from ups.evaluation.truth import Truth

ENOUGH = 256  # training trajectories in a mean, evenly spaced
YEARS = 2  # of data, at least, for an annual cycle
HARMONICS = 3  # of the year; more would fit the weather of single days


class Trivial:
    """The trivial forecasts of a task. Steady: the mean of the training solutions. Otherwise persistence, the
    mean of each cell over training frames (climatology) and, if dates span at least YEARS, its annual cycle
    (mean and HARMONICS of the year by least squares)."""

    def __init__(self, truth: Truth, batch_size: int):
        self.truth, task, cache = truth, truth.task, truth.cache
        self.constant = truth.future(cache.split["train"]).mean(0, keepdim=True) if task.is_steady else None
        self.cycles: dict[str, tuple[int, Tensor]] = {}  # name -> harmonics, their weights
        if task.is_steady:
            return
        rows = cache.split["train"]
        rows = rows[torch.linspace(0, len(rows) - 1, min(ENOUGH, len(rows))).round().long()]
        years = truth.years(rows, cache.num_frames)
        sums = {"climatology": (0, [0, 0])}
        if years is not None and float(years.max() - years.min()) >= YEARS:
            sums["seasonal_climatology"] = HARMONICS, [0, 0]
        for some in cache.row_blocks(rows, cache.num_frames, batch_size):
            u = task.predicted(truth.frames(some, 0, cache.num_frames)).double().flatten(0, 1)
            for harmonics, total in sums.values():
                phases = cycle(truth.years(some, cache.num_frames), harmonics, u.shape[0])
                total[0], total[1] = total[0] + phases.T @ phases, total[1] + phases.T @ u.flatten(1)
        self.cycles = {
            name: (harmonics, torch.linalg.pinv(a) @ b) for name, (harmonics, (a, b)) in sums.items()
        }

    def forecasts(self, rows: Tensor, u_ref: Tensor, start: Tensor | None) -> dict[str, Tensor]:
        """Name -> forecast of the frames u_ref (n, T, C, *space) that follow start (n, 1, C, *space)."""
        if self.constant is not None:
            return {"train_mean": self.constant.expand_as(u_ref)}
        first = self.truth.context
        years = self.truth.years(rows, first + u_ref.shape[1])
        years = None if years is None else years[:, first:]
        found = {"persistence": self.truth.task.predicted(start).expand_as(u_ref)}
        for name, (harmonics, weights) in self.cycles.items():
            u = cycle(years, harmonics, math.prod(u_ref.shape[:2])) @ weights
            found[name] = u.view(u_ref.shape).to(u_ref)
        return found


def cycle(years: Tensor | None, harmonics: int, count: int) -> Tensor:
    """One and the harmonics of the year (count, 1 + 2 harmonics) at `count` times, in years."""
    if not harmonics:
        return torch.ones(count, 1, dtype=torch.float64)
    angles = 2 * math.pi * years.flatten()[:, None] * torch.arange(1, harmonics + 1)
    return torch.cat([torch.ones(count, 1, dtype=torch.float64), angles.cos(), angles.sin()], 1)
