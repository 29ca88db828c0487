"""Fit of `WaveLimits` to the residuals of an operator and the samples of a trained network."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.common.device import send
from ups.data.schedule import Schedule
from ups.generative.conditions import encode_error
from ups.generative.residuals import TransientResiduals, sum_by_task
from ups.generative.sampling import KEYS, Sampler
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.training.ranks import Ranks

SIZE = 64  # reserved states in a batch
RESIDUAL_BATCHES = 32  # many, because a few sharp states have most of the power in short waves
SAMPLE_BATCHES = 8  # the first of them; the power of samples varies less


class LimitFit:
    """The limits of the head of one task, and what they are fitted to: residuals of reserved states, and the
    samples of a network. Its methods are collectives."""

    def __init__(
        self, samplers: Mapping[str, Sampler], source: TransientResiduals, seed: int, ranks: "Ranks"
    ):
        self.samplers, self.source, self.seed, self.ranks = samplers, source, seed, ranks
        self.head = next(iter(samplers.values())).network.heads[source.name]
        self.limits = self.head.limits
        self.shape = 2, 3, self.limits.gains.shape[3], self.limits.num_shells  # of `_moments`

    def fit_observed(self) -> None:
        """Set the silent waves, and the gains for observed states. They also apply to sampled states, until
        those have their own."""

        def state_power(number: int) -> Tensor:
            r, tokens, _ = self._batch(number)
            return self.limits.power(self._field(self.source.prediction(tokens) + r)).sum(0)

        def residual_moments(number: int) -> Tensor:
            r, tokens, _ = self._batch(number)
            return self._moments(self._field(self.source.prediction(tokens)), r)

        self.limits.set_silent(self._total(state_power, self.limits.is_silent.shape, SAMPLE_BATCHES))
        sums = self._total(residual_moments, self.shape, RESIDUAL_BATCHES)
        residuals = _mean_and_error(sums, RESIDUAL_BATCHES)
        for sampler, sampled in zip(self.samplers.values(), self._sample_moments(0.0), strict=True):
            self.limits.set_gains(residuals, sampled, sampler.evaluations, is_sampled=False)

    def fit_sampled(self) -> None:
        """Set the gains for states with the `sample_error` of the head: samples get the moments that those of
        the same states without an error have. A network damps the longest waves of states with an error by
        half a percent a frame, too little to be seen beside a residual; but in long rollouts of forced
        Burgers sharp states become rare (docs/lab/log.md)."""
        if self.head.sample_error == 0:
            return  # the gains for observed states apply
        wanted = self._sample_moments(0.0, is_limited=True)
        found = self._sample_moments(self.head.sample_error)
        for sampler, *pair in zip(self.samplers.values(), wanted, found, strict=True):
            for _, error in pair:
                error.zero_()  # the states and the noise are the same: no difference is chance
            self.limits.set_gains(*pair, sampler.evaluations, is_sampled=True)

    def _sample_moments(self, size: float, is_limited: bool = False) -> list[Tensor]:
        """For every sampler the mean and standard error of the moments of its samples at reserved states,
        which it is told to have an error of this size."""

        def moments(number: int) -> Tensor:
            r, tokens, facts = self._batch(number)
            facts = torch.cat([facts[:, :-1], encode_error(facts.new_full((len(facts), 1), size))], 1)
            rngs = [generator(self.seed, "limits", key, number) for key in KEYS]
            noises = (send(torch.randn(r.shape, generator=rng), r.device) for rng in rngs)
            given = (self.source, tokens, facts, *noises)
            w_pred = self._field(self.source.prediction(tokens))
            samples = [one.residual(*given, is_limited=is_limited) for one in self.samplers.values()]
            return torch.stack([self._moments(w_pred, r) for r in samples])

        total = self._total(moments, (len(self.samplers), *self.shape), SAMPLE_BATCHES)
        return [_mean_and_error(sums, SAMPLE_BATCHES) for sums in total]

    def _batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """r, tokens and facts of a batch of reserved states."""
        windows = {self.source.name: self.source.windows("reserved")}
        batch = Schedule(windows, SIZE, self.seed + 8).batch(number)
        rng = generator(self.seed, "limits", number)
        return self.source.batch("reserved", batch.rows, batch.starts, rng)[:3]

    def _field(self, r: Tensor) -> Tensor:
        """r as a field (batch, C, *space)."""
        return self.source.decode(r).flatten(1, 2)

    def _moments(self, w_pred: Tensor, r: Tensor) -> Tensor:
        """Sums over rows of the `WaveLimits.moments` of r, and of their squares."""
        values = self.limits.moments(w_pred, self._field(r))
        return torch.stack([values.sum(0), values.square().sum(0)])

    def _total(self, of: Callable[[int], Tensor], shape: tuple[int, ...], batches: int) -> Tensor:
        """The sum of of(number), of this shape, over the batches, which are split over the ranks."""
        shard = {self.source.name: [*range(batches)][self.ranks.rank :: self.ranks.world]}
        return sum_by_task(shard, lambda _, number: of(number), shape, self.ranks)[0]


def _mean_and_error(sums: Tensor, batches: int) -> Tensor:
    """The mean and its standard error, from `LimitFit._moments` summed over batches."""
    mean, square = sums / (batches * SIZE)
    return torch.stack([mean, ((square - mean.square()).clamp_min(0) / (batches * SIZE)).sqrt()])
