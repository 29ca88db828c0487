"""Safe reading and writing of files: atomic writes, locks, protection against planted links and full disks;
records with a seal that shows alterations; the machine's errors in plain words. Without torch.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from tqdm import tqdm

from ups.common.place import require_posix

T = TypeVar("T")
WAIT_S = 1.0  # between looks at a file that another process writes
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # of flock, without locks
# size limit of a record such as done.json and of the header of weights, so that foreign files cannot stall us
MOST_RECORD_BYTES = 4 * 2**20
NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
NO_ACCESS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
# messages of a RuntimeError for want of memory; the last is oneDNN's, on a CPU
NO_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
    "could not create a primitive",
)
TEMPORARY = re.compile(r"^\.(.+)\.tmp$")  # names of `replacing`
UNWRITABLE = NO_ROOM | NO_ACCESS | {errno.EEXIST}


class DamagedError(ValueError):
    """A file that was altered or damaged since it was written."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch would avoid `error`. An asynchronous CUDA error does not count, as the context
    is lost."""
    is_torch = type(error).__name__ == "OutOfMemoryError"  # torch.OutOfMemoryError
    return (
        isinstance(error, MemoryError)
        or isinstance(error, RuntimeError)
        and (is_torch or any(text in str(error) for text in NO_MEMORY))
    )


def message_of(error: BaseException) -> str:
    """The message of an error. If memory, a full disk or file permissions are the cause, it names the
    remedy."""
    if is_out_of_memory(error):
        what = " ".join(str(error).split()) or type(error).__name__
        return (
            f"out of memory ({what:.200}); expected room for one batch. End other programs, or lower "
            "batch sizes, task.TASK.resolution or the size of the model"
        )
    is_bare = isinstance(error, OSError) and not error.__cause__  # otherwise its message is explained already
    if is_bare and error.errno in NO_ROOM:
        return (
            f"the disk of {error.filename2 or error.filename or 'a file'} is full ({error.strerror}); "
            "expected room to write. Free some, then run the same command again"
        )
    if is_bare and error.errno in NO_ACCESS:
        return (
            f"no access to {error.filename or 'a file'} ({error.strerror}); expected a file and folder "
            "that you may read and write. Change their rights, or name a folder of yours: run.root, "
            "data.root or cache.root"
        )
    return str(error)


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_hash(path: Path, digest: str, record: str, do: str) -> None:
    """Raise DamagedError unless `path` exists with this SHA-256. record: name of the file that states it."""
    found = file_hash(path) if path.is_file() else "missing"
    if found != digest:
        raise DamagedError(f"{path} is {found[:12]}; expected {digest[:12]} as {record} says. {do}")


def require_plain(path: Path, do: str) -> None:
    """Raise DamagedError for a link out of its folder, and for anything but a plain file.

    The links of a hub's client, from snapshots/REVISION/ into the folder blobs/ beside it, are allowed.
    """
    folder, target = path.parent.resolve(), path.resolve()
    hub = next((above.parent for above in folder.parents if above.name == "snapshots"), None)
    if target != folder / path.name and (hub is None or target.parent != hub / "blobs"):
        raise DamagedError(f"{path} is a link to {str(target)!r:.200}; expected a file of its own. {do}")
    if target.exists() and not target.is_file():
        raise DamagedError(f"{path} is no plain file; expected one. {do}")


def require_small(path: Path, what: str, do: str) -> None:
    """Raise DamagedError for a record that is not a plain file or larger than MOST_RECORD_BYTES."""
    require_plain(path, do)
    if path.exists() and (size := path.stat().st_size) > MOST_RECORD_BYTES:
        raise DamagedError(f"{path} has {size} bytes; expected {what}, of at most {MOST_RECORD_BYTES}. {do}")


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


def create(path: Path) -> BinaryIO:
    """A new, empty file at `path`. An existing file is removed first, because it may be a link to other
    data. Raises FileExistsError for a folder."""
    if path.is_dir() and not path.is_symlink():
        raise FileExistsError(
            f"{path} is a folder; expected an unfinished file of UPS, or none. Remove it and run the same "
            "command again"
        )
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # O_EXCL follows no link
    return os.fdopen(handle, "w+b")


def remove_named(folder: Path, names: str) -> list[Path]:
    """Delete the plain files of a folder whose names match a pattern, finished or not, and the folder if it
    is then empty; what is left. If the folder is a link, the link goes without its target."""
    if folder.is_symlink():
        folder.unlink()
    left = []
    for path in folder.iterdir() if folder.is_dir() else []:
        if re.fullmatch(names, TEMPORARY.sub(r"\1", path.name)) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
        else:
            left.append(path)
    if folder.is_dir() and not left:
        folder.rmdir()
    return left


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to in the block; it replaces `path` after the block. After an error `path` is
    unchanged. Its mode follows the umask."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:  # around its creation too: a signal may arrive before the next line
        with create(temporary) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        yield temporary
        temporary.chmod(mode)
        flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a folder, which `create` refused
            temporary.unlink()
        raise
    flush(path.parent)


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new hidden folder in `parent`, removed after the block. tempfile's stays if a signal arrives between
    its creation and the block."""
    path = parent / f".{uuid.uuid4().hex}.tmp"
    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def place_new(path: Path, target: Path) -> None:
    """Rename a finished file to `target`, which must not exist. Raises FileExistsError if another process
    made it meanwhile."""
    try:
        os.link(path, target)  # a rename would replace an existing file
        path.unlink()
    except FileExistsError as error:
        raise FileExistsError(
            f"{target} was made by another process meanwhile; expected a new file. Name another."
        ) from error
    except OSError:  # a file system without hard links
        os.rename(path, target)


