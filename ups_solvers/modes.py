"""ETDRK4: a time step in modes for u_t = L u + N(u), with L diagonal.

The linear part is exact, so L does not limit the step; fourth order in N. Source: Cox and Matthews 2002, with
the contour integrals of Kassam and Trefethen 2005.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

CONTOUR_POINTS = 32  # Kassam and Trefethen 2005, section 3


def coefficients(rates: Tensor, dt: float) -> tuple[Tensor, ...]:
    """exp(L dt), exp(L dt/2), Q, f1, f2 and f3 of a step dt, each with the shape of `rates`, the diagonal of
    L."""
    linear = dt * rates
    q, f1, f2, f3 = (torch.zeros_like(linear) for _ in range(4))
    for point in range(CONTOUR_POINTS):
        angle = math.pi * (point + 0.5) / CONTOUR_POINTS  # half a circle: the rest is its conjugate
        z = linear + complex(math.cos(angle), math.sin(angle))
        exp_z = torch.exp(z)
        q += ((torch.exp(z / 2) - 1) / z).real
        f1 += ((-4 - z + exp_z * (4 - 3 * z + z**2)) / z**3).real
        f2 += ((2 + z + exp_z * (z - 2)) / z**3).real
        f3 += ((-4 - 3 * z - z**2 + exp_z * (4 - z)) / z**3).real
    scale = dt / CONTOUR_POINTS
    return torch.exp(linear), torch.exp(linear / 2), q * scale, f1 * scale, f2 * scale, f3 * scale


def step(modes: Tensor, nonlinear: Callable[[Tensor], Tensor], parts: tuple[Tensor, ...]) -> Tensor:
    """The modes one step later. nonlinear: N in modes; parts: the `coefficients` of the step."""
    exp_full, exp_half, q, f1, f2, f3 = parts
    rate = nonlinear(modes)
    half = exp_half * modes
    stage_a = half + q * rate
    rate_a = nonlinear(stage_a)
    rate_b = nonlinear(half + q * rate_a)
    rate_c = nonlinear(exp_half * stage_a + q * (2 * rate_b - rate))
    return exp_full * modes + f1 * rate + 2 * f2 * (rate_a + rate_b) + f3 * rate_c
