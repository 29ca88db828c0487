"""Autoregressive rollouts: a one-call model fed its own predictions, alone or as an ensemble with noise of
its own per member."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.common.seeds import generator


@torch.no_grad()
def rollout(step: Callable[[Tensor], Tensor], context: Tensor, num_frames: int, history: int) -> Tensor:
    """The `num_frames` frames (batch, num_frames, ...) that follow `context` (batch, time, ...).

    step: maps the last `history` frames (batch, history, ...) to the next few (batch, bundle, ...); what it
    is shown and what it gives may differ in shape when one call is enough (steady tasks). Raises ValueError
    when the context is shorter than the history or no frame is asked for.
    """
    if num_frames < 1:
        raise ValueError(
            f"a rollout of {num_frames} frames was asked for; expected at least 1. Lower "
            f"evaluate.context_frames or keep more frames."
        )
    if context.shape[1] < history:
        raise ValueError(
            f"the context has {context.shape[1]} frames; expected at least the history of "
            f"{history}. Raise evaluate.context_frames or lower task.TASK.history."
        )
    frames, done = [], 0
    window = context[:, -history:]
    while done < num_frames:
        beat()
        new = step(window)
        frames.append(new)
        done += new.shape[1]
        if done < num_frames:
            window = torch.cat([window, new], 1)[:, -history:]
    return torch.cat(frames, 1)[:, :num_frames]


def member_noise(
    shape: Sequence[int],
    seed: int,
    names: Sequence[int | str],
    lead: int,
    num_members: int,
    key: str = "noise",
) -> Tensor:
    """Standard normal (len(names), num_members, *shape): of (seed, key, name, lead) alone, whatever the batch
    holds.

    Independent over names, members, leads and keys. names: of the trajectories, such as their row numbers.
    """
    return torch.stack(
        [torch.randn(num_members, *shape, generator=generator(seed, key, name, lead)) for name in names]
    )


def name_starts(rows: Sequence[int], u: Tensor) -> list[str]:
    """Names for `member_noise` of forecasts that start from u (batch, ...): the row number and a digest of
    the state, in float32. A forecast that goes on from its own last frame gets fresh noise; the same forecast
    made again gets the same."""
    states = u.detach().to("cpu", torch.float32) + 0.0  # -0.0 is 0.0
    states = torch.where(states.isnan(), 0.0, states).contiguous()  # cells of a mask
    return [
        f"{int(row)} {hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()}"
        for row, state in zip(rows, states, strict=True)
    ]


def in_blocks(function: Callable[[Tensor], Tensor], count: int, size: int) -> Tensor:
    """function(index) of 0 .. count - 1, (count, ...), always of `size` at once: the last block is filled up.

    Kernels round by the shape of what they are given, and bfloat16 makes 1e-3 of a last bit. In blocks of one
    shape no row depends on how many others there are.
    """
    blocks = [torch.arange(first, first + size).clamp_max(count - 1) for first in range(0, count, size)]
    return torch.cat([function(block) for block in blocks])[:count]


@torch.no_grad()
def ensemble_rollout(
    step: Callable[[Tensor, int], Tensor], context: Tensor, num_frames: int, history: int, num_members: int
) -> Tensor:
    """Members (batch, num_members, num_frames, ...) that follow `context` (batch, time, ...).

    step(window, lead): (batch * num_members, history, ...) to the next frames (batch * num_members, bundle,
    ...); members of a trajectory are neighbours, lead counts calls from 0. Raises as `rollout`.
    """
    calls, members = iter(range(num_frames)), context.repeat_interleave(num_members, 0)
    frames = rollout(lambda window: step(window, next(calls)), members, num_frames, history)
    return frames.unflatten(0, (-1, num_members))
