"""Opening the files of a user: every file is checked against the task and against the first file, then runs
are cut into windows. Nothing but coordinates and parameters is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ups.common.files import parts_of
from ups.tasks import Task, make_user_task
from ups.userdata.checks import parameter_values, require_domain, run_lengths, step_of
from ups.userdata.grid import find_coordinates, flipped_axes
from ups.userdata.inspect_file import config_error, matching_files, measure
from ups.userdata.known_layouts import from_well, is_well
from ups.userdata.masks import whole_windows
from ups.userdata.readers import Store, open_store
from ups.userdata.times import NO_TIMES, years_of
from ups.userdata.trajectories import DataFile, Trajectories


@dataclass(frozen=True)
class _Checked:
    """One file that fits the task.

    lengths: frames of every run; jumps: frames of every run after which its times jump; step: between frames,
    0 if the file does not tell; uneven: axes of uneven cells; boundary: as a file of The Well states it;
    reals: arrays whose imaginary parts are negligible.
    """

    path: Path
    groups: tuple[str, ...]
    parameters: np.ndarray
    flipped: tuple[str, ...]
    lengths: list[int]
    jumps: np.ndarray
    step: float
    uneven: list[str]
    boundary: dict[str, str]
    years: np.ndarray | None
    reals: list[str]


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
    is_broken = [skip_missing or len(one.jumps) > 0 for one in found]  # then later frames may not follow
    files = tuple(
        DataFile(
            one.path,
            len(one.lengths),
            one.groups,
            one.parameters,
            one.flipped,
            (num_frames,) * len(one.lengths) if broken else tuple(one.lengths),
            one.years,
        )
        for one, broken in zip(found, is_broken, strict=True)
    )
    runs = [(number, run) for number, one in enumerate(found) for run in range(len(one.lengths))]
    lengths = [frames for one in found for frames in one.lengths]
    if any(is_broken):
        jumps = [one.jumps for one in found for _ in one.lengths]
        first = np.array([(*run, 0) for run in runs])
        whole_runs = Trajectories(
            Path(paths[0]), task, task.arrays, files, first, min(lengths), cells, 0.0, {}, (), space_stride
        )
        rows, num_broken = whole_windows(whole_runs, lengths, used, cut, jumps, skip_missing)
    else:
        rows, num_broken = _windows(runs, lengths, first_frame, cut), 0
    if num_trajectories > len(rows):
        raise config_error(
            f"{key}.num_trajectories",
            f"the files hold {len(rows)}",
            f"at least {num_trajectories}",
            f"Lower it, or write 0 for all; {len(files)} file(s) fit {key}.files.",
        )
    if num_trajectories:
        rows = rows[np.linspace(0, len(rows) - 1, num_trajectories).round().astype(int)]
    notes = _notes(task, found, num_broken if skip_missing else 0)
    if cut:
        notes += (f"cut into {len(rows)} windows of {cut} frames",)
    elif max(lengths) > num_frames:
        notes += (f"the first {num_frames} frames, of up to {max(lengths)}",)
    step = step or (0.0 if task.is_steady else 1.0)
    return Trajectories(
        path=Path(paths[0]) if len(paths) == 1 else parts_of(paths[0])[0].parent,
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
    """One file of fields to start from, laid out as the user's files of the task.

    dt: of its frames, if it holds no times; named: NAME=VALUE of parameters that are not read from it.
    """
    names = {text.split("=")[0] for text in named}
    places = {name: place for name, place in task.user_facts["parameters"].items() if name not in names}
    reduced = make_user_task(task.name, {**task.user_facts, "parameters": places})
    return open_user_files(reduced, [Path(path)], dt=0 if task.user_facts["times"] else dt, **strides)


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
    lengths = run_lengths(key, store, task, groups, frames) if groups else [frames]
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
    uneven = require_domain(key, store, task, groups, space, coordinates)
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
    step, jumps = step_of(key, store, task, groups, frames)
    num = len(groups) or sizes.get("trajectory", 1)
    values = [parameter_values(key, store, task, name, groups, num) for name in task.user_facts["parameters"]]
    return _Checked(
        path=path,
        groups=groups,
        parameters=np.stack(values, 1).astype(np.float64) if values else np.zeros((num, 0)),
        flipped=tuple(flipped_axes(key, task.user_facts.get("flipped", []), coordinates)),
        lengths=lengths if groups else lengths * num,
        jumps=jumps,
        step=step,
        uneven=uneven,
        boundary=boundary,
        years=None if task.is_steady else years_of(store, task),
        reals=[place.array for place in task.arrays if store.first_array(place.array).is_real_part],
    )


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


def _windows(
    runs: Sequence[tuple[int, int]], lengths: Sequence[int], first_frame: int, cut: int
) -> np.ndarray:
    """Rows (n, 3) of windows: file, run and first frame; one window of every run if cut is 0."""
    rows = [
        (*run, begin)
        for run, frames in zip(runs, lengths, strict=True)
        for begin in (range(first_frame, frames - cut + 1, cut) if cut else [first_frame])
    ]
    return np.array(rows).reshape(-1, 3)


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
    if reals := found[0].reals:
        notes.append(f"the imaginary parts of {', '.join(reals)} are at rounding level and dropped")
    if num_jumps:
        notes.append(f"gaps in the times at {num_jumps} places: no window crosses them")
    if num_broken:
        frames = sum(sum(one.lengths) for one in found)
        notes.append(
            f"{num_broken} of {frames} frames are left out, in which cells have no value that have one "
            "elsewhere"
        )
    return tuple(notes)
