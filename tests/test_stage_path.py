"""The path of one stage: how many lines a reader opens who follows train_operator.py to the optimizer's step.

Measured by running a tiny stage under a profiler. Whole functions count, with signature, docstring and
messages: a reader opens the functions that run, and not the rest of their files (other modes, resuming,
failures). The path is the script, everything in ups/ that runs in one step, and the part of run.py before it.
The functions that run.py calls to start (process group, folder, guard, optimizer) have a limit of their own.
`python -m pytest -s tests/test_stage_path.py` prints the lines by file.
"""

import collections
import json
import sys
from pathlib import Path

import loop_stage
import pytest
from call_path import CallPath, depth_of, is_ours
from test_base_selection import TINY, make_caches

import train_operator
import ups.training.optim
import ups.training.run
from ups.common.place import ROOT

SETTINGS = ["data.tasks=[burgers1d]", "operator.train.steps=3", "operator.base_steps=2"]
MOST_LINES, MOST_OF_START = 1_500, 650
MOST_OF_STEP = CallPath(functions=80, files=25, depth=12)  # of one update; they may only fall


def trace(root: str, overrides: list[str]) -> None:
    """Run the stage and write the functions that ran to ROOT/functions.json: [part, file, first, last line],
    and to ROOT/step.json the `CallPath` of a step, of all packages.

    step: from the start of a turn of the loop to the end of the optimizer's step. start: functions of
    ups/training/ that run before it inside Run.start, seed_all, attach and steps.
    """
    ran, part, num_updates = {"step": set(), "start": set()}, "start", 0
    of_run, codes_of_step, deepest = ups.training.run.__file__, set(), 0

    def is_in_run(frame) -> bool:
        while frame is not None and frame.f_code.co_filename != of_run:
            frame = frame.f_back
        return frame is not None

    def on_call(frame, event, _argument) -> None:
        nonlocal deepest
        code = frame.f_code
        if event == "call" and part == "step" and is_ours(code):
            codes_of_step.add(code)
            deepest = max(deepest, depth_of(frame))
        if (
            event == "call"
            and code.co_filename.startswith(f"{ROOT}/ups/")
            and code not in ran.get(part, {code})
        ):
            if part == "step" or ("/ups/training/" in code.co_filename and is_in_run(frame)):
                ran[part].add(code)

    steps, update = ups.training.run.Run.steps, ups.training.optim.MuonAdamW.step

    def traced_steps(run):
        nonlocal part
        for step in steps(run):
            part = "step" if step == 1 else ""  # what is computed once has been computed
            yield step

    def traced_update(*arguments, **options) -> None:
        nonlocal part, num_updates
        update(*arguments, **options)
        num_updates += 1
        part = "" if num_updates == 2 else part

    ups.training.run.Run.steps, ups.training.optim.MuonAdamW.step = traced_steps, traced_update
    sys.setprofile(on_call)
    try:
        loop_stage.run_script(
            "train_operator", ["--config", str(ROOT / "configs" / "smoke.yaml"), *overrides]
        )
    finally:
        sys.setprofile(None)
        found = [
            (name, code.co_filename, code.co_firstlineno, max(line for *_, line in code.co_lines() if line))
            for name, codes in ran.items()
            for code in codes
        ]
        (Path(root) / "functions.json").write_text(json.dumps(found))
        (Path(root) / "step.json").write_text(json.dumps(CallPath.of(codes_of_step, deepest)))


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Part -> file -> number of lines; a line counts once."""
    root = tmp_path_factory.mktemp("path")
    make_caches(root, *SETTINGS)
    places = [f"data.root={root}/data", f"cache.root={root}/cache", f"run.root={root}/runs"]
    arguments = (str(root), [*places, *TINY, *SETTINGS])
    codes, logs = loop_stage.run_ranks(root, trace, lambda _rank: arguments)
    assert codes == [0], logs
    counts, counted = {"script": {}, "step": {}, "start": {}}, set()
    script = Path(train_operator.__file__)
    counts["script"][script.name] = len(script.read_text(encoding="utf-8").splitlines())
    for part in ("step", "start"):
        by_file = collections.Counter()
        for name, file, first, last in json.loads((root / "functions.json").read_text()):
            new = {(file, line) for line in range(first, last + 1)} - counted if name == part else set()
            counted |= new
            by_file[str(Path(file).relative_to(ROOT))] += len(new)
        counts[part] = dict(sorted((+by_file).items()))
    for part, by_file in counts.items():
        print(
            f"\n{part}: {sum(by_file.values())} lines", *(f"{n:6d} {f}" for f, n in by_file.items()), sep="\n"
        )
    step = CallPath(*json.loads((root / "step.json").read_text()))
    print(step)
    assert all(found <= most for found, most in zip(step, MOST_OF_STEP, strict=True)), (step, MOST_OF_STEP)
    return counts


def test_script_run_and_one_step_are_short(lines):
    assert {"ups/training/update.py", "ups/models/operator.py", "ups/models/windows.py"} <= lines[
        "step"
    ].keys()
    parts = (*lines["script"].values(), *lines["step"].values(), lines["start"]["ups/training/run.py"])
    assert sum(parts) <= MOST_LINES


def test_the_functions_that_start_a_run_are_short(lines):
    assert {"ups/training/ranks.py", "ups/training/folder.py"} <= lines["start"].keys()
    assert sum(lines["start"].values()) - lines["start"]["ups/training/run.py"] <= MOST_OF_START
