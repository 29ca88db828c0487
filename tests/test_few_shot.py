"""bench/few_shot.py: what is shown, what is borrowed, what is kept, on a tiny world; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_base_selection import make_caches
from test_operator import overrides_of, train

from bench import few_shot
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.data.cache import open_cache

pytestmark = pytest.mark.faults  # a whole chain of runs
SMOKE = ROOT / "configs" / "smoke.yaml"
RUN = (
    "operator.train.steps=4 operator.train.validate_trajectories=1 operator.train.precision='no' "
    "operator.base_steps=3 operator.model.width=16 operator.model.depth=1 "
    "task.advection1d.history=1 evaluate.num_bootstrap=20"
).split()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, list[str]]:
    """Data and caches of Burgers' equation and advection, an operator of advection alone, and the overrides
    of both tasks."""
    root = tmp_path_factory.mktemp("few")
    both = "data.tasks=[advection1d,burgers1d]"
    make_caches(root, *RUN, both)
    code, log = train(root, root / "runs", *RUN, "data.tasks=[advection1d]", "run.name=parent")
    assert code == 0, log
    return root, overrides_of(root, root / "runs", *RUN, both)


def arguments(world, *more: str) -> list[str]:
    root, overrides = world
    return [
        *overrides,
        *f"--config {SMOKE} --task burgers1d --parent".split(),
        str(root / "runs" / "parent"),
        "--results",
        str(root / "few.json"),
        "--budget",
        "2.0",
        *more,
    ]


def test_ours_and_rivals_train_on_the_same_few_and_are_tested_alike(world):
    config = load_config(SMOKE, world[1])
    cache = open_cache(config, "burgers1d")
    part = few_shot.few(cache, 3, 0)
    assert len(part.split["train"]) == 3 and set(part.split["train"].tolist()) <= set(
        cache.split["train"].tolist()
    )
    assert torch.equal(part.split["test"], cache.split["test"]) and len(cache.split["train"]) > 3
    problem, splits = few_shot.load(config, "burgers1d")
    limited, val = few_shot.few_of(problem, splits, cache, part)
    assert limited.train.shape[0] == 3 and torch.equal(
        limited.train_parameters, cache.parameters[part.split["train"]]
    )
    assert len(val.truth) == min(3, len(cache.split["val"])) == len(part.split["val"])
    assert torch.equal(val.parameters, cache.parameters[part.split["val"]])


def test_every_row_is_measured_once_and_printed(world, capsys):
    fixed = "task.burgers1d.base=[persistence,propagator]"  # a kernel that is learnt goes on with the network
    few_shot.main([fixed, *arguments(world, "--counts", "2")])
    entries = json.loads((world[0] / "few.json").read_text())
    assert [entry["key"]["row"] for entry in entries] == list(few_shot.ROWS)
    assert all(entry["result"]["error"] > 0 for entry in entries)
    assert {entry["result"]["trajectories"] for entry in entries} == {2}
    trained = [entry["result"] for entry in entries if entry["key"]["row"] != "fno"]
    assert (
        len({result["fit_s"] for result in trained}) == 1 and len({result["base"] for result in trained}) == 1
    )  # fitted once
    assert all(
        result["seconds"] < 2.5 and result["steps"] > 0 and result["validated"] == 2 for result in trained
    )
    out = capsys.readouterr().out
    assert "| full | " in out and "| base | " in out and "a parent of advection1d:" in out
    few_shot.main([fixed, *arguments(world, "--counts", "2")])  # all is there
    assert json.loads((world[0] / "few.json").read_text()) == entries
