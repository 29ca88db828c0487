"""Patch-POD codec: maps physical fields to latents and back, by one matrix product each way.

    w = (log u or u, minus the channel mean) / channel std          normalised field
    z = P(w) B,   w_hat = P^-1(z B^T),   B^T B = 1                  latents

P cuts space into patches of `patch` cells per axis. A patch, with its channels one after the other, is a
vector of `width` = channels * patch^ndim numbers. The columns of B are the leading eigenvectors of the second
moment of these vectors over the training split: the linear basis with the least mean squared error (proper
orthogonal decomposition; Sirovich 1987). Only the channel mean is subtracted, so z = 0 is the mean field and
both maps are linear in w. B is orthonormal, so an error of z equals the error of w inside the basis
(Parseval).

Cells without a value, such as land in a field of the sea, form a mask. They are NaN in physical units and 0
in normalised ones; statistics are those of the other cells.

Fields are (..., channel, *space), latents (..., *tokens, dim); any leading axes.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

TENSORS = ("mean", "std", "basis", "spectrum")
SLAB = 2**22  # numbers converted to float64 at a time (32 MiB), whatever the size of a trajectory
SMOOTHINGS = 16  # of the cells of a mask; so many cells around a coast show no edges of the blocks


def patchify(w: Tensor, ndim: int, patch: int) -> Tensor:
    """Patch vectors (..., *tokens, C * patch^ndim) of a field (..., C, *space)."""
    first = w.ndim - ndim - 1  # the axis of channels
    for axis in range(first + 1, first + 1 + 2 * ndim, 2):
        w = w.unflatten(axis, (-1, patch))  # tokens, cells within them
    tokens = tuple(range(first + 1, first + 1 + 2 * ndim, 2))
    return w.movedim(tokens, tuple(range(first, first + ndim))).flatten(first + ndim)


def unpatchify(vectors: Tensor, ndim: int, patch: int) -> Tensor:
    """The inverse of `patchify`."""
    lead, tokens = vectors.shape[: -ndim - 1], vectors.shape[-ndim - 1 : -1]
    first = len(lead)
    pairs = [axis for i in range(ndim) for axis in (first + i, first + ndim + 1 + i)]
    blocks = vectors.reshape(*lead, *tokens, -1, *[patch] * ndim).permute(
        [*range(first), first + ndim, *pairs]
    )
    return blocks.reshape(*lead, -1, *(size * patch for size in tokens))


def mask_as_text(mask: np.ndarray) -> str:
    """A mask (C, *space) as run lengths: number of cells with a value, then without, then with, .."""
    ends = np.flatnonzero(np.diff(mask.ravel())) + 1
    return " ".join(map(str, [0] * bool(mask.flat[0]) + np.diff([0, *ends, mask.size]).tolist()))


def mask_from_text(text: str, shape: Sequence[int]) -> np.ndarray:
    """The inverse of `mask_as_text`. Raises ValueError for a text that is not a mask of that shape."""
    words = text.split()
    lengths = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 16]
    if len(lengths) != len(words) or sum(lengths) != math.prod(shape):
        raise ValueError(
            f"{text!r:.60} is not a mask of {tuple(shape)} cells; expected the lengths of its "
            "runs. Take another copy of the file, or make it again."
        )
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(shape)


class PatchMoments:
    """Sums over the data, in float64, from which `Tokenizer.from_moments` computes statistics and basis.

    For patch vectors x (positive channels in log-space) these are the count, the sum of x - shift, and the
    sum of its outer product. shift is the channel mean of the first batch; it prevents cancellation.
    mask (C, *space): True where a cell never has a value; None if all cells have one.
    """

    def __init__(
        self,
        fields: Sequence[str],
        positive: Sequence[str],
        space: Sequence[int],
        patch: int,
        mask: np.ndarray | None = None,
    ):
        self.fields, self.positive = tuple(fields), tuple(name for name in fields if name in positive)
        self.space, self.ndim, self.patch, self.count = tuple(space), len(space), patch, 0
        self.mask = mask if mask is not None and mask.any() else None
        self.valid = None if self.mask is None else torch.from_numpy(~self.mask)

    def add(self, u: np.ndarray) -> None:
        """Add a batch (n, T, C, *space), float32, physical units."""
        frames = torch.from_numpy(np.ascontiguousarray(u)).flatten(0, 1)
        assert frames.shape[1:] == (len(self.fields), *self.space), (u.shape, self.fields, self.space)
        if self.valid is not None:
            frames = torch.where(self.valid, frames, 1.0)  # has a logarithm; its weight below is 0
        if not self.count:
            w, axes = _log(frames, self.fields, self.positive, self.ndim), (0, *range(2, frames.ndim))
            mean = (
                w.mean(dim=axes, dtype=torch.float64)
                if self.valid is None
                else (w.double() * self.valid).sum(axes) / (len(w) * num_valid(self.valid))
            )
            self.shift = mean.repeat_interleave(self.patch**self.ndim)
            self.first, self.second = (
                torch.zeros_like(self.shift),
                torch.zeros(2 * self.shift.shape, dtype=torch.float64),
            )
            if self.valid is not None:  # sums of x times valid, to subtract the means later
                self.cells = patchify(self.valid.double(), self.ndim, self.patch).flatten(0, -2)
                self.cross = torch.zeros_like(self.second)
        for slab in frames.split(max(1, SLAB // frames[0].numel())):
            w = _log(slab, self.fields, self.positive, self.ndim).double()
            x = patchify(w, self.ndim, self.patch).flatten(0, -2) - self.shift
            if self.valid is not None:
                x = x * self.cells.repeat(len(slab), 1)
                self.cross += x.view(len(slab), *self.cells.shape).sum(0).T @ self.cells
            self.count += x.shape[0]
            self.first += x.sum(0)
            self.second += x.T @ x


class Tokenizer(nn.Module):
    """The codec of one set of fields. It has float32 buffers and no parameters.

    space, tokens: cells and patches per axis of the grid it was fitted on. dim: numbers kept per token, of
    `width`. spectrum (width,): fraction of the patch energy in every mode, largest first.
    mask: cells without a value, as text of `mask_as_text`; valid (C, *space): the other cells, None if all
    have a value. Raises ValueError for a text that is not a mask.
    """

    def __init__(
        self,
        mean: Tensor,
        std: Tensor,
        basis: Tensor,
        spectrum: Tensor,
        *,
        space: Sequence[int],
        patch: int,
        fields: Sequence[str],
        positive: Sequence[str],
        mask: str = "",
    ):
        super().__init__()
        self.space, self.patch = tuple(int(size) for size in space), int(patch)
        self.fields, self.positive = tuple(fields), tuple(positive)
        self.ndim, self.num_channels, self.dim = len(self.space), len(self.fields), basis.shape[1]
        self.channel_shape = (-1, *[1] * self.ndim)  # of one number per channel, beside a field
        self.tokens = tuple(size // self.patch for size in self.space)
        self.width = self.num_channels * self.patch**self.ndim
        for name, value in zip(TENSORS, (mean, std, basis, spectrum), strict=True):
            self.register_buffer(name, value.detach().to(torch.float32).contiguous())
        self.mask, shape = mask, (self.num_channels, *self.space)
        self.register_buffer(
            "valid", torch.from_numpy(~mask_from_text(mask, shape)) if mask else None, persistent=False
        )
        assert self.basis.shape[0] == self.width and self.mean.shape == self.std.shape == (self.num_channels,)

    @property
    def kept_energy(self) -> float:
        """Fraction of the training patches' energy inside the basis; 1 if all modes are kept."""
        return 1.0 - float(self.spectrum[self.dim :].double().sum())

    @classmethod
    def from_moments(cls, moments: PatchMoments, dim: int, energy: float) -> "Tokenizer":
        """The tokenizer with the statistics and leading eigenvectors of `moments`.

        dim: numbers per token; 0 keeps the fewest modes that hold the fraction `energy` of the patch energy
        (1.0: all modes).
        """
        cells, channels = moments.patch**moments.ndim, len(moments.fields)
        average, second = moments.first / moments.count, moments.second / moments.count
        # fraction of cells with a value
        filled = 1.0 if moments.valid is None else num_valid(moments.valid) / math.prod(moments.space)
        offset = average.view(channels, cells).mean(1) / filled
        variance = second.diagonal().view(channels, cells).mean(1) / filled - offset**2
        mean, std = moments.shift[::cells] + offset, variance.clamp(min=0).sqrt()
        # A constant channel has no scale: 1 keeps the map invertible. A variation below 1e-7 of the mean is
        # float32 rounding.
        std = torch.where(std > 1e-7 * mean.abs(), std, torch.ones_like(std))
        offset, scale = offset.repeat_interleave(cells), std.repeat_interleave(cells)
        cross, square = torch.outer(average, offset), torch.outer(offset, offset)
        if moments.valid is not None:
            cross = moments.cross / moments.count * offset
            square = square * (moments.cells.T @ moments.cells) / len(moments.cells)
        covariance = (second - cross - cross.T + square) / torch.outer(scale, scale)
        values, vectors = torch.linalg.eigh(covariance)
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        # The first of the (nearly) largest entries is made positive, so that rounding does not decide the
        # sign.
        size = vectors.abs()
        leader = (size >= (1 - 1e-6) * size.amax(0)).int().argmax(0)
        vectors = vectors * vectors.gather(0, leader[None]).sign()
        spectrum = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
        if dim == 0:
            enough = spectrum.cumsum(0) >= energy
            dim = len(values) if energy >= 1.0 or not enough.any() else int(enough.int().argmax()) + 1
        assert 1 <= dim <= len(values), (dim, len(values))
        return cls(
            mean,
            std,
            vectors[:, :dim],
            spectrum,
            space=moments.space,
            patch=moments.patch,
            fields=moments.fields,
            positive=moments.positive,
            mask="" if moments.mask is None else mask_as_text(moments.mask),
        )

    def normalise(self, u: Tensor) -> Tensor:
        """The normalised field of a physical one (..., C, *space). Raises ValueError for u <= 0 in a positive
        channel."""
        w = _log(self.masked(u, 1.0), self.fields, self.positive, self.ndim)
        return self.masked((w - self.mean.view(self.channel_shape)) / self.std.view(self.channel_shape))

    def denormalise(self, w: Tensor) -> Tensor:
        """The physical field of a normalised one (..., C, *space)."""
        u = w * self.std.view(self.channel_shape) + self.mean.view(self.channel_shape)
        return self.masked(_per_channel(torch.exp, u, self.fields, self.positive, self.ndim), torch.nan)

    def masked(self, w: Tensor, value: float = 0.0) -> Tensor:
        """Field w (..., C, *space) with `value` in the cells of the mask: 0 if it is normalised, NaN if it is
        physical. Numbers per channel, whose space has one cell, are returned as they are."""
        if self.valid is None or w.shape[-self.ndim - 1 :] != self.valid.shape:
            return w
        return torch.where(self.valid.to(w.device), w, value)

    def bridged(self, w: Tensor) -> Tensor:
        """Normalised field (..., C, *space) with the masked cells filled smoothly from their neighbours, so
        that derivatives and spectra have no jump at a coast."""
        if self.valid is None:
            return w
        flat = w.reshape(-1, *self.valid.shape)
        is_known = self.valid.to(flat).expand(1, *self.valid.shape)
        filled = _fill(torch.where(self.valid, flat, 0.0), is_known, self.ndim)
        for _ in range(SMOOTHINGS):
            filled = torch.where(self.valid, flat, mean_of_neighbours(filled, self.ndim))
        return filled.view_as(w)

    def encode(self, w: Tensor) -> Tensor:
        """Latents (..., *tokens, dim) of a normalised field (..., C, *space)."""
        assert w.shape[-self.ndim - 1] == self.num_channels, (w.shape, self.fields)
        return patchify(w, self.ndim, self.patch) @ self.basis.to(w.dtype)

    def decode(self, z: Tensor) -> Tensor:
        """The normalised field (..., C, *space) of latents (..., *tokens, dim); the adjoint of `encode`."""
        assert z.shape[-1] == self.dim, (z.shape, self.dim)
        z = z.to(torch.promote_types(z.dtype, torch.float32))  # a network may compute in bfloat16
        return self.masked(unpatchify(z @ self.basis.T.to(z.dtype), self.ndim, self.patch))

    def projected(self, w: Tensor) -> Tensor:
        """A normalised field w (..., C, *space) inside the kept subspace; w itself if all modes are kept."""
        return w if self.dim == self.width else self.decode(self.encode(w))

    def is_sound(self) -> bool:
        """Whether all statistics are finite, every scale is above zero and the basis is orthonormal."""
        product = self.basis.double().T @ self.basis.double()
        return (
            all(bool(value.isfinite().all()) for value in self.buffers())
            and bool((self.std > 0).all())
            and self.spectrum.shape == (self.width,)
            and bool(
                (product - torch.eye(self.dim, dtype=torch.float64, device=product.device)).abs().max() < 1e-3
            )
        )

    def is_same(self, other: "Tokenizer") -> bool:
        """Whether both map the same fields by the same numbers, on any device."""
        return self.meta() == other.meta() and all(
            one.shape == two.shape and torch.equal(one.cpu(), two.cpu())
            for one, two in zip(self.buffers(), other.buffers(), strict=True)
        )

    def meta(self) -> dict:
        """The facts that `state_dict()` lacks, for JSON; `from_state(state_dict(), meta())` restores the
        codec."""
        return {
            "space": list(self.space),
            "patch": self.patch,
            "fields": list(self.fields),
            "positive": list(self.positive),
            **({"mask": self.mask} if self.mask else {}),
        }

    @classmethod
    def from_state(cls, tensors: dict[str, Tensor], meta: dict) -> "Tokenizer":
        """The tokenizer with this `state_dict()` and `meta()`."""
        return cls(*(tensors[name] for name in TENSORS), **meta)

    def extra_repr(self) -> str:
        return f"{', '.join(self.fields)}: {self.space} -> {self.tokens} x {self.dim} of {self.width}"


