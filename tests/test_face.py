"""The public face: `ups.load` and what it gives, predict.py, and the package as pip installs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml

import predict
import prepare_cache
import prepare_data
import ups
from ups.forecaster import Forecaster
from ups.generative import judge
from ups.interpreter import pinned

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("burgers1d", "diff_react2d", "burgers1d_hidden", "darcy2d_grf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data and a run of every stage, trained for a few steps by the scripts themselves."""
    root = tmp_path_factory.mktemp("face")
    train = {"steps": 2, "validate_every": 2, "save_every": 2, "batch_size": 4, "validate_trajectories": 2}
    size = {"width": 16, "depth": 1, "modes": 4}
    settings = {
        "include": str(ROOT / "configs" / "smoke.yaml"), "run": {"name": "tiny", "root": str(root)},
        "data": {"tasks": list(TASKS), "root": str(root / "data")}, "cache": {"root": str(root / "cache")},
        "operator": {"base_steps": 5, "train": train, "model": size},
        "diffusion": {"scale_steps": 5, "train": train, "model": size, "min_residual_ratio": 1e-3, "max_whitened_std": 1e3},
        "consistency": {"train": train, "pool_batches": 4}, "steady": {"scale_steps": 5, "train": train, "model": size},
    }
    (root / "tiny.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = ["--config", str(root / "tiny.yaml")]
    assert prepare_data.main(config) == 0 and prepare_cache.main(config) == 0
    for stage in ("operator", "diffusion", "consistency", "steady"):
        done = subprocess.run([sys.executable, f"train_{stage}.py", *config], cwd=ROOT, capture_output=True, text=True,
                              timeout=120)
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def model(folder) -> Forecaster:
    return ups.load(folder / "tiny")


def field(model: Forecaster, task: str, *lead: int, seed: int = 0) -> np.ndarray:
    """A smooth positive field (*lead, C, *space)."""
    known, source = model.tasks[task], np.random.default_rng(seed)
    points = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in known["grid"]], indexing="ij")
    waves = sum(source.normal(size=(*lead, len(known["inputs"] or known["fields"]), *[1] * len(points)))
                * np.cos(2 * np.pi * k * sum(points)) / k for k in (1, 2))
    return (1 + 0.2 * waves).astype(np.float32)


# ---------------------------------------------------------------- what is known, and what is asked wrongly


def test_all_that_is_known_of_a_task_comes_from_the_weights(model, tmp_path, folder):
    shutil.copytree(folder / "tiny", tmp_path / "elsewhere")   # no data, no caches, no configuration of ours there
    again = ups.load(str(tmp_path / "elsewhere"))
    assert set(again.tasks) == set(TASKS) and again.tasks == model.tasks
    known = model.tasks["diff_react2d"]
    assert known["fields"] == ["u", "v"] and known["axes"] == ["y", "x"] and known["grid"] == [32, 32]
    assert known["domain"] == [-1.0, 1.0] and known["boundary"] == "no_flux" and known["history"] == 4
    assert model.tasks["burgers1d"]["parameters"] == {"Nu": (0.1, 0.1)}
    for text in ("burgers1d: u on 64 (periodic), dt 0.05, history 1, Nu 0.1 to 0.1",
                 "darcy2d_grf: a -> u on 32 x 32 (dirichlet)"):
        assert text in repr(model)
    alone = ups.load(folder / "tiny" / "operator")
    u0 = field(model, "burgers1d", 2)
    np.testing.assert_array_equal(alone.forecast("burgers1d", u0, 0.1, 3), model.forecast("burgers1d", u0, 0.1, 3))
    assert alone.sample("burgers1d_hidden", u0, members=2).shape == (2, 2, 1, 1, 64)   # of the run that it lies in


@pytest.mark.parametrize(("ask", "text"), [
    (lambda model: model.sample("darcy2d_grf", np.ones((1, 32, 32), "float32")),
     "darcy2d_grf was asked for samples; "
     r"expected prior\(task, a_observed, mask\), as it is steady"),
    (lambda model: model.prior("burgers1d", np.ones((1, 64), "float32"), np.ones(64)),
     "asked for samples by 'prior'; expected sample"),
    (lambda model: model.sample("burgers1d_hidden", np.ones((1, 64), "float32"), by="techer"), "by 'techer'; expected sample"),
    (lambda model: model.sample("burgers1d", np.ones((1, 64), "float32"), 0.1), "draws no samples of burgers1d; expected one of "
     "burgers1d_hidden, for which it has learnt the operator's errors. Set task.burgers1d.reserve"),
    (lambda model: model.sample("cfd1d", np.ones((1, 64), "float32")), "this operator does not know 'cfd1d'; expected one of"),
    (lambda model: model.sample("burgers1d_hidden", np.ones((1, 64), "float32"), members=0),
     "was asked for 0 members; expected at least 1"),
    (lambda model: model.prior("darcy2d_grf", np.ones((1, 32, 32), "float32"), np.ones((16, 16))), r"a mask of shape \(16, 16\); "
     r"expected \(\[batch,\] \*space\), as the field is \(32, 32\)"),
])
def test_what_cannot_be_drawn_is_refused_by_name(model, ask, text):
    with pytest.raises(ValueError, match=text):
        ask(model)


