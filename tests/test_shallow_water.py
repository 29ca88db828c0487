"""The shallow-water solver against Stoker's dam break, its conservation laws and symmetries, and finer
runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ups_solvers import SOLVERS
from ups_solvers.shallow_water import SIDE, dam, evolve, sample_radius


def stoker(x: Tensor, t: float, high: float = 2.0, low: float = 1.0) -> Tensor:
    """Height of the one-dimensional dam break at x = 0, g = 1 (Stoker 1957): a fan, a plateau, a bore."""

    def excess(h: float) -> float:  # velocity behind the fan less velocity behind the bore
        return 2 * (math.sqrt(high) - math.sqrt(h)) - (h - low) * math.sqrt(0.5 * (h + low) / (h * low))

    below, above = low, high
    for _ in range(80):
        middle = 0.5 * (below + above)
        below, above = (middle, above) if excess(middle) > 0 else (below, middle)
    speed = 2 * (math.sqrt(high) - math.sqrt(middle))
    bore = middle * speed / (middle - low)
    fan = ((2 * math.sqrt(high) - x / t) / 3).square()
    h = torch.where(x < -math.sqrt(high) * t, torch.full_like(x, high), fan)
    h = torch.where(x > (speed - math.sqrt(middle)) * t, torch.full_like(x, middle), h)
    return torch.where(x > bore * t, torch.full_like(x, low), h)


def dam_along(num_cells: int) -> tuple[Tensor, Tensor]:
    """Cell centres of (-1, 1) and a dam at 0 along the first axis, one cell wide."""
    x = (2 * torch.arange(num_cells, dtype=torch.float64) + 1) / num_cells - 1
    state = torch.zeros(3, num_cells, 1, dtype=torch.float64)
    state[0, :, 0] = torch.where(x < 0, 2.0, 1.0)
    return x, state


def hump(resolution: int, t: float) -> Tensor:
    """A smooth hump with a velocity, run to t, (3, resolution, resolution)."""
    x = ((2 * torch.arange(resolution, dtype=torch.float64) + 1) / resolution - 1) * 0.5 * SIDE
    bump = torch.exp(-((x - 0.2).square()[:, None] + 1.5 * (x + 0.1).square()[None, :]))
    state = torch.stack([1 + 0.3 * bump, 0.2 * bump, -0.1 * bump])
    return evolve(state, width=SIDE / resolution, dt=t, num_frames=2)[1]


def coarser(u: Tensor, factor: int) -> Tensor:
    """Means over factor x factor cells."""
    return torch.nn.functional.avg_pool2d(u, factor)


def test_a_dam_along_an_axis_breaks_as_stoker_says():
    errors = []
    for num_cells in (100, 200, 400):
        x, state = dam_along(num_cells)
        h = evolve(state, width=2 / num_cells, dt=0.25, num_frames=3)[2, 0, :, 0]
        errors.append(float((h - stoker(x, 0.5)).abs().mean()))
    orders = [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:], strict=False)]
    assert errors[0] < 6e-3 and errors[-1] < 2e-3
    assert min(orders) > 0.8  # first order at a bore, whatever the scheme


@pytest.mark.parametrize("resolution", [50, 64])
def test_a_round_dam_keeps_the_symmetries_of_the_square_to_the_last_bit(resolution):
    h = evolve(dam(0.5, resolution), width=SIDE / resolution, dt=0.25, num_frames=3)[:, 0]
    for image in (h.flip(1), h.flip(2), h.transpose(1, 2)):
        assert torch.equal(h, image)


def test_water_is_conserved_until_waves_reach_the_walls_and_then_leaves():
    frames = evolve(dam(0.7, 64), width=SIDE / 64, dt=0.25, num_frames=17)
    water = frames[:, 0].mean((1, 2))
    assert float((water[:5] / water[0] - 1).abs().max()) < 1e-12  # to t = 1
    # and the momentum of a symmetric flow is zero
    assert float(frames[:5, 1:].sum((2, 3)).abs().max()) < 1e-10
    assert water[-1] < 0.99 * water[0]


def test_heights_stay_positive_where_the_water_nearly_runs_out():
    state = torch.zeros(3, 64, 64, dtype=torch.float64)
    state[0] = 1e-3
    state[0, 24:40, 24:40] = 1.0
    apart = torch.where(torch.arange(64) < 32, -1.0, 1.0).double()
    state[1] = state[0] * apart[:, None]  # two streams that part
    frames = evolve(state, width=1 / 64, dt=0.02, num_frames=8)
    assert torch.isfinite(frames).all() and frames[:, 0].min() > 0


def test_smooth_flows_converge_at_second_order_and_the_stored_grid_is_within_a_thousandth():
    fine = hump(256, 0.3)
    errors = [float((hump(n, 0.3) - coarser(fine, 256 // n)).abs().mean()) for n in (16, 32, 64)]
    orders = [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:], strict=False)]
    assert min(orders) > 1.8
    h, exact = hump(128, 0.3)[0], coarser(fine, 2)[0]
    assert float((h - exact).norm() / (exact - 1).norm()) < 1e-3


def test_radii_are_uniform_and_the_dam_is_what_they_say():
    radii = torch.tensor([sample_radius(5, index) for index in range(4000)])
    assert radii.min() >= 0.3 and radii.max() < 0.7
    assert abs(float(radii.mean()) - 0.5) < 4 * 0.4 / math.sqrt(12 * 4000)
    assert abs(float(radii.var()) / (0.4**2 / 12) - 1) < 0.06
    h = SOLVERS["shallow_water2d"].simulate(
        range(3), seed=5, resolution=128, num_frames=1, parameter=None, t_end=0.0
    )[:, 0, 0]
    area = (h.double() - 1).mean((1, 2)) * SIDE**2
    assert torch.allclose(area, math.pi * radii[:3].double() ** 2, rtol=1e-3)
    # the edge alone is mixed
    assert h.min() == 1 and h.max() == 2 and float(((h > 1) & (h < 2)).double().mean()) < 0.01
