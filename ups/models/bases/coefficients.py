"""The base of hidden coefficients: laws of a known form, whose coefficients differ by trajectory."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ups.common.progress import beat, note
from ups.models.bases.base import Base, Fit, ParameterBatch, Samples
from ups_discovery.boundary import along
from ups_discovery.equation import Equation
from ups_discovery.seeds import generator
from ups_discovery.spectral import box, box_rows
from ups_discovery.terms import Term, Terms

# law and highest wave number of its fields: those of "carried" are a flow that carries the state
LAWS = (("constant", 0), ("carried", 3))
MOST_ROWS, MOST_FRAMES, BLOCK = 64, 5, 16  # trajectories of a fit, frames of each, trajectories at once
MOST_CELLS, MOST_UNKNOWNS = 1024, 120  # of a frame that are compared; of coefficients: else fewer waves
CORRECTIONS, EM_STEPS = 4, 15
STEPS = (1, 2, 4, 8, 16, 32)  # per frame; twice as many must not move a frame by more than SAME of its change
SAME = 1e-3
OF_VALUE, OF_PRODUCT, OF_INVERSE = 6e-9, 6e-11, 6e-10  # nominal seconds (`Samples.spend`)


class Unknown(NamedTuple):
    """A coefficient: the (channel, term) pairs that it multiplies, and whether it is a field."""

    parts: tuple[tuple[int, Term], ...]
    is_field: bool = False


def unknowns(law: str, num_channels: int, ndim: int) -> list[Unknown]:
    """The coefficients of a law, fields first. Raises ValueError for an unknown law."""
    every, axes, none = range(num_channels), range(ndim), (0,) * num_channels

    def power(*channels: int) -> tuple[int, ...]:
        return tuple(channels.count(channel) for channel in every)

    slopes = [[(c, (none, ((c, (axis,)),))) for c in every] for axis in axes]
    bends = [Unknown(((c, (none, ((c, (axis, axis)),))),)) for c in every for axis in axes]
    if law == "carried":
        return [*(Unknown(tuple(parts), True) for parts in slopes), *bends]
    if law != "constant":
        known = ", ".join(sorted({name for name, _ in LAWS}))
        raise ValueError(f"a base has the law {law!r:.80}; expected one of {known}. Train it again.")
    monomials = [some for n in range(4) for some in itertools.combinations_with_replacement(every, n)]
    terms = [
        *(part for parts in slopes for part in parts),
        *((c, (power(other), ((c, (axis,)),))) for c in every for other in every for axis in axes),
        *((c, (power(*some), ())) for c in every for some in monomials),
    ]
    return [*(Unknown((part,)) for part in terms), *bends]


class Coefficients(Base):
    """s_t = sum over terms of c * term(s), by an `Equation`, with c of the trajectory, which does not change
    in time: numbers, and fields of few waves (a flow that carries s).

    c has a normal distribution over trajectories, whose mean is a fit of low order in the parameters, and
    whose moments are those of the training trajectories (empirical Bayes by expectation and maximisation:
    Dempster, Laird and Rubin 1977). A forecast takes the mean of c given the frames that it is given: steps
    of Gauss and Newton from the expected c, with the derivative of a frame by c from the terms of that frame
    (exact where their flows commute), and the residual of an integration with c. So c follows from frames far
    apart as well. From one frame it is the expected one.

    law, waves: of LAWS. In an `Equation` a field is a channel that is fixed. is_finer: as there.
    """

    kind, extrapolates = "coefficients", True

    def __init__(
        self,
        num_channels: int,
        num_parameters: int,
        space: Sequence[int],
        boundary: str,
        lengths: Sequence[float],
        dt: float = 1.0,
        cell: Sequence[float] = (),
        positive: Sequence[int] = (),
        law: str = "constant",
        waves: int = 0,
        num_steps: int = 1,
        is_finer: bool = False,
        **_: Any,
    ):
        super().__init__()
        ndim, grid = len(space), (space, lengths, boundary, cell, is_finer)
        self.num_channels, self.space, self.dt = num_channels, tuple(space), dt
        self.unknowns, ends = unknowns(law, num_channels, ndim), along(boundary, ndim)
        num_fields = self.num_fields = sum(one.is_field for one in self.unknowns)
        modes = box_rows(box(ends, waves + 1), space, ends).flatten(0, 1)
        modes = modes[modes.square().sum(1) > 0.5].float() * math.sqrt(math.prod(space))
        terms, places = [], []
        for number, one in enumerate(self.unknowns):
            own = tuple(int(number == field) for field in range(num_fields))
            for channel, (powers, factors) in one.parts:
                terms.append(((*powers, *own), factors))
                places.append((number, channel, len(terms) - 1))
        num_all = num_channels + num_fields
        facts = {"num_steps": num_steps, "is_stiff": True, "cell": cell, "is_finer": is_finer}
        self.equation = Equation(1, num_all, space, boundary, lengths, dt, positive, terms, **facts)
        self.columns = Terms([term for one in self.unknowns for _, term in one.parts], positive, *grid)
        # where the coefficients of an `Equation` are those of fields, which are 1, and where the numbers are
        weight = torch.zeros(len(self.unknowns), num_all, len(terms))
        weight[tuple(torch.tensor(places).T)] = 1
        self.size = num_fields * len(modes) + len(self.unknowns) - num_fields
        stride = math.ceil((math.prod(space) / MOST_CELLS) ** (1 / ndim))
        cells = torch.arange(math.prod(space)).view(*space)[(slice(None, None, stride),) * ndim].flatten()
        for name, value in (("modes", modes), ("places", weight), ("cells", cells)):
            self.register_buffer(name, value, persistent=False)
        for name, value in (
            ("mean", torch.zeros(num_channels)),
            ("std", torch.ones(num_channels)),
            ("unit", torch.ones(num_channels)),  # of residuals
            ("parameter_unit", torch.ones(num_parameters)),
            ("scale", torch.ones(self.size)),  # of coefficients
            ("expected", torch.zeros(1 + 2 * num_parameters, self.size)),
            ("precision", torch.eye(self.size)),  # times the variance of a residual
        ):
            self.register_buffer(name, value)

    @property
    def num_fitted(self) -> int:
        return self.size

    def refined(self, settings: dict[str, Any]) -> "Coefficients":
        other = Coefficients(**{**settings, "num_steps": 2 * self.equation.num_steps, "is_finer": True})
        other.load_state_dict(self.state_dict())
        return other.to(self.mean.device).double()

    def unbounded(self) -> "Coefficients":
        free = copy.deepcopy(self)
        free.equation.low.fill_(-torch.inf)
        free.equation.high.fill_(torch.inf)
        return free

    def _column(self, values: Tensor) -> Tensor:
        return values.view(-1, *[1] * len(self.space))

    def features(self, parameters: ParameterBatch) -> Tensor:
        """What the expected coefficients are a linear function of: 1, the parameters, and what the network
        sees of them, which is their logarithm if all are positive."""
        standard = parameters.standard.to(self.expected)
        raw = standard if parameters.raw is None else parameters.raw.to(standard) / self.parameter_unit
        return torch.cat([torch.ones_like(standard[:, :1].sum(1, keepdim=True)), raw, standard], 1)

    def settled(self, u: Tensor, parameters: ParameterBatch) -> ParameterBatch:
        """The parameters with the coefficients of their trajectories, from its frames u (batch, time, C,
        *space)."""
        if u.shape[1] == 1 or parameters.hidden is not None:
            return parameters
        s = u.to(self.std) * self._column(self.std) + self._column(self.mean)
        j, expected = self.derivative(s[:, 1:]).double(), self.features(parameters) @ self.expected
        factor, _ = torch.linalg.cholesky_ex(j @ j.mT + self.precision)
        c = expected
        for _ in range(CORRECTIONS):
            prior = ((c - expected) @ self.precision)[..., None]
            right = j @ self.residual(s, c).double()[..., None] - prior
            c = c + torch.cholesky_solve(right, factor)[..., 0].to(c)
        is_finite = c.isfinite().all(1, keepdim=True)
        return replace(parameters, hidden=torch.where(is_finite, c, expected))

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        c = self.settled(u, parameters).hidden
        if c is None:
            c = self.features(parameters) @ self.expected
        mean, std = self._column(self.mean), self._column(self.std)
        return ((self.moved(u[:, -1].to(std) * std + mean, c) - mean) / std).float()

    def moved(self, s: Tensor, c: Tensor) -> Tensor:
        """The states s (rows, C, *space) one frame later; c (rows, size), in units of `scale`."""
        split = self.num_fields * len(self.modes)
        fields, numbers = (c * self.scale).tensor_split([split], 1)
        fields = fields.unflatten(1, (self.num_fields, len(self.modes))) @ self.modes
        fixed, free = self.places.tensor_split([self.num_fields])
        weight = fixed.sum(0) + torch.einsum("rk,kct->rct", numbers, free)
        whole = torch.cat([s, fields.unflatten(2, self.space)], 1)
        return self.equation.advance(whole, weight)[:, : self.num_channels]

    def derivative(self, s: Tensor) -> Tensor:
        """The change of a frame by every coefficient, (rows, size, numbers), from its terms at the states s
        (rows, time, C, *space)."""
        flat = s.flatten(0, 1)
        values, place, out = self.columns(flat, self.cells), 0, []
        for one in self.unknowns:
            column = values.new_zeros(len(flat), 1, self.num_channels, len(self.cells))
            for channel, _ in one.parts:
                column[:, 0, channel] = values[:, place] / self.unit[channel]
                place += 1
            out.append(column * self.modes[:, None, self.cells] if one.is_field else column)
        whole = torch.cat(out, 1).flatten(2).unflatten(0, (len(s), -1)).movedim(1, 2).flatten(2)
        return whole * self.dt * self.scale[:, None]

    def residual(self, s: Tensor, c: Tensor) -> Tensor:
        """What integrations with c lack of the frames after the first, (rows, numbers)."""
        before, after = s[:, :-1].flatten(0, 1), s[:, 1:].flatten(0, 1)
        found = self.moved(before, c.repeat_interleave(s.shape[1] - 1, 0))
        lacking = (after - found).flatten(2)[..., self.cells] / self.unit[:, None]
        return lacking.flatten(1).unflatten(0, (len(s), -1)).flatten(1)

    # ---- the fit

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Coefficients"]:
        """Yield a candidate for every law that can be integrated. None where nothing differs by trajectory
        or, without several frames to read, could be known."""
        has_context = settings["history"] > 1 and not settings["num_parameters"]
        if not (samples.cache.is_sampled or has_context):
            return None
        rng = generator(samples.seed, "coefficients")
        rows = samples.rows(None)
        rows = rows[torch.randperm(len(rows), generator=rng)[:MOST_ROWS]]
        s = samples.states(rows, MOST_FRAMES, rng).float()
        parameters = samples.head.parameters_of(samples.cache, rows)
        for law, waves in LAWS[: 1 + has_context]:  # of fields one frame says nothing
            own = {**settings, "law": law, "waves": waves}
            while (base := cls(**own)).size > MOST_UNKNOWNS and own["waves"]:
                own["waves"] -= 1
            if base.size > MOST_UNKNOWNS:
                continue
            base = base.to(samples.device)
            note(f"{samples.name}: {base.kind}, {law}, {base.size} numbers of a trajectory")
            samples.spend(base.work(*s.shape[:2]))
            base.mean.copy_(samples.units.shift)
            base.std.copy_(samples.units.scale)
            if base.learn(s, parameters):
                yield f"{law} coefficients, {base.size}", {**own, "num_steps": base.equation.num_steps}, base
        return None

    def twin(self, samples: Samples, settings: dict[str, Any]) -> tuple[dict[str, Any], Base] | None:
        fits = (tuple(found) for _, *found in self.fit(samples, settings))
        return next((found for found in fits if found[0]["law"] == settings["law"]), None)

    def work(self, count: int, num_frames: int) -> float:
        """That of a fit to so many trajectories with two steps a frame, in nominal seconds."""
        cells, pairs = math.prod(self.space), count * (num_frames - 1)
        values = CORRECTIONS * pairs * 8 * cells * (len(self.unknowns) + 4) * OF_VALUE
        products = CORRECTIONS * pairs * self.num_channels * len(self.cells) * self.size**2 * OF_PRODUCT
        return values + products + CORRECTIONS * EM_STEPS * count * self.size**3 * OF_INVERSE

    @torch.no_grad()
    def learn(self, s: Tensor, parameters: ParameterBatch) -> bool:
        """Set the moments of the coefficients from states s (rows, time, C, *space) of trajectories. False if
        they cannot be integrated."""
        flat = s.transpose(0, 2).flatten(1)
        low, high = flat.amin(1), flat.amax(1)
        self.equation.low[: self.num_channels] = low - (high - low) / 2
        self.equation.high[: self.num_channels] = high + (high - low) / 2
        self.unit.copy_(s.diff(dim=1).transpose(0, 2).flatten(1).square().mean(1).sqrt().clamp_min(1e-12))
        if parameters.raw is not None:
            self.parameter_unit.copy_(parameters.raw.abs().amax(0).clamp_min(1e-30))
        # the first step is a finite one from persistence, with derivatives from the middle of two frames
        middle, ends = ((s[:, 1:] + s[:, :-1]) / 2).split(BLOCK), s[:, 1:].split(BLOCK)
        squares = torch.cat([self.derivative(some).square().mean(2) for some in middle]).mean(0)
        self.scale.copy_(squares.clamp_min(1e-20).rsqrt())
        moments, c = Moments(self.features(parameters), self.size), s.new_zeros(len(s), self.size)
        for number in range(CORRECTIONS):
            sums = []
            blocks = zip(s.split(BLOCK), ends if number else middle, c.split(BLOCK), strict=True)
            for some, at, own in blocks:
                beat()
                j = self.derivative(at).double()  # float32 loses terms that others nearly replace
                y = self.residual(some, own) + (own.double()[:, None] @ j)[:, 0]
                sums.append((j @ j.mT, (j @ y[..., None])[..., 0], y.square().sum(1)))
            c = moments.step(*map(torch.cat, zip(*sums, strict=True)), y.shape[1]).float()
            if not c.isfinite().all():
                return False
            if number == 0 and not self.set_steps(s, c):
                return False
        self.expected.copy_(moments.expected.float())
        self.precision.copy_((moments.noise * torch.linalg.inv(moments.covariance)).float())
        return True

    def set_steps(self, s: Tensor, c: Tensor) -> bool:
        """Set the number of steps per frame. Returns whether there is one."""
        before, size, frames = s[:, 0], s.diff(dim=1).square().mean().sqrt(), None
        for steps in (*STEPS, 2 * STEPS[-1]):
            self.equation.num_steps, self.equation.step = steps, self.dt / steps
            finer = self.moved(before, c)
            if frames is not None and (finer - frames).square().mean().sqrt() <= SAME * size:
                self.equation.num_steps, self.equation.step = steps // 2, 2 * self.dt / steps
                return True
            frames = finer
        return False


class Moments:
    """The distribution of coefficients over trajectories, and the variance of residuals: for y = J c + noise.
    features (rows, F): the expected coefficients are linear in those of them that lower BIC (Schwarz 1978): a
    parameter and its logarithm, which hardly differ over a short range, differ far outside of it."""

    def __init__(self, features: Tensor, size: int):
        self.features = features.double()
        self.identity = torch.eye(size).to(self.features)
        self.covariance, self.noise = self.identity, 0.1  # of the change in a frame, which is 1
        self.expected = self.features.new_zeros(features.shape[1], size)

    def step(self, products: Tensor, right: Tensor, square: Tensor, num_values: int) -> Tensor:
        """The expected coefficients (rows, size) of all trajectories given J J^T (rows, size, size), J y
        (rows, size) and |y|^2, after steps of expectation and maximisation."""
        for _ in range(EM_STEPS):
            prior = torch.linalg.inv(self.covariance)
            spread = torch.linalg.inv(products / self.noise + prior)
            c = (spread @ (right / self.noise + self.features @ self.expected @ prior)[..., None])[..., 0]
            left = square - 2 * (right * c).sum(1) + ((products @ c[..., None])[..., 0] * c).sum(1)
            left = left + (products * spread).sum((1, 2))
            self.noise = max(float(left.mean()) / num_values, 1e-10)
            self.regress(c, spread.sum(0))
        return c

    def regress(self, c: Tensor, spread: Tensor) -> None:
        """Set `expected` and `covariance`; features go, one after the other, while BIC falls."""

        def regressed(kept: list[int]) -> tuple[float, list[int], Tensor, Tensor]:
            expected = torch.zeros_like(self.expected)
            expected[kept] = torch.linalg.pinv(self.features[:, kept]) @ c
            apart = c - self.features @ expected
            covariance = (apart.mT @ apart + spread) / len(c) + 1e-9 * self.identity
            cost = len(kept) * expected.shape[1] * math.log(len(c))
            return float(len(c) * torch.logdet(covariance)) + cost, kept, expected, covariance

        best, options = math.inf, [[*range(len(self.expected))]]
        while options:
            bic, kept, *found = min(map(regressed, options), key=lambda one: one[0])
            if best <= bic:
                break
            best, (self.expected, self.covariance) = bic, found
            options = [[one for one in kept if one != gone] for gone in kept if len(kept) > 1]
