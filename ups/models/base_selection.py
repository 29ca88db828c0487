"""Fit every base predictor that a task may use, and select one by validation rollouts.

One-step errors mislead: on steep Burgers fronts a linear propagator is good for one step and useless after
thirty. So each candidate predicts all frames after the context of held-out trajectories (shortlist.py), and
the pooled nRMSE of these rollouts decides (ups/select.py).
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ups.common.progress import note
from ups.data.cache import Cache
from ups.models.bases import base_class
from ups.models.bases.base import Base, Fit, Samples
from ups.models.head import TaskHead
from ups.models.head_setup import (
    MAX_TRAJECTORIES,
    base_settings,
    calibrated,
    conserved_facts,
    fitted_state,
    unfitted_head,
)
from ups.models.shortlist import Shortlist, cause_of_errors, evaluate_candidate
from ups.select import NOISE, Decision


def fit_base(
    cache: Cache, base_steps: int, context_frames: int, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and weights of the selected base of a task, for `fit_once`.

    Facts: description (of the head, for `Operator`), seconds, findings (`Base.findings`) and decisions: that
    on the base first, then those on noisy starts.
    """
    started = time.perf_counter()
    head, decisions = select_base(cache, base_steps, context_frames, seed, device)
    if cause := cause_of_errors(head, cache, context_frames, seed):
        head = head.with_facts(is_deterministic=cause.chosen == NOISE)
        decisions.append(cause)
    facts = {
        "description": head.facts.described(),
        "seconds": time.perf_counter() - started,
        "findings": head.findings(),
        "decisions": [one.described() for one in decisions],
    }
    return facts, fitted_state(head)


def base_scores(facts: dict[str, Any]) -> dict[str, float | None]:
    """The pooled nRMSE of every candidate, from the facts of `fit_base`; None if it blew up."""
    return {name: score for name, (score, *_) in facts["decisions"][0]["candidates"].items()}


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
    cache: Cache, base_steps: int, context_frames: int, seed: int, device: torch.device
) -> tuple[TaskHead, list[Decision]]:
    """The head with the selected base, and the decisions on the base and the start of its forecasts.

    Raises ValueError if all candidates blow up.
    """
    shortlist = empty_shortlist(cache, context_frames, seed)
    for name, head in fitted_candidates(cache, base_steps, seed, device):
        shortlist.add(name, head)
    return select_from_shortlist(shortlist)


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
    cache: Cache, base_steps: int, seed: int, device: torch.device
) -> Iterator[tuple[str, TaskHead]]:
    """Yield (name, head of width 1 with a fitted base) for every base in task.TASK.base.

    base_steps: gradient steps of 16 windows, for bases that are learnt. The weights depend on `seed` and the
    cache alone, not on the global random state. Raises ValueError for a parameter value without a training
    window.
    """
    task, settings = cache.task.name, base_settings(cache)
    samples = Samples(unfitted_head(cache, "persistence", settings, device), cache, seed, 16 * base_steps)
    conserved = conserved_facts(samples.head, cache)
    for kind in cache.settings.base:
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
    if reason:
        print(f"{who}: {which}, as {reason}")


def select_from_shortlist(shortlist: Shortlist) -> tuple[TaskHead, list[Decision]]:
    """The complete head with the selected base, and the decisions. Raises ValueError without a candidate."""
    cache, name = shortlist.cache, shortlist.cache.task.name
    if not shortlist.kept:
        raise ValueError(
            f"no base of {name} survives its validation rollouts (tried: "
            f"{', '.join(shortlist.scores)}); expected one that stays finite. Add persistence "
            f"to task.{name}.base, or look at the data with the doctor."
        )
    best, decisions = shortlist.select()
    head = best.head.with_facts(
        base=best.head.facts.base | {"name": best.name, "unstable": shortlist.instability(best)},
        horizon=1 if cache.task.is_steady else cache.num_frames - shortlist.context,
    )
    return calibrated(head, cache, shortlist.seed), decisions
