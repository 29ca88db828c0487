"""Diffusion in angles: TrigFlow (Lu and Song 2024, arXiv 2410.11081), which is EDM (Karras et al. 2022) with
sigma_data = 1.

    x(angle) = cos(angle) r + sin(angle) noise,      angle in [0, pi/2], tan(angle) = EDM's sigma
    velocity F(x, angle) ~ dx/dangle = cos(angle) noise - sin(angle) r
    E[r | x] = cos(angle) x - sin(angle) F

r has unit variance (ups/generative/corrector.py whitens it). For a unit Gaussian the velocity of the
probability-flow ODE dx/dangle = F is then zero, so a solver's step errors nearly vanish where the residual is
nearly Gaussian: the midpoint rule on a uniform grid of 16 steps keeps the spread of N(0, s^2) to 2 % for s
from 0.1 to 10, where Euler or Heun in sigma lose or add 5 to 12 % (measured). A
velocity is any callable (x (batch, ...), angle (batch,)) -> (batch, ...) with its conditions bound.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ups.common.progress import beat

Velocity = Callable[[Tensor, Tensor], Tensor]

PURE_NOISE = math.pi / 2  # the angle of pure noise
# Of ln tan(angle) in training: 95 % of tan lie in 0.04 to 23, beyond the largest mode of most residuals.
LOG_TAN_STD = 1.6
SMALLEST_SINE = 1e-3  # that a map divides by; the sine is 0 at the residual itself
ITERATIONS = 20  # for the largest mode
REACH = 5.0  # largest residual mode, in standard deviations, that this covers; larger ones shift the mean


def column(angle: Tensor, like: Tensor) -> Tensor:
    """(batch,) shaped to broadcast against `like` (batch, ...)."""
    return angle.view(-1, *[1] * (like.ndim - 1))


def sample_angles(count: int, generator: torch.Generator | None = None, largest_std: float = 1.0) -> Tensor:
    """`count` training angles (count,), float32, with ln tan(angle) normal; stratified: one in each of
    `count` quantiles.

    largest_std: square root of the largest eigenvalue of the residual's covariance. Above REACH the mean of
    ln tan grows by the logarithm of the excess, so that training includes angles where noise hides the
    largest mode.
    """
    jitter = torch.rand(count, generator=generator, dtype=torch.float64)
    quantile = (torch.arange(count, dtype=torch.float64) + jitter) / count
    normal = math.sqrt(2) * torch.erfinv((2 * quantile - 1).clamp(-1 + 1e-12, 1 - 1e-12))
    log_tan = math.log(max(largest_std / REACH, 1.0)) + LOG_TAN_STD * normal
    return log_tan.exp().atan().float()[torch.randperm(count, generator=generator)]


def largest_mode(r: Tensor) -> Tensor:
    """Square root of the largest eigenvalue of the second moment of r (n, ...), by power iteration on the
    samples; a scalar."""
    flat = r.flatten(1)
    v = flat[flat.square().sum(1).argmax()]  # the largest sample has a component along every large mode
    for _ in range(ITERATIONS):
        v = v / v.norm().clamp_min(1e-12)
        v = flat.T @ (flat @ v) / len(flat)
    return v.norm().sqrt()


def diffuse(r: Tensor, noise: Tensor, angle: Tensor) -> Tensor:
    """x = cos(angle) r + sin(angle) noise; r, noise (batch, ...), angle (batch,)."""
    angle = column(angle, r)
    return angle.cos() * r + angle.sin() * noise


def gaussian_flow(std: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of x in the velocity F of the flow of a Gaussian with std, and the variance of x."""
    variance = std.square() * cos.square() + sin.square()
    return sin * cos * (1 - std.square()) / variance, variance


def gaussian_map(std: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the end of this flow, which is cos(angle) x - sin(angle) F."""
    variance = std.square() * cos.square() + sin.square()
    return (cos - std / variance.sqrt()) / sin.clamp_min(SMALLEST_SINE), variance


def diffusion_loss(velocity: Velocity, r: Tensor, noise: Tensor, angle: Tensor) -> Tensor:
    """Mean over elements of (F(x, angle) - (cos(angle) noise - sin(angle) r))^2, one value per row (batch,),
    float32.

    Unit weight on F is EDM's weighting (Karras et al. 2022, table 1). A network without information has a
    loss of about 1 at every angle.
    """
    at = column(angle, r)
    target = at.cos() * noise - at.sin() * r
    return (velocity(diffuse(r, noise, angle), angle).float() - target).square().flatten(1).mean(1)


def denoise(velocity: Velocity, x: Tensor, angle: Tensor) -> Tensor:
    """cos(angle) x - sin(angle) F(x, angle): E[r | x] of a diffusion, the end of the ODE of a consistency
    student."""
    at = column(angle, x)
    return at.cos() * x - at.sin() * velocity(x, angle).float()


def path(
    velocity: Velocity, x: Tensor, num_steps: int, start: Tensor | float = PURE_NOISE
) -> Iterator[Tensor]:
    """States of dx/dangle = F at num_steps + 1 uniform angles from `start` ((batch,) or one, in (0, pi/2]) to
    0.

    x (batch, ...): the state at `start`. Midpoint rule, 2 num_steps evaluations; the state has the precision
    of x.
    """
    start = start.to(x.dtype) if isinstance(start, Tensor) else x.new_full((len(x),), start)
    step = start / num_steps
    yield x
    for i in range(num_steps):
        beat()
        angle = start - i * step
        middle = x - column(step / 2, x) * velocity(x, angle).to(x.dtype)
        x = x - column(step, x) * velocity(middle, angle - step / 2).to(x.dtype)
        yield x


def sample(velocity: Velocity, x: Tensor, num_steps: int, start: Tensor | float = PURE_NOISE) -> Tensor:
    """The end of `path`."""
    for state in path(velocity, x, num_steps, start):
        x = state
    return x
