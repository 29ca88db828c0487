"""What the weights of a task know besides their tensors: the training data, the base, and what validation
decided. Frozen; stored as JSON in config.json.

The values may come from a stranger, and a network computes with them long after it was built: without the
checks here a wrong type would be an error of torch in the middle of a forecast.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from ups.common.files import value_hash
from ups.common.place import make_target
from ups.config.model import BASES, Bound, NotNegative, Positive
from ups.data.tokenizer import Tokenizer
from ups.models.bases import base_class

if TYPE_CHECKING:
    from ups.data.cache import Cache

AGAIN = (
    "Train the operator again on these data: delete the folder of the stage (rm -r runs/RUN/operator), then "
    f"{make_target('operator')}."
)


# ---- types of the values in config.json

Count, Size = Annotated[int, Positive], Annotated[float, NotNegative]
Span = Bound(lambda ends: len(ends) == 2 and ends[0] <= ends[1], "the smallest and largest value")
Range = Annotated[list[float], Span]
Kinds = Mapping[str, Any]  # key -> the declared type of its value
CODEC: Kinds = {"space": list[Count], "patch": Count, "fields": list[str], "positive": list[str], "mask": str}
BAND: Kinds = {
    **dict.fromkeys(("profile", "twin"), list[list[Size]]),
    **dict.fromkeys(("factor", "width", "cell_width", "alarm", "error", "numerics"), Size),
}
CORRECTOR: Kinds = {"sampler_steps": Count, "mid_angle": float, "is_map": bool}
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # Python's and NumPy's


def is_count(value: Any) -> bool:
    return is_whole(value) and value > 0


def matches(value: Any, kind: Any) -> bool:
    """Whether a value, as JSON or NumPy give it, is of a declared type; numbers are finite."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return matches(value, args[0]) and all(bound.holds(value) for bound in kind.__metadata__)
    if origin in (Union, UnionType):
        return any(matches(value, one) for one in args)
    if origin is Literal:
        return value in args
    if kind in (int, float):
        return is_whole(value) or (kind is float and isinstance(value, float) and math.isfinite(value))
    if origin is tuple and args[1:] != (...,):
        is_list = isinstance(value, (list, tuple)) and len(value) == len(args)
        return is_list and all(map(matches, value, args))
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(matches(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            matches(name, args[0]) and matches(one, args[1]) for name, one in value.items()
        )
    return kind is Any or isinstance(value, origin or kind)


def require_kinds(description: Mapping[str, Any], kinds: Kinds, what: str) -> None:
    """Raise ValueError if a value is not of the type of its key."""
    for key, kind in kinds.items():
        if key in description and not matches(description[key], kind):
            parts = (kind, *get_args(kind))
            bounds = [bound.expected for one in parts for bound in getattr(one, "__metadata__", ())]
            expected = ", ".join(bounds) or WORDS.get(kind, "what this version writes")
            raise ValueError(
                f"the weights of {what} have {key} {description[key]!r:.80}; expected {expected}. Take "
                "another copy of them, or train again."
            )


def require_codec(codec: Mapping[str, Any], fields: Sequence[str], what: str) -> None:
    """Raise ValueError unless a codec has the fields of its task, takes logarithms of these alone, and
    its patches divide its grid."""
    if len(codec["fields"]) != len(fields) or not set(codec["positive"]) <= set(codec["fields"]):
        raise ValueError(
            f"the weights of {what} have the fields {codec['fields']!r:.80}, positive "
            f"{codec['positive']!r:.80}; expected {list(fields)!r:.80}. Take another copy of them."
        )
    if any(size % codec["patch"] for size in codec["space"]):
        raise ValueError(
            f"the weights of {what} have patches of {codec['patch']} cells on a grid of "
            f"{codec['space']!r:.80}; expected patches that divide it. Take another copy of them."
        )


def require_forcing(
    base: Mapping[str, Any],
    state: Mapping[str, Any],
    codec: Mapping[str, Any] | None,
    names: Sequence[str],
    what: str,
) -> None:
    """Raise ValueError unless the forcing codec has the forcing fields `names` of the task, on the grid of
    the state.
    """
    settings = base["settings"]
    count, series = settings.get("num_forcing", 0), settings.get("series", [])
    is_known = count in (0, len(names)) and {*series} <= {*range(count)}
    if not is_known or len(settings.get("forcing", names)) != len(names):
        raise ValueError(
            f"the base of {what} has {count} forcing fields, {series!r:.60} of them series, in its "
            f"weights; expected {len(names)}. Take another copy of them."
        )
    if not names and not codec:
        return
    codec = {"fields": [], "positive": []} | dict(codec or {})
    require_codec(codec, names, what)
    if wrong := [key for key in ("space", "patch") if codec.get(key) != state.get(key)]:
        raise ValueError(
            f"the forcing of {what} has {wrong[0]} {codec.get(wrong[0])!r:.80} in its weights; expected "
            f"{state.get(wrong[0])!r:.80}, as the state has. Take another copy of them."
        )


def require_base(base: Mapping[str, Any], num_parameters: int, what: str) -> None:
    """Raise ValueError unless a base is of a known kind and its settings have the right types and the right
    number of parameters.
    """
    settings = base["settings"]
    if base["kind"] not in BASES:
        raise ValueError(
            f"the weights of {what} have a base of kind {base['kind']!r:.80}; expected one of "
            f"{', '.join(BASES)}. Train the operator again, or use the version that made them."
        )
    makers = [vars(one).get("__init__") for one in reversed(base_class(base["kind"]).__mro__)]
    for maker in filter(inspect.isfunction, makers):
        require_kinds(settings, get_type_hints(maker), f"{what} (base)")
    if settings.get("num_parameters", num_parameters) != num_parameters:
        raise ValueError(
            f"the base of {what} has {settings['num_parameters']} parameters in its weights; expected "
            f"{num_parameters}, as the task has. Take another copy of them."
        )
    for powers, factors in settings.get("terms", ()):
        if max([len(powers), *(1 + channel for channel, _ in factors)]) > settings["num_channels"]:
            raise ValueError(
                f"the weights of {what} have a term with a channel number above the "
                f"{settings['num_channels']} channels of its base; expected none. Take another copy of them."
            )


# ---- the facts


def is_band(value: Mapping[str, Any]) -> bool:
    """Whether value has the numbers of `ups.models.band.Band`."""
    return value.keys() | {"numerics"} == BAND.keys() and all(matches(value[key], BAND[key]) for key in value)


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
        require_kinds(description, get_type_hints(cls, include_extras=True), name)
        return cls(**{key: value for key, value in description.items() if key in known})

    def described(self) -> dict[str, Any]:
        """The entry of config.json; `read` is the inverse."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) is not None or one.name in self.kept
        }


@dataclass(frozen=True, kw_only=True)
class HeadFacts(Facts):
    """The facts of one task of an operator. None: not known, or not stored by an older version.

    name, own: of the task; own: the section of user data. codec, input_codec (None unless steady),
    forcing_codec (None without forcing): what `empty_tokenizer` needs. boundary, domain, dt (0 if steady),
    parameters (name -> smallest and largest value), parameter_values (of the first): of the training data.
    noise: field -> standard deviation of white noise in the data. history, horizon: frames read,
    and of the validation rollouts. time_unit: of the time step that the network reads.
    base: kind and settings; once selected also name and unstable (how it grows beyond the data, "" if not).

    is_conservative: the training data conserve what the equation conserves; conserved: the fields whose mean
    they keep, if the user names none. forcing_range, input_range (of a coefficient): as the bounds of the
    state. waves: the sizes of `ups.models.constraints.WaveBounds`. start_frames: frames from which starts are
    estimated, 0 if that is no better, None if it was not tried. is_deterministic: noise of measurement
    explains the errors. network_weight: of the network's output (0: the base alone). band: the numbers of
    `ups.models.band.Band`. starts, forcings: of `ups.models.starts`. twin: kind and settings of the base that
    was fitted once more (`Base.twin`).
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
    history: Count
    dt: Size
    parameters: dict[str, Range]
    parameter_values: list[float] | list[list[float]]
    network_weight: float
    is_conservative: bool
    time_unit: float = 1.0
    horizon: Count | None = None
    conserved: list[str] | None = None
    noise: dict[str, Size] | None = None
    start_frames: int | None = None
    is_deterministic: bool | None = None
    twin: dict[str, Any] | None = None
    forcing_range: dict[str, Range] | None = None
    input_range: dict[str, Range] | None = None
    waves: list[list[Size]] | None = None
    starts: list[list[Size]] | None = None
    forcings: list[list[Size]] | None = None
    band: Annotated[dict[str, Any], Bound(is_band, "the numbers of a band")] | None = None

    def weight(self, component: str | float) -> float:
        """The weight of the network's output in a component of the operator: "full" serves, "base" is the
        base alone; a number is the weight itself."""
        return {"full": self.network_weight, "base": 0.0}.get(component, component)


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
