"""A trained model as one uses it: physical fields in, physical fields out.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)
    members = model.sample("burgers1d_forced", u0, num_frames=10, members=16)
    draws = model.prior("darcy2d_grf", a_observed, mask, members=16)

Fields are (batch, time, channel, *space), NumPy, torch or xarray, and the answer is of the same kind, in
float32 or float64. xarray is read by names (`ups.forecast_xarray`). Of arrays the axes batch and time may be
left out: without the batch axis the answer has none; without the time axis the field is one frame, which is
enough where the history is 1 and for steady tasks. Where two readings fit, an axis is time if the history is
longer than 1, else batch. All that is known of a task travels in its weights (`Forecaster.tasks`); what was
not trained is refused by name."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.commands.publish import HUB, fetch
from ups.common.boundary import PERIODIC
from ups.common.spectral import resample as on_grid
from ups.forecast_inputs import SAME, Values, check_parameters, read_forcing
from ups.forecast_xarray import Field, as_tensor, label, unlabel
from ups.generative.observation import observe_cells
from ups.generative.sampling import (
    SAMPLERS,
    Sampler,
    block_size,
    load_sampler,
    sample_solutions,
    sample_states,
)
from ups.generative.validation import DEFAULT, best_within, default_sampler
from ups.models.head import HORIZON, TaskHead
from ups.models.operator import Operator, load_operator
from ups.models.rollout import in_blocks, name_starts
from ups.tasks import in_unit
from ups.training.finished import stage_of_run


def start(
    operator: Operator,
    task: str,
    u: Tensor,
    parameters: Values,
    num_frames: int,
    *,
    dt: float | None = None,
    resample: bool = False,
    extrapolate: bool = False,
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The start of a forecast of `num_frames` from u (batch, history or more, C, *space), physical units, of
    which the last frames count. Of a steady task the coefficient; num_frames is then 1.

    Returns z (batch, time, *tokens, dim) on the operator's device, raw parameters (batch, P), and what puts
    u_pred (..., C, *space) on the grid and device of u and in its precision, and warns of what is not finite.
    parameters: of all rows or (batch, P), raw values; None where the task has or shows none. dt: the time
    between the frames that are wanted, compared with the trained one. resample: take a field on another grid
    to the trained one (`ups.common.spectral.interpolation`), and warn what that left out. extrapolate: allow
    parameters and starts outside the trained range. Raises ValueError, by name, for whatever the operator
    was not trained on.
    """
    head, given = operator.head(task), u
    _check_field(head, u, num_frames, dt)
    codec = head.input_codec
    u = codec.missing(u)
    u = head.task.counted(u, codec.fields)  # in float64, before anything is rounded to float32
    if not extrapolate:
        _check_range(head, u)
    values = check_parameters(head, parameters, len(u), extrapolate)
    shown = u
    space, boundary = tuple(u.shape[3:]), head.task.boundary
    if space != codec.space:
        if not resample:
            raise ValueError(
                f"{task} was given a field on the grid {space}; expected {codec.space}, on "
                f"which the operator was trained. Give that grid, or resample=True to go to it "
                f"and back, or train on the other."
            )
        shown = on_grid(u, codec.space, boundary)
        change, variation = on_grid(shown, space, boundary).double() - u, u - u.double().mean()
        lost = float(change.norm() / variation.norm().clamp_min(1e-150))
        waves = "Fourier" if boundary == PERIODIC else "mixed" if PERIODIC in boundary else "cosine"
        warnings.warn(
            f"{task}: resampled from the grid {space} to the trained grid {codec.space} and back "
            f"({waves} interpolation). {lost:.1e} of the variation of the field given is finer "
            f"than the trained grid and was left out; no forecast holds anything finer.",
            stacklevel=4,
        )

    def finish(u_pred: Tensor) -> Tensor:
        u_pred = u_pred.to(u)
        axes = tuple(range(u_pred.ndim - 2 - head.task.ndim))
        is_fine = head.codec.held(u_pred).isfinite().flatten(len(axes) + 1).all(-1)  # (batch, .., frames)
        if not bool(is_fine.all()):
            first, num_frames = 1 + int((~is_fine).any(axes).nonzero()[0]), is_fine.shape[-1]
            warnings.warn(
                f"{head.name}: the forecast is not finite from frame {first} of {num_frames} on; "
                "expected numbers. Use the frames before it, or look at the start and the "
                "parameters.",
                stacklevel=4,
            )
        if beyond := _beyond(head, u_pred):
            warnings.warn(beyond, stacklevel=4)
        u_pred = u_pred if space == head.codec.space else on_grid(u_pred, space, boundary)
        return head.task.absolute(u_pred, head.codec.fields).to(given)

    shown = shown.to(head.scale.device, torch.float32)
    z = in_blocks(
        lambda index: codec.encode(codec.normalise(shown[index])), len(u), block_size(codec, shown.device)
    )
    return z, values, finish


