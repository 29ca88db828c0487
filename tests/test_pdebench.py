"""PDEBench's layouts: what is written is what is read, whatever the chunk or the interruption; every
malformed file is named."""

import errno
import json
import multiprocessing
import pickle
import signal
import textwrap
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import small_disk
from cases import cases
from commands import python

from ups.common import files
from ups.common.files import partial_path
from ups.data import generate
from ups.data.generate import generation_settings, num_done, write_data
from ups.data.layout import layout_of
from ups.data.pdebench import data_bytes, open_data, split_indices
from ups.tasks import TASKS, get_task

ROOT = Path(__file__).resolve().parent.parent


def solver(task):
    """A stand-in for a solver: numbers that depend on (seed, i) only."""
    spec = get_task(task)

    def solve(indices, *, seed, resolution, num_frames, parameter, t_end):
        shape = (num_frames, len(spec.channels), *[resolution] * spec.ndim)
        u = np.stack([np.random.default_rng([seed, i]).random(shape, np.float32) for i in indices])
        still = len(spec.channels) - len(spec.still)
        u[:, :, still:] = u[:, :1, still:]
        return u

    return solve


def settings(task, num=7, resolution=6, frames=5, **changes):
    spec = get_task(task)
    values = {
        "seed": 3,
        "num_trajectories": num,
        "resolution": resolution,
        "num_frames": 1 if spec.is_steady else frames,
        "t_end": spec.t_end,
        "parameter": 0.1 if spec.parameters else None,
    }
    return generation_settings(task, "test 1", **{**values, **changes})


def written(folder, task, **changes):
    made = settings(task, **changes)
    path = folder / get_task(task).file_for(made["parameter"])
    write_data(path, task, solver(task), made, chunk=3)
    return path


def truth(task, num=7, resolution=6, frames=5):
    made = settings(task, num, resolution, frames)
    return solver(task)(
        range(num), **{k: made[k] for k in ("seed", "resolution", "num_frames", "parameter", "t_end")}
    )


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_is_what_is_read(task, tmp_path):
    spec, u = get_task(task), truth(task)
    data = open_data(written(tmp_path, task), task)
    assert np.array_equal(data.read(0, 7), u) and np.array_equal(data.read(2, 4), u[2:4])
    assert data.read(2, 4).dtype == np.float32 and data.notes == ()
    assert (data.num_trajectories, data.num_frames, data.space) == (7, u.shape[1], (6,) * spec.ndim)
    assert data.parameter == (0.1 if spec.parameters else None)
    assert data.dt == pytest.approx(0 if spec.is_steady else spec.t_end / 4, rel=1e-6)
    low, high = spec.domain
    for axis in spec.axes:
        assert np.allclose(data.coordinates[axis], low + (np.arange(6) + 0.5) * (high - low) / 6)
    assert spec.is_steady or np.allclose(data.coordinates["t"], np.linspace(0, spec.t_end, 5))


@pytest.mark.parametrize("task", TASKS)
def test_strides_read_the_strided_frames_and_cells(task, tmp_path):
    spec, path = get_task(task), written(tmp_path, task)
    first, every = (0, 1) if spec.is_steady else (1, 2)
    data = open_data(path, task, space_stride=4, time_stride=every, first_frame=first)
    u = truth(task)[
        (slice(1, 6), slice(first, None, every), slice(None), *[slice(None, None, 4)] * spec.ndim)
    ]
    assert np.array_equal(data.read(1, 6), u)
    assert u.shape[1:] == (data.num_frames, len(spec.channels), *data.space)
    assert len(data.coordinates[spec.axes[0]]) == 2
    assert data.dt == pytest.approx(0 if spec.is_steady else spec.t_end / 2, rel=1e-6)


@pytest.mark.parametrize("task", ["cfd2d", "darcy2d", "diff_react2d", "ns_incom2d"])
def test_reading_in_small_blocks_gives_the_same(task, tmp_path, monkeypatch):
    data = open_data(written(tmp_path, task), task)
    for size in (1, 500, 3000):
        monkeypatch.setattr("ups.userdata.trajectories.READ_BLOCK_BYTES", size)
        assert np.array_equal(data.read(0, 7), truth(task))


