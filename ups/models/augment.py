"""Symmetries of an equation, drawn at random: more data than there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups.data.tokenizer import Tokenizer
from ups.tasks import Task


def symmetries(task: Task) -> bool:
    """Whether mirror images and axis swaps of a solution are solutions: scalar fields on a square without
    transport."""
    return (task.ndim >= 2 and task.boundary in (NO_FLUX, DIRICHLET)
            and not any(f.startswith("V") for f in task.fields))


def augment(task: Task, parts: Sequence[tuple[Tensor, Tokenizer]],
            generator: torch.Generator) -> list[Tensor]:
    """The same random symmetry of the equation applied to several latents: a shift if periodic, else one of
    the cube's.

    parts: (latents (batch, time, *tokens, dim), their codec). One symmetry per call; exact for a full-rank
    codec.
    """
    axes = list(range(-task.ndim, 0))
    out = []
    if task.boundary == PERIODIC:
        shifts = [int(torch.randint(0, n, (), generator=generator)) for n in parts[0][1].space]
        for z, codec in parts:
            out.append(codec.encode(torch.roll(codec.decode(z), shifts, axes)))
        return out
    if not symmetries(task):
        return [z for z, _ in parts]
    flips = [axis for axis in axes if bool(torch.randint(0, 2, (), generator=generator))]
    order = torch.randperm(task.ndim, generator=generator).tolist()
    for z, codec in parts:
        u = codec.decode(z).flip(flips) if flips else codec.decode(z)
        lead = list(range(u.ndim - task.ndim))
        out.append(codec.encode(u.permute(lead + [len(lead) + axis for axis in order])))
    return out
