"""Kolmogorov flow (vorticity, 2D, spectral) by exponax, on a grid four times coarser, corrected.

    make corrector SOLVER=examples.exponax_kolmogorov:coarse FINE=examples.exponax_kolmogorov:fine \
        STARTS=examples.exponax_kolmogorov:starts RUN=kolmogorov \
        OPTIONS="--dt 0.1 --frames 21 --length 6.2831853 --symmetries shift --ratio 8 --restrict waves"
    python examples/exponax_kolmogorov.py          # with its weights
"""

import functools
import math

import exponax as ex
import jax
import numpy as np
from scipy.signal import resample

NAME, DT, FRAMES, FULL = "kolmogorov", 0.1, 21, 128
NU, FORCED = 1e-3, 4


@functools.cache
def stepper(cells: int):
    """The state after DT from (1, cells, cells), compiled by JAX; the coarse grid has larger steps."""
    num = max(2, cells // 8)
    law = ex.stepper.KolmogorovFlowVorticity(
        2, 2 * math.pi, cells, DT / num, diffusivity=NU, injection_mode=FORCED, injection_scale=1.0, order=4
    )
    return jax.jit(ex.repeat(law, num))


def step(u):
    """The vorticity after DT, (batch, 1, cells, cells)."""
    return np.stack([np.asarray(stepper(u.shape[-1])(np.asarray(one, "float32"))) for one in u])


coarse = fine = step  # the grid is that of u


def starts(num: int = 24, cells: int = 2 * FULL, seed: int = 0) -> np.ndarray:
    """States of a run on 64 x 64 cells, five units of time apart, from forty on."""
    u, found = np.random.default_rng(seed).standard_normal((1, 1, 8, 8)), []
    u = resample(resample(u, 64, axis=2), 64, axis=3)
    for frame in range(400 + 50 * num):
        u = step(u)
        found += [u] if frame >= 400 and frame % 50 == 49 else []
    return resample(resample(np.concatenate(found).astype(float), cells, axis=2), cells, axis=3)


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(60):
        u = correct(u)
    print(f"RMS vorticity after {60 * DT:g}: {np.sqrt((u**2).mean()):.3f}", dict(correct.counts))
