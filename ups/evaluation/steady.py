"""What the report says about a steady prior: ensembles given part of the coefficient, beside cheap ones that
are fitted to each observation, and beside the exact posterior of a task that knows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ups.config import EvaluateConfig
from ups.evaluation.posterior import case_bank, judge_exactly, posterior_draws
from ups.evaluation.transient import in_words
from ups.evaluation.truth import Truth
from ups.generative.corrector import Corrector
from ups.generative.observation import CASES, observe_case, row_generators
from ups.generative.residuals import SteadyResiduals
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Scores, bootstrap, entry, halves, plain_mean
from ups.models.rollout import member_noise

PRIORS = {"dressed": "dressed", "resampled": "dressed_resampled", "gaussian": "dressed_conditional",
          "prior": "corrector"}
PARTIAL = [case for case in CASES if case != "full"]   # what is all observed has one answer
POOLED = ("crps", "energy_score")


@torch.no_grad()
def assess_steady(residuals: SteadyResiduals, prior: Corrector, truth: Truth, settings: EvaluateConfig,
                  seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's entry of results.json under "steady" (cases of observation) and the sample that the report
    draws."""
    cache, task, device, count = truth.cache, truth.task, residuals.device, settings.num_bootstrap
    places = truth.one_of_each(settings.ensemble_trajectories)
    rows, numbers = cache.split[truth.split][places], places.tolist()
    u_ref, parameters, groups = truth.frames(rows, 0, 1), cache.parameters[rows], cache.trajectory[rows]
    v = residuals.head.input_codec.normalise(truth.inputs(rows).to(device))[:, 0]
    few = numbers[: settings.truth_fields]
    cases, scores, shown = {}, {}, {}
    for case in CASES:
        bank = case_bank(residuals, case, seed)
        observation = observe_case(v, case, row_generators(seed, case, rows=numbers))
        predicted = residuals.predict(observation, parameters)
        noise = member_noise(predicted[0].shape[1:], seed, numbers, 0, settings.members).to(device)
        members = {"operator": residuals.solution(predicted[0], torch.zeros_like(predicted[0]))[:, None], **{
            model: posterior_draws(prior, residuals, predicted, noise, kind, bank)
            for kind, model in PRIORS.items()}}
        scores[case] = {model: score_ensemble(u.cpu()[:, :, None], u_ref, task.boundary)
                        for model, u in members.items()}
        cases[case] = {model: summarise_ensemble(part, count, seed, None, groups)
                       for model, part in scores[case].items()}
        if task.posterior and case in PARTIAL:
            exact, splits = judge_exactly(prior, residuals, case, v[: len(few)], parameters[: len(few)], few,
                                          seed, settings.truth_members, bank, PRIORS)
            for kind, model in PRIORS.items():
                cases[case][model]["exact"] = summarise_exact(exact[kind], splits, count, seed)
        seen = torch.where(observation.mask[0, 0] > 0, observation.values[0, 0], torch.nan)
        shown[case] = {"observed": seen.cpu().numpy(), "u_ref": u_ref[0, 0].numpy(),
                       "members": members["corrector"][0].cpu().numpy()}
    pooled = {other: pool(scores, PARTIAL, other, count, seed, groups)
              for other in ("operator", *PRIORS.values()) if other != "corrector"}
    known = {other: row["energy_score"]["value"] for other, row in pooled.items()}
    cheap = max(known, key=lambda other: -1.0 if known[other] is None else known[other])
    out = {"task": task.name, "members": settings.members, "split": truth.split,
           "num_trajectories": len(places),
           "num_initial_conditions": len(groups.unique()), "truth_members": settings.truth_members,
           "cases": cases,
           "best_cheap": cheap, "comparisons": {f"corrector / {other}": row for other, row in pooled.items()},
           "words": [words_of(len(places), truth.split, settings, len(few) if task.posterior else 0, cheap,
                              known[cheap])],
           "ssr": pool_spread([scores[case]["corrector"] for case in PARTIAL], count, seed, groups)}
    return out, {**cache.scene(), "cases": shown, "label": f"{truth.split} field {numbers[0]}"}


def words_of(num_fields: int, split: str, settings: EvaluateConfig, num_exact: int, cheap: str,
             score: float | None) -> str:
    exact = (f"; distances to the exact posterior from {settings.truth_members} draws for each of "
             f"{num_exact} fields")
    return (f"{num_fields} {split} fields, {settings.members} members each{exact if num_exact else ''}. One "
            "model serves every observation, the cheap ensembles are fitted to each. Its energy score is "
            f"{in_words(score)} times that of the best of them ({cheap}), mean over the partial "
            "observations.")


def pool(scores: dict[str, dict[str, Scores]], cases: list[str], other: str, num_bootstrap: int, seed: int,
         groups: Tensor) -> dict[str, Any]:
    """Score of the prior over that of `other`, mean over cases, so that none weighs more because its numbers
    are larger."""
    out = {}
    for name in POOLED:
        parts = [scores[case][model][name].flatten(1).mean(1) for model in ("corrector", other)
                 for case in cases]
        out[name] = entry(bootstrap(torch.stack(parts, 1), lambda mean: halves(mean).mean(1), num_bootstrap,
                                    seed, groups))
    return out


def pool_spread(scores: list[Scores], num_bootstrap: int, seed: int, groups: Tensor) -> dict[str, Any]:
    """Spread/skill, mean over cases."""
    members = scores[0]["ranks"].shape[2] - 1
    parts = [part[key].flatten(1).mean(1) for key in ("variance", "squared_error") for part in scores]
    return entry(bootstrap(torch.stack(parts, 1),
                           lambda mean: ((members + 1) / members * halves(mean)).sqrt().mean(1),
                           num_bootstrap, seed, groups))


def summarise_exact(rows: list[dict[str, float]], splits: Tensor, num_bootstrap: int,
                    seed: int) -> dict[str, Any]:
    """Moments of `ups.evaluation.posterior.judge`, one entry per field, as figures with intervals over
    fields; floor: the distance that exact draws stay below 95 times of 100."""
    out: dict[str, Any] = {"fields": len(rows), "floor": float(torch.quantile(splits, 0.95))}
    values = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
    out["distance"] = entry(bootstrap(*plain_mean(values["distance"][:, None]), num_bootstrap, seed))
    for key in ("trace", "log_trace", "leading"):
        both = torch.stack([values[key], values[f"{key}_exact"]], 1)
        out[key] = entry(bootstrap(both, lambda mean: halves(mean)[:, 0], num_bootstrap, seed))
    return out
