"""The terms of a right-hand side and their values on a grid: products of powers of the fields and of their
derivatives.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups_discovery.boundary import DIRICHLET, OUTFLOW, PERIODIC, along

# A term: the power of every channel, and its factors (channel, axes of the derivative). INVERSE in front of
# the axes is the inverse Laplacian, applied first. (WAVE, (*wave numbers, 0 or 1)) is the cosine or sine of
# that wave: a standing force from outside.
Factor = tuple[int, tuple[int, ...]]
Term = tuple[tuple[int, ...], tuple[Factor, ...]]

# Central differences of sixth order, of fourth order for the third and fourth derivative (Fornberg 1988):
# weights of the cell itself and of those to its right; the others follow by symmetry.
STENCILS = {
    1: (0, 3 / 4, -3 / 20, 1 / 60),
    2: (-49 / 18, 3 / 2, -3 / 20, 1 / 90),
    3: (0, -13 / 8, 1, -1 / 8),
    4: (28 / 3, -13 / 2, 2, -1 / 6),
}
# Two orders more: a fit with these estimates the error of the others.
FINER = {
    1: (0, 4 / 5, -1 / 5, 4 / 105, -1 / 280),
    2: (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560),
    3: (0, -61 / 30, 169 / 120, -3 / 10, 7 / 240),
    4: (91 / 8, -122 / 15, 169 / 60, -2 / 5, 7 / 240),
}
INVERSE = WAVE = -1


def of_waves(period: int, order: int) -> list[float]:
    """The weights as in STENCILS of the derivative of the interpolant by waves (Trefethen 2000, Spectral
    methods in MATLAB, chapter 3)."""
    symbol = (2j * math.pi * torch.fft.fftfreq(period, dtype=torch.float64)) ** order
    if order % 2 and period % 2 == 0:
        symbol[period // 2] = 0
    weights = torch.fft.fft(symbol).real[: period // 2 + 1] / period
    weights[1 + (period - 1) // 2 :] /= 2  # half a period to the left and to the right is the same cell
    return weights.tolist()


@functools.lru_cache(maxsize=32)
def difference(n: int, order: int, boundary: str, is_finer: bool = False, is_exact: bool = False) -> Tensor:
    """The derivative of this order along an axis of n cells of width 1 as a matrix (n, n), float64. Beyond a
    wall are mirrored cells, with the other sign if Dirichlet; beyond an open end copies of the last cell.
    is_exact: by waves, but FINER with open ends. Shared between calls, so not to be changed.
    """
    matrix, cells = torch.zeros(n, n, dtype=torch.float64), torch.arange(n)
    stencil = (FINER if is_finer or is_exact else STENCILS)[order]
    if is_exact and boundary != OUTFLOW:
        stencil = of_waves(n if boundary == PERIODIC else 2 * n, order)
    for distance, weight in enumerate(stencil):
        for side in (1, -1) if distance else (1,):
            there = cells + side * distance
            sign = torch.full((n,), weight * (side if order % 2 else 1), dtype=torch.float64)
            if boundary == PERIODIC:
                there = there % n
            elif boundary == OUTFLOW:
                there = there.clamp(0, n - 1)
            else:
                sign = torch.where((there < 0) | (there >= n), -sign if boundary == DIRICHLET else sign, sign)
                there = torch.where(there < 0, -1 - there, there).where(there < n, 2 * n - 1 - there)
            matrix.index_put_((cells, there), sign, accumulate=True)
    return matrix


def diagonal(term: Term, positive: Sequence[int], ends: Sequence[str]) -> Factor | None:
    """(channel, axes of the derivative) of a term that is linear in the state and diagonal in the modes of a
    `FieldTransform` (no odd derivative across walls); None for other terms."""
    powers, factors = term
    if not factors and sorted(powers)[-1] == 1 == sum(map(abs, powers)):
        return None if powers.index(1) in positive else (powers.index(1), ())
    if any(powers) or len(factors) != 1:
        return None
    [(channel, axes)] = factors
    is_diagonal = channel != WAVE and all(
        axis != INVERSE and (ends[axis] == PERIODIC or axes.count(axis) % 2 == 0) for axis in axes
    )
    return (channel, axes) if is_diagonal else None


def comparable(lengths: Sequence[float], cell: Sequence[float]) -> list[float]:
    """Lengths of all axes in one unit. lengths: in cells, of the width `cell` along each axis; already in one
    unit if `cell` is empty.
    """
    least, cell = min(cell, default=1.0), cell or [1.0] * len(lengths)
    return [length * width / least for length, width in zip(lengths, cell, strict=True)]


def inverse_laplacian(space: Sequence[int], lengths: Sequence[float]) -> Tensor:
    """The symbol of the inverse Laplacian in the modes of a real periodic transform over all axes; 0 for the
    mean.
    """
    numbers = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) for n in space]
    numbers[-1] = numbers[-1][: space[-1] // 2 + 1]
    waves = [2 * math.pi / length * number for length, number in zip(lengths, numbers, strict=True)]
    square = torch.stack(torch.meshgrid(*waves, indexing="ij")).square().sum(0)
    return torch.where(square > 0, -1 / square.clamp_min(1e-300), 0.0)


def standing_wave(numbers: Sequence[int], space: Sequence[int]) -> Tensor:
    """The cosine (*space) of these numbers of waves along each axis; the sine if the last number is 1."""
    *numbers, part = numbers
    phase = sum(
        torch.arange(n, dtype=torch.float64).view(-1, *[1] * (len(space) - 1 - axis)) * (number / n)
        for axis, (n, number) in enumerate(zip(space, numbers, strict=True))
    )
    phase = 2 * math.pi * phase.expand(*space)
    return phase.sin() if part else phase.cos()


class Terms(nn.Module):
    """The values of `terms` on a grid. lengths (of the axes) and cell: as in `comparable`. The state holds
    the logarithm of a positive channel.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        positive: Sequence[int],
        space: Sequence[int],
        lengths: Sequence[float],
        boundary: str,
        cell: Sequence[float] = (),
        is_finer: bool = False,
        is_exact: bool = False,
    ):
        super().__init__()
        self.terms, self.positive, self.space = list(terms), list(positive), tuple(space)
        ends = along(boundary, len(space))
        self.powers = sorted({powers for powers, _ in self.terms}, reverse=True)
        self.products = sorted({factors for _, factors in self.terms})
        self.factors = sorted({factor for factors in self.products for factor in factors})
        self.derivatives = [
            (axes, [channel for channel, others in self.factors if others == axes and channel != WAVE])
            for axes in sorted({axes for channel, axes in self.factors if channel != WAVE})
        ]
        for axis, order in {
            (axis, axes.count(axis))
            for channel, axes in self.factors
            for axis in axes
            if channel != WAVE and axis != INVERSE
        }:
            matrix = difference(space[axis], order, ends[axis], is_finer, is_exact)
            matrix = matrix * (space[axis] / lengths[axis]) ** order
            self.register_buffer(f"difference{axis}{order}", matrix, persistent=False)
        chosen = [(self.powers.index(powers), self.products.index(factors)) for powers, factors in self.terms]
        self.register_buffer("chosen", torch.tensor(chosen, dtype=torch.long).view(-1, 2).T, persistent=False)
        # for every power the products of its terms, and the terms in that order
        groups = [
            [term for term, (power, _) in enumerate(chosen) if power == place]
            for place in range(len(self.powers))
        ]
        self.groups = [[chosen[term][1] for term in group] for group in groups]
        order = torch.tensor([term for group in groups for term in group], dtype=torch.long)
        self.register_buffer("order", order, persistent=False)
        if any(channel != WAVE and INVERSE in axes for channel, axes in self.factors):
            self.register_buffer(
                "inverse", inverse_laplacian(space, comparable(lengths, cell)), persistent=False
            )
        for channel, numbers in self.factors:
            if channel == WAVE:
                self.register_buffer(f"wave{numbers}", standing_wave(numbers, space), persistent=False)

    def operators(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The differences, waves and the inverse Laplacian in a dtype, for many calls of `weighted`."""
        return {name: buffer.to(dtype) for name, buffer in self.named_buffers() if buffer.is_floating_point()}

    def derived(self, s: Tensor, operators: dict[str, Tensor]) -> dict[Factor, Tensor]:
        """Every factor (rows, cells) of s (rows, C, *space); channels with the same derivative are computed
        together.
        """
        found = {
            (channel, numbers): operators[f"wave{numbers}"].flatten().expand(len(s), -1)
            for channel, numbers in self.factors
            if channel == WAVE
        }
        for axes, channels in self.derivatives:
            part = s if len(channels) == s.shape[1] else torch.stack([s[:, c] for c in channels], 1)
            if INVERSE in axes:
                space = list(range(2, s.ndim))
                part_hat = torch.fft.rfftn(part, dim=space) * operators["inverse"]
                part = torch.fft.irfftn(part_hat, s.shape[2:], space)
            for axis in sorted(set(axes) - {INVERSE}):
                matrix = operators[f"difference{axis}{axes.count(axis)}"]
                if axis == s.ndim - 3:
                    part = part @ matrix.mT
                else:
                    part = (matrix @ part.flatten(3 + axis)).view(part.shape)
            found |= dict(
                zip([(channel, axes) for channel in channels], part.flatten(2).unbind(1), strict=True)
            )
        return found

    def values(
        self, s: Tensor, cells: Tensor | None = None, operators: dict[str, Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """All powers and all products of factors of s (rows, C, *space), each (rows, cells), at all cells or
        at some.
        """
        derived, channels = self.derived(s, operators or self.operators(s.dtype)), s.flatten(2)
        if cells is not None:
            channels = channels[..., cells]
            derived = {factor: values[:, cells] for factor, values in derived.items()}
        unity = torch.ones_like(channels[:, 0])
        return (
            [self._power(channels, power, unity) for power in self.powers],
            [
                math.prod([derived[factor] for factor in factors[1:]], start=derived[factors[0]])
                if factors
                else unity
                for factors in self.products
            ],
        )

    def forward(self, s: Tensor, cells: Tensor | None = None) -> Tensor:
        """The terms (rows, terms, cells) of s (rows, C, *space), at all cells or at some."""
        powers, products = (torch.stack(parts, 1) for parts in self.values(s, cells))
        return powers[:, self.chosen[0]] * products[:, self.chosen[1]]

    def grouped(self, weight: Tensor) -> list[Tensor]:
        """A weight (rows, C, terms) split by power, for `weighted`."""
        return [*weight.index_select(-1, self.order).split([len(group) for group in self.groups], -1)]

    def weighted(
        self, s: Tensor, weights: Sequence[Tensor], operators: dict[str, Tensor] | None = None
    ) -> Tensor:
        """The weighted sum of the terms, of the shape of s (rows, C, *space), without storing each term.
        weights: from `grouped`.
        """
        powers, products = self.values(s, operators=operators)
        parts = [
            power[:, None] * (weight @ torch.stack([products[place] for place in group], 1))
            for power, weight, group in zip(powers, weights, self.groups, strict=True)
        ]
        return sum(parts[1:], parts[0]).view(s.shape)

    def _power(self, channels: Tensor, power: tuple[int, ...], unity: Tensor) -> Tensor:
        logarithm = [
            exponent * channels[:, c] for c, exponent in enumerate(power) if exponent and c in self.positive
        ]
        free = [
            channels[:, c] ** exponent
            for c, exponent in enumerate(power)
            if exponent and c not in self.positive
        ]
        return math.prod(free, start=sum(logarithm[1:], logarithm[0]).exp() if logarithm else unity)
