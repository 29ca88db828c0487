"""The injection matrix: what becomes of a run when something goes wrong, for every stage, rank and fault; anyone can run it.

    python tests/inject.py                                   all of it (some 40 minutes on one core)
    python tests/inject.py --quick                           a representative part of every stage (a few minutes)
    python tests/inject.py --stages operator --ranks 1 --faults kill,hang_c
    python tests/inject.py --list

Every case runs a real stage script on two CPU processes, with a fault put in by tests/injected.py, then the same command again.
It passes if everything ended within LIMIT_S of the fault, exit codes are right, a message names the cause, the ranks' weights
were equal after every update, the end equals that of a run without the fault (bit by bit, but where the micro-batch changed), and
no process is left. Ranks are forked from this process, which has imported torch once; the cases called launcher/* go through
ups/launch.py and accelerate launch. Prints a table, writes it as JSON, exits 1 if a case failed. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ups.processes import adopt_orphans, descendants, die_with_parent, end_processes  # noqa: E402

LIMIT_S = 30.0       # from the fault to the end of the last process
CASE_S = 150.0       # for a whole run
HANG_S, LAUNCHED_HANG_S = 8.0, 12.0   # a fresh process imports what a fork has: seconds without progress
STEP, STEPS, SAVE = 6, 12, 4   # of the fault, of a run, between checkpoints
TASKS = ("burgers1d_hidden", "darcy2d_grf")
SCRIPTS = {"operator": "train_operator.py", "diffusion": "train_diffusion.py", "consistency": "train_consistency.py",
           "steady": "train_steady.py"}
PARENTS = {"operator": [], "diffusion": ["operator"], "consistency": ["operator", "diffusion"], "steady": ["operator"]}
RANKS = {"0": [0], "1": [1], "both": [0, 1]}
ANY = {1, 124}       # a rank whose peer is gone: it notices by itself, or its guard does


@dataclass(frozen=True)
class Kind:
    """A fault and what must come of it. codes: of ranks that have it, of the others; None: any but 0."""

    description: dict[str, Any]
    outcome: str                       # completes, skips or ends
    says: str                          # pattern of the message that names the cause
    codes: tuple[set[int], set[int]] = ({0}, {0})
    is_exact: bool = True              # the end is bitwise that of the run without the fault
    settings: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ("0", "1", "both")
    after: Callable[[Path], str | None] = field(default=lambda directory: None)   # what is wrong with the stage directory


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
    "oom_five_steps": Kind({"kind": "oom_forward", "repeat": 5}, "completes", r"in step 10; every rank repeats", is_exact=False,
                           settings=("batch_size=64", "micro_batch=32")),
    "oom_everywhere": Kind({"kind": "oom_forward", "repeat": 5}, is_exact=False, **agreed(1, says=(
        r"out of memory on [12] of 2 ranks with a micro-batch of 1"))),
    "oom_optimizer": Kind({"kind": "oom_optimizer"}, is_exact=False, says=r"with a micro-batch of 2 in the optimizer's step",
                          **died({1})),
    "nan_loss": Kind({"kind": "nan_loss"}, "skips", r"step 6 skipped: loss nan or its gradient is not finite"),
    "nan_gradient": Kind({"kind": "nan_gradient"}, "skips", r"step 6 skipped: loss [\d.e+-]+ or its gradient is not finite"),
    "error_loader": Kind({"kind": "error_loader"}, **agreed(1, says=(
        r"rank [01] failed while computing step 6: OSError: \[Errno 5\] injected in reading the cache"))),
    "error_validation": Kind({"kind": "error_validation"}, **agreed(1, says=(
        r"rank [01] failed while validating: ArithmeticError: injected in validation"))),
    "error_alone": Kind({"kind": "error_alone"}, says="ArithmeticError: injected where no one looks", **died({1})),
    "error_saving": Kind({"kind": "error_saving", "step": 8}, "completes", UNSAVED),
    "error_saving_last": Kind({"kind": "error_saving", "step": STEPS}, **agreed(1, says=(
        r"writing the checkpoint of step 12: OSError.*Free space on"))),
    "full_saving": Kind({"kind": "full_saving", "step": 8}, "completes", UNSAVED),
    "full_saving_last": Kind({"kind": "full_saving", "step": STEPS}, **agreed(1, says="Free space on")),
    "full_logging": Kind({"kind": "full_logging", "step": 7}, ranks=("0", "both"), **agreed(1, says=r"File too large")),
    "kill": Kind({"kind": "kill", "call": 2}, says=LOST, **died({-9})),
    "kill_validation": Kind({"kind": "kill_validation"}, says=LOST, **died({-9})),
    "kill_saving": Kind({"kind": "kill_saving", "step": 8}, says=LOST, **died({-9})),
    "term": Kind({"kind": "term"}, after=status_is("preempted"), **agreed(143, says=r"told to stop \(signal\): saved step 7")),
    "term_saving": Kind({"kind": "term_saving", "step": 8}, after=status_is("preempted"), **agreed(143, says=r"saved step 9")),
    "int": Kind({"kind": "int"}, after=status_is("preempted"), **agreed(143, says=r"told to stop \(signal\): saved step 7")),
    "stop": Kind({"kind": "stop"}, ranks=("0", "1"), says=r"the laggard is rank [01]: .*its process does not answer",
                 outcome="ends", codes=({-6, -9}, {124})),
    "hang_python": Kind({"kind": "hang_python"}, says=r"the laggard is rank [01]: at step 6, computing step 6",
                        outcome="ends", codes=({124}, {124})),
    "hang_c": Kind({"kind": "hang_c"}, says=r"the laggard is rank [01]: at step 6, computing step 6",
                   outcome="ends", codes=({124}, {124})),
    "hang_lock": Kind({"kind": "hang_lock"}, ranks=("0", "1"), says=r"its process does not answer", outcome="ends",
                      codes=({-6, -9}, {124})),
    "exit0": Kind({"kind": "exit0"}, ranks=("0", "1"), says=LOST, outcome="ends", codes=({0}, ANY)),
}
QUICK = {   # every outcome, every rank, every stage
    "operator": {"oom_optimizer": "1", "error_alone": "0", "full_logging": "0", "kill_saving": "0", "stop": "1", "term": "0"},
    "diffusion": {"kill": "1", "oom_backward_last": "0", "nan_gradient": "1"},
    "consistency": {"hang_c": "0", "error_loader": "1", "kill_validation": "0"},
    "steady": {"oom_forward": "1", "error_saving": "1", "exit0": "0"},
}


@dataclass
class Result:
    case: str
    problems: list[str]
    end_s: float | None = None         # from the fault to the end of the last process
    total_s: float = 0.0
    note: str = ""


# ---------------------------------------------------------------- runs


def settings_of(work: Path, root: Path, stage: str, more: tuple[str, ...] = ()) -> list[str]:
    """The command line of a stage: tiny, on data that all cases share."""
    tasks = [f"data.tasks=[{','.join(TASKS)}]", "task.burgers1d_hidden.resolution=32", "task.burgers1d_hidden.num_frames=10",
             "task.burgers1d_hidden.t_end=0.45", "task.burgers1d_hidden.degree=1", "task.darcy2d_grf.resolution=16",
             "evaluate.context_frames=4", "operator.base_steps=5", "diffusion.min_residual_ratio=0.001",
             "diffusion.max_whitened_std=1000", "consistency.tune_fraction=0.3", "consistency.members=2"]
    sections = [f"{section}.{key}" for section in SCRIPTS for key in (
        f"train.steps={STEPS}", f"train.save_every={SAVE}", "train.validate_every=6", "train.log_every=1", "train.batch_size=8",
        "train.micro_batch=2", "train.precision='no'", "train.validate_trajectories=1", f"train.hang_s={HANG_S}",
        "train.timeout_s=60")]
    models = [f"{section}.{key}" for section in ("operator", "diffusion", "steady") for key in
              ("model.width=16", "model.depth=1", "model.modes=4")]
    scales = ["diffusion.scale_steps=10", "steady.scale_steps=10"]
    return ["--config", str(ROOT / "configs" / "smoke.yaml"), f"run.root={root}", f"data.root={work}/data",
            f"cache.root={work}/cache", *tasks, *sections, *models, *scales, *(f"{stage}.train.{text}" for text in more)]


def fork(function: Callable[[], Any], log: Path, environment: dict[str, str]) -> int:
    """A child of this process that calls `function`, prints to `log` and ends with the exit code a script would have."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        for name in list(os.environ):
            if name.startswith(("ACCELERATE_", "MASTER_", "UPS_", "TORCHELASTIC")) or name in ("RANK", "WORLD_SIZE"):
                del os.environ[name]
        os.environ.update(environment)
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # what the interpreter would print
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], until: float) -> tuple[list[int | None], list[float]]:
    """Exit codes (None: had to be killed) and times of the ends."""
    codes: dict[int, int | None] = {}
    ends: dict[int, float] = {}
    while len(codes) < len(pids) and time.monotonic() < until:
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid], ends[pid] = os.waitstatus_to_exitcode(status), time.time()
        time.sleep(0.01)
    for pid in set(pids) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid], ends[pid] = None, time.time()
    return [codes[pid] for pid in pids], [ends[pid] for pid in pids]


