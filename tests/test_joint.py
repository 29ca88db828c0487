"""bench/joint.py: both sides see the same rows as often, nothing is trained twice, and a record is of its
conditions alone."""

from __future__ import annotations

import json

import pytest
from test_base_selection import make_caches

from bench import joint
from ups.data.cache import open_cache
from ups.models.base_selection import fit_base

TASKS = ("advection1d", "diff_react2d")
FEW = [
    "data.tasks=[advection1d,diff_react2d]",
    "operator.base_steps=20",
    "operator.train.batch_size=4",
    "operator.model.width=8",
    "operator.model.depth=1",
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    config = make_caches(tmp_path_factory.mktemp("joint"), *FEW)
    caches = {name: open_cache(config, name) for name in TASKS}
    bases = {
        name: fit_base(cache, 20, config.context(name), 0, joint.DEVICE) for name, cache in caches.items()
    }
    return config, caches, bases


def compare(setting, path, monkeypatch, steps=6, variants=("joint", joint.SEPARATE)):
    """(the record, the batches that each model saw): (model's tasks, rows and starts of its steps)."""
    config, caches, bases = setting
    record, seen = joint.Record(path, joint.conditions(config, caches, steps)), []
    drawn = joint.loss_of

    def watched(operator, windows, batch, part):
        seen.append((tuple(operator.names), batch.task, batch.rows.tolist(), batch.starts.tolist()))
        return drawn(operator, windows, batch, part)

    monkeypatch.setattr(joint, "loss_of", watched)
    for variant in variants:
        joint.run(config, caches, bases, variant, steps, 0, record)
    return record.mine["runs"], seen


def test_both_sides_train_on_the_same_rows_equally_often(setting, tmp_path, monkeypatch):
    runs, seen = compare(setting, tmp_path / "r.json", monkeypatch)
    together, alone = (
        [batch for names, *batch in seen if (len(names) > 1) is is_joint] for is_joint in (True, False)
    )
    assert len(together) == len(alone) == 6 and sorted(together) == sorted(alone)
    assert {key: run["steps"] for key, run in runs.items()} == {
        f"{variant}/0/{name}": steps for variant, steps in (("joint", 6), ("separate", 3)) for name in TASKS
    }
    assert len({run["seconds"] for run in runs.values()}) == 3 and all(
        run["share"] in (0.0, 0.5, 1.0) for run in runs.values()
    )
    # of what serves no network the error is the base's, on both sides; one that serves was better on
    # validation
    assert all(run["error"] == run["base"] for run in runs.values() if run["share"] == 0.0)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept[0]["runs"] == runs

    again, seen = compare(setting, tmp_path / "r.json", monkeypatch)
    assert again == runs and not seen
    kept[0]["runs"].pop("separate/0/advection1d")
    (tmp_path / "r.json").write_text(json.dumps(kept))
    again, seen = compare(setting, tmp_path / "r.json", monkeypatch)
    assert {names for names, *_ in seen} == {("advection1d",)}  # what was interrupted, alone
    clock = ("seconds",)
    assert [{k: v for k, v in run.items() if k not in clock} for _, run in sorted(again.items())] == [
        {k: v for k, v in run.items() if k not in clock} for _, run in sorted(runs.items())
    ]
    # other conditions: nothing of it is there
    fewer, seen = compare(setting, tmp_path / "r.json", monkeypatch, steps=4)
    assert len(seen) == 8 and len(json.loads((tmp_path / "r.json").read_text())) == 2
