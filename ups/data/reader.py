"""What a reader of data files is: whatever says of one file what it holds and reads some of its trajectories.

ups/data/pdebench.py has the one for PDEBench's files; a reader of another format is a file beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ups.tasks import Task


@dataclass(frozen=True)
class Reader(Protocol):
    """One file of one task, described but not read. Holds no open file: safe to fork, pickle and share
    between threads.

    num_trajectories, num_frames, space, dt (model time units, 0 for a steady task) and coordinates ("t" and
    the space axes, float64) are those after striding. parameter: first file-level parameter or None.
    attributes: what the file says about itself. notes: oddities that were put right, for the user to see.
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

    def read(self, first: int, last: int) -> np.ndarray:
        """Trajectories first..last-1, shape (last - first, num_frames, channels, *space), float32, physical
        units.

        Channels are `Task.channels`: the coefficient of a steady task first. Reads these trajectories and
        strides only.
        """
