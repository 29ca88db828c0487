"""The linear posterior of a field that is observed in part (ups/generative/linear_posterior.py) is that of
the formula, and its covariance is found from few fields. tests/test_chain.py has the prior over it beside its
exact posterior."""

from __future__ import annotations

import functools

import pytest
import torch
from known_answers import stream
from torch import Tensor

from ups.generative import linear_posterior
from ups.generative.linear_posterior import LinearPosterior
from ups.generative.observation import Observation, observe, observe_cells, row_generators
from ups_discovery import spectral

pytestmark = pytest.mark.drawn

NUM = 8192
LEVELS = {
    "none": (0.0, 0.0, 1),
    "points": (0.25, 0.0, 1),
    "coarse": (1.0, 0.0, 2),
    "noisy": (1.0, 0.4, 1),
    "some, noisy": (0.5, 0.4, 1),
}


def gaussian(cells: int = 16, rough: float = 0.0) -> Tensor:
    """Covariance (cells, cells) of a smooth field on an interval, its spectrum falling by orders."""
    x = torch.arange(cells, dtype=torch.float64) / cells
    return torch.exp(-(x[:, None] - x).abs() / 0.4) + rough * torch.eye(cells, dtype=torch.float64)


def given(covariance: Tensor, found: Observation, row: int = 0) -> tuple[Tensor, Tensor]:
    """Mean (cells,) and covariance (cells, cells) of the field given a row of an observation, written out."""
    groups = found.groups[row]
    a = torch.zeros(len(groups), len(covariance), dtype=torch.float64).scatter_(
        1, groups, 1 / groups.shape[1]
    )
    inner = a @ covariance @ a.T + float(found.facts[row, 1]) ** 2 * torch.eye(len(a), dtype=torch.float64)
    gain = torch.linalg.solve(inner, a @ covariance).T
    return gain @ found.values[row].flatten()[groups[:, 0]].double(), covariance - gain @ a @ covariance


def posterior_of(linear: LinearPosterior, found: Observation, count: int) -> tuple[Tensor, ...]:
    """(mean, spread, mean of draws, covariance of draws) of one row, flat, float64."""
    noise = torch.randn(1, count, 2, *linear.shape, generator=torch.Generator().manual_seed(1))
    mean, spread, draws = (part[0].double() for part in linear(found, noise))
    draws = draws.flatten(1)
    return mean.flatten(), spread.flatten(), draws.mean(0), torch.cov(draws.T)


def exact_linear(covariance: Tensor, num_modes: int, shape: tuple[int, ...]) -> LinearPosterior:
    """That of a known covariance: its leading modes, the rest the same for every cell."""
    variance, basis = (part.flip(-1) for part in torch.linalg.eigh(covariance))
    linear = LinearPosterior(shape, num_modes)
    left = max(
        float(variance[num_modes:].mean()) if num_modes < len(variance) else 0.0,
        linear_posterior.MIN_VARIANCE,
    )
    linear.variance.copy_((variance[:num_modes] - left).clamp_min(0))
    linear.basis.copy_(basis[:, :num_modes])
    linear.residual_variance.fill_(left)
    return linear


@pytest.mark.parametrize("num_modes", [16, 12])
@pytest.mark.parametrize("case", LEVELS)
def test_the_linear_posterior_and_its_samples_follow_the_formula(case, num_modes):
    linear = exact_linear(gaussian(), num_modes, (1, 16))
    covariance = (
        linear.basis * linear.variance @ linear.basis.T + linear.residual_variance * torch.eye(16)
    ).double()
    v = (torch.linalg.cholesky(covariance) @ torch.randn(16, generator=stream("field"), dtype=torch.float64))[
        None, None
    ].float()
    found = observe(
        v, torch.tensor([LEVELS[case]], dtype=torch.float64), row_generators(0, case, rows=range(1))
    )
    mean, spread, drawn, cov = posterior_of(linear, found, NUM)
    assert torch.equal(linear.guess(found), linear(found).mean)
    mean_ref, cov_ref = given(covariance, found)
    torch.testing.assert_close(mean, mean_ref, rtol=0, atol=2e-4)
    torch.testing.assert_close(spread, cov_ref.diagonal().clamp_min(0).sqrt(), rtol=0, atol=2e-3)
    error = 5 * (cov_ref.diagonal().max() / NUM) ** 0.5 + 1e-3
    assert (drawn - mean_ref).abs().max() < error and (cov - cov_ref).abs().max() < error
    # draws that look at nothing are caught
    assert case == "none" or (cov - covariance).abs().max() > 5 * error


