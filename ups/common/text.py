"""Text that is not ours (names in data files, units, names of files), written into a language: YAML,
comments, Markdown, a terminal, names of files. Each language has one function here, nothing else quotes.

HTML is escaped by Jinja2 (ups/report/templates.py). A control character can end a line or move a cursor, so
`require_plain_name` refuses it in names where they are read, and `printable` shows it in any other text.
All that a command prints goes through `PlainOutput`.
"""

import contextlib
import hashlib
import io
import re
import sys
import unicodedata
from typing import Any

import yaml

# control characters, invisible formats (directions among them), halves of characters, ends of lines
UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
MOST_NAME = 255  # characters of a name, as of a file
MOST_NAME_BYTES = 100  # of a file's name that is made from text; a file system takes 255, with an ending
HASHED = re.compile("-[0-9a-f]{16}$")  # the end of a name whose text was changed
MOVES = re.compile("(\n|\t|\r|\x1b\\[A)")  # of the text that we and tqdm's bars print
# what means something in Markdown within a line; an underscore inside a word does not, nor brackets alone
MARKDOWN = re.compile(r"[\\`*<|~&$]|\](?=[\[(:])|(?<![^\W_])_|_(?![^\W_])")
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


def yaml_text(value: Any) -> str:
    """A plain value (text, number, list or mapping of these) as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def markdown(text: Any) -> str:
    """The text as Markdown shows it, also in a cell of a table: no mark-up and no HTML of its own."""
    return MARKDOWN.sub(lambda sign: ENTITIES.get(sign[0], f"\\{sign[0]}"), printable(text))


def file_stem(text: Any) -> str:
    """A file's name, without ending, made from any text. Different texts have different names."""
    text = str(text)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).lstrip(".-")[:MOST_NAME_BYTES]
    if stem and stem == text and not HASHED.search(stem):
        return stem
    return f"{stem or '_'}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"
