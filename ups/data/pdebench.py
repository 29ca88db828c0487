"""Opening PDEBench's HDF5 files of either layout (ups/data/layout.py), and the split by trajectory index."""

import contextlib
import fnmatch
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.common.files import partial_path
from ups.common.place import make_target
from ups.common.rows import split_sizes
from ups.data.layout import Layout, found_in, layout_of
from ups.tasks import TASKS, Place, Task, get_task
from ups.userdata.inspect_file import is_even
from ups.userdata.readers.hdf5 import node, require_written
from ups.userdata.readers.store import Store, Stored
from ups.userdata.trajectories import DataFile, Trajectories

AGAIN = (
    f"If it is yours, write it again (docs/own_data.md); else delete it and run `{make_target('data')}`, "
    "which makes it again."
)
SETTINGS, PROGRESS = "ups_settings", "ups_progress"  # attributes of files we generate


def data_bytes(task: str, num_trajectories: int, num_frames: int, resolution: int) -> int:
    """Bytes of an uncompressed file of `task`."""
    spec = get_task(task)
    frames = sum(len(array.fields) * (1 if array.is_steady else num_frames) for array in spec.arrays)
    return 4 * num_trajectories * frames * resolution**spec.ndim


def split_indices(
    task: str, num_trajectories: int, val_fraction: float, test_fraction: float
) -> dict[str, np.ndarray]:
    """Trajectory indices of "train", "val" and "test" (each int64, ascending).

    By PDEBench's convention test trajectories come first in an array file and last in a group file, and
    validation is next to them. The split is by index and the same for all files, because published files of
    different parameters repeat the initial conditions. Raises ValueError if a split would be empty.
    """
    sizes = split_sizes(num_trajectories, val_fraction, test_fraction)
    if sizes["train"] < 1 or min(val_fraction, test_fraction) <= 0:
        raise ValueError(
            f"{task}: {num_trajectories} trajectories cannot be split with data.val_fraction {val_fraction} "
            f"and data.test_fraction {test_fraction}; expected at least one each for training, validation "
            "and test. Add trajectories or lower the fractions."
        )
    names = layout_of(get_task(task)).split
    cuts = np.split(np.arange(num_trajectories), np.cumsum([sizes[name] for name in names])[:-1])
    return dict(zip(names, cuts, strict=True))


def made_with(file: h5py.File) -> tuple[dict[str, Any], int] | None:
    """Settings of a generated file and how many trajectories it has so far; None for other files."""
    if not {SETTINGS, PROGRESS} & set(file.attrs):
        return None
    try:
        settings = json.loads(file.attrs[SETTINGS])
        return settings | {"num_trajectories": int(settings["num_trajectories"])}, int(file.attrs[PROGRESS])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file.filename} has attributes {PROGRESS} and {SETTINGS} that cannot be read "
            f"({error}); expected those that `{make_target('data')}` writes. {AGAIN}"
        ) from error


@contextlib.contextmanager
def opened(path: Path, task: str) -> Iterator[h5py.File]:
    """The open file. Any error of HDF5 inside the block becomes a ValueError that says what to do."""
    if not path.is_file():  # a folder or a pipe would block
        unfinished = partial_path(path)
        more = f" There is an unfinished {unfinished.name}, which it continues." * unfinished.exists()
        raise FileNotFoundError(
            f"no data file {path}; expected {task} in PDEBench's layout. Run `{make_target('data')}` "
            f"(or correct data.root).{more}"
        )
    try:
        with h5py.File(path, "r", locking=False) as file:  # finished files are never written to
            yield file
    except (OSError, LookupError, RuntimeError, TypeError, ArithmeticError, ValueError) as error:
        # h5py raises these for damage of different kinds
        if isinstance(error, ValueError) and str(path) in str(error):  # our own, which name the file
            raise
        raise ValueError(
            f"{path} is damaged, or no readable HDF5 file ({error}); expected a complete one of {task}. "
            "Check its permissions; if no other process writes it, delete it and run "
            f"`{make_target('data')}`."
        ) from error


class Published(Store):
    """An open file in PDEBench's layout, read in this process."""

    def __init__(self, file: h5py.File, path: Path, task: Task):
        super().__init__(path)
        self.file, self.task = file, task
        self.found: dict[str, h5py.Dataset] = {}
        self.shapes: dict[Place, tuple[int, ...]] = {}  # of the first group that was looked at

    def _dataset(self, name: str) -> h5py.Dataset:
        """An array. Raises ValueError for a group of another shape."""
        if name in self.found:
            return self.found[name]
        place = next(place for place in self.task.arrays if fnmatch.fnmatchcase(name, place.array))
        found = layout_of(self.task).dataset(self.file, place, name.rpartition("/")[0])
        if found.shape != self.shapes.setdefault(place, found.shape):
            raise ValueError(
                f"{self.path}: {found.name} holds {found.dtype} of shape {found.shape}, "
                "unlike the first trajectory; expected one shape for all. Remove that "
                f"trajectory, or download or generate the file again with `{make_target('data')}`."
            )
        if self.task.is_grouped:  # `describe` checks arrays of all trajectories
            require_written(found, self.path, AGAIN)
        return self.found.setdefault(name, found)

    def array(self, name: str) -> Stored:
        found = self._dataset(name)
        return Stored(found.shape, found.dtype)

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        return self._dataset(name)[index]


