"""Text that is not ours (names in data files, units, names of files), written into a language: YAML,
comments, Markdown, a terminal, names of files. Each language has one function here, nothing else quotes; and
numbers as text.

HTML is escaped by Jinja2 (ups/report/templates.py). A control character can end a line or move a cursor, so
`require_plain_name` refuses it in names where they are read, and `printable` shows it in any other text.
All that a command prints goes through `PlainOutput`.
"""

import contextlib
import hashlib
import io
import math
import re
import reprlib
import sys
import unicodedata
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

MOST_YAML = 2**17  # of a file: ours have 10 KB, and PyYAML reads 100 KB in a second
# control characters, invisible formats (directions among them), halves of characters, ends of lines
UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
MOST_NAME = 255  # characters of a name, as of a file
MOST_NAME_BYTES = 100  # of a file's name that is made from text; a file system takes 255, with an ending
PLAIN = re.compile(r"[A-Za-z]\w*|configs/\w+\.yaml", re.ASCII)  # text without quotes in YAML
MOST_DIGITS = 1000  # of a whole number, which PyYAML reads in quadratic time
HASHED = re.compile("-[0-9a-f]{16}$")  # the end of a name whose text was changed
MOVES = re.compile("(\n|\t|\r|\x1b\\[A)")  # of the text that we and tqdm's bars print
# what means something in Markdown within a line; an underscore inside a word does not, nor brackets alone
MARKDOWN = re.compile(r"[\\`*<|~&$]|\](?=[\[(:])|(?<![^\W_])_|_(?![^\W_])")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # of powers of ten
ENTITIES = {"<": "&lt;", "&": "&amp;"}


def printable(text: Any) -> str:
    """The text on one line; control characters are written as in Python, such as \\x1b."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        ascii(letter)[1:-1] if unicodedata.category(letter) in UNPRINTABLE else letter for letter in text
    )


class PlainOutput(io.TextIOWrapper):
    """A stream to a terminal or a file that shows control characters, whatever text is printed."""

    def write(self, text: str) -> int:
        parts = MOVES.split(text)  # every second one is a move
        parts[::2] = map(printable, parts[::2])
        super().write("".join(parts))
        return len(text)


def print_plain(outlet: type[io.FileIO] = io.FileIO) -> None:
    """From here on all that this process prints is plain. outlet: of the bytes."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else a test or a notebook replaced it
            with contextlib.suppress(OSError, AttributeError):  # None where it was closed
                stream.flush()
            with contextlib.suppress(OSError):
                buffer = io.BufferedWriter(outlet(number, "w", closefd=False))
                encoding = getattr(stream, "encoding", "utf-8")
                setattr(sys, name, PlainOutput(buffer, encoding, "backslashreplace", line_buffering=True))


def require_plain_name(name: str, where: str, most: int = MOST_NAME) -> str:
    """The name. Raises ValueError if it holds a control character, or more than `most` characters between
    slashes. where: the file that it stands in."""
    if printable(name) != name:
        raise ValueError(
            f"{printable(where)} holds the name {printable(name)!r:.200}, with control characters; expected "
            "a name of letters, digits and signs. Rename it."
        )
    if (length := max(map(len, name.split("/")))) > most:
        raise ValueError(
            f"{printable(where)} holds the name {name!r:.80}, of {length} characters; expected at "
            f"most {most}. Rename it."
        )
    return name


def require_plain_text(value: Any, where: str, most: int = MOST_NAME) -> None:
    """`require_plain_name` of all text in a tree of mappings and lists."""
    waiting, seen = [value], set()
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            require_plain_name(found, where, most)
        elif isinstance(found, dict | list | tuple) and id(found) not in seen:  # YAML may repeat or nest it
            seen.add(id(found))
            waiting += [*found, *found.values()] if isinstance(found, dict) else found


class _Dumper(yaml.SafeDumper):
    """SafeDumper that puts all text but plain words in double quotes."""


_Dumper.ignore_aliases = lambda *_: True
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, None if PLAIN.fullmatch(text) else '"'
    ),
)


def yaml_text(value: Any) -> str:
    """A plain value (text, number, list or mapping of these) as YAML on one line, which `load_yaml` reads."""
    for is_unicode in (True, False):  # without it, all that is not ASCII is escaped
        text = yaml.dump(
            value,
            Dumper=_Dumper,
            default_flow_style=True,
            width=float("inf"),
            sort_keys=False,
            allow_unicode=is_unicode,
        )
        text = text.removesuffix("\n").removesuffix("\n...")
        if printable(text) == text:
            break
    return text


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads as version 1.2 does: 1e-3 is a number, NO is text; a key that is written twice
    is an error. (libyaml's loader is ten times as fast and ends the process at deep nesting.)"""


# PyYAML's resolvers by the first letter, without words for true and false other than these
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
                f"duplicate key {shown(key)} in line {line}; expected each key once. Remove one of the two"
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


def load_yaml(text: str) -> Any:
    """The value of YAML text. Raises yaml.YAMLError, ValueError, TypeError or RecursionError."""
    return yaml.load(text, _Loader)


def shown(value: Any) -> str:
    """repr of a value in a message, at a length that can be read: aliases make YAML of a page expand to
    gigabytes."""
    try:
        return _short.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} that is too long to print"


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, 80, 80, 80


def markdown(text: Any) -> str:
    """The text as Markdown shows it, also in a cell of a table: no mark-up and no HTML of its own."""
    return MARKDOWN.sub(lambda sign: ENTITIES.get(sign[0], f"\\{sign[0]}"), printable(text))


def number(value: Any, digits: int = 3) -> str:
    """`value` with `digits` significant digits and powers of ten written out; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 10**15):
        return f"{value:,}" if type(value) is int else str(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite" if math.isinf(value) else "undefined"
    if not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}×10{str(int(exponent)).translate(RAISED)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.{digits}g}".rstrip(".")


def frames_ahead(num: int, until: float, unit: str | None) -> str:
    """How far ahead forecasts go, such as "15 frames ahead, 1.5 time units"."""
    time = f"{until:.0f}" if 1000 <= until < 1e6 else f"{until:.3g}"
    return f"{num} frame{'s' * (num != 1)} ahead, {time} {unit or 'time units'}"


def file_stem(text: Any) -> str:
    """A file's name, without ending, made from any text. Different texts have different names."""
    text = str(text)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).lstrip(".-")[:MOST_NAME_BYTES]
    if stem and stem == text and not HASHED.search(stem):
        return stem
    return f"{stem or '_'}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def read_yaml(path: str | Path) -> dict:
    """A YAML mapping from `path`. Raises FileNotFoundError or ValueError naming the file."""
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"no configuration file {path}; expected a YAML file. Name one that is there with --config "
            f"(CONFIG= of make): {', '.join(near) or f'{path.parent} has none'}."
        )
    if (size := path.stat().st_size) > MOST_YAML:
        raise ValueError(
            f"{path} has {size} bytes; expected a configuration of at most {MOST_YAML}. Name another file."
        )
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # a date that is none, unhashable keys, depth
        raise ValueError(
            f"{path} is not valid YAML: {error}. Expected a mapping of sections; correct that line."
        ) from error
    if not isinstance(data, dict):
        held, hint = f"a {type(data).__name__}", ""
        if data is None:
            held, hint = "nothing", " If `--describe` was to write it, that ended with an error: see there."
        raise ValueError(
            f"{path} holds {held}; expected a mapping of sections such as 'run:'. See configs/small.yaml for "
            f"one.{hint}"
        )
    return data
