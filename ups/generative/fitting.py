"""What the stages that fit a diffusion to residuals share: noised batches, what is logged of them, and
validation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ups.data.schedule import Batch
from ups.generative.corrector import Condition, Corrector
from ups.generative.diffusion import diffusion_loss, draw_angles
from ups.generative.residuals import Ranks, Residuals
from ups.seeds import generator

STREAM = "diffusion"   # of the random numbers
BINS = {"low": (0.0, 0.4), "middle": (0.4, 1.2), "high": (1.2, 2.0)}   # of angles, in the log


class Noised(NamedTuple):
    """Residuals r~, every one several times, under their conditions, with noise and an angle each."""

    condition: Condition
    r: Tensor
    noise: Tensor
    angle: Tensor


def noised(corrector: Corrector, source: Residuals, batch: Batch, part: slice, size: int, noises: int,
           seed: int, step: int) -> Noised:
    """The rows `part` of a share `batch` of a global batch of `size` rows, each under `noises`."""
    r, tokens, facts = source.draw("reserved", batch.rows[part], batch.starts[part],
                                   generator(seed, STREAM, "augment", step), is_disturbed=True)
    condition = corrector.condition(batch.task, tokens, facts)
    r, largest = corrector.whiten(r, condition), float(corrector.heads[batch.task].largest_std)
    again, mine = torch.arange(len(r), device=r.device).repeat_interleave(noises), batch.within(part)
    angle = draw_angles(size * noises, generator(seed, STREAM, "angle", step), largest).view(size, noises)
    noise = torch.randn(size, noises, *r.shape[1:], generator=generator(seed, STREAM, "noise", step))
    return Noised(condition.rows(again), r[again], noise[mine].flatten(0, 1).to(r.device),
                  angle[mine].flatten().to(r.device))


def metrics_of(loss: Tensor, given: Noised) -> dict[str, Tensor]:
    """Of the losses (batch,): their mean, that of every bin of angles, and the size of r~."""
    name, angle = given.condition.name, given.angle
    bins = {key: (low <= angle) & (angle < high) for key, (low, high) in BINS.items()}
    return {name: loss.mean(), f"{name}/std": given.r.std(),
            **{f"{name}/angle_{key}": loss[rows].mean() for key, rows in bins.items() if bool(rows.any())}}


@torch.no_grad()
def validate(corrector: Corrector, held_out: dict[str, list], seed: int, ranks: Ranks) -> dict[str, float]:
    """Task -> mean loss over fixed validation residuals (`residuals.validation`), angles and noise. A
    collective."""
    def local() -> Tensor:
        sums = torch.zeros(len(held_out), 2, dtype=torch.float64, device=ranks.device)
        for index, (name, batches) in enumerate(held_out.items()):
            for number in range(ranks.rank, len(batches), ranks.world):
                r, tokens, facts = batches[number]
                condition = corrector.condition(name, tokens, facts)
                draw = generator(seed, STREAM, "validate", number)
                angle, noise = draw_angles(len(r), draw), torch.randn(r.shape, generator=draw)
                loss = diffusion_loss(corrector.velocity(condition), corrector.whiten(r, condition),
                                      noise.to(r.device), angle.to(r.device))
                sums[index] += torch.stack([loss.double().sum(),
                                            torch.tensor(float(len(r)), device=r.device)])
        return sums

    sums = ranks.reduce_sum(ranks.agreed(local, "validating"))
    return {name: float(total / count) for name, (total, count) in zip(held_out, sums, strict=True)}


def words_of(name: str, facts: dict[str, float]) -> str:
    """The statistics of a scale, in a line."""
    return (f"residual of {name}: RMS {facts['rms_val']:.2e}, reserved / validation {facts['ratio']:.2f}, "
            f"whitened std {facts['std_train']:.2f} / {facts['std_val']:.2f}, largest mode "
            f"{facts['largest_std']:.1f}, excess kurtosis {facts['kurtosis']:.1f}")
