"""--describe prints a section that loads, with a question wherever the file does not tell."""

import contextlib
import re

import h5py
import numpy as np
import pytest
import torch
import xarray
import yaml
from cases import cases
from user_files import (
    DT,
    ROOT,
    SMALL,
    N,
    T,
    X,
    Y,
    counted_requests,
    described,
    film,
    read,
    section,
    waves,
    write,
)

import prepare_data
from ups.common.text import load_yaml, yaml_text
from ups.config.load import load_config
from ups.data.sources import open_source
from ups.userdata.describe import describe_file
from ups.userdata.describe_lines import Line, written


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_description_loads_once_its_questions_are_answered(tmp_path, coordinates):
    coordinate_arrays = {"t": DT * np.arange(T), "x": 22 / X * np.arange(X)} if coordinates else {}
    path = write(tmp_path / "a.h5", u=waves(), **coordinate_arrays, attr_nu=0.1)
    text = describe_file(str(path))
    settings = yaml.safe_load(text)
    assert settings["task"]["a"]["layout"] == {"u": ["trajectory", "time", "x"]}
    assert settings["task"]["a"]["boundary"] == "periodic" and "is nu = 0.1 another in further files" in text
    assert ("dt: 1.0" in text, "domain" in settings["task"]["a"]) == (
        (False, False) if coordinates else (True, True)
    )
    assert ("are these its axes" in text) != coordinates
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    assert config.task["a"].dt == (DT if coordinates else 1.0)
    assert open_source(config, "a").num_trajectories == N


def test_a_description_finds_axes_by_arrays_of_any_name_and_parameters_by_what_differs(tmp_path):
    """A list in even steps is a coordinate, any other a parameter; an attribute is one where files differ."""
    rng = np.random.default_rng(0)
    for number in (1, 2):
        write(
            tmp_path / f"run{number}.h5",
            sim__vel=waves().transpose(2, 1, 0),
            xgrid=22 / X * np.arange(X),
            tgrid=DT * np.arange(T),
            visc=rng.random(N),
            attr_Re=100.0 * number,
            attr_box=22.0,
        )
    text = describe_file(str(tmp_path / "run1.h5"))
    settings = yaml.safe_load(text)["task"]["run"]
    assert settings["layout"] == {"sim/vel": ["x", "time", "trajectory"]} and "are these its axes" not in text
    assert (settings["domain"], settings["dt"]) == ({"x": "xgrid"}, "tgrid")
    assert settings["parameters"] == {"Re": "Re", "visc": "visc"}
    assert "is box = 22 another in further files" in text
    assert settings["files"].endswith("run*.h5") and "conserved: [vel]" in text
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    source = open_source(config, "run")
    assert config.spec("run").fields == ("vel",)
    assert source.dt == DT
    assert config.task["run"].domain == {"x": [0, 22]}
    assert np.array_equal(source.read(0, N)[:, :, 0], waves())


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
    rng, is_film = np.random.default_rng(0), layout[0] == "time"
    u = {
        name: rng.standard_normal(shape).cumsum(0) if is_film else rng.standard_normal(shape)
        for name, shape in shapes.items()
    }
    text = describe_file(str(write(tmp_path / "a.h5", **u)))
    settings = yaml.safe_load(text)["task"]["a"]
    assert settings["layout"] == dict.fromkeys(shapes, layout)
    assert (settings.get("inputs") == ["a"]) == (len(shapes) == 2)


def test_frames_of_a_masked_film_and_of_a_field_equal_in_all_cells_are_seen_to_follow(tmp_path):
    u = np.random.default_rng(0).standard_normal((40, 14, 16, 23)).cumsum(1)
    u[..., 3:6, 4:9] = np.nan
    even = np.repeat(u[:, :, 0, :1], 32, -1)
    for frames, layout in ((u, ["trajectory", "time", "x", "y"]), (even, ["trajectory", "time", "x"])):
        text = describe_file(str(write(tmp_path / "a.h5", u=frames)))
        assert yaml.safe_load(text)["task"]["a"]["layout"] == {"u": layout}


