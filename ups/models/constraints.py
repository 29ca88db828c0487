"""What every prediction of a task must satisfy, whatever its base or network says: one class per condition.

    w = constraint(w, w_start)

w (batch, time, C, *space) is a prediction and w_start (batch, C, *space) the frame before it, both
normalised. A head holds the constraints that its task needs (`TaskHead.constraints`) and applies them to the
base and to the operator. An exact prediction is not changed, and gradients flow through.

What the equation conserves (means of conserved channels; mass, energy and momentum of a gas) is restored by
one number per frame and channel, added to the whole channel, or to the logarithm of a positive one, which
stays positive.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ups.common.mask import filled
from ups.tasks import Task
from ups_discovery.spectral import FieldTransform

GAMMA = 5 / 3  # adiabatic index of PDEBench's gas
TINY = 1e-30
MIN_RESTORED = 0.5  # factor on a pressure: a larger error than this is not one of the energy alone
Constraint = Callable[[Tensor, Tensor], Tensor]


def constraints_of(head: nn.Module) -> tuple[Constraint, ...]:
    """The constraints of a head, in the order in which they apply; those without effect are absent. A steady
    task has no bounds: a single call cannot blow up, and the solution of a new coefficient may be outside the
    range of the others."""
    task = head.task
    wanted = (
        (Bounds, not task.is_steady),
        (StartRange, bool(task.bounded)),
        (FixedFields, bool(task.still)),
        (Conserved, head.facts.is_conservative),
        (Masked, head.codec.valid is not None),
    )
    return tuple(kind(head) for kind, is_needed in wanted if is_needed)


class Bounds:
    """Values stay between `low` and `high` of the head, the widened range of the training data, so no rollout
    blows up."""

    def __init__(self, head: nn.Module):
        self.head, self.shape = head, head.codec.channel_shape

    def __call__(self, w: Tensor, w_start: Tensor) -> Tensor:
        return torch.clamp(w, self.head.low.view(self.shape), self.head.high.view(self.shape))


class StartRange:
    """Bounded fields stay in their range in the valid cells of the start. Normalisation keeps the order of
    values."""

    def __init__(self, head: nn.Module):
        self.codec, self.space = head.codec, tuple(range(3, 3 + head.task.ndim))
        self.is_bounded = [name in head.task.bounded for name in head.task.fields]

    def __call__(self, w: Tensor, w_start: Tensor) -> Tensor:
        low, high = (filled(w_start[:, None], self.codec.valid, end) for end in (torch.inf, -torch.inf))
        low, high = low.amin(self.space, keepdim=True), high.amax(self.space, keepdim=True)
        inside = torch.minimum(torch.maximum(w, low), high)
        is_bounded = torch.tensor(self.is_bounded, device=w.device)
        return torch.where(is_bounded[(...,) + (None,) * len(self.space)], inside, w)


class FixedFields:
    """The fields that are constant in time are those of the start."""

    def __init__(self, head: nn.Module):
        self.num_moving = len(head.task.moving)

    def __call__(self, w: Tensor, w_start: Tensor) -> Tensor:
        fixed = w_start[:, None, self.num_moving :].expand(-1, w.shape[1], *[-1] * (w.ndim - 2))
        return torch.cat([w[:, :, : self.num_moving], fixed], 2)


class Conserved:
    """What the data conserve is that of the start: see `correction`.

    A mean is restored in normalised units, if the field is normalised without a logarithm.
    """

    def __init__(self, head: nn.Module):
        task = head.task
        self.task, self.codec, self.names = task, head.codec, head.conserved
        self.space, self.is_conserved = tuple(range(3, 3 + task.ndim)), [n in self.names for n in task.fields]
        is_gas = task.is_gas and bool(task.conserved)
        self.is_linear = not (is_gas or {*self.names} & {*task.positive}) and head.codec.valid is None

    def __call__(self, w: Tensor, w_start: Tensor) -> Tensor:
        if self.is_linear:
            change = w_start[:, None].mean(self.space, keepdim=True) - w.mean(self.space, keepdim=True)
            if not all(self.is_conserved):
                columns = zip(self.is_conserved, change.unbind(2), strict=True)
                change = torch.stack([c if is_kept else torch.zeros_like(c) for is_kept, c in columns], 2)
            return w + change
        u, u_start = self.codec.denormalise(w), self.codec.denormalise(w_start)
        change = correction(self.task, self.names, u, u_start, self.codec.valid) / self.codec.std
        return w + change[(...,) + (None,) * len(self.space)]


class Masked:
    """Cells without a value are 0, their value in normalised fields."""

    def __init__(self, head: nn.Module):
        self.codec = head.codec

    def __call__(self, w: Tensor, w_start: Tensor) -> Tensor:
        return self.codec.masked(w)


class WaveBounds(nn.Module):
    """No shell of waves of the operator is stronger than both the strongest of the training trajectories,
    widened, and that of the base. A network is fitted to strong waves; weak ones that it amplifies a little
    in every call would rule a long rollout.

    Raises ValueError unless the head's facts have a number for every moving field and shell.
    """

    def __init__(self, head: nn.Module):
        super().__init__()
        waves, num = head.facts.waves, len(head.task.moving)
        self.shells = Shells(head.codec.space, head.task.boundary)
        if [len(row) for row in waves] != [count := len(self.shells)] * num:
            raise ValueError(
                f"the weights of {head.name} have bounds for {[len(row) for row in waves]!s:.80} shells of "
                f"waves; expected {count} for each of {num} fields. Take another copy of them."
            )
        self.register_buffer("most", torch.tensor(waves), persistent=False)

    def forward(self, w: Tensor, w_base: Tensor) -> Tensor:
        """w (batch, time, C, *space) within the bounds; the same bits if it was."""
        num, transform = len(self.most), self.shells.transform
        moving, base = w[:, :, :num], w_base[:, :, :num]
        most = torch.maximum(self.most, self.shells(base))
        excess = (1 - most / self.shells(moving)).clamp_min(0)[..., self.shells.shells]
        return torch.cat([moving - transform.inverse(excess * transform(moving)), w[:, :, num:]], 2)


class Shells(nn.Module):
    """The size of a field (..., *space) in every shell of waves: (..., shells), the root of their sum of
    squares. A shell has the |k| that round up to one number, so the mean has its own."""

    def __init__(self, space: Sequence[int], boundary: str):
        super().__init__()
        self.transform = FieldTransform(tuple(space), boundary)
        shells = self.transform.wave_numbers.ceil().long()
        members = shells.argsort(stable=True).split(shells.bincount().tolist())
        waves = nn.utils.rnn.pad_sequence(members, batch_first=True, padding_value=len(shells))
        self.register_buffer("waves", waves, persistent=False)  # (shells, most waves in one), filled up
        self.register_buffer("shells", shells, persistent=False)  # (waves,)
        self.register_buffer("count", self.transform.multiplicity, persistent=False)

    def forward(self, w: Tensor) -> Tensor:
        power = nn.functional.pad(self.count * self.transform(w).abs().square(), (0, 1))
        return (power[..., self.waves].sum(-1) + TINY).sqrt()

    def __len__(self) -> int:
        return len(self.waves)


def correction(
    task: Task, conserved: Sequence[str], u: Tensor, u_start: Tensor, valid: Tensor | None = None
) -> Tensor:
    """What to add (batch, T, C) to each channel of u (batch, T, C, *space), or to the logarithm of a positive
    one, to restore the invariants of u_start (batch, C, *space): the means of the conserved fields, or those
    of the task. Physical units. valid (C, *space): the cells inside the domain (None: all); the others are
    NaN.
    """
    u_start = u_start[:, None]
    if task.is_gas and task.conserved:
        return gas_correction(u, u_start)
    space = tuple(range(3, u.ndim))
    mean = torch.mean if valid is None else torch.nanmean
    now, then = mean(u, space), mean(u_start, space).expand(u.shape[:3])
    changes = []
    for name, a, b in zip(task.fields, now.unbind(2), then.unbind(2), strict=True):
        if name not in conserved:
            changes.append(torch.zeros_like(a))
        else:
            changes.append(b.log() - a.log() if name in task.positive else b - a)
    return torch.stack(changes, 2)


def densities(task: Task, u: Tensor) -> Tensor:
    """Densities (n, T, K, *space) of u (n, T, C, *space) whose means over space the task conserves."""
    return gas_densities(u) if task.is_gas else u[:, :, [*map(task.fields.index, task.conserved)]]


def gas_densities(u: Tensor) -> Tensor:
    """(density, energy, momentum) of (density, pressure, velocity), (n, T, C, *space)."""
    density, pressure, velocity = u[:, :, :1], u[:, :, 1:2], u[:, :, 2:]
    square = sum(part * part for part in velocity.split(1, 2))
    return torch.cat([density, pressure / (GAMMA - 1) + 0.5 * density * square, density * velocity], 2)


def gas_correction(u: Tensor, u_start: Tensor) -> Tensor:
    """The correction (n, T, C) that gives u = (density, pressure, velocity), (n, T, C, *space), in a closed
    domain the mass, energy and momentum of u_start (n, 1, C, *space).

    It is added to the logarithms of density and pressure and to the velocity. The pressure changes by at most
    the factor MIN_RESTORED or its inverse.
    """
    space = tuple(range(3, u.ndim))
    every = (...,) + (None,) * len(space)
    mass, energy, momentum = gas_densities(u_start).mean(space).split([1, 1, u.shape[2] - 2], 2)
    density, pressure, velocity = u[:, :, :1], u[:, :, 1:2], u[:, :, 2:]
    thinner = mass / density.mean(space)
    density = density * thinner[every]
    faster = (momentum - (density * velocity).mean(space)) / mass
    motion = 0.5 * (density * (velocity + faster[every]).square()).sum(2, keepdim=True).mean(space)
    hotter = (GAMMA - 1) * (energy - motion) / pressure.mean(space)
    return torch.cat([thinner.log(), hotter.clamp(MIN_RESTORED, 1 / MIN_RESTORED).log(), faster], 2)
