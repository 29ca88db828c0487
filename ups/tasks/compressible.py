"""Compressible flow of a viscous ideal gas in one, two and three dimensions; the equations and their solver
are in ups/tasks/gas.py. It starts, as in PDEBench's code, from

random fields in 1D: density and pressure are waves (ups/tasks/initial.py, of three modes, half of them in a
    window, which lies in the right half of (-1, 1)) brought to [0, 1], times m, plus b, m and b
    log-uniform in [1, 10] and [10, 100]; the velocity is such a wave as it is.
random fields in 2D and 3D: velocity components, pressure and density are sums of sines with random phases
    over all wave vectors of components 1 to 4 in size and either sign, weighted with |k|^(-1/2) in 2D and
    |k|^-1 in 3D. The mean speed is M times the speed of sound of the mean state (density d and pressure d T,
    d and T ~ U(0.1, 10)); density and pressure differ from it by 1 to 20 per cent in the mean, less where a
    cell would have less than LEAST of it. Half lie in a box of side 0.45, in a gas at rest.
turbulence in 2D and 3D: density 1, pressure 1 / (GAMMA M^2), velocities as above without their divergence,
    of mean speed 1. PDEBench's projection is off by one wave number, which leaves 3 to 10 per cent of the
    energy in the divergence in 2D and 2 to 3 in 3D (measured).
shock tubes in 1D: density, pressure and velocity each constant on either side of a jump of their own,
    density and pressure log-uniform in [1, 10] and [10, 100], the velocity in [e^(-1/2), e^(1/2)]. The number
    that drew the right value places the jump, too, between 1/4 and 3/4 of the axis: as in PDEBench.

Values are those at the centres of the cells, as PDEBench has them, and those that follow are, too (means over
cells differ from them by a thousandth and more). What is normalised over space is
normalised on a fixed grid, so that a start does not depend on the resolution.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ups.common.boundary import OUTFLOW, PERIODIC
from ups.common.lazy import Tensor, np, torch
from ups.tasks.gas import GAMMA, Gas, conserved, densities, evolve, primitive, restore
from ups.tasks.initial import (
    NOMINAL_POINTS,
    WINDOW_EDGE,
    WINDOW_FIRST,
    WINDOW_RANGE,
    WINDOW_WIDTH,
    cell_centres,
    draw_wave,
    random_stream,
    solver,
)
from ups.tasks.task import Array, Finding, Task

DENSITIES, PRESSURES = (1.0, 10.0), (10.0, 100.0)
VELOCITIES = (math.exp(-0.5), math.exp(0.5))  # of shock tubes
NUM_MODES_1D = 3
PROBABILITY_WINDOW = 0.5
DOMAIN_1D = (-1.0, 1.0)
MAX_MODE = 4
MEANS = (0.1, 10.0)  # of the density and of pressure / density
CONTRAST = (0.01, 0.2)
LEAST = 0.05
NORM_CELLS = 64  # per axis, of the grid that fields are normalised on
CELLS_AT_ONCE = 2**14  # few operations on small arrays wait for Python, large ones for memory
CELL_BYTES = 2**11  # of memory that a cell takes while it is solved in 3D, with 21 frames kept
LOOKED_AT = 8  # trajectories of a check
DRIFT = 1e-2  # of the mean density over itself


# ---------------------------------------------------------------------------------------------------- starts


def _log_uniform(stream: "np.random.Generator", bounds: tuple[float, float]) -> float:
    return math.exp(stream.uniform(math.log(bounds[0]), math.log(bounds[1])))


def random_1d(stream: "np.random.Generator", resolution: int) -> Tensor:
    """(density, pressure, velocity) of random waves, (3, resolution), float64."""
    fields = []
    for bounds in (DENSITIES, PRESSURES, None):
        wave = draw_wave(
            stream, num_modes=NUM_MODES_1D, probability_window=PROBABILITY_WINDOW, domain=DOMAIN_1D
        )
        value = wave(cell_centres(resolution))
        if bounds:
            on_grid = wave(cell_centres(NOMINAL_POINTS))
            value = (value - on_grid.min()) / (on_grid.max() - on_grid.min())
            value = value * _log_uniform(stream, bounds) + _log_uniform(stream, bounds)
        fields.append(value)
    return torch.stack(fields)


def shock_tube(stream: "np.random.Generator", resolution: int) -> Tensor:
    """(density, pressure, velocity) with a jump each, (3, resolution), float64."""
    fields = torch.empty(3, resolution, dtype=torch.float64)
    for field, (first, last) in zip(fields, (DENSITIES, PRESSURES, VELOCITIES), strict=True):
        left, right = stream.uniform(size=2).tolist()
        field[:] = first * (last / first) ** right
        field[: int(resolution * (0.25 + 0.5 * right))] = first * (last / first) ** left
    return fields


class Waves:
    """Fields that are sums of sines with random phases, (num, *space), at the centres of any grid of [0,
    1)^ndim; as if their wave vectors were weighted with |k|^-power."""

    def __init__(
        self, stream: "np.random.Generator", num: int, ndim: int, *, is_solenoidal: bool = False
    ) -> None:
        modes = torch.arange(-MAX_MODE, MAX_MODE + 1, dtype=torch.float64)
        self.vectors = torch.stack(torch.meshgrid(*[modes] * ndim, indexing="ij"))
        squared = self.vectors.square().sum(0).clamp_min(1)
        weight = squared ** (-0.25 if ndim == 2 else -0.5) * (self.vectors != 0).all(0)
        phase = torch.from_numpy(stream.uniform(0, 2 * math.pi, size=(num, *weight.shape)))
        self.amplitudes = weight * torch.exp(1j * phase)
        if is_solenoidal:
            along = (self.vectors * self.amplitudes).sum(0) / squared
            self.amplitudes = self.amplitudes - self.vectors * along

    def __call__(self, resolution: int) -> Tensor:
        modes = torch.arange(-MAX_MODE, MAX_MODE + 1, dtype=torch.float64)
        rows = torch.exp(2j * math.pi * modes[:, None] * cell_centres(resolution))
        values = self.amplitudes
        for _ in range(self.vectors.shape[0]):  # the axis in front goes to the end: all in turn
            values = torch.tensordot(values, rows, ([1], [0]))
        return values.imag


def _mean_speed(velocity: Tensor) -> Tensor:
    return velocity.square().sum(0).sqrt().mean()


def random_fields(stream: "np.random.Generator", resolution: int, *, ndim: int, mach: float) -> Tensor:
    """(density, pressure, *velocity) of random fields, (2 + ndim, *space), float64."""
    density, temperature = stream.uniform(*MEANS, size=2).tolist()
    contrast = stream.uniform(*CONTRAST, size=2).tolist()
    waves = Waves(stream, 2 + ndim, ndim)
    edges = stream.uniform(size=ndim).tolist()
    norm, fields = waves(NORM_CELLS), waves(resolution)
    means = (density, density * temperature)
    for channel, (mean, wanted) in enumerate(zip(means, contrast, strict=True)):
        scale = norm[channel].abs().mean()
        share = min(wanted, (1 - LEAST) * float(scale / -norm[channel].min()))
        fields[channel] = mean * (1 + share * fields[channel] / scale)
    fields[2:] *= mach * math.sqrt(GAMMA * temperature) / _mean_speed(norm[2:])
    if edges[0] < PROBABILITY_WINDOW:  # PDEBench draws it and the first edge from one number
        inside = torch.ones(())
        for edge in edges:
            x, left = cell_centres(resolution), WINDOW_FIRST + WINDOW_RANGE * edge
            side = torch.tanh((x - left) / WINDOW_EDGE) - torch.tanh((x - left - WINDOW_WIDTH) / WINDOW_EDGE)
            inside = inside[..., None] * (0.5 * side)
        rest = torch.zeros(2 + ndim, *[1] * ndim, dtype=torch.float64)
        rest[0], rest[1] = means
        fields = rest + inside * (fields - rest)
    return fields


def turbulence(stream: "np.random.Generator", resolution: int, *, ndim: int, mach: float) -> Tensor:
    """(density, pressure, *velocity) of a uniform gas in solenoidal motion, (2 + ndim, *space), float64."""
    waves = Waves(stream, ndim, ndim, is_solenoidal=True)
    fields = torch.ones(2 + ndim, *[resolution] * ndim, dtype=torch.float64)
    fields[1] = 1 / (GAMMA * mach**2)
    fields[2:] = waves(resolution) / _mean_speed(waves(NORM_CELLS))
    return fields


# ----------------------------------------------------------------------------------------------------- tasks


def simulation(
    start: Callable[["np.random.Generator", int], Tensor], ndim: int, boundary: str, side: float
) -> Callable[..., Tensor]:
    """A task's `simulate`: density, pressure and velocity from `start` on, on [0, side)^ndim. parameter: eta,
    which zeta equals in all of PDEBench's files. Solved where torch's default device is."""

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


def step_of(boundary: str, side: float) -> Callable[..., Tensor]:
    """A task's `step`."""

    def advance(u: Tensor, *, parameter: float, dt: float) -> Tensor:
        """(density, pressure, velocity) (n, channel, *space) a time dt later."""
        gas = Gas(parameter, parameter, side / u.shape[-1], boundary == PERIODIC)
        _, later = evolve(conserved(u.double()), gas, dt=dt, num_frames=2)
        return primitive(later).to(u)

    return advance


