"""An equation on a grid: its right-hand side, and its integration from frame to frame."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups_discovery.boundary import PERIODIC, along
from ups_discovery.spectral import FieldTransform
from ups_discovery.terms import Term, Terms, diagonal

# Steps per frame, each of four evaluations of the right-hand side: at most MOST_STEPS_LARGE_GRID on any grid,
# and more on a small one, as far as cells times steps are at most MOST_CELL_STEPS.
MOST_STEPS_LARGE_GRID, MOST_STEPS_SMALL_GRID, MOST_CELL_STEPS = 32, 256, 2**17


def max_steps(space: Sequence[int]) -> int:
    """The largest number of steps per frame of an equation on a grid."""
    most = MOST_CELL_STEPS // math.prod(space)
    return min(MOST_STEPS_SMALL_GRID, max(MOST_STEPS_LARGE_GRID, most))


class Equation(nn.Module):
    """s_t = sum over terms of weight * term(s), by `num_steps` classical Runge-Kutta steps per frame.

    The state s is the field in the units of `FieldUnits`, or its logarithm for a positive channel. In
    logarithms the equations of a gas are of second order in velocity, pressure / density and derivatives, and
    stay positive; that is a lifting (Qian, Kramer, Peherstorfer and Willcox 2020, arXiv 1912.08177) that
    needs no map back.

    is_stiff: derivatives that are diagonal in the boundary's modes act by their exponential (Lawson 1967):
    those of the channel itself, or with is_coupled all linear terms of all channels together, by a matrix per
    mode. is_finer: derivatives of two orders more; is_exact: by waves, as in `difference`. found: of
    `statement.described`, JSON-able.

    weight: (values, C, terms), one equation per parameter value. low, high (C,): states are clipped to them,
    so a rollout that would blow up stays finite. Other settings are ignored."""

    def __init__(
        self,
        num_values: int,
        num_channels: int,
        space: Sequence[int],
        boundary: str,
        lengths: Sequence[float] = (),
        dt: float = 1.0,
        positive: Sequence[int] = (),
        terms: Sequence[Term] = (),
        num_steps: int = 1,
        is_stiff: bool = False,
        is_coupled: bool = False,
        cell: Sequence[float] = (),
        is_finer: bool = False,
        is_exact: bool = False,
        found: dict[str, Any] | None = None,
        **_: Any,
    ):
        super().__init__()
        self.found = found or {}
        terms = [(tuple(powers), tuple((c, tuple(axes)) for c, axes in factors)) for powers, factors in terms]
        most = 2 * max_steps(space)  # intervals are computed with twice the steps
        if num_steps not in range(1, most + 1):
            raise ValueError(
                f"an equation takes {num_steps} steps a frame; expected 1 to {most}. Train it again."
            )
        self.num_steps, self.step, self.is_stiff = num_steps, dt / num_steps, is_stiff
        self.is_coupled, self.is_exact = is_coupled, is_exact
        lengths = lengths or [1.0] * len(space)
        of_grid = (positive, space, lengths, boundary, cell, is_finer, is_exact)
        self.terms = Terms(terms, *of_grid)
        self.register_buffer("weight", torch.zeros(num_values, num_channels, len(terms)))
        for name, value in (("low", -torch.inf), ("high", torch.inf)):
            self.register_buffer(name, torch.full((num_channels,), value))
        self.transform, self.ends = FieldTransform(tuple(space), boundary), along(boundary, len(space))
        stiff, linear, symbols, sources = torch.zeros(num_channels, len(terms)), [], [], []
        for place, term in enumerate(terms):
            channel, axes = diagonal(term, positive, self.ends) or (None, ())
            if is_stiff and channel is not None and (axes or is_coupled):
                stiff[slice(None) if is_coupled else channel, place] = 1
                linear.append(place)
                symbols.append(
                    math.prod(
                        (self._symbol(axis, axes.count(axis)) for axis in {*axes}),
                        start=torch.ones(self.transform.shape, dtype=torch.complex128),
                    )
                )
                sources.append(torch.eye(num_channels)[channel])
        # terms that act by their exponential in every channel are not part of the slope
        slope_terms = [place for place in range(len(terms)) if not stiff[:, place].all()]
        slope_terms = slope_terms or [*range(len(terms))]
        self.slope = self.terms
        if len(slope_terms) < len(terms):
            self.slope = Terms([terms[place] for place in slope_terms], *of_grid)
        symbols = [torch.view_as_real(symbol.flatten()).mT for symbol in symbols]
        for name, value in (
            ("stiff", stiff),
            ("linear", torch.tensor(linear, dtype=torch.long)),
            ("slope_terms", torch.tensor(slope_terms, dtype=torch.long)),
            ("symbols", torch.stack(symbols, 1) if linear else torch.zeros(2, 0, 1)),
            ("sources", torch.stack(sources) if linear else torch.zeros(0, num_channels)),
        ):
            self.register_buffer(name, value, persistent=False)

    def _symbol(self, axis: int, order: int) -> Tensor:
        """The eigenvalues of a derivative along an axis in the modes of the transform, complex128. Those of
        odd order are imaginary, and 0 at half the sampling rate: real fields stay real."""
        matrix = getattr(self.terms, f"difference{axis}{order}")
        if self.ends[axis] == PERIODIC:
            values = torch.fft.fft(matrix[:, 0])[: self.transform.shape[axis]]  # of a circulant matrix
            values = 1j * values.imag if order % 2 else values.real + 0j
        else:
            rows = getattr(self.transform, f"matrix{axis}").double()
            values = (rows @ matrix @ rows.mT).diagonal() + 0j
        shape = [1] * len(self.transform.shape)
        shape[axis] = -1
        return values.view(shape)

    def rates(self, weight: Tensor) -> Tensor:
        """The rates of every mode by the terms that act by their exponential, from weight (equations, C,
        terms): (equations, C, modes), or (equations, modes, C, C) if is_coupled; real if the modes are."""
        weight = (weight * self.stiff.to(weight.dtype)).index_select(-1, self.linear)
        symbols = self.symbols.to(weight.dtype)
        if self.is_coupled:
            rates = torch.einsum("rcl,ld,plm->prmcd", weight, self.sources.to(weight.dtype), symbols)
        else:
            rates = weight @ symbols[:, None]
        return torch.complex(*rates) if self.transform.is_complex else rates[0]

    def _column(self, values: Tensor, like: Tensor) -> Tensor:
        return values.to(like.dtype).view(-1, *[1] * (like.ndim - 2))

    def advance(self, s: Tensor, weight: Tensor) -> Tensor:
        """The state s (rows, C, *space) one frame later. weight (equations, C, terms): each equation is for
        equally many consecutive rows."""
        low, high = self._column(self.low, s), self._column(self.high, s)

        def clamped(s: Tensor) -> Tensor:
            return torch.minimum(torch.maximum(s, low), high)

        each = len(s) // len(weight)
        rest = weight * (1 - self.stiff.to(s.dtype)) if self.is_stiff else weight
        rest = rest.index_select(-1, self.slope_terms)
        weights = self.slope.grouped(rest.repeat_interleave(each, 0))
        operators = self.slope.operators(s.dtype)

        def slope(s: Tensor) -> Tensor:
            return self.slope.weighted(clamped(s), weights, operators)

        step = self.step
        if not self.is_stiff:
            for _ in range(self.num_steps):
                a = slope(s)
                b = slope(s + step / 2 * a)
                c = slope(s + step / 2 * b)
                d = slope(s + step * c)
                s = clamped(s + step / 6 * (a + 2 * b + 2 * c + d))
            return s
        half = step / 2 * self.rates(weight)
        half = torch.linalg.matrix_exp(half.contiguous()) if self.is_coupled else half.exp()
        half = half.repeat_interleave(each, 0)

        def moved(s_hat: Tensor) -> Tensor:
            """The modes after half a step by the linear terms alone."""
            return torch.einsum("rmcd,rdm->rcm", half, s_hat) if self.is_coupled else half * s_hat

        def modal(s_hat: Tensor) -> Tensor:
            return self.transform.forward(slope(self.transform.inverse(s_hat)))

        s_hat = self.transform.forward(s)
        for _ in range(self.num_steps):
            a = modal(s_hat)
            s_hat, a = moved(s_hat), moved(a)
            b = modal(s_hat + step / 2 * a)
            c = modal(s_hat + step / 2 * b)
            d = modal(moved(s_hat + step * c))
            s_hat = moved(s_hat + step / 6 * (a + 2 * b + 2 * c)) + step / 6 * d
        return clamped(self.transform.inverse(s_hat))
