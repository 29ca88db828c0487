"""Diffusion-sorption against the linear limit's series, its similarity, mass balance, PDEBench's scheme and
finer runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ups_solvers import SOLVERS, diff_sorp
from ups_solvers.diff_sorp import (
    BULK_DENSITY,
    DIFFUSION,
    FREUNDLICH_K,
    FREUNDLICH_N,
    POROSITY,
    WALL,
    content,
    evolve,
    sample_start,
    slopes,
    volumes,
)
from ups_solvers.initial import NOMINAL_POINTS

SETTINGS = {"seed": 4, "resolution": 96, "num_frames": 11, "parameter": None, "t_end": 50.0}
LENGTH = 1 + 2 * WALL


def centres(num_cells: int) -> np.ndarray:
    """Distances of the centres from the left wall."""
    return (np.arange(num_cells) + 0.5) / num_cells + WALL


def linear_limit(start: float, y: np.ndarray, t: float, num_modes: int = 300) -> np.ndarray:
    """n_f = 1: a heat equation with u = 1 on the left and u + D u_x = 0 on the right, by separation of
    variables."""
    diffusivity = DIFFUSION / (1 + (1 - POROSITY) / POROSITY * BULK_DENSITY * FREUNDLICH_K)
    low = (np.arange(num_modes) + 0.5) * math.pi / LENGTH
    high = (np.arange(num_modes) + 1.0) * math.pi / LENGTH
    sign = np.sign(np.sin(low * LENGTH) + DIFFUSION * low * np.cos(low * LENGTH))
    for _ in range(60):
        k = 0.5 * (low + high)
        is_low = np.sign(np.sin(k * LENGTH) + DIFFUSION * k * np.cos(k * LENGTH)) == sign
        low, high = np.where(is_low, k, low), np.where(is_low, high, k)
    slope = -1 / (LENGTH + DIFFUSION)  # of the steady state 1 + slope y
    phase = k * LENGTH
    of_one, of_y = (1 - np.cos(phase)) / k, np.sin(phase) / k**2 - LENGTH * np.cos(phase) / k
    norm = 0.5 * LENGTH - np.sin(2 * phase) / (4 * k)
    amplitude = ((start - 1) * of_one - slope * of_y) / norm * np.exp(-diffusivity * k**2 * t)
    return 1 + slope * y + np.sin(np.outer(y, k)) @ amplitude


# ---------------------------------------------------------------- exact solutions


@pytest.mark.parametrize("t", [5.0, 60.0])
def test_linear_sorption_is_the_series_of_its_heat_equation_to_second_order(t, monkeypatch):
    monkeypatch.setattr(diff_sorp, "STEPS_PER_OCTAVE", 30)
    errors = []
    for num_cells in (64, 128, 256):
        u = evolve(np.full(num_cells, 0.15), dt=t, num_frames=2, exponent=1.0)[1]
        errors.append(np.abs(u - linear_limit(0.15, centres(num_cells), t)).max())
    assert errors[-1] < 3e-4 and min(errors[0] / errors[1], errors[1] / errors[2]) > 3.3


# ---------------------------------------------------------------- balances and other schemes


def test_what_enters_and_leaves_is_what_the_medium_gains():
    def held(u: np.ndarray) -> float:
        return float(volumes(len(u)) @ content(u))

    frames = evolve(np.full(256, 0.1), dt=1.0, num_frames=101)
    flux = np.array([DIFFUSION * (slopes(u)[-1] - slopes(u)[0]) for u in frames[40:]])
    gained = (flux[0] + flux[-1] + 4 * flux[1:-1:2].sum() + 2 * flux[2:-1:2].sum()) / 3  # Simpson
    assert gained > 0.1
    assert held(frames[100]) - held(frames[40]) == pytest.approx(gained, rel=2e-5)
    assert content(np.float64(0.3) + 1e-6) - content(np.float64(0.3) - 1e-6) == pytest.approx(
        2e-6
        * (
            1
            + (1 - POROSITY)
            / POROSITY
            * BULK_DENSITY
            * FREUNDLICH_K
            * FREUNDLICH_N
            * (0.3 + 1e-6) ** (FREUNDLICH_N - 1)
        )
    )


def test_pdebench_s_scheme_on_its_grid_gives_the_same():
    """Its stencil with ghost cells and its constants, by classical Runge-Kutta."""
    n, u = NOMINAL_POINTS, np.full(NOMINAL_POINTS, 0.12)

    def rate(u: np.ndarray) -> np.ndarray:
        wide = np.concatenate([[1.0], u, [5e-4 * (u[-2] - u[-1]) * n]])
        retardation = 1 + (1 - 0.29) / 0.29 * 2880 * 3.5e-4 * 0.874 * (u + 1e-6) ** (0.874 - 1)
        return 5e-4 / retardation * (wide[2:] - 2 * wide[1:-1] + wide[:-2]) * n**2

    num_steps = 1500
    for _ in range(num_steps):
        h = 5.0 / num_steps
        k1 = rate(u)
        k2 = rate(u + 0.5 * h * k1)
        k3 = rate(u + 0.5 * h * k2)
        u = u + h / 6 * (k1 + 2 * k2 + 2 * k3 + rate(u + h * k3))
    ours = evolve(np.full(n, 0.12), dt=5.0, num_frames=2)[1]
    assert np.abs(ours - u).max() < 5e-5


# ---------------------------------------------------------------- trajectories


def test_starts_are_uniform_constants():
    starts = np.array([sample_start(9, index) for index in range(4000)])
    assert starts.min() >= 0 and starts.max() < 0.2
    assert abs(starts.mean() - 0.1) < 4 * 0.2 / math.sqrt(12 * 4000)
    assert abs(starts.var() / (0.04 / 12) - 1) < 0.06
    u = SOLVERS["diff_sorp1d"].simulate(range(3), **SETTINGS | {"num_frames": 1, "seed": 9})
    assert torch.equal(u, torch.from_numpy(starts[:3]).float().view(3, 1, 1, 1).expand(3, 1, 1, 96))
