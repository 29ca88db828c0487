"""What a configuration may not say: impossible values and combinations, refused at once before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from ups.config.schema import Config, TaskConfig
from ups.tasks import TASKS, get_task
from ups.tasks.published import PUBLISHED

# of a folder beside leaderboard.jsonl and its lock
NAME = re.compile(r"(?=.{1,100}$)(?!leaderboard\.)\w[\w+-]*(\.[\w+-]+)*", re.I)


class _Problems(list[str]):
    def require(self, condition: bool, what: str, expected: str, do: str) -> None:
        if not condition:
            self.append(f"{what}; expected {expected}. {do}")


def section_text(name: str, keys: Iterable[str]) -> str:
    """YAML to paste for `keys` of task.NAME: the published files' numbers, the plainest of what is a choice."""
    task = get_task(name)
    plain: dict[str, Any] = {
        **{key: getattr(task, key) for key in ("num_trajectories", "resolution", "num_frames", "t_end")},
        "parameters": [value for value in map(task.parameter_in, PUBLISHED) if value is not None],
        "space_stride": 1, "time_stride": 1, "first_frame": 0, "train_from": 0, "patch": 4, "dim": 0,
        "energy": 1.0, "history": 1, "bundle": 1, "degree": 3, "reach": 0, "reserve": 0.0,
        "base": ["elliptic"] if task.is_steady else ["persistence", "propagator"],
    }
    text = yaml.safe_dump({key: plain[key] for key in keys}, sort_keys=False, default_flow_style=True,
                          width=100)
    return f"task:\n  {name}: {text.rstrip().replace(chr(10), chr(10) + '   ')}"


def check(config: Config) -> None:
    """Refuse impossible values and combinations. Raises one ValueError, a line for each key that is wrong."""
    problems = _Problems()
    _check_all(config, problems)
    for name in [name for name in config.data.tasks if name in config.task]:
        _check_task(name, config.task[name], problems)
    if problems:
        raise ValueError("\n".join(problems))


