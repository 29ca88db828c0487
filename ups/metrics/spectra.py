"""Energy by wave number: of fields, of errors, and in octaves.

Axes: u (n, T, C, *space), box length 1, wave numbers in cycles per box.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ups.common.mask import cell_mean, filled, fraction, valid_cells
from ups_discovery.boundary import PERIODIC, along
from ups_discovery.spectral import cosine

# fraction of a field's energy below which a band holds float32 rounding errors only ((2^-23)^2 = 1.4e-14)
ROUNDING = 1e-13


def space_axes(u: Tensor) -> tuple[int, ...]:
    return tuple(range(3, u.ndim))


def rms(u: Tensor) -> Tensor:
    """Root mean square over space, sqrt(<u^2>_x): (n, T, C, *space) -> (n, T, C)."""
    return cell_mean(u.double().square(), valid_cells(u)).sqrt()


def _whole(u: Tensor) -> Tensor:
    """A field (n, T, C, *space), float64, with the mean of the valid cells in the others, so that the edge of
    a mask has no spectrum; deviations are scaled to keep the energy per cell."""
    valid = valid_cells(u)
    if valid is None:
        return u
    cells = (..., *[None] * (u.ndim - 3))
    mean = cell_mean(u, valid)[cells]
    return mean + filled(u - mean, valid) / fraction(valid).to(u).sqrt()[cells]


def _shells(power: Tensor, waves: Sequence[Tensor]) -> Tensor:
    """Sums of `power` (n, T, C, *grid) over cells of equal floor(|k|), k from `waves` (one vector per axis).

    -> (n, T, C, shells).
    """
    index = sum(k.square() for k in torch.meshgrid(*waves, indexing="ij")).sqrt().floor().long().flatten()
    out = torch.zeros(*power.shape[:3], int(index.max()) + 1, dtype=power.dtype, device=power.device)
    return out.index_add_(3, index, power.flatten(3))


def energy_spectrum(u: Tensor, boundary: str) -> Tensor:
    """Radial energy spectrum E_k -> (n, T, C, shells), with sum_k E_k = <u^2>_x (Parseval).

    Periodic axes: |u_hat|^2 / N^2 summed over floor(|k|) = shell, every quadrant. Any other: the orthonormal
    cosine transform (an even extension), whose mode m has m/2 cycles per box, because a Fourier transform
    would see a jump at the edge as a false 1/k^2 tail. Ours; shells reach the corner of the grid, plot them
    up to min(n_i)/2.
    """
    u, space = _whole(u.double()), u.shape[3:]
    ends = along(boundary, len(space))
    waves = [
        torch.fft.fftfreq(n, 1 / n, dtype=torch.float64, device=u.device)
        if end == PERIODIC
        else torch.arange(n, dtype=torch.float64, device=u.device) / 2
        for n, end in zip(space, ends, strict=True)
    ]
    for axis, (n, end) in enumerate(zip(space, ends, strict=True), 3):
        if end != PERIODIC:
            u = (u.movedim(axis, -1) @ cosine(n).to(u.device).mT).movedim(-1, axis)
    periodic = [axis for axis, end in enumerate(ends, 3) if end == PERIODIC]
    power = torch.fft.fftn(u, dim=periodic, norm="ortho").abs() if periodic else u
    return _shells(power.square() / math.prod(space), waves)


def octaves(u: Tensor, boundary: str) -> Tensor:
    """Energy of u in octaves 1, 2-3, 4-7, ... of the wave number -> (n, T, C, bands); the last reaches
    min(n_i) / 2."""
    space = u.shape[3:]
    last = min(space) // 2
    if last < 1:
        raise ValueError(
            f"a grid of {tuple(space)} cells; expected at least 2 per axis in a spectrum. Leave spectra out."
        )
    spectrum = energy_spectrum(u, boundary)
    edges = [*(2**j for j in range(max(1, int(math.log2(last))))), last + 1]
    return torch.stack([spectrum[..., a:b].sum(-1) for a, b in itertools.pairwise(edges)], -1)
