"""Faults of a rank: every stage, rank and kind of failure, then the same command again."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inject_runs import (
    LIMIT_S,
    SCRIPTS,
    STEP,
    References,
    Result,
    cases,
    check_digests,
    compare,
    leftovers,
    run_ranks,
    settings_of,
)

RANKS = {"0": [0], "1": [1], "both": [0, 1]}


@dataclass(frozen=True)
class Kind:
    """A fault and what must come of it. codes: of ranks that have it, of the others."""

    description: dict[str, Any]
    outcome: str  # completes, skips or ends
    says: str  # pattern of the message that names the cause
    codes: Sequence[Sequence[int]] = ((0,), (0,))
    is_exact: bool = True  # the end is bitwise that of the run without the fault
    settings: Sequence[str] = ()
    ranks: Sequence[str] = ("0", "1", "both")
    stages: Sequence[str] = tuple(SCRIPTS)
    status: str = ""  # in status.json of the stage directory


KINDS: dict[str, Kind] = {name: Kind(**row) for name, row in cases("matrix.ranks").items()}
# a rank that fails in a pass ends all of them
SHARDED: dict[str, Kind] = {name: Kind(**row) for name, row in cases("matrix.sharded").items()}
DIFFERENCES = {  # what rank 1 has otherwise: a setting, or a fault; and how that is called
    "save_every": ("operator.train.save_every=3", "operator.train.save_every is 4 on rank 0, 3 on rank 1"),
    "log_every": ("operator.train.log_every=2", "operator.train.log_every is 1 on rank 0, 2 on rank 1"),
    "max_skips": ("operator.train.max_skips=7", "operator.train.max_skips is"),
    "torch": ("", "the version of torch is"),
}
QUICK = {  # every outcome and rank; of the stages that cost most, what their own loss and files may fail at
    "operator": {
        "oom_optimizer": "1",
        "nan_gradient": "1",
        "error_loader": "1",
        "error_saving": "1",
        "full_logging": "0",
        "kill_saving": "0",
        "term": "0",
        "hang_c": "0",
    },
    "diffusion": {"kill": "1", "oom_backward_last": "0"},
    "consistency": {"kill_validation": "0"},
    "steady": {"oom_forward": "1", "exit0": "0"},
}
QUICK_DIFFERENCES = ("save_every",)


def rank_case(references: References, stage: str, ranks: str, name: str, is_sharded: bool = False) -> Result:
    """One fault, then the same command again."""
    kind, work = (SHARDED if is_sharded else KINDS)[name], references.work
    sound = {"is_sharded": True} if is_sharded else {}
    label = f"sharded {name}" if is_sharded else name
    result = Result(f"{stage}/{label}/{ranks}", [])
    folder = work / "cases" / f"{stage}_{label.replace(' ', '_')}_{ranks}"
    shutil.rmtree(folder, ignore_errors=True)
    reference = references.get(stage, tuple(kind.settings), tuple(sound.items()))
    references.parents(stage, folder / "runs")
    directory = folder / "runs" / "smoke" / stage
    arguments = settings_of(work, folder / "runs", stage, tuple(kind.settings))
    started = time.monotonic()
    fault = {"step": STEP, **kind.description, **sound, "ranks": RANKS[ranks]}
    ended = run_ranks(folder, stage, arguments, fault)
    problems = result.problems
    if struck := [float(path.read_text()) for path in folder.glob("struck*")]:
        result.end_s = max(ended.ends) - min(struck)
        if kind.outcome == "ends" and result.end_s > LIMIT_S:
            problems.append(f"ended {result.end_s:.0f} s after the fault")
    else:
        problems.append("the fault did not strike")
    for rank, code in enumerate(ended.codes):
        expected = kind.codes[0 if rank in RANKS[ranks] else 1]
        if code not in expected:
            problems.append(
                f"rank {rank} ended with {'a hang' if code is None else code}, not {sorted(expected)}"
            )
    if not re.search(kind.says, ended.text) and not ("KILLED" in kind.says and ranks == "both"):
        problems.append(f"no message matches {kind.says!r}")
    problems += check_digests(ended) + leftovers()
    is_done = (directory / "done.json").is_file()
    if is_done != (kind.outcome != "ends"):
        problems.append(f"done.json is {'there' if is_done else 'missing'} after the fault")
    elif kind.status and json.loads((directory / "status.json").read_text())["status"] != kind.status:
        problems.append(f"status.json does not say {kind.status}")
    if kind.outcome == "ends" and not problems:
        again = run_ranks(folder, stage, arguments, {"ranks": [], **sound})
        if again.codes != [0, 0]:
            problems.append(f"the same command again ended with {again.codes}")
        problems += check_digests(again) + leftovers()
    if not problems:
        if kind.outcome == "skips":
            key = ("skipped", stage, name)
            if json.loads((directory / "done.json").read_text())["num_skipped"] != 1:
                problems.append("not one update was skipped")
            reference = references.made.setdefault(key, directory)  # whichever rank: the same skip
        problems += compare(reference, directory, kind.is_exact)
    result.total_s = time.monotonic() - started
    if problems:
        result.note = f"see {folder}"
    elif kind.outcome != "skips":
        shutil.rmtree(folder)
    return result


def difference_case(references: References, name: str) -> Result:
    """Rank 1 has something that rank 0 has otherwise: both refuse, by name, before anything is made."""
    setting, says = DIFFERENCES[name]
    result, started = Result(f"operator/ranks differ in {name}", []), time.monotonic()
    folder = references.work / "cases" / f"operator_differ_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = settings_of(references.work, folder / "runs", "operator")
    fault = {"kind": "none" if setting else "other_version", "ranks": [1]}
    ended = run_ranks(folder, "operator", arguments, fault, by_rank={1: [setting] if setting else []})
    if ended.codes != [2, 2]:
        result.problems.append(f"exit codes {ended.codes}, not 2 of both")
    if f"the ranks do not agree: {says}" not in ended.text:
        result.problems.append(f"no message says that {says}")
    if (folder / "runs").exists():
        result.problems.append("something was made")
    result.problems += leftovers()
    result.total_s = time.monotonic() - started
    if result.problems:
        result.note = f"see {folder}"
    else:
        shutil.rmtree(folder)
    return result
