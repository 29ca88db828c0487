"""Select among fitted bases: of those that validation cannot tell from the best, the simplest that is stable.

Bases with equal errors on the data may differ by orders of magnitude beyond them: a polynomial has many
coefficients that are fitted where the data are, and grows elsewhere.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.data.cache import Cache
from ups.metrics.errors import ERROR, rmse
from ups.metrics.intervals import compare, ratio
from ups.metrics.spectra import rms, space_axes
from ups.models.assimilation import can_estimate, estimated
from ups.models.head import TaskHead
from ups.models.rollout import rollout
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform

NUM_BOOTSTRAP = 1000
MAX_RATIO = 1.1  # of errors: a base with a larger one is worse, even if too few trajectories prove it
ROUNDING = 1e-6  # error of a frame by float32 transforms and sums (8 eps), relative to the field
NUM_LONG_ROLLOUTS = 16
LONG_FACTOR = 4  # length of these rollouts, in lengths of the data
NOISE = 1e-3  # standard deviations, added to their start; modes of the data below it count as empty
SLACK = 2.0  # factor on the growth that the data allow


@dataclass(frozen=True)
class Candidate:
    """A head with a fitted base, and the errors of its validation rollouts: rmse and ref_rms, (rows, frames,
    predicted fields), float64."""

    name: str
    head: TaskHead
    rmse: Tensor
    ref_rms: Tensor

    def for_fields(self, fields: Sequence[int]) -> "Candidate":
        """The candidate with the errors of some of the predicted fields."""
        return replace(self, rmse=self.rmse[..., fields], ref_rms=self.ref_rms[..., fields])

    def error(self, num_frames: int | None = None) -> float:
        """Pooled nRMSE over the first frames (None: all) and the fields that are not zero throughout; inf if
        the rollout blew up.
        """
        pooled = [values[:, :num_frames].square().mean(0).sqrt() for values in (self.rmse, self.ref_rms)]
        errors = ratio(*pooled)
        error = float(errors[~errors.isnan()].mean())
        return error if math.isfinite(error) else math.inf


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
    return Candidate(name, head, *(torch.cat(values) for values in zip(*found, strict=True)))


def is_as_good(one: Candidate, best: Candidate, groups: Tensor, seed: int) -> bool:
    """Whether validation cannot tell `one` from `best`, in the first frame and over all frames.

    Their errors differ by rounding, or by less than MAX_RATIO and no more than chance: the paired 95 %
    interval of their ratio includes 1. groups (rows,): trajectories with one initial condition.
    """
    for num_frames in (1, one.rmse.shape[1]):
        error, least = one.error(num_frames), best.error(num_frames)
        if error - least <= ROUNDING * num_frames:
            continue
        if error > MAX_RATIO * least:
            return False
        scores = [
            {"rmse": each.rmse[:, :num_frames], "ref_rms": each.ref_rms[:, :num_frames]}
            for each in (one, best)
        ]
        low = compare(ERROR["nrmse_pooled"], *scores, NUM_BOOTSTRAP, seed, groups)["low"]
        if not low or low > 1:
            return False
    return True


def is_clearly_better(one: Candidate, other: Candidate, groups: Tensor, seed: int) -> bool:
    """Whether the error of `one` over that of `other` is below 1 by more than chance."""
    scores = [{"rmse": each.rmse, "ref_rms": each.ref_rms} for each in (one, other)]
    high = compare(ERROR["nrmse_pooled"], *scores, NUM_BOOTSTRAP, seed, groups)["high"]
    return high is not None and high < 1


class Ties:
    """The candidates that validation cannot tell from the best, by the errors of some predicted fields."""

    def __init__(self, fields: Sequence[int], groups: Tensor, seed: int):
        self.fields, self.groups, self.seed = list(fields), groups, seed
        self.kept: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        """Add a candidate, and drop those that are worse than the best."""
        if math.isfinite(self.error(candidate)):
            self.kept.append(candidate)
            best = self.best
            self.kept = [one for one in self.kept if one is best or self.is_as_good(one, best)]

    @property
    def best(self) -> Candidate:
        """The candidate with the least error."""
        return min(self.kept, key=self.error)

    def error(self, one: Candidate) -> float:
        """The pooled nRMSE of the fields."""
        return one.for_fields(self.fields).error()

    def is_as_good(self, one: Candidate, other: Candidate) -> bool:
        """`is_as_good` for the fields."""
        return is_as_good(one.for_fields(self.fields), other.for_fields(self.fields), self.groups, self.seed)


class Shortlist:
    """The best candidates of a task: `Ties` for all fields together (`all`) and for each unit, a field or a
    vector.

    rows: validation trajectories; trained: training trajectories, whose growth is allowed. scores: the pooled
    nRMSE of all candidates, inf if one blew up.
    """

    def __init__(self, cache: Cache, context: int, rows: Tensor, trained: Tensor, seed: int):
        self.cache, self.context, self.rows, self.trained, self.seed = cache, context, rows, trained, seed
        spec, groups = cache.task, cache.trajectory[rows]
        vectors = [[spec.fields.index(name) for name in vector] for vector in spec.vectors]
        scalars = {*range(len(spec.moving))} - {channel for vector in vectors for channel in vector}
        units = sorted([*([channel] for channel in scalars), *vectors])
        self.all = Ties(range(len(spec.moving)), groups, seed)
        self.units = [
            Ties(unit, groups, seed) for unit in units if max(unit) < len(spec.moving) and len(units) > 1
        ]
        self.scores: dict[str, float] = {}
        self._growth: Growth | None = None
        self._instability: dict[str, str] = {}
        self._next_frames: dict[str, Candidate] = {}

    def add(self, name: str, head: TaskHead) -> None:
        """Evaluate a base and add it for all fields and for each unit."""
        candidate = self.evaluate(name, head)
        self.scores[name] = candidate.error()
        for ties in (self.all, *self.units):
            ties.add(candidate)

    def evaluate(self, name: str, head: TaskHead) -> Candidate:
        """The candidate with the errors of its rollouts: from an estimated start if that is clearly better,
        and then its facts say so."""

        def evaluated(start_frames: int | None) -> Candidate:
            one = head.with_facts(start_frames=start_frames)
            return evaluate_candidate(name, one, self.cache, self.context, self.rows)

        if not can_estimate(head, self.context):
            return evaluated(None)
        candidate, better = evaluated(0), evaluated(self.context)
        is_better = is_clearly_better(better, candidate, self.cache.trajectory[self.rows], self.seed)
        return better if is_better else candidate

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

    def select(self, ties: Ties) -> Candidate:
        """The simplest stable candidate; if none is stable, the best one, with more steps if that makes it
        stable."""
        ranked = sorted(ties.kept, key=lambda one: (*one.head.base.complexity, ties.error(one)))
        ranked = [
            one
            for place, one in enumerate(ranked)
            if not any(self.is_better_cellwise(other, one, ties) for other in ranked[place + 1 :])
        ]
        stable = next((one for one in ranked if not self.instability(one)), None)
        return stable or self.stabilised(ties)

    def is_better_cellwise(self, one: Candidate, simpler: Candidate, ties: Ties) -> bool:
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
        found = (self._next_frames[each.name].for_fields(ties.fields) for each in (one, simpler))
        return is_clearly_better(*found, ties.groups, self.seed)

    def stabilised(self, ties: Ties) -> Candidate:
        """The best candidate, with twice its sub-steps if it is then stable and no worse."""
        best = ties.best
        if (more := best.head.base.with_more_steps()) is None:
            return best
        finer_base, changed = more
        base = best.head.facts.base
        head = best.head.with_facts(base=base | {"settings": base["settings"] | changed})
        head.base = finer_base
        finer = self.evaluate(f"{best.name}, twice the steps", head)
        least, rounding = ties.error(best), ROUNDING * best.rmse.shape[1]
        if not ties.error(finer) <= max(MAX_RATIO * least, least + rounding) or self.instability(finer):
            return best
        self.scores[finer.name] = finer.error()
        return finer


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
            new = head.keep(base.alone(u, parameters)[:, None], u[:, -1])
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
