"""A learned correction of the user's own step, inside the user's own loop.

    correct = ups.corrector("runs/mine", step=coarse_step)
    for _ in range(num_frames):
        u = correct(u, dt)

    u_next = step(u) + change(u, step(u))

The change is what an operator over this step as its base adds (`base: {solver: ..}`, ups/models/operator.py).
Where a check fails, u_next is step(u), bit for bit.
"""

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.common.device import has_gradient, plain_torch
from ups.forecast_inputs import Values, check_parameters
from ups.forecast_xarray import Field, as_tensor
from ups.forecaster import Forecaster
from ups.models.bases.base import ParameterBatch
from ups.models.operator import Operator
from ups.models.rollout import NUM_FIRST_CALLS, traced

# The RMS of a correction over that of the step's errors in training. In the runs of bench/corrector.py the
# largest was 4, and 40 in states that then blew up.
MOST_JUMP = 10.0
KEPT = 1e-6  # a change of a mean by a step, relative to the RMS of the field, below which it is conserved
SAME_DT = 1e-6  # relative
# of one state, in the order in which they are named
CHECKS = {
    "finite": "the step or its correction is not finite",
    "range": "a value is outside of the training data's range and half as much on both sides",
    "jump": f"the correction is more than {MOST_JUMP:g} times the step's error in training",
    "conserved": "the correction changes a mean that the step conserves",
    "check": "your check refuses the corrected state",
}
NUM_COMPUTED = 4  # of these, the first ones, by `changed`; then the user's own
OF_CALL = {
    "dt": "the time step is not the trained one",
    "parameters": "a parameter is outside of its trained range",
    "network": "validation found no correction that helps",
}


class Everywhere(dict):
    """The same function for every task."""

    def __contains__(self, task: object) -> bool:
        return True

    def __missing__(self, task: str) -> Any:
        return self[""]


