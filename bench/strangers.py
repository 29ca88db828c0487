"""Ten problems of strangers: UPS as a user starts it, beside networks by the code of their authors.

    pip install --no-deps --target other neuraloperator==2.0.0 tensorly tensorly-torch opt-einsum zencfg \\
        configmypy ruamel.yaml
    PYTHONPATH=other python -m bench.strangers --budget 30 --search 30
    python -m bench.table                                     # the table of docs/peers.md

    cahn_hilliard: u_t = lap (u^3 - u - lap u), periodic, after separation has begun
    wave: u_tt = div (c^2 grad u) - u_t / 2, walls without flux, another c(x, y) in every trajectory, given
    fronts: u_t = div (u^2 grad u), periodic, from patches of compact support
    delay: u_t = u_xx / 2 + 0.6 u (1 - K * u(t - 3)), K a Gaussian of width 4, 1D, periodic
    tracer: u_t = lap u / 20 - v . grad u, periodic; v of waves up to 2 by trajectory, not in the files
    hidden_rate: u_t = lap u / 2 + r u (1 - u), periodic; r(x, y) = 0.1 + 0.2 waves up to 4 as v
    ginzburg_landau: A_t = A + (1 + 2i) lap A - (1 - 1.2i) |A|^2 A, periodic, real and imaginary part
    island: shallow water on a torus round a disc that reflects; a mask of the land, no symmetry
    conductivity: u_t = div (c grad u), walls without flux, another c(x, y) in every trajectory, given
    hasegawa_wakatani: vorticity w and density n of drift waves, periodic;
        lap p = w, [a, b] = a_x b_y - a_y b_x,
        w_t + [p, w] = p - n - lap^2 w / 200, n_t + [p, n] = p - n - p_y - lap^2 n / 200

86 trajectories of 24 frames (68 train, 12 validate, 6 are not read), 24 of 64 frames to test; four frames are
given. Columns: ours (default settings for user data, without a search), fno (bench/rivals.py), and FNO, TFNO
and UNO of neuraloperator, trained by the recipe of bench/rivals.py. Rivals have their width, modes, batch
and rate from a search of --search processor seconds on validation with the first seed (SETTINGS,
bench/search.py). Results:
bench/results/strangers/PROBLEM.json, one entry per training, written at once and not computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bench.command import parser_of
from bench.entries import RESULTS, is_there, put, read
from bench.ours import train_ours
from bench.rivals import Settings, Trained, best_error
from bench.score import Split, by_lead, load, persistence, rollout, with_cache
from bench.search import Changes, Trial, search
from bench.tune import OUT, add_arguments, key_of, prepare, search_seconds, train_rival
from bench.user_data import CONFIG, write, write_config
from ups.config.load import load_config, to_dict
from ups.data.cache import open_cache
from ups_discovery.boundary import NO_FLUX, PERIODIC, along

FOLDER, PACKAGE = RESULTS / "strangers", "neuraloperator"
AUTHORS = ("FNO", "TFNO", "UNO")  # classes of neuralop.models
COLUMNS = ("ours", "fno", *AUTHORS)
NUM_FILE, NUM_TEST, NUM_FRAMES, NUM_LONG, CONTEXT, BATCH = 86, 24, 24, 64, 4, 24
OVERRIDES = [f"data.val_fraction={12 / NUM_FILE}", f"data.test_fraction={6 / NUM_FILE}"]
OVERRIDES += [f"evaluate.context_frames={CONTEXT}"]
HORIZON, LATE = 20, 56  # predicted frames of the error, and the frame of the late one
SETTINGS: tuple[Changes, ...] = (
    {},
    {"width": 32, "modes": 12, "batch_size": 4, "lr": 4e-3},
    {"width": 24, "modes": 12, "batch_size": 4, "lr": 2e-3},
    {"width": 48, "modes": 8, "batch_size": 4, "lr": 1e-3},
    {"width": 24, "modes": 8, "batch_size": 4, "lr": 4e-3},
)
USUAL = {"width": 32, "modes": 8, "batch_size": 8}
PADDING = 0.125  # of the domain, for networks of neuraloperator between walls


# ---- data --------------------------------------------------------------------------------------------------


def waves(rng: np.random.Generator, num: int, size: int, most: int) -> np.ndarray:
    """Return random periodic fields (num, x, y) of waves up to `most`, with maximum 1."""
    k = np.fft.fftfreq(size, 1 / size)
    kept = np.hypot(k[:, None], k) <= most
    u = np.fft.ifft2(np.fft.fft2(rng.standard_normal((num, size, size))) * kept).real
    return u / np.abs(u).max((1, 2), keepdims=True)


def conducted(k: np.ndarray, u: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return out + div (k grad u) on the unit square between walls without flux, of second order."""
    for axis in (1, 2):
        ends = [(1, 1) if other == axis else (0, 0) for other in range(3)]
        near, far = (np.moveaxis(k, axis, 0)[part] for part in (slice(1, None), slice(-1)))
        flux = np.moveaxis((near + far) / 2, 0, axis) * np.diff(u, axis=axis) * u.shape[1]
        out = out + np.diff(np.pad(flux, ends), axis=axis) * u.shape[1]
    return out


