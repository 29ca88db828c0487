"""Integrate a candidate equation from windows of the data: rollouts, errors, and the steps per frame."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ups_discovery.boundary import along
from ups_discovery.data import Data
from ups_discovery.denoise import Film
from ups_discovery.equation import Equation, max_steps
from ups_discovery.library import library
from ups_discovery.limits import LIMITS
from ups_discovery.noise import MOST_VALUES, measurement_noise
from ups_discovery.progress import beat
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform
from ups_discovery.terms import Terms, diagonal
from ups_discovery.units import widened


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


Places = list[tuple[int, int, int]]  # film, first frame and number of frames of windows


def cut(films: Tensor, places: Places) -> Tensor:
    """The windows (windows, frames, C, *space) of films at these places."""
    return torch.stack([films[film, first : first + length] for film, first, length in places])


class ModelIntegration:
    """Windows of the data of one parameter value, and rollouts of models from them.

    States are float64; windows are (rows, frames, C, *space).
    bounds: smallest and largest state (C,) of a prediction. noise (C,): standard deviation of white noise in
    the states, None without any; if there is noise, the windows are those of denoised films. least_noise: of
    every channel that has less, relative to its standard deviation."""

    limits = LIMITS
    rows_at_once = 8  # windows that are integrated together in a fit

    def __init__(
        self,
        data: Data,
        settings: dict[str, Any],
        value: int,
        least_noise: float = 0.0,
    ):
        self.settings, self.least_noise = {**settings, "num_values": 1}, least_noise
        self.max_steps = max_steps(settings["space"])
        self.library = library(
            settings["num_channels"],
            settings["positive"],
            len(settings["space"]),
            settings.get("vorticity", ()),
            settings.get("driven", ()),
        )
        rng, rows = generator(data.seed, data.name, "equation", value), data.rows(value)
        rows = rows[torch.randperm(len(rows), generator=rng)]
        held_out = rows[: min(self.limits.num_held_out, max(1, len(rows) // 8))]
        self.rows = rows[len(held_out) :] if len(rows) > 1 else rows
        self.num_cells = math.prod(settings["space"])

        def windows(rows: Tensor, count: int, length: int) -> Tensor:
            return data.states(rows[torch.arange(count) % len(rows)], length, rng)

        num_regressed = self.num_windows(self.limits.regression_cells, self.limits.max_regression_windows)
        num_shot = self.num_windows(self.limits.shooting_cells, self.limits.max_shooting_windows)
        self.regression_windows = windows(self.rows, num_regressed, 3)
        self.shooting_windows = windows(self.rows, num_shot, 1 + self.limits.shooting_frames)
        self.held_out_windows = windows(held_out, len(held_out), 1 + self.limits.num_held_out)
        device = self.regression_windows.device
        self.std = data.units.scale.to(device).view(-1, *[1] * len(settings["space"]))
        num_sampled = max(1, self.limits.regression_cells // num_regressed)
        self.sampled_cells = torch.randperm(self.num_cells, generator=rng)[:num_sampled].to(device)
        self.library_terms = Terms(
            self.library,
            settings["positive"],
            settings["space"],
            settings["lengths"],
            settings["boundary"],
            settings["cell"],
        ).to(device)
        ranges = []
        for row in rows[: self.limits.max_bound_trajectories].split(1):
            s = data.states(row, data.num_frames, rng).transpose(0, 2).flatten(1)
            ranges.append((s.amin(1), s.amax(1)))
        low, high = (torch.stack(ends) for ends in zip(*ranges, strict=True))
        self.bounds = widened(low.amin(0), high.amax(0), len(ranges))
        some = data.films(rows, MOST_VALUES)
        sigma = [
            max(measurement_noise(one.cpu().numpy()) or 0.0, least_noise * float(one.std()))
            for one in some.unbind(2)
        ]
        self.noise = some.new_tensor(sigma) if any(sigma) else None
        if self.noise is not None:
            self.films = data.films(rows, self.limits.film_values)
            self.use_denoised(len(held_out), rng)

    def use_denoised(self, num_held_out: int, rng: torch.Generator) -> None:
        """Replace all windows by those of denoised films, and fit the integrator to more frames."""
        film = Film(self.films.shape[1], tuple(self.settings["space"]), self.settings["boundary"])
        smooth = film.denoised(self.films, self.noise)
        num_held_out = min(num_held_out, max(1, len(smooth) // 8))
        held_out, smooth = smooth[:num_held_out], smooth[num_held_out:] if len(smooth) > 1 else smooth
        self.films = self.films[-len(smooth) :]
        self.rows = self.rows[: len(smooth)]

        def places(num_films: int, count: int, length: int) -> Places:
            length = min(length, self.films.shape[1])
            starts = torch.randint(0, self.films.shape[1] - length + 1, (count,), generator=rng)
            if num_films == 1:  # blocks of windows (certainty.py) are parts of the film
                starts = starts.sort().values
            return [(place % num_films, start, length) for place, start in enumerate(starts.tolist())]

        num_shot = self.num_windows(self.limits.noisy_cells, self.limits.noisy_windows)
        self.shooting_windows = cut(smooth, places(len(smooth), num_shot, 1 + self.limits.noisy_frames))
        self.rows_at_once = max(1, self.limits.noisy_cells // self.num_cells)
        self.regression_windows = cut(smooth, places(len(smooth), len(self.regression_windows), 3))
        self.held_out_windows = cut(
            held_out, places(num_held_out, 2 * num_held_out, 1 + self.limits.num_held_out)
        )

    @cached_property
    def persistence_error(self) -> float:
        """The error of the first frame of every held-out window."""
        s = self.held_out_windows
        unmoved = (s[:, :1] - s[:, 1:]) / self.change_size(s)
        return float(unmoved.square().flatten(1).mean(1).sqrt().mean())

    def num_windows(self, num_cells: int, most: int) -> int:
        """The number of windows that have this number of cells in all."""
        return min(most, max(self.limits.min_windows, num_cells // self.num_cells))

    # ----------------------------------------------------------------------------------- the integrator

    def build(self, model: Model) -> tuple[Equation, Tensor]:
        """An integrator of the model's terms, and the places of the unknowns among its weights."""
        used = sorted({term for _, term in model.unknowns})
        equation = Equation(
            **{
                **self.settings,
                "terms": [self.library[term] for term in used],
                "num_steps": model.num_steps,
                "is_stiff": model.is_stiff,
                "is_coupled": model.is_coupled,
                "is_finer": model.is_finer,
            }
        ).to(self.regression_windows.device)
        equation.low, equation.high = self.bounds
        places = [channel * len(used) + used.index(term) for channel, term in model.unknowns]
        return equation, torch.tensor(places, device=self.regression_windows.device)

    @torch.no_grad()
    def integrate(self, built: tuple[Equation, Tensor], values: Tensor, s: Tensor, frames: int) -> Tensor:
        """The frames (rows, frames, C, *space) after s (rows, C, *space).

        built: of `build`. values: (unknowns,), or (sets, unknowns), where each set is for equally many
        consecutive rows."""
        equation, places = built
        num_weights, weight_shape = equation.weight[0].numel(), equation.weight.shape[1:]
        weight = values.new_zeros(*values.shape[:-1], num_weights).index_copy(-1, places, values)
        weight, found = weight.view(-1, *weight_shape), []
        for _ in range(frames):
            beat()
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
        bytes_each = 8 * len(s) * self.num_cells * len(equation.terms.terms)
        columns = []
        for step in torch.diag(steps).split(max(1, self.limits.max_bytes // bytes_each)):
            starts = s[:, 0].repeat(len(step), *[1] * (s.ndim - 2))
            moved = self.integrate(built, model.values + step, starts, frames)
            difference = moved.unflatten(0, (len(step), -1)) - predicted
            columns.append(difference / step.sum(1).view(-1, *[1] * predicted.ndim))
        return predicted, torch.cat(columns)

    def change_size(self, s: Tensor) -> Tensor:
        """RMS change since the first frame of every row and later frame of s (rows, 1 + frames, ...): the
        unit of errors."""
        axes = tuple(range(2, s.ndim))
        change = ((s[:, 1:] - s[:, :1]) / self.std).square().mean(axes, True).sqrt()
        return change.clamp_min(1e-6) * self.std

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
        ends = along(self.settings["boundary"], len(self.settings["space"]))
        linear = [
            (channel, diagonal(self.library[term], self.settings["positive"], ends))
            for channel, term in model.unknowns
        ]
        is_own_channel = {channel == one[0] for channel, one in linear if one and one[1]}
        found = []
        if False in is_own_channel:
            found.append(replace(model, is_stiff=True, is_coupled=True))
        if True in is_own_channel:
            found.append(replace(model, is_stiff=True, is_coupled=False))
        return [*found, replace(model, is_stiff=False, is_coupled=False)]

    def num_converged_steps(self, model: Model, limit: int) -> int:
        """1.5 times the fewest steps per frame for which twice the number changes nothing, at most `limit`; 0
        if there is no such number. Nor may a wave grow from noise that does not grow with twice the steps."""
        count = self.num_windows(self.limits.step_test_cells, self.limits.max_step_test_windows)
        s, num = self.regression_windows[:count, :2], 1
        if not model.is_stiff:
            steps = self.fastest_rate(model) / self.limits.stability_limit
            num = 2 ** max(0, math.ceil(math.log2(max(1e-9, steps))))
        transform = FieldTransform(tuple(self.settings["space"]), self.settings["boundary"]).to(s.device)
        noise = torch.randn(s[:, 0].shape, generator=generator(0, "steps"), dtype=s.dtype).to(s.device)
        size = self.change_size(s)
        start = torch.cat([s[:, 0], s[:, 0] + self.limits.noise * size[:, 0] * noise])
        initial_mode = transform(noise).abs().max()

        def next_frame(num: int) -> tuple[Tensor, Tensor]:
            """The next frame, and the largest mode of the noise in it."""
            built = self.build(replace(model, num_steps=num))
            plain, noisy = self.integrate(built, model.values, start, 1).chunk(2)
            return plain, transform((noisy - plain) / (self.limits.noise * size)).abs().max()

        before = next_frame(num) if num <= limit else None
        while num + num // 2 <= limit:
            now = next_frame(2 * num)
            moved = ((now[0] - before[0]) / size).square().flatten(1).mean(1).sqrt()
            is_stable = before[1] <= self.limits.max_noise_growth * torch.maximum(now[1], initial_mode)
            is_accurate = (
                moved.median() <= self.limits.median_step_error and moved.max() <= self.limits.max_step_error
            )
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

    def with_more_steps(self, model: Model) -> Model:
        """The model with more steps, if its long rollouts have a suspicious error and the steps reduce it:
        waves that are hardly there at first may have grown."""
        long = self.error(model, self.held_out_windows)
        short = self.error(model, self.shooting_windows, is_bounded=True)
        for _ in range(self.limits.max_doublings):
            is_fine = long < min(self.limits.suspicious_ratio * short, self.limits.suspicious_error)
            if is_fine or 2 * model.num_steps > self.max_steps:
                break
            finer = replace(model, num_steps=2 * model.num_steps)
            now = self.error(finer, self.held_out_windows)
            if not now < self.limits.min_improvement * long and long < self.persistence_error:
                break
            model, long = finer, now
        return model
