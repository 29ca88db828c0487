"""Files of the user's own (data.source=own): what they must hold, and whether they do. They are never
written."""

from __future__ import annotations

from ups.config import Config, TaskConfig
from ups.data.build_cache import data_files, open_sources
from ups.data.layout import layout_of
from ups.tasks import get_task


def describe_layout(task: str, wanted: TaskConfig) -> str:
    """What a file of `task` must hold, in words: arrays, axes, shapes, coordinates, attributes."""
    spec = get_task(task)
    layout, num = layout_of(spec), wanted.num_trajectories
    sizes = {**dict.fromkeys(spec.axes, wanted.resolution), "trajectory": num, "time": wanted.num_frames}
    parts = []
    for array in spec.arrays:
        axes = layout.axes(array)
        shape = tuple({**sizes, "channel": array.channels}[axis] for axis in axes)
        parts.append(f"{array.key} ({', '.join(axes)}) = {shape} of floats")
    if not spec.is_steady:
        parts.append(f"{layout.coordinate('t')} = ({wanted.num_frames},), the frames' times")
    parts += [f"{layout.coordinate(axis)} = ({wanted.resolution},), optional" for axis in spec.axes]
    parts += [f"attribute {', '.join(spec.parameters)}"] if spec.parameters else []
    return f"{layout.describe(num)} {'; '.join(parts)}"


def look_at_own(config: Config) -> None:
    """Print a line per file of the user's; ValueError or FileNotFoundError for what is missing or not as
    configured."""
    for task in config.data.tasks:
        for path in data_files(config, task):
            if not path.exists():
                there = sorted(other.name for other in path.parent.glob("*")) if path.parent.is_dir() else []
                raise FileNotFoundError(
                    f"no data file {path}; expected yours there, as data.source=own says. Write "
                    f"{describe_layout(task, config.task[task])}; or correct data.root or task.{task} (in "
                    f"that folder: {', '.join(there[:5]) or 'nothing'})."
                )
        for source in open_sources(config, task):
            notes = "".join(f"; {note}" for note in source.notes)
            print(f"{source.path}: yours, {source.num_trajectories} trajectories of {task}{notes}")
