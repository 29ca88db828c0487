"""The interface of base predictors, their training windows, the simplest bases, and the fit by
Levenberg-Marquardt steps.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import register_dataclass

from ups.common.progress import beat, note
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.data.cache import Cache
    from ups.data.tokenizer import Tokenizer
    from ups_discovery.units import FieldUnits


@dataclass(frozen=True)
class ParameterBatch:
    """The parameters and the forcing of a batch. Made once on the host (`TaskHead.parameter_batch`), so that
    no call waits for the device; the shapes do not depend on the values.

    standard (batch, P): standardised logarithms; index (batch,): number of the nearest fitted value; raw
    (batch, P): the parameters themselves. forcing (batch, time, K, *space): normalised, from the last input
    frame to at least the predicted one; None for tasks without forcing. hidden (batch, numbers): what a base
    has read of the trajectories (`Base.settled`).
    """

    standard: Tensor
    index: Tensor
    raw: Tensor | None = None
    forcing: Tensor | None = None
    hidden: Tensor | None = None

    def later(self, num_frames: int, length: int | None = None) -> Self:
        """The batch `num_frames` later, with its forcing shifted: `length` frames of it, or all that are
        left."""
        if self.forcing is None:
            return self
        return replace(self, forcing=self.forcing[:, num_frames:][:, :length])

    def rows(self, some: slice) -> Self:
        """The batch of some rows."""
        every = (self.standard, self.index, self.raw, self.forcing, self.hidden)
        return ParameterBatch(*(None if values is None else values[some] for values in every))


register_dataclass(ParameterBatch)
MIN_FILM = 64  # frames of a long film that are read at least
# of fits by steps (`Learnt`)
MIN_GAIN, PATIENCE = 0.05, 3  # of the error, in a step: with less in three steps the fit ends
SMALL_GAIN = 0.1  # of the error: with less, it is compared with that of other windows
# times the error may be that of so many times as many other windows: above it, some of these are fitted, too.
# With as many others and 1.25, one of three fits to a law that is not elliptic had thrice the others' errors
MOST_OVER, NUM_OTHERS = 1.1, 4
MAX_TRIALS, DAMPING = 10, 8.0  # of the damping in a step, and its factor
OVER_BUDGET = "its fit would take too much of the time of the training"
T = TypeVar("T")
# u (batch, history, C, *space), the parameters of its rows, u_next (batch, C, *space)
Window = tuple[Tensor, ParameterBatch, Tensor]


class OverBudgetError(Exception):
    """A fit would take more work than it may."""


class Samples:
    """Random windows of a task's training split, from frame train_from on, as normalised fields of its head
    (a `TaskHead`); for a steady task coefficient and solution.

    budget: number of windows in the steps of a fit.
    """

    work, most_work = 0.0, math.inf  # of costly fits so far, and with the present one

    def __init__(self, head: nn.Module, cache: "Cache", seed: int, budget: int = 0):
        self.head, self.cache, self.seed, self.budget = head, cache, seed, budget
        self.name, self.device, self.first = head.name, head.scale.device, cache.settings.train_from
        length = 1 if head.task.is_steady else head.history + 1
        self.num_starts = max(0, self.num_frames - length + 1)

    def spend(self, work: float) -> None:
        """Count the work of a costly fit, in nominal seconds: of one core, by the shapes of what is computed,
        as no decision may depend on a clock. Raises OverBudgetError if it would be too much."""
        if self.work + work > self.most_work:
            raise OverBudgetError
        self.work += work

    def rows(self, value: int | None) -> Tensor:
        """Training rows of one parameter value; all rows for None or for a task without parameters."""
        rows = self.cache.split["train"]
        is_one = value is not None and len(self.cache.parameter_values) > 0
        return rows[self.cache.parameter_index[rows] == value] if is_one else rows

    def count(self, value: int) -> int:
        """The number of different windows of a parameter value."""
        return len(self.rows(value)) * self.num_starts

    def batches(self, count: int, size: int, value: int | None = None) -> list[Callable[[], Window]]:
        """Functions that read `count` windows, `size` at a time, of one parameter value or of all: all rows
        in turn, with random starts.
        """
        rng, rows = generator(self.seed, self.name, "bases"), self.rows(value)
        rows = rows[torch.randperm(len(rows), generator=rng)[torch.arange(count) % len(rows)]]
        starts = self.first + torch.randint(0, max(1, self.num_starts), (count,), generator=rng)
        return [partial(self.read, rows[i : i + size], starts[i : i + size]) for i in range(0, count, size)]

    def read(self, rows: Tensor, starts: Tensor) -> Window:
        """The windows of these rows that start at these frames."""
        head, cache, device = self.head, self.cache, self.device
        parameters = head.parameters_of(cache, rows, starts + head.history - 1)
        if head.task.is_steady:
            u_next = head.codec.bridged(head.codec.decode(cache.batch(rows, 0, 1, device)[:, 0]))
            u = head.input_codec.bridged(head.input_codec.decode(cache.inputs(rows, device)))
            return u, parameters, u_next
        u = head.codec.bridged(head.codec.decode(cache.batch(rows, starts, head.history + 1, device)))
        return u[:, :-1], parameters, u[:, -1]

    @property
    def num_frames(self) -> int:
        """The frames of a trajectory that may be used for training."""
        return self.cache.num_frames - self.first

    @property
    def is_cut(self) -> bool:
        """Whether trajectories are windows of longer runs."""
        return self.cache.windows is not None

    @property
    def units(self) -> "FieldUnits":
        return field_units(self.head.codec)

    def states(self, rows: Tensor, length: int, rng: torch.Generator) -> Tensor:
        """States (rows, up to `length` frames, C, *space), float64, of rows from random starts: s of
        `FieldUnits`, the logarithm for a positive channel.
        """
        codec, length = self.head.codec, min(length, self.num_frames)
        starts = self.first + torch.randint(0, self.num_frames - length + 1, (len(rows),), generator=rng)
        w = codec.bridged(codec.decode(self.cache.batch(rows, starts, length, self.device))).double()
        scale, shift = (
            value.to(w.device).view(-1, *[1] * codec.ndim) for value in (self.units.scale, self.units.shift)
        )
        return w * scale + shift

    def films(self, rows: Tensor, max_values: int) -> Tensor:
        """`states` of all frames of some rows (films, time, C, *space), about `max_values` per channel.

        Windows of a run are joined; of a long run the first frames count. Runs of less than half the longest
        are left out, and longer ones are cut to the shortest.
        """
        from ups.common.rows import joined

        places, num_frames, rng = self.cache.windows, self.cache.num_frames, generator(self.seed, "films")
        groups = list(rows.split(1))
        if places is not None and self.first == 0:
            groups = [rows[group] for group in joined(places[rows.numpy()], num_frames)]
        longest = max(MIN_FILM, max_values // math.prod(self.head.codec.space))
        groups = [group[: -(-longest // num_frames)] for group in groups]
        found, size = [], 0
        for group in sorted(groups, key=len, reverse=True):
            if found and size * (len(found) + 1) > max_values * len(found):
                break
            found.append(self.states(group, num_frames, rng).flatten(0, 1))
            size += found[-1][:, 0].numel()
        found = [film for film in found if 2 * len(film) >= len(found[0])]
        shortest = min(longest, *map(len, found))
        return torch.stack([film[:shortest] for film in found])

    def at_zero(self) -> Tensor:
        """The normalised values (C,) of u = 0."""
        codec = self.head.codec
        return codec.normalise(
            torch.zeros(codec.num_channels, *[1] * codec.ndim, device=self.device)
        ).flatten(1)[:, 0]


def field_units(codec: "Tokenizer") -> "FieldUnits":
    """The units of the states of a codec's fields."""
    from ups_discovery.units import FieldUnits

    positive = [channel for channel, name in enumerate(codec.fields) if name in codec.positive]
    return FieldUnits.of(codec.mean, codec.std, positive)


