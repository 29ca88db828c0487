"""Errors of predicted trajectories. They are stored per trajectory, so that means and intervals do not depend
on the batch size.

Axes: u_pred, u_ref are (n, T, C, *space) in physical units, 1 to 3 space axes; T counts predicted frames
only, without the context frames. e = u_pred - u_ref, <.>_x is a mean over cells, N the number of cells, box
length 1.

    scores = merge([score(pred, ref) for pred, ref in batches])               # per trajectory
    row = summarise_errors(scores, Resamples(count, seed))                    # numbers with 95 % intervals

Definitions are PDEBench's (Takamoto et al. 2022, `metric_func`) unless a docstring says otherwise, with roots
of means taken over all trajectories instead of within a batch. `ERRORS` has a row for every metric.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ups.common.mask import cell_mean, filled, valid_cells
from ups.metrics.intervals import (
    CHUNK,
    Metric,
    Moments,
    Resamples,
    Scores,
    defined_mean,
    merge_chunks,
    plain_mean,
    ratio,
    root_mean,
    summarise,
)
from ups.metrics.spectra import rms

CORRELATION = 0.8  # threshold of the high-correlation time (Lippe et al. 2023, PDE-Refiner, section 4)
LARGEST_ERROR = 0.5  # nRMSE of a forecast that is still usable: a quarter of the field's energy is wrong
VANISHING = 1e-2  # RMS of a frame over that of all
FLAT = 1e-6  # a field whose standard deviation is below FLAT * RMS is constant to float32 rounding


def vanishes(ref_rms: Tensor) -> bool:
    """Whether a field is close to zero in some frames: RMS (n, T, C) below VANISHING of that of all. There
    relative errors have no bound."""
    whole = ref_rms.double().square().mean((0, 1)).sqrt()
    return bool((ref_rms.double() < VANISHING * whole).any())


def are_pooled(ref_rms: Tensor, is_driven: bool) -> bool:
    """Whether errors of forecasts are pooled over trajectories: if a driven field (`Task.is_driven`)
    vanishes. ref_rms (n, T, C): RMS of the truth."""
    return is_driven and vanishes(ref_rms)


def check_shapes(u_pred: Tensor, u_ref: Tensor) -> None:
    if u_pred.shape != u_ref.shape or not 4 <= u_ref.ndim <= 6 or 0 in u_ref.shape:
        raise ValueError(
            f"prediction {tuple(u_pred.shape)} and truth {tuple(u_ref.shape)}; expected two equal, "
            "non-empty shapes (n, T, C, *space) with 1 to 3 space axes. Cut the context frames from both."
        )
    valid = valid_cells(u_ref)
    if not filled(u_ref, valid).isfinite().all() or (valid is not None and not valid.any()):
        raise ValueError(
            f"the truth of shape {tuple(u_ref.shape)} holds NaN or inf; expected finite fields, but for "
            "cells that have no value in any frame. Check the data file: its reference solver failed."
        )


def _error(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    check_shapes(u_pred, u_ref)
    return u_pred.double() - u_ref.double()


def rmse(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(<e^2>_x) -> (n, T, C). PDEBench's RMSE is its mean over n, T and C."""
    return cell_mean(_error(u_pred, u_ref).square(), valid_cells(u_ref)).sqrt()


