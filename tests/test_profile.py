"""bench/profiling.py: a step's parts add up to the step, and nothing of the run is touched."""

from __future__ import annotations

import json
import os
import re
import sys
import time

import loop_stage
import pytest
import torch
from test_base_selection import make_caches

from bench import profiling
from ups.config import ROOT

RUN = [
    "data.tasks=[burgers1d]",
    "operator.model.width=16",
    "operator.model.depth=1",
    "operator.train.precision='no'",
]


def _profile(log: str, arguments: list[str]) -> None:
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    profiling.MATRIX, profiling.COPY = {"cpu": 64}, {"cpu": 2**20}
    sys.argv = ["profiling", *arguments]
    profiling.main()


def test_the_parts_of_a_step_add_up_and_the_trace_names_them(tmp_path):
    make_caches(tmp_path, *RUN)
    os.environ["PYTHONPATH"] = ":".join(map(str, (ROOT / "tests", ROOT / "tests" / "faults", ROOT)))
    log = tmp_path / "log"
    arguments = [
        "operator",
        "--config",
        str(ROOT / "configs" / "smoke.yaml"),
        f"data.root={tmp_path}/data",
        f"cache.root={tmp_path}/cache",
        f"run.root={tmp_path}/runs",
        "task.burgers1d.parameters=[0.05,0.1]",
        "task.burgers1d.num_trajectories=20",
        *RUN,
        "--steps",
        "3",
        "--warm-up",
        "1",
    ]
    process = loop_stage._context.Process(target=_profile, args=(str(log), arguments))
    began = time.monotonic()
    process.start()
    process.join(60)
    assert process.exitcode == 0 and time.monotonic() - began < 60, log.read_text()
    folder = tmp_path / "runs" / "smoke" / "profile-operator"
    text = (folder / "profile.txt").read_text()
    step = float(
        re.match(r"operator: ([\d.]+) ms a step \(processor time, mean of 3 from step 1 on", text)[1]
    )
    parts = {
        name.strip(): float(ms)
        for name, ms in re.findall(r"^  ([a-z ]+?) +(-?[\d.]+) ms +-?[\d.]+%$", text, re.M)
    }
    assert {*parts} == {*profiling.PARTS, "between updates"} and sum(parts.values()) == pytest.approx(
        step, rel=0.02, abs=0.1
    )
    assert all(parts[name] > 0 for name in ("forward pass", "backward pass", "optimizer and average"))
    assert re.search(r"[\d.]+ GFLOP a step: .* of .* measured here", text) and "aten::" in text
    names = {event.get("name") for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert {"forward pass", "backward pass", "optimizer and average"} <= names
    assert {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()} == {
        "trace.json",
        "profile.txt",
    }


def test_flops_and_bytes_of_a_product_are_counted():
    one, two = torch.randn(8, 16), torch.randn(16, 4)
    with profiling.FlopCounterMode(display=False) as counter, profiling.Moved() as moved:
        one @ two.view(16, 4)
    assert counter.get_total_flops() == 2 * 8 * 16 * 4
    assert moved.num_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)  # a view moves nothing
