"""Arguments of `ups forecast`, parsed against the file of input trajectories."""

import re
from typing import Any

import numpy as np

from ups.tasks import Task
from ups.userdata.trajectories import Trajectories


def rows_of(text: str, num: int) -> range:
    """The rows FIRST:LAST of a file with `num` rows. Raises ValueError."""
    match = re.fullmatch(r"(\d*):(\d*)", text)
    rows = range(int(match[1] or 0), int(match[2] or num)) if match else range(0)
    if not rows or rows.stop > num:
        raise ValueError(
            f"--rows is {text!r}; expected FIRST:LAST with 0 <= FIRST < LAST <= {num}, the number of "
            "input trajectories. Correct the range, or leave it out."
        )
    return rows


def parameters_of(
    arguments: list[str], known: dict[str, Any], source: Trajectories
) -> dict[str, float] | None:
    """Parameters for the model: NAME=VALUE of the command line, else the values in the file.

    known: the parameters of the model, by name. Raises ValueError for text of another form.
    """
    try:
        named = {name: float(value) for name, value in (text.split("=") for text in arguments)}
    except ValueError:
        raise ValueError(
            f"--parameters is {' '.join(arguments)!r}; expected NAME=VALUE, such as Nu=0.01, of "
            f"{', '.join(known) or 'none'}. Correct it."
        ) from None
    values = {name: source.attributes[name] for name in known if name in source.attributes} | named
    if source.parameter is not None and known:
        values.setdefault(next(iter(known)), source.parameter)
    return values or None


def require_forcing(task: Task, source: Trajectories, num_inputs: int, num_frames: int) -> None:
    """Raise ValueError unless the file holds the forcing of `num_inputs` input frames and of `num_frames`
    frames to forecast."""
    if task.forcing and source.num_frames < num_inputs + num_frames:
        raise ValueError(
            f"{source.path} holds the forcing {', '.join(task.forcing)} of {source.num_frames} frames; "
            f"expected {num_inputs + num_frames}: {num_inputs} input frames and {num_frames} to forecast. "
            "Pass a file with so many frames (the fields of the last ones are not read), and --context."
        )


def by_name(task: Task, f: np.ndarray) -> dict[str, np.ndarray] | None:
    """Forcing (n, time, K, *space) by name, as `Forecaster.forecast` takes it; None for a task without."""
    cell = (..., *[0] * task.ndim)
    return {
        name: f[:, :, i][cell] if name in task.series else f[:, :, i] for i, name in enumerate(task.forcing)
    } or None
