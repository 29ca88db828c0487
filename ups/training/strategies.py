"""How the ranks share the work of an update: three strategies with the same verbs, one of which a run has.

Agreed, the default: every rank holds the model, and nothing is communicated in forward and backward pass. The
gradients are summed afterwards together with what happened on each rank, so all can agree to repeat the
batch. Overlapped (ddp.overlap): torch's DDP sums the gradients during the backward pass. Sharded (FSDP2):
every rank holds a part of the model. In both a rank that fails leaves others in a collective: no agreement,
it ends them.

Sharded: the root that torch shards is the loss with the model's parameters as its own, so a stage calls its
model as always: what is outside the blocks is gathered when the loss begins, each block when it is called,
and both are let go again. Blocks and setting come from the launcher (accelerate_configs/fsdp.yaml), the
wrapping is torch's fully_shard itself: Accelerate's prepare would cast heads and scales, which compute in
float32, to bfloat16, and wrap the optimizer. Every parameter is divided along the first axis that divides
evenly (spectral weights begin with an axis of 2), else along the first. What ranks gather pairs, because all
do the same task in a step, in equally many passes of equally many rows; validation gathers nothing.

Between steps everything is plain local tensors: `local(p)` is the part of a parameter, gradient or average
that this rank holds, and the same tensor where nothing is shared out, so optimizer, average and checkpoints
need no second version. Only Muon, which needs whole matrices, and the export gather.
"""

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# FSDP2 and DTensor take almost a second to import, so they are imported where they are used
if TYPE_CHECKING:
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

LossFunction = Callable[[slice], tuple[Tensor, dict[str, Tensor]]]  # rows -> (their mean loss, metrics)
STATE = ("model", "optimizer", "ema", "best_weights")  # of a checkpoint, what is shared out


