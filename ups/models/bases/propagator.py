"""Spectral bases that are fitted in closed form, and the polynomial propagator."""

import copy
import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ups.models.bases.base import Base, Fit, ParameterBatch, Samples
from ups_discovery.spectral import FieldTransform

MOST_DEGREE = 5
# products of terms and targets in every mode (modes, columns, columns), summed over windows, and their number
Sums = tuple[Tensor, int]
# of the terms of the rows that are computed at once on a CPU; half and twice of it are slower
WEIGHT_BYTES = 7 * 2**18


@functools.cache
def monomials(num_channels: int, degree: int) -> list[tuple[int, ...]]:
    """The channels of every monomial of degree 1 .. `degree`, in order of degree."""
    return [
        term
        for d in range(1, degree + 1)
        for term in itertools.combinations_with_replacement(range(num_channels), d)
    ]


def dictionary(u: Tensor, degree: int) -> list[Tensor]:
    """Monomials (batch, *space) of one frame u (batch, C, *space)."""
    channels, terms = u.unbind(1), {}
    for term in monomials(len(channels), degree):  # each by one product from a lower degree
        terms[term] = channels[term[-1]] * terms[term[:-1]] if len(term) > 1 else channels[term[0]]
    return list(terms.values())


def num_forced(num_forcing: int) -> int:
    """The number of forcing terms per mode: each channel now and in the next frame, and a constant."""
    return 2 * num_forcing + 1 if num_forcing else 0


