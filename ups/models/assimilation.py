"""Estimate the start of a forecast from several noisy frames, by strong-constraint 4D-Var with the base.

    minimise over w_0   sum over frames k of |(M_k(w_0) - w_k) / sigma|^2

w_k are the normalised frames of a window, M_k the base's frame k after the start w_0 (the first `history`
frames), sigma the standard deviation of the white noise of measurement. Gauss-Newton steps, each by conjugate
gradients with the tangent (by a difference) and the adjoint of the base (Courtier, Thepaut and Hollingsworth
1994, doi 10.1002/qj.49712051912). There is no background term: the frames determine the start. Perturbed
frames give an ensemble of starts with the covariance of the estimate's error.

A base that can estimate its start is selected with it, if validation forecasts are then better
(ups/select.py).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ups.models.bases.base import ParameterBatch
from ups.models.head import TaskHead
from ups.models.rollout import member_noise

NUM_STEPS, NUM_GRADIENTS = 2, 5  # Gauss-Newton steps, and conjugate gradients in each: more change nothing
DIFFERENCE = 1e-3  # RMS of the change, in normalised fields, whose difference is the tangent
# values of a frame: of rows that are estimated together, and at most of one (0.5 and 1 GB for 8 sub-steps)
MAX_VALUES, MAX_ROW_VALUES = 2**15, 2**16
QUIET_FIELD = 0.1  # of the loudest field's noise: sigma of a field without noise


def noise_scale(head: TaskHead) -> Tensor:
    """The standard deviation of the noise in normalised fields, (C, 1, ..)."""
    noise = head.facts.noise
    sigma = torch.tensor([noise.get(name, 0.0) for name in head.codec.fields]).to(head.codec.std)
    sigma = sigma / head.codec.std
    return sigma.clamp_min(QUIET_FIELD * float(sigma.max())).view(-1, *[1] * head.task.ndim)


def perturbed(head: TaskHead, w: Tensor, seed: int, names: Sequence[int | str], num_members: int) -> Tensor:
    """Normalised frames w (batch, time, C, *space) with fresh noise of measurement, (batch, num_members,
    time, C, *space). names: of the rows, as in `member_noise`."""
    noise = member_noise(w.shape[1:], seed, names, 0, num_members, "start").to(w)
    return w[:, None] + head.codec.masked(noise_scale(head) * noise)


def trajectory(head: TaskHead, start: Tensor, parameters: ParameterBatch, num_frames: int) -> Tensor:
    """The base's frames (batch, num_frames, C, *space), normalised, of which the first are start (batch,
    history, C, *space)."""
    return torch.cat([start, head.base_frames(start, parameters, num_frames - head.history)], 1)


def conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor, num_steps: int) -> Tensor:
    """The solution x of apply(x) = right, a positive definite system per row."""

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).flatten(1).sum(1).view(-1, *[1] * (a.ndim - 1))

    x, r, p, size = torch.zeros_like(right), right, right, dot(right, right)
    for _ in range(num_steps):
        q = apply(p)
        step = size / dot(p, q).clamp_min(1e-30)
        x, r, before = x + step * p, r - step * q, size
        size = dot(r, r)
        p = r + size / before.clamp_min(1e-30) * p
    return x


def estimated(head: TaskHead, w: Tensor, raw: Tensor) -> Tensor:
    """The last `history` frames of w (batch, time, C, *space), normalised, replaced by those of the base's
    trajectory that fits all frames best. raw: parameters (batch, P). Rows in which no trajectory fits better
    than the one from the first frames stay as they are."""
    each = max(1, MAX_VALUES // w[0, 0].numel())
    return torch.cat([_estimated(head, *some) for some in zip(w.split(each), raw.split(each), strict=True)])


@torch.no_grad()
def _estimated(head: TaskHead, w: Tensor, raw: Tensor) -> Tensor:
    sigma, history, parameters = noise_scale(head), head.history, head.parameter_batch(raw)
    fit = partial(trajectory, head, parameters=parameters, num_frames=w.shape[1])

    def misfit(states: Tensor) -> Tensor:
        return ((states - w) / sigma).square().flatten(1).sum(1)

    def adjoint(change: Tensor) -> Tensor:
        return sigma * torch.autograd.grad(states, start, change / sigma**2, retain_graph=True)[0]

    def curvature(v: Tensor) -> Tensor:
        size = DIFFERENCE / (sigma * v).square().flatten(1).mean(1).sqrt().clamp_min(1e-30)
        size = size.view(-1, *[1] * (v.ndim - 1))
        return adjoint((fit(start + size * sigma * v) - states) / size)

    start = w[:, :history]
    first = misfit(fit(start))
    for _ in range(NUM_STEPS):
        start = start.clone().requires_grad_()
        with torch.enable_grad():
            states = fit(start)
        start = start + sigma * conjugate_gradients(curvature, adjoint(w - states), NUM_GRADIENTS)
    states = fit(start)
    is_better = (misfit(states) < first).view(-1, *[1] * (w.ndim - 1))  # NaN is not
    return torch.where(is_better, states[:, -history:], w[:, -history:])


def with_estimated_start(head: TaskHead, w: Tensor, raw: Tensor) -> Tensor:
    """Normalised input frames w (batch, time, C, *space): the estimated last ones, if the head estimates its
    start and there are more frames than its history; else w. raw: parameters (batch, P)."""
    num_frames = min(w.shape[1], head.start_frames)
    if num_frames <= head.history:
        return w
    return head.codec.projected(estimated(head, w[:, -num_frames:], raw))


def can_estimate(head: TaskHead, context: int) -> bool:
    """Whether a start may be estimated from `context` frames. Not for logarithms, whose noise is not white,
    with forcing, whose past a forecast does not know, or for large frames, which take too long."""
    return (
        has_white_noise(head)
        and context > head.history
        and head.base.has_tangent
        and head.codec.num_channels * math.prod(head.codec.space) <= MAX_ROW_VALUES
    )


def has_white_noise(head: TaskHead) -> bool:
    """Whether frames have noise of measurement whose effect on forecasts can be computed."""
    task = head.task
    return bool(head.facts.noise) and not (task.is_steady or task.positive or task.forcing)
