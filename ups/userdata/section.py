"""Data of the user's own, declared in section task.NAME: what is said, what the first file shows, one line
for whatever does not fit, that says what to write where.

    ks: {files: "my/*.h5", layout: {u: [trajectory, time, x]}, boundary: periodic, domain: [0, 64], dt: 0.5}

`complete` makes a section of it in which nothing is left open; the files are read by ups/userdata/reader.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.common.boundary import BOUNDARIES, PERIODIC
from ups.common.files import TOGETHER
from ups.common.lazy import np
from ups.tasks import TASKS, Place, require_name
from ups.userdata.axis_names import WORDS, check_words, meant
from ups.userdata.forcing import check_forcing
from ups.userdata.grid import flipped, patch_for, span
from ups.userdata.inspect_file import (
    NO_TIMES,
    UNEVEN,
    coordinate,
    even_step,
    is_even,
    jumps_in,
    matches,
    measure,
    names_of_times,
    step_in,
    tidy,
    value_in,
    wrong,
)
from ups.userdata.known_layouts import FOREIGN
from ups.userdata.missing_values import missing_values
from ups.userdata.offset import offsets
from ups.userdata.units import units

if TYPE_CHECKING:
    from ups.userdata.readers import Store

# of a section that declares: what may be left out, and what stands for "as the files show" (0, [], "", null)
DEFAULTS: dict[str, Any] = {
    "files": "",
    "layout": {},
    "inputs": [],
    "forcing": [],
    "boundary": "",
    "domain": [],
    "coordinates": {},
    "dt": 0.0,
    "times": "",
    "parameters": None,
    "positive": [],
    "conserved": [],
    "bounded": [],
    "symmetries": [],
    "vector": [],
    "hidden": False,
    "offset": {},
    "flipped": [],
    "repeated": [],
    "units": {},
    "cut": 0,
    "missing": [],
    "skip_missing": False,
    "split": "auto",
    "num_trajectories": 0,
    "resolution": [],
    "num_frames": 0,
    "t_end": 0.0,
    "space_stride": 1,
    "time_stride": 1,
    "first_frame": 0,
    "train_from": 0,
    "patch": 0,
    "dim": 0,
    "energy": 1.0,
    "history": 1,
    "bundle": 1,
    "degree": 3,
    "reach": 0,
    "reserve": 0.0,
    "base": [],
    "solver": "",
}
MOST_PARAMETERS = 3


def complete(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The section with every value that it leaves open, from the first file that it names. Raises ValueError
    or FileNotFoundError.
    """
    from ups.userdata.readers import open_store  # imports h5py

    require_name(name)
    key = f"task.{name}"
    said = dict(section)
    if isinstance(said["files"], list) and said["files"]:  # a pattern per file of a run
        said["files"] = TOGETHER.join(map(str, said["files"]))
    if not isinstance(said["files"], str):
        raise wrong(
            f"{key}.files",
            f"it is {said['files']!r:.80}",
            "a file or a pattern of files, or a list of patterns of files that go together",
            'Write files: "my/*.h5".',
        )
    if name in TASKS:
        raise wrong(
            key,
            "it declares files under the name of a built-in task",
            "a name of its own",
            f"Write another in place of {name}, here and in data.tasks.",
        )
    paths = matches(key, said["files"])
    path = Path(paths[0])
    with open_store(path) as store:
        if isinstance(said["layout"], str):
            said = _foreign(key, said, store)
        places = _places(key, said["layout"], store)
        if not places:
            raise wrong(
                f"{key}.layout",
                "it is empty",
                "the arrays and the words for their axes, such as {u: [trajectory, time, x]}",
                f"python prepare_data.py --describe {path} prints one; the file holds {store.listing()}.",
            )
        sizes = measure(key, store, places)
        axes = [axis for axis in sizes if axis not in WORDS]
        _check_axes(key, path, axes)
        if isinstance(said["domain"], Mapping) and (strange := [*said["domain"].keys() - {*axes}]):
            raise wrong(
                f"{key}.domain",
                f"it names an axis {strange[0]!r:.80}",
                f"of {', '.join(axes)}",
                f"Write domain: {{{axes[0]}: [0, 1]}}.",
            )
        check_words(key, said, places, axes, store)
        places = _named(key, places, axes, store)
        fields = [field for place in places for field in place.fields]
        said["boundary"] = _boundary(key, said["boundary"], axes)
        ends = said["boundary"].split(",") * (len(axes) if "," not in said["boundary"] else 1)
        sizes = _without_repeated(key, said["repeated"], sizes, dict(zip(axes, ends, strict=True)))
        if isinstance(said["domain"], Mapping):
            said["coordinates"] = said["coordinates"] | {
                axis: name for axis, name in said["domain"].items() if isinstance(name, str)
            }
        said["domain"] = {
            axis: span(
                key, said["domain"], axis, end, sizes[axis], store, places, said["coordinates"].get(axis, "")
            )
            for axis, end in zip(axes, ends, strict=True)
        }
        said["flipped"] = flipped(key, said["flipped"], axes, store, places, said["coordinates"])
        is_steady = "time" not in sizes
        said |= _time(key, said, store, places, sizes, is_steady)
        said["units"] = units(key, said["units"], store, places, axes, said["dt"], said["coordinates"])
        said["parameters"] = _parameters(key, said["parameters"] or {}, store, places, path)
    still = [] if is_steady else [field for place in places if place.is_steady for field in place.fields]
    check_forcing(key, said["forcing"], places)
    moving = [field for field in fields if field not in [*still, *said["inputs"], *said["forcing"]]]
    if isinstance(said["bounded"], bool):
        said["bounded"] = moving * said["bounded"]
    _names(key, said, fields, moving, is_steady)
    _symmetries(key, said, axes, ends, [field for field in fields if field not in said["inputs"]])
    said["vector"] = said["vector"] or next(
        (list(place.fields) for place in places if place.axes.count("component") == 1), []
    )
    said["missing"] = missing_values(key, said["missing"])
    said["offset"] = offsets(key, said, paths, places, axes, is_steady)
    said["layout"] = {
        place.array: {key: list(value) if key != "array" else value for key, value in vars(place).items()}
        for place in places
    }
    shown = [sizes[axis] for axis in axes]
    if said["resolution"] not in ([], shown):
        raise wrong(
            f"{key}.resolution",
            f"it is {said['resolution']}",
            f"{shown}, as the files show",
            f"Leave it out; {key}.space_stride takes every n-th cell.",
        )
    said["resolution"] = shown
    frames = sizes.get("time", 1)
    if said["cut"] and not (isinstance(said["cut"], int) and 2 <= said["cut"] <= frames):
        raise wrong(
            f"{key}.cut",
            f"it is {said['cut']!r:.80}",
            f"2 to {frames}, the frames of a run",
            f"Write cut: {max(2, frames // 30)}, the frames of each of the windows it is cut into.",
        )
    said["num_frames"] = said["cut"] + said["first_frame"] if said["cut"] else said["num_frames"] or frames
    t_end = tidy(said["dt"] * (said["num_frames"] - 1))
    if said["t_end"] and abs(said["t_end"] - t_end) > UNEVEN * said["dt"]:
        raise wrong(
            f"{key}.t_end",
            f"it is {said['t_end']:g}",
            f"{t_end:g}: {said['num_frames']} frames, {said['dt']:g} apart",
            f"Leave it out; {key}.num_frames takes fewer frames.",
        )
    said["t_end"] = t_end
    said["degree"] = 0 if is_steady else said["degree"]
    cells = [-(-size // max(1, said["space_stride"])) for size in said["resolution"]]
    said["patch"] = said["patch"] or patch_for(cells)
    usual = ["mean", "elliptic"] if is_steady else ["persistence", "propagator", "equation"]
    usual += ["linear"] * (not said["symmetries"])
    usual += ["flow"] * (len(axes) > 1 and bool(said["vector"]) and not is_steady)
    said["base"] = said["base"] or usual
    return said


def facts(settings: Any) -> dict[str, Any]:
    """What a complete section says of its task, for `ups.tasks.make_user_task`."""
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
        **{
            name: value
            for name, value in (
                ("offset", settings.offset),
                ("forcing", settings.forcing),
                ("flipped", settings.flipped),
                ("repeated", settings.repeated),
                ("units", settings.units),
                ("missing", settings.missing),
            )
            if value
        },
    }


def _foreign(key: str, said: dict[str, Any], store: "Store") -> dict[str, Any]:
    """The section with what a layout that goes by a name says of itself; what the user says stays."""
    kind = said["layout"]
    if kind not in FOREIGN:
        raise wrong(
            f"{key}.layout",
            f"it is {kind!r:.80}",
            f"the arrays with their axes, or one of {', '.join(FOREIGN)}",
            f"Write it so; python prepare_data.py --describe {store.path} helps.",
        )
    found = FOREIGN[kind](store)
    return {
        **said,
        **{name: value for name, value in found.items() if said[name] == DEFAULTS[name]},
        "layout": found["layout"],
    }


def _places(key: str, layout: Any, store: "Store") -> list[Place]:
    """The places of a layout; fields are named later, where channels are counted."""
    places = []
    if not isinstance(layout, Mapping):
        raise wrong(
            f"{key}.layout",
            f"it is {layout!r:.80}",
            "a mapping such as {u: [trajectory, time, x]}",
            "Write it so.",
        )
    for name, entry in layout.items():
        entry = entry if isinstance(entry, Mapping) else {"axes": entry}
        axes, strange = entry.get("axes"), sorted(set(entry) - {"array", "axes", "fields"})
        if (
            strange
            or not isinstance(axes, list)
            or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes)
        ):
            raise wrong(
                f"{key}.layout.{name}",
                f"it is {entry if strange else axes!r:.120}",
                f"one word per axis of the array: {', '.join(WORDS)}, or a name of an axis of space "
                f"such as x",
                f"Write {name}: [trajectory, time, x], or {name}: {{array: NAME, axes: [..], fields: [..]}}.",
            )
        repeated = [
            axis for axis in axes if axes.count(axis) > 1 + (axis == "component") and axis != "single"
        ]
        if repeated:
            raise wrong(
                f"{key}.layout.{name}",
                f"it names {repeated[0]} twice",
                "each axis once",
                "Correct the words.",
            )
        if strange := [axis for axis in axes if meant(axis) != axis]:
            raise wrong(
                f"{key}.layout.{name}",
                f"it names an axis {strange[0]!r}",
                f"one of {', '.join(WORDS)}, or a name of an axis of space",
                f"Write {meant(strange[0])}.",
            )
        own = re.sub(r"\W+", "_", str(name).removesuffix("/*").rsplit("/", 1)[-1]).strip("_") or "u"
        fields = tuple(entry.get("fields") or (own,))
        if isinstance(entry.get("fields"), str) or not all(re.fullmatch(r"\w+", str(f)) for f in fields):
            raise wrong(
                f"{key}.layout.{name}.fields",
                f"it is {entry['fields']!r:.80}",
                "a list of names of letters, digits and _ (figures go by them)",
                f"Write fields: [{own}].",
            )
        places.append(Place(str(entry.get("array", name)), tuple(axes), fields))
    return places


