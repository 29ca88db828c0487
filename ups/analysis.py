"""Observations into an ensemble, frame by frame: a local ensemble transform Kalman filter, `ups.assimilate`.

    x_a = mean + X (w_mean + W),   W = sqrt((N - 1) P),   w_mean = P Y^T R^-1 (y - mean(h)),
    P = (Y^T R^-1 Y + (N - 1) 1)^-1

X and Y hold the deviations of N members and of their observed values. Every cell has its own P, in which
R^-1 is multiplied by a function of the distance that falls to 0 at `radius` (Gaspari and Cohn 1999, equation
4.10). Deviations are then multiplied by `inflation`, and turned at random without a change of mean and
covariance, which keeps members Gaussian (Hunt, Kostelich and Szunyogh 2007; Sakov and Oke 2008).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ups.common.device import plain_torch
from ups.forecast_inputs import Values, check_random
from ups.forecast_measured import observed
from ups.forecast_xarray import Field, as_tensor
from ups_discovery.boundary import PERIODIC, along
from ups_discovery.seeds import generator

MOST_NUMBERS = 2**26  # in a block of cells: members squared, and observed values


@dataclass(frozen=True)
class Analysis:
    """The state given all observations up to its frame, of the kind of the ensemble.

    frames: their numbers. mean, spread (frames, C, *space): of the members after the observations,
    spread their standard deviation; forecast (frames, C, *space): the mean before. members (N, [history,]
    C, *space): the last ones, from which the next call goes on.
    """

    frames: list[int]
    mean: Any
    spread: Any
    forecast: Any
    members: Any


def taper(distance: Tensor) -> Tensor:
    """The function of Gaspari and Cohn: 1 at 0, 0 from 1 on."""
    r = 2 * distance
    near = 1 + r**2 * (-5 / 3 + r * (5 / 8 + r * (1 / 2 - r / 4)))
    far = 4 - 5 * r + r**2 * (5 / 3 + r * (5 / 8 + r * (-1 / 2 + r / 12))) - 2 / (3 * r.clamp_min(0.5))
    return torch.where(r < 1, near, torch.where(r < 2, far, 0.0)).clamp_min(0.0)


def distances(known: Mapping[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """The distance (a, b) of flat cells a and b of the grid of a task, around periodic axes."""
    space, ends = known["grid"], along(known["boundary"], len(known["grid"]))
    domain = known["domain"]
    spans = domain if isinstance(domain[0], list | tuple) else [domain] * len(space)
    lengths = [high - low for low, high in spans]

    def between(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(a), len(b), dtype=torch.float64)
        places = zip(torch.unravel_index(a, space), torch.unravel_index(b, space), strict=True)
        for (one, two), n, end, length in zip(places, space, ends, lengths, strict=True):
            off = (one[:, None] - two).abs()
            off = torch.minimum(off, n - off) if end == PERIODIC else off
            total += (off * (length / n)).square()
        return total.sqrt()

    return between


def mixed(members: int, rng: torch.Generator) -> Tensor:
    """A random orthogonal matrix (N, N) that keeps the vector of ones."""
    basis = torch.linalg.qr(torch.eye(members).double()[:, : members - 1] - 1 / members)[0]
    turn = torch.linalg.qr(torch.randn(members - 1, members - 1, generator=rng, dtype=torch.float64))[0]
    return basis @ turn @ basis.mT + 1 / members


def analysed(
    x: Tensor,
    predicted: Tensor,
    values: Tensor,
    noise: Tensor,
    weight: Callable[[Tensor], Tensor],
    inflation: float,
    turn: Tensor,
) -> Tensor:
    """Members x (N, numbers, cells) after an observation. predicted (N, k), values and noise (k,): h(x) and
    what was observed. weight: of cells (n,), (n, k) between 0 and 1. turn (N, N): of the deviations."""
    num, mean = len(x), x.mean(0)
    deviations, y = x - mean, (predicted - predicted.mean(0)) / noise
    off = (values - predicted.mean(0)) / noise
    blocks, size = [], max(1, MOST_NUMBERS // (num * (num + len(values))))
    for cells in torch.arange(x.shape[2]).split(size):
        scaled = weight(cells)[:, None] * y  # (cells, N, k)
        value, vector = torch.linalg.eigh(scaled @ y.mT + (num - 1) * torch.eye(num).to(y))
        towards = (vector / value[:, None]) @ (vector.mT @ (scaled @ off)[..., None])
        spread = (vector * ((num - 1) / value[:, None]).sqrt()) @ vector.mT
        every = towards + inflation * spread @ turn  # (cells, N of before, N)
        blocks.append(mean[None, :, cells] + torch.einsum("nac,cnm->mac", deviations[:, :, cells], every))
    return torch.cat(blocks, 2)


@plain_torch()
def assimilate(
    model: Any,
    task: str,
    ensemble: Field,
    observations: Mapping[str, Any],
    parameters: Values = None,
    *,
    radius: float = math.inf,
    inflation: float = 1.0,
    seed: int = 0,
    **options: Any,
) -> Analysis:
    """As `ups.assimilate`."""
    evolving = [name for name, known in model.tasks.items() if not known.get("inputs")]
    if task not in evolving:
        raise ValueError(
            f"the task is {task!r:.80}; expected one of the model that evolves in time: "
            f"{', '.join(evolving) or 'none'}. Name such a task."
        )
    known = model.tasks[task]
    members = as_tensor(ensemble, f"{task}'s ensemble")
    shape = (len(known["fields"]), *known["grid"])
    has_time = members.ndim == len(shape) + 2
    wrong = ""
    if tuple(members.shape[1 + has_time :]) != shape or members.ndim > len(shape) + 2 or len(members) < 2:
        wrong = (
            f"an ensemble of shape {tuple(members.shape)}; expected (members, [history,] "
            f"{', '.join(map(str, shape))}) of at least 2 members. Pass one"
        )
    elif not (
        isinstance(radius, Real) and isinstance(inflation, Real) and radius > 0 and 1 <= inflation < math.inf
    ):
        wrong = (
            f"radius {radius!r:.40} and inflation {inflation!r:.40}; expected a length above 0 in units of "
            "the domain, and a factor from 1 on. Pass these"
        )
    if wrong:
        raise ValueError(f"the filter of {task} was given {wrong}.")
    check_random(task, seed, None, 1)
    frames, values, mask, noise = observed(task, observations, shape, 1)
    if len(frames) > 1 and options.get("forcing") is not None:
        raise ValueError(
            f"the filter of {task} was given forcing and {len(frames)} observed frames; expected one, up "
            "to which the forcing is. Call once for each frame: members are the next ensemble."
        )
    states, between, done = members.double(), distances(known), 0
    states = states if has_time else states[:, None]
    means: list[tuple[Tensor, ...]] = []
    for place, frame in enumerate(frames):
        with torch.no_grad():
            later = as_tensor(
                model.forecast(task, states.to(members.dtype), parameters, frame - done, **options), task
            )
        states, done = torch.cat([states, later.double()], 1)[:, -states.shape[1] :], frame
        last = states[:, -1]
        is_masked = last.isnan().all(0)
        if not bool(last[:, ~is_masked].isfinite().all()) or bool(is_masked.all()):
            raise ValueError(
                f"members of {task} are not finite in frame {frame}; expected numbers. Pass a larger radius, "
                "less inflation, or members nearer to the trained states."
            )
        if len(at := (mask[place] & ~is_masked).flatten().nonzero()[:, 0]):
            cells = at % math.prod(shape[1:])
            turn = mixed(len(states), generator(seed, "turn", frame))
            flat = analysed(
                states.flatten(3).flatten(1, 2),
                last.flatten(1)[:, at],
                values[place].flatten()[at],
                noise[place].flatten()[at],
                lambda some, cells=cells: taper(between(some, cells) / radius),
                float(inflation),
                turn,
            )
            states = flat.view_as(states)
        means.append((states[:, -1].mean(0), states[:, -1].std(0), last.mean(0)))
    is_tensor = isinstance(ensemble, Tensor)

    def restored(u: Tensor) -> Any:
        u = u.to(members.dtype)
        return u if is_tensor else u.numpy()

    columns = [restored(torch.stack(column)) for column in zip(*means, strict=True)]
    return Analysis(frames, *columns, restored(states if has_time else states[:, -1]))
