"""The tasks: what each PDEBench data set holds, how it is laid out on disk and what its boundary is.

Facts from PDEBench (Takamoto et al. 2022, arXiv 2210.07182) and its public code. A task is a constant of nature here:
everything a user may choose (resolution, number of trajectories, parameter values) lives in the configuration. Where the
published files are and what their MD5 is: ups/tasks/published.py.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from ups.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC

COMPRESSIBLE = ("density (∂V/∂t + V·∇V) = -∇pressure + eta lap V + (zeta + eta/3) ∇(∇·V), with the conservation of mass and "
                "of the energy of an ideal gas (adiabatic index 5/3)")


@dataclass(frozen=True)
class Task:
    """One family of trajectories.

    name: key used in configs, folders and files.
    fields: physical channels in our order; for steady tasks the unknown only (`inputs` holds the coefficient).
    inputs: coefficient fields a(x) of a steady task, empty for a time-dependent one.
    ndim: space dimensions. boundary: one of periodic, no_flux, dirichlet, outflow. domain: every axis runs over it.
    axes: names of the stored space axes in storage order (diff_react2d stores y before x).
    parameters: names of the file-level parameters, as the HDF5 attribute spells them; `filename` is the published
        file's name as a function of the first. constants: equation constants that all files of the task share.
    respell: (old, new) text in the file name where PDEBench departs from Python's way of writing the number.
    positive: channels normalised in log-space.
    hides: the parameters are withheld from every model, which is shown `history` frames and no more (more frames would reveal
        them): the next state is then truly uncertain. of: the task whose files a variant of it reads.
    equation: what is solved, in the names of fields, inputs, parameters and constants; lap is the Laplacian.
    conserved: channels whose mean over space stays; is_bounded: no value leaves the range of the initial state.
    layout: "arrays" (one array per channel, trajectories on axis 0) or "groups" (one HDF5 group per trajectory).
    keys: array names in the file, in the order of `inputs` then `fields` ("data" in the group layout).
    t_end, num_frames, resolution, num_trajectories: of one published file (time in model units).
    """

    name: str
    fields: tuple[str, ...]
    ndim: int
    boundary: str
    layout: str
    keys: tuple[str, ...]
    filename: str
    parameters: tuple[str, ...] = ()
    constants: tuple[tuple[str, float], ...] = ()
    respell: tuple[str, str] = ("", "")
    inputs: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    domain: tuple[float, float] = (0.0, 1.0)
    t_end: float = 1.0
    num_frames: int = 101
    resolution: int = 128
    num_trajectories: int = 10000
    hides: bool = False
    of: str = ""
    equation: str = ""
    conserved: tuple[str, ...] = ()
    is_bounded: bool = False

    @property
    def is_steady(self) -> bool:
        return bool(self.inputs)

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels of a stored trajectory: the coefficient of a steady task, then the fields."""
        return self.inputs + self.fields

    @property
    def axes(self) -> tuple[str, ...]:
        return ("y", "x") if self.name == "diff_react2d" else ("x", "y", "z")[: self.ndim]

    def centres(self, num_cells: int) -> list[float]:
        """Centres of `num_cells` equal cells along an axis of the domain."""
        low, high = self.domain
        return [low + (cell + 0.5) * (high - low) / num_cells for cell in range(num_cells)]

    def file_for(self, parameter: float | None) -> str:
        """Published file name for one value of the first parameter (formatted as PDEBench writes it)."""
        if (parameter is None) != (not self.parameters):
            expected = f"a value of {self.parameters[0]}" if self.parameters else "None (the task has no parameter)"
            raise ValueError(f"{self.name} was given parameter {parameter!r}; expected {expected}. "
                             f"Mend task.{self.name}.parameters.")
        name = self.filename if parameter is None else self.filename.format(float(parameter))
        return name.replace(*self.respell) if self.respell[0] else name

    def parameter_in(self, name: str) -> float | None:
        """The first parameter as a file's name tells it, or None."""
        match = re.match(re.escape(self.filename.split("{")[0]) + r"([0-9]+\.?[0-9]*(?:e-?[0-9]+)?)", name)
        return float(match[1]) if match and self.parameters else None

    def attributes(self, parameter: float | None) -> dict[str, float]:
        """Equation parameters and constants of one file, by the name its HDF5 attributes have."""
        constants = dict(self.constants)
        return {**{name: float(parameter) for name in self.parameters if name not in constants}, **constants}


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("advection1d", ("u",), 1, PERIODIC, "arrays", ("tensor",), "1D_Advection_Sols_beta{}.hdf5", ("beta",),
             equation="∂u/∂t + beta ∂u/∂x = 0",
             t_end=2.0, num_frames=201, resolution=1024, conserved=("u",), is_bounded=True),
        Task("burgers1d", ("u",), 1, PERIODIC, "arrays", ("tensor",), "1D_Burgers_Sols_Nu{}.hdf5", ("Nu",),
             equation="∂u/∂t + u ∂u/∂x = (Nu/π) ∂²u/∂x²",
             t_end=2.0, num_frames=201, resolution=1024, conserved=("u",), is_bounded=True),
        Task("reacdiff1d", ("u",), 1, PERIODIC, "arrays", ("tensor",), "ReacDiff_Nu{}_Rho1.0.hdf5", ("Nu", "rho"),
             equation="∂u/∂t = Nu ∂²u/∂x² + rho u (1 - u)",
             constants=(("rho", 1.0),), t_end=1.0, resolution=1024),
        Task("diff_sorp1d", ("u",), 1, DIRICHLET, "groups", ("data",), "1D_diff-sorp_NA_NA.h5",
             equation="R(u) ∂u/∂t = D ∂²u/∂x², R(u) = 1 + (1 - por)/por rho_s k_f n_f u^(n_f - 1)",
             constants=(("D", 5e-4), ("por", 0.29), ("rho_s", 2880.0), ("k_f", 3.5e-4), ("n_f", 0.874)),
             t_end=500.0, resolution=1024),
        Task("cfd1d", ("density", "pressure", "Vx"), 1, PERIODIC, "arrays", ("density", "pressure", "Vx"),
             "1D_CFD_Rand_Eta{0}_Zeta{0}_periodic_Train.hdf5", ("eta", "zeta"), respell=("1e-08", "1.e-8"),
             equation=COMPRESSIBLE, positive=("density", "pressure"), domain=(-1.0, 1.0), resolution=1024),
        Task("darcy2d", ("u",), 2, DIRICHLET, "arrays", ("nu", "tensor"), "2D_DarcyFlow_beta{}_Train.hdf5", ("beta",),
             equation="-∇·(a ∇u) = beta",
             inputs=("a",), t_end=0.0, num_frames=1),
        # ours, not PDEBench's: log a is Gaussian, so the solutions that fit part of a are known (ups/tasks/darcy_grf_posterior.py)
        Task("darcy2d_grf", ("u",), 2, DIRICHLET, "arrays", ("nu", "tensor"), "2D_DarcyFlow_GRF_beta{}.hdf5", ("beta",),
             equation="-∇·(a ∇u) = beta, log a Gaussian",
             inputs=("a",), positive=("a",), t_end=0.0, num_frames=1, resolution=64),
        Task("diff_react2d", ("u", "v"), 2, NO_FLUX, "groups", ("data",), "2D_diff-react_NA_NA.h5",
             equation="∂u/∂t = Du lap u + u - u³ - k - v, ∂v/∂t = Dv lap v + u - v",
             constants=(("Du", 1e-3), ("Dv", 5e-3), ("k", 5e-3)), domain=(-1.0, 1.0), t_end=5.0, num_trajectories=1000),
        Task("shallow_water2d", ("h",), 2, OUTFLOW, "groups", ("data",), "2D_rdb_NA_NA.h5", positive=("h",),
             equation="∂h/∂t + ∇·(h V) = 0, ∂(h V)/∂t + ∇·(h V V) + g h ∇h = 0",
             constants=(("g", 1.0),), domain=(-2.5, 2.5), num_trajectories=1000),
        # the viscosity 1e-8 is published on the finer grid only, under a name that says so
        Task("cfd2d", ("density", "pressure", "Vx", "Vy"), 2, PERIODIC, "arrays", ("density", "pressure", "Vx", "Vy"),
             "2D_CFD_Rand_M0.1_Eta{0}_Zeta{0}_periodic_128_Train.hdf5", ("eta", "zeta", "M"), constants=(("M", 0.1),),
             respell=("1e-08_periodic_128", "1e-08_periodic_512"), equation=COMPRESSIBLE,
             positive=("density", "pressure"), num_frames=21),
        # published as hundreds of files of four trajectories, all with one viscosity; this is the first
        Task("ns_incom2d", ("Vx", "Vy", "particles"), 2, DIRICHLET, "arrays", ("velocity", "particles"),
             "ns_incom_inhom_2d_512-0.h5", constants=(("NU", 0.01),),
             equation="∂V/∂t + V·∇V = -∇p + NU lap V + force, ∇·V = 0, ∂particles/∂t + V·∇particles = 0",
             t_end=5.0, num_frames=1000, resolution=512, num_trajectories=4),
        Task("cfd3d", ("density", "pressure", "Vx", "Vy", "Vz"), 3, PERIODIC, "arrays",
             ("density", "pressure", "Vx", "Vy", "Vz"), "3D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5",
             ("eta", "zeta", "M"), constants=(("M", 1.0),), equation=COMPRESSIBLE,
             positive=("density", "pressure"), num_frames=21, num_trajectories=100),
    )
}

# Variants: the same files, the parameter hidden from the model.
TASKS |= {f"{name}_hidden": replace(TASKS[name], name=f"{name}_hidden", hides=True, of=name)
          for name in ("advection1d", "burgers1d")}

# Tasks that ups/pde solves, known here because importing it takes seconds (torch); variants read the files of these.
SOLVED = ("advection1d", "burgers1d", "darcy2d", "darcy2d_grf", "diff_react2d")


def get_task(name: str) -> Task:
    """The task called `name`. Raises ValueError with the nearest spelling for an unknown one."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown task {name!r:.80}{hint} Expected one of: {', '.join(TASKS)} (key data.tasks).")
    return TASKS[name]
