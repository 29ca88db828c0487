"""The operator (ups/models/operator.py), rollouts (ups/models/rollout.py) and the stage that trains it
(train_operator.py)."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import loop_stage
import numpy as np
import pytest
import torch
from cases import cases
from finished import write_stage
from loop_stage import Left, same_end
from safetensors.torch import load_file
from test_base_selection import TINY, make_caches
from torch import Tensor
from toy_codec import fit_codec

import train_operator
import ups.training.run
from ups.common.device import precision_in_words
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.data.tokenizer import Tokenizer
from ups.models.bases.base import ParameterBatch
from ups.models.facts import describe_tokenizer
from ups.models.loss import (
    LOSS_FLOOR,
    ROUNDING,
    is_worth_training,
    operator_loss,
    relative_errors,
    squared_errors,
)
from ups.models.operator import Operator, load_operator
from ups.models.rollout import in_segments, rollout
from ups.models.windows import Windows, augment
from ups.select import pooled, select_network
from ups.tasks import TASKS, get_task
from ups.training.optim import build_optimizer, scale_lr
from ups_solvers import SOLVERS, darcy, gas

MODEL = {"kind": "flat", "width": 16, "depth": 2, "modes": 4, "kernel_size": 5, "mlp_ratio": 2.0}
HEADS = [("burgers1d", "transport", 2), ("darcy2d", "elliptic", 1), ("diff_react2d", "propagator", 2)]
VALUES = {
    "advection1d": (0.1, 0.4),
    "burgers1d": (0.01, 0.1, 1.0),
    "darcy2d": (1.0,),
    "diff_react2d": (),
    "cfd3d": (0.1,),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codec(
    fields: tuple[str, ...], ndim: int, cells: int = 16, patch: int = 4, dim: int = 0, seed: int = 0
) -> Tokenizer:
    generator = np.random.default_rng(seed)
    u = generator.standard_normal((4, 3, len(fields), *[cells] * ndim)).cumsum(-1).astype(np.float32)
    return fit_codec([u], fields=fields, patch=patch, dim=dim)


def describe(
    name: str,
    kind: str = "persistence",
    history: int = 1,
    dim: int = 0,
    cells: int = 16,
    **settings,
) -> tuple[dict, dict[str, Tokenizer]]:
    """A head's description and its codecs."""
    task = get_task(name)
    codecs = {"codec": codec(task.fields, task.ndim, cells, dim=dim)}
    if task.is_steady:
        codecs["coefficient_codec"] = codec(task.inputs, task.ndim, cells, seed=1)
    geometry = {
        "num_values": max(1, len(VALUES[name])),
        "num_parameters": len(task.parameters),
        "num_channels": len(task.fields),
        "num_inputs": len(task.inputs),
        "space": [cells] * task.ndim,
        "boundary": task.boundary,
        "degree": 2,
        "history": history,
        "reach": 3,
    }
    return {
        "name": name,
        "history": history,
        "codec": describe_tokenizer(codecs["codec"]),
        "input_codec": describe_tokenizer(codecs["coefficient_codec"]) if task.is_steady else None,
        "parameter_values": list(VALUES[name]),
        "dt": 0.05,
        "boundary": task.boundary,
        "domain": list(task.domain),
        "parameters": {key: [min(VALUES[name]), max(VALUES[name])] for key in task.parameters},
        "base": {"kind": kind, "settings": {**geometry, **settings}},
        "network_weight": 1.0,
        "is_conservative": False,
    }, codecs


def build(
    *heads: tuple[dict, dict], precision: str = "no", is_awake: bool = True, backbone: str = "flat"
) -> Operator:
    """An operator of these heads; awake: nothing in it is zero any more, as after training."""
    torch.manual_seed(0)
    operator = Operator(
        {
            "model": {**MODEL, "kind": backbone},
            "precision": precision,
            "tasks": [description for description, _ in heads],
        }
    )
    for description, codecs in heads:
        for part, fitted in codecs.items():
            getattr(operator.heads[description["name"]], part).load_state_dict(fitted.state_dict())
    if is_awake:
        with torch.no_grad():
            for parameter in operator.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
            for head in operator.heads.values():
                if head.facts.base["kind"] == "propagator":
                    head.base.weight_real.normal_(std=0.02)
    return operator


def latents(operator: Operator, name: str, batch: int = 2, frames: int = 1, seed: int = 0) -> Tensor:
    head = operator.heads[name]
    return noise(batch, frames, *head.input_codec.tokens, head.input_codec.dim, seed=seed)


def values(name: str, batch: int = 2) -> Tensor:
    """Raw parameters (batch, P) in turn."""
    fitted = VALUES[name]
    rows = [[fitted[i % len(fitted)]] for i in range(batch)] if fitted else [[]] * batch
    return torch.tensor(rows, dtype=torch.float64).view(batch, -1)


def parameters_of(operator: Operator, name: str, batch: int = 2) -> ParameterBatch:
    return operator.heads[name].parameter_batch(values(name, batch))


# ---------------------------------------------------------------- prediction


