"""Download of the first trajectories of a published file: HDF5 reads the file through HTTP Range.

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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.common.files import partial_path
from ups.common.place import make_target
from ups.data.download import Patience, answered, blocks, require_address
from ups.data.generate import generation_settings, write_data
from ups.data.layout import layout_of
from ups.data.pdebench import Published, data_bytes, describe, made_with, opened
from ups.userdata.readers.hdf5 import node
from ups.userdata.trajectories import Trajectories

BLOCK_BYTES = 2**18  # of small reads: the metadata of HDF5 lie close together
NUM_KEPT = 16  # such blocks
CHUNK_BYTES = 2**26  # of trajectories, downloaded before they count as done


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    HDF5 holds its lock while it reads from us, and we wait for another thread. If that thread collected an
    object of h5py, it would wait for the lock forever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RemoteFile(io.RawIOBase):
    """A file on a web server, readable at any position. size: in bytes; edition: ETag or date, which changes
    with the file. error: the last one, because HDF5 may hide it."""

    def __init__(self, url: str, path: Path, patience: Patience) -> None:
        require_address(url)
        self.url, self.path, self.patience = url, path, patience
        self.size, self.edition, self.at = -1, "", 0
        self.error: Exception | None = None
        self.kept: OrderedDict[int, bytes] = OrderedDict()
        self._block(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        num = max(0, min(len(buffer), self.size - self.at))
        try:
            with _uncollected():
                found = self._bytes(num)
        except Exception as error:
            self.error = error
            raise
        buffer[:num] = found
        self.at += num
        return num

    def _bytes(self, num: int) -> bytes:
        """The next `num` bytes."""
        if num >= BLOCK_BYTES:
            return self._range(self.at, self.at + num)
        first, last = self.at // BLOCK_BYTES, (self.at + num - 1) // BLOCK_BYTES
        start = self.at - first * BLOCK_BYTES
        return b"".join(map(self._block, range(first, last + 1)))[start : start + num]

    def _block(self, number: int) -> bytes:
        """Bytes of an aligned block; the last NUM_KEPT are cached."""
        if number not in self.kept:
            self.kept[number] = self._range(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
            if len(self.kept) > NUM_KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(number)
        return self.kept[number]

    def _range(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1, fewer at the end of the file. Raises ValueError for a server without HTTP
        Range or a file that changed, and the errors of `Patience.persist`."""
        received = bytearray()

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


@contextlib.contextmanager
def opened_remote(
    url: str, path: Path, task: str, patience: Patience
) -> Iterator[tuple[h5py.File, RemoteFile]]:
    """The open HDF5 file at `url`. Errors of the server are raised as they are, those of HDF5 as
    ValueError."""
    remote = RemoteFile(url, path, patience)
    try:
        with h5py.File(remote, "r") as file:
            yield file, remote
    except (OSError, LookupError, RuntimeError, TypeError, ArithmeticError, ValueError) as error:
        if remote.error:
            raise remote.error from None
        if str(path) in str(error) or url in str(error):  # our own
            raise
        raise ValueError(
            f"{url} is no readable HDF5 file ({error}); expected one of {task}. Check data.url, "
            "or set data.fetch=whole, which compares its MD5."
        ) from error


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
    with opened_remote(url, path, task, patience) as (source, remote):
        data = describe(source, path, task)
        _require_rows(source, data, url, num)
        settings = generation_settings(
            task,
            f"the first {num} of {data.num_trajectories} trajectories of {url}",
            seed=0,
            num_trajectories=num,
            resolution=data.space[0],
            num_frames=data.num_frames,
            t_end=data.dt * (data.num_frames - 1),
            parameter=data.parameter,
        )
        settings |= {"seed": None, "whole": md5, "edition": remote.edition or str(remote.size)}
        row_bytes = data_bytes(task, 1, data.num_frames, data.space[0])

        def read(indices: np.ndarray, **_: Any) -> np.ndarray:
            u = data.read(int(indices[0]), int(indices[-1]) + 1, store=Published(source, path, data.task))
            if not np.isfinite(u).all():
                bad = indices[~np.isfinite(u).reshape(len(u), -1).all(1)].tolist()
                raise ValueError(
                    f"{url} holds NaN or Inf in trajectories {bad[:5]}; expected finite "
                    f"numbers. Lower task.{task}.num_trajectories to {bad[0]}."
                )
            return u

        write_data(
            path,
            task,
            read,
            settings,
            chunk=max(1, CHUNK_BYTES // row_bytes),
            on_progress=on_progress,
            begin=lambda file: _copy_facts(source, file, data),
        )


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


def _copy_facts(source: h5py.File, file: h5py.File, data: Trajectories) -> None:
    """Copy the attributes and coordinates of the published file."""
    file.attrs.update(source.attrs)
    for key in map(layout_of(data.task).coordinate, data.coordinates):
        values = node(source, key)[()]
        del file[key]
        file[key] = values
