"""Intervals of the coefficients of an identified equation, and whether the equation may be stated at all.

A fit returns coefficients for any data, and a wrong equation has as many digits as a right one. The half
width of a coefficient's interval is the sum of five parts, each from one Gauss-Newton step:

    scatter    Student's t times the standard error of a jackknife over blocks of trajectories, or of windows
               if there are fewer trajectories than blocks
    fit        what another step of the fit would change
    numerics   twice the change from derivatives of two orders more and steps half as long
    selection  the change without the terms that are too small to be stated
    noise      the bias by white noise in the frames. As much noise as the residual shows is added once more
               (SIMEX: Cook and Stefanski 1994, doi 10.1080/01621459.1994.10476871). If that changes the
               coefficient by a fraction d, the noise of the data has changed it by d / (1 - 2 d), as errors
               of a regressor do (attenuation)

For films with noise it is Student's t times the standard error by the weak form (weak.py), plus what the fit
of the integrator changed. The standard error is the larger one of two: by the scatter of blocks of windows,
which overlap in single films and so vary too little, and by the noise alone.

The residuals of a drift are noise by nature. A drift is not stated if they are correlated from frame to
frame, as noise of measurement is, or if the frames have noise of measurement. The construction is ours.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups_discovery.doubts import HALVES, ILL_POSED, UNCLEAR
from ups_discovery.least_squares import solve
from ups_discovery.seeds import generator
from ups_discovery.shooting import last_shooting, leaves_kicks
from ups_discovery.spectral import FieldTransform
from ups_discovery.terms import INVERSE, WAVE

if TYPE_CHECKING:
    from ups_discovery.drift import Drift
    from ups_discovery.identification import Identification
    from ups_discovery.integrate import Model

# (model, states (windows, frames, C, *space)) to the normal equations of every window
EquationsByRow = Callable[["Model", Tensor], Tensor]
# (normal equations, places of the terms that are used) to the coefficients of all terms, 0 for the others
Solve = Callable[[Tensor, list[int]], Tensor]

BLOCKS = 8
STUDENT = 2.36  # 95 %, BLOCKS - 1 degrees of freedom
STUDENT_WEAK = 2.2  # the same for the weak form: more blocks, but neighbours are not independent
# Of the RMS of the time derivative: a term below NEGLIGIBLE is never stated, one below SMALL only if it is
# certain.
NEGLIGIBLE, SMALL = 1e-3, 1e-2
MAX_RESIDUAL = 0.5  # of persistence's error one frame ahead: above it, any equation might be right
MAX_RESIDUAL_BEYOND_NOISE = 0.1  # of the same error: above it, terms are missing
MAX_CORRELATION = 0.1  # of a drift's residuals in consecutive frames
WAVES = 1e3, 1e4  # wave numbers in radians per cell, beyond those of any grid
NUM_CELLS = 256  # about which the equation is linearised


@dataclass(frozen=True)
class Certainty:
    """half_width (unknowns,): of the interval of every coefficient, in the units of the fit; is_negligible
    (unknowns,): the term is too small to be stated; doubt: why the equation may not be stated, "" if it
    may."""

    half_width: Tensor
    is_negligible: Tensor
    doubt: str = ""


def of_equation(one: "Identification", model: "Model") -> Certainty:
    """The certainty of a deterministic equation, from the windows that it was fitted to."""
    if one.weak is not None:
        return of_noisy_films(one, model)
    if one.is_shot:
        return of_kicked_frames(one, model)
    s = one.shooting_windows[:, :2]
    missed = s[:, 1] - one.integrate(one.build(model), model.values, s[:, 0], 1)[:, 0]
    transform = FieldTransform(tuple(one.settings["space"]), one.settings["boundary"]).to(s.device)
    # white noise has equal power in all modes; the error of a wrong term has the modes of the field
    noise = transform(missed).abs().square().mean(0).median(-1).values
    change, error = (
        (x / one.std).square().transpose(0, 1).flatten(1).mean(1) for x in (s[:, 1] - s[:, 0], missed)
    )
    beyond_noise = error - 3 * noise / one.std.flatten().square()  # of both frames, the first one amplified
    is_unclear = (error > MAX_RESIDUAL**2 * change).any()
    is_unclear |= (beyond_noise > MAX_RESIDUAL_BEYOND_NOISE**2 * change).any()

    doubt = UNCLEAR if bool(is_unclear) else ""
    return assessed(one, model, s, one.shooting_equations_by_row, stepped(model), noise.sqrt(), doubt)


def of_kicked_frames(one: "Identification", model: "Model") -> Certainty:
    """The certainty of an equation found by shooting, from the windows and the weights of its last fit: cells
    that are kicked hardly count, and the residual shows no noise."""
    shooting = last_shooting(one)
    doubt = "" if leaves_kicks(one, model) else UNCLEAR
    states = shooting.windows[:, :2]
    return assessed(one, model, states, shooting.equations_by_row, stepped(model), None, doubt)


def stepped(model: "Model") -> Solve:
    """One step from a model, with the integrator linearised in its values."""

    def solved(a: Tensor, columns: list[int]) -> Tensor:
        dropped = model.values.clone()
        dropped[columns] = 0.0
        a, values = a.clone(), model.values - dropped
        a[:, -1] += a[:, :-1] @ dropped
        a[-1] += dropped @ a[:-1]
        values[columns] += solve(a, columns)
        return values

    return solved


def of_noisy_films(one: "Identification", model: "Model") -> Certainty:
    """The certainty of an equation of films with noise, by the errors of the weak form."""
    weak, s = one.weak, one.shooting_windows
    width = (
        STUDENT_WEAK * torch.maximum(weak.errors, weak.noise_errors)
        + (model.values - weak.model.values).abs()
    )
    size = sizes(one, model, s[:, 0])
    is_uncertain = model.values.abs() <= width
    is_small = (size < NEGLIGIBLE) | (size < SMALL) & is_uncertain
    doubt = weak.doubt(model)
    if bool((is_uncertain & ~is_small).any()):
        doubt = doubt or HALVES
    elif grows(one, model, ~is_small, s[:, 0]):
        doubt = doubt or ILL_POSED
    return Certainty(width, is_small, doubt)


def of_drift(drift: "Drift", model: "Model") -> Certainty:
    """The certainty of a drift, from the pairs that it was fitted to."""
    one = drift.identification
    built, windows = one.build(model), one.regression_windows
    first, second = (
        drift.modes(windows[:, i + 1] - one.integrate(built, model.values, windows[:, i], 1)[:, 0])
        * drift.whitening
        for i in (0, 1)
    )
    correlation = float((first * second).sum() / (first.square().sum() * second.square().sum()).sqrt())
    # a drift is fitted to single frames, and takes the return from noise of measurement for dynamics
    doubt = UNCLEAR if one.noise is not None or abs(correlation) > MAX_CORRELATION else ""

    def solved(a: Tensor, columns: list[int]) -> Tensor:
        values = torch.zeros_like(model.values)
        values[columns] = solve(a, columns)
        return values

    return assessed(one, model, drift.fit_pairs, drift.shooting_equations_by_row, solved, None, doubt)


def assessed(
    one: "Identification",
    model: "Model",
    states: Tensor,
    equations: EquationsByRow,
    solved: Solve,
    noise: Tensor | None,
    doubt: str,
) -> Certainty:
    """The certainty of a model fitted to states. noise (C,): its standard deviation in the frames; None for a
    drift, whose residuals do not show it."""
    every, some, terms = equations(model, states), states[::2], list(range(len(model.unknowns)))
    now, now_some = solved(every.sum(0), terms), solved(every[::2].sum(0), terms)
    block = block_of(len(one.rows), len(states)).to(every.device)
    width, halves = scatter(every, block, lambda a: solved(a, terms))
    finer = replace(model, num_steps=2 * model.num_steps, is_finer=True)
    width = width + (now - model.values).abs()
    width = width + 2 * (solved(equations(finer, some).sum(0), terms) - now_some).abs()
    if noise is not None:
        rng = generator(0, "noise")
        added = torch.randn(some.shape, generator=rng, dtype=some.dtype).to(some.device)
        added = added * noise.view(-1, *[1] * (some.ndim - 3))
        width = width + noise_width(now_some, solved(equations(model, some + added).sum(0), terms))
    signed = torch.cat([model.values[None], halves]) * model.values.sign()
    size = sizes(one, model, states[:, 0])
    is_small = (size < NEGLIGIBLE) | (size < SMALL) & (signed <= width).any(0)
    large = (~is_small).nonzero().flatten().tolist()
    width = width + (solved(every.sum(0), large) - now).abs() * ~is_small
    if bool(((signed <= width).any(0) & ~is_small).any()):
        doubt = doubt or HALVES
    elif grows(one, model, ~is_small, states[:, 0]):
        doubt = doubt or ILL_POSED
    return Certainty(width, is_small, doubt)


def block_of(num_rows: int, count: int) -> Tensor:
    """The block of each of `count` windows that cycle through num_rows trajectories; all BLOCKS are used if
    there are enough windows."""
    place, num = torch.arange(count), min(num_rows, count)
    return place % num * BLOCKS // num if num >= BLOCKS else place % BLOCKS


def scatter(equations: Tensor, block: Tensor, solved: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The half width by jackknife, and the coefficients of both halves (2, unknowns)."""
    total = equations.sum(0)
    found = torch.stack([solved(total - equations[block == one].sum(0)) for one in block.unique()])
    error = ((found - found.mean(0)).square().sum(0) * (len(found) - 1) / len(found)).sqrt()
    return STUDENT * error, torch.stack([solved(equations[block % 2 == half].sum(0)) for half in (0, 1)])