def test_array_files_have_the_published_layout(tmp_path):
    with h5py.File(written(tmp_path, "cfd1d")) as file:
        assert {"density", "pressure", "Vx", "x-coordinate", "t-coordinate"} == set(file)
        assert all(
            file[key].chunks is None and file[key].compression is None and file[key].dtype == "<f4"
            for key in file
        )
        assert file["Vx"].shape == (7, 5, 6) and file["t-coordinate"].shape == (
            6,
        )  # one time more than frames
        assert file.attrs["eta"] == file.attrs["zeta"] == 0.1
        assert json.loads(file.attrs["ups_settings"])["seed"] == 3
    with h5py.File(written(tmp_path, "darcy2d")) as file:
        assert {key: file[key].shape for key in file} == {
            "nu": (7, 6, 6),
            "tensor": (7, 1, 6, 6),
            "x-coordinate": (6,),
            "y-coordinate": (6,),
        }
    with h5py.File(written(tmp_path, "reacdiff1d")) as file:
        assert (file.attrs["Nu"], file.attrs["rho"]) == (0.1, 1.0)


def test_group_files_have_the_published_layout(tmp_path):
    with h5py.File(written(tmp_path, "diff_react2d")) as file:
        assert sorted(file) == [f"{i:04d}" for i in range(7)]
        assert file["0003/data"].shape == (5, 6, 6, 2) and file["0003/data"].compression == "lzf"
        assert file["0003/grid/t"].shape == (5,) and file["0003/grid/y"].shape == (6,)
        assert b"Du: 0.001" in file["0003"].attrs["config"] and b"seed: 3" in file["0003"].attrs["config"]


def test_parameter_is_taken_from_the_name_with_a_note_when_the_attribute_is_missing(tmp_path):
    path = written(tmp_path, "burgers1d")
    with h5py.File(path, "r+") as file:
        del file.attrs["Nu"]
    data = open_data(path, "burgers1d")
    assert data.parameter == 0.1 and "file name" in data.notes[0]
    path.rename(tmp_path / "mine.hdf5")
    with pytest.raises(ValueError, match="no attribute Nu .* name it like 1D_Burgers_Sols_Nu0.1.hdf5"):
        open_data(tmp_path / "mine.hdf5", "burgers1d")
    with h5py.File(tmp_path / "mine.hdf5", "r+") as file:
        file.attrs["Nu"] = "thick"
    with pytest.raises(ValueError, match="attribute Nu is 'thick'; expected a number"):
        open_data(tmp_path / "mine.hdf5", "burgers1d")


def test_missing_groups_are_noted_and_the_rest_counted_by_position(tmp_path):
    path = written(tmp_path, "diff_react2d")
    edit(path, "0002", None)
    data = open_data(path, "diff_react2d")
    assert data.num_trajectories == 6 and "6 groups named 0000 to 0006: some are missing" in data.notes[0]
    assert np.array_equal(data.read(2, 3), truth("diff_react2d")[3:4])


def _read_in_child(data, queue):
    queue.put(float(data.read(0, 7).sum()))


def test_a_reader_survives_fork_and_pickle(tmp_path):
    data = open_data(written(tmp_path, "diff_react2d"), "diff_react2d")
    total = float(data.read(0, 7).sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_read_in_child, args=(data, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=20) for _ in children] == [total, total]
    assert float(pickle.loads(pickle.dumps(data)).read(0, 7).sum()) == total


# -------------------------------------------------------------------------------------------------- bad files


def edit(path, key, value):
    with h5py.File(path, "r+") as file:
        del file[key]
        if value is not None:
            file[key] = value


