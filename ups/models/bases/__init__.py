"""Base predictors: cheap one-call models that come before the network, exact where the equation allows it.

All act on normalised fields. Validation rollouts select one for each task (ups/models/base_selection.py); it
is stored with the model. A new base is one file here with a subclass of `Base` and one row in
ups/config/model.py."""

from pkgutil import resolve_name
from typing import Any

from ups.config.model import BASES
from ups.models.bases.base import Base


def base_class(kind: str) -> type[Base]:
    """The class of a base. Its file is imported here, so that weights import their own bases alone."""
    return resolve_name(f"{__name__}.{BASES[kind].implementation}")


def build_base(description: dict[str, Any]) -> Base:
    """An unfitted base from its kind and settings."""
    return base_class(description["kind"])(**description["settings"])
