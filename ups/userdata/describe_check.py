"""The section that --describe is about to print, examined first as the loader and the doctor do: what they
refuse is a question, not a setting."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ups.tasks import make_user_task
from ups.userdata.data_checks import horizon_words
from ups.userdata.describe_lines import Line, meant
from ups.userdata.open_files import open_user_files, user_files
from ups.userdata.section import DEFAULTS, complete, facts
from ups.userdata.trajectories import Trajectories

SPARE = ("forcing", "missing", "num_frames", "parameters", "repeated", "skip_missing")  # keys to do without
MOST_FILES = 20  # that are examined
SCANNED = 2**24  # numbers, up to which data are read here
VAL_FRACTION, TEST_FRACTION = 0.1, 0.1  # of configs/default.yaml


def sound(name: str, lines: Sequence[Line], test_fraction: float, path: Path) -> tuple[list[Line], str]:
    """(The lines of a section, those that the files refuse as questions; the horizon in words.)

    Raises ValueError if a line is refused that the section cannot do without.
    """
    lines = list(lines)
    while True:
        try:
            data = _examine(name, meant(lines), test_fraction or TEST_FRACTION)
        except (ValueError, FileNotFoundError) as error:
            refused = re.match(rf"task\.{name}\.(\w+)(?:\.(\w+))?: (.*)", str(error), re.DOTALL)
            number = next(
                (
                    number
                    for number, line in enumerate(lines)
                    if refused and line.key == refused[1] in SPARE and not line.is_offered
                ),
                None,
            )
            if number is None:
                raise ValueError(f"{path} cannot be described: {error}") from error
            lines[number : number + 1] = _asked(lines[number], refused[2], refused[3])
        else:
            return lines, horizon_words(data)


def _asked(line: Line, part: str | None, why: str) -> list[Line]:
    """The lines in place of one that was refused, or of the entry `part` of its value."""
    if part and isinstance(line.value, dict) and part in line.value:
        rest = {key: value for key, value in line.value.items() if key != part}
        refused = replace(line, value={part: line.value[part]}, note=f"{why} Is it one?", is_offered=True)
        return [*[replace(line, value=rest)] * bool(rest), refused]
    return [replace(line, note=f"{why} Is it right?", is_offered=True)]


def _examine(name: str, section: dict[str, Any], test_fraction: float) -> Trajectories:
    """The trajectories of the first files. Raises ValueError or FileNotFoundError as the loader does for this
    section, and as the doctor does for these files."""
    full = complete(name, {**DEFAULTS, **section})
    layout = {array: SimpleNamespace(**entry) for array, entry in full["layout"].items()}
    task = make_user_task(name, facts(SimpleNamespace(**full | {"layout": layout})))
    paths = user_files(name, full["files"])

    def opened(skip_missing: bool) -> Trajectories:
        keys = ("resolution", "num_frames", "dt", "cut")
        return open_user_files(
            task, paths[:MOST_FILES], **{key: full[key] for key in keys}, skip_missing=skip_missing
        )

    data = opened(False)
    num = data.num_trajectories * data.num_frames * len(task.channels) * math.prod(data.space)
    if len(paths) <= MOST_FILES and num <= SCANNED:
        opened(full["skip_missing"]).split(VAL_FRACTION, test_fraction)
    return data
