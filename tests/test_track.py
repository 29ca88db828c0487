"""ups/training/track.py: what W&B (the real package, offline) and TensorBoard are left with after crashes;
neither can stop a run."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path

import pytest
from loop_stage import launch

import ups.training.track
from ups.common.files import DamagedError
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.training.track import Tracker, check_tracker

LOGGER = """
import os, sys, time
from pathlib import Path
import ups.training.track
from ups.config.load import load_config
directory, mode, ending = Path(sys.argv[1]), sys.argv[2], sys.argv[5]
first, last = int(sys.argv[3]), int(sys.argv[4])
ups.training.track.INIT_TIMEOUT_S, ups.training.track.FINISH_TIMEOUT_S, ups.training.track.FLUSH_S = 1, 1, 0.1
settings = load_config(None, ["tracker.kind=wandb", f"tracker.mode={mode}"]).tracker
tracker = ups.training.track.Tracker(directory, settings, "chain", "operator", {"a": 1})
tracker.rewind(first)
for step in range(first + 1, last + 1):
    tracker.log(step, {"train/loss": 0.5 * step, "note": "text"})
    if step % 5 == 0:
        tracker.log(step, {"validation/score": 2.0 * step})
if ending == "wait":
    print("logged", flush=True)
    time.sleep(60)
if ending == "stopped":  # W&B's own process hangs
    ups.training.track.WAIT_S = 2
    while tracker._outside.is_alive() and not list(directory.glob("wandb/offline-run-*")):
        time.sleep(0.1)
    time.sleep(1)
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            os.kill(int(child), 19)
    tracker.finish(0)
else:
    tracker.finish(int(ending))
"""


def environment(directory: Path, **more: str) -> dict[str, str]:
    """W&B's other files stay in the test's folder; no credentials."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {
        **kept,
        "HOME": str(directory),
        "WANDB_CONFIG_DIR": str(directory / "config"),
        "WANDB_CACHE_DIR": str(directory / "cache"),
        "WANDB_DATA_DIR": str(directory / "data"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "NETRC": str(directory / "none"),
        **more,
    }


