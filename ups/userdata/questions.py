"""What a description asks of runs of other lengths and of cells without a value."""

import math
from pathlib import Path

import numpy as np

from ups.tasks import Place
from ups.userdata.describe_axes import field_of, quoted, shape_of
from ups.userdata.extremes import Extremes
from ups.userdata.missing_values import without
from ups.userdata.offset import sampled_frames
from ups.userdata.patterns import beside, lengths_of, pattern
from ups.userdata.readers import Store

LOOKED_AT = 8  # trajectories
SCANNED = 2**24  # numbers, in which every frame is looked at


def names_of(store: Store, array: str, words: list[str], space: list[str]) -> list[str]:
    """The fields that an array holds."""
    shape = dict(zip(words, shape_of(store, array), strict=True))
    numbers = [f"_{i}" for i in range(shape["channel"])] if "channel" in shape else [""]
    parts = [f"_{axis}" for axis in space] if "component" in words else [""]
    return [f"{field_of(array)}{number}{part}" for number in numbers for part in parts]


def others(store: Store, axes: dict[str, list[str]]) -> list[str]:
    """Fields of the same runs in files beside this one."""
    array, words = next(iter(axes.items()))
    if not (found := beside(store, array)):
        return []
    files = ", ".join(f'"{pattern(path)[0]}"' for path in (Path(store.path), *(other for other, _ in found)))
    names = [*axes, *(name for _, name in found)]
    layout = ", ".join(f"{quoted(name)}: [{', '.join(words)}]" for name in names)
    return [
        f"    # files: [{files}]",
        f"    # layout: {{{layout}}}   # in place of those above: files "
        "beside this one hold these fields on the same grid and times?",
    ]


def lengths(store: Store, axes: dict[str, list[str]], cut: int) -> list[str]:
    """How many frames to use of runs of other lengths."""
    array, words = next(iter(axes.items()))
    found = lengths_of(store, array, words.index("time")) if "time" in words and not cut else []
    if len({*found}) < 2:
        return []
    least, most = min(found), max(found)
    return [
        f"    num_frames: {least}   # runs hold {least} to {most}: the first of each, or cut: "
        f"{max(2, least // 2)} for windows of all?"
    ]


def broken(store: Store, axes: dict[str, list[str]]) -> np.ndarray:
    """Of every frame of a file that holds one run of a moderate size, whether cells have no value in it that
    have one elsewhere; none of another file."""
    found = np.zeros(0, bool)
    for array, words in axes.items():
        shape = shape_of(store, array)
        if "time" not in words or "trajectory" in words or "*" in array or math.prod(shape) > SCANNED:
            continue
        is_missing = np.isnan(np.asarray(store.read(array, (slice(None),) * len(shape)), np.float64))
        is_missing = np.moveaxis(is_missing, words.index("time"), 0).reshape(shape[words.index("time")], -1)
        gaps = (is_missing & ~is_missing.all(0)).any(1)
        found = gaps | found if len(found) == len(gaps) else gaps
    return found


def whole(is_broken: np.ndarray, cut: int) -> int:
    """How many windows of `cut` frames hold no broken one."""
    num, begin = 0, 0
    while begin + cut <= len(is_broken):
        gaps = np.flatnonzero(is_broken[begin : begin + cut])
        num, begin = num + (not len(gaps)), begin + (int(gaps[-1]) + 1 if len(gaps) else cut)
    return num


def missing(store: Store, axes: dict[str, list[str]], space: list[str]) -> tuple[list[str], list[str]]:
    """(Numbers that seem to stand for none, lines that ask about them and about frames with gaps.)"""
    found, lines, has_gaps = {}, [], False
    for array, words in axes.items():
        names = names_of(store, array, words, space)
        if words.count("component") > 1:  # of a tensor
            continue
        frames = [*sampled_frames(store, Place(array, tuple(words), tuple(names)), space, LOOKED_AT, 0)]
        extremes = Extremes(names)
        for frame in frames:
            extremes.add(frame[None])
        found |= {f"{value:g}": name for name, value, *_ in extremes.suspects()}
        is_missing = np.isnan([without(frame, [*found]) for frame in frames])
        has_gaps |= bool((is_missing != is_missing.all(0)).any())
    if found:
        what = ", ".join(f"{name} is {value}" for value, name in found.items())
        said = ", ".join(found) if len(found) == 1 else f"[{', '.join(found)}]"
        lines.append(
            f"    missing: {said}   # {what} in many cells, far from all others: does it stand for "
            "none (nan: it does not)?"
        )
    if has_gaps or broken(store, axes).any():
        lines.append("    skip_missing: true   # cells have no value in some frames: leave these frames out?")
    return [*found], lines
