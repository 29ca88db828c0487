"""Files of users are read: every kind of file and order of axes gives the same numbers."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import h5netcdf
import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
import xarray
import yaml
import zarr
from user_files import DT, ROOT, SMALL, N, T, X, Y, config_of, overlay, read, section, waves, well_file, write

from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.sources import open_source
from ups.userdata.describe import describe_file
from ups.userdata.open_files import open_input, open_user_files
from ups.userdata.readers import open_here, open_store
from ups.userdata.readers.store import UNWRITTEN
from ups.userdata.writer import write_user_file


def kinds(folder, u):
    """Every way to write u (n, t, x): (name, section's changes)."""
    write(folder / "usual.h5", u=u)
    yield {"files": str(folder / "usual.h5")}
    write(folder / "turned.h5", data__v=u.transpose(2, 1, 0).astype(float))
    yield {
        "files": str(folder / "turned.h5"),
        "layout": {"u": {"array": "data/v", "axes": ["x", "time", "trajectory"]}},
    }
    np.save(folder / "one.npy", u.transpose(0, 2, 1))
    yield {"files": str(folder / "one.npy"), "layout": {"u": ["trajectory", "x", "time"]}}
    np.savez(folder / "some.npz", u=np.asfortranarray(u), t=DT * np.arange(T))
    yield {"files": str(folder / "some.npz"), "dt": "t"}
    (folder / "runs").mkdir()
    for i, one in enumerate(u):
        write(folder / "runs" / f"run_{i}.h5", u=one, attr_nu=0.1)
    yield {"files": str(folder / "runs" / "*.h5"), "layout": {"u": ["time", "x"]}}
    write(
        folder / "groups.h5",
        **{f"{i:04d}__data": one[..., None] for i, one in enumerate(u)},
        **{f"{i:04d}__grid__t": DT * np.arange(T) for i in range(N)},
    )
    yield {
        "files": str(folder / "groups.h5"),
        "layout": {"*/data": {"axes": ["time", "x", "channel"], "fields": ["u"]}},
        "dt": None,
    }
    with h5py.File(folder / "dims.nc", "w") as file:  # netCDF-4
        file["u"] = u
        for axis, name in enumerate(("trajectory", "time", "x")):
            file[name] = np.arange(u.shape[axis], dtype=float)
            file[name].make_scale(name)
            file["u"].dims[axis].attach_scale(file[name])
    yield {"files": str(folder / "dims.nc"), "domain": [0, X], "dt": 1.0}


def others(folder, u):
    """Files of other programs with u (n, t, x): (path, name of the array, its axes)."""
    usual, data = ["trajectory", "time", "x"], xarray.Dataset({"u": (("sample", "time", "x"), u)})
    for name, engine, form in (("a.nc", "h5netcdf", "NETCDF4"), ("b.nc", "scipy", "NETCDF3_64BIT")):
        data.to_netcdf(folder / name, engine=engine, format=form)  # dimensions without coordinates
        yield folder / name, "u", usual
    data.to_zarr(folder / "a.zarr")
    zarr.open_group(str(folder / "b.zarr"), mode="w").create_array("u", data=u)
    np.savez_compressed(folder / "a.npz", u=u)
    scipy.io.savemat(folder / "a.mat", {"u": u, "about": "text", "run": {"dt": DT}}, do_compression=True)
    torch.save({"run": [torch.from_numpy(u)]}, folder / "a.pt")
    np.save(folder / "whole.npy", (100 * u).round().astype(int))
    np.save(folder / "complex.npy", u - 1j)
    with h5py.File(folder / "7.3.mat", "w", userblock_size=512) as file:
        file["u"] = u.T
    (folder / "7.3.mat").write_bytes(
        b"MATLAB 7.3 MAT-file".ljust(512) + (folder / "7.3.mat").read_bytes()[512:]
    )
    for name in ("a.zarr", "b.zarr", "a.npz", "a.mat", "whole.npy"):
        yield folder / name, "u", usual
    yield folder / "a.pt", "run/0", usual
    yield folder / "complex.npy", "complex.real", usual
    yield folder / "7.3.mat", "u", usual[::-1]


class Runs:
    def __reduce__(self):
        return os.mkdir, ("was_run",)


class Unwritten:
    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (..., 0, (2**28,), (1,), False, None)


class Old(pickle.Pickler):
    """As torch wrote before 1.6."""

    def persistent_id(self, found):
        return ("storage", torch.FloatStorage, "key", "cpu", 2**28, None) if found is ... else None


TYPES = (
    *(f"{order}{kind}{size}" for kind in "iu" for size in (2, 4, 8) for order in "<>"),
    *("|i1", "|u1", "|b1", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "longdouble"),
    *("<c8", ">c8", "<c16", ">c16", "clongdouble"),
)


def as_type(u, kind):
    """The numbers u, from -1 to 1, in a type: whole ones are steps of 1/100."""
    dtype = np.dtype(kind)
    if dtype.kind in "iu":
        return (100 * u + 100 * (dtype.kind == "u")).round().astype(dtype)
    return (
        (u + 0.5j * u[::-1]).astype(dtype)
        if dtype.kind == "c"
        else (u > 0 if kind == "|b1" else u.astype(dtype))
    )


def in_netcdf(path, u, engine, **options):
    data = xarray.Dataset({"u": (("trajectory", "time", "x"), u)})
    data.to_netcdf(path, engine=engine, **options)


FORMS = {  # ending: (function that writes, errors for a type that the format does not have)
    "npy": (np.save, ()),
    "npz": (lambda path, u: np.savez(path, u=u), ()),
    "h5": (lambda path, u: write(path, u=u), ()),
    "4.nc": (lambda path, u: in_netcdf(path, u, "h5netcdf", invalid_netcdf=True), TypeError),
    "3.nc": (lambda path, u: in_netcdf(path, u, "scipy", format="NETCDF3_64BIT"), ValueError),
    "3.zarr": (lambda path, u: zarr.open_group(str(path)).create_array("u", data=u), ValueError),
    "2.zarr": (
        lambda path, u: zarr.open_group(str(path), zarr_format=2).create_array("u", data=u),
        ValueError,
    ),
    "mat": (lambda path, u: scipy.io.savemat(path, {"u": u}), KeyError),
    "7.3.mat": (lambda path, u: write(path, u=u), ()),
    "pt": (
        lambda path, u: torch.save({"u": torch.from_numpy(u.astype(u.dtype.newbyteorder("=")))}, path),
        TypeError,
    ),
}


@pytest.mark.parametrize("ending", FORMS)
def test_every_type_of_number_is_described_and_read(tmp_path, ending):
    (write_u, lacks), tasks = FORMS[ending], {}
    for number, kind in enumerate(TYPES):
        u, path = as_type(waves((12, 8, X)) / 2, kind), tmp_path / str(number) / f"u.{ending}"
        path.parent.mkdir()
        try:
            write_u(path, u)
        except lacks:
            continue
        [described] = yaml.safe_load(describe_file(str(path)))["task"].values()
        layout = tuple(described["layout"])
        if layout not in tasks:
            settings = section(tmp_path, files=str(path), layout=described["layout"])
            tasks[layout] = load_config(overlay(tmp_path, settings)).spec("ks")
        found = open_user_files(tasks[layout], [path]).read(0, 12)
        for field, part in enumerate([u.imag, u.real] if u.dtype.kind == "c" else [u]):
            assert np.array_equal(found[:, :, field], part.astype(np.float32)), (kind, ending)


def test_a_complex_array_is_two_fields(tmp_path):
    np.save(tmp_path / "u.npy", waves() * (1 + 1j))
    with pytest.raises(ValueError, match="holds complex.* Write u.real and u.imag, two fields"):
        read(tmp_path, files=str(tmp_path / "u.npy"))


def test_every_kind_of_file_and_order_of_axes_gives_the_same_numbers(tmp_path):
    u = waves()
    for settings in kinds(tmp_path, u):
        _, source, found = read(tmp_path, **settings)
        assert np.array_equal(found[:, :, 0], u), settings
        assert np.array_equal(source.read(2, 4), found[2:4]) and source.dt in (DT, 1.0)
        strided = config_of(tmp_path, **settings, space_stride=2, time_stride=2, first_frame=1)
        few = open_source(strided, "ks")
        assert np.array_equal(few.read(1, 3)[:, :, 0], u[1:3, 1::2, ::2]) and few.dt == 2 * source.dt


def test_files_of_other_programs_give_the_same_numbers(tmp_path):
    u = waves()
    for path, name, axes in others(tmp_path, u):
        *_, found = read(tmp_path, files=str(path), layout={name: axes})
        assert np.array_equal(found[:, :, 0], (100 * u).round() if path.stem == "whole" else u), path


def zarr_array(path, u, **options):
    group = zarr.open_group(path, mode="w", **options)
    group.create_array("u", shape=u.shape, chunks=(2, *u.shape[1:]), dtype=u.dtype)[:] = u


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zarr_store_in_a_zip_file_is_read(tmp_path):
    u = waves()
    store = zarr.storage.ZipStore(str(tmp_path / "a.zarr.zip"), mode="w")
    zarr_array(store, u)
    store.close()
    zarr_array(str(tmp_path / "b.zarr"), u)  # zipped with its folder
    shutil.make_archive(str(tmp_path / "b"), "zip", tmp_path, "b.zarr")
    for name in ("a.zarr.zip", "b.zip"):
        *_, found = read(tmp_path, files=str(tmp_path / name))
        assert np.array_equal(found[:, :, 0], u)
    with zipfile.ZipFile(tmp_path / "b.zip", "a") as archive:
        archive.writestr("b.zarr/zarr.json", "{}")
    with pytest.raises(ValueError, match="two files called 'b.zarr/zarr.json'"):
        open_store(tmp_path / "b.zip")
    shutil.rmtree(tmp_path / "b.zarr/u/c/1")
    shutil.make_archive(str(tmp_path / "c"), "zip", tmp_path, "b.zarr")
    with pytest.raises(ValueError, match=r"the chunk c/1/0/0 of u is missing"):
        read(tmp_path, files=str(tmp_path / "c.zip"))


def undecodable(folder):
    """(Name of a sound file that cannot be read here as it is, what its error says)."""
    u = waves()
    with h5py.File(folder / "filter.h5", "w") as file:  # as Blosc's files, with the number of no filter
        dtype, space = h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(u.shape)
        filters = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        filters.set_chunk(u.shape)
        filters.set_filter(32999, h5py.h5z.FLAG_OPTIONAL)
        dataset = h5py.h5d.create(file.id, b"u", dtype, space, filters)
        dataset.write_direct_chunk((0, 0, 0), u.tobytes())
    yield "filter.h5", r"/u is compressed by the HDF5 filter .*32999.*pip install hdf5plugin.*h5repack"
    shutil.copy(folder / "filter.h5", folder / "filter.nc")
    with h5py.File(folder / "filter.nc", "r+") as file:
        file.attrs["_NCProperties"] = "version=2"
        for axis, name in enumerate(("trajectory", "time", "x")):
            file[name] = np.arange(u.shape[axis], dtype=float)
            file[name].make_scale(name)
            file["u"].dims[axis].attach_scale(file[name])
    yield "filter.nc", r"/u is compressed by the HDF5 filter .*32999"
    for number, key in ((2, "compressor"), (3, "codecs")):
        zarr_array(str(folder / f"{number}.zarr"), u, zarr_format=number)
        about = folder / f"{number}.zarr/u" / ("zarr.json" if number == 3 else ".zarray")
        found = json.loads(about.read_text())
        found[key] = {"id": "zfpx"} if number == 2 else [found[key][0], {"name": "zfpx", "configuration": {}}]
        about.write_text(json.dumps(found))
        yield f"{number}.zarr", "encoded by a codec that is not installed .*zfpx.*pip install 'numcodecs"
    np.save(folder / "u.npy", u)
    for module, ending in ((gzip, "gz"), (bz2, "bz2"), (lzma, "xz")):
        (folder / f"u.npy.{ending}").write_bytes(module.compress((folder / "u.npy").read_bytes()))
        yield f"u.npy.{ending}", r"is compressed as a whole; .*Unpack it \((gunzip|bunzip2|unxz) -k\)"
    with zipfile.ZipFile(folder / "files.zip", "w") as archive:
        archive.write(folder / "filter.h5", "run_0.h5")
    yield "files.zip", r"is an archive of run_0.h5; .*Unpack it \(unzip\)"
    scipy.io.savemat(folder / "a.mat", {"S": scipy.sparse.eye(9).tocsc(), "c": np.array([{"a": 1}], object)})
    yield "a.mat", r"holds S \(sparse\), c \(cell\); expected arrays of numbers. In MATLAB: x = full\(S\)"


def test_sound_files_that_cannot_be_decoded_are_refused_by_what_is_missing(tmp_path):
    for name, message in undecodable(tmp_path):
        with pytest.raises(ValueError, match=message) as refused:
            describe_file(str(tmp_path / name))
        assert "damaged" not in str(refused.value) and "\n" not in str(refused.value)


def test_hdf5_with_filters_of_hdf5plugin_is_read(tmp_path):
    plugin = pytest.importorskip("hdf5plugin", reason="no hdf5plugin: pip install -r requirements-dev.txt")
    u = waves()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("u", data=u, chunks=True, **plugin.Blosc(cname="zstd"))
        file.create_dataset("v", data=u, chunks=True, **plugin.Zstd())
    both = {"u": ["trajectory", "time", "x"], "v": ["trajectory", "time", "x"]}
    *_, found = read(tmp_path, layout=both)
    assert np.array_equal(found[:, :, 0], u) and np.array_equal(found[:, :, 1], u)
    code = "import sys; from ups.userdata.describe import describe_file; describe_file(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "a.h5"], cwd=ROOT, check=True)  # imports no filter


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    xarray.Dataset({"u": (("sample", "time", "x"), waves())}).to_netcdf(tmp_path / "a.nc", engine="scipy")
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(
        ValueError, match="needs the library xarray, which is not installed.*pip install xarray"
    ):
        open_here(tmp_path / "a.nc")  # where the import fails


def test_no_object_of_a_torch_file_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"u": Runs()}, "a.pt")
    with pytest.raises(ValueError, match="a.pt holds more than tensors, or is cut off"):
        open_store("a.pt")
    assert not Path("was_run").exists()


