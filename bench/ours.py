"""Our operator under the benchmark's clock: the fit of the bases, then gradient steps, until the budget is spent.

The stage script counts steps; here the share of the budget takes the place of the share of the steps, so that every model
of the comparison is stopped by the same clock. One task at a time, as the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.baselines import Stopwatch, Trained
from train_operator import build, build_schedule, loss_of, squared_errors
from ups.config import Config
from ups.data.cache import open_cache
from ups.forecaster import Forecaster
from ups.models.choose import base_error, candidates, residual_scale, spread
from ups.models.head import TaskHead
from ups.models.operator import Operator
from ups.training.fit import fit
from ups.training.optim import EMA, build_optimizer, learning_rate

SHARES = 10_000   # the schedule's resolution: a share of the budget stands for this many steps


def train_ours(config: Config, task: str, budget_seconds: float, seed: int, device: str = "cpu",
               fitted: tuple[TaskHead, float] | None = None, modify: Callable[[Operator], None] | None = None) -> Trained:
    """Train on one task for `budget_seconds` of wall-clock, fits included, validation not; weights chosen on validation.

    For bench/ablate.py: fitted is the head of `choose_base` and its validation error, then nothing is fitted here; modify
    changes the operator before its first step.
    """
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tasks=[task]),
                                 run=dataclasses.replace(config.run, seed=seed))
    cache, place = open_cache(config, task), torch.device(device)
    watch, cpu_before = Stopwatch(), time.process_time()
    head, best = fitted or (None, float("inf"))
    for _, candidate in candidates(cache, config, seed, place) if fitted is None else ():
        with watch:
            error = base_error(candidate, cache, config.context(task))
        if error < best:
            head, best = candidate, error
        if watch() > budget_seconds:
            break
    if fitted is None:
        head.scale.copy_(residual_scale(head, cache, config, seed))
    torch.manual_seed(seed)
    operator = build({task: cache}, config, [head.description])
    state = {key: value for key, value in head.state_dict().items() if not key.startswith(("into.", "out."))}
    operator.heads[task].load_state_dict(state, strict=False)
    if modify is not None:
        modify(operator)
    operator.to(place)
    settings = config.operator
    optimizer, ema = build_optimizer(operator, settings.optim), EMA(operator, settings.optim.ema_decay)
    scaled = dataclasses.replace(settings, train=dataclasses.replace(settings.train, steps=SHARES))
    config = dataclasses.replace(config, operator=scaled)
    schedule = build_schedule({task: cache}, config)

    history, chosen, times = [{"share": 0.0, "error": best, "base": best}], None, []

    def shares() -> Iterator[int]:
        """Steps until the budget is spent, each by its share of it; validates at the marks."""
        nonlocal chosen
        marks = [0.7, 0.85, 1.0]
        while marks:
            share = min(watch() / budget_seconds, 1.0)
            if share < 1.0:
                begun = time.perf_counter()
                yield int(share * SHARES)
                times.append(time.perf_counter() - begun)
            if share >= marks[0]:
                marks.pop(0)
                with watch, ema.swap():
                    rows = spread(cache, "val", settings.train.validate_trajectories)
                    reference, *squares = squared_errors(operator, cache, rows, config.context(task), place)
                    errors = [float(torch.nan_to_num((square / reference).sqrt().mean(), nan=torch.inf)) for square in squares]
                history.append({"share": share, "error": min(errors), "network": errors[0], "base": errors[1]})
                if chosen is None or min(errors) < chosen[0]:
                    chosen = (min(errors), errors[0] < errors[1], ema.snapshot())

    def loss(now: int) -> Tensor:
        return loss_of(operator, cache, config, schedule.batch(len(times)), now, slice(0, settings.train.batch_size))[0]

    stopped = fit(operator, loss, shares(), optimizer, lambda now: learning_rate(now, SHARES, settings.optim),
                  settings.optim.clip_norm, ema)
    if stopped is not None:
        raise ValueError(f"the gradient of {task} is not finite at step {len(times)}; expected numbers. Lower the learning "
                         f"rates of the operator.")
    operator.load_state_dict(chosen[2], strict=False)
    operator.heads[task].description["is_network_used"] = chosen[1]
    if best < chosen[0]:                                     # the fitted base before any gradient step was better still
        operator.heads[task].load_state_dict(state, strict=False)
        operator.heads[task].description["is_network_used"] = False
    operator.eval()

    def predict(given: Tensor, values: Tensor, num_steps: int) -> Tensor:
        return Forecaster(operator).forecast(task, given, values, num_steps)

    step_ms = 1e3 * sorted(times)[len(times) // 2] if times else float("nan")
    return Trained(predict, sum(p.numel() for p in operator.parameters()), len(times), step_ms, watch(),
                   time.process_time() - cpu_before, 0, history)
