"""Errors of the operator's forecasts, its base alone, trivial forecasts and the codec: a task's entry in the
results, and the trajectories for the report."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ups.common.mask import cell_mean, valid_cells
from ups.config.schema import EvaluateConfig
from ups.evaluation.gates import TRIVIAL
from ups.evaluation.trivial import Trivial
from ups.evaluation.truth import Truth
from ups.metrics.errors import (
    ERROR,
    are_pooled,
    nrmse_per_trajectory,
    score,
    summarise_errors,
)
from ups.metrics.intervals import Resamples, Scores, compare, merge, number
from ups.models.constraints import densities
from ups.models.facts import HeadFacts
from ups.models.head import TaskHead
from ups.models.operator import Component, Operator
from ups.results import Entry
from ups.tasks import Task


@torch.no_grad()
def assess_forecasts(
    operator: Operator, truth: Truth, settings: EvaluateConfig, seed: int
) -> tuple[Entry, list[dict[str, Any]]]:
    """The task's entry, and the trajectories with the median and the worst error."""
    cache, task, rows = truth.cache, truth.task, truth.rows
    head = operator.head_for(cache, any_codec=bool(settings.weights))
    parts: dict[str, list[Scores]] = {}
    seconds = []
    trivial = Trivial(truth, settings.batch_size)
    for some in cache.row_blocks(rows, cache.num_frames, settings.batch_size):
        u_ref = truth.future(some)
        predictions, took = forecasts(operator, truth, some)
        seconds.append(took / (len(some) * truth.num_frames))
        start = None if task.is_steady else truth.frames(some, truth.context - 1, 1)
        predictions |= trivial.forecasts(some, u_ref, start)
        for model, u_pred in predictions.items():
            parts.setdefault(model, []).append(
                {**score(u_pred, u_ref), **conservation_error(task, u_pred, start)}
            )
    scores = {model: merge(part) for model, part in parts.items()}
    is_pooled = are_pooled(scores["operator"]["ref_rms"], task.is_driven)
    times = torch.zeros(1) if task.is_steady else cache.dt * torch.arange(1, truth.num_frames + 1)
    entry = Entry(task.name, "tasks", facts_of(head, truth, times.tolist(), is_pooled))

    # ---- rows
    groups = cache.trajectory[rows]
    resamples = Resamples(settings.num_bootstrap, seed, groups)
    entry.add(
        "",
        {
            "num_initial_conditions": len(groups.unique()),
            "num_trajectories": len(rows),
            "num_frames_predicted": truth.num_frames,
            "num_training": len(cache.split["train"]),
        },
    )
    if (beyond := truth.context + truth.num_frames - cache.num_frames) > 0:
        entry.add("", {"num_frames_beyond": beyond})
    for other in ("base", *TRIVIAL):
        if other in scores:
            pair = scores["operator"], scores[other]
            compared = ("nrmse", *(["nrmse_pooled"] if is_pooled else []))
            ratios = {name: compare(ERROR[name], *pair, resamples) for name in compared}
            entry.add(f"operator / {other}", ratios)
    for model, part in scores.items():
        entry.add(model, summarise_errors(part, resamples, times, is_pooled))
    entry.add("operator", {"ms_per_state": 1e3 * min(seconds), "evaluations_per_state": 1.0})
    add_noise(entry, head.facts, scores)

    # ---- trajectories
    errors = nrmse_per_trajectory(scores["operator"], is_pooled)
    order = torch.argsort(torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf))
    median_and_worst = rows[order[[len(order) // 2, -1]]]
    samples = [
        sample
        for some in cache.row_blocks(median_and_worst, cache.num_frames, settings.batch_size)
        for sample in samples_of(operator, truth, some)
    ]
    return entry, [
        {**sample, "times": times.numpy(), "label": label}
        for label, sample in zip(("median error", "worst error"), samples, strict=True)
    ]


def facts_of(head: TaskHead, truth: Truth, times: list[float], is_pooled: bool) -> dict[str, Any]:
    """What the task and its model are."""
    cache, task = truth.cache, truth.task
    facts = {
        "times": times,
        "parameters": cache.parameter_values.tolist(),
        "fields": list(task.moving),
        "grid": list(cache.tokenizer.space),
        "axes": list(task.axes),
        "boundary": task.boundary,
        "domain": [list(span) for span in task.spans],
        "given": [*task.inputs, *task.still, *task.forcing],
        "parameter_ranges": head.facts.parameters,
        "base": head.facts.base["kind"],
        "network_is_used": head.is_network_used,
        "equation": task.equation,
        "found": head.findings(),
        "offset": dict(task.offsets),
        "measure": task.measure,
        "conserved": list(task.conserved),
    }
    if is_pooled:
        facts["error"] = "nrmse_pooled"
    if task.units:
        facts["units"] = dict(task.units)
    return facts


def add_noise(entry: Entry, facts: HeadFacts, scores: dict[str, Scores]) -> None:
    """If the data have noise, add the case "noise": sigma (field -> standard deviation of the white noise in
    the data), fraction (the same over the RMS of the truth without it) and of each model nrmse (pooled nRMSE
    as measured, and with the noise of the truth removed, sqrt(error^2 - sigma^2) over the RMS without noise);
    and to the facts what the head knows of starts.

    The noise of the first frames of a forecast remains in the error: it is part of what the model makes of
    them."""
    if not (sigma := facts.noise):
        return
    fields = entry.facts["fields"]
    variance = torch.tensor([sigma.get(name, 0.0) for name in fields], dtype=torch.float64).square()
    ref = scores["operator"]["ref_rms"].double().square().mean(0)  # T, C
    clean = (ref - variance).clamp_min(0)
    fraction = dict(zip(fields, (variance / clean.mean(0)).sqrt().tolist(), strict=True))
    noisy = [name for name in fields if name in sigma]
    figures = {"sigma": sigma, "fraction": {name: fraction[name] for name in noisy}}
    starts = {"start_frames": facts.start_frames, "is_deterministic": facts.is_deterministic}
    entry.facts["noise"] = {"fields": noisy, **{k: value for k, value in starts.items() if value is not None}}
    entry.add("", figures, "noise")
    for model, score_of in scores.items():
        error = score_of["rmse"].double().square().mean(0)
        beyond = (error - variance).clamp_min(0)
        both = [number(float((e / r).sqrt().nanmean())) for e, r in ((error, ref), (beyond, clean))]
        entry.add(model, {"nrmse": both}, "noise")


def conservation_error(task: Task, u_pred: Tensor, u_start: Tensor | None) -> Scores:
    """{"conservation_error": (n, T, K)}: change of each conserved mean since u_start (n, 1, C, *space), over
    its RMS there; inf if the prediction is not finite. {} if the task conserves nothing."""
    if u_start is None or not task.conserved:
        return {}
    now, then = (densities(task, u) for u in (u_pred.double(), u_start.double()))
    known = valid_cells(then)
    mean = cell_mean(now, known)
    moved = (mean - cell_mean(then, known)) / cell_mean(then.square(), known).sqrt()
    return {"conservation_error": moved.masked_fill(~mean.isfinite(), torch.inf)}


def forecasts(operator: Operator, truth: Truth, rows: Tensor) -> tuple[dict[str, Tensor], float]:
    """({"operator", "base", "codec_floor"} -> frames (n, T, C, *space) in physical units, seconds of the
    operator's rollout with decoding). codec_floor: the truth, encoded and decoded."""
    head = operator.head(truth.task.name)
    given = truth.given(rows, head.input_codec)
    begun = time.perf_counter()
    u_pred = rolled_out(operator, truth, rows, given)
    seconds = time.perf_counter() - begun
    # without its network the operator is its base
    base = rolled_out(operator, truth, rows, given, "base") if head.is_network_used else u_pred
    codec = head.physical(truth.scored(rows, head.codec)).cpu()
    found = {"operator": u_pred, "base": base, "codec_floor": codec}
    return {model: truth.task.predicted(u) for model, u in found.items()}, seconds


def rolled_out(
    operator: Operator, truth: Truth, rows: Tensor, given: Tensor, component: Component = "full"
) -> Tensor:
    """Frames (n, T, C, *space), physical units, all fields, that a component of the operator predicts from
    input latents."""
    head = operator.head(truth.task.name)
    u = head.input_codec.decode(given)
    values = truth.cache.parameters[rows]
    forcing = truth.forced(rows, head)
    w = operator.forecast(u, head.name, values, truth.num_frames, component, forcing)
    return head.codec.denormalise(w).cpu()


def samples_of(operator: Operator, truth: Truth, rows: Tensor) -> Iterator[dict[str, Any]]:
    """Samples in the form of `ups.report.figures`. Rows are rolled out together: if a base takes many small
    steps, a few rows cost as much as one."""
    task, cache = truth.task, truth.cache
    given = truth.given(rows, operator.head(task.name).input_codec)
    u_ref, u_pred = truth.future(rows), task.predicted(rolled_out(operator, truth, rows, given))
    for place, row in enumerate(rows):
        known = zip(task.parameters, cache.parameters[row].tolist(), strict=False)
        inputs = {task.inputs[0]: truth.inputs(row[None])[0, 0, 0].numpy()} if task.is_steady else {}
        yield {
            **cache.scene(),
            "inputs": inputs,
            "u_ref": u_ref[place].numpy(),
            "u_pred": u_pred[place].numpy(),
            "parameter": ", ".join(f"{key} = {value:g}" for key, value in known) or None,
        }
