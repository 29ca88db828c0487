"""Files of arrays that are mapped or read at once: NumPy's .npy and .npz, MATLAB's up to version 7 and
torch's. An .npy file holds one array, which goes by any name."""

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ups.stored.store import Store, Stored, checked, library, require_unpackable

HEADER_BYTES = 30   # of a file within a zip, before its name and its extra field, whose lengths end it
MATLAB_NUMBERS = ("double", "single", "logical",
                  *[f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])


class Arrays(Store):
    """Arrays that lie in memory or are mapped; a single one goes by any name."""

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
        rows = checked(path, lambda: np.load(path, mmap_mode="r", allow_pickle=False), ".npy file")
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
        wanted = [name for name, _, kind in sizes if kind in MATLAB_NUMBERS]
        for name, shape, _ in sizes:
            require_unpackable(path, name, 0, 8 * math.prod(shape), path.stat().st_size)
        found = checked(path, lambda: io.loadmat(path, variable_names=wanted), "MATLAB file")
        super().__init__(path, {name: found[name] for name in wanted})


class Torch(Arrays):
    """What torch.save wrote: a tensor, or dicts and lists of them. No other object is made of it."""

    def __init__(self, path: Path):
        import torch

        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as error:
            raise ValueError(f"{path} holds more than tensors, or is cut off ({type(error).__name__}); "
                             "expected a tensor, or dicts and lists of tensors: nothing else is unpickled. "
                             "Save these alone with torch.save.") from None
        self.is_single = isinstance(found, torch.Tensor)
        super().__init__(path, dict(_tensors(found, path.stem if self.is_single else "")))


def _tensors(found: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a tensor, or of dicts and lists of them, by their places."""
    if hasattr(found, "detach"):
        wide = found.float() if str(found.dtype) == "torch.bfloat16" else found   # NumPy has none
        yield name, wide.detach().numpy()
    inner = enumerate(found) if isinstance(found, list | tuple) else getattr(found, "items", tuple)()
    for key, part in inner:
        yield from _tensors(part, f"{name}/{key}".strip("/"))


def _members(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of an .npz file: mapped, or unpacked where they are compressed."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            is_mapped = entry.compress_type == zipfile.ZIP_STORED
            if is_mapped:
                file.seek(entry.header_offset + HEADER_BYTES - 4)
                lengths = np.frombuffer(file.read(4), "<u2")
                begin = file.seek(int(lengths.sum()), 1)
            else:
                begin = 0
                require_unpackable(path, name, 0, entry.file_size, entry.compress_size)
            with nullcontext(file) if is_mapped else archive.open(entry) as member:
                version = npy.read_magic(member)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, is_fortran, dtype = read(member)
                if dtype.hasobject:
                    raise ValueError(f"{path} holds {entry.filename} of Python objects; expected numbers. "
                                     f"Write numbers.")
                order, size = "F" if is_fortran else "C", dtype.itemsize * math.prod(shape)
                start = member.tell() - begin
                if start + size != entry.file_size:
                    raise ValueError(f"{path} holds {entry.filename} of {entry.file_size} bytes, and its "
                                     f"header speaks of {dtype} of shape {shape}; expected these alone. "
                                     "Write it again.")
                if is_mapped and shape:
                    yield name, np.memmap(path, dtype, "r", member.tell(), shape, order)
                else:
                    yield name, np.frombuffer(member.read(size), dtype).reshape(shape, order=order)


@lru_cache(maxsize=256)
def _require_unchanged(path: Path, _size: int, _changed: int) -> None:
    """Raise ValueError where an array is not what its checksum in the archive is of; once for each state of a
    file, as all of it is read."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"{path} holds {name} with another checksum than was written; expected the "
                             "same. Copy or write it again.")
