"""Fronts of Fisher's equation in 2D by py-pde, on a grid four times coarser, corrected.

    make corrector SOLVER=examples.pypde_fronts:coarse FINE=examples.pypde_fronts:fine \
        STARTS=examples.pypde_fronts:starts RUN=fronts OPTIONS="--dt 0.1 --symmetries shift"
    python examples/pypde_fronts.py                # with its weights
"""

import functools

import numpy as np
import pde

NAME, DT, FULL = "fronts", 0.1, 128
DIFFUSIVITY, RATE = 5e-4, 8.0  # fronts 1/128 wide: a grid of 32 cells does not resolve them


@functools.cache
def stepper(cells: int):
    """One time step on a grid of cells x cells; substeps as the grid allows."""
    grid = pde.CartesianGrid([[0, 1]] * 2, cells, periodic=True)
    law = pde.PDE({"u": f"{DIFFUSIVITY} * laplace(u) + {RATE} * u * (1 - u)"})
    state = pde.ScalarField(grid, 0.0)
    substeps = max(4, round(DT * 5 * DIFFUSIVITY * cells**2))
    return pde.EulerSolver(law, backend="numpy").make_stepper(state, dt=DT / substeps), state


def step(u: np.ndarray) -> np.ndarray:
    """The state after DT, (batch, 1, cells, cells)."""
    out = np.empty(u.shape)
    advance, state = stepper(u.shape[-1])
    for row, one in enumerate(u):
        state.data = one[0]
        advance(state, 0.0, DT)
        out[row, 0] = state.data
    return out


coarse = fine = step  # the grid is that of u


def starts(num: int = 32, cells: int = FULL, seed: int = 0) -> np.ndarray:
    """Random blobs of u = 1 on u = 0."""
    draw, x = np.random.default_rng(seed), (np.arange(cells) + 0.5) / cells
    u = np.zeros((num, 1, cells, cells))
    for row in u[:, 0]:
        for a, b, radius in zip(*draw.random((2, 4)), 0.03 + 0.07 * draw.random(4), strict=True):
            far = [np.minimum(abs(x - place), 1 - abs(x - place)) for place in (a, b)]
            np.maximum(row, 1 / (1 + np.exp((np.hypot(far[0][:, None], far[1]) - radius) * 80)), out=row)
    return u


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(60):
        u = correct(u)
    print(f"mean of u after {60 * DT:g}: {u.mean():.4f}", dict(correct.counts))
