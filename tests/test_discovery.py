"""The comparison on noisy films (bench/discovery.py): the films solve their equations, and its scores."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bench import discovery, discovery_films
from bench.discovery import scores
from bench.discovery_films import FILMS, noisy

CPU = torch.device("cpu")
SMOOTH = [name for name in FILMS if name not in ("inviscid_burgers", "spiral")]
SHAPES = {"kdv": (1, 601, 1, 400), "ks": (1, 301, 1, 256), "nls": (1, 251, 2, 256)}  # the published sizes
STENCIL = np.array([-1, 9, -45, 0, 45, -9, 1]) / 60  # sixth order


def relative(u, u_ref):
    return float(np.sqrt(np.square(u - u_ref).mean() / np.square(u_ref).mean()))


def value_of(term, fields, length):
    """A term in words on periodic fields (name -> (time, *space)), with derivatives by Fourier."""
    product = 1.0
    for word in term.split():
        name, _, axes = word.partition("_")
        name, _, power = name.partition("^")
        u = fields[name]
        for axis in axes:
            place = u.ndim - len(u.shape[1:]) + "xyz".index(axis)
            k = 2 * np.pi * np.fft.fftfreq(u.shape[place], length / u.shape[place])
            shape = [-1 if axis == place else 1 for axis in range(u.ndim)]
            u = np.fft.ifft(np.fft.fft(u, axis=place) * 1j * k.reshape(shape), axis=place).real
        product = product * u ** int(power or 1)
    return product


def smooth(u):
    """The long waves of (time, channel, *space). Frames are too far apart for the short ones, which kinks at
    the border make."""
    for axis in range(2, u.ndim):
        waves = np.fft.fft(u, axis=axis)
        k = np.abs(np.fft.fftfreq(u.shape[axis]))
        waves *= (k < 0.08).reshape([-1 if place == axis else 1 for place in range(u.ndim)])
        u = np.fft.ifft(waves, axis=axis).real
    return u


def residual(film, u):
    """What the equation of a film leaves of the change in time, relative to it; u (1, time, channel, *space),
    mirrored if there are walls."""
    length = (film.domain[1] - film.domain[0]) * (1 if film.boundary == "periodic" else 2)
    if film.boundary != "periodic":
        u = np.concatenate([u, u[..., ::-1]], -1)
    fields = {name: u[0, 3:-3, channel] for channel, name in enumerate(film.fields)}
    change = sum(weight * u[0, i : len(u[0]) - 6 + i] for i, weight in enumerate(STENCIL)) / film.dt
    slope = np.stack(
        [
            sum(value * value_of(term, fields, length) for term, value in terms.items())
            for terms in film.equation.values()
        ],
        1,
    )
    return relative(smooth(slope), smooth(change))


def check_equation(film, u):
    """Frames solve the equation of their film, and none in which one coefficient is 10 % larger."""
    error = residual(film, u)
    assert error < 1e-4
    for name, terms in film.equation.items():
        for term, value in terms.items():
            equation = film.equation | {name: terms | {term: 1.1 * value}}
            assert residual(dataclasses.replace(film, equation=equation), u) > 20 * error, (name, term)


@pytest.mark.parametrize("name", SMOOTH)
def test_films_solve_the_equations_that_are_sought(name):
    u = FILMS[name].make()
    assert u.shape == SHAPES.get(name, u.shape)
    check_equation(FILMS[name], u[:1, -15:])


def test_spiral_solves_its_equation_and_one_step_per_frame_is_enough():
    u = discovery_films.spiral(num_frames=30, num=64)
    check_equation(FILMS["spiral"], u[:, -15:])
    assert relative(u, discovery_films.spiral(2, num_frames=30, num=64)) < 1e-5
    assert discovery_films.spiral.__defaults__[1:] == (201, 256)  # the published size, which takes a minute


def test_inviscid_burgers_carries_its_shock_at_half_the_amplitude():
    u = discovery_films.inviscid_burgers()[0, :, 0]
    assert u.shape == (256, 256)
    x, t = np.linspace(-4000, 4000, 256), np.linspace(0, 4, 256)
    # momentum: what flows in at the left, A^2 / 2 per time
    total = u.sum(1) * (x[1] - x[0])
    assert total - total[0] == pytest.approx(t * 1000**2 / 2, abs=1000 * (x[1] - x[0]))
    fronts = x[(u > 500).sum(1) - 1][t > 2.5]
    assert fronts == pytest.approx(500 * (t[t > 2.5] - 2), abs=x[1] - x[0])


def test_noise_is_white_and_relative_to_every_channel():
    u = np.stack([np.full((4, 50, 32), 2.0), np.full((4, 50, 32), 0.01)], 2)
    added = noisy(u, 0.1, 3) - u
    assert added.std((0, 1, 3)) == pytest.approx([0.2, 0.001], rel=0.05)
    assert noisy(u, 0.2, 3) - u == pytest.approx(2 * added)
    assert abs(np.corrcoef(added[:, :, 0].ravel(), (noisy(u, 0.1, 4) - u)[:, :, 0].ravel())[0, 1]) < 0.05
    assert (noisy(u, 0.0, 3) == u).all()


def test_scores_refuse_false_missing_and_reversed_terms():
    truth = {"u": {"u u_x": -1.0, "u_xx": 0.1}, "v": {"v": 2.0}}
    right = {"u": {"u u_x": -0.99, "u_xx": 0.102}, "v": {"v": 2.0}}
    found = scores(right, truth, {"u": {"u u_x": 0.02, "u_xx": 0.001}, "v": {"v": None}})
    assert found["is_right"] and found["worst"] == pytest.approx(0.02)
    assert found["l2"] == pytest.approx(np.sqrt((0.01**2 + 0.002**2) / 5.01))
    assert (found["num_inside"], found["num_intervals"]) == (2, 3)  # of u_xx it is too narrow
    extra = {"u": right["u"] | {"u_xxxx": 4e-5}, "v": right["v"]}
    assert not scores(extra, truth)["is_right"] and "num_inside" not in scores(extra, truth)
    missing = scores({"u": right["u"]}, truth)
    assert not missing["is_right"] and missing["worst"] == 1
    reversed_sign = scores({"u": right["u"], "v": {"v": -2.0}}, truth)
    assert reversed_sign["is_right"] and reversed_sign["worst"] == 2
    assert scores({}, truth)["worst"] == scores({}, truth)["l2"] == 1


@pytest.mark.faults  # the fit takes most of a minute
def test_the_equation_of_a_clean_set_is_found_and_lies_in_its_intervals():
    row = discovery.ours("burgers_set", FILMS["burgers_set"].make()[:40])
    assert row["is_right"] and row["worst"] < 0.01
    assert row["num_inside"] == row["num_intervals"] == 2


@pytest.mark.faults  # the fit takes ten seconds
def test_the_equation_of_a_clean_film_is_found_where_differences_of_frames_fail():
    """Korteweg and de Vries: differences find two more terms, which differ between halves of the film."""
    row = discovery.ours("kdv", FILMS["kdv"].make())
    assert row["is_right"] and row["worst"] < 1e-3
    assert row["num_inside"] == row["num_intervals"] == 2
