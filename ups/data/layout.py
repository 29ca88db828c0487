"""PDEBench's two HDF5 layouts: where the numbers of a trajectory lie in a file, to read and to write them.

Arrays: one array per channel, trajectories on axis 0, contiguous and uncompressed (`tensor` (b, t, x);
`density`, `pressure`, `Vx`, ..; Darcy's `nu` (b, x, y) and `tensor` (b, 1, x, y); `velocity` (b, t, x, y,
v)). Groups: one group per trajectory, `0000/data` (t, *space, v), lzf, with `0000/grid/x` and so on. What a
file holds is decided by its keys, never by its suffix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import h5py
import numpy as np
import yaml
from h5py import h5d, h5g, h5l, h5o

from ups.tasks import TASKS, Array, Task

# at most what HDF5 writes about one group: headers, trees, coordinates, attributes (a third was seen)
GROUP_BYTES = 2**15
LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}


@dataclass(frozen=True)
class Layout:
    """How the files of a task are laid out. lead: axes of a stored array before those of one trajectory.
    split: the order of the shares of trajectories, by PDEBench's convention. opening: how its description
    begins."""

    task: Task
    lead: ClassVar[tuple[str, ...]]
    split: ClassVar[tuple[str, ...]]
    opening: ClassVar[str]

    def axes(self, array: Array) -> tuple[str, ...]:
        """Axes of a stored array."""
        return self.lead + array.axes(self.task.axes)

    def shape(self, array: Array, num: int, frames: int, resolution: int) -> tuple[int, ...]:
        """Shape of a stored array."""
        sizes = {"trajectory": num, "time": frames, "channel": array.channels}
        return tuple(sizes.get(axis, resolution) for axis in self.axes(array))

    def describe(self, num: int, frames: int, resolution: int) -> str:
        """What a file must hold, in words: arrays, axes, shapes, coordinates, attributes."""
        task = self.task
        arrays = [f"{array.key} ({', '.join(self.axes(array))}) = "
                  f"{self.shape(array, num, frames, resolution)} of floats" for array in task.arrays]
        times = [] if task.is_steady else [f"{self.coordinate('t')} = ({frames},), the frames' times"]
        parts = [*arrays, *times,
                 *[f"{self.coordinate(axis)} = ({resolution},), optional" for axis in task.axes],
                 *[f"attribute {', '.join(task.parameters)}"] * bool(task.parameters)]
        return f"{self.opening.format(num)} {'; '.join(parts)}"

    def grid(self, settings: dict[str, Any], num_times: int) -> dict[str, np.ndarray]:
        """Cell centres x_i = xL + (i + 1/2) dx per axis and the frames' times, float32."""
        low, high = self.task.domain
        centres = low + (np.arange(settings["resolution"]) + 0.5) * (high - low) / settings["resolution"]
        grid = {axis: centres.astype(np.float32) for axis in sorted(self.task.axes)}
        if not self.task.is_steady:
            grid["t"] = (np.arange(num_times) * settings["t_end"]
                         / max(1, settings["num_frames"] - 1)).astype(np.float32)
        return grid


