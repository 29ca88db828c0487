"""What the weights of a task know besides their tensors: the training data, the base, and what validation
decided. Frozen; stored as JSON in config.json, whose values may come from a stranger and are checked.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from ups.common.files import value_hash
from ups.common.place import make_target
from ups.data.tokenizer import Tokenizer
from ups.models.description_checks import (
    COUNT,
    FLAG,
    NAMES,
    NUMBER,
    RANGES,
    SIZE,
    SIZES,
    TABLE,
    WHOLE,
    require_kinds,
)

if TYPE_CHECKING:
    from ups.data.cache import Cache

AGAIN = (
    f"Train the operator again on these data: {make_target('remove STAGE=operator')}, then "
    f"{make_target('operator')}."
)


def checked(row: tuple, is_decided: bool = False, **default: Any) -> Any:
    """A field whose value in a file must pass a check of `description_checks`. is_decided: by the stage, so
    heads of the same task and data may differ in it."""
    return field(metadata={"row": row, "is_decided": is_decided}, kw_only=True, **default)


class Facts:
    """Facts of a head of a network: a frozen dataclass that is stored as an entry of config.json."""

    again: ClassVar[str]  # what to do if a fact is missing
    kept: ClassVar[tuple[str, ...]] = ()  # facts that are stored although they are None

    @classmethod
    def read(cls, description: Mapping[str, Any]) -> Self:
        """The facts of an entry of config.json. Raises ValueError if one is missing or has another type."""
        name = description["name"]
        known = {one.name: one for one in fields(cls)}
        if missing := [
            key for key, one in known.items() if key not in description and one.default is MISSING
        ]:
            raise ValueError(
                f"the weights of {name} have the {missing[0]} missing; expected what this version records. "
                f"{cls.again}"
            )
        require_kinds(
            description,
            {key: one.metadata["row"] for key, one in known.items() if "row" in one.metadata},
            name,
        )
        return cls(**{key: value for key, value in description.items() if key in known})

    def undecided(self) -> Self:
        """The facts without what the stage decided."""
        return replace(self, **{one.name: None for one in fields(self) if one.metadata.get("is_decided")})

    def described(self) -> dict[str, Any]:
        """The entry of config.json; `read` is the inverse."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) is not None or one.name in self.kept
        }


@dataclass(frozen=True)
class HeadFacts(Facts):
    """The facts of one task of an operator. None: not known, or not stored by an older version.

    name, own: of the task; own: the section of user data. codec, input_codec (None unless steady),
    forcing_codec (None without forcing): what `empty_tokenizer` needs. boundary, domain, dt (0 if steady),
    parameters (name -> smallest and largest value), parameter_values (of the first): of the training data.
    noise: field -> standard deviation of white noise in the data. history, bundle, horizon: frames read,
    predicted per call, and of the validation rollouts. time_unit: of the time step that the network reads.
    base: kind and settings; once selected also name and unstable (how it grows beyond the data, "" if not).

    is_conservative: the training data conserve what the equation conserves; conserved: the fields whose mean
    they keep, if the user names none. forcing_range, input_range (of a coefficient): as the bounds of the
    state. start_frames: frames from which starts are estimated, 0 if that is no better, None if it was not
    tried. is_deterministic: noise of measurement explains the errors. network_weight, call_weight: of the
    network's output in rollouts and in the single calls of samplers (0: the base alone); selection: the
    record of the first.
    """

    again, kept = AGAIN, ("input_codec",)

    name: str
    boundary: Any
    domain: list
    codec: dict[str, Any]
    input_codec: dict[str, Any] | None
    base: dict[str, Any]
    own: dict[str, Any] | None = None
    forcing_codec: dict[str, Any] | None = None
    selection: dict[str, Any] | None = field(default=None, metadata={"is_decided": True})
    history: int = checked(COUNT)
    bundle: int = checked(COUNT)
    dt: float = checked(SIZE)
    parameters: dict[str, list[float]] = checked(RANGES)
    parameter_values: list = checked(TABLE)
    network_weight: float = checked(NUMBER, True)
    is_conservative: bool = checked(FLAG, True)
    time_unit: float = checked(NUMBER, default=1.0)
    horizon: int | None = checked(COUNT, True, default=None)
    call_weight: float | None = checked(NUMBER, True, default=None)
    conserved: list[str] | None = checked(NAMES, default=None)
    noise: dict[str, float] | None = checked(SIZES, default=None)
    start_frames: int | None = checked(WHOLE, True, default=None)
    is_deterministic: bool | None = checked(FLAG, True, default=None)
    forcing_range: dict[str, list[float]] | None = checked(RANGES, default=None)
    input_range: dict[str, list[float]] | None = checked(RANGES, True, default=None)


def plain(domain: tuple) -> list:
    """A domain as JSON reads it."""
    return [list(span) if isinstance(span, tuple) else span for span in domain]


def empty_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """A codec of the described shape, to be filled by a state_dict."""
    return Tokenizer.from_state(
        {name: torch.zeros(size) for name, size in meta["shape"].items()},
        {key: value for key, value in meta.items() if key != "shape"},
    )


def describe_tokenizer(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The facts and tensor shapes of a codec, JSON-able: enough to build it empty."""
    return tokenizer and {
        **tokenizer.meta(),
        "shape": {name: list(value.shape) for name, value in tokenizer.state_dict().items()},
    }


def data_facts(cache: "Cache") -> dict[str, Any]:
    """The facts about the training data that the weights are valid for."""
    return {
        "codec": describe_tokenizer(cache.tokenizer),
        "input_codec": describe_tokenizer(cache.input_tokenizer),
        "forcing_codec": describe_tokenizer(cache.forcing_tokenizer),
        "boundary": cache.task.boundary,
        "domain": plain(cache.task.domain),
        "dt": cache.dt,
        "noise": cache.header.get("noise"),
        "parameters": {
            name: [float(column.min()), float(column.max())]
            # hidden ones have no column
            for name, column in zip(cache.task.parameters, cache.parameters.unbind(1), strict=False)
        },
        "parameter_values": cache.parameter_values.tolist(),
    }


def flat_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """`data_facts`, or those of a head, with the names that messages use."""
    names = {"space": "grid", "fields": "fields", "positive": "logarithms", "patch": "patch", "shape": "size"}
    codecs = {
        "": facts["codec"],
        "input ": facts["input_codec"] or {},
        "forcing ": facts["forcing_codec"] or {},
    }
    flat = {prefix + name: codec.get(key) for prefix, codec in codecs.items() for key, name in names.items()}
    flat |= {
        f"{prefix}mask": f"of {len(mask.split())} runs ({value_hash(mask)[:8]})" if mask else None
        for prefix, mask in ((prefix, codec.get("mask")) for prefix, codec in codecs.items())
    }
    return flat | {key: facts[key] for key in ("boundary", "domain", "dt", "parameters", "parameter_values")}