def start(directory: Path, *arguments: object, **more: str) -> subprocess.Popen:
    directory.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", LOGGER, str(directory), *map(str, arguments)],
        cwd=directory,
        env=environment(directory, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(path: Path) -> list:
    """The records of a .wandb file (LevelDB's log format behind seven bytes); a torn end is left out."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, position, parts = path.read_bytes(), [], 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def sent(directory: Path) -> tuple[list[tuple[int, str, float]], list[int], list]:
    """(step, name, value) of every number in the order of the records, exit codes, run records; over all
    starts."""
    numbers, codes, runs = [], [], []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = row.pop("operator/step")
                numbers += [(step, name, value) for name, value in row.items() if not name.startswith("_")]
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
            if record.HasField("run"):
                runs.append(record.run)
    return numbers, codes, runs


@pytest.fixture
def wandb_config():
    return load_config(None, ["tracker.kind=wandb", "tracker.mode=offline"]).tracker


# ---------------------------------------------------------------- W&B itself


@pytest.mark.faults
def test_after_a_kill_wandb_has_every_number_once_in_order_under_one_id_and_the_true_exit_code(tmp_path):
    directory = tmp_path / "run"
    first = start(directory, "offline", 0, 20, "wait")
    assert first.stdout.readline() == "logged\n"
    identity = None
    for _ in range(300):
        numbers = sent(directory)[0] if list(directory.glob("wandb/offline-run-*/*.wandb")) else []
        identity = identity or (
            (directory / "wandb.json").is_file() and json.loads((directory / "wandb.json").read_text())["id"]
        )
        if len(numbers) == 24:
            break
        time.sleep(0.1)
    first.kill()
    first.wait()
    # from the checkpoint of step 10: steps 11 to 20 come again
    second = start(directory, "offline", 10, 30, "1")
    assert second.wait(60) == 0, second.stderr.read()
    numbers, codes, runs = sent(directory)
    expected = [(step, "operator/train/loss", 0.5 * step) for step in range(1, 31)]
    expected += [(step, "operator/validation/score", 2.0 * step) for step in range(5, 31, 5)]
    assert sorted(numbers) == sorted(expected)
    steps = [step for step, _, _ in numbers]
    assert steps == sorted(steps) and codes == [1]
    assert len(runs) >= 2 and {run.run_id for run in runs} == {identity} and len(identity) == 32
    assert {(run.run_group, run.job_type, run.display_name) for run in runs} == {
        ("chain", "operator", "chain-operator")
    }
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 31))


def test_what_was_logged_before_wandb_was_asked_for_is_sent_too(tmp_path, wandb_config):
    directory = tmp_path / "run"
    directory.mkdir()
    tracker = Tracker(directory, load_config().tracker, "chain", "operator", {})
    tracker.rewind(0)
    for step in range(1, 6):
        tracker.log(step, {"train/loss": 0.5 * step})
    tracker.finish(1)
    second = start(directory, "offline", 4, 6, "0")
    assert second.wait(60) == 0, second.stderr.read()
    numbers = [number for number in sent(directory)[0] if "loss" in number[1]]
    assert numbers == [(step, "operator/train/loss", 0.5 * step) for step in range(1, 7)]


@pytest.mark.faults
@pytest.mark.parametrize(
    "more, cause",
    [({}, "no W&B credentials; run wandb login"), ({"WANDB_API_KEY": "short"}, "the tracker failed")],
)
def test_without_credentials_training_goes_on_and_the_next_start_sends_all(tmp_path, more, cause):
    process = start(tmp_path / "run", "online", 0, 3, "0", **more)
    _, text = process.communicate(timeout=90)
    assert process.returncode == 0 and cause in text, text
    assert start(tmp_path / "run", "offline", 3, 4, "0").wait(60) == 0
    numbers, codes, _ = sent(tmp_path / "run")
    assert [step for step, *_ in numbers] == [1, 2, 3, 4] and codes == [0]


def test_a_wandb_process_that_hangs_is_killed_at_the_end(tmp_path):
    started = time.monotonic()
    process = start(tmp_path / "run", "offline", 0, 3, "stopped")
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0 and "it did not take everything within 2 s" in text, text
    assert time.monotonic() - started < 40


def test_of_two_ranks_one_has_a_run_and_a_failure_is_recorded_as_failed(tmp_path):
    outcome = launch(
        tmp_path,
        "tracker.kind=wandb",
        "tracker.mode=offline",
        world=2,
        fault={"kind": "error", "rank": 1, "step": 8},
        environment=environment(tmp_path),
    )
    assert outcome.codes == [1, 1]
    numbers, codes, runs = sent(outcome.directory)
    assert codes == [1] and {run.run_group for run in runs} == {"default"}
    assert len(list(outcome.directory.glob("wandb/offline-run-*"))) == 1
    assert "Tracking run with wandb" in outcome.logs[0]
    assert "wandb" not in outcome.logs[1].replace("tracker.kind=wandb", "")
    assert [step for step, name, _ in numbers if name == "operator/train/loss"] == list(range(1, 9))


# ---------------------------------------------------------------- a W&B that misbehaves


class FakeWandb(types.ModuleType):
    """Records what is called; `fail` names a call that raises, `block` one that never returns."""

    def __init__(self, fail=(), block=""):
        super().__init__("wandb")
        self.calls, self.fail, self.block = [], fail, block

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            if name == self.block:
                time.sleep(3600)
            if name in self.fail:
                raise ConnectionError("no route")
            return self

        if name.startswith("__"):
            raise AttributeError(name)
        return call

    def of(self, name):
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


def track(tmp_path, monkeypatch, config, fake, steps=4, wait_s=0.5):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(ups.training.track, "FAILED_WAIT_S", wait_s)
    started = time.monotonic()
    tracker = Tracker(tmp_path, config, "myrun", "operator", {})
    tracker.rewind(0)
    for step in range(1, steps + 1):
        tracker.log(step, {"loss": 0.5})
    seconds = time.monotonic() - started
    tracker.finish(143)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == steps
    return seconds


@pytest.mark.parametrize("fail", ["init", "login", "log", "define_metric", "finish"])
def test_a_failing_tracker_never_stops_training_and_loses_no_number(
    tmp_path, monkeypatch, capsys, wandb_config, fail
):
    track(tmp_path, monkeypatch, wandb_config, FakeWandb(fail=[fail]))
    told = capsys.readouterr().err.count("the tracker failed and is switched off (ConnectionError: no route)")
    assert told == (fail != "login")  # which offline does not need


@pytest.mark.parametrize("block", ["init", "log", "finish"])
def test_a_blocking_tracker_never_stops_training(tmp_path, monkeypatch, capsys, wandb_config, block):
    seconds = track(tmp_path, monkeypatch, wandb_config, FakeWandb(block=block), steps=500)
    assert seconds < 5
    assert "it did not take everything within 0.5 s" in capsys.readouterr().err


def test_the_wait_for_wandb_at_the_end_of_a_finished_stage_is_no_hang_and_has_its_limit(
    tmp_path, monkeypatch, wandb_config
):
    beats = []
    monkeypatch.setattr(ups.training.track, "beat", lambda: beats.append(1))
    monkeypatch.setattr(ups.training.track, "WAIT_S", 1.0)
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(block="finish"))
    tracker = Tracker(tmp_path, wandb_config, "myrun", "operator", {})
    tracker.rewind(0)
    tracker.finish(0)
    assert 4 <= len(beats) <= 6


def test_numbers_that_wandb_never_takes_do_not_fill_the_memory(tmp_path, monkeypatch, capsys, wandb_config):
    monkeypatch.setattr(ups.training.track, "MAX_WAITING", 100)
    track(tmp_path, monkeypatch, wandb_config, FakeWandb(block="init"), steps=500)
    assert "the tracker failed and is switched off (Full: )" in capsys.readouterr().err


def test_wandb_gets_its_own_step_metric_time_limits_and_never_a_step(tmp_path, monkeypatch, wandb_config):
    fake = FakeWandb()
    track(tmp_path, monkeypatch, wandb_config, fake, wait_s=30.0)  # on a busy machine
    (options,) = (options for _, options in fake.of("init"))
    assert options["resume"] == "allow" and options["group"] == "myrun" and options["job_type"] == "operator"
    assert fake.of("define_metric") == [(("operator/*",), {"step_metric": "operator/step"})]
    assert fake.of("log")[0] == (({"operator/step": 1, "operator/loss": 0.5},), {})
    assert fake.of("finish") == [((), {"exit_code": 143})]
    limits = fake.of("Settings")[0][1]
    assert limits["init_timeout"] == ups.training.track.INIT_TIMEOUT_S
    assert limits["finish_timeout"] == ups.training.track.FINISH_TIMEOUT_S


# ---------------------------------------------------------------- TensorBoard, metrics.jsonl


def scalars(directory: Path) -> dict[str, Counter]:
    """name -> how often each step is shown."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: Counter(event.step for event in events.Scalars(name)) for name in events.Tags()["scalars"]}


def test_tensorboard_shows_every_step_once_after_a_kill(tmp_path):
    arguments = dict(world=2, environment={})
    killed = launch(
        tmp_path, "tracker.kind=tensorboard", fault={"kind": "kill", "rank": 0, "step": 13}, **arguments
    )
    assert killed.codes[0] == -signal.SIGKILL
    resumed = launch(tmp_path, "tracker.kind=tensorboard", **arguments)
    assert resumed.codes == [0, 0], resumed.logs
    shown = scalars(resumed.directory)
    assert shown["operator/train/loss"] == Counter(range(1, 21))
    assert shown["operator/validation/score"] == Counter(range(4, 21, 4))


def test_a_tensorboard_that_fails_is_switched_off(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    tracker = Tracker(
        tmp_path, load_config(None, ["tracker.kind=tensorboard"]).tracker, "myrun", "operator", {}
    )
    tracker.rewind(0)
    tracker.log(1, {"loss": 0.5})
    tracker.flush()
    tracker.finish(0)
    assert capsys.readouterr().err.count("the tracker failed and is switched off") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_rewind_drops_later_and_torn_lines(tmp_path):
    tracker = Tracker(tmp_path, load_config().tracker, "myrun", "operator", {})
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 0.5})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo\xff')
    tracker.rewind(2)
    tracker.log(3, {"loss": 0.7})
    tracker.finish(0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 and '"loss": 0.7' in lines[2]


@pytest.mark.parametrize(
    "line", [b"7", b'{"loss": 1}', b'{"step": 2, "loss": 0.5', b"\xff\xfe", b"[]", b'{"step": "2"}', b""]
)
def test_a_damaged_line_before_the_last_is_refused_by_its_number(tmp_path, line):
    tracker = Tracker(tmp_path, load_config().tracker, "myrun", "operator", {})
    tracker.log(1, {"loss": 0.5})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line + b'\n{"step": 3, "loss": 0.5}\n')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        DamagedError, match=r"line 2 of .*metrics.jsonl is not readable .*only the last line may be cut"
    ):
        tracker.rewind(3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_numbers_written_to_a_file_that_is_gone_are_an_error(tmp_path):
    tracker = Tracker(tmp_path, load_config().tracker, "myrun", "operator", {})
    tracker.log(1, {"loss": 0.5})
    tracker.flush()
    (tmp_path / "metrics.jsonl").unlink()
    tracker.log(2, {"loss": 0.5})
    with pytest.raises(FileNotFoundError, match="metrics.jsonl was removed or replaced while it was written"):
        tracker.flush()
    tracker.finish(1)


def test_a_tracker_whose_package_is_missing_is_refused_at_the_start(monkeypatch, wandb_config):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="tracker.kind is wandb, but the package wandb is not installed; .*pip install wandb"
    ):
        check_tracker(wandb_config)
