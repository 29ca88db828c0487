"""Which arrays of a file are fields, and words for their axes: from their names, from the lengths of
coordinates, else in the usual order."""

import itertools
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ups.userdata.describe_lines import Line
from ups.userdata.grid import is_globe
from ups.userdata.inspect_file import coordinate, is_even, is_even_grid
from ups.userdata.layout import WORDS, canonical_word, field_of
from ups.userdata.readers import Store, Stored
from ups.userdata.times import TIMES

NUMBER = re.compile(r"\d+(?:\.\d+)?")
SPACE = ("x", "y", "z")
MOST_CHANNELS = 8  # of an axis without a name
SAMPLED = 16  # frames, and cells along an axis, that are compared
FOLLOWS = 0.8  # difference of frames over their mean deviation: 1.4 if their order is random
EVEN = 1e-3  # of a step, by which the steps of a coordinate may differ
# attributes of an array that name arrays which describe it (CF conventions, 5 and 7)
NAMING = (
    "ancillary_variables",
    "bounds",
    "cell_measures",
    "climatology",
    "coordinates",
    "formula_terms",
    "grid_mapping",
)
COUNTS = ("coordinate", "grid/", "dimensions/")  # in names of arrays that are no fields


@dataclass(frozen=True)
class Guess:
    """The fields of an open file, and the words for the axes of each: array -> words."""

    store: Store
    axes: dict[str, list[str]]

    @property
    def array(self) -> str:
        """The main field."""
        return next(iter(self.axes))

    @property
    def words(self) -> list[str]:
        return self.axes[self.array]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Word -> length, of the main field."""
        return dict(zip(self.words, self.shape(self.array), strict=True))

    @property
    def space(self) -> list[str]:
        words = dict.fromkeys(itertools.chain(*self.axes.values()))
        return [axis for axis in words if axis not in WORDS]

    @property
    def is_steady(self) -> bool:
        return all("time" not in words for words in self.axes.values())

    def shape(self, array: str) -> tuple[int, ...]:
        return self.store.first_array(array).shape

    @cached_property
    def coordinates(self) -> dict[str, str]:
        """Axis -> the array of its coordinates: its name begins like the axis, its steps are even."""
        return {
            axis: name
            for axis, size in self.sizes.items()
            for name, values in lists_of(self.store).items()
            if _begins(name, axis) and len(values) == size and _is_coordinate(values)
        }


def fields_of(store: Store) -> list[str]:
    """The arrays that may be fields: numbers with the most axes, and those with one axis less. A pattern
    stands for arrays of one name in numbered groups."""
    arrays = {name: store.array(name) for name in store.names()}
    named = {
        word
        for name in arrays
        for attribute in NAMING
        for word in str(store.attributes(name).get(attribute, "")).replace(":", " ").split()
    }
    fitting = {
        name: array
        for name, array in arrays.items()
        if name not in named
        and array.dtype.kind in "fiub"
        and min(array.shape, default=0) > 0
        and not is_place(name)
        and sum(size > 1 for size in array.shape) >= 2
    }
    shapes = [array.shape for array in fitting.values() if array.dtype.kind == "f"]
    fitting = {  # whole numbers may be indices
        name: array
        for name, array in fitting.items()
        if array.dtype.kind == "f" or not shapes or array.shape in shapes
    }
    most = max((len(array.shape) for array in fitting.values()), default=0)
    found = [name for name, array in fitting.items() if len(array.shape) >= most - 1]
    first = {*arrays[found[0]].axes} if found else set()
    kept = [name for name in found if len(arrays[name].shape) == most or {*arrays[name].axes} <= first]
    return merge_groups(store, kept)


def merge_groups(store: Store, names: list[str]) -> list[str]:
    """The names of arrays, with a pattern such as */u for arrays in groups whose names differ in numbers
    alone: each group is a run."""
    forms: dict[str, list[str]] = {}
    for name in names:
        group, _, rest = name.partition("/")
        forms.setdefault(f"{NUMBER.sub('#', group)}/{rest}" if rest else name, []).append(name)
    found = []
    for same in forms.values():
        shapes = [store.array(name).shape for name in same]
        pattern = "*/" + same[0].partition("/")[2]
        is_run = len(same) > 1 and len({shape[1:] for shape in shapes}) == 1
        groups = [name.partition("/")[0] for name in same]
        found += [pattern] if is_run and store.groups(pattern) == groups else same
    return found


def is_place(name: str) -> bool:
    """Whether an array's name is that of a coordinate."""
    return any(part in name for part in COUNTS) or name.endswith(("_bnds", "_bounds"))


