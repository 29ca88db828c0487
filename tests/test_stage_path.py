"""The path of one update: how many functions and files of ours run from the start of a turn to the end of the
optimizer's step, and how deeply they are nested, in a tiny stage under a profiler."""

import json
import sys
from pathlib import Path

import loop_stage
from call_path import CallPath, depth_of, is_ours
from test_base_selection import TINY, make_caches

import ups.training.optim
import ups.training.run
from ups.common.place import ROOT

SETTINGS = ["data.tasks=[burgers1d]", "operator.train.steps=3", "operator.base_steps=2"]
MOST = CallPath(functions=80, files=25, depth=11)  # they may only fall


def trace(root: str, overrides: list[str]) -> None:
    """Run the stage and write the `CallPath` of its second update to ROOT/step.json."""
    is_traced, num_updates, codes, deepest = False, 0, set(), 0
    steps, update = ups.training.run.Run.steps, ups.training.optim.MuonAdamW.step

    def on_call(frame, event, _argument) -> None:
        nonlocal deepest
        if event == "call" and is_traced and is_ours(frame.f_code):
            codes.add(frame.f_code)
            deepest = max(deepest, depth_of(frame))

    def traced_steps(run):
        nonlocal is_traced
        for step in steps(run):
            is_traced = step == 1  # what is computed once has been computed
            yield step

    def traced_update(*arguments, **options) -> None:
        nonlocal is_traced, num_updates
        update(*arguments, **options)
        num_updates += 1
        is_traced = is_traced and num_updates != 2

    ups.training.run.Run.steps, ups.training.optim.MuonAdamW.step = traced_steps, traced_update
    sys.setprofile(on_call)
    try:
        loop_stage.run_script(
            "train_operator", ["--config", str(ROOT / "configs" / "smoke.yaml"), *overrides]
        )
    finally:
        sys.setprofile(None)
        (Path(root) / "step.json").write_text(json.dumps(CallPath.of(codes, deepest)))


def test_the_path_of_an_update_is_short(tmp_path):
    make_caches(tmp_path, *SETTINGS)
    places = [f"data.root={tmp_path}/data", f"cache.root={tmp_path}/cache", f"run.root={tmp_path}/runs"]
    codes, logs = loop_stage.run_ranks(
        tmp_path, trace, lambda _rank: (str(tmp_path), [*places, *TINY, *SETTINGS])
    )
    assert codes == [0], logs
    step = CallPath(*json.loads((tmp_path / "step.json").read_text()))
    assert all(0 < found <= most for found, most in zip(step, MOST, strict=True)), (step, MOST)