def test_files_that_differ_in_a_number_are_one_set_where_it_counts_them(tmp_path):
    """Dates and counts are of runs; other numbers may be of noise or a parameter, which is a question."""
    names = {
        "dates": ("ta_195801-195812", "ta_195901-195912", "ta_*-*", False),
        "counts": ("r_9_a", "r_10_a", "r_*_a", False),
        "noise": ("n_1", "n_5", "n_*", True),
        "scenarios": ("ssp126_2015", "ssp585_2016", "ssp*_*", True),
        "other": ("x_1", "x_2", "x_*", True),
    }
    for first, second, pattern, is_question in names.values():
        for name in (first, second, "x_old"):
            write(tmp_path / f"{name}.h5", u=waves())
        [line] = [
            line for line in describe_file(str(tmp_path / f"{first}.h5")).splitlines() if "files:" in line
        ]
        assert f'/{pattern}.h5"' in line and line.endswith("?") == is_question, line


def test_dimensions_without_coordinates_keep_their_names(tmp_path):
    fields = {name: (("run", "time", "dim_0"), waves((20, 12, X))) for name in "ab"}
    xarray.Dataset(fields).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    text = describe_file(str(tmp_path / "a.nc"))
    assert yaml.safe_load(text)["task"]["a"]["layout"]["b"] == ["trajectory", "time", "dim_0"]


def test_the_domain_of_points_on_walls_reaches_half_a_cell_beyond_them(tmp_path):
    u = waves((20, T, 33))
    u[..., [0, -1]] = 0
    for name, x in {"walls": np.linspace(0, 1, 33), "centres": (np.arange(33) + 0.5) / 33}.items():
        path = write(tmp_path / f"{name}.h5", u=u, x=x, t=DT * np.arange(T))
        settings = {**section(tmp_path, files=str(path), boundary="dirichlet", symmetries=[]), "domain": []}
        config, source, _ = read(tmp_path, settings)
        assert config.task["ks"].domain["x"] == ([-0.015625, 1.015625] if name == "walls" else [0, 1])
        assert np.allclose(source.coordinates["x"], x)
    write(tmp_path / "bare.h5", u=u)  # nothing tells: the question does
    assert "from where to where, half a cell beyond the first and the last point?" in describe_file(
        str(tmp_path / "bare.h5")
    )


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
    settings = yaml.safe_load(describe_file(str(write(tmp_path / "a.h5", v=v.astype(np.float32)))))["task"][
        "a"
    ]
    assert settings["layout"] == {"v": ["trajectory", "time", "x", "y", "component"]}
    assert settings["boundary"] == {"x": "no_flux", "y": "periodic"}


HOSTILE = cases("userdata_describe.hostile")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_in_a_file_becomes_a_setting(tmp_path, name):
    """Of a field, of an array beside it, of times, of coordinates, of attributes, and of files."""
    u, t, x = waves((20, T, X)), DT * np.arange(T), 22 / X * np.arange(X)
    nu = np.random.default_rng(0).random(20)
    cases = {
        "beside": {
            f"mine{name.replace('/', '')}": {"u": u, "t": t, "x": x},
            "other": {name: u, "t": t, "x": x},
        },
        "field": {"mine": {name: u, f"t{name}": t, f"x{name}": x, f"nu{name}": nu}},
    }
    for case, files in cases.items():
        (tmp_path / case).mkdir()
        for stem, arrays in files.items():
            with h5py.File(tmp_path / case / f"{stem}.h5", "w") as file:
                file.attrs[name] = 1.0
                for array, values in arrays.items():
                    file[array] = values
                file[[*arrays][0]].attrs["units"] = name
        try:
            text = describe_file(str(tmp_path / case / f"{[*files][0]}.h5"))
        except ValueError:  # control characters are refused where names are read
            continue
        document = load_yaml(text)
        [section] = document["task"].values()
        assert (
            {*document} == {"include", "data", "task"} and "base" not in section and "solver" not in section
        )
        assert all(line.isprintable() for line in text.split("\n")), text
        uncommented = [line.strip()[2:] for line in text.split("\n") if re.match(r" +# [\w\"]+: ", line)]
        assert uncommented
        assert all("base" not in load_yaml(line) for line in uncommented if "steps" not in line)


