"""Noise of measurement in the fields of a task, and the films that it is looked for in."""

import math

import numpy as np

from ups.common.rows import joined
from ups.userdata.trajectories import Trajectories
from ups_discovery.noise import MOST_VALUES, noise_by_field

NUM_FILMS, MIN_FRAMES = 8, 16  # most trajectories, and fewest frames of long ones


def window_places(source: Trajectories) -> np.ndarray | None:
    """The run and the first frame (n, 2) of every trajectory, if they are windows of runs, else None."""
    if not source.is_cut or source.time_stride > 1:
        return None
    _, run = np.unique(source.rows[:, :2], axis=0, return_inverse=True)
    return np.stack([run.ravel(), source.rows[:, 2]], 1)


def noise_of(source: Trajectories, rows: np.ndarray) -> dict[str, float]:
    """Field -> standard deviation of its white noise in some of these trajectories; {} for a steady task.
    Windows of a run are joined."""
    task, places, most = source.task, window_places(source), MOST_VALUES // math.prod(source.space)
    if task.is_steady:
        return {}
    if places is None:
        frames = range(min(source.num_frames, max(MIN_FRAMES, most)))
        some = np.unique(np.linspace(0, len(rows) - 1, NUM_FILMS).astype(int))
        u = np.concatenate([source.read(row, row + 1, frames) for row in rows[some].tolist()])
    else:
        longest = max(joined(places[rows], source.num_frames), key=len)
        longest = rows[longest][: max(1, most // source.num_frames)]
        side_by_side = np.split(longest, np.flatnonzero(np.diff(longest) != 1) + 1)  # each opens a file once
        u = np.concatenate([source.read(int(some[0]), int(some[-1]) + 1) for some in side_by_side])
        u = u.reshape(1, -1, *u.shape[2:])
    state = slice(len(task.inputs), len(task.inputs) + len(task.moving))
    return noise_by_field(u[:, :, state], task.moving, None if source.mask is None else source.mask[state])
