"""The coefficient of darcy2d_grf given part of it, and the solutions that remain possible: exact samples of
both.

    y = A g + noise * eta,  g ~ N(0, C),  eta ~ N(0, 1)
    g | y ~ N(m, P),  K = A C A^T + noise^2 I,  m = C A^T K^-1 y,  P = C - C A^T K^-1 A C

A sample by Matheron's rule (Wilson et al. 2021, "Pathwise conditioning of Gaussian processes"): with g0 from
the prior and eta afresh, g0 + C A^T K^-1 (y - A g0 - noise * eta) has exactly this distribution. K is
positive definite without noise too, because C is (its k = 0 mode is kept) and no cell is observed twice, so
nothing is added to it: at 64 cells per axis, all observed, its condition number is about 1e8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ups.lazy import Tensor, np, torch
from ups.tasks import darcy
from ups.tasks.log_normal import apply_covariance, draw_field

# sets the members apart from the trajectories of the same seed (ups.tasks.initial.random_stream)
STREAM = (1,)
BATCH = 16    # members solved together: 0.7 ms each at 32 x 32 for 4.2 ms alone; more no longer fit the cache


@dataclass(frozen=True)
class LinearObservation:
    """y = A g + noise * eta on resolution x resolution cells, the rows of A being means over disjoint groups
    of cells.

    cells: (k, m) int64, flat indices of the m cells of each of k groups (m = 1: single cells; k = 0: nothing
    observed).
    values: y, (k,) float64. noise: standard deviation of every y, in the units of g, 0 for none. Raises
    ValueError for shapes, indices or numbers that do not fit, and for a cell observed twice.
    """

    resolution: int
    cells: Tensor
    values: Tensor
    noise: float

    def __post_init__(self) -> None:
        cells, size = self.cells, self.resolution**2
        is_index = (cells.ndim == 2 and not cells.is_floating_point()
                    and bool(((cells >= 0) & (cells < size)).all()))
        if not is_index or cells.unique().numel() != cells.numel() or cells.shape[1] < 1:
            raise ValueError(f"cells, shape {tuple(cells.shape)}, are not disjoint groups; expected (k, m) "
                             f"different whole numbers from 0 to {size - 1} (ups.tasks.darcy_grf_posterior); "
                             "observe each cell once, as ups.generative.observation does.")
        if self.values.shape != cells.shape[:1] or not bool(torch.isfinite(self.values).all()):
            raise ValueError(f"values have shape {tuple(self.values.shape)} or are not finite; expected "
                             f"{len(cells)} numbers, one per group of cells (ups.tasks.darcy_grf_posterior); "
                             "check what was observed.")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"noise = {self.noise}; expected a standard deviation >= 0 "
                             "(ups.tasks.darcy_grf_posterior); give 0 for none.")

    @property
    def matrix(self) -> Tensor:
        """A, (k, resolution^2), float64."""
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


def posterior(observation: LinearObservation) -> tuple[Tensor, Tensor]:
    """Mean m (n, n) and covariance P (n^2, n^2) of g given the observation, float64; for grids whose n^2 x
    n^2 fits."""
    n, (cross, factor) = observation.resolution, observation.factors()
    gain = torch.cholesky_solve(cross, factor)
    prior = apply_covariance(torch.eye(n * n, dtype=torch.float64).view(n * n, n, n)).flatten(-2)
    return (observation.values.double() @ gain).view(n, n), prior - cross.T @ gain


def draw_log_coefficients(observation: LinearObservation, num: int, seed: int) -> Tensor:
    """`num` independent samples of g given the observation, (num, n, n), float64, by Matheron's rule.

    Member j starts from its own random numbers, a function of (seed, j) unlike those of trajectory j of the
    same seed. Raises ValueError for num < 1 or a negative seed.
    """
    if num < 1 or seed < 0:
        raise ValueError(f"{num} members of seed {seed} asked for; expected at least one and a seed >= 0 "
                         "(ups.tasks.darcy_grf_posterior); give both.")
    n, (cross, factor) = observation.resolution, observation.factors()
    g = torch.empty(num, n, n, dtype=torch.float64)
    eta = torch.empty(num, len(observation.cells), dtype=torch.float64)
    for member in range(num):
        stream = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, member),
                                                                             spawn_key=STREAM)))
        g[member] = draw_field(stream, n)
        eta[member] = torch.from_numpy(stream.standard_normal(eta.shape[1]))
    misfit = observation.values.double() - observation.apply(g) - observation.noise * eta
    return g + (torch.cholesky_solve(misfit.T, factor).T @ cross).view(num, n, n)


def truth_ensemble(observation: LinearObservation, num: int, seed: int,
                   beta: float = 1.0) -> tuple[Tensor, Tensor]:
    """`num` exact samples of (a, u) given the observation of g = log a: both (num, n, n), float64.

    The members of `draw_log_coefficients` are solved with the constant source beta. n is the grid that the
    data were generated on: a strided field is not the field of a coarser grid.
    """
    a = draw_log_coefficients(observation, num, seed).exp()
    return a, darcy.solve(a, torch.tensor(beta, dtype=torch.float64), is_smooth=True, batch=BATCH)
