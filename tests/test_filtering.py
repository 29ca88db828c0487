"""The ensemble Kalman smoother (ups/generative/filtering.py) against exact answers: the Kalman smoother of a
linear Gaussian model, written as one joint Gaussian, and a large particle filter of a nonlinear one."""

import numpy as np
import pytest
import torch
from known_answers import stream
from torch import Tensor

import ups
from ups.analysis import taper
from ups.common.place import ROOT
from ups.generative.filtering import ENSEMBLE, smoothed

pytestmark = pytest.mark.drawn

CELLS, FRAMES, AT, NOISE, NUM_CASES = 8, 6, (0, 3, 6), 0.3, 60
OBSERVED = (2, 4, 6)


def normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def kalman_error_and_coverage(num: int, is_updated: bool = True) -> tuple[float, float, Tensor]:
    """RMS error of the means over that of the exact smoother, fraction of the truths in 90 % intervals, and
    covariance of the last case over the exact one; x_n+1 = M x_n + noise from x_0 = 0."""
    rng = stream("linear")
    m = 0.95 * torch.linalg.qr(normal(CELLS, CELLS, rng=rng))[0]
    paths = torch.zeros(FRAMES * CELLS, FRAMES * CELLS, dtype=torch.float64)  # of all noises
    for n in range(FRAMES):
        for k in range(n + 1):
            power = torch.linalg.matrix_power(m, n - k)
            paths[n * CELLS : (n + 1) * CELLS, k * CELLS : (k + 1) * CELLS] = power
    prior = paths @ paths.mT
    at = torch.tensor([(n - 1) * CELLS + cell for n in OBSERVED for cell in AT])
    inner = prior[at][:, at] + NOISE**2 * torch.eye(len(at))
    gain = torch.linalg.solve(inner, prior[at]).mT
    rest = prior - gain @ prior[at]
    errors, exact, inside = [], [], []
    for _ in range(NUM_CASES):
        truth = paths @ normal(FRAMES * CELLS, rng=rng)
        y = truth[at] + NOISE * normal(len(at), rng=rng)

        def segment(done: Tensor | None, number: int) -> Tensor:
            frames = [torch.zeros(num, CELLS, dtype=torch.float64)] if done is None else [done[:, -1]]
            for _ in range(number - (0 if done is None else done.shape[1])):
                frames.append(frames[-1] @ m.mT + normal(num, CELLS, rng=rng))
            return torch.stack(frames[1:], 1)

        size, parts = torch.full((len(AT),), NOISE).double(), y.split(len(AT))
        measured = {n: (part, size) for n, part in zip(OBSERVED, parts, strict=True)}

        def eta(number: int, count: int) -> Tensor:
            return normal(num, count, rng=rng)

        given = measured if is_updated else {}
        x = smoothed(segment, lambda state, _: state[:, AT], given, eta, FRAMES)[0].flatten(1)
        errors.append((x.mean(0) - truth).square().mean())
        exact.append((gain @ y - truth).square().mean())
        low, high = x.quantile(torch.tensor([0.05, 0.95]).double(), 0)
        inside.append(((low < truth) & (truth < high)).double().mean())
    ratio = (torch.stack(errors).mean() / torch.stack(exact).mean()).sqrt()
    scale = rest.diagonal().sqrt()
    off = (torch.cov(x.T) - rest) / torch.outer(scale, scale)
    return float(ratio), float(torch.stack(inside).mean()), off


def test_members_have_the_error_and_intervals_of_the_kalman_smoother_and_a_free_forecast_has_not():
    ratio, coverage, covariance = kalman_error_and_coverage(ENSEMBLE)
    assert ratio < 1.05 and 0.85 < coverage < 0.95 and covariance.abs().max() < 6.5 * (2 / ENSEMBLE) ** 0.5
    assert kalman_error_and_coverage(64, is_updated=False)[0] > 1.3


