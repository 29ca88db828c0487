"""Fit every base predictor that a task may use, and select one by validation rollouts.

One-step errors mislead: on steep Burgers fronts a linear propagator is good for one step and useless after
thirty. So each candidate predicts all frames after the context of held-out trajectories, and the pooled nRMSE
of these rollouts decides. ups/models/shortlist.py decides between candidates that validation cannot tell
apart.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ups.common.progress import note
from ups.data.cache import Cache
from ups.models.assimilation import start_facts
from ups.models.bases import base_class
from ups.models.bases.base import Base, Fit, Samples
from ups.models.bases.per_field import Component, components_of, merged, subset_samples, subset_settings
from ups.models.head import TaskHead
from ups.models.head_setup import (
    MAX_TRAJECTORIES,
    base_settings,
    calibrated,
    conserved_facts,
    fitted_state,
    per_field_head,
    unfitted_head,
)
from ups.models.shortlist import Candidate, Shortlist, evaluate_candidate

POOR_ERROR = 0.1  # a field with a larger error may spoil the fit of the others
HOPELESS_ERROR = 0.5  # a field with a larger error is left out of the fit of the others
# A base per field costs as many calls as it has bases, so it must reduce the error of some field by this
# factor.
MIN_GAIN_PER_FIELD = 2.0

# (channels) -> (name, head) of candidates that are fitted to these channels alone
SubsetCandidates = Callable[[Sequence[int]], Iterator[tuple[str, TaskHead]]]


def fit_base(
    cache: Cache, base_steps: int, context_frames: int, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and weights of the selected base of a task, for `fit_once`.

    Facts: description (of the head, for `Operator`), seconds, findings (`Base.findings`) and
    validation_nrmse: candidate -> number, None if it blew up.
    """
    started = time.perf_counter()
    head, scores = select_base(cache, base_steps, context_frames, seed, device)
    head = head.with_facts(**start_facts(head, cache, context_frames, seed))
    facts = {
        "description": head.facts.described(),
        "seconds": time.perf_counter() - started,
        "findings": head.findings(),
        "validation_nrmse": {k: (v if math.isfinite(v) else None) for k, v in scores.items()},
    }
    return facts, fitted_state(head)


def describe_selection(name: str, facts: dict[str, Any]) -> str:
    """The selected base of a task in words, from the facts of `fit_base`: error, stability, findings."""
    base, horizon = facts["description"]["base"], facts["description"]["horizon"]
    lines = [
        f"base of {name}: {base['name']}, validation nRMSE {facts['validation_nrmse'][base['name']]:.2e}"
    ]
    if trials := facts.get("trial_nrmse"):
        of_each = ", ".join(
            f"{error:.2e} on {name}" if error is not None else f"blew up on {name}"
            for name, error in trials.items()
        )
        lines.append(f"validation nRMSE of the network after a short training: {of_each}")
    if frames := facts["description"].get("start_frames"):
        lines.append(f"starts of forecasts are estimated from {frames} frames: on validation that is better")
    if base["unstable"]:
        lines.append(
            f"no base as good as this one is stable beyond the data: {base['unstable']}. Trust no "
            f"forecast of more than {horizon} frames, or add trajectories with more frames."
        )
    return "\n    ".join([*lines, *facts.get("findings", [])])


def select_base(
    cache: Cache, base_steps: int, context_frames: int, seed: int, device: torch.device
) -> tuple[TaskHead, dict[str, float]]:
    """The head with the selected base, and the pooled nRMSE of every candidate (inf: it blew up).

    Raises ValueError if all of them blow up.
    """
    shortlist = empty_shortlist(cache, context_frames, seed)
    for name, head in fitted_candidates(cache, base_steps, seed, device):
        shortlist.add(name, head)
    return select_from_shortlist(
        shortlist, lambda fields: fitted_candidates(cache, base_steps, seed, device, fields)
    )


def empty_shortlist(cache: Cache, context_frames: int, seed: int) -> Shortlist:
    """A shortlist for candidates that are evaluated on validation trajectories of a task."""
    return Shortlist(
        cache,
        context_frames,
        cache.rows_by_parameter("val", MAX_TRAJECTORIES),
        cache.rows_by_parameter("train", MAX_TRAJECTORIES),
        seed,
    )


def base_error(head: TaskHead, cache: Cache, context_frames: int) -> float:
    """Pooled nRMSE of the base alone over validation rollouts (single calls for a steady task), of the
    predicted fields that are not zero throughout; inf if it blows up.
    """
    rows = cache.rows_by_parameter("val", MAX_TRAJECTORIES)
    return evaluate_candidate("", head, cache, context_frames, rows).error()


