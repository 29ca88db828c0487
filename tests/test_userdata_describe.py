"""--describe prints a section that loads, with a question wherever the file does not tell."""

import re
import subprocess
import sys

import h5py
import numpy as np
import pytest
import xarray
import yaml
from user_files import DT, SMALL, N, T, X, Y, read, section, waves, write

from ups.common.text import load_yaml, yaml_text
from ups.config import load_config
from ups.data.sources import open_sources
from ups.userdata.data_checks import walls
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
    assert [source.num_trajectories for source in open_sources(config, "a")] == [N]


def test_axes_in_another_order_are_found_by_their_coordinates(tmp_path):
    path = write(tmp_path / "a.h5", u=waves().transpose(2, 0, 1), t=DT * np.arange(T), x=np.arange(X) * 1.0)
    assert yaml.safe_load(describe_file(str(path)))["task"]["a"]["layout"] == {
        "u": ["x", "trajectory", "time"]
    }


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
    assert (
        settings["parameters"] == {"Re": "Re", "visc": "visc"}
        and "is box = 22 another in further files" in text
    )
    assert settings["files"].endswith("run*.h5") and "conserved: [vel]" in text
    (tmp_path / "my.yaml").write_text(text.replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    config = load_config(tmp_path / "my.yaml")
    [source] = open_sources(config, "run")
    assert (
        config.spec("run").fields == ("vel",)
        and source.dt == DT
        and config.task["run"].domain == {"x": [0, 22]}
    )
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
    """Or otherwise, which the description offers where the shapes allow it."""
    rng, is_film = np.random.default_rng(0), layout[0] == "time"
    u = {
        name: rng.standard_normal(shape).cumsum(0) if is_film else rng.standard_normal(shape)
        for name, shape in shapes.items()
    }
    text = describe_file(str(write(tmp_path / "a.h5", **u)))
    settings = yaml.safe_load(text)["task"]["a"]
    assert settings["layout"] == dict.fromkeys(shapes, layout) and (settings.get("inputs") == ["a"]) == (
        len(shapes) == 2
    )
    assert ("# or " in text) == (len(layout) == 3)


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
    assert (
        yaml.safe_load(text)["task"]["a"]["layout"]["b"] == ["trajectory", "time", "dim_0"]
        and "# or " not in text
    )


def test_points_on_walls_are_distinguished_from_cell_centres(tmp_path):
    u = waves((20, T, 33))
    u[..., [0, -1]] = 0
    for name, x in {"walls": np.linspace(0, 1, 33), "centres": (np.arange(33) + 0.5) / 33}.items():
        path = tmp_path / f"{name}.h5"
        write(path, u=u, x=x, t=DT * np.arange(T))
        text = describe_file(str(path))
        on_walls = "x: the first and last point lie on the walls; the domain reaches half a cell beyond them"
        assert (f"{on_walls}, [-0.015625, 1.015625]" in text) == (name == "walls")
        settings = {**section(tmp_path, files=str(path), boundary="dirichlet", symmetries=[]), "domain": []}
        config, source, _ = read(tmp_path, settings)
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
    settings = yaml.safe_load(describe_file(str(write(tmp_path / "a.h5", v=v.astype(np.float32)))))["task"][
        "a"
    ]
    assert settings["layout"] == {"v": ["trajectory", "time", "x", "y", "component"]}
    assert settings["boundary"] == {"x": "no_flux", "y": "periodic"}


HOSTILE = [
    'v\n    base: {solver: "theirs.evil:step"}\n#',
    'v"\n    base: {solver: "theirs.evil:step"}\n#',
    "v: [time, x]}\rbase: {solver: theirs.evil}",
    "v\u2028    base: 1",
    "v\x85    base: 1",
    'u", base: {solver: "theirs.evil:step"}, x: "',
    "u}   # {",
    "u: {base: 1}",
    "!!python/name:os.system",
    "&a",
    "*a",
    "<<",
    "- x",
    "? x",
    "1e3",
    "no",
    "null",
    "%TAG",
    "\u202ev",
    " ",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_in_a_file_becomes_a_setting(tmp_path, name):
    """Of a field, of an array beside it, of times, of coordinates, of attributes, and of files."""
    u, t, x = waves((20, T, X)), DT * np.arange(T), 22 / X * np.arange(X)
    cases = {
        "beside": {"mine": {"u": u, "t": t, "x": x}, "other": {name: u, "t": t, "x": x}},
        "field": {"mine": {name: u, "t": t, "x": x}},
        "times": {"mine": {"u": u, f"t{name}": t, f"x{name}": x}},
        "parameter": {"mine": {"u": u, "t": t, "x": x, name: np.random.default_rng(0).random(20)}},
        "file": {f"mine{name.replace('/', '')}": {"u": u, "t": t, "x": x}},
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
        except ValueError as error:  # control characters are refused where names are read
            assert not name.isprintable() or name in str(error), (case, error)
            continue
        document = load_yaml(text)
        [section] = document["task"].values()
        assert (
            {*document} == {"include", "data", "task"} and "base" not in section and "solver" not in section
        )
        assert all(line.isprintable() for line in text.split("\n")), text
        uncommented = [line.strip()[2:] for line in text.split("\n") if re.match(r" +# [\w\"]+: ", line)]
        assert uncommented and all(
            "base" not in load_yaml(line) for line in uncommented if "steps" not in line
        )


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


def test_what_the_loader_refuses_is_a_question_and_not_a_setting(tmp_path):
    """lat and lon of 20 stations are no parameters of 12 runs; the list of numbers of a run is."""
    u, rng = waves((12, 30, X)), np.random.default_rng(0)
    path = write(
        tmp_path / "a.h5", u=u, t=DT * np.arange(30), x=np.arange(X), lat=rng.random(20), nu=rng.random(12)
    )
    text = describe_file(str(path))
    assert yaml.safe_load(text)["task"]["a"]["parameters"] == {"nu": "nu"}
    [line] = [line for line in text.splitlines() if "# parameters: {lat: lat}" in line]
    assert "holds 20 values; expected 1, or 12" in line and line.endswith("?")
