"""Identify the right-hand side of an equation, its terms and their coefficients, from frames far apart in
time.

1. Regress central differences in time on a library of terms, and drop the terms one by one that explain least
   (PDE-FIND: Rudy, Brunton, Proctor and Kutz 2017, arXiv 1609.06401). If a wave crosses many cells between
   two frames, such a difference is no derivative; so windows are weighted by how close theirs is to one.
2. Fit the integrator itself to the frames (Gauss-Newton with Levenberg-Marquardt damping).
3. Add the terms that explain what the integrator still misses, and fit again.
4. If the next frame still has a large error, fit a reaction-diffusion equation to it (shooting.py).

The weighting and steps 3 and 4 are ours. Data with noise of measurement take the weak form in place of 1, 3
and 4 (weak.py), and step 2 on denoised films (denoise.py).
"""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from ups_discovery.doubts import UNCLEAR
from ups_discovery.integrate import Model, ModelIntegration
from ups_discovery.least_squares import (
    backward_selection,
    damped_step,
    forward_selection,
    residual,
    scaled,
    solve,
)
from ups_discovery.progress import beat
from ups_discovery.shooting import shot_model
from ups_discovery.terms import WAVE, Term
from ups_discovery.weak import WeakModel, weak_model

MAX_DISAGREEMENT = 2.0  # standard errors of the weak form


