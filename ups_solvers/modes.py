"""Time steps in modes, of u_t = L u + N(u) + sum_j f_j dW_j/dt with L diagonal, and exact samples of the
futures of such equations.

Without noise: ETDRK4, fourth order in N; the linear part is exact, so L does not limit the step (Cox and
Matthews 2002, with the contour integrals of Kassam and Trefethen 2005).

With noise: the shifted ODE method for additive noise (Foster, Lyons and Oberhauser 2021, arXiv 2101.03446).
With dW = W(h) and H = mean of W(s) - s dW / h over the step, N(0, h) and N(0, h / 12), independent,

    u(h) = Phi(u(0) + f H) - f H,    Phi: the flow of u_t = L u + N(u) + f dW / h over h, a step of ETDRK4,

so that both W(h) and the integral of W over the step are exact. The remaining second-order term is h^2 / 24
times sum_j N''(f_j, f_j). It is zero for pairs of plane waves (a cosine and a sine of one amplitude) if N is
that of Burgers or of the vorticity; then the strong order is 3/2.

Such an equation is Markov: from a state, new noise gives exact samples of the future, at any lead.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups_solvers.initial import random_stream
from ups_solvers.solver import Solver

CONTOUR_POINTS = 32  # Kassam and Trefethen 2005, section 3
STREAM = 1  # separates the random numbers of samples from those of trajectories with the same seed
FUTURE_CELLS = 2**18  # of futures that are computed together
DAMPING = 0.1  # a step damps a forced wave by this at most: its variance then has an error of 1e-4


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


@dataclass(frozen=True)
class Forced:
    """The equation on one grid. rates: L, real, with the shape of the modes; nonlinear: N, of modes (batch,
    ...); waves: the modes of f_j, (J, ...) complex; dt: the step."""

    rates: Tensor
    nonlinear: Callable[[Tensor], Tensor]
    waves: Tensor
    dt: float

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        return coefficients(self.rates, self.dt)

    def pushed(self, amounts: Tensor) -> Tensor:
        """sum_j amounts_j f_j, amounts (batch, J); added wave by wave, so that a row's rounding does not
        depend on the batch."""
        total = torch.zeros(len(amounts), *self.waves.shape[1:], dtype=self.waves.dtype)
        for amount, wave in zip(amounts.unbind(1), self.waves, strict=True):
            total += amount.view(-1, *[1] * wave.ndim) * wave
        return total

    def advance(self, modes: Tensor, drawn: Tensor) -> Tensor:
        """The modes one step later; drawn (batch, J, 2): dW / sqrt(h) and H / sqrt(h / 12)."""
        push = self.pushed(drawn[..., 0] / math.sqrt(self.dt))
        shift = self.pushed(drawn[..., 1] * math.sqrt(self.dt / 12))
        return step(modes + shift, lambda now: self.nonlinear(now) + push, self.parts) - shift

    def evolve(
        self, modes: Tensor, streams: Sequence[np.random.Generator], num_frames: int, num_steps: int
    ) -> Iterator[Tensor]:
        """The modes after num_steps, 2 num_steps, ... steps, num_frames times. streams: one per row."""
        for _ in range(num_frames):
            drawn = np.stack([stream.standard_normal((num_steps, len(self.waves), 2)) for stream in streams])
            for now in torch.from_numpy(drawn).unbind(1):
                modes = self.advance(modes, now)
            yield modes


def num_steps(spacing: float, longest: float, damping: float = 0.0) -> int:
    """Number of steps in `spacing`, each at most `longest` and DAMPING / damping. damping: decay rate of the
    forced waves."""
    longest = min(longest, DAMPING / damping if damping else math.inf)
    return max(1, math.ceil(spacing / longest * (1 - 1e-12)))


def noise_driven(start: Callable[..., Tensor], evolve: Callable[..., Tensor], **facts: Any) -> Solver:
    """The solver of a family that noise drives, whose law is known: trajectories, and exact samples of their
    futures from a state.

    start(streams, resolution, parameter) -> states (batch, C, *space) of the invariant measure.
    evolve(u, streams, *, num_frames, parameter, dt) -> next frames (batch, num_frames, C, *space), float64.
    """

    def trajectory(
        seed: int, indices: Sequence[int], *, resolution: int, num_frames: int, parameter: float, t_end: float
    ) -> Tensor:
        streams = [random_stream(seed, index) for index in indices]  # also those of `evolve`
        first = start(streams, resolution, parameter)
        if num_frames == 1:
            return first[:, None]
        dt = t_end / (num_frames - 1)
        later = evolve(first, streams, num_frames=num_frames - 1, parameter=parameter, dt=dt)
        return torch.cat([first[:, None], later], 1)

    def exact_futures(u: Tensor, num: int, *, seed: int, rows: Sequence[int], **settings: Any) -> Tensor:
        states = u.double().repeat_interleave(num, 0)
        streams = [random_stream(seed, member, (STREAM, int(row))) for row in rows for member in range(num)]
        size = max(1, FUTURE_CELLS // u[0].numel())
        blocks = [
            evolve(states[first : first + size], streams[first : first + size], **settings).float()
            for first in range(0, len(states), size)
        ]
        return torch.cat(blocks).unflatten(0, (len(u), num))

    return Solver(trajectory=trajectory, exact_futures=exact_futures, **facts)
