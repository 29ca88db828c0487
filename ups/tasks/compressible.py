"""Compressible flow of a viscous ideal gas in one, two and three dimensions.

Equations and scheme: ups/tasks/gas.py. Initial conditions: ups/tasks/gas_starts.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ups.common.lazy import Tensor, np, torch
from ups.tasks.gas import Gas, conserved, densities, evolve, primitive, restore
from ups.tasks.gas_starts import DOMAIN_1D, random_1d, random_fields, shock_tube, turbulence
from ups.tasks.initial import random_stream, solver, step_of
from ups.tasks.task import Array, Finding, Task
from ups_discovery.boundary import OUTFLOW, PERIODIC

CELLS_AT_ONCE = 2**14  # Python limits operations on small arrays, memory those on large ones
CELL_BYTES = 2**11  # of memory per cell while a 3D trajectory is solved, with 21 frames kept
NUM_SAMPLED = 8  # trajectories of a check
MAX_MASS_CHANGE = 1e-2  # relative


def simulation(
    start: Callable[["np.random.Generator", int], Tensor], ndim: int, boundary: str, side: float
) -> Callable[..., Tensor]:
    """A task's `simulate`: (density, pressure, velocity) from `start` on, on [0, side)^ndim, computed on
    torch's default device. parameter: eta; zeta equals it in all of PDEBench's files."""

    @solver("eta", channels=2 + ndim, ndim=ndim, cells_at_once=CELLS_AT_ONCE, cell_bytes=CELL_BYTES)
    def simulate(
        seed: int, indices: Sequence[int], *, resolution: int, num_frames: int, parameter: float, t_end: float
    ) -> Tensor:
        with torch.device("cpu"):
            fields = torch.stack([start(random_stream(seed, index), resolution) for index in indices])
        gas = Gas(parameter, parameter, side / resolution, boundary == PERIODIC)
        states = evolve(
            conserved(fields.to(torch.get_default_device())),
            gas,
            dt=t_end / max(num_frames - 1, 1),
            num_frames=num_frames,
        )
        return torch.stack([primitive(state).float() for state in states], 1)

    return simulate


def integral(boundary: str, side: float) -> Callable[..., Tensor]:
    """A task's `integrate`."""

    def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
        """(density, pressure, velocity) from u (n, channel, *space) on."""
        gas = Gas(parameter, parameter, side / u.shape[-1], boundary == PERIODIC)
        _, *later = evolve(conserved(u.double()), gas, dt=dt, num_frames=num_frames + 1)
        return torch.stack([primitive(state).to(u) for state in later], 1)

    return integrate


def is_a_gas(data: Any, scan: Any) -> Iterator[Finding]:
    """Densities or pressures that are not positive, and mass that a closed domain does not keep, in a few
    trajectories."""
    rows, u = data.stratified_rows(NUM_SAMPLED)
    space = tuple(range(2, u.ndim - 1))
    if (u[:, :, :2] <= 0).any():
        wrong = rows[(u[:, :, :2] <= 0).reshape(len(u), -1).any(1)].tolist()
        yield Finding(
            "error", "a density or pressure is not positive", f"trajectories {wrong}", data.task.remedy
        )
    mass = u[:, :, 0].mean(space, dtype=np.float64)
    moved = float(np.median(np.abs(mass / mass[:, :1] - 1).max(1)))
    if data.task.conserved and moved > MAX_MASS_CHANGE:
        yield Finding(
            "error",
            f"the mass moves by {moved:.2g} of itself, and {data.task.name} conserves it: another boundary",
            str(data.path),
            "name the right task in data.tasks",
        )


CLOSED = {"conserved": ("mass", "energy", "momentum"), "densities": densities, "restore": restore}
FIELDS = ("density", "pressure", "Vx", "Vy", "Vz")
BASES = {"base": ["persistence", "propagator", "equation"]}  # where that was measured (docs/results.md)
EQUATION = (
    "density (∂Vi/∂t + V·∇Vi) = -∂i pressure + ∇·(eta density ∇Vi) + ∂i ((zeta + eta/3) density ∂i "
    "Vi), with the conservation of mass and of the energy of an ideal gas (adiabatic index 5/3)"
)


