"""Darcy flow with a log-normal coefficient: what is not observed of a has a known distribution given what is.

    -div(a grad u) = beta on (0, 1)^2, u = 0 on the wall,   a = exp(g),   g as in ups/tasks/log_normal.py

Ours, not PDEBench's. Any linear observation of g leaves a Gaussian (ups/tasks/darcy_grf_posterior.py), which
PDEBench's thresholded bumps (ups/tasks/darcy.py) do not offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ups.lazy import Tensor
from ups.tasks import darcy
from ups.tasks.darcy_grf_posterior import truth_ensemble
from ups.tasks.initial import random_stream
from ups.tasks.log_normal import draw_field


def sample_log_coefficient(seed: int, index: int, resolution: int) -> Tensor:
    """g of trajectory `index`: (resolution, resolution), float64."""
    return draw_field(random_stream(seed, index), resolution)


def sample_coefficient(seed: int, index: int, resolution: int) -> Tensor:
    """a = exp(g) of trajectory `index`: (resolution, resolution), float64, positive."""
    return sample_log_coefficient(seed, index, resolution).exp()


def simulate(
    indices: Sequence[int], *, seed: int, resolution: int, num_frames: int, parameter: float | None,
    t_end: float,
) -> Tensor:
    """Channels (a, u), space axes (x, y): (n, 1, 2, resolution, resolution), float32; arguments as in
    `darcy.simulate`."""
    return darcy.simulate(indices, seed=seed, resolution=resolution, num_frames=num_frames,
                          parameter=parameter, t_end=t_end, sample=sample_coefficient, is_smooth=True)


FAMILY = (
    replace(darcy.DARCY, name="darcy2d_grf", filename="2D_DarcyFlow_GRF_beta{}.hdf5", resolution=64,
            positive=("a",),
            equation="-∇·(a ∇u) = beta, log a Gaussian", published={}, simulate=simulate,
            posterior=truth_ensemble, defaults={"parameters": [1.0], "reserve": 0.5}),
)
