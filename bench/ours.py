"""Train our operator for a given time: fit the bases, then take gradient steps until the budget is spent.

The stage script counts steps. Here the spent fraction of the budget replaces the fraction of steps, so that
one clock stops every model of the comparison. One task at a time.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache as cache_once
from functools import partial

import torch
from torch import Tensor

from bench.rivals import Stopwatch, Trained, Training
from ups.common.user_solver import solvers_of
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.forecaster import Forecaster
from ups.models.base_selection import (
    Shortlist,
    cause_of_errors,
    fitted_candidates,
    fitted_state,
)
from ups.models.head import TaskHead
from ups.models.head_setup import build_operator
from ups.models.loss import is_worth_training, operator_loss, squared_errors
from ups.models.operator import Operator
from ups.models.windows import Windows
from ups.select import MEASUREMENT, NETWORK, SELECTION_FACTOR, pooled, select_network
from ups.training.optim import EMA, build_optimizer, fit, learning_rate

RESOLUTION = 10_000  # the schedule's resolution: a share of the budget stands for this many steps


def fit_bases(
    cache: Cache,
    config: Config,
    seed: int,
    place: torch.device,
    watch: Stopwatch,
    budget_seconds: float = math.inf,
    enough: float = -math.inf,
) -> tuple[TaskHead, float]:
    """Return the head of the best base and its validation error. Rollouts of the bases are not timed.

    Costly fits take at most a quarter of the budget by their nominal work. No fit is started after a quarter
    of it, or after one with an error of at most `enough`.
    """
    context, settings = cache.context(config), config.operator
    shortlist = Shortlist(cache, context, seed)
    for name, candidate in fitted_candidates(cache, settings.base_steps, seed, place, budget_seconds / 4):
        with watch:
            shortlist.add(name, candidate)
        if watch() > budget_seconds / 4 or shortlist.scores[name] <= enough:
            break

    head, decisions = shortlist.select()
    if cause := cause_of_errors(head, cache, context, seed):
        head = head.with_facts(is_deterministic=cause.chosen == MEASUREMENT)
    return head, shortlist.scores[decisions[0].chosen]


def train_ours(
    config: Config,
    task: str,
    budget_seconds: float,
    seed: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.process_time,
    fitted: tuple[TaskHead, float] | None = None,
    modify: Callable[[Operator], object] | None = None,
    enough: float = -math.inf,
) -> Trained:
    """Train on one task for `budget_seconds` of `clock`, including fits but not validation; weights are
    selected on validation.

    fitted: head of `select_base` and its validation error; then nothing is fitted here. modify: changes
    the operator before its first step. enough: a validation error that ends the training early. A start far
    from all training trajectories is forecast all the same, as the rivals do.
    """
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, tasks=[task]),
        run=dataclasses.replace(config.run, seed=seed),
    )
    cache, place = open_cache(config, task), torch.device(device)
    watch = Stopwatch(clock)
    head, best = fitted or fit_bases(cache, config, seed, place, watch, budget_seconds, enough)
    torch.manual_seed(seed)
    settings, base = config.operator, fitted_state(head)
    operator = build_operator(
        {task: ({"description": head.facts.described()}, base)},
        settings.model,
        settings.train.precision,
        solvers_of(config),
    )
    if modify is not None:
        modify(operator)
    operator.to(place)
    context = cache.context(config)
    optimizer, ema = build_optimizer(operator, settings.optim), EMA(operator, settings.optim.ema_decay)
    scaled = dataclasses.replace(settings, train=dataclasses.replace(settings.train, steps=RESOLUTION))
    windows = Windows({task: cache}, config.task, scaled, seed)

    def validate() -> dict[str, float]:
        rows = cache.rows_by_parameter("val", settings.train.validate_trajectories)
        with ema.swap():
            found = pooled(squared_errors(operator, cache, rows, context))
        return {"val": min(found.values()), **found}

    training = Training(budget_seconds, watch, validate, ema.snapshot, enough)
    training.history.append({"share": 0.0, "steps": 0, "val": best, "base": best})

    def loss(now: int) -> Tensor:
        batch = replace(windows.schedule.batch(len(training.times)), step=now)
        window = windows.read(operator.heads[batch.task], batch, slice(0, len(batch)))
        return operator_loss(operator, batch.task, *window)[0]

    is_exact = best <= enough or not is_worth_training(operator.heads[task].scale)
    stopped = fit(
        operator,
        loss,
        (int(share * RESOLUTION) for share in training.shares(is_exact)),
        optimizer,
        lambda now: learning_rate(now, RESOLUTION, settings.optim),
        settings.optim.clip_norm,
        ema,
    )
    if stopped is not None:
        raise ValueError(
            f"the gradient of {task} is not finite at step {len(training.times)}; expected numbers. Lower "
            "the learning rates of the operator."
        )
    operator.load_state_dict(training.weights, strict=False)
    trained = operator.heads[task]
    operator.eval()

    @cache_once
    def network_weight() -> float:
        """Of what the network says, as the stage decides it; asked for by forecasts alone, short trials make
        none."""
        trained.facts = dataclasses.replace(trained.facts, network_weight=1.0)
        rows = cache.rows_by_parameter("val", SELECTION_FACTOR * settings.train.validate_trajectories)
        found = squared_errors(operator, cache, rows, context)
        found = select_network(task, found, cache.trajectory[rows], seed, cache.task.is_driven)
        return float(found.chosen == NETWORK)

    def forecast(given: Tensor, values: Tensor, num_steps: int, weight: Callable[[], float]) -> Tensor:
        trained.facts = dataclasses.replace(trained.facts, network_weight=weight())
        return Forecaster(operator).forecast(task, given, values, num_steps, extrapolate=True)

    num_parameters = sum(p.numel() for p in operator.parameters())
    alone = partial(forecast, weight=lambda: 0.0)
    return training.trained(partial(forecast, weight=network_weight), num_parameters, predict_base=alone)
