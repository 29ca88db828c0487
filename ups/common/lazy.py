"""Modules that are imported when first used, for files that must import in a moment: torch takes seconds."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:

    class _Module:
        """A module whose attributes are looked up each time; it is imported for the first of them."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    np, torch, Tensor = _Module("numpy"), _Module("torch"), Any  # Tensor: for annotations only

__all__ = ["Tensor", "np", "torch"]