def nrmse(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(<e^2>_x) / sqrt(<u_ref^2>_x) -> (n, T, C); PDEBench's nRMSE is its mean.

    No epsilon, as in PDEBench, so the numbers agree wherever theirs is defined. Frames whose truth is exactly
    zero have no relative error: NaN here, excluded from means and counted as `zero_frames`.
    """
    return ratio(rmse(u_pred, u_ref), rms(u_ref))


def bias(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """<e>_x -> (n, T, C): error of the conserved mean. PDEBench's cRMSE is mean_TC sqrt(mean_n bias^2)."""
    return cell_mean(_error(u_pred, u_ref), valid_cells(u_ref))


def correlation(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """Pearson correlation over space, mean over channels -> (n, T).

    A flat truth (standard deviation below FLAT * RMS) has no correlation: that channel is excluded, NaN if
    all are. A flat prediction of a truth that varies has correlation 0: it carries no information.
    """
    check_shapes(u_pred, u_ref)
    valid, parts = valid_cells(u_ref), []
    for u in (u_pred.double(), u_ref.double()):
        u = filled(u, valid, torch.nan)
        centred = u - cell_mean(u, valid)[(..., *[None] * (u.ndim - 3))]
        std = cell_mean(centred.square(), valid).sqrt()
        parts.append((centred, std, std <= FLAT * rms(u)))
    (pred, std_pred, flat_pred), (ref, std_ref, flat_ref) = parts
    value = cell_mean(pred * ref, valid) / torch.where(flat_pred | flat_ref, 1.0, std_pred * std_ref)
    value = torch.where(flat_pred, 0.0, value)
    return torch.where(flat_ref, torch.nan, value).nanmean(2)


def correlation_time(values: Tensor, lead_times: Tensor | None = None) -> Tensor:
    """First lead time with a correlation (n, T) below CORRELATION, or the last lead time -> (n,).

    So a trajectory that stays above gives a lower bound. lead_times (T,): time since the last context frame;
    default 1..T in frames. Undefined (NaN) frames do not end the time.
    """
    num_frames = values.shape[1]
    lead_times = torch.arange(1, num_frames + 1) if lead_times is None else torch.as_tensor(lead_times)
    if lead_times.shape != (num_frames,):
        raise ValueError(
            f"lead_times has shape {tuple(lead_times.shape)}; expected ({num_frames},), one per "
            "predicted frame. Cut the context frames from it."
        )
    below = values < CORRELATION
    first = torch.where(below.any(1), below.double().argmax(1), num_frames - 1)
    return lead_times.to(torch.float64)[first.cpu()]


def _score_chunk(u_pred: Tensor, u_ref: Tensor) -> dict[str, Tensor]:
    u_pred, u_ref = u_pred.double(), u_ref.double()
    valid = valid_cells(u_ref)
    bad = ~torch.isfinite(filled(u_pred, valid)).flatten(3).all(3)
    u_pred = torch.where(bad.reshape(*bad.shape, *[1] * (u_ref.ndim - 3)), u_ref, u_pred)  # marked inf below
    u_pred = filled(u_pred, valid, torch.nan)
    errors = {
        "rmse": rmse(u_pred, u_ref),
        "bias": bias(u_pred, u_ref),
    }
    errors = {
        name: value.masked_fill(bad.reshape(*bad.shape, *[1] * (value.ndim - 3)), torch.inf)
        for name, value in errors.items()
    }
    return {
        **errors,
        "ref_rms": rms(u_ref),
        "correlation": correlation(u_pred, u_ref).masked_fill(bad.any(2), -1.0),
        "nonfinite": bad.flatten(1).any(1).double(),
    }


def score(u_pred: Tensor, u_ref: Tensor) -> dict[str, Tensor]:
    """Scores of each trajectory of a batch, float64 on the CPU, n first; join batches with `merge`.

    rmse, ref_rms, bias: (n, T, C); correlation: (n, T); nonfinite: (n,) 1 if the prediction has a NaN or inf.
    Cells in which the truth is NaN in every frame do not count. Errors of non-finite frames are inf. Raises
    ValueError for unequal shapes or a truth that is not finite.
    """
    check_shapes(u_pred, u_ref)
    size = max(1, CHUNK // math.prod(u_ref.shape[1:]))
    return merge_chunks(_score_chunk, size, u_pred, u_ref)


def relative(scores: Scores) -> Tensor:
    """nRMSE per frame and field (n, T, C)."""
    return ratio(scores["rmse"], scores["ref_rms"])


def nrmse_per_trajectory(scores: Scores, is_pooled: bool = False) -> Tensor:
    """PDEBench's nRMSE of each trajectory, mean over time and channel -> (n,); to find the median and the
    worst one. is_pooled: relative to the RMS over all trajectories."""
    ref = scores["ref_rms"]
    return ratio(scores["rmse"], ref.square().mean(0).sqrt() if is_pooled else ref).nanmean((1, 2))


def pooled(error: Tensor, ref: Tensor, by_lead: bool = False) -> Moments:
    """Moments of the relative error with squares averaged over trajectories before the ratio, mean over
    fields and leads, or by_lead. error, ref (n, T, C): RMS of error and truth."""

    def statistic(mean: Tensor) -> Tensor:
        values = ratio(*mean.chunk(2, 1)).sqrt()
        return values.unflatten(1, ref.shape[1:]).nanmean(2) if by_lead else values.nanmean(1)

    return torch.cat([part.square().flatten(1) for part in (error, ref)], 1), statistic


def _correlation_time(scores: Scores, lead_times: Any) -> Moments | None:
    """None for a steady task."""
    values = scores["correlation"]
    return plain_mean(correlation_time(values, lead_times)[:, None]) if values.shape[1] > 1 else None


def _conservation(scores: Scores, _: Any) -> Moments | None:
    """RMS change of the conserved means; None for a task that conserves nothing."""
    return root_mean(scores["conservation_error"].square()) if "conservation_error" in scores else None


ERRORS = (
    Metric(
        "nrmse",
        "nRMSE",
        "RMS error over RMS of the truth per frame and field, mean over frames, fields, trajectories "
        "(PDEBench)",
        lambda scores, _: defined_mean(relative(scores).flatten(1)),
    ),
    Metric(
        "nrmse_pooled",
        "nRMSE, pooled",
        "per frame and field, squares averaged over trajectories before the ratio",
        lambda scores, _: pooled(scores["rmse"], scores["ref_rms"]),
    ),
    Metric("rmse", "RMSE", "RMS error in physical units", lambda scores, _: plain_mean(scores["rmse"])),
    Metric(
        "crmse",
        "cRMSE",
        "RMS error of the spatial mean, the conserved quantity",
        lambda scores, _: root_mean(scores["bias"].square()),
    ),
    Metric(
        "conservation_error",
        "conservation error",
        "RMS change of the conserved means since the last input frame, over their RMS there (mean over "
        "frames and conserved quantities)",
        _conservation,
    ),
    Metric(
        "correlation_time",
        "correlation time",
        f"lead time at which the correlation falls below {CORRELATION:g} (the horizon if it never does)",
        _correlation_time,
        best=None,
    ),
    Metric("error_growth_by_lead", moments=lambda scores, _: defined_mean(relative(scores), 2)),
    Metric(
        "nonfinite_trajectories",
        "non-finite trajectories",
        "predictions that hold NaN or inf",
        plain=lambda scores: int(scores["nonfinite"].sum()),
    ),
    Metric(
        "zero_frames",
        "zero frames",
        "frames whose truth is zero: no relative error, left out",
        plain=lambda scores: int((scores["ref_rms"] == 0).sum()),
    ),
)
ERROR = {metric.name: metric for metric in ERRORS}
POOLED_GROWTH = Metric(
    "error_growth_by_lead",
    moments=lambda scores, _: pooled(scores["rmse"], scores["ref_rms"], by_lead=True),
)


def summarise_errors(
    scores: Scores,
    resamples: Resamples,
    lead_times: Tensor | None = None,
    is_pooled: bool = False,
) -> dict[str, Any]:
    """One model's figures: every metric of `ERRORS`. is_pooled: error_growth_by_lead is pooled.

    lead_times: of the correlation time.
    """
    out = summarise(ERRORS, scores, resamples, lead_times)
    if is_pooled:
        out |= summarise([POOLED_GROWTH], scores, resamples, lead_times)
    return out
