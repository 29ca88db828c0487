"""PDEBench's two HDF5 layouts: where the numbers of a trajectory lie in a file, to read and to write them.

Arrays: one array per channel, trajectories on axis 0, contiguous and uncompressed (`tensor` (b, t, x);
`density`, `pressure`, `Vx`, ..; Darcy's `nu` (b, x, y) and `tensor` (b, 1, x, y); `velocity` (b, t, x, y,
v)). Groups: one group per trajectory, `0000/data` (t, *space, v), lzf, with `0000/grid/x` and so on. What a
file holds is decided by its keys, never by its suffix.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import yaml
from h5py import h5d

from ups.tasks import TASKS, Array, Task
from ups.userdata.readers.hdf5 import node

# at most what HDF5 writes about one group: headers, trees, coordinates, attributes (a third was seen)
GROUP_BYTES = 2**15


@dataclass(frozen=True)
class Layout:
    """How the files of a task are laid out, here one array per channel. lead: axes of a stored array before
    those of one trajectory. split: the order of the shares of trajectories, by PDEBench's convention.
    opening: how its description begins."""

    task: Task
    lead = ("trajectory",)
    split = ("test", "val", "train")
    opening = "HDF5 arrays"

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
        parts = [
            *[
                f"{array.key} ({', '.join(self.axes(array))}) = "
                f"{self.shape(array, num, frames, resolution)} of floats"
                for array in task.arrays
            ],
            *[f"{self.coordinate('t')} = ({frames},), the frames' times"] * (not task.is_steady),
            *[f"{self.coordinate(axis)} = ({resolution},), optional" for axis in task.axes],
            *[f"attribute {', '.join(task.parameters)}"] * bool(task.parameters),
        ]
        return f"{self.opening.format(num)} {'; '.join(parts)}"

    def grid(self, settings: dict[str, Any], num_times: int) -> dict[str, np.ndarray]:
        """Cell centres x_i = xL + (i + 1/2) dx per axis and the frames' times, float32."""
        grid = {
            axis: np.array(self.task.centres(settings["resolution"], axis), np.float32)
            for axis in sorted(self.task.axes)
        }
        if not self.task.is_steady:
            grid["t"] = (
                np.arange(num_times) * settings["t_end"] / max(1, settings["num_frames"] - 1)
            ).astype(np.float32)
        return grid

    def path(self, array: Array, name: str = "") -> str:
        """Where an array is; name: of the trajectory's group, where trajectories have one."""
        return array.key if self.lead else f"{name or '0000'}/{array.key}"

    def names(self, file: h5py.File) -> tuple[str, ...]:
        """Names of the trajectories' groups, where they have any."""
        return () if self.lead else tuple(sorted(filter(str.isdigit, file), key=int))

    def config(self, file: h5py.File, name: str = "") -> dict[str, str]:
        """ "config": the text in which PDEBench's generator says its settings, if the file has it. It is an
        attribute of the first trajectory's group, or of the file (config or, in older ones, 0000/config)."""
        places = [(file.attrs, f"{name}/config"), (file.attrs, "config")]
        places += [(node(file, name).attrs, "config")] if name else []
        found = [attributes[key] for attributes, key in places if key in attributes]
        if not found:
            return {}
        return {"config": found[0].decode() if isinstance(found[0], bytes) else str(found[0])}

    def fits(self, file: h5py.File) -> bool:
        """Whether a file may be of this task, by its keys and the axes of its arrays."""
        return all(
            len(getattr(node(file, self.path(array, *self.names(file)[:1])), "shape", None) or ())
            == len(self.axes(array))
            for array in self.task.arrays
        )

    def dataset(self, file: h5py.File, array: Array, name: str = "") -> tuple[h5py.Dataset, tuple[int, ...]]:
        """The dataset that holds an array, and where its axes begin: (), or (0,) behind a leading axis of
        length 1. Raises ValueError where there is no dataset of such axes."""
        path, axes = self.path(array, name), self.axes(array)
        found = node(file, path)
        is_there = isinstance(found, h5py.Dataset)
        lead = (0,) if is_there and len(found.shape) == len(axes) + 1 and found.shape[0] == 1 else ()
        if not is_there or len(found.shape) != len(lead + axes) or found.dtype.kind != "f":
            held = f"{path} of shape {found.shape}, {found.dtype}" if is_there else f"no array {path!r}"
            raise ValueError(
                f"{file.filename} has {held}; expected {len(axes)} axes ({', '.join(axes)}) of "
                f"real floating-point numbers{'' if self.lead else ' in every group'} for "
                f"{self.task.name}. Write it so with h5py, or take the right file. "
                f"{found_in(file)}"
            )
        return found, lead

    def parts(self, u: np.ndarray) -> Iterable[tuple[Array, np.ndarray]]:
        """Every array of a file with its channels of u (n, time, channel, *space), views."""
        arrays = self.task.arrays
        return zip(
            arrays, np.split(u, np.cumsum([array.channels for array in arrays])[:-1], axis=2), strict=True
        )

    def placed(self, first: int, u: np.ndarray) -> Iterator[tuple[str, tuple, np.ndarray]]:
        """Where the trajectories u (n, time, channel, *space) from `first` on lie: (dataset, its rows, their
        values)."""
        for array, values in self.parts(u):
            values = np.moveaxis(values, 2, -1) if array.vector else values[:, :, 0]
            values = values[:, 0] if array.steady else values
            for name, at, rows in self.places(first, first + len(u)):
                yield self.path(array, name), at, values[rows]

    def most_bytes(self, settings: dict[str, Any], size: int) -> int:
        """What a file of `size` bytes of numbers may take on the disk."""
        return size if self.lead else size + size // 50 + settings["num_trajectories"] * GROUP_BYTES

    def coordinate(self, axis: str, name: str = "") -> str:
        """Where the coordinate of an axis is."""
        return "t" if axis == "t" and self.task.has_own_times else f"{axis}-coordinate"

    def places(self, first: int, last: int, names: tuple[str, ...] = ()) -> list[tuple[str, tuple, Any]]:
        """(group, its rows, which of the trajectories first..last-1 they are) of every group that holds
        some."""
        return [("", (slice(first, last),), slice(None))]

    def create(self, file: h5py.File, settings: dict[str, Any]) -> None:
        """Attributes, coordinates and every array at full size (contiguous, not filled)."""
        task, num, frames = self.task, settings["num_trajectories"], settings["num_frames"]
        file.attrs.update(task.attributes(settings["parameter"]))
        # one time more than frames, as published
        for axis, values in self.grid(settings, frames + 1).items():
            is_own = axis == "t" and task.has_own_times
            file[self.coordinate(axis)] = np.tile(values[:frames], (num, 1)) if is_own else values
        for array in task.arrays:
            file.create_dataset(
                array.key,
                self.shape(array, num, frames, settings["resolution"]),
                np.float32,
                dcpl=allocated(),
            )

    def store(self, file: h5py.File, settings: dict[str, Any], first: int, u: np.ndarray) -> None:
        """Write u as trajectories first, first + 1, .."""
        for path, rows, values in self.placed(first, u):
            node(file, path)[rows] = values


