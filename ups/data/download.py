"""Download of published files, with resume. A file gets its name only after its MD5 was checked.

An interrupted transfer leaves NAME.partial, and the next one requests the rest (HTTP Range). A checked file
has NAME.md5 beside it (in the format of md5sum -c), so that it is not hashed again.
"""

import hashlib
import http.client
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ups.common.files import completing, explained, partial_path, require_room, write_atomic
from ups.common.place import make_target
from ups.tasks import TASKS, get_task
from ups.tasks.published import FURTHER, WITHDRAWN

READ_BYTES = 2**20
MAX_PAUSE_S = 60.0
MIN_SPEED = 1024  # bytes a second; at this speed the largest files, of 100 GB, would take three years
MOST_DIGITS = 18  # of a length in bytes
TRANSIENT = (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError)


def published_file(task: str, parameter: float | None) -> tuple[str, int, str]:
    """File name, DaRUS id and MD5 of a published file. Raises ValueError naming the published values."""
    spec = get_task(task)
    name = spec.file_for(parameter)
    if name not in spec.published:
        known = ", ".join(spec.published) or "none, as it is a data set of ours that nobody publishes"
        raise ValueError(
            f"{task} has no published file {name}; expected one of: {known}. Change task.{task}.parameters "
            "or data.tasks, or set data.source=user for files of yours or, to solve the equation, "
            "data.source=generate."
        )
    return name, *spec.published[name]


def published_files(pattern: str) -> list[tuple[str, str, int, str]]:
    """Task, name, DaRUS id and MD5 of every published file whose name fits `pattern` (with * and ?),
    including files that no task uses by default. Raises ValueError if none fits."""
    found = [
        (task.name, name, *source)
        for task in TASKS.values()
        if not task.files_of
        for name, source in (task.published | FURTHER.get(task.name, {})).items()
        if fnmatchcase(name, pattern)
    ]
    if not found:
        raise ValueError(
            f"no published file is called {pattern!r}; expected a name of PDEBench's, such as "
            "Sod1.hdf5, or a pattern such as 'KH_*'. --file '*' --dry-run lists all."
        )
    return found


def md5_of(path: Path, show_progress: bool = False) -> str:
    """MD5 of a file, read in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    with (
        path.open("rb") as file,
        tqdm(
            total=path.stat().st_size,
            unit="B",
            unit_scale=True,
            desc=f"MD5 {path.name}",
            disable=not show_progress,
        ) as bar,
    ):
        while block := file.read(READ_BYTES):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


def edition(name: str, md5: str) -> str:
    """A sentence about a file called `name` whose MD5 is not the published one; "" for an unknown file."""
    is_withdrawn = md5.startswith(WITHDRAWN.get(name, "no"))
    return "It is the withdrawn first edition, which is wrong (PDEBench issues 46 and 51). " * is_withdrawn


def is_verified(path: Path, md5: str) -> bool:
    """Whether `path` exists and its MD5 was checked since its last change."""
    record = path.with_name(path.name + ".md5")
    return (
        path.is_file()
        and record.is_file()
        and record.read_text(encoding="utf-8").split()[:1] == [md5]
        and record.stat().st_mtime_ns >= path.stat().st_mtime_ns
    )


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server. retries: attempts without progress, with pauses of pause_s, doubled each
    time. timeout_s: limit of one socket operation, and interval in which MIN_SPEED is measured."""

    retries: int = 5
    pause_s: float = 1.0
    timeout_s: float = 60.0

    def persist(self, attempt: Callable[[], None], have: Callable[[], int], url: str, path: Path) -> None:
        """Call `attempt` until it succeeds. have: number of bytes of the file `path` received so far.

        Raises ValueError for an answer such as 404, ConnectionError if attempts make no progress.
        """
        failures = 0
        while True:
            before = have()
            try:
                attempt()
                return
            except TRANSIENT as error:
                code = getattr(error, "code", None)
                # a client error: a repetition cannot help
                if code is not None and code < 500 and code not in (408, 425, 429):
                    raise ValueError(
                        f"{url} answered {code} {error.reason}; expected the file {path.name}. "
                        f"Check data.url, or download the file by hand to {path}."
                    ) from error
                failures = 1 if have() >= before + MIN_SPEED * self.timeout_s else failures + 1
                if failures > self.retries:
                    raise ConnectionError(
                        f"{url} sent almost no new data in {failures} attempts ({error}); "
                        f"expected the file {path.name}. Check the network and run "
                        f"`{make_target('data')}` again: it continues at byte {have()}."
                    ) from error
                time.sleep(min(MAX_PAUSE_S, self.pause_s * 2 ** (failures - 1)))


