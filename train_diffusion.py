"""Diffusion corrector: what the operator leaves, as a distribution given what it saw.

    r = z_next - O(z),  r~ = whitened r,  x = cos(angle) r~ + sin(angle) noise
    F = its linear part, of a Gaussian with the waves of residuals + the network's in units of the rest
    loss = mean |F(x, angle, c) - (cos(angle) noise - sin(angle) r~)|^2

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every task with reserved trajectories, which the operator
did not see.
Writes: RUN/diffusion/: scales/ (conditional mean and scale, fitted once), state/, metrics.jsonl,
model.safetensors, done.json.

    accelerate launch train_diffusion.py
    python train_diffusion.py --dry-run

Expected (configs/small.yaml): a loss well below 1 (1 is white noise of the right scale; it begins as a
Gaussian with the residuals' waves); calibration is in the report. At the end its ensembles are judged on
validation, as those of the next stages: the best one serves.
"""

from functools import partial

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.draws import ways_of
from ups.generative.fitting import STREAM, loss_of, scaled_corrector, validate
from ups.generative.judge import judge
from ups.generative.residuals import Batches, TransientResiduals, held_out_of
from ups.models.operator import load_operator
from ups.training.ending import main_guard

STAGE = "diffusion"


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, train, seed = config.diffusion, config.diffusion.train, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    residuals = {name: TransientResiduals(operator, cache) for name, cache in caches.items()}
    batches = Batches(residuals, train.batch_size, seed, STREAM, run.ranks)

    # ---- model: the conditional mean and scale of the residuals, fitted once, and the diffusion of what they
    # leave
    corrector, scales = scaled_corrector(run, residuals, section, config.diffusion, seed)
    corrector = run.attach(warm_start(run, corrector, config))
    held_out = held_out_of(residuals, seed, train.validate_trajectories, run.ranks, lambda *batch: batch)
    run.probe(partial(loss_of, corrector, batches, section.noises, batches.largest), batches.share)

    # ---- loop
    for step in run.steps():
        run.update(
            partial(loss_of, corrector, batches, section.noises, step),
            batches.share,
            only=batches.schedule.task(step),
        )
        if run.is_due(train.validate_every):
            with run.ema_weights():
                losses = validate(corrector, held_out, seed, run.ranks)
            score = sum(losses.values()) / len(losses)
            run.validated(
                {"score": score, **losses},
                "validation loss " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()),
            )
            run.keep_best(score)

    # ---- finish
    run.take_best()
    contexts = {name: config.context(name) for name in caches}
    judged = judge(ways_of(STAGE, corrector), residuals, contexts, seed, run.ranks)
    run.finish({"scales": scales, "validation_loss": run.best_score}, corrector.description | judged)


if __name__ == "__main__":
    main()
