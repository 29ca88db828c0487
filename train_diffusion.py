"""Diffusion corrector: what the operator leaves, as a distribution given what it saw.

    r = z_next - O(z),  r~ = whitened r,  x = cos(angle) r~ + sin(angle) noise
    loss = mean |F(x, angle, c) - (cos(angle) noise - sin(angle) r~)|^2

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every task with reserved trajectories, which the operator
did not see.
Writes: RUN/diffusion/: scales/ (conditional mean and scale, fitted once), state/, metrics.jsonl,
model.safetensors, done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_diffusion.py --config configs/small.yaml
    python train_diffusion.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): a loss well below 1 (1 is a Gaussian of the right scale); calibration is in the
report.
"""

from ups.generative.fitting import scaled_corrector, train
from ups.generative.residuals import TransientResiduals
from ups.models.operator import load_operator
from ups.setup import opened, started
from ups.training.ranks import main_guard

STAGE = "diffusion"


@main_guard
def main() -> None:
    # ---- config, setup
    config, caches = opened(__doc__, STAGE)
    run = started(config, STAGE, caches)
    section, seed = config.diffusion, config.run.seed

    # ---- data: residuals of the frozen operator
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: TransientResiduals(operator, cache) for name, cache in caches.items()}

    # ---- model: the conditional mean and scale of the residuals, fitted once
    corrector, scales = scaled_corrector(run, residuals, section, config.diffusion, seed)

    # ---- loop, finish: the diffusion of what they leave
    train(run, corrector, residuals, section, seed, scales)


if __name__ == "__main__":
    main()
