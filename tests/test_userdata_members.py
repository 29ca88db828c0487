"""Further members of kinds of files that --describe once read wrongly, in silence."""

import re
import warnings

import h5py
import numpy as np
import pytest
import yaml
from cases import cases
from user_files import described, film, waves

from ups.userdata.describe import describe_file
from ups.userdata.readers import open_store


def members():
    """Name -> (arrays of a file, layout, further keys of the section, words in the text or ""): further
    members of kinds that were read wrongly."""
    x, y, t = np.arange(32) / 32, np.arange(24) / 24, 0.5 * np.arange(40)
    travel = np.sin(2 * np.pi * x - 0.1 * np.arange(40)[:, None])
    map_film, line = travel[..., None] * np.cos(2 * np.pi * y), film(40, 64)
    runs = np.stack([np.roll(travel[:12], 11 * k, 1) + k % 3 for k in range(40)])
    nu = np.random.default_rng(0).random(40)
    film_words, run_words = ["time", "x", "y"], ["trajectory", "time", "x"]
    square = np.sin(2 * np.pi * x - 0.1 * np.arange(40)[:, None, None]) * np.cos(2 * np.pi * x)[:, None]
    mesh = np.meshgrid(x, y, indexing="ij")
    return {
        "meshgrid of x and t": (
            {"U": line, "X": np.tile(np.arange(64) / 64, (40, 1)), "T": np.tile(t[:, None], (1, 64))},
            {"U": ["time", "x"]},
            {"dt": "T", "domain": {"x": "X"}},
            "",
        ),
        "meshgrid of x and y": (
            {"u": map_film, "X": mesh[0], "Y": mesh[1], "t": t},
            {"u": film_words},
            {"domain": {"x": "X", "y": "Y"}},
            "",
        ),
        "a square with one coordinate": (
            {"u": square, "x": x, "t": t},
            {"u": ["time", "y", "x"]},
            {},
            "axes, in order?",
        ),
        "a sorted parameter": (
            {"u": runs, "nu": np.sort(nu)},
            {"u": run_words},
            {"parameters": {"nu": "nu"}},
            "",
        ),
        "even steps of a parameter": (
            {"u": runs, "Re": np.linspace(1, 2, 40)},
            {"u": run_words},
            {"parameters": {"Re": "Re"}},
            "",
        ),
        "as many runs as frames": (
            {"u": runs[:12], "nu": np.linspace(1, 2, 12)},
            {"u": run_words},
            {"parameters": {"nu": "nu"}},
            "",
        ),
        "a column": ({"u": runs, "nu": nu[:, None]}, {"u": run_words}, {"parameters": {"nu": "nu"}}, ""),
        "a column of a column": (
            {"u": runs, "nu": nu[:, None, None]},
            {"u": run_words},
            {"parameters": {"nu": "nu"}},
            "",
        ),
        "numbers as arrays": (
            {"u": runs, "dt": 0.1, "nu": 0.01},
            {"u": run_words},
            {"dt": 1.0},
            "(dt = 0.1, nu = 0.01)",
        ),
        "x before time": (
            {"u": line.T, "pos": np.arange(64) / 64, "tau": t},
            {"u": ["x", "time"]},
            {"dt": "tau"},
            "",
        ),
        "one frame with an axis of one": ({"u": map_film[:1]}, {"u": run_words}, {}, "Or is it one map"),
    }


@pytest.mark.parametrize("name", members())
def test_further_members_of_kinds_that_were_read_wrongly(tmp_path, name):
    arrays, layout, keys, words = members()[name]
    section, text = described(tmp_path, **arrays)
    assert section["layout"] == layout and {key: section.get(key) for key in keys} == keys
    assert words in text and "[time, time]" not in text


@pytest.mark.parametrize(("why", "kind"), cases("userdata_members.refused"))
def test_further_members_that_are_no_field_are_refused(tmp_path, why, kind):
    nodes = np.random.default_rng(0).random((500, 2))
    u, x = np.stack([np.sin(6 * nodes[:, 0] + 0.1 * k) for k in range(59)]), np.linspace(0, 1, 64)
    arrays = {
        "nodes first": {"u": u.T, "coords": nodes},
        "runs": {"u": np.stack([u] * 6), "points": nodes},
        "grid": {"u": u, "grid": nodes.T},
        "stations": {"u": u[:, :50].cumsum(0), "station": np.arange(50)},
        "mesh": {"u": np.outer(x, x), "x": np.meshgrid(x, x)[0], "y": np.meshgrid(x, x)[1]},
    }
    with pytest.raises(ValueError, match=re.escape(why)):
        described(tmp_path, **arrays[kind])


def test_arrays_and_attributes_without_numbers_are_no_arrays_and_no_units(tmp_path):
    """h5py.Empty has no shape; an infinite coordinate is none, without a warning of NumPy."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["u"], file["x"], file["t"] = waves((20, 16, 32)), np.arange(32) / 32, 0.05 * np.arange(16)
        file["nothing"] = file.attrs["nothing"] = file["u"].attrs["units"] = h5py.Empty("f4")
        file["far"] = np.full(16, np.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = describe_file(str(tmp_path / "a.h5"))
    [section] = yaml.safe_load(text)["task"].values()
    assert section["layout"] == {"u": ["trajectory", "time", "x"]} and "nothing" not in text
    with open_store(tmp_path / "a.h5") as store:
        assert store.array("nothing") is None and {*store.names()} == {"far", "t", "u", "x"}
