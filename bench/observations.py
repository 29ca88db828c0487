"""Members given measurements of the state, against exact answers: the table of docs/uncertain.md.

    python -m bench.observations [--cases 40]

Linear: u_t = -u_x + 0.05 u_xx with a random kick of its waves before every frame, as a user's file. UPS
trains an operator and Gaussian waves of its errors; the exact answer is the Kalman smoother, at the last
frame the Kalman filter. Nonlinear: forced Burgers by its solver, so that only the smoother
(ups/generative/filtering.py) is judged, against a particle filter. Columns: RMS error of the mean over that
of the exact one, fraction of the truths inside the 90 % intervals, and both without measurements.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ups
from bench.command import parser_of, run_scripts
from bench.user_data import CONFIG, write, write_config
from ups.generative.filtering import ENSEMBLE, smoothed
from ups.report.tables import markdown_table
from ups_solvers.burgers_forced import evolve, start

CELLS, DT, KICK, WAVES = 32, 0.1, 0.3, 3
FRAMES, OBSERVED, EVERY, NOISE = 6, (2, 4, 6), 4, 0.3  # noise: over the standard deviation of the state
PARTICLES, NU = 20_000, 0.01


def basis() -> np.ndarray:
    """Orthonormal waves (2 WAVES, CELLS)."""
    angle = 2 * np.pi * np.arange(1, WAVES + 1)[:, None] * np.arange(CELLS) / CELLS
    return np.concatenate([np.cos(angle), np.sin(angle)]) * np.sqrt(2 / CELLS)


def step() -> np.ndarray:
    """The equation's map of one frame in the coordinates of `basis`, (2 WAVES, 2 WAVES)."""
    k = np.fft.rfftfreq(CELLS, 1 / CELLS)
    factor = np.exp(DT * (-1j * k - 0.05 * k**2))
    return np.fft.irfft(factor * np.fft.rfft(basis()), CELLS) @ basis().T


def films(count: int, num_frames: int, seed: int) -> np.ndarray:
    """Coordinates (count, num_frames, 2 WAVES) from the stationary law on."""
    random, matrix = np.random.default_rng(seed), step()
    states = [np.zeros((count, 2 * WAVES))]
    for _ in range(60 + num_frames):
        states.append(states[-1] @ matrix + KICK * random.standard_normal((count, 2 * WAVES)))
    return np.stack(states[-num_frames:], 1)


def kalman(start_state: np.ndarray, y: np.ndarray, size: float) -> np.ndarray:
    """Mean (FRAMES, CELLS) of the exact smoother given y (len(OBSERVED), cells) from a known start."""
    dim, matrix, every = 2 * WAVES, step(), np.arange(0, CELLS, EVERY)
    paths = np.zeros((FRAMES * dim, FRAMES * dim))  # rows: of the noises before, columns: states
    mean = np.stack([start_state @ np.linalg.matrix_power(matrix, n + 1) for n in range(FRAMES)])
    for n in range(FRAMES):
        for k in range(n + 1):
            paths[k * dim : (k + 1) * dim, n * dim : (n + 1) * dim] = KICK * np.linalg.matrix_power(
                matrix, n - k
            )
    prior = paths.T @ paths
    h = np.zeros((len(OBSERVED), len(every), FRAMES, dim))
    for place, frame in enumerate(OBSERVED):
        h[place, :, frame - 1] = basis().T[every]
    h = h.reshape(-1, FRAMES * dim)
    inner = h @ prior @ h.T + size**2 * np.eye(len(h))
    gain = np.linalg.solve(inner, h @ prior).T
    return (mean.ravel() + gain @ (y.ravel() - h @ mean.ravel())).reshape(FRAMES, dim) @ basis()


def summary(members: np.ndarray, truth: np.ndarray, exact: np.ndarray) -> list[str]:
    """Error of the mean over that of the exact one and coverage. members (cases, N, ...)."""

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.square(found - truth).mean()))

    low, high = np.quantile(members, [0.05, 0.95], axis=1)
    inside = np.mean((low < truth) & (truth < high))
    return [f"{error(members.mean(1)) / error(exact):.3f}", f"{inside:.2f}"]


