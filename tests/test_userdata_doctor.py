"""The doctor compares the data of a user with what the section states."""

import re
from collections import Counter

import h5py
import numpy as np
import pytest
from user_files import DT, N, T, X, config_of, counted_requests, doctor, overlay, read, section, waves, write

import prepare_data
from ups.data.doctor import examine

GROWING = waves() * (1 + np.arange(T)[:, None]) + np.arange(T)[:, None]  # its mean moves, its range widens


def carried(speed=0.0, steepening=0.0, loss=0.0):
    """u_t = -(speed + steepening u) u_x - loss u from random waves, periodic."""
    rng, x = np.random.default_rng(0), 2 * np.pi * np.arange(64) / 64
    u = sum(rng.standard_normal((N, 1)) * np.sin(k * x + 6.28 * rng.random((N, 1))) for k in (1, 2))
    out = []
    for step in range(60):
        out += [u] if step % 12 == 0 else []
        u = u - 0.01 * (
            (speed + steepening * u) * np.gradient(np.pad(u, ((0, 0), (2, 2)), "wrap"), x[1], axis=1)[:, 2:-2]
            + loss * u
        )
    return np.stack(out, 1).astype(np.float32)


@pytest.mark.parametrize(
    ("cells", "waves_of", "message"),
    {
        "smooth": (64, 3.0, None),
        "at its limit": (64, 60.0, "waves of two to three cells along x hold"),
    }.values(),
)
def test_the_doctor_says_what_a_grid_loses(tmp_path, cells, waves_of, message):
    """A spectrum that it cuts off, which is no error."""
    t, x = np.arange(6.0)[:, None], 2 * np.pi * np.arange(cells) / cells
    u = np.stack([np.sin(x + i + t) + 0.1 * np.sin(waves_of // 2 * x + 2 * i - t) for i in range(20)])
    config, *_ = read(tmp_path, files=str(write(tmp_path / "a.h5", u=u)))
    findings = doctor(config, test_fraction=0.3)
    cautions = [f"{one.what} {one.do}" for one in findings if one.severity == "caution"]
    assert {one.severity for one in findings} <= {"caution", "info"} and bool(cautions) == bool(message)
    assert not message or re.search(message, " ".join(cautions))


@pytest.mark.parametrize(
    ("u", "severity", "what", "do"),
    [
        (
            waves() + np.linspace(0, 9, X, dtype=np.float32),
            "error",
            "the field jumps where its ends meet",
            "write task.ks.boundary: no_flux",
        ),
        (
            np.where(waves() == waves()[3, 2, 4], np.nan, waves()),
            "error",
            "hold NaN or Inf .first: trajectory 3, frame 2",
            "",
        ),
        (
            GROWING,
            "error",
            r"the mean of u moves by \d.* of its RMS, and is said to be conserved",
            "out of task.ks.conserved",
        ),
        (
            waves() + 1e-4 * np.arange(T)[:, None],
            "warning",
            "conserved: forecasts are held to it up to 1e-05 only",
            "out of task.ks.conserved",
        ),
        (waves(), "info", "it is conserved, and forecasts will keep it", "nothing"),
        (
            GROWING,
            "error",
            r"u is said to be bounded, and leaves the range of its start by \d.* of it",
            "out of task.ks.bounded",
        ),
        (waves(), "error", "u is said to be positive, and goes down to -", "leave u out of task.ks.positive"),
    ],
)
def test_the_doctor_finds_what_the_section_says_and_the_data_do_not(tmp_path, u, severity, what, do, capsys):
    write(tmp_path / "a.h5", u=u.astype(np.float32))
    settings = {
        word: ["u"]
        for word in ("conserved", "bounded", "positive")
        if f"out of task.ks.{word}" in do or (word == "conserved" and severity == "info")
    }
    config = config_of(tmp_path, patch=1, **settings)
    findings = doctor(config)
    assert any(
        finding.severity == severity and re.search(what, finding.what) and do in finding.do
        for finding in findings
    )
    is_right = (
        prepare_data.main(
            [
                "--config",
                str(tmp_path / "my_data.yaml"),
                "--doctor",
                "task.ks.patch=1",
                "evaluate.min_initial_conditions=1",
            ]
        )
        == 0
    )
    assert is_right == (severity == "info")
    assert (": failed" in capsys.readouterr().out) == (severity == "error")


@pytest.mark.parametrize(
    ("u", "vector", "word"),
    [
        (carried(speed=1.0), [], "its slope"),
        (carried(speed=1.0), ["u"], "its slope"),
        (carried(steepening=0.5), [], "itself times its slope"),
        (carried(steepening=0.5), ["u"], None),
        (carried(loss=1.0), [], None),
        (carried(loss=1.0), ["u"], None),
    ],
)
def test_a_mirror_that_no_solution_survives_is_found_in_the_data(tmp_path, u, vector, word):
    """A false symmetry costs most of the accuracy: Kuramoto-Sivashinsky 0.69 with the velocity as a scalar,
    0.09 as a vector."""
    write(tmp_path / "a.h5", u=u)
    config = config_of(tmp_path, symmetries=["mirror"], vector=vector)
    findings = doctor(config)
    found = [finding for finding in findings if "mirrored along x" in finding.what]
    assert [finding.severity for finding in found] == ["error"] * bool(word)
    assert not word or (f"goes with {word} (" in found[0].what and "task.ks.vector" in found[0].do)


def test_the_doctor_finds_a_file_on_another_domain_than_the_built_in_tasks(tmp_path):
    """Bases and solvers of burgers1d take the length of its domain, whatever the file's coordinates say."""
    path = tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5"
    for length, is_wrong in ((1.0, False), (2 * np.pi, True)):
        write(
            path,
            tensor=waves((20, 11, 64)),
            **{"x-coordinate": (np.arange(64) + 0.5) / 64 * length, "t-coordinate": np.linspace(0, 2, 11)},
        )
        [(_, findings)] = examine([("burgers1d", path)], val_fraction=0.1, test_fraction=0.1, is_user=True)
        found = [
            finding.what
            for finding in findings
            if finding.severity == "error" and "runs from" in finding.what
        ]
        assert bool(found) == is_wrong and all("burgers1d is on 0 to 1" in what for what in found)


@pytest.mark.parametrize(
    ("is_grouped", "per_run"), [(False, {"open": 3, "all": 30}), (True, {"open": 0, "listed": 0, "all": 5})]
)
def test_the_doctor_asks_little_of_each_of_many_files_or_groups(tmp_path, monkeypatch, is_grouped, per_run):
    """A file of groups was listed five times."""
    asked = counted_requests(monkeypatch)

    def requests(num):
        asked.clear()
        (folder := tmp_path / str(num)).mkdir()
        runs = [{"u": u, "x": 22 * np.arange(X) / X, "t": DT * np.arange(T)} for u in waves((num, T, X))]
        if is_grouped:
            named = {f"{i:03}__{name}": values for i, run in enumerate(runs) for name, values in run.items()}
            with h5py.File(write(folder / "all.h5", **named), "r+") as file:
                for group in file.values():
                    group.attrs["nu"] = 0.1
        else:
            for number, run in enumerate(runs):
                write(folder / f"{number:03}.h5", attr_nu=0.1, **run)
        star = "*/u" if is_grouped else "u"
        settings = {"layout": {star: ["time", "x"]}, "parameters": {"nu": "*@nu" if is_grouped else "nu"}}
        path = overlay(folder, section(folder, **settings))
        prepare_data.main(["--config", str(path), "--doctor"])
        return Counter(asked)

    _, few, many = requests(10), requests(20), requests(40)  # the first of a form have to ask
    found = {name: (many[name] - few[name]) / 20 for name in per_run}
    assert all(found[name] <= most for name, most in per_run.items()), found