@dataclass
class Ended:
    codes: list[int | None]
    ends: list[float]
    text: str
    digests: list[dict[str, str]]


def run_ranks(folder: Path, stage: str, arguments: list[str], fault: dict[str, Any], world: int = 2) -> Ended:
    """A stage on `world` forked ranks."""
    import injected
    import loop_stage

    folder.mkdir(parents=True, exist_ok=True)
    port = loop_stage.free_port()
    number = len(list(folder.glob("*.log")))
    logs = [folder / f"{number + rank}.rank{rank}.log" for rank in range(world)]
    for path in folder.glob("digests*"):
        path.unlink()
    description = {"ranks": [], "once": str(folder / "struck"), "digests": str(folder / "digests"), **fault}
    pids = []
    for rank, log in enumerate(logs):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"} if world > 1 else {}
        pids.append(fork(lambda: injected.run_script(description, str(ROOT / SCRIPTS[stage]), arguments), log, group))
    codes, ends = wait(pids, time.monotonic() + CASE_S)
    digests = [json.loads(path.read_text()) for path in sorted(folder.glob("digests*"))]
    return Ended(codes, ends, "\n".join(log.read_text(errors="replace") for log in logs if log.is_file()), digests)


def prepare(work: Path) -> None:
    """Data and caches, once."""
    import prepare_cache
    import prepare_data

    arguments = settings_of(work, work / "none", "operator")
    for name, call in (("data", lambda: prepare_data.main([*arguments, "--workers", "1"])),
                       ("cache", lambda: prepare_cache.main(arguments))):
        codes, _ = wait([fork(lambda call=call: sys.exit(call()), work / f"{name}.log", {})], time.monotonic() + 600)
        if codes != [0]:
            sys.exit(f"preparing the {name} failed: see {work / name}.log")