def is_shared(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which every rank holds a part."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, in the same memory; all of it where it is not shared out."""
    return tensor.to_local().detach() if is_shared(tensor) else tensor


def like(parameter: Tensor, piece: Tensor) -> Tensor:
    """`piece`, this rank's part, as a tensor that is shared out as `parameter` is."""
    if not is_shared(parameter):
        return piece
    from torch.distributed.tensor import DTensor

    # shape and stride are given because torch would take them from this rank's part, and parts may be unequal
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(parameter: Tensor, piece: Tensor) -> Tensor:
    """All of a tensor that is shared out as `parameter` is and of which this rank holds `piece`.

    A collective.
    """
    tensor = like(parameter, piece)
    return tensor.full_tensor() if is_shared(tensor) else tensor


def part(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole `tensor`, to be shared out as `parameter` is."""
    if not is_shared(parameter):
        return tensor
    mesh = parameter.device_mesh
    return cut(tensor, parameter.placements[0].dim, mesh.get_local_rank(), mesh.size())


def cut(tensor: Tensor, axis: int, rank: int, world: int) -> Tensor:
    """Part `rank` of `world` along `axis`: equal ones, the last ones smaller or empty (torch.chunk)."""
    size = tensor.shape[axis]
    each = -(-size // world)
    first = min(rank * each, size)
    return tensor.narrow(axis, first, min(each, size - first))


def axis_of(shape: torch.Size, world: int) -> int:
    """Axis along which a parameter is shared out over `world` ranks."""
    return next((axis for axis, size in enumerate(shape) if size % world == 0), 0)


# ---------------------------------------------------------------- checkpoints and the export


def gathered(model: nn.Module, chosen: dict[str, Tensor], is_kept: bool) -> dict[str, Tensor]:
    """The model's whole tensors, in main memory, where `is_kept`. chosen: this rank's part of what takes
    their place. A collective.
    """
    tensors = (
        (name, whole(value, chosen.get(name, local(value)))) for name, value in model.state_dict().items()
    )
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors if is_kept}


def joined(
    shared: dict[str, Any],
    own: dict[str, Any] | None,
    of_all: Callable[[], list[dict]],
    shapes: dict[str | int, torch.Size],
    mine: tuple[int, int] | None,
) -> dict[str, Any]:
    """STATE of a checkpoint as this rank holds it, however many ranks wrote it and whether or not they shared
    the model out.

    shared: equal on all ranks; own: this rank's part, None if another number of ranks wrote it; of_all():
    those of all ranks. shapes: see `shapes_of`. mine: (rank, number of ranks) if the model is shared out now,
    else None.
    """
    was_sharded = shared.get("is_sharded", False)
    if was_sharded and mine and own is not None:
        state = own["shards"]
    else:
        state = {name: shared[name] for name in STATE if name in shared}
        if was_sharded:
            found = [entry["shards"] for entry in of_all()]
            state = _each(lambda pieces, shape: torch.cat(pieces, axis_of(shape, len(found))), found, shapes)
        if mine:
            state = _each(
                lambda pieces, shape: cut(pieces[0], axis_of(shape, mine[1]), *mine).clone(), [state], shapes
            )
    return state | {"model": shared["model"] | state["model"]}


def _each(
    function: Callable[[list[Tensor], torch.Size], Tensor],
    trees: list[Any],
    shapes: dict[str | int, torch.Size],
    shape: torch.Size | None = None,
) -> Any:
    """function(tensors, shape of their parameter) for every tensor of mappings that are built alike.

    What is a scalar or belongs to no parameter is the first's.
    """
    first = trees[0]
    if isinstance(first, dict):
        return {
            key: _each(function, [tree[key] for tree in trees], shapes, shapes.get(key, shape))
            for key in first
        }
    is_shared_out = isinstance(first, Tensor) and first.ndim and shape is not None
    return function(trees, shape) if is_shared_out else first


def shapes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str | int, torch.Size]:
    """Shape of every whole parameter, by its name and by its number in the optimizer's state."""
    numbered = (p for group in optimizer.param_groups for p in group["params"])
    named = {name: p.shape for name, p in model.named_parameters()}
    return named | {number: p.shape for number, p in enumerate(numbered)}


# ---------------------------------------------------------------- strategies


class Agreed:
    """Every rank holds the model, and is done with its gradients when they are summed."""

    is_agreed = True  # whether ranks can agree to repeat a batch; else one that fails ends all
    is_sharded = False
    scale = 1  # of a loss: torch divides sums of gradients by the world
    mode = why_alone = ""  # in words

    def loss(self, function: LossFunction, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        """function(rows), called so that gradients are shared as this strategy does."""
        return function(rows)

    def synchronised(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Around a pass, the last of an update or not."""
        return contextlib.nullcontext()

    def to_sum(self, buffer: Tensor, counts: Tensor) -> Tensor:
        """What is summed over ranks after the passes: counts with the gradients behind them, or counts
        alone."""
        return buffer if self.is_agreed else counts

    def norm(self, gradients: Tensor, squares: Tensor) -> Tensor:
        """Norm of the whole gradient; squares: the sum over ranks of `squares`."""
        return gradients.norm()

    def squares(self, gradients: Tensor) -> Tensor | float:
        return 0.0

    def hold_whole(self) -> None:
        """From here on every rank holds all parameters, and calls of the model communicate nothing.

        A collective.
        """

    def share_out(self) -> None:
        """Let go of what other ranks hold too; as before `hold_whole`."""

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A checkpoint's state as (what is equal on all ranks, what is this one's)."""
        return state, {}


class Loss(nn.Module):
    """What DDP and FSDP2 are given to call: the loss function, with the model's parameters as its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.values = model, {}

    def forward(self, loss_function: LossFunction, rows: slice) -> Tensor:
        loss, self.values = loss_function(rows)
        return loss


class Overlapped(Agreed):
    """Gradients are summed by DDP in the backward pass of an update's last pass.

    Building it is a collective.
    """

    is_agreed = False
    mode = "gradients are reduced in the backward pass (ddp.overlap)"
    why_alone = "with ddp.overlap, where ranks cannot agree to repeat a batch"

    def __init__(self, model: nn.Module, world: int) -> None:
        self.inner, self.scale = Loss(model), world
        self.outer = DistributedDataParallel(
            self.inner, find_unused_parameters=True, forward_sync_buffers=False
        )

    def loss(self, function: LossFunction, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return self.outer(function, rows), self.inner.values

    def synchronised(self, is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if is_last else self.outer.no_sync()


class Sharded(Agreed):
    """The model shared out: its blocks, and as one unit what is outside them. Building it is a collective.

    Gradients are summed, and each rank left with its part, in every pass. Raises ValueError for a model that
    it cannot be done with.
    """

    is_agreed, is_sharded = False, True
    mode = "the model is sharded (FSDP)"
    why_alone = "with a sharded model, whose ranks cannot agree to repeat a batch"

    def __init__(
        self, model: nn.Module, plugin: "FullyShardedDataParallelPlugin", device: torch.device, world: int
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        other = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.float32}
        if other:
            raise ValueError(
                f"parameter {next(iter(other))} has type {next(iter(other.values()))}; expected "
                f"float32 with FSDP. Build the model in float32."
            )
        names = plugin.transformer_cls_names_to_wrap
        blocks = [module for module in model.modules() if type(module).__name__ in names]
        if not blocks:
            raise ValueError(
                f"the model has no module of class {' or '.join(names)} "
                f"(fsdp_transformer_layer_cls_to_wrap); expected one. Use "
                f"accelerate_configs/fsdp.yaml."
            )
        marks = {name: vars(p) for name, p in model.named_parameters()}  # is_hidden_matrix, lr_factor
        self.inner, self.scale, self._frees = Loss(model), world, bool(plugin.reshard_after_forward)
        mesh = init_device_mesh(device.type, (world,))
        self._units = [*reversed(blocks), self.inner]
        for unit in self._units:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=self._frees and unit is not self.inner,
                shard_placement_fn=lambda p: Shard(axis_of(p.shape, world)),
            )
        for name, parameter in model.named_parameters():  # torch made new ones
            vars(parameter).update(marks[name])
        # the first that is called is taken for the root, and validation may come before training
        with torch.no_grad():
            self.inner(lambda _: (torch.zeros((), device=device), {}), slice(0))
        self.share_out()

    def loss(self, function: LossFunction, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return self.inner(function, rows), self.inner.values

    def norm(self, gradients: Tensor, squares: Tensor) -> Tensor:
        return squares.sqrt()

    def squares(self, gradients: Tensor) -> Tensor | float:
        return gradients.norm().square()

    def hold_whole(self) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def share_out(self) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(self._frees and unit is not self.inner, recurse=False)
            unit.reshard()

    def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        mine = {name: local(value) for name, value in state["model"].items() if is_shared(value)}
        equal = {name: value for name, value in state["model"].items() if name not in mine}
        return {"model": equal}, {"shards": state | {"model": mine}}


def strategy_of(
    model: nn.Module,
    plugin: "FullyShardedDataParallelPlugin | None",
    is_overlapped: bool,
    device: torch.device,
    world: int,
) -> Agreed:
    """What was asked for; one process alone has nothing to overlap. A collective."""
    if plugin is not None:
        return Sharded(model, plugin, device, world)
    return Overlapped(model, world) if is_overlapped and world > 1 else Agreed()


def plugin_of(
    state: "AcceleratorState", batch_size: int, is_overlapped: bool
) -> "FullyShardedDataParallelPlugin | None":
    """The launcher's setting of FSDP2, None if it was not asked for.

    Raises ValueError if it cannot be had as asked for.
    """
    is_active = state.distributed_type.value == "FSDP"
    if not is_active and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if not is_active:
        raise ValueError(
            f"FSDP was asked for and Accelerate made {state.distributed_type.value}; expected "
            f"FSDP, which it has for GPUs only. Use another file of accelerate_configs/, such "
            f"as cpu2.yaml."
        )
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = state.fsdp_plugin
    wanted = {
        "fsdp_version: 2": plugin.fsdp_version == 2,
        "fsdp_offload_params: false": not isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_activation_checkpointing: false": not plugin.activation_checkpointing,
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP": bool(plugin.transformer_cls_names_to_wrap),
    }
    rows = (  # whether it is as it must be, the error
        *(
            (
                is_met,
                f"the launcher's fsdp_config has no {setting}; expected that, the only one that is built. "
                f"Use accelerate_configs/fsdp.yaml.",
            )
            for setting, is_met in wanted.items()
        ),
        (
            not is_overlapped,
            "ddp.overlap is true and FSDP was asked for; expected one of them, for each "
            "reduces gradients in its own way. Set ddp.overlap=false.",
        ),
        (
            batch_size % state.num_processes == 0,
            f"the batch of {batch_size} rows does not divide into {state.num_processes} equal shares; "
            f"expected "
            f"that with FSDP, where every rank must compute as many passes as the others. Change "
            f"train.batch_size or the number of processes.",
        ),
    )
    for is_met, why in rows:
        if not is_met:
            raise ValueError(why)
    return plugin
