"""Conditions on values of a configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
Between = Bound(
    lambda value: len(value) == 2 and 0 < value[0] < value[1], "a lower and an upper bound", "Use [0.5, 2.0]."
)
Folder = Bound(lambda value: bool(value.strip()), "a folder", "Name one, such as {key}=my_folder.")