def lists_of(store: Store) -> dict[str, np.ndarray]:
    """The arrays with one axis and their numbers."""
    arrays = {name: store.array(name) for name in store.names()}
    return {
        name: np.asarray(store.read(name), np.float64)
        for name, array in arrays.items()
        if len(array.shape) == 1 and array.dtype.kind in "fiu"
    }


def words_of(store: Store, array: str, is_alone: bool) -> tuple[list[str], bool]:
    """Words for the axes of an array, and whether the file determines them by names or by the lengths of
    coordinates. is_alone: no other array is a field, so there are no pairs of maps."""
    found = store.array(array)
    if found.axes:
        words = [_word(store, axis, size) for axis, size in zip(found.axes, found.shape, strict=True)]
        return words, all(word in (*SPACE, *WORDS) or coordinate(store, [], [word]) for word in words)
    lengths = {axis: len(place[1]) for axis in SPACE if (place := coordinate(store, [], [axis]))}
    if times := coordinate(store, [], TIMES):
        lengths["time"] = len(times[1])
    for name, values in lists_of(store).items():  # a coordinate rises evenly, parameters do not
        if _is_coordinate(values):
            for axis in ("time", *SPACE):
                if _begins(name, axis):
                    lengths.setdefault(axis, len(values))
        elif len(values) in found.shape:
            lengths.setdefault("trajectory", len(values))
    if words := _words_by_length(found, lengths):
        return words, True
    return usual_words(found.shape, _is_film(store, array), is_alone), False


def _is_coordinate(values: np.ndarray) -> bool:
    return len(values) > 2 and is_even_grid(values, EVEN)


def _begins(name: str, axis: str) -> bool:
    return name.rsplit("/", 1)[-1].lower().startswith("t" if axis == "time" else axis)


def _word(store: Store, axis: str, size: int) -> str:
    """The word for an axis that the file names. An axis whose coordinate does not rise or fall evenly, such
    as levels of pressure, counts channels."""
    word = canonical_word(axis)
    if word not in WORDS and size == 1:
        return "single"
    place = coordinate(store, [], [axis]) if word not in WORDS else None
    if place is None:
        return re.sub(r"\W", "_", word)
    attributes = store.attributes(place[0])
    direction, units = str(attributes.get("axis", "")), str(attributes.get("units", ""))
    if direction == "T" or " since " in units:
        return "time"
    if direction in ("X", "Y") or is_globe(word, units):
        return word
    # height, depth or pressure (CF conventions, 4.3)
    is_vertical = direction == "Z" or str(attributes.get("positive", "")).lower() in ("up", "down")
    return "channel" if is_vertical or not is_even_grid(place[1]) else word


def _words_by_length(array: Stored, lengths: dict[str, int]) -> list[str]:
    """The words of an array if each length belongs to one axis alone, and at most one axis remains, which
    counts trajectories; else []."""
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


def usual_words(shape: tuple[int, ...], is_film: bool, is_alone: bool) -> list[str]:
    """Words in the usual order for axes without names. is_film: the first axis is time, because neighbours
    along it are alike; is_alone: no other array is a field."""
    kept = [axis for axis, size in enumerate(shape) if size > 1 or axis == 0]
    sizes = [shape[axis] for axis in kept]
    lead = ["time"] if is_film else ["trajectory"]
    if not is_film and shape[1] > 1 and len(sizes) > (3 if len({*sizes[1:]}) == 1 and not is_alone else 2):
        lead.append("time")  # maps of as many cells along each axis, of several fields, are pairs
    if len(sizes) == 2 and is_alone:
        lead = ["time"]
    inner = sizes[len(lead) :]
    small = [
        number
        for number, size in enumerate(inner)
        if len(inner) > 1 and MOST_CHANNELS >= size <= min([*inner[:number], *inner[number + 1 :]]) / 2
    ]
    words = iter(SPACE)
    named = ["channel" if number in small[:1] else next(words, "component") for number in range(len(inner))]
    if small and small[0] == len(inner) - 1 == inner[-1]:
        named[-1] = "component"
    found = dict(zip(kept, [*lead, *named], strict=True))
    return [found.get(axis, "single") for axis in range(len(shape))]


