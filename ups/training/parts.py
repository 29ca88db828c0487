"""Parts of tensors that are shared out over the ranks (FSDP2), and of checkpoints made of them.

Between steps everything is plain local tensors: `local(p)` is the part of a parameter, gradient or average
that this rank holds, and the same tensor where nothing is shared out, so optimizer, average and checkpoints
need no second version. Only Muon, which needs whole matrices, and the export gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STATE = ("model", "optimizer", "ema", "best_weights")   # of a checkpoint, what is shared out


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
    return DTensor.from_local(piece, parameter.device_mesh, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())


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
    tensors = {}
    for name, value in model.state_dict().items():
        tensor = whole(value, chosen.get(name, local(value)))
        if is_kept:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    return tensors


def load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill the model; tensors: this rank's parts.

    Raises RuntimeError or KeyError if they are another model's.
    """
    own = model.state_dict()
    model.load_state_dict({name: like(own[name], tensor) for name, tensor in tensors.items()})


def split(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """STATE of this rank as (what of the model is equal on all ranks, its part of the rest)."""
    model = state["model"]
    shards = {name: local(value) for name, value in model.items() if is_shared(value)}
    return {name: value for name, value in model.items() if name not in shards}, state | {"model": shards}


def joined(shared: dict[str, Any], own: dict[str, Any] | None, of_all: Callable[[], list[dict]],
           shapes: dict[str | int, torch.Size], mine: tuple[int, int] | None) -> dict[str, Any]:
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
            state = _each(lambda pieces, shape: cut(pieces[0], axis_of(shape, mine[1]), *mine).clone(),
                          [state], shapes)
    return state | {"model": shared["model"] | state["model"]}


def _each(function: Callable[[list[Tensor], torch.Size], Tensor], trees: list[Any],
          shapes: dict[str | int, torch.Size], shape: torch.Size | None = None) -> Any:
    """function(tensors, shape of their parameter) for every tensor of mappings that are built alike.

    What is a scalar or belongs to no parameter is the first's.
    """
    first = trees[0]
    if isinstance(first, dict):
        return {key: _each(function, [tree[key] for tree in trees], shapes, shapes.get(key, shape))
                for key in first}
    is_shared_out = isinstance(first, Tensor) and first.ndim and shape is not None
    return function(trees, shape) if is_shared_out else first


def shapes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str | int, torch.Size]:
    """Shape of every whole parameter, by its name and by its number in the optimizer's state."""
    numbered = (p for group in optimizer.param_groups for p in group["params"])
    named = {name: p.shape for name, p in model.named_parameters()}
    return named | {number: p.shape for number, p in enumerate(numbered)}
