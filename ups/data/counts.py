"""How many trajectories, initial conditions and frames the parts of a task's data have, and what the split,
training or the report will refuse for want of them.

The split, the training windows, the doctor and the dry runs all count here, so that what the doctor accepts
is not refused after hours of training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ups.config import Config, TaskConfig
from ups.data.sources import (
    Source,
    needs_files,
    open_sources,
    split_of,
    split_rows,
    table_of,
    trajectories_of,
)
from ups.tasks import Finding

MIN_RESERVED = 2  # initial conditions whose errors have a spread


def num_kept(num: int, reserve: float) -> int:
    """How many of `num` training initial conditions the operator is trained on, where the share `reserve` of
    them is kept for the stages after it."""
    return num - round(reserve * num)


def most_calls(settings: TaskConfig, num_frames: int) -> int:
    """How many calls of the operator in a row a trajectory of `num_frames` frames can train: 2 frames train
    one. 0 or less: none."""
    return (num_frames - settings.train_from - settings.history) // settings.bundle


@dataclass(frozen=True)
class Counts:
    """Of one task: initial conditions of the parts train, reserved, val and test; frames of a trajectory
    (after striding); initial conditions of each part of the report that gates judge; and the numbers of the
    parameter values of which the operator sees no trajectory."""

    initial: dict[str, int]
    num_frames: int
    judged: dict[str, int]
    untrained: list[int]


def count_data(config: Config, task_name: str, sources: Sequence[Source] | None = None) -> Counts:
    """The counts of a task by its configuration, or, where that leaves them to the user's files, by these.
    Raises ValueError where the trajectories cannot be split."""
    settings = config.task[task_name]
    if sources is None:
        sources = open_sources(config, task_name) if needs_files(settings) else [None] * settings.num_files
    num = trajectories_of(config, task_name, sources)
    table = table_of(config, task_name, sources)
    rows = {
        part: split_rows(index, len(sources), num)
        for part, index in split_of(config, task_name, sources).items()
    }
    frames = (
        sources[0].num_frames
        if needs_files(settings)
        else -(-(settings.num_frames - settings.first_frame) // settings.time_stride)
    )
    num_values = len(table.values) if table.values is not None else len(settings.parameters)
    return count_rows(config, task_name, rows, table.trajectory, table.index, num_values, frames)


def count_rows(
    config: Config,
    task_name: str,
    rows: Mapping[str, np.ndarray],
    trajectory: np.ndarray,
    parameter_index: np.ndarray,
    num_values: int,
    num_frames: int,
) -> Counts:
    """The counts of rows of a cache. rows: of "train" (what is reserved among it), "val" and "test";
    trajectory, parameter_index: the initial condition and the parameter value of every row."""
    settings, evaluate = config.task[task_name], config.evaluate
    starts = {part: np.unique(trajectory[index]) for part, index in rows.items()}
    kept = num_kept(len(starts["train"]), settings.reserve)
    seen = rows["train"][np.isin(trajectory[rows["train"]], starts["train"][:kept])]
    judged = np.sort(trajectory[rows[evaluate.split]])[: evaluate.max_trajectories or None]
    num_judged = len(np.unique(judged))
    parts = {"the operator": num_judged} | (
        {"ensembles": min(len(starts[evaluate.split]), evaluate.ensemble_trajectories)}
        if any(task_name in names for stage, names in config.asked.items() if stage != "operator")
        else {}
    )
    hidden = config.spec(task_name).hides
    return Counts(
        {
            "train": kept,
            "reserved": len(starts["train"]) - kept,
            "val": len(starts["val"]),
            "test": len(starts["test"]),
        },
        num_frames,
        parts,
        sorted({*range(0 if hidden else num_values)} - {*parameter_index[seen].tolist()}),
    )


def check_counts(config: Config, task_name: str, counts: Counts) -> Iterator[Finding]:
    """What will be refused for want of trajectories or frames: by training (errors) and by the gates of the
    report (warnings)."""
    settings, key, task = config.task[task_name], f"task.{task_name}", config.spec(task_name)
    initial, history, context = counts.initial, settings.history, config.context(task_name)
    num_train, least = initial["train"] + initial["reserved"], config.evaluate.min_initial_conditions
    if not initial["train"]:
        yield Finding(
            "error",
            f"{key}.reserve {settings.reserve:g} leaves the operator none of "
            f"{num_train} training initial conditions; expected at least 1",
            key,
            f"lower {key}.reserve or add trajectories",
        )
    if settings.reserve and initial["reserved"] < MIN_RESERVED:
        yield Finding(
            "error",
            f"{key}.reserve {settings.reserve:g} keeps {initial['reserved']} of "
            f"{num_train} training initial conditions for the stages after the operator; expected "
            f"at least {MIN_RESERVED}",
            key,
            f"raise {key}.reserve, set it to 0, or add trajectories",
        )
    if not task.is_steady and most_calls(settings, counts.num_frames) < 1:
        yield Finding(
            "error",
            f"{counts.num_frames} frames hold no training window; expected at least "
            f"{settings.train_from + history + settings.bundle}: {key}.train_from "
            f"{settings.train_from} + history {history} + bundle {settings.bundle}",
            key,
            "keep more frames or lower one of these",
        )
    if not task.is_steady and not history <= context < counts.num_frames:
        yield Finding(
            "error",
            f"evaluate.context_frames is {context}; expected at least {key}.history "
            f"{history} and fewer than the {counts.num_frames} frames of {task_name}",
            key,
            f"change it, {key}.history or {key}.num_frames",
        )
    if counts.untrained:
        yield Finding(
            "error",
            f"{len(counts.untrained)} parameter value(s) of {task_name} have no "
            f"trajectory in training (first: number {counts.untrained[0]}); expected at least 1 of "
            f"each",
            key,
            f"add trajectories, lower {key}.reserve, data.val_fraction or data.test_fraction, or "
            f"leave that value out",
        )
    for part, num in counts.judged.items():
        if num < least:
            yield Finding(
                "warning",
                few_judged(part, num, least, config.evaluate.split),
                key,
                more_judged(config, task_name, counts, part),
            )


def few_judged(part: str, num: int, least: int, split: str) -> str:
    """That the gates will fail, in words."""
    return (
        f"the report judges {part} on {num} {split} initial conditions and its gates refuse fewer than "
        f"{least} (evaluate.min_initial_conditions)"
    )


def more_judged(config: Config, task_name: str, counts: Counts, part: str) -> str:
    """Which key gives the gates enough initial conditions."""
    settings, evaluate, split = config.task[task_name], config.evaluate, config.evaluate.split
    least, there = evaluate.min_initial_conditions, counts.initial[evaluate.split]
    if there >= least:
        return (
            f"set evaluate.ensemble_trajectories to {least} or more"
            if part == "ensembles"
            else "set evaluate.max_trajectories to 0"
        )
    total, share = sum(counts.initial.values()), getattr(config.data, f"{split}_fraction")
    if getattr(settings, "split", "") == "folder":
        return f"move files of {least - there} more into the folder {split}"
    wanted = -(-100 * least // total) / 100  # the least share in hundredths
    rest = config.data.val_fraction if split == "test" else config.data.test_fraction
    needed = -(-least // share)
    raised = f"set data.{split}_fraction={wanted:g}, or " if wanted + rest < 1 and total > least + 1 else ""
    return f"{raised}add trajectories: {needed:g} at data.{split}_fraction {share:g}"


def count_findings(config: Config, tasks: Sequence[str]) -> list[Finding]:
    """Everything that will be refused of these tasks for want of data, by the doctor and the dry runs."""
    found = []
    for name in tasks:
        try:
            found += check_counts(config, name, count_data(config, name))
        except ValueError as error:
            found.append(Finding("error", str(error).rstrip("."), f"task.{name}", ""))
    return found


def print_refusals(config: Config, tasks: Sequence[str]) -> int:
    """Print what will be refused, for a dry run; returns its exit status, 1 where training will refuse, 0
    where the report will be written and its gates fail."""
    found = count_findings(config, tasks)
    for finding in found:
        advice = f" To do: {finding.do}." if finding.do else ""
        print(f"  {finding.severity}: {finding.what} [{finding.where}].{advice}")
    return int(any(finding.severity == "error" for finding in found))
