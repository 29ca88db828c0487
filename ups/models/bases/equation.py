"""The equation base: a right-hand side that is identified from the data, and integrated from frame to
frame."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.common.boundary import PERIODIC, along
from ups.common.progress import note
from ups.common.spectral import FieldTransform
from ups.models.bases.base import Base, Fit, ParameterBatch, Samples
from ups.models.bases.certainty import Certainty, of_drift, of_equation
from ups.models.bases.doubts import UNCLEAR
from ups.models.bases.drift import Drift
from ups.models.bases.identify import Identification, terms_of
from ups.models.bases.integrate import Model, max_steps
from ups.models.bases.shooting import leaves_kicks
from ups.models.bases.statement import described, stated
from ups.models.bases.terms import WAVE, Term, Terms, diagonal

NOISY = 0.7  # error one frame ahead relative to persistence, above which a drift is fitted as well
# of the standard deviation: noise that films without any are taken to have, for the width of test functions
QUIET = 0.01
MIN_FRAMES = 3  # of a central difference in time


class Equation(Base):
    """s_t = sum over terms of weight * term(s), by `num_steps` classical Runge-Kutta steps per frame.

    The state s is the field, or its logarithm for a positive channel: the input of the codec's mean and std.
    Terms (terms.py) and weights are identified from the data (identify.py). In logarithms the equations of a
    gas are of second order in velocity, pressure / density and derivatives, and stay positive; that is a
    lifting (Qian, Kramer, Peherstorfer and Willcox 2020, arXiv 1912.08177) that needs no map back.

    is_stiff: derivatives that are diagonal in the boundary's modes act by their exponential (Lawson 1967):
    those of the channel itself, or with is_coupled all linear terms of all channels together, by a matrix per
    mode. is_finer: derivatives of two orders more.

    weight: (values, C, terms), one equation per parameter value. low, high (C,): states are clipped to them,
    so a rollout that would blow up stays finite and loses in the selection."""

    kind, needs_fitted_parameters, has_tangent = "equation", True, True

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
        self.is_coupled = is_coupled
        lengths = lengths or [1.0] * len(space)
        self.terms = Terms(terms, positive, space, lengths, boundary, cell, is_finer)
        self.register_buffer("weight", torch.zeros(num_values, num_channels, len(terms)))
        for name, value in (("mean", 0.0), ("std", 1.0), ("low", -torch.inf), ("high", torch.inf)):
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
            rest = [terms[place] for place in slope_terms]
            self.slope = Terms(rest, positive, space, lengths, boundary, cell, is_finer)
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

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        u = u[:, -1].float()
        if not self.terms.terms:
            return u
        mean, std = self._column(self.mean, u), self._column(self.std, u)
        weight = self.weight if len(self.weight) == 1 else self.weight[parameters.index]
        return (self.advance(u * std + mean, weight) - mean) / std

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

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        return stated(self.found, self.terms.terms, fields, self.terms.positive, axes)

    @property
    def degree(self) -> int:
        """The degree of the right-hand side; negative powers count by their size."""
        return max(
            (
                sum(map(abs, powers)) + sum(channel != WAVE for channel, _ in factors)
                for powers, factors in self.terms.terms
            ),
            default=1,
        )

    @property
    def num_fitted(self) -> int:
        return int((self.weight != 0).sum())

    def unbounded(self) -> "Equation":
        free = copy.deepcopy(self)
        free.low.fill_(-torch.inf)
        free.high.fill_(torch.inf)
        return free

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Equation"]:
        """Yield the equation and, if a frame is mostly noise to it, the drift of a stochastic equation.

        Neither is yielded if, for some parameter value, it does not beat persistence on held-out training
        trajectories. For films without noise that were cut into windows, the equation by the weak form comes
        second, in place of the drift, if nothing speaks against it: differences of frames far apart fail.
        """
        frames = samples.cache.num_frames - samples.first
        if frames < MIN_FRAMES:
            print(
                f"{samples.name}: equation needs {MIN_FRAMES} frames to estimate time derivatives, the "
                f"data have {frames}: left out"
            )
            return None
        identifications, equations, certainties = cls.identified(samples, settings)
        has_equation = None not in equations
        if has_equation:
            yield cls.of(equations, certainties, identifications, samples, settings, "equation of {} terms")
        if samples.cache.windows is not None and all(one.noise is None for one in identifications):
            films, models, assessed = cls.identified(samples, settings, QUIET)
            if None not in models and not any(one.doubt for one in assessed):
                title = "equation of {} terms by its weak form"
                yield cls.of(models, assessed, films, samples, settings, title)
                return None
        if not has_equation or any(
            (one.noise is None or certainty.doubt == UNCLEAR)
            and not (one.is_shot and leaves_kicks(one, model))
            and one.error(model, one.held_out_windows[:, : 2 if one.noise is None else None]) > NOISY
            for one, model, certainty in zip(identifications, equations, certainties, strict=True)
        ):
            drifts, certainties = [], []
            for value in range(settings["num_values"]):
                note(f"{samples.name}: the drift of parameter value {value + 1} of {settings['num_values']}")
                if value == len(identifications):
                    identifications.append(Identification(cls, samples, settings, value))
                drift = Drift(identifications[value], samples, value)
                drifts.append(drift.model())
                if drifts[-1] is None:
                    return (
                        f"no {'drift' if has_equation else 'terms'} of parameter value {value + 1} "
                        f"of {settings['num_values']} beat persistence on training data held out"
                    )
                certainties.append(of_drift(drift, drifts[-1]))
            yield cls.of(drifts, certainties, identifications, samples, settings, "drift of {} terms")
            if not has_equation:
                return (
                    f"no equation of parameter value {len(equations)} of {settings['num_values']} beats "
                    f"persistence on training data held out; its drift does"
                )
        return None

    @classmethod
    def identified(
        cls, samples: Samples, settings: dict[str, Any], least_noise: float = 0.0
    ) -> tuple[list[Identification], list[Model | None], list[Certainty]]:
        """The equations of all parameter values, up to the first one without any (None), with their
        certainties. least_noise: as in `Identification`."""
        identifications: list[Identification] = []
        equations: list[Model | None] = []
        certainties: list[Certainty] = []
        for value in range(settings["num_values"]):
            note(f"{samples.name}: the equation of parameter value {value + 1} of {settings['num_values']}")
            identifications.append(Identification(cls, samples, settings, value, least_noise))
            equations.append(identifications[-1].model())
            if equations[-1] is None:
                break
            certainties.append(of_equation(identifications[-1], equations[-1]))
        return identifications, equations, certainties

    @classmethod
    def of(
        cls,
        models: list[Model],
        certainties: list[Certainty],
        identifications: list[Identification],
        samples: Samples,
        settings: dict[str, Any],
        title: str,
    ) -> tuple[str, dict[str, Any], "Equation"]:
        """The candidate (name with the number of terms, settings, base) of the models of all parameter
        values."""
        library, units = identifications[0].library, samples.units
        terms, weight = terms_of(models, library)
        settings = {
            **settings,
            "terms": terms,
            "num_steps": max(model.num_steps for model in models),
            "is_stiff": any(model.is_stiff for model in models),
            "is_coupled": any(model.is_coupled for model in models),
            **({"is_finer": True} if any(model.is_finer for model in models) else {}),
            "found": described(models, certainties, library, terms, units, settings),
        }
        base = cls(**settings)
        low, high = zip(*[one.bounds for one in identifications], strict=True)
        for name, value in (
            ("weight", weight),
            ("mean", units.shift),
            ("std", units.scale),
            ("low", torch.stack(low).amin(0)),
            ("high", torch.stack(high).amax(0)),
        ):
            getattr(base, name).copy_(value)
        return f"{title.format(len(terms))}, {settings['num_steps']} steps a frame", settings, base
