"""Measurements of a coefficient, a solution or a state, with noise, as they are passed to `prior` and
`sample`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.forecast_xarray import as_tensor, unlabel
from ups.generative.observation import Measured
from ups.models.facts import is_count
from ups.models.head import TaskHead


def unmeasured(head: TaskHead, u: Any) -> Any:
    """A coefficient of which nothing is known, for every row of the measured solution u of `prior`, of the
    same kind."""
    codec = head.input_codec
    given = u["values"] if isinstance(u, Mapping) and "values" in u else np.zeros(head.codec.space)
    lead = as_tensor(given, f"{head.name}'s u values").shape[: -codec.ndim - 1]
    a = torch.full((*lead, codec.num_channels, *codec.space), torch.nan)
    return a if isinstance(given, Tensor) else a.numpy()


def beside(head: TaskHead, a: Any, one: Any, what: str) -> Any:
    """A mask or noise of the coefficient a, as (batch, *space) if both are labelled. Raises ValueError
    for an array if one of the two is labelled alone: their axes may differ in order."""
    is_labelled = hasattr(one, "dims")
    if np.ndim(one) and is_labelled != hasattr(a, "dims"):
        raise ValueError(
            f"{head.name} was given a {what} and a coefficient of which one alone is labelled; expected both "
            "or neither, as axes go by name. Pass both as xarray or both as arrays."
        )
    return unlabel(one, head.task, (what,), 0.0, ())[0][:, 0, 0] if is_labelled and one.dims else one


def coefficient(head: TaskHead, a: Tensor, mask: Tensor, noise: Any, blocks: int) -> Measured:
    """The measured coefficient of `prior`: a (batch, 1, C, *cells or blocks), physical units; mask (batch, 1,
    *cells or blocks)."""
    space = tuple(a.shape[3:])
    if not is_count(blocks) or tuple(size * int(blocks) for size in space) != head.input_codec.space:
        raise ValueError(
            f"{head.name} was given blocks={blocks!r:.80} and a coefficient on {space}; expected a value for "
            f"each block of so many cells per axis of the grid {head.input_codec.space}. Pass these means."
        )
    noise = as_tensor(noise, f"{head.name}'s noise").to(head.scale.device)
    noise = like_values(head.name, "noise", noise, a[:, 0].shape)
    a, mask = (part.to(noise.device) for part in (a[:, 0], mask.expand_as(a[:, 0])))
    mask = head.input_codec.masked(mask, False)
    check_values(head.name, "a coefficient", a[mask], noise[mask], "of at least 0")
    a = head.task.counted(a, head.input_codec.fields)
    parts = [a.double(), mask, noise.double()]
    for axis in range(2, a.ndim):
        parts = [part.repeat_interleave(int(blocks), axis) for part in parts]
    return Measured(*parts, int(blocks))


def read_observations(head: TaskHead, given: Any, batch: int, num_frames: int) -> tuple[list[int], Measured]:
    """Frames and measurements (batch, frames, C, *space) of the observations of `sample`."""
    frames = given.get("frames") if isinstance(given, Mapping) else None
    frames = [*frames] if isinstance(frames, (Sequence, np.ndarray, Tensor)) else []
    measured = read_values(head, "observations", given, (batch, len(frames)), ("frames",))
    wanted = sorted({frame for frame in range(1, num_frames + 1) if frame in frames})
    if not frames or frames != wanted:
        raise ValueError(
            f"{head.name} was given observations of frames {frames!r:.80}; expected ascending numbers from "
            f"1, the first after u0, to num_frames = {num_frames}. Pass these."
        )
    return wanted, measured


def observed(
    task: str, given: Any, shape: Sequence[int], first: int | None
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """(frames, values, mask, noise) of the observations of `ups.invert` and `ups.assimilate`, the last three
    (frames, C, *space), float64, in physical units: mask is where a value is observed. shape: (C, *space);
    first: the first frame that may be observed, None for a steady task. Raises ValueError."""
    parts = _parts(task, "observations", given, ["frames"] * (first is not None))
    values, noise, mask = (parts[key].double().cpu() for key in ("values", "noise", "mask"))
    frames = parts.get("frames", torch.zeros(1)).flatten().tolist()
    values = values if first is not None or values.ndim > len(shape) else values[None]
    wrong = ""
    whole = sorted({int(one) for one in frames if math.isfinite(one)})
    if not frames or frames != whole or frames[0] < (first or 0):
        wrong = f"frames {frames!r:.60}; expected ascending whole numbers from {first} on (0 is the start)"
    elif tuple(values.shape) != (len(frames), *shape):
        wrong = f"values of shape {tuple(values.shape)}; expected {(len(frames), *shape)}"
    if wrong:
        raise ValueError(f"{task} was given observations with {wrong}. Pass these.")
    by_field = noise.ndim == 1 and len(noise) == shape[0]
    noise = noise.view(-1, *[1] * (len(shape) - 1)) if by_field else noise
    noise, mask = (
        like_values(task, what, one, values.shape) for what, one in (("noise", noise), ("mask", mask))
    )
    mask = ~values.isnan() & mask.isfinite() & (mask != 0)
    if not bool(mask.any()):
        raise ValueError(f"{task} was given no observed value; expected some that are finite. Pass these.")
    check_values(task, "observations", values[mask], noise[mask])
    return whole, values, mask, noise


def _parts(name: str, what: str, given: Any, others: Sequence[str]) -> dict[str, Tensor]:
    """values, noise, mask (1 by default) and `others` of measurements. Raises ValueError, by name."""
    keys = ("values", "noise", "mask", *others)
    if not isinstance(given, Mapping) or not {*keys} - {"mask"} <= {*given} <= {*keys}:
        found = ", ".join(map(str, given)) if isinstance(given, Mapping) else f"{given!r:.80}"
        raise ValueError(
            f"{name} was given {what} {found:.200}; expected a dictionary of {', '.join(keys)}. Pass "
            "one; mask may be left out."
        )
    return {key: as_tensor(given.get(key, 1.0), f"{name}'s {what} {key}") for key in keys}


def like_values(name: str, what: str, found: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers that broadcast to values of this shape, by NumPy's rules, so expanded. Raises ValueError, by
    name."""
    try:
        return found.expand(tuple(shape))
    except RuntimeError:
        raise ValueError(
            f"{name} was given {what} of shape {tuple(found.shape)}; expected one that broadcasts to "
            f"{tuple(shape)}. Pass such an array, or a number."
        ) from None


