"""PDEBench's two HDF5 layouts: the place of every trajectory's numbers in a file, for reading and writing.

Arrays: one array per channel, trajectories on axis 0, contiguous and uncompressed (`tensor` (b, t, x);
`density`, `pressure`, `Vx`, ..; Darcy's `nu` (b, x, y) and `tensor` (b, 1, x, y); `velocity` (b, t, x, y,
v)). Groups: one group per trajectory, `0000/data` (t, *space, v), lzf, with `0000/grid/x` and so on. The keys
of a file decide its layout, never its suffix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import yaml
from h5py import h5d

from ups.tasks import Task
from ups.userdata.readers.hdf5 import node

# bound of the metadata of one group: headers, trees, coordinates, attributes (a third of it was measured)
GROUP_BYTES = 2**15


@dataclass(frozen=True)
class Layout:
    """The layout with one array per channel. split: order of the splits by trajectory number, PDEBench's
    convention."""

    task: Task
    split = ("test", "val", "train")

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

    def placed(self, first: int, u: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
        """(dataset, its rows, their values) for the trajectories u (n, time, channel, *space), numbered from
        `first` on."""
        ends = np.cumsum([len(array.fields) for array in self.task.arrays])
        for array, values in zip(self.task.arrays, np.split(u, ends[:-1], 2), strict=True):
            values = np.moveaxis(values, 2, -1) if "channel" in array.axes else values[:, :, 0]
            values = values[:, 0] if array.is_steady else values
            if self.task.is_grouped:
                for number, one in enumerate(values, first):
                    yield array.array.replace("*", f"{number:04d}"), (), one
            else:
                yield array.array, slice(first, first + len(u)), values

    def most_bytes(self, settings: dict[str, Any], size: int) -> int:
        """Bound of the disk space of a file with `size` bytes of numbers."""
        return (
            size + size // 50 + settings["num_trajectories"] * GROUP_BYTES if self.task.is_grouped else size
        )

    def coordinate(self, axis: str, name: str = "") -> str:
        """The key of the coordinate of an axis. name: of the trajectory's group."""
        return "t" if axis == "t" and self.task.has_own_times else f"{axis}-coordinate"

    def create(self, file: h5py.File, settings: dict[str, Any]) -> None:
        """Attributes, coordinates and every array at full size (contiguous, not filled)."""
        task, num, frames = self.task, settings["num_trajectories"], settings["num_frames"]
        file.attrs.update(task.attributes(settings["parameter"]))
        # one time more than frames, as published
        for axis, values in self.grid(settings, frames + 1).items():
            is_per_trajectory = axis == "t" and task.has_own_times
            file[self.coordinate(axis)] = np.tile(values[:frames], (num, 1)) if is_per_trajectory else values
        for array in task.arrays:
            sizes = {"trajectory": num, "time": frames, "channel": len(array.fields)}
            shape = tuple(sizes.get(axis, settings["resolution"]) for axis in array.axes)
            file.create_dataset(array.array, shape, np.float32, dcpl=allocated())

    def store(self, file: h5py.File, settings: dict[str, Any], first: int, u: np.ndarray) -> None:
        """Write u as trajectories first, first + 1, .."""
        for path, rows, values in self.placed(first, u):
            node(file, path)[rows] = values


class Groups(Layout):
    """The layout with one group per trajectory, which holds one array of all channels."""

    split = ("train", "val", "test")

    def coordinate(self, axis: str, name: str = "") -> str:
        return f"{name}/grid/{axis}".lstrip("/")

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
                del file[name]  # from an interrupted chunk, perhaps incomplete
            group = file.create_group(name)
            group.create_dataset(array, data=values, compression="lzf")
            for axis, points in self.grid(settings, settings["num_frames"]).items():
                group[self.coordinate(axis)] = points
            config = {"sim": {**sim, "index": index}, "generator": settings["generator"]}
            group.attrs["config"] = fixed_text(yaml.safe_dump(config))


def allocated() -> h5py.h5p.PropDCID:
    """Creation properties of a contiguous dataset whose space is allocated at once and not filled."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    return properties


def layout_of(task: Task) -> Layout:
    """The layout of the files of a task."""
    return (Groups if task.is_grouped else Layout)(task)


def fixed_text(text: str) -> np.bytes_:
    """A text attribute of fixed length. HDF5 may search a damaged file endlessly for one of variable
    length."""
    return np.bytes_(text.encode("ascii"))
