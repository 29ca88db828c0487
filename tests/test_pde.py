"""The reference solvers against exact solutions, convergence orders, conservation laws and finer runs."""

from __future__ import annotations

import math

import pytest
import torch
from cases import cases
from torch import Tensor

from ups.tasks import TASKS
from ups_solvers import (
    SOLVERS,
    barkley,
    burgers,
    compressible,
    darcy,
    darcy_grf,
    diff_react,
    diff_sorp,
    kuramoto,
    ns_incompressible,
    shallow_water,
    vorticity,
)
from ups_solvers.initial import Wave, cell_centres, random_stream, sample_wave

SIZES = {name: (32, 16, 8)[TASKS[name].ndim - 1] for name in SOLVERS}
SHAPES = {name: (len(TASKS[name].channels), *[SIZES[name]] * TASKS[name].ndim) for name in SOLVERS}
SMALL = {"advection1d": 0.4, "burgers1d": 0.01, "burgers1d_forced": 0.02, "vorticity2d_forced": 0.02}
PARAMETERS = {name: SMALL.get(name, 1.0 if TASKS[name].parameters else None) for name in SOLVERS}
TIMES = {name: 0.01 if name.startswith("cfd") else 0.2 for name in SOLVERS}  # sound is fast


def request(task: str, **changes: object) -> dict[str, object]:
    settings: dict[str, object] = {
        "seed": 3,
        "resolution": SIZES[task],
        "num_frames": 4,
        "parameter": PARAMETERS[task],
        "t_end": TIMES[task],
    }
    return settings | changes


def find(count: int, *, use_abs: bool, has_window: bool) -> list[Wave]:
    """The first waves of seed 0 of one kind."""
    waves = [sample_wave(0, index) for index in range(300)]
    kind = (use_abs, has_window)
    return [wave for wave in waves if (wave.use_abs, wave.window is not None) == kind][:count]


def initial_waves(indices: range, seed: int, x: Tensor) -> Tensor:
    """u0 of several trajectories at the same points, (n, *x.shape)."""
    return torch.stack([sample_wave(seed, index)(x) for index in indices])


def burgers_frames(
    wave: Wave, nu: float, resolution: int, num_frames: int, t_end: float, faces: int = 16384
) -> Tensor:
    """Burgers from one wave in float64, (num_frames, resolution)."""
    psi, mean = burgers.potential(wave, faces)
    return burgers.evolve(
        psi,
        mean,
        diffusivity=nu / math.pi,
        dt=t_end / (num_frames - 1),
        num_frames=num_frames,
        resolution=resolution,
    )


# ---------------------------------------------------------------- all solvers


def test_solvers_have_the_facts_of_their_tasks() -> None:
    assert set(SOLVERS) == {name for name, task in TASKS.items() if not task.files_of}
    for name, solver in SOLVERS.items():
        task = TASKS[name]
        assert (solver.ndim, solver.channels) == (task.ndim, len(task.channels)), name
        assert solver.is_steady == task.is_steady and bool(solver.parameter) == bool(task.parameters), name
        assert task.has_known_law == bool(solver.exact_futures or solver.posterior), name


def test_solvers_have_the_constants_that_files_state() -> None:
    excitable = {"a": barkley.A, "b": barkley.B, "eps": barkley.EPS}
    sorption = {
        "D": diff_sorp.DIFFUSION,
        "por": diff_sorp.POROSITY,
        "rho_s": diff_sorp.BULK_DENSITY,
        "k_f": diff_sorp.FREUNDLICH_K,
        "n_f": diff_sorp.FREUNDLICH_N,
    }
    reaction = {"Du": diff_react.DIFFUSION_U, "Dv": diff_react.DIFFUSION_V, "k": diff_react.REACTION_K}
    wanted = {
        "barkley2d": excitable,
        "barkley2d_shown": excitable,
        "diff_react2d": reaction,
        "diff_sorp1d": sorption,
        "ks1d_coarse": {"length": kuramoto.LENGTH},
        "ns_incom2d": {"NU": ns_incompressible.VISCOSITY},
        "shallow_water2d": {"g": shallow_water.GRAVITY},
        "vorticity2d_forced": {"drag": vorticity.DRAG},
    }
    varied = ("cfd", "reacdiff")  # Mach number and rho are arguments of their solvers
    stated = {name: dict(task.constants) for name, task in TASKS.items() if not name.startswith(varied)}
    assert {name: constants for name, constants in stated.items() if constants} == wanted


