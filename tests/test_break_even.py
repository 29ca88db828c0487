"""Break-even: N* from given costs, the error-matched grid, and the row of the report."""

import math

import pytest
import torch

from ups.config.load import load_config
from ups.config.schema import Config
from ups.evaluation.break_even import conclude, error_matched, regridded, why_unknown
from ups.tasks import get_task
from ups_solvers import SOLVERS

ADVECTION = get_task("advection1d")
BUDGET = {"data": 30.0, "base": 10.0, "training": 80.0}


def cost(error: float, seconds: float, cells: int = 32) -> dict:
    return {"grid": [cells], "error": error, "seconds": seconds}


@pytest.mark.parametrize(
    ("tried", "bound", "forecasts"),
    [
        ([cost(0.5, 0.0, 16), cost(0.01, 0.5)], "about", 300),  # 120 / (0.5 - 0.1)
        ([cost(0.01, 0.5)], "at least", 300),  # the coarsest grid is accurate enough
        ([cost(0.5, 0.0, 16), cost(0.03, 0.5)], "at most", 300),  # not even the full grid is
        ([cost(0.5, 0.0, 16), cost(0.01, 0.1)], "never", None),
        ([cost(0.01, 0.05)], "never", None),
        ([cost(0.5, 0.0, 16), cost(0.03, 0.05)], "unknown", None),
        ([cost(math.inf, 0.0)], "unknown", None),  # it refuses every grid
    ],
)
def test_n_star_is_the_budget_over_what_a_forecast_saves_or_a_bound_of_it(tried, bound, forecasts):
    entry = conclude(BUDGET, tried, {"error": 0.02, "seconds": 0.1}, "")
    assert entry["n_star"] == bound + " 300" * bool(forecasts)
    assert entry["words"].startswith(f"N* is {entry['n_star']}; ")
    assert entry["forecasts"] == (forecasts and pytest.approx(forecasts))
    assert entry["solver"]["error"] is None or math.isfinite(entry["solver"]["error"])


def wave(cells: int, time: float) -> torch.Tensor:
    x = torch.arange(cells, dtype=torch.float64) / cells
    return torch.sin(2 * math.pi * (x - time))[None, None]


def tried(solve, error: float) -> list[int]:
    """Cells of the grids that `error_matched` tries for a wave on 64 cells, two frames ahead."""
    u_ref = torch.stack([wave(64, 0.1), wave(64, 0.2)], 1)
    found = error_matched(solve, wave(64, 0.0), u_ref, ADVECTION, error)
    assert all((row["seconds"] > 0) == math.isfinite(row["error"]) for row in found)
    return [row["grid"][0] for row in found]


def exact(u: torch.Tensor) -> torch.Tensor:
    return SOLVERS["advection1d"].integrate(u, parameter=1.0, dt=0.1, num_frames=2)


def second_order(u: torch.Tensor) -> torch.Tensor:
    return exact(u) * (1 + u.shape[-1] ** -2)


def refuses_coarse(u: torch.Tensor) -> torch.Tensor:
    if u.shape[-1] < 32:
        raise ValueError("too coarse")
    return exact(u)


def stands_still(u: torch.Tensor) -> torch.Tensor:
    return torch.stack([u, u], 1)


def test_an_exact_solver_matches_on_the_coarsest_grid_and_a_wrong_one_on_none():
    assert tried(exact, 1e-6) == [8]
    assert tried(second_order, 1.01 * 16**-2) == [8, 16]
    assert tried(refuses_coarse, 1e-6) == [8, 16, 32]
    assert tried(stands_still, 0.1) == [8, 16, 32, 64]


def test_positive_fields_stay_positive_on_another_grid():
    u = torch.ones(1, 3, 64, dtype=torch.float64)
    u[..., 20:40] = 1e-4
    task = get_task("cfd1d")
    fine = regridded(regridded(u, [16], task, task.fields), [64], task, task.fields)
    assert bool((fine[:, :2] > 0).all()) and bool((fine[:, 2] < 0).any())


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("burgers1d", [], ""),
        ("darcy2d", [], ""),
        ("shallow_water2d", [], "no solver that starts from a stored frame"),
        ("burgers1d_hidden", [], "needs the parameter, which is hidden"),
        ("burgers1d", ["data.source=published"], "did not make the data"),
        ("burgers1d", ["evaluate.weights=pretrained"], "from elsewhere"),
        ("burgers1d", ["operator.init=pretrained"], "started from the weights of another run"),
    ],
)
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