Fit = Generator[tuple[str, dict[str, Any], T], None, str | None]  # see `Base.fit`


class Base(nn.Module):
    """A base predictor: a call maps normalised u (batch, history, C, *space) to the next frame (batch, C,
    *space).

    Built from settings (`head_setup.base_settings`): geometry and hyper-parameters, JSON-able. A base ignores
    the settings of others.
    """

    kind: str
    needs_fitted_parameters = False  # whether it serves only parameter values that it was fitted on
    is_user_solver = False  # whether it calls a function of the user, which is not stored with the weights
    is_costly = False  # whether its fit may take longer than those of all others
    num_images = 2  # of a start, for its twin: a shift by whole patches shows nothing
    has_tangent = False  # whether it integrates an equation, and torch differentiates it both ways
    extrapolates = False  # whether its twin shows errors at parameters outside of the trained ones (log.md)
    degree = math.inf  # of the polynomial of the last frames that it computes; inf: not a polynomial

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        """What the fit found, in words; of an equation a line for every field and parameter value."""
        return []

    @property
    def complexity(self) -> tuple[float, int]:
        """(degree, number of fitted coefficients); smaller is simpler."""
        return self.degree, self.num_fitted

    @property
    def num_fitted(self) -> int:
        return sum(value.numel() for value in self.parameters())

    def settled(self, u: Tensor, parameters: ParameterBatch) -> ParameterBatch:
        """The parameters with what the base reads from frames u (batch, time, C, *space) and what does not
        change in the frames after them; a rollout calls it once."""
        return parameters

    def unbounded(self) -> "Base":
        """The base without its bounds on the state."""
        return self

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> "Fit[Self]":
        """Yield (name, settings, fitted base) for every candidate, and return why others are missing, or
        None. By default the single base, which needs no fit.
        """
        yield cls.kind, settings, cls(**settings)

    def twin(self, samples: Samples, settings: dict[str, Any]) -> "tuple[dict[str, Any], Base] | None":
        """(settings, base) of the same form as this base, of `settings`, that other samples allow as well:
        where forecasts by the two differ, one is wrong. None if nothing is fitted."""
        return None

    def refined(self, settings: dict[str, Any]) -> "Base | None":
        """The base of these settings with the same weights and more steps, an integration in float64 and with
        derivatives that are more exact. None without steps of its own, or if `twin` has them already."""
        return None


