"""Input-output pairs, as two frames and as a one-dimensional map a(x) -> u(x): both train and end in a
report."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import configured
from loop_stage import run_scripts

import prepare_cache
from ups.report.figures import sample_figure
from ups.results import load

ROOT = Path(__file__).resolve().parent.parent
CELLS = 32


def smooth(num, seed=0):
    """Smooth periodic fields (num, CELLS) of random phases."""
    rng, x = np.random.default_rng(seed), 2 * np.pi * np.arange(CELLS) / CELLS
    return sum(
        rng.standard_normal((num, 1)) / k * np.sin(k * x + 6.28 * rng.random((num, 1))) for k in (1, 2, 3)
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A configuration of both kinds of pairs, each u moved by five cells."""
    folder, u = tmp_path_factory.mktemp("pairs"), smooth(24)
    moved = np.roll(u, 5, 1)
    for name, arrays in {"frames": {"u": np.stack([u, moved], 1)}, "map": {"a": u, "u": moved}}.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for key, values in arrays.items():
                file[key] = values.astype(np.float32)
    configured(folder, "userdata_pairs.configuration")
    return folder


@pytest.mark.faults
def test_two_frames_and_a_one_dimensional_map_train_and_end_in_a_report(pairs):
    arguments = ["--config", str(pairs / "tiny.yaml")]
    assert prepare_cache.main(arguments) == 0
    run_scripts(pairs, arguments, "train_operator", "evaluate")
    folder = pairs / "tiny" / "report"
    tasks = load(folder).tasks
    assert [tasks[name].number("", "num_frames_predicted") for name in ("frames", "map")] == [1, 1]
    # a linear map, which the base finds
    assert tasks["frames"].number("operator", "nrmse") < 0.1
    page = (folder / "report.html").read_text()
    assert "1 frame predicted, up to lead time 1" in page and "coefficient a" in page
    for task in ("frames", "map"):
        assert (folder / "figures" / f"{task}_median_error_u.png").is_file()


@pytest.mark.parametrize("has_inputs", [True, False])
def test_one_frame_of_a_one_dimensional_field_is_plotted_as_lines(has_inputs):
    u, x = smooth(2), np.arange(CELLS) / CELLS
    sample = {
        "u_ref": u[:1, None],
        "u_pred": u[1:, None],
        "times": np.zeros(1),
        "fields": ["u"],
        "axes": ["x"],
        "coordinates": [x],
        "inputs": {"a": u[0] ** 2} if has_inputs else {},
    }
    axes = sample_figure(sample, 0).axes
    assert [ax.get_title() for ax in axes] == ["coefficient a"] * has_inputs + [
        "truth and prediction",
        "error",
    ]
    truth, prediction = (line.get_ydata() for line in axes[-2].lines)
    assert np.array_equal(truth, u[0]) and np.array_equal(prediction, u[1])
    assert np.array_equal(axes[-1].lines[0].get_ydata(), u[1] - u[0])
