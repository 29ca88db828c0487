"""A step of the user's, corrected in the user's loop (ups/forecast_corrector.py): in the kind of array that
came, batched, conserving what the step conserves, and the user's own result where a check fails."""

import importlib
import json
import math
import re
import sys
import warnings
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from user_files import ONE_BLOCK, fitted, overlay, section

from bench.starts import matrix, solved
from ups import forecast_corrector as corrector
from ups.commands import corrector_data
from ups.commands.corrector_costs import corrected_runs, data_seconds, paying_runs, require_unseen, run_of
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.forecast_corrector import CHECKS, OF_CALL, StepCorrector
from ups.forecast_start import Start
from ups.forecaster import Forecaster
from ups.models.bases.solver import LEAST_SIZE
from ups.models.head import TaskHead
from ups.models.loss import operator_loss, relative_errors
from ups.models.rollout import NUM_FIRST_CALLS
from ups_solvers import SOLVERS

CELLS, DT = 32, 0.1
STEP = """
import numpy as np
def step(u, dt):  # advection by first-order upwind differences: smears
    for _ in range(4):
        u = u - dt / 4 * 5 * (u - np.roll(u, 1, -1))
    return u
"""


def exact(frames: int, num: int, draw: np.random.Generator) -> np.ndarray:
    """Waves that move by a tenth of the domain per unit of time: (num, frames, cells)."""
    x, t = np.arange(CELLS) / CELLS, DT * np.arange(frames)[:, None]
    a, phase = draw.random((2, num, 3, 1, 1))
    k = 2 * np.pi * np.arange(1, 4)[:, None, None]
    return 1 + (a * np.sin(k * (x - 5 / CELLS * t) + 6 * phase)).sum(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Forecaster, np.ndarray]:
    """An operator over a coarse step, whose network has random weights, and starts (n, 1, cells)."""
    folder = tmp_path_factory.mktemp("corrector")
    (folder / "coarse_step.py").write_text(STEP, encoding="utf-8")
    sys.path.insert(0, str(folder))
    u = exact(9, 24, np.random.default_rng(0))
    with h5py.File(folder / "waves.h5", "w") as file:
        file["u"] = u.astype(np.float32)
    settings = section(folder, domain=[0, 1], dt=DT, history=1, base={"solver": "coarse_step:step"})
    _, operator, _ = fitted(load_config(overlay(folder, settings, "waves"), ONE_BLOCK), "waves")
    torch.manual_seed(0)
    torch.nn.init.normal_(operator.heads["waves"].out.weight, std=0.3)
    yield Forecaster(operator.eval().requires_grad_(False), folder), u[:, 0, None]
    sys.path.remove(str(folder))
    sys.modules.pop("coarse_step", None)


def coarse(u, dt=DT):
    roll = torch.roll if isinstance(u, torch.Tensor) else type(u).__array_namespace__(u).roll
    for _ in range(4):
        u = u - dt / 4 * 5 * (u - roll(u, 1, -1))
    return u


def coarse_in_place(u):
    u[:] = coarse(u)
    return u


def test_the_correction_is_the_operators_over_the_users_step(trained):
    model, u = trained
    found = StepCorrector(model, coarse)(u, DT)
    expected = model.forecast("waves", u[:, None])[:, 0]
    assert abs(found - expected).max() < 1e-5 < 1e-2 < abs(found - coarse(u)).max()
    head = model.operator.heads["waves"]  # data have bounds of waves, a corrected step has none
    assert head.facts.waves is not None and head.wave_bounds is None


