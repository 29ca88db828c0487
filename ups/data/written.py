"""Detection of numbers that were never written: the zeros that an array holds where a simulation stopped. The
size of a file does not show them.

A field may be zero for good reasons: a fluid at rest, a decayed state, a pulse that has left. It gets there
by frames that are smaller and smaller. Zeros right behind a frame as large as most were never written.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ups.tasks import Task
from ups.userdata.masks import settled

USUAL = 0.9  # of the median RMS of frames; a frame before zeros that is smaller belongs to a field that fades
Block = tuple[np.ndarray, range, np.ndarray]  # rows, frames, values


def frame_sizes(task: Task, u: np.ndarray) -> np.ndarray:
    """The RMS (time, field) of the stored numbers of the predicted fields; 0 where all are zero. u (time,
    channel, *space)."""
    first = len(task.inputs)
    u = settled(u[:, first : first + len(task.moving)].reshape(len(u), len(task.moving), -1))
    zeros = np.float32([-task.offsets.get(name, 0.0) + 0.0 for name in task.moving])
    return np.sqrt(np.square(u - zeros[:, None], dtype=np.float64).mean(-1))


def unwritten(source: Any, sizes: np.ndarray) -> str:
    """What was never written in a trajectory of these `frame_sizes`, in words; "" if nothing."""
    if not sizes.any():
        return "nothing but zeros"
    for name, size in zip(source.task.moving, sizes.T, strict=True):
        is_zero = size == 0
        usual = USUAL * np.median(size[~is_zero]) if not is_zero.all() else 0.0
        frames = np.flatnonzero(is_zero[1:] & ~is_zero[:-1] & (size[:-1] >= usual)) + 1
        if len(frames):
            stored = source.first_frame + int(frames[0]) * source.time_stride
            return f"{name} = 0 in every cell of frame {stored} and not before"
    return ""


def written(source: Any, stream: Iterable[Block]) -> Iterator[Block]:
    """The blocks of `stream`, which are all trajectories of `source`, checked. Raises ValueError for numbers
    that were never written."""
    sizes: list[np.ndarray] = []  # of a trajectory that comes in several blocks
    for index, frames, u in stream:
        for row, values in zip(index.tolist(), u, strict=True):
            sizes = [*(sizes if frames.start else ()), frame_sizes(source.task, values)]
            is_last = frames.stop == source.num_frames
            if is_last and (problem := unwritten(source, np.concatenate(sizes))):
                path, place = source.place(row, 0)
                raise ValueError(
                    f"{path}: {place.partition(',')[0]} holds {problem}; expected a simulated field: "
                    "this was never written. Write it again, or leave it out of the file (the last frames or "
                    f"trajectories: task.{source.task.name}.num_frames or num_trajectories)."
                )
        yield index, frames, u