class References:
    """Runs without a fault, made when first asked for."""

    def __init__(self, work: Path) -> None:
        self.work, self.made = work, {}

    def parents(self, stage: str, root: Path) -> None:
        """Give `root` what `stage` is made from."""
        for parent in PARENTS[stage]:
            shutil.copytree(self.get(parent), root / "smoke" / parent)

    def get(self, stage: str, more: tuple[str, ...] = ()) -> Path:
        """Directory of a finished stage."""
        key = (stage, more)
        if key not in self.made:
            folder = self.work / "references" / "_".join([stage, *more]).replace("=", "")
            shutil.rmtree(folder, ignore_errors=True)   # of an earlier call, perhaps with other code
            self.parents(stage, folder / "runs")
            ended = run_ranks(folder, stage, settings_of(self.work, folder / "runs", stage, more), {})
            if ended.codes != [0, 0]:
                sys.exit(f"a run without a fault failed with exit codes {ended.codes}:\n{ended.text[-3000:]}")
            self.made[key] = folder / "runs" / "smoke" / stage
        return self.made[key]


def compare(one: Path, two: Path, is_exact: bool) -> list[str]:
    """What differs between the ends of two runs: weights, results and every logged number but clocks."""
    import torch
    from safetensors.torch import load_file

    problems = []
    a, b = (load_file(path / "model.safetensors") for path in (one, two))
    if a.keys() != b.keys():
        return ["the exported weights have other names"]
    for name in a:
        if is_exact and not torch.equal(a[name], b[name]):
            problems.append(f"weights differ in {name} by {float((a[name].double() - b[name].double()).abs().max()):.1e}")
            break
        if not is_exact and not torch.allclose(a[name].double(), b[name].double(), rtol=2e-2, atol=2e-3):
            problems.append(f"weights differ in {name} by {float((a[name].double() - b[name].double()).abs().max()):.1e}")
            break
    lines = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (one, two)]
    keys = [[(line["step"], sorted(line)) for line in part] for part in lines]
    if keys[0] != keys[1]:
        problems.append(f"metrics.jsonl has gaps or repetitions: {len(keys[0])} and {len(keys[1])} lines")
    elif is_exact:
        clocks = ("time", "steps_per_s")
        plain = [[{k: v for k, v in line.items() if k not in clocks} for line in part] for part in lines]
        if different := [a["step"] for a, b in zip(*plain, strict=True) if json.dumps(a) != json.dumps(b)]:
            problems.append(f"logged numbers differ from step {different[0]} on")
    return problems


