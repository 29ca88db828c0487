"""HDF5 files that hold what they show. HDF5 itself follows links and storage into any other file, and waits
at a pipe."""

from __future__ import annotations

import h5py
from h5py import h5d, h5g, h5l, h5o

LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}


def node(parent: h5py.Group, path: str) -> h5py.Group | h5py.Dataset | None:
    """The group or dataset at `path` below `parent`, None if nothing lies there.

    Raises ValueError, before anything is followed or read, for a link on the way and for a dataset whose
    numbers lie in other files (external storage, virtual datasets).
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
        raise _refusal(parent, path, "kept in another file "
                                     f"({layout.get_external(0)[0].decode(errors='replace')!r:.200})")
    return h5py.Dataset(here)


def dataset(parent: h5py.Group, path: str) -> h5py.Dataset:
    """The dataset that must lie at `path`. Raises KeyError where none does, and what `node` raises."""
    found = node(parent, path)
    if not isinstance(found, h5py.Dataset):
        raise KeyError(f"no array {path}")
    return found


def _refusal(parent: h5py.Group, path: str, what: str) -> ValueError:
    return ValueError(f"{parent.file.filename}: {path} in {parent.name} is {what}; expected the numbers in "
                      "the file itself, as only they can be checked. Copy them into it (h5py), or make or "
                      "download the file again.")
