"""The comparison on APEBench's scenarios: its metric, its coarse solvers, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest

from bench import apebench, apebench_coarse
from bench.apebench import mean_nrmse, summary


def waves(cells, seed=0, num=4):
    random, x = np.random.default_rng(seed), np.arange(cells) / cells
    return sum(random.standard_normal((num, 1, 1)) * np.sin(2 * np.pi * k * x + k) for k in range(1, 6)) / 3


def test_metric_is_the_ratio_of_norms_summed_over_channels_and_averaged_over_trajectories():
    reference = np.array([[[3.0, 4.0], [0.0, 2.0]], [[6.0, 8.0], [1.0, 0.0]]])[:, None]  # norms 5, 2; 10, 1
    pred = reference + np.array([[[0.0, 1.0], [0.0, 0.5]], [[1.0, 0.0], [0.0, 0.3]]])[:, None]
    # (1/5 + 0.5/2 + 1/10 + 0.3/1) / 2
    assert mean_nrmse(pred, reference) == pytest.approx([0.425])
    pred[0, 0, 0, 0] = np.nan
    assert mean_nrmse(pred, reference)[0] == np.inf


def test_score_is_the_geometric_mean_of_the_first_hundred_steps():
    errors = np.concatenate([np.full(50, 0.01), np.full(50, 1.0), np.full(100, 9.0)])
    assert summary(errors) == pytest.approx({"error": 0.1, "first": 0.01, "last": 1.0, "end": 9.0})


def test_coarse_advection_moves_half_as_far_and_diffusion_decays_as_it_should():
    u = waves(160)
    # gamma_1 = -4 is a Courant number of 4 per frame
    assert apebench_coarse.advance(u, "adv", 1.0) == pytest.approx(np.roll(u, 4, -1), abs=1e-12)
    assert apebench_coarse.adv(u) == pytest.approx(np.roll(u, 2, -1), abs=1e-12)
    x = np.sin(2 * np.pi * np.arange(160) / 160)
    decay = np.exp(-0.5 * 4 / (160**2 * 2) * 4 * np.pi**2)
    assert apebench_coarse.diff(x) == pytest.approx(decay * x, abs=1e-12)


@pytest.mark.parametrize("scenario", ["burgers", "ks_cons", "ks", "fisher"])
def test_coarse_step_solves_its_equation_to_second_order(scenario):
    """Errors against many small steps, of one step and of one of half the length."""

    def error(proportion, parts=64):
        u = fine = waves(160)
        for _ in range(parts):
            fine = apebench_coarse.advance(fine, scenario, proportion / parts)
        return np.abs(apebench_coarse.advance(u, scenario, proportion) - fine).max()

    assert 6.5 < error(0.2) / error(0.1) < 9.5  # third order in one step


def test_burgers_and_ks_have_the_terms_of_apebench():
    """A small step over its length against derivatives by hand: -1.5/N u u_x, and -3/N^2 (u_x^2 - mean)."""
    cells, k = 160, 2 * np.pi
    u, u_x = np.sin(k * np.arange(cells) / cells), k * np.cos(k * np.arange(cells) / cells)
    slope = (apebench_coarse.advance(u, "burgers", 1e-6) - u) / 1e-6
    assert slope == pytest.approx(-1.5 / cells * u * u_x - 1.5 / (2 * cells**2) * k**2 * u, abs=1e-6)
    slope = (apebench_coarse.advance(u, "ks", 1e-6) - u) / 1e-6
    linear = (1.2 / (2 * cells**2) * k**2 - 15 / (8 * cells**4) * k**4) * u
    norm = -3 / cells**2 * (u_x**2 - np.mean(u_x**2))
    assert slope == pytest.approx(linear + norm, abs=1e-6)


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A scenario with data, and networks that are 1 % off."""
    u, train = ([waves(16, seed, 7)] for seed in (0, 1))
    for frames in (u, train):
        for _ in range(8):
            frames.append(apebench_coarse.advance(frames[-1], "kdv", 1.0))
    u, train = (np.stack(frames, 1).astype(np.float32) for frames in (u, train))
    monkeypatch.setattr(apebench, "OUT", tmp_path / "out")
    monkeypatch.setattr(apebench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(apebench, "environment", lambda python: python)

    def call(python, command, request, out):
        found = {"train": train[:, :7], "test": u}
        if command == "train":
            pred, truth = 1.01 * u[:, 1:], u[:, 1:]
            found = {"rollout": pred, "errors": mean_nrmse(pred, truth), "steps": 7, "seconds": 1.0}
            found |= {"num_parameters": 3, "jax": "0"}
        np.savez(out, **found)
        return found

    monkeypatch.setattr(apebench, "call", call)
    return u


def test_another_metric_is_refused(ready, monkeypatch):
    right = apebench.mean_nrmse
    monkeypatch.setattr(apebench, "mean_nrmse", lambda *given: right(*given) + 0.01)
    call = apebench.call

    def with_other_errors(*given):
        return call(*given) | {"errors": np.full(8, 0.5)}

    monkeypatch.setattr(apebench, "call", with_other_errors)
    with pytest.raises(ValueError, match="expected APEBench's own, 0.5"):
        apebench.main(["--scenario", "kdv", "--column", "Res;26;8;relu"])


def test_another_scheme_than_apebenchs_is_refused(ready):
    apebench.check_solver("kdv", ready)
    with pytest.raises(
        ValueError, match="a step of burgers by bench/apebench_coarse.py is .* expected less than"
    ):
        apebench.check_solver("burgers", ready)
