"""Fit every base predictor that a task may use, and select one by validation rollouts.

One-step errors mislead: on steep Burgers fronts a linear propagator is good for one step and useless after
thirty. So each candidate predicts all frames after the context of held-out trajectories, and the pooled nRMSE
of these rollouts decides (ups/select.py), beside its growth beyond the data (stability.py).
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.common.progress import note
from ups.config.schema import OperatorConfig
from ups.data.cache import Cache
from ups.metrics.errors import rmse
from ups.metrics.spectra import rms
from ups.models.assimilation import (
    can_estimate,
    estimated,
    has_white_noise,
    noise_scale,
    perturbed,
)
from ups.models.bases import base_class
from ups.models.bases.base import OVER_BUDGET, Base, Fit, OverBudgetError, Samples
from ups.models.head import TaskHead
from ups.models.head_setup import (
    MAX_TRAJECTORIES,
    base_settings,
    calibrated,
    conserved_facts,
    fitted_state,
    unfitted_head,
)
from ups.models.stability import Growth
from ups.select import (
    MEASUREMENT,
    UNSTABLE_RATIO,
    Decision,
    Errors,
    explain_errors,
    select_candidate,
    select_start,
)

NUM_LONG_ROLLOUTS = 16  # of the test of stability
NUM_NOISY, NUM_MEMBERS = 16, 4  # trajectories and members of the ensemble that explains errors
# of the training's work, for the fits of costly bases; and the least work, as few steps need a base as well
SHARE, LEAST_WORK = 0.25, 15.0
STEP, KEPT = 0.0135, 3.6e-9  # work of a training step, and of a number kept for its backward pass
STANDARD_ERRORS = 2.0  # by which the excess of an error over noise and spread may be chance


def most_work_of(cache: Cache, settings: OperatorConfig, num_tasks: int) -> float:
    """The most work (`Samples.spend`) of the costly bases of a task: SHARE of that of its training. No limit
    for a family of PDEBench, whose bases are known to be worth it, nor for an equation whose terms explain
    the change from frame to frame (`ups_discovery.progress`)."""
    if cache.task.user_facts is None:
        return math.inf
    model, train = settings.model, settings.train
    tokens = math.prod(-(-n // cache.tokenizer.patch) for n in cache.tokenizer.space)
    kept = train.batch_size * tokens * model.depth * model.width * (12 + 4 * model.mlp_ratio)
    return max(LEAST_WORK, SHARE * train.steps / num_tasks * (STEP + KEPT * kept))


def fit_base(
    cache: Cache, base_steps: int, context: int, seed: int, device: torch.device, most_work: float = math.inf
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and weights of the selected base of a task, for `fit_once`. most_work: of `fitted_candidates`.

    Facts: description (of the head, for `Operator`), findings (`Base.findings`) and decisions: that
    on the base first, then those on noisy starts.
    """
    head, decisions = select_base(cache, base_steps, context, seed, device, most_work)
    if cause := cause_of_errors(head, cache, context, seed):
        head = head.with_facts(is_deterministic=cause.chosen == MEASUREMENT)
        decisions.append(cause)
    facts = {
        "description": head.facts.described(),
        "findings": head.findings(),
        "decisions": [one.described() for one in decisions],
    }
    return facts, fitted_state(head)


def describe_selection(facts: dict[str, Any]) -> str:
    """What validation decided about a base, from the facts of `fit_base`, with its stability and findings."""
    base, horizon = facts["description"]["base"], facts["description"]["horizon"]
    lines = [str(Decision.read(one)) for one in facts["decisions"]]
    if base["unstable"]:
        lines.append(
            f"no base as good as this one is stable beyond the data: {base['unstable']}. Trust no "
            f"forecast of more than {horizon} frames, or add trajectories with more frames."
        )
    return "\n    ".join([*lines, *facts.get("findings", [])])


