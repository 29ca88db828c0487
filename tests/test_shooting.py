"""Equations of frames that are far apart and kicked (ups_discovery/shooting.py): against the equation that
made the data, where differences in time find nothing and least squares are misled by kicks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_equation import Trajectories, integrated

from ups_discovery import search, shooting
from ups_discovery.certainty import ILL_POSED
from ups_discovery.integrator import Integrator, Model
from ups_discovery.seeds import generator

CELLS, FRAMES, STEPS = 96, 6, 120
D, K, A = 1.5, 20.0, 0.4  # cells^2 per frame, per frame, threshold
# u_t = D u_xx + K u (1 - u) (u - A) by the three-point Laplacian: D u_xx + D / 12 u_xxxx with derivatives of
# high order
TRUTH = {"u": -K * A, "u^2": K * (1 + A), "u^3": -K, "∂xx u": D, "∂xxxx u": D / 12}


def frames(num: int, rate: float, seed: int = 0) -> torch.Tensor:
    """(trajectories, time, 1, cells). Kicks: at any time and place, `rate` per frame, a bump is added."""
    draw, dt = generator(seed, "kicks"), 1 / STEPS
    x = torch.arange(CELLS, dtype=torch.float64)
    u = torch.rand(num, 8, 1, generator=draw, dtype=torch.float64).expand(-1, -1, CELLS // 8).flatten(1)
    made = []

    def slope(u):
        return D * (u.roll(1, 1) + u.roll(-1, 1) - 2 * u) + K * u * (1 - u) * (u - A)

    for _ in range(FRAMES):
        for _ in range(STEPS):
            place, chance = torch.rand(2, num, 1, generator=draw, dtype=torch.float64)
            away = (x - CELLS * place + CELLS / 2) % CELLS - CELLS / 2
            u = u + (chance < rate * dt) * torch.exp(-(away**2) / 8)
            a = slope(u)
            b = slope(u + dt / 2 * a)
            c = slope(u + dt / 2 * b)
            u = u + dt / 6 * (a + 2 * b + 2 * c + slope(u + dt * c))
        made.append(u)
    return torch.stack(made, 1)[:, :, None]


@pytest.fixture(scope="module")
def kicked() -> Integrator:
    return identification(frames(48, 1.0))


def identification(u: torch.Tensor) -> Integrator:
    data = Trajectories(u, 1.0, float(CELLS))
    one = integrated(data)
    one.windows = replace(one.windows, shooting=one.windows.shooting[::4])  # for time
    one.size = data.samples.units.size[0]
    return one


def coefficients(one: Integrator, model) -> dict[str, float]:
    """In the units of the data."""
    found = {}
    for (_, place), value in zip(model.unknowns, model.values.tolist(), strict=True):
        (power,), factors = one.library[place]
        name = f"∂{'x' * len(factors[0][1])} u" if factors else "u" if power == 1 else f"u^{power}"
        found[name] = value if factors else value / one.size ** (power - 1)
    return found


def is_true(found: dict[str, float]) -> bool:
    return found.keys() == TRUTH.keys() and all(
        abs(found[name] / value - 1) < (0.3 if name == "∂xxxx u" else 0.03) for name, value in TRUTH.items()
    )


@pytest.mark.faults
def test_the_equation_is_found_between_kicks(kicked):
    route, model = search.equation_of(kicked)
    found = coefficients(kicked, model)
    assert is_true(found), found
    assert route.leaves_kicks(model)
    certainty = route.certainty(model)
    width = coefficients(kicked, replace(model, values=certainty.half_width))
    assert all(abs(found[name] - value) < width[name] < abs(value) for name, value in TRUTH.items()), width
    # D / 12 u_xxxx stands for the three-point Laplacian, on its grid alone
    assert certainty.doubt == ILL_POSED


def test_only_the_complete_equation_leaves_kicks(kicked):
    """The fake is the equation without diffusion, which is right where the field is flat."""
    places = {f"u^{power[0]}": place for place, (power, of) in enumerate(kicked.library) if not of}
    places |= {
        f"∂{'x' * len(of[0][1])} u": i for i, (power, of) in enumerate(kicked.library) if of and power == (0,)
    }
    names = ["u^1", "u^2", "u^3", "∂xx u", "∂xxxx u"]
    values = [
        value * kicked.size**power for value, power in zip(TRUTH.values(), (0, 1, 2, 0, 0), strict=True)
    ]
    for used, expected in ((5, True), (3, False)):
        unknowns = [(0, places[name]) for name in names[:used]]
        model = Model(unknowns, torch.tensor(values[:used], dtype=torch.float64), num_steps=STEPS)
        assert shooting.last_shooting(kicked).leaves_kicks(model) == expected


def test_nothing_is_shot_at_where_differences_are_good(monkeypatch):
    monkeypatch.setattr("ups_discovery.search.shot_model", lambda *_: pytest.fail("called"))
    one = identification(
        torch.stack(
            [
                torch.exp(-0.02 * t) * torch.sin(torch.arange(64) / 64 * 6.2832 + p)
                for p in torch.rand(16) * 6
                for t in torch.arange(6)
            ]
        )
        .view(16, 6, 1, 64)
        .double()
    )
    assert search.equation_of(one) is not None


def test_a_future_without_an_equation_gets_none():
    """Independent frames: no reaction explains the next one better than half of persistence."""
    one = identification(
        torch.rand(32, FRAMES, 1, CELLS, generator=generator(0, "noise"), dtype=torch.float64)
    )
    assert shooting.shot_model(one, None) is None
