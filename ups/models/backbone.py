"""The network shared by all tasks: token grids of 1, 2 or 3 dimensions, any boundary.

Global mixing is a sum of spectral convolutions along each axis (factorised Fourier operator, Tran et al.
2023, arXiv 2111.13802; Fourier modes if periodic, cosine modes if not). In three dimensions it is one
convolution along all axes together, with fewer modes (Fourier neural operator, Li et al. 2021, arXiv
2010.08895): after a minute on cfd3d the error is 0.17 instead of 0.75. In two dimensions the kind of the
model decides, as the better one depends on the equation (docs/lab/log.md). Local mixing is a depthwise
convolution along each axis. A gated MLP (Shazeer 2020, arXiv 2002.05202) mixes channels. AdaLN-zero (Peebles
and Xie 2023, arXiv 2212.09748) conditions on task, parameters, time step and boundary.

Tasks share the mixing along single axes. MLP, modulation and mixing along all axes together are private to
each task: one model of eleven tasks then has 0.96 times the error of eleven models at equal time, with all
weights shared 1.24 times (docs/lab/measurements.md). There is no token merging or attention: at equal time,
spectral mixing on one level was better than a U-shape with attention on every task tried.

Contract of a backbone (a row of BACKBONES, and of `kind` in ups/config):

- It is built from (ModelConfig, task -> boundary of each axis). It is called with (x (batch, *tokens, width),
  condition (batch, width), boundary, task) and returns the shape of x.
- Its repeated layer is a class named `Block` in a ModuleList: accelerate_configs/fsdp.yaml shards by that
  name.
- Private weights of a task are below a ModuleDict named `own`, with the task as key; shared ones are not.
  `task_of` reads the task from that name; optimizer, gradient reduction and warm start depend on it.
- Modules whose shape depends on dimensions or boundaries are named `mixing` (private) or `spectral` (shared):
  a warm start (warm.py) copies them only between equal shapes.
- Hidden matrices for Muon have the attribute `is_hidden_matrix` (ups/training/optim.py). A deep copy loses
  it.
- A block starts as the identity: its modulation is zero (`zero_linear`).
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

ANY = "any"  # the task of a network with a single unnamed task
PLANE, VOLUME = 2, 3
BOX = {PLANE: 8, VOLUME: 3}  # most modes per axis in mixing along all axes; 4 in 3D are no better
Ends = tuple[str, ...]  # the boundary of each axis of a task


def task_of(name: str) -> str | None:
    """The task that a parameter or buffer with this name is private to; None if it is shared."""
    names = name.split(".")
    return next(
        (after for before, after in zip(names, names[1:], strict=False) if before in ("heads", "own")), None
    )


def zero_linear(size: int, width: int) -> nn.Linear:
    """A linear layer of zeros: its output has no effect at the start of training."""
    layer = nn.Linear(size, width)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SpectralMixing(nn.Module):
    """Sum over axes of a spectral convolution along each: y_k = W_k x_k for the low modes k, complex if
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
    """W x_hat of every mode (2 or 1 times modes, rows, width), from hat (2, modes, rows, width) with x_hat =
    c - i s, or (1, modes, rows, width) with c alone.
    """
    c, s = hat[0], hat[-1]  # W x_hat has the cosine part Wr c + Wi s and the sine part Wr s - Wi c
    return c @ real if len(hat) == 1 else torch.cat([c @ real + s @ imag, s @ real - c @ imag])


