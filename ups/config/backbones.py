"""The table of backbones: name -> MODULE:CLASS below ups/models/backbones.

It is the only place where a backbone is registered. Classes are given by name, because a configuration is
checked before torch is imported; the network imports the one it uses.
"""

BACKBONES: dict[str, str] = {
    "flat": "flat:FlatBackbone",
    "plain": "plain:Plain",
    "fno": "fno:FNO",
    "unet": "unet:UNet",
    "resnet": "resnet:ResNet",
    "transformer": "transformer:Transformer",
}
