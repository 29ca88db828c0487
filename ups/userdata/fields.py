"""The keys of a section that name fields or parameters: inputs, forcing, positive, conserved, bounded,
vector, symmetries, parameters and units."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ups.common.lazy import np
from ups.common.text import MOST_NAME_BYTES, printable
from ups.tasks import Place
from ups.userdata.inspect_file import Coordinate, config_error, is_even, require_common_place, value_in
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


def check_fields(key: str, section: Mapping[str, Any], layout: Layout, moving: Sequence[str]) -> None:
    """Raise ValueError unless the lists of fields name fields, and a steady task its coefficient.

    moving: the fields that change in time and are predicted.
    """
    fields = layout.fields
    if repeated := [field for field in fields if fields.count(field) > 1]:
        raise config_error(
            f"{key}.layout",
            f"two arrays give a field {repeated[0]}",
            "a name for each",
            "Write {array: NAME, axes: [..], fields: [..]}.",
        )
    for name in ("inputs", "positive", "conserved", "bounded", "vector", "symmetries"):
        known = moving if name in ("conserved", "bounded") else fields
        if not isinstance(section[name], list):
            raise config_error(
                f"{key}.{name}",
                f"it is {section[name]!r:.80}",
                "a list",
                f"Write {name}: [{'shift' if name == 'symmetries' else known[0]}].",
            )
        unknown = [field for field in section[name] if field not in known and name != "symmetries"]
        if unknown:
            is_given = ", which is given and does not change" if unknown[0] in fields else ""
            raise config_error(
                f"{key}.{name}",
                f"it names {unknown[0]!r:.80}{is_given}",
                f"fields of the layout ({', '.join(known)})",
                "Correct the list.",
            )
    inputs = section["inputs"]
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


def check_forcing(key: str, forcing: Any, layout: Layout) -> None:
    """Raise ValueError unless `forcing` names fields that vary in time and leaves one to predict."""
    key, fields, constant = f"{key}.forcing", layout.fields, layout.constant
    names = forcing if isinstance(forcing, list) else [None]
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise config_error(
            key, f"it is {forcing!r:.80}", "a list of different names", f"Write forcing: [{fields[-1]}]."
        )
    if unknown := [name for name in forcing if name not in fields]:
        raise config_error(
            key,
            f"it names {unknown[0]!r:.80}",
            f"fields of the layout ({', '.join(fields)})",
            f"Correct the list, or add the array to {key.removesuffix('forcing')}layout: fields as "
            "[trajectory, time, x], series as [trajectory, time] or [time].",
        )
    if forcing and len(constant) == len(fields):
        raise config_error(
            key,
            f"it names {forcing[0]}, and no array has a time axis, so the task is steady",
            "none",
            f"Write inputs: [{forcing[0]}], which is what a steady task is given.",
        )
    if fixed := [name for name in forcing if name in constant]:
        raise config_error(
            key,
            f"it names {fixed[0]}, whose array has no time axis",
            "what varies in time",
            f"Leave {fixed[0]} out: fields without a time axis are given already.",
        )
    if forcing and not {*fields} - {*forcing, *constant}:
        raise config_error(
            key,
            f"it is {forcing}, so nothing is predicted",
            "fields beside those that are predicted",
            "Take out what is to be predicted.",
        )


def check_symmetries(key: str, section: Mapping[str, Any], layout: Layout, ends: Mapping[str, str]) -> None:
    """Raise ValueError unless shifts are along periodic axes, and every vector has a field per axis."""
    axes, vector = layout.axes, section["vector"]
    fields = [field for field in layout.fields if field not in section["inputs"]]
    periodic = [axis for axis, end in ends.items() if end == PERIODIC]
    known = ["mirror", *["shift"] * bool(periodic), *[f"shift_{axis}" for axis in periodic]]
    if unknown := [name for name in section["symmetries"] if name not in known]:
        raise config_error(
            f"{key}.symmetries",
            f"it names {unknown[0]!r:.80}",
            f"of {', '.join(known)}" + ("" if periodic else "; shifts need a periodic axis"),
            "Leave out what shifted and mirrored solutions do not keep.",
        )
    if len(vector) % len(axes) or len({*vector} & {*fields}) != len(vector):
        raise config_error(
            f"{key}.vector",
            f"it is {vector}",
            f"{len(axes)} of {', '.join(fields)}, the component along each axis of space "
            f"({', '.join(axes)}), of one vector after the other",
            "Correct the list.",
        )


def read_units(
    key: str, units: Any, layout: Layout, dt: float, found: Mapping[str, Coordinate | None], store: "Store"
) -> dict[str, str]:
    """Field, axis or "time" -> its unit, of those that have one: from the section, else from the file.

    dt: the step of the task, 0 of a steady one; found: the coordinates of the axes. Raises ValueError if
    `units` is no mapping of names to text.
    """
    places = {field: place for place in layout.places for field in place.fields}
    known = [*places, *layout.axes, *["time"] * bool(dt)]
    if not isinstance(units, Mapping) or not all(isinstance(unit, str) for unit in units.values()):
        raise config_error(
            f"{key}.units",
            f"it is {units!r:.80}",
            "names of fields and axes, each with a unit",
            f'Write units: {{{known[0]}: "m s-1"}}.',
        )
    if unknown := [name for name in units if name not in known]:
        raise config_error(
            f"{key}.units", f"it names {unknown[0]!r:.80}", f"of {', '.join(known)}", "Correct the name."
        )
    stored = {field: _unit(store, store.first(place.array)) for field, place in places.items()}
    stored |= {axis: _unit(store, place[0]) for axis, place in found.items() if place}
    times = times_in(store, layout.places) if dt else None
    if times and len(steps := np.diff(times[1])):
        if is_even(times[1]) or abs(float(np.median(steps)) - dt) <= SAME * dt:
            stored["time"] = _unit(store, times[0]).split(" since ")[0]
    return {name: unit for name, unit in (stored | dict(units)).items() if unit not in ("", "1")}


def _unit(store: "Store", array: str) -> str:
    unit = store.attributes(array).get("units", "")
    unit = unit.decode(errors="replace") if isinstance(unit, bytes) else unit
    unit = printable(" ".join(unit.replace("\0", " ").split())) if isinstance(unit, str) else ""
    return unit if len(unit) <= MOST_NAME_BYTES else ""  # a longer text is no unit
