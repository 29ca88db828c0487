"""A start, a coefficient or parameters from noisy observations of a forecast: `ups.invert`.

    y = h(theta) + noise * eta,   theta ~ N(0, 1)

theta holds the waves of the start by the law of the training data (ups/models/starts.py), and a number for
each unknown parameter, which is uniform over its trained range (of its logarithm if that is above zero)
before any observation. The most probable theta is found by Gauss-Newton steps with the tangent J of the
forecast in forward mode; around it the posterior is taken as Gaussian, N(theta, (J^T J + 1)^-1) of J over the
noise (Laplace; Tarantola 2005, section 3.4). With an unknown start this is strong-constraint 4D-Var.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.common.device import plain_torch
from ups.forecast_inputs import Values, check_parameters, check_random, read_forcing, start
from ups.forecast_measured import observed
from ups.forecast_xarray import Field, as_tensor
from ups.forecaster import Forecaster
from ups.models.facts import AGAIN, is_count
from ups.models.head import TaskHead
from ups.models.starts import prior_waves, spectrum_of
from ups_discovery.seeds import generator

LEVEL = 0.9  # of the intervals
NUM_STEPS, CONVERGED = 40, 0.05  # Gauss-Newton steps, and the length of the last one in posterior deviations
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

    is_converged = is_still = False
    for number in range(NUM_STEPS + 1):
        j = tangent(h, theta) / noise
        factor = torch.linalg.cholesky(j @ j.mT + one)
        if is_converged or is_still or number == NUM_STEPS:
            break
        gradient = j @ off(theta[None])[0] - theta
        step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        candidates = theta + HALVES.to(y)[:, None] * step
        costs = cost(torch.cat([theta[None], candidates]))
        best = int(costs.argmin())
        is_converged, is_still = float(gradient @ step) < CONVERGED**2, best == 0
        theta = theta if best == 0 else candidates[best - 1]
    misfit = float(off(theta[None]).square().mean().sqrt())
    is_converged = is_converged and math.isfinite(misfit)
    return theta, torch.linalg.solve_triangular(factor.mT, one, upper=True), misfit, is_converged


@dataclass(frozen=True)
class Unknowns:
    """What theta (batch, d) stands for. waves (n, C, *space): of an unknown start, None if it is known: w.
    raw (P,): parameters, of which those of `columns` are unknown, with the ends of their range."""

    head: TaskHead
    waves: Tensor | None
    w: Tensor | None
    raw: Tensor
    columns: list[int]

    @property
    def size(self) -> int:
        return len(self.columns) + (0 if self.waves is None else len(self.waves))

    def start(self, theta: Tensor) -> Tensor:
        """The normalised start (batch, time, C, *space)."""
        if self.waves is None:
            return self.w.expand(len(theta), *self.w.shape[1:])
        w = theta[:, len(self.columns) :].float() @ self.waves.flatten(1)
        return self.head.input_codec.projected(w.view(len(theta), 1, *self.waves.shape[1:]))

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
        head, codec, found = self.head, self.head.input_codec, {}
        if self.waves is not None:
            u = codec.denormalise(self.start(theta)[:, 0])
            found["u0"] = head.task.absolute(u, codec.fields)
        raw = self.parameters(theta)
        names = [*head.facts.parameters]
        return found | {names[column]: raw[:, column] for column in self.columns}


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
    unknown = [unknown] if isinstance(unknown, str) else [*unknown]
    check_unknown(head, unknown, u0, parameters)
    check_random(task, seed, None, 1)
    if not is_count(members):
        raise ValueError(f"members is {members!r:.80}; expected a whole number, at least 1. Pass one.")
    shape = head.codec.num_channels, *head.codec.space
    frames, y, mask, noise = observed(task, observations, shape, None if head.task.is_steady else 0)
    num_frames, mask = max(1, frames[-1]), head.codec.masked(mask, False)
    device = head.scale.device
    known = head.facts.parameters
    some = {name: known[name][1] for name in unknown if name in known} | dict(parameters or {})
    if "u0" in unknown:
        waves, w = prior_waves(head.input_codec, head.task.boundary, law_of(head, prior)).to(device), None
        given = torch.zeros(1, 1, head.input_codec.num_channels, *head.input_codec.space)
        raw = check_parameters(head, some, 1, False)
    else:
        waves, (given, _) = None, model._read(task, u0, ("time",), parameters, forcing)
        w, raw = start(head, given, some, num_frames)
    if len(given) != 1:
        raise ValueError(
            f"{task} was given {len(given)} starts; expected the one that was observed. Call once for each."
        )
    f = read_forcing(head, forcing, given, given, num_frames, False)
    columns = [number for number, name in enumerate(known) if name in unknown]
    unknowns = Unknowns(head, waves, w, raw[0], columns)
    cells = [one.flatten().nonzero()[:, 0].to(device) for one in mask]

    def h(theta: Tensor) -> Tensor:
        w = unknowns.start(theta)
        every = None if f is None else f.expand(len(theta), *f.shape[1:])
        later = model.operator.forecast(w, task, unknowns.parameters(theta), num_frames, forcing=every)
        films = later if head.task.is_steady else torch.cat([w[:, -1:], later], 1)  # from frame 0 on
        fields = head.codec.denormalise(films).flatten(2)
        return torch.cat([fields[:, n][:, at] for n, at in zip(frames, cells, strict=True)], 1).double()

    y, noise = (one[mask].to(device) for one in (head.task.counted(y, head.codec.fields), noise))
    theta, factor, misfit, is_converged = laplace(h, y, noise, unknowns.size)
    xi = torch.randn(max(members, NUM_SAMPLES), unknowns.size, generator=generator(seed, "invert", task))
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


def check_unknown(head: TaskHead, unknown: Sequence[Any], u0: Any, parameters: Any) -> None:
    """Raise ValueError unless a task can be inverted for the unknowns, and the rest is given."""
    known, wrong = head.facts.parameters, ""
    names = ["u0", *(name for name, (low, high) in known.items() if low < high)]
    bad = [name for name in unknown if name not in names]
    if not unknown or bad or len({*unknown}) < len(unknown):
        wrong = (
            f"the unknowns {list(unknown)!r:.80}; expected some of {', '.join(names)}, each once. Name those"
        )
    elif head.base.needs_fitted_parameters and len(unknown) > ("u0" in unknown):
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
    elif both := [name for name in unknown if name in (parameters or {})]:
        wrong = f"{both[0]} both as unknown and as given; expected one of the two. Leave it out of parameters"
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
    if u.shape[1:] != (codec.num_channels, *codec.space):
        raise ValueError(
            f"{head.name} was given a prior of shape {tuple(u.shape)}; expected typical starts (rows, "
            f"{codec.num_channels}, {', '.join(map(str, codec.space))}). Pass these."
        )
    return spectrum_of(codec.normalise(head.task.counted(u, codec.fields).float()), head.task.boundary)
