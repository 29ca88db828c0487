"""What weights and configuration share: the settings of a network, and the tables of backbones and bases.

They are the only place where a backbone or base is registered. Classes are given by name, because a
configuration is checked before torch is imported; a network imports those that it uses.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

# ---------------------------------------------------------------- conditions on values


@dataclass(frozen=True)
class Bound:
    """A condition on a value beside its type; expected and do are words for the user, with {key}."""

    holds: Callable[[Any], bool]
    expected: str
    do: str = "Change it."


Positive = Bound(lambda value: value > 0, "a positive number", "Set {key} above zero.")
Share = Bound(lambda value: 0 <= value < 1, "a number in [0, 1)")
WholeShare = Bound(lambda value: 0 <= value <= 1, "a number in [0, 1]")
NotNegative = Bound(lambda value: value >= 0, "0 or more", "Use another.")
Rate = Bound(lambda value: 0 < value <= 10, "a learning rate in (0, 10]", "Use 2e-3.")
Members = Bound(lambda value: value >= 2, "at least 2: one member has no spread", "Raise it.")
Resamples = Bound(lambda value: value >= 20, "at least 20: a 95 % interval leaves out one in 20", "Raise it.")
Folder = Bound(lambda value: bool(value.strip()), "a folder", "Name one, such as {key}=my_folder.")


# ---------------------------------------------------------------- backbones and bases

# name -> MODULE:CLASS below ups/models/backbones
BACKBONES: dict[str, str] = {
    "flat": "flat:FlatBackbone",
    "plain": "plain:Plain",
    "fno": "fno:FNO",
    "unet": "unet:UNet",
    "transformer": "transformer:Transformer",
}


@dataclass(frozen=True)
class ModelConfig:
    kind: Literal[tuple(BACKBONES)]
    width: Annotated[int, Positive]
    depth: Annotated[int, Positive]
    modes: Annotated[int, Positive]
    kernel_size: Annotated[int, Bound(lambda value: value % 2 == 1, "an odd number", "Use 5 or 7.")]
    mlp_ratio: Annotated[float, Positive]


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
    "coefficients": BaseRow("coefficients:Coefficients", TRANSIENT),
    "elliptic": BaseRow("elliptic:Elliptic", STEADY),
    "linear": BaseRow("linear:Linear", TRANSIENT + STEADY),
    "solver": BaseRow("solver:Solver", TRANSIENT, _solver),
}
