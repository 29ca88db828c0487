"""Viscous Burgers equation on [0, 1), periodic.

Equation: u_t + (u^2/2)_x = c u_xx with c = nu / pi. Scheme: exact up to quadrature. With a potential psi,
psi_x = u, the Cole-Hopf transform phi = exp(-psi / 2c) obeys phi_t = c phi_xx (Hopf 1950, Cole 1951), so a
step dt of any length is a convolution with a Gaussian:

    psi(x, t + dt) = -2c log  integral exp(-psi(y, t) / 2c) exp(-(x - y)^2 / 4c dt) / sqrt(4 pi c dt) dy .

The integral becomes a trapezoidal sum, which is spectrally accurate once the integrand is resolved. All its
terms are positive, so it keeps full relative accuracy although phi spans hundreds of orders of magnitude.
psi(x + 1) = psi(x) + mean u. psi is known at cell faces: (psi_{i+1} - psi_i) / dx is the exact cell average,
as in PDEBench's finite-volume files, and the mean of u is conserved to rounding.
"""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from ups_solvers.initial import Wave, sample_wave
from ups_solvers.solver import Solver

BLOCK_TARGETS = 64  # targets that share one reference value: one matrix product sums for all of them
TAIL = 8.5  # standard deviations of the Gaussian kept: exp(-8.5^2 / 2) = 2e-16
RESOLVED = 1.2  # cells per standard deviation: trapezoid of a Gaussian to 2 exp(-2 pi^2 1.2^2) = 1e-12
MAX_EXPONENT = 600.0  # exp(+-600) times any sum here is inside float64's exp(+-708)
MIN_FINE = 16384  # faces on which the first potential is integrated
# cells per standard deviation in the first step, where u0 has kinks and a jump: cost 3e-8 in u (measured)
FIRST_STEP_CELLS = 64
GAUSS_POINTS = 3


def potential(wave: Wave, num_faces: int) -> tuple[Tensor, float]:
    """psi(x) = integral of u0 from 0 to x, at x = j / num_faces, (num_faces,) float64, and the mean of u0.

    Gauss-Legendre quadrature in every cell; a cell with a kink of u0 (absolute value) is cut at the kink.
    """
    faces = torch.arange(num_faces + 1, dtype=torch.float64) / num_faces
    left, right = faces[:-1], faces[1:]
    ends = (left, _zeros(wave, left, right), right) if wave.use_abs else (left, right)
    cell = torch.zeros(num_faces, dtype=torch.float64)
    for node, weight in zip(*np.polynomial.legendre.leggauss(GAUSS_POINTS), strict=True):
        for start, end in itertools.pairwise(ends):
            half = 0.5 * (end - start)
            cell += wave.on_unit_interval(start + half * (1 + float(node))) * (half * float(weight))
    psi = torch.cumsum(cell, 0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), psi[:-1]]), float(psi[-1])


def _zeros(wave: Wave, left: Tensor, right: Tensor) -> Tensor:
    """The zero of the signed sum inside each cell, by bisection; the middle of cells without one."""
    cut = 0.5 * (left + right)
    has_zero = wave.signed_sum(left) * wave.signed_sum(right) < 0
    low, high = left[has_zero], right[has_zero]
    low_sign = wave.signed_sum(low).sign()
    for _ in range(40):  # cells are below 1e-4: 40 halvings reach rounding
        middle = 0.5 * (low + high)
        is_low = wave.signed_sum(middle).sign() == low_sign
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    cut[has_zero] = 0.5 * (low + high)
    return cut


def _plan(
    max_speed: float, diffusivity: float, dt: float, resolution: int, num_faces: int
) -> tuple[int, int]:
    """(steps per frame, faces): the fewest steps and coarsest grid that resolve and do not overflow.

    After the first step u_x <= 1/t (Oleinik), so the integrand is never narrower than sqrt(c * step).
    """
    num_substeps = 1
    while True:
        step = dt / num_substeps
        grid = resolution
        while math.sqrt(diffusivity * step) * grid < RESOLVED:
            grid *= 2
        if grid > num_faces:
            raise ValueError(
                f"nu/pi = {diffusivity:.3g} with frames {dt:.3g} apart needs a finer grid than {num_faces} "
                "faces; expected a nu that those resolve (ups_solvers.burgers); use a larger nu."
            )
        reach = max_speed * step + TAIL * math.sqrt(2 * diffusivity * step) + 0.5 * BLOCK_TARGETS / grid
        if max_speed * reach / (2 * diffusivity) <= MAX_EXPONENT:
            return num_substeps, grid
        num_substeps *= 2


