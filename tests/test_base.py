"""Bases of an axis (ups_discovery/spectral.py) and base predictors (ups/models/bases/__init__.py) against
definitions, exact solutions, hand-set weights."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ups.config.model import BASES
from ups.models.bases import base_class
from ups.models.bases.base import Base, ParameterBatch, Persistence
from ups.models.bases.elliptic import Elliptic
from ups.models.bases.propagator import Propagator, monomials
from ups.models.bases.transport import Transport
from ups_discovery.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC
from ups_discovery.spectral import FieldTransform, apply_axes, cosine, fourier_pairs, sine
from ups_solvers import SOLVERS, darcy

NONE = torch.zeros(0)  # no parameter


def parameter_batch(standard: torch.Tensor, index: torch.Tensor | None = None) -> ParameterBatch:
    """Of standardised parameters; without an index all rows have the first value."""
    return ParameterBatch(standard, torch.zeros(len(standard), dtype=torch.long) if index is None else index)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(pred: torch.Tensor, ref: torch.Tensor) -> float:
    return float((pred.detach().double() - ref.detach().double()).norm() / ref.detach().double().norm())


# ---------------------------------------------------------------- bases of an axis


@pytest.mark.parametrize("n", [7, 8])
def test_the_fourier_rows_are_an_orthonormal_basis_and_agree_with_the_fft(n):
    rows = fourier_pairs(n, n // 2 + 1)
    basis = rows.flatten(0, 1)
    basis = basis[basis.norm(dim=-1) > 0]
    assert basis.shape == (n, n)
    torch.testing.assert_close(basis @ basis.T, torch.eye(n, dtype=torch.float64))
    u = noise(n, dtype=torch.float64)
    u_hat = torch.fft.rfft(u, norm="ortho")
    # each wave number but 0 and n/2 stands for two
    weight = torch.full((n // 2 + 1,), math.sqrt(2), dtype=torch.float64)
    weight[0] = 1
    weight[-1] = 1 if n % 2 == 0 else weight[-1]
    cosines, sines = rows @ u
    torch.testing.assert_close(cosines, weight * u_hat.real)
    torch.testing.assert_close(sines, -weight * u_hat.imag)


@pytest.mark.parametrize("n", [6, 9])
@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX, DIRICHLET])
def test_the_rows_are_eigenfunctions_of_the_laplacian_with_the_ghost_cells_of_the_boundary(n, boundary):
    if boundary == PERIODIC:
        rows, k = fourier_pairs(n, n // 2 + 1).flatten(0, 1), 2 * torch.arange(n // 2 + 1).repeat(2)
        ghosts = rows[:, -1:], rows[:, :1]
    else:
        rows, k = (sine(n), torch.arange(1, n + 1)) if boundary == DIRICHLET else (cosine(n), torch.arange(n))
        sign = -1 if boundary == DIRICHLET else 1
        ghosts = sign * rows[:, :1], sign * rows[:, -1:]
    wide = torch.cat([ghosts[0], rows, ghosts[1]], 1)
    laplacian = wide[:, 2:] - 2 * rows + wide[:, :-2]
    eigenvalue = 2 * torch.cos(math.pi * k.double() / n) - 2
    torch.testing.assert_close(laplacian, eigenvalue[:, None] * rows)


@pytest.mark.parametrize("space", [(7,), (8,), (6, 5), (5, 6), (4, 3, 6), (3, 4, 5)])
@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX, DIRICHLET, OUTFLOW])
def test_a_field_transform_inverts_itself_and_keeps_the_norm(space, boundary):
    transform = FieldTransform(space, boundary)
    u = noise(2, 3, *space)
    u_hat = transform.forward(u)
    assert u_hat.shape == (2, 3, transform.modes) and u_hat.is_complex() == (boundary == PERIODIC)
    torch.testing.assert_close(transform.inverse(u_hat), u, rtol=0, atol=2e-6)
    if boundary != PERIODIC:
        torch.testing.assert_close(u_hat.norm(), u.norm())
    assert not transform.state_dict()  # nothing to save: a checkpoint holds the weights alone


# ---------------------------------------------------------------- propagator


class FakeSamples:
    """Windows of trajectories, one list of pairs (u, u_next) per parameter value."""

    device = torch.device("cpu")

    def __init__(self, *pairs: list[tuple[torch.Tensor, torch.Tensor]]):
        self.pairs = pairs

    def count(self, value):
        return len(self.pairs[value])

    def batches(self, count, size, value=None):
        self.requested = count, size
        return [lambda u=u, u_next=u_next: (u, None, u_next) for u, u_next in self.pairs[value]]


def candidates(
    samples: FakeSamples, space: tuple[int, ...], boundary: str, degree: int, history: int, channels: int = 1
) -> dict[str, Propagator]:
    settings = {
        "num_values": len(samples.pairs),
        "num_channels": channels,
        "space": space,
        "boundary": boundary,
        "degree": degree,
        "history": history,
    }
    found = {}
    for name, own, base in Propagator.fit(samples, settings):
        fitted = {"degree": base.degree, "history": base.history, "ridge": float(name.split()[-1])}
        assert own == settings | fitted  # it can be built again
        twin = base.twin(samples, own)[1]  # of the same windows: the base again
        assert torch.allclose(twin.weight_real, base.weight_real, rtol=1e-3, atol=1e-3)
        found[name] = base
    return found


def fitted(
    trajectories: list[torch.Tensor],
    boundary: str,
    degree: int,
    history: int,
    ridge: float = 1e-10,
    want: tuple[int, int] | None = None,
) -> Propagator:
    """The propagator of `trajectories`, one (n, time, C, *space) per parameter value."""
    pairs = [
        [(u[:, start : start + history], u[:, start + history]) for start in range(u.shape[1] - history)]
        for u in trajectories
    ]
    shape = trajectories[0].shape
    found = candidates(FakeSamples(*pairs), tuple(shape[3:]), boundary, degree, history, shape[2])
    degree, history = want or (degree, history)
    name = f"propagator degree {degree} history {history} ridge "
    # a smaller ridge is left out if it makes no difference
    return found.get(f"{name}{ridge:g}") or [one for key, one in found.items() if key.startswith(name)][-1]


def roll_out(
    base: torch.nn.Module, u: torch.Tensor, steps: int, index: torch.Tensor | None = None
) -> torch.Tensor:
    """`steps` frames after the window u (n, history, C, *space)."""
    for _ in range(steps):
        u = torch.cat([u, base(u, parameter_batch(NONE.expand(len(u), 0), index))[:, None]], 1)
    return u[:, -steps:]


def modal(u: torch.Tensor, factors: torch.Tensor, boundary: str) -> torch.Tensor:
    """Frames (n, 1 + T, 1, *space), float64: every spectral mode of u (n, 1, *space) times factors (1 + T,
    modes)."""
    space = u.shape[2:]
    if boundary == PERIODIC:
        axes = tuple(range(-len(space), 0))
        u_hat = torch.fft.rfftn(u, dim=axes)[:, None] * factors.view(1, len(factors), 1, *u.shape[2:-1], -1)
        return torch.fft.irfftn(u_hat, s=space, dim=axes)
    matrices = [sine(n) if boundary == DIRICHLET else cosine(n) for n in space]
    u_hat = apply_axes(u, matrices)[:, None] * factors.view(len(factors), 1, *space)
    return apply_axes(u_hat, [m.T for m in matrices])


def shifted(u: torch.Tensor, cells: float, steps: int) -> torch.Tensor:
    """u (n, 1, odd) moved by `cells` per frame, exactly: (n, 1 + steps, 1, odd)."""
    k = torch.arange(u.shape[-1] // 2 + 1, dtype=torch.float64)
    angle = -2 * math.pi * cells / u.shape[-1] * torch.outer(torch.arange(steps + 1, dtype=torch.float64), k)
    return modal(u, torch.polar(torch.ones_like(angle), angle), PERIODIC)


SHIFTS = (0.3, 1.7, -2.45)  # cells per frame, one per parameter value


@pytest.fixture(scope="module")
def shift_propagator():
    return fitted(
        [shifted(noise(24, 1, 33, dtype=torch.float64), cells, 4).float() for cells in SHIFTS], PERIODIC, 1, 1
    )


def test_a_propagator_recovers_a_shift_by_a_fraction_of_a_cell_for_thirty_steps(shift_propagator):
    for value, cells in enumerate(SHIFTS):
        truth = shifted(noise(3, 1, 33, seed=9, dtype=torch.float64), cells, 30)
        pred = roll_out(shift_propagator, truth[:, :1].float(), 30, torch.full((3,), value))
        assert relative(pred, truth[:, 1:]) < 1e-5


def test_every_sample_of_a_mixed_batch_uses_the_weights_of_its_parameter_value(shift_propagator):
    u, index = noise(6, 1, 33, seed=8, dtype=torch.float64), torch.tensor([2, 0, 1, 1, 2, 0])
    truth = torch.cat([shifted(u[i : i + 1], SHIFTS[value], 1) for i, value in enumerate(index.tolist())])
    assert relative(roll_out(shift_propagator, truth[:, :1].float(), 1, index), truth[:, 1:]) < 1e-6
    assert relative(roll_out(shift_propagator, truth[:, :1].float(), 1, index.flip(0)), truth[:, 1:]) > 0.5


@pytest.mark.parametrize(
    ("boundary", "space"), [(NO_FLUX, (8, 6)), (DIRICHLET, (8, 6)), (PERIODIC, (7, 9)), (NO_FLUX, (4, 5, 6))]
)
def test_a_propagator_recovers_the_heat_equation_behind_every_wall(boundary, space):
    if boundary == PERIODIC:
        waves = [
            2 * torch.fft.fftfreq(space[0], 1 / space[0]).double(),
            2 * torch.arange(space[1] // 2 + 1).double(),
        ]
    else:
        waves = [torch.arange(n).double() + (boundary == DIRICHLET) for n in space]
    rate = sum(
        (2 - 2 * torch.cos(math.pi * k / n)).view(*[-1 if i == axis else 1 for i in range(len(space))])
        for axis, (k, n) in enumerate(zip(waves, space, strict=True))
    )
    factors = torch.exp(-0.2 * torch.arange(11, dtype=torch.float64)[:, None] * rate.flatten())

    def frames(num: int, steps: int, seed: int) -> torch.Tensor:
        return modal(noise(num, 1, *space, seed=seed, dtype=torch.float64), factors[: steps + 1], boundary)

    base = fitted([frames(24, 2, 0).float()], boundary, 1, 1)
    truth = frames(3, 10, 5)
    assert relative(roll_out(base, truth[:, :1].float(), 10), truth[:, 1:]) < 1e-5


@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX])
def test_a_propagator_predicts_each_row_as_alone_and_as_the_product_of_its_modes(monkeypatch, boundary):
    settings = {"num_values": 2, "num_channels": 2, "space": (4, 6), "boundary": boundary, "num_forcing": 1}
    base, u = Propagator(2, 2, **settings), noise(5, 2, 2, 4, 6)
    for weight in base.buffers():
        if weight.ndim == 4:
            weight.normal_(generator=torch.Generator().manual_seed(1))
    index = torch.tensor([0, 1, 1, 0, 1])
    parameters = ParameterBatch(torch.zeros(5, 1), index, forcing=noise(5, 2, 1, 4, 6, seed=1))
    together = base(u, parameters)
    monkeypatch.setattr("ups.models.bases.propagator.WEIGHT_BYTES", 1)
    assert torch.equal(base(u, parameters), together)
    start, phi = base.start_and_terms(u, parameters)
    weight = base.weight_real + (1j * base.weight_imag if boundary == PERIODIC else 0)
    change = torch.einsum("btm,bmtc->bcm", base.with_forcing(phi, parameters), weight[index])
    torch.testing.assert_close(together, start + base.transform.inverse(change), rtol=1e-5, atol=1e-4)


def reaction_step(u: torch.Tensor, dt: float = 0.1, diffusion: float = 0.3) -> torch.Tensor:
    """Explicit Euler of u_t = D lap u + u - u^3 - v, v_t = u - v with no-flux walls; u (n, 2, ny, nx)."""
    wide = F.pad(u, (1, 1, 1, 1), mode="replicate")
    laplacian = (
        wide[..., 2:, 1:-1] + wide[..., :-2, 1:-1] + wide[..., 1:-1, 2:] + wide[..., 1:-1, :-2] - 4 * u
    )
    a, b = u[:, :1], u[:, 1:]
    return u + dt * torch.cat([diffusion * laplacian[:, :1] + a - a**3 - b, a - b], 1)


def test_degree_three_finds_the_coefficients_of_a_cubic_reaction_and_degree_one_cannot():
    frames = [0.8 * noise(300, 2, 4, 5, dtype=torch.float64)]
    for _ in range(2):
        frames.append(reaction_step(frames[-1]))
    u = torch.stack(frames, 1)
    base = fitted([u.float()], NO_FLUX, 3, 1)
    terms = monomials(2, 3)
    assert terms[:5] == [(0,), (1,), (0, 0), (0, 1), (1, 1)] and len(terms) == 9
    weight = base.weight_real[0]  # modes, terms, channels
    expected = torch.zeros_like(weight)
    ky, kx = torch.arange(4.0)[:, None], torch.arange(5.0)[None, :]
    eigenvalue = (2 * torch.cos(math.pi * ky / 4) + 2 * torch.cos(math.pi * kx / 5) - 4).flatten()
    expected[:, terms.index((0,)), 0] = 0.1 * (1 + 0.3 * eigenvalue)
    expected[:, terms.index((1,)), 0] = -0.1
    expected[:, terms.index((0, 0, 0)), 0] = -0.1
    expected[:, terms.index((0,)), 1], expected[:, terms.index((1,)), 1] = 0.1, -0.1
    torch.testing.assert_close(weight, expected, rtol=0, atol=2e-5)
    truth = [noise(2, 2, 4, 5, seed=4, dtype=torch.float64) * 0.5]
    for _ in range(20):
        truth.append(reaction_step(truth[-1]))
    truth = torch.stack(truth, 1)
    assert relative(roll_out(base, truth[:, :1].float(), 20), truth[:, 1:]) < 1e-4
    linear = fitted([u.float()], NO_FLUX, 3, 1, want=(1, 1))
    assert relative(roll_out(linear, truth[:, :1].float(), 20), truth[:, 1:]) > 1e-2


def test_two_frames_of_history_recover_the_wave_equation_and_one_cannot():
    """Mode k oscillates as cos(k c t + phase), which obeys u_next = 2 cos(k c) u - u_before and nothing of
    first order."""
    k = torch.arange(9, dtype=torch.float64)

    def waves(num: int, seed: int, frames: int) -> torch.Tensor:
        now = noise(num, 1, 17, seed=seed, dtype=torch.float64)
        before = noise(num, 1, 17, seed=seed + 1, dtype=torch.float64)
        u_hat = [torch.fft.rfft(before), torch.fft.rfft(now)]
        while len(u_hat) < frames:
            u_hat.append(2 * torch.cos(0.3 * k) * u_hat[-1] - u_hat[-2])
        u = torch.fft.irfft(torch.stack(u_hat, 1), n=17)
        return u / u.square().mean().sqrt()

    data, truth = waves(40, 0, 8), waves(2, 7, 22)
    both = fitted([data.float()], PERIODIC, 1, 2)
    assert both.history == 2 and relative(roll_out(both, truth[:, :2].float(), 20), truth[:, 2:]) < 1e-5
    assert relative(roll_out(both, truth[:, :2].float(), 1), truth[:, 2:3]) < 1e-5
    one = fitted([data.float()], PERIODIC, 1, 2, want=(1, 1))
    assert one.history == 1 and relative(roll_out(one, truth[:, :2].float(), 1), truth[:, 2:3]) > 0.1


def test_the_ridge_is_that_of_the_formula():
    """One cell, one channel, u_next = 2 u: W = <u, u> / (<u, u> + ridge n), by hand."""
    u = torch.tensor([1e-3, 2e-3, -1e-3]).view(3, 1, 1)
    fits = candidates(FakeSamples([(u[:, None], 2 * u)]), (1,), NO_FLUX, 1, 1)
    found = [float(base.weight_real) for base in fits.values()]
    assert found == pytest.approx([6e-6 / (6e-6 + 3 * ridge) for ridge in (1e-6, 1e-8, 1e-10)], rel=1e-5)


def test_candidates_are_every_degree_history_and_ridge_worth_trying():
    """A smaller ridge is worth it if the error of a frame falls: not for noise, but for exact decay."""
    u, decayed = noise(30, 4, 1, 4), noise(30, 1, 1, 4) * 0.5 ** torch.arange(5).view(5, 1, 1)
    every = [f"propagator degree {d} history {h} ridge " for d in (1, 3) for h in (1, 2, 4)]
    fits = candidates(FakeSamples([(u, noise(30, 5, 1, 4)[:, 4])]), (4,), NO_FLUX, 3, 4)
    assert set(fits) == {f"{name}1e-06" for name in every}
    fits = candidates(FakeSamples([(decayed[:, :4], decayed[:, 4])]), (4,), NO_FLUX, 3, 4)
    assert set(fits) >= {f"{every[0]}{ridge}" for ridge in ("1e-06", "1e-08", "1e-10")}
    assert all(f"degree {fits[name].degree} history {fits[name].history} " in name for name in fits)


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (8 * 4 * 12**2, {(1, 1), (1, 4), (3, 1), (3, 4)}),
        (8 * 4 * 12**2 - 1, {(1, 1), (1, 4)}),
        (8 * 4 * 4**2 - 1, {(1, 1)}),
        (31, set()),
    ],
)
def test_a_propagator_too_large_for_memory_has_fewer_terms_or_is_not_fitted(most, found, monkeypatch):
    monkeypatch.setattr(Propagator, "MOST_BYTES", most)
    u = noise(30, 6, 1, 4)
    fits = candidates(FakeSamples([(u[:, :4], u[:, 4])]), (4,), NO_FLUX, 3, 4)
    assert {(fit.degree, fit.history) for fit in fits.values()} - {(1, 2), (3, 2)} == found


def test_a_large_grid_is_fitted_in_small_batches_and_to_ten_windows_per_unknown_at_least(monkeypatch):
    u = noise(60, 2, 1, 4)
    samples = FakeSamples([(one[None, :1], one[None, 1]) for one in u])
    candidates(samples, (4,), NO_FLUX, 1, 1)
    assert samples.requested == (60, 32)
    monkeypatch.setattr(Propagator, "MOST_BYTES", 4 * 16 * 4 * 7)
    for most, count in ((10**9, 60), (4 * 20, 20), (1, 10)):
        monkeypatch.setattr(Propagator, "MOST_PRODUCTS", most)
        candidates(samples, (4,), NO_FLUX, 1, 1)
        assert samples.requested == (count, 7)


def test_a_parameter_value_without_windows_is_an_error_that_numbers_it():
    u = noise(4, 2, 1, 4)
    windows = [[(u[:, :1], u[:, 1])], []]
    with pytest.raises(
        ValueError, match="no training window for parameter value number 1; expected at least one"
    ):
        candidates(FakeSamples(*windows), (4,), NO_FLUX, 1, 1)


def stay(u: torch.Tensor) -> torch.Tensor:
    """A solver as a user would name it."""
    return u


SETTINGS = {
    "num_values": 2,
    "num_parameters": 1,
    "num_channels": 1,
    "num_inputs": 1,
    "space": [8, 8],
    "boundary": PERIODIC,
    "solver": "test_base:stay",
    "task": "heat",
    "positive": [],
    "names": [],
    "dt": 0.1,
    "degree": 2,
    "history": 2,
    "reach": 3,
    "lengths": [1.0, 1.0],
    "vectors": [],
    "num_moving": 1,
}


def built(kind: str) -> tuple[Base, torch.Tensor]:
    """A base and a window that it may be shown; a flow needs a velocity."""
    flow = {"num_channels": 2, "vectors": [[0, 1]], "num_moving": 2} if kind == "flow" else {}
    base = base_class(kind)(**SETTINGS | flow)
    if kind == "solver":
        base.use(stay)
    return base, noise(3, 2, 2 if flow else 1, 8, 8)


@pytest.mark.parametrize("kind", BASES)
def test_a_call_does_not_wait_for_the_device(kind):
    """On torch's meta device there are none: item(), tolist(), bool() or nonzero() of a tensor would
    raise."""
    base, u = built(kind)
    of = ParameterBatch(torch.zeros(3, 1, device="meta"), torch.tensor([1, 0, 1], device="meta"))
    assert base.to("meta")(u.to("meta"), of).shape == u[:, -1].shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        of.index.unique().tolist()


def test_what_is_not_fitted_is_persistence():
    u = noise(2, 3, 1, 8)
    assert torch.equal(Persistence()(u, parameter_batch(NONE.expand(2, 0))), u[:, -1])
    for boundary in (PERIODIC, NO_FLUX):
        base = Propagator(num_values=1, num_channels=1, space=(8,), boundary=boundary, degree=3, history=3)
        torch.testing.assert_close(base(u, parameter_batch(NONE.expand(2, 0))), u[:, -1])


# ---------------------------------------------------------------- transport


def transport(
    space: tuple[int, ...], boundary: str, reach: int, channels: int = 1, parameters: int = 1
) -> Transport:
    return Transport(
        num_parameters=parameters, num_channels=channels, space=space, boundary=boundary, reach=reach
    )


def scrambled(base: torch.nn.Module, size: float, seed: int = 3) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return base


@pytest.mark.parametrize(
    ("space", "boundary"),
    [
        ((32,), PERIODIC),
        ((32,), NO_FLUX),
        ((16, 12), PERIODIC),
        ((16, 12), NO_FLUX),
        ((6, 8, 7), PERIODIC),
        ((6, 8, 7), OUTFLOW),
    ],
)
def test_transport_keeps_constants_and_never_leaves_the_range_of_its_input(space, boundary):
    base = scrambled(transport(space, boundary, 3, channels=2), 1.0)
    parameters = parameter_batch(noise(4, 1, seed=1))
    constant = torch.tensor([0.7, -2.0]).view(1, 1, 2, *[1] * len(space)).expand(4, 1, 2, *space).contiguous()
    torch.testing.assert_close(base(constant, parameters), constant[:, 0])
    u = noise(4, 1, 2, *space, seed=2)
    u_next = base(u, parameters)
    axes = tuple(range(2, u_next.ndim))
    assert (u_next.amax(axes) <= u[:, 0].amax(axes) + 1e-6).all()
    assert (u_next.amin(axes) >= u[:, 0].amin(axes) - 1e-6).all()
    assert relative(u_next, u[:, 0]) > 0.1  # and it does something


NUS = (0.05, 0.1)
# standardised: -1 and 1
LOGS = [(math.log(nu) - sum(map(math.log, NUS)) / 2) / (math.log(2) / 2) for nu in NUS]


def cole_hopf(n: int, reach: int, dt: float, mean: float, std: float) -> Transport:
    """Transport with the weights that the Cole-Hopf solution of Burgers' equation prescribes, c = nu / pi = C
    exp(s log 2 / 2):

    weight of the value at x + k:  exp( -(psi(x + k) - psi(x)) / 2c - (k dx)^2 / (4 c dt) )
    with psi_x = u = mean + std w.
    """
    base, middle, slope = (
        transport((n,), PERIODIC, reach),
        math.exp(sum(map(math.log, NUS)) / 2) / math.pi,
        math.log(2) / 2,
    )
    dx = 1 / n
    with torch.no_grad():
        base.stencil[0, 0, 2] = -std * dx / (2 * middle) * reach / base.RATE_SCALE
        base.log_amplitude[0, 0] = -slope
        drift = [-mean * dx / (2 * nu / math.pi) for nu in NUS]
        base.drift[0, 0], base.drift[0, 1] = sum(drift) / 2, (drift[1] - drift[0]) / 2
        base.log_width[0, 0], base.log_width[0, 1] = math.log(math.sqrt(2 * middle * dt) / dx), slope / 2
    return base


def burgers_windows(
    n: int, frames: int, dt: float, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(u (pairs, 1, 1, n), standardised log nu (pairs, 1), u_next (pairs, 1, n)) from the solver, after the
    first frame."""
    u, logs, u_next = [], [], []
    for nu, log in zip(NUS, LOGS, strict=True):
        solution = SOLVERS["burgers1d"].simulate(
            range(count), seed=1, resolution=n, num_frames=frames, parameter=nu, t_end=dt * (frames - 1)
        )
        u.append(solution[:, 1:-1].flatten(0, 1)[:, None])
        u_next.append(solution[:, 2:].flatten(0, 1))
        logs.append(torch.full((len(u[-1]), 1), log))
    return torch.cat(u), torch.cat(logs), torch.cat(u_next)


