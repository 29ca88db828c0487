"""ups_launch: restarts what a restart can help, and nothing else; leaves no process; needs no
torch.

The trees are small scripts that tell what ranks would tell; tests/faults/inject.py runs real stages under the
real launcher."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from cases import cases
from commands import python, run, supervisor, under_make, wait_for

from ups.common.place import ROOT
from ups_launch import supervisor as launch
from ups_launch.processes import EVENTS, process_state
from ups_launch.supervisor import decide, launcher_command

START = [{"event": "start", "rank": 0, "pid": 1}, {"event": "start", "rank": 1, "pid": 2}]
OPEN = [*START, {"event": "open", "rank": 0, "directory": "/x"}]
SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
import ups_launch.processes
from ups_launch.processes import send_event
folder = Path(sys.argv[1])
count = len(list(folder.glob("attempt*")))
(folder / f"attempt{count}").write_text(str(os.getpid()))
def save(step): send_event("saved", step=step); (folder / f"saved{step}").touch()
def die(): os.kill(os.getpid(), 9)
send_event("start", pid=os.getpid())
send_event("open", directory=str(folder))
exec(sys.argv[2])
"""


def failed(kind: str, rank: int = 0) -> dict:
    return {"event": "failed", "rank": rank, "kind": kind, "code": 1, "cause": f"cause {kind}"}


@pytest.mark.parametrize(
    ("code", "events", "why", "expected"),
    [
        (0, [*OPEN, {"event": "finished", "rank": 0}], "", (False, 0)),
        (0, [], "", (False, 0)),  # --dry-run
        (0, OPEN, "", (False, 1)),  # every rank left with os._exit(0)
        (1, [failed("configuration")], "", (False, 2)),
        (1, [*OPEN, failed("error"), failed("peer", 1)], "", (False, 1)),  # would repeat
        (1, [*OPEN, failed("non_finite")], "", (False, 1)),
        (1, [*OPEN, failed("out_of_memory")], "", (False, 1)),
        (1, [*OPEN, failed("save")], "", (False, 1)),
        (1, [*OPEN, failed("memory"), failed("peer", 1)], "", (True, 1)),  # a smaller micro-batch helps
        (1, [*OPEN, failed("hang"), failed("hang", 1)], "", (True, 124)),
        (1, [*OPEN, failed("peer")], "", (True, 1)),  # rank 1 was killed
        (1, OPEN, "", (True, 1)),  # both were
        (-9, OPEN, "no heartbeat", (True, 124)),
        (1, [*OPEN, {"event": "stopped", "rank": 0}, {"event": "stopped", "rank": 1}], "", (False, 143)),
        # passed on by the launcher after rank 1 died
        (1, [*OPEN, {"event": "stopped", "rank": 0}], "", (True, 1)),
        (1, [*OPEN, failed("stopped"), failed("stopped", 1)], "", (False, 143)),
        (3, [], "", (False, 3)),  # the script could not be read
    ],
)
def test_what_is_started_again(code, events, why, expected):
    assert decide(code, events, why)[:2] == expected


def test_a_failure_is_told_by_what_was_lost_not_by_who_lost_it():
    assert decide(1, [*OPEN, failed("peer"), failed("memory", 1)])[2] == "rank 1: cause memory"


def command(folder, work: str, *options: str, before: str = "") -> list[str]:
    """The supervisor with a Python script in place of accelerate launch."""
    code = supervisor(before=before, BACKOFF_S=0.01, CHILDREN_S=0.3)
    return [sys.executable, "-c", code, *options, "script.py", SCRIPT, str(folder), work]


def supervise(folder, work: str, *options: str) -> tuple[int, str, int]:
    """Exit code, what was said, and number of starts."""
    done = run(*command(folder, work, *options))
    return done.returncode, done.stderr, len(list(folder.glob("attempt*")))


def test_a_death_is_followed_by_a_start_from_the_newest_checkpoint(tmp_path):
    code, said, starts = supervise(
        tmp_path, "save(count)\nif count < 5: die()\nsend_event('finished')", "--restarts", "1"
    )
    assert code == 0 and starts == 6  # more than --restarts, because there was progress each time
    assert "processes died without a word" in said and "Starting again from the checkpoint of step 4" in said


def test_a_crash_loop_ends(tmp_path):
    code, said, starts = supervise(tmp_path, "die()", "--restarts", "2")
    assert code == 1 and starts == 3
    assert "giving up after 2 restarts without a new checkpoint" in said
    assert "The same command tries again" in said


def test_a_smaller_micro_batch_is_progress_and_the_same_again_is_not(tmp_path):
    short = (
        "rows = max(16 >> count, LEAST); send_event('failed', kind='memory', code=1, "
        "cause=f'out of memory with a micro-batch of {rows}'); sys.exit(1)"
    )
    code, said, starts = supervise(
        tmp_path, f"LEAST = 1\nif count < 5: {short}\nsend_event('finished')", "--restarts", "1"
    )
    assert code == 0 and starts == 6 and "micro-batch of 1. Starting again from the beginning" in said
    (tmp_path / "again").mkdir()
    code, said, starts = supervise(tmp_path / "again", f"LEAST = 8\n{short}", "--restarts", "1")
    assert code == 1 and starts == 4 and "giving up after 1 restarts" in said  # 16, 8, and 8 twice more