@pytest.mark.parametrize(
    "name", [*HOSTILE, "u", "y", "1.0", "0x10", "1_000", "2001-01-01", "\ud800", "=", ""]
)
def test_yaml_of_any_name_reads_as_that_name(name):
    for value in (name, [name], {name: [name, 1e-5, 3, True]}):
        assert load_yaml(yaml_text(value)) == value and yaml_text(value).isprintable()
    text = written([Line("task", (Line(name, {name: 1}, name), Line("b", name, name, is_offered=True)))])
    assert load_yaml(text) == {"task": {name: {name: 1}}} and text.count("\n") == 2


def test_a_line_that_reads_as_another_is_never_printed(monkeypatch):
    monkeypatch.setattr("ups.userdata.describe_lines.yaml_text", lambda value: str(value))
    with pytest.raises(ValueError, match="the section is meant to say .*base.* and reads as"):
        written([Line("u\nbase", 1)])


def test_a_list_with_nan_or_of_another_length_is_no_parameter(tmp_path):
    u, nu = waves((12, 30, X)), np.random.default_rng(0).random(12)
    lists = {"nu": nu, "mu": np.where(nu < 0.5, np.nan, nu), "other": np.random.default_rng(1).random(20)}
    text = describe_file(str(write(tmp_path / "a.h5", u=u, t=DT * np.arange(30), x=np.arange(X), **lists)))
    assert yaml.safe_load(text)["task"]["a"]["parameters"] == {"nu": "nu"}
    assert "other" not in text and "mu" not in text


def test_of_a_parameter_at_several_places_the_first_counts(tmp_path):
    arrays = {}
    for run, u in enumerate(waves((12, 30, X))):
        nu = np.array(0.1 * run)
        arrays |= {f"{run:02}__u": u, f"{run:02}__nu": nu, f"{run:02}__params__nu": nu}
    text = describe_file(str(write(tmp_path / "a.h5", **arrays)))
    assert yaml.safe_load(text)["task"]["a"]["parameters"] == {"nu": "*/nu"}


def doctor(folder, text, capsys):
    """(Exit status, what the doctor says) of a section as it was described."""
    (folder / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    status = prepare_data.main(["--config", str(folder / "my.yaml"), "--doctor"])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["tt", "T", "times", "t_span", "tspan", "sim_time", "time_steps", "t_eval", "Time", "time (s)", "clock"],
)
@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1)])
def test_times_are_found_under_any_name_and_as_a_row_or_a_column(tmp_path, name, shape):
    times = {name: (0.5 * np.arange(201)).reshape(shape)}
    section, text = described(tmp_path, uu=film(201).T, x=(np.arange(64) / 64)[:, None], **times)
    assert section["layout"] == {"uu": ["x", "time"]} and section.get("dt", name) == name
    assert section["cut"] == 10 and "forecasts are judged up to 9 frames ahead, 4.5 time units" in text


def test_a_coordinate_of_any_name_is_that_of_the_axis_of_its_length(tmp_path, capsys):
    """Also a number of each run beside them, and two lists of one length, of which names decide."""
    u = np.stack([film(30) + k for k in range(12)])
    lists = {"position": 3.0 * np.arange(64), "clock": 0.5 * np.arange(30), "nu": np.linspace(1, 2, 12)}
    section, text = described(tmp_path, u=u, **lists)
    assert section["layout"] == {"u": ["trajectory", "time", "x"]} and section["parameters"] == {"nu": "nu"}
    assert (section["dt"], section["domain"]) == ("clock", {"x": "position"}) and "are these its axes" in text
    assert "have no trajectory in training" in doctor(tmp_path, text, capsys)[1]  # of 12 values
    square = film(64)
    section, text = described(tmp_path, u=u, t=np.arange(30), x=np.arange(64), k=np.linspace(1, 2, 12))
    assert section["layout"] == {"u": ["trajectory", "time", "x"]} and section["parameters"] == {"k": "k"}
    section, text = described(tmp_path, u=square, x=np.arange(64.0), t=0.1 * np.arange(64))
    assert section["layout"] == {"u": ["time", "x"]} and "are these its axes, in order?" in text


