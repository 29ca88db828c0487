"""What starts the stages, and what they tell who started them: make and cluster/node.sh run those that the
configuration names, as Python reads it; others' data are waited for; stops and restarts work on full disks;
every refusal is a line with a remedy."""

import errno
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from commands import python, run, supervisor
from small_disk import on_small_disk, reason_to_skip

import prepare_data
from ups.commands import stages
from ups.common.files import held, partial_path
from ups.common.place import ROOT
from ups.config.command import run_script

# In place of Python: writes down every script that is started, and finds every stage to be trained.
RECORDER = """
import sys
from pathlib import Path
words = sys.argv[1:]
if "ups.commands.stages" in words:
    from ups.commands import stages
    sys.argv = words[1:]
    stages.why_to_do = lambda *_: "it is missing"
    sys.exit(stages.main())
with Path(__file__).with_name("started").open("a") as file:
    print(*words, file=file)
"""
TASKS = (
    f"{{include: {ROOT}/configs/smoke.yaml, data: {{tasks: [burgers1d]}}, "
    "task: {burgers1d: {reserve: 0.3}}, evaluate: "
)
CONFIGS = {  # evaluate.stages as YAML can write it -> what is trained
    "flow over two lines": (TASKS + "{stages: [operator,\n  diffusion]}}", "operator diffusion"),
    "JSON": (TASKS + '{"stages": ["operator", "diffusion", "scoring"]}}', "operator diffusion scoring"),
    "comment in a list": (
        f"include: {ROOT}/configs/small_11task.yaml\nevaluate:\n  stages:\n  # all\n\n  - operator\n"
        "  - 'diffusion'\ndata: {tasks: [burgers1d]}\ntask: {burgers1d: {reserve: 0.3}}\n",
        "operator diffusion",
    ),
    "included": (f"include: {ROOT}/configs/small_11task.yaml\nrun: {{seed: 1}}\n", "operator"),
    "no task for it": (TASKS + "{stages: [operator, steady]}}", "operator"),
    "weights from elsewhere": (TASKS + f"{{weights: {ROOT}/pretrained}}}}", ""),
}


@pytest.fixture
def started(tmp_path):
    """(words of a command, variables of its environment) -> its exit status and what it started."""
    (tmp_path / "recorder.py").write_text(RECORDER)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/recorder.py "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def start(*words: str, **variables: str) -> tuple[int, list[str]]:
        done = run(*words, **variables)
        log = tmp_path / "started"
        return done.returncode, log.read_text().splitlines() if log.is_file() else [done.stderr]

    return start


def trained(lines: list[str], topology: str) -> list[str]:
    words = [word for line in lines if topology in line for word in line.split()]
    return [word[6:-3] for word in words if word.startswith("train_")]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_stages_of_a_configuration_are_read_however_they_are_written(name, capsys, monkeypatch, tmp_path):
    text, wanted = CONFIGS[name]
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["stages", "stages", "--config", str(tmp_path / "mine.yaml")])
    assert stages.main() == 0 and capsys.readouterr().out == wanted + "\n"


@pytest.mark.parametrize(
    ("arguments", "stages", "named"),
    [
        (["CONFIG=mine.yaml"], "operator diffusion scoring", []),
        (["STAGES=operator  steady"], "operator steady", ["evaluate.stages=[operator,steady]"]),
        (["STAGES=", "ARGS=evaluate.stages=[operator]"], "operator", ["evaluate.stages=[operator]"]),
    ],
)
def test_make_trains_the_stages_of_the_configuration_and_the_report_asks_for_them(
    arguments, stages, named, started, tmp_path
):
    (tmp_path / "mine.yaml").write_text(CONFIGS["JSON"][0])
    arguments = [word.replace("=mine", f"={tmp_path}/mine") for word in arguments]
    code, lines = started(
        "make",
        "report",
        "CONFIG=configs/smoke.yaml",
        f"RUNS={tmp_path}",
        f"PYTHON={tmp_path}/python",
        "TOPOLOGY=cpu",
        *arguments,
    )
    assert code == 0 and trained(lines, "cpu.yaml") == stages.split() and lines[-1].startswith("evaluate.py")
    # nothing else: a stage that is missing fails by its gate
    assert re.findall(r"evaluate\.stages=\S+", lines[-1]) == named


@pytest.mark.parametrize(
    ("name", "given", "stages"),
    [
        ("uncertain", "", "operator diffusion consistency scoring"),
        ("smoke", "operator  steady", "operator steady"),
    ],
)
def test_nodes_train_the_same_stages(name, given, stages, started, tmp_path):
    code, lines = started(
        "cluster/node.sh",
        CONFIG=f"configs/{name}.yaml",
        RUNS=str(tmp_path),
        STAGES=given,
        PYTHON=f"{tmp_path}/python",
    )
    assert code == 0 and trained(lines, "multinode.yaml") == stages.split()


