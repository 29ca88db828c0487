"""Text that is not ours (names in data files, units, names of files), written into a language: YAML,
comments, Markdown, CSV, a terminal, names of files. Each language has one function here, nothing else quotes.

HTML is escaped by Jinja2 (ups/report/templates.py). A control character can end a line or move a cursor, so
`require_plain_name` refuses it in names where they are read, and `printable` shows it in any other text.
"""

import hashlib
import re
import unicodedata
from typing import Any

import yaml

# control characters, invisible formats (directions among them), halves of characters, ends of lines
UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
MOST_NAME_BYTES = 100  # of a file's name that is made from text; a file system takes 255, with an ending
MARKDOWN = re.compile(r"[\\`*_{}\[\]<>()#|!~&$]")
FORMULA = ("=", "+", "-", "@")  # with which spreadsheets begin one


def printable(text: Any) -> str:
    """The text on one line; control characters are written as in Python, such as \\x1b."""
    return "".join(
        ascii(letter)[1:-1] if unicodedata.category(letter) in UNPRINTABLE else letter for letter in str(text)
    )


def require_plain_name(name: str, where: str) -> str:
    """The name. Raises ValueError if it holds a control character. where: the file that it stands in."""
    if printable(name) != name:
        raise ValueError(
            f"{printable(where)} holds the name {printable(name)!r:.200}, with control characters; expected "
            "a name of letters, digits and signs. Rename it."
        )
    return name


def yaml_text(value: Any) -> str:
    """A plain value (text, number, list or mapping of these) as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def markdown(text: Any) -> str:
    """The text as Markdown shows it, also in a cell of a table: no mark-up and no HTML of its own."""
    return MARKDOWN.sub(r"\\\g<0>", printable(text)).replace(r"\<", "&lt;").replace(r"\&", "&amp;")


def csv_cell(text: Any) -> str:
    """The text of a cell, which no spreadsheet takes for a formula; `csv.writer` quotes it."""
    text = printable(text)
    return f"'{text}" if text.startswith(FORMULA) else text


def file_stem(text: Any) -> str:
    """A file's name, without ending, made from any text. Different texts have different names."""
    text = str(text)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).lstrip(".-")[:MOST_NAME_BYTES]
    return stem if stem == text else f"{stem}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
