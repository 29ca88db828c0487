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

Each route to an equation says what differs (`certainty` in differences.py, shooting.py, weak.py, drift.py).
The construction is ours.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ups_discovery.integrator import Integrator, Model
from ups_discovery.least_squares import solve
from ups_discovery.seeds import generator
from ups_discovery.statement import SMALL
from ups_discovery.terms import INVERSE, WAVE

# Why an equation may not be stated, in words.
HALVES = "its terms differ between halves of the data"
OTHERS = "other terms explain the data as well"
UNCLEAR = "it leaves too much of what happens from one frame to the next unexplained"
ILL_POSED = "in it the shortest waves grow without bound"

# (model, states (windows, frames, C, *space)) to the normal equations of every window
EquationsByRow = Callable[[Model, Tensor], Tensor]
# (normal equations, places of the terms that are used) to the coefficients of all terms, 0 for the others
Solve = Callable[[Tensor, list[int]], Tensor]

BLOCKS = 8
STUDENT = 2.36  # 95 %, BLOCKS - 1 degrees of freedom
NEGLIGIBLE = 1e-3  # of the RMS of the time derivative: a term below it is never stated
WAVES = 1e3, 1e4  # wave numbers in radians per cell, beyond those of any grid
NUM_CELLS = 256  # about which the equation is linearised


@dataclass(frozen=True)
class Certainty:
    """half_width (unknowns,): of the interval of every coefficient, in the units of the fit; others
    (unknowns,): the coefficients that a fit with more exact derivatives and steps finds, or the weak form;
    is_negligible (unknowns,): the term is too small to be stated; doubt: why the equation may not be stated,
    "" if it may."""

    half_width: Tensor
    others: Tensor
    is_negligible: Tensor
    doubt: str = ""


def stepped(model: Model) -> Solve:
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


def assessed(
    one: Integrator,
    model: Model,
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
    block = block_of(len(one.windows.rows), len(states)).to(every.device)
    width, halves = scatter(every, block, lambda a: solved(a, terms))
    finer = replace(model, num_steps=2 * model.num_steps, is_finer=True)
    width = width + (now - model.values).abs()
    change = solved(equations(finer, some).sum(0), terms) - now_some
    width = width + 2 * change.abs()
    if noise is not None:
        rng = generator(0, "noise")
        added = torch.randn(some.shape, generator=rng, dtype=some.dtype).to(some.device)
        added = added * noise.view(-1, *[1] * (some.ndim - 3))
        width = width + noise_width(now_some, solved(equations(model, some + added).sum(0), terms))
    signed = torch.cat([model.values[None], halves]) * model.values.sign()
    is_small = too_small(sizes(one, model, states[:, 0]), (signed <= width).any(0))
    large = (~is_small).nonzero().flatten().tolist()
    width = width + (solved(every.sum(0), large) - now).abs() * ~is_small
    is_uncertain = (signed <= width).any(0)
    others = model.values + change
    return concluded(one, model, states[:, 0], width, others, is_uncertain, is_small, doubt)


def too_small(size: Tensor, is_uncertain: Tensor) -> Tensor:
    """Whether terms of these `sizes` are not stated."""
    return (size < NEGLIGIBLE) | (size < SMALL) & is_uncertain


def concluded(
    one: Integrator,
    model: Model,
    s: Tensor,
    width: Tensor,
    others: Tensor,
    is_uncertain: Tensor,
    is_small: Tensor,
    doubt: str,
) -> Certainty:
    """The certainty by half widths: doubted as well if a term that is not small is uncertain, or if short
    waves grow at s (rows, C, *space)."""
    if bool((is_uncertain & ~is_small).any()):
        doubt = doubt or HALVES
    elif grows(one, model, ~is_small, s):
        doubt = doubt or ILL_POSED
    return Certainty(width, others, is_small, doubt)


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


def sizes(one: Integrator, model: Model, s: Tensor) -> Tensor:
    """RMS of every term over that of the time derivative of its channel (unknowns,), at s (rows, C,
    *space)."""
    equation, weight, places = one.with_weights(model)
    terms = equation.terms(s)  # rows, terms, cells
    total = (weight @ terms).square().mean((0, 2)).sqrt()
    size = weight.abs() * terms.square().mean((0, 2)).sqrt() / total.clamp_min(1e-300)[:, None]
    return size.flatten()[places]


def grows(one: Integrator, model: Model, is_kept: Tensor, s: Tensor) -> bool:
    """Whether shorter waves grow ever faster by the kept terms (ill-posed).

    By the eigenvalues of the derivatives of second order and more, linearised about cells of s (rows, C,
    *space), for waves along axes and diagonals."""
    equation, weight, _ = one.with_weights(replace(model, values=model.values * is_kept))
    powers, _ = equation.terms.values(s)
    every, channels = max(1, s[:, 0].numel() // NUM_CELLS), len(weight)
    for direction in itertools.product((-1, 0, 1), repeat=len(one.space)):
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
