"""Backbones: networks that map a grid of tokens to one of the same shape. Contract: backbone.py."""

from pkgutil import resolve_name

from ups.config import ModelConfig
from ups.config.backbones import BACKBONES as TABLE
from ups.models.backbones.backbone import ANY, Backbone
from ups.tasks import Task
from ups_discovery.boundary import along

BACKBONES: dict[str, type[Backbone]] = {
    name: resolve_name(f"{__name__}.{row}") for name, row in TABLE.items()
}


def backbone_of(model: ModelConfig, task: Task) -> Backbone:
    """A backbone for a single unnamed task."""
    return BACKBONES[model.kind](model, {ANY: along(task.boundary, task.ndim)})
