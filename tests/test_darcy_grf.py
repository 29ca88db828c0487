"""darcy2d_grf: its Gaussian field against the formula, exact conditional samples against the closed form, its
data files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from known_answers import posterior
from torch import Tensor

from ups_solvers import SOLVERS, darcy, darcy_grf
from ups_solvers.darcy_grf import LinearObservation, draw_log_coefficients

NUM = 4000


def covariance(n: int) -> Tensor:
    """sum_k lambda_k phi_k phi_k' written out with cosines, (n^2, n^2)."""
    centres = (np.arange(n) + 0.5) / n
    x, y = (axis.ravel() for axis in np.meshgrid(centres, centres, indexing="ij"))
    total, weight = np.zeros((n * n, n * n)), 0.0
    for k1 in range(n):
        for k2 in range(n):
            size = 1.0 / (math.pi**2 * (k1**2 + k2**2) + 9.0) ** 2
            phi = np.cos(math.pi * k1 * x) * np.cos(math.pi * k2 * y) * math.sqrt(2) ** ((k1 > 0) + (k2 > 0))
            total, weight = total + size * np.outer(phi, phi), weight + size
    return torch.from_numpy(total / weight)


def observed(kind: str, g: Tensor) -> LinearObservation:
    """A partial observation of g (n, n); noise has a fixed seed."""
    n, source = len(g), torch.Generator().manual_seed(1)
    single = torch.arange(n * n)[:, None]
    blocks = single.view(n // 4, 4, n // 4, 4).transpose(1, 2).reshape(-1, 16)
    some = single[torch.randperm(n * n, generator=source)[:9]]
    cells, noise = {
        "none": (single[:0], 0.0),
        "points": (some, 0.0),
        "coarse": (blocks, 0.0),
        "noisy": (single, 0.3),
        "noisy points": (single[::7], 0.5),
        "full": (single, 0.0),
    }[kind]
    values = g.flatten()[cells].mean(1)
    return LinearObservation(
        n, cells, values + noise * torch.randn(len(cells), generator=source, dtype=torch.float64), noise
    )


def largest_deviation(g: Tensor, mean: Tensor, cov: Tensor) -> float:
    """Of the sample mean and covariance of g (num, n, n) from the given ones, in standard errors.

    Cells without variance must agree to 1e-6.
    """
    rows, num = g.flatten(1) - mean.flatten(), len(g)
    free = cov.diagonal() > 1e-9
    assert not bool((rows[:, ~free].abs() > 1e-6).any())
    rows, cov = rows[:, free], cov[free][:, free]
    if not free.any():
        return 0.0
    variance = cov.diagonal()
    of_mean = rows.mean(0).abs() / (variance / num).sqrt()
    error = torch.sqrt((variance[:, None] * variance[None, :] + cov**2) / num)
    return max(float(of_mean.max()), float(((rows.T @ rows / num - cov).abs() / error).max()))


# ----------------------------------------------------------------------------------------- the Gaussian field


@pytest.mark.parametrize("n", [8, 12])
def test_the_covariance_is_the_sum_over_cosines_and_its_mean_variance_one(n: int) -> None:
    unit = torch.eye(n * n, dtype=torch.float64).view(n * n, n, n)
    matrix = darcy_grf.apply_covariance(unit).flatten(1)
    torch.testing.assert_close(matrix, covariance(n), rtol=0, atol=1e-13)
    assert float(matrix.diagonal().mean()) == pytest.approx(1.0, abs=1e-13)


def test_samples_have_that_covariance_and_the_mean_zero() -> None:
    g = torch.stack([darcy_grf.sample_log_coefficient(5, index, 8) for index in range(NUM)])
    # the largest of 4000 deviations: 4 to 5 is expected
    assert largest_deviation(g, torch.zeros(8, 8), covariance(8)) < 5
    assert largest_deviation(1.1 * g, torch.zeros(8, 8), covariance(8)) > 7  # a tenth more would be seen


# --------------------------------------------------------------------------------------------------- the task


def test_the_solution_satisfies_darcys_equation_for_exp_g() -> None:
    a = torch.stack([darcy_grf.sample_log_coefficient(0, index, 32).exp() for index in range(4)])
    assert a.min() > 0 and a.std() > 0.3
    u = darcy.solve(a, torch.ones(()))
    assert (darcy.apply_operator(a, u) - 1).abs().max() <= 1e-8 and u.min() > 0
    fields = SOLVERS["darcy2d_grf"].simulate(
        range(4), seed=0, resolution=32, num_frames=1, parameter=2.0, t_end=0.0
    )
    assert torch.equal(fields[:, 0, 0], a.float())
    torch.testing.assert_close(fields[:, 0, 1], (2 * u).float(), rtol=1e-6, atol=0)


# --------------------------------------------------------------------------------- the field given part of it


@pytest.mark.parametrize("kind", ["none", "points", "coarse", "noisy", "noisy points", "full"])
def test_the_posterior_is_the_formula_and_the_samples_follow_it(kind: str) -> None:
    g = darcy_grf.sample_log_coefficient(1, 0, 8)
    observation, prior = observed(kind, g), covariance(8)
    a = observation.matrix
    gain = (
        prior
        @ a.T
        @ torch.linalg.inv(a @ prior @ a.T + observation.noise**2 * torch.eye(len(a), dtype=torch.float64))
    )
    mean, cov = posterior(observation)
    torch.testing.assert_close(mean.flatten(), gain @ observation.values, rtol=0, atol=1e-8)
    torch.testing.assert_close(cov, prior - gain @ a @ prior, rtol=0, atol=1e-8)
    torch.testing.assert_close(a @ g.flatten(), observation.apply(g))
    samples = draw_log_coefficients(observation, NUM, seed=11)
    assert largest_deviation(samples, mean, cov) < 5


def test_a_sampler_that_ignores_the_observation_or_its_noise_is_caught() -> None:
    observation = observed("noisy points", darcy_grf.sample_log_coefficient(1, 0, 8))
    ignored = draw_log_coefficients(observed("none", torch.zeros(8, 8, dtype=torch.float64)), NUM, seed=12)
    assert largest_deviation(ignored, *posterior(observation)) > 20
    exact = LinearObservation(8, observation.cells, observation.values, 0.1)  # trusted more than it deserves
    assert largest_deviation(draw_log_coefficients(exact, NUM, seed=12), *posterior(observation)) > 20


def test_members_agree_with_the_observation_solve_the_equation_and_differ_elsewhere() -> None:
    observation = observed("coarse", darcy_grf.sample_log_coefficient(3, 5, 32))
    a, u = darcy_grf.posterior(vars(observation), 8, 2, 3.0)
    torch.testing.assert_close(
        observation.apply(a.log()), observation.values.expand(8, -1), rtol=0, atol=1e-9
    )
    assert (darcy.apply_operator(a, u) - 3).abs().max() <= 1e-7
    assert a.log().std(0).mean() > 0.01 and u.std(0).min() > 0
    again, _ = darcy_grf.posterior(vars(observation), 3, 2, 3.0)
    torch.testing.assert_close(again, a[:3], rtol=0, atol=1e-12)
    assert not torch.allclose(darcy_grf.posterior(vars(observation), 3, 3, 3.0)[0], a[:3])


def test_the_posterior_is_calibrated_for_fields_of_the_prior() -> None:
    """(g - m) / sd over many fields: mean zero, variance one at every cell."""
    scores = []
    for index in range(600):
        g = darcy_grf.sample_log_coefficient(8, index, 8)
        mean, cov = posterior(observed("points", g))
        scores.append(
            ((g - mean).flatten()[::5] / cov.diagonal()[::5].clamp_min(1e-9).sqrt())[
                cov.diagonal()[::5] > 1e-9
            ]
        )
    z = torch.stack(scores)
    assert z.mean(0).abs().max() * math.sqrt(600) < 4
    assert (z.square().mean(0) - 1).abs().max() / math.sqrt(2 / 600) < 4
