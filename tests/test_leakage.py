"""Frames that training and test share are found and refused; frames that are equal without being copies are
not."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_counts import CELLS, written

import prepare_data
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.leakage import frame_digests, shared_frames

TASK = SimpleNamespace(inputs=(), moving=("u",), channels=("u",))
STEADY = SimpleNamespace(inputs=("a",), moving=("u",), channels=("a", "u"))
PARTS = ["train"] * 4 + ["val"] + ["test"] * 2


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def shared(u, task=TASK, parts=PARTS):
    return shared_frames(frame_digests(u, task), parts)


def overlapping(dtype=np.float32, step=2, window=5):
    run = noise(40, CELLS)
    return np.stack([run[i : i + window] for i in range(0, 36, step)]).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_overlapping_windows_are_refused_by_the_doctor_and_the_cache(tmp_path, capsys, dtype):
    path = written(tmp_path, overlapping(dtype))
    assert prepare_data.main(["--config", str(path), "--doctor", "evaluate.min_initial_conditions=1"]) == 1
    out = capsys.readouterr().out
    assert "5 of 5 test frames are also training frames, bit for bit" in out
    assert "cut windows that do not overlap" in out
    config = load_config(path, [])
    with pytest.raises(
        ValueError, match="5 of 5 test frames are also training frames.* expected no frame in two splits"
    ):
        build_cache(config, "ks", progress=False)
    assert not list((tmp_path / "cache").glob("*.h5"))


def test_windows_that_only_touch_share_nothing(tmp_path, capsys):
    path = written(tmp_path, overlapping(step=5, window=5))
    prepare_data.main(["--config", str(path), "--doctor"])
    assert "frames are also" not in capsys.readouterr().out
    build_cache(load_config(path, []), "ks", progress=False)


def test_a_single_copied_frame_is_counted_with_its_places():
    u = noise(7, 4, 1, CELLS)
    assert shared(u) == ""
    u[6, 2] = u[1, 3]
    assert shared(u) == (
        "1 of 8 test frames are also training frames, bit for bit "
        "(first: frame 2 of trajectory 6 is frame 3 of trajectory 1)"
    )
    u[4, 1] = u[5, 3]  # validation and test
    u[6, 2] = 0
    assert shared(u).startswith("1 of 8 test frames are also validation frames")


def test_a_frame_that_was_rounded_to_float32_is_the_same_frame():
    u = noise(7, 4, 1, CELLS)
    u[6, 2] = u[1, 3].astype(np.float32)
    assert shared(u).startswith("1 of ")


def resting(u):
    u[:, 2:] = 0  # at rest, and minus zero
    u[6, 2:] = -0.0


def saturated(u):
    u[:, 2:] = np.sign(noise(CELLS))  # all end in one steady pattern


def steady_in_the_end(u):
    u[:, 2:] = u[0, 2]


def alike_at_first(u):
    u[:, 0] = u[0, 0]  # one start, other forces


def flat(u):
    u[:] = np.arange(4)[None, :, None, None]  # a mean that grows the same everywhere


def repeated_in_one_split(u):  # as published files repeat starts over parameter values
    u[3], u[6] = u[0], u[5]


@pytest.mark.parametrize(
    "change", [resting, saturated, steady_in_the_end, alike_at_first, flat, repeated_in_one_split]
)
def test_equal_frames_that_are_no_copies_are_not_reported(change):
    u = noise(7, 4, 1, CELLS)
    change(u)
    assert shared(u) == ""


def test_steady_samples_are_copies_only_if_coefficient_and_solution_are_equal():
    u = noise(7, 1, 2, CELLS)
    u[6, :, 0] = u[0, :, 0]  # the same coefficient, another solution
    assert shared(u, STEADY) == ""
    u[5], u[6] = u[1], 3.0
    u[0] = 3.0  # coefficients of one value are alike by chance
    assert shared(u, STEADY).startswith("1 of ")
