"""What an equation keeps, put right in a prediction: the means of its conserved channels, and whatever else a
task says of itself (`Task.restore`).

Every correction is a number per frame and channel, added to the whole channel, or to its logarithm where it
is positive: a projection that leaves a right answer as it is, makes nothing negative, and is differentiable.
"""

import torch
from torch import Tensor

from ups.tasks import Task


def correction(task: Task, u: Tensor, u_start: Tensor) -> Tensor:
    """What to add to each channel of u (batch, T, C, *space), to the logarithm of a positive one, so that it
    has what the equation keeps of u_start (batch, C, *space): (batch, T, C). Physical units."""
    u_start = u_start[:, None]
    if task.restore is not None:
        return task.restore(u, u_start)
    space = tuple(range(3, u.ndim))
    now, then = u.mean(space), u_start.mean(space).expand(u.shape[:3])
    parts = [torch.zeros_like(a) if name not in task.conserved else
             b.log() - a.log() if name in task.positive else b - a
             for name, a, b in zip(task.fields, now.unbind(2), then.unbind(2), strict=True)]
    return torch.stack(parts, 2)


def conserve(task: Task, u: Tensor, u_start: Tensor) -> Tensor:
    """u (batch, T, C, *space) corrected to what the equation keeps of u_start (batch, C, *space), its start;
    a task with a maximum principle is clipped to the start's range besides. Physical units."""
    change = correction(task, u, u_start)[(...,) + (None,) * task.ndim]
    u = torch.stack([part * step.exp() if name in task.positive else part + step for name, part, step in
                     zip(task.fields, u.unbind(2), change.unbind(2), strict=True)], 2)
    if task.is_bounded:
        space, u_start = tuple(range(3, u.ndim)), u_start[:, None]
        u = torch.minimum(torch.maximum(u, u_start.amin(space, keepdim=True)),
                          u_start.amax(space, keepdim=True))
    return u
