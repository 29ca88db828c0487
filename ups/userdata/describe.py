"""The configuration section for a user's file, written from its contents, with a question mark at every
guess: `python prepare_data.py --describe my.h5`."""

import itertools
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ups.tasks import TASKS, make_user_task, require_name
from ups.userdata.data_checks import horizon_words
from ups.userdata.describe_axes import (
    CONVERT,
    COUNTERS,
    Guess,
    candidates,
    fields_of,
    is_called,
    is_place,
    lists_of,
    require_few,
    require_field,
    series_of,
    words_of,
)
from ups.userdata.describe_files import (
    SCANNED,
    are_dated,
    frames_with_gaps,
    length_lines,
    missing_lines,
    pattern_of,
)
from ups.userdata.describe_grid import grid_lines, in_words, numbers_of
from ups.userdata.describe_lines import Line, meant, written
from ups.userdata.inspect_file import is_even, numbers_of_run, tidy
from ups.userdata.layout import WORDS, field_of
from ups.userdata.masks import first_frames
from ups.userdata.open_files import open_user_files, user_files
from ups.userdata.readers import Store, open_store
from ups.userdata.section import DEFAULTS, MOST_PARAMETERS, complete, facts
from ups.userdata.the_well import from_well, is_well
from ups.userdata.times import jumps_in, times_in
from ups.userdata.trajectories import ENOUGH_RUNS, Trajectories

MOST_PARTS = 15  # files of one record, from which on none is cut
# few runs are cut into WINDOWS windows of up to LONGEST frames; if these would be shorter than USEFUL frames,
# into fewer, down to FEWEST_WINDOWS, of which 30 % are the six that the report needs
WINDOWS, FEWEST_WINDOWS = 60, 20
SHORTEST, USEFUL, LONGEST = 3, 10, 50
# test trajectories: the report needs LEAST, so data.test_fraction may be raised up to LARGEST_FRACTION
LEAST, USUAL_FRACTION, LARGEST_FRACTION = 6, 0.1, 0.5
FEWEST = 3  # pairs that can be split into training, validation and test
MOST_COMPARED = 8  # sibling files, or groups, whose numbers are compared
MOST_EXAMINED = 20  # files of a section
VAL_FRACTION, TEST_FRACTION = 0.1, 0.1  # of configs/default.yaml


def describe_file(path: str, *others: str) -> str:
    """The section as YAML. others: further paths of the command line, which are refused.

    Raises ValueError or FileNotFoundError for a path that is no data file, or a file without a field.
    """
    if others:
        raise ValueError(
            f"{path} and {len(others)} more were given; expected one file. Describe it alone: its section "
            "names all files that are numbered like it."
        )
    with np.errstate(over="ignore"), open_store(path) as store:
        require_few(store, store.first_names())  # before all are looked at
        require_few(store, store.names())
        name, head = _name(Path(store.path)), Line("files", *pattern_of(Path(store.path)))
        section, test_fraction = _describe_well(store) if is_well(store) else _describe(store)
        try:
            data = _examine(name, meant([head, *section]), test_fraction or TEST_FRACTION)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{store.path} cannot be described: {error}") from error
        note = horizon_words(data)
    data = {"tasks": [name], "source": "user"} | ({"test_fraction": test_fraction} if test_fraction else {})
    return written(
        [
            Line(note="my_data.yaml: what ends with a question mark is a guess; answer it."),
            Line("include", "configs/small.yaml"),
            Line("data", data, f"{LEAST} for the report" if test_fraction else ""),
            Line("task", (Line(name, (head, *section)),)),
            *[Line(note=note)] * bool(note),
        ]
    )


def _name(path: Path) -> str:
    """A name of a task, made from a file's."""
    stem = Path(pattern_of(path)[0]).stem.lower()
    name = re.sub(r"[\W_]+|^(?=\d)", "_", stem).strip("_")
    try:
        require_name(name)
    except ValueError:
        name = "mine"
    return f"my_{name}" if name in TASKS else name


