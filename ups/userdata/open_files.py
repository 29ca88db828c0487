"""Opening the files of a user: every file is checked against the task and against the first file, then runs
are cut into windows. Nothing but coordinates and parameters is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ups.tasks import Task, make_user_task
from ups.userdata.grid import find_coordinates, flipped_axes, read_domain
from ups.userdata.inspect_file import (
    Coordinate,
    config_error,
    goes_on,
    is_even_grid,
    matching_files,
    measure,
    value_in,
)
from ups.userdata.masks import whole_windows
from ups.userdata.readers import Store, open_store
from ups.userdata.the_well import from_well, is_well
from ups.userdata.times import NO_TIMES, even_step, jumps_in, times_in, years_of
from ups.userdata.trajectories import DataFile, Trajectories
from ups.userdata.writer import MARK, forecast_facts
from ups_discovery.boundary import along


@dataclass(frozen=True, kw_only=True)
class _Checked(DataFile):
    """One file that fits the task.

    jumps: frames of every run after which its times jump; step: between frames, 0 if the file does not tell;
    uneven: axes of uneven cells; boundary: as a file of The Well states it.
    """

    jumps: np.ndarray
    step: float
    uneven: list[str]
    boundary: dict[str, str]


def user_files(name: str, pattern: str) -> list[Path]:
    """The files of a section."""
    return [Path(path) for path in matching_files(f"task.{name}", pattern)]


def open_user_files(
    task: Task,
    paths: Sequence[Path],
    *,
    resolution: Sequence[int] = (),
    num_frames: int = 0,
    dt: float = 0.0,
    num_trajectories: int = 0,
    space_stride: int = 1,
    time_stride: int = 1,
    first_frame: int = 0,
    split_by: str = "auto",
    cut: int = 0,
    skip_missing: bool = False,
) -> Trajectories:
    """The trajectories in `paths`, described but not read.

    resolution, num_frames, dt: expected grid, frames and step; 0 or (): those of the first file.
    num_trajectories: as many are taken, evenly over all; 0: all. cut: frames from window to window, 0: one
    window of every run. skip_missing: no window has a frame with gaps. Raises ValueError or
    FileNotFoundError, which name the key and what to write there.
    """
    key = f"task.{task.name}"
    found: list[_Checked] = []
    for path in paths:
        with open_store(path) as store:
            sizes = measure(key, store, task.arrays)
            sizes |= {axis: sizes[axis] - 1 for axis in task.user_facts.get("repeated", ())}
            resolution = tuple(resolution) or tuple(sizes[axis] for axis in task.axes)
            num_frames = num_frames or sizes.get("time", 1)
            found.append(_check_file(key, store, task, sizes, resolution, num_frames, found))
    if first_frame + 1 > num_frames:
        raise config_error(
            f"{key}.first_frame", f"it is {first_frame} of {num_frames} frames", "fewer", "Lower it."
        )
    step = _common_step(key, found, dt)
    used = range(first_frame, num_frames, time_stride)
    cells = tuple(-(-n // space_stride) for n in resolution)
    lengths = [frames for one in found for frames in one.lengths]
    jumps = [one.jumps for one in found for _ in one.lengths]
    first = [(number, run, 0) for number, one in enumerate(found) for run in range(one.num_trajectories)]
    files = tuple(  # after a gap, later frames may not follow
        replace(one, lengths=(num_frames,) * one.num_trajectories) if skip_missing or len(one.jumps) else one
        for one in found
    )
    whole_runs = Trajectories(
        Path(paths[0]),
        task,
        task.arrays,
        files,
        np.array(first),
        min(lengths),
        cells,
        0.0,
        {},
        (),
        space_stride,
    )
    rows, num_broken = whole_windows(whole_runs, lengths, used, cut, jumps, skip_missing)
    if num_trajectories > len(rows):
        raise config_error(
            f"{key}.num_trajectories",
            f"the files hold {len(rows)}",
            f"at least {num_trajectories}",
            f"Lower it, or write 0 for all; {len(files)} file(s) fit {key}.files.",
        )
    if num_trajectories:
        rows = rows[np.linspace(0, len(rows) - 1, num_trajectories).round().astype(int)]
    notes = _notes(task, found, num_broken)
    if cut:
        notes += (f"cut into {len(rows)} windows of {cut} frames",)
    elif max(lengths) > num_frames:
        notes += (f"the first {num_frames} frames, of up to {max(lengths)}",)
    step = step or (0.0 if task.is_steady else 1.0)
    return Trajectories(
        path=Path(paths[0]) if len(paths) == 1 else Path(paths[0]).parent,
        task=task,
        arrays=task.arrays,
        files=files,
        rows=rows,
        num_frames=1 if task.is_steady else len(used),
        space=cells,
        dt=0.0 if task.is_steady else step * time_stride,
        coordinates=_coordinates(task, resolution, space_stride)
        | ({} if task.is_steady else {"t": step * np.arange(num_frames)[first_frame::time_stride]}),
        notes=notes,
        space_stride=space_stride,
        time_stride=time_stride,
        first_frame=first_frame,
        split_by=split_by,
        is_cut=bool(cut),
    )


def open_input(task: Task, path: str, dt: float, named: Sequence[str], **strides: int) -> Trajectories:
    """One file of fields to start from, laid out as the user's files of the task or as forecasts of it.

    dt: of its frames, if it holds no times; named: NAME=VALUE of parameters that are not read from it.
    """
    names = {text.split("=")[0] for text in named}
    with open_store(path) as store:
        facts = forecast_facts(task) if MARK in store.attributes() else task.user_facts
    places = {name: place for name, place in facts["parameters"].items() if name not in names}
    reduced = make_user_task(task.name, {**facts, "parameters": places})
    return open_user_files(reduced, [Path(path)], dt=0 if facts["times"] else dt, **strides)


def _check_file(
    key: str,
    store: Store,
    task: Task,
    sizes: dict[str, int],
    resolution: tuple[int, ...],
    num_frames: int,
    before: Sequence[_Checked],
) -> _Checked:
    """One open file, checked. before: the files before it, of which the first is the reference."""
    path, frames = store.path, sizes.get("time", 1)
    first = before[0] if before else None
    space = tuple(sizes[axis] for axis in task.axes)
    if space != resolution:
        raise config_error(
            f"{key}.files",
            f"{path} holds a grid of {space} cells, and {first.path if first else path} one of {resolution}",
            "one grid in all files",
            "Split them into two tasks with a pattern of files each, or resample some.",
        )
    grouped = [place.array for place in task.arrays if "*" in place.array]
    groups = tuple(store.groups(grouped[0])) if grouped else ()
    lengths = _run_lengths(key, store, task, groups, frames) if groups else [frames]
    if (shortest := min(lengths)) < num_frames:
        kind = "group" if groups else "file"
        where = f" in {groups[lengths.index(shortest)]}" if groups else ""
        whose = f"{first.path if first else path}{f' in {groups[0]}' if groups else ''}"
        raise config_error(
            f"{key}.num_frames",
            f"{path} holds {shortest} frames{where}",
            f"{num_frames} as in {whose}",
            f"Write {key}.num_frames: {shortest} to use that many of every {kind}, or leave that {kind} out.",
        )
    coordinates = find_coordinates(key, task.user_facts.get("coordinates", {}), task.axes, task.arrays, store)
    uneven = _require_domain(key, store, task, groups, space, coordinates)
    if first and uneven != first.uneven:
        raise config_error(
            f"{key}.files",
            f"the cells of {path} are uneven along other axes than those of {first.path}",
            "one grid in all files",
            "Put them into two tasks.",
        )
    boundary = from_well(store)["boundary"] if is_well(store) else {}
    if first and boundary != first.boundary:
        raise config_error(
            f"{key}.files",
            f"{path} says {boundary} of its boundary, and {first.path} {first.boundary}",
            "one boundary in all files",
            "Put them into two tasks.",
        )
    step, jumps = _step_of(key, store, task, groups, frames)
    num = len(groups) or sizes.get("trajectory", 1)
    values = [
        _parameter_values(key, store, task, name, groups, num) for name in task.user_facts["parameters"]
    ]
    return _Checked(
        path=path,
        groups=groups,
        parameters=np.stack(values, 1).astype(np.float64) if values else np.zeros((num, 0)),
        flipped=tuple(flipped_axes(key, task.user_facts.get("flipped", []), coordinates)),
        lengths=tuple(lengths if groups else lengths * num),
        jumps=jumps,
        step=step,
        uneven=uneven,
        boundary=boundary,
        years=None if task.is_steady else years_of(store, task),
    )


def _parameter_values(
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


def _step_of(
    key: str, store: Store, task: Task, groups: Sequence[str], frames: int
) -> tuple[float, np.ndarray]:
    """(The step of the times in a file and in all its groups, 0 if it holds none or has a single frame; the
    frames after which the times jump.)"""
    place, none = task.user_facts["times"], np.arange(0)
    if task.is_steady or frames < 2 or place == NO_TIMES:
        return 0.0, none
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


def _run_lengths(key: str, store: Store, task: Task, groups: Sequence[str], frames: int) -> list[int]:
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


def _require_domain(
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


def _common_step(key: str, found: Sequence[_Checked], dt: float) -> float:
    """dt if it is set, else the common step of the files that have times, else 0. Raises ValueError if one
    differs."""
    steps = [(one.path, one.step) for one in found if one.step]
    expected = dt or (steps[0][1] if steps else 0.0)
    for path, step in steps:
        if abs(step - expected) > 0.01 * expected:
            raise config_error(
                f"{key}.dt",
                f"the frames of {path} are {step:g} apart",
                f"{expected:g} as of the others",
                "Put files of another step into a task of their own, or resample them.",
            )
    return expected


def _coordinates(task: Task, resolution: Sequence[int], stride: int) -> dict[str, np.ndarray]:
    """Axis of space -> the centres of its cells."""
    spans = zip(task.axes, task.spans, resolution, strict=True)
    return {
        axis: (low + (np.arange(size) + 0.5) * (high - low) / size)[::stride]
        for axis, (low, high), size in spans
    }


def _notes(task: Task, found: Sequence[_Checked], num_broken: int) -> tuple[str, ...]:
    """What a user should know of the files, in words."""
    notes, uneven = [], found[0].uneven
    num_jumps = sum(len(one.jumps) * len(one.lengths) for one in found)
    if len(found) > 1:
        notes.append(f"{len(found)} files")
    if task.user_facts["times"] == NO_TIMES:
        notes.append("the files' times are uneven, and counted as dt apart")
    if uneven:
        notes.append(f"the cells of {' and '.join(uneven)} are uneven, and counted as equal")
    if num_jumps:
        notes.append(f"gaps in the times at {num_jumps} places: no window crosses them")
    if num_broken:
        frames = sum(sum(one.lengths) for one in found)
        notes.append(
            f"{num_broken} of {frames} frames are left out, in which cells have no value that have one "
            "elsewhere"
        )
    return tuple(notes)
