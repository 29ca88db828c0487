"""Numbers of trajectories, initial conditions and frames in each split of a task, and the errors that too few
of them will cause.

The split, the training windows, the doctor and the dry runs all count here, so that training never fails
after hours for a reason that the doctor could have found.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ups.config.schema import Config, TaskConfig
from ups.data.sources import needs_files, open_source, split_of, table_of
from ups.tasks import Finding
from ups.userdata.trajectories import Trajectories

MIN_RESERVED = 2  # initial conditions; errors of one have no variance
PRIOR_BLOCK = 4  # cells per axis in `CASES` of ups/generative/observation.py
NOISY_CONTEXT, NOISY_PART = 10, 3  # input frames of noisy user data: as of PDEBench, at most a third of all


def context_frames(config: Config, task_name: str, is_noisy: bool, num_frames: int) -> int:
    """The input frames of validated and scored forecasts: those of the configuration, and of noisy user data
    more, from which the start is estimated. num_frames: of a trajectory."""
    configured, task = config.context(task_name), config.spec(task_name)
    if task.user_facts is None or task.is_steady or not is_noisy:
        return configured
    return max(configured, min(NOISY_CONTEXT, num_frames // NOISY_PART))


def num_kept(num: int, reserve: float) -> int:
    """Number of the `num` training initial conditions that train the operator, if the fraction `reserve` is
    kept for the stages after it."""
    return num - round(reserve * num)


def most_calls(settings: TaskConfig, num_frames: int) -> int:
    """The most consecutive calls of the operator that a trajectory of `num_frames` frames can train; 0 or
    less for none. Two frames train one call."""
    return num_frames - settings.train_from - settings.history


@dataclass(frozen=True)
class Counts:
    """Counts of one task."""

    initial: dict[str, int]  # initial conditions of train, reserved, val and test
    num_frames: int  # of a trajectory, after striding
    gated: dict[str, int]  # initial conditions behind the report's gates, for the operator and for ensembles
    untrained: list[int]  # numbers of the parameter values without a trajectory in training


def count_data(config: Config, task_name: str, opened: Trajectories | None = None) -> Counts:
    """The counts of a task, from its configuration, or from the user's files if it leaves them open. opened:
    these files without strides. Raises ValueError for trajectories that cannot be split."""
    settings = config.task[task_name]
    is_strided = (settings.space_stride, settings.time_stride, settings.first_frame) != (1, 1, 0)
    if not needs_files(settings):
        num, files = settings.num_trajectories, settings.num_files
        trajectory, index = np.tile(np.arange(num), files), np.arange(files).repeat(num)
        frames = -(-(settings.num_frames - settings.first_frame) // settings.time_stride)
        rows, num_values = split_of(config, task_name), len(settings.parameters)
    else:
        source = open_source(config, task_name) if opened is None or is_strided else opened
        table, rows = table_of(config, task_name, source), split_of(config, task_name, source)
        trajectory, index, frames = table.trajectory, table.index, source.num_frames
        num_values = len(table.values)
    return count_rows(config, task_name, rows, trajectory, index, num_values, frames)


def count_rows(
    config: Config,
    task_name: str,
    rows: Mapping[str, np.ndarray],
    trajectory: np.ndarray,
    parameter_index: np.ndarray,
    num_values: int,
    num_frames: int,
) -> Counts:
    """The counts of a cache. rows: row numbers of "train" (with the reserved ones), "val" and "test";
    trajectory, parameter_index: number of the initial condition and of the parameter value of every row."""
    settings, evaluate = config.task[task_name], config.evaluate
    starts = {split: np.unique(trajectory[index]) for split, index in rows.items()}
    kept = num_kept(len(starts["train"]), settings.reserve)
    trained = rows["train"][np.isin(trajectory[rows["train"]], starts["train"][:kept])]
    evaluated = np.sort(trajectory[rows[evaluate.split]])[: evaluate.max_trajectories or None]
    gated = {"the operator": len(np.unique(evaluated))} | (
        {"ensembles": min(len(starts[evaluate.split]), evaluate.ensemble_trajectories)}
        if any(task_name in names for stage, names in config.reported_stages.items() if stage != "operator")
        else {}
    )
    if config.spec(task_name).hides:
        num_values = 0
    return Counts(
        {
            "train": kept,
            "reserved": len(starts["train"]) - kept,
            "val": len(starts["val"]),
            "test": len(starts["test"]),
        },
        num_frames,
        gated,
        sorted({*range(num_values)} - {*parameter_index[trained].tolist()}),
    )


def check_counts(config: Config, task_name: str, counts: Counts) -> Iterator[Finding]:
    """Findings for too few trajectories or frames: errors if training will refuse them, warnings if the gates
    of the report will."""
    settings, key, task = config.task[task_name], f"task.{task_name}", config.spec(task_name)
    initial, history, context = counts.initial, settings.history, config.context(task_name)
    num_train, least = initial["train"] + initial["reserved"], config.evaluate.min_initial_conditions
    if not initial["train"]:
        yield Finding(
            "error",
            f"{key}.reserve {settings.reserve:g} leaves the operator none of "
            f"{num_train} training initial conditions; expected at least 1",
            f"lower {key}.reserve or add trajectories",
            where=key,
        )
    if settings.reserve and initial["reserved"] < MIN_RESERVED:
        yield Finding(
            "error",
            f"{key}.reserve {settings.reserve:g} keeps {initial['reserved']} of {num_train} training "
            f"initial conditions for the stages after the operator; expected at least {MIN_RESERVED}",
            f"raise {key}.reserve, set it to 0, or add trajectories",
            where=key,
        )
    space = tuple(settings.cells(task.ndim))
    if task.is_steady and settings.reserve and any(size % PRIOR_BLOCK for size in space):
        yield Finding(
            "error",
            f"{key}.reserve asks for the prior of steady solutions, validated by means over blocks, "
            f"on a grid {space}; expected multiples of {PRIOR_BLOCK} cells per axis",
            f"set {key}.reserve to 0, change {key}.space_stride, or interpolate the fields",
            where=key,
        )
    if not task.is_steady and most_calls(settings, counts.num_frames) < 1:
        yield Finding(
            "error",
            f"{counts.num_frames} frames hold no training window; expected at least "
            f"{settings.train_from + history + 1}: {key}.train_from {settings.train_from} + history "
            f"{history} + 1",
            "keep more frames or lower one of these",
            where=key,
        )
    if not task.is_steady and not history <= context < counts.num_frames:
        yield Finding(
            "error",
            f"evaluate.context_frames is {context}; expected at least {key}.history "
            f"{history} and fewer than the {counts.num_frames} frames of {task_name}",
            f"change it, {key}.history or {key}.num_frames",
            where=key,
        )
    if counts.untrained:
        yield Finding(
            "error",
            f"{len(counts.untrained)} parameter value(s) of {task_name} have no trajectory in training "
            f"(first: number {counts.untrained[0]}); expected at least 1 of each",
            f"add trajectories, lower {key}.reserve, data.val_fraction or data.test_fraction, or "
            f"leave that value out",
            where=key,
        )
    for what, num in counts.gated.items():
        if num < least:
            yield Finding(
                "warning",
                f"the report evaluates {what} on {num} {config.evaluate.split} initial conditions and its "
                f"gates refuse fewer than {least} (evaluate.min_initial_conditions)",
                advice_for_gates(config, task_name, counts, what),
                where=key,
            )


def advice_for_gates(config: Config, task_name: str, counts: Counts, what: str) -> str:
    """The setting that gives the gates enough initial conditions."""
    settings, evaluate, split = config.task[task_name], config.evaluate, config.evaluate.split
    least, there = evaluate.min_initial_conditions, counts.initial[evaluate.split]
    if there >= least:
        return (
            f"set evaluate.ensemble_trajectories to {least} or more"
            if what == "ensembles"
            else "set evaluate.max_trajectories to 0"
        )
    if getattr(settings, "split", "") == "folder":
        return f"move files of {least - there} more into the folder {split}"
    total, fraction = sum(counts.initial.values()), getattr(config.data, f"{split}_fraction")
    wanted = -(-100 * least // total) / 100  # the smallest sufficient fraction, in hundredths
    rest = config.data.val_fraction if split == "test" else config.data.test_fraction
    raise_it = f"set data.{split}_fraction={wanted:g}, or " if wanted + rest < 1 and total > least + 1 else ""
    return f"{raise_it}add trajectories: {-(-least // fraction):g} at data.{split}_fraction {fraction:g}"


def count_findings(config: Config, tasks: Sequence[str], opened: Trajectories | None = None) -> list[Finding]:
    """`check_counts` of all tasks, for the doctor and the dry runs. opened: the files of the first task,
    without strides."""
    found = []
    for name in tasks:
        try:
            found += check_counts(
                config, name, count_data(config, name, opened if name == tasks[0] else None)
            )
        except ValueError as error:
            found.append(Finding("error", str(error).rstrip("."), where=f"task.{name}"))
    return found


def print_refusals(config: Config, tasks: Sequence[str]) -> int:
    """Print `count_findings`. Returns the exit status of a dry run: 1 if training will refuse the data, 0 if
    only the gates of the report will fail."""
    found = count_findings(config, tasks)
    for finding in found:
        print(f"  {finding.severity}: {finding}")
    return int(any(finding.severity == "error" for finding in found))
