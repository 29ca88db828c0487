"""Training of a diffusion on residuals, shared by the stages diffusion and steady: fit of the scale, loss of
noised batches with its metrics, validation and the loop."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.common.device import send
from ups.config.load import to_dict
from ups.config.schema import DiffusionConfig, SteadyConfig
from ups.data.schedule import Schedule
from ups.generative.corrector import (
    STATISTICS_BATCHES,
    Corrector,
    CorrectorFacts,
    CorrectorHead,
    ResidualBatch,
    fit_head,
)
from ups.generative.diffusion import diffusion_loss, largest_mode, sample_angles
from ups.generative.law import ScaleMixture, one_scale
from ups.generative.residuals import Batches, Residuals, residual_schedule, sum_by_task, validation_batches
from ups.select import MIXTURE, Decision, select_law
from ups.training.fit import Fit, fit_once
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.training.ranks import Ranks
    from ups.training.run import Run

STREAM = "diffusion"  # of the random numbers
UNIFORM_BATCHES = 16  # behind the marginal mean and standard deviation


def corrector_with_scales(
    run: "Run",
    residuals: dict[str, Residuals],
    section: DiffusionConfig | SteadyConfig,
    limits: DiffusionConfig,
    seed: int,
) -> tuple[Corrector, dict[str, dict], list[Decision]]:
    """(corrector with an untrained diffusion, task -> statistics of `fit_head`, decisions on the laws of the
    residuals). A collective.

    The ranks of `run` fit the statistics, conditional mean and scale of the heads once. Raises as
    `check_statistics` for statistics beyond `limits`.
    """
    fits = fit_once(
        run,
        "scales",
        {name: partial(_fit_scale, source, section, seed) for name, source in residuals.items()},
        "fitting the scale of the residuals",
    )
    laws = {name: select_law(name, facts) for name, (facts, _) in fits.items()}
    run.seed_all()
    corrector = Corrector(
        {
            "model": to_dict(section.model),
            "precision": section.train.precision,
            "sampler_steps": section.sampler_steps,
            "tasks": [
                source.description | ({"is_localized": True} if is_mixture(laws[name]) else {})
                for name, source in residuals.items()
            ],
        }
    )
    for name, (facts, weights) in fits.items():
        corrector.heads[name].load_state_dict(weights, strict=False)
        check_statistics(name, facts, limits.min_residual_ratio, limits.max_whitened_std)
    scales = {name: facts for name, (facts, _) in fits.items()}
    run.print(
        "\n".join(
            f"residual of {name}: RMS {facts['rms_val']:.2e}, reserved / validation {facts['ratio']:.2f}, "
            f"whitened std {facts['std_train']:.2f} / {facts['std_val']:.2f}, largest mode "
            f"{facts['largest_std']:.1f}, excess kurtosis {facts['kurtosis']:.1f}"
            + (f"\n    {laws[name]}" if laws[name] else "")
            for name, facts in scales.items()
        )
    )
    return corrector, scales, [law for law in laws.values() if law]


def _fit_scale(residuals: Residuals, section: DiffusionConfig | SteadyConfig, seed: int) -> Fit:
    name, steps, size = residuals.name, section.scale_steps, section.train.batch_size
    torch.manual_seed(generator(seed, "scale", name).initial_seed())
    head = CorrectorHead(CorrectorFacts.read(residuals.description), section.model).to(residuals.device)
    schedule = residual_schedule({name: residuals}, "reserved", size, seed + 2)
    uniform = Schedule({name: residuals.windows("reserved")}, size, seed + 6)

    def batch_of(step: int) -> ResidualBatch:
        # the statistics (step < 0) use batches after those of the fit
        batch = schedule.batch(step if step >= 0 else steps - step)
        return residuals.batch(
            "reserved", batch.rows, batch.starts, generator(seed, "scale", name, step), step >= 0
        )

    residuals_uniform = [
        residuals.batch("reserved", batch.rows, batch.starts, generator(seed, "natural", name, i))[0]
        for i, batch in enumerate(map(uniform.batch, range(UNIFORM_BATCHES)))
    ]
    r = torch.cat(residuals_uniform).flatten(0, -2)
    head.marginal_mean.copy_(r.mean(0))
    head.marginal_std.copy_(r.std(0))
    held_out = validation_batches(residuals, seed, size)
    facts = fit_head(
        head,
        batch_of,
        held_out,
        steps,
        section.optim,
        (residuals.windows("reserved")[0], residuals.windows("val")[0]),
    )
    if head.waves is None:
        return facts, head.fitted
    found, weights = compare_laws(head, [batch_of(step) for step in range(STATISTICS_BATCHES)], held_out)
    return facts | found, head.fitted | weights


@torch.no_grad()
def compare_laws(
    head: CorrectorHead, training: Sequence[ResidualBatch], validation: Sequence[ResidualBatch]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """({"nll_waves", "nll_mixture"} of validation residuals, per number and without constants; the weights of
    the mixture with its largest mode, {} if it is not selected).

    waves: the conditional Gaussian of a fitted head with its covariance; mixture: two scales, whatever the
    condition.
    """

    def scaled(batches: Sequence[ResidualBatch]) -> Tensor:
        return torch.cat([(r - head.r_mean) / one_scale(head.r_std) for r, *_ in batches])

    mixture = ScaleMixture(head.facts.dim).to(head.r_std.device)
    mixture.fit(scaled(training))
    whitened = [head.whitened(*batch) for batch in validation]
    log_scale = torch.cat([condition.log_scale for _, condition in whitened]).mean()
    found = {
        "nll_waves": float(
            head.waves.negative_log_likelihood(torch.cat([r for r, _ in whitened])) + log_scale
        ),
        "nll_mixture": float(
            mixture.negative_log_likelihood(scaled(validation))
            + (one_scale(head.r_std) / head.r_std).log().mean()
        ),
    }
    if not is_mixture(select_law(head.name, found)):
        return found, {}
    weights = {f"mixture.{key}": value for key, value in mixture.state_dict().items()}
    return found, weights | {"largest_std": largest_mode(scaled(training))}


def is_mixture(law: Decision | None) -> bool:
    """Whether the residuals of a task are localized: a mixture of two scales is more likely than waves."""
    return law is not None and law.chosen == MIXTURE


def check_statistics(name: str, facts: dict[str, float], least: float, largest: float) -> None:
    """Raise ValueError for statistics of residuals with which a corrector would be overconfident.

    Either the training residuals are smaller than those of validation (the operator was trained there), by
    more than two standard errors, or the whitened residual does not have unit variance on validation.
    """
    is_small = facts["ratio"] < least and facts["ratio"] * (1 + 2 * facts["ratio_error"]) < max(1.0, least)
    if is_small or not math.isfinite(facts["ratio"]):
        raise ValueError(
            f"the operator's residuals of {name} where the corrector trains are {facts['ratio']:.3f} times "
            f"those of validation (standard error {facts['ratio_error']:.3f}); expected at least {least} "
            "(diffusion.min_residual_ratio): it would learn too small a spread. Reserve trajectories with "
            f"task.{name}.reserve and train the operator again."
        )
    error = 2 * facts["std_val_error"]
    # False if a statistic is NaN
    is_near = facts["std_val"] - error <= largest and facts["std_val"] + error >= 1 / largest
    if not (0.95 <= facts["std_train"] <= 1.05 and is_near):
        raise ValueError(
            f"the whitened residual of {name} has a standard deviation of "
            f"{facts['std_train']:.3f} in training and {facts['std_val']:.3f} (standard error "
            f"{facts['std_val_error']:.3f}) in validation; expected 0.95 to 1.05 and "
            f"{1 / largest:.2f} to {largest} (diffusion.max_whitened_std). Reserve more "
            f"trajectories (task.{name}.reserve) or lower scale_steps."
        )


def read(batches: Batches, corrector: Corrector, noises: int, step: int, part: slice) -> tuple:
    """What `loss_of` computes the loss of the rows `part` of this rank's shard of a batch from: each with
    `noises` noises and angles."""
    name, batch, within = batches.read(step, part)
    rng = generator(batches.seed, batches.stream, "angle", step)
    angle = sample_angles(batches.size * noises, rng, corrector.heads[name].largest)
    angle = angle.view(batches.size, noises)[within].flatten()
    noise = batches.noise(batch.r, within, step, noises)
    return name, noise, send(angle, noise.device), batch


def loss_of(
    corrector: Corrector, name: str, noise: Tensor, angle: Tensor, batch: ResidualBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of residuals; metrics: that loss, and the standard deviation of r~."""
    r, condition = corrector.heads[name].whitened(*batch)
    repeated = torch.arange(len(r), device=r.device).repeat_interleave(len(noise) // len(r))
    r, condition = r[repeated], condition.rows(repeated)
    loss = diffusion_loss(corrector.velocity(condition), r, condition.initial_state(noise), angle).mean()
    return loss, {name: loss, f"{name}/std": r.std()}


def validate(corrector: Corrector, shard: dict[str, list], seed: int, ranks: "Ranks") -> dict[str, float]:
    """Task -> mean validation loss, with the same noise and angles every time. shard: of `validation_shard`.
    A collective."""

    def sums_of(name: str, item: tuple[str, int, ResidualBatch]) -> Tensor:
        _, number, batch = item
        r, condition = corrector.heads[name].whitened(*batch)
        rng = generator(seed, STREAM, "validate", number)
        angle, noise = sample_angles(len(r), rng), torch.randn(r.shape, generator=rng)
        start = condition.initial_state(send(noise, r.device))
        loss = diffusion_loss(corrector.velocity(condition), r, start, send(angle, r.device)).double()
        return torch.stack([loss.sum(), loss.new_tensor(len(loss))])

    sums = sum_by_task(shard, sums_of, 2, ranks).tolist()
    return {name: total / count for name, (total, count) in zip(shard, sums, strict=True)}


def validate_and_keep(run: "Run", corrector: Corrector, shard: dict[str, list], seed: int) -> None:
    """Log the validation loss of the averaged weights, and keep these if their mean over tasks is the best so
    far. A collective."""
    with run.ema_weights():
        losses = validate(corrector, shard, seed, run.ranks)
    score = sum(losses.values()) / len(losses)
    run.validated(
        {"score": score, **losses},
        "validation loss " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()),
    )
    run.keep_best(score)
