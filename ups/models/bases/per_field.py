"""A base per field, so that a field that cannot be predicted does not spoil the base of another."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ups.models.bases import base_class
from ups.models.bases.base import Base, ParameterBatch, Samples
from ups_discovery.boundary import PERIODIC, along


class Component(NamedTuple):
    """A fitted base of `PerField`, the channels that it reads (None: all) and those that it predicts."""

    base: Base
    kind: str
    settings: dict[str, Any]
    reads: list[int] | None
    fields: list[int]


class PerField(Base):
    """Each channel of the next frame from one of several bases; a channel without a base stays as it is.

    components: kind, settings, reads and fields of each `Component`, JSON-able. Each base reads the last
    frames of its channels; in a rollout these are predictions of the other bases.
    """

    kind = "per_field"

    def __init__(self, components: Sequence[dict[str, Any]], **_: Any):
        super().__init__()
        self.components = nn.ModuleList(base_class(one["kind"])(**one["settings"]) for one in components)
        self.described = [dict(one) for one in components]
        for number, one in enumerate(components):
            reads = torch.tensor(one["reads"] or [], dtype=torch.long)
            self.register_buffer(f"reads{number}", reads, persistent=False)

    @classmethod
    def of(cls, components: Sequence[Component]) -> "PerField":
        """The base of fitted components."""
        names = [name for name in Component._fields if name != "base"]
        base = cls([{name: getattr(one, name) for name in names} for one in components])
        base.components = nn.ModuleList(one.base for one in components)
        return base.to(next((value.device for one in components for value in one.base.buffers()), "cpu"))

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return self._predict(u, parameters, Base.__call__)

    def alone(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        """The prediction if no network corrects it."""
        return self._predict(u, parameters, lambda base, *window: base.alone(*window))

    def _predict(self, u: Tensor, parameters: ParameterBatch, call: Callable[..., Tensor]) -> Tensor:
        channels = {}
        for number, (base, one) in enumerate(zip(self.components, self.described, strict=True)):
            reads_all, reads = one["reads"] is None, getattr(self, f"reads{number}")
            u_next = call(base, u if reads_all else u.index_select(2, reads), parameters)
            for channel in one["fields"]:
                channels[channel] = u_next[:, channel if reads_all else one["reads"].index(channel)]
        count = 1 + max(*channels, u.shape[2] - 1)
        return torch.stack(
            [
                channels[channel] if channel in channels else u[:, -1, channel].float()
                for channel in range(count)
            ],
            1,
        )

    @property
    def needs_fitted_parameters(self) -> bool:
        return any(base.needs_fitted_parameters for base in self.components)

    @property
    def is_user_solver(self) -> bool:
        return any(base.is_user_solver for base in self.components)

    @property
    def solver(self) -> str:
        """The name of the user's function."""
        return next(base.solver for base in self.components if base.is_user_solver)

    def use(self, step: Callable[..., Any]) -> Self:
        """Set the user's function."""
        for base in self.components:
            if base.is_user_solver:
                base.use(step)
        return self

    @property
    def is_learnt(self) -> bool:
        return any(base.is_learnt for base in self.components)

    @property
    def lr_factor(self) -> float:
        return min(base.lr_factor for base in self.components)

    @property
    def degree(self) -> float:
        return max(base.degree for base in self.components)

    @property
    def num_fitted(self) -> int:
        return sum(base.num_fitted for base in self.components)

    def unbounded(self) -> "PerField":
        free = copy.copy(self)
        free._modules = dict(self._modules)
        free.components = nn.ModuleList(base.unbounded() for base in self.components)
        return free

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        """The findings of all components about the fields that they predict."""
        found = []
        for base, one in zip(self.components, self.described, strict=True):
            names = [fields[channel] for channel in one["reads"] or range(len(fields))]
            of_others = tuple(
                f"∂t {prefix}{name} ="
                for channel, name in enumerate(fields)
                if channel not in one["fields"]
                for prefix in ("", "log ")
            )
            found += [line for line in base.findings(names, axes) if not line.startswith(of_others)]
        return found


def build_base(description: dict[str, Any]) -> Base:
    """An unfitted base from its kind and settings."""
    kind = description["kind"]
    made = PerField if kind == PerField.kind else base_class(kind)
    return made(**description["settings"])


def components_of(base: Base, description: dict[str, Any], fields: Sequence[int]) -> list[Component]:
    """The components of a fitted base, described by kind and settings, that predict `fields`."""
    if not isinstance(base, PerField):
        return [Component(base, description["kind"], description["settings"], None, list(fields))]
    found = []
    for component, one in zip(base.components, base.described, strict=True):
        predicted = [channel for channel in one["fields"] if channel in fields]
        if predicted:
            found.append(Component(component, one["kind"], one["settings"], one["reads"], predicted))
    return found


def merged(components: Sequence[Component]) -> list[Component]:
    """The components, with all fields of one base in one component."""
    found: dict[int, Component] = {}
    for component in components:
        before = found.get(id(component.base))
        fields = {*component.fields, *(before.fields if before else ())}
        found[id(component.base)] = component._replace(fields=sorted(fields))
    return list(found.values())


class _SubsetCodec:
    """Some channels of a codec."""

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
        return w  # `decode` has done it


class _SubsetHead:
    """A `TaskHead` with some channels of the codec."""

    def __init__(self, head: nn.Module, channels: Sequence[int]):
        self.name, self.scale, self.task, self.history = head.name, head.scale, head.task, head.history
        self.parameters_of, self.codec = head.parameters_of, _SubsetCodec(head.codec, channels)


def subset_samples(samples: Samples, channels: Sequence[int]) -> Samples:
    """The windows of `samples` with some channels alone."""
    return Samples(_SubsetHead(samples.head, channels), samples.cache, samples.seed, samples.budget)


def subset_settings(settings: dict[str, Any], channels: Sequence[int]) -> dict[str, Any]:
    """`base_settings` of some channels."""
    place = {channel: number for number, channel in enumerate(channels)}
    positive = [place[channel] for channel in settings["positive"] if channel in place]
    vectors = [
        [place[channel] for channel in vector] for vector in settings["vectors"] if {*vector} <= {*place}
    ]
    is_component = any({*channels} & {*vector} for vector in settings["vectors"])
    is_scalar = len(channels) == 1 and not positive and not is_component
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
