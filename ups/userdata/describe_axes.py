"""Which arrays of a file are fields, and words for their axes: from their names, from the lengths of
coordinates (lists of numbers that rise or fall, whatever their names), else in the usual order."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ups.tasks import Place
from ups.userdata.grid import is_globe
from ups.userdata.inspect_file import (
    Coordinate,
    coordinate,
    is_even_grid,
    is_monotone,
    line_in,
)
from ups.userdata.layout import SPACE as SPACE_WORDS
from ups.userdata.layout import WORDS, canonical_word, field_names, field_of
from ups.userdata.readers import Store, Stored, natural, open_store
from ups.userdata.times import TIMES

NUMBER = re.compile(r"\d+(?:\.\d+)?")
# arrays of one shape whose names differ in a number are the frames of a film from this many on, or in groups
# whose names say so
FRAMES = 8
FRAME = re.compile(r"(t|time|frame|step|snapshot|iteration)s?[\W_]*#", re.IGNORECASE)
CONVERT = 'docs/own_data.md, "Files to convert first"'
MOST_FIELDS = 100  # of one file that is described
MOST_ARRAYS = 1000  # likewise, besides those of the same names in numbered groups
MOST_CHANNELS = 8  # of an axis without a name
MOST_FILES = 20  # sibling files whose runs are measured
SAMPLED = 16  # frames, and cells along an axis, that are compared
FOLLOWS = 0.8  # difference of frames over their mean deviation: 1.4 if their order is random
FEWEST_CELLS = 8  # of a grid; fewer along the only axis of space are variables
COMPARED = 4096  # cells in a row
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
SPACE = ("x", "y", "z")
SPACE_NAMES = SPACE_WORDS - {*"ijks"}  # these may be parameters as well
# lists that count or describe steps of a solver, and are neither times nor parameters
COUNTERS = re.compile(
    r"(wall|cpu|world)_?(time|clock)|(time_?)?steps?|dt|iter\w*|i?count\w*|write_number|cycle\w*|cfl"
)
NODES = re.compile(
    r"(\w*_)?(nodes?|points?|pts|positions?|pos|coords?|coordinates?|vertices|verts|xyz?|grid|mesh)"
)
POINTS = re.compile(r"(stations?|sites?|sensors?|gauges?|probes?|nodes?)(_?(ids?|names?|numbers?|index))?")


@dataclass(frozen=True)
class Axis:
    """A list of numbers that may be the coordinate of an axis. kind: time, an axis of space, or "" if its
    name does not tell."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True)
class Guess:
    """The fields of an open file, and the words for the axes of each: array -> words. names: axis -> the list
    that is its coordinate, as far as lengths tell; is_sure: the file determines the words; series: those of
    the arrays that hold one number per frame."""

    store: Store
    axes: dict[str, list[str]]
    names: dict[str, str] = field(default_factory=dict)
    is_sure: bool = True
    series: Sequence[str] = ()

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

    @cached_property
    def places(self) -> list[Place]:
        """The arrays, with names for their fields."""
        found = []
        for array, words in self.axes.items():
            num_channels = dict(zip(words, self.shape(array), strict=True)).get("channel")
            rank = min(2, words.count("component"))
            names = field_names(field_of(array), num_channels, rank, self.space)
            found.append(Place(array, tuple(words), tuple(names)))
        return found

    @cached_property
    def files(self) -> list[Path]:
        return sibling_files(Path(self.store.path))

    @cached_property
    def lengths(self) -> list[int]:
        """The frames of the runs, in every group of the file and in its sibling files."""
        array, axis = self.array, self.words.index("time")
        shapes = [self.store.array(name).shape for name in self.store.runs(array)]
        for path in self.files[:MOST_FILES]:
            if path != Path(self.store.path):
                with open_store(path) as other:
                    same = other.array(other.first(array))
                shapes += [same.shape] if same is not None else []
        return [shape[axis] for shape in shapes if len(shape) > axis]  # an array may be called "*" itself

    @property
    def num_trajectories(self) -> int:
        """Of one file."""
        return len(self.store.runs(self.array)) * self.sizes.get("trajectory", 1)

    def shape(self, array: str) -> tuple[int, ...]:
        return self.store.first_array(array).shape

    def usual(self, axis: str) -> Coordinate | None:
        """The coordinate that the loader finds by the name of the axis."""
        found = coordinate(self.store, self.places, [axis])
        return None if found is None or found[0] in self.axes else found

    @cached_property
    def coordinates(self) -> dict[str, Coordinate]:
        """Axis of space -> its coordinate."""
        by_kind = {one.kind: one.name for one in reversed(candidates(self.store, self.axes)) if one.kind}
        found = {
            axis: self.usual(axis)
            or coordinate(self.store, self.places, [self.names.get(axis) or by_kind.get(axis, axis)])
            for axis in self.space
        }
        return {axis: there for axis, there in found.items() if there and there[0] not in self.axes}


