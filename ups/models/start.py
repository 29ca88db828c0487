"""Where a forecast starts: a physical field and its parameters, checked against what the operator was trained
on, as latents on the trained grid; and the way back to the grid of the field. Whatever was not trained is
refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.boundary import PERIODIC
from ups.models.head import TaskHead
from ups.models.operator import Operator
from ups.spectral import resample as on_grid

SAME = 1e-6   # relative: a time step or parameter that differs by less is the same number in float32
# parameters by name, or raw in the task's order
Values = Mapping[str, Any] | Sequence | Tensor | float | None


@dataclass(frozen=True)
class Start:
    """z (batch, time, *tokens, dim) on the operator's device and raw parameters (batch, P); u: the field that
    was given."""

    head: TaskHead
    u: Tensor
    z: Tensor
    parameters: Tensor

    def finish(self, u_pred: Tensor) -> Tensor:
        """u_pred (..., C, *space) on the grid, device and in the precision of u. Warns of what is not
        finite."""
        head, space = self.head, tuple(self.u.shape[3:])
        u_pred = u_pred.to(self.u)
        axes = tuple(range(u_pred.ndim - 2 - head.task.ndim))
        is_fine = u_pred.isfinite().flatten(len(axes) + 1).all(-1)   # (batch, .., frames)
        if not bool(is_fine.all()):
            first, num_frames = 1 + int((~is_fine).any(axes).nonzero()[0]), is_fine.shape[-1]
            warnings.warn(f"{head.name}: the forecast is not finite from frame {first} of {num_frames} on; "
                          "expected numbers. Use the frames before it, or look at the start and the "
                          "parameters.", stacklevel=4)
        return u_pred if space == head.codec.space else on_grid(u_pred, space, head.task.boundary)


def start(operator: Operator, task: str, u: Tensor, parameters: Values, num_frames: int, *,
          dt: float | None = None, resample: bool = False, extrapolate: bool = False) -> Start:
    """The start of a forecast of `num_frames` from u (batch, history or more, C, *space), physical units, of
    which the last frames count. Of a steady task the coefficient; num_frames is then 1.

    parameters: of all rows or (batch, P), raw values; None where the task has or shows none. dt: the time
    between the frames that are wanted, compared with the trained one. resample: take a field on another grid
    to the trained one (`ups.spectral.interpolation`), and warn what that left out. extrapolate: allow
    parameters outside the trained range. Raises ValueError, by name, for whatever the operator was not
    trained on.
    """
    head = operator.head(task)
    _check_field(head, u, num_frames, dt)
    values = check_parameters(head, parameters, len(u), extrapolate)
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
                      stacklevel=4)
    return Start(head, u, codec.encode(codec.normalise(shown.to(head.scale.device, torch.float32))), values)


def _check_field(head: TaskHead, u: Tensor, num_frames: int, dt: float | None) -> None:
    """Raise ValueError unless u can be (batch, history, C, *space) of this head and dt is its time step."""
    codec, trained, steps = head.input_codec, head.description["dt"], head.history
    wanted = f"(batch, {steps}, {codec.num_channels}, *space) with {codec.ndim} space axes"
    frames, channels = u.shape[1:2].numel(), u.shape[2:3].numel()
    is_right = {
        f"a field of shape {tuple(u.shape)} and {u.dtype}; expected {wanted}, floating point. Move its axes":
            u.ndim == 3 + codec.ndim and len(u) > 0 and u.is_floating_point(),
        f"{frames} frames; expected its history of {steps}. Give the last {steps}":
            frames == 1 if head.task.is_steady else frames >= steps,
        f"{channels} channels; expected {codec.num_channels}: {', '.join(codec.fields)}. Give them in order":
            channels == codec.num_channels,
        "a field with NaN or infinity; expected finite numbers. Repair the field": bool(u.isfinite().all()),
        f"{num_frames} frames to forecast; expected "
        f"{'1, as it is steady' if head.task.is_steady else 'at least 1'}. Ask for 1": num_frames == 1
        or (num_frames > 1 and not head.task.is_steady),
        f"the time step {dt}; expected {trained:g}, with which the operator was trained. Take frames so far "
        f"apart, or train with the other step": dt is None or abs(dt - trained) <= SAME * trained,
    }
    if wrong := [text for text, fine in is_right.items() if not fine]:
        raise ValueError(f"{head.name} was given {wrong[0]}.")


def check_parameters(head: TaskHead, parameters: Values, batch: int, extrapolate: bool) -> Tensor:
    """Raw parameters (batch, P), float64. Raises ValueError for what was not trained, in name, number or
    value."""
    known = head.description["parameters"]
    if isinstance(parameters, Mapping):
        if unknown := [name for name in parameters if name not in known]:
            raise ValueError(f"{head.name} was given the parameter {unknown[0]!r:.80}; expected "
                             f"{', '.join(known) or 'none'}, as it was trained. Give these, by name.")
        columns = [torch.as_tensor(parameters[name], dtype=torch.float64) for name in known
                   if name in parameters]
        parameters = torch.stack(torch.broadcast_tensors(*columns), -1) if columns else None
    values = torch.as_tensor([] if parameters is None else parameters, dtype=torch.float64, device="cpu")
    values = values.reshape(1, -1) if values.ndim < 2 else values
    if values.shape[1:] != (len(known),) or len(values) not in (1, batch):
        raise ValueError(f"{head.name} was given parameters of shape {tuple(values.shape)}; expected "
                         f"({batch}, {len(known)}) or ({len(known)},): "
                         f"{', '.join(known) or 'none, so None'}. Give these, in order.")
    for (name, (low, high)), column in zip(known.items(), values.unbind(1), strict=True):
        is_known = (column >= low * (1 - SAME)) & (column <= high * (1 + SAME))
        is_right = (column > 0) & column.isfinite() & (is_known | extrapolate)
        if not bool(is_right.all()):
            raise ValueError(f"{head.name} was given {name} = {float(column[~is_right][0]):g}; expected "
                             f"{low:g} to {high:g}, where the operator was trained. Train with such a value, "
                             f"or ask for its guess with extrapolate=True (of numbers above zero).")
    return values.expand(batch, -1)
