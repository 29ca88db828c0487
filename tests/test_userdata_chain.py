"""User data from a file to a report and a forecast; what a section states is kept."""

import html
import shutil
import sys

import commands
import h5py
import numpy as np
import pytest
import torch
import xarray
import yaml
from user_files import (
    DT,
    N,
    T,
    X,
    Y,
    doctor,
    forecast,
    operator_on,
    overlay,
    page_of,
    read,
    section,
    waves,
    well_file,
    write,
)

import prepare_data
from bench import leaderboard
from ups.commands import predict, stages
from ups.common.text import markdown
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.evaluation.forecast import assess_forecasts
from ups.evaluation.truth import open_truth
from ups.forecast_xarray import label, unlabel
from ups.forecaster import Forecaster
from ups.generative.residuals import StateConditions
from ups.generative.sampling import Starts, sample_rollout
from ups.models.base_selection import fit_base
from ups.models.head_setup import build_operator
from ups.models.windows import symmetry
from ups.tasks import described_task
from ups.userdata.describe import describe_file
from ups.userdata.open_files import open_input
from ups.userdata.writer import write_user_file


def burgers(folder):
    for nu in (0.1, 0.2):
        write(folder / f"nu{nu}.h5", v=(1 - nu) * waves((8, 12, 32)).transpose(1, 2, 0))
    return {
        "files": str(folder / "nu*.h5"),
        "layout": {"v": ["time", "x", "trajectory"]},
        "boundary": "periodic",
        "domain": [0, 1],
        "dt": 0.1,
        "parameters": {"nu": "nu{}.h5"},
        "symmetries": ["shift"],
    }


def well(folder):
    u, v = waves((12, 8, X, Y)), np.stack([waves((12, 8, X, Y), 1), waves((12, 8, X, Y), 2)], -1)
    well_file(folder / "well.h5", u, v)
    return {"files": str(folder / "well.h5"), "layout": "well"}


def test_axes_are_turned_to_rise_and_forecasts_turned_back(tmp_path):
    """y falls in one file; x is a column; a stride keeps the same cells."""
    u, x, t = waves((N, T, X, Y)), np.arange(X)[:, None] / X, DT * np.arange(T)
    y = np.linspace(1, 0, Y, endpoint=False)
    settings = {
        "layout": {"u": ["trajectory", "time", "x", "y"]},
        "domain": None,
        "dt": None,
        "boundary": {"x": "periodic", "y": "no_flux"},
    }
    write(tmp_path / "up.h5", u=u, x=x, y=y[::-1], t=t)
    write(tmp_path / "down.h5", u=u[..., ::-1], x=x, y=y, t=t)
    for stride in (2, 1):
        config, source, found = read(
            tmp_path, files=str(tmp_path / "down.h5"), space_stride=stride, **settings
        )
        assert np.array_equal(found[:, :, 0], u[..., ::stride, ::stride])
        both = read(tmp_path, files=str(tmp_path / "*.h5"), space_stride=stride, **settings)[2]
        assert np.array_equal(both, np.concatenate([found, found]))
    task = config.spec("ks")
    write_user_file(
        tmp_path / "w.hdf5",
        task,
        lambda indices: found[indices],
        N,
        (X, Y),
        chunk=4,
        times=t,
        parameters=source.parameters,
    )
    with xarray.open_dataset(tmp_path / "w.hdf5", engine="h5netcdf") as again:
        assert np.array_equal(again.u, u) and np.allclose(again.y, y[::-1]) and (again.time == t).all()
    assert task.user_facts["flipped"] == ["y"]
    assert np.array_equal(open_input(task, tmp_path / "w.hdf5", 0, []).read(0, N), found)
    field = xarray.DataArray(u[..., ::-1], coords={"y": y, "time": t}, dims=("run", "time", "x", "y"))
    values, batch = unlabel(field, task, ("u",), DT, ("time",))
    assert np.array_equal(values[:, :, 0], u)
    later = label(values[:, :, 0, None], field, task, batch, ("time",), DT)
    assert np.array_equal(later, field) and np.array_equal(later.y, y)


