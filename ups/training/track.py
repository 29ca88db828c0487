"""Metrics of a stage: means over ranks and steps, written to metrics.jsonl always and first, then to Weights
& Biases or TensorBoard if configured.

Only the main process has a tracker. metrics.jsonl is cut back to the resumed step, so a resumed run has
neither gaps nor duplicates. An outside tracker runs in a thread and gets all lines of metrics.jsonl at every
start, so it can neither block training nor miss numbers. If it fails, it is reported once and dropped; if it
blocks, only the end of the stage waits for it, for a limited time. TensorBoard drops what earlier starts
wrote; W&B cannot, so wandb.json keeps the run's id and the last step sent.
"""

import contextlib
import importlib.util
import json
import os
import queue
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ups.common.files import DamagedError, is_at, require_plain, write_atomic, write_json
from ups.common.progress import beat
from ups.config.schema import TrackerConfig

if TYPE_CHECKING:
    from ups.training.ranks import Ranks
    from ups.training.update import Counters, Update

INIT_TIMEOUT_S = 30  # W&B's default is 90
FINISH_TIMEOUT_S = 20  # its default is none: it would wait for a network that never comes back
WAIT_S = 60  # for both, at the end of a finished stage
FAILED_WAIT_S = 8  # at the end of any other: less than LEAVE_S of ups/training/activity.py
FLUSH_S = 1.0  # W&B's default is 15: what a killed offline run may lose
MAX_WAITING = 100_000  # queued calls; with more the tracker is taken for blocked


def check_tracker(tracker: TrackerConfig) -> None:
    """Raise ValueError if the package that `tracker.kind` needs is not installed."""
    package = {"none": "json", "wandb": "wandb", "tensorboard": "tensorboard"}[tracker.kind]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"tracker.kind is {tracker.kind}, but the package {package} is not installed; expected it in "
            f"this environment. Run: pip install {package}, or set tracker.kind=none."
        )


class MetricsLog:
    """The metrics of one stage and their means between two logs. Only the main process has a tracker."""

    def __init__(self, ranks: "Ranks", counters: "Counters") -> None:
        self.ranks, self.counters = ranks, counters
        self.tracker: Tracker | None = None
        # name -> [sum of value * rows, rows] on this rank since the last log
        self.window: dict[str, list] = {}
        self.mark()

    def mark(self) -> None:
        """Measure the rate of steps from here on."""
        self._marked_at, self._marked_step = time.perf_counter(), self.counters.step

    def log(self, values: dict[str, Any]) -> None:
        """Write metrics at the current step, and the processor's time so far, if this rank has a tracker."""
        if self.tracker is not None and self.ranks.unreported is None:
            try:
                self.tracker.log(self.counters.step, values | {"processor_s": time.process_time()})
            # a line is missing, so all ranks must stop before the next checkpoint
            except OSError as error:
                self.ranks.unreported = error

    def flush(self) -> None:
        """Force everything to disk. Raises OSError if that fails or a line is missing."""
        if self.ranks.unreported is not None:
            raise self.ranks.unreported
        if self.tracker is not None:
            self.tracker.flush()

    def rewind(self) -> None:
        """Drop the lines after the current step."""
        if self.tracker is not None:
            self.tracker.rewind(self.counters.step)

    def add(self, done: "Update") -> None:
        """Add an update to the means."""
        if done.is_finite:
            loss = [("loss", done.loss, done.num_rows)] if self.ranks.is_main else []
            for name, value, num_rows in [*done.metrics, *loss]:
                total, num_before = self.window.get(name, (0.0, 0))
                self.window[name] = [total + value * num_rows, num_before + num_rows]

    def plain_window(self) -> dict[str, list]:
        return {name: [float(total), num_rows] for name, (total, num_rows) in self.window.items()}

    def log_means(self, done: "Update") -> None:
        """Log the means since the last call and the speed. A collective."""
        windows, self.window = self.ranks.gather(self.plain_window()), {}
        totals: dict[str, tuple[float, int]] = {}
        for window in windows:
            for name, (total, num_rows) in window.items():
                before, num_before = totals.get(name, (0.0, 0))
                totals[name] = (before + total, num_before + num_rows)
        num_steps, seconds = self.counters.step - self._marked_step, time.perf_counter() - self._marked_at
        self.mark()
        memory_gib = self.ranks.memory_gib()
        self.log(
            {
                **{f"train/{name}": total / num_rows for name, (total, num_rows) in sorted(totals.items())},
                "train/lr_factor": done.factor,
                "train/gradient_norm": done.norm,
                "train/skipped": self.counters.num_skipped,
                "train/micro_batch": self.counters.micro_batch,
                "steps_per_s": round(num_steps / max(seconds, 1e-9), 3),
                **({} if memory_gib is None else {"memory_gib": memory_gib}),
            }
        )

    def close(self, exit_code: int) -> None:
        """Close the tracker with the true exit code."""
        if self.tracker is not None:
            try:
                self.tracker.finish(exit_code)
            except OSError as error:  # a full disk; missing lines were raised in an update
                print(f"WARNING: {error} in closing {self.tracker.path}", file=sys.stderr, flush=True)


