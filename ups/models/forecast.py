"""Forecasts from a physical field to physical fields, on the trained grid or by way of it, refused by name where the
operator was not trained."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ups.boundary import PERIODIC
from ups.models.operator import Operator, TaskHead
from ups.spectral import resample as on_grid

SAME = 1e-6   # relative: a time step or parameter that differs by less is the same number in float32


@torch.no_grad()
def forecast(operator: Operator, task: str, u0: Tensor | np.ndarray,
             parameters: Tensor | np.ndarray | Sequence | float | None, num_frames: int, *,
             dt: float | None = None, resample: bool = False,
             extrapolate: bool = False) -> Tensor | np.ndarray:
    """The `num_frames` frames (batch, num_frames, C, *space) that follow u0, physical units, of u0's type.

    u0: the last frames (batch, history, C, *space), channels in the order of the task's fields; without the
    second axis where the history is 1. Of a steady task the coefficient; num_frames is then 1. parameters:
    (batch, P), or (P,) for all rows, raw values in the order the task names them; None where it has or shows
    none. dt: the time between the frames that are wanted, compared with the trained one. resample: take a
    field on another grid to the trained one and the forecast back (`ups.spectral.interpolation`), and warn
    what that left out. extrapolate: allow parameters outside the trained range. Raises ValueError, by name,
    for whatever the operator was not trained on. Warns of a forecast that blows up.
    """
    head = operator.head(task)
    u = (u0 if isinstance(u0, Tensor) else torch.from_numpy(np.array(u0))).detach()
    u = u[:, None] if u.ndim == 2 + head.task.ndim and head.history == 1 else u
    _check_field(head, u, num_frames, dt)
    values = _parameters(head, parameters, len(u), extrapolate).to(head.scale.device)
    codec, shown = head.input_codec, u
    space, boundary = tuple(u.shape[3:]), head.task.boundary
    if space != codec.space:
        if not resample:
            raise ValueError(f"{task} was given a field on the grid {space}; expected {codec.space}, on "
                             f"which the operator was trained. Give that grid, or resample=True to go to it "
                             f"and back, or train on the other.")
        shown = on_grid(u, codec.space, boundary)
        lost = float((on_grid(shown, space, boundary) - u).norm() / (u - u.mean()).norm().clamp_min(1e-30))
        waves = "Fourier" if boundary == PERIODIC else "cosine"
        warnings.warn(f"{task}: resampled from the grid {space} to the trained grid {codec.space} and back "
                      f"({waves} interpolation). {lost:.1e} of the variation of the field given is finer "
                      f"than the trained grid and was left out; no forecast holds anything finer.",
                      stacklevel=3)
    z = codec.encode(codec.normalise(shown.to(head.scale.device, torch.float32)))
    u_pred = operator.physical(task, operator.rollout(z, task, values, num_frames)).to(u)
    if not bool(u_pred.isfinite().all()):
        first = 1 + int((~u_pred.isfinite()).flatten(2).any(2).any(0).nonzero()[0])
        warnings.warn(f"{task}: the forecast is not finite from frame {first} of {num_frames} on; expected "
                      f"numbers. Use the frames before it, or look at the start and the parameters.",
                      stacklevel=3)
    u_pred = u_pred if space == codec.space else on_grid(u_pred, space, boundary)
    return u_pred if isinstance(u0, Tensor) else u_pred.numpy()


def _check_field(head: TaskHead, u: Tensor, num_frames: int, dt: float | None) -> None:
    """Raise ValueError unless u can be (batch, history, C, *space) of this head and dt is its time step."""
    codec, trained, steps = head.input_codec, head.description["dt"], head.history
    wanted = f"(batch, {steps}, {codec.num_channels}, *space) with {codec.ndim} space axes"
    frames, channels = u.shape[1:2].numel(), u.shape[2:3].numel()
    is_right = {
        f"a field of shape {tuple(u.shape)} and {u.dtype}; expected {wanted}, floating point. Move its axes":
            u.ndim == 3 + codec.ndim and len(u) > 0 and u.is_floating_point(),
        f"{frames} frames; expected its history of {steps}. Give the last {steps}": frames == steps,
        f"{channels} channels; expected {codec.num_channels}: {', '.join(codec.fields)}. Give them in order":
            channels == codec.num_channels,
        "a field with NaN or infinity; expected finite numbers. Repair the field": bool(u.isfinite().all()),
        f"{num_frames} frames to forecast; expected 1, as it is steady. Ask for 1":
            num_frames == 1 or not head.task.is_steady,
        f"the time step {dt}; expected {trained:g}, with which the operator was trained. Take frames so far "
        f"apart, or train with the other step": dt is None or abs(dt - trained) <= SAME * trained,
    }
    if wrong := [text for text, fine in is_right.items() if not fine]:
        raise ValueError(f"{head.name} was given {wrong[0]}.")


def _parameters(head: TaskHead, parameters: Tensor | np.ndarray | Sequence | float | None, batch: int,
                extrapolate: bool) -> Tensor:
    """Raw parameters (batch, P), float64. Raises ValueError for what was not trained, in number or value."""
    known = head.description["parameters"]
    values = torch.as_tensor([] if parameters is None else parameters, dtype=torch.float64, device="cpu")
    values = values.reshape(1, -1) if values.ndim < 2 else values
    if values.shape[1:] != (len(known),) or len(values) not in (1, batch):
        raise ValueError(f"{head.name} was given parameters of shape {tuple(values.shape)}; expected "
                         f"({batch}, {len(known)}) or ({len(known)},): {', '.join(known) or 'none, so None'}. "
                         f"Give these, in order.")
    for (name, (low, high)), column in zip(known.items(), values.unbind(1), strict=True):
        is_known = (column >= low * (1 - SAME)) & (column <= high * (1 + SAME))
        is_right = (column > 0) & column.isfinite() & (is_known | extrapolate)
        if not bool(is_right.all()):
            raise ValueError(f"{head.name} was given {name} = {float(column[~is_right][0]):g}; expected "
                             f"{low:g} to {high:g}, where the operator was trained. Train with such a value, "
                             f"or ask for its guess with extrapolate=True (of numbers above zero).")
    return values.expand(batch, -1)
