"""Data sets of ours without a certain answer: their facts. The future, or a partly observed coefficient, has
a distribution, which most solvers of the same name in `ups_solvers` sample exactly."""

from dataclasses import replace
from typing import Any

from ups.tasks.families import DARCY
from ups.tasks.task import Place, Task
from ups_discovery.boundary import PERIODIC


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
FAMILIES = (
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
        fields=("u",),
        ndim=1,
        boundary=PERIODIC,
        arrays=(Place("tensor", ("trajectory", "time", "x"), ("u",)),),
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
        fields=("u",),
        ndim=1,
        boundary=PERIODIC,
        arrays=(Place("tensor", ("trajectory", "time", "x"), ("u",)),),
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
