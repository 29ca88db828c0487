"""Partial observations of the input field of a steady task, for training and evaluating the conditional
prior, and the linear guess of the field from them, which travels with the weights of the prior.

    values = mask * (S v + noise * eta)

v is the normalised input field (for darcy2d_grf the standardised log a), S the mean over blocks of cells
spread over the block (block 1: v itself), mask 1 where something is seen. Unseen cells hold 0, the prior mean
in normalised units. Five
kinds: everything; nothing; a random share of the cells; block averages; every cell with noise.

Every row of a batch draws from a generator of its own, so that a batch may be cut among processes and
micro-batches. Shares and ranges are those of training; `CASES` are the fixed observations of an evaluation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ups.seeds import generator
from ups.tasks.darcy_grf import LinearObservation
from ups.transfer import send

# of the rows of training batches
SHARES = {"full": 0.25, "none": 0.05, "points": 0.40, "coarse": 0.15, "noisy": 0.15}
COVERAGE = (0.01, 0.5)   # share of the cells that "points" sees, log-uniform
NOISE = (0.05, 1.0)      # standard deviation of "noisy" in normalised units (v has 1), log-uniform
BLOCKS = (2, 4, 8)       # cells per axis that "coarse" averages, those that divide the grid equally likely
FACTS = ("coverage", "noise", "log2_block")
MODES = 96               # of the coefficient, in its linear guess

# case: its levels, how well a row is observed: share of the cells seen, noise, cells per axis averaged
CASES: dict[str, tuple[float, float, int]] = {
    "none": (0.0, 0.0, 1), "points_1": (0.01, 0.0, 1), "points_10": (0.1, 0.0, 1), "points_50": (0.5, 0.0, 1),
    "coarse_4": (1.0, 0.0, 4), "noisy_0.3": (1.0, 0.3, 1), "full": (1.0, 0.0, 1),
}


@dataclass(frozen=True)
class Observation:
    """values (B, C, *space), mask (B, 1, *space) of 0 and 1, facts (B, len(FACTS)) float32: share seen,
    noise, log2 block; blocks (B,) integers: the last again, in main memory, as cells per axis."""

    values: Tensor
    mask: Tensor
    facts: Tensor
    blocks: Tensor


def row_generators(seed: int, *keys: int | str, rows: Iterable[int]) -> list[torch.Generator]:
    """One generator per row, e.g. row_generators(seed, step, rows=range(first, last)) with rows counted over
    the global batch."""
    return [generator(seed, "observe", *keys, row) for row in rows]


def draw_levels(space: Sequence[int], generators: Sequence[torch.Generator]) -> Tensor:
    """The levels (B, 3) of a training batch on the grid `space`, one row per generator, as in `CASES` and
    distributed as `SHARES` and the ranges say.

    Raises ValueError for a grid that no block divides.
    """
    blocks = [block for block in BLOCKS if not any(size % block for size in space)]
    if not blocks:
        raise ValueError(f"no block of {', '.join(map(str, BLOCKS))} cells divides the grid {tuple(space)}; "
                         "expected even numbers of cells (ups.generative.observation.draw_levels). Change "
                         "task.TASK.resolution or task.TASK.space_stride.")
    pick, level = torch.stack([torch.rand(2, generator=source, dtype=torch.float64) for source in generators],
                              1)
    edges = torch.tensor(list(SHARES.values()), dtype=torch.float64).cumsum(0)[:-1]
    number = torch.bucketize(pick, edges, right=True)
    kind = {name: number == i for i, name in enumerate(SHARES)}
    coverage = torch.where(kind["points"], COVERAGE[0] * (COVERAGE[1] / COVERAGE[0]) ** level, 1.0)
    block = torch.where(kind["coarse"], torch.tensor(blocks)[(level * len(blocks)).long()], 1)
    noise = torch.where(kind["noisy"], NOISE[0] * (NOISE[1] / NOISE[0]) ** level, 0.0)
    return torch.stack([coverage.masked_fill(kind["none"], 0.0), noise, block], 1)


def observe(v: Tensor, levels: Tensor, generators: Sequence[torch.Generator]) -> Observation:
    """The observation of the normalised field v (B, C, *space), 1 to 3 space axes, at `levels` (B, 3), see
    `CASES`; random numbers from the CPU.

    A row that is seen at all is seen in at least one cell. Raises ValueError for blocks that do not divide
    the grid.
    """
    space, cells = v.shape[2:], v.shape[2:].numel()
    seen, mask, eta = v, torch.zeros(len(v), cells), torch.zeros(v.shape)
    blocks = levels[:, 2].long()
    for block in sorted(set(blocks.tolist()) - {1}):
        if any(size % block for size in space):
            raise ValueError(f"blocks of {block} cells do not divide the grid {tuple(space)}; expected a "
                             f"multiple of {block} per axis (ups.generative.observation.observe). Change "
                             "task.TASK.resolution or leave the case out.")
        rows = send(blocks == block, v.device).view(-1, *[1] * (v.ndim - 1))
        seen = torch.where(rows, block_average(v, block), seen)
    for row, ((coverage, noise, _), source) in enumerate(zip(levels.tolist(), generators, strict=True)):
        count = max(round(coverage * cells), int(coverage > 0))
        is_some = 0 < count < cells   # which ones is drawn only then
        mask[row, torch.randperm(cells, generator=source)[:count] if is_some else slice(count)] = 1.0
        if noise > 0:
            eta[row] = torch.randn(v.shape[1:], generator=source) * noise
    facts = torch.stack([mask.double().mean(1), levels[:, 1], levels[:, 2].log2()], 1)
    mask, eta = (send(part.to(v.dtype), v.device) for part in (mask.view(-1, 1, *space), eta))
    return Observation(mask * (seen + eta), mask, send(facts.float(), v.device), blocks)


def observe_case(v: Tensor, case: str, generators: Sequence[torch.Generator]) -> Observation:
    """The observation of v (B, C, *space) in the named case, one of `CASES`."""
    return observe(v, torch.tensor([CASES[case]] * len(v), dtype=torch.float64), generators)


def seen(v: Tensor, mask: Tensor) -> Observation:
    """The observation of v (B, C, *space) at the cells where mask (B, 1, *space) is 1, exactly."""
    mask = mask.to(v)
    facts = nn.functional.pad(mask.flatten(1).mean(1)[:, None], (0, len(FACTS) - 1))
    return Observation(torch.where(mask > 0, v, 0.0), mask, facts, torch.ones(len(v), dtype=torch.long))


def as_linear(observation: Observation, row: int, mean: float, std: float) -> LinearObservation:
    """One row of an observation of v = (g - mean) / std as y = A g + noise * eta on the field g (log a)
    itself.

    mean, std: of the codec's only channel (`codec.mean.item()`, `codec.std.item()`). The row must be one
    channel on a square 2D grid, that of the generated data; raises ValueError otherwise.
    """
    values, mask = (part[row].detach().cpu() for part in (observation.values, observation.mask))
    if values.ndim != 3 or values.shape[0] != 1 or values.shape[1] != values.shape[2]:
        raise ValueError(f"observation of shape {tuple(values.shape)}; expected one channel on a square, (1, "
                         "n, n) (ups.generative.observation.as_linear), for which the exact posterior is "
                         "known. Use it for darcy2d_grf.")
    size, block = values.shape[1], round(2 ** float(observation.facts[row, FACTS.index("log2_block")]))
    groups = torch.arange(size * size).view(size // block, block, size // block,
                                            block).transpose(1, 2).reshape(-1, block * block)
    groups = groups[mask.flatten()[groups[:, 0]] > 0]
    return LinearObservation(
        resolution=size, cells=groups, values=values.flatten()[groups[:, 0]].double() * std + mean,
        noise=float(observation.facts[row, FACTS.index("noise")]) * std)


def block_average(v: Tensor, block: int) -> Tensor:
    """Mean over blocks of `block` cells per axis, spread over the block again: (B, C, *space)."""
    for axis in range(2, v.ndim):
        v = v.unflatten(axis, (-1, block)).mean(axis + 1).repeat_interleave(block, axis)
    return v


class LinearGuess(nn.Module):
    """Best linear guess of a field from part of it: the posterior mean of a Gaussian fitted to training
    fields.

    v = mean + U s + e, s ~ N(0, diag(variance)) the leading MODES of the training fields, e what they leave,
    independent per cell (probabilistic principal components, Tipping and Bishop 1999). shape: (C, *space) of
    a field. least: of a solution; below it, its logarithm is not taken.
    """

    def __init__(self, shape: Sequence[int], num_modes: int):
        super().__init__()
        self.shape, cells = tuple(shape), torch.Size(shape).numel()
        for name, size in (("mean", (cells,)), ("variance", (num_modes,)), ("basis", (cells, num_modes)),
                           ("left", (cells,)), ("least", ())):
            self.register_buffer(name, torch.zeros(size))
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def fit(cls, fields: Tensor, least: float = 0.0) -> "LinearGuess":
        """Of training fields (n, C, *space), on their device."""
        flat = fields.flatten(1)
        mean = flat.mean(0)
        _, singular, rows = torch.linalg.svd(flat - mean, full_matrices=False)
        guess = cls(fields.shape[1:], min(MODES, len(rows) - 1)).to(fields)
        kept = len(guess.variance)
        guess.mean, guess.variance, guess.basis = mean, singular[:kept].square() / len(flat), rows[:kept].mT
        guess.left = (flat.var(0) - guess.basis.square() @ guess.variance).clamp_min(1e-6)
        guess.least.fill_(least)
        return guess

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """(guess, its standard deviation), each (B, C, *space), of an observation.

        Block means are those of mean and U; every cell of a block then bears its share of the mean's
        precision.
        """
        values, mask = observation.values, observation.mask.expand_as(observation.values)
        noise, log2_block = observation.facts[:, 1], observation.facts[:, 2]
        # precision of each cell
        weight = mask.flatten(1) / (self.left + noise.square()[:, None])
        guess, spread = torch.empty_like(weight), torch.empty_like(weight)
        for size in observation.blocks.unique().tolist():
            rows = send(torch.nonzero(observation.blocks == size)[:, 0], weight.device)
            mean, basis = self._averaged(size)
            w, y = weight[rows], values.flatten(1)[rows] - mean
            # (rows, modes, modes)
            gram = (basis.mT * w[:, None]) @ basis + torch.diag(1 / self.variance)
            # NaN where there is no factor, rather than a check that waits for the device, as does an inverse
            factor, info = torch.linalg.cholesky_ex(gram)
            factor = torch.where((info == 0)[:, None, None], factor, torch.nan)
            s = torch.cholesky_solve(((w * y) @ basis)[..., None], factor)[..., 0]
            # (rows, modes, cells)
            half = torch.linalg.solve_triangular(factor, self.basis.mT, upper=False)
            guess[rows] = self.mean + s @ self.basis.mT
            spread[rows] = (half.square().sum(1) + self.left).sqrt()
        guess, spread = guess.view_as(values), spread.view_as(values)
        is_exact = (mask > 0) & ((noise == 0) & (log2_block == 0)).view(-1, *[1] * (values.ndim - 1))
        return torch.where(is_exact, values, guess), torch.where(is_exact, torch.zeros_like(spread), spread)

    def _averaged(self, block: int) -> tuple[Tensor, Tensor]:
        """Mean and basis over blocks of `block` cells per axis, spread over the block again."""
        if block not in self._blocks:
            both = torch.cat([self.mean[None], self.basis.mT]).view(-1, *self.shape)
            averaged = block_average(both, block).flatten(1)
            self._blocks[block] = averaged[0], averaged[1:].mT.contiguous()
        return self._blocks[block]
