"""The packages of the project, ups and those beside it, and the syntax of their files."""

import ast
import functools
from pathlib import Path

from ups.common.place import ROOT

PACKAGES = sorted(path.parent.name for path in ROOT.glob("ups*/__init__.py"))


def product() -> list[Path]:
    """The scripts and the files of the packages."""
    return sorted([*ROOT.glob("*.py"), *ROOT.glob("ups*/**/*.py")])


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def tree(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


def top_imports(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere."""
    nodes = [*ast.walk(tree(path))]
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in found}
