"""What the report says about ensembles: every way to draw a corrected task's future on the same cases, and a steady prior
against the exact posterior."""

from __future__ import annotations

from typing import Any

import torch

from ups import probabilistic
from ups.cache import open_cache
from ups.choose import spread
from ups.config import Config
from ups.corrector import load_corrector
from ups.ensemble import Ensembles, energy_distance, milliseconds_per_state, one_step, rollouts
from ups.observe import CASES, observe_case, row_generators
from ups.operator import Operator
from ups.residual import TransientResiduals
from ups.steady import SteadyResiduals, judge_case, posterior_draws

WINDOWS = 512          # of the test split, for scores of one step; 192 gave one model spread over skill from 0.76 to 0.94
TIMED_STATES = 32      # states per call when the time per state is taken
EXACT_ROWS = 2         # test fields whose exact posterior is drawn, per case
CHEAP = ("operator", "dressed", "dressed_conditional", "dressed_resampled")


def assess_transient(config: Config, operator: Operator, name: str, device: torch.device) -> tuple[dict, dict]:
    """The task's entry of results.json under "ensembles" and the sample that the report draws."""
    settings, cache = config.evaluate, open_cache(config, name)
    source = TransientResiduals(operator, cache, config, device)
    ensembles = Ensembles(config, source, device)
    steps = assess_one_step(ensembles, min(WINDOWS, 24 * settings.ensemble_trajectories), settings.members)

    rows, context = spread(cache, settings.split, settings.ensemble_trajectories), config.context(name)
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
    cheap = min((m for m in CHEAP if models[m]["crps"]["value"] is not None), key=lambda m: models[m]["crps"]["value"])
    pairs = [("corrector", cheap), ("corrector", "dressed_conditional"),
             *[(s, "corrector") for s in ("student_1", "student_2") if s in scores],
             *[("student_1", "rival") for _ in [0] if "student_1" in scores and "rival" in scores]]
    comparisons = {f"{one} / {other}": probabilistic.compare_ensembles(scores[one], scores[other], settings.num_bootstrap,
                                                                       config.run.seed, groups) for one, other in pairs}
    entry = {"task": name, "members": settings.members, "split": settings.split,
             "num_trajectories": len(rows), "models": models, "times": times,
             "comparisons": comparisons, "best_cheap": cheap, "checks": steps["checks"], "setting": setting_of(config, name)}
    sample = {"u_ref": u_ref[0].numpy(), "members": shown, "times": times, "fields": list(cache.task.fields),
              "coordinates": [(torch.arange(n) + 0.5).numpy() / n for n in codec.space],
              "label": f"{settings.split} row {int(rows[0])}"}
    return {**entry, "words": words_of(entry)}, sample


