"""Train the operator: the next frames of every task from the last ones; one network over a base per task.

    u_next = base(u) + scale * network(u, base(u), condition)
    loss   = mean over samples of |u_pred - u_ref| / |u_ref - u_base|; unrolled in the last steps

Reads:  cache/TASK.h5 of every task in data.tasks.
Writes: RUN/operator/: bases/ (fitted once, selected by validation rollouts), state/, metrics.jsonl,
model.safetensors, done.json.

    accelerate launch train_operator.py
    python train_operator.py --dry-run

Expected (configs/small.yaml): validation nRMSE and the gates are in the report; README states the numbers.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from torch import Tensor

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.data.cache import Cache
from ups.models.band import calibrated, measured
from ups.models.base_selection import describe_selection, fit_base, most_work_of
from ups.models.bases.base import ParameterBatch
from ups.models.head_setup import build_operator
from ups.models.loss import is_worth_training, operator_loss, squared_errors
from ups.models.operator import Operator
from ups.models.starts import laws_of
from ups.models.windows import Windows
from ups.select import NETWORK, SELECTION_FACTOR, pooled, scores_of, select_network
from ups.training.ending import main_guard
from ups.training.fit import fit_once
from ups.training.run import Run
from ups.training.strategies import SplitLoss

STAGE = "operator"


def loss_of(
    operator: Operator, task: str, u: Tensor, u_ref: Tensor, parameters: ParameterBatch
) -> tuple[Tensor, dict]:
    """Loss and metrics of windows of a task."""
    loss, metrics = operator_loss(operator, task, u, u_ref, parameters)
    return loss, {f"{task}/{key}": value for key, value in metrics.items()}


def validate(
    operator: Operator, caches: dict[str, Cache], contexts: dict[str, int], run: Run, count: int
) -> dict[str, Tensor]:
    """Task -> `squared_errors` of rollouts of at most `count` validation trajectories. A collective: each
    rank rolls out its shard.
    """

    def errors(name: str, cache: Cache, rows: Tensor) -> Tensor:
        return squared_errors(operator, cache, rows, contexts[name])

    return by_rank(run, caches, count, errors, "validating")


def by_rank(
    run: Run, caches: dict[str, Cache], count: int, numbers_of: Callable[..., Tensor], doing: str
) -> dict[str, Tensor]:
    """Task -> numbers_of(task, cache, rows) of at most `count` validation trajectories, (rows, ..)."""

    def numbers(name: str, cache: Cache) -> Tensor:
        rows, shard = cache.rows_by_parameter("val", count), slice(run.ranks.rank, None, run.ranks.world)
        found = numbers_of(name, cache, rows[shard])
        every = found.new_zeros(len(rows), *found.shape[1:])
        every[shard] = found
        return every

    shards = run.agreed(lambda: [numbers(*one) for one in caches.items()], doing)
    return {name: run.ranks.reduce_sum(some) for name, some in zip(caches, shards, strict=True)}


@main_guard()
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    train, seed = config.operator.train, config.run.seed
    contexts = {name: cache.context(config) for name, cache in caches.items()}
    run = start_run(config, STAGE, caches)

    # ---- data: bases are fitted once and selected by validation rollouts; the tasks are distributed over
    # ranks
    def fit(name: str) -> tuple[dict, dict]:
        most = most_work_of(caches[name], config.operator, len(caches))
        return fit_base(caches[name], config.operator.base_steps, contexts[name], seed, run.device, most)

    bases = fit_once(run, "bases", {name: partial(fit, name) for name in caches}, "fitting the bases")
    for facts, _ in bases.values():
        run.print(describe_selection(facts))

    # ---- model
    run.seed_all()
    operator = build_operator(bases, config.operator.model, train.precision, solvers_of(config))
    operator = run.attach(warm_start(run, operator, config))

    trained = {name: cache for name, cache in caches.items() if is_worth_training(operator.heads[name].scale)}
    if exact := [name for name in caches if name not in trained]:
        run.print(
            f"{', '.join(exact)}: the base is exact up to rounding, so the network is not trained there"
        )
    if trained:
        windows = Windows(trained, config.task, config.operator, seed)
        losses = {name: partial(loss_of, operator, name) for name in trained}
    else:
        run.skip_loop("no task has a base that a network could improve")

    # ---- loop
    for step in run.steps():
        batch = windows.schedule.batch(step).shard(run.ranks.rank, run.ranks.world)
        loss = SplitLoss(partial(windows.read, operator.heads[batch.task], batch), losses[batch.task])
        run.update(loss, len(batch), batch.task)
        if run.is_due(train.validate_every):
            with run.ema_weights():
                found = validate(operator, caches, contexts, run, train.validate_trajectories)
            errors = {name: pooled(sums) for name, sums in found.items()}
            scores = scores_of(found, config.served("diffusion"))
            metrics = {f"{name}/{key}": value for name, of in errors.items() for key, value in of.items()}
            lines = [f"{name} {of['network']:.2e} (base {of['base']:.2e})" for name, of in errors.items()]
            run.validated({"score": scores[0], **metrics}, f"validation nRMSE {', '.join(lines)}")
            run.keep_best(*scores)

    # ---- finish: the network serves a task only if it helps by more than chance
    run.take_best()
    count, decided = SELECTION_FACTOR * train.validate_trajectories, {}
    decisions = [record for facts, _ in bases.values() for record in facts["decisions"]]
    found = validate(operator, caches, contexts, run, count)
    for name, cache in caches.items():
        groups = cache.trajectory[cache.rows_by_parameter("val", count)]
        decision = select_network(f"forecasts of {name}", found[name], groups, seed, cache.task.is_driven)
        decisions.append(decision.described())
        decided[name] = {"network_weight": float(decision.chosen == NETWORK)}
        run.print(decision)

    # how wrong forecasts by the selected weights are (`forecast(.., error=True)`)
    def numbers(name: str, cache: Cache, rows: Tensor) -> Tensor:
        some = rows if len(rows) else cache.split["val"][:1]  # fewer trajectories than processes
        weight = decided[name]["network_weight"]
        return measured(operator, cache, some, contexts[name], weight)[: len(rows)]

    for name, found_of in by_rank(run, caches, count, numbers, "measuring errors").items():
        cache, head = caches[name], operator.heads[name]
        groups = cache.trajectory[cache.rows_by_parameter("val", count)]
        shape = head.codec.num_channels, cache.num_frames - contexts[name]
        band = calibrated(found_of.cpu(), groups, *shape)
        decided[name] |= {"band": band and asdict(band), **laws_of(cache)}
    kinds = {name: facts["description"]["base"]["kind"] for name, (facts, _) in bases.items()}
    errors = {name: pooled(sums) for name, sums in found.items()}
    run.finish({"validation": errors, "bases": kinds}, operator.described(decided) | {"decisions": decisions})


if __name__ == "__main__":
    main()
