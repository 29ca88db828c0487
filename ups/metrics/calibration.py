"""Calibration of ensembles: spread against error, and ranks of the truth among the members.

Axes: members (n, M, T, C, *space), u_ref (n, T, C, *space) in physical units; float64 inside.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.common.mask import cell_mean, filled, valid_cells
from ups.metrics.intervals import number, numbers
from ups.metrics.proper import check_members
from ups.metrics.spectra import rms

NUM_BINS = 10  # of predicted spread
CERTAIN, QUIET_CELLS = 0.01, 0.1  # of the RMS spread over a frame, of its cells
RANKED = 2**22  # numbers of members that are ranked at a time
# stored bins of spread / RMS of the truth: per decade, and in all from 1e-6 to 1e2
FINE, NUM_FINE = 16, 8 * 16


# ---- spread


def spread_skill(members: Tensor, u_ref: Tensor) -> tuple[Tensor, Tensor]:
    """(unbiased variance over members, squared error of their mean), each averaged over space -> (n, T, C).

    Spread/skill ratio SSR = sqrt((M + 1) / M * mean variance) / sqrt(mean squared error), means before the
    roots (Fortin et al. 2014): 1 for exchangeable truth and members, at every M. A single member has variance
    0.
    """
    check_members(members, u_ref, "spread_skill")
    x, valid = members.double(), valid_cells(u_ref)
    variance = x.var(1) if x.shape[1] > 1 else torch.zeros_like(x[:, 0])
    return cell_mean(variance, valid), cell_mean((x.mean(1) - u_ref.double()).square(), valid)


def spread_bins(members: Tensor, u_ref: Tensor) -> Tensor:
    """Sums over the points of each bin of predicted spread: count, (M+1)/M variance, squared error of the
    mean -> (n, T, 3, NUM_FINE).

    Relative to the RMS of the truth in the frame and field; points are skipped if that is zero. The first
    half of the members selects a point's bin and the second half gives its variance. With the same members
    for both, the sampling error of the variance would flatten the curve.
    """
    x, y, count = members.double(), u_ref.double(), members.shape[1]
    sums = y.new_zeros(*y.shape[:2], 3, NUM_FINE)
    if count < 4:  # half of them have no variance
        return sums
    scale = rms(y).reshape(*y.shape[:3], *[1] * (y.ndim - 3)).square().expand_as(y)
    valid = valid_cells(y)
    x, y = filled(x, valid), filled(y, valid)
    unit, kept = torch.where(scale > 0, scale, 1.0) * count / (count + 1), filled((scale > 0).double(), valid)
    first, second = x[:, : count // 2].var(1) / unit, x[:, count // 2 :].var(1) / unit
    index = ((0.5 * first.log10() + 6) * FINE).clamp(0, NUM_FINE - 1).long().flatten(2)
    error = (x.mean(1) - y).square() / (unit * (count + 1) / count)
    for row, value in enumerate((kept, kept * second, kept * error)):
        sums[:, :, row].scatter_add_(2, index, value.flatten(2))
    return sums


def _joined(sums: Tensor) -> Tensor:
    """`spread_bins` (B, 3, NUM_FINE) joined to NUM_BINS bins of equally many points -> (B, 3, NUM_BINS)."""
    position = (sums[:, :1].cumsum(2) - sums[:, :1] / 2) / sums[:, :1].sum(2, keepdim=True).clamp_min(1e-30)
    index = (position.nan_to_num(0.0) * NUM_BINS).clamp(0, NUM_BINS - 1).long().expand_as(sums)
    return torch.zeros(len(sums), 3, NUM_BINS, dtype=torch.float64).scatter_add_(2, index, sums)


def spread_slope(sums: Tensor) -> Tensor:
    """Slope of rmse over spread of `spread_bins` (B, 3, NUM_FINE), by least squares weighted with counts ->
    (B,).

    1 if the spread separates certain from uncertain points; NaN if it varies too little.
    """
    count, variance, error = _joined(sums).unbind(1)
    spread, rmse = ((part / count.clamp_min(1e-30)).sqrt() for part in (variance, error))
    weight = count / count.sum(1, keepdim=True)
    away = spread - (weight * spread).sum(1, keepdim=True)
    slope = (weight * away * rmse).sum(1) / (weight * away.square()).sum(1)
    return torch.where((count > 0).sum(1) > 1, slope, torch.nan)


def spread_skill_bins(sums: Tensor) -> dict[str, Any]:
    """Curve of `spread_bins` (3, NUM_FINE): spread, rmse (relative to the RMS of the truth) and count of the
    bins with points; slope."""
    bins = _joined(sums[None])[0]
    count, variance, error = bins[:, bins[0] > 0]
    return {
        "spread": numbers((variance / count).sqrt()),
        "rmse": numbers((error / count).sqrt()),
        "count": numbers(count),
        "slope": number(spread_slope(sums[None])[0]),
    }


# ---- ranks


def rank_histogram(
    members: Tensor, u_ref: Tensor, generators: Sequence[torch.Generator], stride: int = 1
) -> Tensor:
    """Counts of the rank 0..M of the truth among the members, over fields and every stride-th cell that is
    not certain -> (n, T, M + 1).

    A cell is certain if truth and members differ by less than CERTAIN of their RMS spread over the frame, and
    if that is so in QUIET_CELLS of its cells: nothing happens there, a rank would be that of rounding errors.
    In a frame with such cells noise of that size is added to truth and members. Ties are broken at random.
    All this treats truth and members alike, so ranks are flat if these are exchangeable (Hamill 2001); one
    guess keeps only the cells in which it is wrong. generators: on the CPU, one for each of the n.
    """
    check_members(members, u_ref, "rank_histogram")
    thin = (..., *[slice(None, None, stride)] * (u_ref.ndim - 3))
    u = torch.cat([u_ref[thin].cpu()[:, None], members[thin].cpu()], 1).double()
    unit = CERTAIN * u.var(1).flatten(3).nanmean(3).sqrt().view(
        *u.shape[:1], *u.shape[2:4], *[1] * (u.ndim - 4)
    )
    is_certain = u.amax(1) - u.amin(1) < unit
    is_quiet = (is_certain.flatten(3).double().mean(3) > QUIET_CELLS).view(unit.shape)
    is_certain &= is_quiet
    for row in is_quiet.flatten(1).any(1).nonzero()[:, 0].tolist():
        noise = torch.randn(u.shape[1:], generator=generators[row], dtype=u.dtype)
        u[row] += unit[row] * is_quiet[row] * noise
    x, y = u[:, 1:], u[:, :1]
    below, ties = (x < y).sum(1), (x == y).sum(1)
    chance = torch.stack([torch.rand(ties.shape[1:], generator=one, dtype=u.dtype) for one in generators])
    rank = below + (chance * (ties + 1)).long()
    counts = torch.zeros(*rank.shape[:2], x.shape[1] + 1, dtype=torch.float64)
    return counts.scatter_add_(2, rank.flatten(2), (~(y[:, 0].isnan() | is_certain)).double().flatten(2))


def ranks(members: Tensor, u_ref: Tensor, stride: int) -> Tensor:
    """`rank_histogram` with ties broken by a generator seeded with each frame's truth, so that the result
    does not depend on the batch."""
    x, y = members.transpose(1, 2).flatten(0, 1), u_ref.flatten(0, 1)
    num, counts = max(1, RANKED // x[0].numel()), []
    for members_of, frames in zip(x.split(num), y.cpu().split(num), strict=True):
        seeds = [zlib.crc32(frame.contiguous().numpy().tobytes()) for frame in frames]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        counts.append(rank_histogram(members_of[:, :, None], frames[:, None], generators, stride))
    return torch.cat(counts).reshape(*u_ref.shape[:2], -1)


def outlier_fraction(counts: Tensor) -> Tensor:
    """Fraction of truths outside the ensemble over its expectation 2/(M+1), of rank counts (..., M + 1) ->
    (...); NaN for M = 1."""
    bins = counts.shape[-1]
    return (counts[..., 0] + counts[..., -1]) / counts.sum(-1) * (bins / 2 if bins > 2 else math.nan)


def coverage(counts: Tensor, level: float) -> Tensor:
    """Fraction of truths in the central interval of probability `level`, of rank counts (..., M + 1) ->
    (...).

    The interval excludes k = (M + 1)(1 - level)/2 of the M + 1 gaps between members at each end; for
    fractional k a gap counts in part. So exchangeable members give `level` exactly at every M and for any
    distribution. Interpolated quantiles do not: the whole range of 16 members has 88 %. NaN for k <= 1/2 (M <
    10 at 90 %), where most outliers would be covered.
    """
    bins = counts.shape[-1]
    edges = (torch.arange(bins + 1, dtype=torch.float64) - bins / 2).clamp(
        -level * bins / 2, level * bins / 2
    )
    return (
        (counts * edges.diff()).sum(-1)
        / counts.sum(-1)
        * (1.0 if bins * (1 - level) > 1 + 1e-9 else math.nan)
    )