@pytest.mark.parametrize(
    ("name", "kind", "history", "dim"),
    [
        ("advection1d", "persistence", 1, 0),
        ("advection1d", "propagator", 3, 2),
        ("burgers1d", "transport", 1, 0),
        ("diff_react2d", "propagator", 2, 5),
        ("darcy2d", "elliptic", 1, 3),
    ],
)
def test_a_prediction_is_one_frame_with_the_latents_of_the_state(name, kind, history, dim):
    operator = build(describe(name, kind, history, dim))
    head = operator.heads[name]
    full, base = operator.predict(latents(operator, name, 2, history), name, parameters_of(operator, name))
    assert full.shape == base.shape == (2, 1, *head.codec.tokens, head.codec.dim)
    assert torch.isfinite(full).all() and (full - base).abs().max() > 0.05
    assert head.codec.dim == (dim or head.codec.width)
    assert torch.equal(operator(latents(operator, name, 2, history), name, values(name)), full)
    with pytest.raises(
        ValueError,
        match=f"{name} was given {history + 1} frames; expected its history of {history}. Slice the",
    ):
        operator.predict(latents(operator, name, 2, history + 1), name, parameters_of(operator, name))


def test_frames_of_a_base_alone_are_made_of_its_own_answers():
    operator = build(describe("advection1d", "propagator", 2))
    head, z = operator.heads["advection1d"], latents(operator, "advection1d", 2, 2)
    parameters, u = ParameterBatch(torch.zeros(2, 1), torch.tensor([0, 1])), head.codec.decode(z)
    base = head.base_frames(u, parameters, 3)
    for frame in range(3):
        u = torch.cat([u, head.base(u[:, -2:], parameters)[:, None]], 1)
        torch.testing.assert_close(base[:, frame], u[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"), [("advection1d", "propagator"), ("burgers1d", "transport"), ("darcy2d", "elliptic")]
)
def test_before_training_and_where_the_network_is_not_used_the_operator_is_its_base(name, kind):
    fresh = build(describe(name, kind), is_awake=False)
    full, base = fresh.predict(latents(fresh, name), name, parameters_of(fresh, name))
    assert torch.equal(full, base)
    trained = build(describe(name, kind))
    full, base = trained.predict(latents(trained, name), name, parameters_of(trained, name))
    assert not torch.equal(full, base)
    assert torch.equal(trained.rollout(latents(trained, name), name, values(name), 1), full)
    assert torch.equal(trained.rollout(latents(trained, name), name, values(name), 1, component="base"), base)
    head, found = trained.heads[name], {}
    for weight in (0.5, 0.0):
        head.facts = replace(head.facts, network_weight=weight)
        found[weight] = trained(latents(trained, name), name, values(name))
    torch.testing.assert_close(found[0.5], (full + base) / 2)
    assert torch.equal(found[0.0], base) and not head.is_network_used


@torch.no_grad()
def test_what_the_trunk_makes_of_a_state_comes_with_the_same_prediction_also_where_the_base_serves_alone():
    operator = build(describe("burgers1d", "transport", history=3))
    z, head = latents(operator, "burgers1d", 2, 3), operator.heads["burgers1d"]
    parameters = parameters_of(operator, "burgers1d")
    seen, features = operator.predict_with_features(z, "burgers1d", parameters)
    full, base = operator.predict(z, "burgers1d", parameters)
    assert torch.equal(seen, full) and features.shape == (2, *head.codec.tokens, operator.width)
    change = head.scale[parameters.index].view(-1, 1, 1, 1) * head.out(features)[:, None]
    torch.testing.assert_close(base + change, full)
    head.facts = replace(head.facts, network_weight=0.0)
    alone, still = operator.predict_with_features(z, "burgers1d", parameters)
    assert torch.equal(alone, base) and torch.equal(still, features)
    with pytest.raises(ValueError, match="expected its history of 3"):
        operator.predict_with_features(z[:, :2], "burgers1d", parameters)


def test_the_network_sees_every_frame_the_parameters_the_task_and_the_base():
    operator = build(describe("burgers1d", "transport", history=3))
    z, head = latents(operator, "burgers1d", 1, 3).requires_grad_(), operator.heads["burgers1d"]

    def change(z: Tensor, nu: float) -> Tensor:
        raw = torch.tensor([[nu]], dtype=torch.float64)
        full, base = operator.predict(z, "burgers1d", head.parameter_batch(raw))
        return full - base

    change(z, 0.1).square().sum().backward()
    assert (z.grad.abs().amax((0, 2, 3)) > 0).all()
    before = change(z.detach(), 0.1)
    assert (change(z.detach(), 0.03) - before).abs().max() > 1e-3
    with torch.no_grad():
        operator.task_embedding += 1.0
    moved = change(z.detach(), 0.1)
    assert (moved - before).abs().max() > 1e-3
    with torch.no_grad():
        head.base.drift += 0.5
    assert (change(z.detach(), 0.1) - moved).abs().max() > 1e-3


def test_the_networks_output_is_in_units_of_the_scale_of_the_parameter_value():
    operator = build(describe("advection1d", "persistence"))
    z, parameters = latents(operator, "advection1d", 4), parameters_of(operator, "advection1d", 4)
    scale, unit = operator.heads["advection1d"].scale, torch.tensor([0.5, 3.0])
    scale.fill_(1.0)
    full, base = operator.predict(z, "advection1d", parameters)
    scale.copy_(unit)
    scaled, _ = operator.predict(z, "advection1d", parameters)
    torch.testing.assert_close(scaled - base, (full - base) * unit.repeat(2).view(4, 1, 1, 1))


def test_bfloat16_in_the_trunk_leaves_base_and_codec_in_float32(monkeypatch):
    monkeypatch.setattr("ups.common.device.has_bfloat16", lambda kind: True)
    heads = [describe("burgers1d", "transport"), describe("darcy2d", "elliptic")]
    exact, rough = build(*heads), build(*heads, precision="bf16")
    rough.load_state_dict(exact.state_dict())
    for name in ("burgers1d", "darcy2d"):
        z = latents(exact, name)
        full, base = rough.predict(z, name, parameters_of(rough, name))
        expected, expected_base = exact.predict(z, name, parameters_of(exact, name))
        assert torch.equal(base, expected_base) and full.dtype == torch.float32
        change, expected_change = full - base, expected - expected_base
        assert 1e-5 < float(((change - expected_change).norm() / expected_change.norm()).detach()) < 0.03


def test_a_device_without_bfloat16_products_is_not_asked_for_them(monkeypatch):
    """Refused: bf16 that was trained elsewhere, or asked for, emulated at a thirtieth of the speed."""
    exact, rough = (
        build(describe("burgers1d", "persistence"), precision=precision) for precision in ("no", "bf16")
    )
    rough.load_state_dict(exact.state_dict())
    z, parameters = latents(exact, "burgers1d"), parameters_of(exact, "burgers1d")
    for has in (True, False):
        monkeypatch.setattr("ups.common.device.has_bfloat16", lambda kind, has=has: has)
        full, expected = (one.predict(z, "burgers1d", parameters)[0] for one in (rough, exact))
        assert torch.equal(full, expected) == (not has)
        words = "bf16" if has else "float32 (this cpu does not"
        assert precision_in_words("bf16", torch.device("cpu")).startswith(words)
        assert precision_in_words("no", torch.device("cpu")) == "float32"


# ---------------------------------------------------------------- parameters


def test_parameters_become_standardised_logarithms_and_the_number_of_their_value():
    head = build(describe("burgers1d", "propagator")).heads["burgers1d"]
    parameters = head.parameter_batch(torch.tensor([[0.01], [1.0], [0.1], [1.0]], dtype=torch.float64))
    assert parameters.index.tolist() == [0, 2, 1, 2]
    end = 1.5**0.5
    torch.testing.assert_close(parameters.standard[:3, 0], torch.tensor([-end, end, 0]), rtol=0, atol=1e-6)
    # float32 rounding of a known value
    assert head.parameter_batch(torch.tensor([[0.01]])).index.tolist() == [0]
    empty = parameters_of(build(describe("diff_react2d", "propagator")), "diff_react2d", 3)
    assert empty.standard.shape == (3, 0) and empty.index.tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [0.02, 0.0100001, math.nan])
