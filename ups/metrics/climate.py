"""Statistics of long rollouts against the truth's, after the time to which a trajectory is predictable.

u (n, T, C, *space) and u_ref (m, T', C, *space) are of one process with equal time steps, both after the
initial condition is forgotten; float64 inside. No single statistic suffices: values of the right distribution
may be white in space (spectrum) or in time (memory), and a frozen field of the truth is wrong in the memory
alone.
"""

import math

import torch
from torch import Tensor

from ups.metrics.spectra import octaves

NUM_QUANTILES = 999


def quantiles(u: Tensor) -> Tensor:
    """Quantiles (C, NUM_QUANTILES) of the values of u (n, T, C, *space) at points."""
    flat = u.double().movedim(2, 0).flatten(1).sort(1).values
    places = (torch.arange(NUM_QUANTILES, dtype=torch.float64) + 0.5) / NUM_QUANTILES * flat.shape[1]
    return flat[:, places.long()]


def memory(u: Tensor) -> Tensor:
    """Frames (C,) after which the autocorrelation at a point falls below 1 / e, interpolated; half of the
    frames if it does not."""
    away = u.double() - u.double().mean((0, 1, *range(3, u.ndim)), keepdim=True)
    most = max(1, u.shape[1] // 2)
    axes = (0, 1, *range(3, u.ndim))
    correlation = torch.stack(
        [(away[:, : u.shape[1] - lag] * away[:, lag:]).mean(axes) for lag in range(most + 1)]
    )
    correlation = correlation / correlation[0]
    out = torch.full((u.shape[2],), float(most), dtype=torch.float64)
    for channel, curve in enumerate(correlation.T):
        below = (curve < 1 / math.e).nonzero()
        if len(below):
            lag = int(below[0])
            before, after = curve[lag - 1], curve[lag]
            out[channel] = lag - 1 + float((before - 1 / math.e) / (before - after))
    return out


def climate(u: Tensor, u_ref: Tensor, boundary: str) -> dict[str, float]:
    """Statistics of u relative to those of u_ref, means over channels; inf if u is not finite.

    variance: ratio of the variances at points; spectrum_error: mean |log10| ratio of the energies of
    deviations from the truth's mean, over octaves; distance: Wasserstein distance of the values at points,
    over the truth's standard deviation; memory: ratio of `memory`.
    """
    if not bool(u.isfinite().all()):
        return dict.fromkeys(("variance", "spectrum_error", "distance", "memory"), math.inf)
    points = (0, 1, *range(3, u.ndim))
    mean, deviation = (getattr(u_ref.double(), name)(points, keepdim=True) for name in ("mean", "std"))
    x, y = (u.double() - mean) / deviation, (u_ref.double() - mean) / deviation
    ours, theirs = (octaves(part, boundary).mean((0, 1)) for part in (x, y))
    return {
        "variance": float((x.var(points) / y.var(points)).mean()),
        "spectrum_error": float((ours / theirs).log10().abs().mean()),
        "distance": float((quantiles(x) - quantiles(y)).abs().mean()),
        "memory": float((memory(x) / memory(y)).mean()),
    }
