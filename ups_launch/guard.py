"""Heartbeat and watchdog of a rank: a rank that stalls, dies or falls out of step is named, and the job ends.

Each rank has one guard. The main thread sets its attributes (step, phase, progress; a few microseconds a
step). A thread writes them to STAGE/heartbeat/rankN.json twice a second and reads those of the other ranks.
The guard that finds a rank at fault (ups_launch/stalls.py), or a rank whose process is gone, writes
heartbeat/stop-JOB.json. Every rank then prints its phase and the stacks of its threads, writes
errors/rankN.json and leaves with os._exit, which works although the main thread is blocked in C or in a
collective. Ranks of this machine that do not react (stopped, or holding the interpreter's lock in C) get
SIGABRT, at which faulthandler prints their stack, and then SIGKILL.

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
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ups.common import progress
from ups_launch.processes import (
    print_raw,
    process_state,
    send_event,
    stacks,
    this_machine,
    try_read_json,
)
from ups_launch.stalls import Activity, Finding, Peer, activity_of, find_stall

TICK_S = 0.5  # between two rounds of the thread
GRACE_S = 20.0  # without progress after SIGTERM or SIGINT; launchers wait 30 s (pytorch issue 119856)
SAME_S = 1.0  # signals this close are one: make, Slurm, a terminal and a launcher may all forward it
PEER_S = 2.0  # for the main thread to notice that another rank is gone, which gives the better message
LEAVE_S = 10.0  # from a failure to the end of the process
STACK_S = 2.0  # for the other ranks to print their stacks
# Size of every heartbeat. It is written in place and in one piece, so a full disk does not stop it, and
# nothing of an earlier, longer one remains.
RECORD_BYTES = 1024
EXIT_HANG, EXIT_STOPPED = 124, 128 + signal.SIGTERM
LAUNCHED_BY = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set if the parent is a launcher


def to_block(record: dict[str, Any]) -> bytes:
    """RECORD_BYTES of JSON. A letter may take 12 of them, so the activity is cut as far as necessary."""
    while len(text := json.dumps(record)) > RECORD_BYTES:
        record = record | {"doing": record["doing"][: len(record["doing"]) * 3 // 4]}
    return text.ljust(RECORD_BYTES).encode()


class Guard:
    """The guard of this rank. hang_s: longest time without progress, unless a phase sets another limit.

    on_end(code, kind, cause, stack): called in the guard's thread before it ends the process, to record the
    failure.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        stage: str,
        hang_s: float,
        on_end: Callable[[int, str, str, str], None] = lambda *facts: None,
    ) -> None:
        self.rank, self.world, self.stage, self.hang_s, self.on_end = rank, world, stage, hang_s, on_end
        self.step, self.doing, self.limit_s, self.is_waiting = 0, "starting", hang_s, False
        self.num_collectives = self.num_beats = 0
        self.stop_signal, self.is_in_loop, self.is_leaving = 0, False, False
        self.has_failed = False  # in heartbeats, for ranks that wait for files and enter no collective
        self.directory: Path | None = None
        self._stop_file = Path()
        self._beat_at, self._stop_at, self._pulse = time.monotonic(), None, 0
        self._signal_at = 0.0  # when the main thread got the first signal
        self._code, self._is_agreed = None, False
        self._peers = {other: Peer(self._beat_at, hang_s) for other in range(world) if other != rank}
        self._machine, self._lock, self._file = this_machine(), threading.Lock(), None
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED_BY) else None
        self._is_closed, self._thread = False, None

    # ---------------------------------------------------------------- main thread

    def start(self) -> None:
        """Start the thread and handle SIGTERM and SIGINT. Call it in the main thread of the process."""
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        progress.watched = self
        self.beat()
        send_event("start", pid=os.getpid())
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()

    def open(self, directory: Path, job: str) -> None:
        """Exchange heartbeats in `directory`, shared by all ranks. job: name of this start, equal on all."""
        directory.mkdir(exist_ok=True)
        with self._lock:
            self._stop_file = directory / f"stop-{job}.json"
            self._file = os.open(
                directory / f"rank{self.rank}.json",
                os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
            self.directory = directory
            now = time.monotonic()
            for peer in self._peers.values():
                peer.restart_clocks(now)
        self._write()

    def leave(self, code: int, is_agreed: bool) -> None:
        """This rank is about to end: from here on signals and lost peers are ignored, and only LEAVE_S limits
        it.

        is_agreed: the others end in the same way. If not, and code is not 0, this rank counts as lost.
        """
        self.doing, self.is_leaving = "leaving", True
        # others may still send numbers to a tracker
        self.limit_s = max(LEAVE_S, self.hang_s) if code == 0 else LEAVE_S
        self._code, self._is_agreed = code, is_agreed
        self.beat()

    def close(self, code: int) -> None:
        """Stop the thread; the last heartbeat holds the exit code."""
        if self._thread is None:
            return
        self._is_closed, progress.watched = True, None
        os.write(self._write_end, b"\0")
        self._thread.join()
        self._thread, self._code = None, self._code if self._code is not None else code
        self._write()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for handle in (self._read_end, self._write_end, self._file):
            if handle is not None:
                os.close(handle)
        self._file = None

    def beat(self) -> None:
        """Record progress."""
        self.num_beats += 1
        self._beat_at = time.monotonic()

    @contextlib.contextmanager
    def _while(self, **facts: Any) -> Iterator[None]:
        """Inside, these attributes are `facts`; both ends are progress."""
        before = {name: getattr(self, name) for name in facts}
        vars(self).update(facts)
        self.beat()
        try:
            yield
        finally:
            vars(self).update(before)
            self.beat()

    def phase(self, doing: str, limit_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Around an activity named `doing`, which may take `limit_s` without progress."""
        return self._while(doing=doing, limit_s=limit_s or self.limit_s)

    def in_loop(self) -> contextlib.AbstractContextManager[None]:
        """Around the loop: a signal stops all ranks after the step, with a checkpoint. Elsewhere it ends the
        process.
        """
        return self._while(doing="between updates", is_in_loop=True)

    def waiting(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Around a wait for other ranks, in a collective or for their files."""
        self.num_collectives += 1
        return self._while(doing=doing, is_waiting=True)

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

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.is_leaving:
            return
        if self.stop_signal:  # only a second Ctrl-C means more than the first signal
            if number == signal.SIGINT and time.monotonic() - self._signal_at > SAME_S:
                raise KeyboardInterrupt
            return
        self.stop_signal, self._signal_at = number, time.monotonic()
        if not self.is_in_loop:  # there is no step to finish and nothing to save
            raise SystemExit(EXIT_STOPPED)

    # ---------------------------------------------------------------- thread

    def _watch(self) -> None:
        tick = min(TICK_S, self.hang_s / 6) * max(1.0, self.world / 32)
        woke_at = time.monotonic()
        while not self._is_closed:
            ready, _, _ = select.select([self._read_end], [], [], tick)
            if self._is_closed:
                return
            now = time.monotonic()
            # this process was stopped or starved, so the time since its last round proves nothing
            if now - woke_at > max(5.0, 5 * tick):
                self._beat_at = now
                for peer in self._peers.values():
                    peer.restart_clocks(now)
            woke_at = now
            if ready and set(os.read(self._read_end, 256)) & {signal.SIGTERM, signal.SIGINT}:
                self._stop_at = self._stop_at or now
            self._write()
            if (finding := self._find_fault(now, self._update_peers())) and not self._is_closed:
                self._end(finding)

    def _record(self) -> dict[str, Any]:
        born = (process_state(os.getpid()) or ("", 0))[1]
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "born": born,
            "machine": self._machine,
            "stage": self.stage,
            "step": self.step,
            "doing": self.doing[:200],
            "is_waiting": self.is_waiting,
            "limit_s": self.limit_s,
            "collectives": self.num_collectives,
            "beats": self.num_beats,
            "pulse": self._pulse,
            "time": time.time(),
            "has_failed": self.has_failed,
            "code": self._code,
            "is_agreed": self._is_agreed,
        }

    def _write(self) -> None:
        if self._file is None:
            return
        self._pulse += 1
        try:
            os.pwrite(self._file, to_block(self._record()), 0)
        except OSError as error:
            print_raw(f"WARNING: rank {self.rank} cannot write its heartbeat ({error})")

    def _update_peers(self) -> dict[int, Peer]:
        """Read the heartbeats of the peers; those that failed or died."""
        now = time.monotonic()
        with self._lock:
            for rank, peer in self._peers.items() if self.directory is not None else ():
                if peer.lost_at is None:
                    peer.update(try_read_json(self.directory / f"rank{rank}.json"), now)
                    peer.why_lost = self._why_lost(rank, peer.record)
                    peer.lost_at = now if peer.why_lost else None
        return {rank: peer for rank, peer in self._peers.items() if peer.lost_at is not None}

    def _why_lost(self, rank: int, record: dict[str, Any]) -> str:
        """How a rank failed alone or died, in words; else ""."""
        if record["code"] is not None:
            error = try_read_json(self.directory.parent / "errors" / f"rank{rank}.json") or {}
            ended = f"it ended with exit code {record['code']} at step {record['step']}"
            is_alone = record["code"] != 0 and not record["is_agreed"]
            return f"failed: {error.get('cause', ended)}" if is_alone else ""
        is_here = record["machine"] == self._machine
        if not is_here or (process_state(record["pid"]) or ("", None))[1] == record["born"]:
            return ""
        return (
            f"(process {record['pid']}) died without a word, killed or crashed; last heard of at step "
            f"{record['step']}, {record['doing']}"
        )

    def _find_fault(self, now: float, lost: dict[int, Peer]) -> Finding | None:
        """Why the job must end now, or None."""
        if self.is_leaving:
            is_stuck = now - self._beat_at >= self.limit_s
            return Finding(EXIT_HANG, "hang", "it failed, and then could not leave") if is_stuck else None
        if self._parent is not None and os.getppid() != self._parent:
            return Finding(EXIT_HANG, "launcher", f"the launcher (process {self._parent}) is gone")
        if self._stop_file.is_file():
            record = try_read_json(self._stop_file)  # None while another rank writes it
            return record and Finding(record["code"], record["kind"], record["cause"])
        if lost:
            first, peer = next(iter(lost.items()))
            is_time = now - peer.lost_at >= min(PEER_S, self.hang_s)
            cause = f"rank {first} {peer.why_lost}"
            return Finding(EXIT_HANG, "peer", cause, tuple(lost)) if is_time else None
        grace_s = min(GRACE_S, self.hang_s) if self._stop_at else math.inf
        stall = find_stall(self._activities(now), self._describe, grace_s)
        if stall is None:
            return None
        cause, ranks = stall
        if self._stop_at:
            return Finding(EXIT_STOPPED, "stopped", f"told to stop, but {cause}", ranks)
        return Finding(EXIT_HANG, "hang", cause, ranks)

    def _activities(self, now: float) -> list[Activity]:
        """What the ranks do that have not ended, this one first. Time before a signal does not count."""
        since = self._stop_at or 0.0
        quiet_s = now - max(self._beat_at, since)
        own = Activity(
            self.rank, quiet_s, self.limit_s, self.is_waiting, False, self.doing, self.num_collectives
        )
        running = self._peers.items() if self.directory is not None else ()
        return [
            own,
            *(activity_of(rank, peer, now, since) for rank, peer in running if not peer.has_ended),
        ]

    def _describe(self, rank: int) -> str:
        """Step and activity of a rank in words."""
        record = self._record() if rank == self.rank else self._peers[rank].record
        if "step" not in record:
            return "it never wrote a heartbeat"
        if record["code"] is not None:
            return f"ended with exit code {record['code']} at step {record['step']}"
        state = process_state(record["pid"]) if record["machine"] == self._machine else ("?", 0)
        notes = {None: " (gone)", "T": " (stopped by a signal)", "t": " (held by a debugger)"}
        return f"at step {record['step']}, {record['doing']}{notes.get(state and state[0], '')}"

    def _end(self, finding: Finding) -> None:
        """Print and record the finding and end this process."""
        code, kind, cause = finding.code, finding.kind, finding.cause
        deadline = threading.Timer(2 * STACK_S + 3.0, os._exit, (code,))  # if a file system hangs
        deadline.daemon = True
        deadline.start()
        stack = stacks(f"rank {self.rank}")
        print_raw(
            "\n".join(
                [
                    f"{kind.upper()}: rank {self.rank}, stage {self.stage}: {cause}",
                    *(f"  rank {rank}: {self._describe(rank)}" for rank in range(self.world)),
                    stack,
                ]
            )
        )
        if self.directory is not None and kind != "launcher":
            try:
                # the first rank's finding stands
                with contextlib.suppress(FileExistsError), self._stop_file.open("x") as file:
                    json.dump({"by": self.rank, "code": code, "kind": kind, "cause": cause}, file)
            except OSError as error:
                print_raw(f"WARNING: {error}")
        self.on_end(code, kind, cause, stack)
        send_event("failed", kind=kind, code=code, cause=cause)
        self._code = code
        self._write()
        self._end_others(finding.ranks if kind in ("hang", "stopped") else ())
        os._exit(code)

    def _end_others(self, at_fault: tuple[int, ...]) -> None:
        """Give the others time to end, then kill those at fault that run on this machine and do not."""
        until = time.monotonic() + STACK_S
        while time.monotonic() < until:
            self._update_peers()
            remaining = {
                rank: peer.record
                for rank, peer in self._peers.items()
                if not peer.has_ended and peer.lost_at is None and "pid" in peer.record
            }
            if not remaining:
                return
            time.sleep(0.05)
        pids = [
            record["pid"]
            for rank, record in remaining.items()
            if rank in at_fault and record["machine"] == self._machine
        ]
        for numbers, pause in (((signal.SIGABRT, signal.SIGCONT), 1.0), ((signal.SIGKILL,), 0.0)):
            for pid, number in itertools.product(pids, numbers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause)
