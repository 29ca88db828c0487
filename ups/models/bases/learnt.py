"""Bases whose few weights are fitted by gradient steps, and trained further beside the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from ups.models.bases.base import Base, Samples, Window
from ups.progress import note
from ups.training.fit import fit


class Learnt(Base):
    """LEARNING_RATE of Adam; BATCH windows a step, so that every base may see as many."""

    is_learnt = True
    lr_factor = 0.2   # how fast it moves while the network learns what it leaves; at 1 it wanders
    LEARNING_RATE: float
    BATCH: int

    def prepare(self, samples: Samples, first: Window) -> None:
        """What is set before the first step."""

    def unit(self, u: Tensor, u_next: Tensor) -> Tensor:
        """What an error is relative to: the change."""
        return u_next - u[:, -1]

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Iterator[tuple[str, Self]]:
        torch.manual_seed(samples.seed)
        base, num_steps = cls.build(settings).to(samples.device), samples.budget // cls.BATCH
        batches = samples.batches(num_steps * cls.BATCH, cls.BATCH)
        base.prepare(samples, batches[0]())
        base.descend(lambda step: batches[step](), num_steps, samples.name)
        yield cls.kind, base

    def descend(self, draw: Callable[[int], Window], num_steps: int, name: str = "") -> None:
        """Adam on relative errors of one call, with linear warm-up and decay, or until a gradient is not
        finite.

        Validation judges what that leaves.
        """
        def loss_of(step: int) -> Tensor:
            u, known, u_next = draw(step)
            axes = tuple(range(1, u_next.ndim))
            error = (self(u, known) - u_next).square().mean(axes)
            return (error / self.unit(u, u_next).square().mean(axes).clamp_min(1e-8)).add(1e-12).sqrt().mean()

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / num_steps))

        def steps() -> Iterator[int]:
            for step in range(num_steps):
                yield step
                note(f"{name}: {self.kind}, step {step + 1} of {num_steps}")

        optimizer = torch.optim.Adam([{"params": list(self.parameters()), "base_lr": self.LEARNING_RATE}])
        fit(self, loss_of, steps(), optimizer, rate, clip_norm=1.0)