def test_missing_stages_and_folders_name_the_make_target(model, folder, tmp_path):
    shutil.copytree(folder / "tiny" / "operator", tmp_path / "run" / "operator")
    bare, u0 = ups.load(tmp_path / "run"), field(model, "burgers1d_hidden")
    assert bare.forecast("burgers1d_hidden", u0).shape == (1, 1, 64)
    for by, stage in (("student", "consistency"), ("teacher", "diffusion"), ("rival", "rival")):
        with pytest.raises(FileNotFoundError,
                           match=f"run/{stage}/config.json is missing; expected a finished .*Run make {stage}"):
            bare.sample("burgers1d_hidden", u0, by=by)
    with pytest.raises(FileNotFoundError, match="run/steady/config.json is missing; .*Run make steady"):
        bare.prior("darcy2d_grf", np.ones((1, 32, 32), "float32"), np.ones((32, 32)))
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere; expected a run.*Run make operator"):
        ups.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json is missing; expected a finished operator stage.*Run make operator"):
        ups.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="an operator alone has no errors to draw; expected a run's folder"):
        Forecaster(model.operator).sample("burgers1d_hidden", u0)


def test_what_serves_is_the_best_of_what_was_finished_within_the_evaluations_asked_for(tmp_path, model):
    def stage(name, *, is_done=True, **figures):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"sampler_steps": 16, judge.FOUND: {"forced": figures}}))
        if is_done:
            (folder / "model.safetensors").touch()

    assert judge.serving(tmp_path, "forced") == "student_1"   # nothing is known
    stage("diffusion", corrector=0.10)
    stage("consistency", student_1=0.13, student_2=None)       # two evaluations blew up
    assert judge.in_words(tmp_path, "forced").startswith("sample() draws by student_1, of what takes at most 2 evaluations")
    assert judge.judged(tmp_path, "forced") == {"corrector": (32, 0.10), "student_1": (1, 0.13)}
    assert judge.serving(tmp_path, "forced") == "student_1" and judge.serving(tmp_path, "forced", 32) == "corrector"
    assert judge.serving(tmp_path, "forced", 0) == "student_1"   # none takes so few: the cheapest
    stage("rival", is_done=False, rival=0.01)                  # a stage that is still training says nothing
    assert judge.serving(tmp_path, "forced") == "student_1"
    (tmp_path / "rival" / "model.safetensors").touch()
    assert judge.serving(tmp_path, "forced", 1) == "rival" and judge.serving(tmp_path, "other") == "student_1"
    for more, best in ((0.128, "student_1"), (0.1, "student_2")):   # a second evaluation must be worth more than chance is
        (tmp_path / "consistency" / "config.json").write_text(json.dumps({judge.FOUND: {"tied": {
            "student_1": 0.13, "student_2": more}}}))
        assert judge.serving(tmp_path, "tied") == best
    found = judge.judged(model.folder, "burgers1d_hidden")     # of the scripts themselves
    assert {*found} == {"corrector", "student_1", "student_2"} and all(crps > 0 for _, crps in found.values())
    u0, best = field(model, "burgers1d_hidden", 2), judge.serving(model.folder, "burgers1d_hidden", 100)
    np.testing.assert_array_equal(model.sample("burgers1d_hidden", u0, members=2, evaluations=100),
                                  model.sample("burgers1d_hidden", u0, members=2, by=best))


# ---------------------------------------------------------------- axes and kinds