def test_transport_with_the_cole_hopf_weights_is_burgers_equation():
    u, logs, u_next = burgers_windows(256, 6, 0.05, 4)
    mean, std = 0.05, 0.6
    base = cole_hopf(256, 96, 0.05, mean, std)
    pred = base((u - mean) / std, parameter_batch(logs)) * std + mean
    assert relative(pred, u_next) < 1e-4
    assert relative(u[:, 0], u_next) > 0.05  # persistence: the step is not small
    # the other viscosity: the parameter matters
    wrong = base((u - mean) / std, parameter_batch(-logs)) * std + mean
    assert relative(wrong, u_next) > 0.01


def blur_kernel(width: float, drift: float, reach: int) -> torch.Tensor:
    k = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weight = torch.exp(drift * k - k**2 / (2 * width**2))
    return weight / weight.sum()


@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX])
def test_transport_acts_along_every_axis_with_a_width_and_a_velocity_per_axis(boundary):
    base = transport((12, 10), boundary, 4)
    widths, drifts = (1.3, 0.6), (0.2, -0.4)
    with torch.no_grad():
        base.log_width[:, 0] = torch.tensor(widths).log()
        base.drift[:, 0] = torch.tensor(drifts)
    u = noise(2, 1, 1, 12, 10)
    expected = u[:, 0].double()
    for axis, (width, drift) in enumerate(zip(widths, drifts, strict=True)):
        kernel = blur_kernel(width, drift, 4)
        moved = expected.movedim(2 + axis, -1)
        padded = F.pad(moved[:, 0], (4, 4), mode="circular" if boundary == PERIODIC else "reflect")
        if boundary != PERIODIC:  # the mirror lies on the face, half a cell outside the first centre
            padded = torch.cat([moved[:, 0, :, :4].flip(-1), moved[:, 0], moved[:, 0, :, -4:].flip(-1)], -1)
        expected = (padded.unfold(-1, 9, 1) @ kernel)[:, None].movedim(-1, 2 + axis)
    pred = base(u, parameter_batch(torch.zeros(2, 1)))
    torch.testing.assert_close(pred.double(), expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- elliptic


def elliptic(space: tuple[int, ...], boundary: str, channels: int = 1, inputs: int = 1) -> Elliptic:
    torch.manual_seed(0)
    return Elliptic(
        num_parameters=1, num_channels=channels, num_inputs=inputs, space=space, boundary=boundary
    )


def constant_faces(base: Elliptic, a: float) -> Elliptic:
    """Conductivity a on every face, source 1, no reaction."""
    with torch.no_grad():
        for parameter in (*base.face.parameters(), *base.cell.parameters()):
            parameter.zero_()
        base.face[-1].bias.fill_(math.log(a) / 2)  # both orders of the two cells add up
        base.cell[-1].bias[base.num_channels :] = -40.0
    return base


@pytest.mark.parametrize("space", [(16, 16), (12, 16)])
def test_constant_faces_between_cold_walls_solve_the_poisson_problem(space):
    base = constant_faces(elliptic(space, DIRICHLET), 0.4)
    base.gain.fill_(space[0] ** 2 / base.mean_square)
    base.zero.fill_(0.3)
    u_ref = darcy.solve(torch.full(space, 0.4), torch.ones(()))
    u_pred = base(noise(2, 1, 1, *space), parameter_batch(torch.zeros(2, 1))) - 0.3
    assert relative(u_pred[0, 0], u_ref) < 1e-5 and relative(u_pred[1, 0], u_ref) < 1e-5


SPACES = [((9,), 1), ((6, 5), 2), ((4, 3, 5), 1)]


@pytest.mark.parametrize(("space", "channels"), SPACES)
@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX, DIRICHLET, OUTFLOW])
def test_the_preconditioned_iteration_solves_the_system_it_builds(space, channels, boundary):
    base = scrambled(elliptic(space, boundary, channels), 0.2)
    with torch.no_grad():
        base.cell[-1].bias[channels:] += (
            8.0  # a reaction of order one: without walls the problem is singular otherwise
        )
    base.ITERATIONS = 80
    given = noise(2, 1, 1, *space), parameter_batch(torch.full((2, 1), 0.5))
    (operator, source), solution = base.system(*given), base(*given)
    assert solution.shape == (2, channels, *space)
    # float32; 2e-4 measured
    assert relative(operator(solution - base.zero.view(-1, *[1] * len(space))), source) < 1e-3


