"""The mixture of two scales: its fit, flow and map on residuals with a known law, and its selection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ups.generative.diffusion import PURE_NOISE, denoise, diffuse, sample, sample_angles
from ups.generative.law import ScaleMixture, Waves
from ups_discovery.seeds import generator

RARE, NARROW, WIDE = 0.05, (0.05, 0.1), (3.0, 5.0)
NUM, TOKENS = 4096, (4, 4)


def events(num: int = NUM, key: int = 0) -> tuple[Tensor, Tensor]:
    """(residuals (num, *TOKENS, 2) of the two scales, whether a token has an event (num, *TOKENS))."""
    rng = generator(key, "events")
    is_event = torch.rand(num, *TOKENS, generator=rng) < RARE
    scale = torch.where(is_event[..., None], torch.tensor(WIDE), torch.tensor(NARROW))
    return scale * torch.randn(num, *TOKENS, 2, generator=rng), is_event


def fitted() -> ScaleMixture:
    mixture = ScaleMixture(2)
    mixture.fit(events(key=1)[0])
    return mixture


def no_network(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)


def quantiles(r: Tensor) -> Tensor:
    """Of |r| per component, from the bulk to the tail."""
    return r.flatten(0, -2).abs().quantile(torch.tensor([0.5, 0.9, 0.97, 0.99]), 0)


def test_the_fit_finds_both_scales_and_the_rate():
    mixture = fitted()
    torch.testing.assert_close(mixture.std, torch.tensor([NARROW, WIDE]), rtol=0.05, atol=0)
    assert float(mixture.log_odds.sigmoid()) == pytest.approx(RARE, rel=0.05)


def test_the_likelihood_is_that_of_the_density():
    mixture, (r, _) = fitted(), events(64)
    parts = [
        torch.distributions.Normal(0, scale.double()).log_prob(r.double()).sum(-1) for scale in mixture.std
    ]
    odds = mixture.log_odds.double()
    log_density = torch.logaddexp(
        parts[0] + torch.nn.functional.logsigmoid(-odds), parts[1] + torch.nn.functional.logsigmoid(odds)
    )
    expected = -log_density.mean() / 2 - 0.5 * math.log(2 * math.pi)
    assert float(mixture.negative_log_likelihood(r)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("steps", [64, 0])
def test_flow_and_map_without_a_network(steps):
    """The flow samples the law, bulk and tail. The fake, a Gaussian of the same variance, has neither. The
    map has both scales, mixed in a token: where its noise comes from is the network's."""
    mixture, (r, _), noise = fitted(), events(key=2), torch.randn(NUM, *TOKENS, 2, generator=generator(3))
    if steps:
        found = sample(lambda x, angle: mixture.flow(x, angle, no_network(x)), noise, steps)
        torch.testing.assert_close(quantiles(found), quantiles(r), rtol=0.15, atol=0)
        waves = Waves(TOKENS, 2, "periodic")
        waves.fit(r)
        gaussian = quantiles(sample(lambda x, angle: waves.flow(x, angle, 0 * x), noise, steps))
        assert (gaussian[0] > 10 * quantiles(r)[0]).all() and (gaussian[3] < 0.7 * quantiles(r)[3]).all()
    else:
        angle = torch.full((NUM,), PURE_NOISE)
        rest = no_network(noise)
        for logit, scale in ((-40.0, NARROW), (40.0, WIDE)):
            rest[..., -1] = logit
            found = denoise(lambda x, angle, rest=rest: mixture.map(x, angle, rest), noise, angle)
            torch.testing.assert_close(found, torch.tensor(scale) * noise, rtol=0.1, atol=1e-3)


def test_no_network_lowers_the_loss_on_independent_tokens():
    """The flow is the posterior mean: multiples of it, and other log-odds, have a larger error."""
    mixture, (r, _) = fitted(), events(key=4)
    noise, angle = torch.randn(r.shape, generator=generator(5)), sample_angles(NUM, generator(6))
    x, at = diffuse(r, noise, angle), angle.view(-1, 1, 1, 1)

    def loss(logit: float = 0.0, factor: float = 1.0) -> float:
        rest = no_network(x)
        rest[..., -1] = logit
        error = factor * mixture.flow(x, angle, rest) - (at.cos() * noise - at.sin() * r)
        return float(error.square().mean())

    best = loss()
    assert all(best < loss(*change) for change in ((2.0,), (-2.0,), (0.0, 0.9), (0.0, 1.1)))


def test_the_likelihood_of_waves_is_that_of_their_gaussian():
    """Of white noise it is 1/2 for every grid, odd or even, and it tells localized from smooth residuals."""
    for tokens, boundary in (((8,), "periodic"), ((7, 6), "periodic"), ((6, 5), "neumann,periodic")):
        waves = Waves(tokens, 3, boundary)
        r = torch.randn(4096, *tokens, 3, generator=generator(7))
        assert float(waves.negative_log_likelihood(r)) == pytest.approx(0.5, abs=0.01)
        waves.fit(2.0 * r)
        assert float(waves.negative_log_likelihood(2.0 * r)) == pytest.approx(0.5 + math.log(2.0), abs=0.02)
    r, smooth = events(key=8)[0], torch.randn(NUM, 1, 1, 2, generator=generator(9)).expand(-1, *TOKENS, -1)
    smooth = smooth + 0.1 * torch.randn(NUM, *TOKENS, 2, generator=generator(10))
    gains = []
    for part in (r, smooth):
        waves, mixture = Waves(TOKENS, 2, "periodic"), ScaleMixture(2)
        waves.fit(part)
        mixture.fit(part)
        gains.append(float(waves.negative_log_likelihood(part) - mixture.negative_log_likelihood(part)))
    assert gains[0] > 1 and gains[1] < 0
