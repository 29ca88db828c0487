"""Checkpoints, which are complete or absent, and files of weights.

Commit: every rank writes its file into state/.tmp-STEP and flushes it; the ranks agree that all files are
there; the main process writes manifest.json (size and SHA-256 of every file) last, renames the folder to
state/step_STEP, flushes the parent and only then removes older ones, keeping at least two. A crash at any
point leaves the previous checkpoint untouched. A checkpoint is loaded only if its manifest matches the files
and has the identity of the stage (ups/training/artifact.py). Nothing is unpickled: tensors and plain values
are read with weights_only.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from ups.training.artifact import CHECKPOINT, MANIFEST, require_identity
from ups.training.weights import require_finite

SHARED = "shared.pt"


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
        steps = saved_steps(self.directory)
        return self._newest_of(steps) if steps else None

    def _newest_of(self, found: list[int]) -> dict[str, Any]:
        manifest, damaged = None, []
        while manifest is None and len(damaged) < len(found):
            try:
                manifest = self.verify(found[len(damaged)])
            except DamagedError as error:
                damaged.append((found[len(damaged)], error))
        if manifest is None:
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
