"""numpy and torch, imported at their first use. Modules that must be imported quickly use them: torch takes
seconds."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:

    class _Module:
        """A module that is imported when its first attribute is read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    np, torch, Tensor = _Module("numpy"), _Module("torch"), Any  # Tensor: for annotations only

__all__ = ["Tensor", "np", "torch"]
