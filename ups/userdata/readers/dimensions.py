"""The names of axes in HDF5 and netCDF-4, which are attributes of a dataset.

HDF5's own functions for them (h5py's `dims`, and so h5netcdf) take the type and length of these attributes on
trust, and crash on others. Here both are checked, and the names are read as plain attributes.
"""

import h5py
import numpy as np
from h5py import h5a, h5r, h5t

# attribute -> class of its type and of its elements; each has one element for every axis
OF_AXES = {b"DIMENSION_LIST": (h5t.VLEN, h5t.REFERENCE), b"DIMENSION_LABELS": (h5t.STRING,)}


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


def axis_names(found: h5py.Dataset) -> tuple[str, ...]:
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
