"""The configuration of a run: configs/default.yaml, then overlays, then overrides, as frozen dataclasses.

Every number of a run has one home: default.yaml or, of a task, its row (ups/tasks). Unknown, duplicate,
missing or mistyped keys and impossible combinations are errors that name the key, what was expected and the
nearest spelling. The loader (ups/common/text.py) reads YAML as version 1.2 does: 1e-3 is a number, NO text.

pydantic would need a validator for most types (3e-4 as text, whole numbers as floats, a bare no as "no"), and
does not name the nearest spelling of a key.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ups.common.place import ROOT, STAGES
from ups.common.text import load_yaml, read_yaml, require_plain_text, shown
from ups.config.checks import check
from ups.config.schema import Config, TaskConfig, UserTaskConfig
from ups.config.sizes import with_sizes
from ups.tasks import TASKS, get_task
from ups.userdata.section import DEFAULTS, complete

DEFAULT = ROOT / "configs" / "default.yaml"  # every key
DEFAULT_OVERLAY = ROOT / "configs" / "small.yaml"  # if a command line, or make, names none
MOST_PROBLEMS = 20  # that a message lists
# keys of user data that may be written in other ways than they are kept
OF_MANY_KINDS = {*"layout boundary domain resolution parameters bounded missing base dt".split()}


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration: default.yaml, then the overlay at `path`, then `overrides` such as
    "run.seed=1".

    An overlay may start with `include: other.yaml`, relative to itself or to the folder of UPS. Raises
    ValueError or FileNotFoundError for anything a user can get wrong, before any process group or file
    exists.
    """
    overlays = read_overlays(Path(path), ()) if path and Path(path).resolve() != DEFAULT else []
    data = functools.reduce(merge, [overlay for _, overlay in overlays], read_default())
    # the sizes of the overlay that --describe includes are nobody's choice for these data
    written = [overlay for file, overlay in overlays if file.resolve() != DEFAULT_OVERLAY]
    sections = data["task"] if isinstance(data["task"], dict) else {}
    data["task"] = _with_defaults(data["task"])
    is_saved = bool(path) and is_of_run(Path(path))
    if is_saved and isinstance(data["task"], dict):
        data["task"] = {name: _without_solver(section) for name, section in data["task"].items()}
    for text in overrides:
        written.append(apply_override(data, text))
    require_plain_text(data["task"], f"{path or 'the command line'}, section task,")
    num = {}  # of trajectories
    for name in _user_sections(sections):
        section = data["task"].pop(name)
        if name in data["data"]["tasks"]:  # the files of other tasks need not be there
            data["task"][name], num[name] = complete(str(name), _typed(section, f"task.{name}."))
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
    config = with_sizes(dataclasses.replace(config, task=tasks), num, functools.reduce(merge, written, {}))
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
    """A section of user data with the declared types, but of OF_MANY_KINDS; None means left out."""
    section = {key: DEFAULTS[key] if value is None else value for key, value in section.items()}
    kinds = get_type_hints(UserTaskConfig)
    return section | convert_all(
        (key, value, kinds[key], where + key) for key, value in section.items() if key not in OF_MANY_KINDS
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


# ---------------------------------------------------------------- files and overrides


def read_default() -> dict:
    """configs/default.yaml, with every_stage under the sections of the stages, which override it."""
    data = read_yaml(DEFAULT)
    shared = data.pop("every_stage")
    for stage in STAGES:
        keys = get_type_hints(get_type_hints(Config)[stage])
        common = {key: copy.deepcopy(value) for key, value in shared.items() if key in keys}
        data[stage] = merge(common, data[stage])
    return data


def merge(base: Any, overlay: Any) -> Any:
    """`base` with the values of `overlay`, mapping by mapping; any other value replaces."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in overlay.items()}}
    return overlay


def read_overlays(path: Path, seen: tuple[Path, ...]) -> list[tuple[Path, dict]]:
    """The overlay at `path` and those that it includes, the innermost first, with their files. seen: files
    that include it."""
    if path.resolve() in seen:
        raise ValueError(
            f"{path} includes itself (through {' -> '.join(map(str, seen))}); expected a chain "
            "of files that ends. Remove one include."
        )
    data = read_yaml(path)
    include = data.pop("include", None)
    if include and is_of_run(path):
        raise ValueError(
            f"{path} includes {shown(include)}; expected the whole configuration of a run. Give "
            "--config a file of your own."
        )
    before = read_overlays(_included(path, str(include)), (*seen, path.resolve())) if include else []
    return [*before, (path, data)]


def _included(path: Path, include: str) -> Path:
    """The file that `path` includes: relative to `path`, else to the folder of UPS, which holds configs/."""
    places = [path.parent / include, ROOT / include]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"{path} includes {shown(include)}, which is neither {places[0]} nor {places[1]}; expected a "
            "configuration file. Correct the include: a path from the file itself, or configs/small.yaml."
        )
    return found


def is_of_run(path: Path) -> bool:
    """Whether this is the saved configuration of a stage of a run."""
    return path.name == "config.yaml" and path.absolute().parent.name in STAGES


def apply_override(data: dict, text: str) -> dict:
    """Apply one `a.b.c=value` override in place and return it as an overlay; the value is read as YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise ValueError(
            f"override {text!r} is not understood; expected section.key=value, such as run.seed=1. Correct "
            "it."
        )
    *sections, last = key.split(".")
    node = data
    for depth, part in enumerate(sections):
        if not isinstance(node.get(part), dict):
            raise unknown_key(part, node, "".join(f"{section}." for section in sections[:depth]))
        node = node[part]
    if last not in node and sections != ["task"]:
        raise unknown_key(last, node, "".join(f"{section}." for section in sections))
    try:
        read = load_yaml(value)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"override {shown(text)}: the value is not valid YAML ({error}). Quote it."
        ) from error
    # in place of text a number, a date or a bare no is text: run.name=2026 needs no quotes within quotes
    is_text = isinstance(node.get(last), str) and not isinstance(read, (str, list, dict))
    node[last] = value.strip() if is_text else merge(node.get(last), read)
    return functools.reduce(lambda inner, part: {part: inner}, [last, *reversed(sections)], read)


