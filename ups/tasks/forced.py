"""Equations that white noise drives, in modes: u_t = L u + N(u) + sum_j f_j dW_j/dt, and their exact draws.

One step (Foster, Lyons and Oberhauser 2021, "The shifted ODE method", arXiv 2101.03446, for additive noise).
With dW = W(h) and H = mean of W(s) - s dW / h over the step, N(0, h) and N(0, h / 12), independent,

    u(h) = Phi(u(0) + f H) - f H,    Phi: the flow of u_t = L u + N(u) + f dW / h over h,

which has the integral of W over the step right, not W(h) alone. What is left of second order is h^2 / 24
times sum_j N''(f_j, f_j), zero where plane waves come in pairs (a cosine and a sine of one size) and N is
that of Burgers or of the vorticity. Strong order 3/2 then. The flow is taken by one step of ETDRK4
(ups/tasks/modes.py).

Such an equation has no memory: from a state, fresh noise draws exactly what may follow, at any lead
(`draws`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ups.common.lazy import Tensor, np, torch
from ups.tasks.initial import random_stream
from ups.tasks.modes import coefficients, step

STREAM = 1  # sets the draws apart from the trajectories of the same seed
DAMPING = 0.1  # most of a forced wave that a step may damp: its variance is right to 1e-4 then


@dataclass(frozen=True)
class Forced:
    """The equation on one grid. rates: L, real, of the shape of the modes; nonlinear: N, of modes (batch,
    ...); waves: the modes of f_j, (J, ...) complex; dt: the step."""

    rates: Tensor
    nonlinear: Callable[[Tensor], Tensor]
    waves: Tensor
    dt: float

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        return coefficients(self.rates, self.dt)

    def pushed(self, amounts: Tensor) -> Tensor:
        """sum_j amounts_j f_j, amounts (batch, J); one wave after the other, so that no row's sum depends on
        how many there are."""
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
        self, modes: Tensor, streams: Sequence["np.random.Generator"], num_frames: int, num_steps: int
    ) -> Iterator[Tensor]:
        """The modes after num_steps, 2 num_steps, ... steps, num_frames times; every row has its stream."""
        for _ in range(num_frames):
            drawn = np.stack([stream.standard_normal((num_steps, len(self.waves), 2)) for stream in streams])
            for now in torch.from_numpy(drawn).unbind(1):
                modes = self.advance(modes, now)
            yield modes


def num_steps(spacing: float, longest: float, damping: float = 0.0) -> int:
    """Steps of at most `longest` in `spacing`, and of at most DAMPING / damping, the rate at which the forced
    waves decay."""
    longest = min(longest, DAMPING / damping if damping else math.inf)
    return max(1, math.ceil(spacing / longest * (1 - 1e-12)))


def trajectories(
    start: Callable[..., Tensor],
    evolve: Callable[..., Tensor],
    seed: int,
    indices: Sequence[int],
    *,
    resolution: int,
    num_frames: int,
    parameter: float,
    t_end: float,
) -> Tensor:
    """Task.simulate: from start(streams, resolution, parameter) (n, C, *space) on, (n, num_frames, C,
    *space); a stream serves both."""
    streams = [random_stream(seed, index) for index in indices]
    first = start(streams, resolution, parameter)[:, None]
    if num_frames == 1:
        return first
    later = evolve(
        first[:, 0], streams, num_frames=num_frames - 1, parameter=parameter, dt=t_end / (num_frames - 1)
    )
    return torch.cat([first, later], 1)


def draws(
    evolve: Callable[..., Tensor],
    u: Tensor,
    num: int,
    *,
    seed: int,
    rows: Sequence[int],
    cells_at_once: int = 2**18,
    **settings: Any,
) -> Tensor:
    """Task.draw: `num` independent futures of each state u (n, C, *space), (n, num, num_frames, C, *space).

    evolve(u, streams, **settings): frames that follow (batch, num_frames, C, *space). Draw j of a state is a
    function of (seed, its number in `rows`, j).
    """
    states = u.double().repeat_interleave(num, 0)
    streams = [random_stream(seed, member, (STREAM, int(row))) for row in rows for member in range(num)]
    size = max(1, cells_at_once // u[0].numel())
    parts = [
        evolve(states[first : first + size], streams[first : first + size], **settings).float()
        for first in range(0, len(states), size)
    ]
    return torch.cat(parts).unflatten(0, (len(u), num))
