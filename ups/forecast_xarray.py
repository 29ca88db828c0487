"""Fields of a user as plain tensors and back: any numbers; xarray's names, coordinates, dates."""

import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.common.device import refuse_gradient
from ups.tasks import Task
from ups_discovery.boundary import PERIODIC, along

AXIS_TOLERANCE = 1e-3  # relative tolerance of coordinates: published ones are float32 and often rounded
STEP = "step_seconds"  # attribute of a coordinate of dates: the time step, which one date does not have
Field = Any  # numpy.ndarray, torch.Tensor, xarray.DataArray, xarray.Dataset, or nested lists of numbers


def as_tensor(u: Any, name: str) -> Tensor:
    """Real numbers of any kind as a float tensor: float64 if the kind is wider than float32, else float32.
    Masked values become NaN. Raises ValueError, with `name`, for anything else, also for a list of tensors
    that require a gradient, and for several axes with names, which would be taken in their order."""
    if isinstance(u, Tensor):
        if u.is_complex() or u.is_quantized or u.is_meta or u.layout != torch.strided:
            wrong = u.layout if u.layout != torch.strided else u.device if u.is_meta else u.dtype
            raise _not_numbers(name, str(wrong))
        return u.to(torch.promote_types(u.dtype, torch.float32))
    if hasattr(u, "dims") and len(u.dims) > 1:
        raise ValueError(
            f"{name} was given the dimensions {', '.join(map(str, u.dims))}; expected them without names. "
            "Pass its values, transposed to the task's axes, in the order of the training data."
        )
    with torch.enable_grad():  # in which torch refuses to lose a gradient
        try:
            values = np.asanyarray(u)
        except RuntimeError:
            refuse_gradient(name, "a list of tensors loses it (torch.stack keeps it)", u)
            raise
        except ValueError:
            raise _not_numbers(name, "lists of unequal lengths") from None
    if values.dtype.kind not in "biuf":
        raise _not_numbers(name, f"an array of {values.dtype}" if values.ndim else f"{u!r:.40}")
    kind = np.promote_types(values.dtype.newbyteorder("="), np.float32)
    kind = np.float64 if kind == np.longdouble else kind
    if isinstance(values, np.ma.MaskedArray):
        values = values.astype(kind).filled(np.nan)
    return torch.from_numpy(np.array(values, kind, order="C"))


def _not_numbers(name: str, found: str) -> ValueError:
    return ValueError(
        f"{name} was given {found}; expected one array of real numbers. Convert it, for "
        "example with numpy.asarray(u, dtype='float32')."
    )


def unlabel(
    u: Any, task: Task, fields: tuple[str, ...], dt: float, axes: tuple[str, ...]
) -> tuple[np.ndarray, list[str]]:
    """(u as (batch, time, C, *space), name of the batch dimension as a list of none or one).

    u: a Dataset with a variable per field, or a DataArray with a dimension "channel" (optional for a single
    field). Dimensions are found by name: the task's axes, "time", "channel", and one other at most, the
    batch. Without batch or time that axis has length 1. axes: of the result, such as member and time. Raises
    ValueError, by name, for missing fields or axes and for coordinates of another domain or time step.
    """
    if hasattr(u, "data_vars"):
        if missing := [name for name in fields if name not in u]:
            raise ValueError(
                f"{task.name} was given variables {', '.join(map(str, u.data_vars))}; expected "
                f"{', '.join(fields)}, as it was trained: {', '.join(missing)} missing. Rename or add them."
            )
        for name in fields:
            _check_unit(u[name], name, task)
        u = u[list(fields)].to_array("channel")
    elif "channel" not in u.dims:
        u = u.expand_dims("channel")
    elif "channel" in u.coords and u["channel"].dtype.kind in "OUST":
        names = [*map(str, u["channel"].values)]
        if any(names.count(name) != 1 for name in fields):
            raise ValueError(
                f"{task.name} was given the channels {', '.join(names):.200}; expected {', '.join(fields)}, "
                "each once. Rename them, or drop their names if they are in this order."
            )
        u = u.isel(channel=[names.index(name) for name in fields])
    if len(fields) == 1:
        _check_unit(u, fields[0], task)
    batch = [name for name in u.dims if name not in (*task.axes, "time", "channel")]
    if len(batch) > 1 or not set(task.axes) <= set(u.dims) or 0 in u.shape:
        raise ValueError(
            f"{task.name} was given dimensions {', '.join(map(str, u.dims))} of {u.shape}; expected "
            f"{', '.join(task.axes)}, and besides time and channel one more at most, the batch. "
            "Rename or select them."
        )
    if {*batch} & {*axes}:
        raise ValueError(
            f"{task.name} was given a batch along the dimension {batch[0]}, a name that the "
            "forecast needs; expected another name. Rename it, for example to 'run'."
        )
    u = _regular(u, task, task.axes, dt)
    for name in ("time", *([] if batch else ["batch"])):
        u = u if name in u.dims else u.drop_vars(name, errors="ignore").expand_dims(name)
    return u.transpose(*(batch or ["batch"]), "time", "channel", *task.axes).values, batch


