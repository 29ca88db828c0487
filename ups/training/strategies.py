"""How ranks share the work of an update: three strategies with the same methods.

Agreed, the default: every rank holds the model; forward and backward pass communicate nothing. Afterwards the
gradients are summed together with each rank's status, so all ranks can repeat the batch. Overlapped
(ddp.overlap): DDP sums the gradients during the backward pass. Sharded (FSDP2): every rank holds a shard of
the model. In the last two a rank that fails leaves the others in a collective, so it ends all of them.

DDP and FSDP2 wrap the loss, with the model as its submodule, so a stage calls its model as always. DDP comes
from Accelerate's prepare_model. FSDP2 is torch's fully_shard, with the settings of
accelerate_configs/fsdp.yaml: Accelerate's prepare shards the first axis of every parameter, which leaves a
third of the weights on one of 8 ranks (docs/design.md), and wraps the optimizer. Parameters outside the
blocks are gathered when the loss begins, each block when it is called; both are resharded afterwards. The
collectives match because all ranks compute the same task, in equally many passes of equally many rows;
validation communicates nothing.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ups.training.sharding import is_sharded, local_shard, shard_axis

LossFunction = Callable[[slice], tuple[Tensor, dict[str, Tensor]]]  # rows -> (their mean loss, metrics)


@dataclass(frozen=True)
class SplitLoss:
    """A `LossFunction` in two parts, of which a GPU replays the second with its backward pass.

    read: rows -> arguments of compute, as of `Captured` (ups/common/graphs.py). compute: arguments -> (mean
    loss, metrics); it launches kernels alone, and is one object for all batches.
    """

    read: Callable[[slice], Sequence[Any]]
    compute: Callable[..., tuple[Tensor, dict[str, Tensor]]]

    def __call__(self, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return self.compute(*self.read(rows))


class Agreed:
    """Every rank holds the model and has computed its gradients when they are summed."""

    is_agreed = True  # whether ranks can agree to repeat a batch; else a rank that fails ends all
    is_sharded = False
    scale = 1  # of a loss, because torch divides sums of gradients by the number of ranks
    mode = why_alone = ""  # for messages

    def wrapped(self, function: LossFunction) -> LossFunction:
        """`function`, called so that gradients are reduced as this strategy does."""
        return function

    def synchronised(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Around a pass; is_last: of an update."""
        return contextlib.nullcontext()

    def to_sum(self, buffer: Tensor, counts: Tensor, first: int) -> Tensor:
        """The tensor to sum over ranks after the passes: the whole buffer, or its counts alone. buffer: the
        counts, of which the last is free, and from `first` on the gradients.
        """
        return buffer

    def norm(self, gradients: Tensor, last_count: Tensor) -> Tensor:
        """Norm of the whole gradient, after that sum."""
        return gradients.norm()

    def unshard(self) -> None:
        """From here on every rank holds all parameters, and calls of the model communicate nothing. A
        collective.
        """

    def reshard(self) -> None:
        """Undo `unshard`."""

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A checkpoint's state as (equal on all ranks, of this rank)."""
        return state, {}


def strategy_of(model: nn.Module, accelerator: Accelerator, is_overlapped: bool) -> Agreed:
    """The strategy that the launch and ddp.overlap select. A collective."""
    if is_fsdp_requested(accelerator):
        return Sharded(model, accelerator)
    return Overlapped(model, accelerator) if is_overlapped and accelerator.num_processes > 1 else Agreed()


class Loss(nn.Module):
    """The module that DDP and FSDP2 wrap: calls the loss function, and has the model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.values = model, {}

    def forward(self, loss_function: LossFunction, rows: slice) -> Tensor:
        loss, self.values = loss_function(rows)
        return loss


class Overlapped(Agreed):
    """DDP sums the gradients in the backward pass of an update's last pass. A collective."""

    is_agreed = False
    mode = "gradients are reduced in the backward pass (ddp.overlap)"
    why_alone = "with ddp.overlap, where ranks cannot agree to repeat a batch"

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.inner, self.scale = Loss(model), accelerator.num_processes
        self.outer = accelerator.prepare_model(self.inner)
        self.accelerator = accelerator

    def wrapped(self, function: LossFunction) -> LossFunction:
        return lambda rows: (self.outer(function, rows), self.inner.values)

    def synchronised(self, is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.outer)

    def to_sum(self, buffer: Tensor, counts: Tensor, first: int) -> Tensor:
        return counts


