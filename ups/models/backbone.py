"""The network shared by all tasks: token grids of 1, 2 or 3 dimensions, any boundary, one set of weights.

Nothing in a block knows the dimension: global mixing is a spectral convolution along each axis in turn,
summed (factorised Fourier operator, Tran et al. 2023, arXiv 2111.13802; Fourier modes if periodic, cosine
modes if not), local mixing a depthwise convolution along each axis, and a gated MLP (Shazeer 2020, arXiv
2002.05202) mixes channels. AdaLN-zero (Peebles and Xie 2023, arXiv 2212.09748) brings in task, parameters,
time step and boundary. Flat, without token merging or
attention: at equal time spectral mixing on one level measured better than a U-shape with attention on every
task tried.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ups.boundary import DIRICHLET, PERIODIC, along
from ups.config import ModelConfig
from ups.spectral import cosine, fourier_pairs


def zero_linear(size: int, width: int) -> nn.Linear:
    """A layer that begins as nothing: what it feeds starts as if it were not there."""
    layer = nn.Linear(size, width)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SpectralMixing(nn.Module):
    """Sum over axes of a convolution along that axis, diagonal in its low modes: y_k = W_k x_k, complex if
    periodic.

    weight: (2, modes, width, width), real and imaginary part, shared by the axes; a cosine basis uses the
    real part.
    """

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, modes, width, width) / width)
        self._bases: dict[tuple, Tensor] = {}

    def _basis(self, n: int, is_periodic: bool, like: Tensor) -> Tensor:
        key = (n, is_periodic, like.device)
        if key not in self._bases:
            modes = min(self.modes, n // 2 + 1 if is_periodic else n)
            basis = fourier_pairs(n, modes) if is_periodic else cosine(n)[:modes][None]
            self._bases[key] = basis.float().to(like.device)
        return self._bases[key]

    def forward(self, x: Tensor, boundary: str) -> Tensor:
        """(batch, *tokens, width) to the same shape."""
        total = torch.zeros_like(x)
        for axis, end in enumerate(along(boundary, x.ndim - 2), 1):
            h = x.movedim(axis, 0)                                                 # (n, *others, width)
            basis = self._basis(len(h), end == PERIODIC, x)                        # (1 or 2, modes, n)
            modes, width, flat = basis.shape[1], h.shape[-1], basis.flatten(0, 1)
            hat = (flat @ h.flatten(1)).view(-1, modes, h[0].numel() // width, width)
            real, imag = self.weight[0, :modes], self.weight[1, :modes]
            # x_hat = c - i s, so y = W x_hat has cosine part Wr c + Wi s, sine Wr s - Wi c
            c, s = hat[0], hat[-1]
            hat = c @ real if len(hat) == 1 else torch.cat([c @ real + s @ imag, s @ real - c @ imag])
            total = total + (flat.mT @ hat.flatten(1)).view(h.shape).movedim(0, axis)
        return total


class LocalMixing(nn.Module):
    """Sum over axes of a depthwise convolution along that axis; weight (width, 1, kernel), shared by the
    axes."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.side = kernel_size // 2
        self.weight = nn.Parameter(torch.randn(width, 1, kernel_size) / kernel_size)

    def forward(self, x: Tensor, boundary: str) -> Tensor:
        # a channels-last image to the convolution: on a CPU five times as fast as lines
        h = x.movedim(-1, 1) if x.ndim > 3 else x.movedim(-1, 1).unsqueeze(2)
        ndim, weight, total = h.ndim - 2, self.weight.to(x.dtype), 0.0
        width, _, kernel_size = weight.shape
        convolve, pad = (nn.functional.conv3d if ndim == 3 else nn.functional.conv2d), nn.functional.pad
        for axis, end in enumerate(along(boundary, x.ndim - 2)[::-1]):   # from the last, as nn.functional.pad
            mode = {PERIODIC: "circular", DIRICHLET: "constant"}.get(end, "replicate")
            pads, sizes = [0] * (2 * ndim), [1] * ndim
            pads[2 * axis : 2 * axis + 2], sizes[ndim - 1 - axis] = (self.side, self.side), kernel_size
            total = total + convolve(pad(h, pads, mode=mode), weight.view(width, 1, *sizes), groups=width)
        return total.movedim(1, -1).reshape(x.shape)


class Block(nn.Module):
    """x += gate * mixing(norm x), then x += gate * MLP(norm x + local), gates and shifts set by the
    condition."""

    def __init__(self, width: int, modes: int, kernel_size: int, mlp_ratio: float):
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.spectral, self.local = SpectralMixing(width, modes), LocalMixing(width, kernel_size)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.modulation = zero_linear(width, 6 * width)
        for linear in (self.up, self.down):
            # for Muon, see ups/training/optim.py
            linear.weight.is_hidden_matrix = True

    def forward(self, x: Tensor, condition: Tensor, boundary: str) -> Tensor:
        shape = (x.shape[0], *[1] * (x.ndim - 2), -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (m.view(shape)
                                                        for m in self.modulation(condition).chunk(6, -1))
        h = nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        x = x + gate1 * self.spectral(h, boundary)
        h = nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        gate, value = self.up(h + self.local(h, boundary)).chunk(2, -1)
        return x + gate2 * self.down(nn.functional.silu(gate) * value)


class FlatBackbone(nn.Module):
    """Blocks over tokens, all on one level: x (batch, *tokens, width), a condition (batch, width) and a
    boundary to (batch, *tokens, width)."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(model.width, model.modes, model.kernel_size, model.mlp_ratio)
                                    for _ in range(model.depth))

    def forward(self, x: Tensor, condition: Tensor, boundary: str) -> Tensor:
        for block in self.blocks:
            x = block(x, condition, boundary)
        return nn.functional.rms_norm(x, x.shape[-1:])


# Every kind is made from a ModelConfig and called with tokens, condition and boundary as FlatBackbone is.
BACKBONES: dict[str, type[nn.Module]] = {"flat": FlatBackbone}


class TaskNetwork(nn.Module):
    """A backbone shared by tasks that each have a head, an embedding and a name: the operator, a corrector.

    description (JSON-able): model (ModelConfig's keys), precision ("no" or "bf16", inside the backbone),
    tasks (what `head` makes their heads from, with a name each). Whoever loads one fills it by a state_dict.
    """

    def __init__(self, description: dict[str, Any], head: Callable[[dict[str, Any], ModelConfig], nn.Module]):
        super().__init__()
        model, tasks = ModelConfig(**description["model"]), description["tasks"]
        self.description, self.precision, self.width = description, description["precision"], model.width
        self.names = [task["name"] for task in tasks]
        self.heads = nn.ModuleDict({task["name"]: head(task, model) for task in tasks})
        self.backbone = BACKBONES[model.kind](model)
        self.task_embedding = nn.Parameter(torch.randn(len(tasks), model.width) * 0.02)
