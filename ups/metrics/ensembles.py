"""Scores of ensemble forecasts: does the spread say how wrong the forecast is, and do members look like the
truth?

Axes: members (n, M, T, C, *space), u_ref (n, T, C, *space) in physical units, 1 to 3 space axes, float64
inside. M = 1 is a deterministic forecast. Everything is kept per trajectory, so means and intervals do not
depend on the batch size:

    scores = merge([score_ensemble(members, ref, boundary) for members, ref in batches])
    row = summarise_ensemble(scores, num_bootstrap, seed)                     # numbers with 95 % intervals

No single score suffices: CRPS hardly sees the spread (half of it costs 8 %), and neither CRPS, spread/skill
nor ranks see spatial structure; the energy score and spectra do. A calibrated member has sqrt(2)
the error of a perfect mean, so accuracy is that of the ensemble mean. `ENSEMBLES` has a row for every metric.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ups.metrics.errors import check_shapes, rmse
from ups.metrics.intervals import (
    CHUNK,
    Metric,
    Moments,
    Scores,
    compare,
    defined_mean,
    entry,
    merge,
    number,
    numbers,
    rank_evenness,
    ratio,
    summarise,
)
from ups.metrics.joint import JOINT
from ups.metrics.mask import cell_mean, filled, fraction, known_cells
from ups.metrics.proper import check_members, energy_score, expected_crps, fair_crps
from ups.metrics.spectra import rms, spectrum_error

LEVELS = (0.5, 0.9)  # nominal probabilities of the central intervals whose coverage is reported
NUM_BINS = 10  # of predicted spread
# stored bins per decade of spread / RMS of the truth, and in all, from 1e-6 to 1e2
FINE, NUM_FINE = 16, 8 * 16
# |x|^2 + |y|^2 - 2 x.y would lose small distances, and the zero of equal draws
POINTS = 16  # per axis, whose ranks are counted: neighbouring cells are no independent draws
CASES = 64  # in one call of the energy score, whose pairs of members then stay in the cache


def spread_skill(members: Tensor, u_ref: Tensor) -> tuple[Tensor, Tensor]:
    """(unbiased variance over members, squared error of their mean), each averaged over space -> (n, T, C).

    Spread/skill ratio SSR = sqrt((M + 1) / M * mean variance) / sqrt(mean squared error), means before the
    roots (Fortin et al. 2014): 1 where truth and members are exchangeable, at every M. A single member has
    variance 0.
    """
    check_members(members, u_ref, "spread_skill")
    x, known = members.double(), known_cells(u_ref)
    variance = x.var(1) if x.shape[1] > 1 else torch.zeros_like(x[:, 0])
    return cell_mean(variance, known), cell_mean((x.mean(1) - u_ref.double()).square(), known)


def _spread_bins(members: Tensor, u_ref: Tensor) -> Tensor:
    """Sums over points in bins of predicted spread: count, (M+1)/M variance, squared error of the mean -> (n,
    T, 3, NUM_FINE).

    Relative to the RMS of the truth in the frame and field (none where that is zero). A point's bin is given
    by the first half of the members, the variance summed is the other half's: else the sampling error that
    chose the bin would flatten the curve.
    """
    x, y, count = members.double(), u_ref.double(), members.shape[1]
    sums = y.new_zeros(*y.shape[:2], 3, NUM_FINE)
    if count < 4:  # a half has no variance
        return sums
    scale = rms(y).reshape(*y.shape[:3], *[1] * (y.ndim - 3)).square().expand_as(y)
    known = known_cells(y)
    x, y = filled(x, known), filled(y, known)
    unit, kept = torch.where(scale > 0, scale, 1.0) * count / (count + 1), filled((scale > 0).double(), known)
    first, second = x[:, : count // 2].var(1) / unit, x[:, count // 2 :].var(1) / unit
    index = ((0.5 * first.log10() + 6) * FINE).clamp(0, NUM_FINE - 1).long().flatten(2)
    error = (x.mean(1) - y).square() / (unit * (count + 1) / count)
    for row, value in enumerate((kept, kept * second, kept * error)):
        sums[:, :, row].scatter_add_(2, index, value.flatten(2))
    return sums


def rank_histogram(members: Tensor, u_ref: Tensor, generator: torch.Generator, stride: int = 1) -> Tensor:
    """Counts of the rank 0..M of the truth among the members, over fields and every stride-th cell -> (n, T,
    M + 1).

    Ties are broken at random by `generator` (on the CPU). Flat where truth and members are exchangeable
    (Hamill 2001).
    """
    check_members(members, u_ref, "rank_histogram")
    thin = (..., *[slice(None, None, stride)] * (u_ref.ndim - 3))
    x, y = members[thin].cpu(), u_ref[thin].cpu()[:, None]
    below, ties = (x < y).sum(1), (x == y).sum(1)
    rank = below + (torch.rand(ties.shape, generator=generator, dtype=torch.float64) * (ties + 1)).long()
    counts = torch.zeros(*rank.shape[:2], x.shape[1] + 1, dtype=torch.float64)
    return counts.scatter_add_(2, rank.flatten(2), (~y[:, 0].isnan()).double().flatten(2))


def outlier_share(counts: Tensor) -> Tensor:
    """Share of truths outside the ensemble over its expectation 2/(M+1), of rank counts (..., M + 1) ->
    (...); NaN for M = 1."""
    bins = counts.shape[-1]
    return (counts[..., 0] + counts[..., -1]) / counts.sum(-1) * (bins / 2 if bins > 2 else math.nan)


def coverage(counts: Tensor, level: float) -> Tensor:
    """Share of truths in the central interval of probability `level`, of rank counts (..., M + 1) -> (...).

    k = (M + 1)(1 - level)/2 of the M + 1 gaps between members are cut off at each end; of the gap in which a
    fractional k ends the kept part counts. So exchangeable members give `level` exactly at every M, whatever
    the distribution; interpolated quantiles do not (the whole range of M = 16 has 88 %). NaN for k <= 1/2 (M
    < 10 at 90 %): most outliers would be covered.
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