def test_a_propagator_refuses_a_parameter_value_it_was_not_fitted_for(value):
    operator, raw = build(describe("burgers1d", "propagator")), torch.tensor([[0.1], [value]])
    with pytest.raises(
        ValueError,
        match=rf"burgers1d was asked for the parameter value {value:g}; expected one of \[0.01, 0.1, "
        r"1.0\], for which its propagator was fitted. Add the value to task.burgers1d.par",
    ):
        operator(latents(operator, "burgers1d"), "burgers1d", raw.double())


def test_a_token_grid_smaller_than_the_local_mixing_is_refused():
    with pytest.raises(
        ValueError,
        match="advection1d has 1 tokens along a periodic axis; expected at least 2 .half of operator.model",
    ):
        build(describe("advection1d", cells=4))


# ---------------------------------------------------------------- losses


def test_the_relative_error_is_that_of_the_formula():
    """By hand, two samples, one token of two numbers; RMS over tokens and dim."""
    z_ref = torch.tensor([[3.0, 1.0], [0.0, 2.0]]).view(2, 1, 1, 2)
    z_base = torch.tensor([[1.0, 1.0], [0.0, 2.0]]).view(2, 1, 1, 2)  # leaves 2 (mean square) and nothing
    z_pred = torch.tensor([[3.0, 2.0], [1.0, 1.0]]).view(2, 1, 1, 2)  # errs by 1/2 and 1 (mean square)
    scale = torch.tensor([0.5, 2.0])
    f = LOSS_FLOOR**2
    expected = [math.sqrt(2 * (0.5 + f) / (2 + 0.25 + 2 * f)), math.sqrt(2 * (1 + f) / (4 + 2 * f))]
    network, base = relative_errors(z_pred, z_ref, z_base, scale)
    assert float(network) == pytest.approx(sum(expected) / 2, rel=1e-6)
    expected = [math.sqrt(2 * (2 + f) / (2 + 0.25 + 2 * f)), math.sqrt(2 * f / (4 + 2 * f))]
    assert float(base) == pytest.approx(sum(expected) / 2, rel=1e-6)


@pytest.mark.parametrize(("scale", "is_worth"), [([3e-7, 9e-7], False), ([3e-7, 1e-5], True), ([0.5], True)])
def test_a_base_that_is_exact_up_to_rounding_leaves_nothing_to_train_on(scale, is_worth):
    """1e-5 is that of diff_react2d, where the network halves the error."""
    assert is_worth_training(torch.tensor(scale)) == is_worth


def test_the_base_is_not_rewarded_for_leaving_more_to_the_network():
    z_base = noise(2, 1, 8, 4).requires_grad_()
    pred = noise(2, 1, 8, 4, seed=1).requires_grad_()
    network, base = relative_errors(pred, noise(2, 1, 8, 4, seed=2), z_base, torch.ones(2))
    network.backward()
    assert z_base.grad is None and pred.grad is not None and not base.requires_grad


