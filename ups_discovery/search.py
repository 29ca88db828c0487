"""The equations that explain data: a deterministic one, one by the weak form, the drift of a stochastic one,
each with its certainty."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ups_discovery.boundary import BOUNDARIES, PERIODIC
from ups_discovery.certainty import Certainty, of_drift, of_equation
from ups_discovery.data import Data, Films
from ups_discovery.doubts import UNCLEAR
from ups_discovery.drift import Drift
from ups_discovery.equation import Equation
from ups_discovery.found import FoundEquation
from ups_discovery.identification import Identification, terms_of
from ups_discovery.integrate import Model
from ups_discovery.progress import beat
from ups_discovery.shooting import leaves_kicks
from ups_discovery.statement import described

NOISY = 0.7  # error one frame ahead relative to persistence, above which a drift is fitted as well
# of the standard deviation: noise that films without any are taken to have, for the width of test functions
QUIET = 0.01
MIN_FRAMES = 3  # of a central difference in time
AXES = ("x", "y", "z")

E = TypeVar("E", bound=Equation)
Candidate = tuple[str, dict[str, Any], E]  # name with the number of terms, settings, equation


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
    identifications, equations, certainties = identified(data, settings)
    has_equation = None not in equations
    if has_equation:
        title = "equation of {} terms"
        yield candidate(equations, certainties, identifications, data, settings, make, title)
    if data.is_cut and all(one.noise is None for one in identifications):
        smooth, models, assessed = identified(data, settings, QUIET)
        if None not in models and not any(one.doubt for one in assessed):
            title = "equation of {} terms by its weak form"
            yield candidate(models, assessed, smooth, data, settings, make, title)
            return None
    if has_equation and not any(
        is_noise(*found) for found in zip(identifications, equations, certainties, strict=True)
    ):
        return None
    drifts, certainties = [], []
    for value in range(num_values):
        beat(f"the drift of parameter value {value + 1} of {num_values}")
        if value == len(identifications):
            identifications.append(Identification(data, settings, value))
        drift = Drift(identifications[value], data, value)
        drifts.append(drift.model())
        if drifts[-1] is None:
            return (
                f"no {'drift' if has_equation else 'terms'} of parameter value {value + 1} "
                f"of {num_values} beat persistence on training data held out"
            )
        certainties.append(of_drift(drift, drifts[-1]))
    yield candidate(drifts, certainties, identifications, data, settings, make, "drift of {} terms")
    if has_equation:
        return None
    return (
        f"no equation of parameter value {len(equations)} of {num_values} beats persistence on training data "
        "held out; its drift does"
    )


def is_noise(one: Identification, model: Model, certainty: Certainty) -> bool:
    """Whether most of what happens from frame to frame is noise to an equation, other than kicks."""
    if one.noise is not None and certainty.doubt != UNCLEAR:
        return False
    if one.is_shot and leaves_kicks(one, model):
        return False
    return one.error(model, one.held_out_windows[:, : 2 if one.noise is None else None]) > NOISY


def identified(
    data: Data, settings: dict[str, Any], least_noise: float = 0.0
) -> tuple[list[Identification], list[Model | None], list[Certainty]]:
    """The equations of all parameter values, up to the first one without any (None), with their
    certainties. least_noise: as in `Identification`."""
    identifications: list[Identification] = []
    equations: list[Model | None] = []
    certainties: list[Certainty] = []
    for value in range(settings["num_values"]):
        beat(f"the equation of parameter value {value + 1} of {settings['num_values']}")
        identifications.append(Identification(data, settings, value, least_noise))
        equations.append(identifications[-1].model())
        if equations[-1] is None:
            break
        certainties.append(of_equation(identifications[-1], equations[-1]))
    return identifications, equations, certainties


def candidate(
    models: Sequence[Model],
    certainties: Sequence[Certainty],
    identifications: Sequence[Identification],
    data: Data,
    settings: dict[str, Any],
    make: Callable[..., E],
    title: str,
) -> Candidate:
    """The candidate of the models of all parameter values."""
    library = identifications[0].library
    terms, weight = terms_of(models, library)
    settings = {
        **settings,
        "terms": terms,
        "num_steps": max(model.num_steps for model in models),
        "is_stiff": any(model.is_stiff for model in models),
        "is_coupled": any(model.is_coupled for model in models),
        **({"is_finer": True} if any(model.is_finer for model in models) else {}),
        "found": described(models, certainties, library, terms, data.units, settings),
    }
    equation = make(**settings)
    low, high = zip(*[one.bounds for one in identifications], strict=True)
    equation.weight.copy_(weight)
    equation.low.copy_(torch.stack(low).amin(0))
    equation.high.copy_(torch.stack(high).amax(0))
    return f"{title.format(len(terms))}, {settings['num_steps']} steps a frame", settings, equation


def identify(
    u: Tensor,
    dt: float,
    cell: Sequence[float],
    boundary: str,
    fields: Sequence[str],
    positive: Sequence[str],
    seed: int,
) -> FoundEquation:
    """See `ups_discovery.identify`."""
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
    shape, ends = tuple(u.shape), boundary.split(",")
    for is_right, wrong, expected in (
        (
            u.ndim in (4, 5, 6),
            f"films have the shape {shape}",
            "films, time, channel and 1 to 3 axes",
        ),
        (
            len(cell) == u.ndim - 3,
            f"cell is {[*cell]}",
            f"the width of a cell along {u.ndim - 3} axes",
        ),
        (
            {*ends} <= {*BOUNDARIES} and len(ends) in (1, u.ndim - 3),
            f"boundary is {boundary!r}",
            f"one of {', '.join(BOUNDARIES)}, or one per axis joined by commas",
        ),
        (u.ndim < 4 or len(fields) == u.shape[2], f"fields are {[*fields]}", "one name for every channel"),
        ({*positive} <= {*fields}, f"positive is {[*positive]}", f"some of the fields {[*fields]}"),
    ):
        if not is_right:
            raise ValueError(f"{wrong}; expected {expected}. Change the arguments of identify.")
    if not bool(u.isfinite().all()):
        raise ValueError("films have values that are not finite; expected none. Leave those frames out.")
    for name in positive:
        if not bool((u[:, :, fields.index(name)] > 0).all()):
            raise ValueError(f"{name} has values of 0 or less; expected none. Leave it out of positive.")
