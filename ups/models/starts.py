"""The laws of starts (or coefficients) and of the forcing in the training data, as priors of inversions: a
Gaussian with independent waves, whose variance depends on the field and the wave number alone.

    w = sum_k sqrt(v_|k|) theta_k phi_k,   theta_k ~ N(0, 1)

w is a normalised field; phi_k are orthonormal products of Fourier waves along periodic axes and cosines along
the others. Of a forcing, theta_k has a correlation of rho_|k| from frame to frame (a Markov chain).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.data.tokenizer import Tokenizer
from ups_discovery.boundary import PERIODIC, along
from ups_discovery.spectral import apply_axes, cosine, fourier

if TYPE_CHECKING:
    from ups.data.cache import Cache

BINS = 2  # per wave number
TAIL = 1e-6  # of the variance is in waves that are left out
MOST_ROWS = 256  # of the training data, from which a law is estimated
MOST_WAVES, MOST_NUMBERS = 256, 2**26  # of a prior: waves, and their values in all cells


def _axes(space: Sequence[int], boundary: str) -> tuple[list[Tensor], Tensor]:
    """Orthonormal rows (n, n) of every axis, and the bin of their products, (*space)."""
    rows, squares = [], torch.zeros(*[1] * len(space), dtype=torch.float64)
    for axis, (n, end) in enumerate(zip(space, along(boundary, len(space)), strict=True)):
        numbers = [*range(n // 2 + 1), *range(1, (n + 1) // 2)] if end == PERIODIC else [*range(n)]
        rows.append(fourier(n) if end == PERIODIC else cosine(n))
        shape = [-1 if other == axis else 1 for other in range(len(space))]
        squares = squares + torch.tensor(numbers).double().square().view(shape)
    return rows, (BINS * squares.sqrt()).round().long()


def spectrum_of(w: Tensor, boundary: str) -> list[list[float]]:
    """The mean square of a wave of normalised fields w (rows, C, *space), by field and bin."""
    rows, bins = _axes(w.shape[2:], boundary)
    square = apply_axes(w.double().cpu(), rows).square().mean(0).flatten(1)
    total, count = torch.zeros(w.shape[1], int(bins.max()) + 1).double(), torch.bincount(bins.flatten())
    total.index_add_(1, bins.flatten(), square)
    return [[float(f"{value:.5g}") for value in row] for row in (total / count.clamp_min(1)).tolist()]


def laws_of(cache: "Cache") -> dict[str, list[list[float]] | None]:
    """`spectrum_of` the first trained frames, or coefficients, of the training split: "starts"; of forcing
    fields, and then of their changes in a frame: "forcings"."""
    task, first = cache.task, cache.settings.train_from
    codec = cache.input_tokenizer if task.is_steady else cache.tokenizer
    most = MOST_NUMBERS // (codec.num_channels * math.prod(codec.space))
    rows = cache.rows_by_parameter("train", max(1, min(MOST_ROWS, most)))
    z = cache.inputs(rows) if task.is_steady else cache.batch(rows, first, 1)
    found = {"starts": spectrum_of(codec.decode(z)[:, 0], task.boundary), "forcings": None}
    if task.forcing:
        rows = rows[: max(1, most // cache.num_frames)]
        f = cache.forcing_tokenizer.decode(cache.forcing(rows, first, cache.num_frames - first))
        parts = torch.cat([f[:, :-1], f.diff(dim=1)], 2)
        found["forcings"] = spectrum_of(parts.flatten(0, 1), task.boundary)
    return found


def prior_waves(
    codec: Tokenizer, boundary: str, spectrum: list[list[float]], changes: list[list[float]] | None = None
) -> tuple[Tensor, Tensor]:
    """sqrt(v_k) phi_k of the waves with most of the variance, (waves, C, *space), float32, and their rho_k
    from the `spectrum_of` changes in a frame, (waves,), float64: 0 without."""
    rows, bins = _axes(codec.space, boundary)
    variance = torch.tensor(spectrum, dtype=torch.float64)[:, bins.flatten()].flatten()
    ordered, index = variance.sort(descending=True)
    enough = int((ordered.cumsum(0) < (1 - TAIL) * ordered.sum()).sum()) + 1
    num = max(1, min(enough, MOST_WAVES, MOST_NUMBERS // variance.numel()))
    found = torch.zeros(num, codec.num_channels, *codec.space)
    for place, (number, square) in enumerate(zip(index[:num].tolist(), ordered.tolist(), strict=False)):
        field, *waves = torch.unravel_index(torch.tensor(number), (codec.num_channels, *codec.space))
        wave = torch.tensor(math.sqrt(square)).double()
        for of_axis, row in zip(rows, waves, strict=True):
            wave = wave[..., None] * of_axis[int(row)]
        found[place, int(field)] = wave.float()
    memory = torch.zeros(num, dtype=torch.float64)
    if changes is not None:  # their mean square is 2 v_k (1 - rho_k)
        change = torch.tensor(changes, dtype=torch.float64)[:, bins.flatten()].flatten()
        memory = (1 - change[index[:num]] / ordered[:num].clamp_min(1e-30) / 2).clamp(-1, 1)
    return codec.masked(found), memory
