"""Frames that two parts of a split share: windows cut from one run so that they overlap, or copied
trajectories.

A frame is compared by a digest of its numbers as float32. What is equal without being a copy is not
counted: fields that are constant in space (a fluid at rest), frames that equal a neighbour in their own
trajectory (a state that no longer changes, which others may reach too), and frames that are the first of
every trajectory they occur in (`UserTrajectories.starts` keeps equal starts together).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ups.tasks import Task

PARTS = ("train", "val", "test")
NOT_COMPARED = 0
REMEDY = (
    "cut windows that do not overlap, or keep all windows of one run in one part: files in folders "
    "train, val and test"
)


@dataclass(frozen=True)
class Shared:
    """How many of the `total` frames of `part` occur in `other`, and the first of them: (trajectory, frame)
    in both."""

    part: str
    other: str
    count: int
    total: int
    here: tuple[int, int]
    there: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.total} {self.part} frames are also {self.other} frames, bit for bit "
            f"(first: frame {self.here[1]} of trajectory {self.here[0]} is frame {self.there[1]} of "
            f"trajectory {self.there[0]})"
        )


def frame_digests(u: np.ndarray, task: Task) -> np.ndarray:
    """A digest (n, T), uint64, of each frame of u (n, T, C, *space); NOT_COMPARED for frames whose predicted
    fields (of a steady task its coefficient) are constant or not finite."""
    u = u.astype(np.float32, copy=False) + np.float32(0)  # -0 is 0
    compared = task.inputs or task.moving
    moving = u[:, :, [task.channels.index(name) for name in compared]].reshape(
        *u.shape[:2], len(compared), -1
    )
    low, high = moving.min(-1), moving.max(-1)
    if np.isnan(low).any():  # cells of a mask
        low, high = np.fmin.reduce(moving, -1), np.fmax.reduce(moving, -1)
    varies = (high > low).any(-1) & np.isfinite(low).all(-1) & np.isfinite(high).all(-1)
    out = np.full(u.shape[:2], NOT_COMPARED, np.uint64)
    for at in zip(*np.nonzero(varies), strict=True):
        digest = hashlib.blake2b(np.ascontiguousarray(u[at]), digest_size=8).digest()
        out[at] = max(1, int.from_bytes(digest, "little"))
    return out


def shared_frames(digests: np.ndarray, part_of: Sequence[str]) -> Shared | None:
    """The frames that a part of the split shares with another, most of all test with training; None if none.
    digests (n, T) of all trajectories; part_of (n,): the part of each."""
    still = np.zeros(digests.shape, bool)
    same = digests[:, 1:] == digests[:, :-1]
    still[:, 1:] |= same
    still[:, :-1] |= same
    row, frame = np.nonzero((digests != NOT_COMPARED) & ~still)
    if not len(row):
        return None
    part = np.array([PARTS.index(name) for name in part_of])[row]
    _, group = np.unique(digests[row, frame], return_inverse=True)
    there = np.zeros((group.max() + 1, len(PARTS)), bool)
    there[group, part] = True
    is_later = np.zeros(len(there), bool)
    np.logical_or.at(is_later, group, frame > 0)
    is_later |= digests.shape[1] == 1
    is_shared = ((there.sum(1) > 1) & is_later)[group]
    for here, other in ((2, 0), (1, 0), (2, 1)):
        found = np.flatnonzero(is_shared & (part == here) & there[group, other])
        if len(found):
            first = found[0]
            twin = np.flatnonzero((group == group[first]) & (part == other))[0]
            total = sum(name == PARTS[here] for name in part_of) * digests.shape[1]
            names = {"val": "validation"}
            return Shared(
                names.get(PARTS[here], PARTS[here]),
                "training" if other == 0 else "validation",
                len(found),
                total,
                (int(row[first]), int(frame[first])),
                (int(row[twin]), int(frame[twin])),
            )
    return None
