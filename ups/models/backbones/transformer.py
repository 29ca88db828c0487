"""Transformer with attention in windows, private to each task; made for GPUs.

The tokens of a window attend to the window and to half a window around it (halo attention, Vaswani et al.
2021, arXiv 2103.12731): across the ends of periodic axes, not beyond walls. A learnt bias per head depends on
the distance along each axis. Blocks are conditioned by AdaLN-zero (Peebles and Xie 2023, arXiv 2212.09748).
Settings of the model that are used: width, depth, mlp_ratio, kernel_size (a window has kernel_size + 1 tokens
along each axis).
"""

import math

import torch
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.backbone import PrivateBlocks
from ups.models.backbones.layers import Ends, Pointwise
from ups_discovery.boundary import PERIODIC

HEAD_WIDTH = 32  # channels per head, at least


class WindowAttention(nn.Module):
    """Attention of (batch, *tokens, width) in windows of `window` tokens along each axis."""

    def __init__(self, width: int, window: int, ends: Ends):
        super().__init__()
        self.window, self.halo, self.ends = window, window // 2, ends
        self.heads = max(n for n in range(1, max(1, width // HEAD_WIDTH) + 1) if width % n == 0)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.qkv.weight.is_hidden_matrix = self.out.weight.is_hidden_matrix = True
        self.bias = nn.Parameter(torch.zeros(len(ends), self.heads, 2 * (window + self.halo)))

    def _sources(self, n: int, end: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each window along an axis of n tokens: the tokens it attends to, and whether they exist; both
        (windows, window + 2 halo)."""
        windows = -(-n // self.window)
        places = self.window * torch.arange(windows, device=device)[:, None] + torch.arange(
            -self.halo, self.window + self.halo, device=device
        )
        if end != PERIODIC:
            return places.clamp(0, n - 1), (places >= 0) & (places < n)
        # a short axis would be reached several times: each token counts once
        return places % n, (places - places[:, :1] < n) & (places < n + self.halo)

    def _bias(self) -> Tensor:
        """(heads, queries, keys) of the tokens of a window."""
        query = torch.arange(self.window, device=self.bias.device) + self.halo
        key = torch.arange(self.window + 2 * self.halo, device=self.bias.device)
        distance = key - query[:, None] + self.window + self.halo - 1  # 0 .. 2 (window + halo) - 2
        ndim = len(self.ends)
        total = 0.0
        for axis in range(ndim):
            shape = [-1] + [distance.shape[0] if i == axis else 1 for i in range(ndim)]
            shape += [distance.shape[1] if i == axis else 1 for i in range(ndim)]
            total = total + self.bias[axis][:, distance].view(shape)
        return total.flatten(1, ndim).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        batch, *tokens, width = x.shape
        ndim, w = len(tokens), self.window
        query, key, value = self.qkv(x).chunk(3, -1)
        exists = None
        for axis, (n, end) in enumerate(zip(tokens, self.ends, strict=True)):
            source, is_there = self._sources(n, end, x.device)
            # axis -> (windows, tokens of the window)
            at = 1 + 2 * axis
            key, value = (
                t.index_select(at, source.flatten()).unflatten(at, source.shape) for t in (key, value)
            )
            query = nn.functional.pad(query, (0, 0) * (query.ndim - 1 - at) + (0, len(source) * w - n))
            query = query.unflatten(at, (len(source), w))
            shape = [1] * (2 * ndim)
            shape[2 * axis : 2 * axis + 2] = is_there.shape
            exists = is_there.view(shape) if exists is None else exists & is_there.view(shape)
        grid = query.shape[1 : 1 + 2 * ndim : 2]
        # (batch, *windows, *tokens, width) -> (batch * windows, heads, tokens, channels)
        order = [0, *range(1, 2 * ndim, 2), *range(2, 2 * ndim + 1, 2), 2 * ndim + 1]
        query, key, value = (
            t.permute(order)
            .reshape(batch * math.prod(grid), -1, self.heads, width // self.heads)
            .transpose(1, 2)
            for t in (query, key, value)
        )
        mask = exists.permute([i - 1 for i in order[1:-1]]).reshape(math.prod(grid), 1, 1, -1)
        bias = self._bias().to(x.dtype).masked_fill(~mask, -math.inf)  # (windows, heads, queries, keys)
        bias = bias.expand(batch, *bias.shape).flatten(0, 1)
        h = nn.functional.scaled_dot_product_attention(query, key, value, bias)
        h = h.transpose(1, 2).reshape(batch, *grid, *[w] * ndim, width)
        back = [0, *(axis for i in range(ndim) for axis in (1 + i, 1 + ndim + i)), 2 * ndim + 1]
        h = h.permute(back)
        for axis, n in enumerate(tokens, 1):
            h = h.flatten(axis, axis + 1).narrow(axis, 0, n)
        return self.out(h)


class AttentionBlock(nn.Module):
    """x += gate * attention(norm x), then x += gate * MLP(norm x); gates, scales and shifts are linear in the
    condition."""

    is_repeated_layer = True

    def __init__(self, model: ModelConfig, ends: Ends):
        super().__init__()
        self.attention = WindowAttention(model.width, model.kernel_size + 1, ends)
        self.points = Pointwise(model.width, model.mlp_ratio)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = self.points.modulation(condition).view(x.shape[0], *[1] * (x.ndim - 2), 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(-2)
        x = x + gate1 * self.attention(nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale1) + shift1)
        return x + gate2 * self.points(nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)


class Transformer(PrivateBlocks):
    block = AttentionBlock
