"""The fit of `WaveLimits` to the residuals of an operator and the draws of a trained network."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.common.transfer import send
from ups.data.schedule import Schedule
from ups.generative.conditions import error_fact
from ups.generative.draws import KEYS, Sampler
from ups.generative.limits import WaveLimits
from ups.generative.residuals import TransientResiduals, summed

SIZE = 64  # reserved states in a batch
MEASURED = 32  # batches: the power of short waves is that of a few sharp states
DRAWN = 8  # of them, of which draws are made, whose power varies less


def measure_residuals(limits: WaveLimits, source: TransientResiduals, seed: int, ranks: Any) -> Tensor:
    """Set the silent waves; the power by shell of residuals, (mean, standard error) (2, channels, shells). A
    collective."""

    def of_states(number: int) -> Tensor:
        r, tokens, _ = _batch(source, seed, number)
        return limits.power(_field(source, source.prediction(tokens) + r)).sum(0)

    def of_residuals(number: int) -> Tensor:
        return _moments(limits.power_by_shell(_field(source, _batch(source, seed, number)[0])))

    limits.set_silent(_total(source, limits.is_silent.shape, of_states, DRAWN, ranks))
    shape = (2, *limits.gain.shape[2:])
    return _mean_and_error(_total(source, shape, of_residuals, MEASURED, ranks), MEASURED)


def fit_gains(
    samplers: Mapping[str, Sampler],
    source: TransientResiduals,
    residuals: Tensor,
    seed: int,
    ranks: Any,
    is_drawn: bool = False,
) -> None:
    """Set the gains of a task's head in the network of `samplers` at states that are given; with is_drawn at
    states that are said to have the head's `drawn_error`. residuals: of `measure_residuals`. A collective."""
    each = list(samplers.values())
    head = each[0].network.heads[source.name]
    limits, size = head.limits, head.drawn_error if is_drawn else 0.0

    def of_draws(number: int) -> Tensor:
        r, tokens, facts = _batch(source, seed, number)
        told = torch.cat([facts[:, :-1], error_fact(facts.new_full((len(facts), 1), size))], 1)
        streams = [generator(seed, "limits", key, number) for key in KEYS]
        noise, second = (send(torch.randn(r.shape, generator=stream), r.device) for stream in streams)
        return torch.stack(
            [
                _moments(
                    limits.power_by_shell(
                        _field(
                            source, sampler.residual(source, tokens, told, noise, second, is_limited=False)
                        )
                    )
                )
                for sampler in each
            ]
        )

    shape = (len(each), 2, *limits.gain.shape[2:])
    for sampler, sums in zip(each, _total(source, shape, of_draws, DRAWN, ranks), strict=True):
        limits.set_gain(residuals, _mean_and_error(sums, DRAWN), max(1, sampler.evaluations), is_drawn)


def _batch(source: TransientResiduals, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """r, tokens and facts of a batch of reserved states."""
    batch = Schedule({source.name: source.windows("reserved")}, SIZE, seed + 8).batch(number)
    return source.draw("reserved", batch.rows, batch.starts, generator(seed, "limits", number))[:3]


def _field(source: TransientResiduals, r: Tensor) -> Tensor:
    """The frames of r side by side, (batch, bundle * C, *space)."""
    return source.decode(r).flatten(1, 2)


def _moments(power: Tensor) -> Tensor:
    """Sums over rows of a power and of its square (2, ...)."""
    return torch.stack([power.sum(0), power.square().sum(0)])


def _mean_and_error(sums: Tensor, batches: int) -> Tensor:
    """Of `_moments` of so many batches: the mean and its standard error."""
    mean, square = sums / (batches * SIZE)
    return torch.stack([mean, ((square - mean.square()).clamp_min(0) / (batches * SIZE)).sqrt()])


def _total(
    source: TransientResiduals, shape: tuple[int, ...], of: Callable[[int], Tensor], batches: int, ranks: Any
) -> Tensor:
    """The sum of of(number), of this shape, over so many batches, of which every rank takes some."""
    [sums] = summed(
        {source.name: [*range(batches)][ranks.rank :: ranks.world]},
        lambda _, number: of(number).flatten(),
        torch.Size(shape).numel(),
        ranks,
    )
    return torch.tensor(sums, dtype=torch.float64, device=source.device).view(shape)
