"""Files that hold what was meant: no planted link, second writer or full disk makes them anything else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}   # flock where there are no locks
NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
UNWRITABLE = NO_ROOM | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR}


def flush(path: Path) -> None:
    """Force a file, or a directory's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def create(path: Path) -> BinaryIO:
    """A new, empty file at `path`. What lay there is removed: as a link it may lead to somebody's data."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)   # O_EXCL follows no link
    return os.fdopen(handle, "w+b")


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with create(temporary) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush(path.parent)


@contextlib.contextmanager
def held(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, made if need be, for this process alone; the lock dies with its process.

    Raises OSError for anything but a plain file of one name, for one that another process holds, and where there
    are no locks.
    """
    while True:
        with _open_own(path) as file:
            _lock(file, path)
            if is_at(path, file):
                yield file
                return
            # its holder renamed or removed it before we had the lock: ours may be a finished file by now


def is_at(path: Path, file: BinaryIO) -> bool:
    """Whether the open `file` is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _open_own(path: Path) -> BinaryIO:
    """`path`, open for reading and writing, made if need be. Raises OSError where that leads to another file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return os.fdopen(handle, "r+b")
        os.close(handle)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):   # a link, a folder, a socket
            raise
    raise OSError(errno.ELOOP, f"{path} is a link or no plain file; expected a file of our own there, or none. "
                               f"Nothing was written. Remove it and run the same command again")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, f"{path} is being written by another process; expected one at a time. "
                                   f"Wait for it, or end it") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise OSError(error.errno, f"{path} cannot be locked ({os.strerror(error.errno)}); expected a file "
                                   f"system with locks, as two processes would spoil one file. Mount it with them (NFS: "
                                   f"local_lock=flock, Lustre: flock), or choose another disk") from error


def reserve(file: BinaryIO, num_bytes: int) -> None:
    """Give `file` its first `num_bytes` on the disk for real: a full disk is an error now, not in an hour."""
    os.posix_fallocate(file.fileno(), 0, num_bytes)


@contextlib.contextmanager
def explained(path: Path, num_bytes: int, keys: str) -> Iterator[None]:
    """Say of an error that the disk or its rights caused what `path` needs, and which `keys` change that."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise OSError(error.errno, f"cannot write {path} ({os.strerror(error.errno)}); expected a folder that may "
                                   f"be written and {num_bytes / 2**20:.0f} MiB of room in it. Free some, or "
                                   f"change {keys}") from error
