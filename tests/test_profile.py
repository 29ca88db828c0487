"""bench/profiling.py: a step's parts add up to the step, and nothing of the run is touched."""

from __future__ import annotations

import json
import re

import loop_stage
import pytest
import torch
from test_base_selection import make_caches

from bench import profiling
from ups.common.place import ROOT

RUN = [
    "data.tasks=[burgers1d]",
    "operator.model.width=16",
    "operator.model.depth=1",
    "operator.train.precision='no'",
]


def _profile(arguments: list[str]) -> None:
    profiling.MATRIX, profiling.COPY = {"cpu": 64}, {"cpu": 2**20}
    loop_stage.run_script("bench.profiling", arguments)


def test_the_parts_of_a_step_add_up_and_the_trace_names_them(tmp_path):
    make_caches(tmp_path, *RUN)
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
    codes, logs = loop_stage.run_ranks(tmp_path, _profile, lambda _rank: (arguments,))
    assert codes == [0], logs
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
