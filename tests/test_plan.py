"""Dry runs: one screen, with costs before anything exists."""

from pathlib import Path

import numpy as np
import pytest

import prepare_cache
import prepare_data
from ups.commands import dry_run as plan
from ups.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent


def stages(config):
    for stage in ("operator", "diffusion", "consistency", "steady"):
        plan.print_training_plan(config, stage)
    plan.print_report_plan(config)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_all_dry_runs_are_one_screen_with_sizes(path, tmp_path, monkeypatch, capsys):
    roots = [f"{key}.root={tmp_path / key}" for key in ("data", "cache", "run")]
    monkeypatch.setattr("ups_solvers.Solver.solve", lambda *_, **__: np.zeros(1))
    assert prepare_data.main(["--config", str(path), "--dry-run", *roots]) == 0
    assert prepare_cache.main(["--config", str(path), "--dry-run", *roots]) == 0
    config = load_config(path, roots)
    stages(config)
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40 and not list(tmp_path.iterdir())
    operator = out[out.index("operator: to ") :]
    assert "is missing: make cache" in operator and " steps of " in operator
    assert out.count(" about ") > 2 and out.count("MiB") > 3
