"""The times of user data: the step between frames, gaps in a record, and dates (CF conventions, "days since
2000-01-01")."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ups.common.lazy import np
from ups.tasks import Place, Task
from ups.userdata.inspect_file import UNEVEN, ConfigError, Coordinate, coordinate, is_even, tidy
from ups.userdata.layout import Layout
from ups.userdata.readers import Store

TIMES = ("t", "time", "times")
NO_TIMES = "-"  # in place of the array of times: the times of the file are not used
MOST = 0.8  # of the steps of times must be equal, if the others are to be gaps in a record
CALENDARS = {
    "360_day": 360.0,
    "noleap": 365.0,
    "365_day": 365.0,
    "julian": 365.25,
    "all_leap": 366.0,
    "366_day": 366.0,
}  # days of a year, in the calendars other than the Gregorian one
GREGORIAN = 365.2425
DAYS = {
    **dict.fromkeys(("s", "sec", "second"), 1 / 86400),
    **dict.fromkeys(("min", "minute"), 1 / 1440),
    **dict.fromkeys(("h", "hr", "hour"), 1 / 24),
    **dict.fromkeys(("d", "day"), 1.0),
    "week": 7.0,
}  # days of a unit
SINCE = re.compile(r"(\w+)\s+since\s+(\d{1,4})-(\d{1,2})-(\d{1,2})(?:[T ]+(\d{1,2}))?", re.IGNORECASE)


def times_in(store: Store, places: Sequence[Place], name: str = "") -> Coordinate | None:
    """The array of times of a file: `name`, else one of a usual name or of the name that the file gives to
    the axis called time."""
    if name:
        return coordinate(store, places, [name])
    found = [store.first_array(place.array) for place in places]
    named = [
        array.axes[place.axes.index("time")]
        for place, array in zip(places, found, strict=True)
        if "time" in place.axes and array is not None and array.axes
    ]
    return coordinate(store, places, [*dict.fromkeys([*TIMES, *named])])


def jumps_in(times: "np.ndarray") -> "np.ndarray":
    """The frames after which times jump, if MOST of them are one step apart; none of other times."""
    steps = np.diff(times)
    step = np.median(steps) if len(steps) else 0.0
    is_jump = np.abs(steps - step) > UNEVEN * step
    return np.flatnonzero(is_jump) if step > 0 and is_jump.mean() <= 1 - MOST else np.arange(0)


def even_step(key: str, store: Store, place: str, times: "np.ndarray") -> float:
    """The step of the times at `place`, apart from jumps. Raises ValueError if they do not rise evenly."""
    if is_even(times):
        return float((times[-1] - times[0]) / (len(times) - 1))
    steps = np.diff(times)
    if len(jumps_in(times)):
        return float(np.median(steps))
    fix = "Write the frames in the order of their times."
    if np.median(steps) > 0:
        fix = (
            f"Write {key}.dt: {np.median(steps):g} to count all steps as equal, as those of months; or leave "
            f"uneven ones out ({key}.first_frame)."
        )
    raise ConfigError(
        f"{key}.dt: {place} in {store.path} has steps of {steps.min():g} to {steps.max():g}; expected equal, "
        f"increasing ones. {fix}"
    )


def read_step(key: str, section: Mapping[str, Any], layout: Layout, store: Store) -> dict[str, Any]:
    """dt between stored frames, and the place of their times in a file ("" if no name is given). Raises
    ValueError if the section and the file differ, or if both are silent."""
    if layout.is_steady:
        return {"dt": 0.0, "times": ""}
    dt = section["dt"]
    name = section["times"] or (dt if isinstance(dt, str) else "")
    found = times_in(store, layout.places, name)
    if name and found is None:
        raise ConfigError(
            f"{key}.dt: {store.path} holds no array {name!r} of times; expected a number, or the name of "
            f"one. Write dt: 0.1, or one that it holds: {store.listing()}."
        )
    is_stated, stored = bool(dt) and not isinstance(dt, str), None
    if found is not None and layout.sizes["time"] > 1:
        times = _of_frames(key, layout, store, *found)
        if is_stated and not is_even(times):
            is_step = abs(np.median(np.diff(times)) - dt) <= UNEVEN * dt
            if not (is_step and len(jumps_in(times))):
                return {"dt": float(dt), "times": NO_TIMES}  # the user's dt wins: months are equal steps
        stored = tidy(even_step(key, store, found[0], times))
    dt = _check_step(key, dt if is_stated else stored, store)
    if stored is not None and abs(stored - dt) > UNEVEN * dt:
        raise ConfigError(
            f"{key}.dt: it is {dt:g}, and {found[0]} in {store.path} has steps of {stored:g}; expected what "
            f"the file says. Write dt: {stored:g}, or leave it out."
        )
    return {"dt": dt, "times": found[0] if name else ""}


def _of_frames(key: str, layout: Layout, store: Store, place: str, times: "np.ndarray") -> "np.ndarray":
    """The times of the stored frames; an array may hold the end of the last step as well."""
    frames = layout.sizes["time"]
    if len(times) not in (frames, frames + 1):
        raise ConfigError(
            f"{key}.layout: the axis called time has {frames} frames and the array {place} in {store.path} "
            f"{len(times)} times; expected {frames} or {frames + 1} times. Are the words in the order of the "
            f"axes? {store.listing()}."
        )
    return times[:frames]


def _check_step(key: str, dt: Any, store: Store) -> float:
    if dt is None:
        raise ConfigError(
            f"{key}.dt: it is missing, and the file holds no times; expected the time between stored frames, "
            f"or the name of the array of times. Write dt: 0.1; {store.path} holds {store.listing()}."
        )
    if isinstance(dt, bool) or not isinstance(dt, int | float) or not 0 < dt < math.inf:
        raise ConfigError(
            f"{key}.dt: it is {dt!r:.80}; expected a number above zero, or the name of the array of times. "
            "Write dt: 0.1."
        )
    return float(dt)


def years_of(store: Store, task: Task) -> "np.ndarray | None":
    """The times of a file (frames,) in years, to a day or so, which is enough for a season; None if they
    are no dates, or if every group has its own."""
    if any("*" in place.array for place in task.arrays):
        return None
    name = task.user_facts["times"] if task.user_facts["times"] != NO_TIMES else ""
    found = (name and times_in(store, task.arrays, name)) or times_in(store, task.arrays)
    return in_years(found[1], store.attributes(found[0])) if found else None


def in_years(times: "np.ndarray", attributes: Mapping[str, Any]) -> "np.ndarray | None":
    """Times in years, by the units and the calendar in their attributes; None if they are no dates."""
    units, calendar = (
        value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for value in (attributes.get("units", ""), attributes.get("calendar", ""))
    )
    since, length = SINCE.match(units.strip()), CALENDARS.get(calendar.lower(), GREGORIAN)
    if since is None:
        return None
    unit, (year, month, day, hour) = since[1].lower(), (float(part or 0) for part in since.groups()[1:])
    unit = unit if unit in DAYS or unit in ("month", "year") else unit.removesuffix("s")
    days = {**DAYS, "month": length / 12, "year": length}.get(unit)
    if days is None:
        return None
    return year + (month - 1) / 12 + ((day - 1 + hour / 24) + days * times) / length