@pytest.mark.parametrize(
    ("base", "space"),
    [
        (transport((12,), PERIODIC, 3, channels=2), (12,)),
        (transport((4, 5), NO_FLUX, 2, channels=2), (4, 5)),
        (elliptic((5, 4), DIRICHLET, channels=2, inputs=2), (5, 4)),
        (elliptic((4, 6), f"{PERIODIC},{NO_FLUX}", channels=2, inputs=2), (4, 6)),
    ],
)
def test_tangents_are_derivatives_of_what_the_prediction_lacks(base, space):
    base = scrambled(base, 0.2)
    base.ITERATIONS = 80
    window = noise(2, 1, 2, *space), parameter_batch(noise(2, 1, seed=4)), noise(2, 2, *space, seed=7)
    if base.kind == "elliptic":
        with torch.no_grad():  # a reaction: without walls the problem is singular otherwise
            base.cell[-1].bias[2:] += 8.0
    values = parameters_to_vector(base.parameters()).detach()
    direction = noise(len(values), seed=8) / 300

    def lacking(sign: float) -> torch.Tensor:
        vector_to_parameters(values + sign * direction, base.parameters())
        with torch.no_grad():
            error = window[2] - base(*window[:2])
        return error.flatten(1) @ base.probes().flatten(1).T if base.kind == "elliptic" else error

    change = ((lacking(-1) - lacking(1)) / 2).flatten(1)
    vector_to_parameters(values, base.parameters())
    x = base.tangents(window)[1].detach()
    assert relative(x[..., :-1] @ direction, change) < 1e-2
    assert relative(x[..., -1], lacking(0).flatten(1)) < 1e-5


