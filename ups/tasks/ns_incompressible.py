"""Incompressible Navier-Stokes with a fixed inhomogeneous force, and particles that follow; PDEBench's data.
No solver here yet.

Published as hundreds of files of four trajectories, all with one viscosity; this is the first.
"""

from ups.boundary import DIRICHLET
from ups.tasks.task import Array, Task

FAMILY = (
    Task("ns_incom2d", ("Vx", "Vy", "particles"), 2, DIRICHLET, "arrays",
         (Array("velocity", channels=2, vector=True), Array("particles", vector=True)),
         "ns_incom_inhom_2d_512-0.h5", constants=(("NU", 0.01),), has_own_times=True,
         equation="∂V/∂t + V·∇V = -∇p + NU lap V + force, ∇·V = 0, ∂particles/∂t + V·∇particles = 0",
         t_end=5.0, num_frames=1000, resolution=512, num_trajectories=4,
         published={"ns_incom_inhom_2d_512-0.h5": (133280, "54109d46f9c957317bd670ddb2068ac0")}),
)
