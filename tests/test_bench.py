"""The baselines are what they claim to be, are scored correctly, and get exactly the time they are given."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
import time
import types

import pytest
import torch
from toy_codec import fit_codec

from bench import ablate, baselines, compare, correction, covariance, networks, ours, score, tune
from bench.baselines import Problem, Trained, Trainer
from bench.networks import Settings, settings_for
from bench.score import Errors
from bench.search import Trial, search
from ups.common.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups.config import ModelConfig, load_config
from ups.models.backbone import ANY, FlatBackbone
from ups.models.base_selection import select_base
from ups.report.bench_rows import data_key, find_bench_rows
from ups.tasks import darcy_grf, get_task
from ups.training.optim import EMA, split_parameters

TINY = {"width": 8, "modes": 4, "depth": 2, "batch_size": 4}


def heat(num_rows=24, num_frames=14, size=16, seed=0):
    """u_t = c u_xx, periodic, exact: (row, time, 1, size) and c (row, 1)."""
    random = torch.Generator().manual_seed(seed)
    k, x = torch.arange(1, 4.0), torch.arange(size) / size
    amplitude, phase = (
        torch.randn(num_rows, 3, 1, generator=random),
        6.28 * torch.rand(num_rows, 3, 1, generator=random),
    )
    c = torch.where(torch.arange(num_rows) % 2 == 0, 0.5, 1.0).double()
    decay = torch.exp(-0.05 * c[:, None, None].float() * k[:, None] ** 2 * torch.arange(num_frames))
    waves = amplitude * torch.sin(2 * math.pi * k[:, None] * x + phase)
    return torch.einsum("nkt,nkx->ntx", decay, waves)[:, :, None], c[:, None]


def problem(steady=False, ndim=1, boundary=PERIODIC, size=16):
    same = lambda w: w  # noqa: E731
    if ndim > 1:
        u, c = (
            torch.randn(6, 14, 2, *[size] * ndim, generator=torch.Generator().manual_seed(0)),
            torch.ones(6, 1),
        )
    else:
        u, c = heat(size=size)
    a = u[:, :1] if steady else None
    u = u[:, 1:2] if steady else u
    return Problem(
        "toy",
        ndim,
        boundary,
        steady,
        ndim > 1,
        10,
        u,
        u,
        c,
        c,
        same,
        same,
        torch.zeros(u.shape[2]),
        a,
        a,
        same,
    )


class FakeCache:
    """What bench/compare.py and bench/ours.py read of ups.data.cache.Cache."""

    made = None  # the last one, whose sources compare.open_sources gives

    def __init__(self, dim=0, steady=False):
        FakeCache.made = self
        u, self.parameters = heat(40)
        self.parameter_values, self.dt = torch.tensor([0.5, 1.0]), 0.05
        self.task = dataclasses.replace(get_task("burgers1d"), inputs=("a",) if steady else ())
        a, self.u = u[:, :1], u[:, 1:2] if steady else u
        self.trajectory, self.parameter_index = torch.arange(40) // 2, torch.arange(40) % 2
        self.split = {"train": torch.arange(24), "val": torch.arange(24, 32), "test": torch.arange(32, 40)}
        self.num_frames, self.fingerprint, self.is_sampled, self.num_rows = self.u.shape[1], "toy", False, 40
        self.settings = load_config(None, SMALL).task["burgers1d"]
        self.tokenizer = fit_codec([self.u.numpy()], fields=("u",), patch=4, dim=dim)
        self.input_tokenizer = fit_codec([a.numpy()], fields=("a",), patch=4) if steady else None
        self.forcing_tokenizer = None
        self.parts = lambda rows, num_frames, most: (rows,)
        self.inputs = lambda rows, device="cpu": self.input_tokenizer.encode(
            self.input_tokenizer.normalise(a[rows])
        )

        stored = torch.cat([a, self.u], 2) if steady else self.u  # a row: source x trajectory
        self.sources = [
            types.SimpleNamespace(
                read=lambda first, last, frames=None, skip=skip: stored[skip + first][None].numpy()
            )
            for skip in (0, 20)
        ]

    def batch(self, rows, starts, length, device="cpu"):
        frames = torch.as_tensor(starts).view(-1, 1) + torch.arange(length)
        return self.tokenizer.encode(self.tokenizer.normalise(self.u[rows[:, None], frames]))


@pytest.fixture(autouse=True)
def _sources(monkeypatch):
    monkeypatch.setattr(score, "open_sources", lambda config, task: FakeCache.made.sources)


# ---- transforms and networks -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 17])
def test_dft_matrices_are_the_cut_real_fft(size):
    x = torch.randn(size, 3, dtype=torch.float64)
    for modes in (1, 5, size // 2 + 1):
        analysis, synthesis = networks.dft_matrices(size, modes)
        x_hat = torch.fft.rfft(x, dim=0, norm="forward")[:modes]
        torch.testing.assert_close((analysis @ x).view(modes, 2, 3), torch.stack((x_hat.real, x_hat.imag), 1))
        torch.testing.assert_close(
            synthesis @ analysis @ x, torch.fft.irfft(x_hat, n=size, dim=0, norm="forward")
        )


@pytest.mark.parametrize("is_sine", [False, True])
def test_cosine_and_sine_bases_are_orthonormal_and_diagonalise_the_laplacian(is_sine):
    size = 12
    waves, _ = networks.cosine_matrices(size, size, is_sine)
    torch.testing.assert_close(waves @ waves.T, torch.eye(size, dtype=torch.float64))
    next_to = torch.diag(torch.ones(size - 1, dtype=torch.float64), 1)
    laplace = next_to + next_to.T - 2 * torch.eye(size, dtype=torch.float64)
    laplace[0, 0] = laplace[-1, -1] = (
        -3 if is_sine else -1
    )  # ghost cell: minus the inner one (u = 0) or equal to it (u_x = 0)
    spectrum = waves @ laplace @ waves.T
    torch.testing.assert_close(spectrum, torch.diag(spectrum.diagonal()), atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [(16,), (15,), (12, 10), (10, 13), (10, 9, 12)])
def test_matrix_product_spectral_convolution_equals_the_fft_one(sizes):
    layer = networks.SpectralConv(sizes, 6, 5, "dft").double()
    x, skip = torch.randn(2, *sizes, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x, skip), layer.reference(x, skip))


@pytest.mark.parametrize(
    ("sizes", "boundary", "changes"),
    [
        ((16,), PERIODIC, {}),
        ((16,), DIRICHLET, {"padding": 3, "kernel": 3}),
        ((12, 16), NO_FLUX, {"padding": 2, "mlp": True}),
        ((16, 16), PERIODIC, {"kernel": 3}),
        ((8, 10, 12), DIRICHLET, {"kernel": 3, "padding": 1}),
        ((8, 9, 8), PERIODIC, {}),
    ],
)
def test_fast_fno_equals_the_fft_fno_with_the_same_weights(sizes, boundary, changes):
    net = networks.FNO(3, 2, sizes, boundary, Settings(**TINY, **changes))
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
    neuralop = pytest.importorskip(
        "neuralop.layers.spectral_convolution", reason="bench/requirements.txt is not installed"
    )
    modes, ndim = 4, len(sizes)
    layer = networks.SpectralConv(sizes, 5, modes, "dft")
    theirs = neuralop.SpectralConv(5, 5, (2 * modes - 1,) * ndim, bias=False)
    # theirs halves the last axis and orders the others by wave number from 1 - modes; ours halves the first:
    # swap the axes
    weight = torch.view_as_complex(layer.weight.detach()).view(modes, -1, 5, 5).permute(2, 3, 1, 0)
    weight = weight.roll(modes - 1, 2) if ndim == 2 else weight[:, :, 0]
    theirs.weight.tensor.data.copy_(weight)
    x = torch.randn(*sizes, 2, 5)
    out = theirs(x.permute(ndim, ndim + 1, *range(ndim - 1, -1, -1)).contiguous())
    torch.testing.assert_close(
        layer(x, torch.zeros_like(x)), out.permute(*range(ndim + 1, 1, -1), 0, 1), rtol=1e-4, atol=1e-5
    )


def test_periodic_fno_commutes_with_shifts_and_the_unet_with_shifts_of_its_coarsest_cell():
    fno = networks.FNO(1, 1, (16,), PERIODIC, Settings(**TINY))
    unet = networks.UNet(1, 1, (16,), PERIODIC, Settings(network="unet", width=8, depth=3))
    u = torch.randn(2, 16, 1)
    torch.testing.assert_close(fno(u.roll(3, 1)), fno(u).roll(3, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unet(u.roll(4, 1)), unet(u).roll(4, 1), rtol=1e-4, atol=1e-5)


def test_extend_by_boundary():
    x = torch.arange(1.0, 5.0)[None]
    assert networks.extend(x, 1, 2, "circular").tolist() == [[3, 4, 1, 2, 3, 4, 1, 2]]
    assert networks.extend(x, 1, 2, "replicate").tolist() == [[1, 1, 1, 2, 3, 4, 4, 4]]
    assert networks.extend(x, 1, 1, "zeros").tolist() == [[0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX, DIRICHLET])
@pytest.mark.parametrize("sizes", [(16,), (8, 16), (4, 8, 8)])
def test_unet_keeps_the_grid_and_every_weight_learns(sizes, boundary, patch):
    net = networks.UNet(3, 2, sizes, boundary, Settings(network="unet", width=8, depth=2, patch=patch))
    out = net(torch.randn(2, *sizes, 3))
    assert out.shape == (2, *sizes, 2)
    out.square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in net.parameters())


@pytest.mark.parametrize("sizes", [(8,), (4, 8), (4, 8, 6)])
def test_unet_folds_neighbours_into_channels_and_unfolds_them_where_they_were(sizes):
    """With the identity for a network between stem and head, folding and unfolding give the field back."""
    net, seen = networks.UNet(1, 1, sizes, PERIODIC, Settings(network="unet", width=4, depth=1, patch=2)), []
    net.middle, net.head = torch.nn.Identity(), torch.nn.Identity()
    net.stem = torch.nn.Identity()
    net.stem.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    u = torch.randn(3, *sizes, 1)
    assert torch.equal(net(u), u)
    corner = u[(slice(None), *[slice(2)] * len(sizes))].flatten(1)
    assert torch.equal(seen[0].flatten(2)[:, :, 0], corner)


def test_grids_and_modes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not halve 3 times"):
        networks.UNet(1, 1, (20,), PERIODIC, Settings(network="unet"))
    with pytest.raises(ValueError, match="expected 1 to 9 on 16 cells"):
        networks.FNO(1, 1, (16,), PERIODIC, Settings(modes=10))


# ---- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"network": "fno"},
        {"network": "unet", "depth": 3, "lr": 5e-3},
        {"loss": "change"},
        {"loss": "field", "history": 2, "ema": 0.9},
    ],
)
def test_training_beats_persistence(changes):
    trainer = Trainer(
        problem(), Settings(**{**TINY, "batch_size": 16, "lr": 1e-2, "warmup": 0.0, **changes}), seed=0
    )
    for step in range(60):
        trainer.step(step / 60)
    trainer.load(trainer.weights())
    u, c = heat(seed=1)
    pred, truth = trainer.predict(u[:, :10], c, 4), u[:, 10:]
    error, still = ((pred - truth).square().mean(), (u[:, 9:10] - truth).square().mean())
    assert pred.shape == truth.shape and float(error) < 0.3 * float(still)


@pytest.mark.parametrize(("network", "ndim"), [("fno", 2), ("unet", 2), ("fno", 3), ("unet", 3)])
def test_steady_training_reaches_every_weight(network, ndim):
    p = problem(steady=True, ndim=ndim, boundary=DIRICHLET, size=8)
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
    window, targets, parameters, _ = trainer.batch(2)
    frames = torch.cat((window, targets), 1)  # the heat equation damps every mode by a fixed factor per frame
    power = torch.fft.rfft(frames[..., 0], dim=2).abs()[:, :, 1:4]
    c = 0.5 + 0.5 * (parameters > 0)
    expected = torch.exp(-0.05 * c[:, None] * torch.arange(1, 4.0) ** 2).expand(-1, 3, -1)
    torch.testing.assert_close(power[:, 1:] / power[:, :-1], expected, rtol=1e-3, atol=1e-3)


def test_scored_windows_start_at_the_last_context_frame():
    p = problem()
    p.train[:, :9] = torch.nan
    window, targets, *_ = Trainer(p, Settings(**TINY, is_scored_only=True), seed=0).batch(2)
    assert torch.isfinite(window).all() and torch.isfinite(targets).all()


def test_axes_that_differ_are_not_exchanged_and_only_periodic_ones_are_shifted():
    """A channel: periodic along, walls across; 8 x 4 cells."""
    u = torch.randn(6, 14, 2, 8, 4)
    p = dataclasses.replace(
        problem(ndim=2), boundary="periodic,no_flux", is_cube=False, train=u, val=u, is_symmetric=False
    )
    for network in ("fno", "unet"):
        trainer = Trainer(p, Settings(**{**TINY, "network": network, "modes": 2, "kernel": 3}), seed=0)
        assert trainer.net.grid.shape == (8, 4, 1) and trainer.net.grid[0, :, 0].tolist() == [
            0.125,
            0.375,
            0.625,
            0.875,
        ]
        v = torch.randn(2, 8, 4, 2)
        parameters = torch.zeros(2, 0)
        torch.testing.assert_close(
            trainer.advance(v[:, None].roll(2, 2), parameters),
            trainer.advance(v[:, None], parameters).roll(2, 1),
            rtol=1e-4,
            atol=1e-5,
        )
    window, *_ = trainer.batch(1)
    columns = {tuple(frame.sum(0).flatten().round(decimals=3).tolist()) for frame in trainer.u.flatten(0, 1)}
    assert {
        tuple(frame.sum(0).flatten().round(decimals=3).tolist()) for frame in window.flatten(0, 1)
    } <= columns
    trainer.problem = dataclasses.replace(p, is_symmetric=True)
    assert all(trainer.symmetry(window)[0].shape == window.shape for _ in range(9))


def test_a_network_is_shown_what_stands_still_and_neither_predicts_it_nor_is_scored_by_it():
    p = problem()
    still = p.train[:, :1].expand_as(p.train)
    p = dataclasses.replace(
        p,
        train=torch.cat([p.train, still], 2),
        val=torch.cat([p.val, p.val[:, :1].expand_as(p.val)], 2),
        offset=torch.zeros(2 * p.train.shape[2]),
        num_moving=p.train.shape[2],
    )
    trainer = Trainer(p, Settings(**{**TINY, "batch_size": 16, "lr": 1e-2}), seed=0)
    window, targets, parameters, _ = trainer.batch(1)
    for _ in range(3):
        trainer.step(0.5)
    num = p.num_moving
    pred = trainer.advance(window, parameters)
    assert torch.equal(pred[..., num:], window[:, -1, ..., num:]) and not torch.equal(
        pred[..., :num], window[:, -1, ..., :num]
    )
    assert not torch.equal(
        pred, trainer.advance(torch.cat([window[..., :num], 0 * window[..., num:]], -1), parameters)
    )  # shown
    far = torch.cat([targets[:, 0, ..., :num], 1e3 + targets[:, 0, ..., num:]], -1)
    assert torch.equal(trainer.loss(pred, targets[:, 0], None), trainer.loss(pred, far, None))
    found = trainer.predict(p.val[:2, :10], p.val_parameters[:2], 3)
    assert torch.equal(found[:, :, num:], p.val[:2, :3, num:])
    split = score.Split(p.val[:, :10], p.val[:, 10:, :num], p.val_parameters, torch.arange(len(p.val)))
    errors, _ = score.rollout(
        Trained(lambda given, values, count: 0 * p.val[: len(given), :count], 0, 0, 0.0, 0.0), split, 4
    )
    assert errors.error.shape[2] == num and torch.equal(errors.error, errors.truth)  # nothing predicted


def test_symmetries_move_all_fields_alike():
    trainer = Trainer(problem(ndim=2, boundary=NO_FLUX), Settings(**TINY), seed=0)
    field, seen = torch.arange(64.0).view(1, 1, 8, 8, 1), set()
    for _ in range(60):
        one, other = trainer.symmetry(field, field + 100)
        assert torch.equal(one + 100, other)
        seen.add(tuple(one.flatten().tolist()))
    assert len(seen) == 8


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_vectors_turn_with_the_space(ndim):
    """The gradient of the image of a field is the image of its gradient; components left as they are (the
    fake) fail."""
    size, mean = 6, torch.linspace(-1, 1, ndim + 1)
    p = dataclasses.replace(
        problem(ndim=ndim, size=size),
        is_symmetric=True,
        vector=tuple(range(1, ndim + 1)),
        std=torch.linspace(1, 2, ndim + 1),
    )
    if ndim == 1:
        p = dataclasses.replace(p, train=p.train.expand(-1, -1, 2, -1))
    p = dataclasses.replace(p, train=torch.randn(4, 14, ndim + 1, *[size] * ndim), offset=mean / p.std)
    trainer, phi = (
        Trainer(p, Settings(**{**TINY, "modes": 3, "depth": 1, "width": 4}), seed=0),
        torch.randn([size] * ndim),
    )

    def stacked(phi):  # (1, 1, *space, channel), normalised
        u = torch.stack([phi, *(phi.roll(-1, axis) - phi.roll(1, axis) for axis in range(ndim))], -1)
        return ((u - mean) / p.std)[None, None]

    seen, torn = set(), 0
    for _ in range(60):
        [image] = trainer.symmetry(stacked(phi))
        again = stacked(image[0, 0, ..., 0] * p.std[0] + mean[0])
        torch.testing.assert_close(image, again, atol=1e-5, rtol=0)
        seen.add(tuple(image[..., 0].flatten().round(decimals=4).tolist()))
        trainer.problem = dataclasses.replace(p, vector=())
        [fake] = trainer.symmetry(stacked(phi))
        torn += not torch.allclose(fake, stacked(fake[0, 0, ..., 0] * p.std[0] + mean[0]), atol=1e-3)
        trainer.problem = p
    assert len(seen) == {1: 2, 2: 8, 3: 48}[ndim] or (ndim == 3 and len(seen) > 20)
    assert torn > 20


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

    def clock():  # every reading is a hundredth of a second, every validation three tenths
        now[0] += 0.01
        return now[0]

    def score(trained):
        calls.append(trained)
        now[0] += 0.3
        return -float(len(calls))

    trained = baselines.train(problem(), Settings(**TINY), 2.0, 0, score, clock=clock)
    assert 1.9 < trained.seconds < 2.1 and now[0] > trained.seconds + 0.3 * len(calls) - 0.1
    assert [point["share"] for point in trained.history] == [
        *baselines.CHECKPOINTS,
        1.0,
    ] and trained.steps > 5


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


# ---- scores and the judge ----------------------------------------------------------------------------------


def test_errors_by_hand():
    truth = torch.tensor(
        [[[[3.0, 4.0]]], [[[6.0, 8.0]]]]
    )  # two trajectories, one frame: mean squares 12.5 and 50
    errors = Errors.of(
        truth + torch.tensor([5.0, 0.0])[:, None, None, None], truth
    )  # mean squares of the error 25 and 0
    split = score.Split(truth, truth, torch.tensor([[1.0], [2.0]]), torch.arange(2))
    row = score.summary(errors, split, False, 200)
    assert row["error"] == row["pooled"] == row["first_frame"] == pytest.approx(math.sqrt(25 / 62.5))
    assert (
        row["nrmse"] == pytest.approx(math.sqrt(2) / 2)
        and score.summary(errors, split, True, 10)["error"] == row["nrmse"]
    )
    assert row["by_parameter"] == {"1": pytest.approx(math.sqrt(2)), "2": 0.0}
    assert row["low"] == 0.0 and row["high"] == pytest.approx(math.sqrt(2))
    twice = Errors(4 * errors.error, errors.truth)
    ratio = score.paired_ratio([twice], [errors, errors], split, True, 50)
    assert ratio["ratio"] == pytest.approx(2.0)


def test_a_diverged_rollout_is_reported_as_such():
    truth = torch.ones(2, 1, 1, 4)
    errors = Errors.of(torch.full_like(truth, torch.nan), truth)
    row = score.summary(errors, score.Split(truth, truth, torch.zeros(2, 0), torch.arange(2)), False, 10)
    assert "diverged" in compare.line("fno", "0", row) and compare.clean(row)["error"] is None


@pytest.mark.parametrize("steady", [False, True])
def test_the_judge_runs_and_writes_its_table(steady, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "OUT", tmp_path)
    for module in (compare, score):
        monkeypatch.setattr(module, "open_cache", lambda config, task: FakeCache(steady=steady))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    small = [f"{model}.{key}={value}" for model in ("fno", "unet") for key, value in TINY.items()]
    result = compare.main(
        ["--task", "burgers1d", "--budget", "0.3", "--models", "fno", "unet", "--seeds", "0", "1", *small]
    )
    saved = json.loads(next(tmp_path.glob("burgers1d_0.3s_fno-unet_*.json")).read_text())
    assert len(saved["rows_printed"]) == 4 and saved["settings"]["fno"]["width"] == 8
    assert result["trivial"]["name"] == ("training mean" if steady else "persistence")
    text = capsys.readouterr().out
    assert result["trivial"]["name"] in text and "fno: mean over seeds" in text
    assert saved["models"] == {}  # nor are they shown in a report
    # rivals as weak as one likes, and no ratio against them
    assert (
        saved["ratios"] == {}
        and text.count("no ratio fno / unet: the settings of fno are given by hand; expected") == 1
    )
    assert not re.search(r"fno / unet: \d", text) and not (tmp_path / "tuned").exists()


def trained_as(quality, seen):
    """Stands for `baselines.train`: validation and test error of the settings are `quality(settings)`."""

    def train(problem, settings, budget_seconds, seed, score, clock, device):
        seen.append((settings, budget_seconds))
        error = quality(settings)
        history, test = [{"share": 1.0, "steps": 1, "val": error}], heat(40)[0][32:, 10:]
        return baselines.Trained(
            lambda given, parameters, num: test * (1 + error), 0, 1, 0.0, budget_seconds, history=history
        )

    return train


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """Caches of the toy, and results in a temporary folder."""
    cache = FakeCache()
    for module in (compare, score, tune):
        monkeypatch.setattr(module, "open_cache", lambda config, task: cache)
    for module in (compare, tune):
        monkeypatch.setattr(module, "OUT", tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    return cache


def test_rivals_are_searched_before_a_ratio_is_printed_and_found_again(
    searched, tmp_path, monkeypatch, capsys
):
    def quality(settings):  # best with folded cells and a high rate; diverged with a history
        return (
            0.08 / (1 + (settings.patch == 4) + (settings.lr == 4e-3)) if settings.history == 1 else math.nan
        )

    seen = []
    monkeypatch.setattr(tune, "train", trained_as(quality, seen))

    def run(budget, *more):
        seen.clear()
        result = compare.main(["--task", "burgers1d", "--budget", budget, "--models", "fno", "unet", *more])
        return result, capsys.readouterr().out, len(seen) - 2

    result, text, tries = run("6")
    assert result["settings"]["unet"]["patch"] == 4 and result["settings"]["unet"]["lr"] == 4e-3
    assert "fno / unet: 1." in text and tries > 30
    for family in ("fno", "unet"):  # equal shares of a third, then the finalists share a third twice
        spent = [seconds for settings, seconds in seen[:-2] if settings.network == family]
        assert sum(spent) == pytest.approx(18.0) and spent[-1] == spent[-2] == 3.0
    assert all(seconds == 6.0 for _, seconds in seen[-2:])
    key = data_key("toy", load_config().context("burgers1d"))
    shown = find_bench_rows("burgers1d", key, tmp_path)  # what the report puts beside the operator
    for model, row in zip(("fno", "unet"), result["rows_printed"], strict=True):
        assert row["model"] == model and shown[model]["nrmse"]["value"] == pytest.approx(
            row["nrmse"], rel=1e-4
        )
        assert (
            shown[model]["train_seconds"] == 6.0
            and len(shown[model]["error_growth"]) == result["frames_scored"]
        )
    path = tmp_path / "tuned" / "burgers1d-unet-toy.json"
    assert json.loads(path.read_text())["changes"].items() >= {"patch": 4, "lr": 4e-3}.items()

    assert run("6")[2] == run("3")[2] == 0  # found again; and for a shorter budget
    assert (
        run("7")[2] == tries == run("7", "--seeds", "1")[2]
    )  # searched for less time than now, or from another seed
    searched.fingerprint = "other"
    assert run("7")[2] == tries  # so is one that was tuned on other data
    _, text, tries = run("7", "unet.lr=1e-9")  # the flattering fake
    assert tries == 0 and "no ratio fno / unet: the settings of unet are given by hand" in text


def fake_run(quality, seen, steps=lambda settings, seconds: 1):
    def run(settings, seconds, is_whole):
        seen.append((settings, seconds, is_whole))
        return Trial(quality(settings, is_whole), steps(settings, seconds), seconds)

    return run


def test_what_short_trials_prefer_serves_only_where_it_wins_at_length():
    seen = []
    found = search(
        [{}],
        [{}, {"width": 8}, {"width": 64}, {"width": 4}, {"depth": 1}],
        fake_run(  # small ones learn first
            lambda settings, is_whole: (
                1 / settings.get("width", 48) if is_whole else settings.get("width", 48)
            ),
            seen,
        ),
        30.0,
    )
    assert found["changes"] == {} and found["val"] == 1 / 48 and found["tried"] == len(seen)
    assert [seconds for *_, is_whole in seen if is_whole for seconds in [_[1]]] == pytest.approx(
        [10 / 3] * 3 + [5.0] * 2
    )
    assert found["seconds"] == pytest.approx(30.0)


def test_a_search_leaves_out_what_does_not_fit_and_refuses_too_little_time(capsys):
    def run(settings, seconds, is_whole):
        if settings.get("modes") == 99:
            raise ValueError("modes is 99; expected 1 to 9")
        return Trial(settings.get("lr", 1.0), 1, seconds)

    assert search([{}], [{}, {"modes": 99}, {"lr": 0.5}], run, 3.0)["changes"] == {"lr": 0.5}
    assert "left out {'modes': 99}: modes is 99; expected 1 to 9" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match="came to a training step in fewer than two; expected time .* Give more"
    ):
        search([{}], [{}, {"lr": 0.5}], fake_run(lambda *_: 1.0, [], lambda settings, seconds: 0), 3.0)
    with pytest.raises(ValueError, match="fewer than two"):
        search([{}], [{}, {"modes": 99}], run, 3.0)


def test_of_two_starts_the_one_that_short_trials_think_worse_is_still_compared_at_length():
    seen = []

    def quality(
        settings, is_whole
    ):  # what a fitted base gives at once, and what is learnt in time without it
        return (
            (0.02 if is_whole else 0.4)
            if settings.get("frames") == 1
            else 0.03 - 0.001 * settings.get("depth", 0)
        )

    found = search(
        [{"frames": 1}, {}], [{}, {"depth": 1}, {"depth": 2}, {"depth": 3}], fake_run(quality, seen), 60.0
    )
    assert found["changes"] == {"frames": 1} and found["val"] == 0.02 and found["seconds"] <= 60.01
    whole = [(settings, seconds) for settings, seconds, is_whole in seen if is_whole]
    assert [settings for settings, _ in whole[-2:]] == [{"frames": 1}, {"depth": 3}] and whole[-1][
        1
    ] == pytest.approx(10.0)


def test_a_search_that_waits_for_a_fit_says_what_it_had_no_time_for(capsys):
    slow = []
    search(
        [{}], [{}, {"lr": 0.5}, {"lr": 0.25}], lambda *a: slow.append(a) or Trial(1.0, 1, 0.6), 3.0
    )  # a fit took long
    assert [settings for settings, *_ in slow] == [
        {},
        {"lr": 0.5},
    ] and "no time for 1 of 3 changes" in capsys.readouterr().out


def test_the_search_of_ours_finds_fewer_frames_and_no_propagator_although_neither_alone_helps(
    searched, monkeypatch, tmp_path
):
    """So it is on compressible flow in 1D; and what was found is an overlay that loads."""
    tried = []

    def train_operator(config, task, budget, seed, device, clock, fitted):
        model, now = config.operator.model, config.task[task]
        tried.append((now.history, now.base, budget))
        is_right = (now.history == 1) + (now.base == ["persistence"])
        error = {0: 0.036, 1: 0.04, 2: 0.025}[is_right] * (1 + abs(model.modes - 16) / 100)
        return baselines.Trained(None, 0, 5, 0.0, budget, history=[{"val": error}])

    monkeypatch.setattr(tune.OurTrials, "fitted", lambda self, config: (None, 0.0, 0.5))
    monkeypatch.setattr(ours, "train_ours", train_operator)
    monkeypatch.setattr(tune, "is_up_to_date", lambda config, task: (True, ""))
    start = ["task.burgers1d.history=4", "task.burgers1d.base=[persistence, propagator]"]
    [record] = tune.main(["--task", "burgers1d", "--models", "ours", "--budget", "20", *start]).values()
    assert record["changes"]["task.burgers1d.history"] == 1 and record["changes"]["task.burgers1d.base"] == [
        "persistence"
    ]
    assert record["val"] == pytest.approx(0.025) and tried[-1][2] == pytest.approx(
        10 * (1 - 0.5 / 20)
    )  # less the fit's share
    path = tmp_path / "tuned" / "burgers1d-ours-toy.yaml"
    assert "chosen on the validation split" in path.read_text() and "seed 0" in path.read_text()
    config = load_config(path)
    assert (config.task["burgers1d"].history, config.task["burgers1d"].base) == (1, ["persistence"])
    assert compare.generic({}, load_config(), "burgers1d") == {
        "task.burgers1d.base": ["persistence", "propagator"]
    }
    left = compare.generic({"task.burgers1d.base": ["transport"]}, config, "burgers1d")
    assert left == {"task.burgers1d.base": ["persistence"]}
    # generic parts alone are searched for themselves, among themselves: what suits ours with its bases is no
    # measure of them
    before, tried[:] = len(tried), []
    [record] = tune.main(
        ["--task", "burgers1d", "--models", "ours_generic", "--budget", "20", "--config", str(path)]
    ).values()
    assert before and {name for _, bases, _ in tried for name in bases} <= {*tune.GENERIC}
    assert (tmp_path / "tuned" / "burgers1d-ours_generic-toy.json").is_file()
    assert [
        tune.family_of(name) for name in ("ours", "ours_generic", "ours_correction", "fno_correction")
    ] == ["ours", "ours_generic", "ours", "fno"]


def test_a_base_whose_fit_takes_the_whole_budget_is_not_chosen(monkeypatch):
    """It would be served alone, untrained on; whoever fits a base again does not pay again."""
    monkeypatch.setattr(
        tune.OurTrials, "fitted", lambda self, config: self.fits.setdefault("fit", (None, 1e-3, 25.0))
    )
    monkeypatch.setattr(tune, "changed", lambda args, changes: None)
    trained = []
    monkeypatch.setattr(
        tune,
        "train_ours",
        lambda args, changes, seed, left, fitted: (
            trained.append(left) or baselines.Trained(None, 0, 5, 0.0, left, history=[{"val": 1e-3}])
        ),
    )
    args = types.SimpleNamespace(budget=20.0, seeds=[0])
    dear = tune.OurTrials(args, [])
    assert (
        dear({}, 4.0, True) == Trial(math.inf, 0, 25.0)
        and dear({}, 4.0, False) == Trial(math.inf, 0, 0.0)
        and not trained
    )
    args.budget = 50.0
    assert tune.OurTrials(args, [])({}, 4.0, True) == Trial(1e-3, 5, 27.0) and trained == [
        2.0
    ]  # half of it is left for steps
    assert tune.OurTrials(args, [{}])({}, 4.0, False) == Trial(
        1e-3, 5, 4.0
    )  # where a search starts, somebody has to fit


def test_what_is_tried_fits_the_schema_and_the_grid(searched):
    config = load_config(None, ["data.tasks=[burgers1d]", "task.burgers1d.history=10"])
    changes = tune.our_changes(config, dataclasses.replace(problem(), name="burgers1d"))
    assert (
        len(changes) > 20
        and {"task.burgers1d.patch": 8} in changes
        and {"task.burgers1d.patch": 4} not in changes
    )
    assert len(set(map(str, changes))) == len(changes)
    config = load_config(None, ["data.tasks=[shallow_water2d]"])
    plane = tune.our_changes(config, dataclasses.replace(problem(ndim=2), name="shallow_water2d"))
    assert plane[1]["operator.train.batch_size"] == 4 and "base" in str(plane[-1])  # the dearest last
    assert tune.our_starts(problem(ndim=2)) == [plane[1]]
    bare, volume = tune.our_starts(problem(ndim=3, size=4))
    assert volume == plane[1] and bare["task.toy.patch"] == 2 and bare["operator.model.width"] == 48
    for model in ("fno", "unet"):  # the built-in lists are valid settings
        assert (
            len(tune.rival_changes(model, problem())) > 10 < len(tune.rival_changes(model, problem(True, 2)))
        )
        assert len(tune.rival_changes(model, problem(ndim=3, size=4))) > 10
    assert (
        tune.fitting_start("fno", problem()) == {"modes": 8} and tune.fitting_start("unet", problem()) == {}
    )


def test_fields_are_those_of_the_data_files_whatever_the_codec_keeps():
    cache = FakeCache(dim=3)
    assert torch.equal(score.fields(load_config(), cache, "test")[0], cache.u[32:])


@pytest.mark.parametrize("seconds", [5.0, 9.0])
def test_ours_gets_the_same_budget_and_is_marked_when_it_takes_more(seconds, searched, monkeypatch, capsys):
    def train_operator(config, task, budget_seconds, seed, device, clock):
        assert (task, budget_seconds, seed, device, clock) == ("burgers1d", 5.0, 3, "cpu", time.process_time)
        assert config.operator.model.width == 40
        return baselines.Trained(
            lambda given, parameters, num: given[:, -1:].expand(-1, num, -1, -1), 0, 0, 0.0, seconds
        )

    monkeypatch.setattr(ours, "train_ours", train_operator)
    monkeypatch.setattr(compare, "found", lambda *_: {"changes": {"operator.model.width": 40}})
    result = compare.main(["--task", "burgers1d", "--budget", "5", "--models", "ours", "--seeds", "3"])
    assert result["rows_printed"][0]["error"] == result["trivial"]["error"]
    assert (
        result["rows_printed"][0]["is_over_budget"]
        == ("OVER BUDGET" in capsys.readouterr().out)
        == (seconds > 5)
    )


def test_impossible_requests_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="expected both above zero"):
        compare.main(["--task", "burgers1d", "--budget", "0"])
    with pytest.raises(ValueError, match="--clock cpu misses what cuda computes; expected wall there"):
        compare.main(["--task", "burgers1d", "--budget", "1", "--device", "cuda", "--clock", "cpu"])
    monkeypatch.setitem(sys.modules, "neuralop.models", None)  # as if the package were not installed
    with pytest.raises(ImportError, match="pip install -r bench/requirements.txt"):
        networks.LibraryFNO(1, 1, (16,), PERIODIC, Settings(**TINY))


# ---- ablation ----------------------------------------------------------------------------------------------


SMALL = [
    "operator.model.width=8",
    "operator.model.depth=2",
    "operator.model.modes=4",
    "operator.model.kernel_size=3",
    "operator.train.batch_size=4",
    "operator.train.micro_batch=4",
    "task.burgers1d.base=[persistence]",
]


@pytest.fixture
def ticking(monkeypatch):
    """Our operator trains on the toy by a clock that ticks once a reading."""
    ticks = itertools.count()
    for module in (ours, ablate):
        monkeypatch.setattr(module, "open_cache", lambda config, task: FakeCache())
    monkeypatch.setattr(ours, "Stopwatch", lambda clock: baselines.Stopwatch(lambda: next(ticks)))
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
    head, scores = select_base(
        FakeCache(), config.operator.base_steps, config.context("burgers1d"), 0, torch.device("cpu")
    )
    trained = ours.train_ours(
        config, "burgers1d", 14.0, 0, fitted=(head, min(scores.values())), modify=modify
    )
    [(operator, start)] = built
    assert trained.steps > 8 and all(math.isfinite(point["val"]) for point in trained.history)
    assert not [key for key, p in operator.named_parameters() if torch.equal(p, start[key])]
    assert lengths == ({1} if name == "no_unroll" else {1, 2})
    assert bool(split_parameters(operator)[0]) == (name != "adamw")


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        ((), range(32)),
        (("no_spectral",), (-2, -1, 0, 1, 2)),
        (("no_spectral", "no_local"), (0,)),
        (("no_local",), range(32)),
        (("attention", "no_local"), range(32)),
        (("window_attention", "no_local"), range(8)),
        (("no_gate", "no_spectral", "no_local"), (0,)),
    ],
)
def test_a_part_that_was_taken_out_carries_nothing_from_token_to_token(names, seen):
    torch.manual_seed(0)
    model = ModelConfig(kind="flat", width=8, depth=2, modes=4, kernel_size=3, mlp_ratio=2.0)
    backbone = FlatBackbone(model, {ANY: (PERIODIC,)})
    for name in names:
        ablate.MODIFIED[name](types.SimpleNamespace(backbone=backbone, width=8))
    for name, parameter in backbone.named_parameters():
        if name.endswith("modulation.weight"):
            torch.nn.init.normal_(parameter)
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
    model, block = torch.nn.Linear(2, 2), FlatBackbone(read["standard"].model, {ANY: (PERIODIC,)}).blocks[0]
    last = EMA(model, read["no_ema"].optim.ema_decay)
    torch.nn.init.normal_(model.weight)
    last.update()
    assert torch.equal(last.averages["weight"], model.weight)
    plain = ablate.PlainBlock(block)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in block.parameters())


def test_the_ablation_writes_its_table(ticking, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "OUT", tmp_path)
    [result] = ablate.main(
        ["--task", "burgers1d", "--budget", "6", "--seeds", "0", "1", "--variants", "no_local", *SMALL]
    )
    saved = json.loads(next(tmp_path.glob("ablate_burgers1d_6s_*.json")).read_text())
    assert [row["variant"] for row in saved["table"]] == ["standard", "no_local"] and saved["seeds"] == [0, 1]
    assert (
        saved["table"][0]["ratio"] == 1.0
        and len(saved["runs"]) == 4
        and "no_local" in capsys.readouterr().out
    )
    run = {"base": 1.0, "steps": 2, "step_ms": 1.0, "num_parameters": 3}
    rows = ablate.table(
        [
            {**run, "variant": name, "seed": seed, "error": error}
            for name, seed, error in [
                ("standard", 0, 1.0),
                ("standard", 1, 3.0),
                ("adamw", 0, 2.0),
                ("adamw", 1, 3.0),
            ]
        ]
    )
    assert rows[1]["ratio"] == 1.25 and rows[1]["ratios"] == [2.0, 1.0] and rows[1]["error"] == 2.5


# ---- correction --------------------------------------------------------------------------------------------


def decayed(u, parameters):
    """The toy's solver, coarse: every wave number decays as the second does."""
    mean = u.mean(-1, keepdim=True)
    return mean + (u - mean) * torch.exp(-0.05 * parameters[:, :1, None].float() * 4)


