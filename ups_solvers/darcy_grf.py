"""Darcy flow with a log-normal coefficient. Given observations of a, the distribution of the rest is known.

    -div(a grad u) = beta on (0, 1)^2, u = 0 on the wall,   a = exp(g)
    g(x) = sum_k sqrt(lambda_k) xi_k phi_k(x),   lambda_k = s (pi^2 |k|^2 + tau^2)^(-alpha),
    xi_k independent N(0, 1)

phi_k(x) = c_k1 cos(pi k1 x) c_k2 cos(pi k2 y), with c_0 = 1 and else sqrt 2, are the eigenfunctions of the
Laplacian without flux through the wall, normalised on the square. k1 and k2 run from 0 to resolution - 1, and
s makes the mean variance of g over the cells one. Source: tau = 3 and alpha = 2 of Li et al. 2021 (arXiv
2010.08895, section 5.2), who threshold g at zero, where we take the exponential. Their code drops k = 0; we
keep it, as in the formula: then 0.57 of the variance is that of the mean of g, and no covariance is singular.

The task is ours; the thresholded bumps of PDEBench (ups_solvers/darcy.py) have no known conditional
distribution. Here g given any linear observation is Gaussian:

    y = A g + noise * eta,  g ~ N(0, C),  eta ~ N(0, 1)
    g | y ~ N(m, P),  K = A C A^T + noise^2 I,  m = C A^T K^-1 y,  P = C - C A^T K^-1 A C

Sampling uses Matheron's rule (Wilson et al. 2021, "Pathwise conditioning of Gaussian processes"): with g0
from the prior and a new eta, g0 + C A^T K^-1 (y - A g0 - noise * eta) has exactly this distribution. K is
positive definite even without noise, because C is (its k = 0 mode is kept) and no cell is observed twice. At
64 cells per axis, all observed, its condition number is about 1e8.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups_solvers import darcy
from ups_solvers.initial import random_stream

TAU = 3.0
ALPHA = 2.0
STREAM = (1,)  # separates the random numbers of members from those of trajectories with the same seed


@functools.lru_cache(maxsize=8)
def eigenvalues(resolution: int) -> Tensor:
    """lambda_k for k1, k2 < resolution, (resolution, resolution), float64; they sum to one, the mean variance
    of g."""
    k = torch.arange(resolution, dtype=torch.float64)
    values = (math.pi**2 * (k[:, None] ** 2 + k[None, :] ** 2) + TAU**2) ** -ALPHA
    return values / values.sum()


@functools.lru_cache(maxsize=8)
def _basis(resolution: int) -> Tensor:
    """c_k cos(pi k x_j) at the cell centres, (k, j), float64; its rows have the mean square one."""
    k = torch.arange(resolution, dtype=torch.float64)
    rows = torch.cos(math.pi * torch.outer(k, k + 0.5) / resolution) * math.sqrt(2 / resolution)
    rows[0] /= math.sqrt(2)
    return rows * math.sqrt(resolution)


@functools.lru_cache(maxsize=8)
def _shells(resolution: int) -> Tensor:
    """Flat indices of the modes in the order of max(k1, k2), (resolution^2,), so that the modes of a coarser
    grid come first."""
    first, second = (k.ravel() for k in np.meshgrid(*[np.arange(resolution)] * 2, indexing="ij"))
    return torch.from_numpy(np.lexsort((second, first, np.maximum(first, second))))


def draw_field(stream: np.random.Generator, resolution: int) -> Tensor:
    """g at the cell centres from the next resolution^2 normal numbers of `stream`, (resolution, resolution),
    float64.

    Modes get the numbers in shells of max(k1, k2), so that a finer grid adds modes to those of a coarser one
    (and rescales them by 2e-4 or less, as s depends on the modes).
    """
    xi = torch.empty(resolution * resolution, dtype=torch.float64)
    xi[_shells(resolution)] = torch.from_numpy(stream.standard_normal(resolution * resolution))
    g_hat = eigenvalues(resolution).sqrt() * xi.view(resolution, resolution)
    basis = _basis(resolution)
    return basis.T @ g_hat @ basis


def apply_covariance(fields: Tensor) -> Tensor:
    """C f = sum_k lambda_k phi_k <phi_k, f>, the sum over cells: (..., n, n) to (..., n, n), float64."""
    basis = _basis(fields.shape[-1])
    return basis.T @ (eigenvalues(fields.shape[-1]) * (basis @ fields.double() @ basis.T)) @ basis


def sample_log_coefficient(seed: int, index: int, resolution: int) -> Tensor:
    """g of trajectory `index`: (resolution, resolution), float64."""
    return draw_field(random_stream(seed, index), resolution)


@dataclass(frozen=True)
class LinearObservation:
    """y = A g + noise * eta on resolution x resolution cells. A takes means over disjoint groups of cells.

    cells: (k, m) int64, flat indices of the m cells in each of k groups (m = 1: single cells; k = 0: no
    observation). values: y, (k,) float64. noise: standard deviation of every y, in the units of g.
    """

    resolution: int
    cells: Tensor
    values: Tensor
    noise: float

    @property
    def matrix(self) -> Tensor:
        """The averaging matrix A of the observed cells: y = A g + noise. (k, resolution^2), float64."""
        matrix = torch.zeros(len(self.cells), self.resolution**2, dtype=torch.float64)
        return matrix.scatter_(1, self.cells, 1 / self.cells.shape[1])

    def apply(self, fields: Tensor) -> Tensor:
        """A g: (..., n, n) to (..., k)."""
        return fields.flatten(-2)[..., self.cells].mean(-1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A C, (k, resolution^2), and the lower Cholesky factor of K, (k, k); float64."""
        cross = apply_covariance(self.matrix.unflatten(-1, (self.resolution, self.resolution)))
        gram = self.apply(cross)
        gram = 0.5 * (gram + gram.T) + self.noise**2 * torch.eye(len(gram), dtype=torch.float64)
        return cross.flatten(-2), torch.linalg.cholesky(gram)


def draw_log_coefficients(observation: LinearObservation, num: int, seed: int) -> Tensor:
    """`num` independent samples of g given the observation, (num, n, n), float64, by Matheron's rule.

    The random numbers of member j depend on (seed, j) and differ from those of trajectory j of the same seed.
    """
    n, (cross, factor) = observation.resolution, observation.factors()
    g = torch.empty(num, n, n, dtype=torch.float64)
    eta = torch.empty(num, len(observation.cells), dtype=torch.float64)
    for member in range(num):
        stream = random_stream(seed, member, STREAM)
        g[member] = draw_field(stream, n)
        eta[member] = torch.from_numpy(stream.standard_normal(eta.shape[1]))
    misfit = observation.values.double() - observation.apply(g) - observation.noise * eta
    return g + (torch.cholesky_solve(misfit.T, factor).T @ cross).view(num, n, n)


def posterior(observation: Mapping[str, Any], num: int, seed: int, parameter: float) -> tuple[Tensor, Tensor]:
    """`num` exact samples of (a, u) given an observation of g = log a: both (num, n, n), float64.

    observation: the arguments of `LinearObservation`; parameter: beta, the constant source. n must be the
    grid that the data were generated on, because a strided field is not the field of a coarser grid.
    """
    a = draw_log_coefficients(LinearObservation(**observation), num, seed).exp()
    source = torch.tensor(parameter, dtype=torch.float64)
    return a, darcy.solve(a, source, is_smooth=True, batch=darcy.BATCH)


SOLVERS = {
    "darcy2d_grf": darcy.steady(
        lambda *of: sample_log_coefficient(*of).exp(), is_smooth=True, posterior=posterior
    )
}
