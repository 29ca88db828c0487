"""Cells of the user's fields that have no value. In the same cells of every frame they are a mask, such as
land; in a few frames they are gaps, and the frames are refused or, by the key skip_missing, left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ups.boundary import PERIODIC, along
from ups.config.shown import wrong

LOOKED_AT = 8     # trajectories in which a mask is sought, spread over all of them


def find_mask(data: Any) -> np.ndarray | None:
    """The cells (channels, *space) that have no value in any of some frames of trajectories spread over the
    data; None if every cell has one. Raises ValueError for a symmetry that moves the mask."""
    rows = np.unique(np.linspace(0, data.num_trajectories - 1, LOOKED_AT).astype(int))
    mask = None
    for row in rows.tolist():
        for frame in sorted({0, data.num_frames // 2, data.num_frames - 1}):
            is_missing = np.isnan(data.read(row, row + 1, range(frame, frame + 1))[0, 0])
            mask = is_missing if mask is None else mask & is_missing
            if not mask.any():
                return None
    task = data.task
    axes = {name: number - task.ndim for number, name in enumerate(task.axes)}
    shifted = [axis for axis, end in zip(task.axes, along(task.boundary, task.ndim), strict=True)
               if task.is_shifted and end == PERIODIC and axis not in task.fixed_axes]
    images = [("shift", np.roll(mask, 1, axes[axis])) for axis in shifted]
    images += [("mirror", np.flip(mask, axis)) for axis in axes.values() if task.is_symmetric]
    if moved := [name for name, image in images if not np.array_equal(image, mask)]:
        raise wrong(f"task.{task.name}.symmetries", f"it names {moved[0]}, and cells of {data.path} have no value "
                    "in any frame (land, a solid)", "symmetries that leave these cells where they are",
                    f"Leave {moved[0]} out of it.")
    return mask


def is_wrong(u: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Where u (n, T, channels, *space) has no number, or one in a cell of the mask."""
    return ~np.isfinite(u) if mask is None else np.where(mask, ~np.isnan(u), ~np.isfinite(u))


def settled(u: np.ndarray) -> np.ndarray:
    """u (..., cells) with the first number of its row in place of every NaN: what is equal in all cells that
    have a value stays so."""
    is_missing = np.isnan(u)
    if not is_missing.any():
        return u
    first = np.take_along_axis(u, (~is_missing).argmax(-1)[..., None], -1)
    return np.where(is_missing, np.nan_to_num(first), u)


def averaged(u: np.ndarray, ndim: int) -> np.ndarray:
    """u (..., *space) with the mean of its frame in place of every NaN."""
    is_missing = np.isnan(u)
    if not is_missing.any():
        return u
    axes = tuple(range(-ndim, 0))
    count = np.maximum(1, (~is_missing).sum(axes, keepdims=True))
    mean = np.where(is_missing, 0, u).sum(axes, keepdims=True, dtype=np.float64) / count
    return np.where(is_missing, mean, u).astype(u.dtype)


def mask_words(mask: np.ndarray | None, channels: Sequence[str]) -> Iterator[str]:
    """Of each channel with a mask, in words, which share of its cells that is."""
    for name, cells in zip(channels, mask if mask is not None else (), strict=mask is not None):
        if cells.any():
            yield f"{name}: {cells.mean():.0%} of its cells are a mask, the same in all frames"
