"""The solver beside a forecast: on another grid, and where it cannot be compared."""

import pytest
import torch
from cases import cases

from bench.pays import regridded
from ups.config.load import load_config
from ups.config.schema import Config
from ups.evaluation.trust import why_unknown
from ups.tasks import get_task
from ups_solvers import SOLVERS


def test_positive_fields_stay_positive_on_another_grid():
    u = torch.ones(1, 3, 64, dtype=torch.float64)
    u[..., 20:40] = 1e-4
    task = get_task("cfd1d")
    fine = regridded(regridded(u, [16], task, task.fields), [64], task, task.fields)
    assert bool((fine[:, :2] > 0).all()) and bool((fine[:, 2] < 0).any())


@pytest.mark.parametrize(("name", "overrides", "reason"), cases("break_even.not_compared"))
def test_where_the_costs_cannot_be_compared_the_reason_is_named(name, overrides, reason):
    config: Config = load_config("configs/small.yaml", overrides)
    found = why_unknown(get_task(name), config)
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("name", ["darcy2d", "darcy2d_grf"])
def test_the_solver_of_a_steady_task_starts_from_its_coefficient(name):
    a, u = (
        SOLVERS[name]
        .simulate([0, 1], seed=1, resolution=16, num_frames=1, parameter=2.0, t_end=0.0)
        .split(1, 2)
    )
    found = SOLVERS[name].integrate(a[:, 0].double(), parameter=2.0, dt=0.0, num_frames=1)
    torch.testing.assert_close(found.float(), u, rtol=1e-5, atol=1e-7)
