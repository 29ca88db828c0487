"""The transport base: a kernel that moves and mixes values, fitted by Levenberg-Marquardt steps.

It stays beside the equation base because it serves parameter values that it was not fitted on, and fronts
that the grid does not resolve: on Burgers' equation with nu 0.001 its validation error is 0.02 to the
equation's 0.5 (docs/lab/log.md).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ups.models.bases.base import Learnt, ParameterBatch
from ups_discovery.boundary import PERIODIC, along


class Transport(Learnt):
    """u_next(x) = sum_k softmax_k( S(x + k) - S(x) + drift k - k^2 / (2 width^2) ) u(x + k), axis by axis,
    |k| <= reach.

    S is the running sum along the axis of a rate, which a short stencil computes from the field. The kernel
    is positive and has unit mass: it moves and mixes values and never leaves their range. A constant rate
    gives transport and diffusion. A rate proportional to u gives the heat-kernel average weighted by exp(-int
    u / 2 nu), which is the Cole-Hopf solution of Burgers' equation (Hopf 1950, Cole 1951), so shocks form.
    Rate, drift and width depend on the parameters through affine functions of their logarithms. The
    construction is ours.
    """

    kind, BATCH = "transport", 16
    TAPS = 5
    RATE_SCALE = 10.0  # of the stored potential, which is then as large as the width

    def __init__(
        self,
        num_parameters: int,
        num_channels: int,
        space: tuple[int, ...],
        boundary: str,
        reach: int,
        **_: Any,
    ):
        super().__init__()
        if not 0 < reach <= max(space):
            raise ValueError(
                f"transport reaches {reach} cells of a grid {tuple(space)}; expected no more "
                f"than the grid. Train it again."
            )
        self.ndim, self.reach, self.ends = len(space), reach, along(boundary, len(space))
        self.stencil = nn.Parameter(torch.zeros(self.ndim, num_channels, self.TAPS))
        self.log_amplitude = nn.Parameter(torch.zeros(self.ndim, num_parameters))
        self.drift = nn.Parameter(torch.zeros(self.ndim, 1 + num_parameters))
        width = torch.zeros(self.ndim, 1 + num_parameters)
        width[:, 0] = math.log(reach / 8)
        self.log_width = nn.Parameter(width)

    @staticmethod
    def _pad(u: Tensor, cells: int, end: str) -> Tensor:
        """u (batch, channel, n) extended along the last axis: periodic, or an even mirror."""
        if end == PERIODIC:
            return torch.cat([u[..., -cells:], u, u[..., :cells]], -1)
        return torch.cat([u[..., :cells].flip(-1), u, u[..., -cells:].flip(-1)], -1)

    def _along_last(self, u: Tensor, parameters: Tensor, axis: int) -> Tensor:
        """One pass along the last axis: u (batch, C, n), parameters (batch, P)."""
        n, reach, side, end = u.shape[-1], self.reach, self.TAPS // 2, self.ends[axis]
        rate = (
            nn.functional.conv1d(self._pad(u, side, end), self.stencil[axis][None])[:, 0]
            * self.RATE_SCALE
            / reach
        )
        rate = rate * torch.exp(parameters @ self.log_amplitude[axis])[:, None]
        rate = self._pad(rate[:, None], reach, end)[:, 0]
        potential = rate.cumsum(-1) - rate / 2
        k = torch.arange(-reach, reach + 1, device=u.device, dtype=u.dtype)
        drift = self.drift[axis, 0] + parameters @ self.drift[axis, 1:]
        width = torch.exp(self.log_width[axis, 0] + parameters @ self.log_width[axis, 1:])
        bias = drift[:, None] * k - 0.5 * (k / width[:, None]) ** 2
        logits = (
            potential.unfold(-1, 2 * reach + 1, 1) - potential[:, reach : reach + n, None] + bias[:, None]
        )
        kernel = logits.softmax(-1)  # batch, n, 2 reach + 1
        return torch.einsum("bnk,bcnk->bcn", kernel, self._pad(u, reach, end).unfold(-1, 2 * reach + 1, 1))

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        u, standard = u[:, -1].float(), parameters.standard.float()
        for axis in range(self.ndim):
            moved = u.movedim((1, 2 + axis), (-2, -1))
            lines = moved.flatten(0, -3)  # other axes joined to the batch: (batch * lines, C, n)
            out = self._along_last(lines, standard.repeat_interleave(lines.shape[0] // u.shape[0], 0), axis)
            u = out.view(moved.shape).movedim((-2, -1), (1, 2 + axis))
        return u
