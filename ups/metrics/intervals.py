"""A metric is a row, and its figure a mean over trajectories with an interval.

Everything is kept per trajectory. A metric then is a function of the mean of some moments over trajectories,
so its 95 % interval comes from drawing trajectories again, and two models are compared on the same draws. Two
markers, never mixed: NaN = undefined because the truth is zero or flat (left out and counted), inf = the
prediction is not finite (null in results.json, and its gate fails).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22  # cells scored at a time in float64 (32 MiB per temporary)
INTERVAL = 0.95

Scores = dict[str, Tensor]                      # quantities of each trajectory, n first
Statistic = Callable[[Tensor], Tensor]          # mean of moments (B, M) -> (B, ...)
Moments = tuple[Tensor, Statistic]              # (n, M), and what is made of their mean
Interval = tuple[Tensor, Tensor, Tensor]        # value, low, high


@dataclass(frozen=True)
class Metric:
    """One metric of a model: its key in results.json, its words on the page, and how it is taken from scores.

    moments(scores, lead times): the figure as a mean with its interval; None where scores of this kind have
    none of it. plain(scores): a figure without an interval, as JSON. Neither: measured elsewhere, such as a
    time. best: "low", the number that a calibrated ensemble has, or None. A metric that is a list (per lead,
    per field) has no label: figures show it; has_ends: with the ends of its interval. is_compared: as a ratio
    of two ensembles.
    """

    name: str
    label: str = ""
    meaning: str = ""
    moments: Callable[[Scores, Any], Moments | None] | None = None
    plain: Callable[[Scores], Any] | None = None
    best: str | float | None = "low"
    has_ends: bool = False
    is_compared: bool = False


def ratio(error: Tensor, reference: Tensor) -> Tensor:
    """error / reference; NaN (undefined, left out) where the reference is exactly zero. No epsilon."""
    return torch.where(reference == 0, torch.nan, error / reference)


def number(value: Tensor | float) -> float | None:
    """Six significant digits for JSON, which has no NaN or inf: null there means undefined or not finite."""
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


def numbers(values: Sequence[Any]) -> list:
    """`number` of every element, however deep."""
    return [numbers(value) if getattr(value, "ndim", 0) else number(value) for value in values]


def entry(interval: Interval) -> dict[str, Any]:
    """{"value", "low", "high"} of an interval, numbers or lists."""
    return {key: numbers(part) if part.ndim else number(part)
            for key, part in zip(("value", "low", "high"), interval, strict=True)}


# ---- moments


def halves(mean: Tensor) -> Tensor:
    """First half of the moments over the second."""
    above, below = mean.chunk(2, 1)
    return above / below


def defined_mean(values: Tensor, axis: int = 1) -> Moments:
    """Mean of `values` (n, ...) over trajectories and `axis`, leaving out NaN: a sum and a count per
    remaining place."""
    sums, counts = values.nan_to_num(0.0, torch.inf).sum(axis), (~values.isnan()).double().sum(axis)
    if sums.ndim > 1:
        return torch.cat([sums, counts], 1), halves
    return torch.stack([sums, counts], 1), lambda mean: mean[:, 0] / mean[:, 1]


def plain_mean(values: Tensor) -> Moments:
    """Mean of `values` (n, ...) over everything."""
    return values.flatten(1).mean(1, keepdim=True), lambda mean: mean[:, 0]


def root_mean(squares: Tensor) -> Moments:
    """Root of the mean of each of `squares` (n, ...) over trajectories, mean over the others."""
    return squares.flatten(1), lambda mean: mean.sqrt().mean(1)


# ---- intervals


def bootstrap(moments: Tensor, statistic: Statistic, num_bootstrap: int, seed: int,
              groups: Tensor | None = None) -> Interval:
    """(value, low, high) of statistic(mean of moments over trajectories); the 95 % percentile interval (Efron
    1979).

    moments: (n, M). statistic: (B, M) -> (B, ...). Trajectories are drawn with replacement; those of one
    group (n,) stay together (same initial condition at several parameter values), because they are not
    independent. Where the value is not finite neither are the ends.
    """
    index = torch.arange(len(moments)) if groups is None else torch.as_tensor(groups)
    _, member = torch.unique(index, return_inverse=True)
    num_groups = int(member.max()) + 1
    sums = torch.zeros(num_groups, moments.shape[1], dtype=torch.float64).index_add_(0, member,
                                                                                     moments.double())
    sizes = torch.bincount(member, minlength=num_groups).double()
    value = statistic((sums.sum(0) / sizes.sum())[None])[0]
    generator = torch.Generator().manual_seed(seed)
    draws, rows = [], max(1, CHUNK // moments.shape[1])
    for start in range(0, num_bootstrap, rows):
        size = (min(rows, num_bootstrap - start), num_groups)
        counts = drawn_counts(torch.randint(num_groups, size, generator=generator))
        draws.append(statistic(counts @ sums / (counts @ sizes)[:, None]))
    return interval_of(value, torch.cat(draws))


def drawn_counts(drawn: Tensor) -> Tensor:
    """How often each of the groups is among `drawn` (B, groups) -> (B, groups), float64."""
    ones = torch.ones(drawn.shape, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, drawn, ones)


def interval_of(value: Tensor, draws: Tensor) -> Interval:
    """(value, low, high) from `draws` (B, ...) of it; ends that are as undefined as the value."""
    tail = torch.tensor([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], dtype=torch.float64)
    low, high = torch.nanquantile(draws, tail, dim=0)
    return value, torch.where(value.isfinite(), low, value), torch.where(value.isfinite(), high, value)


def compare(metric: Metric, scores: Scores, baseline: Scores, num_bootstrap: int, seed: int,
            groups: Tensor | None = None,
            join: Callable[[Tensor, Tensor], Tensor] = Tensor.div) -> dict[str, Any] | None:
    """metric(scores) / metric(baseline) with its paired interval: below 1 is better than the baseline, where
    low is best.

    None where either has none of it. Raises ValueError where they are not of the same trajectories.
    """
    (ours, statistic), (theirs,
                        other) = (metric.moments(part, None) or (None, None) for part in (scores, baseline))
    if ours is None or theirs is None:
        return None
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} trajectories and {len(theirs)} of the baseline in {metric.name}; "
                         "expected the same in the same order in compare. Score both models on one split.")
    width = ours.shape[1]
    return entry(bootstrap(torch.cat([ours, theirs], 1),
                           lambda mean: join(statistic(mean[:, :width]), other(mean[:, width:])),
                           num_bootstrap, seed, groups))


def summarise(metrics: Sequence[Metric], scores: Scores, num_bootstrap: int, seed: int,
              lead_times: Any = None, groups: Tensor | None = None) -> dict[str, Any]:
    """One model's row of results.json: name -> {value, low, high}, or a list (and its _low and _high), of
    every metric."""
    out: dict[str, Any] = {}
    for metric in metrics:
        moments = metric.moments(scores, lead_times) if metric.moments else None
        if moments is not None:
            found = entry(bootstrap(*moments, num_bootstrap, seed, groups))
            is_list = isinstance(found["value"], list)
            out[metric.name] = found["value"] if is_list else found
            if metric.has_ends:
                out |= {f"{metric.name}_{end}": found[end] for end in ("low", "high")}
        elif metric.plain:
            out[metric.name] = metric.plain(scores)
    return out


def merge(parts: Sequence[Scores]) -> Scores:
    """Scores of several batches of one model as one: concatenated over trajectories, so nothing depends on
    the batch size."""
    kinds = {tuple((name, *value.shape[1:]) for name, value in sorted(part.items())) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"{len(parts)} batches of {len(kinds)} kinds; expected at least one, of equal "
                         "quantities, members and leads in merge. Score all batches of a model with the "
                         "same arguments.")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
