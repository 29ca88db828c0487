"""The user's coarse solver: a function MODULE:FUNCTION, named by the user's configuration or command line,
never by weights.

Its file is located and digested without running it; only `load_step` imports it. Standard library only.
"""

import ast
import importlib
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.common.files import file_hash, value_hash

IMPORTERS = ("import_module", "__import__")
KEYS = ("stdlib", "platstdlib", "purelib", "platlib")  # of sysconfig: folders of installed packages


def find_module(name: str) -> Path | None:
    """The source file of a dotted module on Python's path, None if there is none. (`importlib.util.find_spec`
    would import its parent packages.)
    """
    parts = name.split(".")
    for entry in sys.path if all(part.isidentifier() for part in parts) else ():
        place = Path(entry or ".").joinpath(*parts)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None


def solver_file(place: str, task: str) -> Path:
    """The source file of the module in MODULE:FUNCTION. Raises ValueError if Python finds none."""
    module = place.partition(":")[0]
    if (file := find_module(module)) is None:
        raise ValueError(
            f"task.{task}.solver is {place!r:.200}, and Python finds no file of a module "
            f"{module:.100}; expected one, such as {module.replace('.', '/'):.100}.py in "
            f"{Path(sys.path[0] or '.').absolute()}. Write it there, or put its folder on PYTHONPATH."
        )
    return file


def solver_digest(place: str, task: str) -> str:
    """A digest of the module in MODULE:FUNCTION and of every user module that it imports, directly or not.

    Modules of Python, of installed packages and of this package do not count. Raises ValueError as
    `solver_file`.
    """
    module = place.partition(":")[0]
    found, waiting = {module: solver_file(place, task)}, [module]
    targets = [entry for entry in sys.path if any(Path(entry or ".").glob("*.dist-info"))]  # pip --target
    paths = [*(sysconfig.get_path(key) for key in KEYS), site.getusersitepackages(), *targets]
    installed = [Path(path).resolve() for path in paths if path]
    while waiting:
        name = waiting.pop()
        for other in (one for imported in _imports(name, found[name]) for one in _with_packages(imported)):
            file = find_module(other) if other not in found else None
            if file is not None and _is_users(other, file, module, installed):
                found[other] = file
                waiting.append(other)
    return value_hash({name: file_hash(file) for name, file in found.items()})


def _with_packages(name: str) -> list[str]:
    """A module and its parent packages, whose __init__.py run before it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _is_users(name: str, file: Path, solver: str, installed: Sequence[Path]) -> bool:
    """Whether a module is part of the user's solver: of its package, or not in a folder of installed ones."""
    top = name.partition(".")[0]
    if top == __name__.partition(".")[0]:  # a change of this package does not make a training stale
        return False
    return top == solver.partition(".")[0] or not (
        {"site-packages", "dist-packages"} & {*file.parts}
        or any(file.resolve().is_relative_to(folder) for folder in installed)
    )


def _imports(name: str, file: Path) -> Iterator[str]:
    """Names that the source of module `name` imports anywhere, and that may be modules; `name` comes
    first."""
    yield name
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # importing it will say so
        return
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            yield from (part for part in (base, *(f"{base}.{alias.name}" for alias in node.names)) if base)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS
        ):
            yield str(node.args[0].value)


def load_step(place: str, task: str) -> Callable[..., Any]:
    """The function MODULE:FUNCTION, imported. Raises ValueError if it does not exist."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name
        raise ValueError(
            f"the solver of {task} is {place!r:.200}, which is not there ({error}); expected a module with "
            f"a function step(u), as {module:.100}.py with {name or 'step'}. Run where Python finds that "
            "module (its folder on PYTHONPATH), or choose another base and train."
        ) from error


def solvers_of(config: Any) -> Mapping[str, Callable[..., Any]]:
    """Task -> solver in the user's configuration, for the tasks that may use one as a base."""
    return {
        name: load_step(config.task[name].solver, name)
        for name in config.data.tasks
        if "solver" in config.task[name].base
    }


def solvers_named(arguments: Sequence[str]) -> Mapping[str, Callable[..., Any]]:
    """Task -> solver from command-line arguments TASK=MODULE:FUNCTION. Raises ValueError."""
    if wrong := [text for text in arguments if not re.fullmatch(r"[^=]+=[\w.]+:\w+", text)]:
        raise ValueError(
            f"--solver is {wrong[0]!r}; expected TASK=MODULE:FUNCTION, such as ks=my_solver:step. Correct it."
        )
    return {task: load_step(place, task) for task, place in (text.split("=") for text in arguments)}
