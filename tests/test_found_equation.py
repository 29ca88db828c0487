"""An equation as an object (ups_discovery/statement.py, ups/models/found_equation.py): terms, intervals,
LaTeX, right-hand side; and found without a task (ups_discovery.identify)."""

import math
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from test_certainty import burgers
from test_equation import Trajectories, found, waves

import ups_discovery
from ups.models.bases.base import Persistence
from ups.models.found_equation import found_equation
from ups_discovery.data import Films
from ups_discovery.statement import written


@pytest.fixture(scope="module")
def head():
    [(name, settings, base)] = found(Trajectories(burgers(24), 0.02, 1.0))
    task = SimpleNamespace(fields=("u",), axes=("x",), offsets=())
    facts = SimpleNamespace(dt=0.02, base={"name": name}, parameter_values=[])
    return SimpleNamespace(base=base, name="film", task=task, facts=facts)


def test_the_terms_values_and_intervals_are_those_of_burgers_equation(head):
    equation = found_equation(head)
    assert equation.doubt == "" and len(equation.terms) == 2
    for one, truth in zip(sorted(equation.terms, key=lambda one: one.value), (-1.0, 0.02), strict=True):
        assert one.field == "u" and one.low <= one.value <= one.high
        assert one.value == pytest.approx(truth, rel=1e-3) and one.high - one.low < 0.05 * abs(truth)
    assert {one.latex for one in equation.terms} == {r"u\, \partial_{x} u", r"\partial_{x x} u"}
    assert equation.latex.startswith(r"\partial_t u = ") and equation.latex.count(r"\partial") == 3
    assert "[" in str(equation)


def test_what_has_no_equation_is_refused_by_name(head):
    other = SimpleNamespace(**{**vars(head), "base": Persistence()})
    with pytest.raises(ValueError, match=r"the base of film is .*; expected an equation with intervals"):
        found_equation(other)
    with pytest.raises(ValueError, match="film has no parameter value 3; expected 0 to 0"):
        found_equation(head, 3)
    with pytest.raises(ValueError, match=r"on the grid \(32,\); expected \(64,\), on which it was found"):
        found_equation(head)(torch.zeros(1, 1, 32))


@pytest.mark.parametrize("num_films", [1, 8])
def test_films_alone_give_burgers_equation_with_intervals(num_films):
    equation = ups_discovery.identify(burgers(8)[:num_films], 0.02, [1 / 64])
    assert equation.doubt == "" and len(equation.terms) == 2
    for one, truth in zip(sorted(equation.terms, key=lambda one: one.value), (-1.0, 0.02), strict=True):
        assert one.value == pytest.approx(truth, rel=1e-3) and one.low < truth * (1 + 1e-4) < one.high
    u = waves(3, 64, 7)
    k = 2j * math.pi * torch.fft.rfftfreq(64, 1 / 64).double()
    slope, bend = (torch.fft.irfft(k**order * torch.fft.rfft(u), 64) for order in (1, 2))
    exact = 0.02 * bend - u * slope
    assert (equation(u[:, None])[:, 0] - exact).norm() < 5e-3 * exact.norm()


def test_the_state_of_a_positive_field_is_its_logarithm_and_the_films_stay_as_they_are():
    u = torch.stack([waves(2, 16, 1), waves(2, 16, 2).exp()], 1)[:, None].expand(-1, 4, -1, -1).clone()
    before, films = u.clone(), Films.of(u, [1], 0)
    assert torch.equal(u, before) and films.units.origin == [0.0, 0.0]
    size = torch.tensor(films.units.size).double()
    torch.testing.assert_close(films.s[:, :, 0], u[:, :, 0] / size[0])
    torch.testing.assert_close(films.s[:, :, 1], (u[:, :, 1] / size[1]).log())


@pytest.mark.parametrize(("shape", "cell", "arguments", "words"), cases("found_equation.films"))
def test_films_that_have_no_equation_are_refused(shape, cell, arguments, words):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=words):
        ups_discovery.identify(u, 0.1, cell, **arguments)


def test_films_with_gaps_are_refused():
    with pytest.raises(ValueError, match="films have values that are not finite; expected none"):
        ups_discovery.identify(torch.full((4, 8, 1, 16), math.nan), 0.1, [0.1])


def test_latex_of_terms_of_every_kind():
    def latex(term):
        return written(term, ["u", "rho"], [1], ["x", "y"], ["(u - 3)", "rho"], is_latex=True)

    assert latex(((0, 0), ())) == "1"
    assert latex(((2, 1), ())) == r"(u - 3)^{2}\, rho"
    assert latex(((0, 0), ((1, (0, 1)),))) == r"\partial_{x y} \log rho"
    assert latex(((0, 0), ((0, (-1, 1)),))) == r"\partial_{y} \nabla^{-2} u"
    assert latex(((0, 0), ((-1, (1, -2, 1)),))) == r"\sin 2 \pi (1 x-2 y)"
