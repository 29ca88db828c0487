"""The network shared by all tasks: token grids of 1, 2 or 3 dimensions, any boundary.

Global mixing is a spectral convolution along each axis in turn, summed (factorised Fourier operator, Tran et
al. 2023, arXiv 2111.13802; Fourier modes if periodic, cosine modes if not), in three dimensions one along all
axes together, of fewer modes (Fourier neural operator, Li et al. 2021, arXiv 2010.08895): error of a minute
of cfd3d 0.17 for the sum's 0.75. In two dimensions a model's kind says which: it depends on the equation
(docs/lab/log.md). Local mixing is a depthwise convolution along each axis, and a gated MLP (Shazeer 2020,
arXiv 2002.05202) mixes channels.
AdaLN-zero (Peebles and Xie 2023, arXiv 2212.09748) brings in task, parameters, time step and boundary.

What mixes tokens along axes is shared by the tasks; what is done at a token, the MLP and the modulation, and
mixing along all axes together are each task's own: error of one model of eleven tasks over eleven models' at
equal time 0.96, all shared 1.24 (docs/lab/measurements.md). Flat, without token merging or attention: at
equal time spectral mixing on one level measured better than a U-shape with attention on every task tried.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ups.common.boundary import DIRICHLET, PERIODIC, along
from ups.common.spectral import box, box_rows, cosine, fourier_pairs
from ups.config import ModelConfig
from ups.tasks import Task, described_task

ANY = "any"  # of a network of one task that needs no name
PLANE, VOLUME = 2, 3
BOX = {PLANE: 8, VOLUME: 3}  # most modes along an axis where all are mixed together; 4 in 3D are no better
Ends = tuple[str, ...]  # the boundary of each axis of a task


def task_of(name: str) -> str | None:
    """The task whose own a parameter or buffer of a network is, by its name; None for what tasks share."""
    parts = name.split(".")
    return next(
        (after for part, after in zip(parts, parts[1:], strict=False) if part in ("heads", "own")), None
    )


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
            h = x.movedim(axis, 0)  # (n, *others, width)
            basis = self._basis(len(h), end == PERIODIC, x)  # (1 or 2, modes, n)
            modes, width, flat = basis.shape[1], h.shape[-1], basis.flatten(0, 1)
            hat = (flat @ h.flatten(1)).view(-1, modes, h[0].numel() // width, width)
            hat = convolved(hat, self.weight[0, :modes], self.weight[1, :modes])
            total = total + (flat.mT @ hat.flatten(1)).view(h.shape).movedim(0, axis)
        return total


def convolved(hat: Tensor, real: Tensor, imag: Tensor) -> Tensor:
    """W x_hat, mode by mode: hat (2, modes, rows, width), x_hat = c - i s, or (1, ..), c alone, to that
    of (2 or 1 times modes, rows, width)."""
    c, s = hat[0], hat[-1]  # W x_hat has the cosine part Wr c + Wi s and the sine part Wr s - Wi c
    return c @ real if len(hat) == 1 else torch.cat([c @ real + s @ imag, s @ real - c @ imag])


class BoxMixing(nn.Module):
    """A convolution along all axes together, diagonal in its low modes: y_k = W_k x_k over the wave vectors k
    of `ups.common.spectral.box`; weight (2, K, width, width), real and imaginary part, those of a task with
    these ends."""

    def __init__(self, width: int, modes: int, ends: Ends):
        super().__init__()
        self.ends, self.k = ends, box(ends, modes)
        self.weight = nn.Parameter(torch.randn(2, len(self.k), width, width) / width)
        self._kept: dict[tuple, tuple[Tensor, Tensor | None]] = {}

    def _rows(self, tokens: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(rows of those waves that the tokens hold, which these are; None: all)."""
        key = (*tokens, like.device)
        if key not in self._kept:
            most = [
                (n - 1) // 2 if end == PERIODIC else n - 1 for n, end in zip(tokens, self.ends, strict=True)
            ]
            kept = [
                number
                for number, k in enumerate(self.k)
                if all(abs(wave) <= limit for wave, limit in zip(k, most, strict=True))
            ]
            rows = box_rows([self.k[number] for number in kept], tokens, self.ends).float().to(like.device)
            is_all = len(kept) == len(self.k)
            self._kept[key] = rows, None if is_all else torch.tensor(kept, device=like.device)
        return self._kept[key]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *tokens, width) to the same shape."""
        batch, *tokens, width = x.shape
        rows, kept = self._rows(tokens, x)
        weight = self.weight if kept is None else self.weight[:, kept]
        flat = rows.flatten(0, 1).expand(batch, -1, -1)
        hat = flat.bmm(x.flatten(1, -2)).view(batch, *rows.shape[:2], width).permute(1, 2, 0, 3)
        hat = convolved(hat, *weight.unbind(0)).transpose(0, 1)  # (batch, 1 or 2 times K, width)
        return flat.mT.bmm(hat).view(x.shape)


class LocalMixing(nn.Module):
    """Sum over axes of a depthwise convolution along that axis; weight (width, 1, kernel), shared by the
    axes."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.side = kernel_size // 2
        self.weight = nn.Parameter(torch.randn(width, 1, kernel_size) / kernel_size)

    def forward(self, x: Tensor, boundary: str) -> Tensor:
        # along every axis the convolution of channels-last images, views of x: on a CPU five times as fast as
        # of lines, and twice as of volumes
        batch, *tokens, width = x.shape
        side, weight, total = self.side, self.weight.to(x.dtype), 0.0
        for axis, end in reversed([*enumerate(along(boundary, len(tokens)))]):
            before, after = math.prod(tokens[:axis]), math.prod(tokens[axis + 1 :])
            is_last = axis == len(tokens) - 1  # images (num, before, n, width), else (num, n, after, width)
            h = x.reshape((batch, before, -1, width) if is_last else (batch * before, -1, after, width))
            if end == PERIODIC:  # in a third of the time of nn.functional.pad
                n, along_n = tokens[axis], 1 + is_last
                h = torch.cat([h.narrow(along_n, n - side, side), h, h.narrow(along_n, 0, side)], along_n)
                h = h.movedim(-1, 1)
            else:
                pads = (side, side, 0, 0) if is_last else (0, 0, side, side)
                mode = "constant" if end == DIRICHLET else "replicate"
                h = nn.functional.pad(h.movedim(-1, 1), pads, mode=mode)
            kernel = weight[:, :, None] if is_last else weight[..., None]
            total = total + nn.functional.conv2d(h, kernel, groups=width).movedim(1, -1).reshape(x.shape)
        return total