class Modal(Base):
    """u_next = start + W(k) phi: every mode k of the boundary's spectral basis has its own small matrix W,
    fitted by ridge regression in closed form, one per parameter value.

    `start_and_terms` computes start (batch, C, *space) and phi (batch, num_terms, modes) of a window. With
    forcing, phi continues with the forcing now and in the next frame, and a constant: fields by their modes,
    a series by its value in every mode, so that its pattern in space is fitted. weight_real, weight_imag:
    (values, modes, terms, C), zero until fitted. num_forcing: channels of `ParameterBatch.forcing`; series:
    those that are one number per frame.
    """

    needs_fitted_parameters = True
    # windows per parameter value in the normal equations, at most; fewer where they take more than
    # MOST_PRODUCTS, down to ten for every unknown of a mode
    MAX_WINDOWS, BATCH, MOST_PRODUCTS, WINDOWS_PER_UNKNOWN = 2000, 32, 2**31, 10
    RIDGES = (1e-6, 1e-8, 1e-10)
    LEAST_GAIN = 0.01  # of the error of a frame by a smaller ridge, else the larger one alone is a candidate
    MOST_BYTES = 2**30  # of the normal equations; a quarter of it for a batch in modes

    def __init__(
        self,
        num_terms: int,
        num_values: int,
        num_channels: int,
        space: tuple[int, ...],
        boundary: str,
        num_forcing: int = 0,
        series: Sequence[int] = (),
        **_: Any,
    ):
        super().__init__()
        self.transform = FieldTransform(space, boundary)
        self.num_forced, self.series = num_forced(num_forcing), list(series)
        self.forcing_fields = [channel for channel in range(num_forcing) if channel not in self.series]
        # in memory (values, C, terms, modes), as `forward` reads them
        shape = (num_values, num_channels, num_terms + self.num_forced, self.transform.modes)
        for name in ("weight_real", "weight_imag")[: 1 + self.transform.is_complex]:
            self.register_buffer(name, torch.zeros(shape).permute(0, 3, 2, 1))

    @property
    def num_fitted(self) -> int:
        return (2 if self.transform.is_complex else 1) * self.weight_real.numel()

    @abstractmethod
    def start_and_terms(self, u: Tensor, parameters: ParameterBatch) -> tuple[Tensor, Tensor]:
        """start and phi of a window u (batch, history, C, *space)."""

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        weight = self.weight_real.permute(0, 3, 2, 1)  # values, C, terms, modes
        if self.transform.is_complex:
            weight = torch.complex(weight, self.weight_imag.permute(0, 3, 2, 1))
        if u.device.type != "cpu" or torch.compiler.is_exporting():
            return self._next(u, parameters, weight)
        size = max(1, WEIGHT_BYTES // weight[0, 0].nbytes)
        blocks = [slice(first, first + size) for first in range(0, max(1, len(u)), size)]
        return torch.cat([self._next(u[rows], parameters.rows(rows), weight) for rows in blocks])

    def _next(self, u: Tensor, parameters: ParameterBatch, weight: Tensor) -> Tensor:
        start, phi = self.start_and_terms(u.float(), parameters)
        if self.num_forced:
            phi = self.with_forcing(phi, parameters)
        change = _sum_of_products(phi, weight[0])
        # one sum of all rows per parameter value: its shape does not depend on which values they have
        for value in range(1, len(weight)):
            is_value = (parameters.index == value)[:, None, None]
            change = torch.where(is_value, _sum_of_products(phi, weight[value]), change)
        return start + self.transform.inverse(change)

    def with_forcing(self, phi: Tensor, parameters: ParameterBatch) -> Tensor:
        """phi (batch, num_terms, modes), continued with the forcing terms."""
        w = parameters.forcing[:, :2].float()  # now, next
        values = w[:, :, self.series].flatten(3)[..., 0].flatten(1)
        values = torch.cat([values, values.new_ones(len(w), 1)], 1).to(phi.dtype)
        terms = [values[..., None].expand(-1, -1, phi.shape[-1])]
        if self.forcing_fields:
            terms.insert(0, self.transform.forward(w[:, :, self.forcing_fields].flatten(1, 2)))
        return torch.cat([phi, *terms], 1)

    @classmethod
    def has_room(cls, settings: dict[str, Any], num_terms: int) -> bool:
        """Whether the normal equations of all parameter values take no more than MOST_BYTES."""
        transform = FieldTransform(settings["space"], settings["boundary"])
        num_terms += num_forced(settings.get("num_forcing", 0))
        num = settings["num_values"] * transform.modes * num_terms**2
        return num * (16 if transform.is_complex else 8) <= cls.MOST_BYTES

    def normal_equations(self, samples: Samples, value: int) -> Sums:
        """Those of a parameter value, mode by mode, in float64.

        Raises ValueError for a value without a window.
        """
        num_modes, terms = self.weight_real.shape[1:3]
        enough = max(self.WINDOWS_PER_UNKNOWN * terms, self.MOST_PRODUCTS // (num_modes * terms**2))
        count = min(self.MAX_WINDOWS, enough, samples.count(value))
        size = max(1, min(self.BATCH, self.MOST_BYTES // 4 // (16 * terms * num_modes)))
        total = num_windows = 0
        for read in samples.batches(count, size, value):
            u, parameters, u_next = read()
            start, phi = self.start_and_terms(u, parameters)
            if self.num_forced:
                phi = self.with_forcing(phi, parameters)
            # modes, columns, windows: with windows before columns the product takes five times as long
            columns = torch.cat([phi, self.transform.forward(u_next - start)], 1).permute(2, 1, 0)
            wide = torch.complex128 if phi.is_complex() else torch.float64
            columns = columns.to(wide, memory_format=torch.contiguous_format)
            total, num_windows = total + columns.conj() @ columns.mT, num_windows + len(u)
        if num_windows == 0:
            raise ValueError(
                f"no training window for parameter value number {value}; expected at least one. "
                "Check the split."
            )
        return total, num_windows

    def fits(self, sums: Sequence[Sums]) -> Iterator[tuple[float, Self]]:
        """(ridge, fitted copy), from the largest ridge; a smaller one only if some error of a frame falls."""
        before = [math.inf] * len(sums)
        for ridge in self.RIDGES:
            weights, errors = zip(*[self.solution(*one, ridge) for one in sums], strict=True)
            if all(now > (1 - self.LEAST_GAIN) * old for now, old in zip(errors, before, strict=True)):
                continue
            before = errors
            yield ridge, self.with_weights(weights)

    def with_weights(self, weights: Sequence[Tensor]) -> Self:
        """A copy with these W, one for each parameter value."""
        fitted = copy.deepcopy(self)
        for value, weight in enumerate(weights):
            fitted.weight_real[value] = weight.real.float()
            if self.transform.is_complex:
                fitted.weight_imag[value] = weight.imag.float()
        return fitted

    def twin(self, samples: Samples, settings: dict[str, Any]) -> tuple[dict[str, Any], Self]:
        """The base with the same ridge, fitted to other samples."""
        sums = [self.normal_equations(samples, value) for value in range(len(self.weight_real))]
        return settings, self.with_weights([self.solution(*one, settings["ridge"])[0] for one in sums])

    def solution(self, products: Tensor, num_windows: int, ridge: float) -> tuple[Tensor, float]:
        """W of (Phi^H Phi + ridge n I) W = Phi^H (u_next - start) in every mode, and its RMS error."""
        terms, eye = self.weight_real.shape[2], torch.eye(products.shape[-1]).to(products)
        damped = products[:, :terms, :terms] + ridge * num_windows * eye[:terms, :terms]
        weight = torch.linalg.solve(damped, products[:, :terms, terms:])
        residual = torch.cat([-weight, eye[terms:, terms:].expand(len(weight), -1, -1)], 1)
        square = float((residual.conj() * (products @ residual)).sum().real)
        return weight, math.sqrt(max(0.0, square) / num_windows)


def _sum_of_products(phi: Tensor, weight: Tensor) -> Tensor:
    """(batch, C, modes): the sum over terms of phi (batch, terms, modes) times weight (C, terms, modes).

    On a CPU channel by channel, in a tenth to a half of the time of a matrix product per mode.
    """
    if phi.device.type != "cpu":
        return torch.einsum("btm,ctm->bcm", phi, weight)
    return torch.stack([(phi * channel).sum(1) for channel in weight], 1)


class Propagator(Modal):
    """u_next = u + W(k) [phi(u), phi(u_-1), ...] (see `Modal`), with phi all monomials up to `degree`, newest
    frame first.

    For degree 1 this is dynamic mode decomposition (Schmid 2010), for higher degrees nonlinear vector
    autoregression in spectral space (Gauthier et al. 2021, doi 10.1038/s41467-021-25801-2). It contains exact
    transport and diffusion, and multistep integrators of polynomial reactions. Products across frames did not
    help, nor did a constant (on reaction-diffusion it reduced the error by 40 % with one frame of history and
    by 0.3 % with four). Above degree 1, products of the newest frame and the forcing are terms as well, for
    coefficients that vary in time. With zero weights it is persistence.
    """

    kind = "propagator"

    def __init__(self, degree: int, history: int, walls: Sequence[tuple[float, float]] = (), **settings: Any):
        num_channels, num_forcing = settings["num_channels"], settings.get("num_forcing", 0)
        super().__init__(self.num_terms(num_channels, degree, history, num_forcing), **settings)
        self.degree, self.history, self.has_products = degree, history, degree > 1 and num_forcing > 0
        # the line between the values at the walls: u minus it is zero there, as sines are
        num = settings["space"][0]
        ends = [low + (high - low) * (torch.arange(num) + 0.5) / num for low, high in walls]
        self.register_buffer("line", torch.stack(ends) if ends else torch.zeros(()), persistent=False)

    def start_and_terms(self, u: Tensor, parameters: ParameterBatch) -> tuple[Tensor, Tensor]:
        terms = []
        for lag in range(self.history):
            terms += dictionary(u[:, -1 - lag] - self.line, self.degree)
        if self.has_products:
            between = parameters.forcing[:, :2].float().mean(1)
            terms += ((u[:, -1] - self.line)[:, :, None] * between[:, None]).flatten(1, 2).unbind(1)
        return u[:, -1], self.transform.forward(torch.stack(terms, 1))

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Propagator"]:
        """Yield a candidate for every degree, history and ridge, from one pass over the data.

        The normal equations of the largest dictionary contain those of all smaller ones, so each candidate
        costs one small solve per mode. If they need more than MOST_BYTES (3D, several fields), the candidates
        are of degree 1 alone, then of one frame, then none.
        """
        num_channels = settings["num_channels"]
        wanted = [(settings["degree"], settings["history"]), (1, settings["history"]), (1, 1)]
        num_forcing = settings.get("num_forcing", 0)
        sizes = [
            some for some in wanted if cls.has_room(settings, cls.num_terms(num_channels, *some, num_forcing))
        ]
        room = f"its normal equations take more than {cls.MOST_BYTES >> 20} MiB"
        if not sizes:
            return room
        degree, history = sizes[0]
        largest = cls(**{**settings, "degree": degree, "history": history}).to(samples.device)
        sums = [largest.normal_equations(samples, value) for value in range(settings["num_values"])]
        per_frame = len(monomials(num_channels, degree))
        for deg, lags in itertools.product(
            sorted({1, degree}), sorted({1, 2, history} & set(range(1, history + 1)))
        ):
            terms, end = range(len(monomials(num_channels, deg))), largest.weight_real.shape[2]
            first = end - largest.num_forced if deg == 1 else history * per_frame
            kept = [lag * per_frame + term for lag in range(lags) for term in terms]
            kept = torch.tensor([*kept, *range(first, end + num_channels)])
            some = [(products[:, kept][:, :, kept], num) for products, num in sums]
            smaller = {**settings, "degree": deg, "history": lags}
            for ridge, fitted in cls(**smaller).to(samples.device).fits(some):
                name = f"propagator degree {deg} history {lags} ridge {ridge:g}"
                yield name, {**smaller, "ridge": ridge}, fitted
        return None if sizes[0] == wanted[0] else f"beyond degree {degree} and history {history} {room}"

    @classmethod
    def num_terms(cls, num_channels: int, degree: int, history: int, num_forcing: int = 0) -> int:
        if degree not in range(1, MOST_DEGREE + 1):
            raise ValueError(
                f"a propagator has the degree {degree!r:.80}; expected 1 to {MOST_DEGREE}. Train it again."
            )
        products = num_channels * num_forcing if degree > 1 else 0
        return sum(math.comb(num_channels + d - 1, d) for d in range(1, degree + 1)) * history + products
