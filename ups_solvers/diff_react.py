"""FitzHugh-Nagumo diffusion-reaction on (-1, 1)^2 with no-flux walls.

Equation: u_t = Du lap u + u - u^3 - k - v,    v_t = Dv lap v + u - v,    Du = 1e-3, Dv = 5e-3, k = 5e-3.
Start: u and v independent N(0, 1) in every cell, as in PDEBench; so the problem depends on the resolution.
Scheme: the five-point Laplacian, diagonal in the cosine basis; ETDRK4 in time (ups_solvers/modes.py), with
exact diffusion. PDEBench integrates the same system by RK45 at tolerances 1e-3 and 1e-6.
"""

import functools
import math

import torch
from torch import Tensor

from ups_solvers.initial import eigenbasis, random_stream
from ups_solvers.modes import coefficients, step
from ups_solvers.solver import Solver

DIFFUSION_U, DIFFUSION_V = 1e-3, 5e-3
REACTION_K = 5e-3
SIDE = 2.0
MAX_DT = 0.025
# finer steps while the noise decays: relative error 2e-4 becomes 3e-6 at 128 cells (measured)
FIRST_FRAME_FACTOR = 8


@functools.lru_cache(maxsize=8)
def _parts(ny: int, nx: int, dt: float) -> tuple[Tensor, ...]:
    """Coefficients of a step of both channels, each (2, ny, nx)."""
    laplacian = -(eigenbasis(ny, SIDE)[1][:, None] + eigenbasis(nx, SIDE)[1][None, :])
    return coefficients(torch.stack([DIFFUSION_U * laplacian, DIFFUSION_V * laplacian]), dt)


def evolve(
    state: Tensor, *, dt: float, num_steps: int, num_frames: int, reaction_rate: float = 1.0
) -> Tensor:
    """States of one trajectory after 0, num_steps, 2 num_steps, ... steps: (num_frames, 2, ny, nx), float64.

    state: (2, ny, nx), channels u and v. dt: time step. reaction_rate: factor on the reaction terms (1: the
    equation above, 0: pure diffusion).
    """
    basis_y, basis_x = (eigenbasis(cells, SIDE)[0] for cells in state.shape[1:])
    parts = _parts(state.shape[1], state.shape[2], dt)

    def reaction(modes: Tensor) -> Tensor:
        """Reaction terms in the cosine basis; only the cubic one needs values in the cells."""
        u = basis_y.T @ modes[0] @ basis_x
        rate = torch.empty_like(modes)
        rate[1] = modes[0] - modes[1]
        rate[0] = rate[1] - basis_y @ (u * u * u + REACTION_K) @ basis_x.T
        return rate.mul_(reaction_rate)

    frames = torch.empty(num_frames, *state.shape, dtype=torch.float64)
    frames[0] = state
    modes = basis_y @ frames[0] @ basis_x.T
    for frame in range(1, num_frames):
        for _ in range(num_steps):
            modes = step(modes, reaction, parts)
        frames[frame] = basis_y.T @ modes @ basis_x
    return frames


def sample_noise(seed: int, index: int, resolution: int) -> Tensor:
    """Initial u and v of trajectory `index`: N(0, 1) in every cell, (2, resolution, resolution), float64."""
    return torch.from_numpy(random_stream(seed, index).standard_normal((2, resolution, resolution)))


def trajectory(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: None, t_end: float
) -> Tensor:
    """Channels (u, v), space axes (y, x): (num_frames, 2, resolution, resolution).

    The time step is the frame spacing over the smallest integer that makes it at most MAX_DT. Up to the first
    frame it is FIRST_FRAME_FACTOR times finer.
    """
    frames = sample_noise(seed, index, resolution)[None]
    if num_frames > 1:
        spacing = t_end / (num_frames - 1)
        num_steps = max(1, math.ceil(spacing / MAX_DT * (1 - 1e-12)))
        num_first = FIRST_FRAME_FACTOR * num_steps
        first = evolve(frames[0], dt=spacing / num_first, num_steps=num_first, num_frames=2)[1]
        rest = evolve(first, dt=spacing / num_steps, num_steps=num_steps, num_frames=num_frames - 1)
        frames = torch.cat([frames, rest])
    return frames


def integrate(u: Tensor, *, parameter: None, dt: float, num_frames: int) -> Tensor:
    """(u, v) from u (n, 2, ny, nx) on."""
    num_steps = max(1, math.ceil(dt / MAX_DT * (1 - 1e-12)))
    times = {"dt": dt / num_steps, "num_steps": num_steps, "num_frames": num_frames + 1}
    return torch.stack([evolve(one.double(), **times)[1:] for one in u]).to(u)


SOLVERS = {"diff_react2d": Solver(trajectory=trajectory, channels=2, ndim=2, integrate=integrate)}