class Groups(Layout):
    """The other one: a group per trajectory, which holds one array with all channels."""

    lead = ()
    split = ("train", "val", "test")
    opening = "{} HDF5 groups 0000, 0001, .., one per trajectory, each with"

    def coordinate(self, axis: str, name: str = "") -> str:
        return f"{name}/grid/{axis}".lstrip("/")

    def places(self, first: int, last: int, names: tuple[str, ...] = ()) -> list[tuple[str, tuple, Any]]:
        return [(names[i] if names else f"{i:04d}", (), i - first) for i in range(first, last)]

    def create(self, file: h5py.File, settings: dict[str, Any]) -> None:
        """Nothing: the file grows by groups."""

    def store(self, file: h5py.File, settings: dict[str, Any], first: int, u: np.ndarray) -> None:
        sim = {
            **dict(self.task.constants),
            "t": settings["t_end"],
            "tdim": settings["num_frames"],
            "seed": settings["seed"],
        }
        for axis, (low, high) in zip(self.task.axes, self.task.spans, strict=True):
            sim |= {f"{axis}_min": low, f"{axis}_max": high, f"{axis}dim": settings["resolution"]}
        for index, (key, _, values) in enumerate(self.placed(first, u), first):
            name, _, array = key.partition("/")
            if node(file, name) is not None:
                del file[name]  # written after the last confirmed chunk, perhaps not completely
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


def layout_of(task: Task) -> Layout:
    """The layout of the files of a task."""
    return {"arrays": Layout, "groups": Groups}[task.layout](task)


def found_in(file: h5py.File) -> str:
    """What a file holds, and which tasks it may be of."""
    keys = sorted(file)
    listing = [
        f"{key} {item.shape}" if isinstance(item := node(file, key), h5py.Dataset) else f"group {key}"
        for key in keys[:8]
    ]
    could_be = [name for name, task in TASKS.items() if layout_of(task).fits(file)]
    more = f" and {len(keys) - 8} more" * (len(keys) > 8)
    return (
        f"Found: {', '.join(listing) or 'nothing'}{more}. Check data.tasks; this file could be: "
        f"{', '.join(could_be) or 'none of ours'}."
    )


def fixed_text(text: str) -> np.bytes_:
    """A text attribute of fixed length: of variable length, HDF5 may look for it in a damaged file for
    ever."""
    return np.bytes_(text.encode("ascii"))
