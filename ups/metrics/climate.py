"""Are members like the truth beyond the scored leads? Figures of long rollouts, less those of the truth.

As in ups/metrics/likeness.py, a figure is a mean over members of a feature of one member, minus its mean over
samples of the truth: exact samples from the same start or, if no law is known, the data. Features are those
of all late leads together, fields in units of their mean and standard deviation in the truth:

    late mean        mean
    late variance    log of the mean square
    late spectrum    log energy in an octave of the wave number
    late slope       log of the largest less between neighbouring cells of a frame
    late memory      correlation of frames that are half of the late leads apart
    late start       correlation with the start
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ups.common.mask import filled, valid_cells
from ups.metrics.intervals import Resamples, merge
from ups.metrics.likeness import QUIET, SMALL, TINY, intervals_together, less
from ups.metrics.spectra import octaves


def features_of(u: Tensor, start: Tensor | None, boundary: str) -> dict[str, Tensor]:
    """Features (n, J, ...) of samples u (n, J, T, C, *space); start (n, C, *space)."""
    flat, later = u.flatten(4), u.shape[2] // 2
    unit = F.normalize(flat, dim=4)
    steps = [u.diff(dim=axis).abs().flatten(4).amax(4) for axis in range(4, u.ndim)]
    energy = octaves(u.flatten(0, 1), boundary).mean(1).unflatten(0, u.shape[:2])
    out = {
        "late mean": flat.mean((2, 4)),
        "late variance": flat.square().mean((2, 4)).clamp_min(TINY).log(),
        "late spectrum": (energy + QUIET).log().mT,
        "late slope": (torch.stack(steps).amax(0).mean(2) + SMALL).log(),
        "late memory": (unit[:, :, later:] * unit[:, :, : u.shape[2] - later]).sum(4).mean(2),
    }
    if start is not None:
        out["late start"] = (unit * F.normalize(start.flatten(2), dim=2)[:, None, None]).sum(4).mean(2)
    return out


def climate(
    members: Tensor, samples: Tensor, start: Tensor | None, boundary: str, resamples: Resamples
) -> dict[str, dict[str, list]]:
    """Family -> {value, low, high} of its figures.

    members (n, M, T, C, *space), samples of the truth (n or more, K, T, C, *space): late leads, from the same
    starts if start (n or more, C, *space) is given.
    """
    valid, points = valid_cells(samples.flatten(0, 1)), (0, 1, 2, *range(4, samples.ndim))
    mean = samples.nanmean(points, dtype=torch.float64)[:, *[None] * (samples.ndim - 4)]
    std = (samples - mean).square().nanmean(points).sqrt()[:, *[None] * (samples.ndim - 4)].clamp_min(TINY)

    def features(u: Tensor, row: int) -> dict[str, Tensor]:
        of_start = None if start is None else filled((start[row : row + 1] - mean) / std, valid)
        return features_of(filled((u[row : row + 1] - mean) / std, valid), of_start, boundary)

    parts = []
    for row in range(len(members)):
        ours, theirs = (features(u, row) for u in (members, samples))
        parts.append({name: less(ours[name], theirs[name]) for name in ours})
    return intervals_together(merge(parts), resamples)
