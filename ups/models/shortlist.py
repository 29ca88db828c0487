"""Which fitted base serves a task: of those that validation cannot tell from the best, the simplest one that
is stable beyond the data.

Two bases that forecast the data equally well may differ by orders of magnitude beyond them: a polynomial fits
its many numbers where the data are, and grows where they are not.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.common.seeds import generator
from ups.common.spectral import FieldTransform
from ups.data.cache import Cache
from ups.metrics.errors import ERROR, rmse
from ups.metrics.intervals import compare, ratio
from ups.metrics.spectra import rms, space_axes
from ups.models.head import TaskHead
from ups.models.rollout import rollout

NUM_BOOTSTRAP = 1000
WORSE = 1.1  # times the error of the best: no base is as good with more, however few trajectories tell
ROUNDING = 1e-6  # of the field, in a frame: a float32 transform there and back, and the sums between (8 eps)
NUM_LONG = 16  # validation trajectories that are forecast beyond the data
LONG = 4  # times the frames of the data is how far
# of a channel's standard deviation: noise that is added to their start; modes of the data below it are empty
NOISE = 1e-3
SLACK = 2.0  # times what the data allow


@dataclass(frozen=True)
class Candidate:
    """A head with a fitted base, and what its validation rollouts leave: rmse and ref_rms, (rows, frames,
    predicted fields), float64, of normalised fields."""

    name: str
    head: TaskHead
    rmse: Tensor
    ref_rms: Tensor

    def of(self, fields: Sequence[int]) -> "Candidate":
        """What it leaves of some of the predicted fields."""
        return replace(self, rmse=self.rmse[..., fields], ref_rms=self.ref_rms[..., fields])

    def error(self, num_frames: int | None = None) -> float:
        """Pooled nRMSE over the first frames (all), of the fields that are not zero throughout; inf if the
        forecast blew up."""
        pooled = [part[:, :num_frames].square().mean(0).sqrt() for part in (self.rmse, self.ref_rms)]
        errors = ratio(*pooled)
        error = float(errors[~errors.isnan()].mean())
        return error if math.isfinite(error) else math.inf


@torch.no_grad()
def tried(
    name: str, head: TaskHead, cache: Cache, context: int, rows: Tensor, is_rolled_out: bool = True
) -> Candidate:
    """The candidate after rollouts of the base alone from the first `context` frames of `rows` (single calls
    for a steady task), or after calls from the truth before each of the frames that follow."""
    device, predicted, found = head.scale.device, cache.task.predicted, []
    for some in cache.parts(rows, cache.num_frames, len(rows)):
        u = head.codec.decode(cache.batch(some, 0, cache.num_frames, device))
        given, u_ref = u[:, :context], u[:, context:]
        if head.task.is_steady:
            given, u_ref = head.input_codec.decode(cache.inputs(some, device)), u
        parameters, calls = (
            head.parameters_of(cache, some, context - 1, u_ref.shape[1] + 1),
            itertools.count(),
        )

        def step(window: Tensor) -> Tensor:
            return head.next_frame(window, parameters.later(next(calls)), is_alone=True)[:, None]  # noqa: B023

        if is_rolled_out:
            u_pred = rollout(step, given, u_ref.shape[1], head.history)
        else:
            u_pred = torch.cat(
                [step(u[:, frame - head.history : frame]) for frame in range(context, cache.num_frames)], 1
            )
        # in physical units, as the nRMSE of the report and of the log of training
        u_pred, u_ref = (predicted(head.codec.denormalise(w).double()) for w in (u_pred, u_ref))
        u_pred = u_pred.nan_to_num(math.inf, math.inf, -math.inf)
        found.append((rmse(u_pred, u_ref).cpu(), rms(u_ref).cpu()))
    return Candidate(name, head, *(torch.cat(parts) for parts in zip(*found, strict=True)))


def is_as_good(one: Candidate, best: Candidate, groups: Tensor, seed: int) -> bool:
    """Whether validation cannot tell `one` from `best`, neither in the first frame nor over all of them: they
    differ by rounding, or by less than WORSE and no more than chance (the paired 95 % interval of the ratio
    of their errors holds 1). groups (rows,): trajectories of one initial condition."""
    for num_frames in (1, one.rmse.shape[1]):
        here, there = one.error(num_frames), best.error(num_frames)
        if here - there <= ROUNDING * num_frames:
            continue
        scores = [
            {"rmse": each.rmse[:, :num_frames], "ref_rms": each.ref_rms[:, :num_frames]}
            for each in (one, best)
        ]
        low = (
            here <= WORSE * there
            and compare(ERROR["nrmse_pooled"], *scores, NUM_BOOTSTRAP, seed, groups)["low"]
        )
        if not low or low > 1:
            return False
    return True


class Ties:
    """The candidates that validation cannot tell from the best by the errors of `fields` (predicted ones)."""

    def __init__(self, fields: Sequence[int], groups: Tensor, seed: int):
        self.fields, self.groups, self.seed = list(fields), groups, seed
        self.kept: list[Candidate] = []

    def add(self, found: Candidate) -> None:
        """Take in a candidate, and drop those that are worse than the best."""
        if math.isfinite(self.error(found)):
            self.kept.append(found)
            best = self.best
            self.kept = [one for one in self.kept if one is best or self.is_as_good(one, best)]

    @property
    def best(self) -> Candidate:
        """The candidate of the least error."""
        return min(self.kept, key=self.error)

    def error(self, one: Candidate) -> float:
        """The pooled nRMSE of the fields."""
        return one.of(self.fields).error()

    def is_as_good(self, one: Candidate, other: Candidate) -> bool:
        """Whether validation cannot tell `one` from a better one."""
        return is_as_good(one.of(self.fields), other.of(self.fields), self.groups, self.seed)


class Shortlist:
    """What serves a task, and what might serve some of its fields: `Ties` of all and of every unit of them, a
    field or a vector.

    rows: validation trajectories; trained: training trajectories, which say what growth is theirs. scores:
    the pooled nRMSE of all that were added, inf for one that blew up.
    """

    def __init__(self, cache: Cache, context: int, rows: Tensor, trained: Tensor, seed: int):
        self.cache, self.context, self.rows, self.trained, self.seed = cache, context, rows, trained, seed
        spec, groups = cache.task, cache.trajectory[rows]
        vectors = [[spec.fields.index(name) for name in vector] for vector in spec.vectors]
        alone = {*range(len(spec.moving))} - {channel for vector in vectors for channel in vector}
        units = sorted([*([channel] for channel in alone), *vectors])
        self.all = Ties(range(len(spec.moving)), groups, seed)
        self.units = [
            Ties(unit, groups, seed) for unit in units if max(unit) < len(spec.moving) and len(units) > 1
        ]
        self.scores: dict[str, float] = {}
        self._growth: Growth | None = None
        self._unstable: dict[str, str] = {}
        self._next_frames: dict[str, Candidate] = {}

    def add(self, name: str, head: TaskHead) -> None:
        """Try a base for all fields."""
        found = self.try_out(name, head)
        self.scores[name] = found.error()
        for ties in (self.all, *self.units):
            ties.add(found)

    def try_out(self, name: str, head: TaskHead) -> Candidate:
        """A candidate after its rollouts."""
        return tried(name, head, self.cache, self.context, self.rows)

    def unstable(self, one: Candidate) -> str:
        """In which way a candidate outgrows the data; "" if it does not, or makes no rollouts."""
        if self.cache.task.is_steady:
            return ""
        self._growth = self._growth or Growth(self.cache, one.head, torch.cat([self.trained, self.rows]))
        if one.name not in self._unstable:
            self._unstable[one.name] = self._growth.exceeded_by(
                one.head, self.rows[:NUM_LONG], self.context, self.seed
            )
        return self._unstable[one.name]

    def select(self, ties: Ties) -> Candidate:
        """The simplest candidate that is stable beyond the data, if none is the best in twice its sub-steps
        where that makes it stable, else the best."""
        ranked = sorted(ties.kept, key=lambda one: (*one.head.base.complexity, ties.error(one)))
        ranked = [
            one
            for place, one in enumerate(ranked)
            if not any(self.beats(other, one, ties) for other in ranked[place + 1 :])
        ]
        return next((one for one in ranked if not self.unstable(one)), None) or self.steadied(ties)

    def beats(self, one: Candidate, simpler: Candidate, ties: Ties) -> bool:
        """Whether next frames from every start of the validation trajectories show that a map of cells is
        better than a base that their rollouts cannot tell from it: where noise decides, these are few."""
        if not one.head.base.is_cellwise or self.cache.task.is_steady:
            return False
        scores = []
        for each in (one, simpler):
            if each.name not in self._next_frames:
                self._next_frames[each.name] = tried(
                    each.name, each.head, self.cache, self.context, self.rows, is_rolled_out=False
                )
            found = self._next_frames[each.name].of(ties.fields)
            scores.append({"rmse": found.rmse, "ref_rms": found.ref_rms})
        high = compare(ERROR["nrmse_pooled"], *scores, NUM_BOOTSTRAP, self.seed, ties.groups)["high"]
        return high is not None and high < 1

    def steadied(self, ties: Ties) -> Candidate:
        """The best candidate, in twice its sub-steps if it is stable then and no worse but for rounding."""
        best = ties.best
        if (more := best.head.base.with_more_steps()) is None:
            return best
        head = copy.deepcopy(best.head)
        head.base, changed = more
        head.description["base"]["settings"] |= changed
        finer = self.try_out(f"{best.name}, twice the steps", head)
        least, rounding = ties.error(best), ROUNDING * best.rmse.shape[1]
        if not ties.error(finer) <= max(WORSE * least, least + rounding) or self.unstable(finer):
            return best
        self.scores[finer.name] = finer.error()
        return finer


class Growth:
    """How far the trajectories of a task move from their start, and which modes they leave empty: what tells
    growth that is theirs from that of a base.

    moved (frames, C): the most that any has moved so far, RMS over space. Linear growth may go on, and
    exponential growth, of that or of what varies in space, at its rate over the last half.
    """

    @torch.no_grad()
    def __init__(self, cache: Cache, head: TaskHead, rows: Tensor):
        self.cache, self.num_frames = cache, cache.num_frames
        self.fields = cache.task.moving
        self.transform = FieldTransform(cache.tokenizer.space, cache.task.boundary).to(head.scale.device)
        moved, power, size = [], 0.0, 0.0
        for some in cache.parts(rows, cache.num_frames, len(rows)):
            w = head.codec.decode(cache.batch(some, 0, cache.num_frames, head.scale.device))
            w = w[:, :, : len(self.fields)]
            moved.append(rms(w - w[:, :1]).amax(0))
            size = size + rms(w - w.mean(space_axes(w), True)).square().sum(0)
            power = power + self.transform(w).abs().square().mean(1).sum(0) / len(rows)
        self.is_empty = power.sqrt() < NOISE  # C, modes
        self.moved = torch.stack(moved).amax(0).cummax(0).values.clamp_min(NOISE)
        half, size = (self.num_frames - 1) // 2, (size / len(rows)).sqrt().clamp_min(NOISE)
        faster, larger = self.moved[-1] / self.moved[half], size[-1] / size[half]
        grown = torch.where(faster > 2, torch.maximum(faster, larger), larger)  # linear growth has 2
        self.rate = grown.log().clamp_min(0) / (self.num_frames / 2)

    def allowed(self, num_frames: int) -> Tensor:
        """By which factor (C,) a field may grow from the end of the data to so many frames."""
        later = max(0, num_frames - self.num_frames)
        return SLACK * (1 + later / self.num_frames) * (self.rate * later).exp()

    @torch.no_grad()
    def exceeded_by(self, head: TaskHead, rows: Tensor, context: int, seed: int) -> str:
        """How the base of a head outgrows the data in forecasts LONG times as long, started with a little
        noise and free of all bounds, in words; "" if it does not."""
        device, num_fields = head.scale.device, len(self.fields)
        u = head.codec.decode(self.cache.batch(rows, 0, context, device))
        start, parameters = u[:, :1, :num_fields], head.parameters_of(self.cache, rows, 0, self.num_frames)
        forcing = parameters.forcing  # the same again after the last frame
        noise = torch.randn(u[:, :, :num_fields].shape, generator=generator(seed, head.name, "growth"))
        u[:, :, :num_fields] += NOISE * noise.to(device)
        u, base, empty = u[:, -head.history :], head.base.unbounded(), torch.zeros(num_fields, device=device)
        for frame in range(context, LONG * self.num_frames):
            beat()
            if forcing is not None:
                now = [(frame - 1) % self.num_frames, frame % self.num_frames]
                parameters = replace(parameters, forcing=forcing[:, now])
            new = head.keep(base.alone(u, parameters)[:, None], u[:, -1])
            u = torch.cat([u, new], 1)[:, -head.history :]
            moved = rms(new[:, :, :num_fields] - start).amax((0, 1))
            allowed = self.allowed(frame + 1)
            if wrong := self._where(~(moved <= allowed * self.moved[-1])):
                return f"{wrong} leaves all bounds of the data within {frame + 1} frames"
            if frame == self.num_frames - 1:
                empty = self._in_empty_modes(new[:, 0, :num_fields])
        grown = self._in_empty_modes(new[:, 0, :num_fields]) / empty.clamp_min(NOISE)
        if wrong := self._where(~(grown <= allowed)):
            return (
                f"modes of {wrong} that are empty in the data grow {float(grown.max()):.1e} times from "
                f"frame {self.num_frames} to {LONG * self.num_frames}"
            )
        return ""

    def _in_empty_modes(self, w: Tensor) -> Tensor:
        """The RMS (C,) of fields w (rows, C, *space) in the modes that are empty in the data."""
        power = torch.where(self.is_empty, self.transform(w).abs().square().mean(0), 0.0)
        return (power.sum(1) / self.is_empty.sum(1).clamp_min(1)).sqrt()

    def _where(self, is_wrong: Tensor) -> str:
        return ", ".join(name for name, wrong in zip(self.fields, is_wrong.tolist(), strict=True) if wrong)
