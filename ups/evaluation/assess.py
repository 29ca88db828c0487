"""What the report says about ensembles: every way to draw a corrected task's future on the same cases, and a steady prior
against the exact posterior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ups.config import Config
from ups.data.cache import Cache, open_cache
from ups.evaluation.ensemble import Ensembles, milliseconds_per_state, one_step, rollouts
from ups.evaluation.posterior import case_bank, judge_case, posterior_draws
from ups.generative.corrector import load_corrector
from ups.generative.observation import CASES, observe_case, row_generators
from ups.generative.residuals import TransientResiduals
from ups.generative.steady import SteadyResiduals
from ups.metrics import ensembles as probabilistic
from ups.metrics import pairs
from ups.metrics.intervals import bootstrap
from ups.metrics.intervals import entry as entry_of
from ups.models.operator import Operator
from ups.models.rollout import member_noise

WINDOWS = 512          # for scores of one step; 192 gave one model spread over skill from 0.76 to 0.94
STARTS = (0, 1, 4, 16)  # first frames of the bins in which scores of one step are reported
PAIRED = 4             # members in an energy distance
LONG, LONG_ROWS, LONG_MEMBERS, BLOWN_UP = 10, 4, 2, 10.0   # a rollout so many times as long; |u| over the start's largest
TIMED_STATES = 32      # states per call when the time per state is taken
CHEAP = ("operator", "dressed", "dressed_conditional", "dressed_resampled")
STUDENTS = ("student_1", "student_2")
PRIORS = {"dressed": "dressed", "resampled": "dressed_resampled", "gaussian": "dressed_conditional", "prior": "corrector"}


def one_of_each(cache: Cache, split: str, count: int) -> Tensor:
    """`count` positions (all, if fewer) in a split, each of another initial condition, parameter values in turn: (<= count,)."""
    trajectory = cache.trajectory[cache.split[split]]
    alike = [(trajectory == start).nonzero()[:, 0] for start in trajectory.unique()[:count]]
    return torch.stack([places[turn % len(places)] for turn, places in enumerate(alike)])


def assess_transient(config: Config, operator: Operator, name: str, device: torch.device) -> tuple[dict, dict]:
    """The task's entry of results.json under "ensembles" and the sample that the report draws."""
    settings, cache = config.evaluate, open_cache(config, name)
    source = TransientResiduals(operator, cache)
    ensembles = Ensembles(config, source, device)
    steps = assess_one_step(ensembles, min(WINDOWS, 24 * settings.ensemble_trajectories), settings.members,
                            settings.num_bootstrap)

    places, context = one_of_each(cache, settings.split, settings.ensemble_trajectories), config.context(name)
    rows = cache.split[settings.split][places]
    num_frames = min(settings.ensemble_frames, cache.num_frames - context)
    codec = source.head.codec
    u_ref = codec.denormalise(codec.decode(cache.batch(rows, context, num_frames, device))).cpu()
    times, groups = [cache.dt * (lead + 1) for lead in range(num_frames)], cache.trajectory[rows]
    scores, shown, models = {}, {}, {}
    reference = rollouts(ensembles, "operator", rows, num_frames, 1)[:, 0]
    for model in ensembles.names:
        members = reference[:, None] if model == "operator" else rollouts(ensembles, model, rows, num_frames, settings.members)
        scores[model] = probabilistic.score_ensemble(members, u_ref, cache.task.boundary, reference)
        models[model] = probabilistic.summarise_ensemble(scores[model], settings.num_bootstrap, config.run.seed, times, groups)
        cost = milliseconds_per_state(ensembles, model, TIMED_STATES)
        models[model] |= {"ms_per_state": cost[0], "evaluations_per_state": cost[1], "one_step": steps["models"][model]}
        shown[model] = members[0].numpy()
    cheap = min((m for m in CHEAP if models[m]["crps"]["value"] is not None), key=lambda m: models[m]["crps"]["value"],
                default="operator")
    compared = [model for model in scores if model not in CHEAP]
    pairs_of = dict.fromkeys([*((model, other) for model in compared for other in (cheap, "operator")),
                              ("corrector", "dressed_conditional"), *((one, "corrector") for one in STUDENTS),
                              ("student_1", "rival")])
    comparisons = {f"{one} / {other}": probabilistic.compare_ensembles(
        scores[one], scores[other], settings.num_bootstrap, config.run.seed, groups)
        for one, other in pairs_of if {one, other} <= scores.keys()}
    entry = {"task": name, "members": settings.members, "split": settings.split, "num_trajectories": len(rows),
             "num_initial_conditions": len(groups.unique()), "models": models, "times": times,
             "comparisons": comparisons, "best_cheap": cheap,
             "checks": {**steps["checks"], "long": long_rollouts(ensembles, rows, LONG * num_frames)},
             "setting": setting_of(config, name)}
    sample = {**cache.scene(), "u_ref": u_ref[0].numpy(), "members": shown, "times": times,
              "label": f"{settings.split} row {int(rows[0])}"}
    return {**entry, "words": words_of(entry)}, sample


