"""A section that declares a file of the user's, filled from what the file shows, with a question wherever it
cannot know: `python prepare_data.py --describe my.h5`."""

import itertools
import math
import re
from pathlib import Path

import numpy as np

from ups.common.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups.common.files import TOGETHER
from ups.tasks import Place
from ups.tasks.user_task import JUMP, jumps
from ups.userdata.axis_names import WORDS, meant
from ups.userdata.describe_axes import SPACE, field_of, follows, other_reading, quoted, shape_of, usual
from ups.userdata.describe_series import series_of
from ups.userdata.inspect_file import (
    TIMES,
    UNEVEN,
    coordinate,
    is_even,
    jumps_in,
    names_of_times,
    rises,
    tidy,
)
from ups.userdata.known_layouts import from_pdebench, from_well, is_well
from ups.userdata.masks import averaged
from ups.userdata.missing_values import without
from ups.userdata.patterns import alike, are_parts, in_groups, lengths_of, pattern
from ups.userdata.questions import broken, lengths, missing, names_of, others, whole
from ups.userdata.reader import ENOUGH_RUNS
from ups.userdata.readers import Store, Stored, open_store
from ups.userdata.section import MOST_PARAMETERS

# attributes of an array that name others, which describe it (CF conventions, 5 and 7)
NAMING = (
    "ancillary_variables",
    "bounds",
    "cell_measures",
    "climatology",
    "coordinates",
    "formula_terms",
    "grid_mapping",
)
# files of one record from which on none is cut; windows that few runs are cut into, and their frames
MOST_PARTS, WINDOWS, SHORTEST, LONGEST = 15, 60, 3, 50
LEAST, USUAL_SHARE, LARGEST_SHARE = 6, 0.1, 0.5  # that the report needs for its test, of all trajectories
SMALL = 1e-3  # of a field's spread: what counts as nothing at a wall
COUNTS = ("coordinate", "grid/", "dimensions/")  # in names of arrays that are no fields
FEWEST = 3  # pairs that can be split into training, validation and test
EVEN = 1e-3  # of a step, by which the steps of a coordinate differ
MOST_FILES = 8  # of those beside a file, to compare attributes with


def describe_file(path: str) -> str:
    """The section as YAML.

    Raises ValueError or FileNotFoundError for a file that is none, or holds no field.
    """
    with open_store(path) as store:
        return "\n".join(_section(store))


