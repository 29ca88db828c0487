"""Latent cache: every trajectory of a task through its tokenizer, in one HDF5 file that any number of readers
share.

    /state/latents  (n, T, *tokens, dim) contiguous, float32 or float16; /state/checksums  CRC-32 of every row
    /state/tokenizer/{mean, std, basis, spectrum}; /input/... the same for the coefficient of a steady task,
    /forcing/... for what is known in advance (a series as a field that is the same in every cell)
    /parameters (n, P), /parameter_index (n,), /trajectory (n,), /split/{train, val, test} (row numbers)
    /header  JSON: settings, fingerprint, data files, tokenizers, time, grid, reconstruction floor

Row = parameter value x num_trajectories + trajectory. The first SEAL_BYTES are HDF5's user block and hold our
seal: format, size, where the latents lie, and a SHA-256 of every byte that is neither seal nor latents. It is
written last, so that nothing half-made passes for whole, and read first, so that HDF5 never parses an altered
header. Latents are memory-mapped at their offset: one copy in the page cache serves all ranks and workers,
and nothing lives in /dev/shm.
"""

import json
import math
import os
import warnings
import weakref
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch
from torch import Tensor

from ups.common.progress import beat
from ups.common.transfer import pinned, send
from ups.config import Config, TaskConfig
from ups.data.counts import num_kept
from ups.data.seal import read_seal, refusal
from ups.data.tokenizer import TENSORS, Tokenizer
from ups.tasks import Task, described_task
from ups.userdata.readers.hdf5 import dataset, node

# opening verifies every row up to this size: CRC-32 runs at 2 GB/s, a quarter of a second
FULL_BYTES = 2**29
BESIDE = ("cuda",)  # devices that compute while the host reads on
# of decoded fields in float64, at a time; a rollout holds some of that size
PART_BYTES = 2**28
# keys of task.TASK that decide what a cache holds
USED_SETTINGS = (
    "num_trajectories",
    "resolution",
    "num_frames",
    "t_end",
    "parameters",
    "space_stride",
    "time_stride",
    "first_frame",
    "patch",
    "dim",
    "energy",
)