def leftovers() -> list[str]:
    """Processes that a case left behind, which are ended."""
    pids = descendants(os.getpid())
    if not pids:
        return []
    end_processes(lambda: descendants(os.getpid()), 0.0)
    return [f"{len(pids)} processes are left"]


def check_digests(ended: Ended) -> list[str]:
    """Steps after which the ranks' weights differed."""
    if len(ended.digests) < 2:
        return []
    one, two = ended.digests
    different = [step for step in one.keys() & two.keys() if one[step] != two[step]]
    return [f"the ranks' weights differ after steps {sorted(map(int, different))}"] if different else []


def rank_case(references: References, stage: str, ranks: str, name: str) -> Result:
    """One fault, then the same command again."""
    kind, work = KINDS[name], references.work
    result = Result(f"{stage}/{name}/{ranks}", [])
    folder = work / "cases" / f"{stage}_{name}_{ranks}"
    shutil.rmtree(folder, ignore_errors=True)
    reference = references.get(stage, kind.settings)
    references.parents(stage, folder / "runs")
    directory = folder / "runs" / "smoke" / stage
    arguments = settings_of(work, folder / "runs", stage, kind.settings)
    started = time.monotonic()
    ended = run_ranks(folder, stage, arguments, {"step": STEP, **kind.description, "ranks": RANKS[ranks]})
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
            problems.append(f"rank {rank} ended with {'a hang' if code is None else code}, not {sorted(expected)}")
    if not re.search(kind.says, ended.text) and not ("KILLED" in kind.says and ranks == "both"):
        problems.append(f"no message matches {kind.says!r}")
    problems += check_digests(ended) + leftovers()
    is_done = (directory / "done.json").is_file()
    if is_done != (kind.outcome != "ends"):
        problems.append(f"done.json is {'there' if is_done else 'missing'} after the fault")
    elif wrong := kind.after(directory):
        problems.append(wrong)
    if kind.outcome == "ends" and not problems:
        again = run_ranks(folder, stage, arguments, {"ranks": []})
        if again.codes != [0, 0]:
            problems.append(f"the same command again ended with {again.codes}")
        problems += check_digests(again) + leftovers()
    if not problems:
        if kind.outcome == "skips":
            key = ("skipped", stage, name)
            if json.loads((directory / "done.json").read_text())["num_skipped"] != 1:
                problems.append("not one update was skipped")
            reference = references.made.setdefault(key, directory)   # whichever rank: the same skip
        problems += compare(reference, directory, kind.is_exact)
    result.total_s = time.monotonic() - started
    if problems:
        result.note = f"see {folder}"
    elif kind.outcome != "skips":
        shutil.rmtree(folder)
    return result


# ---------------------------------------------------------------- moments of saving, ending and building a cache


EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")