def unknown_key(key: str, allowed: Iterable[str], where: str) -> ValueError:
    allowed = list(allowed)
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ValueError(
        f"unknown key {where}{key[:200]}{hint} Expected one of: {', '.join(allowed)}. Rename or remove it."
    )


# ---------------------------------------------------------------- dataclasses from mappings, by declared type


def build(cls: type, data: Any, where: str = "") -> Any:
    """The dataclass `cls` from a mapping; where: the dotted section, for messages. Raises one ValueError with
    a line for every key that is unknown, missing or of another type."""
    if not isinstance(data, dict):
        raise type_error(f"section {where.rstrip('.') or 'of the file'}", data, "a mapping of keys")
    hints = get_type_hints(cls)
    unknown = [str(key) for key in data if key not in hints]
    problems = [str(unknown_key(key, hints, where)) for key in unknown[:MOST_PROBLEMS]]
    problems += [f"unknown key {where}{key:.200}" for key in unknown[MOST_PROBLEMS:]]
    if missing := [key for key in hints if key not in data]:
        problems.append(
            f"missing {', '.join(where + key for key in missing)}; expected every key in "
            f"{DEFAULT} or in an overlay. Add to your overlay what is missing."
        )
    present = ((key, data[key], kind, f"{where}{key}") for key, kind in hints.items() if key in data)
    return cls(**convert_all(present, problems))


def convert_all(entries: Iterable[tuple[str, Any, Any, str]], problems: Iterable[str] = ()) -> dict[str, Any]:
    """Every (name, value, kind, dotted key) converted; a ValueError has a line for all that is wrong,
    `problems` first."""
    values, problems = {}, list(problems)
    for name, value, kind, key in entries:
        try:
            values[name] = convert(value, kind, key)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] * (len(problems) > MOST_PROBLEMS)
        raise ValueError("\n".join([*problems[:MOST_PROBLEMS], *more]))
    return values


def convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the declared type `kind`, or ValueError naming the dotted `key`."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, f"{key}.")
    if origin is types.UnionType:  # of the section of a task, one that declares it names its files
        is_user = isinstance(value, dict) and "files" in value
        return build(UserTaskConfig if is_user else TaskConfig, value, f"{key}.")
    if origin is dict and isinstance(value, dict):
        return convert_all((str(k), v, arguments[1], f"{key}.{k}") for k, v in value.items())
    if origin is list and isinstance(value, list):
        return [convert(v, arguments[0], f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is Literal:
        value = "no" if str(value).lower() in ("no", "off", "false") and "no" in arguments else value
        if value in arguments and not isinstance(value, bool):
            return value
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind in (int, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(float(value)) and (kind is float or float(value).is_integer()):
                return kind(value if isinstance(value, int) else float(value))
    if kind is str and isinstance(value, str):
        return value
    raise type_error(
        key,
        value,
        {
            dict: "a mapping",
            list: "a list such as [1, 2] or [u, v]",
            bool: "true or false",
            int: "a whole number",
            float: "a finite number",
            str: "text (in a file: in quotes)",
            Literal: f"one of {', '.join(map(repr, arguments))}",
        }[origin],
    )


def type_error(key: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"{key} is {shown(value)}; expected {expected}. Change {key} in your overlay or on the command line."
    )
