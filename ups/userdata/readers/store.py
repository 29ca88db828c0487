"""The common interface of all readers: arrays by name, their shapes, parts of them, and attributes."""

import fnmatch
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar
from zipfile import BadZipFile

from ups.common.files import DamagedError
from ups.common.lazy import np
from ups.common.text import require_plain_name
from ups.userdata.readers import budget

Names = TypeVar("Names", bound=Iterable[str])
MOST_CHUNK_BYTES = 2**28
MOST_RATIO = 500  # of an array to what is stored of it; fields have 1 to 20, zeros 1000
MOST_HELD_RATIO = 50  # of what is unpacked at once, into memory
# attributes that say which numbers the stored ones stand for
CODED = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
UNWRITTEN = 9.969209968386869e36  # of netCDF, where no number was written, unless an attribute names another
MARKS = ("zarr.json", ".zgroup", ".zarray")  # one of these lies in every folder of zarr
PARTS = ("real", "imag")  # of a complex array "psi", the arrays psi.real and psi.imag


@dataclass(frozen=True)
class Stored:
    """One array of a file. axes: the names of its axes, () if the file does not tell."""

    shape: tuple[int, ...]
    dtype: "np.dtype"
    axes: tuple[str, ...] = ()


def require_unpackable(path: Path, name: str, chunk: int, whole: int = 0, stored: int = 0) -> None:
    """Raise DamagedError if a compressed chunk, which is read at once, or a whole array unpacks to far more
    bytes than a field needs."""
    if chunk > MOST_CHUNK_BYTES:
        raise DamagedError(
            f"{path} holds {name} in compressed chunks of {chunk / 2**20:.0f} MiB; expected at most "
            f"{MOST_CHUNK_BYTES // 2**20}, as a chunk is read whole. Write it in smaller ones."
        )
    if whole > max(MOST_CHUNK_BYTES, MOST_RATIO * stored):
        raise DamagedError(
            f"{path} holds {name} of {whole / 2**20:.0f} MiB in {stored / 2**20:.3g}; expected a field, "
            f"which compresses to no less than 1/{MOST_RATIO}. Write what varies."
        )
    budget.allow(4 * chunk)  # unpacked by a library that doubles its buffers


def require_room(path: Path, num_bytes: int) -> None:
    """Raise DamagedError if arrays that are held in memory as a whole unpack to far more bytes than their
    file has. Else their room and time are granted."""
    size = path.stat().st_size
    if num_bytes > max(MOST_CHUNK_BYTES, MOST_HELD_RATIO * size):
        raise DamagedError(
            f"{path} unpacks to {num_bytes / 2**20:.0f} MiB from {size / 2**20:.3g}; expected at most "
            f"{MOST_HELD_RATIO} times its size, as it is unpacked as a whole. Write it as HDF5, or with "
            "numpy.savez."
        )
    budget.allow(2 * num_bytes, num_bytes)


