"""A trained model as one uses it: physical fields in, physical fields out.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)
    members = model.sample("burgers1d_forced", u0, num_frames=10, members=16)
    draws = model.prior("darcy2d_grf", a_observed, mask, members=16)

Fields are (batch, time, channel, *space), NumPy, torch or xarray, and the answer is of the same kind. The
axes batch and time may be left out: without the batch axis the answer has none; without the time axis the
field is one frame, which is enough where the history is 1 and for steady tasks. Where two readings fit, an
axis is time if the history is longer than 1, else batch. All that is known of a task travels in its weights
(`Forecaster.tasks`); what was not trained is refused by name.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.boundary import PERIODIC
from ups.generative.draws import WAYS, Sampler, load_sampler, sample_solutions, sample_states
from ups.generative.judge import EVALUATIONS, USUAL, serving
from ups.generative.observation import seen as observe_cells
from ups.models.head import TaskHead
from ups.models.operator import Operator, load_operator
from ups.spectral import resample as on_grid
from ups.tasks import Task
from ups.travel import HUB, fetch

CLOSE = 1e-3   # relative: published coordinates are float32, and some are off by a rounding of their own
SAME = 1e-6   # relative: a time step or parameter that differs by less is the same number in float32
# parameters by name, or raw in the task's order
Values = Mapping[str, Any] | Sequence | Tensor | float | None
Field = Any   # numpy.ndarray, torch.Tensor, xarray.DataArray or xarray.Dataset


def start(operator: Operator, task: str, u: Tensor, parameters: Values, num_frames: int, *,
          dt: float | None = None, resample: bool = False, extrapolate: bool = False,
          ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The start of a forecast of `num_frames` from u (batch, history or more, C, *space), physical units, of
    which the last frames count. Of a steady task the coefficient; num_frames is then 1.

    Returns z (batch, time, *tokens, dim) on the operator's device, raw parameters (batch, P), and what puts
    u_pred (..., C, *space) on the grid and device of u and in its precision, and warns of what is not finite.
    parameters: of all rows or (batch, P), raw values; None where the task has or shows none. dt: the time
    between the frames that are wanted, compared with the trained one. resample: take a field on another grid
    to the trained one (`ups.spectral.interpolation`), and warn what that left out. extrapolate: allow
    parameters and starts outside the trained range. Raises ValueError, by name, for whatever the operator
    was not trained on.
    """
    head = operator.head(task)
    _check_field(head, u, num_frames, dt)
    if not extrapolate:
        _check_range(head, u)
    values = check_parameters(head, parameters, len(u), extrapolate)
    codec, shown = head.input_codec, u
    space, boundary = tuple(u.shape[3:]), head.task.boundary
    if space != codec.space:
        if not resample:
            raise ValueError(f"{task} was given a field on the grid {space}; expected {codec.space}, on "
                             f"which the operator was trained. Give that grid, or resample=True to go to it "
                             f"and back, or train on the other.")
        shown = on_grid(u, codec.space, boundary)
        lost = float((on_grid(shown, space, boundary) - u).norm() / (u - u.mean()).norm().clamp_min(1e-30))
        waves = "Fourier" if boundary == PERIODIC else "mixed" if PERIODIC in boundary else "cosine"
        warnings.warn(f"{task}: resampled from the grid {space} to the trained grid {codec.space} and back "
                      f"({waves} interpolation). {lost:.1e} of the variation of the field given is finer "
                      f"than the trained grid and was left out; no forecast holds anything finer.",
                      stacklevel=4)

    def finish(u_pred: Tensor) -> Tensor:
        u_pred = u_pred.to(u)
        axes = tuple(range(u_pred.ndim - 2 - head.task.ndim))
        is_fine = u_pred.isfinite().flatten(len(axes) + 1).all(-1)   # (batch, .., frames)
        if not bool(is_fine.all()):
            first, num_frames = 1 + int((~is_fine).any(axes).nonzero()[0]), is_fine.shape[-1]
            warnings.warn(f"{head.name}: the forecast is not finite from frame {first} of {num_frames} on; "
                          "expected numbers. Use the frames before it, or look at the start and the "
                          "parameters.", stacklevel=4)
        return u_pred if space == head.codec.space else on_grid(u_pred, space, boundary)

    return codec.encode(codec.normalise(shown.to(head.scale.device, torch.float32))), values, finish


