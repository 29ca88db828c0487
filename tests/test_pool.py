"""The worker processes of make data give the numbers of one process, and none stays alive."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import prepare_data
from ups.evaluation.parts import workers
from ups_solvers.processes import MIN_PER_WORKER, solve, solver_pool

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"seed": 5, "resolution": 32, "num_frames": 6, "parameter": 0.1, "t_end": 0.5}


def test_small_files_start_no_process():
    with solver_pool(2 * MIN_PER_WORKER - 1, num_workers=8) as solver:
        assert solver is solve
    with solver_pool(1000, num_workers=1) as solver:
        assert solver is solve


@pytest.mark.slow
def test_two_processes_equal_one_bitwise_and_a_dead_one_is_an_error():
    indices = np.arange(3, 14)
    with pytest.raises(
        OSError, match="a process that solved trajectories of burgers1d from 3 on died.*--workers 1"
    ):
        with solver_pool(2 * MIN_PER_WORKER, num_workers=8) as solver:
            assert np.array_equal(
                solver("burgers1d", indices, **SETTINGS), solve("burgers1d", indices, **SETTINGS)
            )
            workers = active_children()
            assert len(workers) == 2
            workers[0].kill()
            workers[0].join()
            solver("burgers1d", indices, **SETTINGS)
    assert not set(workers) & set(active_children())


def test_a_dead_process_of_a_report_is_an_error_and_one_core_starts_none():
    inputs = SimpleNamespace(device=torch.device("cpu"), stages=["diffusion"], config=None)
    with pytest.raises(OSError, match="a process of the report died; expected its figures.*allow one core"):
        with workers(inputs, lambda *_: nullcontext(), 2):
            raise BrokenExecutor
    for changes, num_cores in (({}, 1), ({"stages": []}, 2), ({"device": torch.device("cuda")}, 2)):
        with workers(SimpleNamespace(**vars(inputs) | changes), None, num_cores) as found:
            assert found.pool is None and found.call([lambda: 3, lambda: 4]) == [3, 4]


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_run_leaves_no_process_and_continues(tmp_path, capsys):
    command = [
        sys.executable,
        "prepare_data.py",
        "--config",
        str(ROOT / "configs/smoke.yaml"),
        f"data.root={tmp_path}",
        "--workers",
        "2",
        "data.tasks=[diff_react2d]",
        "task.diff_react2d.num_trajectories=200",
        "data.chunk=16",
    ]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, cwd=ROOT, stderr=log) as run:
        deadline, children = time.monotonic() + 60, []
        while (
            run.poll() is None and "8%" not in (tmp_path / "log").read_text() and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        children = psutil.Process(run.pid).children(recursive=True)
        run.kill()
    assert len(children) >= 2, (tmp_path / "log").read_text()
    assert not [
        process
        for process in psutil.wait_procs(children, timeout=20)[1]
        if process.status() != psutil.STATUS_ZOMBIE
    ]
    assert prepare_data.main([*command[2:], "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"diff_react2d: 1 file\(s\), about .* MiB, [1-9]\d?% there", listed), listed