def _check_axes(key: str, path: Path, axes: Sequence[str]) -> None:
    if not 1 <= len(axes) <= 3:
        raise wrong(
            f"{key}.layout",
            f"it names {len(axes)} axes of space ({', '.join(axes) or 'none'})",
            f"1 to 3 besides {', '.join(WORDS)}",
            "Name them, such as x, y, z; an axis of another "
            "meaning is trajectory, time, channel or component.",
        )


def _without_repeated(key: str, said: Any, sizes: dict[str, int], ends: dict[str, str]) -> dict[str, int]:
    """The sizes without the last cells of periodic axes where those are the first again."""
    periodic = [axis for axis, end in ends.items() if end == PERIODIC]
    if not isinstance(said, list) or not {*said} <= {*periodic}:
        raise wrong(
            f"{key}.repeated",
            f"it is {said!r:.80}",
            "a list of periodic axes" + f", of {', '.join(periodic)}" * bool(periodic),
            "Name those whose last cell is the first again, or leave it out.",
        )
    return sizes | {axis: sizes[axis] - 1 for axis in said}


def _named(key: str, places: Sequence[Place], axes: Sequence[str], store: "Store") -> list[Place]:
    """The places with a name for every field: NAME, NAME_x and NAME_y of a vector, NAME_0 .. of channels."""
    named = []
    for place in places:
        shape = dict(zip(place.axes, store.array(store.first(place.array)).shape, strict=True))
        count, rank = shape.get("channel", 1), place.axes.count("component")
        if rank and shape["component"] != len(axes):
            raise wrong(
                f"{key}.layout.{place.array}",
                f"its components are {shape['component']}",
                f"{len(axes)}, one per axis of space ({', '.join(axes)})",
                "Call that axis channel, or correct the words.",
            )
        channels = [f"_{i}" for i in range(count)] if "channel" in shape else [""]
        names = [
            f"{place.fields[0]}{channel}{suffix}" for channel in channels for suffix in _suffixes(axes, rank)
        ]
        given = place.fields if len(place.fields) == len(names) and len(names) > 1 else None
        if len(place.fields) > 1 and given is None:
            raise wrong(
                f"{key}.layout.{place.array}.fields",
                f"it names {len(place.fields)}",
                f"{len(names)}, one per channel",
                "Correct the list.",
            )
        named.append(Place(place.array, place.axes, tuple(given or names)))
    return named