def _check_field(head: TaskHead, u: Tensor, num_frames: int, dt: float | None) -> None:
    """Raise ValueError unless u can be (batch, history, C, *space) of this head and dt is its time step."""
    codec, trained, steps = head.input_codec, head.description["dt"], head.history
    wanted = f"(batch, {steps}, {codec.num_channels}, *space) with {codec.ndim} space axes"
    frames, channels = u.shape[1:2].numel(), u.shape[2:3].numel()
    is_right = {
        f"a field of shape {tuple(u.shape)} and {u.dtype}; expected {wanted}, floating point. Move its axes":
            u.ndim == 3 + codec.ndim and len(u) > 0 and u.is_floating_point(),
        f"{frames} frames; expected its history of {steps}. Give the last {steps}":
            frames == 1 if head.task.is_steady else frames >= steps,
        f"{channels} channels; expected {codec.num_channels}: {', '.join(codec.fields)}. Give them in order":
            channels == codec.num_channels,
        "a field with NaN or infinity; expected finite numbers. Repair the field": bool(u.isfinite().all()),
        f"{num_frames} frames to forecast; expected "
        f"{'1, as it is steady' if head.task.is_steady else 'at least 1'}. Ask for 1": num_frames == 1
        or (num_frames > 1 and not head.task.is_steady),
        f"the time step {dt}; expected {trained:g}, with which the operator was trained. Take frames so far "
        f"apart, or train with the other step": dt is None or abs(dt - trained) <= SAME * trained,
    }
    if wrong := [text for text, fine in is_right.items() if not fine]:
        raise ValueError(f"{head.name} was given {wrong[0]}.")


def _check_range(head: TaskHead, u: Tensor) -> None:
    """Raise ValueError where a state u (batch, time, C, *space) starts outside what no forecast leaves."""
    if head.task.is_steady:
        return
    codec, shown = head.codec, u[:, -head.history :].transpose(0, 2).flatten(1)
    ends = (codec.denormalise(end.view(-1, *[1] * codec.ndim)).flatten() for end in (head.low, head.high))
    for name, low, high, values in zip(codec.fields, *(end.tolist() for end in ends), shown, strict=True):
        found, slack = (float(values.min()), float(values.max())), SAME * max(abs(low), abs(high))
        if not low - slack <= found[0] <= found[1] <= high + slack:
            raise ValueError(f"{head.name} was given {name} from {found[0]:g} to {found[1]:g}; expected "
                             f"{low:g} to {high:g}: the range of its training data and half as much on both "
                             f"sides, which no forecast leaves. Train on such fields, or ask for "
                             f"extrapolate=True, which cuts the forecast there.")


def check_parameters(head: TaskHead, parameters: Values, batch: int, extrapolate: bool) -> Tensor:
    """Raw parameters (batch, P), float64. Raises ValueError for what was not trained, in name, number or
    value."""
    known = head.description["parameters"]
    if isinstance(parameters, Mapping):
        if unknown := [name for name in parameters if name not in known]:
            raise ValueError(f"{head.name} was given the parameter {unknown[0]!r:.80}; expected "
                             f"{', '.join(known) or 'none'}, as it was trained. Give these, by name.")
        columns = [torch.as_tensor(parameters[name], dtype=torch.float64) for name in known
                   if name in parameters]
        parameters = torch.stack(torch.broadcast_tensors(*columns), -1) if columns else None
    values = torch.as_tensor([] if parameters is None else parameters, dtype=torch.float64, device="cpu")
    values = values.reshape(1, -1) if values.ndim < 2 else values
    if values.shape[1:] != (len(known),) or len(values) not in (1, batch):
        raise ValueError(f"{head.name} was given parameters of shape {tuple(values.shape)}; expected "
                         f"({batch}, {len(known)}) or ({len(known)},): "
                         f"{', '.join(known) or 'none, so None'}. Give these, in order.")
    for (name, (low, high)), column in zip(known.items(), values.unbind(1), strict=True):
        is_known = (column >= low - SAME * abs(low)) & (column <= high + SAME * abs(high))
        is_right = ((column > 0) | (low <= 0)) & column.isfinite() & (is_known | extrapolate)
        if not bool(is_right.all()):
            raise ValueError(f"{head.name} was given {name} = {float(column[~is_right][0]):g}; expected "
                             f"{low:g} to {high:g}, where the operator was trained. Train with such a value, "
                             f"or ask for its guess with extrapolate=True (of numbers above zero).")
    return values.expand(batch, -1)


