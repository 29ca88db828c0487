"""Shallow water after a radial dam break on (-2.5, 2.5)^2, with a flat bottom and open walls. Only the height
h is stored, as in PDEBench.

Equation:
    h_t + (h u)_x + (h v)_y = 0
    (h u)_t + (h u^2 + g h^2 / 2)_x + (h u v)_y = 0,    (h v)_t + (h u v)_x + (h v^2 + g h^2 / 2)_y = 0

Start: at rest, h = 2 within the radius R ~ U(0.3, 0.7) of the centre and 1 outside.
Scheme: second-order finite volumes. h, u and v are reconstructed at the faces with the monotonised central
limiter (van Leer 1977); the flux is HLLC (Toro 2001, section 10.4) with Einfeldt's wave speeds (1988); time
is Heun's (SSP) method; ghost cells at the walls copy the last cell. Operations are the same for both axes and
both directions, so mirror images and exchanged axes stay so bitwise. PDEBench uses Clawpack's Roe solver with
the same limiter. Its start has h at the cell centres, so its thousand trajectories have 81 different starts
(with 128 cells per axis), which training shares with test; we take cell averages.
"""

import math

import torch
from torch import Tensor

from ups_solvers.initial import random_stream
from ups_solvers.solver import Solver

GRAVITY = 1.0
SIDE = 5.0
INSIDE, OUTSIDE = 2.0, 1.0
RADIUS_FIRST, RADIUS_RANGE = 0.3, 0.4
SUBCOLUMNS = 16
CFL = 0.4  # of the sum over both axes; above 0.5 a height may become negative


def _differences(values: Tensor, width: float) -> Tensor:
    """Flux differences of (h, h u, h v) along the first space axis over `width`, (3, n, m).

    values: (h, u, v) in the cells, (3, n, m), float64, u along that axis.
    """
    first, last = values[:, :1], values[:, -1:]
    padded = torch.cat([first, first, values, last, last], 1)
    step = torch.diff(padded, dim=1)
    before, after = step[:, :-1], step[:, 1:]
    steepest = torch.minimum(2 * torch.minimum(before.abs(), after.abs()), 0.5 * (before + after).abs())
    slope = torch.where(before * after > 0, before.sign() * steepest, 0.0)
    left, right = padded[:, 1:-2] + 0.5 * slope[:, :-1], padded[:, 2:-1] - 0.5 * slope[:, 1:]
    (h_left, u_left, v_left), (h_right, u_right, v_right) = left, right

    root_left, root_right = h_left.sqrt(), h_right.sqrt()
    u_mean = (root_left * u_left + root_right * u_right) / (root_left + root_right)
    c_mean = (0.5 * GRAVITY * (h_left + h_right)).sqrt()
    c_left, c_right = math.sqrt(GRAVITY) * root_left, math.sqrt(GRAVITY) * root_right
    slow = torch.minimum(u_left - c_left, u_mean - c_mean).clamp_max(0.0)
    fast = torch.maximum(u_right + c_right, u_mean + c_mean).clamp_min(0.0)

    def flux(of_left: Tensor, of_right: Tensor, jump: Tensor) -> Tensor:
        return (fast * of_left - slow * of_right + fast * slow * jump) / (fast - slow)

    mass_left, mass_right = h_left * u_left, h_right * u_right
    mass = flux(mass_left, mass_right, h_right - h_left)
    momentum = flux(
        mass_left * u_left + 0.5 * GRAVITY * h_left.square(),
        mass_right * u_right + 0.5 * GRAVITY * h_right.square(),
        mass_right - mass_left,
    )
    across = mass * torch.where(mass > 0, v_left, v_right)  # the contact wave carries v
    return torch.diff(torch.stack([mass, momentum, across]), dim=1) / width


def _rate(state: Tensor, width: float) -> Tensor:
    """Time derivative of (h, h u, h v), (3, nx, ny)."""
    h, u, v = state[0], state[1] / state[0], state[2] / state[0]
    along_x = _differences(torch.stack([h, u, v]), width)
    along_y = _differences(torch.stack([h.T, v.T, u.T]), width)[[0, 2, 1]].transpose(1, 2)
    return -(along_x + along_y)


def evolve(state: Tensor, *, width: float, dt: float, num_frames: int) -> Tensor:
    """States (h, h u, h v) of one trajectory at t = 0, dt, 2 dt, ...: (num_frames, 3, nx, ny), float64.

    state: (3, nx, ny), h > 0. width: of a cell. dt: between frames, cut into equal steps that keep to CFL.
    """
    frames = torch.empty(num_frames, *state.shape, dtype=torch.float64)
    frames[0] = state
    state = frames[0]
    for frame in range(1, num_frames):
        speed = float(sum((state[axis] / state[0]).abs().max() for axis in (1, 2)))
        speed += 2 * float((GRAVITY * state[0].max()).sqrt())
        num_steps = math.ceil(dt * speed / (CFL * width))
        step = dt / num_steps
        for _ in range(num_steps):
            ahead = state + step * _rate(state, width)
            state = 0.5 * (state + (ahead + step * _rate(ahead, width)))
        frames[frame] = state
    return frames


def dam(radius: float, resolution: int) -> Tensor:
    """The state at rest with the high water within `radius`, (3, resolution, resolution), float64.

    Cell averages: the chord of the circle is exact in each of SUBCOLUMNS strips of a column of cells.
    """
    strips = 2 * torch.arange(resolution * SUBCOLUMNS, dtype=torch.float64) + 1 - resolution * SUBCOLUMNS
    chord = (radius**2 - (strips * (0.5 * SIDE / len(strips))).square()).clamp_min(0).sqrt()[:, None]
    edges = (2 * torch.arange(resolution + 1, dtype=torch.float64) - resolution) * (0.5 * SIDE / resolution)
    covered = (torch.minimum(edges[1:], chord) - torch.maximum(edges[:-1], -chord)).clamp_min(0)
    inside = covered.unflatten(0, (resolution, SUBCOLUMNS)).mean(1) * (resolution / SIDE)  # area fraction
    inside = 0.5 * (inside + inside.flip(0))  # removes rounding that depends on the order of the sum
    state = torch.zeros(3, resolution, resolution, dtype=torch.float64)
    state[0] = OUTSIDE + (INSIDE - OUTSIDE) * 0.5 * (inside + inside.T)
    return state


def sample_radius(seed: int, index: int) -> float:
    """R of trajectory `index`."""
    return RADIUS_FIRST + RADIUS_RANGE * float(random_stream(seed, index).uniform())


def trajectory(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: None, t_end: float
) -> Tensor:
    """h at the cells, space axes (x, y): (num_frames, 1, resolution, resolution)."""
    return evolve(
        dam(sample_radius(seed, index), resolution),
        width=SIDE / resolution,
        dt=t_end / max(num_frames - 1, 1),
        num_frames=num_frames,
    )[:, :1]


SOLVERS = {"shallow_water2d": Solver(trajectory=trajectory, ndim=2)}
