"""Sweeps of W&B (cluster/wandb_sweep.yaml)."""

from __future__ import annotations

import subprocess

import yaml

from ups.common.place import ROOT
from ups.config.load import load_config


def test_a_sweep_of_wandb_gives_the_script_overrides_that_it_understands(tmp_path):
    page = yaml.safe_load((ROOT / "cluster" / "wandb_sweep.yaml").read_text())
    given = [
        f"{key}={(found.get('values') or [found['min']])[0]}" for key, found in page["parameters"].items()
    ]
    command = [
        part
        for text in page["command"]
        for part in ({"${program}": [page["program"]], "${args_no_hyphens}": given}.get(text, [text]))
    ]
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "WANDB_RUN_ID": "abc123"},
    )
    script, flag, path, *overrides = done.stdout.split()
    assert (script, flag) == ("train_operator.py", "--config") and set(given) < set(overrides)
    config = load_config(ROOT / path, overrides)
    assert config.run.name == "sweep-abc123" and config.tracker.kind == "wandb"
    # as ups/training/track.py and train_operator.py call it
    assert page["metric"]["name"] == "operator/validation/score"
