"""Entries of a report (ups/results.py) of given figures."""

from typing import Any

from ups.results import Entry


def entry_of(section: str, facts: dict[str, Any] | None = None, name: str = "t", **cases: dict) -> Entry:
    """An entry whose rows are cases: model -> figures. main: the case of the main numbers; others by their
    names, with _ for blanks."""
    entry = Entry(name, section, dict(facts or {}))
    for case, models in cases.items():
        for model, figures in models.items():
            entry.add(model, figures, "" if case == "main" else case.replace("_", " "))
    return entry


def place(entry: Entry, model: str, other: str, into: Entry | None = None) -> None:
    """Put all figures of a model in the place of another's, also its ratios; into: of another entry."""
    into = into or entry
    for (case, name, metric, by_lead), rows in [*entry.numbers.items()]:
        if name == model or name.startswith(f"{model} / "):
            new = other + name.removeprefix(model)
            into.numbers[case, new, metric, by_lead] = [row._replace(model=new) for row in rows]


def drop(entry: Entry, **columns: str) -> None:
    """Delete the rows with these values: drop(entry, model="exact")."""
    entry.numbers = {
        place: rows
        for place, rows in entry.numbers.items()
        if any(getattr(rows[0], name) != value for name, value in columns.items())
    }
