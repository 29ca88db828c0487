"""The units in which bases compute, and the conversion to those of the data.

Space, time and fields are counted in cells, frames and standard deviations. Then wave numbers, their powers
and time steps are of order 1, and a fit does not depend on the units of the data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A mean more than FAR standard deviations from zero is subtracted: float32 would keep fewer than five digits
# of the variation.
FAR = 100
# Margins of the bounds of forecasts, relative to the range of many training trajectories, and of one.
# Forecasts of test trajectories exceeded the range of many by 0.1; forecasts that blow up exceed any margin.
BEYOND = 0.5, 8.0


def widened(low: Tensor, high: Tensor, num_trajectories: int) -> tuple[Tensor, Tensor]:
    """The bounds of forecasts, from the range (C,) of `num_trajectories`: the fewer, the wider."""
    margin = max(BEYOND[0], BEYOND[1] / num_trajectories) * (high - low)
    return low - margin, high + margin


@dataclass(frozen=True)
class FieldUnits:
    """Conversion of each channel: s = scale * w + shift is the state, w the normalised field, and the
    physical field is u = origin + size * s, or u = size * exp(s) for a positive channel. scale, shift:
    (C,) float64.
    """

    scale: Tensor
    shift: Tensor
    size: list[float]
    origin: list[float]

    @classmethod
    def of(cls, mean: Tensor, std: Tensor, positive: Sequence[int]) -> "FieldUnits":
        """The units of fields with this mean and standard deviation (C,), of the logarithm for positive
        channels."""
        rows = []  # scale, shift, size, origin
        moments = zip(mean.double().tolist(), std.double().tolist(), strict=True)
        for channel, (mean, std) in enumerate(moments):
            if channel in positive:
                rows.append((std, 0.0, math.exp(mean), 0.0))
            elif abs(mean) > FAR * std:
                rows.append((1.0, 0.0, std, mean))
            else:
                rows.append((1.0, mean / std, std, 0.0))
        scale, shift, size, origin = zip(*rows, strict=True)
        return cls(
            *(torch.tensor(values, dtype=torch.float64) for values in (scale, shift)), [*size], [*origin]
        )


def unit_of(
    term: tuple[Sequence[int], Sequence[tuple[int, Sequence[int]]]],
    channel: int,
    fields: FieldUnits,
    positive: Sequence[int],
    cell: Sequence[float],
    frame: float,
) -> float:
    """A coefficient of 1 of `term` in the equation of `channel`, converted to the units of the data.

    Logarithms are summed, so that no power of a unit overflows.
    """
    powers, factors = term
    own = [0.0 if c in positive else math.log(size) for c, size in enumerate(fields.size)]
    total = own[channel] - math.log(frame)
    total -= sum(exponent * math.log(fields.size[c]) for c, exponent in enumerate(powers) if exponent)
    for c, axes in factors:
        if c >= 0:  # standing waves have no unit
            total -= own[c] - sum(math.log(cell[axis]) for axis in axes if axis >= 0)
            total -= 2 * math.log(min(cell)) if -1 in axes else 0.0  # the inverse Laplacian
    return math.exp(total)
