"""Climate statistics (ups/metrics/climate.py) against closed forms, and a fake for each of them."""

import math

import pytest
import torch
from torch import Tensor

from ups.metrics.climate import NUM_QUANTILES, climate, memory, quantiles

DECAY = 0.8  # of a frame


def process(seed: int, size: float = 1.0, decay: float = DECAY, smooth: bool = True) -> Tensor:
    """(8, 300, 1, 32): independent trajectories of an Ornstein-Uhlenbeck process whose fields have a 1/k^2
    spectrum."""
    draws = torch.Generator().manual_seed(seed)
    shape = 1 / (1 + torch.fft.rfftfreq(32, 1 / 32)) if smooth else torch.ones(17)
    noise = torch.fft.irfft(torch.fft.rfft(torch.randn(400, 8, 1, 32, generator=draws)) * shape, n=32)
    frames = [noise[0]]
    for one in noise[1:]:
        frames.append(decay * frames[-1] + math.sqrt(1 - decay**2) * one)
    u = torch.stack(frames[100:], 1)
    return size * u / noise.std()


@pytest.fixture(scope="module")
def truth() -> Tensor:
    return process(0)


def test_another_run_of_the_same_process_has_its_statistics(truth):
    found = climate(process(1), truth, "periodic")
    assert abs(found["variance"] - 1) < 0.15 and abs(found["memory"] - 1) < 0.15
    assert found["spectrum_error"] < 0.06 and found["distance"] < 0.1


def test_memory_is_that_of_the_closed_form_and_quantiles_are_those_of_a_normal(truth):
    assert float(memory(process(2))) == pytest.approx(-1 / math.log(DECAY), rel=0.12)
    normal = quantiles(torch.randn(20, 50, 1, 400, generator=torch.Generator().manual_seed(0)))[0]
    assert float(normal[NUM_QUANTILES // 2]) == pytest.approx(0, abs=0.01)
    assert float(normal[round(0.975 * NUM_QUANTILES)]) == pytest.approx(1.96, abs=0.03)


@pytest.mark.parametrize(
    ("fake", "figure", "least"),
    [
        (lambda: process(1, size=1.2), "variance", 0.3),
        (lambda: process(1) + 0.3, "distance", 0.2),
        (lambda: process(1, smooth=False), "spectrum_error", 0.2),
        (lambda: process(1, decay=0.1), "memory", 0.5),
        (lambda: process(1)[:, :1].expand(-1, 300, -1, -1), "memory", 5.0),
    ],
    ids=["too strong", "shifted", "white in space", "white in time", "frozen"],
)
def test_each_statistic_refuses_its_fake(truth, fake, figure, least):
    right, found = (climate(u, truth, "periodic")[figure] for u in (process(1), fake()))
    assert abs(found - right) > least, (right, found)


def test_statistics_of_fields_that_are_not_finite_are_infinite(truth):
    broken = truth.clone()
    broken[0, 5, 0, 3] = math.nan
    assert set(climate(broken, truth, "periodic").values()) == {math.inf}