def read_values(
    head: TaskHead, what: str, given: Any, lead: tuple[int, ...], others: tuple[str, ...] = ()
) -> Measured:
    """Measurements (*lead, C, *space) of the solution or state of a task, relative to the task's offsets.

    given: {"values": .., "mask": .., "noise": ..} and `others`. values (*lead, C, *space), without the first
    axis for a batch of 1; mask (default: all) and noise broadcast to them. Raises ValueError, by name.
    """
    name, shape = head.name, (*lead, head.codec.num_channels, *head.codec.space)
    parts = {key: one.to(head.scale.device) for key, one in _parts(name, what, given, others).items()}
    values = parts["values"]
    if tuple(values.shape) not in (shape, shape[lead[0] == 1 :]):
        raise ValueError(
            f"{name} was given {what} values of shape {tuple(values.shape)}; expected {shape}, anything "
            "where the mask is 0. Pass such an array."
        )
    mask, noise = (like_values(name, f"{what} {key}", parts[key], shape) for key in ("mask", "noise"))
    mask = head.codec.masked(mask.isfinite() & (mask != 0), False)
    values = head.task.counted(values.view(shape), head.codec.fields)
    check_values(name, what, values[mask], noise[mask])
    return Measured(values.double(), mask, noise.double())


def check_values(name: str, what: str, values: Tensor, noise: Tensor, least: str = "above 0") -> None:
    """Raise ValueError unless measured values and their noise are finite, and the noise is at least 0 or
    above it."""
    is_noise = noise.isfinite() & (noise > 0 if least == "above 0" else noise >= 0)
    if not bool(values.isfinite().all()) or not bool(is_noise.all()):
        wrong = "noise" if bool(values.isfinite().all()) else "values"
        raise ValueError(
            f"{name} was given {what} with wrong {wrong} where it is measured; expected finite values "
            f"and a noise {least}. Correct it, or set the mask to 0 there."
        )
