"""The base of hidden coefficients (ups/models/bases/coefficients.py) on solutions whose coefficients are
known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ups.models.bases.base import ParameterBatch
from ups.models.bases.coefficients import Coefficients

N = 32
WAVES = 2 * math.pi * torch.fft.fftfreq(N, 1 / N, dtype=torch.float64) / N


def fields(num: int, ndim: int, seed: int, most: int = 3) -> Tensor:
    """Random fields (num, *space) of waves up to `most`, of variance 1."""
    u_hat = torch.fft.fftn(
        torch.randn(num, *[N] * ndim, generator=torch.Generator().manual_seed(seed)).double(),
        dim=tuple(range(1, 1 + ndim)),
    )
    for axis in range(1, 1 + ndim):
        shape = [1] * (1 + ndim)
        shape[axis] = N
        u_hat = u_hat * (WAVES.abs() < 2 * math.pi * (most + 0.5) / N).view(shape)
    u = torch.fft.ifftn(u_hat, dim=tuple(range(1, 1 + ndim))).real
    return u / u.flatten(1).std(1).view(-1, *[1] * ndim)


def parameters(values: Tensor) -> ParameterBatch:
    """Of one parameter (rows, 1), or of none (rows, 0)."""
    index = torch.zeros(len(values), dtype=torch.long)
    return ParameterBatch(values.log().float(), index, values.float())


def made(ndim: int, law: str, waves: int = 0, num_parameters: int = 0) -> Coefficients:
    return Coefficients(1, num_parameters, [N] * ndim, "periodic", [float(N)] * ndim, law=law, waves=waves)


def exact(u: Tensor, rates: Tensor, num_frames: int) -> Tensor:
    """Frames (rows, time, 1, N) of u_hat_t = rates(rows, N) u_hat."""
    t = torch.arange(num_frames, dtype=torch.float64).view(-1, 1)
    return torch.fft.ifft(torch.fft.fft(u)[:, None] * (rates[:, None] * t).exp()).real[:, :, None].float()


def error(base: Coefficients, s: Tensor, given: int, batch: ParameterBatch) -> float:
    """Relative error of a forecast of the frames of s after those that are given."""
    batch, u, frames = base.settled(s[:, :given], batch), s[:, given - 1 : given], []
    for _ in range(s.shape[1] - given):
        u = base(u, batch)[:, None]
        frames.append(u)
    return float((torch.cat(frames, 1) - s[:, given:]).norm() / s[:, given:].norm())


def test_a_hidden_velocity_is_read_from_four_frames():
    velocity = torch.linspace(-1.5, 2, 48, dtype=torch.float64)
    velocity = velocity[torch.randperm(48, generator=torch.Generator().manual_seed(0))]
    s = exact(fields(48, 1, 0), -1j * WAVES * velocity[:, None], 20)
    base, none = made(1, "carried"), parameters(torch.ones(48, 0))
    assert base.learn(s[:32, :5], none.rows(slice(32)))
    assert error(base, s[32:], 4, none.rows(slice(16))) < 0.02
    assert error(base, s[32:], 1, none.rows(slice(16))) > 0.5  # of one frame nothing is known


def test_a_hidden_flow_of_few_waves_is_read_from_four_frames():
    num, ends = 40, (1, 2)
    psi, u = fields(num, 2, 1, 1), fields(num, 2, 2)
    along = [1j * WAVES[:, None], 1j * WAVES[None]]

    def slope(u: Tensor, axis: int) -> Tensor:
        return torch.fft.ifftn(along[axis] * torch.fft.fftn(u, dim=ends), dim=ends).real

    flow = torch.stack([slope(psi, 1), -slope(psi, 0)])
    flow = 0.5 * flow / flow.square().mean().sqrt()

    def rate(u: Tensor) -> Tensor:
        bend = slope(slope(u, 0), 0) + slope(slope(u, 1), 1)
        return 0.1 * bend - flow[0] * slope(u, 0) - flow[1] * slope(u, 1)

    frames = [u]
    for step in range(1, 8 * 12 + 1):
        a = rate(u)
        b = rate(u + a / 16)
        c = rate(u + b / 16)
        u = u + (a + 2 * b + 2 * c + rate(u + c / 8)) / 48
        frames += [u] if step % 8 == 0 else []
    s, none = torch.stack(frames, 1)[:, :, None].float(), parameters(torch.ones(num, 0))
    base = made(2, "carried", 3)
    assert base.learn(s[:32, :5], none.rows(slice(32)))
    assert error(base, s[32:], 4, none.rows(slice(8))) < 0.1
    still = (s[32:, 3:4] - s[32:, 4:]).norm() / s[32:, 4:].norm()
    assert still > 0.5


def test_coefficients_follow_a_parameter_to_values_of_which_no_data_were():
    diffusivity = torch.linspace(0.2, 0.5, 48, dtype=torch.float64)
    s = exact(fields(48, 1, 3), -WAVES.square() * diffusivity[:, None], 6)
    base = made(1, "constant", num_parameters=1)
    assert base.learn(s[:, :5], parameters(diffusivity[:, None]))
    values = torch.full((8, 1), 1.0, dtype=torch.float64)
    later = exact(fields(8, 1, 4), -WAVES.square() * values, 8)
    assert error(base, later, 1, parameters(values)) < 0.03


def test_terms_that_others_nearly_replace_are_told_apart():
    """Logistic growth, long after its start: of 1, u, u^2 and u^3 any three nearly give the fourth."""

    def grown(u: Tensor, rate: Tensor, first: int) -> Tensor:
        e = (rate[..., None] * torch.arange(first, first + 20, dtype=torch.float64).view(-1, 1)).exp()
        u = 0.5 + 0.4 * u[:, None] / u.abs().max()
        return (u * e / (1 - u + u * e))[:, :, None].float()

    rate, base = torch.linspace(0.07, 0.14, 48, dtype=torch.float64)[:, None], made(1, "constant", 0, 1)
    assert base.learn(grown(fields(48, 1, 3), rate, 10)[:, :5], parameters(rate))
    assert error(base, grown(fields(8, 1, 4), rate[20:28], 0), 1, parameters(rate[20:28])) < 1e-5


def test_the_coefficients_are_read_once_and_a_law_that_is_unknown_is_refused():
    base, s = made(1, "constant"), fields(2, 1, 5)[:, None, None].float().expand(-1, 3, -1, -1)
    batch = base.settled(s, parameters(torch.ones(2, 0)))
    assert batch.hidden.shape == (2, base.size)
    assert base.settled(s, batch) is batch and base.settled(s[:, :1], batch) is batch
    with pytest.raises(ValueError, match="law 'none'; expected one of carried, constant, growing"):
        made(1, "none")
