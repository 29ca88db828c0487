"""README and the notebook keep their word: their commands and code run, in a fresh clone with a shrunken configs/small.yaml."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ups.config import DEFAULT_OVERLAY

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
TRAIN = {"steps": 10, "validate_every": 10, "save_every": 10, "batch_size": 8, "micro_batch": 8, "validate_trajectories": 4}
SIZE = {"width": 16, "depth": 1, "modes": 4}
SMALL = {   # stands for configs/small.yaml: the same names, tasks and grids, trained for seconds
    "include": "smoke.yaml", "run": {"name": "small"}, "cache": {"root": "cache/small"},
    "data": {"root": "data/small", "tasks": ["burgers1d", "burgers1d_forced", "darcy2d_grf"]},
    "task": {"burgers1d": {"resolution": 256, "num_frames": 16, "parameters": [0.01, 0.1]},
             "burgers1d_forced": {"num_trajectories": 24, "num_frames": 16, "t_end": 0.375, "reserve": 0.5},
             "darcy2d_grf": {"reserve": 0.5}},
    "operator": {"base_steps": 5, "train": TRAIN, "model": SIZE},
    "diffusion": {"scale_steps": 10, "train": TRAIN, "model": SIZE, "min_residual_ratio": 1e-3, "max_whitened_std": 1e3},
    "consistency": {"train": TRAIN, "pool_batches": 4}, "steady": {"scale_steps": 10, "train": TRAIN, "model": SIZE},
}
COMMANDS = {"make": ("make", f"PYTHON={sys.executable}"), "python": (sys.executable,),
            "accelerate": (sys.executable, "-m", "accelerate.commands.accelerate_cli")}


def run(folder: Path, command: str, timeout: float = 600) -> subprocess.CompletedProcess:
    """A command of README in `folder`, with this interpreter as `python`, for make and of `accelerate`."""
    words = command.split(maxsplit=1)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "RUN", "ARGS", "UPS_"))}
    return subprocess.run(" ".join([*COMMANDS[words[0]], *words[1:]]), shell=True, cwd=folder, timeout=timeout, text=True,
                          env={**kept, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": str(folder)},
                          capture_output=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The tree as a fresh clone has it, but for a small configs/small.yaml."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name in ("ups", "configs", "accelerate_configs", "docs", "pretrained", "bench"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "out"))
        elif path.suffix == ".py" or path.name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(path, folder)
    (folder / "configs" / "small.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(clone) -> Path:
    """The clone after the commands that start every chain, without a configuration or a name."""
    for command in ("make cache", "accelerate launch train_operator.py", "accelerate launch train_diffusion.py",
                    "accelerate launch train_consistency.py", "make report"):
        done = run(clone, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return clone


# ---------------------------------------------------------------- one default for scripts and make


@needs_make
def test_make_and_scripts_have_the_same_default_configuration(clone, monkeypatch):
    planned = subprocess.run(["make", f"PYTHON={sys.executable}", "-n", "data"], cwd=clone, capture_output=True, text=True)
    assert f"prepare_data.py --config {DEFAULT_OVERLAY.relative_to(ROOT)} run.name=small run.root=runs" in planned.stdout
    shown = [yaml.safe_load(run(clone, f"python {script} --show-config").stdout) for script in ("prepare_data.py", "evaluate.py")]
    assert shown[0] == shown[1] and shown[0]["run"] == {"name": "small", "root": "runs", "seed": 0}
    assert (shown[0]["data"]["root"], shown[0]["cache"]["root"]) == ("data/small", "cache/small")


@needs_make
@pytest.mark.slow
@pytest.mark.faults   # minutes: of the slow half
def test_stages_launched_without_arguments_after_make_cache_are_found_by_make_report(trained):
    results = json.loads((trained / "runs" / "small" / "report" / "results.json").read_text(encoding="utf-8"))
    assert [*results["ensembles"]] == ["burgers1d_forced"] and [*results["steady"]] == ["darcy2d_grf"]
    assert not (trained / "runs" / "default").exists() and {path.name for path in (trained / "cache").iterdir()} == {"small"}
    again = run(trained, "make report").stdout
    assert again.count("up to date") == 4 + 3 + 5   # files of data, caches, four stages and the report


@needs_make
@pytest.mark.slow
@pytest.mark.faults
def test_a_stage_launched_before_its_parent_ends_in_one_line_that_names_the_make_target(clone):
    done = run(clone, "accelerate launch --quiet train_diffusion.py run.name=empty")
    [line] = [line for line in done.stderr.splitlines() if "FAILED" in line]
    assert done.returncode != 0 and "stage operator of run empty is missing" in line and "make operator RUN=empty" in line
    assert "Traceback" not in done.stderr
