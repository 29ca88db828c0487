"""Partial observations of the input field of a steady task.

    values = mask * (S v + noise * eta)

v is the normalised input field (for darcy2d_grf the standardised log a). S is the mean over blocks of cells,
repeated over the block (block 1: v itself). The mask is 1 at observed cells; others hold 0, the prior mean in
normalised units. There are five kinds: all cells; none; a random fraction of the cells; block averages; every
cell with noise.

Every row of a batch has a random generator of its own, so that a batch can be split over processes and
micro-batches. KIND_FRACTIONS and the ranges are for training; `CASES` are the fixed observations of an
evaluation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ups.common.device import send
from ups_discovery.seeds import generator

# fractions of the rows of a training batch
KIND_FRACTIONS = {"full": 0.25, "none": 0.05, "points": 0.40, "coarse": 0.15, "noisy": 0.15}
COVERAGE = (0.01, 0.5)  # fraction of the cells observed by "points", log-uniform
NOISY_STD = (0.05, 1.0)  # standard deviation of "noisy" in normalised units (v has 1), log-uniform
BLOCKS = (2, 4, 8)  # cells per axis averaged by "coarse"; those that divide the grid are equally likely
FACTS = ("coverage", "noise", "log2_block")

# case: its levels, i.e. fraction of the cells observed, noise, cells per axis averaged
CASES: dict[str, tuple[float, float, int]] = {
    "none": (0.0, 0.0, 1),
    "points_1": (0.01, 0.0, 1),
    "points_10": (0.1, 0.0, 1),
    "points_50": (0.5, 0.0, 1),
    "coarse_4": (1.0, 0.0, 4),
    "noisy_0.3": (1.0, 0.3, 1),
    "full": (1.0, 0.0, 1),
}
PARTIAL = [case for case in CASES if case != "full"]  # a full observation has one solution


@dataclass(frozen=True)
class Observation:
    """An observation of a batch of fields.

    values (B, C, *space); mask (B, 1, *space) of 0 and 1; facts (B, len(FACTS)) float32; groups, on the CPU,
    one per row: (k, m) int64, flat indices of the m cells behind each of the k observed means, stored at the
    first of them.
    """

    values: Tensor
    mask: Tensor
    facts: Tensor
    groups: list[Tensor]

    @property
    def is_complete(self) -> list[bool]:
        """For every row, whether each cell is observed on its own."""
        return [len(groups) == self.mask[0].numel() for groups in self.groups]


@dataclass(frozen=True)
class Measured:
    """Values (batch, C, *space) of a field in physical units, known where mask is true, and the standard
    deviation of their errors, all of one shape. block: cells per axis of which a value, repeated in all of
    them, is the mean."""

    values: Tensor
    mask: Tensor
    noise: Tensor
    block: int = 1

    @property
    def is_exact(self) -> Tensor:
        """Whether a cell is known exactly, (batch, C, *space)."""
        return self.mask & (self.noise == 0) & (self.block == 1)

    def row(self, number: int | tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Flat indices (k,) of the measured values of a row (or frame), each block once, values and noise."""
        mask = self.mask[number].clone()
        for axis in range(1, mask.ndim):
            first = torch.arange(mask.shape[axis], device=mask.device) % self.block == 0
            mask &= first.view(-1, *[1] * (mask.ndim - 1 - axis))
        cells = mask.flatten().nonzero()[:, 0]
        return cells, *(part[number].flatten()[cells].double() for part in (self.values, self.noise))


def row_generators(seed: int, *keys: int | str, rows: Iterable[int]) -> list[torch.Generator]:
    """One random generator per row; rows are counted over the global batch."""
    return [generator(seed, "observe", *keys, row) for row in rows]


def sample_levels(space: Sequence[int], rngs: Sequence[torch.Generator]) -> Tensor:
    """Random levels (B, 3) of a training batch on the grid `space`, of even numbers of cells, as in `CASES`,
    one row per generator."""
    blocks = [block for block in BLOCKS if not any(size % block for size in space)]
    assert blocks, f"no block divides the grid {tuple(space)}"  # ups/data/counts.py refuses such tasks
    u_kind, u_level = torch.stack([torch.rand(2, generator=rng, dtype=torch.float64) for rng in rngs], 1)
    edges = torch.tensor(list(KIND_FRACTIONS.values()), dtype=torch.float64).cumsum(0)[:-1]
    index = torch.bucketize(u_kind, edges, right=True)
    kind = {name: index == i for i, name in enumerate(KIND_FRACTIONS)}
    coverage = torch.where(kind["points"], COVERAGE[0] * (COVERAGE[1] / COVERAGE[0]) ** u_level, 1.0)
    block = torch.where(kind["coarse"], torch.tensor(blocks)[(u_level * len(blocks)).long()], 1)
    noise = torch.where(kind["noisy"], NOISY_STD[0] * (NOISY_STD[1] / NOISY_STD[0]) ** u_level, 0.0)
    return torch.stack([coverage.masked_fill(kind["none"], 0.0), noise, block], 1)


