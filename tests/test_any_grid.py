"""Fields in one, two and three dimensions in one model, from the solvers to the report and a forecast of
one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from loop_stage import run_scripts

import prepare_cache
import prepare_data
import ups
from ups.config.load import load_config
from ups.data.cache import open_cache
from ups.data.pdebench import open_data
from ups.forecaster import Forecaster
from ups.results import load

CONTEXT = 2
GAS = {"num_trajectories": 12, "num_frames": 5, "parameters": [0.05], "base": ["persistence", "propagator"]}
LINE = {"num_trajectories": 12, "num_frames": 5, "resolution": 16, "space_stride": 1}
TASKS = {
    "cfd1d": {**GAS, "resolution": 16, "t_end": 0.04},
    "cfd2d": {**GAS, "resolution": 16, "t_end": 0.2, "history": 2},
    "cfd3d": {**GAS, "resolution": 8, "t_end": 0.2},
    "reacdiff1d": {**LINE, "parameters": [0.5, 1.0], "t_end": 0.1},
    "diff_sorp1d": {**LINE, "t_end": 20},
}
PARAMETERS = {
    "cfd3d": {"eta": 0.05, "zeta": 0.05, "M": 1.0},
    "cfd2d": {"eta": 0.05, "zeta": 0.05, "M": 0.1},
    "cfd1d": {"eta": 0.05, "zeta": 0.05},
    "reacdiff1d": {"Nu": 0.5, "rho": 1.0},
    "diff_sorp1d": None,
}

pytestmark = pytest.mark.faults  # 37 s of one core


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data, caches and a run with its report, made by the scripts themselves."""
    root = tmp_path_factory.mktemp("grids")
    settings = {
        "run": {"name": "tiny", "root": str(root)},
        "cache": {"root": str(root / "cache"), "chunk": 4},
        "data": {"tasks": list(TASKS), "root": str(root / "data"), "chunk": 12},
        "task": TASKS,
        "operator": {
            "model": {"width": 16, "depth": 1, "modes": 4, "kernel_size": 5},
            "train": {
                "steps": 10,
                "batch_size": 4,
                "micro_batch": 4,
                "validate_every": 5,
                "save_every": 5,
                "validate_trajectories": 2,
                "precision": "no",
            },
        },
        "evaluate": {
            "context_frames": CONTEXT,
            "num_bootstrap": 50,
            "stages": ["operator"],
            "min_initial_conditions": 1,
            "quality": False,
        },
    }
    (root / "tiny.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = ["--config", str(root / "tiny.yaml")]
    assert prepare_data.main([*config, "--workers=1"]) == 0
    assert prepare_data.main([*config, "--doctor"]) == 0
    assert prepare_cache.main(config) == 0
    run_scripts(root, config, "train_operator", "evaluate")
    return root


@pytest.fixture(scope="module")
def model(folder) -> Forecaster:
    return ups.load(folder / "tiny")


def stored(folder: Path, name: str) -> tuple[Path, np.ndarray]:
    """A data file of a task, and a test trajectory of it, (time, C, *space)."""
    cache = open_cache(load_config(folder / "tiny.yaml"), name)
    file = next(iter(sorted((folder / "data" / name).iterdir())))
    row = int(cache.trajectory[cache.split["test"][0]])
    return file, open_data(file, name).read(row, row + 1)[0]


@pytest.mark.parametrize("name", TASKS)
def test_the_error_in_the_report_is_that_of_a_forecast_of_the_stored_fields(folder, model, name):
    _, u = stored(folder, name)
    u_pred = model.forecast(name, u[None, :CONTEXT], PARAMETERS[name], num_frames=len(u) - CONTEXT)[0]
    space = tuple(range(2, u.ndim))
    error = np.sqrt(((u_pred - u[CONTEXT:]) ** 2).mean(space) / (u[CONTEXT:] ** 2).mean(space)).mean()
    entry = load(folder / "tiny/report").tasks[name]
    assert entry.facts["grid"] == list(u.shape[2:])
    if len(entry.facts["parameters"]) < 2:  # else the mean is over files
        assert entry.number("operator", "nrmse") == pytest.approx(error, rel=1e-3)
    assert entry.number("operator", "nrmse") < entry.number("persistence", "nrmse")


def test_the_report_shows_a_slice_of_a_box_and_says_where(folder):
    text = (folder / "tiny/report/report.html").read_text(encoding="utf-8")
    assert "Vx at z = 0.562" in text and text.count("at z = ") >= 2 and "at y = " not in text
