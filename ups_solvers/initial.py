"""Initial conditions: the random stream of each trajectory, and PDEBench's random waves in 1D.

Source: PDEBench (Takamoto et al. 2022, arXiv 2210.07182). Where its text and its code differ we follow the
code, as the published files do.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUM_MODES = 4  # wave numbers 1..4, two of which are drawn
NUM_DRAWS = 2
NOMINAL_POINTS = 1024  # the published grid; it enters the wave number, see Wave
PROBABILITY_ABS = 0.1
PROBABILITY_WINDOW = 0.1
WINDOW_EDGE = 0.01  # half-width of the tanh edges
WINDOW_WIDTH = 0.45
WINDOW_FIRST, WINDOW_RANGE = 0.1, 0.35  # left edge = first + range * (the number that opened the window)


def random_stream(seed: int, index: int, spawn_key: tuple[int, ...] = ()) -> np.random.Generator:
    """The random stream of trajectory `index`, keyed by a hash of (seed, index). spawn_key: selects further
    streams of the same pair.

    It is numpy's Philox with a 128-bit key, not a torch.Generator: torch's CPU generator keeps only the low
    32 bits of its seed, so two of 10 000 hashed seeds would be equal with a probability of 1 %.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, index), spawn_key=spawn_key)))


@dataclass(frozen=True)
class Wave:
    """One random initial condition on [0, 1), continued with period 1; call it at any points.

        u0(x) = sign * w(x) * s(x)
        s(x)  = sum_j amplitude_j sin(k_j x + phase_j), or its absolute value if use_abs
        k_j   = 2 pi wave_number_j / (x_last - x_first)
        w(x)  = (tanh((x - left) / 0.01) - tanh((x - right) / 0.01)) / 2, or 1 without window

    wave_number: j for a mode that was drawn once, 2 j if twice, 0 if not (it still adds the constant
    amplitude * sin(phase)). x_last - x_first is that of the published grid, so u0 does not depend on our
    resolution. As k exceeds 2 pi n by a thousandth, u0 has a small jump at x = 0. window: (left, right) or
    None; edge: half-width of its edges, 0.01 above.
    """

    wave_number: tuple[int, ...]
    amplitude: tuple[float, ...]
    phase: tuple[float, ...]
    sign: float
    use_abs: bool
    window: tuple[float, float] | None
    edge: float = WINDOW_EDGE

    def signed_sum(self, x: Tensor) -> Tensor:
        """s(x) before the absolute value; its zeros are the kinks of u0 if `use_abs`. x: any shape."""
        length = 1 - 1 / NOMINAL_POINTS
        total = torch.zeros_like(x)
        for wave_number, amplitude, phase in zip(self.wave_number, self.amplitude, self.phase, strict=True):
            if wave_number == 0:
                total += amplitude * math.sin(phase)
            else:
                total += torch.sin(x * (2 * math.pi * wave_number / length) + phase).mul_(amplitude)
        return total

    def on_unit_interval(self, x: Tensor) -> Tensor:
        """u0 at x in [0, 1], both ends included (at 1 the limit from the left); same shape, float64."""
        value = self.signed_sum(x)
        if self.use_abs:
            value = value.abs_()
        if self.window is not None:
            left, right = self.window
            value *= 0.5 * (torch.tanh((x - left) / self.edge) - torch.tanh((x - right) / self.edge))
        return value.mul_(self.sign)

    def __call__(self, x: Tensor) -> Tensor:
        """u0 at any points x (any shape, unit: one domain length), float64; x is taken modulo 1."""
        wrapped = x.double() - torch.floor(x.double())
        return self.on_unit_interval(wrapped.masked_fill_(wrapped >= 1, 0.0))  # -1e-20 wraps to 1.0


def sample_wave(seed: int, index: int) -> Wave:
    """The wave of trajectory `index`, as PDEBench's 1D generator distributes them."""
    return draw_wave(random_stream(seed, index))


def draw_wave(
    stream: np.random.Generator,
    *,
    num_modes: int = NUM_MODES,
    probability_window: float = PROBABILITY_WINDOW,
    domain: tuple[float, float] = (0.0, 1.0),
) -> Wave:
    """The next wave of a stream, as PDEBench's 1D generators distribute them.

    Two modes from 1..num_modes with replacement; amplitude U(0,1) and phase U(0,2 pi) of each mode; the
    absolute value with probability 0.1; a random sign; a window with probability_window. As in PDEBench one
    random number u < probability_window decides on the window and places it: left = 0.1 + 0.35 u, right =
    left + 0.45, in `domain`, which a Wave maps to [0, 1).
    """
    drawn = stream.integers(0, num_modes, size=NUM_DRAWS)
    amplitude = stream.uniform(0.0, 1.0, size=num_modes)
    phase = stream.uniform(0.0, 2 * math.pi, size=num_modes)
    use_abs = bool(stream.uniform() < PROBABILITY_ABS)
    sign = 1.0 if stream.uniform() < 0.5 else -1.0
    opened = float(stream.uniform())
    left = (WINDOW_FIRST + WINDOW_RANGE * opened - domain[0]) / (domain[1] - domain[0])
    right = left + WINDOW_WIDTH / (domain[1] - domain[0])
    return Wave(
        wave_number=tuple((mode + 1) * int((drawn == mode).sum()) for mode in range(num_modes)),
        amplitude=tuple(amplitude.tolist()),
        phase=tuple(phase.tolist()),
        sign=sign,
        use_abs=use_abs,
        window=(left, right) if opened < probability_window else None,
        edge=WINDOW_EDGE / (domain[1] - domain[0]),
    )


@functools.lru_cache(maxsize=16)
def eigenbasis(num_cells: int, side: float = 1.0, is_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Orthonormal eigenvectors (rows, (n, n)) and eigenvalues (n,) of -d^2/dx^2 on cells of (0, side): sines
    if u is zero at the walls, else cosines (no flux)."""
    wave, first = (torch.sin, 1) if is_zero else (torch.cos, 0)
    k = torch.arange(first, num_cells + first, dtype=torch.float64)
    basis = wave(math.pi * k[:, None] * cell_centres(num_cells)[None, :]) * math.sqrt(2 / num_cells)
    basis[-first] /= math.sqrt(2)  # the first cosine, the last sine
    return basis, (2 * num_cells / side * torch.sin(0.5 * math.pi * k / num_cells)).square()


def cell_centres(resolution: int) -> Tensor:
    """(i + 1/2) / resolution, (resolution,), float64."""
    return (torch.arange(resolution, dtype=torch.float64) + 0.5) / resolution
