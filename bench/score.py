"""Load the same data and splits for every model of a comparison, and score rollouts with intervals.

Errors of a rollout, e = u_pred - u_ref in physical units, <.> means over cells, averaged over frames and
channels: pooled sqrt(sum_n <e^2> / sum_n <u^2>), which ranks time-dependent tasks; nrmse mean_n
sqrt(<e^2> / <u^2>) of PDEBench, which ranks steady tasks (relative L2).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.rivals import Problem, Trained
from ups.config.schema import Config
from ups.data.build_cache import build_cache, is_up_to_date, open_source
from ups.data.cache import open_cache
from ups.evaluation.truth import Truth
from ups.metrics.errors import are_pooled, pooled, relative, score, summarise_errors
from ups.metrics.intervals import Moments, Resamples, Scores, bootstrap, defined_mean, merge
from ups.models.windows import symmetry

# ---- data --------------------------------------------------------------------------------------------------


@dataclass
class Split:
    """Physical fields of some rows. given: context frames or coefficient; truth: the predicted fields."""

    given: Tensor
    truth: Tensor
    parameters: Tensor
    groups: Tensor  # rows of one trajectory number share an initial condition: resampled together

    def predicted(self, u: Tensor) -> Tensor:
        """Return those fields of (row, time, channel, *space) that `truth` has."""
        return u[:, :, : self.truth.shape[2]]


def with_cache(config: Config, task: str) -> Config:
    """Return the configuration; its cache of the task is built unless it is up to date."""
    if not is_up_to_date(config, task)[0]:
        build_cache(config, task, progress=False)
    return config


def fields(config: Config, cache: Any, split: str) -> tuple[Tensor, Tensor | None]:
    """Return physical fields (row, time, channel, *space) of a split and a steady task's coefficients, from
    the data files: no model is scored with the error of a codec.
    """
    truth = Truth(cache, open_source(config, cache.task.name), split, context=0)
    u = truth.frames(truth.rows, 0, truth.num_frames)  # networks of other kinds predict what is given, too
    return u, truth.inputs(truth.rows) if cache.task.is_steady else None


def load(config: Config, task: str) -> tuple[Problem, dict[str, Split]]:
    """Return the training problem of the rivals and the rows to score."""
    cache = open_cache(config, task)
    context, spec = cache.context(config), cache.task
    u, a = {}, {}
    for name in ("train", "val", "test"):
        u[name], a[name] = fields(config, cache, name)
    if not spec.is_steady and cache.num_frames <= context:
        raise ValueError(
            f"{task} has {cache.num_frames} frames; expected more than the {context} of "
            "evaluate.context_frames. Lower it."
        )
    parameters = {name: cache.parameters[rows] for name, rows in cache.split.items()}
    splits = {}
    for name in ("val", "test"):
        rows = cache.split[name]
        given, truth = (a[name], u[name]) if spec.is_steady else (u[name][:, :context], u[name][:, context:])
        splits[name] = Split(given, spec.predicted(truth), parameters[name], cache.trajectory[rows])
    offset = torch.tensor(
        [
            0.0 if field in spec.positive else float(mean / std)
            for field, mean, std in zip(spec.fields, cache.tokenizer.mean, cache.tokenizer.std, strict=True)
        ]
    )
    codec_on = functools.cache(lambda device: copy.deepcopy(cache.tokenizer).to(device))

    def moves(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        move = symmetry(spec, cache.tokenizer.space, generator)
        return lambda w: move(w, codec_on(w.device))

    problem = Problem(
        task,
        spec.ndim,
        spec.boundary,
        spec.is_steady,
        context,
        u["train"],
        parameters["train"],
        cache.tokenizer.normalise,
        cache.tokenizer.denormalise,
        offset,
        a["train"],
        cache.input_tokenizer.normalise if spec.is_steady else None,
        moves if spec.is_symmetric else None,
        num_moving=len(spec.moving),
    )
    return problem, splits


# ---- scores ------------------------------------------------------------------------------------------------


def ranking(scores: Scores, is_steady: bool) -> Moments:
    """Return moments and statistic of the error that ranks models."""
    if is_steady:
        return defined_mean(relative(scores).flatten(1))
    return pooled(scores["rmse"], scores["ref_rms"])


def error_of(scores: Scores, is_steady: bool) -> float:
    moments, statistic = ranking(scores, is_steady)
    return float(statistic(moments.mean(0, keepdim=True))[0])


def by_lead(scores: Scores) -> list[float]:
    """Return the pooled error of every frame, mean over channels."""
    moments, statistic = pooled(scores["rmse"], scores["ref_rms"], by_lead=True)
    return statistic(moments.mean(0, keepdim=True))[0].tolist()


def summary(scores: Scores, split: Split, is_steady: bool, num_bootstrap: int) -> dict[str, Any]:
    """Return the errors of one model on one split; `error` is the one that ranks it."""
    ends = bootstrap(*ranking(scores, is_steady), Resamples(num_bootstrap, 0, split.groups))
    found = dict(zip(("error", "low", "high"), map(float, ends), strict=True))
    return found | {"nrmse": float(relative(scores).nanmean())}


def paired_ratio(
    one: list[Scores], other: list[Scores], split: Split, is_steady: bool, num_bootstrap: int
) -> dict[str, float]:
    """Return the error of `one` over that of `other`, each averaged over its seeds, with the interval over
    common trajectories.
    """
    moments, (statistic, *_) = zip(*(ranking(scores, is_steady) for scores in (*one, *other)), strict=True)

    def ratio(mean: Tensor) -> Tensor:
        values = torch.stack([statistic(part) for part in mean.split(moments[0].shape[1], 1)])
        return values[: len(one)].mean(0) / values[len(one) :].mean(0)

    value, low, high = bootstrap(torch.cat(moments, 1), ratio, Resamples(num_bootstrap, 0, split.groups))
    return {"ratio": float(value), "low": float(low), "high": float(high)}


@torch.no_grad()
def rollout(trained: Trained, split: Split, batch_size: int) -> tuple[Scores, float]:
    """Return scores of all rows, and milliseconds per predicted state (median over full batches), of a
    processor if there is no GPU, as other programs may run beside.

    A first frame is predicted before, for what a model computes once, such as our network weight."""
    parts, times, clock = [], [], time.perf_counter if torch.cuda.is_available() else time.process_time
    trained.predict(split.given[:1], split.parameters[:1], 1)
    for rows in torch.arange(len(split.truth)).split(batch_size):
        truth = split.truth[rows]
        start = clock()
        pred = trained.predict(split.given[rows], split.parameters[rows], truth.shape[1])
        if len(rows) == min(batch_size, len(split.truth)):
            times.append(1e3 * (clock() - start) / (len(rows) * truth.shape[1]))
        parts.append(score(split.predicted(pred), truth))
    return merge(parts), sorted(times)[len(times) // 2]


def report_row(scores: Scores, split: Split, config: Config, cache: Any) -> dict[str, Any]:
    """Return the model's errors in results.json, as evaluate.py has them; see ups/report/bench_rows.py."""
    num_frames, settings = split.truth.shape[1], config.evaluate
    times = torch.zeros(1) if cache.task.is_steady else cache.dt * torch.arange(1, num_frames + 1)
    resamples = Resamples(settings.num_bootstrap, config.run.seed, split.groups)
    return summarise_errors(scores, resamples, times, are_pooled(scores["ref_rms"], cache.task.is_driven))


def persistence(split: Split) -> Scores:
    return score(split.predicted(split.given[:, -1:]).expand_as(split.truth), split.truth)


def trivial(problem: Problem, split: Split) -> tuple[str, Scores]:
    """Return persistence of the last context frame; for a steady task, the mean training solution."""
    if not problem.is_steady:
        return "persistence", persistence(split)
    return "training mean", score(problem.train.mean(0, keepdim=True).expand_as(split.truth), split.truth)
