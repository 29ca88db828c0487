"""The ranks of a run: what they tell each other, and that one which fails is not waited for.

Never hang: what a rank computes by itself goes through `agreed`, which tells all ranks whether it failed on
any, and everything that waits for others says so to the guard (ups/training/guard.py), which names who does
not come. The one other sum over ranks, that of the gradients, is in ups/training/update.py.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor

from ups.config import TrainConfig
from ups.training.environment import asks_for_cpu
from ups.training.folder import StageFolder
from ups.training.guard import EXIT_STOPPED, Guard


class StageError(RuntimeError):
    """A failure that is understood; `kind` is a word for the supervisor, `advice` what to do.

    is_agreed: all ranks raise it. facts: for errors/rankN.json.
    """

    def __init__(self, cause: str, kind: str, advice: str, is_agreed: bool = True, **facts: Any) -> None:
        super().__init__(cause)
        self.kind, self.advice, self.is_agreed, self.facts = kind, advice, is_agreed, facts


class Preempted(SystemExit):
    """All ranks were told to stop, agreed on the step and saved it."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class Ranks:
    """This rank among the others, as the launcher's environment says; `join` brings them together."""

    def __init__(self, folder: StageFolder, hang_s: float) -> None:
        self.folder, self.device = folder, torch.device("cpu")
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.guard = Guard(self.rank, self.world, folder.stage, hang_s, self._on_guard)
        # inside phase(doing, limit_s) heartbeats say so; reading a cache, a rollout and a sampler make progress by
        # themselves; other long work calls ups.progress.beat
        self.phase = self.guard.phase
        self.is_main = self.rank == 0
        self.is_finished = False   # the stage
        self.is_recorded = False   # the failure that is under way, in errors/
        # lets go of what the run holds, at its end
        self.close: Callable[[int], None] = lambda exit_code: None

    # ---------------------------------------------------------------- the launch

    def check(self, train: TrainConfig) -> None:
        """Refuse launches that would not give what was asked for; knows nothing but the environment."""
        environ, section = os.environ, self.folder.section
        expected = environ.get("UPS_EXPECT_WORLD")
        if expected is not None and int(expected) != self.world:
            raise ValueError(f"{expected} processes were asked for (UPS_EXPECT_WORLD), but this launch has "
                             f"{self.world}; expected as many. Use accelerate launch --config_file with a "
                             f"file from accelerate_configs/.")
        is_for_several = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= environ.keys()
        if expected is None and is_for_several and "WORLD_SIZE" not in environ:
            raise ValueError("accelerate was asked for several processes and started one (it does so for "
                             "--cpu --num_processes and for MULTI_CPU); expected WORLD_SIZE to be set. Use "
                             "--config_file accelerate_configs/cpu2.yaml.")
        if train.precision not in ("no", "bf16"):
            raise ValueError(f"{section}.train.precision is {train.precision!r}; expected 'no' or 'bf16' "
                             f"(Accelerate ignores fp16 on a CPU without a word). Change it.")
        if self.world > 1 and not torch.cuda.is_available() and not asks_for_cpu():
            raise ValueError(f"{self.world} processes were started for GPUs, but this machine shows none; "
                             f"each would believe it is alone. Use --config_file "
                             f"accelerate_configs/cpu2.yaml, or export ACCELERATE_USE_CPU=true.")
        if train.batch_size < self.world:
            raise ValueError(f"{section}.train.batch_size is {train.batch_size}, the global batch; expected "
                             f"at least one row for each of the {self.world} processes. Raise it or use "
                             f"fewer processes.")

    def join(self, precision: str, timeout_s: float) -> Accelerator:
        """Watch over this rank, and form the process group; Accelerate's view of it, which is what was asked
        for.
        """
        is_cpu = asks_for_cpu() or not torch.cuda.is_available()
        backend = {"backend": "gloo"} if is_cpu else {}
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s), **backend)
        self.guard.start()
        with self.guard.waiting("joining the process group"):
            accelerator = Accelerator(mixed_precision=precision, cpu=is_cpu,
                                      kwargs_handlers=[group] if self.world > 1 else [])
        state, self.device = accelerator.state, accelerator.device
        if (state.num_processes, state.process_index) != (self.world, self.rank):
            raise ValueError(f"Accelerate sees process {state.process_index} of {state.num_processes}; "
                             f"expected {self.rank} of {self.world} as the launcher says. Start with a file "
                             f"from accelerate_configs/.")
        if state.mixed_precision != precision:
            raise ValueError(f"Accelerate computes in {state.mixed_precision!r}; expected {precision!r} as "
                             f"{self.folder.section}.train.precision says. Unset ACCELERATE_MIXED_PRECISION.")
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
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        traceback.print_exception(error)
        self.write_error(kind, cause, "".join(traceback.format_exception(error)))
        return cause

    def write_error(self, kind: str, cause: str, text: str, **facts: Any) -> None:
        record = {"rank": self.rank, "stage": self.folder.stage, "step": self.guard.step, "kind": kind,
                  "cause": cause, **facts, "traceback": text}
        self.is_recorded = self.folder.note(f"errors/rank{self.rank}.json", record) or self.is_recorded

    def status(self, status: str, **facts: Any) -> None:
        """The last word of rank 0."""
        if self.is_main:
            self.folder.note("status.json", {"status": status, "step": self.guard.step, **facts})

    def _on_guard(self, code: int, kind: str, cause: str, stack: str) -> None:
        """In the guard's thread, before it ends this process."""
        self.write_error(kind, cause, stack)
        self.status("failed", kind=kind, cause=cause, exit_code=code)
