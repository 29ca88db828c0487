"""Few-step students of a diffusion teacher, and the rival that has none.

Endpoint distillation: the student f(x, angle) = cos(angle) x - sin(angle) F(x, angle) regresses the end y of the teacher's
probability-flow ODE that starts in x. y is a function of x, so the regression has no spread to average over: f cannot end as
the conditional mean (that is the trap of regressing r itself), and nothing is bootstrapped, so no error accumulates (the trap
of consistency training at small budgets). Half of the starts are pure noise, the only point a one-step sampler visits; the
others serve the second step. Knowledge distillation on ODE pairs is Luhman and Luhman 2021 (arXiv 2101.02388); starts along the
path are ours. `consistency_loss` is the alternative it is measured against (Song et al. 2023, arXiv 2303.01469; the annealed
step of Geng et al. 2024, arXiv 2406.14548), `ensemble_loss` the rival without a teacher (Lang et al. 2024, arXiv 2412.15832).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ups.generative.diffusion import NOISE, Velocity, column, denoise, diffuse, draw_angles
from ups.seeds import generator

HUBER = 0.03          # pseudo-Huber scale, in residual standard deviations per element
ALPHA = 0.95          # of the almost fair CRPS (Lang et al. 2024): keeps two equal members from being free


def draw_starts(count: int, generator: torch.Generator | None = None, largest_std: float = 1.0) -> Tensor:
    """Angles (count,) at which the student learns: every other one pi/2, the rest as in diffusion training."""
    angle = draw_angles(count, generator, largest_std)
    angle[::2] = NOISE
    return angle


def pseudo_huber(difference: Tensor) -> Tensor:
    """sqrt(mean d^2 + c^2) - c per row (batch,), c = HUBER."""
    return (difference.square().flatten(1).mean(1) + HUBER**2).sqrt() - HUBER


def endpoint_loss(student: Velocity, x: Tensor, angle: Tensor, y: Tensor) -> Tensor:
    """pseudo_huber(f(x, angle) - y) per row (batch,); y = the end of the teacher's ODE from the same x."""
    return pseudo_huber(denoise(student, x, angle) - y)


@torch.no_grad()
def sample_student(student: Velocity, noise: Tensor, mid_angle: float = 0.0, second: Tensor | None = None) -> Tensor:
    """Residuals from `noise` (batch, ...) in one evaluation, or in two with fresh noise `second` at `mid_angle`.

    y1 = f(noise, pi/2); then x = cos(mid) y1 + sin(mid) second, y = f(x, mid) (multistep consistency sampling, Song et al. 2023,
    algorithm 1). Raises ValueError for a mid angle outside (0, pi/2).
    """
    y = denoise(student, noise, torch.full((noise.shape[0],), NOISE, device=noise.device))
    if second is None:
        return y
    if not 0.0 < mid_angle < NOISE:
        raise ValueError(f"the student's second step starts at angle {mid_angle:g}; expected one in (0, pi/2). Set "
                         f"consistency.mid_angle, 1.1 by default.")
    angle = torch.full((noise.shape[0],), mid_angle, device=noise.device)
    return denoise(student, diffuse(y, second, angle), angle)


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


# ---- without a teacher


def almost_fair_crps(members: Tensor, truth: Tensor, alpha: float = ALPHA) -> Tensor:
    """afCRPS (Lang et al. 2024, equation 4) per row, mean over elements: (batch, M, ...) and (batch, ...) to (batch,).

    1/(2 M (M-1)) sum_{i != j} |x_i - y| + |x_j - y| - (1 - eps) |x_i - x_j|, eps = (1 - alpha) / M. alpha = 1 is the fair CRPS.
    """
    num = members.shape[1]
    error = (members - truth[:, None]).abs().flatten(2).mean((1, 2))
    ranked = members.flatten(2).sort(1).values
    weight = (2 * torch.arange(1, num + 1, device=members.device) - num - 1).to(ranked.dtype)
    spread = 2 * (ranked * weight[:, None]).sum(1).mean(1) / (num * (num - 1))       # mean |x_i - x_j| over pairs i != j
    return error - 0.5 * (1 - (1 - alpha) / num) * spread


def energy_score(members: Tensor, truth: Tensor) -> Tensor:
    """Fair energy score per row of vectors (batch, M, D), (batch, D), over sqrt(D): (batch,). Sees joint structure."""
    num, scale = members.shape[1], math.sqrt(members.shape[2])
    error = (members - truth[:, None]).square().sum(-1).clamp_min(1e-12).sqrt().mean(1)
    i, j = torch.triu_indices(num, num, 1, device=members.device)
    pairs = (members[:, i] - members[:, j]).square().sum(-1).clamp_min(1e-12).sqrt()
    return (error - pairs.sum(1) / (num * (num - 1))) / scale


def ensemble_loss(members: Tensor, truth: Tensor, decode: Callable[[Tensor], Tensor], block: int = 4) -> Tensor:
    """0.5 afCRPS of the field + 0.25 energy score of blocks of tokens + 0.25 of all tokens, per row (batch,).

    members (batch, M, *tokens, dim), truth (batch, *tokens, dim) in units in which errors are of order one; decode: latents to
    the field (linear). The CRPS is taken where it means something, at points of the field; the norms of the energy scores, which
    no rotation changes, keep the joint structure that a pointwise score would trade away.
    """
    crps = almost_fair_crps(decode(members), decode(truth))
    whole = energy_score(members.flatten(2), truth.flatten(1))
    lines, lines_ref = members.flatten(2, -2), truth.flatten(1, -2)               # tokens in storage order
    usable = lines.shape[2] // block * block
    if usable == 0:
        return 0.5 * crps + 0.5 * whole
    parts = lines[:, :, :usable].unflatten(2, (-1, block)).flatten(3).movedim(2, 1).flatten(0, 1)
    parts_ref = lines_ref[:, :usable].unflatten(1, (-1, block)).flatten(2).flatten(0, 1)
    return 0.5 * crps + 0.25 * whole + 0.25 * energy_score(parts, parts_ref).view(len(truth), -1).mean(1)


def draw_members(student: Velocity, noise: Tensor) -> Tensor:
    """One-evaluation residuals with gradient from noise (batch, ...) at pi/2: what the rival and the fine-tune are trained on."""
    return denoise(student, noise, torch.full((noise.shape[0],), NOISE, device=noise.device))


# ---- solved pairs


def pool_number(step: int, pool_batches: int, seed: int) -> tuple[int, int]:
    """(number of the solved batch that `step` trains on, smallest number still in use).

    A pass goes through `pool_batches` batches in random order; the next pass drops the oldest quarter and adds as many. So each
    serves four passes, and everything is a function of (seed, step): a resumed run solves again what it needs.
    """
    turn, place = divmod(step, pool_batches)
    first = turn * (pool_batches // 4)
    order = torch.randperm(pool_batches, generator=generator(seed, "pool", turn))
    return first + int(order[place]), first


class SolvedPairs:
    """Starts x, angles, conditions and the teacher's endpoints y of batches, solved when first asked for, kept while used."""

    def __init__(self, solve: Callable[[int, slice], tuple]):
        self.solve = solve
        self.kept: dict[tuple[int, int, int], tuple] = {}

    def get(self, number: int, part: slice, oldest: int) -> tuple:
        """solve(number, part), remembered until `oldest` passes it."""
        key = (number, part.start, part.stop)
        if key not in self.kept:
            self.kept = {k: v for k, v in self.kept.items() if k[0] >= oldest}
            self.kept[key] = self.solve(number, part)
        return self.kept[key]
