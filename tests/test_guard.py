"""ups_launch/guard.py, ups/training/activity.py: whoever hangs, dies or falls out of step is named, and
nobody is left waiting for it.

The ranks are processes that import no more; their work is a line of Python.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import cases
from commands import wait_for

from ups.common.place import ROOT
from ups.training.activity import Activity
from ups_launch.guard import NO_HEARTBEAT, RECORD_BYTES, Heartbeat, find_stall
from ups_launch.processes import descendants, process_state

HANG_S = 1.5
SCRIPT = f"""
import ctypes, os, signal, sys, time
from pathlib import Path
import ups.common.progress, ups_launch.guard
from ups.training.activity import Activity
from ups.common.progress import beat
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
sleep_in_c, sleep_with_lock = ctypes.CDLL(None).sleep, ctypes.PyDLL(None).sleep
end = folder / f"end{{rank}}"
guard = Activity(rank, world, "operator", {HANG_S}, lambda *facts: end.write_text(repr(facts)))
guard.start()
guard.open(folder / "heartbeat")
(folder / f"ready{{rank}}").touch()
while not all((folder / f"ready{{other}}").exists() for other in range(world)):
    time.sleep(0.01)
exec(sys.argv[4])
guard.leave(0, True)
guard.close(0)
"""
WAITS = "with guard.waiting('summing gradients'):\n    while True: sleep_in_c(60)"  # a signal ends one sleep


def start(folder: Path, *works: str) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(len(works)), str(folder), work],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, work in enumerate(works)
    ]


def end(processes: list[subprocess.Popen], limit: float = 15.0) -> tuple[list[int], list[str], float]:
    """Exit codes, outputs and seconds until the last ended."""
    started = time.monotonic()
    try:
        outputs = [
            process.communicate(timeout=max(0.1, limit - (time.monotonic() - started)))[0]
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs, time.monotonic() - started


@pytest.mark.parametrize("sleep", ["time.sleep(60)", "sleep_in_c(60)"])
def test_a_rank_that_hangs_is_named_and_both_end_with_124_and_their_stacks(tmp_path, sleep):
    codes, outputs, seconds = end(
        start(tmp_path, WAITS, f"guard.step = 7\nwith guard.phase('computing step 7'): {sleep}")
    )
    assert codes == [124, 124] and seconds < HANG_S + 6
    for rank, output in enumerate(outputs):
        assert "the laggard is rank 1: at step 7, computing step 7" in output
        assert f"rank {rank}, thread MainThread" in output
        assert "rank 0: at step 0, summing gradients" in output
        code, kind, cause, stack = eval((tmp_path / f"end{rank}").read_text())
        assert (code, kind) == (124, "hang") and "laggard is rank 1" in cause and "MainThread" in stack


def test_a_guard_that_nobody_hears_still_records_and_ends_the_rank(tmp_path):
    deaf = "ends = os.pipe(); os.close(ends[0]); os.dup2(ends[1], 2)\ntime.sleep(60)"
    codes, _, _ = end(start(tmp_path, WAITS, deaf))
    assert codes == [124, 124] and "laggard is rank 1" in (tmp_path / "end1").read_text()


@pytest.mark.parametrize("stall", ["sleep_with_lock(60)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_rank_that_does_not_even_answer_is_named_shows_its_stack_and_is_killed(tmp_path, stall):
    codes, outputs, _ = end(
        start(tmp_path, WAITS, f"with guard.waiting('gathering'):\n    time.sleep(0.8); {stall}")
    )
    assert codes[0] == 124 and codes[1] in (-signal.SIGABRT, -signal.SIGKILL)
    assert "the laggard is rank 1: its process does not answer; at step 0, gathering" in outputs[0]
    assert "Fatal Python error: Aborted" in outputs[1] and "Current thread" in outputs[1]  # by faulthandler


NOW = 100.0


def heartbeat(rank, quiet_s=9.0, is_deaf=False, **record):
    usual = {"limit_s": 5.0, "is_waiting": True, "doing": "summing gradients", "collectives": 2}
    found = Heartbeat(NO_HEARTBEAT | usual | {"rank": rank} | record, NOW - 4.0 * is_deaf)
    found.progress_at = NOW - quiet_s
    return found


@pytest.mark.parametrize(("second", "grace_s", "words", "at_fault"), cases("guard.stalls"))
def test_the_rank_that_holds_up_the_others_is_named(second, grace_s, words, at_fault):
    found = find_stall([heartbeat(0), heartbeat(1, **second)], NOW, "D{}".format, grace_s=grace_s)
    assert (found is None) == (words is None)
    assert found is None or (found.cause.startswith(words) and [*found.ranks] == at_fault)


def test_heartbeats_count_collectives_and_a_silent_guard_is_deaf():
    activity, now = Activity(0, 2, "operator", 5.0), time.monotonic()
    with activity.waiting("gathering"):
        record = activity.guard._record()
        assert record["collectives"] == 1 and record["is_waiting"]
    peer = Heartbeat(NO_HEARTBEAT | {"limit_s": 5.0}, now)
    peer.update(record | {"rank": 1}, now)
    assert not peer.is_deaf(now + 1.0) and peer.is_deaf(now + 4.0)
    moving = heartbeat(0)
    for later, since, is_stuck in ((4.0, 0.0, False), (9.0, 0.0, True), (9.0, now + 8.0, False)):
        moving.progress_at = now + later
        found = find_stall([moving, peer], now + later, str, since)
        assert (found is not None) == is_stuck  # deaf, and quiet for 5 s since a signal


@pytest.mark.parametrize(
    ("death", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "died without a word, killed or crashed"),
        ("os._exit(0)", "died without a word, killed or crashed"),
        (
            "guard.leave(1, False); guard.close(1); sys.exit(1)",
            "rank 1 failed: it ended with exit code 1 at step 0",
        ),
    ],
)
def test_a_rank_whose_peer_is_gone_does_not_wait_for_it(tmp_path, death, text):
    codes, outputs, seconds = end(start(tmp_path, WAITS, death))
    assert codes[0] == 124 and codes[1] != 124 and text in outputs[0] and seconds < 6


def test_a_failure_before_the_wait_for_its_files_is_seen_by_the_rank_that_waits(tmp_path):
    """A rank that failed blocks in a collective, to tell the others, while another looks for its files on
    disk."""
    fails = f"guard.has_failed = True\n{WAITS}"
    waits = (
        "time.sleep(0.8)\nwith ups.common.progress.waiting('files'):\n    while not "
        "ups.common.progress.peer_failed(): time.sleep(0.05)\n"
        "print('seen'); os._exit(7)"
    )
    codes, outputs, _ = end(start(tmp_path, waits, fails))
    assert codes[0] == 7 and "seen" in outputs[0]
    (tmp_path / "sound").mkdir()
    codes, outputs, _ = end(start(tmp_path / "sound", waits, WAITS))
    assert codes == [124, 124] and "seen" not in outputs[0]  # a rank that waits in good health is no failure


def test_a_rank_that_ends_while_it_is_looked_at_has_left_its_word(tmp_path, monkeypatch):
    own, peer = Activity(0, 2, "operator", 5.0), Activity(1, 2, "operator", 5.0)
    record, path = peer.guard._record(), tmp_path / "rank1.json"
    path.write_text(json.dumps(record))
    own.guard._directory = tmp_path
    assert own.guard.lost_peer(0.0) is None

    def ends(pid):
        path.write_text(json.dumps(record | {"code": 1, "cause": "ValueError: its own error"}))

    monkeypatch.setattr("ups_launch.guard.process_state", ends)
    assert own.guard.lost_peer(0.0) == "rank 1 failed: ValueError: its own error"


def test_an_agreed_end_of_a_peer_is_no_loss(tmp_path):
    codes, _, _ = end(
        start(
            tmp_path,
            "time.sleep(3)" if HANG_S > 3 else "guard.limit_s = 9; time.sleep(3)",
            "guard.leave(143, True); guard.close(143); sys.exit(143)",
        )
    )
    assert codes == [0, 143]


@pytest.mark.parametrize(
    "work",
    ["for _ in range(55): time.sleep(0.1); beat()", "with guard.phase('solving', 30.0): time.sleep(5.5)"],
)
def test_long_work_that_makes_progress_or_says_how_long_it_takes_is_left_alone(tmp_path, work):
    # a busy machine may well stop a process for a second, and rank 1 may not wait for a rank that has ended
    patient = f"guard.hang_s = guard.limit_s = {2 * HANG_S}\n"
    codes, outputs, _ = end(
        start(tmp_path, patient + work, f"{patient}with guard.waiting('for rank 0'): time.sleep(4.0)")
    )
    assert codes == [0, 0], outputs


def test_a_signal_outside_the_loop_ends_at_once_and_inside_is_noted(tmp_path):
    codes, _, seconds = end(start(tmp_path, "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"))
    assert codes == [143] and seconds < 5
    work = "guard.is_in_loop = True; os.kill(os.getpid(), signal.SIGTERM); print('noted', guard.stop_signal)"
    codes, outputs, _ = end(start(tmp_path, work))
    assert codes == [0] and "noted 15" in outputs[0]
    # the second while the first one's SystemExit is on its way out
    twice = "os.kill(os.getpid(), signal.SIGTERM)"
    codes, outputs, _ = end(start(tmp_path, f"try: {twice}\nfinally: {twice}; print('cleared up')"))
    assert codes == [143] and "cleared up" in outputs[0]


def test_a_signal_to_a_blocked_rank_takes_the_grace_period_and_not_longer(tmp_path):
    blocked = (
        "ups_launch.guard.GRACE_S = 1.0; guard.hang_s = guard.limit_s = 50; guard.is_in_loop = True\n" + WAITS
    )
    processes = start(tmp_path, blocked, blocked)
    assert wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    time.sleep(0.5)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes, outputs, seconds = end(processes)
    assert codes == [143, 143] and seconds < 6
    assert "STOPPED: rank 0, stage operator: told to stop, but no progress for 1 s" in outputs[0]


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {SCRIPT!r}, '0', '1', {str(tmp_path)!r}, "
        "'with guard.phase(\"working\", 99.0): time.sleep(60)'])\ntime.sleep(60)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "none"},
        stderr=subprocess.DEVNULL,
    )
    assert wait_for((tmp_path / "ready0").exists)
    [rank] = descendants(launcher.pid)
    launcher.kill()
    launcher.wait()
    assert wait_for(lambda: process_state(rank) is None, 8)
    assert "the launcher (process" in (tmp_path / "end0").read_text()


def test_a_heartbeat_is_one_small_record_written_in_place_even_on_a_full_disk(tmp_path):
    work = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); guard.step = 3\n"
        "with guard.phase('saving'): time.sleep(1.2)"
    )
    codes, outputs, _ = end(start(tmp_path, work))
    path = tmp_path / "heartbeat" / "rank0.json"
    record = json.loads(path.read_text())
    assert codes == [0] and "WARNING" not in outputs[0] and path.stat().st_size == RECORD_BYTES
    assert (
        record["step"] == 3 and record["code"] == 0 and record["pulse"] >= 3 and record["stage"] == "operator"
    )


def test_what_the_main_thread_pays_is_microseconds():
    activity = Activity(0, 1, "operator", 300.0)
    started = time.perf_counter()
    for _ in range(10_000):
        with activity.phase("computing"), activity.waiting("summing"):
            activity.beat()
    assert (time.perf_counter() - started) / 10_000 < 200e-6  # some 5 on an idle core
