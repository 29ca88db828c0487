"""The rivals and their settings: backbones of ups/models/backbones that predict the change of a frame.

Fields are normalised and channels-last, (batch, *space, channel); one to three axes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.data.tokenizer import patchify, unpatchify
from ups.models.backbones import ANY, build
from ups.models.backbones.layers import zero_linear
from ups_discovery.boundary import along

KERNEL_SIZE, MLP_RATIO = 7, 2.0  # of backbones that have such settings


@dataclass(frozen=True)
class Settings:
    """What may be tuned. `network` to `patch` are of the network, the rest of the recipe (baselines.py).

    network: kind of the backbone. width, depth, modes: as in `ModelConfig`. patch: cells per axis that become
    one token. history: input frames. loss: mse of the scaled change; change: per-sample error over that
    sample's change; field: over that sample's field. unroll_fraction: last fraction of the budget, trained
    through two steps. is_scored_only: train only on windows where the rollout is scored.
    """

    network: Literal["fno", "unet"] = "fno"
    width: int = 48
    depth: int = 4
    modes: int = 24
    patch: int = 1
    history: int = 1
    loss: Literal["mse", "change", "field"] = "mse"
    lr: float = 2e-3
    batch_size: int = 32
    unroll_fraction: float = 0.3
    is_scored_only: bool = False


# best: of a network on a task; usual: on other tasks, by dimension; starts: of a search, by dimension
KNOWN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def settings_for(network: str, task: str, ndim: int, overrides: dict | None = None) -> Settings:
    """The tuned settings of a network on `task`, with `overrides` on top. Raises ValueError for an unknown
    key.
    """
    usual = KNOWN["usual"][ndim] | ({"patch": 2} if ndim == 3 and network != "fno" else {})
    values = {"network": network, **KNOWN["best"][network].get(task, usual), **(overrides or {})}
    keys = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(set(values) - keys):
        raise ValueError(
            f"setting {unknown[0]!r} is unknown; expected one of {', '.join(sorted(keys))}. "
            f"Correct {network}.KEY=VALUE."
        )
    return Settings(**values)


class Rival(nn.Module):
    """A backbone between linear maps from and to the cells of a patch; zero at the start of training."""

    def __init__(
        self,
        channels_in: int,
        num_parameters: int,
        channels_out: int,
        sizes: tuple[int, ...],
        boundary: str,
        settings: Settings,
    ):
        super().__init__()
        self.patch, width, cells = settings.patch, settings.width, settings.patch ** len(sizes)
        if any(size % self.patch for size in sizes):
            raise ValueError(
                f"the grid {sizes} has no patches of {self.patch} cells; expected axes divisible by it. "
                f"Change {settings.network}.patch or the resolution."
            )
        model = ModelConfig(settings.network, width, settings.depth, settings.modes, KERNEL_SIZE, MLP_RATIO)
        self.width = width
        self.into = nn.Linear((channels_in + num_parameters) * cells, width)
        self.condition = nn.Linear(num_parameters, width) if num_parameters else None
        self.backbone = build(model, {ANY: along(boundary, len(sizes))})
        self.out = zero_linear(width, channels_out * cells)

    def forward(self, u: Tensor, parameters: Tensor) -> Tensor:
        """u (batch, *space, channel), parameters (batch, P), standardised: (batch, *space, channel)."""
        sizes = u.shape[1:-1]
        constant = parameters.view(len(u), *[1] * len(sizes), -1).expand(*u.shape[:-1], -1)
        cells = torch.cat((u, constant), -1).movedim(-1, 1)
        x = self.into(patchify(cells, len(sizes), self.patch))
        condition = x.new_zeros(len(u), self.width) if self.condition is None else self.condition(parameters)
        y = self.out(self.backbone(x, condition))
        return unpatchify(y, len(sizes), self.patch).movedim(1, -1).contiguous()