def test_arrays_come_back_in_the_kind_and_shape_that_came(trained):
    xarray = pytest.importorskip("xarray")
    model, u = trained
    correct = StepCorrector(model, coarse)
    expected = correct(u)
    assert isinstance(expected, np.ndarray) and expected.dtype == np.float64
    for shape, index in ((u[3], 3), (u[3, 0], (3, 0)), (u[:, 0], (slice(None), 0))):
        assert abs(correct(shape) - expected[index]).max() < 1e-6  # batches round differently
    into = StepCorrector(model, coarse_in_place)
    assert np.array_equal(into(u), expected)
    single = correct(u.astype(np.float32))
    assert single.dtype == np.float32 and abs(single - expected).max() < 1e-5
    tensor = torch.from_numpy(u).requires_grad_()
    later = correct(tensor)
    assert torch.equal(later.detach(), torch.from_numpy(expected))
    (gradient,) = torch.autograd.grad(later.square().sum(), tensor)
    more, less = ((correct(u + step * gradient.numpy()) ** 2).sum() for step in (1e-4, -1e-4))
    assert (more - less) / 2e-4 == pytest.approx(float(gradient.square().sum()), rel=1e-2)
    labelled = xarray.DataArray(u[:, 0].T, dims=("x", "run"), coords={"x": np.arange(CELLS)}, name="u")
    found = correct(labelled)
    assert (found.dims, found.name) == (labelled.dims, "u")
    assert np.array_equal(found.values, expected[:, 0].T)


def test_jax_arrays_come_back_as_such(trained):
    numpy = pytest.importorskip("jax.numpy")
    model, u = trained
    found = StepCorrector(model, coarse)(numpy.asarray(u))
    assert isinstance(found, type(numpy.zeros(1)))
    assert abs(np.asarray(found) - StepCorrector(model, coarse)(u)).max() < 1e-5


def test_what_the_step_conserves_is_kept_and_only_that(trained):
    model, u = trained
    assert abs(StepCorrector(model, coarse)(u).mean(-1) - u.mean(-1)).max() < 1e-14

    def leaking(u):
        return coarse(u) * 1.01

    facts = model.operator.heads["waves"].facts
    assert facts.conserved == ["u"]  # the data conserve it: restored where the step does not
    assert abs(StepCorrector(model, leaking)(u).mean(-1) - u.mean(-1)).max() < 1e-5


def test_the_correction_vanishes_with_what_moves(trained):
    """Below the smallest change in training; at ten times the trained horizon states have decayed so far."""
    model, u = trained
    still = 1 + 1e-4 * (u - 1)
    moved = [abs(StepCorrector(model, coarse)(one) - coarse(one)).max() for one in (u, still)]
    assert 0 < moved[1] < 1e-2 * moved[0]


