"""bench/few_shot.py: what is shown, what is borrowed, what is kept, on a tiny world; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_base_selection import make_caches
from test_operator import overrides_of, train

from bench import few_shot
from ups.config import ROOT, load_config
from ups.data.cache import open_cache
from ups.models.operator import load_operator

SMOKE = ROOT / "configs" / "smoke.yaml"
RUN = [
    "operator.train.steps=4",
    "operator.train.validate_trajectories=1",
    "operator.train.precision='no'",
    "operator.base_steps=3",
    "operator.model.width=16",
    "operator.model.depth=1",
    "task.advection1d.history=1",
    "evaluate.num_bootstrap=20",
]


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
        "--config",
        str(SMOKE),
        "--task",
        "burgers1d",
        "--parent",
        str(root / "runs" / "parent"),
        "--results",
        str(root / "few.json"),
        "--budget",
        "1.0",
        *more,
    ]


def test_few_are_shown_to_ours_and_rivals_alike_and_tests_are_the_same(world):
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


def test_a_seed_draws_its_trajectories_and_fewer_are_the_first_of_more(world):
    cache = open_cache(load_config(SMOKE, world[1]), "burgers1d")
    draws = [
        [set(few_shot.few(cache, count, seed).split["train"].tolist()) for count in (2, 4, 6)]
        for seed in range(4)
    ]
    assert all(two < four < six for two, four, six in draws)
    assert len({tuple(sorted(six)) for *_, six in draws}) > 1  # a draw that the seed does not move is refused
    for two, *_ in draws:  # one initial condition with both values
        rows = torch.tensor(sorted(two))
        assert len(cache.trajectory[rows].unique()) == 1 and len(cache.parameter_index[rows].unique()) == 2


def test_every_row_is_measured_once_and_the_table_says_what_is_there(world, capsys):
    fixed = "task.burgers1d.base=[persistence,propagator]"  # a kernel that is learnt goes on with the network
    few_shot.main([fixed, *arguments(world, "--counts", "2")])
    entries = json.loads((world[0] / "few.json").read_text())
    assert [entry["key"]["row"] for entry in entries] == list(few_shot.ROWS)
    assert all(entry["result"]["error"] > 0 for entry in entries)
    shown = {entry["key"]["row"]: entry["result"]["trajectories"] for entry in entries}
    assert shown.pop("zero_shot") == 0 and set(shown.values()) == {2}
    assert (
        next(entry for entry in entries if entry["key"]["row"] == "zero_shot")["result"]["head of"]
        == "advection1d"
    )
    trained = [entry["result"] for entry in entries if entry["key"]["row"] in ("frozen", "full", "scratch")]
    assert (
        len({result["fit_s"] for result in trained}) == 1 and len({result["base"] for result in trained}) == 1
    )  # fitted once
    assert all(
        result["seconds"] < 1.5 and result["steps"] > 0 and result["validated"] == 2 for result in trained
    )
    out = capsys.readouterr().out
    assert "| full | " in out and "| base | " in out and "a parent of advection1d:" in out
    few_shot.main([fixed, *arguments(world, "--counts", "2")])  # all is there
    assert json.loads((world[0] / "few.json").read_text()) == entries


@pytest.mark.parametrize("count", [1, 1000])
def test_numbers_that_the_data_have_not_are_refused_before_anything_is_measured(world, count):
    with pytest.raises(
        ValueError,
        match=rf"burgers1d has 2 parameter values and \d+ trajectories to train on; expected a number "
        rf"between, not {count}. Leave {count} out of --counts, or hold out fewer values with "
        r"task.burgers1d.parameters=",
    ):
        few_shot.main(arguments(world, "--counts", "4", str(count), "--results", str(world[0] / "none.json")))
    assert not (world[0] / "none.json").exists()


def test_bases_that_eat_the_budget_are_refused(world):
    config = load_config(SMOKE, world[1])
    cache = open_cache(config, "burgers1d")
    with pytest.raises(
        ValueError, match=r"took \d+ s to fit to 2 trajectories, of a budget of 0.0001; expected at most half"
    ):
        few_shot.Ours(config, 1e-4, world[0] / "runs" / "parent" / "operator", 0.3).fitted(
            few_shot.few(cache, 2, 0), 2, 0
        )


def test_a_start_beyond_what_the_few_have_shown_is_forecast_from_as_the_rivals_do(world):
    """Where a forecast was refused after its training, the run died there each time it was made again."""
    config = load_config(SMOKE, world[1])
    part = few_shot.few(open_cache(config, "burgers1d"), 2, 0)
    ours = few_shot.Ours(config, 1.0, world[0] / "runs" / "parent" / "operator", 0.3)
    trained, _ = ours("scratch", part, 2, 0)
    _, splits = few_shot.load(config, "burgers1d")
    given = 100 * splits["test"].given
    assert trained.predict(given, splits["test"].parameters, 2).isfinite().all()


def test_a_borrowed_head_stands_on_the_parents_trunk_over_persistence(world):
    cache = open_cache(load_config(SMOKE, world[1]), "burgers1d")
    parent = load_operator(world[0] / "runs" / "parent" / "operator")
    operator = few_shot.borrowed(parent, cache, "advection1d")
    own, given = operator.state_dict(), parent.state_dict()
    assert torch.equal(own["backbone.blocks.0.spectral.weight"], given["backbone.blocks.0.spectral.weight"])
    assert torch.equal(
        own["backbone.blocks.0.own.burgers1d.up.weight"], given["backbone.blocks.0.own.advection1d.up.weight"]
    )
    assert operator.heads["burgers1d"].description["base"]["kind"] == "persistence"
    assert operator.heads["burgers1d"].out.weight.any() and few_shot.siblings(parent, cache) == [
        "advection1d"
    ]


def test_a_parent_that_knows_the_task_or_is_missing_is_refused(world):
    with pytest.raises(
        ValueError, match="knows advection1d, or its network is not that of smoke; expected one .* Run, under"
    ):
        few_shot.main(
            [
                "--config",
                str(SMOKE),
                "--task",
                "advection1d",
                "--parent",
                str(world[0] / "runs" / "parent"),
                *world[1],
            ]
        )
    with pytest.raises(
        FileNotFoundError,
        match=r"holds no finished operator; expected one of all tasks but burgers1d. "
        r"Run: make op.*data.tasks=\[advection1d\]",
    ):
        few_shot.main(
            ["--config", str(SMOKE), "--task", "burgers1d", "--parent", str(world[0] / "none"), *world[1]]
        )


COMMON = {"task": "cfd1d", "bases": ["persistence"], "budget_s": 60, "known": ["burgers1d", "cfd2d"]}


def entry(row: str, count: int, error: float, **other) -> dict:
    return {
        "key": COMMON | {"row": row, "count": count, "seed": 0} | other,
        "result": {"error": error, "median": error / 2, "base": 0.5},
    }


def test_negative_transfer_and_the_aim_are_named():
    text = few_shot.table(
        [entry("full", 16, 0.2), entry("full", 16, 0.05), entry("scratch", 16, 0.05), entry("fno", 256, 0.2)]
    )
    assert "| full | 0.1, 0.05 (2) | not run |" in text and "| base | 0.5 (1) | not run |" in text
    assert "Negative transfer, full worse than scratch, at N = 16." in text
    assert "full from 16 over an FNO from 256: 0.5, of the medians 0.5." in text
    assert "scratch from 16 over an FNO from 256: 0.25" in text
    assert "transfer" not in few_shot.table([entry("naive", 16, 0.2)])  # of what was not run nothing is said


def test_results_of_other_settings_stand_in_a_table_of_their_own():
    """A trial of 5 s and a run of 60 s looked like two seeds."""
    text = few_shot.table(
        [entry("full", 16, 0.5, budget_s=5), entry("full", 16, 0.05), entry("scratch", 16, 0.1)]
    )
    assert "| full | 0.5, 0.25 (1) |" in text and "| full | 0.05, 0.025 (1) |" in text
    assert text.count("No negative transfer at N = 16.") == 1
