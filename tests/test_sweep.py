"""Sweeps (bench/sweep.py): what is run, under which names, and the table of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from commands import run
from test_base_selection import TINY

from bench import leaderboard, sweep
from ups.common.files import file_hash, write_sealed
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.results import Entry, Results

GRID = ["operator.model.depth=1,2", "operator.optim.adamw_betas=[0.9,0.95],[0.8,0.9]"]


def test_a_grid_is_every_combination_and_lists_are_one_value():
    assert sweep.settings_of(GRID) == [
        ("operator.model.depth=1", "operator.optim.adamw_betas=[0.9,0.95]"),
        ("operator.model.depth=1", "operator.optim.adamw_betas=[0.8,0.9]"),
        ("operator.model.depth=2", "operator.optim.adamw_betas=[0.9,0.95]"),
        ("operator.model.depth=2", "operator.optim.adamw_betas=[0.8,0.9]"),
    ]
    for text in ("operator.model.depth", "=1,2", "operator.model.depth=1,,2"):
        with pytest.raises(ValueError, match="expected key=value,value, such as operator.optim.muon_lr"):
            sweep.settings_of([text])


def test_a_run_of_a_sweep_has_a_name_of_its_own_validation_and_caches_where_it_needs_them():
    names = {sweep.name_of("small", setting, seed) for setting in sweep.settings_of(GRID) for seed in (0, 1)}
    assert len(names) == 8 and all(load_config(None, [f"run.name={name}"]) for name in names)
    plain = sweep.overrides_of("small", ("operator.model.depth=1",), 3, "cache")
    assert plain == ["operator.model.depth=1", "run.seed=3", "evaluate.split=val"]
    one, two = (
        sweep.overrides_of("small", (f"task.burgers1d.patch={patch}",), 0, "cache")[1] for patch in (2, 4)
    )
    assert one.startswith("cache.root=cache/small-") and one != two


def judged(runs: Path, name: str, errors: dict[str, float]) -> None:
    """A report on validation with these errors."""

    tasks = {}
    for task, error in errors.items():
        shared = {"base": "propagator", "network_is_used": error < 0.2, "grid": [8], "parameters": []}
        tasks[task] = Entry(task, "tasks", shared)
        tasks[task].add("", {"num_frames_predicted": 1, "num_trajectories": 4})
        tasks[task].add("operator", {"nrmse": dict.fromkeys(("value", "low", "high"), error)})
    folder = runs / name / "report-val"
    facts = {
        "run": name,
        "protocol": {"split": "val", "seed": 0},
        "gates": [],
        "environment": {},
        "training": {"seed": 5, "muon_lr": 0.004, "adamw_lr": 0.002},
    }
    Results(facts, tasks).save(folder)
    write_sealed(folder / "done.json", {"files": {path.name: file_hash(path) for path in folder.iterdir()}})


def fake_train(name, arguments, overrides):
    """Depth 1 errs by 0.4 and 0.1, depth 2 by half of it; the second seed of it fails."""
    depth, seed = (
        next(text.split("=")[1] for text in overrides if text.startswith(key))
        for key in ("operator.model.depth", "run.seed")
    )
    is_there = (depth, seed) != ("2", "1")
    if is_there:
        scale = (1 + int(seed) / 2) / int(depth)
        judged(Path(arguments.runs), name, {"burgers1d": 0.4 * scale, "darcy2d": 0.1 * scale})
    return is_there


def test_the_table_has_mean_and_spread_over_seeds_best_first_and_says_what_failed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sweep, "train", fake_train)
    of_run = f"sweep --config {ROOT / 'configs' / 'smoke.yaml'} --run mine --runs {tmp_path}".split()
    grid = ["--seeds", "0 1", "--args", "", "--", "operator.model.depth=1,2"]
    monkeypatch.setattr(sys, "argv", [*of_run, *grid])
    assert sweep.main() == 1
    out = capsys.readouterr()
    assert "1 of 4 runs failed: mine-" in out.err
    lines = (tmp_path / "mine-sweep.md").read_text().splitlines()
    assert lines[0] == "| setting | seeds of 2 | nRMSE (geometric mean) | burgers1d | darcy2d |"
    # of one seed there is no spread
    assert lines[2] == "| operator.model.depth=2 | 1 | 0.100 | 0.200 | 0.0500 |"
    assert lines[3] == "| operator.model.depth=1 | 2 | 0.250 ± 0.0707 | 0.500 ± 0.141 | 0.125 ± 0.0354 |"
    shown = leaderboard.table(tmp_path, split="val").splitlines()
    assert "| base | network | rates | seed |" in shown[2] and len(shown) == 7
    assert "| propagator | 1 of 2 | 0.00400, 0.00200 | 5 |" in shown[-1]
    assert leaderboard.table(tmp_path) == f"No reports in {tmp_path}."


def test_a_mistyped_setting_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(
        sys, "argv", ["sweep", "--run", "mine", "--runs", str(tmp_path), "operator.model.depht=1,2"]
    )
    with pytest.raises(ValueError, match="did you mean 'depth'"):
        sweep.main()


@pytest.mark.faults  # half a minute: the run is a chain of its own
def test_a_sweep_by_make_trains_a_setting_once(tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump(
            {
                "include": str(ROOT / "configs" / "smoke.yaml"),
                "data": {"tasks": ["burgers1d"], "root": str(tmp_path / "data")},
                "cache": {"root": str(tmp_path / "cache")},
                "operator": {"base_steps": 5, "train": {"steps": 4, "validate_every": 4, "save_every": 4}},
                "task": {"burgers1d": {"parameters": [0.05], "num_trajectories": 20}},
            }
        )
    )
    assert "task.burgers1d.num_trajectories=20" in TINY
    command = [
        "make",
        "sweep",
        f"PYTHON={sys.executable}",
        f"CONFIG={tmp_path / 'tiny.yaml'}",
        f"RUNS={tmp_path / 'runs'}",
        "TOPOLOGY=cpu",
        "STAGES=operator",
        "SEEDS=0",
        "GRID=operator.optim.muon_lr=2e-3",
    ]
    first = run(*command, timeout=300)
    assert first.returncode == 0, first.stdout + first.stderr
    table = (tmp_path / "runs" / "tiny-sweep.md").read_text()
    assert table.count("| operator.optim.muon_lr=") == 1 and "–" not in table
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("done.json")}
    assert done
    second = run(*command, timeout=300)
    assert second.returncode == 0 and {path: path.stat().st_mtime_ns for path in done} == done
