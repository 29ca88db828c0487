"""Incompressible flow with particles in a box with no-slip walls, (0, 1)^2.

Equation: V_t + V . grad V = -grad p + NU lap V + particles force,  div V = 0,
particles_t + V . grad particles = 0. The force is a constant random field of each trajectory, stored with
every state.

Scheme: staggered second-order finite volumes (Harlow and Welch 1965) with V on the faces and particles in the
cells. Central fluxes of V conserve the energy of the advection. Upwind fluxes of the particles with the
monotonised central limiter (van Leer 1977) conserve their total to rounding and keep their range. Time: the
third-order SSP method of Shu and Osher (1988); the pressure of every stage is solved for in cosines, so the
divergence is zero to rounding. Stored are values at the centres; the first frame is the noise, projected.

PDEBench (PhiFlow) advects V and particles by a semi-Lagrangian scheme with linear interpolation, in 100 steps
of 5e-5 a frame. Its numerical diffusion, about |V| dx / 2, is a tenth of NU at its 512 cells per axis and the
only diffusion of the particles, whose mean it conserves only roughly. Starts are PhiFlow's noise, before the
walls: Fourier modes with the amplitude |k|^(-2 smoothness) above a cut-off, each field of mean 0 and variance
1. Text and code of PDEBench exchange the smoothness of V and force; we follow the code, on a periodic box of
side 1 (in its box, of side 512, no mode is left).
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ups_solvers.initial import cell_centres, eigenbasis, random_stream
from ups_solvers.solver import Solver

VISCOSITY = 0.01
HIGHEST = 127  # wave number of the noise: PDEBench's configuration has 256 cells
MIN_SQUARE = 0.1  # of scale times wave number; smaller ones are dropped (PhiFlow)
SMOOTHNESS, SCALE = 1.0, 0.4  # of V and particles
FORCE_SMOOTHNESS, FORCE_SCALE = 3.0, 0.15
CFL = 0.5  # of the sum over both axes; up to it the limiter keeps the range
DIFFUSION_NUMBER = 0.25  # NU step / dx^2; stable up to 0.31


# V is (2, n + 1, n): component a on its faces, with the first axis along a. Fields in cells are (2, n, n) in
# the same way, so that both components take the same operations.


def both_ways(cells: Tensor) -> Tensor:
    """(n, n) as (2, n, n): axis x first, axis y first."""
    return torch.stack([cells, cells.T])


def _differences(inner: Tensor, dim: int) -> Tensor:
    """Differences of fluxes through the faces between cells, none through the walls."""
    size = list(inner.shape)
    size[dim] = 1
    wall = inner.new_zeros(size)
    return torch.diff(torch.cat([wall, inner, wall], dim), dim=dim)


def divergence(v: Tensor) -> Tensor:
    """div V in the cells times dx, nothing flowing through the walls, (n, n)."""
    x, y = _differences(v[:, 1:-1], 1)
    return x + y.T


class Box:
    """A box of n x n cells with a force (2, n, n) in the cells, in the axes of V."""

    def __init__(self, force: Tensor, viscosity: float = VISCOSITY) -> None:
        self.n, self.force, self.viscosity = force.shape[-1], force, viscosity
        basis, eigenvalues = (part.to(force.device) for part in eigenbasis(self.n))
        total = eigenvalues[:, None] + eigenvalues[None, :]
        total[0, 0] = math.inf  # the mean pressure has no effect
        self.basis, self.inverse = basis, -1 / total

    def project(self, v: Tensor) -> Tensor:
        """The divergence-free part of v (2, n + 1, n), without flow through the walls."""
        modes = self.basis @ (divergence(v) * self.n) @ self.basis.T
        pressure = self.basis.T @ (modes * self.inverse) @ self.basis
        out = torch.zeros_like(v)
        out[:, 1:-1] = v[:, 1:-1] - torch.diff(both_ways(pressure), dim=1) * self.n
        return out

    def rates(self, v: Tensor, particles: Tensor) -> tuple[Tensor, Tensor]:
        """Time derivatives of V without pressure and of the particles."""
        n, inner, cells = self.n, v[:, 1:-1], both_ways(particles)
        centre = 0.5 * (v[:, 1:] + v[:, :-1])
        across = v.flip(0).transpose(1, 2)[..., 1:-1]  # the other component, walls left out
        at_corners = 0.25 * (inner[..., 1:] + inner[..., :-1]) * (across[:, 1:] + across[:, :-1])
        advected = torch.diff(centre.square(), dim=1) + _differences(at_corners, 2)
        mirrored = torch.cat([-inner[..., :1], inner, -inner[..., -1:]], 2)  # no slip: odd at the side walls
        diffused = torch.diff(v, n=2, dim=1) + torch.diff(mirrored, n=2, dim=2)
        push = self.force * cells
        rate = torch.zeros_like(v)
        rate[:, 1:-1] = self.viscosity * n * n * diffused - n * advected + 0.5 * (push[:, 1:] + push[:, :-1])

        step = torch.diff(torch.cat([cells[:, :1], cells, cells[:, -1:]], 1), dim=1)
        before, after = step[:, :-1], step[:, 1:]
        steepest = torch.minimum(2 * torch.minimum(before.abs(), after.abs()), 0.5 * (before + after).abs())
        half = torch.where(before * after > 0, 0.5 * before.sign() * steepest, 0.0)
        upwind = torch.where(inner > 0, (cells + half)[:, :-1], (cells - half)[:, 1:])
        x, y = _differences(inner * upwind, 1)
        return rate, -n * (x + y.T)

    def advance(self, v: Tensor, particles: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """V and particles one step later."""
        v_now, now = v, particles
        for old in (0.0, 0.75, 1 / 3):
            rate, change = self.rates(v_now, now)
            v_now = self.project(old * v + (1 - old) * (v_now + step * rate))
            now = old * particles + (1 - old) * (now + step * change)
        return v_now, now

    def evolve(
        self, v: Tensor, particles: Tensor, *, dt: float, num_frames: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(V, particles) at t = 0, dt, 2 dt, ..; V is made incompressible first."""
        v = self.project(v)
        yield v, particles
        for _ in range(1, num_frames):
            left = dt
            while left > 0:
                x, y = v[0].abs(), v[1].abs().T
                speed = float((torch.maximum(x[1:], x[:-1]) + torch.maximum(y[:, 1:], y[:, :-1])).max())
                longest = min(
                    DIFFUSION_NUMBER / (self.n**2 * self.viscosity) if self.viscosity else math.inf,
                    CFL / (self.n * speed) if speed else math.inf,
                )
                num_left = max(1, math.ceil(left / longest * (1 - 1e-12)))
                v, particles = self.advance(v, particles, left / num_left)
                left = left * (num_left - 1) / num_left
            yield v, particles


