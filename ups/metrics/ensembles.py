"""Scores of ensemble forecasts: error of the distribution, calibration, and structure of the members.

Axes: members (n, M, T, C, *space), u_ref (n, T, C, *space) in physical units, 1 to 3 space axes; float64
inside. M = 1 is a deterministic forecast. Scores are stored per trajectory, so that means and intervals do
not depend on the batch size:

    scores = merge([score_ensemble(members, ref, boundary) for members, ref in batches])
    row = summarise_ensemble(scores, Resamples(count, seed))                  # numbers with 95 % intervals

No single score suffices. CRPS is insensitive to the spread (half of it costs 8 %), and neither CRPS,
spread/skill nor ranks see spatial structure; the energy score does. A calibrated member has sqrt(2) times the
error of a perfect mean, so accuracy is measured on the ensemble mean. `ENSEMBLES` has a row for every metric.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ups.common.mask import cell_mean, filled, fraction, valid_cells
from ups.metrics.calibration import coverage, ranks, spread_skill
from ups.metrics.errors import check_shapes, pooled, vanishes
from ups.metrics.intervals import (
    CHUNK,
    Metric,
    Moments,
    Resamples,
    Scores,
    Statistic,
    compare,
    defined_mean,
    merge,
    merge_chunks,
    ratio,
    summarise,
)
from ups.metrics.proper import check_members, energy_score, expected_crps, fair_crps
from ups.metrics.spectra import rms

LEVELS = (0.5, 0.9)  # nominal probabilities of the central intervals whose coverage is reported
POINTS = 16  # per axis, whose ranks are counted; neighbouring cells are not independent
CASES = 64  # in one call of the energy score, so that the pairs of members stay in the processor's cache


def _score_chunk(members: Tensor, u_ref: Tensor, stride: int, exact: Tensor | None) -> Scores:
    """Scores per frame, each tensor (n, T, ...)."""

    def per_frame(flags: Tensor, ndim: int) -> Tensor:
        """Flags (n, T), for tensors (n, T, ...) of `ndim` axes."""
        return flags[(..., *[None] * (ndim - 2))]

    valid, y = valid_cells(u_ref), u_ref.double()
    # frames with NaN or inf are scored as if they were exact, and marked at the end
    broken = ~filled(members, valid).isfinite().all(1).flatten(2).all(2)
    x = torch.where(per_frame(broken, u_ref.ndim)[:, None], u_ref[:, None], members).double()
    x = filled(x, valid, torch.nan)
    variance, squared = spread_skill(x, y)
    valid_fraction = fraction(valid)

    # ---- energy score, of frames (n T, M, C, *space)
    frames, frames_ref = filled(x.transpose(1, 2).flatten(0, 1), valid), filled(y.flatten(0, 1), valid)
    pairs = zip(frames.split(CASES), frames_ref.split(CASES), strict=True)
    energy = torch.cat([energy_score(*pair) for pair in pairs]).view(y.shape[:2])
    energy = energy / torch.as_tensor(valid_fraction).double().mean().sqrt()

    # ---- CRPS, of fields (n T C, M, *space)
    fields = frames.transpose(1, 2).flatten(0, 1)
    if exact is None:
        crps = fair_crps(fields, frames_ref.flatten(0, 1))
    else:
        exact = filled(exact.double(), valid)
        crps = expected_crps(fields, exact.transpose(1, 2).flatten(0, 1).transpose(1, 2).flatten(0, 1))
        squared = (x.mean(1) - exact.mean(1)).square() + exact.var(1, correction=0)
        squared = cell_mean(squared, valid)

    out = {
        "crps": crps.view(y.shape[:3]) / valid_fraction,
        "variance": variance,
        "squared_error": squared,
        "energy_score": energy,
        "ranks": ranks(members, u_ref, stride).to(y.device),
    }
    out = {name: value.masked_fill(per_frame(broken, value.ndim), torch.inf) for name, value in out.items()}
    return {**out, "ref_rms": rms(y), "nonfinite": broken.double()}


def score_ensemble(
    members: Tensor, u_ref: Tensor, rank_stride: int | None = None, exact: Tensor | None = None
) -> Scores:
    """Scores of each trajectory of a batch, float64 on the CPU, n first; join batches with `merge`.

    rank_stride: ranks are counted in every rank_stride-th cell per axis; default: about POINTS cells per
    axis. exact (n, K, T, C, *space): samples of the distribution of the truth, if it is known; crps and
    squared_error are then means over these samples instead of the one truth, with the same expectation and
    less noise.

    Returns crps, variance, squared_error (of the mean), ref_rms: (n, T, C); energy_score (n, T), over fields
    and cells, in units of an RMSE; ranks (n, T, M + 1); nonfinite (n, T), 1 if a member has a NaN or inf; the
    scores of such frames are inf. Cells where the truth is NaN in every frame do not count. Raises ValueError
    for shapes that do not fit, or a truth that is not finite in other cells.
    """
    check_members(members, u_ref, "score_ensemble")
    check_shapes(u_ref, u_ref)
    if exact is not None:
        check_members(exact, u_ref, "score_ensemble, exact,")
    stride = max(1, min(u_ref.shape[3:]) // POINTS) if rank_stride is None else rank_stride
    frame = members[0, :, 0].numel()
    frames, size = max(1, CHUNK // frame), max(1, CHUNK // (frame * u_ref.shape[1]))

    def scores(x: Tensor, y: Tensor, law: Tensor | None) -> Scores:
        parts = [slice(first, first + frames) for first in range(0, y.shape[1], frames)]
        laws = [None if law is None else law[:, :, some] for some in parts]
        pairs = zip(parts, laws, strict=True)
        return merge([_score_chunk(x[:, :, some], y[:, some], stride, law) for some, law in pairs], 1)

    return merge_chunks(scores, size, members, u_ref, exact)


# ---- moments of the metrics


def _mean(name: str, by_lead: bool = False) -> Any:
    """Moments of the mean of a score (n, ...) over frames and fields; by_lead: over fields. None if there
    is no such score."""

    def moments(scores: Scores, _: object) -> Moments | None:
        found = scores.get(name)
        if found is None:
            return None
        return defined_mean(found, 2) if by_lead else defined_mean(found.reshape(len(found), -1))

    return moments


def _error_of_mean(scores: Scores, _: object) -> Moments:
    """Moments of the RMS error of the mean over the RMS of the truth; pooled where a field vanishes."""
    error, ref = scores["squared_error"].sqrt(), scores["ref_rms"]
    return pooled(error, ref) if vanishes(ref) else defined_mean(ratio(error, ref).flatten(1))


def _calibration(scores: Scores, _: object, by_lead: bool = False) -> Moments:
    """Spread over skill of each field, mean over fields; over all leads or by_lead. The squared spread is the
    variance over members times (M + 1) / M: the expected squared error of the mean of exchangeable ones."""
    num_members = scores["ranks"].shape[2] - 1
    spread = scores["variance"] * (num_members + 1) / num_members
    both = torch.stack([spread, scores["squared_error"]], 1)
    num_fields = both.shape[3]

    def root_ratio(mean: Tensor) -> Tensor:
        values = ratio(*mean.unflatten(1, (2, -1, num_fields)).unbind(1)).sqrt().nanmean(2)
        return values if by_lead else values[:, 0]

    return (both if by_lead else both.mean(2)).flatten(1), root_ratio


def _of_ranks(statistic: Statistic) -> Any:
    """Moments of a statistic of the counts of ranks over all leads."""

    def moments(scores: Scores, _: object) -> Moments:
        return scores["ranks"].sum(1), statistic

    return moments


ENSEMBLES = (
    Metric(
        "crps",
        "CRPS",
        "continuous ranked probability score, fair: error of a forecast distribution, units of the field",
        _mean("crps"),
        is_compared=True,
    ),
    Metric(
        "energy_score",
        "energy score",
        "the same for whole fields: sees whether points vary together; units of an RMSE",
        _mean("energy_score"),
        is_compared=True,
    ),
    Metric(
        "nrmse_mean",
        "nRMSE of the mean",
        "ensemble mean against the truth, as nRMSE elsewhere; pooled where a field vanishes in some frames",
        _error_of_mean,
        is_compared=True,
    ),
    Metric(
        "ssr",
        "spread / skill",
        "spread over error of the mean, with (M+1)/M; 1 is calibrated, below 1 overconfident",
        _calibration,
        best=1.0,
    ),
    *[
        Metric(
            f"coverage_{100 * level:.0f}",
            f"coverage, {100 * level:.0f} %",
            f"fraction of truths in the central {100 * level:.0f} % interval, exact for finite M",
            _of_ranks(partial(coverage, level=level)),
            best=level,
        )
        for level in LEVELS
    ],
    Metric(
        "trajectory_score",
        "trajectory score",
        "energy score of whole trajectories: sees whether leads and points vary together; units of an RMSE",
        _mean("trajectory_score"),
        is_compared=True,
    ),
    # lists for figures, which need no label
    Metric("crps_by_lead", moments=_mean("crps", by_lead=True), is_compared=True),
    Metric("ssr_by_lead", moments=partial(_calibration, by_lead=True)),
    Metric(
        "nonfinite_trajectories",
        "non-finite trajectories",
        "with NaN or inf in any member",
        best=None,
        plain=lambda scores: int(scores["nonfinite"].amax(1).sum()),
    ),
    Metric("num_trajectories", plain=lambda scores: len(scores["crps"])),
)
ENSEMBLE = {metric.name: metric for metric in ENSEMBLES}


def summarise_ensemble(scores: Scores, resamples: Resamples) -> dict[str, Any]:
    """One model's figures: every metric of `ENSEMBLES`; None if not finite or undefined."""
    return summarise(ENSEMBLES, scores, resamples, None)


def compare_ensembles(scores: Scores, baseline: Scores, resamples: Resamples) -> dict[str, dict]:
    """metric(scores) / metric(baseline) with paired intervals; below 1 is better.

    Every metric of `ENSEMBLES` with is_compared that both have -> {value, low, high}, or lists (T) of these
    by lead. The scores are fair, so the numbers of members may differ. Raises ValueError if the scores are of
    different cases.
    """
    if scores["crps"].shape != baseline["crps"].shape:
        raise ValueError(
            f"scores of {tuple(scores['crps'].shape)} and baseline of "
            f"{tuple(baseline['crps'].shape)} trajectories, leads, fields; expected the same "
            "cases in compare_ensembles. Score both models on one split."
        )
    rows = {
        metric.name: compare(metric, scores, baseline, resamples)
        for metric in ENSEMBLES
        if metric.is_compared
    }
    return {name: row for name, row in rows.items() if row is not None}
