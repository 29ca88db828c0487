"""The equation that is found where noise drives it (ups_discovery/drift.py): against the equation that
made the data, the law's own mean, and what is found when modes are not weighed or both frames of a pair
explain the second."""

from __future__ import annotations

import math
import re

import pytest
import torch
from test_certainty import fisher, noisy
from test_equation import UX, UXX, Trajectories, coefficients, found, integrated

from ups.models.bases.base import ParameterBatch
from ups.models.bases.equation import Equation
from ups.tasks import TASKS
from ups_discovery import drift
from ups_discovery.certainty import UNCLEAR
from ups_discovery.drift import Drift
from ups_discovery.least_squares import significant
from ups_discovery.seeds import generator
from ups_solvers import SOLVERS

NU, CELLS, FRAMES, DT = 0.02, 64, 21, 0.05


def states(seed: int, count: int, num_frames: int = 1) -> torch.Tensor:
    return SOLVERS["burgers1d_forced"].simulate(
        range(count),
        seed=seed,
        resolution=CELLS,
        num_frames=num_frames,
        parameter=NU,
        t_end=DT * (num_frames - 1),
    )


@pytest.fixture(scope="module", autouse=True)
def fewer_pairs():
    """An eighth of the cells that a fit uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "REGRESSION_CELLS", drift.REGRESSION_CELLS // 8)
        patch.setattr(drift, "FIT_CELLS", drift.FIT_CELLS // 4)
        yield


@pytest.fixture(scope="module")
def u() -> torch.Tensor:
    """Burgers' equation driven by white noise, (trajectories, time, 1, x)."""
    return states(0, 112, FRAMES).double()


@pytest.fixture(scope="module")
def data(u) -> Trajectories:
    return Trajectories(u, DT, 1.0)


@pytest.fixture(scope="module")
def base(data) -> Equation:
    names = [(name, one) for name, _, one in found(data)]
    assert names[-1][0].startswith("drift of ")
    return names[-1][1]


def excess(base: Equation, u: torch.Tensor, data: Trajectories) -> float:
    """Of new states, the base's error one frame ahead beyond what noise leaves, over the variance of that
    noise."""
    task, starts = TASKS["burgers1d_forced"], u[:, 0]
    samples = (
        SOLVERS[task.name]
        .exact_futures(
            starts.float(), 64, seed=3, rows=range(len(starts)), num_frames=1, parameter=NU, dt=DT
        )[:, :, 0]
        .double()
    )
    parameters = ParameterBatch(torch.zeros(len(starts), 1), torch.zeros(len(starts), dtype=torch.long))
    mean, std = (value.view(-1, 1) for value in (data.samples.head.codec.mean, data.samples.head.codec.std))
    now = base(((starts.float() - mean) / std)[:, None], parameters).double() * std + mean
    noise = samples.var(1)
    return float(((now - samples.mean(1)).square() - noise / 64).mean() / noise.mean())


def test_the_equation_under_white_noise_is_found(base):
    weights = coefficients(base)
    assert weights[UX] == pytest.approx(-1.0, abs=0.06) and weights[UXX] == pytest.approx(NU, rel=0.1)


def test_it_is_stated_with_intervals_that_hold_the_truth(base):
    [line] = base.findings(["u"], ["x"])
    rows = {
        base.terms.terms[place]: (value, width)
        for _, place, value, width, is_small in base.found["equations"][0]["rows"]
        if not is_small
    }
    assert line.startswith("∂t u = ") and rows.keys() == {UX, UXX}, line
    for term, truth in ((UX, -1.0), (UXX, NU)):
        assert abs(rows[term][0] - truth) <= rows[term][1] < 0.2 * abs(truth), line


def test_noise_of_measurement_is_not_stated_as_a_drift():
    """u_t = 0.002 u_xx at rest almost, under white noise of measurement alone: what one frame leaves the next
    one gives back. What is stated, if anything, is true."""
    x = torch.arange(CELLS, dtype=torch.float64) / CELLS
    phase = torch.rand(40, 1, 1, generator=generator(0, "phases"), dtype=torch.float64)
    t = 0.05 * torch.arange(FRAMES, dtype=torch.float64)[:, None]
    u = torch.exp(-0.002 * (2 * math.pi) ** 2 * t) * torch.sin(2 * math.pi * (x + phase))
    u = u + 0.1 * torch.randn(u.shape, generator=generator(1, "noise"), dtype=torch.float64)
    lines = [
        line
        for _, _, base in found(Trajectories(u[:, :, None], DT, 1.0))
        for line in base.findings(["u"], ["x"])
    ]
    stated = [re.fullmatch(r"∂t u = \((\S+) ± (\S+)\) ∂xx u", line) for line in lines if "±" in line]
    assert all(row and abs(float(row[1]) - 0.002) <= float(row[2]) < 0.002 for row in stated), lines


def test_its_forecast_is_the_mean_of_the_law(base, data):
    """A hundredth of the noise's variance is 0.5 % of CRPS."""
    still = Equation(num_values=1, num_channels=1, space=[CELLS], boundary="periodic")
    assert excess(base, states(1, 64), data) < 0.002 < 0.1 < excess(still, states(1, 64), data)


def test_no_drift_is_fitted_to_quiet_data(monkeypatch):
    """What the next frame holds beyond the equation is less than half of the change."""
    monkeypatch.setattr(Drift, "model", lambda _: pytest.fail("fitted"))
    x = torch.arange(64, dtype=torch.float64) / 64
    phases = torch.rand(16, 1, 1, generator=generator(0, "phases"), dtype=torch.float64)
    t = 0.02 * torch.arange(12, dtype=torch.float64)[:, None]
    u = torch.sin(2 * torch.pi * (x - t + phases)) + 0.3 * torch.cos(4 * torch.pi * (x - t + 2 * phases))
    assert len(found(Trajectories(u[:, :, None], 0.02, 1.0))) == 1


def test_a_weight_within_its_error_goes_and_one_beyond_stays():
    """Columns of noise beside two that count: of unit residuals a weight's standard error is 1 / its column's
    length."""
    rng = generator(0, "columns")
    x = torch.randn(8, 4000, generator=rng, dtype=torch.float64)
    y = 0.5 * x[2] + 0.3 * x[5] + torch.randn(4000, generator=rng, dtype=torch.float64)
    rows = torch.cat([x, y[None]])
    a = rows @ rows.T
    assert significant(a, list(range(8)), 12.0) == [2, 5]
    assert significant(a, list(range(8)), 25.0) == [2]
    assert len(significant(a, list(range(8)), 12.0, max_dropped=2)) == 6


@pytest.mark.faults  # five seconds: of the slow half
def test_a_drift_of_frames_with_noise_of_measurement_is_not_stated():
    data = Trajectories(noisy(fisher(40)[:, :12], 0.5), 0.1, 10.0)
    one = integrated(data)
    fit = Drift(one, data.samples, 0)
    assert fit.certainty(fit.model()).doubt == UNCLEAR
