"""PDEBench's eleven families of equations with variants of them, and data sets of ours without a certain
answer: their facts. Scheme and initial conditions are with the solver of the same name in `ups_solvers`.

Source: Takamoto et al. 2022 (arXiv 2210.07182) and its public code. Sizes are those of the published files,
strides those of PDEBench's benchmark.
"""

from dataclasses import replace
from typing import Any

from ups.tasks.task import Place, Task
from ups_discovery.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC

# one periodic field in one dimension
LINE: dict[str, Any] = {
    "fields": ("u",),
    "ndim": 1,
    "boundary": PERIODIC,
    "arrays": (Place("tensor", ("trajectory", "time", "x"), ("u",)),),
}
ADVECTION = Task(
    name="advection1d",
    **LINE,
    filename="1D_Advection_Sols_beta{}.hdf5",
    parameters=("beta",),
    equation="∂u/∂t + beta ∂u/∂x = 0",
    t_end=2.0,
    num_frames=201,
    resolution=1024,
    conserved=("u",),
    # ten frames tell beta, and a shift is linear in u
    defaults={"space_stride": 4, "time_stride": 5, "history": 10, "degree": 1},
)

BURGERS = Task(
    name="burgers1d",
    **LINE,
    filename="1D_Burgers_Sols_Nu{}.hdf5",
    parameters=("Nu",),
    equation="∂u/∂t + u ∂u/∂x = (Nu/π) ∂²u/∂x²",
    t_end=2.0,
    num_frames=201,
    resolution=1024,
    conserved=("u",),
    defaults={
        "space_stride": 4,
        "time_stride": 5,
        "base": ["persistence", "propagator", "transport"],
        "reach": 96,
    },
)

DARCY = Task(
    name="darcy2d",
    fields=("u",),
    ndim=2,
    boundary=DIRICHLET,
    arrays=(
        Place("nu", ("trajectory", "x", "y"), ("a",)),
        Place("tensor", ("trajectory", "time", "x", "y"), ("u",)),
    ),
    filename="2D_DarcyFlow_beta{}_Train.hdf5",
    parameters=("beta",),
    equation="-∇·(a ∇u) = beta",
    inputs=("a",),
    t_end=0.0,
    num_frames=1,
    is_symmetric=True,
    defaults={"space_stride": 2},
)

DIFFUSION_REACTION = Task(
    name="diff_react2d",
    fields=("u", "v"),
    ndim=2,
    boundary=NO_FLUX,
    arrays=(Place("*/data", ("time", "y", "x", "channel"), ("u", "v")),),
    filename="2D_diff-react_NA_NA.h5",
    equation="∂u/∂t = Du lap u + u - u³ - k - v, ∂v/∂t = Dv lap v + u - v",
    constants=(("Du", 1e-3), ("Dv", 5e-3), ("k", 5e-3)),
    domain=(-1.0, 1.0),
    axes=("y", "x"),
    t_end=5.0,
    num_trajectories=1000,
    is_symmetric=True,
    # the first frames are white noise that decays: context only
    defaults={"train_from": 6, "history": 4},
)

DIFFUSION_SORPTION = Task(
    name="diff_sorp1d",
    fields=("u",),
    ndim=1,
    boundary=DIRICHLET,
    arrays=(Place("*/data", ("time", "x", "channel"), ("u",)),),
    filename="1D_diff-sorp_NA_NA.h5",
    equation="R(u) ∂u/∂t = D ∂²u/∂x², R(u) = 1 + (1 - por)/por rho_s k_f n_f u^(n_f - 1)",
    constants=(("D", 5e-4), ("por", 0.29), ("rho_s", 2880.0), ("k_f", 3.5e-4), ("n_f", 0.874)),
    walls=((1.0, 0.0),),  # on the right u = -D u_x, which is below 0.01 (D = 5e-4)
    t_end=500.0,
    resolution=1024,
    defaults={"history": 4},  # earlier frames tell what R(u), no polynomial, leaves of u_xx
)

