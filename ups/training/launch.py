"""Supervisor of a stage: runs `accelerate launch`, starts it again after a death or hang, leaves nothing
behind.

    python -m ups.training.launch --config_file accelerate_configs/cpu2.yaml train_operator.py --config
    configs/small.yaml

Everything but --restarts goes to accelerate launch. Every start is a new process tree in a session of its
own, with a free port; torchrun's own restarts reuse keys of the dead (pytorch issue 135712). Started again
are: processes that died, hangs that the guard ended, out of memory where a smaller micro-batch helps; and
only while checkpoints appear or micro-batches shrink. Not started again are: configurations that were refused
(exit code 2) and failures that all ranks understood, for they would repeat (1); what was told to stop (143,
or 130 after Ctrl-C). Exit code 0 only if the stage says it is finished. What became of each rank is read from
the lines that `send_event` writes (ups/training/processes.py). Starts without torch; scripts also run alone.

In the tree this module is the launcher and each rank (`PARTS`). Where accelerate and torchrun print a
traceback and a summary, which bury what a rank has said, the launcher says one line at most. A rank dies with
its launcher, before it imports torch: the kernel sees to it (ups.training.processes.die_with_parent), so no
import, and no call that holds the interpreter's lock, is in the way. Its first word tells the supervisor that
it is there.
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
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ups.training.guard import EXIT_HANG, SAME_S
from ups.training.processes import (
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
STOPPED_S = 10.0  # that the launcher may be in state T before it is taken for hung
LINGER_S = 20.0  # that the launcher may outlive all its ranks
CHILDREN_S = 3.0  # for what is left of a tree (a tracker's service) to end by itself
LAUNCHER = "UPS_LAUNCHER"  # number of the launcher's process, for its ranks
FINAL = {"configuration": 2, "error": 1, "save": 1, "non_finite": 1, "out_of_memory": 1, "interrupted": 130}


class Attempt:
    """One process tree.

    asked: the signals that we were sent, which grow; events: what its ranks told; why: we ended it ourselves.
    """

    def __init__(self, command: list[str], events: Path, terminal: Terminal, asked: list[int]) -> None:
        self._events, self._asked, self._num_asked = events, asked, 0
        self.events: list[dict[str, Any]] = []
        self._read, self._heard, self.why, self._told_at = 0, {}, "", None
        self._started_at = self._heard_at = time.monotonic()
        self._terminal = terminal
        self.process = subprocess.Popen(
            command,
            env={**os.environ, EVENTS: str(events)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )

    def wait(self) -> int:
        """The launcher's exit code, once everything that it started is gone."""
        try:
            self._watch()
        finally:
            code = self.process.poll()
            end_processes(
                lambda: descendants(os.getpid()), CHILDREN_S if code is not None and not self.why else 0.0
            )
            code = self.process.wait()
            self._hear()
        return code

    def _watch(self) -> None:
        stopped_at = alone_at = None
        while self.process.poll() is None and not self.why:
            time.sleep(POLL_S)
            now = time.monotonic()
            self._hear()
            if self._terminal.is_closed():
                os.kill(os.getpid(), signal.SIGHUP)  # unless nohup has made that mean nothing
            for number in self._asked[self._num_asked :]:
                self._num_asked += 1
                self._forward(number)
            state = process_state(self.process.pid)
            stopped_at = (stopped_at or now) if state is not None and state[0] in "Tt" else None
            pids = self.pids()
            alone_at = (alone_at or now) if pids and not any(process_state(pid) for pid in pids) else None
            launcher = f"the launcher (process {self.process.pid})"
            limits = (  # since when, how long that may be, what to say
                (self._told_at, STOP_S, f"it did not end within {STOP_S:.0f} s of a signal"),
                (stopped_at, STOPPED_S, f"{launcher} is stopped"),
                (alone_at, LINGER_S, f"{launcher} outlives all its ranks"),
                (
                    None if self.events else self._started_at,
                    START_S,
                    f"no rank of this machine was there {START_S:.0f} s after the launcher's start; expected "
                    f"the other machines, if there are any, to be there. Look at what they say, and at "
                    f"address "
                    f"and port",
                ),
            )
            late = (why for since, limit_s, why in limits if since is not None and now - since > limit_s)
            self.why = next(late, self.why) or self._silence(now)

    def _silence(self, now: float) -> str:
        """What to say if no rank of this machine has a heartbeat any more, not even a guard's."""
        if self.directory is None:
            return ""
        heard, limit = {}, 0.0
        for path in (self.directory / "heartbeat").glob("rank*.json"):
            if record := try_read_json(path):
                heard[path.name], limit = record["pulse"], max(limit, record["limit_s"])
        if heard != self._heard or not heard:
            self._heard, self._heard_at = heard, now
        silent_s = now - self._heard_at
        return f"no heartbeat for {silent_s:.0f} s" if silent_s > 1.5 * limit + 5.0 else ""

    def _hear(self) -> None:
        """Read what the ranks told since."""
        with self._events.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # whole lines
        self._read += len(text)
        for line in filter(None, text.split(b"\n")):
            try:
                self.events.append(json.loads(line))
            except ValueError:
                say(f"WARNING: a word of a rank is torn: {line[:60]!r}")

    @property
    def directory(self) -> Path | None:
        """The stage directory, once it is open."""
        found = [event["directory"] for event in self.events if event["event"] == "open"]
        return Path(found[0]) if found else None

    def pids(self) -> list[int]:
        """The ranks' processes on this machine."""
        return [event["pid"] for event in self.events if event["event"] == "start"]

    def _forward(self, number: int) -> None:
        """Send the first signal to the ranks, which agree on what to do; all end at once if there are none,
        or on another Ctrl-C.

        SIGTERM may come from several sides and often, so it means the same however often it comes.
        """
        if self._told_at is not None:
            if number == signal.SIGINT and time.monotonic() - self._told_at > SAME_S:
                self.why = "Ctrl-C came again"
            return
        self._told_at = time.monotonic()
        if not self.pids():
            self.why = "a signal came before there was anything to save"
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def verdict(code: int, events: list[dict[str, Any]], why: str = "") -> tuple[bool, int, str]:
    """(whether to start again, exit code if not, reason) after a launcher's exit code and what the ranks
    told.

    why: reason for which the supervisor ended the tree itself.
    """
    said = {event["event"] for event in events}
    failures = [event for event in events if event["event"] == "failed"]
    refusals = dict.fromkeys(event["cause"] for event in failures if event["kind"] == "configuration")
    # what would repeat explains most, a lost peer less than what was lost
    failure = min(
        failures,
        key=lambda event: (event["kind"] not in FINAL, event["kind"] == "peer"),
        default={"rank": 0, "kind": "", "cause": ""},
    )
    kind, cause = failure["kind"], f"rank {failure['rank']}: {failure['cause']}"
    started = {event["rank"] for event in events if event["event"] == "start"}
    ended = {event["rank"] for event in events if event["event"] in ("failed", "stopped", "finished")}
    # else a launcher passed on a signal after a death
    is_stop = (
        ("stopped" in said or failures)
        and started <= ended
        and all(event["kind"] == "stopped" for event in failures)
    )
    is_quiet, own = code == 0 and not why, code if 0 < code < 128 else 1
    rows = (  # the first that applies: whether it does, what is returned
        (refusals, False, FINAL["configuration"], "; ".join(refusals)),  # most often the same of every rank
        (kind in FINAL, False, FINAL.get(kind), cause),
        ("finished" in said and code == 0, False, 0, "finished"),
        (is_stop, False, 128 + signal.SIGTERM, "told to stop; the same command continues"),
        (is_quiet and "start" not in said, False, 0, "nothing to do"),  # such as --dry-run or --help
        (is_quiet, False, 1, "all ranks left before the stage was finished"),
        (why, bool(events), EXIT_HANG, why),  # where no rank was born another start will do no better
        (failures, True, EXIT_HANG if kind == "hang" else 1, cause),
        ("start" not in said, False, own, f"it ended with exit code {own} before any rank was ready"),
        (True, True, 1, f"processes died without a word (exit code {code})"),
    )
    return next(tuple(row) for applies, *row in rows if applies)


