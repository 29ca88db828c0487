"""Sections and files that do not fit get one line, which names the key and what to write there."""

import re

import h5py
import numpy as np
import pytest
import yaml
import zarr
from cases import cases
from user_files import DT, N, T, X, Y, config_of, overlay, read, section, waves, well_file, write

from ups.config.load import load_config
from ups.data.build_cache import build_cache, is_up_to_date
from ups.data.sources import open_source
from ups.userdata.describe import describe_file
from ups.userdata.inspect_file import number_in


def refused(folder, message, keys=None, **changes):
    with pytest.raises(ValueError, match=message) as caught:
        read(folder, keys, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "message"), cases("userdata_errors.descriptions"))
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
        open_source(config_of(tmp_path, **changes), "ks")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "shape", "message"), cases("userdata_errors.others"))
def test_files_that_do_not_fit_each_other_are_named(tmp_path, name, shape, message):
    write(tmp_path / "a.h5", u=waves())
    write(tmp_path / "b.h5", **{name: waves(shape)})
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_a_name_that_is_taken_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves())
    path = overlay(tmp_path, {})
    path.write_text(
        yaml.safe_dump({"data": {"tasks": ["burgers1d"]}, "task": {"burgers1d": section(tmp_path)}})
    )
    with pytest.raises(ValueError, match="under the name of a built-in task; expected a name of its own"):
        load_config(path)
    with pytest.raises(ValueError, match="or a user task, whose data task.kss.files names"):
        config_of(tmp_path, ["data.tasks=[kss]"])


@pytest.mark.parametrize(("pattern", "name", "number"), cases("userdata_errors.names"))
def test_a_number_in_the_name_of_a_file_is_taken_whole_or_not_at_all(pattern, name, number):
    """A greedy pattern read 5 of 0.125, and the step that pairs parameters with starts went by it."""
    assert number_in(pattern, name) == number


def test_times_of_every_file_group_and_row_are_looked_at(tmp_path):
    u, t = waves(), np.arange(T)
    write(tmp_path / "a.h5", u=u, t=DT * t)
    write(tmp_path / "b.h5", u=u, t=10 * DT * t)
    for dt in (None, DT, "t"):
        refused(tmp_path, r"task.ks.dt: the frames of \S+b.h5 are 5 apart; expected 0.5 as of the", dt=dt)
    write(tmp_path / "b.h5", u=u, t=np.array([0, 0.01, 0.02, 1.9, 2.0]))  # the two ends alone are right
    refused(tmp_path, r"t in \S+b.h5 has steps of 0.01 to 1.88; expected equal, increasing ones")
    write(tmp_path / "b.h5", u=u, t=-DT * t)
    refused(tmp_path, r"b.h5 has steps of -0.5 to -0.5; .* in the order of their times")
    (tmp_path / "b.h5").unlink()
    write(tmp_path / "a.h5", u=u, t=DT * t[None] * np.arange(1, N + 1)[:, None])
    refused(tmp_path, r"a.h5: row 1 of t has other steps than row 0; expected the same of every trajectory")
    write(tmp_path / "a.h5", u=u, t=DT * t[None] + np.arange(N)[:, None])  # other beginnings are none of ours
    read(tmp_path)


@pytest.mark.parametrize(("axis", "other"), [("t", 3 * DT * np.arange(T)), ("x", 2.0 * np.arange(X))])
def test_groups_of_other_steps_are_named(tmp_path, axis, other):
    def groups(last):
        coordinates = {"t": DT * np.arange(T), "x": 22 / X * np.arange(X)}
        write(
            tmp_path / "a.h5",
            **{f"{i:04}__data": u for i, u in enumerate(waves())},
            **{
                f"{i:04}__grid__{name}": values if (name, i) != (axis, N - 1) else last
                for i in range(N)
                for name, values in coordinates.items()
            },
        )

    keys = section(tmp_path, layout={"*/data": ["time", "x"]})
    groups({"t": DT * np.arange(T), "x": 22 / X * np.arange(X)}[axis])
    read(tmp_path, keys)
    groups(other)
    refused(
        tmp_path,
        rf"a.h5 holds 0005/grid/{axis} that is not in the steps of 0000/grid/{axis}; expected one step",
        keys,
    )