@pytest.mark.parametrize("kind", ["transport", "persistence"])
def test_the_loss_is_the_mean_over_calls_of_the_networks_error(kind):
    operator = build(describe("burgers1d", kind, history=2))
    head, parameters = operator.heads["burgers1d"], parameters_of(operator, "burgers1d")
    head.scale.copy_(torch.tensor([0.2, 0.3, 0.4]))
    z, z_ref = latents(operator, "burgers1d", 2, 2), latents(operator, "burgers1d", 2, 2, seed=1)
    decode = head.codec.decode
    loss, metrics = operator_loss(operator, "burgers1d", decode(z), decode(z_ref), parameters)
    network, base = 0.0, 0.0
    for call in range(2):
        target = z_ref[:, call : call + 1]
        full, z_base = operator.predict(z, "burgers1d", parameters)
        scale = torch.tensor([0.2, 0.3])
        errors = [float(relative_errors(pred.detach(), target, z_base, scale)[0]) for pred in (full, z_base)]
        network, base = network + errors[0] / 2, base + errors[1] / 2
        z = torch.cat([z, full], 1)[:, -2:]
    assert float(loss.detach()) == float(metrics["network"]) == pytest.approx(network, rel=1e-5)
    assert float(metrics["base"]) == pytest.approx(base, rel=1e-5) and not metrics["base"].requires_grad


def test_gradients_flow_through_the_rollout():
    operator = build(describe("burgers1d", "persistence"))
    head, parameters = operator.heads["burgers1d"], parameters_of(operator, "burgers1d")
    z, z_ref = latents(operator, "burgers1d"), latents(operator, "burgers1d", frames=2, seed=1)
    u, u_ref = (head.codec.decode(part) for part in (z, z_ref))
    through, _ = operator_loss(operator, "burgers1d", u, u_ref, parameters)
    cut = 0
    for frame in (0, 1):
        full, z_base = operator.predict(z.detach(), "burgers1d", parameters)
        cut = cut + relative_errors(full, z_ref[:, frame : frame + 1], z_base, torch.ones(2))[0] / 2
        z = full
    assert float(through.detach()) == pytest.approx(float(cut.detach()), rel=1e-5)
    one, two = (torch.autograd.grad(loss, head.out.weight)[0] for loss in (through, cut))
    assert float((one - two).norm() / two.norm()) > 0.01


@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        ("burgers1d", "flat"),
        ("diff_react2d", "flat"),
        ("darcy2d", "flat"),
        ("diff_react2d", "fno"),
        ("diff_react2d", "unet"),
        ("diff_react2d", "transformer"),
    ],
)
def test_one_batch_can_be_overfitted(name, backbone):
    base = "elliptic" if name == "darcy2d" else "persistence"
    operator = build(describe(name, base, dim=4), is_awake=False, backbone=backbone)
    head = operator.heads[name]
    z, z_ref = latents(operator, name, 4), 0.3 * noise(4, 1, *head.codec.tokens, head.codec.dim, seed=1)
    if name != "darcy2d":
        z_ref = z_ref + z
    u, u_ref = head.input_codec.decode(z), head.codec.decode(z_ref)
    settings = load_config(ROOT / "configs" / "default.yaml").operator.optim
    settings = replace(settings, muon_lr=0.01, muon_weight_decay=0.0, adamw_lr=0.01, adamw_weight_decay=0.0)
    optimizer = build_optimizer(operator, settings)
    first = None
    for step in range(60):
        optimizer.zero_grad()
        loss, metrics = operator_loss(operator, name, u, u_ref, parameters_of(operator, name, 4))
        first = first or float(metrics["network"])
        loss.backward()
        scale_lr(optimizer, min(1.0, 2 * (1 - step / 60)))
        optimizer.step()
    assert float(metrics["network"]) < 0.3 * first, (first, float(metrics["network"]))


# ---------------------------------------------------------------- symmetries


def test_every_velocity_of_a_symmetric_task_turns_with_the_space():
    symmetric = [task for task in TASKS.values() if task.is_symmetric]
    assert {"darcy2d", "diff_react2d", "cfd1d", "cfd3d"} <= {task.name for task in symmetric}
    for task in symmetric:
        assert task.vector == tuple(f for f in task.fields if f.startswith(("V", "force")))
        assert len(task.vector) % task.ndim == 0
        assert all(
            name[-1] == axis for name, axis in zip(task.vector, itertools.cycle(task.axes), strict=False)
        )


def fitted(u: Tensor, fields: tuple[str, ...], positive: tuple[str, ...] = ()) -> Tokenizer:
    """A full-rank codec of frames (n, time, C, *space)."""
    return fit_codec([u.float().numpy()], fields=fields, positive=positive, patch=4)


def drawn(task: str, parts: list[tuple[Tensor, Tokenizer]], seeds: range) -> list[list[Tensor]]:
    """Physical fields after `augment`, one list per seed."""
    out = []
    for seed in seeds:
        moved = augment(
            get_task(task), [(fit.normalise(u), fit) for u, fit in parts], torch.Generator().manual_seed(seed)
        )
        out.append([fit.denormalise(part) for part, (_, fit) in zip(moved, parts, strict=True)])
    return out


def num_distinct(found: list[list[Tensor]]) -> int:
    return len({tuple(round(float(x), 3) for x in fields[0].flatten()[:40]) for fields in found})