def strike_at(number: int, count: Path, owner: Any, names: tuple[str, ...]) -> None:
    """Kill this process at the `number`-th file operation inside owner.names (count them if it is 0)."""
    inside, seen, fsync = [0], [0], os.fsync

    def moment(*_: Any) -> None:
        if not inside[0]:
            return
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def flushing(handle: int) -> None:
        moment()
        fsync(handle)
        moment()

    os.fsync = flushing
    sys.addaudithook(lambda event, _: moment() if event in EVENTS else None)
    def watched(before: Callable) -> Callable:
        def changed(*arguments: Any, **options: Any) -> Any:
            inside[0] += 1
            try:
                return before(*arguments, **options)
            finally:
                inside[0] -= 1
                if number == 0:
                    inside_now, inside[0] = inside[0], 0
                    count.write_text(str(seen[0]))
                    inside[0] = inside_now
        return changed

    for name in names:
        setattr(owner, name, watched(getattr(owner, name)))


def moments_case(references: References, stage: str, where: str, number: int) -> Result:
    """Kill -9 at `number` random file operations of saving or of the stage's end, each time followed by the same command."""
    import injected

    import ups.checkpoint
    import ups.loop

    work, result, started = references.work, Result(f"{stage}/kill at {number} moments of {where}", []), time.monotonic()
    targets = {"saving": (ups.checkpoint.Checkpoints, ("save",)), "the end": (ups.loop.Run, ("finish", "close"))}
    folder = work / "cases" / f"{stage}_moments_{where.replace(' ', '')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference, before = folder / "reference", folder / "before"
    script = str(ROOT / SCRIPTS[stage])

    def run(root: Path, at: int | None, steps: str = "none") -> int | None:
        def child() -> None:
            if at is not None:
                strike_at(at, folder / "count", *targets[where])
            fault = {"kind": "term", "ranks": [0], "step": int(steps), "once": str(folder / "term")} if steps != "none" else {}
            injected.run_script({"ranks": [], **fault}, script, settings_of(work, root, stage, ("save_every=1",)))
        return wait([fork(child, root.with_suffix(".log"), {})], time.monotonic() + CASE_S)[0][0]

    for root in (reference, before):
        references.parents(stage, root)
    if run(reference, 0) != 0 or run(before, None, str(STEPS - 3)) != 143:
        result.problems.append("a run without a kill failed")
        return result
    draws = random.Random(f"{stage} {where}")
    total = int((folder / "count").read_text())
    total = max(1, total * 3 // STEPS) if where == "saving" else total   # the kills hit the last two steps' saves
    for turn in range(number):
        at, root = draws.randint(1, total), folder / f"turn{turn}"
        shutil.copytree(before, root)
        code = run(root, at)
        if code not in (-9, 0):
            result.problems.append(f"killed at operation {at}, it ended with {code}")
        again = run(root, None)
        wrong = [f"the same command again ended with {again}"] if again != 0 else compare(
            reference / "smoke" / stage, root / "smoke" / stage, True)
        result.problems += [f"killed at operation {at} of {total}: {text}" for text in wrong]
        if wrong:
            result.note = f"see {root}"
            break
        shutil.rmtree(root)
    result.total_s = time.monotonic() - started
    return result


def cache_case(references: References, number: int) -> Result:
    """Kill -9 at `number` random moments of building a cache, each time followed by the same command."""
    import prepare_cache

    work, result, started = references.work, Result(f"cache/kill at {number} moments", []), time.monotonic()
    folder = work / "cases" / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def build(*more: str, limit: int | None = None) -> int:
        arguments = [*settings_of(work, folder, "operator"), f"cache.root={folder / 'cache'}", *more]

        def child() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                sys.exit(prepare_cache.main(arguments))
            except (ValueError, OSError) as error:   # as the script itself does
                sys.exit(f"prepare_cache.py: {error}")
        return fork(child, folder / "log", {})

    def hashes() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "cache").iterdir())}

    if wait([build()], time.monotonic() + CASE_S)[0] != [0]:
        result.problems.append("building without a kill failed")
        return result
    reference, begun = hashes(), time.monotonic()
    shutil.rmtree(folder / "cache")
    wait([build()], time.monotonic() + CASE_S)
    duration, draws = time.monotonic() - begun, random.Random("cache")
    for _ in range(number):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        after = draws.uniform(0.0, duration)
        pid = build()
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if (wait([build()], time.monotonic() + CASE_S)[0] != [0] or hashes() != reference
                or wait([build("--verify")], time.monotonic() + CASE_S)[0] != [0]):
            result.problems.append(f"killed after {after:.3f} of {duration:.3f} s, the same command did not give the same caches")
            break
    shutil.rmtree(folder / "cache", ignore_errors=True)
    (folder / "log").unlink()   # the limit is on it, too
    code, _ = wait([build(limit=20_000)], time.monotonic() + CASE_S)
    if code != [1] or not re.search(r"cannot write .*File too large", (folder / "log").read_text()):
        result.problems.append(f"without space it ended with {code} and no clear message")
    if wait([build()], time.monotonic() + CASE_S)[0] != [0] or hashes() != reference:
        result.problems.append("after a full disk the same command did not give the same caches")
    result.total_s = time.monotonic() - started
    return result