def test_a_refusal_by_every_rank_is_said_once_and_another_one_too():
    causes = ("a key", "a key", "no GPU")
    refusals = [{**failed("configuration", rank), "cause": cause} for rank, cause in enumerate(causes)]
    assert decide(1, refusals) == (False, 2, "a key; no GPU")


def test_a_torn_word_of_a_rank_is_no_traceback_and_costs_no_other_word(tmp_path):
    torn = "open(os.environ[ups_launch.processes.EVENTS], 'ab').write(b'{\"event\": \"fai')\n"
    code, said, _ = supervise(tmp_path, f"{torn}send_event('finished')")
    assert code == 0 and "a word of a rank is torn" in said and "Traceback" not in said


def test_a_supervisor_that_nobody_hears_still_ends_as_it_should(tmp_path):
    broken = "ends = os.pipe(); os.close(ends[0]); os.dup2(ends[1], 2)"
    for number, close in enumerate(("os.close(2)", broken)):
        (tmp_path / str(number)).mkdir()
        work = "if count < 1: die()\nsend_event('finished')"
        start = command(tmp_path / str(number), work, before=f"{close}; ")
        assert subprocess.run(start, cwd=ROOT, timeout=60, check=False).returncode == 0
        assert len(list((tmp_path / str(number)).glob("attempt*"))) == 2


def test_a_launcher_without_ranks_is_not_waited_for_without_limit(tmp_path):
    """It waits for a machine that never comes; started again it would wait again."""
    done = python("-c", supervisor("['sleep', '300']", START_S=1.0), "script.py")
    assert done.returncode == 124 and "no rank of this machine was there 1 s after" in done.stderr
    assert "Starting again" not in done.stderr


def test_a_signal_before_there_are_ranks_is_obeyed_at_once(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", supervisor("['sh', '-c', 'echo there; exec sleep 300']"), "script.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGTERM)
    words = process.communicate(timeout=30)[1]
    assert process.returncode == 143 and "a signal came before there was anything to save" in words


# ---------------------------------------------------------------- a terminal that is closed


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("is_nohup", [False, True])
def test_a_closed_terminal_ends_what_make_waits_for_unless_nohup_said_otherwise(tmp_path, is_nohup):
    """The kernel tells the leader of the session, make, alone; and make waits for its children."""
    work = (
        "import signal\ndef stop(*_): (folder / 'saved').touch(); send_event('stopped'); os._exit(143)\n"
        "signal.signal(signal.SIGTERM, stop); save(1)\n"
        f"for _ in range({30 if is_nohup else 300}): time.sleep(0.1)\nsend_event('finished')"
    )  # longer than any wait for a core
    line = shlex.join(["nohup"] * is_nohup + command(tmp_path, work))
    line += f" > {tmp_path}/out\n" * is_nohup  # else nohup.out lies in the tree
    make, master = under_make(line, tmp_path)
    assert wait_for((tmp_path / "saved1").exists)
    time.sleep(0.3)
    os.close(master)
    make.wait(20)
    pid = int((tmp_path / "attempt0").read_text())
    assert wait_for(lambda: not process_state(pid))  # for nohup: make may be gone before
    assert (tmp_path / "saved").exists() != is_nohup


def test_a_terminal_that_closes_before_the_first_look_at_it_is_seen(tmp_path):
    code = (
        "import os, sys, time\nfrom ups_launch.processes import Terminal\nos.setsid()\n"
        "os.close(os.open(os.ttyname(0), os.O_RDWR))\nimport signal; signal.signal(signal.SIGHUP, "
        "signal.SIG_IGN)\n"
        "terminal = Terminal()\nopen(sys.argv[1] + '/there', 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '/closed'): time.sleep(0.01)\nsys.exit(7 if "
        "terminal.is_closed() else 0)"
    )
    master, slave = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=slave)
    os.close(slave)
    assert wait_for((tmp_path / "there").exists)
    os.close(master)
    (tmp_path / "closed").touch()
    assert process.wait(60) == 7


# ---------------------------------------------------------------- under accelerate's launcher


REFUSES = "send_event('failed', kind='configuration', code=2, cause='because'); sys.exit(2)"


def launched(folder, work: str, topology: str = "cpu2") -> subprocess.Popen:
    (folder / "script.py").write_text(
        f"import os, sys, time\nfrom ups_launch.processes import send_event\n{work}\n"
    )
    words = ["--config_file", f"accelerate_configs/{topology}.yaml", str(folder / "script.py"), str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "ups_launch", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("topology", "work", "code", "words"),
    cases("launch.buried"),
    ids=["refused", "killed"],
)
def test_what_a_rank_said_is_not_buried_by_the_launcher(tmp_path, topology, work, code, words):
    process = launched(tmp_path, work, topology)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, re.sub(r"process \d+", "process N", said)) == (code, words)


