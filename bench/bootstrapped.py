"""Consistency distillation (Song et al. 2023, arXiv 2303.01469; the annealed step of Geng et al. 2024, arXiv 2406.14548):
what the endpoint distillation of train_consistency.py is measured against. A student learns its own answer one teacher step on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ups.generative.diffusion import Velocity, column, denoise, diffuse
from ups.generative.student import pseudo_huber


def consistency_loss(student: Velocity, frozen: Velocity, teacher: Velocity, r: Tensor, noise: Tensor, angle: Tensor,
                     ratio: float) -> Tensor:
    """Consistency distillation: f(x, angle) towards the stop-gradient f(x', ratio * angle), x' one teacher midpoint step on.

    frozen: the student without gradient. ratio in [0, 1): 0 is the teacher's own midpoint step to the end; annealed
    towards 1 in training. Per row (batch,).
    """
    x = diffuse(r, noise, angle)
    with torch.no_grad():
        step = angle * (1.0 - ratio)
        middle = x - column(step / 2, x) * teacher(x, angle).float()
        nearer = x - column(step, x) * teacher(middle, angle - step / 2).float()
        target = denoise(frozen, nearer, angle - step) if ratio > 0 else nearer
    return pseudo_huber(denoise(student, x, angle) - target)
