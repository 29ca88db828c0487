"""The contract of a backbone, the network between the input and output maps of the tasks.

A backbone is one file here with a subclass of `Backbone`, `PrivateBackbone` or `PrivateBlocks`, and one row
in ups/config/model.py. It is built from (ModelConfig, task -> boundary of each axis) and called with

    x (batch, *tokens, width), condition (batch, width), task (name)

It returns the shape of x, for grids of one to three axes of any size and for any boundary. `condition`
encodes task, parameters, time step and boundary. Other parts read only these attributes:

- `is_repeated_layer` of a module: FSDP2 shards such layers one by one.
- `is_hidden_matrix` of a parameter: Muon optimizes it, AdamW the rest. The parameter is a matrix or a stack
  of matrices. A deep copy loses the mark.
- Private weights of a task are below a ModuleDict named `own`, with the task as key; all others are shared.
  `task_of` reads the task from that name; optimizer, gradient reduction and warm start depend on it.
- `fewest_tokens`: the smallest token grid along a periodic axis.

A warm start (ups/models/warm.py) copies weights of equal shapes.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.layers import Ends, Position

ANY = "any"  # the task of a network with a single unnamed task


def task_of(name: str) -> str | None:
    """The task that a parameter or buffer with this name is private to; None if it is shared."""
    names = name.split(".")
    return next(
        (after for before, after in zip(names, names[1:], strict=False) if before in ("heads", "own")), None
    )


class Backbone(nn.Module):
    """See the contract above."""

    fewest_tokens = 1

    def __init__(self, model: ModelConfig, tasks: Mapping[str, Ends]):
        super().__init__()

    def forward(self, x: Tensor, condition: Tensor, task: str = ANY) -> Tensor:
        raise NotImplementedError


class PrivateBackbone(Backbone):
    """A network per task that shares nothing with the others: dimensions and boundaries fix its layers.

    network: class built from (ModelConfig, boundary of each axis), called with (x, condition).
    """

    network: type[nn.Module]

    def __init__(self, model: ModelConfig, tasks: Mapping[str, Ends]):
        super().__init__(model, tasks)
        self.own = nn.ModuleDict({task: self.network(model, ends) for task, ends in tasks.items()})

    def forward(self, x: Tensor, condition: Tensor, task: str = ANY) -> Tensor:
        return self.own[task](x, condition)


class PrivateBlocks(Backbone):
    """Equal blocks per task, one after the other; the position along axes with walls is added first.

    block: class built from (ModelConfig, boundary of each axis), called with (x, condition). is_normed: ends
    in an RMS norm.
    """

    block: type[nn.Module]
    is_normed = True

    def __init__(self, model: ModelConfig, tasks: Mapping[str, Ends]):
        super().__init__(model, tasks)
        self.own = nn.ModuleDict()
        for task, ends in tasks.items():
            position = Position(model.width, ends)
            blocks = nn.ModuleList(self.block(model, ends) for _ in range(model.depth))
            self.own[task] = nn.ModuleDict({"position": position, "blocks": blocks})

    def forward(self, x: Tensor, condition: Tensor, task: str = ANY) -> Tensor:
        own = self.own[task]
        x = own["position"](x)
        for block in own["blocks"]:
            x = block(x, condition)
        return nn.functional.rms_norm(x, x.shape[-1:]) if self.is_normed else x