@pytest.mark.parametrize("name", ["y", "wall_normal"])
def test_uneven_coordinates_are_refused_or_a_question_and_never_in_order(tmp_path, capsys, name):
    y, t = np.tanh(np.linspace(-2, 2, 33)) / np.tanh(2), 0.1 * np.arange(300)
    u = np.cos(np.pi * y / 2) * np.sin(0.2 * t)[:, None] + 0.2 * np.sin(np.pi * y) * np.cos(0.31 * t)[:, None]
    with pytest.raises(
        ValueError, match=rf"{name} has steps of .* differ 12.5-fold; expected cells of equal size"
    ):
        described(tmp_path, u=u, t=t, **{name: y})
    axis = "y" if name == "y" else "x"
    keys = {
        "files": f"{tmp_path}/a.npz",
        "layout": {"u": ["time", axis]},
        "boundary": "dirichlet",
        "coordinates": {axis: name},
        "domain": {axis: [-1, 1]},
        "cut": 15,
    }
    data = {"tasks": ["a"], "source": "user", "test_fraction": 0.3}
    text = yaml.safe_dump({"include": "configs/small.yaml", "data": data, "task": {"a": keys}})
    status, words = doctor(tmp_path, text, capsys)
    assert status == 1 and f"the steps of {name} differ 12.5-fold and count as equal" in words
    mild = np.linspace(-1, 1, 33) + 0.02 * np.linspace(-1, 1, 33) ** 3
    section, text = described(tmp_path, u=u, t=t, **{name: mild})
    assert f"{name} has steps of" in text and "are its cells to be counted as equal" in text
    assert "To do: resample the fields to equal steps" in doctor(tmp_path, text, capsys)[1]


def test_a_coefficient_may_come_before_the_film(tmp_path):
    """Of films in runs, whose first array has no axis of time."""
    u, axes = waves((12, 30, X, 12)), {"x": np.arange(X), "y": np.arange(12.0), "time": DT * np.arange(30)}
    section, _ = described(tmp_path, u=u, a=u[:, 0], **axes)
    assert section["layout"] == {"u": ["trajectory", "time", "x", "y"], "a": ["trajectory", "x", "y"]}
    xarray.Dataset({"a": (("run", "x", "y"), u[:, 0]), "u": (("run", "time", "x", "y"), u)}, axes).to_netcdf(
        tmp_path / "a.nc", engine="h5netcdf"
    )
    text = describe_file(str(tmp_path / "a.nc"))
    assert [*yaml.safe_load(text)["task"]["a"]["layout"]] == ["a", "u"] and "dt: " not in text


def test_two_materials_at_both_ends_repeat_no_cell(tmp_path):
    """A coefficient of two values may agree at both ends of its first map by chance; a wave may not."""
    x = np.arange(16) / 15
    wave = np.sin(2 * np.pi * (x + np.random.default_rng(0).random((20, 1))))
    for name, u in {"wave": wave, "materials": np.where(wave > 0, 1.0, 0.1)}.items():
        u[:, -1] = u[:, 0]
        np.savez(tmp_path / f"{name}.npz", u=np.broadcast_to(u[:, None, None], (20, 5, 16, 16)).copy())
        section = describe_file(tmp_path / f"{name}.npz")
        assert ("the last cell is the first again" in section) == (name == "wave"), section


def not_a_field(kind):
    """Arrays that are no field, by the words of their refusal."""
    x, t, rng = np.linspace(0, 1, 128), 0.01 * np.arange(1000), np.random.default_rng(0)
    nodes = rng.random((3067, 2))
    steady = np.sin(np.pi * x)[:, None] * np.sin(np.pi * x) ** 2
    on_nodes = np.stack([np.sin(6 * nodes[:, 0] + 0.1 * k) * nodes[:, 1] for k in range(59)])
    return {
        "1 map of u": {"u": steady, "x": x, "y": x},
        "ordinary differential equation": {"t": t, "x": np.stack([np.cos(t), -np.sin(t)], 1)},
        "no more alike than any two": {"u": on_nodes},
        "x and y hold 2 coordinates of each": {"u": on_nodes, "x": nodes[:, 0], "y": nodes[:, 1]},
        "nodes holds 2 coordinates of each": {"u": on_nodes, "nodes": nodes},
        "lat and lon hold 2": {"u": film(100, 50), "lat": nodes[:50, 0], "lon": nodes[:50, 1]},
        "x and y hold 2 coordinates": {"u": film(100, 60), "x": np.arange(60.0), "y": np.arange(60.0)},
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "1 map of u",
        "ordinary differential equation",
        "no more alike than any two",
        "x and y hold 2 coordinates of each",
        "nodes holds 2 coordinates of each",
        "lat and lon hold 2",
        "x and y hold 2 coordinates",
    ],
)
def test_what_is_no_field_on_a_grid_is_refused_by_what_it_is(tmp_path, kind):
    with pytest.raises(ValueError, match=kind):
        described(tmp_path, **not_a_field(kind))


