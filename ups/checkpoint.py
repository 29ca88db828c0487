"""Checkpoints that are whole or absent, and the record of a finished stage.

Commit: every rank writes its part into state/.tmp-STEP and flushes it; the ranks agree that all parts are there; the main
process writes manifest.json (size and SHA-256 of every file) last, renames the directory to state/step_STEP, flushes the
parent and only then removes older ones, keeping at least two. A crash at any point leaves the previous checkpoint
untouched. Loading trusts a directory only if its manifest matches the files. Nothing is unpickled: tensors and plain values
are read with weights_only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MANIFEST, SHARED, DONE, MODEL = "manifest.json", "shared.pt", "done.json", "model.safetensors"
BLOCK = 1 << 22  # bytes hashed at a time


class DamagedError(ValueError):
    """A checkpoint or a finished stage whose files are not what its record says."""


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def value_hash(value: Any) -> str:
    """SHA-256 of a plain value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def flush(path: Path) -> None:
    """Force a file, or a directory's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a plain value."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


class Checkpoints:
    """The checkpoints of one stage directory.

    agreed(function, doing): calls the function on this rank and raises on every rank if it raised on any (run.agreed); it
    is the only communication here. keep: newest checkpoints kept, at least two.
    """

    def __init__(self, directory: Path, keep: int, rank: int, agreed: Callable[[Callable[[], Any], str], Any]) -> None:
        if keep < 2:
            raise ValueError(f"keep is {keep}; expected at least 2, because the newest checkpoint may be damaged. Raise it.")
        self.directory, self.keep, self.rank, self.agreed = directory, keep, rank, agreed

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, newest first."""
        found = self.directory.glob("step_*") if self.directory.is_dir() else []
        return sorted((int(path.name.removeprefix("step_")) for path in found), reverse=True)

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step:09d}"

    def save(self, step: int, shared: dict[str, Any], local: dict[str, Any], facts: dict[str, Any]) -> None:
        """Commit a checkpoint. A collective: every rank calls it, with equal `shared` and its own `local`.

        shared: tensors and plain values, equal on all ranks, written once. local: of this rank. facts: plain values for
        the manifest. Raises RuntimeError on every rank if any part could not be written; earlier checkpoints then stand.
        """
        temporary = self.directory / f".tmp-{step:09d}"
        try:
            self.agreed(lambda: self.rank == 0 and self._begin(temporary), f"preparing the checkpoint of step {step}")
            self.agreed(lambda: self._write(temporary, shared, local), f"writing the checkpoint of step {step}")
            self.agreed(lambda: self.rank == 0 and self._commit(temporary, step, facts), f"committing step {step}")
        except Exception:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _begin(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for stale in self.directory.glob(".tmp-*"):
            shutil.rmtree(stale)
        temporary.mkdir()

    def _write(self, temporary: Path, shared: dict[str, Any], local: dict[str, Any]) -> None:
        parts = {f"rank_{self.rank}.pt": local, **({SHARED: shared} if self.rank == 0 else {})}
        for name, value in parts.items():
            with (temporary / name).open("wb") as file:
                torch.save(value, file)
                file.flush()
                os.fsync(file.fileno())

    def _commit(self, temporary: Path, step: int, facts: dict[str, Any]) -> None:
        files = {path.name: {"size": path.stat().st_size, "sha256": file_hash(path)} for path in temporary.iterdir()}
        write_json(temporary / MANIFEST, {"step": step, **facts, "files": files})
        target = self.path(step)
        if target.exists():  # only a run that went back past it writes a step again; what it holds is of no use then
            shutil.rmtree(target)
        os.replace(temporary, target)
        flush(self.directory)
        for old in self.steps()[self.keep :]:
            shutil.rmtree(self.path(old))

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest of `step`. Raises DamagedError if it is unreadable or a file differs from it."""
        path = self.path(step)
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            files = manifest["files"]
        except (OSError, ValueError, KeyError) as error:
            raise DamagedError(f"{path} has no readable {MANIFEST} ({error}); expected a committed checkpoint.") from error
        expected = {SHARED, *(f"rank_{rank}.pt" for rank in range(manifest["world"]))}
        if missing := sorted(expected - set(files)):
            raise DamagedError(f"{path} does not list {missing[0]}; expected one part per process of its run.")
        for name, record in files.items():
            part = path / name
            if not part.is_file() or part.stat().st_size != record["size"]:
                size = part.stat().st_size if part.is_file() else "missing"
                raise DamagedError(f"{part} is damaged (size {size}); expected {record['size']} bytes.")
            if file_hash(part) != record["sha256"]:
                raise DamagedError(f"{part} is damaged (its SHA-256 changed); expected the bytes that were written.")
        return manifest

    def newest(self) -> dict[str, Any] | None:
        """Manifest of the newest intact checkpoint; None if there is none at all. For the main process.

        Damaged ones are renamed to .damaged-STEP with a warning; leftovers of unfinished writes are removed. Raises
        DamagedError if checkpoints exist and none is intact: a run never starts over silently.
        """
        for stale in self.directory.glob(".tmp-*") if self.directory.is_dir() else ():
            shutil.rmtree(stale)
        found, manifest, damaged = self.steps(), None, []
        for step in found:
            try:
                manifest = self.verify(step)
                break
            except DamagedError as error:
                damaged.append((step, error))
        if found and manifest is None:
            raise DamagedError(f"none of the checkpoints {found} in {self.directory} is intact (newest: {damaged[0][1]}). "
                               f"Expected one. Restore it from a copy, or delete {self.directory.parent} to start over.")
        for step, error in damaged:
            aside = self.directory / f".damaged-{step:09d}"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(self.path(step), aside)
            print(f"WARNING: {error} Moved to {aside}; going back to step {manifest['step']}.", file=sys.stderr, flush=True)
        return manifest

    def read(self, step: int, world: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """(shared, local of this rank) of `step`; local is None if it was written by another number of processes."""
        path = self.path(step)
        shared = torch.load(path / SHARED, map_location="cpu", weights_only=True)
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["world"] != world:
            return shared, None
        return shared, torch.load(path / f"rank_{self.rank}.pt", map_location="cpu", weights_only=True)


def finished_stage(directory: Path) -> dict[str, Any] | None:
    """The record of a finished stage, or None if it is not finished. Raises DamagedError if its model is not the recorded."""
    try:
        done = json.loads((directory / DONE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedError(f"{directory / DONE} is not readable ({error}); expected the record of a finished stage. "
                           f"Delete it and run the stage again; it resumes from its last checkpoint.") from error
    model = directory / MODEL
    found = file_hash(model) if model.is_file() else "missing"
    if found != done["model_sha256"]:
        raise DamagedError(f"{model} is {found[:12]}; expected {done['model_sha256'][:12]} as {DONE} says. "
                           f"Delete {directory / DONE} and run the stage again; it resumes from its last checkpoint.")
    return done


def require_stage(run_dir: Path, stage: str, parents: dict[str, str] | None = None) -> dict[str, Any]:
    """The record of the finished parent `stage`, its "fingerprint" being what a child records.

    parents: what the stage must itself have been made from, if given. Raises FileNotFoundError naming the make target if it is
    missing or unfinished, DamagedError if it was altered, ValueError if it was made from other parents.
    """
    directory = run_dir / stage
    done = finished_stage(directory)
    if done is None:
        state = "unfinished" if directory.is_dir() else "missing"
        raise FileNotFoundError(f"stage {stage} of run {run_dir.name} is {state}; expected {directory / DONE}. "
                                f"Run: make {stage} RUN={run_dir.name}")
    stale = [name for name, value in (parents or {}).items() if done["parents"].get(name) != value]
    if stale:
        raise ValueError(f"stage {stage} of run {run_dir.name} was made from another {stale[0]} "
                         f"({done['parents'].get(stale[0], 'none')} then, {parents[stale[0]]} now); expected the same one. "
                         f"Run: make remove STAGE={stage} RUN={run_dir.name}, then make {stage} RUN={run_dir.name}")
    return done
