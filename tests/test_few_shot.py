"""bench/few_shot.py: what is shown, what is borrowed, what is kept, on a tiny world; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_choose import make_caches
from test_operator import overrides_of, train

from bench import few_shot
from ups.config import ROOT, load_config
from ups.data.cache import open_cache
from ups.models.operator import load_operator

SMOKE = ROOT / "configs" / "smoke.yaml"
RUN = ["operator.train.steps=4", "operator.train.validate_trajectories=1", "operator.train.precision='no'",
       "operator.base_steps=3", "operator.model.width=16", "operator.model.depth=1", "task.advection1d.history=1",
       "evaluate.num_bootstrap=10"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, list[str]]:
    """Data and caches of Burgers' equation and advection, an operator of advection alone, and the overrides of both tasks."""
    root = tmp_path_factory.mktemp("few")
    both = "data.tasks=[advection1d,burgers1d]"
    make_caches(root, *RUN, both)
    code, log = train(root, root / "runs", *RUN, "data.tasks=[advection1d]", "run.name=parent")
    assert code == 0, log
    return root, overrides_of(root, root / "runs", *RUN, both)


def arguments(world, *more: str) -> list[str]:
    root, overrides = world
    return [*overrides, "--config", str(SMOKE), "--task", "burgers1d", "--parent", str(root / "runs" / "parent"), "--results",
            str(root / "few.json"), "--budget", "0.3", *more]


def test_few_are_shown_to_ours_and_rivals_alike_and_tests_are_the_same(world):
    config = load_config(SMOKE, world[1])
    cache = open_cache(config, "burgers1d")
    part = few_shot.few(cache, 3)
    assert len(part.split["train"]) == 3 and set(part.split["train"].tolist()) <= set(cache.split["train"].tolist())
    assert torch.equal(part.split["test"], cache.split["test"]) and len(cache.split["train"]) > 3
    problem, _ = few_shot.load(config, "burgers1d")
    limited = few_shot.few_of(problem, cache, 3)
    assert limited.train.shape[0] == 3 and torch.equal(limited.train_parameters, cache.parameters[part.split["train"]])


def test_every_row_is_measured_once_and_the_table_says_what_is_there(world, capsys):
    few_shot.main(arguments(world, "--counts", "2"))
    entries = json.loads((world[0] / "few.json").read_text())
    assert [entry["key"]["row"] for entry in entries] == list(few_shot.ROWS)
    assert all(entry["result"]["error"] > 0 for entry in entries)
    shown = {entry["key"]["row"]: entry["result"]["trajectories"] for entry in entries}
    assert shown.pop("zero_shot") == 0 and set(shown.values()) == {2}
    assert next(entry for entry in entries if entry["key"]["row"] == "zero_shot")["result"]["head of"] == "advection1d"
    assert "| full | " in capsys.readouterr().out
    few_shot.main(arguments(world, "--counts", "2"))   # all is there
    assert json.loads((world[0] / "few.json").read_text()) == entries


def test_fewer_trajectories_than_parameter_values_are_refused_before_anything_is_measured(world):
    with pytest.raises(ValueError, match=r"burgers1d has 2 parameter values; expected at least as many trajectories, not 1. Leave"
                                         r" 1 out of --counts, or hold out fewer values with task.burgers1d.parameters="):
        few_shot.main(arguments(world, "--counts", "4", "1", "--results", str(world[0] / "none.json")))
    assert not (world[0] / "none.json").exists()


def test_a_borrowed_head_stands_on_the_parents_trunk_over_persistence(world):
    cache = open_cache(load_config(SMOKE, world[1]), "burgers1d")
    parent = load_operator(world[0] / "runs" / "parent" / "operator")
    operator = few_shot.borrowed(parent, cache, "advection1d")
    own, given = operator.state_dict(), parent.state_dict()
    assert torch.equal(own["backbone.blocks.0.spectral.weight"], given["backbone.blocks.0.spectral.weight"])
    assert torch.equal(own["backbone.blocks.0.own.burgers1d.up.weight"], given["backbone.blocks.0.own.advection1d.up.weight"])
    assert operator.heads["burgers1d"].description["base"]["kind"] == "persistence"
    assert operator.heads["burgers1d"].out.weight.any() and few_shot.siblings(parent, cache) == ["advection1d"]


def test_a_parent_that_knows_the_task_or_is_missing_is_refused(world):
    with pytest.raises(ValueError, match="knows advection1d, or its network is not that of smoke; expected one .* Run, under"):
        few_shot.main(["--config", str(SMOKE), "--task", "advection1d", "--parent", str(world[0] / "runs" / "parent"),
                       *world[1]])
    with pytest.raises(FileNotFoundError, match=r"holds no finished operator; expected one of all tasks but burgers1d. "
                                                r"Run: make op.*data.tasks=\[advection1d\]"):
        few_shot.main(["--config", str(SMOKE), "--task", "burgers1d", "--parent", str(world[0] / "none"), *world[1]])


def test_negative_transfer_and_the_aim_are_named():
    def entry(row, count, error):
        return {"key": {"task": "cfd1d", "row": row, "count": count}, "result": {"error": error}}

    text = few_shot.table([entry("full", 16, 0.2), entry("full", 16, 0.05), entry("scratch", 16, 0.05), entry("fno", 256, 0.2)])
    assert "| full | 0.1 (2) | not run |" in text
    assert "Negative transfer, full worse than scratch, at N = 16." in text
    assert "From 16 by fine-tuning over an FNO from 256: 0.50." in text