def _suffixes(axes: Sequence[str], rank: int) -> list[str]:
    """Of the components of a scalar, a vector or a tensor."""
    return {0: [""], 1: [f"_{a}" for a in axes], 2: [f"_{a}{b}" for a in axes for b in axes]}[rank]


def _boundary(key: str, said: Any, axes: Sequence[str]) -> str:
    """One name for all axes, or one per axis, joined."""
    per_axis = (
        [said.get(axis, "") for axis in axes]
        if isinstance(said, Mapping)
        else list(said)
        if isinstance(said, list)
        else str(said).split(",")
    )
    if (
        len(per_axis) not in (1, len(axes))
        or not {*map(str, per_axis)} <= {*BOUNDARIES}
        or (isinstance(said, Mapping) and {*said} != {*axes})
    ):
        raise wrong(
            f"{key}.boundary",
            f"it is {said!r:.80}" if said else "it is missing",
            f"one of {', '.join(BOUNDARIES)}, or one per axis ({', '.join(axes)})",
            f"Write boundary: periodic, or boundary: {{{', '.join(f'{axis}: no_flux' for axis in axes)}}}.",
        )
    return per_axis[0] if len({*per_axis}) == 1 else ",".join(per_axis)


def _time(
    key: str,
    said: Mapping[str, Any],
    store: "Store",
    places: Sequence[Place],
    sizes: Mapping[str, int],
    is_steady: bool,
) -> dict[str, Any]:
    """dt between stored frames, as said or as the frames' times show, and where these lie ("" if nowhere)."""
    if is_steady:
        return {"dt": 0.0, "times": ""}
    dt, frames = said["dt"], sizes["time"]
    asked = said["times"] or (dt if isinstance(dt, str) else "")
    usual = names_of_times(store, places)
    found = coordinate(store, places, [asked] if asked else usual)
    step = step_in(store, asked) if asked and found is None else None
    if asked and found is None and step is None:
        raise wrong(
            f"{key}.dt",
            f"{store.path} holds no array {asked!r} of times, and no attribute",
            "a number, or the name of one of these",
            f"Write dt: 0.1, or one that it holds: "
            f"{store.listing()}; attributes {', '.join(sorted(store.attributes())[:8]) or 'none'}.",
        )
    if step is not None:
        asked = asked if "@" in asked else f"@{asked}"  # an attribute
        dt, found = step if isinstance(dt, str) else dt, coordinate(store, places, usual)
    shown = step
    if found is not None and frames > 1:
        place, t = found
        if len(t) not in (frames, frames + 1):
            raise wrong(
                f"{key}.layout",
                f"the axis called time has {frames} frames and the array {place} in "
                f"{store.path} {len(t)} times",
                "as many (or one more)",
                f"Are the words in the order of the axes? {store.listing()}.",
            )
        is_said = dt and not isinstance(dt, str) and not is_even(t[:frames])
        if is_said and not (len(jumps_in(t[:frames])) and abs(np.median(np.diff(t)) - dt) <= UNEVEN * dt):
            return {"dt": float(dt), "times": NO_TIMES}  # what is said wins: months are equal steps
        shown = tidy(even_step(key, store, place, t[:frames]))
    if isinstance(dt, str) or not dt:
        if shown is None:
            raise wrong(
                f"{key}.dt",
                "it is missing, and the file holds no times",
                "the time between stored frames, or the name of the array of times",
                f"Write dt: 0.1; {store.path} holds {store.listing()}.",
            )
        dt = shown
    if isinstance(dt, bool) or not isinstance(dt, int | float) or not 0 < dt < math.inf:
        raise wrong(
            f"{key}.dt",
            f"it is {dt!r:.80}",
            "a number above zero, or the name of the array of times",
            "Write dt: 0.1.",
        )
    if shown is not None and abs(shown - dt) > UNEVEN * dt:
        raise wrong(
            f"{key}.dt",
            f"it is {dt:g}, and {found[0] if found else asked} in {store.path} has steps of {shown:g}",
            "what the file says",
            f"Write dt: {shown:g}, or leave it out.",
        )
    return {"dt": float(dt), "times": asked if step is not None else found[0] if asked else ""}