def test_units_of_the_files_go_with_the_weights_and_the_forecast(tmp_path):
    u, days = 273 + waves((N, T, Y, X)), 2.0 * np.arange(T)
    data = xarray.Dataset(
        {"T": (("run", "time", "lat", "lon"), u, {"units": "K"}), "n": ((), 1.0)},
        {
            "time": ("time", days, {"units": "days since 1990-01-01"}),
            "lat": ("lat", np.linspace(60, 40, Y), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(X) * 2.0),
        },
    )
    data.to_netcdf(tmp_path / "t.nc", engine="h5netcdf")
    settings = section(
        tmp_path,
        files=str(tmp_path / "t.nc"),
        layout={"T": ["trajectory", "time", "lat", "lon"]},
        domain=[],
        boundary="no_flux",
        dt=0.0,
    )
    config, _, _ = read(tmp_path, settings)
    assert config.task["ks"].units == {"T": "K", "time": "days", "lat": "degrees_north"}
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    assert cache.scene()["labels"] == ["lat (degrees_north)", "lon"]
    assert cache.scene()["time"] == "lead time (days)"
    fitted = fit_base(cache, 1, 1, 0, torch.device("cpu"))
    model = Forecaster(build_operator({"ks": fitted}, config.operator.model, "no"))
    frames = model.forecast("ks", data[["T"]].isel(run=0, time=[0]), num_frames=2)
    assert (
        frames["T"].attrs["units"]
        == model.forecast("ks", data["T"].isel(run=0, time=[0])).attrs["units"]
        == "K"
    )
    assert "T (K)" in repr(model) and "dt 2 days" in repr(model) and "T - " in cache.scene()["fields"][0]
    assert read(tmp_path, {**settings, "units": {"T": "degC"}})[0].task["ks"].units["T"] == "degC"
    for units, words in (({"q": "K"}, "'q'"), (["K"], "units is"), ({"T": 1}, "units.T is 1")):
        with pytest.raises(ValueError, match=words):
            read(tmp_path, {**settings, "units": units})


def test_a_user_task_is_saved_and_read_as_plain_values(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, Y)))
    settings = section(
        tmp_path,
        layout={"u": ["trajectory", "time", "x", "y"]},
        domain={"x": [0, 2], "y": [-1, 1]},
        boundary={"x": "periodic", "y": "no_flux"},
        conserved=["u"],
        symmetries=["mirror"],
    )
    config = load_config(overlay(tmp_path, settings))
    task = config.spec("ks")
    again = described_task(yaml.safe_load(yaml.safe_dump(task.description)))
    assert again == task and again.user_facts == task.user_facts and hash(again) == hash(task)
    assert (task.is_symmetric, task.is_shifted, task.spans) == (True, False, ((0, 2), (-1, 1)))
    assert config.task["ks"].patch == 2 and config.task["ks"].cells(2) == (X, Y) and config.context("ks") == 1


