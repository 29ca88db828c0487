"""Equations of fields from their films: terms, coefficients with intervals, right-hand side.

    equation = ups_discovery.identify(u, dt=0.1, cell=[0.05])
    print(equation)

Needs torch and NumPy alone, and knows no package that uses it. `equation.py` and what it imports evaluate and
integrate an equation; the other modules fit one. torch is imported by the first `identify`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ups_discovery.found import FoundEquation

__all__ = ["identify"]


def identify(
    u: "Tensor",
    dt: float,
    cell: Sequence[float],
    boundary: str = "periodic",
    fields: Sequence[str] = (),
    positive: Sequence[str] = (),
    seed: int = 0,
) -> "FoundEquation":
    """The equation of films u (films, time, channel, *space): the first of `search.candidates` that nothing
    speaks against, else the first one, whose `doubt` says why it should not be stated.

    dt: time between frames. cell: width of a cell along each axis. boundary: one name of `boundary.py`, or
    one per axis joined by commas. fields: names of the channels; u, or u1, u2, .. if there are several.
    positive: fields whose logarithm is differentiated. Raises ValueError for films of another shape or with
    values that are not finite, and if no equation explains them better than persistence.
    """
    from ups_discovery.search import identify

    return identify(u, dt, cell, boundary, fields, positive, seed)