class StepCorrector:
    """u_next = correct(u, dt, t=.., parameters=..). See `ups.corrector`.

    counts: number of states ("states"), of those that were returned as `step` gave them, and why
    (CHECKS and OF_CALL).
    """

    def __init__(
        self,
        model: Forecaster,
        step: Callable[..., Any],
        task: str | None = None,
        check: Callable[[Any, Any, Any], Any] | None = None,
    ):
        heads = {head.name: head for head in model.operator.heads.values() if head.base.is_user_solver}
        if task not in heads and not (task is None and len(heads) == 1):
            raise ValueError(
                f"the task is {task!r:.80}; expected one whose base is a solver of yours: "
                f"{', '.join(heads) or 'this run has none'}. Name it: ups.corrector(.., task=..)."
            )
        self.head = head = heads[task] if task else next(iter(heads.values()))
        if (
            (head.history, head.bundle) != (1, 1)
            or head.forcing_codec is not None
            or head.codec.valid is not None
        ):
            raise ValueError(
                f"{head.name} has a history of {head.history}, a bundle of {head.bundle}, forcing or a mask; "
                "expected one frame in, one out, and neither of these. Use ups.load(.., solvers=..)."
            )
        self.operator, self.step, self.check = model.operator, step, check
        self.accepts = set(inspect.signature(step).parameters)
        self.counts, self._has_warned = Counter(), False
        self._calls: Counter = Counter()
        self._graphs: dict[tuple, Callable[..., Tensor] | None] = {}
        ends = (head.codec.denormalise(end.view(head.codec.channel_shape)) for end in (head.low, head.high))
        self.low, self.high = (end.double().cpu() for end in ends)

    def __call__(
        self, u: Field, dt: float | None = None, *, t: Any = None, parameters: Values = None
    ) -> Field:
        """The state one time step after u, in the kind of array that `step` returns; xarray for xarray.

        u: ([batch,] [channel,] *space) in physical units; NumPy, torch, JAX or a DataArray with the task's
        axes. `step` gets (batch, channel, *space), and by name what it accepts of dt, t, parameters (name ->
        (batch,)) and parameter (the first one). dt: default the trained one.
        """
        if hasattr(u, "dims"):
            return self._labelled(u, dt, t, parameters)
        batched, restore = self._batched(u)
        values = check_parameters(self.head, parameters, len(batched), extrapolate=True)
        theirs = self.theirs(batched, dt, t, values)
        if tuple(getattr(theirs, "shape", ())) != tuple(batched.shape):
            raise ValueError(
                f"the step of {self.head.name} gave {getattr(theirs, 'shape', type(theirs).__name__)} for a "
                f"state of shape {tuple(batched.shape)}; expected that shape. Let it return (batch, channel, "
                "*space)."
            )
        self.counts["states"] += len(batched)
        if why := self._refused(dt, values):
            return restore(self._returned(theirs, {why: len(batched)}))
        return restore(self._corrected(batched, theirs, values))

    # ---- reading

    def _labelled(self, u: Any, dt: float | None, t: Any, parameters: Values) -> Any:
        order = [name for name in ("channel", *self.head.task.axes) if name in u.dims]
        some = u.transpose(..., *order)
        later = self(some.values, dt, t=t, parameters=parameters)
        return some.copy(data=np.asarray(later)).transpose(*u.dims)

    def _batched(self, u: Any) -> tuple[Any, Callable[[Any], Any]]:
        """(u as (batch, channel, *space), its inverse). Raises ValueError for another grid."""
        task, shape, channels = self.head.task, tuple(u.shape), self.head.codec.num_channels
        trained = (channels, *self.head.codec.space)
        if shape == trained:
            return u[None], lambda found: found[0]
        if channels == 1 and shape == trained[1:]:
            return u[None, None], lambda found: found[0, 0]
        if channels == 1 and shape[1:] == trained[1:]:
            return u[:, None], lambda found: found[:, 0]
        if shape[1:] != trained:
            raise ValueError(
                f"{task.name} was given a state of shape {shape}; expected {trained}, or (batch, *these): it "
                "was trained on this grid. Pass such a state, or train on the other grid."
            )
        return u, lambda found: found

    def theirs(self, u: Any, dt: float | None = None, t: Any = None, values: Tensor | None = None) -> Any:
        """What the user's step returns for u (batch, channel, *space) and raw parameters (batch, P)."""
        values = check_parameters(self.head, None, len(u), extrapolate=True) if values is None else values
        names, columns = self.head.facts.parameters, values.unbind(1)
        columns = [column if isinstance(u, Tensor) else column.numpy() for column in columns]
        offered = {"dt": self.head.facts.dt if dt is None else dt, "t": t} | {
            "parameters": dict(zip(names, columns, strict=True)),
            "parameter": float(values[0, 0]) if names else None,
        }
        return self.step(u, **{name: value for name, value in offered.items() if name in self.accepts})

    # ---- checks

    def _refused(self, dt: float | None, values: Tensor) -> str:
        """The first of OF_CALL that applies; "" if none does."""
        facts = self.head.facts
        if dt is not None and abs(dt - facts.dt) > SAME_DT * facts.dt:
            return "dt"
        spans = torch.tensor(list(facts.parameters.values()), dtype=values.dtype).view(-1, 2)
        slack = SAME_DT * spans.abs()
        if not bool(((values >= spans[:, 0] - slack[:, 0]) & (values <= spans[:, 1] + slack[:, 1])).all()):
            return "parameters"
        return "" if self.head.is_network_used else "network"

    def _returned(self, theirs: Any, reasons: dict[str, int]) -> Any:
        """theirs, with a warning the first time."""
        self.counts.update(reasons)
        if not self._has_warned:
            self._has_warned = True
            said = "; ".join((CHECKS | OF_CALL)[name] for name in reasons)
            warnings.warn(
                f"{self.head.name}: a state is returned as your step gave it, without correction: {said}. "
                "This is said once; `counts` of the corrector counts all.",
                stacklevel=4,
            )
        return theirs

    # ---- the correction

    def _corrected(self, u: Any, theirs: Any, values: Tensor) -> Any:
        kept, found = (as_tensor(field, self.head.name) for field in (u, theirs))
        result = self._changed(kept, found, values)
        num = NUM_COMPUTED
        change, passed = result[:, :-num].view(found.shape), result[:, -num:] > 0
        answer = added(theirs, change)
        passed = torch.cat([passed.cpu(), self._checked(u, theirs, answer, len(kept))], 1)
        if bool(passed.all()):
            return answer
        is_fine = passed.all(1)
        fails = Counter(tuple(CHECKS)[row.tolist().index(False)] for row in passed[~is_fine])
        if bool(is_fine.any()):  # x + -0.0 is x, also for -0.0
            column = is_fine.to(change.device).view(-1, *[1] * (change.ndim - 1))
            return self._returned(added(theirs, torch.where(column, change, -0.0)), fails)
        return self._returned(theirs, fails)

    def _checked(self, u: Any, theirs: Any, answer: Any, count: int) -> Tensor:
        """Whether the user's check passes, by state."""
        passes = True if self.check is None else np.asarray(self.check(u, theirs, answer))
        return torch.as_tensor(passes, dtype=torch.bool).expand(count)[:, None]

    @plain_torch(keeps_gradient=True)
    def _changed(self, u: Tensor, theirs: Tensor, values: Tensor) -> Tensor:
        """`changed`, by a graph from its hundredth call on."""
        batch, device = self.head.parameter_batch(values), self.head.scale.device
        given = u.to(device, torch.float64), theirs.to(device, torch.float64), batch.standard, batch.index
        if self.head.scale.device.type != "cpu" or has_gradient(*given):
            return self._function(self.operator, *given)
        key = tuple(one.shape for one in given)
        if (graph := self._graphs.get(key)) is not None:
            with torch.inference_mode():
                return graph(*given)
        with torch.no_grad():
            result = self._function(self.operator, *given)
            self._calls[key] += 1
            if self._calls[key] == NUM_FIRST_CALLS and bool(result.isfinite().all()):
                others = {id(head): head for head in self.operator.heads.values() if head is not self.head}
                shared = others | {id(self.head.base): self.head.base}
                self._graphs[key] = traced(self._function, self.operator, shared, given, result, is_close)
        return result

    def _function(
        self, operator: Operator, u: Tensor, theirs: Tensor, standard: Tensor, index: Tensor
    ) -> Tensor:
        batch = ParameterBatch(standard, index)
        return changed(operator, self.head.name, u, theirs, batch, self.low, self.high)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results of `changed` are equal but for the rounding of float32."""
    return bool((found - expected).abs().max() <= 1e-5 * expected[:, :-NUM_COMPUTED].abs().max())


def added(theirs: Any, change: Tensor) -> Any:
    """theirs + change, in the kind and type of theirs."""
    if isinstance(theirs, Tensor):
        return theirs + change.to(theirs.device, theirs.dtype)
    return theirs + change.cpu().numpy().astype(theirs.dtype)


def changed(
    operator: Operator,
    task: str,
    u: Tensor,
    theirs: Tensor,
    parameters: ParameterBatch,
    low: Tensor,
    high: Tensor,
) -> Tensor:
    """The correction of a step from u to theirs (batch, channel, *space), physical units, float64, and the
    checks that can be computed: (batch, cells of all channels + checks), a check is 1 where it passes.

    Where the step conserves the mean of a channel, the correction has none. low, high: of the channels.
    """
    head, space = operator.heads[task], tuple(range(2, u.ndim))
    codec, weight = head.codec, head.facts.component_weights["full"]
    low, high = low.to(u.device), high.to(u.device)
    is_inside = ((u >= low) & (u <= high) & (theirs >= low) & (theirs <= high)).flatten(1).all(1)
    w, w_base = (
        codec.projected(codec.normalise(field.clamp(low, high)).float())[:, None] for field in (u, theirs)
    )
    later = operator.corrected(head, w, w_base, parameters, weight)[0]
    moved = (later - w_base)[:, 0]
    change = moved.double() * codec.std.double().view(codec.channel_shape)
    positive = torch.tensor([name in codec.positive for name in codec.fields]).view(codec.channel_shape)
    change = torch.where(positive, theirs * change.expm1(), change) if codec.positive else change

    means, size = theirs.mean(space, keepdim=True), theirs.square().mean(space, keepdim=True).sqrt()
    is_kept = (means - u.mean(space, keepdim=True)).abs() <= KEPT * size
    excess = change.mean(space, keepdim=True)
    if codec.positive:  # by a factor, so that they stay positive
        even = torch.where(positive, (theirs + change) * excess / (means + excess), excess)
    else:
        even = excess
    change = change - torch.where(is_kept, even, 0.0)
    is_conserved = ((change.mean(space, keepdim=True).abs() <= KEPT * size) | ~is_kept).flatten(1).all(1)

    num_values = math.prod(codec.tokens) * codec.dim  # of latents, whose unit is `scale`
    jump = (moved.square().flatten(1).sum(1) / num_values).sqrt()
    is_small = jump <= MOST_JUMP * head.scale[parameters.index]
    is_finite = (theirs.isfinite() & change.isfinite() & u.isfinite()).flatten(1).all(1)
    checks = torch.stack([is_finite, is_inside, is_small, is_conserved], 1)
    return torch.cat([change.flatten(1), checks.double()], 1)
