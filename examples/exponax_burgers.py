"""Burgers' equation in 1D (spectral) by exponax, on a grid four times coarser, corrected.

    make corrector SOLVER=examples.exponax_burgers:coarse FINE=examples.exponax_burgers:fine \
        STARTS=examples.exponax_burgers:starts RUN=burgers_exponax \
        OPTIONS="--dt 0.25 --frames 17 --length 128 --ratio 8 --horizons 3 \
        --symmetries shift,mirror --vector u" \
        ARGS="operator.train.batch_size=1 operator.train.steps=1200 operator.unroll_fraction=0.1 \
        operator.model.width=64"
    python examples/exponax_burgers.py             # with its weights
"""

import functools
import math

import exponax as ex
import jax
import numpy as np

NAME, DT, FULL, LENGTH, NU = "burgers_exponax", 0.25, 32768, 128, 1e-4


@functools.cache
def stepper(cells: int):
    """The state after DT from (1, cells), compiled by JAX; half a cell a step, as a whole one blows up."""
    num = math.ceil(2 * DT * cells / LENGTH)
    law = ex.stepper.Burgers(1, LENGTH, cells, DT / num, diffusivity=NU, conservative=True)
    return jax.jit(ex.repeat(law, num))


def step(u):
    """The state after DT, (batch, 1, cells)."""
    return np.stack([np.asarray(stepper(u.shape[-1])(np.asarray(one, "float32"))) for one in u])


coarse = fine = step  # the grid is that of u


def starts(num: int = 9, cells: int = 2 * FULL, seed: int = 0) -> np.ndarray:
    """Sums of waves of at least a quarter, largest values 0.3 to 1."""
    draw, x = np.random.default_rng(seed), (np.arange(cells) + 0.5) / cells
    u = np.zeros((num, cells))
    for k in range(1, 4 * LENGTH + 1):
        a, phase = draw.standard_normal((2, num, 1))
        u += a * np.sin(2 * np.pi * k * x + 6 * phase)
    return (u / abs(u).max(-1, keepdims=True) * draw.uniform(0.3, 1, (num, 1)))[:, None]


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(80):
        u = correct(u)
    print(f"RMS of u after {80 * DT:g}: {np.sqrt((u**2).mean()):.4f}", dict(correct.counts))
