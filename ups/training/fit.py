"""The gradient loop for what is fitted outside a stage's own: bases, a Gaussian, the models of the bench.

It runs in one process, takes seconds to minutes and starts again when it was interrupted. A stage's steps go
through `Run.update` instead, which agrees with the other ranks and can resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ups.training.optim import EMA


def fit(module: nn.Module, loss_of: Callable[[int], Tensor], steps: Iterable[int],
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float], clip_norm: float, ema: EMA | None = None) -> int | None:
    """Take a gradient step on the scalar loss_of(step) for each of `steps`; None when all were taken.

    optimizer: its groups have base_lr, and a step's learning rate is rate(step) times that. Gradients are
    clipped to `clip_norm` in all; `ema` follows the weights. Stops before the first step whose gradient is
    not finite and returns it.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    stopped = None
    for step in steps:
        gradients = torch.autograd.grad(loss_of(step), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if not math.isfinite(float(nn.utils.clip_grad_norm_(parameters, clip_norm))):
            stopped = step
            break
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate(step)
        optimizer.step()
        if ema is not None:
            ema.update()
    module.zero_grad()
    return stopped
