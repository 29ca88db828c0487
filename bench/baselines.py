"""Baselines that judge the operator: a Fourier neural operator, a U-Net, and the one recipe that trains them.

    u_{k+1} = u_k + s * network(u_{k-h+1..k}, log parameters, grid)        time-dependent; s = RMS of the one-step change
    u = network(a, log parameters, grid)                                   steady

FNO (Li et al. 2021, arXiv 2010.08895) comes twice. `FNO` computes the transform as products with dense real matrices of the
kept modes only, which at these grids and modes is faster than an FFT on a CPU, runs in bf16, and can use a cosine or sine
basis instead of the Fourier one; `LibraryFNO` wraps the neuraloperator package and is the check that nothing was lost.
`UNet` is the modern one of PDEArena (Gupta & Brandstetter 2022, arXiv 2209.15616): residual blocks, GroupNorm, GELU.

Everything is trained for a given time, not a number of steps: AdamW, the rate a function of the share of the budget spent.
Fields here are normalised and channels-last, (batch, *space, channel), unless said otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC
from ups.models.rollout import rollout

WRAP = {PERIODIC: "circular", NO_FLUX: "replicate", OUTFLOW: "replicate", DIRICHLET: "zeros"}
CHANGE_FLOOR = 0.05  # share of the typical change below which loss "change" stops dividing by the change
CHECKPOINTS = (0.7, 0.85)  # shares of the budget, beside its end, at which validation may select the weights


@dataclass(frozen=True)
class Settings:
    """What may be tuned. `modes` to `mlp` are the FNO's, `patch` the U-Net's, the rest is common.

    network: fno, fno_library or unet. width: channels (U-Net: of the finest level). depth: FNO layers, U-Net levels.
    modes: kept per axis, of each sign. basis: dft; dct (cosine, no-flux); dst (sine, zero at the faces).
    padding: zero cells appended to every axis (dft on a domain that is not periodic). kernel: taps of the local branch beside
    the spectral one (1: the usual pointwise map); is_separable: one filter per channel, then the pointwise map, in place of a
    full convolution. mlp: a pointwise two-layer map after each layer.
    patch: cells per axis that the U-Net folds into channels first, and unfolds last.
    history: frames seen. loss: mse of the scaled change; change: per-sample error over that sample's change; field: over that
    sample's field. decay_start: share of the budget at which the rate starts to fall linearly to zero, after a warm-up.
    unroll_fraction: last share of the budget, trained through two steps. is_scored_only: draw training windows only where the
    rollout is scored. augment: random shifts (periodic) or the square's symmetries, where they hold. ema: decay of averaged
    weights (0: none). precision: of the network; the last frame, the change and the loss are float32.
    """

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


# Best on validation of those tried with `bench/compare.py --tune`: 20 s each on one thread, one seed, so hints, not verdicts.
# What mattered: smaller batches than usual, few modes on advection, the basis that fits the boundary (darcy2d: sine 2x better
# than padding), training where the rollout is scored (diff_react2d: 2x), and a U-Net on folded cells (4x the steps).
BEST: dict[tuple[str, str], dict] = {
    ("fno", "advection1d"): {"modes": 16, "batch_size": 16},
    ("fno", "burgers1d"): {"batch_size": 16},
    ("fno", "darcy2d"): {"width": 32, "modes": 12, "basis": "dst", "loss": "field", "lr": 4e-3, "batch_size": 8},
    ("fno", "diff_react2d"): {"width": 32, "modes": 16, "basis": "dct", "lr": 4e-3, "batch_size": 4, "is_scored_only": True},
    ("unet", "advection1d"): {"width": 48, "depth": 3, "patch": 4, "batch_size": 16},
    ("unet", "burgers1d"): {"width": 24, "batch_size": 16},
    ("unet", "darcy2d"): {"width": 48, "depth": 3, "patch": 4, "loss": "field", "batch_size": 8},
    ("unet", "diff_react2d"): {"width": 32, "depth": 3, "patch": 2, "lr": 4e-3, "batch_size": 4, "is_scored_only": True},
}
FALLBACK = {1: {}, 2: {"modes": 8, "batch_size": 8, "width": 32}}  # a task without an entry, by dimension


def settings_for(model: str, task: str, ndim: int, overrides: dict | None = None) -> Settings:
    """The tuned settings of `model` (fno, fno_library, unet) on `task`, with `overrides` on top.

    Raises ValueError for an unknown key.
    """
    family = "unet" if model == "unet" else "fno"
    values = {"network": model, **BEST.get((family, task), FALLBACK.get(ndim, {})), **(overrides or {})}
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"setting {unknown[0]!r} is unknown; expected one of {', '.join(sorted(known))}. "
                         f"Correct {model}.KEY=VALUE.")
    return Settings(**values)


# ---- layers ---------------------------------------------------------------------------------------------------------------


def extend(x: Tensor, axis: int, cells: int, wrap: str) -> Tensor:
    """`x` with `cells` more on both sides of `axis`: circular, replicate or zeros."""
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
    """Convolution of (batch, channel, height, width) in channels_last memory, padded by the boundary; 1D has height 1."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, ndim: int, wrap: str, stride: int = 1,
                 groups: int = 1):
        super().__init__()
        self.axes, self.cells, self.wrap = (2, 3)[2 - ndim :], kernel // 2, wrap
        shape = [kernel if axis in self.axes else 1 for axis in (2, 3)]
        strides = [stride if axis in self.axes else 1 for axis in (2, 3)]
        self.conv = nn.Conv2d(in_channels, out_channels, shape, strides, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        for axis in self.axes:
            x = extend(x, axis, self.cells, self.wrap)
        return self.conv(x)


def dft_matrices(size: int, modes: int) -> tuple[Tensor, Tensor]:
    """Analysis (2 * modes, size) and synthesis (size, 2 * modes) of the real DFT: rows Re_0, Im_0, Re_1, ... of rfft / size.

    synthesis @ analysis is the projection on wave numbers below `modes`, and equals irfft of the cut rfft.
    """
    _fits(modes, size // 2 + 1, size)
    k, x = torch.arange(modes, dtype=torch.float64), torch.arange(size, dtype=torch.float64)
    angle = 2 * math.pi * k[:, None] * x / size
    waves = torch.stack((angle.cos(), -angle.sin()), 1).reshape(2 * modes, size)
    weight = torch.where((k == 0) | (2 * k == size), 1.0, 2.0).repeat_interleave(2)  # the negative half is the conjugate
    return waves / size, (waves * weight[:, None]).T


def complex_dft_matrices(size: int, modes: int) -> tuple[Tensor, Tensor]:
    """The complex DFT of wave numbers 0..modes-1, 1-modes..-1 as real matrices.

    Analysis (2 * (2 * modes - 1), 2 * size) maps [all real parts, all imaginary parts] to rows Re_0, Im_0, Re_1, ... of
    fft / size; synthesis is the inverse (ifft * size) on the same wave numbers.
    """
    _fits(modes, (size + 1) // 2, size)
    k = torch.tensor([*range(modes), *range(1 - modes, 0)], dtype=torch.float64)
    angle = 2 * math.pi * k[:, None] * torch.arange(size, dtype=torch.float64) / size
    cos, sin = angle.cos(), angle.sin()
    analysis = torch.stack((torch.cat((cos, sin), 1), torch.cat((-sin, cos), 1)), 1).reshape(2 * len(k), 2 * size)
    return analysis / size, analysis.T


def cosine_matrices(size: int, modes: int, is_sine: bool = False) -> tuple[Tensor, Tensor]:
    """Analysis (modes, size) and synthesis (size, modes) of the orthonormal DCT-II (zero slope at the faces), or DST-II."""
    _fits(modes, size, size)
    k, x = torch.arange(modes, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64) + 0.5
    waves = (math.pi * (k + 1) * x / size).sin() if is_sine else (math.pi * k * x / size).cos()
    edge = k + 1 == size if is_sine else k == 0
    waves = waves * torch.where(edge, 1.0, math.sqrt(2.0)) / math.sqrt(size)
    return waves, waves.T


def _fits(modes: int, most: int, size: int) -> None:
    if not 1 <= modes <= most:
        raise ValueError(f"modes is {modes}; expected 1 to {most} on {size} cells. Change fno.modes (or fno.padding).")


class SpectralConv(nn.Module):
    """y = T^-1 W_k T x: a linear map of the channels per kept mode. Input and output are (*space, batch, channel).

    Space comes first so that every transform is one large matrix product. dft weights are complex, (num_modes, in, out, 2):
    in 1D wave numbers 0..modes-1, in 2D those of the first axis times 0..modes-1, 1-modes..-1 of the second; normalised as
    rfft / size. The real bases have weights (num_modes, in, out).
    """

    def __init__(self, sizes: tuple[int, ...], channels: int, modes: int, basis: str):
        super().__init__()
        if len(sizes) > 2:
            raise ValueError(f"grid {sizes} has {len(sizes)} axes; expected 1 or 2. There is no baseline in 3D.")
        self.sizes, self.basis, self.channels = tuple(sizes), basis, channels
        if basis == "dft":
            pairs = [dft_matrices(sizes[0], modes), *(complex_dft_matrices(size, modes) for size in sizes[1:])]
            shape = (modes * (2 * modes - 1) ** (len(sizes) - 1), channels, channels, 2)
        else:
            pairs = [cosine_matrices(size, modes, basis == "dst") for size in sizes]
            shape = (modes ** len(sizes), channels, channels)
        for axis, (analysis, synthesis) in enumerate(pairs):
            self.register_buffer(f"analysis{axis}", analysis.float(), persistent=False)
            self.register_buffer(f"synthesis{axis}", synthesis.float().contiguous(), persistent=False)
        self.weight = nn.Parameter(torch.randn(shape) / channels)  # small beside the pointwise map, as in Li et al.

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """skip + spectral convolution of x, both (*space, batch, channel)."""
        batch, channels = x.shape[-2:]
        modes = self.analysis0 @ x.reshape(self.sizes[0], -1)
        if len(self.sizes) == 2:
            # rows of axis 0 are (k, Re or Im) or (k); together with axis 1 they are what the second transform contracts
            modes = self.analysis1 @ modes.view(-1, self.analysis1.shape[1], batch * channels)
        if self.basis == "dft":
            real, imag = self.weight.unbind(-1)
            matrix = torch.cat((torch.cat((real, imag), 2), torch.cat((-imag, real), 2)), 1)
            modes = modes.view(-1, 2, batch, channels).transpose(1, 2).reshape(-1, batch, 2 * channels)
            modes = torch.bmm(modes, matrix).view(-1, batch, 2, channels).transpose(1, 2)
        else:
            modes = torch.bmm(modes.view(-1, batch, channels), self.weight)
        if len(self.sizes) == 2:
            modes = self.synthesis1 @ modes.reshape(-1, self.synthesis1.shape[1], batch * channels)
        modes = modes.reshape(self.synthesis0.shape[1], -1)
        return torch.addmm(skip.reshape(self.sizes[0], -1), self.synthesis0, modes).view(x.shape)

    def reference(self, x: Tensor, skip: Tensor) -> Tensor:
        """The same map with torch.fft (dft only); what the tests compare with."""
        axes = list(range(len(self.sizes)))
        x_hat = torch.fft.rfftn(x, dim=axes[::-1], norm="forward")  # the last axis of dim is the halved one: axis 0
        num = self.synthesis0.shape[1] // 2
        weight = torch.view_as_complex(self.weight.contiguous()).view(num, -1, self.channels, self.channels)
        y_hat = torch.zeros_like(x_hat)
        if len(axes) == 1:
            y_hat[:num] = torch.einsum("kbi,kio->kbo", x_hat[:num], weight[:, 0])
        else:
            kept = [*range(num), *range(1 - num, 0)]
            y_hat[:num, kept] = torch.einsum("klbi,klio->klbo", x_hat[:num][:, kept], weight)
        return skip + torch.fft.irfftn(y_hat, s=self.sizes[::-1], dim=axes[::-1], norm="forward")


class FNO(nn.Module):
    """Lift, `depth` layers x <- gelu(spectral(x) + local(x)), project. (batch, *space, channel) in and out."""

    def __init__(self, in_channels: int, out_channels: int, sizes: tuple[int, ...], boundary: str, settings: Settings):
        super().__init__()
        s, width, ndim = settings, settings.width, len(sizes)
        self.settings, self.sizes, self.is_fft = settings, tuple(sizes), False
        self.register_buffer("grid", coordinates(sizes, boundary), persistent=False)
        self.lift = nn.Linear(in_channels + self.grid.shape[-1], width)
        padded = tuple(size + s.padding for size in sizes)
        self.spectral = nn.ModuleList(SpectralConv(padded, width, s.modes, s.basis) for _ in range(s.depth))
        wrap = WRAP[boundary]
        self.is_pointwise = s.kernel == 1 or s.is_separable
        self.filter = nn.ModuleList(Conv(width, width, s.kernel, ndim, wrap, groups=width)
                                    for _ in range(s.depth if s.is_separable else 0))
        for conv in self.filter:
            nn.init.dirac_(conv.conv.weight, groups=width)
        self.local = nn.ModuleList(nn.Linear(width, width) if self.is_pointwise else Conv(width, width, s.kernel, ndim, wrap)
                                   for _ in range(s.depth))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                 for _ in range(s.depth if s.mlp else 0))
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
    """`conv` of (*space, batch, channel): its memory (batch, *space, channel) is what channels_last is."""
    image = x.movedim(-2, 0).contiguous()
    image = image.unsqueeze(1) if ndim == 1 else image
    out = conv(image.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    return (out.squeeze(1) if ndim == 1 else out).movedim(0, -2)


def coordinates(sizes: tuple[int, ...], boundary: str) -> Tensor:
    """(*space, ndim) cell centres in (0, 1), or no channel where the problem is invariant under shifts."""
    if boundary == PERIODIC:
        return torch.zeros(*sizes, 0)
    return torch.stack(torch.meshgrid(*((torch.arange(size) + 0.5) / size for size in sizes), indexing="ij"), -1)


class LibraryFNO(nn.Module):
    """neuraloperator's FNO as published, of the same size; float32, since its FFT has no bf16."""

    def __init__(self, in_channels: int, out_channels: int, sizes: tuple[int, ...], boundary: str, settings: Settings):
        super().__init__()
        try:
            from neuralop.models import FNO as Published
        except ImportError as error:
            raise ImportError("fno_library needs the neuraloperator package, which is not installed; expected it beside torch. "
                              "Run pip install -r bench/requirements.txt.") from error
        ndim = len(sizes)
        self.register_buffer("grid", coordinates(sizes, boundary), persistent=False)
        # modes counts one sign, the library counts both: 2 * modes - 1 per axis keeps the same wave numbers
        self.net = Published(n_modes=(2 * settings.modes - 1,) * ndim, in_channels=in_channels + self.grid.shape[-1],
                             out_channels=out_channels, hidden_channels=settings.width, n_layers=settings.depth,
                             positional_embedding=None, use_channel_mlp=settings.mlp,
                             domain_padding=settings.padding / sizes[0] if settings.padding else None)

    def forward(self, u: Tensor) -> Tensor:
        x = torch.cat((u, self.grid.expand(u.shape[0], *self.grid.shape)), -1).movedim(-1, 1)
        with torch.autocast(u.device.type, enabled=False):
            return self.net(x).movedim(1, -1)


class ResidualBlock(nn.Module):
    """x + conv(gelu(norm(conv(gelu(norm x))))) with a pointwise map of x where the channels change."""

    def __init__(self, in_channels: int, out_channels: int, ndim: int, wrap: str):
        super().__init__()
        self.norm1 = nn.GroupNorm(_groups(in_channels), in_channels)
        self.norm2 = nn.GroupNorm(_groups(out_channels), out_channels)
        self.conv1 = Conv(in_channels, out_channels, 3, ndim, wrap)
        self.conv2 = Conv(out_channels, out_channels, 3, ndim, wrap)
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.gelu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.gelu(self.norm2(y)))


def _groups(channels: int) -> int:
    return max(g for g in (8, 4, 2, 1) if channels % g == 0)


class UNet(nn.Module):
    """`depth` levels of residual blocks, channels width * (1, 2, 2, 4, 4, ...), strided down, nearest neighbours up."""

    def __init__(self, in_channels: int, out_channels: int, sizes: tuple[int, ...], boundary: str, settings: Settings):
        super().__init__()
        ndim, wrap, depth = len(sizes), WRAP[boundary], settings.depth
        self.ndim, self.patch = ndim, settings.patch
        factor = self.patch * 2 ** (depth - 1)
        if ndim > 2 or any(size % factor for size in sizes):
            raise ValueError(f"grid {sizes} does not halve {depth - 1} times; expected 1 or 2 axes divisible by {factor}. "
                             f"Change unet.depth, unet.patch or the resolution.")
        self.register_buffer("grid", coordinates(sizes, boundary), persistent=False)
        widths = [settings.width * factor for factor in (1, 2, 2, 4, 4, 8)[:depth]]
        folded = self.patch**ndim
        self.stem = Conv((in_channels + self.grid.shape[-1]) * folded, widths[0], 3, ndim, wrap)
        pairs, first, last = list(itertools.pairwise(widths)), widths[0], widths[-1]
        self.down = nn.ModuleList(ResidualBlock(a, a, ndim, wrap) for a, _ in pairs)
        self.shrink = nn.ModuleList(Conv(a, b, 3, ndim, wrap, stride=2) for a, b in pairs)
        self.middle = nn.Sequential(ResidualBlock(last, last, ndim, wrap), ResidualBlock(last, last, ndim, wrap))
        self.up = nn.ModuleList(ResidualBlock(a + b, a, ndim, wrap) for a, b in pairs)
        outermost = Conv(first, out_channels * folded, 3, ndim, wrap)
        self.head = nn.Sequential(nn.GroupNorm(_groups(first), first), nn.GELU(), outermost)
        self.to(memory_format=torch.channels_last)

    def forward(self, u: Tensor) -> Tensor:
        x = torch.cat((u, self.grid.expand(u.shape[0], *self.grid.shape)), -1)
        x = (x.unsqueeze(1) if self.ndim == 1 else x).permute(0, 3, 1, 2)
        fold = (1 if self.ndim == 1 else self.patch, self.patch)
        if self.patch > 1:
            x = x.unflatten(3, (-1, fold[1])).unflatten(2, (-1, fold[0])).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        x, kept = self.stem(x.contiguous(memory_format=torch.channels_last)), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(block(x))
            x = shrink(kept[-1])
        x = self.middle(x)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=(1, 2) if self.ndim == 1 else 2)
            x = block(torch.cat((kept.pop(), x), 1))
        x = self.head(x)
        if self.patch > 1:
            x = x.unflatten(1, (-1, *fold)).permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)
        out = x.permute(0, 2, 3, 1)
        return out.squeeze(1) if self.ndim == 1 else out


