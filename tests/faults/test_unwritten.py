"""Storage that was never written, or not wholly: it reads as zeros, and is refused; fields that are zero,
still or at rest are not."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray
import zarr
from user_files import overlay, section

from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.doctor import examine
from ups.data.pdebench import open_data
from ups.data.sources import open_user
from ups.userdata.readers import open_store

N, T, X = 6, 20, 32


def waves() -> np.ndarray:
    """Smooth fields (trajectory, time, x) that change by a tenth from frame to frame."""
    x, t, phase = 2 * np.pi * np.arange(X) / X, 0.1 * np.arange(T)[:, None], np.arange(N)[:, None, None]
    return (np.sin(x + t + phase) + 0.5 * np.cos(2 * x - t + 3 * phase)).astype(np.float32)


def npz(path: Path, damage) -> None:
    np.savez(path, u=waves(), v=waves()[::-1])
    raw = bytearray(path.read_bytes())
    path.write_bytes(damage(raw, raw.index(b"\x93NUMPY")))


def flip(raw: bytearray, start: int) -> bytearray:
    raw[start + 5000] ^= 1
    return raw


def longer(raw: bytearray, start: int) -> bytearray:
    end = raw.index(b"(6, 20, 32)", start)
    raw[end : end + 11] = b"(7, 20, 32)"  # the first array runs into the second
    return raw


def netcdf(path: Path, share: float, kind: str, unlimited: bool) -> None:
    made = xarray.Dataset(
        {"u": (("b", "t", "x"), waves()), "n": ("b", np.arange(N, dtype="i2"))}, attrs={"history": "made"}
    )
    made.to_netcdf(path, engine="scipy", format=kind, unlimited_dims=["b"] * unlimited)
    os.truncate(path, int(share * path.stat().st_size))


@pytest.mark.parametrize("unlimited", [False, True])
@pytest.mark.parametrize("kind", ["NETCDF3_CLASSIC", "NETCDF3_64BIT"])
def test_classic_netcdf_is_as_long_as_its_header_says(tmp_path, kind, unlimited):
    for share, is_whole in ((1.0, True), (0.5, False), (0.99, False)):
        path = tmp_path / f"{share}.nc"
        netcdf(path, share, kind, unlimited)
        if is_whole:
            with open_store(path) as store:
                assert np.array_equal(store.read("u"), waves())
        else:
            with pytest.raises(
                ValueError, match="is damaged, or no readable netCDF file .*; expected a complete file"
            ):
                with open_store(path) as store:
                    store.read("u")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "holds u.npy with another checksum"),
        (longer, "holds u.npy of .* bytes, and its header declares float32 of shape"),
    ],
)
def test_members_of_npz_are_what_was_written(tmp_path, damage, words):
    np.savez(tmp_path / "a.npz", u=waves(), v=waves()[::-1])
    with open_store(tmp_path / "a.npz") as store:
        assert np.array_equal(store.read("v"), waves()[::-1])
    npz(tmp_path / "a.npz", damage)
    with pytest.raises(ValueError, match=words):
        open_store(tmp_path / "a.npz")


def zarr_of(path: Path, u: np.ndarray, chunks: tuple[int, ...], version: int = 3) -> Path:
    zarr.open_group(str(path), mode="w", zarr_format=version).create_array("u", data=u, chunks=chunks)
    return next(
        p for p in sorted(path.rglob("*")) if p.name in ("1.0.0",) or p.parts[-4:] == ("c", "1", "0", "0")
    )


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_of_zarr_are_there(tmp_path, version):
    chunk = zarr_of(tmp_path / "a.zarr", waves(), (1, T, X), version)
    chunk.unlink()
    with (
        pytest.raises(
            ValueError, match="the chunk .*1.0.0 of u is missing and those beside it are there; expected all"
        ),
        open_store(tmp_path / "a.zarr") as store,
    ):
        store.require_whole("u")


def test_zarr_may_leave_out_chunks_of_a_wall(tmp_path):
    u = np.where(np.arange(X) < X // 2, waves(), np.float32(0))
    zarr_of(tmp_path / "a.zarr", u, (1, T, X // 2))
    assert len([p for p in (tmp_path / "a.zarr/u/c").rglob("*") if p.is_file()]) == N
    with open_store(tmp_path / "a.zarr") as store:
        assert store.array("u").shape == u.shape and np.array_equal(store.read("u"), u)


@pytest.mark.parametrize("name", ["u/c/1/0/0", "u/zarr.json", "u/strange"])
def test_a_pipe_in_a_zarr_folder_is_refused_at_once(tmp_path, name):
    zarr_of(tmp_path / "a.zarr", waves(), (1, T, X))
    path = tmp_path / "a.zarr" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"holds {name}, a pipe or a device; expected files and folders"):
        open_store(tmp_path / "a.zarr")


def lost(*at):
    """The waves with zeros at `at` (trajectory, time, x)."""
    u = waves()
    u[at] = 0
    return u


def decaying() -> np.ndarray:
    u = waves() * np.exp(-(np.arange(T) ** 2) / 3.0, dtype=np.float32)[:, None]
    return np.where(np.abs(u) < 1e-6, np.float32(0), u)


def settling() -> np.ndarray:
    return np.float32(1) + waves() * np.exp(-2 * np.arange(T), dtype=np.float32)[:, None]


def leaving() -> np.ndarray:
    """A step that moves three cells a frame and leaves the domain."""
    x, front = np.arange(X), 3 * np.arange(T)[:, None] + np.arange(N)[:, None, None]
    return ((x >= front) & (x < front + 7)).astype(np.float32) * (1 + 0.1 * np.arange(N, dtype=np.float32))[
        :, None, None
    ]


def wall() -> np.ndarray:
    return np.where(np.arange(X) < X // 2, waves(), np.float32(0))


def from_rest() -> np.ndarray:
    return waves() * np.minimum(0.1 * np.arange(T), 1)[:, None].astype(np.float32)


UNWRITTEN = {
    "last frames of one": (lost(3, slice(15, None)), "trajectory 3 holds u = 0 in every cell of frame 15 "),
    "last frames of all": (
        lost(slice(None), slice(12, None)),
        "trajectory 0 holds u = 0 in every cell of frame 12 ",
    ),
    "one frame": (lost(2, 7), "trajectory 2 holds u = 0 in every cell of frame 7 "),
    "all but the first": (lost(2, slice(1, None)), "trajectory 2 holds u = 0 in every cell of frame 1 "),
    "a trajectory": (lost(4), "trajectory 4 holds nothing but zeros"),
    "all": (lost(slice(None)), "trajectory 0 holds nothing but zeros"),
}
WRITTEN = [decaying, settling, leaving, wall, from_rest]


def built(folder: Path, **fields: np.ndarray) -> tuple:
    """(what building a cache said, findings of the doctor) of a file with these fields."""
    np.savez(folder / "a.npz", **fields)
    layout = {name: ["trajectory", "time", "x"] for name in fields}
    found = {"files": str(folder / "a.npz"), "layout": layout, "boundary": "outflow", "domain": [0, 1]}
    config = load_config(overlay(folder, section(folder, dt=0.1, **found), "mine"))
    [(_, findings)] = examine(
        [("mine", folder / "a.npz")],
        val_fraction=0.2,
        test_fraction=0.2,
        is_user=True,
        declared={"mine": lambda: open_user(config, "mine")},
    )
    try:
        build_cache(config, "mine", progress=False)
    except ValueError as error:
        assert "\n" not in str(error) and not config.cache_path("mine").exists()
        return str(error), findings
    return "", findings


@pytest.mark.parametrize("case", UNWRITTEN)
def test_what_was_never_written_is_refused_by_the_cache_and_the_doctor(tmp_path, case):
    u, words = UNWRITTEN[case]
    said, findings = built(tmp_path, u=u.astype(np.float32))
    assert words in said and "never written" in said
    assert any(
        one.severity == "error" and ("never written" in one.what or "constant" in one.what)
        for one in findings
    )


@pytest.mark.parametrize("make", WRITTEN)
def test_fields_that_are_still_or_zero_are_accepted(tmp_path, make):
    said, findings = built(tmp_path, u=make())
    assert said == "" and not any("written" in one.what for one in findings)


def test_a_field_may_be_zero_throughout_and_another_not(tmp_path):
    said, findings = built(tmp_path, u=waves(), v=np.zeros_like(waves()))
    assert said == "" and not any("written" in one.what for one in findings)


def test_a_group_that_was_declared_and_not_written_is_refused(tmp_path):
    """HDF5 gives no room to a contiguous array before it is written; only the first group was looked at."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i in range(N):
            array = file.create_dataset(f"{i:04d}/data", (T, X, X, 2), "f4")
            if i != 3:
                array[:] = np.random.default_rng(i).normal(size=array.shape)
            file[f"{i:04d}/grid/t"] = 0.1 * np.arange(T)
    with pytest.raises(ValueError, match="0 of 163840 bytes of /0003/data are there; expected all"):
        open_data(tmp_path / "a.h5", "diff_react2d")