def test_coordinates_of_every_file_are_those_of_the_domain(tmp_path):
    write(tmp_path / "a.h5", u=waves(), x=22 / X * np.arange(X))
    write(tmp_path / "b.h5", u=waves(), x=220 / X * np.arange(X))
    for domain in ([0, 22], None):
        refused(
            tmp_path,
            r"task.ks.domain: that of x is \[0.0, 22.0\], and x in \S+b.h5 runs "
            r"from 0 to 206.25",
            domain=domain,
        )
    for name, scale in (("a", 1), ("b", 10)):
        write(tmp_path / f"{name}.h5", u=waves(), xgrid=scale * 22 / X * np.arange(X))
    refused(tmp_path, r"of x is \[0.0, 22.0\], and xgrid in \S+b.h5 runs from 0 to", domain={"x": "xgrid"})
    write(tmp_path / "b.h5", u=waves(), x=22 / X * np.arange(X))
    refused(tmp_path, r"\S+b.h5 holds no array 'xgrid' of coordinates", domain={"x": "xgrid"})
    write(tmp_path / "b.h5", u=waves(), xgrid=22 / X * np.arange(X))
    read(tmp_path, domain={"x": "xgrid"})
    write(tmp_path / "a.h5", u=waves(), x=22 / X * np.arange(X))
    write(tmp_path / "b.h5", u=waves(), x=22 / X * np.arange(X) ** 2)
    refused(tmp_path, r"x in \S+b.h5 runs from 0 to 309.375 in steps of .*; expected equal steps")


def test_files_of_the_well_with_other_ends_are_named(tmp_path):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y))] * 2, -1)
    for name in "ab":
        well_file(tmp_path / f"{name}.h5", u, v)
    keys = {"files": str(tmp_path / "*.h5"), "layout": "well"}
    read(tmp_path, keys)
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["boundary_conditions/x_periodic"].attrs["bc_type"] = "WALL"
    refused(tmp_path, r"b.h5 says \{'x': 'no_flux', .*; expected one boundary in all files", keys)


def test_more_than_three_parameters_of_the_well_are_refused(tmp_path):
    """The fourth was dropped, and it may be the one that varies."""
    well_file(tmp_path / "a.h5", waves((N, T, X, Y)), np.stack([waves((N, T, X, Y))] * 2, -1))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.attrs.update(simulation_parameters=["a", "b", "c", "Re"], a=1.0, b=2.0, c=3.0)
    keys = {"files": str(tmp_path / "*.h5"), "layout": "well"}
    refused(tmp_path, r"task.ks.parameters: .*'Re'.*; expected at most 3 names", keys)
    read(tmp_path, {**keys, "parameters": {"Re": "scalars/Re"}})


def test_a_group_that_broke_off_is_named(tmp_path):
    """NumPy broadcast its one frame over all."""
    keys = section(tmp_path, layout={"*/data": ["time", "x"]})
    for shape, message in (
        ((1, X), "num_frames: .*a.h5 holds 1 frames in 0003; expected 5 as in .*: 1 to use that many"),
        ((3, X), "num_frames: .*a.h5 holds 3 frames in 0003; expected 5 .* or leave that group out"),
        ((T, 1), r"a.h5 holds \(5, 1\) numbers in 0003/data; expected \(5, 16\) as in 0000"),
    ):
        write(
            tmp_path / "a.h5",
            **{f"{i:04}__data": u[: shape[0], : shape[1]] if i == 3 else u for i, u in enumerate(waves())},
        )
        refused(tmp_path, message, keys)
    write(
        tmp_path / "a.h5",
        **{f"{i:04}__{'other' if i == 3 else 'data'}": u for i, u in enumerate(waves())},
        **{f"{i:04}__still": u[0] for i, u in enumerate(waves())},
    )
    refused(
        tmp_path,
        "holds no array 0003/data|trajectory is 6 long in 0000/still .* and 5 in 0000/data",
        layout={"*/still": ["x"], "*/data": ["time", "x"]},
    )


def test_unused_frames_of_longer_files_are_noted(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X)))
    write(tmp_path / "b.h5", u=waves((N, 2 * T, X)))
    _, source, _ = read(tmp_path)
    assert source.notes == ("2 files", "the first 5 frames, of up to 10")