def sibling_files(path: Path) -> list[Path]:
    """The files of a folder whose names differ in numbers alone, with `path` among them, in natural order."""
    form, inside = NUMBER.sub("#", path.stem), [*path.parent.glob("*")] if path.parent.is_dir() else []
    found = [other for other in inside if other.suffix == path.suffix and NUMBER.sub("#", other.stem) == form]
    return sorted(found, key=lambda other: natural(str(other))) or [path]


def fields_of(store: Store) -> list[str]:
    """The arrays that may be fields: numbers with the most axes, and those with one axis less. A pattern
    stands for arrays of one name in numbered groups."""
    arrays = {name: store.array(name) for name in store.names()}
    _require_one_film(store, [name for name in arrays if max(arrays[name].shape, default=1) > 1])
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
        and not are_nodes(name, array)
        and sum(size > 1 for size in array.shape) >= 2
        and not is_monotone(line_in(store, name))  # as numpy.meshgrid makes a coordinate
    }
    shapes = [array.shape for array in fitting.values() if array.dtype.kind == "f"]
    fitting = {  # whole numbers may be indices
        name: array
        for name, array in fitting.items()
        if array.dtype.kind == "f" or not shapes or array.shape in shapes
    }
    most = max((len(array.shape) for array in fitting.values()), default=0)
    found = [
        name
        for name, array in fitting.items()
        if len(array.shape) >= most - 1 and not (len(array.shape) < most and is_table(array))
    ]
    first = {*arrays[found[0]].axes} if found else set()
    kept = [name for name in found if len(arrays[name].shape) == most or {*arrays[name].axes} <= first]
    if starred := [name for name in kept if "*" in name]:
        raise ValueError(
            f"{store.path} holds an array called {starred[0]!r}; expected names without *, which stands for "
            "the groups of runs in a layout. Write it under another name."
        )
    fields = merge_groups(store, kept)
    if len(fields) > MOST_FIELDS:
        raise _too_many(store, f"{len(fields)} fields ({', '.join(fields[:3])}, ..)", MOST_FIELDS)
    return fields


def _require_one_film(store: Store, names: Sequence[str]) -> None:
    """Raise ValueError for a film whose frames are arrays of their own."""
    forms: dict[str, list[str]] = {}
    for name in names:
        forms.setdefault(NUMBER.sub("#", name), []).append(name)
    for form, same in forms.items():
        group, _, rest = form.partition("/")
        is_run = bool(rest) and "#" in group and not FRAME.fullmatch(group)  # each numbered group is a run
        shapes = {store.array(name).shape for name in same}
        if len(same) >= FRAMES and len(shapes) == 1 and not is_run and "#" != form:
            raise ValueError(
                f"{store.path} holds {len(same)} arrays {same[0]}, {same[1]}, .. of shape {shapes.pop()}; "
                f"expected one with an axis of time. Stack them ({CONVERT}), and describe that file; or, if "
                "they are fields, write the section yourself."
            )


def require_few(store: Store, names: Iterable[str]) -> None:
    """Raise ValueError for a file of too many arrays to be looked at one by one. Numbered groups may be runs
    and count once."""
    first = {_form(name): name for name in names}
    if len(first) > MOST_ARRAYS:
        some = ", ".join([*first.values()][:3])
        raise _too_many(store, f"more than {MOST_ARRAYS} arrays of different names ({some}, ..)", MOST_ARRAYS)


def _too_many(store: Store, what: str, most: int) -> ValueError:
    return ValueError(
        f"{store.path} holds {what}; expected at most {most} in a file that is described. Name the fields in "
        "a section of your own (layout:, docs/own_data.md), which reads no other, or copy them elsewhere."
    )


def _form(name: str) -> str:
    """The name of an array with # in place of the numbers of its group, or of a name that is one."""
    group, _, rest = name.partition("/")
    return f"{NUMBER.sub('#', group)}/{rest}" if rest else re.sub(r"^\d+$", "#", name)


