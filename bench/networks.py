"""The baseline networks, a Fourier neural operator and a U-Net, and their settings.

FNO (Li et al. 2021, arXiv 2010.08895): `FNO` computes the transform as products with dense real matrices of
the kept modes. At these grids and modes that is faster than an FFT on a CPU, runs in bf16, and allows cosine
and sine bases. `LibraryFNO` wraps the neuraloperator package and shows that nothing is lost. `UNet` is the
modern one of PDEArena (Gupta & Brandstetter 2022, arXiv 2209.15616): residual blocks, GroupNorm, GELU.

Fields are normalised and channels-last, (batch, *space, channel), unless stated otherwise; one to three axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.common.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC, along

CONVOLUTION = {1: nn.Conv2d, 2: nn.Conv2d, 3: nn.Conv3d}  # 1D is an image of height 1
WRAP = {PERIODIC: "circular", NO_FLUX: "replicate", OUTFLOW: "replicate", DIRICHLET: "zeros"}


@dataclass(frozen=True)
class Settings:
    """What may be tuned. `modes` to `mlp` are the FNO's, `patch` the U-Net's, the rest is common.

    network: fno, fno_library or unet. width: channels (U-Net: of the finest level). depth: FNO layers, U-Net
    levels. modes: kept per axis, of each sign. basis: dft; dct (cosine, no-flux); dst (sine, zero at the
    faces). padding: zero cells appended to every axis (dft on a domain that is not periodic). kernel: taps of
    the local branch beside the spectral one (1: the usual pointwise map); is_separable: one filter per
    channel, then the pointwise map, in place of a full convolution. mlp: a pointwise two-layer map after each
    layer. patch: cells per axis that the U-Net folds into channels first, and unfolds last. history: frames
    seen. loss: mse of the scaled change; change: per-sample error over that sample's change; field: over that
    sample's field. decay_start: share of the budget at which the rate starts to fall linearly to zero, after
    a warm-up. unroll_fraction: last share of the budget, trained through two steps. is_scored_only: draw
    training windows only where the rollout is scored. augment: random shifts (periodic) or the square's
    symmetries, where they hold. ema: decay of averaged weights (0: none). precision: of the network; the last
    frame, the change and the loss are float32."""

    network: Literal["fno", "fno_library", "unet"] = "fno"
    width: int = 48
    depth: int = 4
    modes: int = 24
    basis: Literal["dft", "dct", "dst"] = "dft"
    padding: int = 0
    kernel: int = 1
    is_separable: bool = False
    mlp: bool = False
    patch: int = 1
    history: int = 1
    loss: Literal["mse", "change", "field"] = "mse"
    lr: float = 2e-3
    weight_decay: float = 1e-4
    batch_size: int = 32
    warmup: float = 0.02
    decay_start: float = 0.3
    unroll_fraction: float = 0.3
    is_scored_only: bool = False
    augment: bool = True
    ema: float = 0.0
    precision: Literal["bf16", "float32"] = "bf16"


# Where a search starts (bench/tune.py): best on validation of those tried at 20 s each on one thread, one
# seed, data of configs/small.yaml, so hints, not verdicts. What mattered: smaller batches than usual, few
# modes on advection, the basis that fits the boundary (darcy2d: sine 2x better than padding), training where
# the rollout is scored (diff_react2d: 2x), and a U-Net on folded cells (4x the steps).
BEST: dict[tuple[str, str], dict] = {
    ("fno", "advection1d"): {"modes": 16, "batch_size": 16},
    ("fno", "burgers1d"): {"batch_size": 16},
    ("fno", "darcy2d"): {
        "width": 32,
        "modes": 12,
        "basis": "dst",
        "loss": "field",
        "lr": 4e-3,
        "batch_size": 8,
    },
    ("fno", "diff_react2d"): {
        "width": 32,
        "modes": 16,
        "basis": "dct",
        "lr": 4e-3,
        "batch_size": 4,
        "is_scored_only": True,
    },
    ("unet", "advection1d"): {"width": 48, "depth": 3, "patch": 4, "batch_size": 16},
    ("unet", "burgers1d"): {"width": 24, "batch_size": 16},
    ("unet", "darcy2d"): {"width": 48, "depth": 3, "patch": 4, "loss": "field", "batch_size": 8},
    ("unet", "diff_react2d"): {
        "width": 32,
        "depth": 3,
        "patch": 2,
        "lr": 4e-3,
        "batch_size": 4,
        "is_scored_only": True,
    },
}
# where a search starts on a task without an entry, by dimension
FALLBACK = {
    1: {},
    2: {"modes": 8, "batch_size": 8, "width": 32},
    3: {"modes": 4, "batch_size": 4, "width": 24, "depth": 3, "patch": 2},
}


def settings_for(model: str, task: str, ndim: int, overrides: dict | None = None) -> Settings:
    """The tuned settings of `model` (fno, fno_library, unet) on `task`, with `overrides` on top.

    Raises ValueError for an unknown key.
    """
    family = "unet" if model == "unet" else "fno"
    values = {"network": model, **BEST.get((family, task), FALLBACK.get(ndim, {})), **(overrides or {})}
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"setting {unknown[0]!r} is unknown; expected one of {', '.join(sorted(known))}. "
            f"Correct {model}.KEY=VALUE."
        )
    return Settings(**values)


# ---- layers ------------------------------------------------------------------------------------------------


def extend(x: Tensor, axis: int, cells: int, wrap: str) -> Tensor:
    """Return `x` with `cells` more on both sides of `axis`: circular, replicate or zeros."""
    if cells == 0:
        return x
    size = x.shape[axis]
    if wrap == "circular":
        left, right = x.narrow(axis, size - cells, cells), x.narrow(axis, 0, cells)
    else:
        shape = list(x.shape)
        shape[axis] = cells
        left, right = x.narrow(axis, 0, 1).expand(shape), x.narrow(axis, size - 1, 1).expand(shape)
        if wrap == "zeros":
            left, right = torch.zeros_like(left), torch.zeros_like(right)
    return torch.cat((left, x, right), axis)


class Conv(nn.Module):
    """Convolution of (batch, channel, *space) in channels_last memory, padded by the boundary of each axis;
    1D has height 1."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        ndim: int,
        boundary: str,
        stride: int = 1,
        groups: int = 1,
    ):
        super().__init__()
        self.axes, self.cells = (3,) if ndim == 1 else tuple(range(2, 2 + ndim)), kernel // 2
        self.wraps = [WRAP[end] for end in along(boundary, ndim)]
        shape, strides = (([1] if ndim == 1 else []) + [size] * ndim for size in (kernel, stride))
        self.conv = CONVOLUTION[ndim](in_channels, out_channels, shape, strides, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        for axis, wrap in zip(self.axes, self.wraps, strict=True):
            x = extend(x, axis, self.cells, wrap)
        return self.conv(x)


def dft_matrices(size: int, modes: int) -> tuple[Tensor, Tensor]:
    """Analysis (2 * modes, size) and synthesis (size, 2 * modes) of the real DFT: rows Re_0, Im_0, Re_1, ...
    of rfft / size.

    synthesis @ analysis is the projection on wave numbers below `modes`, and equals irfft of the cut rfft.
    """
    _fits(modes, size // 2 + 1, size)
    k, x = torch.arange(modes, dtype=torch.float64), torch.arange(size, dtype=torch.float64)
    angle = 2 * math.pi * k[:, None] * x / size
    waves = torch.stack((angle.cos(), -angle.sin()), 1).reshape(2 * modes, size)
    weight = torch.where((k == 0) | (2 * k == size), 1.0, 2.0).repeat_interleave(
        2
    )  # the negative half is the conjugate
    return waves / size, (waves * weight[:, None]).T


def complex_dft_matrices(size: int, modes: int) -> tuple[Tensor, Tensor]:
    """The complex DFT of wave numbers 0..modes-1, 1-modes..-1 as real matrices.

    Analysis (2 * (2 * modes - 1), 2 * size) maps [all real parts, all imaginary parts] to rows Re_0, Im_0,
    Re_1, ... of fft / size; synthesis is the inverse (ifft * size) on the same wave numbers."""
    _fits(modes, (size + 1) // 2, size)
    k = torch.tensor([*range(modes), *range(1 - modes, 0)], dtype=torch.float64)
    angle = 2 * math.pi * k[:, None] * torch.arange(size, dtype=torch.float64) / size
    cos, sin = angle.cos(), angle.sin()
    analysis = torch.stack((torch.cat((cos, sin), 1), torch.cat((-sin, cos), 1)), 1).reshape(
        2 * len(k), 2 * size
    )
    return analysis / size, analysis.T


def cosine_matrices(size: int, modes: int, is_sine: bool = False) -> tuple[Tensor, Tensor]:
    """Analysis (modes, size) and synthesis (size, modes) of the orthonormal DCT-II (zero slope at the faces),
    or DST-II."""
    _fits(modes, size, size)
    k, x = torch.arange(modes, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64) + 0.5
    waves = (math.pi * (k + 1) * x / size).sin() if is_sine else (math.pi * k * x / size).cos()
    edge = k + 1 == size if is_sine else k == 0
    waves = waves * torch.where(edge, 1.0, math.sqrt(2.0)) / math.sqrt(size)
    return waves, waves.T


def _fits(modes: int, most: int, size: int) -> None:
    if not 1 <= modes <= most:
        raise ValueError(
            f"modes is {modes}; expected 1 to {most} on {size} cells. Change fno.modes (or fno.padding)."
        )


class SpectralConv(nn.Module):
    """y = T^-1 W_k T x: a linear map of the channels per kept mode. Input and output are (*space, batch,
    channel).

    Space comes first so that every transform is one large matrix product. dft weights are complex,
    (num_modes, in, out, 2): in 1D wave numbers 0..modes-1, else those of the first axis times 0..modes-1,
    1-modes..-1 of each other; normalised as rfft / size. The real bases have weights (num_modes, in, out).
    """

    def __init__(self, sizes: tuple[int, ...], channels: int, modes: int, basis: str):
        super().__init__()
        self.sizes, self.basis, self.channels = tuple(sizes), basis, channels
        if basis == "dft":
            pairs = [
                dft_matrices(sizes[0], modes),
                *(complex_dft_matrices(size, modes) for size in sizes[1:]),
            ]
            shape = (modes * (2 * modes - 1) ** (len(sizes) - 1), channels, channels, 2)
        else:
            pairs = [cosine_matrices(size, modes, basis == "dst") for size in sizes]
            shape = (modes ** len(sizes), channels, channels)
        for axis, (analysis, synthesis) in enumerate(pairs):
            self.register_buffer(f"analysis{axis}", analysis.float(), persistent=False)
            self.register_buffer(f"synthesis{axis}", synthesis.float().contiguous(), persistent=False)
        self.weight = nn.Parameter(
            torch.randn(shape) / channels
        )  # small beside the pointwise map, as in Li et al.

    def along(self, axis: int, name: str, values: Tensor, inner: int) -> Tensor:
        """`values`, of any shape, transformed along a space axis; inner: how many numbers lie behind one cell
        or mode of it.

        Rows of the axis before are (k, Re or Im) or (k): together with this axis they are what its matrix
        contracts."""
        matrix = getattr(self, f"{name}{axis}")
        return matrix @ values.reshape(-1, matrix.shape[1], inner)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """skip + spectral convolution of x, both (*space, batch, channel)."""
        batch, channels = x.shape[-2:]
        inner = [math.prod(self.sizes[axis + 1 :]) * batch * channels for axis in range(len(self.sizes))]
        modes = x
        for axis, size in enumerate(inner):
            modes = self.along(axis, "analysis", modes, size)
        if self.basis == "dft":
            real, imag = self.weight.unbind(-1)
            matrix = torch.cat((torch.cat((real, imag), 2), torch.cat((-imag, real), 2)), 1)
            modes = modes.view(-1, 2, batch, channels).transpose(1, 2).reshape(-1, batch, 2 * channels)
            modes = torch.bmm(modes, matrix).view(-1, batch, 2, channels).transpose(1, 2)
        else:
            modes = torch.bmm(modes.view(-1, batch, channels), self.weight)
        for axis in range(len(inner) - 1, 0, -1):
            modes = self.along(axis, "synthesis", modes, inner[axis])
        modes = modes.reshape(self.synthesis0.shape[1], -1)
        return torch.addmm(skip.reshape(self.sizes[0], -1), self.synthesis0, modes).view(x.shape)

    def reference(self, x: Tensor, skip: Tensor) -> Tensor:
        """Compute the same map with torch.fft (dft only), for tests."""
        axes = list(range(len(self.sizes)))
        x_hat = torch.fft.rfftn(
            x, dim=axes[::-1], norm="forward"
        )  # the last axis of dim is the halved one: axis 0
        num = self.synthesis0.shape[1] // 2
        kept = torch.tensor([*range(num), *range(1 - num, 0)])
        index = torch.meshgrid(torch.arange(num), *[kept] * (len(axes) - 1), indexing="ij")
        weight = torch.view_as_complex(self.weight.contiguous()).view(
            *index[0].shape, self.channels, self.channels
        )
        y_hat = torch.zeros_like(x_hat)
        y_hat[index] = torch.einsum("...bi,...io->...bo", x_hat[index], weight)
        return skip + torch.fft.irfftn(y_hat, s=self.sizes[::-1], dim=axes[::-1], norm="forward")


class FNO(nn.Module):
    """Lift, `depth` layers x <- gelu(spectral(x) + local(x)), project. (batch, *space, channel) in and
    out."""

    def __init__(
        self, in_channels: int, out_channels: int, sizes: tuple[int, ...], boundary: str, settings: Settings
    ):
        super().__init__()
        s, width, ndim = settings, settings.width, len(sizes)
        self.settings, self.sizes, self.is_fft = settings, tuple(sizes), False
        self.register_buffer("grid", coordinates(sizes, boundary), persistent=False)
        self.lift = nn.Linear(in_channels + self.grid.shape[-1], width)
        padded = tuple(size + s.padding for size in sizes)
        self.spectral = nn.ModuleList(SpectralConv(padded, width, s.modes, s.basis) for _ in range(s.depth))
        self.is_pointwise = s.kernel == 1 or s.is_separable
        self.filter = nn.ModuleList(
            Conv(width, width, s.kernel, ndim, boundary, groups=width)
            for _ in range(s.depth if s.is_separable else 0)
        )
        for conv in self.filter:
            nn.init.dirac_(conv.conv.weight, groups=width)
        self.local = nn.ModuleList(
            nn.Linear(width, width) if self.is_pointwise else Conv(width, width, s.kernel, ndim, boundary)
            for _ in range(s.depth)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(s.depth if s.mlp else 0)
        )
        # PDEBench's head is 128 wide; at full resolution that took a third of the step (2D, 32 channels)
        self.project = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, out_channels))

    def forward(self, u: Tensor) -> Tensor:
        ndim, batch = len(self.sizes), u.shape[0]
        x = u.movedim(0, -2)  # (*space, batch, channel): see SpectralConv
        x = torch.cat((x, self.grid.unsqueeze(-2).expand(*self.sizes, batch, -1)), -1)
        x = self.lift(x)
        if self.settings.padding:
            x = F.pad(x, (0, 0, 0, 0) + (0, self.settings.padding) * ndim)
        for layer, (spectral, local) in enumerate(zip(self.spectral, self.local, strict=True)):
            near = _conv_space_first(self.filter[layer], x, ndim) if self.settings.is_separable else x
            skip = local(near) if self.is_pointwise else _conv_space_first(local, x, ndim)
            x = spectral.reference(x, skip) if self.is_fft else spectral(x, skip)
            if layer < len(self.spectral) - 1 or self.settings.mlp:
                x = F.gelu(x)
            if self.settings.mlp:
                x = x + self.mlp[layer](x)
        if self.settings.padding:
            x = x[tuple(slice(size) for size in self.sizes)]
        return self.project(x).movedim(-2, 0)


def _conv_space_first(conv: Conv, x: Tensor, ndim: int) -> Tensor:
    """Apply `conv` to (*space, batch, channel), whose memory order is channels_last."""
    image = x.movedim(-2, 0).contiguous()
    image = image.unsqueeze(1) if ndim == 1 else image
    out = conv(image.movedim(-1, 1)).movedim(1, -1)
    return (out.squeeze(1) if ndim == 1 else out).movedim(0, -2)


def coordinates(sizes: tuple[int, ...], boundary: str) -> Tensor:
    """Return cell centres in (0, 1) along the axes without shift symmetry: (*space, axes)."""
    places = torch.stack(
        torch.meshgrid(*((torch.arange(size) + 0.5) / size for size in sizes), indexing="ij"), -1
    )
    return places[..., [end != PERIODIC for end in along(boundary, len(sizes))]]


class LibraryFNO(nn.Module):
    """neuraloperator's published FNO of the same size, in float32, because its FFT has no bf16."""

    def __init__(
        self, in_channels: int, out_channels: int, sizes: tuple[int, ...], boundary: str, settings: Settings
    ):
        super().__init__()
        try:
            from neuralop.models import FNO as Published
        except ImportError as error:
            raise ImportError(
                "fno_library needs the neuraloperator package, which is not installed; expected it beside "
                "torch. "
                "Run pip install -r bench/requirements.txt."
            ) from error
        ndim = len(sizes)
        self.register_buffer("grid", coordinates(sizes, boundary), persistent=False)
        # modes counts one sign, the library counts both: 2 * modes - 1 per axis keeps the same wave numbers
        self.net = Published(
            n_modes=(2 * settings.modes - 1,) * ndim,
            in_channels=in_channels + self.grid.shape[-1],
            out_channels=out_channels,
            hidden_channels=settings.width,
            n_layers=settings.depth,
            positional_embedding=None,
            use_channel_mlp=settings.mlp,
            domain_padding=settings.padding / sizes[0] if settings.padding else None,
        )

    def forward(self, u: Tensor) -> Tensor:
        x = torch.cat((u, self.grid.expand(u.shape[0], *self.grid.shape)), -1).movedim(-1, 1)
        with torch.autocast(u.device.type, enabled=False):
            return self.net(x).movedim(1, -1)


class ResidualBlock(nn.Module):
    """x + conv(gelu(norm(conv(gelu(norm x))))), with a pointwise map of x if the channels change."""

    def __init__(self, in_channels: int, out_channels: int, ndim: int, boundary: str):
        super().__init__()
        self.norm1 = nn.GroupNorm(_groups(in_channels), in_channels)
        self.norm2 = nn.GroupNorm(_groups(out_channels), out_channels)
        self.conv1 = Conv(in_channels, out_channels, 3, ndim, boundary)
        self.conv2 = Conv(out_channels, out_channels, 3, ndim, boundary)
        self.skip = (
            CONVOLUTION[ndim](in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.gelu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.gelu(self.norm2(y)))


def _groups(channels: int) -> int:
    return max(g for g in (8, 4, 2, 1) if channels % g == 0)


class UNet(nn.Module):
    """`depth` levels of residual blocks, channels width * (1, 2, 2, 4, 4, ...), strided down, nearest
    neighbours up."""

    def __init__(
        self, in_channels: int, out_channels: int, sizes: tuple[int, ...], boundary: str, settings: Settings
    ):
        super().__init__()
        ndim, depth = len(sizes), settings.depth
        self.ndim, self.patch = ndim, settings.patch
        factor = self.patch * 2 ** (depth - 1)
        if any(size % factor for size in sizes):
            raise ValueError(
                f"grid {sizes} does not halve {depth - 1} times; expected axes divisible by {factor}. "
                f"Change unet.depth, unet.patch or the resolution."
            )
        widths = [settings.width * factor for factor in (1, 2, 2, 4, 4, 8)[:depth]]
        folded = self.patch**ndim
        grid = coordinates(sizes, boundary)
        self.stem = Conv((in_channels + grid.shape[-1]) * folded, widths[0], 3, ndim, boundary)
        pairs, first, last = list(itertools.pairwise(widths)), widths[0], widths[-1]
        self.down = nn.ModuleList(ResidualBlock(a, a, ndim, boundary) for a, _ in pairs)
        self.shrink = nn.ModuleList(Conv(a, b, 3, ndim, boundary, stride=2) for a, b in pairs)
        self.middle = nn.Sequential(
            ResidualBlock(last, last, ndim, boundary), ResidualBlock(last, last, ndim, boundary)
        )
        self.up = nn.ModuleList(ResidualBlock(a + b, a, ndim, boundary) for a, b in pairs)
        outermost = Conv(first, out_channels * folded, 3, ndim, boundary)
        self.head = nn.Sequential(nn.GroupNorm(_groups(first), first), nn.GELU(), outermost)
        self.memory = torch.channels_last if ndim < 3 else torch.channels_last_3d
        self.to(memory_format=self.memory)
        self.register_buffer("grid", grid, persistent=False)  # which has no channels to come last

    def forward(self, u: Tensor) -> Tensor:
        x = torch.cat((u, self.grid.expand(u.shape[0], *self.grid.shape)), -1)
        x = (x.unsqueeze(1) if self.ndim == 1 else x).movedim(-1, 1)
        fold = (1, self.patch) if self.ndim == 1 else (self.patch,) * self.ndim
        num = len(fold)  # axes of the image
        if self.patch > 1:
            for axis in range(num, 0, -1):
                x = x.unflatten(1 + axis, (-1, fold[axis - 1]))
            # batch, channel, (cells, inside) of every axis: what is inside goes to the channels
            x = x.permute(0, 1, *range(3, 3 + 2 * num, 2), *range(2, 2 + 2 * num, 2)).flatten(1, 1 + num)
        x, kept = self.stem(x.contiguous(memory_format=self.memory)), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(block(x))
            x = shrink(kept[-1])
        x = self.middle(x)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=(1, 2) if self.ndim == 1 else 2)
            x = block(torch.cat((kept.pop(), x), 1))
        x = self.head(x)
        if self.patch > 1:
            x = x.unflatten(1, (-1, *fold))
            x = x.permute(0, 1, *(axis for pair in range(num) for axis in (2 + num + pair, 2 + pair)))
            for axis in range(num):
                x = x.flatten(2 + axis, 3 + axis)
        out = x.movedim(1, -1)
        return out.squeeze(1) if self.ndim == 1 else out


NETWORKS = {"fno": FNO, "fno_library": LibraryFNO, "unet": UNet}