class Cache:
    """An open cache. Picklable (reopens by path) and safe to use after a fork.

    task, settings, path, fingerprint. tokenizer, input_tokenizer (None unless steady), forcing_tokenizer
    (None where nothing is known in advance). num_rows, num_frames, dt (time units). num_bytes: size of the
    latents; frame_bytes: of one frame of all fields.
    split: train, val, test -> row numbers, and reserved: training rows that the operator does not see
    (task.TASK.reserve), kept for what learns its errors. parameters (n, P) float64, parameter_values: empty
    where the task hides them; parameter_index (n,): which file; trajectory (n,). floor: split -> state or
    input -> errors of the codec alone on held-out data (`ups.data.build_cache.CodecErrors`).
    header: everything else that the file says about itself.
    """

    def __init__(
        self, path: str | Path, settings: TaskConfig, verify: Literal["auto", "quick", "full"] = "auto"
    ):
        self.path, self.settings = Path(path), settings
        read_seal(self.path)
        try:
            with h5py.File(self.path, "r", locking=False) as file:
                self.header: dict[str, Any] = json.loads(bytes(dataset(file, "header")[()]).decode())
                self._parts = {
                    name: _read_part(self.path, file, name, self.header)
                    for name in ("state", "input", "forcing")
                    if node(file, name) is not None
                }
                self._state, self.tokenizer = self._parts["state"]
                self._input, self.input_tokenizer = self._parts.get("input", (None, None))
                self._forcing, self.forcing_tokenizer = self._parts.get("forcing", (None, None))
                self.num_rows, self.num_frames = self._state.shape[:2]
                self.num_bytes = sum(part.num_bytes for part, _ in self._parts.values())
                self.parameters, self.parameter_index, self.trajectory = (
                    torch.from_numpy(dataset(file, name)[()])
                    for name in ("parameters", "parameter_index", "trajectory")
                )
                self.split = {
                    name: torch.from_numpy(dataset(file, f"split/{name}")[()])
                    for name in ("train", "val", "test")
                }
            self.task: Task = described_task(self.header["settings"]["task"])
            self.fingerprint: str = self.header["fingerprint"]
            self.dt, self.floor = float(self.header["dt"]), self.header["floor"]
            settings_then, is_own = self.header["settings"]["settings"], self.task.user_facts is not None
            values = torch.tensor(
                self.header["values"] if is_own else settings_then["parameters"], dtype=torch.float64
            )
            found = self.parameters if is_own else self.parameters[:, :1].flatten()
            self.is_sampled = len(values) > 0 and not torch.equal(found, values[self.parameter_index])
            if self.is_sampled and not is_own:
                raise ValueError("parameters that are not those of its settings")
        except Exception as error:
            # by what is missing or of another kind; the seal holds, so it was written so
            raise refusal(
                self.path, f"lacks a part ({type(error).__name__}: {error})", "all parts of a cache"
            ) from error
        self._check()
        self.frame_bytes = self.num_bytes / (self.num_rows * self.num_frames)
        self.parameter_values = values
        if self.task.hides:
            self.parameters, self.parameter_values = self.parameters[:, :0], self.parameter_values[:0]
        self._reserve(settings.reserve)
        if verify == "full" or (verify == "auto" and self.num_bytes <= FULL_BYTES):
            for part, _ in self._parts.values():
                part.verify()

    def _check(self) -> None:
        """Raise ValueError unless the parts fit each other."""
        num, task = self.num_rows, self.task
        fields = {
            "state": task.fields,
            **({"input": task.inputs} if task.inputs else {}),
            **({"forcing": task.forcing} if task.forcing else {}),
        }
        numbers = [self.parameter_index, self.trajectory, *self.split.values()]
        is_right = {
            "latents or tokenizers": fields.keys() == self._parts.keys()
            and all(part.fits(num, codec, fields[name]) for name, (part, codec) in self._parts.items()),
            "parameters": self.parameters.shape == (num, len(task.parameters))
            and self.parameters.dtype == torch.float64
            and bool(self.parameters.isfinite().all()),
            "row numbers": len(self.parameter_index) == len(self.trajectory) == num
            and all(
                rows.dtype == torch.int64 and rows.ndim == 1 and len(rows) > 0 and _is_within(rows, num - 1)
                for rows in numbers
            )
            and torch.equal(torch.cat(numbers[2:]).sort().values, torch.arange(num)),
            "time step": math.isfinite(self.dt) and (self.dt == 0 if task.is_steady else self.dt > 0),
            "floor": isinstance(self.floor, dict) and isinstance(self.fingerprint, str),
        }
        if wrong := [name for name, fine in is_right.items() if not fine]:
            raise refusal(self.path, f"has {wrong[0]} that do not fit its other parts", "parts of one cache")

    def _reserve(self, share: float) -> None:
        """Move the last `share` of the training trajectories (of every parameter value) to the split
        "reserved"."""
        train = self.split["train"]
        numbers = self.trajectory[train].unique()
        is_kept = torch.isin(self.trajectory[train], numbers[: num_kept(len(numbers), share)])
        self.split |= {"train": train[is_kept], "reserved": train[~is_kept]}

    def scene(self) -> dict[str, Any]:
        """What a figure of a trajectory must know: the fields it shows, stored space axes and the cell
        centres along each (as the data file has them, else spread over the task's domain)."""
        stored, task = self.header["coordinates"], self.task
        return {
            "fields": [*map(task.with_unit, task.moving)],
            "axes": list(task.axes),
            "labels": [*map(task.with_unit, task.axes)],
            "time": task.with_unit("time"),
            "coordinates": [
                np.array(stored.get(axis) or task.centres(num_cells, axis))
                for axis, num_cells in zip(task.axes, self.tokenizer.space, strict=True)
            ],
        }

    def batch(
        self,
        rows: Tensor | Sequence[int],
        starts: Tensor | Sequence[int] | int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Latents (B, length, *tokens, dim), float32, on `device`: frames starts .. starts + length - 1 of
        each row.

        rows: row numbers of the file (take them from `split`); starts: one frame per row, or one for all.
        """
        return self._state.gather(rows, starts, length, torch.device(device))

    def parts(self, rows: Tensor, num_frames: int, most: int) -> tuple[Tensor, ...]:
        """`rows` in parts of at most `most`, so many that `num_frames` frames of their fields in float64 take
        at most PART_BYTES, one at least: three-dimensional fields go alone, small ones together."""
        each = 8 * num_frames * self.tokenizer.num_channels * math.prod(self.tokenizer.space)
        return rows.split(max(1, min(most, PART_BYTES // each)))

    def inputs(self, rows: Tensor | Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Latents (B, 1, *tokens, dim) of the coefficient of a steady task."""
        assert self._input is not None, f"{self.task.name} is not steady"
        return self._input.gather(rows, 0, 1, torch.device(device))

    def forcing(
        self,
        rows: Tensor | Sequence[int],
        starts: Tensor | Sequence[int] | int,
        length: int,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Latents (B, length, *tokens, dim) of what is known in advance, as `batch`; after the last frame
        follows the first again, for forecasts that are longer than the data."""
        assert self._forcing is not None, f"{self.task.name} has no forcing"
        starts = torch.as_tensor(starts, dtype=torch.int64)
        if int(starts.min()) >= 0 and int(starts.max()) + length <= self.num_frames:
            return self._forcing.gather(rows, starts, length, torch.device(device))
        z = self._forcing.gather(rows, 0, self.num_frames, torch.device(device))
        frames = (starts.view(-1, 1) + torch.arange(length)) % self.num_frames
        return z[torch.arange(len(z), device=z.device)[:, None], send(frames.expand(len(z), -1), z.device)]

    def read_ahead(self, rows: Tensor, starts: Tensor | int, length: int, device: torch.device | str) -> None:
        """Read what `batch` (and `inputs` or `forcing`) will be asked for next, into pinned memory,
        while a GPU computes; does nothing for other devices and for latents that lie there."""
        for part, _ in self._parts.values():
            part.read_ahead(rows, starts, length, torch.device(device))

    def __reduce__(self) -> tuple:
        return Cache, (self.path, self.settings, "quick")


class _Latents:
    """One latent array of a cache: mapped from the file, or copied to a device.

    A row is compared with its checksum when it is first gathered, and again when the file has changed since:
    what is mapped changes with it. A file that was renamed or replaced stays mapped as it was.
    """

    def __init__(self, path: Path, latents: h5py.Dataset, checksums: np.ndarray):
        self.path, self.name, self.checksums = path, latents.name, checksums
        self.shape, self.offset, self.num_bytes = latents.shape, latents.id.get_offset(), latents.nbytes
        self.handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)
        with open(self.handle, "rb", closefd=False) as file:
            self.rows = np.memmap(file, latents.dtype, mode="r", offset=self.offset, shape=self.shape)
        self.size, self.is_placed = os.fstat(self.handle).st_size, False
        self.ahead: dict[tuple, Tensor] = {}  # what was read before it is asked for, by what was asked
        self.checked_at, self.is_checked = None, np.zeros(self.shape[0], bool)  # since when, which rows
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing here writes to it
            self.frames = torch.from_numpy(self.rows.reshape(self.shape[0] * self.shape[1], -1))

    def fits(self, num_rows: int, codec: Tokenizer, fields: tuple[str, ...]) -> bool:
        """Whether this is `num_rows` trajectories of `fields` in the tokens of their `codec`, in a type that
        caches have."""
        return (
            codec.fields == fields
            and codec.is_sound()
            and self.rows.dtype in (np.float32, np.float16)
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
        rows, starts = torch.as_tensor(rows, dtype=torch.int64), torch.as_tensor(starts, dtype=torch.int64)
        z = self.ahead.pop(_request(rows, starts, length), None)
        z = self._read(rows, starts, length) if z is None else z
        z = z if self.is_placed else send(z, device)
        return z.to(device, torch.float32).view(len(rows), length, *self.shape[2:])

    def read_ahead(self, rows: Tensor, starts: Tensor | int, length: int, device: torch.device) -> None:
        if device.type in BESIDE and not self.is_placed:
            starts = torch.as_tensor(starts, dtype=torch.int64)
            self.ahead = {_request(rows, starts, length): pinned(self._read(rows, starts, length), device)}

    def _read(self, rows: Tensor, starts: Tensor, length: int) -> Tensor:
        """Windows (B, length * token), as they are stored, where the frames are."""
        beat()
        num_rows, num_frames = self.shape[:2]
        last_row, last_start = num_rows - 1, num_frames - length
        if not (
            length >= 1 and rows.numel() and _is_within(rows, last_row) and _is_within(starts, last_start)
        ):
            raise ValueError(
                f"rows {rows.tolist()[:8]}, starts {starts.flatten().tolist()[:8]}, length "
                f"{length} reach outside {self.name} of {self.path}; expected rows up to "
                f"{last_row} and frames up to {num_frames - 1}. Take rows from Cache.split."
            )
        if not self.is_placed:
            self.verify(rows.numpy())
        # A window is one run of memory: overlapping windows are rows of a strided view, and index_select
        # copies whole rows.
        size = self.frames.shape[1]
        windows = self.frames.as_strided((len(self.frames) - length + 1, length * size), (size, 1))
        z = windows.index_select(0, send(rows * num_frames + starts, self.frames.device))
        if not self.is_placed:
            self.verify(rows.numpy())  # the same rows, if the file was written to meanwhile
        return z

    def verify(self, rows: np.ndarray | None = None) -> None:
        """Compare the checksums of `rows` (None: all), but of those that are known to be right in the file as
        it is.

        Raises ValueError naming the first that differs, and for a file of another size: reading behind its
        end would kill.
        """
        status = os.fstat(self.handle)
        changed = status.st_mtime_ns, status.st_ctime_ns
        if status.st_size != self.size:
            raise refusal(self.path, f"holds {status.st_size} bytes", f"{self.size}, as when it was opened")
        if changed != self.checked_at:
            self.checked_at, self.is_checked = changed, np.zeros(self.shape[0], bool)
        seen = self.is_checked
        rows = np.arange(len(seen)) if rows is None else rows
        for row in () if seen[rows].all() else np.unique(rows[~seen[rows]]):
            beat()
            if zlib.crc32(self.rows[row]) != self.checksums[row]:
                raise refusal(
                    self.path,
                    f"has a damaged row {row} in {self.name}",
                    f"checksum {self.checksums[row]:08x}",
                )
            seen[row] = True

    def place(self, device: torch.device) -> None:
        """Copy all rows, verified, to `device`."""
        self.verify()
        frames = self.frames.to(device, copy=True)
        self.verify()  # again, if the file was written to meanwhile
        self.frames, self.is_placed = frames, True


def _request(rows: Tensor, starts: Tensor, length: int) -> tuple:
    """What is asked of latents, by its numbers."""
    return rows.numpy().tobytes(), starts.numpy().tobytes(), length


def _is_within(values: Tensor, last: int) -> bool:
    low, high = values.aminmax()
    return int(low) >= 0 and int(high) <= last


def place(
    caches: Iterable[Cache],
    device: torch.device | str,
    mode: Literal["auto", "mmap", "device"],
    fraction: float = 1.0,
) -> str:
    """Copy the latents of all `caches` to `device` once, or leave them mapped; returns "device" or "mmap".

    auto: copy when together they take at most `fraction` of the device's free memory; on a CPU the page cache
    already is that copy, shared by all processes, so they stay mapped. What is copied is verified on the way.
    Raises ValueError for damage.
    """
    caches, device = list(caches), torch.device(device)
    if mode == "auto":
        fits = device.type == "cuda" and (
            sum(cache.num_bytes for cache in caches) <= fraction * torch.cuda.mem_get_info(device)[0]
        )
        mode = "device" if fits else "mmap"
    if mode == "device":
        for part, _ in [part for cache in caches for part in cache._parts.values()]:
            part.place(device)
    return mode


def open_cache(config: Config, task_name: str, verify: Literal["auto", "quick", "full"] = "auto") -> Cache:
    """The cache of `task_name`, checked against its seal and against `config`.

    quick: seal, size, header and settings, milliseconds. full: every row as well. auto: full up to
    FULL_BYTES; larger ones row by row, each when it is first read. Raises FileNotFoundError for a missing
    file, ValueError for a stale, truncated, altered or foreign one.
    """
    path = config.cache_path(task_name)
    if not path.is_file():
        raise FileNotFoundError(
            f"no cache of {task_name} at {path}; expected the latents there (key "
            "cache.root). Build it with `make cache` (python prepare_cache.py --config "
            "CONFIG)."
        )
    cache = Cache(path, config.task[task_name], verify)
    stored, wanted = cache.header["settings"], cache_settings(config, task_name)
    if not isinstance(stored, dict) or not all(isinstance(stored.get(part), dict) for part in wanted):
        raise refusal(path, "does not say with what settings it was built", "the settings it was built with")
    changed = [
        f"{key} {stored[part].get(key)!r:.200} -> {wanted[part].get(key)!r}"
        for part in wanted
        for key in wanted[part] | stored[part]
        if stored[part].get(key) != wanted[part].get(key)
    ]
    if changed:
        raise refusal(path, f"is stale ({'; '.join(changed)})", "the settings it was built with")
    return cache


def _read_part(path: Path, file: h5py.File, name: str, header: dict[str, Any]) -> tuple[_Latents, Tokenizer]:
    """The latents called `name` and their tokenizer."""
    latents = _Latents(path, dataset(file, f"{name}/latents"), dataset(file, f"{name}/checksums")[()])
    tensors = {key: torch.from_numpy(dataset(file, f"{name}/tokenizer/{key}")[()]) for key in TENSORS}
    if any(value.dtype != torch.float32 for value in tensors.values()):
        raise TypeError(
            f"a tokenizer of {', '.join(str(value.dtype) for value in tensors.values())}; expected float32"
        )
    return latents, Tokenizer.from_state(tensors, header["tokenizers"][name])


def cache_settings(config: Config, task_name: str) -> dict[str, dict]:
    """Everything in the configuration that decides what the cache of `task_name` holds."""
    task, settings, data = config.spec(task_name), config.task[task_name], config.data
    origin = {"source": data.source, "seed": data.seed if data.source == "generate" else None}
    return {
        "task": {
            **task.description,
            "fields": list(task.fields),
            "inputs": list(task.inputs),
            "positive": list(task.positive),
        },
        "settings": {key: getattr(settings, key) for key in USED_SETTINGS},
        "data": {
            **(origin if task.user_facts is None else {"split": settings.split}),
            **({"skip_missing": True} if task.user_facts is not None and settings.skip_missing else {}),
            "val_fraction": data.val_fraction,
            "test_fraction": data.test_fraction,
        },
        "cache": {"dtype": config.cache.dtype},
    }