class Tracker:
    """Writes the metrics of one stage. group: the run's name. Call `rewind` once before the first `log`."""

    def __init__(
        self, directory: Path, tracker: TrackerConfig, group: str, stage: str, config: dict[str, Any]
    ) -> None:
        self.path = directory / "metrics.jsonl"
        require_plain(self.path, "Remove it, and run the same command again.")
        self._file = self.path.open("a", encoding="utf-8")
        self._waiting: queue.Queue[list | int] = queue.Queue(MAX_WAITING)  # lines, or the exit code
        self._outside: threading.Thread | None = None
        if tracker.kind != "none":
            facts = (directory, tracker, group, stage, config)
            self._outside = threading.Thread(target=self._serve, name=tracker.kind, daemon=True, args=facts)
            self._outside.start()

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, where training continues, and a last line that is cut short.

        Raises DamagedError for an unreadable line, because its metrics would be missing.
        """
        kept, lines = [], []
        *whole, torn = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(whole, 1):
            try:
                values = json.loads(line)
                at = values.pop("step")
                is_kept = at <= step
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DamagedError(
                    f"line {number} of {self.path} is not readable ({error}); expected a step and its "
                    f"numbers (only the last line may be cut short). Restore the file from a copy, or remove "
                    f"it to go on without the numbers so far"
                ) from error
            if is_kept:
                kept.append(line.decode() + "\n")
                values.pop("time", None)
                lines.append((at, values))
        self._send(lines)
        if torn or len(kept) < len(whole):
            self._file.close()
            write_atomic(self.path, "".join(kept))
            self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write a line {"step", "time", **values}; send numbers to the outside tracker as STAGE/NAME."""
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values})
        print(line, file=self._file, flush=True)
        self._send([(step, values)])

    def flush(self) -> None:
        """Force all lines to disk, before a checkpoint. Raises FileNotFoundError if the file is gone."""
        if not is_at(self.path, self._file):
            raise FileNotFoundError(
                f"{self.path} was removed or replaced while it was written; expected it to stay. Start the "
                f"stage again: it continues from its last checkpoint, without the numbers before"
            )
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, exit_code: int) -> None:
        """Close everything with the true exit code. Waits for the outside tracker at most WAIT_S, after a
        failure FAILED_WAIT_S.
        """
        self._file.close()
        self._send(exit_code)
        wait_s, thread = FAILED_WAIT_S if exit_code else WAIT_S, self._outside
        until = time.monotonic() + wait_s
        while thread is not None and thread.is_alive() and time.monotonic() < until:
            thread.join(0.2)
            if not exit_code:
                beat()  # the wait is limited here, not by the guard
        if thread is not None and thread.is_alive():
            _end_service()
            self._switch_off(TimeoutError(f"it did not take everything within {wait_s} s"))

    def _send(self, lines: list[tuple[int, dict[str, Any]]] | int) -> None:
        """Queue lines, or at last the exit code, for the outside tracker."""
        if self._outside is not None:
            try:
                self._waiting.put_nowait(lines)
            except queue.Full as error:  # metrics.jsonl has the metrics, so training continues
                self._switch_off(error)

    def _serve(self, directory: Path, tracker: TrackerConfig, *facts: Any) -> None:
        """In the thread: build the outside tracker and send the queued lines."""
        try:
            outside = {"wandb": _Wandb, "tensorboard": _TensorBoard}[tracker.kind](directory, tracker, *facts)
            while isinstance(lines := self._waiting.get(), list):
                for step, values in lines:
                    outside.send(step, {k: v for k, v in values.items() if isinstance(v, (int, float))})
            outside.finish(lines)
        except Exception as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self._outside = None
        print(
            f"WARNING: the tracker failed and is switched off ({type(error).__name__}: {error}); the "
            f"numbers are in {self.path}.",
            file=sys.stderr,
            flush=True,
        )


class _Wandb:
    """One W&B run, continued by its id. Steps that an earlier start has sent are not sent again."""

    def __init__(
        self, directory: Path, tracker: TrackerConfig, group: str, stage: str, config: dict[str, Any]
    ) -> None:
        import wandb

        self.stage, self.path = stage, directory / "wandb.json"
        self.record = {"id": uuid.uuid4().hex, "step": -1}
        if self.path.is_file():
            self.record |= json.loads(self.path.read_text(encoding="utf-8"))
        self.sent = self.record["step"]
        # before its use: a random id, as W&B refuses that of a deleted run
        write_json(self.path, self.record)
        # without credentials W&B would ask a person
        if tracker.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no W&B credentials; run wandb login, or set tracker.mode=offline")
        self.run = wandb.init(
            project=tracker.project,
            mode=tracker.mode,
            dir=str(directory),
            id=self.record["id"],
            resume="allow",
            group=group,
            job_type=stage,
            name=f"{group}-{stage}",
            config=config,
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT_S,
                login_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                x_transaction_log_flush_interval=FLUSH_S,
                console="off",  # no wrapper around the stdout of all threads
            ),
        )
        self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def send(self, step: int, values: dict[str, float]) -> None:
        """Send a line. W&B's own step= is not used, because it drops lower steps after a resume."""
        if step > self.sent:
            self.record["step"] = step
            write_json(self.path, self.record)  # first, so after a crash W&B has each metric at most once
            self.run.log({f"{self.stage}/{name}": value for name, value in {"step": step, **values}.items()})

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)


class _TensorBoard:
    """Event files in DIRECTORY/tensorboard. Each start writes all metrics to a new one and drops others."""

    def __init__(
        self, directory: Path, tracker: TrackerConfig, group: str, stage: str, config: dict[str, Any]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.stage, self.writer = stage, SummaryWriter(str(directory / "tensorboard"), purge_step=0)

    def send(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{self.stage}/{name}", value, step)

    def finish(self, exit_code: int) -> None:
        self.writer.close()


def _end_service() -> None:
    """Kill the wandb-core process of this process: at exit W&B waits for it without limit."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "wandb-core" in " ".join(process.cmdline()):
                process.kill()