def test_of_several_files_one_is_asked_for():
    with pytest.raises(ValueError, match="a_1.nc and 2 more were given; expected one file"):
        describe_file("a_1.nc", "a_2.nc", "a_3.nc")


def test_what_is_described_passes_the_doctor(tmp_path, capsys):
    """Scales of a solver are neither parameters nor forcing; a list of tensors is a list of runs; a short
    film is judged as far ahead as six windows of test allow, which is said."""
    scales = {
        "sim_time": 0.5 * np.arange(60),
        "iteration": 10 * np.arange(60),
        "timestep": 0.05 + np.sin(np.arange(60)) / 99,
    }
    lists = {f"scales__{name}": values for name, values in scales.items()}
    path = write(
        tmp_path / "s1.h5", tasks__u=film(60, 48), **lists, **{"scales__z__1.0": (np.arange(48) + 0.5) / 48}
    )
    torch.save([torch.tensor(film(20, 32)) for _ in range(5)], tmp_path / "films.pt")
    np.save(tmp_path / "film.npy", film())
    text = describe_file(str(path))
    section = yaml.safe_load(text)["task"]["s1"]
    assert section["layout"] == {"tasks/u": ["time", "z"]} and not {"parameters", "forcing"} & {*section}
    assert (section["dt"], section["domain"]) == ("scales/sim_time", {"z": "scales/z/1.0"})
    assert doctor(tmp_path, text, capsys)[0] == 0
    text = describe_file(str(tmp_path / "films.pt"))
    assert yaml.safe_load(text)["task"]["films"]["layout"] == {"*": ["time", "x"]}
    assert "inputs" not in text and "repeat an earlier one" in doctor(tmp_path, text, capsys)[1]
    assert prepare_data.main(["--describe", str(tmp_path / "films.pt")]) == 0
    text = describe_file(str(tmp_path / "film.npy"))
    settings = yaml.safe_load(text)
    assert settings["task"]["film"]["cut"] == 10 and settings["data"]["test_fraction"] == 0.3
    status, words = doctor(tmp_path, text, capsys)
    assert status == 0 and "forecasts are judged up to 9 frames ahead, 9 time units" in words
    status, words = doctor(tmp_path, text.replace("cut: 10", "cut: 3"), capsys)
    assert "caution forecasts are judged up to 2 frames ahead" in words and "raise task.film.cut" in words


def test_an_array_whose_name_is_a_pattern_is_described_or_refused_in_one_line(tmp_path):
    lists = {"x": np.arange(16) / 16, "t": 0.1 * np.arange(8), "nu": np.arange(1.0, 13)}
    np.savez(tmp_path / "a.npz", **lists, **{"*": waves((12, 8, 16))})
    with contextlib.suppress(ValueError):
        assert "?" in describe_file(str(tmp_path / "a.npz"))


def test_a_coordinate_that_hdf5_attaches_to_one_axis_says_nothing_of_the_others(tmp_path):
    found = []
    for is_attached in (False, True):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["u"], file["x"] = waves((20, 16, 32)), np.arange(32) / 32
            if is_attached:
                file["x"].make_scale("x")
                file["u"].dims[2].attach_scale(file["x"])
        found.append(yaml.safe_load(describe_file(str(tmp_path / "a.h5"))))
    assert found[0] == found[1]


def named_axes(path, name, u, lists):
    """An array whose axes are dimension scales: (label, scale, numbers), as Dedalus has them."""
    with h5py.File(path, "w") as file:
        file[name] = u
        for axis, (label, scale, values) in enumerate(lists):
            file[scale] = values
            file[scale].make_scale(scale)
            file[name].dims[axis].attach_scale(file[scale])
            file[name].dims[axis].label = label
    return str(path)