def test_augmented_darcy_data_still_solve_darcys_equation():
    data = SOLVERS["darcy2d"].simulate(
        range(2), seed=0, resolution=16, num_frames=1, parameter=1.0, t_end=1.0
    )
    a, u = data[:, :, :1], data[:, :, 1:]
    flipped = darcy.solve(a[0, 0, 0].flip(1).T, torch.ones(()))  # the fact that it rests on
    torch.testing.assert_close(flipped.float(), u[0, 0, 0].flip(1).T, rtol=0, atol=1e-6)
    found = drawn("darcy2d", [(a, fitted(a, ("nu",))), (u, fitted(u, ("u",)))], range(24))
    for moved_a, moved_u in found:
        solution = darcy.solve(moved_a[:, 0, 0].round(decimals=3), torch.ones(()))
        torch.testing.assert_close(moved_u[:, 0, 0], solution.float(), rtol=0, atol=1e-5)
    assert num_distinct(found) == 8  # the symmetries of the square


@pytest.mark.parametrize(
    ("name", "num_cells"), [("cfd1d", 16), ("cfd1d_trans", 16), ("cfd2d", 8), ("cfd3d", 8)]
)
def test_augmented_gas_still_obeys_its_equations_and_a_velocity_that_does_not_turn_fails(
    name, num_cells, monkeypatch
):
    task = get_task(name)
    u = SOLVERS[task.name].simulate(
        range(3), seed=0, resolution=num_cells, num_frames=2, parameter=0.01, t_end=0.02
    )
    low, high = task.domain
    flow = gas.Gas(0.01, 0.01, (high - low) / num_cells, task.boundary == "periodic")

    def largest_error() -> float:
        """Of the second frames after `augment`, beside those that follow from the first, in units of the
        change."""
        errors = []
        for [moved] in drawn(name, [(u, fitted(u, task.fields, task.positive))], range(8)):
            last = list(gas.evolve(gas.conserved(moved[:, 0].double()), flow, dt=0.02, num_frames=2))[-1]
            errors.append((gas.primitive(last) - moved[:, 1]).norm() / (moved[:, 1] - moved[:, 0]).norm())
        return float(max(errors))

    assert largest_error() < 1e-4
    monkeypatch.setitem(TASKS, name, replace(task, vector=()))
    assert largest_error() > 0.1


def test_a_task_without_a_known_symmetry_is_not_augmented():
    spec = get_task("diff_sorp1d")
    u = 1 + noise(2, 3, len(spec.fields), *[8] * spec.ndim).abs()
    fit = fit_codec([u.numpy()], fields=spec.fields, patch=4)
    w = fit.normalise(u)
    assert all(augment(spec, [(w, fit)], torch.Generator().manual_seed(seed))[0] is w for seed in range(5))


# ---------------------------------------------------------------- rollouts


def test_a_rollout_feeds_the_last_frames_back():
    """Fibonacci: the next frame is the sum of the last two."""
    context = torch.tensor([[5.0, 1, 1]]).view(1, 3, 1)
    u_pred = rollout(lambda w, _: w.sum(1, keepdim=True), context, 6, 2)
    assert u_pred.flatten().tolist() == [2, 3, 5, 8, 13, 21]


def test_a_rollout_without_enough_context_or_frames_is_refused():
    with pytest.raises(
        ValueError,
        match="the context has 2 frames; expected at least the history of 3. Raise evaluate.context",
    ):
        rollout(lambda w, _: w, torch.zeros(1, 2, 1), 4, 3)
    with pytest.raises(
        ValueError, match="a rollout of 0 frames is not possible; expected at least 1. Lower evaluate.context"
    ):
        rollout(lambda w, _: w, torch.zeros(1, 2, 1), 0, 1)


# ---------------------------------------------------------------- files


def test_a_saved_operator_gives_its_outputs_back_bit_by_bit(tmp_path):
    operator = build(*[describe(name, kind, history) for name, kind, history in HEADS])
    operator.heads["darcy2d"].facts = replace(operator.heads["darcy2d"].facts, network_weight=0.0)
    operator.heads["burgers1d"].scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for head in operator.heads.values():  # as `select_base` does; weights are finite
        head.low.fill_(-3.0), head.high.fill_(3.0)
    write_stage(tmp_path, operator.description, operator.state_dict())
    again = load_operator(tmp_path)
    assert not again.training and again.description == json.loads(json.dumps(operator.description))
    for name, _, history in HEADS:
        z = latents(operator, name, 2, history)
        parameters = parameters_of(operator, name)
        for one, two in zip(
            operator.predict(z, name, parameters), again.predict(z, name, parameters), strict=True
        ):
            assert torch.equal(one, two)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "done.json"])
def test_an_unfinished_operator_is_refused_naming_the_make_target(tmp_path, missing):
    for name in {"config.json", "model.safetensors", "done.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(
        FileNotFoundError,
        match=f"{missing} is missing; expected a finished operator stage in .*. Run make oper",
    ):
        load_operator(tmp_path)


# ---------------------------------------------------------------- the stage


STEPS = 10
RUN = (
    f"operator.train.steps={STEPS} operator.train.micro_batch=8 operator.train.log_every=1 "
    "operator.train.validate_every=5 operator.train.save_every=5 "
    "operator.train.validate_trajectories=1 operator.train.precision='no' operator.base_steps=5 "
    "operator.model.width=16 task.darcy2d.energy=0.999 task.diff_react2d.history=2 "
    "task.advection1d.history=4"
).split()


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stage")
    config = make_caches(root, *RUN)
    cache = open_cache(config, "darcy2d")
    # a steady task whose question and answer differ in shape
    assert cache.tokenizer.dim != cache.input_tokenizer.dim
    return root


