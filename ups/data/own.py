"""Files of the user's own (data.source=own): what they must hold, and whether they do. They are never written."""

from __future__ import annotations

from ups.data.build_cache import data_files, open_sources
from ups.config import Config, TaskConfig
from ups.data.pdebench import coordinate_key
from ups.tasks import get_task


def describe_layout(task: str, wanted: TaskConfig) -> str:
    """What a file of `task` must hold, in words: arrays, axes, shapes, coordinates, attributes."""
    spec, is_grouped = get_task(task), get_task(task).layout == "groups"
    num, sizes = wanted.num_trajectories, dict.fromkeys(spec.axes, wanted.resolution)
    sizes |= {"trajectory": num, "time": wanted.num_frames}
    parts = []
    for array in spec.arrays:
        axes = (() if is_grouped else ("trajectory",)) + array.axes(spec.axes)
        shape = tuple({**sizes, "channel": array.channels}[axis] for axis in axes)
        parts.append(f"{array.key} ({', '.join(axes)}) = {shape} of floats")
    parts += (
        [] if spec.is_steady else [f"{coordinate_key(spec, 't')} = ({wanted.num_frames},), the frames' times"]
    )
    parts += [f"{coordinate_key(spec, axis)} = ({wanted.resolution},), optional" for axis in spec.axes]
    parts += [f"attribute {', '.join(spec.parameters)}"] if spec.parameters else []
    where = (
        f"{num} HDF5 groups 0000, 0001, .., one per trajectory, each with" if is_grouped else "HDF5 arrays"
    )
    return f"{where} {'; '.join(parts)}"


def look_at_own(config: Config) -> None:
    """Print a line per file of the user's; ValueError or FileNotFoundError for what is missing or not as configured."""
    for task in config.data.tasks:
        for path in data_files(config, task):
            if not path.exists():
                there = sorted(other.name for other in path.parent.glob("*")) if path.parent.is_dir() else []
                raise FileNotFoundError(
                    f"no data file {path}; expected yours there, as data.source=own says. Write "
                    f"{describe_layout(task, config.task[task])}; or correct data.root or task.{task} (in that folder: "
                    f"{', '.join(there[:5]) or 'nothing'})."
                )
        for source in open_sources(config, task, data_files(config, task)):
            notes = "".join(f"; {note}" for note in source.notes)
            print(f"{source.path}: yours, {source.num_trajectories} trajectories of {task}{notes}")
