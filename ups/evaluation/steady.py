"""Scores of a steady prior: ensembles conditioned on part of the coefficient, compared with cheap ones and,
if the task has it, with the exact posterior.

    linear_posterior     samples of the coefficient from its linear posterior, through the operator
    dressed, ...         the operator's solution for the best guess + errors fitted to each case
    unconditional        solutions of reserved fields: an ensemble without any observation
"""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ups.common.progress import note
from ups.config.schema import EvaluateConfig
from ups.data.generate import solver_of
from ups.evaluation.ensemble import resampled
from ups.evaluation.truth import Truth
from ups.generative.corrector import Corrector
from ups.generative.observation import CASES, PARTIAL, Observation, as_linear, observe_case, row_generators
from ups.generative.residuals import LOG_FLOOR, SteadyResiduals
from ups.generative.sampling import FieldPrediction, Sampler, predict_with_noise, sample_fields
from ups.metrics.calibration import coverage
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples, Scores, halves, plain_mean
from ups.metrics.joint import decades, score_structure
from ups.metrics.proper import energy_distance, mean_distance
from ups.results import OBSERVED, Entry
from ups_discovery.seeds import generator

BANK = 256  # reserved fields per case to which cheap ensembles are fitted
PRIORS = {
    "dressed": "dressed",
    "resampled": "dressed_resampled",
    "gaussian": "dressed_conditional",
    "pushed": "linear_posterior",
    "blind": "unconditional",
    "prior": "corrector",
}
SERVES = {  # the sampler that validation selected
    "pushed": "The prior is the linear posterior of the coefficient through the operator: its diffusion was "
    "no better on validation.",
    "diffusion": "The prior is its diffusion: nothing simpler was as good on validation.",
}


@torch.no_grad()
def assess_steady(
    residuals: SteadyResiduals, prior: Corrector, truth: Truth, settings: EvaluateConfig, seed: int
) -> tuple[Entry, dict[str, Any]]:
    """The task's entry, and the sample for the report."""
    cache, task, device = truth.cache, truth.task, residuals.device
    places = truth.one_of_each(settings.ensemble_trajectories)
    rows, numbers = cache.split[truth.split][places], places.tolist()
    u_ref, parameters, groups = truth.frames(rows, 0, 1), cache.parameters[rows], cache.trajectory[rows]
    resamples = Resamples(settings.num_bootstrap, seed, groups)
    v = residuals.head.input_codec.normalise(truth.inputs(rows).to(device))[:, 0]
    few = numbers[: settings.truth_fields]
    of_fields = Resamples(settings.num_bootstrap, seed)
    entry = Entry(task.name, "steady")
    entry.add(
        "",
        {
            "members": settings.members,
            "num_trajectories": len(places),
            "num_initial_conditions": len(groups.unique()),
        },
    )

    # ---- every observation
    scores, served, plotted = {}, {}, {}  # served: case -> model whose samples the prior has
    of_prior, against = [], []  # of the partial observations
    for case in CASES:
        note(f"{task.name}: prior, observed {case}")
        sampled = ObservedPrior(prior, residuals, case, seed)
        observation, draws, guess, serves = sampled.draws(v, parameters, numbers, settings.members)
        members = {"operator": residuals.solution(guess, torch.zeros_like(guess))[:, None]}
        members |= {PRIORS[kind]: u for kind, u in draws.items()}
        found = {model: score_ensemble(u.cpu()[:, :, None], u_ref) for model, u in members.items()}
        served[case] = PRIORS[serves]
        ours = members[served[case]].cpu()
        scores[case] = found | {"corrector": found[served[case]]}
        if case in PARTIAL:
            of_prior.append(
                scores[case]["corrector"]
                | score_structure(ours[:, :, None], u_ref, task.boundary, members["operator"].cpu())
            )
        for model, part in scores[case].items():
            entry.add(model, summarise_ensemble(part, resamples), f"{OBSERVED}{case}")
        if task.has_known_law and case in PARTIAL:
            some = slice(len(few))
            exact = sampled.compare_exactly(v[some], parameters[some], few, settings.truth_members)
            for kind, model in PRIORS.items():
                entry.add(model, summarise_exact(exact[kind], of_fields), f"{OBSERVED}{case}")
            against.append(exact["prior"])
        observed = torch.where(observation.mask[0, 0] > 0, observation.values[0, 0], torch.nan)
        plotted[case] = {
            "observed": observed.cpu().numpy(),
            "u_ref": u_ref[0, 0].numpy(),
            "members": ours[0].numpy(),
        }

    # ---- mean over the partial observations
    method = prior.heads[task.name].method
    same = served[PARTIAL[0]] if served[PARTIAL[0]] != "corrector" else None  # no comparison with itself
    others = [other for other in ("operator", *PRIORS.values()) if other not in ("corrector", same)]
    for other in others:
        entry.add(f"corrector / {other}", {"energy_score": pool(scores, PARTIAL, other, resamples)})
    entry.add("", pool_checks(of_prior, against, resamples))

    # ---- words
    scored = {other: entry.number(f"corrector / {other}", "energy_score") for other in others}
    cheap = max(others, key=lambda other: -1.0 if scored[other] is None else scored[other])
    words = (
        f"{len(places)} {truth.split} fields, {settings.members} members each. {SERVES[method]} Errors that "
        "dress the operator's solution are fitted to each observation. In the mean over the partial "
        f"observations the best cheap ensemble is {cheap}."
    )
    entry.facts |= {"split": truth.split, "best_cheap": cheap, "words": [words]}
    return entry, {**cache.scene(), "cases": plotted, "label": f"{truth.split} field {numbers[0]}"}


