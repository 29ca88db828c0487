"""A coefficient given noisy values, block means or the solution (ups/generative/inversion.py), against the
formula where that is linear and against quadrature where it is not."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from known_answers import stream
from test_steady_prior import exact_linear, gaussian
from torch import Tensor

import ups
from ups.common.place import ROOT
from ups.data.tokenizer import PatchMoments, Tokenizer
from ups.forecaster import Forecaster
from ups.generative import inversion
from ups.generative.inversion import FEW, _as_trained, sample_coefficients
from ups.generative.observation import Measured
from ups.inversion import forward_mode, laplace
from ups.models import starts
from ups.models.facts import HeadFacts
from ups.models.starts import prior_waves, spectrum_of
from ups_discovery.seeds import generator
from ups_solvers import SOLVERS

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
    y = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.1]).double()
    noise = torch.tensor([0.3, 0.1, 1.0, 0.0, 0.05]).double()
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


# ---- ups.invert: a start and parameters, with Gauss-Newton steps and Laplace's posterior


def test_laplace_is_exact_for_a_linear_map_and_refuses_a_tangent_that_is_a_tenth_too_large():
    rng = stream("laplace")
    a, truth = (torch.randn(*shape, generator=rng).double() for shape in ((12, 6), (6,)))
    noise = torch.linspace(0.05, 0.5, 12).double()
    y = a @ truth + noise * torch.randn(12, generator=rng).double()
    precise = (a.mT / noise**2) @ a + torch.eye(6)

    def off(tangent) -> tuple[float, float]:
        theta, factor, _, _ = laplace(lambda theta: theta @ a.mT, y, noise, 6, tangent)
        mean, covariance = torch.linalg.solve(precise, (a.mT / noise**2) @ y), precise.inverse()
        return float((theta - mean).norm()), float(
            (factor @ factor.mT / covariance).diagonal().log().abs().max()
        )

    assert off(forward_mode)[0] < 1e-6 and off(forward_mode)[1] < 1e-6
    assert off(lambda h, theta: 1.1 * forward_mode(h, theta))[1] > 0.05


def film(seed: int, nu: float = 0.03) -> Tensor:
    """Frames (5, 1, 256) of Burgers' equation, of which the first is smooth."""
    times = {"num_frames": 6, "t_end": 0.25, "parameter": nu}
    return SOLVERS["burgers1d"].simulate([seed], seed=8, resolution=256, **times)[0, 1:]


@pytest.fixture(scope="module")
def published() -> Forecaster:
    model = ups.load(ROOT / "pretrained")
    typical = torch.stack([film(seed)[0] for seed in range(10, 26)])
    head = model.operator.head("burgers1d")
    head.facts = replace(head.facts, starts=spectrum_of(head.codec.normalise(typical), "periodic"))
    assert HeadFacts.read(head.facts.described()) == head.facts
    return model


def observed(u: Tensor) -> dict:
    rng, noise = generator(0, "observed"), 0.05 * float(u.std())
    mask = torch.rand(256, generator=rng) < 0.1
    y = torch.where(mask, u + noise * torch.randn(u.shape, generator=rng), torch.nan)
    return {"frames": [0, 1, 2, 3, 4], "values": y, "noise": noise}


def test_a_start_and_a_viscosity_are_found_from_a_tenth_of_the_cells_with_intervals(published, monkeypatch):
    monkeypatch.setattr(starts, "MOST_WAVES", 48)
    u = film(3)
    found = ups.invert(published, "burgers1d", observed(u), ["u0", "Nu"])
    low, high, true = found.low["u0"], found.high["u0"], u[0]
    assert found.is_converged and 0.6 < found.misfit < 1.1  # of some 120 values, for 49 unknowns
    assert float((found.values["u0"] - true).norm() / true.norm()) < 0.15
    assert float(found.low["Nu"]) < 0.03 < float(found.high["Nu"]) < 0.05
    assert float(((low <= true) & (true <= high)).double().mean()) > 0.75
    middle, half = (low + high) / 2, (high - low) / 4  # intervals half as wide do not hold
    assert float(((true - middle).abs() <= half).double().mean()) < 0.8
    assert found.samples["u0"].shape == (64, 1, 256) and found.samples["Nu"].shape == (64,)
    given = observed(u)
    alone = ups.invert(
        published, "burgers1d", given | {"values": given["values"].numpy()}, ["Nu"], u0=u[0].numpy()
    )
    assert abs(float(alone.values["Nu"]) - 0.03) < 0.002
    assert isinstance(alone.low["Nu"], np.ndarray | np.generic)


