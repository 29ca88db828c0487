"""Heartbeat and watchdog of a rank: who stalls, dies or falls out of step is named, and ends the job.

Every rank has one guard: attributes that the main thread sets (step, phase, progress; a few microseconds a
step) and a thread that, twice a second, writes them to STAGE/heartbeat/rankN.json and reads those of the
others. A rank that waits for others (in a collective) is never at fault; the laggard is one that does not
wait and made no progress for its limit, whose process is gone, or that entered fewer collectives than the
others. The guard that finds one writes heartbeat/stop-JOB.json, on which every rank prints its phase and the
stacks of its threads, writes errors/rankN.json and leaves with os._exit, so a main thread that is blocked in
C or in a collective is no obstacle. Ranks of this machine that do not answer (stopped, or holding the
interpreter's lock in C) are sent SIGABRT, at which faulthandler prints their stack, and then SIGKILL.

Signals reach the thread through signal.set_wakeup_fd, for Python handlers wait for the main thread: after
one, a rank without progress for GRACE_S ends, before launchers lose patience (reference: pytorch issue
119856, 30 s). Without torch.
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
from ups.training.processes import glance, process_state, shout, stacks, tell, this_machine

TICK_S = 0.5  # between looks of the thread
GRACE_S = 20.0  # without progress after SIGTERM or SIGINT
SAME_S = 1.0  # signals so close are one: make, Slurm, a terminal and a launcher may all pass it on
PEER_S = 2.0  # for a rank to notice by itself that another is gone, which gives the better message
LEAVE_S = 10.0  # from a failure to the end of the process
STACK_S = 2.0  # for the other ranks to print their stacks
# of every heartbeat, so that nothing of a longer one stays behind it; written in place, in one piece, so that
# a full disk does not stop it
RECORD_BYTES = 1024
EXIT_HANG, EXIT_STOPPED = 124, 128 + signal.SIGTERM
# of a rank that wrote no heartbeat
NOTHING = {
    "is_waiting": False,
    "collectives": 0,
    "doing": "",
    "beats": -1,
    "pulse": -1,
    "has_failed": False,
    "code": None,
    "machine": "",
}
LAUNCHED_BY = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # where the parent is a launcher


def block_of(record: dict[str, Any]) -> bytes:
    """RECORD_BYTES of JSON. A letter takes up to 12 of them, so what the rank is doing is cut as far as need
    be."""
    while len(text := json.dumps(record)) > RECORD_BYTES:
        record = record | {"doing": record["doing"][: len(record["doing"]) * 3 // 4]}
    return text.ljust(RECORD_BYTES).encode()


class Peer:
    """What is known of one rank: its last record and when, by this rank's clock, that changed."""

    def __init__(self, now: float, hang_s: float) -> None:
        self.record: dict[str, Any] = NOTHING | {"limit_s": hang_s}
        self.progress_at = self.pulse_at = now
        self.lost_at: float | None = None
        self.why = ""

    def update(self, record: dict[str, Any] | None, now: float) -> None:
        before, self.record = self.record, record or self.record  # None: not there yet, or being written
        if self.record["beats"] != before["beats"]:
            self.progress_at = now
        if self.record["pulse"] != before["pulse"]:
            self.pulse_at = now

    @property
    def has_ended(self) -> bool:
        return self.record["code"] is not None


