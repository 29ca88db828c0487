"""What the report says about a steady prior: ensembles given part of the coefficient, beside cheap ones, and
beside the exact posterior of a task that knows it.

    linear_posterior     draws of the coefficient from its linear posterior, through the operator
    dressed, ...         the operator's answer to the best guess + errors fitted to each kind of observation
    unconditional        solutions of reserved fields: what an ensemble can be that sees nothing
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.config import EvaluateConfig
from ups.evaluation.ensemble import resampled
from ups.evaluation.transient import in_words
from ups.evaluation.truth import Truth
from ups.generative.corrector import Corrector
from ups.generative.observation import CASES, PARTIAL, as_linear, observe_case, row_generators
from ups.generative.residuals import FLOOR, SteadyResiduals
from ups.generative.sampling import FieldPrediction, Sampler, predict_with_noise, sample_fields
from ups.metrics.ensembles import LEVELS, coverage, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Scores, bootstrap, entry, halves, plain_mean
from ups.metrics.joint import decades, score_joint
from ups.metrics.proper import energy_distance

BANK = 256  # reserved fields that cheap ensembles are fitted to, per case
SPLITS = 1000  # of exact draws in halves: how far apart these are by chance
PRIORS = {
    "dressed": "dressed",
    "resampled": "dressed_resampled",
    "gaussian": "dressed_conditional",
    "pushed": "linear_posterior",
    "blind": "unconditional",
    "prior": "corrector",
}
POOLED = ("crps", "energy_score")
RATIOS = ("variogram_space", "nearest")
# what a prior is that serves by these
SAME = {"pushed": "linear_posterior", "gaussian": "dressed_conditional"}
SERVES = {  # what the prior's draws are made by, as validation chose it
    "pushed": "On validation nothing was better than the linear posterior of the coefficient through the "
    "operator, and the prior is that.",
    "error": "The prior is the linear posterior of the coefficient through the operator with the operator's "
    "own error: the diffusion was no better on validation and does not serve.",
    "gaussian": "The prior is its conditional mean and scale: nothing was better on validation.",
    "diffusion": "The prior is its diffusion: nothing simpler was as good on validation.",
}


@torch.no_grad()
def assess_steady(
    residuals: SteadyResiduals, prior: Corrector, truth: Truth, settings: EvaluateConfig, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task's entry of results.json under "steady" (cases of observation) and the sample that the report
    draws."""
    cache, task, device, count = truth.cache, truth.task, residuals.device, settings.num_bootstrap
    places = truth.one_of_each(settings.ensemble_trajectories)
    rows, numbers = cache.split[truth.split][places], places.tolist()
    u_ref, parameters, groups = truth.frames(rows, 0, 1), cache.parameters[rows], cache.trajectory[rows]
    v = residuals.head.input_codec.normalise(truth.inputs(rows).to(device))[:, 0]
    few = numbers[: settings.truth_fields]
    cases, scores, shown, chance, against = {}, {}, {}, {}, []
    for case in CASES:
        bank = case_bank(residuals, case, seed)
        observation = observe_case(v, case, row_generators(seed, case, rows=numbers))
        predicted, noise = predict_with_noise(
            residuals, observation, parameters, seed, numbers, settings.members
        )
        members = {
            "operator": residuals.solution(predicted[0], torch.zeros_like(predicted[0]))[:, None],
            **{
                model: posterior_draws(prior, residuals, predicted, noise, kind, bank)
                for kind, model in PRIORS.items()
            },
        }
        scores[case] = {
            model: score_ensemble(u.cpu()[:, :, None], u_ref, task.boundary) for model, u in members.items()
        }
        scores[case]["corrector"] |= score_joint(
            members["corrector"].cpu()[:, :, None], u_ref, task.boundary, members["operator"].cpu()
        )
        cases[case] = {
            model: summarise_ensemble(part, count, seed, groups) for model, part in scores[case].items()
        }
        if task.posterior and case in PARTIAL:
            exact, splits = judge_exactly(
                prior,
                residuals,
                case,
                v[: len(few)],
                parameters[: len(few)],
                few,
                seed,
                settings.truth_members,
                bank,
                PRIORS,
            )
            for kind, model in PRIORS.items():
                cases[case][model]["exact"] = summarise_exact(exact[kind], splits, count, seed)
            chance[case] = summarise_exact(exact["exact"], splits, count, seed)
            against.append(exact["prior"])
        seen = torch.where(observation.mask[0, 0] > 0, observation.values[0, 0], torch.nan)
        shown[case] = {
            "observed": seen.cpu().numpy(),
            "u_ref": u_ref[0, 0].numpy(),
            "members": members["corrector"][0].cpu().numpy(),
        }
    same = SAME.get(prior.heads[task.name].method)  # no comparison with itself
    pooled = {
        other: pool(scores, PARTIAL, other, count, seed, groups)
        for other in ("operator", *PRIORS.values())
        if other not in ("corrector", same)
    }
    known = {other: row["energy_score"]["value"] for other, row in pooled.items()}
    cheap = max(known, key=lambda other: -1.0 if known[other] is None else known[other])
    exact_words = (
        f"; distances to the exact posterior from {settings.truth_members} draws for each of "
        f"{len(few)} fields"
        if task.posterior
        else ""
    )
    words = (
        f"{len(places)} {truth.split} fields, {settings.members} members each{exact_words}. One model "
        "serves every observation; errors that dress the operator's answer are fitted to each. "
        f"{SERVES[prior.heads[task.name].method]} Its energy score is {in_words(known[cheap])} times that "
        f"of the best {'other ' if same else ''}cheap ensemble ({cheap}) and "
        f"{in_words(known['unconditional'])} times that of one that sees nothing, mean over the partial "
        "observations."
    )
    out = {
        "task": task.name,
        "members": settings.members,
        "split": truth.split,
        "num_trajectories": len(places),
        "num_initial_conditions": len(groups.unique()),
        "truth_members": settings.truth_members,
        "cases": cases,
        "best_cheap": cheap,
        "comparisons": {f"corrector / {other}": row for other, row in pooled.items()},
        "words": [words],
        "same_as": same,
        "chance": chance,
        "ssr": pool_spread([scores[case]["corrector"] for case in PARTIAL], count, seed, groups),
        "checks": pool_checks([scores[case]["corrector"] for case in PARTIAL], against, count, seed, groups),
    }
    return out, {**cache.scene(), "cases": shown, "label": f"{truth.split} field {numbers[0]}"}


