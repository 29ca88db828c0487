"""What the bench measured is shown beside the operator only where both were asked the same (ups/evaluation/rivals.py)."""

import json
from types import SimpleNamespace

import pytest

from ups.evaluation.rivals import data_key, find_rivals


class FakeConfig(SimpleNamespace):
    def context(self, name):
        return 10


CACHES = {"burgers1d": "abc"}


@pytest.fixture
def config():
    return FakeConfig(evaluated=["burgers1d"], evaluate=SimpleNamespace(split="test", max_trajectories=0))


def write(folder, name, data, **models):
    """One result of the bench; models: name -> validation error."""
    entries = {model: {"validation": value, "row": {"nrmse": name}} for model, value in models.items()}
    (folder / f"burgers1d_{name}.json").write_text(json.dumps({"kind": "compare", "data": data, "models": entries}))


def test_of_the_same_data_the_best_on_validation_is_shown(config, tmp_path):
    assert find_rivals(config, CACHES, tmp_path) == {"burgers1d": {}}
    key = {"cache": "abc", "context_frames": 10}
    write(tmp_path, "long", key, fno=0.01, unet=0.05)
    write(tmp_path, "short", key, fno=0.03, unet=0.04)
    (tmp_path / "burgers1d_tune.json").write_text('{"kind": "tune"}')   # and what an older bench wrote
    assert find_rivals(config, CACHES, tmp_path) == {"burgers1d": {"fno": {"nrmse": "long"}, "unet": {"nrmse": "short"}}}


@pytest.mark.parametrize("key", [{"cache": "other", "context_frames": 10}, {"cache": "abc", "context_frames": 4}, None])
def test_results_on_other_data_or_another_context_are_none_of_this_run(config, tmp_path, key):
    write(tmp_path, "0", key, fno=0.01)
    assert find_rivals(config, CACHES, tmp_path) == {"burgers1d": {}}


def test_a_report_on_part_of_the_test_split_or_on_another_has_no_rivals(config, tmp_path):
    write(tmp_path, "0", {"cache": "abc", "context_frames": 10}, fno=0.01)
    for split, limit in (("val", 0), ("test", 5)):
        config.evaluate = SimpleNamespace(split=split, max_trajectories=limit)
        assert find_rivals(config, CACHES, tmp_path) == {"burgers1d": {}}


def test_a_damaged_result_is_named(config, tmp_path):
    (tmp_path / "burgers1d_0.json").write_text("{")
    with pytest.raises(ValueError, match="burgers1d_0.json is not readable.*Delete it and run make bench again"):
        find_rivals(config, CACHES, tmp_path)


def test_the_key_is_fingerprint_and_context(config):
    assert data_key(config, "burgers1d", "abc") == {"cache": "abc", "context_frames": 10}
