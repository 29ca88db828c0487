"""Blocks of spectral and local mixing on one level; tasks share what does not depend on their dimensions.

Global mixing is a sum of spectral convolutions along each axis (factorised Fourier operator, Tran et al.
2023, arXiv 2111.13802; Fourier modes if periodic, cosine modes if not). In three dimensions it is one
convolution along all axes together, with fewer modes (Fourier neural operator, Li et al. 2021, arXiv
2010.08895): after a minute on cfd3d the error is 0.17 instead of 0.75. Local mixing is a depthwise
convolution along each axis. A gated MLP (Shazeer 2020, arXiv 2002.05202) mixes channels. AdaLN-zero (Peebles
and Xie 2023, arXiv 2212.09748) conditions on task, parameters, time step and boundary.

Tasks share the mixing along single axes. MLP, modulation and mixing along all axes together are private to
each task: one model of eleven tasks then has 0.96 times the error of eleven models at equal time, with all
weights shared 1.24 times (docs/lab/measurements.md).
"""

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.backbone import ANY, Backbone
from ups.models.backbones.layers import MOST_MODES, BoxMixing, Ends, LocalMixing, Pointwise, SpectralMixing

VOLUME = 3  # axes that are mixed together


class Block(nn.Module):
    """x += gate * mixing(norm x), then x += gate * MLP(norm x + local), with gates, scales and shifts from
    the condition.

    Mixing along single axes is shared, the rest is private to each task; the pointwise layers of all tasks
    start with equal weights.
    """

    is_repeated_layer = True

    def __init__(self, width: int, modes: int, kernel_size: int, mlp_ratio: float, tasks: Mapping[str, Ends]):
        super().__init__()
        is_shared = any(len(ends) < VOLUME for ends in tasks.values())
        self.spectral = SpectralMixing(width, modes) if is_shared else None
        self.local = LocalMixing(width, kernel_size)
        first = Pointwise(width, mlp_ratio)
        self.ends = dict(tasks)
        self.own = nn.ModuleDict({task: copy.deepcopy(first) for task in tasks})
        for task, own in self.own.items():
            own.mark_hidden_matrices()
            ends = tasks[task]
            own.mixing = (
                BoxMixing(width, min(modes, MOST_MODES[VOLUME]), ends) if len(ends) == VOLUME else None
            )

    def forward(self, x: Tensor, condition: Tensor, task: str = ANY) -> Tensor:
        own, ends = self.own[task], self.ends[task]
        modulation = own.modulation(condition).view(x.shape[0], *[1] * (x.ndim - 2), 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(-2)
        h = nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        x = x + gate1 * (own.mixing(h) if own.mixing is not None else self.spectral(h, ends))
        h = nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * own(h + self.local(h, ends))


class FlatBackbone(Backbone):
    """Blocks on one level; in three dimensions all axes are mixed together."""

    def __init__(self, model: ModelConfig, tasks: Mapping[str, Ends]):
        super().__init__(model, tasks)
        self.fewest_tokens = model.kernel_size // 2  # local mixing wraps around a periodic axis once
        self.blocks = nn.ModuleList(
            Block(model.width, model.modes, model.kernel_size, model.mlp_ratio, tasks)
            for _ in range(model.depth)
        )

    def forward(self, x: Tensor, condition: Tensor, task: str = ANY) -> Tensor:
        for block in self.blocks:
            x = block(x, condition, task)
        return nn.functional.rms_norm(x, x.shape[-1:])


class LocalBackbone(nn.Module):
    """Blocks without global mixing for one task, on the output of another backbone. With half of a block's
    MLP and shifts as the only modulation, they have a sixteenth of the weights of a sampling network: they
    are called once per sample.
    """

    def __init__(self, model: ModelConfig, depth: int, ends: Ends):
        super().__init__()
        self.ends = ends
        self.local = nn.ModuleList(LocalMixing(model.width, model.kernel_size) for _ in range(depth))
        self.points = nn.ModuleList(Pointwise(model.width, model.mlp_ratio / 2, 1) for _ in range(depth))
        for point in self.points:  # no effect at the start
            nn.init.zeros_(point.down.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """As FlatBackbone."""
        for local, point in zip(self.local, self.points, strict=True):
            h = nn.functional.rms_norm(x, x.shape[-1:])
            h = h + point.modulation(condition).view(x.shape[0], *[1] * (x.ndim - 2), -1)
            x = x + point(h + local(h, self.ends))
        return nn.functional.rms_norm(x, x.shape[-1:])
