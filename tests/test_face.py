"""The public face: `ups.load` and what it gives, predict.py, and the package as pip installs it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import h5py
import loop_stage
import numpy as np
import pytest
import torch
from call_path import CallPath, path_of
from cases import cases, configured
from commands import python
from finished import write_stage
from packaging.requirements import Requirement

import prepare_cache
import prepare_data
import ups
from ups.__main__ import main as ups_command
from ups.commands import predict
from ups.commands.interpreter import pinned
from ups.common.place import STAGES
from ups.config.load import load_config
from ups.evaluation.ensemble import Ensembles, load_samplers, rollouts
from ups.evaluation.truth import open_truth
from ups.forecast_xarray import unlabel
from ups.forecaster import Forecaster
from ups.generative import inversion, sampling, validation
from ups.generative.residuals import TransientResiduals
from ups.models.rollout import name_starts, rollout, traced

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("burgers1d", "diff_react2d", "burgers1d_hidden", "darcy2d_grf", "burgers1d_forced")


MOST_OF_FORECAST, MOST_OF_ITS_FRAME = CallPath(functions=70, files=17, depth=10), CallPath(33, 12, 10)
MOST_OF_GRAPH = CallPath(44, 12, 6)  # the same once a graph computes the frames
# of a call of `sample` by the student, and of a later frame of it alone
MOST_OF_SAMPLE, MOST_OF_FRAME = CallPath(130, 28, 19), CallPath(80, 23, 18)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data and a run of every stage, trained for a few steps by the scripts themselves."""
    root = tmp_path_factory.mktemp("face")
    config = ["--config", str(configured(root, "face.configuration"))]
    assert prepare_data.main(config) == 0 and prepare_cache.main(config) == 0
    stages = ("operator", "diffusion", "consistency", "steady")
    loop_stage.run_scripts(root, config, *(f"train_{stage}" for stage in stages))
    return root


@pytest.fixture(scope="module")
def model(folder) -> Forecaster:
    return ups.load(folder / "tiny")


def field(model: Forecaster, task: str, *lead: int, seed: int = 0) -> np.ndarray:
    """A smooth positive field (*lead, C, *space)."""
    known, source = model.tasks[task], np.random.default_rng(seed)
    points = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in known["grid"]], indexing="ij")
    waves = sum(
        source.normal(size=(*lead, len(known["inputs"] or known["fields"]), *[1] * len(points)))
        * np.cos(2 * np.pi * k * sum(points))
        / k
        for k in (1, 2)
    )
    return (1 + 0.2 * waves).astype(np.float32)


# ---------------------------------------------------------------- what is known, and what is asked wrongly


def test_all_that_is_known_of_a_task_comes_from_the_weights(model, tmp_path, folder):
    # no data, no caches, no configuration of ours there
    shutil.copytree(folder / "tiny", tmp_path / "elsewhere")
    again = ups.load(str(tmp_path / "elsewhere"))
    assert set(again.tasks) == set(TASKS) and again.tasks == model.tasks
    known = model.tasks["diff_react2d"]
    assert known["fields"] == ["u", "v"] and known["axes"] == ["y", "x"] and known["grid"] == [32, 32]
    assert known["domain"] == [-1.0, 1.0] and known["boundary"] == "no_flux" and known["history"] == 4
    assert model.tasks["burgers1d"]["parameters"] == {"Nu": (0.1, 0.1)}
    for text in (
        "burgers1d: u on 64 (periodic), dt 0.05, history 1, Nu 0.1 to 0.1",
        "darcy2d_grf: a -> u on 32 x 32 (dirichlet)",
    ):
        assert text in repr(model)
    alone = ups.load(folder / "tiny" / "operator")
    u0 = field(model, "burgers1d", 2)
    np.testing.assert_array_equal(
        alone.forecast("burgers1d", u0, 0.1, 3), model.forecast("burgers1d", u0, 0.1, 3)
    )
    # of the run that it lies in
    assert alone.sample("burgers1d_hidden", u0, members=2).shape == (2, 2, 1, 1, 64)


@pytest.mark.parametrize(("call", "task", "shape", "options", "text"), cases("face.draws"))
def test_what_cannot_be_drawn_is_refused_by_name(model, call, task, shape, options, text):
    options = {key: np.ones(value) if key == "mask" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=text):
        getattr(model, call)(task, np.ones(shape, "float32"), **options)


def test_missing_stages_and_folders_name_the_make_target(model, folder, tmp_path):
    shutil.copytree(folder / "tiny" / "operator", tmp_path / "run" / "operator")
    bare, u0 = ups.load(tmp_path / "run"), field(model, "burgers1d_hidden")
    assert bare.forecast("burgers1d_hidden", u0).shape == (1, 1, 64)
    for by, stage in (("student", "consistency"), ("teacher", "diffusion"), ("scoring", "scoring")):
        with pytest.raises(
            FileNotFoundError,
            match=f"run/{stage}/config.json is missing; expected a finished .*Run make {stage}",
        ):
            bare.sample("burgers1d_hidden", u0, by=by)
    with pytest.raises(FileNotFoundError, match="run/steady/config.json is missing; .*Run make steady"):
        bare.prior("darcy2d_grf", np.ones((1, 32, 32), "float32"), np.ones((32, 32)))
    with pytest.raises(
        FileNotFoundError, match="there is no folder .*nowhere; expected a run.*Run make operator"
    ):
        ups.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"the device is 'tpu', which torch cannot use here \(Expected one"):
        ups.load(tmp_path, "tpu")
    with pytest.raises(ValueError, match=r"solver passed is {'ks': .*expected step\(u\), or TASK -> step"):
        ups.load(folder / "tiny", solvers={"ks": torch.sin})
    with pytest.raises(
        ValueError, match=r"the solver passed is .*sin.*base calls one: none of these weights"
    ):
        ups.load(folder / "tiny", solvers=torch.sin)
    for nothing in (3, None):
        with pytest.raises(TypeError, match=f"the folder is {nothing}; expected the path of a run, such as"):
            ups.load(nothing)
    with pytest.raises(
        FileNotFoundError,
        match="config.json is missing; expected a finished operator stage.*Run make operator",
    ):
        ups.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="an operator alone has no sampler; expected a run's folder"):
        Forecaster(model.operator).sample("burgers1d_hidden", u0)


