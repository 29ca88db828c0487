"""Layers that several backbones use. Tokens are channels-last: (batch, *tokens, width)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups_discovery.boundary import DIRICHLET, PERIODIC
from ups_discovery.spectral import box, box_rows, cosine, fourier_pairs

Ends = tuple[str, ...]  # the boundary of each axis of a task


def zero_linear(size: int, width: int) -> nn.Linear:
    """A linear layer of zeros: its output has no effect at the start of training."""
    layer = nn.Linear(size, width)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SpectralMixing(nn.Module):
    """Sum over axes of a spectral convolution along each: y_k = W_k x_k for the low modes k, complex if
    periodic.

    weight: (2, modes, width, width), real and imaginary part, shared by the axes; a cosine basis uses the
    real part.
    """

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, modes, width, width) / width)
        self._bases: dict[tuple, Tensor] = {}

    def _basis(self, n: int, is_periodic: bool, like: Tensor) -> Tensor:
        key = (n, is_periodic, like.device)
        if key not in self._bases:
            modes = min(self.modes, n // 2 + 1 if is_periodic else n)
            basis = fourier_pairs(n, modes) if is_periodic else cosine(n)[:modes][None]
            self._bases[key] = basis.float().to(like.device)
        return self._bases[key]

    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        """(batch, *tokens, width) to the same shape."""
        mixed = []
        for axis, end in enumerate(ends, 1):
            h = x.movedim(axis, 0)  # (n, *others, width)
            basis = self._basis(len(h), end == PERIODIC, x)  # (1 or 2, modes, n)
            modes, width, flat = basis.shape[1], h.shape[-1], basis.flatten(0, 1)
            hat = (flat @ h.flatten(1)).view(len(basis), modes, -1, width)
            hat = convolved(hat, *self.weight[:, :modes].unbind(0))
            mixed.append((flat.mT @ hat.flatten(1)).view(h.shape).movedim(0, axis).to(x.dtype))
        return sum(mixed[1:], mixed[0])


def convolved(hat: Tensor, real: Tensor, imag: Tensor) -> Tensor:
    """W x_hat of every mode (2 or 1 times modes, rows, width), from hat (2, modes, rows, width) with x_hat =
    c - i s, or (1, modes, rows, width) with c alone.
    """
    c, s = hat[0], hat[-1]  # W x_hat has the cosine part Wr c + Wi s and the sine part Wr s - Wi c
    if len(hat) == 1:
        return c.bmm(real)
    return torch.cat([c.bmm(real) + s.bmm(imag), s.bmm(real) - c.bmm(imag)])


MOST_MODES = {2: 8, 3: 3}  # per axis, by number of axes, where all are mixed together; 4 in 3D are no better


class BoxMixing(nn.Module):
    """A spectral convolution along all axes together: y_k = W_k x_k for the wave vectors k of
    `ups_discovery.spectral.box`.

    weight: (2, K, width, width), real and imaginary part. ends: the boundary of each axis.
    """

    def __init__(self, width: int, modes: int, ends: Ends):
        super().__init__()
        self.ends, self.k = ends, box(ends, modes)
        self.weight = nn.Parameter(torch.randn(2, len(self.k), width, width) / width)
        self._kept: dict[tuple, tuple[Tensor, Tensor | None]] = {}

    def _rows(self, tokens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(basis rows of the waves that the token grid resolves, their numbers or None if these are all)."""
        most = [(n - 1) // 2 if end == PERIODIC else n - 1 for n, end in zip(tokens, self.ends, strict=True)]
        kept = [
            number
            for number, k in enumerate(self.k)
            if all(abs(wave) <= limit for wave, limit in zip(k, most, strict=True))
        ]
        rows = box_rows([self.k[number] for number in kept], tokens, self.ends).float().to(device)
        is_all = len(kept) == len(self.k)
        return rows, None if is_all else torch.tensor(kept, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *tokens, width) to the same shape."""
        batch, *tokens, width = x.shape
        tokens = [int(n) for n in tokens]  # in a trace sizes are tensors, which no key finds
        key = (*tokens, x.device)
        if key not in self._kept:
            self._kept[key] = self._rows(tokens, x.device)
        rows, kept = self._kept[key]
        weight = self.weight if kept is None else self.weight[:, kept]
        flat = rows.flatten(0, 1).expand(batch, -1, -1)
        hat = flat.bmm(x.flatten(1, -2)).view(batch, *rows.shape[:2], width).permute(1, 2, 0, 3)
        hat = convolved(hat, *weight.unbind(0)).transpose(0, 1)  # (batch, 1 or 2 times K, width)
        return flat.mT.bmm(hat).view(x.shape)


class LocalMixing(nn.Module):
    """Sum over axes of a depthwise convolution along each; weight (width, 1, kernel), shared by the axes."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.side = kernel_size // 2
        self.weight = nn.Parameter(torch.randn(width, 1, kernel_size) / kernel_size)

    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        # a convolution down the columns of channels-last images (num, n, after, width), which are views of x:
        # on a CPU five times as fast as one of lines and twice as fast as one of volumes. The gradient of its
        # weight in bf16 is up to 18 times as fast as along rows.
        batch, *tokens, width = x.shape
        side, kernel, mixed = self.side, self.weight.to(x.dtype)[..., None], []
        for axis, end in reversed([*enumerate(ends)]):
            before, after = math.prod(tokens[:axis]), math.prod(tokens[axis + 1 :])
            h = x.reshape(batch * before, -1, after, width)
            # on a GPU torch's pad has a gradient in one order that takes half of a pass; on a CPU it takes a
            # third of the time at walls, and three times as long around a ring
            if end == PERIODIC or h.is_cuda:
                h = padded(h, 1, side, end).movedim(-1, 1)
            else:
                mode = "constant" if end == DIRICHLET else "replicate"
                h = nn.functional.pad(h.movedim(-1, 1), (0, 0, side, side), mode=mode)
            mixed.append(nn.functional.conv2d(h, kernel, groups=width).movedim(1, -1).reshape(x.shape))
        return sum(mixed[1:], mixed[0])


class Pointwise(nn.Module):
    """The pointwise layers of a block: a gated MLP, and a linear map of the condition to `num_modulations`
    vectors (shifts, scales, gates).
    """

    def __init__(self, width: int, mlp_ratio: float, num_modulations: int = 6):
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.modulation = zero_linear(width, num_modulations * width)
        self.mark_hidden_matrices()

    def mark_hidden_matrices(self) -> None:
        """Mark the matrices that Muon optimizes (ups/training/optim.py); a copy loses the mark."""
        self.up.weight.is_hidden_matrix = self.down.weight.is_hidden_matrix = True

    def forward(self, h: Tensor) -> Tensor:
        gate, value = self.up(h).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)