def unlabel(u: Any, task: Task, fields: tuple[str, ...], dt: float) -> np.ndarray:
    """u as ([batch,] [time,] C, *space): a Dataset with a variable per field, or a DataArray with a dimension
    "channel".

    Dimensions are found by name: the task's axes, "time", "channel" (not needed of a single field), and one
    other at most, the batch. Raises ValueError, by name, for what is missing and for coordinates of another
    domain or time step.
    """
    if hasattr(u, "data_vars"):
        if missing := [name for name in fields if name not in u]:
            raise ValueError(f"{task.name} was given variables {', '.join(map(str, u.data_vars))}; expected "
                             f"{', '.join(fields)}, as it was trained: {', '.join(missing)} missing. Rename "
                             "or add them.")
        u = u[list(fields)].to_array("channel")
    elif "channel" not in u.dims:
        u = u.expand_dims("channel")
    elif "channel" in u.coords and set(fields) <= set(u["channel"].values.tolist()):
        u = u.sel(channel=list(fields))
    others = [name for name in u.dims if name not in (*task.axes, "time", "channel")]
    if len(others) > 1 or (missing := [axis for axis in task.axes if axis not in u.dims]):
        raise ValueError(f"{task.name} was given dimensions {', '.join(map(str, u.dims))}; expected "
                         f"{', '.join(task.axes)}, and besides time and channel one more at most, the batch. "
                         "Rename or select them.")
    spans = dict(zip(task.axes, task.spans, strict=True))
    wanted = {axis: (high - low) / u.sizes[axis] for axis, (low, high) in spans.items()}
    wanted |= {"time": dt} if dt else {}
    for name, step in wanted.items():
        found = np.diff(u[name].values.astype(float)) if name in u.coords and name in u.dims else np.empty(0)
        if found.size and np.abs(found - step).max() > CLOSE * step * max(1, u.sizes[name] / 100):
            raise ValueError(f"{task.name} was given the coordinate {name} with steps of {found.min():g} to "
                             f"{found.max():g}; expected {step:g}, as it was trained on "
                             f"{', '.join(f'[{low:g}, {high:g}]' for low, high in {*task.spans})}. "
                             "Put the field on such cells, or mend it.")
    return u.transpose(*others, *[name for name in ("time",) if name in u.dims], "channel", *task.axes).values


def label(values: np.ndarray, like: Any, task: Task, axes: tuple[str, ...], dt: float) -> Any:
    """An answer ([batch,] *axes, C, *space) to the labelled field `like`, with its coordinates; axes: such as
    member and time."""
    import xarray

    others = [name for name in like.dims if name not in (*task.axes, "time", "channel")]
    dims = (*others, *axes, "channel", *task.axes)
    coordinates = {name: like[name] for name in (*others, *task.axes) if name in like.coords}
    sizes = dict(zip(dims, values.shape, strict=True))
    if "time" in axes:
        last = float(like["time"].values.reshape(-1)[-1]) if "time" in like.coords else 0.0
        coordinates["time"] = last + dt * np.arange(1, sizes["time"] + 1)
    coordinates |= {"channel": list(task.fields)} | ({"member": np.arange(sizes["member"])}
                                                     if "member" in axes else {})
    out = xarray.DataArray(values, coordinates, dims, attrs={"task": task.name})
    if hasattr(like, "data_vars"):
        return out.to_dataset("channel").assign_attrs(like.attrs | {"task": task.name})
    return out if "channel" in like.dims else out.isel(channel=0, drop=True).rename(task.fields[0])


