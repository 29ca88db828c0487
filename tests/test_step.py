"""A solver's `integrate` continues any state as its trajectories do, and `step` is its first frame."""

import pytest
import torch

from ups.tasks import TASKS, get_task
from ups_solvers import SOLVERS

STATED = {
    "advection1d": (0.4, 0.5),
    "burgers1d": (0.05, 0.5),
    "reacdiff1d": (0.5, 0.5),
    "diff_sorp1d": (None, 100.0),
    "cfd1d": (0.1, 0.1),
    "cfd1d_trans": (0.1, 0.1),
    "cfd2d": (0.1, 0.1),
    "cfd3d": (0.1, 0.05),
    "diff_react2d": (None, 0.5),
    "ns_incom2d": (None, 0.4),
}


@pytest.mark.parametrize("name", STATED)
def test_a_step_equals_the_solvers_and_rows_are_independent(name):
    task, solver, (parameter, t_end) = get_task(name), SOLVERS[name], STATED[name]
    resolution = {1: 64, 2: 16, 3: 8}[task.ndim]
    u = solver.simulate([0, 1], seed=5, resolution=resolution, num_frames=9, parameter=parameter, t_end=t_end)
    given, then = u[:, 6], u[:, 7]
    found, last = solver.integrate(given, parameter=parameter, dt=t_end / 8, num_frames=2).unbind(1)
    assert found.shape == last.shape == given.shape and found.dtype == given.dtype
    assert torch.equal(found, solver.step(given, parameter=parameter, dt=t_end / 8))
    space = tuple(range(2, given.ndim))
    still = len(task.moving)
    assert torch.equal(found[:, still:], given[:, still:])
    change = task.predicted(then - given).square().mean((0, *space)).sqrt()
    gap = task.predicted(found - then).square().mean((0, *space)).sqrt()
    # the solvers of waves and layers know more than the cells do: sub-cell shifts, finer cells, velocities on
    # faces
    bound = {"advection1d": 0.2, "burgers1d": 0.02, "diff_sorp1d": 0.25, "ns_incom2d": 0.2}.get(name, 1e-3)
    assert bool((gap <= bound * change).all()), gap / change
    gap = task.predicted(last - u[:, 8]).square().mean((0, *space)).sqrt()
    change = task.predicted(u[:, 8] - given).square().mean((0, *space)).sqrt()
    assert bool((gap <= bound * change).all()), gap / change
    assert bound < 1  # standing still, the fake, is refused: its gap is the change
    alone = solver.step(given[1:], parameter=parameter, dt=t_end / 8)
    torch.testing.assert_close(alone[0], found[1], rtol=1e-6, atol=1e-6)


def test_a_step_of_burgers_runs_on_any_number_of_cells():
    solver = SOLVERS["burgers1d"]
    u = solver.simulate([0], seed=5, resolution=96, num_frames=2, parameter=0.05, t_end=0.1)
    found = solver.step(u[:, 0], parameter=0.05, dt=0.1)
    torch.testing.assert_close(found, u[:, 1], rtol=0, atol=2e-3)


def test_tasks_with_a_hidden_state_have_no_step():
    assert {"shallow_water2d", "darcy2d"} <= {name for name, one in SOLVERS.items() if one.step is None}
    assert all((one.step or TASKS[name].is_steady) or not one.integrate for name, one in SOLVERS.items())