def fetch(
    url: str,
    path: Path,
    md5: str,
    *,
    patience: Patience = Patience(),  # noqa: B008, it is frozen
) -> None:
    """Download `url` to `path` and check its MD5 (hexadecimal), unless that was done before.

    Raises ValueError for a wrong URL, an answer such as 404, or another MD5; ConnectionError if the transfer
    makes no progress; PermissionError or OSError if `path` cannot be written.
    """
    if is_verified(path, md5):
        return
    if not path.exists():
        require_address(url)
    partial = partial_path(path)
    with completing(path, 0, "data.root") as file:
        if path.exists():  # another process completed it before we had the lock
            partial.unlink()
            _check(path, path, md5)
            return
        sizes: set[int] = set()
        patience.persist(
            lambda: _transfer(url, path, file, patience.timeout_s, sizes),
            lambda: partial.stat().st_size,
            url,
            path,
        )
        _check(partial, path, md5)


def require_address(url: str) -> None:
    """Raise ValueError for anything but a web address."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a web address; expected http(s)://HOST/PATH/ID. Correct data.url.")


def _transfer(url: str, path: Path, file: BinaryIO, timeout_s: float, sizes: set[int]) -> None:
    """One attempt to complete the unfinished `file` of `path`. Raises one of TRANSIENT if it ends early, also
    for a speed below MIN_SPEED, and ValueError for a file without a length, or of another than in `sizes`.

    If the server starts again at the first byte, the file is overwritten but not cut: its size is the measure
    of progress.
    """
    have = os.fstat(file.fileno()).st_size
    try:
        answer = answered(
            urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout_s
        )
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        total = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        if total == str(have):
            return  # everything was there already; the MD5 decides
        file.truncate(0)
        raise ConnectionError(
            f"the unfinished file had {have} bytes, the server's has {total or '?'}; starting again"
        ) from error
    is_continued = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(
        f"bytes {have}-"
    )
    start, length = have if is_continued else 0, answer.headers.get("Content-Length", "")
    total = start + int(length) if length.isdecimal() and len(length) < MOST_DIGITS else -1
    sizes.add(total)
    if sizes != {total} or total < 0:  # either may go on for ever
        answer.close()
        raise ValueError(
            f"{url} gives {path.name} "
            + ("no length" if total < 0 else f"lengths of {' and '.join(map(str, sorted(sizes)))} bytes")
            + f"; expected one (Content-Length). Correct data.url, or download the file by hand to {path}."
        )
    file.seek(start)
    with (
        answer,
        explained(path, total, "data.root"),
        tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=path.name) as bar,
    ):
        require_room(file, total)
        for block in blocks(answer, total - start, timeout_s):
            file.write(block)
            file.flush()  # the size of the file is the measure of progress
            bar.update(len(block))
        if file.tell() >= total:
            file.truncate()  # complete: bytes after the end are from an earlier attempt
    if file.tell() < total:
        raise ConnectionError(f"the connection closed at byte {file.tell()} of {total}")


def blocks(answer: http.client.HTTPResponse, num_bytes: int, timeout_s: float) -> Iterator[bytes]:
    """The first `num_bytes` of the body of an answer in blocks, fewer if it ends. Raises TimeoutError for a
    speed below MIN_SPEED over timeout_s: a socket's own limit ignores a server that sends a byte now and
    then."""
    until, sent = time.monotonic() + timeout_s, 0
    while num_bytes and (block := answer.read1(min(READ_BYTES, num_bytes))):
        yield block
        num_bytes, sent = num_bytes - len(block), sent + len(block)
        if time.monotonic() >= until:
            if sent < MIN_SPEED * timeout_s:
                raise TimeoutError(f"{sent} bytes in {timeout_s:g} s")
            until, sent = time.monotonic() + timeout_s, 0


def answered(request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """The answer to `request`, after its head. Raises TimeoutError after timeout_s, even if the server sends
    a byte now and then: a thread waits for the answer and is abandoned."""
    answer: Future[http.client.HTTPResponse] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(request, timeout=timeout_s))
        except Exception as error:  # for the caller to raise
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise TimeoutError(f"0 bytes in {timeout_s:g} s") from None


def _check(file: Path, path: Path, md5: str) -> None:
    """Compare the MD5 of `file` (path itself, or its .partial, which becomes path) and record it."""
    found = md5_of(file, show_progress=True)
    if found != md5:
        do = (
            f"If it is yours, set data.source=user; else delete it and run `{make_target('data')}`, or "
            "choose another data.root."
        )
        if file != path:
            file.unlink()
            do = (
                f"The download was deleted. Run `{make_target('data')}` again; if the MD5 stays, the "
                "publisher has changed the file: see ups/tasks/published.py."
            )
        raise ValueError(f"{file} has MD5 {found}; expected {md5}. {edition(path.name, found)}{do}")
    write_atomic(path.with_name(path.name + ".md5"), f"{md5}  {path.name}\n")