BAD = cases("pdebench.malformed")  # case -> task, array, what is in its place, message


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_file_is_named(case, tmp_path):
    task, key, value, message = BAD[case]
    path = written(tmp_path, task)
    if isinstance(value, dict):
        zeros = np.zeros(value.get("zeros", ()), value.get("dtype"))
        value = np.array(value["values"]) if "values" in value else zeros
    edit(path, key, None if isinstance(value, str) else value)
    if isinstance(value, str):
        with h5py.File(path, "r+") as file:
            file.create_group(key)
    with pytest.raises(ValueError, match=message):
        open_data(path, task)


def test_missing_file_names_the_make_target(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="no data file .*nothing.hdf5; expected advection1d.* Run `make data`"
    ):
        open_data(tmp_path / "nothing.hdf5", "advection1d")
    partial_path(tmp_path / "nothing.hdf5").touch()
    with pytest.raises(FileNotFoundError, match="unfinished nothing.hdf5.partial, which it continues"):
        open_data(tmp_path / "nothing.hdf5", "advection1d")


def test_what_is_not_hdf5_is_named(tmp_path):
    path = tmp_path / "page.hdf5"
    path.write_text("<html>not found</html>")
    with pytest.raises(
        ValueError, match="no readable HDF5 file .*signature not found.*; expected a complete file"
    ):
        open_data(path, "advection1d")
    with pytest.raises(FileNotFoundError, match="no data file"):  # a folder
        open_data(tmp_path, "advection1d")


def test_truncated_and_unfinished_files_are_refused(tmp_path):
    path = written(tmp_path, "advection1d")
    with h5py.File(path, "r+") as file:
        file.attrs["ups_progress"] = 3
    with pytest.raises(ValueError, match=r"is unfinished \(3 trajectories\)"):
        open_data(path, "advection1d")
    with path.open("r+b") as raw:
        raw.truncate(path.stat().st_size - 100)
    with pytest.raises(ValueError, match="is damaged, .*truncated"):
        open_data(path, "advection1d")


def test_a_file_of_another_task_is_recognised(tmp_path):
    with pytest.raises(ValueError, match=r"no array '\*/data'.*Check data.tasks"):
        open_data(written(tmp_path, "darcy2d"), "diff_react2d")
    with pytest.raises(ValueError, match="no array 'tensor'.*Check data.tasks"):
        open_data(written(tmp_path, "diff_react2d"), "advection1d")
    with pytest.raises(ValueError, match="4 axes, .* and 3 words .*Check data.tasks"):
        open_data(written(tmp_path, "darcy2d"), "advection1d")


def test_ranges_and_strides_are_checked(tmp_path):
    path = written(tmp_path, "advection1d")
    for first, last in ((3, 3), (-1, 2), (0, 8)):
        with pytest.raises(AssertionError):
            open_data(path, "advection1d").read(first, last)
    with pytest.raises(ValueError, match="space_stride 0.*expected strides of at least 1"):
        open_data(path, "advection1d", space_stride=0)
    with pytest.raises(ValueError, match="has 5 frames; expected more than first_frame 5"):
        open_data(path, "advection1d", first_frame=5)


# ----------------------------------------------------------------------------------------------------- writer


def contents(path):
    """Every array and attribute of a file."""
    found = {}
    with h5py.File(path) as file:
        found["/"] = dict(file.attrs)
        file.visititems(
            lambda name, node: found.update(
                {name: (dict(node.attrs), node[()].tobytes() if hasattr(node, "shape") else b"")}
            )
        )
    return found


