"""The section of a configuration that declares the user's files, in task.NAME.

    ks: {files: "my/*.h5", layout: {u: [trajectory, time, x]}, boundary: periodic, domain: [0, 64], dt: 0.5}

`complete` fills every key that the section leaves open; ups/userdata/trajectories.py reads the files.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ups.common.text import require_plain_text
from ups.tasks import TASKS, require_name
from ups.userdata.fields import check_fields, check_forcing, check_symmetries, read_parameters, read_units
from ups.userdata.grid import (
    find_coordinates,
    flipped_axes,
    read_boundary,
    read_domain,
    without_repeated,
)
from ups.userdata.inspect_file import UNEVEN, config_error, matching_files, tidy
from ups.userdata.layout import Layout, read_layout
from ups.userdata.masks import missing_values
from ups.userdata.offset import offsets
from ups.userdata.the_well import from_well
from ups.userdata.times import read_step

if TYPE_CHECKING:
    from ups.userdata.readers import Store

# the keys of a section; 0, [], "" and None stand for "as the files show"
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("files", "boundary", "times", "solver"), ""),
    **dict.fromkeys(("layout", "coordinates", "offset", "units"), {}),
    **dict.fromkeys(("inputs", "forcing", "positive", "conserved", "bounded", "symmetries", "vector"), []),
    **dict.fromkeys(("domain", "resolution", "flipped", "repeated", "missing", "base"), []),
    **dict.fromkeys(("num_trajectories", "num_frames", "first_frame", "train_from", "cut"), 0),
    **dict.fromkeys(("patch", "dim", "reach"), 0),
    **dict.fromkeys(("space_stride", "time_stride", "history", "bundle"), 1),
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
    from ups.userdata.readers import open_store  # imports h5py

    require_name(name)
    key = f"task.{name}"
    section = {**section, "files": _pattern(key, section["files"])}
    if name in TASKS:
        raise config_error(
            key,
            "it declares files under the name of a built-in task",
            "a name of its own",
            f"Write another in place of {name}, here and in data.tasks.",
        )
    paths = matching_files(key, section["files"])
    with open_store(paths[0]) as store:
        if isinstance(section["layout"], str):
            section = _from_known_layout(key, section, store)
        layout = read_layout(key, section, store)
        ends = dict(zip(layout.axes, read_boundary(key, section["boundary"], layout.axes), strict=True))
        layout = Layout(layout.places, without_repeated(key, section["repeated"], layout.sizes, ends))
        section |= _read_axes(key, section, layout, ends, store)
        section |= read_step(key, section, layout, store)
        coordinates = find_coordinates(key, section["coordinates"], layout.axes, layout.places, store)
        section["units"] = read_units(key, section["units"], layout, section["dt"], coordinates, store)
        section["parameters"] = read_parameters(key, section["parameters"] or {}, store, layout.places)
        groups = len(store.groups(layout.places[0].array)) if "*" in layout.places[0].array else 1
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


def _pattern(key: str, files: Any) -> str:
    """The pattern of a section's files."""
    if not isinstance(files, str):
        raise config_error(
            f"{key}.files",
            f"it is {files!r:.80}",
            "a file or a pattern of files, each with all fields",
            'Write files: "my/*.h5". To merge fields: docs/own_data.md, "Files to convert first".',
        )
    return files


def _from_known_layout(key: str, section: dict[str, Any], store: "Store") -> dict[str, Any]:
    """A section whose layout is well, filled from the file; the user's values stay."""
    if (kind := section["layout"]) != "well":
        raise config_error(
            f"{key}.layout",
            f"it is {kind!r:.80}",
            "the arrays with their axes, or well, for a file of The Well",
            f"Write it so; python -m ups describe {store.path} helps.",
        )
    found = from_well(store)
    open_keys = {name: value for name, value in found.items() if section[name] == DEFAULTS[name]}
    return {**section, **open_keys, "layout": found["layout"]}


def _read_axes(
    key: str, section: Mapping[str, Any], layout: Layout, ends: Mapping[str, str], store: "Store"
) -> dict[str, Any]:
    """boundary, coordinates, domain and flipped."""
    domain, names = section["domain"], dict(section["coordinates"])
    named = domain if isinstance(domain, Mapping) else dict.fromkeys(layout.axes, domain)
    names |= {axis: name for axis, name in named.items() if isinstance(name, str) and name}
    found = find_coordinates(key, names, layout.axes, layout.places, store)
    return {
        "boundary": ends[layout.axes[0]] if len({*ends.values()}) == 1 else ",".join(ends.values()),
        "coordinates": names,
        "domain": {
            axis: read_domain(key, domain, axis, end, layout.sizes[axis], found[axis], store)
            for axis, end in ends.items()
        },
        "flipped": flipped_axes(key, section["flipped"], found),
    }


def _read_fields(
    key: str, section: Mapping[str, Any], layout: Layout, ends: Mapping[str, str]
) -> dict[str, Any]:
    """bounded and vector, after checks of all keys that name fields."""
    check_forcing(key, section["forcing"], layout)
    constant = [] if layout.is_steady else layout.constant
    known = [*constant, *section["inputs"], *section["forcing"]]
    moving = [field for field in layout.fields if field not in known]
    bounded = section["bounded"]
    if isinstance(bounded, bool):
        bounded = moving if bounded else []
    check_fields(key, {**section, "bounded": bounded}, layout, moving)
    check_symmetries(key, section, layout, ends)
    vectors = [list(place.fields) for place in layout.places if place.axes.count("component") == 1]
    return {"bounded": bounded, "vector": section["vector"] or next(iter(vectors), [])}


def _read_sizes(key: str, section: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """resolution, num_frames and t_end."""
    resolution, frames = [layout.sizes[axis] for axis in layout.axes], layout.sizes.get("time", 1)
    if section["resolution"] not in ([], resolution):
        raise config_error(
            f"{key}.resolution",
            f"it is {section['resolution']}",
            f"{resolution}, as the files show",
            f"Leave it out; {key}.space_stride takes every n-th cell.",
        )
    cut, dt = section["cut"], section["dt"]
    if cut and not (isinstance(cut, int) and 2 <= cut <= frames):
        raise config_error(
            f"{key}.cut",
            f"it is {cut!r:.80}",
            f"2 to {frames}, the frames of a run",
            f"Write cut: {max(2, frames // 30)}, the frames of each of the windows it is cut into.",
        )
    num_frames = cut + section["first_frame"] if cut else section["num_frames"] or frames
    t_end = tidy(dt * (num_frames - 1))
    if section["t_end"] and abs(section["t_end"] - t_end) > UNEVEN * dt:
        raise config_error(
            f"{key}.t_end",
            f"it is {section['t_end']:g}",
            f"{t_end:g}: {num_frames} frames, {dt:g} apart",
            f"Leave it out; {key}.num_frames takes fewer frames.",
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
