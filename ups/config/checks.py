"""Checks of a configuration: impossible values and combinations are refused before anything is made.

Every check is a row: whether it holds, what is wrong, what was expected, what to do."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from ups.common.place import STAGES
from ups.config.model import BASES, Requirement
from ups.config.schema import Config, TaskConfig
from ups.tasks import TASKS, Task

NAME = re.compile(r"(?=.{1,100}$)\w[\w+-]*(\.[\w+-]+)*")


def check(config: Config) -> None:
    """Refuse impossible values and combinations. Raises one ValueError, a line for each key that is wrong."""
    rows = [*_of_bounds(config, ""), *_of_data(config), *_of_stages(config), *_of_report(config)]
    tasks = {name: config.spec(name) for name in config.data.tasks}
    for name, task in tasks.items():
        first = next(one for one in tasks if (tasks[one].files_of or one) == (task.files_of or name))
        rows += [*_of_shared_files(config, first, name), *_of_task(task, config.task[name])]
    if problems := [f"{what}; expected {expected}. {do}" for holds, what, expected, do in rows if not holds]:
        raise ValueError("\n".join(problems))


def _of_bounds(section: Any, where: str) -> Iterator[Requirement]:
    """The bounds that the class of a section states beside its keys, for it and the sections in it."""
    for key, kind in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, key)
        if dataclasses.is_dataclass(value):
            yield from _of_bounds(value, f"{where}{key}.")
        for bound in getattr(kind, "__metadata__", ()):
            yield (
                bound.holds(value),
                f"{where}{key} is {value!r}",
                bound.expected,
                bound.do.format(key=f"{where}{key}"),
            )


def _of_data(config: Config) -> Iterator[Requirement]:
    data, names = config.data, config.data.tasks
    held_out = data.val_fraction + data.test_fraction
    yield (
        NAME.fullmatch(config.run.name) is not None and not config.run_dir.is_file(),
        f"run.name is {config.run.name!r:.200}",
        f"the name of a folder in {config.run.root}: letters, digits and, inside, any of . + -",
        "Choose another (RUN= of make); another place is run.root (RUNS= of make).",
    )
    yield bool(names), "data.tasks is empty", "at least one task", f"Known: {', '.join(TASKS)}."
    shown = f" {names} repeats a task" if len(names) <= len(TASKS) else f" repeats {names[-1]}"
    yield len({*names}) == len(names), f"data.tasks{shown}", "each task once", "Remove the repetition."
    yield (
        0 < data.val_fraction and 0 < data.test_fraction and held_out < 1,
        f"data.val_fraction + data.test_fraction is {held_out}",
        "both above 0 and their sum below 1",
        "Lower one of them.",
    )


def _of_stages(config: Config) -> Iterator[Requirement]:
    for stage in STAGES:
        section = getattr(config, stage)
        size, part, factor = section.train.batch_size, section.train.micro_batch, section.optim.trunk_factor
        yield (
            part <= 0 or size % part == 0 or part > size,
            f"{stage}.train.batch_size {size} is not a multiple of micro_batch {part}",
            "micro-batches of equal size",
            "Change one of the two.",
        )
        yield (
            bool(section.init) or factor == 1,
            f"{stage}.optim.trunk_factor is {factor} of a trunk that is not trained yet",
            "1 without init",
            f"Name the run to start from with {stage}.init, or change the rates themselves.",
        )


def _of_report(config: Config) -> Iterator[Requirement]:
    evaluate, names = config.evaluate, config.data.tasks
    needed = {"operator", *(parent for stage in evaluate.stages for parent in STAGES[stage].parents)}
    unknown = [name for name in evaluate.tasks if name not in names]
    yield (
        needed <= {*evaluate.stages},
        f"evaluate.stages is {evaluate.stages}",
        "operator, and diffusion where consistency or scoring is named",
        "Name the stages that these stand on, too.",
    )
    yield (
        not unknown,
        f"evaluate.tasks names {', '.join(unknown)}",
        f"tasks of the run ({', '.join(names)})",
        "Leave it out, or add it to data.tasks and train.",
    )
    yield (
        not evaluate.tasks or evaluate.split == "val",
        f"evaluate.tasks is {evaluate.tasks} with evaluate.split test",
        "every task in a report on the test split, which is for judging once",
        "Add evaluate.split=val for a look at some tasks.",
    )


def _of_shared_files(config: Config, first: str, name: str) -> Iterator[Requirement]:
    """Tasks that read the same files must expect the same of them."""
    for key in ("num_trajectories", "resolution", "num_frames", "t_end"):
        one, two = getattr(config.task[first], key), getattr(config.task[name], key)
        yield (
            one == two,
            f"task.{name}.{key} is {two} and task.{first}.{key} is {one}",
            "the same (both read the same files)",
            "Make them equal.",
        )


def _of_task(task: Task, settings: TaskConfig) -> Iterator[Requirement]:
    key = f"task.{task.name}"
    bounds = [*_of_bounds(settings, f"{key}.")]
    yield from bounds
    if all(holds for holds, *_ in bounds):  # else the following divides by zero
        yield from _of_grid(key, task, settings)
        yield from _of_frames(key, task, settings)
        yield from _of_bases(key, task, settings)


def _of_grid(key: str, task: Task, settings: TaskConfig) -> Iterator[Requirement]:
    axes, sizes = settings.cells(task.ndim), dataclasses.replace(settings, space_stride=1).cells(task.ndim)
    width = settings.patch**task.ndim * len(task.fields)
    shown = [" x ".join(map(str, sorted({*cells}))) for cells in (axes, sizes)]
    yield (
        all(size % settings.patch == 0 for size in axes),
        f"{key}.patch {settings.patch} does not divide the grid of {shown[0]} cells (resolution / "
        "space_stride)",
        f"one of {[p for p in range(1, 65) if all(size % p == 0 for size in axes)]}",
        f"Change {key}.patch or {key}.space_stride.",
    )
    yield (
        all(size % settings.space_stride == 0 for size in sizes),
        f"{key}.space_stride {settings.space_stride} does not divide the grid of {shown[1]} cells, so that "
        "what is kept would not fill the domain",
        f"one of {[n for n in range(1, 65) if all(size % n == 0 for size in sizes)]}",
        f"Change {key}.space_stride.",
    )
    yield (
        0 <= settings.dim <= width,
        f"{key}.dim is {settings.dim}",
        f"0 (choose by energy) to {width} (a patch holds so many numbers)",
        "Lower it.",
    )
    drawn = "the exact posterior is that of" if task.is_steady else "exact draws are of"
    whole = "" if task.is_steady else ", and start from a whole state"
    yield (
        not task.has_known_law or settings.space_stride == 1,
        f"{key}.space_stride is {settings.space_stride}",
        f"1 ({drawn} the grid the data were generated on{whole})",
        f"Lower {key}.resolution instead.",
    )


def _of_frames(key: str, task: Task, settings: TaskConfig) -> Iterator[Requirement]:
    frames = -(-(settings.num_frames - settings.first_frame) // settings.time_stride) - settings.train_from
    yield (
        bool(settings.parameters) == bool(task.parameters),
        f"{key}.parameters is {settings.parameters}",
        f"a value for {task.parameters[0]}"
        if task.parameters
        else "an empty list (the task has no parameter)",
        "Change it.",
    )
    yield (
        task.is_steady or frames > settings.history,
        f"{key} leaves {frames} frames to train on (num_frames {settings.num_frames}, first_frame "
        f"{settings.first_frame}, time_stride {settings.time_stride}, train_from {settings.train_from})",
        f"at least history + 1 = {settings.history + 1}",
        "Keep more frames or shorten the history.",
    )


def _of_bases(key: str, task: Task, settings: TaskConfig) -> Iterator[Requirement]:
    serving = [name for name, row in BASES.items() if task.is_steady in row.serves]
    kind = "steady" if task.is_steady else "not steady"
    yield bool(settings.base), f"{key}.base is empty", "at least one base predictor", "Use [persistence]."
    for base in settings.base:
        yield (
            base in serving,
            f"{key}.base names {base}",
            f"of {', '.join(serving)}: the task is {kind}",
            "Change the list.",
        )
        yield from BASES[base].requirements(key, settings, min(settings.cells(task.ndim)))
