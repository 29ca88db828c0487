"""A stage that starts from another's weights (ups/models/warm.py): what is taken, what stays, what is
refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from cases import cases
from safetensors.torch import load_file
from test_base_selection import make_caches
from test_operator import build, codec, describe, latents, overrides_of, train

from ups.commands import stages
from ups.common.files import value_hash
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.models.operator import Operator, load_operator
from ups.models.warm import copy_head, copy_weights, is_trunk
from ups.training.optim import build_optimizer

SMOKE = ROOT / "configs" / "smoke.yaml"
RUN = (
    "operator.train.steps=6 operator.train.validate_every=3 operator.train.save_every=2 "
    "operator.train.log_every=1 operator.train.validate_trajectories=1 "
    "operator.train.precision='no' operator.base_steps=5 operator.model.width=16 "
    "operator.model.depth=1 operator.model.kind=flat task.advection1d.history=1"
).split()
FIRST, SECOND = "data.tasks=[advection1d,burgers1d]", "data.tasks=[burgers1d,diff_react2d]"


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("warm")
    make_caches(root, *RUN, "data.tasks=[advection1d,burgers1d,diff_react2d]")
    return root


@pytest.fixture(scope="module")
def parent(caches, tmp_path_factory) -> Path:
    """The folder of a run that knows advection and Burgers."""
    root = tmp_path_factory.mktemp("parent")
    code, log = train(caches, root, *RUN, FIRST)
    assert code == 0, log
    return root / "smoke"


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "operator" / "model.safetensors")


def trunk_of(weights: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if is_trunk(name)}


def are_equal(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_trunk_and_known_heads_are_taken_bit_by_bit_and_new_heads_are_new(parent):
    given = load_operator(parent / "operator")
    torch.manual_seed(5)
    network = Operator(
        {**given.description, "tasks": [*reversed(given.description["tasks"]), describe("diff_react2d")[0]]}
    )
    for name in given.names:  # as fitted to the same data
        network.heads[name].codec.load_state_dict(given.heads[name].codec.state_dict())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    words = copy_weights(network, parent / "operator", 0.5)
    assert (
        "the trunk learns at 0.5 of the rates; heads: burgers1d as it was, advection1d as it was, "
        "diff_react2d anew" in words
    )
    after = network.state_dict()
    assert are_equal(trunk_of(after), trunk_of(given.state_dict()))
    assert not are_equal(trunk_of(after), trunk_of(before))
    for name, value in after.items():
        if name.startswith("heads."):
            is_map = name.split(".")[2] in ("into", "out") and "diff_react2d" not in name
            assert torch.equal(value, given.state_dict()[name] if is_map else before[name]), name
        elif ".own.diff_react2d." in name:
            of = [given.state_dict()[name.replace("diff_react2d", task)] for task in given.names]
            assert torch.equal(value, torch.stack(of).mean(0)), name
        elif ".own." in name:
            assert torch.equal(value, given.state_dict()[name]), name
    embedding, own = after["task_embedding"], given.state_dict()["task_embedding"]
    assert torch.equal(embedding[:2], own[[1, 0]]) and torch.equal(embedding[2], before["task_embedding"][2])


def test_rates_of_the_trunk_are_multiplied_and_those_of_heads_are_not(parent):
    network = load_operator(parent / "operator")
    copy_weights(network, parent / "operator", 0.25)
    settings = load_config(SMOKE, RUN).operator.optim
    rates = {
        id(p): group["lr"]
        for group in build_optimizer(network, settings).param_groups
        for p in group["params"]
    }
    for name, parameter in network.named_parameters():
        base = settings.muon_lr if getattr(parameter, "is_hidden_matrix", False) else settings.adamw_lr
        if parameter.requires_grad:  # not of a base or its twin
            assert rates[id(parameter)] == base * (0.25 if is_trunk(name) else 1.0), name


@pytest.mark.parametrize(
    ("name", "kind", "history"), [("burgers1d", "persistence", 2), ("darcy2d", "elliptic", 1)]
)
def test_a_head_over_another_codec_predicts_the_same_fields(tmp_path, name, kind, history):
    one = build(describe(name, kind, history))
    description, codecs = describe(name, kind, history)
    space = dict(zip(("codec", "coefficient_codec"), ((2, 3) if name == "darcy2d" else (4,)), strict=False))
    others = {
        part: codec(found.fields, found.ndim, seed=space.get(part, 7) + 9) for part, found in codecs.items()
    }
    for part, found in others.items():
        found.mean.add_(0.3), found.std.mul_(1.7)
        assert not found.is_same(codecs[part])
    two = build((description, others))
    mine, given = two.heads[name], one.heads[name]
    assert copy_head(mine, given) == "in the terms of its new codec"
    z = latents(one, name, 3, history)
    into, state = given.input_codec, torch.randn(3, *given.codec.tokens, given.codec.dim)

    def shown(head, z, z_base):
        return head.into(torch.cat([z.movedim(1, -2).flatten(-2), z_base], -1))

    def moved(z, before, after):
        return after.encode(after.normalise(before.denormalise(before.decode(z))))

    torch.testing.assert_close(
        shown(mine, moved(z, into, mine.input_codec), moved(state, given.codec, mine.codec)),
        shown(given, z, state),
        rtol=1e-4,
        atol=1e-4,
    )
    hidden = torch.randn(3, *given.codec.tokens, one.width)
    change, change_ref = (
        head.codec.decode(head.out(hidden)) * head.codec.std.view(-1, *[1] * head.codec.ndim)
        for head in (mine, given)
    )
    torch.testing.assert_close(change, change_ref, rtol=1e-4, atol=1e-4)
    # that it cannot serve
    assert copy_head(build(describe(name, kind, history + 1)).heads[name], given) == ""


def test_a_frozen_trunk_stays_bit_by_bit_while_heads_learn(caches, parent, tmp_path):
    code, log = train(
        caches, tmp_path, *RUN, SECOND, f"operator.init={parent}", "operator.optim.trunk_factor=0"
    )
    assert code == 0 and "the trunk stays as it is; heads: burgers1d as it was, diff_react2d anew" in log, log
    child, given = weights_of(tmp_path / "smoke"), weights_of(parent)
    assert are_equal(trunk_of(child), trunk_of(given))
    for name in ("into.weight", "out.weight"):
        assert not torch.equal(child[f"heads.burgers1d.{name}"], given[f"heads.burgers1d.{name}"]), name
    assert child["heads.diff_react2d.out.weight"].any()  # it began as nothing
    done = json.loads((tmp_path / "smoke" / "operator" / "done.json").read_text())
    assert (
        done["parents"]["init"] == json.loads((parent / "operator" / "done.json").read_text())["fingerprint"]
    )


@pytest.mark.gpu
def test_a_killed_stage_that_started_from_another_resumes_bit_by_bit(caches, parent, tmp_path):
    more = (*RUN, SECOND, f"operator.init={parent / 'operator'}", "operator.optim.trunk_factor=0.5")
    code, log = train(caches, tmp_path / "whole", *more)
    assert code == 0 and "learns at 0.5 of the rates" in log, log
    code, log = train(caches, tmp_path / "cut", *more, kill_at=5)
    assert code == -signal.SIGKILL, log
    code, log = train(caches, tmp_path / "cut", *more)
    assert code == 0 and "resumed at step 4" in log, log
    whole, cut = (weights_of(tmp_path / name / "smoke") for name in ("whole", "cut"))
    assert are_equal(whole, cut) and not are_equal(trunk_of(whole), trunk_of(weights_of(parent)))


def test_a_stage_depends_on_the_weights_that_it_started_from(caches, parent, tmp_path):
    """Another parent, or none, is another stage; where the same one lies does not matter."""
    start = tmp_path / "start"
    shutil.copytree(parent / "operator", start / "operator")
    arguments = [*overrides_of(caches, tmp_path), *RUN, FIRST, "run.name=child"]
    config = load_config(SMOKE, [*arguments, f"operator.init={start}"])
    identity = stages.stage_folder(config, "operator").identity
    moved = start.rename(tmp_path / "moved")
    again = load_config(SMOKE, [*arguments, f"operator.init={moved}/operator"])
    assert stages.stage_folder(again, "operator").identity == identity
    assert "init" not in stages.stage_folder(load_config(SMOKE, arguments), "operator").identity["parents"]
    done = json.loads((moved / "operator" / "done.json").read_text())
    record = {**done, "fingerprint": "other"}
    record["seal"] = value_hash({name: value for name, value in record.items() if name != "seal"})
    (moved / "operator" / "done.json").write_text(json.dumps(record))
    assert (
        stages.stage_folder(load_config(SMOKE, [*arguments, f"operator.init={moved}"]), "operator").identity
        != identity
    )


@pytest.mark.parametrize(("more", "text"), cases("warm.starts"))
def test_an_unusable_start_is_refused_by_name(caches, parent, tmp_path, more, text):
    more = [override.format(tmp=tmp_path, parent=parent) for override in more]
    config = load_config(SMOKE, [*overrides_of(caches, tmp_path), *RUN, FIRST, *more])
    with pytest.raises((FileNotFoundError, ValueError), match=text):
        stages.parents_of(config, "operator")


def test_a_factor_of_a_trunk_that_was_not_taken_is_refused():
    with pytest.raises(
        ValueError,
        match="operator.optim.trunk_factor is 0.5 of a trunk that is not trained yet; expected 1 "
        "without init. Name the run to start from with operator.init",
    ):
        load_config(SMOKE, ["operator.optim.trunk_factor=0.5"])
    with pytest.raises(
        ValueError, match="operator.optim.trunk_factor is -1.0; expected 0 \\(frozen\\) or more"
    ):
        load_config(SMOKE, ["operator.optim.trunk_factor=-1", "operator.init=runs/x"])


def test_longer_training_than_planned_is_refused_with_the_way_to_continue(caches, parent):
    arguments = [*overrides_of(caches, parent.parent), *RUN, FIRST]
    for more, is_told in (
        (["operator.train.steps=60"], True),
        (["operator.train.steps=60", "run.seed=3"], False),
    ):
        with pytest.raises(FileExistsError, match="started with another configuration") as caught:
            stages.stage_folder(load_config(SMOKE, [*arguments, *more]), "operator").examine()
        told = re.search(
            r"To train on from its end, choose another run.name .* operator.init=(\S+) and", str(caught.value)
        )
        assert bool(told) == is_told
        assert not told or Path(told[1]) == parent / "operator"
