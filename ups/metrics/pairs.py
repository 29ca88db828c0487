"""Statistics of pairs: of cases (energy distance, evenness of ranks) and of two models' draws from the same
noise.

A mean of h(i, j) over pairs of cases that are independent has no bias from few cases, and its interval comes
from drawing cases with replacement while a case's pairs with itself stay left out. Cases of one group (one
initial condition) are one case.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ups.metrics.intervals import Interval, bootstrap, drawn_counts, entry, interval_of

SWAPS = 1000      # of truth and member, behind the noise floor of an energy distance
FLOOR = 0.95      # quantile of what these leave


def _by_group(matrix: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums and counts of (n, n) values over pairs of different groups, each (groups, groups) with zeros on
    the diagonal."""
    index = torch.arange(len(matrix)) if groups is None else torch.as_tensor(groups)
    _, member = torch.unique(index, return_inverse=True)
    ones = torch.nn.functional.one_hot(member).double()
    away = 1 - torch.eye(ones.shape[1], dtype=torch.float64)
    return (ones.T @ matrix.double() @ ones) * away, torch.outer(ones.sum(0), ones.sum(0)) * away


def bootstrap_pairs(matrix: Tensor, num_bootstrap: int, seed: int, groups: Tensor | None = None) -> Interval:
    """(value, low, high) of the mean of matrix (n, n) over pairs of different groups, 95 % interval over
    groups.

    NaN for a single group. As `bootstrap`, the ends of what is not finite are not finite either.
    """
    sums, counts = _by_group(matrix, groups)
    value, size = sums.sum() / counts.sum(), len(sums)
    weights = drawn_counts(torch.randint(size, (num_bootstrap, size),
                                         generator=torch.Generator().manual_seed(seed)))
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
    signs = torch.randint(2, (SWAPS, len(sums)),
                          generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
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
    # the ranks of one member say nothing, nor does one case
    if bins < 3 or len(_by_group(matrix, groups)[0]) < 2:
        return (torch.tensor(math.nan, dtype=torch.float64),) * 3
    pairs = _by_group(matrix, groups)[1].sum() / len(counts)
    value, low, high = bootstrap_pairs(matrix, num_bootstrap, seed, groups)
    return 1 + pairs * value, 1 + pairs * low, 1 + pairs * high


def pairing(student: Tensor, teacher: Tensor, num_bootstrap: int = 1, seed: int = 0,
            groups: Tensor | None = None) -> dict[str, dict[str, float | None]]:
    """How closely a distilled model follows its teacher from the same noise: both (n, M, ...), member i from
    the same draw.

    Each {value, low, high}. error = mean |student - teacher|^2 / mean Var_z(teacher): 0 for equal maps, 2 for
    an independent one of the same spread, 1 for the mean. correlation: of deviations from the mean over
    members. variance_ratio: Var_z(student) / Var_z(teacher).
    """
    if student.shape != teacher.shape or student.ndim < 2 or student.shape[1] < 2:
        raise ValueError(f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)}; expected equal "
                         "shapes (n, M, ...) with M >= 2 in pairing. Sample both from the same noise.")
    student, teacher = student.double().flatten(2), teacher.double().flatten(2)
    ours, theirs = (u - u.mean(1, keepdim=True) for u in (student, teacher))
    unbiased = (teacher.shape[1] - 1) / teacher.shape[1]
    moments = [(student - teacher).square(), ours * theirs, ours.square(), theirs.square()]
    value, low, high = bootstrap(
        torch.stack([part.mean((1, 2)) for part in moments], 1),
        lambda mean: torch.stack([mean[:, 0] / mean[:, 3] * unbiased,
                                  mean[:, 1] / (mean[:, 2] * mean[:, 3]).sqrt(),
                                  mean[:, 2] / mean[:, 3]], 1), num_bootstrap, seed, groups)
    return {name: entry((value[i], low[i], high[i]))
            for i, name in enumerate(("error", "correlation", "variance_ratio"))}
