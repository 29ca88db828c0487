"""ups/training/optim.py: equal to torch's own Muon and AdamW; schedule and average by hand arithmetic."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from commands import python
from torch import nn

from ups.config.load import load_config
from ups.training.optim import (
    EMA,
    MuonAdamW,
    build_optimizer,
    learning_rate,
    orthogonalize,
    place_gradients,
    split_parameters,
)

OPTIM = load_config().operator.optim


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 12), nn.Linear(12, 2)
    )
    for index in (0, 2, 4):
        model[index].weight.is_hidden_matrix = True
    return model


def train(model, optimizers, num_steps=5):
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(9))
    for _ in range(num_steps):
        model.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_muon_adamw_equals_the_pair_of_torch_optimizers_bitwise(monkeypatch):
    # as torch's does, whatever the device
    monkeypatch.setattr("ups.common.device.has_bfloat16", lambda kind: True)
    ours, theirs = make_model(), make_model()
    muon, rest = split_parameters(theirs)
    pair = [
        torch.optim.Muon(
            muon,
            lr=OPTIM.muon_lr,
            momentum=OPTIM.muon_momentum,
            weight_decay=OPTIM.muon_weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2]},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=OPTIM.adamw_lr,
            betas=tuple(OPTIM.adamw_betas),
            weight_decay=OPTIM.adamw_weight_decay,
            fused=True,
        ),
    ]
    train(theirs, pair)
    train(ours, [build_optimizer(ours, OPTIM)])
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not torch.equal(ours[2].weight, make_model()[2].weight)


def test_a_stack_of_matrices_moves_like_the_matrices_one_by_one():
    torch.manual_seed(0)
    values, gradient = torch.randn(3, 8, 20), torch.randn(3, 8, 20)
    stack, singles = nn.Parameter(values.clone()), [nn.Parameter(v.clone()) for v in values]
    group = {"kind": "muon", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    stack.grad = gradient.clone()
    for single, g in zip(singles, gradient, strict=True):
        single.grad = g.clone()
    MuonAdamW([{**group, "params": [stack]}]).step()
    MuonAdamW([{**group, "params": singles}]).step()
    assert torch.equal(stack, torch.stack(singles))


def test_an_optimizer_does_not_load_the_compiler_of_torch_which_takes_as_long_as_torch():
    used = "made = t.build_optimizer(t.make_model(), t.OPTIM); made.step(), made.state_dict()"
    code = f"import sys, test_optim as t; {used}; sys.exit('torch._dynamo' in sys.modules)"
    assert python("-c", code, cwd=Path(__file__).parent).returncode == 0


@pytest.mark.parametrize("shape", [(5, 16, 16), (5, 8, 32), (5, 32, 8)])
def test_orthogonalize_keeps_singular_vectors_and_brings_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    result = torch.linalg.svdvals(orthogonalize(matrices).float())
    large = values / values[:, :1] > 0.1  # five iterations do not lift the smallest ones
    assert result[large].min() > 0.4 and result.max() < 1.4
    overlap = (left.mT @ orthogonalize(matrices).float() @ right.mT).diagonal(dim1=-2, dim2=-1)
    assert overlap[large].min() > 0.4


def test_only_flagged_matrices_go_to_muon_and_frozen_parameters_nowhere():
    model = make_model()
    model[5].weight.requires_grad_(False)
    muon, rest = split_parameters(model)
    assert {id(p) for p in muon} == {id(model[i].weight) for i in (0, 2, 4)}
    assert {id(p) for p in rest} == {id(model[i].bias) for i in (0, 2, 4, 5)}


def test_a_flag_on_a_vector_is_refused():
    model = make_model()
    model[0].bias.is_hidden_matrix = True
    with pytest.raises(
        ValueError, match=r"parameter 0.bias of shape \(24,\).*expected a real matrix.*Remove the flag"
    ):
        split_parameters(model)


def test_saved_state_continues_bitwise_and_exists_before_the_first_step():
    whole, half = make_model(), make_model()
    one, first = build_optimizer(whole, OPTIM), build_optimizer(half, OPTIM)
    assert all(one.state[p] for p in whole.parameters())
    train(whole, [one], 6)
    train(half, [first], 3)
    rest = copy.deepcopy(half)
    for (_, p), q in zip(half.named_parameters(), rest.parameters(), strict=True):
        q.is_hidden_matrix = getattr(p, "is_hidden_matrix", False)
    second = build_optimizer(rest, OPTIM)
    second.load_state_dict(first.state_dict())
    train(rest, [second], 3)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), rest.parameters(), strict=True))


def test_learning_rate_warms_up_holds_and_falls_to_zero():
    optim = dataclasses.replace(OPTIM, warmup_steps=10, decay_fraction=0.5)
    factors = [learning_rate(step, 100, optim) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1.0 and factors[30] == factors[50] == 1.0
    assert factors[75] == pytest.approx(0.5) and factors[99] == pytest.approx(0.02) and factors[100] == 0.0
    flat = dataclasses.replace(OPTIM, warmup_steps=0, decay_fraction=0.0)
    assert {learning_rate(step, 100, flat) for step in range(100)} == {1.0}


def test_ema_follows_the_ramp_by_hand():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    ema, expected = EMA(model, decay=0.3), 0.0
    for k in range(6):
        with torch.no_grad():
            model.weight.fill_(float(k + 1))
        ema.update()
        decay = min(0.3, (1 + k) / (10 + k))
        expected = decay * expected + (1 - decay) * (k + 1)
        assert float(ema.averages["weight"]) == pytest.approx(expected, rel=1e-6)


def test_swap_shows_the_average_and_restores_the_weights_bitwise_even_after_an_error():
    model = make_model()
    ema = EMA(model, 0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError), ema.swap():
        assert all(torch.equal(p, ema.averages[n]) for n, p in model.named_parameters())
        raise KeyError
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_ema_state_round_trip_and_a_foreign_state_is_refused():
    model = make_model()
    ema, copy_ = EMA(model, 0.9), EMA(make_model(1), 0.9)
    ema.update()
    copy_.load_state_dict(ema.state_dict())
    assert copy_.num_updates == 1 and all(torch.equal(a, copy_.averages[n]) for n, a in ema.averages.items())
    with pytest.raises(
        ValueError, match="the saved average does not fit the model at .*expected the same parameters"
    ):
        EMA(nn.Linear(2, 2), 0.9).load_state_dict(ema.state_dict())


def test_gradients_of_tasks_share_a_place_and_each_tasks_are_those_of_its_loss_alone():
    """Refused: a place so shared that one task's gradients are added to another's, or that shared ones lie in
    it."""

    def network() -> nn.ModuleDict:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"trunk": nn.Linear(3, 4), "a": nn.Linear(4, 50), "b": nn.Linear(4, 7), "last": nn.Linear(2, 2)}
        )
        for task in ("a", "b"):
            for parameter in model[task].parameters():
                parameter.task = task
        return model

    model, alone, x = network(), network(), torch.randn(5, 3)
    flat, ends = place_gradients(model, torch.device("cpu"), 6, is_by_task=True)
    plain, whole = place_gradients(network(), torch.device("cpu"), 6)
    # counts and each parameter up to a multiple of ALIGN
    shared, own = (16 + 4 * 16, {"a": 208 + 64, "b": 32 + 16})
    assert ends == {None: flat.numel(), "a": shared + own["a"], "b": shared + own["b"]}
    assert flat.numel() == ends["a"]
    assert whole == {None: plain.numel()} and plain.numel() == shared + sum(own.values())
    for task in ("a", "b", "a"):
        flat[: ends[task]].zero_(), alone.zero_grad()
        for each in (model, alone):
            each[task](each["trunk"](x)).square().sum().backward()
        for part in ("trunk", task):
            for one, other in zip(model[part].parameters(), alone[part].parameters(), strict=True):
                assert torch.equal(one.grad, other.grad) and one.grad.data_ptr() >= flat.data_ptr()
        assert float(flat[: ends[task]].norm()) == pytest.approx(
            float(torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None]).norm()),
            rel=1e-6,
        )
        assert not flat[:6].any()


def test_a_step_of_one_task_leaves_alone_what_is_another_tasks_own():
    """Refused: moments of an earlier gradient that go on moving a task's own weights, Muon's by as much as a
    gradient."""
    model = make_model()
    model[2].weight.task, model[4].bias.task = "burgers1d", "burgers1d"
    optimizer = build_optimizer(model, OPTIM)
    train(model, [optimizer], 1)
    before = copy.deepcopy(model.state_dict())
    moments = [copy.deepcopy(optimizer.state[p]) for p in (model[2].weight, model[4].bias)]
    for name in ("2.weight", "4.bias"):
        model.get_parameter(name).grad.zero_()  # as a batch of advection leaves them
    optimizer.step(only="advection1d")
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"2.weight", "4.bias"}
    for parameter, then in zip((model[2].weight, model[4].bias), moments, strict=True):
        assert all(torch.equal(value, then[key]) for key, value in optimizer.state[parameter].items())
    optimizer.step()
    assert not any(torch.equal(model.state_dict()[name], before[name]) for name in same)
