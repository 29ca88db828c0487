"""A start, a coefficient, a forcing or parameters from noisy observations of a forecast: `ups.invert`.

    y = h(theta) + noise * eta,   theta ~ N(0, 1)

theta holds the waves of the start and of the forcing in every frame by the laws of the training data
(ups/models/starts.py), and a number for each unknown parameter, which is uniform over its trained range (of
its logarithm if that is above zero) before any observation. The most probable theta is found by Gauss-Newton
steps with the tangent J of the forecast in forward mode; around it the posterior is taken as Gaussian,
N(theta, (J^T J + 1)^-1) of J over the noise (Laplace; Tarantola 2005, section 3.4). With an unknown start
this is strong-constraint 4D-Var.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from ups.common.device import plain_torch
from ups.forecast_inputs import (
    BYTES,
    Values,
    check_parameters,
    check_random,
    read_forcing,
    require_room,
    start,
)
from ups.forecast_measured import observed
from ups.forecast_xarray import Field, as_tensor
from ups.forecaster import Forecaster
from ups.models.facts import AGAIN, is_count
from ups.models.head import TaskHead
from ups.models.starts import prior_waves, spectrum_of
from ups_discovery.seeds import generator

LEVEL = 0.9  # of the intervals
# Gauss-Newton steps, and the length of the last one in posterior deviations (rounding: up to 0.07)
NUM_STEPS, CONVERGED = 40, 0.1
HALVES = 0.5 ** torch.arange(10.0, dtype=torch.float64)  # of a step, of which the best is taken
ROWS = 64  # of the tangent, computed together
NUM_SAMPLES = 512  # behind the intervals

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Inversion:
    """What observations say of the unknowns, by name: of the kind of the observed values.

    values: the most probable; low, high: ends of the 90 % interval of every number; samples: (members, ..) of
    the posterior. misfit: RMS of the observed minus the forecast values over their noise, about 1 if noise
    and model are right. is_converged: whether the last step was short.
    """

    values: dict[str, Any]
    low: dict[str, Any]
    high: dict[str, Any]
    samples: dict[str, Any]
    misfit: float
    is_converged: bool


def forward_mode(h: Map, theta: Tensor) -> Tensor:
    """J^T (d, k) of h at theta (d,), float64."""
    rows = [
        torch.func.jvp(h, (theta.repeat(len(some), 1),), (some,))[1].double()
        for some in torch.eye(len(theta), dtype=theta.dtype, device=theta.device).split(ROWS)
    ]
    return torch.cat(rows)


def laplace(
    h: Map, y: Tensor, noise: Tensor, size: int, tangent: Callable[[Map, Tensor], Tensor] = forward_mode
) -> tuple[Tensor, Tensor, float, bool]:
    """(theta (d,), factor (d, d), misfit, whether it converged): the posterior is that of theta + factor xi,
    xi ~ N(0, 1).

    h: of theta (batch, d), (batch, k), float64; y, noise (k,).
    """
    theta, one = y.new_zeros(size), torch.eye(size).to(y)

    def off(theta: Tensor) -> Tensor:
        return (y - h(theta)) / noise

    def cost(theta: Tensor) -> Tensor:
        return (off(theta).square().sum(1) + theta.square().sum(1)).nan_to_num(nan=math.inf)

    is_converged = False
    for _ in range(NUM_STEPS):
        j = tangent(h, theta) / noise
        factor = torch.linalg.cholesky(j @ j.mT + one)
        gradient = j @ off(theta[None])[0] - theta
        step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        candidates = theta + HALVES.to(y)[:, None] * step
        costs = cost(torch.cat([theta[None], candidates]))
        best = int(costs.argmin())
        is_converged = float(gradient @ step) < CONVERGED**2
        theta = theta if best == 0 else candidates[best - 1]
        if is_converged or best == 0:
            break
    misfit = float(off(theta[None]).square().mean().sqrt())
    is_converged = is_converged and math.isfinite(misfit)
    return theta, torch.linalg.solve_triangular(factor.mT, one, upper=True), misfit, is_converged


def film(known: Tensor, waves: Tensor | None = None, memory: Tensor | None = None) -> tuple[Map, int]:
    """(fields (batch, frames, C, *space) of theta (batch, d), d): known (1, frames, C, *space) and waves (n,
    C, *space), whose sizes in frames i, j have the correlation memory^|i - j|. All normalised."""
    waves = known.new_zeros(0, *known.shape[2:]) if waves is None else waves.to(known)
    rho = (torch.zeros(len(waves)) if memory is None else memory).double().to(known.device).view(-1, 1, 1)
    lag = torch.arange(known.shape[1], device=known.device)
    lag = lag[:, None] - lag
    shocks = torch.where(lag == lag[:, :1], 1.0, (1 - rho.square()).sqrt())
    factors = torch.where(lag >= 0, rho ** lag.clamp_min(0) * shocks, 0.0)

    def fields(theta: Tensor) -> Tensor:
        sizes = torch.einsum("nij,bnj->bin", factors, theta.unflatten(1, factors.shape[:2])).float()
        return known + (sizes @ waves.flatten(1)).unflatten(2, known.shape[2:])

    return fields, factors[..., 0].numel()


@dataclass(frozen=True)
class Unknowns:
    """What theta (batch, d) stands for. raw (P,): parameters, of which those of `columns` are unknown, with
    the ends of their range; start, forcing (None without): of `film`; sizes: of the three in theta."""

    head: TaskHead
    names: list[str]
    raw: Tensor
    columns: list[int]
    start: Map
    forcing: Map | None
    sizes: list[int]

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The normalised start (batch, time, C, *space), raw parameters and the normalised forcing."""
        columns, start, forcing = theta.split(self.sizes, 1)
        w = self.start(start)
        w = self.head.input_codec.projected(w) if "u0" in self.names else w
        return w, self.parameters(columns), self.forcing and self.forcing(forcing)

    def parameters(self, theta: Tensor) -> Tensor:
        """Raw parameters (batch, P), float64."""
        spans, parts = list(self.head.facts.parameters.values()), []
        for number, value in enumerate(self.raw):
            if number in self.columns:
                share = torch.special.ndtr(theta[:, self.columns.index(number)])
                low, high = spans[number]
                is_log = low > 0
                low, high = (math.log(low), math.log(high)) if is_log else (low, high)
                column = low + (high - low) * share
                parts.append(column.exp() if is_log else column)
            else:
                parts.append(value.to(theta).expand(len(theta)))
        return torch.stack(parts, 1) if parts else theta.new_zeros(len(theta), 0)

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """The unknowns by name, in physical units, each (batch, ..)."""
        head, codec, (w, raw, f) = self.head, self.head.input_codec, self(theta)
        found = {"u0": head.task.absolute(codec.denormalise(w[:, 0]), codec.fields)}
        found |= {} if f is None else in_forcing_units(head, f)
        found |= dict(zip(head.facts.parameters, raw.unbind(1), strict=True))
        return {name: found[name] for name in self.names}