class Identification(ModelIntegration):
    """Identifies the equation of one parameter value (`model`). weak: the equation by the weak form, if the
    data have noise of measurement and it has converged steps. is_shot: the equation was found by shooting."""

    weak: WeakModel | None = None
    is_shot = False

    # --------------------------------------------------------------------------------------- regression

    def regression_equations(self, target: Tensor, window_weight: Tensor) -> Tensor:
        """Normal equations (weightings, C, terms + 1, terms + 1) of the regression of target on the library.

        target (rows, C, cells): the derivative in time, averaged over three frames by Simpson's rule, as the
        terms are. window_weight: (weightings, rows, C)."""
        total: Tensor | float = 0.0
        rows = (
            self.regression_windows.split(4),
            target[..., self.sampled_cells].split(4),
            window_weight.split(4, 1),
        )
        for s, y, weight in zip(*rows, strict=True):
            beat()
            values = self.library_terms(s.flatten(0, 1), self.sampled_cells).unflatten(0, (-1, 3))
            values = (values[:, 0] + 4 * values[:, 1] + values[:, 2]) / 6
            columns = torch.cat([values[:, None].expand(-1, y.shape[1], -1, -1), y[:, :, None]], 2)
            x = columns * weight.sqrt()[..., None, None]  # weightings, rows, C, terms + 1, cells
            total = total + (x @ x.mT).sum(1)
        return total

    def regressed(self) -> tuple[Model, list[list[int]]] | None:
        """The first model and the library of every channel, or None if no regression beats persistence.

        Of several regressions, the one with the least product of held-out error and number of terms: few
        windows determine few terms."""
        s, dt = self.regression_windows, self.settings["dt"]
        once, twice = (s[:, 2] - s[:, 0]).flatten(2), (s[:, 2] - 2 * s[:, 1] + s[:, 0]).flatten(2)
        first, second = (x.square().mean(2).clamp_min(1e-16) for x in (once, twice))
        ratio = (second / first).mean(1, True)
        change = first.clamp_min(self.limits.slow_change * first.mean(0))
        weightings = torch.stack([ratio**-exponent / change for exponent in self.limits.weight_exponents])
        found, done = [], set()  # (error, model, its libraries)
        plain = [
            place
            for place, (_, factors) in enumerate(self.library)
            if all(channel == WAVE or len(axes) < 3 for channel, axes in factors)
        ]
        every = list(range(len(self.library)))
        equations = [*self.regression_equations(once / (2 * dt), weightings)]
        for allowed, place in itertools.product(self.limits.plain_residuals, range(len(equations))):
            if allowed == self.limits.plain_residuals[1] and any(
                e < self.limits.good_error for e, *_ in found
            ):
                break
            of_channels = equations[place]
            is_plain = [
                residual(a, plain) <= max(allowed, self.limits.high_order_gain * residual(a, every))
                for a in of_channels
            ]
            if (place, *is_plain) in done:
                continue
            done.add((place, *is_plain))
            libraries = [plain if is_enough else every for is_enough in is_plain]
            for factor in self.limits.residual_factors:
                kept = [
                    backward_selection(a, terms, factor)
                    for a, terms in zip(of_channels, libraries, strict=True)
                ]
                values = [solve(a, terms) for a, terms in zip(of_channels, kept, strict=True)]
                unknowns = [(channel, term) for channel, terms in enumerate(kept) for term in terms]
                model = self.with_converged_steps(Model(unknowns, torch.cat(values)))
                if model is not None:
                    found.append((self.error(model, self.held_out_windows), model, libraries))
        useful = [one for one in found if one[0] < self.persistence_error]
        if useful:
            return min(useful, key=lambda one: one[0] * len(one[1].unknowns))[1:]
        # No long rollout beats persistence: take the best over the next frames, where persistence has 0.5.
        close = [
            (self.error(model, self.shooting_windows, is_bounded=True), model, libraries)
            for error, model, libraries in found
            if math.isfinite(error)
        ]
        close = [one for one in close if one[0] < 0.5]
        if not close:
            return None
        _, model, libraries = min(close, key=lambda one: one[0])
        return self.with_more_steps(model), libraries

    # ------------------------------------------------------------------------------------- Gauss-Newton

    def shooting_equations(self, model: Model, frames: int | None = None) -> Tensor:
        """Normal equations (unknowns + 1, unknowns + 1) of the integrator's error by its values, over the
        first frames of the windows (None: all); rows are weighted as in the bounded error."""
        windows = self.shooting_windows[:, : None if frames is None else 1 + frames]
        return self.shooting_equations_by_row(model, windows).sum(0)

    def shooting_equations_by_row(self, model: Model, states: Tensor) -> Tensor:
        """`shooting_equations` of every row of states (rows, 1 + frames, C, *space)."""
        found = []
        for s in states.split(self.rows_at_once):
            predicted, columns = self.tangents(model, s)
            size = self.change_size(s)
            r = (s[:, 1:] - predicted) / size
            e = r.square().flatten(1).mean(1).sqrt().clamp_min(1e-6).view(-1, *[1] * (r.ndim - 1))
            x = torch.cat([columns / size, r[None]]) / (e.sqrt() * (1 + e))
            x = x.flatten(2).transpose(0, 1)
            found.append(x @ x.mT)
        return torch.cat(found)

    def refined(self, model: Model, max_iterations: int = 8) -> Model:
        """The model after Levenberg-Marquardt steps. Stops when a step gains less than 1 %, or raises the
        error of the longer held-out rollouts: few windows determine few terms."""
        error, damping = self.error(model, self.shooting_windows, is_bounded=True), 1e-3
        long = self.error(model, self.held_out_windows)
        for _ in range(max_iterations):
            best, before, (a, length) = model, error, scaled(self.shooting_equations(model))
            for _ in range(3):
                moved = replace(model, values=model.values + damped_step(a, length, damping))
                now = self.error(moved, self.shooting_windows, is_bounded=True)
                if now < error:
                    model, error, damping = moved, now, damping / 10
                    break
                damping *= 10
            if model is best:
                break
            long_before, long = long, self.error(model, self.held_out_windows)
            if not long <= long_before and math.isfinite(long_before):
                return best
            if error > 0.99 * before:
                break
        return model

    def with_more_terms(self, model: Model, libraries: list[list[int]]) -> Model:
        """The model with up to `max_added_terms` more terms: of the candidates that a regression of the
        residual finds, those whose tangents explain most of the integrator's error."""
        s, dt, built = self.regression_windows, self.settings["dt"], self.build(model)
        missed = sum(s[:, i + 1] - self.integrate(built, model.values, s[:, i], 1)[:, 0] for i in (0, 1))
        missed = missed.flatten(2) / (2 * dt)
        [equations] = self.regression_equations(missed, 1 / missed.square().mean(2).clamp_min(1e-16)[None])
        unknowns = list(model.unknowns)
        for channel, (a, terms) in enumerate(zip(equations, libraries, strict=True)):
            present = [terms.index(term) for c, term in model.unknowns if c == channel]
            a = a[[*terms, -1]][:, [*terms, -1]]
            places = forward_selection(a, present, self.limits.candidates_per_channel)
            unknowns += [(channel, terms[place]) for place in places[len(present) :]]
        added = model.values.new_zeros(len(unknowns) - len(model.values))
        wider = replace(model, unknowns=unknowns, values=torch.cat([model.values, added]))
        kept = forward_selection(
            self.shooting_equations(wider, 1),
            list(range(len(model.values))),
            self.limits.max_added_terms,
            self.limits.min_term_gain,
        )
        return replace(wider, unknowns=[unknowns[place] for place in kept], values=wider.values[kept])

    def model(self) -> Model | None:
        """The equation of this parameter value, or None if none beats persistence on held-out
        trajectories."""
        if self.noise is not None:
            return self.model_of_noisy_films()
        found = self.model_by_differences()
        error = math.inf if found is None else self.next_frame_error(found)
        if not error > self.limits.good_error:
            return found
        shot = shot_model(self, found)
        self.is_shot = shot is not None and self.next_frame_error(shot) < error
        return shot if self.is_shot else found

    def next_frame_error(self, model: Model) -> float:
        return self.error(model, self.held_out_windows[:, :2])

    def model_by_differences(self) -> Model | None:
        """`model` by steps 1 to 3."""
        first = self.regressed()
        if first is None:
            return None
        start, libraries = first
        model = self.with_more_steps(self.with_converged_steps(self.refined(start)) or start)
        error, before = self.error(model, self.held_out_windows), math.inf
        for _ in range(self.limits.max_growths):
            if not error < self.limits.min_growth_gain * before:
                break
            wider = self.with_more_terms(model, libraries)
            if wider.unknowns == model.unknowns:
                break
            wider = self.with_converged_steps(self.refined(wider))
            if wider is None:
                break
            wider = self.with_more_steps(wider)
            now = self.error(wider, self.held_out_windows)
            if not now < error:
                break
            model, error, before = wider, now, error
        return model if error < self.persistence_error else None

    def model_of_noisy_films(self) -> Model | None:
        """`model`, by the weak form and then the integrator, fitted to denoised films."""
        found = weak_model(self.films, self.noise, self.library, self.settings)
        # errors of the stencils are less than much noise, and more than little
        start = found and self.with_converged_steps(replace(found.model, is_finer=self.least_noise > 0))
        if start is None:
            return None
        self.weak = found
        model = self.with_converged_steps(self.refined(start)) or start
        # denoised films have lost what the weak form still sees: if both disagree it is right
        if bool(((model.values - start.values).abs() > MAX_DISAGREEMENT * self.weak.errors).any()):
            model = start
        # what happens in a window may be less than what its noise leaves there
        is_useful = self.weak.doubt(model) != UNCLEAR
        return (
            model if is_useful or self.error(model, self.held_out_windows) < self.persistence_error else None
        )


def terms_of(models: list[Model], terms: list[Term]) -> tuple[list[Term], Tensor]:
    """The terms of the models of all parameter values, and their weights (values, C, terms)."""
    used = sorted({term for model in models for _, term in model.unknowns})
    num_channels = 1 + max(channel for model in models for channel, _ in model.unknowns)
    weight = torch.zeros(len(models), num_channels, len(used))
    for row, model in zip(weight, models, strict=True):
        for (channel, term), value in zip(model.unknowns, model.values.tolist(), strict=True):
            row[channel, used.index(term)] = value
    return [terms[term] for term in used], weight