def test_a_nonlinear_model_is_smoothed_nearly_as_by_a_large_particle_filter():
    """x_n+1 = x_n + 0.5 sin(2 x_n) + 0.5 noise, with two wells beside each other, y = x + 0.5 noise."""
    rng, times, size = stream("wells"), range(1, 9), 0.5

    def next_state(x: Tensor) -> Tensor:
        return x + 0.5 * (2 * x).sin() + size * normal(*x.shape, rng=rng)

    errors, inside = [], []
    for _ in range(100):
        x, y, path = torch.zeros(1, dtype=torch.float64), {}, []
        for n in times:
            path.append(x := next_state(x))
            y[n] = x + size * normal(1, rng=rng), torch.tensor([size]).double()
        particles = torch.zeros(5000, dtype=torch.float64)
        for n in times:
            particles = next_state(particles)
            weight = torch.softmax(-0.5 * ((particles - y[n][0]) / size).square(), 0)
            mean = float(weight @ particles)
            particles = particles[torch.multinomial(weight, len(particles), True, generator=rng)]

        def segment(done: Tensor | None, number: int) -> Tensor:
            start = torch.zeros(ENSEMBLE, dtype=torch.float64) if done is None else done[:, -1]
            return next_state(start)[:, None]

        def eta(number: int, count: int) -> Tensor:
            return normal(ENSEMBLE, count, rng=rng)

        found, _ = smoothed(segment, lambda state, _: state[:, None], y, eta, len(times))
        errors.append(((float(found[:, -1].mean()) - float(x)) ** 2, (mean - float(x)) ** 2))
        low, high = found.quantile(torch.tensor([0.05, 0.95]).double(), 0)
        inside.append((low < torch.cat(path)) & (torch.cat(path) < high))
    ours, exact = torch.tensor(errors).mean(0).sqrt()
    assert ours < 1.05 * exact and 0.85 < torch.cat(inside).double().mean() < 0.95


# ---- ups.assimilate: a local ensemble transform Kalman filter


class Shift:
    """A forecaster that moves a field by a cell and damps it."""

    tasks = {"shift": {"fields": ["u"], "grid": [16], "boundary": "periodic", "domain": [0.0, 1.0]}}

    @staticmethod
    def forecast(task: str, u: Tensor, parameters: None, num_frames: int) -> Tensor:
        last = u[:, -1:]
        return torch.cat([0.9**n * last.roll(n, -1) for n in range(1, num_frames + 1)], 1)


def test_a_filter_without_localisation_is_the_kalman_filter_of_its_ensemble():
    rng = stream("transform")
    members, y = normal(40, 1, 16, rng=rng), normal(2, 1, 16, rng=rng)
    mask = torch.arange(16) % 3 == 0
    given = {"frames": [1, 3], "values": torch.where(mask, y, torch.nan), "noise": 0.4}
    found = ups.assimilate(Shift, "shift", members, given)
    mean, covariance = members[:, 0].mean(0), members[:, 0].mT.cov()
    for place, (frame, steps) in enumerate(((1, 1), (3, 2))):
        mean = 0.9**steps * mean.roll(steps)
        covariance = 0.81**steps * covariance.roll((steps, steps), (0, 1))
        assert found.frames[place] == frame
        torch.testing.assert_close(found.forecast[place, 0], mean)
        inner = covariance[mask][:, mask] + 0.16 * torch.eye(6).double()
        gain = torch.linalg.solve(inner, covariance[mask]).mT
        mean, covariance = mean + gain @ (y[place, 0] - mean)[mask], covariance - gain @ covariance[mask]
        torch.testing.assert_close(found.mean[place, 0], mean)
        torch.testing.assert_close(found.spread[place, 0], covariance.diagonal().sqrt())
    torch.testing.assert_close(found.members[:, 0].mT.cov(), covariance)
    twice = ups.assimilate(Shift, "shift", members, given, inflation=1.5).spread[0]
    torch.testing.assert_close(twice, 1.5 * found.spread[0])


def test_localisation_keeps_far_cells_and_few_members_need_it():
    rng = stream("local")
    members = normal(8, 1, 16, rng=rng)
    y = torch.full((1, 1, 16), torch.nan)
    y[..., 4] = 2.0
    found = ups.assimilate(
        Shift, "shift", members, {"frames": [1], "values": y, "noise": 0.1}, radius=2.5 / 16
    )
    change = (found.mean - found.forecast)[0, 0].abs()
    assert (change[2:7] > 0).all() and float(change[8:].max()) < 1e-12 and float(change[:2].max()) < 1e-12
    assert taper(torch.tensor([0.0, 0.5, 1.0, 2.0])).tolist() == pytest.approx([1, 5 / 24, 0, 0], abs=1e-6)
    truth = normal(300, 1, 16, rng=rng).cumsum(0)[-1:]
    films = torch.cat([0.9**n * truth.roll(n, -1) for n in range(1, 9)])[:, None].view(8, 1, 16)
    given = {"frames": [*range(1, 9)], "values": films + 0.1 * normal(8, 1, 16, rng=rng), "noise": 0.1}
    first = truth[None].view(1, 1, 16) + normal(8, 1, 16, rng=rng)
    far, near = (
        float((ups.assimilate(Shift, "shift", first, given, radius=radius).mean - films)[-1].square().mean())
        for radius in (float("inf"), 3 / 16)
    )
    assert near < 0.5 * far


