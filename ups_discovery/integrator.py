"""Integrate a candidate equation from windows of the data: rollouts, errors, and the steps per frame."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ups_discovery.boundary import along
from ups_discovery.equation import Equation, max_steps
from ups_discovery.library import library
from ups_discovery.progress import beat, evaluation
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform
from ups_discovery.terms import Terms, diagonal
from ups_discovery.windows import FilmWindows, number_of

MAX_BYTES = 2**26  # of the terms evaluated at once
STABLE = 2.7  # step times rate; RK4 is stable to 2.78 (real axis) and 2.83 (imaginary axis)
# FilmWindows on which the steps per frame are tested: cells in all, and the largest number.
STEP_TEST_CELLS, MOST_STEP_TESTS = 2**13, 32
MEDIAN_STEP_ERROR, MAX_STEP_ERROR = 3e-4, 0.05  # of the change of a frame, that halving the step may alter
GROWTH_NOISE = 1e-6  # of the change of a frame, added to test whether short waves grow
MAX_GROWTH = 1.2  # of the largest mode of that noise, relative to half the step or to its start


@dataclass(frozen=True)
class Model:
    """An equation: its unknown coefficients as (channel, index of the term in the library), their values, and
    the integrator's settings as in `Equation`."""

    unknowns: list[tuple[int, int]]
    values: Tensor
    num_steps: int = 1
    is_stiff: bool = False
    is_coupled: bool = False
    is_finer: bool = False


