"""The data files of a task, published, generated or the user's, as one set of trajectories."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ups.common.place import make_target
from ups.config.schema import Config, TaskConfig, UserTaskConfig
from ups.data.pdebench import open_data, split_indices
from ups.userdata.open_files import open_user_files, user_files
from ups.userdata.trajectories import MOST_VALUES, Trajectories

# keys of the section of a task: what is expected of the files of a user, and what is taken of any file
EXPECTED = "resolution", "num_frames", "dt", "num_trajectories", "skip_missing"
STRIDES = "space_stride", "time_stride", "first_frame"
SAMPLES, SAMPLE_BYTES = 256, 2**14  # read from a file to tell it from another of its size: 4 MiB, 10 ms


def needs_files(settings: TaskConfig) -> bool:
    """Whether the number of trajectories is read from the files of a task, not from its configuration."""
    return isinstance(settings, UserTaskConfig)


def data_files(config: Config, task_name: str) -> list[Path]:
    """The data files of `task_name`: one per parameter value, in the order of the rows, or all user files."""
    settings = config.task[task_name]
    if needs_files(settings):
        return user_files(task_name, settings.files)
    return [config.data_path(task_name, value) for value in settings.parameters or [None]]


def open_user(config: Config, task_name: str, strided: bool = True) -> Trajectories:
    """The user files that the section of a task declares; strided: with the strides of the section."""
    settings = config.task[task_name]
    return open_user_files(
        config.spec(task_name),
        data_files(config, task_name),
        split_by=settings.split,
        cut=settings.cut,
        **{key: getattr(settings, key) for key in (*EXPECTED, *(STRIDES if strided else ()))},
    )


def split_of(config: Config, task_name: str, source: Trajectories | None = None) -> dict[str, np.ndarray]:
    """Rows (ascending) of "train", "val" and "test". source: needed for user files alone."""
    settings, fractions = config.task[task_name], (config.data.val_fraction, config.data.test_fraction)
    if needs_files(settings):
        return source.split(*fractions)
    num = settings.num_trajectories
    parts = split_indices(task_name, num, *fractions)
    return {name: split_rows(index, settings.num_files, num) for name, index in parts.items()}


def split_rows(index: np.ndarray, num_files: int, num: int) -> np.ndarray:
    """Rows of the trajectories `index` of each of `num_files` files with `num` trajectories."""
    return (num * np.arange(num_files)[:, None] + index).ravel()


@dataclass(frozen=True)
class Table:
    """Facts about every row."""

    parameters: np.ndarray  # (n, P)
    index: np.ndarray  # (n,): the nearest of `values`, or the number of the configured parameter value
    trajectory: np.ndarray  # (n,): number of the initial condition
    values: list[list[float]] | None  # parameter values found in user files; None if they are configured


def table_of(config: Config, task_name: str, source: Trajectories) -> Table:
    """The table of a task's rows."""
    parameters = source.parameters
    if not needs_files(config.task[task_name]):
        return Table(parameters, source.rows[:, 0], source.rows[:, 1], None)
    values = np.unique(parameters, axis=0) if parameters.shape[1] else np.zeros((0, 0))
    if len(values) > MOST_VALUES:  # some, equally spaced in their order, represent all
        values = values[np.linspace(0, len(values) - 1, MOST_VALUES).round().astype(int)]
    scale = np.where(np.ptp(values, axis=0) > 0, np.ptp(values, axis=0), 1.0) if len(values) else 1.0
    index = (
        np.abs((parameters[:, None] - values) / scale).sum(-1).argmin(1)
        if len(values)
        else np.zeros(len(parameters), int)
    )
    return Table(parameters, index, source.starts, values.tolist())