class Forecaster:
    """An operator and, of a run's folder, what samples its errors.

    tasks: name -> what is known of it: fields, inputs, given (the fields that stay as they are), axes, grid,
    domain, boundary, dt, history, and the range of every parameter that was trained.
    """

    def __init__(self, operator: Operator, folder: Path | None = None):
        self.operator, self.folder = operator, folder
        self._samplers: dict[str, Sampler] = {}
        self.tasks: dict[str, dict[str, Any]] = {head.name: {   # in plain values
            "fields": list(head.codec.fields), "inputs": list(head.task.inputs),
            "given": list(head.task.still), "axes": list(head.task.axes), "grid": list(head.codec.space),
            "domain": list(head.description["domain"]), "boundary": head.description["boundary"],
            "dt": head.description["dt"], "history": head.history,
            "parameters": {name: tuple(span) for name, span in head.description["parameters"].items()}}
            for head in operator.heads.values()}

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> "Forecaster":
        """Of a run's folder, its operator's or a hub's hf://OWNER/NAME. Raises FileNotFoundError or
        ValueError, which name the make target."""
        folder = fetch(str(folder)) if str(folder).startswith(HUB) else Path(folder)
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
            time += f", given {', '.join(known['given'])}" * bool(known["given"])
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
        forecast back, and warn what that left out. extrapolate: allow parameters and starts
        outside the trained range. Raises ValueError, by name, for whatever was not trained; warns of a
        forecast that blows up.
        """
        u, answer = self._read(task, u0)
        z, values, finish = start(self.operator, task, u, parameters, num_frames, dt=dt, resample=resample,
                                  extrapolate=extrapolate)
        z_pred = self.operator.rollout(z, task, values, num_frames)
        return answer(finish(self.operator.head(task).physical(z_pred)))

    @torch.no_grad()
    def sample(self, task: str, u0: Field, parameters: Values = None, num_frames: int = 1, members: int = 16,
               *,
               by: str | None = None, evaluations: int = EVALUATIONS, seed: int = 0,
               rows: Sequence[int] | None = None, dt: float | None = None, resample: bool = False,
               extrapolate: bool = False) -> Field:
        """Members (batch, members, num_frames, C, *space) that follow u0, physical units: each call of the
        operator gets an error drawn from what the operator was seen to leave.

        by: "student" (one evaluation per call), "student_2" (two), "teacher" (the diffusion itself) or
        "rival"; without, of those that take at most so many `evaluations` per call the cheapest that is as
        good as the best on validation (`ups.generative.judge`). seed and a row's number (rows; else its place
        in the batch) decide its members. Everything else as `forecast`. Raises FileNotFoundError, naming the
        make target, where the run has no such stage.
        """
        sampler = self._sampler(task, by, members, is_steady=False, evaluations=evaluations)
        u, answer = self._read(task, u0)
        z, values, finish = start(self.operator, task, u, parameters, num_frames, dt=dt, resample=resample,
                                  extrapolate=extrapolate)
        z_pred = sample_states(self.operator, sampler, task, z, values, num_frames, members, seed, rows)
        return answer(finish(self.operator.head(task).physical(z_pred)), ("member", "time"))

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
        z, values, finish = start(self.operator, task, u, parameters, 1)
        observation = observe_cells(codec.normalise(u[:, 0].to(z)), seen.to(z))
        draws = sample_solutions(self.operator, sampler, task, observation, values, members, seed)
        return answer(finish(draws), ("member",))

    def _sampler(self, task: str, by: str | None, members: int, is_steady: bool,
                 evaluations: int = EVALUATIONS) -> Sampler:
        """The sampler of a run, loaded once. Raises ValueError or FileNotFoundError for what the run cannot
        draw."""
        head = self.operator.head(task)
        name = {"teacher": "corrector", "student": "student_1", None: USUAL}.get(by, by)
        if head.task.is_steady != is_steady or name not in WAYS or (name == "prior") != is_steady:
            wanted = "prior(task, a_observed, mask), as it is steady" if head.task.is_steady else \
                "sample(.., by=) one of student, student_2, teacher, rival, as it evolves in time"
            asked = f" by {by!r}" if by else ""
            raise ValueError(f"{task} was asked for samples{asked}; expected {wanted}. Ask for these.")
        if members < 1:
            raise ValueError(f"{task} was asked for {members} members; expected at least 1. Ask for more.")
        if self.folder is None:
            raise FileNotFoundError(f"an operator alone has no {by or 'errors to draw'}; expected a run's "
                                    "folder, such as runs/small, to draw from. Give ups.load that folder.")
        if by is None:
            name = serving(self.folder, task, evaluations)
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
        codec, given, is_labelled = head.input_codec, u0, hasattr(u0, "dims")   # by xarray
        if is_labelled:
            given = unlabel(u0, head.task, codec.fields, head.description["dt"])
        u = (given if isinstance(given, Tensor) else torch.from_numpy(np.array(given))).detach()
        is_batch = u.ndim == 3 + codec.ndim or (u.ndim == 2 + codec.ndim and head.history == 1)
        if u.ndim == 2 + codec.ndim:
            u = u[:, None] if is_batch else u[None]
        elif u.ndim == 1 + codec.ndim and head.history == 1:
            u = u[None, None]

        def answer(u_pred: Tensor, axes: tuple[str, ...] = ("time",)) -> Field:
            u_pred = u_pred if is_batch else u_pred[0]
            if is_labelled:
                return label(u_pred.cpu().numpy(), u0, head.task, axes, head.description["dt"])
            return u_pred if isinstance(u0, Tensor) else u_pred.cpu().numpy()

        return u, answer