class Guard:
    """The guard of this rank. hang_s: longest time without progress, unless a phase says otherwise.

    on_end(code, kind, cause, stack): called in the guard's thread before it ends the process; records the
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
        self.has_failed = False  # told in a collective, into which a rank that waits for files never comes
        self.directory: Path | None = None
        self._stop_file = Path()
        self._beat_at, self._stop_at, self._pulse = time.monotonic(), None, 0
        self._noted_at = 0.0  # when the main thread got the first signal
        self._code, self._is_agreed = None, False
        self._peers = {other: Peer(self._beat_at, hang_s) for other in range(world) if other != rank}
        self._machine, self._lock, self._file = this_machine(), threading.Lock(), None
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED_BY) else None
        self._is_closed, self._thread = False, None

    # ---------------------------------------------------------------- main thread

    def start(self) -> None:
        """Begin to watch; SIGTERM and SIGINT are noted from now on. In the main thread of the process."""
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        progress.watched = self
        self.beat()
        tell("start", pid=os.getpid())
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)
        self._thread.start()

    def open(self, directory: Path, job: str) -> None:
        """Exchange heartbeats in `directory`, which every rank must see.

        job: name of this start, equal on all ranks.
        """
        directory.mkdir(exist_ok=True)
        with self._lock:
            self._stop_file = directory / f"stop-{job}.json"
            self._file = os.open(
                directory / f"rank{self.rank}.json", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            )
            self.directory = directory
            now = time.monotonic()
            for peer in self._peers.values():
                peer.progress_at = peer.pulse_at = now
        self._write()

    def leave(self, code: int, is_agreed: bool) -> None:
        """This rank is about to end by itself: signals and lost peers change nothing any more, only LEAVE_S
        limits it.

        is_agreed: the others end in the same way; if not, and code is not 0, they learn from it that this
        rank is lost.
        """
        self.doing, self.is_leaving = "leaving", True
        # the others may still have numbers to send
        self.limit_s = max(LEAVE_S, self.hang_s) if code == 0 else LEAVE_S
        self._code, self._is_agreed = code, is_agreed
        self.beat()

    def close(self, code: int) -> None:
        """Stop watching; the others see how this rank ended."""
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
        """Progress was made."""
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
        """Inside, this rank is `doing` that, with a limit of its own."""
        return self._while(doing=doing, limit_s=limit_s or self.limit_s)

    def in_loop(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a signal means: stop after this step, together, with a checkpoint.

        Elsewhere it ends the process.
        """
        return self._while(doing="between updates", is_in_loop=True)

    def waiting(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Inside, this rank waits for the others, in a collective or for their files."""
        self.num_collectives += 1
        return self._while(doing=doing, is_waiting=True)

    def lost_peer(self, wait_s: float) -> str | None:
        """Which other rank failed or died, in words, if one does so within `wait_s`."""
        until = time.monotonic() + wait_s
        while not (lost := self._look()) and time.monotonic() <= until:
            time.sleep(0.05)
        return next((f"rank {rank} {peer.why}" for rank, peer in lost.items()), None)

    def peer_failed(self) -> bool:
        """Whether another rank has failed; by heartbeats, because a full disk keeps an error from being
        recorded.
        """
        self._look()
        return any(peer.record["has_failed"] for peer in self._peers.values())

    def _note(self, number: int, _frame: Any) -> None:
        if self.is_leaving:
            return
        if self.stop_signal:  # asked again: only Ctrl-C means more than the first time
            if number == signal.SIGINT and time.monotonic() - self._noted_at > SAME_S:
                raise KeyboardInterrupt
            return
        self.stop_signal, self._noted_at = number, time.monotonic()
        if not self.is_in_loop:  # no step at which to stop together, nothing to save
            raise SystemExit(EXIT_STOPPED)

    # ---------------------------------------------------------------- thread

    def _watch(self) -> None:
        tick = min(TICK_S, self.hang_s / 6) * max(1.0, self.world / 32)
        looked_at = time.monotonic()
        while not self._is_closed:
            ready, _, _ = select.select([self._read_end], [], [], tick)
            if self._is_closed:
                return
            now = time.monotonic()
            # this process was stopped, or starved: nobody can be judged by that time
            if now - looked_at > max(5.0, 5 * tick):
                self._beat_at = now
                for peer in self._peers.values():
                    peer.progress_at = peer.pulse_at = now
            looked_at = now
            if ready and set(os.read(self._read_end, 256)) & {signal.SIGTERM, signal.SIGINT}:
                self._stop_at = self._stop_at or now
            self._write()
            if (verdict := self._judge(now, self._look())) and not self._is_closed:
                self._end(*verdict)

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
            os.pwrite(self._file, block_of(self._record()), 0)
        except OSError as error:
            shout(f"WARNING: rank {self.rank} cannot write its heartbeat ({error})")

    def _look(self) -> dict[int, Peer]:
        """Bring the peers up to date; who of them failed or died."""
        now = time.monotonic()
        with self._lock:
            for rank, peer in self._peers.items() if self.directory is not None else ():
                if peer.lost_at is None:
                    peer.update(glance(self.directory / f"rank{rank}.json"), now)
                    peer.why = self._why_lost(rank, peer.record)
                    peer.lost_at = now if peer.why else None
        return {rank: peer for rank, peer in self._peers.items() if peer.lost_at is not None}

    def _why_lost(self, rank: int, record: dict[str, Any]) -> str:
        """What became of a rank that failed alone or died, or ""."""
        if record["code"] is not None:
            error = glance(self.directory.parent / "errors" / f"rank{rank}.json") or {}
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

    def _judge(self, now: float, lost: dict[int, Peer]) -> tuple[int, str, str, list[int]] | None:
        """(exit code, kind, cause, ranks at fault) if the job must end."""
        if self.is_leaving:
            is_stuck = now - self._beat_at >= self.limit_s
            return (EXIT_HANG, "hang", "it failed, and then could not leave", []) if is_stuck else None
        if self._parent is not None and os.getppid() != self._parent:
            return EXIT_HANG, "launcher", f"the launcher (process {self._parent}) is gone", []
        if self._stop_file.is_file():
            found = glance(self._stop_file)  # None: it is being written
            return found and (found["code"], found["kind"], found["cause"], [])
        if lost:
            first, peer = next(iter(lost.items()))
            is_time = now - peer.lost_at >= min(PEER_S, self.hang_s)
            return (EXIT_HANG, "peer", f"rank {first} {peer.why}", [*lost]) if is_time else None
        ranks = self._seen(now)
        grace = min(GRACE_S, self.hang_s) if self._stop_at else math.inf
        late = [seen for seen in ranks if seen["quiet_s"] >= min(seen["limit_s"], grace)]
        stuck = [seen for seen in late if not seen["is_waiting"]]
        if not stuck and len(late) < len(ranks):
            return None
        first, last = (choose(ranks, key=lambda seen: seen["collectives"]) for choose in (min, max))
        at_fault = [seen["rank"] for seen in stuck]
        if stuck:
            worst = max(stuck, key=lambda seen: seen["quiet_s"])
            cause = (
                f"no progress for {worst['quiet_s']:.0f} s; the laggard is rank {worst['rank']}: "
                f"{worst['note']}{self._describe(worst['rank'])}"
            )
        elif first["collectives"] < last["collectives"]:
            at_fault = [first["rank"]]
            cause = (
                f"the ranks are out of step: rank {first['rank']} entered {first['collectives']} "
                f"collectives, another {last['collectives']}; it is {self._describe(first['rank'])}"
            )
        elif len({seen["doing"] for seen in ranks}) > 1:
            words = sorted(f"rank {seen['rank']} is {self._describe(seen['rank'])}" for seen in ranks)
            cause = f"the ranks are out of step: {'; '.join(words)}"
        else:
            cause = (
                f"no progress for {min(seen['quiet_s'] for seen in ranks):.0f} s: every rank waits in "
                f"the same place ({self.doing}); the connection between them may be lost"
            )
        if self._stop_at:
            return EXIT_STOPPED, "stopped", f"told to stop, but {cause}", at_fault
        return EXIT_HANG, "hang", cause, at_fault

    def _seen(self, now: float) -> list[dict[str, Any]]:
        """The records of all ranks that have not ended, this one first, each with the time since its last
        progress (quiet_s; none counts before a signal) and a note.
        """
        since = self._stop_at or 0.0
        found = [self._record() | {"quiet_s": now - max(self._beat_at, since), "note": ""}]
        for rank, peer in self._peers.items():
            if self.directory is not None and not peer.has_ended:
                record = peer.record
                is_deaf = now - peer.pulse_at > record["limit_s"] / 2  # its guard does not run
                found.append(
                    record
                    | {
                        "rank": rank,
                        "is_waiting": record["is_waiting"] and not is_deaf,
                        "quiet_s": now - max(peer.progress_at, since),
                        "note": "its process does not answer; " if is_deaf else "",
                    }
                )
        return found

    def _describe(self, rank: int) -> str:
        """Step and phase of a rank in words."""
        record = self._record() if rank == self.rank else self._peers[rank].record
        if "step" not in record:
            return "it never wrote a heartbeat"
        if record["code"] is not None:
            return f"ended with exit code {record['code']} at step {record['step']}"
        state = process_state(record["pid"]) if record["machine"] == self._machine else ("?", 0)
        notes = {None: " (gone)", "T": " (stopped by a signal)", "t": " (held by a debugger)"}
        return f"at step {record['step']}, {record['doing']}{notes.get(state and state[0], '')}"

    def _end(self, code: int, kind: str, cause: str, at_fault: list[int]) -> None:
        """Say everything and end this process."""
        last_word = threading.Timer(2 * STACK_S + 3.0, os._exit, (code,))  # if a file system hangs
        last_word.daemon = True
        last_word.start()
        stack = stacks(f"rank {self.rank}")
        shout(
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
                # the first one stands
                with contextlib.suppress(FileExistsError), self._stop_file.open("x") as file:
                    json.dump({"by": self.rank, "code": code, "kind": kind, "cause": cause}, file)
            except OSError as error:
                shout(f"WARNING: {error}")
        self.on_end(code, kind, cause, stack)
        tell("failed", kind=kind, code=code, cause=cause)
        self._code = code
        self._write()
        self._dismiss(at_fault if kind in ("hang", "stopped") else [])
        os._exit(code)

    def _dismiss(self, at_fault: list[int]) -> None:
        """Give the others time to speak, then end those at fault that run on this machine and do not."""
        until = time.monotonic() + STACK_S
        while time.monotonic() < until:
            self._look()
            left = {
                rank: peer.record
                for rank, peer in self._peers.items()
                if not peer.has_ended and peer.lost_at is None and "pid" in peer.record
            }
            if not left:
                return
            time.sleep(0.05)
        pids = [
            record["pid"]
            for rank, record in left.items()
            if rank in at_fault and record["machine"] == self._machine
        ]
        for numbers, pause in (((signal.SIGABRT, signal.SIGCONT), 1.0), ((signal.SIGKILL,), 0.0)):
            for pid, number in itertools.product(pids, numbers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause)
