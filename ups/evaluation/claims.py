"""The claims on ensembles and priors, one row each: the figure, its bounds, and the fakes that it refuses.

A figure is None if the claim does not apply, such as one relative to exact samples if no law is known.
Bounds: inside, (above, below), either of which may be None, and near (see ups/evaluation/gates.py). They are
wide enough for the networks of a small run: for exact samples of burgers1d_forced, 100 trajectories, a figure
has an interval of +-0.03 about 1, and fakes are outside by several times that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ups.common.stages import STAGES, TRANSIENT

Interval = dict[str, float | None]
Figure = Callable[[dict[str, Any], str], Interval | None]  # of an entry and a model
Bounds = tuple[float | None, float | None]

EVALUATIONS = {name: num for stage in STAGES.values() for name, num in stage.samplers.items()}
NOT_WORSE = 1.05  # score over that of the best cheap ensemble, which may be the exact law
# inside, near, in decades: twice the energy in an octave is near enough, ten times is refused
SPECTRUM = (None, 1.0), (0.0, 0.3)
# inside, near: exact samples have up to 0.01, or 0.05 if the truth is a single trajectory; permuted ones -0.2
# in a medium whose waves are elsewhere one frame later and -0.8 in slow flow
AUTOCORRELATION = (-0.5, 0.5), (-0.08, 0.08)
RATIO = (0.85, 1.18)  # near, of figures that are 1 for exact samples: a spread inflated by 1.2 is outside


@dataclass(frozen=True)
class Claim:
    """One row. words: names the figure, with {model} and {cheap}. inside, near: bounds, or a function of
    settings and model. stages: that the claim is about. always: also without evaluate.quality. of_task: one
    gate for all models."""

    name: str
    refuses: str
    words: str
    figure: Figure
    inside: Bounds | Callable[[Any, str], Bounds]
    near: Bounds | Callable[[Any, str], Bounds] | None = None
    stages: Sequence[str] = TRANSIENT
    always: bool = False
    of_task: bool = False

    def applies(self, stage: str, settings: Any) -> bool:
        return stage in self.stages and (self.always or settings.quality)

    def bounds(self, settings: Any, model: str) -> dict[str, Any]:
        """Arguments of `gates.gate`."""
        inside, near = (
            bounds(settings, model) if callable(bounds) else bounds for bounds in (self.inside, self.near)
        )
        return {"above": inside[0], "below": inside[1], "near": near and tuple(near)}


def point(value: float | None) -> Interval:
    """A count or a figure without an interval, as an interval."""
    return {"value": value, "low": value, "high": value}


def at(lists: dict[str, list], index: int) -> Interval:
    """One entry of an interval of lists."""
    return {end: lists[end][index] for end in ("value", "low", "high")}


def worst(found: dict[str, list], centre: float | None = None) -> Interval:
    """The entry of an interval of lists with the largest upper end, or farthest from `centre`; undefined if
    any entry is."""
    if None in found["high"]:
        return point(None)
    away = found["high"] if centre is None else [abs(value - centre) for value in found["value"]]
    return at(found, max(range(len(away)), key=away.__getitem__))


def of_model(key: str) -> Figure:
    """A figure of the model's rollouts, None if missing."""
    return lambda entry, model: entry["models"][model].get(key)


def has_law(entry: dict[str, Any]) -> bool:
    return "exact" in entry["models"]


def versus(entry: dict[str, Any], model: str, other: str, key: str) -> Any:
    """A paired ratio, None if the two are not compared by it."""
    return entry["comparisons"].get(f"{model} / {other}", {}).get(key)


def broken(entry: dict[str, Any], model: str) -> Interval:
    row = entry["models"][model]
    return point(max(part["nonfinite_trajectories"] for part in (row, row["one_step"])))


def worst_lead(entry: dict[str, Any], model: str) -> Interval | None:
    leads = versus(entry, model, "exact", "crps_by_lead")
    return leads and worst(leads)


def tails(entry: dict[str, Any], model: str) -> Interval | None:
    """Coverage of 90 %; None for fewer than 10 members, which cannot have it."""
    return entry["models"][model]["coverage_90"] if entry["members"] >= 10 else None


def rank_of_data(entry: dict[str, Any], _: str) -> Interval | None:
    ranks = entry["checks"].get("ranks_of_data")
    return ranks and worst(ranks, 0.5)