INCOMPRESSIBLE = Task(
    name="ns_incom2d",
    fields=("Vx", "Vy", "particles", "force_x", "force_y"),
    ndim=2,
    boundary=DIRICHLET,
    arrays=(
        Place("velocity", ("trajectory", "time", "x", "y", "channel"), ("Vx", "Vy")),
        Place("particles", ("trajectory", "time", "x", "y", "channel"), ("particles",)),
        Place("force", ("trajectory", "x", "y", "channel"), ("force_x", "force_y")),
    ),
    filename="ns_incom_inhom_2d_512-0.h5",
    still=("force_x", "force_y"),
    constants=(("NU", 0.01),),
    has_own_times=True,
    equation="∂V/∂t + V·∇V = -∇p + NU lap V + particles force, ∇·V = 0, ∂particles/∂t + V·∇particles = 0",
    t_end=4.995,
    num_frames=1000,
    resolution=512,
    num_trajectories=4,
    conserved=("Vx", "Vy", "particles"),  # nothing flows through the walls
    is_symmetric=True,
    vector=("Vx", "Vy", "force_x", "force_y"),
    defaults={"base": ["persistence", "propagator", "flow"]},
)

SHALLOW_WATER = Task(
    name="shallow_water2d",
    fields=("h",),
    ndim=2,
    boundary=OUTFLOW,
    arrays=(Place("*/data", ("time", "x", "y", "channel"), ("h",)),),
    filename="2D_rdb_NA_NA.h5",
    positive=("h",),
    equation="∂h/∂t + ∇·(h V) = 0, ∂(h V)/∂t + ∇·(h V V) + g h ∇h = 0",
    constants=(("g", 1.0),),
    domain=(-2.5, 2.5),
    num_trajectories=1000,
    is_symmetric=True,
    defaults={"history": 4},  # the momentum is not stored: earlier frames tell it
)

# ---------------------------------------------------------------------------------------- reaction-diffusion

FOUND = {"base": ["persistence", "propagator", "equation"]}  # where that was measured (docs/results.md)


def reaction_diffusion(name: str, rho: float, **facts: Any) -> Task:
    """The task of one rho, a constant of its files."""
    usual = {"equation": "∂u/∂t = Nu ∂²u/∂x² + rho u (1 - u)", "defaults": FOUND | {"space_stride": 4}}
    return Task(
        name=name,
        **LINE,
        filename=f"ReacDiff_Nu{{}}_Rho{rho}.hdf5",
        parameters=("Nu", "rho"),
        constants=(("rho", rho),),
        t_end=1.0,
        resolution=1024,
        is_symmetric=True,
        **usual | facts,
    )


REACTION_DIFFUSION = (
    reaction_diffusion("reacdiff1d", 1.0),
    reaction_diffusion("reacdiff1d_rho2", 2.0),
    reaction_diffusion("reacdiff1d_rho5", 5.0),
    reaction_diffusion("reacdiff1d_rho10", 10.0),
    # The published file of Nu = 0.5, rho = 1 has no reaction (measured; PDEBench issue 94). Neither has this
    # task: the same starts and the heat equation. Published files with rho > 1 were not measured.
    reaction_diffusion(
        "reacdiff1d_as_published",
        1.0,
        conserved=("u",),
        equation="∂u/∂t = Nu ∂²u/∂x² (rho is in the name alone)",
        defaults={"space_stride": 4, "parameters": [0.5]},
    ),
)

# ----------------------------------------------------------------------------------------- compressible flow

GAS = ("density", "pressure", "Vx", "Vy", "Vz")


