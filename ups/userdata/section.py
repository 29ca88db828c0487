"""The section of a configuration that declares the user's files, in task.NAME.

    ks: {files: "my/*.h5", layout: {u: [trajectory, time, x]}, boundary: periodic, domain: [0, 64], dt: 0.5}

`complete` fills every key that the section leaves open; ups/userdata/trajectories.py reads the files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ups.common.lazy import np
from ups.common.text import MOST_NAME_BYTES, printable, require_plain_text
from ups.tasks import TASKS, Place, require_name
from ups.userdata.grid import (
    find_coordinates,
    flipped_axes,
    read_boundary,
    read_domain,
    without_repeated,
)
from ups.userdata.inspect_file import (
    UNEVEN,
    ConfigError,
    Coordinate,
    is_even,
    matching_files,
    require_common_place,
    require_known,
    tidy,
    value_in,
)
from ups.userdata.layout import Layout, read_layout
from ups.userdata.masks import missing_values
from ups.userdata.offset import offsets
from ups.userdata.readers import Store, open_store
from ups.userdata.the_well import from_well
from ups.userdata.times import read_step, times_in
from ups_discovery.boundary import PERIODIC

MOST_PARAMETERS = 3
SAME = 0.1  # of a step of the file's times: a dt that is further off counts in another unit
# the keys of a section; 0, [], "" and None stand for "as the files show"
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("files", "boundary", "times", "solver"), ""),
    **dict.fromkeys(("layout", "coordinates", "offset", "units"), {}),
    **dict.fromkeys(("inputs", "forcing", "positive", "conserved", "bounded", "symmetries", "vector"), []),
    **dict.fromkeys(("domain", "resolution", "flipped", "repeated", "missing", "base"), []),
    **dict.fromkeys(("num_trajectories", "num_frames", "first_frame", "train_from", "cut"), 0),
    **dict.fromkeys(("patch", "dim", "reach"), 0),
    **dict.fromkeys(("space_stride", "time_stride", "history"), 1),
    **dict.fromkeys(("dt", "t_end", "reserve"), 0.0),
    **dict.fromkeys(("hidden", "skip_missing"), False),
    "parameters": None,
    "split": "auto",
    "energy": 1.0,
    "degree": 3,
}


def complete(name: str, section: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The section with a value for every key but patch, from the first file that it names, and the number of
    trajectories or windows if all files have as many as that one.

    Raises ValueError or FileNotFoundError, which name the key and what to write there.
    """
    require_name(name)
    key, section = f"task.{name}", dict(section)
    if name in TASKS:
        raise ConfigError(
            f"{key}: it declares files under the name of a built-in task; expected a name of its own. Write "
            f"another in place of {name}, here and in data.tasks."
        )
    paths = matching_files(key, section["files"])
    with open_store(paths[0]) as store:
        if isinstance(section["layout"], str):
            section = _from_known_layout(key, section, store)
        layout = read_layout(key, section, store)
        ends = dict(zip(layout.axes, read_boundary(key, section["boundary"], layout.axes), strict=True))
        layout = Layout(layout.places, without_repeated(key, section["repeated"], layout.sizes, ends))
        section["boundary"] = ",".join(ends.values()) if len({*ends.values()}) > 1 else ends[layout.axes[0]]
        domain = section["domain"]
        named = domain if isinstance(domain, Mapping) else dict.fromkeys(layout.axes, domain)
        named = {axis: name for axis, name in named.items() if isinstance(name, str) and name}
        section["coordinates"] = section["coordinates"] | named
        found = find_coordinates(key, section["coordinates"], layout.axes, layout.places, store)
        section["domain"] = {
            axis: read_domain(key, domain, axis, end, layout.sizes[axis], found[axis], store)
            for axis, end in ends.items()
        }
        section["flipped"] = flipped_axes(key, section["flipped"], found)
        section |= read_step(key, section, layout, store)
        section["units"] = read_units(key, section["units"], layout, section["dt"], found, store)
        section["parameters"] = read_parameters(key, section["parameters"] or {}, store, layout.places)
        groups = len(store.runs(layout.places[0].array))
    section |= _read_fields(key, section, layout, ends)
    section["missing"] = missing_values(key, section["missing"])
    section["offset"] = offsets(key, section, paths, layout)
    section |= _read_sizes(key, section, layout)
    section["base"] = section["base"] or _usual_bases(section, layout)
    section["degree"] = 0 if layout.is_steady else section["degree"]
    section["layout"] = {
        place.array: {"array": place.array, "axes": list(place.axes), "fields": list(place.fields)}
        for place in layout.places
    }
    require_plain_text(section, key)
    windows = layout.sizes.get("time", 1) // section["cut"] if section["cut"] else 1
    num = len(paths) * groups * layout.sizes.get("trajectory", 1) * windows
    return section, min(num, section["num_trajectories"] or num)


def facts(settings: Any) -> dict[str, Any]:
    """The facts of a complete section for `ups.tasks.make_user_task`: plain values, which weights carry."""
    optional = {  # weights of before have none of these
        "offset": settings.offset,
        "forcing": settings.forcing,
        "flipped": settings.flipped,
        "repeated": settings.repeated,
        "units": settings.units,
        "missing": settings.missing,
    }
    return {
        "arrays": [
            {"array": place.array, "axes": place.axes, "fields": place.fields}
            for place in settings.layout.values()
        ],
        "axes": list(settings.domain),
        "boundary": settings.boundary,
        "domain": list(settings.domain.values()),
        "coordinates": settings.coordinates,
        "inputs": settings.inputs,
        "parameters": settings.parameters,
        "times": settings.times,
        "positive": settings.positive,
        "conserved": settings.conserved,
        "bounded": settings.bounded,
        "symmetries": settings.symmetries,
        "vector": settings.vector,
        "hidden": settings.hidden,
        **{name: value for name, value in optional.items() if value},
    }


