"""Generate data by independent solvers, on which no base of ours is exact by construction.

    python -m bench.numerics   # all tasks of bench/eleven.yaml: data/numerics, about 9 min of one core
    python -m bench.numerics --task cfd1d

Initial conditions are ours, distributed as in PDEBench. The schemes are named at each function below; they
are of first order, or run on a finer grid, or both, and the result is stored on the grid of the
configuration. Files have the layout of user data (data.source=user). data/numerics/long has further initial
conditions over HORIZONS times the horizon.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.command import parse, parser_of
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.generate import generation_settings, write_data
from ups.tasks import get_task
from ups_solvers import darcy, diff_react, diff_sorp, gas, ns_incompressible, reacdiff, shallow_water
from ups_solvers.compressible import random_1d, random_fields
from ups_solvers.initial import cell_centres, eigenbasis, random_stream, sample_wave

CONFIG = ROOT / "bench" / "eleven.yaml"
EDITIONS = {"ns_incom2d": 2}  # higher where a task's numbers are others than before; of the rest 1
HORIZONS, NUM_LONG = 3, 8
LONG_SEED = 1  # added to data.seed: starts that no model has seen
CHUNK = 100


@dataclass(frozen=True)
class Wanted:
    """Trajectories that are to be solved: those of a seed with these numbers."""

    indices: Sequence[int]
    seed: int
    resolution: int
    num_frames: int
    parameter: float | None
    t_end: float

    @property
    def dt(self) -> float:
        return self.t_end / max(self.num_frames - 1, 1)

    def starts(self, sample: Callable[..., Any], *more: int) -> list[Any]:
        return [sample(self.seed, index, *more) for index in self.indices]

    def on_line(self, sample: Callable[..., Callable], advance: Callable[[Tensor], Tensor]) -> Tensor:
        """Solve from functions of x on four times as many cells; every fourth is stored."""
        x = cell_centres(4 * self.resolution)
        u = torch.stack([start(x) for start in self.starts(sample)])[:, None]
        return frames(u, advance, self.num_frames, lambda u: u[..., 2::4])


def frames(
    state: Tensor, advance: Callable[[Tensor], Tensor], num: int, stored: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return state, advance(state), ..: (n, num, channel, *space), float32, on the stored grid."""
    out = [stored(state).float()]
    for _ in range(num - 1):
        state = advance(state)
        out.append(stored(state).float())
    return torch.stack(out, 1)


def means(u: Tensor, factor: int, ndim: int) -> Tensor:
    """Return means over blocks of `factor` cells per axis of the last `ndim` axes."""
    for axis in range(-ndim, 0):
        u = u.unflatten(axis, (-1, factor)).mean(axis)
    return u


# ---- 1D, scalar --------------------------------------------------------------------------------------------


def advection(wanted: Wanted) -> Tensor:
    """Solve by first-order upwind."""
    moved = wanted.parameter * wanted.dt * 4 * wanted.resolution
    num_steps = math.ceil(moved / 0.8)
    courant = moved / num_steps

    def advance(u: Tensor) -> Tensor:
        for _ in range(num_steps):
            u = torch.lerp(u, u.roll(1, -1), courant)
        return u

    return wanted.on_line(sample_wave, advance)