def gas(name: str, ndim: int, filename: str, **facts: Any) -> Task:
    """A task of compressible flow in `ndim` dimensions. filename: with eta as {0}; zeta equals it."""
    fields = GAS[: 2 + ndim]
    usual = {"boundary": PERIODIC, "parameters": ("eta", "zeta")}
    if facts.get("boundary", PERIODIC) == PERIODIC:  # densities that nothing flows out of
        usual["conserved"] = ("mass", "energy", "momentum")
    return Task(
        name=name,
        fields=fields,
        ndim=ndim,
        arrays=tuple(Place(field, ("trajectory", "time", *"xyz"[:ndim]), (field,)) for field in fields),
        filename=filename,
        equation="density (∂Vi/∂t + V·∇Vi) = -∂i pressure + ∇·(eta density ∇Vi) + ∂i ((zeta + eta/3) density "
        "∂i Vi), with the conservation of mass and of the energy of an ideal gas (adiabatic index 5/3)",
        positive=GAS[:2],
        vector=fields[2:],
        is_gas=True,
        is_symmetric=True,
        **usual | facts,
    )


def gas_in_a_line(name: str, filename: str, **facts: Any) -> Task:
    """Compressible flow in one dimension, whose files write the viscosity 1e-8 in another way."""
    line = {"domain": (-1.0, 1.0), "resolution": 1024, "respell": ("1e-08", "1.e-8")}
    return gas(name, 1, filename, **line | facts)


def gas_in_a_box(name: str, ndim: int, filename: str, mach: float, **facts: Any) -> Task:
    """Compressible flow in a unit box. mach: M, a constant of its files."""
    return gas(
        name,
        ndim,
        filename,
        parameters=("eta", "zeta", "M"),
        constants=(("M", mach),),
        num_frames=21,
        **facts,
    )


FINER = ("1e-08_periodic_128", "1e-08_periodic_512")  # this viscosity is published on a finer grid
COMPRESSIBLE = (
    gas_in_a_line("cfd1d", "1D_CFD_Rand_Eta{0}_Zeta{0}_periodic_Train.hdf5", defaults=FOUND),
    gas_in_a_line("cfd1d_trans", "1D_CFD_Rand_Eta{0}_Zeta{0}_trans_Train.hdf5", boundary=OUTFLOW),
    gas_in_a_line(
        "cfd1d_shock",
        "1D_CFD_Shock_Eta{0}_Zeta{0}_trans_Train.hdf5",
        boundary=OUTFLOW,
        t_end=0.4,
        num_frames=81,
    ),
    gas_in_a_box(
        "cfd2d",
        2,
        "2D_CFD_Rand_M0.1_Eta{0}_Zeta{0}_periodic_128_Train.hdf5",
        0.1,
        respell=FINER,
        defaults=FOUND,
    ),
    gas_in_a_box(
        "cfd2d_m1", 2, "2D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_128_Train.hdf5", 1.0, respell=FINER
    ),
    gas_in_a_box(
        "cfd2d_turb",
        2,
        "2D_CFD_Turb_M0.1_Eta{0}_Zeta{0}_periodic_512_Train.hdf5",
        0.1,
        resolution=512,
        num_trajectories=1000,
    ),
    gas_in_a_box(
        "cfd2d_turb_m1",
        2,
        "2D_CFD_Turb_M1.0_Eta{0}_Zeta{0}_periodic_512_Train.hdf5",
        1.0,
        resolution=512,
        num_trajectories=1000,
    ),
    gas_in_a_box(
        "cfd3d", 3, "3D_CFD_Rand_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5", 1.0, num_trajectories=100
    ),
    gas_in_a_box(
        "cfd3d_turb",
        3,
        "3D_CFD_Turb_M1.0_Eta{0}_Zeta{0}_periodic_Train.hdf5",
        1.0,
        resolution=64,
        num_trajectories=600,
    ),
)

PDEBENCH = (
    ADVECTION,
    ADVECTION.hidden(),
    BURGERS,
    BURGERS.hidden(base=["persistence", "propagator"], reach=0),
    *COMPRESSIBLE,
    DARCY,
    DIFFUSION_REACTION,
    DIFFUSION_SORPTION,
    INCOMPRESSIBLE,
    *REACTION_DIFFUSION,
    SHALLOW_WATER,
)

