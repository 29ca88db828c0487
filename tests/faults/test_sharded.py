"""ups/training/strategies.py: the same numbers as without FSDP2, resumption on any ranks, one rank's failure
ends all, then it goes on.

Ranks are processes that talk over gloo; tests/faults/forced_fsdp.py makes Accelerate do on the CPU what it
does on GPUs."""

import json
import shutil

import forced_fsdp
import loop_stage
import pytest
import torch
from cases import cases
from loop_stage import Left
from torch.utils._pytree import tree_flatten_with_path

import prepare_cache
import prepare_data
from ups.common.place import ROOT
from ups.training import sharding
from ups.training.sharding import shard_axis, shard_of

FSDP = {"options": {"fsdp": True, "blocks": True}, "environment": forced_fsdp.ENVIRONMENT}
PLAIN = {"options": {"blocks": True}}
# as Muon amplifies rounding
STEPS = ("operator.train.steps=50", "operator.optim.muon_lr=2e-4", "operator.optim.adamw_lr=5e-4")


def launch(root, *overrides, how=FSDP, world=2, **more):
    options = how["options"] | more.pop("options", {})
    return loop_stage.launch(root, *overrides, world=world, **{**how, **more, "options": options})


def close(one, two, rtol=1e-5):
    """Losses, validation scores and exported weights agree to rounding."""
    assert len(one.losses()) == len(two.losses()) > 0
    for name in ("train/loss", "validation/score"):
        torch.testing.assert_close(one.logged(name), two.logged(name), rtol=rtol, atol=0.0)
    # Muon's iteration is in bfloat16
    torch.testing.assert_close(one.weights(), two.weights(), rtol=1e-4, atol=3e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run on two ranks that each hold the whole model."""
    outcome = launch(tmp_path_factory.mktemp("plain"), *STEPS, how=PLAIN)
    assert outcome.codes == [0, 0], outcome.logs
    return outcome


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The same run, sharded."""
    outcome = launch(tmp_path_factory.mktemp("shared"), *STEPS)
    assert outcome.codes == [0, 0], outcome.logs
    return outcome


# ---------------------------------------------------------------- state; equal losses: test_equal.py


def test_the_export_is_whole_and_a_checkpoint_holds_half_of_everything_on_each_rank(plain, shared):
    assert "the model is sharded (FSDP): a rank that runs out of memory or fails ends all" in shared.logs[0]
    exported = shared.weights()
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        n: t.shape for n, t in plain.weights().items()
    }
    assert {"none", "scale", "frozen.mix"} <= exported.keys()
    assert all(type(t) is torch.Tensor for t in exported.values())
    folder = shared.directory / "state" / "step_000000050"
    common = torch.load(folder / "shared.pt", weights_only=True)
    assert set(common["model"]) == {"scale"} and "optimizer" not in common and common["is_sharded"]
    parts = [torch.load(folder / f"rank_{rank}.pt", weights_only=True)["shards"] for rank in (0, 1)]
    for name, whole in exported.items():
        if name != "scale":
            assert sum(part["model"][name].numel() for part in parts) == whole.numel(), name
    assert [part["model"]["blocks.0.mix"].shape for part in parts] == [(1, 3, 16, 16)] * 2  # the axis of 2
    # 25 does not divide evenly
    assert [part["model"]["blocks.0.up.weight"].shape for part in parts] == [(25, 8)] * 2
    assert [part["model"]["blocks.0.down.bias"].shape for part in parts] == [(8,)] * 2
    assert [part["model"]["heads.0.bias"].shape for part in parts] == [(1,), (0,)]
    averages = torch.cat([part["ema"]["averages"]["blocks.0.mix"] for part in parts])
    assert averages.dtype == torch.float32 and averages.shape == exported["blocks.0.mix"].shape


# ---------------------------------------------------------------- resume


def test_a_killed_run_resumes_bitwise_also_from_the_checkpoint_before_a_damaged_one(shared, tmp_path):
    killed = launch(tmp_path / "cut", *STEPS, fault={"kind": "kill", "rank": 1, "step": 12})
    assert killed.codes[1] == -9 and killed.codes[0] != 0
    shutil.copytree(tmp_path / "cut", tmp_path / "damaged")
    part = tmp_path / "damaged" / "default" / "operator" / "state" / "step_000000010" / "rank_1.pt"
    part.write_bytes(part.read_bytes()[:-100])
    for folder, words in (
        ("cut", ["resumed at step 10"]),
        ("damaged", ["rank_1.pt is ", "going back to step 5", "resumed at step 5"]),
    ):
        resumed = launch(tmp_path / folder, *STEPS)
        assert resumed.codes == [0, 0] and all(word in resumed.logs[0] for word in words), resumed.logs
        assert torch.equal(shared.losses(), resumed.losses())
        a, b = shared.weights(), resumed.weights()
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_continues_on_other_ranks_sharded_or_not(plain, tmp_path):
    """Sharded over 2, then over 4, then whole on 1, then sharded over 2 again."""
    for step, world, how, before in (
        (7, 2, FSDP, ""),
        (17, 4, FSDP, "8 (written by 2 processes)"),
        (27, 1, PLAIN, "18 (written by 4 processes)"),
        (99, 2, FSDP, "28 (written by 1 processes)"),
    ):
        outcome = launch(
            tmp_path, *STEPS, how=how, world=world, fault={"kind": "term", "rank": 0, "step": step}
        )
        assert outcome.codes == [0 if step == 99 else 143] * world, outcome.logs
        assert f"resumed at step {before}" in outcome.logs[0] or not before
    close(plain, outcome, rtol=1e-4)  # rounding, over 50 steps and four orders of summation


