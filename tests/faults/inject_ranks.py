"""Faults of a rank: every stage, rank and kind of failure, then the same command again."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inject_runs import (
    LIMIT_S,
    SCRIPTS,
    STEP,
    STEPS,
    References,
    Result,
    check_digests,
    compare,
    leftovers,
    run_ranks,
    settings_of,
)

RANKS = {"0": [0], "1": [1], "both": [0, 1]}
ANY = {1, 124}  # a rank whose peer is gone: it notices by itself, or its guard does


@dataclass(frozen=True)
class Kind:
    """A fault and what must come of it. codes: of ranks that have it, of the others; None: any but 0."""

    description: dict[str, Any]
    outcome: str  # completes, skips or ends
    says: str  # pattern of the message that names the cause
    codes: tuple[set[int], set[int]] = ({0}, {0})
    is_exact: bool = True  # the end is bitwise that of the run without the fault
    settings: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ("0", "1", "both")
    stages: tuple[str, ...] = tuple(SCRIPTS)
    # what is wrong with the stage directory
    after: Callable[[Path], str | None] = field(default=lambda directory: None)


def died(codes: set[int], **options: Any) -> dict[str, Any]:
    return {"outcome": "ends", "codes": (codes, ANY), **options}


def agreed(code: int, **options: Any) -> dict[str, Any]:
    return {"outcome": "ends", "codes": ({code}, {code}), **options}


def status_is(expected: str) -> Callable[[Path], str | None]:
    def after(directory: Path) -> str | None:
        found = json.loads((directory / "status.json").read_text())["status"]
        return None if found == expected else f"status.json says {found}, not {expected}"

    return after


MEMORY = r"out of memory on [12] of 2 ranks in step 6; every rank repeats the batch"
LOST = r"(rank \d \(process \d+\) died without a word|rank \d failed: |KILLED)"
UNSAVED = r"rank [01] failed while writing the checkpoint of step 8"
KINDS: dict[str, Kind] = {
    "oom_forward": Kind({"kind": "oom_forward", "call": 1}, "completes", MEMORY, is_exact=False),
    "oom_forward_last": Kind({"kind": "oom_forward", "call": 2}, "completes", MEMORY, is_exact=False),
    "oom_backward": Kind({"kind": "oom_backward", "call": 1}, "completes", MEMORY, is_exact=False),
    "oom_backward_last": Kind({"kind": "oom_backward", "call": 2}, "completes", MEMORY, is_exact=False),
    "oom_five_steps": Kind(
        {"kind": "oom_forward", "repeat": 5},
        "completes",
        r"in step 10; every rank repeats",
        is_exact=False,
        settings=("batch_size=64", "micro_batch=32"),
    ),
    "oom_everywhere": Kind(
        {"kind": "oom_forward", "repeat": 5},
        is_exact=False,
        **agreed(1, says=(r"out of memory with a micro-batch of 1 on [12] of 2 ranks")),
    ),
    "oom_optimizer": Kind(
        {"kind": "oom_optimizer"},
        is_exact=False,
        says=r"with a micro-batch of 2 in the optimizer's step",
        **died({1}),
    ),
    "nan_loss": Kind(
        {"kind": "nan_loss"}, "skips", r"step 6 skipped: loss nan or its gradient is not finite"
    ),
    "nan_gradient": Kind(
        {"kind": "nan_gradient"}, "skips", r"step 6 skipped: loss [\d.e+-]+ or its gradient is not finite"
    ),
    "error_loader": Kind(
        {"kind": "error_loader"},
        **agreed(
            1,
            says=(
                r"rank [01] failed while computing step 6: OSError: \[Errno 5\] injected in reading the cache"
            ),
        ),
    ),
    "error_validation": Kind(
        {"kind": "error_validation"},
        **agreed(1, says=(r"rank [01] failed while validating: ArithmeticError: injected in validation")),
    ),
    "error_alone": Kind(
        {"kind": "error_alone"}, says="ArithmeticError: injected where no one looks", **died({1})
    ),
    "error_saving": Kind({"kind": "error_saving", "step": 8}, "completes", UNSAVED),
    "error_saving_last": Kind(
        {"kind": "error_saving", "step": STEPS},
        **agreed(1, says=(r"writing the checkpoint of step 12: OSError.*Free space on")),
    ),
    "full_saving": Kind({"kind": "full_saving", "step": 8}, "completes", UNSAVED),
    "full_saving_last": Kind({"kind": "full_saving", "step": STEPS}, **agreed(1, says="Free space on")),
    "full_logging": Kind(
        {"kind": "full_logging", "step": 7}, ranks=("0", "both"), **agreed(1, says=r"File too large")
    ),
    "kill": Kind({"kind": "kill", "call": 2}, says=LOST, **died({-9})),
    "kill_validation": Kind({"kind": "kill_validation"}, says=LOST, **died({-9})),
    "kill_saving": Kind({"kind": "kill_saving", "step": 8}, says=LOST, **died({-9})),
    "term": Kind(
        {"kind": "term"},
        after=status_is("preempted"),
        **agreed(143, says=r"told to stop \(signal\): saved step 7"),
    ),
    "term_saving": Kind(
        {"kind": "term_saving", "step": 8}, after=status_is("preempted"), **agreed(143, says=r"saved step 9")
    ),
    "int": Kind(
        {"kind": "int"},
        after=status_is("preempted"),
        **agreed(143, says=r"told to stop \(signal\): saved step 7"),
    ),
    "stop": Kind(
        {"kind": "stop"},
        ranks=("0", "1"),
        says=r"the laggard is rank [01]: .*its process does not answer",
        outcome="ends",
        codes=({-6, -9}, {124}),
    ),
    "hang_python": Kind(
        {"kind": "hang_python"},
        says=r"the laggard is rank [01]: at step 6, computing step 6",
        outcome="ends",
        codes=({124}, {124}),
    ),
    "hang_c": Kind(
        {"kind": "hang_c"},
        says=r"the laggard is rank [01]: at step 6, computing step 6",
        outcome="ends",
        codes=({124}, {124}),
    ),
    "hang_lock": Kind(
        {"kind": "hang_lock"},
        ranks=("0", "1"),
        says=r"its process does not answer",
        outcome="ends",
        codes=({-6, -9}, {124}),
    ),
    "exit0": Kind({"kind": "exit0"}, ranks=("0", "1"), says=LOST, outcome="ends", codes=({0}, ANY)),
    "error_fitting": Kind(
        {"kind": "error_fitting"},
        ranks=("0", "1"),
        stages=("operator",),
        **agreed(
            1,
            says=(
                r"(?s)rank ([01]) failed while fitting the bases: Arithmetic(?!.*rank (?!\1)[01] failed "
                r"while)"
            ),
        ),
    ),
    "term_twice": Kind(
        {"kind": "term_twice"},
        ranks=("1",),
        stages=("operator",),
        after=status_is("preempted"),
        **agreed(143, says=r"told to stop \(signal\): saved step 7"),
    ),
}
OF_THE_MODEL = "with a sharded model, whose ranks cannot agree to repeat a batch"
SHARDED: dict[str, Kind] = {  # a rank that fails in a pass ends all of them
    "kill": KINDS["kill"],
    "oom_backward": Kind({"kind": "oom_backward", "call": 1}, is_exact=False, says=OF_THE_MODEL, **died({1})),
    "error_loader": Kind({"kind": "error_loader"}, says=r"\[Errno 5\] injected in reading", **died({1})),
    "hang_c": KINDS["hang_c"],
}
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
    reference = references.get(stage, kind.settings, tuple(sound.items()))
    references.parents(stage, folder / "runs")
    directory = folder / "runs" / "smoke" / stage
    arguments = settings_of(work, folder / "runs", stage, kind.settings)
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
    elif wrong := kind.after(directory):
        problems.append(wrong)
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
