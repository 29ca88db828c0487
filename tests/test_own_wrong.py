"""Data of one's own that would be read, but wrongly: each gets a line in place of other content under exit
0."""

import re

import h5py
import numpy as np
import pytest
import xarray
import zarr
from test_own_files import DT, N, T, X, Y, overlay, read, section, waves, well_file, write

from ups.config import load_config
from ups.data.build_cache import build_cache, is_up_to_date
from ups.data.doctor import examine
from ups.data.sources import split_of
from ups.userdata.inspect_file import number_in
from ups.userdata.readers import open_store


def refused(folder, said, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(folder, said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "name", "number"),
    [
        ("{}.h5", "0.125.h5", 0.125),
        ("{}_x.h5", "run_0.125_x.h5", 0.125),
        ("run*{}.h5", "run_s1_nu0.3.h5", 0.3),
        ("nu{}_*", "nu1e-3_a.h5", 1e-3),
        ("nu{}.h5", "nu-2.5.h5", -2.5),
        ("*_{}.h5", "a_-2.5.h5", -2.5),
        ("nu{}*", "nu12.h5", 12),
        ("nu{}*", "nu0p125.h5", None),
        ("*{}.h5", "run-0.125.h5", None),
        ("*{}.h5", "run.h5", None),
    ],
)
def test_a_number_in_the_name_of_a_file_is_taken_whole_or_not_at_all(pattern, name, number):
    """A greedy pattern read 5 of 0.125, and the step that pairs parameters with starts went by it."""
    assert number_in(pattern, name) == number


def test_times_of_every_file_group_and_row_are_looked_at(tmp_path):
    u, t = waves(), np.arange(T)
    write(tmp_path / "a.h5", u=u, t=DT * t)
    write(tmp_path / "b.h5", u=u, t=10 * DT * t)
    for dt in (None, DT, "t"):
        refused(
            tmp_path,
            section(tmp_path, dt=dt),
            r"task.ks.dt: the frames of \S+b.h5 are 5 apart; expected 0.5 as of the",
        )
    write(tmp_path / "b.h5", u=u, t=np.array([0, 0.01, 0.02, 1.9, 2.0]))  # the two ends alone are right
    refused(
        tmp_path,
        section(tmp_path),
        r"t in \S+b.h5 has steps of 0.01 to 1.88; expected equal, increasing ones",
    )
    (tmp_path / "b.h5").unlink()
    write(tmp_path / "a.h5", u=u, t=DT * t[None] * np.arange(1, N + 1)[:, None])
    refused(
        tmp_path,
        section(tmp_path),
        r"a.h5: row 1 of t has other steps than row 0; expected the same of every trajectory",
    )
    write(tmp_path / "a.h5", u=u, t=DT * t[None] + np.arange(N)[:, None])  # other beginnings are none of ours
    read(tmp_path, section(tmp_path))


@pytest.mark.parametrize(("axis", "other"), [("t", 3 * DT * np.arange(T)), ("x", 2.0 * np.arange(X))])
def test_groups_of_other_steps_are_named(tmp_path, axis, other):
    def groups(last):
        known = {"t": DT * np.arange(T), "x": 22 / X * np.arange(X)}
        write(
            tmp_path / "a.h5",
            **{f"{i:04}__data": u for i, u in enumerate(waves())},
            **{
                f"{i:04}__grid__{name}": values if (name, i) != (axis, N - 1) else last
                for i in range(N)
                for name, values in known.items()
            },
        )

    said = section(tmp_path, layout={"*/data": ["time", "x"]})
    groups({"t": DT * np.arange(T), "x": 22 / X * np.arange(X)}[axis])
    read(tmp_path, said)
    groups(other)
    refused(
        tmp_path,
        said,
        rf"0005/grid/{axis} in \S+a.h5 is not in the steps of 0000/grid/{axis}; expected one step",
    )


