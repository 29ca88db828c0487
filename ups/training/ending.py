"""How a stage ends: by success, by agreement or by failure; never silently, never with exit code 0 unless it is finished.

Exit codes: 0 finished, 1 failed, 2 refused before anything was made, 124 ended by the guard, 130 interrupted twice, 143 told to
stop. errors/rankN.json has the traceback, status.json the last word of rank 0; ups/training/launch.py is told through ups.training.events.tell.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ups.training.events import tell
from ups.training.guard import EXIT_STOPPED
from ups.training.processes import outlive_readers

if TYPE_CHECKING:
    from ups.training.run import Run

# In errors of ranks that lost a peer, or that did not find each other: another start may do better.
CONNECTION = ("onnection", "Broken pipe", "NCCL", "imed out", "gloo", "Socket", "DistNetworkError", "DistStoreError")

active: Run | None = None   # the run of this process


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


def main_guard(main: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a script's main: every failure ends non-zero with one line that says who, where, why and what to do.

    Also an error if main returns although its stage is not finished. Order of the end (reference/distributed.md E5):
    tracker, free the model, collect, destroy the group. Ends by SystemExit unless main succeeded.
    """

    @functools.wraps(main)
    def guarded(*arguments: Any, **options: Any) -> None:
        global active
        outlive_readers()
        active, code, is_agreed = None, 0, True
        try:
            main(*arguments, **options)
            if active is not None and not active.is_finished:
                raise RuntimeError("main returned although the stage is not finished; expected run.finish(...) at its end.")
        except SystemExit as error:
            code, is_agreed = _end_of_exit(error)
        except BaseException as error:
            code, is_agreed = _report(error), getattr(error, "is_agreed", False)
        run, active = active, None
        guard = run.guard if run is not None else None
        if guard is not None:
            guard.leave(code, is_agreed)
            run.close(code)
        del run
        gc.collect()
        if is_agreed and dist.is_available() and dist.is_initialized():  # a rank that fails alone must not wait for the others
            dist.destroy_process_group()
        if guard is not None:
            guard.close(code)
        if code:
            sys.exit(code)

    return guarded


def _end_of_exit(error: SystemExit) -> tuple[int, bool]:
    """(exit code, whether all ranks end so) of a main that left by SystemExit."""
    run, code = active, error.code if isinstance(error.code, int) else int(error.code is not None)
    if not isinstance(error.code, int) and error.code is not None:
        print(error.code, file=sys.stderr)
    if run is not None and code == EXIT_STOPPED:
        is_agreed = isinstance(error, Preempted)
        if not is_agreed:
            print(f"STOPPED: rank {run.rank}, stage {run.stage}, step {run.step}: told to stop outside the training loop, where "
                  "there is nothing new to save. The same command continues.", file=sys.stderr, flush=True)
        run._write_status("preempted")
        tell("stopped", code=code)
        return code, is_agreed
    if code == 0 and run is not None and not run.is_finished:
        code = _report(RuntimeError("sys.exit(0) although the stage is not finished; expected run.finish(...)"))
        return code, False
    if code == 2 and run is None:
        tell("failed", kind="configuration", code=code, cause="the command line, as said above")
    return code, code == 0


def _report(error: BaseException) -> int:
    """Say what happened, in the log folder and on one last line; the exit code."""
    run = active
    kind = getattr(error, "kind", "interrupted" if isinstance(error, KeyboardInterrupt) else "error")
    rank, cause = int(os.environ.get("RANK", 0)), " ".join(f"{type(error).__name__}: {error}".split())
    if run is None or not run._is_open:  # nothing was started: the message says all
        code = 2 if isinstance(error, (ValueError, FileNotFoundError, FileExistsError)) else 1
        if code == 1 and not isinstance(error, StageError):
            traceback.print_exception(error)
            kind = "connection" if any(word in cause for word in CONNECTION) else kind
        is_told = tell("failed", kind="configuration" if code == 2 else kind, code=code, cause=cause)
        if code == 1 or not is_told:   # a supervisor says once what every rank refuses
            print(f"FAILED: rank {rank}: {cause}", file=sys.stderr, flush=True)
        return code
    code = 130 if kind == "interrupted" else 1
    if isinstance(error, StageError):
        cause = " ".join(str(error).split())
        if not run._is_recorded or error.facts:
            run._write_error(kind, cause, "".join(traceback.format_exception(error)), **error.facts)
    else:
        run.guard.leave(code, is_agreed=False)
        is_cut_off = run.world > 1 and any(word in cause for word in CONNECTION)
        lost = run.guard.lost_peer(1.5 if is_cut_off else 0.0) if run.world > 1 else None
        kind = "connection" if is_cut_off else kind   # to be tried again
        cause = run._record_error(error, kind)
        if lost is not None:
            kind, cause = "peer", f"{lost} (here: {cause[:120]})"
            run._write_error(kind, cause, "".join(traceback.format_exception(error)))
    run._write_status("failed", kind=kind, cause=cause, exit_code=code)
    advice = getattr(error, "advice", "The same command continues from the last checkpoint.")
    tell("failed", kind=kind, code=code, cause=f"{cause}. {advice}")
    print(f"FAILED: rank {rank}, stage {run.stage}, step {run.step}: {cause}. {advice}", file=sys.stderr, flush=True)
    return code
