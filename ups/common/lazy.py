"""numpy, imported at its first use, for modules that must be imported quickly."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class _Module:
        """A module that is imported when its first attribute is read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            found = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, found)  # the next one is found without this method, 10 times as fast
            return found

    np = _Module("numpy")

__all__ = ["np"]
