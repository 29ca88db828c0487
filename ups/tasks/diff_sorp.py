"""Diffusion-sorption in one dimension, a retarded diffusion; PDEBench's data. No solver here yet."""

from ups.boundary import DIRICHLET
from ups.tasks.task import Array, Task

FAMILY = (
    Task("diff_sorp1d", ("u",), 1, DIRICHLET, "groups", (Array("data", vector=True),),
         "1D_diff-sorp_NA_NA.h5",
         equation="R(u) ∂u/∂t = D ∂²u/∂x², R(u) = 1 + (1 - por)/por rho_s k_f n_f u^(n_f - 1)",
         constants=(("D", 5e-4), ("por", 0.29), ("rho_s", 2880.0), ("k_f", 3.5e-4), ("n_f", 0.874)),
         t_end=500.0, resolution=1024,
         published={"1D_diff-sorp_NA_NA.h5": (133020, "9d466d1213065619d087319e16d9a938")}),
)
