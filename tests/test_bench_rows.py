"""What the bench measured is shown beside the operator only where both were asked the same
(ups/report/bench_rows.py)."""

import json
from types import SimpleNamespace

import pytest

from ups.commands import stages
from ups.report.bench_rows import data_key, find_bench_rows

KEY = data_key("abc", 10)


def write(folder, name, data, **models):
    """One result of the bench; models: name -> validation error."""
    entries = {model: {"validation": value, "row": {"nrmse": name}} for model, value in models.items()}
    (folder / f"burgers1d_{name}.json").write_text(
        json.dumps({"kind": "compare", "data": data, "models": entries})
    )


def test_the_best_on_validation_among_runs_on_the_same_data_is_reported(tmp_path):
    assert find_bench_rows("burgers1d", KEY, tmp_path) == {}
    write(tmp_path, "long", KEY, fno=0.01, unet=0.05)
    write(tmp_path, "short", KEY, fno=0.03, unet=0.04)
    (tmp_path / "burgers1d_tune.json").write_text('{"kind": "tune"}')  # and what an older bench wrote
    assert find_bench_rows("burgers1d", KEY, tmp_path) == {
        "fno": {"nrmse": "long"},
        "unet": {"nrmse": "short"},
    }


@pytest.mark.parametrize(
    "key", [{"cache": "other", "context_frames": 10}, {"cache": "abc", "context_frames": 4}, None]
)
def test_results_on_other_data_or_another_context_are_none_of_this_run(tmp_path, key):
    write(tmp_path, "0", key, fno=0.01)
    assert find_bench_rows("burgers1d", KEY, tmp_path) == {}


def test_a_report_on_part_of_the_test_split_or_on_another_has_none(monkeypatch):
    monkeypatch.setattr(stages, "find_bench_rows", lambda task, key: {"fno": key})
    monkeypatch.setattr(stages, "cache_context", lambda config, task: 10)
    for split, limit, expected in (("test", 0, {"fno": KEY}), ("val", 0, {}), ("test", 5, {})):
        config = SimpleNamespace(
            evaluated=["burgers1d"], evaluate=SimpleNamespace(split=split, max_trajectories=limit)
        )
        assert stages.bench_rows(config, {"burgers1d": "abc"}) == {"burgers1d": expected}


def test_a_damaged_result_is_named(tmp_path):
    (tmp_path / "burgers1d_0.json").write_text("{")
    with pytest.raises(
        ValueError, match="burgers1d_0.json is not readable.*Delete it and run make bench again"
    ):
        find_bench_rows("burgers1d", KEY, tmp_path)
