"""What the operator is trained on, errors relative to what its base leaves along an unrolled window; and what
it is kept and judged by meanwhile, rollouts of held-out trajectories. Both from latents."""

import math

import torch
from torch import Tensor

from ups.data.cache import Cache
from ups.metrics.errors import ERROR
from ups.metrics.intervals import compare
from ups.models.bases.base import Known
from ups.models.operator import Operator

# of the field's spread; an error this small is left alone: float32 rollouts end an order below it
FLOOR = 1e-4
NUM_BOOTSTRAP = 1000
SHARES = (1.0, 0.5)   # of what the network says; half is the better where it learnt little (ns_incom2d)
# nRMSE of a lead at which the truth is lost, as verdicts say it (a quarter of the energy is wrong), and a bit
# more than that of another state of the same system, sqrt(2) where the mean is zero
LOST, CHANCE = 0.5, 1.5
JUDGED = 4   # times as many trajectories decide whether the network serves as judge it on the way
PARTS = {"network": "full", "base": "base"}   # of the operator: name in the log -> part of a rollout


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
    return ((z_pred - z_ref).square().mean(axes)
            / z_ref.square().mean(axes).clamp_min(1e-8)).add(1e-12).sqrt().mean()


def operator_loss(operator: Operator, task: str, z: Tensor, z_ref: Tensor, known: Known,
                  field_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a window: z (batch, history, ...) shown, z_ref (batch, unroll * bundle, ...) to predict, call
    after call; known: `TaskHead.known` of its rows.

    The sum of the network's relative error, the learnt base's own and field_weight times that of the field,
    averaged over the calls; gradients flow through the rollout. Returns it with the detached errors of
    network and base.
    """
    head = operator.heads[task]
    scale = head.scale[known.index]
    loss, network, base = 0.0, 0.0, 0.0
    calls = z_ref.shape[1] // head.bundle
    for call in range(calls):
        target = z_ref[:, call * head.bundle : (call + 1) * head.bundle]
        full, z_base = operator.predict(z, task, known)
        network_error = relative_error(full, target, z_base, scale)
        base_error = relative_error(z_base, target, z_base, scale)
        loss = (loss + network_error + (base_error if head.base.is_learnt else 0.0)
                + field_weight * relative_field_error(full, target))
        network, base = network + network_error.detach(), base + base_error.detach()
        if call + 1 < calls:
            z = torch.cat([z, full], 1)[:, -head.history :]
    return loss / calls, {"network": network / calls, "base": base / calls}


@torch.no_grad()
def squared_errors(operator: Operator, cache: Cache, rows: Tensor, context: int,
                   device: torch.device) -> Tensor:
    """Sums over space of u_ref^2 and of the squared rollout errors of operator and base: (rows, 3, T, C),
    float64."""
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    predicted = head.task.predicted
    if len(rows) == 0:   # fewer trajectories than processes
        return torch.zeros(0, 1 + len(PARTS), num_frames, len(head.task.moving), dtype=torch.float64,
                           device=device)

    def sums(some: Tensor) -> Tensor:
        given = cache.inputs(some, device) if head.task.is_steady else cache.batch(some, 0, context, device)
        u_ref = predicted(head.physical(cache.batch(some, context, num_frames, device)).double())
        over = tuple(range(3, u_ref.ndim))
        squares = [u_ref.square().sum(over)]
        for part in PARTS.values():
            z_pred = operator.rollout(given, head.name, cache.parameters[some], num_frames, part)
            squares.append((predicted(head.physical(z_pred).double()) - u_ref).square().sum(over))
        return torch.stack(squares, 1)

    return torch.cat([sums(some) for some in cache.parts(rows, cache.num_frames, len(rows))])


def pooled(sums: Tensor) -> dict[str, float]:
    """Pooled nRMSE of network and base, mean over frames and those channels that are not zero throughout,
    from `squared_errors`; inf where one blew up."""
    reference, *squares = sums.sum(0)
    values = [float((square / reference)[reference > 0].sqrt().mean()) for square in squares]
    return {name: value if math.isfinite(value) else math.inf
            for name, value in zip(PARTS, values, strict=True)}


def followed(sums: Tensor) -> Tensor:
    """`squared_errors` in which a lead whose pooled nRMSE is between LOST and CHANCE has LOST.

    Where chaos or noise has taken over a forecast of the mean has 0.7 of the error of one that goes on as the
    system does, so whole rollouts prefer what knows nothing. What is worse than chance has blown up, and
    counts.
    """
    reference, *squares = sums.sum(0)
    relative = (torch.stack(squares) / reference).sqrt()
    is_lost = (relative > LOST) & (relative < CHANCE)
    return torch.cat([sums[:, :1], sums[:, 1:] * torch.where(is_lost, LOST / relative, 1.0).square()], 1)


def is_better(sums: Tensor, groups: Tensor, seed: int) -> bool:
    """Whether the network's rollouts, by `squared_errors`, are better than its base's by more than chance:
    the whole 95 % interval of the ratio of their errors is below 1, by the mean of relative errors and by the
    pooled one.

    groups (rows,): trajectories of one initial condition, drawn together. Paired: both on the same draws.
    """
    reference, network, base = (part.sqrt().cpu() for part in sums.unbind(1))
    ratios = [compare(ERROR[name], {"rmse": network, "ref_rms": reference},
                      {"rmse": base, "ref_rms": reference}, NUM_BOOTSTRAP, seed, groups)
              for name in ("nrmse", "nrmse_pooled")]
    return all(ratio["high"] is not None and ratio["high"] < 1 for ratio in ratios)


def best_share(found: dict[float, Tensor], groups: Tensor, seed: int) -> tuple[float, Tensor]:
    """Of `squared_errors` by the share of what the network says, (the share that is to serve, its errors):
    the best by the pooled error while the truth is `followed`, or 0 where that is not better than the base by
    more than chance."""
    judged = {share: followed(sums) for share, sums in found.items()}
    share = min(judged, key=lambda share: pooled(judged[share])["network"])
    return share if is_better(judged[share], groups, seed) else 0.0, found[share]


def score_of(found: dict[str, Tensor]) -> float:
    """Geometric mean over tasks of the better of network and base while the truth is `followed`, from
    `squared_errors`; what early stopping and the export go by."""
    errors = [min(pooled(followed(sums)).values()) for sums in found.values()]
    return math.exp(sum(math.log(max(error, 1e-12)) for error in errors) / len(errors))
