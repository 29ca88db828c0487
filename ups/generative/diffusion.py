"""Diffusion in angles: TrigFlow (Lu and Song 2024, arXiv 2410.11081), which is EDM (Karras et al. 2022) with
sigma_data = 1.

    x(angle) = cos(angle) r + sin(angle) noise,      angle in [0, pi/2], tan(angle) = EDM's sigma
    velocity F(x, angle) ~ dx/dangle = cos(angle) noise - sin(angle) r
    E[r | x] = cos(angle) x - sin(angle) F

r has unit variance (ups/generative/corrector.py whitens it). Then the probability-flow ODE dx/dangle = F of a
unit Gaussian is zero, so a solver's step errors nearly vanish where the residual is nearly Gaussian: the
midpoint rule on a uniform grid of 16 steps keeps the spread of N(0, s^2) to 2 % for s from 0.1 to 10, where
Euler or Heun in sigma lose or add 5 to 12 % (measured). A velocity is any callable
(x (batch, ...), angle (batch,)) -> (batch, ...), conditions bound beforehand.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ups.common.progress import beat

Velocity = Callable[[Tensor, Tensor], Tensor]

NOISE = math.pi / 2  # the angle of pure noise
# of ln tan(angle) in training: 95 % between tan = 0.04 and 23, past the largest mode of most residuals
LOG_TAN_STD = 1.6
# largest residual mode, in standard deviations, that this spread covers; larger ones shift its mean
REACH = 5.0


def column(angle: Tensor, like: Tensor) -> Tensor:
    """(batch,) shaped to broadcast against `like` (batch, ...)."""
    return angle.view(-1, *[1] * (like.ndim - 1))


def draw_angles(count: int, generator: torch.Generator | None = None, largest_std: float = 1.0) -> Tensor:
    """`count` training angles (count,), float32: ln tan(angle) normal, one from each of `count` equal shares
    of its mass.

    largest_std: square root of the largest eigenvalue of the residual's covariance; above REACH the mean of
    ln tan moves up by the logarithm of the excess, so that the largest mode, too, is seen drowned in noise.
    """
    share = (
        torch.arange(count, dtype=torch.float64) + torch.rand(count, generator=generator, dtype=torch.float64)
    ) / count
    normal = math.sqrt(2) * torch.erfinv((2 * share - 1).clamp(-1 + 1e-12, 1 - 1e-12))
    log_tan = math.log(max(largest_std / REACH, 1.0)) + LOG_TAN_STD * normal
    return log_tan.exp().atan().float()[torch.randperm(count, generator=generator)]


def diffuse(r: Tensor, noise: Tensor, angle: Tensor) -> Tensor:
    """x = cos(angle) r + sin(angle) noise; r, noise (batch, ...), angle (batch,)."""
    angle = column(angle, r)
    return angle.cos() * r + angle.sin() * noise


def diffusion_loss(velocity: Velocity, r: Tensor, noise: Tensor, angle: Tensor) -> Tensor:
    """Mean over elements of (F(x, angle) - (cos(angle) noise - sin(angle) r))^2, one value per row (batch,),
    float32.

    Unit weight on F is EDM's weighting (Karras et al. 2022, table 1). Zero knowledge gives about 1 at every
    angle.
    """
    at = column(angle, r)
    target = at.cos() * noise - at.sin() * r
    return (velocity(diffuse(r, noise, angle), angle).float() - target).square().flatten(1).mean(1)


def denoise(velocity: Velocity, x: Tensor, angle: Tensor) -> Tensor:
    """cos(angle) x - sin(angle) F(x, angle): E[r | x] of a denoiser, the end of the ODE of a consistency
    student."""
    at = column(angle, x)
    return at.cos() * x - at.sin() * velocity(x, angle).float()


@torch.no_grad()
def path(velocity: Velocity, x: Tensor, num_steps: int, start: Tensor | float = NOISE) -> Iterator[Tensor]:
    """The states at num_steps + 1 angles, `start` first and 0 last, of dx/dangle = F from x (batch, ...) at
    `start` ((batch,) or one): midpoint rule, uniform angles.

    2 num_steps evaluations. The state stays in float32 (float64 if x is). Angles in (0, pi/2].
    """
    start = torch.as_tensor(start, dtype=x.dtype, device=x.device).expand(x.shape[0])
    step = start / num_steps
    yield x
    for i in range(num_steps):
        beat()
        angle = start - i * step
        middle = x - column(step / 2, x) * velocity(x, angle).to(x.dtype)
        x = x - column(step, x) * velocity(middle, angle - step / 2).to(x.dtype)
        yield x


def sample(velocity: Velocity, x: Tensor, num_steps: int, start: Tensor | float = NOISE) -> Tensor:
    """The end of `path`."""
    for state in path(velocity, x, num_steps, start):
        x = state
    return x
