"""Consistency distillation (Song et al. 2023, arXiv 2303.01469; the annealed step of Geng et al. 2024, arXiv
2406.14548): what the endpoint distillation of train_consistency.py is measured against. A student learns its
own answer one teacher step on.

    python -m bench.bootstrapped --config configs/small.yaml --steps 840

Needs a run's operator and corrector (`make diffusion`). Both students start as that teacher and learn from
the same solved batches for as many steps, without a tuning phase. Prints, on validation, pair error (1 is
another draw, 2 an unrelated one), CRPS and spread/skill of one evaluation. On configs/small.yaml after 840
steps: pair error 0.23 against 0.70, CRPS 0.153 against 0.167 (docs/results.md), so the endpoint stays."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.config import DEFAULT_OVERLAY, Config, load_config
from ups.data.cache import open_cache
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.diffusion import Velocity, column, denoise, diffuse, draw_angles
from ups.generative.residuals import Batches, TransientResiduals, held_out_of
from ups.generative.student import (
    NUM_TURNS,
    Solved,
    SolvedPool,
    endpoint_loss,
    ends_of,
    pool_number,
    pseudo_huber,
    sizes_of,
    solve,
    student_of,
    validate,
    words_of,
)
from ups.models.operator import load_operator
from ups.training.optim import EMA, build_optimizer, fit, learning_rate

MAX_STAGE = 5  # the step is a half of the angle at first, 1/64 at the end


def consistency_loss(
    student: Velocity,
    frozen: Velocity,
    teacher: Velocity,
    r: Tensor,
    noise: Tensor,
    angle: Tensor,
    ratio: float,
) -> Tensor:
    """Consistency distillation: f(x, angle) towards the stop-gradient f(x', ratio * angle), x' one teacher
    midpoint step on.

    frozen: the student without gradient. ratio in [0, 1): 0 is the teacher's own midpoint step to the end;
    annealed towards 1 in training. Per row (batch,)."""
    x = diffuse(r, noise, angle)
    with torch.no_grad():
        step = angle * (1.0 - ratio)
        middle = x - column(step / 2, x) * teacher(x, angle).float()
        nearer = x - column(step, x) * teacher(middle, angle - step / 2).float()
        target = denoise(frozen, nearer, angle - step) if ratio > 0 else nearer
    return pseudo_huber(denoise(student, x, angle) - target)


def endpoint(
    student: Corrector, teacher: Corrector, solved: Solved, share: float, draws: torch.Generator
) -> Tensor:
    """The loss of train_consistency.py, as it is before the tuning phase."""
    step = int(torch.randint(NUM_TURNS, (), generator=draws))
    x, angle = solved.pairs(step, student.description["mid_angle"])
    return endpoint_loss(
        student.velocity(solved.condition), x, angle, solved.y, sizes_of(student, solved.condition)
    ).mean()


def bootstrapped(
    student: Corrector, teacher: Corrector, solved: Solved, share: float, draws: torch.Generator
) -> Tensor:
    """`consistency_loss` on fresh noise after `share` of the steps, which shortens the step."""
    velocity, r = student.velocity(solved.condition), solved.r
    angle, noise = draw_angles(len(r), draws), torch.randn(r.shape, generator=draws)
    return consistency_loss(
        velocity,
        velocity,
        teacher.velocity(solved.condition),
        r,
        noise.to(r.device),
        angle.to(r.device),
        1 - 0.5 ** (int(MAX_STAGE * share) + 1),
    ).mean()


def compare(config: Config, steps: int) -> dict[str, dict[str, dict]]:
    """method -> task -> what `validate` finds after `steps` steps."""
    section, seed, size = config.consistency, config.run.seed, config.consistency.train.batch_size
    operator = load_operator(config.run_dir / "operator")
    residuals = {
        name: TransientResiduals(operator, open_cache(config, name)) for name in config.served("consistency")
    }
    teacher = load_corrector(config.run_dir / "diffusion")
    ranks = SimpleNamespace(
        rank=0,
        world=1,
        device=torch.device("cpu"),
        agreed=lambda function, doing: function(),
        reduce_sum=lambda tensor: tensor,
    )
    held_out = held_out_of(
        residuals, seed, section.train.validate_trajectories, ranks, partial(ends_of, teacher, seed)
    )
    batches = Batches(residuals, size, seed, "consistency", ranks, offset=3)

    def trained(loss: Callable[..., Tensor]) -> Corrector:
        student = student_of(teacher, section.mid_angle)
        pool = SolvedPool(partial(solve, teacher, batches, section.mid_angle))
        ema = EMA(student, section.optim.ema_decay)

        def loss_of(step: int) -> Tensor:
            number, oldest = pool_number(step, section.pool_batches, seed)
            return loss(
                student,
                teacher,
                pool.get(number, slice(0, size), oldest),
                step / steps,
                generator(seed, "fresh", step),
            )

        fit(
            student,
            loss_of,
            range(steps),
            build_optimizer(student, section.optim),
            partial(learning_rate, total_steps=steps, optim=section.optim),
            section.optim.clip_norm,
            ema,
        )
        ema.write(ema.averages)
        return student

    return {
        loss.__name__: validate(trained(loss), residuals, held_out, ranks)
        for loss in (endpoint, bootstrapped)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=DEFAULT_OVERLAY)
    parser.add_argument("--steps", type=int, default=840)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    for method, found in compare(load_config(args.config, args.overrides), args.steps).items():
        print(f"{method:12s} {words_of(found)}", flush=True)


if __name__ == "__main__":
    main()