def is_count(number: Any) -> bool:
    """Whether this is a whole number of at least 1."""
    return is_whole(number) and number >= 1


def is_whole(number: Any) -> bool:
    """Whether this is an integer of Python or NumPy."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _check_field(head: TaskHead, u: Tensor, num_frames: int, dt: float | None) -> None:
    """Raise ValueError unless u can be (batch, history, C, *space) of this head and dt is its time step."""
    codec, trained, steps = head.input_codec, head.description["dt"], head.history
    wanted = f"(batch, {steps}, {codec.num_channels}, *space) with {codec.ndim} space axes"
    frames, channels = u.shape[1:2].numel(), u.shape[2:3].numel()
    is_masked = head.codec.valid is not None or codec.valid is not None
    is_steady, same_grid = head.task.is_steady, tuple(u.shape[3:]) == codec.space
    num_wanted = "1, as it is steady" if is_steady else "a whole number, at least 1"
    checks = [
        (
            u.ndim == 3 + codec.ndim and len(u) > 0 and u.is_floating_point(),
            f"a field of shape {tuple(u.shape)} and {u.dtype}; expected {wanted}, floating point. "
            "Move its axes",
        ),
        (
            frames == 1 if is_steady else frames >= steps,
            f"{frames} frames; expected its history of {steps}. Give the last {steps}",
        ),
        (
            channels == codec.num_channels,
            f"{channels} channels; expected {codec.num_channels}: {', '.join(codec.fields)}. "
            "Give them in order",
        ),
        (
            bool(codec.held(u).isfinite().all()),
            "a field with NaN, infinity or masked values; expected finite numbers"
            f"{', but in the cells of its mask' * is_masked}. Fill or repair the field",
        ),
        (
            same_grid or not is_masked,
            f"a field on the grid {tuple(u.shape[3:])}; expected {codec.space}, as cells of it have "
            "no value. Put the field on that grid",
        ),
        (
            is_count(num_frames) and (num_frames == 1 or not is_steady),
            f"{num_frames} frames to forecast; expected {num_wanted}. Ask for 1",
        ),
        (
            dt is None or (isinstance(dt, (Real, Tensor)) and abs(dt - trained) <= SAME * trained),
            f"the time step {dt}; expected {trained:g}, with which the operator was trained. "
            "Take frames so far apart, or train with the other step",
        ),
    ]
    if wrong := [text for is_right, text in checks if not is_right]:
        raise ValueError(f"{head.name} was given {wrong[0]}.")


def _check_range(head: TaskHead, u: Tensor) -> None:
    """Raise ValueError where a state u (batch, time, C, *space) starts outside what no forecast leaves."""
    if head.task.is_steady:
        return
    codec, offsets = head.codec, head.task.offsets
    channels = u[:, -head.history :].transpose(0, 2).flatten(1)
    ends = (codec.denormalise(end.view(-1, *[1] * codec.ndim)).flatten() for end in (head.low, head.high))
    for name, low, high, values in zip(codec.fields, *(end.tolist() for end in ends), channels, strict=True):
        values = values[~values.isnan()]  # but for the cells of a mask
        if not len(values):
            continue
        found, slack = (float(values.min()), float(values.max())), SAME * max(abs(low), abs(high))
        if not low - slack <= found[0] <= found[1] <= high + slack:
            digits, offset = (9, offsets[name]) if name in offsets else (6, 0.0)
            shown = [f"{end + offset:.{digits}g}" for end in (*found, low, high)]
            raise ValueError(
                f"{head.name} was given {name} from {shown[0]} to {shown[1]}; expected "
                f"{shown[2]} to {shown[3]}: the range of its training data and half as much on "
                f"both sides, which no forecast leaves. Train on such fields, or ask for "
                f"extrapolate=True, which cuts the forecast there."
            )


def _beyond(head: TaskHead, u_pred: Tensor) -> str:
    """In which way and from which frame on a forecast u_pred (..., time, C, *space) on the trained grid goes
    beyond what was evaluated; "" if it does not. Weights of older versions do not hold their horizon."""
    if head.task.is_steady:
        return ""
    num_frames = u_pred.shape[-2 - head.task.ndim]
    horizon, first = head.description.get(HORIZON, num_frames), head.first_at_bounds(u_pred)
    ways = [
        f"is longer than the {horizon} frames on which the operator was evaluated, so its error is not "
        f"known from frame {horizon + 1} on"
    ] * (num_frames > horizon)
    ways += [
        f"reaches the bounds of the training data (their range and half of it on both sides) in frame "
        f"{first}, where it is cut, so it is wrong from there on"
    ] * (first > 0)
    if not ways:
        return ""
    return (
        f"{head.name}: the forecast of {num_frames} frames {', and it '.join(ways)}. Use the frames "
        f"before that, or train on longer trajectories."
    )


class Forecaster:
    """An operator and, of a run's folder, what samples its errors.

    tasks: name -> what is known of it: fields, inputs, given (the fields that stay as they are), forcing
    (what varies in time and is given with the start), axes, grid, domain, boundary, dt, history, units (of
    fields, axes and "time", where they are known), and the range of every parameter that was trained.
    """

    def __init__(self, operator: Operator, folder: Path | None = None):
        self.operator, self.folder = operator, folder
        self._samplers: dict[str, Sampler] = {}
        self.tasks: dict[str, dict[str, Any]] = {
            head.name: {  # in plain values
                "fields": list(head.codec.fields),
                "inputs": list(head.task.inputs),
                "given": list(head.task.still),
                "forcing": list(head.task.forcing),
                "axes": list(head.task.axes),
                "grid": list(head.codec.space),
                "domain": list(head.description["domain"]),
                "boundary": head.description["boundary"],
                "dt": head.description["dt"],
                "history": head.history,
                "units": dict(head.task.units),
                "parameters": {name: tuple(span) for name, span in head.description["parameters"].items()},
            }
            for head in operator.heads.values()
        }

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        solvers: Mapping[str, Callable[..., Any]] | None = None,
    ) -> "Forecaster":
        """Of a run's folder, its operator's or a hub's hf://OWNER/NAME. solvers: task -> your coarse solver,
        where it was trained over one. Raises FileNotFoundError or ValueError, which name the make target."""
        folder = fetch(str(folder)) if str(folder).startswith(HUB) else Path(folder)
        inside = folder / "operator"
        if not folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder {folder}; expected a run, such as runs/small, or "
                f"its operator's folder. Run make operator RUN={folder.name or 'small'}."
            )
        if inside.is_dir():
            stage_of_run(folder, "operator")
        operator = load_operator(inside if inside.is_dir() else folder, device, solvers)
        return cls(operator, folder if inside.is_dir() else folder.parent)

    def __repr__(self) -> str:
        lines = [
            f"Forecaster({str(self.folder) if self.folder else 'an operator'!s}, "
            f"{sum(p.numel() for p in self.operator.parameters()):,} parameters)"
        ]
        for name, known in self.tasks.items():
            units = known["units"]
            inputs, fields = (
                ", ".join(in_unit(name, units.get(name)) for name in names)
                for names in (known["inputs"], known["fields"])
            )
            fields = f"{inputs} -> {fields}" if inputs else fields
            ranges = "".join(
                f", {key} {low:g} to {high:g}" for key, (low, high) in known["parameters"].items()
            )
            time = (
                ""
                if known["inputs"]
                else f", dt {known['dt']:g} {units.get('time', '')}".rstrip()
                + f", history {known['history']}"
            )
            time += "".join(f", {key} {', '.join(known[key])}" for key in ("given", "forcing") if known[key])
            grid = " x ".join(map(str, known["grid"]))
            lines.append(f"  {name}: {fields} on {grid} ({known['boundary']}){time}{ranges}")
        return "\n".join(lines)

    @torch.no_grad()
    def forecast(
        self,
        task: str,
        u0: Field,
        parameters: Values = None,
        num_frames: int = 1,
        *,
        forcing: Any = None,
        dt: float | None = None,
        resample: bool = False,
        extrapolate: bool = False,
    ) -> Field:
        """The `num_frames` frames (batch, num_frames, C, *space) that follow u0, physical units.

        u0: the last frames (batch, history or more, C, *space), channels in the order of the task's fields;
        of a steady task the coefficient. parameters: by name, {"Nu": 0.01}, or (batch, P) or (P,), raw values
        in the task's order; one that had a single value in training may be left out. forcing: what is known
        in advance, by name, from the last frame of u0 to the last one predicted (`read_forcing`). dt: the
        time between the frames that are wanted, compared with the trained one. resample: take a field on
        another grid to the trained one and the forecast back, and warn what that left out. extrapolate: allow
        parameters, forcing and starts outside the trained range. Raises ValueError, by name, for whatever was
        not trained; warns of a forecast that blows up.
        """
        u, answer = self._read(task, u0, ("time",))
        z, values, finish = start(
            self.operator, task, u, parameters, num_frames, dt=dt, resample=resample, extrapolate=extrapolate
        )
        told = self._told(task, forcing, u0, u, num_frames, extrapolate)
        z_pred = self.operator.rollout(z, task, values, num_frames, forcing=told)
        return answer(finish(self.operator.head(task).physical(z_pred)))

    @torch.no_grad()
    def sample(
        self,
        task: str,
        u0: Field,
        parameters: Values = None,
        num_frames: int = 1,
        members: int = 16,
        *,
        forcing: Any = None,
        by: str | None = None,
        evaluations: int | None = None,
        seed: int = 0,
        rows: Sequence[int] | None = None,
        dt: float | None = None,
        resample: bool = False,
        extrapolate: bool = False,
    ) -> Field:
        """Members (batch, members, num_frames, C, *space) that follow u0, physical units: each call of the
        operator gets an error drawn from what the operator was seen to leave.

        u0: as `forecast`; where there is one more frame than the history, the errors are conditioned on it,
        too, as in training and in the report. by: "student" (one evaluation of a network per call),
        "student_2" (two), "teacher" (the diffusion itself) or "rival". evaluations: per call, in place of
        `by`: what spends this budget draws, the teacher's sampler from 4 on, in as many steps as it was
        trained for at most (`ups.generative.validation.best_within`). Without both, what serves: the cheapest
        that is as good as the best on validation with at most two. seed, a row's number (rows; else its place
        in the batch) and its last frame decide its members: the same call draws the same, and a forecast that
        goes on from a member's last frame draws anew. All else as `forecast`. Raises FileNotFoundError,
        naming the make target, where the run has no such stage.
        """
        sampler = self._sampler(task, by, members, is_steady=False, evaluations=evaluations)
        u, answer = self._read(task, u0, ("member", "time"))
        z, values, finish = start(
            self.operator, task, u, parameters, num_frames, dt=dt, resample=resample, extrapolate=extrapolate
        )
        if rows is not None and (len(rows) != len(u) or not all(map(is_whole, rows))):
            raise ValueError(
                f"{task} was given {len(rows)} row numbers for a batch of {len(u)}; expected "
                "one whole number each. Give as many, or leave rows out."
            )
        names = name_starts(range(len(u)) if rows is None else rows, u[:, -1])
        told = self._told(task, forcing, u0, u, num_frames, extrapolate)
        z_pred = sample_states(
            self.operator, sampler, task, z, values, num_frames, members, seed, names, told
        )
        return answer(finish(self.operator.head(task).physical(z_pred)))

    @torch.no_grad()
    def prior(
        self,
        task: str,
        a_observed: Field,
        mask: Any,
        members: int = 16,
        *,
        parameters: Values = None,
        seed: int = 0,
    ) -> Field:
        """Solutions (batch, members, C, *space) of a steady task, drawn given part of its coefficient,
        physical units.

        a_observed: the coefficient (batch, C, *space); mask: ([batch,] *space), 1 where it is seen, exactly.
        What is not seen may hold anything, NaN too. parameters: as `forecast`. Raises as
        `sample`.
        """
        sampler = self._sampler(task, "prior", members, is_steady=True)
        u, answer = self._read(task, a_observed, ("member",))
        codec = self.operator.head(task).input_codec
        seen = as_tensor(mask, f"{task}'s mask")
        seen = seen.isfinite() & (seen != 0)
        if seen.shape[-codec.ndim :] != u.shape[-codec.ndim :] or seen[..., 0].ndim not in (
            codec.ndim - 1,
            codec.ndim,
        ):
            raise ValueError(
                f"{task} was given a mask of shape {tuple(seen.shape)}; expected ([batch,] "
                f"*space), as the field is {tuple(u.shape[-codec.ndim :])}. Give 1 where the "
                "coefficient is seen, else 0."
            )
        seen = seen.expand(len(u), *u.shape[-codec.ndim :])[:, None]
        u = torch.where(seen[:, None], u, torch.ones_like(u))
        z, values, finish = start(self.operator, task, u, parameters, 1)
        u = self.operator.head(task).task.counted(u, codec.fields)
        observation = observe_cells(codec.normalise(u[:, 0].to(z)), seen.to(z))
        draws = sample_solutions(self.operator, sampler, task, observation, values, members, seed)
        return answer(finish(draws))

    def _told(
        self, task: str, forcing: Any, u0: Field, u: Tensor, num_frames: int, extrapolate: bool
    ) -> Tensor | None:
        return read_forcing(
            self.operator.head(task),
            forcing,
            u0,
            len(u),
            tuple(u.shape[3:]),
            num_frames,
            extrapolate=extrapolate,
        )

    def _sampler(
        self, task: str, by: str | None, members: int, is_steady: bool, evaluations: int | None = None
    ) -> Sampler:
        """The sampler of a run, loaded once. Raises ValueError or FileNotFoundError for what the run cannot
        draw."""
        head = self.operator.head(task)
        name = {"teacher": "corrector", "student": "student_1", None: DEFAULT}.get(by, by)
        if head.task.is_steady != is_steady or name not in SAMPLERS or (name == "prior") != is_steady:
            wanted = (
                "prior(task, a_observed, mask), as it is steady"
                if head.task.is_steady
                else "sample(.., by=) one of student, student_2, teacher, rival, as it evolves in time"
            )
            asked = f" by {by!r}" if by else ""
            raise ValueError(f"{task} was asked for samples{asked}; expected {wanted}. Ask for these.")
        if not is_count(members):
            raise ValueError(
                f"{task} was asked for {members} members; expected a whole number, at least 1. "
                "Ask for so many."
            )
        if evaluations is not None and (by is not None or not is_count(evaluations)):
            raise ValueError(
                f"{task} was asked for samples with evaluations={evaluations!r:.80} and "
                f"by={by!r}; expected a whole number, at least 1, or by. Give one of the two."
            )
        if self.folder is None:
            raise FileNotFoundError(
                f"an operator alone has no {by or 'errors to draw'}; expected a run's "
                "folder, such as runs/small, to draw from. Give ups.load that folder."
            )
        num_steps = 0
        if evaluations is not None:
            name, num_steps = best_within(self.folder, task, evaluations)
        elif by is None:
            name = default_sampler(self.folder, task)
        if name not in self._samplers:
            self._samplers[name] = load_sampler(self.folder, name, head.scale.device, self.operator)
        sampler = replace(self._samplers[name], num_steps=num_steps)
        if task not in sampler.network.names:
            raise ValueError(
                f"{self.folder} draws no samples of {task}; expected one of "
                f"{', '.join(sampler.network.names)}, for which it has learnt the operator's "
                f"errors. Set task.{task}.reserve and train again."
            )
        return sampler

    def _read(self, task: str, u0: Field, axes: tuple[str, ...]) -> tuple[Tensor, Callable[[Tensor], Field]]:
        """u0 as (batch, time, C, *space), floats, and what makes an answer (batch, *axes, C, *space) of its
        kind."""
        head = self.operator.head(task)
        codec, values, dt = head.input_codec, u0, head.description["dt"]
        is_labelled, batch = hasattr(u0, "dims"), []  # by xarray
        if is_labelled:
            values, batch = unlabel(u0, head.task, codec.fields, dt, axes)
        u = as_tensor(values, task)
        is_batch = (
            bool(batch)
            if is_labelled
            else (u.ndim == 3 + codec.ndim or (u.ndim == 2 + codec.ndim and head.history == 1))
        )
        if u.ndim == 2 + codec.ndim:
            u = u[:, None] if is_batch else u[None]
        elif u.ndim == 1 + codec.ndim and head.history == 1:
            u = u[None, None]

        def answer(u_pred: Tensor) -> Field:
            u_pred = u_pred if is_batch else u_pred[0]
            if is_labelled:
                return label(u_pred.cpu().numpy(), u0, head.task, batch, axes, dt)
            return u_pred if isinstance(u0, Tensor) else u_pred.cpu().numpy()

        return u, answer
