"""The split of user data into training, validation and test."""

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ups.common.rows import split_sizes
from ups.userdata.inspect_file import ConfigError

FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SEED = 0  # of the order of initial conditions


def split(data: Any, val_fraction: float, test_fraction: float) -> dict[str, np.ndarray]:
    """The trajectories (ascending) of "train", "val" and "test".

    By the folders of the files, if these have such names; else by initial conditions, in a fixed random
    order. Windows of a few long runs, and files that are parts of one record, are split in time: training
    first, test last. Raises ValueError if a part would be empty.
    """
    folders = _folders([file.path for file in data.files])
    if data.split_by == "auto" and len({*folders}) > 1 and {*folders} != {"train", "val", "test"}:
        known = sorted(filter(None, {*folders}))
        where = f"in {' and '.join(known)} alone"
        if None in folders:
            where = f"in folders {', '.join(known)} and others in none of train, val and test"
        raise ConfigError(
            f"task.{data.task.name}.split: files lie {where}; expected files in all three of train, val and "
            "test, and nowhere else. Make the missing one, or write split: index to split all files by their "
            "number."
        )
    if data.split_by == "folder" or (data.split_by == "auto" and len({*folders}) == 3):
        names = np.array([folders[file] or "none" for file in data.rows[:, 0]])
        if missing := [name for name in ("train", "val", "test") if not (names == name).any()]:
            raise ConfigError(
                f"task.{data.task.name}.split: no file lies in a folder {missing[0]}; expected folders "
                "train, val and test. Move files there and widen the pattern of files, or write split: "
                "index."
            )
        return {name: np.flatnonzero(names == name) for name in ("train", "val", "test")}
    starts = np.unique(data.starts)
    sizes = split_sizes(len(starts), val_fraction, test_fraction)
    if sizes["train"] < 1:
        raise ConfigError(
            f"task.{data.task.name}: {len(starts)} trajectories (of different initial conditions) cannot be "
            f"split into training, validation and test with data.val_fraction {val_fraction:g} and "
            f"data.test_fraction {test_fraction:g}; expected at least one for each, 3 in all. Add files, cut "
            "long ones into several trajectories, or, where an axis of the arrays counts them, call it "
            "trajectory in the layout."
        )
    if data.in_time is not None or (data.is_cut and not data.by_run):
        return _split_in_time(data, val_fraction, test_fraction)
    order = np.random.default_rng(SEED).permutation(starts)
    parts = np.split(order, [sizes["val"], sizes["val"] + sizes["test"]])
    return {
        name: np.flatnonzero(np.isin(data.starts, part))
        for name, part in zip(("val", "test", "train"), parts, strict=True)
    }


def _split_in_time(data: Any, val_fraction: float, test_fraction: float) -> dict[str, np.ndarray]:
    parts: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    runs = [np.flatnonzero((data.rows[:, :2] == run).all(1)) for run in np.unique(data.rows[:, :2], axis=0)]
    for windows in runs if data.in_time is None else [data.in_time]:
        num_val, num_test = (
            max(1, math.ceil(len(windows) * fraction - 1e-9)) for fraction in (val_fraction, test_fraction)
        )
        num_train = max(0, len(windows) - num_val - num_test)
        ends = [num_train, max(num_train, len(windows) - num_test)]
        for name, some in zip(parts, np.split(windows, ends), strict=True):
            parts[name] += some.tolist()
    if empty := [name for name, rows in parts.items() if not rows]:
        raise ConfigError(
            f"task.{data.task.name}.cut: its windows leave none for {empty[0]} with data.val_fraction "
            f"{val_fraction:g} and data.test_fraction {test_fraction:g}; expected at least one for each "
            "part. Cut into shorter windows, or lower these."
        )
    return {name: np.sort(rows) for name, rows in parts.items()}


def in_time(data: Any) -> np.ndarray | None:
    """The trajectories in order of time if the files are parts of one record, such as its years: each holds
    one run, and no two share dates. Else None."""
    if len(data.files) < 2 or any(file.num_trajectories > 1 for file in data.files) or data.years is None:
        return None
    own = [data.years[data.rows[:, 0] == file] for file in np.unique(data.rows[:, 0])]
    spans = sorted((float(years.min()), float(years.max())) for years in own)
    if any(low <= high for (_, high), (low, _) in pairwise(spans)):
        return None
    return np.argsort(data.years[:, 0], kind="stable")


def _folders(paths: Sequence[Path]) -> list[str | None]:
    """For every file the part of the split that its nearest folder names, None if no folder does. Folders
    that all files share do not count."""
    folders = [path.absolute().parent for path in paths]
    shared, found = Path(os.path.commonpath(folders)), []
    for folder in folders:
        names = map(str.lower, reversed(folder.relative_to(shared).parts))
        found.append(next((FOLDERS[name] for name in names if name in FOLDERS), None))
    return found
