"""Leakage: frames that occur in two splits, because windows of one run overlap or trajectories were copied.

Frames are compared by digests of their numbers as float32. Equal frames that need not be copies do not count:
fields that are constant in space (a fluid at rest), frames that equal a neighbour in their own trajectory (a
steady state, which others may reach too), and frames that are the first of every trajectory they occur in
(`Trajectories.starts` keeps equal starts in one split).
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from ups.tasks import Task

SPLITS = {"train": "training", "val": "validation", "test": "test"}
NOT_COMPARED = 0
REMEDY = (
    "cut windows that do not overlap, or keep all windows of one run in one split: files in folders "
    "train, val and test"
)


def frame_digests(u: np.ndarray, task: Task) -> np.ndarray:
    """A digest (n, T), uint64, of each frame of u (n, T, C, *space).

    It is NOT_COMPARED for frames whose predicted fields (of a steady task its coefficient) are constant in
    space or not finite.
    """
    u = u.astype(np.float32, copy=False) + np.float32(0)  # turns -0 into 0
    compared = task.inputs or task.moving
    fields = u[:, :, [task.channels.index(name) for name in compared]]
    fields = fields.reshape(*u.shape[:2], len(compared), -1)
    low, high = fields.min(-1), fields.max(-1)
    if np.isnan(low).any():  # cells of a mask
        low, high = np.fmin.reduce(fields, -1), np.fmax.reduce(fields, -1)
    varies = (high > low).any(-1) & np.isfinite(low).all(-1) & np.isfinite(high).all(-1)
    out = np.full(u.shape[:2], NOT_COMPARED, np.uint64)
    for at in zip(*np.nonzero(varies), strict=True):
        digest = hashlib.blake2b(np.ascontiguousarray(u[at]), digest_size=8).digest()
        out[at] = max(1, int.from_bytes(digest, "little"))
    return out


def shared_frames(digests: np.ndarray, split_of: Sequence[str]) -> str:
    """The frames that two splits share, in words, test and training first; "" if there are none.

    digests: (n, T), of all trajectories; split_of: (n,), "train", "val" or "test" of each.
    """
    still = np.zeros(digests.shape, bool)  # frames that equal a neighbour
    same = digests[:, 1:] == digests[:, :-1]
    still[:, 1:] |= same
    still[:, :-1] |= same
    row, frame = np.nonzero((digests != NOT_COMPARED) & ~still)
    if not len(row):
        return ""
    names = [*SPLITS]
    split = np.array([names.index(name) for name in split_of])[row]
    _, group = np.unique(digests[row, frame], return_inverse=True)  # equal frames have one group
    occurs = np.zeros((group.max() + 1, len(names)), bool)
    occurs[group, split] = True
    is_later = np.zeros(len(occurs), bool)
    np.logical_or.at(is_later, group, frame > 0)
    is_later |= digests.shape[1] == 1
    is_shared = ((occurs.sum(1) > 1) & is_later)[group]
    for here, there in ((2, 0), (1, 0), (2, 1)):
        found = np.flatnonzero(is_shared & (split == here) & occurs[group, there])
        if len(found):
            first, total = found[0], sum(name == names[here] for name in split_of) * digests.shape[1]
            twin = np.flatnonzero((group == group[first]) & (split == there))[0]
            here, there = SPLITS[names[here]], SPLITS[names[there]]
            return (
                f"{len(found)} of {total} {here} frames are also {there} frames, bit for bit (first: frame "
                f"{frame[first]} of trajectory {row[first]} is frame {frame[twin]} of trajectory {row[twin]})"
            )
    return ""
