"""The configuration section for a user's file, written from its contents, with a question mark at every
guess: `python prepare_data.py --describe my.h5`."""

import math
import re
from pathlib import Path

import numpy as np

from ups.common.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups.common.files import TOGETHER
from ups.tasks import Place
from ups.tasks.user_task import JUMP, jumps
from ups.userdata.describe_axes import (
    Guess,
    fields_of,
    other_reading,
    parameter_lists,
    quoted,
    series_of,
    words_of,
)
from ups.userdata.describe_files import (
    are_dated,
    companion_lines,
    frames_with_gaps,
    length_lines,
    missing_lines,
    num_whole_windows,
    pattern_of,
    run_lengths,
    sibling_files,
)
from ups.userdata.fields import MOST_PARAMETERS
from ups.userdata.grid import is_globe, on_walls
from ups.userdata.inspect_file import Coordinate, coordinate, is_even, is_even_grid, rises, tidy
from ups.userdata.known_layouts import from_pdebench, from_well, is_well
from ups.userdata.layout import field_names, field_of
from ups.userdata.masks import averaged, with_nan
from ups.userdata.reader import ENOUGH_RUNS
from ups.userdata.readers import Store, open_store
from ups.userdata.times import jumps_in, times_in

MOST_PARTS = 15  # files of one record, from which on none is cut
WINDOWS, SHORTEST, LONGEST = 60, 3, 50  # windows that few runs are cut into, and their frames
# test trajectories: the report needs LEAST, so data.test_fraction may be raised up to LARGEST_FRACTION
LEAST, USUAL_FRACTION, LARGEST_FRACTION = 6, 0.1, 0.5
SMALL = 1e-3  # of a field's standard deviation: what counts as zero at a wall
FEWEST = 3  # pairs that can be split into training, validation and test
MOST_FILES = 8  # sibling files whose attributes are compared


def describe_file(path: str) -> str:
    """The section as YAML.

    Raises ValueError or FileNotFoundError for a path that is no data file, or a file without a field.
    """
    with open_store(path) as store:
        return "\n".join(_describe_well(store) if is_well(store) else _describe(store))


def _head(store: Store) -> list[str]:
    files, question = pattern_of(Path(store.path))
    stem = Path(files.split(TOGETHER)[0]).stem.lower()
    name = quoted(re.sub(r"[\W_]+|^(?=\d)", "_", stem).strip("_") or "mine")
    return [
        "# my_data.yaml: what ends with a question mark is a guess; answer it.",
        "include: configs/small.yaml",
        f"data: {{tasks: [{name}], source: user}}",
        "task:",
        f"  {name}:",
        f'    files: "{files}"' + f"   # {question}" * bool(question),
    ]


def _describe_well(store: Store) -> list[str]:
    """The lines for a file of The Well, which states all that a section needs."""
    layout = from_well(store)["layout"].values()
    fields = [entry["fields"][0] for entry in layout if "time" in entry["axes"]]
    constant = [entry["fields"][0] for entry in layout if "time" not in entry["axes"]]
    return [
        *_head(store),
        "    layout: well   # arrays, axes, boundary, times and parameters as the file says: predicts "
        f"{', '.join(fields) or 'nothing'}" + f", given {', '.join(constant)}" * bool(constant),
        *_open_questions(fields or constant),
    ]


def _describe(store: Store) -> list[str]:
    guess, is_sure, series = _guess_layout(store)
    space = guess.space
    if not 1 <= len(space) <= 3:
        listed = ", ".join(
            f"{name} {dict(zip(words, store.array(name).shape, strict=True))}"
            for name, words in guess.axes.items()
            if "*" not in name
        )
        raise ValueError(
            f"{store.path} holds {listed}; expected one to three axes of space of two cells or more. Take a "
            "file of a field in space."
        )
    cut, num = _choose_windows(guess)
    if guess.is_steady and (len(guess.axes) < 2 or num < FEWEST or _date_axis(guess)):
        raise ValueError(_only_maps(guess, num))
    absent, missing = missing_lines(guess)
    head, fields = _head(store), [field_of(array) for array in guess.axes]
    fraction = math.ceil(100 * LEAST / num) / 100
    if USUAL_FRACTION < fraction <= LARGEST_FRACTION:
        head[2] = head[2].replace("}", f", test_fraction: {fraction}}}") + f"   # {LEAST} for the report"
    windows = f"    cut: {cut}   # frames: of the runs {num} windows, those of test the last in time"
    return [
        *head,
        *_layout_lines(guess, is_sure),
        *companion_lines(guess),
        *_grid_lines(guess, absent),
        *_time_lines(guess),
        *_forcing_lines(guess, series),
        *length_lines(guess, cut),
        *missing,
        *[windows] * bool(cut),
        *_parameter_lines(guess),
        *_open_questions(fields, bool(series)),
    ]


