"""Calibration of ensembles: spread against error, and ranks of the truth among the members.

Axes: members (n, M, T, C, *space), u_ref (n, T, C, *space) in physical units; float64 inside.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ups.common.mask import cell_mean, valid_cells
from ups.metrics.proper import check_members

CERTAIN, QUIET_CELLS = 0.01, 0.1  # of the RMS spread over a frame, of its cells
RANKED = 2**22  # numbers of members that are ranked at a time


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
