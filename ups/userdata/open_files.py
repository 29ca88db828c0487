"""Opening the files of a user: every file is checked against the task and against the first file, then runs
are cut into windows. Nothing but coordinates and parameters is read."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ups.tasks import Task, make_user_task
from ups.userdata.grid import evenness, find_coordinates, flipped_axes, read_domain
from ups.userdata.inspect_file import (
    ConfigError,
    goes_on,
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
    found: list[DataFile] = []
    for path in paths:
        with open_store(path) as store:
            file = OpenFile(store, task)
            resolution = tuple(resolution) or file.space
            num_frames = num_frames or file.frames
            found.append(file.checked(found[0] if found else None, resolution, num_frames))
    if first_frame + 1 > num_frames:
        raise ConfigError(
            f"{key}.first_frame: it is {first_frame} of {num_frames} frames; expected fewer. Lower it."
        )
    step = _common_step(key, found, dt) or (0.0 if task.is_steady else 1.0)
    used = range(first_frame, num_frames, time_stride)
    lengths = [frames for one in found for frames in one.lengths]
    first = [(number, run, 0) for number, one in enumerate(found) for run in range(one.num_trajectories)]
    whole_runs = Trajectories(
        path=Path(paths[0]) if len(paths) == 1 else Path(paths[0]).parent,
        task=task,
        arrays=task.arrays,
        files=tuple(found),
        rows=np.array(first),
        num_frames=min(lengths),
        space=tuple(-(-n // space_stride) for n in resolution),
        dt=0.0 if task.is_steady else step * time_stride,
        coordinates={
            axis: np.array(task.centres(size, axis))[::space_stride]
            for axis, size in zip(task.axes, resolution, strict=True)
        }
        | ({} if task.is_steady else {"t": step * np.arange(num_frames)[first_frame::time_stride]}),
        space_stride=space_stride,
        split_by=split_by,
    )
    rows, num_broken = whole_windows(whole_runs, used, cut, skip_missing)
    if num_trajectories > len(rows):
        raise ConfigError(
            f"{key}.num_trajectories: the files hold {len(rows)}; expected at least {num_trajectories}. "
            f"Lower it, or write 0 for all; {len(found)} file(s) fit {key}.files."
        )
    if num_trajectories:
        rows = rows[np.linspace(0, len(rows) - 1, num_trajectories).round().astype(int)]
    notes = _notes(task, found, num_broken)
    if cut:
        notes += (f"cut into {len(rows)} windows of {cut} frames",)
    elif max(lengths) > num_frames:
        notes += (f"the first {num_frames} frames, of up to {max(lengths)}",)
    return replace(
        whole_runs,
        files=tuple(  # after a gap, later frames may not follow
            replace(one, lengths=(num_frames,) * one.num_trajectories)
            if skip_missing or len(one.jumps)
            else one
            for one in found
        ),
        rows=rows,
        num_frames=1 if task.is_steady else len(used),
        notes=notes,
        time_stride=time_stride,
        first_frame=first_frame,
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


class OpenFile:
    """An open file of a task. sizes: of its axes, without repeated cells; groups: one for each run, or ()."""

    def __init__(self, store: Store, task: Task) -> None:
        self.store, self.task, self.key = store, task, f"task.{task.name}"
        self.grouped = [place for place in task.arrays if "*" in place.array]
        self.groups = tuple(store.groups(self.grouped[0].array)) if self.grouped else ()
        sizes = measure(self.key, store, task.arrays)
        self.sizes = sizes | {axis: sizes[axis] - 1 for axis in task.user_facts.get("repeated", ())}
        self.space = tuple(self.sizes[axis] for axis in task.axes)
        self.frames = self.sizes.get("time", 1)
        for place in task.arrays:
            shape = zip(place.axes, store.first_array(place.array).shape, strict=True)
            num = math.prod(size for axis, size in shape if axis in ("channel", "component"))
            if num != len(place.fields):
                raise self.error(
                    "layout",
                    f"holds {num} channels in {place.array}; expected {len(place.fields)}: "
                    f"{', '.join(place.fields)}. Put files of other fields into a task of their own.",
                )

    def error(self, part: str, text: str) -> ConfigError:
        return ConfigError(f"{self.key}.{part}: {self.store.path} {text}")

    def checked(self, first: DataFile | None, resolution: tuple[int, ...], num_frames: int) -> DataFile:
        """What it holds. first: the first file of the set, None if this is it. Raises ValueError if it does
        not fit the task or `first`."""
        path, facts = self.store.path, self.task.user_facts
        reference = first.path if first else path
        if self.space != resolution:
            raise self.error(
                "files",
                f"holds a grid of {self.space} cells, and {reference} one of {resolution}; expected one grid "
                "in all files. Split them into two tasks with a pattern of files each, or resample some.",
            )
        lengths = self._lengths() if self.groups else [self.frames]
        if (shortest := min(lengths)) < num_frames:
            kind = "group" if self.groups else "file"
            where = f" in {self.groups[lengths.index(shortest)]}" if self.groups else ""
            raise self.error(
                "num_frames",
                f"holds {shortest} frames{where}; expected {num_frames} as in "
                f"{reference}{f' in {self.groups[0]}' if self.groups else ''}. Write "
                f"{self.key}.num_frames: {shortest} to use that many of every {kind}, or leave that {kind} "
                "out.",
            )
        coordinates = find_coordinates(
            self.key, facts.get("coordinates", {}), self.task.axes, self.task.arrays, self.store
        )
        ends = along(self.task.boundary, self.task.ndim)
        for axis, limits, end, size in zip(self.task.axes, facts["domain"], ends, self.space, strict=True):
            if limits or coordinates[axis]:
                read_domain(self.key, list(limits), axis, end, size, coordinates[axis], self.store)
            if coordinates[axis]:
                self._require_common(*coordinates[axis])
        ratios = {axis: (there[0], evenness(there[1])) for axis, there in coordinates.items() if there}
        uneven = {axis: found for axis, found in ratios.items() if found[1] > 1}
        boundary = from_well(self.store)["boundary"] if is_well(self.store) else {}
        for what, mine, theirs in (
            ("boundary", boundary, first.boundary if first else boundary),
            ("list of uneven axes", [*uneven], [*(first.uneven if first else uneven)]),
        ):
            if mine != theirs:
                raise self.error(
                    "files",
                    f"says {mine} of its {what}, and {reference} {theirs}; expected one {what} in all files. "
                    "Put them into two tasks.",
                )
        step, jumps = self._step()
        num = len(self.groups) or self.sizes.get("trajectory", 1)
        values = [self._parameter(name, place, num) for name, place in facts["parameters"].items()]
        return DataFile(
            path=path,
            groups=self.groups,
            parameters=np.stack(values, 1).astype(np.float64) if values else np.zeros((num, 0)),
            flipped=tuple(flipped_axes(self.key, facts.get("flipped", []), coordinates)),
            lengths=tuple(lengths if self.groups else lengths * num),
            jumps=jumps,
            step=step,
            uneven=uneven,
            boundary=boundary,
            years=None if self.task.is_steady else years_of(self.store, self.task),
        )

    def _parameter(self, name: str, place: str, num: int) -> np.ndarray:
        """The parameter of each of the `num` trajectories, (num,)."""
        arrays, groups = [entry.array for entry in self.task.arrays], self.groups
        if groups and "*" in place:
            return np.array(
                [float(value_in(self.key, self.store, name, place, arrays, group)) for group in groups]
            )
        values = value_in(self.key, self.store, name, place, arrays)
        if values.ndim and groups and list(groups) != sorted(groups):
            other = ", ".join(sorted(groups)[:2])
            raise self.error(
                f"parameters.{name}",
                f"holds {len(values)} values for groups whose names may be sorted as {groups[0]}, "
                f"{groups[1]}, .. or as {other}, ..; expected a value in each group. Write {name}: "
                f'"*/{name}", an array or ("*@{name}") an attribute of each group; or name groups with '
                "leading zeros.",
            )
        if values.ndim and len(values) != num:
            raise self.error(
                f"parameters.{name}",
                f"holds {len(values)} values; expected 1, or {num} as it holds trajectories (by "
                f"{self.key}.layout). Write one per trajectory, or correct the words for the axes.",
            )
        return np.broadcast_to(values, num)

    def _step(self) -> tuple[float, np.ndarray]:
        """(The step of the times, 0 if there are none or a single frame; the frames after which they
        jump.)"""
        place, none = self.task.user_facts["times"], np.arange(0)
        if self.task.is_steady or self.frames < 2 or place == NO_TIMES:
            return 0.0, none
        found = times_in(self.store, self.task.arrays, place)
        if found is None and not place:
            return 0.0, none
        if found is None or len(found[1]) < self.frames:
            raise self.error(
                "dt",
                f"holds no times in {place!r}; expected {self.frames} of them as in other files. Write the "
                "number itself, such as dt: 0.1.",
            )
        self._require_common(*found, is_time=True)
        times = found[1][: self.frames]
        return even_step(self.key, self.store, found[0], times), jumps_in(times)

    def _require_common(self, place: str, values: np.ndarray, is_time: bool = False) -> None:
        """Raise ValueError if the coordinate at `place` in the first group has other steps in another group.
        is_time: groups may have different lengths."""
        for folder in (entry.array.rpartition("/")[0] for entry in self.grouped):
            first = folder.replace("*", self.groups[0])
            for group in self.groups[1:] if place.startswith(f"{first}/") else ():
                other = folder.replace("*", group) + place.removeprefix(first)
                if self.store.array(other) is None:
                    continue
                there = np.asarray(self.store.read(other), np.float64)
                both = slice(min(len(values), *there.shape[-1:]) if is_time and there.ndim else None)
                if not goes_on(values[both], there[..., both] if there.ndim else there):
                    raise self.error(
                        "files",
                        f"holds {other} that is not in the steps of {place}; expected one step and one grid "
                        "in all groups. Put groups of another one into a file and a task of their own.",
                    )

    def _lengths(self) -> list[int]:
        """The frames of the run in each group. Raises ValueError if a group lacks an array, or has another
        grid than the first."""
        lengths: dict[str, list[int]] = {group: [] for group in self.groups}
        for place in self.grouped:
            grid = [axis for axis, word in enumerate(place.axes) if word != "time"]
            first = self.store.array(place.array.replace("*", self.groups[0])).shape
            for group in self.groups:
                name = place.array.replace("*", group)
                shape = getattr(self.store.array(name), "shape", None)
                if shape is None or len(shape) != len(first) or any(shape[i] != first[i] for i in grid):
                    raise self.error(
                        "files",
                        f"holds {'no array' if shape is None else f'{shape} numbers in'} {name}; expected "
                        f"{first} as in {self.groups[0]}. Leave that group out, or put groups of another "
                        "grid into a task of their own.",
                    )
                self.store.require_whole(name)
                lengths[group] += [] if place.is_steady else [shape[place.axes.index("time")]]
        return [min(own, default=self.frames) for own in lengths.values()]


def _common_step(key: str, found: Sequence[DataFile], dt: float) -> float:
    """dt if it is set, else the common step of the files that have times, else 0. Raises ValueError if one
    differs."""
    steps = [(one.path, one.step) for one in found if one.step]
    expected = dt or (steps[0][1] if steps else 0.0)
    for path, step in steps:
        if abs(step - expected) > 0.01 * expected:
            raise ConfigError(
                f"{key}.dt: the frames of {path} are {step:g} apart; expected {expected:g} as of the others. "
                "Put files of another step into a task of their own, or resample them."
            )
    return expected


def _notes(task: Task, found: Sequence[DataFile], num_broken: int) -> tuple[str, ...]:
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
