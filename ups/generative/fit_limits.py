"""Fit of `WaveLimits` to the residuals of an operator and the samples of a trained network."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ups.common.device import send
from ups.data.schedule import Schedule
from ups.generative.conditions import encode_error
from ups.generative.limits import RANKS
from ups.generative.residuals import TransientResiduals, sum_by_task
from ups.generative.sampling import KEYS, Sampler
from ups.training.fit import RanksOfRun
from ups_discovery.seeds import generator

SIZE = 64  # reserved states in a batch
RESIDUAL_BATCHES = 32  # many, because a few sharp states have most of the power in short waves
SAMPLE_BATCHES = 8  # the first of them; the power of samples varies less

Draws = tuple[Tensor, Tensor, Tensor]  # fields (n, channels, *space): r, predictions, and r by whose size


class LimitFit:
    """The limits of the head of one task, and what they are fitted to: residuals of reserved states, and the
    samples of a network. Its methods are collectives."""

    def __init__(
        self, samplers: Mapping[str, Sampler], source: TransientResiduals, seed: int, ranks: RanksOfRun
    ):
        self.samplers, self.source, self.seed, self.ranks = samplers, source, seed, ranks
        self.head = next(iter(samplers.values())).network.heads[source.name]
        self.limits = self.head.limits

    def fit_observed(self) -> None:
        """Set the silent waves, and the gains for observed states. They also apply to sampled states, until
        those have their own."""

        def residuals(number: int) -> Draws:
            r, tokens, _ = self._batch(number)
            r, w_pred = self._field(r), self._field(self.source.prediction(tokens))
            return r, w_pred, r

        def state_power(number: int) -> Tensor:
            r, w_pred, _ = residuals(number)
            return self.limits.power(w_pred + r).sum(0)

        self.limits.set_silent(self._total(state_power, self.limits.is_silent.shape, SAMPLE_BATCHES))
        wanted, _ = self._by_group(residuals, RESIDUAL_BATCHES)
        for sampler in self.samplers.values():
            found = self._by_group(partial(self._samples, sampler, 0.0), SAMPLE_BATCHES)
            self.limits.set_gains(wanted, *found, sampler.evaluations, is_sampled=False)

    def fit_sampled(self) -> None:
        """Set the gains for states with the `sample_error` of the head: samples get the moments that those of
        the same states without an error have. A network damps the longest waves of states with an error by
        half a percent a frame, too little to be seen beside a residual; but in long rollouts of forced
        Burgers sharp states become rare (docs/lab/log.md)."""
        if self.head.sample_error == 0:
            return  # the gains for observed states apply
        for sampler in self.samplers.values():
            told = partial(self._samples, sampler, self.head.sample_error)
            found, ends = self._by_group(told, SAMPLE_BATCHES)
            exact = partial(self._samples, sampler, 0.0, grouped_by=told)
            wanted, _ = self._by_group(exact, SAMPLE_BATCHES)
            for _, error in (wanted, found):
                error.zero_()  # the states and the noise are the same: no difference is chance
            self.limits.set_gains(wanted, found, ends, sampler.evaluations, is_sampled=True)

    def _samples(
        self, sampler: Sampler, size: float, number: int, grouped_by: Callable[[int], Draws] | None = None
    ) -> Draws:
        """Samples at reserved states, which the sampler is told to have an error of this size. grouped_by:
        other samples at these states; if given, the samples are limited."""
        r, tokens, facts = self._batch(number)
        facts = torch.cat([facts[:, :-1], encode_error(facts.new_full((len(facts), 1), size))], 1)
        rngs = [generator(self.seed, "limits", key, number) for key in KEYS]
        noises = (send(torch.randn(r.shape, generator=rng), r.device) for rng in rngs)
        r = self._field(sampler.residual(self.source, tokens, facts, *noises, is_limited=bool(grouped_by)))
        return r, self._field(self.source.prediction(tokens)), grouped_by(number)[0] if grouped_by else r

    def _by_group(self, draws: Callable[[int], Draws], batches: int) -> tuple[Tensor, Tensor]:
        """(`WaveLimits.moments` as (mean, standard error) (2, 3, groups + 1, channels, shells), the last of
        all, ends of the groups) of the draws of all batches."""
        found: dict[int, tuple[Tensor, Tensor]] = {}  # of this rank

        def sizes(number: int) -> Tensor:
            r, w_pred, sorting = draws(number)
            found[number] = self.limits.size(sorting), self.limits.moments(w_pred, r)
            every = torch.zeros(batches, SIZE, device=r.device)
            every[number] = found[number][0]
            return every

        def sums(number: int) -> Tensor:
            size, values = found[number]
            member = nn.functional.one_hot(torch.bucketize(size, ends), len(RANKS) + 2).to(values)
            member[:, -1] = 1  # all
            powers = torch.stack([torch.ones_like(values), values, values.square()])
            return torch.einsum("ng,knm...->kmg...", member, powers)

        every = self._total(sizes, (batches, SIZE), batches).flatten()
        ends = torch.quantile(every, every.new_tensor(RANKS)).float()
        shape = 3, 3, len(RANKS) + 2, self.limits.gains.shape[-2], self.limits.num_shells
        count, mean, square = self._total(sums, shape, batches)
        mean, square = mean / count.clamp_min(1), square / count.clamp_min(1)
        error = ((square - mean.square()).clamp_min(0) / count.clamp_min(1)).sqrt()
        return torch.stack([mean, error]), ends

    def _batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """r, tokens and facts of a batch of reserved states."""
        windows = {self.source.name: self.source.windows("reserved")}
        batch = Schedule(windows, SIZE, self.seed + 8).batch(number)
        rng = generator(self.seed, "limits", number)
        return self.source.batch("reserved", batch.rows, batch.starts, rng)[:3]

    def _field(self, r: Tensor) -> Tensor:
        """The frames of r as channels, (batch, bundle * C, *space)."""
        return self.source.decode(r).flatten(1, 2)

    def _total(self, of: Callable[[int], Tensor], shape: tuple[int, ...], batches: int) -> Tensor:
        """The sum of of(number), of this shape, over the batches, which are split over the ranks."""
        shard = {self.source.name: [*range(batches)][self.ranks.rank :: self.ranks.world]}
        return sum_by_task(shard, lambda _, number: of(number), shape, self.ranks)[0]
