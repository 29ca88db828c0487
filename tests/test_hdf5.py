"""Links and storage that lead out of a file are refused by every reader before anything is followed or
read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from test_pdebench import settings, solver, written

from ups.common.files import partial_path
from ups.data.generate import write_data
from ups.data.pdebench import open_data
from ups.userdata.readers.hdf5 import node

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "soft link": "a soft link",
    "external link": "a link to another file",
    "external storage": "kept in another file",
    "view": r"a view of other datasets \(virtual\)",
    "endless view": r"a view of other datasets \(virtual\)",
}


def replace(path: Path, key: str, kind: str, target: Path) -> None:
    """Put a link or a dataset of `kind` that leads to `target` in the place of the dataset at `key`."""
    with h5py.File(path, "r+") as file:
        shape = file[key].shape
        file.move(key, "moved")
        if kind == "soft link":
            file[key] = h5py.SoftLink("/moved")
        elif kind == "external link":
            file[key] = h5py.ExternalLink(str(target), key)
        elif kind == "external storage":
            file.create_dataset(key, shape, np.float32, external=[(str(target), 0, h5py.h5f.UNLIMITED)])
        else:
            most = (None, *shape[1:]) if kind == "endless view" else shape
            layout = h5py.VirtualLayout(shape, np.float32, maxshape=most)
            layout[...] = h5py.VirtualSource(str(target), key, shape)
            file.create_virtual_dataset(key, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["tensor", "t-coordinate"])
def test_a_data_file_that_leads_to_another_is_refused(tmp_path, kind, key):
    path = written(tmp_path, "advection1d")
    other = shutil.copy(path, tmp_path / "other.h5")
    replace(path, key, kind, other)
    with pytest.raises(
        ValueError, match=f"{path.name}: {key} in / is {KINDS[kind]}.*expected the numbers in the file"
    ):
        open_data(path, "advection1d")


@pytest.mark.parametrize("kind", KINDS)
def test_a_trajectory_that_leads_to_another_file_is_left_out_or_refused(tmp_path, kind):
    path = written(tmp_path, "diff_react2d")
    replace(path, "0003/data", kind, shutil.copy(path, tmp_path / "other.h5"))
    if "link" in kind:
        assert open_data(path, "diff_react2d").num_trajectories == 6
    else:
        with pytest.raises(ValueError, match=f"data in /0003 is {KINDS[kind]}"):
            open_data(path, "diff_react2d")


def test_a_pipe_behind_a_link_is_not_waited_for(tmp_path):
    """In another process, as one that follows the link waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    for kind in KINDS:
        path = written(tmp_path, "advection1d").rename(tmp_path / f"{kind}.h5")
        replace(path, "tensor", kind, tmp_path / "pipe")
    code = f"""
from pathlib import Path
from ups.data.pdebench import open_data
for path in sorted(Path({str(tmp_path)!r}).glob("*.h5")):
    try:
        open_data(path, "advection1d").read(0, 7)
    except ValueError as error:
        print("tensor in / is" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True"] * len(KINDS)


def test_what_is_no_data_is_none_and_plain_data_are_found(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/data"], file["type"] = np.arange(3), np.dtype("f4")
        file["again"] = file["group/data"]  # a second name within the file leads nowhere else
        assert node(file, "group/data")[()].tolist() == node(file, "again")[()].tolist() == [0, 1, 2]
        assert isinstance(node(file, "group"), h5py.Group)
        assert [node(file, path) for path in ("type", "none", "group/none", "group/data/none")] == [None] * 4


def test_generating_does_not_write_through_an_unfinished_file_that_leads_elsewhere(tmp_path):
    path, made = tmp_path / "a.hdf5", settings("advection1d")
    (tmp_path / "victim").write_bytes(b"somebody's data" * 100)

    def stopped(indices, **rest):
        if indices[0] >= 3:
            raise InterruptedError
        return solver("advection1d")(indices, **rest)

    with pytest.raises(InterruptedError):
        write_data(path, "advection1d", stopped, made, chunk=3)
    replace(partial_path(path), "tensor", "external storage", tmp_path / "victim")
    with pytest.raises(ValueError, match="tensor in / is kept in another file"):
        write_data(path, "advection1d", solver("advection1d"), made, chunk=3)
    assert (tmp_path / "victim").read_bytes() == b"somebody's data" * 100
