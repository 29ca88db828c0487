"""What an equation keeps, put right in a prediction: the means of its conserved channels, and whatever else a
task says of itself (`Task.restore`); the range of bounded channels and the fields that are given.

Every correction is a number per frame and channel, added to the whole channel, or to its logarithm where it
is positive: a projection that leaves a right answer as it is, makes nothing negative, and is differentiable.
"""

import torch
from torch import Tensor

from ups.metrics.mask import filled
from ups.tasks import Task


def correction(task: Task, u: Tensor, u_start: Tensor, known: Tensor | None = None) -> Tensor:
    """What to add to each channel of u (batch, T, C, *space), to the logarithm of a positive one, so that it
    has what the equation keeps of u_start (batch, C, *space): (batch, T, C). Physical units. known (C,
    *space): where fields have a value, None: everywhere; elsewhere they are NaN."""
    u_start = u_start[:, None]
    if task.restore is not None:
        return task.restore(u, u_start)
    space = tuple(range(3, u.ndim))
    mean = torch.mean if known is None else torch.nanmean
    now, then = mean(u, space), mean(u_start, space).expand(u.shape[:3])
    parts = [
        torch.zeros_like(a)
        if name not in task.conserved
        else b.log() - a.log()
        if name in task.positive
        else b - a
        for name, a, b in zip(task.fields, now.unbind(2), then.unbind(2), strict=True)
    ]
    return torch.stack(parts, 2)


def clipped(task: Task, u: Tensor, u_start: Tensor, known: Tensor | None = None) -> Tensor:
    """u (batch, T, C, *space), its bounded channels clipped to their range in the known cells of u_start
    (batch, C, *space)."""
    if not task.bounded:
        return u
    space, u_start = tuple(range(3, u.ndim)), u_start[:, None]
    low, high = filled(u_start, known, torch.inf), filled(u_start, known, -torch.inf)
    inside = torch.minimum(torch.maximum(u, low.amin(space, keepdim=True)), high.amax(space, keepdim=True))
    is_bounded = torch.tensor([name in task.bounded for name in task.fields], device=u.device)
    return torch.where(is_bounded[(...,) + (None,) * task.ndim], inside, u)


def given(task: Task, u: Tensor, u_start: Tensor) -> Tensor:
    """u (batch, T, C, *space) with the still fields, which are facts, of u_start (batch, C, *space)."""
    if not task.still:
        return u
    facts = u_start[:, None, len(task.moving) :].expand(-1, u.shape[1], *[-1] * (1 + task.ndim))
    return torch.cat([u[:, :, : len(task.moving)], facts], 2)
