"""Barkley's medium: speed of waves, symmetry, order, kicks, refractory tissue, exact futures, the control."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ups.tasks import get_task
from ups_solvers import SOLVERS, barkley
from ups_solvers.initial import random_stream

N, DX = 32, barkley.SIDE / 32
CENTRE = torch.tensor([[barkley.SIDE / 2, barkley.SIDE / 2]], dtype=torch.float64)


def rest(v: float = 0.0) -> Tensor:
    state = torch.zeros(1, 2, N, N, dtype=torch.float64)
    state[:, 1] = v
    return state


def kicked(state: Tensor, place: Tensor = CENTRE) -> Tensor:
    u, v = state.unbind(1)
    return torch.stack([torch.maximum(u, barkley.bumps(place, N)), v], 1)


def later(state: Tensor, time: float, dx: float = DX, factor: float = 1.0) -> Tensor:
    """The state `time` later without kicks, in steps of `factor` times the longest."""
    num = math.ceil(time / (factor * barkley.longest_step(dx)))
    for _ in range(num):
        state = barkley.advance(state, time / num, dx)
    return state


def speed(dx: float, *, has_recovery: bool) -> float:
    """Speed of a plane wave that starts in the middle; without recovery, v stays zero."""
    n, dt, fronts = round(44 / dx), 0.5 * barkley.longest_step(dx), []
    state = torch.zeros(1, 2, n, 1, dtype=torch.float64)
    state[0, 0, :, 0] = ((torch.arange(n) - n // 2).abs() * dx < 3).double()
    for _ in range(round(3 / dt)):
        state = barkley.advance(state, dt, dx)
        state[:, 1] *= has_recovery
        u = state[0, 0, n // 2 :, 0]
        last = int((u > 0.5).nonzero().max())
        fronts.append((last + float((u[last] - 0.5) / (u[last] - u[last + 1]))) * dx)
    early = len(fronts) // 3
    return (fronts[-1] - fronts[early]) / ((len(fronts) - 1 - early) * dt)


def test_a_front_has_the_speed_of_its_closed_form():
    """(1 - 2 b / a) / sqrt(2 eps) if v stays zero (Murray, Mathematical Biology, section 13.2), to second
    order in the cell; recovery slows it."""
    exact = (1 - 2 * barkley.B / barkley.A) / math.sqrt(2 * barkley.EPS)
    errors = [1 - speed(dx, has_recovery=False) / exact for dx in (0.35, 0.175)]
    assert abs(errors[1]) < 0.01 and 3 < errors[0] / errors[1] < 5
    assert 0.75 < speed(DX, has_recovery=True) / exact < 0.85


def test_time_steps_are_of_fourth_order_and_small_enough():
    finest = later(kicked(rest()), 2.0, factor=1 / 16)
    errors = [float((later(kicked(rest()), 2.0, factor=f) - finest).norm()) for f in (1.0, 0.5, 0.25)]
    assert errors[0] < 3e-4 * float(finest.norm())
    assert all(3.5 < math.log2(a / b) < 4.5 for a, b in zip(errors, errors[1:], strict=False))


def test_a_kick_starts_a_ring_wave_at_rest_and_has_no_effect_in_refractory_tissue():
    """A ring: the wave leaves its centre. The threshold is that of v at which no wave starts."""
    ring = later(kicked(rest()), 4.0)[0, 0]
    assert ring.max() > 0.9 and ring[N // 2, N // 2] < 0.1 and (ring > 0.5).double().mean() > 0.1
    for v, has_wave in ((0.1, True), (0.4, False), (0.6, False)):
        change = (later(kicked(rest(v)), 2.0) - later(rest(v), 2.0))[0, 0].abs().max()
        assert (change > 0.5) if has_wave else (change < 1e-3), (v, change)


def test_kicks_are_a_poisson_process_at_uniform_places():
    num, dt = 25, 0.04
    kicks = [barkley.sample_kicks(random_stream(3, i), num, dt) for i in range(2000)]
    counts = torch.tensor([len(steps) for steps, _ in kicks]).double()
    expected = barkley.RATE * num * dt
    assert abs(counts.mean() - expected) < 4 * (expected / 2000) ** 0.5
    assert 0.87 < counts.var() / expected < 1.13  # 4 standard errors
    steps = torch.cat([torch.from_numpy(steps) for steps, _ in kicks]).double()
    places = torch.cat([torch.from_numpy(places) for _, places in kicks]) / barkley.SIDE
    uniform = torch.cat([(steps[:, None] + 0.5) / num, places], 1).sort(0).values
    ideal = (torch.arange(len(uniform), dtype=torch.float64) + 0.5) / len(uniform)
    assert (uniform - ideal[:, None]).abs().max() < 2.0 / len(uniform) ** 0.5  # Kolmogorov-Smirnov, 0.1 %
    assert uniform[:, 0].max() < 1


def test_waves_appear_where_the_forcing_of_the_control_says():
    """The first frame from rest: a wave that has spread for `age` around every place; nothing elsewhere."""
    u, _, kick, age = barkley.evolve_shown(
        rest().expand(200, -1, -1, -1),
        [random_stream(5, i) for i in range(200)],
        num_frames=1,
        parameter=None,
        dt=1.0,
    )[:, 0].unbind(1)
    single = (kick.sum((1, 2)) * DX**2 / (2 * math.pi) - 1).abs() < 0.01
    assert 0.28 < single.double().mean() < 0.46  # P(1 kick) = 0.37
    for row in single.nonzero()[:, 0].tolist():
        at = int(kick[row].argmax())
        waited = float(age[row].flatten()[at] / kick[row].flatten()[at])
        assert 0 < waited <= 1
        place = (torch.tensor([[at // N, at % N]]).double() + 0.5) * DX
        ahead = later(kicked(rest(), place), waited)[0, 0]
        # the kick was within half a cell of the largest value
        assert ((u[row] > 0.5) & (ahead.roll((1, 0), (0, 1)) < 0.01) & (ahead < 0.01)).sum() <= 3
    assert (u[kick.amax((1, 2)) == 0] == 0).all() and bool((kick.amax((1, 2)) == 0).any())


@pytest.fixture(scope="module")
def world() -> tuple[Tensor, Tensor]:
    """(frames (n, 3, 2, N, N) of the data, exact next frames of the first (n, 19, 1, 2, N, N))."""
    task, rows = get_task("barkley2d"), range(40)
    u = SOLVERS[task.name].simulate(rows, seed=4, resolution=N, num_frames=3, parameter=None, t_end=2.0)
    futures = SOLVERS[task.name].exact_futures(
        u[:, 0], 19, seed=9, rows=rows, num_frames=1, parameter=None, dt=1.0
    )
    return u, futures


def test_data_are_exchangeable_with_exact_futures_of_their_first_frame(world):
    """Ranks of the mean of u are uniform; among futures of another start, the fake, they are not. Futures
    without a new wave are equal to rounding: their order is random."""
    u, futures = world
    noise = 1e-5 * torch.randn(20, len(u), generator=torch.Generator().manual_seed(0))

    def distance(futures: Tensor) -> float:
        """Chi-squared of the ranks in four classes, 3 degrees of freedom."""
        members, truth = futures[:, :, 0, 0].mean((2, 3)) + noise[1:].T, u[:, 1, 0].mean((1, 2)) + noise[0]
        rank = (members < truth[:, None]).sum(1)
        counts = torch.bincount(rank // 5, minlength=4).double()
        return float(((counts - len(u) / 4).square() / (len(u) / 4)).sum())

    assert distance(futures) < 16.3  # 0.1 %
    assert distance(futures.roll(1, 0)) > 20
    assert not torch.equal(futures[:, 0], futures[:, 1])


def test_the_control_has_the_trajectories_of_the_task_and_shows_their_kicks(world):
    u, _ = world
    control = get_task("barkley2d_shown")
    shown = SOLVERS[control.name].simulate(
        range(3), seed=4, resolution=N, num_frames=3, parameter=None, t_end=2.0
    )
    assert torch.equal(shown[:, :, :2], u[:3])
    assert control.forcing == ("kick", "age") and SOLVERS[control.name].exact_futures is None
    assert (shown[:, 0, 2:] == 0).all() and shown[:, 1:, 2].amax() > 0.8
    assert (shown[:, 1:, 3] <= 1.0 * shown[:, 1:, 2] + 1e-6).all()
