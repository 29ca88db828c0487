"""Derivatives of forecasts against those of the solvers that made the data.

    python -m bench.trust

For every published task whose solver starts from a frame: the error of the last frame, and the cosine between
the derivatives of <v, last frame> along smooth changes of the start, v the last frame itself: by the solver,
in float64 (central differences, which need no adjoint of the solver), and by `Forecaster.vjp`.
"""

import numpy as np
import torch
from torch import Tensor

import ups
from ups.common.text import number
from ups.forecaster import Forecaster
from ups.report.tables import markdown_table
from ups_discovery.seeds import generator
from ups_solvers import SOLVERS

# task -> (frames of the forecast, first frame of the start in a solver's trajectory)
CASES = {
    "advection1d": (20, 0),
    "burgers1d": (20, 1),
    "diff_sorp1d": (20, 5),
    "cfd2d": (5, 1),
    "darcy2d": (1, 0),
    "ns_incom2d": (5, 1),
}
NUM_CHANGES, MOST_WAVES, SIZE = 24, 4, 1e-4  # directions, waves along an axis, relative size of a difference
SEED = 2026


def directions(u: Tensor) -> Tensor:
    """Smooth changes (NUM_CHANGES, *u.shape[1:]) of a start u (1, C, *space), with its size per channel."""
    points = torch.meshgrid(*[(torch.arange(n) + 0.5).double() / n for n in u.shape[2:]], indexing="ij")
    source, found = generator(SEED, "changes"), []
    for _ in range(NUM_CHANGES * u.shape[1]):
        waves = torch.randint(0, MOST_WAVES + 1, (len(points),), generator=source)
        phase = 2 * torch.pi * torch.rand((), generator=source)
        found.append((2 * torch.pi * sum(k * x for k, x in zip(waves, points, strict=True)) + phase).sin())
    scale = u.double().flatten(2).std(2).clamp_min(1e-6).view(1, -1, *[1] * len(points))
    return torch.stack(found).view(NUM_CHANGES, u.shape[1], *u.shape[2:]) * scale


def compared(model: Forecaster, task: str, seed: int) -> tuple[float, float]:
    """(relative error of the last frame, cosine of the derivatives)."""
    num_frames, first = CASES[task]
    known, solver, head = model.tasks[task], SOLVERS[task], model.operator.head(task)
    value = head.facts.parameter_values[-1] if solver.parameter else None
    parameters = {name: high for name, (_, high) in known["parameters"].items()}
    shape = {"resolution": known["grid"][0], "num_frames": 1 + first, "parameter": value}
    u = solver.simulate([0], seed=seed, t_end=max(first, 1) * (known["dt"] or 1.0), **shape)[:, -1].double()
    u = u[:, : len(known["inputs"])] if known["inputs"] else u
    times = {"parameter": value, "dt": known["dt"] or 1.0}

    def films(u: Tensor) -> Tensor:
        """The start and what follows it, (n, frames, C, *space)."""
        later = solver.integrate(u, num_frames=num_frames + known["history"] - 1, **times)
        return later if known["inputs"] else torch.cat([u[:, None], later], 1)

    film = films(u)
    start = u[:, None] if known["inputs"] else film[:, : known["history"]]
    u_pred, pull = model.vjp(task, start.numpy(), parameters, num_frames)
    last = film[:, -1].numpy()
    v = np.zeros_like(u_pred)
    v[:, -1] = last
    gradient, changes = torch.from_numpy(pull(v)["u0"]), SIZE * directions(u)
    by_solver = (films(u + changes) - films(u - changes)) / (2 * SIZE)
    of_start = changes[:, None] / SIZE if known["inputs"] else by_solver[:, : known["history"]]
    found = (gradient * of_start).flatten(1).sum(1)
    expected = (by_solver[:, -1] * film[:, -1]).flatten(1).sum(1)
    error = np.linalg.norm(u_pred[:, -1] - last) / np.linalg.norm(last)
    return float(error), float(torch.cosine_similarity(found, expected, 0))


def main() -> None:
    model, rows = ups.load("pretrained"), []
    for task, (num_frames, _) in CASES.items():
        errors, cosines = zip(*[compared(model, task, SEED + start) for start in range(3)], strict=True)
        rows.append([task, str(num_frames), number(max(errors)), f"{min(cosines):.4f}"])
        print(*rows[-1], flush=True)
    print("\n".join(markdown_table(["task", "frames", "largest error", "least cosine"], rows)))


if __name__ == "__main__":
    main()
