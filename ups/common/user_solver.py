"""The user's coarse solver: a function MODULE:FUNCTION, named by the user's configuration or command line,
never by weights.

Its file is located and digested without running it; only `load_step` imports it. Standard library only.
"""

import contextlib
import importlib
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from ups.common.files import file_hash, value_hash

KEYS = ("stdlib", "platstdlib", "purelib", "platlib")  # of sysconfig: folders of installed packages


class Finder(ModuleFinder):
    """Follows imports, also those of packages without __init__.py (namespace packages)."""

    def import_module(self, partname: str, fqname: str, parent: Any) -> Any:
        """The module `partname` of the package `parent`, or of Python's path without one."""
        try:
            return super().import_module(partname, fqname, parent)
        except AttributeError:  # ModuleFinder asks for a loader, which a namespace package does not have
            package = self.add_module(fqname)
            folders = parent.__path__ if parent else self.path
            package.__path__ = [f"{folder}/{partname}" for folder in folders]
            return package


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
    """A digest of the module in MODULE:FUNCTION and of every user module that its source imports, directly or
    not.

    Modules of Python, of installed packages and of this package do not count. Raises ValueError as
    `solver_file`.
    """
    module = place.partition(":")[0]
    file, package = solver_file(place, task), __name__.partition(".")[0]
    own = file.parents[module.count(".") + (file.name == "__init__.py")]
    finder = Finder([*filter(_is_users, sys.path), str(own)], excludes=[package])
    with contextlib.suppress(ImportError, SyntaxError, ValueError, RecursionError):  # its import says so
        finder.import_hook(module)
    found = {name: Path(one.__file__) for name, one in finder.modules.items() if one.__file__}
    return value_hash({name: file_hash(path) for name, path in ({module: file} | found).items()})


def _is_users(folder: str) -> bool:
    """Whether a folder on Python's path holds no installed packages, also of `pip install --target`."""
    place = Path(folder or ".").resolve()
    installed = [sysconfig.get_path(key) for key in KEYS] + [site.getusersitepackages()]
    return not (
        {"site-packages", "dist-packages"} & {*place.parts}
        or any(place.is_relative_to(Path(one).resolve()) for one in installed if one)
        or any(place.glob("*.dist-info"))
    )


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
