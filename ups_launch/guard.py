"""Heartbeat and watchdog of a rank: a rank that stalls, dies or falls out of step is named, and the job ends.

Each rank has one guard. The main thread sets the attributes of an activity (ups/training/activity.py). The
guard's thread writes them to DIRECTORY/rankN.json twice a second and reads those of the other ranks. The
guard that finds a rank at fault (`find_stall`), or a rank whose process is gone, writes that into its
heartbeat, and the others end for the same reason: each prints the phase of every rank and the stacks of its
threads, and leaves with os._exit, which works although the main thread is blocked in C or in a collective.
Ranks of this machine that do not react (stopped, or holding the interpreter's lock in C) get SIGABRT, at
which faulthandler prints their stack, and then SIGKILL.

Signals reach the thread through signal.set_wakeup_fd, because Python handlers wait for the main thread. After
a signal, a rank without progress for GRACE_S ends. Without torch.
"""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ups_launch.processes import print_raw, process_state, send_event, this_machine, try_read_json

TICK_S = 0.5  # between two rounds of the thread
GRACE_S = 20.0  # without progress after SIGTERM or SIGINT; launchers wait 30 s (pytorch issue 119856)
PEER_S = 2.0  # for the main thread to notice that another rank is gone, which gives the better message
STACK_S = 2.0  # for the other ranks to print their stacks
# Size of every heartbeat. It is written in place and in one piece, so a full disk does not stop it, and
# nothing of an earlier, longer one remains.
RECORD_BYTES = 1024
EXIT_HANG, EXIT_STOPPED = 124, 128 + signal.SIGTERM
LAUNCHED_BY = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set if the parent is a launcher
# of a rank that has written no heartbeat yet
NO_HEARTBEAT = {
    "machine": "",
    "doing": "",
    "is_waiting": False,
    "collectives": 0,
    "beats": -1,
    "pulse": -1,
    "has_failed": False,
    "code": None,
    "found": None,
}


@dataclass(frozen=True)
class Finding:
    """Why the job must end. kind: a word for the supervisor; ranks: those at fault."""

    kind: str
    cause: str
    ranks: tuple[int, ...] = ()


class Heartbeat:
    """The last heartbeat of a rank, and when it changed by this rank's clock."""

    def __init__(self, record: dict[str, Any], now: float) -> None:
        self.record = record
        self.progress_at = self.pulse_at = now
        self.lost_at: float | None = None
        self.why_lost = ""

    def update(self, record: dict[str, Any] | None, now: float) -> None:
        """record: None if there is none yet, or it is being written."""
        before, self.record = self.record, record or self.record
        if self.record["beats"] != before["beats"]:
            self.progress_at = now
        if self.record["pulse"] != before["pulse"]:
            self.pulse_at = now

    def is_deaf(self, now: float) -> bool:
        """Whether even the guard of the rank is silent."""
        return now - self.pulse_at > self.record["limit_s"] / 2


def find_stall(
    ranks: list[Heartbeat],
    now: float,
    describe: Callable[[int], str],
    since: float = 0.0,
    grace_s: float = math.inf,
) -> Finding | None:
    """A hang, if a rank holds up the job, else None. ranks: that have not ended, this one first.

    A rank that waits for others (in a collective) is never at fault. At fault is a rank that does not wait
    and has made no progress for its limit, or that entered fewer collectives than the others.
    describe(rank): its step and activity in words; since: time of a signal, before which no time counts;
    grace_s: limit of all ranks after it.
    """
    quiet_s = {one.record["rank"]: now - max(one.progress_at, since) for one in ranks}
    late = [one for one in ranks if quiet_s[one.record["rank"]] >= min(one.record["limit_s"], grace_s)]
    stuck = [one for one in late if not one.record["is_waiting"] or one.is_deaf(now)]
    if not stuck and len(late) < len(ranks):
        return None
    if stuck:
        worst = max(stuck, key=lambda one: quiet_s[one.record["rank"]])
        rank, note = worst.record["rank"], "its process does not answer; " if worst.is_deaf(now) else ""
        cause = f"no progress for {quiet_s[rank]:.0f} s; the laggard is rank {rank}: {note}{describe(rank)}"
        return Finding("hang", cause, tuple(one.record["rank"] for one in stuck))
    records = [one.record for one in ranks]
    behind, ahead = (extreme(records, key=lambda record: record["collectives"]) for extreme in (min, max))
    if behind["collectives"] < ahead["collectives"]:
        cause = (
            f"the ranks are out of step: rank {behind['rank']} entered {behind['collectives']} collectives, "
            f"another {ahead['collectives']}; it is {describe(behind['rank'])}"
        )
        return Finding("hang", cause, (behind["rank"],))
    if len({record["doing"] for record in records}) > 1:
        words = sorted(f"rank {record['rank']} is {describe(record['rank'])}" for record in records)
        return Finding("hang", f"the ranks are out of step: {'; '.join(words)}")
    cause = (
        f"no progress for {min(quiet_s.values()):.0f} s: every rank waits in the same place "
        f"({records[0]['doing']}); the connection between them may be lost"
    )
    return Finding("hang", cause)


