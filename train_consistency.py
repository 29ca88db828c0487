"""Consistency student: the corrector's draw in one or two evaluations instead of 32.

    y = end of the teacher's ODE from x at angle (pi/2, or mid_angle on the way),   f = cos x - sin F
    loss = sqrt(mean |f(x, angle, c) - y|^2 + d^2) - d, half of it in units of the residual
    the last steps: 0.5 of it and 0.5 (CRPS + energy score) of one-evaluation draws, kept if validation gains

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/consistency/: state/, metrics.jsonl, model.safetensors, tuning.json, done.json.

    accelerate launch train_consistency.py
    python train_consistency.py --dry-run

Expected (configs/small.yaml): pair error (1 is another draw, 2 an unrelated one) below 0.3; the report
compares the draws.
"""

import math
from functools import partial

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.draws import ways_of
from ups.generative.judge import judge
from ups.generative.residuals import Batches, TransientResiduals, held_out_of
from ups.generative.student import (
    SolvedPool,
    endpoint_loss,
    ends_of,
    gate,
    metrics_of,
    pool_number,
    score_noise,
    scores,
    sizes_of,
    solve,
    student_of,
    validate,
    words_of,
)
from ups.models.operator import load_operator
from ups.training.ending import main_guard

STAGE, TUNING = "consistency", "tuning.json"


def loss_of(
    student: Corrector,
    batches: Batches,
    pool: SolvedPool,
    num_members: int,
    tuned_from: int,
    step: int,
    number: int,
    oldest: int,
    part: slice,
) -> tuple:
    """Loss and metrics of the rows `part` of the solved batch `number`: the pair loss; in the last steps,
    half of it and half of the members' scores."""
    solved = pool.get(number, part, oldest)
    name = solved.condition.name
    x, angle = solved.pairs(step, student.description["mid_angle"])
    pair = endpoint_loss(
        student.velocity(solved.condition), x, angle, solved.y, sizes_of(student, solved.condition)
    ).mean()
    if step < tuned_from:
        return pair, {f"{name}/pair": pair}
    noise = score_noise(solved.r, solved.within, batches.size, num_members, batches.seed, step)
    score = scores(student, batches.residuals[name], solved.condition, solved.r, noise).mean()
    return 0.5 * pair + 0.5 * score, {f"{name}/pair": pair, f"{name}/score": score}


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, seed = config.consistency, config.run.seed
    train = section.train
    tuned_from = max(1, round((1 - section.tune_fraction) * train.steps))

    # ---- data: batches of residuals, solved by the teacher
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    residuals = {name: TransientResiduals(operator, cache) for name, cache in caches.items()}
    teacher = load_corrector(config.run_dir / "diffusion", run.device, operator)
    held_out = held_out_of(
        residuals, seed, train.validate_trajectories, run.ranks, partial(ends_of, teacher, seed)
    )
    batches = Batches(residuals, train.batch_size, seed, STAGE, run.ranks, offset=3)
    pool = SolvedPool(partial(solve, teacher, batches, section.mid_angle))

    # ---- model: starts as the teacher
    run.seed_all()
    student = run.attach(warm_start(run, student_of(teacher, section.mid_angle), config))
    given = (student, batches, pool, section.members, tuned_from)
    run.probe(partial(loss_of, *given, train.steps - 1, batches.largest, 0), batches.share)  # as it is tuned

    # ---- loop
    before = None
    for step in run.steps():
        number, oldest = pool_number(step, section.pool_batches, seed)
        run.update(
            partial(loss_of, *given, step, number, oldest), batches.share, only=batches.schedule.task(number)
        )
        if run.is_due(train.validate_every) or run.step == tuned_from:
            with run.ema_weights():
                found = validate(student, residuals, held_out, run.ranks)
            ratio = None
            if run.step == tuned_from:
                run.agreed(
                    lambda now=found: run.is_main and run.folder.keep(TUNING, {"validation": now}),
                    f"writing {TUNING}",
                )
            elif run.step > tuned_from:
                before = (
                    before
                    or run.folder.find(
                        TUNING,
                        "the validation before tuning",
                        "Delete the stage's folder and run it again.",
                        validation=dict,
                    )["validation"]
                )
                ratio = gate(found, before)
            run.validated(metrics_of(found) | ({} if ratio is None else {"gate": ratio}), words_of(found))
            # as distilled, the last is the one to keep
            run.keep_if(run.step <= tuned_from) if ratio is None else run.keep_best(ratio)

    # ---- finish
    run.take_best()
    found = validate(student, residuals, held_out, run.ranks)
    contexts = {name: config.context(name) for name in caches}
    judged = judge(ways_of(STAGE, student), residuals, contexts, seed, run.ranks)
    run.finish({"validation": found, "is_tuned": math.isfinite(run.best_score)}, student.description | judged)


if __name__ == "__main__":
    main()
