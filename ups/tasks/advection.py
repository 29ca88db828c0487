"""Linear advection u_t + beta u_x = 0 on [0, 1), periodic: the exact solution u(x, t) = u0(x - beta t).

PDEBench's files hold a second-order finite-volume solution, which deviates from this by 8e-4 (smooth waves)
to 2e-2 (windowed ones) in relative L2 norm at t = 2, purely by dispersion; ours have no such error to be
learnt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.tasks.initial import cell_centres, check_request, frame_times, sample_wave


def simulate(
    indices: Sequence[int], *, seed: int, resolution: int, num_frames: int, parameter: float | None,
    t_end: float,
) -> Tensor:
    """u at the cell centres, (n, num_frames, 1, resolution), float32.

    parameter: beta > 0, domain lengths per unit of time. Raises ValueError as `initial.check_request` lists.
    """
    check_request(indices, seed=seed, resolution=resolution, num_frames=num_frames, parameter=parameter,
                  t_end=t_end, parameter_name="beta")
    origin = cell_centres(resolution) - parameter * frame_times(num_frames, t_end)[:, None]
    u = torch.empty(len(indices), num_frames, 1, resolution, dtype=torch.float32)
    for row, index in enumerate(indices):
        u[row, :, 0] = sample_wave(seed, index)(origin)
    return u
