"""Base predictors: cheap one-call models that come before the network, exact where the equation allows it.

All act on normalised fields. Validation rollouts select one for each task (ups/models/base_selection.py), or
one for each field (per_field.py); it is stored with the model. A new base is one file here with a subclass of
`Base` and one row in ups/config/bases.py."""

from importlib import import_module

from ups.config.bases import BASES as TABLE
from ups.models.bases.base import Base


def _import(implementation: str) -> type[Base]:
    module, name = implementation.split(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


BASES: dict[str, type[Base]] = {name: _import(row.implementation) for name, row in TABLE.items()}