def _guess_layout(store: Store) -> tuple[Guess, bool, list[str]]:
    """(Fields with words for their axes, whether the file determines these words, arrays with one number per
    frame)."""
    groups = store.groups("*/data")
    if groups and len(store.array(f"{groups[0]}/data").shape) >= 3:
        layout = from_pdebench(store)["layout"]
        return Guess(store, {array: entry["axes"] for array, entry in layout.items()}), True, []
    fields = fields_of(store)
    if not fields:
        raise ValueError(
            f"{store.path} holds {store.listing()}; expected a field, numbers with two axes or more, one of "
            "them of space. Name a file that holds one."
        )
    axes, is_sure = {}, True
    for array in fields:
        axes[array], tells = words_of(store, store.first(array), len(fields) == 1 or "*" in array)
        if "*" in array and "time" not in axes[array]:  # a group is one trajectory
            axes[array] = ["time" if word == "trajectory" else word for word in axes[array]]
        is_sure &= tells
    series = series_of(Guess(store, axes))
    axes = {array: words for array, words in axes.items() if array not in series} | series
    return Guess(store, axes), is_sure, [*series]


def _layout_lines(guess: Guess, is_sure: bool) -> list[str]:
    lines = ["    layout:"]
    for array, words in guess.axes.items():
        note = (
            f"   # of shape {guess.shape(array)}, of: trajectory, time, channel, component (of a vector), "
            "x, y, z; are these its axes, in order?"
        )
        lines.append(f"      {quoted(array)}: [{', '.join(words)}]{'' if is_sure else note}")
    if not is_sure and (other := other_reading(guess)):
        lines.append(f"    # or {other}?")
    return lines


