"""Which terms a right-hand side has, and with which weights, from frames that lie far apart in time.

Central differences in time are regressed on a library of terms, and the terms dropped one by one that explain
least (PDE-FIND: Rudy, Brunton, Proctor and Kutz 2017, arXiv 1609.06401). Between two frames a wave crosses
many cells, and a difference in time is then no derivative: windows count the more, the closer it is to one.
From there on the integrator itself is fitted to the frames (Gauss and Newton), and terms are added that what
it leaves asks for. The weighting and the growth are ours.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.common.boundary import along
from ups.common.progress import beat
from ups.common.seeds import generator
from ups.common.spectral import FieldTransform
from ups.models.bases.least_squares import backwards, forwards, left, scaled, solve
from ups.models.bases.terms import WAVE, Term, Terms, diagonal, library
from ups.models.bases.units import widened

if TYPE_CHECKING:
    from ups.models.bases.base import Samples

NUM_REGRESSED, NUM_SHOT, NUM_TIMED = 2**15, 2**12, 2**13  # cells: of the regression, Gauss-Newton, steps
MOST_REGRESSED, MOST_SHOT, MOST_TIMED = 256, 32, 32  # windows
LEAST = 4  # windows
MOST_BOUNDED = 64  # trajectories that bound what is predicted
FRAMES = 2  # that the integrator is to hit from every start
HELD_OUT = 16  # trajectories and frames that judge a fit
SHARPNESS = 1, 2, 3  # of the windows' weights
SLOW = 0.01  # of the mean square of the change: below it a window counts by its change
SIZES = 1.5, 3.0  # times what the whole library leaves is what the first terms may leave
HIGHER = 3.0  # times less is what higher derivatives are to leave: they mimic a difference's error
LEFT = 0.1, 0.0  # what plain terms may leave anyway, first, and where none of those is GOOD
GOOD = 0.1  # of persistence's error; below it they may be the solver's, as of diff_react2d
MOST_STEPS = 32, 256  # a frame, of a large grid and of a small one
STEPPED = 2**17  # cells times steps a frame, at most, beyond the first of those
STABLE = 2.7  # steps times rates: the fourth-order one grows beyond 2.78 on the real axis, 2.83 on
# the imaginary one
DOUBLINGS = 3  # of the steps, for what has grown over the longer frames
MOVED = 3e-4, 0.05  # of the change, median and most, that twice the steps may alter
NOISE, GROWS = 1e-6, 1.2  # of the change; times the largest mode of it with twice the steps, or at first
CANDIDATES, ADDED = 6, 12  # terms a channel to look at, and of all to take
MOST_GROWTHS = 3
HELPS = 0.7  # times the error is what more steps must leave
GREW = 0.5  # times the error is what a growth must leave for another one to be tried
SUSPECT = 20, 0.1  # times the error of the next FRAMES, or of persistence's: then more steps are tried
GAIN = 0.04  # of the squared error, that a new term has to take
BYTES = 2**26  # of terms at a time


@dataclass(frozen=True)
class Model:
    """unknowns: (channel, term of the library) of every value; steps a frame, and which terms act by their
    exponential, as `Equation` has it."""

    unknowns: list[tuple[int, int]]
    values: Tensor
    num_steps: int = 1
    is_stiff: bool = False
    is_coupled: bool = False
    is_finer: bool = False


def most_steps(space: Sequence[int]) -> int:
    """Steps a frame that an equation may take. A step is four evaluations of its right-hand side."""
    return min(MOST_STEPS[1], max(MOST_STEPS[0], STEPPED // math.prod(space)))


class Identification:
    """Of one parameter value. make: an `Equation` from settings; bounds: of the states, (C,) each."""

    def __init__(self, make: Callable[..., Any], samples: "Samples", settings: dict[str, Any], value: int):
        self.make, self.settings = make, {**settings, "num_values": 1}
        self.most_steps = most_steps(settings["space"])
        self.library = library(
            settings["num_channels"],
            settings["positive"],
            len(settings["space"]),
            settings.get("vorticity", ()),
            settings.get("driven", ()),
        )
        draw, rows = generator(samples.seed, samples.name, "equation", value), samples.rows(value)
        rows = rows[torch.randperm(len(rows), generator=draw)]
        held = rows[: min(HELD_OUT, max(1, len(rows) // 8))]
        self.rows, self.cells = rows[len(held) :] if len(rows) > 1 else rows, math.prod(settings["space"])

        def states(rows: Tensor, count: int, length: int) -> Tensor:
            return samples.states(rows[torch.arange(count) % len(rows)], length, draw)

        self.seen = states(self.rows, self.count(NUM_REGRESSED, MOST_REGRESSED), 3)
        self.shot = states(self.rows, self.count(NUM_SHOT, MOST_SHOT), 1 + FRAMES)
        self.held = states(held, len(held), 1 + HELD_OUT)
        self.std = samples.units.scale.to(self.seen.device).view(-1, *[1] * len(settings["space"]))
        r = (self.held[:, :1] - self.held[:, 1:]) / self.unit(self.held)
        self.still = float(r.square().flatten(1).mean(1).sqrt().mean())  # the error of persistence
        some = torch.randperm(self.cells, generator=draw)[: max(1, NUM_REGRESSED // len(self.seen))]
        self.some = some.to(self.seen.device)
        self.whole = Terms(
            self.library,
            settings["positive"],
            settings["space"],
            settings["lengths"],
            settings["boundary"],
            settings["cell"],
        ).to(self.seen.device)
        ends = [
            (s.amin(1), s.amax(1))
            for row in rows[:MOST_BOUNDED].split(1)
            for s in [samples.states(row, samples.cache.num_frames, draw).transpose(0, 2).flatten(1)]
        ]
        low, high = torch.stack([a for a, _ in ends]).amin(0), torch.stack([b for _, b in ends]).amax(0)
        self.bounds = widened(low, high, len(ends))

    def count(self, num: int, most: int) -> int:
        """How many windows hold that many cells."""
        return min(most, max(LEAST, num // self.cells))

    # ----------------------------------------------------------------------------------- the integrator

    def build(self, model: Model) -> tuple[Any, Tensor]:
        """An integrator of the model's terms, and the places of its unknowns among its weights."""
        used = sorted({term for _, term in model.unknowns})
        made = self.make(
            **{
                **self.settings,
                "terms": [self.library[term] for term in used],
                "num_steps": model.num_steps,
                "is_stiff": model.is_stiff,
                "is_coupled": model.is_coupled,
                "is_finer": model.is_finer,
            }
        ).to(self.seen.device)
        made.low, made.high = self.bounds
        places = [channel * len(used) + used.index(term) for channel, term in model.unknowns]
        return made, torch.tensor(places, device=self.seen.device)

    @torch.no_grad()
    def run(self, built: tuple[Any, Tensor], values: Tensor, s: Tensor, frames: int) -> Tensor:
        """The frames (rows, frames, C, *space) after s (rows, C, *space); values (unknowns,), or (sets,
        unknowns) of as many rows each, which follow each other."""
        made, places = built
        weight = values.new_zeros(*values.shape[:-1], made.weight[0].numel()).index_copy(-1, places, values)
        weight, found = weight.view(-1, *made.weight.shape[1:]), []
        for _ in range(frames):
            beat()
            s = made.advance(s, weight)
            found.append(s)
        return torch.stack(found, 1)

    def unit(self, s: Tensor) -> Tensor:
        """Of the errors of s (rows, 1 + frames, ...): how far each row and frame has moved."""
        axes = tuple(range(2, s.ndim))
        return ((s[:, 1:] - s[:, :1]) / self.std).square().mean(axes, True).sqrt().clamp_min(1e-6) * self.std

    def error(self, model: Model, s: Tensor, is_bounded: bool = False) -> float:
        """Mean over rows of the error e of a rollout, relative to persistence; of e / (1 + e) if bounded."""
        r = (self.run(self.build(model), model.values, s[:, 0], s.shape[1] - 1) - s[:, 1:]) / self.unit(s)
        e = r.square().flatten(1).mean(1).sqrt()
        return float((e / (1 + e) if is_bounded else e).mean())

    def timed(self, model: Model) -> Model | None:
        """With the fewest steps after which twice as many change nothing, and half as many more; None if
        those are too many. Terms act by their exponential where that takes half of the steps."""
        best, limit = None, self.most_steps
        for tried in self.integrators(model):
            if num := self.converged(tried, limit):
                best, limit = replace(tried, num_steps=num), min(self.most_steps, 2 * num - 1)
        return best

    def integrators(self, model: Model) -> list[Model]:
        """The model with all integrators that differ for it, the plain one last."""
        ends = along(self.settings["boundary"], len(self.settings["space"]))
        linear = [
            (channel, diagonal(self.library[term], self.settings["positive"], ends))
            for channel, term in model.unknowns
        ]
        own = {channel == one[0] for channel, one in linear if one and one[1]}
        return [
            replace(model, is_stiff=is_stiff, is_coupled=is_coupled)
            for is_tried, is_stiff, is_coupled in (
                (False in own, True, True),
                (True in own, True, False),
                (True, False, False),
            )
            if is_tried
        ]

    def converged(self, model: Model, limit: int) -> int:
        """The fewest steps, `limit` at most, after which twice as many change nothing, and half as many more;
        0 if there are none. Nor may they let a wave grow that is not there yet, but in noise."""
        s, num = self.seen[: self.count(NUM_TIMED, MOST_TIMED), :2], 1
        if not model.is_stiff:
            num = 2 ** max(0, math.ceil(math.log2(max(1e-9, self.fastest(model) / STABLE))))
        transform = FieldTransform(tuple(self.settings["space"]), self.settings["boundary"]).to(s.device)
        noise = torch.randn(s[:, 0].shape, generator=generator(0, "steps"), dtype=s.dtype).to(s.device)
        start = torch.cat([s[:, 0], s[:, 0] + NOISE * self.unit(s)[:, 0] * noise])
        least = transform(noise).abs().max()

        def frame(num: int) -> tuple[Tensor, Tensor]:
            """The next frame, and the largest mode of what becomes of the noise."""
            built = self.build(replace(model, num_steps=num))
            plain, noisy = self.run(built, model.values, start, 1).chunk(2)
            return plain, transform((noisy - plain) / (NOISE * self.unit(s))).abs().max()

        before = frame(num) if num <= limit else None
        while num + num // 2 <= limit:
            now = frame(2 * num)
            moved = ((now[0] - before[0]) / self.unit(s)).square().flatten(1).mean(1).sqrt()
            is_calm = before[1] <= GROWS * torch.maximum(now[1], least)
            if moved.median() <= MOVED[0] and moved.max() <= MOVED[1] and is_calm:
                return num + num // 2
            num, before = 2 * num, now
        return 0

    def fastest(self, model: Model) -> float:
        """The largest rate of a mode by the linear terms, per frame."""
        made, places = self.build(replace(model, is_stiff=True, is_coupled=True))
        weight = model.values.new_zeros(made.weight[0].numel()).index_copy(0, places, model.values)
        rates = made.rates(weight.view(1, *made.weight[0].shape)) * self.settings["dt"]
        return float(torch.linalg.eigvals(rates).abs().max()) if bool(rates.isfinite().all()) else math.inf

    def steadied(self, model: Model) -> Model:
        """In more steps where those help over HELD_OUT frames, if its error there is SUSPECT: waves that are
        hardly there at first have grown."""
        error, near = self.error(model, self.held), self.error(model, self.shot, is_bounded=True)
        for _ in range(DOUBLINGS):
            if error < min(SUSPECT[0] * near, SUSPECT[1]) or 2 * model.num_steps > self.most_steps:
                break
            tried = replace(model, num_steps=2 * model.num_steps)
            now = self.error(tried, self.held)
            if not now < HELPS * error and error < self.still:
                break
            model, error = tried, now
        return model

    # --------------------------------------------------------------------------------------- regression

    def equations(self, target: Tensor, trust: Tensor) -> Tensor:
        """Normal equations (weightings, C, terms + 1, terms + 1) of target (rows, C, cells), the derivative
        in time, averaged over three frames by Simpson's rule as the terms are; trust (weightings, rows,
        C)."""
        total: Tensor | float = 0.0
        parts = zip(self.seen.split(4), target[..., self.some].split(4), trust.split(4, 1), strict=True)
        for s, wanted, weight in parts:
            beat()
            values = self.whole(s.flatten(0, 1), self.some).unflatten(0, (-1, 3))
            values = (values[:, 0] + 4 * values[:, 1] + values[:, 2]) / 6
            columns = torch.cat([values[:, None].expand(-1, wanted.shape[1], -1, -1), wanted[:, :, None]], 2)
            x = columns * weight.sqrt()[..., None, None]  # weightings, rows, C, terms + 1, cells
            total = total + (x @ x.mT).sum(1)
        return total

    def core(self) -> tuple[Model, list[list[int]]] | None:
        """The first few terms, by several regressions, and the library of every channel: of the least product
        of the error on what is held out and the number of terms, as few windows say little of many. None if
        persistence is better."""
        s, dt = self.seen, self.settings["dt"]
        once, twice = (s[:, 2] - s[:, 0]).flatten(2), (s[:, 2] - 2 * s[:, 1] + s[:, 0]).flatten(2)
        first, second = (x.square().mean(2).clamp_min(1e-16) for x in (once, twice))
        ratio = (second / first).mean(1, True)
        slow = first.clamp_min(SLOW * first.mean(0))
        trust = torch.stack([ratio**-sharp / slow for sharp in SHARPNESS])
        tried, done = [], set()  # (error, model, its libraries)
        plain = [
            place
            for place, (_, factors) in enumerate(self.library)
            if all(channel == WAVE or len(axes) < 3 for channel, axes in factors)
        ]
        every, weighted = list(range(len(self.library))), [*self.equations(once / (2 * dt), trust)]
        for least, place in itertools.product(LEFT, range(len(weighted))):
            if least == LEFT[1] and any(error < GOOD for error, *_ in tried):
                break
            are_plain = [left(a, plain) <= max(least, HIGHER * left(a, every)) for a in weighted[place]]
            if (place, *are_plain) in done:
                continue
            done.add((place, *are_plain))
            own = [plain if is_plain else every for is_plain in are_plain]
            for size in SIZES:
                chosen = [backwards(a, terms, size) for a, terms in zip(weighted[place], own, strict=True)]
                values = [solve(a, terms) for a, terms in zip(weighted[place], chosen, strict=True)]
                unknowns = [(channel, term) for channel, terms in enumerate(chosen) for term in terms]
                model = self.timed(Model(unknowns, torch.cat(values)))
                if model is not None:
                    tried.append((self.error(model, self.held), model, own))
        holding = [one for one in tried if one[0] < self.still]
        if holding:
            return min(holding, key=lambda one: one[0] * len(one[1].unknowns))[1:]
        # nothing holds so long: what is closest over the next frames, where persistence has 0.5
        close = [
            (self.error(model, self.shot, is_bounded=True), model, own)
            for error, model, own in tried
            if math.isfinite(error)
        ]
        close = [one for one in close if one[0] < 0.5]
        if not close:
            return None
        _, model, own = min(close, key=lambda one: one[0])
        return self.steadied(model), own

    # --------------------------------------------------------------------------------- Gauss and Newton

    def tangents(self, model: Model, s: Tensor) -> tuple[Tensor, Tensor]:
        """What comes of s (rows, 1 + frames, C, *space) and its derivative by every value, by differences in
        float64: of 1e-5 of what moves a frame."""
        built, frames = self.build(model), s.shape[1] - 1
        made, places = built
        at = self.run(built, model.values, s[:, 0], frames)
        size = made.terms(s[:, 0]).square().mean((0, 2)).sqrt().clamp_min(1e-12)
        moved = (s[:, 1] - s[:, 0]).flatten(2).square().mean((0, 2)).sqrt().clamp_min(1e-12)
        steps = (1e-5 * moved[:, None] / (self.settings["dt"] * size)).flatten()[places]
        many, columns = max(1, BYTES // (8 * len(s) * self.cells * len(made.terms.terms))), []
        for some in torch.diag(steps).split(many):
            starts = s[:, 0].repeat(len(some), *[1] * (s.ndim - 2))
            moved = self.run(built, model.values + some, starts, frames)
            change = moved.unflatten(0, (len(some), -1)) - at
            columns.append(change / some.sum(1).view(-1, *[1] * at.ndim))
        return at, torch.cat(columns)

    def shooting(self, model: Model, frames: int = FRAMES) -> Tensor:
        """Normal equations (unknowns + 1, unknowns + 1) of what the integrator leaves of the frames, by its
        values; rows count as they do in the bounded error."""
        return self.shooting_rows(model, self.shot[:, : 1 + frames]).sum(0)

    def shooting_rows(self, model: Model, states: Tensor) -> Tensor:
        """`shooting` of every row of states (rows, 1 + frames, C, *space)."""
        found = []
        for s in states.split(8):
            at, columns = self.tangents(model, s)
            r = (s[:, 1:] - at) / self.unit(s)
            e = r.square().flatten(1).mean(1).sqrt().clamp_min(1e-6).view(-1, *[1] * (r.ndim - 1))
            x = torch.cat([columns / self.unit(s), r[None]]) / (e.sqrt() * (1 + e))
            x = x.flatten(2).transpose(0, 1)
            found.append(x @ x.mT)
        return torch.cat(found)

    def descended(self, model: Model, most: int = 8) -> Model:
        """After Levenberg's and Marquardt's steps, until one gains less than a hundredth, or loses over the
        longer frames of what is held out: few windows say little of many terms."""
        error, damping = self.error(model, self.shot, is_bounded=True), 1e-3
        longer = self.error(model, self.held)
        for _ in range(most):
            best, before, (a, length) = model, error, scaled(self.shooting(model))
            for _ in range(3):
                damped = a[:-1, :-1] + damping * torch.eye(len(a) - 1, dtype=a.dtype, device=a.device)
                step = torch.linalg.solve(damped, a[:-1, -1]) * length[-1] / length[:-1]
                tried = replace(model, values=model.values + step)
                now = self.error(tried, self.shot, is_bounded=True)
                if now < error:
                    model, error, damping = tried, now, damping / 10
                    break
                damping *= 10
            if model is best:
                break
            then, longer = longer, self.error(model, self.held)
            if not longer <= then and math.isfinite(then):
                return best
            if error > 0.99 * before:
                break
        return model

    def grown(self, model: Model, libraries: list[list[int]]) -> Model:
        """With up to ADDED terms more: those with the largest tangents along what the integrator leaves,
        among the candidates that a regression of it finds."""
        s, dt, built = self.seen, self.settings["dt"], self.build(model)
        missed = sum(s[:, i + 1] - self.run(built, model.values, s[:, i], 1)[:, 0] for i in (0, 1))
        missed = missed.flatten(2) / (2 * dt)
        [equations] = self.equations(missed, 1 / missed.square().mean(2).clamp_min(1e-16)[None])
        wanted = list(model.unknowns)
        for channel, (a, among) in enumerate(zip(equations, libraries, strict=True)):
            own = [among.index(term) for c, term in model.unknowns if c == channel]
            a = a[[*among, -1]][:, [*among, -1]]
            wanted += [(channel, among[place]) for place in forwards(a, own, CANDIDATES)[len(own) :]]
        more = model.values.new_zeros(len(wanted) - len(model.values))
        wider = replace(model, unknowns=wanted, values=torch.cat([model.values, more]))
        kept = forwards(self.shooting(wider, 1), list(range(len(model.values))), ADDED, GAIN)
        return replace(wider, unknowns=[wanted[place] for place in kept], values=wider.values[kept])

    def model(self) -> Model | None:
        """The equation of this parameter value, or None where no terms are better than persistence."""
        core = self.core()
        if core is None:
            return None
        first, libraries = core
        model, before = self.steadied(self.timed(self.descended(first)) or first), math.inf
        error = self.error(model, self.held)
        for _ in range(MOST_GROWTHS):
            wider = self.grown(model, libraries) if error < GREW * before else model
            if wider.unknowns == model.unknowns or (wider := self.timed(self.descended(wider))) is None:
                break
            wider = self.steadied(wider)
            now = self.error(wider, self.held)
            if not now < error:
                break
            model, error, before = wider, now, error
        return model if error < self.still else None


def terms_of(models: list[Model], terms: list[Term]) -> tuple[list[Term], Tensor]:
    """The terms of all parameter values' models, and their weights (values, C, terms)."""
    used = sorted({term for model in models for _, term in model.unknowns})
    weight = torch.zeros(len(models), 1 + max(c for model in models for c, _ in model.unknowns), len(used))
    for row, model in zip(weight, models, strict=True):
        for (channel, term), value in zip(model.unknowns, model.values.tolist(), strict=True):
            row[channel, used.index(term)] = value
    return [terms[term] for term in used], weight
