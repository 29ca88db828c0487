"""What one task adds to the shared network, and what of its data travels with the weights."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ups.common.files import value_hash
from ups.common.transfer import send
from ups.data.cache import Cache
from ups.data.tokenizer import Tokenizer
from ups.models.backbone import zero_linear
from ups.models.bases.base import ParameterBatch
from ups.models.bases.per_field import build_base
from ups.models.conserve import clipped, correction, given
from ups.models.description_checks import (
    CODEC,
    FORCING,
    HEAD,
    require_base,
    require_codec,
    require_forcing,
    require_kinds,
)
from ups.models.warm import AS_IT_WAS, TRANSLATED, can_translate, copy_maps, translate_maps
from ups.tasks import described_task

FOUND = ("network_weight", "is_conservative")  # of the data, by the stage
SELECTION = "selection"  # what decided network_weight, `ups.models.selection.select`; older weights lack it
HORIZON = "horizon"  # frames of the rollouts on which the operator was evaluated; older weights lack it
# of a description: forcing -> what it was trained in, half as much on both sides included, as for the state
FORCING_RANGE = "forcing_range"
AT_BOUNDS = 1e-3  # of the width between the bounds: a codec that is not complete moves what was clipped
SAME = 1e-6  # relative: parameter values that differ by less are the same number in float32
AGAIN = "Train the operator again on these data: make remove STAGE=operator, then make operator."


class TaskHead(nn.Module):
    """What one task adds to the shared network: codec, base predictor, input and output map, scales.

    description (JSON-able; ups/models/base_selection.py makes it): all that the tensors do not hold. name;
    history, bundle (frames); what it is trained on, as `describe_data` says; base: {kind, settings};
    network_weight of what the network says, by validation; is_conservative, where the training data keep what
    the equation keeps; horizon (frames) of the rollouts it was evaluated on, which old weights do not have.
    Raises ValueError where that is missing or not the task's."""

    def __init__(self, description: dict[str, Any], width: int):
        super().__init__()
        self.name = description["name"]
        self.task = described_task(description)
        known = {"boundary": self.task.boundary, "domain": plain(self.task.domain)}
        if wrong := [
            key
            for key in (*known, "dt", "parameters", *FOUND)
            if key not in description or description[key] != known.get(key, description[key])
        ]:
            raise ValueError(
                f"the weights of {self.name} say {description.get(wrong[0], 'nothing')} of the "
                f"{wrong[0]} they were trained on; expected "
                f"{known.get(wrong[0], 'what this version records')}. {AGAIN}"
            )
        require_kinds(description, HEAD, self.name)
        for codec in ("codec", "input_codec", FORCING):
            require_kinds(description.get(codec) or {}, CODEC, f"{self.name} ({codec})")
        require_codec(description["codec"], self.task.fields, self.name)
        require_base(description["base"], len(description["parameters"]), self.name)
        require_forcing(description, self.task.forcing, self.name)
        self.history, self.bundle = description["history"], description["bundle"]
        self.description = description
        frame = description["dt"] / description.get("time_unit", 1.0)
        self.log_dt = math.log(frame) if frame > 0 else 0.0
        self.codec = _empty_tokenizer(description["codec"])
        self.coefficient_codec = (
            _empty_tokenizer(description["input_codec"]) if description["input_codec"] else None
        )
        self.forcing_codec = _empty_tokenizer(description[FORCING]) if self.task.forcing else None
        self.base = build_base(description["base"])
        for parameter in self.base.parameters():
            parameter.lr_factor = self.base.lr_factor
        self.register_buffer("scale", torch.ones(max(1, len(description["parameter_values"]))))
        # of each channel, normalised: no rollout leaves them, so that none blows up
        for name, end in (("low", -math.inf), ("high", math.inf)):
            self.register_buffer(name, torch.full((self.codec.num_channels,), end))
        forcing_dim = (1 + self.bundle) * self.forcing_codec.dim if self.forcing_codec is not None else 0
        self.into = nn.Linear(self.history * self.input_codec.dim + self.codec.dim + forcing_dim, width)
        self.out = zero_linear(width, self.bundle * self.codec.dim)

    @property
    def input_codec(self) -> Tokenizer:
        """The codec of what the operator is shown: the coefficient's for a steady task, else the state's."""
        return self.coefficient_codec if self.coefficient_codec is not None else self.codec

    @property
    def is_network_used(self) -> bool:
        """Whether the network serves the task: it does where it helps on validation, else the base alone
        does."""
        return self.description["network_weight"] > 0

    def record_selection(self, selection: dict[str, Any]) -> None:
        """Serve what `ups.models.selection.select` found on validation; its numbers stay with the weights."""
        self.description |= {"network_weight": selection["network_weight"], SELECTION: selection}

    def findings(self) -> list[str]:
        """What the base found, in words, and from where the fields in it are counted."""
        found = self.base.findings(self.task.fields, self.task.axes)
        return found + [
            f"{name} is counted from {value:.12g}"
            for name, value in self.task.offsets.items()
            if found and name in self.task.fields
        ]

    def physical(self, z: Tensor) -> Tensor:
        """Latents (..., *tokens, dim) of the state to the field (..., C, *space), physical units counted from
        the task's offsets."""
        return self.codec.denormalise(self.codec.decode(z))

    def forcing_of(self, cache: Cache, rows: Tensor, first: Tensor | int, num_frames: int) -> Tensor | None:
        """What is known in advance of rows of a cache, normalised: (batch, num_frames, K, *space) from the
        frame `first` of each row on; None for a task without."""
        if self.forcing_codec is None:
            return None
        return self.forcing_codec.decode(cache.forcing(rows, first, num_frames, self.scale.device))

    def parameters_of(
        self, cache: Cache, rows: Tensor, first: Tensor | int = 0, num_frames: int = 2
    ) -> ParameterBatch:
        """`parameter_batch` of rows of a cache: its parameters, and `forced`."""
        return self.parameter_batch(cache.parameters[rows], self.forcing_of(cache, rows, first, num_frames))

    def parameter_batch(self, parameters: Tensor, forcing: Tensor | None = None) -> ParameterBatch:
        """The `ParameterBatch` of raw parameters (batch, P) and normalised forcing. No device is waited for
        if the parameters lie on the host.

        Raises ValueError for another number of parameters than the task shows, or a value the base cannot
        serve: a propagator knows the fitted values only.
        """
        names, device = list(self.description["parameters"]), self.scale.device
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
        values = torch.tensor(self.description["parameter_values"], dtype=torch.float64)
        logs, trained = self._scaled(parameters.double()), self._scaled(values.reshape(len(values), -1))
        distance, nearest = (logs[:, None, : trained.shape[1]] - trained).abs().amax(-1).min(1)
        if self.base.needs_fitted_parameters:
            self._require_fitted(parameters[:, 0], distance)
        spread = trained.std(0, correction=0) if len(values) > 1 else torch.ones(1)
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        return ParameterBatch(
            send(((logs - trained.mean(0)) / spread).float(), device),
            send(nearest, device),
            send(parameters.float(), device),
            forcing,
        )

    def require_forcing(self, parameters: ParameterBatch) -> None:
        """Raise ValueError unless what is known in advance is there for a call, by its shape."""
        names, forcing, num_frames = self.task.forcing, parameters.forcing, 1 + self.bundle
        if forcing is None and not names:
            return
        shape = (len(parameters.index), "time", len(names), *self.codec.space)
        if (
            forcing is None
            or not names
            or forcing.shape[1] < num_frames
            or ([*forcing.shape[:1], *forcing.shape[2:]] != [*shape[:1], *shape[2:]])
        ):
            given = "no forcing" if forcing is None else f"forcing of shape {tuple(forcing.shape)}"
            expected = f"({', '.join(map(str, shape))}), {num_frames} frames or more of {', '.join(names)}"
            raise ValueError(
                f"{self.name} was given {given}; expected {expected if names else 'none'}, as "
                "it was trained. Give the normalised values from the last frame shown on."
            )

    def forcing_tokens(self, parameters: ParameterBatch) -> list[Tensor]:
        """What the network is told in advance of a call, one tensor (batch, *tokens, n): the forcing from the
        last frame shown to the last one predicted; nothing for a task without."""
        if self.forcing_codec is None:
            return []
        return [
            self.forcing_codec.encode(parameters.forcing[:, : 1 + self.bundle]).movedim(1, -2).flatten(-2)
        ]

    def _scaled(self, parameters: Tensor) -> Tensor:
        """Parameters (n, P), or the first of them, by their logarithms where all trained ones are above zero,
        else over the largest of them."""
        spans = list(self.description["parameters"].values())[: parameters.shape[1]]
        return torch.stack(
            [
                column.log() if low > 0 else column / (max(-low, high) or 1.0)
                for (low, high), column in zip(spans, parameters.unbind(1), strict=True)
            ],
            1,
        )

    def _require_fitted(self, given: Tensor, distance: Tensor) -> None:
        """Refuse parameter values of which one is not a fitted one, `distance` away in the logarithm."""
        is_fitted = (distance <= SAME).all()  # NaN is not
        asked, values = f"{self.name} was asked for the parameter value", self.description["parameter_values"]
        expected = (
            f"expected one of {values}, for which its {self.base.kind} was fitted. Add the value to "
            f"task.{self.name}.parameters and train, or choose another base."
        )
        if torch.compiler.is_exporting():  # what is exported refuses them too; its graph holds none to name
            torch._assert_async(is_fitted, f"{asked} of another case; {expected}")
        elif not bool(is_fitted):
            raise ValueError(f"{asked} {float(given[int(distance.argmax())]):g}; {expected}")

    def take(self, parent: "TaskHead") -> str:
        """Take over another head of this task, as `ups.models.warm` says; in words, "" if it cannot serve:
        another history, bundle or patch. The base comes with it where all that is known of both is the same.
        """
        pairs = [(self.codec, parent.codec), (self.input_codec, parent.input_codec)]
        if self.task.forcing or parent.task.forcing:
            if self.forcing_codec is None or parent.forcing_codec is None:
                return ""
            pairs.append((self.forcing_codec, parent.forcing_codec))
        if (
            (self.history, self.bundle) != (parent.history, parent.bundle)
            or dict(self.task.offsets) != dict(parent.task.offsets)
            or not all(can_translate(*pair) for pair in pairs)
        ):
            return ""
        if not all(one.is_same(other) for one, other in pairs):
            translate_maps(self, parent)
            return TRANSLATED
        known, given = (
            {"time_unit": 1.0}
            | {
                key: value
                for key, value in head.description.items()
                if key not in (*FOUND, SELECTION, HORIZON)
            }
            for head in (self, parent)
        )
        if known == given:
            self.load_state_dict(parent.state_dict())
            return AS_IT_WAS
        return copy_maps(self, parent)

    def bound(self, z: Tensor) -> Tensor:
        """Latents (batch, T, *tokens, dim) whose fields stay within `low` and `high`; those that do, and
        steady ones, to the last bit."""
        if self.task.is_steady:
            return z
        w = self.codec.decode(z)
        inside = self._clamp(w)
        has_left = (inside != w).flatten(1).any(1)
        return torch.where(has_left.view(-1, *[1] * (z.ndim - 1)), self.codec.encode(inside), z)

    def first_at_bounds(self, u: Tensor) -> int:
        """The number, from 1, of the first frame of a forecast u (..., time, C, *space), physical units, in
        which a value is at `low` or `high`; 0 if none is."""
        every, margin = (...,) + (None,) * self.task.ndim, AT_BOUNDS * (self.high - self.low)
        least, most = (
            self.codec.denormalise(end[every]).to(u) for end in (self.low + margin, self.high - margin)
        )
        is_at = ((u <= least) | (u >= most)) & (margin > 0).to(u.device)[every]
        frames = self.task.predicted(is_at).flatten(-1 - self.task.ndim).any(-1).flatten(0, -2).any(0)
        return 1 + int(frames.nonzero()[0]) if bool(frames.any()) else 0

    def _clamp(self, w: Tensor) -> Tensor:
        if self.task.is_steady:  # one call grows no further; a coefficient may ask for more than any before
            return w
        every = (...,) + (None,) * self.task.ndim
        return torch.clamp(w, self.low[every], self.high[every])

    @property
    def has_constraints(self) -> bool:
        """Whether `keep` changes anything. A bound is kept where the user declares it, and a mask always."""
        is_bounded = self.task.user_facts is not None and bool(self.task.bounded)
        return (
            self.description["is_conservative"]
            or bool(self.task.still)
            or is_bounded
            or self.codec.valid is not None
        )

    def keep(self, w: Tensor, w_start: Tensor) -> Tensor:
        """Normalised fields w (batch, T, C, *space) with what the equation keeps of w_start (batch, C,
        *space): as they are for a task without, or where the data do not keep it."""
        if self.task.user_facts is not None:  # the order of values is that of normalised ones
            w = clipped(self.task, w, w_start, self.codec.valid)
        w = given(self.task, w, w_start)
        if not self.description["is_conservative"]:
            return self.codec.held(w)
        u, u_start = self.codec.denormalise(w), self.codec.denormalise(w_start)
        change = correction(self.task, u, u_start, self.codec.valid) / self.codec.std
        return self.codec.held(w + change[(...,) + (None,) * self.task.ndim])

    def conserve_latents(self, z: Tensor, z_start: Tensor) -> Tensor:
        """`keep` of latents (batch, T, *tokens, dim), as exactly as the codec holds a constant."""
        return self._kept(self.codec.decode(z), z_start) if self.has_constraints else z

    def restore(self, z: Tensor, z_start: Tensor) -> Tensor:
        """`bound` of latents, then `conserve_latents`, decoded once."""
        return (
            self._kept(self._clamp(self.codec.decode(z)), z_start) if self.has_constraints else self.bound(z)
        )

    def _kept(self, w: Tensor, z_start: Tensor) -> Tensor:
        return self.codec.encode(self.keep(w, self.codec.decode(z_start)))

    def next_frame(self, u: Tensor, parameters: ParameterBatch, is_alone: bool = False) -> Tensor:
        """The base's answer (batch, C, *space) to normalised u (batch, history, C_in, *space); `is_alone`:
        no network corrects it."""
        bridged = self.input_codec.bridged(u)
        answer = self.base.alone(bridged, parameters) if is_alone else self.base(bridged, parameters)
        return self.keep(self._clamp(answer)[:, None], u[:, -1])[:, 0]

    def predict_base(self, z: Tensor, parameters: ParameterBatch, is_alone: bool = False) -> Tensor:
        """The base's next `bundle` frames as latents (batch, bundle, *tokens, dim), as `next_frame`."""
        u = self.input_codec.decode(z)
        frames = []
        for frame in range(self.bundle):
            frames.append(self.next_frame(u, parameters.later(frame), is_alone))
            u = torch.cat([u[:, 1:], frames[-1][:, None]], 1) if not self.task.is_steady else u
        return self.codec.encode(torch.stack(frames, 1))


