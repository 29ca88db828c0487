"""Where numbers go: metrics.jsonl first and always, then Weights & Biases or TensorBoard if asked for.

Main process only. metrics.jsonl is cut back to the resumed step, so a resumed run has neither gaps nor duplicates. An
outside tracker that fails is reported once and dropped; it never stops training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ups.checkpoint import write_atomic, write_json
from ups.config import TrackerConfig

INIT_TIMEOUT_S = 60  # W&B's own default is 90; a run that cannot reach the server goes on without


def check_tracker(tracker: TrackerConfig) -> None:
    """Raise ValueError if the package that `tracker.kind` needs is not installed."""
    package = {"none": "json", "wandb": "wandb", "tensorboard": "tensorboard"}[tracker.kind]
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"tracker.kind is {tracker.kind}, but the package {package} is not installed; expected it in this "
                         f"environment. Run: pip install {package}, or set tracker.kind=none.")


class Tracker:
    """Writes one stage's numbers. group: the run's name, shared by its stages."""

    def __init__(self, directory: Path, tracker: TrackerConfig, group: str, stage: str, config: dict[str, Any]) -> None:
        self.path, self.stage, self._outside = directory / "metrics.jsonl", stage, None
        self._file = self.path.open("a", encoding="utf-8")
        if tracker.kind == "wandb":
            self._try(lambda: self._open_wandb(directory, tracker, group, config))
        elif tracker.kind == "tensorboard":
            self._try(lambda: self._open_tensorboard(directory))

    def rewind(self, step: int) -> None:
        """Drop the lines after `step` (and a torn last line)."""
        self._file.close()
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                is_kept = json.loads(line)["step"] <= step
            except ValueError:  # the line that was being written when the process died
                is_kept = False
            if is_kept:
                kept.append(line + "\n")
        write_atomic(self.path, "".join(kept))
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One line {"step", "time", **values}; numbers also go to the outside tracker as STAGE/NAME against STAGE/step."""
        print(json.dumps({"step": step, "time": round(time.time(), 3), **values}), file=self._file, flush=True)
        if self._outside is not None:
            self._try(lambda: self._send(step, {k: v for k, v in values.items() if isinstance(v, (int, float))}))

    def flush(self) -> None:
        """Force what was logged to disk; a checkpoint is committed after it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, exit_code: int) -> None:
        """Close everything, with the true exit code."""
        self._file.close()
        outside, self._outside = self._outside, None
        if outside is not None:
            self._try(lambda: outside.finish(exit_code=exit_code) if hasattr(outside, "finish") else outside.close())

    def _send(self, step: int, values: dict[str, float]) -> None:
        if hasattr(self._outside, "add_scalar"):
            for name, value in values.items():
                self._outside.add_scalar(f"{self.stage}/{name}", value, step)
        else:  # never W&B's own step=: lower ones are dropped after a resume
            self._outside.log({f"{self.stage}/step": step, **{f"{self.stage}/{k}": v for k, v in values.items()}})

    def _open_tensorboard(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._outside = SummaryWriter(str(directory / "tensorboard"))

    def _open_wandb(self, directory: Path, tracker: TrackerConfig, group: str, config: dict[str, Any]) -> None:
        import wandb

        record = directory / "wandb.json"  # the id is random, made once and stored before use: W&B refuses re-used ids
        if not record.is_file():
            write_json(record, {"id": uuid.uuid4().hex})
        self._outside = wandb.init(
            project=tracker.project, mode=tracker.mode, dir=str(directory), id=json.loads(record.read_text())["id"],
            resume="allow", group=group, job_type=self.stage, name=f"{group}-{self.stage}", config=config,
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S),
        )
        self._outside.define_metric(f"{self.stage}/*", step_metric=f"{self.stage}/step")

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # the one place: numbers are already in metrics.jsonl, and training goes on
            self._outside = None
            print(f"WARNING: the tracker failed and is switched off ({type(error).__name__}: {error}); the numbers are in "
                  f"{self.path}.", file=sys.stderr, flush=True)