def test_what_serves_is_the_best_of_what_was_finished_and_evaluations_asked_for_are_spent(tmp_path, model):
    parents = {"operator": write_stage(tmp_path / "operator", {}, {})}

    def stage(name, task="forced", *, is_done=True, **figures):
        of = {parent: parents[parent] for parent in STAGES[name].parents}
        parents[name] = write_stage(
            tmp_path / name, {"sampler_steps": 16, validation.CRPS_KEY: {task: figures}}, {}, name, of
        )
        if not is_done:
            (tmp_path / name / "done.json").unlink()

    assert validation.default_sampler(tmp_path, "forced") == "student_1"  # nothing is known
    stage("diffusion", corrector=0.10)
    stage("consistency", student_1=0.13, student_2=None)  # two evaluations blew up
    assert validation.describe(tmp_path, "forced").startswith(
        "sample() uses student_1: of those with at most 2 network evaluations"
    )
    assert validation.validated_samplers(tmp_path, "forced") == {
        "corrector": (32, 0.10),
        "student_1": (1, 0.13),
    }
    assert validation.default_sampler(tmp_path, "forced") == "student_1"
    for asked, spent in (
        (1, ("student_1", 0)),
        (2, ("corrector", 1)),
        (3, ("corrector", 1)),
        (16, ("corrector", 8)),
        (32, ("corrector", 16)),
        (100, ("corrector", 16)),
    ):
        assert validation.best_within(tmp_path, "forced", asked) == spent  # not student_2, which blew up
    stage("scoring", is_done=False, scoring=0.01)  # a stage that is still training says nothing
    assert validation.default_sampler(tmp_path, "forced") == "student_1"
    stage("scoring", scoring=0.01)
    assert validation.default_sampler(tmp_path, "forced") == "scoring"
    assert validation.default_sampler(tmp_path, "other") == "student_1"
    assert validation.best_within(tmp_path, "forced", 1) == (
        "scoring",
        0,
    )  # of as many evaluations the better
    # a second evaluation must be worth more than chance is
    for more, best in ((0.128, "student_1"), (0.1, "student_2")):
        stage("consistency", "tied", student_1=0.13, student_2=more)
        assert validation.default_sampler(tmp_path, "tied") == best
        assert validation.best_within(tmp_path, "tied", 2) == ("student_2", 0)
        assert validation.best_within(tmp_path, "tied", 32)[0] == "corrector"
    # waves cost no evaluation, so they serve where they are as good; evaluations that are asked for are spent
    for waves, best in ((0.135, "waves"), (0.14, "student_1")):
        stage("diffusion", "closed", waves=waves, corrector=0.1)
        stage("consistency", "closed", student_1=0.13)
        stage("scoring", "closed")
        assert validation.default_sampler(tmp_path, "closed") == best
        assert validation.best_within(tmp_path, "closed", 1) == ("student_1", 0)
    found = validation.validated_samplers(model.folder, "burgers1d_hidden")  # of the scripts themselves
    assert {*found} == {"waves", "corrector", "student_1", "student_2"}
    assert found["waves"][0] == 0
    assert all(crps > 0 for _, crps in found.values())
    assert found["corrector"][0] == 8


@pytest.mark.parametrize(
    ("evaluations", "by"), [(32, "teacher"), (8, "teacher"), (2, "student_2"), (1, "student")]
)
def test_evaluations_that_are_asked_for_are_spent(model, evaluations, by):
    u0 = field(model, "burgers1d_hidden", 2)
    asked = model.sample("burgers1d_hidden", u0, members=2, evaluations=evaluations)
    np.testing.assert_array_equal(asked, model.sample("burgers1d_hidden", u0, members=2, by=by))
    few = model.sample("burgers1d_hidden", u0, members=2, evaluations=4)  # the teacher's sampler in two steps
    assert np.abs(few - asked).max() > 0
    for wrong in ({"evaluations": 0}, {"evaluations": 1.5}, {"evaluations": 2, "by": "teacher"}):
        with pytest.raises(ValueError, match="hidden has evaluations=.*; expected a whole number"):
            model.sample("burgers1d_hidden", u0, members=2, **wrong)


# ---------------------------------------------------------------- axes and kinds


def test_axes_that_are_left_out_are_left_out_of_the_answer(model):
    u0 = field(model, "burgers1d", 3, 1)
    right = model.forecast("burgers1d", u0, {"Nu": 0.1}, 4)
    assert right.shape == (3, 4, 1, 64)
    # no time
    np.testing.assert_array_equal(model.forecast("burgers1d", u0[:, 0], {"Nu": [0.1, 0.1, 0.1]}, 4), right)
    # nor batch
    np.testing.assert_allclose(model.forecast("burgers1d", u0[0, 0], 0.1, 4), right[0], atol=1e-6)
    frames = field(model, "diff_react2d", 2, 6)
    long = model.forecast("diff_react2d", frames, num_frames=3)
    # the last ones count
    np.testing.assert_array_equal(long, model.forecast("diff_react2d", frames[:, -4:], num_frames=3))
    np.testing.assert_allclose(model.forecast("diff_react2d", frames[0], num_frames=3), long[0], atol=1e-5)
    as_torch = model.forecast("burgers1d", torch.from_numpy(u0), torch.tensor([0.1]), 4)
    assert isinstance(as_torch, torch.Tensor) and as_torch.dtype == torch.float32
    np.testing.assert_array_equal(as_torch.numpy(), right)


@pytest.mark.parametrize("by", ["student", "student_2", "teacher"])
def test_members_are_a_function_of_seed_and_row_whatever_the_batch_holds(model, by):
    u0 = field(model, "burgers1d_hidden", 3)
    members = model.sample("burgers1d_hidden", u0, num_frames=2, members=5, by=by)
    assert members.shape == (3, 5, 2, 1, 64) and np.isfinite(members).all()
    spread = members.std(1).mean()
    assert (members.std(1) > 0).all()  # no member is another
    again = model.sample("burgers1d_hidden", u0[1:], num_frames=2, members=5, by=by, rows=[1, 2])
    np.testing.assert_allclose(again, members[1:], rtol=0, atol=1e-6)
    assert (
        np.abs(model.sample("burgers1d_hidden", u0, num_frames=2, members=5, by=by, seed=1) - members).max()
        > spread
    )
    one = model.sample("burgers1d_hidden", u0[0], num_frames=2, members=5, by=by)
    np.testing.assert_allclose(one, members[0], rtol=0, atol=1e-6)
    many = model.sample("burgers1d_hidden", np.concatenate([u0] * 9), num_frames=2, members=5, by=by)
    np.testing.assert_allclose(many[:3], members, rtol=0, atol=1e-6)
    assert np.abs(many[3:6] - members).max() > 0.1 * spread  # the same states in other rows


def test_a_forecast_in_single_steps_has_the_spread_of_one_forecast(model):
    """Every call draws anew, though seed and rows are the same; the same call draws the same."""
    u0, frames, members = field(model, "burgers1d_hidden"), 8, 64
    whole = model.sample("burgers1d_hidden", u0, num_frames=frames, members=members, by="student")[:, -1]
    u = u0[None].repeat(members, 0)
    for _ in range(frames):
        steps, u = u, model.sample("burgers1d_hidden", u, members=1, by="student")[:, 0, -1]
    assert 0.8 < u.std(0).mean() / whole.std(0).mean() < 1.25
    np.testing.assert_array_equal(
        model.sample("burgers1d_hidden", steps, members=1, by="student")[:, 0, -1], u
    )


def test_noise_by_row_is_the_same_for_a_start_that_is_changed_a_little_and_noise_by_state_is_not(model):
    u0, task = field(model, "burgers1d_hidden", 2), "burgers1d_hidden"

    def members(u, **options) -> np.ndarray:
        return model.sample(task, u, num_frames=3, members=8, by="student", **options)

    spread = members(u0).std(1).mean()
    change = {
        kind: members(u0 * (1 + 1e-7), noise=kind) - members(u0, noise=kind) for kind in ("state", "row")
    }
    assert np.abs(change["state"]).mean() > 0.5 * spread and np.abs(change["row"]).mean() < 0.01 * spread
    np.testing.assert_array_equal(members(u0, noise="state"), members(u0))
    np.testing.assert_array_equal(members(u0[1:], noise="row", rows=[1]), members(u0, noise="row")[1:])
    # calls in a row repeat the noise of the first with the same seed, and have new noise with another
    first = model.sample(task, u0, members=164, by="student", noise="row")[0, :, 0]
    for seed, is_same in ((0, True), (1, False)):
        step = model.sample(task, u0, members=164, by="student", noise="row", seed=seed)[0, :, 0]
        alike = np.corrcoef((step - step.mean(0)).ravel(), (first - first.mean(0)).ravel())[0, 1]
        assert alike > 0.99 if is_same else abs(alike) < 0.3
    for wrong in ("rows", None, 1):
        with pytest.raises(ValueError, match="hidden was given noise=.*; expected 'state' .* or 'row'"):
            members(u0, noise=wrong)


