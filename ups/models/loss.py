"""The training loss of the operator, relative to the error of its base along an unrolled window, and the
errors of rollouts of held-out trajectories, by which `ups.models.selection` selects. Both start from latents.
"""

import math

import torch
from torch import Tensor

from ups.data.cache import Cache
from ups.metrics.mask import filled, known_cells
from ups.models.bases.base import ParameterBatch
from ups.models.operator import Operator

# of the field's spread; an error this small is left alone: float32 rollouts end an order below it
FLOOR = 1e-4
PARTS = {"network": "full", "base": "base"}  # of the operator: name in the log -> part of a rollout


def relative_error(z_pred: Tensor, z_ref: Tensor, z_base: Tensor, scale: Tensor) -> Tensor:
    """Mean over samples of |z_pred - z_ref| / sqrt((|z_ref - z_base|^2 + scale^2) / 2), RMS over tokens and
    dim.

    scale (batch,). In units of what the base leaves: about 1 means that nothing was learnt. The scale keeps
    samples that the base already solves from dominating, FLOOR those that it solves to rounding. Latents are
    orthonormal coordinates, so this is the error of the normalised field (Parseval).
    """
    axes = tuple(range(1, z_ref.ndim))
    error = (z_pred - z_ref).square().mean(axes) + FLOOR**2
    residual = (z_ref - z_base.detach()).square().mean(axes)
    return (2 * error / (residual + scale**2 + 2 * FLOOR**2)).sqrt().mean()


def relative_field_error(z_pred: Tensor, z_ref: Tensor) -> Tensor:
    """Mean over samples of |z_pred - z_ref| / |z_ref|; both (batch, time, *tokens, dim)."""
    axes = tuple(range(1, z_ref.ndim))
    return (
        ((z_pred - z_ref).square().mean(axes) / z_ref.square().mean(axes).clamp_min(1e-8))
        .add(1e-12)
        .sqrt()
        .mean()
    )


def operator_loss(
    operator: Operator, task: str, z: Tensor, z_ref: Tensor, parameters: ParameterBatch, field_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a window: z (batch, history, ...) shown, z_ref (batch, unroll * bundle, ...) to predict, call
    after call; parameters: `TaskHead.parameter_batch` of its rows.

    The sum of the network's relative error, the learnt base's own and field_weight times that of the field,
    averaged over the calls; gradients flow through the rollout. Returns it with the detached errors of
    network and base.
    """
    head = operator.heads[task]
    scale = head.scale[parameters.index]
    loss, network, base = 0.0, 0.0, 0.0
    calls = z_ref.shape[1] // head.bundle
    for call in range(calls):
        target = z_ref[:, call * head.bundle : (call + 1) * head.bundle]
        full, z_base = operator.predict(z, task, parameters.later(call * head.bundle))
        network_error = relative_error(full, target, z_base, scale)
        base_error = relative_error(z_base, target, z_base, scale)
        loss = (
            loss
            + network_error
            + (base_error if head.base.is_learnt else 0.0)
            + field_weight * relative_field_error(full, target)
        )
        network, base = network + network_error.detach(), base + base_error.detach()
        if call + 1 < calls:
            z = torch.cat([z, full], 1)[:, -head.history :]
    return loss / calls, {"network": network / calls, "base": base / calls}


@torch.no_grad()
def squared_errors(
    operator: Operator, cache: Cache, rows: Tensor, context: int, device: torch.device
) -> Tensor:
    """Sums over space of u_ref^2, of its squared distance from the mean of the training data, and of the
    squared rollout errors of operator and base: (rows, 4, T, C), float64."""
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    predicted = head.task.predicted
    if len(rows) == 0:  # fewer trajectories than processes
        return torch.zeros(
            0, 2 + len(PARTS), num_frames, len(head.task.moving), dtype=torch.float64, device=device
        )

    zeros = torch.zeros(1, 1, head.codec.num_channels, *[1] * head.task.ndim, device=device)
    mean = predicted(head.codec.denormalise(zeros).double())

    def sums(some: Tensor) -> Tensor:
        given = cache.inputs(some, device) if head.task.is_steady else cache.batch(some, 0, context, device)
        u_ref = predicted(head.physical(cache.batch(some, context, num_frames, device)).double())
        over, is_known = tuple(range(3, u_ref.ndim)), known_cells(u_ref)
        forcing = head.forcing_of(cache, some, context - 1, num_frames + 1)
        errors = [u_ref, u_ref - mean]
        for part in PARTS.values():
            z_pred = operator.rollout(given, head.name, cache.parameters[some], num_frames, part, forcing)
            errors.append(predicted(head.physical(z_pred).double()) - u_ref)
        return torch.stack([filled(error.square(), is_known).sum(over) for error in errors], 1)

    return torch.cat([sums(some) for some in cache.row_blocks(rows, cache.num_frames, len(rows))])


def pooled(sums: Tensor) -> dict[str, float]:
    """Pooled nRMSE of network and base, mean over frames and those channels that are not zero throughout,
    from `squared_errors`; inf where one blew up."""
    reference, _, *squares = sums.sum(0)
    values = [float((square / reference)[reference > 0].sqrt().mean()) for square in squares]
    return {
        name: value if math.isfinite(value) else math.inf for name, value in zip(PARTS, values, strict=True)
    }