class Shift(nn.Module):
    """h (1 + scale) + shift, both linear in the condition (FiLM, Perez et al. 2018, arXiv 1709.07871); no
    effect at the start of training. h (batch, *tokens, width), condition (batch, size)."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.modulation = zero_linear(size, 2 * width)

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(condition).view(h.shape[0], *[1] * (h.ndim - 2), 2, -1)
        scale, shift = modulation.unbind(-2)
        return h * (1 + scale) + shift  # on a CPU twice as fast as addcmul in bf16


class Position(nn.Module):
    """Adds a linear map of the position in (0, 1) along the axes that are not periodic; no effect at the
    start of training."""

    def __init__(self, width: int, ends: Ends):
        super().__init__()
        self.walls = [axis for axis, end in enumerate(ends) if end != PERIODIC]
        self.map = nn.Linear(len(self.walls), width, bias=False) if self.walls else None
        self._grids: dict[tuple, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.map is None:
            return x
        key = (*x.shape[1:-1], x.device)
        if key not in self._grids:
            places = [(torch.arange(n, device=x.device) + 0.5) / n for n in x.shape[1:-1]]
            grid = torch.meshgrid(*places, indexing="ij")
            self._grids[key] = torch.stack([grid[axis] for axis in self.walls], -1)
        return x + self.map(self._grids[key])


class Convolution(nn.Module):
    """A convolution of (batch, *tokens, channels) over three tokens per axis, padded by the boundary of each
    axis: periodic, zeros at Dirichlet walls, else the value at the wall.

    The filters are one matrix, (channels out, taps * channels in), that Muon can optimize.
    """

    def __init__(self, channels_in: int, channels_out: int, ends: Ends, stride: int = 1):
        super().__init__()
        self.ends, self.stride, ndim = ends, stride, len(ends)
        fan_in = channels_in * 3**ndim
        bound = 1 / math.sqrt(fan_in)
        self.weight = nn.Parameter(torch.empty(channels_out, fan_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels_out).uniform_(-bound, bound))
        self.weight.is_hidden_matrix = True

    def forward(self, x: Tensor) -> Tensor:
        for axis, end in enumerate(self.ends, 1):
            x = padded(x, axis, 1, end)
        filters = self.weight.to(x.dtype).unflatten(1, (*[3] * len(self.ends), -1)).movedim(-1, 1)
        bias, stride = self.bias.to(x.dtype), self.stride
        if len(self.ends) == 1:
            filters, stride = filters[:, :, None], (1, stride)
        convolve = nn.functional.conv3d if len(self.ends) == 3 else nn.functional.conv2d
        return from_image(convolve(as_image(x), filters, bias, stride), len(self.ends))


def as_image(x: Tensor) -> Tensor:
    """(batch, *tokens, channels) as (batch, channels, *space), channels-last in memory. A line becomes an
    image of height 1: torch has no memory format for lines, and computes them several times slower on a CPU.
    """
    image = x.movedim(-1, 1)
    return image[:, :, None] if x.ndim == 3 else image


def from_image(image: Tensor, ndim: int) -> Tensor:
    """The inverse of `as_image` for tokens along `ndim` axes."""
    return (image[:, :, 0] if ndim == 1 else image).movedim(1, -1)


def padded(x: Tensor, axis: int, side: int, end: str) -> Tensor:
    """x with `side` more cells at both ends of an axis, by its boundary."""
    n, shape = x.shape[axis], list(x.shape)
    if end == PERIODIC and side <= n:
        parts = [x.narrow(axis, n - side, side), x, x.narrow(axis, 0, side)]
    elif end == PERIODIC:  # more cells than the axis has
        return x.index_select(axis, torch.arange(-side, n + side, device=x.device) % n)
    else:
        shape[axis] = side
        parts = [x.narrow(axis, 0, 1).expand(shape), x, x.narrow(axis, n - 1, 1).expand(shape)]
        if end == DIRICHLET:
            parts[0] = parts[2] = x.new_zeros(shape)
    return torch.cat(parts, axis)