NETWORKS = {"fno": FNO, "fno_library": LibraryFNO, "unet": UNet}


# ---- problem and predictor ------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """All that a model is told about a task. Fields are physical, float32, (row, time, channel, *space).

    train, val: the solution; steady tasks have one frame and `train_inputs`, `val_inputs` (row, 1, channel, *space).
    normalise, denormalise: physical to normalised fields and back; offset: what to add to a normalised channel to make it
    proportional to the physical one (mean / std), for relative losses. is_symmetric: the eight symmetries of the square map
    solutions of scalar fields to solutions.
    """

    name: str
    ndim: int
    boundary: str
    is_steady: bool
    is_symmetric: bool
    context: int
    train: Tensor
    val: Tensor
    train_parameters: Tensor
    val_parameters: Tensor
    normalise: Callable[[Tensor], Tensor]
    denormalise: Callable[[Tensor], Tensor]
    offset: Tensor
    train_inputs: Tensor | None = None
    val_inputs: Tensor | None = None
    normalise_inputs: Callable[[Tensor], Tensor] | None = None


@dataclass
class Trained:
    """A trained model and what it cost.

    predict(given, parameters, num_steps): physical fields (batch, num_steps, channel, *space) after the context frames
    `given` (batch, context, channel, *space), or (steady) from the coefficient, with num_steps 1.
    seconds: of the budget spent; cpu_seconds: of all threads over it (far below seconds * threads: the machine was busy).
    history: validation error at every point where weights could be selected.
    """

    predict: Callable[[Tensor, Tensor, int], Tensor]
    num_parameters: int
    steps: int
    step_ms: float
    seconds: float
    cpu_seconds: float = float("nan")
    skipped: int = 0
    history: list[dict] = dataclasses.field(default_factory=list)


def channels_last(u: Tensor, ndim: int) -> Tensor:
    """(..., channel, *space) to (..., *space, channel), contiguous."""
    return u.movedim(-ndim - 1, -1).contiguous()


class ParameterScale:
    """log parameters, centred and scaled on the training rows; constant and repeated columns are dropped."""

    def __init__(self, parameters: Tensor):
        values = parameters.double()
        self.is_log = bool(values.numel()) and bool((values > 0).all())
        values = self._map(values)
        self.columns = [i for i in range(values.shape[1]) if float(values[:, i].max() - values[:, i].min()) > 1e-9
                        and not any(torch.allclose(values[:, i], values[:, j]) for j in range(i))]
        self.mean = values[:, self.columns].mean(0)
        self.std = (values[:, self.columns] - self.mean).square().mean(0).sqrt()

    def _map(self, values: Tensor) -> Tensor:
        return values.log() if self.is_log else values

    def __call__(self, parameters: Tensor) -> Tensor:
        values = self._map(parameters.double())[:, self.columns]
        return ((values - self.mean.to(values.device)) / self.std.to(values.device)).float()


# ---- training -------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds since the start that were not spent inside `paused`; `clock` as time.perf_counter."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.start, self.excluded = clock, clock(), 0.0

    def __call__(self) -> float:
        return self.clock() - self.start - self.excluded

    def __enter__(self) -> Stopwatch:
        self.entered = self.clock()
        return self

    def __exit__(self, *_) -> None:
        self.excluded += self.clock() - self.entered


def learning_rate(share: float, settings: Settings) -> float:
    """The rate at a share of the budget: linear warm-up, constant, linear to zero."""
    warm = min(1.0, share / settings.warmup) if settings.warmup else 1.0
    fall = min(1.0, (1.0 - share) / (1.0 - settings.decay_start))
    return settings.lr * min(warm, max(fall, 0.0))


class Trainer:
    """One training run of one baseline; see `train`."""

    def __init__(self, problem: Problem, settings: Settings, seed: int, device: str = "cpu"):
        self.problem, self.settings, self.device = problem, settings, torch.device(device)
        p, s, ndim = problem, settings, problem.ndim
        if s.history > p.context and not p.is_steady:
            raise ValueError(f"history is {s.history}; expected at most the {p.context} context frames. "
                             f"Lower {s.network}.history.")
        torch.manual_seed(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.u = channels_last(p.normalise(p.train), ndim).to(self.device)
        self.inputs = channels_last(p.normalise_inputs(p.train_inputs), ndim).to(self.device) if p.is_steady else None
        self.scale_parameters = ParameterScale(p.train_parameters)
        self.parameters = self.scale_parameters(p.train_parameters).to(self.device)
        self.offset = p.offset.to(self.device)
        num_channels = self.u.shape[-1]
        self.first = max(0, p.context - s.history) if s.is_scored_only and not p.is_steady else 0
        if p.is_steady:
            self.change = torch.ones(num_channels, device=self.device)
            in_channels = self.inputs.shape[-1]
        else:
            difference = self.u[:, self.first + 1 :] - self.u[:, self.first : -1]
            self.change = difference.pow(2).flatten(0, -2).mean(0).sqrt().clamp(min=1e-12)
            in_channels = num_channels * s.history
        in_channels += self.parameters.shape[1]
        sizes = tuple(self.u.shape[2:-1])
        self.net = NETWORKS[s.network](in_channels, num_channels, sizes, p.boundary, s).to(self.device)
        if s.network != "fno_library":
            last = [m for m in self.net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1]
            nn.init.zeros_(last.weight)  # start from persistence (steady: from the mean field)
            nn.init.zeros_(last.bias)
        is_complex = any(x.is_complex() for x in self.net.parameters())  # the library's weights: AdamW cannot fuse them
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=s.lr, weight_decay=s.weight_decay, betas=(0.9, 0.95),
                                           fused=not is_complex)
        self.average = [x.detach().clone() for x in self.net.parameters()] if s.ema else []
        self.skipped = 0

    @property
    def num_parameters(self) -> int:
        """Real numbers: a complex weight counts twice, whichever way it is stored."""
        return sum(x.numel() * (2 if x.is_complex() else 1) for x in self.net.parameters())

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16")

    def advance(self, window: Tensor, parameters: Tensor) -> Tensor:
        """The frame after `window` (batch, history, *space, channel); steady: the solution, `window` holds the coefficient."""
        x = window.movedim(1, -2).flatten(-2)
        if parameters.shape[1]:
            constant = parameters.view(len(x), *[1] * self.problem.ndim, -1).expand(*x.shape[:-1], -1)
            x = torch.cat((x, constant), -1)
        with self.autocast():
            y = self.net(x)
        return y.float() if self.problem.is_steady else window[:, -1] + self.change * y.float()

    def batch(self, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Augmented window (batch, history, ...), targets (batch, num_steps, ...) and parameters."""
        p, s = self.problem, self.settings
        rows = torch.randint(len(self.u), (s.batch_size,), generator=self.random)
        if p.is_steady:
            window, targets = self.inputs[rows], self.u[rows]
        else:
            length = s.history + num_steps
            starts = torch.randint(self.first, self.u.shape[1] - length + 1, (s.batch_size,), generator=self.random)
            frames = starts[:, None] + torch.arange(length)
            if s.augment and p.boundary == PERIODIC:
                index = [rows.view(-1, 1, *[1] * p.ndim), frames.view(*frames.shape, *[1] * p.ndim)]
                for axis, size in enumerate(self.u.shape[2:-1]):
                    shift = torch.randint(size, (s.batch_size, 1), generator=self.random)
                    cells = (torch.arange(size) + shift) % size
                    index.append(cells.view(-1, 1, *[1] * axis, size, *[1] * (p.ndim - axis - 1)))
                chosen = self.u[tuple(i.to(self.device) for i in index)]
            else:
                chosen = self.u[rows[:, None].to(self.device), frames.to(self.device)]
            window, targets = chosen[:, : s.history], chosen[:, s.history :]
        if s.augment and p.is_symmetric:
            window, targets = self.symmetry(window, targets)
        return window, targets, self.parameters[rows.to(self.device)]

    def symmetry(self, *fields: Tensor) -> list[Tensor]:
        """The same random symmetry of the line or square applied to all (batch, time, *space, channel)."""
        flips = [axis + 2 for axis in range(self.problem.ndim) if torch.rand((), generator=self.random) < 0.5]
        swap = self.problem.ndim == 2 and bool(torch.rand((), generator=self.random) < 0.5)
        fields = [field.flip(flips) if flips else field for field in fields]
        return [field.transpose(2, 3) if swap else field for field in fields]

    def loss(self, pred: Tensor, target: Tensor, before: Tensor | None) -> Tensor:
        """Settings.loss of one frame, (batch, *space, channel); `before` is the true frame a step earlier."""
        space = tuple(range(1, pred.ndim - 1))
        error = ((pred - target) / self.change).pow(2)
        if self.settings.loss == "mse":
            return error.mean()
        if self.settings.loss == "change" and before is not None:
            size = ((target - before) / self.change).pow(2).mean(space) + CHANGE_FLOOR**2
        else:
            size = ((target + self.offset) / self.change).pow(2).mean(space)
        return (error.mean(space).mean(-1) / size.mean(-1).clamp(min=1e-12)).sqrt().mean()

    def step(self, share: float) -> None:
        """One update at this share of the budget."""
        s = self.settings
        num_steps = 2 if share >= 1 - s.unroll_fraction and not self.problem.is_steady else 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(share, s)
        window, targets, parameters = self.batch(num_steps)
        total, before = 0.0, None if self.problem.is_steady else window[:, -1]
        for k in range(num_steps):
            pred = self.advance(window, parameters)
            total = total + self.loss(pred, targets[:, k], before)
            window, before = torch.cat((window[:, 1:], pred[:, None]), 1) if k + 1 < num_steps else window, targets[:, k]
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if not bool(torch.isfinite(norm)):
            self.skipped += 1
            return
        self.optimizer.step()
        if self.average:
            torch._foreach_lerp_(self.average, [x.detach() for x in self.net.parameters()], 1 - s.ema)

    def weights(self) -> list[Tensor]:
        """A copy of the weights to judge: averaged ones where asked for."""
        return [x.detach().clone() for x in (self.average or self.net.parameters())]

    @torch.no_grad()
    def load(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.net.parameters(), weights, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def predict(self, given: Tensor, parameters: Tensor, num_steps: int) -> Tensor:
        """See Trained.predict."""
        p = self.problem
        normalise = p.normalise_inputs if p.is_steady else p.normalise
        window = channels_last(normalise(given), p.ndim).to(self.device)
        constant = self.scale_parameters(parameters).to(self.device)
        history = 1 if p.is_steady else self.settings.history
        u = rollout(lambda shown: self.advance(shown, constant)[:, None], window, num_steps, history)
        return p.denormalise(u.movedim(-1, 2).to(given.device))


def train(problem: Problem, settings: Settings, budget_seconds: float, seed: int, score: Callable[[Trained], float] | None = None,
          clock: Callable[[], float] = time.perf_counter, device: str = "cpu") -> Trained:
    """Train one baseline for `budget_seconds` of `clock` and return it with the weights that `score` (of the validation rows,
    lower is better; not counted in the budget) prefers among those at the CHECKPOINTS and the end; without it, the last.

    Normalising the data and building the network come before the budget; it ends before a step that would not fit.
    """
    trainer = Trainer(problem, settings, seed, device)
    watch = Stopwatch(clock)
    cpu_start = time.process_time()
    result = Trained(trainer.predict, trainer.num_parameters, 0, 0.0, 0.0)
    due, durations, best, cpu_excluded = list(CHECKPOINTS), [], None, 0.0

    def judge(share: float) -> None:
        nonlocal best, cpu_excluded
        before, training = time.process_time(), [x.detach().clone() for x in trainer.net.parameters()]
        with watch:
            weights = trainer.weights()
            trainer.load(weights)
            trainer.net.eval()
            error = score(result)
            trainer.net.train()
            trainer.load(training)
        cpu_excluded += time.process_time() - before
        result.history.append({"share": share, "steps": result.steps, "val": error})
        if best is None or not best[0] <= error:
            best = (error, weights)

    while True:
        begin = watch()
        if begin + (max(durations[-5:]) if durations else 0.0) > budget_seconds:
            break
        if due and score is not None and begin >= due[0] * budget_seconds:
            judge(due.pop(0))
        trainer.step(begin / budget_seconds)
        result.steps += 1
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        durations.append(watch() - begin)
    result.seconds, result.cpu_seconds = watch(), time.process_time() - cpu_start - cpu_excluded
    result.step_ms, result.skipped = 1e3 * sorted(durations)[len(durations) // 2] if durations else float("nan"), trainer.skipped
    if score is not None:
        judge(1.0)
    trainer.load(best[1] if best else trainer.weights())
    trainer.net.eval()
    return result
