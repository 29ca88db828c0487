"""A forecast with what is known of its error: `Forecaster.forecast(.., error=True)`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ups.forecast_inputs import in_units, warning_of
from ups.forecast_xarray import Field
from ups.models.band import LEVEL, MIN_ROWS, expected, features, local
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
    facts, num_frames, shape = head.facts.band, w_pred.shape[1], (-1, *[1] * (w_pred.ndim - 1))
    profile = torch.tensor(facts["profile"], device=w_pred.device)
    horizon = min(len(profile), num_frames)
    profile = torch.cat([profile, torch.full_like(profile[:1], torch.inf).expand(num_frames, -1)])[
        :num_frames
    ]
    s, distance = expected(facts, features(head, start[0], w_pred, start[1]), len(head.facts.parameters))
    scale = s.float().view(shape) * profile.view(1, *profile.shape, *shape[3:]) * local(head, w_pred)

    def end(width: float) -> Field:
        return restore(in_units(head, head.codec.denormalise(w_pred + width * scale), given))

    warning = warning_of(head, head.codec.denormalise(w_pred))
    verdicts = [judged(facts, *row, warning) for row in zip(s.tolist(), distance.tolist(), strict=True)]
    is_batch = restore(w_pred).ndim == w_pred.ndim
    columns = s.tolist(), *map(list, zip(*verdicts, strict=True))
    errors, verdict, reason = (column if is_batch else column[0] for column in columns)
    ends = [end(sign * facts[key]) for key in ("width", "cell_width") for sign in (-1, 1)]
    u = restore(in_units(head, head.codec.denormalise(w_pred), given))
    return BandedForecast(u, *ends, horizon, horizon * head.facts.dt, errors, verdict, reason)


def judged(facts: dict, error: float, distance: float, warning: str) -> tuple[str, str]:
    """(verdict, reason) of a forecast."""
    large, far = error / facts["error"], distance
    if not (far <= FAR and large <= LARGE):  # NaN is not
        return "refused", (
            f"start or forecast are {far:.2g} times as far from those of validation as its farthest, and the "
            f"expected error is {large:.2g} times the largest there"
        )
    if far > 1:
        return (
            "doubtful",
            f"start or forecast are {far:.2g} times as far from those of validation as its farthest",
        )
    if warning:
        return "doubtful", warning
    return "fine", f"it is like those of validation, {LEVEL:.0%} of which are inside the band"
