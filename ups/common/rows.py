"""How trajectories are divided among the splits, and which of them stand for all."""

from typing import Any

import numpy as np


def split_sizes(num: int, val_fraction: float, test_fraction: float) -> dict[str, int]:
    """How many of `num` initial conditions validation, test and training have: the first two at least one,
    the last what remains, which may be too few."""
    num_val, num_test = (max(1, int(num * share + 1e-9)) for share in (val_fraction, test_fraction))
    return {"val": num_val, "test": num_test, "train": num - num_val - num_test}


def stratified_rows(source: Any, num: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `num` trajectories at equal distances through `source`: their numbers (n,), and what
    `source.read` returns for them."""
    rows = np.unique(np.linspace(0, source.num_trajectories - 1, num).astype(int))
    return rows, np.concatenate([source.read(row, row + 1) for row in rows.tolist()])
