"""What a run writes while it trains: metrics, and checkpoints from which it resumes."""

import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from ups.common.files import DamagedError
from ups.config.schema import TrainConfig
from ups.training.activity import send_event
from ups.training.checkpoint import Checkpoints
from ups.training.counters import Counters, Update
from ups.training.ranks import Ranks, StageError
from ups.training.track import Tracker
from ups.training.update import Updates, set_torch_random_state, torch_random_state

MAX_FAILED_SAVES = 3  # in a row; more would risk days of work


class MetricsLog:
    """The metrics of one stage and their means between two logs. Only the main process has a tracker."""

    def __init__(self, ranks: Ranks, counters: Counters) -> None:
        self.ranks, self.counters = ranks, counters
        self.tracker: Tracker | None = None
        # name -> [sum of value * rows, rows] on this rank since the last log
        self.window: dict[str, list] = {}
        self.lines: list[int] | None = None  # of metrics.jsonl, as the loaded checkpoint has them
        self._error: OSError | None = None  # of rank 0; raised where all ranks can agree on it
        self.mark()

    def mark(self) -> None:
        """Measure the rate of steps from here on."""
        self._marked_at, self._marked_step = time.perf_counter(), self.counters.step

    def log(self, values: dict[str, Any]) -> None:
        """Write metrics at the current step, if this rank has a tracker."""
        if self.tracker is not None and self._error is None:
            try:
                self.tracker.log(self.counters.step, values)
            # a line is missing, so all ranks must stop before the next checkpoint
            except OSError as error:
                self._error = error

    def require_complete(self) -> None:
        """Raise the OSError because of which a line is missing."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Force everything to disk. Raises OSError if that fails or a line is missing."""
        self.require_complete()
        if self.tracker is not None:
            self.tracker.flush()

    def rewind(self) -> None:
        """Drop the lines after the current step."""
        if self.tracker is not None:
            self.tracker.rewind(self.counters.step, self.lines)

    def add(self, done: Update) -> None:
        """Add an update to the means."""
        if done.is_finite:
            loss = [("loss", done.loss, done.num_rows)] if self.ranks.is_main else []
            _add(self.window, ((name, value * rows, rows) for name, value, rows in [*done.metrics, *loss]))

    def plain_window(self) -> dict[str, list]:
        return {name: [float(total), num_rows] for name, (total, num_rows) in self.window.items()}

    def log_means(self, done: Update) -> None:
        """Log the means since the last call and the speed. A collective."""
        windows, self.window = self.ranks.gather(self.plain_window()), {}
        totals: dict[str, list[float]] = {}
        for window in windows:
            _add(totals, ((name, *entry) for name, entry in window.items()))
        num_steps, seconds = self.counters.step - self._marked_step, time.perf_counter() - self._marked_at
        self.mark()
        is_cuda = self.ranks.device.type == "cuda"
        memory = {"memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)} if is_cuda else {}
        self.log(
            {
                **{f"train/{name}": value / num_rows for name, (value, num_rows) in sorted(totals.items())},
                "train/lr_factor": done.factor,
                "train/gradient_norm": done.norm,
                "train/skipped": self.counters.num_skipped,
                "train/micro_batch": self.counters.micro_batch,
                "steps_per_s": round(num_steps / max(seconds, 1e-9), 3),
                **memory,
            }
        )

    def close(self, exit_code: int) -> None:
        """Close the tracker with the true exit code."""
        if self.tracker is not None:
            try:
                self.tracker.finish(exit_code)
            except OSError as error:  # a full disk; missing lines were raised by `require_complete`
                print(f"WARNING: {error} in closing {self.tracker.path}", file=sys.stderr, flush=True)


def _add(totals: dict[str, list], entries: Iterable[tuple[str, Any, int]]) -> None:
    """Add (name, sum of value * rows, rows) to the totals."""
    for name, value, num_rows in entries:
        before, num_before = totals.get(name, (0.0, 0))
        totals[name] = [before + value, num_before + num_rows]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def sum_in_one_order() -> None:
    """Make kernels of a GPU add in one order, so that a run that continues is bitwise equal to one that was
    not interrupted. torch warns of an operation that has no such kernel.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def random_state(device: torch.device) -> dict[str, Any]:
    """All generators of this rank as tensors and plain values."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    return {
        "torch": torch_random_state(device),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss],
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    set_torch_random_state(state["torch"], device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


class Saving:
    """Saves and restores a run: the state of `updates`, the means since the last log, random generators."""

    def __init__(
        self,
        ranks: Ranks,
        updates: Updates,
        metrics: MetricsLog,
        train: TrainConfig,
        notify: Callable[..., None],
    ) -> None:
        self.ranks, self.updates, self.metrics, self.train = ranks, updates, metrics, train
        self.notify = notify
        self.checkpoints = Checkpoints(
            ranks.folder.path / "state", train.keep, ranks.rank, ranks.agreed, ranks.folder.identity
        )
        self.num_failed = 0  # in a row

    def save(self, is_required: bool) -> None:
        """Commit a checkpoint. A failure is a warning; fatal if is_required or MAX_FAILED_SAVES in a row."""
        self.ranks.agreed(self.require_ready, "looking for the stage directory and writing metrics.jsonl")
        shared, own = self.updates.state()
        own |= {"random": random_state(self.ranks.device), "window": self.metrics.plain_window()}
        if self.metrics.tracker is not None:  # on rank 0, which writes what is shared
            shared["lines"] = torch.tensor(self.metrics.tracker.lines)
        try:
            self.checkpoints.save(shared["step"], shared, own, {"world": self.ranks.world})
            self.num_failed, self.updates.saved = 0, shared["step"]
            send_event("saved", step=shared["step"])
        except StageError as error:
            self.num_failed += 1
            if is_required or self.num_failed >= MAX_FAILED_SAVES:
                advice = (
                    f"Free space on, or repair, the disk of {self.ranks.folder.path}; the last "
                    f"checkpoint is intact."
                )
                raise StageError(f"{error} ({self.num_failed} failed in a row)", "save", advice) from error
            self.ranks.is_recorded = False
            self.notify(
                f"WARNING: {error}. Training goes on; the next try is after {self.train.save_every} more "
                f"steps."
            )

    def require_ready(self) -> None:
        """Raise OSError unless the folder still belongs to this run and all metrics are on disk."""
        self.ranks.folder.require_own()
        self.metrics.flush()

    def resume(self) -> None:
        """Load the newest intact checkpoint, if there is one. A collective."""
        ranks = self.ranks
        manifest = ranks.agreed(
            lambda: self.checkpoints.newest() if ranks.is_main else None, "looking for checkpoints"
        )
        manifest = ranks.gather(manifest)[0]
        if manifest is not None:
            step, world = manifest["step"], manifest["world"]
            ranks.agreed(lambda: self.load(step), f"loading the checkpoint of step {step}")
            send_event("saved", step=step)
            note = "" if world == ranks.world else f" (written by {world} processes)"
            self.notify(f"resumed at step {step}{note}")
        ranks.agreed(self.metrics.rewind, "cutting metrics.jsonl back to the resumed step")

    def load(self, step: int) -> None:
        """Load the checkpoint of `step`. Raises DamagedError if it does not fit this run."""
        try:
            shared, own = self.checkpoints.read(step, self.ranks.world)
            self.updates.load(shared, own, lambda: self.checkpoints.parts(step))
            lines = shared.get("lines")  # an earlier version wrote none
            self.metrics.lines = None if lines is None else lines.tolist()
            # else the number of processes changed: generators keep their state; batches depend on the step
            if own is not None:
                set_random_state(own["random"], self.ranks.device)
                self.metrics.window = own["window"]
        except (DamagedError, FileExistsError):
            raise
        except Exception as error:  # foreign content can raise anything
            path = self.checkpoints.path(step)
            raise DamagedError(
                f"{path} does not fit this run ({type(error).__name__}: {error}); expected what this version "
                f"and configuration save. {self.checkpoints.remedy(path)}"
            ) from error