def pool(
    scores: dict[str, dict[str, Scores]],
    cases: list[str],
    other: str,
    num_bootstrap: int,
    seed: int,
    groups: Tensor,
) -> dict[str, Any]:
    """Score of the prior over that of `other`, mean over cases, so that none weighs more because its numbers
    are larger."""
    parts = {
        name: [
            scores[case][model][name].flatten(1).mean(1) for model in ("corrector", other) for case in cases
        ]
        for name in POOLED
    }
    return {
        name: entry(
            bootstrap(torch.stack(part, 1), lambda mean: halves(mean).mean(1), num_bootstrap, seed, groups)
        )
        for name, part in parts.items()
    }


def pool_spread(scores: list[Scores], num_bootstrap: int, seed: int, groups: Tensor) -> dict[str, Any]:
    """Spread/skill, mean over cases."""
    members = scores[0]["ranks"].shape[2] - 1
    parts = [part[key].flatten(1).mean(1) for key in ("variance", "squared_error") for part in scores]
    return entry(
        bootstrap(
            torch.stack(parts, 1),
            lambda mean: ((members + 1) / members * halves(mean)).sqrt().mean(1),
            num_bootstrap,
            seed,
            groups,
        )
    )


def pool_checks(
    scores: list[Scores], against: list[list[dict[str, float]]], num_bootstrap: int, seed: int, groups: Tensor
) -> dict[str, Any]:
    """What a prior has of exact draws, mean over cases: coverage, structure, and where the exact posterior is
    known (against: `judge` of every case and field) variance and independence of draws."""

    def ratio(pairs: list[tuple[Tensor, Tensor]], which: Tensor | None) -> dict[str, Any]:
        both = torch.stack([part for side in zip(*pairs, strict=True) for part in side], 1)
        return entry(bootstrap(both, lambda mean: halves(mean).mean(1), num_bootstrap, seed, which))

    out = {
        name: ratio(
            [
                tuple(part[name].flatten(2).mean(2).unbind(1))
                if part[name].ndim > 2
                else tuple(part[name].unbind(1))
                for part in scores
            ],
            groups,
        )
        for name in RATIOS
    }
    energies, gaps = zip(*(decades(part["energy"]) for part in scores), strict=True)
    out["spectrum"] = entry(
        bootstrap(
            torch.cat(energies, 1),
            lambda mean: torch.stack(
                [gap(part) for gap, part in zip(gaps, mean.chunk(len(gaps), 1), strict=True)]
            ).mean(0),
            num_bootstrap,
            seed,
            groups,
        )
    )
    ranks = torch.stack([part["ranks"].sum(1) for part in scores], 1)
    out |= {
        f"coverage_{100 * level:.0f}": entry(
            bootstrap(
                ranks.sum(1), lambda mean, level=level: coverage(mean, level), num_bootstrap, seed, groups
            )
        )
        for level in LEVELS
    }
    for name, key in (("variance", "log_trace"), ("independence", "mean_error")):
        if against:
            out[name] = ratio(
                [
                    tuple(
                        torch.tensor([row[end] for row in rows], dtype=torch.float64)
                        for end in (key, f"{key}_exact")
                    )
                    for rows in against
                ],
                None,
            )
    return out


