"""Publish the weights of a run: copy what another machine needs to a folder or a model hub.

    python -m ups.commands.publish runs/small pretrained            (or: make publish RUN=small TO=pretrained)
    python -m ups.commands.publish runs/small hf://owner/name

A copy has one folder per stage: the network (config.json, model.safetensors), its origin (done.json,
config.yaml, metrics.jsonl) and the report's model card with pictures. Tensors are safetensors and the rest is
text, so loading a copy runs no code.

The copy is made beside its target, opened as `ups.load` opens it, and exchanged with it at once. It replaces
nothing but an earlier copy whose files are as its record, published.json, says.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from ups.common.files import (
    DamagedError,
    file_hash,
    flush,
    held,
    read_sealed,
    remove_named,
    require_plain,
    write_sealed,
)
from ups.common.place import HUB, STAGES, make_target
from ups.common.text import printable
from ups.config.command import read_command, run_script
from ups.hub import FILES, NEEDED, PLAIN, ask
from ups.training.artifact import CARD, DONE, IMAGES, finished_stage, stage_config, stage_of_run

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # of renameat2, on some file systems
UPLOAD_SPEED = 2**16  # bytes a second, at least: how far an upload is cannot be seen
RECORD = "published.json"  # in a copy: the digests of its files
LOCK = ".lock"


def published_files(run: Path) -> dict[str, Path]:
    """Return path in the copy -> file, for every finished stage in the folder of a run.

    Raises FileNotFoundError for a run without operator or a stage without its card; DamagedError for a stage
    that was altered, belongs to another run or is a link.
    """
    fix = "Publish files of the run itself."
    finished = [stage for stage in STAGES if (run / stage / DONE).is_file() and stage_of_run(run, stage)]
    if "operator" not in finished:
        raise FileNotFoundError(
            f"{run} holds no finished operator; expected a run's folder, such as runs/small. "
            f"Run {make_target('train')}, or name another."
        )
    for stage in finished:
        for name in NEEDED:
            if not (run / stage / name).is_file():
                raise FileNotFoundError(
                    f"{run / stage} has no {name}; expected a stage with the card that a report on the "
                    f"test split writes. Run {make_target(f'report RUN={run.name}')}, or delete the stage."
                )
        stage_config(run / stage, finished_stage(run / stage))
        if (run / stage / IMAGES).is_symlink():
            raise DamagedError(f"{run / stage / IMAGES} is a link; expected a folder of its own. {fix}")
    files = {
        path.relative_to(run).as_posix(): path
        for stage in finished
        for pattern in FILES
        for path in sorted((run / stage).glob(pattern))
    }
    for path in files.values():
        require_plain(path, fix)
    return files


def require_target(run: Path, folder: Path, new: dict[str, str]) -> None:
    """Raise ValueError unless `folder` is outside of the run and is missing, empty or an unaltered copy.

    new: path in the copy -> digest. A file may be replaced if it is as its copy's record says, or equals the
    new one: copies of earlier versions have no record.
    """
    source = run.resolve()
    if source == folder or source in folder.parents or folder in source.parents:
        raise ValueError(
            f"{folder} is the run {run} itself, or in it or around it; expected another place. "
            "Name another with TO=."
        )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is a link or a file; expected a folder, or nothing. Name another with TO=."
        )
    known = {}
    if os.path.lexists(folder / RECORD):
        do = "Name another with TO=, or delete the copy yourself."
        known = read_sealed(folder / RECORD, "the record of a copy", do, files=dict)["files"]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_same = path.is_file() and file_hash(path) in (known.get(name), new.get(name))
        if path.is_symlink() or not (path.is_dir() or name == RECORD or is_same):
            state = (
                "was altered since it was published"
                if name in known
                else "is not in the record of an earlier copy"
            )
            raise ValueError(
                f"{folder} holds {printable(name)}, which {state}; expected nothing, or an unaltered copy "
                "alone, which this one replaces. Name another with TO=, or delete it yourself."
            )


def copy(run: str | Path, folder: str | Path) -> Path:
    """Copy `published_files` of a run to `folder`, completely or not at all; return the folder.

    Raises as `published_files` and `require_target`.
    """
    run, target = Path(run), Path(folder)
    # a link stays one, to be refused, but `x/../x` is x
    whole, name = (target, "") if target.name in ("", "..") else (target.parent, target.name)
    place = Path(os.path.realpath(whole), name)
    files = published_files(run)
    digests = {name: file_hash(path) for name, path in files.items()}
    require_target(run, place, digests)
    place.parent.mkdir(parents=True, exist_ok=True)
    work = place.with_name(f".{place.name}.publishing")
    new, old = work / "new", work / "old"
    if work.is_symlink():
        raise FileExistsError(f"{work} is a link; expected a folder of UPS, or none. Remove it.")
    work.mkdir(exist_ok=True)
    with held(work / LOCK):
        try:
            _recover(old, place)  # from a kill between two renames
            _clear(work)
            new.mkdir()
            for name, path in files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new / name, follow_symlinks=False)
                flush(new / name)
            write_sealed(new / RECORD, {"files": {name: file_hash(new / name) for name in files}})
            require_loadable(new)
            require_target(run, place, digests)  # it may have changed meanwhile
            _put(new, place, old)
            flush(place.parent)
        finally:
            _recover(old, place)
            _clear(work)
            (work / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds a file of somebody
                work.rmdir()
    return target


def _clear(work: Path) -> None:
    """Delete copies that were not completed, or were replaced. Raises FileExistsError for anything else."""
    stages = "|".join(STAGES)
    names = rf"(new|old)/({RECORD}|({stages})/({'|'.join(map(re.escape, PLAIN))}|{IMAGES}/[^/]+\.png))"
    left = [path for path in remove_named(work, names) if path != work / LOCK]
    if left:
        raise FileExistsError(
            f"{left[0]} is no file that publishing wrote; expected none of yours in {work}, where a copy is "
            "made. Move it, and publish again."
        )


def _recover(old: Path, place: Path) -> None:
    if old.is_dir() and not old.is_symlink() and not os.path.lexists(place):
        old.rename(place)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders at once; False if this system cannot."""
    with contextlib.suppress(AttributeError, TypeError):  # not Linux
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        if not rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
            return True
        if ctypes.get_errno() not in NO_EXCHANGE:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
    return False


