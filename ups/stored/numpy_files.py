"""NumPy's own files, mapped where they lie: .npy holds one array, which goes by any name, .npz several."""

import math
import zipfile
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from ups.stored.store import Store, Stored, checked, natural

MOST_HEADER_BYTES = 10_000   # of an array, as NumPy takes at most
HEADER_BYTES = 30   # of a file within a zip, before its name and its extra field, whose lengths end it


class Npy(Store):
    is_single = True

    def __init__(self, path: Path):
        super().__init__(path)
        self.rows = checked(path, lambda: _whole(path), ".npy file")

    def names(self) -> list[str]:
        return [self.path.stem]

    def array(self, name: str) -> Stored:
        return Stored(self.rows.shape, self.rows.dtype)

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        return np.array(self.rows[index])


class Npz(Store):
    def __init__(self, path: Path):
        super().__init__(path)
        self.parts = checked(path, lambda: dict(_members(path)), ".npz file")
        found = path.stat()
        checked(path, lambda: _require_unchanged(path, found.st_size, found.st_mtime_ns), ".npz file")

    def names(self) -> list[str]:
        return sorted(self.parts, key=natural)

    def array(self, name: str) -> Stored | None:
        found = self.parts.get(name)
        return None if found is None else Stored(found.shape, found.dtype)

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        return np.array(self.parts[name][index])


def _members(path: Path) -> list[tuple[str, np.ndarray]]:
    """The arrays of an .npz file, mapped. Raises ValueError for one that is compressed: parts of it could not
    be read alone.
    """
    found = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{path} holds {entry.filename} compressed; expected arrays that can be "
                                 f"read in parts. Write it with np.savez in place of np.savez_compressed, or "
                                 f"as HDF5.")
            file.seek(entry.header_offset + HEADER_BYTES - 4)
            lengths = np.frombuffer(file.read(4), "<u2")
            file.seek(int(lengths.sum()), 1)
            rows = _mapped(path, file, entry.filename, entry.file_size)
            found.append((entry.filename.removesuffix(".npy"), rows))
    return found


def _whole(path: Path) -> np.ndarray:
    """The array of an .npy file, mapped."""
    with path.open("rb") as file:
        return _mapped(path, file, path.name)


def _mapped(path: Path, file: BinaryIO, name: str, size: int = 0) -> np.ndarray:
    """The array, mapped, whose header is next in `file`. size: bytes of both, if that is known. Raises
    ValueError for one of Python objects."""
    begin = file.tell()
    is_first = npy.read_magic(file) == (1, 0)
    start = file.tell()
    length = int.from_bytes(file.read(2 if is_first else 4), "little")
    if length > MOST_HEADER_BYTES:   # else read, of whatever size, before it is looked at
        raise ValueError(f"a header of {length} bytes")
    file.seek(start)
    try:
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except TokenError as error:   # of NumPy's reader for the headers of Python 2
        raise ValueError(f"a header that is no dictionary, {error}") from error
    if dtype.hasobject:
        raise ValueError(f"{path} holds {name} of Python objects; expected numbers. Write numbers.")
    if size and file.tell() + math.prod(shape) * dtype.itemsize != begin + size:
        raise ValueError(f"{path} holds {name} of {size} bytes, and its header speaks of {dtype} of shape "
                         f"{shape}; expected these alone. Write it again.")
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C") if shape else np.array(
        np.frombuffer(file.read(dtype.itemsize), dtype)[0])


@lru_cache(maxsize=256)
def _require_unchanged(path: Path, _size: int, _changed: int) -> None:
    """Raise ValueError where an array is not what its checksum in the archive is of; once for each state of a
    file, as all of it is read."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"{path} holds {name} with another checksum than was written; expected the "
                             "same. Copy or write it again.")