class Pointwise(nn.Module):
    """What a block does at a token: a gated MLP, and `told` vectors of the condition, such as shifts and
    gates."""

    def __init__(self, width: int, mlp_ratio: float, told: int = 6):
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.modulation = zero_linear(width, told * width)
        self.for_muon()

    def for_muon(self) -> None:
        """Say so of the hidden matrices, which a copy forgets (ups/training/optim.py)."""
        self.up.weight.is_hidden_matrix = self.down.weight.is_hidden_matrix = True

    def forward(self, h: Tensor) -> Tensor:
        gate, value = self.up(h).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)


class Block(nn.Module):
    """x += gate * mixing(norm x), then x += gate * MLP(norm x + local), gates and shifts set by the
    condition; mixing along axes is shared, the rest is each task's own, where it is pointwise begins as the
    first's. joint: the dimensions from which on all axes are mixed together."""

    def __init__(
        self,
        width: int,
        modes: int,
        kernel_size: int,
        mlp_ratio: float,
        tasks: Mapping[str, Ends],
        joint: int = VOLUME,
    ):
        super().__init__()
        is_shared = any(len(ends) < joint for ends in tasks.values())
        self.spectral = SpectralMixing(width, modes) if is_shared else None
        self.local = LocalMixing(width, kernel_size)
        first = Pointwise(width, mlp_ratio)
        self.own = nn.ModuleDict({task: copy.deepcopy(first) for task in tasks})
        for task, own in self.own.items():
            own.for_muon()
            ends = tasks[task]
            own.mixing = BoxMixing(width, min(modes, BOX[len(ends)]), ends) if len(ends) >= joint else None

    def forward(self, x: Tensor, condition: Tensor, boundary: str, task: str = ANY) -> Tensor:
        own, shape = self.own[task], (x.shape[0], *[1] * (x.ndim - 2), -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            m.view(shape) for m in own.modulation(condition).chunk(6, -1)
        )
        h = nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        x = x + gate1 * (own.mixing(h) if own.mixing is not None else self.spectral(h, boundary))
        h = nn.functional.rms_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * own(h + self.local(h, boundary))