def _ranks(members: Tensor, u_ref: Tensor, stride: int) -> Tensor:
    """rank_histogram whose tie-breaking is seeded by each frame's truth, so that it does not depend on the
    batch."""
    counts = [
        rank_histogram(
            x[None, :, None],
            y[None, None],
            torch.Generator().manual_seed(zlib.crc32(y.cpu().contiguous().numpy().tobytes())),
            stride,
        )
        for x, y in zip(members.transpose(1, 2).flatten(0, 1), u_ref.flatten(0, 1), strict=True)
    ]
    return torch.cat(counts).reshape(*u_ref.shape[:2], -1)


def _score_chunk(
    members: Tensor, u_ref: Tensor, boundary: str, reference: Tensor | None, stride: int, draws: Tensor | None
) -> Scores:
    """Everything that is per frame, each tensor (n, T, ...)."""
    known, cells = known_cells(u_ref), (..., *[None] * (u_ref.ndim - 2))
    broken = ~filled(members, known).isfinite().all(1).flatten(2).all(2)
    if reference is not None:
        broken = broken | ~filled(reference, known).isfinite().flatten(2).all(2)
        reference = filled(torch.where(broken[cells], u_ref, reference), known, torch.nan)
    x, y = torch.where(broken[cells][:, None], u_ref[:, None], members).double(), u_ref.double()
    x = filled(x, known, torch.nan)
    variance, squared = spread_skill(x, y)
    # (n T, M, C, *space)
    frames, frames_ref = (filled(u, known) for u in (x.transpose(1, 2).flatten(0, 1), y.flatten(0, 1)))
    scores = [energy_score(*part) for part in zip(frames.split(CASES), frames_ref.split(CASES), strict=True)]
    # (n T C, M, *space)
    fields, fields_ref = frames.transpose(1, 2).flatten(0, 1), frames_ref.flatten(0, 1)
    share, size = fraction(known), torch.as_tensor(fraction(known)).double().mean().sqrt()
    out = {
        "crps": fair_crps(fields, fields_ref).view(y.shape[:3]) / share,
        "variance": variance,
        "squared_error": squared,
        "member_rmse": torch.stack([rmse(member, y) for member in x.unbind(1)]).mean(0),
        "energy_score": torch.cat(scores).view(y.shape[:2]) / size,
        "ranks": _ranks(members, u_ref, stride).to(y.device),
        "spread_bins": _spread_bins(x, y),
        "spectrum_error": spectrum_error(x, y, boundary),
    }
    if reference is not None:
        out["residual_spectrum_error"] = spectrum_error(x, y, boundary, reference)
    if draws is not None:
        law = filled(draws.double(), known)
        out["crps"] = (
            expected_crps(fields, law.transpose(1, 2).flatten(0, 1).transpose(1, 2).flatten(0, 1)).view(
                y.shape[:3]
            )
            / share
        )
        away = (x.mean(1) - law.mean(1)).square() + law.var(1, correction=0)
        out["squared_error"] = cell_mean(away, known)
    out = {
        name: value.masked_fill(broken[(..., *[None] * (value.ndim - 2))], torch.inf)
        for name, value in out.items()
    }
    return {**out, "ref_rms": rms(y), "nonfinite": broken.double()}