class Integrator:
    """Rollouts of models from windows of one parameter value, by the terms of its library.

    settings: see `search.candidates`. library: the candidate terms; terms: their values on the grid."""

    def __init__(self, settings: dict[str, Any], windows: FilmWindows):
        self.settings, self.windows = {**settings, "num_values": 1}, windows
        self.space, self.boundary = settings["space"], settings["boundary"]
        self.max_steps = max_steps(self.space)
        self.library = library(
            settings["num_channels"],
            settings["positive"],
            len(self.space),
            settings.get("vorticity", ()),
            settings.get("driven", ()),
        )
        of_grid = (settings[key] for key in ("positive", "space", "lengths", "boundary", "cell"))
        self.terms = Terms(self.library, *of_grid).to(windows.regression.device)

    @cached_property
    def persistence_error(self) -> float:
        """The error of the first frame of every held-out window."""
        s = self.windows.held_out
        unmoved = (s[:, :1] - s[:, 1:]) / self.change_size(s)
        return float(unmoved.square().flatten(1).mean(1).sqrt().mean())

    # ----------------------------------------------------------------------------------- the integrator

    def build(self, model: Model) -> tuple[Equation, Tensor]:
        """An integrator of the model's terms, and the places of the unknowns among its weights."""
        used = sorted({term for _, term in model.unknowns})
        steps = {name: getattr(model, name) for name in ("num_steps", "is_stiff", "is_coupled", "is_finer")}
        equation = Equation(**self.settings | steps | {"terms": [self.library[term] for term in used]})
        equation = equation.to(self.windows.regression.device)
        equation.low, equation.high = self.windows.bounds
        places = [channel * len(used) + used.index(term) for channel, term in model.unknowns]
        return equation, torch.tensor(places, device=self.windows.regression.device)

    @torch.no_grad()
    def integrate(self, built: tuple[Equation, Tensor], values: Tensor, s: Tensor, frames: int) -> Tensor:
        """The frames (rows, frames, C, *space) after s (rows, C, *space).

        built: of `build`. values: (unknowns,), or (sets, unknowns), where each set is for equally many
        consecutive rows."""
        equation, places = built
        num_weights, weight_shape = equation.weight[0].numel(), equation.weight.shape[1:]
        weight = values.new_zeros(*values.shape[:-1], num_weights).index_copy(-1, places, values)
        weight, found = weight.view(-1, *weight_shape), []
        work = 4 * equation.num_steps * evaluation(s.numel(), len(equation.terms.terms))
        for _ in range(frames):
            beat(work=work)
            s = equation.advance(s, weight)
            found.append(s)
        return torch.stack(found, 1)

    def tangents(self, model: Model, s: Tensor) -> tuple[Tensor, Tensor]:
        """The rollout from s (rows, 1 + frames, C, *space), and its derivative by every value (unknowns,
        rows, frames, C, *space): differences in float64 of 1e-5 of the change of a frame."""
        built, frames = self.build(model), s.shape[1] - 1
        equation, places = built
        predicted = self.integrate(built, model.values, s[:, 0], frames)
        size = equation.terms(s[:, 0]).square().mean((0, 2)).sqrt().clamp_min(1e-12)
        change = (s[:, 1] - s[:, 0]).flatten(2).square().mean((0, 2)).sqrt().clamp_min(1e-12)
        steps = (1e-5 * change[:, None] / (self.settings["dt"] * size)).flatten()[places]
        bytes_each = 8 * s[:, 0, 0].numel() * len(equation.terms.terms)
        columns = []
        for step in torch.diag(steps).split(max(1, MAX_BYTES // bytes_each)):
            starts = s[:, 0].repeat(len(step), *[1] * (s.ndim - 2))
            moved = self.integrate(built, model.values + step, starts, frames)
            difference = moved.unflatten(0, (len(step), -1)) - predicted
            columns.append(difference / step.sum(1).view(-1, *[1] * predicted.ndim))
        return predicted, torch.cat(columns)

    def normal_equations(
        self, model: Model, states: Tensor, weighted: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Normal equations (rows, unknowns + 1, unknowns + 1) of the integrator's error by its values, of
        every row of states (rows, 1 + frames, C, *space).

        weighted(s, x): some of the rows, and their tangents and last the error, (unknowns + 1, rows, frames,
        C, *space), to x with a weight for every number."""
        found = []
        for s in states.split(self.windows.at_once):
            predicted, columns = self.tangents(model, s)
            x = weighted(s, torch.cat([columns, (s[:, 1:] - predicted)[None]]))
            x = x.flatten(2).transpose(0, 1)
            found.append(x @ x.mT)
        return torch.cat(found)

    def change_size(self, s: Tensor) -> Tensor:
        """RMS change since the first frame of every row and later frame of s (rows, 1 + frames, ...): the
        unit of errors."""
        axes = tuple(range(2, s.ndim))
        change = ((s[:, 1:] - s[:, :1]) / self.windows.std).square().mean(axes, True).sqrt()
        return change.clamp_min(1e-6) * self.windows.std

    def error(self, model: Model, s: Tensor, is_bounded: bool = False) -> float:
        """Mean over rows of the error e of a rollout, relative to the change; of e / (1 + e) if bounded."""
        predicted = self.integrate(self.build(model), model.values, s[:, 0], s.shape[1] - 1)
        e = ((predicted - s[:, 1:]) / self.change_size(s)).square().flatten(1).mean(1).sqrt()
        return float((e / (1 + e) if is_bounded else e).mean())

    def with_converged_steps(self, model: Model) -> Model | None:
        """The model with enough steps per frame, and the exponential integrator if that halves their number;
        None if no allowed number of steps is enough."""
        best, limit = None, self.max_steps
        for candidate in self.integrators(model):
            if num := self.num_converged_steps(candidate, limit):
                best, limit = replace(candidate, num_steps=num), min(self.max_steps, 2 * num - 1)
        return best

    def integrators(self, model: Model) -> list[Model]:
        """The model with each integrator that makes a difference for it, the explicit one last."""
        ends = along(self.boundary, len(self.space))
        linear = [
            (channel, diagonal(self.library[term], self.settings["positive"], ends))
            for channel, term in model.unknowns
        ]
        is_own_channel = {channel == one[0] for channel, one in linear if one and one[1]}
        kinds = [(True, not is_own) for is_own in (False, True) if is_own in is_own_channel]
        return [replace(model, is_stiff=one, is_coupled=two) for one, two in [*kinds, (False, False)]]

    def num_converged_steps(self, model: Model, limit: int) -> int:
        """1.5 times the fewest steps per frame for which twice the number changes nothing, at most `limit`; 0
        if there is no such number. Nor may a wave grow from noise that does not grow with twice the steps."""
        count = number_of(STEP_TEST_CELLS, MOST_STEP_TESTS, self.space)
        s, num = self.windows.regression[:count, :2], 1
        if not model.is_stiff:
            steps = self.fastest_rate(model) / STABLE
            num = 2 ** max(0, math.ceil(math.log2(max(1e-9, steps))))
        transform = FieldTransform(tuple(self.space), self.boundary).to(s.device)
        noise = torch.randn(s[:, 0].shape, generator=generator(0, "steps"), dtype=s.dtype).to(s.device)
        size = self.change_size(s)
        start = torch.cat([s[:, 0], s[:, 0] + GROWTH_NOISE * size[:, 0] * noise])
        initial_mode = transform(noise).abs().max()

        def next_frame(num: int) -> tuple[Tensor, Tensor]:
            """The next frame, and the largest mode of the noise in it."""
            built = self.build(replace(model, num_steps=num))
            plain, noisy = self.integrate(built, model.values, start, 1).chunk(2)
            return plain, transform((noisy - plain) / (GROWTH_NOISE * size)).abs().max()

        before = next_frame(num) if num <= limit else None
        while num + num // 2 <= limit:
            now = next_frame(2 * num)
            moved = ((now[0] - before[0]) / size).square().flatten(1).mean(1).sqrt()
            is_stable = before[1] <= MAX_GROWTH * torch.maximum(now[1], initial_mode)
            is_accurate = moved.median() <= MEDIAN_STEP_ERROR and moved.max() <= MAX_STEP_ERROR
            if is_accurate and is_stable:
                return num + num // 2
            num, before = 2 * num, now
        return 0

    def with_weights(self, model: Model) -> tuple[Equation, Tensor, Tensor]:
        """The integrator, its weights (C, terms), and the places of the unknowns among them."""
        equation, places = self.build(model)
        weight = model.values.new_zeros(equation.weight[0].numel()).index_copy(0, places, model.values)
        return equation, weight.view(equation.weight.shape[1:]), places

    def fastest_rate(self, model: Model) -> float:
        """The largest rate of a mode by the linear terms, per frame."""
        equation, weight, _ = self.with_weights(replace(model, is_stiff=True, is_coupled=True))
        rates = equation.rates(weight[None]) * self.settings["dt"]
        return float(torch.linalg.eigvals(rates).abs().max()) if bool(rates.isfinite().all()) else math.inf
