"""The grid of user data: boundary and ends of every axis, the order of its cells, and a patch.

Values lie at the centres of equal cells. If the first and the last point of an axis lie on its walls, as
those of np.linspace(0, 1, 33) do, the domain reaches half a cell beyond them: the bases place a wall there.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ups.common.lazy import np
from ups.tasks import Place
from ups.userdata.inspect_file import (
    UNEVEN,
    ConfigError,
    Coordinate,
    coordinate,
    is_even,
    is_even_grid,
    require_known,
    rises,
    tidy,
)
from ups.userdata.readers import Store
from ups_discovery.boundary import BOUNDARIES, PERIODIC

MOST_TOKENS = {1: 256, 2: 64, 3: 32}  # per axis, of a patch that is chosen
TINY = 1e-6  # of an axis, what counts as zero
DOMAIN_TOLERANCE = 0.1  # of a cell, by which a domain may differ from the coordinates
MOST_UNEVEN = (
    1.5  # largest step over the smallest, up to which cells may count as equal: Gaussian grids have 1.1
)


def read_boundary(key: str, boundary: Any, axes: Sequence[str]) -> list[str]:
    """The boundary of each axis, from one name for all axes, a list, or a mapping. Raises ValueError."""
    if isinstance(boundary, Mapping):
        ends = [boundary.get(axis, "") for axis in axes]
    else:
        ends = list(boundary) if isinstance(boundary, list) else str(boundary).split(",")
    is_complete = not isinstance(boundary, Mapping) or {*boundary} == {*axes}
    if len(ends) not in (1, len(axes)) or not {*map(str, ends)} <= {*BOUNDARIES} or not is_complete:
        raise ConfigError(
            f"{key}.boundary: {f'it is {boundary!r:.80}' if boundary else 'it is missing'}; expected one "
            f"of {', '.join(BOUNDARIES)}, or one per axis ({', '.join(axes)}). Write boundary: periodic, or "
            f"boundary: {{{', '.join(f'{axis}: no_flux' for axis in axes)}}}."
        )
    return ends * len(axes) if len(ends) == 1 else ends


def without_repeated(
    key: str, repeated: Sequence[str], sizes: dict[str, int], ends: Mapping[str, str]
) -> dict[str, int]:
    """The length of every axis without the last cell of the axes in `repeated`, where it is the first again.
    Raises ValueError for an axis that is not periodic."""
    periodic = [axis for axis, end in ends.items() if end == PERIODIC]
    require_known(f"{key}.repeated", repeated, periodic, "periodic axes")
    return sizes | {axis: sizes[axis] - 1 for axis in repeated}


def find_coordinates(
    key: str, names: Mapping[str, str], axes: Sequence[str], places: Sequence[Place], store: Store
) -> dict[str, Coordinate | None]:
    """Axis -> its coordinate in a file. names: axis -> the array of its coordinate, if it has another name.
    Raises ValueError if such an array is missing."""
    found = {axis: coordinate(store, places, [names.get(axis) or axis]) for axis in axes}
    for axis in axes:
        if names.get(axis) and found[axis] is None:
            of_axis = next(place for place in places if axis in place.axes)
            size = store.first_array(of_axis.array).shape[of_axis.axes.index(axis)]
            raise ConfigError(
                f"{key}.domain: {store.path} holds no array {names[axis]!r:.80} of coordinates; expected two "
                f"numbers, or the name of one. {_domain_example(axis, size, store)} It holds "
                f"{store.listing()}."
            )
    return found


def read_domain(
    key: str, domain: Any, axis: str, end: str, size: int, found: Coordinate | None, store: Store
) -> list[float]:
    """(low, high) of an axis of `size` cells: from its coordinate, or from the section.

    domain: of the section, for all axes or by axis; found: the coordinate of the axis. Cells lie between low
    and high: if points lie on both walls, half a cell is added on each side. Raises ValueError if the two do
    not fit each other, or if both are missing.
    """
    given = domain.get(axis) if isinstance(domain, Mapping) else domain
    given = None if isinstance(given, str) else given
    _check_ends(key, axis, given, size, found, store)
    if found is None:
        return [float(x) for x in given]
    place, x = found
    x = x[:size] if end == PERIODIC and len(x) == size + 1 else x  # the last point is the first again
    if len(x) != size:
        raise ConfigError(
            f"{key}.layout: the axis called {axis} has {size} cells and the array {place} in {store.path} "
            f"{len(x)} numbers; expected {size} numbers. Are the words in the order of the axes? "
            f"{store.listing()}."
        )
    x = x[::-1] if rises(x[::-1]) else x
    step = (x[-1] - x[0]) / max(1, size - 1) if size > 1 else 1.0
    if size > 1 and not is_even(x):
        return _uneven_domain(key, axis, x, given, step, f"{place} in {store.path}")
    low = x[0] - step / 2 if end != PERIODIC or abs(x[0] - step / 2) < UNEVEN * step else x[0]
    edges = [tidy(value) for value in (low, low + size * step)]
    if not given or size == 1:
        return edges
    length, apart = given[1] - given[0], DOMAIN_TOLERANCE * step
    is_cells = abs(length - size * step) <= apart and -apart <= x[0] - given[0] <= step + apart
    is_points = end != PERIODIC and abs(length - (size - 1) * step) <= apart and abs(x[0] - given[0]) <= apart
    if not (is_cells or is_points):
        raise ConfigError(
            f"{key}.domain: that of {axis} is {given}, and {place} in {store.path} runs from {x[0]:g} to "
            f"{x[-1]:g} in steps of {step:g}; expected what the file says, {edges}. Write domain: {{{axis}: "
            f"{edges}}}, or leave it out."
        )
    return [float(v) for v in given] if is_cells else edges


def _check_ends(key: str, axis: str, given: Any, size: int, found: Coordinate | None, store: Store) -> None:
    """Raise ValueError if the ends of an axis are no two numbers, or missing where no coordinate is found."""
    is_pair = (
        isinstance(given, list)
        and len(given) == 2
        and all(isinstance(x, int | float) and math.isfinite(x) for x in given)
        and given[0] < given[1]
    )
    if is_pair or (found is not None and not given):
        return
    example = _domain_example(axis, size, store)
    if given:
        raise ConfigError(
            f"{key}.domain: that of {axis} is {given!r:.80}; expected two numbers, the lower first. {example}"
        )
    raise ConfigError(
        f"{key}.domain: it is missing for {axis}, and {store.path} holds no coordinate of that name; "
        f"expected where the axis begins and ends. {example}"
    )


def _domain_example(axis: str, size: int, store: Store) -> str:
    """How to write a domain, with the name of an array of `size` numbers if the file holds one."""
    name = next((name for name in store.names() if store.array(name).shape == (size,)), "")
    ends = f"{name}, ..}}, the array of its coordinates." if name else "[0, 1], ..}."
    return f"Write domain: [0, 1], or domain: {{{axis}: {ends}"


def _uneven_domain(key: str, axis: str, x: "np.ndarray", given: Any, step: float, where: str) -> list[float]:
    """The ends that the section gives an axis of uneven cells, which then count as equal."""
    is_near = given and abs(given[0] - x[0]) <= step and abs(given[1] - x[-1]) <= step
    if is_near and rises(x):
        return [float(v) for v in given]
    fix = "Sort the cells along it, or leave that axis out."
    if rises(x):
        fix = (
            f"Write domain: {{{axis}: [{x[0]:g}, {x[-1]:g}]}} to count its cells as equal, as those of a "
            "Gaussian grid nearly are; or resample the fields to an even grid."
        )
    raise ConfigError(
        f"{key}.layout: {where} runs from {x[0]:g} to {x[-1]:g} in steps of {np.diff(x).min():g} to "
        f"{np.diff(x).max():g}; expected equal steps. {fix}"
    )


def evenness(x: "np.ndarray") -> float:
    """The largest step of a coordinate over the smallest; 1 of an even one."""
    if is_even_grid(x):
        return 1.0
    steps = np.abs(np.diff(x))
    return float(steps.max() / max(steps.min(), TINY * steps.max()))


def is_globe(axis: str, units: str = "") -> bool:
    """Whether an axis is of latitudes or longitudes, by its name or its units."""
    return axis.lower().startswith(("lat", "lon")) or units.startswith(("degrees_n", "degrees_e"))


def flipped_axes(key: str, flipped: Sequence[str], found: Mapping[str, Coordinate | None]) -> list[str]:
    """The axes whose cells are stored from the last to the first: by their coordinates, and by `flipped`
    where the file holds none. Raises ValueError if `flipped` names no axis."""
    require_known(f"{key}.flipped", flipped, [*found], "axes of space")
    return [axis for axis, there in found.items() if (rises(there[1][::-1]) if there else axis in flipped)]


def choose_patch(cells: Sequence[int], least: int) -> int:
    """A patch that divides every axis: `least`; more if tokens would be many, less if the grid has no such
    divisor."""
    most = MOST_TOKENS[len(cells)]
    fitting = [p for p in range(1, 17) if all(n % p == 0 and n // p >= min(n, 4) for n in cells)]
    enough = [p for p in fitting if p >= least and max(cells) // p <= most]
    return min(enough) if enough else max(fitting)
