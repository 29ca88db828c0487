"""Reaction-diffusion (Fisher-KPP) on [0, 1), periodic.

Equation: u_t = nu u_xx + rho u (1 - u). Start: PDEBench's random waves (ups/tasks/initial.py), shifted and
scaled to the range 0 to 1 on the published grid. Scheme: Fourier modes in float64; exact diffusion, the
reaction by ETDRK4 (ups/tasks/modes.py). Values at the cell centres are stored; the solution does not depend
on the grid. The waves have kinks, edges and a small jump, so the steps up to the first frame grow in octaves,
and decayed modes are dropped.

PDEBench alternates the exact solution of the reaction with explicit diffusion steps of dx^2 / 8 nu in
float32. There the change by the reaction in a step is about a rounding error of u: zero for rho = 1, nu >= 1,
too small elsewhere. The published file of nu = 0.5, rho = 1 has no reaction at all (measured; PDEBench issue
94). The task reacdiff1d_as_published makes such data: the same starts and the heat equation. Published files
with rho > 1 were not measured, so they have no such variant.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from ups.common.lazy import Tensor, np, torch
from ups.tasks.initial import NOMINAL_POINTS, cell_centres, sample_wave, solver, step_of
from ups.tasks.modes import coefficients, step
from ups.tasks.task import Array, Finding, Task
from ups_discovery.boundary import PERIODIC

NUM_FINE = 4096  # points at which the start is evaluated
OCTAVES = 8  # the steps up to the first frame grow from 2^-8 of it, in octaves
STEPS_PER_OCTAVE = 4  # an error of 1e-7 together with MAX_REACTION (measured)
MAX_REACTION = 0.05  # rho times a step
DROPPED = 1e-16  # modes below it are set to zero
RESOLVED = 1e-6  # bound of the sum of the last eighth of the modes at a frame
MIN_MEAN_CHANGE = 1e-3  # over the RMS; a reaction moves the mean by more
FROZEN = 0.5  # published files stay equal to 4 digits for 90 % of their frames (PDEBench issue 94)


@functools.lru_cache(maxsize=64)
def _parts(num_modes: int, diffusivity: float, dt: float) -> tuple[Tensor, ...]:
    """`coefficients` of a step dt of modes 0 .. num_modes - 1."""
    k = 2 * math.pi * torch.arange(num_modes, dtype=torch.float64)
    return coefficients(-diffusivity * k.square(), dt)


def _pieces(dt: float, frame: int, max_step: float) -> Iterator[tuple[float, int]]:
    """(length, number) of the steps from the frame before to `frame`."""
    octaves = [dt * 2.0**-octave for octave in range(OCTAVES, 0, -1)] if frame == 1 else []
    for length in [octaves[0], *octaves] if octaves else [dt]:
        num = max(math.ceil(length / max_step * (1 - 1e-12)), STEPS_PER_OCTAVE if octaves else 1)
        yield length / num, num


def evolve(modes: Tensor, *, diffusivity: float, rate: float, dt: float, num_frames: int) -> Tensor:
    """Fourier modes of one trajectory at t = 0, dt, 2 dt, ...: (num_frames, n), complex, zero where they have
    decayed.

    modes: 0 .. n - 1 of u(x) = Re sum_k c_k u_hat_k exp(2 pi i k x), c_0 = 1, else 2; (n,), n - 1 a power of
    two. diffusivity: nu. rate: rho >= 0. Raises ValueError if n modes do not resolve u for so small a nu.
    """
    frames = torch.zeros(num_frames, len(modes), dtype=torch.complex128)
    frames[0] = modes

    def reaction(u_hat: Tensor) -> Tensor:
        u = torch.fft.irfft(u_hat, norm="forward")
        return torch.fft.rfft(u * (1 - u), norm="forward").mul_(rate)

    for frame in range(1, num_frames):
        for size, num in _pieces(dt, frame, MAX_REACTION / rate if rate else math.inf):
            parts = _parts(len(modes), diffusivity, size)
            for _ in range(num):
                modes = step(modes, reaction, parts)
            highest = max((modes.abs() > DROPPED).nonzero().flatten().tolist(), default=0)
            kept = 2 ** math.ceil(math.log2(2 * max(highest, 4)))  # room for the modes of a product
            modes = modes[: kept + 1].clone()
            modes[highest + 1 :] = 0
        if modes[len(frames[0]) // 8 * 7 :].abs().sum() > RESOLVED:
            raise ValueError(
                f"nu = {diffusivity:.3g} and rho = {rate:.3g} with frames {dt:.3g} apart need "
                f"more than {frames.shape[1]} modes; expected a nu that those resolve "
                "(ups.tasks.reacdiff); use a larger one."
            )
        frames[frame, : len(modes)] = modes
    return frames


def at_centres(modes: Tensor, resolution: int) -> Tensor:
    """u at the centres of `resolution` cells, (frames, resolution), of modes (frames, n)."""
    kept = 1 + int(modes.abs().amax(0).nonzero().max())
    angle = 2 * math.pi * torch.outer(torch.arange(kept, dtype=torch.float64), cell_centres(resolution))
    weight = torch.where(torch.arange(kept) > 0, 2.0, 1.0).double()[:, None]
    return modes[:, :kept].real @ (weight * angle.cos()) - modes[:, :kept].imag @ (weight * angle.sin())


def start(seed: int, index: int) -> Callable[[Tensor], Tensor]:
    """u of trajectory `index` at t = 0, a function of x."""
    wave = sample_wave(seed, index)
    values = wave(cell_centres(NOMINAL_POINTS))
    low, high = float(values.min()), float((values - values.min()).max())
    return lambda x: (wave(x) - low) / high


def solver_of(rate: float) -> Callable[..., Tensor]:
    """The solver with rho = `rate`; 0 gives the heat equation."""

    @solver("nu")
    def simulate(
        seed: int, index: int, *, resolution: int, num_frames: int, parameter: float, t_end: float
    ) -> Tensor:
        """u at the cell centres, (num_frames, 1, resolution). parameter: nu."""
        u = start(seed, index)
        frames = u(cell_centres(resolution))[None]
        if num_frames > 1:
            modes = torch.fft.rfft(u(cell_centres(NUM_FINE)), norm="forward")
            k = torch.arange(len(modes), dtype=torch.float64)
            modes *= torch.exp(-1j * math.pi / NUM_FINE * k)  # the first point is half a cell from 0
            later = evolve(
                modes, diffusivity=parameter, rate=rate, dt=t_end / (num_frames - 1), num_frames=num_frames
            )[1:]
            frames = torch.cat([frames, at_centres(later, resolution)])
        return frames[:, None]

    return simulate


def integral(rate: float) -> Callable[..., Tensor]:
    """A task's `integrate` with rho = `rate`."""

    def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
        """u at the centres from u (n, 1, cells) on."""
        num = u.shape[-1]
        modes = torch.zeros(len(u), NUM_FINE // 2 + 1, dtype=torch.complex128)
        modes[:, : num // 2 + 1] = torch.fft.rfft(u[:, 0].double(), norm="forward")
        modes *= torch.exp(-1j * math.pi / num * torch.arange(modes.shape[1]))  # centres: half a cell on
        times = {"dt": dt, "num_frames": num_frames + 1}
        later = [evolve(one, diffusivity=parameter, rate=rate, **times)[1:] for one in modes]
        return torch.stack([at_centres(some, num)[:, None] for some in later]).to(u)

    return integrate


def reacts(data: Any, scan: Any) -> Iterator[Finding]:
    """Fields without a reaction: constant in time or with a constant mean, as in the published files."""
    if scan.frozen_fraction > FROZEN:
        yield Finding(
            "warning",
            f"{scan.frozen_fraction:.0%} of the frames equal the one before: the reaction "
            "is missing, as in the published files (PDEBench issue 94)",
            str(data.path),
            data.task.remedy,
        )
    if scan.mean_changes and (median := float(np.median(scan.mean_changes))) < MIN_MEAN_CHANGE:
        yield Finding(
            "warning",
            f"the mean of a trajectory stays (it moves by {median:.1g} of its RMS), and a reaction moves "
            "it: as in the published files (PDEBench issue 94), or another equation, such as burgers1d",
            str(data.path),
            f"name the right task in data.tasks; if it is the right one, {data.task.remedy}",
        )


def family_member(name: str, rho: float, *, rate: float | None = None, **facts: Any) -> Task:
    """The task of one rho. rate: of the reaction that the data have, where that is another."""
    integrate = integral(rho if rate is None else rate)
    return Task(
        name=name,
        fields=("u",),
        ndim=1,
        boundary=PERIODIC,
        layout="arrays",
        arrays=(Array("tensor"),),
        filename=f"ReacDiff_Nu{{}}_Rho{rho}.hdf5",
        parameters=("Nu", "rho"),
        constants=(("rho", rho),),
        t_end=1.0,
        resolution=1024,
        is_symmetric=True,
        simulate=solver_of(rho if rate is None else rate),
        integrate=integrate,
        step=step_of(integrate),
        **{
            "equation": "∂u/∂t = Nu ∂²u/∂x² + rho u (1 - u)",
            "checks": (reacts,),
            "defaults": {"space_stride": 4},
        }
        | facts,
    )  # PDEBench's benchmark has that stride


FAMILY = (
    family_member(
        "reacdiff1d",
        1.0,
        published={
            "ReacDiff_Nu0.5_Rho1.0.hdf5": (133177, "69a429239778d529cd419ed5888ea835"),
            "ReacDiff_Nu1.0_Rho1.0.hdf5": (133181, "bd73c2f3448d03e95e98c3831fc8fa70"),
            "ReacDiff_Nu2.0_Rho1.0.hdf5": (133185, "925a7e2c9b9e40ad2dd44b7002ec882b"),
            "ReacDiff_Nu5.0_Rho1.0.hdf5": (133189, "0ed75b55f61bec11c47d379e34959e54"),
        },
        further={
            "ReacDiff_react_Nu0.5_Rho1.0.hdf5": (133157, "6dc95d36e7126c104c5316485670f2c0"),
            "ReacDiff_react_Nu1.0_Rho1.0.hdf5": (133161, "a258ff5be23d17d89cb10ac94f512165"),
            "ReacDiff_react_Nu2.0_Rho1.0.hdf5": (133169, "208882dcf594d52f8e5017904efd84c9"),
            "ReacDiff_react_Nu5.0_Rho1.0.hdf5": (133173, "6b2c45748711bea8779dea3b48a53a7e"),
            "ReacDiff_react_Nu10.0_Rho1.0.hdf5": (133165, "5a0f4d1ff304b11b9b22c3b00b1f63d4"),
        },
    ),
    family_member(
        "reacdiff1d_rho2",
        2.0,
        published={
            "ReacDiff_Nu0.5_Rho2.0.hdf5": (133179, "ac907daa7e483d203a5c77567cdea561"),
            "ReacDiff_Nu1.0_Rho2.0.hdf5": (133183, "112c01a76447162bd67c8c1073f58ca2"),
            "ReacDiff_Nu2.0_Rho2.0.hdf5": (133187, "426353b241acfbc64067acb1bdc80ade"),
            "ReacDiff_Nu5.0_Rho2.0.hdf5": (133191, "f927f5d85f2e9bd97dff31b4dab051ae"),
        },
        further={
            "ReacDiff_react_Nu0.5_Rho2.0.hdf5": (133159, "5198a1572c201657dc19ad8592e24ac1"),
            "ReacDiff_react_Nu1.0_Rho2.0.hdf5": (133163, "27113922509f6336f5c8be8d99109828"),
            "ReacDiff_react_Nu2.0_Rho2.0.hdf5": (133171, "56e8e1e55ac92acf21b253511c370642"),
            "ReacDiff_react_Nu5.0_Rho2.0.hdf5": (133175, "1738e4374456af974e4d0058d3426a69"),
            "ReacDiff_react_Nu10.0_Rho2.0.hdf5": (133167, "3c54c1cd3710b1f5b02a3de3782201ed"),
        },
    ),
    family_member(
        "reacdiff1d_rho5",
        5.0,
        published={
            "ReacDiff_Nu0.5_Rho5.0.hdf5": (133180, "fb149e7540d8977af158bb8fec1048a3"),
            "ReacDiff_Nu1.0_Rho5.0.hdf5": (133184, "fa224c9d143de37ac6914d391e70f425"),
            "ReacDiff_Nu2.0_Rho5.0.hdf5": (133188, "f2890bdac5103a3b78fac5f80e57b760"),
            "ReacDiff_Nu5.0_Rho5.0.hdf5": (133192, "c9c26e2b5f2d4bf5bcbbd4ba34fefd5e"),
        },
        further={
            "ReacDiff_react_Nu0.5_Rho5.0.hdf5": (133160, "9968701e89a8b406f18ffbc2b74045d8"),
            "ReacDiff_react_Nu1.0_Rho5.0.hdf5": (133164, "24ab563c27bf07d653b881d3c652bfa5"),
            "ReacDiff_react_Nu2.0_Rho5.0.hdf5": (133172, "4498954ef4cd5c63ac530ee46c351790"),
            "ReacDiff_react_Nu5.0_Rho5.0.hdf5": (133176, "4e3cf0ac66e85dbb77c79861076db8e8"),
            "ReacDiff_react_Nu10.0_Rho5.0.hdf5": (133168, "580f08d5755ee393e7092eafedb70e46"),
        },
    ),
    family_member(
        "reacdiff1d_rho10",
        10.0,
        published={
            "ReacDiff_Nu0.5_Rho10.0.hdf5": (133178, "ff7c724b18e7ebe02e19c179852f48ee"),
            "ReacDiff_Nu1.0_Rho10.0.hdf5": (133182, "a94e65631881a27ddae3ef74caf53093"),
            "ReacDiff_Nu2.0_Rho10.0.hdf5": (133186, "a3e25a9fb8a99f010352ad3dd1afd596"),
            "ReacDiff_Nu5.0_Rho10.0.hdf5": (133190, "264c80af0e2a6cc1f70e87275e0f6ac4"),
        },
        further={
            "ReacDiff_react_Nu0.5_Rho10.0.hdf5": (133158, "5bf21fbc428ac4346c0e7a04a5899f9b"),
            "ReacDiff_react_Nu1.0_Rho10.0.hdf5": (133162, "09279a597860dcf48ef6f6539c46920f"),
            "ReacDiff_react_Nu2.0_Rho10.0.hdf5": (133170, "891f8b47e49348b5411882ecebbc1bfd"),
            "ReacDiff_react_Nu5.0_Rho10.0.hdf5": (133174, "b04c22629bf86d85929386aaf4a5f95d"),
            "ReacDiff_react_Nu10.0_Rho10.0.hdf5": (133166, "4cf67490b01e54f80d45c8e7936b804d"),
        },
    ),
    family_member(
        "reacdiff1d_as_published",
        1.0,
        rate=0.0,
        conserved=("u",),
        checks=(),
        equation="∂u/∂t = Nu ∂²u/∂x² (rho is in the name alone)",
        defaults={"space_stride": 4, "parameters": [0.5]},
    ),
)
