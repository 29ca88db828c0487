"""Warm start: copy the weights of a trained network into another one with other tasks or other data.

The trunk, which all tasks share, is copied. So are the private weights of a task in each block; a new task
gets the mean over the parent's tasks. The maps of a head act on the latents of its codec, which is fitted to
the data: they are copied if the codecs are the same.
"""

from pathlib import Path

import torch
from torch import nn

from ups.models.backbones.backbone import task_of
from ups.models.head import TaskHead
from ups.models.network import TaskNetwork
from ups.training.weights import load_stage

AS_IT_WAS = "as it was"


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
    """Copy the weights of another head of the same task; what was copied, in words, "" if they do not fit: of
    a `TaskHead` if history, bundle or codecs differ. Its base is copied only if the facts agree; the
    statistics of a corrector's head are not.
    """
    if not isinstance(head, TaskHead):
        return copy_maps(head, parent)
    pairs = [(head.codec, parent.codec), (head.input_codec, parent.input_codec)]
    if head.task.forcing or parent.task.forcing:
        if head.forcing_codec is None or parent.forcing_codec is None:
            return ""
        pairs.append((head.forcing_codec, parent.forcing_codec))
    if (
        (head.history, head.bundle) != (parent.history, parent.bundle)
        or dict(head.task.offsets) != dict(parent.task.offsets)
        or not all(one.is_same(other) for one, other in pairs)
    ):
        return ""
    if head.facts.undecided() == parent.facts.undecided():
        head.load_state_dict(parent.state_dict())
        return AS_IT_WAS
    return copy_maps(head, parent)


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
