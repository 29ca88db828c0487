"""What the files of the user hold: which files fit a pattern, the sizes of their arrays, coordinates and
parameters. Errors name the key of the section and what to write there.
"""

import difflib
import glob
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.common.lazy import np
from ups.tasks import Place
from ups.userdata.readers import Store, natural

Coordinate = tuple[str, "np.ndarray"]  # the name of its array, and its numbers

# places of a coordinate in a file
COORDINATES = ("{}", "{}-coordinate", "grid/{}", "dimensions/{}", "coords/{}")
SMALL = 2**16  # numbers of a coordinate that may always be read, however small the fields are
# attributes of netCDF, which tell how an array is stored and what its numbers may be
CODING = re.compile("_|scale_factor|add_offset|missing_value|valid_|actual_range|DIMENSION")
UNEVEN = 0.01  # of a step, by which steps may differ: float32 coordinates


class ConfigError(ValueError):
    """The error of a key, in the form "KEY: what is wrong; expected what. What to do." """

    @property
    def problem(self) -> str:
        """Without the key and what to write there."""
        found, _, expected = str(self).partition(": ")[2].partition("; expected ")
        return f"{found}; expected {expected.partition('. ')[0]}."


def require_known(key: str, names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raise ValueError for a name that is none of `known`. what: these, in words."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"{key}: it names {unknown[0]!r:.80}; expected {what}: {', '.join(known) or 'none'}. Correct the "
            "name."
        )


def matching_files(key: str, pattern: str) -> list[str]:
    """The files of a pattern in natural order. Raises FileNotFoundError if no file fits."""
    literal = pattern.replace("[", "[[]")  # a name may have brackets
    found = sorted(glob.glob(pattern, recursive=True) or glob.glob(literal, recursive=True), key=natural)
    if not found:
        folder = Path(pattern).parent
        names = sorted(path.name for path in folder.glob("*"))[:5] if folder.is_dir() else ["no such folder"]
        raise FileNotFoundError(
            f"{key}.files: no file fits {pattern!r}; expected yours (relative to {Path.cwd()}). Correct "
            f"{key}.files (in {folder}: {', '.join(names) or 'nothing'})."
        )
    return found


def measure(key: str, store: Store, places: Iterable[Place]) -> dict[str, int]:
    """Axis -> size, axes of space in the order in which the arrays name them, of one file; "trajectory" where
    it has that axis or groups. Raises ValueError for an array that is not there or not so.
    """
    sizes, first = {"single": 1}, {"single": "a word for that"}
    for place in places:
        names = store.runs(place.array)
        array, num_groups = next(iter(names), place.array), len(names) if "*" in place.array else 0
        found = store.array(array)
        if found is None:
            near = difflib.get_close_matches(array, store.names(), n=1)
            raise ConfigError(
                f"{key}.layout: {store.path} holds no array {array!r}; expected every array of the layout. "
                f"{f'Did you mean {near[0]!r}? ' if near else ''}Write one that it holds: {store.listing()}."
            )
        if found.dtype.kind not in "fiub" or 0 in found.shape:
            is_complex = found.dtype.kind == "c"
            fix = (
                f"Write {array}.real and {array}.imag, two fields." if is_complex else "Leave the array out."
            )
            raise ConfigError(
                f"{key}.layout: {array} in {store.path} holds {found.dtype} of shape {found.shape}; expected "
                f"real numbers. {fix}"
            )
        if len(found.shape) != len(place.axes):
            raise ConfigError(
                f"{key}.layout: {array} in {store.path} has {len(found.shape)} axes, {found.shape}, and "
                f"{len(place.axes)} words ({', '.join(place.axes)}); expected one word per axis, as they are "
                f"stored. Correct layout.{array}: trajectory, time, channel, component, single (1 long) or a "
                "name such as x."
            )
        store.require_whole(array)
        lengths = [
            *zip(place.axes, found.shape, strict=True),
            *[("trajectory", num_groups)] * bool(num_groups),
        ]
        for axis, size in lengths:
            if axis not in ("channel", "component") and sizes.setdefault(axis, size) != size:
                raise ConfigError(
                    f"{key}.layout: {axis} is {size} long in {array} of {store.path} and {sizes[axis]} in "
                    f"{first[axis]}; expected one size per axis, so one grid. Are the words of {array} in "
                    "the order of its axes? Else put arrays of another grid into a task of their own."
                )
            first.setdefault(axis, array)
    return {axis: size for axis, size in sizes.items() if axis != "single"}


