"""How far a prediction is from what the equation conserves: means of conserved channels, mass, energy and
momentum of a gas. ups/models/constraints.py restores them.

Each correction is one number per frame and channel, added to the whole channel, or to the logarithm of a
positive one. It is a differentiable projection: it does not change an exact prediction, and keeps positive
channels positive.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.tasks import Task

GAMMA = 5 / 3  # adiabatic index of PDEBench's gas
MIN_RESTORED = 0.5  # factor on a pressure: a larger error than this is not one of the energy alone


def correction(
    task: Task, conserved: Sequence[str], u: Tensor, u_start: Tensor, valid: Tensor | None = None
) -> Tensor:
    """What to add (batch, T, C) to each channel of u (batch, T, C, *space), or to the logarithm of a positive
    one, to restore the invariants of u_start (batch, C, *space): the means of the conserved fields, or those
    of the task. Physical units. valid (C, *space): the cells inside the domain (None: all); the others are
    NaN.
    """
    u_start = u_start[:, None]
    if task.is_gas and task.conserved:
        return gas_correction(u, u_start)
    space = tuple(range(3, u.ndim))
    mean = torch.mean if valid is None else torch.nanmean
    now, then = mean(u, space), mean(u_start, space).expand(u.shape[:3])
    changes = []
    for name, a, b in zip(task.fields, now.unbind(2), then.unbind(2), strict=True):
        if name not in conserved:
            changes.append(torch.zeros_like(a))
        else:
            changes.append(b.log() - a.log() if name in task.positive else b - a)
    return torch.stack(changes, 2)


def densities(task: Task, u: Tensor) -> Tensor:
    """Densities (n, T, K, *space) of u (n, T, C, *space) whose means over space the task conserves."""
    return gas_densities(u) if task.is_gas else u[:, :, [*map(task.fields.index, task.conserved)]]


def gas_densities(u: Tensor) -> Tensor:
    """(density, energy, momentum) of (density, pressure, velocity), (n, T, C, *space)."""
    density, pressure, velocity = u[:, :, :1], u[:, :, 1:2], u[:, :, 2:]
    square = sum(part * part for part in velocity.split(1, 2))
    return torch.cat([density, pressure / (GAMMA - 1) + 0.5 * density * square, density * velocity], 2)


def gas_correction(u: Tensor, u_start: Tensor) -> Tensor:
    """The correction (n, T, C) that gives u = (density, pressure, velocity), (n, T, C, *space), in a closed
    domain the mass, energy and momentum of u_start (n, 1, C, *space).

    It is added to the logarithms of density and pressure and to the velocity. The pressure changes by at most
    the factor MIN_RESTORED or its inverse.
    """
    space = tuple(range(3, u.ndim))
    every = (...,) + (None,) * len(space)
    mass, energy, momentum = gas_densities(u_start).mean(space).split([1, 1, u.shape[2] - 2], 2)
    density, pressure, velocity = u[:, :, :1], u[:, :, 1:2], u[:, :, 2:]
    thinner = mass / density.mean(space)
    density = density * thinner[every]
    faster = (momentum - (density * velocity).mean(space)) / mass
    motion = 0.5 * (density * (velocity + faster[every]).square()).sum(2, keepdim=True).mean(space)
    hotter = (GAMMA - 1) * (energy - motion) / pressure.mean(space)
    return torch.cat([thinner.log(), hotter.clamp(MIN_RESTORED, 1 / MIN_RESTORED).log(), faster], 2)
