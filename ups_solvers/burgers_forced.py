"""Burgers equation with white-noise forcing on [0, 1), periodic.

Equation: u_t + (u^2/2)_x = nu u_xx + forcing, with

    forcing = sum over k = 1 .. 3 of AMPLITUDE (cos(2 pi k x) dW_k/dt + sin(2 pi k x) dW'_k/dt)

A model gets the whole state but not the noise, so the future is uncertain; `exact_futures` samples it
exactly. Trajectories start on the invariant measure (after a run-up of SPIN from random waves), in which
shocks form, merge and dissipate the energy of the noise. Source: a standard problem (E, Khanin, Mazel and
Sinai 2000) with our numbers.

Scheme: Fourier modes below n/3 of n points in float64, without aliasing, so the stored field is the whole
state. Time: ups_solvers/modes.py. In the mean d<u^2>/2 = (input - nu <u_x^2>) dt, with input = half the sum
of the squared amplitudes (Ito), and the mean of u is constant.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ups_solvers.modes import Forced, noise_driven, num_steps

WAVES = (1, 2, 3)
AMPLITUDE = 0.5  # an input of 0.375: shocks of about 1.6
START = 0.4  # standard deviation of a forced wave's amplitude before the run-up
SPIN = 2.0  # a shock crosses the box in a time of about 1
STEP = 0.5  # times the cell width: the largest speed in a run is about 2.5, RK4 needs 0.53 at that


@functools.lru_cache(maxsize=8)
def equation(resolution: int, nu: float, dt: float) -> Forced:
    """The equation in the modes 0 .. resolution // 2; modes from resolution / 3 on are zero."""
    k = 2 * math.pi * torch.arange(resolution // 2 + 1, dtype=torch.float64)
    flux = torch.where(torch.arange(len(k)) * 3 < resolution, -0.5j * k, 0)
    waves = torch.zeros(2 * len(WAVES), len(k), dtype=torch.complex128)
    for j, wave in enumerate(WAVES):
        waves[2 * j, wave], waves[2 * j + 1, wave] = 0.5 * AMPLITUDE, -0.5j * AMPLITUDE

    def nonlinear(modes: Tensor) -> Tensor:
        u = torch.fft.irfft(modes, n=resolution, norm="forward")
        return torch.fft.rfft(u * u, norm="forward") * flux

    return Forced(-nu * k.square(), nonlinear, waves, dt)


def evolve(
    u: Tensor, streams: Sequence[np.random.Generator], *, num_frames: int, parameter: float, dt: float
) -> Tensor:
    """The frames that follow u (batch, 1, n), dt apart, (batch, num_frames, 1, n), float64. parameter: nu."""
    num = num_steps(dt, STEP / u.shape[-1], parameter * (2 * math.pi * WAVES[-1]) ** 2)
    forced = equation(u.shape[-1], parameter, dt / num)
    modes = torch.fft.rfft(u[:, 0].double(), norm="forward")
    modes[:, -(-u.shape[-1] // 3) :] = 0
    frames = [
        torch.fft.irfft(now, n=u.shape[-1], norm="forward")
        for now in forced.evolve(modes, streams, num_frames, num)
    ]
    return torch.stack(frames, 1)[:, :, None]


def start(streams: Sequence[np.random.Generator], resolution: int, nu: float) -> Tensor:
    """States of the invariant measure, (batch, 1, resolution): random waves after a run-up."""
    modes = torch.zeros(len(streams), resolution // 2 + 1, dtype=torch.complex128)
    drawn = np.stack([stream.standard_normal((len(WAVES), 2)) for stream in streams])
    modes[:, list(WAVES)] = 0.5 * START * torch.view_as_complex(torch.from_numpy(drawn))
    u = torch.fft.irfft(modes, n=resolution, norm="forward")[:, None]
    return evolve(u, streams, num_frames=1, parameter=nu, dt=SPIN)[:, 0]


SOLVERS = {"burgers1d_forced": noise_driven(start, evolve, parameter="nu", cells_at_once=2**14)}
