"""How wrong a forecast is: a band around it, calibrated by split conformal prediction on whole rollouts.

    |u_ref - u_pred| <= q * s * p(frame, field) * local(frame, field, cell)

of normalised fields. s, the expected RMS error of a rollout, is a power law of what its start shows
(`features`), fitted to half of the validation rollouts; p is the profile of their errors in time. local is
large where the forecast is steep, as errors are mostly shifts. q is the smallest number that holds in all
cells and frames of enough of the other half (Vovk, Gammerman and Shafer 2005, chapter 4; one number per
rollout, not per cell): a new start of the same distribution is inside with at least the probability LEVEL.
Nothing is promised of another distribution; there the distance of the features from those of validation
gives an alarm.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.data.tokenizer import mean_of_neighbours
from ups.models.head import SAME, TaskHead

if TYPE_CHECKING:
    from ups.data.cache import Cache
    from ups.models.operator import Component, Operator

LEVEL, ALARM = 0.9, 0.95  # probability of the band; of starts like those of validation to be no alarm
MIN_ROWS = 20  # rollouts: of fewer than 9 in the second half none is outside with probability 0.1
RIDGE = 0.1  # of the fit of s, per rollout and feature in its standard deviation
FLAT = 0.2  # of the mean square slope is added: errors where the forecast is flat
TINY = 1e-9  # of normalised fields: rounding


@dataclass(frozen=True)
class Band:
    """What validation says of the errors of a task; plain numbers, as `HeadFacts.band` stores them.

    mean, std, low, high, weights: of each of `features`. center: of log s. profile: p, a row of fields for
    each frame. width, cell_width: q for all cells, and for LEVEL of the cells of every frame. distance: of
    starts like those of validation. error: the largest s of validation.
    """

    mean: list[float]
    std: list[float]
    low: list[float]
    high: list[float]
    weights: list[float]
    center: float
    profile: list[list[float]]
    width: float
    cell_width: float
    distance: float
    error: float

    def expected(self, x: Tensor, num_parameters: int) -> tuple[Tensor, Tensor]:
        """(s, distance), (batch,) each, of `features` x, of which the last are parameters. distance: of the
        feature that is farthest from those of validation, 1 where an alarm begins. That of a parameter begins
        with the trained range, a tenth of which further it is 2."""
        mean, std, weights, low, high = (
            torch.tensor(numbers, dtype=x.dtype, device=x.device)
            for numbers in (self.mean, self.std, self.weights, self.low, self.high)
        )
        z, num = (x - mean) / std, x.shape[1] - num_parameters
        beyond = (torch.maximum(low - x, x - high) / (high - low).clamp_min(1.0))[:, num:]
        distance = z[:, :num].abs().amax(1) / self.distance
        if num_parameters:
            distance = torch.maximum(distance, torch.where(beyond > SAME, 1 + 10 * beyond, 0.0).amax(1))
        return (self.center + z @ weights).exp(), distance


def slopes(w: Tensor, ndim: int) -> Tensor:
    """The squared differences of each cell (..., C, *space) with its neighbours, summed over axes."""
    total = torch.zeros_like(w)
    for axis in range(-ndim, 0):
        step = w.diff(dim=axis).square()
        first, last = step.narrow(axis, 0, 1), step.narrow(axis, step.shape[axis] - 1, 1)
        total = total + (torch.cat([first, step], axis) + torch.cat([step, last], axis)) / 2
    return total


def features(head: TaskHead, w: Tensor, w_pred: Tensor, parameters: Tensor) -> Tensor:
    """(batch, features), float64: logarithms of what describes a start, and the scaled parameters.

    w (batch, time, C, *space), w_pred: start and forecast, normalised; of the forecast the first frame
    counts. The start's latents are compared with the variance of those of the training data in every mode of
    a patch.
    """
    codec, ndim = head.input_codec, head.task.ndim
    w, w_next = w[:, -1], w_pred[:, 0]
    variance = (codec.spectrum * codec.width)[: codec.dim].clamp_min(TINY)
    unusual, steep = (codec.encode(w).square() / variance).mean(-1), slopes(w, ndim)
    squares = [unusual, w.square(), steep, slopes(w_next, ndim), w_next.square()]
    if not head.task.is_steady:
        squares.append((w_next - w).square())
    sizes = [x.flatten(1).mean(1) for x in squares] + [x.flatten(1).amax(1) for x in (unusual, steep)]
    logs = torch.stack(sizes, 1).double().clamp_min(TINY**2).log() / 2
    return torch.cat([logs, head.parameter_batch(parameters).standard.double()], 1)


def local(head: TaskHead, w_pred: Tensor) -> Tensor:
    """The factor of the band in every cell of a normalised forecast (batch, time, C, *space)."""
    square = slopes(w_pred, head.task.ndim).flatten(0, 1)
    for _ in range(2):
        square = (square + mean_of_neighbours(square, head.task.ndim)) / 2
    square = square.view_as(w_pred)
    mean = square.flatten(3).mean(3).view(*w_pred.shape[:3], *[1] * head.task.ndim)
    return ((square + FLAT * mean + TINY**2) / ((1 + FLAT) * mean + TINY**2)).sqrt()


def numbers_of(head: TaskHead, w: Tensor, parameters: Tensor, w_pred: Tensor, w_ref: Tensor) -> Tensor:
    """(rows, numbers), float64, of normalised rollouts: the RMS error; in every frame and field the largest
    error over `local`, and the one that LEVEL of the cells do not exceed; `features`."""
    error = w_pred - w_ref
    relative = (error.abs() / local(head, w_pred)).flatten(3).sort(3)[0].double()
    some = relative[..., math.ceil(LEVEL * relative.shape[3]) - 1]
    rms = error.double().square().flatten(1).mean(1, keepdim=True).sqrt()
    x = features(head, w, w_pred, parameters)
    return torch.cat([rms, relative[..., -1].flatten(1), some.flatten(1), x], 1)


@torch.no_grad()
def measured(
    operator: "Operator",
    cache: "Cache",
    rows: Tensor,
    context: int,
    device: torch.device,
    component: "Component",
) -> Tensor:
    """`numbers_of` rollouts of some rows by a component of the operator, as `squared_errors`."""
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context

    def numbers(batch: Tensor) -> Tensor:
        z = cache.inputs(batch, device) if head.task.is_steady else cache.batch(batch, 0, context, device)
        w, raw = head.input_codec.decode(z), cache.parameters[batch]
        forcing = head.forcing_of(cache, batch, context - 1, num_frames + 1)
        w_pred = operator.forecast(w, head.name, raw, num_frames, component, forcing)
        w_ref = head.codec.decode(cache.batch(batch, context, num_frames, device))
        return numbers_of(head, w, raw, w_pred, w_ref)

    return torch.cat([numbers(batch) for batch in cache.row_blocks(rows, cache.num_frames, len(rows))])


def calibrated(found: Tensor, groups: Tensor, num_fields: int, num_frames: int) -> Band | None:
    """The band of a task from `numbers_of` rollouts; None if they are too few or not finite. groups: of rows
    that start alike, which stay together."""
    is_first = (groups.unsqueeze(1) == groups.unique()).int().argmax(1) % 2 == 0
    if (
        len(found) < MIN_ROWS
        or not bool(found.isfinite().all())
        or not 0 < int((~is_first).sum()) < len(found)
    ):
        return None
    size = num_frames * num_fields
    rms, most, some, x = found.split([1, size, size, found.shape[1] - 1 - 2 * size], 1)
    mean, std = x[is_first].mean(0), x[is_first].std(0, correction=0).clamp_min(0.01)
    z, log_rms = (x - mean) / std, rms[:, 0].clamp_min(TINY).log()
    one, center = z[is_first], log_rms[is_first].mean()
    damping = RIDGE * len(one) * torch.eye(one.shape[1]).to(one)
    weights = torch.linalg.solve(one.mT @ one + damping, one.mT @ (log_rms[is_first] - center))
    s = (center + z @ weights).exp()[:, None]
    profile = (most[is_first] / s[is_first]).square().mean(0).sqrt().clamp_min(TINY)

    def reached(numbers: Tensor, level: float) -> float:
        """The number that a new one of the second half's law does not exceed, with probability `level`."""
        ordered = numbers[~is_first].sort()[0]
        return float(ordered[min(len(ordered), math.ceil((len(ordered) + 1) * level)) - 1])

    return Band(
        mean=mean.tolist(),
        std=std.tolist(),
        low=x.amin(0).tolist(),
        high=x.amax(0).tolist(),
        weights=weights.tolist(),
        center=float(center),
        profile=profile.view(num_frames, num_fields).tolist(),
        width=reached((most / s / profile).amax(1), LEVEL),
        cell_width=reached((some / s / profile).amax(1), LEVEL),
        distance=reached(z.abs().amax(1), ALARM),
        error=float(s.amax()),
    )
