"""The right-hand side of an equation, its terms and their coefficients, from differences in time of frames
far apart.

1. Regress central differences in time on a library of terms, and drop the terms one by one that explain least
   (PDE-FIND: Rudy, Brunton, Proctor and Kutz 2017, arXiv 1609.06401). If a wave crosses many cells between
   two frames, such a difference is no derivative; so windows are weighted by how close theirs is to one.
2. Fit the integrator itself to the frames (Gauss-Newton with Levenberg-Marquardt damping).
3. Add the terms that explain what the integrator still misses, and fit again.

The weighting and step 3 are ours."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ups_discovery.certainty import UNCLEAR, Certainty, assessed, stepped
from ups_discovery.integrator import Integrator, Model
from ups_discovery.least_squares import (
    backward_selection,
    damped_step,
    forward_selection,
    residual,
    scaled,
    solve,
)
from ups_discovery.progress import beat, evaluation
from ups_discovery.spectral import FieldTransform
from ups_discovery.terms import WAVE

# Errors are relative to persistence.
WEIGHT_EXPONENTS = 1, 2, 3  # of the weights of windows; each gives one regression
SLOW_CHANGE = 0.01  # of the mean square change: windows that change less have no larger weight
RESIDUAL_FACTORS = 1.5, 3.0  # allowed residual over that of the whole library
# High derivatives mimic the error of a difference in time. They are used only if they reduce the residual by
# HIGH_ORDER_GAIN, and the plain terms leave more than PLAIN_RESIDUALS. Its first value is tried first, the
# second one if no model has an error below GOOD_ERROR then: a smaller error may be that of the solver that
# made the data, as for diff_react2d.
HIGH_ORDER_GAIN, PLAIN_RESIDUALS, GOOD_ERROR = 3.0, (0.1, 0.0), 0.1
MAX_ITERATIONS, MAX_TRIALS = 8, 3  # of Gauss-Newton, and of the damping in each
# Terms added to the first model: candidates of each channel, and of these the most that are added, each of
# which has to remove MIN_TERM_GAIN of the squared error; once more only if the error fell below MIN_GROWTH
# times.
CANDIDATES, MOST_ADDED, MIN_TERM_GAIN, MAX_GROWTHS, MIN_GROWTH = 6, 12, 0.04, 3, 0.5
MAX_RESIDUAL = 0.5  # of persistence's error one frame ahead: above it, any equation might be right
MAX_RESIDUAL_BEYOND_NOISE = 0.1  # of the same error: above it, terms are missing


@dataclass(frozen=True)
class Differences:
    """The equation by differences in time, from the windows of an integrator."""

    one: Integrator

    # --------------------------------------------------------------------------------------- regression

    def regression_equations(self, target: Tensor, window_weight: Tensor) -> Tensor:
        """Normal equations (weightings, C, terms + 1, terms + 1) of the regression of target on the library.

        target (rows, C, cells): the derivative in time, averaged over three frames by Simpson's rule, as the
        terms are. window_weight: (weightings, rows, C)."""
        total: Tensor | float = 0.0
        windows, cells = self.one.windows.regression, self.one.windows.cells
        rows = windows.split(4), target[..., cells].split(4), window_weight.split(4, 1)
        for s, y, weight in zip(*rows, strict=True):
            beat(work=evaluation(3 * s.numel(), len(self.one.library)))
            values = self.one.terms(s.flatten(0, 1), cells).unflatten(0, (-1, 3))
            values = (values[:, 0] + 4 * values[:, 1] + values[:, 2]) / 6
            columns = torch.cat([values[:, None].expand(-1, y.shape[1], -1, -1), y[:, :, None]], 2)
            x = columns * weight.sqrt()[..., None, None]  # weightings, rows, C, terms + 1, cells
            total = total + (x @ x.mT).sum(1)
        return total

    def regressed(self) -> tuple[Model, list[list[int]]] | None:
        """The first model and the library of every channel, or None if no regression beats persistence.

        Of several regressions, the one with the least product of held-out error and number of terms: few
        windows determine few terms."""
        one, s = self.one, self.one.windows.regression
        once, twice = (s[:, 2] - s[:, 0]).flatten(2), (s[:, 2] - 2 * s[:, 1] + s[:, 0]).flatten(2)
        first, second = (x.square().mean(2).clamp_min(1e-16) for x in (once, twice))
        ratio = (second / first).mean(1, True)
        change = first.clamp_min(SLOW_CHANGE * first.mean(0))
        weightings = torch.stack([ratio**-exponent / change for exponent in WEIGHT_EXPONENTS])
        found, done = [], set()  # (error, model, its libraries)
        plain = [
            place
            for place, (_, factors) in enumerate(one.library)
            if all(channel == WAVE or len(axes) < 3 for channel, axes in factors)
        ]
        every = list(range(len(one.library)))
        equations = [*self.regression_equations(once / (2 * one.settings["dt"]), weightings)]
        least = [min(residual(a, every) for a in of_channel) for of_channel in zip(*equations, strict=True)]
        beat(is_promising=max(least) < PLAIN_RESIDUALS[0])
        for allowed, place in itertools.product(PLAIN_RESIDUALS, range(len(equations))):
            if allowed == PLAIN_RESIDUALS[1] and any(e < GOOD_ERROR for e, *_ in found):
                break
            of_channels = equations[place]
            is_plain = [
                residual(a, plain) <= max(allowed, HIGH_ORDER_GAIN * residual(a, every)) for a in of_channels
            ]
            if (place, *is_plain) in done:
                continue
            done.add((place, *is_plain))
            libraries = [plain if is_enough else every for is_enough in is_plain]
            for factor in RESIDUAL_FACTORS:
                kept = [
                    backward_selection(a, terms, factor)
                    for a, terms in zip(of_channels, libraries, strict=True)
                ]
                values = [solve(a, terms) for a, terms in zip(of_channels, kept, strict=True)]
                unknowns = [(channel, term) for channel, terms in enumerate(kept) for term in terms]
                model = one.with_converged_steps(Model(unknowns, torch.cat(values)))
                if model is not None:
                    found.append((one.error(model, one.windows.held_out), model, libraries))
        useful = [some for some in found if some[0] < one.persistence_error]
        if useful:
            return min(useful, key=lambda some: some[0] * len(some[1].unknowns))[1:]
        # No long rollout beats persistence: take the best over the next frames, where persistence has 0.5.
        close = [
            (one.error(model, one.windows.shooting, is_bounded=True), model, libraries)
            for error, model, libraries in found
            if math.isfinite(error)
        ]
        close = [some for some in close if some[0] < 0.5]
        return min(close, key=lambda some: some[0])[1:] if close else None

    def with_more_terms(self, model: Model, libraries: list[list[int]]) -> Model:
        """The model with up to MOST_ADDED more terms: of the candidates that a regression of the residual
        finds, those whose tangents explain most of the integrator's error."""
        one, s = self.one, self.one.windows.regression
        dt, built = one.settings["dt"], one.build(model)
        missed = sum(s[:, i + 1] - one.integrate(built, model.values, s[:, i], 1)[:, 0] for i in (0, 1))
        missed = missed.flatten(2) / (2 * dt)
        [equations] = self.regression_equations(missed, 1 / missed.square().mean(2).clamp_min(1e-16)[None])
        unknowns = list(model.unknowns)
        for channel, (a, terms) in enumerate(zip(equations, libraries, strict=True)):
            present = [terms.index(term) for c, term in model.unknowns if c == channel]
            a = a[[*terms, -1]][:, [*terms, -1]]
            places = forward_selection(a, present, CANDIDATES)
            unknowns += [(channel, terms[place]) for place in places[len(present) :]]
        added = model.values.new_zeros(len(unknowns) - len(model.values))
        wider = replace(model, unknowns=unknowns, values=torch.cat([model.values, added]))
        equations = equations_by_row(one, wider, one.windows.shooting[:, :2]).sum(0)
        kept = forward_selection(equations, list(range(len(model.values))), MOST_ADDED, MIN_TERM_GAIN)
        return replace(wider, unknowns=[unknowns[place] for place in kept], values=wider.values[kept])

    def model(self) -> Model | None:
        """The equation, or None if it does not beat persistence on held-out trajectories."""
        one, first = self.one, self.regressed()
        if first is None:
            return None
        start, libraries = first
        model = one.with_converged_steps(refined(one, start)) or start
        error, before = one.error(model, one.windows.held_out), math.inf
        for _ in range(MAX_GROWTHS):
            if not error < MIN_GROWTH * before:
                break
            wider = self.with_more_terms(model, libraries)
            if wider.unknowns == model.unknowns:
                break
            wider = one.with_converged_steps(refined(one, wider))
            if wider is None:
                break
            now = one.error(wider, one.windows.held_out)
            if not now < error:
                break
            model, error, before = wider, now, error
        return model if error < one.persistence_error else None

    def certainty(self, model: Model) -> Certainty:
        """The certainty of the equation, from the windows that it was fitted to."""
        one, s = self.one, self.one.windows.shooting[:, :2]
        missed = s[:, 1] - one.integrate(one.build(model), model.values, s[:, 0], 1)[:, 0]
        transform = FieldTransform(tuple(one.space), one.boundary).to(s.device)
        # white noise has equal power in all modes; the error of a wrong term has the modes of the field
        noise = transform(missed).abs().square().mean(0).median(-1).values
        std = one.windows.std
        change, error = (
            (x / std).square().transpose(0, 1).flatten(1).mean(1) for x in (s[:, 1] - s[:, 0], missed)
        )
        beyond_noise = error - 3 * noise / std.flatten().square()  # of both frames, the first one amplified
        is_unclear = (error > MAX_RESIDUAL**2 * change).any()
        is_unclear |= (beyond_noise > MAX_RESIDUAL_BEYOND_NOISE**2 * change).any()
        doubt = UNCLEAR if bool(is_unclear) else ""
        equations = functools.partial(equations_by_row, one)
        return assessed(one, model, s, equations, stepped(model), noise.sqrt(), doubt)


