"""Supervisor of a stage: runs `accelerate launch`, restarts it after a death or hang, ends all its processes.

    python -m ups_launch --config_file accelerate_configs/cpu2.yaml train_operator.py --config
    configs/small.yaml

All arguments but --restarts go to accelerate launch. Every start is a new process tree in its own session,
with a free port, because torchrun's own restarts reuse keys of dead processes (pytorch issue 135712).
Restarted are: processes that died, hangs that the guard ended, and out of memory if a smaller micro-batch is
left; but only while checkpoints appear or micro-batches shrink. Not restarted are: refused configurations
(exit code 2), failures that would repeat (1) and stages stopped by a signal (143, or 130 after Ctrl-C). The
exit code is 0 only if the stage is finished. Ranks report through ups_launch.processes.send_event. Starts
without torch; the scripts also run without the supervisor.

This module also runs in the tree, as the launcher and as each rank (`ROLES`). Accelerate and torchrun would
print a traceback and a summary after the messages of the ranks; the launcher prints at most one line. A rank
dies with its launcher, by the kernel (ups_launch.processes.die_with_parent), even while it imports torch or
is in a call that holds the interpreter's lock. Its first event shows the supervisor that it has started.
"""

import argparse
import contextlib
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ups.common.place import require_posix
from ups_launch.guard import EXIT_HANG, SAME_S
from ups_launch.processes import (
    EVENTS,
    Terminal,
    adopt_orphans,
    descendants,
    die_with_parent,
    end_processes,
    process_state,
    protect_output,
    saved_steps,
    send_event,
    try_read_json,
)

POLL_S = 0.1
START_S = 600.0  # from the launcher's start to the first rank: it may wait for other machines
RESTARTS = 3  # in a row, without a new checkpoint
BACKOFF_S = 1.0  # before a restart
STOP_S = 60.0  # from a signal to the end: the guard's grace, a checkpoint, the tracker
STOPPED_S = 10.0  # in which the launcher may be stopped (state T) before it counts as hung
LINGER_S = 20.0  # for which the launcher may outlive all its ranks
CHILDREN_S = 3.0  # for remaining processes (a tracker's service) to end by themselves
LAUNCHER = "UPS_LAUNCHER"  # environment variable with the process number of the launcher
FINAL = {"configuration": 2, "error": 1, "save": 1, "non_finite": 1, "out_of_memory": 1, "interrupted": 130}


