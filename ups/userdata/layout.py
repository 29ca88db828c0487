"""The layout of a section: the arrays that it names, and a word for each of their axes.

layout: {u: [trajectory, time, x], velocity: {array: "fields/v", axes: [time, x, y, component]}}
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ups.tasks import Place
from ups.userdata.inspect_file import ConfigError, coordinate, measure, require_known
from ups.userdata.readers import Store

WORDS = ("trajectory", "time", "channel", "component", "single")  # any other word is an axis of space
# word -> other names for it, none of which is an axis of space
SYNONYMS = {
    "time": "t times frame frames",
    "trajectory": "sample samples batch run member traj trajectories b n case ensemble realization "
    "realisation seed simulation sim",
    "channel": "channels c field variable var fields variables vars",
    "component": "components comp vector vec",
}
WORD_OF = {name: word for word, names in SYNONYMS.items() for name in (word, *names.split())}
WORD_OF["single"] = "single"
# usual names of axes of space; an axis of another name needs a domain of its own
SPACE = {
    *"xyzrsijk",
    *("lat", "lon", "latitude", "longitude", "theta", "phi", "depth", "height", "level", "row", "column"),
}


def canonical_word(axis: str) -> str:
    """The word for an axis of this name; the name itself for an axis of space."""
    return WORD_OF.get(axis.lower(), axis)


def field_of(array: str) -> str:
    """The name of the field that an array holds, from the array's name."""
    return re.sub(r"\W+", "_", array.removesuffix("/*").rsplit("/", 1)[-1]).strip("_") or "u"


@dataclass(frozen=True)
class Layout:
    """The arrays of a task, with a name for every field, and the length of every axis in one file."""

    places: tuple[Place, ...]
    sizes: dict[str, int]

    @property
    def axes(self) -> list[str]:
        """The axes of space, in the order in which the arrays name them."""
        return [axis for axis in self.sizes if axis not in WORDS]

    @property
    def fields(self) -> list[str]:
        return [field for place in self.places for field in place.fields]

    @property
    def constant(self) -> list[str]:
        """The fields without an axis of time."""
        return [field for place in self.places if place.is_steady for field in place.fields]

    @property
    def is_steady(self) -> bool:
        return "time" not in self.sizes


def read_layout(key: str, section: Mapping[str, Any], store: Store) -> Layout:
    """The layout of a section, checked against a file. Raises ValueError, which names what to write."""
    layout = section["layout"]
    if not isinstance(layout, Mapping) or not layout:
        raise ConfigError(
            f"{key}.layout: {f'it is {layout!r:.80}' if layout else 'it is empty'}; expected the arrays "
            "and the words for their axes, such as {u: [trajectory, time, x]}. python -m ups describe "
            f"{store.path} prints one; the file holds {store.listing()}."
        )
    places = [_parse_entry(f"{key}.layout.{name}", str(name), entry) for name, entry in layout.items()]
    sizes = measure(key, store, places)
    axes = Layout(tuple(places), sizes).axes
    if not 1 <= len(axes) <= 3:
        raise ConfigError(
            f"{key}.layout: it names {len(axes)} axes of space ({', '.join(axes) or 'none'}); expected 1 to "
            f"3 besides {', '.join(WORDS)}. Name them, such as x, y, z; an axis of another meaning is "
            "trajectory, time, channel or component."
        )
    domain = section["domain"]
    require_known(f"{key}.domain", domain if isinstance(domain, Mapping) else (), axes, "axes of space")
    for place in places:
        _check_order(key, place, axes, section["vector"], store)
    _check_names(key, domain, places, axes, store)
    return Layout(tuple(_name_fields(key, place, axes, store) for place in places), sizes)