# ----------------------------------------------------------------------------------------- Gauss-Newton


def equations_by_row(one: Integrator, model: Model, states: Tensor) -> Tensor:
    """`Integrator.normal_equations` of every row, weighted as in the bounded error."""

    def weighted(s: Tensor, x: Tensor) -> Tensor:
        x = x / one.change_size(s)
        e = x[-1].square().flatten(1).mean(1).sqrt().clamp_min(1e-6).view(-1, *[1] * (s.ndim - 1))
        return x / (e.sqrt() * (1 + e))

    return one.normal_equations(model, states, weighted)


def refined(one: Integrator, model: Model) -> Model:
    """The model after Levenberg-Marquardt steps. Stops when a step gains less than 1 %, or raises the error
    of the longer held-out rollouts: few windows determine few terms."""
    error, damping = one.error(model, one.windows.shooting, is_bounded=True), 1e-3
    long = one.error(model, one.windows.held_out)
    for _ in range(MAX_ITERATIONS):
        best, before = model, error
        a, length = scaled(equations_by_row(one, model, one.windows.shooting).sum(0))
        for _ in range(MAX_TRIALS):
            moved = replace(model, values=model.values + damped_step(a, length, damping))
            now = one.error(moved, one.windows.shooting, is_bounded=True)
            if now < error:
                model, error, damping = moved, now, damping / 10
                break
            damping *= 10
        if model is best:
            break
        long_before, long = long, one.error(model, one.windows.held_out)
        if not long <= long_before and math.isfinite(long_before):
            return best
        if error > 0.99 * before:
            break
    return model