def test_axes_that_are_left_out_are_left_out_of_the_answer(model):
    u0 = field(model, "burgers1d", 3, 1)
    right = model.forecast("burgers1d", u0, {"Nu": 0.1}, 4)
    assert right.shape == (3, 4, 1, 64)
    np.testing.assert_array_equal(model.forecast("burgers1d", u0[:, 0], {"Nu": [0.1, 0.1, 0.1]}, 4), right)   # no time
    np.testing.assert_allclose(model.forecast("burgers1d", u0[0, 0], 0.1, 4), right[0], atol=1e-6)            # nor batch
    frames = field(model, "diff_react2d", 2, 6)
    long = model.forecast("diff_react2d", frames, num_frames=3)
    np.testing.assert_array_equal(long, model.forecast("diff_react2d", frames[:, -4:], num_frames=3))   # the last ones count
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
    assert (members.std(1) > 0).all()                                    # no member is another
    again = model.sample("burgers1d_hidden", u0[1:], num_frames=2, members=5, by=by, rows=[1, 2])
    assert np.abs(again - members[1:]).max() < 0.1 * spread
    assert np.abs(model.sample("burgers1d_hidden", u0, num_frames=2, members=5, by=by, seed=1) - members).max() > spread
    one = model.sample("burgers1d_hidden", u0[0], num_frames=2, members=5, by=by)
    assert np.abs(one - members[0]).max() < 0.1 * spread


def test_a_prior_draws_positive_solutions_that_what_is_unseen_cannot_change(model):
    a, mask = np.exp(field(model, "darcy2d_grf", 2)), np.random.default_rng(1).random((32, 32)) < 0.1
    draws = model.prior("darcy2d_grf", a, mask, members=3)
    assert draws.shape == (2, 3, 1, 32, 32) and (draws > 0).all() and (draws.std(1) > 0).any()
    unknown = np.where(mask, a, np.nan).astype("float32")
    np.testing.assert_array_equal(model.prior("darcy2d_grf", unknown, mask, members=3), draws)
    one = model.prior("darcy2d_grf", torch.from_numpy(a[0]), torch.from_numpy(mask), members=3)
    assert isinstance(one, torch.Tensor)
    torch.testing.assert_close(one, torch.from_numpy(draws[0]), rtol=1e-4, atol=1e-6)
    assert np.abs(model.prior("darcy2d_grf", a, ~mask, members=3) - draws).max() > 1e-6


def test_named_fields_keep_their_names_and_coordinates(model):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed (requirements-dev.txt)")
    frames, x = field(model, "diff_react2d", 4), (np.arange(32) + 0.5) / 16 - 1
    dt = model.tasks["diff_react2d"]["dt"]
    data = xarray.Dataset({name: (("time", "y", "x"), frames[:, i]) for i, name in enumerate("uv")},
                          {"time": 7 + dt * np.arange(4), "x": x, "y": x}, attrs={"source": "mine"})
    found = model.forecast("diff_react2d", data, num_frames=2)
    assert found.attrs == {"source": "mine", "task": "diff_react2d"} and set(found) == {"u", "v"}
    np.testing.assert_allclose(found["time"], 7 + dt * np.arange(4, 6))
    np.testing.assert_array_equal(found["v"].transpose("time", "y", "x"),
                                  model.forecast("diff_react2d", frames, num_frames=2)[:, 1])
    turned = model.forecast("diff_react2d", data.transpose("x", "time", "y"), num_frames=2)
    xarray.testing.assert_equal(turned, found)                           # by name, not by place
    u0 = xarray.DataArray(field(model, "burgers1d_hidden", 2)[:, 0], dims=("run", "x"), coords={"run": ["a", "b"]})
    members = model.sample("burgers1d_hidden", u0, num_frames=3, members=2)
    assert members.dims == ("run", "member", "time", "x") and members["run"].values.tolist() == ["a", "b"] and members.name == "u"
    for wrong, text in ((data.rename(v="w"), "given variables u, w; expected u, v, as it was trained: v missing"),
                        (data.assign_coords(x=2 * x), "given the coordinate x with steps of 0.125 to 0.125; expected 0.0625"),
                        (data.assign_coords(time=np.arange(4.0)), "given the coordinate time with steps of 1 to 1; expected 0.2"),
                        (data.rename(x="lon"), "given dimensions .*; expected y, x")):
        with pytest.raises(ValueError, match=text):
            model.forecast("diff_react2d", wrong)


# ---------------------------------------------------------------- predict.py


@pytest.mark.parametrize("task", ["burgers1d", "diff_react2d", "darcy2d_grf"])
def test_predict_writes_the_forecast_in_the_layout_it_reads(model, folder, tmp_path, task):
    [data] = (folder / "data" / task).glob("*Nu0.1*" if task == "burgers1d" else "*")
    shown, out = (["--shown", "5"] if model.tasks[task]["dt"] else []), tmp_path / "out.h5"
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
        np.testing.assert_allclose(source.coordinates["t"], known["dt"] * np.arange(5 - history, 8), rtol=1e-5)
    np.testing.assert_array_equal(u, right)
    with h5py.File(out) as file:
        assert file.attrs["task"] == task and file.attrs["first_row"] == 1 and "forecast of " in str(file.attrs["ups_settings"])
    assert predict.main([*common, "--input", str(out), "--output", str(tmp_path / "next.h5")]) == 0   # its own output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["next.h5", "out.h5"]


