"""Scoring: a generative network trained by proper scores of its samples, without a teacher.

    loss = CRPS + energy score of a few one-evaluation samples against the operator's residual
    start = the corrector's weights

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/scoring/: state/, metrics.jsonl, model.safetensors, done.json. A report includes it if
evaluate.stages (make: STAGES) names it.

    accelerate launch train_scoring.py
    python train_scoring.py --dry-run

Expected (configs/small.yaml): CRPS and energy score some 3 % above the student's at equal time. The report
compares the samples.
"""

from functools import partial

from torch import Tensor

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.corrector import Corrector, ResidualBatch, load_corrector
from ups.generative.residuals import Batches, Residuals, TransientResiduals, validation_shard
from ups.generative.sampling import samplers_of
from ups.generative.student import (
    as_map,
    ensemble_scores,
    flat_metrics,
    format_metrics,
    score_noise,
    teacher_endpoints,
    validate,
)
from ups.generative.validation import validate_samplers
from ups.models.operator import load_operator
from ups.training.ending import main_guard
from ups.training.strategies import SplitLoss

STAGE, STREAM = "scoring", "rival"  # of the random numbers: the name of the stage in earlier versions


def read(batches: Batches, num_members: int, step: int, part: slice) -> tuple:
    """What `loss_of` computes the loss of the rows `part` of this rank's shard of a batch from."""
    name, batch, within = batches.read(step, part)
    return name, score_noise(batch.r, within, batches.size, num_members, batches.seed, step), batch


def loss_of(
    network: Corrector, residuals: dict[str, Residuals], name: str, noise: Tensor, batch: ResidualBatch
) -> tuple[Tensor, dict]:
    """Loss and metrics of residuals; noise (batch, members, ..): of the scored samples."""
    r, condition = network.heads[name].whitened(*batch)
    score = ensemble_scores(network, residuals[name], condition, r, noise).mean()
    return score, {f"{name}/score": score}


@main_guard()
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, train, seed = config.scoring, config.scoring.train, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    perturbed = config.diffusion.perturbed
    residuals = {name: TransientResiduals(operator, cache, perturbed) for name, cache in caches.items()}
    batches = Batches(residuals, train.batch_size, seed, STREAM, run.ranks, offset=3)
    corrector = load_corrector(config.run_dir / "diffusion", run.device, operator)
    endpoints = partial(teacher_endpoints, corrector, seed)
    held_out = validation_shard(residuals, seed, train.validate_trajectories, run.ranks, endpoints)

    # ---- model
    run.seed_all()
    network = run.attach(warm_start(run, as_map(corrector), config))
    compute = partial(loss_of, network, residuals)

    # ---- loop
    for step in run.steps():
        loss = SplitLoss(partial(read, batches, section.members, step), compute)
        run.update(loss, batches.local_size, only=batches.shard(step).task)
        if run.is_due(train.validate_every):
            with run.ema_weights():
                metrics = validate(network, residuals, held_out, run.ranks)
            score = sum(entry["crps"] + entry["energy"] for entry in metrics.values())
            run.validated({"score": score, **flat_metrics(metrics)}, format_metrics(metrics))
            run.keep_best(score)

    # ---- finish
    run.take_best()
    contexts = {name: cache.context(config) for name, cache in caches.items()}
    crps, decisions = validate_samplers(samplers_of(STAGE, network), residuals, contexts, seed, run.ranks)
    run.print("\n".join(map(str, decisions)))
    metrics = validate(network, residuals, held_out, run.ranks)
    run.finish(
        {"validation": metrics},
        network.description | crps | {"decisions": [one.described() for one in decisions]},
    )


if __name__ == "__main__":
    main()
