"""The training loss of the operator and its validation errors; both start from latents.

The loss is relative to the error of the base along an unrolled window. `squared_errors` of validation
rollouts are what ups/select.py selects by.
"""

import torch
from torch import Tensor

from ups.data.cache import Cache
from ups.metrics.mask import filled, valid_cells
from ups.models.bases.base import ParameterBatch
from ups.models.operator import Component, Operator
from ups.select import MODELS, ROUNDING

# Relative to the standard deviation of the field: a smaller error is not reduced further. float32 rollouts
# end an order of magnitude below it.
FLOOR = 1e-4


def is_worth_training(scale: Tensor) -> bool:
    """Whether the base leaves more than rounding to a network. scale: its RMS error in one call, per
    parameter value. Far below FLOOR a network still learns: diff_react2d has a scale of 1e-5 and a loss of
    1.000, and training halves the error of its rollouts.
    """
    return bool(scale.max() > ROUNDING)


def relative_error(z_pred: Tensor, z_ref: Tensor, z_base: Tensor, scale: Tensor) -> Tensor:
    """Mean over samples of |z_pred - z_ref| / sqrt((|z_ref - z_base|^2 + scale^2) / 2), RMS over tokens and
    dim.

    scale: (batch,). A value of 1 means that the network has learnt nothing beyond the base. Without the
    scale, samples would dominate that the base already solves; without FLOOR, those that it solves to
    rounding. Latents are orthonormal coordinates, so this is the error of the normalised field (Parseval).
    """
    axes = tuple(range(1, z_ref.ndim))
    error = (z_pred - z_ref).square().mean(axes) + FLOOR**2
    residual = (z_ref - z_base.detach()).square().mean(axes)
    return (2 * error / (residual + scale**2 + 2 * FLOOR**2)).sqrt().mean()


def relative_field_error(z_pred: Tensor, z_ref: Tensor) -> Tensor:
    """Mean over samples of |z_pred - z_ref| / |z_ref|; both (batch, time, *tokens, dim)."""
    axes = tuple(range(1, z_ref.ndim))
    ratio = (z_pred - z_ref).square().mean(axes) / z_ref.square().mean(axes).clamp_min(1e-8)
    return ratio.add(1e-12).sqrt().mean()


def operator_loss(
    operator: Operator, task: str, z: Tensor, z_ref: Tensor, parameters: ParameterBatch, field_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch of windows, and the detached errors of network and base.

    z (batch, history, ...): input frames; z_ref (batch, unroll * bundle, ...): the frames to predict by
    `unroll` calls in a row. The loss is the mean over calls of the network's relative error, that of a learnt
    base, and field_weight times that of the field; gradients flow through the rollout.
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
    operator: Operator,
    cache: Cache,
    rows: Tensor,
    context: int,
    device: torch.device,
    network: Component = "full",
) -> Tensor:
    """Sums over space (rows, 4, T, C), float64, of rollouts after the first `context` frames: u_ref^2, its
    squared distance from the mean of the training data, and the squared errors of operator and base.
    network: the operator's component that is compared with its base.
    """
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    predicted = head.task.predicted
    if len(rows) == 0:  # fewer trajectories than processes
        shape = (0, 2 + len(MODELS), num_frames, len(head.task.moving))
        return torch.zeros(shape, dtype=torch.float64, device=device)

    zeros = torch.zeros(1, 1, head.codec.num_channels, *[1] * head.task.ndim, device=device)
    mean = predicted(head.codec.denormalise(zeros).double())

    def sums(batch: Tensor) -> Tensor:
        z = cache.inputs(batch, device) if head.task.is_steady else cache.batch(batch, 0, context, device)
        u_ref = predicted(head.physical(cache.batch(batch, context, num_frames, device)).double())
        space, is_known = tuple(range(3, u_ref.ndim)), valid_cells(u_ref)
        forcing = head.forcing_of(cache, batch, context - 1, num_frames + 1)
        errors = [u_ref, u_ref - mean]
        for component in (network, "base"):
            z_pred = operator.rollout(z, head.name, cache.parameters[batch], num_frames, component, forcing)
            errors.append(predicted(head.physical(z_pred).double()) - u_ref)
        return torch.stack([filled(error.square(), is_known).sum(space) for error in errors], 1)

    return torch.cat([sums(batch) for batch in cache.row_blocks(rows, cache.num_frames, len(rows))])
