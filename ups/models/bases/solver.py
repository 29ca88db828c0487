"""The user's coarse solver as a base: the network learns its residual (correction, as in APEBench, arXiv
2411.00180)."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ups.common.device import refuse_gradient
from ups.common.graphs import refuse_recording
from ups.models.bases.base import Base, Fit, ParameterBatch, Samples

NUM_WINDOWS = 256  # of training, whose changes are measured
LEAST_SIZE = 0.1  # of a state in the loss, relative to the training data: smaller ones count no more
PASS = (
    "expected the function itself, as weights name no code to run. Pass it: ups.load(path, "
    "solvers={TASK: step}), or ups forecast --solver TASK=MODULE:FUNCTION."
)


class Solver(Base):
    """u_next = step(u) in physical units, by a function of the user (task.TASK.solver is MODULE:FUNCTION).

    step(u (batch, channel, *space)) returns u_next of that shape, one frame later: tensors if its module
    imports torch, else NumPy float64. Optional arguments are passed by name: dt; forcing, now and in the next
    frame (name -> (batch, 2, *space), for a series (batch, 2)); parameters (name -> (batch,)); or parameter,
    the first one as a number, with a call for the rows of each value. No gradient flows through NumPy. The
    weights store its name for messages alone: the function is passed on loading (`use`).
    """

    kind = "solver"
    is_user_solver = True

    def __init__(
        self,
        num_channels: int,
        solver: str,
        task: str,
        positive: Sequence[int],
        names: Sequence[str],
        dt: float,
        offsets: Sequence[float] = (),
        forcing: Sequence[str] = (),
        forcing_positive: Sequence[int] = (),
        forcing_offsets: Sequence[float] = (),
        series: Sequence[int] = (),
        **_: Any,
    ):
        super().__init__()
        self.step, self.dt, self.task, self.solver = None, dt, task, str(solver)
        self.positive, self.names = list(positive), list(names)
        self.offsets = list(offsets)  # of the stored fields; the solver gets the fields without offset
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("std", torch.ones(num_channels))
        self.register_buffer("least_change", torch.zeros(()))  # half of the smallest RMS of training
        self.forcing, self.series = list(forcing), list(series)
        self.forcing_positive, self.forcing_offsets = list(forcing_positive), list(forcing_offsets)
        if self.forcing:
            self.register_buffer("forcing_mean", torch.zeros(len(forcing)))
            self.register_buffer("forcing_std", torch.ones(len(forcing)))

    def use(self, step: Callable[..., Any]) -> Self:
        """Set the function."""
        self.step, self.accepts = step, set(inspect.signature(step).parameters)
        function = inspect.unwrap(step)
        while isinstance(function, functools.partial):
            function = function.func
        if not hasattr(function, "__globals__"):  # an object that can be called
            function = type(function).__call__
        self.is_torch = "torch" in getattr(function, "__globals__", {})
        return self

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        if self.step is None:
            raise ValueError(
                f"the base of {self.task} is a solver of the user's, {self.solver!r:.80}; {PASS}"
            )
        if not self.training:  # a network trains without the solver's gradient
            lost = [parameters.raw] if "parameter" in self.accepts or not self.is_torch else []
            lost += [] if self.is_torch else [u, parameters.forcing]
            refuse_gradient(self.task, f"its solver {self.solver!r:.80} is called with plain numbers", *lost)
        column = (-1, *[1] * (u.ndim - 3))
        w, mean, std = u[:, -1].float(), self.mean.view(column), self.std.view(column)
        physical = self._across(torch.exp, w * std + mean)
        if any(self.offsets):
            offset = torch.tensor(self.offsets, dtype=torch.float64, device=w.device).view(column)
            physical = self._next(physical.double() + offset, parameters) - offset
        else:
            physical = self._next(physical, parameters)
        return ((self._across(torch.log, physical) - mean) / std).to(w)

    def activity(self, u: Tensor, u_base: Tensor) -> Tensor:
        """Less than 1 where the solver changes the state by less than half of what any state of training
        changed: it errs where something moves, and a correction of the trained size would be larger than a
        decayed state."""
        change = (u_base[:, 0] - u[:, -1]).flatten(1).square().mean(1).clamp_min(1e-20).sqrt()
        return (change / self.least_change.clamp_min(1e-10)).clamp_max(1.0)

    def size(self, u: Tensor) -> Tensor:
        """What the errors of a step from u (batch, frames, C, *space) are relative to in training, (batch,):
        the RMS of the last frame, so that a small or decayed state counts as much as a large one."""
        return u[:, -1].detach().flatten(1).square().mean(1).sqrt().clamp_min(LEAST_SIZE)

    def _across(self, function: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
        """u with `function` applied to the channels that are normalised by their logarithms."""
        if not self.positive:
            return u
        parts = enumerate(u.unbind(1))
        return torch.stack([function(part) if i in self.positive else part for i, part in parts], 1)

    def _forcing(self, parameters: ParameterBatch) -> dict[str, Tensor]:
        """The forcing by name, in physical units, now and in the next frame."""
        forcing = {}
        for channel, name in enumerate(self.forcing):
            f = parameters.forcing[:, :2, channel].double()
            f = f * self.forcing_std[channel] + self.forcing_mean[channel]
            f = (f.exp() if channel in self.forcing_positive else f) + self.forcing_offsets[channel]
            forcing[name] = f.flatten(2)[..., 0] if channel in self.series else f
        return forcing

    def _next(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        raw, forcing = parameters.raw, self._forcing(parameters)
        if "parameter" not in self.accepts or raw is None or not raw.shape[1]:
            return self._call(u, raw, forcing)
        out = torch.empty_like(u)
        for value in raw[:, 0].unique():
            rows = raw[:, 0] == value
            out[rows] = self._call(
                u[rows], raw[rows], {name: f[rows] for name, f in forcing.items()}, parameter=float(value)
            )
        return out

    def _call(self, u: Tensor, raw: Tensor | None, forcing: dict[str, Tensor], **more: Any) -> Tensor:
        refuse_recording(f"the solver {self.solver!r:.80} may compute something else in every call")
        values = u if self.is_torch else u.detach().cpu().numpy().astype(np.float64)
        columns = {} if raw is None else dict(zip(self.names, raw.unbind(1), strict=False))
        named = {"parameters": columns, "forcing": {name: f.to(u) for name, f in forcing.items()}}
        if not self.is_torch:
            named = {
                key: {name: one.cpu().numpy() for name, one in some.items()}
                for key, some in (("parameters", columns), ("forcing", forcing))
            }
        found = self.called(values, self.solver, **{"dt": self.dt, "parameter": None} | named | more)
        return found.to(u) if self.is_torch else torch.from_numpy(np.ascontiguousarray(found)).to(u)

    def called(self, u: Any, name: str, **offered: Any) -> Any:
        """The function's result for u in its own kind of array, with what it accepts of `offered`. Raises
        ValueError for a result of another shape or no floats. The function may write into its argument."""
        own = u.copy() if isinstance(u, np.ndarray) else u.clone() if isinstance(u, Tensor) else u
        found = self.step(own, **{key: value for key, value in offered.items() if key in self.accepts})
        kind = str(getattr(found, "dtype", type(found).__name__))
        if tuple(getattr(found, "shape", ())) != tuple(u.shape) or "float" not in kind:
            raise ValueError(
                f"{name} gave {getattr(found, 'shape', 'no array:')} {kind} for a field of shape "
                f"{tuple(u.shape)}; expected floats of that shape. Let it return (batch, channel, *space)."
            )
        return found

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit[Self]:
        """Yield the solver with the units of the codec; only its `least_change` is measured."""
        from ups.common.user_solver import load_step

        cache, codec = samples.cache, samples.head.codec
        named = {
            **settings,
            "solver": cache.settings.solver,
            "task": cache.task.name,
            "dt": cache.dt,
            "names": [] if cache.task.hides else list(cache.task.parameters),
            "offsets": [cache.task.offsets.get(name, 0.0) for name in codec.fields],
            "positive": [codec.fields.index(name) for name in codec.positive],
        }
        if cache.task.forcing:
            forcing = samples.head.forcing_codec
            named |= {
                "forcing": list(forcing.fields),
                "forcing_positive": [forcing.fields.index(name) for name in forcing.positive],
                "forcing_offsets": [cache.task.offsets.get(name, 0.0) for name in forcing.fields],
            }
        base = cls(**named).use(load_step(named["solver"], named["task"])).to(samples.device)
        base.mean.copy_(codec.mean)
        base.std.copy_(codec.std)
        windows = (read() for read in samples.batches(NUM_WINDOWS, NUM_WINDOWS))
        changes = [(u_next - u[:, -1]).flatten(1).square().mean(1).sqrt().amin() for u, _, u_next in windows]
        base.least_change.copy_(0.5 * torch.stack(changes).amin())
        if base.forcing:
            base.forcing_mean.copy_(forcing.mean)
            base.forcing_std.copy_(forcing.std)
        yield f"solver {named['solver']}", named, base
