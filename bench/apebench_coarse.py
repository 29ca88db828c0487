"""The coarse solvers of APEBench's 1D scenarios in NumPy: one step over COARSE of the time between frames.

    u_t = sum_j a_j d^j u / dx^j + b_0 u^2 + b_1/2 (u^2)_x + b_2/2 ((u_x)^2 - its mean)

on the periodic unit interval with one unit of time per frame; a_0 = gamma_0, a_j = gamma_j / (N^j 2^(j-1)),
b_i = delta_i / N^i, N cells (Koehler et al. 2024, arXiv 2411.00180, appendix B). The step is ETDRK2 (Cox and
Matthews 2002, their eq. 22), its coefficients by contour integrals (Kassam and Trefethen 2005), the
nonlinear terms without the highest third of the modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

COARSE = 0.5  # APEBench's coarse_proportion
# scenario -> gamma_0.., delta_0..: the difficulties that are the defaults of APEBench
DIFFICULTIES: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "adv": ((0, -4), ()),
    "diff": ((0, 0, 4), ()),
    "adv_diff": ((0, -4, 4), ()),
    "disp": ((0, 0, 0, 4), ()),
    "hyp_diff": ((0, 0, 0, 0, -4), ()),
    "burgers": ((0, 0, 1.5), (0, -1.5)),
    "kdv": ((0, 0, 0, -14, -9), (0, -2)),
    "ks": ((0, 0, -1.2, 0, -15), (0, 0, -6)),
    "ks_cons": ((0, 0, -2, 0, -18), (0, -1)),
    "fisher": ((0.02, 0, 0.2), (-0.02,)),
}


def advance(u: np.ndarray, scenario: str, proportion: float = COARSE) -> np.ndarray:
    """Return u (..., cells) after `proportion` of the time between two frames. The parameters of the equation
    are scaled, as APEBench does, not the step.
    """
    cells = u.shape[-1]
    gammas, deltas = ([proportion * value for value in values] for values in DIFFICULTIES[scenario])
    slope = 2j * np.pi * np.arange(cells // 2 + 1)
    linear = sum(gamma / (cells**j * 2.0 ** (j - 1) if j else 1) * slope**j for j, gamma in enumerate(gammas))
    square, flux, norm = (delta / cells**i for i, delta in enumerate([*deltas, 0.0, 0.0, 0.0][:3]))
    kept = np.arange(cells // 2 + 1) <= cells / 3 - 1

    def nonlinear(u_hat: np.ndarray) -> np.ndarray:
        u, u_x = (np.fft.irfft(kept * part, cells) for part in (u_hat, slope * u_hat))
        square_hat, norm_hat = np.fft.rfft(u * u), np.fft.rfft(u_x * u_x)
        norm_hat[..., 0] = 0
        return square * square_hat + 0.5 * flux * slope * square_hat + 0.5 * norm * norm_hat

    circle = linear[:, None] + np.exp(2j * np.pi * (np.arange(16) + 0.5) / 16)
    first = ((np.exp(circle) - 1) / circle).mean(-1).real  # complex for odd derivatives; exponax drops that
    second = ((np.exp(circle) - 1 - circle) / circle**2).mean(-1).real
    u_hat = np.fft.rfft(u)
    before = nonlinear(u_hat)
    stage = np.exp(linear) * u_hat + first * before
    return np.fft.irfft(stage + second * (nonlinear(stage) - before), cells)


def __getattr__(name: str) -> partial:
    """Return the step of a scenario, so that `base: {solver: bench.apebench_coarse:kdv}` finds it; its u is
    (batch, channel, cells).
    """
    if name not in DIFFICULTIES:
        raise AttributeError(name)
    return partial(advance, scenario=name)
