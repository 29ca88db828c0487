"""The ensemble Kalman smoother (ups/generative/filtering.py) against exact answers: the Kalman smoother of a
linear Gaussian model, written as one joint Gaussian, and a large particle filter of a nonlinear one."""

import pytest
import torch
from known_answers import stream
from torch import Tensor

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
