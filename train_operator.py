"""Operator: the next frames of every task from the last ones, in latents; one network over a base predictor
per task.

    z_next = encode( base(decode z) ) + scale * network(z, base, condition)
    loss   = mean over samples of |z_pred - z_ref| / |z_ref - z_base|, summed over an unrolled phase at the end

Reads:  cache/TASK.h5 of every task in data.tasks.
Writes: RUN/operator/: bases/ (fitted once, chosen on validation rollouts), state/, metrics.jsonl,
model.safetensors, done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_operator.py --config configs/small.yaml
    python train_operator.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): validation nRMSE and the gates are in the report; README states the numbers.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ups.chain import parents_of
from ups.config import Config, parse_arguments, to_dict
from ups.data.cache import Cache, open_cache, place
from ups.data.schedule import Batch, Schedule
from ups.models.augment import augment
from ups.models.choose import fit_base, load_base, spread
from ups.models.loss import operator_loss
from ups.models.operator import Operator
from ups.seeds import generator
from ups.training.ending import main_guard
from ups.training.fitted import fit_once
from ups.training.run import Run

STAGE = "operator"


def loss_of(operator: Operator, cache: Cache, config: Config, batch: Batch, step: int, part: slice) -> tuple:
    """Loss and metrics of the rows `part` of this rank's share: gather, augment, unroll."""
    settings, name = config.operator, batch.task
    head = operator.heads[name]
    device = head.scale.device
    rows, starts = cache.split["train"][batch.rows[part]], batch.starts[part] + config.task[name].train_from
    draw = generator(config.run.seed, step, "augment")
    if head.task.is_steady:
        z, z_ref = augment(head.task, [(cache.inputs(rows, device), head.input_codec),
                                       (cache.batch(rows, 0, 1, device), head.codec)], draw)
    else:
        is_unrolled = step >= (1 - settings.unroll_fraction) * settings.train.steps
        calls = settings.unroll_steps if is_unrolled else 1
        window = cache.batch(rows, starts, head.history + calls * head.bundle, device)
        [window] = augment(head.task, [(window, head.codec)], draw)
        z, z_ref = window[:, : head.history], window[:, head.history :]
    parameters = cache.parameters[rows]
    loss, metrics = operator_loss(operator, name, z, z_ref, parameters, settings.field_weight)
    return loss, {f"{name}/{key}": value for key, value in metrics.items()}


@torch.no_grad()
def squared_errors(operator: Operator, cache: Cache, rows: Tensor, context: int,
                   device: torch.device) -> Tensor:
    """Sums over `rows` and space of u_ref^2 and of the squared rollout errors of operator and base: (3, T,
    C), float64."""
    head, num_frames = operator.heads[cache.task.name], cache.num_frames - context
    if len(rows) == 0:   # fewer trajectories than processes
        return torch.zeros(3, num_frames, head.codec.num_channels, dtype=torch.float64, device=device)
    parameters = cache.parameters[rows]
    given = cache.inputs(rows, device) if head.task.is_steady else cache.batch(rows, 0, context, device)
    u_ref = operator.physical(head.name, cache.batch(rows, context, num_frames, device)).double()
    over = (0, *range(3, u_ref.ndim))
    sums = [u_ref.square().sum(over)]
    for part in ("full", "base"):
        z_pred = operator.rollout(given, head.name, parameters, num_frames, part)
        sums.append((operator.physical(head.name, z_pred).double() - u_ref).square().sum(over))
    return torch.stack(sums)


def validate(operator: Operator, caches: dict[str, Cache], config: Config,
             run: Run) -> dict[str, dict[str, float]]:
    """Task -> pooled nRMSE of validation rollouts by the full operator and by its base alone. A
    collective."""
    def local() -> list[Tensor]:
        sums = []
        for cache in caches.values():
            rows = spread(cache, "val", config.operator.train.validate_trajectories)[run.rank :: run.world]
            sums.append(squared_errors(operator, cache, rows, config.context(cache.task.name), run.device))
        return sums

    errors = {}
    for name, sums in zip(caches, run.agreed(local, "validating"), strict=True):
        reference, *squares = run.reduce_sum(sums)
        pooled = [float((square / reference).sqrt().mean()) for square in squares]
        errors[name] = {k: v if math.isfinite(v) else math.inf
                        for k, v in zip(("network", "base"), pooled, strict=True)}
    return errors


def score_of(errors: dict[str, dict[str, float]]) -> float:
    """Geometric mean over tasks of the better of network and base; what early stopping and the export go
    by."""
    return math.exp(sum(math.log(max(min(e.values()), 1e-12)) for e in errors.values()) / len(errors))


