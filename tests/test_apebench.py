"""The comparison on APEBench's scenarios: its metric."""

from __future__ import annotations

import numpy as np
import pytest

from bench.apebench import mean_nrmse, summary


def test_metric_is_the_ratio_of_norms_summed_over_channels_and_averaged_over_trajectories():
    reference = np.array([[[3.0, 4.0], [0.0, 2.0]], [[6.0, 8.0], [1.0, 0.0]]])[:, None]  # norms 5, 2; 10, 1
    pred = reference + np.array([[[0.0, 1.0], [0.0, 0.5]], [[1.0, 0.0], [0.0, 0.3]]])[:, None]
    # (1/5 + 0.5/2 + 1/10 + 0.3/1) / 2
    assert mean_nrmse(pred, reference) == pytest.approx([0.425])
    pred[0, 0, 0, 0] = np.nan
    assert mean_nrmse(pred, reference)[0] == np.inf


def test_score_is_the_geometric_mean_of_the_first_hundred_steps():
    errors = np.concatenate([np.full(50, 0.01), np.full(50, 1.0), np.full(100, 9.0)])
    assert summary(errors) == pytest.approx({"error": 0.1, "first": 0.01, "last": 1.0, "end": 9.0})
