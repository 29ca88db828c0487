"""A coefficient given noisy values, block means or the solution (ups/generative/inversion.py), against the
formula where that is linear and against quadrature where it is not."""

from types import SimpleNamespace

import pytest
import torch
from known_answers import stream
from test_steady_prior import exact_linear, gaussian
from torch import Tensor

from ups.generative import inversion
from ups.generative.inversion import FEW, _as_trained, sample_coefficients
from ups.generative.observation import Measured

NUM = 8192


def sampled(h, y: Tensor, noise: Tensor, cells: int, num: int, is_linear: bool) -> tuple[Tensor, float]:
    """(samples (num, cells), accepted) of a field of `gaussian`."""
    steps = 1 if is_linear else 1 + len(inversion.PROPOSALS)
    rng = stream("white")
    white, eta = (torch.randn(steps, num, *size, generator=rng) for size in ((1, cells), (len(y),)))
    linear = exact_linear(gaussian(cells), cells, (1, cells))
    v, accepted = sample_coefficients(linear, h, y, noise, white, eta.double(), rng, is_linear)
    return v.flatten(1), accepted


def test_block_means_and_noisy_cells_have_the_posterior_of_the_formula():
    """Means of four cells and single cells, each value with a noise of its own, one exact."""
    a = torch.zeros(5, 16, dtype=torch.float64)
    a[0, :4] = a[1, 8:12] = 0.25
    a[2, 6] = a[3, 13] = a[4, 15] = 1
    y, noise = (
        torch.tensor([1.0, -0.5, 0.3, 2.0, 0.1]).double(),
        torch.tensor([0.3, 0.1, 1.0, 0.0, 0.05]).double(),
    )
    v, accepted = sampled(lambda v: v.flatten(1) @ a.float().T, y, noise, 16, NUM, True)
    covariance = gaussian(16)
    gain = torch.linalg.solve(a @ covariance @ a.T + torch.diag(noise**2), a @ covariance).T
    mean, rest = gain @ y, covariance - gain @ a @ covariance
    error = 5 * (rest.diagonal().max() / NUM) ** 0.5 + 1e-3
    assert (v.mean(0) - mean).abs().max() < error and (torch.cov(v.T) - rest).abs().max() < error
    assert (v[:, 13] - 2).abs().max() < 1e-3 and accepted == 1


def test_a_nonlinear_measurement_has_the_posterior_of_quadrature_and_that_of_its_tangent_is_refused(
    monkeypatch,
):
    """Exponentials with much noise: mean and standard deviation of both cells on a grid of 400 x 400."""
    y, noise = torch.tensor([0.2, 3.0]).double(), torch.tensor([0.5, 1.0]).double()

    def h(v: Tensor) -> Tensor:
        return v.flatten(1).cumsum(1).exp()

    grid = torch.cartesian_prod(*[torch.linspace(-5, 5, 400).double()] * 2)
    prior = (grid @ torch.linalg.inv(gaussian(2)) * grid).sum(1)
    weight = torch.softmax(-0.5 * (prior + ((h(grid) - y) / noise).square().sum(1)), 0)
    mean = weight @ grid
    std = (weight @ (grid - mean).square()).sqrt()

    def error() -> float:
        v, accepted = sampled(h, y, noise, 2, 4096, False)
        assert accepted > FEW
        return float(torch.stack([(v.mean(0) - mean) / std, v.std(0) / std - 1]).abs().max())

    assert error() < 0.08
    monkeypatch.setattr(inversion, "PROPOSALS", ((1e-9, 1.0),))
    assert error() > 0.16


def test_a_coefficient_of_two_values_is_measured_as_its_posterior_was_trained_and_else_refused():
    codec = SimpleNamespace(std=torch.tensor([0.4]), positive=(), normalise=lambda a: a)
    a, all_cells, none = torch.full((2, 1, 8, 8), 0.1), torch.ones(2, 1, 8, 8).bool(), torch.zeros(2, 1, 8, 8)
    for noise, block in ((0.04 + none, 1), (none, 2)):
        found = _as_trained("darcy2d", codec, Measured(a, all_cells, noise, block), None)
        assert found.facts.tolist() == [pytest.approx([1, 2.5 * float(noise[0, 0, 0, 0]), block - 1])] * 2
    some = Measured(a, all_cells & (torch.arange(8) < 4), 0.04 + none)
    for measured, solution in ((some, None), (Measured(a, all_cells, none, 3), None), (some, some)):
        with pytest.raises(ValueError, match="darcy2d has a coefficient of two values, .*; expected exact"):
            _as_trained("darcy2d", codec, measured, solution)
