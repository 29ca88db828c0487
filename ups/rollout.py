"""Autoregressive rollouts: a one-call model fed its own predictions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def rollout(step: Callable[[Tensor], Tensor], context: Tensor, num_frames: int, history: int) -> Tensor:
    """The `num_frames` frames (batch, num_frames, ...) that follow `context` (batch, time, ...).

    step: maps the last `history` frames (batch, history, ...) to the next few (batch, bundle, ...); what it is shown and what
    it gives may differ in shape when one call is enough (steady tasks). Raises ValueError when the context is shorter than
    the history or no frame is asked for.
    """
    if num_frames < 1:
        raise ValueError(f"a rollout of {num_frames} frames was asked for; expected at least 1. Lower evaluate.context_frames or "
                         f"keep more frames.")
    if context.shape[1] < history:
        raise ValueError(f"the context has {context.shape[1]} frames; expected at least the history of {history}. "
                         f"Raise evaluate.context_frames or lower task.TASK.history.")
    frames, done = [], 0
    window = context[:, -history:]
    while done < num_frames:
        new = step(window)
        frames.append(new)
        done += new.shape[1]
        if done < num_frames:
            window = torch.cat([window, new], 1)[:, -history:]
    return torch.cat(frames, 1)[:, :num_frames]
