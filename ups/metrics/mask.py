"""Cells without a value, such as land in a field of the sea: NaN in the truth, in the same cells of every
trajectory and frame. Every score is over the other cells alone.

Axes: u (..., C, *space); known (C, *space), True where fields have a value, None where they have everywhere.
"""

import torch
from torch import Tensor


def known_cells(u_ref: Tensor) -> Tensor | None:
    """Where a truth (n, T, C, *space) has a value in some trajectory and frame; None where it has
    everywhere."""
    is_missing = u_ref.isnan()
    return ~is_missing.all(1).all(0) if bool(is_missing.any()) else None


def filled(u: Tensor, known: Tensor | None, value: float = 0.0) -> Tensor:
    """u (..., C, *space) with `value` where nothing is known."""
    return u if known is None else torch.where(known.to(u.device), u, value)


def fraction(known: Tensor | None) -> Tensor | float:
    """Of the cells, those with a value: (C,), at least one cell; 1 where all have."""
    return 1.0 if known is None else known.flatten(1).double().sum(1).clamp_min(1) / known[0].numel()


def cell_mean(x: Tensor, known: Tensor | None) -> Tensor:
    """Mean over the known cells of x (n, T, C, *space) -> (n, T, C)."""
    axes = tuple(range(3, x.ndim))
    return x.mean(axes) if known is None else filled(x, known).mean(axes) / fraction(known).to(x)
