"""Forecasts of a user's task as HDF5: an array (trajectory, time, *space) for every field, with coordinates.
xarray opens such a file, and `open_input` reads it as the start of a further forecast."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.tasks import Task

MARK = "ups_forecast"  # attribute of a file of forecasts


def _axes(task: Task, name: str) -> list[str]:
    """The axes of the array of a field."""
    is_constant = task.is_steady or name in task.still
    return ["trajectory", *["time"] * (not is_constant), *(task.axes if name not in task.series else ())]


def forecast_facts(task: Task) -> dict[str, Any]:
    """The facts of a task (`ups.tasks.make_user_task`) whose files are those of `write_user_file`."""
    return {
        **task.user_facts,
        "arrays": [{"array": name, "axes": _axes(task, name), "fields": [name]} for name in task.channels],
        "parameters": {name: f"parameters/{name}" for name in task.parameters},
        "times": "" if task.is_steady else "time",
        **{"coordinates": {}, "flipped": [], "repeated": [], "missing": []},
    }


def write_user_file(
    path: Path,
    task: Task,
    fields: Callable[[np.ndarray], np.ndarray],
    num: int,
    space: Sequence[int],
    *,
    chunk: int,
    times: np.ndarray,
    parameters: np.ndarray,
) -> None:
    """Write `num` trajectories, `chunk` at a time: fields(indices) -> (n, frames, channels, *space).

    times (frames,); parameters (num, P).
    """
    coordinates = {"trajectory": np.arange(num), "time": times} | {
        axis: np.array(task.centres(size, axis)) for axis, size in zip(task.axes, space, strict=True)
    }
    with h5py.File(path, "w", locking=False) as file:
        file.attrs[MARK] = task.name
        for axis, values in coordinates.items():
            file[axis] = values
            file[axis].make_scale(axis)
        for name, values in zip(task.parameters, parameters.T, strict=True):
            file[f"parameters/{name}"] = values
        for first in range(0, num, chunk):
            u = fields(np.arange(first, min(first + chunk, num)))
            for channel, name in enumerate(task.channels):
                axes = _axes(task, name)
                values = u[:, :, channel] if "time" in axes else u[:, 0, channel]
                values = values if name not in task.series else values[(..., *[0] * task.ndim)]
                stored = file.require_dataset(name, (num, *values.shape[1:]), u.dtype)
                stored[first : first + len(u)] = values
                for dim, axis in zip(stored.dims, axes, strict=True) if not first else ():
                    dim.attach_scale(file[axis])
