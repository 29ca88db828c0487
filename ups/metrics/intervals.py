"""A metric is a row, and its figure a mean over trajectories with an interval.

Everything is kept per trajectory. A metric then is a function of the mean of some moments over trajectories,
so its 95 % interval comes from drawing trajectories again, and two models are compared on the same draws. Two
markers, never mixed: NaN = undefined because the truth is zero or flat (left out and counted), inf = the
prediction is not finite (null in results.json, and its gate fails).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22  # cells scored at a time in float64 (32 MiB per temporary)
INTERVAL = 0.95
SWAPS = 1000  # of truth and member, behind the noise floor of an energy distance
FLOOR = 0.95  # quantile of what these leave

Scores = dict[str, Tensor]  # quantities of each trajectory, n first
Statistic = Callable[[Tensor], Tensor]  # mean of moments (B, M) -> (B, ...)
Moments = tuple[Tensor, Statistic]  # (n, M), and what is made of their mean
Interval = tuple[Tensor, Tensor, Tensor]  # value, low, high


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
    return {
        key: numbers(part) if part.ndim else number(part)
        for key, part in zip(("value", "low", "high"), interval, strict=True)
    }


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


def bootstrap(
    moments: Tensor, statistic: Statistic, num_bootstrap: int, seed: int, groups: Tensor | None = None
) -> Interval:
    """(value, low, high) of statistic(mean of moments over trajectories); the 95 % percentile interval (Efron
    1979).

    moments: (n, M). statistic: (B, M) -> (B, ...). Trajectories are drawn with replacement; those of one
    group (n,) stay together (same initial condition at several parameter values), because they are not
    independent. Where the value is not finite neither are the ends.
    """
    member = group_index(len(moments), groups)
    num_groups = int(member.max()) + 1
    sums = torch.zeros(num_groups, moments.shape[1], dtype=torch.float64).index_add_(
        0, member, moments.double()
    )
    sizes = torch.bincount(member, minlength=num_groups).double()
    value = statistic((sums.sum(0) / sizes.sum())[None])[0]
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, CHUNK // moments.shape[1])
    drawn = (
        drawn_counts(num_groups, min(rows, num_bootstrap - start), generator)
        for start in range(0, num_bootstrap, rows)
    )
    return interval_of(
        value, torch.cat([statistic(counts @ sums / (counts @ sizes)[:, None]) for counts in drawn])
    )


def drawn_counts(num_groups: int, count: int, generator: torch.Generator) -> Tensor:
    """How often each of the groups is drawn, `count` times as many with replacement -> (count, groups),
    float64."""
    drawn = torch.randint(num_groups, (count, num_groups), generator=generator)
    zeros = torch.zeros(drawn.shape, dtype=torch.float64)
    return zeros.scatter_add_(1, drawn, torch.ones_like(zeros))


def group_index(count: int, groups: Tensor | None) -> Tensor:
    """The group of each of `count` trajectories, numbered from 0; each its own without `groups`."""
    return torch.unique(
        torch.arange(count) if groups is None else torch.as_tensor(groups), return_inverse=True
    )[1]


def interval_of(value: Tensor, draws: Tensor) -> Interval:
    """(value, low, high) from `draws` (B, ...) of it; ends that are as undefined as the value."""
    tail = torch.tensor([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], dtype=torch.float64)
    low, high = torch.nanquantile(draws, tail, dim=0)
    return value, torch.where(value.isfinite(), low, value), torch.where(value.isfinite(), high, value)


def compare(
    metric: Metric,
    scores: Scores,
    baseline: Scores,
    num_bootstrap: int,
    seed: int,
    groups: Tensor | None = None,
    join: Callable[[Tensor, Tensor], Tensor] = Tensor.div,
) -> dict[str, Any] | None:
    """metric(scores) / metric(baseline) with its paired interval: below 1 is better than the baseline, where
    low is best.

    None where either has none of it. Both are of the same trajectories in the same order.
    """
    both = [metric.moments(part, None) for part in (scores, baseline)]
    if None in both:
        return None
    (ours, statistic), (theirs, other) = both
    width = ours.shape[1]
    return entry(
        bootstrap(
            torch.cat([ours, theirs], 1),
            lambda mean: join(statistic(mean[:, :width]), other(mean[:, width:])),
            num_bootstrap,
            seed,
            groups,
        )
    )


def summarise(
    metrics: Sequence[Metric],
    scores: Scores,
    num_bootstrap: int,
    seed: int,
    lead_times: Any = None,
    groups: Tensor | None = None,
) -> dict[str, Any]:
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


def merge(parts: Sequence[Scores], axis: int = 0) -> Scores:
    """Scores of several batches of one model as one on the CPU: concatenated over trajectories (axis 0), so
    that nothing depends on the batch size, or over leads."""
    return {name: torch.cat([part[name].cpu() for part in parts], axis) for name in parts[0]}


# ---- pairs
# Of cases (energy distance, evenness of ranks) and of two models' draws from the same noise. A mean of
# h(i, j) over pairs of cases that are independent has no bias from few cases, and its interval comes from
# drawing cases with replacement while a case's pairs with itself stay left out. Cases of one group (one
# initial condition) are one case.


def _by_group(matrix: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums and counts of (n, n) values over pairs of different groups, each (groups, groups) with zeros on
    the diagonal."""
    ones = torch.nn.functional.one_hot(group_index(len(matrix), groups)).double()
    away = 1 - torch.eye(ones.shape[1], dtype=torch.float64)
    return (ones.T @ matrix.double() @ ones) * away, torch.outer(ones.sum(0), ones.sum(0)) * away


