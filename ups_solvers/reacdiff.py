"""Reaction-diffusion (Fisher-KPP) on [0, 1), periodic.

Equation: u_t = nu u_xx + rho u (1 - u). Start: PDEBench's random waves (ups_solvers/initial.py), shifted and
scaled to the range 0 to 1 on the published grid. Scheme: Fourier modes in float64; exact diffusion, the
reaction by ETDRK4 (ups_solvers/modes.py). Values at the cell centres are stored; the solution does not depend
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

import torch
from torch import Tensor

from ups_solvers.initial import NOMINAL_POINTS, cell_centres, sample_wave
from ups_solvers.modes import coefficients, step
from ups_solvers.solver import Solver

NUM_FINE = 4096  # points at which the start is evaluated
OCTAVES = 8  # the steps up to the first frame grow from 2^-8 of it, in octaves
STEPS_PER_OCTAVE = 4  # an error of 1e-7 together with MAX_REACTION (measured)
MAX_REACTION = 0.05  # rho times a step
DROPPED = 1e-16  # modes below it are set to zero
RESOLVED = 1e-6  # bound of the sum of the last eighth of the modes at a frame


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
                "(ups_solvers.reacdiff); use a larger one."
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


def solver_of(rate: float) -> Solver:
    """The solver with rho = `rate`; 0 gives the heat equation."""

    def trajectory(
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

    def integrate(u: Tensor, *, parameter: float, dt: float, num_frames: int) -> Tensor:
        """u at the centres from u (n, 1, cells) on."""
        num = u.shape[-1]
        modes = torch.zeros(len(u), NUM_FINE // 2 + 1, dtype=torch.complex128)
        modes[:, : num // 2 + 1] = torch.fft.rfft(u[:, 0].double(), norm="forward")
        modes *= torch.exp(-1j * math.pi / num * torch.arange(modes.shape[1]))  # centres: half a cell on
        times = {"dt": dt, "num_frames": num_frames + 1}
        later = [evolve(one, diffusivity=parameter, rate=rate, **times)[1:] for one in modes]
        return torch.stack([at_centres(some, num)[:, None] for some in later]).to(u)

    return Solver(trajectory=trajectory, parameter="nu", integrate=integrate)


SOLVERS = {
    "reacdiff1d": solver_of(1.0),
    "reacdiff1d_rho2": solver_of(2.0),
    "reacdiff1d_rho5": solver_of(5.0),
    "reacdiff1d_rho10": solver_of(10.0),
    "reacdiff1d_as_published": solver_of(0.0),
}
