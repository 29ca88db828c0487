"""Signs of life of a long fit."""

from collections.abc import Callable

listener: Callable[[], None] | None = None  # is called every few seconds or more often


def beat() -> None:
    """Call the listener, if there is one."""
    if listener is not None:
        listener()
