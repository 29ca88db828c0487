"""Supervisor of a stage: runs `accelerate launch`, restarts it after a death or hang, ends all its processes.

    python -m ups_launch --config_file accelerate_configs/cpu2.yaml train_operator.py --config
    configs/small.yaml

All arguments but --restarts go to accelerate launch. Every start is a new process tree in its own session,
with a free port, because torchrun's own restarts reuse keys of dead processes (pytorch issue 135712).
Restarted are: processes that died, hangs that the guard ended, and out of memory if a smaller micro-batch is
left; but only while checkpoints appear or micro-batches shrink. Not restarted are: refused configurations
(exit code 2), failures that would repeat (1) and stages stopped by a signal (143, or 130 after Ctrl-C). The
exit code is 0 only if the stage is finished. Ranks report through ups_launch.send_event. Starts without
torch; the scripts also run without the supervisor.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ups_launch.guard import EXIT_HANG, EXIT_STOPPED
from ups_launch.processes import (
    EVENTS,
    Terminal,
    adopt_orphans,
    descendants,
    die_with_parent,
    end_processes,
    print_raw,
    process_state,
    try_read_json,
)

POLL_S = 0.1
START_S = 600.0  # from the launcher's start to the first rank: it may wait for other machines
RESTARTS = 3  # in a row, without a new checkpoint
BACKOFF_S = 1.0  # before a restart
STOP_S = 60.0  # from a signal to the end: the guard's grace, a checkpoint, the tracker
SAME_S = 1.0  # two Ctrl-C this close are one: a terminal and make both send it
STOPPED_S = 10.0  # in which the launcher may be stopped before it counts as hung
CHILDREN_S = 3.0  # for remaining processes (a tracker's service) to end by themselves
REFUSED = 2
# kind of a failure that would repeat -> exit code
FINAL = {"error": 1, "save": 1, "non_finite": 1, "out_of_memory": 1, "interrupted": 130}
TOLD_TO_STOP = "told to stop; the same command continues"


class Attempt:
    """One process tree. signals: those received so far, a list that grows; events: from its ranks; why: the
    reason if the supervisor ended it.
    """

    def __init__(self, command: list[str], events: Path, terminal: Terminal, signals: list[int]) -> None:
        self._events, self._signals, self._terminal = events, signals, terminal
        self.events: list[dict[str, Any]] = []
        self._num_read = self._num_forwarded = 0
        self._pulses, self.why, self._signalled_at = {}, "", None
        self._started_at = self._pulse_at = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, EVENTS: str(events)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

    def wait(self) -> int:
        """The launcher's exit code, after all its processes have ended."""
        try:
            self._watch()
        finally:
            is_over = self.process.poll() is not None and not self.why
            end_processes(lambda: descendants(os.getpid()), CHILDREN_S if is_over else 0.0)
            code = self.process.wait()
            self._read_events()
        return code

    def of(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names."""
        return [event for event in self.events if event["event"] in names]

    def _watch(self) -> None:
        stopped_at = None
        while self.process.poll() is None and not self.why:
            time.sleep(POLL_S)
            now = time.monotonic()
            self._read_events()
            if self._terminal.is_closed():
                os.kill(os.getpid(), signal.SIGHUP)  # ignored under nohup
            for number in self._signals[self._num_forwarded :]:
                self._num_forwarded += 1
                self._forward(number)
            is_stopped = process_state(self.process.pid) in ("stopped", "tracing-stop")
            stopped_at = (stopped_at or now) if is_stopped else None
            limits = (  # since when, for how long at most, the message
                (self._signalled_at, STOP_S, f"it did not end within {STOP_S:.0f} s of a signal"),
                (stopped_at, STOPPED_S, f"the launcher (process {self.process.pid}) is stopped"),
                (
                    None if self.events else self._started_at,
                    START_S,
                    f"no rank of this machine was there {START_S:.0f} s after the launcher's start; expected "
                    f"the other machines, if there are any, to be there. Look at what they say, and at "
                    f"address and port",
                ),
            )
            late = (why for since, limit_s, why in limits if since is not None and now - since > limit_s)
            self.why = next(late, self.why) or self._silence(now)

    def _silence(self, now: float) -> str:
        """The message if no rank writes heartbeats any more; else ""."""
        pulses, limit = {}, 0.0
        for event in self.of("open")[:1]:
            for path in Path(event["directory"]).glob("rank*.json"):
                if record := try_read_json(path):
                    pulses[path.name], limit = record["pulse"], max(limit, record["limit_s"])
        if pulses != self._pulses or not pulses:
            self._pulses, self._pulse_at = pulses, now
        silent_s = now - self._pulse_at
        return f"no heartbeat for {silent_s:.0f} s" if silent_s > 1.5 * limit + 5.0 else ""

    def _read_events(self) -> None:
        """Append the ranks' new events."""
        with self._events.open("rb") as file:
            file.seek(self._num_read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # whole lines
        self._num_read += len(text)
        for line in filter(None, text.split(b"\n")):
            try:
                self.events.append(json.loads(line))
            except ValueError:
                log(f"WARNING: a word of a rank is torn: {line[:60]!r}")

    def _forward(self, number: int) -> None:
        """Send the first signal to the ranks, which agree on the step to stop at. Without ranks, or on a
        second Ctrl-C, end all at once; further SIGTERMs change nothing.
        """
        if self._signalled_at is not None:
            if number == signal.SIGINT and time.monotonic() - self._signalled_at > SAME_S:
                self.why = "Ctrl-C came again"
            return
        self._signalled_at = time.monotonic()
        started = self.of("start")
        self.why = "" if started else "a signal came before there was anything to save"
        for event in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(event["pid"], number)


class Decision(NamedTuple):
    """What follows from the end of an attempt. code: the exit code if it is not restarted."""

    is_restart: bool
    code: int
    reason: str


def decide(code: int, events: list[dict[str, Any]], why: str = "") -> Decision:
    """From the launcher's exit code and the ranks' events. why: the reason if the supervisor ended the tree
    itself.
    """
    kinds = {event["event"] for event in events}
    failures = [event for event in events if event["event"] == "failed"]
    if refusals := dict.fromkeys(event["cause"] for event in failures if event["kind"] == "configuration"):
        return Decision(False, REFUSED, "; ".join(refusals))  # usually the same from every rank
    # a failure that would repeat explains most, a lost peer least
    failures.sort(key=lambda event: (event["kind"] not in FINAL, event["kind"] == "peer"))
    causes = [f"rank {event['rank']}: {event['cause']}" for event in failures]
    if failures and failures[0]["kind"] in FINAL:
        return Decision(False, FINAL[failures[0]["kind"]], causes[0])
    if "finished" in kinds and code == 0:
        return Decision(False, 0, "finished")
    started = {event["rank"] for event in events if event["event"] == "start"}
    ended = {event["rank"] for event in events if event["event"] in ("failed", "stopped", "finished")}
    # else the launcher forwarded a signal after a death
    if ("stopped" in kinds or failures) and started <= ended:
        if all(event["kind"] == "stopped" for event in failures):
            return Decision(False, EXIT_STOPPED, TOLD_TO_STOP)
    if why:
        return Decision(bool(events), EXIT_HANG, why)  # without any rank, a restart would not help
    if code == 0 and not started:
        return Decision(False, 0, "nothing to do")  # such as --dry-run or --help
    if code == 0:
        return Decision(False, 1, "all ranks left before the stage was finished")
    if failures:
        return Decision(True, EXIT_HANG if failures[0]["kind"] == "hang" else 1, causes[0])
    if not started:
        reason = f"it ended with exit code {code} before any rank was ready"
        return Decision(False, code if 0 < code < 128 else 1, reason)
    return Decision(True, 1, f"processes died without a word (exit code {code})")


def launcher_command(arguments: list[str]) -> list[str]:
    """The command that starts the ranks, on a free port unless the user or the topology sets one."""
    settings: dict[str, Any] = {}
    if "--config_file" in arguments[:-1]:
        path = Path(arguments[arguments.index("--config_file") + 1])
        if not path.is_file():
            raise FileNotFoundError(
                f"no topology file {path}; expected one of accelerate_configs/. Correct --config_file."
            )
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    has_port = (
        settings.get("num_machines", 1) != 1
        or {"main_process_port", "rdzv_backend"} & settings.keys()
        or any(word.startswith(("--main_process_port", "--num_machines")) for word in arguments)
    )
    port = [] if has_port else ["--main_process_port", "0"]
    place = next(index for index, word in enumerate(arguments) if word.endswith(".py"))
    ranks = ["--module", "ups_launch", "rank", *arguments[place:]]
    return [sys.executable, "-m", "ups_launch", "launcher", *port, *arguments[:place], *ranks]


@contextlib.contextmanager
def events_file() -> Iterator[Path]:
    """An empty file in memory for the ranks' events, so a full disk cannot lose them; on macOS on disk."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile(prefix="ups-launch-") as file:
            yield Path(file.name)
        return
    handle = os.memfd_create("ups-launch")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)


def supervise(arguments: list[str], restarts: int = RESTARTS) -> int:
    """Run the stage to its end; the exit code.

    Raises FileNotFoundError for a topology file that does not exist.
    """
    command, terminal = launcher_command(arguments), Terminal()
    signals: list[int] = []  # received so far; the handler only appends
    adopt_orphans()

    def on_signal(number: int, _frame: Any) -> None:
        signals.append(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup
            signal.signal(number, on_signal)
    newest, num_failed, shortages = -1, 0, set()
    while True:
        with events_file() as events:
            attempt = Attempt(command, events, terminal, signals)
            is_restart, code, reason = decide(attempt.wait(), attempt.events, attempt.why)
        if signals and (is_restart or attempt.why or code == EXIT_STOPPED):
            is_restart, code, reason = False, 128 + signals[-1], attempt.why or TOLD_TO_STOP
        if not is_restart:
            if code:
                log(f"{'refused' if code == REFUSED else 'not started again'}: {reason}")
            return code
        step = max((event["step"] for event in attempt.of("saved")), default=-1)
        # a cause contains its micro-batch, so it is new once
        new_shortages = {event["cause"] for event in attempt.of("failed") if event["kind"] == "memory"}
        num_failed = 0 if step > newest or new_shortages - shortages else num_failed + 1
        newest, shortages, reason = max(newest, step), shortages | new_shortages, reason.rstrip(".")
        if num_failed > restarts:
            log(
                f"giving up after {restarts} restarts without a new checkpoint (the newest is of step "
                f"{newest}): {reason}. The same command tries again."
            )
            return code
        place = f"the checkpoint of step {newest}" if newest >= 0 else "the beginning"
        log(f"{reason}. Starting again from {place}")
        time.sleep(BACKOFF_S)
        if signals:
            return 128 + signals[-1]


def log(text: str) -> None:
    print_raw(f"launch: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ups_launch",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--restarts", type=int, default=RESTARTS, help="restarts in a row without a new checkpoint"
    )
    options, arguments = parser.parse_known_args()
    if not any(word.endswith(".py") for word in arguments):
        parser.error("no script; expected accelerate launch's options, a script and its arguments")
    if sys.platform == "win32":
        log("training needs Linux or macOS, and this is Windows; expected POSIX signals. Use WSL.")
        return REFUSED
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file of ours gets a closed stream's number
        pass
    os.close(handle)
    try:
        return supervise(arguments, options.restarts)
    except OSError as error:
        log(str(error))
        return REFUSED