def test_torch_files_are_no_larger_than_what_was_written(tmp_path):
    with (tmp_path / "old.pt").open("wb") as file:
        for part in (
            torch.serialization.MAGIC_NUMBER,
            torch.serialization.PROTOCOL_VERSION,
            {"little_endian": True},
        ):
            pickle.dump(part, file, 2)
        Old(file, 2).dump({"u": Unwritten()})
        pickle.dump([], file, 2)
    torch.save({"u": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "wide.pt")
    torch.save({"u": torch.zeros(3).to_sparse()}, tmp_path / "sparse.pt")
    for name, words in (
        ("old", "needs more than 256 MiB beside its numbers"),
        ("wide", "holds u of 4194304 MiB in 3.81e-06"),
        ("sparse", "holds more than tensors"),
    ):
        with pytest.raises(ValueError, match=f"{name}.pt {words}"):
            open_store(tmp_path / f"{name}.pt")


def test_a_well_file_says_all_of_itself(tmp_path):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y), 1), waves((N, T, X, Y), 2)], -1)
    well_file(tmp_path / "a.h5", u, v)
    config, source, found = read(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well"})
    task = config.spec("ks")
    assert task.fields == ("u", "v_x", "v_y", "depth")
    assert task.still == ("depth",)
    assert task.vector == ("v_x", "v_y")
    assert (
        task.boundary == "periodic,no_flux" and task.parameters == ("Re",) and source.dt == pytest.approx(DT)
    )
    assert config.task["ks"].domain == {"x": [0, 1], "y": [0, 1]} and source.space == (X, Y)
    assert np.array_equal(found[:, :, 0], u) and np.array_equal(found[:, :, 1], v[..., 0])
    assert np.array_equal(found[:, :, 3], np.broadcast_to(u[0, 0], u.shape))
    assert np.array_equal(source.parameters, np.full((N, 1), 100.0))
    assert "layout: well" in describe_file(str(tmp_path / "a.h5"))
    for none in ({}, []):  # what the user says stays, be it that there is none
        alone = {"files": str(tmp_path / "a.h5"), "layout": "well", "parameters": none}
        config = load_config(overlay(tmp_path, alone))
        assert config.spec("ks").parameters == () and config.spec("ks").boundary == "periodic,no_flux"


def written(path, source, found):
    """The trajectories of a file to which what was read of `source` is written."""
    num, frames = found.shape[:2]
    write_user_file(
        path,
        source.task,
        lambda indices: found[indices],
        num,
        source.space,
        chunk=7,
        times=source.dt * np.arange(frames),
        parameters=source.parameters,
    )
    return open_input(source.task, path, source.dt, [])


def test_what_is_written_is_read_again(tmp_path):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y), 1), waves((N, T, X, Y), 2)], -1)
    well_file(tmp_path / "a.h5", u, v)
    _, source, found = read(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well"})
    again = written(tmp_path / "b.hdf5", source, found)
    assert np.array_equal(again.read(0, N), found) and again.dt == pytest.approx(DT)
    assert np.array_equal(again.parameters, source.parameters)


def test_coordinates_in_float32_stand_for_the_numbers_that_were_meant(tmp_path):
    write(
        tmp_path / "a.h5",
        u=waves(),
        t=(0.02 * np.arange(T)).astype(np.float32),
        x=(0.1 * np.arange(X)).astype(np.float32),
    )
    config = read(tmp_path, dt=None, domain=None)[0]
    assert config.task["ks"].dt == 0.02 and config.task["ks"].domain == {"x": [0.0, 1.6]}


def test_uneven_latitudes_count_as_even_if_the_domain_is_set(tmp_path):
    lat = np.linspace(-80, 80, X) + np.linspace(-1, 1, X) ** 3
    u = xarray.Dataset(
        {"T": (("run", "time", "lat", "lon"), waves((30, T, X, Y))[:, :, ::-1])},
        {"lat": ("lat", lat[::-1]), "lon": ("lon", np.arange(Y) * 360 / Y), "time": DT * np.arange(T)},
    )
    u.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    text = describe_file(str(tmp_path / "a.nc"))
    assert "lat has steps of" in text and "channel" not in yaml.safe_load(text)["task"]["a"]["layout"]["T"]
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    source = open_source(config, "a")
    assert config.task["a"].boundary == "no_flux,periodic" and config.task["a"].flipped == ["lat"]
    assert "the cells of lat are uneven, and counted as equal" in source.notes
    assert np.array_equal(source.read(0, 30)[:, :, 0], waves((30, T, X, Y)))
    with pytest.raises(
        ValueError, match=r"lat in .* in steps of .*; expected equal steps\. Write domain: \{lat: \["
    ):
        config_of(
            tmp_path,
            files=str(tmp_path / "a.nc"),
            dt=None,
            boundary="no_flux",
            domain=None,
            layout={"T": ["trajectory", "time", "lat", "lon"]},
        )


def test_times_are_found_under_the_name_of_their_axis(tmp_path):
    u = xarray.Dataset(
        {"T": (("valid_time", "x"), waves((1, 60, X))[0])},
        {
            "valid_time": ("valid_time", 6.0 * np.arange(60), {"units": "hours since 2000-01-01"}),
            "x": np.arange(X),
        },
    )
    u.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    text = describe_file(str(tmp_path / "a.nc"))
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    task = load_config(tmp_path / "my.yaml").task["a"]
    assert (task.layout["T"].axes, task.dt, task.units["time"]) == (["time", "x"], 6.0, "hours")


def test_the_repeated_last_cell_of_a_periodic_axis_is_dropped(tmp_path):
    u = waves((20, T, X, Y))
    closed = np.concatenate([u, u[:, :, :1]], 2)
    for name, x in {"rising": np.arange(X + 1.0), "falling": np.arange(X, -1.0, -1)}.items():
        path = write(
            tmp_path / f"{name}.h5",
            u=closed if name == "rising" else closed[:, :, ::-1],
            x=x,
            t=DT * np.arange(T),
        )
        assert yaml.safe_load(describe_file(str(path)))["task"][name]["repeated"] == ["x"]
        settings = section(
            tmp_path,
            files=str(path),
            layout={"u": ["trajectory", "time", "x", "y"]},
            domain={"y": [0, 1]},
            dt=None,
        )
        config, source, found = read(tmp_path, {**settings, "repeated": ["x"]})
        turned = int(name == "falling")  # the last cell that is stored is the first one then
        assert config.task["ks"].domain["x"] == [turned, X + turned]
        assert np.array_equal(found[:, :, 0], np.roll(u, -turned, 2))
        assert np.array_equal(written(tmp_path / "w.hdf5", source, found).read(0, 20), found)
        (tmp_path / "w.hdf5").unlink()
    with pytest.raises(ValueError, match="task.ks.repeated: it names 'y'; expected periodic axes: x"):
        read(tmp_path, {**settings, "repeated": ["y"], "boundary": {"x": "periodic", "y": "no_flux"}})


def test_no_window_crosses_a_gap_in_time(tmp_path):
    times, run = np.delete(np.arange(40.0), [7, 8, 22]), waves((1, 40, X))[0]
    write(tmp_path / "a.h5", u=np.delete(run, [7, 8, 22], 0), t=times * DT)
    settings = section(tmp_path, layout={"u": ["time", "x"]}, cut=4, dt=None)
    for dt in (None, DT):  # 37 frames: 7, 13 and 17 between the gaps
        config, source, found = read(tmp_path, {**settings, "dt": dt})
        assert source.dt == DT and "gaps in the times at 2 places: no window crosses them" in source.notes
        assert np.array_equal(found[:, :, 0], [run[i : i + 4] for i in (0, 9, 13, 17, 23, 27, 31, 35)])
    assert "t has 2 steps other than 0.5: no window crosses" in describe_file(str(tmp_path / "a.h5"))
    with pytest.raises(
        ValueError, match=r"task.ks.cut: no 20 frames follow each other, as times have 2 gaps"
    ):
        read(tmp_path, {**settings, "cut": 20})
    write(tmp_path / "a.h5", u=run, t=np.cumsum(np.tile([31.0, 30, 31, 28, 29], 8)))  # months are no gaps
    with pytest.raises(ValueError, match="steps of 28 to 31; expected equal"):
        read(tmp_path, settings)
    assert len(read(tmp_path, {**settings, "dt": 30.0})[2]) == 10


def test_packed_numbers_are_unpacked_and_missing_ones_are_nan(tmp_path):
    u = waves()
    packed = np.round((u - 5) / 1e-3).astype(np.int16)
    write(tmp_path / "a.h5", u=packed)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["u"].attrs.update(scale_factor=1e-3, add_offset=5.0, _FillValue=np.int16(-32768))
    *_, values = read(tmp_path)
    assert np.abs(values[:, :, 0] - u).max() < 1e-3
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["u"][2, 3, 4] = -32768
    *_, values = read(tmp_path)
    assert np.isnan(values[2, 3, 0, 4]) and np.isnan(values).sum() == 1
    # no cache is made of it
    with pytest.raises(ValueError, match="holds nan in u of trajectory 2, frame 3; expected finite"):
        build_cache(config_of(tmp_path), "ks", progress=False)
    write(tmp_path / "a.h5", u=np.where(u == u[1, 1, 1], np.float32(9.96921e36), u))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["u"].attrs["missing_value"] = np.float32(9.96921e36)
    *_, values = read(tmp_path)
    assert np.isnan(values[1, 1, 0, 1]) and not (values > 1e30).any() and values.dtype == np.float32


@pytest.mark.parametrize("library", ["zarr", "scipy", "h5netcdf"])
def test_other_formats_unpack_the_same_way(tmp_path, library):
    u = waves()
    packed, about = np.round((u - 5) / 1e-3).astype(np.int16), {"scale_factor": 1e-3, "add_offset": 5.0}
    if library == "zarr":
        root = zarr.open(str(tmp_path / "a.zarr"), mode="w")
        root["u"] = packed
        root["u"].attrs.update(about)
    else:
        xarray.Dataset({"u": (("b", "t", "x"), packed, about)}).to_netcdf(tmp_path / "a.nc", engine=library)
    [path] = tmp_path.glob("a.*")
    with open_store(path) as store:
        assert np.abs(store.read("u", (slice(None),) * 3) - u).max() < 1e-3


def test_netcdf_4_is_read_as_xarray_reads_it(tmp_path):
    u = waves((4, T, X)).astype(np.float32)
    with h5netcdf.File(tmp_path / "a.nc", "w") as file:
        file.dimensions = {"run": 4, "time": T, "x": X}
        file.create_variable("x", ("run", "x"), data=u[:, 0])  # named as a dimension, and no coordinate
        file.create_variable("time", ("time",), data=DT * np.arange(T))
        file.create_variable("plain", ("run", "time", "x"), data=np.where(u > 0.9, UNWRITTEN, u).astype("f4"))
        file.create_variable("bytes", ("run", "x"), data=(50 * u[:, 0]).astype("i1")).attrs["_Unsigned"] = (
            "true"
        )
        packed = file.create_group("flow").create_variable(
            "u", ("run", "time", "x"), data=(100 * u).astype("i2")
        )
        packed.attrs.update(scale_factor=0.01, missing_value=np.array([7, 9], "i2"), units="m s-1")
    options = {"engine": "h5netcdf", "decode_times": False, "decode_coords": False}
    with open_store(tmp_path / "a.nc") as store:
        assert store.names() == ["bytes", "flow/u", "plain", "time", "x"]
        for group, names in (("/", ("bytes", "plain", "time", "x")), ("/flow", ("u",))):
            with xarray.open_dataset(tmp_path / "a.nc", group=group, **options) as dataset:
                for name in names:
                    found, array = f"{group}/{name}".lstrip("/"), dataset.variables[name]
                    assert (store.array(found).axes, store.array(found).dtype) == (array.dims, array.dtype)
                    expected = np.where(array.values == UNWRITTEN, np.nan, array.values)
                    np.testing.assert_array_equal(store.whole(found), expected)
        assert store.attributes("flow/u")["units"] == "m s-1" and store.array("run") is None
