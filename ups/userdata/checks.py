"""Checks of one file of a user: its parameters, times, groups and grid must be those of the task."""

from collections.abc import Mapping, Sequence

import numpy as np

from ups.tasks import Task
from ups.userdata.grid import read_domain
from ups.userdata.inspect_file import Coordinate, config_error, goes_on, is_even_grid, value_in
from ups.userdata.readers import Store
from ups.userdata.times import NO_TIMES, even_step, jumps_in, step_in, times_in
from ups_discovery.boundary import along


def parameter_values(
    key: str, store: Store, task: Task, name: str, groups: Sequence[str], num: int
) -> np.ndarray:
    """The parameter of each of the `num` trajectories of a file, or of its groups, (num,)."""
    place, arrays = task.user_facts["parameters"][name], [entry.array for entry in task.arrays]
    if groups and "*" in place:
        return np.array([float(value_in(key, store, name, place, arrays, group)) for group in groups])
    values = value_in(key, store, name, place, arrays)
    if values.ndim and groups and list(groups) != sorted(groups):
        other = ", ".join(sorted(groups)[:2])
        raise config_error(
            f"{key}.parameters.{name}",
            f"{store.path} holds {len(values)} values for groups whose names "
            f"may be sorted as {groups[0]}, {groups[1]}, .. or as {other}, ..",
            "a value in each group",
            f'Write {name}: "*/{name}", an array or ("*@{name}") an '
            "attribute of each group; or name groups with leading zeros.",
        )
    if values.ndim and len(values) != num:
        raise config_error(
            f"{key}.parameters.{name}",
            f"{store.path} holds {len(values)} values",
            f"1, or {num} as it holds trajectories (by {key}.layout)",
            "Write one per trajectory, or correct the words for the axes.",
        )
    return np.broadcast_to(values, num)


def step_of(
    key: str, store: Store, task: Task, groups: Sequence[str], frames: int
) -> tuple[float, np.ndarray]:
    """(The step of the times in a file and in all its groups, 0 if it holds none or has a single frame; the
    frames after which the times jump.)"""
    place, none = task.user_facts["times"], np.arange(0)
    if task.is_steady or frames < 2 or place == NO_TIMES:
        return 0.0, none
    if "@" in place and (step := step_in(store, place)):
        return step, none
    found = times_in(store, task.arrays, place)
    if found is None and not place:
        return 0.0, none
    if found is None or len(found[1]) < frames:
        raise config_error(
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
    """Raise ValueError if the coordinate at `place` in the first group has other steps in another group.
    is_time: groups may have different lengths."""
    folders = [array.array.rpartition("/")[0] for array in task.arrays if "*" in array.array]
    folder = next((name for name in folders if place.startswith(f"{name.replace('*', groups[0])}/")), None)
    for group in groups[1:] if folder else ():
        other = folder.replace("*", group) + place.removeprefix(folder.replace("*", groups[0]))
        if store.array(other) is None:
            continue
        there = np.asarray(store.read(other), np.float64)
        both = slice(min(len(values), *there.shape[-1:]) if is_time and there.ndim else None)
        if not goes_on(values[both], there[..., both] if there.ndim else there):
            raise config_error(
                f"{key}.files",
                f"{other} in {store.path} is not in the steps of {place}",
                "one step and one grid in all groups",
                "Put groups of another one into a file and a task of their own.",
            )


def run_lengths(key: str, store: Store, task: Task, groups: Sequence[str], frames: int) -> list[int]:
    """The frames of the run in each group, `frames` if no array in it has a time axis. Raises ValueError if a
    group lacks an array, or has another grid than the first."""
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
                raise config_error(
                    f"{key}.files",
                    f"{store.path} holds {what} {name}",
                    f"{first.shape} as in {groups[0]}",
                    "Leave that group out, or put groups of another grid into a task of their own.",
                )
            store.require_whole(name)
            lengths[group] += [] if place.is_steady else [found.shape[place.axes.index("time")]]
    return [min(own, default=frames) for own in lengths.values()]


def require_domain(
    key: str,
    store: Store,
    task: Task,
    groups: Sequence[str],
    space: Sequence[int],
    found: Mapping[str, Coordinate | None],
) -> list[str]:
    """The axes whose cells are uneven and count as equal. found: the coordinates of the axes in the file.
    Raises ValueError if they are not those of the task, or not the same in all groups."""
    ends = along(task.boundary, task.ndim)
    for axis, limits, end, size in zip(task.axes, task.spans, ends, space, strict=True):
        read_domain(key, list(limits), axis, end, size, found[axis], store)
        if found[axis] is not None and groups:
            _require_common(key, store, task, groups, *found[axis])
    return [axis for axis, place in found.items() if place is not None and not is_even_grid(place[1])]
