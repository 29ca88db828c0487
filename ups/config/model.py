"""The settings of a network, which its weights store too, and the table of backbones: name -> MODULE:CLASS
below ups/models/backbones.

It is the only place where a backbone is registered. Classes are given by name, because a configuration is
checked before torch is imported; a network imports the one it uses.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from ups.config.bounds import Bound, Positive

BACKBONES: dict[str, str] = {
    "flat": "flat:FlatBackbone",
    "plain": "plain:Plain",
    "fno": "fno:FNO",
    "unet": "unet:UNet",
    "resnet": "resnet:ResNet",
    "transformer": "transformer:Transformer",
}


@dataclass(frozen=True)
class ModelConfig:
    kind: Literal[tuple(BACKBONES)]
    width: Annotated[int, Positive]
    depth: Annotated[int, Positive]
    modes: Annotated[int, Positive]
    kernel_size: Annotated[int, Bound(lambda value: value % 2 == 1, "an odd number", "Use 5 or 7.")]
    mlp_ratio: Annotated[float, Positive]
