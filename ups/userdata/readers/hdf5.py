"""HDF5, and netCDF-4, which is HDF5 where some datasets are dimensions and no arrays.

HDF5 itself follows links and storage into any other file, and waits at a pipe. Here every dataset must hold
its own numbers. The names of axes are attributes of a dataset, whose type and length HDF5's own functions for
them (h5py's `dims`, and so h5netcdf) take on trust, and crash on others. Here both are checked, and the names
are read as plain attributes.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5r, h5t, h5z

from ups.userdata.readers import budget
from ups.userdata.readers.store import (
    CODED,
    Store,
    Stored,
    checked,
    decoded,
    library,
    reading,
    require_unpackable,
    without_unwritten,
)

LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}

DIMENSION = "b'This is a netCDF dimension"  # how the name of one without a coordinate begins
EARLY = 2000  # arrays, which tell whether a file holds many of different names
NO_COORDINATE = "_nc4_non_coord_"  # before the name of an array that has the name of a dimension
# attributes of netCDF-4 about dimensions
HIDDEN = {
    *("CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST"),
    *("_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties", "_nc3_strict"),
}

# attribute -> class of its type and of its elements; each has one element for every axis
OF_AXES = {b"DIMENSION_LIST": (h5t.VLEN, h5t.REFERENCE), b"DIMENSION_LABELS": (h5t.STRING,)}


class Hdf5(Store):
    """An HDF5 file, opened for reading."""

    kind = "HDF5 file"

    def __init__(self, path: Path | str, source: IO[bytes] | None = None):
        """source: the file at the address `path` of a server (ups/data/first.py)."""
        super().__init__(path)
        self.stored: dict[str, Stored] = {}  # by name, once they are listed
        self.last: tuple[str, h5py.Group | h5py.Dataset | None] = ("", None)  # what was looked for, and found
        self.file = checked(path, lambda: h5py.File(source or path, "r", locking=False), self.kind)

    def close(self) -> None:
        self.file.close()

    def _node(self, name: str) -> h5py.Group | h5py.Dataset | None:
        """`node` of the file. An array is looked for, examined and read: it is opened once for these."""
        if name != self.last[0]:
            found = node(self.file, name)
            if found is None or _is_dimension(found):
                above, slash, last = name.rpartition("/")
                found = node(self.file, f"{above}{slash}{NO_COORDINATE}{last}")
            if found is None:
                return None
            self.last = name, found
        return self.last[1]

    @reading
    def _require_whole(self, name: str) -> None:
        found = self._node(name)
        _require_filters(found)
        require_written(found, self.path)

    @reading
    def _names(self) -> list[str]:
        self.stored = {name: self._about(found) for name, found in _arrays(self.file)}
        return list(self.stored)

    @reading
    def first_names(self) -> list[str]:
        return [name for name, _ in itertools.islice(_arrays(self.file), EARLY)]

    @reading
    def _array(self, name: str) -> Stored | None:
        if name in self.stored:
            return self.stored[name]
        found = self._node(name)
        return self._about(found) if isinstance(found, h5py.Dataset) and found.shape is not None else None

    def _about(self, found: h5py.Dataset) -> Stored:
        kind = np.dtype(found.dtype.str)  # without what h5py knows of text and references
        if not h5a.get_num_attrs(found.id):
            return Stored(found.shape, kind)
        kind = self._unpacked(np.zeros((), kind), found).dtype if kind.kind in "fiu" else kind
        return Stored(found.shape, kind, self.plain(_axis_names(found)))

    @reading
    def _read(self, name: str, index: tuple) -> np.ndarray:
        found = self._node(name)
        _require_filters(found)
        return self._unpacked(np.asarray(found[index]), found)

    def _unpacked(self, values: np.ndarray, found: h5py.Dataset) -> np.ndarray:
        coding = {name: _plain(found.attrs[name]) for name in CODED if h5a.exists(found.id, name.encode())}
        values = decoded(values, coding, self.path)
        return values if "_FillValue" in coding else without_unwritten(values)

    def group_names(self, group: str) -> list[str]:
        found = self._node(group)
        return self.plain(sorted(found)) if isinstance(found, h5py.Group) else []

    @reading
    def attributes(self, name: str = "") -> dict[str, Any]:
        found = self._node(name) if name else self.file
        names = () if found is None else (name for name in found.attrs if name not in HIDDEN)
        return self.plain({name: _plain(found.attrs[name]) for name in names})


def _classes(kind: h5t.TypeID) -> tuple[int, ...]:
    """The class of a type, and that of its elements."""
    if isinstance(kind, h5t.TypeVlenID):
        return h5t.VLEN, *_classes(kind.get_super())
    if isinstance(kind, h5t.TypeReferenceID) and not kind.equal(h5t.STD_REF_OBJ):
        return (h5t.NO_CLASS,)  # a reference to a region
    return (kind.get_class(),)


def _is_sound(found: h5py.Dataset, name: bytes) -> bool:
    """Whether an attribute about axes has the type and the size that HDF5 gives it, or is not there."""
    if not h5a.exists(found.id, name):
        return True
    held = h5a.open(found.id, name)
    return _classes(held.get_type()) == OF_AXES[name] and held.shape == (found.ndim,)


def _axis_names(found: h5py.Dataset) -> tuple[str, ...]:
    """The names of the axes of a dataset, "" of one without a label; () if axes have no names, or an
    attribute that states them is wrong. A scale of an axis is its own axis."""
    if not all(_is_sound(found, name) for name in OF_AXES):
        return ()
    scales, labels = (h5a.exists(found.id, name) for name in OF_AXES)
    if not (scales or labels):
        is_scale = h5a.exists(found.id, b"CLASS") and "DIMENSION_SCALE" in str(found.attrs["CLASS"])
        return (found.name.rpartition("/")[2],) if is_scale and found.ndim == 1 else ()
    names = [""] * found.ndim
    if scales:
        for axis, references in enumerate(found.attrs["DIMENSION_LIST"]):
            for reference in np.atleast_1d(references)[:1]:
                path = h5r.get_name(reference, found.id) or b""
                names[axis] = path.decode(errors="replace").rsplit("/", 1)[-1]
    if labels:
        given = [
            label.decode(errors="replace") if isinstance(label, bytes) else str(label)
            for label in found.attrs["DIMENSION_LABELS"]
        ]
        names = [label or name for label, name in zip(given, names, strict=True)]
    # labels name what they can, as Dedalus does; a scale of one axis says nothing of the others
    return tuple(names) if all(names) or (labels and any(names)) else ()


def _is_dimension(found: h5py.Group | h5py.Dataset) -> bool:
    """Whether it is a dimension of netCDF without a coordinate. Short names are not read: this takes time."""
    if not h5a.exists(found.id, b"NAME"):
        return False
    is_long = h5a.open(found.id, b"NAME").get_storage_size() >= len(DIMENSION)
    return is_long and str(found.attrs["NAME"]).startswith(DIMENSION)


def _plain(value: Any) -> Any:
    """An attribute as netCDF has it: a list of one is that one, and text is decoded."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OS":
        value = [text.decode(errors="replace") if isinstance(text, bytes) else text for text in value.flat]
    value = value[0] if np.shape(value) == (1,) else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _arrays(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """(Name, dataset) of all datasets of a file. Links are skipped here, and refused when they are read. A
    group with several names, perhaps within itself, is listed once."""
    waiting, seen = [("", file)], {h5o.get_info(file["/"].id).addr}
    while waiting:
        above, group = waiting.pop()
        for name in group:
            if group.id.links.get_info(name.encode()).type != h5l.TYPE_HARD:
                continue
            found = node(group, name)
            if isinstance(found, h5py.Dataset):
                budget.allow_object()
                # h5py.Empty has no shape and no numbers
                if found.shape is not None and not _is_dimension(found):
                    yield f"{above}{name}".replace(NO_COORDINATE, ""), found
            elif isinstance(found, h5py.Group):
                if (place := h5o.get_info(found.id).addr) not in seen:
                    budget.allow_object()
                    seen.add(place)
                    waiting.append((f"{above}{name}/", found))


def _require_filters(dataset: h5py.Dataset) -> None:
    """Raise ValueError for an array compressed by a filter that is not installed, such as Blosc."""
    filters = dataset.id.get_create_plist()
    missing = [
        f"{name.decode(errors='replace') or 'number'} ({code})"
        for code, _, _, name in map(filters.get_filter, range(filters.get_nfilters()))
        if not h5z.filter_avail(code)
    ]
    if missing:
        path = dataset.file.filename
        raise ValueError(
            f"{path}: {dataset.name} is compressed by the HDF5 filter {', '.join(missing)}, which is not "
            "installed; expected one that is. Run pip install hdf5plugin, or write the file again with gzip: "
            f"h5repack -f GZIP=4 {path} {Path(path).stem}_gzip.h5."
        )


def require_written(dataset: h5py.Dataset, path: Path) -> None:
    """Raise ValueError for an array that was declared and never written: HDF5 would read it as zeros."""
    chunks, stored = dataset.chunks, dataset.id
    there = stored.get_num_chunks() if chunks else stored.get_storage_size()
    expected = (
        math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, chunks, strict=True))
        if chunks
        else dataset.nbytes
    )
    if there < expected:
        raise ValueError(
            f"{path}: {there} of {expected} {'chunks' if chunks else 'bytes'} of {dataset.name} "
            "are there; expected all. Write it again."
        )


