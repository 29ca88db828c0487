"""ups/commands/machine_check.py: every failure that the doctor looks for is injected, named and answered with
a next step; it always ends."""

import collections
import os
import resource
import subprocess
import sys
import time

import psutil
import pytest
import torch

import ups.commands.devices as devices
import ups.commands.machine_check as machine
from ups.commands.devices import Verdict
from ups.config import ROOT, load_config

SMOKE = str(ROOT / "configs" / "smoke.yaml")


def doctor(*arguments, limits=None, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(machine.VARIABLES)}
    return subprocess.run(
        [sys.executable, "-m", "ups.commands.machine_check", "--config", SMOKE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=70,
        preexec_fn=limits,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
    )


def levels(text):
    """name -> levels of its lines."""
    found = collections.defaultdict(set)
    for line in text.splitlines():
        level, _, rest = line.partition(" ")
        if level in ("ok", "note", "ill"):
            found[rest.strip().split("  ")[0].split(" ")[0]].add(level)
    return found


# ---------------------------------------------------------------- the whole


def test_a_sound_machine_gets_one_line_per_check_and_exit_status_0(tmp_path):
    done = doctor(f"data.root={tmp_path}/data", f"cache.root={tmp_path}/cache", f"run.root={tmp_path}/runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("machine: sound") and "\x01" not in done.stdout
    found = levels(done.stdout)
    assert {
        "python",
        "variables",
        "open",
        "shared",
        "gloo",
        "cache",
        "disk",
        "tracker",
        "torch",
        "backend",
    } <= set(found)
    assert "2 ranks: all-reduce of 4 MiB" in done.stdout and "missing; `make cache` builds it" in done.stdout
    assert not list(tmp_path.iterdir())


def test_several_failures_are_all_named_each_with_a_next_step_and_exit_status_1(tmp_path):
    (tmp_path / "file").write_text("where a folder should be")
    done = doctor(
        f"run.root={tmp_path}/file",
        "tracker.kind=wandb",
        "tracker.mode=online",
        limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        NCCL_SOCKET_IFNAME="nosuch0",
        GLOO_SOCKET_IFNAME="nosuch1",
        HOME=str(tmp_path),
        WANDB_CONFIG_DIR=str(tmp_path),
        WANDB_API_KEY="",
        NETRC=str(tmp_path / "none"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    ill = [line for line in done.stdout.splitlines() if line.startswith("ill")]
    assert all(". Next: " in line for line in ill) and f"machine: {len(ill)} of " in done.stdout
    for text in (
        "there is no interface nosuch0",
        "there is no interface nosuch1",
        "limit 256 per process",
        "cannot be written",
        "gloo         2 ranks: ",
        "there are no credentials",
    ):
        assert any(text in line for line in ill), (text, done.stdout)


def test_whatever_a_check_does_the_whole_ends_and_leaves_no_process():
    started = time.monotonic()
    done = doctor("--limit", "0.2")
    assert done.returncode == 1 and time.monotonic() - started < 30
    assert "did not end within the 0.2 s of all. Next: look at what it touches" in done.stdout
    assert "machine: not all checks ended" in done.stdout
    for _ in range(50):
        left = [
            process
            for process in psutil.process_iter(["cmdline"])
            if {"ups.commands.machine_check", "--work"} <= set(process.info["cmdline"] or [])
        ]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_a_configuration_that_does_not_load_is_said_in_one_line():
    done = doctor("run.sede=1")
    assert done.returncode == 1 and "did you mean 'seed'?" in done.stderr and "Traceback" not in done.stderr


def test_a_check_that_breaks_is_a_failure_and_the_next_ones_run(monkeypatch, capsys):
    def broken():
        raise OSError("the file server is gone")

    monkeypatch.setattr(
        machine,
        "checks",
        lambda *_: [("first", broken), ("second", lambda: [Verdict("ok", "second", "fine")])],
    )
    assert machine.work(load_config(SMOKE), {}) == 1
    printed = capsys.readouterr().out
    assert (
        "the check failed (OSError: the file server is gone). Next: mend that first" in printed
        and "second" in printed
    )
    assert "machine: 1 of 2 checks failed" in printed


# ---------------------------------------------------------------- single checks


def test_interface_names_are_matched_as_nccl_and_gloo_match_them():
    def ill(**environment):
        return [v.what for v in machine.check_interfaces(environment, ["lo", "eth0"]) if v.level == "ill"]

    assert (
        not ill(NCCL_SOCKET_IFNAME="eth")
        and not ill(NCCL_SOCKET_IFNAME="^docker")
        and not ill(GLOO_SOCKET_IFNAME="eth0")
    )
    assert ill(NCCL_SOCKET_IFNAME="=eth") and ill(GLOO_SOCKET_IFNAME="eth") and ill(NCCL_SOCKET_IFNAME="ib0")
    *_, variables = machine.check_interfaces({"NCCL_DEBUG": "INFO", "HOME": "x"}, ["lo"])
    assert variables.level == "note" and variables.what == "NCCL_DEBUG=INFO"


Usage = collections.namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    "num_gpus, megabytes, level", [(0, 1, "ok"), (1, 1, "ok"), (8, 64, "ill"), (8, 1024, "ok")]
)
def test_small_shared_memory_matters_to_several_gpus_only(monkeypatch, num_gpus, megabytes, level):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(megabytes << 20, 0, megabytes << 20))
    verdict = machine.check_shared_memory(num_gpus, folder="/")
    assert verdict.level == level and ("--shm-size" in verdict.do) == (level == "ill")
    assert machine.check_shared_memory(8, folder="/nowhere").level == "note"


def test_disks_are_judged_by_room_inodes_and_permission(tmp_path, monkeypatch):
    assert machine.check_disk("run", tmp_path / "a" / "b", 1).level == "ok"
    verdict = machine.check_disk("run", tmp_path / "a", 2**60)
    assert verdict.level == "ill" and "set run.root to a folder with room" in verdict.do
    (tmp_path / "file").touch()
    assert "cannot be written" in machine.check_disk("run", tmp_path / "file" / "x", 1).what
    full = os.statvfs(tmp_path)
    Full = collections.namedtuple("Full", "f_bavail f_frsize f_files f_favail")
    monkeypatch.setattr("os.statvfs", lambda _: Full(full.f_bavail, full.f_frsize, 100, 0))
    assert "inodes are used up" in machine.check_disk("run", tmp_path, 1).what


def test_caches_are_missing_stale_or_current(tmp_path):
    config = load_config(SMOKE, [f"cache.root={tmp_path}", f"data.root={tmp_path}"])
    verdict, needed = machine.check_cache(config, "burgers1d")
    assert (
        verdict.level == "note"
        and "burgers1d: missing; `make cache` builds it" in verdict.what
        and needed > 0
    )
    config.cache_path("burgers1d").write_bytes(b"old")
    verdict, _ = machine.check_cache(config, "burgers1d")
    assert (
        "burgers1d: stale and will be built anew: " in verdict.what
        and "is not a finished UPS cache" in verdict.what
    )
    assert machine.missing_data(config) > 0


@pytest.mark.parametrize(
    "script, level, text",
    [
        ("print(HERE); print('all-reduce 1 ms')", "ok", "2 ranks: all-reduce 1 ms"),
        ("print(HERE, flush=True); time.sleep(60)", "ill", "2 ranks did not reduce within"),
        ("time.sleep(60)", "ill", "no process imported torch within"),
        ("print(HERE); raise RuntimeError('refused')", "ill", "RuntimeError: refused"),
        ("sys.exit(1)", "ill", "2 ranks: no word"),
    ],
)
def test_two_ranks_that_fail_or_hang_are_told_apart(monkeypatch, script, level, text):
    monkeypatch.setattr(devices, "RANKS_S", 2.0)
    ranks = devices.Ranks.__new__(devices.Ranks)
    ranks.backend, ranks.process = (
        "gloo",
        subprocess.Popen(
            [sys.executable, "-c", f"import sys, time; HERE = {devices.HERE!r}; {script}"],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ),
    )
    verdict = ranks.verdict()
    assert verdict.level == level and text in verdict.what and bool(verdict.do) == (level == "ill")


@pytest.mark.parametrize(
    "script, listed", [("echo 'GPU 0: X'; echo 'GPU 1: X'", 2), ("sleep 60", -1), ("exit 9", 0)]
)
def test_nvidia_smi_is_counted_and_not_waited_for(tmp_path, monkeypatch, script, listed):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "COMMAND_S", 0.5)
    assert devices.listed_gpus() == listed


def gpus(monkeypatch, listed, seen, asked, is_gpu_asked=True, cuda="13.0", peer=True):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "listed_gpus", lambda: listed)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peer)
    monkeypatch.setattr(
        torch.cuda, "nccl", type("Nccl", (), {"version": staticmethod(lambda: (2, 29, 3))}), raising=False
    )
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(devices, "check_gpu", lambda index: Verdict("ok", f"gpu {index}", "fine"))
    return list(devices.check_gpus(asked, is_gpu_asked))


