"""Consistency student: the corrector's draw in one or two evaluations instead of 32; with --rival, the same without a teacher.

    y = end of the teacher's ODE from x at angle,    loss = sqrt(mean |f(x, angle, c) - y|^2 + d^2) - d,   f = cos x - sin F
    the last steps add 0.5 (CRPS + energy score) of one-evaluation draws; they are kept only if validation gains by them

Reads:  RUN/diffusion/ and RUN/operator/ (finished), cache/TASK.h5, the reserved trajectories.
Writes: RUN/consistency/ (--rival: RUN/rival/): state/, metrics.jsonl, model.safetensors, tuning.json, done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_consistency.py --config configs/small.yaml
    python train_consistency.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): pair error (1 is another draw, 2 an unrelated one) below 0.3; the report compares the draws.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

import torch

from ups.config import Config, parse_arguments
from ups.data.cache import open_cache
from ups.data.schedule import Batch, Schedule
from ups.generative.consistency import SolvedPairs, consistency_loss, endpoint_loss, pool_number
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.diffusion import draw_angles
from ups.generative.residuals import Residuals, TransientResiduals, schedule_of
from ups.generative.students import STAGE, gate, prepare, scores, solve, validate
from ups.models.operator import load_operator
from ups.seeds import generator
from ups.training.run import Run, main_guard
from ups.training.stage import parents_of

RIVAL, TUNING = "rival", "tuning.json"
MAX_STAGE = 5         # of the bootstrapped alternative: the step is a half of the angle at first, 1/64 at the end


def loss_of(student: Corrector, teacher: Corrector, residuals: dict[str, Residuals], pairs: SolvedPairs, schedule: Schedule,
            config: Config, is_rival: bool, batch: Batch, number: int, oldest: int, step: int, part: slice) -> tuple:
    """Loss and metrics of the rows `part` of this rank's share of solved batch `number` (the rival's: of batch `number`)."""
    settings, seed = config.consistency, config.run.seed
    mine, source = batch.within(part), residuals[batch.task]
    is_tuned = is_rival or step >= tune_start(config)
    total, metrics = 0.0, {}
    if is_rival:
        draw = source.draw("reserved", batch.rows[part], batch.starts[part], generator(seed, RIVAL, "augment", number),
                           is_disturbed=True)
        condition = student.condition(batch.task, *draw[1:])
        r = student.whiten(draw[0], condition)
    else:
        condition, r, x, angle, y = pairs.get(number, part, oldest)
        if settings.method == "endpoint":
            pair = endpoint_loss(student.velocity(condition), x, angle, y).mean()
        else:
            velocity, stage = student.velocity(condition), MAX_STAGE * step // settings.train.steps
            angles = draw_angles(settings.train.batch_size, generator(seed, STAGE, "path", step))[mine].to(r.device)
            noise = torch.randn(settings.train.batch_size, *r.shape[1:], generator=generator(seed, STAGE, "fresh", step))
            pair = consistency_loss(velocity, velocity, teacher.velocity(condition), r, noise[mine].to(r.device), angles,
                                    1 - 0.5 ** (stage + 1)).mean()
        total, metrics = (0.5 if is_tuned else 1.0) * pair, {f"{batch.task}/pair": pair}
    if is_tuned:
        noise = torch.randn(settings.train.batch_size, settings.members, *r.shape[1:],
                            generator=generator(seed, STAGE, "members", step))[mine].to(r.device)
        score = scores(student, source, condition, r, noise).mean()
        total, metrics = total + (1.0 if is_rival else 0.5) * score, {**metrics, f"{batch.task}/score": score}
    return total, metrics


def tune_start(config: Config) -> int:
    """The first step of the tuning phase."""
    train = config.consistency.train
    return max(1, round((1 - config.consistency.tune_fraction) * train.steps))


@main_guard
def main() -> None:
    # ---- config
    is_rival = "--rival" in sys.argv[1:]
    sys.argv = [word for word in sys.argv if word != "--rival"]
    config, is_dry_run = parse_arguments(__doc__)
    section, names, stage = config.consistency, config.corrected(is_steady=False), RIVAL if is_rival else STAGE
    train = dataclasses.replace(section.train, steps=config.consistency.rival_steps) if is_rival else section.train
    if is_dry_run:
        from ups.dry_run import print_corrector_plan
        print_corrector_plan(config, stage, train, ["operator", "diffusion"])
        raise SystemExit(0)

    # ---- setup
    if not names:
        raise ValueError(f"no task for stage {stage} has reserved trajectories; expected task.TASK.reserve above 0 for at least "
                         f"one of data.tasks. Set it and train the operator again.")
    caches = {name: open_cache(config, name) for name in names}
    run = Run.start(config, stage, train, section.optim, parents_of(config, stage, caches), section=STAGE)
    if run.is_finished:
        return run.print(f"{run.directory} is finished and up to date: nothing to do")

    # ---- data
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: TransientResiduals(operator, cache, config, run.device) for name, cache in caches.items()}
    schedule = schedule_of(residuals, "reserved", train.batch_size, config.run.seed + 3)
    teacher = load_corrector(config.run_dir / "diffusion", run.device)
    held_out = prepare(teacher, residuals, config, run)
    pairs = SolvedPairs(partial(solve, teacher, residuals, schedule, config, (run.rank, run.world)))

    # ---- model: starts as the teacher
    run.seed_all()
    student = Corrector(teacher.description)
    student.load_state_dict(teacher.state_dict())
    student = run.attach(student)

    number = schedule.step_of_largest({name: cache.frame_bytes for name, cache in caches.items()})
    batch = schedule.batch(number).share(run.rank, run.world)
    run.probe(partial(loss_of, student, teacher, residuals, pairs, schedule, config, is_rival, batch, number, 0, train.steps - 1),
              len(batch))   # in the tuning phase

    # ---- loop
    before = None
    for step in run.steps():
        number, oldest = (step, step) if is_rival else pool_number(step, section.pool_batches, config.run.seed)
        batch = schedule.batch(number).share(run.rank, run.world)
        run.update(partial(loss_of, student, teacher, residuals, pairs, schedule, config, is_rival, batch, number, oldest, step),
                   len(batch))
        is_turn = not is_rival and run.step == tune_start(config)
        if run.is_due(train.validate_every) or is_turn:
            with run.ema_weights():
                found = validate(student, residuals, held_out, run)
            if is_turn:
                run.agreed(lambda now=found: run.is_main and run.folder.keep(TUNING, {"validation": now}),
                           f"writing {TUNING}")
            metrics = {f"{name}/{key}": value for name, entry in found.items() for key, value in entry.items()}
            if is_rival:
                score = sum(entry["crps"] + entry["energy"] for entry in found.values())
                run.validated({"score": score, **metrics})
                run.keep_best(score)
            elif run.step <= tune_start(config):   # the student as distilled: any of these, the last best
                run.validated(metrics)
                run.keep_if(True)
            else:
                before = before or run.folder.find(TUNING, "the validation before tuning", "Delete the stage's folder and run it "
                                                   "again.", validation=dict)["validation"]
                ratio = gate(found, before)
                run.validated({"gate": ratio, **metrics})
                run.keep_best(ratio) if ratio < 1.0 else run.keep_if(False)
            run.print(f"step {run.step}: " + ", ".join(f"{name} pair {e['pair']:.3f} CRPS {e['crps']:.4f} spread/skill "
                                                       f"{e['spread_skill']:.2f}" for name, e in found.items()))

    # ---- finish
    run.take_best()
    found = validate(student, residuals, held_out, run)
    run.finish({"validation": found, "is_tuned": not is_rival and run.best_score < 1.0}, teacher.description)


if __name__ == "__main__":
    main()
