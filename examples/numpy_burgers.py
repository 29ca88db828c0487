"""Burgers' equation in 1D by upwind volumes in NumPy, on a grid four times coarser, corrected.

    make corrector SOLVER=examples.numpy_burgers:coarse FINE=examples.numpy_burgers:fine \
        STARTS=examples.numpy_burgers:starts RUN=numpy_burgers \
        OPTIONS="--dt 0.25 --frames 9 --length 16 --symmetries shift --ratio 8" \
        ARGS="operator.train.batch_size=2 operator.train.steps=1200"
    python examples/numpy_burgers.py                # with its weights
"""

import math

import numpy as np

NAME, DT, FULL, LENGTH, NU = "numpy_burgers", 0.25, 4096, 16, 8e-3


def step(u):
    """The state after DT, (batch, 1, cells): local Lax-Friedrichs fluxes, Heun's method, stable steps."""
    dx = LENGTH / u.shape[-1]
    num = math.ceil(DT * (1 / dx + 2 * NU / dx**2))
    h = DT / num

    def rate(u):
        right = np.roll(u, -1, -1)
        flux = 0.25 * (u**2 + right**2) - 0.5 * np.maximum(abs(u), abs(right)) * (right - u)
        flux -= NU * (right - u) / dx
        return -(flux - np.roll(flux, 1, -1)) / dx

    for _ in range(num):
        first = rate(u)
        u = u + h / 2 * (first + rate(u + h * first))
    return u


coarse = fine = step  # the grid is that of u


def starts(num: int = 24, cells: int = 2 * FULL, seed: int = 0) -> np.ndarray:
    """Sums of waves of at least a quarter, largest values 0.1 to 1, as decayed waves are states, too."""
    draw, x = np.random.default_rng(seed), (np.arange(cells) + 0.5) / cells
    a, phase = draw.standard_normal((2, num, 4 * LENGTH, 1))
    u = (a * np.sin(2 * np.pi * np.arange(1, 4 * LENGTH + 1)[:, None] * x + 6 * phase)).sum(1)
    return (u / abs(u).max(-1, keepdims=True) * 10 ** -draw.random((num, 1)))[:, None]


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(60):
        u = correct(u)
    print(f"RMS of u after {60 * DT:g}: {np.sqrt((u**2).mean()):.4f}", dict(correct.counts))