# ---------------------------------------------------------------- through the launcher


@dataclass(frozen=True)
class Launch:
    """What is done to a launched stage. whom: supervisor, launcher, rank or ranks; or a fault inside (then no signal)."""

    code: set[int]
    says: str
    whom: str = ""
    number: int = 0
    fault: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    continues: bool = False             # ended, the same command is given again; else it must be finished
    then: int = 0                       # a signal to the same process after 3 s


LAUNCHES: dict[str, Launch] = {
    "kill rank": Launch({0}, r"launch: .*Starting again from the checkpoint of step", "rank", signal.SIGKILL),
    "kill launcher": Launch({0}, r"launch: .*Starting again from the checkpoint of step", "launcher", signal.SIGKILL),
    "kill supervisor": Launch({-9}, r"", "supervisor", signal.SIGKILL, continues=True),
    "term supervisor": Launch({143}, r"told to stop \(signal\): saved step", "supervisor", signal.SIGTERM, continues=True),
    "int supervisor": Launch({130}, r"told to stop \(signal\): saved step", "supervisor", signal.SIGINT, continues=True),
    "term launcher": Launch({143}, r"told to stop \(signal\): saved step", "launcher", signal.SIGTERM, continues=True),
    "int launcher": Launch({143}, r"told to stop \(signal\): saved step", "launcher", signal.SIGINT, continues=True),
    "term rank": Launch({143}, r"told to stop \(signal\): saved step", "rank", signal.SIGTERM, continues=True),
    "stop rank": Launch({0}, r"laggard is rank 1[\s\S]*launch: .*Starting again", "rank", signal.SIGSTOP),
    "stop ranks": Launch({0}, r"launch: no heartbeat for \d+ s. Starting again", "ranks", signal.SIGSTOP),
    "stop launcher": Launch({0}, r"launch: the launcher \(process \d+\) is stopped. Starting again", "launcher", signal.SIGSTOP),
    "stop and continue supervisor": Launch({0}, r"finished operator", "supervisor", signal.SIGSTOP, then=signal.SIGCONT),
    "out of memory in the optimizer": Launch({0}, r"out of memory with a micro-batch of 2[\s\S]*Starting again",
                                             fault={"kind": "oom_optimizer", "ranks": [1]}),
    "out of memory with overlap": Launch({0}, r"out of memory with a micro-batch of 2 with ddp.overlap[\s\S]*Starting again",
                                         fault={"kind": "oom_backward", "ranks": [1]}, settings=("ddp.overlap=true",)),
    "error": Launch({1}, r"launch: not started again: rank [01]: .*injected in reading", continues=True,
                    fault={"kind": "error_loader", "ranks": [1]}),
    "every rank leaves with 0": Launch({1}, r"launch: not started again: all ranks left before the stage was finished",
                                       fault={"kind": "exit0", "ranks": [0, 1]}, continues=True),
    "crash loop": Launch({1}, r"launch: giving up after 1 restarts without a new checkpoint", continues=True,
                         fault={"kind": "kill", "ranks": [1], "step": 1, "repeat": 99}),
    "refused configuration": Launch({2}, r"expected at least 1|unknown key", settings=("operator.train.sav_every=1",)),
}
QUICK_LAUNCHES = ("kill rank",)


