"""How certain a found equation is: an interval for every coefficient, and whether the equation may be stated.

A fit answers whatever the data are, and four digits of a wrong equation look like four digits of a right one.
So the half width of a coefficient's interval is the sum of

    scatter    Student's t times the standard error of a jackknife over blocks of trajectories (of windows
               where there are fewer trajectories than blocks)
    fit        what the last step of the fit would still change
    numerics   twice what the coefficient changes by when derivatives are of two orders more and steps half as
               long: those have errors, too
    selection  what it changes by without the terms that are too small to be stated
    noise      what white noise in the frames takes off it. As much noise as the residual shows is added once
               more (SIMEX: Cook and Stefanski 1994, doi 10.1080/01621459.1994.10476871). If it changes the
               coefficient by the share d, the data's own noise has changed it by d / (1 - 2 d), as errors of
               a regressor do (attenuation)

each from one step of Gauss and Newton. The drift of an equation that noise drives has residuals that are
noise by nature: it is not stated where they are not independent from frame to frame, as noise of measurement
is not. The construction is ours.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.common.spectral import FieldTransform
from ups.models.bases.least_squares import solve
from ups.models.bases.terms import INVERSE, WAVE

if TYPE_CHECKING:
    from ups.models.bases.drift import Drift
    from ups.models.bases.identify import Identification, Model

# (model, states (windows, frames, C, *space)) to the normal equations of every window
Grams = Callable[["Model", Tensor], Tensor]
# (normal equations, places of terms) to the coefficients with which these explain most, zero of other terms
Solved = Callable[[Tensor, list[int]], Tensor]

BLOCKS = 8
STUDENT = 2.36  # 95 %, BLOCKS - 1 degrees of freedom
SMALL, LITTLE = 1e-3, 1e-2  # of the RMS of the derivative in time: smaller terms are counted, not stated;
# smaller terms are if they are not sure
UNEXPLAINED = 0.5  # of persistence's error a frame ahead: more leaves room for any equation
MISSING = 0.1  # of it, beyond noise: other terms are missing
CORRELATED = 0.1  # of the residuals of consecutive frames of a drift
WAVES = 1e3, 1e4  # wave numbers, in radians per cell: beyond all grids
CELLS = 256  # about which the equation is linearised
HALVES = "its terms differ between halves of the data"
UNCLEAR = "it leaves too much of what happens from one frame to the next unexplained"
ILL_POSED = "in it the shortest waves grow without bound"


@dataclass(frozen=True)
class Certainty:
    """half_width (unknowns,): of the interval of every coefficient, scaled units; is_negligible (unknowns,):
    a term too small to matter; doubt: why the equation may not be stated, "" if it may."""

    half_width: Tensor
    is_negligible: Tensor
    doubt: str = ""


def of_equation(one: "Identification", model: "Model") -> Certainty:
    """Of an equation that no noise drives, from the windows that it was fitted to."""
    every, s = list(range(len(model.unknowns))), one.shot[:, :2]
    missed = s[:, 1] - one.run(one.build(model), model.values, s[:, 0], 1)[:, 0]
    transform = FieldTransform(tuple(one.settings["space"]), one.settings["boundary"]).to(s.device)
    # noise has all modes alike; the error of a wrong term has those of the field
    noise = transform(missed).abs().square().mean(0).median(-1).values
    moved, missed = (
        (part / one.std).square().transpose(0, 1).flatten(1).mean(1) for part in (s[:, 1] - s[:, 0], missed)
    )
    beyond = missed - 3 * noise / one.std.flatten().square()  # of both frames, of the first one amplified
    is_unclear = (missed > UNEXPLAINED**2 * moved).any() | (beyond > MISSING**2 * moved).any()

    def solved(a: Tensor, columns: list[int]) -> Tensor:
        values = model.values.clone()
        values[[place for place in every if place not in columns]] = 0.0
        a = a.clone()  # the residual without the terms that are dropped, the integrator being linear in them
        a[:, -1] += a[:, :-1] @ (model.values - values)
        a[-1] += (model.values - values) @ a[:-1]
        values[columns] += solve(a, columns)
        return values

    return assessed(
        one, model, s, one.shooting_rows, solved, noise.sqrt(), UNCLEAR if bool(is_unclear) else ""
    )


def of_drift(drift: "Drift", model: "Model") -> Certainty:
    """Of what a driven equation does on the average, from the pairs that it was fitted to."""
    one = drift.found
    built = one.build(model)
    first, second = (
        drift.modes(one.seen[:, i + 1] - one.run(built, model.values, one.seen[:, i], 1)[:, 0]) * drift.trust
        for i in (0, 1)
    )
    alike = float((first * second).sum() / (first.square().sum() * second.square().sum()).sqrt())
    doubt = UNCLEAR if abs(alike) > CORRELATED else ""

    def solved(a: Tensor, columns: list[int]) -> Tensor:
        values = torch.zeros_like(model.values)
        values[columns] = solve(a, columns)
        return values

    return assessed(one, model, drift.few, drift.shooting_rows, solved, None, doubt)


def assessed(
    one: "Identification",
    model: "Model",
    states: Tensor,
    grams: Grams,
    solved: Solved,
    noise: Tensor | None,
    doubt: str,
) -> Certainty:
    """noise (C,): standard deviation of that in the frames; None: a drift's residuals say nothing of it."""
    every, some, terms = grams(model, states), states[::2], list(range(len(model.unknowns)))
    now, now_some = solved(every.sum(0), terms), solved(every[::2].sum(0), terms)
    width, halves = scatter(
        every, block_of(len(one.rows), len(states)).to(every.device), lambda a: solved(a, terms)
    )
    finer = replace(model, num_steps=2 * model.num_steps, is_finer=True)
    width = width + (now - model.values).abs()
    width = width + 2 * (solved(grams(finer, some).sum(0), terms) - now_some).abs()
    if noise is not None:
        draw = generator(0, "noise")
        added = torch.randn(some.shape, generator=draw, dtype=some.dtype).to(some.device)
        added = added * noise.view(-1, *[1] * (some.ndim - 3))
        width = width + noise_width(now_some, solved(grams(model, some + added).sum(0), terms))
    signed = torch.cat([model.values[None], halves]) * model.values.sign()
    size = sizes(one, model, states[:, 0])
    is_small = (size < SMALL) | (size < LITTLE) & (signed <= width).any(0)
    width = width + (solved(every.sum(0), (~is_small).nonzero().flatten().tolist()) - now).abs() * ~is_small
    if bool(((signed <= width).any(0) & ~is_small).any()):
        doubt = doubt or HALVES
    elif grows(one, model, ~is_small, states[:, 0]):
        doubt = doubt or ILL_POSED
    return Certainty(width, is_small, doubt)


