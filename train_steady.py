"""Steady prior: the distribution of the solution of a steady equation given a partly observed coefficient.

    r = log u - log O(a_guess),  whitened as in train_diffusion.py
    conditions: the observed part of the coefficient a, and the best linear guess of the rest
    observations: all, nothing, random points, block averages, noise (ups/generative/observation.py)

The posterior of a is linear; for a coefficient with two values that of a network (cell_posterior.py), if it
is better on validation. With the linear one the diffusion starts at log O(a_s) - log O(a_guess) + the
operator's own error, with a_s a sample of the posterior of a, else at white noise.

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every steady task with reserved trajectories.
Writes: RUN/steady/: posteriors/, scales/, state/, metrics.jsonl, model.safetensors (with the posterior of a),
        done.json.

    accelerate launch train_steady.py
    python train_steady.py --dry-run

Expected (configs/small.yaml): the coefficient is Gaussian, so the diffusion adds nothing and is not selected.
The report compares the samples with exact ones.
"""

from functools import partial

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.fitting import STREAM, corrector_with_scales, loss_of, read, validate_and_keep
from ups.generative.prior_selection import fit_posteriors, select_method
from ups.generative.residuals import Batches, SteadyResiduals, validation_shard
from ups.models.operator import load_operator
from ups.training.ending import main_guard
from ups.training.strategies import SplitLoss

STAGE = "steady"


@main_guard()
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, train, seed = config.steady, config.steady.train, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    residuals = {name: SteadyResiduals(operator, cache) for name, cache in caches.items()}
    residuals, decisions = fit_posteriors(run, residuals, section, seed)
    batches = Batches(residuals, train.batch_size, seed, STREAM, run.ranks)

    # ---- model: conditional mean and scale of the residuals, fitted once; the diffusion learns the rest
    corrector, scales, _ = corrector_with_scales(run, residuals, section, config.diffusion, seed)
    for name, source in residuals.items():
        head = corrector.heads[name]
        head.guess.load_state_dict(source.posterior.state_dict())
        head.decide(start="pushed" if source.is_linear else "gaussian")
    corrector = run.attach(warm_start(run, corrector, config))
    held_out = validation_shard(residuals, seed, train.validate_trajectories, run.ranks)
    compute = partial(loss_of, corrector)

    # ---- loop
    for step in run.steps():
        loss = SplitLoss(partial(read, batches, corrector, section.noises, step), compute)
        run.update(loss, batches.local_size, only=batches.shard(step).task)
        if run.is_due(train.validate_every):
            validate_and_keep(run, corrector, held_out, seed)

    # ---- finish: the diffusion is used only if nothing simpler is as good on validation
    run.take_best()
    decisions += select_method(corrector, residuals, seed, train.validate_trajectories, run.ranks)
    run.print("\n".join(map(str, decisions)))
    run.finish(
        {"scales": scales, "validation_loss": run.best_score},
        corrector.description | {"decisions": [one.described() for one in decisions]},
    )


if __name__ == "__main__":
    main()
