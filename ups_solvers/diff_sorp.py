"""Diffusion-sorption of a solute in the water of a porous medium, on (0, 1).

Equation: R(u) u_t = D u_xx,  R(u) = 1 + (1 - por) / por rho_s k_f n_f (u + 1e-6)^(n_f - 1) (Freundlich's
isotherm), with u = 1 on the left and u = -D u_x on the right. At t = 0, u is a constant ~ U(0, 0.2). The
content theta(u), theta' = R, of a cell changes by the flux -D u_x alone. PDEBench writes the wall values into
ghost cells, so its walls are half a cell outside of (0, 1); ours are half a published cell outside, on any
grid.

Scheme: PDEBench's second-order finite volumes for theta, on a grid finer by an odd factor, so that the
centres of our cells are centres of the fine ones. Time: RKL2, the stabilised second-order
Runge-Kutta-Legendre method (Meyer, Balsara and Aslam 2014), whose number of stages grows as the root of the
step. A step is a fixed fraction of the elapsed time, so that the layers at the walls are resolved from the
start. In numpy: torch takes five times as long for arrays this small. PDEBench uses RK45 at tolerances 1e-3
and 1e-6.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from ups_solvers.initial import NOMINAL_POINTS, random_stream
from ups_solvers.solver import Solver

DIFFUSION = 5e-4
POROSITY = 0.29
BULK_DENSITY = 2880.0
FREUNDLICH_K = 3.5e-4
FREUNDLICH_N = 0.874
MIN_U = 1e-6  # keeps R finite at u = 0 (PDEBench)
MAX_START = 0.2
LEFT = 1.0
MIN_CELLS = 512  # to solve on: an error of 7e-5 in the first frame, of 2e-5 on twice as many (measured)
WALL = 0.5 / NOMINAL_POINTS  # how far outside of (0, 1) the walls are
OCTAVES = 12  # the steps up to the first frame grow from 2^-12 of it, in octaves
STEPS_PER_OCTAVE = 12  # also later, relative to the elapsed time: an error of 3e-5 (measured)
MARGIN = 1.05  # of the stability bound


def sorbed_capacity(exponent: float) -> float:
    """The factor of (u + 1e-6)^(n_f - 1) in R. exponent: n_f."""
    return (1 - POROSITY) / POROSITY * BULK_DENSITY * FREUNDLICH_K * exponent


def content(u: np.ndarray) -> np.ndarray:
    """theta(u), the dissolved and sorbed content; theta' = R."""
    return u + sorbed_capacity(FREUNDLICH_N) / FREUNDLICH_N * (u + MIN_U) ** FREUNDLICH_N


def volumes(num_cells: int) -> np.ndarray:
    """Lengths of the cells, (n,); the first and last extend halfway from the centre to the wall."""
    lengths = np.full(num_cells, 1 / num_cells)
    lengths[[0, -1]] = 0.5 * (1.5 / num_cells + WALL)
    return lengths


def slopes(u: np.ndarray) -> np.ndarray:
    """u_x at the left wall, the faces between cells and the right wall, (n + 1,)."""
    gap = 0.5 / len(u) + WALL
    slope = np.empty(len(u) + 1)
    np.subtract(u[1:], u[:-1], out=slope[1:-1])
    slope *= len(u)
    slope[0] = (u[0] - LEFT) / gap
    slope[-1] = -u[-1] / (DIFFUSION + gap)  # u = -D u_x at the wall, u_x along the gap
    return slope


@functools.lru_cache(maxsize=256)
def _stages(num: int) -> tuple[float, list[tuple[float, float, float]], np.ndarray]:
    """Coefficients of RKL2 with `num` stages: mu~ of the first; (mu, nu, mu~) of each other; their weights of
    u and of its rate at the start of the step, (num - 1, 2)."""
    b = [1 / 3, 1 / 3] + [(j * j + j - 2) / (2 * j * (j + 1)) for j in range(2, num + 1)]
    w = 4 / (num * num + num - 2)
    rows, weights = [], []
    for j in range(2, num + 1):
        mu, nu = (2 * j - 1) / j * b[j] / b[j - 1], -(j - 1) / j * b[j] / b[j - 2]
        rows.append((mu, nu, mu * w))
        weights.append((1 - mu - nu, -(1 - b[j - 1]) * mu * w))
    return b[1] * w, rows, np.array(weights)


