"""Writing fields in the layout of a user's files, as HDF5: with the same names and axes, so that the result
can be read as the files are."""

from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np

from ups.tasks import Place, Task
from ups.userdata.times import NO_TIMES


def write_user_file(
    path: Path,
    task: Task,
    fields: Callable[[np.ndarray], np.ndarray],
    num: int,
    num_frames: int,
    space: Sequence[int],
    *,
    chunk: int,
    times: np.ndarray,
    parameters: np.ndarray,
) -> None:
    """Write `num` trajectories, `chunk` at a time: fields(indices) -> (n, num_frames, channels, *space).

    times (num_frames,) go where the task's files have theirs, parameters (num, P) where they have those.
    Raises ValueError where the declared arrays have no room for several trajectories.
    """
    is_grouped = any("*" in place.array for place in task.arrays)
    if num > 1 and not is_grouped and all("trajectory" not in place.axes for place in task.arrays):
        raise ValueError(
            f"{path.name} would hold {num} trajectories of {task.name}; expected one, as its "
            f"files hold one each. Give one row, such as --rows 0:1, without --members."
        )
    with h5py.File(path, "w", locking=False) as file:
        for axis, (low, high), size in zip(task.axes, task.spans, space, strict=True):
            if axis in task.user_facts.get("flipped", ()):  # else the file would not show that it is
                file[task.user_facts["coordinates"].get(axis) or axis] = (
                    high - (np.arange(size) + 0.5) * (high - low) / size
                )
        for first in range(0, num, chunk):
            indices = np.arange(first, min(first + chunk, num))
            u = fields(indices)
            for place in task.arrays:
                _store(file, task, place, u, indices, num, num_frames, space)
        groups = [f"{i:04d}" for i in range(num)] if is_grouped else [""]
        if "@" in task.user_facts["times"]:  # an attribute that holds the step
            place, _, attribute = task.user_facts["times"].partition("@")
            (file[place] if place else file).attrs[attribute] = np.diff(times[:2]).sum()
        elif task.user_facts["times"] not in ("", NO_TIMES) and not task.is_steady:
            inside = (
                [task.user_facts["times"]]
                if "/" in task.user_facts["times"] or not is_grouped
                else [f"{group}/{task.user_facts['times']}" for group in groups]
            )
            for name in inside:
                file[name] = times
        places = task.user_facts["parameters"].items()
        for (name, place), values in zip(places, parameters.T, strict=True):
            where = place if "{}" not in place and "*" not in place and "@" not in place else name
            if len(np.unique(values)) == 1 and "/" not in where:
                file.attrs[where] = values[0]
            else:
                file[where] = values


def _store(
    file: h5py.File,
    task: Task,
    place: Place,
    u: np.ndarray,
    indices: np.ndarray,
    num: int,
    num_frames: int,
    space: Sequence[int],
) -> None:
    """The fields of one array, of the trajectories `indices`, in the order of its stored axes."""
    inner = [axis for axis in place.axes if axis in ("channel", "component")]
    counts = [
        task.ndim if axis == "component" else len(place.fields) // task.ndim ** inner.count("component")
        for axis in inner
    ]
    block = u[:, :, [task.channels.index(field) for field in place.fields]]
    block = block.reshape(len(u), num_frames, *counts, *space)
    block = np.flip(
        block,
        [
            axis - task.ndim
            for axis, name in enumerate(task.axes)
            if name in task.user_facts.get("flipped", ())
        ],
    )
    closed = [(0, int(axis in task.user_facts.get("repeated", ()))) for axis in task.axes]
    block = np.pad(block, [(0, 0)] * (block.ndim - task.ndim) + closed, mode="wrap")
    have = ["trajectory", "time", *inner, *task.axes]
    lacking = [axis for axis, word in enumerate(have) if word not in place.axes]
    block = block[tuple(0 if axis in lacking and axis else slice(None) for axis in range(block.ndim))]
    have = [word for axis, word in enumerate(have) if axis not in lacking or not axis]
    num_single = place.axes.count("single")
    block, have = block.reshape(*block.shape, *[1] * num_single), have + ["single"] * num_single
    seen: dict[str, int] = {}  # of the two axes of a tensor the first stays first
    order = []
    for word in place.axes:
        at = [axis for axis, name in enumerate(have) if name == word]
        order.append(at[seen.setdefault(word, 0)])
        seen[word] += 1
    if "trajectory" in place.axes:
        shape = tuple(
            num if word == "trajectory" else block.shape[axis]
            for word, axis in zip(place.axes, order, strict=True)
        )
        stored = file.require_dataset(place.array, shape, block.dtype)
        rows = slice(indices[0], indices[-1] + 1)
        at = tuple(rows if word == "trajectory" else slice(None) for word in place.axes)
        stored[at] = block.transpose(order)
        return
    for index, values in zip(indices, block, strict=True):
        name = place.array.replace("*", f"{index:04d}")
        if name not in file:
            file[name] = values.transpose([axis - 1 for axis in order])
