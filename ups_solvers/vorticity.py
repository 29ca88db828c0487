"""Two-dimensional flow on a torus with white-noise forcing, in vorticity.

Equation, on (0, 2 pi)^2:
    omega_t + V . grad omega = nu lap omega - DRAG omega + forcing,    V = (-psi_y, psi_x),  lap psi = omega,
    forcing = sum over the wave vectors k of WAVES of AMPLITUDE (cos(k.x) dW_k/dt + sin(k.x) dW'_k/dt)

Source: the kind of problem with which Chen et al. 2024 (arXiv 2403.13724) evaluate generative forecasts; the
future is uncertain from the first step, and `exact_futures` samples it exactly. The numbers are ours, for 32
points per axis on a CPU: the noise adds enstrophy at the rate 2, eddies turn over in less than a unit of
time, and the last shell kept has less than a thousandth of the enstrophy.

Scheme: Fourier modes below n/3 of n points in float64, without aliasing, so advection conserves energy and
enstrophy to rounding and the stored field is the whole state. Time: ups_solvers/modes.py. In the mean
d<omega^2>/2 = (input - 2 DRAG <omega^2>/2 - nu <|grad omega|^2>) dt, with input = half the sum of the squared
amplitudes (Ito); the same holds for the energy <|V|^2>/2, with the input of every wave divided by |k|^2.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ups_solvers.modes import Forced, noise_driven, num_steps

SIDE = 6.283185307179586
WAVES = ((3, 0), (0, 3), (2, 2), (2, -2))
AMPLITUDE = 1.0
DRAG = 0.1
START = 1.3  # standard deviation of a forced wave's amplitude before the run-up
SPIN = 30.0  # six e-foldings of energy, 1 / 2 DRAG each: the longest waves are as late ones (a test)
STEP = 1.2  # over the points per axis: RK4 needs 2.7 over the speed, at most 6 in a run, times n / 3


@functools.lru_cache(maxsize=8)
def wave_numbers(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """kx (n, 1), ky (1, n // 2 + 1), and whether a mode is kept."""
    kx = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)[:, None]
    ky = torch.arange(n // 2 + 1, dtype=torch.float64)[None]
    return kx, ky, torch.maximum(kx.abs(), ky) * 3 < n


def plane_waves(n: int, vectors: Sequence[tuple[int, int]]) -> Tensor:
    """Modes of cos(k.x) and sin(k.x) of each vector, (2 len(vectors), n, n // 2 + 1)."""
    x = torch.arange(n, dtype=torch.float64) * SIDE / n
    phase = torch.stack([a * x[:, None] + b * x[None] for a, b in vectors])
    return torch.fft.rfft2(torch.stack([phase.cos(), phase.sin()], 1).flatten(0, 1), norm="forward")


@functools.lru_cache(maxsize=8)
def equation(n: int, nu: float, dt: float) -> Forced:
    """The equation on n x n points."""
    kx, ky, kept = wave_numbers(n)
    square = kx.square() + ky.square()
    to_v = torch.stack([1j * ky / square, -1j * kx / square]).masked_fill(square == 0, 0)
    flux = torch.stack([-1j * kx.expand_as(square), -1j * ky.expand_as(square)]) * kept

    def nonlinear(modes: Tensor) -> Tensor:
        fields = torch.fft.irfft2(
            torch.cat([modes[:, None], modes[:, None] * to_v], 1), s=(n, n), norm="forward"
        )
        carried = torch.fft.rfft2(fields[:, :1] * fields[:, 1:], norm="forward")
        return carried[:, 0] * flux[0] + carried[:, 1] * flux[1]

    return Forced(-nu * square - DRAG, nonlinear, AMPLITUDE * plane_waves(n, WAVES), dt)


def evolve(
    u: Tensor, streams: Sequence[np.random.Generator], *, num_frames: int, parameter: float, dt: float
) -> Tensor:
    """The frames that follow u (batch, 1, n, n), dt apart, (batch, num_frames, 1, n, n), float64. parameter:
    nu."""
    n = u.shape[-1]
    num = num_steps(dt, STEP / n, 9 * parameter + DRAG)
    modes = torch.fft.rfft2(u[:, 0].double(), norm="forward") * wave_numbers(n)[2]
    frames = [
        torch.fft.irfft2(now, s=(n, n), norm="forward")
        for now in equation(n, parameter, dt / num).evolve(modes, streams, num_frames, num)
    ]
    return torch.stack(frames, 1)[:, :, None]


def start(streams: Sequence[np.random.Generator], n: int, nu: float) -> Tensor:
    """States of the invariant measure, (batch, 1, n, n): random waves after a run-up, in which the longest
    waves, which energy reaches last, become independent of the start."""
    forced = equation(n, nu, 1.0)
    drawn = np.stack([stream.standard_normal(2 * len(WAVES)) for stream in streams])
    modes = forced.pushed(torch.from_numpy(drawn) * START / AMPLITUDE)
    u = torch.fft.irfft2(modes, s=(n, n), norm="forward")[:, None]
    return evolve(u, streams, num_frames=1, parameter=nu, dt=SPIN)[:, 0]


SOLVERS = {"vorticity2d_forced": noise_driven(start, evolve, parameter="nu", ndim=2, cells_at_once=2**15)}