def write_atomic(path: Path, text: str) -> None:
    """Write a text file; readers get either the old one or the complete new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a plain value."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """`write_json` of a mapping with its hash under the key "seal"."""
    write_json(path, record | {"seal": value_hash(record)})


def read_record(path: Path, what: str, do: str, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """The JSON mapping at `path`, checked to have the keys of `kinds` with values of these types.

    what, do: description of the file and advice, for the error. Raises FileNotFoundError or DamagedError.
    """
    try:
        require_small(path, what, do)
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, DamagedError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not readable ({error}); expected {what}. {do}") from error
    if not isinstance(record, dict):
        raise DamagedError(f"{path} holds a {type(record).__name__}; expected {what}. {do}")
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind) or (kind is int and isinstance(record[name], bool)):
            raise DamagedError(f"{path} has no valid {name!r}; expected {what}. {do}")
    return record


def read_sealed(path: Path, what: str, do: str, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """`read_record` of a file of `write_sealed`. Raises DamagedError also if it was altered."""
    record = read_record(path, what, do, seal=str, **kinds)
    if record["seal"] != value_hash({name: value for name, value in record.items() if name != "seal"}):
        raise DamagedError(
            f"{path} was altered (its seal is not that of its content); expected {what} as it "
            f"was written. {do}"
        )
    return record


@contextlib.contextmanager
def held(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, created if missing and locked for this process; the lock ends with the process.

    Raises OSError for anything but a plain file with one name, for a file that another process has locked,
    and on a file system without locks.
    """
    while True:
        with open_plain(path) as file:
            lock(file, path)
            if is_at(path, file):
                yield file
                return
            # another process renamed or removed it before we had the lock: open the new file


def is_at(path: Path, file: IO) -> bool:
    """Whether the open `file` is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False


def open_plain(path: Path) -> BinaryIO:
    """`path`, open for reading and writing, created if missing. Raises FileExistsError for a link, a pipe, a
    folder, and for a file with a second name."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return os.fdopen(handle, "r+b")
        os.close(handle)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
            raise
    raise FileExistsError(
        f"{path} is a link or no plain file; expected a file that UPS made, or none. "
        "Nothing was written. Remove it and run the same command again"
    )


def lock(file: IO, path: Path) -> None:
    """Lock an open file for this process. Raises BlockingIOError if another process has locked it, OSError on
    a file system without locks and on Windows."""
    require_posix(f"writing {path}")
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(
            error.errno,
            f"{path} is being written by another process; expected one at a time. Wait for it, or end it",
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise OSError(
            error.errno,
            f"{path} cannot be locked ({os.strerror(error.errno)}); expected a file system with locks, as "
            "two processes would spoil one file. Mount it with them (NFS: local_lock=flock, Lustre: flock), "
            "or choose another disk",
        ) from error


def when_free(make: Callable[[], T]) -> T:
    """make(), repeated until no other process has locked the file that it writes."""
    is_announced = False
    while True:
        try:
            return make()
        except BlockingIOError as error:
            if not is_announced:
                tqdm.write(f"waiting: {error.strerror}", file=sys.stderr)  # beside a bar
            is_announced = True
            time.sleep(WAIT_S)


def partial_path(path: Path) -> Path:
    """Where a file is written before it is complete."""
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def completing(path: Path, num_bytes: int, keys: str, is_continued: bool = True) -> Iterator[BinaryIO]:
    """The unfinished file of `path`, locked; it is renamed to `path` after the block, unless the block
    removed it.

    is_continued: after an error the file stays, and the next process continues it. num_bytes, keys: as in
    `explained`.
    """
    partial = partial_path(path)
    with explained(path, num_bytes, keys):
        path.parent.mkdir(parents=True, exist_ok=True)
        with held(partial) as file:
            try:
                yield file
                if is_at(partial, file):
                    os.fsync(file.fileno())
                    partial.rename(path)
            except BaseException:
                if not is_continued:
                    partial.unlink(missing_ok=True)
                raise
            flush(path.parent)


def require_room(file: BinaryIO, num_bytes: int) -> None:
    """Raise OSError if the disk has too little space for `file` to grow to `num_bytes`."""
    disk, there = os.fstatvfs(file.fileno()), os.fstat(file.fileno()).st_blocks * 512
    if num_bytes - there > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def reserve(file: BinaryIO, num_bytes: int) -> None:
    """Allocate the first `num_bytes` of `file` on the disk, so that a full disk is an error now, not in an
    hour."""
    require_room(file, num_bytes)  # otherwise posix_fallocate fills a small disk before it fails
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(file.fileno(), 0, num_bytes)


@contextlib.contextmanager
def explained(path: Path, num_bytes: int, keys: str) -> Iterator[None]:
    """Explain an OSError of a full or write-protected disk: it then names `path`, the `num_bytes` needed, and
    the configuration `keys` to change. Errors that were explained before pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE or error.__cause__:
            raise
        raise OSError(
            error.errno,
            f"cannot write {path} ({os.strerror(error.errno)}); expected a folder that may be written and "
            f"{max(1, num_bytes / 2**20):.0f} MiB of room in it. Free some, or change {keys}",
        ) from error