@pytest.mark.parametrize("how, settings", [(PLAIN, ()), (PLAIN, ("ddp.overlap=true",)), (FSDP, ())])
def test_a_step_after_saving_and_loading_in_one_process_is_the_step_that_was_taken(tmp_path, how, settings):
    """Before the first step, between two logs, and where best weights are kept."""
    outcome = launch(
        tmp_path,
        "operator.train.steps=8",
        "operator.train.log_every=3",
        *settings,
        how=how,
        options={"twice": (0, 1, 5)},
    )
    assert outcome.codes == [0, 0], outcome.logs


# ---------------------------------------------------------------- faults


def test_what_is_not_finite_on_one_rank_is_skipped_by_both(tmp_path):
    outcome = launch(tmp_path, fault={"kind": "nan", "rank": 1, "step": 3})
    assert outcome.codes == [0, 0], outcome.logs
    assert "step 3 skipped: loss nan or its gradient is not finite (1 in a row)" in outcome.logs[0]
    assert outcome.json("done.json")["num_skipped"] == 1


@pytest.mark.parametrize("kind", ["memory_backward", "error"])
def test_a_rank_that_fails_ends_both_and_is_named(tmp_path, kind):
    outcome = launch(tmp_path, fault={"kind": kind, "rank": 1, "step": 7})
    assert outcome.codes[1] == 1 and outcome.codes[0] in (1, 124), outcome.logs
    expected = (
        "out of memory with a micro-batch of 4 with a sharded model"
        if kind != "error"
        else "KeyError: 'injected cause'"
    )
    assert expected in outcome.logs[1].splitlines()[-1] and "rank 1 failed: " in outcome.logs[0]
    assert outcome.json("errors/rank1.json")["rank"] == 1
    left = [
        json.loads(path.read_text())["micro_batch"] for path in outcome.directory.glob("memory/rank1.json")
    ]
    assert left == ([2] if kind != "error" else [])


@pytest.mark.parametrize(("overrides", "environment", "text"), cases("sharded.refused"))
def test_what_cannot_be_had_is_refused_before_anything_is_made(tmp_path, overrides, environment, text):
    outcome = launch(tmp_path, *overrides, environment=forced_fsdp.ENVIRONMENT | environment)
    assert outcome.codes == [2, 2] and all(text in log for log in outcome.logs), outcome.logs
    assert not outcome.directory.exists()


def test_unequal_shares_are_refused(tmp_path):
    outcome = launch(tmp_path, world=3)
    assert outcome.codes == [2] * 3 and not outcome.directory.exists()
    assert (
        "the batch of 8 rows does not divide into 3 equal shards; expected equal ones with FSDP"
        in outcome.logs[0]
    )


@pytest.mark.parametrize("blocks", [False, True])
def test_a_model_that_cannot_be_sharded_is_refused(tmp_path, blocks):
    """Without a block of the class that is named; with a parameter that is not float32."""
    outcome = launch(tmp_path, options={"blocks": blocks, "double": True})
    assert outcome.codes == [1, 1], outcome.logs
    assert (
        "parameter none has type torch.float64; expected float32 with FSDP"
        if blocks
        else "the model has no layer with is_repeated_layer"
    ) in outcome.logs[0]


# ---------------------------------------------------------------- real stages


def overrides_of(root, *more):
    return [
        "--config",
        str(ROOT / "configs" / "smoke.yaml"),
        *(
            f"data.root={root}/data cache.root={root}/cache data.tasks=[burgers1d,darcy2d_grf] "
            "task.burgers1d.resolution=32 task.darcy2d_grf.resolution=16 task.burgers1d.reserve=0.5 "
            "task.burgers1d.num_frames=10 task.burgers1d.t_end=0.45 task.burgers1d.reach=8 "
            "evaluate.context_frames=4 diffusion.min_residual_ratio=0.001 "
            "diffusion.max_whitened_std=1000.0 operator.base_steps=5 diffusion.scale_steps=5 "
            "steady.scale_steps=5"
        ).split(),
        *[
            f"{section}.{key}"
            for section in ("operator", "diffusion", "consistency", "scoring", "steady")
            for key in (
                "train.steps=6 train.validate_every=3 train.validate_trajectories=3 "
                "train.log_every=1 train.precision='no' train.timeout_s=60"
            ).split()
        ],
        "operator.model.depth=1",
        "diffusion.model.depth=1",
        "steady.model.depth=1",
        *more,
    ]


