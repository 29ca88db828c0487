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
from collections.abc import Callable, Iterator
from typing import Any

from ups.common.lazy import Tensor, np, torch
from ups.tasks.initial import cell_centres, eigenbasis, random_stream, solver
from ups.tasks.task import Array, Finding, Task
from ups_discovery.boundary import DIRICHLET

NUM_BUMPS = 5
MAX_SQUARED_WIDTH = 0.5
HIGH, LOW = 1.0, 0.1  # HIGH where the sum of bumps is above its mean, as in PDEBench
BATCH = 16  # solved together: 0.7 ms each at 32 x 32, 4.2 ms alone; more exceed the processor's cache
NUM_SAMPLED = 8  # trajectories, equally spaced in the file, that the check solves again
UNSTEADY = 0.05  # relative distance from the steady solution; PDEBench's wall alone makes 0.02


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
    (basis_x, eigenvalue_x), (basis_y, eigenvalue_y) = (eigenbasis(n, DIRICHLET) for n in a.shape[1:])
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
        f"iterations; expected {tolerance:.1e} (ups.tasks.darcy.solve, max a / min a = {contrast:.3g}); "
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


@solver("beta", channels=2, ndim=2, is_steady=True)
def simulate(seed: int, index: int, *, resolution: int, parameter: float, **_: Any) -> Tensor:
    """Channels (a, u), space axes (x, y): (1, 2, resolution, resolution).

    parameter: beta, the constant source. u is proportional to it and a independent of it. The steady solution
    is one frame, whatever num_frames and t_end are.
    """
    a = sample_coefficient(seed, index, resolution)
    return torch.stack([a, solve(a, torch.full_like(a, parameter))])[None]


def integral(is_smooth: bool) -> Callable[..., Tensor]:
    """A task's `integrate`. is_smooth: as in `solve`."""

    def integrate(a: Tensor, *, parameter: float, **_: Any) -> Tensor:
        """(n, 1, 1, nx, ny): the solution u for each a (n, 1, nx, ny)."""
        source = torch.full_like(a[:, 0], parameter)
        return solve(a[:, 0], source, is_smooth=is_smooth, batch=BATCH)[:, None, None].to(a)

    return integrate


def is_solution(data: Any, scan: Any) -> Iterator[Finding]:
    """Solutions u that do not solve -div(a grad u) = beta."""
    _, u = data.stratified_rows(NUM_SAMPLED)
    a, u_stored = torch.from_numpy(u[:, 0]).double().unbind(1)
    if not bool((a > 0).all()):
        yield Finding(
            "error",
            f"the coefficient falls to {float(a.min()):g}; expected it positive",
            str(data.path),
            "write a, not its logarithm, to the array nu",
        )
        return
    u_steady = solve(a, torch.full_like(a, data.parameter), tolerance=1e-6)
    error = ((u_stored - u_steady).flatten(1).norm(dim=1) / u_steady.flatten(1).norm(dim=1)).max()
    if error > UNSTEADY:
        yield Finding(
            "warning",
            f"u is up to {float(error):.2g} (relative) from the solution of -div(a grad u) = beta: not yet "
            "steady, as published files are (a relaxation stopped at t = 1.75), or of another equation",
            str(data.path),
            DARCY.remedy,
        )


DARCY = Task(
    name="darcy2d",
    fields=("u",),
    ndim=2,
    boundary=DIRICHLET,
    layout="arrays",
    arrays=(Array("nu", steady=True), Array("tensor")),
    filename="2D_DarcyFlow_beta{}_Train.hdf5",
    parameters=("beta",),
    equation="-∇·(a ∇u) = beta",
    inputs=("a",),
    t_end=0.0,
    num_frames=1,
    is_symmetric=True,
    simulate=simulate,
    integrate=integral(is_smooth=False),
    checks=(is_solution,),
    published={
        "2D_DarcyFlow_beta0.01_Train.hdf5": (133217, "d05c287d4c0b7d3178b0097084238251"),
        "2D_DarcyFlow_beta0.1_Train.hdf5": (133218, "294f9a03a4aa16b0e386469ca8b471be"),
        "2D_DarcyFlow_beta1.0_Train.hdf5": (133219, "81694ed31306ff2e5f6b76349b0b4389"),
        "2D_DarcyFlow_beta10.0_Train.hdf5": (133220, "a7f23cf8011fc211b180828af39b7d1a"),
        "2D_DarcyFlow_beta100.0_Train.hdf5": (133221, "7c09f3b1bb097737d3fd52ffb0c6f1c8"),
    },
    defaults={"space_stride": 2},  # that of PDEBench's benchmark
)
FAMILY = (DARCY,)
