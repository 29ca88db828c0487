"""prepare_data.py, the downloader (against a server on 127.0.0.1) and the data doctor."""

import hashlib
import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import yaml
from cases import cases
from local_server import PlannedHandler, serving

import prepare_data
from ups.common import files
from ups.common.files import partial_path
from ups.config.load import load_config
from ups.data import doctor, download
from ups.data.doctor import report
from ups.data.download import Patience, fetch, md5_of, published_file, published_files
from ups.data.generate import generation_settings, write_data
from ups.data.pdebench import open_data
from ups.tasks import TASKS, get_task
from ups.tasks.published import FURTHER, WITHDRAWN
from ups_solvers import SOLVERS, Solver, solver

ROOT = Path(__file__).resolve().parent.parent
CONTENT = np.random.default_rng(0).bytes(3 * 2**20 + 17)
MD5 = hashlib.md5(CONTENT).hexdigest()


# -------------------------------------------------------------------------------------------- published files


def test_every_task_names_its_published_files():
    published = {name: where for task in TASKS.values() for name, where in task.published.items()}
    known = set()
    for task in [task for task in TASKS.values() if task.published]:
        values = (
            task.settings["parameters"]
            if not task.parameters
            else [task.parameter_in(name) for name in task.published]
        )
        files = {published_file(task.name, value)[0] for value in values or [None]}
        assert files == set(task.published)  # the name made from the number is the published one
        known |= files
    assert set(WITHDRAWN) <= known
    assert not any(published[name][1].startswith(start) for name, start in WITHDRAWN.items())
    assert all(re.fullmatch("[0-9a-f]{8}", start) for start in WITHDRAWN.values())
    assert known == set(published) and {name for name, task in TASKS.items() if not task.published} == {
        *(
            "barkley2d barkley2d_shown burgers1d_forced darcy2d_grf ks1d_coarse reacdiff1d_as_published "
            "vorticity2d_forced"
        ).split()
    }
    assert (
        len({number for number, _ in published.values()})
        == len({md5 for _, md5 in published.values()})
        == len(published)
    )
    assert all(re.fullmatch("[0-9a-f]{32}", md5) for _, md5 in published.values())


def test_the_list_of_published_files_is_complete_and_names_none_twice():
    """PDEBench's table has 375 rows; 24 of its 274 files of incompressible flow repeat another byte for
    byte."""
    rows = published_files("*")
    families = {
        "1D_Advection": 8,
        "1D_Burgers": 12,
        "ReacDiff": 36,
        "1D_diff-sorp": 1,
        "1D_CFD": 5,
        "Sod": 7,
        "2D_Darcy": 5,
        "2D_diff-react": 1,
        "2D_rdb": 1,
        "2D_CFD": 8,
        "2D_shock": 1,
        "KH_": 7,
        "OTVortex": 1,
        "3D_CFD": 2,
        "BlastWave": 1,
        "Turb_M": 5,
        "ns_incom": 274 - 24,
    }
    assert {key: sum(name.startswith(key) for _, name, *_ in rows) for key in families} == families
    assert len(rows) == sum(families.values()) == 375 - 24
    for column in (1, 2, 3):
        assert len({row[column] for row in rows}) == len(rows)
    assert all(re.fullmatch("[0-9a-f]{32}", md5) and 133017 <= number <= 281365 for *_, number, md5 in rows)
    numbers = {int(re.search(r"512-(\d+)", name)[1]) for _, name, *_ in rows if name.startswith("ns_incom")}
    repeated = "132 136 137 21 225 214 218 222 253 255 256 254 257 258 265 266 267 268 270 53 57 63 68 72"
    assert numbers == set(range(275)) - {49} - {*map(int, repeated.split())}
    for task in TASKS.values():  # and what a setting names is not also fetched by name alone
        assert not set(task.published) & set(FURTHER.get(task.name, ()))


