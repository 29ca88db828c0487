"""What the weights of a task know besides their tensors: the training data, the base, and what validation
decided. Frozen; stored as JSON in config.json.

The values may come from a stranger, and a network computes with them long after it was built: without the
checks here a wrong type would be an error of torch in the middle of a forecast.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from ups.common.files import value_hash
from ups.common.place import make_target
from ups.config.model import BASES
from ups.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ups.data.cache import Cache

AGAIN = (
    "Train the operator again on these data: delete the folder of the stage (rm -r runs/RUN/operator), then "
    f"{make_target('operator')}."
)


# ---- types of the values in config.json

Check = Callable[[Any], bool]
Rows = dict[str, tuple[Check, str]]  # key: (check of its value, expected value in words)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # Python's and NumPy's


def is_count(value: Any) -> bool:
    return is_whole(value) and value > 0


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def each(check: Check, num: int | None = None) -> Check:
    """A check of every entry of a list, of `num` entries if given."""
    return lambda value: (
        isinstance(value, (list, tuple)) and num in (None, len(value)) and all(map(check, value))
    )


def is_tree(value: Any) -> bool:
    """Whether value is a whole number, or nested lists of them."""
    return is_whole(value) or each(is_tree)(value)


def is_ranges(value: Any) -> bool:
    """Whether value maps names to [smallest, largest]."""
    return (
        isinstance(value, Mapping)
        and all(map(is_text, value))
        and all(each(is_number, 2)(span) and span[0] <= span[1] for span in value.values())
    )


def is_sizes(value: Any) -> bool:
    """Whether value maps names to sizes."""
    return isinstance(value, Mapping) and all(map(is_text, value)) and all(map(is_size, value.values()))


def is_size(value: Any) -> bool:
    return is_number(value) and value >= 0


def is_band(value: Any) -> bool:
    """Whether value has the numbers of `ups.models.band.Band`."""
    return (
        isinstance(value, Mapping)
        and value.keys() | {"numerics"} == BAND.keys()
        and all(BAND[key][0](one) for key, one in value.items())
    )


def is_table(value: Any) -> bool:
    """Whether value is a list of numbers, or of rows of numbers."""
    return each(is_number)(value) or each(each(is_number))(value)


COUNT, WHOLE, FLAG = (is_count, "a count"), (is_whole, "a whole number"), (is_flag, "true or false")
NUMBER, NAMES, CELLS = (is_number, "a number"), (each(is_text), "names"), (each(is_count), "counts")
CHANNELS = (each(is_whole), "numbers of channels")
SIZE, TABLE = (is_size, "a size"), (is_table, "numbers")
SIZES = (is_sizes, "a standard deviation by name")
RANGES = (is_ranges, "the smallest and largest value by name")
SPECTRA = (each(each(is_size)), "rows of sizes")
CODEC: Rows = {
    "space": CELLS,
    "patch": COUNT,
    "fields": NAMES,
    "positive": NAMES,
    "mask": (is_text, "the lengths of the runs of a mask"),
}
BASE: Rows = {
    "num_values": WHOLE,
    "num_parameters": WHOLE,
    "num_channels": WHOLE,
    "num_inputs": WHOLE,
    "degree": WHOLE,
    "history": WHOLE,
    "reach": WHOLE,
    "lags": COUNT,
    "waves": WHOLE,
    "law": (is_text, "a name"),
    "rank": WHOLE,
    "firm_rank": WHOLE,
    "num_moving": WHOLE,
    "num_steps": WHOLE,
    "space": CELLS,
    "lengths": (each(is_number), "numbers"),
    "cell": (each(is_number), "numbers"),
    "dt": NUMBER,
    "frame": NUMBER,
    "ridge": NUMBER,
    "terms": (is_tree, "whole numbers in lists"),
    "positive": CHANNELS,
    "vorticity": CHANNELS,
    "driven": CHANNELS,
    "vectors": (each(each(is_whole)), "lists of channels"),
    "walls": (each(each(is_number)), "lists of numbers"),
    "num_forcing": WHOLE,
    "series": CHANNELS,
    "forcing": NAMES,
    "forcing_positive": CHANNELS,
    "forcing_offsets": (each(is_number), "numbers"),
}
BAND: Rows = {
    **dict.fromkeys(("profile", "twin"), (each(each(is_size)), "rows of sizes")),
    **dict.fromkeys(("factor", "width", "cell_width", "alarm", "error", "numerics"), SIZE),
}
CORRECTOR: Rows = {"sampler_steps": COUNT, "mid_angle": NUMBER, "is_map": FLAG}


def require_kinds(description: Mapping[str, Any], rows: Rows, what: str) -> None:
    """Raise ValueError if a value fails the check of its row."""
    for key, (check, expected) in rows.items():
        if key in description and not check(description[key]):
            raise ValueError(
                f"the weights of {what} have {key} {description[key]!r:.80}; expected "
                f"{expected}. Take another copy of them, or train again."
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
    require_kinds(settings, BASE, f"{what} (base)")
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


def checked(row: tuple, **default: Any) -> Any:
    """A field whose value in a file must pass the check of its row."""
    return field(metadata={"row": row}, kw_only=True, **default)


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
    tried. is_deterministic: noise of measurement explains the errors. network_weight: of the network's output
    (0: the base alone). band: the numbers of `ups.models.band.Band`. starts, forcings: of
    `ups.models.starts`. twin: kind and settings of the base that was fitted once more (`Base.twin`).
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
    history: int = checked(COUNT)
    bundle: int = checked(COUNT)
    dt: float = checked(SIZE)
    parameters: dict[str, list[float]] = checked(RANGES)
    parameter_values: list = checked(TABLE)
    network_weight: float = checked(NUMBER)
    is_conservative: bool = checked(FLAG)
    time_unit: float = checked(NUMBER, default=1.0)
    horizon: int | None = checked(COUNT, default=None)
    conserved: list[str] | None = checked(NAMES, default=None)
    noise: dict[str, float] | None = checked(SIZES, default=None)
    start_frames: int | None = checked(WHOLE, default=None)
    is_deterministic: bool | None = checked(FLAG, default=None)
    twin: dict[str, Any] | None = None
    forcing_range: dict[str, list[float]] | None = checked(RANGES, default=None)
    input_range: dict[str, list[float]] | None = checked(RANGES, default=None)
    starts: list[list[float]] | None = checked(SPECTRA, default=None)
    forcings: list[list[float]] | None = checked(SPECTRA, default=None)
    band: dict[str, Any] | None = checked((is_band, "the numbers of a band"), default=None)

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
