"""What the stages that fit a diffusion to residuals share: the fit of their scale, the loss of noised
batches, what is logged of it, and validation."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.common.transfer import send
from ups.config import DiffusionConfig, SteadyConfig, to_dict
from ups.data.schedule import Schedule
from ups.generative.corrector import Corrector, CorrectorHead, Drawn, fit_head
from ups.generative.diffusion import diffusion_loss, draw_angles
from ups.generative.residuals import Batches, Noised, Residuals, schedule_of, summed, validation
from ups.training.fit import Fit, fit_once

STREAM = "diffusion"  # of the random numbers
BINS = {"low": (0.0, 0.4), "middle": (0.4, 1.2), "high": (1.2, 2.0)}  # of angles, in the log
NATURAL_BATCHES = 16  # from which the marginal spread is taken


def scaled_corrector(
    run: Any,
    residuals: dict[str, Residuals],
    section: DiffusionConfig | SteadyConfig,
    limits: DiffusionConfig,
    seed: int,
) -> tuple[Corrector, dict[str, dict]]:
    """A corrector whose heads have their statistics, conditional mean and scale, fitted once by the ranks of
    `run`, its diffusion not yet trained; and task -> the statistics of `fit_head`. A collective.

    Raises as `refuse` for statistics beyond `limits`.
    """
    run.seed_all()
    corrector = Corrector(
        {
            "model": to_dict(section.model),
            "precision": section.train.precision,
            "sampler_steps": section.sampler_steps,
            "tasks": [source.description for source in residuals.values()],
        }
    )
    fits = fit_once(
        run,
        "scales",
        {name: partial(_fit_scale, source, section, seed) for name, source in residuals.items()},
        "fitting the scale of the residuals",
    )
    for name, (facts, weights) in fits.items():
        corrector.heads[name].load_state_dict(weights, strict=False)
        refuse(name, facts, limits.min_residual_ratio, limits.max_whitened_std)
    scales = {name: facts for name, (facts, _) in fits.items()}
    run.print(
        "\n".join(
            f"residual of {name}: RMS {facts['rms_val']:.2e}, reserved / validation {facts['ratio']:.2f}, "
            f"whitened std {facts['std_train']:.2f} / {facts['std_val']:.2f}, largest mode "
            f"{facts['largest_std']:.1f}, excess kurtosis {facts['kurtosis']:.1f}"
            for name, facts in scales.items()
        )
    )
    return corrector, scales


def _fit_scale(residuals: Residuals, section: DiffusionConfig | SteadyConfig, seed: int) -> Fit:
    name, steps, size = residuals.name, section.scale_steps, section.train.batch_size
    torch.manual_seed(generator(seed, "scale", name).initial_seed())
    head = CorrectorHead(residuals.description, section.model).to(residuals.device)
    schedule = schedule_of({name: residuals}, "reserved", size, seed + 2)
    anywhere = Schedule({name: residuals.windows("reserved")}, size, seed + 6)

    def draw(step: int) -> Drawn:
        # statistics: batches after those that are fitted
        batch = schedule.batch(step if step >= 0 else steps - step)
        return residuals.draw(
            "reserved", batch.rows, batch.starts, generator(seed, "scale", name, step), step >= 0
        )

    natural = [
        residuals.draw("reserved", batch.rows, batch.starts, generator(seed, "natural", name, i))[0]
        for i, batch in enumerate(map(anywhere.batch, range(NATURAL_BATCHES)))
    ]
    r = torch.cat(natural).flatten(0, -2)
    head.marginal_mean.copy_(r.mean(0))
    head.marginal_std.copy_(r.std(0))
    facts = fit_head(
        head,
        draw,
        validation(residuals, seed, size),
        steps,
        section.optim,
        (residuals.windows("reserved")[0], residuals.windows("val")[0]),
    )
    return facts, head.fitted


def refuse(name: str, facts: dict[str, float], least: float, largest: float) -> None:
    """Raise ValueError for residual statistics that would make a corrector dishonest: the operator is better
    where the corrector trains (it was trained there), or whitening does not carry over to validation."""
    # and so by more than chance: two standard errors below no difference
    is_small = facts["ratio"] < least and facts["ratio"] * (1 + 2 * facts["ratio_error"]) < max(1.0, least)
    if is_small or not math.isfinite(facts["ratio"]):
        raise ValueError(
            f"the operator's residuals of {name} where the corrector trains are "
            f"{facts['ratio']:.3f} times those of validation (standard error "
            f"{facts['ratio_error']:.3f}); expected at least {least} "
            "(diffusion.min_residual_ratio): it would learn too small a spread. Reserve "
            f"trajectories with task.{name}.reserve and train the operator again."
        )
    error = 2 * facts["std_val_error"]
    # false for NaN
    is_near = facts["std_val"] - error <= largest and facts["std_val"] + error >= 1 / largest
    if not (0.95 <= facts["std_train"] <= 1.05 and is_near):
        raise ValueError(
            f"the whitened residual of {name} has a standard deviation of "
            f"{facts['std_train']:.3f} in training and {facts['std_val']:.3f} (standard error "
            f"{facts['std_val_error']:.3f}) in validation; expected 0.95 to 1.05 and "
            f"{1 / largest:.2f} to {largest} (diffusion.max_whitened_std). Reserve more "
            f"trajectories (task.{name}.reserve) or lower scale_steps."
        )


def loss_of(
    corrector: Corrector, batches: Batches, noises: int, step: int, part: slice
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of the rows `part` of this rank's share of a batch: the loss also by bins of angles,
    and the size of r~."""
    given = batches.noised(corrector, step, part, noises)
    name, loss = (
        given.condition.name,
        diffusion_loss(
            corrector.velocity(given.condition), given.r, given.noise, send(given.angle, given.r.device)
        ),
    )
    bins = {
        key: torch.nonzero((low <= given.angle) & (given.angle < high))[:, 0]
        for key, (low, high) in BINS.items()
    }  # rows, in main memory as the angles are
    return loss.mean(), {
        name: loss.mean(),
        f"{name}/std": given.r.std(),
        **{
            f"{name}/angle_{key}": loss[send(rows, loss.device)].mean()
            for key, rows in bins.items()
            if len(rows)
        },
    }


def noise_of(corrector: Corrector, seed: int, name: str, number: int, drawn: Drawn) -> Noised:
    """A batch of validation under the noise and angles that it always has."""
    r, condition = corrector.heads[name].shown(*drawn)
    draw = generator(seed, STREAM, "validate", number)
    angle, noise = draw_angles(len(r), draw), torch.randn(r.shape, generator=draw)
    return Noised(
        condition, r, condition.begin(send(noise, r.device)), send(angle, r.device), slice(0, len(r))
    )


def validate(corrector: Corrector, held_out: dict[str, list], seed: int, ranks: Any) -> dict[str, float]:
    """Task -> mean loss over what is held out. A collective."""

    def sums_of(name: str, batch: tuple) -> Tensor:
        given = noise_of(corrector, seed, *batch)
        loss = diffusion_loss(corrector.velocity(given.condition), given.r, given.noise, given.angle).double()
        return torch.stack([loss.sum(), loss.new_tensor(len(loss))])

    return {
        name: total / count
        for name, (total, count) in zip(held_out, summed(held_out, sums_of, 2, ranks), strict=True)
    }
