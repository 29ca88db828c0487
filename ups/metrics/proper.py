"""Proper scores of an ensemble, to judge and to train by: least in the mean for members drawn as the truth.

As precise as their arguments (judges pass float64), and differentiable.
"""

import math

import torch
from torch import Tensor

EXACT = "donot_use_mm_for_euclid_dist"


def check_members(members: Tensor, u_ref: Tensor, where: str) -> None:
    if members.ndim < 2 or 0 in members.shape or (members.shape[0], *members.shape[2:]) != tuple(u_ref.shape):
        raise ValueError(
            f"members {tuple(members.shape)} and truth {tuple(u_ref.shape)}; expected (n, M, "
            f"...) and (n, ...) with equal further axes and M >= 1 in {where}. Put the member "
            "axis second."
        )


def fair_crps(members: Tensor, truth: Tensor, alpha: float = 1.0) -> Tensor:
    """Continuous ranked probability score per case, mean over elements: (n, M, ...) and (n, ...) to (n,), in
    units of u.

    mean_i |x_i - y| - (1 - (1 - alpha) / M) / (2 M (M - 1)) sum_ij |x_i - x_j|, the double sum from sorted
    members. alpha = 1: fair, its mean does not depend on M (Ferro 2014); 0: the CRPS of the empirical
    distribution; between: almost fair, afCRPS (Lang et al. 2024, arXiv 2412.15832, equation 4), which keeps
    two equal members from being free. M = 1: the absolute error. Differentiable; as precise as its arguments.
    inf where a member is not finite.
    """
    check_members(members, truth, "fair_crps")
    num = members.shape[1]
    flat = members.reshape(len(members), num, -1)
    value = (flat - truth.reshape(len(truth), 1, -1)).abs().mean((1, 2))
    if num > 1:
        weight = (2 * torch.arange(1, num + 1, device=members.device) - num - 1).to(flat.dtype)
        # mean over pairs i != j
        spread = 2 * (flat.sort(1).values * weight[:, None]).sum(1).mean(1) / (num * (num - 1))
        value = value - 0.5 * (1 - (1 - alpha) / num) * spread
    return torch.where(flat.isfinite().all(2).all(1), value, torch.inf)


def expected_crps(members: Tensor, draws: Tensor) -> Tensor:
    """Mean of `fair_crps` over draws (n, K, ...) of the law that the truth comes from, (n,): the same in the
    mean, without the chance that one truth has."""
    check_members(members, draws[:, 0], "expected_crps")
    x, y = members.flatten(2), draws.flatten(2)
    away = torch.cdist(x, y, p=1).mean(1) / x.shape[2]  # (n, K)
    return fair_crps(members, draws[:, 0]) + away.mean(1) - away[:, 0]


def energy_score(members: Tensor, truth: Tensor, smallest: float = 0.0) -> Tensor:
    """Fair energy score of each case over the root of its size: (n, M, ...), (n, ...) -> (n,), in the units
    of an RMSE.

    mean_i |x_i - y| - 1/(2 M (M - 1)) sum_ij |x_i - x_j|, |.| the Euclidean norm of the flattened case: CRPS
    for vectors, which sees whether points vary together (Gneiting & Raftery 2007, section 4.3).
    Differentiable for a `smallest` above zero, to which squared distances are lifted. inf where a member is
    not finite.
    """
    check_members(members, truth, "energy_score")
    num = members.shape[1]
    x, y = members.reshape(len(members), num, -1), truth.reshape(len(truth), 1, -1)
    value = (x - y).square().sum(-1).clamp_min(smallest).sqrt().mean(1)
    if num > 1:
        i, j = torch.triu_indices(num, num, 1, device=members.device)
        apart = (x[:, i] - x[:, j]).square().sum(-1).clamp_min(smallest).sqrt()
        value = value - apart.sum(1) / (num * (num - 1))
    return torch.where(x.isfinite().all(2).all(1), value / math.sqrt(x.shape[2]), torch.inf)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of samples (a, d), (b, d) over different draws: unbiased, its mean
    is 0 for equal distributions only, so it may be negative (Szekely & Rizzo 2013). inf where a sample is not
    finite.
    """
    if not x.ndim == y.ndim == 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            f"samples {tuple(x.shape)} and {tuple(y.shape)}; expected (a, d) and (b, d) with a, "
            "b >= 2 in energy_distance. Flatten each draw to one row."
        )
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.inf
    x, y, a, b = x.double(), y.double(), len(x), len(y)
    xy, xx, yy = (float(torch.cdist(u, v, compute_mode=EXACT).sum()) for u, v in ((x, y), (x, x), (y, y)))
    return 2 * xy / (a * b) - xx / (a * (a - 1)) - yy / (b * (b - 1))