class Attempt:
    """One process tree. signals: those received so far, a list that grows; events: from its ranks; why: the
    reason if the supervisor ended it.
    """

    def __init__(self, command: list[str], events: Path, terminal: Terminal, signals: list[int]) -> None:
        self._events, self._signals, self._num_forwarded = events, signals, 0
        self.events: list[dict[str, Any]] = []
        self._read, self._pulses, self.why, self._signalled_at = 0, {}, "", None
        self._started_at = self._pulse_at = time.monotonic()
        self._terminal = terminal
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
            code = self.process.poll()
            end_processes(
                lambda: descendants(os.getpid()), CHILDREN_S if code is not None and not self.why else 0.0
            )
            code = self.process.wait()
            self._read_events()
        return code

    def _watch(self) -> None:
        stopped_at = alone_at = None
        while self.process.poll() is None and not self.why:
            time.sleep(POLL_S)
            now = time.monotonic()
            self._read_events()
            if self._terminal.is_closed():
                os.kill(os.getpid(), signal.SIGHUP)  # ignored under nohup
            for number in self._signals[self._num_forwarded :]:
                self._num_forwarded += 1
                self._forward(number)
            state = process_state(self.process.pid)
            stopped_at = (stopped_at or now) if state is not None and state[0] in "Tt" else None
            pids = self.pids()
            alone_at = (alone_at or now) if pids and not any(process_state(pid) for pid in pids) else None
            launcher = f"the launcher (process {self.process.pid})"
            limits = (  # since when, for how long at most, the message
                (self._signalled_at, STOP_S, f"it did not end within {STOP_S:.0f} s of a signal"),
                (stopped_at, STOPPED_S, f"{launcher} is stopped"),
                (alone_at, LINGER_S, f"{launcher} outlives all its ranks"),
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
        """The message if no rank of this machine writes heartbeats any more; else ""."""
        if self.directory is None:
            return ""
        pulses, limit = {}, 0.0
        for path in (self.directory / "heartbeat").glob("rank*.json"):
            if record := try_read_json(path):
                pulses[path.name], limit = record["pulse"], max(limit, record["limit_s"])
        if pulses != self._pulses or not pulses:
            self._pulses, self._pulse_at = pulses, now
        silent_s = now - self._pulse_at
        return f"no heartbeat for {silent_s:.0f} s" if silent_s > 1.5 * limit + 5.0 else ""

    def _read_events(self) -> None:
        """Append the ranks' new events."""
        with self._events.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # whole lines
        self._read += len(text)
        for line in filter(None, text.split(b"\n")):
            try:
                self.events.append(json.loads(line))
            except ValueError:
                log(f"WARNING: a word of a rank is torn: {line[:60]!r}")

    @property
    def directory(self) -> Path | None:
        """The stage directory, once it is open."""
        found = [event["directory"] for event in self.events if event["event"] == "open"]
        return Path(found[0]) if found else None

    def pids(self) -> list[int]:
        """The ranks' processes on this machine."""
        return [event["pid"] for event in self.events if event["event"] == "start"]

    def _forward(self, number: int) -> None:
        """Send the first signal to the ranks, which agree on the step to stop at. Without ranks, or on a
        second Ctrl-C, end all at once; further SIGTERMs change nothing.
        """
        if self._signalled_at is not None:
            if number == signal.SIGINT and time.monotonic() - self._signalled_at > SAME_S:
                self.why = "Ctrl-C came again"
            return
        self._signalled_at = time.monotonic()
        if not self.pids():
            self.why = "a signal came before there was anything to save"
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def decide(code: int, events: list[dict[str, Any]], why: str = "") -> tuple[bool, int, str]:
    """(whether to restart, exit code if not, reason), from the launcher's exit code and the ranks' events.

    why: the reason if the supervisor ended the tree itself.
    """
    kinds = {event["event"] for event in events}
    failures = [event for event in events if event["event"] == "failed"]
    refusals = dict.fromkeys(event["cause"] for event in failures if event["kind"] == "configuration")
    # a failure that would repeat explains most, a lost peer least
    failure = min(
        failures,
        key=lambda event: (event["kind"] not in FINAL, event["kind"] == "peer"),
        default={"rank": 0, "kind": "", "cause": ""},
    )
    kind, cause = failure["kind"], f"rank {failure['rank']}: {failure['cause']}"
    started = {event["rank"] for event in events if event["event"] == "start"}
    ended = {event["rank"] for event in events if event["event"] in ("failed", "stopped", "finished")}
    # else the launcher forwarded a signal after a death
    is_stop = (
        ("stopped" in kinds or failures)
        and started <= ended
        and all(event["kind"] == "stopped" for event in failures)
    )
    is_quiet, own = code == 0 and not why, code if 0 < code < 128 else 1
    rows = (  # (whether it applies, *the result); the first that applies counts
        (refusals, False, FINAL["configuration"], "; ".join(refusals)),  # usually the same from every rank
        (kind in FINAL, False, FINAL.get(kind), cause),
        ("finished" in kinds and code == 0, False, 0, "finished"),
        (is_stop, False, 128 + signal.SIGTERM, "told to stop; the same command continues"),
        (is_quiet and "start" not in kinds, False, 0, "nothing to do"),  # such as --dry-run or --help
        (is_quiet, False, 1, "all ranks left before the stage was finished"),
        (why, bool(events), EXIT_HANG, why),  # without any rank, a restart would not help
        (failures, True, EXIT_HANG if kind == "hang" else 1, cause),
        ("start" not in kinds, False, own, f"it ended with exit code {own} before any rank was ready"),
        (True, True, 1, f"processes died without a word (exit code {code})"),
    )
    return next(tuple(row) for applies, *row in rows if applies)


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
            is_again, code, reason = decide(attempt.wait(), attempt.events, attempt.why)
        if signals and (is_again or attempt.why or code == 128 + signal.SIGTERM):
            code, is_again = 128 + signals[-1], False
            reason = attempt.why or "told to stop; the same command continues"
        if not is_again:
            if code:
                log(f"{'refused' if code == FINAL['configuration'] else 'not started again'}: {reason}")
            return code
        steps = saved_steps(attempt.directory / "state") if attempt.directory else []
        step, reason = max(steps, default=-1), reason.rstrip(".")
        memory_causes = {event["cause"] for event in attempt.events if event.get("kind") == "memory"}
        # a cause contains its micro-batch, so it is new once
        num_failed = 0 if step > newest or memory_causes - shortages else num_failed + 1
        newest, shortages = max(newest, step), shortages | memory_causes
        if num_failed > restarts:
            log(
                f"giving up after {restarts} restarts without a new checkpoint (the newest is of step "
                f"{newest}): {reason}. The same command tries again."
            )
            return code
        log(
            f"{reason}. Starting again from "
            f"{f'the checkpoint of step {newest}' if newest >= 0 else 'the beginning'}"
        )
        time.sleep(BACKOFF_S)
        if signals:
            return 128 + signals[-1]


# ---------------------------------------------------------------- in the tree


def launcher(arguments: list[str]) -> int:
    """Run `accelerate launch`; its exit code."""
    from accelerate.commands import launch
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # the ranks, or the exceptions below, report the same
    os.environ[LAUNCHER] = str(os.getpid())
    sys.argv, who, code = ["accelerate launch", *arguments], "the only rank", 0
    try:
        launch.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        who, code = f"rank {rank} (process {failure.pid})", failure.exitcode
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except SignalException as error:
        return 128 + error.sigval
    except (ConnectionError, DistNetworkError) as error:  # the address or the port is not free
        send_event(
            "failed",
            kind="configuration",
            code=2,
            cause=(
                f"{' '.join(str(error).split())[:200]}; expected a free port on this machine. Set PORT= of "
                f"cluster/node.sh on all machines, or --main_process_port"
            ),
        )
        return 2
    if code < 0:  # ended by a signal, which the rank could not report
        print(f"launcher: {who} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return int(code != 0)


def rank(arguments: list[str]) -> int:
    """Run a script as `python SCRIPT ...` would."""
    die_with_parent(int(os.environ[LAUNCHER]))
    send_event("born", pid=os.getpid())
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


ROLES = {"launcher": launcher, "rank": rank}  # by the first argument; else this is the supervisor


def log(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


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
    protect_output()
    if not any(word.endswith(".py") for word in arguments):
        parser.error("no script; expected accelerate launch's options, a script and its arguments")
    try:
        require_posix("training")
        return supervise(arguments, options.restarts)
    except OSError as error:
        log(str(error))
        return 2


if __name__ == "__main__":
    role = ROLES.get("".join(sys.argv[1:2]))
    sys.exit(role(sys.argv[2:]) if role else main())
