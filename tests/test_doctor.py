"""The data doctor on files that look right but hold another equation, and on sound ones beside each."""

import h5py
import numpy as np
import pytest
from test_data import SPLIT, examine, messages, moving, saved

from ups.data.pdebench import open_data
from ups_solvers import SOLVERS


def complaints(findings):
    return messages(findings, "error") + messages(findings, "warning")


def reacting(num=12, resolution=32, frames=21):
    """Fisher-KPP between fast diffusion and slow: every trajectory's mean grows by the logistic law."""
    u0 = moving(0.0, num, resolution, 1)
    u0 = (u0 - u0.min()) / np.ptp(u0)
    grown = np.exp(np.linspace(0, 1, frames))[:, None, None]
    return (u0 * grown / (1 + u0 * (grown - 1))).astype(np.float32)


# ---------------------------------------------------------------- Burgers and reaction-diffusion


@pytest.mark.parametrize(
    ("made", "opened"),
    [
        ("burgers1d", "reacdiff1d"),
        ("reacdiff1d", "burgers1d"),
        ("advection1d", "burgers1d"),
        ("darcy2d", "darcy2d_grf"),
    ],
)
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_file_of_a_task_with_the_same_arrays_is_refused_by_its_attributes(made, opened, is_ours, tmp_path):
    u = moving(0.4) if made != "darcy2d" else np.ones((12, 1, 2, 8, 8), np.float32)
    path = saved(tmp_path, u, made, 0.1)
    if not is_ours:
        with h5py.File(path, "r+") as file:
            del file.attrs["ups_settings"], file.attrs["ups_progress"]
        if made == "darcy2d":  # both have beta: nothing in the file tells
            return
    open_data(path, made)
    with pytest.raises(
        ValueError,
        match=f"of {made}; expected a file of {opened}, .*Name the right task in data.tasks, or correct",
    ):
        open_data(path, opened)


def without_a_word(path):
    """The file as others would write it: nothing but arrays."""
    with h5py.File(path, "r+") as file:
        for key in list(file.attrs):
            del file.attrs[key]
    return path


def test_the_mean_tells_a_task_apart_if_no_attribute_does(tmp_path):
    """Burgers keeps the mean, a reaction moves it; each under the other's name, and each under its own."""
    burgers = np.asarray(
        SOLVERS["burgers1d"].simulate(
            range(6), seed=0, resolution=32, num_frames=11, parameter=0.1, t_end=1.0
        )
    )
    for u, task, severity, text in (
        (reacting(), "burgers1d", "error", "moves by 0.3"),
        (burgers, "reacdiff1d", "warning", "a reaction moves it"),
        (reacting(), "reacdiff1d", None, ""),
        (burgers, "burgers1d", None, ""),
    ):
        path = without_a_word(saved(tmp_path, u, task, 0.5))
        findings = examine(path, task, **SPLIT, is_user=True)
        if severity is None:
            assert complaints(findings) == "", task
        else:
            assert text in messages(findings, severity)
            assert "name the right task in data.tasks" in messages(findings, severity)
        path.unlink()


def test_a_user_file_under_a_published_name_is_not_compared_with_the_published_one(tmp_path):
    path = saved(tmp_path, moving(0.4))
    with h5py.File(path, "r+") as file:
        del file.attrs["ups_settings"], file.attrs["ups_progress"]
    assert "is not the published" in messages(examine(path, "advection1d", **SPLIT), "warning")
    assert complaints(examine(path, "advection1d", **SPLIT, is_user=True)) == ""
