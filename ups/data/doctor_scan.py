"""One pass of the data doctor over a file: digests, extremes and faults of every trajectory."""

import hashlib
import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ups.data.leakage import frame_digests
from ups.data.written import frame_sizes, unwritten
from ups.userdata.data_checks import Extremes
from ups.userdata.masks import is_wrong, settled
from ups.userdata.trajectories import Trajectories

SCAN_BYTES = 32 * 2**20  # of data read at a time, at least one trajectory


@dataclass
class Scan:
    """Results of `scan_file`. Lists of int hold trajectory numbers."""

    extremes: Extremes
    frames: list[np.ndarray] = field(default_factory=list)  # digests of all frames, per block
    initial: list[bytes] = field(default_factory=list)  # digest of each initial condition
    whole: list[bytes] = field(default_factory=list)  # digest of each trajectory
    not_finite: list[int] = field(default_factory=list)
    first_bad: str = ""  # place of the first number that is not finite
    constant: list[int] = field(default_factory=list)  # in space and time
    unwritten: list[tuple[int, str]] = field(default_factory=list)  # with the problem in words
    flat: list[int] = field(default_factory=list)  # the coefficient has one value everywhere
    # per trajectory: range of each channel's mean over time, over its RMS
    mean_changes: list[np.ndarray] = field(default_factory=list)
    lowest: np.ndarray | float = math.inf  # value of each channel


def scan_file(data: Trajectories) -> Scan:
    """Read all trajectories once."""
    task = data.task
    scan = Scan(Extremes(task.channels, task.offsets))
    step = max(1, SCAN_BYTES // (4 * data.num_frames * len(task.channels) * math.prod(data.space)))
    for first in range(0, data.num_trajectories, step):
        block = data.read(first, min(first + step, data.num_trajectories))
        scan.frames.append(frame_digests(block, task))
        for i, u in enumerate(block, first):
            _digest(scan, data, i, u)
            wrong = is_wrong(u[None], data.mask)[0]
            if wrong.any():
                frame, channel, *cell = (int(k) for k in np.argwhere(wrong)[0])
                where, place = data.place(i, frame)
                place = f"{place}, {task.channels[channel]}, cell {tuple(cell)}"
                scan.first_bad = scan.first_bad or place + f" of {where}" * (where != data.path)
                scan.not_finite.append(i)
                continue
            scan.extremes.add(u)
            with_gaps = np.moveaxis(u, 1, 0).reshape(len(task.channels), -1)  # NaN in the cells of a mask
            u = settled(u.reshape(*u.shape[:2], -1)).reshape(u.shape)
            flat = np.moveaxis(u, 1, 0).reshape(len(task.channels), -1)
            scan.lowest = np.minimum(scan.lowest, flat.min(1))
            if (flat.max(1) == flat.min(1)).all():
                scan.constant.append(i)
            elif problem := unwritten(data, frame_sizes(task, u)):
                scan.unwritten.append((i, problem))
            elif data.num_frames > 1:
                average = np.mean if data.mask is None else np.nanmean
                mean = average(with_gaps.reshape(len(flat), data.num_frames, -1), -1, dtype=np.float64)
                rms = np.sqrt(average(np.square(with_gaps, dtype=np.float64), 1))
                scan.mean_changes.append(np.ptp(mean, axis=1) / np.maximum(rms, np.finfo(np.float32).tiny))
    return scan


def _digest(scan: Scan, data: Trajectories, i: int, u: np.ndarray) -> None:
    """Add the digests of trajectory i, u (time, channel, *space)."""
    task = data.task
    start = u[0, : len(task.inputs)] if task.is_steady else u[0]
    # coefficients of one value everywhere are few and may be equal by chance: the key makes each unique
    is_flat = task.is_steady and start.min() == start.max()
    key = f"{i} {data.path.name}".encode()[:64] if is_flat else b""
    if is_flat:
        scan.flat.append(i)
    digest = partial(hashlib.blake2b, digest_size=16, key=key)
    scan.initial.append(digest(np.ascontiguousarray(start)).digest())
    scan.whole.append(digest(u).digest())
