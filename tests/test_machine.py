"""machine_check: every failure that it looks for is injected and named with a fix."""

import collections
import json
import os
import resource
import subprocess
import sys
import time

import psutil
import pytest
import torch

import ups.commands.machine_check as machine
from ups.commands.machine_check import Failed
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.training import environment

SMOKE = str(ROOT / "configs" / "smoke.yaml")


def doctor(*arguments):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(machine.VARIABLES)}
    return subprocess.run(
        [sys.executable, "-m", "ups.commands.machine_check", "--config", SMOKE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=70,
        env={**inherited, "OMP_NUM_THREADS": "1"},
    )


def test_a_sound_machine_gets_one_line_per_check_and_exit_status_0(tmp_path):
    done = doctor(f"data.root={tmp_path}/data", f"cache.root={tmp_path}/cache", f"run.root={tmp_path}/runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("machine: OK") and "2 ranks reduce" in done.stdout
    named = {line[7:20].strip() for line in done.stdout.splitlines()[:-1]}
    assert {"open files", "variables", "shared memory", "disk data", "gloo", "gpus"} <= named
    assert not list(tmp_path.iterdir())


def test_several_failures_are_all_named_each_with_a_next_step_and_exit_status_1(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch1")
    assert machine.run_checks(load_config(SMOKE, [f"run.root={tmp_path}/file"]), {}) == 1
    printed = capsys.readouterr().out
    failures = [line for line in printed.splitlines() if line.startswith("failed")]
    assert all(". Next: " in line for line in failures) and f"machine: {len(failures)} of " in printed
    for text in ("limit 256 per process", "cannot be written", "gloo          2 ranks: "):
        assert any(text in line for line in failures), (text, printed)
    assert "GLOO_SOCKET_IFNAME=nosuch1" in printed


def test_a_configuration_that_does_not_load_is_one_line_of_error():
    done = doctor("run.sede=1")
    assert done.returncode == 1 and "did you mean 'seed'?" in done.stderr and "Traceback" not in done.stderr


def test_a_check_that_breaks_is_a_failure_and_the_next_ones_run(monkeypatch, capsys):
    def broken():
        raise OSError("the file server is gone")

    monkeypatch.setattr(machine, "checks", lambda *_: [("first", broken), ("second", lambda: "fine")])
    assert machine.run_checks(load_config(SMOKE), {}) == 1
    printed = capsys.readouterr().out
    assert "the check broke (OSError: the file server is gone). Next: fix that" in printed
    assert "fine" in printed
    assert "machine: 1 of 2 checks failed" in printed


Usage = collections.namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    "num_gpus, megabytes, level", [(0, 1, "OK"), (1, 1, "OK"), (8, 64, "failed"), (8, 1024, "OK")]
)
def test_small_shared_memory_matters_to_several_gpus_only(monkeypatch, num_gpus, megabytes, level):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(megabytes << 20, 0, megabytes << 20))
    if level == "OK":
        assert f"{megabytes} MiB free" in machine.shared_memory(num_gpus, folder="/")
    else:
        with pytest.raises(Failed, match="--shm-size"):
            machine.shared_memory(num_gpus, folder="/")
    assert "there is no" in machine.shared_memory(8, folder="/nowhere")


def test_disks_are_judged_by_room_and_permission(tmp_path, monkeypatch):
    assert "GiB free" in machine.disk("run", tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(Failed, match="cannot be written"):
        machine.disk("run", tmp_path / "file" / "x")
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1, 1, 0))
    with pytest.raises(Failed, match="set run.root to a folder with room"):
        machine.disk("run", tmp_path / "a")


@pytest.mark.parametrize(
    "script, level, text",
    [
        ("", "OK", "2 ranks reduce"),
        ("import time; time.sleep(60)", "failed", "2 ranks did not meet and reduce within"),
        ("raise RuntimeError('refused')", "failed", "RuntimeError: refused"),
        ("import sys; sys.exit(1)", "failed", "2 ranks: no output"),
    ],
)
def test_two_ranks_that_fail_or_hang_are_told_apart(monkeypatch, script, level, text):
    real = subprocess.run
    monkeypatch.setattr(machine, "RANKS_S", 2.0)
    monkeypatch.setattr(subprocess, "run", lambda command, **o: real([sys.executable, "-c", script], **o))
    try:
        found = ("OK", machine.two_ranks("gloo"))
    except Failed as error:
        found = ("failed", *error.args)
    assert found[0] == level and text in found[1]


@pytest.mark.parametrize(
    "script, listed", [("echo 'GPU 0: X'; echo 'GPU 1: X'", 2), ("sleep 60", -1), ("exit 9", 0)]
)
def test_nvidia_smi_is_counted_and_not_waited_for(tmp_path, monkeypatch, script, listed):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "COMMAND_S", 0.5)
    assert machine.listed_gpus() == listed


@pytest.mark.parametrize("work", ["sleep 60", "sleep 60 & sleep 60", "exit 128", "kill -9 $$", "", None])
def test_a_git_that_is_missing_no_program_fails_or_hangs_is_unknown_soon(tmp_path, monkeypatch, work):
    if work is not None:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{work}\n" if work else "no program")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if work else str(tmp_path))
    monkeypatch.setattr(environment, "FACT_S", 0.3)
    started = time.monotonic()
    facts = environment.describe_environment(1, torch.device("cpu"))
    assert facts["git_revision"] == facts["git_is_dirty"] == "unknown"
    assert time.monotonic() - started < 5 and environment.FACT_S < 2.1
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]
    json.dumps(facts)


def test_gpus_that_torch_does_not_see_or_that_are_too_few_are_failures(monkeypatch):
    def failures(listed, seen, needed, cuda="13.0"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(machine, "listed_gpus", lambda: listed)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        try:
            return machine.gpus(needed) and ""
        except Failed as error:
            return ". ".join(error.args)

    assert failures(2, 2, 2) == "" and failures(0, 0, 0) == ""
    assert "nvidia-smi lists 2, and torch" in failures(2, 0, 2, cuda=None)
    assert "install a driver for CUDA 13.0" in failures(2, 0, 2)
    assert "the topology needs 8, and torch" in failures(2, 2, 8)
    assert "does not answer" in failures(-1, 0, 1)