def coordinate(
    store: Store, places: Sequence[Place], names: Iterable[str]
) -> "tuple[str, np.ndarray] | None":
    """(Place, numbers) of a coordinate, found by its usual names; None if there is none."""
    if store.is_single:  # its array would answer to every name
        return None
    groups = [store.first(place.array).rpartition("/")[0] for place in places if "*" in place.array]
    forms = [form.format(name) for name in names for form in COORDINATES]
    forms = [place for form in forms for place in [form, *[f"{group}/{form}" for group in groups]]]
    for place, found in store.those(tuple(forms)).items():
        if found.dtype.kind in "fiu" and found.shape:
            _require_no_larger(store, place, found.shape, places)
            if sum(size > 1 for size in found.shape) <= 1:  # a list, a column or a row
                return place, np.asarray(store.whole(place), np.float64).ravel()
            store.require_whole(place)
            if (values := line_in(store, place)) is not None:
                return place, values
            rows = np.asarray(store.read(place), np.float64) if len(found.shape) == 2 else np.zeros((1, 1))
            if is_monotone(rows[0]):  # else x and y of a data set of maps are its fields
                return place, common_row(store, place, rows)
    return None


def line_in(store: Store, name: str) -> "np.ndarray | None":
    """The numbers of an array that varies along one axis at most: a list, a column, a row, or a coordinate as
    numpy.meshgrid makes it; None of another array. Two corners of an array tell most fields."""
    if name not in store.lines:
        store.lines[name] = _line(store, name, store.array(name).shape)
    return store.lines[name]


def _line(store: Store, name: str, shape: Sequence[int]) -> "np.ndarray | None":
    if sum(size > 1 for size in shape) > 1:
        corners = [store.read(name, (part,) * len(shape)) for part in (slice(0, 2), slice(-2, None))]
        varying = [[np.diff(u, axis=axis).any() for axis in range(u.ndim)] for u in corners]
        if sum(varying[0]) != 1 or varying[0] != varying[1]:
            return None
    values = np.asarray(store.read(name), np.float64)
    axis = int(np.argmax(shape if sum(size > 1 for size in shape) <= 1 else varying[0]))
    line = values[tuple(slice(None) if number == axis else slice(1) for number in range(values.ndim))]
    return line.ravel() if values.size == line.size or (values == line).all() else None


def _require_no_larger(store: Store, place: str, shape: Sequence[int], places: "Sequence[Place]") -> None:
    """Raise ValueError, before it is read, for a coordinate of more numbers than any field has."""
    fields = [store.array(store.first(entry.array)) for entry in places]
    most = max((math.prod(field.shape) for field in fields if field is not None), default=0)
    if math.prod(shape) > max(most, SMALL):
        raise ValueError(
            f"{store.path} holds {math.prod(shape)} numbers in {place}; expected a coordinate, "
            f"which has no more than the fields, {most}. Leave that array out, or name another."
        )


def rises(values: "np.ndarray") -> bool:
    """Whether the numbers of a coordinate rise. (Latitudes from north to south rise from the last to the
    first.)"""
    return len(values) > 1 and bool((values[1:] > values[:-1]).all())


def is_monotone(values: "np.ndarray | None") -> bool:
    """Whether these are numbers that rise or fall."""
    return values is not None and (rises(values) or rises(values[::-1]))


def goes_on(values: "np.ndarray", other: "np.ndarray") -> bool:
    """Whether another coordinate, of one row or several, has the same steps as `values`."""
    allowed = UNEVEN * np.ptp(values) / max(1, len(values) - 1)
    return (
        other.shape[-1:] == values.shape
        and not (np.abs(other - other[..., :1] - values + values[0]) > allowed).any()
    )


def is_even(values: "np.ndarray", tolerance: float = UNEVEN) -> bool:
    """Whether numbers rise in equal steps, which differ by `tolerance` of a step at most."""
    steps = np.diff(values)
    return not len(steps) or bool(steps.min() > 0 and np.ptp(steps) <= tolerance * steps.mean())


def is_even_grid(values: "np.ndarray", tolerance: float = UNEVEN) -> bool:
    """Whether numbers rise or fall in equal steps."""
    return is_even(values, tolerance) or is_even(values[::-1], tolerance)


def common_row(store: Store, place: str, rows: "np.ndarray") -> "np.ndarray":
    """The first row of a coordinate that is stored for every trajectory. Raises ValueError where they differ
    by more than where they begin."""
    if different := [number for number, row in enumerate(rows) if not goes_on(rows[0], row)]:
        raise ValueError(
            f"{store.path}: row {different[0]} of {place} has other steps than row 0; expected the same of "
            "every trajectory. Put trajectories of another step or grid into files and a task of their own."
        )
    return rows[0]


def tidy(value: float) -> float:
    """The number that a coordinate in float32 stands for: 0.02 where 0.0199999996 was read."""
    short, long = float(f"{value:.6g}"), float(f"{value:.9g}")
    return short if abs(short - value) <= 2e-7 * abs(value) else long