@pytest.mark.parametrize("changes", [{}, {"network": "unet", "depth": 2, "history": 2}, {"augment": False}])
def test_a_rival_that_corrects_starts_from_the_solver_and_learns_what_it_leaves(changes):
    u, c = heat()
    table = torch.stack([decayed(u[:, t], c) for t in range(u.shape[1])], 1)
    p = dataclasses.replace(problem(), step=decayed, train_step=table)
    trainer = Trainer(p, Settings(**{**TINY, "batch_size": 16, "lr": 1e-2, "warmup": 0.0, **changes}), seed=0)
    fresh, c = heat(seed=1)
    first = decayed(fresh[:, 9], c)
    torch.testing.assert_close(
        trainer.predict(fresh[:, :10], c, 2)[:, 0], first
    )  # untrained it is the solver
    torch.testing.assert_close(trainer.predict(fresh[:, :10], c, 2)[:, 1], decayed(first, c))
    for step in range(60):
        trainer.step(step / 60)
    pred, truth = trainer.predict(fresh[:, :10], c, 4), fresh[:, 10:]
    alone = torch.stack([first, *(first := decayed(first, c) for _ in range(3))], 1)
    assert float((pred - truth).square().mean()) < 0.3 * float((alone - truth).square().mean())


def test_answers_are_augmented_with_the_frames_that_they_answer():
    u, c = heat()
    p = dataclasses.replace(
        problem(), step=decayed, train_step=torch.stack([decayed(u[:, t], c) for t in range(14)], 1)
    )
    window, _, parameters, coarse = Trainer(p, Settings(**{**TINY, "history": 2}), seed=0).batch(1)
    known = 0.5 + 0.5 * (parameters > 0).double()
    torch.testing.assert_close(coarse.movedim(-1, 1), decayed(window[:, -1].movedim(-1, 1), known))


