"""Data of one's own, declared: every kind of file and order of axes gives the same numbers, what is described
loads, and each wrong description gets the line that says what to write where."""

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
import torch
import xarray
import yaml
import zarr

import prepare_data
from ups.commands import stages
from ups.config import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.data.doctor import examine
from ups.data.sources import open_sources, open_user, split_of, table_of
from ups.evaluation.forecast import assess_forecasts
from ups.evaluation.gates import check_usability
from ups.evaluation.truth import open_truth
from ups.forecast_xarray import label, unlabel
from ups.forecaster import Forecaster
from ups.generative.residuals import StateConditions
from ups.generative.sampling import sample_rollout
from ups.models.base_selection import fit_base
from ups.models.operator import build_operator
from ups.models.windows import symmetry
from ups.report.report import write_report, write_results
from ups.tasks import described_task
from ups.userdata.data_checks import walls
from ups.userdata.describe import describe_file
from ups.userdata.open_files import open_user_files
from ups.userdata.readers import open_store
from ups.userdata.writer import write_user_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "configs" / "small.yaml"
N, T, X, Y = 6, 5, 16, 8
DT = 0.5


def waves(shape=(N, T, X), seed=0):
    """Smooth periodic fields (trajectory, time, *space)."""
    draw, (num, frames, *space) = np.random.default_rng(seed), shape
    phase = draw.random((num, 1) + (1,) * len(space)) * 6.28
    t = np.arange(frames).reshape(1, -1, *[1] * len(space))
    u = np.zeros(shape)
    for axis, n in enumerate(space):
        x = 2 * np.pi * np.arange(n) / n
        u = u + np.sin(x.reshape([-1 if i == axis else 1 for i in range(len(space))]) + phase + 0.3 * t)
    return u.astype(np.float32)


GROWING = waves() * (1 + np.arange(T)[:, None]) + np.arange(T)[:, None]  # its mean moves, its range widens