def assess_one_step(ensembles: Ensembles, count: int, num_members: int) -> dict[str, Any]:
    """Scores of single calls from windows all along the test trajectories, and the checks that need the same noise twice."""
    draws, facts = one_step(ensembles, count, num_members, ensembles.names)
    source, unit = ensembles.residuals, ensembles.head.marginal_std.square().mean().sqrt()
    boundary, truth = source.cache.task.boundary, facts["truth"]
    groups = source.cache.trajectory[source.cache.split[ensembles.split][facts["rows"]]]
    field_ref = source.decode(truth)
    models, scores = {}, {}
    for model, members in draws.items():
        scores[model] = probabilistic.score_ensemble(source.decode(members).cpu(), field_ref.cpu(), boundary)
        summary = probabilistic.summarise_ensemble(scores[model], 200, ensembles.seed, None, groups)
        keep = ("crps", "ssr", "energy_score", "coverage_50", "coverage_90", "rank_ratio", "outlier_share", "spectrum_error",
                "rank_histogram", "spread_skill_bins")
        models[model] = {key: summary[key] for key in keep if key in summary}
        models[model]["energy_distance"] = energy_distance(members, truth, unit)
    half = len(truth) // 2
    checks: dict[str, Any] = {"energy_distance_floor": abs(energy_distance(truth[:half, None], truth[half:], unit)),
                              "pairing": {name: probabilistic.pairing(draws[name].cpu(), draws["corrector"].cpu())
                                          for name in ("student_1", "rival") if name in draws}}
    few = max(2, count // 8)           # the first of the same windows
    fine, _ = one_step(ensembles, few, num_members, ["corrector"], 64)
    fine = probabilistic.score_ensemble(source.decode(fine["corrector"]).cpu(), field_ref[:few].cpu(), boundary)
    checks["ssr_of_64_steps"] = probabilistic.summarise_ensemble(fine, 50, ensembles.seed)["ssr"]["value"]
    coarse = {key: value[:few] for key, value in scores["corrector"].items()}
    checks["ssr_same_cases"] = probabilistic.summarise_ensemble(coarse, 50, ensembles.seed)["ssr"]["value"]
    some = max(2, count // 4)
    shuffled, _ = one_step(ensembles, some, num_members, ["corrector"], shuffle=True)
    crps = float(probabilistic.fair_crps(source.decode(shuffled["corrector"]).cpu(), field_ref[:some].cpu()).mean())
    ours, dressed = (float(scores[model]["crps"][:some].mean()) for model in ("corrector", "dressed"))
    checks["shuffled_crps_rise_over_gain"] = (crps - ours) / max(dressed - ours, 1e-12)
    return {"models": models, "checks": checks}


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
        return "an undefined number of" if top is None or not bottom else f"{top / bottom:.3f}"

    step = {key: models["corrector"]["one_step"][key]["value"] for key in ("ssr", "coverage_90")}
    known = {key: "undefined" if value is None else f"{value:.2f}" for key, value in step.items()}
    rows.append(f"Setting: {entry['setting']}. {entry['num_trajectories']} {entry['split']} trajectories, "
                f"{entry['members']} members.")
    over = {other: ratio("corrector", other, "crps") for other in ("operator", cheap)}
    joint = ratio("corrector", "dressed_conditional", "energy_score")
    rows.append(f"What the corrector adds over the operator: its fair CRPS over the rollout is {over['operator']} times the "
                f"operator's and {over[cheap]} times that of the best cheap ensemble ({cheap}); its energy score, which sees "
                f"joint structure, is {joint} times a conditional Gaussian's. One step ahead its spread is {known['ssr']} times "
                f"its error (1 is calibrated) and the share of truths inside its 90 % interval is {known['coverage_90']}.")
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
    settings, cache = config.evaluate, open_cache(config, name)
    source, prior = SteadyResiduals(operator, cache, config, device), load_corrector(config.run_dir / "steady", device)
    codec, head = source.head.input_codec, source.head
    places = torch.arange(min(settings.ensemble_trajectories, len(cache.split[settings.split])))
    z_in, z_ref, parameters = source.fields(settings.split, places)
    v = codec.decode(z_in[:, 0])
    u_ref = source.physical(z_ref).cpu()
    groups = cache.trajectory[cache.split[settings.split][places]]
    kinds = {"dressed": "dressed", "gaussian": "dressed_conditional", "prior": "corrector"}
    cases, shown = {}, {}
    for case in CASES:
        observation = observe_case(v, case, row_generators(config.run.seed, case, rows=places.tolist()))
        members = {}
        for kind, model in kinds.items():
            draws, guess = posterior_draws(prior, source, observation, parameters, places.tolist(), settings.members,
                                           config.diffusion.sampler_steps, config.run.seed, kind)
            members[model] = draws.cpu()[:, :, None]
        members = {"operator": guess.cpu()[:, None, None], **members}
        cases[case] = {model: probabilistic.summarise_ensemble(
            probabilistic.score_ensemble(u, u_ref, cache.task.boundary), settings.num_bootstrap, config.run.seed, None, groups)
            for model, u in members.items()}
        if case != "full" and name == "darcy2d_grf":
            exact = [judge_case(prior, source, case, row, config) for row in range(min(EXACT_ROWS, len(places)))]
            for kind, model in kinds.items():
                mean = {key: sum(e[kind][key] for e in exact) / len(exact) for key in exact[0][kind]}
                cases[case][model] |= {"exact": mean, "energy_distance_ratio": mean["distance"] / mean["between"],
                                       "trace_ratio": mean["trace"]}
        seen = torch.where(observation.mask[0, 0] > 0, observation.values[0, 0], torch.nan)
        shown[case] = {"observed": seen.cpu().numpy(), "u_ref": u_ref[0, 0].numpy(),
                       "members": members["corrector"][0, :, 0].numpy()}
    words = [f"{len(places)} {settings.split} fields, {settings.members} members each; distances to the exact posterior from "
             f"{settings.truth_members} draws for each of {EXACT_ROWS} fields. One model serves every observation."]
    entry = {"task": name, "members": settings.members, "num_trajectories": len(places), "truth_members": settings.truth_members,
             "cases": cases, "words": words}
    return entry, {"cases": shown, "fields": list(cache.task.fields), "label": f"{settings.split} field {int(places[0])}",
                   "coordinates": [(torch.arange(n) + 0.5).numpy() / n for n in head.codec.space]}
