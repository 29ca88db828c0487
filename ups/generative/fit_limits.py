"""Fit of `WaveLimits` to the residuals of an operator and the samples of a trained network."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ups.common.device import send
from ups.data.schedule import Schedule
from ups.generative.conditions import encode_error
from ups.generative.limits import WaveLimits
from ups.generative.residuals import TransientResiduals, sum_by_task
from ups.generative.sampling import KEYS, Sampler
from ups.training.fit import RanksOfRun
from ups_discovery.seeds import generator

SIZE = 64  # reserved states in a batch
RESIDUAL_BATCHES = 32  # many, because a few sharp states have most of the power in short waves
SAMPLE_BATCHES = 8  # the first of them; the power of samples varies less


def measure_residuals(limits: WaveLimits, source: TransientResiduals, seed: int, ranks: RanksOfRun) -> Tensor:
    """Set the silent waves, and return the `WaveLimits.moments` of residuals as (mean, standard error) (2, 3,
    channels, shells). A collective."""

    def state_power(number: int) -> Tensor:
        r, tokens, _ = _batch(source, seed, number)
        return limits.power(_field(source, source.prediction(tokens) + r)).sum(0)

    def residual_moments(number: int) -> Tensor:
        r, tokens, _ = _batch(source, seed, number)
        return _moments(limits.moments(_field(source, source.prediction(tokens)), _field(source, r)))

    limits.set_silent(_total(source, limits.is_silent.shape, state_power, SAMPLE_BATCHES, ranks))
    shape = (2, 3, limits.gains.shape[3], limits.num_shells)
    return _mean_and_error(_total(source, shape, residual_moments, RESIDUAL_BATCHES, ranks), RESIDUAL_BATCHES)


def fit_gains(
    samplers: Mapping[str, Sampler],
    source: TransientResiduals,
    residual_moments: Tensor,
    seed: int,
    ranks: RanksOfRun,
) -> None:
    """Set the gains of a task's head for observed states, by residual_moments of `measure_residuals`. They
    also apply to sampled states, until those have their own. A collective."""
    moments = _sample_moments(samplers, source, 0.0, seed, ranks)
    for sampler, sampled in zip(samplers.values(), moments, strict=True):
        limits = sampler.network.heads[source.name].limits
        limits.set_gains(residual_moments, sampled, sampler.evaluations, is_sampled=False)


def fit_gains_of_sampled_states(
    samplers: Mapping[str, Sampler], source: TransientResiduals, seed: int, ranks: RanksOfRun
) -> None:
    """Set the gains of a task's head for states with its `sample_error`: samples get the moments that those
    of the same states without an error have. A network damps the longest waves of states with an error by
    half a percent a frame, too little to be seen beside a residual; but in long rollouts of forced Burgers
    sharp states become rare (docs/lab/log.md). A collective."""
    head = next(iter(samplers.values())).network.heads[source.name]
    if head.sample_error == 0:
        return  # the gains for observed states apply
    wanted = _sample_moments(samplers, source, 0.0, seed, ranks, is_limited=True)
    found = _sample_moments(samplers, source, head.sample_error, seed, ranks)
    for sampler, *pair in zip(samplers.values(), wanted, found, strict=True):
        for _, error in pair:
            error.zero_()  # the states and the noise are the same: no difference is chance
        head.limits.set_gains(*pair, sampler.evaluations, is_sampled=True)


def _sample_moments(
    samplers: Mapping[str, Sampler],
    source: TransientResiduals,
    size: float,
    seed: int,
    ranks: RanksOfRun,
    is_limited: bool = False,
) -> list[Tensor]:
    """For every sampler the `WaveLimits.moments` of its samples at reserved states, which it is told to have
    an error of this size, as those of `measure_residuals`."""
    limits = next(iter(samplers.values())).network.heads[source.name].limits
    shape = (len(samplers), 2, 3, limits.gains.shape[3], limits.num_shells)

    def moments(number: int) -> Tensor:
        r, tokens, facts = _batch(source, seed, number)
        facts = torch.cat([facts[:, :-1], encode_error(facts.new_full((len(facts), 1), size))], 1)
        rngs = [generator(seed, "limits", key, number) for key in KEYS]
        noises = (send(torch.randn(r.shape, generator=rng), r.device) for rng in rngs)
        given, w_pred = (source, tokens, facts, *noises), _field(source, source.prediction(tokens))
        samples = [one.residual(*given, is_limited=is_limited) for one in samplers.values()]
        return torch.stack([_moments(limits.moments(w_pred, _field(source, r))) for r in samples])

    total = _total(source, shape, moments, SAMPLE_BATCHES, ranks)
    return [_mean_and_error(sums, SAMPLE_BATCHES) for sums in total]


def _batch(source: TransientResiduals, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """r, tokens and facts of a batch of reserved states."""
    batch = Schedule({source.name: source.windows("reserved")}, SIZE, seed + 8).batch(number)
    return source.batch("reserved", batch.rows, batch.starts, generator(seed, "limits", number))[:3]


def _field(source: TransientResiduals, r: Tensor) -> Tensor:
    """The frames of r as channels, (batch, bundle * C, *space)."""
    return source.decode(r).flatten(1, 2)


def _moments(values: Tensor) -> Tensor:
    """Sums over rows of values and of their squares (2, ...)."""
    return torch.stack([values.sum(0), values.square().sum(0)])


def _mean_and_error(sums: Tensor, batches: int) -> Tensor:
    """The mean and its standard error, from `_moments` summed over batches."""
    mean, square = sums / (batches * SIZE)
    return torch.stack([mean, ((square - mean.square()).clamp_min(0) / (batches * SIZE)).sqrt()])


def _total(
    source: TransientResiduals,
    shape: tuple[int, ...],
    of: Callable[[int], Tensor],
    batches: int,
    ranks: RanksOfRun,
) -> Tensor:
    """The sum of of(number), of this shape, over the batches, which are split over the ranks."""
    [sums] = sum_by_task(
        {source.name: [*range(batches)][ranks.rank :: ranks.world]},
        lambda _, number: of(number).flatten(),
        torch.Size(shape).numel(),
        ranks,
    )
    return torch.tensor(sums, dtype=torch.float64, device=source.device).view(shape)