def write(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if name.startswith("attr_"):
                file.attrs[name[5:]] = values
            else:
                file[name.replace("__", "/")] = values
    return path


def overlay(folder, section, **more):
    given = {
        "include": str(SMALL),
        "data": {"tasks": ["ks"], "source": "user"},
        "cache": {"root": str(folder / "cache")},
        "task": {"ks": section},
        **more,
    }
    path = folder / "my_data.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def section(folder, **changes):
    said = {
        "files": str(folder / "*.h5"),
        "layout": {"u": ["trajectory", "time", "x"]},
        "boundary": "periodic",
        "domain": [0, 22],
        "dt": DT,
    }
    return {key: value for key, value in {**said, **changes}.items() if value is not None}


def read(folder, said):
    config = load_config(overlay(folder, said))
    [source] = open_sources(config, "ks")
    return config, source, source.read(0, source.num_trajectories)


# ---------------------------------------------------------------- what is read


def well_file(path, u, v):
    """A file to the specification of The Well: scalars u (n, t, x, y), vectors v (n, t, x, y, 2)."""
    with h5py.File(path, "w") as file:
        file.attrs.update(
            dataset_name="mine",
            grid_type="cartesian",
            n_spatial_dims=2,
            n_trajectories=len(u),
            simulation_parameters=["Re"],
            Re=100.0,
        )
        space = file.create_group("dimensions")
        space.attrs["spatial_dims"] = ["x", "y"]
        for name, values in (
            ("time", DT * np.arange(u.shape[1])),
            ("x", (np.arange(X) + 0.5) / X),
            ("y", (np.arange(Y) + 0.5) / Y),
        ):
            space[name] = values.astype(np.float32)
            space[name].attrs.update(sample_varying=False, time_varying=False)
        for axis, kind in (("x", "PERIODIC"), ("y", "WALL")):
            group = file.create_group(f"boundary_conditions/{axis}_{kind.lower()}")
            group.attrs.update(
                associated_dims=[axis],
                associated_fields=[],
                bc_type=kind,
                sample_varying=False,
                time_varying=False,
            )
            group["mask"] = np.ones(1, bool)
        scalars = file.create_group("scalars")
        scalars.attrs["field_names"] = ["Re"]
        scalars["Re"] = 100.0
        scalars["Re"].attrs.update(sample_varying=False, time_varying=False)
        for order, fields in enumerate(({"u": u, "depth": u[0, 0]}, {"v": v}, {})):
            group = file.create_group(f"t{order}_fields")
            group.attrs["field_names"] = list(fields)
            for name, values in fields.items():
                group[name] = values
                is_still = values.ndim == 2
                group[name].attrs.update(
                    dim_varying=[True, True], sample_varying=not is_still, time_varying=not is_still
                )


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
    yield {"files": str(folder / "groups.h5"), "layout": "pdebench", "dt": None}
    with h5py.File(folder / "dims.nc", "w") as file:  # netCDF-4
        file["u"] = u
        for axis, name in enumerate(("trajectory", "time", "x")):
            file[name] = np.arange(u.shape[axis], dtype=float)
            file[name].make_scale(name)
            file["u"].dims[axis].attach_scale(file[name])
    yield {"files": str(folder / "dims.nc"), "domain": [0, X], "dt": 1.0}


def test_every_kind_of_file_and_order_of_axes_gives_the_same_numbers(tmp_path):
    u = waves()
    for said in kinds(tmp_path, u):
        _, source, found = read(tmp_path, section(tmp_path, **said))
        assert np.array_equal(found[:, :, 0], u), said
        assert np.array_equal(source.read(2, 4), found[2:4]) and source.dt in (DT, 1.0)
        strided = load_config(
            overlay(tmp_path, section(tmp_path, **said, space_stride=2, time_stride=2, first_frame=1))
        )
        [few] = open_sources(strided, "ks")
        assert np.array_equal(few.read(1, 3)[:, :, 0], u[1:3, 1::2, ::2]) and few.dt == 2 * source.dt


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


def test_files_of_other_programs_give_the_same_numbers(tmp_path):
    u = waves()
    for path, name, axes in others(tmp_path, u):
        *_, found = read(tmp_path, section(tmp_path, files=str(path), layout={name: axes}))
        assert np.array_equal(found[:, :, 0], (100 * u).round() if path.stem == "whole" else u), path


def test_axes_are_turned_to_rise_and_forecasts_turned_back(tmp_path):
    """y falls in one file; x is a column; what is written is as the file was, and a stride keeps the same
    cells."""
    u, x, t = waves((N, T, X, Y)), np.arange(X)[:, None] / X, DT * np.arange(T)
    y = np.linspace(1, 0, Y, endpoint=False)
    said = {
        "layout": {"u": ["trajectory", "time", "x", "y"]},
        "domain": None,
        "dt": None,
        "boundary": {"x": "periodic", "y": "no_flux"},
    }
    write(tmp_path / "up.h5", u=u, x=x, y=y[::-1], t=t)
    write(tmp_path / "down.h5", u=u[..., ::-1], x=x, y=y, t=t)
    for stride in (2, 1):
        config, source, found = read(
            tmp_path, section(tmp_path, files=str(tmp_path / "down.h5"), space_stride=stride, **said)
        )
        assert np.array_equal(found[:, :, 0], u[..., ::stride, ::stride])
        both = read(tmp_path, section(tmp_path, files=str(tmp_path / "*.h5"), space_stride=stride, **said))[2]
        assert np.array_equal(both, np.concatenate([found, found]))
    task = config.spec("ks")
    write_user_file(
        tmp_path / "w.hdf5",
        task,
        lambda indices: found[indices],
        N,
        T,
        (X, Y),
        chunk=4,
        times=t,
        parameters=source.parameters,
    )
    with h5py.File(tmp_path / "w.hdf5") as file:
        assert np.array_equal(file["u"], u[..., ::-1])
    assert task.user_facts["flipped"] == ["y"] and np.array_equal(
        open_user_files(task, [tmp_path / "w.hdf5"]).read(0, N), found
    )
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
    said = section(
        tmp_path,
        files=str(tmp_path / "t.nc"),
        layout={"T": ["trajectory", "time", "lat", "lon"]},
        domain=[],
        boundary="no_flux",
        dt=0.0,
    )
    config, _, _ = read(tmp_path, said)
    assert config.task["ks"].units == {"T": "K", "time": "days", "lat": "degrees_north"}
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    assert (
        cache.scene()["labels"] == ["lat (degrees_north)", "lon"]
        and cache.scene()["time"] == "lead time (days)"
    )
    fitted = fit_base(cache, 1, 1, 0, torch.device("cpu"))
    model = Forecaster(build_operator({"ks": fitted}, config.operator.model, "no"))
    frames = model.forecast("ks", data[["T"]].isel(run=0, time=[0]), num_frames=2)
    assert (
        frames["T"].attrs["units"]
        == model.forecast("ks", data["T"].isel(run=0, time=[0])).attrs["units"]
        == "K"
    )
    assert "T (K)" in repr(model) and "dt 2 days" in repr(model) and "T - " in cache.scene()["fields"][0]
    assert read(tmp_path, {**said, "units": {"T": "degC"}})[0].task["ks"].units["T"] == "degC"
    for units, words in (({"q": "K"}, "'q'"), (["K"], "it is"), ({"T": 1}, "it is")):
        with pytest.raises(ValueError, match=words):
            read(tmp_path, {**said, "units": units})


def test_a_long_run_is_cut_into_windows_and_split_in_time(tmp_path):
    run = waves((1, 43, X))[0]
    write(tmp_path / "a.h5", u=run)
    cut = section(tmp_path, layout={"u": ["time", "x"]}, cut=4)
    config, source, found = read(tmp_path, cut)
    assert (
        np.array_equal(found[:, :, 0].reshape(-1, X), run[:40])
        and "cut into 10 windows of 4 frames" in source.notes
    )
    parts = split_of(config, "ks", [source])
    assert [parts[name].tolist() for name in ("train", "val", "test")] == [[*range(8)], [8], [9]]
    *_, few = read(tmp_path, {**cut, "first_frame": 2, "time_stride": 2})
    assert np.array_equal(few[1, :, 0], run[[6, 8]])
    build_cache(config, "ks", progress=False)
    write(tmp_path / "b.h5", u=waves((12, 9, X)))  # whole runs where there are enough
    config, source, found = read(tmp_path, section(tmp_path, files=str(tmp_path / "b.h5"), cut=4))
    runs = {name: {*(rows // 2).tolist()} for name, rows in split_of(config, "ks", [source]).items()}
    assert len(found) == 24 and not runs["test"] & (runs["train"] | runs["val"])
    write(tmp_path / "a.h5", u=run[:12])  # three windows
    _, source, _ = read(tmp_path, {**cut, "files": str(tmp_path / "a.h5")})
    for shares in ((0.1, 0.1), (0.1, 0.4), (0.4, 0.4)):  # no window is in two parts, whatever is asked
        try:
            parts = source.split(*shares)
        except ValueError as error:
            assert "its windows leave none for train" in str(error)
        else:
            assert sorted(np.concatenate([*parts.values()])) == [0, 1, 2]
    write(tmp_path / "a.h5", u=run)
    with pytest.raises(
        ValueError, match="task.ks.cut: it is 44; expected 2 to 43, the frames of a run. Write cut: 2"
    ):
        read(tmp_path, {**cut, "files": str(tmp_path / "a.h5"), "cut": 44})


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    xarray.Dataset({"u": (("sample", "time", "x"), waves())}).to_netcdf(tmp_path / "a.nc", engine="scipy")
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(
        ValueError, match="needs the library xarray, which is not installed.*pip install xarray"
    ):
        open_store(tmp_path / "a.nc")


class Runs:
    def __reduce__(self):
        return os.mkdir, ("was_run",)


def test_no_object_of_a_torch_file_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"u": Runs()}, "a.pt")
    with pytest.raises(ValueError, match="a.pt holds more than tensors, or is cut off"):
        open_store("a.pt")
    assert not Path("was_run").exists()


class Unwritten:
    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (..., 0, (2**28,), (1,), False, None)


class Old(pickle.Pickler):
    """As torch wrote before 1.6."""

    def persistent_id(self, found):
        return ("storage", torch.FloatStorage, "key", "cpu", 2**28, None) if found is ... else None


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
        ("old", "speaks of more bytes of tensors than it holds"),
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
    assert (
        task.fields == ("u", "v_x", "v_y", "depth")
        and task.still == ("depth",)
        and task.vector == ("v_x", "v_y")
    )
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


def test_a_task_of_its_own_travels_as_plain_values(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, Y)))
    said = section(
        tmp_path,
        layout={"u": ["trajectory", "time", "x", "y"]},
        domain={"x": [0, 2], "y": [-1, 1]},
        boundary={"x": "periodic", "y": "no_flux"},
        conserved=["u"],
        symmetries=["mirror"],
    )
    config = load_config(overlay(tmp_path, said))
    task = config.spec("ks")
    again = described_task(yaml.safe_load(yaml.safe_dump(task.description)))
    assert again == task and again.user_facts == task.user_facts and hash(again) == hash(task)
    assert (task.is_symmetric, task.is_shifted, task.spans) == (True, False, ((0, 2), (-1, 1)))
    assert config.task["ks"].patch == 2 and config.task["ks"].cells(2) == (X, Y) and config.context("ks") == 1


