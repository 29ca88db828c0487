"""The units in which bases compute, and the way back to those of the data.

Cells, frames and standard deviations are the units of space, time and fields. Wave numbers, their powers and
time steps then stay near 1, whatever the units of the data, and a fit does not depend on those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ups.data.tokenizer import Tokenizer

FAR = 100  # standard deviations from zero to the mean: of such a field the distance to its mean is fitted,
# as float32 would keep fewer than five digits of its variation
BEYOND = 0.5, 8.0  # of the range of training trajectories, many and one: forecasts of test trajectories went
# 0.1 beyond that of many, those that blow up pass any number


def widened(low: Tensor, high: Tensor, num_trajectories: int) -> tuple[Tensor, Tensor]:
    """What no forecast leaves, by the range (C,) of so many trajectories: the fewer, the less they say."""
    margin = max(BEYOND[0], BEYOND[1] / num_trajectories) * (high - low)
    return low - margin, high + margin


def comparable(lengths: Sequence[float], cell: Sequence[float]) -> list[float]:
    """Lengths of all axes in one unit. lengths: in cells where `cell`, the width of a cell along each axis,
    is given; already in one unit where it is empty."""
    least, cell = min(cell, default=1.0), cell or [1.0] * len(lengths)
    return [length * width / least for length, width in zip(lengths, cell, strict=True)]


@dataclass(frozen=True)
class FieldUnits:
    """Of every channel the state s of a base: s = scale * w + shift of the normalised field w, and
    u = origin + size * s, or u = size * exp(s) of a positive channel. scale, shift: (C,) float64."""

    scale: Tensor
    shift: Tensor
    size: list[float]
    origin: list[float]

    @classmethod
    def of(cls, codec: "Tokenizer") -> "FieldUnits":
        """Those of the fields of a codec."""
        means, stds = codec.mean.double().tolist(), codec.std.double().tolist()
        rows = []  # scale, shift, size, origin
        for name, mean, std in zip(codec.fields, means, stds, strict=True):
            if name in codec.positive:
                rows.append((std, 0.0, math.exp(mean), 0.0))
            elif abs(mean) > FAR * std:
                rows.append((1.0, 0.0, std, mean))
            else:
                rows.append((1.0, mean / std, std, 0.0))
        scale, shift, size, origin = zip(*rows, strict=True)
        return cls(*(torch.tensor(part, dtype=torch.float64) for part in (scale, shift)), [*size], [*origin])


def unit_of(
    term: tuple[Sequence[int], Sequence[tuple[int, Sequence[int]]]],
    channel: int,
    fields: FieldUnits,
    positive: Sequence[int],
    cell: Sequence[float],
    frame: float,
) -> float:
    """What a coefficient of 1 of `term` in the equation of `channel` is in the units of the data.

    Sums of logarithms: no power of a unit leaves the range of numbers on the way.
    """
    powers, factors = term
    own = [0.0 if c in positive else math.log(size) for c, size in enumerate(fields.size)]
    total = own[channel] - math.log(frame)
    total -= sum(exponent * math.log(fields.size[c]) for c, exponent in enumerate(powers) if exponent)
    for c, axes in factors:
        if c >= 0:  # waves that stand still have no unit
            total -= own[c] - sum(math.log(cell[axis]) for axis in axes if axis >= 0)
            total -= 2 * math.log(min(cell)) if -1 in axes else 0.0  # the inverse Laplacian
    return math.exp(total)
