"""Derivatives of forecasts, and bands around them, against the solvers that made the data.

    python -m bench.trust                       # derivatives by the published weights
    python -m bench.trust --run runs/trust      # bands of a run

For every published task whose solver starts from a frame: the error of the last frame, and the cosine between
the derivatives of <v, last frame> along smooth changes of the start, v the last frame itself: by the solver,
in float64 (central differences, which need no adjoint of the solver), and by `Forecaster.vjp`.

For every task of a run with a band: of forecasts of fresh starts the fraction of whole rollouts inside, the
median width over that of the smallest constant band that covers 90 % of them, and the rank correlation of the
stated with the true error. Then starts of other amplitudes (of a coefficient: of other powers), of half the
wave length, and other parameters where the base serves them: the area under the curve by which the verdict
finds errors above 3 times the trained ones (the 90 % quantile), how many of them and of the others it
refuses, and the fraction of stated errors within a factor of 2 where it does not.
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
from ups.forecast_band import FAR, beyond
from ups.forecaster import Forecaster
from ups.models.band import LARGE, Band, differences, local
from ups.models.head import TaskHead
from ups.report.tables import markdown_table
from ups_discovery.boundary import PERIODIC
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
# amplitude and number of copies of starts; factors of parameters; how many times finer solutions are where
# starts on the grid do not determine them
SHIFTS, FACTORS = [(0.5, 1), (1.5, 1), (2.0, 1), (3.0, 1), (1.0, 2), (2.0, 2)], (0.5, 2.0)
NUM_STARTS, REFINED = 100, {"burgers1d": 32}
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


def rollouts(
    head: TaskHead, value: float | None, seed: int, amplitude: float = 1.0, waves: int = 1
) -> tuple[Tensor, ...]:
    """(start, later frames), normalised, of fresh starts, which are multiplied and repeated."""
    solver, dt, history, n = SOLVERS[head.name], head.facts.dt, head.history, head.codec.space[0]
    num_frames = history + len(head.facts.band["profile"])
    first = 0 if head.task.is_steady else CONTEXT - history
    is_shifted = (amplitude, waves) != (1.0, 1)
    finer = REFINED.get(head.name, 1) if is_shifted else 1
    last = max(1, first if is_shifted else first + num_frames - 1)
    shape = {"resolution": finer * n, "num_frames": last + 1, "t_end": (dt or 1.0) * last}
    u = solver.simulate(range(NUM_STARTS), seed=seed, parameter=value, **shape)[:, first:]
    if is_shifted:
        start = u[:, 0, : len(head.task.inputs)] ** amplitude if head.task.is_steady else amplitude * u[:, 0]
        for axis in range(2, start.ndim * (waves - 1)):
            half = start.unflatten(axis, (-1, 2)).mean(axis + 1)
            start = torch.cat([half, half if head.task.boundary == PERIODIC else half.flip(axis)], axis)
        later = solver.integrate(start, parameter=value, dt=dt, num_frames=num_frames - 1)
        u = torch.cat([start[:, None], later], 2 if head.task.is_steady else 1)
    for axis in range(3, u.ndim):
        u = u.unflatten(axis, (-1, finer)).mean(axis + 1)
    if head.task.is_steady:
        num = len(head.task.inputs)
        return head.input_codec.normalise(u[:, :, :num]), head.codec.normalise(u[:, :, num:])
    w = head.codec.normalise(u)
    return w[:, :history], w[:, history:]


def band_row(model: Forecaster, head: TaskHead) -> list[str]:
    """The row of a task."""
    band, solver = Band(**head.facts.band), SOLVERS[head.name]
    values = head.facts.parameter_values if solver.parameter else [None]
    cases = [(value, 1.0, 1) for value in values]
    cases += [(value, *shift) for value in values for shift in SHIFTS]
    if head.facts.parameters and not head.base.needs_fitted_parameters:
        cases += [(values[end] * factor, 1.0, 1) for end, factor in zip((0, -1), FACTORS, strict=True)]
    spans = [*enumerate(head.facts.parameters.values())]
    kept: dict[bool, list[tuple]] = {True: [], False: []}  # by whether starts are like those of training
    for place, (value, *shift) in enumerate(cases):
        w, w_ref = rollouts(head, value, SEED + place, *shift)
        # the solver varies the first parameter, and others that are no constants with it
        row = [value if place == 0 or low < high else low for place, (low, high) in spans]
        raw = torch.tensor(row, dtype=torch.float64).expand(len(w), -1)
        w_pred = model.operator.forecast(w, head.name, raw, w_ref.shape[1])
        given = model.operator, head.name, w, raw, w_pred, head.facts.network_weight, None
        s = band.expected(differences(*given))
        shape = (-1, *[1] * (w_pred.ndim - 1))
        profile = torch.tensor(band.profile).view(1, *w_pred.shape[1:3], *shape[3:])
        half = band.width * s.float().view(shape) * profile * local(head, w_pred)
        error, alarm = (w_pred - w_ref).abs(), torch.maximum(s / band.error / LARGE, beyond(head, raw) / FAR)
        inside, width = (error <= half).flatten(1).all(1), half.flatten(1).mean(1)
        true = error.double().square().flatten(1).mean(1).sqrt()
        kept[place < len(values)].append((true, s, alarm, inside, width, error.flatten(1).amax(1)))
    true, stated, _, inside, width, most = (torch.cat(column) for column in zip(*kept[True], strict=True))
    every, said, alarm, *_ = (torch.cat(column) for column in zip(*kept[True], *kept[False], strict=True))
    is_bad = every > 3 * true.quantile(0.9)
    ranks, bad = rankdata(alarm.numpy()), is_bad.numpy()
    area = (
        (ranks[bad].mean() - (bad.sum() + 1) / 2) / (~bad).sum() if bad.any() and not bad.all() else math.nan
    )
    is_refused, is_close = alarm > 1, (said / every).log().abs() <= math.log(2)
    constant = most.sort()[0][math.ceil(0.9 * (len(most) + 1)) - 1]
    numbers = [
        inside.double().mean(),
        width.median() / constant,
        spearmanr(stated, true)[0],
        area,
        is_refused[is_bad].double().mean(),
        is_refused[~is_bad].double().mean(),
        is_close[~is_refused].double().mean(),
    ]
    return [head.name, str(len(true)), *(f"{float(number):.3f}" for number in numbers)]


def bands(folder: str) -> None:
    model = ups.load(folder)
    heads = [head for head in model.operator.heads.values() if head.facts.band]
    head = ["task", "starts", "inside", "width", "rank", "AUROC", "refused", "false", "within x 2"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print("\n".join(markdown_table(head, [])), flush=True)
        for one in heads:
            print(f"| {' | '.join(band_row(model, one))} |", flush=True)


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
