"""Steady prior: the solution u given a partly observed coefficient a, as a distribution.

    c = (mask * a, mask, O(mask * a)),  facts = (how much, how noisy, how coarse),  r = u - O(mask * a)

O is the frozen operator, shown the observation with the prior mean (0 in normalised units) where nothing was seen: right when
all of a is known, and a first guess otherwise. The conditional mean and scale of ups/corrector.py and a diffusion do the rest,
from certainty to the spread of all solutions. A fully observed steady equation has one answer, so calibration is judged on
partial observations of darcy2d_grf, whose exact posterior is known (ups/pde/conditional.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ups.cache import Cache
from ups.config import Config
from ups.corrector import Corrector
from ups.diffusion import sample
from ups.observe import CASES, Observation, as_linear, draw_levels, observe, observe_case, row_generators
from ups.operator import Operator, augment
from ups.pde.conditional import truth_ensemble
from ups.rollout import member_noise
from ups.sampling import generator
from ups.tokenizer import patchify

STATES = 512   # states in one call of the network


@dataclass
class SteadyResiduals:
    """Residuals of a steady task under random observations of its coefficient; see ups.residual.Residuals."""

    operator: Operator
    cache: Cache
    config: Config
    device: torch.device

    def __post_init__(self) -> None:
        self.name = self.cache.task.name
        self.head = self.operator.heads[self.name]
        width, dim = self.head.input_codec.width, self.head.codec.dim
        num_cells = self.head.input_codec.patch**self.head.task.ndim
        self.description = {"name": self.name, "dim": dim, "num_conditions": width + num_cells + dim}

    def windows(self, split: str) -> tuple[int, int]:
        return len(self.cache.split[split]), 1

    def predict(self, observation: Observation, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(O(values) (batch, *tokens, dim), tokens, facts) of an observation in normalised units."""
        codec, ndim = self.head.input_codec, self.head.task.ndim
        with torch.autocast(self.device.type, enabled=False):
            z_pred = self.operator(codec.encode(observation.values)[:, None], self.name, parameters)[:, 0]
            parts = [patchify(part, ndim, codec.patch) for part in (observation.values, observation.mask)]
        return z_pred, torch.cat([*parts, z_pred], -1), observation.facts

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to normalised fields (..., C, *space); linear."""
        return self.head.codec.decode(r)

    def fields(self, split: str, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficient latents (batch, 1, *tokens, dim_a), solution latents (batch, *tokens, dim), parameters)."""
        rows = self.cache.split[split][places]
        return (self.cache.inputs(rows, self.device), self.cache.batch(rows, 0, 1, self.device),
                self.cache.parameters[rows].to(self.device))

    @torch.no_grad()
    def draw(self, split: str, places: Tensor, starts: Tensor, draw: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """(r, tokens, facts) of rows `places` (positions in the split); draw: symmetry and observations, never None."""
        z_in, z_ref, parameters = self.fields(split, places)
        z_in, z_ref = augment(self.operator, self.name, [(z_in, self.head.input_codec), (z_ref, self.head.codec)], draw)
        v = self.head.input_codec.decode(z_in[:, 0])
        sources = row_generators(draw.initial_seed(), rows=places.tolist())
        observation = observe(v, draw_levels(v.shape[2:], sources), sources)
        z_pred, tokens, facts = self.predict(observation, parameters)
        return z_ref[:, 0] - z_pred, tokens, facts


@torch.no_grad()
def posterior_draws(corrector: Corrector, residuals: SteadyResiduals, observation: Observation, parameters: Tensor,
                    num_members: int, num_steps: int, seed: int, kind: str = "prior") -> tuple[Tensor, Tensor]:
    """(members (batch, M, *tokens, dim), operator's guess (batch, *tokens, dim)): draws of the solution's latents.

    kind: prior (the diffusion), gaussian (its conditional mean and scale alone, B2) or dressed (marginal spread, B1).
    """
    z_pred, tokens, facts = residuals.predict(observation, parameters)
    head, out = corrector.heads[residuals.name], []
    for row in range(len(z_pred)):
        noise = member_noise(z_pred.shape[1:], seed, [row], 0, num_members)[0].to(z_pred.device)
        parts = []
        for some in noise.split(STATES):
            condition = corrector.condition(residuals.name, *(part[row : row + 1].expand(len(some), *part.shape[1:])
                                                              for part in (tokens, facts)))
            if kind == "dressed":
                parts.append(head.r_mean + head.r_std * some)
                continue
            r = sample(corrector.velocity(condition), some, num_steps) if kind == "prior" else some
            parts.append(corrector.unwhiten(r, condition))
        out.append(z_pred[row] + torch.cat(parts))
    return torch.stack(out), z_pred


def sample_distance(x: Tensor, y: Tensor) -> float:
    """Energy distance of the empirical distributions of x (a, d) and y (b, d): the V-statistic, above 0 for two finite samples of
    one distribution, so that a ratio to that value makes sense."""
    return float(2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean())


def judge(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Draws (M, ...) against exact ones (2 M, ...).

    distance: `sample_distance` from the first M exact draws; between: that of the two halves of these; both in units of the exact
    spread. trace: total variance over the exact one. mean_error: relative L2 of the means.
    """
    flat, exact = draws.flatten(1).double(), truth.flatten(1).double()
    half = len(exact) // 2
    scale = exact.var(0).sum().sqrt()
    return {"distance": sample_distance(flat / scale, exact[:half] / scale),
            "between": sample_distance(exact[half:] / scale, exact[:half] / scale),
            "trace": float(flat.var(0).sum() / exact.var(0).sum()),
            "mean_error": float((flat.mean(0) - exact.mean(0)).norm() / exact.mean(0).norm())}


@torch.no_grad()
def judge_case(corrector: Corrector, residuals: SteadyResiduals, case: str, row: int, config: Config) -> dict[str, dict]:
    """`judge` of prior, gaussian and dressed draws against the solver's exact posterior ensemble, for one test row.

    Only for a task whose posterior is known (darcy2d_grf) and a partial observation.
    """
    seed, count = config.run.seed, config.evaluate.truth_members
    z_in, _, parameters = residuals.fields("test", torch.tensor([row]))
    codec = residuals.head.input_codec
    v = codec.decode(z_in[:, 0])
    observation = observe_case(v, case, row_generators(seed, case, rows=[row]))
    linear = as_linear(observation, 0, codec.mean.item(), codec.std.item())
    beta, source = float(parameters[0, 0]), generator(seed, "truth", case, row)
    _, u = truth_ensemble(linear, 2 * count, source.initial_seed() % 2**31, beta)
    exact = residuals.head.codec.normalise(u[:, None].float().to(v.device))
    out = {}
    for kind in ("prior", "gaussian", "dressed"):
        draws, _ = posterior_draws(corrector, residuals, observation, parameters, count, config.diffusion.sampler_steps,
                                   seed, kind)
        out[kind] = judge(residuals.decode(draws[0]), exact)
    return out


PARTIAL = tuple(case for case in CASES if case != "full")