def assess_one_step(ensembles: Ensembles, count: int, num_members: int, num_bootstrap: int) -> dict[str, Any]:
    """Scores of single calls from windows all along the trajectories, and the checks that need the same noise twice."""
    draws, facts = one_step(ensembles, count, num_members, ensembles.names)
    source, seed = ensembles.residuals, ensembles.seed
    groups = source.cache.trajectory[source.cache.split[ensembles.split][facts["rows"]]]
    field_ref = source.decode(facts["truth"]).cpu()

    def score(members: Tensor) -> dict[str, Tensor]:
        return probabilistic.score_ensemble(source.decode(members).cpu(), field_ref[:len(members)], source.cache.task.boundary)

    def summarise(rows: dict[str, Tensor], which: Tensor, keep: tuple[str, ...]) -> dict[str, Any]:
        part = {key: value[which] for key, value in rows.items()}
        summary = probabilistic.summarise_ensemble(part, num_bootstrap, seed, None, groups[which])
        return {key: summary[key] for key in keep}

    keep = ("crps", "ssr", "energy_score", "coverage_50", "coverage_90", "rank_ratio", "outlier_share", "spectrum_error",
            "spread_slope", "rank_histogram", "spread_skill_bins", "nonfinite_trajectories")
    scores, models, everything = {model: score(members) for model, members in draws.items()}, {}, torch.arange(count)
    starts, last = facts["starts"], int(facts["starts"].max())
    ends = [min(start - 1, last) for start in (*STARTS[1:], last + 1)]
    for model, rows in scores.items():
        models[model] = summarise(rows, everything, keep)
        models[model]["by_start"] = [
            {"first": first, "last": last, "windows": len(which),
             **summarise(rows, which, ("crps", "ssr", "coverage_90", "outlier_share"))}
            for first, last in zip(STARTS, ends, strict=True)
            if len(which := ((first <= starts) & (starts <= last)).nonzero()[:, 0])]

    unit = ensembles.head.marginal_std.square().mean().sqrt().cpu() * facts["truth"][0].numel() ** 0.5
    flat, truth = {name: u.cpu().flatten(2) / unit for name, u in draws.items()}, facts["truth"].cpu().flatten(1) / unit
    distances = {model: pairs.distance_matrix(u[:, :PAIRED], truth) for model, u in flat.items()}
    for model, matrix in distances.items():
        models[model]["energy_distance"] = entry_of(pairs.bootstrap_pairs(matrix, num_bootstrap, seed, groups))
    checks: dict[str, Any] = {
        "energy_distance_floor": pairs.exchange_floor(flat["corrector"][:, 0], truth, seed, groups),
        "energy_distance_excess": {name: entry_of(pairs.bootstrap_pairs(distances[name] - 1.1 * distances["corrector"],
                                                                        num_bootstrap, seed, groups))
                                   for name in STUDENTS if name in draws},
        "pairing": {name: pairs.pairing(flat[name], flat["corrector"], num_bootstrap, seed, groups)
                    for name in (*STUDENTS, "rival") if name in draws},
        "less_than_teacher": {name: probabilistic.compare_ensembles(scores[name], scores["corrector"], num_bootstrap, seed,
                                                                    groups)["ssr_less"] for name in STUDENTS if name in draws}}
    few, some = max(2, count // 16), max(2, count // 4)           # the first of the same windows
    fine = score(one_step(ensembles, few, num_members, ["corrector"], 64)[0]["corrector"])
    coarse = {key: value[:few] for key, value in scores["corrector"].items()}
    checks["ssr_less_64_steps"] = probabilistic.compare_ensembles(coarse, fine, num_bootstrap, seed, groups[:few])["ssr_less"]
    checks["ssr_of_64_steps"] = summarise(fine, torch.arange(few), ("ssr",))["ssr"]
    shuffled = score(one_step(ensembles, some, num_members, ["corrector"], shuffle=True)[0]["corrector"])
    losses = [rows["crps"][:some].flatten(1).mean(1) for rows in (shuffled, scores["corrector"], scores["dressed"])]
    checks["shuffled_crps_rise_over_gain"] = entry_of(bootstrap(
        torch.stack(losses, 1), lambda mean: (mean[:, 0] - mean[:, 1]) / (mean[:, 2] - mean[:, 1]), num_bootstrap, seed,
        groups[:some]))
    return {"models": models, "checks": checks}


def long_rollouts(ensembles: Ensembles, rows: Tensor, num_frames: int) -> dict[str, Any]:
    """How many of a few members leave the range of their start by BLOWN_UP, or are not finite, in `num_frames` frames."""
    blown_up, cache, codec = {}, ensembles.residuals.cache, ensembles.residuals.head.codec
    rows = rows[:LONG_ROWS]
    start = codec.denormalise(codec.decode(cache.batch(rows, 0, 1, ensembles.device))).cpu().abs().flatten(1).amax(1)
    for model in ["operator", *[name for name in ensembles.names if name not in CHEAP]]:
        u = rollouts(ensembles, model, rows, num_frames, LONG_MEMBERS)
        blown_up[model] = int((~(u.abs().flatten(2).amax(2) <= BLOWN_UP * start[:, None])).sum())
    return {"frames": num_frames, "members": len(rows) * LONG_MEMBERS, "blown_up": blown_up}


def setting_of(config: Config, name: str) -> str:
    """Why the next state of this task is uncertain, in words."""
    task, settings = config.task[name], []
    if open_cache(config, name, verify="quick").task.hides:
        settings.append(f"the parameter (one of {', '.join(f'{v:g}' for v in task.parameters)}) is hidden")
    if task.dim:
        settings.append(f"patches of {task.patch} cells are cut to {task.dim} numbers")
    return (" and ".join(settings) or "everything is observed") + f"; {task.history} frame(s) are given"


def words_of(entry: dict[str, Any]) -> list[str]:
    """What the corrector adds over the operator and the student over the teacher, from the measured numbers."""
    models, cheap, rows = entry["models"], entry["best_cheap"], []

    def ratio(one: str, other: str, key: str) -> str:
        top, bottom = models[one][key]["value"], models[other][key]["value"]
        return number_of(top / bottom if top is not None and bottom else None)

    step = models["corrector"]["one_step"]
    starts = ", ".join(f"{number_of(row['ssr']['value'], 2)} from {frames_of(row)}" for row in step["by_start"])
    leads = [value for value in models["corrector"]["ssr_by_lead"] if value is not None] or [None]
    rows.append(f"Setting: {entry['setting']}. {entry['num_trajectories']} {entry['split']} trajectories of as many "
                f"initial conditions, {entry['members']} members.")
    over = {other: ratio("corrector", other, "crps") for other in ("operator", cheap)}
    joint = ratio("corrector", "dressed_conditional", "energy_score")
    rows.append(f"What the corrector adds over the operator: its fair CRPS over the rollout is {over['operator']} times the "
                f"operator's and {over[cheap]} times that of the best cheap ensemble ({cheap}); its energy score, which sees "
                f"joint structure, is {joint} times a conditional Gaussian's. Its spread over its error (1 is calibrated) "
                f"is, one step ahead, {starts}; over the leads of a rollout {number_of(min(leads), 2)} to "
                f"{number_of(max(leads), 2)}.")
    for student, words in (("student_1", "one evaluation"), ("student_2", "two evaluations")):
        if student in models:
            faster = models["corrector"]["ms_per_state"] / models[student]["ms_per_state"]
            rows.append(f"What the student adds over its teacher, with {words} for "
                        f"{models['corrector']['evaluations_per_state']:.0f}: it is {faster:.1f} times faster per "
                        f"state, operator and decoding included, at {ratio(student, 'corrector', 'crps')} times the CRPS and "
                        f"{ratio(student, 'corrector', 'energy_score')} times the energy score.")
    if "rival" in models and "student_1" in models:
        rows.append(f"The same network trained by scores, without a teacher, has {ratio('rival', 'student_1', 'crps')} times the "
                    f"CRPS and {ratio('rival', 'student_1', 'energy_score')} times the energy score of the student's single "
                    f"evaluation.")
    return rows


@torch.no_grad()
def assess_steady(config: Config, operator: Operator, name: str, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's entry of results.json under "steady" (cases of observation) and the sample that the report draws."""
    settings, cache, seed = config.evaluate, open_cache(config, name), config.run.seed
    prior = load_corrector(config.run_dir / "steady", device)
    source = SteadyResiduals(operator, cache, prior.heads[name].guess)
    codec, places = source.head.input_codec, one_of_each(cache, settings.split, settings.ensemble_trajectories)
    z_in, z_ref, parameters = source.fields(settings.split, places)
    v, u_ref, rows = codec.decode(z_in[:, 0]), source.head.physical(z_ref).cpu(), places.tolist()
    groups = cache.trajectory[cache.split[settings.split][places]]
    cases, scores, shown = {}, {}, {}
    for case in CASES:
        bank = case_bank(source, case, seed)
        observation = observe_case(v, case, row_generators(seed, case, rows=rows))
        predicted = source.predict(observation, parameters)
        noise = member_noise(predicted[0].shape[1:], seed, rows, 0, settings.members).to(device)
        members = {"operator": source.solution(predicted[0], torch.zeros_like(predicted[0]))[:, None], **{
            model: posterior_draws(prior, source, predicted, noise, kind, bank)
            for kind, model in PRIORS.items()}}
        scores[case] = {model: probabilistic.score_ensemble(u.cpu()[:, :, None], u_ref, cache.task.boundary)
                        for model, u in members.items()}
        cases[case] = {model: probabilistic.summarise_ensemble(rows_of, settings.num_bootstrap, seed, None, groups)
                       for model, rows_of in scores[case].items()}
        if case != "full" and cache.task.posterior:
            few = rows[:settings.truth_fields]
            exact, splits = judge_case(prior, source, case, settings.split, few, seed, settings.truth_members, bank, PRIORS)
            for kind, model in PRIORS.items():
                cases[case][model]["exact"] = summarise_exact(exact[kind], splits, settings.num_bootstrap, seed)
        seen = torch.where(observation.mask[0, 0] > 0, observation.values[0, 0], torch.nan)
        shown[case] = {"observed": seen.cpu().numpy(), "u_ref": u_ref[0, 0].numpy(),
                       "members": members["corrector"][0].cpu().numpy()}
    partial = [case for case in CASES if case != "full"]
    pooled = {other: pool(scores, partial, other, settings.num_bootstrap, seed, groups)
              for other in ("operator", *PRIORS.values()) if other != "corrector"}
    cheap = max(pooled, key=lambda other: -1.0 if (value := pooled[other]["energy_score"]["value"]) is None else value)
    words = [f"{len(places)} {settings.split} fields, {settings.members} members each; distances to the exact posterior from "
             f"{settings.truth_members} draws for each of {min(settings.truth_fields, len(rows))} fields. One model serves "
             f"every observation, the cheap ensembles are fitted to each. Its energy score is "
             f"{number_of(pooled[cheap]['energy_score']['value'])} times that of the best of them ({cheap}), mean over the "
             f"partial observations."]
    entry = {"task": name, "members": settings.members, "split": settings.split, "num_trajectories": len(places),
             "num_initial_conditions": len(groups.unique()), "truth_members": settings.truth_members, "cases": cases,
             "best_cheap": cheap,
             "comparisons": {f"corrector / {other}": row for other, row in pooled.items()}, "words": words,
             "ssr": pool_spread([scores[case]["corrector"] for case in partial], settings.num_bootstrap, seed, groups)}
    return entry, {**cache.scene(), "cases": shown, "label": f"{settings.split} field {rows[0]}"}


def pool(scores: dict[str, dict], cases: list[str], other: str, num_bootstrap: int, seed: int, groups: Tensor) -> dict[str, Any]:
    """Score of the prior over that of `other`, mean over cases, so that none weighs more because its numbers are larger."""
    out = {}
    for name in ("crps", "energy_score"):
        parts = [scores[case][model][name].flatten(1).mean(1) for model in ("corrector", other) for case in cases]
        out[name] = entry_of(bootstrap(
            torch.stack(parts, 1), lambda mean: (mean[:, :len(cases)] / mean[:, len(cases):]).mean(1), num_bootstrap, seed,
            groups))
    return out


def pool_spread(scores: list[dict[str, Tensor]], num_bootstrap: int, seed: int, groups: Tensor) -> dict[str, Any]:
    """Spread/skill, mean over cases."""
    members = scores[0]["ranks"].shape[2] - 1
    parts = [part[key].flatten(1).mean(1) for key in ("variance", "squared_error") for part in scores]
    return entry_of(bootstrap(torch.stack(parts, 1), lambda mean: (
        (members + 1) / members * mean[:, :len(scores)] / mean[:, len(scores):]).sqrt().mean(1), num_bootstrap, seed, groups))


def summarise_exact(rows: list[dict[str, float]], splits: Tensor, num_bootstrap: int, seed: int) -> dict[str, Any]:
    """Moments of `ups.evaluation.posterior.judge`, one entry per field, as figures with intervals over fields; floor: the distance that
    exact draws stay below 95 times of 100."""
    out: dict[str, Any] = {"fields": len(rows), "floor": float(torch.quantile(splits, 0.95))}
    values = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
    out["distance"] = entry_of(bootstrap(values["distance"][:, None], lambda mean: mean[:, 0], num_bootstrap, seed))
    for key in ("trace", "log_trace", "leading"):
        both = torch.stack([values[key], values[f"{key}_exact"]], 1)
        out[key] = entry_of(bootstrap(both, lambda mean: mean[:, 0] / mean[:, 1], num_bootstrap, seed))
    return out


def frames_of(row: dict[str, Any]) -> str:
    """The first frames of a row of "by_start", in words."""
    return f"frame {row['first']}" if row["first"] == row["last"] else f"frames {row['first']} to {row['last']}"


def number_of(value: float | None, digits: int = 3) -> str:
    return "an undefined number of" if value is None else f"{value:.{digits}f}"
