"""What a configuration may not say: impossible values and combinations, refused at once before anything is
made."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from ups.common.stages import STAGES
from ups.config.bases import BASES, Requirement
from ups.config.schema import Config, TaskConfig
from ups.tasks import TASKS, Task

NAME = re.compile(r"(?=.{1,100}$)\w[\w+-]*(\.[\w+-]+)*")


def check(config: Config) -> None:
    """Refuse impossible values and combinations. Raises one ValueError, a line for each key that is wrong."""
    tasks = {name: config.spec(name) for name in config.data.tasks}
    rows = [*_of_bounds(config, ""), *_of_sections(config)]
    for name, task in tasks.items():  # those that read the same files must want the same files
        other = next(one for one in tasks if (tasks[one].files_of or one) == (task.files_of or name))
        for field in ("num_trajectories", "resolution", "num_frames", "t_end"):
            one, two = getattr(config.task[other], field), getattr(config.task[name], field)
            rows.append(
                (
                    one == two,
                    f"task.{name}.{field} is {two} and task.{other}.{field} is {one}",
                    "the same (both read the same files)",
                    "Make them equal.",
                )
            )
        rows += _of_task(task, config.task[name])
    if problems := [f"{what}; expected {expected}. {do}" for holds, what, expected, do in rows if not holds]:
        raise ValueError("\n".join(problems))


def _of_bounds(section: Any, where: str) -> Iterator[Requirement]:
    """That the values of a section, and of those in it, are within the bounds that its class states beside
    the key."""
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


def _of_sections(config: Config) -> list[Requirement]:
    """What the sections must be together, but for those of tasks."""
    data, evaluate, names = config.data, config.evaluate, config.data.tasks
    sections = {stage: getattr(config, stage) for stage in STAGES}
    held_out = data.val_fraction + data.test_fraction
    strange = [name for name in evaluate.tasks if name not in names]
    needed = {"operator", *(parent for stage in evaluate.stages for parent in STAGES[stage].parents)}
    return [
        (
            NAME.fullmatch(config.run.name) is not None and not config.run_dir.is_file(),
            f"run.name is {config.run.name!r:.200}",
            f"the name of a folder in {config.run.root}: letters, digits and, inside, any of . + -",
            "Choose another (RUN= of make); another place is run.root (RUNS= of make).",
        ),
        (bool(names), "data.tasks is empty", "at least one task", f"Known: {', '.join(TASKS)}."),
        (
            len(set(names)) == len(names),
            f"data.tasks repeats {names[-1]}"
            if len(names) > len(TASKS)
            else f"data.tasks {names} repeats a task",
            "each task once",
            "Remove the repetition.",
        ),
        *[
            (
                section.train.micro_batch <= 0
                or section.train.batch_size % section.train.micro_batch == 0
                or section.train.micro_batch > section.train.batch_size,
                f"{stage}.train.batch_size {section.train.batch_size} is not a multiple of micro_batch "
                f"{section.train.micro_batch}",
                "micro-batches of equal size",
                "Change one of the two.",
            )
            for stage, section in sections.items()
        ],
        *[
            (
                bool(section.init) or section.optim.trunk_factor == 1,
                f"{stage}.optim.trunk_factor is {section.optim.trunk_factor} of a trunk that is not trained "
                f"yet",
                "1 without init",
                f"Name the run to start from with {stage}.init, or change the rates themselves.",
            )
            for stage, section in sections.items()
        ],
        (
            0 < data.val_fraction and 0 < data.test_fraction and held_out < 1,
            f"data.val_fraction + data.test_fraction is {held_out}",
            "both above 0 and their sum below 1",
            "Lower one of them.",
        ),
        (
            needed <= {*evaluate.stages},
            f"evaluate.stages is {evaluate.stages}",
            "operator, and diffusion where consistency or rival is named",
            "Name the stages that these stand on, too.",
        ),
        (
            not strange,
            f"evaluate.tasks names {', '.join(strange)}",
            f"tasks of the run ({', '.join(names)})",
            "Leave it out, or add it to data.tasks and train.",
        ),
        (
            not evaluate.tasks or evaluate.split == "val",
            f"evaluate.tasks is {evaluate.tasks} with evaluate.split test",
            "every task in a report on the test split, which is for judging once",
            "Add evaluate.split=val for a look at some tasks.",
        ),
    ]


def _of_task(task: Task, settings: TaskConfig) -> list[Requirement]:
    """What the settings of one task must be."""
    key = f"task.{task.name}"
    bounds = list(_of_bounds(settings, f"{key}."))
    if not all(holds for holds, *_ in bounds):  # what follows divides by these
        return bounds
    axes, sizes = settings.cells(task.ndim), dataclasses.replace(settings, space_stride=1).cells(task.ndim)
    cells = min(axes)
    width = settings.patch**task.ndim * len(task.fields)
    frames = -(-(settings.num_frames - settings.first_frame) // settings.time_stride) - settings.train_from
    serving = [name for name, row in BASES.items() if task.is_steady in row.serves]
    return [
        (
            bool(settings.parameters) == bool(task.parameters),
            f"{key}.parameters is {settings.parameters}",
            f"a value for {task.parameters[0]}"
            if task.parameters
            else "an empty list (the task has no parameter)",
            "Change it.",
        ),
        (
            all(size % settings.patch == 0 for size in axes),
            f"{key}.patch {settings.patch} does not divide the grid of "
            f"{' x '.join(map(str, sorted({*axes})))} cells (resolution / space_stride)",
            f"one of {[p for p in range(1, 65) if all(size % p == 0 for size in axes)]}",
            f"Change {key}.patch or {key}.space_stride.",
        ),
        (
            all(size % settings.space_stride == 0 for size in sizes),
            f"{key}.space_stride {settings.space_stride} does not divide the grid of "
            f"{' x '.join(map(str, sorted({*sizes})))} cells, so that what is kept would not fill the domain",
            f"one of {[n for n in range(1, 65) if all(size % n == 0 for size in sizes)]}",
            f"Change {key}.space_stride.",
        ),
        (
            0 <= settings.dim <= width,
            f"{key}.dim is {settings.dim}",
            f"0 (choose by energy) to {width} (a patch holds so many numbers)",
            "Lower it.",
        ),
        (
            task.is_steady or frames >= settings.history + settings.bundle,
            f"{key} leaves {frames} frames to train on (num_frames {settings.num_frames}, first_frame "
            f"{settings.first_frame}, time_stride {settings.time_stride}, train_from {settings.train_from})",
            f"at least history + bundle = {settings.history + settings.bundle}",
            "Keep more frames or shorten the history.",
        ),
        (
            task.posterior is None or settings.space_stride == 1,
            f"{key}.space_stride is {settings.space_stride}",
            "1 (the exact posterior is that of the grid the data were generated on)",
            f"Lower {key}.resolution instead.",
        ),
        (
            task.exact_futures is None or settings.space_stride == 1,
            f"{key}.space_stride is {settings.space_stride}",
            "1 (exact draws are of the grid the data were generated on, and start from a whole state)",
            f"Lower {key}.resolution instead.",
        ),
        (bool(settings.base), f"{key}.base is empty", "at least one base predictor", "Use [persistence]."),
        *[
            (
                base in serving,
                f"{key}.base names {base}",
                f"of {', '.join(serving)}: the task is {'' if task.is_steady else 'not '}steady",
                "Change the list.",
            )
            for base in settings.base
        ],
        *[row for base in settings.base for row in BASES[base].requirements(key, settings, cells)],
    ]