def in_forcing_units(head: TaskHead, f: Tensor) -> dict[str, Tensor]:
    """Normalised forcing (batch, frames, K, *space) by name, as `read_forcing` takes it."""
    names, series = head.task.forcing, head.task.series
    parts = head.task.absolute(head.forcing_codec.denormalise(f), names).unbind(2)
    parts = [f.flatten(2)[..., 0] if name in series else f for name, f in zip(names, parts, strict=True)]
    return dict(zip(names, parts, strict=True))


@plain_torch()
def invert(
    model: Forecaster,
    task: str,
    observations: Mapping[str, Any],
    unknown: Sequence[str] = ("u0",),
    *,
    u0: Field | None = None,
    parameters: Values = None,
    forcing: Any = None,
    prior: Field | None = None,
    members: int = 64,
    seed: int = 0,
) -> Inversion:
    """As `ups.invert`."""
    head = model.operator.head(task)
    unknown = [*unknown] if isinstance(unknown, Iterable) and not isinstance(unknown, str) else [unknown]
    check_unknown(head, unknown, u0, parameters, forcing)
    check_random(task, seed, None, 1)
    if not is_count(members):
        raise ValueError(f"members is {members!r:.80}; expected a whole number, at least 1. Pass one.")
    shape = head.codec.num_channels, *head.codec.space
    frames, y, mask, noise = observed(task, observations, shape, None if head.task.is_steady else 0)
    num_frames, mask = max(1, frames[-1]), head.codec.masked(mask, False)
    device, boundary, codec = head.scale.device, head.task.boundary, head.input_codec
    known, names, law = head.facts.parameters, head.task.forcing, ()
    free, why = psutil.virtual_memory().available, "the number of the last observed frame"
    require_room(BYTES * ROWS * num_frames * math.prod(shape), free, "memory", why)
    some = {name: known[name][1] for name in unknown if name in known} | dict(parameters or {})
    given = torch.zeros(1, 1, codec.num_channels, *codec.space, device=device)
    if "u0" in unknown:
        raw = check_parameters(head, some, 1, False)
        of_start = film(given, *prior_waves(codec, boundary, law_of(head, prior)))
    else:
        given, _ = model._read(task, u0, ("time",), parameters, forcing)
        w, raw = start(head, given, some, num_frames)
        of_start = film(w)
    if len(given) != 1:
        raise ValueError(
            f"{task} was given {len(given)} starts; expected the one that was observed. Call once for each."
        )
    if forced := [name for name in names if name in unknown]:
        laws = head.facts.forcings
        rows = zip(names, laws[: len(names)], strict=True)
        spectrum = [row if name in forced else [0.0] * len(row) for name, row in rows]
        law = prior_waves(head.forcing_codec, boundary, spectrum, laws[len(names) :])
        mean = torch.zeros(1, num_frames + 1, len(names), *codec.space, device=device)
        forcing = dict(forcing or {}) | {name: in_forcing_units(head, mean)[name] for name in forced}
    f = read_forcing(head, forcing, given, given, num_frames, False)
    columns = [number for number, name in enumerate(known) if name in unknown]
    (of_start, num_waves), (of_forcing, num_forced) = of_start, (None, 0) if f is None else film(f, *law)
    sizes = [len(columns), num_waves, num_forced]
    unknowns, size = Unknowns(head, unknown, raw[0], columns, of_start, of_forcing, sizes), sum(sizes)
    cells = [one.flatten().nonzero()[:, 0].to(device) for one in mask]

    def h(theta: Tensor) -> Tensor:
        w, raw, f = unknowns(theta)
        later = model.operator.forecast(w, task, raw, num_frames, forcing=f)
        films = later if head.task.is_steady else torch.cat([w[:, -1:], later], 1)  # from frame 0 on
        fields = head.codec.denormalise(films).flatten(2)
        return torch.cat([fields[:, n][:, at] for n, at in zip(frames, cells, strict=True)], 1).double()

    y, noise = (one[mask].to(device) for one in (head.task.counted(y, head.codec.fields), noise))
    theta, factor, misfit, is_converged = laplace(h, y, noise, size)
    xi = torch.randn(max(members, NUM_SAMPLES), size, generator=generator(seed, "invert", task))
    samples = unknowns.named(theta + xi.to(theta) @ factor.mT)
    is_tensor = isinstance(observations["values"], Tensor)

    def restored(found: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: u if is_tensor else u.cpu().numpy() for name, u in found.items()}

    ends = [
        {name: u.quantile(end, 0) for name, u in samples.items()}
        for end in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    ]
    best = {name: u[0] for name, u in unknowns.named(theta[None]).items()}
    kept = {name: u[:members] for name, u in samples.items()}
    return Inversion(*map(restored, (best, *ends, kept)), misfit, is_converged)


