"""The equation itself: a right-hand side whose terms are found in the data, integrated between frames."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.boundary import PERIODIC, along
from ups.models.bases.base import Base, Fit, Known, Samples
from ups.models.bases.certainty import Certainty, of_drift, of_equation
from ups.models.bases.drift import Drift
from ups.models.bases.identify import MOST_STEPS, Identification, Model, terms_of
from ups.models.bases.statement import described, stated
from ups.models.bases.terms import WAVE, Term, Terms
from ups.progress import note
from ups.spectral import FieldTransform

NOISY = 0.7   # of persistence's error one frame ahead, above which a frame is taken for noise
MIN_FRAMES = 3   # of central differences in time


class Equation(Base):
    """s_t = sum over terms of weight * term(s), by `num_steps` Runge-Kutta steps of fourth order a frame.

    s is the field, the logarithm of a positive channel: what the codec normalises, before mean and std. The
    terms (ups/models/bases/terms.py) and their weights are found in the data
    (ups/models/bases/identify.py). In logarithms the equations of a gas are of second order in (velocity,
    pressure / density, derivatives) and nothing loses its positivity; that is a lifting (Qian, Kramer,
    Peherstorfer and Willcox 2020, arXiv 1912.08177) that needs no map back. Where is_stiff, even derivatives
    of the own channel act by their exponential in the boundary's modes (Lawson 1967).

    weight: (values, C, terms), one equation per parameter value. low, high (C,): no state leaves them, so
    that what would blow up is bounded, wrong and not chosen.
    """

    kind, knows_fitted_only, fits_some = "equation", True, True

    def __init__(self, num_values: int, num_channels: int, space: Sequence[int], boundary: str,
                 lengths: Sequence[float] = (), dt: float = 1.0, positive: Sequence[int] = (),
                 terms: Sequence[Term] = (), num_steps: int = 1, is_stiff: bool = False,
                 cell: Sequence[float] = (), is_finer: bool = False, found: dict[str, Any] | None = None,
                 **_: Any):
        super().__init__()
        self.found = found or {}
        terms = [(tuple(powers), tuple((c, tuple(axes)) for c, axes in factors)) for powers, factors in terms]
        if num_steps not in range(1, 2 * MOST_STEPS + 1):
            raise ValueError(f"an equation takes {num_steps} steps a frame; expected 1 to {2 * MOST_STEPS}. "
                             f"Train it again.")
        self.num_steps, self.step, self.is_stiff = num_steps, dt / num_steps, is_stiff
        lengths = lengths or [1.0] * len(space)
        self.terms = Terms(terms, positive, space, lengths, boundary, cell, is_finer)
        self.register_buffer("weight", torch.zeros(num_values, num_channels, len(terms)))
        for name, value in (("mean", 0.0), ("std", 1.0), ("low", -torch.inf), ("high", torch.inf)):
            self.register_buffer(name, torch.full((num_channels,), value))
        self.transform, ends = FieldTransform(tuple(space), boundary), along(boundary, len(space))
        stiff, symbols = torch.zeros(num_channels, len(terms)), torch.zeros(len(terms), self.transform.modes)
        for place, (powers, factors) in enumerate(terms):
            if is_stiff and not any(powers) and len(factors) == 1:
                channel, axes = factors[0]
                if channel != WAVE and len(set(axes)) == 1 and len(axes) % 2 == 0:
                    stiff[channel, place] = 1
                    symbols[place] = self._symbol(axes[0], len(axes), ends[axes[0]])
        self.register_buffer("stiff", stiff, persistent=False)
        self.register_buffer("symbols", symbols, persistent=False)

    def _symbol(self, axis: int, order: int, end: str) -> Tensor:
        """The eigenvalues of an even derivative in the modes of the transform."""
        matrix = getattr(self.terms, f"difference{axis}{order}")
        if end == PERIODIC:
            values = torch.fft.fft(matrix[:, 0]).real[: self.transform.shape[axis]]   # of a circulant matrix
        else:
            rows = getattr(self.transform, f"matrix{axis}").double()
            values = (rows @ matrix @ rows.mT).diagonal()
        shape = [1] * len(self.transform.shape)
        shape[axis] = -1
        return values.view(shape).expand(self.transform.shape).flatten().float()

    def forward(self, u: Tensor, known: Known) -> Tensor:
        u = u[:, -1].float()
        if not self.terms.terms:
            return u
        mean, std = self._column(self.mean, u), self._column(self.std, u)
        return (self.advance(u * std + mean, self.weight[known.index]) - mean) / std

    def _column(self, values: Tensor, like: Tensor) -> Tensor:
        return values.to(like.dtype).view(-1, *[1] * (like.ndim - 2))

    def advance(self, s: Tensor, weight: Tensor) -> Tensor:
        """The state s (rows, C, *space) a frame later; weight (rows, C, terms)."""
        low, high = self._column(self.low, s), self._column(self.high, s)

        def clamped(s: Tensor) -> Tensor:
            return torch.minimum(torch.maximum(s, low), high)

        rates = self.terms.grouped(weight * (1 - self.stiff.to(s.dtype)) if self.is_stiff else weight)

        def slope(s: Tensor) -> Tensor:
            return self.terms.weighted(clamped(s), rates)

        step = self.step
        if not self.is_stiff:
            for _ in range(self.num_steps):
                a = slope(s)
                b = slope(s + step / 2 * a)
                c = slope(s + step / 2 * b)
                d = slope(s + step * c)
                s = clamped(s + step / 6 * (a + 2 * b + 2 * c + d))
            return s
        half = torch.exp(step / 2 * ((weight * self.stiff.to(s.dtype)) @ self.symbols.to(s.dtype)))
        full = half.square()

        def modal(s_hat: Tensor) -> Tensor:
            return self.transform.forward(slope(self.transform.inverse(s_hat)))

        s_hat = self.transform.forward(s)
        for _ in range(self.num_steps):
            a = modal(s_hat)
            b = modal(half * (s_hat + step / 2 * a))
            c = modal(half * s_hat + step / 2 * b)
            d = modal(full * s_hat + step * half * c)
            s_hat = full * s_hat + step / 6 * (full * a + 2 * half * (b + c) + d)
        return clamped(self.transform.inverse(s_hat))

    def says(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        return stated(self.found, self.terms.terms, fields, self.terms.positive, axes)

    @property
    def degree(self) -> int:
        """Of the right-hand side; a power of a positive channel counts by its size."""
        return max((sum(map(abs, powers)) + sum(channel != WAVE for channel, _ in factors)
                    for powers, factors in self.terms.terms), default=1)

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
        """Two candidates at most: the equation, and its drift where a frame is mostly noise to that. None
        where, for some parameter value, neither is better than persistence on training trajectories that it
        was not fitted on."""
        frames = samples.cache.num_frames - samples.first
        if frames < MIN_FRAMES:
            print(f"{samples.name}: equation needs {MIN_FRAMES} frames to estimate time derivatives, the "
                  f"data have {frames}: left out")
            return None
        found: list[Identification] = []
        quiet: list[Model | None] = []
        sure: list[Certainty] = []
        for value in range(settings["num_values"]):
            note(f"{samples.name}: the equation of parameter value {value + 1} of {settings['num_values']}")
            found.append(Identification(cls, samples, settings, value))
            quiet.append(found[-1].model())
            if quiet[-1] is None:
                break
            sure.append(of_equation(found[-1], quiet[-1]))
        if None not in quiet:
            yield cls.of(quiet, sure, found, samples, settings, "equation of {} terms")
        if any(model is None or one.error(model, one.held[:, :2]) > NOISY
               for one, model in zip(found, quiet, strict=True)):
            noisy, sure = [], []
            for value in range(settings["num_values"]):
                note(f"{samples.name}: the drift of parameter value {value + 1} of {settings['num_values']}")
                if value == len(found):
                    found.append(Identification(cls, samples, settings, value))
                drift = Drift(found[value], samples, value)
                noisy.append(drift.model())
                if noisy[-1] is None:
                    return f"no {'drift' if None not in quiet else 'terms'} of parameter value {value + 1} " \
                           f"of {settings['num_values']} beat persistence on training data held out"
                sure.append(of_drift(drift, noisy[-1]))
            yield cls.of(noisy, sure, found, samples, settings, "drift of {} terms")
            if None in quiet:
                return f"no equation of parameter value {len(quiet)} of {settings['num_values']} beats " \
                       f"persistence on training data held out; its drift does"
        return None

    @classmethod
    def of(cls, models: list[Model], sure: list[Certainty], found: list[Identification], samples: Samples,
           settings: dict[str, Any], words: str) -> tuple[str, dict[str, Any], "Equation"]:
        """(words with the number of terms, settings, base) of what was found for every parameter value."""
        library, units = found[0].library, samples.units
        terms, weight = terms_of(models, library)
        own = {**settings, "terms": terms, "num_steps": max(model.num_steps for model in models),
               "is_stiff": any(model.is_stiff for model in models),
               "found": described(models, sure, library, terms, units, settings)}
        base = cls(**own)
        low, high = zip(*[one.bounds for one in found], strict=True)
        for name, value in (("weight", weight), ("mean", units.shift), ("std", units.scale),
                            ("low", torch.stack(low).amin(0)), ("high", torch.stack(high).amax(0))):
            getattr(base, name).copy_(value)
        return words.format(len(terms)), own, base
