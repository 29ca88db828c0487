"""Selection by validation: every rule by which a stage decides, and the record of each decision.

Scores are errors: smaller is better. Candidates are ordered from the simplest to the most complex, and
`choose` takes the first of those that are as good as the best. Each rule says what counts as equally good.

After chaos has set in, the mean of the data has an error of 1 and a realistic forecast one of sqrt(2),
although both are independent of the truth. In long rollouts the mean would always win. So leads at which the
truth is lost have less weight, by one rule (`lost_by_each`). A lead is lost if

    every candidate had an error of at most LARGEST_ERROR at an earlier lead, and
    at this lead every candidate's error is between LOST and CHANCE,

where errors are relative to the variation of the field about its mean. The first lead, every lead of a steady
task, every lead that one candidate still predicts and every forecast that has blown up have full weight. So
have all leads if a candidate never follows the truth. The rule is used twice:

- Network against base (`select_network`): lost leads are left out for both, so no error is replaced by a
  constant.
- Weights of different steps (`scores_of`): scores have to be comparable over training, so no lead is left
  out, but the part of an error above LOST is multiplied by EXCESS at a lost lead. The network's score
  increases with its error at every lead: a network that improves never scores worse, and errors never tie.

Where no error exceeds LOST both are the plain pooled nRMSE, bit for bit.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ups.common.text import number as in_digits
from ups.metrics.errors import ERROR, LARGEST_ERROR, are_pooled
from ups.metrics.intervals import Resamples, compare, ratio

NUM_BOOTSTRAP = 1000
MODELS = ("network", "base")  # compared by `squared_errors`
# base
MAX_RATIO = 1.1  # of errors: a base with a larger one is worse, even if too few trajectories prove it
ROUNDING = 1e-6  # error of a frame by float32 transforms and sums (8 eps), relative to the field
# A stable base serves with up to this many times the error of an unstable one, which blows up: KdV with 12
# frames of one trajectory, 0.056 and 0.040 after 11 frames, 0.30 and 11 after 100.
UNSTABLE_RATIO = 2.0
# network
SELECTION_FACTOR = 4  # trajectories that select network or base, relative to those that select weights
# Errors at a lead, relative to the variation. At a correlation r with the truth, the best forecast has an
# error of sqrt(1 - r^2) and a realistic one sqrt(2 - 2 r): less than 12 % more if the error is below 0.8, and
# sqrt(2) times at 1. CHANCE: the distance to an independent state with twice the variance. From 8
# trajectories of a dozen waves, sqrt(2) is measured as 1.2 to 1.6.
LOST, CHANCE = 0.8, math.sqrt(3)
EXCESS = 1e-3  # weight of the error above LOST at a lost lead: it orders equal scores, over 1000 leads too
# of a mean square error over that of noise and spread (sigma^2 is known to 6 %)
MAX_EXCESS = 1.1
# samplers
LOCALIZED = 0.5  # nats per number by which a mixture of scales must be more likely than Gaussian waves
MAX_VARIANCE_ERROR = 0.1  # of a tuned student's variance, relative to the teacher's
MAX_CRPS_RATIO = 0.995  # tuning is accepted if CRPS falls to this fraction and nothing else is worse
EVALUATIONS = 2  # most network evaluations per call of a default sampler
TIED = 1.05  # scores within this factor are equal: those of one and two evaluations differed by -5 % to 5 %
NUM_IN_WORDS = 4  # candidates in a sentence
# names of candidates
ALONE, NETWORK, MEASUREMENT, MIXTURE = "base alone", "network", "noise of measurement", "mixture"
CELLS, TUNED = "cells", "tuned"


# ---- the record of a decision, and the one function that decides


@dataclass(frozen=True)
class Decision:
    """What was chosen among which candidates. candidates: name -> score with the ends of its 95 % interval,
    None if not finite or without one. rule: in words. rows: number of validation trajectories, None if they
    differ. seed: of the bootstrap or the samples."""

    question: str
    candidates: dict[str, list[float | None]]
    rule: str
    chosen: str
    rows: int | None = None
    seed: int | None = None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Decision":
        """The inverse of `described`. Raises TypeError or ValueError for anything else."""
        found = cls(**record)
        for value, low, high in found.candidates.values():
            if not all(isinstance(number, (float, int, NoneType)) for number in (value, low, high)):
                raise ValueError(f"a score is {value!r:.80} [{low!r:.80}, {high!r:.80}]; expected numbers")
        if found.chosen not in found.candidates:
            raise ValueError(f"{found.chosen!r:.80} is no candidate")
        return found

    def described(self) -> dict[str, Any]:
        """The decision as JSON stores it, in bases/TASK.json or config.json of a stage."""
        return asdict(self)

    @property
    def scores(self) -> dict[str, float]:
        """Candidate -> score; inf: it failed."""
        return {name: _or_inf(value) for name, (value, *_) in self.candidates.items()}

    @property
    def others(self) -> list[str]:
        """The candidates that were not chosen, the best first."""
        return [name for name in sorted(self.scores, key=self.scores.__getitem__) if name != self.chosen]

    def words(self, name: str) -> str:
        """A candidate with its score and interval."""
        value, low, high = self.candidates[name]
        interval = f" [{in_digits(low, 4)}, {in_digits(high, 4)}]" if None not in (low, high) else ""
        return f"{name} {'not finite' if value is None else in_digits(value, 4)}{interval}"

    def __str__(self) -> str:
        others = self.others
        rest = f" and {len(others) - NUM_IN_WORDS} more" if len(others) > NUM_IN_WORDS else ""
        over = "; over " + ", ".join(map(self.words, others[:NUM_IN_WORDS])) + rest if others else ""
        return f"{self.question}: {self.words(self.chosen)}{over} ({self.rule})"


def _or_inf(value: float | None) -> float:
    return math.inf if value is None or not math.isfinite(value) else value


def _or_none(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def is_best(name: str, best: str) -> bool:
    """No ties: of equal scores the first candidate has the best."""
    return name == best


def simplest_unless(is_other_better: bool, simplest: str) -> Callable[[str, str], bool]:
    """Of two candidates the simplest ties with the best, unless the other is clearly better."""
    return lambda name, _: (name != simplest) == is_other_better


def choose(
    question: str,
    scores: Mapping[str, float | None],
    rule: str,
    is_tied: Callable[[str, str], bool] = is_best,
    is_stable: Callable[[str], bool] = lambda _: True,
    intervals: Mapping[str, tuple[float | None, float | None]] | None = None,
    rows: int | None = None,
    seed: int | None = None,
) -> Decision:
    """The simplest stable candidate of those that tie with the best; if none of these is stable, the best.

    scores: candidate -> error, from the simplest candidate to the most complex; not finite: it failed.
    is_tied(name, best): whether validation cannot tell the two apart. is_stable(name): whether it behaves
    beyond the data; called only for tied candidates, in their order.
    """
    values = {name: _or_inf(score) for name, score in scores.items()}
    best = min(values, key=values.__getitem__)
    tied = (name for name in values if is_tied(name, best))
    candidates = {
        name: [*map(_or_none, (score, *(intervals or {}).get(name, (None, None))))]
        for name, score in scores.items()
    }
    return Decision(question, candidates, rule, next(filter(is_stable, tied), best), rows, seed)


# ---- base of a task and start of its forecasts


@dataclass(frozen=True)
class Errors:
    """Errors of validation rollouts: rmse and ref_rms, (rows, frames, predicted fields), float64."""

    rmse: Tensor
    ref_rms: Tensor

    def error(self, num_frames: int | None = None) -> float:
        """Pooled nRMSE over the first frames (None: all) and the fields that are not zero throughout; inf if
        the rollout blew up.
        """
        pooled = [values[:, :num_frames].square().mean(0).sqrt() for values in (self.rmse, self.ref_rms)]
        errors = ratio(*pooled)
        return _or_inf(float(errors[~errors.isnan()].mean()))

    def scores(self, num_frames: int | None = None) -> dict[str, Tensor]:
        """The same as scores of `ups.metrics.errors`."""
        return {"rmse": self.rmse[:, :num_frames], "ref_rms": self.ref_rms[:, :num_frames]}

    def interval(self, groups: Tensor, seed: int) -> tuple[float | None, float | None]:
        """The 95 % interval of `error`, over trajectories."""
        moments = ERROR["nrmse_pooled"].moments(self.scores(), None)
        found = Resamples(NUM_BOOTSTRAP, seed, groups).interval(*moments)
        return found["low"], found["high"]


def is_as_good(one: Errors, best: Errors, groups: Tensor, seed: int) -> bool:
    """Whether validation cannot tell `one` from `best`, in the first frame and over all frames.

    Their errors differ by rounding, or by less than MAX_RATIO and no more than chance: the paired 95 %
    interval of their ratio includes 1. groups (rows,): trajectories with one initial condition.
    """
    for num_frames in (1, one.rmse.shape[1]):
        error, least = one.error(num_frames), best.error(num_frames)
        if error - least <= ROUNDING * num_frames:
            continue
        if error > MAX_RATIO * least:
            return False
        scores = [each.scores(num_frames) for each in (one, best)]
        low = compare(ERROR["nrmse_pooled"], *scores, Resamples(NUM_BOOTSTRAP, seed, groups))["low"]
        if not low or low > 1:
            return False
    return True


def select_candidate(
    question: str,
    candidates: Mapping[str, Errors],
    scores: Mapping[str, float],
    is_stable: Callable[[str], bool],
    intervals: Mapping[str, tuple[float | None, float | None]],
    groups: Tensor,
    seed: int,
) -> Decision:
    """The simplest stable base of those that validation cannot tell from the best; if none of these is
    stable, the best stable candidate, else the best one.

    candidates: those with at most UNSTABLE_RATIO times the best error, the simplest first. scores: of all
    bases that were tried. is_stable(name): beyond the data.
    """
    best = min(candidates.values(), key=Errors.error)
    tied = [name for name, one in candidates.items() if one is best or is_as_good(one, best, groups, seed)]
    others = sorted(candidates, key=lambda name: candidates[name].error())
    return choose(
        question,
        {name: candidates[name].error() for name in dict.fromkeys([*tied, *others])} | scores,
        "the simplest that is stable beyond the data, of those that validation cannot tell from the "
        f"best; if none is, a stable one with at most {UNSTABLE_RATIO:g} times its error",
        lambda name, _: name in candidates,
        is_stable,
        intervals,
        len(groups),
        seed,
    )


def is_clearly_better(one: Errors, other: Errors, groups: Tensor, seed: int) -> bool:
    """Whether the error of `one` over that of `other` is below 1 by more than chance."""
    resamples = Resamples(NUM_BOOTSTRAP, seed, groups)
    found = compare(ERROR["nrmse_pooled"], one.scores(), other.scores(), resamples)
    return found["high"] is not None and found["high"] < 1


def select_start(question: str, candidates: Mapping[str, Errors], groups: Tensor, seed: int) -> Decision:
    """The start of a base's forecasts: of two candidates the second only if it is clearly better."""
    (simplest, plain), (_, estimated) = candidates.items()
    return choose(
        question,
        {name: one.error() for name, one in candidates.items()},
        "estimated from all input frames only if that is better by more than chance",
        simplest_unless(is_clearly_better(estimated, plain, groups, seed), simplest),
        intervals={name: one.interval(groups, seed) for name, one in candidates.items()},
        rows=len(groups),
        seed=seed,
    )


