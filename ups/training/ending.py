"""How a stage ends: by success, by agreement or by failure; with exit code 0 only if it is finished.

Exit codes: 0 finished, 1 failed, 2 refused before anything was written, 124 ended by the guard, 130
interrupted twice, 143 stopped by a signal. The traceback goes to errors/rankN.json and the outcome on rank 0
to status.json; the supervisor (ups_launch), if there is one, receives both as events.
"""

import contextlib
import gc
import io
import os
import sys
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from ups.common.text import print_plain
from ups.training.activity import EXIT_STOPPED, send_event
from ups.training.ranks import Ranks, StageError, cause_of

# Words in the errors of ranks that lost a peer or did not find each other: another start may succeed.
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


class Preempted(SystemExit):
    """All ranks stop after a signal; they agreed on the step and saved it."""


class _Outlet(io.FileIO):
    """A standard stream that drops text if its reader is gone."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError:  # a closed terminal or pipe, or a full disk: there is no other place for the error
            return len(data)


def protect_output() -> None:
    """From here on printing cannot fail, so a run whose terminal is gone still saves and records its errors.

    Closed standard streams are opened as /dev/null: else a file of the run would get their number and text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    print_plain(_Outlet)


@contextlib.contextmanager
def main_guard() -> Iterator[None]:
    """Around the main of a script, as its decorator: a failure ends it with a non-zero exit code and one line
    that names the rank, the step, the cause and the remedy.

    It is an error as well if main returns before its stage is finished. Order of the end
    (reference/distributed.md E5): tracker, model, garbage collection, process group. Raises SystemExit
    unless main succeeded.
    """
    protect_output()
    Ranks.active, code, is_agreed = None, 0, True
    try:
        yield
    except SystemExit as error:
        code, is_agreed = _handle_exit(error)
    except BaseException as error:
        code, is_agreed = _report_failure(error), getattr(error, "is_agreed", False)
    if code == 0 and Ranks.active is not None and not Ranks.active.is_finished:
        message = "main ended although the stage is not finished; expected run.finish(...) at its end."
        code, is_agreed = _report_failure(RuntimeError(message)), False
    _release(code, is_agreed)
    if code:
        sys.exit(code)


def _release(code: int, is_agreed: bool) -> None:
    ranks, Ranks.active = Ranks.active, None
    if ranks is not None:
        ranks.activity.leave(code, is_agreed)
        ranks.close(code)
    gc.collect()
    # a rank that fails alone must not wait for the others
    if is_agreed and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if ranks is not None:
        ranks.activity.close(code)


def _handle_exit(error: SystemExit) -> tuple[int, bool]:
    """(exit code, whether all ranks end in the same way) after a SystemExit in main."""
    ranks, code = Ranks.active, error.code if isinstance(error.code, int) else int(error.code is not None)
    if not isinstance(error.code, int) and error.code is not None:
        print(error.code, file=sys.stderr)
    if ranks is not None and code == EXIT_STOPPED:
        is_agreed = isinstance(error, Preempted)
        if not is_agreed:
            print(
                f"STOPPED: {ranks.activity.place}: told to stop outside the training loop, where there is "
                f"nothing new to save. The same command continues.",
                file=sys.stderr,
                flush=True,
            )
        ranks.status("preempted")
        send_event("stopped", code=code)
        return code, is_agreed
    if code == 2 and ranks is None:
        send_event("failed", kind="configuration", code=code, cause="the command line, as said above")
    return code, code == 0


def _report_failure(error: BaseException) -> int:
    """Write the error to the stage's folder, print one last line; the exit code."""
    ranks = Ranks.active
    kind = getattr(error, "kind", "interrupted" if isinstance(error, KeyboardInterrupt) else "error")
    if ranks is None or not ranks.folder.is_open:
        return _report_refusal(error, kind)
    code = 130 if kind == "interrupted" else 1
    if isinstance(error, StageError):
        cause = " ".join(str(error).split())
        ranks.activity.leave(code, error.is_agreed, cause)
        if not ranks.is_recorded:
            ranks.write_error(kind, cause, "".join(traceback.format_exception(error)))
    else:
        ranks.activity.leave(code, is_agreed=False, cause=cause_of(error))
        is_cut_off = ranks.world > 1 and _is_connection(cause_of(error))
        lost = ranks.activity.lost_peer(1.5 if is_cut_off else 0.0) if ranks.world > 1 else None
        kind = "connection" if is_cut_off else kind
        cause = ranks.record(error, kind)
        if lost is not None:
            kind, cause = "peer", f"{lost} (here: {cause[:120]})"
            ranks.write_error(kind, cause, "".join(traceback.format_exception(error)))
    ranks.status("failed", kind=kind, cause=cause, exit_code=code)
    advice = getattr(error, "advice", "The same command continues from the last checkpoint.")
    send_event("failed", kind=kind, code=code, cause=f"{cause}. {advice}")
    print(f"FAILED: {ranks.activity.place}: {cause}. {advice}", file=sys.stderr, flush=True)
    return code


def _report_refusal(error: BaseException, kind: str) -> int:
    """`_report_failure` before the stage's folder is open, where nothing can be recorded."""
    cause = cause_of(error)
    code = 2 if isinstance(error, (ValueError, FileNotFoundError, FileExistsError)) else 1
    if code == 1 and not isinstance(error, StageError):
        traceback.print_exception(error)
        kind = "connection" if _is_connection(cause) else kind
    is_sent = send_event("failed", kind="configuration" if code == 2 else kind, code=code, cause=cause)
    if code == 1 or not is_sent:  # else the supervisor prints once what every rank refuses
        print(f"FAILED: rank {os.environ.get('RANK', 0)}: {cause}", file=sys.stderr, flush=True)
    return code


def _is_connection(cause: str) -> bool:
    return any(word in cause for word in CONNECTION)
