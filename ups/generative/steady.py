"""Steady prior: the solution u given a partly observed coefficient a, as a distribution.

    c = (mask * v, mask, v_guess, its spread, log O(v_guess)),  facts = (how much, how noisy, how coarse)
    r = log u - log O(v_guess)

v is the normalised coefficient, v_guess the linear guess of it from what was seen (`LinearGuess`; v itself where all is seen), O
the frozen operator. The solution of a diffusion equation with a positive source is positive, and where little is known its
size varies by factors: hence the logarithm. The conditional mean and scale of ups/generative/corrector.py and a diffusion do the rest, from
certainty to the spread of all solutions. A fully observed steady equation has one answer, so calibration is judged on partial
observations of darcy2d_grf, whose exact posterior is known (ups/tasks/darcy_grf_posterior.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.config import Config
from ups.data.cache import Cache
from ups.data.tokenizer import patchify
from ups.generative.corrector import Corrector
from ups.generative.diffusion import sample
from ups.generative.observation import Observation, as_linear, block_average, draw_levels, observe, observe_case, row_generators
from ups.metrics.proper import energy_distance
from ups.models.augment import augment
from ups.models.operator import Operator
from ups.models.rollout import member_noise
from ups.seeds import generator
from ups.tasks.darcy_grf_posterior import truth_ensemble

STATES = 512          # states in one call of the network
MODES = 96            # of the coefficient in the linear guess
BANK = 256            # reserved fields that cheap ensembles are fitted to, per case
SPLITS = 1000         # of exact draws in halves: how far apart these are by chance
FLOOR = 1e-3          # of the solution's mean: a guess is lifted to it before its logarithm is taken
SPREAD_FLOOR = 1e-3   # of the coefficient, in normalised units: what is seen exactly


class LinearGuess:
    """Best linear guess of a field from part of it: the posterior mean of a Gaussian fitted to training fields.

    v = mean + U s + e, s ~ N(0, diag(variance)) the leading MODES of the training fields, e what they leave, independent per
    cell (probabilistic principal components, Tipping and Bishop 1999). fields: (n, C, *space).
    """

    def __init__(self, fields: Tensor):
        flat = fields.flatten(1)
        self.mean = flat.mean(0)
        _, singular, rows = torch.linalg.svd(flat - self.mean, full_matrices=False)
        kept = min(MODES, len(rows) - 1)
        self.variance = singular[:kept].square() / len(flat)
        self.basis = rows[:kept].mT                                                           # (cells, modes)
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        self.left = (flat.var(0) - self.basis.square() @ self.variance).clamp_min(1e-6)       # (cells,)

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """(guess, its standard deviation), each (B, C, *space), of an observation as ups.generative.observation makes it.

        Block means are those of mean and U; every cell of a block then bears its share of the mean's precision.
        """
        values, mask = observation.values, observation.mask.expand_as(observation.values)
        noise, block = observation.facts[:, 1], (2.0 ** observation.facts[:, 2]).round().long()
        weight = mask.flatten(1) / (self.left + noise.square()[:, None])                       # precision of each cell
        guess, spread = torch.empty_like(weight), torch.empty_like(weight)
        for size in block.unique().tolist():
            rows = block == size
            mean, basis = self._averaged(size, values.shape[1:])
            w, y = weight[rows], values.flatten(1)[rows] - mean
            gram = (basis.mT * w[:, None]) @ basis + torch.diag(1 / self.variance)               # (rows, modes, modes)
            factor = torch.linalg.cholesky(gram)
            s = torch.cholesky_solve(((w * y) @ basis)[..., None], factor)[..., 0]
            half = self.basis @ torch.cholesky_inverse(factor)                                   # (rows, cells, modes)
            guess[rows] = self.mean + s @ self.basis.mT
            spread[rows] = ((half * self.basis).sum(2) + self.left).sqrt()
        guess, spread = guess.view_as(values), spread.view_as(values)
        is_exact = (mask > 0) & ((noise == 0) & (block == 1)).view(-1, *[1] * (values.ndim - 1))
        return torch.where(is_exact, values, guess), torch.where(is_exact, torch.zeros_like(spread), spread)


    def _averaged(self, block: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Mean and basis over blocks of `block` cells per axis, spread over the block again."""
        if block not in self._blocks:
            both = torch.cat([self.mean[None], self.basis.mT]).view(-1, *shape)
            averaged = block_average(both, block).flatten(1)
            self._blocks[block] = averaged[0], averaged[1:].mT.contiguous()
        return self._blocks[block]


