"""The ranks of a run: what they tell each other, that one which fails is not waited for, how a stage ends.

Never hang: what a rank computes by itself goes through `agreed`, which tells all ranks whether it failed on
any, and everything that waits for others says so to the guard (ups/training/guard.py), which names who does
not come. The one other sum over ranks, that of the gradients, is in ups/training/update.py.

A stage ends by success, by agreement or by failure; never silently, never with exit code 0 unless it is
finished. Exit codes: 0 finished, 1 failed, 2 refused before anything was made, 124 ended by the guard, 130
interrupted twice, 143 told to stop. errors/rankN.json has the traceback, status.json the last word of rank 0;
ups/training/launch.py is told through ups.training.processes.tell.
"""

import functools
import gc
import hashlib
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor

from ups import __version__
from ups.common.files import in_words, is_out_of_memory
from ups.config import ROOT, TrainConfig
from ups.training.folder import StageFolder, dotted
from ups.training.guard import EXIT_STOPPED, Guard
from ups.training.processes import outlive_readers, tell

# In errors of ranks that lost a peer, or that did not find each other: another start may do better.
CONNECTION = (
    "onnection",
    "Broken pipe",
    "NCCL",
    "imed out",
    "gloo",
    "Socket",
    "DistNetworkError",
    "DistStoreError",
)


class StageError(RuntimeError):
    """A failure that is understood; `kind` is a word for the supervisor, `advice` what to do.

    is_agreed: all ranks raise it.
    """

    def __init__(self, cause: str, kind: str, advice: str, is_agreed: bool = True) -> None:
        super().__init__(cause)
        self.kind, self.advice, self.is_agreed = kind, advice, is_agreed


def cause_of(error: BaseException) -> str:
    """The kind and the message of an error, on one line."""
    what = in_words(error) if is_out_of_memory(error) else error  # of disks the advice says more
    return " ".join(f"{type(error).__name__}: {what}".split())


class Preempted(SystemExit):
    """All ranks were told to stop, agreed on the step and saved it."""


