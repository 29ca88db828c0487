"""Configuration: configs/default.yaml, then overlays, then dotted overrides, into frozen dataclasses.

Every number of a run has one home: default.yaml or, of a task, its file (ups/tasks). Unknown, duplicate,
missing or mistyped keys and impossible combinations are errors that name the key, what was expected and the
nearest spelling.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import math
import re
import reprlib
import signal
import sys
import types
import typing
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from ups.common.files import in_words, is_out_of_memory
from ups.common.stages import STAGES
from ups.config.checks import check
from ups.config.schema import ROOT, Config, TaskConfig, UserTaskConfig
from ups.tasks import TASKS, get_task
from ups.userdata.section import DEFAULTS, complete

DEFAULT = ROOT / "configs" / "default.yaml"  # every key
DEFAULT_OVERLAY = ROOT / "configs" / "small.yaml"  # where a command line, or make, names none
CONFIG_OPTIONS = {
    "--config": {
        "default": str(DEFAULT_OVERLAY),
        "metavar": "FILE",
        "help": "YAML overlay of configs/default.yaml (configs/small.yaml)",
    },
    "overrides": {"nargs": "*", "metavar": "section.key=value"},
}
DRY_RUN = {"--dry-run": {"action": "store_true", "help": "print what would be done and write nothing"}}
SHOW_CONFIG = {"--show-config": {"action": "store_true", "help": "print the resolved configuration and end"}}


MOST_BYTES = 2**17  # of a file: ours have 10 KB, and PyYAML reads 100 KB in a second
MOST_DIGITS = 1000  # of a whole number, which PyYAML reads in quadratic time
MOST_PROBLEMS = 20  # that a message lists
OF_ONE_KIND = ("inputs", "coordinates", "times", "flipped", "repeated")  # of a declaration, beside numbers


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice in one mapping and endless numbers, and reads 1e-3 as a
    number and NO as text, as YAML 1.2 does. (libyaml's is ten times as fast and ends the process at deep
    nesting.)"""


