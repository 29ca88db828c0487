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

SOLVERS: dict[str, Solver] = {
    **advection.SOLVERS,
    **barkley.SOLVERS,
    **burgers.SOLVERS,
    **burgers_forced.SOLVERS,
    **compressible.SOLVERS,
    **darcy.SOLVERS,
    **darcy_grf.SOLVERS,
    **diff_react.SOLVERS,
    **diff_sorp.SOLVERS,
    **kuramoto.SOLVERS,
    **ns_incompressible.SOLVERS,
    **reacdiff.SOLVERS,
    **shallow_water.SOLVERS,
    **vorticity.SOLVERS,
}
