"""The network of a stage: a backbone with a head per task."""

import operator
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from ups.config.model import ModelConfig
from ups.models import backbones
from ups.models.backbones.backbone import task_of
from ups.tasks import described_task
from ups_discovery.boundary import along


class TaskNetwork(nn.Module):
    """A backbone with a head and an embedding per task: the operator, a corrector.

    A private parameter of a task has the attribute `task` (ups/training/optim.py).

    description (JSON-able): model (keys of ModelConfig), precision ("no" or "bf16", inside the backbone),
    tasks (the descriptions of the heads, each with a name). The weights are loaded by a state_dict.
    """

    def __init__(self, description: dict[str, Any], head: Callable[[dict[str, Any], ModelConfig], nn.Module]):
        super().__init__()
        model, tasks = ModelConfig(**description["model"]), description["tasks"]
        if description["precision"] not in ("no", "bf16"):
            raise ValueError(f"its precision is {description['precision']!r:.80}; expected no or bf16")
        self._description, self.precision, self.width = description, description["precision"], model.width
        # call(function, *arguments), without gradients; of `Captured` on a GPU
        self.call: Callable[..., Any] = operator.call
        self.names = [task["name"] for task in tasks]
        self.heads = nn.ModuleDict({task["name"]: head(task, model) for task in tasks})
        self.backbone = backbones.build(
            model, {task.name: along(task.boundary, task.ndim) for task in map(described_task, tasks)}
        )
        self.task_embedding = nn.Parameter(torch.randn(len(tasks), model.width) * 0.02)
        for name, parameter in self.named_parameters():
            if (task := task_of(name)) is not None:
                parameter.task = task

    @property
    def description(self) -> dict[str, Any]:
        """What config.json stores; a network of the same class is built from it."""
        return self._description

    def served_on(self, device: torch.device | str) -> Self:
        """The network on `device`, in evaluation mode; a GPU replays what it computes."""
        self.to(device).eval()
        if (device := self.task_embedding.device).type == "cuda":
            from ups.common.graphs import Captured, CudaGraphs

            self.call = Captured(CudaGraphs.of(device), warnings.warn).evaluate
        return self