def bootstrap_pairs(matrix: Tensor, num_bootstrap: int, seed: int, groups: Tensor | None = None) -> Interval:
    """(value, low, high) of the mean of matrix (n, n) over pairs of different groups, 95 % interval over
    groups.

    NaN for a single group. As `bootstrap`, the ends of what is not finite are not finite either.
    """
    sums, counts = _by_group(matrix, groups)
    value, size = sums.sum() / counts.sum(), len(sums)
    weights = drawn_counts(size, num_bootstrap, torch.Generator().manual_seed(seed))
    return interval_of(value, ((weights @ sums) * weights).sum(1) / ((weights @ counts) * weights).sum(1))


def distance_matrix(members: Tensor, truth: Tensor) -> Tensor:
    """h(i, j) = |x_i - y_j| + |y_i - x_j| - |x_i - x_j| - |y_i - y_j| of members x (n, M, d) and truth y (n,
    d) -> (n, n).

    Its mean over pairs of different cases is the energy distance of the two distributions over all cases,
    without bias though a case's members share its condition with its truth (pairs within a case are those
    that `bootstrap_pairs` leaves out). Members are averaged over. NaN where one is not finite. At most 1:
    swapping a case's member and truth turns the sign of its row.
    """
    n, count = members.shape[:2]
    x, y = members.double().flatten(0, 1), truth.double()
    if not (x.isfinite().all() and y.isfinite().all()):
        return torch.full((n, n), torch.nan, dtype=torch.float64)
    cross = torch.cdist(x, y).view(n, count, n).mean(1)
    among = torch.cdist(x, x).view(n, count, n, count).mean((1, 3))
    return cross + cross.T - among - torch.cdist(y, y)


def exchange_floor(members: Tensor, truth: Tensor, seed: int, groups: Tensor | None = None) -> float:
    """What the energy distance of one member per case (n, d) from truth (n, d) may be by chance: the FLOOR
    quantile of its values when each group's members and truths change places or not, at random. Exchangeable
    ones are below it with that probability.
    """
    sums, counts = _by_group(distance_matrix(members[:, None], truth), groups)
    signs = (
        torch.randint(2, (SWAPS, len(sums)), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    )
    return float(torch.quantile(((signs @ sums) * signs).sum(1) / counts.sum(), FLOOR))


def rank_evenness(counts: Tensor, num_bootstrap: int, seed: int, groups: Tensor | None = None) -> Interval:
    """Candille and Talagrand's ratio of rank counts (n, T, M + 1), mean over leads, with interval: 1 for
    exchangeable members.

    1 + what pairs of different groups add: d_i d_j over the points of a case times M / (M + 1), d the counts
    less those expected. Pairs within a group are left out, because points of one trajectory are correlated
    whatever the members are.
    """
    bins, total = counts.shape[-1], counts.sum(-1, keepdim=True)
    away = (counts - total / bins) / (total * (bins - 1) / bins).sqrt()
    matrix = torch.einsum("itk,jtk->ij", away, away) / counts.shape[1]
    pairs = _by_group(matrix, groups)[1].sum() / len(counts)
    if bins < 3 or pairs == 0:  # the ranks of one member say nothing, nor does one case
        return (torch.tensor(math.nan, dtype=torch.float64),) * 3
    return tuple(1 + pairs * end for end in bootstrap_pairs(matrix, num_bootstrap, seed, groups))


def pairing(
    student: Tensor, teacher: Tensor, num_bootstrap: int = 1, seed: int = 0, groups: Tensor | None = None
) -> dict[str, dict[str, float | None]]:
    """How closely a distilled model follows its teacher from the same noise: both (n, M, ...), member i from
    the same draw.

    Each {value, low, high}. error = mean |student - teacher|^2 / mean Var_z(teacher): 0 for equal maps, 2 for
    an independent one of the same spread, 1 for the mean. correlation: of deviations from the mean over
    members. variance_ratio: Var_z(student) / Var_z(teacher).
    """
    if student.shape != teacher.shape or student.ndim < 2 or student.shape[1] < 2:
        raise ValueError(
            f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)}; expected equal "
            "shapes (n, M, ...) with M >= 2 in pairing. Sample both from the same noise."
        )
    student, teacher = student.double().flatten(2), teacher.double().flatten(2)
    ours, theirs = (u - u.mean(1, keepdim=True) for u in (student, teacher))
    unbiased = (teacher.shape[1] - 1) / teacher.shape[1]
    moments = [(student - teacher).square(), ours * theirs, ours.square(), theirs.square()]
    value, low, high = bootstrap(
        torch.stack([part.mean((1, 2)) for part in moments], 1),
        lambda mean: torch.stack(
            [
                mean[:, 0] / mean[:, 3] * unbiased,
                mean[:, 1] / (mean[:, 2] * mean[:, 3]).sqrt(),
                mean[:, 2] / mean[:, 3],
            ],
            1,
        ),
        num_bootstrap,
        seed,
        groups,
    )
    return {
        name: entry((value[i], low[i], high[i]))
        for i, name in enumerate(("error", "correlation", "variance_ratio"))
    }
