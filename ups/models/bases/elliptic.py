"""The elliptic base: the solution of a steady task by a linear system with learnt coefficients."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.models.bases.base import Learnt, ParameterBatch, Samples, Window
from ups_discovery.boundary import DIRICHLET, PERIODIC, along
from ups_discovery.spectral import FieldTransform
from ups_discovery.terms import comparable


class Elliptic(Learnt):
    """The steady state of a learnt diffusion: -div(A grad u) + A0 u = f, with A, A0 >= 0 and f from a(x).

    A is defined on cell faces, by a small network of the two cells beside the face (or of the cell and the
    wall); A0 and f by one of the cell. The operator is symmetric and positive by construction. So a few
    conjugate-gradient steps solve it and propagate the gradient, preconditioned by the inverse for constant
    coefficients in the basis of the boundary (Concus and Golub 1973). With about a thousand weights it cannot
    memorise the training set. The construction is ours.

    Input: normalised a as u (batch, 1, C_in, *space); output: normalised u (batch, C, *space). zero: the
    normalised value of u = 0, the value at a Dirichlet wall.
    """

    kind, BATCH = "elliptic", 8
    # Conjugate-gradient steps. Validation error of fits by gradients with 8, 16 and 24: contrast 10 (darcy2d)
    # 3.7e-3, 1.9e-3; log-normal (darcy2d_grf) 9.1e-2, 2.4e-2, 5e-3
    ITERATIONS = 32
    HIDDEN = 16
    PROBES = 16  # modes of an error that are fitted

    def __init__(
        self,
        num_parameters: int,
        num_channels: int,
        num_inputs: int,
        space: tuple[int, ...],
        boundary: str,
        lengths: Sequence[float] = (),
        cell: Sequence[float] = (),
        **_: Any,
    ):
        super().__init__()
        self.ndim, self.num_channels, self.ends = len(space), num_channels, along(boundary, len(space))
        hidden = self.HIDDEN
        self.face = nn.Sequential(
            nn.Linear(2 * num_inputs + 2, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, num_channels),
        )
        self.cell = nn.Sequential(
            nn.Linear(num_inputs, hidden), nn.GELU(), nn.Linear(hidden, 2 * num_channels)
        )
        self.log_source = nn.Parameter(torch.zeros(num_parameters))
        self.register_buffer("zero", torch.zeros(num_channels))
        self.register_buffer("gain", torch.ones(num_channels))
        lengths = comparable(lengths or [1.0] * len(space), cell)  # equal if not given
        h2 = [(n * lengths[0] / length) ** 2 for n, length in zip(space, lengths, strict=True)]
        self.num_cells, self.mean_square = space[0], sum(h2) / len(h2)
        self.transform, total = FieldTransform(space, boundary), torch.zeros((), dtype=torch.float64)
        for n, num_modes, square, end in zip(space, self.transform.shape, h2, self.ends, strict=True):
            k = torch.arange(num_modes, dtype=torch.float64)
            wave = 2 * k if end == PERIODIC else k + (end == DIRICHLET)
            total = total[..., None] + (2 - 2 * torch.cos(math.pi * wave / n)) * (square / self.mean_square)
        inverse = 1 / total.clamp_min(float(total[total > 0].min()) / 4)
        self.register_buffer("inverse", inverse.flatten().float(), persistent=False)
        self.scales = [value / self.mean_square for value in h2]

    def _precondition(self, r: Tensor) -> Tensor:
        return self.transform.inverse(self.transform.forward(r) * self.inverse)

    @staticmethod
    def _beyond(x: Tensor, axis: int, end: str, mirror: float) -> tuple[Tensor, Tensor]:
        """The cells before the first and after the last one of an axis with boundary `end`; beyond a wall
        lies the cell before it, times `mirror`.
        """
        first, last = x.narrow(axis, 0, 1), x.narrow(axis, x.shape[axis] - 1, 1)
        return (last, first) if end == PERIODIC else (mirror * first, mirror * last)

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return self._solve(*self.system(u, parameters)) + self.zero.view(-1, *[1] * self.ndim)

    def system(self, u: Tensor, parameters: ParameterBatch) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The operator, of x (..., batch, C, *space), and the source (batch, C, *space)."""
        a = u[:, 0].float().movedim(1, -1)  # batch, *space, C_in
        marked = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        faces = []
        for axis, end in enumerate(self.ends, 1):
            before, after = self._beyond(marked, axis, end, 0.0)
            left, right = torch.cat([before, marked], axis), torch.cat([marked, after], axis)
            value = self.face(torch.cat([left, right], -1)) + self.face(torch.cat([right, left], -1))
            faces.append(value.exp().movedim(-1, 1) * self.scales[axis - 1])
        source, reaction = self.cell(a).movedim(-1, 1).chunk(2, 1)
        scale = torch.exp(parameters.standard.float() @ self.log_source).view(-1, *[1] * (self.ndim + 1))
        source = (1 + source) * scale * self.gain.view(-1, *[1] * self.ndim) / self.num_cells**2
        reaction = nn.functional.softplus(reaction - 8) / self.num_cells**2  # starts near zero

        def operator(x: Tensor) -> Tensor:
            y = reaction * x
            for axis, (end, face) in enumerate(zip(self.ends, faces, strict=True), -self.ndim):
                before, after = self._beyond(x, axis, end, -1.0 if end == DIRICHLET else 1.0)
                y = y - (x.diff(dim=axis, prepend=before, append=after) * face).diff(dim=axis)
            return y

        return operator, source

    def tangents(self, window: Window) -> tuple[Tensor, Tensor]:
        """See `Learnt`; numbers are products with `probes` p. As A u = f, they change by p . du = (A^-1 p) .
        (df - dA u), so each takes one more solution.
        """
        u, parameters, u_next = window
        with torch.no_grad():
            operator, source = self.system(u, parameters)
            x, probes = self._solve(operator, source), self.probes()
            adjoint = self._solve(operator, probes[:, None].expand(-1, *x.shape))
        slopes, predicted = [], x + self.zero.view(-1, *[1] * self.ndim)
        for row in (slice(row, row + 1) for row in range(len(u))):
            operator, source = self.system(u[row], parameters.rows(row))
            error, weights = source - operator(x[row]), [*self.parameters()]
            found = torch.autograd.grad(error, weights, adjoint[:, row], is_grads_batched=True)
            slopes.append(torch.cat([slope.flatten(1) for slope in found], 1))
        lacks = (u_next - predicted).flatten(1) @ probes.flatten(1).T
        return predicted, torch.cat([torch.stack(slopes), lacks[..., None]], -1)

    def probes(self) -> Tensor:
        """The PROBES modes that the preconditioner reduces least, in each channel (probes, C, *space)."""
        places = self.inverse.argsort(descending=True, stable=True)[: self.PROBES]
        waves = torch.zeros(len(places), self.inverse.numel(), device=self.inverse.device)
        waves[range(len(places)), places] = 1.0
        modes = self.transform.inverse(waves * (1 + 1j) if self.transform.is_complex else waves)
        channels = torch.eye(self.num_channels).to(modes).view(-1, self.num_channels, *[1] * self.ndim)
        return (modes[:, None, None] * channels).flatten(0, 1)

    def unit(self, u: Tensor, u_next: Tensor) -> Tensor:
        """The field itself, as the input is not a frame."""
        return u_next

    def prepare(self, samples: Samples, first: Window) -> None:
        self.zero.copy_(samples.at_zero())
        self.calibrate(*first)

    @torch.no_grad()
    def calibrate(self, u: Tensor, parameters: ParameterBatch, u_ref: Tensor) -> None:
        """Set the gain of the source by least squares, so that training starts at the right size; the
        solution is linear in it.
        """
        zero = self.zero.view(-1, *[1] * self.ndim)
        x, y = self(u, parameters) - zero, u_ref - zero
        axes = (0, *range(2, x.ndim))
        self.gain.mul_((x * y).sum(axes) / x.square().sum(axes).clamp_min(1e-12))

    def refined(self, settings: dict[str, Any]) -> "Elliptic":
        other = copy.copy(self)
        other.ITERATIONS = 3 * self.ITERATIONS // 2  # 5/4 and 2 rank the errors as well (log.md)
        return other

    def _solve(self, operator: Callable[[Tensor], Tensor], source: Tensor) -> Tensor:
        """A fixed number of preconditioned conjugate-gradient steps (Hestenes and Stiefel 1952)."""
        axes = tuple(range(-self.ndim, 0))

        def dot(x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum(axes, keepdim=True)

        tiny = torch.finfo(source.dtype).tiny ** 0.5
        x, r = torch.zeros_like(source), source
        p = z = self._precondition(r)
        rz = dot(r, z)
        for step in range(self.ITERATIONS):
            q = operator(p)
            alpha = rz / (dot(p, q) + tiny)
            x = x + alpha * p
            if step + 1 < self.ITERATIONS:
                r = r - alpha * q
                z = self._precondition(r)
                rz, before = dot(r, z), rz
                p = z + rz / (before + tiny) * p
        return x