def spectral(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the derivatives along x and y and the Laplacian of `rfft2`, cells of length 1, and the waves
    that products keep."""
    k = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]
    x, y = (2j * np.pi * part for part in k)
    return x, y, (x**2 + y**2).real, (abs(k[0]) < 1 / 3) & (k[1] < 1 / 3)


def runge_kutta(
    u: np.ndarray, num_frames: int, num_steps: int, step: float, rate: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return frames (num_frames, ...) of u_t = rate(u), of fourth order with `num_steps` steps a frame."""
    out = []
    for _ in range(num_frames):
        out.append(u)
        for _ in range(num_steps):
            slopes = [rate(u)]
            for part in (step / 2, step / 2, step):
                slopes.append(rate(u + part * slopes[-1]))
            u = u + step / 6 * (slopes[0] + 2 * slopes[1] + 2 * slopes[2] + slopes[3])
    return np.stack(out)


def cahn_hilliard(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by a stabilised semi-implicit step in Fourier space; 30 units of time pass before the data."""
    rng, size, dt = np.random.default_rng(seed), 64, 0.1
    k = 2 * np.pi * np.fft.fftfreq(size)
    k2 = k[:, None] ** 2 + k**2
    u = 0.05 * rng.standard_normal((num, size, size)) + rng.uniform(-0.2, 0.2, (num, 1, 1))
    out = []
    for step in range(300 + 20 * num_frames):
        if step >= 300 and step % 20 == 0:
            out.append(u)
        slope = k2 * np.fft.fft2(u**3 - 3 * u)
        u = np.fft.ifft2((np.fft.fft2(u) - dt * slope) / (1 + dt * (2 * k2 + k2**2))).real
    return {"u": np.stack(out, 1)}


def wave(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by leapfrog with differences of second order, 16 steps a frame."""
    rng, size, dt = np.random.default_rng(seed), 48, 0.04 / 16
    c = 1 + 0.5 * waves(rng, num, size, 2)
    u = waves(rng, num, size, 3)
    v = np.zeros_like(u)

    def acceleration(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return conducted(c**2, u, -v / 2)

    out = []
    for _ in range(num_frames):
        out.append((u, v / 8))
        for _ in range(16):
            v = v + dt / 2 * acceleration(u, v)
            u = u + dt * v
            v = v + dt / 2 * acceleration(u, v)
    return {"u": np.stack([u for u, _ in out], 1), "v": np.stack([v for _, v in out], 1), "c": c}


def fronts(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by explicit finite volumes, 24 or 25 steps a frame."""
    rng, size = np.random.default_rng(seed), 64
    x, u = (np.arange(size) + 0.5) / size, np.zeros((num, size, size))
    for row in u:
        for _ in range(rng.integers(2, 6)):
            place, radius, height = rng.uniform(size=2), rng.uniform(0.08, 0.2), rng.uniform(0.4, 1)
            apart = ((x - place[:, None] + 0.5) % 1 - 0.5) ** 2 / radius**2
            np.maximum(row, height * (1 - apart[0][:, None] - apart[1]).clip(0) ** 0.5, out=row)
    out = []
    for _ in range(num_frames):
        out.append(u)
        for _ in range(round(0.0012 * size**2 / 0.2)):
            for axis in (1, 2):
                after = np.roll(u, -1, axis)
                flux = 0.2 * ((u + after) / 2) ** 2 * (after - u)
                u = u + flux - np.roll(flux, 1, axis)
    return {"u": np.stack(out, 1)}


def delay(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by splitting, 16 steps a frame; 36 frames pass before the data."""
    rng, size, lag, dt = np.random.default_rng(seed), 128, 48, 1 / 16
    k = 2 * np.pi * np.fft.rfftfreq(size)
    past = [1 + 0.5 * waves(rng, num, size, 8)[:, 0]] * (lag + 1)
    for _ in range(16 * (36 + num_frames)):
        crowd = np.fft.irfft(np.exp(-((4 * k) ** 2) / 2) * np.fft.rfft(past[-lag - 1]))
        grown = past[-1] * np.exp(0.6 * dt * (1 - crowd))
        past.append(np.fft.irfft(np.exp(-0.5 * dt * k**2) * np.fft.rfft(grown)))
    return {"u": np.stack(past[-16 * num_frames :: 16], 1)}


def tracer(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve in Fourier space, four steps a frame; the flow has 0.75 cells a frame (RMS)."""
    rng, size = np.random.default_rng(seed), 64
    x, y, lap, kept = spectral(size)
    stream = np.fft.rfft2(waves(rng, num, size, 2))
    flow = np.fft.irfft2(np.stack([y * stream, -x * stream]))
    flow *= 0.75 / np.sqrt((flow**2).sum(0).mean((1, 2), keepdims=True))

    def rate(u: np.ndarray) -> np.ndarray:
        u_hat = np.fft.rfft2(u)
        carried = flow[0] * np.fft.irfft2(x * u_hat) + flow[1] * np.fft.irfft2(y * u_hat)
        return np.fft.irfft2(0.05 * lap * u_hat - kept * np.fft.rfft2(carried))

    u = runge_kutta(waves(rng, num, size, 4), num_frames, 4, 0.25, rate)
    return {"u": u.swapaxes(0, 1)}


def hidden_rate(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve in Fourier space, four steps a frame."""
    rng, size = np.random.default_rng(seed), 64
    lap = spectral(size)[2]
    growth = 0.1 + 0.2 * waves(rng, num, size, 4)

    def rate(u: np.ndarray) -> np.ndarray:
        return np.fft.irfft2(0.5 * lap * np.fft.rfft2(u)) + growth * u * (1 - u)

    u = runge_kutta(0.3 + 0.25 * waves(rng, num, size, 6), num_frames, 4, 0.25, rate)
    return {"u": u.swapaxes(0, 1)}


def ginzburg_landau(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by splitting into two exact parts, five steps a frame; 20 units of time pass before the data."""
    rng, size, dt = np.random.default_rng(seed), 64, 0.1
    k = 2 * np.pi * np.fft.fftfreq(size)
    linear = np.exp(dt * (1 - (1 + 2j) * (k[:, None] ** 2 + k**2)))
    u = waves(rng, num, size, 6) + 1j * waves(rng, num, size, 6)
    out = []
    for step in range(200 + 5 * num_frames):
        if step >= 200 and step % 5 == 0:
            out.append(u)
        u = u * (1 + dt * abs(u) ** 2) ** (-(1 - 1.2j) / 2)
        u = np.fft.ifft2(linear * np.fft.fft2(u))
        u = u * (1 + dt * abs(u) ** 2) ** (-(1 - 1.2j) / 2)
    return {"u": np.stack(out, 1).real, "v": np.stack(out, 1).imag}


def island(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by finite volumes with a fifth of Rusanov's dissipation, two steps a frame."""
    rng, size = np.random.default_rng(seed), 48
    land = np.hypot(np.arange(size)[:, None] - 20, np.arange(size) - 28) < 7

    def flux(q: np.ndarray, axis: int) -> np.ndarray:
        out = q * q[1 + axis] / q[0]
        out[1 + axis] += q[0] ** 2 / 2
        return out

    def rate(q: np.ndarray) -> np.ndarray:
        out = np.zeros_like(q)
        for axis in (0, 1):
            turned = np.where(np.arange(3) == 1 + axis, -1, 1).reshape(3, 1, 1, 1)
            ahead, after = np.roll(land, -1, axis), np.roll(q, -1, 2 + axis)
            near, far = np.where(land, turned * after, q), np.where(ahead, turned * q, after)
            across = (flux(near, axis) + flux(far, axis)) / 2 - 0.1 * (far - near)
            out = out - across + np.roll(across, 1, 2 + axis)
        return np.where(land, 0, out)

    h = 1 + 0.2 * waves(rng, num, size, 4)
    q = runge_kutta(np.stack([h, 0 * h, 0 * h]), num_frames, 2, 0.5, rate)
    q = np.where(land, np.nan, q).swapaxes(0, 2)
    return {"h": q[:, 0] - 1, "u": q[:, 1] / q[:, 0], "v": q[:, 2] / q[:, 0]}


def conductivity(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve by finite volumes, 16 steps a frame; conductivities between 0.2 and 5."""
    rng, size = np.random.default_rng(seed), 48
    c = 5 ** waves(rng, num, size, 4)
    u = runge_kutta(waves(rng, num, size, 4), num_frames, 16, 2.5e-5, lambda u: conducted(c, u, 0 * u))
    return {"u": u.swapaxes(0, 1), "c": c}


def hasegawa_wakatani(num: int, num_frames: int, seed: int) -> dict[str, np.ndarray]:
    """Solve in Fourier space, four steps a frame; 40 frames pass before the data."""
    rng, size, cell = np.random.default_rng(seed), 48, 0.6
    x, y, lap, kept = spectral(size)
    x, y, lap = x / cell, y / cell, lap / cell**2
    inverse = np.divide(1, lap, where=lap < 0, out=np.zeros_like(lap))

    def rate(u: np.ndarray) -> np.ndarray:
        u_hat = np.fft.rfft2(u)
        potential = inverse * u_hat[0]
        along_x, along_y, *slopes = np.fft.irfft2([x * potential, y * potential, *(x * u_hat), *(y * u_hat)])
        bracket = along_x * np.stack(slopes[2:]) - along_y * np.stack(slopes[:2])
        coupling = potential - u_hat[1] - np.stack([0 * potential, y * potential])
        return np.fft.irfft2(coupling - 0.005 * lap**2 * u_hat - kept * np.fft.rfft2(bracket))

    u = 3 * np.stack([waves(rng, num, size, 6), waves(rng, num, size, 6)])
    u = runge_kutta(u, 40 + num_frames, 4, 0.1, rate)[40:]
    return {"u": u[:, 0].swapaxes(0, 1), "v": u[:, 1].swapaxes(0, 1)}


@dataclass(frozen=True)
class Stranger:
    """solve(trajectories, frames, seed): name -> field (trajectory, time, *space), `c` without a time; dt:
    between frames; history: frames that models get, where one does not tell the state."""

    solve: Callable[[int, int, int], dict[str, np.ndarray]]
    dt: float
    boundary: str = PERIODIC
    domain: tuple[float, float] = (0, 1)
    history: int = 1


PROBLEMS = {
    "cahn_hilliard": Stranger(cahn_hilliard, 2.0, domain=(0, 64)),
    "wave": Stranger(wave, 0.04, NO_FLUX),
    "fronts": Stranger(fronts, 0.0012),
    "delay": Stranger(delay, 1.0, domain=(0, 128), history=4),
    "tracer": Stranger(tracer, 1.0, domain=(0, 64), history=4),
    "hidden_rate": Stranger(hidden_rate, 1.0, domain=(0, 64), history=4),
    "ginzburg_landau": Stranger(ginzburg_landau, 0.5, domain=(0, 64)),
    "island": Stranger(island, 1.0, domain=(0, 48)),
    "conductivity": Stranger(conductivity, 4e-4, NO_FLUX),
    "hasegawa_wakatani": Stranger(hasegawa_wakatani, 0.4, domain=(0, 28.8)),
}


def made(problem: str) -> tuple[Path, Split]:
    """Return the configuration of a problem as user data, and its test trajectories; solve unless there."""
    own = PROBLEMS[problem]
    files = {name: OUT / "strangers" / f"{problem}{name}.npz" for name in ("", "_test")}
    for path, given in zip(files.values(), ((NUM_FILE, NUM_FRAMES, 1), (NUM_TEST, NUM_LONG, 2)), strict=True):
        if not path.is_file():
            write(path, own.solve(*given))
    with np.load(files["_test"]) as file:
        fields = {name: torch.from_numpy(file[name]) for name in file.files}
    found, space = [*fields.values()], "xy"[: next(iter(fields.values())).ndim - 2]
    moving = sum(u.ndim == found[0].ndim for u in found)
    layout = {name: ["trajectory", *["time"] * (name != "c"), *space] for name in fields}
    settings = {"layout": layout, "history": own.history}
    settings |= {"symmetries": []} if found[0].isnan().any() else {}  # none keeps a mask in its place
    config = write_config(files[""], CONFIG, problem, own.dt, own.boundary, own.domain, settings=settings)
    whole = torch.stack([u if u.ndim == found[0].ndim else u[:, None].expand_as(found[0]) for u in found], 2)
    none = torch.zeros(NUM_TEST, 0, dtype=torch.float64)
    truth = whole[:, CONTEXT:, :moving]
    return config, Split(whole[:, :CONTEXT], truth, none, torch.arange(NUM_TEST))


# ---- networks ----------------------------------------------------------------------------------------------


class Authors(nn.Module):
    """A network of neuraloperator with the interface of `Rival`; zero at the start of training."""

    def __init__(
        self,
        kind: str,
        channels_in: int,
        num_parameters: int,
        channels_out: int,
        sizes: tuple[int, ...],
        boundary: str,
        settings: Settings,
    ):
        super().__init__()
        import neuralop.models

        width, modes = settings.width, [2 * settings.modes] * len(sizes)  # of both signs
        between = any(end != PERIODIC for end in along(boundary, len(sizes)))
        shape = {"in_channels": channels_in, "out_channels": channels_out, "hidden_channels": width}
        shape["domain_padding"] = PADDING if between else None
        if kind == "UNO":  # five layers, as in its documentation
            shape |= {"lifting_channels": 2 * width, "projection_channels": 2 * width, "n_layers": 5}
            shape["uno_out_channels"] = [width, 2 * width, 2 * width, 2 * width, width]
            shape["uno_n_modes"] = [modes, *[[settings.modes] * len(sizes)] * 3, modes]
            shape["channel_mlp_skip"] = "linear"
            shape["uno_scalings"] = [[scale] * len(sizes) for scale in (1.0, 0.5, 1, 1, 2)]
        else:
            shape |= {"n_modes": modes, "n_layers": settings.depth}
        with contextlib.redirect_stdout(io.StringIO()):
            self.network = getattr(neuralop.models, kind)(**shape)
        last = self.network.projection.fcs[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, u: Tensor, parameters: Tensor) -> Tensor:
        return self.network(u.movedim(-1, 1)).movedim(1, -1)


# ---- one training ------------------------------------------------------------------------------------------


def evaluate(problem: str, column: str, seed: int, args: argparse.Namespace) -> None:
    """Search, train and score one column unless the result exists."""
    path, test = made(problem)
    # the cache that stored keys name; rivals see no latents
    config = with_cache(load_config(path, [*OVERRIDES, f"task.{problem}.patch=4"]), problem)
    given, splits = load(config, problem)
    data = open_cache(config, problem).fingerprint
    key, searched = (key_of(args, column, one, data) for one in (seed, args.seeds[0]))
    if is_there(problem, FOLDER, key):
        return
    more = {"network": partial(Authors, column)} if column in AUTHORS else {}

    def trained(changes: Changes, seconds: float) -> Trained:
        own = Settings(**USUAL | {"history": PROBLEMS[problem].history} | changes)
        return train_rival(args, config, given, splits["val"], own, seed, seconds, **more)

    def trial(changes: Changes, seconds: float, is_whole: bool) -> Trial:
        one = trained(changes, seconds)
        return Trial(best_error(one), one.steps, one.seconds)

    if column == "ours":
        own = load_config(path, [*OVERRIDES, f"cache.root={path.with_suffix('')}_ours"])
        settings = {"patch": own.task[problem].patch, "batch_size": own.operator.train.batch_size}
        settings |= to_dict(own.operator.model)
        model = train_ours(with_cache(own, problem), problem, args.budget, seed)
    else:
        found = [one["settings"] for one in read(problem, FOLDER)["entries"] if one["key"] == searched]
        if not found:
            found = [search(list(SETTINGS), [], trial, search_seconds(args), args.budget)["changes"]]
        model = trained(settings := found[0], args.budget)
    with warnings.catch_warnings(record=True) as said:  # of ours: what a user hears of a late forecast
        warnings.simplefilter("always")
        errors = by_lead(rollout(model, test, BATCH)[0])
    cost = {"steps": model.steps, "seconds": model.seconds, "parameters": model.num_parameters}
    row = scores(errors) | {"validation": best_error(model), "warnings": [str(one.message) for one in said]}
    facts = {"persistence": scores(by_lead(persistence(test)))}
    if column in AUTHORS:
        facts["package"] = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    put(problem, FOLDER, key, {"settings": settings, **cost, "row": row}, args.device, **facts)
    print(f"{problem} {column} seed {seed}: {row}, {cost}", flush=True)


def scores(pooled: list[float]) -> dict[str, float]:
    """Return the errors of the first frame, over the horizon and late, from those of all frames."""
    return {
        "first": pooled[0],
        "error": sum(pooled[:HORIZON]) / HORIZON,
        "late": pooled[LATE - 1],
    }


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--problem", nargs="+", choices=tuple(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--column", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    add_arguments(parser)
    args = parser.parse_args(argv)
    prepare(args)
    for problem, seed, column in itertools.product(args.problem, args.seeds, args.column):
        evaluate(problem, column, seed, args)


if __name__ == "__main__":
    main()