class Guard:
    """The guard of this rank. activity: what this rank does; its `on_end(code, kind, cause, stack)` is called
    in the guard's thread before it ends the process, to record the failure.
    """

    def __init__(self, activity: Any) -> None:
        self.activity, now = activity, time.monotonic()
        others = (rank for rank in range(activity.world) if rank != activity.rank)
        never = NO_HEARTBEAT | {"limit_s": activity.hang_s}
        self._peers = {rank: Heartbeat(never | {"rank": rank}, now) for rank in others}
        self._machine, self._lock = this_machine(), threading.Lock()
        self._directory: Path | None = None
        self._file: int | None = None
        self._stop_at: float | None = None  # when a signal came
        self._pulse, self._found, self._is_closed = 0, None, False
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED_BY) else None
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    # ---------------------------------------------------------------- main thread

    def start(self) -> None:
        """Start the thread. Call it in the main thread of the process."""
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        send_event("start", pid=os.getpid())
        self._thread.start()

    def open(self, directory: Path) -> None:
        """Exchange heartbeats in `directory`, shared by all ranks and without those of an earlier start."""
        directory.mkdir(exist_ok=True)
        with self._lock:
            self._file = os.open(
                directory / f"rank{self.activity.rank}.json",
                os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
            self._directory = directory
            self._restart_clocks(time.monotonic())
        self._write()
        send_event("open", directory=str(directory.absolute()))

    def close(self) -> None:
        """Stop the thread; the last heartbeat holds the exit code."""
        self._is_closed = True
        os.write(self._write_end, b"\0")
        self._thread.join()
        self._write()
        signal.set_wakeup_fd(self._wakeup_before)
        for handle in (self._read_end, self._write_end, self._file):
            if handle is not None:
                os.close(handle)
        self._file = None

    def lost_peer(self, wait_s: float) -> str | None:
        """The first other rank that fails or dies within `wait_s`, in words."""
        until = time.monotonic() + wait_s
        while not (lost := self._update_peers()) and time.monotonic() <= until:
            time.sleep(0.05)
        return next((f"rank {rank} {peer.why_lost}" for rank, peer in lost.items()), None)

    def peer_failed(self) -> bool:
        """Whether another rank has failed, from its heartbeat: a full disk may have prevented its record."""
        self._update_peers()
        return any(peer.record["has_failed"] for peer in self._peers.values())

    # ---------------------------------------------------------------- thread

    def _watch(self) -> None:
        tick = min(TICK_S, self.activity.hang_s / 6) * max(1.0, self.activity.world / 32)
        woke_at = time.monotonic()
        while not self._is_closed:
            ready, _, _ = select.select([self._read_end], [], [], tick)
            if self._is_closed:
                return
            now = time.monotonic()
            # this process was stopped or starved, so the time since its last round proves nothing
            if now - woke_at > max(5.0, 5 * tick):
                self.activity.beat_at = now
                self._restart_clocks(now)
            woke_at = now
            if ready and set(os.read(self._read_end, 256)) & {signal.SIGTERM, signal.SIGINT}:
                self._stop_at = self._stop_at or now
            self._write()
            if (finding := self._find_fault(now, self._update_peers())) and not self._is_closed:
                self._end(finding)

    def _restart_clocks(self, now: float) -> None:
        for peer in self._peers.values():
            peer.progress_at = peer.pulse_at = now

    def _record(self) -> dict[str, Any]:
        own = self.activity
        return {
            "rank": own.rank,
            "pid": os.getpid(),
            "machine": self._machine,
            "stage": own.stage,
            "step": own.step,
            "doing": own.doing[:200],
            "is_waiting": own.is_waiting,
            "limit_s": own.limit_s,
            "collectives": own.num_collectives,
            "beats": own.num_beats,
            "pulse": self._pulse,
            "time": time.time(),
            "has_failed": own.has_failed,
            "code": own.code,
            "is_agreed": own.is_agreed,
            "found": self._found,
            "cause": own.cause[:300],
        }

    def _write(self) -> None:
        if self._file is None:
            return
        self._pulse += 1
        record = self._record()
        while len(text := json.dumps(record)) > RECORD_BYTES:  # a letter may take 12 bytes
            record |= {name: record[name][: len(record[name]) * 3 // 4] for name in ("doing", "cause")}
        try:
            os.pwrite(self._file, text.ljust(RECORD_BYTES).encode(), 0)
        except OSError as error:
            print_raw(f"WARNING: rank {self.activity.rank} cannot write its heartbeat ({error})")

    def _update_peers(self) -> dict[int, Heartbeat]:
        """Read the heartbeats of the peers; those that failed or died."""
        now = time.monotonic()
        with self._lock:
            for rank, peer in self._peers.items() if self._directory is not None else ():
                if peer.lost_at is None:
                    record = peer.record  # its process is looked for before its last heartbeat is read
                    is_gone = record["machine"] == self._machine and not process_state(record["pid"])
                    peer.update(try_read_json(self._directory / f"rank{rank}.json"), now)
                    peer.why_lost = self._why_lost(peer.record, is_gone)
                    peer.lost_at = now if peer.why_lost else None
        return {rank: peer for rank, peer in self._peers.items() if peer.lost_at is not None}

    def _why_lost(self, record: dict[str, Any], is_gone: bool) -> str:
        """How a rank failed alone or died, in words; else ""."""
        if record["code"] is not None:
            ended = f"it ended with exit code {record['code']} at step {record['step']}"
            is_alone = record["code"] != 0 and not record["is_agreed"]
            return f"failed: {record['cause'] or ended}" if is_alone else ""
        if not is_gone:
            return ""
        return (
            f"(process {record['pid']}) died without a word, killed or crashed; last heard of at step "
            f"{record['step']}, {record['doing']}"
        )

    def _find_fault(self, now: float, lost: dict[int, Heartbeat]) -> Finding | None:
        """Why the job must end now, or None."""
        own = self.activity
        if own.is_leaving:
            is_stuck = now - own.beat_at >= own.limit_s
            return Finding("hang", "it failed, and then could not leave") if is_stuck else None
        if self._parent is not None and os.getppid() != self._parent:
            return Finding("launcher", f"the launcher (process {self._parent}) is gone")
        for peer in self._peers.values():
            if peer.record["found"] is not None:
                return Finding(peer.record["found"], peer.record["cause"])
        if lost:
            first, peer = next(iter(lost.items()))
            is_time = now - peer.lost_at >= min(PEER_S, own.hang_s)
            return Finding("peer", f"rank {first} {peer.why_lost}", tuple(lost)) if is_time else None
        grace_s = min(GRACE_S, own.hang_s) if self._stop_at else math.inf
        stall = find_stall(self._running(now), now, self._describe, self._stop_at or 0.0, grace_s)
        if stall is not None and self._stop_at:
            return Finding("stopped", f"told to stop, but {stall.cause}", stall.ranks)
        return stall

    def _running(self, now: float) -> list[Heartbeat]:
        """The heartbeats of the ranks that have not ended, this one first."""
        own = Heartbeat(self._record(), now)
        own.progress_at = self.activity.beat_at
        others = self._peers.values() if self._directory is not None else ()
        return [own, *(peer for peer in others if peer.record["code"] is None)]

    def _describe(self, rank: int) -> str:
        """Step and activity of a rank in words."""
        record = self._record() if rank == self.activity.rank else self._peers[rank].record
        if "step" not in record:
            return "it never wrote a heartbeat"
        if record["code"] is not None:
            return f"ended with exit code {record['code']} at step {record['step']}"
        state = process_state(record["pid"]) if record["machine"] == self._machine else ""
        notes = {
            None: " (gone)",
            psutil.STATUS_STOPPED: " (stopped by a signal)",
            psutil.STATUS_TRACING_STOP: " (held by a debugger)",
        }
        return f"at step {record['step']}, {record['doing']}{notes.get(state, '')}"

    def _end(self, finding: Finding) -> None:
        """Print and record the finding and end this process."""
        own, kind, cause = self.activity, finding.kind, finding.cause
        code = EXIT_STOPPED if kind == "stopped" else EXIT_HANG
        deadline = threading.Timer(2 * STACK_S + 3.0, os._exit, (code,))  # if a file system hangs
        deadline.daemon = True
        deadline.start()
        stack = stacks(f"rank {own.rank}")
        phases = [f"  rank {rank}: {self._describe(rank)}" for rank in range(own.world)]
        print_raw("\n".join([f"{kind.upper()}: rank {own.rank}, stage {own.stage}: {cause}", *phases, stack]))
        own.cause = cause
        self._found = kind if kind != "launcher" else None  # other machines have launchers of their own
        self._write()
        own.on_end(code, kind, cause, stack)
        send_event("failed", kind=kind, code=code, cause=cause)
        own.code = code
        self._write()
        if kind in ("hang", "stopped"):
            self._end_others(finding.ranks)
        os._exit(code)

    def _end_others(self, at_fault: tuple[int, ...]) -> None:
        """Give the others time to end, then kill those at fault that run on this machine and do not."""
        until, remaining = time.monotonic() + STACK_S, self._peers
        while remaining and time.monotonic() < until:
            time.sleep(0.05)
            lost = self._update_peers()
            remaining = {
                rank: peer
                for rank, peer in self._peers.items()
                if rank not in lost and peer.record["code"] is None and "pid" in peer.record
            }
        records = [peer.record for rank, peer in remaining.items() if rank in at_fault]
        pids = [record["pid"] for record in records if record["machine"] == self._machine]
        for numbers, pause in (((signal.SIGABRT, signal.SIGCONT), 1.0), ((signal.SIGKILL,), 0.0)):
            for pid, number in itertools.product(pids, numbers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause if pids else 0.0)


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
