"""Statistics of long rollouts on an invariant measure, beside the truth's: what is left to judge by when no
trajectory can be followed any more.

u (n, T, C, *space) and u_ref (m, T', C, *space) of the same process in equal steps, both after what they
started from is forgotten; float64 inside. None of the figures sees all: values of the right distribution may
be white in space (spectrum) or in time (memory), and a frozen field of the truth has every figure right but
the memory.
"""

import math

import torch
from torch import Tensor

from ups.metrics.spectra import octaves

NUM_QUANTILES = 999


def quantiles(u: Tensor) -> Tensor:
    """(C, NUM_QUANTILES) of the values at points of u (n, T, C, *space)."""
    flat = u.double().movedim(2, 0).flatten(1).sort(1).values
    places = (torch.arange(NUM_QUANTILES, dtype=torch.float64) + 0.5) / NUM_QUANTILES * flat.shape[1]
    return flat[:, places.long()]


def memory(u: Tensor) -> Tensor:
    """(C,) frames after which the correlation of a point with itself falls below 1 / e, interpolated; half of
    the frames where it does not."""
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
    """variance: that of values at points over the truth's; spectrum_error: mean |log10| of the energy of
    deviations from the truth's mean over the truth's, octaves; distance: Wasserstein's of values at points,
    over the truth's standard deviation; memory: `memory` over the truth's. Means over channels; inf where u
    is not finite."""
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
