"""netCDF of the classic formats, read by xarray, and zarr. Packed numbers are unpacked, missing ones are NaN;
times stay numbers in the units of their attribute."""

import itertools
import math
import operator
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ups.userdata.readers import budget
from ups.userdata.readers.store import (
    MARKS,
    Store,
    Stored,
    checked,
    decoded,
    library,
    require_unpackable,
    without_unwritten,
)

WHOLE: set[tuple[Path, str, int]] = set()  # arrays, with the time of their folder, that lack no chunk
MOST_METADATA_BYTES = 2**24  # of one file; 10,000 arrays listed in one have 2**23
METADATA = ("zarr.json", ".zmetadata", ".zarray", ".zgroup", ".zattrs")
CHUNK = re.compile(r"(?:c[/.])?\d+(?:[/.]\d+)*")  # how the file of a chunk is called
# that decode numbers or text; zarr knows others by name, of which "pickle" runs code
CODECS = set(
    "bytes transpose sharding_indexed gzip zlib zstd blosc lz4 bz2 lzma shuffle delta fixedscaleoffset "
    "quantize bitround packbits astype zfpy pcodec crc32 crc32c adler32 fletcher32 jenkins_lookup3 "
    "vlen-utf8 vlen-bytes".split()
)


class NetCdf3(Store):
    """A netCDF file of the classic formats, which have no groups."""

    def __init__(self, path: Path):
        super().__init__(path)
        library("scipy", path)
        xarray = library("xarray", path)
        options = {"decode_times": False, "decode_coords": False, "cache": False}
        self.root = checked(
            path,
            lambda: xarray.open_dataset(path, engine="scipy", create_default_indexes=False, **options),
            "netCDF file",
        )

    def close(self) -> None:
        self.root.close()

    def _names(self) -> list[str]:
        return list(self.root.variables)

    def _array(self, name: str) -> Stored | None:
        found = self.root.variables.get(name)
        axes = () if found is None else self.plain(tuple(map(str, found.dims)))
        return None if found is None else Stored(found.shape, found.dtype, axes)

    def _read(self, name: str, index: tuple) -> np.ndarray:
        array = self.root.variables[name]
        found = checked(self.path, lambda: np.asarray(array[index].values), "netCDF file")
        return found if "_FillValue" in array.encoding else without_unwritten(found)

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self.root.variables.get(name) if name else self.root
        return {} if found is None else self.plain(dict(found.attrs))


