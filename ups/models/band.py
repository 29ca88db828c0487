"""How wrong a forecast is: a band around it, calibrated by split conformal prediction on whole rollouts.

    |u_ref - u_pred| <= q * s * p(frame, field) * local(frame, field, cell)

of normalised fields. s, the expected RMS error of a rollout, is proportional to its difference from the
rollout of a twin (`differences`): its base was fitted to half of the data, and it starts from an image of the
start under a symmetry of the equation. What the data did not determine differs there, also far from them.
Base and twin share derivatives, steps and rounding (not of an `Equation`); the difference from the same
base with finer ones (`Base.refined`), where it takes steps, counts as well (`joined`). p is the profile of
errors in time, from every fourth validation rollout. local is large where the forecast is steep, as errors
are mostly shifts. q is the smallest number that holds in all cells and frames of enough of the others (Vovk,
Gammerman and Shafer 2005, chapter 4): a new start of the same distribution is inside with at least the
probability LEVEL. Nothing is promised of another distribution; there s gives an alarm.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.data.tokenizer import mean_of_neighbours
from ups.models.head import SAME, TaskHead
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.data.cache import Cache
    from ups.models.operator import Operator

LEVEL, ALARM = 0.9, 0.95  # probability of the band, and that a start like those of validation is no alarm
LARGE = 3.0  # refused: so many times the error that LEVEL do not exceed
FAR = 0.1  # refused: a parameter so many of its ranges outside of it, if the base does not extrapolate
MIN_ROWS = 20  # rollouts: fewer than 9 that calibrate do not bound one more with probability 0.9
FLAT = 0.2  # of the mean square slope is added: errors where the forecast is flat
TINY, HUGE = 1e-9, 1e3  # of normalised fields: rounding, and where a rollout has blown up


@dataclass(frozen=True)
class Band:
    """What validation says of the errors of a task; plain numbers, as `HeadFacts.band` stores them.

    factor: of s. profile: p, a row of fields for each frame; twin: the same of the differences from the twin.
    width, cell_width: q for all cells, and for LEVEL of the cells of every frame. alarm: the s that ALARM of
    starts like those of validation do not exceed. error: the RMS that LEVEL of them do not exceed; numerics:
    the same of the difference from a refined base, 0 without one.
    """

    factor: float
    profile: list[list[float]]
    twin: list[list[float]]
    width: float
    cell_width: float
    alarm: float
    error: float
    numerics: float = 0.0

    def expected(self, difference: Tensor) -> Tensor:
        """s (batch,) of `differences`, of which no more frames than `twin` has are used."""
        twin = torch.tensor(self.twin, dtype=torch.float64, device=difference.device)
        apart, refined = difference[:, :, : len(twin)]
        return joined(self.factor, size_of(apart, twin[: apart.shape[1]]), refined, self.numerics)

    def limits(self, extrapolates: bool) -> tuple[float, float]:
        """The stated error, and how far a parameter is outside of its range, above which a forecast is
        refused. extrapolates: of the head, whose stated error then includes what this costs."""
        return LARGE * self.error, math.inf if extrapolates else FAR

    def verdict(self, s: float, over: float = 0.0, extrapolates: bool = False) -> str:
        """One of "fine", "doubtful" and "refused". s: of `expected`; over: of `forecast_band.beyond`."""
        most, far = self.limits(extrapolates)
        if not (s <= most and over <= far):  # NaN is not
            return "refused"
        return "doubtful" if s > self.alarm or over > SAME else "fine"


def size_of(difference: Tensor, twin: Tensor) -> Tensor:
    """(batch,): the size of `differences` in units of their profile (time, C)."""
    return (difference / twin).square().mean((1, 2)).sqrt()


def joined(factor: float | Tensor, size: Tensor, refined: Tensor, numerics: float) -> Tensor:
    """s (batch,): the larger of what `size_of` and the difference from a refined base (batch, time, C) say.
    Up to `numerics` the fit may have made up for the latter: it counts in units of validation, as the twin's,
    but at most once. What exceeds `numerics` is added to that (squares)."""
    rms = refined.square().mean((1, 2)).sqrt()
    made_up = min(float(factor), numerics) * (rms / max(numerics, TINY)).clamp_max(1)
    excess = (rms.square() - numerics**2).clamp_min(0)
    return torch.maximum(factor * size, (made_up.square() + excess).sqrt())


def slopes(w: Tensor, ndim: int) -> Tensor:
    """The squared differences of each cell (..., C, *space) with its neighbours, summed over axes."""
    total = torch.zeros_like(w)
    for axis in range(-ndim, 0):
        step = w.diff(dim=axis).square()
        first, last = step.narrow(axis, 0, 1), step.narrow(axis, step.shape[axis] - 1, 1)
        total = total + (torch.cat([first, step], axis) + torch.cat([step, last], axis)) / 2
    return total


@torch.no_grad()
def differences(
    operator: "Operator",
    task: str,
    w: Tensor,
    raw: Tensor,
    w_pred: Tensor,
    weight: float,
    forcing: Tensor | None,
) -> Tensor:
    """The RMS differences (2, batch, time, C), float64, of a forecast from its twins, and from the refined
    base (0 without one), which takes the place of the last twin.

    Each starts from an image of w, and is compared with that image of the forecast. Without a symmetry and
    without a twin it has half of the network's output. Arguments as in `Operator.forecast`; weight: of the
    network's output in the forecast.
    """
    from ups.models.windows import stay, symmetry

    head, squares = operator.head(task), []
    refined = head.base.refined(head.facts.base["settings"])
    # one operator for all twins, so that they share its traced frames
    twin = operator.with_base(task, head.base if head.twin is None else head.twin)
    twins = [twin] * head.base.num_images
    if refined is not None:
        twins[-1] = operator.with_base(task, refined)
    for number, other in enumerate(twins):
        move = symmetry(head.task, head.codec.space, generator(number, "twin"))
        share = 0.5 if move is stay and head.twin is None and other is twin else 1.0
        start = head.input_codec.projected(move(w, head.input_codec))
        moved = None if forcing is None else move(forcing, head.forcing_codec)
        w_twin = other.forecast(start, task, raw, w_pred.shape[1], share * weight, moved)
        squares.append((move(w_pred, head.codec) - w_twin).double().square().flatten(3).mean(3))
    by_steps = torch.zeros_like(squares[-1]) if refined is None else squares.pop()
    apart = (sum(squares) / len(squares)).sqrt().nan_to_num(HUGE).clamp(TINY, HUGE)
    apart[:, :, len(head.task.moving) :] = 0  # copied from the start
    return torch.stack([apart, by_steps.sqrt().nan_to_num(HUGE).clamp_max(HUGE)])


def local(head: TaskHead, w_pred: Tensor) -> Tensor:
    """The factor of the band in every cell of a normalised forecast (batch, time, C, *space)."""
    square = slopes(w_pred, head.task.ndim).flatten(0, 1)
    for _ in range(2):
        square = (square + mean_of_neighbours(square, head.task.ndim)) / 2
    square = square.view_as(w_pred)
    mean = square.flatten(3).mean(3).view(*w_pred.shape[:3], *[1] * head.task.ndim)
    return ((square + FLAT * mean + TINY**2) / ((1 + FLAT) * mean + TINY**2)).sqrt()


def numbers_of(head: TaskHead, w_pred: Tensor, difference: Tensor, w_ref: Tensor) -> Tensor:
    """(rows, numbers), float64, of normalised rollouts: the RMS error; in every frame and field the
    largest error over `local`, the one that LEVEL of the cells do not exceed, and `differences`. Fields that
    are constant in time are copied from the start; the rounding of the cache there is no error."""
    error = w_pred - w_ref
    error[:, :, len(head.task.moving) :] = 0
    relative = (error.abs() / local(head, w_pred)).flatten(3).sort(3)[0].double()
    some = relative[..., math.ceil(LEVEL * relative.shape[3]) - 1]
    rms = error.double().square().flatten(1).mean(1, keepdim=True).sqrt()
    columns = [relative[..., -1], some, *difference]
    return torch.cat([rms, *(column.flatten(1) for column in columns)], 1)


@torch.no_grad()
def measured(operator: "Operator", cache: "Cache", rows: Tensor, context: int, weight: float) -> Tensor:
    """`numbers_of` rollouts of some rows by the operator, with this weight of the network's output."""
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    device = head.scale.device

    def numbers(batch: Tensor) -> Tensor:
        w, raw = head.input_codec.decode(cache.given(batch, context, device)), cache.parameters[batch]
        forcing = head.forcing_of(cache, batch, context - 1, num_frames + 1)
        w_pred = operator.forecast(w, head.name, raw, num_frames, weight, forcing)
        difference = differences(operator, head.name, w, raw, w_pred, weight, forcing)
        w_ref = head.codec.decode(cache.batch(batch, context, num_frames, device))
        return numbers_of(head, w_pred, difference, w_ref)

    return torch.cat([numbers(batch) for batch in cache.row_blocks(rows, cache.num_frames, len(rows))])


