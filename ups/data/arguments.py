"""What words on the command line of predict.py mean for a file of given trajectories."""

import re
from typing import Any

import numpy as np

from ups.data.trajectories import Trajectories
from ups.tasks import Task


def rows_of(text: str, num: int) -> range:
    """FIRST:LAST as rows of a file of num. Raises ValueError."""
    match = re.fullmatch(r"(\d*):(\d*)", text)
    rows = range(int(match[1] or 0), int(match[2] or num)) if match else range(0)
    if not rows or rows.stop > num:
        raise ValueError(
            f"--rows is {text!r}; expected FIRST:LAST with 0 <= FIRST < LAST <= {num}, as the "
            "input has so many trajectories. Give such a range, or leave it out."
        )
    return rows


def parameters_of(given: list[str], known: dict[str, Any], source: Trajectories) -> dict[str, float] | None:
    """The values of the parameters that the model is shown, of the command line or else of the file."""
    try:
        named = {name: float(value) for name, value in (text.split("=") for text in given)}
    except ValueError:
        raise ValueError(
            f"--parameters is {' '.join(given)!r}; expected NAME=VALUE, such as Nu=0.01, of "
            f"{', '.join(known) or 'none'}. Correct it."
        ) from None
    values = {name: source.attributes[name] for name in known if name in source.attributes} | named
    if source.parameter is not None and known:
        values.setdefault(next(iter(known)), source.parameter)
    return values or None


def require_forcing(task: Task, source: Trajectories, shown: int, num_frames: int) -> None:
    """Raise ValueError unless the input holds the forcing of the frames that are to be forecast."""
    if task.forcing and source.num_frames < shown + num_frames:
        raise ValueError(
            f"{source.path} holds the forcing {', '.join(task.forcing)} of "
            f"{source.num_frames} frames; expected {shown + num_frames}: the {shown} that are "
            f"shown and {num_frames} to forecast. Give a file with so many frames, in the last "
            "of which the fields may hold anything, and --shown."
        )


def by_name(task: Task, f: np.ndarray) -> dict[str, np.ndarray] | None:
    """Forcing (n, time, K, *space) as a forecast takes it; None for a task without."""
    cell = (..., *[0] * task.ndim)
    return {
        name: f[:, :, i][cell] if name in task.series else f[:, :, i] for i, name in enumerate(task.forcing)
    } or None
