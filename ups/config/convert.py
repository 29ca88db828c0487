"""Configuration dataclasses from plain mappings, by the declared type of every key.

pydantic would need a validator for most types (3e-4 as text, whole numbers as floats, a bare no as "no"), and
does not name the nearest spelling of a key.
"""

import contextlib
import dataclasses
import math
import types
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ups.common.text import shown
from ups.config.reading import DEFAULT, unknown_key
from ups.config.sections import TaskConfig, UserTaskConfig

MOST_PROBLEMS = 20  # that a message lists


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
