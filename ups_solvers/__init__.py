"""Solvers and initial conditions of the equation families, by the name of the task.

    SOLVERS["burgers1d"].simulate(range(10), seed=0, resolution=256, num_frames=41, parameter=0.01, t_end=2.0)

Needs torch and numpy, and knows nothing of `ups`, whose ups/tasks holds the facts of the same tasks and whose
ups/data/generate.py writes what is solved here in PDEBench's layouts.
"""

from ups_solvers import (
    advection,
    barkley,
    burgers,
    burgers_forced,
    compressible,
    darcy,
    darcy_grf,
    diff_react,
    diff_sorp,
    kuramoto,
    ns_incompressible,
    reacdiff,
    shallow_water,
    vorticity,
)
from ups_solvers.solver import Solver

__all__ = ["SOLVERS", "Solver"]

STEADY, UNCERTAIN = (darcy, darcy_grf), (barkley, burgers_forced, kuramoto, vorticity)
CERTAIN = advection, burgers, compressible, diff_react, diff_sorp, ns_incompressible, reacdiff, shallow_water
SOLVERS: dict[str, Solver] = {
    name: solver for family in CERTAIN + STEADY + UNCERTAIN for name, solver in family.SOLVERS.items()
}