def _section(store: Store) -> list[str]:
    files, question = pattern(Path(store.path))
    stem = Path(files.split(TOGETHER)[0]).stem.lower()
    name = re.sub(r"[\W_]+|^(?=\d)", "_", stem).strip("_") or "mine"
    series: dict[str, list[str]] = {}
    head = [
        "# my_data.yaml: what ends with a question mark is a guess; answer it.",
        "include: configs/small.yaml",
        f"data: {{tasks: [{quoted(name)}], source: user}}",
        "task:",
        f"  {quoted(name)}:",
        f'    files: "{files}"' + f"   # {question}" * bool(question),
    ]
    if is_well(store):
        layout = from_well(store)["layout"]
        fields = [entry["fields"][0] for entry in layout.values() if "time" in entry["axes"]]
        given = [entry["fields"][0] for entry in layout.values() if "time" not in entry["axes"]]
        return [
            *head,
            "    layout: well   # arrays, axes, boundary, times and parameters as the file says: "
            f"predicts {', '.join(fields) or 'nothing'}" + f", given {', '.join(given)}" * bool(given),
            *_about(fields or given),
        ]
    if store.groups("*/data") and len(store.array(f"{store.groups('*/data')[0]}/data").shape) >= 3:
        layout = from_pdebench(store)["layout"]
        axes = {array: entry["axes"] for array, entry in layout.items()}
        sure = True
    else:
        fields = in_groups(store, _fields(store))
        if not fields:
            raise ValueError(
                f"{store.path} holds {store.listing()}; expected a field, numbers with two axes "
                f"or more, one of them of space. Name a file that holds one."
            )
        axes, sure = {}, True
        for array in fields:
            axes[array], is_sure = _axes(store, store.first(array), len(fields) == 1 or "*" in array)
            if "*" in array and "time" not in axes[array]:  # a group is one trajectory
                axes[array] = ["time" if word == "trajectory" else word for word in axes[array]]
            sure &= is_sure
        series = series_of(store, axes)
        axes = {array: words for array, words in axes.items() if array not in series} | series
    space = [axis for axis in dict.fromkeys(itertools.chain(*axes.values())) if axis not in WORDS]
    if not 1 <= len(space) <= 3:
        shown = ", ".join(
            f"{name} {dict(zip(words, store.array(name).shape, strict=True))}"
            for name, words in axes.items()
            if "*" not in name
        )
        raise ValueError(
            f"{store.path} holds {shown}; expected one to three axes of space of two cells or "
            "more. Take a file of a field in space."
        )
    lines = [*head, "    layout:"]
    for array, words in axes.items():
        shape = shape_of(store, array)
        note = (
            ""
            if sure
            else (
                f"   # of shape {shape}, of: trajectory, time, channel, component (of a "
                "vector), x, y, z; are these its axes, in order?"
            )
        )
        lines.append(f"      {quoted(array)}: [{', '.join(words)}]{note}")
    if not sure and (other := other_reading(store, axes)):
        lines.append(f"    # or {other}?")
    absent, asked = missing(store, axes, space)
    lines += others(store, axes)
    lines += _ends(store, axes, space, absent)
    is_steady, (cut, num) = all("time" not in words for words in axes.values()), _windows(store, axes)
    if is_steady and (len(axes) < 2 or num < FEWEST or _date_axis(store, axes)):
        raise ValueError(_only_maps(store, axes, num))
    if is_steady:
        names = ", ".join(names_of(store, *next(iter(axes.items())), space))
        lines.append(f"    inputs: [{names}]   # no array has an axis of time: which one is given?")
    elif (times := coordinate(store, [], _names_of_times(store, axes))) is not None:
        lines += _step_of(*times)
    else:
        found = _coordinates(store, axes).get("time")
        numbers = _shown(_numbers(store))
        lines.append(
            f"    dt: {found}   # the array of times"
            if found
            else f"    dt: 1.0   # between stored frames, or the name of what holds it"
            f"{numbers and f' ({numbers})'}?"
        )
    if series:
        rest = [field_of(array) for array in [*axes][1:] if array not in series and "time" in axes[array]]
        lines.append(
            f"    forcing: [{', '.join(map(field_of, series))}]   # known in advance, and so not "
            f"predicted? {', '.join(rest)}{', too?' * bool(rest)}".rstrip()
        )
    lines += lengths(store, axes, cut) + asked
    if cut:
        lines.append(f"    cut: {cut}   # frames: of the runs {num} windows, those of test the last in time")
    share = math.ceil(100 * LEAST / num) / 100
    if USUAL_SHARE < share <= LARGEST_SHARE:
        lines[2] = lines[2].replace("}", f", test_fraction: {share}}}") + f"   # {LEAST} for the report"
    return lines + _parameters(store, axes) + _about([field_of(array) for array in axes], bool(series))


def _only_maps(store: Store, axes: dict[str, list[str]], num: int) -> str:
    """The refusal of maps without an axis of time; for a frame per file, with the command that joins them."""
    path, words = Path(store.path), next(iter(axes.values()))
    if len(files := alike(path)) > 1 and "trajectory" not in words:
        pattern_of_files, _ = pattern(path)
        join = "Stack them along an axis of time in one file, as numpy.stack does, and describe that file."
        if time := _date_axis(store, axes):
            join = (
                'Join them: python -c "import glob, xarray; xarray.concat([xarray.open_dataset(path) '
                f"for path in glob.glob('{pattern_of_files}')], '{time}').sortby('{time}')"
                ".to_netcdf('joined.nc')\", and describe joined.nc."
            )
        return (
            f"{path} holds one map of {' and of '.join(axes)}, as do {len(files)} files of such names; "
            f"expected the frames of a run in one file, with an axis of time. {join}"
        )
    return (
        f"{path} holds {num} map{'s' * (num > 1)} of {' and of '.join(axes)}, without an axis of time; "
        "expected frames, or many pairs of a field that is given and one that follows from it. Take files "
        "with these, an axis that counts them, or many files whose names differ in a number."
    )


def _date_axis(store: Store, axes: dict[str, list[str]]) -> str:
    """The name of an axis of length 1 along which a date is stored, "" if there is none."""
    array, words = next(iter(axes.items()))
    names = zip(store.array(store.first(array)).axes, words, strict=False)
    single = [(name,) for name, word in names if word == "single"]
    dates = [name for name in store.names() if " since " in str(store.attributes(name).get("units", ""))]
    return next((store.array(name).axes[0] for name in dates if store.array(name).axes in single), "")


def _names_of_times(store: Store, axes: dict[str, list[str]]) -> list[str]:
    return names_of_times(store, [Place(array, tuple(words), ()) for array, words in axes.items()])