@dataclass
class SteadyResiduals:
    """Residuals of a steady task under random observations of its coefficient; see ups.generative.residuals.Residuals."""

    operator: Operator
    cache: Cache
    config: Config
    device: torch.device

    def __post_init__(self) -> None:
        self.name = self.cache.task.name
        self.head = self.operator.serve(self.cache)
        codec, dim = self.head.input_codec, self.head.codec.dim
        num_cells = codec.patch**self.head.task.ndim
        self.description = {"name": self.name, "dim": dim, "num_conditions": 3 * codec.width + num_cells + dim}
        known = codec.decode(self.cache.inputs(self.cache.split["train"], self.device)[:, 0])
        self.linear = LinearGuess(known)
        some = self.cache.batch(self.cache.split["train"][:64], 0, 1, self.device)
        self.least = FLOOR * float(self.physical(some).mean())

    def windows(self, split: str) -> tuple[int, int]:
        return len(self.cache.split[split]), 1

    def start_weights(self) -> dict[str, Tensor]:
        return {}

    def logarithm(self, u: Tensor) -> Tensor:
        """log u as tokens: (batch, C, *space), physical units, to (batch, *tokens, dim); linear in log u."""
        return self.head.codec.encode(u.clamp_min(self.least).log())

    def solution(self, guess: Tensor, r: Tensor) -> Tensor:
        """Physical u = O exp(r): guess (batch, *tokens, dim) of `predict` and r (..., *tokens, dim) in tokens."""
        return self.head.codec.decode(guess + r).exp()

    def predict(self, observation: Observation, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log O(v_guess) (batch, *tokens, dim), tokens, facts) of an observation in normalised units."""
        codec, ndim = self.head.input_codec, self.head.task.ndim
        with torch.autocast(self.device.type, enabled=False):
            v_guess, spread = self.linear(observation)
            z = self.operator(codec.encode(v_guess)[:, None], self.name, parameters)[:, 0]
            guess = self.logarithm(self.physical(z))
            fields = (observation.values, v_guess, (spread + SPREAD_FLOOR).log(), observation.mask)
            tokens = torch.cat([*[patchify(part, ndim, codec.patch) for part in fields], guess], -1)
        return guess, tokens, observation.facts

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to fields of log u, (..., C, *space); linear."""
        return self.head.codec.decode(r)

    def fields(self, split: str, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficient latents (batch, 1, *tokens, dim_a), solution latents (batch, 1, *tokens, dim), parameters)."""
        rows = self.cache.split[split][places]
        return (self.cache.inputs(rows, self.device), self.cache.batch(rows, 0, 1, self.device),
                self.cache.parameters[rows])

    def physical(self, z: Tensor) -> Tensor:
        """Solution latents (..., *tokens, dim) to u (..., C, *space), physical units."""
        return self.head.codec.denormalise(self.head.codec.decode(z))

    @torch.no_grad()
    def draw(self, split: str, places: Tensor, starts: Tensor, draw: torch.Generator | None,
             is_disturbed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(r, tokens, facts) of rows `places` (positions in the split); draw: symmetry and observations, never None.

        is_disturbed changes nothing: no state is fed back.
        """
        z_in, z_ref, parameters = self.fields(split, places)
        z_in, z_ref = augment(self.head.task, [(z_in, self.head.input_codec), (z_ref, self.head.codec)], draw)
        v = self.head.input_codec.decode(z_in[:, 0])
        sources = row_generators(draw.initial_seed(), rows=places.tolist())
        guess, tokens, facts = self.predict(observe(v, draw_levels(v.shape[2:], sources), sources), parameters)
        return self.logarithm(self.physical(z_ref[:, 0])) - guess, tokens, facts


def case_bank(residuals: SteadyResiduals, case: str, seed: int) -> Tensor:
    """Residuals of reserved fields under the observations of a case, (<= BANK, *tokens, dim): what cheap ensembles are fitted to.

    Per case, for the residual's size differs by orders between them: one spread for all would be a straw man in every one.
    """
    places = torch.arange(min(BANK, residuals.windows("reserved")[0]))
    z_in, z_ref, parameters = residuals.fields("reserved", places)
    v = residuals.head.input_codec.decode(z_in[:, 0])
    guess, _, _ = residuals.predict(observe_case(v, case, row_generators(seed, "bank", case, rows=places.tolist())), parameters)
    return residuals.logarithm(residuals.physical(z_ref[:, 0])) - guess


