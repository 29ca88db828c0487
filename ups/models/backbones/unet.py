"""U-Net of PDEArena (Gupta and Brandstetter 2022, arXiv 2209.15616), private to each task.

Residual blocks with GroupNorm and GELU, strided convolutions down, nearest neighbours up. A block is
conditioned by scale and shift of its second norm. Settings of the model that are used: width (channels of the
finest level; level l has width * (1, 2, 2, 4, 4, 8..)[l]) and depth (levels). Odd sizes are rounded up.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.backbone import PrivateBackbone
from ups.models.backbones.layers import Convolution, Ends, Position, Shift, as_image, from_image


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(groups for groups in (8, 4, 2, 1) if channels % groups == 0), channels)


class ResidualBlock(nn.Module):
    """x + conv(gelu(film(norm(conv(gelu(norm x))), condition))); a linear map of x if channels change."""

    is_repeated_layer = True

    def __init__(self, channels_in: int, channels_out: int, condition: int, ends: Ends):
        super().__init__()
        self.norm1, self.norm2 = norm(channels_in), norm(channels_out)
        self.conv1 = Convolution(channels_in, channels_out, ends)
        self.conv2 = Convolution(channels_out, channels_out, ends)
        self.shift = Shift(channels_out, condition)
        self.skip = nn.Linear(channels_in, channels_out) if channels_in != channels_out else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv1(nn.functional.gelu(normed(self.norm1, x)))
        h = self.shift(normed(self.norm2, h), condition)
        return self.skip(x) + self.conv2(nn.functional.gelu(h))


def normed(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """A GroupNorm of x (batch, *tokens, channels)."""
    return from_image(norm(as_image(x)), x.ndim - 2)


def doubled(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """x (batch, *tokens, channels) with every token repeated along each axis, cut to `sizes`."""
    image = nn.functional.interpolate(as_image(x), scale_factor=(1, 2) if len(sizes) == 1 else 2)
    x = from_image(image, len(sizes))
    return x[(slice(None), *(slice(size) for size in sizes))]


class UNetwork(nn.Module):
    def __init__(self, model: ModelConfig, ends: Ends):
        super().__init__()
        widths = [model.width * 2 ** ((level + 1) // 2) for level in range(model.depth)]
        pairs, last = list(itertools.pairwise(widths)), widths[-1]
        self.position = Position(model.width, ends)
        self.stem = Convolution(model.width, model.width, ends)
        self.down = nn.ModuleList(ResidualBlock(a, a, model.width, ends) for a, _ in pairs)
        self.shrink = nn.ModuleList(Convolution(a, b, ends, stride=2) for a, b in pairs)
        self.middle = nn.ModuleList(ResidualBlock(last, last, model.width, ends) for _ in range(2))
        self.up = nn.ModuleList(ResidualBlock(a + b, a, model.width, ends) for a, b in pairs)
        self.norm = norm(model.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x, kept = self.stem(self.position(x)), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(block(x, condition))
            x = shrink(kept[-1])
        for block in self.middle:
            x = block(x, condition)
        for block in reversed(self.up):
            finer = kept.pop()
            x = block(torch.cat((finer, doubled(x, finer.shape[1:-1])), -1), condition)
        return nn.functional.gelu(normed(self.norm, x))


class UNet(PrivateBackbone):
    network = UNetwork
