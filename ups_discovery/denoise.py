"""Films without most of their white noise, by Wiener's filter in space and time."""

import numpy as np
import torch
from torch import Tensor

from ups_discovery.boundary import along
from ups_discovery.spectral import FieldTransform

LOUD = 3.0  # times the power of the noise: what rises above it


def smooth_basis(n: int) -> Tensor:
    """Orthonormal rows (n, n), float64, smooth ones first: the eigenvectors of squared third differences.
    These vanish for three of them, which are taken as polynomials of rising degree, because a solver returns
    any mixture of the three, a different one on each processor."""
    order = min(3, n - 1)
    third = torch.from_numpy(np.diff(np.eye(n), order, axis=0))
    found = torch.linalg.eigh(third.mT @ third).eigenvectors
    powers = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None] ** torch.arange(order)
    return torch.linalg.qr(torch.cat([powers, found[:, order:]], 1)).Q.mT


class Film:
    """The modes of films of one shape (rows, time, C, *space), and their denoising."""

    def __init__(self, num_frames: int, space: tuple[int, ...], boundary: str):
        self.in_time, self.transform = smooth_basis(num_frames), FieldTransform(space, boundary)
        self.ends = along(boundary, len(space))

    def modes(self, s: Tensor) -> Tensor:
        """(rows, time, C, *wave numbers)."""
        s_hat = self.transform(s)
        s_hat = torch.einsum("jt,rtcm->rjcm", self.in_time.to(s_hat.dtype), s_hat)
        return s_hat.unflatten(-1, self.transform.shape)

    def power(self, s_hat: Tensor) -> Tensor:
        """The mean square (time, C, *wave numbers) of modes, averaged with the neighbours."""
        power = s_hat.abs().square().mean(0)
        for axis in (0, *range(2, power.ndim)):
            ends = power.narrow(axis, 0, 1), power.narrow(axis, power.shape[axis] - 1, 1)
            wide = torch.cat([ends[0], power, ends[1]], axis)
            power = sum(wide.narrow(axis, shift, power.shape[axis]) for shift in range(3)) / 3
        return power

    def denoised(self, s: Tensor, sigma: Tensor) -> Tensor:
        """s (rows, time, C, *space) without most of its white noise of standard deviation sigma (C,), by
        Wiener's filter of all modes."""
        return self.filtered(s, self.gain(s, sigma))

    def gain(self, s: Tensor, sigma: Tensor) -> Tensor:
        """Wiener's filter (time, C, *wave numbers)."""
        power, noise = self.power(self.modes(s)), sigma.square().view(-1, *[1] * (s.ndim - 3))
        return torch.where(power > LOUD * noise, 1 - noise / power, 0.0)

    def filtered(self, s: Tensor, gain: Tensor) -> Tensor:
        """s (rows, time, C, *space) with all modes times `gain`."""
        s_hat = self.modes(s) * gain
        s_hat = torch.einsum("jt,rjcm->rtcm", self.in_time.to(s_hat.dtype), s_hat.flatten(3))
        return self.transform.inverse(s_hat)