def test_solvers_have_the_domains_and_walls_of_their_tasks() -> None:
    sides = {name: high - low for name, task in TASKS.items() for low, high in task.spans}
    assert sides["barkley2d"] == sides["barkley2d_shown"] == barkley.SIDE
    assert sides["ks1d_coarse"] == kuramoto.LENGTH and sides["vorticity2d_forced"] == vorticity.SIDE
    assert sides["diff_react2d"] == diff_react.SIDE and sides["shallow_water2d"] == shallow_water.SIDE
    assert TASKS["cfd1d"].spans == (compressible.DOMAIN_1D,)
    assert TASKS["diff_sorp1d"].walls[0][0] == diff_sorp.LEFT


@pytest.mark.parametrize("task", SOLVERS)
def test_shape_dtype_and_finiteness(task: str) -> None:
    u = SOLVERS[task].simulate(range(2), **request(task))
    num_frames = 1 if TASKS[task].is_steady else 4
    assert u.shape == (2, num_frames, *SHAPES[task]) and u.dtype == torch.float32
    assert torch.isfinite(u).all() and u.std() > 0
    assert SOLVERS[task].simulate([], **request(task)).shape == (0, num_frames, *SHAPES[task])
    assert SOLVERS[task].simulate([0], **request(task, num_frames=1, t_end=0.0)).shape == (
        1,
        1,
        *SHAPES[task],
    )


@pytest.mark.parametrize("task", SOLVERS)
def test_a_trajectory_depends_on_its_seed_and_index_alone_bitwise(task: str) -> None:
    odd = {1: 50, 2: 26, 3: 11}[TASKS[task].ndim]
    for resolution, chunk in ((odd, [1]), (SIZES[task], [2, 0])):
        settings = request(task, resolution=resolution, num_frames=2)
        whole = SOLVERS[task].simulate(range(3), **settings)
        assert torch.equal(whole[chunk], SOLVERS[task].simulate(chunk, **settings))
    other = SOLVERS[task].simulate(range(2), **settings | {"seed": 4})
    rows = torch.cat([whole, other]).flatten(1)
    distances = torch.cdist(rows, rows) + 1e9 * torch.eye(len(rows))
    assert distances.min() > 1e-3


@pytest.mark.parametrize("task", SOLVERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resolution": 4}, "resolution = 4 .* expected at least 8 .* choose"),
        ({"num_frames": 0}, "num_frames = 0; expected at least 1.* choose"),
        ({"seed": -1}, "negative; expected numbers >= 0 .* count"),
    ],
)
def test_bad_requests_say_what_and_what_to_do(task: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOLVERS[task].simulate(range(1), **request(task, **change))


@pytest.mark.parametrize(("task", "name"), cases("pde.not_positive"))
@pytest.mark.parametrize("value", [0.0, -1.0, None, math.nan, math.inf])
def test_a_parameter_that_is_not_positive_is_refused(task: str, name: str, value: float | None) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}; expected a positive number .* give"):
        SOLVERS[task].simulate(range(1), **request(task, parameter=value))


# ---------------------------------------------------------------- initial conditions


def test_advection_and_burgers_start_equally_whatever_their_parameter() -> None:
    settings = request("advection1d", resolution=1024, num_frames=1)
    starts = [
        SOLVERS["advection1d"].simulate(range(12), **settings | {"parameter": beta}) for beta in (0.1, 4.0)
    ]
    averages = [
        SOLVERS["burgers1d"].simulate(range(12), **settings | {"parameter": nu}) for nu in (0.001, 1.0)
    ]
    assert torch.equal(*starts) and torch.equal(*averages)
    # the one holds values at centres, the other cell averages: they differ by dx^2 u'' / 24 and at kinks
    assert (starts[0] - averages[0]).abs().max() < 0.05
    assert (starts[0] - averages[0]).abs().median() < 1e-4


