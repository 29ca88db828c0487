"""Identify a reaction-diffusion equation from frames that are far apart, some of whose cells are kicked.

If a reaction is much faster than a frame, no difference in time is a derivative, and regression
(differences.py) finds the slow terms only. But the integrator can be fitted to frames from coefficients of
zero, and with a library of reactions and second derivatives it converges:

1. Fit the whole library to one frame ahead (Levenberg-Marquardt).
2. Drop the terms that explain least, and add the fourth derivatives that belong to the second ones which are
   left: they make up for the stencil of the solver that made the data.
3. Fit again, to more windows and with less weight of large errors in steps; drop terms once more.

A kick changes some cells by any amount. So errors count by their size or its logarithm and not by their
square (iteratively reweighted), and the fit explains the cells that nothing kicked. The construction is
ours."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ups_discovery.certainty import UNCLEAR, Certainty, assessed, stepped
from ups_discovery.integrator import Integrator, Model
from ups_discovery.least_squares import backward_selection, damped_step, scaled
from ups_discovery.terms import WAVE, Term

MAX_UNKNOWNS = 40  # of the first fit: of two fields
SCALES = 0.1, 0.01  # of the first fit and the last ones
MIN_GAIN = 0.01  # of the error, in an iteration
MAX_ITERATIONS, MAX_TRIALS = 25, 6
MAX_RESIDUAL = 1.1  # of the terms that are left, over that of all
MORE_WINDOWS = 4  # times as many for the last fits
KICKED = 0.5  # times as many cells as by persistence may be missed by SCALES[1] if only kicks are left
USEFUL = 0.7  # times as many cells may be missed as by the rival, or by persistence


@dataclass
class Shooting:
    """The fit of models of `one` to the first frame of windows (rows, 2 or more, C, *space).

    scale: errors below it count by their square, relative to the RMS change in a frame. Larger ones count by
    their size (least absolute deviations), or with is_local by its logarithm (Cauchy), which kicks hardly
    change, but which leads to a model from its neighbourhood only."""

    one: Integrator
    windows: Tensor
    scale: float
    is_local: bool = False

    @cached_property
    def unit(self) -> Tensor:
        """RMS change of every channel in a frame."""
        change = (self.windows[:, 1] - self.windows[:, 0]).transpose(0, 1).flatten(1).square().mean(1).sqrt()
        return change.clamp_min(1e-6).view(-1, *[1] * (self.windows.ndim - 3))

    def residual(self, model: Model) -> Tensor:
        """Error one frame ahead, (rows, C, *space)."""
        s = self.windows
        predicted = self.one.integrate(self.one.build(model), model.values, s[:, 0], 1)[:, 0]
        return (s[:, 1] - predicted) / self.unit

    def error(self, model: Model) -> float:
        """The mean over cells that a fit minimises."""
        square = 1 + (self.residual(model) / self.scale).square()
        return float((square.log() / 2 if self.is_local else square.sqrt() - 1).mean())

    def missed(self, model: Model) -> float:
        """Fraction of the cells with a residual above `scale`, smooth: a kick counts as one."""
        square = self.residual(model).square()
        return float((square / (square + self.scale**2)).mean())

    def equations_by_row(self, model: Model, states: Tensor) -> Tensor:
        """Reweighted `Integrator.normal_equations` of every row of states (rows, 2, C, *space)."""

        def weighted(_: Tensor, x: Tensor) -> Tensor:
            x = x / self.unit
            return x * (1 + (x[-1] / self.scale).square()) ** (-0.5 if self.is_local else -0.25)

        return self.one.normal_equations(model, states, weighted)

    def equations(self, model: Model) -> Tensor:
        """Their sum over the windows."""
        return self.equations_by_row(model, self.windows[:, :2]).sum(0)

    def fitted(self, model: Model) -> Model:
        """The model after Levenberg-Marquardt steps. Stops when a step gains too little."""
        error, damping = self.error(model), 0.01
        for _ in range(MAX_ITERATIONS):
            before, (a, length) = error, scaled(self.equations(model))
            for _ in range(MAX_TRIALS):
                values = model.values + damped_step(a, length, damping)
                moved = self.one.with_converged_steps(replace(model, values=values))
                if moved is not None and (now := self.error(moved)) < error:
                    model, error, damping = moved, now, damping / 4
                    break
                damping *= 4
            if not error < (1 - MIN_GAIN) * before:
                break
        return model

    def pruned(self, model: Model) -> Model:
        """The model without the terms that explain least."""
        a = self.equations(model)
        a[:, -1] += a[:, :-1] @ model.values  # what all terms explain, with the integrator linearised
        a[-1] += model.values @ a[:-1]
        places = backward_selection(a, [*range(len(model.values))], MAX_RESIDUAL)
        return replace(
            model, unknowns=[model.unknowns[place] for place in places], values=model.values[places]
        )

    def leaves_kicks(self, model: Model) -> bool:
        """Whether most cells that change in a frame are explained to the precision of the fit, so that the
        residual is kicks of other cells. A drift, which is for noise in all cells, would explain no more."""
        held_out = Shooting(self.one, self.one.windows.held_out, SCALES[1])
        at_rest = replace(model, values=torch.zeros_like(model.values))
        return held_out.missed(model) < KICKED * held_out.missed(at_rest)

    def certainty(self, model: Model) -> Certainty:
        """The certainty of the equation, from the windows and the weights of its last fit: cells that are
        kicked hardly count, and the residual shows no noise."""
        doubt = "" if self.leaves_kicks(model) else UNCLEAR
        states = self.windows[:, :2]
        return assessed(self.one, model, states, self.equations_by_row, stepped(model), None, doubt)


def order_of(term: Term) -> tuple[int, int] | None:
    """(channel, order) of a pure derivative along one axis; (-1, 0) of a reaction; None for other terms."""
    powers, factors = term
    if not factors:
        return -1, 0
    [(channel, axes), *more] = factors
    is_pure = channel != WAVE and not more and not any(powers) and len({*axes}) == 1
    return (channel, len(axes)) if is_pure else None


def last_shooting(one: Integrator) -> Shooting:
    """The fit that gives the coefficients."""
    windows = one.windows.regression[: MORE_WINDOWS * len(one.windows.shooting)]
    return Shooting(one, windows, SCALES[1], is_local=True)


def shot_model(one: Integrator, rival: Model | None) -> Model | None:
    """The equation by shooting, or None if it does not miss clearly fewer cells than the rival, or
    persistence, one frame ahead."""
    orders = [order_of(term) for term in one.library]
    short = [place for place, order in enumerate(orders) if order and order[1] in (0, 2)]
    unknowns = [(channel, place) for channel in range(one.settings["num_channels"]) for place in short]
    if len(unknowns) > MAX_UNKNOWNS:
        return None
    first, last = Shooting(one, one.windows.shooting, SCALES[0]), last_shooting(one)
    later = replace(last, scale=SCALES[0])
    held_out = Shooting(one, one.windows.held_out, SCALES[0])
    at_rest = Model(unknowns, one.windows.shooting.new_zeros(len(unknowns)))
    most = USEFUL * held_out.missed(rival or at_rest)
    model = first.fitted(at_rest)
    if not held_out.missed(model) < most:
        return None
    model = first.pruned(model)
    diffused = {(channel, orders[place][0]) for channel, place in model.unknowns if orders[place][1] == 2}
    fourth = [
        (channel, place)
        for channel, of in sorted(diffused)
        for place, order in enumerate(orders)
        if order == (of, 4)
    ]
    values = torch.cat([model.values, model.values.new_zeros(len(fourth))])
    model = later.fitted(replace(model, unknowns=model.unknowns + fourth, values=values))
    model = last.fitted(last.pruned(last.fitted(model)))
    return model if held_out.missed(model) < most else None
