"""README and the notebook keep their word: their commands and code run, in a fresh clone with a shrunken
configs/small.yaml."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ups.config import DEFAULT_OVERLAY

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
TRAIN = {
    "steps": 10,
    "validate_every": 10,
    "save_every": 10,
    "batch_size": 8,
    "micro_batch": 8,
    "validate_trajectories": 4,
}
SIZE = {"width": 16, "depth": 1, "modes": 4}
SMALL = {  # stands for configs/small.yaml: the same names, tasks and grids, trained for seconds
    "include": "tiny.yaml",
    "run": {"name": "small"},
    "cache": {"root": "cache/small"},
    "data": {"root": "data/small", "tasks": ["burgers1d", "burgers1d_forced", "darcy2d_grf"]},
    "task": {
        "burgers1d": {"resolution": 256, "num_frames": 16, "parameters": [0.01, 0.1]},
        "burgers1d_forced": {"num_trajectories": 24, "num_frames": 16, "t_end": 0.375, "reserve": 0.5},
        "darcy2d_grf": {"reserve": 0.5},
    },
    "operator": {"base_steps": 5, "train": TRAIN, "model": SIZE},
    "diffusion": {
        "scale_steps": 10,
        "train": TRAIN,
        "model": SIZE,
        "min_residual_ratio": 1e-3,
        "max_whitened_std": 1e3,
    },
    "consistency": {"train": TRAIN, "pool_batches": 4},
    "steady": {"scale_steps": 10, "train": TRAIN, "model": SIZE},
}
OVERLAYS = {  # what stands for others that README names
    "smoke": {"include": "tiny.yaml", "data": {"tasks": ["burgers1d"]}, "operator": {"model": SIZE}},
    "pretrained": {
        "include": "seven.yaml",
        "data": {"tasks": ["advection1d", "burgers1d"]},
        "evaluate": {"num_bootstrap": 20},
        "task": {name: {"num_trajectories": 80} for name in ("advection1d", "burgers1d")},
    },
}
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    (language, text.replace("\\\n", " "))
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", README, re.S | re.M)
]
FIRST = next(text for language, text in BLOCKS if language == "python")
DATA = "configs/pdebench_2task.yaml"
IN_PLACE = {  # of commands that a test cannot run: what runs, and why
    "make test": "make -n test",  # this
    # tens of gigabytes from the network
    f"make train CONFIG={DATA}": f"python prepare_data.py --config {DATA} --dry-run",
    f'make data CONFIG={DATA} ARGS="data.fetch=first task.advection1d.num_trajectories=500"': (
        f"python prepare_data.py --config {DATA} --dry-run data.fetch=first "
        "task.advection1d.num_trajectories=500"
    ),
    f"python prepare_data.py --config {DATA} --file 'KH_*'": f"python prepare_data.py --config {DATA} --file "
    f"'KH_*' --dry-run",
    "accelerate launch --config_file accelerate_configs/4gpu.yaml train_operator.py":  # four GPUs
    "accelerate launch --config_file accelerate_configs/cpu.yaml train_operator.py",
    # twice as long for nothing else
    'make sweep GRID="operator.optim.muon_lr=2e-3,4e-3" SEEDS="0 1" STAGES=operator': "make sweep "
    'GRID="operator.optim.muon_lr=2e-3,4e-3" SEEDS="0" STAGES=operator',
    # test_publish.py has a hub
    "make publish RUN=small TO=hf://owner/name": "make -n publish RUN=small TO=hf://owner/name",
}
COMMANDS = {
    "make": ("make", f"PYTHON={sys.executable}"),
    "python": (sys.executable,),
    "accelerate": (sys.executable, "-m", "accelerate.commands.accelerate_cli"),
}


def run(folder: Path, command: str, timeout: float = 600) -> subprocess.CompletedProcess:
    """A command of README in `folder`, with this interpreter as `python`, for make and of `accelerate`."""
    words = command.split(maxsplit=1)
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MAKE", "MFLAGS", "RUN", "ARGS", "UPS_"))
    }
    return subprocess.run(
        " ".join([*COMMANDS[words[0]], *words[1:]]),
        shell=True,
        cwd=folder,
        timeout=timeout,
        text=True,
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": str(folder)},
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The tree as a fresh clone has it, but for a small configs/small.yaml."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name in ("ups", "configs", "accelerate_configs", "docs", "pretrained", "bench"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "out"))
        elif path.suffix == ".py" or path.name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(path, folder)
    for name, stands_in in (("tiny", "smoke"), ("seven", "pretrained")):
        (folder / "configs" / f"{stands_in}.yaml").rename(folder / "configs" / f"{name}.yaml")
    for name, overlay in {"small": SMALL, **OVERLAYS}.items():
        text = yaml.safe_dump({**overlay, "run": {"name": name}})
        (folder / "configs" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(clone) -> Path:
    """The clone after the commands that start every chain, without a configuration or a name."""
    for command in (
        "make cache",
        "accelerate launch train_operator.py",
        "accelerate launch train_diffusion.py",
        "accelerate launch train_consistency.py",
        "make report",
    ):
        done = run(clone, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return clone


# ---------------------------------------------------------------- one default for scripts and make


@needs_make
def test_make_and_scripts_have_the_same_default_configuration(clone, monkeypatch):
    planned = subprocess.run(
        ["make", f"PYTHON={sys.executable}", "-n", "data"], cwd=clone, capture_output=True, text=True
    )
    assert (
        f"prepare_data.py --config {DEFAULT_OVERLAY.relative_to(ROOT)} run.name=small run.root=runs"
        in planned.stdout
    )
    shown = [
        yaml.safe_load(run(clone, f"python {script} --show-config").stdout)
        for script in ("prepare_data.py", "evaluate.py")
    ]
    assert shown[0] == shown[1] and shown[0]["run"] == {"name": "small", "root": "runs", "seed": 0}
    assert (shown[0]["data"]["root"], shown[0]["cache"]["root"]) == ("data/small", "cache/small")


@needs_make
@pytest.mark.slow
@pytest.mark.faults  # minutes: of the slow half
def test_stages_launched_without_arguments_after_make_cache_are_found_by_make_report(trained):
    results = json.loads((trained / "runs" / "small" / "report" / "results.json").read_text(encoding="utf-8"))
    assert [*results["ensembles"]] == ["burgers1d_forced"] and [*results["steady"]] == ["darcy2d_grf"]
    assert not (trained / "runs" / "default").exists() and {
        path.name for path in (trained / "cache").iterdir()
    } == {"small"}
    again = run(trained, "make report").stdout
    assert again.count("up to date") == 4 + 3 + 5  # files of data, caches, four stages and the report


@needs_make
@pytest.mark.slow
@pytest.mark.faults
def test_a_stage_launched_before_its_parent_ends_in_one_line_that_names_the_make_target(clone):
    done = run(clone, "accelerate launch --quiet train_diffusion.py run.name=empty")
    [line] = [line for line in done.stderr.splitlines() if "FAILED" in line]
    assert (
        done.returncode != 0
        and "stage operator of run empty is missing" in line
        and "make operator RUN=empty" in line
    )
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- every block


@needs_make
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[text.splitlines()[0][:50] for _, text in BLOCKS])
def test_every_block_of_readme_runs_where_make_train_has_run(trained, number):
    """In their order, as a reader would: the section on the reader's data writes files that its commands
    read."""
    language, text = BLOCKS[number]
    if text.startswith("# my_"):
        (trained / text.split()[1]).write_text(text, encoding="utf-8")
    if language == "yaml":
        section = yaml.safe_load(text)
        (trained / "section.yaml").write_text(
            yaml.safe_dump(section if "task" in section else {"task": section})
        )
        assert (
            run(
                trained, "python prepare_data.py --config section.yaml --show-config data.tasks=[burgers1d]"
            ).returncode
            == 0
        )
        return
    if language == "python":
        script = "my_data.py" if text.startswith("# my_data.py") else "block.py"
        if script == "block.py":
            (trained / script).write_text(text if text == FIRST else FIRST + text, encoding="utf-8")
        commands = [f"python {script}"]
    else:
        commands = [line for line in text.splitlines() if line.split()[0] in COMMANDS]
        assert commands or "prepare_data.py       data files" in text  # or the tree
    for command in commands:
        done = run(trained, IN_PLACE.get(command, command))
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_what_stands_in_for_a_command_of_readme_stands_in_for_one_that_is_there():
    assert {*IN_PLACE} <= {line for language, text in BLOCKS if not language for line in text.splitlines()}


@needs_make
@pytest.mark.slow
@pytest.mark.faults
def test_the_notebook_runs_as_it_is_where_make_train_has_run(trained):
    book = json.loads((trained / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(book["cells"]) <= 30 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    text = "\n".join("".join(cell["source"]) for cell in cells)
    checks = (
        "assert done.returncode == 0 and tuned.folder != model.folder and change.any()",
        "assert members.shape == (16, 10, 1, 128) and coarse.shape == (10, 1, 64)",
    )
    (trained / "tour.py").write_text(
        "\n".join(["import matplotlib", "matplotlib.use('Agg')", text, *checks]), encoding="utf-8"
    )
    done = run(trained, "python tour.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "was given a field on the grid" in done.stdout