def test_a_wave_does_not_depend_on_resolution_and_has_period_one() -> None:
    x = cell_centres(64)
    fine = torch.stack([x - 1 / 512, x + 1 / 512])
    values = initial_waves(range(20), 0, fine)
    assert values.shape == (20, 2, 64) and values.dtype == torch.float64
    assert torch.equal(values[7], sample_wave(0, 7)(fine))
    torch.testing.assert_close(initial_waves(range(20), 0, fine - 3), values, rtol=0, atol=1e-9)
    assert sample_wave(0, 0)(torch.tensor([-1e-20, 0.0])).diff().abs() == 0


def test_a_wave_is_the_sum_written_in_its_docstring() -> None:
    wave = Wave((0, 2, 0, 4), (0.5, 0.25, 0.75, 1.0), (1.0, 2.0, 3.0, 4.0), -1.0, True, (0.1, 0.55))
    x, scale = 0.3, 2 * math.pi * 1024 / 1023
    total = (
        0.5 * math.sin(1.0)
        + 0.25 * math.sin(2 * scale * x + 2.0)
        + 0.75 * math.sin(3.0)
        + math.sin(4 * scale * x + 4.0)
    )
    window = 0.5 * (math.tanh((x - 0.1) / 0.01) - math.tanh((x - 0.55) / 0.01))
    value = float(wave(torch.tensor([x], dtype=torch.float64)))
    assert value == pytest.approx(-abs(total) * window, abs=1e-14)


def test_waves_are_distributed_as_in_pdebench() -> None:
    waves = [sample_wave(1, index) for index in range(5000)]
    fraction = {
        "abs": sum(wave.use_abs for wave in waves) / 5000,
        "window": sum(wave.window is not None for wave in waves) / 5000,
        "positive": sum(wave.sign > 0 for wave in waves) / 5000,
        "repeat": sum(sum(number > 0 for number in wave.wave_number) == 1 for wave in waves) / 5000,
    }
    expected = {"abs": 0.1, "window": 0.1, "positive": 0.5, "repeat": 0.25}
    assert fraction == pytest.approx(expected, abs=0.025)  # four standard deviations are 0.017 to 0.028
    # the wave numbers of both always add up: n1 + n2, or the doubled 2 n
    assert {sum(wave.wave_number) for wave in waves} == set(range(2, 9))
    for wave in waves:
        assert all(number in (0, mode, 2 * mode) for mode, number in enumerate(wave.wave_number, 1))
    windows = [wave.window for wave in waves if wave.window is not None]
    assert all(0.1 <= left < 0.135 and right == left + 0.45 for left, right in windows)
    amplitude = torch.tensor([wave.amplitude for wave in waves])
    phase = torch.tensor([wave.phase for wave in waves])
    assert abs(amplitude.mean() - 0.5) < 0.01 and 0 <= amplitude.min() and amplitude.max() < 1
    assert abs(phase.mean() - math.pi) < 0.06 and 0 <= phase.min() and phase.max() < 2 * math.pi


def test_streams_differ_in_every_argument_and_repeat() -> None:
    pairs = [(seed, index) for seed in range(40) for index in range(40)]
    first = {pair: random_stream(*pair).random() for pair in pairs}
    assert len(set(first.values())) == 1600
    assert random_stream(2**40, 2**33).random() != random_stream(0, 0).random()  # no truncation to 32 bits
    assert random_stream(3, 5).random() == first[3, 5]


# ---------------------------------------------------------------- Burgers


@pytest.mark.parametrize("nu", [0.001, 0.01, 0.1, 4.0])
@pytest.mark.parametrize("resolution", [50, 256])
def test_burgers_matches_the_closed_form_cole_hopf_solution(nu: float, resolution: int) -> None:
    """phi = 1 + a exp(-c k^2 t) cos kx; cell averages of u are differences of -2c log phi."""
    c, k, amplitude = nu / math.pi, 4 * math.pi, 0.99
    faces = resolution * 64
    time = torch.linspace(0, 0.5, 11, dtype=torch.float64)
    x = torch.arange(faces + 1, dtype=torch.float64) / faces
    psi = -2 * c * torch.log1p(amplitude * torch.exp(-c * k * k * time)[:, None] * torch.cos(k * x))
    exact = torch.diff(psi[:, ::64]) * resolution
    u = burgers.evolve(psi[0, :-1], 0.0, diffusivity=c, dt=0.05, num_frames=11, resolution=resolution)
    assert (u - exact).abs().max() < 1e-11 * exact.abs().max().clamp_min(1.0)
    if nu <= 0.01:
        assert exact[-1].abs().max() > 0.1 * exact[0].abs().max()  # the claim is not about zeros


