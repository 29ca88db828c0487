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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.generative.draws import WAYS, Sampler, load_sampler, sample_solutions, sample_states
from ups.generative.observation import seen as observe_cells
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
        self._samplers: dict[str, Sampler] = {}
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

    @torch.no_grad()
    def sample(self, task: str, u0: Field, parameters: Values = None, num_frames: int = 1, members: int = 16,
               *,
               by: str = "student", seed: int = 0, rows: Sequence[int] | None = None, dt: float | None = None,
               resample: bool = False, extrapolate: bool = False) -> Field:
        """Members (batch, members, num_frames, C, *space) that follow u0, physical units: each call of the
        operator gets an error drawn from what the operator was seen to leave.

        by: "student" (one evaluation per call), "student_2" (two), "teacher" (the diffusion itself) or
        "rival". seed and a row's number (rows; else its place in the batch) decide its members. Everything
        else as `forecast`. Raises FileNotFoundError, naming the make target, where the run has no such stage.
        """
        sampler = self._sampler(task, by, members, is_steady=False)
        u, answer = self._read(task, u0)
        given = start(self.operator, task, u, parameters, num_frames, dt=dt, resample=resample,
                      extrapolate=extrapolate)
        z = sample_states(self.operator, sampler, task, given.z, given.parameters, num_frames, members, seed,
                          rows)
        return answer(given.finish(self.operator.physical(task, z)), ("member", "time"))

    @torch.no_grad()
    def prior(self, task: str, a_observed: Field, mask: Any, members: int = 16, *, parameters: Values = None,
              seed: int = 0) -> Field:
        """Solutions (batch, members, C, *space) of a steady task, drawn given part of its coefficient,
        physical units.

        a_observed: the coefficient (batch, C, *space); mask: ([batch,] *space), 1 where it is seen, exactly.
        What is not seen may hold anything, NaN too. parameters: needed only where several values were
        trained. Raises as `sample`.
        """
        sampler = self._sampler(task, "prior", members, is_steady=True)
        u, answer = self._read(task, a_observed)
        codec, known = self.operator.head(task).input_codec, self.tasks[task]["parameters"]
        seen = torch.as_tensor(np.asarray(mask)).bool()
        if seen.shape[-codec.ndim :] != u.shape[-codec.ndim :] or seen[..., 0].ndim not in (codec.ndim - 1,
                                                                                            codec.ndim):
            raise ValueError(f"{task} was given a mask of shape {tuple(seen.shape)}; expected ([batch,] "
                             f"*space), as the field is {tuple(u.shape[-codec.ndim:])}. Give 1 where the "
                             "coefficient is seen, else 0.")
        seen = seen.expand(len(u), *u.shape[-codec.ndim :])[:, None]
        u = torch.where(seen[:, None], u, torch.ones_like(u))
        if parameters is None and all(low == high for low, high in known.values()):
            parameters = {name: low for name, (low, _) in known.items()}
        given = start(self.operator, task, u, parameters, 1)
        observation = observe_cells(codec.normalise(u[:, 0].to(given.z)), seen.to(given.z))
        draws = sample_solutions(self.operator, sampler, task, observation, given.parameters, members, seed)
        return answer(given.finish(draws), ("member",))

    def _sampler(self, task: str, by: str, members: int, is_steady: bool) -> Sampler:
        """The sampler of a run, loaded once. Raises ValueError or FileNotFoundError for what the run cannot
        draw."""
        head = self.operator.head(task)
        name = {"teacher": "corrector", "student": "student_1"}.get(by, by)
        if head.task.is_steady != is_steady or name not in WAYS or (name == "prior") != is_steady:
            wanted = "prior(task, a_observed, mask), as it is steady" if head.task.is_steady else \
                "sample(.., by=) one of student, student_2, teacher, rival, as it evolves in time"
            raise ValueError(f"{task} was asked for samples by {by!r}; expected {wanted}. Ask for these.")
        if members < 1:
            raise ValueError(f"{task} was asked for {members} members; expected at least 1. Ask for more.")
        if self.folder is None:
            raise FileNotFoundError(f"an operator alone has no {by}; expected a run's folder, such as "
                                    "runs/small, to draw from. Give ups.load that folder.")
        if name not in self._samplers:
            self._samplers[name] = load_sampler(self.folder, name, head.scale.device)
        sampler = self._samplers[name]
        if task not in sampler.network.names:
            raise ValueError(f"{self.folder} draws no samples of {task}; expected one of "
                             f"{', '.join(sampler.network.names)}, for which it has learnt the operator's "
                             f"errors. Set task.{task}.reserve and train again.")
        return sampler

    def _read(self, task: str, u0: Field) -> tuple[Tensor, Callable[..., Field]]:
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
