"""A Gaussian field g on the unit square that no wall disturbs: draws and the product with its covariance, by
cosines.

    g(x) = sum_k sqrt(lambda_k) xi_k phi_k(x),   lambda_k = s (pi^2 |k|^2 + tau^2)^(-alpha),
    xi_k independent N(0, 1)

phi_k(x) = c_k1 cos(pi k1 x) c_k2 cos(pi k2 y), c_0 = 1, else sqrt 2: the eigenfunctions of the Laplacian
without flux through the wall, normalised on the square; k1 and k2 run from 0 to resolution - 1, all that the
cells can tell apart, and s makes the variance of g one on average over the cells. tau = 3, alpha = 2 as in Li
et al. 2021 (arXiv 2010.08895, section 5.2), who cut g at zero into a two-valued a, where we take the
exponential. Their code drops k = 0; we keep it, as the formula has it: 0.57 of the variance is then that of
the mean of g, no covariance is singular, and no jitter is needed anywhere.
"""

from __future__ import annotations

import functools
import math

from ups.lazy import Tensor, np, torch

TAU = 3.0
ALPHA = 2.0


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
    from ups.spectral import cosine  # imports torch

    return cosine(resolution) * math.sqrt(resolution)


@functools.lru_cache(maxsize=8)
def _shells(resolution: int) -> Tensor:
    """Flat indices of the modes ordered by max(k1, k2), (resolution^2,): those of a coarser grid come
    first."""
    first, second = (k.ravel() for k in np.meshgrid(*[np.arange(resolution)] * 2, indexing="ij"))
    return torch.from_numpy(np.lexsort((second, first, np.maximum(first, second))))


def draw_field(stream: np.random.Generator, resolution: int) -> Tensor:
    """g at the cell centres from the next resolution^2 normal numbers of `stream`, (resolution, resolution),
    float64.

    The numbers go to the modes by shells of max(k1, k2), so that a finer grid adds modes to those of a
    coarser one (and rescales them by 2e-4 or less, as s depends on which there are).
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