def _parse_entry(key: str, name: str, entry: Any) -> Place:
    """An array of a layout. Channels are counted, and fields named, once the file is known."""
    entry = entry if isinstance(entry, Mapping) else {"axes": entry}
    axes, unknown = entry.get("axes"), {*entry} - {"array", "axes", "fields"}
    is_list = isinstance(axes, list) and all(isinstance(axis, str) and axis.isidentifier() for axis in axes)
    if unknown or not is_list:
        raise ConfigError(
            f"{key}: it is {(entry if unknown else axes)!r:.120}; expected one word per axis of the array: "
            f"{', '.join(WORDS)}, or a name of an axis of space such as x. Write {name}: [trajectory, time, "
            f"x], or {name}: {{array: NAME, axes: [..], fields: [..]}}."
        )
    for axis in axes:
        if axes.count(axis) > 1 + (axis == "component") and axis != "single":
            raise ConfigError(f"{key}: it names {axis} twice; expected each axis once. Correct the words.")
        if (word := canonical_word(axis)) != axis:
            raise ConfigError(
                f"{key}: it names an axis {axis!r}; expected one of {', '.join(WORDS)}, or a name of an axis "
                f"of space. Write {word}."
            )
    fields = entry.get("fields") or (field_of(name),)
    if not isinstance(fields, list | tuple) or not all(re.fullmatch(r"\w+", str(field)) for field in fields):
        raise ConfigError(
            f"{key}.fields: it is {fields!r:.80}; expected a list of names of letters, digits and _ (figures "
            f"go by them). Write fields: [{field_of(name)}]."
        )
    return Place(str(entry.get("array", name)), tuple(axes), tuple(fields))


def _check_order(key: str, place: Place, axes: Sequence[str], vector: Any, store: Store) -> None:
    """Raise ValueError if words are in another order than the file's own names of the axes, or if the order
    of a vector's components is not known."""
    names = store.first_array(place.array).axes
    for word, stored in zip(place.axes, names, strict=False):
        name = canonical_word(stored).lower()
        if name != word.lower() and name in {axis.lower() for axis in place.axes}:
            raise ConfigError(
                f"{key}.layout.{place.array}: it calls an axis {word} that the file calls {stored}; expected "
                f"the order of the axes in {store.path}, {', '.join(names)}. Correct the order of the words."
            )
    is_unordered = {*axes} <= {*"xyz"} and [*axes] != sorted(axes)
    if "component" in place.axes and is_unordered and not vector:
        components = [f"{place.fields[0]}_{axis}" for axis in axes]
        raise ConfigError(
            f"{key}.layout.{place.array}: its axes are stored in the order {', '.join(axes)}, and nothing "
            "says whether its components are, too; expected a name for each component. Write fields: "
            f"{sorted(components)} in the order in which they are stored, and {key}.vector: {components}, "
            "the component along each axis."
        )


def _check_names(key: str, domain: Any, places: Sequence[Place], axes: Sequence[str], store: Store) -> None:
    """Raise ValueError for an axis of an unusual name that has neither a domain of its own nor coordinates:
    it may be a misspelt word."""
    unusual = [axis for axis in axes if axis.lower() not in SPACE and not re.fullmatch(r"[xyz]_?\d?", axis)]
    if not unusual or len(axes) == 1 or isinstance(domain, Mapping):
        return
    if coordinate(store, places, [unusual[0]]) is None:
        raise ConfigError(
            f"{key}.layout: it names an axis {unusual[0]!r} beside {axes[axes[0] == unusual[0]]}; expected "
            "trajectory, time, channel, component, or an axis of space with a domain of its own. Correct "
            f"the word, or write domain: {{{unusual[0]}: [0, 1], ..}}."
        )


def _name_fields(key: str, place: Place, axes: Sequence[str], store: Store) -> Place:
    """The array with a name for every field: NAME, NAME_x and NAME_y of a vector, NAME_0 .. of channels."""
    shape = dict(zip(place.axes, store.first_array(place.array).shape, strict=True))
    rank = place.axes.count("component")
    if rank and shape["component"] != len(axes):
        raise ConfigError(
            f"{key}.layout.{place.array}: its components are {shape['component']}; expected {len(axes)}, one "
            f"per axis of space ({', '.join(axes)}). Call that axis channel, or correct the words."
        )
    names = field_names(place.fields[0], shape.get("channel"), rank, axes)
    if len(place.fields) == 1:
        return Place(place.array, place.axes, tuple(names))
    if len(place.fields) != len(names):
        raise ConfigError(
            f"{key}.layout.{place.array}.fields: it names {len(place.fields)}; expected {len(names)}, one "
            "per channel. Correct the list."
        )
    return place


def field_names(name: str, num_channels: int | None, rank: int, axes: Sequence[str]) -> list[str]:
    """The fields of an array: NAME_0 .. of channels, each a scalar, a vector or a tensor (rank 0, 1, 2)."""
    channels = [""] if num_channels is None else [f"_{i}" for i in range(num_channels)]
    suffixes = {0: [""], 1: [f"_{a}" for a in axes], 2: [f"_{a}{b}" for a in axes for b in axes]}[rank]
    return [f"{name}{channel}{suffix}" for channel in channels for suffix in suffixes]
