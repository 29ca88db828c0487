"""Reading configurations: YAML files, overlays that include others, and overrides of the command line.

The loader (ups/common/text.py) reads YAML as version 1.2 does: 1e-3 is a number, NO is text. A key that is
written twice in one mapping is an error.
"""

import copy
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ups.common.place import ROOT
from ups.common.stages import STAGES
from ups.common.text import load_yaml, read_yaml, shown
from ups.config.schema import Config

DEFAULT = ROOT / "configs" / "default.yaml"  # every key


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


def read_overlays(path: Path, seen: tuple[Path, ...]) -> list[dict]:
    """The overlay at `path` and those that it includes, the innermost first. seen: files that include it."""
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
    return [*before, data]


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


def apply_override(data: dict, text: str) -> None:
    """Apply one `a.b.c=value` override in place; the value is read as YAML."""
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
    if last not in node and sections not in (["task"], ["evaluate", "max_nrmse"]):
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


def unknown_key(key: str, allowed: Iterable[str], where: str) -> ValueError:
    allowed = list(allowed)
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ValueError(
        f"unknown key {where}{key[:200]}{hint} Expected one of: {', '.join(allowed)}. Rename or remove it."
    )
