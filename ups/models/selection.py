"""Selection on validation rollouts: which weights are kept, and whether a network or its base alone serves.

Where chaos has taken over, the mean of the data has an error of 1 and a forecast that goes on as the system
does one of sqrt(2), although neither knows anything of the truth. In long rollouts the mean would always win.
So leads at which the truth is lost count less, by one rule (`lost_by_each`). A lead is lost if

    every candidate had an error of at most LARGEST_ERROR at an earlier lead, and
    at this lead every candidate's error is between LOST and CHANCE,

errors being relative to the variation of the field about its mean. The first lead, every lead of a steady
task, every lead that one candidate still predicts and every forecast that has blown up count in full. If a
candidate never follows the truth, all leads do. The rule is used twice:

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

from ups.metrics.errors import ERROR, LARGEST_ERROR
from ups.metrics.intervals import compare, group_index, number
from ups.models.loss import pooled

NUM_BOOTSTRAP = 1000
NETWORK_WEIGHTS = (1.0, 0.5)  # of the network's output; half is better where it learnt little (ns_incom2d)
# Errors at a lead, relative to the variation. At the same correlation r with the truth the best forecast has
# an error of sqrt(1 - r^2) and one that goes on as the system does sqrt(2 - 2 r): up to 0.8 less than 12 %
# more, at 1 sqrt(2) times. CHANCE: another state of a system of twice the variance. From 8 trajectories of a
# dozen waves sqrt(2) is measured as 1.2 to 1.6.
LOST, CHANCE = 0.8, math.sqrt(3)
EXCESS = 1e-3  # weight of the error above LOST at a lost lead: it orders equal scores, over 1000 leads too
SELECTION_FACTOR = 4  # times as many trajectories select network or base as select the weights


def relative(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled errors of network and base by lead and channel, (2, T, C), from `squared_errors`: relative to
    the truth (nRMSE) and to its variation. NaN or inf where these are zero."""
    truth, variation, *squares = sums.sum(0)
    return (torch.stack(squares) / truth).sqrt(), (torch.stack(squares) / variation).sqrt()


def lost_by_each(errors: Tensor) -> Tensor:
    """Where each candidate has lost the truth after all of them followed it, (candidates, T, C), from their
    errors relative to the variation (candidates, T, C)."""
    followed = (errors <= LARGEST_ERROR).cumsum(1) > 0
    followed_before = torch.cat([torch.zeros_like(followed[:, :1]), followed[:, :-1]], 1)
    return followed_before.all(0) & (errors > LOST) & (errors < CHANCE)


def is_lost(*found: Tensor) -> Tensor:
    """The leads and channels (T, C) that count less, from the `squared_errors` of networks on one base."""
    errors = [relative(sums)[1] for sums in found]
    return lost_by_each(torch.stack([*(network for network, _ in errors), errors[0][1]])).all(0)


def scores_of(found: dict[str, Tensor]) -> tuple[float, float]:
    """Two scores of one set of weights, from `squared_errors` by task: the geometric mean over tasks of the
    better error of network and base, and that of the network's error.

    The first selects the weights. The second decides between equal ones, and training goes on while it falls:
    as long as the base is better on every task, only the network's error shows what it learns.
    """
    errors = [_errors(sums) for sums in found.values()]
    best = [min(pair) for pair in errors]
    return _geometric_mean(best), _geometric_mean([network for network, _ in errors])


def _errors(sums: Tensor) -> list[float]:
    """Mean nRMSE of network and base, lost leads reduced; inf where one blew up.

    The base's are those that it has lost itself: what the network gains at a lead must not raise the error of
    the base.
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


def is_better(ratios: dict[str, dict[str, float | None]]) -> bool:
    """Whether the network is better than its base by more than chance: both intervals of `error_ratios` are
    below 1."""
    return all(ratio["high"] is not None and ratio["high"] < 1 for ratio in ratios.values())


def select(found: dict[float, Tensor], groups: Tensor, seed: int) -> dict[str, Any]:
    """The share of the network's output that serves a task, and the numbers that decide it (JSON-able).

    found: share -> `squared_errors`. The share with the smallest pooled error is compared with the base. It
    serves if it is better by more than chance, else the base alone does. Returned:

        compared_weight: the one compared; network_weight: the one that serves, 0 for the base alone
        network, base: pooled nRMSE over the leads that count, None if not finite
        nrmse, nrmse_pooled: `error_ratios`, from which `is_better` decides
        num_leads, num_leads_compared: of a rollout, and those not lost by both
        num_initial_conditions: of the validation trajectories
    """
    lost = is_lost(*found.values())
    share = min(found, key=lambda share: pooled(_without(found[share], lost))["network"])
    lost = is_lost(found[share])
    compared = _without(found[share], lost)
    ratios = error_ratios(compared, groups, seed)
    return {
        "network_weight": share if is_better(ratios) else 0.0,
        "compared_weight": share,
        **{name: number(error) for name, error in pooled(compared).items()},
        **ratios,
        "num_leads": len(lost),
        "num_leads_compared": int((~lost).any(1).sum()),
        "num_initial_conditions": int(group_index(len(groups), groups).max()) + 1,
    }


def _without(sums: Tensor, lost: Tensor) -> Tensor:
    """`squared_errors` without the lost leads: a truth of zero is left out of every mean."""
    return sums.masked_fill(lost, 0.0)
