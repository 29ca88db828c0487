"""What a user gives a forecast of the forcing: fields and series that vary in time and are known in advance."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ups.labelled import as_tensor, unlabel_forcing
from ups.models.head import FORCING_RANGE, TaskHead
from ups.spectral import resample as on_grid

SAME = 1e-6   # relative: of float32


def read_forcing(head: TaskHead, forcing: Any, u0: Any, batch: int, space: tuple[int, ...], num_frames: int,
                 *, extrapolate: bool = False) -> Tensor | None:
    """The forcing of a forecast as `Known.forcing` has it, (batch, num_frames + 1, K, *trained grid) on the
    operator's device; None for a task without.

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
    wanted = ", ".join(f"{key!r}: {shape}" for key, shape in shapes.items())
    expected = (f"expected forcing={{{wanted}}} or with the batch of {batch} before: the values in the frames "
                f"from the start to the last one predicted, {head.description['dt']:g} apart, in the units of "
                "the training data")
    if forcing is None:
        raise ValueError(f"{name} was not given its forcing {', '.join(names)}; {expected}. Pass them.")
    if not isinstance(forcing, Mapping):
        if len(names) > 1:
            raise ValueError(f"{name} was given forcing without names; {expected}. Pass them by name.")
        forcing = {names[0]: forcing}
    if strange := [key for key in forcing if key not in names]:
        raise ValueError(f"{name} was given forcing {strange[0]!r:.80}; {expected}. Rename it or leave it out.")
    if missing := [key for key in names if key not in forcing]:
        raise ValueError(f"{name} was not given its forcing {', '.join(missing)}; {expected}. Pass them, too.")
    parts = []
    for key, shape in shapes.items():
        values = forcing[key]
        if hasattr(values, "dims"):
            values = unlabel_forcing(values, key, task, head.description["dt"], u0)
        f = as_tensor(values, f"{name}'s forcing {key}")
        if tuple(f.shape) not in (shape, (1, *shape), (batch, *shape)):
            raise ValueError(f"{name} was given forcing {key} of shape {tuple(f.shape)}; {expected}. Give as "
                             "many frames and cells.")
        if not bool(f.isfinite().all()):
            raise ValueError(f"{name} was given forcing {key} with NaN, infinity or masked values; expected "
                             "finite numbers. Fill or repair it.")
        f = f if f.ndim > len(shape) else f[None]
        f = f.view(*f.shape, *[1] * task.ndim) if key in task.series else f
        parts.append(f.expand(batch, num_frames + 1, *space))
    dtype = torch.promote_types(torch.float32, parts[0].dtype)
    f = task.counted(torch.stack([part.to(dtype) for part in parts], 2), names)
    if not extrapolate:
        _check_range(head, f)
    codec = head.forcing_codec
    f = f if space == codec.space else on_grid(f, codec.space, task.boundary)
    return codec.normalise(f.to(head.scale.device, torch.float32))


def _check_range(head: TaskHead, f: Tensor) -> None:
    """Raise ValueError where the forcing f (batch, time, K, *space), counted from its offsets, is far from
    what was trained."""
    spans = head.description.get(FORCING_RANGE, {})
    for channel, name in enumerate(head.task.forcing):
        low, high = spans.get(name, (-torch.inf, torch.inf))
        found = float(f[:, :, channel].min()), float(f[:, :, channel].max())
        slack, offset = SAME * max(abs(low), abs(high)), head.task.offsets.get(name, 0.0)
        if not low - slack <= found[0] <= found[1] <= high + slack:
            shown = [f"{end + offset:.9g}" if offset else f"{end:.6g}" for end in (*found, low, high)]
            raise ValueError(f"{head.name} was given forcing {name} from {shown[0]} to {shown[1]}; expected "
                             f"{shown[2]} to {shown[3]}: the range of its training data and half as much on "
                             "both sides. Train with such values, or ask for extrapolate=True.")
