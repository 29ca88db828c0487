"""Scores of ensemble forecasts of a corrected task: all ways to sample its future, on the same cases."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ups.config.schema import EvaluateConfig, TaskConfig
from ups.evaluation.by_evaluations import STARTS, coarser_samplers, curves, with_corrector
from ups.evaluation.checks import LEADS, independence
from ups.evaluation.ensemble import CHEAP, Ensembles, costs_per_state, rollouts
from ups.evaluation.one_step import STUDENTS, assess_one_step
from ups.evaluation.reference_ensembles import (
    EXACT,
    reference_ensembles,
    sample_exactly,
    sample_law,
    timed,
)
from ups.metrics.climate import climate
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Scores, number
from ups.metrics.joint import law_increments, residual_energy, score_joint
from ups.tasks import Task

WINDOWS = 512  # of one step; with 192 the spread/skill of one model varied from 0.76 to 0.94
# long rollouts: times the length of the others, starts, members, exact samples
LONG, LONG_ROWS, LONG_MEMBERS, LONG_EXACT = 10, 16, 2, 100
BLOWN_UP = 10.0  # |u| over its largest value at the start
TIMED_STATES = 32  # states per call when the time per state is taken
NOT_LEARNT = (*CHEAP, "analogs", "starts")  # the cheap ensembles, of which the best is the reference
UNTRAINED = (*NOT_LEARNT, *EXACT)


def assess_transient(ensembles: Ensembles, settings: EvaluateConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's entry of results.json under "ensembles", and the sample for the report."""
    truth, seed, count = ensembles.truth, ensembles.seed, settings.num_bootstrap
    cache, task = truth.cache, truth.task
    steps = assess_one_step(
        ensembles,
        min(WINDOWS, 24 * settings.ensemble_trajectories),
        settings.members,
        count,
        settings.truth_members,
    )

    # ---- rollouts
    rows = cache.split[truth.split][truth.one_of_each(settings.ensemble_trajectories)]
    num_frames = min(settings.ensemble_frames, truth.num_frames, cache.num_frames - truth.context)
    times, groups = [cache.dt * (lead + 1) for lead in range(num_frames)], cache.trajectory[rows]
    u_ref = truth.future(rows, num_frames)
    law = sample_law(truth, seed + 2, rows, num_frames, u_ref, settings.truth_members)
    reference = rollouts(ensembles, "operator", rows, num_frames, 1)
    energy = None if law is None else residual_energy(law, u_ref, task.boundary, reference[:, 0])
    pairs = None if law is None else law_increments(law, task.boundary)

    def score(members: Tensor) -> Scores:
        """Scores of the members (n, M, T, C, *space) of the first n starts."""
        truths = (u_ref, reference[:, 0], law, energy, pairs)
        u, operator, exact, *of_law = (None if part is None else part[: len(members)] for part in truths)
        return score_ensemble(members, u, task.boundary, operator, exact=exact) | score_joint(
            members, u, task.boundary, operator, exact, *of_law
        )

    summarise = partial(summarise_ensemble, num_bootstrap=count, seed=seed, groups=groups)
    forecasts = {model: partial(rollouts, ensembles, model) for model in ensembles.names}
    forecasts |= reference_ensembles(ensembles, settings, num_frames)
    scores, members_of, models = {}, {}, {}
    for model, forecast in forecasts.items():
        members, cost = timed(forecast, rows, num_frames, settings.members)
        scores[model] = score(members)
        models[model] = summarise(scores[model]) | cost
        members_of[model] = members[0].numpy()
        if model == "exact" or model not in UNTRAINED:
            again = None
            if law is None:
                again = second_ensemble(ensembles, model, rows, num_frames, settings.members)
            models[model]["independence"] = independence(members, count, seed, groups, law, again)
        if model == "exact":  # are the data a sample of this law?
            by_data = score_ensemble(members, u_ref, task.boundary)
            steps["checks"]["ssr_of_law"] = summarise(by_data)["ssr"]
    for model in ensembles.names:
        models[model] |= costs_per_state(ensembles, model, TIMED_STATES)
    for model, row in steps["models"].items():
        models[model]["one_step"] = row

    coarse = {}
    for evaluations, sampler in coarser_samplers(ensembles.corrector).items():
        other = with_corrector(ensembles, sampler)
        members = rollouts(other, "corrector", rows[:STARTS], num_frames, settings.members)
        coarse[evaluations] = score(members)

    # ---- comparisons
    crps = {model: models[model]["crps"]["value"] for model in NOT_LEARNT if model in models}
    cheap = min((model for model in crps if crps[model] is not None), key=crps.get, default="operator")
    comparisons = {
        f"{one} / {other}": compare_ensembles(scores[one], scores[other], count, seed, groups)
        for one, other in compared([*models], cheap)
    }
    plotted = {model: scores[model] for model in (*ensembles.samplers, "exact", cheap) if model in scores}
    evaluations_of = {model: models[model].get("evaluations_per_state", 0.0) for model in plotted}
    for model in models:
        if versus := comparisons.get(f"{model} / exact"):
            leads = versus["crps_by_lead"]
            models[model] |= {
                "crps_over_exact": versus["crps"],
                "crps_over_exact_by_lead": leads["value"],
                "crps_over_exact_by_lead_low": leads["low"],
                "crps_over_exact_by_lead_high": leads["high"],
            }
    out = {
        "task": task.name,
        "members": settings.members,
        "split": truth.split,
        "num_trajectories": len(rows),
        "num_initial_conditions": len(groups.unique()),
        "models": models,
        "by_evaluations": curves(coarse, plotted, evaluations_of, count, seed, groups),
        "times": times,
        "best_cheap": cheap,
        "comparisons": comparisons,
        "checks": {**steps["checks"], "long": long_rollouts(ensembles, rows, LONG * num_frames)},
        "setting": setting_of(cache.settings, task),
    }
    sample = {
        **cache.scene(),
        "u_ref": u_ref[0].numpy(),
        "members": members_of,
        "times": times,
        "label": f"{truth.split} row {int(rows[0])}",
    }
    return {**out, "words": words_of(out)}, sample


