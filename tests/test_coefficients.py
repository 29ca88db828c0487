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
    is_kept = WAVES.abs() < 2 * math.pi * (most + 0.5) / N
    for axis in range(1, 1 + ndim):
        u_hat = (u_hat.movedim(axis, -1) * is_kept).movedim(-1, axis)
    u = torch.fft.ifftn(u_hat, dim=tuple(range(1, 1 + ndim))).real
    return u / u.flatten(1).std(1).view(-1, *[1] * ndim)


def parameters(values: Tensor) -> ParameterBatch:
    """Of one parameter (rows, 1), or of none (rows, 0)."""
    return ParameterBatch(values.log().float(), torch.zeros(len(values), dtype=torch.long), values.float())


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
    velocity = 3.5 / 47 * (29 * torch.arange(48).double() % 48) - 1.5
    s = exact(fields(48, 1, 0), -1j * WAVES * velocity[:, None], 20)
    base, none = made(1, "carried"), parameters(torch.ones(48, 0))
    assert base.learn(s[:32, :5], none.rows(slice(32)))
    assert error(base, s[32:], 4, none.rows(slice(16))) < 0.004
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
    """Of logistic growth near its end, where three of 1, u, u^2 and u^3 nearly give the fourth."""

    def grown(u: Tensor, rate: Tensor, times: Tensor) -> Tensor:
        e, u = (rate[..., None] * times[:, None]).exp(), 0.5 + 0.4 * u[:, None] / u.abs().max()
        return (u * e / (1 - u + u * e))[:, :, None].float()

    rate, beyond = torch.linspace(0.07, 0.14, 48).double()[:, None], torch.full((8, 1), 0.2).double()
    base, times = made(1, "constant", num_parameters=1), torch.arange(20.0)
    assert base.learn(grown(fields(48, 1, 3), rate, times[10:15]), parameters(rate))
    assert error(base, grown(fields(8, 1, 4), beyond, times), 1, parameters(beyond)) < 2e-6


def test_finer_derivatives_show_the_error_of_waves_that_training_lacked_and_the_same_base_does_not():
    """Of transport, exact: base and refit agree on waves that neither saw, and both are wrong."""
    speed, times = 0.4 * torch.ones(48, 1).double(), 6
    none = parameters(torch.ones(48, 0))
    base, twin = made(1, "constant"), made(1, "constant")
    for one, rows in ((base, slice(48)), (twin, slice(0, 48, 2))):
        s = exact(fields(48, 1, 6)[rows], -1j * WAVES * speed[rows], times)
        assert one.learn(s, none.rows(rows))
    settings = {
        "num_channels": 1,
        "num_parameters": 0,
        "space": [N],
        "boundary": "periodic",
        "lengths": [float(N)],
    }
    refined = base.refined(settings)
    assert refined.equation.num_steps == 2 * base.equation.num_steps and refined.std.dtype == torch.float64

    def wrong(most: int) -> list[float]:
        """The error of a frame by the base, and its differences from the refined base and from the twin."""
        s = exact(fields(16, 1, 7, most), -1j * WAVES * speed[:16], 2)
        frames = [one(s[:, :1], none.rows(slice(16))) for one in (base, refined, twin)]
        return [float((frames[0] - other).norm() / s.norm()) for other in (s[:, 1], *frames[1:])]

    (known, _, _), (error, shown, fake) = wrong(3), wrong(6)
    assert error > 10 * known and error / 2 < shown < 2 * error and fake < error / 10


def test_the_coefficients_are_read_once_and_a_law_that_is_unknown_is_refused():
    base, s = made(1, "constant"), fields(2, 1, 5)[:, None, None].float().expand(-1, 3, -1, -1)
    batch = base.settled(s, parameters(torch.ones(2, 0)))
    assert batch.hidden.shape == (2, base.size)
    assert base.settled(s, batch) is batch and base.settled(s[:, :1], batch) is batch
    with pytest.raises(ValueError, match="law 'none'; expected one of carried, constant"):
        made(1, "none")
