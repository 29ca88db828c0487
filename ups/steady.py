"""Steady prior: the solution u given a partly observed coefficient a, as a distribution.

    c = (mask * v, mask, v_guess, its spread, log O(v_guess)),  facts = (how much, how noisy, how coarse)
    r = log u - log O(v_guess)

v is the normalised coefficient, v_guess the linear guess of it from what was seen (`LinearGuess`; v itself where all is seen), O
the frozen operator. The solution of a diffusion equation with a positive source is positive, and where little is known its
size varies by factors: hence the logarithm. The conditional mean and scale of ups/corrector.py and a diffusion do the rest, from
certainty to the spread of all solutions. A fully observed steady equation has one answer, so calibration is judged on partial
observations of darcy2d_grf, whose exact posterior is known (ups/pde/conditional.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.cache import Cache
from ups.config import Config
from ups.corrector import Corrector
from ups.diffusion import sample
from ups.observe import Observation, as_linear, block_average, draw_levels, observe, observe_case, row_generators
from ups.operator import Operator, augment
from ups.pde.conditional import truth_ensemble
from ups.rollout import member_noise
from ups.sampling import generator
from ups.tokenizer import patchify

STATES = 512          # states in one call of the network
MODES = 96            # of the coefficient in the linear guess
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
        """(guess, its standard deviation), each (B, C, *space), of an observation as ups.observe makes it.

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
    """Residuals of a steady task under random observations of its coefficient; see ups.residual.Residuals."""

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
                self.cache.parameters[rows].to(self.device))

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
        z_in, z_ref = augment(self.operator, self.name, [(z_in, self.head.input_codec), (z_ref, self.head.codec)], draw)
        v = self.head.input_codec.decode(z_in[:, 0])
        sources = row_generators(draw.initial_seed(), rows=places.tolist())
        guess, tokens, facts = self.predict(observe(v, draw_levels(v.shape[2:], sources), sources), parameters)
        return self.logarithm(self.physical(z_ref[:, 0])) - guess, tokens, facts


@torch.no_grad()
def posterior_draws(corrector: Corrector, residuals: SteadyResiduals, observation: Observation, parameters: Tensor,
                    rows: list[int], num_members: int, num_steps: int, seed: int, kind: str = "prior") -> tuple[Tensor, Tensor]:
    """(members (batch, M, C, *space), the operator's guess (batch, C, *space)): draws of the solution, physical units.

    rows: numbers that name the fields, for their noise. kind: prior (the diffusion), gaussian (its conditional mean and scale
    alone, B2) or dressed (marginal spread, B1).
    """
    guess, tokens, facts = residuals.predict(observation, parameters)
    noise = member_noise(guess.shape[1:], seed, rows, 0, num_members).flatten(0, 1).to(guess.device)
    if kind == "dressed":
        head = corrector.heads[residuals.name]
        r = head.marginal_mean + head.marginal_std * noise
    else:
        conditions, parts = corrector.condition(residuals.name, tokens, facts), []
        which = torch.arange(len(guess), device=guess.device).repeat_interleave(num_members)
        for some, row in zip(noise.split(STATES), which.split(STATES), strict=True):
            condition = conditions.rows(row)
            some = sample(corrector.velocity(condition), some, num_steps) if kind == "prior" else some
            parts.append(corrector.unwhiten(some, condition))
        r = torch.cat(parts)
    r = r.unflatten(0, (-1, num_members))
    return residuals.solution(guess[:, None], r), residuals.solution(guess, torch.zeros_like(guess))


def sample_distance(x: Tensor, y: Tensor) -> float:
    """Energy distance of the empirical distributions of x (a, d) and y (b, d): the V-statistic, above 0 for two finite samples of
    one distribution, so that a ratio to that value makes sense."""
    return float(2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean())


def judge(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Draws (M, ...) against exact ones (2 M, ...).

    distance: `sample_distance` from the first M exact draws; between: that of the two halves of these; both in units of the exact
    spread. trace: total variance over the exact one; trace_between: of the two halves, how well so many draws tell it (where u
    varies by factors, badly). log_trace: that of log u, which has no such tails. mean_error: relative L2 of the means.
    """
    flat, exact = draws.flatten(1).double(), truth.flatten(1).double()
    half = len(exact) // 2
    scale, tiny = exact.var(0).sum().sqrt(), FLOOR * exact.mean()
    log_variance = [part.clamp_min(tiny).log().var(0).sum() for part in (flat, exact)]
    return {"distance": sample_distance(flat / scale, exact[:half] / scale),
            "between": sample_distance(exact[half:] / scale, exact[:half] / scale),
            "trace": float(flat.var(0).sum() / exact.var(0).sum()),
            "trace_between": float(exact[half:].var(0).sum() / exact[:half].var(0).sum()),
            "log_trace": float(log_variance[0] / log_variance[1]),
            "mean_error": float((flat.mean(0) - exact.mean(0)).norm() / exact.mean(0).norm())}


@torch.no_grad()
def judge_case(corrector: Corrector, residuals: SteadyResiduals, case: str, row: int, config: Config) -> dict[str, dict]:
    """`judge` of prior, gaussian and dressed draws against the solver's exact posterior, for one row of the evaluated split.

    Only for a task whose posterior is known (darcy2d_grf) and a partial observation.
    """
    seed, count = config.run.seed, config.evaluate.truth_members
    z_in, _, parameters = residuals.fields(config.evaluate.split, torch.tensor([row]))
    codec = residuals.head.input_codec
    v = codec.decode(z_in[:, 0])
    observation = observe_case(v, case, row_generators(seed, case, rows=[row]))
    linear = as_linear(observation, 0, codec.mean.item(), codec.std.item())
    beta, source = float(parameters[0, 0]), generator(seed, "truth", case, row)
    _, exact = truth_ensemble(linear, 2 * count, source.initial_seed() % 2**31, beta)
    out = {}
    for kind in ("prior", "gaussian", "dressed"):
        draws, _ = posterior_draws(corrector, residuals, observation, parameters, [row], count,
                                   config.diffusion.sampler_steps, seed, kind)
        out[kind] = judge(draws[0, :, 0], exact.to(draws.device))
    return out