def at_centres(v: Tensor, particles: Tensor) -> Tensor:
    """(Vx, Vy, particles) at the centres, (3, n, n)."""
    x, y = 0.5 * (v[:, 1:] + v[:, :-1])
    return torch.stack([x, y.T, particles])


def at_faces(x: Tensor, y: Tensor) -> Tensor:
    """V of its components (n, n) at the centres: means of neighbours, zero at the walls."""
    v = torch.stack([x, y.T])
    wall = torch.zeros_like(v[:, :1])
    return torch.cat([wall, 0.5 * (v[:, 1:] + v[:, :-1]), wall], 1)


def noise(stream: np.random.Generator, num: int, smoothness: float, scale: float) -> Tensor:
    """Fourier modes -HIGHEST .. HIGHEST on both axes of `num` random fields of mean 0 whose variances have
    the mean 1, (num, m, m)."""
    k = torch.arange(-HIGHEST, HIGHEST + 1, dtype=torch.float64)
    square = (k[:, None].square() + k.square()) * scale**2
    drawn = torch.from_numpy(stream.standard_normal((2, num, len(k), len(k))))
    modes = torch.complex(*drawn) * torch.where(square > MIN_SQUARE, square, math.inf).pow(-smoothness)
    modes = modes + modes.flip(1, 2).conj()  # the field is real
    return modes / modes.abs().square().sum((1, 2)).mean().sqrt()


def field(modes: Tensor, x: Tensor, y: Tensor, resolution: int) -> Tensor:
    """Values at all (x, y) of the modes that `resolution` points resolve, (len(x), len(y)), float64."""
    kept = min(HIGHEST, (resolution - 1) // 2)
    k = torch.arange(-kept, kept + 1, dtype=torch.float64)
    modes = modes[HIGHEST - kept : HIGHEST + kept + 1, HIGHEST - kept : HIGHEST + kept + 1]
    wave_x, wave_y = (torch.exp(2j * math.pi * torch.outer(points, k)) for points in (x, y))
    return (wave_x @ modes @ wave_y.T).real


def sample_start(seed: int, index: int, resolution: int) -> tuple[Tensor, Tensor, Tensor]:
    """(V, particles, force) of trajectory `index` before the projection, V and force in the axes of `Box`."""
    stream = random_stream(seed, index)
    v, particles = noise(stream, 2, SMOOTHNESS, SCALE), noise(stream, 1, SMOOTHNESS, SCALE)[0]
    force = noise(stream, 2, FORCE_SMOOTHNESS, FORCE_SCALE)
    centres, faces = cell_centres(resolution), torch.arange(resolution + 1, dtype=torch.float64) / resolution
    return (
        torch.stack([field(v[0], faces, centres, resolution), field(v[1], centres, faces, resolution).T]),
        field(particles, centres, centres, resolution),
        torch.stack(
            [field(force[0], centres, centres, resolution), field(force[1], centres, centres, resolution).T]
        ),
    )


def trajectory(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: None, t_end: float
) -> Tensor:
    """Channels (Vx, Vy, particles, force_x, force_y), space axes (x, y): (num_frames, 5, resolution,
    resolution)."""
    v, particles, force = sample_start(seed, index, resolution)
    frames = torch.empty(num_frames, 5, resolution, resolution)
    frames[:, 3:] = torch.stack([force[0], force[1].T])
    for frame, state in enumerate(
        Box(force).evolve(v, particles, dt=t_end / max(num_frames - 1, 1), num_frames=num_frames)
    ):
        frames[frame, :3] = at_centres(*state)
    return frames


def integrate(u: Tensor, *, parameter: None, dt: float, num_frames: int) -> Tensor:
    """(Vx, Vy, particles, force_x, force_y) from u (n, channel, *space) on.

    Interpolation from centres to faces loses the finest waves, so only the change is computed there and added
    to u.
    """
    out = u[:, None].repeat_interleave(num_frames, 1)
    for row, (x, y, particles, *force) in enumerate(u.double()):
        box = Box(torch.stack([force[0], force[1].T]))
        before, *later = box.evolve(at_faces(x, y), particles, dt=dt, num_frames=num_frames + 1)
        out[row, :, :3] += torch.stack([at_centres(*state) for state in later]) - at_centres(*before)
    return out


SOLVERS = {"ns_incom2d": Solver(trajectory=trajectory, channels=5, ndim=2, edition=2, integrate=integrate)}
