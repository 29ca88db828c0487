"""Stiff and dispersive equations: the exponential integrator against matrix exponentials, steps against
stability, and correct equations that must not be lost to their integrator or its bounds."""

from __future__ import annotations

import math

import pytest
import torch
from test_equation import UX as U_UX
from test_equation import UXX, Trajectories, cells, coefficients, few, found, fourier, integrated, spectral  # noqa: F401

from ups.models.bases.base import ParameterBatch
from ups.models.bases.equation import Equation
from ups_discovery.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups_discovery.integrator import Model
from ups_discovery.seeds import generator
from ups_discovery.terms import diagonal

UX, UXXX, UXY = (((0,), ((0, axes),)) for axes in ((0,), (0, 0, 0), (0, 1)))
# of two fields, u and v
U2, V2 = ((1, 0), ()), ((0, 1), ())
UXX2, VXX2, UX2, VX2 = (((0, 0), ((channel, axes),)) for axes in ((0, 0), (0,)) for channel in (0, 1))
NONE = ParameterBatch(torch.zeros(4, 0), torch.zeros(4, dtype=torch.long))


def forecast_error(base: Equation, data: Trajectories, u: torch.Tensor) -> float:
    """Of the last frame of u (4, frames, C, *space), from its first."""
    truth = data.samples.head.codec.decode(u.float())
    w = truth[:, :1]
    for _ in range(u.shape[1] - 1):
        w = base(w, NONE)[:, None]
    return float((w[:, 0] - truth[:, -1]).norm() / truth[:, -1].norm())


# space, boundary, weight of (channel, term), whether all fields act together
EXACT = {
    "even": ([16], PERIODIC, {(0, UX): 0.7, (0, UXXX): -0.4, (0, UXX): 0.1}, False),
    "odd": ([15], PERIODIC, {(0, UX): 0.7, (0, UXXX): -0.4}, False),
    "mixed": ([8, 6], PERIODIC, {(0, UXY): 0.3, (0, ((0,), ((0, (1, 1, 1)),))): 0.2}, False),
    "a channel": ([8, 6], f"{PERIODIC},{NO_FLUX}", {(0, UXXX): 0.3, (0, ((0,), ((0, (1, 1)),))): 0.2}, False),
    "Schroedinger": ([16], PERIODIC, {(0, VXX2): -0.5, (1, UXX2): 0.5, (0, U2): -0.1}, True),
    "waves": ([15], PERIODIC, {(0, VX2): 1.0, (1, UX2): 0.8}, True),
    "beam": ([16], DIRICHLET, {(0, V2): 1.0, (1, ((0, 0), ((0, (0, 0, 0, 0)),))): -0.3}, True),
}


@pytest.mark.parametrize("name", EXACT)
def test_linear_terms_are_exact_in_one_step_even_of_half_the_sampling_rate(name):
    space, boundary, weights, is_coupled = EXACT[name]
    terms, channels, dt = sorted({term for _, term in weights}), 1 + is_coupled, 3.0
    base = Equation(
        1,
        channels,
        space,
        boundary,
        [*map(float, space)],
        dt,
        terms=terms,
        is_stiff=True,
        is_coupled=is_coupled,
    )
    weight = torch.zeros(1, channels, len(terms), dtype=torch.float64)
    for (channel, term), value in weights.items():
        weight[0, channel, terms.index(term)] = value
    size = channels * math.prod(space)
    # terms are linear: their matrix
    every = torch.eye(size, dtype=torch.float64).view(size, channels, *space)
    slope = (weight @ base.terms(every)).flatten(1).mT
    noise = torch.randn(3, size, generator=generator(0, "noise"), dtype=torch.float64)
    exact = noise @ torch.linalg.matrix_exp(dt * slope).mT
    torch.testing.assert_close(
        base.advance(noise.view(3, channels, *space), weight).flatten(1), exact, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("term", "ends", "expected"),
    [
        (UX, (PERIODIC,), (0, (0,))),
        (UX, (NO_FLUX,), None),
        (UXX, (NO_FLUX,), (0, (0, 0))),
        (UXY, (PERIODIC, NO_FLUX), None),
        (((1,), ()), (NO_FLUX,), (0, ())),
        (((2,), ()), (PERIODIC,), None),
        (((1,), ((0, (0,)),)), (PERIODIC,), None),
        (((0,), ((-1, (1, 0)),)), (PERIODIC,), None),
        (((0,), ((0, (-1, 0)),)), (PERIODIC,), None),
        (((0,), ()), (PERIODIC,), None),
    ],
)
def test_only_what_is_diagonal_acts_by_its_exponential(term, ends, expected):
    assert diagonal(term, [], ends) == expected and (not term[0][0] or diagonal(term, [0], ends) is None)


# ---------------------------------------------------------------- steps and bounds


def burgers(amplitudes: list[float], frames: int = 12) -> torch.Tensor:
    k, x = fourier(48, 1.0), cells(48)
    start = torch.stack([a * torch.sin(2 * math.pi * (x + 0.37 * i)) for i, a in enumerate(amplitudes)])
    return spectral(-0.02 * k**2, -0.5j * k, start, 0.02, frames, 20)


