"""The grid of the user's own files: where its axes begin and end, the order of its cells, and the patch that
divides it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ups.common.boundary import PERIODIC
from ups.common.lazy import np
from ups.tasks import Place
from ups.userdata.inspect_file import UNEVEN, coordinate, rises, tidy, wrong

if TYPE_CHECKING:
    from ups.userdata.readers import Store

MOST_TOKENS = {1: 256, 2: 64, 3: 32}  # per axis, of a patch that is chosen


def span(
    key: str,
    said: Any,
    axis: str,
    end: str,
    size: int,
    store: "Store",
    places: Sequence[Place],
    called: str = "",
) -> list[float]:
    """(low, high) of an axis, as said and checked against its coordinate (`called` otherwise than the axis,
    where that was said), or as that shows it. Cells lie between them: of a grid whose points lie on both
    walls, half a cell is added on each side.
    """
    given = said.get(axis) if isinstance(said, Mapping) else said
    asked, given = (given, None) if isinstance(given, str) else (called, given)
    found = coordinate(store, places, [asked or axis])
    named = [name for name in store.names() if store.array(name).shape == (size,)]
    example = f"Write domain: [0, 1], or domain: {{{axis}: {named[0] if named else '[0, 1]'}, ..}}" + (
        ", the array of its coordinates." if named else "."
    )
    if asked and found is None:
        raise wrong(
            f"{key}.domain",
            f"{store.path} holds no array {asked!r:.80} of coordinates",
            "two numbers, or the name of one",
            f"{example} It holds {store.listing()}.",
        )
    if given and not (
        isinstance(given, list)
        and len(given) == 2
        and all(isinstance(x, int | float) and math.isfinite(x) for x in given)
        and given[0] < given[1]
    ):
        raise wrong(
            f"{key}.domain", f"that of {axis} is {given!r:.80}", "two numbers, the lower first", example
        )
    if found is None:
        if not given:
            raise wrong(
                f"{key}.domain",
                f"it is missing for {axis}, and {store.path} holds no coordinate of that name",
                "where the axis begins and ends",
                example,
            )
        return [float(x) for x in given]
    place, x = found
    x = x[:size] if end == PERIODIC and len(x) == size + 1 else x  # the last is the first again
    if len(x) != size:
        raise wrong(
            f"{key}.layout",
            f"the axis called {axis} has {size} cells and the array {place} in {store.path} {len(x)} numbers",
            "as many",
            f"Are the words in the order of the axes? {store.listing()}.",
        )
    x = x[::-1] if rises(x[::-1]) else x
    step = (x[-1] - x[0]) / max(1, size - 1) if size > 1 else 1.0
    if size > 1 and not (step > 0 and np.ptp(np.diff(x)) <= UNEVEN * step):
        is_near = given and abs(given[0] - x[0]) <= step and abs(given[1] - x[-1]) <= step
        if is_near and rises(x):  # what is said wins, as of a dt
            return [float(v) for v in given]
        raise wrong(
            f"{key}.layout",
            f"{place} in {store.path} runs from {x[0]:g} to {x[-1]:g} in steps of "
            f"{np.diff(x).min():g} to {np.diff(x).max():g}",
            "equal steps",
            f"Write domain: {{{axis}: [{x[0]:g}, {x[-1]:g}]}} to count its cells as equal, as those "
            "of a Gaussian grid nearly are; or resample the fields to an even grid."
            if rises(x)
            else "Sort the cells along it, or leave that axis out.",
        )
    low = x[0] - step / 2 if end != PERIODIC or abs(x[0] - step / 2) < UNEVEN * step else x[0]
    shown = [tidy(value) for value in (low, low + size * step)]
    if given and size > 1:
        length = given[1] - given[0]
        is_cells = abs(length - size * step) <= 0.1 * step and -0.1 * step <= x[0] - given[0] <= 1.1 * step
        is_nodes = (
            end != PERIODIC
            and abs(length - (size - 1) * step) <= 0.1 * step
            and abs(x[0] - given[0]) <= 0.1 * step
        )
        if not (is_cells or is_nodes):
            raise wrong(
                f"{key}.domain",
                f"that of {axis} is {given}, and {place} in {store.path} runs from "
                f"{x[0]:g} to {x[-1]:g} in steps of {step:g}",
                f"what the file says, {shown}",
                f"Write domain: {{{axis}: {shown}}}, or leave it out.",
            )
        return [float(v) for v in given] if is_cells else shown
    return shown


def flipped(
    key: str,
    said: Any,
    axes: Sequence[str],
    store: "Store",
    places: Sequence[Place],
    called: Mapping[str, str],
) -> list[str]:
    """The axes along which a file stores its cells from the last to the first: by their coordinates, or as
    said where it holds none."""
    if not isinstance(said, list) or not {*said} <= {*axes}:
        raise wrong(
            f"{key}.flipped",
            f"it is {said!r:.80}",
            f"a list of axes, of {', '.join(axes)}",
            f"Write flipped: [{axes[0]}] where cells are stored from the last to the first.",
        )
    found = {axis: coordinate(store, places, [called.get(axis) or axis]) for axis in axes}
    return [axis for axis, there in found.items() if (rises(there[1][::-1]) if there else axis in said)]


def patch_for(cells: Sequence[int]) -> int:
    """A patch that divides every axis: 4, more where tokens would be many, less where the grid asks for
    it."""
    most = MOST_TOKENS[len(cells)]
    fitting = [p for p in range(1, 17) if all(n % p == 0 and n // p >= min(n, 4) for n in cells)]
    enough = [p for p in fitting if p >= 4 and max(cells) // p <= most]
    return min(enough) if enough else max(fitting)
