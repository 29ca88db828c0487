"""What the split, training or the gates will refuse for want of trajectories or frames is said before
anything is trained."""

import h5py
import numpy as np
import pytest
import yaml
from user_files import overlay, section, waves

import prepare_cache
import prepare_data
from ups.commands.stage_setup import cache_counts, load_inputs, require_counts
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.data.counts import check_counts, count_data, most_calls
from ups.models.windows import Windows

CELLS = 16


def written(folder, u, **changes):
    """The configuration of a task `ks` with the fields u (trajectory, time, x)."""
    with h5py.File(folder / "ks.h5", "w") as file:
        file["u"] = u
    own = section(folder, **{"files": str(folder / "ks.h5"), **changes})
    return overlay(folder, own, run={"root": str(folder / "runs")})


def said_of(path, *overrides):
    config = load_config(path, list(overrides))
    found = check_counts(config, "ks", count_data(config, "ks"))
    return [(finding.severity, f"{finding.what}. {finding.do}") for finding in found]


def test_too_few_test_trajectories_for_the_gates_are_named_by_doctor_and_every_dry_run(tmp_path, capsys):
    path = written(tmp_path, waves((59, 5, CELLS)))
    least = r"on 5 test initial conditions and its gates refuse fewer than 6"
    for main, flag, status in (
        (prepare_data.main, "--doctor", 1),
        (prepare_data.main, "--dry-run", 0),
        (prepare_cache.main, "--dry-run", 0),
    ):  # 0: it trains, and the report is written
        assert main(["--config", str(path), flag]) == status, flag
        out = capsys.readouterr().out
        assert least in out
        assert "set data.test_fraction=0.11, or add trajectories: 60 at data.test_fraction 0.1" in out
    for change in ("data.test_fraction=0.11", "evaluate.min_initial_conditions=5"):
        assert prepare_data.main(["--config", str(path), "--doctor", change]) == 0
        assert prepare_cache.main(["--config", str(path), "--dry-run", change]) == 0
    assert prepare_data.main(["--config", str(written(tmp_path, waves((60, 5, CELLS)))), "--doctor"]) == 0


@pytest.mark.parametrize("num", [1, 2])
def test_one_or_two_trajectories_are_refused_by_the_doctor_as_by_the_cache(tmp_path, num, capsys):
    path = written(tmp_path, waves((num, 5, CELLS)))
    message = f"{num} trajectories (of different initial conditions) cannot be split"
    assert prepare_data.main(["--config", str(path), "--doctor"]) == 1
    out = capsys.readouterr().out
    assert "failed: do not train on it" in out and out.count(message) == 1
    assert prepare_cache.main(["--config", str(path), "--dry-run"]) == 1
    assert message in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot be split into training, validation and test"):
        build_cache(load_config(path, []), "ks", progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "task.ks.reserve=0.97",
            "task.ks.reserve 0.97 leaves the operator none of 10 training initial conditions; expected",
        ),
        (
            "task.ks.reserve=0.1",
            "task.ks.reserve 0.1 keeps 1 of 10 training initial conditions for the stages after the operator",
        ),
    ],
)
def test_a_reserve_that_leaves_too_few_is_named_by_doctor_and_dry_run(tmp_path, change, message, capsys):
    path = written(tmp_path, waves((12, 5, CELLS)))
    assert ("error", message) in [
        (severity, text[: len(message)]) for severity, text in said_of(path, change)
    ]
    for main, flag in ((prepare_data.main, "--doctor"), (prepare_cache.main, "--dry-run")):
        assert main(["--config", str(path), flag, change]) == 1
        assert message in capsys.readouterr().out


