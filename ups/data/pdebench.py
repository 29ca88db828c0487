"""The reader of PDEBench's HDF5 files (either layout: ups/data/layout.py), and the split by trajectory index.

Both layouts become (trajectory, time, channel, *space) float32 here.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.common.files import partial_path
from ups.common.rows import split_sizes, stratified_rows
from ups.data.layout import Layout, found_in, layout_of
from ups.tasks import TASKS, Array, Task, get_task
from ups.userdata.readers.hdf5 import node, require_written

# largest temporary of a read; at this size opening and slicing cost under 1 % (measured)
BLOCK_BYTES = 16 * 2**20
SETTINGS, PROGRESS = "ups_settings", "ups_progress"  # attributes of files we generate
AGAIN = (
    "If it is yours, write it again (docs/own_data.md); else delete it and run `make data`, which "
    "makes it again."
)


def data_bytes(task: str, num_trajectories: int, num_frames: int, resolution: int) -> int:
    """Bytes of an uncompressed file of `task`."""
    spec = get_task(task)
    frames = sum(array.channels * (1 if array.steady else num_frames) for array in spec.arrays)
    return 4 * num_trajectories * frames * resolution**spec.ndim


def split_indices(
    task: str, num_trajectories: int, val_fraction: float, test_fraction: float
) -> dict[str, np.ndarray]:
    """Trajectory indices of "train", "val" and "test" (each int64, ascending).

    PDEBench's convention: test is the first share of an array file and the last share of a group file;
    validation is next to it. By index, because published files of different parameters repeat the initial
    conditions: the split of one file is the split of all. Raises ValueError when fewer than three
    trajectories or nothing is left to train on.
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
    """Settings of a generated file and how many trajectories it has so far; None for one that is not ours."""
    if not {SETTINGS, PROGRESS} & set(file.attrs):
        return None
    try:
        settings = json.loads(file.attrs[SETTINGS])
        return settings | {"num_trajectories": int(settings["num_trajectories"])}, int(file.attrs[PROGRESS])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file.filename} has attributes {PROGRESS} and {SETTINGS} that cannot be read "
            f"({error}); expected those that `make data` writes. {AGAIN}"
        ) from error


# ----------------------------------------------------------------------------------------------------- reader


