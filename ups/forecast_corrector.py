"""A learned correction of the user's own step, inside the user's own loop.

    correct = ups.corrector("runs/mine", step=coarse_step)
    for _ in range(num_frames):
        u = correct(u, dt)

    u_next = step(u) + change(u, step(u))

The change is what an operator over this step as its base adds (`base: {solver: ..}`, ups/models/operator.py).
Where a check fails, u_next is step(u), bit for bit.
"""

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

# RMS of a correction over that of the step's errors in training: at most 4 in examples/, 40 before a blow-up
MOST_JUMP = 10.0
KEPT = 1e-6  # a change of a mean by a step, relative to the RMS of the field, below which it is conserved
SAME = 1e-6  # relative, of time steps and parameters
# of one state, in the order in which they are named
CHECKS = {
    "finite": "the step or its correction is not finite",
    "range": "a value is outside of the training data's range and half as much on both sides",
    "jump": f"the correction is more than {MOST_JUMP:g} times the step's error in training",
    "conserved": "the correction changes a mean that the step conserves",
    "check": "your check refuses the corrected state",
}
NUM_COMPUTED = 4  # of these, the first ones, by `_compute`; then the user's own
OF_CALL = {
    "dt": "the time step is not the trained one",
    "parameters": "a parameter is outside of its trained range",
    "network": "validation found no correction that helps",
}


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
        if head.history != 1 or head.forcing_codec is not None or head.codec.valid is not None:
            raise ValueError(
                f"{head.name} has a history of {head.history}, forcing or a mask; expected one frame in, and "
                "neither of these. Use ups.load(.., solvers=..)."
            )
        self.operator, self.base, self.check = model.operator, head.base.use(step), check
        self.counts, self._has_warned = Counter(), False
        self._untold: dict[int, tuple[Tensor, ParameterBatch, bool]] = {}
        ends = (head.codec.denormalise(end.view(head.codec.channel_shape)) for end in (head.low, head.high))
        self.low, self.high = (end.double() for end in ends)

    def __call__(
        self, u: Field, dt: float | None = None, *, t: Any = None, parameters: Values = None
    ) -> Field:
        """The state one time step after u, in the kind of array that `step` returns; xarray for xarray.

        u: ([batch,] [channel,] *space) in physical units; NumPy, torch, JAX or a DataArray with the task's
        axes. `step` gets (batch, channel, *space), and by name what it accepts of dt, t, parameters (name ->
        (batch,)) and parameter (the first one). dt: default the trained one.
        """
        if hasattr(u, "dims"):  # xarray
            order = [name for name in ("channel", *self.head.task.axes) if name in u.dims]
            some = u.transpose(..., *order)
            later = self(some.values, dt, t=t, parameters=parameters)
            return some.copy(data=np.asarray(later)).transpose(*u.dims)
        batched, restore = self._batched(u)
        values, batch, is_trained = self._conditions(parameters, len(batched))
        theirs = self.theirs(batched, dt, t, values)
        self.counts["states"] += len(batched)
        applies = {
            "dt": dt is not None and not abs(dt - self.head.facts.dt) <= SAME * self.head.facts.dt,
            "parameters": not is_trained,
            "network": not self.head.is_network_used,
        }
        if why := next((name for name in OF_CALL if applies[name]), ""):
            return restore(self._returned(theirs, {why: len(batched)}))
        return restore(self.corrected(batched, theirs, batch))

    # ---- reading

    def _batched(self, u: Any) -> tuple[Any, Callable[[Any], Any]]:
        """(u as (batch, channel, *space), its inverse). Raises ValueError for another grid."""
        shape = tuple(getattr(u, "shape", ()))
        trained = (self.head.codec.num_channels, *self.head.codec.space)
        one = trained[1:] if trained[0] == 1 and shape[-len(trained) :] != trained else trained
        if shape[-len(one) :] != one or len(shape) > len(one) + 1 or 0 in shape:
            raise ValueError(
                f"{self.head.name} was given {type(u).__name__} of shape {shape}; expected {trained} "
                "or (batch, *these): it was trained on this grid. Pass such an array, or train on the other."
            )
        count = shape[0] if len(shape) > len(one) else 1
        return u.reshape(count, *trained), lambda found: found.reshape(shape)

    def _conditions(self, parameters: Values, count: int) -> tuple[Tensor, ParameterBatch, bool]:
        """(raw parameters (count, P), those of the network, whether all are in their trained ranges)."""
        if parameters is None and count in self._untold:
            return self._untold[count]
        values = check_parameters(self.head, parameters, count, extrapolate=True)
        spans = torch.tensor(list(self.head.facts.parameters.values()), dtype=values.dtype).view(-1, 2)
        low, high = (spans + SAME * spans.abs() * torch.tensor([-1.0, 1.0])).unbind(1)
        is_trained = bool(((values >= low) & (values <= high)).all())
        found = values, self.head.parameter_batch(values), is_trained
        if parameters is None:  # as in all calls of a loop
            self._untold[count] = found
        return found

    def theirs(self, u: Any, dt: float | None = None, t: Any = None, values: Tensor | None = None) -> Any:
        """What the user's step returns for u (batch, channel, *space) and raw parameters (batch, P)."""
        values = self._conditions(None, len(u))[0] if values is None else values
        columns = [column if isinstance(u, Tensor) else column.numpy() for column in values.unbind(1)]
        return self.base.called(
            u,
            f"the step of {self.head.name}",
            dt=self.head.facts.dt if dt is None else dt,
            t=t,
            parameters=dict(zip(self.head.facts.parameters, columns, strict=True)),
            parameter=float(values[0, 0]) if columns else None,
        )

    # ---- checks

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

    def corrected(self, u: Any, theirs: Any, parameters: ParameterBatch) -> Any:
        """`theirs` with the correction where all checks pass; u, theirs (batch, channel, *space)."""
        result = self._changed(*(as_tensor(one, self.head.name) for one in (u, theirs)), parameters)
        change, passed = result[:, :-NUM_COMPUTED].view(theirs.shape), result[:, -NUM_COMPUTED:]
        passed, answer = passed.detach().cpu().numpy() > 0, added(theirs, change)
        if self.check is not None:
            mine = np.asarray(self.check(u, theirs, answer))
            if mine.dtype.kind != "b" or mine.shape not in ((), (len(passed),)):
                raise ValueError(
                    f"the check of {self.head.name} gave {mine.dtype} of shape {mine.shape}; expected True "
                    f"or False, or {len(passed)} of them. Let it return these."
                )
            passed = np.column_stack([passed, np.broadcast_to(mine, len(passed))])
        if passed.all():
            return answer
        is_fine = passed.all(1)
        fails = Counter(tuple(CHECKS)[row.tolist().index(False)] for row in passed[~is_fine])
        if is_fine.any():  # x + -0.0 is x, also for -0.0
            column = torch.from_numpy(is_fine).to(change.device).view(-1, *[1] * (change.ndim - 1))
            theirs = added(theirs, torch.where(column, change, -0.0))
        return self._returned(theirs, fails)

    @plain_torch(keeps_gradient=True)
    def _changed(self, u: Tensor, theirs: Tensor, parameters: ParameterBatch) -> Tensor:
        """`_compute`, by a graph from its hundredth call on."""
        device = self.head.scale.device
        given = u.to(device, torch.float64), theirs.to(device, torch.float64)
        if self.head.facts.parameters:  # else the condition is constant, and folded in a graph
            given = *given, parameters.standard, parameters.index
        if device.type != "cpu" or has_gradient(given):
            return self._compute(self.operator, *given)
        traces, key = self.operator.traces, (self.head, "corrected", u.shape)
        if (graph := traces.graphs.get(key)) is not None:
            with torch.inference_mode():
                return graph(*given)
        with torch.no_grad():
            result, calls = self._compute(self.operator, *given), traces.calls[key]
            calls[0] += 1
            if calls[0] == NUM_FIRST_CALLS:
                others = [other for other in self.operator.heads.values() if other is not self.head]
                shared = {id(part): part for part in (*others, self.base)}
                function = self._compute
                traces.graphs[key] = traced(function, self.operator, shared, given, result, is_close)
        return result

    def _compute(self, operator: Operator, u: Tensor, theirs: Tensor, *given: Tensor) -> Tensor:
        """The correction of a step from u to theirs (batch, channel, *space), physical units, float64, and
        the checks that can be computed: (batch, cells of all channels + checks), 1 where a check passes.
        Where the step conserves the mean of a channel, the correction has none. given: of the parameters.
        """
        head, space = operator.heads[self.head.name], tuple(range(2, u.ndim))
        parameters = ParameterBatch(*given) if given else self._conditions(None, len(u))[1]
        codec, weight = head.codec, head.facts.network_weight
        low, high = self.low.to(u.device), self.high.to(u.device)
        inside = [field.clamp(low, high) for field in (u, theirs)]
        is_inside = ((inside[0] == u) & (inside[1] == theirs)).flatten(1).all(1)
        w, w_base = (codec.projected(codec.normalise(field).float())[:, None] for field in inside)
        later = operator.corrected(head, w, w_base, parameters, weight)[0]
        activity = head.base.activity(w, w_base).view(-1, *[1] * (u.ndim - 1))
        moved = activity * (later - w_base)[:, 0]
        change = moved.double() * codec.std.double().view(codec.channel_shape)
        positive = torch.tensor([name in codec.positive for name in codec.fields]).view(codec.channel_shape)
        change = torch.where(positive, theirs * change.expm1(), change) if codec.positive else change

        means, size = theirs.mean(space, keepdim=True), theirs.square().mean(space, keepdim=True).sqrt()
        is_kept = (means - u.mean(space, keepdim=True)).abs() <= KEPT * size
        excess = change.mean(space, keepdim=True)
        if codec.positive:  # by a factor, so that they stay positive
            excess = torch.where(positive, (theirs + change) * excess / (means + excess), excess)
        change = change - torch.where(is_kept, excess, 0.0)
        is_conserved = ((change.mean(space, keepdim=True).abs() <= KEPT * size) | ~is_kept).flatten(1).all(1)

        num_values = math.prod(codec.tokens) * codec.dim  # of latents, whose unit is `scale`
        jump = (moved.square().flatten(1).sum(1) / num_values).sqrt()
        is_small = jump <= MOST_JUMP * head.scale[parameters.index]
        is_finite = (u + theirs + change).isfinite().flatten(1).all(1)
        checks = torch.stack([is_finite, is_inside, is_small, is_conserved], 1)
        return torch.cat([change.flatten(1), checks.double()], 1)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results of `_compute` are equal but for the rounding of float32."""
    return bool((found - expected).abs().max() <= 1e-5 * expected[:, :-NUM_COMPUTED].abs().max())


def added(theirs: Any, change: Tensor) -> Any:
    """theirs + change, in the kind and type of theirs."""
    if isinstance(theirs, Tensor):
        return theirs + change.to(theirs.device, theirs.dtype)
    return theirs + change.cpu().numpy().astype(theirs.dtype)