def launcher_command(arguments: list[str]) -> list[str]:
    """The command that starts the ranks, on a free port where the choice is ours."""
    settings: dict[str, Any] = {}
    if "--config_file" in arguments[:-1]:
        path = Path(arguments[arguments.index("--config_file") + 1])
        if not path.is_file():
            raise FileNotFoundError(
                f"no topology file {path}; expected one of accelerate_configs/. Correct --config_file."
            )
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    is_theirs = (
        settings.get("num_machines", 1) != 1
        or {"main_process_port", "rdzv_backend"} & settings.keys()
        or any(word.startswith(("--main_process_port", "--num_machines")) for word in arguments)
    )
    port = [] if is_theirs else ["--main_process_port", "0"]
    place = next(index for index, word in enumerate(arguments) if word.endswith(".py"))
    ranks = ["--module", "ups.training.launch", "rank", *arguments[place:]]
    return [sys.executable, "-m", "ups.training.launch", "launcher", *port, *arguments[:place], *ranks]


@contextlib.contextmanager
def events_file() -> Iterator[Path]:
    """An empty file in memory for what ranks tell: no disk can fill up under it."""
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
    asked: list[int] = []  # signals that came; a handler may not do more than note them
    adopt_orphans()

    def note(number: int, _frame: Any) -> None:
        asked.append(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, note)
    newest, num_failed, shortages = -1, 0, set()
    while True:
        with events_file() as events:
            attempt = Attempt(command, events, terminal, asked)
            is_again, code, reason = verdict(attempt.wait(), attempt.events, attempt.why)
        if asked and (is_again or attempt.why or code == 128 + signal.SIGTERM):
            code, is_again = 128 + asked[-1], False
            reason = attempt.why or "told to stop; the same command continues"
        if not is_again:
            if code:
                say(f"{'refused' if code == FINAL['configuration'] else 'not started again'}: {reason}")
            return code
        steps = saved_steps(attempt.directory / "state") if attempt.directory else []
        step, reason = max(steps, default=-1), reason.rstrip(".")
        told_of = {event["cause"] for event in attempt.events if event.get("kind") == "memory"}
        # a cause names its micro-batch, so it comes once
        num_failed = 0 if step > newest or told_of - shortages else num_failed + 1
        newest, shortages = max(newest, step), shortages | told_of
        if num_failed > restarts:
            say(
                f"giving up after {restarts} restarts without a new checkpoint (the newest is of step "
                f"{newest}): {reason}. The same command tries again."
            )
            return code
        say(
            f"{reason}. Starting again from "
            f"{f'the checkpoint of step {newest}' if newest >= 0 else 'the beginning'}"
        )
        time.sleep(BACKOFF_S)
        if asked:
            return 128 + asked[-1]


# ---------------------------------------------------------------- in the tree


def launcher(arguments: list[str]) -> int:
    """Run `accelerate launch`; its exit code."""
    from accelerate.commands import launch
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of what the ranks told already, or the exceptions below tell
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
    if code < 0:  # by a signal, so the rank could not say so itself
        print(f"launcher: {who} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return int(code != 0)


def rank(arguments: list[str]) -> int:
    """Run a script as `python SCRIPT ...` would."""
    die_with_parent(int(os.environ[LAUNCHER]))
    send_event("born", pid=os.getpid())
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


PARTS = {"launcher": launcher, "rank": rank}  # by the first word of the command line; else the supervisor


def say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ups.training.launch",
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
        return supervise(arguments, options.restarts)
    except FileNotFoundError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    part = PARTS.get("".join(sys.argv[1:2]))
    sys.exit(part(sys.argv[2:]) if part else main())
