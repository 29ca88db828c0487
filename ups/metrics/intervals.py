"""Metrics as rows of a table, and their values with bootstrap intervals.

Scores are stored per trajectory. A metric is a function of the mean of some moments over trajectories, so its
95 % interval comes from resampling trajectories, and two models are compared on the same resamples. Two
markers, never mixed: NaN = undefined because the truth is zero or flat (excluded and counted), inf = the
prediction is not finite (None in the table of results, and its gate fails).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22  # cells scored at a time in float64 (32 MiB per temporary)
INTERVAL = 0.95

Scores = dict[str, Tensor]  # quantities of each trajectory, n first
Statistic = Callable[[Tensor], Tensor]  # mean of moments (B, M) -> (B, ...)
Moments = tuple[Tensor, Statistic]  # moments (n, M), and the statistic of their mean
Interval = tuple[Tensor, Tensor, Tensor]  # value, low, high


@dataclass(frozen=True)
class Metric:
    """One metric: its name in the table of results, label and meaning in the report, and its computation from
    scores.

    moments(scores, lead times): moments of a value with an interval; None if these scores do not have it.
    plain(scores): a value without an interval, as JSON. Without either, the value is computed elsewhere.
    best: "low", the value of a calibrated ensemble, or None. Lists by lead have no label and are shown in
    figures. is_compared: as a ratio of two ensembles.
    """

    name: str
    label: str = ""
    meaning: str = ""
    moments: Callable[[Scores, Any], Moments | None] | None = None
    plain: Callable[[Scores], Any] | None = None
    best: str | float | None = "low"
    is_compared: bool = False


@dataclass(frozen=True, eq=False)
class Resamples:
    """Bootstrap resamples of trajectories, drawn with replacement.

    groups (n,): trajectories of one group (the same initial condition at several parameter values) stay
    together, because they are not independent.
    """

    count: int
    seed: int
    groups: Tensor | None = None

    def __getitem__(self, rows: Any) -> "Resamples":
        """The resamples of some of the trajectories."""
        return replace(self, groups=None if self.groups is None else self.groups[rows])

    def interval(self, moments: Tensor, statistic: Statistic) -> dict[str, Any]:
        """`bootstrap` as {"value", "low", "high"}, of numbers or lists."""
        ends = bootstrap(moments, statistic, self)
        as_json = numbers if ends[0].ndim else number
        return dict(zip(("value", "low", "high"), map(as_json, ends), strict=True))


def ratio(error: Tensor, reference: Tensor) -> Tensor:
    """error / reference without an epsilon; NaN (undefined) if the reference is exactly zero."""
    return torch.where(reference == 0, torch.nan, error / reference)


def number(value: Tensor | float) -> float | None:
    """The value with six significant digits for JSON; None if undefined or not finite."""
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


def numbers(values: Sequence[Any]) -> list:
    """`number` of every element of nested lists."""
    return [numbers(value) if getattr(value, "ndim", 0) else number(value) for value in values]


# ---- moments


def halves(mean: Tensor) -> Tensor:
    """Ratio of the first half of the moments to the second."""
    above, below = mean.chunk(2, 1)
    return above / below


def defined_mean(values: Tensor, axis: int = 1) -> Moments:
    """Moments of the mean of `values` (n, ...) over trajectories and `axis` without NaN: sums and counts."""
    sums, counts = values.nan_to_num(0.0, torch.inf).sum(axis), (~values.isnan()).double().sum(axis)
    if sums.ndim > 1:
        return torch.cat([sums, counts], 1), halves
    return torch.stack([sums, counts], 1), lambda mean: mean[:, 0] / mean[:, 1]


def plain_mean(values: Tensor) -> Moments:
    """Moments of the mean of `values` (n, ...) over all axes."""
    return values.flatten(1).mean(1, keepdim=True), lambda mean: mean[:, 0]


def root_mean(squares: Tensor) -> Moments:
    """Moments of the root of the mean of `squares` (n, ...) over trajectories, mean over the other axes."""
    return squares.flatten(1), lambda mean: mean.sqrt().mean(1)


# ---- intervals


def bootstrap(moments: Tensor, statistic: Statistic, resamples: Resamples) -> Interval:
    """(value, low, high) of statistic(mean of moments over trajectories), with the 95 % percentile interval
    (Efron 1979).

    moments: (n, M). statistic: (B, M) -> (B, ...). If the value is not finite, neither are the ends.
    """
    sums, sizes = group_sums(moments, resamples.groups)
    value = statistic((sums.sum(0) / sizes.sum())[None])[0]
    generator = torch.Generator().manual_seed(resamples.seed)
    rows = max(1, CHUNK // moments.shape[1])
    resampled = []
    for start in range(0, resamples.count, rows):
        counts = resample_counts(len(sizes), min(rows, resamples.count - start), generator)
        resampled.append(statistic(counts @ sums / (counts @ sizes)[:, None]))
    tail = torch.tensor([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], dtype=torch.float64)
    ends = torch.nanquantile(torch.cat(resampled), tail, dim=0)
    return value, *(torch.where(value.isfinite(), end, value) for end in ends)


def group_sums(moments: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sums of moments (n, M) over every group (G, M), float64, sizes of the groups); without `groups` each
    trajectory is one."""
    names = torch.arange(len(moments)) if groups is None else torch.as_tensor(groups)
    member = torch.unique(names, return_inverse=True)[1]
    num = int(member.max()) + 1
    sums = torch.zeros(num, moments.shape[1], dtype=torch.float64)
    return sums.index_add_(0, member, moments.double()), torch.bincount(member, minlength=num).double()