def test_burgers_conserves_the_mean_and_obeys_the_maximum_principle() -> None:
    for nu in (0.001, 0.01, 4.0):
        for index in range(4):
            u = burgers_frames(sample_wave(0, index), nu, 128, 21, 2.0)
            assert (u.mean(1) - u[0].mean()).abs().max() < 1e-12
            assert (u.amax(1).diff() < 1e-9).all() and (u.amin(1).diff() > -1e-9).all()
            energy = u.square().mean(1)
            assert (energy.diff() < 1e-9).all()


def test_burgers_starts_from_the_exact_cell_averages_also_at_kinks() -> None:
    for wave in find(3, use_abs=True, has_window=False) + find(1, use_abs=True, has_window=True):
        u = burgers_frames(wave, 0.01, 64, 1 + 1, 0.01)[0]
        x = cell_centres(64 * 4096)
        brute = wave(x).unflatten(0, (64, 4096)).mean(-1)
        assert (u - brute).abs().max() < 1e-8


def test_burgers_survives_the_steepest_waves_and_names_a_nu_it_cannot_resolve() -> None:
    strongest = Wave((0, 0, 0, 8), (0.99,) * 4, (math.pi / 2,) * 3 + (0.0,), 1.0, False, (0.1, 0.55))
    for dt in (0.01, 0.05):
        u = burgers_frames(strongest, 0.001, 128, 11, 10 * dt)
        assert torch.isfinite(u).all() and (u.mean(1) - u[0].mean()).abs().max() < 1e-12
    with pytest.raises(ValueError, match="nu/pi = .* needs a finer grid .* expected .* use a larger nu"):
        SOLVERS["burgers1d"].simulate(range(1), **request("burgers1d", parameter=1e-6))


# ---------------------------------------------------------------- Darcy


def manufactured(num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """a = 1 + sin(2 pi x) cos(pi y) / 2, u = sin(pi x) sin(2 pi y) and its source, at the centres."""
    pi, x, y = math.pi, cell_centres(num_cells)[:, None], cell_centres(num_cells)[None, :]
    a = 1 + 0.5 * torch.sin(2 * pi * x) * torch.cos(pi * y)
    a_x = pi * torch.cos(2 * pi * x) * torch.cos(pi * y)
    a_y = -0.5 * pi * torch.sin(2 * pi * x) * torch.sin(pi * y)
    u = torch.sin(pi * x) * torch.sin(2 * pi * y)
    u_x = pi * torch.cos(pi * x) * torch.sin(2 * pi * y)
    u_y = 2 * pi * torch.sin(pi * x) * torch.cos(2 * pi * y)
    return a, 5 * pi * pi * a * u - a_x * u_x - a_y * u_y, u


def test_darcy_is_second_order_on_a_manufactured_solution() -> None:
    errors = []
    for num_cells in (16, 32, 64):
        a, source, u = manufactured(num_cells)
        errors.append(float((darcy.solve(a, source) - u).norm() / u.norm()))
    orders = [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:], strict=False)]
    assert min(orders) > 1.9 and errors[-1] < 1e-3


def test_darcy_solves_samples_together_as_it_does_alone_and_with_either_preconditioner() -> None:
    jumps = torch.stack([darcy.sample_coefficient(0, index, 24) for index in range(3)])
    a = torch.cat(
        [jumps, torch.stack([darcy_grf.sample_log_coefficient(0, index, 24).exp() for index in range(4)])]
    )
    source = torch.ones(7, 1, 1, dtype=torch.float64)
    source[2] = 0  # done before it starts, among others that are not
    alone = darcy.solve(a, source)
    for is_smooth, batch in ((False, 4), (True, 1), (True, 3), (True, 16)):
        u = darcy.solve(a, source, is_smooth=is_smooth, batch=batch)
        torch.testing.assert_close(u, alone, rtol=0, atol=1e-9)
        assert ((darcy.apply_operator(a, u) - source).flatten(1).norm(dim=1) <= 1e-10 * 24).all()
        assert u[2].abs().max() == 0
    darcy.solve(a[3:], torch.ones(()), is_smooth=True, max_iterations=20)
    with pytest.raises(RuntimeError, match="after 20 iterations"):
        darcy.solve(a[3:], torch.ones(()), max_iterations=20, batch=4)


