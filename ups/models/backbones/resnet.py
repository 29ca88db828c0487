"""Dilated residual network (Stachenfeld et al. 2022, arXiv 2112.15275), private to each task.

Local: a token depends on those within depth * sum(DILATIONS) tokens. Settings of the model that are used:
width and depth (blocks).
"""

from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.backbone import BlockNetwork, PrivateBackbone
from ups.models.backbones.layers import Convolution, Ends, Shift

DILATIONS = (1, 2, 4, 2, 1)  # of the best dilated network in APEBench (Koehler et al. 2024), "Dil;2;32;2"


class DilatedBlock(nn.Module):
    """x + a chain of dilated convolutions, each followed by GELU; film of the first one's input."""

    is_repeated_layer = True

    def __init__(self, model: ModelConfig, ends: Ends):
        super().__init__()
        self.shift = Shift(model.width, model.width)
        self.convolutions = nn.ModuleList(
            Convolution(model.width, model.width, ends, dilation=dilation) for dilation in DILATIONS
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.shift(nn.functional.rms_norm(x, x.shape[-1:]), condition)
        for number, convolution in enumerate(self.convolutions):
            h = convolution(nn.functional.gelu(h) if number else h)
        return x + h


class ResidualNetwork(BlockNetwork):
    block = DilatedBlock


class ResNet(PrivateBackbone):
    network = ResidualNetwork