def select_base(
    cache: Cache, base_steps: int, context: int, seed: int, device: torch.device, most_work: float = math.inf
) -> tuple[TaskHead, list[Decision]]:
    """The head with the selected base, and the decisions on the base and the start of its forecasts.

    Raises ValueError if all candidates blow up.
    """
    shortlist = Shortlist(cache, context, seed)
    for name, head in fitted_candidates(cache, base_steps, seed, device, most_work):
        shortlist.add(name, head)
    head, decisions = shortlist.select()
    return with_twin(head, cache, base_steps, seed), decisions


def with_twin(head: TaskHead, cache: Cache, base_steps: int, seed: int) -> TaskHead:
    """The head with its base fitted once more to every second training row, if that takes little work."""
    half = copy.copy(cache)
    half.split = cache.split | {"train": cache.split["train"][::2]}
    samples = Samples(head, half, seed, 8 * base_steps)  # half of the steps, which rank as well (log.md)
    samples.most_work = LEAST_WORK
    try:
        twin = head.base.twin(samples, head.facts.base["settings"])
    except (OverBudgetError, torch.linalg.LinAlgError):
        twin = None
    if twin is None:
        return head
    settings, base = twin
    head = head.with_facts(twin={"kind": base.kind, "settings": settings})
    head.twin = base.requires_grad_(False)
    return head


def fitted_candidates(
    cache: Cache, base_steps: int, seed: int, device: torch.device, most_work: float = math.inf
) -> Iterator[tuple[str, TaskHead]]:
    """Yield (name, head of width 1 with a fitted base) for every base in task.TASK.base, the costly ones
    last.

    base_steps: most steps on 16 windows, for bases that are learnt. most_work: of all costly bases, which
    share it equally, what one leaves is for the next; in nominal seconds (`Samples.spend`). The weights
    depend on `seed` and the cache alone, not on the global random state. Raises ValueError for a parameter
    value without a training window.
    """
    task, settings = cache.task.name, base_settings(cache)
    samples = Samples(unfitted_head(cache, "persistence", settings, device), cache, seed, 16 * base_steps)
    conserved = conserved_facts(samples.head, cache)
    kinds = sorted(cache.settings.base, key=lambda kind: base_class(kind).is_costly)
    for number, kind in enumerate(kinds):
        num_costly = sum(base_class(later).is_costly for later in kinds[number:])
        samples.most_work = samples.work + (most_work - samples.work) / max(1, num_costly)
        if cache.is_sampled and base_class(kind).needs_fitted_parameters:
            print(f"{task}: {kind} serves a few parameter values alone, and these are many: left out")
            continue
        note(f"{task}: {kind}")
        for name, fitted, base in report_missing(base_class(kind).fit(samples, settings), f"{task}: {kind}"):
            head = unfitted_head(cache, kind, fitted, device)
            head.base.load_state_dict(base.state_dict())
            if base.is_user_solver:
                head.base.use(base.step)
            yield name, head.with_facts(**conserved)


def report_missing(fits: Fit[Base], who: str) -> Iterator[tuple[str, dict[str, Any], Base]]:
    """Yield the candidates of `Base.fit`, and print why others are missing."""
    which = "left out"
    try:
        while True:
            yield next(fits)
            which = "a candidate is left out"
    except StopIteration as end:
        reason = end.value
    except torch.linalg.LinAlgError as error:
        reason = f"its equations have no solution ({error})"
    except OverBudgetError:
        reason = OVER_BUDGET
    if reason:
        print(f"{who}: {which}, as {reason}")


@dataclass(frozen=True)
class Candidate(Errors):
    """A head with a fitted base, and the errors of its validation rollouts."""

    name: str
    head: TaskHead


