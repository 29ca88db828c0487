"""What the report says about ensembles: every way to draw a corrected task's future, on the same cases."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ups.config import EvaluateConfig, TaskConfig
from ups.evaluation.checks import LEADS, independence, ranks_of_data, response
from ups.evaluation.ensemble import CHEAP, Ensembles, Windows, costs_per_state, one_step, rollouts
from ups.evaluation.reference_ensembles import CHEAP_ROLLOUTS, EXACT, draw_exactly, draw_law, rivals_of, timed
from ups.metrics.climate import climate
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import (
    Scores,
    bootstrap,
    bootstrap_pairs,
    distance_matrix,
    entry,
    exchange_floor,
    number,
    pairing,
)
from ups.metrics.joint import residual_energy, score_joint
from ups.tasks import Task

WINDOWS = 512  # for scores of one step; 192 gave one model spread over skill from 0.76 to 0.94
STARTS = (0, 1, 4, 16)  # first frames of the bins in which scores of one step are reported
PAIRED = 4  # members in an energy distance
# a rollout so many times as long; |u| over the start's largest
LONG, LONG_ROWS, LONG_MEMBERS, LONG_EXACT, BLOWN_UP = 10, 16, 2, 100, 10.0
TIMED_STATES = 32  # states per call when the time per state is taken
STUDENTS = {"student_1": "one evaluation", "student_2": "two evaluations"}
KEPT = (
    "crps",
    "ssr",
    "energy_score",
    "coverage_50",
    "coverage_90",
    "rank_ratio",
    "outlier_fraction",
    "spectrum_error",
    "spread_slope",
    "rank_histogram",
    "spread_skill_bins",
    "nonfinite_trajectories",
)  # of one step
KEPT_BY_START = ("crps", "ssr", "coverage_90", "outlier_fraction")
UNTRAINED = (*CHEAP, *CHEAP_ROLLOUTS, *EXACT)


def assess_transient(ensembles: Ensembles, settings: EvaluateConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's entry of results.json under "ensembles" and the sample that the report draws."""
    truth, seed, count = ensembles.truth, ensembles.seed, settings.num_bootstrap
    cache, task = truth.cache, truth.task
    steps = assess_one_step(
        ensembles,
        min(WINDOWS, 24 * settings.ensemble_trajectories),
        settings.members,
        count,
        settings.truth_members,
    )

    rows = cache.split[truth.split][truth.one_of_each(settings.ensemble_trajectories)]
    num_frames = min(settings.ensemble_frames, truth.num_frames, cache.num_frames - truth.context)
    times, groups = [cache.dt * (lead + 1) for lead in range(num_frames)], cache.trajectory[rows]
    u_ref = truth.future(rows, num_frames)
    law = draw_law(truth, seed + 2, rows, num_frames, u_ref, settings.truth_members)
    reference = rollouts(ensembles, "operator", rows, num_frames, 1)
    energy = None if law is None else residual_energy(law, u_ref, task.boundary, reference[:, 0])
    scores, shown, models = {}, {}, {}
    for model, forecasts in {
        **{model: partial(rollouts, ensembles, model) for model in ensembles.names},
        **rivals_of(ensembles, settings, num_frames),
    }.items():
        members, cost = timed(forecasts, rows, num_frames, settings.members)
        scores[model] = {
            **score_ensemble(members, u_ref, task.boundary, reference[:, 0], exact=law),
            **score_joint(members, u_ref, task.boundary, reference[:, 0], law, energy),
        }
        models[model] = {**summarise_ensemble(scores[model], count, seed, groups), **cost}
        shown[model] = members[0].numpy()
        if model == "exact" or model not in UNTRAINED:
            again = (
                None
                if law is not None
                else second_ensemble(ensembles, model, rows, num_frames, settings.members)
            )
            models[model]["independence"] = independence(members, count, seed, groups, law, again)
        if model == "exact":  # is it the law that the data come from?
            steps["checks"]["ssr_of_law"] = summarise_ensemble(
                score_ensemble(members, u_ref, task.boundary), count, seed, groups
            )["ssr"]
    for model in ensembles.names:
        models[model] |= costs_per_state(ensembles, model, TIMED_STATES)
    for model, row in steps["models"].items():
        models[model]["one_step"] = row
    known = {
        model: models[model]["crps"]["value"]
        for model in (*CHEAP, *CHEAP_ROLLOUTS)
        if models[model]["crps"]["value"] is not None
    }
    cheap = min(known, key=known.get, default="operator")
    comparisons = {
        f"{one} / {other}": compare_ensembles(scores[one], scores[other], count, seed, groups)
        for one, other in compared([*models], cheap)
    }
    for model in models:  # what is left to gain, as a row and as a curve
        if versus := comparisons.get(f"{model} / exact"):
            models[model] |= {
                "crps_over_exact": versus["crps"],
                **{
                    f"crps_over_exact_by_lead{tail}": versus["crps_by_lead"][end]
                    for tail, end in (("", "value"), ("_low", "low"), ("_high", "high"))
                },
            }
    out = {
        "task": task.name,
        "members": settings.members,
        "split": truth.split,
        "num_trajectories": len(rows),
        "num_initial_conditions": len(groups.unique()),
        "models": models,
        "times": times,
        "best_cheap": cheap,
        "comparisons": comparisons,
        "checks": {**steps["checks"], "long": long_rollouts(ensembles, rows, LONG * num_frames)},
        "setting": setting_of(cache.settings, task),
    }
    sample = {
        **cache.scene(),
        "u_ref": u_ref[0].numpy(),
        "members": shown,
        "times": times,
        "label": f"{truth.split} row {int(rows[0])}",
    }
    return {**out, "words": words_of(out)}, sample


