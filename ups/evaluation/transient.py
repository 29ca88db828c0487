"""Scores of ensemble forecasts of a corrected task: all ways to sample its future, on the same cases."""

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ups.common.mask import filled, valid_cells
from ups.common.progress import note
from ups.config.schema import EvaluateConfig, TaskConfig
from ups.evaluation.ensemble import CHEAP, Ensembles, compare_common, costs_per_state, needs_many, rollouts
from ups.evaluation.one_step import LEADS, assess_one_step, num_step_samples
from ups.evaluation.reference_ensembles import EXACT, reference_ensembles, sample_exactly, sample_law
from ups.evaluation.truth import Truth
from ups.metrics.climate import climate
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples, Scores
from ups.metrics.joint import score_trajectories
from ups.metrics.likeness import likeness
from ups.results import BY_LEAD, Entry
from ups.tasks import Task

WINDOWS = 512  # of one step; with 192 the spread/skill of one model varied from 0.76 to 0.94
FEW_STARTS = 24  # starts of a sampler with many evaluations
# long rollouts: times the length of the others, starts (few: of a sampler with many evaluations), exact
# samples of each
LONG, LONG_ROWS, LONG_FEW, LONG_EXACT = 10, 32, 8, 3
BLOWN_UP = 10.0  # |u| over its largest value at the start
TIMED_STATES = 32  # states per call when the time per state is taken
NOT_LEARNT = (*CHEAP, "analogs", "starts")  # the cheap ensembles, of which the best is the reference
UNTRAINED = (*NOT_LEARNT, *EXACT)


def num_windows(settings: EvaluateConfig) -> int:
    return min(WINDOWS, 24 * settings.ensemble_trajectories)


def starts_and_frames(truth: Truth, settings: EvaluateConfig) -> tuple[Tensor, int]:
    """Rows of the cache from which ensembles start, and their number of frames."""
    rows = truth.cache.split[truth.split][truth.one_of_each(settings.ensemble_trajectories)]
    return rows, min(settings.ensemble_frames, truth.num_frames, truth.cache.num_frames - truth.context)


def num_samples(settings: EvaluateConfig) -> float:
    """Samples of the corrector here."""
    starts = min(FEW_STARTS, settings.ensemble_trajectories)
    states = settings.members * starts + LONG * LONG_FEW
    windows = num_step_samples(num_windows(settings), settings.members)
    return settings.ensemble_frames * states + windows


def assess_transient(
    ensembles: Ensembles, settings: EvaluateConfig, serves: str = ""
) -> tuple[Entry, dict[str, Any]]:
    """The task's entry, and the sample for the report. serves: the model whose samples users get."""
    truth, seed = ensembles.truth, ensembles.seed
    cache, task = truth.cache, truth.task
    rows, num_frames = starts_and_frames(truth, settings)
    times, groups = [cache.dt * (lead + 1) for lead in range(num_frames)], cache.trajectory[rows]
    resamples = Resamples(settings.num_bootstrap, seed, groups)
    facts = {"split": truth.split, "times": times, "serves": serves, "fields": [*task.moving]}
    entry = Entry(task.name, "ensembles", facts)
    entry.add(
        "",
        {
            "members": settings.members,
            "num_trajectories": len(rows),
            "num_initial_conditions": len(groups.unique()),
        },
    )

    # ---- rollouts
    u_ref = truth.future(rows, num_frames)
    law = sample_law(truth, seed + 2, rows, num_frames, u_ref, settings.truth_members)
    reference = rollouts(ensembles, "operator", rows, num_frames, 1)

    def score(members: Tensor) -> Scores:
        """Scores of the members (n, M, T, C, *space) of the first n starts."""
        u, exact = (None if part is None else part[: len(members)] for part in (u_ref, law))
        return score_ensemble(members, u, exact=exact) | score_trajectories(members, u, exact)

    for model in ensembles.names:
        entry.add(model, costs_per_state(ensembles, model, TIMED_STATES))
    forecasts = {model: partial(rollouts, ensembles, model) for model in ensembles.names}
    forecasts |= reference_ensembles(ensembles, settings, num_frames)
    scores, members_of = {}, {}
    for model, forecast in forecasts.items():
        note(f"{task.name}: rollouts of {model}")
        starts = rows[: FEW_STARTS if needs_many(entry, model) else None]
        begun = time.perf_counter()
        members = forecast(starts, num_frames, settings.members)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        scores[model] = score(members)
        entry.add(model, summarise_ensemble(scores[model], resamples[: len(starts)]))
        if model not in ensembles.names:
            states = len(starts) * num_frames * members.shape[1]
            entry.add(model, {"ms_per_state": milliseconds / states, "evaluations_per_state": 0.0})
        members_of[model] = members[0].numpy()
        if model in ("exact", serves) or model not in UNTRAINED:
            again = None
            if law is None:  # the first leads of a second ensemble
                other = copy.copy(ensembles)
                other.seed = seed + 6
                again = rollouts(other, model, starts, min(LEADS, num_frames), settings.members)
            of_law = None if law is None else law[: len(starts)]
            few = slice(len(starts))
            found = likeness(
                members, u_ref[few], task.boundary, reference[few, 0], resamples[few], of_law, again
            )
            entry.add(model, {"likeness": found})
    note(f"{task.name}: single steps")
    assess_one_step(
        entry,
        ensembles,
        num_windows(settings),
        settings.members,
        settings.num_bootstrap,
        settings.truth_members,
    )

    # ---- comparisons
    crps = {model: entry.number(model, "crps") for model in NOT_LEARNT if model in scores}
    cheap = min((model for model in crps if crps[model] is not None), key=crps.get, default="operator")
    entry.facts["best_cheap"] = cheap
    for one, other in compared([*scores], cheap, serves):
        ratios = compare_common(scores[one], scores[other], resamples)
        entry.add(f"{one} / {other}", ratios)
        if other == "exact":
            over = {f"crps_over_exact{by}": ratios[f"crps{by}"] for by in ("", BY_LEAD)}
            entry.add(one, over)

    few = entry.number("corrector", "num_trajectories")
    entry.facts["words"] = [
        f"Setting: {setting_of(cache.settings, task)}. {len(rows)} {truth.split} trajectories, {few} of "
        f"them by the corrector, {settings.members} members. The best cheap ensemble is {cheap}."
    ]
    return entry, {
        **cache.scene(),
        "u_ref": u_ref[0].numpy(),
        "members": members_of,
        "times": times,
        "label": f"{truth.split} row {int(rows[0])}",
    }