def test_ranks_that_still_import_die_with_a_killed_supervisor(tmp_path):
    note = "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))"
    process = launched(tmp_path, f"{note}\ntime.sleep(300)")
    assert wait_for(lambda: all((tmp_path / r).exists() and (tmp_path / r).read_text() for r in "01"))
    process.kill()
    process.wait()
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    wait_for(lambda: not any(process_state(pid) for pid in pids), 10)
    left = [pid for pid in pids if process_state(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_nothing_that_was_started_survives(tmp_path):
    work = (
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "(folder / 'child').write_text(str(child.pid)); send_event('finished')"
    )
    assert supervise(tmp_path, work)[0] == 0
    assert process_state(int((tmp_path / "child").read_text())) is None


def test_a_killed_supervisor_takes_its_launcher_along(tmp_path):
    process = subprocess.Popen(command(tmp_path, "time.sleep(300)"), cwd=ROOT)
    assert wait_for(lambda: (tmp_path / "attempt0").exists() and (tmp_path / "attempt0").read_text())
    process.kill()
    process.wait()
    pid = int((tmp_path / "attempt0").read_text())
    assert wait_for(lambda: process_state(pid) is None, 10)


def told(folder, *signals, pause: float, saving_s: float) -> tuple[int, str]:
    """Exit code and words of a supervisor that gets `signals`, `pause` apart; its rank takes saving_s to end
    on the first."""
    work = (
        "import signal\n"
        "def stop(number, frame):\n"
        "    (folder / 'told').open('a').write(f'{int(number)} '); until = time.monotonic() + saving_s\n"
        "    while time.monotonic() < until: time.sleep(0.05)\n"
        "    (folder / 'saved').touch(); send_event('stopped'); os._exit(143)\n"
        f"saving_s = {saving_s}\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop); save(1); time.sleep(300)"
    )

    # a suite in the background of a shell has SIGINT ignored, and the supervisor keeps to that
    def listen() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(
        command(folder, work), cwd=ROOT, preexec_fn=listen, stderr=subprocess.PIPE, text=True
    )
    assert wait_for((folder / "saved1").exists)
    time.sleep(0.3)
    for number in signals:
        process.send_signal(number)
        time.sleep(pause)
    words = process.communicate(timeout=30)[1]
    assert len(list(folder.glob("attempt*"))) == 1
    return process.returncode, words


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT], 130),
        ([signal.SIGTERM] * 5, 143),  # from Slurm and its step, make and a wrapper: told once
        ([signal.SIGINT] * 2, 130),  # by the terminal and a wrapper
    ],
)
def test_signals_reach_the_ranks_once_and_are_not_followed_by_a_start(tmp_path, signals, expected):
    code, words = told(tmp_path, *signals, pause=0.02, saving_s=1.0)
    assert code == expected and (tmp_path / "saved").exists(), words
    assert (tmp_path / "told").read_text().split() == [str(int(signals[0]))]


def test_a_later_ctrl_c_ends_all_at_once(tmp_path):
    code, words = told(tmp_path, signal.SIGINT, signal.SIGINT, pause=1.5, saving_s=200.0)
    assert code == 130 and "Ctrl-C came again" in words and not (tmp_path / "saved").exists()


def test_a_launcher_that_is_stopped_is_replaced(tmp_path):
    work = "save(count)\nif count == 0: os.kill(os.getpid(), 19)\nsend_event('finished')"
    done = python("-c", supervisor(STOPPED_S=0.5), "script.py", SCRIPT, tmp_path, work)
    assert done.returncode == 0 and "is stopped. Starting again from the checkpoint of step 0" in done.stderr


def test_the_port_is_a_free_one_unless_the_user_or_several_machines_choose(tmp_path):
    def words(settings: dict, *more: str) -> list[str]:
        path = tmp_path / "topology.yaml"
        path.write_text(yaml.safe_dump(settings))
        return launcher_command(["--config_file", str(path), *more, "train_operator.py"])

    assert "--main_process_port" in words({"num_processes": 2})
    assert "--main_process_port" not in words({"num_processes": 2, "main_process_port": 0})
    assert "--main_process_port" not in words({"num_processes": 16, "num_machines": 2})
    assert words({"num_processes": 2}, "--main_process_port", "1234").count("--main_process_port") == 1
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert "29500" not in path.read_text() + " ".join(
            launcher_command(["--config_file", str(path), "x.py"])
        )


@pytest.mark.parametrize(("words", "text"), cases("launch.refused"))
def test_a_launch_that_cannot_be_ends_with_2_and_one_line(words, text):
    done = python("-m", "ups_launch", *words)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


def test_events_are_lines_of_json_and_nothing_without_a_supervisor(tmp_path, monkeypatch):
    from ups_launch.processes import send_event

    monkeypatch.delenv(EVENTS, raising=False)
    send_event("open", directory="/x")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(EVENTS, str(tmp_path / "events"))
    monkeypatch.setenv("RANK", "3")
    send_event("open", directory="/x")
    assert json.loads((tmp_path / "events").read_text()) == {"event": "open", "rank": 3, "directory": "/x"}
    assert launch.FINAL.keys() >= {"error", "save"} and os.environ["RANK"] == "3"