@pytest.mark.parametrize(("axes", "message"), cases("userdata_errors.axes"))
def test_words_that_are_no_axis_of_space_are_not_taken_for_one(tmp_path, axes, message):
    u = waves() if len(axes) == 3 else np.stack([waves((N, T, X, Y))] * 2, -1)
    write(tmp_path / "a.h5", u=u)
    refused(tmp_path, message, layout={"u": axes})


def test_an_axis_of_an_unusual_name_has_a_domain(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, Y)))
    *_, values = read(
        tmp_path, layout={"u": ["trajectory", "time", "radius", "x"]}, domain={"radius": [0, 1], "x": [0, 22]}
    )
    assert values.shape == (N, T, 1, X, Y)


def test_components_along_turned_axes_are_as_they_are_named(tmp_path):
    u = np.stack([waves((N, T, X, Y)), 2 * waves((N, T, X, Y))], -1)  # (u_x, u_y) on axes stored y, x
    write(tmp_path / "a.h5", u=u)
    config, source, _ = read(
        tmp_path,
        layout={
            "u": {
                "array": "u",
                "axes": ["trajectory", "time", "y", "x", "component"],
                "fields": ["u_x", "u_y"],
            }
        },
        vector=["u_y", "u_x"],
    )
    assert source.task.vector == ("u_y", "u_x") and source.task.axes == ("y", "x")


def test_axes_that_contradict_the_names_in_the_file_are_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, X)))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        for dim, name in zip(file["u"].dims, ("run", "time", "y", "x"), strict=True):
            dim.label = name
    refused(
        tmp_path,
        "it calls an axis x that the file calls y; expected the order of the axes in .*, run, time, y, x",
        layout={"u": ["trajectory", "time", "x", "y"]},
    )
    read(tmp_path, layout={"u": ["trajectory", "time", "y", "x"]})


def test_a_folder_that_is_written_anew_is_not_up_to_date(tmp_path):
    u = waves()
    zarr.open(str(tmp_path / "a.zarr"), mode="w")["u"] = u
    config = config_of(tmp_path, files=str(tmp_path / "a.zarr"))
    build_cache(config, "ks", progress=False)
    assert is_up_to_date(config, "ks") == (True, "settings and data files are as they were")
    zarr.open(str(tmp_path / "a.zarr"), mode="r+")["u"][:] = 7 * u[::-1]
    assert is_up_to_date(config, "ks")[0] is False


def test_a_stride_that_does_not_divide_the_grid_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves())
    refused(
        tmp_path,
        re.escape(
            "task.ks.space_stride 3 does not divide the grid of 16 cells, so that what is kept would not "
            "fill the domain; expected one of [1, 2, 4, 8, 16]"
        ),
        space_stride=3,
    )


def test_single_arrays_have_no_coordinates(tmp_path):
    """One in a .npy goes by any name, and was taken for the coordinate of its own axis."""
    np.save(tmp_path / "a.npy", waves()[0])
    *_, values = read(tmp_path, files=str(tmp_path / "a.npy"), layout={"u": ["time", "x"]})
    assert values.shape == (1, T, 1, X)


def test_an_ambiguous_parameter_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves(), nu=np.arange(1.0, N + 1), attr_nu=7.0)
    refused(tmp_path, "holds an attribute nu and an array nu; expected one of them", parameters={"nu": "nu"})
    _, source, _ = read(tmp_path, parameters={"nu": "@nu"})
    assert source.parameters[:, 0].tolist() == [7.0] * N
    runs = {f"r{i}__data": u for i, u in zip((1, 2, 10), waves(), strict=False)}
    write(tmp_path / "a.h5", **runs, nu=np.array([1.0, 10.0, 2.0]))  # as h5py lists the groups
    keys = section(tmp_path, layout={"*/data": ["time", "x"]}, parameters={"nu": "nu"})
    refused(
        tmp_path,
        "for groups whose names may be sorted as r1, r2, .. or as r1, r10, ..; expected a value in each",
        keys,
    )
    write(tmp_path / "a.h5", **runs, **{f"r{i}__nu": float(i) for i in (1, 2, 10)})
    _, source, _ = read(tmp_path, {**keys, "parameters": {"nu": "*/nu"}})
    assert source.parameters[:, 0].tolist() == [1.0, 2.0, 10.0]


