"""Checkpoints, which are complete or absent, and what a run saves in them and resumes (`Saving.state`).

Commit: every rank writes its file into state/.tmp-STEP and flushes it; the ranks agree that all files are
there; the main process writes manifest.json (size and SHA-256 of every file) last, renames the folder to
state/step_STEP, flushes the parent and only then removes older ones, keeping at least two. A crash at any
point leaves the previous checkpoint untouched. A checkpoint is loaded only if its manifest matches the files
and has the identity of the stage (ups/training/artifact.py). Nothing is unpickled: tensors and plain values
are read with weights_only.
"""

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch

from ups.common.files import (
    DamagedError,
    file_hash,
    flush,
    read_sealed,
    remove_named,
    require_hash,
    write_sealed,
)
from ups.config.schema import TrainConfig
from ups.training import sharding
from ups.training.activity import send_event
from ups.training.artifact import CHECKPOINT, MANIFEST, require_identity
from ups.training.optim import require_alike
from ups.training.ranks import Ranks, StageError
from ups.training.track import MetricsLog
from ups.training.update import Updates, set_torch_random_state, torch_random_state
from ups.training.weights import require_finite

SHARED = "shared.pt"
MAX_FAILED_SAVES = 3  # in a row; more would risk days of work


def _clear(folder: Path) -> None:
    """Delete a checkpoint. Files of others in its folder are kept, in a folder that is no checkpoint."""
    if remove_named(folder, CHECKPOINT):
        kept = folder.with_name(f".kept-{folder.name}-{time.time_ns()}")
        folder.rename(kept)
        print(f"{folder} holds files that UPS did not write: moved to {kept}", file=sys.stderr, flush=True)


def saved_steps(directory: Path) -> list[int]:
    """Steps of the committed checkpoints in `directory`, newest first."""
    return sorted((int(path.name[5:]) for path in directory.glob("step_" + "[0-9]" * 9)), reverse=True)


