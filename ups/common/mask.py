"""Masks of cells without a value, such as land in a field of the sea. The truth is NaN there, in every
trajectory and frame. Scores use the other cells only.

Axes: u (..., C, *space); valid (C, *space), True at cells with a value; None if all have one.
"""

import torch
from torch import Tensor


def valid_cells(u_ref: Tensor) -> Tensor | None:
    """The cells of a truth (n, T, C, *space) with a value in some trajectory and frame; None if all have
    one."""
    is_missing = u_ref.isnan()
    return ~is_missing.all(1).all(0) if bool(is_missing.any()) else None


def filled(u: Tensor, valid: Tensor | None, value: float = 0.0) -> Tensor:
    """u (..., C, *space) with `value` outside the valid cells."""
    return u if valid is None else torch.where(valid.to(u.device), u, value)


def fraction(valid: Tensor | None) -> Tensor | float:
    """Fraction of valid cells (C,), counting at least one; 1 without a mask."""
    return 1.0 if valid is None else valid.flatten(1).double().sum(1).clamp_min(1) / valid[0].numel()


def cell_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean over the valid cells of x (n, T, C, *space) -> (n, T, C)."""
    axes = tuple(range(3, x.ndim))
    return x.mean(axes) if valid is None else filled(x, valid).mean(axes) / fraction(valid).to(x)