def number_in(pattern: str, name: str) -> float | None:
    """The number in place of {} in the name of a file, None if no number fits; of several the last. Next to a
    * or an end of the pattern it must be a whole number of the name: not a part of a longer number, and not
    followed by a letter; a sign right behind a letter or a digit is a hyphen.
    """
    before, after = pattern.split("{}", 1)
    is_begun, is_ended = before[-1:] in ("", "*"), after[:1] in ("", "*")
    sign = r"(?<![\d.+-])(?<!\d[eE])((?:(?<![A-Za-z\d])[-+])?" if is_begun else "([-+]?"
    number = sign + r"\d+\.?\d*(?:[eE][-+]?\d+)?)" + r"(?![\dA-Za-z])" * is_ended
    head, tail = (".*".join(map(re.escape, part.split("*"))) for part in (before, after))
    match = re.match(".*" * (not before) + head + number + tail, name)
    return float(match[1].rstrip(".")) if match else None


def numbers_of_run(store: Store, arrays: Sequence[str], group: str) -> dict[str, float]:
    """Place -> number, of what belongs to the run in one group (or file): numbers in the group ("*/nu"),
    attributes of the group ("*@nu") and of its arrays ("*/u@nu"), without those of netCDF."""
    found: dict[str, Any] = {}
    for array in arrays:
        above, folder = _above(array), _above(array).replace("*", group)
        for name in store.names() if above else ():
            if name.startswith(f"{folder}/") and math.prod(store.array(name).shape) == 1:
                found[above + name.removeprefix(folder)] = store.read(name)
        for place in dict.fromkeys((*[above] * bool(above), *[array] * (not store.is_single))):
            about = store.attributes(place.replace("*", group))
            found |= {f"{place}@{key}": value for key, value in about.items() if not CODING.match(key)}
    return single_numbers(found)


def single_numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that are one finite number."""
    values = {place: np.asarray(value) for place, value in found.items()}
    return {
        place: float(value.reshape(-1)[0])
        for place, value in values.items()
        if value.size == 1 and value.dtype.kind in "fiu" and np.isfinite(value)
    }


def _above(array: str) -> str:
    """The group of each run in the name of an array: "runs/*" of "runs/*/u"; "" if none is."""
    return re.sub(r"(\*[^/]*)/.*", r"\1", array) if re.search(r"\*[^/]*/", array) else ""


def require_common_place(key: str, store: Store, name: str, place: str, arrays: Sequence[str]) -> None:
    """Raise ValueError for a parameter that is the number of one run, if a layout with * has several."""
    for array in arrays:
        run = re.escape(_above(array) or array).replace(r"\*", "[^/@]+")
        match = re.match(f"{run}(?=[/@])", place) if "*" in array and "*" not in place else None
        if match and store.value(place) is not None:
            raise ConfigError(
                f"{key}.parameters.{name}: {place} is the number of one run; expected a number of every run, "
                f"as layout.{array} stands for several. Write {name}: "
                f'"{_above(array) or array}{place[match.end() :]}".'
            )


def value_in(
    key: str, store: Store, name: str, place: str, arrays: Sequence[str], group: str = ""
) -> "np.ndarray":
    """The value(s) of a parameter in a file: () or (trajectories,), float64. Raises ValueError."""
    path = store.path
    if place in store.attributes() and not store.is_single and store.array(place) is not None:
        raise ConfigError(
            f"{key}.parameters.{name}: {path} holds an attribute {place} and an array {place}; expected one "
            f'of them. Write "@{place}" for the attribute of the file, or give the array another name.'
        )
    if "{}" in place:
        found = number_in(place, path.name)
    else:
        found = store.value(place.replace("*", group))
    try:
        values = np.asarray(found, np.float64)
        values = values.ravel() if values.size in values.shape else values  # a column, or a row
        is_right = found is not None and values.ndim <= 1 and bool(np.isfinite(values).all())
        is_right &= values.size == 1 or "*" not in place
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        there, of_run = sorted(store.attributes()), list(numbers_of_run(store, arrays, group))
        what = (
            f"{path} holds no number in {place!r:.80}"
            if found is None
            else f"{place} in {path} holds {found!r:.80}"
        )
        held = f"attributes: {', '.join(there[:8]) or 'none'}; arrays: {store.listing()}"
        held += f"; of each run: {', '.join(of_run[:8])}" * bool(of_run)
        raise ConfigError(
            f"{key}.parameters.{name}: {what}; expected an attribute, an array with a number per trajectory, "
            f'or a pattern of file names such as "run_nu{{}}_*". Correct it ({held}).'
        )
    return values.reshape(-1)[0] if values.size == 1 else values
