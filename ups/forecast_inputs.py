"""What a forecast starts from: the field, parameters, and forcing (varies in time and is known in advance).
Whatever was not trained is refused by name."""

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from ups.common.device import has_gradient
from ups.data.tokenizer import Tokenizer
from ups.forecast_xarray import as_tensor, unlabel_forcing
from ups.models.facts import is_count, is_whole
from ups.models.head import TaskHead
from ups.models.rollout import in_blocks
from ups_discovery.boundary import PERIODIC
from ups_discovery.spectral import resample as on_grid

SAME = 1e-6  # relative: a time step or parameter that differs by less is the same number in float32
BYTES = 28  # of memory per value of a forecast: 16 to 27 were measured on three tasks
ROWS = 4  # encoded together, the last ones padded: of a single start this is a part of one predicted frame
# parameters by name, or raw in the task's order
Values = Mapping[str, Any] | Sequence | Tensor | float | None


def start(
    head: TaskHead,
    u: Tensor,
    parameters: Values,
    num_frames: int,
    *,
    members: int = 1,
    dt: float | None = None,
    resample: bool = False,
    extrapolate: bool = False,
    error: bool = False,
) -> tuple[Tensor, Tensor]:
    """What a forecast starts from: normalised frames (batch, time, C, *space), on the operator's device, and
    raw parameters (batch, P).

    u: (batch, time, C, *space), physical units. Arguments and errors: `Forecaster.forecast`.
    """
    check_field(head, u, num_frames, dt, {"resample": resample, "extrapolate": extrapolate, "error": error})
    codec = head.input_codec
    num_cells = max(map(math.prod, (u.shape[3:], head.codec.space)))
    require_room(
        BYTES * len(u) * int(members) * int(num_frames) * head.codec.num_channels * num_cells,
        psutil.virtual_memory().available,
        "memory",
        "num_frames, members or the batch, or free some memory",
    )
    u = codec.masked(u, torch.nan)
    u = head.task.counted(u, codec.fields)  # in float64, before anything is rounded to float32
    if not extrapolate:
        check_start_range(head, u.detach())
    values = check_parameters(head, parameters, len(u), extrapolate)
    u_trained = u
    space, boundary = tuple(u.shape[3:]), head.task.boundary
    if space != codec.space:
        if not resample:
            raise ValueError(
                f"{head.name} was given a field on the grid {space}; expected {codec.space}, on "
                f"which the operator was trained. Pass a field on that grid, or resample=True to "
                f"interpolate to it and back, or train on the other grid."
            )
        u_trained = on_grid(u, codec.space, boundary)
        change, variation = on_grid(u_trained, space, boundary).double() - u, u - u.double().mean()
        lost = float(change.detach().norm() / variation.detach().norm().clamp_min(1e-150))
        waves = "Fourier" if boundary == PERIODIC else "mixed" if PERIODIC in boundary else "cosine"
        warnings.warn(
            f"{head.name}: resampled from the grid {space} to the trained grid {codec.space} and back "
            f"({waves} interpolation). {lost:.1e} of the variation of the input field is finer "
            f"than the trained grid and is lost; no forecast resolves anything finer.",
            stacklevel=4,
        )
    num_used = max(head.history + 1, head.start_frames)  # one more for the last error
    u_trained = u_trained[:, -num_used:].to(head.scale.device, torch.float32)
    w = codec.normalise(u_trained)
    if codec.dim < codec.width:
        w = in_blocks(lambda index: codec.projected(w[index]), len(w), ROWS)
    return w, values


def finished(head: TaskHead, u_pred: Tensor, given: Tensor, validated: int | None = None) -> Tensor:
    """A forecast u_pred (..., C, *space), relative to the task's offsets, on the grid and device of the start
    `given` (batch, time, C, *space) and in its precision. Warns of values that are not finite and of what was
    not evaluated. validated: frames of ensembles, if it is one."""
    task = head.task
    axes = tuple(range(u_pred.ndim - 2 - task.ndim))
    is_fine = head.codec.masked(u_pred).isfinite().flatten(len(axes) + 1).all(-1)  # (batch, .., frames)
    if not bool(is_fine.all()):
        first, num_frames = 1 + int((~is_fine).any(axes).nonzero()[0]), is_fine.shape[-1]
        warnings.warn(
            f"{head.name}: the forecast is not finite from frame {first} of {num_frames} on; expected "
            "numbers. Use the frames before it, or look at the start and the parameters.",
            stacklevel=4,
        )
    if warning := warning_of(head, u_pred, validated):
        warnings.warn(warning, stacklevel=4)
    return in_units(head, u_pred, given)