def open_source(config: Config, task_name: str) -> Trajectories:
    """The data files of a task as one set, checked against the configuration and each other: rows are those
    of the first file, then of the next."""
    settings, key, task = config.task[task_name], f"task.{task_name}", config.spec(task_name)
    if needs_files(settings):
        return open_user(config, task_name)
    frames = -(-(settings.num_frames - settings.first_frame) // settings.time_stride)
    space, num = settings.cells(task.ndim), settings.num_trajectories
    strides = {key: getattr(settings, key) for key in STRIDES}
    opened = [open_data(path, task_name, **strides) for path in data_files(config, task_name)]
    first, files, rows = opened[0], [], []
    for one, value in zip(opened, settings.parameters or [None], strict=True):
        checks = (
            (one.num_frames == frames, "frames (after striding)", one.num_frames, frames, "num_frames"),
            (one.space == space, "cells (after striding)", one.space, space, "resolution"),
            (
                one.num_trajectories >= num,
                "trajectories",
                one.num_trajectories,
                f"at least {num}",
                "num_trajectories",
            ),
            (
                value is None or np.isclose(one.parameter, value, rtol=1e-6, atol=0),
                "as parameter",
                one.parameter,
                value,
                "parameters",
            ),
            (
                np.isclose(one.dt, first.dt, rtol=1e-4, atol=0) and one.arrays == first.arrays,
                "between frames, and axes of its arrays",
                f"{one.dt} {[place.axes for place in one.arrays]}",
                f"{first.dt} {[place.axes for place in first.arrays]}",
                "t_end",
            ),
        )
        for is_right, what, found, expected, field in checks:
            if not is_right:
                raise ValueError(
                    f"{one.path} has {found} {what}; expected {expected}. Correct "
                    f"{key}.{field}, or remove the file and run `{make_target('data')}`."
                )
        attributes = task.attributes(value)
        parameters = np.array([attributes[name] for name in task.parameters], np.float64)
        rows.append(one.rows[:num] + (len(files), 0, 0))
        files.append(
            replace(
                one.files[0], parameters=np.tile(parameters, (num, 1)), lengths=one.files[0].lengths[:num]
            )
        )
    return replace(
        first,
        path=first.path if len(opened) == 1 else first.path.parent,
        files=tuple(files),
        rows=np.concatenate(rows),
        notes=tuple(dict.fromkeys(note for one in opened for note in one.notes)),
    )


def list_user_files(config: Config, tasks: Sequence[str]) -> None:
    """Print a line for each user file of `tasks`, which are never written. Raises ValueError or
    FileNotFoundError for a file that is missing or not as configured.
    """
    for task in tasks:
        for path in data_files(config, task):
            if not path.exists():
                there = sorted(other.name for other in path.parent.glob("*"))
                raise FileNotFoundError(
                    f"no data file {path}; expected yours there (data.source=user). Write it in PDEBench's "
                    f"layout, as `{make_target('data')}` does; or correct data.root or task.{task} (in that "
                    f"folder: {', '.join(there[:5]) or 'nothing'})."
                )
        source = open_source(config, task)
        notes = "".join(f"; {note}" for note in source.notes)
        print(f"{source.path}: yours, {source.num_trajectories} trajectories of {task}{notes}")


def file_identity(paths: Iterable[Path]) -> list[list]:
    """Name, size, time of change and a digest of some bytes, for every file, also those in a folder (zarr).

    The digest is needed because a copied file may have the same size and time.
    """
    found = []
    for path in paths:
        files = [file for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]
        count = min(len(files), SAMPLES)
        sampled = (np.arange(count) * len(files) // max(1, count)).tolist()
        digests = {files[i]: _sample_digest(files[i], SAMPLES // count) for i in sampled}
        for file in files:
            name, status = str(file.relative_to(path.parent)), file.stat()
            found.append([name, status.st_size, status.st_mtime_ns, digests.get(file, "")])
    return found


def _sample_digest(path: Path, num: int) -> str:
    """A digest of `num` samples, equally spaced from the first bytes of a file to the last."""
    digest, size = hashlib.blake2b(digest_size=8), path.stat().st_size
    with path.open("rb") as file:
        for at in np.unique(np.linspace(0, max(0, size - SAMPLE_BYTES), num).astype(np.int64)).tolist():
            file.seek(at)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
