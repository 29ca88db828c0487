"""Proper scores of an ensemble, for evaluation and training: their mean is least for members distributed as
the truth.

Differentiable, in the precision of their arguments (evaluation passes float64).
"""

import math

import torch
from torch import Tensor

EXACT = "donot_use_mm_for_euclid_dist"


def check_members(members: Tensor, u_ref: Tensor, where: str) -> None:
    if members.ndim < 2 or 0 in members.shape or (members.shape[0], *members.shape[2:]) != tuple(u_ref.shape):
        raise ValueError(
            f"members {tuple(members.shape)} and truth {tuple(u_ref.shape)}; expected (n, M, ...) and (n, "
            f"...) with equal further axes and M >= 1 in {where}. Put the member axis second."
        )


def fair_crps(members: Tensor, truth: Tensor, alpha: float = 1.0) -> Tensor:
    """Continuous ranked probability score per case, mean over elements: (n, M, ...) and (n, ...) to (n,), in
    units of u.

    mean_i |x_i - y| - (1 - (1 - alpha) / M) / (2 M (M - 1)) sum_ij |x_i - x_j|, the double sum from sorted
    members. alpha = 1: fair, its mean does not depend on M (Ferro 2014); 0: the CRPS of the empirical
    distribution; between: almost fair, afCRPS (Lang et al. 2024, arXiv 2412.15832, equation 4), which
    penalises equal members. M = 1: the absolute error. inf for a member that is not finite.
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


def expected_crps(members: Tensor, exact: Tensor) -> Tensor:
    """Mean of `fair_crps` over samples (n, K, ...) of the distribution of the truth, (n,): less noise than
    one truth, with the same expectation."""
    check_members(members, exact[:, 0], "expected_crps")
    x, y = members.flatten(2), exact.flatten(2)
    distance = torch.cdist(x, y, p=1).mean(1) / x.shape[2]  # (n, K)
    return fair_crps(members, exact[:, 0]) + distance.mean(1) - distance[:, 0]


def energy_score(members: Tensor, truth: Tensor, smallest: float = 0.0) -> Tensor:
    """Fair energy score of each case over the root of its size: (n, M, ...), (n, ...) -> (n,), in the units
    of an RMSE.

    mean_i |x_i - y| - 1/(2 M (M - 1)) sum_ij |x_i - x_j|, |.| the Euclidean norm of the flattened case: CRPS
    for vectors, which depends on the correlation of points (Gneiting & Raftery 2007, section 4.3). smallest:
    lower bound of squared distances; above zero, the score is differentiable at equal members. inf for a
    member that is not finite.
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


def variogram_score(members: Tensor, truth: Tensor, truth_variance: Tensor | float = 0.0) -> Tensor:
    """Fair variogram score of each case: (n, M, pairs), (n, pairs) -> (n,), mean over pairs.

    members, truth: |u_i - u_j|^p of pairs of cells. (mean over members - truth)^2 - variance over members / M
    (Scheuerer and Hamill 2015, equation 4; the second term makes it fair). It depends on the correlation of
    points more than the energy score does, and not at all on a bias that all points share. truth, and
    truth_variance: mean and variance over samples of the distribution of the truth, if it is known. NaN pairs
    do not count; inf for a member that is not finite.
    """
    check_members(members, truth, "variogram_score")
    num = members.shape[1]
    spread = members.var(1) / num if num > 1 else 0.0
    value = ((members.mean(1) - truth).square() + truth_variance - spread).flatten(1).nanmean(1)
    return torch.where(members.isinf().flatten(1).any(1), torch.inf, value)


def mean_distance(x: Tensor) -> float:
    """Mean Euclidean distance of different rows of x (a, d), float64."""
    return float(torch.cdist(x, x, compute_mode=EXACT).sum()) / (len(x) * (len(x) - 1))


def energy_distance(x: Tensor, y: Tensor, apart: float | None = None) -> float:
    """Unbiased 2 E|x - y| - E|x - x'| - E|y - y'| of samples x (a, d) and y (b, d), over different rows.

    Its mean is 0 for equal distributions only, so single values may be negative (Szekely & Rizzo 2013). inf
    for a sample that is not finite. apart: `mean_distance` of y, where it is known.
    """
    if not x.ndim == y.ndim == 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            f"samples {tuple(x.shape)} and {tuple(y.shape)}; expected (a, d) and (b, d) with a, "
            "b >= 2 in energy_distance. Flatten each sample to one row."
        )
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.inf
    x, y = x.double(), y.double()
    xy = float(torch.cdist(x, y, compute_mode=EXACT).sum()) / (len(x) * len(y))
    return 2 * xy - mean_distance(x) - (mean_distance(y) if apart is None else apart)
