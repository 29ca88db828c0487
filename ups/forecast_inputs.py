"""What a forecast is given beside its start: parameters, and forcing, which varies in time and is known in
advance."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ups.common.spectral import resample as on_grid
from ups.forecast_xarray import as_tensor, unlabel_forcing
from ups.models.head import FORCING_RANGE, TaskHead

SAME = 1e-6  # relative: a time step or parameter that differs by less is the same number in float32
# parameters by name, or raw in the task's order
Values = Mapping[str, Any] | Sequence | Tensor | float | None


def check_parameters(head: TaskHead, parameters: Values, batch: int, extrapolate: bool) -> Tensor:
    """Raw parameters (batch, P), float64; by name, one that had a single value in training need not be
    given. Raises ValueError for what was not trained, in name, number or value."""
    known = head.description["parameters"]
    if parameters is None or isinstance(parameters, Mapping):
        given = {name: low for name, (low, high) in known.items() if low == high} | dict(parameters or {})
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"{head.name} was given the parameter {unknown[0]!r:.80}; expected "
                f"{', '.join(known) or 'none'}, as it was trained. Give these, by name."
            )
        if missing := [name for name in known if name not in given]:
            name, (low, high) = missing[0], known[missing[0]]
            raise ValueError(
                f"{head.name} was not given its parameter {name}; expected a value from {low:g} "
                f"to {high:g}, as it was trained. Pass parameters={{{name!r}: {high:g}}}, or "
                "another value in that range."
            )
        columns = [as_tensor(given[name], f"{head.name}'s parameter {name}").double().cpu() for name in known]
        parameters = torch.stack(torch.broadcast_tensors(*columns), -1) if columns else []
    values = as_tensor(parameters, f"{head.name}'s parameters").double().cpu()
    values = values.reshape(1, -1) if values.ndim < 2 else values
    if values.shape[1:] != (len(known),) or len(values) not in (1, batch):
        raise ValueError(
            f"{head.name} was given parameters of shape {tuple(values.shape)}; expected "
            f"({batch}, {len(known)}) or ({len(known)},): "
            f"{', '.join(known) or 'none, so None'}. Give these, in order."
        )
    for (name, (low, high)), column in zip(known.items(), values.unbind(1), strict=True):
        is_known = (column >= low - SAME * abs(low)) & (column <= high + SAME * abs(high))
        is_right = ((column > 0) | (low <= 0)) & column.isfinite() & (is_known | extrapolate)
        if not bool(is_right.all()):
            raise ValueError(
                f"{head.name} was given {name} = {float(column[~is_right][0]):g}; expected "
                f"{low:g} to {high:g}, where the operator was trained. Train with such a value, "
                f"or ask for its guess with extrapolate=True (of numbers above zero)."
            )
    return values.expand(batch, -1)


def read_forcing(
    head: TaskHead,
    forcing: Any,
    u0: Any,
    batch: int,
    space: tuple[int, ...],
    num_frames: int,
    *,
    extrapolate: bool = False,
) -> Tensor | None:
    """The forcing of a forecast, as in `ParameterBatch.forcing`: (batch, num_frames + 1, K, *trained grid) on
    the operator's device; None for a task without.

    forcing: name -> values in the frames from the start (the last frame of u0) to the last one predicted, in
    the units of the training data: ([batch,] num_frames + 1, *space) of a field, ([batch,] num_frames + 1) of
    a series, NumPy, torch or xarray; the values alone where there is one name. Raises ValueError, by name.
    """
    task, name, names = head.task, head.name, head.task.forcing
    if not names:
        if forcing is not None:
            raise ValueError(f"{name} was given forcing; expected none, as it was trained. Leave it out.")
        return None
    shapes = {key: (num_frames + 1, *(() if key in task.series else space)) for key in names}
    units = "".join(f", {key} in {task.units[key]}" for key in names if key in task.units)
    wanted = ", ".join(f"{key!r}: {shape}" for key, shape in shapes.items())
    expected = (
        f"expected forcing={{{wanted}}}, or these with the batch of {batch} in front: the values in "
        f"the frames from the start to the last one predicted, {head.description['dt']:g} apart, in "
        f"the units of the training data{units}"
    )
    if forcing is None:
        raise ValueError(f"{name} was not given its forcing {', '.join(names)}; {expected}. Pass them.")
    if not isinstance(forcing, Mapping):
        if len(names) > 1:
            raise ValueError(f"{name} was given forcing without names; {expected}. Pass them by name.")
        forcing = {names[0]: forcing}
    if strange := [key for key in forcing if key not in names]:
        raise ValueError(f"{name} was given forcing {strange[0]!r:.80}; {expected}. Rename it.")
    if missing := [key for key in names if key not in forcing]:
        raise ValueError(f"{name} was not given its forcing {', '.join(missing)}; {expected}. Add it.")
    parts = []
    for key, shape in shapes.items():
        values = forcing[key]
        if hasattr(values, "dims"):
            values = unlabel_forcing(values, key, task, head.description["dt"], u0)
        f = as_tensor(values, f"{name}'s forcing {key}")
        if tuple(f.shape) not in (shape, (1, *shape), (batch, *shape)):
            raise ValueError(
                f"{name} was given forcing {key} of shape {tuple(f.shape)}; {expected}. Give as "
                "many frames and cells."
            )
        f = f if f.ndim > len(shape) else f[None]
        f = f.view(*f.shape, *[1] * task.ndim) if key in task.series else f
        parts.append(f.expand(batch, num_frames + 1, *space))
    dtype = torch.promote_types(torch.float32, parts[0].dtype)
    f = task.counted(torch.stack([part.to(dtype) for part in parts], 2), names)
    codec = head.forcing_codec
    if codec.valid is not None and space != codec.space:
        raise ValueError(
            f"{name} was given forcing on the grid {space}; expected {codec.space}, as cells of "
            "it have no value. Put the forcing on that grid."
        )
    is_finite = codec.held(f).isfinite().transpose(0, 2).flatten(1).all(1)
    if not bool(is_finite.all()):
        raise ValueError(
            f"{name} was given forcing {names[int(is_finite.int().argmin())]} with NaN, "
            "infinity or masked values; expected finite numbers. Fill or repair it."
        )
    if not extrapolate:
        _check_range(head, f)
    f = f if space == codec.space else on_grid(f, codec.space, task.boundary)
    return codec.normalise(f.to(head.scale.device, torch.float32))


def _check_range(head: TaskHead, f: Tensor) -> None:
    """Raise ValueError where the forcing f (batch, time, K, *space), counted from its offsets, is far from
    what was trained."""
    spans = head.description.get(FORCING_RANGE, {})
    for channel, name in enumerate(head.task.forcing):
        low, high = spans.get(name, (-torch.inf, torch.inf))
        values = f[:, :, channel]
        values = values[~values.isnan()]  # but for the cells of a mask
        found = float(values.min()), float(values.max())
        slack, offset = SAME * max(abs(low), abs(high)), head.task.offsets.get(name, 0.0)
        if not low - slack <= found[0] <= found[1] <= high + slack:
            shown = [f"{end + offset:.9g}" if offset else f"{end:.6g}" for end in (*found, low, high)]
            raise ValueError(
                f"{head.name} was given forcing {name} from {shown[0]} to {shown[1]}; expected "
                f"{shown[2]} to {shown[3]}: the range of its training data, widened. Train with "
                "such values, or ask for extrapolate=True."
            )