def heat(num: int, amount: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the factors of rfft modes under the three-point Laplacian; amount: diffusivity * time."""
    k = torch.arange(num // 2 + 1, dtype=torch.float64)
    return torch.exp(-amount * (2 * num * torch.sin(math.pi * k / num)).square()).to(dtype)


def minmod(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a * b > 0, torch.where(a.abs() < b.abs(), a, b), torch.zeros_like(a))


def burgers(wanted: Wanted) -> Tensor:
    """Solve by conservative second-order upwind (minmod slopes, midpoint in time, Rusanov's flux) and central
    diffusion between the steps, in single precision.
    """
    num, dt = 4 * wanted.resolution, wanted.dt

    def advance(u: Tensor) -> Tensor:
        u = u.float()
        num_steps = math.ceil(dt * num * float(u.abs().max()) / 0.45)
        step = dt / num_steps
        factors = heat(num, wanted.parameter / math.pi * dt / num_steps, torch.float32)
        for _ in range(num_steps):
            rise = u.roll(-1, -1) - u
            half = 0.5 * minmod(rise, rise.roll(1, -1))
            middle = u - step * num * u * half  # half a step on: u_t = -u u_x
            left, right = middle + half, (middle - half).roll(-1, -1)
            speed = torch.maximum(left.abs(), right.abs())
            flux = 0.25 * (left * left + right * right) - 0.5 * speed * (right - left)
            u = u - step * num * (flux - flux.roll(1, -1))
            u = torch.fft.irfft(torch.fft.rfft(u) * factors, n=num)
        return u

    return wanted.on_line(sample_wave, advance)


def reaction_diffusion(rho: float, wanted: Wanted) -> Tensor:
    """Solve by Strang splitting: exact reaction, three-point Laplacian."""
    num, num_steps = 4 * wanted.resolution, 32
    step = wanted.dt / num_steps
    half, growth = heat(num, 0.5 * wanted.parameter * step), math.exp(rho * step)

    def spread(u: Tensor, factors: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(u) * factors, n=num)

    def advance(u: Tensor) -> Tensor:
        u = spread(u, half)
        for number in range(num_steps):
            u = u * growth / (1 + u * (growth - 1))
            u = spread(u, half * half if number < num_steps - 1 else half)
        return u

    return wanted.on_line(reacdiff.start, advance)


def tridiagonal(low: np.ndarray, diagonal: np.ndarray, up: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return solutions (cells, n) of tridiagonal systems by elimination; low[0] and up[-1] are not read."""
    up, right = up.copy(), right.copy()
    up[0] /= diagonal[0]
    right[0] /= diagonal[0]
    for row in range(1, len(diagonal)):
        pivot = diagonal[row] - low[row] * up[row - 1]
        up[row] /= pivot
        right[row] = (right[row] - low[row] * right[row - 1]) / pivot
    for row in range(len(diagonal) - 2, -1, -1):
        right[row] -= up[row] * right[row + 1]
    return right


def diffusion_sorption(wanted: Wanted) -> Tensor:
    """Solve by implicit Euler for cell contents (two Newton steps), on twice as many cells with walls at 0
    and 1; stores means.
    """
    num, capacity = 2 * wanted.resolution, diff_sorp.sorbed_capacity(diff_sorp.FREUNDLICH_N)
    scale = diff_sorp.DIFFUSION * num**2
    # -D u_x at the right wall is u there: what leaves is u_cell / (1/D * half a cell + 1), here over D num^2
    leaving = 2 * diff_sorp.DIFFUSION * num / (1 + 2 * diff_sorp.DIFFUSION * num) / diff_sorp.DIFFUSION / num

    def implicit(u: np.ndarray, step: float) -> np.ndarray:
        held, new = diff_sorp.content(u), u
        for _ in range(2):
            slope = 1 + capacity * (np.maximum(new, 0) + diff_sorp.MIN_U) ** (diff_sorp.FREUNDLICH_N - 1)
            diagonal = slope + 2 * step * scale
            diagonal[0] += step * scale  # 2 (u - 1) across half a cell
            diagonal[-1] += step * scale * (leaving - 1)
            right = held - diff_sorp.content(new) + slope * new
            right[0] += 2 * step * scale * diff_sorp.LEFT
            off = np.full_like(diagonal, -step * scale)
            new = np.clip(tridiagonal(off, diagonal, off, right), 0, diff_sorp.LEFT)
        return new

    u = np.repeat(np.array([wanted.starts(diff_sorp.sample_start)]), num, 0)
    out = [u]
    for frame in range(1, wanted.num_frames):
        for octave in (8, 8, 7, 6, 5, 4, 3, 2, 1) if frame == 1 else (0,):
            for _ in range(8):
                u = implicit(u, wanted.dt * 2.0**-octave / 8)
        out.append(u)
    u = torch.from_numpy(np.stack(out)).permute(2, 0, 1)[:, :, None]
    return means(u, 2, 1).float()


# ---- waves in a gas and in shallow water -------------------------------------------------------------------


class Law(NamedTuple):
    """Primitive and conserved variables, of which velocities and momenta are the last, from `first` on;
    pressure and the square of the speed of sound as functions of primitive variables."""

    first: int
    conserved: Callable[[Tensor], Tensor]
    primitive: Callable[[Tensor], Tensor]
    pressure: Callable[[Tensor], Tensor]
    sound: Callable[[Tensor], Tensor]

    def flux(self, fields: Tensor, state: Tensor, axis: int) -> Tensor:
        velocity, pressure = fields[:, self.first + axis], self.pressure(fields)
        flux = state * velocity[:, None]
        flux[:, 1 : self.first] += (pressure * velocity)[:, None]  # of the energy, if there is one
        flux[:, self.first + axis] += pressure
        return flux

    def speed(self, fields: Tensor, axis: int) -> Tensor:
        return (fields[:, self.first + axis].abs() + self.sound(fields).sqrt())[:, None]


GRAVITY = shallow_water.GRAVITY
GAS = Law(  # (density, pressure, V), (density, energy, momentum)
    2, gas.conserved, gas.primitive, lambda u: u[:, 1], lambda u: gas.GAMMA * u[:, 1] / u[:, 0]
)
WATER = Law(  # (h, u, v), (h, h u, h v)
    1,
    lambda u: torch.cat([u[:, :1], u[:, :1] * u[:, 1:]], 1),
    lambda u: torch.cat([u[:, :1], u[:, 1:] / u[:, :1]], 1),
    lambda u: 0.5 * GRAVITY * u[:, 0].square(),
    lambda u: GRAVITY * u[:, 0],
)


def extended(u: Tensor, cells: int, is_periodic: bool) -> Tensor:
    """Return u with `cells` more at both ends of the last axis."""
    first, last = (
        (u[..., -cells:], u[..., :cells])
        if is_periodic
        else (u[..., :1].expand(*u.shape[:-1], cells), u[..., -1:].expand(*u.shape[:-1], cells))
    )
    return torch.cat([first, u, last], -1)


def waves(
    fields: Tensor,
    law: Law,
    *,
    width: float,
    is_periodic: bool,
    dt: float,
    num_frames: int,
    viscosity: float = 0.0,
) -> Iterator[Tensor]:
    """Return fields at t = 0, dt, ..: minmod slopes, Rusanov's flux, Heun's method; for a gas PDEBench's
    stresses (eta = zeta = viscosity) by central differences.
    """
    ndim = fields.ndim - 2

    def rate(state: Tensor) -> Tensor:
        fields, total = law.primitive(state), torch.zeros_like(state)
        for axis in range(ndim):
            padded = extended(fields.movedim(2 + axis, -1), 2, is_periodic)
            step = padded.diff(dim=-1)
            half = 0.5 * minmod(step[..., :-1], step[..., 1:])
            left, right = padded[..., 1:-2] + half[..., :-1], padded[..., 2:-1] - half[..., 1:]
            state_left, state_right = law.conserved(left), law.conserved(right)
            speed = torch.maximum(law.speed(left, axis), law.speed(right, axis))
            flux = 0.5 * (
                law.flux(left, state_left, axis)
                + law.flux(right, state_right, axis)
                - speed * (state_right - state_left)
            )
            if viscosity:
                near = padded[..., 1:-1]
                stress = (
                    0.5
                    * (near[:, :1, ..., 1:] + near[:, :1, ..., :-1])
                    * viscosity
                    * near[:, 2:].diff(dim=-1)
                    / width
                )
                stress[:, axis] *= 7 / 3
                flux[:, 2:] -= stress
                flux[:, 1] -= (stress * 0.5 * (near[:, 2:, ..., 1:] + near[:, 2:, ..., :-1])).sum(1)
            total -= flux.diff(dim=-1).movedim(-1, 2 + axis) / width
        return total

    state = law.conserved(fields)
    yield fields
    for _ in range(1, num_frames):
        left = dt
        while left > 1e-12 * dt:
            fields = law.primitive(state)
            fastest = sum(float(law.speed(fields, axis).max()) for axis in range(ndim))
            longest = 1 / (fastest / (0.45 * width) + 2 * (7 / 3 + ndim - 1) * viscosity / (0.8 * width**2))
            num_left = math.ceil(left / longest)
            step = left / num_left
            ahead = state + step * rate(state)
            state = 0.5 * (state + ahead + step * rate(ahead))
            left = left * (num_left - 1) / num_left
        yield law.primitive(state)


def compressible(start: Callable[..., Tensor], ndim: int, side: float, wanted: Wanted) -> Tensor:
    """Solve by `waves`, in 1D on twice as many cells, in single precision; stores means of conserved
    variables.
    """
    finer = 2 if ndim == 1 else 1
    cells = finer * wanted.resolution
    fields = torch.stack([start(stream, cells) for stream in wanted.starts(random_stream)]).float()
    of_gas = {"width": side / cells, "is_periodic": True, "viscosity": wanted.parameter}
    found = waves(fields, GAS, dt=wanted.dt, num_frames=wanted.num_frames, **of_gas)
    return torch.stack([gas.primitive(means(gas.conserved(part), finer, ndim)) for part in found], 1)


def water(wanted: Wanted) -> Tensor:
    """Solve by `waves` on twice as many cells per axis in single precision; stores means."""
    cells, radii = 2 * wanted.resolution, wanted.starts(shallow_water.sample_radius)
    fields = torch.stack([shallow_water.dam(radius, cells) for radius in radii]).float()
    of_lake = {"width": 0.5 * shallow_water.SIDE / wanted.resolution, "is_periodic": False}
    found = waves(fields, WATER, dt=wanted.dt, num_frames=wanted.num_frames, **of_lake)
    return torch.stack([means(part[:, :1], 2, 2) for part in found], 1)


# ---- 2D ----------------------------------------------------------------------------------------------------


def darcy_flow(wanted: Wanted) -> Tensor:
    """Solve on twice as many cells per axis; stores means of a and u."""
    a = torch.stack(wanted.starts(darcy.sample_coefficient, 2 * wanted.resolution))
    u = darcy.solve(a, torch.full_like(a, wanted.parameter))
    return means(torch.stack([a, u], 1), 2, 2)[:, None].float()


def diffusion_reaction(wanted: Wanted) -> Tensor:
    """Solve by explicit Euler steps of finite volumes on twice as many cells per axis, in single precision;
    stores means. The initial noise is constant on stored cells.
    """
    width = 0.5 * diff_react.SIDE / wanted.resolution
    num_steps = math.ceil(wanted.dt * 4 * diff_react.DIFFUSION_V / (0.8 * width**2))
    step = wanted.dt / num_steps
    spread = step / width**2 * torch.tensor([diff_react.DIFFUSION_U, diff_react.DIFFUSION_V]).view(2, 1, 1)

    def advance(state: Tensor) -> Tensor:
        for _ in range(num_steps):
            near = F.pad(state, (1, 1, 1, 1), mode="replicate")
            across = near[..., 2:, 1:-1] + near[..., :-2, 1:-1]
            along = near[..., 1:-1, 2:] + near[..., 1:-1, :-2]
            change = spread * (across + along - 4 * state)
            u, v = state.unbind(1)
            state = state + change + step * torch.stack([u - u * u * u - diff_react.REACTION_K - v, u - v], 1)
        return state

    noise = torch.stack(wanted.starts(diff_react.sample_noise, wanted.resolution)).float()
    fine = noise.repeat_interleave(2, -1).repeat_interleave(2, -2)
    return frames(fine, advance, wanted.num_frames, lambda state: means(state, 2, 2))


def bilinear(values: Tensor, x: Tensor, y: Tensor, offset: tuple[float, float], n: int) -> Tensor:
    """Interpolate values (batch, p, q) at ((i + offset) / n) to x, y (batch, ..); constant outside."""
    rows, columns = (
        2 * (at * n - first) / (size - 1) - 1
        for at, first, size in zip((x, y), offset, values.shape[1:], strict=True)
    )
    return F.grid_sample(
        values[:, None], torch.stack([columns, rows], -1), padding_mode="border", align_corners=True
    )[:, 0]


U_AT, V_AT, C_AT = (0.0, 0.5), (0.5, 0.0), (0.5, 0.5)  # where faces and centres are, in cells


def incompressible(wanted: Wanted) -> Tensor:
    """Solve as PhiFlow, which PDEBench used: semi-Lagrangian advection by linear interpolation on a staggered
    grid of the stored cells, explicit diffusion, pressure projection; first order, single precision.
    """
    n = wanted.resolution
    num_steps = math.ceil(wanted.dt / (0.2 / (n**2 * ns_incompressible.VISCOSITY)))
    step = wanted.dt / num_steps
    basis, eigenvalue = (part.float() for part in eigenbasis(n))
    total = eigenvalue[:, None] + eigenvalue
    total[0, 0] = math.inf
    starts = wanted.starts(ns_incompressible.sample_start, n)
    v, c, force = (torch.stack(parts).float() for parts in zip(*starts, strict=True))
    centres, faces = (torch.arange(n) + 0.5) / n, torch.arange(n + 1) / n
    places = {
        at: torch.meshgrid(*(faces if offset == 0 else centres for offset in at), indexing="ij")
        for at in (U_AT, V_AT, C_AT)
    }

    def project(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        u, v = F.pad(u[:, 1:-1], (0, 0, 1, 1)), F.pad(v[:, :, 1:-1], (1, 1))
        pressure = basis.T @ (basis @ ((u.diff(dim=1) + v.diff(dim=2)) * n) @ basis.T / -total) @ basis
        u[:, 1:-1] -= pressure.diff(dim=1) * n
        v[:, :, 1:-1] -= pressure.diff(dim=2) * n
        return u, v

    def moved(values: Tensor, at: tuple[float, float], u: Tensor, v: Tensor) -> Tensor:
        x, y = (place.expand(len(values), -1, -1) for place in places[at])
        along, across = bilinear(u, x, y, U_AT, n), bilinear(v, x, y, V_AT, n)
        return bilinear(values, (x - step * along).clamp(0, 1), (y - step * across).clamp(0, 1), at, n)

    def diffused(u: Tensor, dim: int) -> Tensor:  # no slip: odd at the side walls
        other = 3 - dim
        first, last = -u.narrow(other, 0, 1), -u.narrow(other, n - 1, 1)
        along = F.pad(u.diff(n=2, dim=dim), (0, 0, 1, 1) if dim == 1 else (1, 1))
        return along + torch.cat([first, u, last], other).diff(n=2, dim=other)

    def advance(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        u, v, c = state
        for _ in range(num_steps):
            push_x, push_y = force[:, 0] * c, force[:, 1].mT * c
            rub = step * ns_incompressible.VISCOSITY * n * n
            new_u, new_v = moved(u, U_AT, u, v), moved(v, V_AT, u, v)
            new_u, new_v = new_u + rub * diffused(new_u, 1), new_v + rub * diffused(new_v, 2)
            new_u[:, 1:-1] += 0.5 * step * (push_x[:, 1:] + push_x[:, :-1])
            new_v[:, :, 1:-1] += 0.5 * step * (push_y[:, :, 1:] + push_y[:, :, :-1])
            c = moved(c, C_AT, u, v)
            u, v = project(new_u, new_v)
        return u, v, c

    state, still, out = (*project(v[:, 0], v[:, 1].mT), c), (force[:, 0], force[:, 1].mT), []
    for frame in range(wanted.num_frames):
        u, v, c = state = advance(state) if frame else state
        out.append(
            torch.stack([0.5 * (u[:, 1:] + u[:, :-1]), 0.5 * (v[:, :, 1:] + v[:, :, :-1]), c, *still], 1)
        )
    return torch.stack(out, 1)


# ---- files -------------------------------------------------------------------------------------------------


NUMERICS: dict[str, Callable[..., Tensor]] = {
    "advection1d": advection,
    "burgers1d": burgers,
    "reacdiff1d": partial(reaction_diffusion, 1.0),
    "diff_sorp1d": diffusion_sorption,
    "cfd1d": partial(compressible, random_1d, 1, 2.0),
    "cfd2d": partial(compressible, partial(random_fields, ndim=2, mach=0.1), 2, 1.0),
    "cfd3d": partial(compressible, partial(random_fields, ndim=3, mach=1.0), 3, 1.0),
    "darcy2d": darcy_flow,
    "diff_react2d": diffusion_reaction,
    "shallow_water2d": water,
    "ns_incom2d": incompressible,
}


def solve(task: str, indices: Sequence[int], **settings: Any) -> np.ndarray:
    """Return trajectories `indices` of a task, (n, time, channel, *space) float32. settings: of `Wanted`."""
    return NUMERICS[task](Wanted([*map(int, indices)], **settings)).numpy()


def settings_of(config: Config, task: str, is_long: bool = False) -> dict[str, Any]:
    """Return the settings of a task's files, without the parameter, or of its long trajectories."""
    wanted, horizons = config.task[task], HORIZONS if is_long else 1
    return {
        "generator": f"bench.numerics {EDITIONS.get(task, 1)}",
        "seed": config.data.seed + LONG_SEED * is_long,
        "num_trajectories": NUM_LONG if is_long else wanted.num_trajectories,
        "resolution": wanted.resolution,
        "num_frames": horizons * (wanted.num_frames - 1) + 1,
        "t_end": horizons * wanted.t_end,
    }


def long_folder(config: Config, task: str) -> Path:
    return Path(config.data.root) / "long" / task


def generate(config: Config, task: str, is_long_needed: bool = True) -> None:
    """Write missing files of a task, one per parameter value, and its long trajectories."""
    spec = get_task(task)
    for is_long in (False, True) if is_long_needed and not spec.is_steady else (False,):
        folder = long_folder(config, task) if is_long else config.data_dir(task)
        folder.mkdir(parents=True, exist_ok=True)
        for parameter in config.task[task].parameters or [None]:
            path, begun = folder / spec.file_for(parameter), time.process_time()
            settings = generation_settings(task, parameter=parameter, **settings_of(config, task, is_long))
            write_data(path, task, partial(solve, task), settings, chunk=CHUNK)
            print(f"{path}: {time.process_time() - begun:.1f} s", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--task", nargs="+", choices=tuple(NUMERICS), default=list(NUMERICS))
    args = parse(parser, argv)
    torch.set_num_threads(1)
    config = load_config(args.config, args.overrides)
    for task in args.task:
        generate(config, task)


if __name__ == "__main__":
    main()
