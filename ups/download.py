"""Published files: downloaded with resume, checked against their MD5, renamed only when they are right.

An interrupted transfer leaves NAME.partial and the next one asks the server for the rest (HTTP Range). A file that was
checked once has NAME.md5 beside it (readable by md5sum -c), so that it is not hashed again.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from ups.pdebench import make_room, partial_path
from ups.published import PUBLISHED, UNPUBLISHED, WITHDRAWN
from ups.tasks import get_task

READ_BYTES = 2**20
MAX_PAUSE_S = 60.0
TRANSIENT = (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError)


def published_file(task: str, parameter: float | None) -> tuple[str, int, str]:
    """File name, DaRUS id and MD5 of a published file. Raises ValueError naming the values that are published."""
    spec = get_task(task)
    if task in UNPUBLISHED:
        raise ValueError(f"{task} is a data set of ours that nobody publishes; expected a task of PDEBench with "
                         f"data.source=published. Set data.source=generate, or take {task} out of data.tasks.")
    name = spec.file_for(parameter)
    if name not in PUBLISHED:
        head = spec.filename.split("{")[0]
        raise ValueError(f"{task} has no published file {name}; expected one of: "
                         f"{', '.join(known for known in PUBLISHED if known.startswith(head))}. Change task.{task}.parameters or "
                         f"set data.source=generate.")
    return name, *PUBLISHED[name]


def md5_of(path: Path, show_progress: bool = False) -> str:
    """MD5 of a file, read in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file, tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"MD5 {path.name}",
                                       disable=not show_progress) as bar:
        while block := file.read(READ_BYTES):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()


def edition(name: str, md5: str) -> str:
    """A sentence about a file called `name` whose MD5 is not the published one; empty if nothing is known of it."""
    if md5.startswith(WITHDRAWN.get(name, "no")):
        return "It is the withdrawn first edition, which is wrong (PDEBench issues 46 and 51). "
    return ""


def is_verified(path: Path, md5: str) -> bool:
    """Whether `path` exists and its MD5 was found right after it was last changed."""
    record = path.with_name(path.name + ".md5")
    return (path.is_file() and record.is_file() and record.read_text(encoding="utf-8").split()[:1] == [md5]
            and record.stat().st_mtime_ns >= path.stat().st_mtime_ns)


def fetch(url: str, path: str | Path, md5: str, *, retries: int = 5, pause_s: float = 1.0, timeout_s: float = 60.0,
          show_progress: bool = True) -> None:
    """Make `path` the file at `url` whose MD5 is `md5` (hexadecimal); nothing is done for one already found right.

    retries: attempts without a single new byte before giving up, pause_s (doubling) apart; timeout_s: of one socket
    operation. Raises ValueError for a wrong URL, an answer such as 404, or another MD5; ConnectionError when the transfer does
    not get on; PermissionError or OSError when `path` cannot be written.
    """
    path = Path(path)
    if is_verified(path, md5):
        return
    if path.exists():
        _check(path, path, md5, show_progress)
        return
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a web address; expected http(s)://HOST/PATH/ID. Mend data.url.")
    partial = partial_path(path)
    make_room(path, 0)
    failures = 0
    while True:
        before = _size(partial)
        try:
            _transfer(url, path, timeout_s, show_progress)
            break
        except TRANSIENT as error:
            code = getattr(error, "code", None)
            if code is not None and code < 500 and code not in (408, 425, 429):  # the client's fault: another try will not help
                raise ValueError(f"{url} answered {code} {error.reason}; expected the file {path.name}. Check data.url, or "
                                 f"download the file by hand to {path}.") from error
            failures = 1 if _size(partial) > before else failures + 1
            if failures > retries:
                raise ConnectionError(f"{url} gave nothing new in {failures} attempts ({error}); expected the file {path.name}. "
                                      f"Check the network and run `make data` again: it continues at byte "
                                      f"{_size(partial)}.") from error
            time.sleep(min(MAX_PAUSE_S, pause_s * 2 ** (failures - 1)))
    _check(partial, path, md5, show_progress)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(url: str, path: Path, timeout_s: float, show_progress: bool) -> None:
    """One attempt: append to the .partial file what it lacks. Raises one of TRANSIENT when it ends early."""
    partial = partial_path(path)
    have = _size(partial)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        total = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        if total == str(have):
            return  # everything was there already; the MD5 decides
        partial.unlink()
        raise ConnectionError(f"the unfinished file had {have} bytes, the server's has {total or '?'}; starting again") from error
    with response:
        is_continued = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        start = have if is_continued else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        make_room(path, total or 0)
        with partial.open("ab" if is_continued else "wb") as file, tqdm(
                total=total, initial=start, unit="B", unit_scale=True, desc=path.name, disable=not show_progress) as bar:
            while block := response.read(READ_BYTES):
                file.write(block)
                bar.update(len(block))
    if total is not None and _size(partial) < total:
        raise ConnectionError(f"the connection closed at byte {_size(partial)} of {total}")


def _check(file: Path, path: Path, md5: str, show_progress: bool) -> None:
    """Compare the MD5 of `file` (path itself, or its .partial, which then becomes path) and record it."""
    found = md5_of(file, show_progress)
    if found != md5:
        what = f"{file} has MD5 {found}; expected {md5}. {edition(path.name, found)}"
        if file == path:
            raise ValueError(f"{what}Delete it and run `make data`, or choose another data.root.")
        file.unlink()
        raise ValueError(f"{what}The download was deleted. Run `make data` again; if the MD5 stays, the publisher has changed "
                         f"the file: see ups/published.py.")
    if file != path:
        file.rename(path)
    path.with_name(path.name + ".md5").write_text(f"{md5}  {path.name}\n", encoding="utf-8")