def second_ensemble(
    ensembles: Ensembles, model: str, rows: Tensor, num_frames: int, num_members: int
) -> Tensor:
    """The first leads of another ensemble of the same starts, from other noise."""
    again = copy.copy(ensembles)
    again.seed = ensembles.seed + 6
    return rollouts(again, model, rows, min(LEADS, num_frames), num_members)


def compared(names: Sequence[str], cheap: str) -> list[tuple[str, str]]:
    """Pairs of models that are compared: what was trained with the best of the cheap and with the operator,
    all with exact draws, and so on."""
    trained = [
        (model, other)
        for model in names
        if model not in UNTRAINED
        for other in (cheap, "operator", "dressed_waves")
    ]
    exact = [
        *[(model, "exact") for model in names if model != "exact"],
        ("operator", "bayes_mean"),
        ("exact", "operator"),
        ("exact", "dressed_conditional"),
    ]
    others = [
        ("corrector", "dressed_conditional"),
        *[(model, "corrector") for model in names if model not in (*UNTRAINED, "corrector", "rival")],
        ("student_1", "rival"),
    ]
    return list(dict.fromkeys([*trained, *[pair for pair in (*exact, *others) if {*pair} <= {*names}]]))


def assess_one_step(
    ensembles: Ensembles, count: int, num_members: int, num_bootstrap: int, num_exact: int
) -> dict[str, Any]:
    """Scores of single calls from windows all along the trajectories, and the checks that need the same noise
    twice.

    Fields are scored against the data, CRPS and errors of means against `num_exact` exact draws where the law
    is known. Distances of draws and the pairing of a student with its teacher are of latents, in which all of
    them are: they say whether two distributions are equal, and what the codec leaves out is in neither.
    """
    source, truth, seed = ensembles.residuals, ensembles.truth, ensembles.seed
    windows = one_step(ensembles, count, num_members, ensembles.names, num_exact=num_exact)
    groups = truth.cache.trajectory[truth.cache.split[truth.split][windows.rows]]
    field_ref = windows.u_ref.cpu()

    def score_fields(u: Tensor) -> Scores:
        law = None if windows.law is None else windows.law[: len(u)].cpu()
        return score_ensemble(u.cpu(), field_ref[: len(u)], truth.task.boundary, exact=law)

    def score(members: Tensor) -> Scores:
        return score_fields(source.decode(members))

    def summarise(rows: Scores, which: Tensor, kept: Sequence[str]) -> dict[str, Any]:
        part = {key: value[which] for key, value in rows.items()}
        summary = summarise_ensemble(part, num_bootstrap, seed, groups[which])
        return {key: summary[key] for key in kept}

    scores = {model: score(members) for model, members in windows.draws.items()}
    if windows.exact is not None:
        scores["exact"] = score_fields(windows.exact)
    models = {
        model: {
            **summarise(rows, torch.arange(count), KEPT),
            "by_start": [
                {**bin, **summarise(rows, which, KEPT_BY_START)} for bin, which in bins_of(windows.starts)
            ],
        }
        for model, rows in scores.items()
    }
    checks = check_latents(ensembles, windows, models, num_bootstrap, groups)
    less = partial(compare_ensembles, num_bootstrap=num_bootstrap, seed=seed)
    checks["less_than_teacher"] = {
        name: less(scores[name], scores["corrector"], groups=groups)["ssr_less"]
        for name in STUDENTS
        if name in scores
    }
    few, some = max(2, count // 16), max(2, count // 4)  # the first of the same windows
    fine = score(one_step(ensembles, few, num_members, ["corrector"], 64).draws["corrector"])
    coarse = {key: value[:few] for key, value in scores["corrector"].items()}
    checks["ssr_less_64_steps"] = less(coarse, fine, groups=groups[:few])["ssr_less"]
    checks["ssr_of_64_steps"] = summarise(fine, torch.arange(few), ("ssr",))["ssr"]
    trained = [name for name in ensembles.names if name not in UNTRAINED]
    others = one_step(ensembles, some, num_members, trained, is_shuffled=True).draws
    pairs = {name: (windows.draws[name][:some].cpu(), draws.cpu()) for name, draws in others.items()}
    checks["response"] = {
        name: response(pairs[name], pairs["corrector"], num_bootstrap, seed, groups[:some])
        for name in trained
        if name != "corrector"
    }
    losses = [
        rows["crps"][:some].flatten(1).mean(1)
        for rows in (score(others["corrector"]), scores["corrector"], scores["dressed"])
    ]
    checks["shuffled_crps_rise_over_gain"] = entry(
        bootstrap(
            torch.stack(losses, 1),
            lambda mean: (mean[:, 0] - mean[:, 1]) / (mean[:, 2] - mean[:, 1]),
            num_bootstrap,
            seed,
            groups[:some],
        )
    )
    if windows.law is not None:
        checks["ranks_of_data"] = ranks_of_data(
            field_ref, windows.law.cpu(), truth.task.boundary, num_bootstrap, seed, groups
        )
        checks["crps_over_exact"] = {
            name: less(scores[name], scores["exact"], groups=groups)["crps"] for name in trained
        }
    return {"models": models, "checks": checks}


def bins_of(starts: Tensor) -> list[tuple[dict[str, int], Tensor]]:
    """The bins of STARTS that hold windows: ({first, last, windows}, which)."""
    out, last = [], int(starts.max())
    for first, end in zip(STARTS, (*STARTS[1:], last + 1), strict=True):
        which = ((first <= starts) & (starts < end)).nonzero()[:, 0]
        if len(which):
            out.append(({"first": first, "last": min(end - 1, last), "windows": len(which)}, which))
    return out


def check_latents(
    ensembles: Ensembles, windows: Windows, models: dict[str, dict], num_bootstrap: int, groups: Tensor
) -> dict[str, Any]:
    """Energy distances of draws from the truth (into `models`), what chance leaves of one, how much farther
    the students are than 1.1 times the corrector, and how closely whatever was distilled or trained on the
    same noise follows it."""
    seed = ensembles.seed
    unit = ensembles.head.marginal_std.square().mean().sqrt().cpu() * windows.truth[0].numel() ** 0.5
    truth = windows.truth.cpu().flatten(1) / unit
    flat = {name: draws.cpu().flatten(2) / unit for name, draws in windows.draws.items()}
    distances = {model: distance_matrix(draws[:, :PAIRED], truth) for model, draws in flat.items()}

    def summarise(matrix: Tensor) -> dict[str, Any]:
        return entry(bootstrap_pairs(matrix, num_bootstrap, seed, groups))

    for model, matrix in distances.items():
        models[model]["energy_distance"] = summarise(matrix)
    return {
        "energy_distance_floor": exchange_floor(flat["corrector"][:, 0], truth, seed, groups),
        "energy_distance_excess": {
            name: summarise(distances[name] - 1.1 * distances["corrector"])
            for name in STUDENTS
            if name in flat
        },
        "pairing": {
            name: pairing(flat[name], flat["corrector"], num_bootstrap, seed, groups)
            for name in (*STUDENTS, "rival")
            if name in flat
        },
    }


def long_rollouts(ensembles: Ensembles, rows: Tensor, num_frames: int) -> dict[str, Any]:
    """How many of a few members leave the range of their start by BLOWN_UP, or are not finite, in
    `num_frames` frames; for a task on its invariant measure the `climate` of the second half of them beside
    that of the data, or of exact draws as late where the law is known, for its data may still remember how
    they began. "truth": one half of the trajectories of these beside the other; "exact": as many other draws
    as there are members. Both say what is chance: of 8 members of 100 frames of chaos, which were taken once,
    data in their place have a spectrum error of 0.029 (deviation 0.016), as a good operator has."""
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
        if truth.task.exact_futures is not None:
            u["exact"] = draw_exactly(truth, ensembles.seed + 3, rows, num_frames, LONG_MEMBERS)
            u["truth"] = draw_exactly(truth, ensembles.seed + 4, every[:LONG_EXACT], num_frames, 1)
        late = {model: members[:, :, num_frames // 2 :].flatten(0, 1) for model, members in u.items()}
        u_ref = late["truth"] if "truth" in late else truth.frames(every, 0, truth.cache.num_frames)
        beside = {model: (members, u_ref) for model, members in late.items()}
        beside["truth"] = u_ref[::2], u_ref[1::2]
        climates = {
            model: {key: number(value) for key, value in climate(*pair, truth.task.boundary).items()}
            for model, pair in beside.items()
        }
    return {
        "frames": num_frames,
        "members": len(rows) * LONG_MEMBERS,
        "blown_up": blown_up,
        "climate": climates,
    }


# ---- words


def setting_of(settings: TaskConfig, task: Task) -> str:
    """Why the next state of this task is uncertain, in words."""
    values = ", ".join(f"{value:g}" if isinstance(value, float) else value for value in settings.parameters)
    words = [
        *([task.why_uncertain] if task.why_uncertain else []),
        *([f"the parameter (one of {values}) is hidden"] if task.hides else []),
        *([f"patches of {settings.patch} cells are cut to {settings.dim} numbers"] if settings.dim else []),
    ]
    return (" and ".join(words) or "everything is observed") + f"; {settings.history} frame(s) are given"


def words_of(entry: dict[str, Any]) -> list[str]:
    """What the corrector adds over the operator and the student over the teacher, from the measured
    numbers."""
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
        "score, which sees joint structure, is "
        f"{ratio('corrector', 'dressed_conditional', 'energy_score')} times a conditional Gaussian's. Its "
        f"spread over its error (1 is calibrated) is, one step ahead, {starts}; over the leads of a "
        f"rollout {in_words(min(leads), 2)} to {in_words(max(leads), 2)}.",
    ]
    out += [
        f"What the student adds over its teacher, with {words} for "
        f"{teacher['evaluations_per_state']:.0f}: it is "
        f"{teacher['ms_per_state'] / models[student]['ms_per_state']:.1f} times faster per state, "
        f"operator and decoding included, at {ratio(student, 'corrector', 'crps')} times the "
        f"CRPS and {ratio(student, 'corrector', 'energy_score')} times the energy score."
        for student, words in STUDENTS.items()
        if student in models
    ]
    if waves := entry["comparisons"].get("corrector / dressed_waves", {}).get("crps"):
        out.append(on_waves(waves))
    if "exact" in models:
        beside = ", ".join(
            f"{in_words(models[model]['crps_over_exact']['value'])} ({model})"
            for model in ("corrector", *STUDENTS, cheap, "operator")
            if model in models
        )
        last = max(known_leads(teacher["crps_over_exact_by_lead"]), default=None)
        out.append(
            "What follows the shown state is drawn exactly: CRPS and errors of means are by such "
            "draws, not by the one future in the data; no independent members have a lower CRPS in "
            f"the mean. Over that of exact draws it is {beside}; the corrector's is {in_words(last)} "
            "at its worst lead."
        )
    if {"rival", "student_1"} <= models.keys():
        out.append(
            "The same network trained by scores, without a teacher, has "
            f"{ratio('rival', 'student_1', 'crps')} times the CRPS and "
            f"{ratio('rival', 'student_1', 'energy_score')} times the energy score of the student's "
            "single evaluation."
        )
    return out


def on_waves(ratio: dict[str, float | None]) -> str:
    """What a network adds to linear-Gaussian waves of residuals, by the corrector's CRPS over theirs."""
    if None in ratio.values():
        return "Whether a network adds anything to linear-Gaussian waves of residuals is not known."
    shown = "{value:.3f} [{low:.3f}, {high:.3f}]".format(**ratio)
    if ratio["high"] < 1:
        return f"The network adds to linear-Gaussian waves of residuals: its CRPS is {shown} times theirs."
    return (
        f"The network adds nothing that can be told to linear-Gaussian waves of residuals, which need no "
        f"network: its CRPS is {shown} times theirs. Such waves in its place may pass the gates here, as "
        "the law may be linear and Gaussian."
    )


def known_leads(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def in_words(value: float | None, digits: int = 3) -> str:
    return "an undefined number of" if value is None else f"{value:.{digits}f}"
