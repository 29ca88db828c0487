"""Tensors of which each rank holds a shard (DTensor), and a checkpoint's state in shards.

Between steps everything is plain local tensors. `local_shard` of a parameter, gradient or average is this
rank's shard, and the tensor itself if the model is not sharded, so optimizer, average and checkpoints need no
second version. Only Muon, which needs whole matrices, and the export gather. A parameter is sharded along its
first axis that divides evenly among the ranks, because spectral weights begin with an axis of 2; if no axis
does, along the first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STATE = ("model", "optimizer", "ema", "best_weights")  # the sharded entries of a checkpoint


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which every rank holds a shard."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of `tensor`, in the same memory; the tensor itself if it is not sharded."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor


def as_sharded(parameter: Tensor, shard: Tensor) -> Tensor:
    """`shard`, which this rank holds, as a tensor sharded like `parameter`."""
    return _distributed(parameter, shard) if is_sharded(parameter) else shard


def full_tensor(parameter: Tensor, shard: Tensor) -> Tensor:
    """The whole tensor, sharded like `parameter`, of which this rank holds `shard`. A collective."""
    return _distributed(parameter, shard).full_tensor() if is_sharded(parameter) else shard


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, sharded like `parameter`."""
    mesh = parameter.device_mesh
    return shard_of(tensor, parameter.placements[0].dim, mesh.get_local_rank(), mesh.size())


def _distributed(parameter: Tensor, shard: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # takes almost a second to import

    # torch would derive shape and stride from this rank's shard, but shards may be unequal
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shard_of(tensor: Tensor, axis: int, rank: int, world: int) -> Tensor:
    """Shard `rank` of `world` along `axis`; the last ones may be smaller or empty (as in torch.chunk)."""
    size = tensor.shape[axis]
    each = -(-size // world)
    first = min(rank * each, size)
    return tensor.narrow(axis, first, min(each, size - first))


def shard_axis(shape: torch.Size, world: int) -> int:
    """Axis along which a parameter is sharded over `world` ranks."""
    return next((axis for axis, size in enumerate(shape) if size % world == 0), 0)


# ---------------------------------------------------------------- checkpoints and the export


def full_weights(model: nn.Module, shards: dict[str, Tensor], is_kept: bool) -> dict[str, Tensor]:
    """Name -> whole tensor of the model, in main memory; empty unless `is_kept`. A collective.

    shards: this rank's shards of weights that replace the model's own.
    """
    tensors = (
        (name, full_tensor(value, shards.get(name, local_shard(value))))
        for name, value in model.state_dict().items()
    )
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors if is_kept}


def local_state(
    shared: dict[str, Any],
    own: dict[str, Any] | None,
    read_all: Callable[[], list[dict]],
    shapes: dict[str | int, torch.Size],
    place: tuple[int, int] | None,
) -> dict[str, Any]:
    """The entries STATE of a checkpoint for this rank. The number of ranks and the mode may have changed.

    shared: the file that is equal on all ranks; own: this rank's file, None if the number of ranks changed;
    read_all(): the files of all ranks. shapes: of `shapes_of`. place: (rank, world) if the model is sharded
    now, else None.
    """
    was_sharded = shared.get("is_sharded", False)
    if was_sharded and place and own is not None:
        state = own["shards"]
    else:
        state = {name: shared[name] for name in STATE if name in shared}
        if was_sharded:
            shards = [entry["shards"] for entry in read_all()]
            state = _map_tensors(
                lambda tensors, shape: torch.cat(tensors, shard_axis(shape, len(shards))), shards, shapes
            )
        if place:
            state = _map_tensors(
                lambda tensors, shape: shard_of(tensors[0], shard_axis(shape, place[1]), *place).clone(),
                [state],
                shapes,
            )
    return state | {"model": shared["model"] | state["model"]}


def _map_tensors(
    function: Callable[[list[Tensor], torch.Size], Tensor],
    trees: list[Any],
    shapes: dict[str | int, torch.Size],
    shape: torch.Size | None = None,
) -> Any:
    """function(tensors, shape of their parameter) for the tensors at each place of equally built mappings.

    Scalars and values that belong to no parameter are taken from the first mapping.
    """
    first = trees[0]
    if isinstance(first, dict):
        return {
            key: _map_tensors(function, [tree[key] for tree in trees], shapes, shapes.get(key, shape))
            for key in first
        }
    has_shards = isinstance(first, Tensor) and first.ndim and shape is not None
    return function(trees, shape) if has_shards else first


def shapes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str | int, torch.Size]:
    """Shape of every whole parameter, by its name and by its number in the optimizer's state."""
    numbered = (p for group in optimizer.param_groups for p in group["params"])
    named = {name: p.shape for name, p in model.named_parameters()}
    return named | {number: p.shape for number, p in enumerate(numbered)}
