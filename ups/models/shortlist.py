"""Validation of fitted bases: their rollouts, how they grow beyond the data, and whether noise explains their
errors.

Bases with equal errors on the data may differ by orders of magnitude beyond them: a polynomial has many
coefficients that are fitted where the data are, and grows elsewhere.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.data.cache import Cache
from ups.metrics.errors import rmse
from ups.metrics.spectra import rms, space_axes
from ups.models.assimilation import (
    can_estimate,
    estimated,
    has_white_noise,
    noise_scale,
    perturbed,
    trajectory,
)
from ups.models.head import TaskHead
from ups.models.rollout import rollout
from ups.select import (
    Decision,
    Errors,
    choose,
    explain_errors,
    is_as_good,
    is_clearly_better,
    select_start,
)
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform

NUM_LONG_ROLLOUTS = 16
LONG_FACTOR = 4  # length of these rollouts, in lengths of the data
NOISE = 1e-3  # standard deviations, added to their start; modes of the data below it count as empty
SLACK = 2.0  # factor on the growth that the data allow
NUM_NOISY, NUM_MEMBERS = 16, 4  # trajectories and members of the ensemble that explains errors
STANDARD_ERRORS = 2.0  # by which the excess of an error over noise and spread may be chance


@dataclass(frozen=True)
class Candidate(Errors):
    """A head with a fitted base, and the errors of its validation rollouts."""

    name: str
    head: TaskHead


@torch.no_grad()
def evaluate_candidate(
    name: str, head: TaskHead, cache: Cache, context: int, rows: Tensor, is_rolled_out: bool = True
) -> Candidate:
    """The candidate with its errors on `rows`: of rollouts of the base alone after the first `context`
    frames, from an estimated start if the head has one. For steady tasks, and with is_rolled_out=False, they
    are the errors of single calls from true inputs.
    """
    device, predicted, found = head.scale.device, cache.task.predicted, []
    for batch in cache.row_blocks(rows, cache.num_frames, len(rows)):
        u = head.codec.decode(cache.batch(batch, 0, cache.num_frames, device))
        given, u_ref = u[:, :context], u[:, context:]
        if is_rolled_out and head.start_frames:
            given = estimated(head, given, cache.parameters[batch])
        if head.task.is_steady:
            given, u_ref = head.input_codec.decode(cache.inputs(batch, device)), u
        parameters = head.parameters_of(cache, batch, context - 1, u_ref.shape[1] + 1)
        calls = itertools.count()

        def step(window: Tensor) -> Tensor:
            later = parameters.later(next(calls))  # noqa: B023
            return head.next_frame(window, later, is_alone=True)[:, None]

        if is_rolled_out:
            u_pred = rollout(step, given, u_ref.shape[1], head.history)
        else:
            u_pred = torch.cat(
                [step(u[:, frame - head.history : frame]) for frame in range(context, cache.num_frames)], 1
            )
        # in physical units, as the nRMSE of the report and of the training log
        u_pred, u_ref = (predicted(head.codec.denormalise(w).double()) for w in (u_pred, u_ref))
        u_pred = u_pred.nan_to_num(math.inf, math.inf, -math.inf)
        found.append((rmse(u_pred, u_ref).cpu(), rms(u_ref).cpu()))
    return Candidate(*(torch.cat(values) for values in zip(*found, strict=True)), name, head)


class Shortlist:
    """The candidates of a task that validation cannot tell from the best.

    rows: validation trajectories; trained: training trajectories, whose growth is allowed. scores, intervals:
    the pooled nRMSE of all candidates, inf if one blew up. starts: the decisions on their starts.
    """

    def __init__(self, cache: Cache, context: int, rows: Tensor, trained: Tensor, seed: int):
        self.cache, self.context, self.rows, self.trained, self.seed = cache, context, rows, trained, seed
        self.groups = cache.trajectory[rows]
        self.kept: list[Candidate] = []
        self.scores: dict[str, float] = {}
        self.intervals: dict[str, tuple[float | None, float | None]] = {}
        self.starts: dict[str, Decision] = {}
        self._growth: Growth | None = None
        self._instability: dict[str, str] = {}
        self._next_frames: dict[str, Candidate] = {}

    def add(self, name: str, head: TaskHead) -> None:
        """Evaluate a base and keep it, unless it is worse than the best."""
        candidate = self.evaluate(name, head)
        self.scores[name] = candidate.error()
        self.intervals[name] = candidate.interval(self.groups, self.seed)
        self.keep(candidate)

    def keep(self, candidate: Candidate) -> None:
        """Keep a candidate and those that validation cannot tell from the best."""
        if math.isfinite(candidate.error()):
            self.kept.append(candidate)
            best = self.best
            self.kept = [
                one for one in self.kept if one is best or is_as_good(one, best, self.groups, self.seed)
            ]

    @property
    def best(self) -> Candidate:
        """The candidate with the least error."""
        return min(self.kept, key=Candidate.error)

    def evaluate(self, name: str, head: TaskHead) -> Candidate:
        """The candidate with the errors of its rollouts: from an estimated start if that is clearly better,
        and then its facts say so."""

        def evaluated(start_frames: int | None) -> Candidate:
            one = head.with_facts(start_frames=start_frames)
            return evaluate_candidate(name, one, self.cache, self.context, self.rows)

        if not can_estimate(head, self.context):
            return evaluated(None)
        frames = self.context
        starts = {"last frame": evaluated(0), f"estimated from {frames} frames": evaluated(frames)}
        question = f"start of forecasts of {head.name} by {name}"
        self.starts[name] = select_start(question, starts, self.groups, self.seed)
        return starts[self.starts[name].chosen]

    def instability(self, one: Candidate) -> str:
        """How a candidate grows beyond the data, in words; "" if it is stable or the task is steady."""
        if self.cache.task.is_steady:
            return ""
        self._growth = self._growth or Growth(self.cache, one.head, torch.cat([self.trained, self.rows]))
        if one.name not in self._instability:
            self._instability[one.name] = self._growth.exceeded_by(
                one.head, self.rows[:NUM_LONG_ROLLOUTS], self.context, self.seed
            )
        return self._instability[one.name]

    def select(self) -> tuple[Candidate, list[Decision]]:
        """The simplest stable candidate; if none is stable, the best one. With the decisions on the base and,
        if there was one, on the start of its forecasts."""
        ranked = sorted(self.kept, key=lambda one: (*one.head.base.complexity, one.error()))
        tied = {
            one.name: one
            for place, one in enumerate(ranked)
            if not any(self.is_better_cellwise(other, one) for other in ranked[place + 1 :])
        }
        decision = choose(
            f"base of {self.cache.task.name}",
            {one.name: one.error() for one in ranked} | self.scores,
            "the simplest that is stable beyond the data, of those that validation cannot tell from the best",
            lambda name, _: name in tied,
            lambda name: not self.instability(tied[name]),
            self.intervals,
            len(self.rows),
            self.seed,
        )
        [chosen] = (one for one in ranked if one.name == decision.chosen)
        return chosen, [decision, *(self.starts[name] for name in [chosen.name] if name in self.starts)]

    def is_better_cellwise(self, one: Candidate, simpler: Candidate) -> bool:
        """Whether `one` is a cellwise map that beats `simpler` in next frames from every start of the
        validation trajectories. These are many more than the rollouts, which noise may dominate.
        """
        if not one.head.base.is_cellwise or self.cache.task.is_steady:
            return False
        for each in (one, simpler):
            if each.name not in self._next_frames:
                self._next_frames[each.name] = evaluate_candidate(
                    each.name, each.head, self.cache, self.context, self.rows, is_rolled_out=False
                )
        found = (self._next_frames[each.name] for each in (one, simpler))
        return is_clearly_better(*found, self.groups, self.seed)


class Growth:
    """How far the trajectories of a task move from their start, and which modes they leave empty. A base that
    grows more, or fills those modes, is unstable.

    moved (frames, C): the largest distance from the start so far, RMS over space. Beyond the data, linear
    growth may continue, and exponential growth (of the distance or of the variation in space) at its rate
    over the last half.
    """

    @torch.no_grad()
    def __init__(self, cache: Cache, head: TaskHead, rows: Tensor):
        self.cache, self.num_frames = cache, cache.num_frames
        self.fields = cache.task.moving
        self.transform = FieldTransform(cache.tokenizer.space, cache.task.boundary).to(head.scale.device)
        moved, power, size = [], 0.0, 0.0
        for batch in cache.row_blocks(rows, cache.num_frames, len(rows)):
            w = head.codec.decode(cache.batch(batch, 0, cache.num_frames, head.scale.device))
            w = w[:, :, : len(self.fields)]
            moved.append(rms(w - w[:, :1]).amax(0))
            size = size + rms(w - w.mean(space_axes(w), True)).square().sum(0)
            power = power + self.transform(w).abs().square().mean(1).sum(0) / len(rows)
        self.is_empty = power.sqrt() < NOISE  # C, modes
        self.moved = torch.stack(moved).amax(0).cummax(0).values.clamp_min(NOISE)
        half, size = (self.num_frames - 1) // 2, (size / len(rows)).sqrt().clamp_min(NOISE)
        faster, larger = self.moved[-1] / self.moved[half], size[-1] / size[half]
        grown = torch.where(faster > 2, torch.maximum(faster, larger), larger)  # 2 is linear growth
        self.rate = grown.log().clamp_min(0) / (self.num_frames / 2)

    def allowed(self, num_frames: int) -> Tensor:
        """The factor (C,) by which a field may grow from the end of the data to frame `num_frames`."""
        later = max(0, num_frames - self.num_frames)
        return SLACK * (1 + later / self.num_frames) * (self.rate * later).exp()

    @torch.no_grad()
    def exceeded_by(self, head: TaskHead, rows: Tensor, context: int, seed: int) -> str:
        """How the base of a head exceeds the growth of the data, in words; "" if it does not. By rollouts of
        LONG_FACTOR times the length of the data, from a start with a little noise and without bounds."""
        device, num_fields = head.scale.device, len(self.fields)
        u = head.codec.decode(self.cache.batch(rows, 0, context, device))
        start, parameters = u[:, :1, :num_fields], head.parameters_of(self.cache, rows, 0, self.num_frames)
        forcing = parameters.forcing  # is repeated after its last frame
        noise = torch.randn(u[:, :, :num_fields].shape, generator=generator(seed, head.name, "growth"))
        u[:, :, :num_fields] += NOISE * noise.to(device)
        u, base, empty = u[:, -head.history :], head.base.unbounded(), torch.zeros(num_fields, device=device)
        for frame in range(context, LONG_FACTOR * self.num_frames):
            beat()
            if forcing is not None:
                now = [(frame - 1) % self.num_frames, frame % self.num_frames]
                parameters = replace(parameters, forcing=forcing[:, now])
            new = base.alone(u, parameters)[:, None]
            for constraint in head.invariants:
                new = constraint(new, u[:, -1])
            u = torch.cat([u, new], 1)[:, -head.history :]
            moved = rms(new[:, :, :num_fields] - start).amax((0, 1))
            allowed = self.allowed(frame + 1)
            if wrong := self._names(~(moved <= allowed * self.moved[-1])):
                return f"{wrong} leaves all bounds of the data within {frame + 1} frames"
            if frame == self.num_frames - 1:
                empty = self._in_empty_modes(new[:, 0, :num_fields])
        grown = self._in_empty_modes(new[:, 0, :num_fields]) / empty.clamp_min(NOISE)
        if wrong := self._names(~(grown <= allowed)):
            return (
                f"modes of {wrong} that are empty in the data grow {float(grown.max()):.1e} times from "
                f"frame {self.num_frames} to {LONG_FACTOR * self.num_frames}"
            )
        return ""

    def _in_empty_modes(self, w: Tensor) -> Tensor:
        """RMS (C,) of fields w (rows, C, *space) in the modes that are empty in the data."""
        power = torch.where(self.is_empty, self.transform(w).abs().square().mean(0), 0.0)
        return (power.sum(1) / self.is_empty.sum(1).clamp_min(1)).sqrt()

    def _names(self, is_wrong: Tensor) -> str:
        return ", ".join(name for name, wrong in zip(self.fields, is_wrong.tolist(), strict=True) if wrong)


@torch.no_grad()
def cause_of_errors(head: TaskHead, cache: Cache, context: int, seed: int) -> Decision | None:
    """Whether noise in the start and in the truth explains the errors of the base on validation; then none is
    in the dynamics. None for a task without noise."""
    if not has_white_noise(head):
        return None
    task, rows = head.task, cache.rows_by_parameter("val", NUM_NOISY)
    rows = cache.row_blocks(rows, cache.num_frames, NUM_NOISY)[0]
    w = head.codec.decode(cache.batch(rows, 0, cache.num_frames, head.scale.device))
    raw = cache.parameters[rows].repeat_interleave(NUM_MEMBERS, 0)
    given, w_ref = w[:, :context], task.predicted(w[:, context:])
    start = perturbed(head, given, seed, rows.tolist(), NUM_MEMBERS).flatten(0, 1)
    start = estimated(head, start, raw) if head.start_frames else start[:, -head.history :]
    frames = trajectory(head, start, head.parameter_batch(raw), head.history + w_ref.shape[1])
    members = task.predicted(frames[:, head.history :]).unflatten(0, (-1, NUM_MEMBERS))
    valid = task.predicted(head.codec.held(torch.ones_like(given[:1, :1])))
    noise = valid * task.predicted(noise_scale(head).expand_as(given[0, 0])).square()
    explained = (1 + 1 / NUM_MEMBERS) * members.var(1) + noise
    error = (members.mean(1) - w_ref).square()
    # all leads and late ones, as noise in the dynamics adds up; by row, as chaos drives few of them far apart
    excess = torch.stack(
        [
            (error[:, first:].flatten(1).mean(1) / explained[:, first:].flatten(1).mean(1)).log()
            for first in (0, error.shape[1] // 2)
        ]
    )
    least = excess.mean(1) - STANDARD_ERRORS * excess.std(1) / math.sqrt(len(rows))
    return explain_errors(f"cause of the errors of {head.name}", float(least.max()), len(rows), seed)