def test_show_config_prints_the_user_task_and_loads_again(tmp_path, capsys):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y), 1)] * 2, -1)
    well_file(tmp_path / "a.h5", u, v)
    path = overlay(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well", "bounded": True})
    assert prepare_data.main(["--config", str(path), "run.seed=5", "--show-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(text, encoding="utf-8")
    shown, config = (load_config(one, ["run.name=a"]) for one in (tmp_path / "printed.yaml", path))
    settings = shown.task["ks"]
    assert [*yaml.safe_load(text)["task"]] == ["ks"] and settings == config.task["ks"]
    assert shown.run.seed == 5 and (shown.data, shown.operator) == (config.data, config.operator)
    assert settings.bounded == ["u", "v_x", "v_y"]  # a constant field needs no bound


@pytest.mark.parametrize("extra", ["", "dates", "forcing"])
def test_longer_test_trajectories_are_scored_to_their_end(tmp_path, extra):
    for name, frames in (("train", T), ("val", T), ("test", T + 9)):
        path = tmp_path / "data" / name / "a.h5"
        path.parent.mkdir(parents=True)
        forcing = {"f": np.arange(8 * frames).reshape(8, frames) / 7} if extra == "forcing" else {}
        write(path, u=waves((8, frames, X), seed=len(name)), **forcing)
        if extra == "dates":
            with h5py.File(path, "a") as file:
                file["time"] = 0.5 * np.arange(frames)
                file["time"].attrs["units"] = f"days since {1980 + len(name)}-01-01"
    settings = section(tmp_path, files=str(tmp_path / "data" / "*" / "*.h5"))
    if extra == "forcing":
        settings |= {"layout": {**settings["layout"], "f": ["trajectory", "time"]}, "forcing": ["f"]}
    with pytest.raises(
        ValueError, match=f"holds {T} frames; expected {T + 9} .* Write task.ks.num_frames: {T} "
    ):
        read(tmp_path, settings)
    config, cache, operator = operator_on(tmp_path, {**settings, "num_frames": T}, network=False)
    truth = open_truth(config, "ks")
    entry, [sample, _] = assess_forecasts(operator, truth, config.evaluate, 0)
    assert (cache.num_frames, truth.num_frames) == (T, T + 8) and len(sample["u_ref"]) == T + 8
    assert entry.number("", "num_frames_beyond") == 9
    assert np.array_equal(truth.future(truth.rows[:1]).numpy()[0, :, 0], waves((8, T + 9, X), seed=4)[0, 1:])
    years, f = truth.years(truth.rows, T + 9), truth.forced(truth.rows[:1], operator.head("ks"))
    assert (
        (years is None)
        if extra != "dates"
        else torch.allclose(years[:, -1], torch.tensor(1984 + (T + 8) / 2 / 365.2425, dtype=torch.float64))
    )
    if extra == "forcing":  # rises to the end, and does not begin again
        assert f.shape[1] == T + 9 and float(f[0].diff(dim=0).min()) > 0


def test_a_constant_field_stays_constant_whatever_the_network_predicts(tmp_path):
    """The fake: a coefficient that is predicted like a state; and scores that count it as predicted."""
    u, v = waves((12, T, X, Y)), np.stack([waves((12, T, X, Y), 1), np.zeros((12, T, X, Y))], -1)
    well_file(tmp_path / "a.h5", u, v)
    config, cache, operator = operator_on(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well"})
    start, u_pred = forecast(operator, cache)
    assert cache.task.fields == ("u", "v_x", "v_y", "depth") and cache.task.moving == ("u", "v_x", "v_y")
    moved = (u_pred - start).abs().amax((0, 1, 3, 4))
    assert moved[0] > 0.01 and moved[3] < 1e-5, moved
    states = StateConditions(operator, "ks")
    rows, shape = torch.arange(3).repeat_interleave(2), (6, *cache.tokenizer.tokens, cache.tokenizer.dim)
    members = sample_rollout(
        states,
        lambda tokens, facts, noise, second: noise,
        Starts(cache.batch(rows, 0, 1), cache.parameters[rows]),
        4,
        lambda lead: (0.1 * torch.randn(shape), torch.zeros(shape)),
    )
    moved = (
        (operator.heads["ks"].physical(members.unflatten(0, (3, 2))) - start[:, None])
        .abs()
        .amax((0, 1, 2, 4, 5))
    )
    assert moved[0] > 0.01 and moved[3] < 1e-5, moved  # of sampled members, too
    entry, [sample, _] = assess_forecasts(operator, open_truth(config, "ks"), config.evaluate, 0)
    assert entry.facts["fields"] == sample["fields"] == ["u", "v_x", "v_y"]
    assert entry.facts["given"] == ["depth"] and sample["u_pred"].shape[1] == 3
    assert np.isfinite(entry.number("operator", "nrmse"))  # v_y is zero throughout: not scored


def test_bounded_fields_stay_in_the_range_of_their_start_and_others_need_not(tmp_path):
    write(tmp_path / "a.h5", u=waves((12, T, X)), w=waves((12, T, X), 1))
    axes = ["trajectory", "time", "x"]
    out = {}
    for bounded in ([], ["u"], True):
        _, cache, operator = operator_on(
            tmp_path, section(tmp_path, layout={"u": axes, "w": axes}, bounded=bounded)
        )
        start, u_pred = forecast(operator, cache)
        low, high = start.amin((1, 3)), start.amax((1, 3))
        out[str(bounded)] = torch.maximum(u_pred.amax((1, 3)) - high, low - u_pred.amin((1, 3))).amax(0)
    assert (out["[]"] > 1e-3).all() and (out["True"] < 1e-5).all()  # bounds of waves hold for all
    assert out["['u']"][0] < 1e-5 and out["['u']"][1] > 1e-3


def test_a_shift_along_one_axis_leaves_the_other_as_it_is(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, Y)))
    settings = section(
        tmp_path, layout={"u": ["trajectory", "time", "x", "y"]}, domain=[0, 1], symmetries=["shift_x"]
    )
    task = load_config(overlay(tmp_path, settings)).spec("ks")
    assert task.is_shifted and task.fixed_axes == ("y",)
    w = torch.randn(1, 1, 1, X, Y)
    moved = [symmetry(task, (X, Y), torch.Generator().manual_seed(i))(w, None) for i in range(8)]
    assert all(torch.allclose(one.sum(-2), w.sum(-2), atol=1e-5) for one in moved)  # along x alone
    assert any(not torch.equal(one, w) for one in moved)
    both = load_config(overlay(tmp_path, {**settings, "symmetries": ["shift"]})).spec("ks")
    assert both.fixed_axes == () and any(
        not torch.allclose(
            symmetry(both, (X, Y), torch.Generator().manual_seed(i))(w, None).sum(-2), w.sum(-2)
        )
        for i in range(8)
    )


def test_a_stage_without_tasks_has_nothing_to_do(tmp_path, monkeypatch, capsys):
    """So `make train` without STAGES goes on to the report; before, it ended at the first of them."""
    write(tmp_path / "a.h5", u=waves())
    path = overlay(tmp_path, section(tmp_path, reserve=0.5), run={"name": "mine", "root": str(tmp_path)})
    for stage, more in (
        ("diffusion", ["task.ks.reserve=0"]),
        ("consistency", ["task.ks.reserve=0"]),
        ("steady", []),
    ):
        monkeypatch.setattr(sys, "argv", ["ups.commands.stages", stage, "--config", str(path), *more])
        assert stages.main() == 0
        assert f"{stage}: nothing to do, no " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["ups.commands.stages", "diffusion", "--config", str(path)])
    with pytest.raises(FileNotFoundError, match="stage operator of run mine is missing"):
        stages.main()


@pytest.mark.parametrize("data", [burgers, well])
def test_from_a_file_to_a_report_and_a_forecast_in_small(tmp_path, monkeypatch, data):
    """Each is described, examined, encoded, forecast, reported and loaded."""
    settings = data(tmp_path)
    described = describe_file(sorted(map(str, tmp_path.glob("*.[hn]*")))[0])
    assert "include: configs/small.yaml" in described and "?" in described
    config, cache, operator = operator_on(tmp_path, settings, network=False)
    findings = doctor(config)
    assert not any(finding.severity == "error" for finding in findings), findings
    entry, samples = assess_forecasts(operator, open_truth(config, "ks"), config.evaluate, 0)
    text = page_of(tmp_path, entry, samples)
    assert ("y from 0 to 1 (no flux)" if data is well else "nu 0.1 to 0.2") in text and "others; " in text
    assert {*(tmp_path / "figures").glob("ks_median_error_*.png")}
    model, task = Forecaster(operator), cache.task
    facts = model.tasks["ks"]
    assert facts["given"] == list(task.still) and ("given " in repr(model)) == bool(task.still)
    u = model.forecast(
        "ks",
        np.zeros((len(task.fields), *facts["grid"]), np.float32),
        {name: low for name, (low, _) in facts["parameters"].items()},
        num_frames=2,
    )
    assert u.shape == (2, len(task.fields), *facts["grid"]) and np.isfinite(u).all()
    operator.record = {"model_sha256": "0"}
    monkeypatch.setattr(predict.ups, "load", lambda *_: model)
    source, out = tmp_path / "start.h5", tmp_path / "out" / "nu0.1.h5"
    shutil.copy(config.task["ks"].files.replace("*", "0.1"), source)
    out.parent.mkdir()
    words = f"--run none --task ks --input {source} --output {out} --context 1 --frames 2"
    parameters = ["--parameters", "nu=0.1"] if data is burgers else []  # no number in the file's name
    assert predict.main([*words.split(), *parameters]) == 0
    start = open_input(task, out, 0, []).read(0, 1)
    u = model.forecast("ks", start[:, 0], {"nu": 0.1} if parameters else {}, num_frames=2)
    np.testing.assert_allclose(start[:, 1:], u, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.slow
@pytest.mark.faults  # half a minute
def test_from_a_declaration_to_a_report_a_forecast_and_a_file(tmp_path):
    """The run alone is enough for a forecast of the file, and of that forecast. Units are any text."""
    settings, stated = well(tmp_path), {"v_x": "<b onload=alert(1)>", "v_y": "a|b", "time": "m/s"}
    with h5py.File(tmp_path / "well.h5", "r+") as file:
        file["t0_fields/u"].attrs["units"] = "\x1b[31mm/s"
    config = overlay(
        tmp_path,
        {**settings, "base": ["persistence", "propagator"], "units": stated},
        run={"name": "mine", "root": str(tmp_path / "runs")},
        operator={
            "model": {"width": 16, "depth": 1, "kernel_size": 3},
            "train": {"steps": 4, "validate_every": 4, "save_every": 4, "precision": "no"},
        },
        evaluate={"min_initial_conditions": 1},
    )

    def make(target, *more):
        given = f"CONFIG={config}", "RUN=mine", f"RUNS={tmp_path / 'runs'}", "TOPOLOGY=cpu"
        done = commands.make(target, *more, *given, timeout=300)
        return done.returncode, done.stdout + done.stderr

    status, output = make("doctor")
    assert ": OK" in output and (status == 0 or ": failed" in output), output
    _, output = make("train")  # gates may fail after four steps
    report = tmp_path / "runs/mine/report/report.html"
    assert report.is_file(), output
    page = report.read_text(encoding="utf-8")
    card = (tmp_path / "runs/mine/operator/README.md").read_text(encoding="utf-8")
    for unit in (r"\x1b[31mm/s", *stated.values()):
        assert html.escape(unit) in page and markdown(unit) in card
    assert "<b onload" not in page + card and "\x1b" not in page + card
    assert all(path.is_file() for path in (tmp_path / "runs/mine/report/figures").iterdir())
    assert "| mine |" in leaderboard.table(tmp_path / "runs")
    status, output = make("publish", f"TO={tmp_path / 'copy'}")
    assert (tmp_path / "copy/operator/README.md").is_file(), output
    config.unlink()
    for name, start in (("out.h5", "well.h5"), ("again.h5", "out.h5")):
        words = f"--run {tmp_path}/runs/mine --task ks --input {tmp_path / start} --output {tmp_path / name}"
        assert predict.main([*words.split(), "--frames", "2"]) == 0


def test_a_short_training_on_many_trajectories_in_2d_has_fine_sizes_unless_others_are_written(tmp_path):
    write(tmp_path / "a.h5", u=waves((24, T, 48, 48)), v=waves((24, T, X)))

    def sizes(*overrides, axes="xy", field="u", operator=None, **more):
        more = {"symmetries": ["shift"], **more}
        settings = section(tmp_path, layout={field: ["trajectory", "time", *axes]}, **more)
        config = load_config(overlay(tmp_path, settings, operator=operator or {}), overrides)
        model, train = config.operator.model, config.operator.train
        return config.task["ks"].patch, model.width, model.depth, model.kernel_size, train.batch_size

    fine, usual = (2, 48, 2, 3, 8), (4, 64, 3, 7, 16)
    assert sizes() == fine and sizes(patch=8) == (8, *fine[1:])
    assert sizes("operator.train.batch_size=6", "operator.model={width: 64}") == (2, 64, 2, 3, 6)
    assert sizes(operator={"model": {"depth": 5}}) == (2, 48, 5, 3, 8)
    assert sizes("operator.train.steps=3001") == sizes("task.ks.num_trajectories=23") == usual
    assert (
        sizes(space_stride=2)
        == sizes(symmetries=[])
        == sizes(reserve=0.5)
        == sizes(axes="x", field="v")
        == usual
    )
