"""How a stage ends: by success, by agreement or by failure; never silently, never with exit code 0 unless it
is finished.

Exit codes: 0 finished, 1 failed, 2 refused before anything was made, 124 ended by the guard, 130 interrupted
twice, 143 told to stop. errors/rankN.json has the traceback, status.json the last word of rank 0;
ups/training/launch.py is told through ups.training.processes.tell.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ups.training.guard import EXIT_STOPPED
from ups.training.processes import outlive_readers, tell
from ups.training.ranks import Preempted, Ranks, StageError

# In errors of ranks that lost a peer, or that did not find each other: another start may do better.
CONNECTION = ("onnection", "Broken pipe", "NCCL", "imed out", "gloo", "Socket", "DistNetworkError",
              "DistStoreError")

active: Ranks | None = None   # of the run of this process


def main_guard(main: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a script's main: every failure ends non-zero with one line that says who, where, why and
    what to do.

    Also an error if main returns although its stage is not finished. Order of the end
    (reference/distributed.md E5): tracker, free the model, collect, destroy the group. Ends by SystemExit
    unless main succeeded.
    """

    @functools.wraps(main)
    def guarded(*arguments: Any, **options: Any) -> None:
        global active
        outlive_readers()
        active, code, is_agreed = None, 0, True
        try:
            main(*arguments, **options)
            if active is not None and not active.is_finished:
                raise RuntimeError("main returned although the stage is not finished; expected "
                                   "run.finish(...) at its end.")
        except SystemExit as error:
            code, is_agreed = _end_of_exit(error)
        except BaseException as error:
            code, is_agreed = _report(error), getattr(error, "is_agreed", False)
        ranks, active = active, None
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
    ranks, code = active, error.code if isinstance(error.code, int) else int(error.code is not None)
    if not isinstance(error.code, int) and error.code is not None:
        print(error.code, file=sys.stderr)
    if ranks is not None and code == EXIT_STOPPED:
        is_agreed = isinstance(error, Preempted)
        if not is_agreed:
            print(f"STOPPED: rank {ranks.rank}, stage {ranks.folder.stage}, step {ranks.guard.step}: told to "
                  f"stop outside the training loop, where there is nothing new to save. The same command "
                  f"continues.", file=sys.stderr, flush=True)
        ranks.status("preempted")
        tell("stopped", code=code)
        return code, is_agreed
    if code == 0 and ranks is not None and not ranks.is_finished:
        code = _report(RuntimeError("sys.exit(0) although the stage is not finished; expected "
                                    "run.finish(...)"))
        return code, False
    if code == 2 and ranks is None:
        tell("failed", kind="configuration", code=code, cause="the command line, as said above")
    return code, code == 0


def _report(error: BaseException) -> int:
    """Say what happened, in the log folder and on one last line; the exit code."""
    ranks = active
    kind = getattr(error, "kind", "interrupted" if isinstance(error, KeyboardInterrupt) else "error")
    rank, cause = int(os.environ.get("RANK", 0)), " ".join(f"{type(error).__name__}: {error}".split())
    if ranks is None or not ranks.folder.is_open:  # nothing was started: the message says all
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
        if not ranks.is_recorded or error.facts:
            ranks.write_error(kind, cause, "".join(traceback.format_exception(error)), **error.facts)
    else:
        ranks.guard.leave(code, is_agreed=False)
        is_cut_off = ranks.world > 1 and any(word in cause for word in CONNECTION)
        lost = ranks.guard.lost_peer(1.5 if is_cut_off else 0.0) if ranks.world > 1 else None
        kind = "connection" if is_cut_off else kind   # to be tried again
        cause = ranks.record(error, kind)
        if lost is not None:
            kind, cause = "peer", f"{lost} (here: {cause[:120]})"
            ranks.write_error(kind, cause, "".join(traceback.format_exception(error)))
    ranks.status("failed", kind=kind, cause=cause, exit_code=code)
    advice = getattr(error, "advice", "The same command continues from the last checkpoint.")
    tell("failed", kind=kind, code=code, cause=f"{cause}. {advice}")
    print(f"FAILED: rank {rank}, stage {ranks.folder.stage}, step "
          f"{ranks.guard.step}: {cause}. {advice}", file=sys.stderr, flush=True)
    return code