def natural(name: str) -> list:
    """A key that sorts frame_2 before frame_10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def library(name: str, path: Path) -> ModuleType:
    """The library, or a ValueError that says how to get it."""
    try:
        is_new, found = name not in sys.modules, importlib.import_module(name)
        if is_new:
            budget.restart()
        return found
    except ImportError:
        raise ValueError(
            f"{path} needs the library {name}, which is not installed; expected it for such "
            f"files. Run pip install {name}, or write the arrays as HDF5 or .npy."
        ) from None


def decoded(values: "np.ndarray", about: Mapping[str, Any], path: Path) -> "np.ndarray":
    """Packed numbers, decoded by xarray from the attributes of their array (CF conventions, 8.1 and 2.5.1);
    missing ones are NaN."""
    coding = {name: np.ravel(about[name]) for name in CODED if name in about}
    if values.dtype.kind not in "fiu" or not coding:
        return values
    xarray = library("xarray", path)
    coded = xarray.Variable(
        [f"axis{number}" for number in range(values.ndim)],
        values,
        {name: value if name == "missing_value" else value[0] for name, value in coding.items()},
    )
    return xarray.conventions.decode_cf_variable("array", coded, decode_times=False).values


def without_unwritten(values: "np.ndarray") -> "np.ndarray":
    """Numbers of netCDF with NaN where none was written, if no attribute names another number for that."""
    is_unwritten = values == UNWRITTEN if values.dtype.kind == "f" else np.False_
    return np.where(is_unwritten, values.dtype.type(np.nan), values) if is_unwritten.any() else values


class Store:
    """An open file. names(): of all its arrays, of complex ones psi the parts psi.real and psi.imag;
    groups(pattern): what * stands for in a name such as "*/data";
    array(name), or None; read(name, index) with an integer or slice per axis; attributes of the file;
    attribute of an object: attribute("group@name").

    A kind of file gives _names, _array and _read, where complex arrays are whole.
    """

    is_single = False  # one array, which goes by any name
    used: tuple[float, int] = (0.0, 0)  # of its budget

    def __init__(self, path: Path):
        self.path = path
        self.lines: dict[str, np.ndarray | None] = {}  # name -> what `inspect_file.line_in` found
        self._found_arrays: dict[str, Stored | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, if one is held open."""

    def names(self) -> list[str]:
        return list(self.listed)

    def first_names(self) -> list[str]:
        """The names of some arrays at least, found in little time."""
        return self.names()

    @cached_property
    def listed(self) -> dict[str, Stored]:
        """Every array by its name, in natural order."""
        found = {}
        for name in self.plain(self._names()):
            whole = self._array(name)
            if whole.dtype.kind == "c":
                found |= {f"{name}.{part}": _real(whole) for part in PARTS}
            else:
                found[name] = whole
        return dict(sorted(found.items(), key=lambda item: natural(item[0])))

    def array(self, name: str) -> Stored | None:
        if name not in self._found_arrays:
            whole, part = self._part(name)
            found = self._array(whole)
            self._found_arrays[name] = _real(found) if part else found
        return self._found_arrays[name]

    def those(self, names: tuple[str, ...]) -> dict[str, Stored]:
        """Those of these arrays that the file holds."""
        found = {name: self.array(name) for name in names}
        return {name: array for name, array in found.items() if array is not None}

    def read(self, name: str, index: tuple = ()) -> "np.ndarray":
        whole, part = self._part(name)
        values = self._read(whole, index)
        return getattr(values, part) if part else values

    def _part(self, name: str) -> tuple[str, str]:
        """(The array that holds `name`, "real" or "imag", or "" for the whole array.)"""
        whole, _, part = name.rpartition(".")
        found = self._array(whole) if part in PARTS else None
        return (whole, part) if found is not None and found.dtype.kind == "c" else (name, "")

    def plain(self, names: Names) -> Names:
        """Names that the file gives to arrays, axes or attributes. Raises ValueError if one of them holds a
        control character."""
        for name in names:
            require_plain_name(name, str(self.path))
        return names

    def require_whole(self, name: str) -> None:
        """Raise ValueError if a part of an array was never written."""
        self._require_whole(self._part(name)[0])

    def whole(self, name: str) -> "np.ndarray":
        """All numbers of an array. Raises ValueError if a part of it was never written."""
        self.require_whole(name)
        return self.read(name)

    def _require_whole(self, name: str) -> None:
        """`require_whole` of a whole array; a kind of file that holds all of them needs none."""

    def allow(self, name: str, index: tuple = ()) -> None:
        """Grant `read` the room for the numbers that it gives, and the time to unpack the whole array."""
        if (found := self.array(name)) is not None:
            index = (*index, *[slice(None)] * (len(found.shape) - len(index)))
            num = found.dtype.itemsize
            for size, part in zip(found.shape, index, strict=True):
                num *= len(range(*part.indices(size))) if isinstance(part, slice) else 1
            budget.allow(4 * num, found.dtype.itemsize * math.prod(found.shape))

    def _names(self) -> list[str]:
        raise NotImplementedError

    def _array(self, name: str) -> Stored | None:
        raise NotImplementedError

    def _read(self, name: str, index: tuple) -> "np.ndarray":
        raise NotImplementedError

    def attributes(self, name: str = "") -> dict[str, Any]:
        """The attributes of the file, or of the array or group `name`."""
        return {}

    def groups(self, pattern: str) -> list[str]:
        """The names that stand for * in `pattern`, in natural order."""
        head, _, tail = pattern.partition("*")
        fitting = fnmatch.filter(self.names(), pattern)
        return sorted({name[len(head) : len(name) - len(tail)] for name in fitting}, key=natural)

    def runs(self, pattern: str) -> list[str]:
        """The arrays that `pattern` stands for, one of every group; itself without *."""
        return (
            [pattern.replace("*", group) for group in self.groups(pattern)] if "*" in pattern else [pattern]
        )

    def first(self, pattern: str) -> str:
        """`pattern` with the name of the first group in place of *."""
        return next(iter(self.runs(pattern)), pattern)

    def first_array(self, pattern: str) -> Stored | None:
        return self.array(self.first(pattern))

    def group_names(self, group: str) -> list[str]:
        """The names of the arrays and groups directly in a group."""
        return []

    def value(self, place: str) -> Any:
        """The number or array at `place`: an attribute of the file, "name@attribute" of an object, or an
        array; None if the file has none of these."""
        name, is_attribute, key = place.partition("@")
        if is_attribute:
            return self.attributes(name).get(key)
        found = self.attributes().get(place)
        if found is not None or self.array(place) is None:
            return found
        return self.whole(place)

    def listing(self, most: int = 8) -> str:
        """The arrays of the file and their shapes, in words."""
        names = self.names()
        listed = [f"{name} {self.array(name).shape}" for name in names[:most]]
        return f"{', '.join(listed) or 'no array'}{f' and {len(names) - most} more' * (len(names) > most)}"


def _real(found: Stored) -> Stored:
    return replace(found, dtype=np.zeros(0, found.dtype).real.dtype)


def reading(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a reader, `checked`."""

    @wraps(method)
    def found(self: Store, *arguments: Any) -> Any:
        return checked(self.path, lambda: method(self, *arguments), self.kind)

    return found


def checked(path: Path, action: Callable[[], Any], kind: str) -> Any:
    """action(), with the errors of a library for a damaged file as a ValueError that names the file."""
    try:
        return action()
    except (
        OSError,
        LookupError,
        RuntimeError,
        TypeError,
        ArithmeticError,
        ValueError,
        EOFError,
        BadZipFile,
    ) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is damaged, or no readable {kind} ({error}); expected a complete file. Write it again."
        ) from error