class Arrays(Layout):
    """One array per channel."""

    lead = ("trajectory",)
    split = ("test", "val", "train")
    opening = "HDF5 arrays"

    def coordinate(self, axis: str, name: str = "") -> str:
        """Where the coordinate of an axis is."""
        return "t" if axis == "t" and self.task.has_own_times else f"{axis}-coordinate"

    def fits(self, file: h5py.File) -> bool:
        """Whether a file may be of this task, by its keys and the axes of its arrays."""
        return not any(key.isdigit() for key in file) and all(
            len(getattr(node(file, array.key), "shape", ())) == len(self.axes(array))
            for array in self.task.arrays)

    def names(self, file: h5py.File) -> tuple[str, ...]:
        """Names of the trajectories, where they have any."""
        return ()

    def dataset(self, file: h5py.File, array: Array, name: str = "") -> h5py.Dataset:
        """The dataset that holds an array. Raises ValueError where there is none."""
        if not isinstance(found := node(file, array.key), h5py.Dataset):
            raise ValueError(f"{file.filename} has no array {array.key!r}; expected "
                             f"{', '.join(array.key for array in self.task.arrays)} for {self.task.name}. "
                             f"{found_in(file)}")
        return found

    def pieces(self, file: h5py.File, array: Array, names: tuple[str, ...], first: int,
               last: int) -> Iterator[tuple[h5py.Dataset, slice, tuple[int, ...]]]:
        """(dataset, which of the trajectories first..last-1 it holds, index of the first of them in it)."""
        yield self.dataset(file, array), slice(None), (first,)

    def attributes(self, file: h5py.File, names: tuple[str, ...]) -> dict[str, Any]:
        """What a file says about itself beside its attributes."""
        return {}

    def most_bytes(self, settings: dict[str, Any], size: int) -> int:
        """What a file of `size` bytes of numbers may take on the disk."""
        return size

    def create(self, file: h5py.File, settings: dict[str, Any]) -> None:
        """Attributes, coordinates and every array at full size (contiguous, not filled)."""
        task, num, frames = self.task, settings["num_trajectories"], settings["num_frames"]
        file.attrs.update(task.attributes(settings["parameter"]))
        # one time more than frames, as published
        for axis, values in self.grid(settings, frames + 1).items():
            is_own = axis == "t" and task.has_own_times
            file[self.coordinate(axis)] = np.tile(values[:frames], (num, 1)) if is_own else values
        for array in task.arrays:
            file.create_dataset(array.key, self.shape(array, num, frames, settings["resolution"]), np.float32,
                                dcpl=allocated())

    def placed(self, first: int, u: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
        """Where the trajectories u (n, time, channel, *space) from `first` on lie: (dataset, its rows, their
        values)."""
        channel = 0
        for array in self.task.arrays:
            values = u[:, :, channel:channel + array.channels]
            values = np.moveaxis(values, 2, -1) if array.vector else values[:, :, 0]
            yield array.key, slice(first, first + len(u)), values[:, 0] if array.steady else values
            channel += array.channels

    def store(self, file: h5py.File, settings: dict[str, Any], first: int, u: np.ndarray) -> None:
        """Write u as trajectories first, first + 1, .."""
        for key, rows, values in self.placed(first, u):
            node(file, key)[rows] = values


class Groups(Layout):
    """One group per trajectory, which holds one array with all channels."""

    lead = ()
    split = ("train", "val", "test")
    opening = "{} HDF5 groups 0000, 0001, .., one per trajectory, each with"

    def coordinate(self, axis: str, name: str = "") -> str:
        return f"{name}/grid/{axis}".lstrip("/")

    def fits(self, file: h5py.File) -> bool:
        return any(key.isdigit() for key in file)

    def names(self, file: h5py.File) -> tuple[str, ...]:
        if not (names := tuple(sorted(filter(str.isdigit, file), key=int))):
            raise ValueError(f"{file.filename} has no trajectory group such as 0000/data; expected the "
                             f"layout of {self.task.name}. {found_in(file)}")
        return names

    def dataset(self, file: h5py.File, array: Array, name: str = "") -> h5py.Dataset:
        if not isinstance(found := node(file, f"{name}/{array.key}"), h5py.Dataset):
            raise ValueError(f"{file.filename} has no {name}/{array.key}; expected one in every group. "
                             f"{found_in(file)}")
        return found

    def pieces(self, file: h5py.File, array: Array, names: tuple[str, ...], first: int,
               last: int) -> Iterator[tuple[h5py.Dataset, slice, tuple[int, ...]]]:
        for row, name in enumerate(names[first:last]):
            yield self.dataset(file, array, name), slice(row, row + 1), ()

    def attributes(self, file: h5py.File, names: tuple[str, ...]) -> dict[str, Any]:
        # PDEBench's first code wrote "0000/config" on the root, its present code "config" on the group
        text = node(file, names[0]).attrs.get("config", file.attrs.get(f"{names[0]}/config"))
        return {} if text is None else {"config": plain(text)}

    def most_bytes(self, settings: dict[str, Any], size: int) -> int:
        return size + size // 50 + settings["num_trajectories"] * GROUP_BYTES

    def create(self, file: h5py.File, settings: dict[str, Any]) -> None:
        """Nothing: the file grows by groups."""

    def placed(self, first: int, u: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
        for index, values in enumerate(np.moveaxis(u, 2, -1), first):
            yield f"{index:04d}/{self.task.arrays[0].key}", (), values

    def store(self, file: h5py.File, settings: dict[str, Any], first: int, u: np.ndarray) -> None:
        low, high = self.task.domain
        sim = {**dict(self.task.constants), "t": settings["t_end"], "tdim": settings["num_frames"],
               "seed": settings["seed"]}
        for axis in self.task.axes:
            sim |= {f"{axis}_min": low, f"{axis}_max": high, f"{axis}dim": settings["resolution"]}
        for index, (key, _, values) in enumerate(self.placed(first, u), first):
            name, _, array = key.partition("/")
            if node(file, name) is not None:
                del file[name]   # written after the last confirmed chunk, perhaps not completely
            group = file.create_group(name)
            group.create_dataset(array, data=values, compression="lzf")
            for axis, points in self.grid(settings, settings["num_frames"]).items():
                group[self.coordinate(axis)] = points
            config = {"sim": {**sim, "index": index}, "generator": settings["generator"]}
            group.attrs["config"] = fixed_text(yaml.safe_dump(config))


def allocated() -> h5py.h5p.PropDCID:
    """How to make a dataset that has all its room at once, contiguous and not filled."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    return properties


def layout_of(task: Task) -> Arrays | Groups:
    """The layout of the files of a task."""
    return {"arrays": Arrays, "groups": Groups}[task.layout](task)


def found_in(file: h5py.File) -> str:
    """What a file holds, and which tasks it may be of."""
    keys = sorted(file)
    listing = [f"{key} {item.shape}" if isinstance(item := node(file, key), h5py.Dataset) else f"group {key}"
               for key in keys[:8]]
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    could_be = [name for name, task in TASKS.items() if layout_of(task).fits(file)]
    return (f"Found: {', '.join(listing) or 'nothing'}{more}. Check data.tasks; this file could be: "
            f"{', '.join(could_be) or 'none of ours'}.")


def plain(value: Any) -> Any:
    """An HDF5 attribute as text or number."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value


def fixed_text(text: str) -> np.bytes_:
    """A text attribute of fixed length: of variable length, HDF5 may look for it in a damaged file for
    ever."""
    return np.bytes_(text.encode("ascii"))


# ------------------------------------------------------------------------------------------------- nodes
# HDF5 itself follows links and storage into any other file, and waits at a pipe: what is read here holds what
# it shows.


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
