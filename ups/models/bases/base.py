"""The interface of base predictors, their training windows, the simplest bases, and the fit by gradient
steps.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ups.common.progress import note
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
    frame to at least the predicted one; None for tasks without forcing.
    """

    standard: Tensor
    index: Tensor
    raw: Tensor | None = None
    forcing: Tensor | None = None

    def later(self, num_frames: int) -> Self:
        """The batch `num_frames` later, with its forcing shifted."""
        return self if self.forcing is None else replace(self, forcing=self.forcing[:, num_frames:])

    def rows(self, some: slice) -> Self:
        """The batch of some rows."""
        every = (self.standard, self.index, self.raw, self.forcing)
        return ParameterBatch(*(None if values is None else values[some] for values in every))


MIN_FILM = 64  # frames of a long film that are read at least
T = TypeVar("T")
# u (batch, history, C, *space), the parameters of its rows, u_next (batch, C, *space)
Window = tuple[Tensor, ParameterBatch, Tensor]


class Samples:
    """Random windows of a task's training split, from frame train_from on, as normalised fields of its head
    (a `TaskHead`); for a steady task coefficient and solution.

    budget: number of windows for gradient steps.
    """

    def __init__(self, head: nn.Module, cache: "Cache", seed: int, budget: int = 0):
        self.head, self.cache, self.seed, self.budget = head, cache, seed, budget
        self.name, self.device, self.first = head.name, head.scale.device, cache.settings.train_from
        length = 1 if head.task.is_steady else head.history + 1
        self.num_starts = max(0, self.num_frames - length + 1)

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
    is_cellwise = False  # whether it has coefficients for every cell
    has_tangent = False  # whether it integrates an equation, and torch differentiates it both ways
    degree = math.inf  # of the polynomial of the last frames that it computes; inf: not a polynomial

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        """What the fit found, in words; of an equation a line for every field and parameter value."""
        return []

    @property
    def is_learnt(self) -> bool:
        """Whether gradient steps train it, also with the network, rather than a closed-form fit."""
        return any(True for _ in self.parameters())

    @property
    def complexity(self) -> tuple[float, int]:
        """(degree, number of fitted coefficients); smaller is simpler."""
        return self.degree, self.num_fitted

    @property
    def num_fitted(self) -> int:
        return sum(value.numel() for value in self.parameters())

    def alone(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        """The prediction if no network corrects it; `linear` has a second map for this."""
        return self(u, parameters)

    def unbounded(self) -> "Base":
        """The base without its bounds on the state."""
        return self

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> "Fit[Self]":
        """Yield (name, settings, fitted base) for every candidate, and return why others are missing, or
        None. By default the single base, which needs no fit.
        """
        yield cls.kind, settings, cls(**settings)


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
    """A base that is fitted by gradient steps: LEARNING_RATE of Adam, BATCH windows per step."""

    lr_factor = 0.2  # of the learning rate while the network learns its residual; with 1 it moves too far
    LEARNING_RATE: float
    BATCH: int

    def prepare(self, samples: Samples, first: Window) -> None:
        """Set parameters from the data before the first step."""

    def unit(self, u: Tensor, u_next: Tensor) -> Tensor:
        """The unit of errors: the change in a frame."""
        return u_next - u[:, -1]

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> "Fit[Self]":
        torch.manual_seed(samples.seed)
        base, num_steps = cls(**settings).to(samples.device), samples.budget // cls.BATCH
        batches = samples.batches(num_steps * cls.BATCH, cls.BATCH)
        base.prepare(samples, batches[0]())
        stopped = base.descend(lambda step: batches[step](), num_steps, samples.name)
        yield cls.kind, settings, base
        return (
            None
            if stopped is None
            else (f"its fit stopped at step {stopped + 1} of {num_steps}, where a gradient is not finite")
        )

    def descend(self, window: Callable[[int], Window], num_steps: int, name: str = "") -> int | None:
        """Adam on the relative error of one call, with linear warm-up and decay. None, or the step at which
        it stopped because a gradient was not finite; validation decides whether the base is of use then.
        """

        def loss_of(step: int) -> Tensor:
            note(f"{name}: {self.kind}, step {step + 1} of {num_steps}")
            u, parameters, u_next = window(step)
            axes = tuple(range(1, u_next.ndim))
            error = (self(u, parameters) - u_next).square().mean(axes)
            return (error / self.unit(u, u_next).square().mean(axes).clamp_min(1e-8)).add(1e-12).sqrt().mean()

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / num_steps))

        from ups.training.optim import fit  # a fitted base needs no optimizer

        optimizer = torch.optim.Adam([{"params": list(self.parameters()), "base_lr": self.LEARNING_RATE}])
        return fit(self, loss_of, range(num_steps), optimizer, rate, clip_norm=1.0)