def in_units(head: TaskHead, u: Tensor, given: Tensor) -> Tensor:
    """Fields u (..., C, *space), relative to the task's offsets, on the grid and device of the start `given`
    and in its precision."""
    task, space = head.task, tuple(given.shape[3:])
    u = u.to(given.device, torch.float64 if task.offsets else given.dtype)
    u = u if space == head.codec.space else on_grid(u, space, task.boundary)
    return task.absolute(u, head.codec.fields).to(given)


def encoded(codec: Tokenizer, w: Tensor) -> Tensor:
    """The latents of a start; those of a row do not depend on the other rows."""
    return in_blocks(lambda index: codec.encode(w[index]), len(w), ROWS)


def check_field(
    head: TaskHead, u: Tensor, num_frames: int, dt: float | None, flags: Mapping[str, Any]
) -> None:
    """Raise ValueError unless u can be (batch, history, C, *space) of this head, dt is its time step and
    flags are True or False. Warn if more frames would lower the noise of the start."""
    codec, trained, steps = head.input_codec, head.facts.dt, head.history
    wanted = f"(batch, {steps}, {codec.num_channels}, *space) with {codec.ndim} space axes"
    frames, channels = u.shape[1:2].numel(), u.shape[2:3].numel()
    is_masked = head.codec.valid is not None or codec.valid is not None
    is_steady, same_grid = head.task.is_steady, tuple(u.shape[3:]) == codec.space
    is_number = isinstance(dt, (Real, Tensor)) and not isinstance(dt, np.timedelta64)
    num_wanted = "1, as it is steady" if is_steady else "a whole number, at least 1"
    checks = [
        (
            u.ndim == 3 + codec.ndim and len(u) > 0 and u.is_floating_point(),
            f"a field of shape {tuple(u.shape)} and {u.dtype}; expected {wanted}, floating point. "
            "Move its axes",
        ),
        (
            frames == 1 if is_steady else frames >= steps,
            f"{frames} frames; expected its history of {steps}. Give the last {steps}",
        ),
        (
            channels == codec.num_channels,
            f"{channels} channels; expected {codec.num_channels}: {', '.join(codec.fields)}. "
            "Give them in order",
        ),
        (
            bool(codec.masked(u).isfinite().all()),
            "a field with NaN, infinity or masked values; expected finite numbers"
            f"{', but in the cells of its mask' * is_masked}. Fill or repair the field",
        ),
        (
            same_grid or not is_masked,
            f"a field on the grid {tuple(u.shape[3:])}; expected {codec.space}, as cells of it have "
            "no value. Put the field on that grid",
        ),
        (
            is_count(num_frames) and (num_frames == 1 or not is_steady),
            f"{num_frames!r:.40} frames to forecast; expected {num_wanted}. Ask for 1",
        ),
        (
            dt is None or (is_number and abs(dt - trained) <= SAME * trained),
            f"the time step {dt!r:.40}; expected {trained:g}, with which the operator was trained. "
            "Take frames so far apart, or train with the other step",
        ),
        *(
            (
                isinstance(one, bool | np.bool_),
                f"{name}={one!r:.40}; expected True or False. Pass one of them",
            )
            for name, one in flags.items()
        ),
    ]
    if wrong := next((text for is_right, text in checks if not is_right), ""):
        raise ValueError(f"{head.name} was given {wrong}.")
    if frames <= steps < head.start_frames:
        warnings.warn(
            f"{head.name}: the forecast starts from the noise of {frames} input frame(s). Pass the last "
            f"{head.start_frames}, from which the start is then estimated.",
            stacklevel=5,
        )


def require_room(num_bytes: int, free: int, where: str, reduce: str) -> None:
    """Raise ValueError if a forecast takes more bytes than are free."""
    if num_bytes > free:
        raise ValueError(
            f"the forecast takes {min(num_bytes, 1e300):.3g} bytes and {where} has room for {free:.3g}; "
            f"expected less. Reduce {reduce}."
        )


def check_start_range(head: TaskHead, u: Tensor) -> None:
    """Raise ValueError if a start, or the coefficient of a steady task, u (batch, time, C, *space), is
    outside the range of forecasts."""
    codec, cut = head.codec, ", which cuts the forecast there"
    ends = (codec.denormalise(end.view(-1, *[1] * codec.ndim)).flatten() for end in (head.low, head.high))
    spans = dict(zip(codec.fields, zip(*(end.tolist() for end in ends), strict=True), strict=True))
    if head.task.is_steady:
        codec, cut, spans = head.input_codec, "", head.facts.input_range or {}
    _check_range(head, "", codec.fields, u[:, -head.history :], spans, cut)