@pytest.mark.parametrize(
    ("change", "unknown", "options", "text"),
    [
        ({}, ["nu"], {}, r"the unknowns \['nu'\]; expected some of u0, Nu"),
        ({}, ["Nu"], {}, "no start; expected u0"),
        ({}, ["u0"], {}, "needs the parameter Nu"),
        ({}, ["u0", "Nu"], {"parameters": {"Nu": 0.02}}, "Nu both as unknown and as given"),
        ({}, ["u0"], {"u0": film(3)[0]}, "u0 both as unknown and as given"),
        ({}, ["u0", "Nu"], {"prior": film(3)[0]}, r"a prior of shape \(1, 256\); expected typical starts"),
        ({}, ["u0", "Nu"], {"prior": film(3) * torch.nan}, "with NaN or infinity; expected typical starts"),
        ({}, ["Nu"], {"u0": film(3)[0].requires_grad_()}, "a tensor that requires a gradient; expected one"),
        ({}, 3, {}, r"the unknowns \[3\]; expected some of u0, Nu"),
        ({"frames": [0, 1, 2, 3, torch.nan]}, ["u0", "Nu"], {}, "expected ascending whole numbers from 0"),
        ({"frames": [0, 1, 2, 3, 10**9]}, ["u0", "Nu"], {}, "takes .* bytes and memory has room for"),
        ({"values": film(3)[:5] * torch.inf}, ["u0", "Nu"], {}, "with wrong values where it is measured"),
        ({}, ["u0", "Nu"], {"members": 0}, "members is 0; expected a whole number"),
        ({"noise": 0.0}, ["u0", "Nu"], {}, "with wrong noise .* a noise above 0"),
        ({"noise": torch.ones(3)}, ["u0", "Nu"], {}, "noise of shape .*; expected one that broadcasts"),
        ({"mask": 0}, ["u0", "Nu"], {}, "no observed value; expected some"),
        ({"frames": [2, 1, 0, 3, 4]}, ["u0", "Nu"], {}, "expected ascending whole numbers from 0 on"),
        ({"frames": [0]}, ["u0", "Nu"], {}, r"values of shape \(5, 1, 256\); expected \(1, 1, 256\)"),
        ({"where": 1}, ["u0", "Nu"], {}, "expected a dictionary of values, noise, mask, frames"),
    ],
)
def test_what_cannot_be_inverted_is_refused_by_name(published, change, unknown, options, text):
    with pytest.raises(ValueError, match=f"burgers1d.*{text}|{text}"):
        ups.invert(published, "burgers1d", observed(film(3)) | change, unknown, **options)


def test_a_history_and_weights_without_a_law_are_refused(published):
    with pytest.raises(ValueError, match="advection1d was given a history of 10; expected a history of 1"):
        ups.invert(published, "advection1d", observed(film(3)), ["u0"], parameters={"beta": 1.0})
    values = torch.zeros(1, 1, 256)
    with pytest.raises(ValueError, match="diff_sorp1d has no law of starts in its weights.* Pass prior="):
        ups.invert(published, "diff_sorp1d", {"frames": [1], "values": values, "noise": 1.0})
    with pytest.raises(ValueError, match="given 2 starts; expected the one that was observed"):
        ups.invert(published, "burgers1d", observed(film(3)), ["Nu"], u0=film(3)[:2, None])


def test_a_prior_has_the_variance_of_its_fields_in_both_kinds_of_axes():
    u = torch.randn(200, 1, 2, 16, 8, generator=stream("prior"))
    u = u + u.roll(1, 3) + 2 * u.mean((3, 4), keepdim=True)  # long waves along x
    moments = PatchMoments(["u", "v"], [], (16, 8), 4)
    moments.add(u.numpy())
    codec = Tokenizer.from_moments(moments, 0, 1.0)
    w = codec.normalise(u[:, 0])
    waves, _ = prior_waves(codec, "periodic,no_flux", spectrum_of(w, "periodic,no_flux"))
    assert waves.square().sum(0).mean((1, 2)) == pytest.approx(w.square().mean((0, 2, 3)), rel=1e-3)
