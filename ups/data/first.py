"""Download of the first trajectories of a published file: HDF5 reads the file through HTTP Range, in a
reading process (ups/userdata/readers/process.py), as the file is a stranger's.

The result states its origin by its name (NAME.first100.hdf5), its settings (address, published MD5, number of
published trajectories, the server's ETag or date) and a note for every reader. It is written as generated
data are (ups/data/generate.py), so an interrupted download continues. The published MD5 is that of the whole
file and cannot be compared.
"""

import contextlib
import gc
import io
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.common.files import partial_path
from ups.common.place import make_target
from ups.common.text import require_plain_name
from ups.data.download import Patience, answered, blocks, require_address
from ups.data.generate import generation_settings, write_data
from ups.data.layout import layout_of
from ups.data.pdebench import PROGRESS, SETTINGS, Published, data_bytes, describe, made_with, opened
from ups.userdata.readers import budget
from ups.userdata.readers.hdf5 import node
from ups.userdata.readers.process import ReadingProcess, is_plain, serve
from ups.userdata.trajectories import Trajectories

COMMAND = "from ups.data.first import serve_remote; serve_remote()"
REQUEST_BYTES = 2**18  # of small reads: the metadata of HDF5 lie close together
NUM_KEPT = 16  # such blocks
FACTS = "num_trajectories", "num_frames", "space", "dt", "parameter"  # of Trajectories
CHUNK_BYTES = 2**26  # of trajectories, downloaded before they count as done
MOST_METADATA = 2**28  # bytes to read beside trajectories; the published files need 2**20


