"""Trajectories, read as one set whatever the kind of the files and the order of their axes.
ups/userdata/open_files.py makes them of a user's files, ups/data/pdebench.py of one in PDEBench's layout."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from ups.tasks import Place, Task
from ups.userdata.masks import averaged, find_mask, with_nan
from ups.userdata.readers import Store, open_store
from ups.userdata.split import in_time, split

# largest temporary of a read; at this size opening and slicing cost under 1 % (measured)
READ_BLOCK_BYTES = 16 * 2**20
MANY = ("trajectory", "time")  # axes of which a read takes a part
ENOUGH_RUNS = 10  # from which on whole runs, and not windows of them, go to the parts of a split
MOST_VALUES = 8  # of parameters, each with a base fitted to its trajectories


@dataclass(frozen=True)
class DataFile:
    """One file.

    groups: the name of the group of every trajectory, or (); parameters (trajectories, P); flipped: axes
    whose cells are stored from the last to the first; lengths: frames of every trajectory; years: dates of
    the frames, in years, or None; jumps: frames of every run after which its times jump; step: between
    frames, 0 if the file does not tell; uneven: axis of uneven cells -> its coordinate, and by which factor
    steps differ; boundary: as The Well states it.
    """

    path: Path
    groups: tuple[str, ...]
    parameters: np.ndarray
    lengths: tuple[int, ...]
    flipped: tuple[str, ...] = ()
    years: np.ndarray | None = None
    jumps: np.ndarray = field(default_factory=partial(np.arange, 0))
    step: float = 0.0
    uneven: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    boundary: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_trajectories(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, eq=False)
class Trajectories:
    """A description of the files of one task, which holds no open file: it can be forked, pickled and shared
    between threads.

    arrays: those of the files; rows (n, 3): file, number in the file and first frame of every trajectory.
    num_frames, space, dt (0 of a steady task) and coordinates ("t" and the axes of space, float64) count
    after striding. notes: oddities that were corrected, for the user. parameter, attributes: of a file in
    PDEBench's layout, its first parameter and all attributes. opened: opens a file.
    """

    path: Path
    task: Task
    arrays: tuple[Place, ...]
    files: tuple[DataFile, ...]
    rows: np.ndarray
    num_frames: int
    space: tuple[int, ...]
    dt: float
    coordinates: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()
    space_stride: int = 1
    time_stride: int = 1
    first_frame: int = 0
    split_by: str = "auto"
    is_cut: bool = False
    parameter: float | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opened: Callable[[Path], AbstractContextManager[Store]] = open_store
    # digests, of this object alone, not of what `replace` makes of it
    _first_frames: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_trajectories(self) -> int:
        return len(self.rows)

    @cached_property
    def parameters(self) -> np.ndarray:
        """(n, P), float64."""
        return np.array([self.files[file].parameters[number] for file, number, _ in self.rows]).reshape(
            len(self.rows), len(self.task.parameters)
        )

    @cached_property
    def starts(self) -> np.ndarray:
        """A number (n,) for the initial condition of every trajectory; those that share one have the same.

        Files of equal length that differ by a parameter, as published ones do, repeat their initial
        conditions in the same order: the number in the file. Else trajectories with bitwise equal first
        frames share one; if fewer than three differ, each trajectory has its own. Windows of a run that was
        cut share one; if runs are few, or parts of one record, each window has its own.
        """
        if self.in_time is not None:
            return np.arange(self.num_trajectories)
        if self.is_cut:
            _, run = np.unique(self.rows[:, :2], axis=0, return_inverse=True)
            return run if self.by_run else np.arange(self.num_trajectories)
        lengths = {file.num_trajectories for file in self.files}
        values = [file.parameters for file in self.files]
        is_one_each = bool(self.task.parameters) and all(len(np.unique(part, axis=0)) == 1 for part in values)
        differ = is_one_each and len({tuple(part[0]) for part in values}) == len(values)
        if len(self.files) > 1 and len(lengths) == 1 and differ and lengths != {1}:
            return self.rows[:, 1]
        every, first = range(self.num_trajectories), {}
        count = max(1, READ_BLOCK_BYTES // (4 * len(self.task.channels) * math.prod(self.space)))
        for rows in (every[i : i + count] for i in every[::count]):
            if not {*rows} <= self._first_frames.keys():  # the doctor has read all
                self.read(rows.start, rows.stop, range(1))
        out = [first.setdefault(self._first_frames[row], row) for row in every]
        return np.array(out) if len(first) > 2 else np.arange(self.num_trajectories)

    @cached_property
    def years(self) -> np.ndarray | None:
        """The dates (n, num_frames) of all frames, in years; None if a file has none for each."""
        return self.years_of(range(self.num_trajectories), self.num_frames)

    def years_of(self, rows: Sequence[int], num_frames: int) -> np.ndarray | None:
        """The dates (rows, num_frames) of some trajectories, in years; None if a file lacks one."""
        rows = self.rows[list(rows)]
        index = rows[:, 2, None] + self.time_stride * np.arange(num_frames)
        dates = [self.files[file].years for file in rows[:, 0]]
        if any(years is None or len(years) <= frames[-1] for years, frames in zip(dates, index, strict=True)):
            return None
        return np.stack([years[frames] for years, frames in zip(dates, index, strict=True)])

    @cached_property
    def in_time(self) -> np.ndarray | None:
        """The trajectories in order of time if the files are parts of one record, else None."""
        return in_time(self)

    @property
    def by_run(self) -> bool:
        """Whether there are enough runs to split them whole and not by windows."""
        return len(np.unique(self.rows[:, :2], axis=0)) >= ENOUGH_RUNS

    def read(
        self, first: int, last: int, frames: range | None = None, store: Store | None = None
    ) -> np.ndarray:
        """Trajectories first..last-1 (n, num_frames, channels, *space), float32, physical units minus the
        task's offsets. Only these trajectories, frames and strides are read. frames: consecutive frames to
        read, by default all; store: the file, if it is open."""
        assert 0 <= first < last <= self.num_trajectories, (self.path, first, last, self.num_trajectories)
        frames = range(self.num_frames) if frames is None else frames
        out = np.empty((last - first, len(frames), len(self.task.channels), *self.space), np.float32)
        rows, following = self.rows[first:last], (0, 1, 0)
        if self.is_cut and self.time_stride == 1 and frames == range(self.num_frames):
            following = (0, 0, self.num_frames)  # windows that follow each other are read as one film
        breaks = np.flatnonzero((np.diff(rows, axis=0) != following).any(1)) + 1
        runs = pairwise([0, *breaks.tolist(), len(rows)])  # of rows that lie side by side in one file
        for file, pieces in groupby(runs, lambda run: rows[run[0], 0]):  # which is opened once
            with nullcontext(store) if store else self.opened(self.files[file].path) as held:
                for (start, stop), place in product(pieces, self.arrays):
                    _, number, begin = rows[start].tolist()
                    part, wanted = out[start:stop], frames
                    if following[2]:
                        part, wanted = part.reshape(1, -1, *part.shape[2:]), range(len(frames) * len(part))
                    self._fill(held, self.files[file], place, number, begin, part, wanted)
        for row in range(first, last) if frames.start == 0 else ():
            if row not in self._first_frames:
                self._first_frames[row] = hashlib.sha256(out[row - first, 0].tobytes()).digest()
        return out

    def frames_of(self, rows: Sequence[int]) -> int:
        """The number of frames that all of these trajectories have, at least num_frames."""
        if self.is_cut:
            return self.num_frames
        ends = [(self.files[file].lengths[number], begin) for file, number, begin in self.rows[rows].tolist()]
        return max(self.num_frames, min(len(range(begin, end, self.time_stride)) for end, begin in ends))

    def precision(self, name: str) -> float:
        """The relative rounding error of a field in the first file; 0 of whole numbers."""
        place, file = next(place for place in self.arrays if name in place.fields), self.files[0]
        with self.opened(file.path) as store:
            dtype = store.array(place.array.replace("*", "".join(file.groups[:1]))).dtype
        return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0

    @cached_property
    def mask(self) -> np.ndarray | None:
        """The cells (channels, *space) that never have a value, such as land; None if there are none, as in
        the families of equations."""
        return None if self.task.user_facts is None else find_mask(self)

    def place(self, row: int, frame: int) -> tuple[Path, str]:
        """The file that holds a frame of a trajectory, and the place in it in words."""
        file, number, begin = self.rows[row].tolist()
        return self.files[file].path, f"trajectory {number}, frame {begin + frame * self.time_stride}"

    def sample(self, num: int) -> np.ndarray:
        """At most `num` trajectories, evenly over the data, with the mean of a frame in place of NaN."""
        rows = np.unique(np.linspace(0, self.num_trajectories - 1, num).astype(int))
        return averaged(np.concatenate([self.read(row, row + 1) for row in rows.tolist()]), self.task.ndim)

    def split(self, val_fraction: float, test_fraction: float) -> dict[str, np.ndarray]:
        """The trajectories (ascending) of "train", "val" and "test"; see `ups.userdata.split.split`."""
        return split(self, val_fraction, test_fraction)

    def _fill(
        self,
        store: Store,
        file: DataFile,
        place: Place,
        number: int,
        first_frame: int,
        out: np.ndarray,
        wanted: range,
    ) -> None:
        """Read the fields of one array into out (n, time, channel, *space): the frames `wanted`, counted from
        `first_frame`, of the trajectories from `number` on."""
        names = [self.task.channels.index(field) for field in place.fields]
        facts, is_grouped = self.task.user_facts or {}, "*" in place.array
        shape = store.array(place.array.replace("*", "".join(file.groups[:1]))).shape
        frame_bytes = 8 * math.prod(n for axis, n in zip(place.axes, shape, strict=True) if axis not in MANY)
        num_frames = (
            len(wanted) if place.is_steady else max(1, min(len(wanted), READ_BLOCK_BYTES // frame_bytes))
        )
        num_rows = 1 if is_grouped else max(1, READ_BLOCK_BYTES // (frame_bytes * num_frames))
        at: dict[str, slice | int] = {**dict.fromkeys(("channel", "component"), slice(None)), "single": 0}
        for axis, size in zip(place.axes, shape, strict=True):
            if axis in self.task.axes:
                size -= axis in facts.get("repeated", ())
                first = (size - 1) % self.space_stride if axis in file.flipped else 0
                at[axis] = slice(first, size, self.space_stride)
        for row in range(0, len(out), num_rows):
            array = place.array.replace("*", file.groups[number + row]) if is_grouped else place.array
            at["trajectory"] = slice(number + row, number + min(row + num_rows, len(out)))
            for frame in range(wanted.start, wanted.stop, num_frames):
                count, into = min(num_frames, wanted.stop - frame), frame - wanted.start
                begin = first_frame + frame * self.time_stride
                at["time"] = slice(begin, begin + (count - 1) * self.time_stride + 1, self.time_stride)
                block = np.asarray(store.read(array, tuple(at[axis] for axis in place.axes)))
                block = self._ordered(with_nan(block, facts.get("missing", ())), place, file.flipped)
                target = out[row : row + num_rows, into : into + count]
                with np.errstate(over="ignore"):  # becomes infinite, which the doctor names
                    target[:, :, names] = self.task.counted(block, place.fields)

    def _ordered(self, block: np.ndarray, place: Place, flipped: Sequence[str]) -> np.ndarray:
        """A part of a stored array as (trajectory, time, channel, *space); axes that it lacks have length
        1."""
        axes = [axis for axis in place.axes if axis != "single"]
        block = np.flip(block, [number for number, axis in enumerate(axes) if axis in flipped])
        wanted = ["trajectory", "time", "channel", "component", *self.task.axes]
        order = sorted(range(block.ndim), key=lambda axis: wanted.index(axes[axis]))
        block, have = block.transpose(order), [axes[axis] for axis in order]
        inner = [axis for axis in have if axis in ("channel", "component")]
        lead = [block.shape[have.index(axis)] if axis in have else 1 for axis in ("trajectory", "time")]
        space = [block.shape[have.index(axis)] if axis in have else 1 for axis in self.task.axes]
        assert len(inner) + sum(size != 1 for size in (*lead, *space)) <= block.ndim, (block.shape, place)
        return block.reshape(*lead, len(place.fields), *space)