def noise_width(now: Tensor, noisier: Tensor) -> Tensor:
    """The bias of `now` by noise, from the coefficients `noisier`, which were fitted after the same amount of
    noise was added again."""
    change = (noisier - now).abs() / now.abs().clamp_min(1e-300)
    return torch.where(change < 0.5, now.abs() * change / (1 - 2 * change).clamp_min(1e-9), torch.inf)


def sizes(one: "Identification", model: "Model", s: Tensor) -> Tensor:
    """RMS of every term over that of the time derivative of its channel (unknowns,), at s (rows, C,
    *space)."""
    equation, weight, places = one.with_weights(model)
    terms = equation.terms(s)  # rows, terms, cells
    total = (weight @ terms).square().mean((0, 2)).sqrt()
    size = weight.abs() * terms.square().mean((0, 2)).sqrt() / total.clamp_min(1e-300)[:, None]
    return size.flatten()[places]


def grows(one: "Identification", model: "Model", is_kept: Tensor, s: Tensor) -> bool:
    """Whether shorter waves grow ever faster by the kept terms (ill-posed).

    By the eigenvalues of the derivatives of second order and more, linearised about cells of s (rows, C,
    *space), for waves along axes and diagonals."""
    equation, weight, _ = one.with_weights(replace(model, values=model.values * is_kept))
    powers, _ = equation.terms.values(s)
    every, channels = max(1, s[:, 0].numel() // NUM_CELLS), len(weight)
    for direction in itertools.product((-1, 0, 1), repeat=len(one.settings["space"])):
        symbols = []
        for wave in WAVES:
            symbol = torch.zeros(channels, channels, -(-s[:, 0].numel() // every), dtype=torch.complex128)
            for place, (power, factors) in enumerate(equation.terms.terms):
                [(channel, axes), *more] = factors or [(WAVE, ())]
                if more or channel == WAVE or INVERSE in axes or len(axes) < 2:
                    continue
                size = powers[equation.terms.powers.index(power)].flatten()[::every].cpu()
                size = size * math.prod(1j * wave * direction[axis] for axis in axes)
                symbol[:, channel] += weight[:, place, None].cpu() * size
            symbols.append(symbol.movedim(-1, 0))
        slow, fast = (torch.linalg.eigvals(symbol).real.amax() for symbol in symbols)
        if fast > 2 * slow.clamp_min(0) and fast > 1e-9 * symbols[1].abs().max():
            return True
    return False
