"""Sizes of the splits, and windows of runs that follow each other."""

import numpy as np


def split_sizes(num: int, val_fraction: float, test_fraction: float) -> dict[str, int]:
    """Number of the `num` initial conditions in "val", "test" and "train". The first two get at least one;
    training gets the rest, which may be too few."""
    num_val, num_test = (max(1, int(num * fraction + 1e-9)) for fraction in (val_fraction, test_fraction))
    return {"val": num_val, "test": num_test, "train": num - num_val - num_test}


def joined(places: np.ndarray, num_frames: int) -> list[np.ndarray]:
    """Rows whose windows of `num_frames` frames follow each other in one run, in order. places (n, 2): the
    run and the first frame of every window."""
    order = np.lexsort(places.T[::-1])
    follows = (np.diff(places[order], axis=0) == (0, num_frames)).all(1)
    return np.split(order, np.flatnonzero(~follows) + 1)
