"""Autoregressive rollouts of a one-call model, and the noise of ensembles of them."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ups.common.progress import beat
from ups_discovery.seeds import generator


@torch.no_grad()
def rollout(step: Callable[[Tensor, int], Tensor], context: Tensor, num_frames: int, history: int) -> Tensor:
    """The `num_frames` frames (batch, num_frames, ...) after `context` (batch, time, ...).

    step: maps the last `history` frames (batch, history, ...), and the number of frames that are done, to the
    next few (batch, bundle, ...). If one call is enough (steady tasks), its output may have another shape.
    Raises ValueError if the context is shorter than the history, or num_frames is below 1.
    """
    if num_frames < 1:
        raise ValueError(
            f"a rollout of {num_frames} frames is not possible; expected at least 1. Lower "
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
        new = step(window, done)
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
    """Standard normal noise (len(names), num_members, *shape), a function of (seed, key, name, lead) alone
    and not of the batch.

    Independent over names, members, leads and keys. names: of the trajectories, such as their row numbers.
    """
    return torch.stack(
        [torch.randn(num_members, *shape, generator=generator(seed, key, name, lead)) for name in names]
    )


def name_starts(rows: Sequence[int], u: Tensor) -> list[str]:
    """Names for `member_noise` of forecasts that start from u (batch, ...): row number and digest of the
    float32 state.

    A forecast that continues from its own last frame gets new noise; a repeated forecast gets the same noise.
    """
    states = u.detach().to("cpu", torch.float32) + 0.0  # turns -0.0 into 0.0
    states = torch.where(states.isnan(), 0.0, states).contiguous()  # masked cells
    return [
        f"{int(row)} {hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()}"
        for row, state in zip(rows, states, strict=True)
    ]


def in_blocks(function: Callable[[Tensor], Tensor], count: int, size: int) -> Tensor:
    """function(index) for the indices 0 .. count - 1, (count, ...), in blocks of exactly `size`; the last one
    is padded.

    Kernels round differently for different shapes, and in bfloat16 a last bit becomes 1e-3. In blocks of one
    shape, no row depends on the number of others.
    """
    blocks = [torch.arange(first, first + size).clamp_max(count - 1) for first in range(0, count, size)]
    return torch.cat([function(block) for block in blocks])[:count]
