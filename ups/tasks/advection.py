"""Linear advection on [0, 1), periodic.

Equation: u_t + beta u_x = 0. Scheme: the exact solution u(x, t) = u0(x - beta t). PDEBench's files hold a
second-order finite-volume solution, whose dispersion error at t = 2 is 8e-4 (smooth waves) to 2e-2 (windowed
waves) in the relative L2 norm.
"""

import math
from collections.abc import Iterator
from typing import Any

from ups.common.lazy import Tensor, np, torch
from ups.common.place import make_target
from ups.tasks.initial import cell_centres, sample_wave, solver, step_of
from ups.tasks.task import Array, Finding, Task
from ups_discovery.boundary import PERIODIC


@solver("beta")
def simulate(
    seed: int, index: int, *, resolution: int, num_frames: int, parameter: float, t_end: float
) -> Tensor:
    """u at the cell centres, (num_frames, 1, resolution). parameter: beta, domain lengths per time."""
    times = torch.linspace(0.0, t_end, num_frames, dtype=torch.float64)[:, None, None]
    return sample_wave(seed, index)(cell_centres(resolution) - parameter * times)


def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
    """The trigonometric interpolant of u (n, 1, cells), shifted."""
    modes = torch.fft.rfft(u.double())
    waves = torch.arange(modes.shape[-1], dtype=torch.float64)
    angle = -2 * math.pi * parameter * dt * torch.outer(torch.arange(1, num_frames + 1).double(), waves)
    turned = modes[:, None] * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.fft.irfft(turned, n=u.shape[-1]).to(u)


def moves_at_beta(data: Any, scan: Any) -> Iterator[Finding]:
    """Fields that move at twice beta, as in the withdrawn first edition."""
    if "x" not in data.coordinates or data.num_frames < 2 or data.space[0] < 2:
        return
    right, double = (_transport_error(data, factor * data.parameter) for factor in (1.0, 2.0))
    if double < 0.5 * right:
        yield Finding(
            "error",
            f"the field moves at twice beta (relative error {double:.2g}, at beta "
            f"{right:.2g}): the withdrawn first edition (PDEBench issue 46)",
            str(data.path),
            f"delete it and run `{make_target('data')}`",
        )


def _transport_error(data: Any, speed: float) -> float:
    """Median relative error of u(t, x) = u(0, x - speed t) over the first trajectories, by a shift in Fourier
    space. t is the frame with the shift nearest to half the domain, as a wrong speed shows least after whole
    periods.
    """
    x, times = data.coordinates["x"], data.coordinates["t"] - data.coordinates["t"][0]
    length = len(x) * (x[1] - x[0])
    frame = int(np.argmin(np.abs((data.parameter * times) % length - length / 2)))
    u = data.read(0, min(8, data.num_trajectories))[:, :, 0].astype(np.float64)
    waves = 2j * np.pi * np.fft.rfftfreq(len(x), d=length / len(x))
    moved = np.fft.irfft(np.fft.rfft(u[:, 0]) * np.exp(-waves * speed * times[frame]), n=len(x))
    scale = np.linalg.norm(u[:, 0] - u[:, 0].mean(-1, keepdims=True), axis=-1) + np.finfo(np.float64).tiny
    return float(np.median(np.linalg.norm(u[:, frame] - moved, axis=-1) / scale))


ADVECTION = Task(
    name="advection1d",
    fields=("u",),
    ndim=1,
    boundary=PERIODIC,
    layout="arrays",
    arrays=(Array("tensor"),),
    filename="1D_Advection_Sols_beta{}.hdf5",
    parameters=("beta",),
    equation="∂u/∂t + beta ∂u/∂x = 0",
    t_end=2.0,
    num_frames=201,
    resolution=1024,
    conserved=("u",),
    bounded=("u",),
    simulate=simulate,
    integrate=integrate,
    step=step_of(integrate),
    checks=(moves_at_beta,),
    published={
        "1D_Advection_Sols_beta0.1.hdf5": (255672, "b4be2fc3383f737c76033073e6d2ccfb"),
        "1D_Advection_Sols_beta0.2.hdf5": (255671, "d47b52c1be4b6bcaa8748a8df2f5fbb8"),
        "1D_Advection_Sols_beta0.4.hdf5": (255674, "d595bbfd2c659df995a93cd40d6ea568"),
        "1D_Advection_Sols_beta0.7.hdf5": (255666, "f89030c240a1e90b55649776854a84c2"),
        "1D_Advection_Sols_beta1.0.hdf5": (255675, "1fe41923a4123db55bf4e89bea32e142"),
        "1D_Advection_Sols_beta2.0.hdf5": (255677, "0e9beff98693089c38e213a1f2b9ac43"),
        "1D_Advection_Sols_beta4.0.hdf5": (255676, "a87b03ff425496360e2732921805f47d"),
        "1D_Advection_Sols_beta7.0.hdf5": (255664, "72a286ad2fcba574bd20bc045ba82d58"),
    },
    # first editions, which move at twice beta (PDEBench issue 46); replaced in 2023
    withdrawn={
        "1D_Advection_Sols_beta0.1.hdf5": "183cd9b7",
        "1D_Advection_Sols_beta0.2.hdf5": "e6b6997e",
        "1D_Advection_Sols_beta0.4.hdf5": "99d57a5a",
        "1D_Advection_Sols_beta1.0.hdf5": "91a599ed",
        "1D_Advection_Sols_beta2.0.hdf5": "24bb9795",
        "1D_Advection_Sols_beta4.0.hdf5": "73ec4f79",
    },
    # strides: those of PDEBench's benchmark; ten frames tell beta, and a shift is linear in u
    defaults={"space_stride": 4, "time_stride": 5, "history": 10, "degree": 1},
)
FAMILY = (ADVECTION, ADVECTION.hidden())
