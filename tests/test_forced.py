"""Forced Burgers and vorticity, coarse Kuramoto-Sivashinsky: order, Ito balances, invariant measures, exact
samples, exponents."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ups.tasks import get_task
from ups_solvers import SOLVERS, burgers_forced, kuramoto, vorticity
from ups_solvers.initial import random_stream
from ups_solvers.modes import DAMPING, Forced, num_steps

N = {"burgers1d_forced": 32, "vorticity2d_forced": 16}
NU = {"burgers1d_forced": 0.02, "vorticity2d_forced": 0.02}
FAMILIES = {"burgers1d_forced": burgers_forced, "vorticity2d_forced": vorticity}


def streams(count: int, seed: int = 0) -> list:
    return [random_stream(seed, index) for index in range(count)]


def equation(name: str, dt: float) -> Forced:
    return FAMILIES[name].equation(N[name], NU[name], dt)


def started(name: str, count: int) -> Tensor:
    """Modes of states of the invariant measure."""
    u = FAMILIES[name].start(streams(count), N[name], NU[name])[:, 0]
    return torch.fft.rfftn(u, dim=tuple(range(1, u.ndim)), norm="forward")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def squared(modes: Tensor) -> Tensor:
    """Energy of each mode (batch, ...) as it counts in the mean of the squared field."""
    weight = torch.where(torch.arange(modes.shape[-1]) > 0, 2.0, 1.0).double()  # the last one is zero
    return modes.abs().square() * weight


def halved(samples: Tensor) -> Tensor:
    """The normals (batch, steps, J, 2) of two steps in a row as those of one twice as long, of the same
    path."""
    (w, w2), (first, second) = samples.unflatten(1, (-1, 2)).movedim((-1, 2), (0, 1))
    area = (first + second) / (2 * math.sqrt(12)) + (w - w2) / 4  # in units of the root of a short step
    return torch.stack([(w + w2) / math.sqrt(2), area * math.sqrt(12 / 2)], -1)


# ---------------------------------------------------------------- order in time


def order(name: str, *, has_area: bool = True) -> float:
    """Observed strong order over three halvings of the step, against one eight times finer than the
    finest."""
    count, span, finest = 8, 0.2, 256
    samples = normal(count, finest, 2 * len(FAMILIES[name].WAVES), 2)
    ends, modes = {}, started(name, count)
    while samples.shape[1] >= 4:
        now, forced = modes, equation(name, span / samples.shape[1])
        for one in samples.unbind(1):
            now = forced.advance(
                now, one if has_area or samples.shape[1] == finest else one * torch.tensor([1.0, 0.0])
            )
        ends[samples.shape[1]], samples = now, halved(samples)
    errors = [float((ends[num] - ends[finest]).abs().square().sum().sqrt()) for num in (4, 32)]
    return math.log2(errors[0] / errors[1]) / 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_path_is_followed_to_strong_order_three_halves_and_without_the_area_to_one(name):
    assert order(name) > 1.4
    assert order(name, has_area=False) < 1.2


def test_the_longest_waves_of_forced_flow_begin_as_they_stay(monkeypatch):
    """Enstrophy in waves of length 1, which energy reaches last; of a run-up of 5, the fake, they have a
    quarter of it."""
    n, nu = N["vorticity2d_forced"], NU["vorticity2d_forced"]
    kx, ky, _ = vorticity.wave_numbers(n)
    is_longest = (kx.square() + ky.square()) == 1

    def fraction(u: Tensor) -> float:
        return float(
            (squared(torch.fft.rfft2(u[:, 0].double(), norm="forward")) * is_longest).flatten(1).sum(1).mean()
        )

    sources = streams(80)
    u = vorticity.start(sources, n, nu)
    later = vorticity.evolve(u, sources, num_frames=3, parameter=nu, dt=10.0)
    late = sum(fraction(frame) for frame in later.unbind(1)) / 3
    assert 0.8 < fraction(u) / late < 1.25
    monkeypatch.setattr(vorticity, "SPIN", 5.0)
    assert fraction(vorticity.start(streams(80), n, nu)) < 0.5 * late


def test_a_forced_wave_that_decays_has_the_variance_of_its_closed_form():
    """Ornstein-Uhlenbeck: sigma^2 (1 - exp(-2 a t)) / 2a, at the longest step that num_steps allows, and not
    far beyond."""

    def variance(step_damping: float) -> float:
        """Of the stationary state over its closed form: u' = exp u + (exp - 1) H + phi dW, all linear in the
        normals."""
        forced = Forced(
            torch.tensor([-1.0], dtype=torch.float64),
            torch.zeros_like,
            torch.ones(1, 1, dtype=torch.complex128),
            step_damping,
        )
        gain = forced.advance(torch.ones(1, 1, dtype=torch.complex128), torch.zeros(1, 1, 2)).real
        parts = [
            forced.advance(torch.zeros(1, 1, dtype=torch.complex128), one[None, None].double()).real
            for one in torch.eye(2)
        ]
        return float(sum(part.square() for part in parts) / (1 - gain.square()) / 0.5)

    assert abs(variance(DAMPING) - 1) < 1e-4 and abs(variance(5.0) - 1) > 0.1
    assert num_steps(1.0, 0.5, 2.0) == math.ceil(2.0 / DAMPING) and num_steps(1.0, 0.25) == 4


# ---------------------------------------------------------------- balances and measures


def balance(name: str, weights: list[Tensor | float], amplitude: float = 1.0) -> list[tuple[float, float]]:
    """(mean, standard error) of the residual of d<u^2>/2 = (input - losses) dt + <u f_j> dW_j over the input,
    path by path, for each of the weights of the modes, 1 for the square. amplitude: of the noise over what
    the input is reckoned from."""
    count, num, dt = 48, 60, 0.01
    forced, modes = equation(name, dt), started(name, count)
    inputs = [0.5 * (squared(forced.waves) * weight).flatten(1).sum() * num * dt for weight in weights]
    first = [0.5 * (squared(modes) * weight).flatten(1).sum(1) for weight in weights]
    rests = [-one - given for one, given in zip(first, inputs, strict=True)]
    for one in (amplitude * normal(count, num, len(forced.waves), 2, seed=1)).unbind(1):
        push, after = forced.pushed(one[..., 0] * math.sqrt(dt)), forced.advance(modes, one)
        along = torch.where(torch.arange(push.shape[-1]) > 0, 2.0, 1.0) * (modes * push.conj()).real
        losses = -0.5 * forced.rates * (squared(modes) + squared(after)) * dt
        for rest, weight in zip(rests, weights, strict=True):
            rest += ((losses - along) * weight).flatten(1).sum(1)
        modes = after
    found = []
    for rest, weight, given in zip(rests, weights, inputs, strict=True):
        rest = (rest + 0.5 * (squared(modes) * weight).flatten(1).sum(1)) / given
        found.append((float(rest.mean()), float(rest.std()) / math.sqrt(count)))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_noise_puts_in_what_ito_says(name):
    """Enstrophy and, as the advection keeps it too, energy. Noise a tenth too large leaves a fifth of the
    input."""
    of_docs = {"burgers1d_forced": 0.375, "vorticity2d_forced": 2.0}[name]  # no value of the solver enters it
    assert float(0.5 * squared(equation(name, 0.01).waves).sum()) == pytest.approx(of_docs)
    kx, ky, _ = vorticity.wave_numbers(N[name])
    energy = [1 / (kx.square() + ky.square()).clamp_min(1)] if name == "vorticity2d_forced" else []
    for rest, error in balance(name, [1.0, *energy]):
        assert error < 0.02 and abs(rest) < 4 * error, (rest, error)
    assert all(rest > 0.1 for rest, _ in balance(name, [1.0, *energy], 1.1))


def every_wave(name: str) -> tuple[list[tuple[int, ...]], Tensor]:
    """(places of the modes kept, one of each pair of conjugates; modes of their cosines and sines)."""
    n = N[name]
    kept = (
        torch.arange(n // 2 + 1) * 3 < n
        if name == "burgers1d_forced"
        else vorticity.wave_numbers(n)[2].clone()
    )
    kept[(0,) * kept.ndim] = False
    if kept.ndim == 2:
        kept[n // 2 :, 0] = False
    places = [tuple(place) for place in kept.nonzero().tolist()]
    waves = torch.zeros(2 * len(places), *kept.shape, dtype=torch.complex128)
    for j, place in enumerate(places):
        for row, value in ((2 * j, 0.5 + 0j), (2 * j + 1, -0.5j)):
            waves[(row, *place)] = value
            if kept.ndim == 2 and place[1] == 0:
                waves[row, -place[0], 0] = value.conjugate()
    return places, waves


@pytest.mark.parametrize("name", FAMILIES)
def test_the_advection_keeps_the_square_and_the_energy_unless_products_are_aliased(name):
    """To rounding for modes below n/3; of modes up to n/2 products fall back on others, which is the fake."""

    def given(modes: Tensor) -> float:
        twice = torch.where(torch.arange(modes.shape[-1]) > 0, 2.0, 1.0)
        change = twice * (modes.conj() * equation(name, 0.01).nonlinear(modes)).real
        square = (
            sum(k.square() for k in vorticity.wave_numbers(N[name])[:2]).clamp_min(1)
            if modes.ndim == 3
            else torch.ones(1)
        )
        return max(float((change / weight).sum().abs() / change.abs().sum()) for weight in (1.0, square))

    places, waves = every_wave(name)
    assert given(replace(equation(name, 0.01), waves=waves).pushed(normal(1, len(waves)))) < 1e-12
    space = (N[name],) * (equation(name, 0.01).rates.ndim)
    assert given(torch.fft.rfftn(normal(1, *space), dim=tuple(range(1, 1 + len(space))))) > 1e-3


# ---------------------------------------------------------------- trajectories and exact samples


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_is_a_function_of_seed_row_and_member(name):
    task = get_task(name)
    u = SOLVERS[task.name].simulate(
        range(2), seed=4, resolution=16, num_frames=1, parameter=NU[name], t_end=1.0
    )[:, 0]
    settings = {"seed": 5, "num_frames": 2, "parameter": NU[name], "dt": 0.05}
    both = SOLVERS[task.name].exact_futures(u, 3, rows=[7, 9], **settings)
    assert torch.equal(both[1:], SOLVERS[task.name].exact_futures(u[1:], 3, rows=[9], **settings))
    assert torch.equal(both[:, :2], SOLVERS[task.name].exact_futures(u, 2, rows=[7, 9], **settings))
    longer = SOLVERS[task.name].exact_futures(u, 3, rows=[7, 9], **settings | {"num_frames": 3})
    assert torch.equal(both, longer[:, :, :2])
    others = [
        SOLVERS[task.name].exact_futures(u[:1], 3, rows=[7], **settings | {"seed": 6}),
        SOLVERS[task.name].exact_futures(u[:1], 3, rows=[8], **settings),
    ]
    assert all(float((other - both[:1]).abs().max()) > 1e-3 for other in others)
    assert (
        torch.cdist(both[0].flatten(1), both[0].flatten(1)).topk(2, largest=False).values[:, 1].min() > 1e-3
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_truth_is_one_more_sample_and_a_sample_from_another_state_is_not(name):
    """Ranks of the truth among the samples are uniform; among those of another state they are not."""
    task, frames, num = get_task(name), 4, 7
    u = SOLVERS[task.name].simulate(
        range(60), seed=8, resolution=16, num_frames=frames, parameter=NU[name], t_end=0.3
    )
    samples = SOLVERS[task.name].exact_futures(
        u[:, 0], num, seed=9, rows=range(60), num_frames=frames - 1, parameter=NU[name], dt=0.1
    )

    def outside(members: Tensor) -> Tensor:
        """Fraction of truths outside their members, by lead."""
        truth = u[:, None, 1:]
        return (
            ((truth < members.amin(1, True)) | (truth > members.amax(1, True)))
            .double()
            .mean((0, 1, *range(3, u.ndim + 1)))
        )

    assert (outside(samples) - 2 / (num + 1)).abs().max() < 0.1
    assert outside(samples.roll(1, 0)).min() > 0.35


# ---------------------------------------------------------------- Kuramoto-Sivashinsky


def largest_exponent(length: float, num_points: int) -> tuple[float, float]:
    """(mean, standard error) of the largest Lyapunov exponent over 16 trajectories, by two that are kept
    close (Benettin)."""
    size, count = 1e-6, 16
    x = kuramoto.start(streams(count, 1), num_points, length)
    kept = (torch.arange(x.shape[1]) * 3 < num_points) & (torch.arange(x.shape[1]) > 0)
    y = x + size * torch.complex(normal(*x.shape), normal(*x.shape, seed=1)) * kept
    growth = []
    for _ in range(150):
        x, y = kuramoto.evolve(torch.cat([x, y]), length, 2.0, 1)[:, 0].chunk(2)
        apart = (y - x).abs().square().sum(1).sqrt()
        growth.append((apart / size).log() / 2.0)
        y = x + (y - x) * (size / apart)[:, None]
    rates = torch.stack(growth[25:]).mean(0)
    return float(rates.mean()), float(rates.std()) / math.sqrt(count)


@pytest.mark.parametrize(("length", "num_points", "known"), [(22.0, 32, 0.047), (kuramoto.LENGTH, 128, 0.09)])
def test_errors_grow_at_the_lyapunov_exponent_of_the_length(length, num_points, known):
    found, error = largest_exponent(length, num_points)
    assert abs(found - known) < 0.004 + 3 * error and error < 0.004, (found, error)


def test_small_waves_grow_and_decay_as_the_linear_equation_says():
    length, number = 96.0, torch.arange(65, dtype=torch.float64)
    q = 2 * math.pi / length * number
    modes = torch.full((1, 65), 1e-9 + 0j, dtype=torch.complex128) * (number * 3 < 128) * (number > 0)
    later = kuramoto.evolve(modes, length, 2.0, 2)
    for frame, t in enumerate((2.0, 4.0)):
        torch.testing.assert_close(
            later[0, frame].abs(), modes[0].abs() * ((q.square() - q.pow(4)) * t).exp(), rtol=1e-5, atol=1e-17
        )


def test_the_filter_passes_what_coarse_points_can_tell_and_nothing_else():
    n, x = 16, torch.arange(16, dtype=torch.float64) / 16
    modes = torch.zeros(33, dtype=torch.complex128)
    modes[[0, 3, 7]] = torch.tensor([0.25, 0.5, 0.5j], dtype=torch.complex128)
    visible = 0.25 + torch.cos(2 * math.pi * 3 * x) - torch.sin(2 * math.pi * 7 * x)
    torch.testing.assert_close(kuramoto.filtered(modes, n), visible)
    modes[[8, 9, 20]] = 1.0 + 1j  # two cells long and shorter
    torch.testing.assert_close(kuramoto.filtered(modes, n), visible)
    strided = torch.fft.irfft(modes, n=64, norm="forward")[::4]  # the fake: every fourth point, which aliases
    assert float((strided - visible).abs().max()) > 1
