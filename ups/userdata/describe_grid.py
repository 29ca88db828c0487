"""What --describe guesses of the grid: boundary, domain and repeated cells."""

import numpy as np

from ups.userdata.data_checks import JUMP, jumps
from ups.userdata.describe_axes import CONVERT, Guess
from ups.userdata.describe_lines import Line
from ups.userdata.grid import MOST_UNEVEN, evenness, is_globe
from ups.userdata.inspect_file import Coordinate, is_even_grid, is_monotone, single_numbers, tidy
from ups.userdata.masks import averaged, with_nan
from ups.userdata.readers import Store
from ups_discovery.boundary import DIRICHLET, NO_FLUX, PERIODIC

MATERIALS = 8  # most values of a field that is piecewise constant, such as a coefficient
SMALL = 1e-3  # of a field's standard deviation: what counts as zero at a wall


def grid_lines(guess: Guess, absent: list[str]) -> list[Line]:
    """boundary, domain and repeated, guessed from the field. absent: numbers that mean missing."""
    u = with_nan(_last_frame(guess), absent)
    u, found = averaged(u, u.ndim), guess.coordinates
    ends, repeated = {}, []
    varies = len(np.unique(u)) > MATERIALS  # ends of few values agree by chance
    for axis in guess.space:
        at = guess.words.index(axis) if axis in guess.words else None
        ends[axis] = PERIODIC if at is None else _guess_end(guess.store, axis, found.get(axis), u, at)
        if at is not None and ends[axis] == PERIODIC and u.shape[at] > 2 and varies:
            repeated += [axis] * np.array_equal(u.take(0, at), u.take(-1, at))
    same = {*ends.values()}
    note = "as the ends of the field look: periodic, no_flux, dirichlet or outflow?"
    lines = [
        Line("boundary", same.pop() if len(same) == 1 else ends, note),
        *_domain_lines(guess, ends, found),
    ]
    if repeated:
        lines.append(Line("repeated", repeated, "the last cell is the first again"))
    return lines


def _guess_end(store: Store, axis: str, found: Coordinate | None, u: np.ndarray, at: int) -> str:
    """The boundary of an axis: known for longitudes and latitudes, else guessed from the field at its
    ends."""
    units = str(store.attributes(found[0]).get("units", "")) if found else ""
    if is_globe(axis, units):
        is_turn = found is not None and abs(u.shape[at] * abs(found[1][1] - found[1][0]) - 360) < 1
        return PERIODIC if is_turn else NO_FLUX
    walls = max(float(np.abs(u.take(cell, at)).mean()) for cell in (0, -1))
    if walls < SMALL * float(u.std()):
        return DIRICHLET
    return PERIODIC if jumps(u, at) < JUMP else NO_FLUX


def _domain_lines(guess: Guess, ends: dict[str, str], found: dict[str, Coordinate]) -> list[Line]:
    """The line domain for axes without coordinates or with uneven ones."""
    lines, uneven, domain, names = [], [], {}, {}
    for axis in guess.space:
        if axis not in guess.words:
            continue
        if axis not in found:
            domain[axis] = [0.0, 1.0]
            continue
        name, x = found[axis]
        if guess.usual(axis) is None:  # the loader needs its name
            domain[axis] = names[axis] = name
        if not is_even_grid(x) and is_monotone(x):
            if (ratio := evenness(x)) > MOST_UNEVEN:
                raise ValueError(_uneven_words(guess, axis, name, x, ratio))
            steps = np.abs(np.diff(x))
            uneven.append(axis)
            domain[axis] = [tidy(float(x.min() - steps.mean() / 2)), tidy(float(x.max() + steps.mean() / 2))]
            note = (
                f"{name} has steps of {steps.min():g} to {steps.max():g}: are its cells to be counted as "
                "equal, from end to end of this domain?"
            )
            lines.append(Line(note=note))
    if not domain:
        return lines
    note = ""
    if all(isinstance(span, str) for span in domain.values()):
        note = "the arrays of the coordinates"
    elif {*domain} - {*uneven}:
        numbers = in_words(numbers_of(guess.store))
        walls = [axis for axis in domain if axis not in uneven and ends[axis] != PERIODIC]
        beyond = ", half a cell beyond the first and the last point" if walls else ""
        known = f" ({numbers})" * bool(numbers)
        note = f"the file holds no such coordinates{known}: from where to where{beyond}?"
    named = {axis: name for axis, name in names.items() if axis in uneven}
    return [*lines, *[Line("coordinates", named)] * bool(named), Line("domain", domain, note)]


def _uneven_words(guess: Guess, axis: str, name: str, x: np.ndarray, ratio: float) -> str:
    """The error message for a coordinate of steps that are too uneven to count as equal."""
    steps = np.abs(np.diff(x))
    return (
        f"{guess.store.path}: {name} has steps of {steps.min():g} to {steps.max():g}, which differ "
        f"{ratio:.3g}-fold; expected cells of equal size along {axis}. Interpolate the fields to such cells "
        f"({CONVERT}); or write the section yourself, with domain: {{{axis}: [{x.min():g}, {x.max():g}]}}, "
        f"which counts them as equal: derivatives along {axis} are then wrong by as much."
    )


def _last_frame(guess: Guess) -> np.ndarray:
    """The main field of the first trajectory at its last frame, with all axes, float64."""
    index = tuple(
        slice(0, 1) if word == "trajectory" else slice(n - 1, n) if word == "time" else slice(None)
        for word, n in guess.sizes.items()
    )
    return np.asarray(guess.store.read(guess.store.first(guess.array), index), np.float64)


def numbers_of(store: Store) -> dict[str, float]:
    """The attributes and arrays of the file, not of its groups, that are one number."""
    single = [name for name in store.names() if "/" not in name and store.array(name).shape in ((), (1,))]
    return single_numbers({name: store.read(name) for name in single} | store.attributes())


def in_words(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in numbers.items())
