"""Linear advection on [0, 1), periodic.

Equation: u_t + beta u_x = 0. Scheme: the exact solution u(x, t) = u0(x - beta t). PDEBench's files hold a
second-order finite-volume solution, whose dispersion error at t = 2 is 8e-4 (smooth waves) to 2e-2 (windowed
waves) in the relative L2 norm.
"""

import math

import torch
from torch import Tensor

from ups_solvers.initial import cell_centres, sample_wave
from ups_solvers.solver import Solver


def trajectory(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: float, t_end: float
) -> Tensor:
    """u at the cell centres, (num_frames, 1, resolution). parameter: beta, domain lengths per time."""
    times = torch.linspace(0.0, t_end, num_frames, dtype=torch.float64)[:, None, None]
    return sample_wave(seed, index)(cell_centres(resolution) - parameter * times)


def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
    """The trigonometric interpolant of u (n, 1, cells), shifted."""
    modes = torch.fft.rfft(u.double())
    waves = torch.arange(modes.shape[-1], dtype=torch.float64)
    angle = -2 * math.pi * parameter * dt * torch.outer(torch.arange(1, num_frames + 1).double(), waves)
    turned = modes[:, None] * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.fft.irfft(turned, n=u.shape[-1]).to(u)


SOLVERS = {"advection1d": Solver(trajectory=trajectory, parameter="beta", integrate=integrate)}
