"""Scores of single steps of a corrected task, from windows all along the trajectories, and checks of the
networks that sample them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ups.evaluation.checks import ranks_of_data, response
from ups.evaluation.ensemble import CHEAP, Ensembles, Windows, one_step
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import (
    Scores,
    bootstrap,
    bootstrap_pairs,
    distance_matrix,
    entry,
    exchange_floor,
    pairing,
)

STARTS = (0, 1, 4, 16)  # first frames of the bins of `by_start`
PAIRED = 4  # members in an energy distance
STUDENTS = {"student_1": "one evaluation", "student_2": "two evaluations"}
KEPT = (  # of the scores of one step
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
)
KEPT_BY_START = ("crps", "ssr", "coverage_90", "outlier_fraction")


def assess_one_step(
    ensembles: Ensembles, count: int, num_members: int, num_bootstrap: int, num_exact: int
) -> dict[str, Any]:
    """{"models": scores of single calls from windows all along the trajectories, "checks": those that need
    the same noise twice}.

    Fields are scored against the data; CRPS and errors of means against `num_exact` exact samples if the law
    is known. Energy distances and the pairing of student and teacher are computed in latents: they compare
    distributions, and the codec's error is in neither.
    """
    source, truth, seed = ensembles.residuals, ensembles.truth, ensembles.seed
    windows = one_step(ensembles, count, num_members, ensembles.names, num_exact=num_exact)
    groups = truth.cache.trajectory[truth.cache.split[truth.split][windows.rows]]
    field_ref = windows.u_ref.cpu()
    compare = partial(compare_ensembles, num_bootstrap=num_bootstrap, seed=seed)

    def score_fields(u: Tensor) -> Scores:
        law = None if windows.law is None else windows.law[: len(u)].cpu()
        return score_ensemble(u.cpu(), field_ref[: len(u)], truth.task.boundary, exact=law)

    def score(members: Tensor) -> Scores:
        return score_fields(source.decode(members))

    def summarise(rows: Scores, which: Tensor, kept: Sequence[str]) -> dict[str, Any]:
        part = {key: value[which] for key, value in rows.items()}
        summary = summarise_ensemble(part, num_bootstrap, seed, groups[which])
        return {key: summary[key] for key in kept}

    # ---- scores, over all windows and by first frame
    scores = {model: score(members) for model, members in windows.samples.items()}
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

    # ---- students and their teacher
    checks = check_latents(ensembles, windows, models, num_bootstrap, groups)
    checks["less_than_teacher"] = {
        name: compare(scores[name], scores["corrector"], groups=groups)["ssr_less"]
        for name in STUDENTS
        if name in scores
    }

    # ---- the corrector's sampler, on the first of the same windows
    few = max(2, count // 16)
    fine = score(one_step(ensembles, few, num_members, ["corrector"], 64).samples["corrector"])
    coarse = {key: value[:few] for key, value in scores["corrector"].items()}
    checks["ssr_less_64_steps"] = compare(coarse, fine, groups=groups[:few])["ssr_less"]
    checks["ssr_of_64_steps"] = summarise(fine, torch.arange(few), ("ssr",))["ssr"]

    # ---- response to the conditions of other windows
    some = max(2, count // 4)
    trained = [name for name in ensembles.names if name not in CHEAP]
    others = one_step(ensembles, some, num_members, trained, is_shuffled=True).samples
    pairs = {name: (windows.samples[name][:some].cpu(), members.cpu()) for name, members in others.items()}
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

    # ---- the exact law
    if windows.law is not None:
        checks["ranks_of_data"] = ranks_of_data(
            field_ref, windows.law.cpu(), truth.task.boundary, num_bootstrap, seed, groups
        )
        checks["crps_over_exact"] = {
            name: compare(scores[name], scores["exact"], groups=groups)["crps"] for name in trained
        }
    return {"models": models, "checks": checks}


def bins_of(starts: Tensor) -> list[tuple[dict[str, int], Tensor]]:
    """({first, last, windows}, positions) of each bin of STARTS that has windows."""
    out, last = [], int(starts.max())
    for first, end in zip(STARTS, (*STARTS[1:], last + 1), strict=True):
        which = ((first <= starts) & (starts < end)).nonzero()[:, 0]
        if len(which):
            out.append(({"first": first, "last": min(end - 1, last), "windows": len(which)}, which))
    return out


def check_latents(
    ensembles: Ensembles, windows: Windows, models: dict[str, dict], num_bootstrap: int, groups: Tensor
) -> dict[str, Any]:
    """Checks in latents; energy distances of draws from the truth are added to `models`.

    energy_distance_floor: a distance by chance. energy_distance_excess: distance of each student less 1.1
    times the corrector's. pairing: how closely students and `scoring` follow the corrector on the same noise.
    """
    seed = ensembles.seed
    unit = ensembles.head.marginal_std.square().mean().sqrt().cpu() * windows.truth[0].numel() ** 0.5
    truth = windows.truth.cpu().flatten(1) / unit
    flat = {name: members.cpu().flatten(2) / unit for name, members in windows.samples.items()}
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
            for name in (*STUDENTS, "scoring")
            if name in flat
        },
    }
