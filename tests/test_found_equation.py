"""The equation of a task as an object (ups/models/found_equation.py): terms, intervals, LaTeX, right-hand
side."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_certainty import burgers
from test_equation import Trajectories, found, waves

from ups.models.bases.base import Persistence
from ups.models.found_equation import found_equation, latex_of


@pytest.fixture(scope="module")
def head():
    [(name, settings, base)] = found(Trajectories(burgers(24), 0.02, 1.0))
    task = SimpleNamespace(fields=("u",), axes=("x",), offsets=())
    description = {"dt": 0.02, "base": {"name": name}, "parameter_values": []}
    return SimpleNamespace(base=base, name="film", task=task, description=description)


def test_the_terms_values_and_intervals_are_those_of_burgers_equation(head):
    equation = found_equation(head)
    assert equation.doubt == "" and len(equation.terms) == 2
    for one, truth in zip(sorted(equation.terms, key=lambda one: one.value), (-1.0, 0.02), strict=True):
        assert one.field == "u" and one.low <= one.value <= one.high
        assert one.value == pytest.approx(truth, rel=1e-3) and one.high - one.low < 0.05 * abs(truth)
    assert {one.latex for one in equation.terms} == {r"u\, \partial_{x} u", r"\partial_{x x} u"}
    assert equation.latex.startswith(r"\partial_t u = ") and equation.latex.count(r"\partial") == 3
    assert "[" in str(equation)


def test_the_right_hand_side_is_that_of_burgers_equation_in_the_units_of_the_data(head):
    u = waves(5, 64, 7)
    k = 2j * math.pi * torch.fft.rfftfreq(64, 1 / 64).double()
    slope, bend = (torch.fft.irfft(k**order * torch.fft.rfft(u), 64) for order in (1, 2))
    exact = -u * slope + 0.02 * bend
    error = (found_equation(head)(u[:, None])[:, 0] - exact).norm() / exact.norm()
    assert error < 5e-3
    wrong = (found_equation(head)(u[:, None])[:, 0] + exact).norm() / exact.norm()
    assert wrong > 1


def test_what_has_no_equation_is_refused_by_name(head):
    other = SimpleNamespace(**{**vars(head), "base": Persistence()})
    with pytest.raises(ValueError, match=r"the base of film is .*; expected an equation with intervals"):
        found_equation(other)
    with pytest.raises(ValueError, match="film has no parameter value 3; expected 0 to 0"):
        found_equation(head, 3)
    with pytest.raises(ValueError, match=r"on the grid \(32,\); expected \(64,\), on which it was found"):
        found_equation(head)(torch.zeros(1, 1, 32))


def test_latex_of_terms_of_every_kind():
    def latex(term):
        return latex_of(term, ["u", "rho"], ["(u - 3)", "rho"], [1], ["x", "y"])

    assert latex(((0, 0), ())) == "1"
    assert latex(((2, 1), ())) == r"(u - 3)^{2}\, rho"
    assert latex(((0, 0), ((1, (0, 1)),))) == r"\partial_{x y} \log rho"
    assert latex(((0, 0), ((0, (-1, 1)),))) == r"\partial_{y} \nabla^{-2} u"
    assert latex(((0, 0), ((-1, (1, -2, 1)),))) == r"\sin 2 \pi (1 x-2 y)"
