"""What a configuration may say of the base predictors of ups/models/bases/, a row for each: whom it serves,
and with which settings. Here because a configuration is checked before torch is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ups.config.schema import TaskConfig

Requirement = tuple[bool, str, str, str]   # whether it holds, what is wrong, what was expected, what to do


class Rules(NamedTuple):
    """is_steady: it serves steady tasks and no others, or the reverse; check(key, settings, cells along an
    axis)."""

    is_steady: bool = False
    check: Callable[[str, TaskConfig, int], Requirement] | None = None


def _degree(key: str, settings: TaskConfig, cells: int) -> Requirement:
    return (1 <= settings.degree <= 5, f"{key}.degree is {settings.degree}", "1 to 5",
            "Change it or drop propagator from the list.")


def _reach(key: str, settings: TaskConfig, cells: int) -> Requirement:
    return (0 < settings.reach <= cells // 2, f"{key}.reach is {settings.reach}",
            f"1 to {cells // 2} cells (half the grid)",
            f"Set {key}.reach={cells * 3 // 8}, or drop transport from {key}.base.")


BASES = {"persistence": Rules(), "propagator": Rules(check=_degree), "transport": Rules(check=_reach),
         "elliptic": Rules(is_steady=True)}


def serving(is_steady: bool) -> list[str]:
    """The bases for steady tasks, or for all others."""
    return [name for name, rules in BASES.items() if rules.is_steady == is_steady]