def settings_of(folder) -> list[str]:
    """Of a tiny chain of one task, in `folder`."""
    return (
        f"--config {ROOT}/configs/smoke.yaml data.tasks=[burgers1d] task.burgers1d.num_trajectories=10 "
        "task.burgers1d.parameters=[0.05] operator.train.steps=4 "
        f"run.root={folder} data.root={folder}/data cache.root={folder}/cache"
    ).split()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("prepare_data.py", "data/burgers1d/1D_Burgers_Sols_Nu0.05.hdf5"),
        ("prepare_cache.py", "cache/burgers1d.h5"),
    ],
)
def test_a_run_waits_for_the_data_that_another_creates(script, name, tmp_path):
    settings = settings_of(tmp_path)
    if script == "prepare_cache.py":
        assert prepare_data.main(settings) == 0
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    with held(partial_path(path)):  # as the other run does
        words = [sys.executable, script, *settings]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        is_told = any(
            f"waiting: {partial_path(path)} is being written by another process" in line
            for line in process.stderr
        )
        assert is_told and process.poll() is None
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 0 and path.is_file(), (printed, said)


# A script that starts another one as where ups_launch is not installed.
WITHOUT = """
import runpy, sys
sys.modules["ups_launch"] = None
sys.argv[:1], sys.path[0] = [], "."
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_accelerate_launch_trains_without_ups_launch(tmp_path):
    (tmp_path / "without.py").write_text(WITHOUT)
    settings = settings_of(tmp_path)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu2.yaml"]
    for words in (
        ["prepare_data.py"],
        ["prepare_cache.py"],
        [*launcher, "--main_process_port", "0", str(tmp_path / "without.py"), "train_operator.py"],
    ):
        done = python(*words, *settings, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    stage = tmp_path / "smoke" / "operator"
    assert (stage / "done.json").is_file() and "on 2 x CPU" in done.stdout
    assert not (stage / "heartbeat").exists()


# A rank in place of the launcher: the disk of TMPDIR is full before it says that it is there.
RANK = """
import os, signal, sys, time
from pathlib import Path
from ups_launch.processes import send_event
folder, handle = Path(sys.argv[1]), os.open(os.environ["TMPDIR"] + "/theirs", os.O_CREAT | os.O_WRONLY)
try:
    for _ in range(1000): os.write(handle, bytes(4096))
    raise AssertionError("this disk is large")
except OSError: pass
def stop(*_): (folder / "saved").touch(); send_event("stopped"); os._exit(143)
signal.signal(signal.SIGTERM, stop)
send_event("start", pid=os.getpid())
send_event("open", directory=str(folder))
if not (folder / "died").exists(): (folder / "died").touch(); os.kill(os.getpid(), 9)
(folder / "trains").touch()
time.sleep(60)
"""


@pytest.mark.skipif(reason_to_skip() != "", reason=reason_to_skip())
def test_a_full_disk_of_temporary_files_costs_neither_a_restart_nor_a_save(tmp_path):
    (tmp_path / "tmp").mkdir()
    code = supervisor(BACKOFF_S=0.01)
    temporary = str(tmp_path / "tmp")
    words = on_small_disk(temporary, sys.executable, "-c", code, "x.py", RANK, tmp_path)
    process = subprocess.Popen(
        words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": temporary}
    )
    while not (tmp_path / "trains").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 143 and (tmp_path / "saved").exists() and "died without a word" in said, said


def failing(error: BaseException):
    def main(*_, **__) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/report"),
            "x: no access to runs/report (Permission denied); expected a file and folder that you may read "
            "and write. Change their",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "source", None, "copy"),
            "x: the disk of copy is full (No space left on device); expected room to write. Free some, "
            "then run the same command",
        ),
        (
            RuntimeError("could not create a primitive"),
            "x: out of memory (could not create a primitive); expected room for one batch. End other "
            "programs, or lower batch sizes",
        ),
        (MemoryError(), "x: out of memory (MemoryError); expected room"),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_the_machine_refuses_is_one_line_with_a_remedy(error, status, capsys):
    with pytest.raises(SystemExit) as ending:
        run_script(failing(error), "x")
    code = ending.value.code
    assert code == status or (str(code).startswith(str(status)) and "\n" not in code)
    assert code != 130 or capsys.readouterr().err == "x: interrupted; run the same command again\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_script(failing(RuntimeError("shapes differ")), "x")


@pytest.mark.skipif(reason_to_skip() != "", reason=reason_to_skip())
def test_a_folder_that_may_not_be_written_refuses_a_stage_in_one_line(tmp_path):
    code = (
        "import sys; from ups.config.load import load_config; from ups.training.folder import StageFolder\n"
        "config = load_config('configs/smoke.yaml', ['run.root=' + sys.argv[1]])\n"
        "print(StageFolder(config, 'operator', {}).take(0.0))"
    )
    done = run(*on_small_disk(tmp_path, sys.executable, "-c", code, tmp_path, mode="ro"))
    assert done.stdout.startswith(
        f"no access to {tmp_path}/smoke (Read-only file system); expected a file and"
    ), done.stderr
