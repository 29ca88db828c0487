"""A trained model as one uses it: physical fields in, physical fields out.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)
    members = model.sample("burgers1d_hidden", u0, num_frames=10, members=16)
    draws = model.prior("darcy2d_grf", a_observed, mask, members=16)

Fields are (batch, time, channel, *space), NumPy, torch or xarray, and the answer is of the same kind. The
axes batch and time may be left out: without the batch axis the answer has none; without the time axis the
field is one frame, which is enough where the history is 1 and for steady tasks. Where two readings fit, an
axis is time if the history is longer than 1, else batch. All that is known of a task travels in its weights
(`Forecaster.tasks`); what was not trained is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.labelled import is_labelled, label, unlabel
from ups.models.head import TaskHead
from ups.models.operator import Operator, load_operator
from ups.models.start import Values, start

Field = Any   # numpy.ndarray, torch.Tensor, xarray.DataArray or xarray.Dataset


class Forecaster:
    """An operator and, of a run's folder, what samples its errors.

    tasks: name -> what is known of it: fields, inputs, axes, grid, domain, boundary, dt, history, and the
    range of every parameter that was trained.
    """

    def __init__(self, operator: Operator, folder: Path | None = None):
        self.operator, self.folder = operator, folder
        self.tasks = {head.name: _known(head) for head in operator.heads.values()}

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Forecaster:
        """Of a run's folder or its operator's. Raises FileNotFoundError or ValueError, which name the make
        target."""
        folder = Path(folder)
        inside = folder / "operator"
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; expected a run, such as runs/small, or "
                                    f"its operator's folder. Run make operator RUN={folder.name or 'small'}.")
        operator = load_operator(inside if inside.is_dir() else folder, device)
        return cls(operator, folder if inside.is_dir() else folder.parent)

    def __repr__(self) -> str:
        lines = [f"Forecaster({str(self.folder) if self.folder else 'an operator'!s}, "
                 f"{sum(p.numel() for p in self.operator.parameters()):,} parameters)"]
        for name, known in self.tasks.items():
            fields = f"{', '.join(known['inputs'])} -> " * bool(known["inputs"]) + ", ".join(known["fields"])
            ranges = "".join(f", {key} {low:g} to {high:g}"
                             for key, (low, high) in known["parameters"].items())
            time = "" if known["inputs"] else f", dt {known['dt']:g}, history {known['history']}"
            grid = " x ".join(map(str, known["grid"]))
            lines.append(f"  {name}: {fields} on {grid} ({known['boundary']}){time}{ranges}")
        return "\n".join(lines)

    @torch.no_grad()
    def forecast(self, task: str, u0: Field, parameters: Values = None, num_frames: int = 1, *,
                 dt: float | None = None, resample: bool = False, extrapolate: bool = False) -> Field:
        """The `num_frames` frames (batch, num_frames, C, *space) that follow u0, physical units.

        u0: the last frames (batch, history or more, C, *space), channels in the order of the task's fields;
        of a steady task the coefficient. parameters: by name, {"Nu": 0.01}, or (batch, P) or (P,), raw values
        in the task's order; None where it has or shows none. dt: the time between the frames that are wanted,
        compared with the trained one. resample: take a field on another grid to the trained one and the
        forecast back, and warn what that left out. extrapolate: allow parameters outside the trained range.
        Raises ValueError, by name, for whatever was not trained; warns of a forecast that blows up.
        """
        u, answer = self._read(task, u0)
        given = start(self.operator, task, u, parameters, num_frames, dt=dt, resample=resample,
                      extrapolate=extrapolate)
        z = self.operator.rollout(given.z, task, given.parameters, num_frames)
        return answer(given.finish(self.operator.physical(task, z)))

    def _read(self, task: str, u0: Field, is_observed: bool = False) -> tuple[Tensor, Callable[..., Field]]:
        """u0 as (batch, time, C, *space), and what makes an answer (batch, [members,] time, C, *space) of its
        kind."""
        head = self.operator.head(task)
        codec, given = head.input_codec, u0
        if is_labelled(u0):
            given = unlabel(u0, head.task, codec.fields, head.description["dt"])
        u = (given if isinstance(given, Tensor) else torch.from_numpy(np.array(given))).detach()
        is_batch = u.ndim == 3 + codec.ndim or (u.ndim == 2 + codec.ndim and head.history == 1)
        if u.ndim == 2 + codec.ndim:
            u = u[:, None] if is_batch else u[None]
        elif u.ndim == 1 + codec.ndim and head.history == 1:
            u = u[None, None]

        def answer(u_pred: Tensor, axes: tuple[str, ...] = ("time",)) -> Field:
            u_pred = u_pred if is_batch else u_pred[0]
            if is_labelled(u0):
                return label(u_pred.cpu().numpy(), u0, head.task, axes, head.description["dt"])
            return u_pred if isinstance(u0, Tensor) else u_pred.cpu().numpy()

        return u, answer


def _known(head: TaskHead) -> dict[str, Any]:
    """What the weights say of a task, in plain values."""
    about, task, codec = head.description, head.task, head.codec
    return {"fields": list(codec.fields), "inputs": list(task.inputs), "axes": list(task.axes),
            "grid": list(codec.space),
            "domain": list(about["domain"]), "boundary": about["boundary"], "dt": about["dt"],
            "history": head.history,
            "parameters": {name: tuple(span) for name, span in about["parameters"].items()}}