class Ranks:
    """This rank among the others, as the launcher's environment says; `join` brings them together."""

    active: "Ranks | None" = None  # of the run of this process

    def __init__(self, folder: StageFolder, hang_s: float) -> None:
        self.folder, self.device = folder, torch.device("cpu")
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.guard = Guard(self.rank, self.world, folder.stage, hang_s, self._on_guard)
        # inside phase(doing, limit_s) heartbeats say so; reading a cache, a rollout and a sampler make
        # progress by themselves; other long work calls ups.common.progress.beat
        self.phase = self.guard.phase
        self.is_main = self.rank == 0
        self.is_finished = False  # the stage
        self.is_recorded = False  # the failure that is under way, in errors/
        # lets go of what the run holds, at its end
        self.close: Callable[[int], None] = lambda exit_code: None

    # ---------------------------------------------------------------- the launch

    def check(self, train: TrainConfig) -> None:
        """Refuse launches that would not give what was asked for; knows nothing but the environment."""
        environ, section = os.environ, self.folder.stage
        expected = environ.get("UPS_EXPECT_WORLD", self.world)
        is_for_several = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= environ.keys()
        has_no_gpu = not torch.cuda.is_available() and not asks_for_cpu()
        rows = (  # whether it is wrong, the error
            (
                int(expected) != self.world,
                f"{expected} processes were asked for (UPS_EXPECT_WORLD), but this launch has {self.world}; "
                f"expected as many. Use accelerate launch --config_file with a file from "
                f"accelerate_configs/.",
            ),
            (
                "UPS_EXPECT_WORLD" not in environ and is_for_several and "WORLD_SIZE" not in environ,
                "accelerate was asked for several processes and started one (it does so for --cpu "
                "--num_processes and for MULTI_CPU); expected WORLD_SIZE to be set. Use --config_file "
                "accelerate_configs/cpu2.yaml.",
            ),
            (
                train.precision not in ("no", "bf16"),
                f"{section}.train.precision is {train.precision!r}; expected 'no' or 'bf16' (Accelerate "
                f"ignores "
                f"fp16 on a CPU without a word). Change it.",
            ),
            (
                self.world > 1 and has_no_gpu,
                f"{self.world} processes were started for GPUs, but this machine shows none; each would "
                f"believe "
                f"it is alone. Use --config_file accelerate_configs/cpu2.yaml, or export "
                f"ACCELERATE_USE_CPU=true.",
            ),
            (
                train.batch_size < self.world,
                f"{section}.train.batch_size is {train.batch_size}, the global batch; expected at least one "
                f"row "
                f"for each of the {self.world} processes. Raise it or use fewer processes.",
            ),
        )
        for is_wrong, why in rows:
            if is_wrong:
                raise ValueError(why)

    def join(self, precision: str, timeout_s: float) -> Accelerator:
        """Watch over this rank, and form the process group; Accelerate's view of it, which is what was asked
        for.
        """
        is_cpu = asks_for_cpu() or not torch.cuda.is_available()
        group = InitProcessGroupKwargs(
            backend="gloo" if is_cpu else "nccl", timeout=timedelta(seconds=timeout_s)
        )
        self.guard.start()
        with self.guard.waiting("joining the process group"):
            accelerator = Accelerator(
                mixed_precision=precision, cpu=is_cpu, kwargs_handlers=[group] if self.world > 1 else []
            )
        state, self.device = accelerator.state, accelerator.device
        if (state.num_processes, state.process_index) != (self.world, self.rank):
            raise ValueError(
                f"Accelerate sees process {state.process_index} of {state.num_processes}; "
                f"expected {self.rank} of {self.world} as the launcher says. Start with a file "
                f"from accelerate_configs/."
            )
        if state.mixed_precision != precision:
            raise ValueError(
                f"Accelerate computes in {state.mixed_precision!r}; expected {precision!r} as "
                f"{self.folder.stage}.train.precision says. Unset ACCELERATE_MIXED_PRECISION."
            )
        return accelerator

    # ---------------------------------------------------------------- agreement

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. A collective."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self.guard.waiting(f"gathering after {self.guard.doing}"):
            dist.all_gather_object(values, value)
        return values

    def agreed(self, function: Callable[[], Any], doing: str) -> Any:
        """function() on this rank; raises StageError on every rank, naming the culprit, if it raised on any.

        A collective. The function itself must not communicate: compute locally inside, reduce afterwards.
        """
        result = cause = None
        with self.phase(doing):
            try:
                result = function()
            except Exception as error:  # told to all ranks, which raise
                cause = self.record(error)
            self.guard.has_failed = cause is not None
            self.raise_if_any(cause, doing)
        return result

    def raise_if_any(self, cause: str | None, doing: str) -> None:
        """Raise StageError on every rank if any of them has a cause. A collective."""
        for rank, other in enumerate(self.gather(cause)):
            if other is not None:
                errors = self.folder.path / "errors"
                advice = f"See {errors}; the same command continues from the last checkpoint."
                raise StageError(f"rank {rank} failed while {doing}: {other}", "error", advice)

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over ranks (a new tensor, equal on all). A collective."""
        total = tensor.detach().clone()
        if self.world > 1:
            with self.guard.waiting("summing"):
                dist.all_reduce(total)
                # where a collective returns before it is done, and the wait would be elsewhere
                if total.is_cuda:
                    torch.cuda.synchronize(total.device)
        return total

    def broadcast(self, tensors: Iterable[Tensor], doing: str) -> None:
        """Rank 0's numbers on all ranks, in place. A collective."""
        if self.world > 1:
            with torch.no_grad(), self.guard.waiting(doing):
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    # ---------------------------------------------------------------- what is recorded

    def record(self, error: BaseException, kind: str = "error") -> str:
        """Print the traceback of a failure of this rank, write errors/rankN.json; the cause as one line."""
        cause = cause_of(error)
        traceback.print_exception(error)
        self.write_error(kind, cause, "".join(traceback.format_exception(error)))
        return cause

    def write_error(self, kind: str, cause: str, text: str) -> None:
        record = {
            "rank": self.rank,
            "stage": self.folder.stage,
            "step": self.guard.step,
            "kind": kind,
            "cause": cause,
            "traceback": text,
        }
        self.is_recorded = self.folder.note(f"errors/rank{self.rank}.json", record) or self.is_recorded

    def status(self, status: str, **facts: Any) -> None:
        """The last word of rank 0."""
        if self.is_main:
            self.folder.note("status.json", {"status": status, "step": self.guard.step, **facts})

    def _on_guard(self, code: int, kind: str, cause: str, stack: str) -> None:
        """In the guard's thread, before it ends this process."""
        self.write_error(kind, cause, stack)
        self.status("failed", kind=kind, cause=cause, exit_code=code)


# ---------------------------------------------------------------- what a start depends on, and ranks share


def asks_for_cpu() -> bool:
    """Whether the launch says that the CPU is meant: ACCELERATE_USE_CPU, or no visible GPU by choice
    (cpu2.yaml).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and not visible.replace("-1", "").strip(", ")
    return is_hidden or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")


def what_ranks_share(config: dict[str, Any], parents: dict[str, str], stage: str) -> dict[str, Any]:
    """Name -> value of everything that must be the same on all ranks: a difference would be a hang or a wrong
    result.
    """
    files = sorted((*ROOT.glob("*.py"), *(ROOT / "ups").rglob("*.py")))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return {
        **dict(dotted(config, "")),
        **{f"the parent {name}": value for name, value in parents.items()},
        "the stage": stage,
        "the version of ups": __version__,
        "the source of ups (SHA-256)": source[:12],
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
    }


def differences(facts: list[dict[str, Any]]) -> list[str]:
    """What is not the same in the facts of all ranks, in words: the key, and who has which value."""
    found = []
    for key in sorted(set().union(*facts)):
        values = [f"{own.get(key, 'absent')!r:.60}" for own in facts]
        who = {value: [str(rank) for rank, own in enumerate(values) if own == value] for value in values}
        if len(who) > 1:
            words = (f"{value} on rank {', '.join(ranks)}" for value, ranks in who.items())
            found.append(f"{key} is {', '.join(words)}")
    return found


def describe_environment(world: int, device: torch.device) -> dict[str, Any]:
    """Versions, hardware, revision and command line of this start."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    gpus = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "world": world,
        "device": str(device),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": version("accelerate"),
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "git_revision": git("rev-parse", "HEAD"),
        "git_is_dirty": git("status", "--porcelain") not in ("", "unknown"),
    }