# ------------------------------------------------------------------------------------------ uncertain answers
# The future, or a partly observed coefficient, has a distribution, which most solvers sample exactly.


def excitable(name: str, filename: str, channels: tuple[str, ...] = ("u", "v"), **facts: Any) -> Task:
    """Barkley's excitable medium on a torus, kicked at random."""
    return Task(
        name=name,
        fields=("u", "v"),
        ndim=2,
        boundary=PERIODIC,
        arrays=tuple(Place(key, ("trajectory", "time", "x", "y"), (key,)) for key in channels),
        filename=filename,
        constants=(("a", 0.75), ("b", 0.06), ("eps", 0.03)),
        domain=(0.0, 22.4),
        t_end=20.0,
        num_frames=21,
        resolution=32,
        num_trajectories=1000,
        is_symmetric=True,
        is_stationary=True,
        defaults={"reserve": 0.5},
        **facts,
    )


KICKS = "∂u/∂t = u (1 - u) (u - (v + b)/a)/eps + lap u, ∂v/∂t = u - v; kicks: u = max(u, exp(-r²/2))"
UNCERTAIN = (
    excitable(
        "barkley2d",
        "2D_Barkley.hdf5",
        equation=f"{KICKS} at random times and places",
        why_uncertain="kicks at random times and places excite it",
        has_known_law=True,
    ),
    excitable(  # the control, whose future is certain
        "barkley2d_shown",
        "2D_Barkley_Shown.hdf5",
        ("u", "v", "kick", "age"),
        forcing=("kick", "age"),
        equation=f"{KICKS} at known times and places",
    ),
    Task(
        name="burgers1d_forced",
        **LINE,
        filename="1D_BurgersForced_Nu{}.hdf5",
        parameters=("Nu",),
        equation="∂u/∂t + u ∂u/∂x = Nu ∂²u/∂x² + white noise in the waves 1 to 3",
        t_end=1.0,
        why_uncertain="white noise drives it",
        has_known_law=True,
        is_stationary=True,
        num_frames=41,
        num_trajectories=2000,
        conserved=("u",),
        defaults={"parameters": [0.01], "reserve": 0.5, "base": ["persistence", "propagator", "equation"]},
    ),
    replace(
        DARCY,
        name="darcy2d_grf",
        filename="2D_DarcyFlow_GRF_beta{}.hdf5",
        resolution=64,
        positive=("a",),
        equation="-∇·(a ∇u) = beta, log a Gaussian",
        has_known_law=True,
        defaults={"parameters": [1.0], "reserve": 0.5},
    ),
    Task(
        name="ks1d_coarse",
        **LINE,
        filename="1D_KS_Coarse.hdf5",
        constants=(("length", 112.0),),
        domain=(0.0, 112.0),
        why_uncertain="its short waves are filtered out",
        is_stationary=True,
        equation="∂u/∂t + u ∂u/∂x + ∂²u/∂x² + ∂⁴u/∂x⁴ = 0, stored without its short waves",
        t_end=60.0,
        num_frames=61,
        resolution=32,
        num_trajectories=1000,
        conserved=("u",),
        defaults={"reserve": 0.5},
    ),
    Task(
        name="vorticity2d_forced",
        fields=("omega",),
        ndim=2,
        boundary=PERIODIC,
        arrays=(Place("omega", ("trajectory", "time", "x", "y"), ("omega",)),),
        filename="2D_VorticityForced_Nu{}.hdf5",
        parameters=("Nu",),
        constants=(("drag", 0.1),),
        domain=(0.0, 6.283185307179586),
        equation="∂omega/∂t + V·∇omega = Nu lap omega - drag omega + white noise in waves of length 2π/3",
        why_uncertain="white noise drives it",
        has_known_law=True,
        is_stationary=True,
        t_end=4.0,
        num_frames=41,
        resolution=32,
        num_trajectories=1000,
        conserved=("omega",),
        defaults={"parameters": [0.02], "reserve": 0.5, "base": ["persistence", "propagator", "equation"]},
    ),
)