def _fill(w: Tensor, is_known: Tensor, ndim: int) -> Tensor:
    """Fields w (n, C, *space) in which cells with is_known (1, C, *space) = 0 get the mean of the smallest
    block that has known cells."""
    if max(w.shape[2:]) == 1 or bool((is_known > 0).all()):
        return w
    pool = (nn.functional.avg_pool1d, nn.functional.avg_pool2d, nn.functional.avg_pool3d)[ndim - 1]
    options = {"kernel_size": 2, "stride": 2, "ceil_mode": True, "count_include_pad": False}
    total, weight = pool(w, **options), pool(is_known, **options)
    coarse = _fill(total / torch.where(weight > 0, weight, 1.0), (weight > 0).to(w), ndim)
    for axis in range(2, w.ndim):
        coarse = coarse.repeat_interleave(2, axis).narrow(axis, 0, w.shape[axis])
    return torch.where(is_known > 0, w, coarse)


def mean_of_neighbours(w: Tensor, ndim: int) -> Tensor:
    """The mean of the neighbours of each cell along all axes of w (n, C, *space)."""
    total = 0.0
    for axis in range(2, w.ndim):
        ends = w.narrow(axis, 0, 1), w.narrow(axis, w.shape[axis] - 1, 1)
        padded = torch.cat([ends[0], w, ends[1]], axis)
        total = total + padded.narrow(axis, 0, w.shape[axis]) + padded.narrow(axis, 2, w.shape[axis])
    return total / (2 * ndim)


def num_valid(valid: Tensor) -> Tensor:
    """Number of cells with a value in each channel (C,), at least 1, as it is a divisor."""
    return valid.flatten(1).sum(1).clamp_min(1)


def _log(u: Tensor, fields: Sequence[str], positive: Sequence[str], ndim: int) -> Tensor:
    """`u` (..., C, *space) with the `positive` channels in log-space. Raises ValueError for values without a
    logarithm."""
    for name in positive:
        channel = u.select(-ndim - 1, fields.index(name))
        if not bool((channel > 0).all()):
            raise ValueError(
                f"{name} reaches {float(channel.min())}; expected positive values, as it is normalised in "
                "log-space (Task.positive). Repair the data or the prediction that made it."
            )
    return _per_channel(torch.log, u, fields, positive, ndim)


def _per_channel(
    function: Callable[[Tensor], Tensor], u: Tensor, fields: Sequence[str], selected: Sequence[str], ndim: int
) -> Tensor:
    """`u` (..., C, *space) with `function` applied to the `selected` channels."""
    if not selected:
        return u
    channels = [
        function(channel) if name in selected else channel
        for name, channel in zip(fields, u.unbind(-ndim - 1), strict=True)
    ]
    return torch.stack(channels, -ndim - 1)