def summarise_exact(
    rows: list[dict[str, float]], splits: Tensor, num_bootstrap: int, seed: int
) -> dict[str, Any]:
    """Moments of `judge`, one entry per field, as figures with intervals over
    fields; floor: the distance that exact draws stay below 95 times of 100."""
    values = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
    moments = {
        "distance": plain_mean(values["distance"][:, None]),
        **{
            key: (torch.stack([values[key], values[f"{key}_exact"]], 1), lambda mean: halves(mean)[:, 0])
            for key in ("trace", "log_trace", "leading")
        },
    }
    return {
        "fields": len(rows),
        "floor": float(torch.quantile(splits, 0.95)),
        **{key: entry(bootstrap(*part, num_bootstrap, seed)) for key, part in moments.items()},
    }


# ---- draws, and what they are judged by


def case_bank(residuals: SteadyResiduals, case: str, seed: int) -> Tensor:
    """Residuals of reserved fields under the observations of a case, (<= BANK, *tokens, dim): what cheap
    ensembles are fitted to.

    Per case, for the residual's size differs by orders between them: one spread for all would be a straw man
    in every one.
    """
    places = torch.arange(min(BANK, residuals.windows("reserved")[0]))
    z_in, z_ref, parameters = residuals.fields("reserved", places)
    v = residuals.head.input_codec.decode(z_in[:, 0])
    guess, *_ = residuals.predict(
        observe_case(v, case, row_generators(seed, "bank", case, rows=places.tolist())), parameters
    )
    return residuals.logarithm(residuals.head.physical(z_ref[:, 0])) - guess


@torch.no_grad()
def posterior_draws(
    prior: Corrector,
    residuals: SteadyResiduals,
    predicted: FieldPrediction,
    noise: Tensor,
    kind: str,
    bank: Tensor,
) -> Tensor:
    """Draws of the solution (batch, M, C, *space), physical units, from noise (batch, M, *tokens, dim).

    predicted: of `residuals.predict`, with M draws. kind: prior (as it serves), pushed (draws of the
    coefficient through the operator); gaussian (the prior's conditional mean and scale alone, B2); dressed
    (mean and spread of `bank`, B1) or resampled (a residual of `bank`, whole, B3), bank being `case_bank` of
    the same case; blind (a reserved solution, whatever was seen).
    """
    guess, start = predicted[0][:, None], predicted[3]
    which = noise.flatten(2)[..., 0]
    match kind:
        case "dressed":
            return residuals.solution(guess, bank.mean(0) + bank.std(0) * noise)
        case "resampled":
            return residuals.solution(guess, resampled(bank, which))
        case "blind":
            _, z, _ = residuals.fields("reserved", torch.arange(len(bank)))
            return resampled(residuals.head.physical(z[:, 0]), which)
        case "pushed":
            return residuals.solution(guess, start.offset.view_as(noise))
        case "gaussian":
            return sample_fields(residuals, lambda condition, some: some, prior, predicted, noise)
        case "prior":
            return sample_fields(residuals, Sampler(prior, 0).whitened, prior, predicted, noise)