def _step_of(place: str, times: np.ndarray) -> list[str]:
    """What to write of the step where the times do not rise evenly, as months do not."""
    steps = np.diff(times)
    if gaps := len(jumps_in(times)):
        return [f"    # {place} has {gaps} steps other than {np.median(steps):g}: no window crosses them"]
    if is_even(times) or steps.min() <= 0:
        return []
    return [
        f"    dt: {tidy(float(np.median(steps)))}   # {place} has steps of {steps.min():g} to "
        f"{steps.max():g}: count them as equal?"
    ]


def _windows(store: Store, axes: dict[str, list[str]]) -> tuple[int, int]:
    """The frames of the windows into which few long runs are to be cut, 0 for none, and how many windows or
    runs there are then."""
    array, words = next(iter(axes.items()))
    shape = dict(zip(words, shape_of(store, array), strict=True))
    runs = max(1, len(store.groups(array))) * shape.get("trajectory", 1) * len(alike(Path(store.path)))
    frames = shape.get("time", 1)
    if runs >= (MOST_PARTS if are_parts(Path(store.path)) else ENOUGH_RUNS) or frames < 3 * SHORTEST:
        return 0, runs
    each, found = shape.get("trajectory", 1), lengths_of(store, array, words.index("time"))
    cut = max(SHORTEST, min(LONGEST, each * sum(found) // WINDOWS))
    if (is_broken := broken(store, axes)).any():  # short windows survive frames that are left out
        cut = SHORTEST
        return cut, whole(is_broken, cut) * sum(found) // len(is_broken)
    return cut, each * sum(length // cut for length in found)


def _fields(store: Store) -> list[str]:
    """The arrays that may be fields: of floating-point numbers, with the most axes, and those with one
    less."""
    known = {name: store.array(name) for name in store.names()}
    named = {
        word
        for name in known
        for attribute in NAMING
        for word in str(store.attributes(name).get(attribute, "")).replace(":", " ").split()
    }
    fitting = {
        name: len(array.shape)
        for name, array in known.items()
        if name not in named
        and array.dtype.kind in "fiub"
        and min(array.shape, default=0) > 0
        and not _is_place(name)
        and sum(size > 1 for size in array.shape) >= 2
    }
    shapes = [known[name].shape for name in fitting if known[name].dtype.kind == "f"]
    fitting = {
        name: rank
        for name, rank in fitting.items()  # whole numbers may be indices
        if known[name].dtype.kind == "f" or not shapes or known[name].shape in shapes
    }
    most = max(fitting.values(), default=0)
    alike = [name for name, rank in fitting.items() if rank >= most - 1]
    return [name for name in alike if fitting[name] == most or {*known[name].axes} <= {*known[alike[0]].axes}]


def _is_place(name: str) -> bool:
    """Whether an array's name is that of a coordinate."""
    return any(part in name for part in COUNTS) or name.endswith(("_bnds", "_bounds"))


def _lists(store: Store) -> dict[str, np.ndarray]:
    """The arrays of one axis and their numbers."""
    known = {name: store.array(name) for name in store.names()}
    return {
        name: np.asarray(store.read(name), np.float64)
        for name, array in known.items()
        if len(array.shape) == 1 and array.dtype.kind in "fiu"
    }


def _is_even(values: np.ndarray) -> bool:
    """Whether numbers may be a coordinate: in equal steps."""
    steps = np.abs(np.diff(values))
    is_ordered = len(values) > 2 and (rises(values) or rises(values[::-1]))
    return is_ordered and bool(np.ptp(steps) <= EVEN * steps.mean())


def _coordinates(store: Store, axes: dict[str, list[str]]) -> dict[str, str]:
    """Axis -> the array of its coordinates, of those whose names begin as its own, by length and even
    steps."""
    array, words = next(iter(axes.items()))
    sizes = dict(zip(words, shape_of(store, array), strict=True))
    return {
        axis: name
        for axis, size in sizes.items()
        for name, values in _lists(store).items()
        if _begins(name, axis) and len(values) == size and _is_even(values)
    }


def _begins(name: str, axis: str) -> bool:
    return name.rsplit("/", 1)[-1].lower().startswith("t" if axis == "time" else axis)


def _axes(store: Store, array: str, is_alone: bool) -> tuple[list[str], bool]:
    """Words for the axes of an array, and whether the file tells them: by names, or by the lengths of its
    coordinates; else the usual order. is_alone: no other array is a field, so it is no map of one."""
    found = store.array(array)
    if found.axes:
        words = [_word(store, axis, size) for axis, size in zip(found.axes, found.shape, strict=True)]
        return words, all(word in (*SPACE, *WORDS) or coordinate(store, [], [word]) for word in words)
    lengths = {axis: len(place[1]) for axis in SPACE if (place := coordinate(store, [], [axis]))}
    if times := coordinate(store, [], TIMES):
        lengths["time"] = len(times[1])
    for name, values in _lists(store).items():  # a coordinate rises evenly, parameters do not
        for axis in ("time", *SPACE) if _is_even(values) else ():
            if _begins(name, axis):
                lengths.setdefault(axis, len(values))
        if not _is_even(values) and len(values) in found.shape:
            lengths.setdefault("trajectory", len(values))
    by_length = _matched(found, lengths)
    if by_length:
        return by_length, True
    return usual(found.shape, follows(store, array), is_alone), False


def _word(store: Store, axis: str, size: int) -> str:
    """The word for an axis that a file names: one whose coordinate does not rise or fall evenly, such as
    levels of pressure, counts channels."""
    word = meant(axis)
    if word not in WORDS and size == 1:
        return "single"
    place = coordinate(store, [], [axis]) if word not in WORDS else None
    if place is None:
        return re.sub(r"\W", "_", word)
    said = store.attributes(place[0])
    if str(said.get("axis", "")) == "T" or " since " in str(said.get("units", "")):
        return "time"
    if str(said.get("axis", "")) in ("X", "Y") or _is_globe(word, said):
        return word
    # of height, depth or pressure, by the CF conventions (4.3)
    is_vertical = str(said.get("axis", "")) == "Z" or str(said.get("positive", "")).lower() in ("up", "down")
    return "channel" if is_vertical or not _is_even_grid(place[1]) else word


def _is_even_grid(x: np.ndarray) -> bool:
    steps = np.abs(np.diff(x))
    return bool(np.ptp(steps) <= UNEVEN * steps.mean())


def _is_globe(axis: str, said: dict) -> bool:
    """Whether an axis is of latitudes or longitudes, by its name or its units."""
    return axis.lower().startswith(("lat", "lon")) or str(said.get("units", "")).startswith(
        ("degrees_n", "degrees_e")
    )


def _end(store: Store, axis: str, size: int) -> str | None:
    """The ends of an axis of the globe; None for another."""
    place = coordinate(store, [], [axis])
    units = str(store.attributes(place[0]).get("units", "")) if place else ""
    if axis.lower().startswith("lat") or units.startswith("degrees_n"):
        return NO_FLUX
    if axis.lower().startswith("lon") or units.startswith("degrees_e"):
        turn = place is not None and abs(size * abs(place[1][1] - place[1][0]) - 360) < 1
        return PERIODIC if turn else NO_FLUX
    return None


def _matched(array: Stored, lengths: dict[str, int]) -> list[str]:
    """The words of an array where each length belongs to one axis alone, and at most one axis is left, that
    of trajectories; else [].
    """
    if "x" not in lengths:
        return []
    words = []
    for size in array.shape:
        fitting = [
            axis
            for axis, length in lengths.items()
            if length == size or (axis == "time" and length == size + 1)
        ]
        if len(fitting) > 1 or (fitting and array.shape.count(size) > 1):
            return []
        words.append(fitting[0] if fitting else "trajectory")
    return words if words.count("trajectory") <= 1 and set(lengths) <= set(words) else []


def _ends(store: Store, axes: dict[str, list[str]], space: list[str], absent: list[str]) -> list[str]:
    """Boundary and domain, guessed from the field. absent: numbers that stand for none."""
    array, words = next(iter(axes.items()))
    u = without(_sample(store, array, words), absent)
    u, ends, domain, uneven = averaged(u, u.ndim), {}, {}, []
    repeated: list[str] = []
    for axis in space:
        at = words.index(axis) if axis in words else None
        if at is None:
            ends[axis] = PERIODIC
            continue
        spread = float(u.std()) or 1.0
        walls = max(float(np.abs(u.take(cell, at)).mean()) for cell in (0, -1))
        ends[axis] = _end(store, axis, u.shape[at]) or (
            DIRICHLET if walls < SMALL * spread else PERIODIC if jumps(u, at) < JUMP else NO_FLUX
        )
        if ends[axis] == PERIODIC and u.shape[at] > 2 and np.array_equal(u.take(0, at), u.take(-1, at)):
            repeated.append(axis)
        place = coordinate(store, [], [axis])
        if place is None:
            domain[axis] = [0.0, 1.0]
        elif not _is_even_grid(place[1]) and (rises(place[1]) or rises(place[1][::-1])):
            steps = np.abs(np.diff(place[1]))
            uneven.append(
                f"    # {place[0]} has steps of {steps.min():g} to {steps.max():g}: are its cells "
                "to be counted as equal, from end to end of this domain?"
            )
            domain[axis] = [
                tidy(float(place[1].min() - steps.mean() / 2)),
                tidy(float(place[1].max() + steps.mean() / 2)),
            ]
    shown = (
        next(iter(ends.values()))
        if len({*ends.values()}) == 1
        else "{" + ", ".join(f"{axis}: {end}" for axis, end in ends.items()) + "}"
    )
    lines = [
        f"    boundary: {shown}   # as the ends of the field look: periodic, no_flux, dirichlet or outflow?"
    ]
    named = {axis: name for axis, name in _coordinates(store, axes).items() if axis in domain}
    if domain:
        spans = ", ".join(
            f"{axis}: {quoted(named[axis]) if axis in named else span}" for axis, span in domain.items()
        )
        numbers = _shown(_numbers(store))
        lines += uneven
        lines.append(
            f"    domain: {{{spans}}}"
            + (
                ""
                if len(uneven) == len(domain)
                else "   # "
                + (
                    "the arrays of the coordinates"
                    if {*named} == {*domain}
                    else f"the file holds no such coordinates{numbers and f' ({numbers})'}: from where to "
                    f"where?"
                )
            )
        )
    if repeated:
        lines.append(f"    repeated: [{', '.join(repeated)}]   # the last cell is the first again")
    return lines


def _sample(store: Store, array: str, words: list[str]) -> np.ndarray:
    """The first trajectory of an array at its last frame, with its axes, float64."""
    index = tuple(
        slice(0, 1) if word == "trajectory" else slice(-1 + n, n) if word == "time" else slice(None)
        for word, n in zip(words, shape_of(store, array), strict=True)
    )
    return np.asarray(store.read(store.first(array), index), np.float64)


def _numbers(store: Store) -> dict[str, float]:
    """The attributes of the file that are one number."""
    found = {key: np.asarray(value) for key, value in store.attributes().items()}
    return {
        key: float(value.reshape(-1)[0])
        for key, value in found.items()
        if value.dtype.kind in "fiu" and value.size == 1
    }


def _shown(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in numbers.items())


def _parameters(store: Store, axes: dict[str, list[str]]) -> list[str]:
    """What differs from trajectory to trajectory: lists of numbers that are no coordinates, and attributes
    that are not the same in the other files."""
    known, numbers = {*_coordinates(store, axes).values()}, _numbers(store)
    known |= {array.replace("*", group) for array in axes for group in store.groups(array) or [""]}
    for name in store.names():  # coordinates, and what varies along a named axis
        known |= {*store.array(name).axes, *[name] * (meant(" ".join(store.array(name).axes)) in WORDS[1:])}
    lists = [
        name
        for name in _lists(store)
        if name not in known and not _is_place(name) and name.rsplit("/", 1)[-1] not in (*TIMES, *SPACE)
    ]
    differing = set()
    own = Path(store.path)
    for path in alike(own)[:MOST_FILES]:
        with open_store(path) as other:
            there = _numbers(other)
        differing |= {name for name, value in numbers.items() if there.get(name) != value}
    names = [*[name for name in numbers if name in differing], *lists][:MOST_PARAMETERS]
    values = ", ".join(f"{field_of(name)}: {quoted(name)}" for name in names)
    same = {name: value for name, value in numbers.items() if name not in differing}
    return [
        *[f"    parameters: {{{values}}}   # does the equation depend on these?"] * bool(names),
        *[
            f"    # parameters: {{name: attribute}}   # is {_shown(same)} another in further files, and "
            "not dt or a length?"
        ]
        * bool(same),
    ]


def _about(fields: list[str], is_forced: bool = False) -> list[str]:
    """Questions that no file answers."""
    first = fields[0]
    return [
        f"    # positive: [{first}]       # always above zero, over orders of magnitude?",
        f"    # conserved: [{first}]      # is its mean over space kept?",
        *[
            f"    # forcing: [{fields[-1]}]        # which fields vary in time and are known in advance "
            "(heating, a control)?"
        ]
        * (len(fields) > 1 and not is_forced),
        "    # symmetries: [shift, mirror]   # is a solution, shifted along periodic axes, a solution "
        "(shift_x: along x alone; not along what a force varies with)? Its mirror image?",
        f"    # vector: [{first}, ..]     # which fields are the components of a vector, which a mirror "
        "turns round?",
    ]