# PyYAML's resolvers by the first letter, without words for true and false but these
_Loader.yaml_implicit_resolvers = {
    letter: [
        (tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool" or letter in "tTfF"
    ]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = set()
    for node_of_key, _ in node.value:
        key = loader.construct_object(node_of_key, deep=True)
        if not isinstance(key, Hashable):  # which the next line says
            break
        if key in seen:
            line = node_of_key.start_mark.line + 1
            raise ValueError(
                f"duplicate key {_show(key)} in line {line}; expected each key once. Remove one of the two"
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MOST_DIGITS:
        raise ValueError(
            f"a number of {len(node.value)} characters in line {node.start_mark.line + 1}; "
            f"expected at most {MOST_DIGITS}. Shorten it"
        )
    return loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: str | Path) -> dict:
    """A YAML mapping from `path`. Raises FileNotFoundError or ValueError naming the file."""
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"no configuration file {path}; expected a YAML file. Name one that is there "
            "with --config (CONFIG= of make): "
            f"{', '.join(near) or f'{path.parent} has none'}."
        )
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(
            f"{path} has {size} bytes; expected a configuration of at most {MOST_BYTES}. Name another file."
        )
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # a date that is none, unhashable keys, depth
        raise ValueError(
            f"{path} is not valid YAML: {error}. Expected a mapping of sections; mend that line."
        ) from error
    if not isinstance(data, (dict, type(None))):
        raise ValueError(
            f"{path} holds a {type(data).__name__}; expected a mapping of sections such as "
            "'run:'. See configs/small.yaml for one."
        )
    return data or {}


def _merge(base: Any, overlay: Any) -> Any:
    """`overlay` laid over `base`, mapping by mapping; anything else replaces."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        return {**base, **{key: _merge(base.get(key), value) for key, value in overlay.items()}}
    return overlay


def _unknown(key: str, allowed: typing.Iterable[str], where: str) -> ValueError:
    allowed = list(allowed)
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ValueError(
        f"unknown key {where}{key[:200]}{hint} Expected one of: {', '.join(allowed)}. Rename or remove it."
    )


def _wrong(key: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"{key} is {_show(value)}; expected {expected}. Change {key} in your overlay or on the command line."
    )


def _show(value: Any) -> str:
    """repr of a value in a message, at a length that can be read: aliases make YAML of a page expand to
    gigabytes."""
    try:
        return _short.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} that is too long to print"


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 80, 80, 80


def _convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the declared type `kind`, or ValueError naming the dotted `key`."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, f"{key}.")
    if origin is types.UnionType:  # of the section of a task, one that declares it names its files
        is_own = isinstance(value, dict) and "files" in value
        return _build(UserTaskConfig if is_own else TaskConfig, value, f"{key}.")
    if origin is dict and isinstance(value, dict):
        return _convert_all((str(k), v, arguments[1], f"{key}.{k}") for k, v in value.items())
    if origin is list and isinstance(value, list):
        return [_convert(v, arguments[0], f"{key}[{i}]") for i, v in enumerate(value)]
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
    raise _wrong(
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


def _convert_all(
    entries: typing.Iterable[tuple[str, Any, Any, str]], problems: typing.Iterable[str] = ()
) -> dict[str, Any]:
    """Every (name, value, kind, dotted key) converted; a ValueError has a line for all that is wrong,
    `problems` first."""
    values, problems = {}, list(problems)
    for name, value, kind, key in entries:
        try:
            values[name] = _convert(value, kind, key)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] * (len(problems) > MOST_PROBLEMS)
        raise ValueError("\n".join([*problems[:MOST_PROBLEMS], *more]))
    return values


def _build(cls: type, data: Any, where: str = "") -> Any:
    if not isinstance(data, dict):
        raise _wrong(f"section {where.rstrip('.') or 'of the file'}", data, "a mapping of keys")
    hints = typing.get_type_hints(cls)
    unknown = [str(key) for key in data if key not in hints]
    problems = [str(_unknown(key, hints, where)) for key in unknown[:MOST_PROBLEMS]]
    problems += [f"unknown key {where}{key:.200}" for key in unknown[MOST_PROBLEMS:]]
    if missing := [key for key in hints if key not in data]:
        problems.append(
            f"missing {', '.join(where + key for key in missing)}; expected every key in "
            f"{DEFAULT} or in an overlay. Add to your overlay what is missing."
        )
    present = ((key, data[key], kind, f"{where}{key}") for key, kind in hints.items() if key in data)
    return cls(**_convert_all(present, problems))


def _override(data: dict, text: str) -> None:
    """Apply one `a.b.c=value` override in place; the value is read as YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise ValueError(
            f"override {text!r} is not understood; expected section.key=value, such as run.seed=1. Mend it."
        )
    *sections, last = key.split(".")
    node = data
    for depth, part in enumerate(sections):
        if not isinstance(node.get(part), dict):
            raise _unknown(part, node, "".join(f"{section}." for section in sections[:depth]))
        node = node[part]
    if last not in node and sections not in (["task"], ["evaluate", "max_nrmse"]):
        raise _unknown(last, node, "".join(f"{section}." for section in sections))
    try:
        read = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"override {_show(text)}: the value is not valid YAML ({error}). Quote it."
        ) from error
    # in place of text a number, a date or a bare no is text: run.name=2026 needs no quotes within quotes
    is_text = isinstance(node.get(last), str) and not isinstance(read, (str, list, dict))
    node[last] = value.strip() if is_text else _merge(node.get(last), read)


def _name_solver(section: Any) -> None:
    """Of a section of a task, base: {solver: MODULE:FUNCTION}, alone or in a list, as base and solver."""
    base = section.get("base") if isinstance(section, dict) else None
    entries = [base] if isinstance(base, dict) else base if isinstance(base, list) else []
    named = [entry for entry in entries if isinstance(entry, dict)]
    if named:
        section["solver"] = next((entry["solver"] for entry in named if "solver" in entry), section["solver"])
        section["base"] = [
            kind for entry in entries for kind in (entry if isinstance(entry, dict) else [entry])
        ]


def _is_of_run(path: Path) -> bool:
    """Whether this is where a stage of a run keeps its configuration."""
    return path.name == "config.yaml" and path.absolute().parent.name in STAGES


def _without_solver(section: Any) -> Any:
    """A section of a task that names no function of the user's."""
    if not isinstance(section, dict):
        return section
    section = dict(section)
    _name_solver(section)
    return section | {"solver": ""}


def _declaration(section: dict[str, Any], where: str) -> dict[str, Any]:
    """A section that declares a task, with the types of what has one way to be written, as the files are read
    by it; null: left out."""
    section = {key: DEFAULTS[key] if value is None else value for key, value in section.items()}
    kinds = typing.get_type_hints(UserTaskConfig)
    return section | _convert_all(
        (key, value, kinds[key], where + key)
        for key, value in section.items()
        if key in OF_ONE_KIND or (kinds[key] in (int, float, bool) and key != "dt")
    )


