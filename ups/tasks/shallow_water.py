"""Shallow water after a radial dam break, height only; PDEBench's data. No solver here yet."""

from __future__ import annotations

from ups.boundary import OUTFLOW
from ups.tasks.task import Array, Task

FAMILY = (
    Task("shallow_water2d", ("h",), 2, OUTFLOW, "groups", (Array("data", vector=True),), "2D_rdb_NA_NA.h5",
         positive=("h",),
         equation="∂h/∂t + ∇·(h V) = 0, ∂(h V)/∂t + ∇·(h V V) + g h ∇h = 0", constants=(("g", 1.0),),
         domain=(-2.5, 2.5), num_trajectories=1000, is_symmetric=True,
         published={"2D_rdb_NA_NA.h5": (133021, "75d838c47aa410694bdc912ea7f22282")}),
)
