"""The equations that explain data: a deterministic one, one by the weak form, the drift of a stochastic one,
each with its certainty."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ups_discovery.boundary import BOUNDARIES, PERIODIC
from ups_discovery.certainty import UNCLEAR, Certainty
from ups_discovery.data import Data, Films
from ups_discovery.differences import GOOD_ERROR, Differences
from ups_discovery.drift import Drift
from ups_discovery.equation import Equation
from ups_discovery.integrator import Integrator, Model
from ups_discovery.progress import beat
from ups_discovery.shooting import Shooting, last_shooting, shot_model
from ups_discovery.statement import FoundEquation, described
from ups_discovery.weak import NoisyFilms
from ups_discovery.windows import FilmWindows

NOISY = 0.7  # error one frame ahead relative to persistence, above which a drift is fitted as well
# of the standard deviation: noise that films without any are taken to have, for the width of test functions
LITTLE_NOISE = 0.01
MIN_FRAMES = 3  # of a central difference in time
AXES = ("x", "y", "z")

E = TypeVar("E", bound=Equation)
Candidate = tuple[str, dict[str, Any], E]  # name with the number of terms, settings, equation
Route = Differences | Shooting | NoisyFilms | Drift


class Identified(NamedTuple):
    """The equation of one parameter value, and the route to it."""

    route: Route
    model: Model
    certainty: Certainty

    @property
    def is_noise(self) -> bool:
        """Whether most of what happens from frame to frame is noise to the equation, other than kicks."""
        one, s = self.route.one, self.route.one.windows.held_out
        if isinstance(self.route, NoisyFilms) and self.certainty.doubt != UNCLEAR:
            return False
        if isinstance(self.route, Shooting) and self.route.leaves_kicks(self.model):
            return False
        return one.error(self.model, s if isinstance(self.route, NoisyFilms) else s[:, :2]) > NOISY


def equation_of(one: Integrator, least_noise: float = 0.0) -> tuple[Route, Model] | None:
    """The route to the equation of one parameter value and the equation, or None if none beats persistence on
    held-out trajectories. With noise of measurement: the weak form. Else differences in time and, if the next
    frame has a large error, shooting. least_noise: of `FilmWindows`."""
    if one.windows.noise is not None:
        return NoisyFilms.of(one, least_noise)
    differences, s = Differences(one), one.windows.held_out[:, :2]
    found = differences.model()
    if found is not None and one.error(found, s) <= GOOD_ERROR:
        return differences, found
    shot = shot_model(one, found)
    if shot is not None and (found is None or one.error(shot, s) < one.error(found, s)):
        return last_shooting(one), shot
    return None if found is None else (differences, found)


def candidates(
    data: Data, settings: dict[str, Any], make: Callable[..., E]
) -> Generator[Candidate, None, str | None]:
    """Yield the equation and, if a frame is mostly noise to it, the drift of a stochastic equation; return
    why others are missing, or None.

    Neither is yielded if, for some parameter value, it does not beat persistence on held-out trajectories.
    For films without noise that were cut into windows, the equation by the weak form comes second, in place
    of the drift, if nothing speaks against it: differences of frames far apart fail.

    settings: num_values (of parameters), num_channels, space, boundary, lengths (in cells), cell (width along
    each axis), dt (1.0: in frames), frame (time between frames), positive (channels), and optionally
    vorticity and driven (see `library`). make: builds an `Equation` from settings.
    """
    if data.num_frames < MIN_FRAMES:
        return (
            f"an estimate of time derivatives needs {MIN_FRAMES} frames, and the data have {data.num_frames}"
        )
    num_values = settings["num_values"]
    integrators, found = identified(data, settings)
    has_equation = len(found) == num_values
    if has_equation:
        yield candidate(found, data, settings, make, "equation of {} terms")
    if data.is_cut and all(one.windows.noise is None for one in integrators):
        _, smooth = identified(data, settings, LITTLE_NOISE)
        if len(smooth) == num_values and not any(one.certainty.doubt for one in smooth):
            yield candidate(smooth, data, settings, make, "equation of {} terms by its weak form")
            return None
    if has_equation and not any(one.is_noise for one in found):
        return None
    drifts = []
    for value in range(num_values):
        beat(f"the drift of parameter value {value + 1} of {num_values}")
        drift = Drift(integrators[value], data, value)
        if (model := drift.model()) is None:
            return (
                f"no {'drift' if has_equation else 'terms'} of parameter value {value + 1} "
                f"of {num_values} beat persistence on training data held out"
            )
        drifts.append(Identified(drift, model, drift.certainty(model)))
    yield candidate(drifts, data, settings, make, "drift of {} terms")
    if has_equation:
        return None
    return (
        f"no equation of parameter value {len(found) + 1} of {num_values} beats persistence on training data "
        "held out; its drift does"
    )


def identified(
    data: Data, settings: dict[str, Any], least_noise: float = 0.0
) -> tuple[list[Integrator], list[Identified]]:
    """The integrators of all parameter values, and their equations up to the first value without one.
    least_noise: of `FilmWindows`."""
    num_values = settings["num_values"]
    windows = [FilmWindows.of(data, settings, value, least_noise) for value in range(num_values)]
    integrators, found = [Integrator(settings, of_value) for of_value in windows], []
    for value, one in enumerate(integrators, 1):
        beat(f"the equation of parameter value {value} of {num_values}")
        if (route_and_model := equation_of(one, least_noise)) is None:
            break
        route, model = route_and_model
        found.append(Identified(route, model, route.certainty(model)))
    return integrators, found


def candidate(
    found: list[Identified], data: Data, settings: dict[str, Any], make: Callable[..., E], title: str
) -> Candidate:
    """The candidate of the equations of all parameter values."""
    library, models = found[0].route.one.library, [one.model for one in found]
    used = sorted({term for model in models for _, term in model.unknowns})
    terms, num_channels = [library[term] for term in used], settings["num_channels"]
    weight = torch.zeros(len(models), num_channels, len(used))
    for row, model in zip(weight, models, strict=True):
        for (channel, term), value in zip(model.unknowns, model.values.tolist(), strict=True):
            row[channel, used.index(term)] = value
    settings = {
        **settings,
        "terms": terms,
        "num_steps": max(model.num_steps for model in models),
        "is_stiff": any(model.is_stiff for model in models),
        "is_coupled": any(model.is_coupled for model in models),
        **({"is_finer": True} if any(model.is_finer for model in models) else {}),
        "found": described(models, [one.certainty for one in found], library, terms, data.units, settings),
    }
    equation = make(**settings)
    low, high = zip(*[one.route.one.windows.bounds for one in found], strict=True)
    equation.weight.copy_(weight)
    equation.low.copy_(torch.stack(low).amin(0))
    equation.high.copy_(torch.stack(high).amax(0))
    return f"{title.format(len(terms))}, {settings['num_steps']} steps a frame", settings, equation


def identify(
    u: Tensor,
    dt: float,
    cell: Sequence[float],
    boundary: str = "periodic",
    fields: Sequence[str] = (),
    positive: Sequence[str] = (),
    seed: int = 0,
) -> FoundEquation:
    """The equation of films u (films, time, channel, *space): the first of `candidates` that nothing speaks
    against, else the first one, whose `doubt` says why it should not be stated.

    dt: time between frames. cell: width of a cell along each axis. boundary: one name of `boundary.py`, or
    one per axis joined by commas. fields: names of the channels; u, or u1, u2, .. if there are several.
    positive: fields whose logarithm is differentiated. Raises ValueError for films of another shape or with
    values that are not finite, and if no equation explains them better than persistence.
    """
    space, num_channels = list(u.shape[3:]), u.shape[2] if u.ndim > 3 else 0
    fields = fields or (["u"] if num_channels == 1 else [f"u{number + 1}" for number in range(num_channels)])
    require_films(u, cell, boundary, fields, positive)
    channels = [fields.index(name) for name in positive]
    is_scalar = num_channels == 1 and not positive and boundary == PERIODIC
    settings = {
        "num_values": 1,
        "num_channels": num_channels,
        "space": space,
        "boundary": boundary,
        "lengths": [float(n) for n in space],
        "cell": [float(width) for width in cell],
        "dt": 1.0,
        "frame": dt,
        "positive": channels,
        "vorticity": [0] if is_scalar and len(space) == 2 else [],
    }
    doubted = None
    for *_, equation in candidates(Films.of(u, channels, seed), settings, Equation):
        found = FoundEquation.of(equation, fields, AXES[: len(space)], dt)
        if not found.doubt:
            return found
        doubted = doubted or found
    if doubted is None:
        raise ValueError(
            "no equation explains the films better than persistence does; expected fields that change little "
            "from frame to frame. Pass frames that are closer in time, or more films."
        )
    return doubted


def require_films(
    u: Tensor, cell: Sequence[float], boundary: str, fields: Sequence[str], positive: Sequence[str]
) -> None:
    """Raise ValueError unless the arguments of `identify` belong together."""
    shape, ends, ndim = tuple(u.shape), boundary.split(","), u.ndim - 3
    is_right = {
        f"films have the shape {shape}; expected films, time, channel and 1 to 3 axes": ndim in (1, 2, 3),
        f"cell is {[*cell]}; expected the width of a cell along {ndim} axes": len(cell) == ndim,
        f"boundary is {boundary!r}; expected one of {', '.join(BOUNDARIES)}, or one per axis joined by "
        "commas": {*ends} <= {*BOUNDARIES} and len(ends) in (1, ndim),
        f"fields are {[*fields]}; expected one name for every channel": ndim < 1 or len(fields) == shape[2],
        f"positive is {[*positive]}; expected some of the fields {[*fields]}": {*positive} <= {*fields},
    }
    if wrong := [text for text, fine in is_right.items() if not fine]:
        raise ValueError(f"{wrong[0]}. Change the arguments of identify.")
    if not bool(u.isfinite().all()):
        raise ValueError("films have values that are not finite; expected none. Leave those frames out.")
    for name in positive:
        if not bool((u[:, :, fields.index(name)] > 0).all()):
            raise ValueError(f"{name} has values of 0 or less; expected none. Leave it out of positive.")