def test_cells_of_a_mask_have_no_value_and_change_no_other_cell(monkeypatch):
    rng, land = stream("land"), torch.arange(16).sub(6).abs() < 3
    members, y = normal(8, 1, 16, rng=rng), normal(2, 1, 16, rng=rng)
    given = {"frames": [1, 2], "noise": 0.4}

    def analysed(values: Tensor, masked: float) -> Tensor:
        mask = torch.where(land, masked, 0.0).double()
        monkeypatch.setattr(
            Shift, "forecast", staticmethod(lambda _, u, __, num: 0.9**num * u[:, -1:] + mask)
        )
        return ups.assimilate(Shift, "shift", members, {**given, "values": values}, radius=0.3).mean

    found, expected = analysed(y, torch.nan), analysed(torch.where(land, torch.nan, y), 0.0)
    assert found[..., land].isnan().all() and torch.equal(found[..., ~land], expected[..., ~land])


def test_a_filter_of_a_forecaster_takes_numpy_and_goes_on_from_its_members():
    model = ups.load(ROOT / "pretrained")
    wave = np.sin(2 * np.pi * np.arange(256) / 256)
    members = (np.linspace(0.8, 1.2, 6)[:, None, None] * wave).astype(np.float32)
    y = model.forecast("burgers1d", wave[None].astype(np.float32), {"Nu": 0.02}, 4)
    given = {"frames": [2, 4], "values": y[1::2], "noise": 0.05}
    found = ups.assimilate(model, "burgers1d", members, given, {"Nu": 0.02})
    assert isinstance(found.mean, np.ndarray) and found.members.shape == members.shape
    assert np.abs(found.mean - y[1::2]).max() < 0.02 < np.abs(found.forecast[0] - y[1]).max() + 0.02
    first = ups.assimilate(
        model, "burgers1d", members, {"frames": [2], "values": y[1:2], "noise": 0.05}, {"Nu": 0.02}
    )
    again = {"frames": [2], "values": y[3:], "noise": 0.05}
    later = ups.assimilate(model, "burgers1d", first.members, again, {"Nu": 0.02})
    np.testing.assert_allclose(later.mean[0], found.mean[1], atol=1e-4)


@pytest.mark.parametrize(
    ("ensemble", "change", "options", "text"),
    [
        (torch.zeros(4, 16), {}, {}, r"an ensemble of shape \(4, 16\); expected \(members"),
        (torch.zeros(1, 1, 16), {}, {}, "of at least 2 members"),
        (torch.zeros(4, 1, 16), {"frames": [0]}, {}, "expected ascending whole numbers from 1 on"),
        (torch.zeros(4, 1, 16), {}, {"radius": 0.0}, "expected a length above 0"),
        (torch.zeros(4, 1, 16), {}, {"inflation": 0.5}, "a factor from 1 on"),
        (torch.zeros(4, 1, 16), {}, {"inflation": torch.inf}, "a factor from 1 on"),
        (torch.zeros(4, 1, 16, requires_grad=True), {}, {}, "a tensor that requires a gradient"),
        (
            torch.zeros(4, 1, 16),
            {"frames": [1, 2], "values": torch.zeros(2, 1, 16)},
            {"forcing": {"f": torch.zeros(2)}},
            "was given forcing and 2 observed frames; expected one, up",
        ),
        (torch.full((4, 1, 16), torch.nan), {}, {}, "are not finite in frame 1; expected numbers"),
    ],
)
def test_what_a_filter_cannot_take_is_refused(ensemble, change, options, text):
    given = {"frames": [1], "values": torch.zeros(1, 1, 16), "noise": 1.0} | change
    with pytest.raises(ValueError, match=text):
        ups.assimilate(Shift, "shift", ensemble, given, **options)
