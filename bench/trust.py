"""Derivatives of forecasts, and bands around them, against the solvers that made the data.

    python -m bench.trust                       # derivatives by the published weights
    python -m bench.trust --run runs/trust      # bands of a run

For every published task whose solver starts from a frame: the error of the last frame, and the cosine between
the derivatives of <v, last frame> along smooth changes of the start, v the last frame itself: by the solver,
in float64 (central differences, which need no adjoint of the solver), and by `Forecaster.vjp`.

For every task of a run with a band: of forecasts of fresh starts the fraction of whole rollouts inside, the
median width over that of the smallest constant band that covers 90 % of them, and the rank correlation of the
stated with the true error. Then starts of other amplitudes, and other parameters where the base serves them:
the fraction of stated errors within a factor of 2, and the area under the curve by which the distance, or the
stated error, finds errors above 3 times the trained ones (the 90 % quantile).
"""

import argparse
import math
import warnings

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from torch import Tensor

import ups
from ups.common.text import number
from ups.forecaster import Forecaster
from ups.models.band import Band, local, numbers_of
from ups.models.head import TaskHead
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
AMPLITUDES, FACTORS, NUM_STARTS = (0.5, 1.5, 2.0, 3.0), (0.5, 2.0), 200
CONTEXT = 10  # frames before validated forecasts (evaluate.context_frames)


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


def rollouts(head: TaskHead, value: float | None, seed: int, amplitude: float = 1.0) -> tuple[Tensor, ...]:
    """(start, later frames), normalised, of fresh starts, of which the first is multiplied."""
    solver, dt, first = SOLVERS[head.name], head.facts.dt, CONTEXT - head.history
    num_frames = first + head.history + len(head.facts.band["profile"])
    shape = {"resolution": head.codec.space[0], "parameter": value}
    u = solver.simulate(
        range(NUM_STARTS), seed=seed, num_frames=num_frames, t_end=dt * (num_frames - 1), **shape
    )
    if amplitude != 1.0:
        start = amplitude * u[:, first]
        later = solver.integrate(start, parameter=value, dt=dt, num_frames=num_frames - first - 1)
        u = torch.cat([start[:, None], later], 1)
        first = 0
    w = head.codec.normalise(u[:, first:])
    return w[:, : head.history], w[:, head.history :]


def band_row(model: Forecaster, head: TaskHead) -> list[str]:
    """The row of a task."""
    band, solver = Band(**head.facts.band), SOLVERS[head.name]
    values = head.facts.parameter_values if solver.parameter else [None]
    num = len(head.facts.parameters)
    cases = [(value, 1.0) for value in values] + [(value, a) for value in values for a in AMPLITUDES]
    if num and not head.base.needs_fitted_parameters:
        cases += [(values[end] * factor, 1.0) for end, factor in zip((0, -1), FACTORS, strict=True)]
    kept: dict[bool, list[tuple]] = {True: [], False: []}  # by whether starts are like those of training
    for place, (value, amplitude) in enumerate(cases):
        w, w_ref = rollouts(head, value, SEED + place, amplitude)
        raw = torch.full((len(w), num), value or 0.0, dtype=torch.float64)
        w_pred = model.operator.forecast(w, head.name, raw, w_ref.shape[1])
        found = numbers_of(head, w, raw, w_pred, w_ref)
        s, distance = band.expected(found[:, -len(band.mean) :], num)
        shape = (-1, *[1] * (w_pred.ndim - 1))
        profile = torch.tensor(band.profile).view(1, *w_pred.shape[1:3], *shape[3:])
        half = band.width * s.float().view(shape) * profile * local(head, w_pred)
        error = (w_pred - w_ref).abs()
        inside, width = (error <= half).flatten(1).all(1), half.flatten(1).mean(1)
        kept[place < len(values)].append((found[:, 0], s, distance, inside, width, error.flatten(1).amax(1)))
    true, stated, far, inside, width, most = (torch.cat(column) for column in zip(*kept[True], strict=True))
    others = [torch.cat(column) for column in zip(*kept[False], strict=True)]
    is_bad = torch.cat([true, others[0]]) > 3 * true.quantile(0.9)
    alarm = torch.maximum(torch.cat([far, others[2]]) / 2, torch.cat([stated, others[1]]) / band.error / 3)
    ranks, bad = rankdata(alarm.numpy()), is_bad.numpy()
    area = (
        (ranks[bad].mean() - (bad.sum() + 1) / 2) / (~bad).sum() if bad.any() and not bad.all() else math.nan
    )
    served = alarm[len(true) :] <= 1
    close = (others[1] / others[0]).log().abs()[served] <= math.log(2)
    constant = most.sort()[0][math.ceil(0.9 * (len(most) + 1)) - 1]
    return [
        head.name,
        str(len(true)),
        f"{inside.double().mean():.3f}",
        f"{width.median() / constant:.2f}",
        f"{spearmanr(stated, true)[0]:.2f}",
        f"{(far > 1).double().mean():.2f}",
        f"{bad.mean():.2f}",
        f"{area:.2f}",
        f"{close.double().mean():.2f}",
    ]


def bands(folder: str) -> None:
    model = ups.load(folder)
    heads = [head for head in model.operator.heads.values() if head.facts.band]
    head = ["task", "starts", "inside", "width", "rank", "alarms", "errors x 3", "their AUROC", "within x 2"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print("\n".join(markdown_table(head, [band_row(model, one) for one in heads])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", help="a run whose weights have bands")
    args = parser.parse_args()
    if args.run:
        bands(args.run)
        return
    model, rows = ups.load("pretrained"), []
    for task, (num_frames, _) in CASES.items():
        errors, cosines = zip(*[compared(model, task, SEED + start) for start in range(3)], strict=True)
        rows.append([task, str(num_frames), number(max(errors)), f"{min(cosines):.4f}"])
        print(*rows[-1], flush=True)
    print("\n".join(markdown_table(["task", "frames", "largest error", "least cosine"], rows)))


if __name__ == "__main__":
    main()
