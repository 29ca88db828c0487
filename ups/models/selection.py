"""Selection by validation rollouts: of the weights to keep, and of the network or its base alone.

After chaos has set in, the mean of the data has an error of 1 and a realistic forecast one of sqrt(2),
although both are independent of the truth. In long rollouts the mean would always win. So leads at which the
truth is lost have less weight, by one rule (`lost_by_each`). A lead is lost if

    every candidate had an error of at most LARGEST_ERROR at an earlier lead, and
    at this lead every candidate's error is between LOST and CHANCE,

where errors are relative to the variation of the field about its mean. The first lead, every lead of a steady
task, every lead that one candidate still predicts and every forecast that has blown up have full weight. So
have all leads if a candidate never follows the truth. The rule is used twice:

- Network against base (`select`): lost leads are left out for both, so no error is replaced by a constant.
- Weights of different steps (`scores_of`): scores have to be comparable over training, so no lead is left
  out, but the part of an error above LOST is multiplied by EXCESS at a lost lead. The network's score
  increases with its error at every lead: a network that improves never scores worse, and errors never tie.

Where no error exceeds LOST both are the plain pooled nRMSE, bit for bit.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ups.metrics.errors import ERROR, LARGEST_ERROR, are_pooled
from ups.metrics.intervals import compare, group_index, number
from ups.models.loss import pooled

NUM_BOOTSTRAP = 1000
NETWORK_WEIGHTS = (1.0, 0.5)  # candidates; 0.5 is better if the network learnt little (ns_incom2d)
# Errors at a lead, relative to the variation. At a correlation r with the truth, the best forecast has an
# error of sqrt(1 - r^2) and a realistic one sqrt(2 - 2 r): less than 12 % more if the error is below 0.8, and
# sqrt(2) times at 1. CHANCE: the distance to an independent state with twice the variance. From 8
# trajectories of a dozen waves, sqrt(2) is measured as 1.2 to 1.6.
LOST, CHANCE = 0.8, math.sqrt(3)
EXCESS = 1e-3  # weight of the error above LOST at a lost lead: it orders equal scores, over 1000 leads too
SELECTION_FACTOR = 4  # trajectories that select network or base, relative to those that select weights


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


def is_lost(*found: Tensor) -> Tensor:
    """The leads and channels (T, C) that all have lost, from the `squared_errors` of networks on one base."""
    errors = [relative(sums)[1] for sums in found]
    return lost_by_each(torch.stack([*(network for network, _ in errors), errors[0][1]])).all(0)


def scores_of(found: dict[str, Tensor], calls: dict[str, int] | None = None) -> tuple[float, float]:
    """Two scores of one set of weights, from `squared_errors` by task: the geometric mean over tasks of the
    better error of network and base, and that of the network's error.

    The first selects the weights. The second decides ties, and training continues while it falls: as long as
    the base is better on every task, only the network's error shows progress. calls: the frames of a call, of
    tasks whose ensembles are sampled call by call: only these leads count there.
    """
    errors = [_errors(sums[:, :, : (calls or {}).get(name)]) for name, sums in found.items()]
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
            NUM_BOOTSTRAP,
            seed,
            groups,
        )
        for name in ("nrmse", "nrmse_pooled")
    }


def is_better(ratios: dict[str, dict[str, float | None]], is_pooled: bool = False) -> bool:
    """Whether the network is better than its base by more than chance: both intervals of `error_ratios` are
    below 1; with is_pooled that of the pooled error."""
    highs = [ratio["high"] for name, ratio in ratios.items() if name == "nrmse_pooled" or not is_pooled]
    return all(high is not None and high < 1 for high in highs)


def select(found: dict[float, Tensor], groups: Tensor, seed: int, is_driven: bool = False) -> dict[str, Any]:
    """The weight of the network's output in a task's forecasts, and the numbers that decide it (JSON-able).

    found: weight -> `squared_errors`. The weight with the smallest pooled error is compared with the base. It
    is selected if it is better by more than chance, else the base alone is. is_driven: by noise or a forcing
    (`Task.is_driven`), so that relative errors do not count where a field vanishes
    (`ups.metrics.errors.are_pooled`). Returned:

        compared_weight: the one that is compared; network_weight: the selected one, 0 for the base alone
        network, base: pooled nRMSE over the leads that count, None if not finite
        nrmse, nrmse_pooled: `error_ratios`, from which `is_better` decides
        decided_by: nrmse_pooled, if it alone does
        num_leads, num_leads_compared: of a rollout, and those not lost by both
        num_initial_conditions: of the validation trajectories
    """
    lost = is_lost(*found.values())
    weight = min(found, key=lambda weight: pooled(_without(found[weight], lost))["network"])
    lost = is_lost(found[weight])
    compared = _without(found[weight], lost)
    ratios = error_ratios(compared, groups, seed)
    is_pooled = are_pooled(found[weight][:, 0].sqrt(), is_driven)
    return {
        "network_weight": weight if is_better(ratios, is_pooled) else 0.0,
        "compared_weight": weight,
        **{name: number(error) for name, error in pooled(compared).items()},
        **ratios,
        **({"decided_by": "nrmse_pooled"} if is_pooled else {}),
        "num_leads": len(lost),
        "num_leads_compared": int((~lost).any(1).sum()),
        "num_initial_conditions": int(group_index(len(groups), groups).max()) + 1,
    }


def _without(sums: Tensor, lost: Tensor) -> Tensor:
    """`squared_errors` with zeros at the lost leads: means skip a truth of zero."""
    return sums.masked_fill(lost, 0.0)