def resample_counts(num_groups: int, count: int, generator: torch.Generator) -> Tensor:
    """Multiplicity of each group in `count` bootstrap resamples -> (count, groups), float64."""
    drawn = torch.randint(num_groups, (count, num_groups), generator=generator)
    zeros = torch.zeros(drawn.shape, dtype=torch.float64)
    return zeros.scatter_add_(1, drawn, torch.ones_like(zeros))


def compare(
    metric: Metric,
    scores: Scores,
    baseline: Scores,
    resamples: Resamples,
) -> dict[str, Any] | None:
    """metric(scores) / metric(baseline) with its paired interval; below 1 is better if low values are.

    None if either does not have the metric. Both must be of the same trajectories in the same order.
    """
    both = [metric.moments(part, None) for part in (scores, baseline)]
    if None in both:
        return None
    (ours, statistic), (theirs, other) = both
    width = ours.shape[1]
    return resamples.interval(
        torch.cat([ours, theirs], 1),
        lambda mean: statistic(mean[:, :width]) / other(mean[:, width:]),
    )


def summarise(
    metrics: Sequence[Metric], scores: Scores, resamples: Resamples, lead_times: Any = None
) -> dict[str, Any]:
    """One model's figures (`ups.results.Figures`): metric -> {value, low, high}, of numbers or lists; or a
    plain value."""
    out: dict[str, Any] = {}
    for metric in metrics:
        moments = metric.moments(scores, lead_times) if metric.moments else None
        if moments is not None:
            out[metric.name] = resamples.interval(*moments)
        elif metric.plain:
            out[metric.name] = metric.plain(scores)
    return out


def merge(parts: Sequence[Scores], axis: int = 0) -> Scores:
    """Scores of several batches of one model, concatenated on the CPU over trajectories (axis 0) or leads
    (axis 1)."""
    return {name: torch.cat([part[name].cpu() for part in parts], axis) for name in parts[0]}


def merge_chunks(function: Callable[..., Scores], size: int, *tensors: Tensor | None) -> Scores:
    """Scores by function(*tensors), of `size` rows at a time."""
    chunks = [slice(first, first + size) for first in range(0, len(tensors[0]), size)]
    return merge([function(*(None if u is None else u[rows] for u in tensors)) for rows in chunks])
