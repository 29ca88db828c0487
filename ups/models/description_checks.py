"""Checks of the types of the values in the description of a network, which may come from a stranger.

A network computes with these values long after it was built. Without the checks a wrong type would be an
error of torch in the middle of a forecast.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ups.config.model import BASES

Check = Callable[[Any], bool]
Rows = dict[str, tuple[Check, str]]  # key: (check of its value, expected value in words)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def is_table(value: Any) -> bool:
    """Whether value is a list of numbers, or of rows of numbers."""
    return each(is_number)(value) or each(each(is_number))(value)


COUNT, WHOLE, FLAG = (is_count, "a count"), (is_whole, "a whole number"), (is_flag, "true or false")
NUMBER, NAMES, CELLS = (is_number, "a number"), (each(is_text), "names"), (each(is_count), "counts")
CHANNELS = (each(is_whole), "numbers of channels")
SIZE, TABLE = (is_size, "a size"), (is_table, "numbers")
SIZES = (is_sizes, "a standard deviation by name")
RANGES = (is_ranges, "the smallest and largest value by name")
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
    "rank": WHOLE,
    "firm_rank": WHOLE,
    "num_moving": WHOLE,
    "num_steps": WHOLE,
    "space": CELLS,
    "lengths": (each(is_number), "numbers"),
    "cell": (each(is_number), "numbers"),
    "dt": NUMBER,
    "frame": NUMBER,
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
