"""What cases of the injection matrix are made of: forked ranks, data, runs to compare with, what was
found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cases import cases  # noqa: E402, F401

from ups.common.place import STAGES  # noqa: E402
from ups_launch.processes import descendants, die_with_parent, end_processes  # noqa: E402

LIMIT_S = 30.0  # from the fault to the end of the last process
CASE_S = 150.0  # for a whole run
HANG_S, LAUNCHED_HANG_S = 8.0, 12.0  # a fresh process imports what a fork has: seconds without progress
STEP, STEPS, SAVE = 6, 12, 4  # of the fault, of a run, between checkpoints
TASKS = ("burgers1d_hidden", "darcy2d_grf")
SCRIPTS = {name: f"train_{name}.py" for name in ("operator", "diffusion", "consistency", "steady")}


@dataclass
class Result:
    case: str
    problems: list[str]
    end_s: float | None = None  # from the fault to the end of the last process
    total_s: float = 0.0
    note: str = ""


def settings_of(work: Path, root: Path, stage: str, more: tuple[str, ...] = ()) -> list[str]:
    """The command line of a stage: tiny, on data that all cases share."""
    tasks = (
        f"data.tasks=[{','.join(TASKS)}] task.burgers1d_hidden.resolution=32 "
        "task.burgers1d_hidden.num_frames=10 task.burgers1d_hidden.t_end=0.45 "
        "task.burgers1d_hidden.degree=1 task.darcy2d_grf.resolution=16 evaluate.context_frames=4 "
        "operator.base_steps=5 diffusion.min_residual_ratio=0.001 diffusion.max_whitened_std=1000 "
        "consistency.tune_fraction=0.3 consistency.members=2"
    ).split()
    sections = [
        f"{section}.{key}"
        for section in SCRIPTS
        for key in (
            f"train.steps={STEPS} train.save_every={SAVE} train.validate_every=6 train.log_every=1 "
            "train.batch_size=8 train.micro_batch=2 train.precision='no' "
            f"train.validate_trajectories=1 train.hang_s={HANG_S} train.timeout_s=60"
        ).split()
    ]
    models = [
        f"{section}.{key}"
        for section in ("operator", "diffusion", "steady")
        for key in ("model.width=16", "model.depth=1", "model.modes=4")
    ]
    scales = [
        f"{section}.{key}"
        for section in ("diffusion", "steady")
        for key in ("scale_steps=2", "sampler_steps=2")
    ]
    return [
        "--config",
        str(ROOT / "configs" / "smoke.yaml"),
        f"run.root={root}",
        f"data.root={work}/data",
        f"cache.root={work}/cache",
        *tasks,
        *sections,
        *models,
        *scales,
        *(f"{stage}.train.{text}" for text in more),
    ]


def fork(function: Callable[[], Any], log: Path, environment: dict[str, str]) -> int:
    """A child of this process that calls `function`, prints to `log` and ends with the exit code a script
    would have."""
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
            if name.startswith(("ACCELERATE_", "MASTER_", "UPS_", "TORCHELASTIC")) or name in (
                "RANK",
                "WORLD_SIZE",
            ):
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


def run_ranks(folder: Path, *arguments: Any, **options: Any) -> Ended:
    """What became of the processes of start_ranks(...)."""
    return end_ranks(folder, *start_ranks(folder, *arguments, **options))


def start_ranks(
    folder: Path,
    stage: str,
    arguments: list[str],
    fault: dict[str, Any],
    world: int = 2,
    by_rank: dict[int, list[str]] | None = None,
) -> tuple[list[int], list[Path]]:
    """Processes and log files of a stage on `world` forked ranks. by_rank: more arguments of some."""
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
        group = loop_stage.rank_environment(rank, world, port)
        words = [*arguments, *(by_rank or {}).get(rank, [])]
        script = partial(injected.run_script, description, str(ROOT / SCRIPTS[stage]), words)
        pids.append(fork(script, log, group))
    return pids, logs


def end_ranks(folder: Path, pids: list[int], logs: list[Path]) -> Ended:
    """What became of started ranks, once they have ended."""
    codes, ends = wait(pids, time.monotonic() + CASE_S)
    digests = [json.loads(path.read_text()) for path in sorted(folder.glob("digests*"))]
    return Ended(
        codes, ends, "\n".join(log.read_text(errors="replace") for log in logs if log.is_file()), digests
    )


def prepare(work: Path) -> None:
    """Data and caches, once."""
    import prepare_cache
    import prepare_data

    arguments = settings_of(work, work / "none", "operator")
    for name, call in (
        ("data", lambda: prepare_data.main([*arguments, "--workers", "1"])),
        ("cache", lambda: prepare_cache.main(arguments)),
    ):
        codes, _ = wait(
            [fork(lambda call=call: sys.exit(call()), work / f"{name}.log", {})], time.monotonic() + 600
        )
        if codes != [0]:
            sys.exit(f"preparing the {name} failed: see {work / name}.log")


class References:
    """Runs without a fault, made when first asked for."""

    def __init__(self, work: Path) -> None:
        self.work, self.made = work, {}

    def parents(self, stage: str, root: Path) -> None:
        """Give `root` what `stage` is made from."""
        for parent in STAGES[stage].parents:
            shutil.copytree(self.get(parent), root / "smoke" / parent)

    def get(self, stage: str, more: tuple[str, ...] = (), fault: tuple[tuple[str, Any], ...] = ()) -> Path:
        """Directory of a finished stage. fault: what is no fault, such as a sharded model."""
        key = (stage, more, fault)
        if key not in self.made:
            name = "_".join([stage, *more, *(name for name, _ in fault)]).replace("=", "")
            folder = self.work / "references" / name
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier call, perhaps with other code
            self.parents(stage, folder / "runs")
            arguments = settings_of(self.work, folder / "runs", stage, more)
            ended = run_ranks(folder, stage, arguments, dict(fault))
            if ended.codes != [0, 0]:
                sys.exit(f"a run without a fault failed with exit codes {ended.codes}:\n{ended.text[-3000:]}")
            self.made[key] = folder / "runs" / "smoke" / stage
        return self.made[key]


def compare(one: Path, two: Path, is_exact: bool) -> list[str]:
    """What differs between the ends of two runs: weights, results and every logged number but clocks."""
    import torch
    from loop_stage import Left

    problems = [
        f"{path / name} is missing"
        for path in (one, two)
        for name in ("model.safetensors", "metrics.jsonl")
        if not (path / name).is_file()
    ]
    if problems:
        return problems
    ends = Left(one), Left(two)
    a, b = (end.weights() for end in ends)
    if a.keys() != b.keys():
        return ["the exported weights have other names"]
    for name in a:
        one_of, two_of = a[name].double(), b[name].double()
        is_same = torch.equal(a[name], b[name]) if is_exact else torch.allclose(one_of, two_of, 2e-2, 2e-3)
        if not is_same:
            problems.append(f"weights differ in {name} by {float((one_of - two_of).abs().max()):.1e}")
            break
    lines = [end.lines() for end in ends]
    keys = [[(line["step"], sorted(line)) for line in part] for part in lines]
    if keys[0] != keys[1]:
        problems.append(f"metrics.jsonl has gaps or repetitions: {len(keys[0])} and {len(keys[1])} lines")
    elif is_exact:
        clocks = ("time", "steps_per_s", "processor_s")
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
