"""Kolmogorov flow (vorticity, 2D, spectral) by exponax, on a grid four times coarser, corrected.

    make corrector SOLVER=examples.exponax_kolmogorov:coarse FINE=examples.exponax_kolmogorov:fine \
        STARTS=examples.exponax_kolmogorov:starts RUN=kolmogorov \
        OPTIONS="--dt 0.1 --frames 21 --length 6.283185307179586 --symmetries shift --ratio 8"
    python examples/exponax_kolmogorov.py          # with its weights
"""

import functools
import math

import exponax as ex
import jax
import numpy as np

NAME, DT, FRAMES, FULL = "kolmogorov", 0.1, 21, 128
NU, FORCED = 2e-3, 4


@functools.cache
def stepper(cells: int):
    """The state after DT from (1, cells, cells), compiled by JAX; the coarse grid has larger steps."""
    num = max(4, cells // 8)
    law = ex.stepper.KolmogorovFlowVorticity(
        2, 2 * math.pi, cells, DT / num, diffusivity=NU, injection_mode=FORCED, injection_scale=1.0
    )
    return jax.jit(ex.repeat(law, num))


def step(u):
    """The vorticity after DT, (batch, 1, cells, cells)."""
    return np.stack([np.asarray(stepper(u.shape[-1])(np.asarray(one, "float32"))) for one in u])


coarse = fine = step  # the grid is that of u


def starts(num: int = 10, cells: int = 2 * FULL, seed: int = 0) -> np.ndarray:
    """Random vorticity of wave numbers up to 6, after two units of time on 64 x 64 cells."""
    draw, x = np.random.default_rng(seed), 2 * np.pi * np.arange(64) / 64
    k = np.arange(1, 7)
    waves = np.concatenate([np.cos(k[:, None] * x), np.sin(k[:, None] * x)])
    u = np.einsum("nij,ix,jy->nxy", draw.standard_normal((num, 12, 12)), waves, waves)[:, None] / 6
    for _ in range(20):
        u = step(u)
    hat, out = np.fft.fft2(u), np.zeros((num, 1, cells, cells), complex)
    half = min(cells, 64) // 2 - 1
    index = np.r_[0 : half + 1, -half:0]
    out[..., index[:, None], index] = hat[..., index[:, None], index]
    return np.fft.ifft2(out).real * (cells / 64) ** 2


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(60):
        u = correct(u)
    print(f"RMS vorticity after {60 * DT:g}: {np.sqrt((u**2).mean()):.3f}", dict(correct.counts))
