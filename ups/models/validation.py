"""What the operator is kept and judged by while it trains: rollouts of held-out trajectories, from
latents."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ups.data.cache import Cache
from ups.models.operator import Operator

PARTS = {"network": "full", "base": "base"}


@torch.no_grad()
def squared_errors(operator: Operator, cache: Cache, rows: Tensor, context: int,
                   device: torch.device) -> Tensor:
    """Sums over `rows` and space of u_ref^2 and of the squared rollout errors of operator and base: (3, T,
    C), float64."""
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    if len(rows) == 0:   # fewer trajectories than processes
        return torch.zeros(1 + len(PARTS), num_frames, head.codec.num_channels, dtype=torch.float64,
                           device=device)
    given = cache.inputs(rows, device) if head.task.is_steady else cache.batch(rows, 0, context, device)
    u_ref = head.physical(cache.batch(rows, context, num_frames, device)).double()
    over = (0, *range(3, u_ref.ndim))
    sums = [u_ref.square().sum(over)]
    for part in PARTS.values():
        z_pred = operator.rollout(given, head.name, cache.parameters[rows], num_frames, part)
        sums.append((head.physical(z_pred).double() - u_ref).square().sum(over))
    return torch.stack(sums)


def pooled(sums: Tensor) -> dict[str, float]:
    """Pooled nRMSE of network and base, mean over frames and channels, from `squared_errors`; inf where one
    blew up."""
    reference, *squares = sums
    values = [float((square / reference).sqrt().mean()) for square in squares]
    return {name: value if math.isfinite(value) else math.inf
            for name, value in zip(PARTS, values, strict=True)}


def score_of(errors: dict[str, dict[str, float]]) -> float:
    """Geometric mean over tasks of the better of network and base; what early stopping and the export go
    by."""
    return math.exp(sum(math.log(max(min(e.values()), 1e-12)) for e in errors.values()) / len(errors))
