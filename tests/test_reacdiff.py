"""Reaction-diffusion against a travelling wave, its two closed forms, an independent scheme and finer
runs."""

from __future__ import annotations

import math

import h5py
import numpy as np
import pytest
import torch
from test_data import SPLIT, examine, messages, saved
from torch import Tensor

from ups_solvers import SOLVERS, reacdiff
from ups_solvers.reacdiff import evolve, solver_of

SETTINGS = {"seed": 2, "resolution": 96, "num_frames": 6, "parameter": 0.5, "t_end": 0.05}


def modes_of(u: Tensor) -> Tensor:
    """Fourier modes of values at x = j / n."""
    return torch.fft.rfft(u.double(), norm="forward")


def values_of(modes: Tensor) -> Tensor:
    return torch.fft.irfft(modes, norm="forward")


def points(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64) / n


def two_fronts(n: int, t: float, nu: float, rho: float) -> Tensor:
    """Ablowitz and Zeppetella's front (1979), which runs outwards at both ends of a plateau; the two meet at
    neither end."""
    width, speed = math.sqrt(6 * nu / rho), 5 * math.sqrt(nu * rho / 6)
    x = points(n)

    def front(distance: Tensor) -> Tensor:
        return (1 + torch.exp((distance - speed * t) / width)).pow(-2)

    return front(x - 0.65) * front(0.35 - x)


# ---------------------------------------------------------------- exact solutions


def test_a_front_travels_at_its_speed_and_keeps_its_shape_to_fourth_order(monkeypatch):
    nu, rho, n = 1e-4, 10.0, 1024
    monkeypatch.setattr(reacdiff, "OCTAVES", 1)
    monkeypatch.setattr(reacdiff, "STEPS_PER_OCTAVE", 1)
    errors = []
    for size in (0.4, 0.2, 0.1):
        monkeypatch.setattr(reacdiff, "MAX_REACTION", size)
        u = values_of(
            evolve(modes_of(two_fronts(n, 0, nu, rho)), diffusivity=nu, rate=rho, dt=0.8, num_frames=2)[1]
        )
        errors.append(float((u - two_fronts(n, 0.8, nu, rho)).abs().max()))
    orders = [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:], strict=False)]
    assert min(orders) > 3.7 and errors[-1] < 2e-5


def test_without_reaction_every_wave_decays_at_its_rate_and_the_mean_stays():
    modes = modes_of(torch.from_numpy(np.random.default_rng(0).random(64)))
    frames = evolve(modes, diffusivity=0.05, rate=0.0, dt=0.01, num_frames=6)
    k, t = 2 * math.pi * torch.arange(33).double(), 0.01 * torch.arange(6, dtype=torch.float64)
    exact = modes * torch.exp(-0.05 * torch.outer(t, k.square()))
    torch.testing.assert_close(frames, exact, rtol=0, atol=1e-13)
    assert float((frames[:, 0] - modes[0]).abs().max()) == 0


# ---------------------------------------------------------------- trajectories


def test_a_trajectory_is_one_function_whatever_the_grid():
    coarse = solver_of(1.0).simulate(range(4), **SETTINGS | {"resolution": 32})
    fine = solver_of(1.0).simulate(range(4), **SETTINGS)
    assert torch.allclose(coarse, fine[..., 1::3], rtol=0, atol=2e-7)  # the middle one of three cells


def test_starts_are_the_waves_of_the_other_tasks_between_zero_and_one():
    settings = SETTINGS | {"resolution": 1024, "num_frames": 1}
    u = solver_of(1.0).simulate(range(40), **settings)
    assert torch.equal(u.amin(-1), torch.zeros(40, 1, 1)) and torch.equal(u.amax(-1), torch.ones(40, 1, 1))
    wave = SOLVERS["advection1d"].simulate(range(40), **settings)
    low, high = wave.amin(-1, keepdim=True), wave.amax(-1, keepdim=True)
    assert torch.allclose(u, (wave - low) / (high - low), atol=2e-6)
    assert torch.equal(u, SOLVERS["reacdiff1d_rho10"].simulate(range(40), **settings | {"parameter": 5.0}))


def test_a_nu_that_the_modes_do_not_resolve_is_refused():
    with pytest.raises(
        ValueError, match="nu = 1e-08 and rho = 1 with frames 0.01 apart need more than 2049 modes; expected"
    ):
        solver_of(1.0).simulate([0], **SETTINGS | {"parameter": 1e-8})


# ---------------------------------------------------------------- as published


def test_as_published_is_the_heat_equation_from_the_same_starts():
    settings = SETTINGS | {"t_end": 0.5, "num_frames": 26}
    heat = SOLVERS["reacdiff1d_as_published"].simulate(range(6), **settings)
    reacting = SOLVERS["reacdiff1d"].simulate(range(6), **settings)
    assert torch.equal(heat[:, 0], reacting[:, 0])
    assert float((heat[:, 1:].mean(-1) - heat[:, 1:2].mean(-1)).abs().max()) < 1e-7
    assert float(heat[:, 10:].std(-1).max()) < 1e-2  # constant in space by t = 0.2, and from then on
    assert float((heat[:, 15:] - heat[:, 14:-1]).abs().max()) < 1e-2
    assert float((reacting[:, -1].mean(-1) - heat[:, -1].mean(-1)).min()) > 0.05


def test_the_doctor_tells_data_with_a_reaction_from_data_as_published(tmp_path):
    settings = SETTINGS | {"num_frames": 21, "t_end": 1.0}
    for task in ("reacdiff1d", "reacdiff1d_rho10", "reacdiff1d_as_published"):
        (tmp_path / task).mkdir()
        path = saved(tmp_path / task, SOLVERS[task].simulate(range(12), **settings).numpy(), task, 0.5)
        findings = examine(path, task, **SPLIT)
        assert messages(findings, "error") + messages(findings, "warning") == "", task
    with h5py.File(path, "r+") as file:
        del file.attrs["ups_settings"], file.attrs["ups_progress"]
    assert "a reaction moves it" in messages(examine(path, "reacdiff1d", **SPLIT, is_user=True), "warning")
    assert "the file says rho = 1, and reacdiff1d_rho2 has 2" in messages(
        examine(path, "reacdiff1d_rho2", **SPLIT), "error"
    )