def load_config(path: str | Path | None = None, overrides: typing.Sequence[str] = ()) -> Config:
    """The resolved configuration: default.yaml, then the overlay at `path`, then `overrides` such as
    "run.seed=1".

    An overlay may start with `include: other.yaml` (relative to itself). Raises ValueError or
    FileNotFoundError for anything a user can get wrong, before any process group or file exists.
    """
    overlays = _overlays(Path(path), ()) if path and Path(path).resolve() != DEFAULT else []
    is_of_run = bool(path) and _is_of_run(Path(path))
    data = functools.reduce(_merge, overlays, read_yaml(DEFAULT))
    sections = data["task"]
    sections = sections if isinstance(sections, dict) else {}
    declared = [
        name for name, section in sections.items() if isinstance(section, dict) and "files" in section
    ]
    for name in {*sections} - {*declared}:
        get_task(str(name))
    data["task"] = _merge({name: task.settings for name, task in TASKS.items()}, data["task"])
    for name in declared:
        if unknown := [key for key in sections[name] if key not in DEFAULTS]:
            raise _unknown(str(unknown[0]), DEFAULTS, f"task.{name}.")
        data["task"][name] = {**DEFAULTS, **sections[name]}
    if is_of_run and isinstance(data["task"], dict):
        data["task"] = {name: _without_solver(section) for name, section in data["task"].items()}
    for text in overrides:
        _override(data, text)
    for name in declared:  # the files of one that is not asked for need not be there
        section = data["task"].pop(name)
        if name in data["data"]["tasks"]:
            data["task"][name] = complete(str(name), _declaration(section, f"task.{name}."))
    for name, section in data["task"].items() if isinstance(data["task"], dict) else ():
        _name_solver(section)
        if is_of_run and isinstance(section, dict) and "solver" in section["base"] and not section["solver"]:
            raise ValueError(
                f"{path} is the configuration of a run, which may come from elsewhere and names "
                f"no code to run; expected the solver of {name} from you. Give it again: "
                f"'task.{name}.base={{solver: MODULE:FUNCTION}}' (ARGS= of make), or --config "
                "with a file of your own."
            )
    config = _build(Config, data)
    named = {
        *config.data.tasks,
        *map(str, sections),
        *(text.partition("=")[0].split(".")[1] for text in overrides if text.startswith("task.")),
    }
    tasks = {name: entry for name, entry in config.task.items() if name in named}
    config = dataclasses.replace(config, task=tasks)
    check(config)
    return config


def read_command(
    description: str, options: dict[str, dict[str, Any]], arguments: list[str] | None = None, **about: Any
) -> argparse.Namespace:
    """A command line, read. options: name -> what argparse is to know of it; of a configuration
    `CONFIG_OPTIONS`; about: what it is to know of the command."""
    parser = argparse.ArgumentParser(
        description=description, **about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, told in options.items():
        parser.add_argument(name, **told)
    return parser.parse_intermixed_args(arguments)


def keep_freed_memory() -> None:
    """Memory that this process frees stays its own, up to 2 GB, where the C library is glibc: given back and
    asked for again at every operation on large tensors, it cost a report a sixth of its time in page
    faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        mallopt(m_mmap_threshold, 32 * 2**20)  # the largest that it takes
        mallopt(m_trim_threshold, 2**31 - 1)


def run_script(main: Callable[[], int], name: str) -> NoReturn:
    """End the process with the status of main(). What a user can cause ends it with 1 and the message, which
    says what to do; a traceback would hide it."""
    keep_freed_memory()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not is_out_of_memory(error):
            raise
        sys.exit(f"{name}: {in_words(error)}")


def parse_arguments(description: str) -> tuple[Config, bool]:
    """(configuration, whether --dry-run was given) of a stage script's command line; description: its
    docstring."""
    arguments = read_command(description, CONFIG_OPTIONS | DRY_RUN | SHOW_CONFIG)
    config = load_config(arguments.config, arguments.overrides)
    if arguments.show_config:
        show(config)
        raise SystemExit(0)
    return config, arguments.dry_run


def show(config: Config) -> None:
    """Print the configuration, itself one, with the sections of the tasks that it trains."""
    asked = {name: config.task[name] for name in config.data.tasks}
    print(yaml.safe_dump(to_dict(dataclasses.replace(config, task=asked)), sort_keys=False), end="")


def _overlays(path: Path, seen: tuple[Path, ...]) -> list[dict]:
    if path.resolve() in seen:
        raise ValueError(
            f"{path} includes itself (through {' -> '.join(map(str, seen))}); expected a chain "
            "of files that ends. Remove one include."
        )
    data = read_yaml(path)
    include = data.pop("include", None)
    if include and _is_of_run(path):
        raise ValueError(
            f"{path} includes {_show(include)}; expected the whole configuration of a run. Give "
            "--config a file of your own."
        )
    before = _overlays(path.parent / str(include), (*seen, path.resolve())) if include else []
    return [*before, data]


def to_dict(config: Any) -> dict:
    """The configuration as plain YAML-able values; feeding it back to `load_config` gives the same
    configuration."""
    return dataclasses.asdict(config)