def _from_known_layout(key: str, section: dict[str, Any], store: Store) -> dict[str, Any]:
    """A section whose layout is well, filled from the file; the user's values stay."""
    if (kind := section["layout"]) != "well":
        raise ConfigError(
            f"{key}.layout: it is {kind!r:.80}; expected the arrays with their axes, or well, for a file of "
            f"The Well. Write it so; python -m ups describe {store.path} helps."
        )
    found = from_well(store)
    open_keys = {name: value for name, value in found.items() if section[name] == DEFAULTS[name]}
    return {**section, **open_keys, "layout": found["layout"]}


def _read_fields(
    key: str, section: Mapping[str, Any], layout: Layout, ends: Mapping[str, str]
) -> dict[str, Any]:
    """bounded and vector, after checks of all keys that name fields."""
    bounded = section["bounded"]
    if isinstance(bounded, bool):
        bounded = moving_fields(section, layout) if bounded else []
    check_fields(key, {**section, "bounded": bounded}, layout, ends)
    vectors = [list(place.fields) for place in layout.places if place.axes.count("component") == 1]
    return {"bounded": bounded, "vector": section["vector"] or next(iter(vectors), [])}


def _read_sizes(key: str, section: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """resolution, num_frames and t_end."""
    resolution, frames = [layout.sizes[axis] for axis in layout.axes], layout.sizes.get("time", 1)
    if section["resolution"] not in ([], resolution):
        raise ConfigError(
            f"{key}.resolution: it is {section['resolution']}; expected {resolution}, as the files show. "
            f"Leave it out; {key}.space_stride takes every n-th cell."
        )
    cut, dt = section["cut"], section["dt"]
    if cut and not (isinstance(cut, int) and 2 <= cut <= frames):
        raise ConfigError(
            f"{key}.cut: it is {cut!r:.80}; expected 2 to {frames}, the frames of a run. Write cut: "
            f"{max(2, frames // 30)}, the frames of each of the windows it is cut into."
        )
    num_frames = cut + section["first_frame"] if cut else section["num_frames"] or frames
    t_end = tidy(dt * (num_frames - 1))
    if section["t_end"] and abs(section["t_end"] - t_end) > UNEVEN * dt:
        raise ConfigError(
            f"{key}.t_end: it is {section['t_end']:g}; expected {t_end:g}: {num_frames} frames, {dt:g} "
            f"apart. Leave it out; {key}.num_frames takes fewer frames."
        )
    return {"resolution": resolution, "num_frames": num_frames, "t_end": t_end}


def _usual_bases(section: Mapping[str, Any], layout: Layout) -> Sequence[str]:
    """The bases that are tried if the section names none."""
    bases = (
        ["mean", "elliptic"]
        if layout.is_steady
        else ["persistence", "propagator", "coefficients", "equation"]
    )
    if not section["symmetries"]:
        bases.append("linear")
    if len(layout.axes) > 1 and section["vector"] and not layout.is_steady:
        bases.append("flow")
    return bases


# ---------------------------------------------------------------- fields, parameters and units


def read_parameters(key: str, parameters: Any, store: Store, places: Sequence[Place]) -> dict[str, str]:
    """Name -> place of its value: an attribute, an array, a number or an attribute of every run, or a pattern
    of the file's name with {}. Raises ValueError if the file holds no number there."""
    if isinstance(parameters, list):
        parameters = {str(name): str(name) for name in parameters}
    if not isinstance(parameters, Mapping) or len(parameters) > MOST_PARAMETERS:
        raise ConfigError(
            f"{key}.parameters: it is {parameters!r:.120}; expected at most {MOST_PARAMETERS} names, each "
            "with the attribute, the array or the pattern of file names that holds it. Write parameters: "
            '{nu: nu}, or parameters: {nu: "run_nu{}_*"}; leave out what does not vary.'
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
        raise ConfigError(
            f"{key}.layout: two arrays give a field {repeated[0]}; expected a name for each. Write {{array: "
            "NAME, axes: [..], fields: [..]}."
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
        if layout.is_steady:
            known = f"the coefficient among {', '.join(fields)}, from which the others follow"
            why, fix = "no array has a time axis, so the task is steady", f"Write inputs: [{fields[0]}]."
        else:
            known = "none: fields without a time axis are coefficients already"
            why, fix = "some array has a time axis", "Leave it out."
        raise ConfigError(f"{key}.inputs: it is {inputs}, and {why}; expected {known}. {fix}")
    if not moving:
        raise ConfigError(
            f"{key}.forcing: it is {section['forcing']}, so nothing is predicted; expected fields beside "
            "those that are predicted. Take out what is to be predicted."
        )
    others = {*fields} - {*inputs}
    if len(vector) % len(axes) or len({*vector} & others) != len(vector):
        raise ConfigError(
            f"{key}.vector: it is {vector}; expected {len(axes)} of "
            f"{', '.join(field for field in fields if field in others)}, the component along each axis of "
            f"space ({', '.join(axes)}), of one vector after the other. Correct the list."
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
    store: Store,
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


def _unit(store: Store, array: str) -> str:
    unit = store.attributes(array).get("units", "")
    unit = unit.decode(errors="replace") if isinstance(unit, bytes) else unit
    unit = printable(" ".join(unit.replace("\0", " ").split())) if isinstance(unit, str) else ""
    return unit if len(unit) <= MOST_NAME_BYTES else ""  # a longer text is no unit