def _check_all(config: Config, problems: _Problems) -> None:
    _require = problems.require
    _require(NAME.fullmatch(config.run.name) is not None and not config.run_dir.is_file(),
             f"run.name is {config.run.name!r:.200}", f"the name of a folder in {config.run.root}: letters, digits and, "
             "inside, any of . + -, and not leaderboard.*",
             "Choose another (RUN= of make); another place is run.root (RUNS= of make).")
    for key in ("run", "data", "cache"):
        root = getattr(config, key).root
        _require(bool(root.strip()), f"{key}.root is {root!r}", "a folder", f"Name one, such as {key}.root=my_{key}.")
    for name in config.task:
        get_task(name)
    _require(bool(config.data.tasks), "data.tasks is empty", "at least one task", f"Known: {', '.join(TASKS)}.")
    _require(len(set(config.data.tasks)) == len(config.data.tasks), f"data.tasks repeats {config.data.tasks[-1]}" if
             len(config.data.tasks) > len(TASKS) else f"data.tasks {config.data.tasks} repeats a task",
             "each task once", "Remove the repetition.")
    for name in config.data.tasks:
        get_task(name)
        if name not in config.task:
            problems.append(f"data.tasks names {name}, but section task.{name} is missing; expected settings for each "
                            "task. Add it to your overlay, such as:\n"
                            f"{section_text(name, TaskConfig.__dataclass_fields__)}")
    stages = {name: getattr(config, name) for name in ("operator", "diffusion", "consistency", "rival", "steady")}
    positive = {
        "data.chunk": config.data.chunk, "cache.chunk": config.cache.chunk,
        "evaluate.batch_size": config.evaluate.batch_size, "evaluate.num_bootstrap": config.evaluate.num_bootstrap,
        "operator.unroll_steps": config.operator.unroll_steps,
        **{f"evaluate.{k}": getattr(config.evaluate, k)
           for k in ("ensemble_trajectories", "ensemble_frames", "truth_members", "truth_fields")},
        **{f"diffusion.{k}": getattr(config.diffusion, k) for k in ("noises", "scale_steps", "sampler_steps",
                                                                          "min_residual_ratio")},
        "consistency.pool_batches": config.consistency.pool_batches,
        **{f"steady.{k}": getattr(config.steady, k) for k in ("noises", "scale_steps", "sampler_steps")},
        **{f"{stage}.train.{k}": getattr(section.train, k) for stage, section in stages.items()
           for k in ("steps", "batch_size", "micro_batch", "validate_trajectories", "hang_s", "timeout_s", "max_skips")},
        **{f"{stage}.model.{k}": getattr(section.model, k) for stage, section in stages.items() if hasattr(section, "model")
           for k in ("width", "depth", "modes", "kernel_size", "mlp_ratio")},
        **{f"{stage}.optim.{k}": getattr(section.optim, k) for stage, section in stages.items()
           for k in ("muon_lr", "adamw_lr", "clip_norm")},
    }
    for key, value in positive.items():
        _require(value > 0, f"{key} is {value}", "a positive number", f"Set {key} above zero.")
    for stage, section in stages.items():
        train = section.train
        _require(train.keep >= 2, f"{stage}.train.keep is {train.keep}", "at least 2 (the newest may be damaged)", "Raise it.")
        _require(train.micro_batch <= 0 or train.batch_size % train.micro_batch == 0 or train.micro_batch > train.batch_size,
                 f"{stage}.train.batch_size {train.batch_size} is not a multiple of micro_batch {train.micro_batch}",
                 "micro-batches of equal size", "Change one of the two.")
    fractions = {"data.val_fraction": config.data.val_fraction, "data.test_fraction": config.data.test_fraction,
                 "cache.device_fraction": config.cache.device_fraction,
                 "operator.unroll_fraction": config.operator.unroll_fraction,
                 "consistency.tune_fraction": config.consistency.tune_fraction,
                 **{f"{stage}.optim.{k}": getattr(section.optim, k) for stage, section in stages.items()
                    for k in ("decay_fraction", "ema_decay")}}
    for key, value in fractions.items():
        _require(0.0 <= value < 1.0 or (value == 1.0 and key.endswith("decay_fraction")), f"{key} is {value}",
                 "a number in [0, 1)", "Change it.")
    _require(0 < config.data.val_fraction and 0 < config.data.test_fraction and
             config.data.val_fraction + config.data.test_fraction < 1,
             f"data.val_fraction + data.test_fraction is {config.data.val_fraction + config.data.test_fraction}",
             "both above 0 and their sum below 1", "Lower one of them.")
    for stage in ("operator", "diffusion", "steady"):
        size = stages[stage].model.kernel_size
        _require(size % 2 == 1, f"{stage}.model.kernel_size is {size}", "an odd number", "Use 5 or 7.")
    for name in ("evaluate", "consistency", "rival"):
        _require((value := getattr(config, name).members) >= 2, f"{name}.members is {value}", "at least 2: one member has no spread",
                 "Raise it.")
    _require(0.0 < config.consistency.mid_angle < 1.57, f"consistency.mid_angle is {config.consistency.mid_angle}",
             "an angle in (0, 1.57)", "Use 1.1.")
    _require(config.consistency.pool_batches % 4 == 0, f"consistency.pool_batches is {config.consistency.pool_batches}",
             "a multiple of 4: a quarter is replaced at a time", "Change it.")
    _require(config.diffusion.max_whitened_std > 1.0, f"diffusion.max_whitened_std is {config.diffusion.max_whitened_std}",
             "a number above 1", "Use 1.15.")
    _require(len(config.evaluate.spread_skill) == 2 and 0 < config.evaluate.spread_skill[0] < config.evaluate.spread_skill[1],
             f"evaluate.spread_skill is {config.evaluate.spread_skill}", "a lower and an upper bound", "Use [0.5, 2.0].")
    asked = set(config.evaluate.stages)
    _require("operator" in asked and ("diffusion" in asked or not asked & {"consistency", "rival"}),
             f"evaluate.stages is {config.evaluate.stages}", "operator, and diffusion where consistency or rival is named",
             "Name the stages that these stand on, too.")
    strange = [name for name in config.evaluate.tasks if name not in config.data.tasks]
    _require(not strange, f"evaluate.tasks names {', '.join(strange)}", f"tasks of the run ({', '.join(config.data.tasks)})",
             "Leave it out, or add it to data.tasks and train.")
    _require(not config.evaluate.tasks or config.evaluate.split == "val",
             f"evaluate.tasks is {config.evaluate.tasks} with evaluate.split test",
             "every task in a report on the test split, which is for judging once",
             "Add evaluate.split=val for a look at some tasks.")
    _check_shared_files(config, _require)


