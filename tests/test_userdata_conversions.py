"""The lines that --describe prints for frames that lie apart, staggered grids, scenes of PhiFlow and uneven
steps: each is run as it is printed, and what it writes is described and read."""

import ast
import json
import re
import subprocess
import sys

import h5py
import numpy as np
import pytest
import scipy.io
import torch
import xarray
import yaml
from user_files import ROOT

from ups.config.load import load_config
from ups.data.sources import open_sources
from ups.userdata.describe import describe_file

T, X, Y = 40, 32, 24
TIMES, XS, YS = 0.5 * np.arange(T), (np.arange(X) + 0.5) / X, (np.arange(Y) + 0.5) / Y


def maps(x=XS, y=YS):
    """A film (time, x, y) of waves that travel along periodic axes."""
    t, x, y = 0.2 * np.arange(T)[:, None, None], 2 * np.pi * x[:, None], 2 * np.pi * y
    return (np.sin(x - t) * np.cos(y + 0.5 * t) + 0.3 * np.sin(2 * (x + y) - t)).astype(np.float32)


U = maps()


def lines_of(path, message=""):
    """(The lines that the refusal of a file prints, the file that they write.)"""
    with pytest.raises(ValueError, match=message or None) as refusal:
        describe_file(str(path))
    words, _, code = str(refusal.value).partition("\n")
    assert re.search(r"Run these lines in Python, and describe .+:$", words), words
    return re.sub("^    ", "", code, flags=re.MULTILINE), words.partition(", and describe ")[2].rstrip(":")


def converted(path, monkeypatch, message=""):
    """(The section of what the lines write, its data (trajectory, time, field, *space), the source.)"""
    code, name = lines_of(path, message)
    monkeypatch.chdir(path.parent)
    exec(compile(code, "printed lines", "exec"), {})  # noqa: S102
    text = describe_file(name)
    [(task, section)] = yaml.safe_load(text)["task"].items()
    (path.parent / "my.yaml").write_text(text, encoding="utf-8")
    [source] = open_sources(load_config(path.parent / "my.yaml"), task)
    return section, source, source.read(0, source.num_trajectories)


def groups(path, name, **attributes):
    """A group for each frame, with its arrays u and v, and its time as `attributes` say."""
    with h5py.File(path, "w") as file:
        for number, u in enumerate(U):
            group = file.create_group(name.format(number))
            group["u"], group["v"] = u, u**2
            if "number" in attributes:
                group["time"] = TIMES[number]
            if "attribute" in attributes:
                group.attrs["time"] = TIMES[number]
            if "coordinates" in attributes:
                group["x"], group["y"] = XS, YS


