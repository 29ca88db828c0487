"""Consistency student: the corrector's samples in one or two network evaluations instead of 32.

    y = end of the teacher's ODE from x at angle (pi/2, or mid_angle on the way),   f = cos x - sin F
    loss = sqrt(mean |f(x, angle, c) - y|^2 + d^2) - d, half of it in units of the residual
    in the last steps: 0.5 loss + 0.5 (CRPS + energy score) of one-evaluation samples, kept if validation
    improves

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/consistency/: state/, metrics.jsonl, model.safetensors, tuning.json, done.json.

    accelerate launch train_consistency.py
    python train_consistency.py --dry-run

Expected (configs/small.yaml): a pair error below 0.3 (a constant has 1, an independent sample 2). The report
compares the samples.
"""

from functools import partial

from torch import Tensor

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.corrector import Condition, Corrector, load_corrector
from ups.generative.residuals import Batches, Residuals, TransientResiduals, validation_shard
from ups.generative.sampling import samplers_of
from ups.generative.student import (
    SolvedPool,
    endpoint_loss,
    ensemble_scores,
    flat_metrics,
    format_metrics,
    latent_scales,
    score_noise,
    student_of,
    teacher_endpoints,
    validate,
)
from ups.generative.validation import validate_samplers
from ups.models.operator import load_operator
from ups.select import TUNED, select_tuning, tuning_ratio
from ups.training.ending import main_guard
from ups.training.run import Run
from ups.training.strategies import SplitLoss

STAGE, TUNING = "consistency", "tuning.json"


def read(
    student: Corrector, pool: SolvedPool, num_members: int | None, step: int, number: int, part: slice
) -> tuple:
    """What `loss_of` computes the loss of the rows `part` of the solved batch `number` from. num_members: of
    the scored ensembles, None before tuning."""
    solved, batches, noise = pool.get(number, part), pool.batches, None
    if num_members is not None:
        noise = score_noise(solved.r, solved.within, batches.size, num_members, batches.seed, step)
    return solved.condition, solved.r, *solved.pairs(step, student.mid_angle), solved.y, noise


def loss_of(
    student: Corrector,
    residuals: dict[str, Residuals],
    condition: Condition,
    r: Tensor,
    x: Tensor,
    angle: Tensor,
    y: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, dict]:
    """Loss and metrics of pairs: the pair loss; with noise of an ensemble, half of it plus half of the
    ensemble's scores."""
    scales, name = latent_scales(student, condition), condition.name
    pair = endpoint_loss(student.velocity(condition), x, angle, y, scales).mean()
    if noise is None:
        return pair, {f"{name}/pair": pair}
    score = ensemble_scores(student, residuals[name], condition, r, noise).mean()
    return 0.5 * pair + 0.5 * score, {f"{name}/pair": pair, f"{name}/score": score}


def write_untuned(run: Run, metrics: dict[str, dict]) -> None:
    """Store the validation metrics before tuning, for this process and for a resumed one. A collective."""
    run.agreed(
        lambda: run.ranks.is_main and run.folder.keep(TUNING, {"validation": metrics}), f"writing {TUNING}"
    )


def read_untuned(run: Run) -> dict[str, dict]:
    """The validation metrics before tuning."""
    what, fix = "the validation before tuning", "Delete the stage's folder and run it again."
    return run.folder.find(TUNING, what, fix, validation=dict)["validation"]


@main_guard()
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, train, seed = config.consistency, config.consistency.train, config.run.seed
    tuned_from = max(1, round((1 - section.tune_fraction) * train.steps))

    # ---- data: batches of residuals, solved by the teacher
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    perturbed = config.diffusion.perturbed
    residuals = {name: TransientResiduals(operator, cache, perturbed) for name, cache in caches.items()}
    teacher = load_corrector(config.run_dir / "diffusion", run.device, operator)
    endpoints = partial(teacher_endpoints, teacher, seed)
    held_out = validation_shard(residuals, seed, train.validate_trajectories, run.ranks, endpoints)
    batches = Batches(residuals, train.batch_size, seed, STAGE, run.ranks, offset=3)
    pool = SolvedPool(teacher, batches, section.mid_angle, section.pool_batches)

    # ---- model: starts as the teacher
    run.seed_all()
    student = run.attach(warm_start(run, student_of(teacher, section.mid_angle), config))
    compute = partial(loss_of, student, residuals)

    # ---- loop
    for step in run.steps():
        number = pool.number(step)
        members = section.members if step >= tuned_from else None
        loss = SplitLoss(partial(read, student, pool, members, step, number), compute)
        run.update(loss, batches.local_size, only=batches.shard(number).task)
        if run.is_due(train.validate_every) or run.step == tuned_from:
            with run.ema_weights():
                metrics = validate(student, residuals, held_out, run.ranks)
            if run.step == tuned_from:
                write_untuned(run, metrics)
            ratio = tuning_ratio(metrics, read_untuned(run)) if run.step > tuned_from else None
            tuning = {} if ratio is None else {"tuning_ratio": ratio}
            run.validated(flat_metrics(metrics) | tuning, format_metrics(metrics))
            # before tuning the last weights are kept; tuned ones only if they are accepted
            run.keep_if(run.step <= tuned_from) if ratio is None else run.keep_best(ratio)

    # ---- finish
    run.take_best()
    metrics = validate(student, residuals, held_out, run.ranks)
    contexts = {name: cache.context(config) for name, cache in caches.items()}
    crps, decisions = validate_samplers(samplers_of(STAGE, student), residuals, contexts, seed, run.ranks)
    decisions = [select_tuning(run.best_score, seed), *decisions]
    run.print("\n".join(map(str, decisions)))
    run.finish(
        {"validation": metrics, "is_tuned": decisions[0].chosen == TUNED},
        student.description | crps | {"decisions": [one.described() for one in decisions]},
    )


if __name__ == "__main__":
    main()
