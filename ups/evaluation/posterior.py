"""A steady prior judged: against cheap ensembles under the same observations, and against the exact posterior
where it is known."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ups.generative.corrector import Corrector
from ups.generative.diffusion import sample
from ups.generative.draws import draw_solutions
from ups.generative.observation import as_linear, observe_case, row_generators
from ups.generative.residuals import FLOOR, SteadyResiduals
from ups.metrics.proper import energy_distance
from ups.models.rollout import member_noise
from ups.seeds import generator

BANK = 256            # reserved fields that cheap ensembles are fitted to, per case
SPLITS = 1000         # of exact draws in halves: how far apart these are by chance


def case_bank(residuals: SteadyResiduals, case: str, seed: int) -> Tensor:
    """Residuals of reserved fields under the observations of a case, (<= BANK, *tokens, dim): what cheap
    ensembles are fitted to.

    Per case, for the residual's size differs by orders between them: one spread for all would be a straw man
    in every one.
    """
    places = torch.arange(min(BANK, residuals.windows("reserved")[0]))
    z_in, z_ref, parameters = residuals.fields("reserved", places)
    v = residuals.head.input_codec.decode(z_in[:, 0])
    guess, _, _ = residuals.predict(observe_case(v, case,
                                                 row_generators(seed, "bank", case, rows=places.tolist())),
                                    parameters)
    return residuals.logarithm(residuals.head.physical(z_ref[:, 0])) - guess


@torch.no_grad()
def posterior_draws(prior: Corrector, residuals: SteadyResiduals, predicted: tuple[Tensor, Tensor, Tensor],
                    noise: Tensor, kind: str, bank: Tensor) -> Tensor:
    """Draws of the solution (batch, M, C, *space), physical units, from noise (batch, M, *tokens, dim).

    predicted: of `residuals.predict`. kind: prior (the diffusion), gaussian (its conditional mean and scale
    alone, B2); dressed (mean and spread of `bank`, B1) or resampled (a residual of `bank`, whole, B3), bank
    being `case_bank` of the same case.
    """
    if kind == "dressed":
        return residuals.solution(predicted[0][:, None], bank.mean(0) + bank.std(0) * noise)
    if kind == "resampled":
        uniform = torch.special.ndtr(noise.flatten(2)[..., 0].double())
        return residuals.solution(predicted[0][:, None],
                                  bank[(uniform * len(bank)).long().clamp_max(len(bank) - 1)])
    draw = {"prior": lambda condition,
            some: sample(prior.velocity(condition), some, prior.description["sampler_steps"]),
            "gaussian": lambda condition, some: some}[kind]
    return draw_solutions(residuals, draw, prior, predicted, noise)


def judge(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Draws (M, ...) against N exact ones, both positive: moments to be averaged over fields.

    distance: energy distance, without bias, in units of the exact spread. Pairs (of draws, exact): trace, the
    total variance; log_trace, that of log u, which has no tails that a hundred draws do not see; leading, the
    variance of log u along the leading pattern of one half of the exact draws, seen in the draws and in the
    other half.
    """
    flat, exact = draws.flatten(1).double(), truth.flatten(1).double()
    scale, tiny = exact.var(0).sum().sqrt(), FLOOR * exact.mean()
    logs = [part.clamp_min(tiny).log() for part in (flat, exact)]
    first, second = logs[1].chunk(2)
    pattern = torch.linalg.svd(first - first.mean(0), full_matrices=False)[2][0]
    pairs = {"trace": (flat.var(0).sum(), exact.var(0).sum()),
             "log_trace": tuple(part.var(0).sum() for part in logs),
             "leading": tuple((part @ pattern).var() for part in (logs[0], second))}
    return {"distance": energy_distance(flat / scale, exact / scale),
            **{name + end: float(value) for name, pair in pairs.items()
               for end, value in zip(("", "_exact"), pair, strict=True)}}


def split_distances(truth: Tensor, num_draws: int, seed: int) -> Tensor:
    """Energy distances of num_draws exact draws from the N that `judge` uses, as chance has it: (SPLITS,), of
    random halves of truth (N, ...). The variance of such a distance between equal laws goes as 1/a + 1/b,
    which halves are scaled by."""
    flat = truth.flatten(1).double()
    flat = flat / flat.var(0).sum().sqrt()
    half, count = len(flat) // 2, len(flat)
    away = torch.cdist(flat, flat)
    order = torch.rand(SPLITS, count, generator=generator(seed, "splits")).argsort(1)
    side = torch.zeros(SPLITS, count, dtype=torch.float64).scatter_(1, order[:, :half], 1.0)
    other = 1 - side
    within = sum(((part @ away) * part).sum(1) / (size * (size - 1))
                 for part, size in ((side, half), (other, count - half)))
    distance = 2 * ((side @ away) * other).sum(1) / (half * (count - half)) - within
    return distance * (1 / num_draws + 1 / count) / (1 / half + 1 / (count - half))


@torch.no_grad()
def judge_exactly(prior: Corrector, residuals: SteadyResiduals, case: str, v: Tensor, parameters: Tensor,
                  rows: list[int], seed: int, count: int, bank: Tensor,
                  kinds: Iterable[str]) -> tuple[dict[str, list[dict[str, float]]], Tensor]:
    """`judge` of `count` draws of every kind against twice as many of the exact posterior: (kind -> one entry
    per coefficient v (n, C, *space), normalised, `split_distances` averaged over them).

    rows: numbers that name the coefficients in observations and noise. Only for a task whose posterior is
    known (Task.posterior) and a partial observation.
    """
    codec = residuals.head.input_codec
    observation = observe_case(v, case, row_generators(seed, case, rows=rows))
    predicted = residuals.predict(observation, parameters)
    noise = member_noise(predicted[0].shape[1:], seed, rows, 0, count).to(predicted[0].device)
    draws = {kind: posterior_draws(prior, residuals, predicted, noise, kind, bank) for kind in kinds}
    out, splits = {kind: [] for kind in draws}, []
    for index, row in enumerate(rows):
        source = generator(seed, "truth", case, row)
        linear = as_linear(observation, index, codec.mean.item(), codec.std.item())
        _, exact = residuals.head.task.posterior(linear, 2 * count, source.initial_seed() % 2**31,
                                                 float(parameters[index, 0]))
        for kind, u in draws.items():
            out[kind].append(judge(u[index, :, 0].cpu(), exact))
        splits.append(split_distances(exact, count, seed + index))
    return out, torch.stack(splits).mean(0)