def test_coordinates_of_every_file_are_those_of_the_domain(tmp_path):
    write(tmp_path / "a.h5", u=waves(), x=22 / X * np.arange(X))
    write(tmp_path / "b.h5", u=waves(), x=220 / X * np.arange(X))
    for domain in ([0, 22], None):
        refused(
            tmp_path,
            section(tmp_path, domain=domain),
            r"task.ks.domain: that of x is \[0.0, 22.0\], and x in \S+b.h5 runs "
            r"from 0 to 206.25",
        )
    for name, scale in (("a", 1), ("b", 10)):
        write(tmp_path / f"{name}.h5", u=waves(), xgrid=scale * 22 / X * np.arange(X))
    refused(
        tmp_path,
        section(tmp_path, domain={"x": "xgrid"}),
        r"of x is \[0.0, 22.0\], and xgrid in \S+b.h5 runs from 0 to",
    )
    write(tmp_path / "b.h5", u=waves(), x=22 / X * np.arange(X))
    refused(
        tmp_path, section(tmp_path, domain={"x": "xgrid"}), r"\S+b.h5 holds no array 'xgrid' of coordinates"
    )
    write(tmp_path / "b.h5", u=waves(), xgrid=22 / X * np.arange(X))
    read(tmp_path, section(tmp_path, domain={"x": "xgrid"}))
    write(tmp_path / "a.h5", u=waves(), x=22 / X * np.arange(X))
    write(tmp_path / "b.h5", u=waves(), x=22 / X * np.arange(X) ** 2)
    refused(
        tmp_path,
        section(tmp_path),
        r"x in \S+b.h5 runs from 0 to 309.375 in steps of .*; expected equal steps",
    )


def test_files_of_the_well_with_other_ends_are_named(tmp_path):
    u, v = waves((N, T, X, Y)), np.stack([waves((N, T, X, Y))] * 2, -1)
    for name in "ab":
        well_file(tmp_path / f"{name}.h5", u, v)
    said = {"files": str(tmp_path / "*.h5"), "layout": "well"}
    read(tmp_path, said)
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["boundary_conditions/x_periodic"].attrs["bc_type"] = "WALL"
    refused(tmp_path, said, r"b.h5 says \{'x': 'no_flux', .*; expected one boundary in all files")


def test_more_parameters_of_the_well_than_are_shown_are_asked_about(tmp_path):
    """The fourth was dropped, and it may be the one that varies."""
    well_file(tmp_path / "a.h5", waves((N, T, X, Y)), np.stack([waves((N, T, X, Y))] * 2, -1))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.attrs.update(simulation_parameters=["a", "b", "c", "Re"], a=1.0, b=2.0, c=3.0)
    said = {"files": str(tmp_path / "*.h5"), "layout": "well"}
    refused(tmp_path, said, r"task.ks.parameters: .*'Re'.*; expected at most 3 names")
    read(tmp_path, {**said, "parameters": {"Re": "scalars/Re"}})


def test_packed_numbers_are_unpacked_and_missing_ones_are_nan(tmp_path):
    u = waves()
    packed = np.round((u - 5) / 1e-3).astype(np.int16)
    write(tmp_path / "a.h5", u=packed)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["u"].attrs.update(scale_factor=1e-3, add_offset=5.0, _FillValue=np.int16(-32768))
    *_, values = read(tmp_path, section(tmp_path))
    assert np.abs(values[:, :, 0] - u).max() < 1e-3
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["u"][2, 3, 4] = -32768
    *_, values = read(tmp_path, section(tmp_path))
    assert np.isnan(values[2, 3, 0, 4]) and np.isnan(values).sum() == 1
    with pytest.raises(
        ValueError, match="holds nan in u of trajectory 2, frame 3; expected finite"
    ):  # no cache is made of it
        build_cache(load_config(overlay(tmp_path, section(tmp_path))), "ks", progress=False)
    write(tmp_path / "a.h5", u=np.where(u == u[1, 1, 1], np.float32(9.96921e36), u))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["u"].attrs["missing_value"] = np.float32(9.96921e36)
    *_, values = read(tmp_path, section(tmp_path))
    assert np.isnan(values[1, 1, 0, 1]) and not (values > 1e30).any() and values.dtype == np.float32