def test_gpus_that_torch_does_not_see_or_that_are_too_few_are_failures(monkeypatch):
    def ill(*arguments, **options):
        return " | ".join(
            f"{v.what}. {v.do}" for v in gpus(monkeypatch, *arguments, **options) if v.level == "ill"
        )

    assert ill(2, 2, 2) == "" and ill(0, 0, 2, is_gpu_asked=False) == ""
    assert "nvidia-smi lists 2, torch sees none. install torch with CUDA" in ill(2, 0, 2, cuda=None)
    assert "install a driver for CUDA 13.0" in ill(2, 0, 2)
    assert "the topology asks for 8, torch sees 2" in ill(2, 2, 8)
    assert "does not answer" in ill(-1, 0, 1)


def test_missing_peer_access_is_a_note_that_says_what_it_costs(monkeypatch):
    (verdict,) = (v for v in gpus(monkeypatch, 2, 2, 2, peer=False) if v.name == "peer access")
    assert verdict.level == "note" and "0 of 2 pairs" in verdict.what and "host memory" in verdict.what


def test_a_gpu_that_fails_or_is_taken_is_named(monkeypatch):
    def fail(index):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    verdict = devices.check_gpu(1)
    assert (
        verdict.level == "ill"
        and verdict.name == "gpu 1"
        and "uncorrectable ECC" in verdict.what
        and "dmesg" in verdict.do
    )


def test_wandb_online_needs_credentials_and_a_server(monkeypatch):
    import wandb

    config = load_config(SMOKE, ["tracker.kind=wandb", "tracker.mode=online"])
    for answer, text in ((False, "no credentials"), (True, "cannot be reached")):
        monkeypatch.setattr(wandb, "login", lambda answer=answer, **_: answer)
        settings = type("Settings", (), {"settings": type("S", (), {"base_url": "http://127.0.0.1:9"})})
        monkeypatch.setattr(wandb, "setup", lambda settings=settings: settings)
        verdict = machine.check_tracker(config)
        assert verdict.level == "ill" and text in verdict.what and "tracker.mode=offline" in verdict.do
    assert machine.check_tracker(load_config(SMOKE)).what.startswith("none")