@pytest.mark.parametrize(("task", "by"), [("burgers1d_hidden", "student"), ("burgers1d_forced", "waves")])
def test_members_given_observations_meet_them_and_those_of_a_free_forecast_do_not(model, task, by):
    """The last of 16 members of a free forecast is measured in two frames, so that it is one of the law."""
    u0, rows = field(model, task, 6), [*range(3, 9)]
    free = model.sample(task, u0, num_frames=4, members=16, by=by, seed=1)
    truth, members = free[:, -1], free[:, :15]
    at, size = np.arange(64) % 4 == 0, 0.05 * members.std(1).mean()
    given = {"frames": [2, 4], "values": truth[:, [1, 3]], "mask": at, "noise": size}
    options = {"num_frames": 4, "members": 15, "by": by, "rows": rows}
    held = model.sample(task, u0, observations=given, **options)
    assert held.shape == members.shape and held.dtype == members.dtype

    def error(found: np.ndarray, frame: int) -> float:
        return np.sqrt(np.square(found.mean(1) - truth)[:, frame].mean())

    assert all(
        error(held, frame) < most * error(members, frame) for frame, most in enumerate((1, 0.7, 1, 0.7))
    )
    assert np.sqrt(np.square(held - truth[:, None])[:, :, [1, 3]][..., at].mean()) < 3 * size
    np.testing.assert_array_equal(model.sample(task, u0, observations=given, **options), held)
    one = {**given, "values": given["values"][1:]}  # a row does not depend on the others
    alone = model.sample(task, u0[1:], observations=one, **{**options, "rows": rows[1:]})
    np.testing.assert_allclose(alone, held[1:], rtol=0, atol=1e-4 * np.abs(held).max())
    nothing = model.sample(task, u0, observations={**given, "mask": 0 * at}, **options)
    assert np.abs(nothing - model.sample(task, u0, **options)).max() < 1e-4 * np.abs(nothing).max()
    for change, text in (
        ({"frames": [4, 2]}, "was given observations of frames .4, 2.; expected ascending numbers from 1"),
        ({"frames": [2, 5]}, "was given observations of frames .2, 5.; .* to num_frames = 4"),
        ({"noise": 0.0}, "was given observations with wrong noise .* a noise above 0"),
        ({"values": truth}, r"was given observations values of shape .*; expected \(6, 2, 1, 64\)"),
        (
            {"when": 1},
            "was given observations frames, .*when; expected a dictionary of values, noise, mask, frames",
        ),
    ):
        with pytest.raises(ValueError, match=f"{task} {text}"):
            model.sample(task, u0, observations={**given, **change}, **options)


@pytest.mark.filterwarnings("error")
def test_a_prior_draws_positive_solutions_that_what_is_unseen_cannot_change(model):
    a, mask = np.exp(field(model, "darcy2d_grf", 2)), np.random.default_rng(1).random((32, 32)) < 0.1
    draws = model.prior("darcy2d_grf", a, mask, members=3)
    assert draws.shape == (2, 3, 1, 32, 32) and (draws > 0).all() and (draws.std(1) > 0).any()
    unknown = np.where(mask, a, np.nan).astype("float32")
    np.testing.assert_array_equal(model.prior("darcy2d_grf", unknown, mask, members=3), draws)
    nowhere = model.prior("darcy2d_grf", a[0], np.zeros((32, 32)), members=3)
    np.testing.assert_array_equal(model.prior("darcy2d_grf", None, members=3), nowhere)
    one = model.prior("darcy2d_grf", torch.from_numpy(a[0]), torch.from_numpy(mask), members=3)
    assert isinstance(one, torch.Tensor)
    torch.testing.assert_close(one, torch.from_numpy(draws[0]), rtol=1e-4, atol=1e-6)
    assert np.abs(model.prior("darcy2d_grf", a, ~mask, members=3) - draws).max() > 1e-6
    xarray = pytest.importorskip("xarray")
    at = {"x": (np.arange(32) + 0.5) / 32}
    named = [
        xarray.DataArray(one, at, ("run", "x", "y")[-one.ndim :])[..., ::-1, :] for one in (a[:, 0], mask)
    ]
    found = model.prior("darcy2d_grf", named[0].transpose("y", "x", "run"), named[1].T, members=3)
    np.testing.assert_array_equal(found.transpose("run", "member", "x", "y")[:, :, ::-1], draws[:, :, 0])
    with pytest.raises(
        ValueError, match="a mask and a coefficient of which one alone is labelled; expected both"
    ):
        model.prior("darcy2d_grf", named[0], mask, members=3)
    with pytest.raises(ValueError, match="prior was given the dimensions x, y; expected them without names"):
        ups.invert(model, "darcy2d_grf", {"values": a[0], "noise": 1}, prior=named[1])


@pytest.mark.filterwarnings("error")
def test_a_prior_given_noise_block_means_or_the_solution_narrows_as_they_say(model, monkeypatch):
    """Ways that say the same agree; u at some cells is met to its noise; numbers that are not measured do not
    count. Chains are short here: tests/test_inversion.py has their law."""
    monkeypatch.setattr(inversion, "PROPOSALS", inversion.PROPOSALS[:5])
    task, a = "darcy2d_grf", np.exp(field(model, "darcy2d_grf", 2))
    mask = np.random.default_rng(1).random((32, 32)) < 0.1
    exact = model.prior(task, a, mask, members=4)
    np.testing.assert_array_equal(model.prior(task, a, mask, 4, noise=0, blocks=1), exact)
    everywhere = model.prior(task, a, members=4).mean(1)
    quarter = (np.indices((32, 32)) % 2 == 0).all(0)
    noisy = model.prior(task, a, quarter, members=4, noise=0.02 * a)
    assert np.abs(noisy.mean() / everywhere.mean() - 1) < 0.02 and (noisy.std(1) > 0).any()
    means = a.reshape(2, 1, 16, 2, 16, 2).mean((3, 5))
    blocks = model.prior(task, means, members=4, noise=0.02, blocks=2)
    assert np.abs(blocks.mean() / everywhere.mean() - 1) < 0.02
    u = model.forecast(task, a[:, None])[:, 0]
    at = np.zeros((32, 32))
    at[4::8, 4::8] = 1
    size = 0.01 * u.std()
    given = {"values": np.where(at, u, np.nan), "mask": at, "noise": size}
    free = model.prior(task, None, members=8, u={**given, "mask": 0 * at})
    held = model.prior(task, None, members=8, u=given)
    assert held.shape == (2, 8, 1, 32, 32) and held.dtype == np.float32

    def error(draws: np.ndarray) -> float:
        return np.sqrt(np.square((draws.mean(1) - u)[..., at > 0]).mean())

    assert error(held) < 0.05 * error(free)
    both = model.prior(task, a, mask, members=8, u=given)
    assert error(both) < 0.05 * error(free) and np.isfinite(both).all()
    np.testing.assert_array_equal(model.prior(task, None, members=8, u=given), held)
    for options, text in (
        ({"noise": -1.0}, "was given a coefficient with wrong noise where it is measured; .* of at least 0"),
        (
            {"noise": np.ones(7)},
            r"was given noise of shape \(7,\); expected one that broadcasts to \(2, 1, 32",
        ),
        ({"blocks": 2}, "was given blocks=2 and a coefficient on .*; expected a value for each block"),
        ({"u": {"values": u}}, "was given u values; expected a dictionary of values, noise, mask"),
        (
            {"u": {"values": u[..., 1:], "noise": 1}},
            r"was given u values of shape .*; expected \(2, 1, 32, 32\)",
        ),
        (
            {"u": {"values": u, "noise": 0}},
            "was given u with wrong noise .*; expected finite values and a noise above 0",
        ),
        ({"u": {"values": np.nan * u, "noise": 1}}, "was given u with wrong values where it is measured"),
    ):
        with pytest.raises(ValueError, match=f"{task} {text}"):
            model.prior(task, a, mask, members=2, **options)
    with pytest.raises(ValueError, match="was given block means of a without noise; expected a standard"):
        model.prior(task, means, members=2, blocks=2)


