"""Words for the axes of arrays that no file names, by their shapes and by what their numbers look like."""

import re

import numpy as np

from ups.userdata.axis_names import WORDS
from ups.userdata.readers import Store

SPACE = ("x", "y", "z")
YAML_WORDS = ("true", "false", "null", "y", "n", "yes", "no", "on", "off")  # to some of its readers
MOST_CHANNELS = 8  # of an axis that nothing names
LOOKED_AT, FOLLOWS = 16, 0.8  # frames, and their difference over their mean deviation: random ones 1.4


def shape_of(store: Store, array: str) -> tuple[int, ...]:
    return store.array(store.first(array)).shape


def field_of(array: str) -> str:
    """The name that a field has by its array's (ups/userdata/section.py)."""
    return re.sub(r"\W+", "_", array.removesuffix("/*").rsplit("/", 1)[-1]).strip("_") or "u"


def quoted(name: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z]\w*", name) and name.lower() not in YAML_WORDS
    return name if is_plain else f'"{name}"'


def usual(shape: tuple[int, ...], is_film: bool, is_alone: bool) -> list[str]:
    """Words in the usual order for axes that nothing names: is_film where neighbours along the first are
    frames that follow each other, is_alone where no other array is a field."""
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


def follows(store: Store, array: str) -> bool:
    """Whether neighbours along the first axis of an array are alike, as frames are."""
    shape = store.array(array).shape
    some = [slice(0, LOOKED_AT), *[slice(None, None, max(1, size // LOOKED_AT)) for size in shape[1:]]]
    u = np.asarray(store.read(array, tuple(some)), np.float64)
    apart = np.abs(u - u.mean(0)).mean()
    return len(u) > 2 and bool(np.abs(np.diff(u, axis=0)).mean() < FOLLOWS * apart)


def other_reading(store: Store, axes: dict[str, list[str]]) -> str:
    """A layout that the shapes allow as well: a film for trajectories, maps for frames."""
    array, words = next(iter(axes.items()))
    space = [word for word in words if word not in WORDS]
    rest = [word for word in words if word not in ("trajectory", "time")]
    if (
        "single" in words
        or not {*space} <= {*SPACE}
        or (  # a file's own names are kept
            words[:2] == ["trajectory", "time"] and min(shape_of(store, array)[:2]) <= MOST_CHANNELS
        )
    ):
        return ""
    if words[:2] == ["trajectory", "time"] and len(space) < len(SPACE):
        other = [
            *words[:1],
            SPACE[0],
            *[SPACE[SPACE.index(word) + 1] if word in space else word for word in words[2:]],
        ]
        return (
            f"maps, {quoted(array)}: [{', '.join(other)}] and so on, with inputs: [{field_of(array)}]"
            if len(axes) > 1
            else f"one film, {quoted(array)}: [{', '.join(['time', *other[1:]])}]"
        )
    if words[0] == "time":
        shown = ", ".join(rest[1:])
        return f"trajectories, {quoted(array)}: [trajectory, time, {shown}]" if shown else ""
    return (
        f"frames, {quoted(array)}: [trajectory, time, {', '.join(words[1:-1])}]"
        if words[2:]
        else f"frames, {quoted(array)}: [time, {', '.join(words[1:])}]"
    )
