"""Equations of films with noise, by the weak form (ups_discovery/weak.py, resampling.py, denoise.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_certainty import burgers, noisy
from test_equation import UX, UXX, Trajectories

from bench import discovery_films as films
from ups.common.rows import joined
from ups_discovery import search, weak
from ups_discovery.boundary import NO_FLUX, PERIODIC
from ups_discovery.certainty import OTHERS, UNCLEAR
from ups_discovery.denoise import Film, smooth_basis
from ups_discovery.least_squares import solve
from ups_discovery.library import library
from ups_discovery.resampling import standard_errors
from ups_discovery.seeds import generator
from ups_discovery.weak import WeakModel, weak_model
from ups_discovery.weak_form import WeakForm, compact_functions, plain_term, power_without_noise

SETTINGS = {"positive": [], "boundary": PERIODIC, "space": [64], "lengths": [64.0], "cell": [1 / 64]}


def of_film(u: torch.Tensor, sigma: float) -> WeakForm:
    return WeakForm(u, u.new_tensor([sigma]), library(1, [], 1), SETTINGS)


@pytest.mark.parametrize("is_periodic", [True, False])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_a_derivative_moves_to_the_test_function(order, is_periodic):
    k = 2 * np.pi * 2 / 64
    u = torch.sin(k * torch.arange(64, dtype=torch.float64))
    derivative = k**order * torch.sin(k * torch.arange(64, dtype=torch.float64) + order * np.pi / 2)
    rows = [compact_functions(64, 12, each, is_periodic) for each in (0, order)]
    torch.testing.assert_close(rows[1] @ u, rows[0] @ derivative, rtol=0, atol=1e-3 * k**order)


def test_terms_whose_derivatives_all_move_are_plain():
    plain = [term for term in library(1, [], 1) if plain_term(term, [], 1)]
    product = ((0,), ((0, (0,)), (0, (0,))))  # u_x u_x
    assert {UX, UXX} <= {*plain} and product not in plain and ((1,), ((0, (0, 0)),)) not in plain
    assert plain_term(UX, [], 1) == ((0, 1), (2,), 0.5)
    assert not any(plain_term(term, [0], 1) for term in library(1, [0], 1) if any(term[0]))


def test_powers_and_their_products_have_no_bias_by_noise():
    s = torch.linspace(-1, 2, 64, dtype=torch.float64).expand(40, 1, 64)
    form = of_film(s[None], 0.5)
    exact = torch.stack(
        [form.tested(one, power_without_noise(s, one.powers, 0 * form.sigma)) for one in form.plain.values()]
    )
    draws = []
    for seed in range(200):
        loud = s + 0.5 * torch.randn(s.shape, generator=generator(seed, "noise"), dtype=s.dtype)
        for power in (1, 2, 3):
            mean = power_without_noise(loud, [power], form.sigma).mean()
            draws.append(float(mean - (s**power).mean()))
        columns = torch.stack(
            [
                form.tested(one, power_without_noise(loud, one.powers, form.sigma))
                for one in form.plain.values()
            ]
        )
        mine = form.noise_of_plain(loud).sum(0)[: len(columns), : len(columns)]
        draws.append(
            ((columns @ columns.mT - mine) - exact @ exact.mT, columns @ columns.mT - exact @ exact.mT)
        )
    errors = torch.tensor([one for one in draws if isinstance(one, float)]).view(-1, 3)
    assert (errors.mean(0).abs() < 4 * errors.std(0) / 200**0.5).all()
    left, right = (
        torch.stack(each) for each in zip(*(d for d in draws if not isinstance(d, float)), strict=True)
    )
    assert (left.mean(0).abs() <= 4.5 * left.std(0) / 200**0.5 + 1e-12).all()
    # the fake: without the correction squares are far from the truth
    assert (right.mean(0).diagonal() > 10 * left.mean(0).diagonal().abs())[1:].any()


@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX])
def test_denoising_takes_most_of_the_noise_and_keeps_the_field(boundary):
    t, x = torch.arange(40.0).double()[:, None] / 40, (torch.arange(64).double() + 0.5) / 64
    u = (torch.cos(2 * np.pi * x) * torch.exp(-t) + 0.5 * t * torch.cos(4 * np.pi * x))[None, :, None]
    film, sigma = Film(40, (64,), boundary), torch.tensor([0.1], dtype=torch.float64)
    loud = u + 0.1 * torch.randn(u.shape, generator=generator(0, "noise"), dtype=u.dtype)
    assert float((film.denoised(loud, sigma) - u).square().mean().sqrt()) < 0.035
    torch.testing.assert_close(film.denoised(u, 0 * sigma), u, rtol=0, atol=1e-6)
    basis = smooth_basis(40)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.2])
def test_the_weak_form_finds_burgers_equation_in_noise(share):
    u = noisy(burgers(24), share)
    found = weak_model(u, torch.tensor([share * float(u.std())]).double(), library(1, [], 1), SETTINGS)
    model, errors = found.model, found.errors
    assert found.doubt(model) == ""
    terms = {
        library(1, [], 1)[term]: value for (_, term), value in zip(model.unknowns, model.values, strict=True)
    }
    assert terms.keys() == {UX, UXX} and (errors < 0.05 * model.values.abs()).all()
    # per frame and cell
    assert float(terms[UX]) == pytest.approx(-0.02 * 64, rel=0.05)
    assert float(terms[UXX]) == pytest.approx(0.02 * 0.02 * 64**2, rel=0.05)


def test_products_that_high_derivatives_mimic_are_found_in_shallow_water():
    """Plain terms leave 1 % of the change of the depth, with a fourth derivative that makes waves grow."""
    [k], start = films.waves(2 * np.pi, 64), films.random_starts(64).reshape(50, 2, 64)

    def slope(u, _):
        return -1j * k * np.fft.rfft(np.stack([u[:, 0] * u[:, 1], u[:, 1] ** 2 / 2 + u[:, 0]], 1))

    start = np.array([[1.0], [0.0]]) + 0.2 * start[:24]
    u = films.noisy(films.solved(start, 0 * k, slope, 0.02, 41, 8), 0.01, 0)
    found = search.identify(torch.from_numpy(u), 0.02, [2 * np.pi / 64], fields=["h", "v"])
    words = {term.latex.replace(r"\partial_{x} ", "x"): round(term.value, 1) for term in found.terms}
    assert words == dict.fromkeys([r"h\, xv", r"v\, xh", "xh", r"v\, xv"], -1.0)


def test_windows_of_one_film_are_one_film_again():
    u = noisy(burgers(1), 0.05)
    data = Trajectories(u[0].unflatten(0, (4, 4)), 0.02, 1.0)
    data.windows = np.array([[0, 0], [0, 4], [0, 8], [0, 12]])
    film = data.samples.films(torch.tensor([2, 0, 3, 1]), 2**20)
    assert film.shape[:2] == (1, 16)
    whole = Trajectories(u, 0.02, 1.0).samples.films(torch.tensor([0]), 2**20)
    torch.testing.assert_close(film / film.std(), whole / whole.std(), rtol=1e-4, atol=1e-5)
    places = np.array([[0, 0], [1, 8], [0, 4], [1, 0], [0, 12]])
    assert [group.tolist() for group in joined(places, 4)] == [[0, 2], [4], [3], [1]]


def test_terms_that_leave_more_than_the_noise_are_refused():
    """The truth passes; the fakes lack diffusion, or have its wrong sign or half of it."""
    u = noisy(burgers(24), 0.05)
    found = weak_model(u, 0.05 * burgers(24).std()[None], library(1, [], 1), SETTINGS)
    model = found.model
    assert found.doubt(model) == ""
    diffusion = [library(1, [], 1)[term] for _, term in model.unknowns].index(UXX)
    for factor in (0.0, 0.5, -1.0):
        values = model.values.clone()
        values[diffusion] *= factor
        assert found.doubt(replace(model, values=values)) == UNCLEAR


def test_terms_that_windows_exchange_are_refused():
    """A film of the logistic equation near 1, where u - u^2, u - u^3 and 1 - u are alike."""
    t, x = torch.arange(40).double()[:, None] / 20, (torch.arange(64).double() + 0.5) / 64
    start = 1 / (0.9 + 0.05 * torch.cos(2 * np.pi * x)) - 1
    u = (1 / (1 + start * torch.exp(-t)))[None, :, None]
    sigma = 0.05 * u.std()
    loud = u + sigma * torch.randn(u.shape, generator=generator(0, "noise"), dtype=u.dtype)
    found = weak_model(loud, sigma[None], library(1, [], 1), SETTINGS)
    assert found.doubt(found.model) == OTHERS


def test_an_equation_is_doubted_if_other_terms_leave_no_more_or_more_terms_leave_less():
    """The truth passes with its rivals; the fakes have a wrong term, or one too few."""
    u = noisy(burgers(24), 0.2)
    found = weak_model(u, 0.2 * burgers(24).std()[None], library(1, [], 1), SETTINGS)
    terms, _ = found.terms(found.model, 0)
    assert found.rivals[0] and not found.has_rivals
    for fake in ([terms[0], len(found.places) - 1], terms[:1]):
        unknowns = [(0, found.places[term]) for term in fake]
        values = solve(found.equations[:, 0].sum(0), fake)
        model = replace(found.model, unknowns=unknowns, values=values)
        assert replace(found, model=model, rivals=[[terms]]).has_rivals
        assert not replace(found, model=model, rivals=[[]]).has_rivals


def test_terms_that_the_noise_may_have_made_are_left_out(monkeypatch):
    """Windows select the truth and one term too many."""
    u, every = noisy(burgers(24), 0.2), library(1, [], 1)
    sigma = 0.2 * burgers(24).std()[None]
    plain = [place for place, term in enumerate(every) if plain_term(term, [], 1)]
    truth, false = [plain.index(every.index(term)) for term in (UX, UXX)], plain.index(0)
    monkeypatch.setattr(weak, "selected", lambda *_: ([*truth, false], []))
    found = WeakModel.of(u, sigma, every, plain, SETTINGS)
    assert [plain.index(place) for _, place in found.model.unknowns] == truth
    assert found.rivals == [[[*truth, false]]] and not found.has_rivals


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_intervals_hold_the_truth_in_90_to_98_percent_of_200_draws(share):
    clean, terms = burgers(8)[:4], [UX, UXX]
    truth, inside, halves = torch.tensor([-0.02 * 64, 0.02 * 0.02 * 64**2]), [], []
    for seed in range(200):
        u = noisy(clean, share, seed)
        form = WeakForm(u, share * clean.std()[None], terms, SETTINGS)
        blocks = form.equations()[:, 0]
        values = solve(blocks.sum(0), [0, 1])
        error = (values - truth).abs() / standard_errors(blocks, [0, 1], values)
        inside.append(error <= weak.STUDENT)
        halves.append(error <= weak.STUDENT / 2)
    inside, halves = (float(torch.stack(each).double().mean()) for each in (inside, halves))
    assert 0.9 <= inside <= 0.985 and halves < 0.85