def is_table(array: Stored) -> bool:
    """Whether an array has the shape of a few numbers of each trajectory."""
    return len(array.shape) == 2 and 1 < min(array.shape) <= MOST_CHANNELS


def merge_groups(store: Store, names: list[str]) -> list[str]:
    """The names of arrays, with a pattern such as */u for arrays in groups whose names differ in numbers
    alone: each group is a run."""
    if (
        len(names) > 1
        and all(map(str.isdigit, names))
        and len({store.array(name).shape for name in names}) == 1
    ):
        return ["*"] if store.groups("*") == [*names] else names  # a list of runs
    forms: dict[str, list[str]] = {}
    for name in names:
        forms.setdefault(_form(name) if "/" in name else name, []).append(name)
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


def words_of(
    store: Store, array: str, is_alone: bool, found: Sequence[Axis] = ()
) -> tuple[list[str], dict[str, str], bool]:
    """Words for the axes of an array, word -> the coordinate that told it, and whether the file determines
    the words by names or by the lengths of coordinates. is_alone: no other array is a field, so there are no
    pairs of maps; found: what may be coordinates."""
    stored = store.array(array)
    if stored.axes:
        words = [_word(store, axis, size) for axis, size in zip(stored.axes, stored.shape, strict=True)]
        num_axes = sum(word not in ("", *WORDS) for word in words)
        words = [word or _unnamed(size, num_axes) for word, size in zip(words, stored.shape, strict=True)]
        is_known = all(word in (*SPACE, *WORDS) or coordinate(store, [], [word]) for word in words)
        frames = stored.shape[words.index("time")] if "time" in words else 0
        times = next((one.name for one in found if (one.kind, one.size) == ("time", frames)), "")
        return words, {"time": times} if times else {}, is_known
    return _words_by_length(store, array, is_alone, found)


def _words_by_length(
    store: Store, array: str, is_alone: bool, found: Sequence[Axis]
) -> tuple[list[str], dict[str, str], bool]:
    """`words_of` an array whose axes have no names: by the lengths of lists whose names tell an axis, and the
    others in the usual order of trajectories, time and space."""
    shape = store.array(array).shape
    known, names, is_sure = assigned(shape, found)
    words = dict(known)
    rest = [axis for axis, size in enumerate(shape) if axis not in words and (size > 1 or axis == 0)]
    for number, axis in enumerate(rest):
        size, taken, others = shape[axis], [*words.values()], [n for n in rest if n != axis]
        space = [word for word in taken if word not in WORDS]
        inner = [shape[n] for n in others if words.get(n) not in ("trajectory", "time")]
        letter = next((name for name in SPACE if name not in taken), "component")
        before_time = next((axis < n for n, word in words.items() if word == "time"), True)
        is_square = not before_time and any(shape[n] == size for n, word in known.items() if word != "time")
        if known or not number:
            is_film = _is_alike(store, array, axis) or (is_alone and not known and len(rest) == 2)
        else:  # maps of as many cells along each axis, of several fields, are pairs
            are_pairs = not is_alone and len({shape[n] for n in rest[1:]}) == 1
            is_film = axis == 1 and len(rest) > 2 + are_pairs
        is_few = size <= min([MOST_CHANNELS, *(n / 2 for n in inner)])
        is_vector = is_few and axis == rest[-1] and size == len(space)
        rules = (  # word, whether it fits, whether it is no guess; the first that fits counts
            (letter, is_square or (not space and axis == rest[-1]), False),
            ("time", is_film, False),
            ("trajectory", before_time or (space and known), is_sure and not others and "time" in taken),
            ("component" if is_vector else "channel", is_few and "channel" not in taken, False),
            (letter, True, False),
        )
        words[axis], is_sure = next(
            (word, tells) for word, fits, tells in rules if fits and (word == letter or word not in taken)
        )
    for axis, word in words.items():
        fitting = [one.name for one in found if not one.kind and one.size == shape[axis]]
        if word not in names and word in ("time", *SPACE) and fitting and shape.count(shape[axis]) == 1:
            names[word], is_sure = fitting[0], False
    return [words.get(axis, "single") for axis in range(len(shape))], names, is_sure


