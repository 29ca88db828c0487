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

from ups.common.place import STAGES, TRANSIENT
from ups.results import OBSERVED, Entry, Interval, Series

Figure = Callable[[Entry, str], Interval | None]  # of an entry and a model
Bounds = tuple[float | None, float | None]

EVALUATIONS = {name: num for stage in STAGES.values() for name, num in stage.samplers.items()}
TRAINED = {name for stage in STAGES.values() for name in stage.trained_samplers}
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
    stages: Sequence[str] = (*TRANSIENT, "steady")
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


def at(lists: Series, index: int) -> Interval:
    """The interval of one lead or element."""
    return {end: lists[end][index] for end in ("value", "low", "high")}


def worst(found: Series, centre: float | None = None) -> Interval | None:
    """The interval with the largest upper end, or farthest from `centre`; undefined if any is, None if there
    are none."""
    if not found:
        return None
    if None in found["high"]:
        return point(None)
    away = found["high"] if centre is None else [abs(value - centre) for value in found["value"]]
    return at(found, max(range(len(away)), key=away.__getitem__))


def of_model(key: str) -> Figure:
    """A figure of the model's rollouts."""
    return lambda entry, model: entry.value(model, key)


def has_law(entry: Entry) -> bool:
    return "exact" in entry.models()


def best_cheap(entry: Entry, model: str) -> str:
    return f"{model} / {entry.facts['best_cheap']}"


def may_tie(entry: Entry, model: str) -> bool:
    """Whether a cheap ensemble may be as good as the model: if it may be the exact law, and if the model is
    one, which serves because no network is better."""
    return has_law(entry) or model not in TRAINED


def broken(entry: Entry, model: str) -> Interval:
    found = [entry.number(model, "nonfinite_trajectories", case) for case in ("", "one step")]
    return point(max(number for number in found if number is not None))


def tails(entry: Entry, model: str) -> Interval | None:
    """Coverage of 90 %; None for fewer than 10 members, which cannot have it."""
    found = entry.value(model, "coverage_90") or point(None)
    return found if entry.number("", "members") >= 10 else None


def operations(entry: Entry, model: str) -> Interval | None:
    """Operations per evaluation that the model claims, over those of the corrector: 1 for a network of the
    same size. Those of the conditional Gaussian, which both call, are subtracted."""
    if "corrector" not in entry.models():
        return None
    names = (model, "corrector", "dressed_conditional")
    costs = [entry.number(name, "operations_per_state") for name in names]
    draw, teacher = (cost - costs[2] for cost in costs[:2])
    evaluations = entry.number("corrector", "evaluations_per_state") / EVALUATIONS[model]
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
        lambda entry, model: None if may_tie(entry, model) else entry.value(best_cheap(entry, model), "crps"),
        lambda settings, _: (None, settings.max_crps_ratio),
    ),
    Claim(
        "score",
        "the same, where a cheap ensemble may be the exact law, which none beats, or serves itself",
        "fair CRPS of {model} over that of the best cheap ensemble ({cheap})",
        lambda entry, model: entry.value(best_cheap(entry, model), "crps") if may_tie(entry, model) else None,
        lambda settings, _: (None, NOT_WORSE * settings.max_crps_ratio),
    ),
    Claim(
        "exact",
        "an ensemble twice too wide, one guess, one that does not look at its state",
        "fair CRPS of {model} over that of exact draws, at its worst lead,",
        lambda entry, model: worst(entry.by_lead(f"{model} / exact", "crps")),
        lambda settings, _: (None, settings.max_exact_ratio),
    ),
    Claim(
        "trajectories",
        "members of the right marginals without structure in space or time",
        "energy score of whole trajectories of {model} over that of exact draws, or else of the best cheap "
        "ensemble ({cheap}),",
        lambda entry, model: entry.value(
            f"{model} / exact" if has_law(entry) else best_cheap(entry, model), "trajectory_score"
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
        lambda entry, model: entry.value(model, "response", "one step"),
        (0.5, 1.5),
        stages=("consistency",),
    ),
    Claim(
        "teacher",
        "a student that learnt nothing",
        "fair CRPS of {model} over that of the corrector",
        lambda entry, model: entry.value(f"{model} / corrector", "crps"),
        lambda settings, _: (None, settings.max_student_ratio),
        stages=("consistency",),
    ),
    Claim(
        "evaluations",
        "the teacher, or a copy of it, in the student's place",
        "evaluations of {model} per state",
        lambda entry, model: point(entry.number(model, "evaluations_per_state")),
        lambda _, model: (None, EVALUATIONS[model] + 0.5),
        stages=("consistency", "scoring"),
        always=True,
    ),
    Claim(
        "operations",
        "a copy of the teacher that is no module of a known class",
        "floating-point operations of an evaluation of {model} over those of the corrector",
        operations,
        (None, 1.5),
        stages=("consistency", "scoring"),
        always=True,
    ),
    Claim(
        "law/{task}",
        "draws of another spread in the place of exact ones",
        "spread of exact draws over the data's error about their mean",
        lambda entry, _: entry.value("", "ssr_of_law", "one step"),
        (0.5, 2.0),
        lambda settings, _: settings.spread_of_law,
        stages=("diffusion",),
        of_task=True,
    ),
    Claim(
        "law_ranks/{task}",
        "draws of another noise or viscosity in the place of exact ones",
        "rank of the data among exact draws one step ahead, in the octave of waves where it is worst,",
        lambda entry, _: worst(entry.listed("", "ranks_of_data", "one step"), 0.5),
        (0.3, 0.7),
        (0.45, 0.55),
        stages=("diffusion",),
        of_task=True,
    ),
)