class _Step:
    """One step of the heat semigroup, from potentials at `sources` faces to potentials at `targets` faces."""

    def __init__(self, step: float, diffusivity: float, max_speed: float, sources: int, targets: int) -> None:
        self.stride = sources // targets
        self.two_c = 2 * diffusivity
        # the minimising y lies within max_speed * step of x (maximum principle), the Gaussian tail beyond it
        self.reach = math.ceil((max_speed * step + TAIL * math.sqrt(2 * diffusivity * step)) * sources)
        self.width = 2 * self.reach + self.stride * (BLOCK_TARGETS - 1) + 1
        source = torch.arange(self.width, dtype=torch.float64) - self.reach
        target = torch.arange(BLOCK_TARGETS, dtype=torch.float64) * self.stride
        distance = (source[:, None] - target[None, :]) / sources
        self.weights = torch.exp(-distance.square() / (4 * diffusivity * step))
        self.weights /= sources * math.sqrt(4 * math.pi * diffusivity * step)

    def __call__(self, psi: Tensor, mean: float) -> Tensor:
        """psi at the sources' faces (sources,) -> psi one step later at the targets' faces (targets,)."""
        sources, shift = psi.shape[0], BLOCK_TARGETS * self.stride
        targets = sources // self.stride
        num_blocks = math.ceil(targets / BLOCK_TARGETS)
        before = math.ceil(self.reach / sources)
        needed = (num_blocks - 1) * shift + self.width
        first = before * sources - self.reach
        periods = torch.arange(-before, math.ceil((first + needed) / sources) - before, dtype=torch.float64)
        extended = (psi[None, :] + mean * periods[:, None]).reshape(-1)
        windows = extended[first : first + needed].unfold(0, self.width, shift)
        reference = windows[:, self.width // 2, None]
        sums = torch.exp((reference - windows) / self.two_c) @ self.weights
        return (reference - self.two_c * torch.log(sums)).reshape(-1)[:targets]


def _cell_averages(psi: Tensor, mean: float, resolution: int) -> Tensor:
    """(psi_{i+1} - psi_i) / dx at `resolution` cells from psi at a multiple of as many faces."""
    faces = psi[:: psi.shape[0] // resolution]
    return torch.diff(faces, append=faces[:1] + mean) * resolution


def evolve(
    psi: Tensor, mean: float, *, diffusivity: float, dt: float, num_frames: int, resolution: int
) -> Tensor:
    """Cell averages of u of one trajectory at t = 0, dt, 2 dt, ...: (num_frames, resolution), float64.

    psi: potential at the faces j / m, j = 0 .. m-1, (m,) float64, with m a power of two times `resolution`; a
    larger m makes the first step more accurate. mean: psi(1) - psi(0). diffusivity: c = nu / pi. dt: time
    between frames. Raises ValueError if m is too small for the diffusivity.
    """
    num_faces = psi.shape[0]
    frames = torch.empty(num_frames, resolution, dtype=torch.float64)
    frames[0] = _cell_averages(psi, mean, resolution)
    if num_frames == 1:
        return frames
    max_speed = float(torch.diff(psi, append=psi[:1] + mean).abs().max()) * num_faces
    num_substeps, grid = _plan(max_speed, diffusivity, dt, resolution, num_faces)
    step = dt / num_substeps
    sources = grid
    while sources < num_faces and math.sqrt(2 * diffusivity * step) * sources < FIRST_STEP_CELLS:
        sources *= 2
    advance = _Step(step, diffusivity, max_speed, sources, grid)
    psi = psi[:: num_faces // sources]
    for frame in range(1, num_frames):
        for _ in range(num_substeps):
            psi = advance(psi, mean)
            if sources != grid:  # u is smooth after the first step: the coarse grid suffices
                sources, advance = grid, _Step(step, diffusivity, max_speed, grid, grid)
        frames[frame] = _cell_averages(psi, mean, resolution)
    return frames


def trajectory(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: float, t_end: float
) -> Tensor:
    """Cell averages of u, (num_frames, 1, resolution).

    parameter: nu, as in PDEBench's file names; the diffusion coefficient is nu / pi. Raises ValueError also
    for a nu so small that the solution cannot be resolved.
    """
    num_faces = resolution
    while num_faces < MIN_FINE:
        num_faces *= 2
    psi, mean = potential(sample_wave(seed, index), num_faces)
    return evolve(
        psi,
        mean,
        diffusivity=parameter / math.pi,
        dt=t_end / max(num_frames - 1, 1),
        num_frames=num_frames,
        resolution=resolution,
    )[:, None]


def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
    """Cell averages from u (n, 1, cells), which is taken as constant within a cell."""
    finer = 1
    while finer * u.shape[-1] < MIN_FINE:
        finer *= 2
    psi = torch.cumsum(u.double().repeat_interleave(finer, -1), -1) / (finer * u.shape[-1])
    later = [
        evolve(
            torch.cat([one.new_zeros(1), one[:-1]]),
            float(one[-1]),
            diffusivity=parameter / math.pi,
            dt=dt,
            num_frames=num_frames + 1,
            resolution=u.shape[-1],
        )[1:, None]
        for one in psi[:, 0]
    ]
    return torch.stack(later).to(u)


SOLVERS = {"burgers1d": Solver(trajectory=trajectory, parameter="nu", integrate=integrate)}
advance = SOLVERS["burgers1d"].step