def operations(entry: dict[str, Any], model: str) -> Interval | None:
    """Operations per evaluation that the model claims, over those of the corrector: 1 for a network of the
    same size. Those of the conditional Gaussian, which both call, are subtracted."""
    models = entry["models"]
    if "corrector" not in models:
        return None
    costs = [models[name]["operations_per_state"] for name in (model, "corrector", "dressed_conditional")]
    draw, teacher = (cost - costs[2] for cost in costs[:2])
    evaluations = models["corrector"]["evaluations_per_state"] / EVALUATIONS[model]
    return point(evaluations * draw / teacher if teacher > 0 else None)


CALIBRATED = ((0.5, 2.0), RATIO)  # inside, near, of a ratio that is 1 for exact samples

ENSEMBLE = (
    Claim(
        "finite",
        "a diverged network",
        "the number of trajectories of {model} with NaN or inf",
        broken,
        (None, 1.0),
        always=True,
    ),
    Claim(
        "score",
        "the conditional Gaussian or the mean in place of samples, the teacher's head alone",
        "fair CRPS of {model} over that of the best cheap ensemble ({cheap})",
        lambda entry, model: None if has_law(entry) else versus(entry, model, entry["best_cheap"], "crps"),
        lambda settings, _: (None, settings.max_crps_ratio),
    ),
    Claim(
        "score",
        "the same, where a cheap ensemble may be the exact law, which none beats",
        "fair CRPS of {model} over that of the best cheap ensemble ({cheap})",
        lambda entry, model: versus(entry, model, entry["best_cheap"], "crps") if has_law(entry) else None,
        lambda settings, _: (None, NOT_WORSE * settings.max_crps_ratio),
    ),
    Claim(
        "exact",
        "an ensemble twice too wide, one guess, one that does not look at its state",
        "fair CRPS of {model} over that of exact draws, at its worst lead,",
        worst_lead,
        lambda settings, _: (None, settings.max_exact_ratio),
    ),
    Claim(
        "trajectories",
        "members of the right marginals without structure in space or time",
        "energy score of whole trajectories of {model} over that of exact draws, or else of the best cheap "
        "ensemble ({cheap}),",
        lambda entry, model: versus(
            entry, model, "exact" if has_law(entry) else entry["best_cheap"], "trajectory_score"
        ),
        (None, NOT_WORSE),
    ),
    Claim(
        "spread",
        "one guess, spread inflated by 1.3 or 0.7, the truth in every member",
        "spread of {model} over its error, in rollouts,",
        of_model("ssr"),
        (0.5, 2.0),
        lambda settings, _: settings.spread_skill,
    ),
    Claim(
        "coverage_50",
        "a spread that is right in the mean and wrong in most places, inflated spread",
        "share of truths in the central 50 % interval of {model}",
        of_model("coverage_50"),
        (0.3, 0.7),
        (0.42, 0.58),
    ),
    Claim(
        "coverage_90",
        "tails that are too short or too long",
        "share of truths in the central 90 % interval of {model}",
        tails,
        (0.75, 0.99),
        (0.84, 0.96),
    ),
    Claim(
        "variogram_space",
        "white noise, members cut into blocks and reshuffled",
        "distance of variograms in space from the truth to members of {model} over that between members",
        of_model("variogram_space"),
        (0.5, 2.0),
        (0.7, 1.3),
    ),
    Claim(
        "autocorrelation",
        "members permuted at every lead",
        "correlation of deviations at successive leads, of members of {model} minus that of the truth,",
        of_model("autocorrelation"),
        *AUTOCORRELATION,
    ),
    Claim(
        "spectrum",
        "white noise: energy in waves where the residual has none",
        "decades between the energy that members of {model} and the truth add to the operator's, in the "
        "worst octave,",
        of_model("spectrum"),
        *SPECTRUM,
    ),
    Claim(
        "nearest",
        "the truth leaked into one member",
        "distance of the truth to the nearest member of {model} over that of members to their nearest",
        of_model("nearest"),
        *CALIBRATED,
    ),
    Claim(
        "independence",
        "antithetic members, members inflated around their mean: fair scores reward both",
        "variance of the ensemble mean of {model} over that of independent members",
        of_model("independence"),
        (0.4, None),
        (RATIO[0], math.inf),
    ),
    Claim(
        "condition",
        "a student blind to its condition, or given the mean of the batch",
        "response of {model} to another condition over that of the corrector",
        lambda entry, model: entry["checks"]["response"].get(model),
        (0.5, 1.5),
        stages=("consistency",),
    ),
    Claim(
        "teacher",
        "a student that learnt nothing",
        "fair CRPS of {model} over that of the corrector",
        lambda entry, model: versus(entry, model, "corrector", "crps"),
        lambda settings, _: (None, settings.max_student_ratio),
        stages=("consistency",),
    ),
    Claim(
        "evaluations",
        "the teacher, or a copy of it, in the student's place",
        "evaluations of {model} per state",
        lambda entry, model: point(entry["models"][model]["evaluations_per_state"]),
        lambda _, model: (None, EVALUATIONS[model] + 0.5),
        stages=("consistency", "rival"),
        always=True,
    ),
    Claim(
        "operations",
        "a copy of the teacher that is no module of a known class",
        "floating-point operations of an evaluation of {model} over those of the corrector",
        operations,
        (None, 1.5),
        stages=("consistency", "rival"),
        always=True,
    ),
    Claim(
        "law/{task}",
        "draws of another spread in the place of exact ones",
        "spread of exact draws over the data's error about their mean",
        lambda entry, _: entry["checks"].get("ssr_of_law"),
        (0.5, 2.0),
        lambda settings, _: settings.spread_of_law,
        stages=("diffusion",),
        of_task=True,
    ),
    Claim(
        "law_ranks/{task}",
        "draws of another noise or viscosity in the place of exact ones",
        "rank of the data among exact draws one step ahead, in the octave of waves where it is worst,",
        rank_of_data,
        (0.3, 0.7),
        (0.45, 0.55),
        stages=("diffusion",),
        of_task=True,
    ),
)


