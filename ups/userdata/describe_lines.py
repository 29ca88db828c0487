"""The lines that --describe prints, as data. `written` alone makes YAML of them, and reads it back: names in
files are not ours, and none of them may become a setting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ups.common.text import load_yaml, printable, yaml_text


@dataclass(frozen=True)
class Line:
    """One key of the section. value: plain, or the lines below the key; note: what is behind it, a question
    if it ends with a question mark; is_offered: the line is a comment, and is the key's once the user removes
    the mark before it. Without a key, the note alone."""

    key: str | None = None
    value: Any = None
    note: str = ""
    is_offered: bool = False


def written(lines: Sequence[Line]) -> str:
    """The lines as YAML. Raises ValueError if the text, or a line that is offered, reads as anything else."""
    text = "\n".join(_texts(lines, ""))
    offered = [line for line in _every(lines) if line.is_offered]
    texts = [
        (text, meant(lines)),
        *((f"{_entry(line)}{_note(line)}", {line.key: line.value}) for line in offered),
    ]
    for text_of, value in texts:
        try:
            read = load_yaml(text_of) or {}
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            read = error
        if read != value:
            raise ValueError(
                f"the section is meant to say {str(value)!r:.300} and reads as {str(read)!r:.300}; expected "
                "the same. Give the arrays and the file other names, of letters and digits."
            )
    return text


def meant(lines: Sequence[Line]) -> dict[str, Any]:
    """What the lines set, those that are offered apart."""
    return {
        line.key: meant(line.value) if isinstance(line.value, tuple) else line.value
        for line in lines
        if line.key is not None and not line.is_offered
    }


def _every(lines: Sequence[Line]) -> list[Line]:
    inner = [_every(line.value) if isinstance(line.value, tuple) else [] for line in lines]
    return [*lines, *(line for some in inner for line in some)]


def _texts(lines: Sequence[Line], indent: str) -> list[str]:
    found = []
    for line in lines:
        mark = "# " * line.is_offered
        found.append(f"{indent}{mark}{_entry(line)}{_note(line)}".rstrip())
        found += _texts(line.value, f"{indent}  ") if isinstance(line.value, tuple) else []
    return found


def _entry(line: Line) -> str:
    if line.key is None:
        return ""
    return f"{yaml_text(line.key)}:" + ("" if isinstance(line.value, tuple) else f" {yaml_text(line.value)}")


def _note(line: Line) -> str:
    return f"{'   ' * (line.key is not None)}# {printable(line.note)}" * bool(line.note)
