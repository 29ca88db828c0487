"""Consistency student: the corrector's draw in one or two evaluations instead of 32.

    y = end of the teacher's ODE from x at angle,   f = cos x - sin F
    loss = sqrt(mean |f(x, angle, c) - y|^2 + d^2) - d
    the last steps: 0.5 of it and 0.5 (CRPS + energy score) of one-evaluation draws, kept if validation gains

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/consistency/: state/, metrics.jsonl, model.safetensors, tuning.json, done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml \\
      train_consistency.py --config configs/small.yaml
    python train_consistency.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): pair error (1 is another draw, 2 an unrelated one) below 0.3; the report
compares the draws.
"""

import math
from functools import partial

from torch import Tensor

from ups.generative.corrector import Corrector, load_corrector
from ups.generative.residuals import Residuals, TransientResiduals, schedule_of
from ups.generative.student import (
    Solved,
    SolvedPool,
    endpoint_loss,
    gate,
    held_out_of,
    metrics_of,
    pool_number,
    score_noise,
    scores,
    solve,
    twin_of,
    validate,
    words_of,
)
from ups.models.operator import load_operator
from ups.setup import opened, started
from ups.training.ranks import main_guard

STAGE, TUNING = "consistency", "tuning.json"


def loss_of(student: Corrector, source: Residuals, solved: Solved, noise: Tensor | None) -> tuple:
    """Loss and metrics of solved rows: the pair loss; in the last steps, with noise (batch, M, ...), half
    of it and half of their scores."""
    name = solved.condition.name
    pair = endpoint_loss(student.velocity(solved.condition), solved.x, solved.angle, solved.y).mean()
    if noise is None:
        return pair, {f"{name}/pair": pair}
    score = scores(student, source, solved.condition, solved.r, noise).mean()
    return 0.5 * pair + 0.5 * score, {f"{name}/pair": pair, f"{name}/score": score}


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = opened(__doc__, STAGE)
    run = started(config, STAGE, caches)
    section, seed = config.consistency, config.run.seed
    train, size = section.train, section.train.batch_size
    tuned_from = max(1, round((1 - section.tune_fraction) * train.steps))

    # ---- data: batches of residuals, solved by the teacher
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: TransientResiduals(operator, cache) for name, cache in caches.items()}
    teacher = load_corrector(config.run_dir / "diffusion", run.device)
    held_out = held_out_of(teacher, residuals, train.validate_trajectories, seed, run.ranks)
    schedule = schedule_of(residuals, "reserved", size, seed + 3)

    def solved_part(number: int, part: slice) -> Solved:
        batch = schedule.batch(number).share(run.rank, run.world)
        return solve(teacher, residuals[batch.task], batch, part, size, seed, number)

    pool = SolvedPool(solved_part)

    # ---- model: starts as the teacher
    run.seed_all()
    student = run.attach(twin_of(teacher, mid_angle=section.mid_angle))

    def loss_at(step: int, number: int, oldest: int, part: slice) -> tuple:
        solved, noise = pool.get(number, part, oldest), None
        if step >= tuned_from:
            noise = score_noise(solved.r, solved.within, size, section.members, seed, step)
        return loss_of(student, residuals[solved.condition.name], solved, noise)

    number = schedule.step_of_largest({name: cache.frame_bytes for name, cache in caches.items()})
    share = len(schedule.batch(number).share(run.rank, run.world))
    run.probe(partial(loss_at, train.steps - 1, number, 0), share)   # in the tuning phase

    # ---- loop
    before = None
    for step in run.steps():
        run.update(partial(loss_at, step, *pool_number(step, section.pool_batches, seed)), share)
        if not (run.is_due(train.validate_every) or run.step == tuned_from):
            continue
        with run.ema_weights():
            found = validate(student, residuals, held_out, run.ranks)
        if run.step == tuned_from:
            run.agreed(lambda now=found: run.is_main and run.folder.keep(TUNING, {"validation": now}),
                       f"writing {TUNING}")
        if run.step <= tuned_from:   # as distilled: the last is the one to keep
            run.validated(metrics_of(found))
            run.keep_if(True)
        else:
            before = before or run.folder.find(TUNING, "the validation before tuning",
                                               "Delete the stage's folder and run it "
                                               "again.", validation=dict)["validation"]
            ratio = gate(found, before)
            run.validated(metrics_of(found) | ({} if ratio is None else {"gate": ratio}))
            run.keep_if(False) if ratio is None else run.keep_best(ratio)
        run.print(f"step {run.step}: {words_of(found)}")

    # ---- finish
    run.take_best()
    found = validate(student, residuals, held_out, run.ranks)
    run.finish({"validation": found, "is_tuned": math.isfinite(run.best_score)}, student.description)


if __name__ == "__main__":
    main()
