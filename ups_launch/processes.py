"""Processes of this machine: their states, children and parents, and the events that ranks send to their
supervisor (ups_launch/supervisor.py) as lines of JSON. Without torch.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
EVENTS = "UPS_LAUNCH_EVENTS"  # environment variable with the path of the file for events


def print_raw(text: str) -> None:
    """Print to stderr, with control characters as in Python. Never fails, and takes no lock of Python's
    streams, which a blocked thread may hold.
    """
    plain = "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
    with contextlib.suppress(OSError):
        os.write(2, f"{plain}\n".encode())


def send_event(event: str, **facts: Any) -> bool:
    """Append an event to the supervisor's file; False if there is no supervisor or the write failed."""
    if not os.environ.get(EVENTS):
        return False
    line = json.dumps({"event": event, "rank": int(os.environ.get("RANK", 0)), **facts})
    try:
        with open(os.environ[EVENTS], "ab", buffering=0) as file:  # one write: lines of ranks do not mix
            file.write(f"\n{line}\n".encode())  # a leading newline separates it from a torn line
    except OSError as error:
        print_raw(f"WARNING: the supervisor was not told of {event!r} ({error})")
        return False
    return True


def try_read_json(path: Path) -> dict[str, Any] | None:
    """The record at `path`; None if it is missing or being written."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def process_state(pid: int) -> str | None:
    """The state of a process of this machine, as psutil names it; None if it has ended."""
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None
    return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state


def this_machine() -> str:
    """Name of the space in which process numbers are unique: machine and container."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, including orphans that it adopted."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True) if process_state(child.pid)]


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