def _check_range(
    head: TaskHead,
    kind: str,
    names: Sequence[str],
    u: Tensor,
    spans: Mapping[str, tuple[float, float]],
    cut: str = "",
) -> None:
    """Raise ValueError if a value of u (batch, time, C, *space), NaN apart (masked cells), is outside the
    span of its channel; both without offsets. Older weights have no spans of coefficients."""
    for name, values in zip(names, u.transpose(0, 2).flatten(1), strict=True):
        span, offset = spans.get(name, (-torch.inf, torch.inf)), head.task.offsets.get(name, 0.0)
        values, slack = values[~values.isnan()], SAME * max(map(abs, span))
        found = [*map(float, values.aminmax())] if len(values) else span
        if not span[0] - slack <= found[0] <= found[1] <= span[1] + slack:
            shown = [f"{end + offset:.{9 if offset else 6}g}" for end in (*found, *span)]
            raise ValueError(
                f"{head.name} was given {kind}{name} from {shown[0]} to {shown[1]}; expected {shown[2]} to "
                f"{shown[3]}: the range of its training data and half as much on both sides. Train on such "
                f"values, or pass extrapolate=True{cut}."
            )


def check_random(task: str, seed: int, rows: Sequence[int] | None, count: int, noise: str = "state") -> None:
    """Raise ValueError unless the seed is a whole number from 0 on, rows are `count` whole numbers or None,
    and noise is "state" or "row"."""
    if not is_whole(seed) or seed < 0:
        raise ValueError(
            f"{task} was given the seed {seed!r:.80}; expected a whole number, at least 0. Pass one."
        )
    num = len(rows) if hasattr(rows, "__len__") else repr(rows)
    if rows is not None and (num != count or not all(map(is_whole, rows))):
        raise ValueError(
            f"{task} was given {num} row numbers for a batch of {count}; expected "
            "one whole number for each. Pass these, or leave rows out."
        )
    if not isinstance(noise, str) or noise not in ("state", "row"):
        raise ValueError(
            f"{task} was given noise={noise!r:.80}; expected 'state' (a function of the start) or 'row' (of "
            "seed and row alone). Pass one of them."
        )


def warning_of(head: TaskHead, u_pred: Tensor, validated: int | None = None) -> str:
    """How a forecast u_pred (..., time, C, *space), trained grid, exceeds what was evaluated, and from which
    frame on; "" if it does not. Weights of older versions have no horizon."""
    if head.task.is_steady:
        return ""
    num_frames = u_pred.shape[-2 - head.task.ndim]
    horizon, first = validated or head.facts.horizon or num_frames, head.first_at_bounds(u_pred)
    ways = [
        f"is longer than the {horizon} frames on which {'its ensembles' if validated else 'the operator'} "
        f"{'were' if validated else 'was'} evaluated, so its error is not known from frame {horizon + 1} on"
    ] * (num_frames > horizon)
    ways += [
        f"reaches the bounds of the training data (their range and half of it on both sides) in frame "
        f"{first}, where it is cut, so it is wrong from there on"
        + " and its gradient there is 0"
        * has_gradient(u_pred)
    ] * (first > 0)
    if not ways:
        return ""
    return (
        f"{head.name}: the forecast of {num_frames} frames {', and it '.join(ways)}. Use the frames "
        f"before that, or train on longer trajectories."
    )