def _choose_windows(guess: Guess) -> tuple[int, int]:
    """(Frames of a window if few long runs are cut into windows, else 0; number of windows or runs)."""
    path, each, frames = Path(guess.store.path), guess.sizes.get("trajectory", 1), guess.sizes.get("time", 1)
    runs = max(1, len(guess.store.groups(guess.array))) * each * len(sibling_files(path))
    if runs >= (MOST_PARTS if are_dated(path) else ENOUGH_RUNS) or frames < 3 * SHORTEST:
        return 0, runs
    lengths = run_lengths(guess.store, guess.array, guess.words.index("time"))
    has_gaps = frames_with_gaps(guess)
    if has_gaps.any():  # short windows survive if frames are left out
        return SHORTEST, num_whole_windows(has_gaps, SHORTEST) * sum(lengths) // len(has_gaps)
    cut = max(SHORTEST, min(LONGEST, each * sum(lengths) // WINDOWS))
    return cut, each * sum(length // cut for length in lengths)


def _only_maps(guess: Guess, num: int) -> str:
    """The error message for maps without an axis of time. If every file holds one frame, it has a command
    that joins them."""
    path, maps = Path(guess.store.path), " and of ".join(guess.axes)
    if len(files := sibling_files(path)) > 1 and "trajectory" not in guess.words:
        pattern, _ = pattern_of(path)
        join = "Stack them along an axis of time in one file, as numpy.stack does, and describe that file."
        if time := _date_axis(guess):
            join = (
                'Join them: python -c "import glob, xarray; xarray.concat([xarray.open_dataset(path) '
                f"for path in glob.glob('{pattern}')], '{time}').sortby('{time}')"
                ".to_netcdf('joined.nc')\", and describe joined.nc."
            )
        return (
            f"{path} holds one map of {maps}, as do {len(files)} files of such names; expected the frames of "
            f"a run in one file, with an axis of time. {join}"
        )
    return (
        f"{path} holds {num} map{'s' * (num > 1)} of {maps}, without an axis of time; expected frames, or "
        "many pairs of a field that is given and one that follows from it. Take files with these, an axis "
        "that counts them, or many files whose names differ in a number."
    )


def _date_axis(guess: Guess) -> str:
    """The name of an axis of length 1 along which a date is stored, "" if there is none."""
    store = guess.store
    names = zip(store.first_array(guess.array).axes, guess.words, strict=False)
    single = [(name,) for name, word in names if word == "single"]
    dates = [name for name in store.names() if " since " in str(store.attributes(name).get("units", ""))]
    return next((store.array(name).axes[0] for name in dates if store.array(name).axes in single), "")


def _time_lines(guess: Guess) -> list[str]:
    """The line inputs of a steady task, or dt if the file has no times."""
    store = guess.store
    if guess.is_steady:
        shape = guess.sizes
        rank = min(1, guess.words.count("component"))
        names = field_names(field_of(guess.array), shape.get("channel"), rank, guess.space)
        return [f"    inputs: [{', '.join(names)}]   # no array has an axis of time: which one is given?"]
    places = [Place(array, tuple(words), ()) for array, words in guess.axes.items()]
    if (found := times_in(store, places)) is None:
        if name := guess.coordinates.get("time"):
            return [f"    dt: {name}   # the array of times"]
        numbers = _in_words(_numbers(store))
        known = f" ({numbers})" if numbers else ""
        return [f"    dt: 1.0   # between stored frames, or the name of what holds it{known}?"]
    place, times = found
    steps = np.diff(times)
    if gaps := len(jumps_in(times)):
        return [f"    # {place} has {gaps} steps other than {np.median(steps):g}: no window crosses them"]
    if is_even(times) or steps.min() <= 0:
        return []
    return [
        f"    dt: {tidy(float(np.median(steps)))}   # {place} has steps of {steps.min():g} to "
        f"{steps.max():g}: count them as equal?"
    ]


def _forcing_lines(guess: Guess, series: list[str]) -> list[str]:
    if not series:
        return []
    others = [array for array in [*guess.axes][1:] if array not in series and "time" in guess.axes[array]]
    rest = ", ".join(map(field_of, others))
    return [
        f"    forcing: [{', '.join(map(field_of, series))}]   # known in advance, and so not predicted?"
        + f" {rest}, too?" * bool(rest)
    ]


def _grid_lines(guess: Guess, absent: list[str]) -> list[str]:
    """boundary, domain and repeated, guessed from the field. absent: numbers that mean missing."""
    u = with_nan(_last_frame(guess), absent)
    u, found = averaged(u, u.ndim), {axis: coordinate(guess.store, [], [axis]) for axis in guess.space}
    ends, repeated = {}, []
    for axis in guess.space:
        at = guess.words.index(axis) if axis in guess.words else None
        ends[axis] = PERIODIC if at is None else _guess_end(guess.store, axis, found[axis], u, at)
        if at is not None and ends[axis] == PERIODIC and u.shape[at] > 2:
            repeated += [axis] * np.array_equal(u.take(0, at), u.take(-1, at))
    names = [*ends.values()]
    listed = (
        names[0] if len({*names}) == 1 else f"{{{', '.join(f'{axis}: {end}' for axis, end in ends.items())}}}"
    )
    lines = [
        f"    boundary: {listed}   # as the ends of the field look: periodic, no_flux, dirichlet or outflow?",
        *_domain_lines(guess, ends, found),
    ]
    if repeated:
        lines.append(f"    repeated: [{', '.join(repeated)}]   # the last cell is the first again")
    return lines


def _guess_end(store: Store, axis: str, found: Coordinate | None, u: np.ndarray, at: int) -> str:
    """The boundary of an axis: known for longitudes and latitudes, else guessed from the field at its
    ends."""
    units = str(store.attributes(found[0]).get("units", "")) if found else ""
    if is_globe(axis, units):
        is_longitude = not axis.lower().startswith("lat") and not units.startswith("degrees_n")
        is_turn = found is not None and abs(u.shape[at] * abs(found[1][1] - found[1][0]) - 360) < 1
        return PERIODIC if is_longitude and is_turn else NO_FLUX
    walls = max(float(np.abs(u.take(cell, at)).mean()) for cell in (0, -1))
    if walls < SMALL * (float(u.std()) or 1.0):
        return DIRICHLET
    return PERIODIC if jumps(u, at) < JUMP else NO_FLUX


def _domain_lines(guess: Guess, ends: dict[str, str], found: dict[str, Coordinate | None]) -> list[str]:
    """The line domain for axes without coordinates or with uneven ones, and a note if points lie on walls."""
    lines, uneven, domain = [], [], {}
    for axis in guess.space:
        if axis not in guess.words:
            continue
        if (place := found[axis]) is None:
            domain[axis] = guess.coordinates.get(axis, [0.0, 1.0])
            continue
        name, x = place
        if not is_even_grid(x) and (rises(x) or rises(x[::-1])):
            steps = np.abs(np.diff(x))
            uneven.append(axis)
            domain[axis] = [
                tidy(float(x.min() - steps.mean() / 2)),
                tidy(float(x.max() + steps.mean() / 2)),
            ]
            lines.append(
                f"    # {name} has steps of {steps.min():g} to {steps.max():g}: are its cells to be counted "
                "as equal, from end to end of this domain?"
            )
        elif len(x) > 1 and ends[axis] != PERIODIC and not is_globe(axis):
            half = abs(x[1] - x[0]) / 2
            low, high = tidy(float(x.min() - half)), tidy(float(x.max() + half))
            if on_walls(low, high, len(x)):
                lines.append(
                    f"    # {axis}: the first and last point lie on the walls; the domain reaches half a "
                    f"cell beyond them, [{low}, {high}]"
                )
    if not domain:
        return lines
    spans = ", ".join(
        f"{axis}: {quoted(span) if isinstance(span, str) else span}" for axis, span in domain.items()
    )
    if len(uneven) == len(domain):
        return [*lines, f"    domain: {{{spans}}}"]
    if all(isinstance(span, str) for span in domain.values()):
        return [*lines, f"    domain: {{{spans}}}   # the arrays of the coordinates"]
    numbers = _in_words(_numbers(guess.store))
    walls = [axis for axis in domain if axis not in uneven and ends[axis] != PERIODIC]
    beyond = ", half a cell beyond the first and the last point" if walls else ""
    return [
        *lines,
        f"    domain: {{{spans}}}   # the file holds no such coordinates{f' ({numbers})' * bool(numbers)}: "
        f"from where to where{beyond}?",
    ]


def _last_frame(guess: Guess) -> np.ndarray:
    """The main field of the first trajectory at its last frame, with all axes, float64."""
    index = tuple(
        slice(0, 1) if word == "trajectory" else slice(n - 1, n) if word == "time" else slice(None)
        for word, n in guess.sizes.items()
    )
    return np.asarray(guess.store.read(guess.store.first(guess.array), index), np.float64)


def _numbers(store: Store) -> dict[str, float]:
    """The attributes of the file that are one number."""
    found = {key: np.asarray(value) for key, value in store.attributes().items()}
    return {
        key: float(value.reshape(-1)[0])
        for key, value in found.items()
        if value.dtype.kind in "fiu" and value.size == 1
    }


def _in_words(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in numbers.items())


def _parameter_lines(guess: Guess) -> list[str]:
    """parameters: lists of numbers that are no coordinates, and attributes that differ between files."""
    numbers, differing = _numbers(guess.store), set()
    for path in sibling_files(Path(guess.store.path))[:MOST_FILES]:
        with open_store(path) as other:
            there = _numbers(other)
        differing |= {name for name, value in numbers.items() if there.get(name) != value}
    names = [*[name for name in numbers if name in differing], *parameter_lists(guess)][:MOST_PARAMETERS]
    values = ", ".join(f"{field_of(name)}: {quoted(name)}" for name in names)
    same = _in_words({name: value for name, value in numbers.items() if name not in differing})
    lines = []
    if names:
        lines.append(f"    parameters: {{{values}}}   # does the equation depend on these?")
    if same:
        lines.append(
            f"    # parameters: {{name: attribute}}   # is {same} another in further files, and not dt or a "
            "length?"
        )
    return lines


def _open_questions(fields: list[str], is_forced: bool = False) -> list[str]:
    """Keys that no file answers, as comments."""
    first = fields[0]
    lines = [
        f"    # positive: [{first}]       # always above zero, over orders of magnitude?",
        f"    # conserved: [{first}]      # is its mean over space kept?",
        f"    # forcing: [{fields[-1]}]        # which fields vary in time and are known in advance "
        "(heating, a control)?",
        "    # symmetries: [shift, mirror]   # is a solution, shifted along periodic axes, a solution "
        "(shift_x: along x alone; not along what a force varies with)? Its mirror image?",
        f"    # vector: [{first}, ..]     # which fields are the components of a vector, which a mirror "
        "turns round?",
    ]
    return lines if len(fields) > 1 and not is_forced else [*lines[:2], *lines[3:]]