@pytest.mark.parametrize("array", ["u", "nu", "x", "0001/u"])
def test_arrays_that_are_used_are_whole_and_others_need_not_be(tmp_path, array):
    said = {
        "files": str(tmp_path / "a.h5"),
        "boundary": "periodic",
        "dt": 0.1,
        "parameters": {"nu": "nu"},
        "layout": {"*/u": ["time", "x"]} if "/" in array else {"u": ["trajectory", "time", "x"]},
    }
    if array != "x":
        said["domain"] = [0, 1]
    path = overlay(tmp_path, said, "mine")
    for is_whole in (True, False):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("unused", (3,), "f4", chunks=(1,))  # nothing of it was written
            stored = {f"{i:04d}/u": u for i, u in enumerate(waves())} if "/" in array else {"u": waves()}
            for name, values in {**stored, "nu": np.linspace(1, 2, N), "x": (np.arange(X) + 0.5) / X}.items():
                if name == array and not is_whole:
                    file.create_dataset(name, values.shape, "f4", chunks=values.shape)
                else:
                    file[name] = values
        if is_whole:
            open_user(load_config(path), "mine")
        else:
            with pytest.raises(ValueError, match=f"0 of 1 chunks of /{array} are there; expected all"):
                open_user(load_config(path), "mine")


def test_netcdf_4_is_whole(tmp_path):
    xarray.Dataset({"u": (("b", "t", "x"), waves())}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with h5py.File(tmp_path / "a.nc", "a") as file:
        file.create_dataset("v", (N,), "f4", chunks=(1,)).dims[0].attach_scale(file["b"])
    with open_store(tmp_path / "a.nc") as store:
        store.require_whole("u")
        with pytest.raises(ValueError, match="0 of 6 chunks of /v are there; expected all"):
            store.require_whole("v")