def jld2(path):
    """As Oceananigans writes it: arrays by iteration, and the time of each."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for number, u in enumerate(U):
            for name, value in {"u": u[None], "c": u[None] ** 2, "t": TIMES[number]}.items():
                file[f"timeseries/{name}/{10 * number}"] = value


FRAMES = {f"u_{number}": u for number, u in enumerate(U)}
APART = {  # file -> (what writes it, are times stored, are coordinates)
    "grid.npz": (lambda path: np.savez(path, **FRAMES, t=TIMES, x=XS, y=YS), True, True),
    "plain.npz": (lambda path: np.savez_compressed(path, *U), False, False),
    "times.npz": (
        lambda path: np.savez(path, **{f"t={t:.1f}": u for t, u in zip(TIMES, U, strict=True)}),
        True,
        False,
    ),
    "old.mat": (lambda path: scipy.io.savemat(path, FRAMES), False, False),
    "list.pt": (lambda path: torch.save([torch.tensor(u) for u in U], path), False, False),
    "dict.pt": (
        lambda path: torch.save({f"u{i}": torch.tensor(u) for i, u in enumerate(U)}, path),
        False,
        False,
    ),
    "named.nc": (
        lambda path: xarray.Dataset({name: (("x", "y"), u) for name, u in FRAMES.items()}).to_netcdf(path),
        False,
        False,
    ),
    "counted.h5": (lambda path: groups(path, "t{}"), False, False),
    "attribute.h5": (lambda path: groups(path, "{:05d}", attribute=True), True, False),
    "number.h5": (lambda path: groups(path, "step_{}", number=True, coordinates=True), True, True),
    "ocean.jld2": (jld2, True, False),
}


@pytest.mark.parametrize("name", APART)
def test_frames_that_lie_apart_are_stacked_by_the_printed_lines(tmp_path, monkeypatch, name):
    write, has_times, has_grid = APART[name]
    write(tmp_path / name)
    section, source, values = converted(tmp_path / name, monkeypatch, "arrays .*numpy.stack")
    fields = {"plain": ["arr"], "ocean": ["c", "u"]}.get(
        name[:5], ["u", "v"] if name.endswith("h5") else ["u"]
    )
    single = ["single"] * name.startswith("ocean")
    assert section["layout"] == dict.fromkeys(fields, ["time", *single, "x", "y"])
    assert ("dt" in section, "domain" in section) == (not has_times, not has_grid)
    assert source.dt == (0.5 if has_times else 1.0) and values.shape[2:] == (len(fields), X, Y)
    u = values[:, :, fields.index("u") if "u" in fields else 0].reshape(-1, X, Y)
    assert np.array_equal(u, U[: len(u)]) and len(u) > T - source.num_frames
    if has_grid:
        assert np.allclose(source.coordinates["x"], XS) and np.allclose(source.coordinates["y"], YS)


@pytest.mark.parametrize("kind", ["frames.h5", "frames.npz", "faces.nc", "lengths.npz", "uneven.npz"])
def test_the_printed_lines_convert_all_files_whose_names_differ_in_numbers(tmp_path, monkeypatch, kind):
    """Also where the name of the folder and of the files holds what is special to a pattern or to Python."""
    (folder := tmp_path / "it's [1]").mkdir()
    stem, suffix = kind.split(".")
    for number in range(3):
        path, u = folder / f"it's {stem} [a] {number}.{suffix}", maps() + number
        if stem == "frames" and suffix == "h5":
            with h5py.File(path, "w") as file:
                file.update({f"t{place}/u": frame for place, frame in enumerate(u)})
        elif stem == "frames":
            np.savez(path, **{f"u_{place}": frame for place, frame in enumerate(u)})
        elif stem == "faces":
            fields = {"u": (("t", "xF", "y"), u), "c": (("t", "xC", "y"), u)}
            xarray.Dataset(fields, {"t": TIMES}).to_netcdf(path)
        elif stem == "lengths":
            np.savez(path, u=np.concatenate([u, u[:, :1]], 1), c=u, t=TIMES)
        else:
            y = np.tanh(np.linspace(-2, 2, Y))
            np.savez(path, u=np.cos(y) * np.sin(0.2 * np.arange(300))[:, None], y=y, t=0.1 * np.arange(300))
    section, source, values = converted(folder / f"it's {stem} [a] 1.{suffix}", monkeypatch)
    assert section["files"] == f"it's {stem} [a] *_converted.{'nc' if suffix == 'nc' else 'npz'}"
    assert len(source.files) == 3
    if stem != "uneven":
        assert {*values[:, 0, 0].mean((1, 2)).round(1)} == {0, 1, 2}


@pytest.mark.parametrize("shape", [(X, Y), (20, X)])
def test_few_arrays_with_numbered_names_are_fields_or_saved_times_and_both_are_offered(
    tmp_path, monkeypatch, shape
):
    """Five arrays may be five species or five times: the section reads fields, and a question has the lines
    that make one film of them."""
    frames = {f"u_{number}": np.resize(maps()[number], shape) for number in range(5)}
    np.savez(tmp_path / "a.npz", **frames)
    monkeypatch.chdir(tmp_path)
    text = describe_file("a.npz")
    [section] = yaml.safe_load(text)["task"].values()
    assert [*section["layout"]] == [*frames]
    question = (
        r"# or are u_0, u_1, .. one field at 5 saved times\? Run these lines .*describe a_converted.npz:\n"
    )
    code = re.search(question + r"((?: +#     .*\n)+)", text)[1]
    exec(re.sub("^ +#     ", "", code, flags=re.MULTILINE), {})  # noqa: S102
    assert np.array_equal(np.load("a_converted.npz")["u"], np.stack([*frames.values()]))


def test_arrays_whose_axes_the_file_tells_are_no_saved_times(tmp_path):
    fields = {f"u_{number}": maps() + number for number in range(5)}
    np.savez(tmp_path / "a.npz", **fields, x=XS, y=YS, t=TIMES)
    assert "saved times" not in describe_file(str(tmp_path / "a.npz"))


def test_the_command_prints_the_lines_one_below_the_other(tmp_path):
    np.savez(tmp_path / "a.npz", **FRAMES)
    command = [sys.executable, str(ROOT / "prepare_data.py"), "--describe", "a.npz"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    code = "\n".join(line[4:] for line in run.stderr.splitlines() if line.startswith("    "))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert np.array_equal(np.load(tmp_path / "a_converted.npz")["u"], U)


@pytest.mark.parametrize("name", ["'", '"; import os\n', "WRITTEN", "{n}", "u'] + __import__('os').x['"])
def test_names_in_printed_lines_are_text(tmp_path, monkeypatch, name):
    path = tmp_path / f"{name.replace('/', '')}.npz".replace("\n", "")
    np.savez(path, **{f"{name.strip()}{number}": u for number, u in enumerate(U)}, x=XS, y=YS)
    code, _ = lines_of(path)
    assert {
        node.func.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    } == {"open_store", "names", "whole", "fullmatch", "savez", "stack"}
    assert converted(path, monkeypatch)[2].shape[3:] == (X, Y)


def test_runs_in_groups_are_no_frames(tmp_path):
    """Also where each has a number, or its own times."""
    for kind in ("plain", "nu", "times"):
        with h5py.File(tmp_path / f"{kind}.h5", "w") as file:
            for number in range(20):
                group = file.create_group(f"run_{number:02d}")
                group["u"] = np.roll(U[:, :, 0], 7 * number % 32, 1) + number % 3
                group.attrs.update({"nu": 0.1 * number} if kind == "nu" else {})
                if kind == "times":
                    group["t"] = TIMES
        section = yaml.safe_load(describe_file(str(tmp_path / f"{kind}.h5")))["task"][kind]
        assert section["layout"] == {"*/u": ["time", "x"]}


EDGES = {"x": np.arange(X + 1) / X, "y": np.arange(Y + 1) / Y}
OCEAN = {  # names of axes -> along x and y: centres, faces; number of faces less that of centres
    "oceananigans": (("xC", "xF"), ("yC", "yF"), 0),
    "oceananigans_walls": (("x_caa", "x_faa"), ("y_aca", "y_afa"), 1),
    "mitgcm": (("XC", "XG"), ("YC", "YG"), 0),
    "wrf": (("west_east", "west_east_stag"), ("south_north", "south_north_stag"), 1),
    "mom6": (("xh", "xq"), ("yh", "yq"), 1),
    "roms": (("xi_rho", "xi_u"), ("eta_rho", "eta_v"), -1),
}


@pytest.mark.parametrize("has_coordinates", [True, False])
@pytest.mark.parametrize("kind", OCEAN)
def test_fields_on_faces_are_moved_to_the_centres_by_the_printed_lines(
    tmp_path, monkeypatch, kind, has_coordinates
):
    (xc, xf), (yc, yf), more = OCEAN[kind]
    faces = {
        axis: edges[1:-1] if more < 0 else edges[: len(edges) - 1 + more] for axis, edges in EDGES.items()
    }
    other_y, other_x = ("eta_u", "xi_v") if kind == "roms" else (yc, xc)
    fields = {
        "u": (("time", xf, other_y), maps(x=faces["x"])),
        "v": (("time", other_x, yf), maps(y=faces["y"])),
        "c": (("time", xc, yc), maps()),
    }
    axes = {"time": TIMES, xc: XS, yc: YS, xf: faces["x"], yf: faces["y"]}
    xarray.Dataset(fields, axes if has_coordinates else {"time": TIMES}).to_netcdf(tmp_path / "a.nc")
    section, source, values = converted(tmp_path / "a.nc", monkeypatch, "a staggered grid; .*rolling")
    words = [re.sub(r"\W", "_", name) for name in (xc, yc)]
    assert {*map(tuple, section["layout"].values())} == {("time", *words)}
    assert source.dt == 0.5
    inner = (slice(None), slice(1, -1), slice(1, -1)) if more < 0 else ()
    fields = [*section["layout"]]
    assert np.allclose(values[:, :, fields.index("c")].reshape(-1, *values.shape[3:])[0], maps()[inner][0])
    for name in "uv":  # a mean of neighbours is exact to the second order
        u = values[:, :, fields.index(name)].reshape(-1, *values.shape[3:])
        assert np.abs(u - maps()[inner][: len(u)]).max() < 0.05
    if has_coordinates:
        with xarray.open_dataset(tmp_path / "a_converted.nc") as written:
            assert np.allclose(written[xc], XS[1:-1] if more < 0 else XS)


def test_a_staggered_grid_without_names_is_one_of_lengths(tmp_path, monkeypatch):
    u, v = maps(x=EDGES["x"]), maps(y=EDGES["y"])
    np.savez(tmp_path / "a.npz", u=u, v=v, p=maps(), x=XS, y=YS, xf=EDGES["x"], yf=EDGES["y"], t=TIMES)
    section, source, values = converted(tmp_path / "a.npz", monkeypatch, "33 points along x and others on 32")
    assert section["layout"] == dict.fromkeys("puv", ["time", "x", "y"]) and source.dt == 0.5
    for number in range(3):
        assert (
            np.abs(values[:, :, number].reshape(-1, X, Y) - maps()[: values.shape[0] * values.shape[1]]).max()
            < 0.05
        )
    assert np.allclose(source.coordinates["y"], YS)


def scene(folder, num, has_objects=True):
    """A scene as PhiFlow 3.4 writes it: a file for each field and frame, of which two members are objects."""
    folder.mkdir(parents=True)
    (folder / "description.json").write_text(json.dumps({}), encoding="utf-8")
    extrapolation = {"type": "periodic"}
    about = {"lower": np.array([0, 0]), "upper": np.array([10, 5]), "bounds_item_names": np.array(["x", "y"])}
    objects = {"extrapolation": np.array(extrapolation, dtype=object)} if has_objects else {}
    kinds = np.array(["spatial", "spatial", "channel"])
    faces = np.stack([maps(EDGES["x"], np.append(YS, YS[0])), maps(np.append(XS, XS[0]), EDGES["y"])], -1)
    for number in range(T):
        fields = {
            "smoke": ("CenteredGrid", ["x", "y"], num + U[number], kinds[:2]),
            "wind": ("CenteredGrid", ["vector", "x", "y"], np.stack([U[number]] * 2), kinds[[2, 0, 1]]),
            "velocity": ("StaggeredGrid", ["x", "y", "vector"], faces[number], kinds),
        }
        for name, (kind, axes, data, types) in fields.items():
            np.savez_compressed(
                folder / f"{name}_{number:06d}.npz",
                dim_names=np.array(axes),
                dim_types=types,
                field_type=kind,
                data=data,
                **about,
                **objects,
            )


@pytest.mark.parametrize("described", ["sim_000000", "sim_000001/smoke_000003.npz"])
@pytest.mark.parametrize("num", [1, 3])
def test_scenes_of_phiflow_become_trajectories(tmp_path, monkeypatch, described, num):
    for number in range(num):
        scene(tmp_path / "scenes" / f"sim_{number:06d}", number)
    if num == 1:
        described = described.replace("1/", "0/")
    section, source, values = converted(tmp_path / "scenes" / described, monkeypatch, "scene of PhiFlow")
    fields = ["smoke", "velocity_x", "velocity_y", "wind_x", "wind_y"]
    assert section["layout"] == dict.fromkeys(fields, [*["trajectory"] * (num > 1), "time", "x", "y"])
    assert np.allclose(source.coordinates["x"], 10 * XS) and "domain" not in section and section["dt"] == 1.0
    films = values.reshape(num, -1, 5, X, Y)
    for number, part in enumerate(films):
        assert np.allclose(part[:, 0], number + U[: part.shape[0]], atol=1e-6)
        assert np.abs(part[:, 1:] - U[: part.shape[0], None]).max() < 0.05


@pytest.mark.parametrize("name", ["a.npz", "a.h5", "a.nc", "a.mat"])
def test_uneven_steps_are_resampled_by_the_printed_lines(tmp_path, monkeypatch, name):
    y = np.tanh(np.linspace(-2, 2, 33)) / np.tanh(2)
    u = np.cos(np.pi * y / 2) * np.sin(0.2 * np.arange(300))[:, None]
    arrays = {"u": u, "walls/y" if name == "a.h5" else "y": y, "t": 0.1 * np.arange(300)}
    if name == "a.nc":
        xarray.Dataset({"u": (("t", "y"), u)}, {"y": y, "t": arrays["t"]}).to_netcdf(tmp_path / name)
    elif name == "a.h5":
        with h5py.File(tmp_path / name, "w") as file:
            file.update(arrays)
    else:
        (np.savez if name == "a.npz" else lambda path, **all: scipy.io.savemat(path, all))(
            tmp_path / name, **arrays
        )
    section, source, values = converted(
        tmp_path / name, monkeypatch, "differ 12.5-fold; expected cells of equal"
    )
    assert section["layout"] == {"u": ["time", "y"]} and abs(source.dt - 0.1) < 1e-9
    assert np.allclose(source.coordinates["y"], np.linspace(-1, 1, 33))
    exact = np.cos(np.pi * np.linspace(-1, 1, 33) / 2)
    film = values.reshape(-1, 33)
    assert np.abs(film - exact * np.sin(0.2 * np.arange(len(film)))[:, None]).max() < 0.02


def dedalus(path, tasks, is_grid=True):
    """A file as Dedalus 3 writes it: tasks whose axes have scales, but for the components of vectors."""
    lists = {
        "sim_time": TIMES,
        "iteration": 10 * np.arange(T),
        "timestep": np.full(T, 0.05),
        "constant": np.zeros(1),
    }
    with h5py.File(path, "w") as file:
        for name, values in {**lists, "x_hash_1a": XS, "z_hash_2b": YS}.items():
            file[f"scales/{name}"] = values
            file[f"scales/{name}"].make_scale(name.partition("_hash")[0])
        for name, (values, axes) in tasks.items():
            file[f"tasks/{name}"] = values
            found = file[f"tasks/{name}"]
            found.attrs["grid_space"] = np.full(len(axes), is_grid)
            found.dims[0].label = "t"
            for scale in ("sim_time", "iteration", "timestep"):
                found.dims[0].attach_scale(file[f"scales/{scale}"])
            for number, axis in enumerate(axes, values.ndim - len(axes)):
                scales = {"x": "x_hash_1a", "kx": "x_hash_1a", "z": "z_hash_2b", "constant": "constant"}
                found.dims[number].label = axis
                found.dims[number].attach_scale(file[f"scales/{scales[axis]}"])


def test_vectors_profiles_and_numbers_of_dedalus_are_read(tmp_path):
    """The axis of components has no name; a scale of HDF5 is no parameter; coefficients are no field."""
    u = np.stack([U, U**2], 1)
    tasks = {
        "b": (U, ["x", "z"]),
        "u": (u, ["x", "z"]),
        "profile": (U[:, :1], ["constant", "z"]),
        "energy": (U[:, :1, :1], ["constant", "constant"]),
    }
    dedalus(tmp_path / "snapshots.h5", tasks)
    text = describe_file(str(tmp_path / "snapshots.h5"))
    section = yaml.safe_load(text)["task"]["snapshots"]
    assert section["layout"] == {"tasks/b": ["time", "x", "z"], "tasks/u": ["time", "component", "x", "z"]}
    assert section["dt"] == "scales/sim_time" and "parameters" not in section and "forcing" not in section
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    [source] = open_sources(load_config(tmp_path / "my.yaml"), "snapshots")
    assert source.dt == 0.5 and np.allclose(source.coordinates["z"], YS)
    values = source.read(0, source.num_trajectories)
    fields = [*source.task.channels]
    assert np.array_equal(values[0, 0, fields.index("u_z")], u[0, 1])
    dedalus(tmp_path / "modes.h5", {"b": (U + 1j * U, ["kx", "z"])}, is_grid=False)
    with pytest.raises(
        ValueError, match="coefficients of tasks/b.imag, along kx, z; expected values at points"
    ):
        describe_file(str(tmp_path / "modes.h5"))
