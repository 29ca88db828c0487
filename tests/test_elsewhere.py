"""Use from elsewhere: the command `ups`, make from another folder, messages that name commands which exist
there, and the systems that are not Linux."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from cases import cases
from commands import python, run

import ups
from ups.__main__ import main
from ups.common import files, place
from ups.common.files import message_of
from ups.common.place import ROOT
from ups.userdata.readers import process
from ups_launch import processes
from ups_launch import supervisor as launch

CHAIN = ("check", "train", "report")  # commands that run make

# Names that Windows, or macOS, lacks. torch and its like are imported before, as they have builds for both.
FORECAST = """
import os, sys
import h5py, numpy as np, psutil, safetensors.torch, torch, torch.distributed, tqdm, yaml
LINUX = "memfd_create pipe2 posix_fallocate sched_getaffinity sched_setaffinity".split()
POSIX = '''O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_NOCTTY O_DIRECTORY fork fstatvfs statvfs getuid geteuid
    getpgrp killpg mkfifo sched_yield setsid tcgetpgrp uname wait4 chown lchown
    set_blocking register_at_fork'''.split()
MODULES = "fcntl resource pwd grp termios tty pty syslog"
for name in LINUX + POSIX * (sys.argv[1] == "win32"):
    vars(os).pop(name, None)
for name in MODULES.split() if sys.argv[1] == "win32" else ():
    sys.modules[name] = None
if sys.argv[1] == "win32":
    import signal
    for name in ("SIGHUP", "SIGKILL", "SIGCONT", "SIGALRM", "SIGCHLD", "SIGUSR1"):
        delattr(signal, name)
sys.platform = sys.argv[1]
import ups
u0 = np.sin(2 * np.pi * np.arange(256) / 256)[None]
u = ups.load(sys.argv[2]).forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=3)
np.save("u.npy", u)
try:
    import ups.training.run, ups_launch.supervisor
    from ups.config.command import parse_arguments, run_script
    sys.argv = ["train_operator.py", "--show-config"]
    run_script(lambda: parse_arguments("")[1], "train_operator.py")
except SystemExit as end:
    print(end.code)
