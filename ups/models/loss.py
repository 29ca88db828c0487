"""The training loss of the operator and its validation errors, on normalised fields.

The loss is relative to the error of the base along an unrolled window. `squared_errors` of validation
rollouts are what ups/select.py selects by.
"""

import torch
from torch import Tensor

from ups.common.mask import filled, valid_cells
from ups.data.cache import Cache
from ups.models.bases.base import ParameterBatch
from ups.models.operator import Operator
from ups.select import MODELS, ROUNDING

# Relative to the standard deviation of the field: a smaller error is not reduced further. float32 rollouts
# end an order of magnitude below it.
LOSS_FLOOR = 1e-4


def is_worth_training(scale: Tensor) -> bool:
    """Whether the base leaves more than rounding to a network. scale: its RMS error in one call, per
    parameter value. Far below LOSS_FLOOR a network still learns: diff_react2d has a scale of 1e-5 and a loss
    of 1.000, and training halves the error of its rollouts.
    """
    return bool(scale.max() > ROUNDING)


def relative_errors(
    u_pred: Tensor, u_ref: Tensor, u_base: Tensor, scale: Tensor, factor: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Means over samples of |u_pred - u_ref| / sqrt((|u_ref - u_base|^2 + scale^2) / 2), RMS over kept modes,
    and of the same of the base, without a gradient.

    scale: (batch,). A value of 1 means that the network has learnt nothing beyond the base. Without the
    scale, samples would dominate that the base already solves; without LOSS_FLOOR, those that it solves to
    rounding. Modes are orthonormal: their sum of squares is that of the normalised field (Parseval). factor:
    values per mode, so that mean squares are those of the field, over the square of the unit of the errors.
    """
    axes = tuple(range(1, u_ref.ndim))
    error = (u_pred - u_ref).square().mean(axes) * factor + LOSS_FLOOR**2
    residual = (u_ref - u_base.detach()).square().mean(axes) * factor
    unit = residual + scale**2 + 2 * LOSS_FLOOR**2
    of_base = residual + LOSS_FLOOR**2
    return (2 * error / unit).sqrt().mean(), (2 * of_base / unit).sqrt().mean()


def operator_loss(
    operator: Operator, task: str, u: Tensor, u_ref: Tensor, parameters: ParameterBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch of windows, and the detached errors of network and base.

    u (batch, history, ...): input frames; u_ref (batch, calls, ...): the frames to predict by as
    many calls in a row. The loss is the mean over calls of the network's relative error; gradients flow
    through the rollout.
    """
    head = operator.heads[task]
    scale, values_per_mode = head.scale[parameters.index], head.codec.width / head.codec.dim
    loss, network, base = 0.0, 0.0, 0.0
    calls = u_ref.shape[1]
    for call in range(calls):
        full, u_base = operator.step(u, task, parameters.later(call))
        factor = values_per_mode
        if head.base.is_user_solver:
            factor = factor / head.base.size(u) ** 2
        of_network, of_base = relative_errors(full, u_ref[:, call : call + 1], u_base, scale, factor)
        loss, network, base = loss + of_network, network + of_network.detach(), base + of_base
        if call + 1 < calls:
            u = torch.cat([u, full], 1)[:, -head.history :]
    return loss / calls, {"network": network / calls, "base": base / calls}


@torch.no_grad()
def squared_errors(operator: Operator, cache: Cache, rows: Tensor, context: int) -> Tensor:
    """Sums over space (rows, 4, T, C), float64, of rollouts after the first `context` frames: u_ref^2, its
    squared distance from the mean of the training data, and the squared errors of operator and base.
    """
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    predicted, device = head.task.predicted, head.scale.device
    if len(rows) == 0:  # fewer trajectories than processes
        shape = (0, 2 + len(MODELS), num_frames, len(head.task.moving))
        return torch.zeros(shape, dtype=torch.float64, device=device)

    zeros = torch.zeros(1, 1, head.codec.num_channels, *[1] * head.task.ndim, device=device)
    mean = predicted(head.codec.denormalise(zeros).double())

    def sums(batch: Tensor) -> Tensor:
        u = head.input_codec.decode(cache.given(batch, context, device))
        u_ref = predicted(head.physical(cache.batch(batch, context, num_frames, device)).double())
        space, is_known = tuple(range(3, u_ref.ndim)), valid_cells(u_ref)
        forcing = head.forcing_of(cache, batch, context - 1, num_frames + 1)
        errors = [u_ref, u_ref - mean]
        for component in ("full", "base"):
            w = operator.forecast(u, head.name, cache.parameters[batch], num_frames, component, forcing)
            errors.append(predicted(head.codec.denormalise(w).double()) - u_ref)
        return torch.stack([filled(error.square(), is_known).sum(space) for error in errors], 1)

    return torch.cat([sums(batch) for batch in cache.row_blocks(rows, cache.num_frames, len(rows))])