@contextlib.contextmanager
def open_published(path: Path, *, task: Task) -> Iterator[Published]:
    """The file of a task, for `Trajectories.read`."""
    with opened(path, task.name) as file:
        yield Published(file, path, task)


def open_data(path: str | Path, task: str, **strides: int) -> Trajectories:
    """`describe` of the file at `path`. Raises FileNotFoundError naming the make target, and as that."""
    with opened(path := Path(path), task) as file:
        return describe(file, path, task, **strides)


def describe(
    file: h5py.File,
    path: Path,
    task: str,
    *,
    space_stride: int = 1,
    time_stride: int = 1,
    first_frame: int = 0,
) -> Trajectories:
    """A description of the trajectories in an open file, called `path`; `read` reads them.

    space_stride, time_stride: every n-th cell and frame is kept (PDEBench's reduced_resolution); first_frame:
    frames before it are dropped. A leading axis of length 1 (issue 56 of PDEBench) is accepted and noted. The
    time coordinate may have one entry more than there are frames, as PDEBench writes it. Raises ValueError
    for a file that is unfinished, lacks a key or has the wrong rank, size, kind of number or time coordinate.
    """
    spec = get_task(task)
    layout = layout_of(spec)
    if min(space_stride, time_stride) < 1 or first_frame < 0:
        raise ValueError(
            f"{task}: space_stride {space_stride}, time_stride {time_stride}, first_frame {first_frame}; "
            f"expected strides of at least 1 and first_frame of at least 0. Correct task.{task}."
        )
    made, groups, notes = made_with(file), layout.names(file), []
    if made and made[1] < made[0]["num_trajectories"]:
        raise ValueError(
            f"{path} is unfinished ({made[1]} trajectories); expected a complete file. Run "
            f"`{make_target('data')}`, which continues it."
        )
    sizes, arrays = [], []  # (trajectories, frames, space) of every array
    for array in spec.arrays:
        dataset, name = layout.dataset(file, array, *groups[:1]), array.array.removeprefix("*/")
        lead = ("single",) * (dataset.ndim - len(array.axes))
        notes += [f"{name} has a leading axis of length 1 (a device axis), ignored"] * len(lead)
        arrays.append(replace(array, axes=lead + array.axes))
        require_written(dataset, path, AGAIN)
        size = dict(zip(array.axes, dataset.shape[len(lead) :], strict=True))
        frames = sizes[0][1] if sizes and array.is_steady else size.get("time", 1)  # it holds for every frame
        sizes.append((len(groups) or size["trajectory"], frames, tuple(size[axis] for axis in spec.axes)))
        if (
            0 in dataset.shape
            or (sizes[-1][1] != 1 and spec.is_steady)
            or size.get("channel", len(array.fields)) != len(array.fields)
        ):
            raise ValueError(
                f"{path}: {dataset.name} has shape {dataset.shape} ({', '.join(size)}); expected at least "
                f"one trajectory, frame and cell{', one frame' * spec.is_steady} and {len(array.fields)} "
                f"channel(s). {AGAIN}"
            )
        if sizes[-1] != sizes[0]:
            raise ValueError(
                f"{path}: {dataset.name} has (trajectories, frames, space) = {sizes[-1]}; "
                f"expected {sizes[0]} as in {spec.arrays[0].array}. {AGAIN}"
            )
    num, frames, space = sizes[0]
    if groups and int(groups[-1]) != len(groups) - 1:
        notes.append(
            f"{len(groups)} groups named {groups[0]} to {groups[-1]}: some are missing; counted by position"
        )
    if first_frame >= frames:
        raise ValueError(
            f"{path} has {frames} frames; expected more than first_frame {first_frame}. "
            f"Lower task.{task}.first_frame."
        )
    attributes = {
        key: value.item() if getattr(value, "size", 0) == 1 else value
        for key, value in file.attrs.items()
        if "/" not in key
    }
    _require_task(path, spec, attributes, made)
    coordinates = _coordinates(file, path, layout, groups, frames, space)
    if made and "whole" in made[0]:
        notes.append(
            f"it holds {made[0]['generator']}; the published MD5 is of the whole file, so nothing "
            "was compared with it"
        )
    if spec.parameters and spec.parameters[0] not in attributes:
        notes.append(
            f"no attribute {spec.parameters[0]}; {spec.parameter_in(path.name)} is taken from the file name"
        )
    coordinates = {
        axis: values[first_frame::time_stride] if axis == "t" else values[::space_stride]
        for axis, values in coordinates.items()
    }
    times = coordinates.get("t", np.zeros(1))
    return Trajectories(
        path=path,
        task=spec,
        arrays=tuple(arrays),
        files=(DataFile(path, groups, np.zeros((num, 0)), (frames,) * num),),
        rows=np.stack([np.zeros(num, int), np.arange(num), np.full(num, first_frame)], 1),
        num_frames=-(-(frames - first_frame) // time_stride),
        space=tuple(-(-size // space_stride) for size in space),
        dt=float((times[-1] - times[0]) / max(1, len(times) - 1)),
        coordinates=coordinates,
        notes=tuple(notes),
        space_stride=space_stride,
        time_stride=time_stride,
        first_frame=first_frame,
        parameter=_parameter(path, spec, attributes),
        attributes=attributes,
        opened=partial(open_published, task=spec),
    )


def _coordinates(
    file: h5py.File, path: Path, layout: Layout, groups: tuple[str, ...], frames: int, space: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The coordinates in the file, float64. A time-dependent task must have a time coordinate."""
    spec, key = layout.task, partial(layout.coordinate, name=groups[0] if groups else "")
    expected = ({} if spec.is_steady else {"t": frames}) | dict(zip(spec.axes, space, strict=True))
    found = {axis: stored for axis in expected if (stored := node(file, key(axis))) is not None}
    if "t" in expected and "t" not in found:
        raise ValueError(
            f"{path} has no {key('t')!r}; expected the frames' times, ({frames},) numbers in "
            f"equal steps. Add that array with h5py. {found_in(file)}"
        )
    coordinates = {}
    for axis, stored in found.items():
        size, shape = expected[axis], getattr(stored, "shape", ())
        is_per_trajectory = axis == "t" and len(shape) == 2
        if not (
            isinstance(stored, h5py.Dataset)
            and stored.dtype.kind in "fiu"
            and 0 not in shape
            and shape[is_per_trajectory:] in ((size,), (size + (axis == "t"),))
        ):
            raise ValueError(
                f"{path}: {key(axis)} has shape {shape}; expected ({size},){' or one more' * (axis == 't')} "
                f"to match the data, of numbers. {AGAIN}"
            )
        values = np.asarray(stored[0] if is_per_trajectory else stored[()], np.float64)
        steps = np.diff(values[:size])
        if not is_even(values[:size]):  # float32 coordinates of a thousand steps differ by 1e-4 of a step
            raise ValueError(
                f"{path}: {key(axis)} runs from {values[0]} to {values[size - 1]} in steps of {steps.min()} "
                f"to {steps.max()}; expected equal, increasing steps. Resample the data or drop the file."
            )
        coordinates[axis] = values[:size]
    return coordinates


def _require_task(
    path: Path, spec: Task, attributes: dict[str, Any], made: tuple[dict[str, Any], int] | None
) -> None:
    """Raise ValueError for a file of another task with the same arrays.

    Generated files name their task; other files are recognised by the names of their parameters."""
    alike = [
        task
        for task in TASKS.values()
        if (task.arrays, task.ndim, task.hides) == (spec.arrays, spec.ndim, False)
    ]
    names = {name for task in alike for name in task.parameters} & set(attributes)
    fits = [made[0]["task"]] if made else [task.name for task in alike if set(task.parameters) == names]
    if fits and names and not {spec.name, spec.files_of} & set(fits):
        raise ValueError(
            f"{path} has attributes ({', '.join(sorted(names))}) of {fits[0]}; expected a file "
            f"of {spec.name}, with {', '.join(spec.parameters)}. Name the right task in "
            "data.tasks, or correct the attributes with h5py."
        )


def _parameter(path: Path, spec: Task, attributes: dict[str, Any]) -> float | None:
    """The first parameter, from the file's attribute or else from the file name."""
    if not spec.parameters:
        return None
    name = spec.parameters[0]
    value = attributes.get(name, spec.parameter_in(path.name))
    try:
        return float(value)
    except (TypeError, ValueError):
        found = (
            f"attribute {name} is {value!r}"
            if name in attributes
            else f"no attribute {name} (it has: "
            f"{', '.join(attributes) or 'none'}) and its name tells no value"
        )
        raise ValueError(
            f"{path}: {found}; expected a number. Correct the attribute with h5py, or leave it out "
            f"and name it like {spec.file_for(0.1)}."
        ) from None
