"""Residual blocks of spectral and local mixing without norms, private to each task.

    x <- x + gate1 (spectral h),            h = (1 + scale1) x + shift1
    x <- x + gate2 W (silu(a) tanh(b)),     (a, b) = V (h + local h),  h = (1 + scale2) x + shift2

There are no norms, as the size of a token tells how large the field is: with norms errors are 1.4 to 3 times
as large. One factor of the gated MLP is bounded: the usual product silu(a) b (Shazeer 2020, arXiv 2002.05202)
grows out of bounds for fields larger than those of the training data (docs/lab/log.md has both).
Gates, scales and shifts are linear in the condition; they begin as 1, 0 and 0.

Settings of the model that are used: width, depth, modes per axis (at most 8 in 2D and 3 in 3D, where all axes
are mixed together), kernel_size of the depthwise convolution along each axis, and mlp_ratio.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.backbone import PrivateBlocks
from ups.models.backbones.layers import MOST_MODES, BoxMixing, Ends, LocalMixing, zero_linear


class PlainBlock(nn.Module):
    is_repeated_layer = True

    def __init__(self, model: ModelConfig, ends: Ends):
        super().__init__()
        width, hidden = model.width, int(model.width * model.mlp_ratio)
        self.ends = ends
        self.spectral = BoxMixing(width, min(model.modes, MOST_MODES.get(len(ends), model.modes)), ends)
        self.local = LocalMixing(width, model.kernel_size)
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width, bias=False)
        self.up.weight.is_hidden_matrix = self.down.weight.is_hidden_matrix = True
        self.modulation = zero_linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (batch, *tokens, width), condition (batch, width)."""
        modulation = self.modulation(condition).view(x.shape[0], *[1] * (x.ndim - 2), 6, -1)
        scale1, shift1, gate1, scale2, shift2, gate2 = modulation.unbind(-2)
        x = x + (1 + gate1) * self.spectral(x * (1 + scale1) + shift1)
        h = x * (1 + scale2) + shift2
        a, b = self.up(h + self.local(h, self.ends)).chunk(2, -1)
        return x + (1 + gate2) * self.down(nn.functional.silu(a) * b.tanh())


class Plain(PrivateBlocks):
    block, is_normed = PlainBlock, False

    def __init__(self, model: ModelConfig, tasks: Mapping[str, Ends]):
        super().__init__(model, tasks)
        self.fewest_tokens = model.kernel_size // 2  # local mixing wraps around a periodic axis once
