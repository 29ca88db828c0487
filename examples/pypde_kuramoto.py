"""Kuramoto-Sivashinsky equation in 1D by py-pde (differences), on a grid four times coarser, corrected.

    make corrector SOLVER=examples.pypde_kuramoto:coarse FINE=examples.pypde_kuramoto:fine \
        STARTS=examples.pypde_kuramoto:starts RUN=kuramoto \
        OPTIONS="--dt 2 --frames 9 --length 2304 --symmetries shift" \
        ARGS="operator.train.batch_size=1 operator.train.steps=1200"
    python examples/pypde_kuramoto.py              # with its weights
"""

import functools
import math

import numpy as np
import pde
from scipy.signal import resample

NAME, DT, FULL, LENGTH = "kuramoto", 2.0, 9216, 2304.0


@functools.cache
def stepper(cells: int):
    """(one time step, its state), compiled by numba; the fourth derivative limits the steps of Euler."""
    grid = pde.CartesianGrid([[0, LENGTH]], cells, periodic=True)
    law = pde.PDE({"u": "-laplace(u + laplace(u)) - 0.5 * d_dx(u**2)"})
    state, num = pde.ScalarField(grid, 0.0), math.ceil(9 * DT * (cells / LENGTH) ** 4)
    return pde.EulerSolver(law, backend="numba").make_stepper(state, dt=DT / num), state


def step(u):
    """The state after DT, (batch, 1, cells)."""
    out = np.empty(u.shape)
    advance, state = stepper(u.shape[-1])
    for row, one in enumerate(u):
        state.data = one[0]
        advance(state, 0.0, DT)
        out[row, 0] = state.data
    return out


coarse = fine = step  # the grid is that of u


def starts(num: int = 8, cells: int = FULL, seed: int = 0) -> np.ndarray:
    """States of a run on half of the full grid, twenty units of time apart, from two hundred on."""
    u = np.random.default_rng(seed).standard_normal((1, 1, 768))
    u, found = resample(u - u.mean(), FULL // 2, axis=2), []
    for frame in range(100 + 10 * num):
        u = step(u)
        found += [u] if frame >= 100 and frame % 10 == 9 else []
    return resample(np.concatenate(found), cells, axis=2)


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(80):
        u = correct(u)
    print(f"RMS of u after {80 * DT:g}: {np.sqrt((u**2).mean()):.3f}", dict(correct.counts))