def evolve(
    u: np.ndarray, *, dt: float, num_frames: int, exponent: float = FREUNDLICH_N, is_begun: bool = False
) -> np.ndarray:
    """u of one trajectory at t = 0, dt, 2 dt, ...: (num_frames, n), float64.

    u: in the cells, (n,), within [0, 1]. exponent: n_f; with 1 the sorption is linear and R constant.
    is_begun: u already has layers at the walls; then the first frame takes STEPS_PER_OCTAVE steps.
    """
    capacity, scale = sorbed_capacity(exponent), DIFFUSION / volumes(len(u))
    stiffness = 4 * DIFFUSION * len(u) ** 2 / (1 + capacity * (LEFT + MIN_U) ** (exponent - 1))

    def rate(u: np.ndarray) -> np.ndarray:
        retardation = np.maximum(u, 0.0)
        retardation += MIN_U
        np.power(retardation, exponent - 1, out=retardation)
        retardation *= capacity
        retardation += 1
        slope = slopes(u)
        change = slope[1:] - slope[:-1]
        change *= scale
        change /= retardation
        return change

    def advance(u: np.ndarray, step: float) -> np.ndarray:
        # stable while step * stiffness <= (num^2 + num - 2) / 2; odd numbers damp
        num = max(3, math.ceil(0.5 * (math.sqrt(9 + 8 * MARGIN * step * stiffness) - 1))) | 1
        first, rows, weights = _stages(num)
        rate_0 = rate(u)
        fixed = weights @ np.stack([u, step * rate_0])
        before, now = u, u + first * step * rate_0
        for (mu, nu, of_rate), after in zip(rows, fixed, strict=True):
            change = rate(now)
            change *= of_rate * step
            after += change
            after += mu * now
            after += nu * before
            before, now = now, after
        return now

    frames = np.empty((num_frames, len(u)))
    frames[0] = u
    for frame in range(1, num_frames):
        is_first = frame == 1 and not is_begun
        octaves = [min(octave, OCTAVES) for octave in range(OCTAVES + 1, 0, -1)] if is_first else [0]
        num = STEPS_PER_OCTAVE if frame == 1 else math.ceil(STEPS_PER_OCTAVE / (frame - 1))
        for octave in octaves:
            for _ in range(num):
                u = advance(u, dt * 2.0**-octave / num)
        frames[frame] = u
    return frames


def sample_start(seed: int, index: int) -> float:
    """The constant initial value of trajectory `index`."""
    return MAX_START * float(random_stream(seed, index).uniform())


def trajectory(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: None, t_end: float
) -> Tensor:
    """u at the centres, (num_frames, 1, resolution)."""
    finer = math.ceil(MIN_CELLS / resolution) | 1
    u = np.full(resolution * finer, sample_start(seed, index))
    frames = evolve(u, dt=t_end / max(num_frames - 1, 1), num_frames=num_frames)
    return torch.from_numpy(frames[:, None, finer // 2 :: finer].copy())


def integrate(u: Tensor, *, parameter: None, dt: float, num_frames: int) -> Tensor:
    """u from u (n, 1, cells) on, with the walls at a distance of `WALL`."""
    starts = u[:, 0].double().clamp(0, LEFT).numpy()
    later = [evolve(one, dt=dt, num_frames=num_frames + 1, is_begun=True)[1:, None] for one in starts]
    return torch.from_numpy(np.stack(later)).to(u)


SOLVERS = {"diff_sorp1d": Solver(trajectory=trajectory, integrate=integrate)}