class Checkpoints:
    """The checkpoints of one stage.

    agreed(function, doing): calls the function on this rank and raises on every rank if it raised on any
    (run.agreed); the only communication here. keep: number of newest checkpoints kept, at least two.
    identity: of the stage, part of every manifest.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        rank: int,
        agreed: Callable[[Callable[[], Any], str], Any],
        identity: dict[str, Any],
    ) -> None:
        self.directory, self.keep, self.identity = directory, keep, identity
        self.rank, self.agreed = rank, agreed

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step:09d}"

    def save(self, step: int, shared: dict[str, Any], local: dict[str, Any], facts: dict[str, Any]) -> None:
        """Commit a checkpoint. A collective.

        shared: tensors and plain values, equal on all ranks, written once; local: those of this rank; facts:
        plain values for the manifest. Raises RuntimeError on every rank if a file could not be written;
        earlier checkpoints then remain.
        """
        temporary = self.directory / f".tmp-{step:09d}"
        try:
            self.agreed(
                lambda: self.rank == 0 and self._begin(temporary), f"preparing the checkpoint of step {step}"
            )
            self.agreed(
                lambda: self._write(temporary, shared, local), f"writing the checkpoint of step {step}"
            )
            self.agreed(
                lambda: self.rank == 0 and self._commit(temporary, step, facts), f"committing step {step}"
            )
        except Exception:
            if self.rank == 0:
                with contextlib.suppress(OSError):
                    _clear(temporary)
            raise

    def _begin(self, temporary: Path) -> None:
        self.directory.mkdir(exist_ok=True)  # fails if the stage's folder was removed
        for stale in self.directory.glob(".tmp-" + "[0-9]" * 9):
            _clear(stale)
        temporary.mkdir()

    def _write(self, temporary: Path, shared: dict[str, Any], local: dict[str, Any]) -> None:
        parts = {f"rank_{self.rank}.pt": local, **({SHARED: shared} if self.rank == 0 else {})}
        for name, value in parts.items():
            with (temporary / name).open("xb") as file:
                torch.save(value, file)
            flush(temporary / name)

    def _commit(self, temporary: Path, step: int, facts: dict[str, Any]) -> None:
        files = {
            path.name: {"size": path.stat().st_size, "sha256": file_hash(path)}
            for path in temporary.iterdir()
        }
        write_sealed(temporary / MANIFEST, {"step": step, **facts, **self.identity, "files": files})
        # a run that went back to an earlier step writes this one again
        _clear(self.path(step))
        os.replace(temporary, self.path(step))
        flush(self.directory)
        for old in saved_steps(self.directory)[self.keep :]:
            _clear(self.path(old))

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of `step`.

        Raises DamagedError if it was altered, FileExistsError if it is another stage's.
        """
        path = self.path(step)
        try:
            manifest = read_sealed(
                path / MANIFEST,
                "a committed checkpoint",
                "",
                step=int,
                world=int,
                files=dict,
                config_hash=str,
                parents=dict,
            )
        except FileNotFoundError as error:
            raise DamagedError(
                f"{path} has no readable {MANIFEST} ({error}); expected a committed checkpoint."
            ) from error
        require_identity(
            manifest, self.identity, path, path / MANIFEST, f"Delete {self.directory.parent} to start over."
        )
        return manifest

    def verify(self, step: int) -> dict[str, Any]:
        """`manifest`, after comparing every file with it. Raises DamagedError if one differs."""
        path, manifest = self.path(step), self.manifest(step)
        files, names = manifest["files"], [SHARED, *(f"rank_{rank}.pt" for rank in range(manifest["world"]))]
        if manifest["step"] != step or set(names) - files.keys():
            raise DamagedError(
                f"{path} says that it is step {manifest['step']} of {manifest['world']} processes and lists "
                f"{', '.join(files)}; expected {step}, and a part of every process."
            )
        for name in names:
            require_hash(path / name, files[name]["sha256"], MANIFEST, "It is damaged.")
        return manifest

    def newest(self) -> dict[str, Any] | None:
        """Manifest of the newest intact checkpoint; None if there are no checkpoints. For the main process.

        Damaged ones are renamed to .damaged-STEP with a warning. Raises DamagedError if none is intact: a run
        never starts over silently.
        """
        found, manifest, damaged = saved_steps(self.directory), None, []
        for step in found:
            try:
                manifest = self.verify(step)
                break
            except DamagedError as error:
                damaged.append((step, error))
        if manifest is None and found:
            raise DamagedError(
                f"none of the checkpoints {found} in {self.directory} is intact (newest: {damaged[0][1]}). "
                f"Expected one. Restore it from a copy, or delete {self.directory.parent} to start over."
            )
        for step, error in damaged:
            aside = self.directory / f".damaged-{step:09d}"
            _clear(aside)
            os.replace(self.path(step), aside)
            print(
                f"WARNING: {error} Moved to {aside}; going back to step {manifest['step']}.",
                file=sys.stderr,
                flush=True,
            )
        return manifest

    def read(self, step: int, world: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """(shared, local of this rank) of `step`; local is None if it was written by another number of
        processes.

        Raises DamagedError for a part that cannot be read or holds numbers that are not finite.
        """
        path, is_mine = self.path(step), self.manifest(step)["world"] == world
        return (
            self._read_part(path / SHARED),
            self._read_part(path / f"rank_{self.rank}.pt") if is_mine else None,
        )

    def parts(self, step: int) -> list[dict[str, Any]]:
        """The local state of every rank, in rank order. Raises DamagedError like `read`."""
        world = self.manifest(step)["world"]
        return [self._read_part(self.path(step) / f"rank_{rank}.pt") for rank in range(world)]

    def _read_part(self, path: Path) -> dict[str, Any]:
        try:
            part = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's, pickle's, zipfile's and Python's, by kind of damage
            cause = str(error).split("\n")[0][:200]
            raise DamagedError(
                f"{path} is not readable ({type(error).__name__}: {cause}); expected tensors and plain "
                f"values. {self.remedy(path.parent)}"
            ) from error
        if not isinstance(part, dict):
            raise DamagedError(
                f"{path} holds a {type(part).__name__}; expected named values. {self.remedy(path.parent)}"
            )
        require_finite(part, path, self.remedy(path.parent))
        return part

    def remedy(self, path: Path) -> str:
        return f"Delete {path} to continue from the checkpoint before it."


# ---------------------------------------------------------------- what a run saves and resumes


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

    def __init__(self, ranks: Ranks, updates: Updates, metrics: MetricsLog, train: TrainConfig) -> None:
        self.ranks, self.updates, self.metrics, self.train = ranks, updates, metrics, train
        self.checkpoints = Checkpoints(
            ranks.folder.path / "state", train.keep, ranks.rank, ranks.agreed, ranks.folder.identity
        )
        self.num_failed = 0  # in a row

    def save(self, is_required: bool) -> None:
        """Commit a checkpoint. A failure is a warning; fatal if is_required or MAX_FAILED_SAVES in a row."""
        self.ranks.agreed(self.require_ready, "looking for the stage directory and writing metrics.jsonl")
        shared, own = self.state()
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
            self.ranks.print(
                f"WARNING: {error}. Training goes on; the next try is after {self.train.save_every} more "
                f"steps."
            )

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that resumes: (equal on all ranks, of this rank)."""
        updates, metrics = self.updates, self.metrics
        shared, own = updates.strategy.split(
            {
                "model": updates.model.state_dict(),
                "optimizer": updates.optimizer.state_dict(),
                "ema": updates.ema.state_dict(),
                "best_weights": updates.best_weights,
            }
        )
        shared |= {"is_sharded": updates.strategy.is_sharded, **asdict(updates.counters)}
        return shared, own | {"random": random_state(self.ranks.device), "window": metrics.plain_window()}

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
            self.ranks.print(f"resumed at step {step}{note}")
        ranks.agreed(self.metrics.rewind, "cutting metrics.jsonl back to the resumed step")

    def load(self, step: int) -> None:
        """Load the checkpoint of `step`. Raises DamagedError if it does not fit this run."""
        try:
            shared, own = self.checkpoints.read(step, self.ranks.world)
            self._load_updates(step, shared, own)
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

    def _load_updates(self, step: int, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        updates, counters = self.updates, self.updates.counters
        place = (self.ranks.rank, self.ranks.world) if updates.strategy.is_sharded else None
        shapes = sharding.shapes_of(updates.model, updates.optimizer)
        state = sharding.local_state(shared, own, lambda: self.checkpoints.parts(step), shapes, place)
        current = updates.model.state_dict()
        updates.model.load_state_dict(
            {name: sharding.as_sharded(current[name], tensor) for name, tensor in state["model"].items()}
        )
        updates.optimizer.load_state_dict(state["optimizer"])
        updates.ema.load_state_dict(state["ema"])
        updates.best_weights = state["best_weights"]
        if updates.best_weights is not None:
            require_alike(updates.best_weights, updates.ema.averages, "average")
        saved = {name: shared.get(name, value) for name, value in vars(counters).items()}
        asked, micro_batch = saved.pop("micro_batch_asked"), saved.pop("micro_batch")
        vars(counters).update(saved)
        if asked == self.train.micro_batch:  # else the user has changed the setting
            counters.micro_batch = min(micro_batch, counters.micro_batch)
        updates.saved = self.ranks.activity.step = counters.step