def darcy_data(num: int, resolution: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised coefficient (num, 1, 1, n, n) and solution (num, 1, n, n); the last value is that of u =
    0."""
    fields = SOLVERS["darcy2d"].simulate(
        range(num), seed=3, resolution=resolution, num_frames=1, parameter=1.0, t_end=1.0
    )[:, 0]
    a, u = fields[:, :1], fields[:, 1:]
    return ((a - a.mean()) / a.std())[:, None], torch.cat([u, torch.zeros_like(u[:1])]).sub(u.mean()).div(
        u.std()
    )


def test_the_elliptic_base_learns_darcy_flow_from_few_samples_in_few_steps():
    a, u = darcy_data(80, 16)
    shown, held = slice(0, 64), slice(64, 80)
    base = elliptic((16, 16), DIRICHLET)
    base.zero.copy_(u[-1].flatten()[:1])
    u = u[:-1]
    zeros = torch.zeros(80, 1)
    before = relative(base(a[held], parameter_batch(zeros[held])), u[held])
    base.calibrate(a[shown], parameter_batch(zeros[shown]), u[shown])
    calibrated = relative(base(a[held], parameter_batch(zeros[held])), u[held])

    def draw(step: int) -> tuple:
        rows = torch.arange(8 * step, 8 * step + 8) % 64
        return a[rows], parameter_batch(zeros[rows]), u[rows]

    base.descend([partial(draw, step % 8) for step in range(25)])
    after = relative(base(a[held], parameter_batch(zeros[held])), u[held])
    mean = relative(u[shown].mean(0, keepdim=True).expand(16, -1, -1, -1), u[held])
    assert calibrated < before and after < 0.02 * mean, (before, calibrated, after, mean)


@torch.no_grad()
def test_more_iterations_show_the_error_of_large_contrast_and_a_twin_does_not():
    """Of an exact law: the iterations that suffice in training do not for coefficients of more contrast."""
    base, none = scrambled(elliptic((16, 16), DIRICHLET), 0.4), parameter_batch(torch.zeros(4, 1))
    refined, exact, twin = base.refined({}), base.refined({}), scrambled(copy.deepcopy(base), 1e-4, seed=4)
    exact.ITERATIONS = 600
    assert refined.ITERATIONS > base.ITERATIONS == Elliptic.ITERATIONS
    u = noise(4, 1, 1, 16, 16)

    def wrong(contrast: float) -> list[float]:
        u_pred, u_ref, *others = (one(contrast * u, none) for one in (base, exact, refined, twin))
        return [float((u_pred - other).norm() / u_ref.norm()) for other in (u_ref, *others)]

    (known, seen, _), (error, shown, fake) = wrong(1.0), wrong(4.0)
    assert max(known, seen) < 1e-5 and error > 0.01 and error / 2 < shown < 2 * error and fake < error / 10


def test_calibration_finds_the_gain_of_a_scaled_source():
    base = constant_faces(elliptic((8, 8), DIRICHLET), 1.0)
    u, none = noise(3, 1, 1, 8, 8), parameter_batch(torch.zeros(3, 1))
    base.zero.fill_(-0.2)
    u_ref = 7.5 * (base(u, none) + 0.2) - 0.2
    base.calibrate(u, none, u_ref)
    assert float(base.gain) == pytest.approx(7.5, rel=1e-5)
    torch.testing.assert_close(base(u, none), u_ref)
