"""The numbers of a report as one table in long format: results.csv, beside results.json.

    task     name of the task
    case     what was scored (column 2 of PLACES):
               forecast, spectra               the operator's forecasts; spectrum/FIELD/WAVE, energies
               noise, break-even               the same without the noise of the data; costs
               rollout, one step, start A-B    ensembles: all leads; single steps, from frames A to B
               long, evaluations               long rollouts; scores over network evaluations per state
               observed CASE, partial          a steady prior by what it observed; mean over partial cases
               chance CASE                     exact samples in the place of the prior
    model    name of a model; "A / B": A relative to B on the same trajectories; empty: a number of the task
    metric   name of a metric; "NAME/2": element 2 of a list, such as the counts of a histogram of ranks
    lead     lead time (without times, as of a steady prior: number of the frame); empty: over all leads
    value, low, high     the number and its 95 % interval; an empty value is undefined or not finite, empty
             ends mean that there is no interval

`Results.of` makes the table from the nested results.json, which stays for users. What is there and not here
is no result: settings (grid, times, ...), texts, the gates, and the record of the selection on validation.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ups.common.files import DamagedError, read_record, require_small, write_atomic

FACTS, TABLE = "results.json", "results.csv"
AGAIN = "Make the report again."
ENDS = ("value", "low", "high")
SECTIONS = {"tasks": "forecast", "ensembles": "rollout", "steady": "partial"}  # -> case of its main numbers
OBSERVED, START, CHANCE = "observed ", "start ", "chance "  # first words of cases
# place in results.json, case, first part of the metric, to which the keys below the place are added; the
# first place that a number is below counts, and of an entry itself only COUNTS are results
PLACES = (
    ("tasks/{task}/models/{model}", "forecast", ""),
    ("tasks/{task}/comparisons/{model}", "forecast", ""),
    ("tasks/{task}/spectra/{model}", "spectra", "spectrum"),
    ("tasks/{task}/noise/nrmse/{model}", "noise", "nrmse"),
    ("tasks/{task}/noise", "noise", ""),
    ("tasks/{task}/break_even", "break-even", ""),
    ("tasks/{task}", "forecast", ""),
    ("ensembles/{task}/models/{model}/one_step/by_start/{frames}", "start {frames}", ""),
    ("ensembles/{task}/models/{model}/one_step", "one step", ""),
    ("ensembles/{task}/models/{model}", "rollout", ""),
    ("ensembles/{task}/comparisons/{model}", "rollout", ""),
    ("ensembles/{task}/by_evaluations/curves/{model}", "evaluations", ""),
    ("ensembles/{task}/by_evaluations", "evaluations", ""),
    ("ensembles/{task}/checks/long/climate/{model}", "long", ""),
    ("ensembles/{task}/checks/long/blown_up/{model}", "long", "blown_up"),
    ("ensembles/{task}/checks/long", "long", ""),
    ("ensembles/{task}/checks/{check}/{model}", "one step", "{check}"),
    ("ensembles/{task}/checks", "one step", ""),
    ("ensembles/{task}", "rollout", ""),
    ("steady/{task}/cases/{case}/{model}/exact", "observed {case}", ""),
    ("steady/{task}/cases/{case}/{model}", "observed {case}", ""),
    ("steady/{task}/chance/{case}", "chance {case}", ""),
    ("steady/{task}/comparisons/{model}", "partial", ""),
    ("steady/{task}/checks", "partial", ""),
    ("steady/{task}", "partial", ""),
)
COUNTS = (
    *("num_trajectories", "num_initial_conditions", "num_frames_predicted", "num_frames_beyond"),
    *("num_training", "members", "truth_members", "ssr"),
)

Interval = dict[str, Any]  # "value", "low", "high": number or None
Series = dict[str, list]  # "lead", "value", "low", "high" of every lead or element; {} for none


class Row(NamedTuple):
    task: str
    case: str
    model: str
    metric: str
    lead: float | None
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Entry:
    """A task in one section of a report. facts: its settings and texts in results.json; rows: of the task;
    case: of its main numbers, the default below."""

    name: str
    case: str
    facts: Mapping[str, Any]
    rows: Sequence[Row] = field(repr=False)

    @cached_property
    def _index(self) -> dict[tuple[str, str, str], list[Row]]:
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.case, row.model, row.metric), []).append(row)
        return found

    @cached_property
    def _models(self) -> dict[str, list[str]]:
        found: dict[str, dict[str, None]] = {}
        for case, model, _ in self._index:
            found.setdefault(case, {})[model] = None
        return {case: [*models] for case, models in found.items()}

    def value(self, model: str | None, metric: str, case: str = "") -> Interval | None:
        """The number over all leads, None if there is none."""
        rows = self._index.get((case or self.case, model or "", metric), ())
        return next((dict(zip(ENDS, row[5:], strict=True)) for row in rows if row.lead is None), None)

    def number(self, model: str | None, metric: str, case: str = "") -> float | None:
        """`value` without its interval; None also if there is none."""
        return (self.value(model, metric, case) or {"value": None})["value"]

    def by_lead(self, model: str, metric: str, case: str = "") -> Series:
        """The numbers of every lead, in order."""
        rows = self._index.get((case or self.case, model, metric), ())
        return _series([row for row in rows if row.lead is not None])

    def listed(self, model: str | None, metric: str, case: str = "") -> Series:
        """The elements NAME/0, NAME/1, .. of a list."""
        rows, key = [], (case or self.case, model or "")
        while found := self._index.get((*key, f"{metric}/{len(rows)}")):
            rows.append(found[0])
        return _series(rows)

    def models(self, case: str = "") -> list[str]:
        return [name for name in self._models.get(case or self.case, ()) if name and " / " not in name]

    def ratios(self, case: str = "") -> list[str]:
        """The compared pairs, A / B."""
        return [name for name in self._models.get(case or self.case, ()) if " / " in name]

    def cases(self, begin: str) -> list[str]:
        return [case for case in self._models if case.startswith(begin)]


def _series(rows: Sequence[Row]) -> Series:
    return dict(zip(Row._fields[4:], map(list, zip(*(row[4:] for row in rows), strict=True)), strict=False))


@dataclass(frozen=True)
class Results:
    """A report: facts (results.json) and the table of its numbers."""

    facts: Mapping[str, Any]
    rows: tuple[Row, ...] = field(repr=False)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Results":
        """The table of the numbers in `facts`, the content of a results.json."""
        rows = []
        for section in SECTIONS:
            for task, entry in facts.get(section, {}).items():
                rows += _rows_of(entry, section, task)
        return cls(facts, tuple(rows))

    def select(self, **columns: Any) -> list[Row]:
        """The rows with these values: select(model="operator", metric="nrmse")."""
        return [row for row in self.rows if all(getattr(row, name) == columns[name] for name in columns)]

    def _entries(self, section: str) -> dict[str, Entry]:
        by_task: dict[str, list[Row]] = {}
        for row in self.rows:
            by_task.setdefault(row.task, []).append(row)
        return {
            task: Entry(task, SECTIONS[section], facts, by_task.get(task, ()))
            for task, facts in self.facts.get(section, {}).items()
        }

    tasks = cached_property(lambda self: self._entries("tasks"))
    ensembles = cached_property(lambda self: self._entries("ensembles"))
    steady = cached_property(lambda self: self._entries("steady"))

    def save(self, folder: Path) -> None:
        """Write results.json and results.csv; each is complete or not there."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FACTS, json.dumps(self.facts, indent=1, allow_nan=False) + "\n")
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([Row._fields, *self.rows])
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
    return Results(facts, tuple(rows))