def num_broken(entry: dict[str, Any], _: str) -> Interval:
    return point(sum(models["corrector"]["nonfinite_trajectories"] for models in entry["cases"].values()))


def of_prior(key: str) -> Figure:
    """A figure of the prior, mean over the partial observations; None if missing."""
    return lambda entry, _: entry["checks"].get(key)


PRIOR = (
    Claim(
        "finite",
        "a diverged network",
        "the number of fields with NaN or inf",
        num_broken,
        (None, 1.0),
        stages=("steady",),
        always=True,
    ),
    Claim(
        "score",
        "the conditional Gaussian or the mean in place of samples",
        "energy score of the prior over that of the best cheap ensemble ({cheap}), mean over the partial "
        "observations,",
        lambda entry, _: versus(entry, "corrector", entry["best_cheap"], "energy_score"),
        lambda settings, _: (None, NOT_WORSE * settings.max_crps_ratio),
        stages=("steady",),
    ),
    Claim(
        "observed",
        "draws that do not look at what was observed",
        "energy score of the prior over that of solutions drawn whatever was observed, mean over the "
        "partial observations,",
        lambda entry, _: versus(entry, "corrector", "unconditional", "energy_score"),
        lambda settings, _: (None, settings.max_crps_ratio),
        stages=("steady",),
    ),
    Claim(
        "spread",
        "one guess, spread inflated by 1.3, the truth in every member",
        "spread of the prior over its error, mean over the partial observations,",
        lambda entry, _: entry["ssr"],
        (0.5, 2.0),
        lambda settings, _: settings.spread_skill,
        stages=("steady",),
    ),
    Claim(
        "coverage_50",
        "a spread that is right in the mean and wrong in most places",
        "share of truths in the central 50 % interval of the prior",
        of_prior("coverage_50"),
        (0.3, 0.7),
        (0.42, 0.58),
        stages=("steady",),
    ),
    Claim(
        "variogram_space",
        "white noise, draws cut into blocks and reshuffled",
        "distance of variograms from the truth to draws of the prior over that between draws",
        of_prior("variogram_space"),
        (0.5, 2.0),
        (0.7, 1.3),
        stages=("steady",),
    ),
    Claim(
        "spectrum",
        "white noise: energy in waves where the solution has none",
        "decades between the energy that draws of the prior and the truth add to the operator's, in the "
        "worst octave,",
        of_prior("spectrum"),
        *SPECTRUM,
        stages=("steady",),
    ),
    Claim(
        "nearest",
        "the truth leaked into one draw",
        "distance of the truth to the nearest draw of the prior over that of draws to their nearest",
        of_prior("nearest"),
        *CALIBRATED,
        stages=("steady",),
    ),
    Claim(
        "variance",
        "spread inflated by 1.3",
        "variance of log u of the prior over that of exact draws, mean over the partial observations,",
        of_prior("variance"),
        (0.5, 2.0),
        (0.8, 1.25),
        stages=("steady",),
    ),
    Claim(
        "independence",
        "draws that depend on each other",
        "variance of the mean of draws of the prior over that of independent ones",
        of_prior("independence"),
        (0.4, None),
        (RATIO[0], math.inf),
        stages=("steady",),
    ),
)