def test_named_fields_keep_their_names_and_coordinates(model):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed (requirements-dev.txt)")
    frames, x = field(model, "diff_react2d", 4), (np.arange(32) + 0.5) / 16 - 1
    dt = model.tasks["diff_react2d"]["dt"]
    data = xarray.Dataset(
        {name: (("time", "y", "x"), frames[:, i]) for i, name in enumerate("uv")},
        {"time": 7 + dt * np.arange(4), "x": x, "y": x},
        attrs={"source": "mine"},
    )
    found = model.forecast("diff_react2d", data, num_frames=2)
    assert found.attrs == {"source": "mine", "task": "diff_react2d"} and set(found) == {"u", "v"}
    np.testing.assert_allclose(found["time"], 7 + dt * np.arange(4, 6))
    np.testing.assert_array_equal(
        found["v"].transpose("time", "y", "x"), model.forecast("diff_react2d", frames, num_frames=2)[:, 1]
    )
    turned = model.forecast("diff_react2d", data.transpose("x", "time", "y"), num_frames=2)
    xarray.testing.assert_equal(turned, found)  # by name, not by place
    u0 = xarray.DataArray(
        field(model, "burgers1d_hidden", 2)[:, 0], dims=("run", "x"), coords={"run": ["a", "b"]}
    )
    members = model.sample("burgers1d_hidden", u0, num_frames=3, members=2)
    assert members.dims == ("run", "member", "time", "x")
    assert members["run"].values.tolist() == ["a", "b"]
    assert members.name == "u"
    for wrong, text in (
        (data.rename(v="w"), "given variables u, w; expected u, v, as it was trained: v missing"),
        (data.assign_coords(x=2 * x), "given the coordinate x with steps of 0.125 to 0.125; expected 0.0625"),
        (data.assign_coords(x=x + 1), "given the coordinate x from .* on; expected it from .* on, as it was"),
        (
            data.assign_coords(time=np.arange(4.0)),
            "given the coordinate time with steps of 1 to 1; expected 0.2",
        ),
        (data.rename(x="lon"), "given dimensions .*; expected y, x"),
        (data.isel(x=slice(0)), r"given dimensions .* of \(2, .*, 0\); expected y, x"),
        (data.rename(v="w").to_array("channel"), "given the channels u, w; expected u, v, each once"),
    ):
        with pytest.raises(ValueError, match=text):
            model.forecast("diff_react2d", wrong)


def labelled(values: np.ndarray, *dims: str, **coordinates):
    return pytest.importorskip("xarray", reason="xarray is not installed (requirements-dev.txt)").DataArray(
        values, coordinates, dims
    )


def test_a_dimension_named_time_is_time_whatever_its_size_and_place(model):
    u, dt = field(model, "burgers1d", 2, 3), model.tasks["burgers1d"]["dt"]
    frames = labelled(u[0, :, 0], "time", "x", time=dt * np.arange(3))
    right = model.forecast("burgers1d", u[0, -1], num_frames=2)
    last = frames.isel(time=slice(-1, None))
    for shown in (frames, last, last.transpose("x", "time"), last.to_dataset(name="u"), last.isel(time=0)):
        found = model.forecast("burgers1d", shown, num_frames=2)
        found = found["u"] if hasattr(found, "data_vars") else found
        assert found.dims == ("time", "x")
        np.testing.assert_allclose(found, right[:, 0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found["time"], dt * np.array([3, 4]))
    runs = labelled(u[:, -1:, 0], "run", "time", "x").expand_dims(channel=["u"])
    many = model.forecast("burgers1d", runs, num_frames=2)
    assert many.dims == ("run", "time", "channel", "x")
    np.testing.assert_allclose(many[0], right, rtol=0, atol=1e-6)


def test_a_labelled_forecast_is_the_start_of_the_next(model):
    u0, dt = labelled(field(model, "burgers1d")[0], "x"), model.tasks["burgers1d"]["dt"]
    first = model.forecast("burgers1d", u0, num_frames=3)
    second = model.forecast("burgers1d", first, num_frames=2)
    np.testing.assert_allclose(second["time"], dt * np.arange(4, 6))
    np.testing.assert_allclose(
        second, model.forecast("burgers1d", u0, num_frames=5)[3:], rtol=1e-5, atol=1e-6
    )
    members = model.sample("burgers1d_hidden", u0, num_frames=2, members=3)
    assert model.forecast("burgers1d_hidden", members).dims == ("member", "time", "x")
    assert model.sample("burgers1d_hidden", members.rename(member="run"), members=2).dims == (
        "run",
        "member",
        "time",
        "x",
    )
    with pytest.raises(
        ValueError, match="a batch along the dimension member, a name that the forecast needs"
    ):
        model.sample("burgers1d_hidden", members)


def test_dates_stay_dates_and_go_on_by_their_own_step(model):
    u = field(model, "burgers1d", 3)[:, 0]
    dates = np.datetime64("2020-01-01") + np.arange(3) * np.timedelta64(6, "h")
    for times, step in (
        (dates, np.timedelta64(6, "h")),
        (dates - dates[0], np.timedelta64(6, "h")),
        (dates[0].astype("M8[D]") + np.arange(3), np.timedelta64(1, "D")),
    ):
        found = model.forecast("burgers1d", labelled(u, "time", "x", time=times), num_frames=2)["time"].values
        assert found.dtype.kind == times.dtype.kind and (found == times[-1] + step * np.arange(1, 3)).all()
    # an answer of one frame knows its step
    one = model.forecast("burgers1d", labelled(u, "time", "x", time=dates))
    after = model.forecast("burgers1d", one, num_frames=2)["time"].values
    assert (after == dates[-1] + np.timedelta64(6, "h") * np.arange(2, 4)).all()
    with pytest.warns(
        UserWarning,
        match="burgers1d was given a single date, .* trained time step of 0.05 is taken as seconds",
    ):
        found = model.forecast("burgers1d", labelled(u[:1], "time", "x", time=dates[:1]), num_frames=2)[
            "time"
        ].values
    assert (found == dates[0] + np.timedelta64(50, "ms") * np.arange(1, 3)).all()
    uneven = dates + np.array([0, 0, 1], "m8[h]")
    with pytest.raises(
        ValueError, match="burgers1d was given dates with steps of 21600 s to 25200 s; expected equal steps"
    ):
        model.forecast("burgers1d", labelled(u, "time", "x", time=uneven))
    with pytest.raises(
        ValueError, match="given the coordinate time with values such as .*'a'.*; expected numbers or dates"
    ):
        model.forecast("burgers1d", labelled(u, "time", "x", time=["a", "b", "c"]))


class NoLeap:
    """A date of a calendar without leap years, with as much of cftime's arithmetic as is used; cftime need
    not be installed."""

    def __init__(self, days: float):
        self.days = days

    def timetuple(self) -> tuple:
        raise NotImplementedError

    def __sub__(self, other: NoLeap) -> timedelta:
        return timedelta(days=self.days - other.days)

    def __add__(self, other: timedelta) -> NoLeap:
        return NoLeap(self.days + other / timedelta(days=1))


def test_dates_of_other_calendars_go_on_by_their_own_step(model):
    dates = np.array([NoLeap(58), NoLeap(59), NoLeap(60)])
    u0 = labelled(field(model, "burgers1d", 3)[:, 0], "time", "x", time=dates)
    found = model.forecast("burgers1d", u0, num_frames=2)["time"].values
    assert [type(date) for date in found] == [NoLeap, NoLeap] and [date.days for date in found] == [61, 62]


@pytest.mark.parametrize(("kind", "answer"), cases("face.numbers"))
def test_numbers_of_every_kind_are_converted_and_the_answer_is_floating(model, kind, answer):
    u0 = np.round(field(model, "burgers1d")).astype(kind)
    found = model.forecast("burgers1d", u0, num_frames=2)
    assert found.dtype == answer
    right = model.forecast("burgers1d", u0.astype("float32"), num_frames=2)
    np.testing.assert_allclose(found, right, rtol=1e-6)
    np.testing.assert_allclose(
        model.forecast("burgers1d", labelled(u0[0], "x"), num_frames=2), right[:, 0], rtol=1e-6
    )
    np.testing.assert_allclose(model.forecast("burgers1d", u0.tolist(), num_frames=2), right, rtol=1e-6)


def test_tensors_of_every_kind_are_converted(model):
    u0 = torch.from_numpy(np.round(field(model, "burgers1d")))
    right = model.forecast("burgers1d", u0, num_frames=2)
    for kind in (torch.float16, torch.bfloat16, torch.int64, torch.bool):
        found = model.forecast("burgers1d", u0.to(kind), num_frames=2)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, right)