def test_the_coarse_solver_is_the_tasks_on_half_the_grid_and_lost_states_are_not_stepped():
    task, x = get_task("advection1d"), (torch.arange(32) + 0.5) / 32
    u, c = (
        torch.sin(2 * math.pi * (x - torch.tensor([[0.0], [0.3]])))[:, None],
        torch.tensor([[0.4], [1.0]]).double(),
    )
    low, high = torch.tensor([-1.0]), torch.tensor([1.0])
    exact = torch.sin(2 * math.pi * (x - torch.tensor([[0.0], [0.3]]) - 0.1 * c))[:, None].float()
    whole = correction.coarse_step(task, 0.1, False, low, high)(u, c)
    half = correction.coarse_step(task, 0.1, True, low, high)(u, c)
    torch.testing.assert_close(whole, exact, atol=1e-5, rtol=0)
    assert 1e-3 < float((half - exact).abs().max()) < 0.05  # coarse, and the change was brought back
    wild = torch.stack([u[0], 100 * u[1]])
    found = correction.coarse_step(task, 0.1, False, low, high)(wild, c)
    torch.testing.assert_close(found[0], exact[0], atol=1e-5, rtol=0)
    assert bool(found[1].isnan().all())
    with pytest.raises(
        ValueError, match="darcy2d has no step from a given state; expected a task whose fields"
    ):
        correction.coarse_step(get_task("darcy2d"), 0.1, False, low, high)


