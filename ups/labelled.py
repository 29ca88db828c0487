"""Fields with names: xarray in and out of a forecast, for those who have it installed. Nothing else here
needs it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ups.tasks import Task

CLOSE = 1e-3   # relative: published coordinates are float32, and some are off by a rounding of their own


def is_labelled(u: Any) -> bool:
    """Whether u is an xarray DataArray or Dataset. Who has one has imported xarray."""
    xarray = sys.modules.get("xarray")
    return xarray is not None and isinstance(u, (xarray.DataArray, xarray.Dataset))


def unlabel(u: Any, task: Task, fields: tuple[str, ...], dt: float) -> np.ndarray:
    """u as ([batch,] [time,] C, *space): a Dataset with a variable per field, or a DataArray with a dimension
    "channel".

    Dimensions are found by name: the task's axes, "time", "channel" (not needed of a single field), and one
    other at most, the batch. Raises ValueError, by name, for what is missing and for coordinates of another
    domain or time step.
    """
    if hasattr(u, "data_vars"):
        if missing := [name for name in fields if name not in u]:
            raise ValueError(f"{task.name} was given variables {', '.join(map(str, u.data_vars))}; expected "
                             f"{', '.join(fields)}, as it was trained: {', '.join(missing)} missing. Rename "
                             "or add them.")
        u = u[list(fields)].to_array("channel")
    elif "channel" not in u.dims:
        u = u.expand_dims("channel")
    elif "channel" in u.coords and set(fields) <= set(u["channel"].values.tolist()):
        u = u.sel(channel=list(fields))
    others = [name for name in u.dims if name not in (*task.axes, "time", "channel")]
    if len(others) > 1 or (missing := [axis for axis in task.axes if axis not in u.dims]):
        raise ValueError(f"{task.name} was given dimensions {', '.join(map(str, u.dims))}; expected "
                         f"{', '.join(task.axes)}, and besides time and channel one more at most, the batch. "
                         "Rename or select them.")
    low, high = task.domain
    wanted = {axis: (high - low) / u.sizes[axis] for axis in task.axes} | ({"time": dt} if dt else {})
    for name, step in wanted.items():
        found = np.diff(u[name].values.astype(float)) if name in u.coords and name in u.dims else np.empty(0)
        if found.size and np.abs(found - step).max() > CLOSE * step * max(1, u.sizes[name] / 100):
            raise ValueError(f"{task.name} was given the coordinate {name} with steps of {found.min():g} to "
                             f"{found.max():g}; expected {step:g}, as it was trained on [{low:g}, {high:g}]. "
                             "Put the field on such cells, or mend it.")
    return u.transpose(*others, *[name for name in ("time",) if name in u.dims], "channel", *task.axes).values


def label(values: np.ndarray, like: Any, task: Task, axes: tuple[str, ...], dt: float) -> Any:
    """An answer ([batch,] *axes, C, *space) to the labelled field `like`, with its coordinates; axes: such as
    member and time."""
    import xarray

    others = [name for name in like.dims if name not in (*task.axes, "time", "channel")]
    dims = (*others, *axes, "channel", *task.axes)
    coordinates = {name: like[name] for name in (*others, *task.axes) if name in like.coords}
    sizes = dict(zip(dims, values.shape, strict=True))
    if "time" in axes:
        last = float(like["time"].values.reshape(-1)[-1]) if "time" in like.coords else 0.0
        coordinates["time"] = last + dt * np.arange(1, sizes["time"] + 1)
    coordinates |= {"channel": list(task.fields)} | ({"member": np.arange(sizes["member"])}
                                                     if "member" in axes else {})
    out = xarray.DataArray(values, coordinates, dims, attrs={"task": task.name})
    if hasattr(like, "data_vars"):
        return out.to_dataset("channel").assign_attrs(like.attrs | {"task": task.name})
    return out if "channel" in like.dims else out.isel(channel=0, drop=True).rename(task.fields[0])
