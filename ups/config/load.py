"""The configuration of a run: configs/default.yaml, then overlays, then overrides, as frozen dataclasses.

Every number of a run has one home: default.yaml or, of a task, its row (ups/tasks). Unknown, duplicate,
missing or mistyped keys and impossible combinations are errors that name the key, what was expected and the
nearest spelling.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from ups.common.text import require_plain_text
from ups.config.checks import check
from ups.config.convert import build, convert_all
from ups.config.reading import (
    DEFAULT,
    apply_override,
    is_of_run,
    merge,
    read_default,
    read_overlays,
    unknown_key,
)
from ups.config.schema import Config
from ups.config.sections import UserTaskConfig
from ups.tasks import TASKS, get_task
from ups.userdata.section import DEFAULTS, complete

OF_ONE_KIND = ("inputs", "coordinates", "times", "flipped", "repeated")  # keys of user data with one type


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration: default.yaml, then the overlay at `path`, then `overrides` such as
    "run.seed=1".

    An overlay may start with `include: other.yaml`, relative to itself or to the folder of UPS. Raises
    ValueError or FileNotFoundError for anything a user can get wrong, before any process group or file
    exists.
    """
    overlays = read_overlays(Path(path), ()) if path and Path(path).resolve() != DEFAULT else []
    data = functools.reduce(merge, overlays, read_default())
    sections = data["task"] if isinstance(data["task"], dict) else {}
    data["task"] = _with_defaults(data["task"])
    is_saved = bool(path) and is_of_run(Path(path))
    if is_saved and isinstance(data["task"], dict):
        data["task"] = {name: _without_solver(section) for name, section in data["task"].items()}
    for text in overrides:
        apply_override(data, text)
    require_plain_text(data["task"], f"{path or 'the command line'}, section task,")
    for name in _user_sections(sections):
        section = data["task"].pop(name)
        if name in data["data"]["tasks"]:  # the files of other tasks need not be there
            data["task"][name] = complete(str(name), _typed(section, f"task.{name}."))
    for name, section in data["task"].items() if isinstance(data["task"], dict) else ():
        _name_solver(section)
        if is_saved and isinstance(section, dict) and "solver" in section["base"] and not section["solver"]:
            raise ValueError(
                f"{path} is the configuration of a run, which may come from elsewhere and names no code to "
                f"run; expected the solver of {name} from you. Give it again: 'task.{name}.base={{solver: "
                "MODULE:FUNCTION}' (ARGS= of make), or --config with a file of your own."
            )
    config = build(Config, data)
    overridden = [text.partition("=")[0].split(".")[1] for text in overrides if text.startswith("task.")]
    named = {*config.data.tasks, *map(str, sections), *overridden}
    tasks = {name: section for name, section in config.task.items() if name in named}
    config = dataclasses.replace(config, task=tasks)
    check(config)
    return config


def to_dict(config: Any) -> dict:
    """The configuration as plain YAML-able values; feeding it back to `load_config` gives the same
    configuration."""
    return dataclasses.asdict(config)


def _user_sections(sections: Any) -> list[str]:
    """The names of the sections that declare files of the user."""
    sections = sections.items() if isinstance(sections, dict) else ()
    return [name for name, section in sections if isinstance(section, dict) and "files" in section]


def _with_defaults(sections: Any) -> Any:
    """The sections of all tasks: the settings of built-in tasks and the defaults of user data, under those
    that the configuration gives. Raises ValueError for an unknown task or key."""
    names, user = [*sections] if isinstance(sections, dict) else [], _user_sections(sections)
    for name in {*names} - {*user}:
        get_task(str(name))
    merged = merge({name: task.settings for name, task in TASKS.items()}, sections)
    for name in user:
        if unknown := [key for key in sections[name] if key not in DEFAULTS]:
            raise unknown_key(str(unknown[0]), DEFAULTS, f"task.{name}.")
        merged[name] = {**DEFAULTS, **sections[name]}
    return merged


def _typed(section: dict[str, Any], where: str) -> dict[str, Any]:
    """A section of user data with the declared types of the keys that have one type; None means left out."""
    section = {key: DEFAULTS[key] if value is None else value for key, value in section.items()}
    kinds = get_type_hints(UserTaskConfig)
    return section | convert_all(
        (key, value, kinds[key], where + key)
        for key, value in section.items()
        if key in OF_ONE_KIND or (kinds[key] in (int, float, bool) and key != "dt")
    )


def _name_solver(section: Any) -> None:
    """Move the solver in base: {solver: MODULE:FUNCTION}, alone or in a list, to the key solver."""
    base = section.get("base") if isinstance(section, dict) else None
    entries = [base] if isinstance(base, dict) else base if isinstance(base, list) else []
    named = [entry for entry in entries if isinstance(entry, dict)]
    if named:
        section["solver"] = next((entry["solver"] for entry in named if "solver" in entry), section["solver"])
        section["base"] = [
            kind for entry in entries for kind in (entry if isinstance(entry, dict) else [entry])
        ]


def _without_solver(section: Any) -> Any:
    """A section of a task without the function of the user that it names."""
    if not isinstance(section, dict):
        return section
    section = dict(section)
    _name_solver(section)
    return section | {"solver": ""}