@pytest.mark.parametrize("library", ["zarr", "scipy", "h5netcdf"])
def test_other_kinds_of_files_unpack_alike(tmp_path, library):
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


def test_a_group_that_broke_off_is_named(tmp_path):
    """NumPy spread its one frame over all."""
    said = section(tmp_path, layout={"*/data": ["time", "x"]})
    for shape, message in (
        ((1, X), "num_frames: .*a.h5 holds 1 frames in 0003; expected 5 as in .*: 1 to use as many"),
        ((3, X), "num_frames: .*a.h5 holds 3 frames in 0003; expected 5 .* or leave that group out"),
        ((T, 1), r"a.h5 holds \(5, 1\) numbers in 0003/data; expected \(5, 16\) as in 0000"),
    ):
        write(
            tmp_path / "a.h5",
            **{f"{i:04}__data": u[: shape[0], : shape[1]] if i == 3 else u for i, u in enumerate(waves())},
        )
        refused(tmp_path, said, message)
    write(
        tmp_path / "a.h5",
        **{f"{i:04}__{'other' if i == 3 else 'data'}": u for i, u in enumerate(waves())},
        **{f"{i:04}__still": u[0] for i, u in enumerate(waves())},
    )
    refused(
        tmp_path,
        section(tmp_path, layout={"*/still": ["x"], "*/data": ["time", "x"]}),
        "holds no array 0003/data|trajectory is 6 long in 0000/still .* and 5 in 0000/data",
    )


def test_frames_that_longer_files_hold_are_said(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X)))
    write(tmp_path / "b.h5", u=waves((N, 2 * T, X)))
    _, source, _ = read(tmp_path, section(tmp_path))
    assert source.notes == ("2 files", "the first 5 frames, of up to 10")


@pytest.mark.parametrize(
    ("u", "axes", "message"),
    [
        (
            waves(),
            ["Trajectory", "time", "x"],
            "names an axis 'Trajectory'; expected one of .* Write trajectory.",
        ),
        (waves(), ["ensemble", "time", "x"], "names an axis 'ensemble'; .* Write trajectory."),
        (waves(), ["case", "time", "x"], "Write trajectory."),
        (
            np.stack([waves((N, T, X, Y))] * 2, -1),
            ["trajectory", "time", "x", "y", "components"],
            "Write component.",
        ),
        (
            waves(),
            ["bananas", "time", "x"],
            "names an axis 'bananas' beside x; expected trajectory, time, channel, component, or an",
        ),
        (
            np.stack([waves((N, T, X, Y))] * 2, -1),
            ["trajectory", "time", "y", "x", "component"],
            "axes are stored in the order y, x, and nothing says whether its components are, too; expected a "
            "name for each",
        ),
    ],
)
def test_words_that_are_no_axis_of_space_are_not_taken_for_one(tmp_path, u, axes, message):
    write(tmp_path / "a.h5", u=u)
    refused(tmp_path, section(tmp_path, layout={"u": axes}), message)


def test_an_axis_of_an_unusual_name_has_a_domain_of_its_own(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, Y)))
    *_, values = read(
        tmp_path,
        section(
            tmp_path,
            layout={"u": ["trajectory", "time", "radius", "x"]},
            domain={"radius": [0, 1], "x": [0, 22]},
        ),
    )
    assert values.shape == (N, T, 1, X, Y)


def test_components_along_turned_axes_are_as_they_are_named(tmp_path):
    u = np.stack([waves((N, T, X, Y)), 2 * waves((N, T, X, Y))], -1)  # (u_x, u_y) on axes stored y, x
    write(tmp_path / "a.h5", u=u)
    config, source, _ = read(
        tmp_path,
        section(
            tmp_path,
            layout={
                "u": {
                    "array": "u",
                    "axes": ["trajectory", "time", "y", "x", "component"],
                    "fields": ["u_x", "u_y"],
                }
            },
            vector=["u_y", "u_x"],
        ),
    )
    assert source.task.vector == ("u_y", "u_x") and source.task.axes == ("y", "x")