def judge(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Draws (M, ...) against N exact ones, both positive: moments to be averaged over fields.

    distance: energy distance, without bias, in units of the exact spread. Pairs (of draws, exact): trace, the
    total variance; log_trace, that of log u, which has no tails that a hundred draws do not see; leading, the
    variance of log u along the leading pattern of one half of the exact draws, seen in the draws and in the
    other half; mean_error, squared error of the draws' mean of log u, and what independent draws have.
    """
    flat, exact = draws.flatten(1).double(), truth.flatten(1).double()
    scale, tiny = exact.var(0).sum().sqrt(), FLOOR * exact.mean()
    logs = [part.clamp_min(tiny).log() for part in (flat, exact)]
    first, second = logs[1].chunk(2)
    pattern = torch.linalg.svd(first - first.mean(0), full_matrices=False)[2][0]
    pairs = {
        "trace": (flat.var(0).sum(), exact.var(0).sum()),
        "log_trace": tuple(part.var(0).sum() for part in logs),
        "leading": tuple((part @ pattern).var() for part in (logs[0], second)),
        "mean_error": (
            (logs[0].mean(0) - logs[1].mean(0)).square().sum() - logs[1].var(0).sum() / len(exact),
            logs[0].var(0).sum() / len(flat),
        ),
    }
    return {
        "distance": energy_distance(flat / scale, exact / scale),
        **{
            name + end: float(value)
            for name, pair in pairs.items()
            for end, value in zip(("", "_exact"), pair, strict=True)
        },
    }


def split_distances(truth: Tensor, num_draws: int, seed: int) -> Tensor:
    """Energy distances of num_draws exact draws from the N that `judge` uses, as chance has it: (SPLITS,), of
    random halves of truth (N, ...). The variance of such a distance between equal laws goes as 1/a + 1/b,
    which halves are scaled by."""
    flat = truth.flatten(1).double()
    flat = flat / flat.var(0).sum().sqrt()
    half, count = len(flat) // 2, len(flat)
    away = torch.cdist(flat, flat)
    order = torch.rand(SPLITS, count, generator=generator(seed, "splits")).argsort(1)
    side = torch.zeros(SPLITS, count, dtype=torch.float64).scatter_(1, order[:, :half], 1.0)
    other = 1 - side
    within = sum(
        ((part @ away) * part).sum(1) / (size * (size - 1))
        for part, size in ((side, half), (other, count - half))
    )
    distance = 2 * ((side @ away) * other).sum(1) / (half * (count - half)) - within
    return distance * (1 / num_draws + 1 / count) / (1 / half + 1 / (count - half))


@torch.no_grad()
def judge_exactly(
    prior: Corrector,
    residuals: SteadyResiduals,
    case: str,
    v: Tensor,
    parameters: Tensor,
    rows: list[int],
    seed: int,
    count: int,
    bank: Tensor,
    kinds: Iterable[str],
) -> tuple[dict[str, list[dict[str, float]]], Tensor]:
    """`judge` of `count` draws of every kind against twice as many of the exact posterior: (kind -> one entry
    per coefficient v (n, C, *space), normalised, `split_distances` averaged over them). "exact": of one half
    of these against the other, which is what chance leaves.

    rows: numbers that name the coefficients in observations and noise. Only for a task whose posterior is
    known (Task.posterior) and a partial observation.
    """
    codec = residuals.head.input_codec
    observation = observe_case(v, case, row_generators(seed, case, rows=rows))
    predicted, noise = predict_with_noise(residuals, observation, parameters, seed, rows, count)
    draws = {kind: posterior_draws(prior, residuals, predicted, noise, kind, bank) for kind in kinds}
    out, splits = {kind: [] for kind in (*draws, "exact")}, []
    for index, row in enumerate(rows):
        source = generator(seed, "truth", case, row)
        linear = as_linear(observation, index, codec.mean.item(), codec.std.item())
        _, exact = residuals.head.task.posterior(
            linear, 2 * count, source.initial_seed() % 2**31, float(parameters[index, 0])
        )
        for kind, u in draws.items():
            out[kind].append(judge(u[index, :, 0].cpu(), exact))
        out["exact"].append(judge(*exact.chunk(2)))
        splits.append(split_distances(exact, count, seed + index))
    return out, torch.stack(splits).mean(0)
