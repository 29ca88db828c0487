"""cluster/: the chain on several machines. Two "nodes" on this one train over gloo; the files are what their
readers expect."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
import yaml
from cases import cases
from commands import inherited

from ups.common.place import ROOT

CLUSTER = ROOT / "cluster"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def free_ports(num):
    """The first of `num` neighbouring free ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + num):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except (OSError, OverflowError):
            continue


def start(rank, config, folder, job, port, **more):
    environment = {name: value for name, value in inherited().items() if not name.startswith("SLURM_")}
    environment |= {
        "CONFIG": str(config),
        "RUN": "two",
        "RUNS": str(folder / "runs"),
        "STAGES": "operator",
        "JOB": job,
        "NUM_NODES": "2",
        "NODE_RANK": str(rank),
        "FIRST_NODE": "127.0.0.1",
        "NUM_GPUS": "0",
        "PORT": str(port),
        "PYTHON": sys.executable,
        **more,
    }
    log = (folder / f"{job}.{rank}.log").open("w+")
    return subprocess.Popen(
        [str(CLUSTER / "node.sh")],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ), log


def finish(nodes, timeout=400):
    texts = []
    try:
        for process, _ in nodes:
            process.wait(timeout)
    finally:
        for process, log in nodes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            log.seek(0)
            texts.append(log.read())
    return [process.returncode for process, _ in nodes], texts


@needs_make
@pytest.mark.slow
def test_two_nodes_train_together_and_the_first_writes_the_report(tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "include": str(ROOT / "configs" / "smoke.yaml"),
                "data": {"tasks": ["burgers1d"], "root": str(tmp_path / "data")},
                "cache": {"root": str(tmp_path / "cache")},
                "task": {"burgers1d": {"reserve": 0.0}},
                "operator": {"base_steps": 5, "train": {"steps": 8, "validate_every": 8, "save_every": 4}},
            }
        ),
        encoding="utf-8",
    )
    port = free_ports(2)
    nodes = [start(rank, config, tmp_path, "first", port) for rank in range(2)]
    codes, texts = finish(nodes)
    assert codes == [0, 0], "\n".join(texts)
    run = tmp_path / "runs" / "two"
    assert json.loads((run / "operator" / "done.json").read_text())["step"] == 8
    (start_record,) = json.loads((run / "operator" / "environment.json").read_text())["starts"]
    assert start_record["world"] == 2
    assert (run / "report" / "results.json").is_file()
    assert "on 2 x CPU" in texts[0] and "report" not in texts[1]

    again = [start(rank, config, tmp_path, "second", port) for rank in range(2)]
    codes, texts = finish(again)
    assert codes == [0, 0] and "nothing to do" in texts[0], "\n".join(texts)
    assert len(json.loads((run / "operator" / "environment.json").read_text())["starts"]) == 1


def test_the_second_node_waits_for_the_first_ones_caches_and_ends_when_told_to(tmp_path):
    (tmp_path / "runs" / "two").mkdir(parents=True)
    (tmp_path / "runs" / "two" / ".prepared").write_text("earlier ready\n")  # of another job
    node = start(1, "configs/smoke.yaml", tmp_path, "now", 1)
    with pytest.raises(subprocess.TimeoutExpired):
        node[0].wait(3)
    node[0].terminate()
    codes, texts = finish([node], timeout=10)
    assert codes == [-15] and "Traceback" not in texts[0]


@pytest.mark.parametrize("words", ["", "now preparing 3"])
def test_a_first_node_that_gives_no_sign_of_life_is_given_up(tmp_path, words):
    """It was never there, or was killed while it prepared."""
    (tmp_path / "runs" / "two").mkdir(parents=True)
    (tmp_path / "runs" / "two" / ".prepared").write_text(f"{words}\n")
    codes, texts = finish([start(1, "configs/smoke.yaml", tmp_path, "now", 1, PATIENCE_S="1")], timeout=60)
    assert codes == [1] and f"is '{words.removeprefix('now ') or 'nothing'}'" in texts[0]


@needs_make
@pytest.mark.parametrize(("rank", "words"), cases("multinode.alone"))
def test_a_node_that_finds_only_itself_is_refused(tmp_path, rank, words):
    """The other never came, has the same number or another folder; or what is given as the first one is the
    node itself."""
    folder = tmp_path / "runs" / "two"
    folder.mkdir(parents=True)
    (folder / ".node1").write_text("earlier node8\n")
    (folder / ".node0").write_text("now node7\n")
    (folder / ".prepared").write_text("now ready\n")
    codes, texts = finish(
        [start(rank, "configs/smoke.yaml", tmp_path, "now", 1, COMPANY_S="1", PYTHON="true")], timeout=60
    )
    assert codes == [1] and all(word in texts[0] for word in words), texts
    assert rank == 1 or (folder / ".prepared").read_text() == "now failed\n"


def test_a_first_node_that_prepares_for_long_is_waited_for(tmp_path):
    ready = tmp_path / "runs" / "two" / ".prepared"
    ready.parent.mkdir(parents=True)
    process, log = start(1, "configs/smoke.yaml", tmp_path, "now", 1, PATIENCE_S="4", PYTHON="true")
    for sign in range(6):
        ready.write_text(f"now preparing {sign}\n")
        time.sleep(1.0)
    assert process.poll() is None
    ready.write_text("now ready\n")
    codes, texts = finish([(process, log)], timeout=60)
    assert codes == [0], texts  # its stage is the command `true`


@pytest.mark.parametrize("name", ["node.sh", "slurm.sh"])
def test_scripts_are_sound(name):
    assert subprocess.run(["bash", "-n", str(CLUSTER / name)]).returncode == 0
    assert os.access(CLUSTER / name, os.X_OK)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: bash -n only")
    done = subprocess.run(["shellcheck", str(CLUSTER / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def fake(folder, name, text):
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    "state, code, is_requeued", [("preempted", 1, True), ("failed", 1, False), ("finished", 0, False)]
)
def test_a_preempted_slurm_job_is_requeued_and_no_other(tmp_path, state, code, is_requeued):
    """With srun and scontrol replaced by scripts that write down how they were called."""
    fake(
        tmp_path,
        "srun",
        f'env | grep -E "^(FIRST_NODE|NUM_NODES|NUM_GPUS|JOB)=" | sort >{tmp_path}/environment; exit {code}',
    )
    fake(
        tmp_path,
        "scontrol",
        f'if [[ $1 == show ]]; then echo node7; echo node8; else echo "$@" >{tmp_path}/requeued; fi',
    )
    status = tmp_path / "runs" / "small" / "operator"
    status.mkdir(parents=True)
    (status / "status.json").write_text(json.dumps({"status": state, "step": 3}, indent=1))
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "12",
        "RUNS": str(tmp_path / "runs"),
    }
    done = subprocess.run([str(CLUSTER / "slurm.sh")], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "environment").read_text().split() == [
        "FIRST_NODE=node7",
        "JOB=12.0",
        "NUM_GPUS=8",
        "NUM_NODES=2",
    ]
    assert (tmp_path / "requeued").is_file() == is_requeued
    assert not is_requeued or (tmp_path / "requeued").read_text() == "requeue 12\n"