def run_stage(root, module, *arguments, is_sharded):
    before = forced_fsdp.force if is_sharded else None
    codes, logs = loop_stage.run_ranks(
        root,
        loop_stage.run_script,
        lambda _rank: (module, list(arguments), before),
        world=2,
        environment=forced_fsdp.ENVIRONMENT if is_sharded else {},
    )
    assert codes == [0, 0], logs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Data files and caches of a task in time and a steady one."""
    root = tmp_path_factory.mktemp("stages")
    prepared = overrides_of(root)
    assert prepare_data.main([*prepared, "--workers", "1"]) == 0 and prepare_cache.main(prepared) == 0
    return root


def both(data, stage, module, parents=()):
    """The stage on two ranks in the default mode, and sharded from the same parents, an operator in bfloat16;
    the two must agree."""
    for mode in ("plain", "shared"):
        for parent in parents if mode == "shared" else ():
            shutil.copytree(
                data / "plain" / "smoke" / parent, data / mode / "smoke" / parent, dirs_exist_ok=True
            )
        run_stage(
            data,
            module,
            *overrides_of(data, f"run.root={data / mode}", "operator.train.precision=bf16"),
            is_sharded=mode == "shared",
        )
    plain, shared = (Left(data / mode / "smoke" / stage) for mode in ("plain", "shared"))
    scored = "validation/burgers1d/crps" if stage == "consistency" else "validation/score"
    for name in ("train/loss", "train/gradient_norm", scored):
        values = plain.logged(name), shared.logged(name)
        assert len(values[0]) >= (2 if "validation" in name else 6) and values[0].isfinite().all()
        torch.testing.assert_close(*values, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(plain.weights(), shared.weights(), rtol=1e-3, atol=1e-5)
    mine = max((shared.directory / "state").glob("step_*/rank_1.pt"))
    assert mine.stat().st_size > 100_000  # it holds shards
    kinds = {
        str(keys): value.dtype
        for keys, value in tree_flatten_with_path(torch.load(mine, weights_only=True)["shards"])[0]
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    # weights, moments and averages, of any precision
    assert len(kinds) > 100 and {*kinds.values()} == {torch.float32}, kinds


def test_the_operators_script_gives_the_same_sharded_or_not_in_bfloat16(data):
    both(data, "operator", "train_operator")


@pytest.mark.slow
def test_the_other_stages_scripts_do_so_too(data):
    if not (data / "plain" / "smoke" / "operator" / "done.json").is_file():
        both(data, "operator", "train_operator")
    both(data, "diffusion", "train_diffusion", parents=["operator"])
    both(data, "consistency", "train_consistency", parents=["operator", "diffusion"])
    both(data, "scoring", "train_scoring", parents=["operator", "diffusion"])
    both(data, "steady", "train_steady", parents=["operator"])


# ---------------------------------------------------------------- small parts


@pytest.mark.parametrize("shape", [(25, 16), (2, 3, 16, 16), (5,), (1,), (0,), (3, 0), (16, 6)])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_parts_put_together_are_the_whole(shape, world):
    tensor, axis = torch.randn(shape), shard_axis(torch.Size(shape), world)
    parts = [shard_of(tensor, axis, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(parts, axis), tensor)
    # torch divides other axes evenly or not at all
    assert axis == 0 or len({part.shape for part in parts}) == 1


def test_a_state_of_three_ranks_is_read_by_two_and_by_one():
    whole = {
        "model": {"a": torch.arange(10.0), "b": torch.arange(12.0).view(2, 6)},
        "best_weights": None,
        "ema": {"num_updates": 7, "averages": {"a": torch.arange(10.0) + 1}},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(10.0) + 2}},
            "param_groups": [{"params": [0], "betas": (0.9, 0.95)}],
        },
    }
    shapes = {"a": torch.Size([10]), "b": torch.Size([2, 6]), 0: torch.Size([10])}
    common = {"model": {"buffer": torch.ones(3)}, "step": 4}

    def of(rank, world):
        return sharding.local_state(whole | {"is_sharded": False}, None, list, shapes, (rank, world))

    pieces = [{"shards": {name: value for name, value in of(rank, 3).items()}} for rank in range(3)]
    assert [part["shards"]["model"]["a"].tolist() for part in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [part["shards"]["model"]["b"].shape for part in pieces] == [(2, 2)] * 3
    for place in (None, (1, 2)):
        found = sharding.local_state(common | {"is_sharded": True}, None, lambda: pieces, shapes, place)
        wanted = whole if place is None else of(*place)
        assert torch.equal(found["model"]["buffer"], torch.ones(3))
        assert found["optimizer"]["state"][0]["step"] == 3
        assert found["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
        assert found["best_weights"] is None
        for read in (
            lambda s: s["model"]["a"],
            lambda s: s["model"]["b"],
            lambda s: s["ema"]["averages"]["a"],
            lambda s: s["optimizer"]["state"][0]["exp_avg"],
        ):
            assert torch.equal(read(found), read(wanted))
