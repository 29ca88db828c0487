"""Fit of `WaveLimits` to the residuals of an operator and the samples of a trained network."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ups.common.device import send
from ups.data.schedule import Schedule
from ups.generative.conditions import encode_error
from ups.generative.limits import RANKS, WaveLimits
from ups.generative.residuals import TransientResiduals, sum_by_task
from ups.generative.sampling import KEYS, Sampler
from ups.training.fit import RanksOfRun
from ups_discovery.seeds import generator

SIZE = 64  # reserved states in a batch
RESIDUAL_BATCHES = 32  # many, because a few sharp states have most of the power in short waves
SAMPLE_BATCHES = 8  # the first of them; the power of samples varies less

Draws = tuple[Tensor, Tensor, Tensor]  # fields (n, channels, *space): r, predictions, and r by whose size


def fit_gains(
    samplers: Mapping[str, Sampler], source: TransientResiduals, seed: int, ranks: RanksOfRun
) -> None:
    """Set the silent waves of a task's head, and its gains for observed states. They also apply to sampled
    states, until those have their own. A collective."""
    limits = next(iter(samplers.values())).network.heads[source.name].limits

    def residuals(number: int) -> Draws:
        r, tokens, _ = _batch(source, seed, number)
        r, w_pred = _field(source, r), _field(source, source.prediction(tokens))
        return r, w_pred, r

    def state_power(number: int) -> Tensor:
        r, w_pred, _ = residuals(number)
        return limits.power(w_pred + r).sum(0)

    limits.set_silent(_total(source, limits.is_silent.shape, state_power, SAMPLE_BATCHES, ranks))
    wanted, _ = _by_group(limits, source, residuals, RESIDUAL_BATCHES, ranks)
    for sampler in samplers.values():
        samples = partial(_samples, sampler, source, 0.0, seed)
        found = _by_group(limits, source, samples, SAMPLE_BATCHES, ranks)
        limits.set_gains(wanted, *found, sampler.evaluations, is_sampled=False)


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
    for sampler in samplers.values():
        told = partial(_samples, sampler, source, head.sample_error, seed)
        exact = partial(_samples, sampler, source, 0.0, seed, is_limited=True)
        (wanted, _), (found, ends) = (
            _by_group(head.limits, source, of, SAMPLE_BATCHES, ranks)
            for of in (lambda number: (*exact(number)[:2], told(number)[2]), told)  # noqa: B023
        )
        for _, error in (wanted, found):
            error.zero_()  # the states and the noise are the same: no difference is chance
        head.limits.set_gains(wanted, found, ends, sampler.evaluations, is_sampled=True)


def _samples(
    sampler: Sampler,
    source: TransientResiduals,
    size: float,
    seed: int,
    number: int,
    is_limited: bool = False,
) -> Draws:
    """Samples at reserved states, which the sampler is told to have an error of this size."""
    r, tokens, facts = _batch(source, seed, number)
    facts = torch.cat([facts[:, :-1], encode_error(facts.new_full((len(facts), 1), size))], 1)
    rngs = [generator(seed, "limits", key, number) for key in KEYS]
    noises = (send(torch.randn(r.shape, generator=rng), r.device) for rng in rngs)
    r = _field(source, sampler.residual(source, tokens, facts, *noises, is_limited=is_limited))
    return r, _field(source, source.prediction(tokens)), r


def _by_group(
    limits: WaveLimits,
    source: TransientResiduals,
    draws: Callable[[int], Draws],
    batches: int,
    ranks: RanksOfRun,
) -> tuple[Tensor, Tensor]:
    """(`WaveLimits.moments` as (mean, standard error) (2, 3, groups + 1, channels, shells), the last of
    all, ends of the groups) of the draws of all batches. A collective."""
    found: dict[int, tuple[Tensor, Tensor]] = {}  # of this rank

    def sizes(number: int) -> Tensor:
        r, w_pred, sorting = draws(number)
        found[number] = limits.size(sorting), limits.moments(w_pred, r)
        every = torch.zeros(batches, SIZE, device=r.device)
        every[number] = found[number][0]
        return every

    def sums(number: int) -> Tensor:
        size, values = found[number]
        member = nn.functional.one_hot(torch.bucketize(size, ends), len(RANKS) + 2).to(values)
        member[:, -1] = 1  # all
        powers = torch.stack([torch.ones_like(values), values, values.square()])
        return torch.einsum("ng,knm...->kmg...", member, powers)

    ends = _total(source, (batches, SIZE), sizes, batches, ranks).flatten()
    ends = torch.quantile(ends, ends.new_tensor(RANKS)).float()
    shape = (3, 3, len(RANKS) + 2, limits.gains.shape[-2], limits.num_shells)
    count, mean, square = _total(source, shape, sums, batches, ranks)
    mean, square = mean / count.clamp_min(1), square / count.clamp_min(1)
    return torch.stack([mean, ((square - mean.square()).clamp_min(0) / count.clamp_min(1)).sqrt()]), ends


def _batch(source: TransientResiduals, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """r, tokens and facts of a batch of reserved states."""
    batch = Schedule({source.name: source.windows("reserved")}, SIZE, seed + 8).batch(number)
    return source.batch("reserved", batch.rows, batch.starts, generator(seed, "limits", number))[:3]


def _field(source: TransientResiduals, r: Tensor) -> Tensor:
    """The frames of r as channels, (batch, bundle * C, *space)."""
    return source.decode(r).flatten(1, 2)


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
