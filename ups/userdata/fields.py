"""The keys of a section that name fields or parameters: inputs, forcing, positive, conserved, bounded,
vector, symmetries, parameters and units."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ups.common.lazy import np
from ups.common.text import MOST_NAME_BYTES, printable
from ups.tasks import Place
from ups.userdata.inspect_file import (
    Coordinate,
    config_error,
    is_even,
    require_common_place,
    require_known,
    value_in,
)
from ups.userdata.layout import Layout
from ups.userdata.times import times_in
from ups_discovery.boundary import PERIODIC

if TYPE_CHECKING:
    from ups.userdata.readers import Store

MOST_PARAMETERS = 3
SAME = 0.1  # of a step of the file's times: a dt that is further off counts in another unit


def read_parameters(key: str, parameters: Any, store: "Store", places: Sequence[Place]) -> dict[str, str]:
    """Name -> place of its value: an attribute, an array, a number or an attribute of every run, or a pattern
    of the file's name with {}. Raises ValueError if the file holds no number there."""
    if isinstance(parameters, list):
        parameters = {str(name): str(name) for name in parameters}
    if not isinstance(parameters, Mapping) or len(parameters) > MOST_PARAMETERS:
        raise config_error(
            f"{key}.parameters",
            f"it is {parameters!r:.120}",
            f"at most {MOST_PARAMETERS} names, each with the attribute, the array or the pattern of file "
            "names that holds it",
            'Write parameters: {nu: nu}, or parameters: {nu: "run_nu{}_*"}; leave out what does not vary.',
        )
    arrays = [place.array for place in places]
    group = next((store.groups(array)[0] for array in arrays if "*" in array), "")
    found = {str(name): str(place) for name, place in parameters.items()}
    for name, place in found.items():
        require_common_place(key, store, name, place, arrays)
        value_in(key, store, name, place, arrays, group)
    return found


def check_fields(key: str, section: Mapping[str, Any], layout: Layout, ends: Mapping[str, str]) -> None:
    """Raise ValueError unless the lists name fields and symmetries, a steady task has a coefficient,
    something is predicted, and every vector has a field per axis."""
    fields, axes, inputs, vector = layout.fields, layout.axes, section["inputs"], section["vector"]
    if repeated := [field for field in fields if fields.count(field) > 1]:
        raise config_error(
            f"{key}.layout",
            f"two arrays give a field {repeated[0]}",
            "a name for each",
            "Write {array: NAME, axes: [..], fields: [..]}.",
        )
    varying = [field for field in fields if field not in layout.constant]
    moving = moving_fields(section, layout)
    periodic = [axis for axis, end in ends.items() if end == PERIODIC]
    shifts = ["mirror", *["shift"] * bool(periodic), *[f"shift_{axis}" for axis in periodic]]
    for names, known, expected in (
        (("inputs", "positive", "vector"), fields, "fields of the layout"),
        (("forcing",), varying, "fields of the layout that vary in time"),
        (("conserved", "bounded"), moving, "fields that are predicted"),
        (("symmetries",), shifts, "symmetries (shifts need a periodic axis)"),
    ):
        for name in names:
            require_known(f"{key}.{name}", section[name], known, expected)
    if layout.is_steady != bool(inputs) or {*fields} == {*inputs}:
        kind = "no array has a time axis, so the task is steady"
        raise config_error(
            f"{key}.inputs",
            f"it is {inputs}, and {kind if layout.is_steady else 'some array has a time axis'}",
            f"the coefficient among {', '.join(fields)}, from which the others follow"
            if layout.is_steady
            else "none: fields without a time axis are coefficients already",
            f"Write inputs: [{fields[0]}]." if layout.is_steady else "Leave it out.",
        )
    if not moving:
        raise config_error(
            f"{key}.forcing",
            f"it is {section['forcing']}, so nothing is predicted",
            "fields beside those that are predicted",
            "Take out what is to be predicted.",
        )
    others = {*fields} - {*inputs}
    if len(vector) % len(axes) or len({*vector} & others) != len(vector):
        raise config_error(
            f"{key}.vector",
            f"it is {vector}",
            f"{len(axes)} of {', '.join(field for field in fields if field in others)}, the component along "
            f"each axis of space ({', '.join(axes)}), of one vector after the other",
            "Correct the list.",
        )


def moving_fields(section: Mapping[str, Any], layout: Layout) -> list[str]:
    """The fields that change and are predicted."""
    known = [*([] if layout.is_steady else layout.constant), *section["inputs"], *section["forcing"]]
    return [field for field in layout.fields if field not in known]


def read_units(
    key: str,
    units: Mapping[str, str],
    layout: Layout,
    dt: float,
    found: Mapping[str, Coordinate | None],
    store: "Store",
) -> dict[str, str]:
    """Field, axis or "time" -> its unit, of those that have one: from the section, else from the file.

    dt: the step of the task, 0 of a steady one; found: the coordinates of the axes. Raises ValueError for
    another name.
    """
    places = {field: place for place in layout.places for field in place.fields}
    known = [*places, *layout.axes, *["time"] * bool(dt)]
    require_known(f"{key}.units", units, known, "fields, axes or time")
    stored = {field: _unit(store, store.first(place.array)) for field, place in places.items()}
    stored |= {axis: _unit(store, place[0]) for axis, place in found.items() if place}
    times = times_in(store, layout.places) if dt else None
    if times and len(steps := np.diff(times[1])):
        if is_even(times[1]) or abs(float(np.median(steps)) - dt) <= SAME * dt:
            stored["time"] = _unit(store, times[0]).split(" since ")[0]
    return {name: unit for name, unit in (stored | units).items() if unit not in ("", "1")}


def _unit(store: "Store", array: str) -> str:
    unit = store.attributes(array).get("units", "")
    unit = unit.decode(errors="replace") if isinstance(unit, bytes) else unit
    unit = printable(" ".join(unit.replace("\0", " ").split())) if isinstance(unit, str) else ""
    return unit if len(unit) <= MOST_NAME_BYTES else ""  # a longer text is no unit
