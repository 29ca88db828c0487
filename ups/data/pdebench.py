"""PDEBench's HDF5 files (ups/data/layout.py), opened as the user's files are, and the split by trajectory
index. What a section would say of them is in the row of their task (ups/tasks/families.py)."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ups.common.files import partial_path
from ups.common.place import make_target
from ups.common.rows import split_sizes
from ups.data.layout import layout_of
from ups.tasks import TASKS, Task, get_task
from ups.userdata.grid import find_coordinates
from ups.userdata.inspect_file import ConfigError, is_even
from ups.userdata.open_files import OpenFile
from ups.userdata.readers.hdf5 import Hdf5
from ups.userdata.readers.store import Store
from ups.userdata.times import times_in
from ups.userdata.trajectories import Trajectories

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


def made_with(attributes: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], int] | None:
    """Settings of a generated file and how many trajectories it has so far, from its attributes; None for
    other files."""
    if not {SETTINGS, PROGRESS} & set(attributes):
        return None
    try:
        settings = json.loads(attributes[SETTINGS])
        return settings | {"num_trajectories": int(settings["num_trajectories"])}, int(attributes[PROGRESS])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has attributes {PROGRESS} and {SETTINGS} that cannot be read "
            f"({error}); expected those that `{make_target('data')}` writes."
        ) from error


@contextlib.contextmanager
def opened(path: Path, task: str) -> Iterator[Store]:
    """The open file, read in this process. Errors inside the block say what a file of the task needs."""
    if not path.is_file():  # a folder or a pipe would block
        unfinished = partial_path(path)
        more = f" There is an unfinished {unfinished.name}, which it continues." * unfinished.exists()
        raise FileNotFoundError(
            f"no data file {path}; expected {task} in PDEBench's layout. Run `{make_target('data')}` "
            f"(or correct data.root or --input).{more}"
        )
    try:
        with Hdf5(path) as store:
            try:
                yield store
            except ConfigError as error:  # no section of the configuration says how it is stored
                raise ValueError(f"{error.problem} Found: {store.listing()}. Check data.tasks.") from error
    except ValueError as error:
        raise ValueError(
            f"{error} It is read as a file of {task} in PDEBench's layout. If it is yours, write it again "
            "(docs/own_data.md); else, if no other process writes it, delete it and run "
            f"`{make_target('data')}`, which makes it again."
        ) from error


def open_data(path: str | Path, task: str, **strides: int) -> Trajectories:
    """`describe` of the file at `path`. Raises FileNotFoundError naming the make target, and as that."""
    with opened(path := Path(path), task) as store:
        return describe(store, path, task, **strides)


def describe(
    store: Store,
    path: Path,
    task: str,
    *,
    space_stride: int = 1,
    time_stride: int = 1,
    first_frame: int = 0,
) -> Trajectories:
    """A description of the trajectories in an open file, called `path`; `read` reads them.

    space_stride, time_stride: every n-th cell and frame is kept (PDEBench's reduced_resolution); first_frame:
    frames before it are dropped. A leading axis of length 1 (issue 56 of PDEBench) is accepted and noted.
    Raises ValueError for a file that is unfinished or not as the task's row says.
    """
    spec = get_task(task)
    if min(space_stride, time_stride) < 1 or first_frame < 0:
        raise ValueError(
            f"{task}: space_stride {space_stride}, time_stride {time_stride}, first_frame {first_frame}; "
            f"expected strides of at least 1 and first_frame of at least 0. Correct task.{task}."
        )
    attributes = {
        key: value.item() if getattr(value, "size", 0) == 1 else value
        for key, value in store.attributes().items()
    }
    made = made_with(attributes, path)
    if made and made[1] < made[0]["num_trajectories"]:
        raise ValueError(
            f"{path} is unfinished ({made[1]} trajectories); expected a complete file. Run "
            f"`{make_target('data')}`, which continues it."
        )
    arrays, notes = [], []
    for place in spec.arrays:
        shape = getattr(store.first_array(place.array), "shape", ())
        if shape[:1] == (1,) and len(shape) == len(place.axes) + 1:
            name, place = place.array.removeprefix("*/"), replace(place, axes=("single", *place.axes))
            notes.append(f"{name} has a leading axis of length 1 (a device axis), ignored")
        arrays.append(place)
    facts = {"times": "", "parameters": {}, "domain": [[]] * spec.ndim}  # the file states its domain
    file = OpenFile(store, replace(spec, arrays=tuple(arrays), user_facts=facts))
    frames, groups = file.frames, file.groups
    times = np.zeros(1) if spec.is_steady else _times(store, path, spec, frames)[first_frame::time_stride]
    about = file.checked(None, file.space, frames)
    if frames != 1 and spec.is_steady:
        raise ValueError(f"{path} has {frames} frames; expected one frame, as {task} is steady.")
    if first_frame >= frames:
        raise ValueError(
            f"{path} has {frames} frames; expected more than first_frame {first_frame}. "
            f"Lower task.{task}.first_frame."
        )
    _require_task(path, spec, attributes, made)
    if groups and groups[-1].isdigit() and int(groups[-1]) != len(groups) - 1:
        notes.append(
            f"{len(groups)} groups named {groups[0]} to {groups[-1]}: some are missing; counted by position"
        )
    if made and "whole" in made[0]:
        notes.append(
            f"it holds {made[0]['generator']}; the published MD5 is of the whole file, so nothing "
            "was compared with it"
        )
    if spec.parameters and spec.parameters[0] not in attributes:
        notes.append(
            f"no attribute {spec.parameters[0]}; {spec.parameter_in(path.name)} is taken from the file name"
        )
    found = find_coordinates(f"task.{task}", {}, spec.axes, arrays, store)
    space = zip(spec.axes, file.space, strict=True)
    coordinates = {axis: found[axis][1][:size:space_stride] for axis, size in space if found[axis]}
    return Trajectories(
        path=path,
        task=spec,
        arrays=tuple(arrays),
        files=(about,),
        rows=np.array([(0, number, first_frame) for number in range(about.num_trajectories)]),
        num_frames=-(-(frames - first_frame) // time_stride),
        space=tuple(-(-size // space_stride) for size in file.space),
        dt=float((times[-1] - times[0]) / max(1, len(times) - 1)),
        coordinates=({} if spec.is_steady else {"t": times}) | coordinates,
        notes=tuple(notes),
        space_stride=space_stride,
        time_stride=time_stride,
        first_frame=first_frame,
        parameter=_parameter(path, spec, attributes),
        attributes=attributes,
        opened=Hdf5,
    )


def _times(store: Store, path: Path, spec: Task, frames: int) -> np.ndarray:
    """The times of the frames, float64; PDEBench writes one more. Raises ValueError if they are not there, or
    not in equal steps."""
    found = times_in(store, spec.arrays)
    num = 0 if found is None else len(found[1])
    if num not in (frames, frames + 1) or not is_even(found[1][:frames]):
        what = f"times {found[1].tolist()!s:.100} in {found[0]}" if found else "no array of times"
        raise ValueError(
            f"{path} has {what}; expected {frames}, or one more, in equal, increasing steps. Add or correct "
            "that array with h5py."
        )
    return found[1][:frames]


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