def test_a_published_file_that_no_setting_names_is_fetched_by_its_name(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setitem(FURTHER["cfd1d_shock"], "Sod3.hdf5", (1, MD5))
    config = ["--config", small(tmp_path, url=server.url[:-2])]
    assert prepare_data.main([*config, "--file", "Sod?.hdf5", "--dry-run"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 7
    assert listed[2].endswith(f"cfd1d_shock/Sod3.hdf5: {server.url}, MD5 {MD5}")
    assert server.ranges == []
    assert prepare_data.main([*config, "--file", "Sod3.hdf5"]) == 0
    assert (tmp_path / "data/cfd1d_shock/Sod3.hdf5").read_bytes() == CONTENT
    assert "MD5 OK" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match="no published file is called 'Sod8.hdf5'; expected a name of PDEBench's.*lists all"
    ):
        prepare_data.main([*config, "--file", "Sod8.hdf5"])


def test_a_parameter_that_is_not_published_lists_those_that_are():
    with pytest.raises(
        ValueError, match="advection1d has no published file .*beta0.3.*expected one of: .*beta0.1.*beta7.0"
    ):
        published_file("advection1d", 0.3)
    with pytest.raises(ValueError, match="diff_react2d got parameter 1.0; expected None"):
        get_task("diff_react2d").file_for(1.0)
    with pytest.raises(ValueError, match="darcy2d got parameter None; expected a value of beta"):
        get_task("darcy2d").file_for(None)


# --------------------------------------------------------------------------------------------------- download


class Handler(PlannedHandler):
    """Serves CONTENT."""

    def answer(self, plan):
        wanted = self.headers.get("Range")
        if plan in ("drip", "drip in the head"):
            self.drip(
                b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" if plan == "drip" else b"HTTP/1.1 200 O"
            )
            return
        if plan == "endless":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not self.server.is_over.is_set():
                self.wfile.write(bytes(2**20))
        ignores = plan in ("no range", "no range, cut")
        start = int(wanted[6:-1]) if wanted and not ignores else 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.end_headers()
            return
        body = CONTENT[start:]
        self.send_response(206 if wanted and not ignores else 200)
        if wanted and not ignores:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        grown = len(CONTENT) * len(self.server.ranges) * (plan == "longer, cut")
        self.send_header("Content-Length", str(len(body) + grown))
        self.end_headers()
        if grown:
            body = (bytes(2**20) + CONTENT)[: 2**20]
        cut = {"cut": 2**20, "nothing": 0, "no range, cut": 2**20 // (1 + len(self.server.ranges) % 2)}
        self.wfile.write(body[: cut.get(plan)])


@pytest.fixture
def server():
    with serving(Handler) as running:
        yield running


def get(server, path, md5=MD5, **patience):
    fetch(server.url, path, md5, patience=Patience(**{"pause_s": 0.001, "timeout_s": 5.0, **patience}))


def test_an_interrupted_transfer_continues_at_the_next_byte(server, tmp_path):
    server.plan = ["cut", 503, "cut"]
    get(server, tmp_path / "a.hdf5")
    assert server.ranges == [None, "bytes=1048576-", "bytes=1048576-", "bytes=2097152-"]
    assert (tmp_path / "a.hdf5").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(server, tmp_path):
    partial_path(tmp_path / "a.hdf5").write_bytes(b"x" * 1000)
    server.plan = ["no range"]
    get(server, tmp_path / "a.hdf5")
    assert (tmp_path / "a.hdf5").read_bytes() == CONTENT


def test_a_complete_partial_is_only_checked_and_one_too_long_is_dropped(server, tmp_path):
    partial_path(tmp_path / "a.hdf5").write_bytes(CONTENT)
    get(server, tmp_path / "a.hdf5")
    partial_path(tmp_path / "b.hdf5").write_bytes(CONTENT + b"x")
    get(server, tmp_path / "b.hdf5")
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes() == CONTENT


def test_wrong_md5_is_refused_and_the_download_removed(server, tmp_path):
    path = tmp_path / "a.hdf5"
    with pytest.raises(ValueError, match=f"has MD5 {MD5}; expected {'0' * 32}. The download was deleted"):
        get(server, path, md5="0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_present_file_with_another_md5_is_kept_and_named(server, tmp_path, monkeypatch):
    path = tmp_path / "1D_Advection_Sols_beta0.1.hdf5"
    path.write_bytes(CONTENT)
    with pytest.raises(
        ValueError, match="has MD5 .*If it is yours, set data.source=user; else delete it and run"
    ):
        get(server, path, md5="0" * 32)
    monkeypatch.setitem(WITHDRAWN, path.name, MD5[:8])
    with pytest.raises(
        ValueError, match=r"withdrawn first edition, which is wrong \(PDEBench issues 46 and 51\)"
    ):
        get(server, path, md5="0" * 32)
    assert path.read_bytes() == CONTENT and server.ranges == []
    get(server, path)  # a copied file with the right MD5 is accepted, and remembered
    assert download.is_verified(path, MD5) and not download.is_verified(path, "0" * 32)
    os.utime(path, ns=(2**62, 2**62))
    assert not download.is_verified(path, MD5)  # changed since


def test_a_server_that_ignores_ranges_and_cuts_is_given_up(server, tmp_path):
    """It brings a MiB and half a MiB in turn: counted by the size of a file that starts again, always
    something new."""
    server.plan = ["no range, cut"] * 30
    with pytest.raises(
        ConnectionError, match="no new data in 3 attempts .*closed at byte .*continues at byte 1048576"
    ):
        get(server, tmp_path / "a.hdf5", retries=2)
    assert len(server.ranges) <= 5
    server.plan = ["no range, cut"]
    get(server, tmp_path / "a.hdf5", retries=2)
    assert (tmp_path / "a.hdf5").read_bytes() == CONTENT


@pytest.mark.parametrize(("have", "plan", "error", "words", "requests", "bytes"), cases("data.servers"))
def test_a_server_that_never_gives_the_whole_file_is_given_up_by_its_fault(
    server, tmp_path, have, plan, error, words, requests, bytes
):
    """have: bytes of the file that are there; bytes: the most that stay."""
    left = partial_path(tmp_path / "a.hdf5")
    left.write_bytes(b"x" * have)
    server.plan = [*plan, *plan[-1:] * 30]
    with pytest.raises({"value": ValueError, "connection": ConnectionError}[error], match=words):
        get(server, tmp_path / "a.hdf5", retries=2, timeout_s=0.3)
    assert len(server.ranges) == requests and (left.stat().st_size if left.exists() else 0) <= bytes


def test_a_download_is_not_written_through_a_planted_name(server, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "a.hdf5"
    victim.write_text("somebody's data")
    partial_path(path).symlink_to(victim)
    with pytest.raises(OSError, match="a.hdf5.partial is a link or no plain file"):
        get(server, path)
    partial_path(path).unlink()
    path.with_name("a.hdf5.md5").symlink_to(victim)
    get(server, path)
    assert victim.read_text() == "somebody's data" and download.is_verified(path, MD5)


def test_a_disk_that_is_full_during_a_download_is_named_and_what_came_is_kept(server, tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, block):
            if self.file.tell() + len(block) > 2**20:
                raise OSError(28, "No space left on device")
            return self.file.write(block)

    transfer = download._transfer
    monkeypatch.setattr(
        download, "_transfer", lambda url, path, file, *rest: transfer(url, path, Full(file), *rest)
    )
    with pytest.raises(
        OSError, match="cannot write .*a.hdf5 .No space left.*and 3 MiB of room in it.*change data.root"
    ):
        get(server, tmp_path / "a.hdf5")
    kept = partial_path(tmp_path / "a.hdf5").stat().st_size
    monkeypatch.undo()
    get(server, tmp_path / "a.hdf5")
    assert 0 < kept <= 2**20 and server.ranges == [None, f"bytes={kept}-"]
    assert (tmp_path / "a.hdf5").read_bytes() == CONTENT


def test_no_server_is_a_connection_error(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/1"
    with pytest.raises(ConnectionError, match="no new data in 2 attempts .*refused.*Check the network"):
        fetch(url, tmp_path / "a.hdf5", MD5, patience=Patience(1, 0.001))
    with pytest.raises(ValueError, match="'ftp://x/1' is not a web address; .*Correct data.url"):
        fetch("ftp://x/1", tmp_path / "a.hdf5", MD5)


def test_a_download_larger_than_the_disk_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=2**10, f_frsize=2**10))
    with pytest.raises(
        OSError, match="cannot write .*a.hdf5 .No space left.*and 3 MiB of room in it.*change data.root"
    ):
        get(server, tmp_path / "a.hdf5")
    assert partial_path(tmp_path / "a.hdf5").stat().st_size == 0


# ----------------------------------------------------------------------------------------------------- doctor

NUM, SPLIT = 20, {"val_fraction": 0.1, "test_fraction": 0.1}


def moving(speed, num=NUM, resolution=32, frames=21, t_end=2.0, seed=0):
    """Smooth periodic waves that move at `speed`: (num, frames, 1, resolution)."""
    rng = np.random.default_rng(seed)
    amplitude, phase = rng.random((2, num, 1, 1, 3))
    x, t = (np.arange(resolution) + 0.5) / resolution, np.linspace(0, t_end, frames)
    angle = 2 * np.pi * (np.arange(1, 4) * (x[:, None] - speed * t[:, None, None]) + phase)
    return (amplitude * np.sin(angle)).sum(-1)[:, :, None].astype(np.float32)


def saved(folder, u, task="advection1d", parameter=0.4, name=None):
    spec = get_task(task)
    path = folder / (name or spec.file_for(parameter))
    made = generation_settings(
        task,
        "test",
        seed=0,
        num_trajectories=len(u),
        resolution=u.shape[-1],
        num_frames=u.shape[1],
        t_end=spec.t_end,
        parameter=parameter,
    )
    write_data(path, task, lambda indices, **_: u[indices], made, chunk=8)
    return path


def damaged(path, change, key="tensor"):
    with h5py.File(path, "r+") as file:
        u = file[key][()]
        change(u)
        file[key][...] = u
    return path


def examine(path, task, **options):
    """The findings of the doctor about one file."""
    return dict(doctor.examine([(task, path)], **options))[path]


def messages(findings, severity):
    return " | ".join(
        f"{finding.what} [{finding.where}] {finding.do}"
        for finding in findings
        if finding.severity == severity
    )


def test_sound_data_get_no_complaint(tmp_path):
    path = saved(tmp_path, moving(0.4))
    findings = examine(path, "advection1d", **SPLIT)
    assert messages(findings, "error") == messages(findings, "warning") == ""
    assert report(path, findings).startswith(f"{path}: OK")


def test_nan_is_located(tmp_path):
    def change(u):
        u[5, 3, 7] = np.nan
        u[9] = np.inf

    path = damaged(saved(tmp_path, moving(0.4)), change)
    findings = examine(path, "advection1d", **SPLIT)
    expected = (
        "2 trajectories hold NaN or Inf (first: trajectory 5, frame 3, u, cell (7,)) [trajectories 5, 9]"
    )
    assert expected in messages(findings, "error")
    assert report(path, findings).startswith(
        f"{path}: failed: do not train on it\n  error   2 trajectories hold NaN"
    )


def test_constant_trajectories_and_repeats_are_named(tmp_path):
    u = moving(0.4)
    u[6] = 0.5
    u[11] = u[10]
    findings = examine(saved(tmp_path, u), "advection1d", **SPLIT)
    assert "1 trajectories are constant in space and time [trajectories 6]" in messages(findings, "error")
    assert "1 trajectories repeat an earlier one exactly (first: [(11, 10)])" in messages(findings, "warning")
    assert "another split" not in messages(findings, "error")  # 10 and 11 are both training


def test_coefficients_of_one_value_are_equal_by_chance_and_others_are_repeats(tmp_path):
    rng = np.random.default_rng(0)
    u = np.where(rng.random((NUM, 1, 2, 8, 8)) < 0.5, 0.1, 1.0).astype(np.float32)
    u[:, :, 1] = rng.random((NUM, 1, 8, 8))
    # of both splits
    u[[0, 9, 19]] = np.stack([np.full((8, 8), 0.1), np.outer(np.arange(8), np.arange(8))])[None]
    path = saved(tmp_path, u, "darcy2d", 1.0)
    findings = examine(path, "darcy2d", **SPLIT)
    assert "another split" not in messages(findings, "error")
    assert "repeat" not in messages(findings, "warning")
    assert "3 coefficients have one value everywhere, alike by chance [trajectories 0, 9, 19]" in messages(
        findings, "info"
    )
    u[[0, 9, 19], :, 0, 0, 0] = 1.0  # a pattern is no chance
    findings = examine(saved(tmp_path / "again", u, "darcy2d", 1.0), "darcy2d", **SPLIT)
    assert "2 trajectories repeat an earlier one exactly" in messages(findings, "warning")


def test_leakage_is_an_initial_condition_in_two_splits(tmp_path):
    u = moving(0.4)
    u[12, 0] = u[0, 0]  # 0 is test, 12 is training
    path = saved(tmp_path, u)
    findings = examine(path, "advection1d", **SPLIT)
    assert f"1 trajectories start as one in another split does (first: 12 as 0 of {path.name})" in messages(
        findings, "error"
    )


def test_leakage_of_a_steady_task_is_found_by_the_coefficient(tmp_path):
    u = np.random.default_rng(0).random((NUM, 1, 2, 8, 8), np.float32)
    u[12, :, 0] = u[0, :, 0]
    u[13, :, 1] = u[1, :, 1]
    findings = examine(saved(tmp_path, u, "darcy2d", 1.0), "darcy2d", **SPLIT)
    assert "(first: 12 as 0 of " in messages(findings, "error") and "13" not in messages(findings, "error")


def test_initial_conditions_shared_by_files_are_safe_only_at_equal_indices(tmp_path):
    first, same = saved(tmp_path, moving(0.4)), saved(tmp_path, moving(1.0), parameter=1.0)
    found = dict(doctor.examine([("advection1d", first), ("advection1d", same)], **SPLIT))
    assert "another split" not in messages(found[same], "error")
    rolled = saved(tmp_path, moving(0.1)[::-1].copy(), parameter=0.1)
    found = dict(doctor.examine([("advection1d", first), ("advection1d", rolled)], **SPLIT))
    assert "8 trajectories start as one in another split does (first: 0 as 19 of " in messages(
        found[rolled], "error"
    )


def test_a_name_that_contradicts_the_attribute_is_an_error(tmp_path):
    path = saved(tmp_path, moving(0.4), name="1D_Advection_Sols_beta4.0.hdf5")
    assert "the file name says beta = 4.0, its attribute 0.4" in messages(
        examine(path, "advection1d", **SPLIT), "error"
    )


def test_md5_of_a_published_name_is_compared(tmp_path, monkeypatch):
    path = saved(tmp_path, moving(0.4))
    with h5py.File(path, "r+") as file:  # as if it were not ours
        del file.attrs["ups_settings"], file.attrs["ups_progress"]
    assert "is not the published" in messages(examine(path, "advection1d", **SPLIT), "warning")
    monkeypatch.setitem(WITHDRAWN, path.name, md5_of(path)[:8])
    assert "withdrawn first edition" in messages(examine(path, "advection1d", **SPLIT), "error")
    monkeypatch.setitem(TASKS["advection1d"].published, path.name, (1, md5_of(path)))
    assert "the MD5 is the published one" in messages(examine(path, "advection1d", **SPLIT), "info")
    monkeypatch.setattr("ups.data.doctor.MD5_BYTES", 0)
    assert "MD5 was not compared" in messages(examine(path, "advection1d", **SPLIT), "info")
    assert "the MD5 is the published one" in messages(
        examine(path, "advection1d", **SPLIT, hash_all=True), "info"
    )


def test_what_cannot_be_read_is_one_finding(tmp_path):
    path = tmp_path / "2D_diff-react_NA_NA.h5"
    assert "no data file" in messages(examine(path, "diff_react2d", **SPLIT), "error")
    path.write_bytes(b"nonsense")
    findings = examine(path, "diff_react2d", **SPLIT)
    assert [finding.severity for finding in findings] == ["error"]
    assert "un `make data`" in (text := report(path, findings)) and "To do:" not in text
    u = np.random.default_rng(0).random((4, 5, 2, 8, 8), np.float32)
    path.unlink()
    saved(tmp_path, u, "diff_react2d", None)
    with h5py.File(path, "r+") as file:
        del file["0002/data"]
    assert "some are missing" in messages(examine(path, "diff_react2d", **SPLIT), "info")


# ----------------------------------------------------------------------------------------------- prepare_data


def small(folder, **changes):
    """A configuration of two tiny tasks in a temporary folder."""
    tiny = {
        "num_trajectories": 8,
        "resolution": 16,
        "num_frames": 12,
        "space_stride": 1,
        "time_stride": 1,
        "patch": 4,
    }
    overlay = {
        "data": {
            "tasks": ["advection1d", "diff_react2d"],
            "root": str(folder / "data"),
            "chunk": 3,
            **changes,
        },
        "task": {"advection1d": {**tiny, "t_end": 1.1, "parameters": [0.4, 1.0]}, "diff_react2d": tiny},
        "evaluate": {"min_initial_conditions": 1},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(overlay), encoding="utf-8")
    return str(path)


@pytest.fixture
def fake_solvers(monkeypatch):
    import torch

    def advection(indices, *, seed, resolution, num_frames, parameter, t_end):
        return torch.from_numpy(moving(parameter, 8, resolution, num_frames, t_end, seed)[indices])

    def react(indices, *, seed, resolution, num_frames, parameter, t_end):
        x = np.linspace(0, 1, resolution)
        u = [
            np.random.default_rng([seed, i]).random((num_frames, 2, 1, 1)) + np.cos(x) * np.cos(x[:, None])
            for i in indices
        ]
        return np.stack(u).astype(np.float32)

    fakes = {id(SOLVERS["advection1d"]): advection, id(SOLVERS["diff_react2d"]): react}
    monkeypatch.setattr(Solver, "simulate", lambda self, *given, **more: fakes[id(self)](*given, **more))


def test_dry_run_lists_the_files_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(solver, "MEASURED_S", 0.01)
    config = small(tmp_path)
    assert prepare_data.main(["--config", config, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "advection1d: 2 file(s), about 0.0 MiB, 0% there" in out and "diff_react2d: 1 file(s)" in out
    assert re.search(
        r"3 files, about .* MiB to solve in about .*, estimated from a few trajectories of each file; ", out
    )
    assert sorted(os.listdir(tmp_path)) == ["tiny.yaml"]


@pytest.mark.parametrize(("enough", "frames"), [(0.5, [2, 1]), (1e9, [2, 4, 8, 12])])
def test_the_dry_run_solves_no_more_frames_than_it_takes_to_know_the_time(
    enough, frames, monkeypatch, tmp_path, capsys
):
    """A trajectory takes 1 s up to its first frame, and half a second for every other frame."""
    calls, now = [], [0.0]

    def simulate(indices, **arguments):
        calls.append(arguments)
        now[0] += 1.0 + 0.5 * (arguments["num_frames"] - 1)
        return np.zeros((1, 1))

    monkeypatch.setattr(solver, "TOGETHER", 1)
    monkeypatch.setattr(solver, "time", SimpleNamespace(process_time=lambda: now[0]))
    monkeypatch.setattr(solver, "MEASURED_S", enough)
    monkeypatch.setattr(Solver, "simulate", lambda _, *given, **more: simulate(*given, **more))
    overlay = small(tmp_path, tasks=["diff_react2d"])
    assert (
        prepare_data.main(["--config", overlay, "--dry-run", "--workers", "1", "task.diff_react2d.t_end=1.1"])
        == 0
    )
    assert [arguments["num_frames"] for arguments in calls] == frames
    assert "to solve in about 52 s" in capsys.readouterr().out  # 8 trajectories of 6.5 s
    assert [arguments["t_end"] for arguments in calls] == pytest.approx([0.1 * (num - 1) for num in frames])


@pytest.mark.parametrize(("each", "call"), [(1.0, 0.0), (0.5, 2.0)])
def test_the_dry_run_counts_what_trajectories_take_together(each, call, monkeypatch, tmp_path, capsys):
    """A frame takes `call` seconds however many are solved, and `each` for every trajectory."""
    now = [0.0]

    def simulate(indices, *, num_frames, **_):
        now[0] += (num_frames - 1) * (call + each * len(indices))
        return np.zeros((1, 1))

    monkeypatch.setattr(solver, "time", SimpleNamespace(process_time=lambda: now[0]))
    monkeypatch.setattr(Solver, "simulate", lambda _, *given, **more: simulate(*given, **more))
    arguments = ["task.diff_react2d.num_trajectories=4", "task.diff_react2d.num_frames=12"]
    assert (
        prepare_data.main(
            ["--config", small(tmp_path, tasks=["diff_react2d"]), "--dry-run", "--workers", "1", *arguments]
        )
        == 0
    )
    # 11 frames of 4 together take 4 s each, in every case
    assert "to solve in about 44 s" in capsys.readouterr().out


def test_prepare_data_generates_then_says_up_to_date_and_the_doctor_agrees(tmp_path, fake_solvers, capsys):
    config = small(tmp_path)
    assert prepare_data.main(["--config", config]) == 0
    assert capsys.readouterr().out.count(": generated") == 3
    assert prepare_data.main(["--config", config]) == 0
    assert capsys.readouterr().out.count(": up to date") == 3
    assert prepare_data.main(["--config", config, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("up to date") == 2
    assert prepare_data.main(["--config", config, "--doctor"]) == 0
    assert capsys.readouterr().out.count(": OK") == 3
    data = open_data(tmp_path / "data/advection1d/1D_Advection_Sols_beta1.0.hdf5", "advection1d")
    assert data.parameter == 1.0 and data.read(0, 8).shape == (8, 12, 1, 16)
    damaged(data.path, lambda u: u.__setitem__((2, 0, 0), np.nan))
    assert prepare_data.main(["--config", config, "--doctor"]) == 1
    with pytest.raises(ValueError, match="generated with other settings"):
        prepare_data.main(["--config", config, "data.seed=1"])


def test_published_source_downloads_by_id(tmp_path, server, monkeypatch, capsys):
    for name in ("1D_Advection_Sols_beta0.4.hdf5", "1D_Advection_Sols_beta1.0.hdf5"):
        monkeypatch.setitem(TASKS["advection1d"].published, name, (1, MD5))
    config = small(tmp_path, source="published", url=server.url[:-2], tasks=["advection1d"])
    assert prepare_data.main(["--config", config, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "advection1d: 2 file(s), about 15,703.1 MiB, 0% there, MD5 of 0 compared" in out
    assert "to download" in out
    assert server.ranges == []
    assert prepare_data.main(["--config", config]) == 0
    assert capsys.readouterr().out.count("MD5 OK") == 2
    path = tmp_path / "data/advection1d/1D_Advection_Sols_beta1.0.hdf5"
    assert path.read_bytes() == CONTENT and not partial_path(path).exists()
    assert subprocess.run(["md5sum", "-c", f"{path.name}.md5"], cwd=path.parent).returncode == 0
    assert prepare_data.main(["--config", config]) == 0
    assert server.ranges == [None, None]
    assert prepare_data.main(["--config", config, "--dry-run"]) == 0
    assert "up to date, MD5 of 2 compared" in capsys.readouterr().out


def test_shipped_configurations_name_their_files():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load_config(path)
        for task in config.data.tasks:
            for parameter in config.task[task].parameters or [None]:
                if config.data.source == "published":
                    assert published_file(task, parameter)[1] > 100000
                assert "{" not in get_task(task).file_for(parameter)
