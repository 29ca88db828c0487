"""zarr and classic netCDF, by the libraries of that name where they are installed."""

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ups.stored.store import Store, Stored, checked, decoded, natural, require_unpackable


def library(name: str, path: Path) -> ModuleType:
    """The library, or a ValueError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{path} needs the library {name}, which is not installed; expected it for such "
                         f"files. Run pip install {name}, or write the arrays as HDF5 or .npy.") from None


class Zarr(Store):
    def __init__(self, path: Path):
        super().__init__(path)
        self.library = library("zarr", path)
        self.root = checked(path, lambda: self.library.open(str(path), mode="r"), "zarr folder")
        self.is_single = self._is_array(self.root)

    def names(self) -> list[str]:
        if self.is_single:
            return [self.path.stem]
        return sorted(self._below(self.root, "", set()), key=natural)

    def _is_array(self, found: Any) -> bool:
        return isinstance(found, self.library.Array)

    def _below(self, group: Any, above: str, seen: set[Path]) -> list[str]:
        """Names of the arrays at and below a group; a folder that links lead to again is looked into once."""
        here = (self.path / above).resolve()
        if here in seen:
            return []
        seen.add(here)
        arrays = [f"{above}{name}" for name, _ in group.arrays()]
        return arrays + [name for key, inner in group.groups()
                         for name in self._below(inner, f"{above}{key}/", seen)]

    def _get(self, name: str) -> Any:
        if self.is_single:
            return self.root
        return self.root[name] if name in self.root else None

    def array(self, name: str) -> Stored | None:
        found = self._get(name)
        if found is None or not self._is_array(found):
            return None
        require_unpackable(self.path, name, math.prod(found.chunks) * np.dtype(found.dtype).itemsize)
        named = getattr(found.metadata, "dimension_names", None) or found.attrs.get("_ARRAY_DIMENSIONS") or ()
        return Stored(tuple(found.shape), np.dtype(found.dtype), tuple(map(str, named)))

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        return checked(self.path, lambda: decoded(np.asarray(self._get(name)[index or ...]),
                                                  self._get(name).attrs), "zarr folder")

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self._get(name) if name else self.root
        return {} if found is None else dict(found.attrs)


class NetCdf(Store):
    def __init__(self, path: Path):
        super().__init__(path)
        load = library("netCDF4", path).Dataset
        self.file = checked(path, lambda: load(str(path)), "netCDF file")
        self.file.set_auto_maskandscale(False)   # as packed, which is read as in HDF5
        self.fills = importlib.import_module("netCDF4").default_fillvals

    def close(self) -> None:
        self.file.close()

    def names(self) -> list[str]:
        return sorted(self.file.variables, key=natural)

    def array(self, name: str) -> Stored | None:
        found = self.file.variables.get(name)
        return None if found is None else Stored(tuple(found.shape), np.dtype(found.dtype),
                                                 tuple(found.dimensions))

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        return checked(self.path, lambda: self._read(name, index), "netCDF file")

    def _read(self, name: str, index: tuple) -> np.ndarray:
        found = np.asarray(self.file.variables[name][index or ...])
        fill = self.fills.get(found.dtype.str[1:]) if found.dtype.kind == "f" else None   # never written
        return decoded(found, self.attributes(name), fill)

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self.file.variables.get(name) if name else self.file
        return {} if found is None else {key: found.getncattr(key) for key in found.ncattrs()}
