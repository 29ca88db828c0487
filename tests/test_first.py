"""The first trajectories of a published file, fetched alone from a server on 127.0.0.1."""

import json
import re

import h5py
import numpy as np
import pytest
import yaml
from cases import cases
from local_server import PlannedHandler, serving

import prepare_data
from ups.common.files import partial_path
from ups.config.load import load_config
from ups.data import first
from ups.data.doctor import examine
from ups.data.download import Patience
from ups.data.first import fetch_first
from ups.data.pdebench import made_with, open_data
from ups.tasks import TASKS
from ups.userdata.readers import budget

NAME, MD5 = "1D_Advection_Sols_beta0.4.hdf5", "0" * 32
NUM, FRAMES, CELLS = 60, 21, 1024
ROW, BLOCK = 4 * FRAMES * CELLS, 2**14
QUICK = Patience(retries=2, pause_s=0.001, timeout_s=2.0)


class Handler(PlannedHandler):
    """Serves server.content in parts."""

    def answer(self, plan):
        server, content, start, stop = self.server, self.server.content, 0, len(self.server.content)
        if plan != "no range" and self.headers.get("Range"):
            low, high = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups()
            start, stop = int(low), min(int(high) + 1, stop)
            self.send_response(206)
            shift = 7 * (plan == "elsewhere")
            self.send_header("Content-Range", f"bytes {start + shift}-{stop - 1 + shift}/{len(content)}")
        else:
            self.send_response(200)
        if server.mark:
            self.send_header("ETag", server.mark.pop(0) if len(server.mark) > 1 else server.mark[0])
        if plan != "endless":
            self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        body = content[start:stop]
        while plan == "endless" and not server.is_over.is_set():  # until the client hangs up
            self.wfile.write(body)
            body = bytes(2**20)
            server.sent += len(body)
        self.wfile.write(body[: len(body) // 2] if plan == "cut" else body)
        server.sent += len(body)


@pytest.fixture
def server():
    with serving(Handler, mark=['"a"'], sent=0) as running:
        yield running


def whole(folder, u=None, **tensor):
    """A file as PDEBench writes it: arrays, one time more than frames, the parameter as an attribute."""
    u = np.random.default_rng(0).random((NUM, FRAMES, CELLS), np.float32) if u is None else u
    path = folder / "whole.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("tensor", data=u, **tensor)
        file["x-coordinate"] = ((np.arange(CELLS) + 0.5) / CELLS).astype(np.float32)
        file["t-coordinate"] = (0.1 * np.arange(FRAMES + 1)).astype(np.float32)
        file.attrs["beta"] = 0.4
    return path, u


@pytest.fixture
def served(server, tmp_path):
    path, u = whole(tmp_path)
    server.content = path.read_bytes()
    return server, u


def part(server, folder, num=4, **options):
    path = folder / f"1D_Advection_Sols_beta0.4.first{num}.hdf5"
    fetch_first(server.url, path, "advection1d", num, MD5, **{"patience": QUICK, **options})
    return path


def in_process(monkeypatch, code):
    """Run `code` in the process that reads from the server, before it does."""
    begin = f"from ups.data import first\nfirst.BLOCK_BYTES = {BLOCK}\n"
    monkeypatch.setattr(first, "COMMAND", f"{begin}{code}\nfirst.serve_remote()")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several requests for every trajectory, which counts as done by itself."""
    monkeypatch.setattr(first, "CHUNK_BYTES", ROW)
    in_process(monkeypatch, "")


def test_hdf5_objects_are_not_collected_by_the_thread_that_reads(served, tmp_path, monkeypatch):
    """HDF5 holds its lock while it reads from the server: another thread that frees one of its objects waits
    for ever."""
    code = """
import gc, io, urllib.request, h5py
from ups.data import first
answered, urlopen = first.answered, urllib.request.urlopen
def with_garbage(request, timeout_s):
    ring = [h5py.File(io.BytesIO(), "w")]
    ring.append(ring)
    del ring
    return answered(request, timeout_s)
def collecting(request, timeout):
    if gc.isenabled():  # as Python does by itself at any allocation
        gc.collect()
    return urlopen(request, timeout=timeout)
first.answered, urllib.request.urlopen = with_garbage, collecting
"""
    in_process(monkeypatch, code)
    server, u = served
    path = part(server, tmp_path, patience=Patience(retries=0, pause_s=0.01, timeout_s=2.0))
    assert np.array_equal(open_data(path, "advection1d").read(0, 4)[:, :, 0], u[:4])


@pytest.mark.parametrize(
    ("when", "fault", "words"),
    [
        (
            "first.describe",
            "os.kill(os.getpid(), 11)",
            r"ended the process that reads it \(SIGSEGV\); expected",
        ),
        ("first.Trajectories.read", "bytearray(2**30)", r"needs more than 256 MiB .*\(MemoryError\)"),
    ],
)
def test_a_file_of_a_server_that_ends_its_reader_is_one_line(
    served, tmp_path, monkeypatch, when, fault, words
):
    """What an attack on HDF5 could do ends in the process that reads, whether the header or the numbers of
    the file do it, and no file with the name of a complete one is left."""
    bad = (
        "import os\nfrom ups.data import first\nfrom ups.userdata.readers import budget\nbudget.SECONDS = 1\n"
        f"def bad(*_, **__):\n    {fault}\n{when} = bad"
    )
    monkeypatch.setattr(budget, "SECONDS", 1)
    in_process(monkeypatch, bad)
    server, _ = served
    with pytest.raises(ValueError, match=f"api/1 {words}") as error:
        part(server, tmp_path)
    assert len(str(error.value).splitlines()) == 1 and not [*tmp_path.glob("*first4.hdf5")]


def test_a_served_file_cannot_state_what_marks_files_of_ours(server, tmp_path):
    """ups_settings of the server's file would say that a part is the whole, or which seed made it."""
    path, _ = whole(tmp_path)
    with h5py.File(path, "r+") as file:
        settings = {"task": "advection1d", "num_trajectories": NUM, "whole": MD5, "generator": "theirs"}
        file.attrs.update({"ups_settings": json.dumps(settings), "ups_progress": NUM})
        file.attrs["a\nb"] = 1.0
    server.content = path.read_bytes()
    with pytest.raises(ValueError, match="holds the name .*, with control characters"):
        part(server, tmp_path)
    with h5py.File(path, "r+") as file:
        del file.attrs["a\nb"]
        file.attrs["there"] = file["tensor"].ref
    server.content = path.read_bytes()
    with h5py.File(part(server, tmp_path)) as file:
        settings, _ = made_with(file.attrs, tmp_path)
        assert settings["generator"].startswith("the first 4 of") and "there" not in file.attrs


def test_the_first_trajectories_are_those_of_the_whole_and_little_more_is_sent(served, tmp_path):
    server, u = served
    path = part(server, tmp_path)
    data = open_data(path, "advection1d")
    assert np.array_equal(data.read(0, 4)[:, :, 0], u[:4]) and data.num_trajectories == 4
    assert data.parameter == 0.4 and data.dt == pytest.approx(0.1, rel=1e-6)
    assert server.sent < 4 * ROW + 8 * BLOCK < len(server.content) / 4
    with h5py.File(path) as file, h5py.File(tmp_path / "whole.hdf5") as source:
        for key in ("x-coordinate", "t-coordinate"):
            assert np.array_equal(file[key], source[key])


def test_the_file_records_that_it_is_incomplete_and_has_no_md5(served, tmp_path):
    server, _ = served
    path = part(server, tmp_path)
    with h5py.File(path) as file:
        settings, done = made_with(file.attrs, path)
    assert (settings["whole"], settings["edition"], settings["num_trajectories"], done) == (MD5, '"a"', 4, 4)
    note = (
        f"it holds the first 4 of {NUM} trajectories of {server.url}; the published MD5 is of the whole "
        f"file, so nothing was"
    )
    assert any(said.startswith(note) for said in open_data(path, "advection1d").notes)
    findings = dict(examine([("advection1d", path)], val_fraction=0.25, test_fraction=0.25))[path]
    assert any(finding.what.startswith(note) for finding in findings)


def test_a_finished_file_requests_nothing_and_another_file_of_its_name_is_refused(served, tmp_path):
    server, _ = served
    path, asked = part(server, tmp_path), len(server.ranges)
    part(server, tmp_path)
    assert len(server.ranges) == asked
    path.write_bytes(server.content)  # the whole one, renamed
    with pytest.raises(
        ValueError, match="first4.hdf5 is not the first 4 trajectories of the published file; expected it"
    ):
        part(server, tmp_path)


def test_what_a_server_sends_beyond_its_range_is_not_read(served, tmp_path):
    server, u = served
    server.plan = ["endless"] * 100
    path = part(server, tmp_path)
    assert np.array_equal(open_data(path, "advection1d").read(0, 4)[:, :, 0], u[:4])
    assert server.sent < 2**27


def test_a_broken_connection_is_tried_again(served, tmp_path):
    server, u = served
    server.plan = ["ok", "cut", 503, "cut"]
    path = part(server, tmp_path)
    assert np.array_equal(open_data(path, "advection1d").read(0, 4)[:, :, 0], u[:4])
    assert server.ranges[1] == server.ranges[2] == server.ranges[3] == server.ranges[4] != server.ranges[5]


def test_an_interrupted_part_continues_at_the_next_trajectory(served, tmp_path):
    server, u = served

    class KillError(Exception):
        pass

    def kill(done):
        if done == 3:
            raise KillError

    with pytest.raises(KillError):
        part(server, tmp_path, 6, on_progress=kill)
    assert partial_path(tmp_path / NAME.replace(".hdf5", ".first6.hdf5")).exists()
    assert not list(tmp_path.glob("*first6.hdf5"))
    server.ranges.clear()
    path = part(server, tmp_path, 6)
    assert BLOCK * len(server.ranges) < 3 * ROW + 8 * BLOCK
    assert np.array_equal(open_data(path, "advection1d").read(0, 6)[:, :, 0], u[:6])


@pytest.mark.parametrize(("plan", "marks", "code", "words", "requests"), cases("first.servers"))
def test_a_server_that_cannot_give_a_part_is_refused_by_name(
    served, tmp_path, monkeypatch, plan, marks, code, words, requests
):
    server, _ = served
    server.plan, server.mark = plan, marks
    in_process(monkeypatch, code)
    with pytest.raises(ValueError, match=words):
        part(server, tmp_path)
    assert len(server.ranges) == requests or not requests
    assert "no range" not in plan or [path.name for path in tmp_path.iterdir()] == ["whole.hdf5"]


def test_a_wrong_address_is_named(tmp_path):
    with pytest.raises(ValueError, match="'ftp://x/1' is not a web address"):
        fetch_first("ftp://x/1", tmp_path / "a.hdf5", "advection1d", 4, MD5)


def test_a_file_that_changed_since_the_first_part_of_it_came_is_refused(served, tmp_path):
    server, _ = served
    server.plan = ["ok"] * 6 + [503] * 3
    with pytest.raises(ConnectionError):
        part(server, tmp_path, 6)
    server.plan, server.mark = [], ['"b"']
    with pytest.raises(
        ValueError, match=r"""with other settings \(edition is '"a"' there, '"b"' now\); expected the same"""
    ):
        part(server, tmp_path, 6)


def test_compressed_arrays_are_refused(server, tmp_path):
    path, _ = whole(tmp_path, chunks=(1, FRAMES, CELLS), compression="lzf")
    server.content = path.read_bytes()
    with pytest.raises(
        ValueError, match="stores its numbers in compressed chunks; expected arrays .* Set data.fetch=whole"
    ):
        part(server, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.hdf5"]


def test_too_few_trajectories_and_nan_are_named_by_the_address(server, tmp_path):
    path, u = whole(tmp_path)
    server.content = path.read_bytes()
    with pytest.raises(
        ValueError,
        match=f"api/1 holds {NUM} trajectories; expected at least 61. Lower task.advection1d.num_t",
    ):
        part(server, tmp_path, 61)
    u[2, 3, 5] = np.nan
    server.content = whole(tmp_path, u)[0].read_bytes()
    with pytest.raises(
        ValueError, match=r"api/1 holds NaN or Inf in trajectories \[2\]; .* Lower .*num_trajectories to 2"
    ):
        part(server, tmp_path)


def test_a_file_that_is_no_hdf5_is_named_by_its_address(server, tmp_path):
    server.content = b"<html>maintenance</html>" * 99
    with pytest.raises(
        ValueError, match="api/1 is no readable HDF5 file .*; expected one of advection1d. Correct data.url"
    ):
        part(server, tmp_path)


def test_prepare_data_fetches_the_first_trajectories_or_whole_files_by_layout(
    served, tmp_path, monkeypatch, capsys
):
    server, u = served
    monkeypatch.setitem(TASKS["advection1d"].published, NAME, (1, MD5))
    sizes = {
        "num_trajectories": 4,
        "resolution": CELLS,
        "num_frames": FRAMES,
        "t_end": 2.0,
        "parameters": [0.4],
        "reserve": 0.0,
    }
    overlay = tmp_path / "part.yaml"
    overlay.write_text(
        yaml.safe_dump(
            {
                "data": {
                    "tasks": ["advection1d_hidden", "diff_react2d"],
                    "source": "published",
                    "fetch": "first",
                    "url": server.url[:-2],
                    "root": str(tmp_path / "data"),
                },
                "task": {"advection1d_hidden": sizes, "diff_react2d": {"num_trajectories": 4}},
            }
        ),
        encoding="utf-8",
    )
    config = load_config(overlay)
    assert config.data_path("diff_react2d", None).name == "2D_diff-react_NA_NA.h5"  # in groups: whole
    assert (
        config.data_path("advection1d_hidden", 0.4)
        == tmp_path / "data/advection1d/1D_Advection_Sols_beta0.4.first4.hdf5"
    )
    only = ["--config", str(overlay), "data.tasks=[advection1d_hidden]"]
    assert prepare_data.main([*only, "--dry-run"]) == 0
    assert "advection1d: 1 file(s), about 3.1 MiB, 0% there" in capsys.readouterr().out
    assert server.ranges == []
    assert prepare_data.main(only) == 0
    assert "first4.hdf5: the first 4 trajectories; no MD5 to compare them with" in capsys.readouterr().out
    asked = len(server.ranges)
    assert prepare_data.main(only) == 0 and len(server.ranges) == asked
    assert "up to date; no MD5" in capsys.readouterr().out
    assert np.array_equal(
        open_data(config.data_path("advection1d_hidden", 0.4), "advection1d_hidden").read(0, 4)[:, :, 0],
        u[:4],
    )
    # like url: of downloads
    assert load_config(overlay, ["data.source=user"]).data_path("advection1d_hidden", 0.4).name == NAME