def _describe_well(store: Store) -> tuple[list[Line], float]:
    """The lines for a file of The Well, which states all that a section needs."""
    layout = from_well(store)["layout"].values()
    fields = [entry["fields"][0] for entry in layout if "time" in entry["axes"]]
    constant = [entry["fields"][0] for entry in layout if "time" not in entry["axes"]]
    note = (
        "arrays, axes, boundary, times and parameters as the file says: predicts "
        f"{', '.join(fields) or 'nothing'}" + f", given {', '.join(constant)}" * bool(constant)
    )
    return [Line("layout", "well", note), *_open_questions(fields or constant)], 0.0


def _describe(store: Store) -> tuple[list[Line], float]:
    """(The lines of the section, the fraction of tests if more than the usual one is needed, else 0.)"""
    guess = _guess_layout(store)
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
    require_field(guess)
    _require_one_grid(guess)
    cut, num = _choose_windows(guess)
    if guess.sizes.get("time") == 1 or (guess.is_steady and (len(guess.axes) < 2 or num < FEWEST)):
        raise ValueError(_only_maps(guess, num))
    absent, missing = missing_lines(guess)
    fields = [field_of(array) for array in guess.axes]
    fraction = math.ceil(100 * LEAST / max(1, num)) / 100  # the loader refuses 0
    windows = Line("cut", cut, f"frames: {num} windows of the runs, those of test the last in time")
    section = [
        *_layout_lines(guess),
        *grid_lines(guess, absent),
        *_time_lines(guess),
        *_forcing_lines(guess),
        *length_lines(guess, cut),
        *missing,
        *[windows] * bool(cut),
        *_parameter_lines(guess),
        *_open_questions(fields, bool(guess.series)),
    ]
    return section, fraction if USUAL_FRACTION < fraction <= LARGEST_FRACTION else 0.0


def _require_one_grid(guess: Guess) -> None:
    """Raise ValueError for fields along different axes of space, as those of a staggered grid."""
    space = {array: {word for word in words if word not in WORDS} for array, words in guess.axes.items()}
    for (one, axes), (other, others) in itertools.combinations(space.items(), 2):
        if axes - others and others - axes:
            raise ValueError(
                f"{guess.store.path} holds {one} along {', '.join(sorted(axes))} and {other} along "
                f"{', '.join(sorted(others))}; expected all fields on one grid. Interpolate them to the same "
                f"points ({CONVERT}), and describe that file."
            )


def _guess_layout(store: Store) -> Guess:
    groups = store.groups("*/data")  # as PDEBench stores runs
    if groups and (num_axes := len(store.array(f"{groups[0]}/data").shape)) >= 3:
        return Guess(store, {"*/data": ["time", *"xyz"[: num_axes - 2], "channel"]})
    fields = fields_of(store)
    if not fields:
        raise ValueError(
            f"{store.path} holds {store.listing()}; expected a field, numbers with two axes or more, one of "
            "them of space. Name a file that holds one."
        )
    axes, names, is_sure, found = {}, {}, True, candidates(store, fields)
    for array in fields:
        words, told, tells = words_of(store, store.first(array), len(fields) == 1 or "*" in array, found)
        axes[array] = words
        names, is_sure = told | names, is_sure and tells
    series = series_of(Guess(store, axes, names))
    axes = {array: words for array, words in axes.items() if array not in series} | series
    return Guess(store, axes, names, is_sure, [*series])


def _layout_lines(guess: Guess) -> list[Line]:
    arrays = []
    for array, words in guess.axes.items():
        note = (
            f"of shape {guess.shape(array)}, of: trajectory, time, channel, component (of a vector), "
            "x, y, z; are these its axes, in order?"
        )
        if sum(size > 1 for size in guess.shape(array)) == 2 and not guess.names:
            note = f"{note} Or is it one map, which is no film?"
        arrays.append(Line(array, words, "" if guess.is_sure else note))
    return [Line("layout", tuple(arrays))]