def test_a_file_of_dedalus_is_read(tmp_path):
    u = waves((1, 60, 32, 24))[0]
    x, z = np.arange(32) / 32, (np.arange(24) + 0.5) / 24
    lists = [
        ("t", "scales/sim_time", 0.5 * np.arange(60)),
        ("x", "scales/x_hash_1", x),
        ("z", "scales/z_hash_2", z),
    ]
    text = describe_file(named_axes(tmp_path / "snapshots.h5", "tasks/u", u, lists))
    settings = yaml.safe_load(text)["task"]["snapshots"]
    assert settings["layout"] == {"tasks/u": ["time", "x", "z"]} and settings["dt"] == "scales/sim_time"
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    assert config.task["snapshots"].dt == 0.5 and config.task["snapshots"].domain["z"] == [0, 1]


def test_the_snippets_of_the_page_convert_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    u, t, x = film(200, 32), 0.5 * np.arange(200), (np.arange(32) + 0.5) / 32
    for number, frame in enumerate(waves((1, 40, 24, 32))[0]):
        one = xarray.Dataset({"u": (("time", "y", "x"), frame[None])}, {"time": [0.5 * number]})
        one.to_netcdf(f"film_{number:03d}.nc", engine="h5netcdf")
    np.savez("film.npz", **{f"u_{number}": frame for number, frame in enumerate(u)}, t=t)
    fields = {"u": (("time", "x_face"), film(200, 33)), "c": (("time", "x"), u)}
    places = {"time": t, "x": x, "x_face": np.arange(33) / 32}
    xarray.Dataset(fields, places).to_netcdf("staggered_film.nc", engine="h5netcdf")
    y = np.tanh(np.linspace(-2, 2, 32)) / np.tanh(2)
    xarray.Dataset({"u": (("time", "y"), u)}, {"time": t, "y": y}).to_netcdf("uneven_film.nc")
    for name in "uv":
        one = xarray.Dataset({name: (("time", "x"), u)}, {"time": t, "x": x})
        one.to_netcdf(f"{name}_film.nc", engine="h5netcdf")
    for name, message in {
        "film_000.nc": "one map of u, as do 40 files of such names; expected the frames of a run in one file",
        "film.npz": r"200 arrays u_0, u_1, .. of shape \(32,\); expected one with an axis of time",
        "staggered_film.nc": "c along x and u along x_face; expected all fields on one grid",
        "uneven_film.nc": "y has steps of .* differ 12.*-fold; expected cells of equal size",
    }.items():
        with pytest.raises(ValueError, match=f"(?s){message}.*Files to convert first"):
            describe_file(name)
    page = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8").split("## Files to convert first")[1]
    for block in re.findall(r"^```python\n(.*?)^```", page.split("\n## ")[0], re.S | re.M):
        exec(block, {})  # noqa: S102
    for name, layout in {
        "joined.nc": {"u": ["time", "y", "x"]},
        "stacked.npz": {"u": ["time", "x"]},
        "merged.nc": dict.fromkeys("uv", ["time", "x"]),
        "centred.nc": dict.fromkeys("uc", ["time", "x"]),
        "even.nc": {"u": ["time", "y"]},
    }.items():
        [section] = yaml.safe_load(describe_file(name))["task"].values()
        assert section["layout"] == layout


def test_fields_are_not_looked_at_again_for_each_other(tmp_path, monkeypatch):
    """95 fields took 19,700 requests, 10 s of processor time: each was compared with all others."""
    asked = counted_requests(monkeypatch)

    def requests(num, **coordinates):
        asked.clear()
        fields = {f"{chr(97 + i % 26)}{chr(97 + i // 26)}": waves((N, T, X)) for i in range(num)}
        (folder := tmp_path / f"{num}_{len(coordinates)}").mkdir()
        describe_file(str(write(folder / "film.h5", **fields, **coordinates)))
        return asked["all"]

    for coordinates in ({}, {"x": np.arange(X) / X, "t": DT * np.arange(T)}):
        assert requests(90, **coordinates) - requests(45, **coordinates) <= 10 * 45, asked