def _is_film(store: Store, array: str) -> bool:
    """Whether neighbours along the first axis of an array are alike, as frames are."""
    shape = store.array(array).shape
    some = [slice(0, SAMPLED), *[slice(None, None, max(1, size // SAMPLED)) for size in shape[1:]]]
    u = np.asarray(store.read(array, tuple(some)), np.float64)
    apart = np.abs(u - u.mean(0)).mean()
    return len(u) > 2 and bool(np.abs(np.diff(u, axis=0)).mean() < FOLLOWS * apart)


def other_reading(guess: Guess) -> list[Line]:
    """Another layout that the shapes allow: a film in place of trajectories, frames in place of maps."""
    array, words = guess.array, guess.words
    space = [word for word in words if word not in WORDS]
    is_named = "single" in words or not {*space} <= {*SPACE}
    if is_named or (words[:2] == ["trajectory", "time"] and min(guess.shape(array)[:2]) <= MOST_CHANNELS):
        return []
    names, more = [array], []
    if words[:2] == ["trajectory", "time"] and len(space) < len(SPACE):
        moved = [SPACE[SPACE.index(word) + 1] if word in space else word for word in words[2:]]
        if len(guess.axes) > 1:
            kind, other, names = "maps", ["trajectory", SPACE[0], *moved], [*guess.axes]
            more = [Line("inputs", [field_of(array)], is_offered=True)]
        else:
            kind, other = "one film", ["time", SPACE[0], *moved]
    elif words[0] == "time":
        rest = [word for word in words if word not in ("trajectory", "time")][1:]
        if not rest:
            return []
        kind, other = "trajectories", ["trajectory", "time", *rest]
    elif words[2:]:
        kind, other = "frames", ["trajectory", "time", *words[1:-1]]
    else:
        kind, other = "frames", ["time", *words[1:]]
    layout = dict.fromkeys(names, other)
    return [Line("layout", layout, f"or {kind}, in place of the layout above?", is_offered=True), *more]


def series_of(guess: Guess) -> dict[str, list[str]]:
    """Array -> its words, [time] or [trajectory, time], of arrays with one number per frame of the fields,
    which may be known in advance. A length counts only if no axis of space has it too."""
    store, main = guess.store, max(guess.axes, key=lambda name: len(guess.axes[name]))
    sizes = dict(zip(guess.axes[main], guess.shape(main), strict=True))
    space = {size for axis, size in sizes.items() if axis not in WORDS}
    if "time" not in sizes or not space:
        return {}
    found = {}
    for name in merge_groups(store, list(store.names())):
        array = store.first_array(name)
        if name == main or array.dtype.kind != "f" or name.rsplit("/", 1)[-1] in (*TIMES, *array.axes):
            continue
        words = [canonical_word(axis) for axis in array.axes] or ["trajectory", "time"][
            2 - len(array.shape) :
        ]
        is_series = words in (["time"], ["trajectory", "time"]) and len(words) == len(array.shape)
        is_sure = array.axes or sizes["time"] not in {*space, sizes.get("trajectory")}
        if is_series and is_sure and all(sizes.get(w) == n for w, n in zip(words, array.shape, strict=True)):
            values = np.asarray(store.read(store.first(name)))
            if values.size and not (words == ["time"] and is_even(values)):
                found[name] = words
    return found


def parameter_lists(guess: Guess) -> list[str]:
    """Lists of numbers that are no coordinates and may be parameters, one number per trajectory."""
    store = guess.store
    known = {*guess.coordinates.values()}
    known |= {array.replace("*", group) for array in guess.axes for group in store.groups(array) or [""]}
    for name in store.names():  # coordinates, and what varies along a named axis
        axes = store.array(name).axes
        known |= {*axes, *[name] * (canonical_word(" ".join(axes)) in WORDS[1:])}
    return [
        name
        for name in lists_of(store)
        if name not in known and not is_place(name) and name.rsplit("/", 1)[-1] not in (*TIMES, *SPACE)
    ]