# ---------------------------------------------------------------- the end


def main_guard(main: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a script's main: every failure ends non-zero with one line that says who, where, why and
    what to do.

    Also an error if main returns although its stage is not finished. Order of the end
    (reference/distributed.md E5): tracker, free the model, collect, destroy the group. Ends by SystemExit
    unless main succeeded.
    """

    @functools.wraps(main)
    def guarded(*arguments: Any, **options: Any) -> None:
        outlive_readers()
        Ranks.active, code, is_agreed = None, 0, True
        try:
            main(*arguments, **options)
        except SystemExit as error:
            code, is_agreed = _end_of_exit(error)
        except BaseException as error:
            code, is_agreed = _report(error), getattr(error, "is_agreed", False)
        if code == 0 and Ranks.active is not None and not Ranks.active.is_finished:
            is_agreed, code = (
                False,
                _report(
                    RuntimeError(
                        "main ended although the stage is not finished; expected run.finish(...) at its end."
                    )
                ),
            )
        ranks, Ranks.active = Ranks.active, None
        if ranks is not None:
            ranks.guard.leave(code, is_agreed)
            ranks.close(code)
        gc.collect()
        # a rank that fails alone must not wait for the others
        if is_agreed and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        if ranks is not None:
            ranks.guard.close(code)
        if code:
            sys.exit(code)

    return guarded


def _end_of_exit(error: SystemExit) -> tuple[int, bool]:
    """(exit code, whether all ranks end so) of a main that left by SystemExit."""
    ranks, code = Ranks.active, error.code if isinstance(error.code, int) else int(error.code is not None)
    if not isinstance(error.code, int) and error.code is not None:
        print(error.code, file=sys.stderr)
    if ranks is not None and code == EXIT_STOPPED:
        is_agreed = isinstance(error, Preempted)
        if not is_agreed:
            print(
                f"STOPPED: rank {ranks.rank}, stage {ranks.folder.stage}, step {ranks.guard.step}: told to "
                f"stop outside the training loop, where there is nothing new to save. The same command "
                f"continues.",
                file=sys.stderr,
                flush=True,
            )
        ranks.status("preempted")
        tell("stopped", code=code)
        return code, is_agreed
    if code == 2 and ranks is None:
        tell("failed", kind="configuration", code=code, cause="the command line, as said above")
    return code, code == 0


def _report(error: BaseException) -> int:
    """Say what happened, in the log folder and on one last line; the exit code."""
    ranks = Ranks.active
    kind = getattr(error, "kind", "interrupted" if isinstance(error, KeyboardInterrupt) else "error")
    rank, cause = int(os.environ.get("RANK", 0)), cause_of(error)
    if ranks is None or not ranks.folder.is_open:  # nothing was started: the message says all
        code = 2 if isinstance(error, (ValueError, FileNotFoundError, FileExistsError)) else 1
        if code == 1 and not isinstance(error, StageError):
            traceback.print_exception(error)
            kind = "connection" if any(word in cause for word in CONNECTION) else kind
        is_told = tell("failed", kind="configuration" if code == 2 else kind, code=code, cause=cause)
        if code == 1 or not is_told:  # a supervisor says once what every rank refuses
            print(f"FAILED: rank {rank}: {cause}", file=sys.stderr, flush=True)
        return code
    code = 130 if kind == "interrupted" else 1
    if isinstance(error, StageError):
        cause = " ".join(str(error).split())
        if not ranks.is_recorded:
            ranks.write_error(kind, cause, "".join(traceback.format_exception(error)))
    else:
        ranks.guard.leave(code, is_agreed=False)
        is_cut_off = ranks.world > 1 and any(word in cause for word in CONNECTION)
        lost = ranks.guard.lost_peer(1.5 if is_cut_off else 0.0) if ranks.world > 1 else None
        kind = "connection" if is_cut_off else kind  # to be tried again
        cause = ranks.record(error, kind)
        if lost is not None:
            kind, cause = "peer", f"{lost} (here: {cause[:120]})"
            ranks.write_error(kind, cause, "".join(traceback.format_exception(error)))
    ranks.status("failed", kind=kind, cause=cause, exit_code=code)
    advice = getattr(error, "advice", "The same command continues from the last checkpoint.")
    tell("failed", kind=kind, code=code, cause=f"{cause}. {advice}")
    print(
        f"FAILED: rank {rank}, stage {ranks.folder.stage}, step {ranks.guard.step}: {cause}. {advice}",
        file=sys.stderr,
        flush=True,
    )
    return code