class BoxMixing(nn.Module):
    """A spectral convolution along all axes together: y_k = W_k x_k for the wave vectors k of
    `ups.common.spectral.box`.

    weight: (2, K, width, width), real and imaginary part. ends: the boundary of each axis.
    """

    def __init__(self, width: int, modes: int, ends: Ends):
        super().__init__()
        self.ends, self.k = ends, box(ends, modes)
        self.weight = nn.Parameter(torch.randn(2, len(self.k), width, width) / width)
        self._kept: dict[tuple, tuple[Tensor, Tensor | None]] = {}

    def _rows(self, tokens: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(basis rows of the waves that the token grid resolves, their numbers or None if these are all)."""
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
    """Sum over axes of a depthwise convolution along each; weight (width, 1, kernel), shared by the axes."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__()
        self.side = kernel_size // 2
        self.weight = nn.Parameter(torch.randn(width, 1, kernel_size) / kernel_size)

    def forward(self, x: Tensor, boundary: str) -> Tensor:
        # a convolution of channels-last images (views of x) along each axis: on a CPU five times as fast as
        # one of lines, and twice as fast as one of volumes
        batch, *tokens, width = x.shape
        side, weight, total = self.side, self.weight.to(x.dtype), 0.0
        for axis, end in reversed([*enumerate(along(boundary, len(tokens)))]):
            before, after = math.prod(tokens[:axis]), math.prod(tokens[axis + 1 :])
            is_last = axis == len(tokens) - 1  # images (num, before, n, width), else (num, n, after, width)
            h = x.reshape((batch, before, -1, width) if is_last else (batch * before, -1, after, width))
            if end == PERIODIC:  # three times as fast as nn.functional.pad
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
    """The pointwise layers of a block: a gated MLP, and a linear map of the condition to `num_modulations`
    vectors (shifts, scales, gates).
    """

    def __init__(self, width: int, mlp_ratio: float, num_modulations: int = 6):
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.modulation = zero_linear(width, num_modulations * width)
        self.mark_hidden_matrices()

    def mark_hidden_matrices(self) -> None:
        """Mark the matrices that Muon optimizes (ups/training/optim.py); a copy loses the mark."""
        self.up.weight.is_hidden_matrix = self.down.weight.is_hidden_matrix = True

    def forward(self, h: Tensor) -> Tensor:
        gate, value = self.up(h).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)


class Block(nn.Module):
    """x += gate * mixing(norm x), then x += gate * MLP(norm x + local), with gates, scales and shifts from
    the condition.

    Mixing along single axes is shared, the rest is private to each task; the pointwise layers of all tasks
    start with equal weights. joint: the number of dimensions from which all axes are mixed together.
    """

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
            own.mark_hidden_matrices()
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
    """Blocks on one level, from x (batch, *tokens, width) to the same shape.

    tasks: task -> boundary of each axis. joint: as in `Block`.
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
    """Blocks without global mixing for one task, on the output of another backbone. With half of a block's
    MLP and shifts as the only modulation, they have a sixteenth of the weights of a sampling network: they
    are called once per sample.
    """

    def __init__(self, model: ModelConfig, depth: int):
        super().__init__()
        self.local = nn.ModuleList(LocalMixing(model.width, model.kernel_size) for _ in range(depth))
        self.points = nn.ModuleList(Pointwise(model.width, model.mlp_ratio / 2, 1) for _ in range(depth))
        for point in self.points:  # no effect at the start
            nn.init.zeros_(point.down.weight)

    def forward(self, x: Tensor, condition: Tensor, boundary: str) -> Tensor:
        """As FlatBackbone."""
        for local, point in zip(self.local, self.points, strict=True):
            h = nn.functional.rms_norm(x, x.shape[-1:])
            h = h + point.modulation(condition).view(x.shape[0], *[1] * (x.ndim - 2), -1)
            x = x + point(h + local(h, boundary))
        return nn.functional.rms_norm(x, x.shape[-1:])


# kind -> backbone, see the contract above
BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "flat": FlatBackbone,
    "box": partial(FlatBackbone, joint=PLANE),
}


def backbone_of(model: ModelConfig, task: Task) -> nn.Module:
    """A backbone for a single unnamed task."""
    return BACKBONES[model.kind](model, {ANY: along(task.boundary, task.ndim)})


class TaskNetwork(nn.Module):
    """A backbone with a head and an embedding per task: the operator, a corrector.

    A private parameter of a task has the attribute `task` (ups/training/optim.py).

    description (JSON-able): model (keys of ModelConfig), precision ("no" or "bf16", inside the backbone),
    tasks (the descriptions of the heads, each with a name). The weights are loaded by a state_dict.
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