@dataclass(frozen=True)
class Trajectories:
    """One file of one task, described but not read. Holds no open file: safe to fork, pickle and share
    between threads.

    num_trajectories, num_frames, space, dt (model time units, 0 for a steady task) and coordinates ("t" and
    the space axes, float64) are those after striding. parameter: first file-level parameter or None.
    attributes: what the file says about itself. notes: oddities that were put right, for the user to see.
    groups: those of the trajectories, where they have any. A reader of another format has all of these but
    `groups`, `read` and `spread`.
    """

    path: Path
    task: Task
    num_trajectories: int
    num_frames: int
    space: tuple[int, ...]
    dt: float
    parameter: float | None
    coordinates: dict[str, np.ndarray]
    attributes: dict[str, Any]
    notes: tuple[str, ...]
    space_stride: int
    time_stride: int
    first_frame: int
    groups: tuple[str, ...]

    mask = None  # every cell has a value
    years = None  # no published frames have dates

    def place(self, row: int, frame: int) -> tuple[Path, str]:
        """The file in which a frame of a trajectory lies, and where, in words."""
        return self.path, f"trajectory {row}, frame {self.first_frame + frame * self.time_stride}"

    def read(self, first: int, last: int, frames: range | None = None) -> np.ndarray:
        """Trajectories first..last-1, shape (last - first, num_frames, channels, *space), float32, physical
        units; of `frames`, consecutive ones, where these are given.

        Channels are `Task.channels`: the coefficient of a steady task first. Reads these trajectories and
        strides only. Raises ValueError for a group of another shape.
        """
        assert 0 <= first < last <= self.num_trajectories, (self.path, first, last, self.num_trajectories)
        with opened(self.path, self.task.name) as file:
            return self.read_from(file, first, last, frames)

    def precision(self, name: str) -> float:
        """The relative rounding of a field as the file holds it."""
        with opened(self.path, self.task.name) as file:
            layout, task = layout_of(self.task), self.task
            names = [
                (array, task.channels[i])
                for array, part in layout.parts(np.arange(len(task.channels)).reshape(1, 1, -1))
                for i in part[0, 0]
            ]
            array = next(array for array, field in names if field == name)
            return float(np.finfo(layout.dataset(file, array, *self.groups[:1])[0].dtype).eps)

    def stratified_rows(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (n,) of at most `num` trajectories spread over the file, and what `read` gives of them."""
        return stratified_rows(self, num)

    def read_from(self, file: h5py.File, first: int, last: int, frames: range | None = None) -> np.ndarray:
        """`read` from the open file."""
        frames = range(self.num_frames) if frames is None else frames
        out = np.empty((last - first, len(frames), len(self.task.channels), *self.space), np.float32)
        layout = layout_of(self.task)
        for array, part in layout.parts(out):
            for name, at, rows in layout.places(first, last, self.groups):
                dataset, lead = layout.dataset(file, array, name)
                if name:  # a group; arrays that hold all trajectories were looked at when described
                    require_written(dataset, self.path, AGAIN)
                self._fill(dataset, array, part[rows].reshape(-1, *part.shape[1:]), lead, at, frames)
        return out

    def _fill(
        self,
        dataset: h5py.Dataset,
        array: Array,
        out: np.ndarray,
        lead: tuple[int, ...],
        at: tuple[slice, ...],
        wanted: range,
    ) -> None:
        """Copy the frames `wanted` of the trajectories `at` of `dataset` (the only one if it has no such
        axis), behind `lead`, into out (n, time, channel, *space)."""
        task, stride, shape = self.task, self.space_stride, dataset.shape[len(lead + at) :]
        first = int(not array.steady)  # axis of space
        expected = tuple(-(-size // stride) for size in shape[first : first + task.ndim])
        frames = self.num_frames if array.steady else -(-(shape[0] - self.first_frame) // self.time_stride)
        channels = (array.channels,) if array.vector else ()
        if (frames, expected, shape[first + task.ndim :]) != (self.num_frames, self.space, channels):
            raise ValueError(
                f"{self.path}: {dataset.name} holds {dataset.dtype} of shape {dataset.shape}, "
                "unlike the first trajectory; expected one shape for all. Remove that "
                "trajectory, or download or generate the file again with `make data`."
            )
        wanted = range(1) if array.steady else wanted  # the same of every frame
        frame_bytes = math.prod(shape[first:]) * dataset.dtype.itemsize
        num_frames = max(1, min(frames, BLOCK_BYTES // frame_bytes))
        num_rows = max(1, BLOCK_BYTES // (frame_bytes * frames))
        for row in range(0, len(out), num_rows):
            rows = [slice(part.start + row, min(part.start + row + num_rows, part.stop)) for part in at]
            for frame in range(wanted.start, wanted.stop, num_frames):
                count = min(num_frames, wanted.stop - frame)
                start = self.first_frame + frame * self.time_stride
                times = (
                    ()
                    if array.steady
                    else (slice(start, start + (count - 1) * self.time_stride + 1, self.time_stride),)
                )
                block = dataset[(*lead, *rows, *times)].reshape(-1, count, *shape[first:])
                block = np.moveaxis(block, -1, 2) if array.vector else block[:, :, None]
                into = frame - wanted.start
                places = slice(None) if array.steady else slice(into, into + count)
                out[row : row + num_rows, places] = block[(..., *[slice(None, None, stride)] * task.ndim)]


def open_data(
    path: str | Path, task: str, *, space_stride: int = 1, time_stride: int = 1, first_frame: int = 0
) -> Trajectories:
    """The trajectories in `path`, described but not read.

    Accepted oddities, listed in `notes`: a leading axis of length 1 (issue 56 of PDEBench). A time coordinate
    with one entry more than there are frames is how PDEBench writes it; the last is dropped. space_stride and
    time_stride keep every n-th cell and frame (PDEBench's reduced_resolution), first_frame drops frames
    before it; `read` then reads no others. Raises FileNotFoundError naming the make target; ValueError for a
    file that is not HDF5, is unfinished, lacks a key (lists what it holds) or has the wrong rank, size, kind
    of number or time coordinate.
    """
    path = Path(path)
    with opened(path, task) as file:
        return describe(
            file, path, task, space_stride=space_stride, time_stride=time_stride, first_frame=first_frame
        )


def describe(
    file: h5py.File,
    path: Path,
    task: str,
    *,
    space_stride: int = 1,
    time_stride: int = 1,
    first_frame: int = 0,
) -> Trajectories:
    """`open_data` of an open file, called `path`."""
    spec = get_task(task)
    layout = layout_of(spec)
    if min(space_stride, time_stride) < 1 or first_frame < 0:
        raise ValueError(
            f"{task}: space_stride {space_stride}, time_stride {time_stride}, first_frame "
            f"{first_frame}; expected strides of at least 1 and first_frame of at least 0. Mend "
            f"task.{task}."
        )
    made, groups, notes = made_with(file), layout.names(file), []
    if made and made[1] < made[0]["num_trajectories"]:
        raise ValueError(
            f"{path} is unfinished ({made[1]} trajectories); expected a complete file. Run "
            "`make data`, which continues it."
        )
    sizes = []  # (trajectories, frames, space) of every array
    for array in spec.arrays:
        dataset, lead = layout.dataset(file, array, *groups[:1])
        notes += [f"{array.key} has a leading axis of length 1 (a device axis), ignored"] * len(lead)
        require_written(dataset, path, AGAIN)
        size = dict(zip(layout.axes(array), dataset.shape[len(lead) :], strict=True))
        frames = sizes[0][1] if sizes and array.steady else size.get("time", 1)  # it holds for every frame
        sizes.append((len(groups) or size["trajectory"], frames, tuple(size[axis] for axis in spec.axes)))
        if (
            0 in dataset.shape
            or (sizes[-1][1] != 1 and spec.is_steady)
            or size.get("channel", array.channels) != array.channels
        ):
            raise ValueError(
                f"{path}: {dataset.name} has shape {dataset.shape} ({', '.join(size)}); "
                "expected at least one trajectory, frame and "
                f"cell{', one frame' * spec.is_steady} and {array.channels} channel(s). "
                f"{AGAIN}"
            )
        if sizes[-1] != sizes[0]:
            raise ValueError(
                f"{path}: {dataset.name} has (trajectories, frames, space) = {sizes[-1]}; "
                f"expected {sizes[0]} as in {spec.arrays[0].key}. {AGAIN}"
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
    } | layout.config(file, *groups[:1])
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
        num_trajectories=num,
        num_frames=-(-(frames - first_frame) // time_stride),
        space=tuple(-(-size // space_stride) for size in space),
        dt=float((times[-1] - times[0]) / max(1, len(times) - 1)),
        parameter=_parameter(path, spec, attributes),
        coordinates=coordinates,
        attributes=attributes,
        notes=tuple(notes),
        space_stride=space_stride,
        time_stride=time_stride,
        first_frame=first_frame,
        groups=groups,
    )


@contextlib.contextmanager
def opened(path: Path, task: str) -> Iterator[h5py.File]:
    """The open file. What HDF5 says about a damaged one, whenever it finds out, becomes a ValueError that
    says what to do."""
    if not path.is_file():  # nor a folder or a pipe, which would be waited at
        unfinished = partial_path(path)
        more = f" There is an unfinished {unfinished.name}, which it continues." * unfinished.exists()
        raise FileNotFoundError(
            f"no data file {path}; expected {task} in PDEBench's layout. Run `make data` "
            f"(or mend data.root).{more}"
        )
    try:
        with h5py.File(path, "r", locking=False) as file:  # finished files are never written to
            yield file
    except (OSError, LookupError, RuntimeError, TypeError, ArithmeticError, ValueError) as error:
        # h5py's, by kind of damage
        if isinstance(error, ValueError) and str(path) in str(error):  # our own, which name the file
            raise
        raise ValueError(
            f"{path} is damaged, or no readable HDF5 file ({error}); expected a complete one of "
            f"{task}. Check its permissions; if no other process writes it, delete it and run "
            "`make data`."
        ) from error


def _coordinates(
    file: h5py.File, path: Path, layout: Layout, groups: tuple[str, ...], frames: int, space: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Coordinates present in the file, float64; the time coordinate is required of a time-dependent task."""
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
                f"{path}: {key(axis)} has shape {shape}; expected "
                f"({size},){' or one more' * (axis == 't')} to match the data, of numbers. "
                f"{AGAIN}"
            )
        values = np.asarray(stored[0] if is_per_trajectory else stored[()], np.float64)
        steps = np.diff(values[:size])
        # float32 coordinates of a thousand steps differ by about 1e-4 of a step
        if size > 1 and not (steps.min() > 0 and np.ptp(steps) <= 0.01 * steps.mean()):
            raise ValueError(
                f"{path}: {key(axis)} runs from {values[0]} to {values[size - 1]} in steps of "
                f"{steps.min()} to {steps.max()}; expected equal, increasing steps. Resample "
                "the data or drop the file."
            )
        coordinates[axis] = values[:size]
    return coordinates


def _require_task(
    path: Path, spec: Task, attributes: dict[str, Any], made: tuple[dict[str, Any], int] | None
) -> None:
    """Refuse a file of a task with the same arrays, told by what made it or by the names of its
    parameters."""
    rivals = [
        task
        for task in TASKS.values()
        if (task.arrays, task.ndim, task.hides) == (spec.arrays, spec.ndim, False)
    ]
    names = {name for task in rivals for name in task.parameters} & set(attributes)
    fits = [made[0]["task"]] if made else [task.name for task in rivals if set(task.parameters) == names]
    if fits and names and not {spec.name, spec.files_of} & set(fits):
        raise ValueError(
            f"{path} has attributes ({', '.join(sorted(names))}) of {fits[0]}; expected a file "
            f"of {spec.name}, with {', '.join(spec.parameters)}. Name the right task in "
            "data.tasks, or mend the attributes with h5py."
        )


def _parameter(path: Path, spec: Task, attributes: dict[str, Any]) -> float | None:
    """First parameter from the file's attribute, else from the published file name."""
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
            f"{path}: {found}; expected a number. Mend the attribute with h5py, or leave it out "
            f"and name it like {spec.file_for(0.1)}."
        ) from None
