"""The tasks. Each file describes one family, in FAMILY; a new task is a new file here.

Facts from PDEBench (Takamoto et al. 2022, arXiv 2210.07182) and its public code.
"""

import copyreg
import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from ups.tasks.task import Array, Finding, Task, in_unit
from ups.tasks.user_task import Place, make_user_task, require_name

__all__ = [
    "TASKS",
    "Array",
    "Finding",
    "Place",
    "Task",
    "described_task",
    "get_task",
    "in_unit",
    "make_user_task",
    "require_name",
]

TASKS: dict[str, Task] = {
    task.name: task
    for file in sorted(module.name for module in pkgutil.iter_modules(__path__))
    for task in getattr(importlib.import_module(f"{__name__}.{file}"), "FAMILY", ())
}


def get_task(name: str) -> Task:
    """The task called `name`. Raises ValueError with the nearest spelling for an unknown one."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
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


def _reduced(task: Task) -> tuple:
    """What pickle stores of a task: its description, as its solver may be a local function."""
    is_described = task.user_facts is not None or TASKS.get(task.name) is task
    return (described_task, (task.description,)) if is_described else task.__reduce_ex__(4)


copyreg.pickle(Task, _reduced)
