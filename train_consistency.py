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

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ups.chain import parents_of
from ups.config.load import parse_arguments
from ups.data.cache import open_cache
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.residuals import Residuals, TransientResiduals, require_tasks, schedule_of
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
    validate,
    words_of,
)
from ups.models.operator import load_operator
from ups.training.ending import main_guard
from ups.training.run import Run

STAGE, TUNING = "consistency", "tuning.json"


class Tuning(NamedTuple):
    """What the last steps add: residuals whose fields are scored, noise (batch, M, ...) of the members."""

    source: Residuals
    noise: Tensor


def loss_of(student: Corrector, solved: Solved, tuning: Tuning | None) -> tuple:
    """Loss and metrics of solved rows: the pair loss; with tuning half of it, and half of the scores."""
    name = solved.condition.name
    pair = endpoint_loss(student.velocity(solved.condition), solved.x, solved.angle, solved.y).mean()
    if tuning is None:
        return pair, {f"{name}/pair": pair}
    score = scores(student, tuning.source, solved.condition, solved.r, tuning.noise).mean()
    return 0.5 * pair + 0.5 * score, {f"{name}/pair": pair, f"{name}/score": score}


@main_guard
def main() -> None:
    # ---- config
    config, is_dry_run = parse_arguments(__doc__)
    section, names, seed = config.consistency, config.corrected(is_steady=False), config.run.seed
    train, size = section.train, section.train.batch_size
    tuned_from = max(1, round((1 - section.tune_fraction) * train.steps))
    if is_dry_run:
        from ups.dry_run import print_corrector_plan
        print_corrector_plan(config, STAGE)
        raise SystemExit(0)

    # ---- setup
    require_tasks(names, STAGE)
    caches = {name: open_cache(config, name) for name in names}
    run = Run.start(config, STAGE, train, section.optim, parents_of(config, STAGE, caches))
    if run.is_finished:
        return run.print(f"{run.directory} is finished and up to date: nothing to do")

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
    student = Corrector(teacher.description | {"mid_angle": section.mid_angle})
    student.load_state_dict(teacher.state_dict())
    student = run.attach(student)

    def loss_at(step: int, number: int, oldest: int, part: slice) -> tuple:
        solved, tuning = pool.get(number, part, oldest), None
        if step >= tuned_from:
            noise = score_noise(solved.r, solved.within, size, section.members, seed, step)
            tuning = Tuning(residuals[solved.condition.name], noise)
        return loss_of(student, solved, tuning)

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
