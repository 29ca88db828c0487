"""Compressible flow of a viscous ideal gas in one, two and three dimensions. Equations and scheme:
ups_solvers/gas.py. Initial conditions of compressible flow, as PDEBench's code draws them.

1D random fields: density and pressure are waves (ups_solvers/initial.py, of three modes, half of them in a
    window in the right half of (-1, 1)), scaled to [0, 1], times m, plus b, with m and b log-uniform in [1,
    10] and [10, 100]. The velocity is an unscaled wave.
2D and 3D random fields: velocity, pressure and density are sums of sines with random phases over all wave
    vectors whose components are 1 to 4 in size, of either sign, weighted with |k|^(-1/2) in 2D and |k|^-1 in
    3D. The mean speed is M times the speed of sound of the mean state (density d and pressure d T, with d and
    T ~ U(0.1, 10)). Density and pressure differ from it by 1 to 20 % in the mean, less where a cell would
    have less than MIN_RATIO of the mean. Half of the fields lie in a box of side 0.45, in a gas at rest.
2D and 3D turbulence: density 1, pressure 1 / (GAMMA M^2), velocities as above without their divergence, of
    mean speed 1. PDEBench's projection is off by one wave number, which leaves 3 to 10 % of the energy in the
    divergence in 2D and 2 to 3 % in 3D (measured).
1D shock tubes: density, pressure and velocity are each constant on either side of a jump. Density and
    pressure are log-uniform in [1, 10] and [10, 100], the velocity in [e^(-1/2), e^(1/2)]. The random number
    that gives the right value also places the jump, between 1/4 and 3/4 of the axis, as in PDEBench.

Values are those at cell centres, as in PDEBench; cell averages differ from them by a thousandth and more.
Whatever is normalised over space is normalised on a fixed grid, so a start does not depend on the resolution.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ups_solvers.gas import GAMMA, Gas, conserved, evolve, primitive
from ups_solvers.initial import (
    NOMINAL_POINTS,
    WINDOW_EDGE,
    WINDOW_FIRST,
    WINDOW_RANGE,
    WINDOW_WIDTH,
    cell_centres,
    draw_wave,
    random_stream,
)
from ups_solvers.solver import Solver

DENSITIES, PRESSURES = (1.0, 10.0), (10.0, 100.0)
VELOCITIES = (math.exp(-0.5), math.exp(0.5))  # of shock tubes
NUM_MODES_1D = 3
PROBABILITY_WINDOW = 0.5
DOMAIN_1D = (-1.0, 1.0)
MAX_MODE = 4
MEANS = (0.1, 10.0)  # of the density and of pressure / density
CONTRAST = (0.01, 0.2)
MIN_RATIO = 0.05
NORM_CELLS = 64  # per axis, of the grid that fields are normalised on
CELLS_AT_ONCE = 2**14  # Python limits operations on small arrays, memory those on large ones
CELL_BYTES = 2**11  # of memory per cell while a 3D trajectory is solved, with 21 frames kept


def _log_uniform(stream: np.random.Generator, bounds: tuple[float, float]) -> float:
    return math.exp(stream.uniform(math.log(bounds[0]), math.log(bounds[1])))


def random_1d(stream: np.random.Generator, resolution: int) -> Tensor:
    """(density, pressure, velocity) of random waves, (3, resolution), float64."""
    fields = []
    for bounds in (DENSITIES, PRESSURES, None):
        wave = draw_wave(
            stream, num_modes=NUM_MODES_1D, probability_window=PROBABILITY_WINDOW, domain=DOMAIN_1D
        )
        value = wave(cell_centres(resolution))
        if bounds:
            on_grid = wave(cell_centres(NOMINAL_POINTS))
            value = (value - on_grid.min()) / (on_grid.max() - on_grid.min())
            value = value * _log_uniform(stream, bounds) + _log_uniform(stream, bounds)
        fields.append(value)
    return torch.stack(fields)


def shock_tube(stream: np.random.Generator, resolution: int) -> Tensor:
    """(density, pressure, velocity) with a jump each, (3, resolution), float64."""
    fields = torch.empty(3, resolution, dtype=torch.float64)
    for field, (first, last) in zip(fields, (DENSITIES, PRESSURES, VELOCITIES), strict=True):
        left, right = stream.uniform(size=2).tolist()
        field[:] = first * (last / first) ** right
        field[: int(resolution * (0.25 + 0.5 * right))] = first * (last / first) ** left
    return fields


class RandomWaves:
    """`num` sums of sines with random phases; a call gives their values (num, *space) at the cell centres of
    a grid of [0, 1)^ndim."""

    def __init__(
        self, stream: np.random.Generator, num: int, ndim: int, *, is_solenoidal: bool = False
    ) -> None:
        modes = torch.arange(-MAX_MODE, MAX_MODE + 1, dtype=torch.float64)
        self.vectors = torch.stack(torch.meshgrid(*[modes] * ndim, indexing="ij"))
        squared = self.vectors.square().sum(0).clamp_min(1)
        weight = squared ** (-0.25 if ndim == 2 else -0.5) * (self.vectors != 0).all(0)
        phase = torch.from_numpy(stream.uniform(0, 2 * math.pi, size=(num, *weight.shape)))
        self.amplitudes = weight * torch.exp(1j * phase)
        if is_solenoidal:
            along = (self.vectors * self.amplitudes).sum(0) / squared
            self.amplitudes = self.amplitudes - self.vectors * along

    def __call__(self, resolution: int) -> Tensor:
        modes = torch.arange(-MAX_MODE, MAX_MODE + 1, dtype=torch.float64)
        rows = torch.exp(2j * math.pi * modes[:, None] * cell_centres(resolution))
        values = self.amplitudes
        for _ in range(self.vectors.shape[0]):  # each turn replaces the first axis and appends it
            values = torch.tensordot(values, rows, ([1], [0]))
        return values.imag


def _mean_speed(velocity: Tensor) -> Tensor:
    return velocity.square().sum(0).sqrt().mean()


def random_fields(stream: np.random.Generator, resolution: int, *, ndim: int, mach: float) -> Tensor:
    """(density, pressure, *velocity) of random fields, (2 + ndim, *space), float64."""
    density, temperature = stream.uniform(*MEANS, size=2).tolist()
    contrast = stream.uniform(*CONTRAST, size=2).tolist()
    waves = RandomWaves(stream, 2 + ndim, ndim)
    edges = stream.uniform(size=ndim).tolist()
    norm, fields = waves(NORM_CELLS), waves(resolution)
    means = (density, density * temperature)
    for channel, (mean, wanted) in enumerate(zip(means, contrast, strict=True)):
        scale = norm[channel].abs().mean()
        amplitude = min(wanted, (1 - MIN_RATIO) * float(scale / -norm[channel].min()))
        fields[channel] = mean * (1 + amplitude * fields[channel] / scale)
    fields[2:] *= mach * math.sqrt(GAMMA * temperature) / _mean_speed(norm[2:])
    if edges[0] < PROBABILITY_WINDOW:  # PDEBench draws it and the first edge from one number
        inside = torch.ones(())
        for edge in edges:
            x, left = cell_centres(resolution), WINDOW_FIRST + WINDOW_RANGE * edge
            side = torch.tanh((x - left) / WINDOW_EDGE) - torch.tanh((x - left - WINDOW_WIDTH) / WINDOW_EDGE)
            inside = inside[..., None] * (0.5 * side)
        rest = torch.zeros(2 + ndim, *[1] * ndim, dtype=torch.float64)
        rest[0], rest[1] = means
        fields = rest + inside * (fields - rest)
    return fields


def turbulence(stream: np.random.Generator, resolution: int, *, ndim: int, mach: float) -> Tensor:
    """(density, pressure, *velocity) of a uniform gas in solenoidal motion, (2 + ndim, *space), float64."""
    waves = RandomWaves(stream, ndim, ndim, is_solenoidal=True)
    fields = torch.ones(2 + ndim, *[resolution] * ndim, dtype=torch.float64)
    fields[1] = 1 / (GAMMA * mach**2)
    fields[2:] = waves(resolution) / _mean_speed(waves(NORM_CELLS))
    return fields


def flow(
    start: Callable[..., Tensor], ndim: int = 1, mach: float | None = None, is_periodic: bool = True
) -> Solver:
    """The solver of (density, pressure, velocity) from `start` on, computed on torch's default device, on
    DOMAIN_1D or in a unit box. mach: M of a start in a box. parameter: eta; zeta equals it in all of
    PDEBench's files."""
    side = 1.0 if mach else DOMAIN_1D[1] - DOMAIN_1D[0]
    start = partial(start, ndim=ndim, mach=mach) if mach else start

    def trajectories(
        seed: int, indices: Sequence[int], *, resolution: int, num_frames: int, parameter: float, t_end: float
    ) -> Tensor:
        with torch.device("cpu"):
            fields = torch.stack([start(random_stream(seed, index), resolution) for index in indices])
        gas = Gas(parameter, parameter, side / resolution, is_periodic)
        states = evolve(
            conserved(fields.to(torch.get_default_device())),
            gas,
            dt=t_end / max(num_frames - 1, 1),
            num_frames=num_frames,
        )
        return torch.stack([primitive(state).float() for state in states], 1)

    def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
        """(density, pressure, velocity) from u (n, channel, *space) on."""
        gas = Gas(parameter, parameter, side / u.shape[-1], is_periodic)
        _, *later = evolve(conserved(u.double()), gas, dt=dt, num_frames=num_frames + 1)
        return torch.stack([primitive(state).to(u) for state in later], 1)

    return Solver(
        trajectory=trajectories,
        parameter="eta",
        channels=2 + ndim,
        ndim=ndim,
        cells_at_once=CELLS_AT_ONCE,
        cell_bytes=CELL_BYTES,
        edition=2,
        integrate=integrate,
    )


SOLVERS = {
    "cfd1d": flow(random_1d),
    "cfd1d_trans": flow(random_1d, is_periodic=False),
    "cfd1d_shock": flow(shock_tube, is_periodic=False),
    "cfd2d": flow(random_fields, 2, 0.1),
    "cfd2d_m1": flow(random_fields, 2, 1.0),
    "cfd2d_turb": flow(turbulence, 2, 0.1),
    "cfd2d_turb_m1": flow(turbulence, 2, 1.0),
    "cfd3d": flow(random_fields, 3, 1.0),
    "cfd3d_turb": flow(turbulence, 3, 1.0),
}
