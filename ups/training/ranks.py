"""The ranks of a run: process group, agreement on failures, collectives, records of errors.

A run never hangs. What a rank computes by itself goes through `agreed`, which raises on all ranks if it
failed on any. Every wait for other ranks is registered (ups/training/activity.py), so that a guard can name
the rank that does not come. The only collective elsewhere sums the gradients (ups/training/update.py).
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, utils
from torch import Tensor
from tqdm import tqdm

from ups.common.files import is_out_of_memory, message_of
from ups.training.activity import Activity
from ups.training.environment import asks_for_cpu
from ups.training.folder import StageFolder


class StageError(RuntimeError):
    """A failure with a known cause. kind: a word for the supervisor; advice: what the user can do;
    is_agreed: whether all ranks raise it.
    """

    def __init__(self, cause: str, kind: str, advice: str, is_agreed: bool = True) -> None:
        super().__init__(cause)
        self.kind, self.advice, self.is_agreed = kind, advice, is_agreed


def cause_of(error: BaseException) -> str:
    """The kind and the message of an error, on one line."""
    message = message_of(error) if is_out_of_memory(error) else error  # the advice covers full disks
    return " ".join(f"{type(error).__name__}: {message}".split())


class Ranks:
    """This rank among the others, from the launcher's environment; `join` forms the process group."""

    active: "Ranks | None" = None  # of the run of this process

    def __init__(self, folder: StageFolder, hang_s: float) -> None:
        self.folder, self.device = folder, torch.device("cpu")
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.activity = Activity(self.rank, self.world, folder.stage, hang_s, self._on_guard)
        # Around long work: phase(doing, limit_s) names it in heartbeats and sets its time limit. Reading a
        # cache, rollouts and samplers report progress themselves (ups.common.progress.beat).
        self.phase = self.activity.phase
        self.is_main = self.rank == 0
        self.is_finished = False  # whether the stage is finished
        self.is_recorded = False  # whether the current failure is in errors/
        self.unreported: OSError | None = None  # of this rank alone, until all ranks can agree on it
        self.close: Callable[[int], None] = lambda exit_code: None  # releases what the run holds

    def join(self, timeout_s: float) -> Accelerator:
        """Start the activity and form the process group. Raises ValueError if Accelerate has other ranks than
        the launcher.

        Accelerate's mixed precision is off: each network multiplies its own matrices in train.precision
        (ups/common/device.py), and the rest of it in float32.
        """
        is_cpu = asks_for_cpu() or not torch.cuda.is_available()
        group = InitProcessGroupKwargs("gloo" if is_cpu else "nccl", timeout=timedelta(seconds=timeout_s))
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
        handlers = [group, ddp] if self.world > 1 else []
        self.activity.start()
        with self.activity.waiting("joining the process group"):
            accelerator = Accelerator(mixed_precision="no", cpu=is_cpu, kwargs_handlers=handlers)
        self.device, state = accelerator.device, accelerator.state
        if (state.num_processes, state.process_index) != (self.world, self.rank):
            raise ValueError(
                f"Accelerate sees process {state.process_index} of {state.num_processes}; expected "
                f"{self.rank} of {self.world} as the launcher says. Start with a file from "
                f"accelerate_configs/."
            )
        return accelerator

    def print(self, *values: Any) -> None:
        """Print on the main process, above the progress bar."""
        if self.is_main:
            tqdm.write(" ".join(map(str, values)), file=sys.stdout)
            sys.stdout.flush()

    def memory_gib(self) -> float | None:
        """The most memory of a GPU that this rank has used so far."""
        is_cuda = self.device.type == "cuda"
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if is_cuda else None

    # ---------------------------------------------------------------- collectives

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. A collective."""
        if self.world == 1:
            return [value]
        with self.activity.waiting(f"gathering after {self.activity.doing}"):
            return utils.gather_object([value])

    def agreed(self, function: Callable[[], Any], doing: str) -> Any:
        """Return function() of this rank. Raises StageError on every rank, with the rank and the cause, if it
        raised on any. A collective; the function itself must not communicate.
        """
        result = cause = None
        with self.phase(doing):
            try:
                result = function()
            except Exception as error:
                cause = self.record(error)
            self.activity.has_failed = cause is not None
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
        if self.world == 1:
            return tensor.detach().clone()
        with self.activity.waiting("summing"):
            total = utils.reduce(tensor.detach(), "sum")
            if total.is_cuda:  # NCCL returns at once, so wait here, where the activity says so
                torch.cuda.synchronize(total.device)
        return total

    def broadcast(self, tensors: Iterable[Tensor], doing: str) -> None:
        """Copy rank 0's numbers to all ranks, in place. A collective."""
        if self.world > 1:
            with torch.no_grad(), self.activity.waiting(doing):
                utils.broadcast(list(tensors))

    # ---------------------------------------------------------------- records

    def record(self, error: BaseException, kind: str = "error") -> str:
        """Print the traceback of an error and write errors/rankN.json; the cause on one line."""
        cause = cause_of(error)
        traceback.print_exception(error)
        self.write_error(kind, cause, "".join(traceback.format_exception(error)))
        return cause

    def write_error(self, kind: str, cause: str, text: str) -> None:
        """Write errors/rankN.json, if the folder is open."""
        record = {
            "rank": self.rank,
            "stage": self.folder.stage,
            "step": self.activity.step,
            "kind": kind,
            "cause": cause,
            "traceback": text,
        }
        is_written = self.folder.write_if_open(f"errors/rank{self.rank}.json", record)
        self.is_recorded = is_written or self.is_recorded

    def status(self, status: str, **facts: Any) -> None:
        """Write status.json on rank 0."""
        if self.is_main:
            self.folder.write_if_open("status.json", {"status": status, "step": self.activity.step, **facts})

    def _on_guard(self, code: int, kind: str, cause: str, stack: str) -> None:
        """In the guard's thread, before it ends this process."""
        self.write_error(kind, cause, stack)
        self.status("failed", kind=kind, cause=cause, exit_code=code)
