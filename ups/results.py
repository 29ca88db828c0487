"""The numbers of a report as one table in long format, results.csv; results.json beside it holds the rest.

    task     name of the task
    case     what was scored, by section of the report:
               tasks      forecast; noise: the same without the noise of the data; band: what stated errors
                          are worth
               ensembles  rollout: all leads; one step; long: long rollouts
               steady     partial: mean over the partial observations; observed CASE: by what is observed
    model    name of a model; "A / B": A relative to B on the same trajectories; empty: a number of the task
    metric   name of a metric; "NAME/2": element 2 of a list, such as the counts of a histogram of ranks
    lead     lead time (without times, as of a steady prior: number of the frame); empty: over all leads
    value, low, high     the number and its 95 % interval; an empty value is undefined or not finite, empty
             ends mean that there is no interval

results.json holds what is no number: settings, texts, decisions and gates, of the run and of every task.
"""

import csv
import io
import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ups.common.files import DamagedError, read_record, require_small, write_atomic

FACTS, TABLE = "results.json", "results.csv"
AGAIN = "Make the report again."
ENDS = ("value", "low", "high")
OBSERVED = "observed "  # first word of cases
# section -> first words of its cases; the first one is that of its main numbers
SECTIONS = {
    "tasks": ("forecast", "noise", "band"),
    "ensembles": ("rollout", "one step", "long"),
    "steady": ("partial", OBSERVED),
}
BY_LEAD = "_by_lead"  # ends the name of a list over leads

Interval = dict[str, Any]  # "value", "low", "high": number or None
Series = dict[str, list]  # "lead", "value", "low", "high" of every lead or element; {} for none
# metric -> number, Interval, or lists of these numbers; a dictionary of figures: they are named METRIC/KEY
Figures = Mapping[str, Any]


class Row(NamedTuple):
    task: str
    case: str
    model: str
    metric: str
    lead: float | None
    value: float | None
    low: float | None
    high: float | None


@dataclass
class Entry:
    """A task in one section of a report: facts, which are settings and texts, and the rows of its numbers."""

    name: str
    section: str
    facts: dict[str, Any] = field(default_factory=dict)
    # (case, model, metric, whether by lead) -> its rows
    numbers: dict[tuple[str, str, str, bool], list[Row]] = field(default_factory=dict, repr=False)

    @property
    def case(self) -> str:
        """The case of the main numbers."""
        return SECTIONS[self.section][0]

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.numbers.values() for row in rows]

    def add(self, model: str, figures: Figures, case: str = "", times: Sequence[float] | None = None) -> None:
        """Add the rows of a model's figures, in place of earlier ones. A list has a row for each element; for
        each lead if the metric ends with "_by_lead", at `times`, by default facts["times"]."""
        case, times = case or self.case, self.facts.get("times", ()) if times is None else times
        found: dict[tuple[str, str, str, bool], list[Row]] = {}
        for metric, lead, *number in _elements(figures):
            time = None if lead is None else float(times[lead] if lead < len(times) else lead)
            rows = found.setdefault((case, model, metric, lead is not None), [])
            rows.append(Row(self.name, case, model, metric, time, *number))
        self.numbers |= found

    def value(self, model: str | None, metric: str, case: str = "") -> Interval | None:
        """The number over all leads, None if there is none."""
        rows = self.numbers.get((case or self.case, model or "", metric, False))
        return dict(zip(ENDS, rows[0][5:], strict=True)) if rows else None

    def number(self, model: str | None, metric: str, case: str = "") -> float | None:
        """`value` without its interval; None also if there is none."""
        return (self.value(model, metric, case) or {"value": None})["value"]

    def by_lead(self, model: str, metric: str, case: str = "") -> Series:
        """The numbers of every lead, in order."""
        return _series(self.numbers.get((case or self.case, model, metric, True), ()))

    def listed(self, model: str | None, metric: str, case: str = "") -> Series:
        """The elements NAME/0, NAME/1, .. of a list."""
        rows, key = [], (case or self.case, model or "")
        while found := self.numbers.get((*key, f"{metric}/{len(rows)}", False)):
            rows.append(found[0])
        return _series(rows)

    def _models(self, case: str) -> list[str]:
        return list(dict.fromkeys(model for one, model, *_ in self.numbers if one == (case or self.case)))

    def models(self, case: str = "") -> list[str]:
        return [name for name in self._models(case) if name and " / " not in name]

    def ratios(self, case: str = "") -> list[str]:
        """The compared pairs, A / B."""
        return [name for name in self._models(case) if " / " in name]

    def cases(self, begin: str) -> list[str]:
        return list(dict.fromkeys(case for case, *_ in self.numbers if case.startswith(begin)))


def _series(rows: Sequence[Row]) -> Series:
    return dict(zip(Row._fields[4:], map(list, zip(*(row[4:] for row in rows), strict=True)), strict=False))


