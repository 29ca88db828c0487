"""The head of a task: what it adds to the shared network, and the facts about its data stored with the
weights.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ups.common.device import refuse_gradient, send
from ups.common.progress import beat
from ups.data.tokenizer import Tokenizer
from ups.models.backbones.layers import zero_linear
from ups.models.bases import build_base
from ups.models.bases.base import ParameterBatch
from ups.models.constraints import Bounds, WaveBounds, constraints_of
from ups.models.facts import (
    AGAIN,
    CODEC,
    HeadFacts,
    empty_tokenizer,
    plain,
    require_base,
    require_codec,
    require_forcing,
    require_kinds,
)
from ups.tasks import described_task
from ups_discovery.boundary import BOUNDARIES, along

if TYPE_CHECKING:  # the cache reads files: a forecast has none
    from ups.data.cache import Cache

MAX_PARAMETERS = 3  # the PDEBench task with the most: cfd2d and cfd3d (eta, zeta, M)
# what the network is conditioned on: parameters, log of the time step, fraction of axes with each boundary
CONDITION_SIZE = MAX_PARAMETERS + 1 + len(BOUNDARIES)
AT_BOUNDS = 1e-3  # of the width between the bounds: a codec of lower rank moves clipped values
MARGIN = 0.25  # of that width, from a bound to the range of many trajectories (ups_discovery.units.widened)
SAME = 1e-6  # relative: closer parameter values are the same number in float32


class TaskHead(nn.Module):
    """What one task adds to the shared network: codecs, base predictor, input and output maps, scale and
    bounds.

    Raises ValueError if a fact is not that of the task.
    """

    def __init__(self, facts: HeadFacts, width: int):
        super().__init__()
        self.name, self.facts = facts.name, facts
        self.task = described_task({"name": facts.name, **({"own": facts.own} if facts.own else {})})
        for key, expected in (("boundary", self.task.boundary), ("domain", plain(self.task.domain))):
            if (found := getattr(facts, key)) != expected:
                raise ValueError(
                    f"the weights of {self.name} have the {key} {found}; expected {expected}. {AGAIN}"
                )
        for codec in ("codec", "input_codec", "forcing_codec"):
            require_kinds(getattr(facts, codec) or {}, CODEC, f"{self.name} ({codec})")
        require_codec(facts.codec, self.task.fields, self.name)
        require_base(facts.base, len(facts.parameters), self.name)
        require_forcing(facts.base, facts.codec, facts.forcing_codec, self.task.forcing, self.name)
        self.history = facts.history
        frame = facts.dt / facts.time_unit
        self.log_dt = math.log(frame) if frame > 0 else 0.0
        self.codec = empty_tokenizer(facts.codec)
        self.coefficient_codec = empty_tokenizer(facts.input_codec) if facts.input_codec else None
        self.forcing_codec = empty_tokenizer(facts.forcing_codec) if self.task.forcing else None
        self.base = build_base(facts.base)
        self.base.requires_grad_(False)  # it stays as it was fitted: with the network its errors grow
        self.twin = None
        if facts.twin is not None:
            require_base(facts.twin, len(facts.parameters), f"{self.name} (twin)")
            with torch.random.fork_rng([]):  # the network's first weights do not depend on it
                self.twin = build_base(facts.twin).requires_grad_(False)
        self.register_buffer("scale", torch.ones(max(1, len(facts.parameter_values))))
        # normalised bounds of each channel: rollouts are clipped to them, so none blows up
        for name, end in (("low", -math.inf), ("high", math.inf)):
            self.register_buffer(name, torch.full((self.codec.num_channels,), end))
        forcing_dim = 2 * self.forcing_codec.dim if self.forcing_codec is not None else 0
        self.into = nn.Linear(self.history * self.input_codec.dim + self.codec.dim + forcing_dim, width)
        self.out = zero_linear(width, self.codec.dim)
        fixed = torch.zeros(CONDITION_SIZE)  # the condition without parameters
        fixed[MAX_PARAMETERS] = self.log_dt
        for end in along(self.task.boundary, self.task.ndim):
            fixed[MAX_PARAMETERS + 1 + BOUNDARIES.index(end)] += 1 / self.task.ndim
        self.register_buffer("fixed_condition", fixed, persistent=False)
        self._trained = self._scaled_values() if facts.parameters else None
        self._set_constraints()

    @property
    def input_codec(self) -> Tokenizer:
        """The codec of the input: the coefficient's for a steady task, else the state's."""
        return self.coefficient_codec if self.coefficient_codec is not None else self.codec

    @property
    def conserved(self) -> Sequence[str]:
        """The fields whose mean over space forecasts keep, if the data do."""
        return self.task.conserved or self.facts.conserved or ()

    @property
    def is_network_used(self) -> bool:
        """Whether the network serves forecasts of the task; otherwise the base alone does."""
        return self.facts.network_weight > 0

    @property
    def extrapolates(self) -> bool:
        """Whether stated errors hold at parameters outside of the trained ones as well."""
        return self.base.extrapolates and self.twin is not None

    @property
    def start_frames(self) -> int:
        """The frames from which the start of a forecast is estimated, 0 if it is the input itself."""
        is_known = self.base.has_tangent and self.facts.noise is not None
        return (self.facts.start_frames or 0) if is_known else 0

    @property
    def is_deterministic(self) -> bool:
        """Whether noise of measurement explains the base's errors: members differ in their start alone."""
        return self.facts.noise is not None and bool(self.facts.is_deterministic)

    def with_facts(self, **changes: Any) -> "TaskHead":
        """A head with the same tensors and base under other facts."""
        head = copy.copy(self)
        head._modules, head.facts = dict(self._modules), replace(self.facts, **changes)
        head._set_constraints()
        return head

    def _set_constraints(self) -> None:
        self.constraints = constraints_of(self)
        self.invariants = tuple(one for one in self.constraints if not isinstance(one, Bounds))
        # not over a user's step: with them NumPy's corrector errs 2.3 times as much (docs/lab/log.md)
        is_bounded = self.facts.waves is not None and not self.base.is_user_solver
        self.wave_bounds = WaveBounds(self).to(self.scale.device) if is_bounded else None

    def findings(self) -> list[str]:
        """The findings of the base in words, and the offsets of the fields in them."""
        found = self.base.findings(self.task.fields, self.task.axes)
        return found + [
            f"{name} is counted from {value:.12g}"
            for name, value in self.task.offsets.items()
            if found and name in self.task.fields
        ]

    def physical(self, z: Tensor) -> Tensor:
        """The field (..., C, *space) of latents (..., *tokens, dim), in physical units relative to the task's
        offsets."""
        return self.codec.denormalise(self.codec.decode(z))

    def forcing_of(self, cache: "Cache", rows: Tensor, first: Tensor | int, num_frames: int) -> Tensor | None:
        """The normalised forcing (batch, num_frames, K, *space) of rows of a cache, from the frame `first` of
        each row on; None for a task without forcing.
        """
        if self.forcing_codec is None:
            return None
        return self.forcing_codec.decode(cache.forcing(rows, first, num_frames, self.scale.device))

    def parameters_of(
        self, cache: "Cache", rows: Tensor, first: Tensor | int = 0, num_frames: int = 2
    ) -> ParameterBatch:
        """`parameter_batch` of rows of a cache, with their forcing."""
        return self.parameter_batch(cache.parameters[rows], self.forcing_of(cache, rows, first, num_frames))

    def parameter_batch(self, parameters: Tensor, forcing: Tensor | None = None) -> ParameterBatch:
        """The `ParameterBatch` of raw parameters (batch, P) and normalised forcing. No device is waited for
        if the parameters lie on the host.

        Raises ValueError for another number of parameters than the task has, or for a value that the base was
        not fitted on if it serves fitted values only.
        """
        names, device = list(self.facts.parameters), self.scale.device
        if self.forcing_codec is not None and forcing is not None:
            forcing = self.forcing_codec.bridged(forcing)
        if parameters.ndim != 2 or parameters.shape[1] != len(names):
            raise ValueError(
                f"{self.name} was given parameters of shape {tuple(parameters.shape)}; expected "
                f"(batch, {len(names)}): {', '.join(names) or 'none'}. Give these, in order."
            )
        parameters = parameters.cpu()
        if not names:
            return ParameterBatch(
                send(parameters.float(), device),
                send(torch.zeros(parameters.shape[0], dtype=torch.long), device),
                forcing=forcing,
            )
        logs, (trained, mean, spread) = self._scaled(parameters.double()), self._trained
        distance, nearest = (logs[:, None, : trained.shape[1]] - trained).abs().amax(-1).min(1)
        if self.base.needs_fitted_parameters:
            self._require_fitted(parameters[:, 0], distance)
        return ParameterBatch(
            send(((logs - mean) / spread).float(), device),
            send(nearest, device),
            send(parameters.float(), device),
            forcing,
        )

    def require_shape(self, kind: str, x: Tensor, parameters: ParameterBatch) -> None:
        """Raise ValueError unless the input x of a call, "fields" or "latents", and its parameters have the
        shapes of the training."""
        codec, (frames, *found) = self.input_codec, x.shape[1:]
        if frames != self.history:
            raise ValueError(
                f"{self.name} was given {frames} frames; expected its history of {self.history}. "
                f"Slice the context."
            )
        fields, latents = (codec.num_channels, *codec.space), (*codec.tokens, codec.dim)
        expected = fields if kind == "fields" else latents
        if tuple(found) != expected or parameters.index.shape[0] != x.shape[0]:
            raise ValueError(
                f"{self.name} was given {len(x)} {kind} of shape {tuple(found)} and {len(parameters.index)} "
                f"rows of parameters; expected {expected} and a row for each: it was "
                f"trained on a grid of {codec.space} cells. Pass the field to ups.load(..).forecast(.., "
                "resample=True), or train on the other grid."
            )
        names, forcing = self.task.forcing, parameters.forcing
        if forcing is None and not names:
            return
        shape = (len(parameters.index), "time", len(names), *self.codec.space)
        if (
            forcing is None
            or not names
            or forcing.shape[1] < 2
            or ([*forcing.shape[:1], *forcing.shape[2:]] != [*shape[:1], *shape[2:]])
        ):
            given = "no forcing" if forcing is None else f"forcing of shape {tuple(forcing.shape)}"
            expected = f"({', '.join(map(str, shape))}), 2 frames or more of {', '.join(names)}"
            raise ValueError(
                f"{self.name} was given {given}; expected {expected if names else 'none'}, as "
                "it was trained. Pass normalised values, from the last input frame on."
            )

    def _scaled_values(self) -> tuple[Tensor, Tensor, Tensor]:
        """The trained parameter values, `_scaled`, with their mean and standard deviation, on the host."""
        values = torch.tensor(self.facts.parameter_values, dtype=torch.float64)
        trained = self._scaled(values.reshape(len(values), -1))
        spread = trained.std(0, correction=0) if len(values) > 1 else torch.ones(1)
        return trained, trained.mean(0), torch.where(spread > 0, spread, torch.ones_like(spread))

    def _scaled(self, parameters: Tensor) -> Tensor:
        """Columns of parameters (n, P or fewer): the logarithm if all trained values are above zero, else
        divided by the largest magnitude.
        """
        spans = list(self.facts.parameters.values())[: parameters.shape[1]]
        return torch.stack(
            [
                column.log() if low > 0 else column / (max(-low, high) or 1.0)
                for (low, high), column in zip(spans, parameters.unbind(1), strict=True)
            ],
            1,
        )

    def _require_fitted(self, given: Tensor, distance: Tensor) -> None:
        """Raise ValueError if a parameter value is not a fitted one; distance: to the nearest one, as
        `_scaled`.
        """
        refuse_gradient(self.name, "its base serves the fitted parameter values alone", given)
        is_fitted = (distance <= SAME).all()  # NaN is not
        asked, values = f"{self.name} was asked for the parameter value", self.facts.parameter_values
        expected = (
            f"expected one of {values}, for which its {self.base.kind} was fitted. Add the value to "
            f"task.{self.name}.parameters and train, or choose another base."
        )
        if torch.compiler.is_exporting():  # an exported graph checks too, but cannot name the value
            torch._assert_async(is_fitted, f"{asked} of another case; {expected}")
        elif not bool(is_fitted):
            raise ValueError(f"{asked} {float(given[int(distance.argmax())]):g}; {expected}")

    def first_at_bounds(self, u: Tensor) -> int:
        """The first frame, counted from 1, of a forecast u (..., time, C, *space), physical units, that has a
        value at `low` or `high`; 0 if none has.
        """
        every, margin = (...,) + (None,) * self.task.ndim, AT_BOUNDS * (self.high - self.low)
        least, most = (
            self.codec.denormalise(end[every]).to(u) for end in (self.low + margin, self.high - margin)
        )
        is_at = ((u <= least) | (u >= most)) & (margin > 0).to(u.device)[every]
        frames = self.task.predicted(is_at).flatten(-1 - self.task.ndim).any(-1).flatten(0, -2).any(0)
        return 1 + int(frames.nonzero()[0]) if bool(frames.any()) else 0

    def constrained(self, w: Tensor, w_start: Tensor) -> Tensor:
        """A prediction w (batch, T, C, *space) under the constraints of the task; w_start (batch, C, *space):
        the frame before it; both normalised."""
        for constraint in self.constraints:
            w = constraint(w, w_start)
        return w

    def keep_latents(self, z: Tensor, z_start: Tensor) -> Tensor:
        """Latents z (batch, T, *tokens, dim) with the invariants of z_start, the frame before; no bounds."""
        if not self.invariants:
            return z
        w, w_start = self.codec.decode(z), self.codec.decode(z_start)
        for constraint in self.invariants:
            w = constraint(w, w_start)
        return self.codec.encode(w)

    def range_of_data(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest values (batch, 1, C, *1 per axis) of the training data, wider if
        trajectories are few, and of latents z (batch, time, *tokens, dim)."""
        w, ends = self.codec.decode(z), ((self.low, self.high), (self.high, self.low))
        inside = [near.lerp(far, MARGIN).where(far.isfinite(), near) for near, far in ends]
        low, high = (end.view(self.codec.channel_shape) for end in inside)
        axes = (1, *range(3, w.ndim))
        return torch.minimum(w.amin(axes, True), low), torch.maximum(w.amax(axes, True), high)

    def base_frames(self, u: Tensor, parameters: ParameterBatch, num_frames: int) -> Tensor:
        """The base's next frames (batch, num_frames, C, *space), under the constraints of the task, from
        normalised u (batch, history, C_in, *space).
        """
        frames = []
        if num_frames > 1:  # else the base reads the only input itself
            parameters = self.base.settled(self.input_codec.bridged(u), parameters)
        for number in range(num_frames):
            beat()
            u_next = self.base(self.input_codec.bridged(u), parameters.later(number))
            frames.append(self.constrained(u_next[:, None], u[:, -1]))
            u = torch.cat([u[:, 1:], frames[-1]], 1) if number + 1 < num_frames else u
        return torch.cat(frames, 1)