class Zarr(Store):
    """A zarr folder, or one in a zip file, perhaps below another folder there."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.library = library("zarr", path)
        find = _files_of_folder if path.is_dir() else _files_of_zip
        self.files = self._checked(lambda: find(path, path.stat().st_mtime_ns))
        self.num_bytes = sum(self.files.values())
        budget.allow(work=budget.OBJECT_BYTES * len(self.files))
        self.root = self._checked(self._open)
        self.is_single = self._is_array(self.root)

    def _open(self) -> Any:
        if self.path.is_dir():
            return self.library.open(str(self.path), mode="r")
        tops = [name.rpartition("/")[0] for name in self.files if name.rpartition("/")[2] in MARKS]
        return self.library.open(
            self.library.storage.ZipStore(self.path, mode="r"), path=min(tops, key=len), mode="r"
        )

    def close(self) -> None:
        self.root.store.close()

    def _checked(self, action: Callable[[], Any]) -> Any:
        try:
            return checked(self.path, action, "zarr store")
        except ValueError as error:
            if type(error.__cause__).__name__ != "UnknownCodecError":  # of zarr, and of numcodecs
                raise
            raise ValueError(
                f"{self.path} is encoded by a codec that is not installed ({error.__cause__}); expected one "
                "that is. Run pip install 'numcodecs[pcodec,zfpy]', or write it with zarr's usual one, zstd."
            ) from None

    def _names(self) -> list[str]:
        return [self.path.stem] if self.is_single else self._checked(self._names_of_root)

    def _names_of_root(self) -> list[str]:
        listed = getattr(self.root.metadata, "consolidated_metadata", None)
        if listed and (num := len(listed.metadata)) > len(self.files):
            raise ValueError(
                f"{self.path} lists {num} arrays in {len(self.files)} files; expected a file for each. Write "
                "it again, or remove the list (.zmetadata)."
            )
        return self._below(self.root, "")

    def _is_array(self, found: Any) -> bool:
        return isinstance(found, self.library.Array)

    def _below(self, group: Any, above: str) -> list[str]:
        """Names of the arrays in a group and in its groups."""
        arrays = [f"{above}{name}" for name, _ in group.arrays()]
        return arrays + [
            name for key, inner in group.groups() for name in self._below(inner, f"{above}{key}/")
        ]

    def _get(self, name: str) -> Any:
        found = self.root if self.is_single else self.root[name] if name in self.root else None
        if self._is_array(found):
            about = found.metadata.to_dict()
            coding = [*(about.get("filters") or ()), about.get("compressor"), *about.get("codecs", ())]
            if unknown := set(_codecs(filter(None, coding))) - CODECS:
                raise ValueError(
                    f"{self.path}: {name} is encoded by {', '.join(sorted(unknown))!r:.200}; expected one of "
                    f"{', '.join(sorted(CODECS))}, as others may run code. Write it with one of these."
                )
        return found

    def _array(self, name: str) -> Stored | None:
        found = self._checked(lambda: self._get(name))
        if found is None or not self._is_array(found):
            return None
        size = max(1, np.dtype(found.dtype).itemsize)
        require_unpackable(
            self.path, name, size * math.prod(found.chunks), size * math.prod(found.shape), self.num_bytes
        )
        named = getattr(found.metadata, "dimension_names", None) or found.attrs.get("_ARRAY_DIMENSIONS") or ()
        return Stored(tuple(found.shape), np.dtype(found.dtype), self.plain(tuple(map(str, named))))

    def _require_whole(self, name: str) -> None:
        key = self.path, name, self.path.stat().st_mtime_ns
        if key not in WHOLE and (missing := _missing_chunk(self._get(name), self.files)):
            raise ValueError(
                f"{self.path}: the chunk {missing} of {name} is missing and those beside it are "
                "there; expected all, as zarr reads a missing one as its fill value. Write it "
                "again, with zarr.config.set({'array.write_empty_chunks': True}) where zero."
            )
        WHOLE.add(key)

    def _read(self, name: str, index: tuple) -> np.ndarray:
        return self._checked(
            lambda: decoded(np.asarray(self._get(name)[index or ...]), self._get(name).attrs, self.path)
        )

    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self._get(name) if name else self.root
        return {} if found is None else self.plain(dict(found.attrs))


def _codecs(configured: Iterable[Any]) -> Iterator[str]:
    """The names of codecs, also of those within a shard."""
    for one in configured:
        yield str(one.get("id") or one["name"].removeprefix("numcodecs."))
        inner = one.get("configuration") or {}
        yield from _codecs([*inner.get("codecs", ()), *inner.get("index_codecs", ())])


@lru_cache(maxsize=256)
def _files_of_zip(path: Path, _changed: int) -> dict[str, int]:
    """Name -> bytes, of the files in an archive. Raises ValueError where two have one name, and DamagedError
    for one that unpacks to far more than it is."""
    found: dict[str, int] = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename in found:
                raise ValueError(f"two files called {entry.filename!r:.200}")
            require_unpackable(path, entry.filename, 0, entry.file_size, entry.compress_size)
            found |= {entry.filename: entry.file_size} if not entry.is_dir() else {}
    return found


@lru_cache(maxsize=256)
def _files_of_folder(path: Path, _changed: int) -> dict[str, int]:
    """Name -> bytes, of the files in a folder. Raises ValueError where it holds a link, which may lead out of
    the folder, or a pipe or a device, since reading these never ends."""
    waiting, found = [path], {}
    while waiting:
        for entry in os.scandir(waiting.pop()):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry))
            elif not entry.is_file(follow_symlinks=False):
                what = "a link" if entry.is_symlink() else "a pipe or a device"
                raise ValueError(
                    f"{path} holds {Path(entry).relative_to(path)}, {what}; expected files and folders. Copy "
                    "what it stands for in its place, or write that array again."
                )
            else:
                found[os.path.relpath(entry, path)] = size = entry.stat().st_size
                if entry.name in METADATA and size > MOST_METADATA_BYTES:
                    raise ValueError(
                        f"{path} holds {Path(entry).relative_to(path)} of {size} bytes; expected at most "
                        f"{MOST_METADATA_BYTES} that describe arrays. Write fewer, with an axis of runs."
                    )
    return found


def _missing_chunk(array: Any, files: Iterable[str]) -> str:
    """The name of the first chunk of an array that is not stored, "" if there is none. zarr leaves out chunks
    of zeros, as those of a wall are, or of a field that is zero: where the same ones are missing all along
    the first axis, only their values say more (ups/data/written.py)."""
    stored = getattr(array, "shards", None) or array.chunks
    grid = [-(-size // chunk) for size, chunk in zip(array.shape, stored, strict=True)]
    rows: dict[tuple[int, ...], set[int]] = {}  # place along the other axes -> along the first
    folder = f"{array.path}/" * bool(array.path)
    for name in files:
        key = CHUNK.fullmatch(name.removeprefix(folder)) if name.startswith(folder) else None
        place = tuple(map(int, re.findall(r"\d+", key[0]))) if key else ()
        if grid and len(place) == len(grid) and all(map(operator.lt, place, grid)):
            rows.setdefault(place[1:], set()).add(place[0])
    missing = [
        (next(row for row in itertools.count() if row not in there), *others)
        for others, there in rows.items()
        if len(there) < grid[0]
    ]
    return array.metadata.encode_chunk_key(min(missing)) if missing else ""