class Persistence(Base):
    """The last frame again; every forecast is compared with it."""

    kind, degree = "persistence", 1

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return u[:, -1]


class Mean(Base):
    """The average of the training solutions of a steady task (0 in normalised units); the network learns the
    rest.
    """

    kind, degree = "mean", 0

    def __init__(self, num_channels: int, **_: Any):
        super().__init__()
        self.num_channels = num_channels

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return u.new_zeros(u.shape[0], self.num_channels, *u.shape[3:])


class Learnt(Base):
    """A base whose parameters minimise the mean relative error of one call, by Levenberg-Marquardt steps
    (Marquardt 1963, doi 10.1137/0111030) with reweighted windows.

    It is fitted to one block of BATCH windows, and to twice as many as long as others have larger errors. In
    a tenth of the time its errors are a half to a hundredth of those of Adam (docs/lab/log.md).
    """

    BATCH: int

    def prepare(self, samples: Samples, first: Window) -> None:
        """Set parameters from the data before the first step."""

    def unit(self, u: Tensor, u_next: Tensor) -> Tensor:
        """The unit of errors: the change in a frame."""
        return u_next - u[:, -1]

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit[Self]:
        """Yield the base after as many steps as the budget allows, if they help; a step on several blocks
        counts several times.
        """
        torch.manual_seed(samples.seed)
        base, blocks = cls(**settings).to(samples.device), samples.batches(samples.budget, cls.BATCH)
        base.prepare(samples, blocks[0]())
        error = base.descend(blocks, samples.name)
        yield cls.kind, settings, base
        return None if math.isfinite(error) else "its error is not finite on training windows"

    def twin(self, samples: Samples, settings: dict[str, Any]) -> tuple[dict[str, Any], Self]:
        return tuple(next(self.fit(samples, settings))[1:])

    def descend(self, blocks: Sequence[Callable[[], Window]], name: str = "") -> float:
        """Fit the parameters to blocks of windows; returns the error. len(blocks): the largest number of
        steps on one block."""
        shown, damping, spent, idle = [blocks[0]()], 1.0, 0, 0
        error = self.error(shown)
        while spent < len(blocks) and idle < PATIENCE:
            note(f"{name}: {self.kind}, step {spent + 1} of at most {len(blocks)}")
            before, spent = error, spent + len(shown)
            error, damping = self.step(shown, error, damping)
            idle = 0 if error <= (1 - MIN_GAIN) * before else idle + 1
            if error <= (1 - SMALL_GAIN) * before:
                continue
            count = len(shown)
            others = [read() for read in blocks[count : (1 + NUM_OTHERS) * count]]
            if others and self.error(others) > MOST_OVER * error:
                shown, idle = shown + others[:count], 0
                error = self.error(shown)
        return error

    def step(self, windows: Sequence[Window], error: float, damping: float) -> tuple[float, float]:
        """Move the parameters so that the error falls; returns it, and the damping of the next step. Without
        such a move they stay."""
        a = sum(self.normal_equations(window) for window in windows)
        values, size = parameters_to_vector(self.parameters()).detach(), a.diagonal()[:-1]
        scale = torch.diag((size + size.mean()).clamp_min(1e-30))
        for _ in range(MAX_TRIALS):
            moved = torch.linalg.solve(a[:-1, :-1] + damping * scale, a[:-1, -1])
            vector_to_parameters(values + moved.to(values), self.parameters())
            if (now := self.error(windows)) < error:
                return now, max(damping / DAMPING, 1e-12)
            damping *= DAMPING
        vector_to_parameters(values, self.parameters())
        return error, damping

    @torch.no_grad()
    def error(self, windows: Sequence[Window]) -> float:
        """The mean relative error of one call."""
        return float(torch.cat([self._errors(self(*window[:2]), window)[0] for window in windows]).mean())

    def _errors(self, predicted: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """The relative error of every row of a window, and the unit."""
        beat()
        u, _, u_next = window
        unit, error = (x.square().flatten(1).mean(1) for x in (self.unit(u, u_next), predicted - u_next))
        unit = unit.clamp_min(1e-8)
        return (error / unit).add(1e-12).sqrt(), unit.sqrt()

    def normal_equations(self, window: Window) -> Tensor:
        """Normal equations (parameters + 1, parameters + 1), float64, of the sum of relative errors."""
        predicted, x = self.tangents(window)
        error, unit = self._errors(predicted, window)
        x = (x.double() / (unit * error.sqrt()).view(-1, 1, 1)).flatten(0, 1)
        return x.T @ x

    def tangents(self, window: Window) -> tuple[Tensor, Tensor]:
        """The prediction, and its derivative by every parameter and last what it lacks (rows, numbers,
        parameters + 1)."""
        u, parameters, u_next = window
        values = parameters_to_vector(self.parameters()).detach()

        def predict(values: Tensor) -> Tensor:
            parts, named = iter(values.split([one.numel() for one in self.parameters()])), {}
            for name, one in self.named_parameters():
                named[name] = next(parts).view_as(one)
            return functional_call(self, named, (u, parameters))

        columns = [jvp(predict, (values,), (one,))[1] for one in torch.eye(len(values)).to(values)]
        predicted = predict(values)
        return predicted, torch.stack([*columns, u_next - predicted], -1).flatten(1, -2)
