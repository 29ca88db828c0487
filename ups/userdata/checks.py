"""What must hold of every file of the user: parameters, steps, groups and grid are those of the task."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ups.common.boundary import along
from ups.tasks import Task
from ups.userdata.grid import span
from ups.userdata.inspect_file import (
    NO_TIMES,
    coordinate,
    even_step,
    goes_on,
    is_even,
    jumps_in,
    names_of_times,
    step_in,
    value_in,
    wrong,
)
from ups.userdata.readers import Store


def parameter_values(
    key: str, store: Store, name: str, place: str, path: Path, groups: Sequence[str], num: int
) -> np.ndarray:
    """The parameter of each of the `num` trajectories of a file (or of its groups)."""
    if groups and "*" in place:
        return np.array([float(value_in(key, store, name, place, path, group)) for group in groups])
    values = value_in(key, store, name, place, path)
    if values.ndim and groups and list(groups) != sorted(groups):
        other = ", ".join(sorted(groups)[:2])
        raise wrong(
            f"{key}.parameters.{name}",
            f"{path} holds {len(values)} values for groups whose names "
            f"may be sorted as {groups[0]}, {groups[1]}, .. or as {other}, ..",
            "a value in each group",
            f'Write {name}: "*/{name}", an array or ("*@{name}") an '
            "attribute of each group; or name groups with leading zeros.",
        )
    if values.ndim and len(values) != num:
        raise wrong(
            f"{key}.parameters.{name}",
            f"{path} holds {len(values)} values",
            f"1, or {num} as it holds trajectories (by {key}.layout)",
            "Write one per trajectory, or correct the words for the axes.",
        )
    return np.broadcast_to(values, num)


def step_of(
    key: str, store: Store, task: Task, groups: Sequence[str], frames: int
) -> tuple[float, np.ndarray]:
    """The step of the times in a file, the same in all of its groups, 0 where it tells none or has a single
    frame; and the frames after which there are gaps in them."""
    place, none = task.user_facts["times"], np.arange(0)
    if task.is_steady or frames < 2 or place == NO_TIMES:
        return 0.0, none
    if "@" in place and (step := step_in(store, place)):
        return step, none
    found = coordinate(store, task.arrays, [place] if place else names_of_times(store, task.arrays))
    if found is None and not place:
        return 0.0, none
    if found is None or len(found[1]) < frames:
        raise wrong(
            f"{key}.dt",
            f"{store.path} holds no times in {place!r}",
            f"{frames} of them as in other files",
            "Write the number itself, such as dt: 0.1.",
        )
    _require_common(key, store, task, groups, *found, is_time=True)
    times = found[1][:frames]
    return even_step(key, store, found[0], times), jumps_in(times)


def _require_common(
    key: str,
    store: Store,
    task: Task,
    groups: Sequence[str],
    place: str,
    values: np.ndarray,
    is_time: bool = False,
) -> None:
    """Raise ValueError where the coordinate that the first group holds at `place` goes on otherwise in
    another group. is_time: as far as both go."""
    folders = [array.array.rpartition("/")[0] for array in task.arrays if "*" in array.array]
    folder = next((name for name in folders if place.startswith(f"{name.replace('*', groups[0])}/")), None)
    for group in groups[1:] if folder else ():
        other = folder.replace("*", group) + place.removeprefix(folder.replace("*", groups[0]))
        if store.array(other) is None:
            continue
        there = np.asarray(store.read(other), np.float64)
        both = slice(min(len(values), *there.shape[-1:]) if is_time and there.ndim else None)
        if not goes_on(values[both], there[..., both] if there.ndim else there):
            raise wrong(
                f"{key}.files",
                f"{other} in {store.path} is not in the steps of {place}",
                "one step and one grid in all groups",
                "Put groups of another one into a file and a task of their own.",
            )


def run_lengths(key: str, store: Store, task: Task, groups: Sequence[str], frames: int) -> list[int]:
    """The frames of the run in each group, `frames` where no array in it has a time axis. Raises ValueError
    where an array is missing in a group, or has another grid than in the first."""
    lengths: dict[str, list[int]] = {group: [] for group in groups}
    for place in (place for place in task.arrays if "*" in place.array):
        grid = [axis for axis, word in enumerate(place.axes) if word != "time"]
        first = store.array(place.array.replace("*", groups[0]))
        for group in groups:
            name = place.array.replace("*", group)
            found = store.array(name)
            if (
                found is None
                or len(found.shape) != len(place.axes)
                or any(found.shape[axis] != first.shape[axis] for axis in grid)
            ):
                what = "no array" if found is None else f"{found.shape} numbers in"
                raise wrong(
                    f"{key}.files",
                    f"{store.path} holds {what} {name}",
                    f"{first.shape} as in {groups[0]}",
                    "Leave that group out, or put groups of another grid into a task of their own.",
                )
            store.require_whole(name)
            lengths[group] += [] if place.is_steady else [found.shape[place.axes.index("time")]]
    return [min(own, default=frames) for own in lengths.values()]


def require_domain(
    key: str, store: Store, task: Task, groups: Sequence[str], space: Sequence[int]
) -> list[str]:
    """The axes whose cells are uneven and counted as equal, as the domain is said. Raise ValueError where the
    coordinates of a file are not those of the task, or of one grid in all groups."""
    uneven: list[str] = []
    # models published before know of no other names
    ends, names = along(task.boundary, task.ndim), task.user_facts.get("coordinates", {})
    for axis, limits, end, size in zip(task.axes, task.spans, ends, space, strict=True):
        span(key, list(limits), axis, end, size, store, task.arrays, names.get(axis, ""))
        found = coordinate(store, task.arrays, [names.get(axis, axis)])
        if found is not None and groups:
            _require_common(key, store, task, groups, *found)
        if found is not None and not is_even(found[1]) and not is_even(found[1][::-1]):
            uneven.append(axis)
    return uneven