def num_broken(entry: Entry, _: str) -> Interval:
    cases = entry.cases(OBSERVED)
    return point(sum(entry.number("corrector", "nonfinite_trajectories", case) for case in cases))


def of_prior(key: str) -> Figure:
    """A figure of the prior, mean over the partial observations."""
    return lambda entry, _: entry.value("", key)


PRIOR = (
    Claim(
        "finite",
        "a diverged network",
        "the number of fields with NaN or inf",
        num_broken,
        (None, 1.0),
        always=True,
    ),
    Claim(
        "score",
        "the conditional Gaussian or the mean in place of samples",
        "energy score of the prior over that of the best cheap ensemble ({cheap}), mean over the partial "
        "observations,",
        lambda entry, _: entry.value(best_cheap(entry, "corrector"), "energy_score"),
        lambda settings, _: (None, NOT_WORSE * settings.max_crps_ratio),
    ),
    Claim(
        "observed",
        "draws that do not look at what was observed",
        "energy score of the prior over that of solutions drawn whatever was observed, mean over the "
        "partial observations,",
        lambda entry, _: entry.value("corrector / unconditional", "energy_score"),
        lambda settings, _: (None, settings.max_crps_ratio),
    ),
    Claim(
        "spread",
        "one guess, spread inflated by 1.3, the truth in every member",
        "spread of the prior over its error, mean over the partial observations,",
        lambda entry, _: entry.value("", "ssr") or point(None),
        (0.5, 2.0),
        lambda settings, _: settings.spread_skill,
    ),
    Claim(
        "coverage_50",
        "a spread that is right in the mean and wrong in most places",
        "share of truths in the central 50 % interval of the prior",
        of_prior("coverage_50"),
        (0.3, 0.7),
        (0.42, 0.58),
    ),
    Claim(
        "variogram_space",
        "white noise, draws cut into blocks and reshuffled",
        "distance of variograms from the truth to draws of the prior over that between draws",
        of_prior("variogram_space"),
        (0.5, 2.0),
        (0.7, 1.3),
    ),
    Claim(
        "spectrum",
        "white noise: energy in waves where the solution has none",
        "decades between the energy that draws of the prior and the truth add to the operator's, in the "
        "worst octave,",
        of_prior("spectrum"),
        *SPECTRUM,
    ),
    Claim(
        "nearest",
        "the truth leaked into one draw",
        "distance of the truth to the nearest draw of the prior over that of draws to their nearest",
        of_prior("nearest"),
        *CALIBRATED,
    ),
    Claim(
        "variance",
        "spread inflated by 1.3",
        "variance of log u of the prior over that of exact draws, mean over the partial observations,",
        of_prior("variance"),
        (0.5, 2.0),
        (0.8, 1.25),
    ),
    Claim(
        "independence",
        "draws that depend on each other",
        "variance of the mean of draws of the prior over that of independent ones",
        of_prior("independence"),
        (0.4, None),
        (RATIO[0], math.inf),
    ),
)
