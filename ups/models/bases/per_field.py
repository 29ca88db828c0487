"""A base per field, so that a field that cannot be predicted does not spoil the base of another."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ups.common.boundary import PERIODIC, along
from ups.models.bases import BASES
from ups.models.bases.base import Base, ParameterBatch, Samples


class Part(NamedTuple):
    """A base, and the channels that it reads (None: all) and answers for."""

    base: Base
    kind: str
    settings: dict[str, Any]
    reads: list[int] | None
    fields: list[int]


class PerField(Base):
    """Each channel of the next frame from one of several bases, `parts` as JSON gives them: kind, settings,
    reads and fields of a `Part`. A channel that none answers for stays as it is. Each base is shown the last
    frames of the channels that it reads, in a rollout as the other bases predicted them.
    """

    kind = "per_field"

    def __init__(self, parts: Sequence[dict[str, Any]], **_: Any):
        super().__init__()
        self.parts = nn.ModuleList(BASES[part["kind"]](**part["settings"]) for part in parts)
        self.described = [dict(part) for part in parts]
        for number, part in enumerate(parts):
            reads = torch.tensor(part["reads"] or [], dtype=torch.long)
            self.register_buffer(f"reads{number}", reads, persistent=False)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "PerField":
        """The base of fitted parts."""
        base = cls(
            [
                {"kind": part.kind, "settings": part.settings, "reads": part.reads, "fields": part.fields}
                for part in parts
            ]
        )
        base.parts = nn.ModuleList(part.base for part in parts)
        return base.to(next((value.device for part in parts for value in part.base.buffers()), "cpu"))

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return self._joined(u, parameters, Base.__call__)

    def alone(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return self._joined(u, parameters, lambda base, *window: base.alone(*window))

    def _joined(self, u: Tensor, parameters: ParameterBatch, call: Callable[..., Tensor]) -> Tensor:
        answers = {}
        for number, (base, part) in enumerate(zip(self.parts, self.described, strict=True)):
            every, reads = part["reads"] is None, getattr(self, f"reads{number}")
            answer = call(base, u if every else u.index_select(2, reads), parameters)
            answers |= {
                channel: answer[:, channel if every else part["reads"].index(channel)]
                for channel in part["fields"]
            }
        count = 1 + max(*answers, u.shape[2] - 1)
        return torch.stack(
            [
                answers[channel] if channel in answers else u[:, -1, channel].float()
                for channel in range(count)
            ],
            1,
        )

    @property
    def needs_fitted_parameters(self) -> bool:
        return any(base.needs_fitted_parameters for base in self.parts)

    @property
    def is_user_solver(self) -> bool:
        return any(base.is_user_solver for base in self.parts)

    @property
    def solver(self) -> str:
        """The name of the user's function."""
        return next(base.solver for base in self.parts if base.is_user_solver)

    def use(self, step: Callable[..., Any]) -> Self:
        """With the user's function."""
        for base in self.parts:
            if base.is_user_solver:
                base.use(step)
        return self

    @property
    def is_learnt(self) -> bool:
        return any(base.is_learnt for base in self.parts)

    @property
    def lr_factor(self) -> float:
        return min(base.lr_factor for base in self.parts)

    @property
    def degree(self) -> float:
        return max(base.degree for base in self.parts)

    @property
    def num_fitted(self) -> int:
        return sum(base.num_fitted for base in self.parts)

    def unbounded(self) -> "PerField":
        free = copy.copy(self)
        free._modules = dict(self._modules)
        free.parts = nn.ModuleList(base.unbounded() for base in self.parts)
        return free

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        """What the parts found of the fields that they answer for."""
        found = []
        for base, part in zip(self.parts, self.described, strict=True):
            names = [fields[channel] for channel in part["reads"] or range(len(fields))]
            other = [
                f"∂t {start}{name} ="
                for channel, name in enumerate(fields)
                if channel not in part["fields"]
                for start in ("", "log ")
            ]
            found += [line for line in base.findings(names, axes) if not line.startswith(tuple(other))]
        return found


def build_base(description: dict[str, Any]) -> Base:
    """A base that is not fitted, from its kind and settings."""
    kinds = {**BASES, PerField.kind: PerField}
    return kinds[description["kind"]](**description["settings"])


def parts_of(base: Base, description: dict[str, Any], fields: Sequence[int]) -> list[Part]:
    """What of a fitted base with its kind and settings answers for `fields`."""
    if not isinstance(base, PerField):
        return [Part(base, description["kind"], description["settings"], None, list(fields))]
    found = [
        Part(
            one,
            part["kind"],
            part["settings"],
            part["reads"],
            [channel for channel in part["fields"] if channel in fields],
        )
        for one, part in zip(base.parts, base.described, strict=True)
    ]
    return [part for part in found if part.fields]


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts, those of one base as one."""
    found: dict[int, Part] = {}
    for part in parts:
        before = found.get(id(part.base))
        fields = {*part.fields, *(before.fields if before else ())}
        found[id(part.base)] = part._replace(fields=sorted(fields))
    return list(found.values())


class _SomeFields:
    """A codec of which some channels are seen."""

    def __init__(self, codec: nn.Module, channels: Sequence[int]):
        self.codec, self.channels = codec, torch.tensor(channels, device=codec.mean.device)
        self.ndim, self.space, self.num_channels = codec.ndim, codec.space, len(channels)
        self.mean, self.std = codec.mean[self.channels], codec.std[self.channels]
        self.valid = None if codec.valid is None else codec.valid[self.channels]
        self.fields = tuple(codec.fields[channel] for channel in channels)
        self.positive = tuple(name for name in self.fields if name in codec.positive)

    def decode(self, z: Tensor) -> Tensor:
        return self.codec.bridged(self.codec.decode(z)).index_select(-self.ndim - 1, self.channels)

    def bridged(self, w: Tensor) -> Tensor:
        return w  # as `decode` gives it


class _SomeHead:
    """A `TaskHead` as a base of some channels sees it."""

    def __init__(self, head: nn.Module, channels: Sequence[int]):
        self.name, self.scale, self.task, self.history = head.name, head.scale, head.task, head.history
        self.parameters_of, self.codec = head.parameters_of, _SomeFields(head.codec, channels)


def samples_of(samples: Samples, channels: Sequence[int]) -> Samples:
    """The windows of `samples`, of which a base sees some channels."""
    return Samples(_SomeHead(samples.head, channels), samples.cache, samples.seed, samples.budget)


def settings_of(settings: dict[str, Any], channels: Sequence[int]) -> dict[str, Any]:
    """`base_settings` of some channels."""
    place = {channel: number for number, channel in enumerate(channels)}
    positive = [place[channel] for channel in settings["positive"] if channel in place]
    vectors = [
        [place[channel] for channel in vector] for vector in settings["vectors"] if {*vector} <= {*place}
    ]
    is_part = any({*channels} & {*vector} for vector in settings["vectors"])
    is_scalar = len(channels) == 1 and not positive and not is_part
    ends = along(settings["boundary"], len(settings["space"]))
    return {
        **settings,
        "num_channels": len(channels),
        "positive": positive,
        "vectors": vectors,
        "num_moving": sum(channel < settings["num_moving"] for channel in channels),
        "walls": [settings["walls"][channel] for channel in channels] if settings["walls"] else [],
        "vorticity": [0] if is_scalar and ends == (PERIODIC, PERIODIC) else [],
    }