def unlabel_forcing(values: Any, name: str, task: Task, dt: float, u0: Any) -> np.ndarray:
    """A labelled forcing as ([batch,] time, *space), or ([batch,] time) for a series.

    u0: the start; if both have times, the forcing must begin at its last frame. Raises ValueError, by name.
    """
    _check_unit(values, name, task)
    axes = () if name in task.series else task.axes
    batch = [dim for dim in values.dims if dim not in (*axes, "time")]
    if len(batch) > 1 or not {"time", *axes} <= {*values.dims}:
        raise ValueError(
            f"{task.name} was given forcing {name} with dimensions {', '.join(map(str, values.dims))}; "
            f"expected {', '.join(('time', *axes))}, and one more at most, the batch. Rename or select them."
        )
    values = _regular(values, task, axes, dt)
    both = [
        one["time"].values.reshape(-1)
        for one in (u0, values)
        if hasattr(one, "coords") and "time" in one.coords
    ]
    if len(both) == 2 and len({_is_dates(times) for times in both}) == 1:
        last, first = both[0][-1], both[1][0]
        is_same = last == first if _is_dates(both[0]) else abs(float(first - last)) <= AXIS_TOLERANCE * dt
        if not is_same:
            raise ValueError(
                f"{task.name} was given forcing {name} from {first} on; expected it from {last} "
                "on, the last frame of the start. Select those frames."
            )
    return values.transpose(*batch, "time", *axes).values


def _check_unit(u: Any, name: str, task: Task) -> None:
    """Raise ValueError if a labelled field states another unit than the weights."""
    found, known = u.attrs.get("units"), task.units.get(name)
    if found and known and str(found).split() != known.split():
        raise ValueError(
            f"{task.name} was given {name} in {found!r:.80}; expected {known!r}, as it was trained. Convert "
            "it, or correct its attribute units if that is the same unit."
        )


def _regular(u: Any, task: Task, axes: tuple[str, ...], dt: float) -> Any:
    """A labelled field with ascending coordinates along `axes`. Raises ValueError unless they, and its times
    if dt is not 0, have the task's steps, and coordinates its place where an equation may depend on it."""
    u = u.isel({axis: slice(None, None, -1) for axis in _descending(u, task)})
    spans = dict(zip(task.axes, task.spans, strict=True))
    steps = {axis: (spans[axis][1] - spans[axis][0]) / u.sizes[axis] for axis in axes}
    for name, step in (steps | ({"time": dt} if dt else {})).items():
        if name in u.coords:
            _check_steps(u[name].values.reshape(-1), name, step, task)
    ends = dict(zip(task.axes, along(task.boundary, task.ndim), strict=True))
    for axis in axes:
        is_free = ends[axis] == PERIODIC and task.is_shifted and axis not in task.fixed_axes
        if is_free or axis not in u.coords or u[axis].dtype.kind not in "iuf":
            continue
        first, wanted = float(u[axis].values.reshape(-1)[0]), spans[axis][0] + steps[axis] / 2
        if abs(first - wanted) > steps[axis]:
            raise ValueError(
                f"{task.name} was given the coordinate {axis} from {first:g} on; expected it from {wanted:g} "
                "on, as it was trained. Select those cells, or correct it."
            )
    return u


def _descending(u: Any, task: Task) -> list[str]:
    """The axes of a labelled field with descending coordinates."""
    return [
        axis
        for axis in task.axes
        if axis in u.dims
        and axis in u.coords
        and u[axis].dtype.kind in "iuf"
        and u.sizes[axis] > 1
        and (np.diff(u[axis].values) < 0).all()
    ]


