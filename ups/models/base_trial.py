"""Select the base by what the network reaches on it.

The base that is best alone may be the wrong one to build on. Where a grid does not resolve the fronts, a
propagator has two thirds of the error of persistence, but a network on it makes it worse, and one on
persistence learns (docs/lab/log.md, Gray-Scott). So the network is trained on both for a few steps, and the
trivial base serves if the network has a clearly smaller validation error on it. This is done only if the
selected base is little better than the trivial one, else the network cannot make up for the difference.
"""

import dataclasses
import math
import time
from typing import Any

import torch
from torch import Tensor

from ups.common.progress import beat, note
from ups.config import OperatorConfig
from ups.data.cache import Cache
from ups.models import base_selection
from ups.models.head_setup import (
    base_settings,
    build_operator,
    calibrated,
    conserved_facts,
    fitted_state,
    unfitted_head,
)
from ups.models.loss import operator_loss, pooled, squared_errors
from ups.models.windows import Windows
from ups.training.optim import fit_averaged

ENOUGH = 1 / 3  # of the error of the trivial base: a base with a smaller error needs no trial
TRIAL_FRACTION = 0.05  # of the steps of the stage, for each of the two trials
MARGIN = (
    0.8  # of the network's error on the selected base: a trial is short, and two equal ones differ by 20 %
)
MIN_STEPS = 50  # fewer tell nothing, so there is no trial

Fitted = tuple[dict[str, Any], dict[str, Tensor]]  # facts and weights of `base_selection.fit_base`


def fit_base(cache: Cache, settings: OperatorConfig, context: int, seed: int, device: torch.device) -> Fitted:
    """`base_selection.fit_base` with a trial."""
    started = time.perf_counter()
    fitted = base_selection.fit_base(cache, settings.base_steps, context, seed, device)
    facts, weights = after_trial(fitted, cache, settings, context, seed, device)
    return facts | {"seconds": time.perf_counter() - started}, weights


def after_trial(
    fitted: Fitted, cache: Cache, settings: OperatorConfig, context: int, seed: int, device: torch.device
) -> Fitted:
    """The fitted base, or the trivial one if the network has a clearly smaller error on it. Facts: also
    trial_nrmse, the validation error of the network by base, None if it blew up; empty if there was no trial.
    """
    facts, weights = fitted
    selected = facts["description"]["base"]["name"]
    trivial, errors = "mean" if cache.task.is_steady else "persistence", {}
    if is_trial_due(facts, trivial, settings.train.steps):
        found = {
            selected: (facts, weights),
            trivial: with_trivial_base(cache, trivial, facts, seed, device),
        }
        errors = {
            name: error_of_network(one, cache, settings, context, seed, device) for name, one in found.items()
        }
        if errors[trivial] < MARGIN * errors[selected]:
            facts, weights = found[trivial]
    trials = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    return facts | {"trial_nrmse": trials}, weights


def is_trial_due(facts: dict[str, Any], trivial: str, steps: int) -> bool:
    """Whether the selected base is little better than the trivial one. Never for a solver of the user."""
    base, errors = facts["description"]["base"], facts["validation_nrmse"]
    if base["name"] == trivial or base["kind"] == "solver" or errors.get(trivial) is None:
        return False
    return errors[base["name"]] > ENOUGH * errors[trivial] and TRIAL_FRACTION * steps >= MIN_STEPS


def with_trivial_base(
    cache: Cache, kind: str, facts: dict[str, Any], seed: int, device: torch.device
) -> Fitted:
    """Facts and weights of the trivial base, with the numbers of all candidates from `facts`."""
    head = unfitted_head(cache, kind, base_settings(cache), device)
    head = head.with_facts(
        **conserved_facts(head, cache),
        base=head.facts.base | {"name": kind, "unstable": ""},
        horizon=facts["description"]["horizon"],
    )
    head = calibrated(head, cache, seed)
    return facts | {"description": head.facts.described(), "findings": head.findings()}, fitted_state(head)


def error_of_network(
    base: Fitted, cache: Cache, settings: OperatorConfig, context: int, seed: int, device: torch.device
) -> float:
    """Pooled nRMSE on validation of a network trained on a base for a trial; inf if it blows up."""
    name, train = cache.task.name, settings.train
    note(f"{name}: a short training on {base[0]['description']['base']['name']}")
    steps, size = int(TRIAL_FRACTION * train.steps), min(train.batch_size, train.micro_batch)
    settings = dataclasses.replace(settings, train=dataclasses.replace(train, steps=steps, batch_size=size))
    optim = dataclasses.replace(settings.optim, warmup_steps=min(settings.optim.warmup_steps, steps // 5))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        operator = build_operator({name: base}, settings.model, train.precision).to(device)
    windows = Windows({name: cache}, {name: cache.settings}, {name: context}, settings, seed)

    def loss(step: int) -> Tensor:
        beat()
        z, z_ref, parameters = windows.read(
            operator.heads[name], windows.schedule.batch(step), step, slice(None)
        )
        return operator_loss(operator, name, z, z_ref, parameters, settings.field_weight)[0]

    stopped, ema = fit_averaged(operator, loss, steps, optim)
    if stopped is not None:
        return math.inf
    rows = cache.rows_by_parameter("val", train.validate_trajectories)
    with ema.swap():
        return pooled(squared_errors(operator, cache, rows, context, device))["network"]