def launcher_case(references: References, name: str) -> Result:
    """The operator through ups/launch.py, with a signal or a fault, then the same command again."""
    case, work, result, started = LAUNCHES[name], references.work, Result(f"launcher/{name}", []), time.monotonic()
    folder = work / "cases" / f"launcher_{name.replace(' ', '_')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    directory, problems = folder / "runs" / "smoke" / "operator", result.problems
    slow = {"kind": "slow", "ranks": [0, 1], "step": 0, "repeat": 99} if case.number else {"kind": "none", "ranks": []}
    fault = {"step": STEP, **(case.fault or slow), "once": str(folder / "struck")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_", "UPS_"))}
    environment["PYTHONPATH"] = str(ROOT)   # for injected.py, which lies beside the tests

    def start(fault: dict[str, Any], log: Path) -> subprocess.Popen:
        patience = f"hang_s={LAUNCHED_HANG_S}"
        arguments = [*settings_of(work, folder / "runs", "operator", (patience,)), *case.settings]
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "ups.launch", "--restarts", "1", "--config_file",
                 str(ROOT / "accelerate_configs" / "cpu2.yaml"), str(ROOT / "tests" / "injected.py"), json.dumps(fault),
                 str(ROOT / SCRIPTS["operator"]), *arguments], stdout=file, stderr=file, cwd=ROOT, env=environment)

    def ranks() -> list[dict]:
        found = []
        for path in sorted((directory / "heartbeat").glob("rank*.json")):
            with contextlib.suppress(ValueError):
                found.append(json.loads(path.read_text()))
        return found

    process = start(fault, folder / "log")
    try:
        if case.number:   # as soon as there is a checkpoint and a step after it
            until = time.monotonic() + CASE_S
            while process.poll() is None and time.monotonic() < until:
                if len(ranks()) == 2 and min(rank["step"] for rank in ranks()) > SAVE:
                    break
                time.sleep(0.05)
            if process.poll() is not None:
                raise IndexError
            pids = {"supervisor": [process.pid], "rank": [rank["pid"] for rank in ranks()[1:]],
                    "ranks": [rank["pid"] for rank in ranks()]}
            pids["launcher"] = [int(Path(f"/proc/{pids['ranks'][0]}/stat").read_text().rpartition(")")[2].split()[1])]
            struck = time.time()
            for pid in pids[case.whom]:
                os.kill(pid, case.number)
            if case.then:
                time.sleep(3.0)
                os.kill(pids[case.whom][0], case.then)
        while case.number and process.poll() is None and "launch: " not in (folder / "log").read_text(errors="replace"):
            time.sleep(0.05)
        said_at = time.time()
        code = process.wait(CASE_S)
    except (subprocess.TimeoutExpired, IndexError) as error:
        code = None
        problems.append(f"it did not get to the fault or hangs after it ({type(error).__name__})")
        process.kill()
        process.wait()
    if case.number and code is not None:
        while case.whom == "supervisor" and descendants(os.getpid()) and time.time() - struck < LIMIT_S:
            time.sleep(0.05)
        result.end_s = (time.time() if case.whom == "supervisor" else said_at) - struck   # else: until it is started again
        if result.end_s > LIMIT_S and not case.then:
            problems.append(f"ended {result.end_s:.0f} s after the fault")
    text = (folder / "log").read_text(errors="replace")
    if code not in case.code:
        problems.append(f"exit code {code}, not {sorted(case.code)}")
    if not re.search(case.says, text):
        problems.append(f"no message matches {case.says!r}")
    problems += leftovers()
    if case.continues and not problems:
        if (directory / "done.json").is_file():
            problems.append("done.json is there after the fault")
        if start({"kind": "none", "ranks": []}, folder / "log").wait(CASE_S) != 0:
            problems.append("the same command again failed")
        problems += leftovers()
    if not problems and 2 not in case.code:
        is_exact = "out of memory" not in name
        problems += compare(references.get("operator"), directory, is_exact)
    result.total_s = time.monotonic() - started
    if problems:
        result.note = f"see {folder}"
    return result


# ---------------------------------------------------------------- all of it


