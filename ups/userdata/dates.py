"""Dates of frames by the units of their times, as CF says them: "days since 2000-01-01"."""

import re

import numpy as np

from ups.tasks import Task
from ups.userdata.inspect_file import NO_TIMES, coordinate, names_of_times
from ups.userdata.readers import Store

CALENDARS = {
    "360_day": 360.0,
    "noleap": 365.0,
    "365_day": 365.0,
    "julian": 365.25,
    "all_leap": 366.0,
    "366_day": 366.0,
}  # days of a year, where that is not GREGORIAN
GREGORIAN = 365.2425
DAYS = {
    "s": 1 / 86400,
    "sec": 1 / 86400,
    "second": 1 / 86400,
    "min": 1 / 1440,
    "minute": 1 / 1440,
    "h": 1 / 24,
    "hr": 1 / 24,
    "hour": 1 / 24,
    "d": 1.0,
    "day": 1.0,
    "week": 7.0,
}
SINCE = re.compile(r"(\w+)\s+since\s+(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]+(\d{1,2}))?", re.IGNORECASE)


def years_of(store: Store, task: Task) -> np.ndarray | None:
    """The times of a file (frames,) in years, to a day or so, which is enough for a season; None where they
    are no dates, or every group has its own."""
    if any("*" in place.array for place in task.arrays):
        return None
    named = [task.user_facts["times"]] if task.user_facts["times"] not in ("", NO_TIMES) else []
    found = coordinate(store, task.arrays, [*named, *names_of_times(store, task.arrays)])
    return None if found is None else in_years(found[1], store.attributes(found[0]))


def in_years(times: np.ndarray, said: dict) -> np.ndarray | None:
    """Times in the units that their attributes say, as years; None where these are no dates."""
    words = [
        word.decode(errors="replace") if isinstance(word, bytes) else str(word)
        for word in (said.get("units", ""), said.get("calendar", ""))
    ]
    since, length = SINCE.match(words[0].strip()), CALENDARS.get(words[1].lower(), GREGORIAN)
    if since is None:
        return None
    unit, (year, month, day, hour) = since[1].lower(), (float(part or 0) for part in since.groups()[1:])
    unit = unit if unit in DAYS or unit in ("month", "year") else unit.removesuffix("s")
    days = {**DAYS, "month": length / 12, "year": length}.get(unit)
    if days is None:
        return None
    return year + (month - 1) / 12 + ((day - 1 + hour / 24) + days * times) / length