def _check_shared_files(config: Config, _require: Callable[..., None]) -> None:
    """Tasks that read the same files must want the same files."""
    first: dict[str, str] = {}
    for name in [name for name in config.data.tasks if name in config.task]:
        other = first.setdefault(get_task(name).of or name, name)
        for field in ("num_trajectories", "resolution", "num_frames", "t_end"):
            one, two = getattr(config.task[other], field), getattr(config.task[name], field)
            _require(one == two, f"task.{name}.{field} is {two} and task.{other}.{field} is {one}",
                     "the same (both read the same files)", "Make them equal.")


def _check_task(name: str, settings: TaskConfig, problems: _Problems) -> None:
    task, key, _require, before = get_task(name), f"task.{name}", problems.require, len(problems)
    for field in ("num_trajectories", "resolution", "num_frames", "space_stride", "time_stride", "patch", "history", "bundle"):
        value = getattr(settings, field)
        _require(value > 0, f"{key}.{field} is {value}", "a positive whole number", f"Set {key}.{field} above zero.")
    if len(problems) > before:   # what follows divides by these
        return
    _require(settings.num_trajectories >= 3, f"{key}.num_trajectories is {settings.num_trajectories}",
             "at least 3 (training, validation, test)", "Raise it.")
    _require(bool(settings.parameters) == bool(task.parameters), f"{key}.parameters is {settings.parameters}",
             f"a value for {task.parameters[0]}" if task.parameters else "an empty list (the task has no parameter)",
             "Change it.")
    cells = -(-settings.resolution // settings.space_stride)
    fits = [p for p in range(1, 65) if cells % p == 0]
    _require(cells % settings.patch == 0, f"{key}.patch {settings.patch} does not divide the grid of {cells} cells "
             f"(resolution / space_stride)", f"one of {fits}", f"Change {key}.patch or {key}.space_stride.")
    _require(0.0 < settings.energy <= 1.0, f"{key}.energy is {settings.energy}", "a share in (0, 1]", "Use 1.0 to keep all.")
    width = settings.patch**task.ndim * len(task.fields)
    _require(0 <= settings.dim <= width, f"{key}.dim is {settings.dim}",
             f"0 (choose by energy) to {width} (a patch holds so many numbers)", "Lower it.")
    frames = (settings.num_frames - settings.first_frame + settings.time_stride - 1) // settings.time_stride
    if not task.is_steady:
        _require(frames - settings.train_from >= settings.history + settings.bundle,
                 f"{key} leaves {frames - settings.train_from} frames to train on (num_frames {settings.num_frames}, first_frame "
                 f"{settings.first_frame}, time_stride {settings.time_stride}, train_from {settings.train_from})",
                 f"at least history + bundle = {settings.history + settings.bundle}", "Keep more frames or shorten the history.")
    _require(name != "darcy2d_grf" or settings.space_stride == 1, f"{key}.space_stride is {settings.space_stride}",
             "1 (the exact posterior is that of the grid the data were generated on)", f"Lower {key}.resolution instead.")
    _require(0.0 <= settings.reserve < 1.0, f"{key}.reserve is {settings.reserve}", "a share in [0, 1)",
             "Use 0.5, or 0 for a task that is not corrected.")
    _require(bool(settings.base), f"{key}.base is empty", "at least one base predictor", "Use [persistence].")
    for base in settings.base:
        _require((base == "elliptic") == task.is_steady, f"{key}.base names {base}",
                 "[elliptic] for a steady task" if task.is_steady else "persistence, propagator or transport", "Change the list.")
    _require("transport" not in settings.base or 0 < settings.reach <= cells // 2, f"{key}.reach is {settings.reach}",
             f"1 to {cells // 2} cells (half the grid)",
             f"Set {key}.reach={cells * 3 // 8}, or drop transport from {key}.base.")
    _require("propagator" not in settings.base or 1 <= settings.degree <= 5, f"{key}.degree is {settings.degree}",
             "1 to 5", "Change it or drop propagator from the list.")