def _parameters(key: str, said: Any, store: "Store", places: Sequence[Place], path: Path) -> dict[str, str]:
    """Name -> where its value is: an attribute, an array, or a pattern of the file's name with {}."""
    if isinstance(said, list):
        said = {str(name): str(name) for name in said}
    if not isinstance(said, Mapping) or len(said) > MOST_PARAMETERS:
        raise wrong(
            f"{key}.parameters",
            f"it is {said!r:.120}",
            f"at most {MOST_PARAMETERS} names, each with the "
            f"attribute, the array or the pattern of file "
            f"names that "
            f"holds it",
            'Write parameters: {nu: nu}, or parameters: {nu: "run_nu{}_*"}; leave out what does not vary.',
        )
    groups = next((store.groups(place.array) for place in places if "*" in place.array), [""])
    for name, place in said.items():
        value_in(key, store, name, str(place), path, groups[0])
    return {str(name): str(place) for name, place in said.items()}


def _names(
    key: str, said: Mapping[str, Any], fields: Sequence[str], moving: Sequence[str], is_steady: bool
) -> None:
    """That the lists of fields name fields, and a steady task its coefficient."""
    repeated = [field for field in fields if fields.count(field) > 1]
    if repeated:
        raise wrong(
            f"{key}.layout",
            f"two arrays give a field {repeated[0]}",
            "a name for each",
            "Write {array: NAME, axes: [..], fields: [..]}.",
        )
    for part, known in {
        "inputs": fields,
        "positive": fields,
        "conserved": moving,
        "bounded": moving,
        "vector": fields,
        "symmetries": said["symmetries"],
    }.items():
        if not isinstance(said[part], list):
            raise wrong(
                f"{key}.{part}",
                f"it is {said[part]!r:.80}",
                "a list",
                f"Write {part}: [{'shift' if part == 'symmetries' else known[0]}].",
            )
        if strange := [name for name in said[part] if name not in known]:
            raise wrong(
                f"{key}.{part}",
                f"it names {strange[0]!r:.80}"
                + (", which is given and does not change" if strange[0] in fields else ""),
                f"fields of the layout ({', '.join(known)})",
                "Correct the list.",
            )
    unknown = [field for field in fields if field not in said["inputs"]]
    if is_steady != bool(said["inputs"]) or not unknown:
        raise wrong(
            f"{key}.inputs",
            f"it is {said['inputs']}, and "
            + (
                "no array has a time axis, so the task is steady"
                if is_steady
                else "some array has a time axis"
            ),
            f"the coefficient among {', '.join(fields)}, from which the others follow"
            if is_steady
            else "none: fields without a time axis are coefficients already",
            f"Write inputs: [{fields[0]}]." if is_steady else "Leave it out.",
        )


def _symmetries(
    key: str, said: Mapping[str, Any], axes: Sequence[str], ends: Sequence[str], fields: Sequence[str]
) -> None:
    """That the symmetries are such, shifts along periodic axes, and every vector has a field per axis."""
    periodic = [axis for axis, end in zip(axes, ends, strict=True) if end == PERIODIC]
    known = ["mirror", *["shift"] * bool(periodic), *[f"shift_{axis}" for axis in periodic]]
    if strange := [name for name in said["symmetries"] if name not in known]:
        raise wrong(
            f"{key}.symmetries",
            f"it names {strange[0]!r:.80}",
            f"of {', '.join(known)}" + ("" if periodic else "; shifts need a periodic axis"),
            "Leave out what shifted and mirrored solutions do not keep.",
        )
    distinct = {*said["vector"]} & {*fields}
    if len(said["vector"]) % len(axes) or len(distinct) != len(said["vector"]):
        raise wrong(
            f"{key}.vector",
            f"it is {said['vector']}",
            f"{len(axes)} of {', '.join(fields)}, the "
            f"component along each axis of space ({', '.join(axes)}), of one vector after the other",
            "Correct the list.",
        )
