"""Files whose arrays are mapped or read at once: NumPy's .npy and .npz, MATLAB's up to version 7 and torch's.
An .npy file holds one array, which has any name."""

import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ups.common.files import DamagedError, is_out_of_memory
from ups.userdata.readers.store import Store, Stored, checked, library, require_room, require_unpackable

MOST_HEADER_BYTES = 10_000  # of an array, as NumPy takes at most
HEADER_BYTES = 30  # of a file within a zip, before its name and its extra field, whose lengths end it
# bytes of a number in an array of MATLAB
MATLAB_NUMBERS = {"double": 8, "single": 4, "logical": 1} | {
    f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)
}


class Arrays(Store):
    """Arrays in memory or mapped; a single one has any name."""

    def __init__(self, path: Path, parts: Mapping[str, np.ndarray]):
        super().__init__(path)
        self.parts = parts

    def _get(self, name: str) -> np.ndarray | None:
        return next(iter(self.parts.values())) if self.is_single else self.parts.get(name)

    def _names(self) -> list[str]:
        return list(self.parts)

    def _array(self, name: str) -> Stored | None:
        found = self._get(name)
        return None if found is None else Stored(found.shape, found.dtype)

    def _read(self, name: str, index: tuple) -> np.ndarray:
        return np.array(self._get(name)[index])


class Npy(Arrays):
    is_single = True

    def __init__(self, path: Path):
        with path.open("rb") as file:
            rows = checked(path, lambda: _array(path, file, path.name), ".npy file")
        super().__init__(path, {path.stem: rows})


class Npz(Arrays):
    def __init__(self, path: Path):
        super().__init__(path, checked(path, lambda: dict(_members(path)), ".npz file"))
        found = path.stat()
        checked(path, lambda: _require_unchanged(path, found.st_size, found.st_mtime_ns), ".npz file")


class Matlab(Arrays):
    """A MATLAB file of version 5; those of 7.3 are HDF5."""

    def __init__(self, path: Path):
        io = library("scipy.io", path)
        sizes = checked(path, lambda: io.whosmat(path), "MATLAB file")
        wanted = {
            name: MATLAB_NUMBERS[kind] * math.prod(shape)
            for name, shape, kind in sizes
            if kind in MATLAB_NUMBERS
        }
        if not wanted:
            held = ", ".join(f"{name} ({kind})" for name, _, kind in sizes[:8]) or "nothing"
            raise ValueError(
                f"{path} holds {held}; expected arrays of numbers. In MATLAB: x = full(S) of a sparse "
                "matrix, x = table2array(T), x = obj.field; then save('x.mat', 'x')."
            )
        require_room(path, sum(wanted.values()))
        found = checked(path, lambda: io.loadmat(path, variable_names=[*wanted]), "MATLAB file")
        super().__init__(path, {name: found[name] for name in wanted})


class Torch(Arrays):
    """What torch.save wrote: a tensor, or dicts and lists of them. No other object is made of it."""

    def __init__(self, path: Path):
        size = path.stat().st_size
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
        require_room(path, size)
        torch = library("torch", path)
        try:
            found = torch.load(path, "cpu", weights_only=True)
            self.is_single = isinstance(found, torch.Tensor)
            parts = dict(_tensors(path, found, path.stem if self.is_single else "", set()))
        except DamagedError:
            raise
        except (
            pickle.UnpicklingError,
            RuntimeError,
            EOFError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            if is_out_of_memory(error):  # torch allocates what a file declares before it reads that
                raise MemoryError from error
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{path} holds more than tensors, or is cut off ({cause:.100}); expected a tensor, or dicts "
                "and lists of tensors: nothing else is unpickled. Save these alone with torch.save."
            ) from None
        super().__init__(path, parts)


def _tensors(path: Path, found: Any, name: str, seen: set[int]) -> Iterator[tuple[str, np.ndarray]]:
    """(Place, array) of a tensor, or of dicts and lists of tensors. A dict or list in several places is
    listed once."""
    if hasattr(found, "detach"):
        num_bytes, stored = found.numel() * found.element_size(), found.untyped_storage().nbytes()
        require_unpackable(path, name, 0, num_bytes, stored)  # one number may stand for many
        wide = found.float() if str(found.dtype) == "torch.bfloat16" else found  # NumPy has none
        yield name, wide.numpy(force=True)
    elif id(found) not in seen:
        seen.add(id(found))
        inner = enumerate(found) if isinstance(found, list | tuple) else getattr(found, "items", tuple)()
        for key, part in inner:
            yield from _tensors(path, part, f"{name}/{key}".strip("/"), seen)


def _members(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of an .npz file: mapped, or unpacked where they are compressed."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries, seen = archive.infolist(), set()
        require_room(path, sum(one.file_size for one in entries if one.compress_type != zipfile.ZIP_STORED))
        for entry in entries:
            name, size = entry.filename.removesuffix(".npy"), entry.file_size
            if name in seen or {"..", ""} & {*re.split(r"[/\\\\]", name)}:
                raise ValueError(
                    f"{path} holds an array called {entry.filename!r:.200}{', twice' * (name in seen)}; "
                    "expected plain names that differ. Write it again with numpy.savez."
                )
            seen.add(name)
            if entry.compress_type == zipfile.ZIP_STORED:
                file.seek(entry.header_offset + HEADER_BYTES - 4)
                lengths = np.frombuffer(file.read(4), "<u2")
                file.seek(int(lengths.sum()), 1)
                yield name, _array(path, file, entry.filename, size)
                continue
            with archive.open(entry) as member:
                yield name, _array(path, member, entry.filename, size, is_mapped=False)


def _array(path: Path, file: IO[bytes], name: str, size: int = 0, is_mapped: bool = True) -> np.ndarray:
    """The array whose header is next in `file`, mapped or read. size: bytes of header and array, if known.
    Raises ValueError for Python objects, and for a size that the header contradicts."""
    begin = file.tell()
    is_first = npy.read_magic(file) == (1, 0)
    start = file.tell()
    length = int.from_bytes(file.read(2 if is_first else 4), "little")
    if length > MOST_HEADER_BYTES:  # else read, of whatever size, before it is looked at
        raise ValueError(f"a header of {length} bytes")
    file.seek(start)
    try:
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except TokenError as error:  # of NumPy's reader for the headers of Python 2
        raise ValueError(f"a header that is no dictionary, {error}") from error
    if dtype.hasobject:
        raise ValueError(f"{path} holds {name} of Python objects; expected numbers. Write numbers.")
    if size and file.tell() + math.prod(shape) * dtype.itemsize != begin + size:
        raise ValueError(
            f"{path} holds {name} of {size} bytes, and its header declares {dtype} of shape "
            f"{shape}; expected these alone. Write it again."
        )
    order = "F" if is_fortran else "C"
    if is_mapped and shape:
        return np.memmap(path, dtype, "r", file.tell(), shape, order)
    return np.frombuffer(file.read(dtype.itemsize * math.prod(shape)), dtype).reshape(shape, order=order)


@lru_cache(maxsize=256)
def _require_unchanged(path: Path, _size: int, _changed: int) -> None:
    """Raise ValueError if an array differs from its checksum in the archive. This reads the whole file, so it
    is done once for each state of the file."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(
                f"{path} holds {name} with another checksum than was written; expected the "
                "same. Copy or write it again."
            )
