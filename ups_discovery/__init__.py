"""Equations of fields from their films: terms, coefficients with intervals, right-hand side.

    equation = ups_discovery.identify(u, dt=0.1, cell=[0.05])
    print(equation)

Needs torch and NumPy alone, and knows no package that uses it. `equation.py` and what it imports evaluate and
integrate an equation. The other modules fit one: windows of the data (windows.py), a library of terms
(library.py), rollouts (integrator.py), a route to the terms and coefficients (differences.py, shooting.py,
weak.py, drift.py), each with its certainty (certainty.py), and the search among them (search.py). torch is
imported by the first `identify`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups_discovery.search import identify

__all__ = ["identify"]


def __getattr__(name: str) -> Any:
    if name != "identify":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ups_discovery.search import identify

    return identify
