"""Compressible flow of a viscous ideal gas in one, two and three dimensions.

Equations and scheme: ups_solvers/gas.py. Initial conditions: ups_solvers/gas_starts.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ups_solvers.gas import Gas, conserved, evolve, primitive
from ups_solvers.gas_starts import DOMAIN_1D, random_1d, random_fields, shock_tube, turbulence
from ups_solvers.initial import random_stream
from ups_solvers.solver import Solver

CELLS_AT_ONCE = 2**14  # Python limits operations on small arrays, memory those on large ones
CELL_BYTES = 2**11  # of memory per cell while a 3D trajectory is solved, with 21 frames kept


def flow(
    start: Callable[[np.random.Generator, int], Tensor], ndim: int, side: float, is_periodic: bool
) -> Solver:
    """The solver of (density, pressure, velocity) from `start` on, on [0, side)^ndim, computed on torch's
    default device. parameter: eta; zeta equals it in all of PDEBench's files."""

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


def line(start: Callable[[np.random.Generator, int], Tensor], is_periodic: bool) -> Solver:
    """The solver in one dimension."""
    return flow(start, 1, DOMAIN_1D[1] - DOMAIN_1D[0], is_periodic)


def box(start: Callable[..., Tensor], ndim: int, mach: float) -> Solver:
    """The solver in a periodic unit box. mach: M of the start."""
    return flow(partial(start, ndim=ndim, mach=mach), ndim, 1.0, True)


SOLVERS = {
    "cfd1d": line(random_1d, is_periodic=True),
    "cfd1d_trans": line(random_1d, is_periodic=False),
    "cfd1d_shock": line(shock_tube, is_periodic=False),
    "cfd2d": box(random_fields, 2, 0.1),
    "cfd2d_m1": box(random_fields, 2, 1.0),
    "cfd2d_turb": box(turbulence, 2, 0.1),
    "cfd2d_turb_m1": box(turbulence, 2, 1.0),
    "cfd3d": box(random_fields, 3, 1.0),
    "cfd3d_turb": box(turbulence, 3, 1.0),
}