def _elements(figures: Figures, prefix: str = "") -> Iterator[tuple]:
    """(metric, number of the lead or None, value, low, high) of all numbers in figures."""
    for name, found in figures.items():
        if isinstance(found, Mapping) and not {*ENDS} <= {*found}:
            yield from _elements(found, f"{prefix}{name}/")
            continue
        ends = [found[end] for end in ENDS] if isinstance(found, Mapping) else [found, None, None]
        yield from _of_list(prefix + name.removesuffix(BY_LEAD), name.endswith(BY_LEAD), *ends)


def _of_list(metric: str, is_by_lead: bool, value: Any, low: Any, high: Any) -> Iterator[tuple]:
    """`_elements` of a number or of nested lists, whose last axis may be the lead."""
    if not isinstance(value, list):
        yield metric, None, value, low, high
        return
    ends = (part or [None] * len(value) for part in (low, high))
    for place, part in enumerate(zip(value, *ends, strict=True)):
        if is_by_lead and not isinstance(part[0], list):
            yield metric, place, *part
        else:
            yield from _of_list(f"{metric}/{place}", is_by_lead, *part)


@dataclass
class Results:
    """A report: facts of the run, and the entries of its tasks, by section."""

    facts: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Entry] = field(default_factory=dict)
    ensembles: dict[str, Entry] = field(default_factory=dict)
    steady: dict[str, Entry] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [
            row for section in SECTIONS for entry in getattr(self, section).values() for row in entry.rows
        ]

    def select(self, **columns: Any) -> list[Row]:
        """The rows with these values: select(model="operator", metric="nrmse")."""
        return [row for row in self.rows if all(getattr(row, name) == columns[name] for name in columns)]

    @property
    def record(self) -> dict[str, Any]:
        """The content of results.json."""
        sections = {section: getattr(self, section) for section in SECTIONS}
        return self.facts | {
            section: {name: entry.facts for name, entry in entries.items()}
            for section, entries in sections.items()
        }

    def save(self, folder: Path) -> None:
        """Write results.json and results.csv; each is complete or not there."""
        record, rows = json.dumps(self.record, indent=1, allow_nan=False) + "\n", self.rows
        for row in rows:
            if not all(number is None or math.isfinite(number) for number in row[4:]):
                raise ValueError(f"{row} is not finite; expected None for what is undefined in {TABLE}")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FACTS, record)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([Row._fields, *rows])
        write_atomic(folder / TABLE, text.getvalue())


def load(folder: Path) -> Results:
    """The results in a report's folder. Raises FileNotFoundError, or DamagedError with the line of the table
    that is wrong."""
    facts, path = read_record(folder / FACTS, "the results of a report", AGAIN), folder / TABLE
    what = f"the table of a report, with the columns {', '.join(Row._fields)}"
    try:
        require_small(path, what, AGAIN)
        lines = [*csv.reader(io.StringIO(path.read_text(encoding="utf-8")), strict=True)]
    except (FileNotFoundError, DamagedError):
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise DamagedError(f"{path} is not readable ({error}); expected {what}. {AGAIN}") from error
    if lines[:1] != [[*Row._fields]]:
        found = repr(",".join(lines[0])[:80]) if lines else "nothing"
        raise DamagedError(f"{path} begins with {found}; expected {what}. {AGAIN}")
    rows = []
    for place, line in enumerate(lines[1:], 2):
        try:
            rows.append(Row(*line[:4], *map(_parsed, line[4:])))
        except (ValueError, TypeError) as error:
            raise DamagedError(
                f"row {place} of {path} is {','.join(line)[:80]!r} ({error}); expected {what}. {AGAIN}"
            ) from error
    entries = {section: _entries(section, facts.pop(section, None), rows, folder) for section in SECTIONS}
    return Results(facts, **entries)


def _entries(section: str, facts: Any, rows: Sequence[Row], folder: Path) -> dict[str, Entry]:
    """The entries of a section: facts of each task, and its rows of the section's cases."""
    if not isinstance(facts, dict) or not all(isinstance(part, dict) for part in facts.values()):
        raise DamagedError(
            f"{folder / FACTS} has {reprlib.repr(facts)} as {section}; expected facts by task. {AGAIN}"
        )
    entries = {task: Entry(task, section, found) for task, found in facts.items()}
    for row in rows:
        if row.task in entries and row.case.startswith(SECTIONS[section]):
            place = (*row[1:4], row.lead is not None)
            entries[row.task].numbers.setdefault(place, []).append(row)
    return entries


def _parsed(text: str) -> float | None:
    """A number of the table; counts stay whole."""
    if not text:
        return None
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is not finite")
    return int(text) if text.lstrip("-").isdigit() else value