def score_ensemble(
    members: Tensor,
    u_ref: Tensor,
    boundary: str,
    reference: Tensor | None = None,
    rank_stride: int | None = None,
    draws: Tensor | None = None,
) -> dict[str, Tensor]:
    """Per-trajectory quantities of a batch, float64 on the CPU, every tensor with n first; join batches with
    `merge_ensembles`.

    crps, variance, squared_error (of the mean), member_rmse, ref_rms, spectrum_error, residual_spectrum_error
    (only with `reference`, the operator's prediction): (n, T, C). draws (n, K, T, C, *space): of the law that
    the truth comes from, where it is known; crps and squared_error are then means over these in place of the
    one truth, which are expected to be the same and owe less to chance. energy_score: (n, T), over fields and
    cells, in the units of an RMSE. ranks: (n, T, M + 1), of every rank_stride-th cell per axis (default:
    about POINTS per axis). spread_bins: (n, 3, NUM_FINE). nonfinite: (n, T), 1 where any member has a NaN or
    inf; scores of such frames are inf. Cells in which the truth is NaN in every frame do not count. Raises
    ValueError for shapes that do not fit or a truth that is not finite in other cells.
    """
    check_members(members, u_ref, "score_ensemble")
    check_shapes(u_ref if reference is None else reference, u_ref)
    if draws is not None:
        check_members(draws, u_ref, "score_ensemble, draws,")
    stride = max(1, min(u_ref.shape[3:]) // POINTS) if rank_stride is None else rank_stride
    frame = members[0, :, 0].numel()
    frames, size = max(1, CHUNK // frame), max(1, CHUNK // (frame * u_ref.shape[1]))
    rows = []
    for i in range(0, len(u_ref), size):
        x, y, known, law = (
            None if u is None else u[i : i + size] for u in (members, u_ref, reference, draws)
        )
        parts = [
            _score_chunk(
                x[:, :, t : t + frames],
                y[:, t : t + frames],
                boundary,
                None if known is None else known[:, t : t + frames],
                stride,
                None if law is None else law[:, :, t : t + frames],
            )
            for t in range(0, y.shape[1], frames)
        ]
        rows.append(merge(parts, 1))
    out = merge(rows)
    return {**out, "spread_bins": out["spread_bins"].sum(1)}


def _joined(sums: Tensor) -> Tensor:
    """Sums (B, 3, NUM_FINE) of score_ensemble in NUM_BINS bins of equally many points -> (B, 3, NUM_BINS)."""
    position = (sums[:, :1].cumsum(2) - sums[:, :1] / 2) / sums[:, :1].sum(2, keepdim=True).clamp_min(1e-30)
    index = (position.nan_to_num(0.0) * NUM_BINS).clamp(0, NUM_BINS - 1).long().expand_as(sums)
    return torch.zeros(len(sums), 3, NUM_BINS, dtype=torch.float64).scatter_add_(2, index, sums)


def spread_slope(sums: Tensor) -> Tensor:
    """Slope of rmse over spread, by least squares weighted with the counts of the bins, of sums (B, 3,
    NUM_FINE) -> (B,).

    1 where the spread tells quiet points from uncertain ones; NaN where it varies too little to tell.
    """
    count, variance, error = _joined(sums).unbind(1)
    spread, rmse = ((part / count.clamp_min(1e-30)).sqrt() for part in (variance, error))
    weight = count / count.sum(1, keepdim=True)
    away = spread - (weight * spread).sum(1, keepdim=True)
    slope = (weight * away * rmse).sum(1) / (weight * away.square()).sum(1)
    return torch.where((count > 0).sum(1) > 1, slope, torch.nan)


def spread_skill_bins(sums: Tensor) -> dict[str, Any]:
    """Curve of sums (3, NUM_FINE): spread, rmse (relative to the RMS of the truth), count of bins with
    points; slope."""
    bins = _joined(sums[None])[0]
    count, variance, error = bins[:, bins[0] > 0]
    return {
        "spread": numbers((variance / count).sqrt()),
        "rmse": numbers((error / count).sqrt()),
        "count": numbers(count),
        "slope": number(spread_slope(sums[None])[0]),
    }


# ---- rows


def _inflated(scores: Scores) -> Tensor:
    """Variance over members times (M + 1) / M: what the squared error of the mean is where they are
    exchangeable."""
    num_members = scores["ranks"].shape[2] - 1
    return scores["variance"] * (num_members + 1) / num_members


def _relative(scores: Scores, squares: bool) -> Tensor:
    """nRMSE of the mean (from squared errors) or of a member, per frame and field."""
    return ratio(scores["squared_error"].sqrt() if squares else scores["member_rmse"], scores["ref_rms"])


def _mean_of(name: str) -> Any:
    """Moments of the mean of scores[name] over frames and fields; None where it was not scored."""
    return lambda scores, _: defined_mean(scores[name].flatten(1)) if name in scores else None


def _calibration(scores: Scores, by_lead: bool) -> Moments:
    """Spread over skill of each field, mean over fields: of all leads together, or of each."""
    both = torch.stack([_inflated(scores), scores["squared_error"]], 1)
    num_fields = both.shape[3]

    def root_ratio(mean: Tensor) -> Tensor:
        values = ratio(*mean.unflatten(1, (2, -1, num_fields)).unbind(1)).sqrt().nanmean(2)
        return values if by_lead else values[:, 0]

    return (both if by_lead else both.mean(2)).flatten(1), root_ratio


def _root_by_lead(squares: Tensor) -> Moments:
    num_fields = squares.shape[2]
    return squares.flatten(1), lambda mean: mean.unflatten(1, (-1, num_fields)).sqrt().mean(2)


def _of_ranks(statistic: Callable[[Tensor], Tensor]) -> Any:
    """Moments of a statistic of the counts of ranks over all leads."""
    return lambda scores, _: (scores["ranks"].sum(1), statistic)


ENSEMBLES = (
    Metric(
        "crps",
        "CRPS",
        "continuous ranked probability score, fair: error of a forecast distribution, units of the field",
        _mean_of("crps"),
        is_compared=True,
    ),
    Metric(
        "energy_score",
        "energy score",
        "the same for whole fields: sees whether points vary together; units of an RMSE",
        _mean_of("energy_score"),
        is_compared=True,
    ),
    Metric(
        "nrmse_mean",
        "nRMSE of the mean",
        "ensemble mean against the truth, per frame and field, as nRMSE elsewhere",
        lambda scores, _: defined_mean(_relative(scores, True).flatten(1)),
        is_compared=True,
    ),
    Metric(
        "nrmse_member",
        "nRMSE of a member",
        "single members; sqrt(2) times that of the mean where the spread is right",
        lambda scores, _: defined_mean(_relative(scores, False).flatten(1)),
        best=None,
    ),
    Metric(
        "ssr",
        "spread / skill",
        "spread over error of the mean, with (M+1)/M; 1 is calibrated, below 1 too sure",
        lambda scores, _: _calibration(scores, False),
        best=1.0,
    ),
    *[
        Metric(
            f"coverage_{100 * level:.0f}",
            f"coverage, {100 * level:.0f} %",
            f"share of truths in the central {100 * level:.0f} % interval, exact for finite M",
            _of_ranks(partial(coverage, level=level)),
            best=level,
        )
        for level in LEVELS
    ],
    Metric(
        "outlier_share",
        "outliers / expected",
        "share of truths outside the ensemble over 2/(M+1)",
        _of_ranks(outlier_share),
        best=1.0,
    ),
    Metric(
        "rank_ratio",
        "rank ratio",
        "unevenness of the rank histogram (Candille and Talagrand); 1 is flat",
        best=1.0,
    ),
    Metric(
        "spectrum_error",
        "spectrum error",
        "mean |log10| of members' energy over true energy, octaves of the wave number",
        _mean_of("spectrum_error"),
        is_compared=True,
    ),
    Metric(
        "residual_spectrum_error",
        "residual spectrum error",
        "the same of sampled residuals and true ones",
        _mean_of("residual_spectrum_error"),
        is_compared=True,
    ),
    *JOINT,
    Metric(
        "spread_slope",
        moments=lambda scores, _: (
            scores["spread_bins"].flatten(1),
            lambda mean: spread_slope(mean.unflatten(1, (3, -1))),
        ),
    ),
    Metric(
        "crps_by_lead",
        moments=lambda scores, _: defined_mean(scores["crps"], 2),
        has_ends=True,
        is_compared=True,
    ),
    Metric(
        "nrmse_mean_by_lead",
        moments=lambda scores, _: defined_mean(_relative(scores, True), 2),
        is_compared=True,
    ),
    Metric("spread_by_lead", moments=lambda scores, _: _root_by_lead(_inflated(scores))),
    Metric("rmse_by_lead", moments=lambda scores, _: _root_by_lead(scores["squared_error"])),
    Metric("ssr_by_lead", moments=lambda scores, _: _calibration(scores, True), has_ends=True),
    Metric(
        "nonfinite_trajectories",
        "non-finite trajectories",
        "with NaN or inf in any member",
        best=None,
        plain=lambda scores: int(scores["nonfinite"].amax(1).sum()),
    ),
    Metric(
        "num_members",
        "members",
        "size of the ensemble",
        plain=lambda scores: scores["ranks"].shape[2] - 1,
        best=None,
    ),
    Metric("num_trajectories", plain=lambda scores: len(scores["crps"])),
    Metric("spread_skill_bins", plain=lambda scores: spread_skill_bins(scores["spread_bins"].sum(0))),
    Metric("rank_histogram", plain=lambda scores: numbers(scores["ranks"].sum((0, 1)))),
)
ENSEMBLE = {metric.name: metric for metric in ENSEMBLES}


def summarise_ensemble(
    scores: Scores, num_bootstrap: int, seed: int, groups: Tensor | None = None
) -> dict[str, Any]:
    """One model's row: every metric of `ENSEMBLES`, null where not finite or undefined, and lists by lead
    (physical units)."""
    return {
        **summarise(ENSEMBLES, scores, num_bootstrap, seed, None, groups),
        "rank_ratio": entry(rank_evenness(scores["ranks"], num_bootstrap, seed, groups)),
    }


def compare_ensembles(
    scores: Scores, baseline: Scores, num_bootstrap: int, seed: int, groups: Tensor | None = None
) -> dict[str, dict]:
    """metric(scores) / metric(baseline) with paired intervals, below 1 is better; the scores are fair, so M
    may differ.

    Every metric of `ENSEMBLES` that is compared, where both have it -> {value, low, high}, lists [T] of one
    by lead.
    ssr_less: spread/skill less the baseline's.
    """
    if scores["crps"].shape != baseline["crps"].shape:
        raise ValueError(
            f"scores of {tuple(scores['crps'].shape)} and baseline of "
            f"{tuple(baseline['crps'].shape)} trajectories, leads, fields; expected the same "
            "cases in compare_ensembles. Score both models on one split."
        )
    rows = {
        metric.name: compare(metric, scores, baseline, num_bootstrap, seed, groups)
        for metric in ENSEMBLES
        if metric.is_compared
    }
    rows["ssr_less"] = compare(ENSEMBLE["ssr"], scores, baseline, num_bootstrap, seed, groups, Tensor.sub)
    return {name: row for name, row in rows.items() if row is not None}
