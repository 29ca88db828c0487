"""The units of fields, of the axes of space and of time: as the section says them, or as the files do."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ups.common.lazy import np
from ups.tasks import Place
from ups.userdata.inspect_file import coordinate, is_even, names_of_times, wrong

if TYPE_CHECKING:
    from ups.userdata.readers import Store

TIME = "time"
SAME = 0.1  # of a step of the file's times: a dt that is further off counts in another unit


def units(
    key: str,
    said: Any,
    store: "Store",
    places: Sequence[Place],
    axes: Sequence[str],
    dt: float,
    named: Mapping[str, str],
) -> dict[str, str]:
    """Field, axis or "time" -> its unit, of those that have one. dt: the step of the task; named: the arrays
    of coordinates that have another name than their axis. Raises ValueError for what is not such."""
    fields = {field: place for place in places for field in place.fields}
    known = [*fields, *axes, *[TIME] * bool(dt)]
    if not isinstance(said, Mapping) or not all(isinstance(unit, str) for unit in said.values()):
        raise wrong(
            f"{key}.units",
            f"it is {said!r:.80}",
            "names of fields and axes, each with a unit",
            f'Write units: {{{known[0]}: "m s-1"}}.',
        )
    if strange := [name for name in said if name not in known]:
        raise wrong(
            f"{key}.units", f"it names {strange[0]!r:.80}", f"of {', '.join(known)}", "Correct the name."
        )
    found = {field: _unit(store, store.first(place.array)) for field, place in fields.items()}
    for axis in axes:
        if (place := coordinate(store, places, [named.get(axis) or axis])) is not None:
            found[axis] = _unit(store, place[0])
    if (
        dt
        and (place := coordinate(store, places, names_of_times(store, places))) is not None
        and _counts(place[1], dt)
    ):
        found[TIME] = _unit(store, place[0]).split(" since ")[0]
    return {name: unit for name, unit in (found | dict(said)).items() if unit not in ("", "1")}


def _counts(times: "np.ndarray", dt: float) -> bool:
    """Whether a step of dt is one of these times."""
    steps = np.diff(times)
    return len(steps) > 0 and (is_even(times) or abs(float(np.median(steps)) - dt) <= SAME * dt)


def _unit(store: "Store", array: str) -> str:
    unit = store.attributes(array).get("units", "")
    unit = unit.decode(errors="replace") if isinstance(unit, bytes) else unit
    return " ".join(str(unit).split()) if isinstance(unit, str) else ""