def node(parent: h5py.Group, path: str) -> h5py.Group | h5py.Dataset | None:
    """The group or dataset at `path` below `parent`, None if nothing lies there.

    Raises ValueError, before anything is followed or read, for a link on the way, for a dataset whose numbers
    lie in other files (external storage, virtual datasets) and for one that unpacks to far more than it is.
    """
    here = parent.id
    for name in path.encode().split(b"/"):
        if not isinstance(here, h5g.GroupID) or not here.links.exists(name):
            return None
        kind = here.links.get_info(name).type
        if kind != h5l.TYPE_HARD:
            raise _refusal(parent, path, LINKS.get(kind, "a link of a user's kind"))
        here = h5o.open(here, name)
    if isinstance(here, h5g.GroupID):
        return h5py.Group(here)
    if not isinstance(here, h5d.DatasetID):
        return None
    layout = here.get_create_plist()
    if layout.get_layout() == h5d.VIRTUAL:
        raise _refusal(parent, path, "a view of other datasets (virtual)")
    if layout.get_external_count():
        raise _refusal(
            parent,
            path,
            f"kept in another file ({layout.get_external(0)[0].decode(errors='replace')!r:.200})",
        )
    found = h5py.Dataset(here)
    if layout.get_nfilters():
        if not all(h5z.filter_avail(layout.get_filter(number)[0]) for number in range(layout.get_nfilters())):
            with contextlib.suppress(ValueError):  # what is missing is said when the numbers are read
                library("hdf5plugin", Path(parent.file.filename))
        require_unpackable(
            Path(parent.file.filename),
            path,
            found.dtype.itemsize * math.prod(found.chunks),
            found.nbytes,
            here.get_storage_size(),
        )
    return found


def dataset(parent: h5py.Group, path: str) -> h5py.Dataset:
    """The dataset that must lie at `path`. Raises KeyError where none does, and what `node` raises."""
    found = node(parent, path)
    if not isinstance(found, h5py.Dataset):
        raise KeyError(f"no array {path}")
    return found


def _refusal(parent: h5py.Group, path: str, what: str) -> ValueError:
    return ValueError(
        f"{parent.file.filename}: {path} in {parent.name} is {what}; expected the numbers in the file "
        "itself, as only they can be checked. Copy them into it (h5py), or make or download the file again."
    )