def runs_with_nu(path, kind, values):
    """A group per run, with nu as a number in it, or as an attribute of it or of its array."""
    with h5py.File(path, "w") as file:
        for i, (u, value) in enumerate(zip(waves((len(values), T, X)), values, strict=True)):
            group = file.create_group(f"run_{i:02d}")
            data = group.create_dataset("u", data=u)
            if kind == "number":
                group["nu"] = value
            else:
                (group if kind == "group" else data).attrs["nu"] = value
    return path


@pytest.mark.parametrize(("kind", "place"), [("number", "*/nu"), ("group", "*@nu"), ("array", "*/u@nu")])
def test_the_parameter_of_each_run_is_its_own(tmp_path, kind, place):
    values = [0.03, 0.02] * 10 + [0.05]
    path = runs_with_nu(tmp_path / "a.h5", kind, values)
    keys = {**section(tmp_path, files=str(path)), "layout": {"*/u": ["time", "x"]}}
    _, source, _ = read(tmp_path, {**keys, "parameters": {"nu": place}})
    assert source.parameters[:, 0].tolist() == values
    of_first = place.replace("*", "run_00")
    refused(
        tmp_path,
        f"{of_first} is the number of one run; expected a number of every run.*Write nu: .{re.escape(place)}",
        {**keys, "parameters": {"nu": of_first}},
    )
    others = {"run_00/nu", "run_00@nu"} - {of_first}
    for wrong in ("mu", "nu", "run_00/nu@x", *others):
        message = f"no number in '{wrong}'.*each run: {re.escape(place)}"
        refused(tmp_path, message, {**keys, "parameters": {"nu": wrong}})
    endless = {**keys, "parameters": {"nu": "mu" * 100}}
    refused(tmp_path, r"no number in '(mu){30,40}m?; expected", endless)
    [described] = yaml.safe_load(describe_file(str(path)))["task"].values()
    assert described["parameters"] == {"nu": place}


def test_a_run_with_two_values_of_a_parameter_or_none_is_refused(tmp_path):
    keys = {**section(tmp_path), "layout": {"*/u": ["time", "x"]}, "parameters": {"nu": "*/nu"}}
    path = runs_with_nu(tmp_path / "a.h5", "number", [1.0] * 3)
    with h5py.File(path, "r+") as file:
        del file["run_01/nu"]
    refused(tmp_path, r"no number in '\*/nu'", keys)
    with h5py.File(path, "r+") as file:
        file["run_01/nu"] = [1.0, 2.0]
    refused(tmp_path, r"\*/nu in .* holds array\(\[1., 2.\]\)", keys)


def test_parameters_of_arrays_and_columns_are_read(tmp_path):
    for i, u in enumerate(waves()):  # a file per run
        with h5py.File(tmp_path / f"run_{i}.h5", "w") as file:
            file.create_dataset("u", data=u).attrs["nu"] = float(i)
    keys = section(tmp_path, layout={"u": ["time", "x"]})
    _, source, _ = read(tmp_path, {**keys, "parameters": {"nu": "u@nu"}})
    assert source.parameters[:, 0].tolist() == [*range(N)]
    [described] = yaml.safe_load(describe_file(str(tmp_path / "run_0.h5")))["task"].values()
    assert described["parameters"] == {"nu": "u@nu"}
    write(tmp_path / "column.hdf5", u=waves(), nu=np.arange(N)[:, None])
    keys = section(tmp_path, files=str(tmp_path / "*.hdf5"), parameters={"nu": "nu"})
    assert read(tmp_path, keys)[1].parameters[:, 0].tolist() == [*range(N)]
    write(tmp_path / "column.hdf5", u=waves(), nu=np.arange(N + 1))
    refused(tmp_path, f"holds {N + 1} values; expected 1, or {N} as it holds trajectories", keys)


def test_an_end_of_time_that_the_frames_do_not_reach_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves())
    refused(tmp_path, "task.ks.t_end: it is 100; expected 2: 5 frames, 0.5 apart", t_end=100.0)
    read(tmp_path, t_end=2.0)
