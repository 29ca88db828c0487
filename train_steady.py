"""Steady prior: the solution of a steady equation given a partly observed coefficient, as a distribution.

    r = log u - log O(a_guess),  whitened and diffused as in train_diffusion.py
    given: what was seen of the coefficient a, and the linear guess of the rest
    observations: all, nothing, random points, block averages, noise (ups/generative/observation.py)

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every steady task with reserved trajectories.
Writes: RUN/steady/: scales/, state/, metrics.jsonl, model.safetensors, done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_steady.py --config configs/small.yaml
    python train_steady.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): the report compares its draws with exact ones.
"""

from __future__ import annotations

from train_diffusion import train_corrector
from ups.config import parse_arguments
from ups.generative.steady import SteadyResiduals
from ups.training.ending import main_guard

STAGE = "steady"


@main_guard
def main() -> None:
    config, is_dry_run = parse_arguments(__doc__)
    if is_dry_run:
        from ups.dry_run import print_corrector_plan
        print_corrector_plan(config, STAGE)
        raise SystemExit(0)
    train_corrector(config, STAGE, config.steady, config.corrected(is_steady=True), SteadyResiduals)


if __name__ == "__main__":
    main()
