"""The table of base predictors: name, class, the tasks that it serves and the settings that it requires.

It is the only place where a base is registered. Classes are given by name, because a configuration is checked
before torch is imported; ups/models/bases imports them.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Requirement = tuple[bool, str, str, str]  # whether it holds, what is wrong, what was expected, what to do
Requirements = Callable[[str, Any, int], Iterator[Requirement]]  # of (key, settings, cells along an axis)

TRANSIENT, STEADY = (False,), (True,)


class BaseRow(NamedTuple):
    """implementation: MODULE:CLASS below ups/models/bases; serves: values of `Task.is_steady`."""

    implementation: str
    serves: tuple[bool, ...]
    requirements: Requirements = lambda *_: iter(())


def _degree(key: str, settings: Any, cells: int) -> Iterator[Requirement]:
    yield (
        1 <= settings.degree <= 5,
        f"{key}.degree is {settings.degree}",
        "1 to 5",
        "Change it or drop propagator from the list.",
    )


def _reach(key: str, settings: Any, cells: int) -> Iterator[Requirement]:
    yield (
        0 < settings.reach <= cells // 2,
        f"{key}.reach is {settings.reach}",
        f"1 to {cells // 2} cells (half the grid)",
        f"Set {key}.reach={cells * 3 // 8}, or drop transport from {key}.base.",
    )


def _solver(key: str, settings: Any, cells: int) -> Iterator[Requirement]:
    yield (
        re.fullmatch(r"[\w.]+:\w+", settings.solver) is not None,
        f"{key}.solver is {settings.solver!r:.80}",
        "MODULE:FUNCTION, a coarse solver of yours",
        f"Write {key}.base: {{solver: my_module:step}}.",
    )


BASES: dict[str, BaseRow] = {
    "persistence": BaseRow("base:Persistence", TRANSIENT),
    "mean": BaseRow("base:Mean", STEADY),
    "propagator": BaseRow("propagator:Propagator", TRANSIENT, _degree),
    "transport": BaseRow("transport:Transport", TRANSIENT, _reach),
    "flow": BaseRow("flow:Flow", TRANSIENT),
    "equation": BaseRow("equation:Equation", TRANSIENT),
    "elliptic": BaseRow("elliptic:Elliptic", STEADY),
    "linear": BaseRow("linear:Linear", TRANSIENT + STEADY),
    "solver": BaseRow("solver:Solver", TRANSIENT, _solver),
}
