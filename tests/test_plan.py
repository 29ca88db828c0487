"""Dry runs: one screen, with costs before anything exists, which follow what is asked for."""

import re
from pathlib import Path

import numpy as np
import pytest

import prepare_cache
import prepare_data
from ups.commands import dry_run as plan
from ups.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent


def minutes(text):
    """The time that a plan says, in minutes."""
    number, unit = re.search(r"about ([\d.e+-]+) (h|min|s)\b", text).groups()
    return float(number) * {"h": 60, "min": 1, "s": 1 / 60}[unit]


def stages(config):
    for stage in ("operator", "diffusion", "consistency", "steady"):
        plan.print_training_plan(config, stage)
    plan.print_report_plan(config)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_all_dry_runs_are_one_screen_with_a_time_and_a_size_each(path, tmp_path, monkeypatch, capsys):
    roots = [f"{key}.root={tmp_path / key}" for key in ("data", "cache", "run")]
    monkeypatch.setattr(plan, "_seconds", lambda *_: 3e-4)
    monkeypatch.setattr("ups_solvers.Solver.solve", lambda *_, **__: np.zeros(1))
    assert prepare_data.main(["--config", str(path), "--dry-run", *roots]) == 0
    assert prepare_cache.main(["--config", str(path), "--dry-run", *roots]) == 0
    config = load_config(path, roots)
    stages(config)
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40 and not list(tmp_path.iterdir())
    operator = out[out.index("operator: to ") :]
    assert minutes(operator) > 0
    assert "is missing: make cache" in operator
    assert " parameters; per process " in operator
    assert out.count(" about ") > 4 and out.count("MiB") > 6


def test_the_time_follows_steps_unrolling_and_processes(monkeypatch, capsys):
    monkeypatch.setattr(plan, "_seconds", lambda *_: 4e-3)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("UPS_EXPECT_WORLD", raising=False)

    def operator(*overrides):
        config = load_config(ROOT / "configs" / "small.yaml", overrides)
        plan.print_training_plan(config, "operator")
        return minutes(capsys.readouterr().out)

    once = operator("operator.unroll_fraction=0")
    assert once == pytest.approx(2700 * 16 * 4e-3 / 60, rel=0.05)
    assert operator("operator.unroll_fraction=0.5", "operator.unroll_steps=3") == pytest.approx(
        2 * once, rel=0.05
    )
    assert operator("operator.unroll_fraction=0", "operator.train.steps=27000") == pytest.approx(
        10 * once, rel=0.05
    )
    monkeypatch.setenv("UPS_EXPECT_WORLD", "2")
    assert operator("operator.unroll_fraction=0") == pytest.approx(once / 2, rel=0.05)