@pytest.mark.parametrize(
    "task, num, chunk, dies_in", [("advection1d", 40, 3, 2), ("diff_react2d", 400, 190, 1)]
)
def test_a_killed_generation_continues_and_ends_in_the_same_file(task, num, chunk, dies_in, tmp_path):
    """The process kills itself (SIGKILL) after having stored some chunk; hundreds of groups overflow HDF5's
    cache. Nor does the size of chunks change the file."""
    path, made = tmp_path / "killed.h5", settings(task, num, resolution=2)
    code = f"""
        import os, signal, sys
        sys.path.insert(0, "tests")
        from pathlib import Path
        from ups.data import generate
        from ups.data.layout import layout_of
        from ups.tasks import get_task
        from test_pdebench import settings, solver
        kind = type(layout_of(get_task({task!r})))
        store, calls = kind.store, []

        def killed(layout, file, made, first, u):
            store(layout, file, made, first, u)
            calls.append(first)
            if len(calls) == {dies_in + 1}:
                os.kill(os.getpid(), signal.SIGKILL)

        kind.store = killed
        path, wanted = Path({str(path)!r}), settings({task!r}, {num}, 2)
        generate.write_data(path, {task!r}, solver({task!r}), wanted, chunk={chunk})
    """
    result = python("-c", textwrap.dedent(code))
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not path.exists() and num_done(path, made) == dies_in * chunk
    requested = []

    def solve(indices, **rest):
        requested.extend(int(i) for i in indices)
        return solver(task)(indices, **rest)

    write_data(path, task, solve, made, chunk=chunk + 2)
    assert requested == list(range(dies_in * chunk, num)) and not partial_path(path).exists()
    write_data(tmp_path / "whole.h5", task, solver(task), made, chunk=chunk + 4)
    assert contents(path) == contents(tmp_path / "whole.h5")


def test_a_finished_file_is_kept_and_other_settings_are_refused(tmp_path):
    path = written(tmp_path, "advection1d")
    before, progress = path.stat().st_mtime_ns, []
    write_data(path, "advection1d", None, settings("advection1d"), chunk=3, on_progress=progress.append)
    assert path.stat().st_mtime_ns == before and progress == [7]
    with pytest.raises(
        ValueError, match=r"other settings \(seed is 3 there, 4 now\); expected the same.*rm '"
    ):
        write_data(path, "advection1d", None, settings("advection1d", seed=4), chunk=3)


def test_a_foreign_file_is_never_overwritten(tmp_path):
    path = tmp_path / "theirs.hdf5"
    with h5py.File(path, "w") as file:
        file["tensor"] = np.zeros((7, 5, 6), np.float32)
    with pytest.raises(ValueError, match="was not generated by UPS.*data.source=published"):
        write_data(path, "advection1d", None, settings("advection1d"), chunk=3)
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match="no readable HDF5 file .*if no other process writes it, delete it"):
        write_data(path, "advection1d", None, settings("advection1d"), chunk=3)


def test_a_file_that_another_process_finished_meanwhile_is_kept(tmp_path, monkeypatch):
    path, made = tmp_path / "data.hdf5", settings("advection1d")

    def late(*args):  # the other ends after we looked and before we have the lock
        monkeypatch.undo()
        write_data(path, "advection1d", solver("advection1d"), made, chunk=3)
        return files.completing(*args)

    monkeypatch.setattr(generate, "completing", late)
    write_data(path, "advection1d", None, made, chunk=3)
    assert np.array_equal(open_data(path, "advection1d").read(0, 7), truth("advection1d"))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("task", ["cfd2d", "darcy2d", "diff_react2d"])
def test_a_write_that_gets_lost_is_noticed_before_it_counts_as_done(task, tmp_path, monkeypatch):
    path, made, store = tmp_path / "data.hdf5", settings(task), type(layout_of(get_task(task))).store

    def lossy(layout, file, settings, first, u):
        store(
            layout,
            file,
            settings,
            first,
            np.where(first + np.arange(len(u)).reshape(-1, *[1] * (u.ndim - 1)) == 5, 0, u),
        )

    monkeypatch.setattr(type(layout_of(get_task(task))), "store", lossy)
    message = (
        "trajectories 3 to 5 read back from .* are not those that were written.*continues at trajectory 3"
    )
    with pytest.raises(OSError, match=message):
        write_data(path, task, solver(task), made, chunk=3)
    assert num_done(path, made) == 3 and not path.exists()
    monkeypatch.undo()
    write_data(path, task, solver(task), made, chunk=3)
    assert np.array_equal(open_data(path, task).read(0, 7), truth(task))