def overrides_of(caches: Path, root: Path, *more: str) -> list[str]:
    return [f"data.root={caches}/data", f"cache.root={caches}/cache", f"run.root={root}", *TINY, *RUN, *more]


def _stage(overrides: list[str], kill_at: int, rounding: float, gpu_gib: float) -> None:
    ups.models.loss.ROUNDING, ups.training.run.Run.update = rounding, loop_stage.dying_at(kill_at)
    if gpu_gib:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gpu_gib * 2**30 / whole)
    loop_stage.run_script("train_operator", ["--config", str(ROOT / "configs" / "smoke.yaml"), *overrides])


def train_ranks(
    caches: Path,
    root: Path,
    *more: str,
    world: int = 1,
    kill_at: int = -1,
    rounding: float = ROUNDING,
    gpu_gib: float = 0,
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the stage on `world` processes. rounding: as in `is_worth_training`;
    gpu_gib: the memory that it may use of its GPU, 0: all."""
    arguments = (overrides_of(caches, root, *more), kill_at, rounding, gpu_gib)
    return loop_stage.run_ranks(root, _stage, lambda _rank: arguments, world)


def train(caches: Path, root: Path, *more: str, **options: float) -> tuple[int, str]:
    """Exit code and output of the stage on one process; options as in `train_ranks`."""
    [code], [log] = train_ranks(caches, root, *more, **options)
    return code, log


def left_in(root: Path) -> Left:
    return Left(root / "smoke" / "operator")


@pytest.fixture(scope="module")
def reference(caches, tmp_path_factory) -> Left:
    """An undisturbed run on one process."""
    root = tmp_path_factory.mktemp("reference")
    code, log = train(caches, root)
    assert code == 0, log
    return left_in(root)


def config_of(caches: Path, *more: str) -> Config:
    return load_config(ROOT / "configs" / "smoke.yaml", overrides_of(caches, caches, *more))


def test_the_stage_learns_from_every_task_and_states_its_bases(reference):
    done = reference.json("done.json")
    tasks = {"advection1d", "burgers1d", "darcy2d", "diff_react2d"}
    assert set(done["results"]["validation"]) == set(done["results"]["bases"]) == tasks
    assert done["step"] == STEPS
    assert done["results"]["bases"]["darcy2d"] == "elliptic"
    keys = [key.split("/") for line in reference.lines() for key in line]
    assert {key[1] for key in keys if key[0] == "train" and len(key) == 3} == tasks
    assert reference.losses().isfinite().all()


def validated(operator: Operator, cache: Cache, context: int) -> Tensor:
    """`squared_errors` as the stage computes them at its end."""
    head = operator.heads[cache.task.name]
    head.facts = replace(head.facts, network_weight=1.0)
    return squared_errors(operator, cache, cache.rows_by_parameter("val", 4), context)


def test_what_is_exported_validates_as_recorded_and_the_network_serves_where_it_helps(caches, reference):
    recorded = reference.json("done.json")["results"]["validation"]
    config, operator = config_of(caches), load_operator(reference.directory)
    decided = reference.json("config.json")["decisions"]
    for name, error in recorded.items():
        cache = open_cache(config, name)
        rows = cache.rows_by_parameter("val", 4)  # four times as many
        is_used = operator.heads[name].is_network_used
        found = validated(operator, cache, config.context(name))
        question = f"forecasts of {name}"
        decision = select_network(question, found, cache.trajectory[rows], config.run.seed)
        # the decision is stored with the weights
        assert decision.described() in decided
        assert is_used == (decision.chosen == "network")
        truth, _, *squares = found.sum(0)
        for key, square in zip(("network", "base"), squares, strict=True):
            assert float((square / truth).sqrt().mean()) == pytest.approx(error[key], rel=1e-6), (name, key)


@pytest.mark.parametrize("world", [2, 4])
def test_nine_trajectories_validate_alike_on_any_number_of_processes(caches, reference, world):
    config = config_of(caches)
    cache, operator = open_cache(config, "burgers1d"), load_operator(reference.directory)
    cache.split["val"] = torch.arange(9)
    found = []
    for num in (1, world):
        ranks = [
            SimpleNamespace(
                device=torch.device("cpu"),
                agreed=lambda function, _: function(),
                ranks=SimpleNamespace(rank=rank, world=num, reduce_sum=lambda part: part),
            )
            for rank in range(num)
        ]
        found.append(
            sum(
                train_operator.validate(
                    operator, {"burgers1d": cache}, {"burgers1d": config.context("burgers1d")}, run, 32
                )["burgers1d"]
                for run in ranks
            )
        )
    assert len(found[0]) == 9 and bool(found[0].flatten(1).any(1).all())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        *map(torch.tensor, (pooled(sums)["network"] for sums in found)), rtol=1e-6, atol=0.0
    )


def test_two_processes_give_the_losses_of_one(caches, reference, tmp_path):
    codes, logs = train_ranks(caches, tmp_path, world=2)
    assert codes == [0, 0] and "2 process(es) on cpu" in logs[0], logs
    ends = reference, left_in(tmp_path)
    one, two = (end.losses() for end in ends)
    assert len(one) == len(two) == STEPS
    torch.testing.assert_close(two, one, rtol=1e-5, atol=0.0)
    scores = [end.logged("validation/score") for end in ends]
    # with one validation trajectory for two processes
    torch.testing.assert_close(*scores, rtol=1e-4, atol=0.0)
    bases = [load_file(end.directory / "bases" / "burgers1d.safetensors") for end in ends]
    assert all(torch.equal(bases[0][key], bases[1][key]) for key in bases[0])


@pytest.mark.gpu
def test_a_killed_stage_resumes_to_the_same_weights_bit_by_bit(caches, reference, tmp_path):
    code, log = train(caches, tmp_path, kill_at=7)
    assert code == -signal.SIGKILL, log
    assert not (tmp_path / "smoke" / "operator" / "done.json").exists()
    bases = tmp_path / "smoke" / "operator" / "bases"
    fitted_at = {path: path.stat().st_mtime_ns for path in bases.iterdir()}
    code, log = train(caches, tmp_path)
    assert code == 0 and "resumed at step 5" in log, log
    assert {path: path.stat().st_mtime_ns for path in bases.iterdir()} == fitted_at
    same_end(reference, left_in(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or not run by `make test-gpu`")
def test_a_gpu_with_too_little_memory_gets_smaller_passes_and_the_losses_of_a_large_one(caches, tmp_path):
    rows = ("operator.train.batch_size=2048", "operator.train.micro_batch=2048", "operator.train.steps=3")
    losses, gpu_gib = [], 0.0
    for name in ("large", "small"):
        code, log = train(caches, tmp_path / name, *rows, gpu_gib=gpu_gib)
        assert code == 0, log
        lines = [line for line in left_in(tmp_path / name).lines() if "train/loss" in line]
        assert (lines[0]["train/micro_batch"] < 2048) is (name == "small"), lines
        losses.append([line["train/loss"] for line in lines])
        gpu_gib = 0.6 * lines[0]["memory_gib"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)  # bf16


def test_without_validation_the_averaged_weights_are_exported_and_judged(caches, tmp_path):
    code, log = train(
        caches,
        tmp_path,
        "operator.train.validate_every=0",
        "operator.train.steps=3",
        "data.tasks=[burgers1d]",
    )
    assert code == 0, log
    end = left_in(tmp_path)
    state = torch.load(end.directory / "state" / "step_000000003" / "shared.pt", weights_only=True)
    weights = end.weights()
    assert all(torch.equal(weights[name], value) for name, value in state["ema"]["averages"].items())
    cache, operator = open_cache(config_of(caches), "burgers1d"), load_operator(end.directory)
    found = pooled(validated(operator, cache, 10))["network"]
    recorded = end.json("done.json")["results"]["validation"]["burgers1d"]
    assert found == pytest.approx(recorded["network"], rel=1e-6)


def test_a_stage_takes_no_step_where_every_base_is_exact(caches, tmp_path):
    """As if every error were rounding."""
    code, log = train(caches, tmp_path, "data.tasks=[advection1d]", rounding=math.inf)
    assert code == 0, log
    end = left_in(tmp_path)
    assert "no training: no task has a base that a network could improve" in log
    assert end.json("done.json")["step"] == 0
    assert load_operator(end.directory).heads["advection1d"].is_network_used is False


@pytest.fixture
def run_here(main_here):
    return partial(main_here, "train_operator", "--config", str(ROOT / "configs" / "smoke.yaml"))


@pytest.mark.parametrize(("override", "text"), cases("operator.refused"))
def test_too_few_frames_or_no_cache_is_refused_before_anything_is_made(
    caches, tmp_path, run_here, override, text
):
    code, output = run_here(*overrides_of(caches, tmp_path / "runs"), override)
    assert code == 2 and text in output and "Traceback" not in output, output
    assert not (tmp_path / "runs").exists()


def test_the_printed_number_of_parameters_is_that_of_the_finished_model(caches, reference, run_here):
    _, output = run_here("--dry-run", *overrides_of(caches, reference.directory.parents[1]))
    printed = int(re.search(r"some ([\d,]+) parameters", output)[1].replace(",", ""))
    count = sum(p.numel() for p in load_operator(reference.directory).parameters())
    # the plan cannot know which base will be chosen: it counts the last of each list
    assert abs(printed - count) <= 0.01 * count


def test_the_schedule_offers_every_window_that_the_unrolled_phase_needs(caches):
    config = config_of(caches, "operator.unroll_steps=3")
    found = {name: open_cache(config, name) for name in config.data.tasks}
    windows = Windows(found, config.task, config.operator, 0).schedule.windows
    # 16 frames: 4 shown, 3 predicted; reaction-diffusion 14 of which the first 3 are left out; Darcy has one
    # frame
    assert windows["advection1d"][1] == 10
    assert windows["diff_react2d"][1] == 14 - 3 - 5 + 1
    assert windows["darcy2d"][1] == 1
    assert all(windows[name][0] == len(cache.split["train"]) for name, cache in found.items())


def test_rollout_errors_come_with_the_truth_and_its_variation_and_no_rows_give_none_in_the_right_shape(
    caches, reference
):
    cache, operator = open_cache(config_of(caches), "diff_react2d"), load_operator(reference.directory)
    nothing = squared_errors(operator, cache, torch.zeros(0, dtype=torch.long), 10)
    something = squared_errors(operator, cache, cache.split["val"], 10)
    assert nothing.shape[1:] == something.shape[1:] == (4, 4, 2)
    assert len(nothing) == 0 < len(something) == len(cache.split["val"])
    u = (
        operator.heads["diff_react2d"]
        .physical(cache.batch(cache.split["val"], 10, 4, torch.device("cpu")))
        .double()
    )
    torch.testing.assert_close(something[:, 0], u.square().sum((3, 4)))
    mean = cache.tokenizer.mean.view(2, 1, 1).double()
    torch.testing.assert_close(something[:, 1], (u - mean).square().sum((3, 4)))  # the variation
    assert something.dtype == nothing.dtype


def published_operator() -> Operator:
    operator = load_operator(ROOT / "pretrained" / "operator")
    operator.precision = "no"  # differences need the digits
    return operator


@pytest.fixture(scope="module")
def published() -> Operator:
    return published_operator()


def smooth_latents(operator: Operator, name: str) -> Tensor:
    """Latents z (1, history, *tokens, dim), float64, of a few waves in every field."""
    codec, history, source = operator.head(name).input_codec, operator.head(name).history, torch.Generator()
    points = torch.meshgrid(*[(torch.arange(n).double() + 0.5) / n for n in codec.space], indexing="ij")
    waves = torch.randn(history * codec.num_channels, 6, 2, generator=source.manual_seed(1))
    fields = [
        sum(
            a * torch.sin(2 * math.pi * (k // 2 * points[0] + k % 2 * points[-1]) + 6 * phase) / (k // 2)
            for k, (a, phase) in enumerate(wave.tolist(), 2)
        )
        for wave in waves
    ]
    return codec.encode(0.3 * torch.stack(fields).view(1, history, codec.num_channels, *codec.space))


@pytest.mark.parametrize("num_frames", [0, 5])  # 0: one call of `forward`; 5: two in a segment
@pytest.mark.parametrize("name", load_config(ROOT / "configs" / "pretrained.yaml").data.tasks)
def test_a_gradient_is_the_derivative_by_latents_and_parameters(published, monkeypatch, name, num_frames):
    head, source = published.head(name), torch.Generator().manual_seed(2)
    z, known = smooth_latents(published, name), head.facts.parameters
    is_fitted = head.base.needs_fitted_parameters and bool(known)
    raw = [low if is_fitted else 0.7 * low + 0.3 * high for low, high in known.values()]
    raw = torch.tensor([raw], dtype=torch.float64)
    if is_fitted:
        with pytest.raises(
            ValueError, match=f"{name} was given a tensor that requires a gradient; .* fitted"
        ):
            published(z.float(), name, raw.clone().requires_grad_())

    def gradients(call, z: Tensor) -> tuple[Tensor, ...]:
        given = z.requires_grad_(), raw.clone().requires_grad_(not is_fitted)
        out = call(given[0], name, given[1])
        with torch.no_grad():
            assert torch.equal(call(given[0], name, given[1]), out)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        wanted = [one for one in given if one.requires_grad and one.numel()]
        return (weights, *torch.autograd.grad((out * weights).sum(), wanted))

    def call_of(operator: Operator) -> partial:
        length = 1 if operator.head(name).task.is_steady else num_frames
        rolled = partial(operator.rollout, num_frames=length)
        return rolled if num_frames else partial(Operator.forward.__wrapped__, operator)

    public = gradients(published if not num_frames else call_of(published), z.float())  # in float32
    call = call_of(published_operator().double())
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    try:
        torch.set_default_dtype(torch.float64)
        weights, by_z, *by_raw = gradients(call, z)

        def change(dz: Tensor, d_raw: Tensor) -> float:
            with torch.no_grad():
                ends = [call(z + sign * dz, name, raw + sign * d_raw) for sign in (1, -1)]
            return float(((ends[0] - ends[1]) * weights).sum()) / 2

        dz = 1e-6 * torch.randn(z.shape, generator=source)
        expected = pytest.approx(change(dz, 0 * raw), rel=1e-5)
        assert float((by_z * dz).sum()) == expected and 1.1 * float((by_z * dz).sum()) != expected
        for gradient in by_raw:
            d_raw = 1e-6 * raw
            assert float((gradient * d_raw).sum()) == pytest.approx(change(0 * z, d_raw), rel=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)
        monkeypatch.undo()
    for one, other in zip(public[1:], (by_z, *by_raw), strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()


def test_a_gradient_takes_the_memory_of_few_of_the_steps():
    def most_bytes(wrap: Callable) -> int:  # bytes that torch takes, not the process's pages
        def step(u: Tensor, num_done: int) -> Tensor:
            return (u[0].expand(256, -1) * torch.ones(256, 1)).sin().mean(0)[None, None]

        u = torch.ones(1, 1, 2**12, requires_grad=True)
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            rollout(wrap(step), u, 36, 1)[:, -1].sum().backward()
        events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return max(itertools.accumulate(sizes))

    plain = most_bytes(lambda step: step)
    assert plain > 36 * 2**22 and most_bytes(lambda step: in_segments(step, 36, 1)) < plain / 4


def test_a_base_of_another_kind_than_those_of_this_version_is_refused_by_name():
    description, codecs = describe("advection1d", "propagator")
    base = {"kind": "per_field", "settings": {"components": []}}
    with pytest.raises(ValueError, match="advection1d have a base of kind 'per_field'; expected one of "):
        build((description | {"base": base}, codecs))
