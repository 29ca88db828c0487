"""Data of other authors and of shifted regimes are what their tables say, and wrong ones are refused."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from bench import pays, shift_grid, strangers, transfer, user_data
from bench.rivals import Trained
from bench.score import Split, rollout
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups_discovery.boundary import NO_FLUX, PERIODIC


def test_random_waves_have_no_mean_maximum_one_and_no_higher_wave_number():
    u = user_data.random_waves([3, 5], 0, 4, 64, 1, PERIODIC)
    power = torch.fft.rfft(u).abs()
    assert u.shape == (2, 64) and torch.allclose(u.abs().amax(1), torch.ones(2).double())
    assert float(power[:, 0].max()) < 1e-12 and float(power[:, 5:].max()) < 1e-12 < float(power[:, 4].min())
    torch.testing.assert_close(u[1], user_data.random_waves([5], 0, 4, 64, 1, PERIODIC)[0])
    finer = user_data.random_waves([3], 0, 2, 256, 2, NO_FLUX)
    assert finer.shape == (1, 256, 256)
    walls = finer[:, 0] - finer[:, 1], finer[:, :, -1] - finer[:, :, -2]  # no slope across a wall
    assert all(float(slope.abs().max()) < 2e-3 for slope in walls)


def test_a_file_is_read_as_a_user_s_with_many_values_of_its_parameter(tmp_path):
    u, scale = np.random.default_rng(0).standard_normal((40, 5, 16)), np.geomspace(0.5, 2, 40)
    path = tmp_path / "toy.npz"
    user_data.write(path, {"u": u, "v": 2 * u}, scale=scale)
    config = load_config(user_data.write_config(path, user_data.CONFIG, "toy", 0.5, domain=(0, 2)))
    build_cache(config, "toy", progress=False)
    cache = open_cache(config, "toy")
    assert cache.task.fields == ("u", "v") and cache.task.parameters == ("scale",) and cache.is_sampled
    assert cache.dt == 0.5 and config.context("toy") == 1
    assert sorted(cache.parameters[:, 0].tolist()) == pytest.approx(scale.tolist())


@pytest.mark.parametrize("number", range(4))
def test_a_random_problem_is_a_function_of_its_number_and_moves_by_a_few_percent_a_frame(number):
    u = transfer.drawn(number, 0)
    assert torch.equal(u, transfer.drawn(number, 0)) and float(u.abs().max()) < transfer.LARGEST
    change = (u[:, 1] - u[:, 0]).square().mean().sqrt() / u[:, 0].square().mean().sqrt()
    assert len(u) == transfer.NUM_STARTS and 0.005 < change < 0.25
    across = (u[..., 0] - u[..., -1]).abs().mean(), (u[..., 1] - u[..., 0]).abs().mean()
    assert (across[0] < 2 * across[1]) == (number % 2 == 0)  # every second problem has walls


@pytest.mark.parametrize("name", ("cahn_hilliard", "fronts", "tracer", "island", "conductivity"))
def test_problems_of_strangers_conserve_what_their_equation_conserves(name):
    u = next(iter(strangers.PROBLEMS[name].solve(2, 3, 1).values()))
    total = np.nansum(u, (2, 3))
    assert np.abs(total - total[:, :1]).max() < 1e-9 and np.nanmax(np.abs(u[:, 1] - u[:, 0])) > 1e-3


def test_a_forecast_pays_when_what_it_saves_on_a_solver_of_equal_error_repays_data_and_training():
    ours = {"errors": [0.1, 0.3], "batch": [1.0], "alone": [4.0]}
    grids = (("8", 0.5, 0.5), ("16", 0.2, 3.0), ("32", 0.0, 5.0))  # the first is too coarse
    tried = [{"grid": grid, "errors": [e, e], "batch": [s], "alone": [3.0]} for grid, e, s in grids]
    found = pays.concluded({"data": 4.0, "training": 6.0}, {"UPS": ours}, tried)
    batch, alone = found["UPS batch"], found["UPS alone"]
    assert batch["solver"] == {"seconds": 3, "error": 0.2, "grid": "16"} and batch["n_star"] == 10 / (3 - 1)
    assert (batch["low"], batch["high"]) == (10 / (5 - 1), 5)  # 0.1, of one start, takes the fine grid
    assert alone["n_star"] == alone["low"] == float("inf")


@pytest.mark.parametrize("name", shift_grid.FAMILIES)
def test_scale_is_a_factor_of_all_rates(name):
    """Every second frame at scale 1 is a frame at scale 2; a solver that ignored it would be off by far."""
    family = dataclasses.replace(shift_grid.FAMILIES[name], resolution=32)
    slow, fast = (family.solutions([0], family.num_modes[0], scale)[0] for scale in (1.0, 2.0))
    assert slow.shape == (shift_grid.NUM_FRAMES, slow.shape[1], *[32] * (slow.ndim - 2))
    size = float((slow[2] - slow[0]).square().mean().sqrt())
    assert float((fast[1] - slow[2]).square().mean().sqrt()) < 0.01 * size
    assert float((fast[1] - slow[1]).square().mean().sqrt()) > 0.2 * size


def test_cells_of_the_grid_are_in_their_place():
    """A model whose error is known in every cell: it predicts zeros times the scale it is given."""
    u, truth, rows = torch.ones(2, 1, 1, 4), torch.ones(2, 3, 1, 4), torch.arange(2)
    splits = {
        (row, column): Split(u, truth * (1 + column), torch.full((2, 1), float(row)), rows)
        for row, column in itertools.product(range(5), repeat=2)
    }

    def predict(given, parameters, num_steps):
        return given.expand(-1, num_steps, -1, -1) * parameters.view(-1, 1, 1, 1).float()

    found = shift_grid.errors_on(splits, lambda split: rollout(Trained(predict), split, 2)[0])
    assert found == [
        [pytest.approx(abs(row - 1 - column) / (1 + column)) for column in range(5)] for row in range(5)
    ]
