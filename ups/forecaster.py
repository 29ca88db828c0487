"""A trained model with physical fields as input and output.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)
    members = model.sample("burgers1d_forced", u0, num_frames=10, members=16)
    draws = model.prior("darcy2d_grf", a_observed, mask, members=16)

Fields are (batch, time, channel, *space), NumPy, torch or xarray; the result has the same kind, in float32 or
float64. xarray is read by names (`ups.forecast_xarray`). Arrays may lack the batch axis, then the result has
none, and the time axis, then the field is one frame (enough for a history of 1 and for steady tasks). If both
readings fit, the axis is time for a history above 1, else batch. All facts about a task are stored with the
weights (`Forecaster.tasks`); what was not trained is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.common.device import has_gradient, plain_torch, refuse_gradient
from ups.common.place import HUB, make_target
from ups.forecast_inputs import Values, check_random, encoded, finished, read_forcing, start
from ups.forecast_xarray import Field, as_tensor, label, unlabel
from ups.models.facts import is_count
from ups.models.operator import Operator, load_operator
from ups.models.rollout import name_starts
from ups.tasks import in_unit
from ups.training.artifact import stage_of_run

if TYPE_CHECKING:  # a forecast needs none of them: methods import what they use
    from ups.forecast_band import BandedForecast
    from ups.generative.sampling import Sampler
    from ups_discovery.statement import FoundEquation


class Forecaster:
    """An operator and, if it is part of a run, the networks that sample its errors.

    tasks: TASK -> facts: fields, inputs, given (coefficient fields, constant in time), forcing (inputs that
    vary in time), axes, grid, domain, boundary, dt, history, units (of fields, axes and "time", if known),
    and the range of every trained parameter.
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
                "domain": list(head.facts.domain),
                "boundary": head.facts.boundary,
                "dt": head.facts.dt,
                "history": head.history,
                "units": dict(head.task.units),
                "parameters": {name: tuple(span) for name, span in head.facts.parameters.items()},
            }
            for head in operator.heads.values()
        }

    @classmethod
    @plain_torch()
    def load(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        solvers: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None = None,
    ) -> "Forecaster":
        """As `ups.load`."""
        if not isinstance(folder, str | PathLike):
            raise TypeError(
                f"the folder is {folder!r:.80}; expected the path of a run, such as 'runs/small'. Pass one."
            )
        if str(folder).startswith(HUB):
            from ups.hub import fetch

            folder = fetch(str(folder))
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ValueError(
                f"the device is {device!r:.40}, which torch cannot use here "
                f"({str(error).partition('. ')[0]:.90}); expected such as 'cpu'. Name another."
            ) from error
        folder = Path(folder)
        inside = folder / "operator"
        if not folder.is_dir():
            raise FileNotFoundError(
                f"there is no folder {folder}; expected a run, such as runs/small, or "
                f"its operator's folder. Run {make_target('operator RUN=' + (folder.name or 'small'))}."
            )
        if inside.is_dir():
            stage_of_run(folder, "operator")
        with torch.random.fork_rng([]):  # layers draw weights, which those of the file then replace
            operator = load_operator(inside if inside.is_dir() else folder, device, solvers)
        named = [head.name for head in operator.heads.values() if head.base.is_user_solver]
        if solvers and not {*(solvers if isinstance(solvers, Mapping) else named or [""])} <= {*named}:
            raise ValueError(
                f"the solver passed is {solvers!r:.80}; expected step(u), or TASK -> step(u), of the tasks "
                f"whose base calls one: {', '.join(named) or 'none of these weights'}. Pass those alone."
            )
        return cls(operator, folder if inside.is_dir() else folder.parent)

    def __repr__(self) -> str:
        lines = [
            f"Forecaster({self.folder or 'an operator'}, "
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

    @plain_torch(keeps_gradient=True)
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
        error: bool = False,
    ) -> "Field | BandedForecast":
        """The `num_frames` frames (batch, num_frames, C, *space) that follow u0, physical units.

        u0: (batch, time, C, *space), physical units, channels in the order of the task's fields; the last
        `history` frames are used, of noisy data more. For a steady task the coefficient, and one frame.
        parameters: by name, {"Nu": 0.01}, or raw values (batch, P) or (P,) in the task's order. Names with a
        single value in training are optional.
        forcing: by name, from the last frame of u0 to the last predicted one (shapes: `read_forcing`).
        dt: time between frames; checked against the trained one.
        resample: interpolate a field on another grid to the trained one, and the forecast back; warns how
        much of the field is lost (`ups_discovery.spectral.interpolation`).
        extrapolate: allow parameters, forcing and starts outside the trained range.
        error: return it with a band around it and a verdict (`ups.forecast_band.BandedForecast`).
        The forecast keeps the gradient of u0, parameters and forcing where they are tensors; steps between
        are computed again for it (`ups.models.rollout.in_segments`).

        Raises ValueError, by name, for anything that was not trained. Warns if the forecast is not finite,
        leaves the range of the training data or is longer than the evaluated horizon.
        """
        head, (u, restore) = self.operator.head(task), self._read(task, u0, ("time",), parameters, forcing)
        w, values = start(
            head, u, parameters, num_frames, dt=dt, resample=resample, extrapolate=extrapolate, error=error
        )
        num_frames = int(num_frames)  # NumPy's integers overflow
        f = read_forcing(head, forcing, u0, u, num_frames, extrapolate)
        w_pred = self.operator.forecast(w, task, values, num_frames, forcing=f)
        if error:
            from ups.forecast_band import banded
            from ups.models.band import differences

            w_pred = w_pred.detach()
            difference = differences(self.operator, task, w, values, w_pred, head.facts.network_weight, f)
            return banded(head, values, w_pred, difference, u, restore)
        return restore(finished(head, head.codec.denormalise(w_pred), u))

    @plain_torch(keeps_gradient=True)
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
        noise: str = "state",
        observations: Mapping[str, Any] | None = None,
        dt: float | None = None,
        resample: bool = False,
        extrapolate: bool = False,
    ) -> Field:
        """Ensemble members (batch, members, num_frames, C, *space) that follow u0, physical units: a sampled
        residual is added to each step of the operator. If noise of measurement explains its errors, members
        differ in their start alone (without `by`), which needs no stage after the operator.

        u0: as in `forecast`; with one frame more than the history, residuals are also conditioned on the
        operator's last error, as in training and in the report.
        by: "student" (one network evaluation per step), "student_2" (two), "teacher" (the diffusion),
        "scoring" (one, by a network trained by scores) or "waves" (none: Gaussian waves in closed form).
        evaluations: per step, instead of `by`: the best sampler within this budget; from 4 on the teacher's,
        with at most as many steps as in training (`ups.generative.validation.best_within`). Without both, the
        cheapest of those with at most two evaluations whose validation score is close to the best.
        seed, rows, noise: members are a function of seed, row number (default: position in the batch) and
        start; equal calls return equal members. With noise="state" the noise depends on the last frame of u0,
        so that a forecast from the last frame of a member has new noise. With noise="row" it does not (common
        random numbers): a start changed by 1e-7 has nearly the same members, and a forecast that continues
        another one needs another seed.

        observations: measurements of the state in some frames, {"frames": [2, 5] (1 is the first after u0),
        "values": (batch, frames, C, *trained grid), "mask": .., "noise": ..}, physical units; mask (default:
        all) and noise, a standard deviation above 0, broadcast to values. Members are then conditional on all
        of them, before and after a frame, by an ensemble Kalman smoother (ups/generative/filtering.py).

        Other arguments, errors and warnings as in `forecast`; the horizon is that of validated ensembles.
        Raises FileNotFoundError, with the make target, if the run has no such stage.
        """
        from ups.generative.sampling import Starts, sample_states

        sampler = self._sampler(task, by, members, is_steady=False, evaluations=evaluations)
        head = self.operator.head(task)
        u, restore = self._read(task, u0, ("member", "time"), parameters, forcing)
        w, values = start(
            head,
            u,
            parameters,
            num_frames,
            members=members,
            dt=dt,
            resample=resample,
            extrapolate=extrapolate,
        )
        check_random(task, seed, rows, len(u), noise)
        names = [int(row) for row in (range(len(u)) if rows is None else rows)]
        names = name_starts(names, u[:, -1]) if noise == "state" else names
        num_frames, members = int(num_frames), int(members)
        forcing = read_forcing(head, forcing, u0, u, num_frames, extrapolate)
        starts = Starts(encoded(head.codec, w), values, names, forcing)
        if observations is None:
            z_pred = sample_states(self.operator, sampler, task, starts, num_frames, members, seed)
        else:
            from ups.forecast_measured import read_observations
            from ups.generative.filtering import sample_filtered

            why = "members given observations have none (those of a free forecast have)"
            refuse_gradient(task, why, u0, parameters, forcing, observations)
            given = read_observations(head, observations, len(u), num_frames)
            z_pred = sample_filtered(self.operator, sampler, task, starts, num_frames, members, seed, *given)
        validated = sampler and sampler.network.heads[task].facts.horizon
        return restore(finished(head, head.physical(z_pred), u, validated))

    @plain_torch(keeps_gradient=True)
    def prior(
        self,
        task: str,
        a_observed: Field | None,
        mask: Any = None,
        members: int = 16,
        *,
        noise: Any = 0.0,
        blocks: int = 1,
        u: Mapping[str, Any] | None = None,
        parameters: Values = None,
        seed: int = 0,
        extrapolate: bool = False,
    ) -> Field:
        """Solutions (batch, members, C, *space) of a steady task, sampled conditional on part of its
        coefficient, physical units.

        a_observed: the coefficient (batch, C, *space), any values (also NaN) where it is not observed; None:
        observed nowhere.
        mask: ([batch,] *space), 1 where the coefficient is observed, else 0; None: everywhere. This and an
        array of noise have labels if a_observed has them.
        noise: standard deviation of the errors of a_observed, physical units: a number, or an array that
        broadcasts to it, in which 0 is exact.
        blocks: a_observed holds the means over blocks of so many cells per axis, and has as many fewer cells.
        u: the solution at some cells, {"values": (batch, C, *space), "mask": .., "noise": ..}, the last two
        of a shape that broadcasts. noise, above 0, includes the error of the operator.
        seed, parameters, extrapolate, errors: as in `sample`.

        With noise, blocks or u the coefficient is sampled by ups/generative/inversion.py.
        """
        from ups.forecast_measured import beside, coefficient, read_values, unmeasured
        from ups.generative.observation import observe_cells
        from ups.generative.sampling import sample_solutions

        why = "the solutions of a prior have none (a forecast has)"
        refuse_gradient(task, why, a_observed, mask, noise, u, parameters)
        sampler, head = self._sampler(task, "prior", members, is_steady=True), self.operator.head(task)
        is_exact = u is None and blocks == 1 and isinstance(noise, Real) and noise == 0
        if not is_exact:
            from ups.generative.inversion import sample_measured
        if a_observed is None:
            a_observed, mask = unmeasured(head, u), torch.zeros(head.input_codec.space)
        mask, noise = (beside(head, a_observed, *one) for one in ((mask, "mask"), (noise, "noise")))
        a, restore = self._read(task, a_observed, ("member",))
        codec, space = head.input_codec, a.shape[3:]
        observed = as_tensor(torch.ones(space) if mask is None else mask, f"{task}'s mask")
        observed = observed.isfinite() & (observed != 0)
        if observed.shape not in (space, (1, *space), (len(a), *space)):
            raise ValueError(
                f"{task} was given a field of shape {tuple(a.shape)} and a mask of shape "
                f"{tuple(observed.shape)}; expected (batch, 1, C, *space) with {codec.ndim} axes of space, "
                "and ([batch,] *space). Pass 1 where the coefficient is observed, else 0."
            )
        observed = observed.expand(len(a), *space)[:, None]
        check_random(task, seed, None, len(a))
        if not is_exact:
            measured = coefficient(head, a, observed, noise, blocks)
            solution = None if u is None else read_values(head, "u", u, (len(a),))
            a = head.task.absolute(measured.values, codec.fields)[:, None].to(a)
            observed = measured.is_exact
        mean = codec.denormalise(torch.zeros(codec.num_channels, *[1] * codec.ndim, device=codec.mean.device))
        a = torch.where(observed[:, None], a, head.task.absolute(mean, codec.fields).to(a))
        w, values = start(head, a, parameters, 1, members=members, extrapolate=extrapolate)
        if is_exact:
            counted = head.task.counted(a[:, 0], codec.fields)
            observation = observe_cells(codec.normalise(counted.to(w)), observed.to(w))
            draws = sample_solutions(self.operator, sampler, task, observation, values, int(members), seed)
        else:
            draws = sample_measured(
                self.operator, sampler, task, measured, solution, values, int(members), seed
            )
        return restore(finished(head, draws, a))

    def vjp(self, task: str, *given: Any, **options: Any) -> tuple[Field, Callable[..., dict[str, Field]]]:
        """(the forecast, pull): pull(v) is the derivative of sum(v * forecast) by name: "u0" (NumPy or
        torch), the parameters and the forcing. Arguments, errors and warnings as in `forecast`."""
        from ups.forecast_derivatives import vjp

        return vjp(self.forecast, self.operator.head(task), *given, **options)

    def jvp(self, task: str, *given: Any, along: Mapping[str, Any], **options: Any) -> tuple[Field, Field]:
        """(the forecast, its derivative along changes by name), in forward mode: names as in `vjp`."""
        from ups.forecast_derivatives import jvp

        return jvp(self.forecast, self.operator.head(task), *given, along=along, **options)

    @plain_torch()
    def equation(self, task: str, value: int = 0) -> "FoundEquation":
        """The equation that was found for a task, at the parameter value of this number."""
        from ups.models.found_equation import found_equation

        return found_equation(self.operator.head(task), value)

    def _sampler(
        self, task: str, by: str | None, members: int, is_steady: bool, evaluations: int | None = None
    ) -> "Sampler | None":
        """The sampler, loaded once; None for noisy starts. Raises as `sample` if the run has none."""
        from ups.generative.sampling import SAMPLERS, load_sampler
        from ups.generative.validation import DEFAULT, best_within, default_sampler

        head = self.operator.head(task)
        names = {"teacher": "corrector", "student": "student_1", None: DEFAULT}
        name = names.get(by, by) if isinstance(by, str | None) else ""
        if head.task.is_steady != is_steady or name not in SAMPLERS or (name == "prior") != is_steady:
            wanted = (
                "prior(task, a_observed, mask), as it is steady"
                if head.task.is_steady
                else "sample(.., by=) one of student, student_2, teacher, scoring, waves: it evolves in time"
            )
            by_whom = f" by {by!r}" if by else ""
            raise ValueError(f"{task} has no samples{by_whom}; expected {wanted}. Call that.")
        if not is_count(members):
            raise ValueError(
                f"members is {members}; expected a whole number, at least 1, for {task}. Pass such a number."
            )
        if evaluations is not None and (by is not None or not is_count(evaluations)):
            raise ValueError(
                f"{task} has evaluations={evaluations!r:.80} and by={by!r}; expected a whole number, at "
                "least 1, or by. Pass one of the two."
            )
        if head.is_deterministic and by is None and evaluations is None:
            return None
        if self.folder is None:
            raise FileNotFoundError(
                f"an operator alone has no {by or 'sampler'}; expected a run's "
                "folder, such as runs/small. Pass that folder to ups.load."
            )
        num_steps = 0
        if evaluations is not None:
            name, num_steps = best_within(self.folder, task, evaluations)
        elif by is None:
            name = default_sampler(self.folder, task)
        if name not in self._samplers:
            with torch.random.fork_rng([]):
                self._samplers[name] = load_sampler(self.folder, name, head.scale.device, self.operator)
        sampler = replace(self._samplers[name], num_steps=num_steps)
        if task not in sampler.network.names:
            raise ValueError(
                f"{self.folder} has no samples of {task}; expected one of "
                f"{', '.join(sampler.network.names)}, whose residuals it has learnt. Set "
                f"task.{task}.reserve and train again."
            )
        return sampler

    def _read(
        self, task: str, u0: Field, axes: tuple[str, ...], *given: Any
    ) -> tuple[Tensor, Callable[[Tensor], Field]]:
        """u0 as (batch, time, C, *space), floats, and a function that turns (batch, *axes, C, *space) into
        the same kind of field, which loses a gradient of what is given beside a start that is no tensor."""
        if not isinstance(u0, Tensor) and has_gradient(u0, given):
            why = "a forecast is no tensor if its start is none (torch.as_tensor(u0) is one)"
            refuse_gradient(task, why, u0, given)
        head = self.operator.head(task)
        codec, values, dt = head.input_codec, u0, head.facts.dt
        is_labelled, batch = hasattr(u0, "dims"), []  # xarray
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

        def restore(u_pred: Tensor) -> Field:
            u_pred = u_pred if is_batch else u_pred[0]
            if is_labelled:
                return label(u_pred.cpu().numpy(), u0, head.task, batch, axes, dt)
            return u_pred if isinstance(u0, Tensor) else u_pred.cpu().numpy()

        return u, restore
