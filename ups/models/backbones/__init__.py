"""Backbones: networks that map a grid of tokens to one of the same shape. Contract: backbone.py."""

from importlib import import_module

from ups.common.boundary import along
from ups.config import ModelConfig
from ups.config.backbones import BACKBONES as TABLE
from ups.models.backbones.backbone import ANY, Backbone
from ups.tasks import Task


def _import(implementation: str) -> type[Backbone]:
    module, name = implementation.split(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


BACKBONES: dict[str, type[Backbone]] = {name: _import(row) for name, row in TABLE.items()}


def backbone_of(model: ModelConfig, task: Task) -> Backbone:
    """A backbone for a single unnamed task."""
    return BACKBONES[model.kind](model, {ANY: along(task.boundary, task.ndim)})
