"""What bands, stated errors and derivatives of forecasts are worth, on test trajectories."""

import math

import torch
from torch import Tensor

from ups.config.schema import Config
from ups.data.generate import solver_of
from ups.evaluation.truth import Truth
from ups.metrics.intervals import Resamples, number, numbers, plain_mean
from ups.models.band import Band, measured
from ups.models.operator import Operator
from ups.results import Entry
from ups.tasks import Task

BANDED, FRACTIONS = 32, 10  # trajectories with bands, and points of the risk by the fraction not refused
# changes of a start, towards those of other trajectories, by the fraction SIZE
NUM_CHANGES, LEAST_CHANGES, SIZE = 6, 3, 1e-6


def assess_trust(entry: Entry, operator: Operator, truth: Truth, config: Config) -> None:
    """Add the case "band" of a task whose weights have one."""
    if operator.head(entry.name).facts.band and not config.evaluate.weights:  # those have other latents
        add_band(entry, operator, truth, config)
        if not why_unknown(truth.task, config):
            entry.add("operator", {"derivative": number(derivative_cosine(operator, truth))}, "band")


def add_band(entry: Entry, operator: Operator, truth: Truth, config: Config) -> None:
    """The fractions of rollouts inside the band (of all and by lead) and inside that of the cells, of
    verdicts and of stated errors within a factor of 2; risk: the RMS error, over that of all, of the
    forecasts with the smallest stated errors; risk_best: with the smallest true ones."""
    head, cache = operator.head(entry.name), truth.cache
    band, rows = Band(**head.facts.band), truth.rows[:: -(-len(truth.rows) // BANDED)]
    found = measured(operator, cache, rows, truth.context, head.facts.network_weight).cpu()
    columns = found[:, 1:].view(len(rows), 4, -1, head.codec.num_channels)[:, :, : len(band.profile)]
    most, some, *difference = columns.unbind(1)
    s, error = band.expected(torch.stack(difference)), found[:, 0]
    size = s.view(-1, 1, 1) * torch.tensor(band.profile, dtype=torch.float64)[: most.shape[1]]
    inside, cells = (most <= band.width * size).all(2), (some <= band.cell_width * size).all(2)
    verdicts = [band.verdict(one) for one in s.tolist()]
    counted = {name: torch.tensor([one == name for one in verdicts]) for name in ("refused", "doubtful")}
    counted |= {"inside": inside.all(1), "cells_inside": cells.all(1)}
    counted["within_2"] = (s / error).log().abs() <= math.log(2)
    resamples, risk = Resamples(config.evaluate.num_bootstrap, config.run.seed, cache.trajectory[rows]), {}
    for name, order in (("risk", s.argsort()), ("risk_best", error.argsort())):
        square = error[order].square().cumsum(0) / torch.arange(1, len(rows) + 1)
        last = torch.arange(1, FRACTIONS + 1) * len(rows) // FRACTIONS - 1
        risk[name] = numbers((square[last.clamp_min(0)] / square[-1]).sqrt())
    figures = {name: resamples.interval(*plain_mean(one[:, None].double())) for name, one in counted.items()}
    by_lead = numbers(inside.double().mean(0))
    entry.add("operator", {**figures, **risk, "inside_by_lead": by_lead}, "band")


def why_unknown(task: Task, config: Config) -> str:
    """Why the task's solver cannot be compared with; "" if it can."""
    solver = solver_of(task)
    reasons = {
        "the task has no solver that starts from a stored frame": solver is None or solver.integrate is None,
        "the task's solver did not make the data": config.data.source != "generate",
        "the solver needs the parameter, which is hidden": task.hides,
        "the weights are from elsewhere": bool(config.evaluate.weights),
        "the training started from the weights of another run": bool(config.operator.init),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def integrate(truth: Truth, rows: Tensor, u: Tensor, count: int) -> Tensor:
    """The `count` frames (n, count, C, *space), all fields, after u (n, C, *space), by the task's solver."""
    cache, task = truth.cache, truth.task
    index, known = cache.parameter_index[rows], cache.settings.parameters or [None]
    out = u.new_empty(len(u), count, len(task.fields), *u.shape[-task.ndim :])
    for place in index.unique().tolist():
        same, times = index == place, {"dt": cache.dt, "num_frames": count}
        out[same] = solver_of(task).integrate(u[same], parameter=known[place], **times)
    return out


def derivative_cosine(operator: Operator, truth: Truth) -> float:
    """The cosine between the derivatives of <v, last frame - start>, v the last frame itself (of a steady
    task without a start), along the differences of a test start from others: by the task's solver
    (differences in float64), and by the adjoint of the forecast. NaN with fewer than LEAST_CHANGES others."""
    head, cache, task = operator.head(truth.task.name), truth.cache, truth.task
    index = cache.parameter_index[truth.rows]
    rows = truth.rows[index == index[0]][: 1 + NUM_CHANGES]
    if len(rows) <= LEAST_CHANGES:
        return math.nan
    row, history = rows[:1], head.history
    u = truth.inputs(rows) if task.is_steady else truth.frames(rows, truth.context - history, 1)
    start, changes = u[:1, 0].double(), (u[1:] - u[:1])[:, 0].double()

    starts = torch.cat([start, start + SIZE * changes])
    films = integrate(truth, row.expand(len(starts)), starts, truth.num_frames + history - 1)
    films = films if task.is_steady else torch.cat([starts[:, None], films], 1)
    film, by_solver = films[:1], (films[1:] - films[:1]) / SIZE
    given, of_given = start[:, None], changes[:, None]
    if not task.is_steady:
        given, of_given = film[:, :history], by_solver[:, :history]

    def last_frame(given: Tensor) -> Tensor:
        w = head.input_codec.normalise(given)
        w_pred = operator.forecast(w, head.name, cache.parameters[row], truth.num_frames)
        return head.codec.denormalise(w_pred)[:, -1]

    _, pull = torch.func.vjp(last_frame, given.to(head.scale))  # which computes no frame twice
    [gradient], v = pull(film[:, -1].to(head.scale)), film[:, -1]
    of_start = 0.0 if task.is_steady else (of_given[:, -1] * v).flatten(1).sum(1)  # persistence has all of it
    ours = (gradient.detach().to(of_given) * of_given).flatten(1).sum(1) - of_start
    return float(torch.cosine_similarity(ours, (by_solver[:, -1] * v).flatten(1).sum(1) - of_start, 0))
