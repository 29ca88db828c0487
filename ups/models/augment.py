"""Symmetries of an equation, drawn at random: more data than there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ups.boundary import PERIODIC
from ups.data.tokenizer import Tokenizer
from ups.tasks import Task


def stay(u: Tensor) -> Tensor:
    """No symmetry."""
    return u


def symmetry(task: Task, space: Sequence[int], generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """A random symmetry of the equation, of fields (..., *space): a shift if periodic, else one of the
    cube's; `stay` where it has none."""
    axes = list(range(-task.ndim, 0))
    if task.boundary == PERIODIC:
        shifts = [int(torch.randint(0, n, (), generator=generator)) for n in space]
        return lambda u: torch.roll(u, shifts, axes)
    if not task.is_symmetric:
        return stay
    flips = [axis for axis in axes if bool(torch.randint(0, 2, (), generator=generator))]
    order = torch.randperm(task.ndim, generator=generator).tolist()

    def turn(u: Tensor) -> Tensor:
        lead = u.ndim - task.ndim
        return (u.flip(flips) if flips else u).permute(*range(lead), *[lead + axis for axis in order])

    return turn


def augment(task: Task, parts: Sequence[tuple[Tensor, Tokenizer]],
            generator: torch.Generator) -> list[Tensor]:
    """The same `symmetry` applied to several latents.

    parts: (latents (batch, time, *tokens, dim), their codec). One symmetry per call; exact for a full-rank
    codec.
    """
    move = symmetry(task, parts[0][1].space, generator)
    if move is stay:
        return [z for z, _ in parts]
    return [codec.encode(move(codec.decode(z))) for z, codec in parts]