def _put(new: Path, place: Path, old: Path) -> None:
    """Rename `new` to `place`. What was there is then at `new`, or at `old` if the file system cannot
    exchange two names at once."""
    if not place.exists():
        new.rename(place)
    elif not exchange(new, place):
        place.rename(old)
        new.rename(place)


def require_loadable(folder: Path) -> None:
    """Raise DamagedError unless `ups.load` can open every stage of a copy. The user's solver is not run."""
    from ups.generative.corrector import Corrector
    from ups.models.operator import Operator
    from ups.training.weights import load_stage

    for stage in (stage for stage in STAGES if (folder / stage).is_dir()):
        stage_of_run(folder, stage)
        load_stage(folder / stage, Operator if stage == "operator" else Corrector, stage, "Publish it again.")


def push(run: str | Path, name: str) -> str:
    """Commit `published_files` of a run to OWNER/NAME on the hub; return the address of the commit.

    The repository is created if it is missing. The operator's card becomes the model's. Raises ImportError
    without huggingface_hub, ConnectionError with the hub's reason.
    """
    files, name = published_files(Path(run)), name.removeprefix(HUB)
    card = files[f"operator/{CARD}"].read_text(encoding="utf-8")
    size = sum(path.stat().st_size for path in files.values())
    try:
        return ask(
            "push",
            size / UPLOAD_SPEED,
            name=name,
            files={place: str(path.resolve()) for place, path in files.items()},
            card=card.replace(f"]({IMAGES}/", f"](operator/{IMAGES}/"),
            message=f"Weights of {Path(run).name}",
        )
    except ConnectionError as error:
        raise ConnectionError(
            f"{HUB}{name} did not take {run} ({error}); expected OWNER/NAME of a repository that your token "
            "may write. Check the name, the network and huggingface-cli whoami, and publish again."
        ) from None


def main() -> int:
    arguments = read_command(
        __doc__,
        {"run": {"help": "folder of a run"}, "to": {"help": f"a folder, or {HUB}OWNER/NAME"}},
        prog="python -m ups.commands.publish",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `copy` cleans up
    is_hub = arguments.to.startswith(HUB)
    print(push(arguments.run, arguments.to) if is_hub else copy(arguments.run, arguments.to))
    return 0


if __name__ == "__main__":
    run_script(main, "ups.commands.publish")
