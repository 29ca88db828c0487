"""The linear guess of a coefficient from part of it; it travels with the weights of the steady prior."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.generative.observation import Observation, block_average

MODES = 96            # of the coefficient


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
    def fit(cls, fields: Tensor, least: float = 0.0) -> LinearGuess:
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

    @property
    def description(self) -> dict:
        return {"shape": list(self.shape), "num_modes": len(self.variance)}

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """(guess, its standard deviation), each (B, C, *space), of an observation as
        ups.generative.observation makes it.

        Block means are those of mean and U; every cell of a block then bears its share of the mean's
        precision.
        """
        values, mask = observation.values, observation.mask.expand_as(observation.values)
        noise, block = observation.facts[:, 1], (2.0 ** observation.facts[:, 2]).round().long()
        # precision of each cell
        weight = mask.flatten(1) / (self.left + noise.square()[:, None])
        guess, spread = torch.empty_like(weight), torch.empty_like(weight)
        for size in block.unique().tolist():
            rows = block == size
            mean, basis = self._averaged(size)
            w, y = weight[rows], values.flatten(1)[rows] - mean
            # (rows, modes, modes)
            gram = (basis.mT * w[:, None]) @ basis + torch.diag(1 / self.variance)
            factor = torch.linalg.cholesky(gram)
            s = torch.cholesky_solve(((w * y) @ basis)[..., None], factor)[..., 0]
            # (rows, cells, modes)
            half = self.basis @ torch.cholesky_inverse(factor)
            guess[rows] = self.mean + s @ self.basis.mT
            spread[rows] = ((half * self.basis).sum(2) + self.left).sqrt()
        guess, spread = guess.view_as(values), spread.view_as(values)
        is_exact = (mask > 0) & ((noise == 0) & (block == 1)).view(-1, *[1] * (values.ndim - 1))
        return torch.where(is_exact, values, guess), torch.where(is_exact, torch.zeros_like(spread), spread)

    def _averaged(self, block: int) -> tuple[Tensor, Tensor]:
        """Mean and basis over blocks of `block` cells per axis, spread over the block again."""
        if block not in self._blocks:
            both = torch.cat([self.mean[None], self.basis.mT]).view(-1, *self.shape)
            averaged = block_average(both, block).flatten(1)
            self._blocks[block] = averaged[0], averaged[1:].mT.contiguous()
        return self._blocks[block]
