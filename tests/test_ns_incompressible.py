"""Incompressible flow against a manufactured flow, the Stokes spectrum of the box, its balances and finer
runs."""

from __future__ import annotations

import math

import pytest
import torch
from test_data import SPLIT, examine, messages, saved
from torch import Tensor

from ups_solvers import SOLVERS
from ups_solvers.initial import cell_centres, random_stream
from ups_solvers.ns_incompressible import (
    HIGHEST,
    Box,
    at_centres,
    divergence,
    noise,
    sample_start,
)

SETTINGS = {"seed": 3, "resolution": 32, "num_frames": 5, "parameter": None, "t_end": 0.2}


def stream_flow(n: int, strength: float = 0.1) -> Tensor:
    """V of the stream function strength sin^2(pi x) sin^2(pi y): no slip, no divergence, (2, n + 1, n)."""
    x = torch.arange(n + 1, dtype=torch.float64) / n
    bump = torch.sin(math.pi * x).square()
    psi = strength * bump[:, None] * bump[None, :]
    return torch.stack([torch.diff(psi, dim=1) * n, -torch.diff(psi, dim=0).T * n])


def manufactured(n: int, viscosity: float, strength: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    """(V, particles, force) of a steady flow: particles are a function of the stream function, and their push
    balances advection and friction, with no pressure."""
    x = cell_centres(n)
    s, c = torch.sin(math.pi * x), torch.cos(math.pi * x)
    p = s.square()
    d1 = 2 * math.pi * s * c
    d2 = 2 * math.pi**2 * (c.square() - s.square())
    d3 = -8 * math.pi**3 * s * c
    px, dx, d2x, d3x = (part[:, None] * strength for part in (p, d1, d2, d3))
    vx, vy = px * d1, -dx * p  # psi_y, -psi_x
    vx_x, vx_y, vy_x, vy_y = dx * d1, px * d2, -d2x * p, -dx * d1
    lap_x, lap_y = d2x * d1 + px * d3, -d3x * p - dx * d2
    particles = 2 + px * p / strength
    force = torch.stack(
        [
            (vx * vx_x + vy * vx_y - viscosity * lap_x) / particles,
            ((vx * vy_x + vy * vy_y - viscosity * lap_y) / particles).T,
        ]
    )
    return stream_flow(n, strength), particles, force


def last(box: Box, v: Tensor, particles: Tensor, t: float) -> tuple[Tensor, Tensor]:
    return list(box.evolve(v, particles, dt=t, num_frames=2))[1]


def random_start(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return sample_start(1, 0, n)


# ---------------------------------------------------------------- exact solutions


def test_a_manufactured_steady_flow_stays_to_second_order():
    errors = []
    for n in (16, 32, 64):
        v, particles, force = manufactured(n, 0.02)
        moved, carried = last(Box(force, 0.02), v, particles, 0.5)
        x = cell_centres(n)
        bump = torch.sin(math.pi * x).square()
        exact = 0.1 * bump[:, None] * (math.pi * torch.sin(2 * math.pi * x))
        errors.append(
            (
                float((at_centres(moved, carried)[0] - exact).abs().max()),
                float((carried - particles).abs().mean()),
            )
        )
    orders = [
        [math.log2(a / b) for a, b in zip(coarse, fine, strict=True)]
        for coarse, fine in zip(errors, errors[1:], strict=False)
    ]
    assert min(order[0] for order in orders) > 1.8 and errors[-1][0] < 1e-3
    # the limiter takes some at the extrema
    assert min(order[1] for order in orders) > 1.6 and errors[-1][1] < 1e-3


# ---------------------------------------------------------------- balances


def test_the_divergence_is_zero_to_rounding_and_nothing_passes_the_walls():
    v, particles, force = random_start(32)
    for moved, _ in Box(force).evolve(v, particles, dt=0.05, num_frames=4):
        assert float(divergence(moved).abs().max()) * 32 < 1e-10
        assert not moved[:, 0].any() and not moved[:, -1].any()


def test_particles_are_conserved_to_rounding_and_keep_their_range():
    v, particles, force = random_start(32)
    patches = particles.sign()  # at an end of the range everywhere
    for _, carried in Box(force).evolve(v, patches, dt=0.1, num_frames=4):
        assert abs(float((carried - patches).mean())) < 1e-14
        assert float(carried.abs().max()) < 1 + 1e-12
    uniform = torch.full_like(particles, 1.3)
    assert float((last(Box(force), v, uniform, 0.1)[1] - 1.3).abs().max()) < 1e-12


# ---------------------------------------------------------------- starts and files


@pytest.mark.parametrize(("smoothness", "scale", "least"), [(1.0, 0.4, 1), (3.0, 0.15, 5)])
def test_noise_has_unit_variance_and_the_documented_spectrum(smoothness, scale, least):
    modes = torch.stack([noise(random_stream(0, index), 2, smoothness, scale) for index in range(24)])
    power = modes.abs().square()
    assert torch.allclose(power.sum((2, 3)).mean(1), torch.ones(24).double())
    k = torch.arange(-HIGHEST, HIGHEST + 1).double()
    square = k[:, None].square() + k.square()
    power = power.mean((0, 1))
    assert not power[square < least].any() and power[square == least].min() > 0
    shells = [
        float(power[(square >= low**2) & (square < (1.2 * low) ** 2)].mean()) for low in (5, 10, 20, 40)
    ]
    slopes = [math.log2(b / a) for a, b in zip(shells, shells[1:], strict=False)]
    assert slopes == pytest.approx([-4 * smoothness] * 3, rel=0.12)


def test_the_first_frame_is_the_noise_made_incompressible_and_the_doctor_finds_files_sound(tmp_path):
    u = SOLVERS["ns_incom2d"].simulate(range(4), **SETTINGS)
    v, particles, force = sample_start(3, 1, 32)
    frames = list(Box(force, 0.01).evolve(v, particles, dt=0.05, num_frames=3))
    assert torch.equal(u[1, 0, :3], at_centres(Box(force).project(v), particles).float())
    assert torch.equal(u[1, 2, :3], at_centres(*frames[2]).float())
    assert torch.equal(u[1, :, 3:], torch.stack([force[0], force[1].T]).float().expand(5, -1, -1, -1))
    path = saved(tmp_path, u.numpy(), "ns_incom2d", None)
    findings = examine(path, "ns_incom2d", **SPLIT)
    assert messages(findings, "error") + messages(findings, "warning") == ""