# ---- samples, and their distance from the exact posterior


def case_bank(residuals: SteadyResiduals, case: str, seed: int) -> Tensor:
    """Residuals (<= BANK, *tokens, dim) of reserved fields observed as in a case, for cheap ensembles. Their
    size differs by orders of magnitude between cases, so one fit for all would be a straw man."""
    places = torch.arange(min(BANK, residuals.windows("reserved")[0]))
    z_in, z_ref, parameters = residuals.fields("reserved", places)
    v = residuals.head.input_codec.decode(z_in[:, 0])
    observation = observe_case(v, case, row_generators(seed, "bank", case, rows=places.tolist()))
    guess = residuals.guess(observation, parameters)
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
    """Samples of the solution (batch, M, C, *space), physical units, from noise (batch, M, *tokens, dim).

    predicted: by `residuals.predict`, with M samples. bank: `case_bank` of the same case. kind: prior (the
    one that serves), pushed (samples of the coefficient through the operator), gaussian (conditional mean and
    scale alone, B2), dressed (mean and spread of the bank, B1), resampled (residuals of the bank, B3), blind
    (reserved solutions, without observation).
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
            head = prior.heads[residuals.name]
            row = torch.arange(len(noise), device=noise.device).repeat_interleave(noise.shape[1])
            condition = head.condition(*predicted[1:3]).rows(row)
            return residuals.solution(guess, head.unwhiten(noise.flatten(0, 1), condition).view_as(noise))
        case "prior":
            return sample_fields(residuals, Sampler(prior).whitened, prior, predicted, noise)


class ObservedPrior:
    """A prior under one kind of observation, one of `CASES`."""

    def __init__(self, prior: Corrector, residuals: SteadyResiduals, case: str, seed: int):
        self.prior, self.residuals, self.case, self.seed = prior, residuals, case, seed
        self.bank = case_bank(residuals, case, seed)

    def draws(
        self, v: Tensor, parameters: Tensor, rows: list[int], num_members: int
    ) -> tuple[Observation, dict[str, Tensor], Tensor, str]:
        """(observation of coefficients v (n, C, *space), normalised; kind -> `posterior_draws`; the
        operator's solution for the best guess as log u (n, *tokens, dim); the kind whose samples the prior
        has, of which there are none of kind "prior" unless they are its own). rows: seeds of observations
        and noise."""
        prior, residuals, seed = self.prior, self.residuals, self.seed
        observation = observe_case(v, self.case, row_generators(seed, self.case, rows=rows))
        predicted, noise = predict_with_noise(residuals, observation, parameters, seed, rows, num_members)
        known = observation.facts == observation.facts.new_tensor([1.0, 0.0, 0.0])  # all cells, without noise
        is_pushed = prior.heads[residuals.name].method == "pushed" and not known.all(1).any()
        kinds = [kind for kind in PRIORS if not (is_pushed and kind == "prior")]
        draws = {kind: posterior_draws(prior, residuals, predicted, noise, kind, self.bank) for kind in kinds}
        return observation, draws, predicted[0], "pushed" if is_pushed else "prior"

    @torch.no_grad()
    def compare_exactly(
        self, v: Tensor, parameters: Tensor, rows: list[int], count: int
    ) -> dict[str, list[dict[str, float]]]:
        """Kind -> `moments_against` of each coefficient of v: `count` samples of each kind are compared with
        twice as many of the exact posterior. Needs Task.has_known_law and a partial observation."""
        codec, head = self.residuals.head.input_codec, self.residuals.head
        observation, draws, _, serves = self.draws(v, parameters, rows, count)
        out = {kind: [] for kind in draws}
        for index, row in enumerate(rows):
            source = generator(self.seed, "truth", self.case, row)
            linear = as_linear(observation, index, codec.mean.item(), codec.std.item())
            _, exact = solver_of(head.task).posterior(
                linear, 2 * count, source.initial_seed() % 2**31, float(parameters[index, 0])
            )
            for kind, u in draws.items():
                out[kind].append(moments_against(u[index, :, 0].cpu(), exact))
        return out | {"prior": out[serves]}


def total_variance(x: Tensor) -> Tensor:
    """Of samples (n, ...), summed over the other axes: a tenth of the time of x.var(0).sum()."""
    return (x - x.mean(0)).square().sum() / (len(x) - 1)


class ExactSamples(NamedTuple):
    """Of exact samples (N, ...), what they are compared by: flat (N, cells), float64, and its scale; the
    smallest value whose logarithm is taken; logs of flat; apart, the mean distance of flat / scale."""

    flat: Tensor
    scale: Tensor
    smallest: Tensor
    logs: Tensor
    apart: float


@lru_cache(maxsize=1)
def exact_samples(truth: Tensor) -> ExactSamples:
    """Computed once for all kinds of samples that are compared with these."""
    flat = truth.flatten(1).double()
    scale, smallest = total_variance(flat).sqrt(), LOG_FLOOR * flat.mean()
    logs = flat.clamp_min(smallest).log()
    return ExactSamples(flat, scale, smallest, logs, mean_distance(flat / scale))


def moments_against(draws: Tensor, truth: Tensor) -> dict[str, float]:
    """Moments of samples (M, ...) and of N exact ones, both positive, to be averaged over fields.

    distance: unbiased energy distance, in units of the exact spread. Pairs (samples, exact): log_trace, the
    total variance of log u, whose tails a hundred samples cover; mean_error, squared error of the mean of log
    u less that of the exact samples' mean, and that of independent samples.
    """
    flat, exact = draws.flatten(1).double(), exact_samples(truth)
    logs = flat.clamp_min(exact.smallest).log()
    variance, variance_exact = total_variance(logs), total_variance(exact.logs)
    squared_error = (logs.mean(0) - exact.logs.mean(0)).square().sum()
    return {
        "distance": energy_distance(flat / exact.scale, exact.flat / exact.scale, exact.apart),
        "log_trace": float(variance),
        "log_trace_exact": float(variance_exact),
        "mean_error": float(squared_error - variance_exact / len(exact.logs)),
        "mean_error_exact": float(variance / len(flat)),
    }


# ---- means over kinds of observation


def pool(
    scores: dict[str, dict[str, Scores]], cases: list[str], other: str, resamples: Resamples
) -> dict[str, Any]:
    """Energy score of the prior over that of `other`, mean over cases: ratios first, so that all cases weigh
    the same."""
    parts = [
        scores[case][model]["energy_score"].flatten(1).mean(1)
        for model in ("corrector", other)
        for case in cases
    ]
    return resamples.interval(torch.stack(parts, 1), lambda mean: halves(mean).mean(1))


def pool_checks(
    scores: list[Scores], against: list[list[dict[str, float]]], resamples: Resamples
) -> dict[str, Any]:
    """Calibration of a prior, mean over cases: spread/skill, coverage, structure, and if the exact posterior
    is known (against: `moments_against` of every case and field) variance and independence."""

    def ratio(pairs: list[tuple[Tensor, Tensor]], resamples: Resamples) -> dict[str, Any]:
        both = torch.stack([part for side in zip(*pairs, strict=True) for part in side], 1)
        return resamples.interval(both, lambda mean: halves(mean).mean(1))

    members = scores[0]["ranks"].shape[2] - 1
    parts = [part[key].flatten(1).mean(1) for key in ("variance", "squared_error") for part in scores]
    out = {
        "ssr": resamples.interval(
            torch.stack(parts, 1), lambda mean: ((members + 1) / members * halves(mean)).sqrt().mean(1)
        )
    }
    # (n, 2) of every case, mean over leads
    out["nearest"] = ratio([part["nearest"].mean(2).unbind(1) for part in scores], resamples)
    energies, gaps = zip(*(decades(part["energy"]) for part in scores), strict=True)

    def gap(mean: Tensor) -> Tensor:
        parts = zip(gaps, mean.chunk(len(gaps), 1), strict=True)
        return torch.stack([of_case(part) for of_case, part in parts]).mean(0)

    out["spectrum"] = resamples.interval(torch.cat(energies, 1), gap)
    ranks = torch.stack([part["ranks"].sum(1) for part in scores], 1).sum(1)
    out["coverage_50"] = resamples.interval(ranks, partial(coverage, level=0.5))
    for name, key in (("variance", "log_trace"), ("independence", "mean_error")) if against else ():
        pairs = [
            tuple(
                torch.tensor([row[end] for row in rows], dtype=torch.float64) for end in (key, f"{key}_exact")
            )
            for rows in against
        ]
        out[name] = ratio(pairs, replace(resamples, groups=None))
    return out


def summarise_exact(rows: list[dict[str, float]], resamples: Resamples) -> dict[str, Any]:
    """Rows of `moments_against`, one per field, as figures with intervals over fields."""
    distance, *of_logs = (
        torch.tensor([row[key] for row in rows], dtype=torch.float64)
        for key in ("distance", "log_trace", "log_trace_exact")
    )
    return {
        "distance": resamples.interval(*plain_mean(distance[:, None])),
        "log_trace": resamples.interval(torch.stack(of_logs, 1), lambda mean: halves(mean)[:, 0]),
    }
