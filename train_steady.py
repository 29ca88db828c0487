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

from ups.generative.fitting import scaled_corrector, train
from ups.generative.residuals import SteadyResiduals
from ups.models.operator import load_operator
from ups.setup import opened, started
from ups.training.ranks import main_guard

STAGE = "steady"


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = opened(__doc__, STAGE)
    run = started(config, STAGE, caches)
    section, seed = config.steady, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: SteadyResiduals(operator, cache) for name, cache in caches.items()}

    # ---- model: the conditional mean and scale of the residuals, fitted once
    corrector, scales = scaled_corrector(run, residuals, section, config.diffusion, seed)
    for name, source in residuals.items():
        corrector.heads[name].guess.load_state_dict(source.linear.state_dict())

    # ---- loop, finish: the diffusion of what they leave
    train(run, corrector, residuals, section, seed, scales)


if __name__ == "__main__":
    main()