def explain_errors(question: str, excess: float, rows: int, seed: int) -> Decision:
    """Whether noise of measurement explains the errors of a base, from the logarithm of their excess over it
    that is left after chance: then members of an ensemble differ in their start alone."""
    return choose(
        question,
        {MEASUREMENT: excess, "noise in the dynamics, or the base": math.log(MAX_EXCESS)},
        f"noise of measurement, if the mean square error is at most {MAX_EXCESS} times what it explains",
        rows=rows,
        seed=seed,
    )


# ---- weights of the network, and network or base


def pooled(sums: Tensor) -> dict[str, float]:
    """Pooled nRMSE of network and base from `squared_errors`: the mean over frames and those channels that
    are not zero throughout; inf for a rollout that blew up.
    """
    reference, _, *squares = sums.sum(0)
    values = [float((square / reference)[reference > 0].sqrt().mean()) for square in squares]
    return {name: _or_inf(value) for name, value in zip(MODELS, values, strict=True)}


def relative(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled errors of network and base by lead and channel, (2, T, C), from `squared_errors`: relative to
    the truth (nRMSE) and to its variation. NaN or inf where these are zero."""
    truth, variation, *squares = sums.sum(0)
    return (torch.stack(squares) / truth).sqrt(), (torch.stack(squares) / variation).sqrt()


def lost_by_each(errors: Tensor) -> Tensor:
    """The leads at which each candidate has lost the truth after all had followed it, from their errors
    relative to the variation; both (candidates, T, C).
    """
    followed = (errors <= LARGEST_ERROR).cumsum(1) > 0
    followed_before = torch.cat([torch.zeros_like(followed[:, :1]), followed[:, :-1]], 1)
    return followed_before.all(0) & (errors > LOST) & (errors < CHANCE)


def is_lost(sums: Tensor) -> Tensor:
    """The leads and channels (T, C) that network and base have both lost, from `squared_errors`."""
    return lost_by_each(relative(sums)[1]).all(0)


def scores_of(found: dict[str, Tensor], sampled: Collection[str] = ()) -> tuple[float, float]:
    """Two scores of one set of weights, from `squared_errors` by task: the geometric mean over tasks of the
    better error of network and base, and that of the network's error.

    The first selects the weights. The second decides ties, and training continues while it falls: as long as
    the base is better on every task, only the network's error shows progress. sampled: tasks whose ensembles
    are sampled frame by frame: only the first lead counts there.
    """
    errors = [_errors(sums[:, :, :1] if name in sampled else sums) for name, sums in found.items()]
    best = [min(pair) for pair in errors]
    return _geometric_mean(best), _geometric_mean([network for network, _ in errors])


def _errors(sums: Tensor) -> list[float]:
    """Mean nRMSE of network and base, with the error of lost leads reduced; inf if one blew up.

    For the base these are the leads that it has lost itself: a gain of the network at a lead must not raise
    the error of the base.
    """
    errors, of_variation = relative(sums)
    lost = torch.stack([is_lost(sums), lost_by_each(of_variation)[1]])
    reduced = (LOST + EXCESS * (of_variation - LOST)) / of_variation
    errors, is_defined = torch.where(lost, reduced * errors, errors), sums[:, 0].sum(0) > 0
    means = [float(error[is_defined].mean()) for error in errors]
    return [mean if math.isfinite(mean) else math.inf for mean in means]


def _geometric_mean(errors: list[float]) -> float:
    return math.exp(sum(math.log(max(error, 1e-12)) for error in errors) / len(errors))


def error_ratios(sums: Tensor, groups: Tensor, seed: int) -> dict[str, dict[str, float | None]]:
    """Error of the network over that of its base with the paired 95 % interval, from `squared_errors`: by the
    mean of relative errors (nrmse) and by the pooled one (nrmse_pooled).

    groups (rows,): trajectories of one initial condition are resampled together.
    """
    reference, _, network, base = (part.sqrt().cpu() for part in sums.unbind(1))
    return {
        name: compare(
            ERROR[name],
            {"rmse": network, "ref_rms": reference},
            {"rmse": base, "ref_rms": reference},
            Resamples(NUM_BOOTSTRAP, seed, groups),
        )
        for name in ("nrmse", "nrmse_pooled")
    }


def is_better(ratios: dict[str, dict[str, float | None]], is_pooled: bool = False) -> bool:
    """Whether the network is better than its base by more than chance: both intervals of `error_ratios` are
    below 1; with is_pooled that of the pooled error."""
    highs = [ratio["high"] for name, ratio in ratios.items() if name == "nrmse_pooled" or not is_pooled]
    return all(high is not None and high < 1 for high in highs)


def select_network(
    question: str, sums: Tensor, groups: Tensor, seed: int, is_driven: bool = False
) -> Decision:
    """Whether the network serves a task, by `squared_errors`; scores are errors over that of the base.

    The network is selected if it is better by more than chance, else the base alone is. is_driven: by noise
    or a forcing (`Task.is_driven`), so that relative errors do not count where a field vanishes
    (`ups.metrics.errors.are_pooled`).
    """
    compared = sums.masked_fill(is_lost(sums), 0.0)  # means skip a truth of zero
    ratios = error_ratios(compared, groups, seed)
    over_base = ratios["nrmse_pooled"]
    return choose(
        question,
        {ALONE: 1.0, NETWORK: over_base["value"]},
        "the network, if it is better than the base by more than chance; errors over the base's",
        simplest_unless(is_better(ratios, are_pooled(sums[:, 0].sqrt(), is_driven)), ALONE),
        intervals={NETWORK: (over_base["low"], over_base["high"])},
        rows=len(groups),
        seed=seed,
    )


# ---- samplers and priors


def select_lowest(
    question: str, scores: Mapping[str, float], what: str, rows: int | None = None, seed: int | None = None
) -> Decision:
    """The candidate with the lowest score: the error of sampled states, the posterior of a coefficient, how a
    steady prior samples. what: the score, in words."""
    return choose(question, scores, f"the lowest {what}", rows=rows, seed=seed)


def select_law(name: str, facts: Mapping[str, float]) -> Decision | None:
    """The law of the residuals of a task in closed form, from `nll_waves` and `nll_mixture` of validation
    residuals (`ups.generative.fitting.compare_laws`); None if they were not compared."""
    if "nll_waves" not in facts:
        return None
    scores = {"Gaussian waves": facts["nll_waves"], MIXTURE: facts["nll_mixture"]}
    return choose(
        f"law of the residuals of {name}",
        scores,
        f"a mixture of two scales, if more likely by {LOCALIZED} nats per number",
        simplest_unless(scores[MIXTURE] < scores["Gaussian waves"] - LOCALIZED, "Gaussian waves"),
    )


def tuning_ratio(tuned: Mapping[str, dict], before: Mapping[str, dict]) -> float | None:
    """Mean CRPS of the tuned student over that before; None if it must be rejected, because a task gained too
    little or lost in another metric."""
    pairs = [(now, before[name]) for name, now in tuned.items()]
    is_accepted = all(
        now["crps"] <= MAX_CRPS_RATIO * old["crps"]
        and now["energy"] <= old["energy"]
        and abs(now["spread_skill"] - 1) <= abs(old["spread_skill"] - 1)
        and abs(now["variance"] - 1) <= max(abs(old["variance"] - 1), MAX_VARIANCE_ERROR)
        for now, old in pairs
    )
    return sum(now["crps"] / old["crps"] for now, old in pairs) / len(pairs) if is_accepted else None


def select_tuning(best_ratio: float, seed: int) -> Decision:
    """Whether the tuned student serves: the best accepted `tuning_ratio`, inf if none was."""
    return choose(
        "tuning of the student",
        {"untuned": 1.0, TUNED: best_ratio},
        f"tuned, if CRPS falls to {MAX_CRPS_RATIO} and no other score is worse; CRPS over the untuned one's",
        simplest_unless(math.isfinite(best_ratio), "untuned"),
        seed=seed,
    )


def select_sampler(
    name: str, found: Mapping[str, tuple[int, float]], evaluations: int | None = None
) -> Decision:
    """The sampler of a task's ensembles if the user names none, from sampler -> (evaluations per call, CRPS
    on validation, infinite if it has none): of those with at most EVALUATIONS, the cheapest within TIED of
    the best; if none of these stayed finite, the cheapest of all.

    evaluations: how many a call is to use; then the best of the samplers with this number.
    """
    if evaluations is not None:
        scores = {sampler: crps for sampler, (needed, crps) in found.items() if needed == evaluations}
        return select_lowest(
            f"sampler of {name}",
            scores,
            f"CRPS on validation with {evaluations} network evaluations per call",
        )
    ranked = dict(sorted(found.items(), key=lambda entry: entry[1]))
    affordable = {sampler: crps for sampler, (needed, crps) in ranked.items() if needed <= EVALUATIONS}
    scores = affordable or {sampler: crps for sampler, (_, crps) in ranked.items()}
    if affordable:
        rule = f"of those with at most {EVALUATIONS} network evaluations per call, the cheapest within "
        rule += f"{TIED - 1:.0%} of the best on validation"
    else:
        rule = "the cheapest that stays finite on validation, as none with at most "
        rule += f"{EVALUATIONS} network evaluations per call does"
    return choose(
        f"sampler of {name}",
        scores,
        rule,
        lambda sampler, best: not affordable or scores[sampler] <= TIED * scores[best],
    )
