"""The linear part of a sampler (ups/generative/law.py): for a Gaussian it is the exact flow and map, and it
keeps the network inside the span of the residuals."""

import pytest
import torch
from torch import Tensor

from ups.generative import law
from ups.generative.diffusion import PURE_NOISE, denoise, diffuse, sample, sample_angles
from ups.generative.law import Waves
from ups.generative.student import sample_student
from ups_discovery.seeds import generator

NUM = 20000


def noise(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "waves", key))


def residuals(tokens: tuple[int, ...], dim: int, boundary: str, num: int = NUM, key: int = 0) -> Tensor:
    """A stationary field, correlated between the numbers of a token and between neighbours, with odd and even
    parts."""
    x = noise(num, *tokens, dim, key=key)
    mixed = x @ noise(dim, dim, key=99)
    if boundary == "periodic":
        neighbour = mixed.roll(1, 1)
        mixed = mixed + 0.8 * neighbour + 0.5 * neighbour[..., torch.arange(dim).roll(1)]
    mixed[..., -1] *= 1e-5  # almost constant
    return mixed / mixed.flatten(0, -2).std(0).clamp_min(1e-3)


def covariance(r: Tensor) -> Tensor:
    flat = r.flatten(1).double()
    return flat.T @ flat / len(flat)


CASES = [
    ((8,), 3, "periodic"),
    ((4, 4), 2, "periodic"),
    ((6,), 3, "no_flux"),
    ((4, 3), 2, "periodic,no_flux"),
]


@pytest.mark.parametrize(("tokens", "dim", "boundary"), CASES)
@pytest.mark.parametrize("is_mixed", [True, False])
def test_the_wave_transform_is_invertible_and_its_weights_load(tokens, dim, boundary, is_mixed, monkeypatch):
    if not is_mixed:
        monkeypatch.setattr(law, "LARGEST", 1)
    linear = Waves(tokens, dim, boundary)
    linear.fit(residuals(tokens, dim, boundary, 500))
    assert linear.is_mixed == is_mixed
    x = noise(5, *tokens, dim)
    torch.testing.assert_close(linear._back(linear._waves(x)), x, rtol=1e-4, atol=1e-5)
    other = Waves(tokens, dim, boundary)
    other.load_state_dict(linear.state_dict())
    torch.testing.assert_close(other.sample_gaussian(x), linear.sample_gaussian(x), rtol=0, atol=0)


def test_without_a_fit_the_flow_is_the_network_alone():
    x, rest, angle = noise(4, 8, 3), noise(4, 8, 3, key=1), torch.tensor([0.1, 0.7, 1.2, PURE_NOISE])
    linear = Waves((8,), 3, "periodic")
    torch.testing.assert_close(linear.flow(x, angle, rest), rest, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "dim", "boundary"), CASES[:2])
def test_the_linear_part_samples_a_stationary_gaussian(tokens, dim, boundary):
    """Independent numbers, and waves without the correlation inside a token, fail."""
    r = residuals(tokens, dim, boundary)
    linear = Waves(tokens, dim, boundary)
    linear.fit(r[: NUM // 2])
    exact, start = covariance(r[NUM // 2 :]), noise(NUM // 2, *tokens, dim, key=2)
    samples = {
        "gaussian": linear.sample_gaussian(start),
        "flow": sample(lambda x, angle: linear.flow(x, angle, 0 * x), start, 16),
        "map": sample_student(lambda x, angle: linear.map(x, angle, 0 * x), start),
    }
    limit = 0.06 * exact.diagonal().max()
    for name, found in samples.items():
        assert (covariance(found) - exact).abs().max() < limit, name
    # flow and map have the same end from the same noise
    torch.testing.assert_close(samples["flow"], samples["map"], rtol=0.05, atol=0.05)
    independent = Waves(tokens, dim, boundary)
    independent.std.copy_(r.flatten(0, -2).std(0).expand_as(independent.std))
    assert (covariance(independent.sample_gaussian(start)) - exact).abs().max() > 3 * limit
    linear.mix.copy_(Waves(tokens, dim, boundary).mix)
    assert (covariance(linear.sample_gaussian(start)) - exact).abs().max() > 3 * limit


def test_the_flow_is_the_optimal_linear_denoiser_and_its_rest_has_the_predicted_spread():
    tokens, dim = (8,), 3
    r = residuals(tokens, dim, "periodic")
    linear = Waves(tokens, dim, "periodic")
    linear.fit(r)
    white, angle = noise(*r.shape, key=3), sample_angles(NUM, generator(0))
    x = diffuse(r, white, angle)
    column = angle[:, None, None]
    target = column.cos() * white - column.sin() * r
    rest = target - linear.flow(x, angle, 0 * x)
    power = linear._waves(rest).abs().square().mean(0)
    expected = (
        linear.std.square() / (linear.std.square() * column.cos().square() + column.sin().square())
    ).mean(0)
    torch.testing.assert_close(power, expected, rtol=0.1, atol=1e-4)
    # with any output of the network, samples have no component that residuals do not have
    denoised = denoise(lambda x, angle: linear.flow(x, angle, noise(*x.shape, key=4)), x, angle)
    power = linear._waves(denoised).abs().square().mean(0)
    is_absent = linear.std < 1e-2
    assert is_absent.any() and (power[is_absent] < 1e-3).all()
