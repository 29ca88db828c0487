"""Whether the grid of the user's own files resolves what happens on it, and what it costs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ups.common.boundary import PERIODIC, along
from ups.tasks import Finding
from ups.userdata.grid import patch_for

LOOKED_AT = 8  # trajectories
RESOLVED = 16  # cells of an axis from which a spectrum tells anything
CUT_OFF = 1e-3  # of the variance: Gray-Scott on 48 x 48 cells, which no model forecasts well, has 4e-3, on
# twice as fine a grid 1e-5; Burgers' shocks 7e-7 on 256 cells and 3e-3 on 64
TINY = np.finfo(np.float64).tiny
MOST_TOKENS = 2**14  # of a frame


def resolved(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the grid resolves what changes: the share of waves of two to three cells."""
    task, u = data.task, data.stratified_rows(LOOKED_AT)[1].astype(np.float64)
    u = u[:, :, len(task.inputs) :][:, :, : len(task.moving)]
    u = u - u.mean(0 if task.is_steady else 1, keepdims=True)
    for number, (axis, end) in enumerate(zip(task.axes, along(task.boundary, task.ndim), strict=True), 3):
        along_axis = np.moveaxis(u, number, -1)
        if end != PERIODIC:  # a mirror image behind the wall goes on without a jump
            along_axis = np.concatenate([along_axis, along_axis[..., ::-1]], -1)
        size = along_axis.shape[-1]
        power = np.square(np.abs(np.fft.rfft(along_axis)))[..., 1:]
        power = np.moveaxis(power, 2, 0).reshape(len(task.moving), -1, size // 2).mean(1)
        shares = power[:, math.ceil(size / 3) - 1 :].sum(1) / np.maximum(power.sum(1), TINY)
        worst = int(shares.argmax())
        if u.shape[number] >= RESOLVED and shares[worst] > CUT_OFF:
            over = "samples" if task.is_steady else "time"
            what = (
                f"waves of two to three cells along {axis} hold {shares[worst]:.1%} of the variance of "
                f"{task.moving[worst]} about its mean over {over}: the grid cuts its spectrum off, or "
                "the data are noisy"
            )
            yield Finding(
                "caution",
                what,
                str(data.path),
                "expect forecasts to miss that part and what "
                "comes of it; a finer grid, or smoother data, may be needed",
            )


def num_tokens(cells: Sequence[int]) -> int:
    """Of a frame, with the patch that is chosen for so many cells per axis."""
    return math.prod(n // patch_for(cells) for n in cells)


def affordable(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether a patch divides the grid, so that a frame is few tokens."""
    cells = list(data.space)
    tokens = num_tokens(cells)
    if tokens > MOST_TOKENS:
        key, shown = f"task.{data.task.name}", " x ".join(map(str, cells))
        fewer = [
            stride for stride in range(2, 9) if num_tokens([-(-n // stride) for n in cells]) <= MOST_TOKENS
        ]
        what = (
            f"no patch divides a grid of {shown} cells well, so a frame is {tokens:,} tokens, "
            f"{tokens / MOST_TOKENS:.0f} times as many as is usual, and training as much slower"
        )
        yield Finding(
            "caution",
            what,
            str(data.path),
            f"write {key}.space_stride: {fewer[0]} to take one cell in {fewer[0]} along each axis"
            if fewer
            else "cut the grid to numbers of cells with small divisors",
        )