def test_parameters_come_from_attributes_arrays_and_names_and_split_what_shares_its_starts(tmp_path):
    u = waves()
    for nu in (0.1, 0.2):
        write(tmp_path / f"burgers_nu{nu}_a.h5", u=u, attr_nu=nu, Re=np.arange(N) + nu)
    for place in ("nu", "burgers_nu{}_*"):
        config, source, _ = read(tmp_path, section(tmp_path, parameters={"nu": place}))
        assert source.parameters[:, 0].tolist() == [0.1] * N + [0.2] * N
        parts = split_of(config, "ks", [source])
        assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(2 * N))
        assert {*(parts["test"] % N).tolist()}.isdisjoint((parts["train"] % N).tolist())
        table = table_of(config, "ks", [source])
        assert table.values == [[0.1], [0.2]] and table.index.tolist() == [0] * N + [1] * N
    config, source, _ = read(tmp_path, section(tmp_path, parameters={"Re": "Re"}))
    assert np.allclose(source.parameters[:, 0], np.concatenate([np.arange(N) + 0.1, np.arange(N) + 0.2]))
    assert len(table_of(config, "ks", [source]).values) == 8
    assert (source.starts == np.tile(np.arange(N), 2)).all()  # by their first frames, which are the same


def test_files_in_folders_are_split_by_them(tmp_path):
    for number, name in enumerate(("train", "valid", "test")):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.h5", u=waves(seed=number))
    config, source, _ = read(tmp_path, section(tmp_path, files=str(tmp_path / "*" / "*.h5")))
    parts = split_of(config, "ks", [source])
    names = {
        part: {source.files[i].path.parent.name for i in source.rows[rows, 0]} for part, rows in parts.items()
    }
    assert names == {"train": {"train"}, "val": {"valid"}, "test": {"test"}}
    by_index = split_of(
        load_config(overlay(tmp_path, section(tmp_path, files=str(tmp_path / "*" / "*.h5"), split="index"))),
        "ks",
        [source],
    )
    assert len(by_index["train"]) == 3 * N or len(by_index["train"]) > 0


