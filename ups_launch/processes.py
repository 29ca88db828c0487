"""Processes of this machine: their states, children and parents, and the events that ranks send to their
supervisor (ups_launch/__main__.py) as lines of JSON. Without torch.
"""

import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ups.common.text import print_plain

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LETTERS = {psutil.STATUS_STOPPED: "T", psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_DEAD: "X"}  # as in /proc
EVENTS = "UPS_LAUNCH_EVENTS"  # environment variable with the path of the file for events


def send_event(event: str, **facts: Any) -> bool:
    """Append an event to the supervisor's file; False if there is no supervisor or the write failed."""
    if not os.environ.get(EVENTS):
        return False
    line = json.dumps({"event": event, "rank": int(os.environ.get("RANK", 0)), **facts})
    try:
        with open(os.environ[EVENTS], "ab", buffering=0) as file:  # one write: lines of ranks do not mix
            file.write(f"\n{line}\n".encode())  # a leading newline separates it from a torn line
    except OSError as error:
        print(f"WARNING: the supervisor was not told of {event!r} ({error})", file=sys.stderr, flush=True)
        return False
    return True


def try_read_json(path: Path) -> dict[str, Any] | None:
    """The record at `path`; None if it is missing or being written."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def saved_steps(directory: Path) -> list[int]:
    """Steps of the committed checkpoints in `directory`, newest first."""
    return sorted((int(path.name[5:]) for path in directory.glob("step_" + "[0-9]" * 9)), reverse=True)


def process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks or, on macOS, seconds) of a process of this machine; None if it is
    gone."""
    try:
        if sys.platform == "linux":
            # the fields after the name, which may contain spaces (proc_pid_stat(5))
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            state, born = fields[0], int(fields[19])
        else:  # macOS has no /proc
            process = psutil.Process(pid)
            state, born = LETTERS.get(process.status(), "S"), int(process.create_time())
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None
    return None if state in "ZX" else (state, born)


def this_machine() -> str:
    """Name of the space in which process numbers are unique: machine, boot and container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def print_raw(text: str) -> None:
    """Print to stderr without Python's streams, whose locks a blocked thread may hold. Never fails."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def stacks(who: str) -> str:
    """The stack of every thread of this process but the calling one, the main one first."""
    frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
    own, main = threading.get_ident(), threading.main_thread().ident
    order = [main, *(ident for ident in frames if ident not in (own, main))]
    return "".join(
        f"  {who}, thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
        for ident in order
        if ident in frames
    )


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, including orphans that it adopted."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True) if process_state(child.pid)]


def control_process(option: int, value: int) -> None:
    """prctl(2) of this process. macOS has none: there the guard of each rank looks for its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so none escapes."""
    control_process(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, the process that started this one, dies. For a child before its exec."""
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


class Terminal:
    """The terminal in whose foreground this process runs, if any.

    Closing it sends SIGHUP only to the leader of its session. If that is make, it waits for its children and
    forwards nothing, so they must poll. Background processes continue on purpose.
    """

    def __init__(self) -> None:
        self._handle, self._is_ours = None, False
        with contextlib.suppress(OSError):  # there is none
            self._handle = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        self.is_closed()  # sets _is_ours while the terminal is open

    def is_closed(self) -> bool:
        try:
            if self._handle is not None and (group := os.tcgetpgrp(self._handle)):  # 0: it is about to
                self._is_ours = group == os.getpgrp()  # hang up
            return False
        except OSError:  # EIO: it hung up, which is reported once
            os.close(self._handle)
            self._handle = None
            return self._is_ours


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


def end_processes(pids: Callable[[], list[int]], grace_s: float) -> None:
    """SIGTERM, then after `grace_s` SIGKILL, to pids() until there are none (at most 10 s more)."""
    for number, limit in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        until, signalled = time.monotonic() + limit, set()
        while time.monotonic() < until and (living := pids()):
            for pid in set(living) - signalled if number == signal.SIGTERM else living:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.05)