class RemoteFile(io.RawIOBase):
    """A file on a web server, as h5py reads it. size: in bytes; edition: ETag or date, which changes
    with the file. allowed: bytes to ask for. error: the last one, because HDF5 may hide it."""

    def __init__(self, url: str, path: Path, patience: Patience) -> None:
        require_address(url)
        self.url, self.path, self.patience = url, path, patience
        self.size, self.edition, self.at, self.allowed = -1, "", 0, MOST_METADATA
        self.error: Exception | None = None
        self.block = lru_cache(NUM_KEPT)(self._block)
        self.block(0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        num = max(0, min(len(buffer), self.size - self.at))
        try:
            found = self._bytes(num)
        except Exception as error:
            self.error = error
            raise
        buffer[:num] = found
        self.at += num
        return num

    def _bytes(self, num: int) -> bytes:
        """The next `num` bytes."""
        if num >= REQUEST_BYTES:
            return self._range(self.at, self.at + num)
        first, last = self.at // REQUEST_BYTES, (self.at + num - 1) // REQUEST_BYTES
        start = self.at - first * REQUEST_BYTES
        return b"".join(map(self.block, range(first, last + 1)))[start : start + num]

    def _block(self, number: int) -> bytes:
        """Bytes of an aligned block."""
        return self._range(number * REQUEST_BYTES, (number + 1) * REQUEST_BYTES)

    def _range(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1, fewer at the end of the file. Raises ValueError for a server without HTTP
        Range or a file that changed, and the errors of `Patience.persist`."""
        received = bytearray()
        self.allowed -= stop - start
        if self.allowed < 0:
            raise ValueError(
                f"{self.url} needs more than {MOST_METADATA // 2**20} MiB beside its numbers; expected a "
                "file of fields. Check data.url, or set data.fetch=whole, which compares its MD5."
            )

        def attempt() -> None:
            have = start + len(received)
            answer = answered(
                urllib.request.Request(self.url, headers={"Range": f"bytes={have}-{stop - 1}"}),
                self.patience.timeout_s,
            )
            with answer:
                end = self._accept(answer, have, stop)
                for block in blocks(answer, end - have, self.patience.timeout_s):
                    received.extend(block)
            if start + len(received) < end:
                raise ConnectionError(f"the connection closed at byte {start + len(received)} of {end}")

        self.patience.persist(attempt, lambda: start + len(received), self.url, self.path)
        return bytes(received)

    def _accept(self, answer: Any, start: int, stop: int) -> int:
        """The byte after the range in `answer`, checked against the request start..stop-1."""
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range") or "")
        whole = "set data.fetch=whole, which downloads the file and compares its MD5"
        if answer.status != 206 or not found:
            raise ValueError(
                f"{self.url} answers with the whole file (status {answer.status}) to a request "
                f"for a range of bytes; expected a server with HTTP Range. Correct data.url, or {whole}."
            )
        first, last, size = map(int, found.groups())
        edition = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if self.size < 0:
            self.size, self.edition = size, edition
        if (size, edition) != (self.size, self.edition):
            raise ValueError(
                f"{self.url} changed while it was read (from {self.size} bytes, "
                f"{self.edition!r}, to {size}, {edition!r}); expected one file. Remove "
                f"{partial_path(self.path)} and run the same command again, or {whole}."
            )
        if (first, last + 1) != (start, min(stop, size)):
            raise ValueError(
                f"{self.url} gave bytes {first} to {last}; expected {start} to "
                f"{min(stop, size) - 1}. Correct data.url, or {whole}."
            )
        return last + 1


class Remote:
    """The open HDF5 file of a server, in a reading process. path: of the file to be."""

    is_single, used = False, (0.0, 0)

    def __init__(self, url: str, path: Path, task: str, num: int, patience: dict[str, Any]) -> None:
        self.path = url
        self.remote = RemoteFile(url, path, Patience(**patience))
        with self._explained(path, task):
            self.file = h5py.File(self.remote, "r")
            self.data = describe(self.file, path, task)
            _require_rows(self.file, self.data, url, num)

    @contextlib.contextmanager
    def _explained(self, path: Path, task: str) -> Iterator[None]:
        """Errors of the server are raised as they are, those of HDF5 as ValueError."""
        try:
            yield
        except (OSError, LookupError, RuntimeError, TypeError, ArithmeticError, ValueError) as error:
            if self.remote.error:
                raise self.remote.error from None
            text = str(error).replace(str(path), self.path)
            if self.path in text:  # our own
                raise ValueError(text) from None
            raise ValueError(
                f"{self.path} is no readable HDF5 file ({error}); expected one of {task}. Check data.url, "
                "or set data.fetch=whole, which compares its MD5."
            ) from error

    def about(self) -> dict[str, Any]:
        """What `fetch_first` needs to know."""
        data, key = self.data, layout_of(self.data.task).coordinate
        with self._explained(data.path, data.task.name):
            return {
                **{name: getattr(data, name) for name in FACTS},
                "edition": self.remote.edition or str(self.remote.size),
                "attributes": {
                    require_plain_name(name, self.path): value
                    for name, value in self.file.attrs.items()
                    if name not in (SETTINGS, PROGRESS) and is_plain(value)  # the former mark files of ours
                },
                "coordinates": {key(axis): node(self.file, key(axis))[()] for axis in data.coordinates},
            }

    def allow(self, first: int, last: int) -> None:
        """Grant `rows` room and time."""
        num = data_bytes(self.data.task.name, last - first, self.data.num_frames, self.data.space[0])
        self.remote.allowed = MOST_METADATA + num
        budget.allow(4 * num, num)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Trajectories first..last-1, finite."""
        with self._explained(self.data.path, self.data.task.name):
            store = Published(self.file, self.data.path, self.data.task)
            u = self.data.read(first, last, store=store)
        if not np.isfinite(u).all():
            bad = (first + np.flatnonzero(~np.isfinite(u).reshape(len(u), -1).all(1))).tolist()
            raise ValueError(
                f"{self.path} holds NaN or Inf in trajectories {bad[:5]}; expected finite numbers. Lower "
                f"task.{self.data.task.name}.num_trajectories to {bad[0]}."
            )
        return u


def serve_remote() -> None:
    """The reading process."""
    gc.disable()  # HDF5 holds its lock while a thread gets bytes, which would wait for it to collect h5py's
    serve(Remote)


def holds_first(path: Path, task: str, num: int, md5: str) -> bool:
    """Whether `path` exists. Raises ValueError if it does not hold the first `num` trajectories of the
    published file with that MD5."""
    if not path.exists():
        return False
    with opened(path, task) as file:
        settings, done = made_with(file) or ({}, 0)
    if (settings.get("whole"), settings.get("num_trajectories"), done) != (md5, num, num):
        raise ValueError(
            f"{path} is not the first {num} trajectories of the published file; expected it, by its name. "
            f"Move it elsewhere, or choose another data.root, and run `{make_target('data')}` again."
        )
    return True


def fetch_first(
    url: str,
    path: Path,
    task: str,
    num: int,
    md5: str,
    *,
    patience: Patience = Patience(),  # noqa: B008, it is frozen
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Download the first `num` trajectories of the published file at `url` to `path`. A complete file is
    kept, an unfinished one is continued. md5: of the whole published file.

    Raises ValueError for a compressed or chunked file, one with fewer trajectories or with values that are
    not finite, and for a server without HTTP Range; ConnectionError if the transfer makes no progress;
    OSError if `path` cannot be written.
    """
    if holds_first(path, task, num, md5):
        return
    process = ReadingProcess(COMMAND)
    try:
        process.call(url, "open", 0, url, path, task, num, asdict(patience))
        about = process.call(url, "about", 0)
        num_frames, resolution = about["num_frames"], about["space"][0]
        settings = generation_settings(
            task,
            f"the first {num} of {about['num_trajectories']} trajectories of {url}",
            seed=0,
            num_trajectories=num,
            resolution=resolution,
            num_frames=num_frames,
            t_end=about["dt"] * (num_frames - 1),
            parameter=about["parameter"],
        )
        settings |= {"seed": None, "whole": md5, "edition": about["edition"]}
        write_data(
            path,
            task,
            lambda rows, **_: process.call(url, "rows", 0, int(rows[0]), int(rows[-1]) + 1),
            settings,
            chunk=max(1, CHUNK_BYTES // data_bytes(task, 1, num_frames, resolution)),
            on_progress=on_progress,
            begin=lambda file: _copy_facts(about, file),
        )
    finally:
        process.end()


def _require_rows(source: h5py.File, data: Trajectories, url: str, num: int) -> None:
    """Raise ValueError for a file that does not store at least `num` trajectories one after the other."""
    layout, task = layout_of(data.task), data.task
    stored = [] if task.is_grouped else [layout.dataset(source, array) for array in task.arrays]
    if not stored or any(dataset.chunks for dataset in stored) or len(set(data.space)) > 1:
        raise ValueError(
            f"{url} stores its numbers in compressed chunks; expected arrays that begin with "
            "the first trajectories. Set data.fetch=whole."
        )
    if num > data.num_trajectories:
        raise ValueError(
            f"{url} holds {data.num_trajectories} trajectories; expected at least {num}. "
            f"Lower task.{task.name}.num_trajectories."
        )


def _copy_facts(about: dict[str, Any], file: h5py.File) -> None:
    """Copy the attributes and coordinates of the published file."""
    file.attrs.update(about["attributes"])
    for key, values in about["coordinates"].items():
        del file[key]
        file[key] = values