def test_words_against_the_files_own_names_of_its_axes_are_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves((N, T, X, X)))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        for dim, name in zip(file["u"].dims, ("run", "time", "y", "x"), strict=True):
            dim.label = name
    refused(
        tmp_path,
        section(tmp_path, layout={"u": ["trajectory", "time", "x", "y"]}),
        "the file calls y what it calls x; expected the order in which .* has its axes, run, time, y, x",
    )
    read(tmp_path, section(tmp_path, layout={"u": ["trajectory", "time", "y", "x"]}))


def test_a_vector_in_pdebenchs_layout_is_no_axis_of_space(tmp_path):
    write(tmp_path / "a.h5", velocity=np.stack([waves((N, T, X, Y))] * 2, -1))
    _, source, values = read(tmp_path, section(tmp_path, layout="pdebench"))
    assert source.space == (X, Y) and source.task.channels == ("velocity_x", "velocity_y")


def test_a_folder_that_is_written_anew_is_not_up_to_date(tmp_path):
    u = waves()
    zarr.open(str(tmp_path / "a.zarr"), mode="w")["u"] = u
    config = load_config(overlay(tmp_path, section(tmp_path, files=str(tmp_path / "a.zarr"))))
    build_cache(config, "ks", progress=False)
    assert is_up_to_date(config, "ks") == (True, "settings and data files are as they were")
    zarr.open(str(tmp_path / "a.zarr"), mode="r+")["u"][:] = 7 * u[::-1]
    assert is_up_to_date(config, "ks")[0] is False


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train/a", "test/b"],
            "task.ks.split: files lie in test and train alone; expected all three of train, val and test",
        ),
        (
            ["train/a", "val/b", "test/c", "d"],
            "files lie in folders test, train, val and others in none of train, val and test",
        ),
    ],
)
def test_folders_that_are_almost_a_split_are_not_dealt_out_by_number(tmp_path, names, message):
    """Files in a folder test were trained on."""
    for seed, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.h5", u=waves(seed=seed))
    said = section(tmp_path, files=str(tmp_path / "**" / "*.h5"))
    config, source, _ = read(tmp_path, said)
    with pytest.raises(ValueError, match=message):
        split_of(config, "ks", [source])
    config, source, _ = read(tmp_path, {**said, "split": "index"})
    assert sum(map(len, split_of(config, "ks", [source]).values())) == N * len(names)


def test_folders_may_lie_deeper_and_one_that_all_share_says_nothing(tmp_path):
    for seed, name in enumerate(("train", "val", "test")):
        (tmp_path / "test" / name / "runs").mkdir(parents=True)
        write(tmp_path / "test" / name / "runs" / "a.h5", u=waves(seed=seed))
    config, source, _ = read(tmp_path, section(tmp_path, files=str(tmp_path / "**" / "*.h5")))
    parts = split_of(config, "ks", [source])
    assert [source.files[source.rows[rows[0], 0]].path.parts[-3] for rows in parts.values()] == [*parts]
    assert all(len(rows) == N for rows in parts.values())


@pytest.mark.parametrize("kind", ["parts", "one each", "array", "unequal"])
def test_trajectories_of_one_start_are_in_one_part_of_the_split(tmp_path, kind):
    u = waves((10, T, X))
    for nu in (1, 2, 3):
        v = u * (1 + nu * np.arange(T)[:, None] / 10).astype(np.float32)  # equal first frames
        if kind == "parts":
            for half in (0, 1):
                write(tmp_path / f"nu{nu}_{half}.h5", u=v[5 * half : 5 * half + 5], attr_nu=nu)
        elif kind == "one each":
            for i in range(10):
                write(tmp_path / f"nu{nu}_{i}.h5", u=v[i : i + 1], attr_nu=nu)
        elif kind == "unequal":
            write(tmp_path / f"nu{nu}.h5", u=v[: 11 - nu], attr_nu=nu)
    if kind == "array":
        write(tmp_path / "a.h5", u=np.tile(u, (3, 1, 1)), nu=np.repeat([1.0, 2.0, 3.0], 10))
    config, source, values = read(tmp_path, section(tmp_path, parameters={"nu": "nu"}))
    parts = {
        name: {values[i, 0].tobytes() for i in rows}
        for name, rows in split_of(config, "ks", [source]).items()
    }
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 10