def task(
    name: str,
    ndim: int,
    filename: str,
    start: Callable[..., Tensor],
    *,
    boundary: str = PERIODIC,
    mach: float | None = None,
    published: Mapping[float, tuple[int, str]],
    **facts: Any,
) -> Task:
    """A task of this family. mach: M, if its start and its files have it. published: eta -> DaRUS id, MD5."""
    domain, given = DOMAIN_1D, start
    if mach is not None:
        domain, given = (0.0, 1.0), partial(start, ndim=ndim, mach=mach)
    integrate = integral(boundary, domain[1] - domain[0])
    fields = FIELDS[: 2 + ndim]
    described = Task(
        name=name,
        fields=fields,
        ndim=ndim,
        boundary=boundary,
        layout="arrays",
        arrays=tuple(map(Array, fields)),
        filename=filename,
        parameters=("eta", "zeta") if mach is None else ("eta", "zeta", "M"),
        constants=() if mach is None else (("M", mach),),
        equation=EQUATION,
        positive=FIELDS[:2],
        domain=domain,
        checks=(is_a_gas,),
        **(CLOSED if boundary == PERIODIC else {}),
        simulate=simulation(given, ndim, boundary, domain[1] - domain[0]),
        edition=2,
        integrate=integrate,
        step=step_of(integrate),
        is_symmetric=True,
        vector=fields[2:],
        **facts,
    )
    return replace(described, published={described.file_for(eta): entry for eta, entry in published.items()})


