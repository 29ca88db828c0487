"""The tasks: what each PDEBench data set holds, how it is laid out on disk and what its boundary is.

Facts from PDEBench (Takamoto et al. 2022, arXiv 2210.07182) and its public code. A task is a constant of nature here:
everything a user may choose (resolution, number of trajectories, parameter values) lives in the configuration.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

PERIODIC, NO_FLUX, DIRICHLET, OUTFLOW = "periodic", "no_flux", "dirichlet", "outflow"


@dataclass(frozen=True)
class Task:
    """One family of trajectories.

    name: key used in configs, folders and files.
    fields: physical channels in our order; for steady tasks the unknown only (`inputs` holds the coefficient).
    inputs: coefficient fields a(x) of a steady task, empty for a time-dependent one.
    ndim: space dimensions. boundary: one of periodic, no_flux, dirichlet, outflow.
    parameters: names of the file-level parameters, as the HDF5 attribute spells them; `filename` is the published
        file's name as a function of their values. positive: channels normalised in log-space.
    layout: "arrays" (one array per channel, trajectories on axis 0) or "groups" (one HDF5 group per trajectory).
    keys: array names in the file, in the order of `inputs` then `fields` ("data" in the group layout).
    swap_axes: the stored space axes are (y, x) and are kept so; recorded for the reader of foreign files.
    t_end: length of a published trajectory (model time units). published: (parameter text, MD5, DaRUS id) per file.
    """

    name: str
    fields: tuple[str, ...]
    ndim: int
    boundary: str
    layout: str
    keys: tuple[str, ...]
    filename: str
    parameters: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    t_end: float = 1.0
    num_frames: int = 101
    resolution: int = 128

    @property
    def is_steady(self) -> bool:
        return bool(self.inputs)

    def file_for(self, parameter: float | None) -> str:
        """Published file name for one value of the first parameter (formatted as PDEBench writes it)."""
        return self.filename.format(parameter) if self.parameters else self.filename


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("advection1d", ("u",), 1, PERIODIC, "arrays", ("tensor",), "1D_Advection_Sols_beta{}.hdf5", ("beta",),
             t_end=2.0, num_frames=201, resolution=1024),
        Task("burgers1d", ("u",), 1, PERIODIC, "arrays", ("tensor",), "1D_Burgers_Sols_Nu{}.hdf5", ("Nu",),
             t_end=2.0, num_frames=201, resolution=1024),
        Task("reacdiff1d", ("u",), 1, PERIODIC, "arrays", ("tensor",), "ReacDiff_Nu{}_Rho1.0.hdf5", ("Nu", "rho"),
             t_end=1.0, resolution=1024),
        Task("diff_sorp1d", ("u",), 1, DIRICHLET, "groups", ("data",), "1D_diff-sorp_NA_NA.h5",
             t_end=500.0, resolution=1024),
        Task("cfd1d", ("density", "pressure", "Vx"), 1, PERIODIC, "arrays", ("density", "pressure", "Vx"),
             "1D_CFD_Rand_Eta{0}_Zeta{0}_periodic_Train.hdf5", ("eta", "zeta"), positive=("density", "pressure"),
             resolution=1024),
        Task("darcy2d", ("u",), 2, DIRICHLET, "arrays", ("nu", "tensor"), "2D_DarcyFlow_beta{}_Train.hdf5", ("beta",),
             inputs=("a",), t_end=0.0, num_frames=1),
        Task("diff_react2d", ("u", "v"), 2, NO_FLUX, "groups", ("data",), "2D_diff-react_NA_NA.h5", t_end=5.0),
        Task("shallow_water2d", ("h",), 2, OUTFLOW, "groups", ("data",), "2D_rdb_NA_NA.h5", positive=("h",)),
        Task("cfd2d", ("density", "pressure", "Vx", "Vy"), 2, PERIODIC, "arrays", ("density", "pressure", "Vx", "Vy"),
             "2D_CFD_Rand_M0.1_Eta{0}_Zeta{0}_periodic_128_Train.hdf5", ("eta", "zeta", "M"),
             positive=("density", "pressure"), num_frames=21),
        Task("ns_incom2d", ("Vx", "Vy", "particles"), 2, DIRICHLET, "arrays", ("velocity", "particles"),
             "ns_incom_inhom_2d_512-{}.h5", t_end=5.0, num_frames=1000, resolution=512),
        Task("cfd3d", ("density", "pressure", "Vx", "Vy", "Vz"), 3, PERIODIC, "arrays",
             ("density", "pressure", "Vx", "Vy", "Vz"), "3D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5",
             ("eta", "zeta", "M"), positive=("density", "pressure"), num_frames=21),
    )
}


def get_task(name: str) -> Task:
    """The task called `name`. Raises ValueError with the nearest spelling for an unknown one."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown task {name!r}{hint} Expected one of: {', '.join(TASKS)} (key data.tasks).")
    return TASKS[name]