class Sharded(Agreed):
    """FSDP2: each repeated layer is a unit, and the rest of the model is one. A collective.

    Gradients are reduced to this rank's shards in every pass. Raises ValueError for a model that cannot be
    sharded.
    """

    is_agreed, is_sharded = False, True
    mode = "the model is sharded (FSDP)"
    why_alone = "with a sharded model, whose ranks cannot agree to repeat a batch"

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        plugin, device, world = accelerator.state.fsdp_plugin, accelerator.device, accelerator.num_processes
        layers = require_layers(model)
        marks = {name: vars(p) for name, p in model.named_parameters()}  # is_hidden_matrix, lr_factor
        self.inner, self.scale, self._reshards = Loss(model), world, bool(plugin.reshard_after_forward)
        mesh = init_device_mesh(device.type, (world,))
        self._units = [*reversed(layers), self.inner]
        for unit in self._units:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=self._reshards and unit is not self.inner,
                shard_placement_fn=lambda p: Shard(shard_axis(p.shape, world)),
            )
        for name, parameter in model.named_parameters():  # torch has replaced them
            vars(parameter).update(marks[name])
        # torch takes the first unit that is called for the root, and validation may call a layer first
        with torch.no_grad():
            self.inner(lambda _: (torch.zeros((), device=device), {}), slice(0))
        self.reshard()

    def wrapped(self, function: LossFunction) -> LossFunction:
        return lambda rows: (self.inner(function, rows), self.inner.values)

    def to_sum(self, buffer: Tensor, counts: Tensor, first: int) -> Tensor:
        counts[-1] = buffer[first:].norm().square()
        return counts

    def norm(self, gradients: Tensor, last_count: Tensor) -> Tensor:
        return last_count.sqrt()

    def unshard(self) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def reshard(self) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(self._reshards and unit is not self.inner, recurse=False)
            unit.reshard()
        # forget the layers that validation called: torch would prefetch them in the next backward pass, and
        # every rank has validated other tasks, whose layers may be private
        self.inner.reset_iter_state()

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        shards = {name: local_shard(value) for name, value in state["model"].items() if is_sharded(value)}
        equal = {name: value for name, value in state["model"].items() if name not in shards}
        return {"model": equal}, {"shards": state | {"model": shards}}


# ---------------------------------------------------------------- what FSDP2 requires


def is_fsdp_requested(accelerator: Accelerator) -> bool:
    """Whether the launch asks for FSDP, which Accelerate may have ignored (see `require_fsdp`)."""
    is_active = accelerator.state.distributed_type.value == "FSDP"
    return is_active or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def require_fsdp(accelerator: Accelerator, batch_size: int, is_overlapped: bool) -> None:
    """Raise ValueError if Accelerate did not make FSDP, or for settings that are not supported with it."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    state = accelerator.state
    if state.distributed_type.value != "FSDP":
        raise ValueError(
            f"FSDP was asked for and Accelerate made {state.distributed_type.value}; expected FSDP, which it "
            f"has for GPUs only. Use another file of accelerate_configs/, such as cpu2.yaml."
        )
    plugin = state.fsdp_plugin
    for setting, is_met in (
        ("fsdp_version: 2", plugin.fsdp_version == 2),
        ("fsdp_offload_params: false", not isinstance(plugin.cpu_offload, CPUOffloadPolicy)),
        ("fsdp_activation_checkpointing: false", not plugin.activation_checkpointing),
    ):
        if not is_met:
            raise ValueError(
                f"the launcher's fsdp_config has no {setting}; expected it, because UPS supports no other. "
                f"Use accelerate_configs/fsdp.yaml."
            )
    if is_overlapped:
        raise ValueError(
            "ddp.overlap is true and FSDP was asked for; expected one of them, because both reduce "
            "gradients. Set ddp.overlap=false."
        )
    if batch_size % state.num_processes:
        raise ValueError(
            f"the batch of {batch_size} rows does not divide into {state.num_processes} equal shards; "
            f"expected equal ones with FSDP, where all ranks make the same number of passes. Change "
            f"train.batch_size or the number of processes."
        )


def require_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of `model`, to shard one by one. Raises ValueError if there are none, or if a
    parameter is not float32.
    """
    other = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.float32}
    if other:
        raise ValueError(
            f"parameter {next(iter(other))} has type {next(iter(other.values()))}; expected float32 with "
            f"FSDP. Build the model in float32."
        )
    layers = [module for module in model.modules() if getattr(module, "is_repeated_layer", False)]
    if not layers:
        raise ValueError(
            "the model has no layer with is_repeated_layer; expected one, as FSDP shards these one by one. "
            "Set it in the class of the backbone's layers (ups/models/backbones/backbone.py)."
        )
    return layers