def _choose_windows(guess: Guess) -> tuple[int, int]:
    """(Frames of a window if few long runs are cut into windows, else 0; number of windows or runs)."""
    each, frames = guess.sizes.get("trajectory", 1), guess.sizes.get("time", 1)
    runs = guess.num_trajectories * len(guess.files)
    if runs >= (MOST_PARTS if are_dated(guess.files) else ENOUGH_RUNS) or frames < 3 * SHORTEST:
        return 0, runs
    lengths = guess.lengths
    total, has_gaps = each * sum(lengths), frames_with_gaps(guess)
    longest = max(total // WINDOWS, min(USEFUL, total // FEWEST_WINDOWS, min(lengths) // 4))
    for cut in range(max(SHORTEST, min(LONGEST, longest)), SHORTEST - 1, -1):
        num = each * sum(length // cut for length in lengths)
        if has_gaps.any():  # short windows survive if frames are left out
            whole = [*first_frames(~has_gaps, np.arange(0), range(cut), cut)]
            num = len(whole) * sum(lengths) // len(has_gaps)
            if len(lengths) > 1:  # other files may have more gaps: 20 windows where 26 were expected
                num = 2 * num // 3
        if num >= FEWEST_WINDOWS:
            break
    return cut, num


def _only_maps(guess: Guess, num: int) -> str:
    """The error message for maps without an axis of time."""
    path, maps, files = guess.store.path, " and of ".join(guess.axes), guess.files
    if len(files) > 1 and "trajectory" not in guess.words:
        return (
            f"{path} holds one map of {maps}, as do {len(files)} files of such names; expected the frames of "
            f"a run in one file, with an axis of time. Join them ({CONVERT}), and describe that file."
        )
    return (
        f"{path} holds {num} map{'s' * (num > 1)} of {maps}, without an axis of time; expected frames, or "
        "many pairs of a field that is given and one that follows from it. Take files with these, an axis "
        "that counts them, or many files whose names differ in a number."
    )


def _time_lines(guess: Guess) -> list[Line]:
    """The line inputs of a steady task, or dt if the file has no times."""
    store = guess.store
    if guess.is_steady:
        return [
            Line("inputs", [*guess.places[0].fields], "no array has an axis of time: which one is given?")
        ]
    found, name = times_in(store, guess.places), ""
    if found is None and (name := guess.names.get("time", "")):
        found = times_in(store, guess.places, name)
    if found is None:
        numbers = in_words(numbers_of(store))
        known = f" ({numbers})" if numbers else ""
        return [Line("dt", 1.0, f"between stored frames, or the name of what holds it{known}?")]
    place, times = found
    steps = np.diff(times)
    named = [Line("dt", name, "the array of times")] * bool(name)
    if gaps := len(jumps_in(times)):
        note = f"{place} has {gaps} steps other than {np.median(steps):g}: no window crosses them"
        return [*named, Line(note=note)]
    if is_even(times) or steps.min() <= 0:
        return named
    question = f"{place} has steps of {steps.min():g} to {steps.max():g}: count them as equal?"
    return [Line("dt", tidy(float(np.median(steps))), question)]


def _forcing_lines(guess: Guess) -> list[Line]:
    if not guess.series:
        return []
    others = [
        array for array in [*guess.axes][1:] if array not in guess.series and "time" in guess.axes[array]
    ]
    rest = ", ".join(map(field_of, others))
    note = "known in advance, and so not predicted?" + f" {rest}, too?" * bool(rest)
    return [Line("forcing", [*map(field_of, guess.series)], note)]


def _differing(runs: Sequence[dict[str, float]]) -> list[str]:
    """The places of numbers that every run has and that differ."""
    places = [place for place in (runs or [{}])[0] if all(place in run for run in runs)]
    return [place for place in places if len({run[place] for run in runs}) > 1]


def _parameter_lists(guess: Guess) -> list[str]:
    """Lists with one number per trajectory that are no coordinates and may be parameters."""
    store, num = guess.store, guess.num_trajectories
    known = {*guess.names.values(), *(name for name, _ in guess.coordinates.values())}
    known |= {name for array in guess.axes for name in store.runs(array)}
    known |= {axis for name in store.names() for axis in store.array(name).axes}
    return [
        name
        for name, values in lists_of(store, guess.axes).items()
        if name not in known
        and not is_place(name)
        and not is_called(name, COUNTERS)
        and len(values) == num
        and np.isfinite(values).all()
    ]


def _parameter_lines(guess: Guess) -> list[Line]:
    """parameters: lists of numbers that are no coordinates, and attributes that differ between files."""
    store, arrays = guess.store, [*guess.axes]
    groups = store.groups(guess.array)[:MOST_COMPARED] if "*" in guess.array else []
    numbers, files = numbers_of(store), []
    for path in sorted(guess.files[:MOST_COMPARED], key=lambda one: one != Path(store.path)):
        with open_store(path) as other:
            files.append(numbers_of(other) | ({} if groups else numbers_of_run(other, arrays, "")))
    differing = _differing(files) + _differing([numbers_of_run(store, arrays, group) for group in groups])
    places = {}  # of several of one name the first
    for name in (*differing, *_parameter_lists(guess)):
        if len(places) < MOST_PARAMETERS:
            places.setdefault(field_of(name.rpartition("@")[2]), name)
    same = {name: value for name, value in numbers.items() if name not in {*differing, *places.values()}}
    lines = []
    if places:
        lines.append(Line("parameters", places, "does the equation depend on these?"))
    if same:
        note = f"is {in_words(same)} another in further files, and not dt or a length?"
        places = {field_of(name): name for name in [*same][:MOST_PARAMETERS]}
        lines.append(Line("parameters", places, note, is_offered=True))
    return lines


def _open_questions(fields: list[str], is_forced: bool = False) -> list[Line]:
    """Keys that no file answers, as comments."""
    first, last = fields[:1], fields[-1:]
    questions = [
        ("positive", first, "always above zero, over orders of magnitude?"),
        ("conserved", first, "is its mean over space kept?"),
        (
            "symmetries",
            ["shift", "mirror"],
            "is a solution, shifted along periodic axes, a solution (shift_x: along x alone; not along what "
            "a force varies with)? Its mirror image?",
        ),
        ("vector", fields, "which fields are the components of a vector, which a mirror turns round?"),
    ]
    if len(fields) > 1 and not is_forced:
        note = "which fields vary in time and are known in advance (heating, a control)?"
        questions.insert(2, ("forcing", last, note))
    return [Line(key, value, note, is_offered=True) for key, value, note in questions]


def _examine(name: str, section: dict[str, Any], test_fraction: float) -> Trajectories:
    """The trajectories of the first files. Raises ValueError or FileNotFoundError as the loader does for this
    section, and as the doctor does for these files."""
    full, _ = complete(name, {**DEFAULTS, **section})
    layout = {array: SimpleNamespace(**entry) for array, entry in full["layout"].items()}
    task = make_user_task(name, facts(SimpleNamespace(**full | {"layout": layout})))
    paths = user_files(name, full["files"])

    keys = ("resolution", "num_frames", "dt", "cut")
    opened = partial(open_user_files, task, paths[:MOST_EXAMINED], **{key: full[key] for key in keys})
    data = opened()
    num = data.num_trajectories * data.num_frames * len(task.channels) * math.prod(data.space)
    if len(paths) <= MOST_EXAMINED and num <= SCANNED:
        opened(skip_missing=full["skip_missing"]).split(VAL_FRACTION, test_fraction)
    return data
