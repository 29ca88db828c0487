"""Bases of a grid axis that follow its boundary: real Fourier when periodic, cosine or sine when not.

Dense matrices on purpose: axes of tokens and cells are short (16 to 1024), and a matrix product with the
modes that are kept is faster than a transform of all of them, on CPU and on GPU, and works in bf16.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ups.boundary import DIRICHLET, PERIODIC


def fourier_pairs(n: int, modes: int) -> Tensor:
    """Orthonormal real Fourier rows (2, modes, n), float64: cosines, then sines, of wave numbers 0 .. modes -
    1.

    modes: at most n // 2 + 1, all there are. The sines of wave numbers 0 and n/2 are zero rows; all others
    have unit norm.
    """
    angle = 2 * math.pi * torch.outer(torch.arange(modes, dtype=torch.float64),
                                      torch.arange(n, dtype=torch.float64)) / n
    rows = torch.stack([angle.cos(), angle.sin()])
    norm = rows.norm(dim=-1, keepdim=True)
    return torch.where(norm > 1e-6, rows / norm.clamp_min(1e-6), torch.zeros_like(rows))


def cosine(n: int) -> Tensor:
    """Orthonormal DCT-II rows (n, n), float64: even at both walls, which lie half a cell outside the first
    and last centre."""
    return _waves(torch.cos, 0, n)


def sine(n: int) -> Tensor:
    """Orthonormal DST-II rows (n, n), float64: odd at both walls (u = 0 there); wave numbers 1 .. n."""
    return _waves(torch.sin, 1, n)


def _waves(wave: Callable[[Tensor], Tensor], first: int, n: int) -> Tensor:
    """The n rows of wave numbers from `first` on: 0, which is scaled apart, or 1, where the last one is."""
    k, j = torch.arange(first, n + first, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    rows = wave(math.pi * torch.outer(k, j + 0.5) / n) * math.sqrt(2 / n)
    rows[-first] /= math.sqrt(2)
    return rows


def apply_axes(u: Tensor, matrices: list[Tensor]) -> Tensor:
    """`matrices[i]` (m, n) applied to the i-th of the last len(matrices) axes of u."""
    first = u.ndim - len(matrices)
    for axis, matrix in enumerate(matrices, first):
        u = torch.movedim(torch.movedim(u, axis, -1) @ matrix.mT, -1, axis)
    return u


def interpolation(n: int, m: int, boundary: str) -> Tensor:
    """(m, n), float64: values at m points of the series of min(n, m) modes that n values determine.

    Fourier if periodic, the first points of both grids in one place; else cosine, values at the centres of n
    and m cells. Exact for fields of these modes, keeps the mean over the axis, and there and back by a finer
    grid is the identity.
    """
    kept = min(n, m)
    if boundary != PERIODIC:
        return cosine(m)[:kept].mT @ cosine(n)[:kept] * math.sqrt(m / n)
    u_hat = torch.fft.rfft(torch.eye(n, dtype=torch.float64), norm="forward")[:, : kept // 2 + 1]
    if kept % 2 == 0 and n != m:   # the last wave of the coarser grid: one term there, two on the finer
        u_hat[:, -1] *= 2.0 if m < n else 0.5
    return torch.fft.irfft(u_hat, n=m, norm="forward").mT


def resample(u: Tensor, space: Sequence[int], boundary: str) -> Tensor:
    """u (..., *own space) on the grid `space` of the same domain: `interpolation` of every axis, in
    float64."""
    own = u.shape[-len(space) :]
    matrices = [interpolation(n, m, boundary).to(u.device) for n, m in zip(own, space, strict=True)]
    return apply_axes(u.double(), matrices).to(u.dtype)


class FieldTransform(nn.Module):
    """Full orthonormal transform of a field (..., *space) into (..., modes) and back: Fourier if periodic,
    sine for a Dirichlet wall, else cosine.

    modes: number of (flattened) modes. A periodic field uses the half spectrum of a real transform. Nothing
    is learnt or saved; the matrices move with the module.
    """

    def __init__(self, space: tuple[int, ...], boundary: str):
        super().__init__()
        self.space, self.is_periodic = tuple(space), boundary == PERIODIC
        make = sine if boundary == DIRICHLET else cosine
        for axis, n in enumerate(() if self.is_periodic else self.space):
            self.register_buffer(f"matrix{axis}", make(n).float(), persistent=False)
        self.shape = (*self.space[:-1], self.space[-1] // 2 + 1) if self.is_periodic else self.space
        self.modes = math.prod(self.shape)

    def forward(self, u: Tensor) -> Tensor:
        """(..., *space) to (..., modes), complex if periodic; float32 or float64 as given."""
        ndim = len(self.space)
        if self.is_periodic:
            return torch.fft.rfftn(u, dim=tuple(range(-ndim, 0)), norm="ortho").flatten(-ndim)
        return apply_axes(u, self._matrices(u)).flatten(-ndim)

    def inverse(self, u_hat: Tensor) -> Tensor:
        """(..., modes) to (..., *space)."""
        u_hat = u_hat.unflatten(-1, self.shape)
        if self.is_periodic:
            return torch.fft.irfftn(u_hat, s=self.space, dim=tuple(range(-len(self.space), 0)), norm="ortho")
        return apply_axes(u_hat, [m.mT for m in self._matrices(u_hat)])

    def _matrices(self, like: Tensor) -> list[Tensor]:
        return [getattr(self, f"matrix{axis}").to(like) for axis in range(len(self.space))]