def test_a_sweep_from_one_start_is_dealt_out_by_number(tmp_path):
    u = waves((1, T, X)) * (1 + np.arange(N)[:, None, None] * np.arange(T)[:, None]).astype(np.float32)
    write(tmp_path / "a.h5", u=u, nu=np.arange(1.0, N + 1))
    config, source, _ = read(tmp_path, section(tmp_path, parameters={"nu": "nu"}))
    assert sorted(np.concatenate([*split_of(config, "ks", [source]).values()]).tolist()) == list(range(N))


def test_a_stride_that_does_not_divide_the_grid_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves())
    refused(
        tmp_path,
        section(tmp_path, space_stride=3),
        re.escape(
            "task.ks.space_stride 3 does not divide the grid of 16 cells, so that what is kept would not "
            "fill the domain; expected "
            "one of [1, 2, 4, 8, 16]"
        ),
    )


def test_the_doctor_finds_a_file_on_another_domain_than_the_built_in_tasks(tmp_path):
    """Bases and solvers of burgers1d take the length of its domain, whatever the file's coordinates say."""
    path = tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5"
    for length, is_ill in ((1.0, False), (2 * np.pi, True)):
        write(
            path,
            tensor=waves((20, 11, 64)),
            **{"x-coordinate": (np.arange(64) + 0.5) / 64 * length, "t-coordinate": np.linspace(0, 2, 11)},
        )
        [(_, findings)] = examine([("burgers1d", path)], val_fraction=0.1, test_fraction=0.1, is_user=True)
        found = [
            finding.what
            for finding in findings
            if finding.severity == "error" and "runs from" in finding.what
        ]
        assert bool(found) == is_ill and all("burgers1d is on 0 to 1" in what for what in found)


def test_single_arrays_have_no_coordinates(tmp_path):
    """One in a .npy goes by any name, and was taken for the coordinate of its own axis."""
    np.save(tmp_path / "a.npy", waves()[0])
    *_, values = read(tmp_path, section(tmp_path, files=str(tmp_path / "a.npy"), layout={"u": ["time", "x"]}))
    assert values.shape == (1, T, 1, X)


def test_a_parameter_of_two_places_or_of_no_order_is_asked_about(tmp_path):
    write(tmp_path / "a.h5", u=waves(), nu=np.arange(1.0, N + 1), attr_nu=7.0)
    refused(
        tmp_path,
        section(tmp_path, parameters={"nu": "nu"}),
        "holds an attribute nu and an array nu; expected one of them",
    )
    _, source, _ = read(tmp_path, section(tmp_path, parameters={"nu": "@nu"}))
    assert source.parameters[:, 0].tolist() == [7.0] * N
    runs = {f"r{i}__data": u for i, u in zip((1, 2, 10), waves(), strict=False)}
    write(tmp_path / "a.h5", **runs, nu=np.array([1.0, 10.0, 2.0]))  # as h5py lists the groups
    said = section(tmp_path, layout={"*/data": ["time", "x"]}, parameters={"nu": "nu"})
    refused(
        tmp_path,
        said,
        "for groups whose names may be sorted as r1, r2, .. or as r1, r10, ..; expected a value in each",
    )
    write(tmp_path / "a.h5", **runs, **{f"r{i}__nu": float(i) for i in (1, 2, 10)})
    _, source, _ = read(tmp_path, {**said, "parameters": {"nu": "*/nu"}})
    assert source.parameters[:, 0].tolist() == [1.0, 2.0, 10.0]


def test_an_end_of_time_that_the_frames_do_not_reach_is_refused(tmp_path):
    write(tmp_path / "a.h5", u=waves())
    refused(
        tmp_path, section(tmp_path, t_end=100.0), "task.ks.t_end: it is 100; expected 2: 5 frames, 0.5 apart"
    )
    read(tmp_path, section(tmp_path, t_end=2.0))
