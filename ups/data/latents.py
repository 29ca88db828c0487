"""One array of latents in a cache file, mapped into memory or copied to a device, verified as it is read."""

import os
import warnings
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

from ups.common.device import send
from ups.common.progress import beat
from ups.data.seal import refusal
from ups.data.tokenizer import Tokenizer


class Latents:
    """An array (num_rows, num_frames, *tokens, dim) and one CRC-32 per row.

    A row is compared with its checksum when it is first gathered, and again when the file has changed since,
    because the mapping changes with the file. A file that was renamed or replaced stays mapped.
    """

    def __init__(self, path: Path, latents: h5py.Dataset, checksums: np.ndarray):
        self.path, self.name, self.checksums = path, latents.name, checksums
        self.shape, self.offset, self.num_bytes = latents.shape, latents.id.get_offset(), latents.nbytes
        self.handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)
        with open(self.handle, "rb", closefd=False) as file:
            self.rows = np.memmap(file, latents.dtype, mode="r", offset=self.offset, shape=self.shape)
        self.size, self.is_placed = os.fstat(self.handle).st_size, False
        self.changed: tuple[int, int] | None = None  # times of the file's last change, when rows were checked
        self.is_checked = np.zeros(self.shape[0], bool)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing writes to it
            self.frames = torch.from_numpy(self.rows.reshape(self.shape[0] * self.shape[1], -1))

    def fits(self, num_rows: int, codec: Tokenizer, fields: tuple[str, ...]) -> bool:
        """Whether the array holds `num_rows` trajectories of `fields` in the tokens of `codec`."""
        return (
            codec.fields == fields
            and codec.is_sound()
            and self.rows.dtype == np.float32
            and self.shape[0] == num_rows
            and self.shape[1] >= 1
            and self.shape[2:] == (*codec.tokens, codec.dim)
            and self.checksums.shape == (num_rows,)
            and self.checksums.dtype == np.uint32
        )

    def gather(
        self,
        rows: Tensor | Sequence[int],
        starts: Tensor | Sequence[int] | int,
        length: int,
        device: torch.device,
    ) -> Tensor:
        """Windows (B, length, *tokens, dim), float32, on `device`; see `Cache.batch`."""
        rows, starts = torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(starts, dtype=torch.int64)
        z = self._read(rows, starts, length)
        z = z if self.is_placed else send(z, device)
        return z.to(device).view(len(rows), length, *self.shape[2:])

    def _read(self, rows: Tensor, starts: Tensor, length: int) -> Tensor:
        """Windows (B, length * frame) on the device of the frames."""
        beat()
        num_rows, num_frames = self.shape[:2]
        last_row, last_start = num_rows - 1, num_frames - length
        if not (length >= 1 and rows.numel() and is_within(rows, last_row) and is_within(starts, last_start)):
            raise ValueError(
                f"rows {rows.tolist()[:8]}, starts {starts.flatten().tolist()[:8]}, length "
                f"{length} reach outside {self.name} of {self.path}; expected rows up to "
                f"{last_row} and frames up to {num_frames - 1}. Take rows from Cache.split."
            )
        if not self.is_placed:
            self.verify(rows.numpy())
        # A window is contiguous in memory: windows that overlap are rows of a strided view, and index_select
        # copies whole rows.
        size = self.frames.shape[1]
        windows = self.frames.as_strided((len(self.frames) - length + 1, length * size), (size, 1))
        z = windows.index_select(0, send(rows * num_frames + starts, self.frames.device))
        if not self.is_placed:
            self.verify(rows.numpy())  # again, in case the file was written to meanwhile
        return z

    def verify(self, rows: np.ndarray | None = None) -> None:
        """Compare `rows` (None: all) with their checksums, except those checked since the file last changed.

        Raises ValueError for the first row that differs, and for a file of another size, because reading past
        its end would kill the process.
        """
        status = os.fstat(self.handle)
        changed = status.st_mtime_ns, status.st_ctime_ns
        if status.st_size != self.size:
            raise refusal(self.path, f"holds {status.st_size} bytes", f"{self.size}, as when it was opened")
        if changed != self.changed:
            self.changed, self.is_checked = changed, np.zeros(self.shape[0], bool)
        rows = np.arange(len(self.is_checked)) if rows is None else rows
        for row in np.unique(rows[~self.is_checked[rows]]):
            beat()
            if zlib.crc32(self.rows[row]) != self.checksums[row]:
                raise refusal(
                    self.path,
                    f"has a damaged row {row} in {self.name}",
                    f"checksum {self.checksums[row]:08x}",
                )
            self.is_checked[row] = True

    def place(self, device: torch.device) -> None:
        """Copy all rows, verified, to `device`."""
        self.verify()
        frames = self.frames.to(device, copy=True)
        self.verify()  # again, in case the file was written to meanwhile
        self.frames, self.is_placed = frames, True


def is_within(values: Tensor, last: int) -> bool:
    """Whether all values are from 0 to `last`."""
    low, high = values.aminmax()
    return int(low) >= 0 and int(high) <= last
