"""Progress of a long fit."""

from collections.abc import Callable

listener: Callable[[str], None] | None = None  # is called at least every few seconds


def beat(doing: str = "") -> None:
    """Tell the listener, if there is one, that a fit goes on, and what it does from now on."""
    if listener is not None:
        listener(doing)
