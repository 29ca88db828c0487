"""Are members like exact samples? Figures of single members, less the same figures of samples of the law.

A figure is a mean over members of a feature of one member, minus its mean over exact samples from the same
start; if no law is known, over the data, as one sample. If members have the law, every figure has the mean 0,
without a bias from few members or samples. Features of d, the deviation of a sample from the mean of its law,
in units of the RMS of d at that start, lead and field:

    spread      log amplitude of d, over all leads
    lead        log amplitude of d at a lead
    place       log amplitude of d in cells where the law is sure, less sure and unsure, and in all cells over
                that of the law in the same cell
    spectrum    log energy of d in an octave of the wave number
    memory      correlation of d at two leads, by lag
    activity    cosine between places of d, |d| in BLOCKS blocks per axis less its mean over samples: at two
                leads, by lag, and in two fields (known law only)
    fields      correlation of d in two fields
    slope       log of the mean and of the largest difference between neighbouring cells of the sample itself
    skewness    of the differences between neighbouring cells of d
    starts      product of the differences of two halves of the members in lead, place and spectrum:
                0 unless the figure is too large from some starts and too small from others
                (known law only)
    members     correlation of d between members
    together    correlation of d between members of the same number from two starts
    nearest     log of the distance of the truth to the nearest member over that of a member to the nearest

The mean, RMS and groups of cells are those of one half of the exact samples, the figures of the other half.
If no law is known, d is the deviation from the mean of M - 1 other members, for members and data alike, cells
are grouped by the gradient of the operator's forecast, and `members` compares distances within an ensemble
with those to a second one. Intervals hold for all figures of a model together: max-t bootstrap over starts
(Romano and Wolf 2005).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ups.common.mask import filled, valid_cells
from ups.metrics.intervals import (
    CHUNK,
    INTERVAL,
    Resamples,
    group_sums,
    merge_chunks,
    numbers,
    resample_counts,
)
from ups.metrics.proper import EXACT
from ups.metrics.spectra import octaves

GROUPS = ("sure", "less sure", "unsure")  # thirds of the cells of a frame
FLOOR = 0.01  # of the mean energy of a frame: less energy does not count
QUIET = 0.003  # of the energy of a trajectory: less energy in an octave does not count
BLOCKS = 8
SMALL = 0.1  # of the typical size of distances and of slopes: smaller ones do not count
TINY = 1e-30


@dataclass(frozen=True)
class Features:
    """Features of samples (n, J, ...)."""

    amplitude: Tensor  # (n, J, T, C), log
    place: Tensor  # (n, J, 1 + GROUPS, C), log
    spectrum: Tensor  # (n, J, octaves, C), log
    inner: Tensor  # (n, J, T, C, T, C), correlation of d at two leads or in two fields
    blocks: Tensor  # (n, J, T, C, blocks): |d| in blocks of cells
    skewness: Tensor  # (n, J, C)
    direction: Tensor  # (n, J, numbers): d of the whole trajectory, of length 1


def in_blocks(u: Tensor) -> Tensor:
    """Means over BLOCKS blocks per axis of u (n, J, T, C, *space)."""
    pool = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d][u.ndim - 5]
    flat = u.flatten(0, 2)
    return pool(flat, [min(BLOCKS, size) for size in flat.shape[2:]]).unflatten(0, u.shape[:3])


def features_of(d: Tensor, scale: Tensor, local: Tensor, group: Tensor, boundary: str) -> Features:
    """d: deviations of samples (n, J, T, C, *space). scale (n, T, C): mean energy of d, local (n, T,
    C, cells) in every cell; group (n, T, C, cells): number in GROUPS."""
    d = d / scale.clamp_min(TINY).sqrt()[(..., *[None] * (d.ndim - 4))][:, None]
    flat = d.flatten(4)
    energy = flat.square()
    is_in = F.one_hot(group, len(GROUPS)).to(flat)  # (n, T, C, cells, GROUPS)
    by_group = torch.einsum("njtcx,ntcxg->njgc", energy, is_in) / is_in.sum((1, 3)).mT[:, None]
    allowed = local / scale.clamp_min(TINY)[..., None] + FLOOR
    over_local = (energy / allowed[:, None]).mean((2, 4))[:, :, None]
    by_octave = octaves(d.flatten(0, 1), boundary).mean(1).unflatten(0, d.shape[:2])
    unit = F.normalize(flat, dim=4)
    away = torch.cat([d.diff(dim=axis).flatten(4) for axis in range(4, d.ndim)], 4)
    skewness = away.pow(3).mean(4) / away.square().mean(4).clamp_min(TINY).pow(1.5)
    return Features(
        0.5 * (energy.mean(4) + FLOOR).log(),
        0.5 * torch.cat([by_group, over_local], 2).add(FLOOR).log(),
        (by_octave + QUIET).log().mT,
        torch.einsum("njtcx,njsex->njtcse", unit, unit),
        in_blocks(d.abs()).flatten(4),
        skewness.mean(2),
        F.normalize(d.flatten(2), dim=2),
    )


def deviations(x: Tensor, y: Tensor, forecast: Tensor, has_law: bool) -> tuple[Tensor, ...]:
    """(d of members x, samples y that they are compared with, their d, and scale, local and group of
    `features_of`); y: all samples of the law, or the data."""
    if has_law:
        known, y = y.chunk(2, 1)
        mean = known.mean(1, keepdim=True)
        d, e, local = x - mean, y - mean, known.var(1).flatten(3)
        activity = local
    else:
        mean = (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1)  # of the other members
        d, e = x - mean, y - mean[:, -1:]
        local = torch.cat([d, e], 1).square().mean(1).flatten(3)
        slopes = [forecast - forecast.roll(1, axis) for axis in range(3, forecast.ndim)]
        activity = sum(slope.square() for slope in slopes).flatten(3)
    group = activity.argsort(3).argsort(3) * len(GROUPS) // activity.shape[3]
    return d, y, e, local.mean(3), local, group


def pair_products(features: Features) -> Tensor:
    """Mean correlation of d between two different samples of a start (n, 1)."""
    unit, num = features.direction, features.direction.shape[1]
    return (unit.sum(1).square().sum(1, keepdim=True) - num) / (num * (num - 1))


def nearest(x: Tensor, y: Tensor) -> Tensor:
    """Log of the distance of the truth y (n, 1, T, ...) to the nearest member over that of a member of x (n,
    M, T, ...) to the nearest of truth and members, mean over leads: (n, 1)."""
    every = torch.cat([y, x], 1).transpose(1, 2).flatten(3)
    apart = torch.cdist(every, every, compute_mode=EXACT)
    typical = apart.mean((-1, -2))[..., None].clamp_min(TINY)
    apart.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    least = (apart.amin(-1) / typical + SMALL).log()
    return (least[..., 0] - least[..., 1:].mean(-1)).mean(1, keepdim=True)


def slopes(u: Tensor) -> Tensor:
    """Log of the mean and of the largest difference between neighbouring cells of samples u (n, J, T, C,
    *space), mean over leads: (n, J, 2, C)."""
    steps = torch.cat([u.diff(dim=axis).abs().flatten(4) for axis in range(4, u.ndim)], 4)
    sizes = torch.stack([steps.mean(4), steps.amax(4)], 3)
    return (sizes / sizes.mean(1, keepdim=True).clamp_min(TINY) + SMALL).log().mean(2)


def by_lag(inner: Tensor) -> Tensor:
    """Mean over fields and leads of products (n, J, T, C, T, C) at two leads: (n, J, lags)."""
    same = inner.diagonal(dim1=3, dim2=5).mean(-1)
    lags = [same.diagonal(lag, 2, 3).mean(-1) for lag in range(1, same.shape[2])]
    return torch.stack(lags, 2) if lags else same[..., 0, :0]


def by_pair(inner: Tensor) -> Tensor:
    """Mean over leads of products (n, J, T, C, T, C) in two fields: (n, J, pairs)."""
    at_once = inner.diagonal(dim1=2, dim2=4).mean(-1)
    one, other = torch.tril_indices(*at_once.shape[2:], -1)
    return at_once[:, :, one, other]


def less(one: Tensor, other: Tensor) -> Tensor:
    """Of features (n, J, ...), means over samples: (n, figures)."""
    return (one.mean(1) - other.mean(1)).flatten(1)


def compare_features(
    boundary: str, members: Tensor, u_ref: Tensor, forecast: Tensor, law: Tensor | None, again: Tensor | None
) -> dict[str, Tensor]:
    """Figures of each start, family -> (n, figures), and "direction" (n, M, numbers)."""
    valid = valid_cells(u_ref)
    x, truth = (filled(u.double(), valid) for u in (members, u_ref[:, None]))
    samples = truth if law is None else filled(law.double(), valid)
    d, y, e, *place = deviations(x, samples, filled(forecast.double(), valid), law is not None)
    ours, theirs = features_of(d, *place, boundary), features_of(e, *place, boundary)

    slope = slopes(torch.cat([y, x], 1))
    blocks = torch.cat([theirs.blocks, ours.blocks], 1)
    blocks = F.normalize(blocks - blocks.mean(1, keepdim=True), dim=4)
    cosine = torch.einsum("njtcx,njsex->njtcse", blocks, blocks)
    activity = torch.cat([by_lag(cosine), by_pair(cosine)], 2)
    halves = [
        [less(getattr(ours, name)[:, i::2], getattr(theirs, name)[:, i::2]) for i in (0, 1)]
        for name in ("amplitude", "place", "spectrum")
    ]
    if law is None:
        z = filled(again.double(), valid)
        x_few, count = x[:, :, : z.shape[2]].flatten(2), x.shape[1]
        within = torch.stack([part.var(1).sum(1) for part in (x_few, z.flatten(2))]).mean(0)
        between = (x_few.mean(1) - z.flatten(2).mean(1)).square().sum(1) / 2 - within / count
        pairs = (between / (within + between.abs()).clamp_min(TINY))[:, None]
    else:
        pairs = pair_products(ours) - pair_products(theirs)
    figures = {
        "spread": less(ours.amplitude, theirs.amplitude).mean(1, keepdim=True),
        "lead": less(ours.amplitude, theirs.amplitude),
        "place": less(ours.place, theirs.place),
        "spectrum": less(ours.spectrum, theirs.spectrum),
        "memory": less(by_lag(ours.inner), by_lag(theirs.inner)),
        "fields": less(by_pair(ours.inner), by_pair(theirs.inner)),
        "slope": less(slope[:, y.shape[1] :], slope[:, : y.shape[1]]),
        "skewness": less(ours.skewness, theirs.skewness),
        "members": pairs,
        "nearest": nearest(x, truth),
        "direction": ours.direction,
    }
    if law is not None:
        figures["activity"] = less(activity[:, y.shape[1] :], activity[:, : y.shape[1]])
        figures["starts"] = torch.stack([(a * b).mean(1) for a, b in halves], 1)
    return figures


def likeness(
    members: Tensor,
    u_ref: Tensor,
    boundary: str,
    forecast: Tensor,
    resamples: Resamples,
    law: Tensor | None = None,
    again: Tensor | None = None,
) -> dict[str, dict[str, list]]:
    """Family -> {value, low, high} of its figures, of members (n, M, T, C, *space).

    u_ref, forecast (n, T, C, *space): the data and the operator's forecast. law (n, K, T, C, *space): exact
    samples, if the law is known; else again (n, M, T', C, *space): the first leads of a second ensemble with
    other noise. None for figures that are not finite.
    """
    size = max(1, CHUNK // (members if law is None else law)[0].numel())
    found = merge_chunks(partial(compare_features, boundary), size, members, u_ref, forecast, law, again)
    unit = found.pop("direction").transpose(0, 1).flatten(2)  # (M, n, numbers)
    count = unit.shape[1]
    alike = (torch.einsum("jax,jx->a", unit, unit.sum(1)) / len(unit) - 1) / max(1, count - 1)
    # the mean of a function of pairs has twice the influence of a start (Hoeffding 1948)
    found["together"] = (2 * alike - alike.mean())[:, None] / unit.any()  # undefined if all samples are equal
    return intervals_together(found, resamples)


def intervals_together(found: dict[str, Tensor], resamples: Resamples) -> dict[str, dict[str, list]]:
    """Family -> {value, low, high} of means over starts of its figures (n, F); the intervals of all families
    hold together."""
    figures = torch.cat([*found.values()], 1)
    sums, sizes = group_sums(figures, resamples.groups)
    num = len(sizes)
    counts = resample_counts(num, resamples.count, torch.Generator().manual_seed(resamples.seed))
    value, again = sums.sum(0) / sizes.sum(), counts @ sums / (counts @ sizes)[:, None]
    error = (again - value).square().mean(0).sqrt() * (num / max(1, num - 1)) ** 0.5
    widest = torch.nanquantile(((again - value).abs() / error.clamp_min(TINY)).amax(1), INTERVAL)
    ends = (value, value - widest * error, value + widest * error)
    parts, out = [part.split([f.shape[1] for f in found.values()]) for part in ends], {}
    for name, *three in zip(found, *parts, strict=True):
        out[name] = dict(zip(("value", "low", "high"), map(numbers, three), strict=True))
    return out