def test_values_under_a_mask_are_never_used(model):
    u0 = field(model, "burgers1d")
    whole = np.ma.masked_array(u0, mask=False)
    np.testing.assert_array_equal(model.forecast("burgers1d", whole), model.forecast("burgers1d", u0))
    holes = np.ma.masked_array(u0, mask=np.arange(64) < 3)
    with pytest.raises(
        ValueError, match="burgers1d was given a field with NaN, infinity or masked values; expected finite"
    ):
        model.forecast("burgers1d", holes)
    with pytest.raises(ValueError, match="NaN, infinity or masked values"):
        model.sample("burgers1d_hidden", holes)
    a = np.exp(field(model, "darcy2d_grf"))
    mask = np.random.default_rng(1).random((32, 32)) < 0.1
    np.testing.assert_array_equal(
        model.prior("darcy2d_grf", np.ma.masked_array(a, mask=~mask[None]), mask, members=2),
        model.prior("darcy2d_grf", a, mask, members=2),
    )
    with pytest.raises(ValueError, match="NaN, infinity or masked values"):
        model.prior("darcy2d_grf", np.ma.masked_array(a, mask=~mask[None]), ~mask, members=2)


def test_a_parameter_that_had_a_single_value_in_training_may_be_left_out(model):
    u0 = field(model, "burgers1d", 2)
    right = model.forecast("burgers1d", u0, {"Nu": 0.1}, 2)
    np.testing.assert_array_equal(model.forecast("burgers1d", u0, num_frames=2), right)
    np.testing.assert_array_equal(model.forecast("burgers1d", u0, {}, 2), right)


# ---------------------------------------------------------------- the caller's state


@pytest.fixture(scope="module")
def pretrained() -> Forecaster:
    return ups.load(ROOT / "pretrained")


def burgers(model: Forecaster, num_frames: int = 3, **changes) -> np.ndarray:
    wave = np.sin(2 * np.pi * np.arange(256) / 256)[None]
    given = {"u0": wave, "parameters": {"Nu": 0.01}, "num_frames": num_frames, **changes}
    return model.forecast("burgers1d", **given)