@torch.no_grad()
def posterior_draws(corrector: Corrector, residuals: SteadyResiduals, predicted: tuple[Tensor, Tensor, Tensor], noise: Tensor,
                    num_steps: int, kind: str, bank: Tensor) -> Tensor:
    """Draws of the solution (batch, M, C, *space), physical units, from noise (batch, M, *tokens, dim).

    predicted: of `residuals.predict`. kind: prior (the diffusion), gaussian (its conditional mean and scale alone, B2); dressed
    (mean and spread of `bank`, B1) or resampled (a residual of `bank`, whole, B3), bank being `case_bank` of the same case.
    """
    guess, tokens, facts = predicted
    if kind == "dressed":
        r = bank.mean(0) + bank.std(0) * noise
    elif kind == "resampled":
        uniform = torch.special.ndtr(noise.flatten(2)[..., 0].double())
        r = bank[(uniform * len(bank)).long().clamp_max(len(bank) - 1)]
    else:
        conditions, parts = corrector.condition(residuals.name, tokens, facts), []
        which = torch.arange(len(guess), device=guess.device).repeat_interleave(noise.shape[1])
        for some, row in zip(noise.flatten(0, 1).split(STATES), which.split(STATES), strict=True):
            condition = conditions.rows(row)
            some = sample(corrector.velocity(condition), some, num_steps) if kind == "prior" else some
            parts.append(corrector.unwhiten(some, condition))
        r = torch.cat(parts).view_as(noise)
    return residuals.solution(guess[:, None], r)


def judge(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Draws (M, ...) against N exact ones, both positive: moments to be averaged over fields.

    distance: energy distance, without bias, in units of the exact spread. Pairs (of draws, exact): trace, the total variance;
    log_trace, that of log u, which has no tails that a hundred draws do not see; leading, the variance of log u along the leading
    pattern of one half of the exact draws, seen in the draws and in the other half.
    """
    flat, exact = draws.flatten(1).double(), truth.flatten(1).double()
    scale, tiny = exact.var(0).sum().sqrt(), FLOOR * exact.mean()
    logs = [part.clamp_min(tiny).log() for part in (flat, exact)]
    first, second = logs[1].chunk(2)
    pattern = torch.linalg.svd(first - first.mean(0), full_matrices=False)[2][0]
    pairs = {"trace": (flat.var(0).sum(), exact.var(0).sum()), "log_trace": tuple(part.var(0).sum() for part in logs),
             "leading": tuple((part @ pattern).var() for part in (logs[0], second))}
    return {"distance": energy_distance(flat / scale, exact / scale),
            **{name + end: float(value) for name, pair in pairs.items() for end, value in zip(("", "_exact"), pair, strict=True)}}


def split_distances(truth: Tensor, num_draws: int, seed: int) -> Tensor:
    """Energy distances of num_draws exact draws from the N that `judge` uses, as chance has it: (SPLITS,), of random halves of
    truth (N, ...). The variance of such a distance between equal laws goes as 1/a + 1/b, which halves are scaled by."""
    flat = truth.flatten(1).double()
    flat = flat / flat.var(0).sum().sqrt()
    half, count = len(flat) // 2, len(flat)
    away = torch.cdist(flat, flat)
    order = torch.rand(SPLITS, count, generator=generator(seed, "splits")).argsort(1)
    side = torch.zeros(SPLITS, count, dtype=torch.float64).scatter_(1, order[:, :half], 1.0)
    other = 1 - side
    within = sum(((part @ away) * part).sum(1) / (size * (size - 1)) for part, size in ((side, half), (other, count - half)))
    distance = 2 * ((side @ away) * other).sum(1) / (half * (count - half)) - within
    return distance * (1 / num_draws + 1 / count) / (1 / half + 1 / (count - half))


@torch.no_grad()
def judge_case(corrector: Corrector, residuals: SteadyResiduals, case: str, rows: list[int], config: Config, bank: Tensor,
               kinds: dict[str, str]) -> tuple[dict[str, list[dict[str, float]]], Tensor]:
    """`judge` of every kind of draws against the solver's exact posterior: (kind -> one entry per row of the evaluated split,
    `split_distances` averaged over the rows). Only for a task whose posterior is known (darcy2d_grf) and a partial observation.
    """
    seed, count = config.run.seed, config.evaluate.truth_members
    z_in, _, parameters = residuals.fields(config.evaluate.split, torch.tensor(rows))
    codec = residuals.head.input_codec
    observation = observe_case(codec.decode(z_in[:, 0]), case, row_generators(seed, case, rows=rows))
    predicted = residuals.predict(observation, parameters)
    noise = member_noise(predicted[0].shape[1:], seed, rows, 0, count).to(predicted[0].device)
    draws = {kind: posterior_draws(corrector, residuals, predicted, noise, config.diffusion.sampler_steps, kind, bank)
             for kind in kinds}
    out, splits = {kind: [] for kind in kinds}, []
    for index, row in enumerate(rows):
        source = generator(seed, "truth", case, row)
        linear = as_linear(observation, index, codec.mean.item(), codec.std.item())
        _, exact = truth_ensemble(linear, 2 * count, source.initial_seed() % 2**31, float(parameters[index, 0]))
        for kind, u in draws.items():
            out[kind].append(judge(u[index, :, 0].cpu(), exact))
        splits.append(split_distances(exact, count, seed + index))
    return out, torch.stack(splits).mean(0)