def test_ours_corrects_the_solver_and_is_never_trained_through_it(searched, ticking, monkeypatch):
    calls, task = [], FakeCache.made.task

    def step(u, *, parameter, dt):
        calls.append(torch.is_grad_enabled())
        return decayed(u, torch.full((len(u), 1), parameter))

    searched.task = dataclasses.replace(task, step=step)
    for module in (ours, correction):
        monkeypatch.setattr(module, "open_cache", lambda config, task: searched)
    monkeypatch.setattr(correction, "OUT", compare.OUT)
    monkeypatch.setattr("bench.tune.is_up_to_date", lambda config, task: (True, ""))
    args = types.SimpleNamespace(
        config=None, overrides=[*SMALL, "data.source=user"], task="burgers1d", device="cpu", clock="cpu"
    )
    torch.manual_seed(0)
    trained = correction.train_ours(
        args, {"task.burgers1d.base": ["transport"], "task.burgers1d.reach": 96}, 0, 60.0
    )
    u, c = searched.u[32:], searched.parameters[32:]
    base, pred = (f(u[:, :10], c, 4) for f in (trained.predict_base, trained.predict))
    alone = torch.stack([first := decayed(u[:, 9], c), *(first := decayed(first, c) for _ in range(3))], 1)
    torch.testing.assert_close(base, alone, atol=1e-4, rtol=1e-4)
    assert not any(calls) and trained.steps > 20
    assert float((pred - u[:, 10:]).square().mean()) < float((alone - u[:, 10:]).square().mean())


def test_the_table_of_covariances_ranks_the_basis_of_the_law_first_by_code_and_by_divergence(monkeypatch):
    monkeypatch.setattr(covariance, "CELLS", 8)
    fields = torch.stack([darcy_grf.sample_log_coefficient(0, index, 8) for index in range(60)])[
        :, None
    ].float()
    *found, exact = covariance.rows(fields)
    by_divergence, by_code = (sorted(found, key=lambda row: float(row[column])) for column in (1, 2))
    assert [row[0] for row in by_divergence] == [row[0] for row in by_code] and by_code[0][0] == "cosine"
    assert float(by_divergence[0][1]) < float(by_divergence[1][1]) / 4 and exact[0] == "exact"
