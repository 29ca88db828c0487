"""Download of the first trajectories of a published file: HDF5 reads the file through HTTP Range, in a
reading process (ups/userdata/readers/process.py), as the file is a stranger's.

The result states its origin by its name (NAME.first100.hdf5), its settings (address, published MD5, number of
published trajectories, the server's ETag or date) and a note for every reader. It is written as generated
data are (ups/data/generate.py), so an interrupted download continues. The published MD5 is that of the whole
file and cannot be compared.
"""

import gc
import io
import re
import urllib.request
from collections.abc import Callable
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
from ups.data.pdebench import PROGRESS, SETTINGS, data_bytes, describe, made_with, opened
from ups.userdata.readers import budget
from ups.userdata.readers.hdf5 import Hdf5, node
from ups.userdata.readers.process import ReadingProcess, is_plain, serve
from ups.userdata.trajectories import Trajectories

COMMAND = "from ups.data.first import serve_remote; serve_remote()"
BLOCK_BYTES = 2**22  # of a request
NUM_KEPT = 4  # blocks: the metadata of HDF5 lie close together
FACTS = "num_trajectories", "num_frames", "space", "dt", "parameter"  # of Trajectories
CHUNK_BYTES = 2**26  # of trajectories, downloaded before they count as done
MOST_METADATA = 2**28  # bytes to read beside trajectories; the published files need 2**20
WHOLE = "Correct data.url, or set data.fetch=whole, which downloads the file and compares its MD5"


class RemoteFile(io.RawIOBase):
    """A file on a web server, as h5py reads it, in aligned blocks. size: in bytes; edition: ETag or date,
    which changes with the file; allowed: bytes to ask for; error: the last one, because HDF5 may hide it."""

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
        first, start = divmod(self.at, BLOCK_BYTES)
        try:
            found = b"".join(map(self.block, range(first, -(-(self.at + num) // BLOCK_BYTES))))
        except Exception as error:
            self.error = error
            raise
        buffer[:num] = found[start : start + num]
        self.at += num
        return num

    def _block(self, number: int) -> bytes:
        """The bytes of a block. Raises ValueError for a server without HTTP Range or a file that changed, and
        the errors of `Patience.persist`."""
        start, stop, received = number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES, []
        self.allowed -= BLOCK_BYTES
        if self.allowed < 0:
            raise ValueError(
                f"{self.url} needs more than {MOST_METADATA // 2**20} MiB beside its numbers; expected a "
                f"file of fields. {WHOLE}."
            )

        def attempt() -> None:
            received.clear()
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            with answered(
                urllib.request.Request(self.url, headers=headers), self.patience.timeout_s
            ) as answer:
                end = self._accept(answer, start, stop)
                received.extend(blocks(answer, end - start, self.patience.timeout_s))
            if (have := start + sum(map(len, received))) < end:
                raise ConnectionError(f"the connection closed at byte {have} of {end}")

        self.patience.persist(attempt, lambda: start + sum(map(len, received)), self.url, self.path)
        return b"".join(received)

    def _accept(self, answer: Any, start: int, stop: int) -> int:
        """The byte after the range in `answer`, which must be that of the request start..stop-1."""
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range") or "")
        if answer.status != 206 or not found:
            raise ValueError(
                f"{self.url} answers with the whole file (status {answer.status}) to a request "
                f"for a range of bytes; expected a server with HTTP Range. {WHOLE}."
            )
        first, last, size = map(int, found.groups())
        edition = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if self.size < 0:
            self.size, self.edition = size, edition
        if (size, edition, first, last) != (self.size, self.edition, start, min(stop, self.size) - 1):
            raise ValueError(
                f"{self.url} changed while it was read, or gave other bytes than asked for ({first} to "
                f"{last} of {size}, {edition!r}); expected {start} to {min(stop, self.size) - 1} of "
                f"{self.size}, {self.edition!r}. Remove {partial_path(self.path)} and run the same command "
                f"again. {WHOLE}."
            )
        return last + 1


class Remote:
    """The open HDF5 file of a server, in a reading process. path: its address."""

    is_single, used = False, (0.0, 0)

    def __init__(self, url: str, path: Path, task: str, num: int, patience: dict[str, Any]) -> None:
        self.path, self.remote = url, RemoteFile(url, path, Patience(**patience))
        try:
            self.store = Hdf5(url, self.remote)
            self.data = describe(self.store, path, task)
        except ValueError as error:
            raise self.remote.error or ValueError(
                f"{url} is no readable HDF5 file ({error}); expected one of {task}. {WHOLE}."
            ) from error
        self.file = self.store.file
        _require_rows(self.file, self.data, url, num)

    def about(self) -> dict[str, Any]:
        """What `fetch_first` needs to know."""
        data, key = self.data, layout_of(self.data.task).coordinate
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
        try:
            u = self.data.read(first, last, store=self.store)
        except ValueError as error:
            raise self.remote.error or error from None
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
    with opened(path, task) as store:
        settings, done = made_with(store.attributes(), path) or ({}, 0)
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
    task = data.task
    stored = [] if task.is_grouped else [node(source, place.array) for place in task.arrays]
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
