"""The fit of `WaveLimits` to the draws of a trained network."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ups.data.schedule import Schedule
from ups.generative.conditions import error_fact
from ups.generative.draws import KEYS, Sampler
from ups.generative.residuals import TransientResiduals, summed
from ups.seeds import generator
from ups.transfer import send

BATCHES, SIZE = 8, 64   # of reserved states


def fit_limits(samplers: Mapping[str, Sampler], source: TransientResiduals, seed: int, ranks: Any,
               is_drawn: bool = False) -> None:
    """Set the limits of a task's head in the network of `samplers`: its silent waves and the gains of every
    sampler at states that are given; with is_drawn the gains at states that are said to have the head's
    `drawn_error`. Residuals and draws are those of the same reserved states. A collective."""
    each = list(samplers.values())
    head = each[0].network.heads[source.name]
    limits, size = head.limits, head.drawn_error if is_drawn else 0.0
    schedule = Schedule({source.name: source.windows("reserved")}, SIZE, seed + 8)

    def batch_of(number: int) -> tuple[Tensor, Tensor, Tensor]:
        batch = schedule.batch(number)
        r, tokens, facts, _ = source.draw("reserved", batch.rows, batch.starts,
                                          generator(seed, "limits", number))
        told = error_fact(facts.new_full((len(facts), 1), size))
        return r, tokens, torch.cat([facts[:, :-1], told], 1)

    def total(shape: tuple[int, ...], of: Callable[[int], Tensor]) -> Tensor:
        """The sum over batches of of(number), of this shape, over all ranks."""
        numbers = [*range(BATCHES)][ranks.rank :: ranks.world]
        [sums] = summed({source.name: numbers}, lambda _, number: of(number).flatten(),
                        torch.Size(shape).numel(), ranks)
        return torch.tensor(sums, dtype=torch.float64, device=source.device).view(shape)

    def field(r: Tensor) -> Tensor:
        return source.decode(r).flatten(1, 2)

    def power_of_states(number: int) -> Tensor:
        r, tokens, _ = batch_of(number)
        return limits.power(field(source.prediction(tokens) + r)).sum(0)

    def powers(number: int) -> Tensor:
        """Of residuals and of the draws of every sampler: sums of the power and of its square."""
        r, tokens, facts = batch_of(number)
        streams = [generator(seed, "limits", key, number) for key in KEYS]
        noise, second = (send(torch.randn(r.shape, generator=stream), r.device) for stream in streams)
        found = torch.stack([limits.power_by_shell(field(part)) for part in (r, *(
            sampler.residual(source, tokens, facts, noise, second, is_limited=False) for sampler in each))])
        return torch.stack([found.sum(1), found.square().sum(1)], 1)

    if not is_drawn:
        limits.set_silent(total(limits.is_silent.shape, power_of_states))
    mean, square = (total((1 + len(each), 2, *limits.gain.shape[2:]), powers) / (BATCHES * SIZE)).unbind(1)
    error = ((square - mean.square()).clamp_min(0) / (BATCHES * SIZE)).sqrt()
    residuals, *drawn = torch.stack([mean, error], 1)
    for sampler, power in zip(each, drawn, strict=True):
        limits.set_gain(residuals, power, max(1, sampler.evaluations), is_drawn)
