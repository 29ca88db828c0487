"""What a base predictor is, what it is shown and fitted on, the simplest one, and how gradient steps fit
those that are learnt."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ups.common.progress import note
from ups.common.seeds import generator
from ups.data.cache import Cache
from ups.models.bases.units import FieldUnits
from ups.training.optim import fit


@dataclass(frozen=True)
class ParameterBatch:
    """What is known of a batch's parameters, looked up once where they come from, so that no call asks the
    device; its shapes are the task's, whatever the values.

    standard (batch, P): standardised logarithms; index (batch,): the number of the nearest fitted value; raw
    (batch, P): the parameters themselves. forcing (batch, time, K, *space): what is known in advance,
    normalised, from the frame that is shown last to at least the one that is predicted; None for tasks
    without.
    """

    standard: Tensor
    index: Tensor
    raw: Tensor | None = None
    forcing: Tensor | None = None

    def later(self, num_frames: int) -> Self:
        """What is known so many frames later."""
        return self if self.forcing is None else replace(self, forcing=self.forcing[:, num_frames:])


T = TypeVar("T")
# u (batch, history, C, *space), what is known of its rows, u_next (batch, C, *space)
Window = tuple[Tensor, ParameterBatch, Tensor]


class Samples:
    """Windows of the training split of a task from train_from on, drawn by a seed, as normalised fields, as
    its head (a `TaskHead`) sees them; for a steady task coefficient and solution.

    budget: windows that gradient steps may see.
    """

    def __init__(self, head: nn.Module, cache: Cache, seed: int, budget: int = 0):
        self.head, self.cache, self.seed, self.budget = head, cache, seed, budget
        self.name, self.device, self.first = head.name, head.scale.device, cache.settings.train_from
        length = 1 if head.task.is_steady else head.history + 1
        self.num_starts = max(0, cache.num_frames - self.first - length + 1)

    def rows(self, value: int | None) -> Tensor:
        """Training rows of one parameter value; all of them for None or for a task without parameters."""
        rows = self.cache.split["train"]
        is_one = value is not None and len(self.cache.parameter_values) > 0
        return rows[self.cache.parameter_index[rows] == value] if is_one else rows

    def count(self, value: int) -> int:
        """How many different windows there are of a parameter value."""
        return len(self.rows(value)) * self.num_starts

    def batches(self, count: int, size: int, value: int | None = None) -> list[Callable[[], Window]]:
        """Readers of `count` windows, `size` at a time, of one parameter value or of all: all rows in turn,
        with random starts."""
        draw, rows = generator(self.seed, self.name, "bases"), self.rows(value)
        rows = rows[torch.randperm(len(rows), generator=draw)[torch.arange(count) % len(rows)]]
        starts = self.first + torch.randint(0, max(1, self.num_starts), (count,), generator=draw)
        return [partial(self.read, rows[i : i + size], starts[i : i + size]) for i in range(0, count, size)]

    def read(self, rows: Tensor, starts: Tensor) -> Window:
        """The windows that start there."""
        head, cache, device = self.head, self.cache, self.device
        parameters = head.parameters_of(cache, rows, starts + head.history - 1)
        if head.task.is_steady:
            u_next = head.codec.bridged(head.codec.decode(cache.batch(rows, 0, 1, device)[:, 0]))
            u = head.input_codec.bridged(head.input_codec.decode(cache.inputs(rows, device)))
            return u, parameters, u_next
        u = head.codec.bridged(head.codec.decode(cache.batch(rows, starts, head.history + 1, device)))
        return u[:, :-1], parameters, u[:, -1]

    @property
    def units(self) -> FieldUnits:
        return FieldUnits.of(self.head.codec)

    def states(self, rows: Tensor, length: int, draw: torch.Generator) -> Tensor:
        """Stretches (rows, up to `length` frames, C, *space) of rows from random starts, float64: the states
        s of `FieldUnits`, the logarithm of a positive channel."""
        codec, num_frames = self.head.codec, self.cache.num_frames - self.first
        length = min(length, num_frames)
        starts = self.first + torch.randint(0, num_frames - length + 1, (len(rows),), generator=draw)
        w = codec.bridged(codec.decode(self.cache.batch(rows, starts, length, self.device))).double()
        scale, shift = (
            value.to(w.device).view(-1, *[1] * codec.ndim) for value in (self.units.scale, self.units.shift)
        )
        return w * scale + shift

    def at_zero(self) -> Tensor:
        """The normalised values (C,) of u = 0."""
        codec = self.head.codec
        return codec.normalise(
            torch.zeros(codec.num_channels, *[1] * codec.ndim, device=self.device)
        ).flatten(1)[:, 0]


Fit = Generator[tuple[str, dict[str, Any], T], None, str | None]  # of candidates, see `Base.fit`


class Base(nn.Module):
    """A call takes normalised u (batch, history, C, *space) and gives the next frame (batch, C, *space).

    Made from settings: geometry and hyper-parameters, JSON-able; those of other bases are left alone.
    """

    kind: str
    needs_fitted_parameters = False  # whether it serves no other parameter values than those it was fitted on
    is_learnt = False  # whether it has weights that gradient steps train, rather than a closed form
    is_user_solver = False  # whether it calls a function of the user's, which weights do not hold
    lr_factor = 1.0  # of the rate, once it trains beside the network
    is_cellwise = False  # whether it has numbers for every cell
    can_fit_subset = False  # whether it may be fitted to some of the fields alone
    degree = math.inf  # of the next frame as a polynomial of the last ones; inf: it is none

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        """What it found, in words: of an equation a line for every field, per parameter value."""
        return []

    @property
    def complexity(self) -> tuple[float, int]:
        """(degree, numbers fitted to the data): of two bases that are as good, the smaller one is simpler."""
        return self.degree, self.num_fitted

    @property
    def num_fitted(self) -> int:
        return sum(value.numel() for value in self.parameters())

    def alone(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        """A call that no network corrects, where that may differ from one that a network is trained over."""
        return self(u, parameters)

    def unbounded(self) -> "Base":
        """The base without bounds of its own on the state."""
        return self

    def with_more_steps(self) -> "tuple[Base, dict[str, Any]] | None":
        """The base in twice its sub-steps and the settings that differ; None if it has none or enough."""
        return None

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> "Fit[Self]":
        """Yield (name, its settings, the fitted base) for every candidate worth trying, and return why others
        are missing (None if none are); here the one that there is nothing to fit of."""
        yield cls.kind, settings, cls(**settings)


class Persistence(Base):
    """The last frame again: what every forecast is compared with."""

    kind, degree = "persistence", 1

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return u[:, -1]


class Mean(Base):
    """What training solutions of a steady task are on the average, everywhere: its network learns all
    else."""

    kind, degree = "mean", 0

    def __init__(self, num_channels: int, **_: Any):
        super().__init__()
        self.num_channels = num_channels

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return u.new_zeros(u.shape[0], self.num_channels, *u.shape[3:])


class Learnt(Base):
    """LEARNING_RATE of Adam; BATCH windows a step, so that every base may see as many."""

    is_learnt = True
    lr_factor = 0.2  # how fast it moves while the network learns what it leaves; at 1 it wanders
    LEARNING_RATE: float
    BATCH: int

    def prepare(self, samples: Samples, first: Window) -> None:
        """What is set before the first step."""

    def unit(self, u: Tensor, u_next: Tensor) -> Tensor:
        """What an error is relative to: the change."""
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

    def descend(self, draw: Callable[[int], Window], num_steps: int, name: str = "") -> int | None:
        """Adam on relative errors of one call, with linear warm-up and decay; None, or the step at which it
        stopped as a gradient is not finite.

        Validation judges what that leaves.
        """

        def loss_of(step: int) -> Tensor:
            note(f"{name}: {self.kind}, step {step + 1} of {num_steps}")
            u, parameters, u_next = draw(step)
            axes = tuple(range(1, u_next.ndim))
            error = (self(u, parameters) - u_next).square().mean(axes)
            return (error / self.unit(u, u_next).square().mean(axes).clamp_min(1e-8)).add(1e-12).sqrt().mean()

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / num_steps))

        optimizer = torch.optim.Adam([{"params": list(self.parameters()), "base_lr": self.LEARNING_RATE}])
        return fit(self, loss_of, range(num_steps), optimizer, rate, clip_norm=1.0)
