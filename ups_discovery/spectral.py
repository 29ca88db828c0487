"""Bases of a grid axis that follow its boundary: real Fourier when periodic, cosine or sine when not.

Dense matrices on purpose: axes of tokens and cells are short (16 to 1024), and a matrix product with the
modes that are kept is faster than a transform of all of them, on CPU and on GPU, and works in bf16.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ups_discovery.boundary import DIRICHLET, PERIODIC, along


def fourier_pairs(n: int, modes: int) -> Tensor:
    """Orthonormal real Fourier rows (2, modes, n), float64: cosines, then sines, of wave numbers 0 .. modes -
    1.

    modes: at most n // 2 + 1, all there are. The sines of wave numbers 0 and n/2 are zero rows; all others
    have unit norm.
    """
    angle = (
        2
        * math.pi
        * torch.outer(torch.arange(modes, dtype=torch.float64), torch.arange(n, dtype=torch.float64))
        / n
    )
    return _unit(torch.stack([angle.cos(), angle.sin()]))


def fourier(n: int) -> Tensor:
    """All n orthonormal real Fourier rows (n, n), float64."""
    rows = fourier_pairs(n, n // 2 + 1).flatten(0, 1)
    return rows[rows.norm(dim=1) > 0]


def cosine(n: int) -> Tensor:
    """Orthonormal DCT-II rows (n, n), float64: even at both walls, which lie half a cell outside the first
    and last centre."""
    return _waves(torch.cos, 0, n)


def sine(n: int) -> Tensor:
    """Orthonormal DST-II rows (n, n), float64: odd at both walls (u = 0 there); wave numbers 1 .. n."""
    return _waves(torch.sin, 1, n)


def box(ends: Sequence[str], modes: int) -> list[tuple[int, ...]]:
    """Wave numbers along each axis of the waves that go along all axes together, below `modes` on each: half
    of those with signs along periodic axes, for k and -k are one wave; along the others 0 .. modes - 1."""
    sides = [range((1 - modes) * (end == PERIODIC), modes) for end in ends]

    def is_kept(k: tuple[int, ...]) -> bool:  # the last that has a sign and is not 0 is above it
        signed = [wave for wave, end in zip(k, ends, strict=True) if end == PERIODIC and wave]
        return not signed or signed[-1] > 0

    return [k for k in itertools.product(*sides) if is_kept(k)]


def box_rows(k: Sequence[tuple[int, ...]], sizes: Sequence[int], ends: Sequence[str]) -> Tensor:
    """Rows (2, K, prod(sizes)), float64, of K of the waves of `box`: cosines, then sines, of the phase along
    the periodic axes, times the cosines of the others; (1, K, ..) where none is periodic.

    Orthonormal where every |k| is below half of a periodic size and below the others'. The sine of no phase
    is a row of zeros.
    """
    cells = torch.meshgrid(*[torch.arange(n, dtype=torch.float64) for n in sizes], indexing="ij")
    phase = torch.zeros(len(k), *sizes, dtype=torch.float64)
    height = torch.ones_like(phase)
    for waves, x, n, end in zip(zip(*k, strict=True), cells, sizes, ends, strict=True):
        if end == PERIODIC:
            phase += torch.tensor(waves).view(-1, *[1] * len(sizes)) * x * (2 * math.pi / n)
        else:
            height *= cosine(n)[list(waves)][:, x.long()]
    rows = [height * phase.cos(), height * phase.sin()] if PERIODIC in ends else [height]
    return _unit(torch.stack(rows).flatten(2))


def _unit(rows: Tensor) -> Tensor:
    """Rows scaled to unit norm; rows that are zero up to rounding become zero."""
    norm = rows.norm(dim=-1, keepdim=True)
    return torch.where(norm > 1e-6, rows / norm.clamp_min(1e-6), torch.zeros_like(rows))


def _waves(wave: Callable[[Tensor], Tensor], first: int, n: int) -> Tensor:
    """The n rows of wave numbers from `first` on; the first row (for 0) or the last (for 1) has another
    scale."""
    k, j = torch.arange(first, n + first, dtype=torch.float64), torch.arange(n, dtype=torch.float64)
    rows = wave(math.pi * torch.outer(k, j + 0.5) / n) * math.sqrt(2 / n)
    rows[-first] /= math.sqrt(2)
    return rows


def apply_axes(u: Tensor, matrices: list[Tensor]) -> Tensor:
    """`matrices[i]` (m, n) applied to the i-th of the last len(matrices) axes of u."""
    first = u.ndim - len(matrices)
    for axis, matrix in enumerate(matrices, first):
        u = apply_axis(u, matrix, axis)
    return u


def apply_axis(u: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """A matrix (m, n) applied to one axis of u."""
    return torch.movedim(torch.movedim(u, axis, -1) @ matrix.mT, -1, axis)


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
    if kept % 2 == 0 and n != m:  # the last wave of the coarser grid: one term there, two on the finer
        u_hat[:, -1] *= 2.0 if m < n else 0.5
    return torch.fft.irfft(u_hat, n=m, norm="forward").mT


def resample(u: Tensor, space: Sequence[int], boundary: str) -> Tensor:
    """u (..., *space of its grid) interpolated to the grid `space` of the same domain, axis by axis, in
    float64."""
    sizes = u.shape[-len(space) :]
    matrices = [
        interpolation(n, m, end).to(u.device)
        for n, m, end in zip(sizes, space, along(boundary, len(space)), strict=True)
    ]
    return apply_axes(u.double(), matrices).to(u.dtype)


class FieldTransform(nn.Module):
    """Full orthonormal transform of a field (..., *space) into (..., modes) and back, axis by axis: Fourier
    if periodic, sine for Dirichlet walls, else cosine.

    modes: number of (flattened) modes, complex if any axis is periodic: then the last periodic one uses the
    half spectrum of a real transform. Nothing is learnt or saved; the matrices move with the module.
    """

    def __init__(self, space: tuple[int, ...], boundary: str):
        super().__init__()
        self.space, ends = tuple(space), along(boundary, len(space))
        self.periodic = [axis for axis, end in enumerate(ends) if end == PERIODIC]
        self.walls = [axis for axis, end in enumerate(ends) if end != PERIODIC]
        for axis in self.walls:
            make = sine if ends[axis] == DIRICHLET else cosine
            self.register_buffer(f"matrix{axis}", make(self.space[axis]).float(), persistent=False)
        self.is_complex, shape = bool(self.periodic), list(self.space)
        for axis in self.periodic[-1:]:
            shape[axis] = shape[axis] // 2 + 1
        self.shape = tuple(shape)
        self.modes = math.prod(self.shape)
        self.firsts = [0.5 * (end == DIRICHLET) for end in ends]  # smallest wave numbers

    @property
    def multiplicity(self) -> Tensor:
        """How many waves of the full spectrum a mode of the half spectrum stands for, (modes,): 1 or 2."""
        count = torch.ones(self.shape)
        for axis in self.periodic[-1:]:
            count.narrow(axis, 1, (self.space[axis] - 1) // 2).fill_(2.0)
        return count.flatten()

    @property
    def wave_numbers(self) -> Tensor:
        """|k| of every mode (modes,), float64, in waves per box; along walls multiples of 1/2."""
        waves = []
        for axis, (n, size, first) in enumerate(zip(self.space, self.shape, self.firsts, strict=True)):
            k = torch.arange(size, dtype=torch.float64)
            waves.append(torch.minimum(k, n - k) if axis in self.periodic else k / 2 + first)
        grid = torch.meshgrid(*waves, indexing="ij")
        return torch.stack([k.square() for k in grid]).sum(0).sqrt().flatten()

    def forward(self, u: Tensor) -> Tensor:
        """(..., *space) to (..., modes); float32 or float64 as given."""
        ndim = len(self.space)
        u = self._across_walls(u, False) if self.walls else u
        if self.periodic:
            u = torch.fft.rfftn(u, dim=[axis - ndim for axis in self.periodic], norm="ortho")
        return u.flatten(-ndim)

    def inverse(self, u_hat: Tensor) -> Tensor:
        """(..., modes) to (..., *space)."""
        u = u_hat.unflatten(-1, self.shape)
        if self.periodic:
            u = torch.fft.irfftn(
                u,
                s=[self.space[axis] for axis in self.periodic],
                dim=[axis - len(self.space) for axis in self.periodic],
                norm="ortho",
            )
        return self._across_walls(u, True) if self.walls else u

    def _across_walls(self, u: Tensor, is_back: bool) -> Tensor:
        """The transform of u along every axis with walls, or its inverse."""
        for axis in self.walls:
            matrix = getattr(self, f"matrix{axis}").to(u)
            matrix = matrix.mT if is_back else matrix
            if axis == len(self.space) - 1:
                u = u @ matrix.mT
            else:  # the axes behind as columns: no copy of u
                behind = u.shape[1 + axis - len(self.space) :]
                u = (matrix @ u.flatten(1 + axis - len(self.space))).unflatten(-1, behind)
        return u
