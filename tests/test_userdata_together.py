"""Fields in separate files are read as one file that holds them all, and refused where they do not fit."""

import numpy as np
import pytest
import xarray
import yaml
from user_files import DT, SMALL, N, T, X, doctor, overlay, read, section, waves, write

from ups.config.load import load_config
from ups.data.build_cache import build_cache, is_up_to_date
from ups.data.doctor import report
from ups.data.sources import open_user
from ups.userdata.describe import describe_file
from ups.userdata.readers import open_store

U, V = waves((N, T, X)), waves((N, T, X), 1)
AXES = ["time", "x"]


def runs(folder):
    for i in range(N):
        for name, u in (("u", U), ("v", V)):
            write(folder / f"{name}_{i}.h5", t=DT * np.arange(T), x=np.arange(X) * 22 / X, **{name: u[i]})


def of(folder, *patterns, **changes):
    settings = {
        "files": [str(folder / pattern) for pattern in patterns],
        "layout": {"u": AXES, "v": AXES},
        "dt": None,
    }
    return section(folder, **(settings | changes))


def test_fields_in_separate_files_are_read_as_one(tmp_path):
    runs(tmp_path)
    config, source, found = read(tmp_path, of(tmp_path, "u_*.h5", "v_*.h5"))
    assert np.array_equal(found, np.stack([U, V], 2)) and source.dt == DT
    build_cache(config, "ks", progress=False)
    assert is_up_to_date(config, "ks")[0]
    write(tmp_path / "v_3.h5", v=V[3] + 1e-3, t=DT * np.arange(T), x=np.arange(X) * 22 / X)
    assert not is_up_to_date(config, "ks")[0]
    findings = doctor(config)
    assert ": missing" not in report(source.path, findings) and not any(
        finding.severity == "error" for finding in findings
    )
    resolved = load_config(
        overlay(tmp_path, {**of(tmp_path, "u_*.h5", "v_*.h5"), "files": config.task["ks"].files})
    )
    assert resolved.task["ks"] == config.task["ks"]  # what is kept of a configuration is one


def test_arrays_of_one_name_go_by_the_number_of_their_file_and_single_ones_by_its_name(tmp_path):
    for i in range(N):
        write(tmp_path / f"u_{i}.h5", data=U[i])
        write(tmp_path / f"v_{i}.h5", data=V[i])
        np.save(tmp_path / f"p_{i}.npy", U[i])
        np.save(tmp_path / f"q_{i}.npy", V[i])
    numbered = {f"{number}/data": {"axes": AXES, "fields": [name]} for number, name in ((1, "u"), (2, "v"))}
    layouts = numbered, {"p": AXES, "q": AXES}
    for names, layout in zip(("uv", "pq"), layouts, strict=True):
        settings = of(
            tmp_path,
            *(f"{name}_*.{'h5' if names == 'uv' else 'npy'}" for name in names),
            layout=layout,
            dt=DT,
        )
        assert np.array_equal(read(tmp_path, settings)[2], np.stack([U, V], 2))
    with open_store(f"{tmp_path / 'u_0.h5'} + {tmp_path / 'v_0.h5'}") as both:
        assert both.names() == ["1/data", "2/data"]


def test_what_does_not_go_together_is_refused(tmp_path):
    runs(tmp_path)
    for message, patterns, change in (
        (
            "6 files fit .*u_.*h5, 5 files fit .*v_.*h5; expected the same number of each",
            ("u_*.h5", "v_*.h5"),
            None,
        ),
        (r"u_0.h5 goes with .*v_1.h5; expected files of the same run", ("u_[0-4].h5", "v_[1-5].h5"), None),
        (r"no file fits .*w_", ("u_*.h5", "w_*.h5"), None),
        (
            r"t of .*v_2.h5 is 5 numbers from 0 to 4, and of .*u_2.h5 5 numbers from 0 to 2; expected the "
            r"same",
            ("u_*.h5", "v_*.h5"),
            {"v": V[2], "t": np.arange(T, dtype=float), "x": np.arange(X) * 22 / X},
        ),
        (
            r"x of .*v_2.h5 is 8 numbers from 0 to 7, and of .*u_2.h5 16",
            ("u_*.h5", "v_*.h5"),
            {"v": V[2, :, ::2], "t": DT * np.arange(T), "x": np.arange(8.0)},
        ),
        (r"time is 4 long in v of .*v_0.h5 and 5 in u", ("u_*.h5", "v_*.h5"), {"v": V[0, :4]}),
    ):
        runs(tmp_path)
        if "5 files" in message:
            (tmp_path / "v_5.h5").unlink()
        if change:
            write(tmp_path / f"v_{0 if len(change) == 1 else 2}.h5", **change)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read(tmp_path, of(tmp_path, *patterns))


def test_a_description_names_the_fields_beside_a_file(tmp_path):
    for year in (2000, 2001, 2002):
        for name, u in (("tas", U[year - 2000]), ("pr", V[year - 2000]), ("other", V[year - 2000, :, ::2])):
            size = u.shape[1]
            xarray.Dataset(
                {name: (("time", "lon"), u)},
                {
                    "lon": np.arange(size) * 360.0 / size,
                    "time": ("time", 365.0 * year + np.arange(T), {"units": "days since 1900-01-01"}),
                },
            ).to_netcdf(tmp_path / f"{name}_{year}.nc", engine="h5netcdf")
    text = describe_file(str(tmp_path / "tas_2000.nc"))
    assert f'files: "{tmp_path}/tas_*.nc"' in text and "other" not in text
    lines = [
        line.replace("# ", "", 1) if "# files: [" in line or "# layout: {" in line else line
        for line in text.splitlines()
        if '    files: "' not in line and line not in ("    layout:", "      tas: [time, lon]")
    ]
    path = tmp_path / "my_data.yaml"
    path.write_text("\n".join(lines).replace("configs/small.yaml", str(SMALL)), encoding="utf-8")
    task = load_config(path).spec("tas")
    assert task.fields == ("tas", "pr") and yaml.safe_load(text)["data"]["tasks"] == ["tas"]
    assert np.array_equal(open_user(load_config(path), "tas").read(0, 1)[0, :, 1], V[0])