def build_schedule(caches: dict[str, Cache], config: Config) -> Schedule:
    """Which task, trajectories and window starts each step sees.

    Raises ValueError for a task with too few frames to train on, or a context that its history does not fit
    in or that leaves nothing to validate on.
    """
    settings, windows, complexity = config.operator, {}, {}
    for name, cache in caches.items():
        task, context = config.task[name], config.context(name)
        if not cache.task.is_steady and not task.history <= context < cache.num_frames:
            raise ValueError(f"evaluate.context_frames is {context}; expected at least the history of "
                             f"{name}, {task.history}, and fewer than its {cache.num_frames} frames. Change "
                             f"it, or task.{name}.history or num_frames.")
        length = task.history + settings.unroll_steps * task.bundle
        starts = 1 if cache.task.is_steady else cache.num_frames - task.train_from - length + 1
        windows[name] = (len(cache.split["train"]), starts)
        complexity[name] = cache.task.ndim + len(cache.task.fields) / 10
    return Schedule(windows, settings.train.batch_size, config.run.seed, config.sampling.strategy,
                    config.sampling.temperature, complexity, settings.train.steps)


def build(caches: dict[str, Cache], config: Config, descriptions: list[dict]) -> Operator:
    """The network over the chosen bases; not yet filled."""
    return Operator({"model": to_dict(config.operator.model), "precision": config.operator.train.precision,
                     "tasks": descriptions})


@main_guard
def main() -> None:
    # ---- config
    config, is_dry_run = parse_arguments(__doc__)
    train = config.operator.train
    if is_dry_run:
        from ups.dry_run import operator_work, print_plan
        parents = {config.cache_path(name): "cache" for name in config.data.tasks}
        print_plan(config, STAGE, train, config.operator.model, config.data.tasks, operator_work(config),
                   parents)
        raise SystemExit(0)

    # ---- setup
    caches = {name: open_cache(config, name) for name in config.data.tasks}
    schedule = build_schedule(caches, config)
    run = Run.start(config, STAGE, train, config.operator.optim, parents_of(config, STAGE, caches))
    if run.is_finished:
        return run.print(f"{run.directory} is finished and up to date: nothing to do")
    placed = place(caches.values(), run.device, config.cache.place, config.cache.device_fraction)
    run.print(f"{run.world} process(es) on {run.device}, {train.precision} precision, latents: {placed}")

    # ---- data: bases are chosen once, by validation rollouts; ranks share the tasks
    fits = {name: partial(fit_base, cache, config, config.run.seed, run.device)
            for name, cache in caches.items()}
    bases = fit_once(run, "bases", fits, "fitting the bases")
    facts = {name: fact for name, (fact, _) in bases.items()}
    for name, fact in facts.items():
        best = min((v, k) for k, v in fact["validation_nrmse"].items() if v is not None)
        run.print(f"base of {name}: {best[1]}, validation nRMSE {best[0]:.2e}")

    # ---- model
    run.seed_all()
    operator = build(caches, config, [fact["description"] for fact in facts.values()])
    for name, (_, weights) in bases.items():
        load_base(operator.heads[name], weights)
    operator = run.attach(operator)

    batch = schedule.batch(schedule.step_of_largest({name: cache.frame_bytes
                                                     for name, cache in caches.items()}))
    batch = batch.share(run.rank, run.world)
    # unrolled
    run.probe(partial(loss_of, operator, caches[batch.task], config, batch, train.steps - 1), len(batch))

    # ---- loop
    for step in run.steps():
        batch = schedule.batch(step).share(run.rank, run.world)
        run.update(partial(loss_of, operator, caches[batch.task], config, batch, step), len(batch))
        if run.is_due(train.validate_every):
            with run.ema_weights():
                errors = validate(operator, caches, config, run)
            score = score_of(errors)
            run.validated({"score": score,
                           **{f"{name}/{k}": v for name, e in errors.items() for k, v in e.items()}})
            run.keep_best(score)
            shown = ", ".join(f"{name} {e['network']:.2e} (base {e['base']:.2e})"
                              for name, e in errors.items())
            run.print(f"step {run.step}: validation nRMSE {shown}")

    # ---- finish: the network serves a task only where it helps
    run.take_best()
    errors = validate(operator, caches, config, run)
    for name, error in errors.items():
        operator.heads[name].description["is_network_used"] = error["network"] < error["base"]
    run.finish({"validation": errors,
                "bases": {name: fact["description"]["base"]["kind"] for name, fact in facts.items()}},
               operator.description)


if __name__ == "__main__":
    main()
