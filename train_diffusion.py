"""Diffusion corrector: the distribution of the operator's residual given the operator's inputs.

    r = z_next - O(z),  r~ = whitened r,  x = cos(angle) r~ + sin(angle) noise
    F = linear part of a Gaussian with the spectrum of the residuals + network, in units of the rest
    loss = mean |F(x, angle, c) - (cos(angle) noise - sin(angle) r~)|^2

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every task with reserved trajectories, on which the
operator was not trained.
Writes: RUN/diffusion/: scales/ (conditional mean and scale, fitted once), state/, metrics.jsonl,
model.safetensors, done.json.

    accelerate launch train_diffusion.py
    python train_diffusion.py --dry-run

Expected (configs/small.yaml): a loss well below 1 (white noise of the right scale has 1; training starts at
the Gaussian with the residuals' spectrum). Calibration is in the report. The stage ends with the scores of
its samplers on validation, by which the default sampler is selected.
"""

from functools import partial

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.fitting import STREAM, corrector_with_scales, loss_of, read, validate_and_keep
from ups.generative.residuals import Batches, TransientResiduals, validation_shard
from ups.generative.sampling import samplers_of
from ups.generative.validation import validate_samplers
from ups.models.operator import load_operator
from ups.training.ending import main_guard
from ups.training.strategies import SplitLoss

STAGE = "diffusion"


@main_guard()
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, train, seed = config.diffusion, config.diffusion.train, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    perturbed = config.diffusion.perturbed
    residuals = {name: TransientResiduals(operator, cache, perturbed) for name, cache in caches.items()}
    batches = Batches(residuals, train.batch_size, seed, STREAM, run.ranks)

    # ---- model: conditional mean and scale of the residuals, fitted once; the diffusion learns the rest
    corrector, scales, laws = corrector_with_scales(run, residuals, section, config.diffusion, seed)
    corrector = run.attach(warm_start(run, corrector, config))
    held_out = validation_shard(residuals, seed, train.validate_trajectories, run.ranks)
    compute = partial(loss_of, corrector)

    # ---- loop
    for step in run.steps():
        loss = SplitLoss(partial(read, batches, corrector, section.noises, step), compute)
        run.update(loss, batches.local_size, only=batches.shard(step).task)
        if run.is_due(train.validate_every):
            validate_and_keep(run, corrector, held_out, seed)

    # ---- finish
    run.take_best()
    contexts = {name: cache.context(config) for name, cache in caches.items()}
    crps, decisions = validate_samplers(samplers_of(STAGE, corrector), residuals, contexts, seed, run.ranks)
    run.print("\n".join(map(str, decisions)))
    run.finish(
        {"scales": scales, "validation_loss": run.best_score},
        corrector.description | crps | {"decisions": [one.described() for one in (*laws, *decisions)]},
    )


if __name__ == "__main__":
    main()