def test_room_that_is_gone_between_chunks_is_an_error_and_the_next_call_continues(tmp_path, monkeypatch):
    task = "diff_react2d"
    path, made, calls = tmp_path / "data.hdf5", settings(task), []

    def full(file, num_bytes):
        calls.append(num_bytes)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "reserve", full)
    with pytest.raises(
        OSError, match="cannot write .*No space left.*MiB of room in it. Free some, or change data.root"
    ):
        write_data(path, task, solver(task), made, chunk=3)
    assert num_done(path, made) == 3 and min(calls) >= data_bytes(task, 7, 5, 6)
    write_data(path, task, solver(task), made, chunk=3)
    assert np.array_equal(open_data(path, task).read(0, 7), truth(task))


@pytest.mark.skipif(bool(small_disk.reason_to_skip()), reason=small_disk.reason_to_skip())
@pytest.mark.parametrize(
    "task, fraction, is_taken", [("advection1d", 0.99, False), ("diff_react2d", 1.5, True)]
)
def test_a_full_disk_ends_with_its_name_and_nothing_false(task, fraction, is_taken):
    found = small_disk.outcome(task, fraction, is_taken)
    assert found.pop("said").startswith("OSError: [Errno 28] cannot write "), found
    solved = found.pop("solved")
    assert solved == 0 or is_taken
    assert 0 <= found.pop("confirmed") <= solved
    assert found == {"first": 1, "wrong": 0, "second": 0, "is_whole": True}


def test_too_small_a_disk_is_refused_before_writing(tmp_path, monkeypatch):
    requested = []
    # which would fill it
    monkeypatch.setattr(files.os, "posix_fallocate", lambda *args: requested.append(args))
    monkeypatch.setattr(files.os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=500))
    with pytest.raises(
        OSError, match="cannot write .*No space left.*MiB of room in it. Free some, or change data.root"
    ):
        written(tmp_path, "advection1d", num=1000)
    assert not requested


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match="cannot write .*expected a folder that may be written.* change data.root"
    ):
        written(tmp_path / "file" / "below", "advection1d")


def test_wrong_shapes_and_nan_from_a_solver_are_refused_and_the_rest_is_kept(tmp_path):
    path, made = tmp_path / "a.hdf5", settings("advection1d")

    def broken(indices, **rest):
        u = solver("advection1d")(indices, **rest)
        u[np.asarray(indices) == 4] = np.nan
        return u

    with pytest.raises(ValueError, match=r"non-finite numbers for trajectories \[4\]"):
        write_data(path, "advection1d", broken, made, chunk=2)
    assert num_done(path, made) == 4
    with pytest.raises(AssertionError, match=r"\(2, 5, 1\), .*\(2, 5, 1, 6\)"):
        write_data(
            path,
            "advection1d",
            lambda indices, **rest: np.zeros((len(indices), 5, 1), np.float32),
            made,
            chunk=2,
        )


# ------------------------------------------------------------------------------------------------------ split


def test_split_is_pdebenchs_and_covers_every_trajectory_once():
    arrays, groups = (split_indices(task, 30, 0.1, 0.1) for task in ("advection1d", "diff_react2d"))
    assert arrays["test"].tolist() == [0, 1, 2] and arrays["val"].tolist() == [3, 4, 5]
    assert groups["test"].tolist() == [27, 28, 29] and groups["val"].tolist() == [24, 25, 26]
    for split in (arrays, groups):
        assert sorted(np.concatenate(list(split.values())).tolist()) == list(range(30))
    assert [len(rows) for rows in split_indices("advection1d", 3, 0.1, 0.1).values()] == [1, 1, 1]
    for num, val, test in ((2, 0.1, 0.1), (10, 0.5, 0.5), (10, 0.0, 0.1)):
        with pytest.raises(
            ValueError, match=f"{num} trajectories cannot be split.*expected at least one each"
        ):
            split_indices("advection1d", num, val, test)


def test_file_size_is_predicted(tmp_path):
    path = written(tmp_path, "cfd2d", num=20, resolution=16)
    assert data_bytes("cfd2d", 20, 5, 16) == pytest.approx(path.stat().st_size, rel=0.03)
    assert data_bytes("cfd2d", 10000, 21, 128) == pytest.approx(55_050_245_208, rel=1e-4)  # published size
