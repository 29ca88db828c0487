"""The operator through ups_launch and accelerate launch: signals, and faults that need a
restart."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inject_runs import (
    CASE_S,
    LAUNCHED_HANG_S,
    LIMIT_S,
    ROOT,
    SAVE,
    SCRIPTS,
    STEP,
    References,
    Result,
    cases,
    compare,
    leftovers,
    settings_of,
)

from ups_launch.processes import descendants


@dataclass(frozen=True)
class Launch:
    """What is done to a launched stage, or a fault inside (then no signal).

    whom: supervisor, launcher, rank or ranks; or the terminal, which is closed, of a make that leads its
    session."""

    code: Sequence[int]
    says: str
    whom: str = ""
    number: str = ""  # of signal: the name
    fault: dict[str, Any] = field(default_factory=dict)
    settings: Sequence[str] = ()
    continues: bool = False  # ended, the same command is given again; else it must be finished
    then: str = ""  # a signal to the same process
    pause_s: float = 3.0  # before it
    is_early: bool = False  # struck while the ranks import, not amid training
    is_deaf: bool = False  # nobody reads what is printed
    limit_s: float = LIMIT_S  # from the signal to the end of the last process


LAUNCHES: dict[str, Launch] = {name: Launch(**row) for name, row in cases("matrix.launches").items()}
QUICK_LAUNCHES = ("kill rank",)


def is_importing(pid: int) -> bool:
    """Whether a process is a rank, which at first imports torch for some seconds; not the launcher, whose
    words end so."""
    try:
        return b"-m\0ups_launch\0rank\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone
        return False


@contextlib.contextmanager
def _pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def launcher_case(references: References, name: str) -> Result:
    """The operator through ups_launch, with a signal or a fault, then the same command again."""
    case = LAUNCHES[name]
    work = references.work
    result = Result(f"launcher/{name}", [])
    started = time.monotonic()
    folder = work / "cases" / f"launcher_{name.replace(' ', '_')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    directory, problems = folder / "runs" / "smoke" / "operator", result.problems
    slow = (
        {"kind": "slow", "ranks": [0, 1], "step": 0, "repeat": 99}
        if case.number
        else {"kind": "none", "ranks": []}
    )
    fault = {"step": STEP, **(case.fault or slow), "once": str(folder / "struck")}
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ACCELERATE_", "MASTER_", "UPS_"))
    }
    environment["PYTHONPATH"] = str(ROOT)  # for injected.py, which lies beside the tests

    def read() -> str:
        return (folder / "log").read_text(errors="replace") if (folder / "log").is_file() else ""

    def command(fault: dict[str, Any]) -> list[str]:
        settings = settings_of(work, folder / "runs", "operator", (f"hang_s={LAUNCHED_HANG_S}",))
        return [
            sys.executable,
            *"-m ups_launch --restarts 1 --config_file".split(),
            str(ROOT / "accelerate_configs" / "cpu2.yaml"),
            str(ROOT / "tests" / "faults" / "injected.py"),
            json.dumps(fault),
            str(ROOT / SCRIPTS["operator"]),
            *settings,
            *case.settings,
        ]

    def start(fault: dict[str, Any], log: Path, is_deaf: bool = False) -> subprocess.Popen:
        with log.open("ab") as file, contextlib.ExitStack() as stack:
            output = stack.enter_context(_pipe_without_reader()) if is_deaf else file
            return subprocess.Popen(command(fault), stdout=output, stderr=output, cwd=ROOT, env=environment)

    def ranks() -> list[dict]:
        found = []
        for path in sorted((directory / "heartbeat").glob("rank*.json")):
            with contextlib.suppress(ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def is_time() -> bool:
        """While ranks import; else as soon as there is a checkpoint and a step after it."""
        if case.is_early:
            return sum(is_importing(pid) for pid in descendants(os.getpid())) == 2
        return len(ranks()) == 2 and min(rank["step"] for rank in ranks()) > SAVE

    master = None
    if case.whom == "terminal":
        from commands import under_make

        process, master = under_make(f"exec {shlex.join(command(fault))}\n", folder, environment)
    else:
        process = start(fault, folder / "log", case.is_deaf)
    is_over = case.whom in ("supervisor", "terminal")  # else it is started again
    try:
        if case.number:
            until = time.monotonic() + CASE_S
            while process.poll() is None and time.monotonic() < until and not is_time():
                time.sleep(0.02)
            if process.poll() is not None:
                raise IndexError
            pids = {
                "supervisor": [process.pid],
                "rank": [rank["pid"] for rank in ranks()[1:]],
                "ranks": [rank["pid"] for rank in ranks()],
                "terminal": [],
            }
            if case.whom == "launcher":
                stat = Path(f"/proc/{pids['ranks'][0]}/stat").read_text()
                pids["launcher"] = [int(stat.rpartition(")")[2].split()[1])]
            struck = time.time()
            for pid in pids[case.whom]:
                os.kill(pid, signal.Signals[case.number])
            if master is not None:
                os.close(master)
            if case.then:
                time.sleep(case.pause_s)
                os.kill(pids[case.whom][0], signal.Signals[case.then])
        while case.number and process.poll() is None and "launch: " not in read():
            time.sleep(0.05)
        said_at = time.time()
        code = process.wait(CASE_S)
    except (subprocess.TimeoutExpired, IndexError) as error:
        code = None
        problems.append(f"it did not get to the fault or hangs after it ({type(error).__name__})")
        process.kill()
        process.wait()
    if case.number and code is not None:
        while is_over and descendants(os.getpid()) and time.time() - struck < case.limit_s:
            time.sleep(0.05)
        result.end_s = (time.time() if is_over else said_at) - struck  # else: until it is started again
        if result.end_s > case.limit_s and (not case.then or case.pause_s < 1.0):
            problems.append(f"ended {result.end_s:.0f} s after the fault")
    text = read()
    if code not in case.code:
        problems.append(f"exit code {code}, not {sorted(case.code)}")
    if not re.search(case.says, text):
        problems.append(f"no message matches {case.says!r}")
    if case.is_deaf and not (directory / "errors" / "rank1.json").is_file():
        problems.append("the error was not recorded")
    if case.whom == "terminal" and '"preempted"' not in (directory / "status.json").read_text():
        problems.append("nothing was saved when the terminal was closed")
    problems += leftovers()
    if case.continues and not problems:
        if (directory / "done.json").is_file():
            problems.append("done.json is there after the fault")
        if start({"kind": "none", "ranks": []}, folder / "log").wait(CASE_S) != 0:
            problems.append("the same command again failed")
        problems += leftovers()
    if not problems and 2 not in case.code:
        is_exact = "out of memory" not in name
        problems += compare(references.get("operator"), directory, is_exact)
    result.total_s = time.monotonic() - started
    if problems:
        result.note = f"see {folder}"
    return result


def absent_machine_case(references: References) -> Result:
    """The second of two machines, whose first never comes: the launcher would wait for many minutes."""
    result, started = Result("launcher/a machine that never comes", []), time.monotonic()
    code = (
        "import sys; from ups_launch import supervisor as launch; launch.START_S = 8.0; "
        "sys.exit(launch.main())"
    )
    words = (
        "--config_file accelerate_configs/multinode.yaml --num_machines 2 --num_processes 2 "
        "--machine_rank 1 --main_process_ip 127.0.0.1 --main_process_port 1 train_operator.py"
    ).split()
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 8.0,
            check=False,
        )
        if done.returncode != 124 or "no rank of this machine was there 8 s after" not in done.stderr:
            result.problems.append(f"exit code {done.returncode}, and it said {done.stderr[-300:]!r}")
    except subprocess.TimeoutExpired:
        result.problems.append("it still waits")
    result.problems += leftovers()
    result.total_s = time.monotonic() - started
    return result


def unprepared_case(references: References) -> Result:
    """cluster/node.sh on two machines, of which the first cannot prepare the data."""
    result, started = Result("launcher/a machine that cannot prepare", []), time.monotonic()
    folder = references.work / "cases" / "machines"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "CONFIG": str(folder / "none.yaml"),
        "RUN": "none",
        "RUNS": str(folder),
        "JOB": "job",
        "NUM_NODES": "2",
        "PYTHON": sys.executable,
    }
    nodes = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("w") as log:
            nodes.append(
                subprocess.Popen(
                    ["bash", "cluster/node.sh"],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**environment, "NODE_RANK": str(rank)},
                )
            )
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and any(node.poll() is None for node in nodes):
        time.sleep(0.05)
    if any(node.returncode in (None, 0) for node in nodes):
        result.problems.append(f"exit codes {[node.returncode for node in nodes]} (None: it still waits)")
    elif "the last word of the first machine (127.0.0.1) is 'failed'" not in (folder / "1.log").read_text():
        result.problems.append(f"the second does not say what it waited for; see {folder}")
    result.problems += [] if not any(node.returncode is None for node in nodes) else leftovers()
    result.total_s = time.monotonic() - started
    return result


MACHINES = {
    "a machine that never comes": absent_machine_case,
    "a machine that cannot prepare": unprepared_case,
}
