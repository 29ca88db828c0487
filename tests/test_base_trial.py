"""The trial of the network on two bases (ups/models/base_trial.py)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from test_base_selection import make_caches

from ups.data.cache import open_cache
from ups.models import base_trial
from ups.models.base_trial import error_of_network, fit_base, is_trial_due

CPU, CONTEXT = torch.device("cpu"), 10


def facts(error: float, trivial: float | None = 1.0, kind: str = "propagator") -> dict:
    return {
        "description": {"base": {"name": kind, "kind": kind}},
        "validation_nrmse": ({} if trivial is None else {"persistence": trivial}) | {kind: error},
    }


@pytest.mark.parametrize(
    ("found", "steps", "is_due"),
    [
        (facts(0.6), 1000, True),
        (facts(0.1), 1000, False),  # the network cannot make up for that
        (facts(0.6), 100, False),  # five steps tell nothing
        (facts(0.6, trivial=None), 1000, False),  # persistence is not among the bases
        (facts(0.6, kind="solver"), 1000, False),  # the user wants the solver corrected
        (facts(1.0, kind="persistence"), 1000, False),
    ],
)
def test_a_trial_is_made_where_the_base_is_little_better_than_the_trivial_one(found, steps, is_due):
    assert is_trial_due(found, "persistence", steps) == is_due


@pytest.fixture(scope="module")
def burgers(tmp_path_factory):
    config = make_caches(
        tmp_path_factory.mktemp("trial"),
        "data.tasks=[burgers1d]",
        "task.burgers1d.base=[persistence,propagator]",
        "operator.model.width=8",
        "operator.model.depth=1",
        "operator.train.batch_size=4",
        "operator.train.micro_batch=4",
        "operator.train.steps=1000",
    )
    settings = dataclasses.replace(config.operator, base_steps=1)
    return open_cache(config, "burgers1d"), settings


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({"propagator": 4.0, "persistence": 0.9}, "persistence"),
        ({"propagator": 0.4, "persistence": 0.9}, "propagator"),
        ({"propagator": 1.0, "persistence": 0.9}, "propagator"),  # as near as two equal trials
        ({"propagator": math.inf, "persistence": 2.0}, "persistence"),
    ],
)
def test_the_base_with_the_better_network_serves_and_both_errors_are_recorded(
    burgers, errors, expected, monkeypatch
):
    cache, settings = burgers
    monkeypatch.setattr(base_trial, "is_trial_due", lambda *_: True)
    monkeypatch.setattr(
        base_trial,
        "error_of_network",
        lambda fitted, *_: errors[fitted[0]["description"]["base"]["kind"]],
    )
    found, weights = fit_base(cache, settings, CONTEXT, 0, CPU)
    assert found["description"]["base"]["kind"] == expected
    assert any(name.startswith("base.") for name in weights) == (expected == "propagator")
    recorded = {name.split()[0]: error for name, error in found["trial_nrmse"].items()}
    assert recorded == {name: error if math.isfinite(error) else None for name, error in errors.items()}


def test_a_trial_is_repeatable_and_leaves_the_random_state_as_it_was(burgers):
    cache, settings = burgers
    fitted = base_trial.base_selection.fit_base(cache, 1, CONTEXT, 0, CPU)
    state = torch.get_rng_state()
    first = error_of_network(fitted, cache, settings, CONTEXT, 0, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert error_of_network(fitted, cache, settings, CONTEXT, 0, CPU) == first and math.isfinite(first)