@torch.no_grad()
def evaluate_candidate(name: str, head: TaskHead, cache: Cache, context: int, rows: Tensor) -> Candidate:
    """The candidate with its errors on `rows`: of rollouts of the base alone after the first `context`
    frames, from an estimated start if the head has one; of steady tasks, of single calls from true inputs.
    """
    device, predicted, found = head.scale.device, cache.task.predicted, []
    for batch in cache.row_blocks(rows, cache.num_frames, len(rows)):
        u = head.codec.decode(cache.batch(batch, 0, cache.num_frames, device))
        given, u_ref = u[:, :context], u[:, context:]
        if head.start_frames:
            given = estimated(head, given, cache.parameters[batch])
        if head.task.is_steady:
            given, u_ref = head.input_codec.decode(cache.inputs(batch, device)), u
        parameters = head.parameters_of(cache, batch, context - 1, u_ref.shape[1] + 1)
        u_pred = head.base_frames(given[:, -head.history :], parameters, u_ref.shape[1])
        # in physical units, as the nRMSE of the report and of the training log
        u_pred, u_ref = (predicted(head.codec.denormalise(w).double()) for w in (u_pred, u_ref))
        u_pred = u_pred.nan_to_num(math.inf, math.inf, -math.inf)
        found.append((rmse(u_pred, u_ref).cpu(), rms(u_ref).cpu()))
    return Candidate(*(torch.cat(values) for values in zip(*found, strict=True)), name, head)


class Shortlist:
    """The candidates of a task with at most UNSTABLE_RATIO times the best error, of which some cannot be told
    from the best.

    rows: validation trajectories. scores, intervals: the pooled nRMSE of all candidates, inf if one blew up.
    starts: the decisions on their starts.
    """

    def __init__(self, cache: Cache, context: int, seed: int):
        self.cache, self.context, self.seed = cache, context, seed
        self.rows = cache.rows_by_parameter("val", MAX_TRAJECTORIES)
        self.groups = cache.trajectory[self.rows]
        self.kept: list[Candidate] = []
        self.scores: dict[str, float] = {}
        self.intervals: dict[str, tuple[float | None, float | None]] = {}
        self.starts: dict[str, Decision] = {}
        self._growth: Growth | None = None
        self._instability: dict[str, str] = {}

    def add(self, name: str, head: TaskHead) -> None:
        """Evaluate a base and keep it, unless its error is too large."""
        candidate = self.evaluate(name, head)
        self.scores[name] = candidate.error()
        self.intervals[name] = candidate.interval(self.groups, self.seed)
        most = UNSTABLE_RATIO * min(self.scores.values())
        self.kept = [
            one for one in [*self.kept, candidate] if math.isfinite(one.error()) and one.error() <= most
        ]

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
        if self._growth is None:
            trained = self.cache.rows_by_parameter("train", MAX_TRAJECTORIES)
            self._growth = Growth(self.cache, one.head, torch.cat([trained, self.rows]))
        if one.name not in self._instability:
            self._instability[one.name] = self._growth.exceeded_by(
                one.head, self.rows[:NUM_LONG_ROLLOUTS], self.context, self.seed
            )
        return self._instability[one.name]

    def select(self) -> tuple[TaskHead, list[Decision]]:
        """The complete head with the candidate that `select_candidate` selects, and the decisions on the base
        and, if there was one, on the start of its forecasts. Raises ValueError without a candidate.
        """
        name = self.cache.task.name
        if not self.kept:
            raise ValueError(
                f"no base of {name} survives its validation rollouts (tried: "
                f"{', '.join(self.scores)}); expected one that stays finite. Add persistence "
                f"to task.{name}.base, or look at the data with the doctor."
            )
        ranked = sorted(self.kept, key=lambda one: (*one.head.base.complexity, one.error()))
        kept = {one.name: one for one in ranked}
        decision = select_candidate(
            f"base of {name}",
            kept,
            self.scores,
            lambda name: not self.instability(kept[name]),
            self.intervals,
            self.groups,
            self.seed,
        )
        chosen = kept[decision.chosen]
        head = chosen.head.with_facts(
            base=chosen.head.facts.base | {"name": chosen.name, "unstable": self.instability(chosen)},
            horizon=1 if self.cache.task.is_steady else self.cache.num_frames - self.context,
        )
        starts = [self.starts[chosen.name]] if chosen.name in self.starts else []
        return calibrated(head, self.cache, self.seed), [decision, *starts]


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
    frames = head.base_frames(start, head.parameter_batch(raw), w_ref.shape[1])
    members = task.predicted(frames).unflatten(0, (-1, NUM_MEMBERS))
    valid = task.predicted(head.codec.masked(torch.ones_like(given[:1, :1])))
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