def block_of(num_rows: int, count: int) -> Tensor:
    """The block of each of `count` windows that go through num_rows trajectories in turn."""
    place = torch.arange(count)
    return place % num_rows * BLOCKS // num_rows if num_rows >= BLOCKS else place % BLOCKS


def scatter(grams: Tensor, block: Tensor, solved: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The half width by jackknife, and the coefficients of both halves (2, unknowns)."""
    total = grams.sum(0)
    found = torch.stack([solved(total - grams[block == one].sum(0)) for one in block.unique()])
    error = ((found - found.mean(0)).square().sum(0) * (len(found) - 1) / len(found)).sqrt()
    return STUDENT * error, torch.stack([solved(grams[block % 2 == half].sum(0)) for half in (0, 1)])


def noise_width(now: Tensor, louder: Tensor) -> Tensor:
    """What the data's noise has taken off `now`, which becomes `louder` with as much once more."""
    change = (louder - now).abs() / now.abs().clamp_min(1e-300)
    return torch.where(change < 0.5, now.abs() * change / (1 - 2 * change).clamp_min(1e-9), torch.inf)


def weights(one: "Identification", model: "Model") -> tuple[Any, Tensor, Tensor]:
    """The integrator, its weights (C, terms), and the places of the unknowns among them."""
    made, places = one.build(model)
    weight = model.values.new_zeros(made.weight[0].numel()).index_copy(0, places, model.values)
    return made, weight.view(made.weight.shape[1:]), places


def sizes(one: "Identification", model: "Model", s: Tensor) -> Tensor:
    """RMS of every term over that of the derivative in time of its channel (unknowns,), at s (rows, C,
    *space)."""
    made, weight, places = weights(one, model)
    terms = made.terms(s)  # rows, terms, cells
    total = (weight @ terms).square().mean((0, 2)).sqrt()
    size = weight.abs() * terms.square().mean((0, 2)).sqrt() / total.clamp_min(1e-300)[:, None]
    return size.flatten()[places]


def grows(one: "Identification", model: "Model", is_kept: Tensor, s: Tensor) -> bool:
    """Whether ever shorter waves grow ever faster in the kept terms, linearised about cells of s (rows, C,
    *space): by the eigenvalues of their derivatives of second order and more, along axes and diagonals."""
    made, weight, places = weights(one, replace(model, values=model.values * is_kept))
    powers, _ = made.terms.values(s)
    every, channels = max(1, s[:, 0].numel() // CELLS), len(weight)
    for direction in itertools.product((-1, 0, 1), repeat=len(one.settings["space"])):
        symbols = []
        for wave in WAVES:
            symbol = torch.zeros(channels, channels, -(-s[:, 0].numel() // every), dtype=torch.complex128)
            for place, (power, factors) in enumerate(made.terms.terms):
                [(channel, axes), *more] = factors or [(WAVE, ())]
                if more or channel == WAVE or INVERSE in axes or len(axes) < 2:
                    continue
                size = powers[made.terms.powers.index(power)].flatten()[::every].cpu()
                size = size * math.prod(1j * wave * direction[axis] for axis in axes)
                symbol[:, channel] += weight[:, place, None].cpu() * size
            symbols.append(symbol.movedim(-1, 0))
        slow, fast = (torch.linalg.eigvals(symbol).real.amax() for symbol in symbols)
        if fast > 2 * slow.clamp_min(0) and fast > 1e-9 * symbols[1].abs().max():
            return True
    return False
