"""What --describe finds in a folder and in whole files: files of one data set, runs of different lengths,
gaps and numbers that mean missing."""

import math
from glob import escape
from pathlib import Path

import numpy as np

from ups.common.text import load_yaml, yaml_text
from ups.userdata.data_checks import Extremes
from ups.userdata.describe_axes import NUMBER, Guess, sibling_files
from ups.userdata.describe_lines import Line
from ups.userdata.masks import with_nan
from ups.userdata.offset import sampled_frames

DATES = 1700, 2300  # years of what may be a date, YYYY, YYYYMM, YYYYMMDD or longer
DATE_DIGITS = 4, 6, 8, 10, 12, 14
SHOWN = 6
LOOKED_AT = 8  # trajectories
SCANNED = 2**24  # numbers, up to which all data are looked at


def pattern_of(path: Path) -> tuple[str, str]:
    """(A pattern that fits the sibling files, a question or ""). It asks whether they are runs of one system
    if the numbers in their names are neither dates nor consecutive."""
    files = sibling_files(path)
    differ = _varying_numbers(files)
    parts, texts = NUMBER.findall(path.stem), NUMBER.split(path.stem)
    names = ["*" if place in differ else part for place, part in enumerate(parts)]
    stem = "".join(text + name for text, name in zip(texts, [*names, ""], strict=True))
    pattern = str(path.with_name(f"{stem}{path.suffix}"))
    others = {*path.parent.glob(f"{escape(stem).replace('[*]', '*')}{path.suffix}")} - {*files}
    values = [*differ.values()]
    if others:
        return pattern, f"this fits {sorted(others)[0].name} as well: is it one of these runs?"
    if all(_are_dates(column) for column in values) or (len(values) == 1 and _are_counted(values[0])):
        return pattern, ""
    some = ", ".join("-".join(row) for row in list(zip(*values, strict=True))[:SHOWN])
    named = str(path.with_name(f"{stem.replace('*', '{}', 1)}{path.suffix}").name)
    some += ", .." * (len(files) > SHOWN)
    return pattern, (
        f"the names of {len(files)} files differ in {some}: are they runs of one system, or of "
        f"values of a parameter (parameters: {yaml_text({'name': named})}), or unlike, such as levels of "
        "noise (name one of them)?"
    )


def are_dated(files: list[Path]) -> bool:
    """Whether sibling files differ by dates, so that they are parts of one record."""
    differ = _varying_numbers(files)
    return bool(differ) and all(map(_are_dates, differ.values()))


def _varying_numbers(files: list[Path]) -> dict[int, list[str]]:
    """Place -> the numbers there, for every number that differs in the names of sibling files."""
    columns = zip(*[NUMBER.findall(path.stem) for path in files], strict=True)
    return {place: [*column] for place, column in enumerate(columns) if len({*column}) > 1}


def _are_dates(values: list[str]) -> bool:
    return all(
        value.isdecimal() and len(value) in DATE_DIGITS and DATES[0] <= int(value[:4]) <= DATES[1]
        for value in values
    )


def _are_counted(values: list[str]) -> bool:
    """Whether numbers count runs: each once, and none left out."""
    if any("." in value for value in values):
        return False
    counts = sorted(map(int, values))
    return counts == [*range(counts[0], counts[0] + len(counts))]


def length_lines(guess: Guess, cut: int) -> list[Line]:
    """num_frames, for runs of different lengths."""
    if "time" not in guess.words or cut:
        return []
    least, most = min(guess.lengths), max(guess.lengths)
    if least == most:
        return []
    cut = max(2, least // 2)
    question = f"runs hold {least} to {most}: the first of each, or cut: {cut} for windows of all?"
    return [Line("num_frames", least, question)]


def frames_with_gaps(guess: Guess) -> np.ndarray:
    """For every frame, whether it lacks values in cells that have one in other frames. Empty unless the file
    holds one run of moderate size."""
    found = np.zeros(0, bool)
    for array, words in guess.axes.items():
        shape = guess.shape(array)
        if "time" not in words or "trajectory" in words or "*" in array or math.prod(shape) > SCANNED:
            continue
        at = words.index("time")
        is_missing = np.isnan(np.asarray(guess.store.read(array, (slice(None),) * len(shape)), np.float64))
        is_missing = np.moveaxis(is_missing, at, 0).reshape(shape[at], -1)
        gaps = (is_missing & ~is_missing.all(0)).any(1)
        found = gaps | found if len(found) == len(gaps) else gaps
    return found


def missing_lines(guess: Guess) -> tuple[list[str], list[Line]]:
    """(Numbers that seem to mean missing, the keys missing and skip_missing with their questions.)"""
    found, lines, has_gaps = {}, [], False
    for place in guess.places:
        frames = [*sampled_frames(guess.store, place, guess.space, LOOKED_AT)]
        extremes = Extremes(place.fields)
        for frame in frames:
            extremes.add(frame[None])
        found |= {f"{value:g}": name for name, value, *_ in extremes.suspects()}
        is_missing = np.isnan([with_nan(frame, [*found]) for frame in frames])
        has_gaps |= bool((is_missing != is_missing.all(0)).any())
    if found:
        what = ", ".join(f"{name} is {value}" for value, name in found.items())
        values = [load_yaml(value) for value in found]
        question = f"{what} in many cells, far from all others: does it stand for none (nan: it does not)?"
        lines.append(Line("missing", values[0] if len(values) == 1 else values, question))
    if has_gaps or frames_with_gaps(guess).any():
        question = "cells have no value in some frames: leave these frames out?"
        lines.append(Line("skip_missing", True, question))
    return [*found], lines