def fitted_candidates(
    cache: Cache, base_steps: int, seed: int, device: torch.device, fields: Sequence[int] | None = None
) -> Iterator[tuple[str, TaskHead]]:
    """Yield (name, head of width 1 with a fitted base) for every base in task.TASK.base.

    base_steps: gradient steps of 16 windows, for bases that are learnt. fields: predicted channels; the bases
    are fitted to these alone, and read no other channels than these and the fixed ones. The weights depend on
    `seed` and the cache alone, not on the global random state. Raises ValueError for a parameter value
    without a training window.
    """
    task, settings = cache.task.name, base_settings(cache)
    samples = Samples(unfitted_head(cache, "persistence", settings, device), cache, seed, 16 * base_steps)
    conserved = conserved_facts(samples.head, cache)
    if fields is not None:
        reads = [*fields, *range(len(cache.task.moving), len(cache.task.fields))]
        samples, settings = subset_samples(samples, reads), subset_settings(settings, reads)
    for kind in cache.settings.base:
        if cache.is_sampled and base_class(kind).needs_fitted_parameters:
            print(f"{task}: {kind} serves a few parameter values alone, and these are many: left out")
            continue
        if fields is not None and not base_class(kind).can_fit_subset:
            continue
        note(f"{task}: {kind}")
        for name, fitted, base in report_missing(base_class(kind).fit(samples, settings), f"{task}: {kind}"):
            if fields is None:
                head = unfitted_head(cache, kind, fitted, device)
                head.base.load_state_dict(base.state_dict())
                if base.is_user_solver:
                    head.base.use(base.step)
            else:
                head = per_field_head(cache, [Component(base, kind, fitted, reads, list(fields))], device)
                name = f"{name} of {', '.join(cache.task.fields[channel] for channel in reads)} alone"
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
    if reason:
        print(f"{who}: {which}, as {reason}")


def select_from_shortlist(
    shortlist: Shortlist, candidates_of: SubsetCandidates
) -> tuple[TaskHead, dict[str, float]]:
    """The complete head with the selected base, and the scores of all candidates. Raises ValueError for an
    empty shortlist.
    """
    cache, name = shortlist.cache, shortlist.cache.task.name
    if not shortlist.all.kept:
        raise ValueError(
            f"no base of {name} survives its validation rollouts (tried: "
            f"{', '.join(shortlist.scores)}); expected one that stays finite. Add persistence "
            f"to task.{name}.base, or look at the data with the doctor."
        )
    best = select_per_field(shortlist, shortlist.select(shortlist.all), candidates_of)
    head = best.head.with_facts(
        base=best.head.facts.base | {"name": best.name, "unstable": shortlist.instability(best)},
        horizon=1 if cache.task.is_steady else cache.num_frames - shortlist.context,
    )
    return calibrated(head, cache, shortlist.seed), shortlist.scores


def select_per_field(shortlist: Shortlist, whole: Candidate, candidates_of: SubsetCandidates) -> Candidate:
    """A candidate with a base for every field or vector if that is better than one base for all, else
    `whole`.

    A field with a poor error may have spoiled the fit of the others. Then bases are also fitted to each field
    alone, and to all fields together that are not hopeless.
    """
    cache = shortlist.cache
    units = [ties for ties in shortlist.units if ties.kept]  # a field that is zero throughout has no error
    if len(units) < 2:
        return whole
    errors = {tuple(ties.fields): ties.error(whole) for ties in units}
    if not cache.task.is_steady and max(errors.values()) > POOR_ERROR:
        for fields in field_groups(errors):
            for name, head in candidates_of(fields):
                candidate = shortlist.evaluate(name, head)
                for ties in units:
                    if {*ties.fields} <= {*fields}:
                        ties.add(candidate)
    components, names = [], []
    for ties in units:
        best = shortlist.select(ties)
        if ties.is_as_good(whole, best) or MIN_GAIN_PER_FIELD * ties.error(best) > ties.error(whole):
            best = whole
        components += components_of(best.head.base, best.head.facts.base, ties.fields)
        names.append(f"{', '.join(cache.task.fields[channel] for channel in ties.fields)}: {best.name}")
    if all(component.base is whole.head.base for component in components):
        return whole
    facts = whole.head.facts
    head = per_field_head(cache, merged(components), whole.head.scale.device)
    head = head.with_facts(is_conservative=facts.is_conservative, conserved=facts.conserved)
    candidate = shortlist.evaluate("; ".join(names), head)
    is_as_good = all(ties.is_as_good(candidate, whole) for ties in units)
    gains = any(MIN_GAIN_PER_FIELD * ties.error(candidate) <= ties.error(whole) for ties in units)
    if not (is_as_good and gains):
        return whole
    shortlist.scores[candidate.name] = candidate.error()
    return candidate


def field_groups(errors: dict[tuple[int, ...], float]) -> list[list[int]]:
    """The groups of channels to fit bases to: each unit alone, and all together that are not hopeless; if all
    are hopeless, all but one.
    """
    units = list(errors)
    rest = [[unit for unit in units if errors[unit] < HOPELESS_ERROR]]
    if not rest[0]:
        rest = [[unit for unit in units if unit != one] for one in units]
    together = [group for group in rest if 1 < len(group) < len(units)]
    return [
        sorted(channel for unit in group for channel in unit)
        for group in [*([unit] for unit in units), *together]
    ]