@pytest.mark.parametrize(
    ("term", "value", "least"),
    [
        (UXX, 1.0, 3),
        (UXX, 1e4, 0),  # 6.04 of diffusion a frame; more than any number of steps
        (UX, 30.0, 17),
        (((2,), ()), 1e-3, 1),
    ],
)
def test_steps_are_stable_and_bounded(term, value, least):
    one = integrated(Trajectories(burgers([1.0] * 8), 0.02, 1.0))
    model = Model([(0, one.library.index(term))], torch.tensor([value], dtype=torch.float64))
    num = one.num_converged_steps(model, one.max_steps)
    assert num == 0 if not least else least <= num <= one.max_steps
    assert [tried.is_stiff for tried in one.integrators(model)] == [True, False][term == ((2,), ()) :]
    if term == UXX:
        # the exponential needs no more
        assert one.with_converged_steps(model).num_steps == 1 and one.with_converged_steps(model).is_stiff


def test_three_small_trajectories_do_not_clip_a_larger_one():
    data = Trajectories(burgers([0.3, 0.4, 0.5]), 0.02, 1.0)
    [(_, _, base)] = found(data)
    assert coefficients(base)[U_UX] == pytest.approx(-1, rel=0.02)
    assert forecast_error(base, data, burgers([1.5, 1.2, 1.4, 1.3])) < 0.02


# ---------------------------------------------------------------- what is found


def schroedinger(n: int = 256, dt: float = 0.04, steps: int = 100) -> torch.Tensor:
    """i q_t = -q_xx / 2 - |q|^2 q, by exact half steps of either (Strang)."""
    rng, j = generator(0, "q"), torch.arange(-4, 5)
    z = (
        torch.randn(10, 9, 2, generator=rng, dtype=torch.float64)
        * 0.35
        * torch.exp(-((j / 3.0) ** 2))[:, None]
    )
    q = torch.view_as_complex(z) @ torch.exp(2j * math.pi * j[:, None] * cells(n))
    turn = torch.exp(
        -0.5j * dt / steps * (2 * math.pi * torch.fft.fftfreq(n, 10 / n, dtype=torch.float64)) ** 2
    )
    made = []
    for _ in range(7):
        made.append(torch.stack([q.real, q.imag], 1))
        for _ in range(steps):
            q = torch.fft.ifft(turn * torch.fft.fft(q * torch.exp(0.5j * dt / steps * q.abs() ** 2)))
            q = q * torch.exp(0.5j * dt / steps * q.abs() ** 2)
    return torch.stack(made, 1)


def fronts(
    n: int = 64, length: float = 32.0, dt: float = 0.25, steps: int = 30
) -> tuple[torch.Tensor, torch.Tensor]:
    """u_t = u_xx + u - u^2 behind walls, by exact half steps of either: clean, and smoothed after 1 % of
    noise."""
    rng, k = generator(0, "front"), math.pi * torch.arange(n, dtype=torch.float64)
    modes = torch.cos(torch.outer(k, cells(n)))
    u = 0.5 + 0.4 * torch.tanh(
        (torch.randn(36, 6, generator=rng, dtype=torch.float64) / torch.arange(1, 7)) @ modes[1:7]
    )
    mix = torch.linalg.solve(modes, torch.exp(-((k / length) ** 2) * dt / steps)[:, None] * modes)
    made, grow = [], math.exp(dt / steps / 2)
    for _ in range(20):
        made.append(u)
        for _ in range(steps):
            u = u * grow / (1 + u * (grow - 1))
            u = u @ mix
            u = u * grow / (1 + u * (grow - 1))
    clean = torch.stack(made, 1)[:, :, None]
    noisy = clean + 0.01 * clean.std() * torch.randn(clean.shape, generator=rng, dtype=torch.float64)
    return clean, torch.linalg.solve(modes.T, noisy.transpose(-1, -2))[..., :16, :].transpose(-1, -2) @ modes[
        :16
    ]


def test_the_nonlinear_schroedinger_equation_is_found_by_steps_of_both_fields_together():
    data = Trajectories((u := schroedinger())[:6], 0.04, 10.0)
    data.samples.head.codec.fields = ["u", "v"]
    [(_, own, base)] = found(data)
    rows = {
        (channel, base.terms.terms[place]): value
        for channel, place, value, *_ in base.found["equations"][0]["rows"]
    }
    assert rows[0, VXX2] == pytest.approx(-0.5, rel=1e-2) and rows[1, UXX2] == pytest.approx(0.5, rel=1e-2)
    assert own["is_coupled"] and own["num_steps"] <= 12 and forecast_error(base, data, u[6:]) < 1e-3
    assert Equation(**own).rates(base.weight).shape == (1, u.shape[-1] // 2 + 1, 2, 2)


def test_a_front_with_walls_is_not_lost_to_waves_that_too_few_steps_let_grow():
    """Two plain steps a frame are unstable, which one frame does not show."""
    clean, smooth = fronts()
    data = Trajectories(smooth[:32], 0.25, 32.0, NO_FLUX)
    [(_, _, base)] = found(data)
    assert coefficients(base)[UXX] == pytest.approx(1, rel=0.1)
    assert forecast_error(base, data, clean[32:]) < 0.01