def linear(cases: int, folder: Path) -> list[list[str]]:
    """The rows of the linear task."""
    write(folder / "kicked.npz", {"u": films(600, 16, 0) @ basis()})
    config = write_config(
        folder / "kicked.npz", CONFIG, "kicked", DT, domain=(0, 2 * np.pi), settings={"reserve": 0.5}
    )
    options = [f"run.root={folder}", "run.name=run", "operator.train.steps=40", "diffusion.train.steps=40"]
    options += ["operator.train.validate_every=40", "diffusion.train.validate_every=40"]
    options += ["diffusion.model.width=16", "diffusion.scale_steps=40", "diffusion.max_whitened_std=10"]
    run_scripts(config, options, "prepare_cache", "train_operator", "train_diffusion")
    model = ups.load(folder / "run")
    states = films(cases, FRAMES + 1, 1)
    truth, every = states[:, 1:] @ basis(), np.arange(0, CELLS, EVERY)
    size = NOISE * truth.std()
    y = truth + size * np.random.default_rng(2).standard_normal(truth.shape)
    y = y[:, [frame - 1 for frame in OBSERVED]]
    exact = np.stack([kalman(s[0], one[..., every], size) for s, one in zip(states, y, strict=True)])
    u0 = (states[:, 0] @ basis())[:, None, None].astype(np.float32)
    mask = np.arange(CELLS) % EVERY == 0
    observations = {"frames": OBSERVED, "values": y[:, :, None], "mask": mask, "noise": size}
    options = {"num_frames": FRAMES, "members": ENSEMBLE, "by": "waves"}
    held = model.sample("kicked", u0, observations=observations, **options)[:, :, :, 0]
    free = model.sample("kicked", u0, **options)[:, :, :, 0]
    rows = []
    for name, frames in (
        ("linear, all frames, Kalman smoother", slice(None)),
        ("linear, last frame, Kalman filter", -1),
    ):
        given, none = (summary(x[:, :, frames], truth[:, frames], exact[:, frames]) for x in (held, free))
        rows.append([name, *given, *none])
    return rows


def particle_filter(
    advance: Callable[[Tensor], Tensor],
    first: Tensor,
    y: dict[int, Tensor],
    size: float,
    rng: torch.Generator,
) -> Tensor:
    """Mean of the last state given y by `PARTICLES` particles that are resampled at every measurement."""
    x = first.expand(PARTICLES, -1)
    for frame in range(1, FRAMES + 1):
        x = advance(x)
        weight = torch.full((PARTICLES,), 1 / PARTICLES, dtype=torch.float64)
        if frame in y:
            weight = torch.softmax(-0.5 * ((x[:, ::EVERY] - y[frame]) / size).square().sum(1), 0)
            mean = weight @ x
            x = x[torch.multinomial(weight, PARTICLES, True, generator=rng)]
    return mean


def nonlinear(cases: int) -> list[list[str]]:
    """The row of forced Burgers, on CELLS cells, measured at every EVERY-th cell."""
    streams = [np.random.default_rng([3, number]) for number in range(cases)]
    states, rng = start(streams, CELLS, NU)[:, 0], torch.Generator().manual_seed(4)
    found, free, truths, means = [], [], [], []
    for number, first in enumerate(states):
        random = np.random.default_rng([5, number])

        def advance(x: Tensor, random: np.random.Generator = random) -> Tensor:
            return evolve(x[:, None], [random] * len(x), num_frames=1, parameter=NU, dt=DT / 2)[:, 0, 0]

        truth, y, size = first[None], {}, NOISE * float(states.std())
        for frame in range(1, FRAMES + 1):
            truth = advance(truth)
            if frame in OBSERVED:
                y[frame] = truth[0, ::EVERY] + size * torch.randn(CELLS // EVERY, generator=rng).double()
        means.append(particle_filter(advance, first, y, size, rng))

        def segment(done: Tensor | None, frame: int, first=first, advance=advance) -> Tensor:
            x = first.expand(ENSEMBLE, -1) if done is None else done[:, -1]
            frames = []
            for _ in range(frame - (0 if done is None else done.shape[1])):
                frames.append(x := advance(x))
            return torch.stack(frames, 1)

        def eta(_: int, count: int) -> Tensor:
            return torch.randn(ENSEMBLE, count, generator=rng).double()

        measured = {frame: (one, torch.full_like(one, size)) for frame, one in y.items()}
        for members, given in ((found, measured), (free, {})):
            x, _ = smoothed(segment, lambda x, _: x[:, ::EVERY], given, eta, FRAMES)
            members.append(x[:, -1])
        truths.append(truth[0])
    truth, exact = torch.stack(truths).numpy(), torch.stack(means).numpy()
    given, none = (summary(torch.stack(x).numpy(), truth, exact) for x in (found, free))
    return [["forced Burgers by its solver, last frame, particle filter", *given, *none]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = linear(options.cases, Path(folder)) + nonlinear(min(16, options.cases))
    head = ("task and reference", "error over exact", "inside 90 %", "error without", "inside without")
    print("\n".join(markdown_table(head, rows)))


if __name__ == "__main__":
    main()
