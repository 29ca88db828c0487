"""The posterior of an input field with two values, such as two materials, given a partial observation.

A network gives the probability p(v_k = high | the known cells, y) of every cell k. Cells become known one
group after the other, in random order, and each is sampled given all before it:

    p(v | y) = prod_k p(v_o(k) | v_o(1), ..., v_o(k - 1), y)      for any order o of the unknown cells

(Uria, Murray and Larochelle 2014, arXiv 1310.1757; Hoogeboom et al. 2022, "Autoregressive diffusion models",
arXiv 2110.02037). A Gaussian has no such samples: between two observed cells of different values it has
values that the field never takes. Exactly observed cells are known from the start. Block means and noisy
values are conditions alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.data.tokenizer import patchify, unpatchify
from ups.generative.linear_posterior import LinearPosterior, Posterior
from ups.generative.observation import FACTS, Observation, observe, row_generators, sample_levels
from ups.models.backbones import backbone_of
from ups.models.backbones.layers import zero_linear
from ups.tasks import Task

ROUNDS = 16  # groups of cells that are sampled together; the first are smallest, as they decide most
ROWS = 256  # fields in one call of the network
TOLERANCE = 1e-3  # of a value from its level, in normalised units: rounding of the tokenizer


def two_levels(fields: Tensor) -> list[float] | None:
    """The two values, ascending, of fields (n, 1, *space) that have no others; else None."""
    low, high = float(fields.min()), float(fields.max())
    is_level = (fields - low).abs().minimum((fields - high).abs()) < TOLERANCE
    return [low, high] if fields.shape[1] == 1 and high - low > 2 * TOLERANCE and is_level.all() else None


def known_cells(observation: Observation) -> Tensor:
    """1 at cells that are observed exactly, on their own, else 0: (B, 1, *space)."""
    is_exact = (observation.facts[:, 1:] == 0).all(1)
    return observation.mask * is_exact.view(-1, *[1] * (observation.mask.ndim - 1))


class CellPosterior(nn.Module):
    """p(v | y) as above; same interface as `LinearPosterior`.

    linear: the Gaussian of the same fields, the ensemble to beat. levels: the two values, normalised units.
    model: of the network. Grids of an even number of cells are cut into patches of two.
    """

    def __init__(self, linear: LinearPosterior, levels: Sequence[float], model: ModelConfig, task: Task):
        super().__init__()
        self.linear, self.shape, self.ndim = linear, linear.shape, task.ndim
        self.low, self.high = levels
        self.patch = 2 if all(size % 2 == 0 for size in self.shape[1:]) else 1
        cells = self.patch**self.ndim
        self.into, self.facts = nn.Linear(4 * cells, model.width), nn.Linear(len(FACTS), model.width)
        self.backbone, self.out = backbone_of(model, task), zero_linear(model.width, cells)

    @property
    def description(self) -> dict[str, Any]:
        return self.linear.description | {"levels": [self.low, self.high]}

    @property
    def floor(self) -> Tensor:
        return self.linear.floor

    def logits(self, observation: Observation, v: Tensor, known: Tensor) -> Tensor:
        """Logits (B, 1, *space) of the higher value, given v (B, 1, *space) where known is 1."""
        fields = (observation.values, observation.mask, v * known, known)
        x = torch.cat([patchify(field, self.ndim, self.patch) for field in fields], -1)
        hidden = self.backbone(self.into(x), self.facts(observation.facts))
        return unpatchify(self.out(hidden), self.ndim, self.patch)

    def loss(self, v: Tensor, rng: torch.Generator) -> Tensor:
        """Cross-entropy of the unknown cells of fields v (B, 1, *space), mean over cells and rows; rng: of
        observations, and of the known cells."""
        rngs = row_generators(rng.initial_seed(), rows=range(len(v)))
        observation = observe(v, sample_levels(v.shape[2:], rngs), rngs)
        fraction = torch.rand(len(v), *[1] * (v.ndim - 1), generator=rng)
        more = (torch.rand(v.shape, generator=rng) < fraction).to(v)
        known = torch.maximum(known_cells(observation), more)
        is_high = (v > 0.5 * (self.low + self.high)).to(v)
        entropy = nn.functional.binary_cross_entropy_with_logits(
            self.logits(observation, v, known), is_high, reduction="none"
        )
        rows = (entropy * (1 - known)).flatten(1).sum(1) / (1 - known).flatten(1).sum(1).clamp_min(1)
        return rows.mean()

    @torch.no_grad()
    def forward(self, observation: Observation, noise: Tensor | None = None) -> Posterior:
        """The posterior given an observation; arguments as of `LinearPosterior`. mean and std are those of
        each cell on its own."""
        values, known = observation.values, known_cells(observation)
        p = torch.sigmoid(self.logits(observation, values, known))
        step = self.high - self.low
        mean = torch.where(known > 0, values, self.low + step * p)
        std = torch.where(known > 0, 0.0, step * (p * (1 - p)).sqrt())
        num = 0 if noise is None else noise.shape[1]
        samples = values.new_zeros(len(values), num, *self.shape)
        if num:
            every = torch.arange(len(values), device=values.device).repeat_interleave(num)
            parts = zip(every.split(ROWS), noise.flatten(0, 1).split(ROWS), strict=True)
            samples = torch.cat([self._sample(observation, *part) for part in parts]).view_as(samples)
        return Posterior(mean, std, samples)

    def guess(self, observation: Observation) -> Tensor:
        """The mean (B, 1, *space) alone."""
        return self(observation).mean

    def _sample(self, observation: Observation, rows: Tensor, noise: Tensor) -> Tensor:
        """A sample (n, 1, *space) for each of `rows` of the observation, which may repeat. noise (n, 2, 1,
        *space): of the values, and of the order."""
        some = Observation(observation.values[rows], observation.mask[rows], observation.facts[rows], [])
        known = known_cells(some)
        v, uniform = some.values * known, torch.special.ndtr(noise[:, 0])
        rank = noise[:, 1].masked_fill(known > 0, torch.inf).flatten(1).argsort(1).argsort(1).view_as(known)
        unknown = (1 - known).flatten(1).sum(1).view(-1, *[1] * (v.ndim - 1))
        for i in range(ROUNDS):
            until = (unknown * (1 - torch.cos(torch.tensor(torch.pi / 2 * (i + 1) / ROUNDS)))).ceil()
            is_next = (known == 0) & (rank < until)
            p = torch.sigmoid(self.logits(some, v, known))
            v = torch.where(is_next, torch.where(uniform < p, self.high, self.low), v)
            known = torch.where(is_next, 1.0, known)
        return v


def posterior_of(
    description: dict[str, Any], model: ModelConfig, task: Task
) -> LinearPosterior | CellPosterior:
    """An unfitted posterior, from the `description` of a fitted one."""
    linear = LinearPosterior(description["shape"], description["num_modes"])
    return CellPosterior(linear, description["levels"], model, task) if "levels" in description else linear