def calibrated(found: Tensor, groups: Tensor, num_fields: int, num_frames: int) -> Band | None:
    """The band of a task from `numbers_of` rollouts; None if they are too few or not finite. groups: of rows
    that start alike, which stay together."""
    is_first = (groups.unsqueeze(1) == groups.unique()).int().argmax(1) % 4 == 0
    if len(found) < MIN_ROWS or not found.isfinite().all() or (~is_first).sum() < MIN_ROWS / 2:
        return None
    size = num_frames * num_fields
    rms, most, some, difference, refined = found.split([1, *4 * [size]], 1)
    difference, refined = (one.view(-1, num_frames, num_fields) for one in (difference, refined))
    twin = difference[is_first].square().mean(0).sqrt().clamp_min(TINY)
    numerics = float(refined[is_first].square().mean((1, 2)).sqrt().quantile(LEVEL))
    s = size_of(difference, twin)[:, None]
    factor = (rms.clamp_min(TINY) / s)[is_first].log().mean().exp()
    s = joined(factor, s[:, 0], refined, numerics)[:, None]
    profile = (most[is_first] / s[is_first]).square().mean(0).sqrt().clamp_min(TINY)

    def reached(numbers: Tensor, level: float) -> float:
        """What one more of these numbers does not exceed with probability `level`."""
        ordered = numbers.sort()[0]
        return float(ordered[min(len(ordered), math.ceil((len(ordered) + 1) * level)) - 1])

    return Band(
        factor=float(factor),
        profile=profile.view(num_frames, num_fields).tolist(),
        twin=twin.tolist(),
        width=reached((most / s / profile).amax(1)[~is_first], LEVEL),
        cell_width=reached((some / s / profile).amax(1)[~is_first], LEVEL),
        alarm=reached(s[~is_first, 0], ALARM),
        error=reached(rms[:, 0], LEVEL),
        numerics=numerics,
    )
