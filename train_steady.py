"""Steady prior: the solution of a steady equation given a partly observed coefficient, as a distribution.

    r = log u - log O(a_guess),  whitened as in train_diffusion.py, its diffusion beginning at
    log O(a_s) - log O(a_guess) + the operator's own error, a_s a draw of the linear posterior of a, or at
    white noise, whichever is nearer on validation
    given: what was seen of the coefficient a, and the linear guess of the rest
    observations: all, nothing, random points, block averages, noise (ups/generative/observation.py)

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every steady task with reserved trajectories.
Writes: RUN/steady/: scales/, state/, metrics.jsonl, model.safetensors (with the linear posterior),
done.json.

    accelerate launch train_steady.py
    python train_steady.py --dry-run

Expected (configs/small.yaml): the coefficient is Gaussian, so the diffusion adds nothing and does not serve;
the report compares the draws with exact ones.
"""

from functools import partial

from ups.commands.stage_setup import load_inputs, start_run, warm_start
from ups.common.user_solver import solvers_of
from ups.generative.fitting import STREAM, loss_of, scaled_corrector, validate
from ups.generative.residuals import Batches, SteadyResiduals, held_out_of
from ups.generative.selection import choose_draws, choose_starts
from ups.models.operator import load_operator
from ups.training.ending import main_guard

STAGE = "steady"


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = load_inputs(__doc__, STAGE)
    run = start_run(config, STAGE, caches)
    section, train, seed = config.steady, config.steady.train, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device, solvers_of(config))
    residuals = {name: SteadyResiduals(operator, cache) for name, cache in caches.items()}
    batches = Batches(residuals, train.batch_size, seed, STREAM, run.ranks)

    # ---- model: the conditional mean and scale of the residuals, fitted once, and the diffusion of what they
    # leave
    corrector, scales = scaled_corrector(run, residuals, section, config.diffusion, seed)
    for name, source in residuals.items():
        corrector.heads[name].guess.load_state_dict(source.linear.state_dict())
    choose_starts(corrector.to(run.device), residuals, seed, train.validate_trajectories, run.ranks)
    run.print(
        "\n".join(
            f"{name}: the diffusion begins at {head.description['start']} draws"
            for name, head in corrector.heads.items()
        )
    )
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

    # ---- finish: draws are made by the diffusion, or by something simpler, whichever is best on validation
    run.take_best()
    choice = choose_draws(corrector, residuals, seed, train.validate_trajectories, run.ranks)
    run.print(
        "\n".join(
            f"{name}: draws by {corrector.heads[name].by}, energy score on validation over that "
            "of the linear posterior through the operator: "
            + ", ".join(f"{by} {score:.3f}" for by, score in scores.items())
            for name, scores in choice.items()
        )
    )
    run.finish({"scales": scales, "validation_loss": run.best_score, "choice": choice}, corrector.description)


if __name__ == "__main__":
    main()
