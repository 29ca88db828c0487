"""Reference solvers: one module per equation, float64 inside, each tested against something exact.

    simulate(indices, *, seed, resolution, num_frames, parameter, t_end) -> (n, num_frames, channel, *space)

Frames are at t = linspace(0, t_end, num_frames), values float32 in physical units. Trajectory i depends on
(seed, i) and on nothing else: every trajectory is computed alone, with tensors whose shapes do not know the
batch, so that any cutting of a data set into chunks gives the same bits (a test). Steady problems return one
frame that holds input and answer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ups.tasks import advection, burgers, darcy, darcy_grf, diff_react

SOLVERS: dict[str, Callable[..., Tensor]] = {
    "advection1d": advection.simulate,
    "burgers1d": burgers.simulate,
    "darcy2d": darcy.simulate,
    "darcy2d_grf": darcy_grf.simulate,
    "diff_react2d": diff_react.simulate,
}
