"""A forecast with what is known of its error: `Forecaster.forecast(.., error=True)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.forecast_inputs import in_units, warning_of
from ups.forecast_xarray import Field
from ups.models.band import ALARM, FAR, LEVEL, MIN_ROWS, Band, local
from ups.models.facts import AGAIN
from ups.models.head import SAME, TaskHead
from ups.select import ROUNDING


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
    raw: Tensor,
    w_pred: Tensor,
    difference: Tensor,
    given: Tensor,
    restore: Callable[[Tensor], Field],
) -> BandedForecast:
    """raw: parameters; w_pred: the normalised forecast; difference: from its twins (`differences`); given:
    the start as it was passed, and `restore` of it. Raises ValueError for weights without a band."""
    if head.facts.band is None:
        raise ValueError(
            f"{head.name} has no band in its weights; expected that of this version's operator stage, from "
            f"{MIN_ROWS} validation rollouts or more (data.val_fraction). {AGAIN}"
        )
    band, num_frames, shape = Band(**head.facts.band), w_pred.shape[1], (-1, *[1] * (w_pred.ndim - 1))
    profile = torch.tensor(band.profile, device=w_pred.device)
    if profile.shape[1:] != w_pred.shape[2:3] or [*map(len, band.twin)] != [*map(len, band.profile)]:
        raise ValueError(
            f"the weights of {head.name} have a band of a profile of shape {tuple(profile.shape)}; "
            f"expected (frames, {w_pred.shape[2]}), twice. Take another copy of them, or train again."
        )
    horizon = min(len(profile), num_frames)
    profile = torch.cat([profile, torch.zeros_like(profile[:1]).expand(num_frames, -1)])[:num_frames]
    s = band.expected(difference)
    scale = s.float().view(shape) * profile.view(1, *profile.shape, *shape[3:]) * local(head, w_pred)
    scale[:, :, len(head.task.moving) :] = ROUNDING  # fields that are copied from the start

    def end(width: float) -> Field:
        u = in_units(head, head.codec.denormalise(w_pred + width * scale), given)
        u[:, horizon:] = math.copysign(math.inf, width)
        return restore(u)

    warning = warning_of(head, head.codec.denormalise(w_pred))
    if head.twin is None and not head.is_network_used:
        warning = warning or "nothing of it was fitted to data, so nothing shows how wrong it is"
    rows = zip(s.tolist(), beyond(head, raw).tolist(), strict=True)
    verdicts = [judged(band, *row, head.extrapolates, warning) for row in rows]
    is_batch = restore(w_pred).ndim == w_pred.ndim
    columns = s.tolist(), *map(list, zip(*verdicts, strict=True))
    errors, verdict, reason = (column if is_batch else column[0] for column in columns)
    ends = [end(sign * width) for width in (band.width, band.cell_width) for sign in (-1, 1)]
    u = restore(in_units(head, head.codec.denormalise(w_pred), given))
    return BandedForecast(u, *ends, horizon, horizon * head.facts.dt, errors, verdict, reason)


def beyond(head: TaskHead, raw: Tensor) -> Tensor:
    """How far the parameters (batch, P) are outside of their trained ranges, in units of these: the most of a
    row. Positive ones count by their logarithms, and a range as at least a factor of e, or its own size."""
    over = raw.new_zeros(len(raw))
    for span, column in zip(head.facts.parameters.values(), raw.unbind(1), strict=True):
        low, high = raw.new_tensor(span)
        size = torch.maximum(high - low, high.abs()).clamp_min(1e-12)
        if low > 0:
            low, high, column = low.log(), high.log(), column.log()
            size = (high - low).clamp_min(1.0)
        over = torch.maximum(over, torch.maximum(low - column, column - high) / size)
    return over


def judged(band: Band, error: float, over: float, extrapolates: bool, warning: str) -> tuple[str, str]:
    """(verdict, reason) of a forecast. over: of `beyond`; extrapolates: of the head."""
    verdict = band.verdict(error, over, extrapolates)
    outside = f"a parameter is {over:.2g} of its range outside of it"
    if verdict == "refused":
        large = f"{error / band.error:.2g} times what {LEVEL:.0%} of those in validation do not exceed"
        return verdict, f"{outside + ', and ' if over > FAR else ''}the expected error is {large}"
    if verdict == "doubtful":
        large = f"the expected error is above that of {ALARM:.0%} of those in validation"
        return verdict, outside if over > SAME else large
    if warning:
        return "doubtful", warning
    return verdict, f"it is like those of validation, {LEVEL:.0%} of which are inside the band"
