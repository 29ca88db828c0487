"""Delete files that this package made, and nothing else.

    python -m ups.commands.remove runs/smoke data/smoke cache/smoke      (or: make clean-smoke)

It recognises a stage or report, finished or not, by its record, a generated data file by the settings in it
and a cache by its seal. It deletes these and the folders that are then empty. If a path holds anything else,
nothing below it is deleted. Does not import torch.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py

from ups.common.files import lock, partial_path, read_record, read_sealed, remove
from ups.config import STAGES, read_command, run_script
from ups.data.pdebench import made_with
from ups.data.seal import read_seal
from ups.training.finished import DONE
from ups.training.folder import LOCK

# deleted last, so that a half-deleted folder is still recognised
RECORDS = (DONE, LOCK, "environment.json", "results.json")
REPORTS = ("report", "report-val")
PREPARED = ".prepared"  # written by cluster/node.sh in the folder of a run
DEPTH = 4  # of folders below a path: data/NAME/TASK/FILE
MOST_SHOWN = 5  # foreign files named in a message


class NotOursError(ValueError):
    """A file or folder that has no record of this package, or is in use."""


def is_ours(folder: Path) -> bool:
    """Whether a folder is a stage or a report, by the record in it."""
    with contextlib.suppress(OSError, ValueError):
        kind = "report" if folder.name in REPORTS else folder.name
        if kind != "report" and kind not in STAGES:
            return False
        if (folder / DONE).is_file():
            return read_sealed(folder / DONE, "a record", "", stage=str)["stage"] == kind
        if kind == "report":  # without done.json, because a gate failed
            kinds = {"run": str, "config_hash": str, "gates": list, "tasks": dict}
            return bool(read_record(folder / "results.json", "a report", "", **kinds))
        started = folder / "environment.json"
        return (folder / LOCK).is_file() and (
            [*folder.iterdir()] == [folder / LOCK]
            or bool(read_record(started, "a record", "", config_hash=str, parents=dict))
        )
    return False


def is_our_file(path: Path) -> bool:
    """Whether a file is a generated data file or a cache, finished or not."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, LookupError):
        with h5py.File(path, "r", locking=False) as file:
            if made_with(file) is not None:
                return True
            if path.name.endswith(partial_path(Path(".h5")).name):
                return file.userblock_size > 0 and "state/latents" in file
        return bool(read_seal(path))
    return False


def found_below(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield our stages, reports and files at and below a path. Raises NotOursError for anything else."""
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        raise NotOursError(f"{path} (a link, or no plain file)")
    if path.is_file():
        if path.name != PREPARED and not is_our_file(path):
            raise NotOursError(str(path))
        yield path
    elif is_ours(path):
        yield path
    elif not depth:
        raise NotOursError(f"{path} (a folder without a record)")
    else:
        foreign = []
        for inner in sorted(path.iterdir()):
            try:
                yield from found_below(inner, depth - 1)
            except NotOursError as error:
                foreign += str(error).split(", ")
            if len(foreign) >= MOST_SHOWN:
                break
        if foreign:
            raise NotOursError(", ".join(foreign))


def require_unused(path: Path) -> None:
    """Raise NotOursError for a stage or file that another process writes."""
    file = path / LOCK if path.is_dir() else path
    if file.is_file():
        with file.open("rb") as held:
            try:
                lock(held, file)
            except BlockingIOError:
                raise NotOursError(f"{path} (another process is writing it)") from None


def delete(path: Path) -> None:
    """Delete a file, or a folder with its records last."""
    if path.is_dir():
        for inner in sorted(path.iterdir(), key=lambda inner: inner.name in RECORDS):
            remove(inner)
        path.rmdir()
    else:
        path.unlink()


def remove_empty(path: Path) -> None:
    """Delete a folder and its subfolders if they are empty."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            remove_empty(inner)
        with contextlib.suppress(OSError):
            path.rmdir()


def remove_ours(path: Path) -> list[Path]:
    """Delete everything at a path and return it. Raises ValueError and deletes nothing if not all is ours."""
    if not os.path.lexists(path):
        return []
    try:
        found = [*found_below(path)]
        for one in found:
            require_unused(one)
    except NotOursError as error:
        raise ValueError(
            f"{path} was not deleted, as it holds {error}; expected stages with {DONE} or a lock, reports, "
            "generated data and caches alone. Move what is yours, or delete it yourself."
        ) from None
    for one in found:
        print(f"deleting {one}", flush=True)
        delete(one)
    if found:
        remove_empty(path)
    return found


def main() -> int:
    arguments = read_command(
        __doc__,
        {"paths": {"nargs": "+", "type": Path, "metavar": "PATH"}},
        prog="python -m ups.commands.remove",
    )
    status = 0
    for path in arguments.paths:
        try:
            if not remove_ours(path):
                print(f"nothing of ours at {path}")
        except ValueError as error:
            print(f"ups.commands.remove: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    run_script(main, "ups.commands.remove")