class FlatBackbone(nn.Module):
    """Blocks over tokens, all on one level: x (batch, *tokens, width), a condition (batch, width), a boundary
    and one of its tasks to (batch, *tokens, width).

    tasks: of each the boundary of each axis; joint: as of a block.
    """

    def __init__(self, model: ModelConfig, tasks: Mapping[str, Ends], joint: int = VOLUME):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(model.width, model.modes, model.kernel_size, model.mlp_ratio, tasks, joint)
            for _ in range(model.depth)
        )

    def forward(self, x: Tensor, condition: Tensor, boundary: str, task: str = ANY) -> Tensor:
        for block in self.blocks:
            x = block(x, condition, boundary, task)
        return nn.functional.rms_norm(x, x.shape[-1:])


class LocalBackbone(nn.Module):
    """Blocks without global mixing, for one task: a small head on what another backbone has mixed so. They
    have half of a block's MLP, and of the condition a shift: a sixteenth of the weights of a network that
    draws, for it is called once where a student is."""

    def __init__(self, model: ModelConfig, depth: int):
        super().__init__()
        self.local = nn.ModuleList(LocalMixing(model.width, model.kernel_size) for _ in range(depth))
        self.points = nn.ModuleList(Pointwise(model.width, model.mlp_ratio / 2, 1) for _ in range(depth))
        for point in self.points:  # begins as if it were not there
            nn.init.zeros_(point.down.weight)

    def forward(self, x: Tensor, condition: Tensor, boundary: str) -> Tensor:
        """As FlatBackbone."""
        for local, point in zip(self.local, self.points, strict=True):
            h = nn.functional.rms_norm(x, x.shape[-1:])
            h = h + point.modulation(condition).view(x.shape[0], *[1] * (x.ndim - 2), -1)
            x = x + point(h + local(h, boundary))
        return nn.functional.rms_norm(x, x.shape[-1:])


# Every kind is made from a ModelConfig and the ends of tasks, and called as FlatBackbone is.
BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "flat": FlatBackbone,
    "box": partial(FlatBackbone, joint=PLANE),
}


def backbone_of(model: ModelConfig, task: Task) -> nn.Module:
    """A backbone for one task that needs no name."""
    return BACKBONES[model.kind](model, {ANY: along(task.boundary, task.ndim)})


class TaskNetwork(nn.Module):
    """A backbone for tasks that each have a head, an embedding and a name: the operator, a corrector.

    A parameter that is a task's own says so: parameter.task (ups/training/optim.py).

    description (JSON-able): model (ModelConfig's keys), precision ("no" or "bf16", inside the backbone),
    tasks (what `head` makes their heads from, with a name each). Whoever loads one fills it by a state_dict.
    """

    def __init__(self, description: dict[str, Any], head: Callable[[dict[str, Any], ModelConfig], nn.Module]):
        super().__init__()
        model, tasks = ModelConfig(**description["model"]), description["tasks"]
        self.description, self.precision, self.width = description, description["precision"], model.width
        self.names = [task["name"] for task in tasks]
        self.heads = nn.ModuleDict({task["name"]: head(task, model) for task in tasks})
        self.backbone = BACKBONES[model.kind](
            model, {task.name: along(task.boundary, task.ndim) for task in map(described_task, tasks)}
        )
        self.task_embedding = nn.Parameter(torch.randn(len(tasks), model.width) * 0.02)
        for name, parameter in self.named_parameters():
            if (task := task_of(name)) is not None:
                parameter.task = task
