"""Reading PDEBench's HDF5 files: trajectories of either layout (ups/data/layout.py) as arrays (trajectory,
time, channel, *space), float32.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.common.files import partial_path
from ups.common.place import make_target
from ups.common.rows import stratified_rows
from ups.data.layout import layout_of
from ups.tasks import Array, Task
from ups.userdata.readers.hdf5 import require_written

# largest temporary of a read; at this size opening and slicing cost under 1 % (measured)
BLOCK_BYTES = 16 * 2**20
AGAIN = (
    f"If it is yours, write it again (docs/own_data.md); else delete it and run `{make_target('data')}`, "
    "which makes it again."
)


@dataclass(frozen=True)
class Trajectories:
    """Description of the trajectories in one file of one task; made by `ups.data.pdebench.open_data`.

    It holds no open file, so it can be forked, pickled and shared between threads. num_trajectories,
    num_frames, space, dt (model time, 0 for a steady task) and coordinates ("t" and the space axes, float64)
    count after striding. parameter: the first file-level parameter or None. attributes: all attributes of the
    file. notes: oddities that were corrected, for the user. groups: names of the trajectories' HDF5 groups,
    if they have any. Readers of other formats have all of these but `groups`.
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
        """The file that holds a frame of a trajectory, and its place in words."""
        return self.path, f"trajectory {row}, frame {self.first_frame + frame * self.time_stride}"

    def read(self, first: int, last: int, frames: range | None = None) -> np.ndarray:
        """Trajectories first..last-1, (last - first, num_frames, channels, *space), float32, physical units.

        frames: consecutive ones; None for all. Channels are `Task.channels`. Only these trajectories, frames
        and strides are read. Raises ValueError for a group of another shape.
        """
        assert 0 <= first < last <= self.num_trajectories, (self.path, first, last, self.num_trajectories)
        with opened(self.path, self.task.name) as file:
            return self.read_from(file, first, last, frames)

    def precision(self, name: str) -> float:
        """The relative rounding error of a field as stored in the file."""
        with opened(self.path, self.task.name) as file:
            layout, task = layout_of(self.task), self.task
            names = [
                (array, task.channels[i])
                for array, channels in layout.parts(np.arange(len(task.channels)).reshape(1, 1, -1))
                for i in channels[0, 0]
            ]
            array = next(array for array, field in names if field == name)
            return float(np.finfo(layout.dataset(file, array, *self.groups[:1])[0].dtype).eps)

    def stratified_rows(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (n,) of at most `num` trajectories, equally spaced in the file, and their values."""
        return stratified_rows(self, num)

    def read_from(self, file: h5py.File, first: int, last: int, frames: range | None = None) -> np.ndarray:
        """`read` from the open file."""
        frames = range(self.num_frames) if frames is None else frames
        out = np.empty((last - first, len(frames), len(self.task.channels), *self.space), np.float32)
        layout = layout_of(self.task)
        for array, channels in layout.parts(out):
            for name, at, rows in layout.places(first, last, self.groups):
                dataset, lead = layout.dataset(file, array, name)
                if name:  # a group; arrays of all trajectories were checked by `open_data`
                    require_written(dataset, self.path, AGAIN)
                into = channels[rows].reshape(-1, *channels.shape[1:])
                self._fill(dataset, array, into, lead, at, frames)
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
        """Copy the frames `wanted` of the trajectories `at` into out (n, time, channel, *space).

        at: () for a dataset of one trajectory. lead: index of the axes before those of the trajectories.
        """
        task, stride, shape = self.task, self.space_stride, dataset.shape[len(lead + at) :]
        first = int(not array.steady)  # axis of space
        expected = tuple(-(-size // stride) for size in shape[first : first + task.ndim])
        frames = self.num_frames if array.steady else -(-(shape[0] - self.first_frame) // self.time_stride)
        channels = (array.channels,) if array.vector else ()
        if (frames, expected, shape[first + task.ndim :]) != (self.num_frames, self.space, channels):
            raise ValueError(
                f"{self.path}: {dataset.name} holds {dataset.dtype} of shape {dataset.shape}, "
                "unlike the first trajectory; expected one shape for all. Remove that "
                f"trajectory, or download or generate the file again with `{make_target('data')}`."
            )
        wanted = range(1) if array.steady else wanted  # one value for all frames
        frame_bytes = math.prod(shape[first:]) * dataset.dtype.itemsize
        num_frames = max(1, min(frames, BLOCK_BYTES // frame_bytes))
        num_rows = max(1, BLOCK_BYTES // (frame_bytes * frames))
        for row in range(0, len(out), num_rows):
            rows = [slice(rows.start + row, min(rows.start + row + num_rows, rows.stop)) for rows in at]
            for frame in range(wanted.start, wanted.stop, num_frames):
                count = min(num_frames, wanted.stop - frame)
                times = ()
                if not array.steady:
                    start = self.first_frame + frame * self.time_stride
                    times = (slice(start, start + (count - 1) * self.time_stride + 1, self.time_stride),)
                block = dataset[(*lead, *rows, *times)].reshape(-1, count, *shape[first:])
                block = np.moveaxis(block, -1, 2) if array.vector else block[:, :, None]
                into = frame - wanted.start
                places = slice(None) if array.steady else slice(into, into + count)
                out[row : row + num_rows, places] = block[(..., *[slice(None, None, stride)] * task.ndim)]


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
