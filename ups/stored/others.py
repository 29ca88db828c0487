"""zarr and classic netCDF, by the libraries of that name where they are installed."""

import importlib
import itertools
import math
import os
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ups.stored.classic import require_length
from ups.stored.store import Store, Stored, checked, decoded, natural, require_unpackable

WHOLE: set[tuple[Path, str, int]] = set()   # arrays, with the time of their folder, that lack no chunk


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
        _require_files(path, path.stat().st_mtime_ns)
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
        key = self.path, name, self.path.stat().st_mtime_ns
        if key not in WHOLE and (missing := _missing_chunk(found, self.path)):
            raise ValueError(f"{self.path}: the chunk {missing} of {name} is missing and those beside it are "
                             "there; expected all, as zarr reads a missing one as its fill value. Write it "
                             "again, with zarr.config.set({'array.write_empty_chunks': True}) where zero.")
        WHOLE.add(key)
        named = getattr(found.metadata, "dimension_names", None) or found.attrs.get("_ARRAY_DIMENSIONS") or ()
        return Stored(tuple(found.shape), np.dtype(found.dtype), tuple(map(str, named)))

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        return checked(self.path, lambda: decoded(np.asarray(self._get(name)[index or ...]),
                                                  self._get(name).attrs), "zarr folder")

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self._get(name) if name else self.root
        return {} if found is None else dict(found.attrs)


@lru_cache(maxsize=256)
def _require_files(path: Path, _changed: int) -> None:
    """Raise ValueError for a folder in which anything is neither a file nor a folder: a pipe is waited at."""
    waiting, seen = [path], set()
    while waiting:
        here = waiting.pop()
        for entry in os.scandir(here):
            if entry.is_dir():
                if (place := (found := entry.stat()).st_dev, found.st_ino) not in seen:
                    seen.add(place)
                    waiting.append(Path(entry))
            elif not entry.is_file() and os.path.exists(entry):
                raise ValueError(f"{path} holds {Path(entry).relative_to(path)}, a pipe or a device; "
                                 "expected files and folders. Write that array again.")


def _missing_chunk(array: Any, path: Path) -> str:
    """The name of the first chunk of an array that is not stored, "" if there is none. zarr leaves out chunks
    of zeros, as those of a wall are, or of a field that is zero: where the same ones are missing all along
    the first axis, only their values say more (ups/data/written.py)."""
    stored = getattr(array, "shards", None) or array.chunks
    first, *rest = [range(-(-size // chunk)) for size, chunk in zip(array.shape, stored, strict=True)] or [()]
    names = [[array.metadata.encode_chunk_key((row, *others)) for others in itertools.product(*rest)]
             for row in first]
    is_there = np.array([[(path / array.path / name).exists() for name in row] for row in names], bool)
    is_odd = ~is_there & is_there.any(0) if len(names) else is_there
    return names[(at := np.argwhere(is_odd)[0])[0]][at[1]] if is_odd.any() else ""


class NetCdf(Store):
    def __init__(self, path: Path):
        super().__init__(path)
        load = library("netCDF4", path).Dataset
        checked(path, lambda: require_length(path), "netCDF file")
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