# the viscosity 1e-8 is written in another way in 1D; in 2D it is published on a finer grid, as the name says
FAMILY = (
    task(
        "cfd1d",
        1,
        "1D_CFD_Rand_Eta{0}_Zeta{0}_periodic_Train.hdf5",
        random_1d,
        resolution=1024,
        defaults=BASES,
        respell=("1e-08", "1.e-8"),
        published={
            1e-8: (135485, "ad22fe08b8abc721179dbb34f2cc8b2a"),
            0.01: (164672, "2fdd00138f1d7abc794fb953021a9f43"),
            0.1: (164668, "45655bd77d006ab539c52b7fbcf099b9"),
        },
    ),
    task(
        "cfd1d_trans",
        1,
        "1D_CFD_Rand_Eta{0}_Zeta{0}_trans_Train.hdf5",
        random_1d,
        boundary=OUTFLOW,
        resolution=1024,
        respell=("1e-08", "1.e-8"),
        published={1e-8: (133155, "79857a11ad9a69d77b8cf249a1c72d06")},
    ),
    task(
        "cfd1d_shock",
        1,
        "1D_CFD_Shock_Eta{0}_Zeta{0}_trans_Train.hdf5",
        shock_tube,
        boundary=OUTFLOW,
        resolution=1024,
        t_end=0.4,
        num_frames=81,
        respell=("1e-08", "1.e-8"),
        published={1e-8: (133156, "08dffc3d84033c7574a70614703dd753")},
        further={
            "Sod1.hdf5": (133145, "ef8271ce332b986e961a7aaedcae24e7"),
            "Sod2.hdf5": (133146, "10e47c5c6ee0d1028f912a52bbf613d0"),
            "Sod3.hdf5": (133147, "495f2d2e0cee9b4ae28d7fef29bb7c68"),
            "Sod4.hdf5": (133148, "544399b3d05ae514d66fc96982ee9db8"),
            "Sod5.hdf5": (133149, "ca7fa6631201e8bd506914d3b0b9fe50"),
            "Sod6.hdf5": (133150, "adb2d95bf0d48e03bc0d8f4a2cbcd1c6"),
            "Sod7.hdf5": (133151, "b8d73e1e3ef862ef732a5fa43c64612e"),
        },
    ),
    task(
        "cfd2d",
        2,
        "2D_CFD_Rand_M0.1_Eta{0}_Zeta{0}_periodic_128_Train.hdf5",
        random_fields,
        mach=0.1,
        num_frames=21,
        defaults=BASES,
        respell=("1e-08_periodic_128", "1e-08_periodic_512"),
        published={
            1e-8: (164689, "ae2552864d0856f58dc74132a2f95d20"),
            0.01: (164687, "5b21dcccaef4d2145ca579a71153c580"),
            0.1: (164688, "b2733888745a1d64e36df813e979910b"),
        },
        further={
            "2D_shock.hdf5": (133193, "b4098c20e2e0a25cd8ee229c9294b899"),
            "KH_M01_dk10_Re1e3.hdf5": (133209, "54e278b3a7419107a5cd6a8a019225d5"),
            "KH_M01_dk1_Re1e3.hdf5": (133210, "29ce31d3ce61de3b90ac0b42716c061c"),
            "KH_M01_dk2_Re1e3.hdf5": (133211, "de0b2a3343de028e4c162723ec571713"),
            "KH_M01_dk5_Re1e3.hdf5": (133212, "5bcaed9eb7db5fd55d51f7347a938413"),
            "KH_M02_dk1_Re1e3.hdf5": (133213, "fbc392f83affc2224a5703dad7bda28a"),
            "KH_M04_dk1_Re1e3.hdf5": (133214, "66626c935ab070a1e5df52bcf6aeccc7"),
            "KH_M1_dk1_Re1e3.hdf5": (133215, "338393c118196048a38d1df731a33b0a"),
            "OTVortex.hdf5": (133216, "3b68cb29e3d1906a19ce2cb4ce71faa4"),
        },
    ),
    task(
        "cfd2d_m1",
        2,
        "2D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_128_Train.hdf5",
        random_fields,
        mach=1.0,
        num_frames=21,
        respell=("1e-08_periodic_128", "1e-08_periodic_512"),
        published={
            1e-8: (164692, "04fcc44c39acea69e2869b84cd653d4a"),
            0.01: (164690, "21969082d0e9524bcc4708e216148e60"),
            0.1: (164691, "75a34f34a3dcd9bc8ae4b7adf8bf372c"),
        },
    ),
    task(
        "cfd2d_turb",
        2,
        "2D_CFD_Turb_M0.1_Eta{0}_Zeta{0}_periodic_512_Train.hdf5",
        turbulence,
        mach=0.1,
        num_frames=21,
        resolution=512,
        num_trajectories=1000,
        published={1e-8: (164685, "844555000d342d2947162c6cf46798e7")},
    ),
    task(
        "cfd2d_turb_m1",
        2,
        "2D_CFD_Turb_M1.0_Eta{0}_Zeta{0}_periodic_512_Train.hdf5",
        turbulence,
        mach=1.0,
        num_frames=21,
        resolution=512,
        num_trajectories=1000,
        published={1e-8: (164686, "3f2c7376cde5fb072db0f9814f1c6992")},
    ),
    task(
        "cfd3d",
        3,
        "3D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5",
        random_fields,
        mach=1.0,
        num_frames=21,
        resolution=128,
        num_trajectories=100,
        published={1e-8: (164693, "45892a12d1066d54af74badae55c438e")},
        further={"BlastWave.hdf5": (133264, "f901a1ec75925c1d861ac99a825878f3")},
    ),
    task(
        "cfd3d_turb",
        3,
        "3D_CFD_Turb_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5",
        turbulence,
        mach=1.0,
        num_frames=21,
        resolution=64,
        num_trajectories=600,
        published={1e-8: (164694, "4f0eacaec5ff000bbd9a31026ea207b8")},
        further={
            "Turb_M01.hdf5": (133224, "b27495031f434d01762bb0b819ac71e2"),
            "Turb_M05.hdf5": (133225, "f9407dff1a75a1d14d93e7dd570af728"),
            "Turb_M1.hdf5": (135833, "3758f23f71684ac666e0b1e91da0a1c4"),
            "Turb_M2.hdf5": (133227, "12e528dc8ab800f69474600ec58b24d3"),
            "Turb_M4.hdf5": (133228, "8db384feba75903a8c5b21ebeba40083"),
        },
    ),
)