"""


# ------------------------------------------------------------------------------------------- other systems


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_forecast_needs_nothing_that_windows_or_macos_lacks(tmp_path, system):
    done = python("-c", FORECAST, system, str(ROOT / "pretrained"), cwd=tmp_path, PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stderr
    u0 = np.sin(2 * np.pi * np.arange(256) / 256)[None]
    here = ups.load(ROOT / "pretrained").forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=3)
    np.testing.assert_allclose(np.load(tmp_path / "u.npy"), here, rtol=1e-6)
    *_, last = done.stdout.splitlines()
    if system == "win32":
        assert last.startswith(
            "train_operator.py: training needs Linux or macOS, and this is Windows; expected "
        )
    else:
        assert last == "0" and "run:\n" in done.stdout  # the configuration


def test_writing_and_training_on_windows_end_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(place.sys, "platform", "win32")
    with (
        (tmp_path / "x").open("wb") as file,
        pytest.raises(OSError, match="x needs Linux or macOS, and this"),
    ):
        files.lock(file, tmp_path / "x")
    for name in ("forecast", "sample"):
        words = [name, "in.h5", "--run", "r", "--task", "t", "--output", str(tmp_path / "o")]
        with pytest.raises(OSError, match="writing forecasts to a file needs Linux or macOS"):
            main(words)
    np.save(tmp_path / "film.npy", np.zeros((40, 16)))
    monkeypatch.setattr(process, "_running", None)
    with pytest.raises(OSError, match="reading files of data needs Linux or macOS"):
        main(["describe", str(tmp_path / "film.npy")])
    for name in CHAIN:
        with pytest.raises(OSError, match="training needs Linux or macOS"):
            main([name, "my.yaml"])
    monkeypatch.setattr(sys, "argv", ["launch", "train_operator.py"])
    assert launch.main() == 2
    assert re.fullmatch("launch: training needs Linux or macOS.*\n", capfd.readouterr().err)


def test_the_supervisor_and_reserved_files_need_nothing_that_macos_lacks(tmp_path, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    for name in ("memfd_create", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(sys, "platform", "darwin")
    processes.control_process(0, 0)  # nothing
    child.send_signal(signal.SIGSTOP)
    while processes.process_state(child.pid) != "stopped":
        pass
    child.kill()
    while processes.process_state(child.pid):  # gone already as a zombie
        pass
    child.wait()
    assert processes.process_state(child.pid) is None
    with launch.events_file() as events:
        monkeypatch.setenv(processes.EVENTS, str(events))
        assert processes.send_event("start") and b'"start"' in events.read_bytes()
    with (tmp_path / "x").open("wb") as file:
        files.reserve(file, 100)


# ------------------------------------------------------------------------------------------- messages


def test_a_message_names_make_as_it_runs_in_the_working_folder(tmp_path, monkeypatch):
    def advice() -> str:
        with pytest.raises(FileNotFoundError) as error:
            ups.load("nowhere")
        return str(error.value).partition(" Run ")[2]

    monkeypatch.chdir(ROOT)
    assert advice() == "make operator RUN=nowhere."
    monkeypatch.chdir(tmp_path)
    assert advice() == f"make -f {ROOT}/Makefile operator RUN=nowhere."
    (tmp_path / "Makefile").write_text("operator:\n")  # of another project
    assert advice() == f"make -f {ROOT}/Makefile operator RUN=nowhere."
    monkeypatch.setattr(place, "ROOT", tmp_path / "site-packages")  # a wheel
    assert advice() == "make operator RUN=nowhere (in a clone of UPS)."
    with pytest.raises(
        FileNotFoundError, match="is installed without a clone of UPS; expected one, .* Clone"
    ):
        (tmp_path / "my.yaml").touch()
        main(["train", "my.yaml"])


@pytest.mark.parametrize("target", ["data", "doctor", "train", "dry-run", "smoke", "train-cpu2", "venv"])
def test_make_runs_the_clone_from_another_folder(tmp_path, target):
    (tmp_path / "my.yaml").write_text("include: configs/smoke.yaml\n")
    words = ["make", "-n", "-f", f"{ROOT}/Makefile", target, "CONFIG=my.yaml", f"PYTHON={sys.executable}"]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"(?<![\w.])[\w./-]+\.(?:py|yaml|txt)\b", done.stdout)
    assert not [name for name in named if name != "my.yaml" and not (tmp_path / name).is_file()]


def test_data_of_another_folder_are_prepared_there_and_its_modules_are_not_imported(tmp_path):
    (tmp_path / "my.yaml").write_text("include: configs/smoke.yaml\n")
    for name in ("numpy", "yaml", "ups"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')\n")
    there = {"cwd": tmp_path, "PYTHONSAFEPATH": "1"}
    words = ("-m", "ups", "train", "my.yaml")
    done = python(*words, "data.tasks=[burgers1d]", "STAGES=operator", MAKEFLAGS="-n", **there)
    assert done.returncode == 0, done.stderr
    [command] = [line for line in done.stdout.splitlines() if f" {ROOT}/prepare_data.py " in line]
    given = (
        "--config my.yaml run.name=my run.root=runs 'data.tasks=[burgers1d]' \"evaluate.stages=[operator]\""
    )
    assert given in command
    done = python(*words, "data.tasks=[no]", **there)  # refused by the first script
    assert done.returncode == 2 and "data.tasks" in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "numpy.py", "ups.py", "yaml.py"]


# ------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(("words", "text"), cases("elsewhere.commands"))
def test_the_command_says_in_one_line_what_is_wrong(tmp_path, monkeypatch, words, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError)) as caught:
        main(words.split())
    said = message_of(caught.value)
    assert re.match(text, said) and "\n" not in said
    if words.startswith("trian"):  # and as a command prints it
        done = python("-m", "ups", *words.split(), cwd=tmp_path, PYTHONSAFEPATH="1")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"ups: {said}\n")
    assert not list(tmp_path.iterdir())
