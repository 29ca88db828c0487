"""Progress of a long fit."""

from collections.abc import Callable

# is called at least every few seconds, with what a fit does and the work until the next call
listener: Callable[[str, float], None] | None = None
# nominal seconds of an evaluation of terms, and of a term in a cell (docs/lab/log.md)
EVALUATION, VALUE, MORE_TERMS = 2e-4, 6e-9, 4


def beat(doing: str = "", work: float = 0.0) -> None:
    """Tell the listener, if there is one, what a fit does from now on. It may raise to end the fit."""
    if listener is not None:
        listener(doing, work)


def evaluation(num_values: int, num_terms: int) -> float:
    """Work of an evaluation of a right-hand side: by its size, as no fit may depend on a clock."""
    return EVALUATION + VALUE * num_values * (MORE_TERMS + num_terms)