def _unnamed(size: int, num_axes: int) -> str:
    """The word for an axis without a name among others that have one, as Dedalus stores vectors."""
    if size == 1:
        return "single"
    return "component" if size == num_axes else "channel" if size <= MOST_CHANNELS else "trajectory"


def _word(store: Store, axis: str, size: int) -> str:
    """The word for an axis that the file names. An axis whose coordinate does not rise or fall evenly, such
    as levels of pressure, counts channels."""
    word = canonical_word(axis)
    if not axis or (word not in WORDS and size == 1):
        return "single" if axis else ""
    place = coordinate(store, [], [axis]) if word not in WORDS else None
    if place is None:
        return re.sub(r"\W", "_", word)
    attributes = store.attributes(place[0])
    direction, units = str(attributes.get("axis", "")), str(attributes.get("units", ""))
    if direction == "T" or " since " in units:
        return "time"
    if direction in ("X", "Y") or is_globe(word, units) or word in ("x", "y"):
        return word
    # height, depth or pressure (CF conventions, 4.3)
    is_vertical = direction == "Z" or str(attributes.get("positive", "")).lower() in ("up", "down")
    return "channel" if is_vertical or not is_even_grid(place[1]) else word


def _is_alike(store: Store, array: str, axis: int, most: int = SAMPLED) -> bool:
    """Whether neighbours along an axis of an array are alike, as frames and cells are. most: cells in a row
    that are compared."""
    shape = store.array(array).shape
    index = [slice(None, None, max(1, size // SAMPLED)) for size in shape]
    index[axis] = slice(0, most)
    u = np.moveaxis(np.asarray(store.read(array, tuple(index)), np.float64), axis, 0)
    u = u[:, np.isfinite(u).all(0)]  # cells of a mask have no values
    if len(u) < 3 or not u.size or not np.ptp(u):
        return False
    apart = np.abs(u - u.mean(0)).mean()
    return bool(np.abs(np.diff(u, axis=0)).mean() <= FOLLOWS * apart)


def require_field(guess: Guess) -> None:
    """Raise ValueError for arrays that are no fields on a grid: variables of an ODE, points of a mesh,
    stations."""
    store, array = guess.store, guess.store.first(guess.array)
    for size in () if store.array(array).axes else store.array(array).shape:
        for name in store.names() if size >= FEWEST_CELLS else ():
            if size in (shape := store.array(name).shape) and are_nodes(name, store.array(name)):
                why = f"{name} holds {sum(shape) - size} coordinates of each"
                raise ValueError(_points_words(guess, size, why))
    [axis, *others] = guess.space or [""]
    if others or axis not in guess.words:
        return
    at = guess.words.index(axis)
    size = store.array(array).shape[at]
    stored = store.array(array).axes
    if size < FEWEST_CELLS:
        raise ValueError(
            f"{store.path} holds {size} numbers of {guess.array} per frame: variables of an ordinary "
            f"differential equation; expected a field on at least {FEWEST_CELLS} cells in space. Take a file "
            "of a field."
        )
    why = scattered(store, size, stored[at] if stored else "")
    times = guess.words.index("time") if "time" in guess.words else None
    if not why and axis not in guess.coordinates and times is not None:
        if _is_alike(store, array, times) and not _is_alike(store, array, at, COMPARED):
            why = "neighbours along it are no more alike than any two"
    if why:
        raise ValueError(_points_words(guess, size, why))


def _points_words(guess: Guess, size: int, why: str) -> str:
    """The refusal of points that are no grid."""
    return (
        f"{guess.store.path} holds {guess.array} on {size} points that are no grid ({why}), such as nodes of "
        "a mesh or stations; expected cells in order along each axis of space. Interpolate to a regular grid "
        "first, as scipy.interpolate.griddata does, and describe that file."
    )


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
        is_known = name in guess.names.values() or name.rsplit("/", 1)[-1] in (*TIMES, *array.axes)
        if name == main or array.dtype.kind != "f" or is_known or is_called(name, COUNTERS):
            continue
        words = [canonical_word(axis) for axis in array.axes] or ["trajectory", "time"][
            2 - len(array.shape) :
        ]
        is_series = words in (["time"], ["trajectory", "time"]) and len(words) == len(array.shape)
        is_sure = array.axes or sizes["time"] not in {*space, sizes.get("trajectory")}
        if is_series and is_sure and all(sizes.get(w) == n for w, n in zip(words, array.shape, strict=True)):
            values = np.asarray(store.read(store.first(name)))
            if np.isfinite(values).all() and np.ptp(values) > 0:
                found[name] = words
    return found


def lists_of(store: Store, fields: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """The lists of numbers of a file, of arrays that vary along one axis; of runs in groups those of the
    first group, named as in each group."""
    groups = next((store.groups(name) for name in fields if "*/" in name), [""])
    others, found = {*groups[1:]}, {}
    for name in store.names():
        group, is_inside, rest = name.partition("/")
        array = store.array(name)
        if group not in others and array.shape and array.dtype.kind in "fiu" and name not in fields:
            if (values := line_in(store, name)) is not None:
                found[rest if is_inside and group == groups[0] else name] = values
    return found


def kind_of(name: str, units: str = "") -> str:
    """What a list of this name is the coordinate of: time, an axis of space, "" for any."""
    last = next((part for part in reversed(name.lower().split("/")) if not re.fullmatch(r"[\d.]+", part)), "")
    if last in SPACE_NAMES:
        return last
    if " since " in units or re.match(r"t|clock|date|.*time", last) or is_called(name, COUNTERS):
        return "time"
    if globe := re.match("lat|lon", last):
        return globe[0]
    return next((axis for axis in SPACE if last.startswith(axis) or re.fullmatch(rf"\w+_{axis}", last)), "")


def is_called(name: str, pattern: re.Pattern[str]) -> bool:
    """Whether the name of an array, without its groups, fits a pattern."""
    return pattern.fullmatch(name.rsplit("/", 1)[-1].lower()) is not None


def are_nodes(name: str, array: Stored) -> bool:
    """Whether an array holds the coordinates of points, two or three numbers each."""
    is_list = len(array.shape) == 2 and {2, 3} & {*array.shape} and array.dtype.kind == "f"
    return bool(is_list) and is_called(name, NODES)


def candidates(store: Store, fields: Iterable[str]) -> list[Axis]:
    """The lists that rise or fall, those of usual names first."""
    found = [
        Axis(name, kind_of(name, str(store.attributes(name).get("units", ""))), len(values))
        for name, values in lists_of(store, fields).items()
        if is_monotone(values)
    ]
    return sorted(found, key=lambda one: (one.name not in (*TIMES, *SPACE), is_called(one.name, COUNTERS)))


def assigned(shape: Sequence[int], found: Sequence[Axis]) -> tuple[dict[int, str], dict[str, str], bool]:
    """(Axis of the array -> its word, word -> the list that is its coordinate, whether lengths alone tell.)

    Names decide between lists of one length, and an axis of two of them has the first."""
    best: dict[str, Axis] = {}
    for one in found:
        if one.kind and (one.size in shape or (one.kind == "time" and one.size - 1 in shape)):
            best.setdefault(one.kind, one)
    words: dict[int, str] = {}
    is_sure = True
    for size in dict.fromkeys(shape):
        axes = [axis for axis, n in enumerate(shape) if n == size > 1]
        exact = [kind for kind, one in best.items() if one.size == size]
        longer = [kind for kind, one in best.items() if one.size == size + 1 and one.size not in shape]
        kinds = sorted([*exact, *longer], key=lambda kind: (kind != "time", [*best].index(kind)))
        if len(kinds) >= len(axes):
            words |= dict(zip(axes, kinds, strict=False))
            is_sure &= len(axes) == len(kinds) == 1
        elif kinds:  # which of several axes of one length is it?
            words |= dict(zip(axes[-len(kinds) :] if "time" not in kinds else axes, kinds, strict=False))
            is_sure = False
    return words, {kind: best[kind].name for kind in words.values()}, is_sure


def scattered(store: Store, size: int, axis: str) -> str:
    """Why `size` cells along the only axis of space, called `axis`, are points and no grid; "" if they may be
    one."""
    lists: dict[str, str] = {}
    for name in store.names():
        array = store.array(name)
        if array.shape == (size,) and is_called(name, POINTS):
            return f"{name} counts them"
        if array.shape == (size,) and array.dtype.kind == "f" and array.axes in ((), (axis,)):
            values = np.asarray(store.read(name))
            if not array.axes or not is_monotone(values):
                lists.setdefault(kind_of(name)[:3], name)
    for kinds in (SPACE, ("lat", "lon")):
        if len(names := [lists[kind] for kind in kinds if kind in lists]) > 1:
            return f"{' and '.join(names)} hold {len(names)} coordinates of each"
    return ""
