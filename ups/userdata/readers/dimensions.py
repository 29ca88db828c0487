"""The names of axes in HDF5 and netCDF-4, which are attributes of a dataset.

HDF5's own functions for them (h5py's `dims`, which h5netcdf uses as well) take the type and length of these
attributes on trust, and crash on others. Here both are checked, and the names are read as plain attributes.
"""

import h5py
import numpy as np
from h5py import h5a, h5r, h5t

TEXT, OBJECTS = (h5t.STRING,), (h5t.VLEN, h5t.REFERENCE)  # OBJECTS: references to datasets, in lists
WHOLE = (h5t.INTEGER,)
# attribute -> class of its type and that of its elements, number of axes of the attribute
KNOWN = {
    b"DIMENSION_LIST": (OBJECTS, 1),
    b"DIMENSION_LABELS": (TEXT, 1),
    b"REFERENCE_LIST": ((h5t.COMPOUND, h5t.REFERENCE, h5t.INTEGER), 1),
    b"CLASS": (TEXT, 0),
    b"NAME": (TEXT, 0),
    b"_Netcdf4Dimid": (WHOLE, 0),
    b"_Netcdf4Coordinates": (WHOLE, 1),
}
OF_AXES = (b"DIMENSION_LIST", b"DIMENSION_LABELS", b"_Netcdf4Coordinates")  # one element for every axis


def _classes(kind: h5t.TypeID) -> tuple[int, ...]:
    """The class of a type, and those of its elements or members."""
    if isinstance(kind, h5t.TypeVlenID):
        return h5t.VLEN, *_classes(kind.get_super())
    if isinstance(kind, h5t.TypeCompoundID):
        members = [kind.get_member_type(number) for number in range(kind.get_nmembers())]
        return h5t.COMPOUND, *[one for member in members for one in _classes(member)]
    if isinstance(kind, h5t.TypeReferenceID) and not kind.equal(h5t.STD_REF_OBJ):
        return (h5t.NO_CLASS,)  # a reference to a region
    return (kind.get_class(),)


def wrong_attribute(found: h5py.Dataset) -> str:
    """The name of an attribute about axes that has another type or size than netCDF and HDF5 give it."""
    for name, (classes, num_axes) in KNOWN.items():
        if h5a.exists(found.id, name):
            held = h5a.open(found.id, name)
            sizes = held.shape
            is_right = _classes(held.get_type()) == classes and (
                len(sizes) == num_axes or (sizes == (1,) and not num_axes)
            )
            if not is_right or (name in OF_AXES and sizes != (found.ndim,)):
                return name.decode()
    return ""


def axis_names(found: h5py.Dataset) -> tuple[str, ...]:
    """The names of the axes of a dataset, "" of one without a label; () if axes have no names, or an
    attribute that states them is wrong."""
    labels, scales = (h5a.exists(found.id, name) for name in (b"DIMENSION_LABELS", b"DIMENSION_LIST"))
    if not (labels or scales) or wrong_attribute(found):
        return ()
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