def path_of_second_frame(monkeypatch, module: str, call) -> CallPath:
    """Of a rollout that `module` begins in call()."""
    paths = []

    def watched(step, *arguments):
        def watched_step(window, done):
            new = []
            paths.append(path_of(lambda: new.append(step(window, done))))
            return new[0]

        return rollout(watched_step, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(f"{module}.rollout", watched)
        call()
    return paths[1]


def test_the_path_of_a_forecast_is_short(pretrained, monkeypatch):
    """It may only fall. The second call counts: what is computed once has been computed."""
    burgers(pretrained, 1)
    found = path_of(lambda: burgers(pretrained, 1))
    assert all(one <= most for one, most in zip(found, MOST_OF_FORECAST, strict=True)), found
    found = path_of_second_frame(monkeypatch, "ups.models.operator", lambda: burgers(pretrained, 2))
    assert all(one <= most for one, most in zip(found, MOST_OF_ITS_FRAME, strict=True)), found


@pytest.mark.parametrize("task", ["burgers1d", "darcy2d", "ns_incom2d"])
def test_a_graph_computes_the_same_bits_as_the_steps(pretrained, monkeypatch, task):
    num_frames, known = 1 if pretrained.tasks[task]["inputs"] else 3, pretrained.tasks[task]
    given = {name: high for name, (_, high) in known["parameters"].items()}, num_frames
    starts = [field(pretrained, task, 1, known["history"], seed=seed) for seed in range(3)]
    right = [pretrained.forecast(task, u0, *given, extrapolate=True) for u0 in starts]
    monkeypatch.setattr("ups.models.rollout.NUM_FIRST_CALLS", 2)
    model = copy.deepcopy(pretrained)
    found = [model.forecast(task, u0, *given, extrapolate=True) for u0 in (*starts, starts[0])]
    assert all(map(np.array_equal, found, (*right, right[0])))
    [graph] = model.operator.traces.graphs.values()
    assert graph is not None and not np.array_equal(right[0], right[1])
    assert not pickle.loads(pickle.dumps(model)).operator.traces.graphs
    if task != "burgers1d":  # what follows is the same for all
        return
    path = path_of(lambda: model.forecast(task, starts[0], given[0], 1, extrapolate=True))
    assert all(one <= most for one, most in zip(path, MOST_OF_GRAPH, strict=True)), path
    with torch.no_grad():  # a graph of other weights does not serve
        model.operator.task_embedding.mul_(1.01)
        model.operator.head(task).scale.mul_(1.01)
    changed = model.forecast(task, starts[0], *given, extrapolate=True)
    monkeypatch.undo()
    assert np.array_equal(changed, copy.deepcopy(model).forecast(task, starts[0], *given, extrapolate=True))
    model.operator.train().traces.graphs = dict.fromkeys(model.operator.traces.graphs, pytest.fail)
    model.forecast(task, starts[0], *given, extrapolate=True)  # without a graph, as its tensors may change


def test_a_step_that_branches_on_numbers_has_no_graph():
    model, u = torch.nn.Linear(2, 2), torch.ones(2)

    def step(model, u):
        return model(u) if u.sum() > 0 else -u

    assert traced(step, model, {}, (u,), step(model, u).detach()) is None


def test_the_path_of_a_sampled_frame_is_short(model, monkeypatch):
    """They may only fall. What is the same for all frames of a sample runs before the first one."""
    u0 = field(model, "burgers1d_hidden", 1)

    def draw(num_frames: int) -> None:
        model.sample("burgers1d_hidden", u0, num_frames=num_frames, members=2, by="student")

    draw(1)
    found = path_of(lambda: draw(1))
    assert all(one <= most for one, most in zip(found, MOST_OF_SAMPLE, strict=True)), found
    found = path_of_second_frame(monkeypatch, "ups.generative.sampling", lambda: draw(2))
    assert all(one <= most for one, most in zip(found, MOST_OF_FRAME, strict=True)), found


def one_call(model: Forecaster) -> torch.Tensor:
    codec = model.operator.head("burgers1d").codec
    z = torch.linspace(-1, 1, 64 * codec.dim, dtype=torch.float32, device="cpu").view(1, 1, 64, codec.dim)
    return model.operator(z, "burgers1d", torch.tensor([[0.01]], dtype=torch.float64, device="cpu")).detach()


def torch_state() -> tuple:
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    return (
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_deterministic_debug_mode()),
        [one.fp32_precision for one in products],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


@contextlib.contextmanager
def changed(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


STATES = {
    "none": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "float64": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device": lambda: changed(torch.set_default_device, "meta", None),
    "a device that is not there": lambda: changed(torch.set_default_device, "cuda", None),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no gradient": torch.no_grad,
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: changed(torch.set_float32_matmul_precision, "medium", "highest"),
}


@pytest.mark.parametrize("name", STATES)
def test_no_state_of_the_caller_s_torch_changes_a_call_or_is_changed_by_it(pretrained, name):
    right, once = burgers(pretrained), one_call(pretrained)
    with STATES[name]():
        before = torch_state()
        again = ups.load(ROOT / "pretrained")
        found, loaded, call = burgers(pretrained), burgers(again), one_call(pretrained)
        after = torch_state()
    assert before == after
    np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(loaded, right)
    assert torch.equal(call, once)
    weight = next(again.operator.parameters())
    assert weight.dtype == torch.float32 and weight.requires_grad and not weight.is_inference()


def test_samples_and_priors_neither_depend_on_the_caller_s_state_nor_change_it(folder):
    def calls() -> list[np.ndarray]:
        model = ups.load(folder / "tiny")
        u0, a = field(model, "burgers1d_hidden"), np.exp(field(model, "darcy2d_grf"))
        return [
            model.sample("burgers1d_hidden", u0, num_frames=2, members=2, by="teacher"),
            model.prior("darcy2d_grf", a, np.arange(32) < 16 * np.ones((32, 1)), members=2, extrapolate=True),
        ]

    right, before = calls(), torch_state()
    with (
        torch.autocast("cpu", torch.bfloat16),
        changed(torch.set_default_dtype, torch.float64, torch.float32),
    ):
        found = calls()
    assert torch_state() == before
    for one, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(one, other)


def test_two_threads_forecast_at_once_what_each_forecasts_alone(pretrained):
    right = burgers(pretrained, 20)
    with changed(torch.set_default_dtype, torch.float64, torch.float32), ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(burgers, pretrained, num) for num in (20, 5, 20, 10)]
        for call in calls:
            np.testing.assert_array_equal(call.result(), right[: len(call.result())])
        assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_forecasts_and_samples_the_same(pretrained, model, copied):
    again = copied(pretrained)
    assert again.tasks == pretrained.tasks
    np.testing.assert_array_equal(burgers(again), burgers(pretrained))
    u0 = field(model, "burgers1d_hidden")
    right = model.sample("burgers1d_hidden", u0, members=2)
    np.testing.assert_array_equal(copied(model).sample("burgers1d_hidden", u0, members=2), right)


FORKED = """
import os, signal, sys
import numpy as np
import torch, ups
model = ups.load("pretrained")
u0 = 0.5 + 0.1 * np.random.default_rng(0).random((5, 64, 64))
call = lambda: model.forecast("ns_incom2d", u0, num_frames=1, extrapolate=True)
right = call()
assert torch.get_num_threads() == 2
if (child := os.fork()) == 0:
    signal.alarm(30)
    u = call()
    torch.from_numpy(np.tile(u, (50, 1, 1, 1))).sin().mean()  # of many numbers, with all threads
    os._exit(0 if np.allclose(u, right, rtol=0, atol=1e-5) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_forked_after_a_forecast_with_two_threads_forecasts_too():
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], cwd=ROOT, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0


# ---------------------------------------------------------------- arguments


def with_gradient(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, requires_grad=True)


GRADIENT = "a tensor that requires a gradient; expected one without, as a forecast is no tensor if its start"
NUMBERS, HIDDEN = "expected one array of real numbers", np.ma.masked_array([0.1], [True])
BIG = "the forecast takes .* bytes and memory has room for .*; expected less. Reduce num_frames, members"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"u0": [[with_gradient(0.0)] * 256]}, f"burgers1d was given {GRADIENT}"),
        ({"parameters": {"Nu": with_gradient(0.01)}}, f"burgers1d was given {GRADIENT}"),
        (
            {"u0": torch.zeros(1, 256), "parameters": [with_gradient(0.01)]},
            r"burgers1d's parameters was given .* as a list of tensors loses it \(torch.stack keeps it\)",
        ),
        ({"parameters": {"Nu": None}}, "burgers1d's parameter Nu was given None; expected"),
        ({"parameters": {"Nu": "0.01"}}, "burgers1d's parameter Nu was given '0.01'; expected"),
        ({"parameters": [None]}, "burgers1d's parameters was given an array of object; expected"),
        (
            {"parameters": {"Nu": [0.01, 0.02]}},
            r"values of Nu of shape \(2,\); expected a number, or one for",
        ),
        ({"parameters": {"Nu": HIDDEN}}, "burgers1d was given Nu = nan; expected 0.01 to 0.1"),
        ({"u0": np.full((1, 256), None)}, f"burgers1d was given an array of object; {NUMBERS}. Convert it"),
        ({"u0": [[0.0] * 256, [0.0] * 255]}, f"burgers1d was given lists of unequal lengths; {NUMBERS}"),
        ({"u0": torch.zeros(1, 256).to_sparse()}, f"given torch.sparse_coo; {NUMBERS}"),
        ({"u0": np.full((1, 256), "1")}, f"burgers1d was given an array of <U1; {NUMBERS}"),
        ({"dt": "0.05"}, "burgers1d was given the time step '0.05'; expected 0.05"),
        ({"dt": np.timedelta64(1, "s")}, "burgers1d was given the time step .*; expected 0.05"),
        ({"num_frames": "2"}, "burgers1d was given '2' frames to forecast; expected a whole number"),
        ({"num_frames": True}, "burgers1d was given True frames to forecast; expected a whole number"),
        ({"num_frames": 10**9}, BIG),
        ({"num_frames": 10**400}, BIG),
    ],
)
def test_arguments_of_other_kinds_are_refused_in_one_line(pretrained, change, text):
    with pytest.raises(ValueError, match=text) as caught:
        burgers(pretrained, **change)
    assert "\n" not in str(caught.value)


def test_a_forecast_keeps_the_gradient_of_its_tensors_and_its_bits_in_any_state_of_torch(pretrained):
    u0, nu = torch.linspace(-1, 1, 256)[None].requires_grad_(), with_gradient(0.02)
    u_pred = burgers(pretrained, 9, u0=u0, parameters={"Nu": nu})
    with torch.no_grad():
        plain = burgers(pretrained, 9, u0=u0, parameters={"Nu": nu})
    assert torch.equal(u_pred, plain) and not plain.requires_grad
    loss, given = u_pred.square().sum(), (u0, nu)
    right = torch.autograd.grad(loss, given, retain_graph=True)
    with changed(torch.set_default_dtype, torch.float64, torch.float32):  # the steps are computed again here
        assert all(map(torch.equal, torch.autograd.grad(loss, given), right))
    head = pretrained.operator.head("burgers1d")
    highest = float(head.codec.denormalise(head.high.view(1, 1))) * torch.ones(1, 256)
    with pytest.warns(UserWarning, match="in frame 1, where it is cut, .* on and its gradient there is 0"):
        burgers(pretrained, u0=highest.requires_grad_())


def test_products_with_the_derivative_and_its_transpose_agree_in_numpy(pretrained):
    u0, du = np.sin(2 * np.pi * np.arange(512) / 256).reshape(2, 1, 256), np.ones((2, 1, 256))
    given = {"task": "burgers1d", "u0": u0, "parameters": {"Nu": np.array([0.02, 0.05])}, "num_frames": 4}
    xarray = pytest.importorskip("xarray", reason="xarray is not installed (requirements-dev.txt)")
    u_pred, pull = pretrained.vjp(**given)
    found = pull(u_pred)
    same, du_pred = pretrained.jvp(**given, along={"u0": du, "Nu": np.array([1.0, -1.0])})
    np.testing.assert_array_equal(u_pred, pretrained.forecast(**given))
    np.testing.assert_allclose(same, u_pred, atol=1e-6)
    assert found["u0"].shape == u0.shape and found["u0"].dtype == u0.dtype
    expected = (found["u0"] * du).sum() + found["Nu"] @ [1.0, -1.0]
    assert (du_pred * u_pred).sum() == pytest.approx(expected, rel=1e-4)
    number = given | {"parameters": {"Nu": 0.02}}
    change = pretrained.jvp(**number, along={"Nu": 1.0})[1]
    assert (change * u_pred).sum() == pytest.approx(pretrained.vjp(**number)[1](u_pred)["Nu"], rel=1e-4)
    for along, which in (({"nu": 1.0}, "'nu'"), ({}, "nothing"), (du, "nothing")):
        with pytest.raises(ValueError, match=f"no derivative by {which}; expected u0, Nu"):
            pretrained.jvp(**given, along=along)
    with pytest.raises(ValueError, match=r"a change of u0 of shape \(3,\); expected one that broadcasts to"):
        pretrained.jvp(**given, along={"u0": du[0, 0, :3]})
    with pytest.raises(ValueError, match=r"given v of shape \(3,\); expected one that broadcasts to"):
        pull(du[0, 0, :3])
    with pytest.raises(ValueError, match="no derivative by labelled values"):
        pretrained.vjp("burgers1d", xarray.DataArray(u0))


def test_a_sample_keeps_the_gradient_at_fixed_noise_and_a_prior_refuses_it(model):
    u0 = torch.from_numpy(field(model, "burgers1d_hidden", 2))  # with an earlier frame
    u, ends = model.sample("burgers1d_hidden", u0.requires_grad_(), num_frames=9, members=2), []
    head = model.operator.head("burgers1d_hidden")
    sampler = model._sampler("burgers1d_hidden", None, 2, False)
    change = 0.02 * torch.from_numpy(field(model, "burgers1d_hidden", 2, seed=1))
    names = name_starts([0], u0[None, 1])
    for sign in (1, -1):
        z = head.codec.encode(head.codec.normalise(u0.detach()[None] + sign * change))
        starts = sampling.Starts(z, torch.zeros(1, 0), names)
        ends.append(head.physical(sampling.sample_states(model.operator, sampler, head.name, starts, 9, 2)))
    (slope,) = torch.autograd.grad(u.square().sum(), u0)
    expected = (ends[0] - ends[1]).mul(u.detach()).sum()
    assert (slope * change).sum() == pytest.approx(float(expected), rel=0.02)
    with pytest.raises(ValueError, match="darcy2d_grf was given .* as the solutions of a prior have none"):
        model.prior("darcy2d_grf", with_gradient(np.ones((1, 32, 32))), np.ones((32, 32)), members=2)


@pytest.mark.parametrize("seed", [1.5, None, True, -1, "1", np.nan])
def test_a_seed_is_a_whole_number(model, seed):
    with pytest.raises(ValueError, match="was given the seed .*; expected a whole number, at least 0"):
        model.sample("burgers1d_hidden", field(model, "burgers1d_hidden"), members=2, seed=seed)
    with pytest.raises(ValueError, match="was given the seed .*; expected a whole number, at least 0"):
        model.prior("darcy2d_grf", np.ones((1, 32, 32)), np.ones((32, 32)), members=2, seed=seed)


def test_ensembles_that_no_memory_holds_are_refused(model):
    u0 = field(model, "burgers1d_hidden")
    with pytest.raises(ValueError, match=BIG):
        model.sample("burgers1d_hidden", u0, members=10**9)
    with pytest.raises(ValueError, match=BIG):
        model.prior("darcy2d_grf", np.ones((1, 32, 32)), np.ones((32, 32)), members=10**9)
    right = model.sample("burgers1d_hidden", u0, members=2, seed=10**30)
    found = model.sample("burgers1d_hidden", u0, members=np.int8(2), num_frames=np.int8(1), seed=10**30)
    np.testing.assert_array_equal(found, right)


def test_coefficients_outside_the_range_of_training_are_refused(model, pretrained):
    a = np.exp(field(model, "darcy2d_grf"))
    text = "was given a from .* to .*; expected .* to .*: the range of"
    mask = np.arange(32) < 16 * np.ones((32, 1))
    assert set(model.operator.head("darcy2d_grf").facts.input_range) == {"a"}
    for call in (model.forecast, lambda *given, **more: model.prior(*given, mask, members=2, **more)):
        assert np.isfinite(call("darcy2d_grf", a)).all()
        with pytest.raises(ValueError, match=f"darcy2d_grf {text}"):
            call("darcy2d_grf", 1e8 * a)
        call("darcy2d_grf", 1e8 * a, extrapolate=True)
    np.testing.assert_array_equal(  # what is not observed is not checked
        model.prior("darcy2d_grf", np.where(mask, a, 1e8), mask, members=2),
        model.prior("darcy2d_grf", a, mask, members=2),
    )
    for a in (np.full((1, 64, 64), 1e8), np.full((1, 64, 64), -1.0)):
        with pytest.raises(ValueError, match=f"darcy2d {text}"):
            pretrained.forecast("darcy2d", a)


def test_the_weights_of_the_repository_warn_beyond_the_frames_of_their_card(pretrained):
    card = (ROOT / "pretrained" / "operator" / "README.md").read_text(encoding="utf-8")
    frames = {name: int(num) for name, num in re.findall(r"^\| (\w+) \| (\d+) \| \d+ \| ", card, re.M)}
    stored = {name: head.facts.horizon for name, head in pretrained.operator.heads.items()}
    assert frames == stored
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        burgers(pretrained, 31)
    with pytest.warns(UserWarning, match="32 frames is longer than the 31 frames on which the operator was"):
        burgers(pretrained, 32)


@pytest.mark.parametrize("by", ["student", "teacher", "waves"])
def test_samples_warn_beyond_the_frames_of_the_ensembles_that_were_validated(model, by):
    """The operator was evaluated on more."""
    task, u0 = "burgers1d_hidden", field(model, "burgers1d_hidden", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.sample(task, u0, num_frames=validation.LEADS, members=2, by=by)
        model.forecast(task, u0, num_frames=validation.LEADS + 1)
    assert not [one for one in caught if "is longer than" in str(one.message)]
    with pytest.warns(
        UserWarning, match="11 frames is longer than the 10 frames on which its ensembles were"
    ):
        model.sample(task, u0, num_frames=validation.LEADS + 1, members=2, by=by)


def test_units_that_the_weights_do_not_know_stay_those_of_the_input(model, pretrained):
    data = labelled(np.zeros(256), "x").assign_attrs(units="m/s")
    assert burgers(pretrained, u0=data).attrs["units"] == "m/s"
    assert burgers(pretrained, u0=data.to_dataset(name="u"))["u"].attrs["units"] == "m/s"
    assert "units" not in burgers(pretrained, u0=data.drop_attrs()).attrs
    solution = model.forecast("darcy2d_grf", labelled(np.ones((32, 32)), "x", "y").assign_attrs(units="m2"))
    assert "units" not in solution.attrs  # those of the coefficient are not those of the solution
    known = replace(model.operator.head("burgers1d").task, user_facts={"units": {"u": "m/s"}})
    for given in (labelled(np.zeros(64), "x"), labelled(np.zeros(64), "x").to_dataset(name="u")):
        (given["u"] if hasattr(given, "data_vars") else given).attrs["units"] = "km/h"
        with pytest.raises(ValueError, match="was given u in 'km/h'; expected 'm/s', as it was trained"):
            unlabel(given, known, ("u",), 0.0, ("time",))


# ---------------------------------------------------------------- predict.py


def arguments(folder: Path, output: Path, task: str = "burgers1d", more: str = "") -> list[str]:
    """Of predict.py, on the data of Burgers' equation."""
    data = folder / "data" / "burgers1d" / "1D_Burgers_Sols_Nu0.1.hdf5"
    return f"--run {folder}/tiny --task {task} --input {data} --output {output} {more}".split()


@pytest.mark.parametrize("task", ["burgers1d", "diff_react2d", "darcy2d_grf"])
def test_predict_writes_the_forecast_in_the_layout_it_reads(model, folder, tmp_path, task):
    [data] = (folder / "data" / task).glob("*Nu0.1*" if task == "burgers1d" else "*")
    shown, out = (["--context", "5"] if model.tasks[task]["dt"] else []), tmp_path / "out.h5"
    known, common = model.tasks[task], ["--run", str(folder / "tiny"), "--task", task, "--frames", "3"]
    assert predict.main([*common, "--input", str(data), "--output", str(out), "--rows", "1:4", *shown]) == 0
    source = predict.open_data(out, task)
    u, truth = source.read(0, 3), predict.open_data(data, task).read(1, 4)
    history, inputs = known["history"], len(known["inputs"])
    if inputs:
        right = np.concatenate([truth[:, :, :inputs], model.forecast(task, truth[:, :, :inputs], 1.0)], 2)
    else:
        context = truth[:, 5 - history : 5]
        values = {name: high for name, (_, high) in known["parameters"].items()}
        right = np.concatenate([context, model.forecast(task, context, values, 3)], 1)
        np.testing.assert_allclose(
            source.coordinates["t"], known["dt"] * np.arange(5 - history, 8), rtol=1e-5
        )
    np.testing.assert_array_equal(u, right)
    with h5py.File(out) as file:
        assert file.attrs["task"] == task
        assert file.attrs["first_row"] == 1
        assert "forecast of " in str(file.attrs["ups_settings"])
    # its own output
    assert predict.main([*common, "--input", str(out), "--output", str(tmp_path / "next.h5")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next.h5", "out.h5"]


def test_the_command_of_any_folder_writes_what_predict_writes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, run, _, task, _, data, *_ = given = arguments(folder, tmp_path / "a", "burgers1d_hidden", "--frames 2")
    common = [data, "--run", run, "--task", task, "--frames", "2", "--rows", ":2"]
    assert predict.main([*given, "--rows", ":2"]) == 0
    assert predict.main([*given, "--rows", ":2", "--members", "16", "--output", "b"]) == 0
    assert ups_command(["forecast", *common, "--output", "c"]) == 0
    assert ups_command(["sample", *common, "--output", "d"]) == 0
    for scripted, named, num in (("a", "c", 2), ("b", "d", 32)):
        u, right = (predict.open_data(tmp_path / name, task).read(0, num) for name in (named, scripted))
        np.testing.assert_array_equal(u, right)


@pytest.mark.parametrize(
    ("by", "way"),
    [("student", "student_1"), ("student_2", "student_2"), ("teacher", "corrector"), ("waves", "waves")],
)
# with a context of 10 frames, and of the history
@pytest.mark.parametrize("task", ["burgers1d_forced", "burgers1d_hidden"])
def test_interface_command_and_report_draw_the_same_members(model, folder, tmp_path, task, by, way):
    config = load_config(folder / "tiny.yaml")
    truth = open_truth(config, task)
    samplers = load_samplers(config.run_dir, ["diffusion", "consistency"], torch.device("cpu"))
    ensembles = Ensembles(TransientResiduals(model.operator, truth.cache), truth, samplers, seed=3)
    rows = truth.cache.split["test"]
    rows = rows[rows < truth.source.files[0].num_trajectories][:2]  # those of the first file
    report = rollouts(ensembles, way, rows, 3, 4).numpy()
    given = truth.frames(rows, 0, truth.context).numpy()
    members = model.sample(task, given, num_frames=3, members=4, by=by, seed=3, rows=rows.tolist())
    assert (report.std(1) > 0).all()
    np.testing.assert_allclose(members, report, rtol=0, atol=1e-6)  # bitwise where it was tried
    for row, right in zip(rows.tolist(), members, strict=True):
        out = tmp_path / f"{row}.h5"
        more = f"--input {truth.source.files[0].path} --frames 3 --members 4 --by {by} --seed 3"
        more += f" --rows {row}:{row + 1} --context {truth.context}"
        assert predict.main(arguments(folder, out, task, more)) == 0
        drawn = predict.open_data(out, task).read(0, 4)
        np.testing.assert_array_equal(drawn[:, -3:], right)


@pytest.mark.parametrize(("change", "text"), cases("face.predict"))
def test_predict_refuses_by_name_and_leaves_nothing(folder, tmp_path, change, text):
    given = arguments(folder, tmp_path / "out.h5")
    with pytest.raises(ValueError, match=text), warnings.catch_warnings():
        predict.main([*given, *[part.format(folder=folder) for part in change]])
    assert not list(tmp_path.iterdir())


def test_predict_says_in_one_line_what_is_wrong_and_what_it_would_do(folder, tmp_path, capsys):
    given = arguments(folder, tmp_path / "o.h5")
    assert predict.main([*given, "--dry-run"]) == 0
    assert "24 rows of burgers1d x 1 member(s) x 2 frames, not written" in capsys.readouterr().out
    wrong = python("predict.py", *given, "--input", f"{tmp_path}/no.h5")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("predict.py: no data file") and wrong.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the package


def test_pip_installs_ranges_that_hold_the_pinned_versions_and_every_folder_of_ups():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["requires-python"] == ">=3.11"
    assert dict(pinned("requirements.txt")).items() < dict(pinned("requirements-dev.txt")).items()
    ranges = sum(project["project"]["optional-dependencies"].values(), project["project"]["dependencies"])
    ranges = {found.name: found.specifier for found in map(Requirement, ranges)}
    versions = dict(pinned("requirements-dev.txt"))
    assert [name for name in ranges if name not in versions] == ["huggingface_hub"]  # accelerate brings it
    assert all(versions[name] in ranges[name] for name in ranges.keys() & versions.keys())
    assert dict(pinned("requirements.txt")).keys() | dict(pinned("requirements-data.txt")).keys() <= {*ranges}
    assert re.fullmatch(r"\d+\.\d+\.\d+", ups.__version__)
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")
    found = set(
        setuptools.find_packages(
            str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"]
        )
    )
    packages = [path for path in ROOT.glob("ups*") if path.suffix != ".egg-info"]  # pip writes that one
    files = [file for package in packages for file in package.rglob("*") if file.is_file()]
    assert found == {".".join(file.parent.relative_to(ROOT).parts) for file in files if file.suffix == ".py"}
    listed = {
        file
        for package, names in project["tool"]["setuptools"]["package-data"].items()
        for name in names
        for file in ROOT.joinpath(*package.split(".")).glob(name)
    }
    assert listed == {file for file in files if file.suffix not in (".py", ".pyc")}


def _predict(arguments: list[str]) -> None:
    sys.argv = ["predict.py", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    runpy.run_path(str(ROOT / "predict.py"), run_name="__main__")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_predict_and_leaves_nothing(folder, tmp_path, number):
    given = arguments(folder, tmp_path / "out" / "o.h5", more="--frames 20000")
    (tmp_path / "out").mkdir()
    [(process, _)] = started = loop_stage.start_ranks(tmp_path, _predict, lambda _rank: (given,))
    while process.is_alive() and not [*(tmp_path / "out").iterdir()]:  # until it writes
        time.sleep(0.05)
    os.kill(process.pid, number)
    codes, [text] = loop_stage.end_ranks(started)
    assert codes == [128 + number] and "Traceback" not in text and not [*(tmp_path / "out").iterdir()]
    assert number == signal.SIGTERM or text.endswith("predict.py: interrupted; run the same command again\n")


def test_of_two_writers_of_one_output_the_second_is_refused(folder, tmp_path, monkeypatch):
    out, write = tmp_path / "out.h5", predict.write_data

    def while_another_writes(path, *arguments, **options):
        write(path, *arguments, **options)
        out.write_text("another's")

    monkeypatch.setattr(predict, "write_data", while_another_writes)
    with pytest.raises(
        FileExistsError, match="out.h5 was made by another process meanwhile; expected a new file"
    ):
        predict.main(arguments(folder, out, more=f"--run {folder}/tiny/operator"))
    assert out.read_text() == "another's" and [*tmp_path.iterdir()] == [out]