def check_parameters(head: TaskHead, parameters: Values, batch: int, extrapolate: bool) -> Tensor:
    """Raw parameters (batch, P), float64. By name, those with a single value in training are optional. Raises
    ValueError for names, numbers and values that were not trained."""
    known = head.facts.parameters
    if parameters is None or isinstance(parameters, Mapping):
        given = {name: low for name, (low, high) in known.items() if low == high} | dict(parameters or {})
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"{head.name} has no parameter {unknown[0]!r:.80}; it was trained with "
                f"{', '.join(known) or 'none'}. "
                + (f"Pass parameters={{{next(iter(known))!r}: ...}}." if known else "Leave parameters out.")
            )
        if missing := [name for name in known if name not in given]:
            name, (low, high) = missing[0], known[missing[0]]
            raise ValueError(
                f"{head.name} needs the parameter {name}; it was trained with values from {low:g} to "
                f"{high:g}. Pass parameters={{{name!r}: {high:g}}} or another value in that range."
            )
        columns = []
        for name in known:
            column = as_tensor(given[name], f"{head.name}'s parameter {name}").double().cpu()
            if column.shape not in ((), (1,), (batch,)):
                raise ValueError(
                    f"{head.name} was given values of {name} of shape {tuple(column.shape)}; expected a "
                    f"number, or one for each of the {batch} rows. Pass these."
                )
            columns.append(column.expand(batch))
        parameters = torch.stack(columns, -1) if columns else []
    values = as_tensor(parameters, f"{head.name}'s parameters").double().cpu()
    values = values.reshape(1, -1) if values.ndim < 2 else values
    if values.shape[1:] != (len(known),) or len(values) not in (1, batch):
        raise ValueError(
            f"{head.name} was given parameters of shape {tuple(values.shape)}; expected ({batch}, "
            f"{len(known)}) or ({len(known)},): {', '.join(known) or 'none, so None'}. Pass these, in order."
        )
    for (name, (low, high)), column in zip(known.items(), values.unbind(1), strict=True):
        is_known = (column >= low - SAME * abs(low)) & (column <= high + SAME * abs(high))
        is_right = ((column > 0) | (low <= 0)) & column.isfinite() & (is_known | bool(extrapolate))
        if not bool(is_right.all()):
            raise ValueError(
                f"{head.name} was given {name} = {float(column[~is_right][0]):g}; expected "
                f"{low:g} to {high:g}, the range of its training. Train with such a value, or pass "
                f"extrapolate=True (for numbers above zero)."
            )
    return values.expand(batch, -1)


def read_forcing(
    head: TaskHead,
    forcing: Any,
    u0: Any,
    u: Tensor,
    num_frames: int,
    extrapolate: bool = False,
) -> Tensor | None:
    """The forcing of a forecast, as in `ParameterBatch.forcing`: (batch, num_frames + 1, K, *trained grid) on
    the operator's device; None for a task without forcing.

    forcing: name -> values from the last frame of u0 to the last predicted one, in the units of the training
    data, NumPy, torch or xarray: ([batch,] num_frames + 1, *space) for a field, ([batch,] num_frames + 1) for
    a series. With a single name the values alone. u0, u: the start as it was passed, and as (batch, time, C,
    *space). Raises ValueError, by name.
    """
    task, name, names = head.task, head.name, head.task.forcing
    batch, space = len(u), tuple(u.shape[3:])
    if not names:
        if forcing is not None:
            raise ValueError(f"{name} has no forcing; it was trained without. Leave forcing out.")
        return None
    shapes = {key: (num_frames + 1, *(() if key in task.series else space)) for key in names}
    units = "".join(f", {key} in {task.units[key]}" for key in names if key in task.units)
    wanted = ", ".join(f"{key!r}: {shape}" for key, shape in shapes.items())
    expected = (
        f"expected forcing={{{wanted}}}, or with the batch of {batch} as first axis: the values in "
        f"the frames from the start to the last predicted one, {head.facts.dt:g} apart, in "
        f"the units of the training data{units}"
    )
    if forcing is None:
        raise ValueError(f"{name} needs the forcing {', '.join(names)}; {expected}. Pass it.")
    if not isinstance(forcing, Mapping):
        if len(names) > 1:
            raise ValueError(f"{name} has several forcings; {expected}. Pass them by name.")
        forcing = {names[0]: forcing}
    if unknown := [key for key in forcing if key not in names]:
        raise ValueError(f"{name} has no forcing {unknown[0]!r:.80}; {expected}. Rename it.")
    if missing := [key for key in names if key not in forcing]:
        raise ValueError(f"{name} needs the forcing {', '.join(missing)}; {expected}. Add it.")
    parts = []
    for key, shape in shapes.items():
        values = forcing[key]
        if hasattr(values, "dims"):
            values = unlabel_forcing(values, key, task, head.facts.dt, u0)
        f = as_tensor(values, f"{name}'s forcing {key}")
        if tuple(f.shape) not in (shape, (1, *shape), (batch, *shape)):
            raise ValueError(
                f"{name} was given forcing {key} of shape {tuple(f.shape)}; {expected}. Pass as "
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
    is_finite = codec.masked(f).isfinite().transpose(0, 2).flatten(1).all(1)
    if not bool(is_finite.all()):
        raise ValueError(
            f"{name} was given forcing {names[int(is_finite.int().argmin())]} with NaN, "
            "infinity or masked values; expected finite numbers. Fill or repair it."
        )
    if not extrapolate:
        _check_range(head, "forcing ", names, f.detach(), head.facts.forcing_range or {})
    f = f if space == codec.space else on_grid(f, codec.space, task.boundary)
    return codec.normalise(f.to(head.scale.device, torch.float32))