def second_ensemble(
    ensembles: Ensembles, model: str, rows: Tensor, num_frames: int, num_members: int
) -> Tensor:
    """The first leads of another ensemble from the same starts, with other noise."""
    again = copy.copy(ensembles)
    again.seed = ensembles.seed + 6
    return rollouts(again, model, rows, min(LEADS, num_frames), num_members)


def compared(names: Sequence[str], cheap: str) -> list[tuple[str, str]]:
    """Pairs of models: trained ones with the best cheap ensemble, the operator and linear-Gaussian waves; all
    with exact samples; students with their teacher and the network trained by scores."""
    trained = [
        (model, other) for model in names if model not in UNTRAINED for other in (cheap, "operator", "waves")
    ]
    exact = [
        *[(model, "exact") for model in names if model != "exact"],
        ("operator", "bayes_mean"),
        ("exact", "operator"),
        ("exact", "dressed_conditional"),
    ]
    others = [
        ("corrector", "dressed_conditional"),
        *[(model, "corrector") for model in names if model not in (*UNTRAINED, "corrector", "scoring")],
        ("student_1", "scoring"),
    ]
    return list(dict.fromkeys([*trained, *[pair for pair in (*exact, *others) if {*pair} <= {*names}]]))


def long_rollouts(ensembles: Ensembles, rows: Tensor, num_frames: int) -> dict[str, Any]:
    """Members that leave BLOWN_UP times the range of their start, or are not finite, within `num_frames`
    frames; and for a task on its invariant measure the `climate` of the second half.

    Climates are compared with the data, or with exact samples as late if the law is known: data may still
    remember their initial conditions. "truth" compares one half of the reference with the other, "exact" as
    many other exact samples as there are members. Both are errors by chance: of 8 members and 100 frames of
    chaos, data have a spectrum error of 0.029 +- 0.016, as a good operator.
    """
    truth, every, climates = ensembles.truth, rows, {}
    rows = rows[:LONG_ROWS]
    limit = BLOWN_UP * truth.frames(rows, 0, 1).abs().flatten(1).amax(1)[:, None]
    u = {
        model: rollouts(ensembles, model, rows, num_frames, LONG_MEMBERS)
        for model in ensembles.names
        if model == "operator" or model not in CHEAP
    }
    blown_up = {
        model: int((~(members.abs().flatten(2).amax(2) <= limit)).sum()) for model, members in u.items()
    }
    if truth.task.is_stationary and len(every) > 1:
        if truth.task.has_known_law:
            u["exact"] = sample_exactly(truth, ensembles.seed + 3, rows, num_frames, LONG_MEMBERS)
            u["truth"] = sample_exactly(truth, ensembles.seed + 4, every[:LONG_EXACT], num_frames, 1)
        late = {model: members[:, :, num_frames // 2 :].flatten(0, 1) for model, members in u.items()}
        u_ref = late["truth"] if "truth" in late else truth.frames(every, 0, truth.cache.num_frames)
        pairs = {model: (members, u_ref) for model, members in late.items()}
        pairs["truth"] = u_ref[::2], u_ref[1::2]
        climates = {
            model: {key: number(value) for key, value in climate(*pair, truth.task.boundary).items()}
            for model, pair in pairs.items()
        }
    return {
        "frames": num_frames,
        "members": len(rows) * LONG_MEMBERS,
        "blown_up": blown_up,
        "climate": climates,
    }


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


def words_of(entry: dict[str, Any]) -> list[str]:
    """What the corrector adds to the operator, and the student to the teacher, with the measured numbers."""
    models, cheap = entry["models"], entry["best_cheap"]

    def ratio(one: str, other: str, key: str) -> str:
        top, bottom = models[one][key]["value"], models[other][key]["value"]
        return in_words(top / bottom if top is not None and bottom else None)

    teacher = models["corrector"]
    starts = ", ".join(
        f"{in_words(row['ssr']['value'], 2)} from "
        + (
            f"frame {row['first']}"
            if row["first"] == row["last"]
            else f"frames {row['first']} to {row['last']}"
        )
        for row in teacher["one_step"]["by_start"]
    )
    leads = known_leads(teacher["ssr_by_lead"]) or [None]
    out = [
        f"Setting: {entry['setting']}. {entry['num_trajectories']} {entry['split']} trajectories of as "
        f"many initial conditions, {entry['members']} members.",
        "What the corrector adds over the operator: its fair CRPS over the rollout is "
        f"{ratio('corrector', 'operator', 'crps')} times the operator's and "
        f"{ratio('corrector', cheap, 'crps')} times that of the best cheap ensemble ({cheap}); its energy "
        f"score, which sees joint structure, is {ratio('corrector', 'dressed_conditional', 'energy_score')} "
        "times a conditional Gaussian's. Its spread over its error (1 is calibrated) is, one step ahead, "
        f"{starts}; over the leads of a rollout {in_words(min(leads), 2)} to {in_words(max(leads), 2)}.",
    ]
    out += [
        f"What the student adds over its teacher, with {words} for {teacher['evaluations_per_state']:.0f}: "
        f"it is {teacher['ms_per_state'] / models[student]['ms_per_state']:.1f} times faster per state, "
        f"operator and decoding included, at {ratio(student, 'corrector', 'crps')} times the CRPS and "
        f"{ratio(student, 'corrector', 'energy_score')} times the energy score."
        for student, words in STUDENTS.items()
        if student in models
    ]
    if waves := entry["comparisons"].get("corrector / waves", {}).get("crps"):
        out.append(on_waves(waves))
    if "exact" in models:
        beside = ", ".join(
            f"{in_words(models[model]['crps_over_exact']['value'])} ({model})"
            for model in ("corrector", *STUDENTS, cheap, "operator")
            if model in models
        )
        last = max(known_leads(teacher["crps_over_exact_by_lead"]), default=None)
        out.append(
            "The law of the future is known: CRPS and errors of means are relative to exact samples instead "
            "of the single future in the data, and no independent members have a lower mean CRPS. CRPS over "
            f"that of exact samples: {beside}; the corrector's at its worst lead: {in_words(last)}."
        )
    if {"scoring", "student_1"} <= models.keys():
        out.append(
            "The same network trained by scores, without a teacher, has "
            f"{ratio('scoring', 'student_1', 'crps')} times the CRPS and "
            f"{ratio('scoring', 'student_1', 'energy_score')} times the energy score of the student's "
            "single evaluation."
        )
    return out


def on_waves(ratio: dict[str, float | None]) -> str:
    """What a network adds to linear-Gaussian waves of residuals. ratio: of the corrector's CRPS to theirs."""
    if None in ratio.values():
        return "Whether a network adds anything to linear-Gaussian waves of residuals is not known."
    text = "{value:.3f} [{low:.3f}, {high:.3f}]".format(**ratio)
    if ratio["high"] < 1:
        return f"The network adds to linear-Gaussian waves of residuals: its CRPS is {text} times theirs."
    return (
        "The network adds nothing significant to linear-Gaussian waves of residuals, which need no network: "
        f"its CRPS is {text} times theirs. Here such waves may pass the gates in its place, as the law may "
        "be linear and Gaussian."
    )


def known_leads(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def in_words(value: float | None, digits: int = 3) -> str:
    return "an undefined number of" if value is None else f"{value:.{digits}f}"