def test_predict_draws_members_that_do_not_depend_on_how_the_rows_are_cut(folder, tmp_path, monkeypatch):
    data = folder / "data" / "burgers1d" / "1D_Burgers_Sols_Nu0.1.hdf5"
    common = ["--run", str(folder / "tiny"), "--task", "burgers1d_hidden", "--input", str(data), "--frames", "2", "--members",
              "3"]
    assert predict.main([*common, "--output", str(tmp_path / "a.h5"), "--rows", ":4"]) == 0
    monkeypatch.setattr(predict, "STATES", 3)
    assert predict.main([*common, "--output", str(tmp_path / "b.h5"), "--rows", "2:4"]) == 0
    a, b = (predict.open_data(tmp_path / name, "burgers1d_hidden").read(0, num) for name, num in (("a.h5", 12), ("b.h5", 6)))
    assert np.abs(b - a[6:]).max() < 0.1 * a[:3, 1:].std(0).mean()
    assert a.shape == (12, 3, 1, 64) and (a[:3, 1:].std(0) > 0).all() and (a[:3, 0] == a[0, 0]).all()


@pytest.mark.parametrize(("change", "text"), [
    (["--rows", "5:2"], "--rows is '5:2'; expected FIRST:LAST with 0 <= FIRST < LAST <= 24"),
    (["--rows", "all"], "--rows is 'all'; expected"),
    (["--shown", "99"], "--shown is 99 of the 16 frames .*; expected at least 1, the history of burgers1d"),
    (["--parameters", "Nu"], "--parameters is 'Nu'; expected NAME=VALUE, such as Nu=0.01"),
    (["--parameters", "Nu=0.7"], "burgers1d was given Nu = 0.7; expected 0.1 to 0.1"),
    (["--time-stride", "2"], "burgers1d was given the time step 0.[01].*; expected 0.05"),
    (["--space-stride", "2"], r"burgers1d was given a field on the grid \(32,\); expected \(64,\)"),
    (["--task", "burger1d"], "does not know 'burger1d'"),
    (["--output", "{folder}"], "--output is .*; expected a new file in a folder that is there"),
    (["--members", "2"], "draws no samples of burgers1d"),
])
def test_predict_refuses_by_name_and_leaves_nothing(folder, tmp_path, change, text):
    data = folder / "data" / "burgers1d" / "1D_Burgers_Sols_Nu0.1.hdf5"
    given = ["--run", str(folder / "tiny"), "--task", "burgers1d", "--input", str(data), "--output", str(tmp_path / "out.h5")]
    with pytest.raises(ValueError, match=text), warnings.catch_warnings():
        predict.main([*given, *[part.format(folder=folder) for part in change]])
    assert not list(tmp_path.iterdir())


def test_predict_says_in_one_line_what_is_wrong_and_what_it_would_do(folder, tmp_path):
    data = folder / "data" / "burgers1d" / "1D_Burgers_Sols_Nu0.1.hdf5"
    command = [sys.executable, "predict.py", "--run", str(folder / "tiny"), "--task", "burgers1d", "--output",
               str(tmp_path / "o.h5")]
    dry = subprocess.run([*command, "--input", str(data), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert dry.returncode == 0 and "24 rows of burgers1d x 1 member(s) x 2 frames, not written" in dry.stdout
    wrong = subprocess.run([*command, "--input", str(tmp_path / "no.h5")], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 1 and wrong.stderr.startswith("predict.py: no data file") and wrong.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the package


def test_what_pip_installs_is_what_requirements_say_and_every_folder_of_ups():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version", "dependencies"] and project["project"]["requires-python"] == ">=3.11"
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}
    assert dict(pinned("requirements.txt")).items() < dict(pinned("requirements-dev.txt")).items()
    assert re.fullmatch(r"\d+\.\d+\.\d+", ups.__version__)
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")
    found = set(setuptools.find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"]))
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ups").rglob("*.py")}
    assert found == folders
    listed = {f"{package}.{name}" for package, names in project["tool"]["setuptools"]["package-data"].items() for name in names}
    others = {".".join(path.relative_to(ROOT).parts) for path in (ROOT / "ups").rglob("*") if path.is_file()
              and path.suffix not in (".py", ".pyc")}
    assert listed == others