def test_what_is_written_is_read_again(tmp_path):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y), 1), waves((N, T, X, Y), 2)], -1)
    well_file(tmp_path / "a.h5", u, v)
    config, source, found = read(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well"})
    task = config.spec("ks")
    write_user_file(
        tmp_path / "b.hdf5",
        task,
        lambda indices: found[indices],
        N,
        T,
        (X, Y),
        chunk=4,
        times=DT * np.arange(T),
        parameters=source.parameters,
    )
    again = open_user_files(task, [tmp_path / "b.hdf5"])
    assert np.array_equal(again.read(0, N), found) and again.dt == pytest.approx(DT)
    assert np.array_equal(again.parameters, source.parameters)


# ---------------------------------------------------------------- what is described


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_description_loads_once_its_questions_are_answered(tmp_path, coordinates):
    known = {"t": DT * np.arange(T), "x": 22 / X * np.arange(X)} if coordinates else {}
    path = write(tmp_path / "a.h5", u=waves(), **known, attr_nu=0.1)
    text = describe_file(str(path))
    said = yaml.safe_load(text)
    assert said["task"]["a"]["layout"] == {"u": ["trajectory", "time", "x"]}
    assert said["task"]["a"]["boundary"] == "periodic" and "is nu = 0.1 another in further files" in text
    assert ("dt: 1.0" in text, "domain" in said["task"]["a"]) == (
        (False, False) if coordinates else (True, True)
    )
    assert ("are these its axes" in text) != coordinates
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    assert config.task["a"].dt == (DT if coordinates else 1.0)
    assert [source.num_trajectories for source in open_sources(config, "a")] == [N]


def test_axes_in_another_order_are_found_by_their_coordinates(tmp_path):
    path = write(tmp_path / "a.h5", u=waves().transpose(2, 0, 1), t=DT * np.arange(T), x=np.arange(X) * 1.0)
    assert yaml.safe_load(describe_file(str(path)))["task"]["a"]["layout"] == {
        "u": ["x", "trajectory", "time"]
    }


def test_a_description_finds_axes_by_arrays_of_any_name_and_parameters_by_what_differs(tmp_path):
    """A list in even steps is a coordinate, any other a parameter; an attribute is one where files differ."""
    draw = np.random.default_rng(0)
    for number in (1, 2):
        write(
            tmp_path / f"run{number}.h5",
            sim__vel=waves().transpose(2, 1, 0),
            xgrid=22 / X * np.arange(X),
            tgrid=DT * np.arange(T),
            visc=draw.random(N),
            attr_Re=100.0 * number,
            attr_box=22.0,
        )
    text = describe_file(str(tmp_path / "run1.h5"))
    said = yaml.safe_load(text)["task"]["run"]
    assert said["layout"] == {"sim/vel": ["x", "time", "trajectory"]} and "are these its axes" not in text
    assert (said["domain"], said["dt"]) == ({"x": "xgrid"}, "tgrid")
    assert (
        said["parameters"] == {"Re": "Re", "visc": "visc"} and "is box = 22 another in further files" in text
    )
    assert said["files"].endswith("run*.h5") and "conserved: [vel]" in text
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    [source] = open_sources(config, "run")
    assert (
        config.spec("run").fields == ("vel",)
        and source.dt == DT
        and config.task["run"].domain == {"x": [0, 22]}
    )
    assert np.array_equal(source.read(0, N)[:, :, 0], waves())


def test_the_step_may_be_an_attribute_and_is_written_as_one(tmp_path):
    write(tmp_path / "a.h5", u=waves(), attr_every=DT)
    config, source, found = read(tmp_path, section(tmp_path, dt="every"))
    assert source.dt == DT and config.task["ks"].times == "@every"
    write_user_file(
        tmp_path / "b.hdf5",
        config.spec("ks"),
        lambda indices: found[indices],
        N,
        T,
        (X,),
        chunk=4,
        times=DT * np.arange(T),
        parameters=source.parameters,
    )
    assert open_user_files(config.spec("ks"), [tmp_path / "b.hdf5"]).dt == DT
    write(tmp_path / "c.h5", u=waves(), attr_every=2 * DT)
    with pytest.raises(ValueError, match="frames of .*c.h5 are 1 apart; expected 0.5"):
        read(tmp_path, section(tmp_path, dt="every"))


def test_coordinates_in_float32_stand_for_the_numbers_that_were_meant(tmp_path):
    write(
        tmp_path / "a.h5",
        u=waves(),
        t=(0.02 * np.arange(T)).astype(np.float32),
        x=(0.1 * np.arange(X)).astype(np.float32),
    )
    config = read(tmp_path, section(tmp_path, dt=None, domain=None))[0]
    assert config.task["ks"].dt == 0.02 and config.task["ks"].domain == {"x": [0.0, 1.6]}


def test_what_is_shown_of_a_configuration_is_one_of_the_tasks_asked_for(tmp_path, capsys):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y), 1)] * 2, -1)
    well_file(tmp_path / "a.h5", u, v)
    path = overlay(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well", "bounded": True})
    assert prepare_data.main(["--config", str(path), "--show-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text, encoding="utf-8")
    said = load_config(tmp_path / "shown.yaml").task["ks"]
    assert [*yaml.safe_load(text)["task"]] == ["ks"] and said == load_config(path).task["ks"]
    assert said.bounded == ["u", "v_x", "v_y"]  # what is given needs no bound


@pytest.mark.parametrize(
    ("shapes", "layout"),
    {
        "a pair of maps": ({"a": (40, 16, 16), "u": (40, 16, 16)}, ["trajectory", "x", "y"]),
        "maps of one channel": (
            {"a": (40, 1, 16, 12), "u": (40, 1, 16, 12)},
            ["trajectory", "single", "x", "y"],
        ),
        "channels behind time": ({"u": (12, 6, 3, 32, 16)}, ["trajectory", "time", "channel", "x", "y"]),
        "channels last": ({"u": (12, 6, 32, 16, 4)}, ["trajectory", "time", "x", "y", "channel"]),
        "a film": ({"u": (40, 16, 16)}, ["time", "x", "y"]),
        "trajectories": ({"u": (40, 10, 16)}, ["trajectory", "time", "x"]),
    }.values(),
)
def test_axes_without_names_are_read_in_their_usual_order(tmp_path, shapes, layout):
    """Or otherwise, which the description offers where the shapes allow it."""
    draw, is_film = np.random.default_rng(0), layout[0] == "time"
    u = {
        name: draw.standard_normal(shape).cumsum(0) if is_film else draw.standard_normal(shape)
        for name, shape in shapes.items()
    }
    text = describe_file(str(write(tmp_path / "a.h5", **u)))
    said = yaml.safe_load(text)["task"]["a"]
    assert said["layout"] == dict.fromkeys(shapes, layout) and (said.get("inputs") == ["a"]) == (
        len(shapes) == 2
    )
    assert ("# or " in text) == (len(layout) == 3)


def test_files_that_differ_in_a_number_are_one_set_where_it_counts_them(tmp_path):
    """Dates and counts are of runs; other numbers may be of noise or a parameter, which is asked."""
    names = {
        "dates": ("ta_195801-195812", "ta_195901-195912", "ta_*-*", False),
        "counts": ("r_9_a", "r_10_a", "r_*_a", False),
        "noise": ("n_1", "n_5", "n_*", True),
        "scenarios": ("ssp126_2015", "ssp585_2016", "ssp*_*", True),
        "other": ("x_1", "x_2", "x_*", True),
    }
    for first, second, pattern, is_asked in names.values():
        for name in (first, second, "x_old"):
            write(tmp_path / f"{name}.h5", u=waves())
        [line] = [
            line for line in describe_file(str(tmp_path / f"{first}.h5")).splitlines() if "files:" in line
        ]
        assert f'/{pattern}.h5"' in line and line.endswith("?") == is_asked, line


def test_uneven_latitudes_count_as_even_where_the_domain_is_said(tmp_path):
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
    [source] = open_sources(config, "a")
    assert config.task["a"].boundary == "no_flux,periodic" and config.task["a"].flipped == ["lat"]
    assert "the cells of lat are uneven, and counted as equal" in source.notes
    assert np.array_equal(source.read(0, 30)[:, :, 0], waves((30, T, X, Y)))
    with pytest.raises(
        ValueError, match=r"lat in .* in steps of .*; expected equal steps\. Write domain: \{lat: \["
    ):
        load_config(
            overlay(
                tmp_path,
                section(
                    tmp_path,
                    files=str(tmp_path / "a.nc"),
                    dt=None,
                    boundary="no_flux",
                    domain=None,
                    layout={"T": ["trajectory", "time", "lat", "lon"]},
                ),
            )
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


@pytest.mark.parametrize(
    ("cells", "waves_of", "said"),
    {
        "smooth": (64, 3.0, None),
        "at its limit": (64, 60.0, "waves of two to three cells along x hold"),
        "a prime": (32_771, 3.0, "32,771 tokens.*space_stride: 2"),
    }.values(),
)
def test_the_doctor_says_what_a_grid_loses_and_costs(tmp_path, cells, waves_of, said):
    """A spectrum that it cuts off, and cells that no patch divides; neither is an error."""
    t, x = np.arange(6.0)[:, None], 2 * np.pi * np.arange(cells) / cells
    u = np.stack([np.sin(x + i + t) + 0.1 * np.sin(waves_of // 2 * x + 2 * i - t) for i in range(20)])
    config, *_ = read(tmp_path, section(tmp_path, files=str(write(tmp_path / "a.h5", u=u))))
    [(path, findings)] = examine(
        [("ks", tmp_path / "a")],
        val_fraction=0.2,
        test_fraction=0.3,
        declared={"ks": lambda: open_user(config, "ks")},
    )
    cautions = [f"{one.what} {one.do}" for one in findings if one.severity == "caution"]
    assert {one.severity for one in findings} <= {"caution", "info"} and bool(cautions) == bool(said)
    assert not said or re.search(said, " ".join(cautions))


def test_files_whose_dates_follow_each_other_are_split_in_time_as_one_record(tmp_path):
    for year, days in ((2003, 730), (2001, 0), (2002, 365)):
        xarray.Dataset(
            {"T": (("time", "x"), waves((1, 12, X), seed=year)[0])},
            {
                "time": ("time", days + 30.0 * np.arange(12), {"units": "days since 2001-01-01"}),
                "x": np.arange(X),
            },
        ).to_netcdf(tmp_path / f"{'b' if year == 2003 else 'c'}{year}.nc", engine="h5netcdf")
    said = section(
        tmp_path, files=str(tmp_path / "*.nc"), layout={"T": ["time", "x"]}, domain=None, dt=None, cut=3
    )
    config, source, _ = read(tmp_path, said)  # 2003 is the first file, and the last year
    parts = source.split(0.25, 0.25)
    assert [parts[name].tolist() for name in ("test", "val", "train")] == [
        [1, 2, 3],
        [0, 10, 11],
        [*range(4, 10)],
    ]
    shutil.copy(tmp_path / "c2001.nc", tmp_path / "d2001.nc")  # the same dates twice: no record
    assert not np.array_equal(read(tmp_path, said)[1].split(0.25, 0.25)["test"], parts["test"])


def test_the_repeated_last_cell_of_a_periodic_axis_is_left_out(tmp_path):
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
        said = section(
            tmp_path,
            files=str(path),
            layout={"u": ["trajectory", "time", "x", "y"]},
            domain={"y": [0, 1]},
            dt=None,
        )
        config, source, found = read(tmp_path, {**said, "repeated": ["x"]})
        turned = int(name == "falling")  # the last cell that is stored is the first one then
        assert config.task["ks"].domain["x"] == [turned, X + turned]
        assert np.array_equal(found[:, :, 0], np.roll(u, -turned, 2))
        write_user_file(
            tmp_path / "w.hdf5",
            config.spec("ks"),
            lambda indices, u=found: u[indices],
            20,
            T,
            (X, Y),
            chunk=7,
            times=DT * np.arange(T),
            parameters=source.parameters,
        )
        assert np.array_equal(open_user_files(config.spec("ks"), [tmp_path / "w.hdf5"]).read(0, 20), found)
        (tmp_path / "w.hdf5").unlink()
    with pytest.raises(
        ValueError, match="task.ks.repeated: it is .*; expected a list of periodic axes, of x"
    ):
        read(tmp_path, {**said, "repeated": ["y"], "boundary": {"x": "periodic", "y": "no_flux"}})


@pytest.mark.parametrize("extra", ["", "dates", "forcing"])
def test_longer_test_trajectories_are_judged_to_their_end(tmp_path, extra):
    for name, frames in (("train", T), ("val", T), ("test", T + 9)):
        path = tmp_path / "data" / name / "a.h5"
        path.parent.mkdir(parents=True)
        forcing = {"f": np.arange(8 * frames).reshape(8, frames) / 7} if extra == "forcing" else {}
        write(path, u=waves((8, frames, X), seed=len(name)), **forcing)
        if extra == "dates":
            with h5py.File(path, "a") as file:
                file["time"] = 0.5 * np.arange(frames)
                file["time"].attrs["units"] = f"days since {1980 + len(name)}-01-01"
    said = section(tmp_path, files=str(tmp_path / "data" / "*" / "*.h5"))
    if extra == "forcing":
        said |= {"layout": {**said["layout"], "f": ["trajectory", "time"]}, "forcing": ["f"]}
    with pytest.raises(
        ValueError, match=f"holds {T} frames; expected {T + 9} .* Write task.ks.num_frames: {T} "
    ):
        read(tmp_path, said)
    config, cache, operator = operator_on(tmp_path, {**said, "num_frames": T}, network=False)
    truth = open_truth(config, "ks")
    entry, [sample, _] = assess_forecasts(operator, truth, config.evaluate, 0, torch.device("cpu"))
    assert (cache.num_frames, truth.num_frames, entry["num_frames_beyond"]) == (T, T + 8, 9) and len(
        sample["u_ref"]
    ) == T + 8
    assert np.array_equal(truth.future(truth.rows[:1]).numpy()[0, :, 0], waves((8, T + 9, X), seed=4)[0, 1:])
    years, f = truth.years(truth.rows, T + 9), truth.forced(truth.rows[:1], operator.head("ks"))
    assert (
        (years is None)
        if extra != "dates"
        else torch.allclose(years[:, -1], torch.tensor(1984 + (T + 8) / 2 / 365.2425, dtype=torch.float64))
    )
    if extra == "forcing":  # rises to the end, and does not begin again
        assert f.shape[1] == T + 9 and float(f[0].diff(dim=0).min()) > 0


def test_no_window_crosses_a_gap_in_time(tmp_path):
    times, run = np.delete(np.arange(40.0), [7, 8, 22]), waves((1, 40, X))[0]
    write(tmp_path / "a.h5", u=np.delete(run, [7, 8, 22], 0), t=times * DT)
    said = section(tmp_path, layout={"u": ["time", "x"]}, cut=4, dt=None)
    for dt in (None, DT):  # 37 frames: 7, 13 and 17 between the gaps
        config, source, found = read(tmp_path, {**said, "dt": dt})
        assert source.dt == DT and "gaps in the times at 2 places: no window crosses them" in source.notes
        assert np.array_equal(found[:, :, 0], [run[i : i + 4] for i in (0, 9, 13, 17, 23, 27, 31, 35)])
    assert "t has 2 steps other than 0.5: no window crosses" in describe_file(str(tmp_path / "a.h5"))
    with pytest.raises(
        ValueError, match=r"task.ks.cut: no 20 frames follow each other, as times have 2 gaps"
    ):
        read(tmp_path, {**said, "cut": 20})
    write(tmp_path / "a.h5", u=run, t=np.cumsum(np.tile([31.0, 30, 31, 28, 29], 8)))  # months are no gaps
    with pytest.raises(ValueError, match="steps of 28 to 31; expected equal"):
        read(tmp_path, said)
    assert len(read(tmp_path, {**said, "dt": 30.0})[2]) == 10


def test_dimensions_without_coordinates_keep_their_names(tmp_path):
    fields = {name: (("run", "time", "dim_0"), waves((20, 12, X))) for name in "ab"}
    xarray.Dataset(fields).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    text = describe_file(str(tmp_path / "a.nc"))
    assert (
        yaml.safe_load(text)["task"]["a"]["layout"]["b"] == ["trajectory", "time", "dim_0"]
        and "# or " not in text
    )


def test_points_on_walls_are_told_from_cell_centres(tmp_path):
    u = waves((20, T, 33))
    u[..., [0, -1]] = 0
    for name, x in {"walls": np.linspace(0, 1, 33), "centres": (np.arange(33) + 0.5) / 33}.items():
        path = tmp_path / f"{name}.h5"
        write(path, u=u, x=x, t=DT * np.arange(T))
        text = describe_file(str(path))
        on_walls = "x: the first and last point lie on the walls; the domain reaches half a cell beyond them"
        assert (f"{on_walls}, [-0.015625, 1.015625]" in text) == (name == "walls")
        said = {**section(tmp_path, files=str(path), boundary="dirichlet", symmetries=[]), "domain": []}
        config, source, _ = read(tmp_path, said)
        assert config.task["ks"].domain["x"] == ([-0.015625, 1.015625] if name == "walls" else [0, 1])
        assert np.allclose(source.coordinates["x"], x)
        found = [one for one in walls(source, None) if one.severity == "caution"]
        assert [one.what[:60] for one in found] == (
            ["the first and the last point of x seem to lie on the walls, "] if name == "walls" else []
        )
    write(tmp_path / "bare.h5", u=u)  # nothing tells: the question does
    assert "from where to where, half a cell beyond the first and the last point?" in describe_file(
        str(tmp_path / "bare.h5")
    )


def test_a_frame_per_file_is_refused_with_the_command_that_joins_them(tmp_path):
    days = np.datetime64("2001-01-28") + np.arange(12)
    frames = waves((1, 12, 6, X))[0]
    for day, u in zip(days, frames, strict=True):
        one = xarray.Dataset({"sst": (("time_counter", "y", "x"), u[None])}, {"time_counter": [day]})
        one.to_netcdf(tmp_path / f"sst_{day}.nc", engine="h5netcdf")
    with pytest.raises(
        ValueError, match="one map of sst, as do 12 files of .*; expected the frames"
    ) as refusal:
        describe_file(str(tmp_path / "sst_2001-01-28.nc"))
    command = re.search(r'python -c "(.*)", and', str(refusal.value))[1]
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    with xarray.open_dataset(tmp_path / "joined.nc") as joined:
        assert (joined.time_counter.values == days).all() and (joined.sst.values == frames).all()
    assert "sst: [time, y, x]" in describe_file(str(tmp_path / "joined.nc"))


def test_one_map_is_no_data_set(tmp_path):
    write(tmp_path / "a.h5", a=waves()[0], u=waves()[1])
    xarray.Dataset({"a": (("y", "x"), waves()[0]), "u": (("y", "x"), waves()[1])}).to_netcdf(
        tmp_path / "m.nc", engine="h5netcdf"
    )
    with pytest.raises(
        ValueError,
        match=r"holds 1 map of a and of u, without an axis of time; expected frames, or many pairs",
    ):
        describe_file(str(tmp_path / "m.nc"))


def test_a_description_guesses_walls_and_vectors(tmp_path):
    v = np.stack([waves((N, T, X, Y))] * 2, -1) + np.linspace(0, 30, X)[:, None, None]
    said = yaml.safe_load(describe_file(str(write(tmp_path / "a.h5", v=v.astype(np.float32)))))["task"]["a"]
    assert said["layout"] == {"v": ["trajectory", "time", "x", "y", "component"]}
    assert said["boundary"] == {"x": "no_flux", "y": "periodic"}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": "nowhere/*.h5"}, r"task.ks.files: no file fits 'nowhere/\*.h5'.*Correct task.ks.files"),
        (
            {"layout": {}},
            r"task.ks.layout: it is empty.*--describe .*a.h5 prints one; the file holds Re \(6,\), t",
        ),
        (
            {"layout": {"v": ["trajectory", "time", "x"]}},
            r"holds no array 'v'.*Write one that it holds: Re .*u \(6, 5, 16\)",
        ),
        (
            {"layout": {"u": ["trajectory", "x"]}},
            r"u in .* has 3 axes, \(6, 5, 16\), and 2 words.*Correct layout.u",
        ),
        (
            {"layout": {"u": ["trajectory", "x", "time"]}},
            r"axis called x has 5 cells and the array x .* 16 numbers.*in the "
            "order of the axes",
        ),
        (
            {"layout": {"u": ["trajectory", "time", "x"], "w": ["trajectory", "time", "x"]}},
            r"x is 8 long in w of .* and 16 in u; expected one size per axis",
        ),
        ({"layout": {"u": ["x", "x", "time"]}}, "names x twice"),
        ({"layout": "vell"}, "it is 'vell'; expected the arrays with their axes, or one of well, pdebench"),
        (
            {"boundary": "wall"},
            r"boundary: it is 'wall'; expected one of periodic, no_flux.*Write boundary: periodic",
        ),
        ({"boundary": None}, "boundary: it is missing.*Write boundary: periodic"),
        (
            {"domain": [0, 64]},
            r"domain: that of x is \[0, 64\], and x in .* runs from 0 to 20.625 in steps of 1.375; expected "
            r"what the file says, \[0.0, 22.0\]. Write domain: \{x: \[0.0, 22.0\]\}",
        ),
        ({"domain": [3, 1]}, r"that of x is \[3, 1\]; expected two numbers, the lower first"),
        (
            {"dt": 0.1},
            "dt: it is 0.1, and t in .* has steps of 0.5; expected what the file says. Write dt: 0.5",
        ),
        (
            {"dt": "tt"},
            "no array 'tt' of times, and no attribute.*Write dt: 0.1, or one that it holds.*attributes nu",
        ),
        (
            {"dt": "nu"},
            "dt: it is 0.1, and t in .* has steps of 0.5; expected what the file says. Write dt: 0.5",
        ),
        (
            {"parameters": {"nu": "mu"}},
            r"parameters.nu: .* holds no number in 'mu'.*attributes: nu; arrays: Re",
        ),
        ({"parameters": {"nu": "a_nu{}.h5"}}, r"holds no number in 'a_nu\{\}.h5'.*pattern of file names"),
        ({"parameters": list("abcd")}, "expected at most 3 names.*leave out what does not vary"),
        ({"positive": ["v"]}, r"positive: it names 'v'; expected fields of the layout \(u\)"),
        ({"symmetries": ["turn"]}, "symmetries: it names 'turn'; expected of mirror, shift, shift_x"),
        ({"symmetries": "shift"}, r"symmetries: it is 'shift'; expected a list. Write symmetries: \[shift\]"),
        (
            {"symmetries": ["shift"], "boundary": "no_flux"},
            "names 'shift'; expected of mirror; shifts need a periodic axis",
        ),
        (
            {"vector": ["u", "u"]},
            r"vector: it is .*; expected 1 of u, the component along each axis of space \(x\)",
        ),
        ({"bounded": ["w"]}, r"bounded: it names 'w'; expected fields of the layout \(u\)"),
        ({"conserved": "u"}, r"conserved: it is 'u'; expected a list. Write conserved: \[u\]"),
        ({"files": 3}, r"""files: it is 3; expected a file or a pattern.*Write files: "my/\*.h5\""""),
        ({"files": "."}, r". is a folder; expected HDF5.*Name the files in it, such as ./\*.h5"),
        (
            {"layout": {"u": ["sample", "time", "x"]}},
            "layout.u: it names an axis 'sample'; expected one of .* Write trajectory",
        ),
        (
            {"layout": {"a": {"array": "u", "axes": ["trajectory", "time", "x"], "fields": ["a/b"]}}},
            r"layout.a.fields: it is \['a/b'\]; expected a list of names of letters.*Write fields: \[a\]",
        ),
        (
            {"domain": {"y": [0, 1]}},
            r"domain: it names an axis 'y'; expected of x. Write domain: \{x: \[0, 1\]\}",
        ),
        (
            {"domain": "xx"},
            r"domain: .* holds no array 'xx' of coordinates; expected two numbers.*domain: \{x: x, ..\}",
        ),
        (
            {"resolution": [8]},
            r"resolution: it is \[8\]; expected \[16\], as the files show. Leave it out; .*space_stride",
        ),
        ({"first_frame": -1}, "first_frame is -1; expected 0 or more"),
        ({"first_frame": "two", "cut": 2}, "task.ks.first_frame is 'two'; expected a whole number"),
        ({"inputs": 3}, "task.ks.inputs is 3; expected a list"),
        ({"times": 3}, "task.ks.times is 3; expected text"),
        ({"coordinates": ["x"]}, "task.ks.coordinates is .*; expected a mapping"),
        ({"boundary": [[1]]}, r"boundary: it is \[\[1\]\]; expected one of periodic"),
        ({"parameters": {"Re": "t"}}, "holds 5 values; expected 1, or 6 .*correct the words for the axes"),
        ({"inputs": ["u"]}, "some array has a time axis; expected none.*Leave it out"),
        ({"num_frames": 7}, "a.h5 holds 5 frames; expected 7"),
        ({"num_trajectories": 9}, "the files hold 6; expected at least 9"),
        ({"layot": {}}, "unknown key task.ks.layot; did you mean 'layout'"),
        (
            {"patch": 5},
            r"task.ks.patch 5 does not divide the grid of 16 cells .*expected one of \[1, 2, 4, 8, 16\]",
        ),
        ({"base": ["elliptic"]}, "task.ks.base names elliptic; expected of .*the task is not steady"),
    ],
)
def test_a_wrong_description_gets_one_line_that_says_what_to_write_where(tmp_path, changes, message):
    write(
        tmp_path / "a.h5",
        u=waves(),
        w=waves((N, T, 8)),
        t=DT * np.arange(T),
        x=22 / X * np.arange(X),
        Re=np.arange(N),
        attr_nu=0.1,
    )
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        open_sources(load_config(overlay(tmp_path, section(tmp_path, **changes))), "ks")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"u": waves((N, T, 8))},
            r"b.h5 holds a grid of \(8,\) cells, and .*a.h5 one of \(16,\); expected one grid.*two tasks",
        ),
        (
            {"u": waves((N, 4, X))},
            r"b.h5 holds 4 frames; expected 5 .*Write task.ks.num_frames: 4 to use as many",
        ),
        ({"v": waves()}, "b.h5 holds no array 'u'"),
    ],
)
def test_files_that_do_not_fit_each_other_are_named(tmp_path, other, message):
    write(tmp_path / "a.h5", u=waves())
    write(tmp_path / "b.h5", **other)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, section(tmp_path))


def test_a_name_that_is_taken_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves())
    given = overlay(tmp_path, {})
    given.write_text(
        yaml.safe_dump({"data": {"tasks": ["burgers1d"]}, "task": {"burgers1d": section(tmp_path)}})
    )
    with pytest.raises(ValueError, match="under the name of a built-in task; expected a name of its own"):
        load_config(given)
    with pytest.raises(ValueError, match="or a user task, whose data task.kss.files names"):
        load_config(overlay(tmp_path, section(tmp_path)), ["data.tasks=[kss]"])


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
            np.concatenate([waves(), waves()[..., :1]], -1),
            "warning",
            "a periodic grid has one point twice",
            "ks.repeated: [x]",
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
        (
            np.random.default_rng(0).standard_normal((N, T, X)),
            "warning",
            "neighbours along x are no more alike than any two",
            "check the words of task.ks.layout",
        ),
    ],
)
def test_the_doctor_finds_what_the_section_says_and_the_data_do_not(tmp_path, u, severity, what, do, capsys):
    write(tmp_path / "a.h5", u=u.astype(np.float32))
    said = {
        word: ["u"]
        for word in ("conserved", "bounded", "positive")
        if f"out of task.ks.{word}" in do or (word == "conserved" and severity == "info")
    }
    config = load_config(overlay(tmp_path, section(tmp_path, patch=1, **said)))
    [(_, findings)] = examine(
        [("ks", tmp_path / "a.h5")],
        val_fraction=0.2,
        test_fraction=0.2,
        declared={"ks": lambda: open_user(config, "ks")},
    )
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


def carried(speed=0.0, own=0.0, loss=0.0):
    """u_t = -(speed + own u) u_x - loss u from random waves, periodic."""
    draw, x = np.random.default_rng(0), 2 * np.pi * np.arange(64) / 64
    u, out = (
        sum(draw.standard_normal((N, 1)) * np.sin(k * x + 6.28 * draw.random((N, 1))) for k in (1, 2)),
        [],
    )
    for step in range(60):
        out += [u] if step % 12 == 0 else []
        u = u - 0.01 * (
            (speed + own * u) * np.gradient(np.pad(u, ((0, 0), (2, 2)), "wrap"), x[1], axis=1)[:, 2:-2]
            + loss * u
        )
    return np.stack(out, 1).astype(np.float32)


@pytest.mark.parametrize(
    ("u", "vector", "word"),
    [
        (carried(speed=1.0), [], "its slope"),
        (carried(speed=1.0), ["u"], "its slope"),
        (carried(own=0.5), [], "itself times its slope"),
        (carried(own=0.5), ["u"], None),
        (carried(loss=1.0), [], None),
        (carried(loss=1.0), ["u"], None),
    ],
)
def test_a_mirror_that_no_solution_survives_is_found_in_the_data(tmp_path, u, vector, word):
    """Said falsely it costs most of the accuracy: Kuramoto-Sivashinsky 0.69 with the velocity as a scalar,
    0.09 as a vector."""
    write(tmp_path / "a.h5", u=u)
    config = load_config(overlay(tmp_path, section(tmp_path, symmetries=["mirror"], vector=vector)))
    [(_, findings)] = examine(
        [("ks", tmp_path / "a.h5")],
        val_fraction=0.2,
        test_fraction=0.2,
        declared={"ks": lambda: open_user(config, "ks")},
    )
    found = [finding for finding in findings if "mirrored along x" in finding.what]
    assert [finding.severity for finding in found] == ["error"] * bool(word)
    assert not word or (f"goes with {word} (" in found[0].what and "task.ks.vector" in found[0].do)


# ---------------------------------------------------------------- what is stated is kept


def operator_on(folder, said, network=True, base="persistence"):
    """An operator whose network says anything, on the data of a section, and the cache."""
    config = load_config(
        overlay(folder, {**said, "base": [base]}),
        ["operator.model.width=8", "operator.model.depth=1", "evaluate.num_bootstrap=50"],
    )
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    facts, weights = fit_base(cache, 1, 1, 0, torch.device("cpu"))
    operator = build_operator({"ks": (facts, weights)}, config.operator.model, "no")
    torch.manual_seed(0)
    for parameter in operator.parameters() if network else ():
        torch.nn.init.normal_(parameter, std=0.05)
    return config, cache, operator


@torch.no_grad()
def forecast(operator, cache, frames=6):
    """The first rows, and what follows them (n, T, C, *space)."""
    head, rows = operator.heads["ks"], torch.arange(3)
    z = cache.batch(rows, 0, 1)
    return head.physical(z), head.physical(operator.rollout(z, "ks", cache.parameters[rows], frames))


def test_a_field_that_is_given_stays_as_given_whatever_the_network_says(tmp_path):
    """The fake: a coefficient that is predicted like a state; and scores that count it as predicted."""
    u, v = waves((12, T, X, Y)), np.stack([waves((12, T, X, Y), 1), np.zeros((12, T, X, Y))], -1)
    well_file(tmp_path / "a.h5", u, v)
    config, cache, operator = operator_on(tmp_path, {"files": str(tmp_path / "a.h5"), "layout": "well"})
    start, u_pred = forecast(operator, cache)
    assert cache.task.fields == ("u", "v_x", "v_y", "depth") and cache.task.moving == ("u", "v_x", "v_y")
    moved = (u_pred - start).abs().amax((0, 1, 3, 4))
    assert moved[0] > 0.01 and moved[3] < 1e-5, moved
    states = StateConditions(operator, "ks")
    z, shape = cache.batch(torch.arange(3), 0, 1), (6, *cache.tokenizer.tokens, cache.tokenizer.dim)
    members = sample_rollout(
        states,
        lambda tokens, facts, noise, second: noise,
        z,
        cache.parameters[:3],
        4,
        2,
        lambda lead: (0.1 * torch.randn(shape), torch.zeros(shape)),
    )
    moved = (operator.heads["ks"].physical(members) - start[:, None]).abs().amax((0, 1, 2, 4, 5))
    assert moved[0] > 0.01 and moved[3] < 1e-5, moved  # of drawn members, too
    entry, [shown, _] = assess_forecasts(
        operator, open_truth(config, "ks"), config.evaluate, 0, torch.device("cpu")
    )
    assert entry["fields"] == shown["fields"] == ["u", "v_x", "v_y"] and entry["given"] == ["depth"]
    assert len(entry["models"]["operator"]["nrmse_by_field"]) == 3 and shown["u_pred"].shape[1] == 3
    assert np.isfinite(entry["models"]["operator"]["nrmse"]["value"])  # v_y is zero throughout: left out


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
    assert (out["[]"] > 0.01).all() and (out["True"] < 1e-5).all()
    assert out["['u']"][0] < 1e-5 and out["['u']"][1] > 0.01


def test_a_shift_along_one_axis_leaves_the_other_as_it_is(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, Y)))
    said = section(
        tmp_path, layout={"u": ["trajectory", "time", "x", "y"]}, domain=[0, 1], symmetries=["shift_x"]
    )
    task = load_config(overlay(tmp_path, said)).spec("ks")
    assert task.is_shifted and task.fixed_axes == ("y",)
    w = torch.randn(1, 1, 1, X, Y)
    moved = [symmetry(task, (X, Y), torch.Generator().manual_seed(i))(w, None) for i in range(8)]
    assert all(torch.allclose(one.sum(-2), w.sum(-2), atol=1e-5) for one in moved)  # along x alone
    assert any(not torch.equal(one, w) for one in moved)
    both = load_config(overlay(tmp_path, {**said, "symmetries": ["shift"]})).spec("ks")
    assert both.fixed_axes == () and any(
        not torch.allclose(
            symmetry(both, (X, Y), torch.Generator().manual_seed(i))(w, None).sum(-2), w.sum(-2)
        )
        for i in range(8)
    )


def test_a_stage_that_no_task_is_for_is_nothing_to_do(tmp_path, monkeypatch, capsys):
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


# ---------------------------------------------------------------- the whole chain


def kolmogorov(folder):
    np.save(folder / "flow.npy", waves((12, 8, 16, 16)))
    return {
        "files": str(folder / "flow.npy"),
        "layout": {"omega": ["trajectory", "time", "x", "y"]},
        "boundary": "periodic",
        "domain": [0, 6.283],
        "dt": 0.1,
    }


def ks(folder):
    write(folder / "ks.h5", u=waves((12, 12, 32)), x=22 / 32 * np.arange(32), t=DT * np.arange(12))
    return {
        "files": str(folder / "ks.h5"),
        "layout": {"u": ["trajectory", "time", "x"]},
        "boundary": "periodic",
    }


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


@pytest.mark.parametrize("data", [ks, kolmogorov, burgers, well])
def test_from_a_file_to_a_report_and_a_forecast_in_small(tmp_path, data):
    """What a user sees of each: described, examined, encoded, forecast, reported, loaded."""
    said = data(tmp_path)
    described = describe_file(sorted(map(str, tmp_path.glob("*.[hn]*")))[0])
    assert "include: configs/small.yaml" in described and "?" in described
    config, cache, operator = operator_on(tmp_path, said, network=False)
    [(_, findings)] = examine(
        [("ks", tmp_path / "a")],
        val_fraction=0.2,
        test_fraction=0.2,
        declared={"ks": lambda: open_user(config, "ks")},
    )
    assert not any(finding.severity == "error" for finding in findings), findings
    entry, samples = assess_forecasts(
        operator, open_truth(config, "ks"), config.evaluate, 0, torch.device("cpu")
    )
    results = {
        "run": "mine",
        "created": "now",
        "config_hash": "0",
        "environment": {},
        "protocol": {"split": "test"},
        "tasks": {"ks": entry},
        "gates": [],
        "training": {},
    }
    results["usability"] = check_usability(results)
    write_results(results, tmp_path / "results.json")
    write_report(results, {"ks": samples}, [], tmp_path / "report.html", {})
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    ends = (
        "x from 0 to 22 (periodic)"
        if data is ks
        else "y from 0 to 1 (no flux)"
        if data is well
        else "nu 0.1 to 0.2"
        if data is burgers
        else "y from 0 to 6.283 (periodic)"
    )
    assert ends in text and "others; " in text and {*(tmp_path / "figures").glob("ks_median_error_*.png")}
    model, task = Forecaster(operator), cache.task
    shown = model.tasks["ks"]
    assert shown["given"] == list(task.still) and ("given " in repr(model)) == bool(task.still)
    u = model.forecast(
        "ks",
        np.zeros((len(task.fields), *shown["grid"]), np.float32),
        {name: low for name, (low, _) in shown["parameters"].items()},
        num_frames=2,
    )
    assert u.shape == (2, len(task.fields), *shown["grid"]) and np.isfinite(u).all()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.slow
@pytest.mark.faults  # most of a minute each
@pytest.mark.parametrize("data", [ks, kolmogorov, burgers, well])
def test_from_a_declaration_to_a_report_a_forecast_and_a_file(tmp_path, data):
    config = overlay(
        tmp_path,
        data(tmp_path),
        run={"name": "mine", "root": str(tmp_path / "runs")},
        operator={
            "model": {"width": 16, "depth": 1, "kernel_size": 3},
            "train": {"steps": 4, "validate_every": 4, "save_every": 4, "precision": "no"},
        },
        evaluate={"min_initial_conditions": 1},
    )

    def run(command):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        return done.returncode, done.stdout + done.stderr

    make = [
        "make",
        f"PYTHON={sys.executable}",
        f"CONFIG={config}",
        "RUN=mine",
        f"RUNS={tmp_path / 'runs'}",
        "TOPOLOGY=cpu",
    ]
    status, said = run([*make, "doctor"])
    assert ": OK" in said and (status == 0 or ": failed" in said), said
    run([*make, "train"])  # gates may fail after four steps
    assert (tmp_path / "runs/mine/report/report.html").is_file()
    config.unlink()
    # the run alone is enough from here on
    source = (
        next(tmp_path.glob("*.npy"), None) or sorted(tmp_path.glob("[!n]*.h5"))[0]
        if data is not burgers
        else tmp_path / "nu0.1.h5"
    )
    for name, start in (("out.h5", source), ("again.h5", tmp_path / "out.h5")):
        given = ["--parameters", "nu=0.1"] if data is burgers else []
        status, said = run(
            [
                sys.executable,
                "predict.py",
                "--run",
                str(tmp_path / "runs/mine"),
                "--task",
                "ks",
                "--input",
                str(start),
                "--output",
                str(tmp_path / name),
                "--frames",
                "2",
                *given,
            ]
        )
        assert status == 0, said
