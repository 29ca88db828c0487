"""Warm start: copy the weights of a trained network into another one with other tasks or other data.

The trunk, which all tasks share, is copied. So are the private weights of a task in each block; a new task
gets the mean over the parent's tasks. The maps of a head act on the latents of its codec, and codecs are
fitted to the data. With the same codec the maps are copied, with another one they are translated:

    z = A z' + a  between the codecs, both linear in the normalised field,  so  W z + b = (W A) z' + (W a + b)
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from ups.data.tokenizer import Tokenizer
from ups.models.backbones.backbone import task_of
from ups.models.head import TaskHead
from ups.models.network import TaskNetwork
from ups.training.weights import load_stage

AS_IT_WAS, TRANSLATED = "as it was", "in the terms of its new codec"


def copy_weights(network: TaskNetwork, directory: Path, trunk_factor: float) -> str:
    """Copy the weights of the finished stage in `directory` into `network`; returns what was copied, in
    words.

    trunk_factor: multiple of the learning rates for the trunk; 0 freezes it. Raises FileNotFoundError or
    DamagedError for a stage that cannot be read.
    """
    parent = load_stage(directory, type(network), "stage", "Name another with init.")
    copy_trunk(network, parent)
    weights, given = network.state_dict(), parent.state_dict()
    for name, parameter in network.named_parameters():
        if is_trunk(name):
            parameter.lr_factor = trunk_factor
            parameter.requires_grad_(trunk_factor > 0)
    copied = {
        name: copy_head(network.heads[name], parent.heads[name])
        for name in network.names
        if name in parent.names
    }
    for name in copied:
        row, from_row = network.names.index(name), parent.names.index(name)
        weights["task_embedding"][row].copy_(given["task_embedding"][from_row])
    heads = ", ".join(f"{name} {copied.get(name) or 'anew'}" for name in network.names)
    rate = f"learns at {trunk_factor:g} of the rates" if trunk_factor else "stays as it is"
    return f"starts from {directory}: the trunk {rate}; heads: {heads}"


def is_trunk(name: str) -> bool:
    """Whether a tensor of a `TaskNetwork` with this name is shared by the tasks."""
    return task_of(name) is None and name != "task_embedding"


@torch.no_grad()
def copy_trunk(network: TaskNetwork, parent: TaskNetwork) -> None:
    """Copy the trunk, and the private weights in the blocks: for each task from the parent's task of the same
    name, else the mean over the parent's tasks.

    Weights stay as they are if no task of the parent has such weights, because its dimensions or boundaries
    differ.
    """
    given = parent.state_dict()
    for name, tensor in network.state_dict().items():
        task = task_of(name)
        if is_trunk(name):
            sources = [name]
        elif name.startswith("backbone."):
            others = [task] if task in parent.names else parent.names
            sources = [name.replace(f".own.{task}.", f".own.{other}.") for other in others]
        else:
            continue
        sources = [other for other in sources if other in given and given[other].shape == tensor.shape]
        if sources:
            tensor.copy_(torch.stack([given[other] for other in sources]).mean(0))


def copy_head(head: nn.Module, parent: nn.Module) -> str:
    """Copy the maps of another head of the same task; what was copied, in words, "" if they do not fit: of a
    `TaskHead` if history or patch differ. Its base and the statistics of a corrector's head stay as
    they were fitted.
    """
    if not isinstance(head, TaskHead):
        return copy_maps(head, parent)
    pairs = [(head.codec, parent.codec), (head.input_codec, parent.input_codec)]
    if head.task.forcing or parent.task.forcing:
        if head.forcing_codec is None or parent.forcing_codec is None:
            return ""
        pairs.append((head.forcing_codec, parent.forcing_codec))
    if (
        head.history != parent.history
        or dict(head.task.offsets) != dict(parent.task.offsets)
        or not all(can_translate(*pair) for pair in pairs)
    ):
        return ""
    if all(one.is_same(other) for one, other in pairs):
        return copy_maps(head, parent)
    translate_maps(head, parent)
    return TRANSLATED


def copy_maps(head: nn.Module, parent: nn.Module) -> str:
    """Copy the maps `into` and `out` of another head, and return what was copied, in words; "" if shapes
    differ.
    """
    pairs = list(
        zip(
            (*head.into.parameters(), *head.out.parameters()),
            (*parent.into.parameters(), *parent.out.parameters()),
            strict=True,
        )
    )
    if any(one.shape != other.shape for one, other in pairs):
        return ""
    with torch.no_grad():
        for one, other in pairs:
            one.copy_(other)
    return AS_IT_WAS


def can_translate(codec: Tokenizer, parent: Tokenizer) -> bool:
    """Whether both codecs map the same patches of the same fields."""
    return (codec.fields, codec.positive, codec.ndim, codec.patch) == (
        parent.fields,
        parent.positive,
        parent.ndim,
        parent.patch,
    )


def translation(codec: Tokenizer, parent: Tokenizer) -> tuple[Tensor, Tensor]:
    """(A (dim of parent, dim of codec), a) with z_parent = A z_codec + a for the same physical field."""
    cells = codec.patch**codec.ndim
    scale = (codec.std / parent.std).repeat_interleave(cells)
    offset = ((codec.mean - parent.mean) / parent.std).repeat_interleave(cells)
    return parent.basis.T @ (scale[:, None] * codec.basis), parent.basis.T @ offset


@torch.no_grad()
def translate_maps(head: nn.Module, parent: nn.Module) -> None:
    """Copy the maps of another `TaskHead` of the same task and history, for other codecs."""
    pairs = [(head.input_codec, parent.input_codec)] * head.history + [(head.codec, parent.codec)]
    if head.forcing_codec is not None:
        pairs += [(head.forcing_codec, parent.forcing_codec)] * 2
    maps = [translation(*pair) for pair in pairs]
    blocks = parent.into.weight.split([matrix.shape[0] for matrix, _ in maps], 1)
    head.into.weight.copy_(
        torch.cat([block @ matrix for block, (matrix, _) in zip(blocks, maps, strict=True)], 1)
    )
    head.into.bias.copy_(
        parent.into.bias + sum(block @ offset for block, (_, offset) in zip(blocks, maps, strict=True))
    )
    back, _ = translation(parent.codec, head.codec)  # for changes, which have no offset
    for name in ("weight", "bias"):
        getattr(head.out, name).copy_(back @ getattr(parent.out, name))
