"""The comparison on APEBench's scenarios: its metric."""

from __future__ import annotations

import numpy as np
import pytest

from bench import apebench
from bench.apebench import mean_nrmse, summary


def waves(cells, seed=0, num=4):
    random, x = np.random.default_rng(seed), np.arange(cells) / cells
    return sum(random.standard_normal((num, 1, 1)) * np.sin(2 * np.pi * k * x + k) for k in range(1, 6)) / 3


def test_metric_is_the_ratio_of_norms_summed_over_channels_and_averaged_over_trajectories():
    reference = np.array([[[3.0, 4.0], [0.0, 2.0]], [[6.0, 8.0], [1.0, 0.0]]])[:, None]  # norms 5, 2; 10, 1
    pred = reference + np.array([[[0.0, 1.0], [0.0, 0.5]], [[1.0, 0.0], [0.0, 0.3]]])[:, None]
    # (1/5 + 0.5/2 + 1/10 + 0.3/1) / 2
    assert mean_nrmse(pred, reference) == pytest.approx([0.425])
    pred[0, 0, 0, 0] = np.nan
    assert mean_nrmse(pred, reference)[0] == np.inf


def test_score_is_the_geometric_mean_of_the_first_hundred_steps():
    errors = np.concatenate([np.full(50, 0.01), np.full(50, 1.0), np.full(100, 9.0)])
    assert summary(errors) == pytest.approx({"error": 0.1, "end": 9.0})


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A scenario with data, and networks that are 1 % off."""
    u, train = ([waves(16, seed, 7)] for seed in (0, 1))
    for frames in (u, train):
        for _ in range(8):
            frames.append(np.roll(frames[-1], 1, -1))
    u, train = (np.stack(frames, 1).astype(np.float32) for frames in (u, train))
    monkeypatch.setattr(apebench, "OUT", tmp_path / "out")
    monkeypatch.setattr(apebench, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(apebench, "environment", lambda python: python)

    def call(python, command, request, out):
        found = {"train": train[:, :7], "test": u}
        if command == "train":
            pred, truth = 1.01 * u[:, 1:], u[:, 1:]
            found = {"rollout": pred, "errors": mean_nrmse(pred, truth), "steps": 7, "seconds": 1.0}
            found |= {"num_parameters": 3, "jax": "0"}
        np.savez(out, **found)
        return found

    monkeypatch.setattr(apebench, "call", call)
    return u


def test_another_metric_is_refused(ready, monkeypatch):
    right = apebench.mean_nrmse
    monkeypatch.setattr(apebench, "mean_nrmse", lambda *given: right(*given) + 0.01)
    call = apebench.call

    def with_other_errors(*given):
        return call(*given) | {"errors": np.full(8, 0.5)}

    monkeypatch.setattr(apebench, "call", with_other_errors)
    with pytest.raises(ValueError, match="expected APEBench's own, 0.5"):
        apebench.main(["--scenario", "kdv", "--column", "Res;26;8;relu"])
