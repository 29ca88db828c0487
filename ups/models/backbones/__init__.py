"""Backbones: networks that map a grid of tokens to one of the same shape. Contract: backbone.py."""

from collections.abc import Mapping
from pkgutil import resolve_name

from ups.config.model import BACKBONES, ModelConfig
from ups.models.backbones.backbone import ANY, Backbone
from ups.models.backbones.layers import Ends
from ups.tasks import Task
from ups_discovery.boundary import along


def build(model: ModelConfig, tasks: Mapping[str, Ends]) -> Backbone:
    """The backbone of `model.kind`; tasks: name -> boundary of each axis."""
    return resolve_name(f"{__name__}.{BACKBONES[model.kind]}")(model, tasks)


def backbone_of(model: ModelConfig, task: Task) -> Backbone:
    """A backbone for a single unnamed task."""
    return build(model, {ANY: along(task.boundary, task.ndim)})
