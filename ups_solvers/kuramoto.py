"""Kuramoto-Sivashinsky equation, periodic, stored on a coarse grid: chaos that the stored field does not
determine.

Equation: u_t + u u_x + u_xx + u_xxxx = 0. The mean of u is constant, here zero.
Scheme: Fourier modes in float64, the linear part exact, ETDRK4 with the step of Kassam and Trefethen 2005, on
at least four times as many points as are stored. The stored field has only the modes that the coarse grid
resolves (a sharp filter, which commutes with derivatives).

With 32 points the fastest growing wave, of length 8.9, has 2.5 points. Waves shorter than 7, some of which
grow, are filtered out but act on the stored ones: they cause a quarter of the variance. The distribution of
the future given the filtered state is unknown, so there are no `exact_futures`: forecasts are scored by
proper scores, and rollouts far beyond the Lyapunov time by their statistics. The largest Lyapunov exponent
grows with the domain: 0.047 for length 22, 0.09 for 60 and more (a test), so errors grow by a factor e in
about 11 units of time.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ups_solvers.initial import random_stream
from ups_solvers.modes import coefficients, num_steps, step
from ups_solvers.solver import Solver

LENGTH = 112.0  # at 96 all growing waves are stored, and few starts dominate the error (docs/lab/log.md)
FACTOR = 4  # points of the solver per stored point
SPACING = 1.0  # largest distance of the solver's points; the energy of the last mode kept is then 1e-4
STEP = 0.25  # Kassam and Trefethen 2005
SPIN = 150.0  # before the first frame, from random waves
START = 1.0  # their standard deviation


def filtered(modes: Tensor, resolution: int) -> Tensor:
    """Values at `resolution` points of the modes (..., m) below resolution / 2."""
    kept = modes[..., : resolution // 2 + 1].clone()
    kept[..., (resolution + 1) // 2 :] = 0
    return torch.fft.irfft(kept, n=resolution, norm="forward")


@functools.lru_cache(maxsize=8)
def equation(num_points: int, length: float, dt: float) -> tuple[Callable[[Tensor], Tensor], tuple]:
    """N of the modes 0 .. num_points // 2 (those from num_points / 3 on are zero), and `coefficients` of a
    step."""
    number = torch.arange(num_points // 2 + 1, dtype=torch.float64)
    q = 2 * math.pi / length * number
    flux = torch.where(number * 3 < num_points, -0.5j * q, 0)

    def nonlinear(modes: Tensor) -> Tensor:
        u = torch.fft.irfft(modes, n=num_points, norm="forward")
        return torch.fft.rfft(u * u, norm="forward") * flux

    return nonlinear, coefficients(q.square() - q.pow(4), dt)


def evolve(modes: Tensor, length: float, spacing: float, num_frames: int) -> Tensor:
    """The next frames (batch, num_frames, m), `spacing` apart, after the modes (batch, m)."""
    num = num_steps(spacing, STEP)
    nonlinear, parts = equation(2 * (modes.shape[-1] - 1), length, spacing / num)
    frames = []
    for _ in range(num_frames):
        for _ in range(num):
            modes = step(modes, nonlinear, parts)
        frames.append(modes)
    return torch.stack(frames, 1)


def start(
    streams: Sequence[np.random.Generator], num_points: int, length: float, spin: float = SPIN
) -> Tensor:
    """Modes of states on the attractor, (batch, num_points // 2 + 1): random waves that grow, after a run-up
    of `spin`."""
    growing = max(1, int(length / (2 * math.pi)))  # wave numbers below one
    drawn = np.stack([stream.standard_normal((growing, 2)) for stream in streams])
    modes = torch.zeros(len(streams), num_points // 2 + 1, dtype=torch.complex128)
    modes[:, 1 : growing + 1] = torch.view_as_complex(torch.from_numpy(drawn)) * START / (2 * growing**0.5)
    return evolve(modes, length, spin, 1)[:, 0]


def simulate(
    seed: int, indices: Sequence[int], *, resolution: int, num_frames: int, parameter: None, t_end: float
) -> Tensor:
    """The filtered u, (n, num_frames, 1, resolution)."""
    num_points = FACTOR * resolution
    while num_points * SPACING < LENGTH:
        num_points *= 2
    modes = start([random_stream(seed, index) for index in indices], num_points, LENGTH)[:, None]
    if num_frames > 1:
        later = evolve(modes[:, 0], LENGTH, t_end / (num_frames - 1), num_frames - 1)
        modes = torch.cat([modes, later], 1)
    return filtered(modes, resolution)[:, :, None]


SOLVERS = {"ks1d_coarse": Solver(trajectory=simulate, cells_at_once=2**12)}
