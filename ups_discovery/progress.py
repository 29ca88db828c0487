"""Progress of a long fit."""

from collections.abc import Callable

# is called at least every few seconds, with what a fit does, the work until the next call, and whether it is
# clear that the fit will explain the data
listener: Callable[[str, float, bool], None] | None = None
# nominal seconds of an evaluation of terms, and of a term in a cell (docs/lab/log.md)
EVALUATION, VALUE, MORE_TERMS = 2e-4, 6e-9, 4


def beat(doing: str = "", work: float = 0.0, is_promising: bool = False) -> None:
    """Tell the listener, if there is one, what a fit does from now on. It may raise to end the fit."""
    if listener is not None:
        listener(doing, work, is_promising)


def evaluation(num_values: int, num_terms: int) -> float:
    """Work of an evaluation of a right-hand side: by its size, as no fit may depend on a clock."""
    return EVALUATION + VALUE * num_values * (MORE_TERMS + num_terms)
