"""The tasks: facts about data sets, by name.

A new task is a row of families.py, and a solver of the same name in `ups_solvers`.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from ups.tasks.families import PDEBENCH, UNCERTAIN
from ups.tasks.task import Finding, Place, Task, in_unit, make_user_task, require_name

__all__ = [
    "TASKS",
    "Finding",
    "Place",
    "Task",
    "described_task",
    "get_task",
    "in_unit",
    "make_user_task",
    "require_name",
]

TASKS: dict[str, Task] = {task.name: task for task in (*PDEBENCH, *UNCERTAIN)}


def get_task(name: str) -> Task:
    """The task called `name`. Raises ValueError with the nearest spelling for an unknown one."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"unknown task {name!r:.80}{hint} Expected one of: {', '.join(TASKS)} (key data.tasks), or a "
            f"user task, whose data task.{name:.80}.files names (docs/own_data.md)."
        )
    return TASKS[name]


def described_task(description: Mapping[str, Any]) -> Task:
    """The task that weights or a cache describe: by its name, or by the facts of a user's task (key
    "own")."""
    name, facts = description["name"], description.get("own")
    return make_user_task(name, facts) if facts else get_task(name)
