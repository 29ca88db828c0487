"""What a configuration may not say: impossible values and combinations, refused at once before anything is
made."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

from ups.config.schema import Bound, Config, TaskConfig
from ups.tasks import TASKS, Task, get_task

# of a folder beside leaderboard.jsonl and its lock
NAME = re.compile(r"(?=.{1,100}$)(?!leaderboard\.)\w[\w+-]*(\.[\w+-]+)*", re.I)

Requirement = tuple[bool, str, str, str]   # whether it holds, what is wrong, what was expected, what to do


class Rules(NamedTuple):
    """What a configuration may say of a base predictor of ups/models/bases/: whom it serves, with which
    settings. Here because a configuration is checked before torch is there.

    is_steady: it serves steady tasks and no others, or the reverse; check(key, settings, cells along an
    axis)."""

    is_steady: bool = False
    check: Callable[[str, TaskConfig, int], Requirement] | None = None


def _degree(key: str, settings: TaskConfig, cells: int) -> Requirement:
    return (1 <= settings.degree <= 5, f"{key}.degree is {settings.degree}", "1 to 5",
            "Change it or drop propagator from the list.")


def _reach(key: str, settings: TaskConfig, cells: int) -> Requirement:
    return (0 < settings.reach <= cells // 2, f"{key}.reach is {settings.reach}",
            f"1 to {cells // 2} cells (half the grid)",
            f"Set {key}.reach={cells * 3 // 8}, or drop transport from {key}.base.")


BASES = {"persistence": Rules(), "propagator": Rules(check=_degree), "transport": Rules(check=_reach),
         "elliptic": Rules(is_steady=True)}


class _Problems(list[str]):
    def require(self, condition: bool, what: str, expected: str, do: str) -> None:
        if not condition:
            self.append(f"{what}; expected {expected}. {do}")


def _check_bounds(section: Any, where: str, problems: _Problems) -> bool:
    """Whether every value of a section, and of those in it, is within the bounds that its class states beside
    the key."""
    before = len(problems)
    for key, kind in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, key)
        if dataclasses.is_dataclass(value):
            _check_bounds(value, f"{where}{key}.", problems)
        for bound in [bound for bound in getattr(kind, "__metadata__", ()) if isinstance(bound, Bound)]:
            problems.require(bound.holds(value), f"{where}{key} is {value!r}", bound.expected,
                             bound.do.format(key=f"{where}{key}"))
    return len(problems) == before


def check(config: Config) -> None:
    """Refuse impossible values and combinations. Raises one ValueError, a line for each key that is wrong."""
    problems, data = _Problems(), config.data
    _require, tasks = problems.require, {name: get_task(name) for name in data.tasks}
    _check_bounds(config, "", problems)
    _require(NAME.fullmatch(config.run.name) is not None and not config.run_dir.is_file(),
             f"run.name is {config.run.name!r:.200}",
             f"the name of a folder in {config.run.root}: letters, digits and, "
             "inside, any of . + -, and not leaderboard.*",
             "Choose another (RUN= of make); another place is run.root (RUNS= of make).")
    _require(bool(data.tasks), "data.tasks is empty", "at least one task",
             f"Known: {', '.join(TASKS)}.")
    _require(len(set(data.tasks)) == len(data.tasks),
             f"data.tasks repeats {data.tasks[-1]}" if
             len(data.tasks) > len(TASKS) else f"data.tasks {data.tasks} repeats a task",
             "each task once", "Remove the repetition.")
    for stage in ("operator", "diffusion", "consistency", "rival", "steady"):
        train = getattr(config, stage).train
        _require(train.micro_batch <= 0 or train.batch_size % train.micro_batch == 0
                 or train.micro_batch > train.batch_size,
                 f"{stage}.train.batch_size {train.batch_size} is not a multiple of micro_batch "
                 f"{train.micro_batch}",
                 "micro-batches of equal size", "Change one of the two.")
    _require(0 < data.val_fraction and 0 < data.test_fraction and
             data.val_fraction + data.test_fraction < 1,
             "data.val_fraction + data.test_fraction is "
             f"{data.val_fraction + data.test_fraction}",
             "both above 0 and their sum below 1", "Lower one of them.")
    asked = set(config.evaluate.stages)
    _require("operator" in asked and ("diffusion" in asked or not asked & {"consistency", "rival"}),
             f"evaluate.stages is {config.evaluate.stages}",
             "operator, and diffusion where consistency or rival is named",
             "Name the stages that these stand on, too.")
    strange = [name for name in config.evaluate.tasks if name not in data.tasks]
    _require(not strange, f"evaluate.tasks names {', '.join(strange)}",
             f"tasks of the run ({', '.join(data.tasks)})",
             "Leave it out, or add it to data.tasks and train.")
    _require(not config.evaluate.tasks or config.evaluate.split == "val",
             f"evaluate.tasks is {config.evaluate.tasks} with evaluate.split test",
             "every task in a report on the test split, which is for judging once",
             "Add evaluate.split=val for a look at some tasks.")
    for name, task in tasks.items():   # those that read the same files must want the same files
        other = next(one for one in tasks if (tasks[one].of or one) == (task.of or name))
        for field in ("num_trajectories", "resolution", "num_frames", "t_end"):
            one, two = getattr(config.task[other], field), getattr(config.task[name], field)
            _require(one == two, f"task.{name}.{field} is {two} and task.{other}.{field} is {one}",
                     "the same (both read the same files)", "Make them equal.")
        _check_task(task, config.task[name], problems)
    if problems:
        raise ValueError("\n".join(problems))


def _check_task(task: Task, settings: TaskConfig, problems: _Problems) -> None:
    key, _require = f"task.{task.name}", problems.require
    if not _check_bounds(settings, f"{key}.", problems):   # what follows divides by these
        return
    _require(bool(settings.parameters) == bool(task.parameters), f"{key}.parameters is {settings.parameters}",
             f"a value for {task.parameters[0]}" if task.parameters else "an empty list (the task has no "
                                                                         "parameter)",
             "Change it.")
    cells = -(-settings.resolution // settings.space_stride)
    fits = [p for p in range(1, 65) if cells % p == 0]
    _require(cells % settings.patch == 0,
             f"{key}.patch {settings.patch} does not divide the grid of {cells} cells "
             f"(resolution / space_stride)", f"one of {fits}", f"Change {key}.patch or {key}.space_stride.")
    width = settings.patch**task.ndim * len(task.fields)
    _require(0 <= settings.dim <= width, f"{key}.dim is {settings.dim}",
             f"0 (choose by energy) to {width} (a patch holds so many numbers)", "Lower it.")
    frames = (settings.num_frames - settings.first_frame + settings.time_stride - 1) // settings.time_stride
    if not task.is_steady:
        _require(frames - settings.train_from >= settings.history + settings.bundle,
                 f"{key} leaves {frames - settings.train_from} frames to train on (num_frames "
                 f"{settings.num_frames}, first_frame {settings.first_frame}, time_stride "
                 f"{settings.time_stride}, train_from {settings.train_from})",
                 f"at least history + bundle = {settings.history + settings.bundle}",
                 "Keep more frames or shorten the history.")
    _require(task.posterior is None or settings.space_stride == 1,
             f"{key}.space_stride is {settings.space_stride}",
             "1 (the exact posterior is that of the grid the data were generated on)",
             f"Lower {key}.resolution instead.")
    _require(bool(settings.base), f"{key}.base is empty", "at least one base predictor", "Use [persistence].")
    serving = [name for name, rules in BASES.items() if rules.is_steady == task.is_steady]
    for base in settings.base:
        _require(base in serving, f"{key}.base names {base}", f"of {', '.join(serving)}: the task is "
                 f"{'' if task.is_steady else 'not '}steady",
                 "Change the list.")
        if BASES[base].check is not None:
            _require(*BASES[base].check(key, settings, cells))
