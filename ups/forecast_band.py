"""A forecast with what is known of its error: `Forecaster.forecast(.., error=True)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.forecast_inputs import in_units, warning_of
from ups.forecast_xarray import Field
from ups.models.band import LEVEL, MIN_ROWS, Band, features, local
from ups.models.facts import AGAIN
from ups.models.head import TaskHead

# refused: so many times the largest distance without alarm, or the largest error of validation
FAR, LARGE = 2.0, 3.0


@dataclass(frozen=True)
class BandedForecast:
    """A forecast u and its band, all of the same kind and shape.

    low, high: with a probability of 0.9 the truth is between them in all cells and frames of the rollout.
    cell_low, cell_high: .. in 90 % of the cells of every frame. Both are infinite beyond the horizon.
    horizon, horizon_time: frames and time for which the band was calibrated. error: the expected RMS error
    over such a rollout, in standard deviations of the training data. verdict: "fine", "doubtful" (outside of
    what the band was calibrated on: it may not hold) or "refused" (far outside: do not use it); reason: of
    the verdict. The last three are lists with one for each row if the start has a batch axis.
    """

    u: Field
    low: Field
    high: Field
    cell_low: Field
    cell_high: Field
    horizon: int
    horizon_time: float
    error: float | list[float]
    verdict: str | list[str]
    reason: str | list[str]


def banded(
    head: TaskHead,
    start: tuple[Tensor, Tensor],
    w_pred: Tensor,
    given: Tensor,
    restore: Callable[[Tensor], Field],
) -> BandedForecast:
    """start: normalised frames and raw parameters; w_pred: the normalised forecast; given: the start as it
    was passed, and `restore` of it. Raises ValueError for weights without a band."""
    if head.facts.band is None:
        raise ValueError(
            f"{head.name} has no band in its weights; expected that of this version's operator stage, from "
            f"{MIN_ROWS} validation rollouts or more. {AGAIN}"
        )
    x = features(head, start[0], w_pred, start[1])
    band, num_frames, shape = Band(**head.facts.band), w_pred.shape[1], (-1, *[1] * (w_pred.ndim - 1))
    profile = torch.tensor(band.profile, device=w_pred.device)
    if len(band.mean) != x.shape[1] or profile.shape[1:] != w_pred.shape[2:3]:
        raise ValueError(
            f"the weights of {head.name} have a band of {len(band.mean)} features and a profile of shape "
            f"{tuple(profile.shape)}; expected {x.shape[1]} and (frames, {w_pred.shape[2]}). Take another "
            "copy of them, or train again."
        )
    horizon = min(len(profile), num_frames)
    profile = torch.cat([profile, torch.zeros_like(profile[:1]).expand(num_frames, -1)])[:num_frames]
    s, distance = band.expected(x, len(head.facts.parameters))
    scale = s.float().view(shape) * profile.view(1, *profile.shape, *shape[3:]) * local(head, w_pred)

    def end(width: float) -> Field:
        u = in_units(head, head.codec.denormalise(w_pred + width * scale), given)
        u[:, horizon:] = math.copysign(math.inf, width)
        return restore(u)

    warning = warning_of(head, head.codec.denormalise(w_pred))
    verdicts = [judged(band, *row, warning) for row in zip(s.tolist(), distance.tolist(), strict=True)]
    is_batch = restore(w_pred).ndim == w_pred.ndim
    columns = s.tolist(), *map(list, zip(*verdicts, strict=True))
    errors, verdict, reason = (column if is_batch else column[0] for column in columns)
    ends = [end(sign * width) for width in (band.width, band.cell_width) for sign in (-1, 1)]
    u = restore(in_units(head, head.codec.denormalise(w_pred), given))
    return BandedForecast(u, *ends, horizon, horizon * head.facts.dt, errors, verdict, reason)


def judged(band: Band, error: float, distance: float, warning: str) -> tuple[str, str]:
    """(verdict, reason) of a forecast."""
    large, far = error / band.error, distance
    if not (far <= FAR and large <= LARGE):  # NaN is not
        return "refused", (
            f"start or forecast are {far:.2g} times as far from those of validation as its farthest, and the "
            f"expected error is {large:.2g} times the largest there"
        )
    if far > 1:
        warning = f"start or forecast are {far:.2g} times as far from those of validation as its farthest"
    if warning:
        return "doubtful", warning
    return "fine", f"it is like those of validation, {LEVEL:.0%} of which are inside the band"
