"""The claims on ensembles and priors, one row each: the figure, its bounds, and the fakes that it refuses.

A figure is None if the claim does not apply, such as one relative to exact samples if no law is known.
Bounds: (above, below), either of which may be None: a claim holds if the whole interval is between them, is
refuted if the whole interval is outside, and is undecided otherwise (ups/evaluation/gates.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ups.common.place import STAGES, TRANSIENT
from ups.results import OBSERVED, Entry, Interval, Series

Figure = Callable[[Entry, str], Interval | None]  # of an entry and a model
Bounds = tuple[float | None, float | None]

EVALUATIONS = {name: num for stage in STAGES.values() for name, num in stage.samplers.items()}
TRAINED = {name for stage in STAGES.values() for name in stage.trained_samplers}
NOT_WORSE = 1.05  # score over that of the best cheap ensemble, which may be the exact law
MAX_EXACT_RATIO = 1.1  # CRPS over that of exact draws, at every lead
MAX_STUDENT_RATIO = 1.25  # CRPS of a student over that of the corrector
RATIO = (0.85, 1.18)  # of figures of a prior that are 1 for exact samples


class Margin(NamedTuple):
    """By how much a family of figures (ups/metrics/likeness.py) may differ from exact samples; the smallest
    fake that 100 starts must refuse by it, on forced Burgers unless another task is named; and its figures,
    in words, of (place, lead, wave, field, gap)."""

    width: float
    fake: str
    words: str


MARGINS = {
    "spread": Margin(0.06, "deviations x1.12 and x0.88", "log amplitude of deviations"),
    "lead": Margin(0.15, "x1.25 and x0.75 in turn by lead", "log amplitude{field} at lead {lead}"),
    "place": Margin(0.15, "barkley2d: deviations of another start", "log amplitude{field} in {place} cells"),
    "spectrum": Margin(
        math.log(1.25), "x1.5 of the energy from wave 4 on", "log energy{field} from wave {wave} on"
    ),
    "memory": Margin(0.1, "members permuted at half time", "correlation of leads {gap} apart"),
    "activity": Margin(0.06, "barkley2d: members permuted after lead 2", "cosine of places {gap} apart"),
    "fields": Margin(0.1, "barkley2d: v of another member", "correlation of two fields"),
    "slope": Margin(
        0.15, "barkley2d: smoothed over 3 x 3 cells", "log of differences of neighbouring cells{field}"
    ),
    "skewness": Margin(0.25, "Gaussian with the exact mean and covariance", "skewness of differences{field}"),
    "starts": Margin(
        0.04,
        "x1.25 and x0.75 in turn by start; deviations of another start",
        "variation between starts of figures of one start",
    ),
    "members": Margin(
        0.06, "antithetic members; truth + 0.3 deviations, no law known", "correlation of members"
    ),
    "nearest": Margin(0.25, "the truth in one member", "log of the distance to the nearest member"),
    "together": Margin(
        0.03, "the same seeds for all starts; bias of 0.3 standard deviations", "correlation of starts"
    ),
    # beyond the scored leads (ups/metrics/climate.py)
    "late mean": Margin(0.1, "a drift of 0.3 standard deviations", "mean{field}"),
    "late variance": Margin(math.log(1.25), "variance x1.5", "log variance{field}"),
    "late spectrum": Margin(math.log(1.5), "variance x4", "log energy{field} from wave {wave} on"),
    "late slope": Margin(0.2, "barkley2d: smoothed over 3 x 3 cells", "log of the steepest gradient{field}"),
    "late memory": Margin(0.2, "members frozen after the scored leads", "correlation in time{field}"),
    "late start": Margin(0.2, "half of the start in every frame", "correlation with the start{field}"),
}


@dataclass(frozen=True)
class Claim:
    """One row. words: names the figure, with {model}, {cheap} and {worst}, the worst of MARGINS. bounds: a
    pair, or a function of the model. stages: that the claim is about. case: of its figure's rows.
    always: also without evaluate.quality. of_task: one gate for all models.
    is_better: the claim is that the model is better, and equal is not better: undecided fails."""

    name: str
    refuses: str
    words: str
    figure: Figure
    allowed: Bounds | Callable[[str], Bounds]
    stages: Sequence[str] = (*TRANSIENT, "steady")
    case: str = ""
    always: bool = False
    of_task: bool = False
    is_better: bool = False

    def applies(self, stage: str, settings: Any) -> bool:
        return stage in self.stages and (self.always or settings.quality)

    def bounds(self, model: str) -> Bounds:
        return self.allowed(model) if callable(self.allowed) else self.allowed


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


def best_cheap(entry: Entry, model: str) -> str:
    return f"{model} / {entry.facts['best_cheap']}"


def broken(entry: Entry, model: str) -> Interval:
    found = [entry.number(model, "nonfinite_trajectories", case) for case in ("", "one step")]
    return point(max(number for number in found if number is not None))


def figures_of(entry: Entry, model: str, case: str) -> Iterator[tuple[str, list[float | None]]]:
    """(figure in words, [value, low, high] in units of its margin) of the figures of MARGINS in a case."""
    names = entry.facts.get("fields", ["u"])
    leads = len(entry.facts.get("times", ()))
    for family, (width, _, words) in MARGINS.items():
        found = entry.listed(model, f"likeness/{family}", case)
        for index, ends in enumerate(
            zip(*(found.get(end, ()) for end in ("value", "low", "high")), strict=True)
        ):
            number, field = divmod(index, len(names))
            text = words.format(
                lead=number + 1,
                wave=2**number,
                place=("sure", "less sure", "unsure", "all")[number % 4],
                gap=f"{index + 1} leads" if index + 1 < leads else "two fields",
                field=f" of {names[field]}" * (len(names) > 1),
            )
            yield text, [None if end is None else end / width for end in ends]


def unlike(entry: Entry, model: str, case: str = "") -> Interval | None:
    """The largest difference from exact samples, in margins: 1 is the bound of every figure."""
    found = [ends for _, ends in figures_of(entry, model, case)]
    if not found:
        return None
    if any(None in ends for ends in found):
        return point(None)
    values, lows, highs = zip(*found, strict=True)
    least = [max(low, -high, 0.0) for low, high in zip(lows, highs, strict=True)]
    return {
        "value": max(map(abs, values)),
        "low": max(least),
        "high": max(max(-low, high) for low, high in zip(lows, highs, strict=True)),
    }


def worst_figure(entry: Entry, model: str, case: str = "") -> str:
    """The figure that is surest outside its margin, or else largest, in words and units of its margin."""
    found = [(text, ends) for text, ends in figures_of(entry, model, case) if None not in ends]
    if not found:
        return ""
    text, ends = max(found, key=lambda one: (max(one[1][1], -one[1][2], 1.0), abs(one[1][0])))
    return "{}: {:.2f} [{:.2f}, {:.2f}]".format(text, *ends)


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
        "one guess, an ensemble twice too wide; the best cheap one may be the exact law, which none beats",
        "fair CRPS of {model} over that of the best cheap ensemble ({cheap})",
        lambda entry, model: entry.value(best_cheap(entry, model), "crps"),
        (None, NOT_WORSE),
    ),
    Claim(
        "exact",
        "an ensemble twice too wide, one guess, one that does not look at its state",
        "fair CRPS of {model} over that of exact draws, at its worst lead,",
        lambda entry, model: worst(entry.by_lead(f"{model} / exact", "crps")),
        (None, MAX_EXACT_RATIO),
    ),
    Claim(
        "samples",
        "every fake of MARGINS",
        "the largest difference of {model} from exact samples, or from the data, in margins ({worst}),",
        unlike,
        (None, 1.0),
    ),
    Claim(
        "climate",
        "the fakes of MARGINS beyond the scored leads",
        "the largest difference of {model} beyond the scored leads from exact samples, or from the data, in "
        "margins ({worst}),",
        partial(unlike, case="long"),
        (None, 1.0),
        stages=TRANSIENT,
        case="long",
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
        (None, MAX_STUDENT_RATIO),
        stages=("consistency",),
    ),
    Claim(
        "evaluations",
        "the teacher, or a copy of it, in the student's place",
        "evaluations of {model} per state",
        lambda entry, model: point(entry.number(model, "evaluations_per_state")),
        lambda model: (None, EVALUATIONS[model] + 0.5),
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
        "law_ranks/{task}",
        "draws of another noise or viscosity in the place of exact ones",
        "rank of the data among exact draws one step ahead, in the octave of waves where it is worst,",
        lambda entry, _: worst(entry.listed("", "ranks_of_data", "one step"), 0.5),
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
        (None, NOT_WORSE),
    ),
    Claim(
        "observed",
        "draws that do not look at what was observed",
        "energy score of the prior over that of solutions drawn whatever was observed, mean over the "
        "partial observations,",
        lambda entry, _: entry.value("corrector / unconditional", "energy_score"),
        (None, 1.0),
        is_better=True,
    ),
    Claim(
        "spread",
        "one guess, spread inflated by 1.3, the truth in every member",
        "spread of the prior over its error, mean over the partial observations,",
        lambda entry, _: entry.value("", "ssr") or point(None),
        RATIO,
    ),
    Claim(
        "coverage_50",
        "a spread that is right in the mean and wrong in most places",
        "share of truths in the central 50 % interval of the prior",
        of_prior("coverage_50"),
        (0.42, 0.58),
    ),
    Claim(
        "spectrum",
        "white noise, draws cut into blocks and reshuffled: energy in waves where the solution has none",
        "decades between the energy that draws of the prior and the truth add to the operator's, in the "
        "worst octave,",
        of_prior("spectrum"),
        (None, 0.3),
    ),
    Claim(
        "nearest",
        "the truth leaked into one draw",
        "distance of the truth to the nearest draw of the prior over that of draws to their nearest",
        of_prior("nearest"),
        RATIO,
    ),
    Claim(
        "variance",
        "spread inflated by 1.3",
        "variance of log u of the prior over that of exact draws, mean over the partial observations,",
        of_prior("variance"),
        (0.8, 1.25),
    ),
    Claim(
        "independence",
        "draws that depend on each other",
        "variance of the mean of draws of the prior over that of independent ones",
        of_prior("independence"),
        RATIO,
    ),
)