def compared(names: Sequence[str], cheap: str, serves: str) -> list[tuple[str, str]]:
    """Pairs of models: trained ones and what serves with the best cheap ensemble and the operator; all with
    exact samples; the corrector with linear waves, and students with it."""
    trained = [model for model in names if model == serves or model not in UNTRAINED]
    pairs = [
        *[(model, other) for model in trained for other in (cheap, "operator") if model != other],
        *[(model, "exact") for model in names if model != "exact"],
        ("operator", "bayes_mean"),
        ("corrector", "waves"),
        *[(model, "corrector") for model in names if model not in (*UNTRAINED, "corrector", "scoring")],
    ]
    return list(dict.fromkeys(pair for pair in pairs if {*pair} <= {*names}))


def assess_long(ensembles: Ensembles, settings: EvaluateConfig) -> Entry:
    """The case "long" of the entry of `assess_transient`, which does not need it."""
    rows, num_frames = starts_and_frames(ensembles.truth, settings)
    note(f"{ensembles.residuals.name}: rollouts of {LONG * num_frames} frames")
    entry = Entry(ensembles.residuals.name, "ensembles")
    for model in ensembles.samplers:
        entry.add(model, costs_per_state(ensembles, model, 1))
    add_long_rollouts(entry, ensembles, rows[:LONG_ROWS], num_frames, settings.num_bootstrap)
    entry.numbers = {key: found for key, found in entry.numbers.items() if key[0] == "long"}
    return entry


def add_long_rollouts(entry: Entry, ensembles: Ensembles, rows: Tensor, scored: int, count: int) -> None:
    """Add the case "long": rollouts of one member LONG times as long as the `scored` leads. How many leave
    BLOWN_UP times the range of their start or are not finite, and their `climate` beyond the scored leads.

    The truth are other exact samples or, if no law is known, the data at these leads; for a task on its
    invariant measure the last frames of the data. Without such frames there is no climate. count: resamples.
    """
    truth, num_frames, seed = ensembles.truth, LONG * scored, ensembles.seed
    start, u = truth.task.predicted(truth.frames(rows, truth.context - 1, 1)), {}
    valid = valid_cells(start)
    limit = BLOWN_UP * filled(start, valid).abs().flatten(1).amax(1)
    for model in ("operator", *ensembles.samplers):
        some = rows[: LONG_FEW if needs_many(entry, model) else None]
        u[model] = filled(rollouts(ensembles, model, some, num_frames, 1), valid)
    last, of_start = num_frames - scored, start[:, 0]  # number of the leads that are compared
    if truth.task.has_known_law:
        exact = sample_exactly(truth, seed + 3, rows, num_frames, 1 + LONG_EXACT)
        u["exact"], samples = exact[:, :1], exact[:, 1:]
    elif truth.task.is_stationary:
        samples, of_start = truth.future(rows)[:, None], None
    else:
        samples = truth.future(rows, min(num_frames, truth.num_frames))[:, None]
        num_frames, last = samples.shape[2], samples.shape[2] - scored
    last = min(last, samples.shape[2])
    entry.add("", {"frames": LONG * scored}, "long")
    for model, members in u.items():
        num = len(members)
        is_inside = members.abs().flatten(1).amax(1) <= limit[:num]  # of no NaN
        entry.add(model, {"blown_up": int((~is_inside).sum()), "num_trajectories": num}, "long")
        if last > 0 and num > 1:
            late = (members[:, :, num_frames - last : num_frames], samples[:, :, -last:])
            found = climate(*late, of_start, truth.task.boundary, Resamples(count, seed))
            entry.add(model, {"likeness": found}, "long")


# ---- words


def setting_of(settings: TaskConfig, task: Task) -> str:
    """Why the next state is uncertain, in words."""
    values = ", ".join(f"{value:g}" if isinstance(value, float) else value for value in settings.parameters)
    words = [
        *([task.why_uncertain] if task.why_uncertain else []),
        *([f"the parameter (one of {values}) is hidden"] if task.hides else []),
        *([f"patches of {settings.patch} cells are cut to {settings.dim} numbers"] if settings.dim else []),
    ]
    return (" and ".join(words) or "everything is observed") + f"; {settings.history} frame(s) are input"
