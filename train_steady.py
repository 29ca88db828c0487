"""Steady prior: the solution of a steady equation given a partly observed coefficient, as a distribution.

    r = log u - log O(a_guess),  whitened and diffused as in train_diffusion.py
    given: what was seen of the coefficient a, and the linear guess of the rest
    observations: all, nothing, random points, block averages, noise (ups/generative/observation.py)

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every steady task with reserved trajectories.
Writes: RUN/steady/: scales/, state/, metrics.jsonl, model.safetensors (with the linear guess), done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_steady.py --config configs/small.yaml
    python train_steady.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): the report compares its draws with exact ones.
"""

from __future__ import annotations

from functools import partial

from ups.chain import parents_of
from ups.config import parse_arguments
from ups.data.cache import open_cache
from ups.data.schedule import Batch
from ups.generative.corrector import Corrector
from ups.generative.diffusion import diffusion_loss
from ups.generative.fitting import Noised, metrics_of, noised, validate, words_of
from ups.generative.residuals import (
    corrector_of,
    put_scales,
    require_tasks,
    scale_fits,
    schedule_of,
    validation,
)
from ups.generative.steady import SteadyResiduals
from ups.models.operator import load_operator
from ups.training.ending import main_guard
from ups.training.fitted import fit_once
from ups.training.run import Run

STAGE = "steady"


def loss_of(corrector: Corrector, given: Noised) -> tuple:
    """Loss and metrics of noised residuals."""
    loss = diffusion_loss(corrector.velocity(given.condition), given.r, given.noise, given.angle)
    return loss.mean(), metrics_of(loss, given)


@main_guard
def main() -> None:
    # ---- config
    config, is_dry_run = parse_arguments(__doc__)
    section, names, seed = config.steady, config.corrected(is_steady=True), config.run.seed
    train, size = section.train, section.train.batch_size
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

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: SteadyResiduals(operator, cache) for name, cache in caches.items()}
    schedule = schedule_of(residuals, "reserved", size, seed)

    # ---- model: the conditional mean and scale of the residuals, fitted once, and the diffusion of what they
    # leave
    run.seed_all()
    corrector = corrector_of(residuals, section.model, train.precision, section.sampler_steps)
    fits = fit_once(run, "scales", scale_fits(residuals, section, seed), "fitting the scale of the residuals")
    scales = put_scales(corrector, fits, config.diffusion.min_residual_ratio,
                        config.diffusion.max_whitened_std)
    for name, source in residuals.items():
        corrector.heads[name].guess.load_state_dict(source.linear.state_dict())
    run.print("\n".join(words_of(name, facts) for name, facts in scales.items()))
    corrector = run.attach(corrector)
    held_out = {name: validation(source, seed, train.validate_trajectories)
                for name, source in residuals.items()}

    def loss_at(step: int, batch: Batch, part: slice) -> tuple:
        return loss_of(corrector,
                       noised(corrector, residuals[batch.task], batch, part, size, section.noises, seed,
                              step))

    batch = schedule.batch(schedule.step_of_largest({name: cache.frame_bytes
                                                     for name, cache in caches.items()}))
    batch = batch.share(run.rank, run.world)
    run.probe(partial(loss_at, 0, batch), len(batch))

    # ---- loop
    for step in run.steps():
        batch = schedule.batch(step).share(run.rank, run.world)
        run.update(partial(loss_at, step, batch), len(batch))
        if run.is_due(train.validate_every):
            with run.ema_weights():
                losses = validate(corrector, held_out, seed, run.ranks)
            score = sum(losses.values()) / len(losses)
            run.validated({"score": score, **losses})
            run.keep_best(score)
            run.print(f"step {run.step}: validation loss "
                      + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))

    # ---- finish
    run.finish({"scales": scales, "validation_loss": run.best_score}, corrector.description)


if __name__ == "__main__":
    main()
