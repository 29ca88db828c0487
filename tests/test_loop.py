"""ups/training/run.py: one process equals two, a resumed run equals an uninterrupted one, and no fault hangs,
lies or passes silently.

Every run here is real: ranks are processes that talk over gloo (tests/loop_stage.py).
"""

import re
import threading
import time

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from cases import cases
from loop_stage import launch, same_end

import ups.training.run
from ups.common.place import ROOT
from ups.config.load import load_config, to_dict
from ups.training.artifact import relevant_keys
from ups.training.ending import main_guard
from ups.training.environment import asks_for_cpu, differences, shared_facts
from ups.training.optim import place_gradients
from ups.training.strategies import Agreed
from ups.training.update import Updates, is_out_of_memory


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An undisturbed run on one process."""
    outcome = launch(tmp_path_factory.mktemp("reference"))
    assert outcome.codes == [0], outcome.logs
    return outcome


@pytest.fixture(scope="module")
def reference2(tmp_path_factory):
    """An undisturbed run on two processes, with dropout."""
    outcome = launch(tmp_path_factory.mktemp("reference2"), world=2, options={"dropout": True})
    assert outcome.codes == [0, 0], outcome.logs
    return outcome


def same_losses(one, two, rtol=1e-5):
    assert len(one.losses()) == len(two.losses()) == 20
    torch.testing.assert_close(one.losses(), two.losses(), rtol=rtol, atol=0.0)


# ---------------------------------------------------------------- equalities


def test_an_uneven_split_over_three_processes_is_still_the_mean_over_the_global_batch(reference, tmp_path):
    three = launch(tmp_path, world=3)
    assert three.codes == [0, 0, 0], three.logs
    same_losses(reference, three)
    assert reference.losses()[-1] < 0.9 * reference.losses()[0]


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_accumulation_changes_nothing(reference, tmp_path, micro_batch):
    outcome = launch(tmp_path, f"operator.train.micro_batch={micro_batch}")
    same_losses(reference, outcome)
    assert outcome.lines()[-2]["train/absolute"] == pytest.approx(
        reference.lines()[-2]["train/absolute"], rel=1e-4
    )


# ---------------------------------------------------------------- resume


def test_a_run_killed_amid_an_epoch_and_between_two_logs_resumes_bitwise(tmp_path):
    """Five steps are an epoch. The checkpoint of step 6 is amid one, that of step 15 between two logs."""
    settings = ("operator.train.save_every=3", "operator.train.log_every=4")
    how = {"world": 2, "options": {"dropout": True}}
    whole = launch(tmp_path / "whole", *settings, **how)
    for rank, step in ((1, 8), (0, 17)):
        killed = launch(
            tmp_path / "cut", *settings, fault={"kind": "kill", "rank": rank, "step": step}, **how
        )
        assert killed.codes[rank] == -9 and all(killed.codes), killed.logs
        assert not (killed.directory / "done.json").exists()
    assert "resumed at step 6" in killed.logs[0]
    resumed = launch(tmp_path / "cut", *settings, **how)
    assert resumed.codes == [0, 0] and "resumed at step 15" in resumed.logs[0], resumed.logs
    same_end(whole, resumed)


def test_a_signal_to_one_rank_saves_stops_all_with_143_and_resumes_bitwise(tmp_path, reference2):
    options = {"dropout": True}
    stopped = launch(tmp_path, world=2, options=options, fault={"kind": "term", "rank": 1, "step": 7})
    assert stopped.codes == [143, 143], stopped.logs
    assert stopped.json("status.json")["status"] == "preempted" and stopped.json("status.json")["step"] == 8
    assert not (stopped.directory / "done.json").exists() and not (stopped.directory / "errors").exists()
    resumed = launch(tmp_path, world=2, options=options)
    assert "resumed at step 8" in resumed.logs[0]
    same_end(reference2, resumed)


def test_without_ups_launch_a_stage_stops_resumes_and_fails_as_with_it(tmp_path, reference2):
    how = {"world": 2, "options": {"dropout": True, "unwatched": True}}
    stopped = launch(tmp_path / "run", fault={"kind": "term", "rank": 1, "step": 7}, **how)
    assert stopped.codes == [143, 143] and stopped.json("status.json")["status"] == "preempted", stopped.logs
    resumed = launch(tmp_path / "run", **how)
    assert resumed.codes == [0, 0] and "resumed at step 8" in resumed.logs[0], resumed.logs
    assert not (resumed.directory / "heartbeat").exists()  # the guard is that of ups_launch
    same_end(reference2, resumed)
    failed = launch(tmp_path / "failed", fault={"kind": "error", "rank": 1, "step": 3}, **how)
    assert failed.codes == [1, 1] and all("rank 1 failed while" in log for log in failed.logs), failed.logs


def test_another_number_of_processes_continues_with_the_same_batches(tmp_path, reference):
    launch(tmp_path, world=2, fault={"kind": "term", "rank": 0, "step": 7})
    resumed = launch(tmp_path, world=1)
    assert "resumed at step 8 (written by 2 processes)" in resumed.logs[0]
    same_losses(reference, resumed)


# ---------------------------------------------------------------- faults inside a step


@pytest.mark.parametrize("kind", ["memory", "memory_backward"])
def test_out_of_memory_halves_the_micro_batch_on_every_rank_and_repeats_the_batch(tmp_path, reference, kind):
    # Raised at the first call of a step only, in a pass of 4 rows: the repetition starts with call 2.
    outcome = launch(tmp_path, world=2, fault={"kind": kind, "step": 3, "call": 1, "rank": 1})
    assert outcome.codes == [0, 0], outcome.logs
    assert "every rank repeats the batch with a micro-batch of 2" in outcome.logs[0]
    same_losses(reference, outcome)
    assert outcome.lines()[-1].get("train/micro_batch", outcome.lines()[-2].get("train/micro_batch")) == 2


def test_a_halved_micro_batch_survives_a_restart_until_the_user_asks_for_another(tmp_path):
    launch(tmp_path, fault={"kind": "memory", "step": 3, "call": 1})
    done = tmp_path / "default" / "operator" / "done.json"
    done.unlink()
    assert "WARNING" not in launch(tmp_path).logs[0]
    state = torch.load(next((done.parent / "state").glob("step_000000020/shared.pt")), weights_only=True)
    assert state["micro_batch"] == 4 and state["micro_batch_asked"] == 8


def test_out_of_memory_with_a_micro_batch_of_one_fails_on_every_rank(tmp_path):
    outcome = launch(tmp_path, world=2, fault={"kind": "memory", "rank": 1, "step": 3})
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert "out of memory with a micro-batch of 1 on 1 of 2 ranks. Make operator.model smaller" in log
    assert outcome.json("status.json")["kind"] == "out_of_memory"


def test_two_runs_do_not_share_a_stage_directory(tmp_path, monkeypatch):
    first = threading.Thread(
        target=launch, args=(tmp_path,), kwargs={"options": {"slow": True}, "environment": {"A": "1"}}
    )
    first.start()
    while not (tmp_path / "default" / "operator" / "heartbeat").is_dir():
        time.sleep(0.05)
    second = launch(tmp_path, options={"impatient": True})
    first.join()
    assert second.codes == [2] and "another process is training in " in second.logs[0]
    assert (tmp_path / "default" / "operator" / "done.json").is_file()


def test_a_nan_on_one_rank_skips_the_step_on_both(tmp_path):
    outcome = launch(tmp_path, world=2, fault={"kind": "nan", "rank": 1, "step": 3})
    assert outcome.codes == [0, 0], outcome.logs
    assert "step 3 skipped: loss nan or its gradient is not finite (1 in a row)" in outcome.logs[0]
    lines = [line for line in outcome.lines() if "train/skipped" in line]
    assert [line["train/skipped"] for line in lines] == [0] * 3 + [1] * 17
    assert outcome.json("done.json")["num_skipped"] == 1


def test_too_many_skipped_updates_in_a_row_end_the_run_on_every_rank(tmp_path):
    outcome = launch(
        tmp_path,
        "operator.train.max_skips=3",
        world=2,
        fault={"kind": "nan", "rank": 1, "step": 4, "until": 19},
    )
    assert outcome.codes == [1, 1]
    assert all(
        "4 updates in a row were not finite, none was applied. The same command continues from the " in log
        and "Lower operator.optim.muon_lr" in log
        for log in outcome.logs
    )
    assert not (outcome.directory / "done.json").exists()


def test_an_exception_on_one_rank_ends_both_and_names_it(tmp_path):
    outcome = launch(tmp_path, world=2, fault={"kind": "error", "rank": 1, "step": 6})
    assert outcome.codes == [1, 1]
    for rank, log in enumerate(outcome.logs):
        last = log.strip().splitlines()[-1]
        assert last.startswith(
            f"FAILED: rank {rank}, stage operator, step 6: rank 1 failed while computing step 6: "
            "KeyError: 'injected cause'."
        )
        assert "continues from the last checkpoint" in last
    assert "Traceback" in outcome.logs[1] and "inject(fault" in outcome.logs[1]
    record = outcome.json("errors/rank1.json")
    assert record["rank"] == 1 and record["step"] == 6 and "inject" in record["traceback"]
    assert outcome.json("status.json")["status"] == "failed"
    assert not (outcome.directory / "done.json").exists()
    assert launch(tmp_path, world=2).codes == [0, 0]
    assert outcome.json("errors/rank1.json") == record  # what went wrong stays to be read


@pytest.mark.parametrize("fault", [{"kind": "exit0", "step": 6}, {"kind": "return", "step": 6}])
def test_leaving_early_is_never_success(tmp_path, fault):
    outcome = launch(tmp_path, fault=fault)
    assert outcome.codes == [1] and "the stage is not finished; expected run.finish(...)" in outcome.logs[0]
    assert not (outcome.directory / "done.json").exists()
    assert outcome.json("status.json")["status"] == "failed"


@pytest.mark.parametrize("steps", [[20], [5, 10, 15]])
def test_a_disk_that_stays_full_or_is_full_at_the_end_fails_every_rank(tmp_path, steps):
    outcome = launch(tmp_path, world=2, fault={"kind": "disk", "rank": 1, "steps": steps})
    assert outcome.codes == [1, 1]
    assert all(
        f"({len(steps)} failed in a row). Free space on, or repair, the disk" in log for log in outcome.logs
    )


# ---------------------------------------------------------------- validation and the end


@pytest.mark.parametrize(
    ("scores", "best", "second"),
    [
        ([[5.0], [3.0], [4.0], [float("nan")], [6.0]], 3.0, float("inf")),
        # the operator's base is the better one all along, and the network's error falls, stays and falls
        ([[0.9, 0.997], [0.9, 0.98], [0.9, 0.98], [0.9, 0.95], [0.9, 0.96]], 0.9, 0.95),
    ],
    ids=["one score", "of equal ones the lower second"],
)
def test_the_best_averaged_weights_are_exported(tmp_path, scores, best, second):
    outcome = launch(tmp_path, options={"scores": scores})
    assert outcome.codes == [0], outcome.logs
    done = outcome.json("done.json")
    assert done["best_score"] == best and done["step"] == 20
    state = torch.load(outcome.directory / "state" / "step_000000020" / "shared.pt", weights_only=True)
    weights = outcome.weights()
    assert state["lowest_second"] == second
    assert all(torch.equal(weights[name], value) for name, value in state["best_weights"].items())
    assert not torch.equal(weights["0.weight"], state["ema"]["averages"]["0.weight"])


def test_the_stage_directory_is_complete(reference):
    names = {path.name for path in reference.directory.iterdir()}
    assert names == {
        *(
            "config.yaml environment.json metrics.jsonl state model.safetensors config.json done.json "
            "status.json heartbeat .lock"
        ).split()
    }
    saved = load_config(reference.directory / "config.yaml")
    assert to_dict(saved) == yaml.safe_load((reference.directory / "config.yaml").read_text())
    assert reference.json("config.json") == {"width": 16}
    start = reference.json("environment.json")["starts"][0]
    assert (
        start["torch"] == torch.__version__ and start["world"] == 1 and len(start["git_revision"]) in (40, 7)
    )
    done = reference.json("done.json")
    assert done["step"] == 20 and done["parents"] == {"cache": "c0ffee"} and done["best_score"] > 0
    assert "1 processes x 1 passes of at most 8" in reference.logs[0]


def test_only_keys_that_decide_the_result_are_compared():
    keys = relevant_keys(to_dict(load_config(None, ["data.tasks=[burgers1d]"])), "operator")
    assert "operator.optim.muon_lr" in keys and "task.burgers1d.patch" in keys and "run.seed" in keys
    assert not any(
        key.startswith(("task.advection1d", "tracker", "evaluate", "run.name", "data.root")) for key in keys
    )
    assert "operator.train.timeout_s" not in keys and "operator.train.batch_size" in keys


# ---------------------------------------------------------------- start


def test_a_run_whose_output_has_no_reader_records_its_error_and_saves_on_a_signal(tmp_path, reference):
    outcome = launch(tmp_path / "error", fault={"kind": "error", "step": 3}, options={"deaf": True})
    assert outcome.codes == [1] and "injected cause" in outcome.json("errors/rank0.json")["cause"]
    outcome = launch(tmp_path / "term", fault={"kind": "term", "step": 7}, options={"deaf": True})
    assert outcome.codes == [143] and outcome.json("status.json")["status"] == "preempted"
    outcome = launch(tmp_path / "term", options={"deaf": True})
    assert outcome.codes == [0]
    same_end(outcome, reference)


def test_ranks_are_compared_by_everything_that_they_share(monkeypatch):
    config = to_dict(load_config(None, []))
    facts = shared_facts(config, {"cache": "c0ffee"}, "operator")
    assert differences([facts, shared_facts(config, {"cache": "c0ffee"}, "operator")]) == []
    monkeypatch.setattr(torch, "__version__", "9.9")
    other = shared_facts(config, {"cache": "decaf"}, "steady")
    other["the source of ups (SHA-256)"] = "another checkout"
    found = "; ".join(differences([facts, facts, other]))
    for name, value in (
        ("the parent cache", "'decaf'"),
        ("the stage", "'steady'"),
        ("the version of torch", "'9.9'"),
        ("the source of ups (SHA-256)", "'another checkout'"),
    ):
        assert f"{name} is " in found and f"on rank 0, 1, {value} on rank 2" in found
    assert set(facts) >= {
        "the version of ups",
        "the version of Python",
        "operator.optim.muon_lr",
        "data.tasks",
    }


@pytest.mark.parametrize(("world", "environment", "overrides", "text"), cases("loop.launches"))
def test_launches_that_would_not_give_what_was_asked_for_are_refused(
    tmp_path, world, environment, overrides, text
):
    if environment.get("CUDA_VISIBLE_DEVICES") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so the launch is right")
    outcome = launch(tmp_path, *overrides, world=world, environment=environment)
    assert outcome.codes == [2] * world
    for log in outcome.logs:
        assert log.count("FAILED") == 1 and "Traceback" not in log
        assert text in log
    assert not outcome.directory.exists()


def test_hidden_gpus_or_the_variable_mean_the_cpu(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    for value, expected in (("-1,-1", True), ("", True), ("-1", True), ("0,1", False), ("11", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert asks_for_cpu() is expected, value
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert asks_for_cpu()


@pytest.mark.parametrize("name", ["cpu", "cpu2", "single", "2gpu", "4gpu", "8gpu", "fsdp", "multinode"])
def test_topology_files_are_read_by_accelerate_and_hold_topology_only(name):
    path = ROOT / "accelerate_configs" / f"{name}.yaml"
    parsed, raw = load_config_from_file(str(path)), yaml.safe_load(path.read_text())
    num = {"cpu": 1, "cpu2": 2, "single": 1, "2gpu": 2, "4gpu": 4, "8gpu": 8, "fsdp": 8, "multinode": 16}[
        name
    ]
    assert parsed.num_processes == num and "29500" not in path.read_text()
    # ours, or ignored there
    assert not {"mixed_precision", "dynamo_config", "rdzv_backend", "same_network"} & raw.keys()
    if num > 1 and name != "multinode":
        assert raw["main_process_port"] == 0


# ---------------------------------------------------------------- small parts


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_misuse_of_the_loop_is_an_error(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "UPS_EXPECT_WORLD", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    config = load_config(
        None, [f"run.root={tmp_path}", "operator.train.steps=3", "operator.train.precision='no'"]
    )
    caught = []

    @main_guard()
    def main():
        run = ups.training.run.Run.start(config, "operator", config.operator.train, config.operator.optim, {})
        model = run.attach(torch.nn.Linear(2, 1))
        with pytest.raises(RuntimeError, match=r"outside run.steps\(\) or twice in a step; expected once"):
            run.update(lambda rows: (model(torch.ones(1, 2)).sum(), {}), 1)
        with pytest.raises(RuntimeError, match="finish at step 0 of 3; expected the loop to run to its end"):
            run.finish({}, {})
        with pytest.raises(ValueError, match="a parameter has type torch.float64; expected float32"):
            place_gradients(torch.nn.Linear(2, 1, dtype=torch.float64), run.device, 6)
        try:
            for _ in run.steps():
                pass
        except RuntimeError as error:
            caught.append(str(error))
            raise

    with pytest.raises(SystemExit) as info:
        main()
    assert info.value.code == 1 and "step 0 had no run.update; expected one in every turn" in caught[0]


def test_a_shared_file_system_is_required(tmp_path):
    config = load_config(None, [f"run.root={tmp_path}"])
    run = ups.training.run.Run(config, "operator", config.operator.train, config.operator.optim, {})
    with pytest.raises(
        FileNotFoundError, match="rank 0 does not see .*expected run.root on a file system shared"
    ):
        run._enter_folder()


def test_a_loss_computes_in_the_precision_that_its_model_says(tmp_path):
    config = load_config(None, [f"run.root={tmp_path}", "operator.train.precision=bf16"])
    run = ups.training.run.Run(config, "operator", config.operator.train, config.operator.optim, {})
    model, found = torch.nn.Linear(2, 1), []
    run.updates = Updates(model, Agreed(), run.ranks, run.counters, run.train, run.optim)

    def loss(rows: slice) -> tuple:
        found.append(model(torch.ones(1, 2)))
        return found[-1].sum(), {}

    run.updates.update(loss, 1)
    assert [y.dtype for y in found] == [torch.float32]


def test_an_update_of_several_tasks_says_which_and_moves_no_other(tmp_path):
    """Refused: the gradient of one task in the place, and then in the weights, of another."""
    config = load_config(None, [f"run.root={tmp_path}", "operator.train.precision='no'"])
    run = ups.training.run.Run(config, "operator", config.operator.train, config.operator.optim, {})
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(2, 3), "a": torch.nn.Linear(3, 1), "b": torch.nn.Linear(3, 1)}
    )
    for task in ("a", "b"):
        for parameter in model[task].parameters():
            parameter.task = task
    run.updates = Updates(model, Agreed(), run.ranks, run.counters, run.train, run.optim)

    def loss(rows: slice) -> tuple:
        return model["a"](model["trunk"](torch.ones(1, 2))).sum(), {}

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="of several tasks got no task; expected the task of its loss"):
        run.updates.update(loss, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    run.updates.update(loss, 1, only="a")
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"b.weight", "b.bias"}


# ------------------------------------------------------- the predecessor's failures, which must not come back


def test_a_collective_on_one_rank_ends_both_and_is_not_waited_for(tmp_path):
    outcome = launch(
        tmp_path, "operator.train.hang_s=2", world=2, fault={"kind": "one_sided", "rank": 0, "step": 5}
    )
    assert all(code in (1, 124) for code in outcome.codes), outcome.logs
    found = (
        "the ranks are out of step: rank 0 is at step 5, gathering after computing step 5; rank 1 is at "
        "step 5, summing"
    )
    assert re.search(f"{found}|FAILED: rank", "".join(outcome.logs)), outcome.logs
    assert not (outcome.directory / "done.json").exists()


def test_success_is_printed_only_when_it_is_on_disk(tmp_path):
    outcome = launch(tmp_path, world=2, fault={"kind": "export"})
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert "finished operator" not in log and "rank 0 failed while writing the results: OSError" in log
    assert not (outcome.directory / "done.json").exists()
    assert outcome.json("status.json")["status"] == "failed"
    again = launch(tmp_path, world=2)
    assert again.codes == [0, 0]
    assert "resumed at step 20" in again.logs[0]
    assert "finished operator" in again.logs[0]