def test_a_prior_on_a_grid_of_no_blocks_is_refused_before_anything_is_trained(tmp_path):
    layout = dict.fromkeys(("a", "u"), ["trajectory", "x", "y"])
    changes = {"layout": layout, "inputs": ["a"], "dt": None, "boundary": "dirichlet"}
    path = written(tmp_path, np.ones((12, 8, 6), "float32"), **changes)
    for size, refused in ((12, False), (9, True), (6, True)):
        with h5py.File(tmp_path / "ks.h5", "w") as file:
            file["a"] = file["u"] = np.random.default_rng(0).random((12, 8, size))
        text = f"on a grid (8, {size}); expected multiples of 4 cells per axis. set task.ks.reserve"
        assert any(text in line for _, line in said_of(path, "task.ks.reserve=0.3")) == refused
        assert not any(text in line for _, line in said_of(path))


def test_a_parameter_value_without_training_trajectories_is_named(tmp_path):
    """Two values, of which one has a single trajectory, that of the test split."""
    u = waves((12, 5, CELLS))
    with h5py.File(tmp_path / "nu.h5", "w") as file:
        file["nu"] = np.ones(12)
    path = written(tmp_path, u)
    test = count_split(load_config(path, []))["test"]
    with h5py.File(tmp_path / "ks.h5", "a") as file:
        file["nu"] = np.where(np.isin(np.arange(12), test), 2.0, 1.0)
    said = yaml.safe_load(path.read_text())
    said["task"]["ks"]["parameters"] = {"nu": "nu"}
    path.write_text(yaml.safe_dump(said))
    assert any(
        "1 parameter value(s) of ks have no trajectory in training (first: number 1)" in text
        for _, text in said_of(path)
    )


def count_split(config):
    from ups.data.sources import open_source, split_of

    return split_of(config, "ks", open_source(config, "ks"))


def test_counts_before_the_cache_are_those_of_the_cache(tmp_path):
    """Trajectories of a sweep share initial conditions; part of the training trajectories is reserved."""
    path = written(tmp_path, np.concatenate([waves((30, 5, CELLS)), waves((30, 5, CELLS))]), reserve=0.35)
    config = load_config(path, [])
    before = count_data(config, "ks")
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    assert before == cache_counts(config, cache)
    assert before.initial == {"train": 16, "reserved": 8, "val": 3, "test": 3}
    assert len(cache.split["train"]) == 32 and len(cache.split["reserved"]) == 16
    assert before.gated == {"the operator": 3, "ensembles": 3}


def test_training_warns_of_gates_that_will_fail_and_refuses_what_it_cannot_train(
    tmp_path, capsys, monkeypatch
):
    path = written(tmp_path, waves((12, 5, CELLS)))
    config = load_config(path, [])
    build_cache(config, "ks", progress=False)
    require_counts(config, {"ks": open_cache(config, "ks")})
    assert (
        "WARNING ks: the report evaluates the operator on 1 test initial conditions"
        in capsys.readouterr().out
    )
    monkeypatch.setattr("sys.argv", ["train_operator.py", "--config", str(path)])
    assert [*load_inputs("", "operator")[1]] == ["ks"]
    with h5py.File(tmp_path / "ks.h5", "r+") as file:
        file["u"][0] += 1
    with pytest.raises(
        ValueError, match="data files changed since .*ks.h5 was built; .* Run `make cache`, then"
    ):
        load_inputs("", "operator")
    config = load_config(path, ["task.ks.reserve=0.97"])
    with pytest.raises(ValueError, match="leaves the operator none of 10 training initial conditions"):
        require_counts(config, {"ks": open_cache(config, "ks")})


@pytest.mark.parametrize(("frames", "history", "calls"), [(2, 1, 1), (3, 1, 2), (9, 1, 2), (3, 2, 1)])
def test_windows_hold_as_many_calls_as_the_frames_allow(tmp_path, frames, history, calls):
    config = load_config(
        written(tmp_path, waves((12, frames, CELLS)), history=history), ["operator.train.steps=10"]
    )
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    windows = Windows({"ks": cache}, config.task, config.operator, 0)
    assert windows.calls == {"ks": calls} and most_calls(config.task["ks"], frames) >= calls
    assert windows.schedule.windows["ks"] == (10, frames - history - calls + 1)
