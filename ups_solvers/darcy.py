"""Steady Darcy flow on (0, 1)^2.

Equation: -div(a grad u) = f, with u = 0 on the wall.

Scheme: cell-centred finite volumes. The flux through an inner face is (mean of the two cells' a) *
(difference of u) / h, as in PDEBench; through a wall face it is a * u / (h / 2), as u is zero at the wall (in
PDEBench, one cell outside). Conjugate gradients solve it, preconditioned with the inverse for a = 1, which
sine transforms diagonalise; so the number of iterations depends on the contrast max a / min a, not on the
grid.

PDEBench's files hold the relaxation u_t = div(a grad u) + f from a random start, stopped at about t = 1.75.
It is not yet steady where a is small, and depends on the start if f is small.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups_solvers.initial import cell_centres, eigenbasis, random_stream
from ups_solvers.solver import Solver

NUM_BUMPS = 5
MAX_SQUARED_WIDTH = 0.5
HIGH, LOW = 1.0, 0.1  # HIGH where the sum of bumps is above its mean, as in PDEBench
BATCH = 16  # solved together: 0.7 ms each at 32 x 32, 4.2 ms alone; more exceed the processor's cache


@functools.cache
def _mean_of_bumps() -> float:
    """The mean of the sum of bumps over space, centres and widths: 5 int_0^1 I(w/2)^2 dw.

    I(s) = int int_0^1 exp(-(x-c)^2 / s) dx dc = sqrt(pi s) erf(1/sqrt s) - s (1 - exp(-1/s)). The
    substitution w = z^2 makes the integrand smooth.
    """
    nodes, weights = np.polynomial.legendre.leggauss(40)
    z = torch.from_numpy(0.5 * (nodes + 1))
    s = MAX_SQUARED_WIDTH * z.square()
    axis = (math.pi * s).sqrt() * torch.erf(s.rsqrt()) - s * (1 - torch.exp(-1 / s))
    return NUM_BUMPS * float(z * axis.square() @ torch.from_numpy(weights))


def sample_coefficient(seed: int, index: int, resolution: int) -> Tensor:
    """a(x, y) of trajectory `index`, with two values, (resolution, resolution), float64.

    a is 1 where a sum of five bumps exp(-r^2 / s) exceeds its mean and 0.1 elsewhere; centres are uniform in
    the square, s = U(0,1) / 2. PDEBench takes the mean over its batch, so a sample depends on the others; we
    take the mean of the distribution, which is the limit of a large batch.
    """
    draws = random_stream(seed, index).uniform(0.0, 1.0, size=(3, NUM_BUMPS))
    x = cell_centres(resolution)
    total = torch.zeros(resolution, resolution, dtype=torch.float64)
    for bump_x, bump_y, width in draws.T.tolist():
        s = MAX_SQUARED_WIDTH * width
        total += torch.exp(-((x - bump_x).square()[:, None] + (x - bump_y).square()[None, :]) / s)
    return torch.where(total > _mean_of_bumps(), HIGH, LOW).double()


def apply_operator(a: Tensor, u: Tensor) -> Tensor:
    """-div(a grad u) at the cells, for a and u of shape (..., nx, ny), float64; cells are 1/nx by 1/ny."""
    result = torch.zeros_like(u)
    for axis in (-2, -1):
        n = u.shape[axis]
        first, last = u.narrow(axis, 0, n - 1), u.narrow(axis, 1, n - 1)
        face = 0.5 * (a.narrow(axis, 0, n - 1) + a.narrow(axis, 1, n - 1))
        flux = face * (last - first)
        wall_first = 2 * a.narrow(axis, 0, 1) * u.narrow(axis, 0, 1)
        wall_last = -2 * a.narrow(axis, n - 1, 1) * u.narrow(axis, n - 1, 1)
        result -= torch.diff(torch.cat([wall_first, flux, wall_last], dim=axis), dim=axis) * (n * n)
    return result


def _solve_batch(a: Tensor, source: Tensor, scale: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    """Preconditioned conjugate gradients (Hestenes and Stiefel 1952) for n samples, all (n, nx, ny), float64.

    The preconditioner is the inverse for a = 1 between two multiplications by `scale`. A converged sample
    keeps its solution while others iterate.
    """
    (basis_x, eigenvalue_x), (basis_y, eigenvalue_y) = (eigenbasis(n, is_zero=True) for n in a.shape[1:])
    inverse = 1 / (eigenvalue_x[:, None] + eigenvalue_y[None, :])

    def precondition(residual: Tensor) -> Tensor:
        return scale * (basis_x.T @ (basis_x @ (scale * residual) @ basis_y.T * inverse) @ basis_y)

    def dot(x: Tensor, y: Tensor) -> Tensor:
        return torch.sum(x * y, dim=(-2, -1), keepdim=True)

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)

    u = torch.zeros_like(source)
    residual = source.clone()
    goal = tolerance * norm(source)
    is_done = goal == 0
    tiny = torch.finfo(torch.float64).tiny  # a source of zeros has products of zero
    direction, product = None, None
    for _ in range(max_iterations):
        z = precondition(residual)
        new_product = dot(residual, z)
        direction = z if direction is None else z + (new_product / product.clamp_min(tiny)) * direction
        product = new_product
        image = apply_operator(a, direction)
        length = torch.where(is_done, 0.0, product / dot(direction, image))
        u += length * direction
        residual -= length * image
        is_done = is_done | (norm(residual) <= goal)
        if bool(is_done.all()):
            residual = source - apply_operator(a, u)  # the true one, as the recursion accumulates rounding
            is_done = norm(residual) <= goal
            if bool(is_done.all()):
                return u
            direction = None
    contrast = float((a.amax((-2, -1)) / a.amin((-2, -1))).max())
    reached = float((norm(source - apply_operator(a, u)) / goal).nan_to_num(0.0).max()) * tolerance
    raise RuntimeError(
        f"conjugate gradients stopped at a relative residual of {reached:.1e} after {max_iterations} "
        f"iterations; expected {tolerance:.1e} (ups_solvers.darcy.solve, max a / min a = {contrast:.3g}); "
        "allow more iterations or reduce the contrast of a."
    )


def solve(
    a: Tensor,
    source: Tensor,
    *,
    tolerance: float = 1e-10,
    max_iterations: int = 1000,
    is_smooth: bool = False,
    batch: int = 1,
) -> Tensor:
    """The solution u of -div(a grad u) = source with u = 0 on the wall of the unit square, (..., nx, ny),
    float64.

    a: (..., nx, ny), positive; source: broadcasts to a. tolerance: relative residual in the 2-norm.
    is_smooth: precondition with a^(-1/2) (-Laplacian)^-1 a^(-1/2) (Concus and Golub 1973), which takes a
    quarter of the iterations for an a without jumps (darcy2d_grf: 14 instead of 57) and twice as many or more
    for one with jumps. batch: samples solved together; with 1 the result is bitwise independent of the other
    samples, with 16 small grids take a fifth of the time. Raises RuntimeError if the tolerance is not
    reached.
    """
    a = a.double()
    source = source.double().expand_as(a).reshape(-1, *a.shape[-2:])
    u = torch.empty_like(source)
    samples = a.reshape(-1, *a.shape[-2:])
    for first in range(0, len(samples), batch):
        rows = slice(first, first + batch)
        coefficient = samples[rows].clone()
        scale = coefficient.rsqrt() if is_smooth else torch.ones_like(coefficient)
        u[rows] = _solve_batch(coefficient, source[rows].clone(), scale, tolerance, max_iterations)
    return u.reshape(a.shape)


def steady(coefficient: Callable[[int, int, int], Tensor], is_smooth: bool, **facts: Any) -> Solver:
    """The solver of a steady task with channels (a, u), space axes (x, y). coefficient(seed, index,
    resolution): a; is_smooth: as in `solve`.

    parameter: beta, the constant source. u is proportional to it and a independent of it. The solution is one
    frame, whatever num_frames and t_end are.
    """

    def trajectory(seed: int, index: int, *, resolution: int, parameter: float, **_: Any) -> Tensor:
        """(1, 2, resolution, resolution)."""
        a = coefficient(seed, index, resolution)
        return torch.stack([a, solve(a, torch.full_like(a, parameter), is_smooth=is_smooth)])[None]

    def integrate(a: Tensor, *, parameter: float, **_: Any) -> Tensor:
        """(n, 1, 1, nx, ny): the solution u for each a (n, 1, nx, ny)."""
        source = torch.full_like(a[:, 0], parameter)
        return solve(a[:, 0], source, is_smooth=is_smooth, batch=BATCH)[:, None, None].to(a)

    return Solver(
        trajectory=trajectory,
        parameter="beta",
        channels=2,
        ndim=2,
        is_steady=True,
        integrate=integrate,
        **facts,
    )


SOLVERS = {"darcy2d": steady(sample_coefficient, is_smooth=False)}
