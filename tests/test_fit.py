"""The gradient loop of fits outside a training stage (ups/training/optim.py)."""

import math

import pytest
import torch
from torch import nn

from ups.training.optim import EMA, fit


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(model.parameters()), "base_lr": lr}])


def weight(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_a_step_uses_the_scheduled_rate_and_the_clipped_gradient():
    model = weight(10.0)
    rates, seen = {3: 1.0, 7: 0.5, 8: 0.25}, []
    ema = EMA(model, 0.5)

    def loss_of(step: int) -> torch.Tensor:
        seen.append((step, model.weight.item()))
        return 1.5 * model.weight.square().sum()  # gradient 3 w

    assert fit(model, loss_of, rates, sgd(model, 0.1), rates.__getitem__, clip_norm=24.0, ema=ema) is None
    first = 10 - 0.1 * 24  # 30, clipped
    second = first - 0.05 * 3 * first  # 22.8, as it is
    third = second - 0.025 * 3 * second
    assert [step for step, _ in seen] == [3, 7, 8]
    assert [value for _, value in seen] == pytest.approx([10, first, second], rel=1e-6)
    assert model.weight.item() == pytest.approx(third, rel=1e-6) and model.weight.grad is None
    average = 10.0
    for k, value in enumerate((first, second, third)):
        average += (1 - min(0.5, (1 + k) / (10 + k))) * (value - average)
    assert float(ema.averages["weight"]) == pytest.approx(average, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_it_stops_before_a_step_with_a_gradient_that_is_not_finite(bad):
    model, started = weight(1.0), []

    def steps():
        for step in range(5):
            started.append(step)
            yield step

    stopped = fit(
        model,
        lambda step: model.weight.sum() * (bad if step == 2 else 1.0),
        steps(),
        sgd(model, 0.1),
        lambda step: 1.0,
        clip_norm=10.0,
    )
    assert stopped == 2
    assert started == [0, 1, 2]
    assert model.weight.item() == pytest.approx(0.8)
    assert model.weight.grad is None


def test_frozen_weights_do_not_change():
    model = nn.Sequential(weight(1.0), weight(2.0))
    model[0].requires_grad_(False)
    optimizer = sgd(model[1], 0.1)
    assert (
        fit(
            model,
            lambda step: model(torch.ones(1, 1)).square().sum(),
            range(3),
            optimizer,
            lambda step: 1.0,
            1.0,
        )
        is None
    )
    assert model[0].weight.item() == 1.0 and model[1].weight.item() < 2.0