def plain(domain: tuple) -> list:
    """A domain as JSON gives it back."""
    return [list(span) if isinstance(span, tuple) else span for span in domain]


def _empty_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """A codec of the right shape whose tensors a state_dict fills."""
    return Tokenizer.from_state(
        {name: torch.zeros(size) for name, size in meta["shape"].items()},
        {key: value for key, value in meta.items() if key != "shape"},
    )


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts and tensor shapes of a codec, JSON-able: an operator is built from these and filled by a
    state_dict."""
    return {
        **tokenizer.meta(),
        "shape": {name: list(value.shape) for name, value in tokenizer.state_dict().items()},
    }


def describe_data(cache: Cache) -> dict[str, Any]:
    """What a task's weights are trained on, and hold for alone, JSON-able.

    codec, input_codec (None unless steady) and, where something is known in advance, forcing_codec, with
    grid, fields and patch; boundary; domain of every axis; dt between frames (0 if steady); parameters: name
    -> smallest and largest value, empty where the task hides or has none; parameter_values of the first.
    """
    return {
        "codec": describe_tokenizer(cache.tokenizer),
        "input_codec": describe_tokenizer(cache.input_tokenizer) if cache.input_tokenizer else None,
        **({FORCING: describe_tokenizer(cache.forcing_tokenizer)} if cache.forcing_tokenizer else {}),
        "boundary": cache.task.boundary,
        "domain": plain(cache.task.domain),
        "dt": cache.dt,
        "parameters": {
            name: [float(column.min()), float(column.max())]
            # none where they are hidden
            for name, column in zip(cache.task.parameters, cache.parameters.unbind(1), strict=False)
        },
        "parameter_values": cache.parameter_values.tolist(),
    }


def flat_facts(description: dict[str, Any]) -> dict[str, Any]:
    """`describe_data` by the names a message uses."""
    names = {"space": "grid", "fields": "fields", "positive": "logarithms", "patch": "patch", "shape": "size"}
    codecs = {
        "": description["codec"],
        "input ": description["input_codec"] or {},
        "forcing ": description.get(FORCING) or {},
    }
    facts = {prefix + name: codec.get(key) for prefix, codec in codecs.items() for key, name in names.items()}
    facts |= {
        f"{prefix}mask": f"of {len(mask.split())} runs ({value_hash(mask)[:8]})" if mask else None
        for prefix, mask in ((prefix, codec.get("mask")) for prefix, codec in codecs.items())
    }
    return facts | {
        key: description[key] for key in ("boundary", "domain", "dt", "parameters", "parameter_values")
    }
