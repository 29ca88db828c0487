"""Fourier neural operator (Li et al. 2021, arXiv 2010.08895), private to each task.

    x <- gelu((1 + scale) (spectral x + W x)), the last layer without gelu

The condition is added to the input, and the scale of each layer is linear in it.
Along a periodic axis the modes are Fourier modes, at Dirichlet walls sines, at other walls cosines. Settings
of the model that are used: width, depth and modes (per axis, of each sign).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.models.backbones.backbone import PrivateBackbone
from ups.models.backbones.layers import Ends, Position, zero_linear
from ups_discovery.boundary import DIRICHLET, PERIODIC
from ups_discovery.spectral import cosine, sine


def wave_numbers(n: int, modes: int, is_first: bool) -> list[int]:
    """The wave numbers kept along a periodic axis of n cells: 0 .. modes - 1, and if it is not the first such
    axis also 1 - modes .. -1; k and -k are one wave of a real field.
    """
    most = min(modes, n // 2 + 1 if is_first else (n + 1) // 2)
    return [*range(most), *([] if is_first else range(1 - most, 0))]


def fourier_matrices(n: int, waves: Sequence[int], is_first: bool) -> tuple[Tensor, Tensor]:
    """Analysis and synthesis of these waves as real matrices, rows Re_k, Im_k of fft / n.

    The first axis reads real numbers: (2 waves, n) and (n, 2 waves). Another one reads all real parts, then
    all imaginary parts: (2 waves, 2 n) and (2 n, 2 waves).
    """
    k = torch.tensor(waves, dtype=torch.float64)
    angle = 2 * math.pi * k[:, None] * torch.arange(n, dtype=torch.float64) / n
    if is_first:
        rows = torch.stack((angle.cos(), -angle.sin()), 1).flatten(0, 1)
        both = torch.where((k == 0) | (2 * k == n), 1.0, 2.0).repeat_interleave(2)  # -k is the conjugate
        return rows / n, (rows * both[:, None]).T
    cos, sin = angle.cos(), angle.sin()
    rows = torch.stack((torch.cat((cos, sin), 1), torch.cat((-sin, cos), 1)), 1).flatten(0, 1)
    return rows / n, rows.T


class FourierConvolution(nn.Module):
    """y = skip + T^-1 W_k T x, a linear map of the channels per kept mode; x, skip (*tokens, batch, width).

    Space comes first so that each transform is one large matrix product. Axes with walls are transformed
    first. weight: (modes along each axis.., width, width, 2 or 1), complex if any axis is periodic.
    """

    def __init__(self, width: int, modes: int, ends: Ends):
        super().__init__()
        self.ends, self.modes = ends, modes
        self.order = sorted(range(len(ends)), key=lambda axis: ends[axis] == PERIODIC)  # walls first
        self.first = next((axis for axis in self.order if ends[axis] == PERIODIC), None)
        counts = [
            2 * modes - 1 if ends[axis] == PERIODIC and axis != self.first else modes for axis in self.order
        ]
        self.is_complex, self.is_permuted = self.first is not None, self.order != sorted(self.order)
        self.weight = nn.Parameter(torch.randn(*counts, width, width, 1 + self.is_complex) / width)
        self._matrices: dict[tuple, list[tuple[Tensor, Tensor]]] = {}

    def _transforms(self, tokens: Sequence[int], like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(analysis, synthesis) of each axis in `order`."""
        key = (*tokens, like.device)
        if key not in self._matrices:
            pairs = []
            for axis in self.order:
                n, end = tokens[axis], self.ends[axis]
                if end == PERIODIC:
                    is_first = axis == self.first
                    pair = fourier_matrices(n, wave_numbers(n, self.modes, is_first), is_first)
                else:
                    rows = (sine if end == DIRICHLET else cosine)(n)[: min(self.modes, n)]
                    pair = rows, rows.T
                pairs.append(tuple(matrix.float().contiguous().to(like.device) for matrix in pair))
            self._matrices[key] = pairs
        return self._matrices[key]

    def _kept(self, tokens: Sequence[int]) -> Tensor:
        """The weights of the modes that the grid resolves, (modes, width, width, 2 or 1)."""
        weight = self.weight
        for number, axis in enumerate(self.order):
            if self.ends[axis] == PERIODIC:
                waves = wave_numbers(tokens[axis], self.modes, axis == self.first)
            else:
                waves = list(range(min(self.modes, tokens[axis])))
            if len(waves) < weight.shape[number]:
                index = torch.tensor([wave % weight.shape[number] for wave in waves], device=weight.device)
                weight = weight.index_select(number, index)
        return weight.flatten(0, len(tokens) - 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        *tokens, batch, width = x.shape
        h = x.permute(*self.order, -2, -1) if self.is_permuted else x
        sizes, transforms = h.shape[:-2], self._transforms(tokens, x)
        behind = [math.prod(h.shape[number + 1 :]) for number in range(len(tokens))]
        for (analysis, _), inner in zip(transforms, behind, strict=True):
            h = analysis.to(x.dtype) @ h.reshape(-1, analysis.shape[1], inner)
        weight = self._kept(tokens)
        if self.is_complex:
            real, imag = weight.unbind(-1)
            matrix = torch.cat((torch.cat((real, imag), 2), torch.cat((-imag, real), 2)), 1)
            h = h.reshape(-1, 2, batch, width).transpose(1, 2).reshape(-1, batch, 2 * width)
            h = torch.bmm(h, matrix.to(x.dtype)).view(-1, batch, 2, width).transpose(1, 2)
        else:
            h = torch.bmm(h.reshape(-1, batch, width), weight[..., 0].to(x.dtype))
        syntheses = [synthesis.to(x.dtype) for _, synthesis in transforms]
        for synthesis, inner in zip(syntheses[:0:-1], behind[:0:-1], strict=True):
            h = synthesis @ h.reshape(-1, synthesis.shape[1], inner)
        h = h.reshape(syntheses[0].shape[1], -1)
        if not self.is_permuted:
            return torch.addmm(skip.reshape(tokens[0], -1), syntheses[0], h).view(x.shape)
        h = (syntheses[0] @ h).view(*sizes, batch, width)
        return skip + h.permute(*(self.order.index(axis) for axis in range(len(tokens))), -2, -1)


class FourierLayer(nn.Module):
    """(1 + scale) (spectral x + W x), x (*tokens, batch, width); scale is linear in the condition."""

    is_repeated_layer = True

    def __init__(self, model: ModelConfig, ends: Ends):
        super().__init__()
        self.spectral = FourierConvolution(model.width, model.modes, ends)
        self.pointwise = nn.Linear(model.width, model.width)
        self.pointwise.weight.is_hidden_matrix = True
        self.modulation = zero_linear(model.width, model.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.spectral(x, self.pointwise(x)) * (1 + self.modulation(condition))


class FourierNetwork(nn.Module):
    def __init__(self, model: ModelConfig, ends: Ends):
        super().__init__()
        self.position, self.modulation = Position(model.width, ends), zero_linear(model.width, model.width)
        self.layers = nn.ModuleList(FourierLayer(model, ends) for _ in range(model.depth))
        self.project = nn.Linear(model.width, model.width)
        self.project.weight.is_hidden_matrix = True

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = (self.position(x).movedim(0, -2) + self.modulation(condition)).contiguous()
        for number, layer in enumerate(self.layers):
            x = layer(nn.functional.gelu(x) if number else x, condition)
        return nn.functional.gelu(self.project(x)).movedim(-2, 0)


class FNO(PrivateBackbone):
    network = FourierNetwork
