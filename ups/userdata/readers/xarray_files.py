"""netCDF, read by xarray, and zarr. Packed numbers are unpacked, missing ones are NaN; times stay numbers in
the units of their attribute."""

import itertools
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ups.userdata.readers.hdf5 import Hdf5
from ups.userdata.readers.store import Store, Stored, checked, decoded, library, require_unpackable

WHOLE: set[tuple[Path, str, int]] = set()  # arrays, with the time of their folder, that lack no chunk
UNWRITTEN = 9.969209968386869e36  # of netCDF, where no number was written, unless an attribute names another


class NetCdf(Store):
    """A netCDF file. engine: of xarray, "h5netcdf" for netCDF-4 and "scipy" for the classic formats."""

    def __init__(self, path: Path, engine: str):
        super().__init__(path)
        self.engine = engine
        library(engine, path)
        xarray = library("xarray", path)
        options = {
            "engine": engine,
            "decode_times": False,
            "decode_coords": False,
            "cache": False,
            "create_default_indexes": False,
        }
        if engine == "scipy":  # classic netCDF has no groups
            self.root = checked(path, lambda: xarray.open_dataset(path, **options), "netCDF file")
            self.arrays = dict(self.root.variables)
        else:
            with Hdf5(path) as file:
                file.require_netcdf()
            options["driver_kwds"] = {"locking": False}
            self.root = checked(path, lambda: xarray.open_datatree(path, **options), "netCDF file")
            self.arrays = {
                f"{place}/{name}".strip("/"): group.variables[name]
                for place, group in self.root.to_dict().items()
                for name in group.variables
            }

    def close(self) -> None:
        self.root.close()

    def _names(self) -> list[str]:
        return list(self.arrays)

    def _array(self, name: str) -> Stored | None:
        found = self.arrays.get(name)
        axes = () if found is None else self.plain(tuple(map(str, found.dims)))
        return None if found is None else Stored(found.shape, found.dtype, axes)

    def _read(self, name: str, index: tuple) -> np.ndarray:
        found = checked(self.path, lambda: np.asarray(self.arrays[name][index].values), "netCDF file")
        if found.dtype.kind == "f" and "_FillValue" not in self.arrays[name].encoding:
            return np.where(found == found.dtype.type(UNWRITTEN), found.dtype.type(np.nan), found)
        return found

    def _require_whole(self, name: str) -> None:
        if self.engine == "h5netcdf":  # scipy refuses a classic file that is too short
            with Hdf5(self.path) as file:
                file.require_whole(name)

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self.arrays.get(name) if name else self.root
        return {} if found is None else self.plain(dict(found.attrs))


class Zarr(Store):
    def __init__(self, path: Path):
        super().__init__(path)
        self.library = library("zarr", path)
        _require_files(path, path.stat().st_mtime_ns)
        self.root = checked(path, lambda: self.library.open(str(path), mode="r"), "zarr folder")
        self.is_single = self._is_array(self.root)

    def _names(self) -> list[str]:
        return [self.path.stem] if self.is_single else self._below(self.root, "", set())

    def _is_array(self, found: Any) -> bool:
        return isinstance(found, self.library.Array)

    def _below(self, group: Any, above: str, seen: set[Path]) -> list[str]:
        """Names of the arrays in a group and in its groups. A folder that links lead to again is listed
        once."""
        here = (self.path / above).resolve()
        if here in seen:
            return []
        seen.add(here)
        arrays = [f"{above}{name}" for name, _ in group.arrays()]
        return arrays + [
            name for key, inner in group.groups() for name in self._below(inner, f"{above}{key}/", seen)
        ]

    def _get(self, name: str) -> Any:
        if self.is_single:
            return self.root
        return self.root[name] if name in self.root else None

    def _array(self, name: str) -> Stored | None:
        found = self._get(name)
        if found is None or not self._is_array(found):
            return None
        require_unpackable(self.path, name, math.prod(found.chunks) * np.dtype(found.dtype).itemsize)
        named = getattr(found.metadata, "dimension_names", None) or found.attrs.get("_ARRAY_DIMENSIONS") or ()
        return Stored(tuple(found.shape), np.dtype(found.dtype), self.plain(tuple(map(str, named))))

    def _require_whole(self, name: str) -> None:
        key = self.path, name, self.path.stat().st_mtime_ns
        if key not in WHOLE and (missing := _missing_chunk(self._get(name), self.path)):
            raise ValueError(
                f"{self.path}: the chunk {missing} of {name} is missing and those beside it are "
                "there; expected all, as zarr reads a missing one as its fill value. Write it "
                "again, with zarr.config.set({'array.write_empty_chunks': True}) where zero."
            )
        WHOLE.add(key)

    def _read(self, name: str, index: tuple) -> np.ndarray:
        return checked(
            self.path,
            lambda: decoded(np.asarray(self._get(name)[index or ...]), self._get(name).attrs, self.path),
            "zarr folder",
        )

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self._get(name) if name else self.root
        return {} if found is None else self.plain(dict(found.attrs))


@lru_cache(maxsize=256)
def _require_files(path: Path, _changed: int) -> None:
    """Raise ValueError for a folder that holds anything but files and folders: reading a pipe never ends."""
    waiting, seen = [path], set()
    while waiting:
        here = waiting.pop()
        for entry in os.scandir(here):
            if entry.is_dir():
                if (place := (found := entry.stat()).st_dev, found.st_ino) not in seen:
                    seen.add(place)
                    waiting.append(Path(entry))
            elif not entry.is_file() and os.path.exists(entry):
                raise ValueError(
                    f"{path} holds {Path(entry).relative_to(path)}, a pipe or a device; "
                    "expected files and folders. Write that array again."
                )


def _missing_chunk(array: Any, path: Path) -> str:
    """The name of the first chunk of an array that is not stored, "" if there is none. zarr leaves out chunks
    of zeros, as those of a wall are, or of a field that is zero: where the same ones are missing all along
    the first axis, only their values say more (ups/data/written.py)."""
    stored = getattr(array, "shards", None) or array.chunks
    first, *rest = [range(-(-size // chunk)) for size, chunk in zip(array.shape, stored, strict=True)] or [()]
    names = [
        [array.metadata.encode_chunk_key((row, *others)) for others in itertools.product(*rest)]
        for row in first
    ]
    is_there = np.array([[(path / array.path / name).exists() for name in row] for row in names], bool)
    is_odd = ~is_there & is_there.any(0) if len(names) else is_there
    return names[(at := np.argwhere(is_odd)[0])[0]][at[1]] if is_odd.any() else ""