def _parsed(text: str) -> float | None:
    """A number of the table; counts stay whole."""
    if not text:
        return None
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is not finite")
    return int(text) if text.lstrip("-").isdigit() else value


# ---- from nested results


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list]]:
    """(place, [value, low, high]) of everything below a place of results.json; all three may be lists."""
    if not isinstance(value, dict):
        yield path, [value, None, None]
    elif {*ENDS} <= {*value}:
        yield path, [value[end] for end in ENDS]
    else:
        for key, inner in value.items():
            if isinstance(inner, list) and inner and isinstance(inner[0], dict):
                inner = {f"{part['first']}-{part['last']}": part for part in inner}
            if f"{key}_low" in value:
                yield (*path, key), [inner, value[f"{key}_low"], value[f"{key}_high"]]
            elif not key.endswith(("_low", "_high")) or key.rpartition("_")[0] not in value:
                yield from _numbers(inner, (*path, key))


def _columns(path: tuple[str, ...]) -> tuple[str, str, str] | None:
    """(case, model, metric) of a place; None if it is no result."""
    for place, case, first in PLACES:
        names = place.split("/")
        if len(names) <= len(path) and all(
            name[0] == "{" or name == key for name, key in zip(names, path, strict=False)
        ):
            known = {name.strip("{}"): key for name, key in zip(names, path, strict=False)}
            metric = "/".join(filter(None, (first.format(**known), *path[len(names) :])))
            if len(names) > 2 or metric in COUNTS:
                return case.format(**known), known.get("model", ""), metric
    return None


def _rows_of(entry: Mapping[str, Any], section: str, task: str) -> Iterator[Row]:
    """The rows of a task's entry in a section."""
    for path, ends in _numbers(entry, (section, task)):
        case, model, metric = _columns(path) or ("", "", "")
        times = entry.get("times") or ()
        if case == "spectra":
            if model in ("leads", "wavenumber"):
                continue
            # lead, field, wave number -> field, wave number, lead
            ends[0] = [
                [[*leads] for leads in zip(*waves, strict=True)] for waves in zip(*ends[0], strict=True)
            ]
            times = [times[frame] for frame in entry["spectra"]["leads"]]
        is_by_lead = metric.endswith("_by_lead") or metric == "error_growth" or case == "spectra"
        for name, lead, *numbers in _elements(metric.removesuffix("_by_lead"), *ends, is_by_lead):
            if case and not isinstance(numbers[0], (str, bool)):
                time = None if lead is None else float(times[lead] if lead < len(times) else lead)
                yield Row(task, case, model, name, time, *numbers)


def _elements(metric: str, value: Any, low: Any, high: Any, is_by_lead: bool) -> Iterator[tuple]:
    """(metric, number of the lead or None, value, low, high) of a number, or of lists of numbers whose last
    axis may be the lead."""
    if not isinstance(value, list):
        yield metric, None, value, low, high
        return
    for place, part in enumerate(
        zip(value, *(ends or [None] * len(value) for ends in (low, high)), strict=True)
    ):
        if is_by_lead and not isinstance(part[0], list):
            yield metric, place, *part
        else:
            yield from _elements(f"{metric}/{place}", *part, is_by_lead)
