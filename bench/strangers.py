"""Three problems of strangers in 2D: UPS as a user starts it, beside networks by the code of their authors.

    pip install --no-deps --target other neuraloperator==2.0.0 tensorly tensorly-torch opt-einsum zencfg \\
        configmypy ruamel.yaml
    PYTHONPATH=other python -m bench.strangers --budget 30 --search 30
    python -m bench.table                                     # the table of docs/peers.md

    cahn_hilliard: u_t = lap (u^3 - u - lap u), periodic, after separation has begun
    wave: u_tt = div (c^2 grad u) - u_t / 2, walls without flux, another c(x, y) in every trajectory, given
    fronts: u_t = div (u^2 grad u), periodic, from patches of compact support

86 trajectories of 24 frames (68 train, 12 validate, 6 are not read), 24 of 64 frames to test; four frames are
given. Columns: ours (default settings for user data, without a search), fno (bench/rivals.py), and FNO, TFNO
and UNO of neuraloperator, trained by the recipe of bench/baselines.py. Rivals have their width, modes, batch
and rate from a search of --search processor seconds on validation (SETTINGS, bench/search.py). Results:
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
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bench.baselines import Trained, best_error
from bench.command import parser_of
from bench.entries import RESULTS, is_there, put
from bench.ours import train_ours
from bench.rivals import Settings
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
        out = -v / 2
        for axis in (1, 2):
            ends = [(1, 1) if other == axis else (0, 0) for other in range(3)]
            near, far = (np.moveaxis(c**2, axis, 0)[part] for part in (slice(1, None), slice(-1)))
            flux = np.moveaxis((near + far) / 2, 0, axis) * np.diff(u, axis=axis) * size
            out = out + np.diff(np.pad(flux, ends), axis=axis) * size
        return out

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


# solver, frame interval, boundary, domain
PROBLEMS: dict[str, tuple[Callable[..., dict[str, np.ndarray]], float, str, tuple[float, float]]] = {
    "cahn_hilliard": (cahn_hilliard, 2.0, PERIODIC, (0, 64)),
    "wave": (wave, 0.04, NO_FLUX, (0, 1)),
    "fronts": (fronts, 0.0012, PERIODIC, (0, 1)),
}


def made(problem: str) -> tuple[Path, Split]:
    """Return the configuration of a problem as user data, and its test trajectories; solve unless there."""
    solve, dt, boundary, domain = PROBLEMS[problem]
    files = {name: OUT / "strangers" / f"{problem}{name}.npz" for name in ("", "_test")}
    for path, given in zip(files.values(), ((NUM_FILE, NUM_FRAMES, 1), (NUM_TEST, NUM_LONG, 2)), strict=True):
        if not path.is_file():
            write(path, solve(*given))
    with np.load(files["_test"]) as file:
        found = [torch.from_numpy(file[name]) for name in file.files]
    moving = sum(u.ndim == found[0].ndim for u in found)
    layout = {name: ["trajectory", *["time"] * (name != "c"), "x", "y"] for name in ("u", "v", "c")}
    settings = {"layout": {name: layout[name] for name in file.files}}
    config = write_config(files[""], CONFIG, problem, dt, boundary, domain, settings=settings)
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
    key = key_of(args, column, seed, open_cache(config, problem).fingerprint)
    if is_there(problem, FOLDER, key):
        return
    more = {"network": partial(Authors, column)} if column in AUTHORS else {}

    def trained(changes: Changes, seconds: float) -> Trained:
        own = Settings(**USUAL | changes)
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
        settings = search(list(SETTINGS), [], trial, search_seconds(args), args.budget)["changes"]
        model = trained(settings, args.budget)
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