def is_a_gas(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether density and pressure are positive and the mass of a closed domain stays, in a few
    trajectories."""
    rows, u = data.stratified_rows(LOOKED_AT)
    space = tuple(range(2, u.ndim - 1))
    if (u[:, :, :2] <= 0).any():
        wrong = rows[(u[:, :, :2] <= 0).reshape(len(u), -1).any(1)].tolist()
        yield Finding(
            "error", "a density or pressure is not positive", f"trajectories {wrong}", data.task.remedy
        )
    mass = u[:, :, 0].mean(space, dtype=np.float64)
    moved = float(np.median(np.abs(mass / mass[:, :1] - 1).max(1)))
    if data.task.conserved and moved > DRIFT:
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
    **facts: Any,
) -> Task:
    """A task of this family. mach: M, of those whose start and file have it."""
    domain, given = DOMAIN_1D, start
    if mach is not None:
        domain, given = (0.0, 1.0), partial(start, ndim=ndim, mach=mach)
    fields = FIELDS[: 2 + ndim]
    return Task(
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
        step=step_of(boundary, domain[1] - domain[0]),
        is_symmetric=True,
        vector=fields[2:],
        **facts,
    )


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
            "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5": (
                135485,
                "ad22fe08b8abc721179dbb34f2cc8b2a",
            ),
            "1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5": (164672, "2fdd00138f1d7abc794fb953021a9f43"),
            "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5": (164668, "45655bd77d006ab539c52b7fbcf099b9"),
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
        published={
            "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5": (133155, "79857a11ad9a69d77b8cf249a1c72d06"),
        },
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
        published={
            "1D_CFD_Shock_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5": (133156, "08dffc3d84033c7574a70614703dd753"),
        },
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
            "2D_CFD_Rand_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5": (
                164689,
                "ae2552864d0856f58dc74132a2f95d20",
            ),
            "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5": (
                164687,
                "5b21dcccaef4d2145ca579a71153c580",
            ),
            "2D_CFD_Rand_M0.1_Eta0.1_Zeta0.1_periodic_128_Train.hdf5": (
                164688,
                "b2733888745a1d64e36df813e979910b",
            ),
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
            "2D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5": (
                164692,
                "04fcc44c39acea69e2869b84cd653d4a",
            ),
            "2D_CFD_Rand_M1.0_Eta0.01_Zeta0.01_periodic_128_Train.hdf5": (
                164690,
                "21969082d0e9524bcc4708e216148e60",
            ),
            "2D_CFD_Rand_M1.0_Eta0.1_Zeta0.1_periodic_128_Train.hdf5": (
                164691,
                "75a34f34a3dcd9bc8ae4b7adf8bf372c",
            ),
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
        published={
            "2D_CFD_Turb_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5": (
                164685,
                "844555000d342d2947162c6cf46798e7",
            ),
        },
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
        published={
            "2D_CFD_Turb_M1.0_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5": (
                164686,
                "3f2c7376cde5fb072db0f9814f1c6992",
            ),
        },
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
        published={
            "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5": (
                164693,
                "45892a12d1066d54af74badae55c438e",
            ),
        },
        further={
            "BlastWave.hdf5": (133264, "f901a1ec75925c1d861ac99a825878f3"),
        },
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
        published={
            "3D_CFD_Turb_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5": (
                164694,
                "4f0eacaec5ff000bbd9a31026ea207b8",
            ),
        },
        further={
            "Turb_M01.hdf5": (133224, "b27495031f434d01762bb0b819ac71e2"),
            "Turb_M05.hdf5": (133225, "f9407dff1a75a1d14d93e7dd570af728"),
            "Turb_M1.hdf5": (135833, "3758f23f71684ac666e0b1e91da0a1c4"),
            "Turb_M2.hdf5": (133227, "12e528dc8ab800f69474600ec58b24d3"),
            "Turb_M4.hdf5": (133228, "8db384feba75903a8c5b21ebeba40083"),
        },
    ),
)