def cases(options: argparse.Namespace, references: References) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(name, case) of everything that was asked for."""
    faults = options.faults or [*KINDS, "moments", "cache", "launcher"]
    moments = 3 if options.quick else options.moments
    for stage in options.stages:
        for name in (fault for fault in faults if fault in KINDS):
            wanted = QUICK[stage].get(name, ()) if options.quick else KINDS[name].ranks
            for ranks in (ranks for ranks in options.ranks if ranks in wanted):
                yield f"{stage}/{name}/{ranks}", lambda s=stage, r=ranks, n=name: rank_case(references, s, r, n)
        if "moments" in faults and (stage == "operator" or not options.quick):
            for where in ("saving", "the end"):
                yield f"{stage}/moments/{where}", lambda s=stage, w=where: moments_case(references, s, w, moments)
    if "cache" in faults:
        yield "cache", lambda: cache_case(references, moments)
    if "launcher" in faults:
        for name in options.launches or (QUICK_LAUNCHES if options.quick else LAUNCHES):
            yield f"launcher/{name}", lambda n=name: launcher_case(references, n)


def summary(results: list[dict[str, Any]]) -> str:
    """A Markdown table: cases, how many passed, and the time from the fault to the end of the last process, by fault."""
    groups: dict[str, list[dict]] = {}
    for entry in results:
        stage, name, *_ = entry["case"].split("/")
        groups.setdefault(f"launcher: {name}" if stage == "launcher" else name, []).append(entry)
    lines = ["| fault | cases | passed | median s | longest s |", "|---|---|---|---|---|"]
    for name, entries in groups.items():
        ends = [entry["end_s"] for entry in entries if entry["end_s"] is not None]
        times = f"{statistics.median(ends):.1f} | {max(ends):.1f}" if ends else "- | -"
        lines.append(f"| {name} | {len(entries)} | {sum(not entry['problems'] for entry in entries)} | {times} |")
    return "\n".join(lines)


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)   # ignored in a background shell, and so in what it starts
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def some(allowed: Any) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            if unknown := [word for word in text.split(",") if word not in allowed]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; expected some of {', '.join(allowed)}")
            return text.split(",")
        return read

    parser.add_argument("--stages", type=some(SCRIPTS), default=list(SCRIPTS), help=",".join(SCRIPTS))
    parser.add_argument("--ranks", type=some(RANKS), default=list(RANKS), help=",".join(RANKS))
    parser.add_argument("--faults", type=some([*KINDS, "moments", "cache", "launcher"]), default=[], help="see --list")
    parser.add_argument("--launches", type=some(LAUNCHES), default=[], help="of the faults called launcher")
    parser.add_argument("--moments", type=int, default=50, help="random moments of saving, ending, building a cache")
    parser.add_argument("--quick", action="store_true", help="a representative part")
    parser.add_argument("--json", type=Path, default=Path("injection.json"), help="where the results go")
    parser.add_argument("--work", type=Path, help="folder for data and runs (default: a temporary one, removed)")
    parser.add_argument("--summary", type=Path, nargs="+", help="print a table by fault of such files and end")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(name for name, _ in cases(options, References(Path()))))
        return 0
    if options.summary:
        print(summary([entry for path in options.summary for entry in json.loads(path.read_text())]))
        return 0
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ups-inject-")))
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(ROOT)
        adopt_orphans()
        # once, for all forks
        import injected  # noqa: F401
        import torch._dynamo  # noqa: F401

        import train_consistency  # noqa: F401
        import train_operator  # noqa: F401
        import train_steady  # noqa: F401
        prepare(work)
        references, results = References(work), []
        for _, case in cases(options, references):
            result = case()
            results.append(result)
            end = "" if result.end_s is None else f"{result.end_s:.1f} s"
            print(f"{'ok  ' if not result.problems else 'FAIL'}  {result.case:<48} {end:>8} {result.total_s:7.1f} s  "
                  f"{'; '.join(result.problems)} {result.note}".rstrip(), flush=True)
            options.json.write_text(json.dumps([vars(entry) for entry in results], indent=1) + "\n")
    failed = [result for result in results if result.problems]
    ends = [result.end_s for result in results if result.end_s is not None]
    print(f"{len(results) - len(failed)} of {len(results)} cases passed; longest time from a fault to the end "
          f"{max(ends, default=0.0):.1f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
