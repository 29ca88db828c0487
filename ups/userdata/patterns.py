"""Files beside each other whose names differ in numbers alone, as runs and years of one data set do."""

import contextlib
import re
from glob import escape
from pathlib import Path

from ups.common.files import TOGETHER, parts_of
from ups.userdata.readers import Store, natural, open_store

NUMBER = re.compile(r"\d+(?:\.\d+)?")
DATES = 1700, 2300  # years of what may be a date, YYYY, YYYYMM, YYYYMMDD or longer
DATE_DIGITS = 4, 6, 8, 10, 12, 14
SHOWN = 6
MOST_FILES = 20  # to look at


def alike(path: Path) -> list[Path]:
    """The files of a folder, `path` among them, whose names differ from its name in numbers alone, in natural
    order."""
    path = parts_of(path)[0]
    form, inside = NUMBER.sub("#", path.stem), [*path.parent.glob("*")] if path.parent.is_dir() else []
    found = [other for other in inside if other.suffix == path.suffix and NUMBER.sub("#", other.stem) == form]
    return sorted(found, key=lambda other: natural(str(other))) or [path]


def pattern(path: Path) -> tuple[str, str]:
    """A pattern of the files that are alike, and what is to be asked where their names do not say that they
    are runs of one system: their numbers are neither dates nor follow each other. "" for no question."""
    if len(parts := parts_of(path)) > 1:
        found = [pattern(part) for part in parts]
        return TOGETHER.join(name for name, _ in found), found[0][1]
    files = alike(path)
    differ = _differing(files)
    if not differ:
        return str(path), ""
    parts, texts = NUMBER.findall(path.stem), NUMBER.split(path.stem)
    names = ["*" if place in differ else part for place, part in enumerate(parts)]
    stem = "".join(text + name for text, name in zip(texts, [*names, ""], strict=True))
    shown = str(path.with_name(f"{stem}{path.suffix}"))
    others = {*path.parent.glob(f"{escape(stem).replace('[*]', '*')}{path.suffix}")} - {*files}
    values = [*differ.values()]
    if others:
        return shown, f"this fits {sorted(others)[0].name} as well: is it one of these runs?"
    if all(_are_dates(column) for column in values) or (len(values) == 1 and _are_counted(values[0])):
        return shown, ""
    some = ", ".join("-".join(row) for row in list(zip(*values, strict=True))[:SHOWN])
    named = str(path.with_name(f"{stem.replace('*', '{}', 1)}{path.suffix}").name)
    some += ", .." * (len(files) > SHOWN)
    return shown, (
        f"the names of {len(files)} files differ in {some}: are they runs of one system, or of "
        f'values of a parameter (parameters: {{name: "{named}"}}), or unlike, such as levels of '
        "noise (name one of them)?"
    )


def in_groups(store: Store, names: list[str]) -> list[str]:
    """The names of fields, with a pattern in place of those that are alike in groups whose names differ in
    numbers alone: a run in each."""
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


def beside(store: Store, array: str) -> list[tuple[Path, str]]:
    """Files with other fields of the same runs, one a file, and the names of these: of the shape of an array,
    on the same grid and times, in the folder of its file and with the same numbers in the name."""
    path, found = Path(store.path), []
    if len(parts_of(path)) > 1 or "*" in array:
        return []
    same, numbers = alike(path), NUMBER.findall(path.stem)
    others = [
        other
        for other in sorted(path.parent.glob(f"*{escape(path.suffix)}"))
        if other not in same and NUMBER.findall(other.stem) == numbers
    ]
    for other in others[:MOST_FILES]:
        with contextlib.suppress(ValueError, OSError), open_store(f"{path}{TOGETHER}{other}") as both:
            found += [
                (other, name)
                for name in both.names()
                if store.array(name) is None
                and not name[0].isdigit()
                and both.array(name) == store.array(array)
            ][:1]
    return found


def lengths_of(store: Store, array: str, axis: int) -> list[int]:
    """How long an axis of an array is in every group of the file, and in the files beside it."""
    found = [store.array(array.replace("*", group)).shape[axis] for group in store.groups(array) or [""]]
    for path in alike(Path(store.path))[:MOST_FILES]:
        with open_store(path) as other:
            same = other.array(other.first(array)) if path != Path(store.path) else None
            found += [same.shape[axis]] if same is not None and len(same.shape) > axis else []
    return found


def are_parts(path: Path) -> bool:
    """Whether the files beside it differ by dates, so that they are parts of one record."""
    differ = _differing(alike(path))
    return bool(differ) and all(map(_are_dates, differ.values()))


def _differing(files: list[Path]) -> dict[int, list[str]]:
    """Of the names of files that are alike: the place of every number that differs -> the numbers there."""
    columns = zip(*[NUMBER.findall(path.stem) for path in files], strict=True)
    return {place: [*column] for place, column in enumerate(columns) if len({*column}) > 1}


def _are_dates(values: list[str]) -> bool:
    return all(
        len(value) in DATE_DIGITS and DATES[0] <= int(value[:4]) <= DATES[1]
        for value in values
        if "." not in value
    ) and not any("." in value for value in values)


def _are_counted(values: list[str]) -> bool:
    """Whether numbers count runs: each once, and none left out."""
    if any("." in value for value in values):
        return False
    counts = sorted(map(int, values))
    return counts == [*range(counts[0], counts[0] + len(counts))]
