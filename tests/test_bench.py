"""The baselines are what they claim to be, are scored correctly, and get exactly the time they are given."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
import types

import pytest
import torch
from toy_codec import fit_codec

from bench import ablate, baselines, compare, ours
from bench.baselines import Problem, Settings, Trainer, settings_for
from bench.compare import Errors
from ups.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups.config import ModelConfig, load_config
from ups.evaluation.bench_rows import data_key, find_bench_rows
from ups.models.backbone import FlatBackbone
from ups.models.choose import choose_base
from ups.tasks import get_task
from ups.training.optim import EMA, split_parameters

TINY = {"width": 8, "modes": 4, "depth": 2, "batch_size": 4}


def heat(num_rows=24, num_frames=14, size=16, seed=0):
    """u_t = c u_xx, periodic, exact: (row, time, 1, size) and c (row, 1)."""
    random = torch.Generator().manual_seed(seed)
    k, x = torch.arange(1, 4.0), torch.arange(size) / size
    amplitude, phase = torch.randn(num_rows, 3, 1, generator=random), 6.28 * torch.rand(num_rows, 3, 1, generator=random)
    c = torch.where(torch.arange(num_rows) % 2 == 0, 0.5, 1.0).double()
    decay = torch.exp(-0.05 * c[:, None, None].float() * k[:, None] ** 2 * torch.arange(num_frames))
    waves = amplitude * torch.sin(2 * math.pi * k[:, None] * x + phase)
    return torch.einsum("nkt,nkx->ntx", decay, waves)[:, :, None], c[:, None]


def problem(steady=False, ndim=1, boundary=PERIODIC, size=16):
    same = lambda w: w  # noqa: E731
    if ndim == 2:
        u, c = torch.randn(6, 14, 2, size, size, generator=torch.Generator().manual_seed(0)), torch.ones(6, 1)
    else:
        u, c = heat(size=size)
    a = u[:, :1] if steady else None
    u = u[:, 1:2] if steady else u
    return Problem("toy", ndim, boundary, steady, ndim == 2, 10, u, u, c, c, same, same, torch.zeros(u.shape[2]), a, a, same)


class FakeCache:
    """What bench/compare.py and bench/ours.py read of ups.data.cache.Cache."""

    made = None   # the last one, whose sources compare.open_sources gives

    def __init__(self, dim=0, steady=False):
        FakeCache.made = self
        u, self.parameters = heat(40)
        self.parameter_values, self.dt = torch.tensor([0.5, 1.0]), 0.05
        self.task = dataclasses.replace(get_task("burgers1d"), inputs=("a",) if steady else ())
        a, self.u = u[:, :1], u[:, 1:2] if steady else u
        self.trajectory, self.parameter_index = torch.arange(40) // 2, torch.arange(40) % 2
        self.split = {"train": torch.arange(24), "val": torch.arange(24, 32), "test": torch.arange(32, 40)}
        self.num_frames, self.fingerprint = self.u.shape[1], "toy"
        self.settings = load_config(None, SMALL).task["burgers1d"]
        self.tokenizer = fit_codec([self.u.numpy()], fields=("u",), patch=4, dim=dim)
        self.input_tokenizer = fit_codec([a.numpy()], fields=("a",), patch=4) if steady else None
        self.inputs = lambda rows, device="cpu": self.input_tokenizer.encode(self.input_tokenizer.normalise(a[rows]))

        stored = torch.cat([a, self.u], 2) if steady else self.u   # of every parameter value in turn
        self.sources = [types.SimpleNamespace(read=lambda first, last, value=value: stored[2 * first + value][None].numpy())
                        for value in (0, 1)]

    def batch(self, rows, starts, length, device="cpu"):
        frames = torch.as_tensor(starts).view(-1, 1) + torch.arange(length)
        return self.tokenizer.encode(self.tokenizer.normalise(self.u[rows[:, None], frames]))


@pytest.fixture(autouse=True)
def _sources(monkeypatch):
    monkeypatch.setattr(compare, "open_sources", lambda config, task: FakeCache.made.sources)


# ---- transforms and networks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 17])
def test_dft_matrices_are_the_cut_real_fft(size):
    x = torch.randn(size, 3, dtype=torch.float64)
    for modes in (1, 5, size // 2 + 1):
        analysis, synthesis = baselines.dft_matrices(size, modes)
        x_hat = torch.fft.rfft(x, dim=0, norm="forward")[:modes]
        torch.testing.assert_close((analysis @ x).view(modes, 2, 3), torch.stack((x_hat.real, x_hat.imag), 1))
        torch.testing.assert_close(synthesis @ analysis @ x, torch.fft.irfft(x_hat, n=size, dim=0, norm="forward"))


@pytest.mark.parametrize("is_sine", [False, True])
def test_cosine_and_sine_bases_are_orthonormal_and_diagonalise_the_laplacian(is_sine):
    size = 12
    waves, _ = baselines.cosine_matrices(size, size, is_sine)
    torch.testing.assert_close(waves @ waves.T, torch.eye(size, dtype=torch.float64))
    next_to = torch.diag(torch.ones(size - 1, dtype=torch.float64), 1)
    laplace = next_to + next_to.T - 2 * torch.eye(size, dtype=torch.float64)
    laplace[0, 0] = laplace[-1, -1] = -3 if is_sine else -1  # ghost cell: minus the inner one (u = 0) or equal to it (u_x = 0)
    spectrum = waves @ laplace @ waves.T
    torch.testing.assert_close(spectrum, torch.diag(spectrum.diagonal()), atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [(16,), (15,), (12, 10), (10, 13)])
def test_matrix_product_spectral_convolution_equals_the_fft_one(sizes):
    layer = baselines.SpectralConv(sizes, 6, 5, "dft").double()
    x, skip = torch.randn(2, *sizes, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x, skip), layer.reference(x, skip))


@pytest.mark.parametrize(("sizes", "boundary", "changes"), [
    ((16,), PERIODIC, {}), ((16,), DIRICHLET, {"padding": 3, "kernel": 3}), ((12, 16), NO_FLUX, {"padding": 2, "mlp": True}),
    ((16, 16), PERIODIC, {"kernel": 3})])
def test_fast_fno_equals_the_fft_fno_with_the_same_weights(sizes, boundary, changes):
    net = baselines.FNO(3, 2, sizes, boundary, Settings(**TINY, **changes))
    u, results = torch.randn(2, *sizes, 3), []
    for net.is_fft in (False, True):
        net.zero_grad()
        out = net(u)
        out.square().sum().backward()
        results.append([out.detach(), *[p.grad for p in net.parameters()]])
    for fast, fft in zip(*results, strict=True):
        torch.testing.assert_close(fast, fft, rtol=1e-4, atol=1e-5 * float(fft.abs().max()) + 1e-6)


@pytest.mark.parametrize("sizes", [(16,), (12, 16)])
def test_spectral_convolution_equals_the_neuraloperator_packages(sizes):
    neuralop = pytest.importorskip("neuralop.layers.spectral_convolution", reason="bench/requirements.txt is not installed")
    modes, ndim = 4, len(sizes)
    layer = baselines.SpectralConv(sizes, 5, modes, "dft")
    theirs = neuralop.SpectralConv(5, 5, (2 * modes - 1,) * ndim, bias=False)
    # theirs halves the last axis and orders the others by wave number from 1 - modes; ours halves the first: swap the axes
    weight = torch.view_as_complex(layer.weight.detach()).view(modes, -1, 5, 5).permute(2, 3, 1, 0)
    weight = weight.roll(modes - 1, 2) if ndim == 2 else weight[:, :, 0]
    theirs.weight.tensor.data.copy_(weight)
    x = torch.randn(*sizes, 2, 5)
    out = theirs(x.permute(ndim, ndim + 1, *range(ndim - 1, -1, -1)).contiguous())
    torch.testing.assert_close(layer(x, torch.zeros_like(x)), out.permute(*range(ndim + 1, 1, -1), 0, 1), rtol=1e-4, atol=1e-5)


def test_periodic_fno_commutes_with_shifts_and_the_unet_with_shifts_of_its_coarsest_cell():
    fno = baselines.FNO(1, 1, (16,), PERIODIC, Settings(**TINY))
    unet = baselines.UNet(1, 1, (16,), PERIODIC, Settings(network="unet", width=8, depth=3))
    u = torch.randn(2, 16, 1)
    torch.testing.assert_close(fno(u.roll(3, 1)), fno(u).roll(3, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unet(u.roll(4, 1)), unet(u).roll(4, 1), rtol=1e-4, atol=1e-5)


def test_extend_by_boundary():
    x = torch.arange(1.0, 5.0)[None]
    assert baselines.extend(x, 1, 2, "circular").tolist() == [[3, 4, 1, 2, 3, 4, 1, 2]]
    assert baselines.extend(x, 1, 2, "replicate").tolist() == [[1, 1, 1, 2, 3, 4, 4, 4]]
    assert baselines.extend(x, 1, 1, "zeros").tolist() == [[0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX, DIRICHLET])
@pytest.mark.parametrize("sizes", [(16,), (8, 16)])
def test_unet_keeps_the_grid_and_every_weight_learns(sizes, boundary, patch):
    net = baselines.UNet(3, 2, sizes, boundary, Settings(network="unet", width=8, depth=2, patch=patch))
    out = net(torch.randn(2, *sizes, 3))
    assert out.shape == (2, *sizes, 2)
    out.square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in net.parameters())


def test_unet_folds_patches_where_it_unfolds_them():
    """With the identity for a network between stem and head, folding and unfolding give the field back."""
    net = baselines.UNet(1, 1, (4, 8), PERIODIC, Settings(network="unet", width=4, depth=1, patch=2))
    net.middle, net.head = torch.nn.Identity(), torch.nn.Identity()
    net.stem = torch.nn.Identity()
    u = torch.randn(3, 4, 8, 1)
    assert torch.equal(net(u), u)


def test_grids_and_modes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not halve 3 times"):
        baselines.UNet(1, 1, (20,), PERIODIC, Settings(network="unet"))
    with pytest.raises(ValueError, match="expected 1 to 9 on 16 cells"):
        baselines.FNO(1, 1, (16,), PERIODIC, Settings(modes=10))
    with pytest.raises(ValueError, match="There is no baseline in 3D"):
        baselines.FNO(1, 1, (8, 8, 8), PERIODIC, Settings(**TINY))


# ---- training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"network": "fno"}, {"network": "unet", "depth": 3, "lr": 5e-3}, {"loss": "change"},
                                     {"loss": "field", "history": 2, "ema": 0.9}])
def test_training_beats_persistence(changes):
    trainer = Trainer(problem(), Settings(**{**TINY, "batch_size": 16, "lr": 1e-2, "warmup": 0.0, **changes}), seed=0)
    for step in range(60):
        trainer.step(step / 60)
    trainer.load(trainer.weights())
    u, c = heat(seed=1)
    pred, truth = trainer.predict(u[:, :10], c, 4), u[:, 10:]
    error, still = ((pred - truth).square().mean(), (u[:, 9:10] - truth).square().mean())
    assert pred.shape == truth.shape and float(error) < 0.3 * float(still)


@pytest.mark.parametrize("network", ["fno", "unet"])
def test_steady_training_reaches_every_weight(network):
    p = problem(steady=True, ndim=2, boundary=DIRICHLET)
    trainer = Trainer(p, Settings(**{**TINY, "network": network, "loss": "field"}), seed=0)
    start = [x.detach().clone() for x in trainer.net.parameters()]
    for _ in range(3):
        trainer.step(0.5)
    assert all(not torch.equal(a, b) for a, b in zip(start, trainer.net.parameters(), strict=True))
    assert trainer.predict(p.train_inputs, p.train_parameters, 1).shape == p.train.shape


def test_an_untrained_network_is_persistence():
    trainer = Trainer(problem(), Settings(**TINY), seed=0)
    u, c = heat()
    assert torch.equal(trainer.predict(u[:, :10], c, 2), u[:, 9:10].expand(-1, 2, -1, -1))


def test_a_batch_is_shifted_as_one_and_taken_from_one_trajectory():
    trainer = Trainer(problem(), Settings(**{**TINY, "history": 2}), seed=0)
    window, targets, parameters = trainer.batch(2)
    frames = torch.cat((window, targets), 1)  # the heat equation damps every mode by a fixed factor per frame
    power = torch.fft.rfft(frames[..., 0], dim=2).abs()[:, :, 1:4]
    c = 0.5 + 0.5 * (parameters > 0)
    expected = torch.exp(-0.05 * c[:, None] * torch.arange(1, 4.0) ** 2).expand(-1, 3, -1)
    torch.testing.assert_close(power[:, 1:] / power[:, :-1], expected, rtol=1e-3, atol=1e-3)


def test_scored_windows_start_at_the_last_context_frame():
    p = problem()
    p.train[:, :9] = torch.nan
    window, targets, _ = Trainer(p, Settings(**TINY, is_scored_only=True), seed=0).batch(2)
    assert torch.isfinite(window).all() and torch.isfinite(targets).all()


def test_symmetries_move_all_fields_alike():
    trainer = Trainer(problem(ndim=2, boundary=NO_FLUX), Settings(**TINY), seed=0)
    field, seen = torch.arange(64.0).view(1, 1, 8, 8, 1), set()
    for _ in range(60):
        one, other = trainer.symmetry(field, field + 100)
        assert torch.equal(one + 100, other)
        seen.add(tuple(one.flatten().tolist()))
    assert len(seen) == 8


def test_learning_rate_warms_up_stays_and_falls_to_zero():
    s = Settings(lr=1.0, warmup=0.1, decay_start=0.6)
    rates = [baselines.learning_rate(share, s) for share in (0.0, 0.05, 0.3, 0.8, 1.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


def test_parameters_are_scaled_logarithms_without_constant_or_repeated_columns():
    values = torch.tensor([[0.01, 0.01, 5.0], [1.0, 1.0, 5.0]])
    assert baselines.ParameterScale(values)(values).tolist() == [[-1.0], [1.0]]
    assert baselines.ParameterScale(torch.zeros(3, 0))(torch.zeros(2, 0)).shape == (2, 0)


def test_the_budget_is_kept_and_validation_is_not_charged():
    calls, now = [], [0.0]

    def clock():   # every reading is a hundredth of a second, every validation three tenths
        now[0] += 0.01
        return now[0]

    def score(trained):
        calls.append(trained)
        now[0] += 0.3
        return -float(len(calls))

    trained = baselines.train(problem(), Settings(**TINY), 2.0, 0, score, clock=clock)
    assert 1.9 < trained.seconds < 2.1 and now[0] > trained.seconds + 0.3 * len(calls) - 0.1
    assert [point["share"] for point in trained.history] == [*baselines.CHECKPOINTS, 1.0] and trained.steps > 5


def test_weights_are_those_validation_preferred():
    values, kept = iter([2.0, 1.0, 3.0]), []

    def score(trained):
        u, c = heat()
        kept.append(trained.predict(u[:, :10], c, 1))
        return next(values)

    ticks = iter(range(10**6))  # a clock that ticks once a reading makes this exact
    trained = baselines.train(problem(), Settings(**TINY), 100.0, 0, score, clock=lambda: next(ticks))
    u, c = heat()
    assert torch.equal(trained.predict(u[:, :10], c, 1), kept[1]) and not torch.equal(kept[1], kept[2])


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="setting 'widht' is unknown.*Correct fno.KEY=VALUE"):
        settings_for("fno", "burgers1d", 1, {"widht": 3})
    with pytest.raises(ValueError, match="at most the 10 context frames. Lower fno.history"):
        Trainer(problem(), Settings(**TINY, history=11), 0)


# ---- scores and the judge ------------------------------------------------------------------------------------------------


def test_errors_by_hand():
    truth = torch.tensor([[[[3.0, 4.0]]], [[[6.0, 8.0]]]])  # two trajectories, one frame: mean squares 12.5 and 50
    errors = Errors.of(truth + torch.tensor([5.0, 0.0])[:, None, None, None], truth)  # mean squares of the error 25 and 0
    split = compare.Split(truth, truth, torch.tensor([[1.0], [2.0]]), torch.arange(2))
    row = compare.summary(errors, split, False, 200)
    assert row["error"] == row["pooled"] == row["first_frame"] == pytest.approx(math.sqrt(25 / 62.5))
    assert row["nrmse"] == pytest.approx(math.sqrt(2) / 2) and compare.summary(errors, split, True, 10)["error"] == row["nrmse"]
    assert row["by_parameter"] == {"1": pytest.approx(math.sqrt(2)), "2": 0.0}
    assert row["low"] == 0.0 and row["high"] == pytest.approx(math.sqrt(2))
    twice = Errors(4 * errors.error, errors.truth)
    ratio = compare.paired_ratio([twice], [errors, errors], split, True, 50)
    assert ratio["ratio"] == pytest.approx(2.0)


def test_a_diverged_rollout_is_reported_as_such():
    truth = torch.ones(2, 1, 1, 4)
    errors = Errors.of(torch.full_like(truth, torch.nan), truth)
    row = compare.summary(errors, compare.Split(truth, truth, torch.zeros(2, 0), torch.arange(2)), False, 10)
    assert "diverged" in compare.line("fno", "0", row) and compare.clean(row)["error"] is None


@pytest.mark.parametrize("steady", [False, True])
def test_the_judge_runs_and_writes_its_table(steady, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    monkeypatch.setattr(compare, "open_cache", lambda config, task: FakeCache(steady=steady))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    small = [f"{model}.{key}={value}" for model in ("fno", "unet") for key, value in TINY.items()]
    result = compare.main(["--task", "burgers1d", "--budget", "0.3", "--models", "fno", "unet", "--seeds", "0", "1", *small])
    saved = json.loads(next(tmp_path.glob("burgers1d_0.3s_fno-unet_*.json")).read_text())
    assert len(saved["rows_printed"]) == 4 and saved["settings"]["fno"]["width"] == 8
    assert result["trivial"]["name"] == ("training mean" if steady else "persistence")
    text = capsys.readouterr().out
    assert result["trivial"]["name"] in text and "fno: mean over seeds" in text
    assert saved["models"] == {}     # nor are they shown in a report
    # rivals as weak as one likes, and no ratio against them
    assert saved["ratios"] == {} and text.count("no ratio fno / unet: the settings of fno are given by hand; expected") == 1
    assert not re.search(r"fno / unet: \d", text) and not (tmp_path / "tuned").exists()


def trained_as(quality, seen):
    """Stands for `baselines.train`: validation and test error of the settings are `quality(settings)`."""
    def train(problem, settings, budget_seconds, seed, score, clock, device):
        seen.append((settings, budget_seconds))
        error = quality(settings)
        history, test = [{"share": 1.0, "steps": 1, "val": error}], heat(40)[0][32:, 10:]
        return baselines.Trained(lambda given, parameters, num: test * (1 + error), 0, 1, 0.0, budget_seconds,
                                 history=history)
    return train


def test_a_rival_without_settings_for_these_data_is_tuned_before_a_ratio_is_printed(tmp_path, monkeypatch, capsys):
    def quality(settings):   # best with folded cells and a high rate; diverged with a history
        return 0.08 / (1 + (settings.patch == 4) + (settings.lr == 4e-3)) if settings.history == 1 else math.nan

    seen, cache = [], FakeCache()
    monkeypatch.setattr(compare, "OUT", tmp_path)
    monkeypatch.setattr(compare, "train", trained_as(quality, seen))
    monkeypatch.setattr(compare, "open_cache", lambda config, task: cache)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    other_data = ("data.tasks=[burgers1d]", "task.burgers1d.num_trajectories=999")

    def run(budget, *more):
        seen.clear()
        result = compare.main(["--task", "burgers1d", "--budget", budget, "--models", "fno", "unet", *other_data, *more])
        return result, capsys.readouterr().out, len(seen) - 2

    result, text, tries = run("6")
    assert result["settings"]["unet"]["patch"] == 4 and result["settings"]["unet"]["lr"] == 4e-3
    assert "unet: no settings are tuned on these data; trying" in text and "fno / unet: 1." in text and tries > 20
    for family in ("fno", "unet"):   # equal shares of one budget, then start and found at length
        *short, first, last = [seconds for settings, seconds in seen[:-2] if settings.network == family]
        assert sum(short) == pytest.approx(6.0) and len(set(short)) == 1 and first == last == 6.0
    assert all(seconds == 6.0 for _, seconds in seen[-2:])
    config = load_config(overrides=other_data)
    key = data_key("toy", config.context("burgers1d"))
    shown = find_bench_rows("burgers1d", key, tmp_path)      # what the report puts beside the operator
    for model, row in zip(("fno", "unet"), result["rows_printed"], strict=True):
        assert row["model"] == model and shown[model]["nrmse"]["value"] == pytest.approx(row["nrmse"], rel=1e-4)
        assert shown[model]["train_seconds"] == 6.0 and len(shown[model]["error_growth"]) == result["frames_scored"]
    path = tmp_path / "tuned" / "burgers1d-16-unet.json"
    assert json.loads(path.read_text())["changes"].items() >= {"patch": 4, "lr": 4e-3}.items()

    assert run("6")[2] == run("3")[2] == 0                       # found again; and for a shorter budget
    assert run("7")[2] == tries                                  # a rival tuned for less time than it now gets is tuned again
    cache.fingerprint = "other"
    assert run("7")[2] == tries                                  # so is one that was tuned on other data
    _, text, tries = run("7", "unet.lr=1e-9")                    # the flattering fake
    assert tries == 0 and "no ratio fno / unet: the settings of unet are given by hand" in text


def test_what_short_trials_prefer_serves_only_where_it_wins_at_length(monkeypatch):
    seen, args = [], types.SimpleNamespace(budget=44.0, seeds=[0], clock="wall", device="cpu")

    def short_sighted(model, config, problem, val, settings, args, seed, budget):   # a small network learns first
        error = settings.width if budget < 44.0 else 1 / settings.width
        seen.append(budget)
        return baselines.Trained(None, 0, 0, 0.0, budget, history=[{"val": error}])

    monkeypatch.setattr(compare, "fit", short_sighted)
    found = compare.climb("unet", None, args, problem(size=64), None)
    assert found["changes"] == {} and found["val"] == 1 / 48 and seen[-2:] == [44.0, 44.0]
    assert found["seconds"] == pytest.approx(3 * 44.0) and found["tried"] == len(seen) - 2


def test_settings_tuned_on_the_small_run_count_for_its_data_alone(tmp_path, monkeypatch):
    climbed = []
    monkeypatch.setattr(compare, "OUT", tmp_path)
    monkeypatch.setattr(compare, "climb", lambda family, *_: climbed.append(family) or {
        "changes": {"lr": 1.0}, "tried": 1, "seconds": 3.0})
    monkeypatch.setattr(compare, "open_cache", lambda config, task: FakeCache())
    args = types.SimpleNamespace(task="burgers1d", budget=1.0, clock="wall", threads=1)
    small = load_config(compare.BEST_ON)
    assert compare.tuned("unet", small, args, problem(), None) == {} and not climbed
    finer = load_config(compare.BEST_ON, ["data.tasks=[burgers1d]", "task.burgers1d.resolution=512"])
    assert compare.tuned("fno_library", finer, args, problem(), None) == {"lr": 1.0} and climbed == ["fno"]


def test_a_grid_that_some_settings_do_not_fit_is_tuned_with_the_others(monkeypatch, capsys):
    args = types.SimpleNamespace(budget=1.0, seeds=[0], clock="wall", device="cpu")
    monkeypatch.setattr(compare, "fit", lambda model, config, problem, val, settings, *_: Trainer(problem, settings, 0) and
                        baselines.Trained(None, 0, 0, 0.0, 0.0, history=[{"val": 1.0 / settings.depth}]))
    found = compare.climb("fno", None, args, problem(), None)    # 16 cells hold 9 modes, fewer than the start asks for
    assert found["changes"] == {"modes": 8, "depth": 5} and found["tried"] > 10 and found["val"] == 1 / 5
    assert "left out {'modes': 12}: modes is 12; expected 1 to 9 on 16 cells" in capsys.readouterr().out
    monkeypatch.setattr(compare, "candidates", lambda *_: [{"modes": 99}])
    with pytest.raises(ValueError, match=r"no settings of fno fit the grid \(16,\); expected some of 1. Leave it out of --mod"):
        compare.climb("fno", None, args, problem(), None)


def test_tuning_ranks_on_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    monkeypatch.setattr(compare, "open_cache", lambda config, task: FakeCache())
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    small = [f"fno.{key}={value}" for key, value in TINY.items()]
    result = compare.main(["--task", "burgers1d", "--budget", "0.2", "--tune", "fno", "--try", "lr:1e-3",
                            "--try", "lr:1e-2,mlp:true", *small])
    assert [row["settings"]["lr"] for row in result["candidates"]] == [1e-3, 1e-2] and result["candidates"][1]["settings"]["mlp"]
    for model in ("fno", "unet"):  # the built-in lists are valid settings
        assert len(compare.candidates(model, problem())) > 10 < len(compare.candidates(model, problem(True, 2)))


def test_fields_are_those_of_the_data_files_whatever_the_codec_keeps():
    cache = FakeCache(dim=3)
    assert torch.equal(compare.fields(load_config(), cache, "test")[0], cache.u[32:])


@pytest.mark.parametrize("seconds", [5.0, 9.0])
def test_ours_gets_the_same_budget_and_is_marked_when_it_takes_more(seconds, tmp_path, monkeypatch, capsys):
    def train_ours(config, task, budget_seconds, seed, device):
        assert (task, budget_seconds, seed, device) == ("burgers1d", 5.0, 3, "cpu")
        return baselines.Trained(lambda given, parameters, num: given[:, -1:].expand(-1, num, -1, -1), 0, 0, 0.0, seconds)

    monkeypatch.setitem(sys.modules, "bench.ours", types.SimpleNamespace(train_ours=train_ours))
    monkeypatch.setattr(compare, "OUT", tmp_path)
    monkeypatch.setattr(compare, "open_cache", lambda config, task: FakeCache())
    result = compare.main(["--task", "burgers1d", "--budget", "5", "--models", "ours", "--seeds", "3", "--threads",
                            str(torch.get_num_threads())])
    assert result["rows_printed"][0]["error"] == result["trivial"]["error"]
    assert result["rows_printed"][0]["is_over_budget"] == ("OVER BUDGET" in capsys.readouterr().out) == (seconds > 5)


def test_impossible_requests_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="expected both above zero"):
        compare.main(["--task", "burgers1d", "--budget", "0"])
    with pytest.raises(ValueError, match="no model ours"):
        compare.main(["--task", "burgers1d", "--budget", "1", "--threads", "1", "--clock", "cpu"])
    monkeypatch.setitem(sys.modules, "neuralop.models", None)  # as if the package were not installed
    with pytest.raises(ImportError, match="pip install -r bench/requirements.txt"):
        baselines.LibraryFNO(1, 1, (16,), PERIODIC, Settings(**TINY))


# ---- ablation ------------------------------------------------------------------------------------------------------------


SMALL = ["operator.model.width=8", "operator.model.depth=2", "operator.model.modes=4", "operator.model.kernel_size=3",
         "operator.train.batch_size=4", "operator.train.micro_batch=4", "task.burgers1d.base=[persistence]"]


@pytest.fixture
def ticking(monkeypatch):
    """Our operator trains on the toy by a clock that ticks once a reading."""
    ticks = itertools.count()
    for module in (ours, ablate):
        monkeypatch.setattr(module, "open_cache", lambda config, task: FakeCache())
    monkeypatch.setattr(ours, "Stopwatch", lambda: baselines.Stopwatch(lambda: next(ticks)))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)


@pytest.mark.parametrize("name", ablate.VARIANTS)
def test_every_variant_trains_all_its_weights(name, ticking, monkeypatch):
    built, lengths, loss = [], set(), ours.operator_loss

    def modify(operator):
        ablate.MODIFIED.get(name, lambda _: None)(operator)
        built.append((operator, {key: p.detach().clone() for key, p in operator.named_parameters()}))

    def watched(operator, task, z, z_ref, *rest):
        lengths.add(z_ref.shape[1])
        return loss(operator, task, z, z_ref, *rest)

    monkeypatch.setattr(ours, "operator_loss", watched)
    config = ablate.configure(name, None, SMALL)
    head, scores = choose_base(FakeCache(), config.operator.base_steps, config.context("burgers1d"), 0, torch.device("cpu"))
    trained = ours.train_ours(config, "burgers1d", 14.0, 0, fitted=(head, min(scores.values())), modify=modify)
    [(operator, start)] = built
    assert trained.steps > 8 and all(math.isfinite(point["error"]) for point in trained.history)
    assert not [key for key, p in operator.named_parameters() if torch.equal(p, start[key])]
    assert lengths == ({1} if name == "no_unroll" else {1, 2})
    assert bool(split_parameters(operator)[0]) == (name != "adamw")


@pytest.mark.parametrize(("names", "seen"), [
    ((), range(32)), (("no_spectral",), (-2, -1, 0, 1, 2)), (("no_spectral", "no_local"), (0,)), (("no_local",), range(32)),
    (("attention", "no_local"), range(32)), (("window_attention", "no_local"), range(8)),
    (("no_gate", "no_spectral", "no_local"), (0,))])
def test_a_part_that_was_taken_out_carries_nothing_from_token_to_token(names, seen):
    torch.manual_seed(0)
    backbone = FlatBackbone(ModelConfig(kind="flat", width=8, depth=2, modes=4, kernel_size=3, mlp_ratio=2.0))
    for name in names:
        ablate.MODIFIED[name](types.SimpleNamespace(backbone=backbone))
    for block in backbone.blocks:
        torch.nn.init.normal_(block.modulation.weight)
    x, condition = torch.randn(2, 1, 32, 8), torch.randn(1, 8)
    x[1, :, 1:] = x[0, :, 1:]
    a, b = (backbone(part, condition, PERIODIC)[0] for part in x)
    assert set(torch.nonzero((a != b).any(-1)).flatten().tolist()) == {token % 32 for token in seen}


def test_attention_commutes_with_shifts_and_windows_are_attention_on_tiles():
    one, tiles = ablate.Attention(8), ablate.Attention(8, window=4)
    tiles.load_state_dict(one.state_dict())
    x = torch.randn(2, 8, 6, 8)
    torch.testing.assert_close(one(x.roll((3, 2), (1, 2)), PERIODIC), one(x, PERIODIC).roll((3, 2), (1, 2)))
    assert not torch.allclose(one(x.roll(3, 1), NO_FLUX), one(x, NO_FLUX).roll(3, 1), atol=1e-3)
    x = torch.randn(2, 8, 12, 8)
    torch.testing.assert_close(tiles(x, PERIODIC)[:, 4:8, 8:12], one(x[:, 4:8, 8:12], NO_FLUX))


def test_the_other_variants_change_what_their_names_say():
    read = {name: ablate.configure(name, None, SMALL).operator for name in ablate.VARIANTS}
    assert [read[name].model.width for name in ("standard", "width_x0.5", "width_x1.5")] == [8, 4, 12]
    assert [read[name].model.depth for name in ("standard", "depth_x0.5", "depth_x1.5")] == [2, 1, 3]
    model, block = torch.nn.Linear(2, 2), FlatBackbone(read["standard"].model).blocks[0]
    last = EMA(model, read["no_ema"].optim.ema_decay)
    torch.nn.init.normal_(model.weight)
    last.update()
    assert torch.equal(last.averages["weight"], model.weight)
    plain = ablate.PlainBlock(block)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in block.parameters())


def test_the_ablation_writes_its_table(ticking, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "OUT", tmp_path)
    [result] = ablate.main(["--task", "burgers1d", "--budget", "6", "--seeds", "0", "1", "--variants", "no_local", *SMALL])
    saved = json.loads(next(tmp_path.glob("ablate_burgers1d_6s_*.json")).read_text())
    assert [row["variant"] for row in saved["table"]] == ["standard", "no_local"] and saved["seeds"] == [0, 1]
    assert saved["table"][0]["ratio"] == 1.0 and len(saved["runs"]) == 4 and "no_local" in capsys.readouterr().out
    run = {"base": 1.0, "steps": 2, "step_ms": 1.0, "num_parameters": 3}
    rows = ablate.table([{**run, "variant": name, "seed": seed, "error": error} for name, seed, error in
                         [("standard", 0, 1.0), ("standard", 1, 3.0), ("adamw", 0, 2.0), ("adamw", 1, 3.0)]])
    assert rows[1]["ratio"] == 1.25 and rows[1]["ratios"] == [2.0, 1.0] and rows[1]["error"] == 2.5
