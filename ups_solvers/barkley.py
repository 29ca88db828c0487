"""Barkley's excitable medium on a torus, kicked at random.

Equation: u_t = u (1 - u) (u - (v + b) / a) / eps + lap u,    v_t = u - v.
Kicks: at the times of a Poisson process of rate RATE, at a place that is uniform on the torus, u becomes
max(u, exp(-r^2 / 2)), with r the distance to that place.

A kick in a medium at rest starts a ring wave. In the refractory medium behind a wave it has no effect, and
waves that meet annihilate. So the law of the next frame is far from Gaussian and depends on the state: no new
wave, or one, anywhere where the medium has recovered. u and v are the whole state and kicks are independent
of the past, so `exact_futures` samples the law exactly. In the control barkley2d_shown the kicks of every
frame are a known forcing, and the future is certain:

    kick (x) = sum over the kicks since the frame before of exp(-r^2 / 2)
    age (x)  = the same sum, each term times the time from the kick to the frame

Source: Barkley 1991 (Physica D 49, 61), parameters in the excitable regime; kicks and numbers are ours.
Scheme: the five-point Laplacian and classical Runge-Kutta of order 4 in float64; kicks take place at the
beginning of a step. On the default grid a front is about as wide as a cell, so the grid is part of the
problem: waves are a tenth slower than in the continuum. A trajectory begins SPIN after rest.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ups_solvers.modes import noise_driven, num_steps

A, B, EPS = 0.75, 0.06, 0.03
SIDE = 22.4  # 32 cells of 0.7
RATE = 1.0  # kicks per unit of time on the whole torus
SPIN = 30.0  # from rest to the first frame; waves from rest keep in step for 20 (measured)
STABLE = 2.0  # step times the fastest rate, 8 / dx^2 + 1 / EPS; Runge-Kutta is stable up to 2.78


def rates(state: Tensor, dx: float) -> Tensor:
    """Time derivatives of the state (u, v) without kicks, (batch, 2, n, n)."""
    u, v = state.unbind(1)
    w = torch.nn.functional.pad(u[:, None], (1, 1, 1, 1), mode="circular")[:, 0]
    around = w[:, 2:, 1:-1] + w[:, :-2, 1:-1] + w[:, 1:-1, 2:] + w[:, 1:-1, :-2]
    return torch.stack([u * (1 - u) * (u - (v + B) / A) / EPS + (around - 4 * u) / dx**2, u - v], 1)


def advance(state: Tensor, dt: float, dx: float) -> Tensor:
    """The state one step later, without kicks."""
    k1 = rates(state, dx)
    k2 = rates(state + 0.5 * dt * k1, dx)
    k3 = rates(state + 0.5 * dt * k2, dx)
    k4 = rates(state + dt * k3, dx)
    return state + dt / 6 * (k1 + 2 * (k2 + k3) + k4)


def longest_step(dx: float) -> float:
    return STABLE / (8 / dx**2 + 1 / EPS)


def bumps(places: Tensor, n: int) -> Tensor:
    """exp(-r^2 / 2) around places (num, 2) at the cell centres, (num, n, n)."""
    centres = (torch.arange(n, dtype=torch.float64) + 0.5) * SIDE / n
    away = torch.remainder(centres - places[..., None] + SIDE / 2, SIDE) - SIDE / 2
    along_x, along_y = torch.exp(-0.5 * away.square()).unbind(1)
    return along_x[:, :, None] * along_y[:, None]


def sample_kicks(stream: np.random.Generator, num: int, dt: float) -> tuple[np.ndarray, np.ndarray]:
    """Kicks during `num` steps dt: (numbers of their steps, in order, their places (kicks, 2))."""
    steps = np.repeat(np.arange(num), stream.poisson(RATE * dt, num))
    return steps, stream.random((len(steps), 2)) * SIDE


def evolve_shown(
    u: Tensor, streams: Sequence[np.random.Generator], *, num_frames: int, parameter: None, dt: float
) -> Tensor:
    """The frames (u, v, kick, age) that follow u (batch, 2 or more, n, n), dt apart, (batch, num_frames, 4,
    n, n), float64; channels of u beyond two are not used."""
    state, n = u[:, :2].double().clone(), u.shape[-1]
    num, frames = num_steps(dt, longest_step(SIDE / n)), []
    for _ in range(num_frames):
        kicks = [sample_kicks(stream, num, dt / num) for stream in streams]
        rows = torch.arange(len(kicks)).repeat_interleave(torch.tensor([len(steps) for steps, _ in kicks]))
        steps, places = (torch.from_numpy(np.concatenate(part)) for part in zip(*kicks, strict=True))
        bump = bumps(places, n)
        for step in range(num):
            for kick in (steps == step).nonzero()[:, 0].tolist():
                now = state[rows[kick], 0]
                now.copy_(torch.maximum(now, bump[kick]))
            state = advance(state, dt / num, SIDE / n)
        ages = (dt - steps * dt / num)[:, None, None]
        shown = torch.zeros_like(state).index_add_(0, rows, torch.stack([bump, ages * bump], 1))
        frames.append(torch.cat([state, shown], 1))
    return torch.stack(frames, 1)


def evolve(
    u: Tensor, streams: Sequence[np.random.Generator], *, num_frames: int, parameter: None, dt: float
) -> Tensor:
    """The frames (u, v) that follow, (batch, num_frames, 2, n, n), float64."""
    return evolve_shown(u, streams, num_frames=num_frames, parameter=parameter, dt=dt)[:, :, :2]


def start(streams: Sequence[np.random.Generator], n: int, parameter: None) -> Tensor:
    """States of the invariant measure, (batch, 2, n, n)."""
    rest = torch.zeros(len(streams), 2, n, n, dtype=torch.float64)
    return evolve(rest, streams, num_frames=1, parameter=None, dt=SPIN)[:, 0]


def start_shown(streams: Sequence[np.random.Generator], n: int, parameter: None) -> Tensor:
    """The same with kick and age, which are zero in the first frame."""
    return torch.nn.functional.pad(start(streams, n, parameter), (0, 0, 0, 0, 0, 2))


SOLVERS = {
    "barkley2d": noise_driven(start, evolve, channels=2, ndim=2, cells_at_once=2**16),
    # its future is certain, given the kicks
    "barkley2d_shown": replace(
        noise_driven(start_shown, evolve_shown, channels=4, ndim=2, cells_at_once=2**16), exact_futures=None
    ),
}
