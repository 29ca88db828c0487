"""Trajectories of user data are split so that training and test share no start, run or time."""

import shutil

import numpy as np
import pytest
import xarray
from cases import cases
from user_files import N, T, X, read, section, waves, write

from ups.data.build_cache import build_cache
from ups.data.sources import split_of, table_of


def test_a_long_run_is_cut_into_windows_and_split_in_time(tmp_path):
    run = waves((1, 43, X))[0]
    write(tmp_path / "a.h5", u=run)
    cut = section(tmp_path, layout={"u": ["time", "x"]}, cut=4)
    config, source, found = read(tmp_path, cut)
    assert np.array_equal(found[:, :, 0].reshape(-1, X), run[:40])
    assert "cut into 10 windows of 4 frames" in source.notes
    parts = split_of(config, "ks", source)
    assert [parts[name].tolist() for name in ("train", "val", "test")] == [[*range(8)], [8], [9]]
    *_, few = read(tmp_path, {**cut, "first_frame": 2, "time_stride": 2})
    assert np.array_equal(few[1, :, 0], run[[6, 8]])
    build_cache(config, "ks", progress=False)
    write(tmp_path / "b.h5", u=waves((12, 9, X)))  # whole runs where there are enough
    config, source, found = read(tmp_path, files=str(tmp_path / "b.h5"), cut=4)
    runs = {name: {*(rows // 2).tolist()} for name, rows in split_of(config, "ks", source).items()}
    assert len(found) == 24 and not runs["test"] & (runs["train"] | runs["val"])
    write(tmp_path / "a.h5", u=run[:12])  # three windows
    _, source, _ = read(tmp_path, {**cut, "files": str(tmp_path / "a.h5")})
    # no window is in two parts, whatever the fractions
    for fractions in ((0.1, 0.1), (0.1, 0.4), (0.4, 0.4)):
        try:
            parts = source.split(*fractions)
        except ValueError as error:
            assert "its windows leave none for train" in str(error)
        else:
            assert sorted(np.concatenate([*parts.values()])) == [0, 1, 2]
    write(tmp_path / "a.h5", u=run)
    with pytest.raises(
        ValueError, match="task.ks.cut: it is 44; expected 2 to 43, the frames of a run. Write cut: 2"
    ):
        read(tmp_path, {**cut, "files": str(tmp_path / "a.h5"), "cut": 44})


def test_parameters_come_from_attributes_arrays_and_names_and_are_split_by_start(tmp_path):
    u = waves()
    for nu in (0.1, 0.2):
        write(tmp_path / f"burgers_nu{nu}_a.h5", u=u, attr_nu=nu, Re=np.arange(N) + nu)
    for place in ("nu", "burgers_nu{}_*"):
        config, source, _ = read(tmp_path, parameters={"nu": place})
        assert source.parameters[:, 0].tolist() == [0.1] * N + [0.2] * N
        parts = split_of(config, "ks", source)
        assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(2 * N))
        assert {*(parts["test"] % N).tolist()}.isdisjoint((parts["train"] % N).tolist())
        table = table_of(config, "ks", source)
        assert table.values == [[0.1], [0.2]] and table.index.tolist() == [0] * N + [1] * N
    config, source, _ = read(tmp_path, parameters={"Re": "Re"})
    assert np.allclose(source.parameters[:, 0], np.concatenate([np.arange(N) + 0.1, np.arange(N) + 0.2]))
    assert len(table_of(config, "ks", source).values) == 8
    assert (source.starts == np.tile(np.arange(N), 2)).all()  # by their first frames, which are the same


def test_files_whose_dates_follow_each_other_are_split_in_time_as_one_record(tmp_path):
    for year, days in ((2003, 730), (2001, 0), (2002, 365)):
        xarray.Dataset(
            {"T": (("time", "x"), waves((1, 12, X), seed=year)[0])},
            {
                "time": ("time", days + 30.0 * np.arange(12), {"units": "days since 2001-01-01"}),
                "x": np.arange(X),
            },
        ).to_netcdf(tmp_path / f"{'b' if year == 2003 else 'c'}{year}.nc", engine="h5netcdf")
    settings = section(
        tmp_path, files=str(tmp_path / "*.nc"), layout={"T": ["time", "x"]}, domain=None, dt=None, cut=3
    )
    config, source, _ = read(tmp_path, settings)  # 2003 is the first file, and the last year
    parts = source.split(0.25, 0.25)
    assert [parts[name].tolist() for name in ("test", "val", "train")] == [
        [1, 2, 3],
        [0, 10, 11],
        [*range(4, 10)],
    ]
    shutil.copy(tmp_path / "c2001.nc", tmp_path / "d2001.nc")  # the same dates twice: no record
    assert not np.array_equal(read(tmp_path, settings)[1].split(0.25, 0.25)["test"], parts["test"])


@pytest.mark.parametrize(("names", "message"), cases("userdata_split.folders"))
def test_folders_that_are_almost_a_split_are_not_dealt_out_by_number(tmp_path, names, message):
    """Files in a folder test were trained on."""
    for seed, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.h5", u=waves(seed=seed))
    settings = section(tmp_path, files=str(tmp_path / "**" / "*.h5"))
    config, source, _ = read(tmp_path, settings)
    with pytest.raises(ValueError, match=message):
        split_of(config, "ks", source)
    config, source, _ = read(tmp_path, {**settings, "split": "index"})
    assert sum(map(len, split_of(config, "ks", source).values())) == N * len(names)


def test_files_are_split_by_their_folders_which_may_lie_deeper_and_a_common_one_does_not_count(tmp_path):
    for seed, name in enumerate(("train", "valid", "test")):
        (tmp_path / "test" / name / "runs").mkdir(parents=True)
        write(tmp_path / "test" / name / "runs" / "a.h5", u=waves(seed=seed))
    config, source, _ = read(tmp_path, files=str(tmp_path / "**" / "*.h5"))
    parts = split_of(config, "ks", source)
    folders = {name: source.files[source.rows[rows[0], 0]].path.parts[-3] for name, rows in parts.items()}
    assert folders == {"train": "train", "val": "valid", "test": "test"}
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
    config, source, values = read(tmp_path, parameters={"nu": "nu"})
    parts = {
        name: {values[i, 0].tobytes() for i in rows} for name, rows in split_of(config, "ks", source).items()
    }
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 10


def test_a_sweep_from_one_start_is_dealt_out_by_number(tmp_path):
    u = waves((1, T, X)) * (1 + np.arange(N)[:, None, None] * np.arange(T)[:, None]).astype(np.float32)
    write(tmp_path / "a.h5", u=u, nu=np.arange(1.0, N + 1))
    config, source, _ = read(tmp_path, parameters={"nu": "nu"})
    assert sorted(np.concatenate([*split_of(config, "ks", source).values()]).tolist()) == list(range(N))
