"""Delete files that this package made, and nothing else.

    python -m ups.commands.remove runs/smoke data/smoke cache/smoke      (or: make clean-smoke)

It recognises a stage or report, finished or not, by its record, a generated data file by the settings in it
and a cache by its seal. If a path holds anything else, nothing below it is deleted. In the folder of a stage
or report it deletes the files whose names UPS writes (ups/training/artifact.py): all others stay and are
named. Does not import torch.
"""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py

from ups.common.files import lock, partial_path, read_record, read_sealed, remove_named
from ups.common.place import STAGES
from ups.common.text import file_stem, printable
from ups.config.command import read_command, run_script
from ups.data.pdebench import made_with
from ups.data.seal import read_seal
from ups.tasks import in_unit
from ups.training.artifact import CARD, DONE, IMAGES, is_changed_card, of_stage
from ups.training.folder import LOCK

REPORTS = ("report", "report-val")
OF_MACHINES = re.compile(r"\.prepared|\.node\d+")  # written by cluster/node.sh in the folder of a run
DEPTH = 4  # of folders below a path: data/NAME/TASK/FILE
MOST_SHOWN = 5  # files of others that a message names


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
            if (made := made_with(file)) is not None:  # forecasts carry settings too, and are the user's
                return not str(made[0].get("generator")).startswith("forecast of ")
            if path.name.endswith(partial_path(Path(".h5")).name):
                return file.userblock_size > 0 and "state/latents" in file
        return bool(read_seal(path))
    return False


def found_below(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield our stages, reports and files at and below a path. Raises NotOursError for anything else."""
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        raise NotOursError(f"{path} (a link, or no plain file)")
    if path.is_file():
        if not OF_MACHINES.fullmatch(path.name) and not is_our_file(path):
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
    if file.is_file() and not file.is_symlink():
        with file.open("rb") as held:
            try:
                lock(held, file)
            except BlockingIOError:
                raise NotOursError(f"{path} (another process is writing it)") from None


def of_report(folder: Path) -> str:
    """Pattern of the files of a report. Its figures are named by the tasks and fields in results.json."""
    stems = ["training"]
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        found = read_record(folder / "results.json", "a report", "", tasks=dict)
        for task, entry in found["tasks"].items():
            units = entry.get("units", {})
            fields = [in_unit(field, units.get(field)) for field in entry["fields"]]
            errors = itertools.product(("median_error", "worst_error"), fields)
            stems += [f"{task}_{kind}" for kind in ("error_growth", "spectra", *map("_".join, errors))]
    figures = {re.escape(name) for stem in stems for name in (stem, file_stem(stem))}
    return rf"(done|results)\.json|results\.csv|report\.html|figures/({'|'.join(figures)})\.png"


def delete(path: Path) -> list[Path]:
    """Delete a file, or of a stage or report the files that UPS wrote, but for a card that somebody changed,
    with its pictures; what is left in the folder."""
    if not path.is_dir():
        path.unlink()
        return []
    kept = rf"(?!{re.escape(CARD)}|{IMAGES}/)" if is_changed_card(path / CARD) else ""
    return remove_named(path, f"{kept}({of_report(path) if path.name in REPORTS else of_stage(path)})")


def remove_empty(path: Path) -> None:
    """Delete a folder and its subfolders if they are empty."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            remove_empty(inner)
        with contextlib.suppress(OSError):
            path.rmdir()


def remove_ours(path: Path) -> list[Path]:
    """Delete the stages, reports and files at a path and return them. Raises ValueError and deletes nothing
    if the path holds anything else."""
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
        print(f"deleting {printable(one)}", flush=True)
        left = [printable(kept) for kept in delete(one)]
        if left:
            more = f" and {len(left) - MOST_SHOWN} more" * (len(left) > MOST_SHOWN)
            print(f"kept, as UPS did not write it: {', '.join(left[:MOST_SHOWN])}{more}", flush=True)
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