def observe(v: Tensor, levels: Tensor, rngs: Sequence[torch.Generator]) -> Observation:
    """The observation of the normalised field v (B, C, *space), 1 to 3 space axes, at `levels` (B, 3) as in
    `CASES`.

    A coverage above zero observes at least one cell. Random numbers are generated on the CPU. Raises
    ValueError for blocks that do not divide the grid.
    """
    space, cells = v.shape[2:], v.shape[2:].numel()
    averaged, mask, eta = v, torch.zeros(len(v), cells), torch.zeros(v.shape)
    blocks = levels[:, 2].long()
    for block in sorted(set(blocks.tolist()) - {1}):
        if any(size % block for size in space):
            raise ValueError(
                f"blocks of {block} cells do not divide the grid {tuple(space)}; expected a "
                f"multiple of {block} per axis (ups.generative.observation.observe). Change "
                "task.TASK.resolution or leave the case out."
            )
        rows = send(blocks == block, v.device).view(-1, *[1] * (v.ndim - 1))
        averaged = torch.where(rows, block_average(v, block), averaged)
    for row, ((coverage, noise, _), rng) in enumerate(zip(levels.tolist(), rngs, strict=True)):
        count = max(round(coverage * cells), int(coverage > 0))
        is_partial = 0 < count < cells
        mask[row, torch.randperm(cells, generator=rng)[:count] if is_partial else slice(count)] = 1.0
        if noise > 0:
            eta[row] = torch.randn(v.shape[1:], generator=rng) * noise
    facts = torch.stack([mask.double().mean(1), levels[:, 1], levels[:, 2].log2()], 1)
    groups = [_groups(row, space, block) for row, block in zip(mask, blocks.tolist(), strict=True)]
    mask, eta = (send(part.to(v.dtype), v.device) for part in (mask.view(-1, 1, *space), eta))
    return Observation(mask * (averaged + eta), mask, send(facts.float(), v.device), groups)


def _groups(mask: Tensor, space: Sequence[int], block: int) -> Tensor:
    """Flat indices (k, block^ndim) of the observed blocks; mask (cells,) of one row."""
    cells = torch.arange(len(mask)).view(*space)
    for axis in range(len(space)):
        cells = cells.unfold(axis, block, block)
    cells = cells.reshape(-1, block ** len(space))
    return cells[mask[cells[:, 0]] > 0]


def observe_case(v: Tensor, case: str, rngs: Sequence[torch.Generator]) -> Observation:
    """The observation of v (B, C, *space) in the named case, one of `CASES`."""
    return observe(v, torch.tensor([CASES[case]] * len(v), dtype=torch.float64), rngs)


def observe_cells(v: Tensor, mask: Tensor) -> Observation:
    """The exact observation of v (B, C, *space) at the cells where mask (B, 1, *space) is 1."""
    mask = mask.to(v)
    facts = nn.functional.pad(mask.flatten(1).mean(1)[:, None], (0, len(FACTS) - 1))
    groups = [_groups(row, v.shape[2:], 1) for row in mask.flatten(1).cpu()]
    return Observation(torch.where(mask > 0, v, 0.0), mask, facts, groups)


def observe_all(v: Tensor) -> Observation:
    """The exact observation of all cells of v (B, C, *space)."""
    mask, facts = torch.ones_like(v[:, :1]), v.new_zeros(len(v), len(FACTS))
    facts[:, 0] = 1.0
    return Observation(v, mask, facts, [_groups(torch.ones(mask[0].numel()), v.shape[2:], 1)] * len(v))


def as_linear(observation: Observation, row: int, mean: float, std: float) -> dict[str, Any]:
    """One row of an observation of v = (g - mean) / std as y = A g + noise * eta of the field g (log a)
    itself: the observation that `ups_solvers.Solver.posterior` takes.

    mean, std: of the codec's only channel (`codec.mean.item()`, `codec.std.item()`). Raises ValueError unless
    the row is one channel on a square 2D grid, as the generated data are.
    """
    values, groups = observation.values[row].detach().cpu(), observation.groups[row]
    if values.ndim != 3 or values.shape[0] != 1 or values.shape[1] != values.shape[2]:
        raise ValueError(
            f"observation of shape {tuple(values.shape)}; expected one channel on a square, (1, "
            "n, n) (ups.generative.observation.as_linear), for which the exact posterior is "
            "known. Use it for darcy2d_grf."
        )
    return {
        "resolution": values.shape[1],
        "cells": groups,
        "values": values.flatten()[groups[:, 0]].double() * std + mean,
        "noise": float(observation.facts[row, FACTS.index("noise")]) * std,
    }


def block_average(v: Tensor, block: int) -> Tensor:
    """Mean over blocks of `block` cells per axis, repeated over the block: (B, C, *space)."""
    for axis in range(2, v.ndim):
        v = v.unflatten(axis, (-1, block)).mean(axis + 1).repeat_interleave(block, axis)
    return v