def test_darcy_threshold_is_the_mean_of_the_random_field() -> None:
    """E exp(-r^2/s) by brute force over centres, points and widths; about half of the area is above it."""
    x = cell_centres(200)
    axis = torch.stack(
        [torch.exp(-(x[:, None] - x[None, :]).square() / (0.5 * w)).mean() for w in cell_centres(200)]
    )
    assert darcy._mean_of_bumps() == pytest.approx(5 * float(axis.square().mean()), rel=1e-3)
    fraction = torch.stack([darcy.sample_coefficient(0, i, 16) > 0.5 for i in range(400)]).double().mean(0)
    assert 0.4 < fraction.mean() < 0.6
    # a is high where the bumps are
    assert fraction[7:9, 7:9].mean() > 0.6 > 0.4 > fraction[::15, ::15].mean()


# ---------------------------------------------------------------- diffusion-reaction


def test_diff_react_agrees_with_an_independent_integrator_of_the_five_point_stencil() -> None:
    """Classical Runge-Kutta on the cells with mirrored ghosts: other operator code, other time scheme."""

    def rate(state: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(state[None], (1, 1, 1, 1), mode="replicate")[0]
        neighbours = padded[:, 2:, 1:-1] + padded[:, :-2, 1:-1] + padded[:, 1:-1, 2:] + padded[:, 1:-1, :-2]
        laplacian = (neighbours - 4 * state) * (16 / 2) ** 2
        u, v = state
        return torch.stack([1e-3 * laplacian[0] + u - u**3 - 5e-3 - v, 5e-3 * laplacian[1] + u - v])

    state = diff_react.sample_noise(0, 0, 16)
    ours = diff_react.evolve(state, dt=1 / 256, num_steps=128, num_frames=2)[1]
    dt = 1 / 512
    for _ in range(256):
        k1 = rate(state)
        k2 = rate(state + 0.5 * dt * k1)
        k3 = rate(state + 0.5 * dt * k2)
        k4 = rate(state + dt * k3)
        state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    assert (ours - state).abs().max() < 1e-7


def test_diff_react_without_reaction_conserves_the_mean_and_decays_each_mode_exactly() -> None:
    noise = diff_react.sample_noise(0, 0, 32)
    frames = diff_react.evolve(noise, dt=0.1, num_steps=5, num_frames=4, reaction_rate=0.0)
    assert (frames.mean((2, 3)) - noise.mean((1, 2))).abs().max() < 1e-13
    x = cell_centres(32)
    mode = (torch.cos(3 * math.pi * x)[:, None] * torch.cos(math.pi * x)[None, :]).expand(2, 32, 32)
    decay = sum(-((32 * math.sin(k * math.pi / 64)) ** 2) for k in (3, 1))
    last = diff_react.evolve(mode, dt=0.1, num_steps=10, num_frames=2, reaction_rate=0.0)[1]
    for channel, diffusion in enumerate((1e-3, 5e-3)):
        exact = mode[channel] * math.exp(diffusion * decay)
        torch.testing.assert_close(last[channel], exact, rtol=0, atol=1e-12)


def test_diff_react_noise_is_white_and_the_time_step_divides_the_frame_spacing() -> None:
    noise = torch.cat([diff_react.sample_noise(0, index, 32) for index in range(8)])
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < 0.05
    few = SOLVERS["diff_react2d"].simulate(
        [0], seed=0, resolution=16, num_frames=3, parameter=None, t_end=0.2
    )
    many = SOLVERS["diff_react2d"].simulate(
        [0], seed=0, resolution=16, num_frames=9, parameter=None, t_end=0.2
    )
    torch.testing.assert_close(few, many[:, ::4], rtol=0, atol=5e-5)