def _check_steps(values: np.ndarray, name: str, step: float, task: Task) -> None:
    """Raise ValueError unless coordinates are `step` apart; dates, for which tasks have no unit, must be
    equidistant."""
    if not (_is_dates(values) or values.dtype.kind in "iuf"):
        raise ValueError(
            f"{task.name} was given the coordinate {name} with values such as {values[0]!r}; "
            f"expected numbers{' or dates' if name == 'time' else ''}. Convert or drop it."
        )
    tolerance = AXIS_TOLERANCE * max(1, len(values) / 100)
    if len(values) < 2:
        return
    if _is_dates(values):
        steps = np.diff(values).astype("timedelta64[ns]")
        seconds = steps / np.timedelta64(1, "s")
        if not np.abs(seconds - seconds.mean()).max() <= tolerance * seconds.mean():
            raise ValueError(
                f"{task.name} was given dates with steps of {seconds.min():g} s to {seconds.max():g} s; "
                "expected equal steps, as it was trained. Select or interpolate such frames."
            )
        return
    found = np.diff(values.astype(float))
    if not np.abs(found - step).max() <= tolerance * step:
        raise ValueError(
            f"{task.name} was given the coordinate {name} with steps of {found.min():g} to "
            f"{found.max():g}; expected {step:g}, as it was trained on "
            f"{', '.join(f'[{low:g}, {high:g}]' for low, high in {*task.spans})}. "
            "Put the field on such cells, or correct it."
        )


def _is_dates(values: np.ndarray) -> bool:
    """Whether these are dates or durations, of NumPy or cftime."""
    return values.dtype.kind in "mM" or hasattr(values[0], "timetuple")


def _times(like: Any, task: Task, dt: float, count: int) -> tuple[np.ndarray, dict[str, Any]]:
    """(times of the `count` frames after the last one of `like`, attributes). Dates continue with their own
    step, which is stored as the attribute STEP; a single date without it continues by dt seconds, with a
    warning."""
    known = like["time"].values.reshape(-1) if "time" in like.coords else np.zeros(1)
    attributes = dict(like["time"].attrs) if "time" in like.coords else {}
    if not _is_dates(known):
        return float(known[-1]) + dt * np.arange(1, count + 1), attributes
    if known.dtype != object:  # fine enough to divide, and wide enough
        unit = "ns" if np.datetime_data(known.dtype)[0] == "ns" else "us"
        known = known.astype(f"{known.dtype.kind}8[{unit}]")
    if len(known) > 1:
        step = (known[-1] - known[0]) / (len(known) - 1)
        attributes[STEP] = float(
            step / (timedelta(seconds=1) if known.dtype == object else np.timedelta64(1, "s"))
        )
    else:
        seconds = attributes.get(STEP, dt)
        step = (
            timedelta(seconds=seconds)
            if known.dtype == object
            else np.timedelta64(round(seconds * 1e9), "ns")
        )
        if STEP not in attributes:
            warnings.warn(
                f"{task.name} was given a single date, which has no time step; the trained time step of "
                f"{dt:g} is taken as seconds. Pass two frames or more, and their step is used.",
                stacklevel=6,
            )
    return np.array([known[-1] + number * step for number in range(1, count + 1)]), attributes


def label(
    values: np.ndarray, like: Any, task: Task, batch: list[str], axes: tuple[str, ...], dt: float
) -> Any:
    """A result ([batch,] *axes, C, *space) with the coordinates of the labelled input `like`, and with its
    units where the weights know none. batch: from `unlabel`; axes: such as member and time."""
    import xarray

    dims = (*batch, *axes, "channel", *task.axes)
    sizes = dict(zip(dims, values.shape, strict=True))
    values = np.flip(values, [dims.index(axis) for axis in _descending(like, task)])
    coordinates = {name: like[name] for name in (*batch, *task.axes) if name in like.coords}
    if "time" in axes:
        coordinates["time"] = "time", *_times(like, task, dt, sizes["time"])
    coordinates |= {"channel": list(task.fields)} | (
        {"member": np.arange(sizes["member"])} if "member" in axes else {}
    )
    out = xarray.DataArray(values, coordinates, dims, attrs={"task": task.name})
    is_dataset = hasattr(like, "data_vars")
    given = like if is_dataset else {} if task.is_steady else dict.fromkeys(task.fields, like)
    units = {name: one.attrs.get("units") for name, one in given.items()} | dict(task.units)
    units = {name: units[name] for name in task.fields if units.get(name)}
    if not is_dataset:
        unit = units.get(task.fields[0])
        if unit and all(units.get(name) == unit for name in task.fields):
            out = out.assign_attrs(units=unit)
        return out if "channel" in like.dims else out.isel(channel=0, drop=True).rename(task.fields[0])
    out = out.to_dataset("channel").assign_attrs(like.attrs | {"task": task.name})
    return out.assign({name: out[name].assign_attrs(units=unit) for name, unit in units.items()})