def check_unknown(head: TaskHead, unknown: Sequence[Any], u0: Any, parameters: Any, forcing: Any) -> None:
    """Raise ValueError unless a task can be inverted for the unknowns, and the rest is given."""
    known, forced, wrong = head.facts.parameters, head.task.forcing, ""
    names = ["u0", *forced, *(name for name, (low, high) in known.items() if low < high)]
    bad = [name for name in unknown if name not in names]
    is_forced = any(name in forced for name in unknown)
    if not unknown or bad or len({*unknown}) < len(unknown):
        wrong = (
            f"the unknowns {list(unknown)!r:.80}; expected some of {', '.join(names)}, each once. Name those"
        )
    elif head.base.needs_fitted_parameters and any(name in known for name in unknown):
        wrong = (
            f"an unknown parameter, but its {head.base.kind} serves the trained values alone; expected u0. "
            "Compare inversions for each value, or choose another base"
        )
    elif "u0" in unknown and (head.history > 1 or u0 is not None):
        number = f"a history of {head.history}" if head.history > 1 else "u0 both as unknown and as given"
        wrong = f"{number}; expected a history of 1 and no u0. Train with history 1, or leave u0 out"
    elif "u0" not in unknown and u0 is None:
        wrong = "no start; expected u0, as it is not among the unknowns. Pass u0"
    elif not isinstance(parameters, Mapping | None):
        wrong = f"parameters {parameters!r:.80}; expected them by name. Pass a dictionary"
    elif is_forced and not isinstance(forcing, Mapping | None):
        wrong = (
            f"a forcing that is in part unknown as {type(forcing).__name__}; expected a dictionary. Pass one"
        )
    elif is_forced and head.facts.forcings is None:
        wrong = f"an unknown forcing, but its weights hold no law of it; expected one as a prior. {AGAIN}"
    elif both := [
        name for name in unknown if name in {*(parameters or ()), *(forcing if is_forced and forcing else ())}
    ]:
        wrong = f"{both[0]} both as unknown and as given; expected one of the two. Leave one out"
    if wrong:
        raise ValueError(f"the inversion of {head.name} was given {wrong}.")


def law_of(head: TaskHead, prior: Field | None) -> list[list[float]]:
    """The spectrum of starts: that of fields `prior` (rows, C, *space), else that in the weights."""
    codec = head.input_codec
    if prior is None:
        if head.facts.starts is None:
            raise ValueError(
                f"{head.name} has no law of starts in its weights, which are of an older version; expected "
                f"one as a prior. Pass prior=, typical starts (rows, {codec.num_channels}, *space), or train "
                f"again. {AGAIN}"
            )
        return head.facts.starts
    u = as_tensor(prior, f"{head.name}'s prior")
    is_right = len(u.shape) > 1 and len(u) > 0 and u.shape[1:] == (codec.num_channels, *codec.space)
    if not is_right or not bool(codec.masked(u).isfinite().all()):
        raise ValueError(
            f"{head.name} was given a prior of shape {tuple(u.shape)}{' with NaN or infinity' * is_right}; "
            f"expected typical starts (rows, {codec.num_channels}, {', '.join(map(str, codec.space))}), "
            "finite. Pass these."
        )
    u = codec.masked(u)
    return spectrum_of(codec.normalise(head.task.counted(u, codec.fields).float()), head.task.boundary)
