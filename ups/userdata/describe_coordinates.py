"""Coordinates in a file: lists of numbers that rise or fall and are as long as an axis of the fields,
whatever their names. Their lengths tell which axis is which; names decide between lists of one length."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ups.userdata.inspect_file import COORDINATES, coordinate, line_in, rises
from ups.userdata.layout import SPACE as SPACE_WORDS
from ups.userdata.readers import Store, Stored
from ups.userdata.times import TIMES

SPACE = ("x", "y", "z")
SPACE_NAMES = SPACE_WORDS - {*"ijks"}  # these may be parameters as well
# lists that count or describe steps of a solver, and are neither times nor parameters
COUNTERS = re.compile(
    r"(wall|cpu|world)_?(time|clock)|(time_?)?steps?|dt|iter\w*|i?count\w*|write_number|cycle\w*|cfl"
)
# numbers of an equation, one for each trajectory
PARAMETERS = re.compile(
    r"nu|mu|re|ra|pr|ma|eps(ilon)?|alpha|beta|gamma|kappa|reynolds\w*|rayleigh\w*|visc\w*|diffusiv\w*|"
    r"coef\w*|param\w*|amplitude|seed"
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


def is_mesh(store: Store, name: str) -> bool:
    """Whether an array holds a coordinate for each cell, as numpy.meshgrid makes it."""
    values = line_in(store, name)
    return values is not None and (rises(values) or rises(values[::-1]))


def kind_of(name: str, units: str = "") -> str:
    """What a list of this name is the coordinate of: time, an axis of space, "" for any."""
    last = next((part for part in reversed(name.lower().split("/")) if not re.fullmatch(r"[\d.]+", part)), "")
    if last in SPACE_NAMES:
        return last
    if " since " in units or re.match(r"t|clock|date|.*time", last) or is_counter(name):
        return "time"
    if globe := re.match("lat|lon", last):
        return globe[0]
    return next((axis for axis in SPACE if last.startswith(axis) or re.fullmatch(rf"\w+_{axis}", last)), "")


def is_parameter(name: str) -> bool:
    return PARAMETERS.fullmatch(name.rsplit("/", 1)[-1].lower()) is not None


def is_counter(name: str) -> bool:
    return COUNTERS.fullmatch(name.rsplit("/", 1)[-1].lower()) is not None


def are_nodes(name: str, array: Stored) -> bool:
    """Whether an array holds the coordinates of points, two or three numbers each."""
    is_list = len(array.shape) == 2 and {2, 3} & {*array.shape} and array.dtype.kind == "f"
    return bool(is_list) and NODES.fullmatch(name.rsplit("/", 1)[-1].lower()) is not None


def candidates(store: Store, fields: Iterable[str]) -> list[Axis]:
    """The lists that rise or fall, those of usual names first."""
    fields = [*fields]
    usual = []
    for kind, names in (("time", TIMES), *((axis, (axis,)) for axis in SPACE)):
        places = {form.format(name) for name in names for form in COORDINATES}
        found = coordinate(store, [], names) if not places & {*fields} else None
        if found and (rises(found[1]) or rises(found[1][::-1])):
            usual.append(Axis(found[0], kind, len(found[1])))
    known = {axis.name for axis in usual}
    others = [
        Axis(name, kind_of(name, str(store.attributes(name).get("units", ""))), len(values))
        for name, values in lists_of(store, fields).items()
        if name not in known and not is_parameter(name)
        if len(values) > 2 and (rises(values) or rises(values[::-1]))
    ]
    return [*usual, *sorted(others, key=lambda one: (is_counter(one.name), "time" not in one.name.lower()))]


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
        in_space = [kind for kind in kinds if kind != "time"]
        if len(kinds) > len(axes) == len(in_space):
            kinds = in_space
        if len(kinds) >= len(axes):
            words |= dict(zip(axes, kinds, strict=False))
            is_sure &= len(axes) == len(kinds) == 1
        elif kinds:  # which of several axes of one length is it?
            words |= dict(zip(axes[-len(kinds) :] if "time" not in kinds else axes, kinds, strict=False))
            is_sure = False
    unnamed = [(axis, one) for axis, n in enumerate(shape) for one in found if not one.kind and one.size == n]
    time = next((axis for axis, word in words.items() if word == "time"), 0)
    for axis, one in sorted(unnamed, key=lambda pair: (pair[0] < time, pair[0])):
        is_alone = shape.count(one.size) == 1 and axis not in words
        has_time, space = "time" in words.values(), [name for name in SPACE if name not in words.values()]
        if not is_alone or not space or (has_time and len(words) > 1):  # one number for each trajectory
            continue
        is_time = not has_time and (bool(words) or axis < len(shape) - 1)
        words[axis] = word = "time" if is_time else space[0]
        best[word], is_sure = one, False
    return words, {kind: best[kind].name for kind in words.values()}, is_sure


def nodes_of(store: Store, size: int) -> str:
    """The name of an array with coordinates of `size` points, "" if there is none."""
    names = (name for name in store.names() if are_nodes(name, store.array(name)))
    return next((name for name in names if size in store.array(name).shape), "")


def scattered(store: Store, size: int, axis: str) -> str:
    """Why `size` cells along the only axis of space, called `axis`, are points and no grid; "" if they may be
    one."""
    lists: dict[str, str] = {}
    for name in store.names():
        array = store.array(name)
        if array.shape == (size,) and POINTS.fullmatch(name.rsplit("/", 1)[-1].lower()):
            return f"{name} counts them"
        if array.shape == (size,) and array.dtype.kind == "f" and array.axes in ((), (axis,)):
            values = np.asarray(store.read(name))
            if not array.axes or not (rises(values) or rises(values[::-1])):
                lists.setdefault(kind_of(name)[:3], name)
    for kinds in (SPACE, ("lat", "lon")):
        if len(names := [lists[kind] for kind in kinds if kind in lists]) > 1:
            return f"{' and '.join(names)} hold {len(names)} coordinates of each"
    return ""