def test_two_channels_are_observed_together_and_inform_each_other():
    own = gaussian(8)
    covariance = torch.cat([torch.cat([own, 0.8 * own], 1), torch.cat([0.8 * own, own], 1)])
    linear = exact_linear(covariance, 16, (2, 8))
    v = torch.randn(1, 2, 8, generator=stream("channels"))
    mask = (torch.arange(8) % 3 == 0).float()[None, None]
    found = observe_cells(v, mask)
    cells = torch.nonzero(mask.expand(1, 2, 8).flatten())[:, 0]
    gain = torch.linalg.solve(covariance[cells][:, cells], covariance[cells]).T
    torch.testing.assert_close(
        linear(found).mean.flatten().double(), gain @ v.flatten()[cells].double(), rtol=0, atol=2e-3
    )


def test_the_posterior_from_few_fields_is_calibrated():
    """Half of the cells seen, fields hardly more than cells; the fake measures variances on the fields that
    made the patterns."""
    fields = drawn(uneven(32), 4400, "few")
    few, v, many = fields[:40], fields[40:400], fields[400:]
    mask = (torch.arange(32) % 2 == 0).float().expand(len(v), 1, 32)

    def calibration(linear: LinearPosterior) -> float:
        mean, spread, _ = linear(observe_cells(v, mask))
        return float(((v - mean)[mask == 0] / spread[mask == 0]).square().mean())

    assert 0.6 < calibration(LinearPosterior.fit(few)) < 1.6
    assert 0.9 < calibration(LinearPosterior.fit(many)) < 1.1

    sample = LinearPosterior.fit(few)
    off = few.flatten(1).double() - sample.mean
    sample.variance.copy_((off @ sample.basis.double()).square().mean(0))
    assert calibration(sample) > 2.5


def drawn(covariance: Tensor, count: int, name: str) -> Tensor:
    """Fields (count, 1, cells) of a covariance."""
    white = torch.randn(count, len(covariance), generator=stream(name), dtype=torch.float64)
    return (white @ torch.linalg.cholesky(covariance).T).float()[:, None]


def uneven(cells: int) -> Tensor:
    """A covariance of no waves: every second cell varies 0.3 times as much."""
    size = torch.where(torch.arange(cells) % 2 == 0, 1.0, 0.3).double()
    return gaussian(cells) * size[:, None] * size


def divergence(linear: LinearPosterior, covariance: Tensor) -> float:
    """Kullback-Leibler divergence of N(0, covariance) from what was fitted, nats."""
    variance, basis = (linear.variance + linear.residual_variance).double(), linear.basis.double()
    along = torch.einsum("ik,ij,jk->k", basis, covariance, basis) / variance
    return 0.5 * float(along.sum() - len(variance) + variance.log().sum() - torch.logdet(covariance))


@pytest.mark.parametrize("num_axes", [1, 2])
def test_a_stationary_covariance_is_recovered_from_few_fields(monkeypatch, num_axes):
    """An eighth of the components' divergence from 64 cosines under 100 fields. The fake, waves where they
    are not those of the field, is refused: a field of uneven cells has its components, and forced on waves it
    is further off."""
    shape = (64,) if num_axes == 1 else (8, 8)
    variance = torch.logspace(0, -4, 64, dtype=torch.float64)
    basis = functools.reduce(torch.kron, [spectral.cosine(n) for n in shape]).T
    cosines = basis * variance @ basis.T

    def found(covariance: Tensor, waves: tuple, are_components: bool = True) -> float:
        monkeypatch.setattr(linear_posterior, "WAVES", waves)
        if not are_components:
            monkeypatch.setattr(
                linear_posterior,
                "component_basis",
                functools.partial(linear_posterior.wave_basis, rows=waves[0]),
            )
        linear = LinearPosterior.fit(drawn(covariance, 100, "waves").view(-1, 1, *shape))
        monkeypatch.undo()
        return divergence(linear, covariance)

    every = linear_posterior.WAVES
    assert found(cosines, every) < found(cosines, ()) / 8
    of_uneven = found(uneven(64), every)
    assert of_uneven == found(uneven(64), ())
    assert of_uneven < found(uneven(64), (spectral.cosine,), are_components=False) / 2


def test_truncated_components_share_one_residual_variance(monkeypatch):
    monkeypatch.setattr(linear_posterior, "MODES", 6)
    covariance = gaussian(24, rough=0.05)
    fields = (
        torch.randn(3000, 24, generator=stream("many"), dtype=torch.float64)
        @ torch.linalg.cholesky(covariance).T
    ).float()
    linear = LinearPosterior.fit(fields.view(-1, 1, 24))
    assert linear.basis.shape == (24, 6)
    basis = linear.basis.double()
    outside = float(covariance.trace() - (basis.mT @ covariance @ basis).trace()) / 18
    # of what is outside the patterns found, and these are nearly the best
    assert abs(float(linear.residual_variance) / outside - 1) < 0.1
    assert outside < 1.5 * float(torch.linalg.eigvalsh(covariance)[:-6].mean())
    whole = linear.variance.sum() + 24 * linear.residual_variance
    assert abs(float(whole) / float(covariance.trace()) - 1) < 0.1
