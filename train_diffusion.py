"""Diffusion corrector: what the operator leaves, as a distribution given what it saw.

    r = z_next - O(z),  r~ = whitened r,  x = cos(angle) r~ + sin(angle) noise
    loss = mean |F(x, angle, c) - (cos(angle) noise - sin(angle) r~)|^2

Reads:  RUN/operator/ (finished), cache/TASK.h5 of every task with reserved trajectories, which the operator did not see.
Writes: RUN/diffusion/: scales/ (conditional mean and scale, fitted once), state/, metrics.jsonl, model.safetensors, done.json.

    accelerate launch --config_file accelerate_configs/cpu.yaml train_diffusion.py --config configs/small.yaml
    python train_diffusion.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): a loss well below 1 (1 is a Gaussian of the right scale); calibration is in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ups.chain import parents_of
from ups.config import Config, DiffusionConfig, SteadyConfig, parse_arguments
from ups.data.cache import open_cache
from ups.data.schedule import Batch
from ups.generative.corrector import Corrector
from ups.generative.diffusion import diffusion_loss, draw_angles
from ups.generative.residuals import Residuals, TransientResiduals, fit_heads, model_description, require_tasks, schedule_of, validation
from ups.models.operator import load_operator
from ups.seeds import generator
from ups.training.ending import main_guard
from ups.training.run import Run

STAGE = "diffusion"


def loss_of(corrector: Corrector, residuals: Residuals, seed: int, size: int, noises: int, batch: Batch, step: int,
            part: slice) -> tuple:
    """Loss and metrics of the rows `part` of this rank's share `batch` of a global batch of `size` rows, each under `noises`."""
    device = residuals.device
    r, tokens, facts = residuals.draw("reserved", batch.rows[part], batch.starts[part], generator(seed, STAGE, "augment", step),
                                      is_disturbed=True)
    condition = corrector.condition(batch.task, tokens, facts)
    r, largest = corrector.whiten(r, condition), float(corrector.heads[batch.task].largest_std)
    again = torch.arange(len(r), device=device).repeat_interleave(noises)
    r, condition, mine = r[again], condition.rows(again), batch.within(part)
    angle = draw_angles(size * noises, generator(seed, STAGE, "angle", step), largest).view(size, noises)
    noise = torch.randn(size, noises, *r.shape[1:], generator=generator(seed, STAGE, "noise", step))
    angle, noise = angle[mine].flatten().to(device), noise[mine].flatten(0, 1).to(device)
    loss = diffusion_loss(corrector.velocity(condition), r, noise, angle)
    bins = {"low": angle < 0.4, "middle": (angle >= 0.4) & (angle < 1.2), "high": angle >= 1.2}
    metrics = {f"{batch.task}/angle_{name}": loss[rows].mean() for name, rows in bins.items() if bool(rows.any())}
    return loss.mean(), {batch.task: loss.mean(), f"{batch.task}/std": r.detach().std(), **metrics}


@torch.no_grad()
def validate(corrector: Corrector, held_out: dict[str, list], seed: int, run: Run) -> dict[str, float]:
    """Task -> mean loss over fixed validation residuals, angles and noise. A collective."""
    def local() -> torch.Tensor:
        sums = torch.zeros(len(held_out), 2, dtype=torch.float64, device=run.device)
        for index, (name, batches) in enumerate(held_out.items()):
            for number in range(run.rank, len(batches), run.world):
                r, tokens, facts = batches[number]
                condition = corrector.condition(name, tokens, facts)
                draw = generator(seed, STAGE, "validate", number)
                angle, noise = draw_angles(len(r), draw), torch.randn(r.shape, generator=draw)
                loss = diffusion_loss(corrector.velocity(condition), corrector.whiten(r, condition), noise.to(run.device),
                                      angle.to(run.device))
                sums[index] += torch.stack([loss.double().sum(), torch.tensor(float(len(r)), device=run.device)])
        return sums

    sums = run.reduce_sum(run.agreed(local, "validating"))
    return {name: float(total / count) for name, (total, count) in zip(held_out, sums, strict=True)}


def train_corrector(config: Config, stage: str, settings: DiffusionConfig | SteadyConfig, names: list[str],
                    kind: Callable[..., Residuals]) -> None:
    """The stage itself, for time-dependent and for steady tasks; kind: what draws their residuals."""
    # ---- setup
    require_tasks(names, stage)
    caches = {name: open_cache(config, name) for name in names}
    run = Run.start(config, stage, settings.train, settings.optim, parents_of(config, stage, caches))
    if run.is_finished:
        return run.print(f"{run.directory} is finished and up to date: nothing to do")

    # ---- data: residuals of the frozen operator, and their conditional mean and scale
    operator = load_operator(config.run_dir / "operator", run.device)
    residuals = {name: kind(operator, cache, config, run.device) for name, cache in caches.items()}
    schedule = schedule_of(residuals, "reserved", settings.train.batch_size, config.run.seed)
    run.seed_all()
    description = model_description(residuals, settings.model, settings.train.precision, settings.sampler_steps)
    corrector = Corrector(description)
    scales = fit_heads(residuals, corrector, run, settings.scale_steps)
    for name, facts in scales.items():
        run.print(f"residual of {name}: RMS {facts['rms_val']:.2e}, reserved / validation {facts['ratio']:.2f}, whitened std "
                  f"{facts['std_train']:.2f} / {facts['std_val']:.2f}, largest mode {facts['largest_std']:.1f}, excess kurtosis "
                  f"{facts['kurtosis']:.1f}")

    # ---- model
    corrector = run.attach(corrector)
    held_out = {name: validation(r, config.run.seed, settings.train.validate_trajectories) for name, r in residuals.items()}

    batch = schedule.batch(schedule.step_of_largest({name: cache.frame_bytes for name, cache in caches.items()}))
    batch = batch.share(run.rank, run.world)
    run.probe(partial(loss_of, corrector, residuals[batch.task], config.run.seed, settings.train.batch_size, settings.noises,
                      batch, 0), len(batch))

    # ---- loop
    for step in run.steps():
        batch = schedule.batch(step).share(run.rank, run.world)
        run.update(partial(loss_of, corrector, residuals[batch.task], config.run.seed, settings.train.batch_size, settings.noises,
                           batch, step), len(batch))
        if run.is_due(settings.train.validate_every):
            with run.ema_weights():
                losses = validate(corrector, held_out, config.run.seed, run)
            score = sum(losses.values()) / len(losses)
            run.validated({"score": score, **losses})
            run.keep_best(score)
            run.print(f"step {run.step}: validation loss " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))

    # ---- finish
    run.finish({"scales": scales, "validation_loss": run.best_score}, description)


@main_guard
def main() -> None:
    config, is_dry_run = parse_arguments(__doc__)
    if is_dry_run:
        from ups.dry_run import print_corrector_plan
        print_corrector_plan(config, STAGE)
        raise SystemExit(0)
    train_corrector(config, STAGE, config.diffusion, config.corrected(is_steady=False), TransientResiduals)


if __name__ == "__main__":
    main()