@pytest.mark.parametrize("reason", [*CHECKS, *OF_CALL])
def test_where_a_check_fails_the_result_is_the_users_bit_for_bit(trained, reason, monkeypatch):
    model, u = trained
    check = (lambda u, theirs, answer: np.zeros(len(u), bool)) if reason == "check" else None
    compute, conditions = StepCorrector._compute, StepCorrector._conditions
    forced = {
        "jump": (corrector, "MOST_JUMP", 0.0),
        "conserved": (StepCorrector, "_compute", lambda *u: pad(compute(*u)[:, :-1], (0, 1))),
        "network": (TaskHead, "is_network_used", False),
        "parameters": (StepCorrector, "_conditions", lambda *u: (*conditions(*u)[:2], False)),
    }
    if reason in forced:
        monkeypatch.setattr(*forced[reason])
    correct, dt = StepCorrector(model, coarse, check=check), DT / 2 if reason == "dt" else None
    factors = {"finite": np.where(np.arange(CELLS) == 5, np.nan, 1.0), "range": 100.0}
    u = np.where(u == u[0, 0, 0], -0.0, u) * factors.get(reason, 1.0)
    theirs = coarse(u, dt or DT)
    with pytest.warns(UserWarning, match="returned as your step gave it, without correction"):
        found = correct(u, dt)
    assert found.tobytes() == theirs.tobytes()
    assert correct.counts == {"states": len(u), reason: len(u)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        correct(u[:2], dt)  # said once
    assert correct.counts == {"states": len(u) + 2, reason: len(u) + 2}


def test_of_a_batch_the_states_that_fail_are_the_users_and_the_others_are_corrected(trained):
    model, u = trained
    mixed = u.copy()
    mixed[1] *= 100
    correct = StepCorrector(model, coarse)
    with pytest.warns(UserWarning, match=CHECKS["range"][:30]):
        found = correct(mixed)
    assert found[1].tobytes() == coarse(mixed)[1].tobytes()
    assert abs(found[[0, 2, 3]] - correct(u)[[0, 2, 3]]).max() < 1e-6 and correct.counts["range"] == 1


def test_after_a_hundred_calls_a_graph_returns_the_same_numbers(trained):
    model, u = trained
    correct, expected = StepCorrector(model, coarse), StepCorrector(model, coarse)(u[:1])
    for _ in range(NUM_FIRST_CALLS + 2):
        assert abs(correct(u[:1]) - expected).max() < 1e-6
    (graph,) = model.operator.traces.graphs.values()
    assert "aten::cos" not in str(graph.graph)  # the waves of the network are constants of it
    with pytest.warns(UserWarning, match="range"):
        assert correct(100 * u[:1]).tobytes() == coarse(100 * u[:1]).tobytes()


def test_what_it_was_not_trained_for_is_refused(trained):
    model, u = trained
    correct = StepCorrector(model, coarse)
    for wrong, text in ((u[..., ::2], r"\(24, 1, 16\)"), (u[:0], r"\(0, 1, 32\)"), ([1.0], r"\(\)")):
        with pytest.raises(ValueError, match=rf"of shape {text}; expected \(1, 32\)"):
            correct(wrong)
    for step, text in (
        (lambda u: u[..., :1], r"\(24, 1, 1\) float64"),
        (lambda u: u.astype(int), r"\(24, 1, 32\) int64"),
        (lambda u: None, "no array: NoneType"),
    ):
        with pytest.raises(ValueError, match=rf"the step of waves gave {text} for a field of shape"):
            StepCorrector(model, step)(u)
    with pytest.raises(ValueError, match=r"the check of waves gave bool of shape \(7,\); expected True or"):
        StepCorrector(model, coarse, check=lambda *u: [True] * 7)(u)
    with pytest.warns(UserWarning, match="the time step is not the trained one"):
        correct(u, float("nan"))
    with pytest.raises(
        ValueError, match="the task is 'other'; expected one whose base is a solver of yours: w"
    ):
        StepCorrector(model, coarse, "other")
    assert model.operator.use_solvers(coarse).heads["waves"].base.step is coarse  # one for all tasks


def test_errors_in_training_are_relative_to_the_size_of_the_state(trained):
    """Of states with half of the variation of the data and with a hundredth; the fake ignores the size."""
    model, u = trained
    head, codec = model.operator.heads["waves"], model.operator.heads["waves"].codec
    w = codec.normalise(torch.from_numpy(u[:2])).float()[:, None]
    target = w.roll(1, -1)
    parameters = head.parameter_batch(torch.zeros(2, 0))
    for factor in (0.5, 0.01):
        some, later = factor * w, factor * target
        full, base = model.operator.step(some, "waves", parameters)
        size = some.square().mean((1, 2, 3)).sqrt().clamp_min(LEAST_SIZE).view(-1, 1, 1, 1)
        assert bool((size == LEAST_SIZE).all()) == (factor < LEAST_SIZE)
        expected, _ = relative_errors(full / size, later / size, base / size, head.scale.expand(2))
        loss, _ = operator_loss(model.operator, "waves", some, later, parameters)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        assert float(loss) > 1.05 * float(relative_errors(full, later, base, head.scale.expand(2))[0])


# ---- data of the user's solvers, and what a corrector costs (`make corrector`)

TWO_SOLVERS = """
import numpy as np
calls = []
def fine(u, dt):
    calls.append(len(u))
    return np.roll(u, 4, -1) * (1 - dt)
def broken(u):
    return u * np.nan
def unstable(u):
    return u * 20.0
def starts():
    return np.arange(10 * 2 * 32.0).reshape(10, 2, 32)
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    (tmp_path / "two_solvers.py").write_text(TWO_SOLVERS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"solver": "fine", "fine": "fine", "starts": "starts"}
    words = [f"--{name}=two_solvers:{function}" for name, function in names.items()]
    yield [*words, f"--folder={tmp_path / 'mine'}", "--fields=u,v", "--vector=u", "--frames=3", "--dt=0.5"]
    sys.modules.pop("two_solvers", None)


def test_data_are_the_restricted_fine_solution_and_an_interrupted_run_continues(options, tmp_path):
    assert corrector_data.main(options) == 0
    solvers = sys.modules["two_solvers"]
    assert solvers.calls == [4, 4, 4, 4, 2, 2]  # three parts
    assert json.loads((tmp_path / "mine" / "made.json").read_text(encoding="utf-8"))["starts"] > 0
    u = solvers.starts().reshape(10, 2, 8, 4).mean(-1)
    parts = sorted((tmp_path / "mine").glob("part_*.npz"))
    with np.load(parts[1]) as part:
        assert part["v"].shape == (4, 3, 8)
        assert np.array_equal(part["v"][:, 1], np.roll(u[4:8, 1], 1, -1) * 0.5)
    before = parts[1].read_bytes()
    parts[1].unlink()
    solvers.calls.clear()
    corrector_data.main(options)
    assert solvers.calls == [4, 4] and parts[1].read_bytes() == before
    task = load_config(tmp_path / "mine" / "mine.yaml").task["mine"]
    assert (task.solver, task.history, task.vector) == ("two_solvers:fine", 1, ["u"])
    with pytest.raises(ValueError, match="holds data of another restrict; expected the same functions"):
        corrector_data.main([*options, "--restrict=points"])
    points = corrector_data.restricted(solvers.starts(), 4, "points")
    assert np.array_equal(points, solvers.starts()[..., ::4])
    wave, long = (np.cos(2 * np.pi * np.arange(n) / n) for n in (32, 8))
    waves = corrector_data.restricted((wave + np.cos(5 * np.arccos(wave)))[None, None], 4, "waves")
    assert np.allclose(waves, long, atol=1e-7)  # 8 cells lack the fifth wave


@pytest.mark.parametrize("how", ["means", "points", "waves"])
def test_the_coarse_solver_moves_every_second_start_on(how):
    u = np.sin(2 * np.pi * (np.arange(64) + 1.5 * (how == "means")) / 64) * np.ones((8, 1, 1))
    args = SimpleNamespace(horizons=3, frames=3, ratio=4, restrict=how, boundary="periodic", solver="my:step")
    moved = corrector_data.moved_on(args, u, lambda u: u / 2)
    assert (
        abs(moved - u * np.array([1, 1 / 4, 1, 1 / 16] * 2)[:, None, None]).max() < 0.006
    )  # linear in a cell
    assert np.array_equal(moved[::2], u[::2])
    with pytest.raises(
        ValueError, match="my:step gave values up to nan at frame 1, .* before; expected a sol"
    ):
        corrector_data.moved_on(args, u, lambda u: u * np.nan)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("--ratio=5", "the fine grid has 32 cells along an axis; expected a multiple of --ratio 5"),
        ("--fields=u", r"gave an array of shape \(10, 2, 32\); expected \(n, channel, \*fine grid\)"),
        ("--fine=two_solvers:broken", r"gave values up to nan at frame 1, 255 before; expected a solution"),
        ("--fine=two_solvers:unstable", r"gave values up to 1.02e\+05 at frame 2, 5.1e\+03 before"),
    ],
)
def test_solvers_that_cannot_be_used_are_refused_by_name(options, change, text):
    with pytest.raises(ValueError, match=text):
        corrector_data.main([*options, change])


def test_runs_until_it_pays_by_hand():
    n_star, low, high = paying_runs(
        data_seconds({"parts": {"a": 9, "b": 20}, "starts": 1}), [2.0] * 5, [0.5] * 5
    )
    assert n_star == low == high == pytest.approx(20.0)
    assert paying_runs(30.0, [0.4], [0.5]) == [math.inf] * 3
    n_star, low, high = paying_runs(30.0, [1.0, 2.0, 3.0, 2.0], [0.5] * 4)
    assert 30 / 2.5 < low < n_star < high < 30 / 0.5


class Leak:
    """A step that holds the fine solution u (n, frames, channel, *space), and returns its frames in turn."""

    def __init__(self, u: np.ndarray):
        self.u, self.lead = u, 0

    def __call__(self, u):
        self.lead += 1
        return self.u[: len(u), self.lead % self.u.shape[1]]


def test_a_corrected_run_that_knows_the_fine_solution_is_refused(trained):
    model, u = trained
    new = exact(9, 4, np.random.default_rng(1))[:, 0, None]
    with pytest.raises(ValueError, match=r"starts \[2\] are in the training data, too; expected new ones"):
        require_unseen(np.concatenate([new[:2], u[:1] * (1 + 1e-7)]), u)
    leak = Leak(exact(9, 4, np.random.default_rng(1))[:, :, None])
    with pytest.raises(ValueError, match="a second call with a state differs by .*; expected a step without"):
        corrected_runs(StepCorrector(model, leak), new, 4, u)
    assert len(corrected_runs(StepCorrector(model, coarse), new, 4, u)["corrected"]) == 4


def test_a_correction_that_does_not_conserve_is_refused(trained):
    model, u = trained
    new = exact(9, 2, np.random.default_rng(1))[:, 0, None]

    class Adding(StepCorrector):
        def corrected(self, *given):
            return super().corrected(*given) + 1e-3

    with pytest.raises(ValueError, match="corrected runs move a mean by .*; expected none"):
        corrected_runs(Adding(model, coarse), new, 4, u)


def test_a_timing_without_the_correction_is_refused(trained, monkeypatch):
    model, u = trained
    new = exact(9, 2, np.random.default_rng(1))[:, 0, None]
    timed = run_of

    def of_the_step(step, u, num):
        return timed(step, u, num)[0], timed(getattr(step, "theirs", step), u, num)[1]

    monkeypatch.setattr("ups.commands.corrector_costs.run_of", of_the_step)
    with pytest.raises(ValueError, match="a corrected run takes .*; expected .* s of all its parts"):
        corrected_runs(StepCorrector(model, coarse), new, 20, u)


# ---- the first iterate of the user's iterative solver (`ups.start`)


def test_a_start_saves_iterations_of_the_users_solver_and_changes_no_result(monkeypatch):
    start = Start(Forecaster.load(ROOT / "pretrained"), "darcy2d")
    fields = SOLVERS["darcy2d"].trajectory(0, 10_000, resolution=64, parameter=1.0)[0].numpy()
    A, b = matrix(fields[0]), np.ones(64 * 64)
    x0 = start(fields[:1])
    assert x0.shape == (1, 64, 64) and np.linalg.norm(x0[0] - fields[1]) < 1e-2 * np.linalg.norm(fields[1])
    (cold, num_cold), (warm, num_warm) = (solved(A, b, None, x) for x in (None, x0.ravel()))
    assert num_warm < 0.9 * num_cold and np.linalg.norm(warm - cold) < 1e-6 * np.linalg.norm(cold)
    worse = start(fields[:1], residual=lambda x: -b - A @ x.ravel())  # of another system
    assert not worse.any() and worse.shape == x0.shape
    for a, residual, text in (
        (fields[:1], lambda x: None, "darcy2d's residual was given None; expected one array of real numbers"),
        (np.ma.masked_less(fields[:1], 0.5), None, "NaN, infinity or masked values; expected finite"),
        (torch.ones(1, 64, 64, requires_grad=True), None, "requires a gradient; .*a first iterate has none"),
    ):
        with pytest.raises(ValueError, match=text):
            Start(start.model, "darcy2d")(a, residual=residual)
    monkeypatch.setattr(Forecaster, "forecast", lambda *_, **__: np.full((1, 1, 1, 64, 64), np.nan))
    assert not start(fields[:1]).any()
    assert start.counts == {"starts": 3, "finite": 1, "residual": 1}
    with pytest.raises(ValueError, match="the task is 'burgers1d'; expected one of the steady ones: darcy2d"):
        Start(start.model, "burgers1d")


# ---- examples/


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_steps_on_both_grids_if_its_package_is_there(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 60
    packages = re.findall(r"^(?:import|from) (exponax|fipy|pde|phi|numpy)\b", text, re.MULTILINE)
    package = min(packages, key="numpy".__eq__)
    pytest.importorskip(package, reason=f"{package} is not required by this project")
    example = importlib.import_module(f"examples.{path.stem}")
    u = example.starts(2, 16)
    later = example.coarse(u)
    assert u.shape == later.shape and (len(u), u.shape[2]) == (2, 16) and np.isfinite(later).all()
    assert 1e-4 < abs(later - u).max() < 10 * abs(u).max()
    assert np.array_equal(example.coarse(u[1:]), later[1:])  # a row does not depend on the others
    assert example.fine(example.starts(1, 32)).shape[2] == 32
