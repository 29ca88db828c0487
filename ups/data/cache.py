"""Latent cache: all trajectories of a task, encoded by its tokenizer, in one HDF5 file that any number of
processes read.

    /state/latents  (n, T, *tokens, dim) contiguous, float32; /state/checksums  CRC-32 of every row
    /state/tokenizer/{mean, std, basis, spectrum}; /input/... the same for the coefficient of a steady task,
    /forcing/... for forcing that is known in advance (a series as a field that is equal in every cell)
    /parameters (n, P), /parameter_index (n,), /trajectory (n,), /split/{train, val, test} (row numbers)
    /header  JSON: settings, fingerprint, data files, tokenizers, time, grid

Row = parameter value x num_trajectories + trajectory. The first SEAL_BYTES are HDF5's user block. They hold
the seal (ups/data/seal.py): format, size, position of the latents, and a SHA-256 of all other bytes. It is
written last, so an unfinished file has none, and read first, so HDF5 never parses an altered header. Latents
are mapped into memory: one copy in the page cache serves all ranks and workers, and /dev/shm is not used.
"""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch
from torch import Tensor

from ups.common.device import send
from ups.common.place import make_target
from ups.config.schema import Config, TaskConfig
from ups.data.counts import context_frames, num_kept
from ups.data.latents import Latents, is_within
from ups.data.seal import read_seal, refusal
from ups.data.tokenizer import TENSORS, Tokenizer
from ups.tasks import Task, described_task
from ups.userdata.readers.hdf5 import dataset, node

# opening verifies every row of a cache up to this size, in a quarter of a second: CRC-32 runs at 2 GB/s
FULL_BYTES = 2**29
DECODE_BYTES = 2**28  # of fields in float64 that are decoded at a time; a rollout holds several times that
# keys of task.TASK that decide the content of a cache
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
    """An open cache. It can be pickled (it reopens its path) and used after a fork.

    tokenizer, input_tokenizer, forcing_tokenizer: of the fields, of the coefficient (None unless steady) and
    of the forcing (None without). num_rows, num_frames, dt (time units). num_bytes: size of all latents.
    split: train, val, test -> row numbers, and reserved: training rows that only the stages after the
    operator use (task.TASK.reserve).
    parameters (n, P) float64 and parameter_values, empty for a task that hides them; parameter_index,
    trajectory (n,): number of the parameter value and of the initial condition.
    windows (n, 2): the run and the first frame of every row, if rows are windows of runs, else None.
    header: all other facts in the file. is_sampled: every trajectory has parameters of its own, not one of a
    few values.
    """

    def __init__(
        self, path: str | Path, settings: TaskConfig, verify: Literal["auto", "quick", "full"] = "auto"
    ):
        self.path, self.settings = Path(path), settings
        read_seal(self.path)
        try:
            self._read()
        except Exception as error:
            # whatever is missing or of another kind: the seal holds, so the file was written this way
            raise refusal(
                self.path, f"lacks a part ({type(error).__name__}: {error})", "all parts of a cache"
            ) from error
        self._check()
        if self.task.hides:
            self.parameters, self.parameter_values = self.parameters[:, :0], self.parameter_values[:0]
        self._reserve(settings.reserve)
        if verify == "full" or (verify == "auto" and self.num_bytes <= FULL_BYTES):
            for latents, _ in self._groups.values():
                latents.verify()

    def _read(self) -> None:
        with h5py.File(self.path, "r", locking=False) as file:
            self.header: dict[str, Any] = json.loads(bytes(dataset(file, "header")[()]).decode())
            self._groups = {
                name: _read_group(self.path, file, name, self.header)
                for name in ("state", "input", "forcing")
                if node(file, name) is not None
            }
            self.parameters, self.parameter_index, self.trajectory = (
                torch.from_numpy(dataset(file, name)[()])
                for name in ("parameters", "parameter_index", "trajectory")
            )
            self.split = {
                name: torch.from_numpy(dataset(file, f"split/{name}")[()])
                for name in ("train", "val", "test")
            }
        self._state, self.tokenizer = self._groups["state"]
        self._input, self.input_tokenizer = self._groups.get("input", (None, None))
        self._forcing, self.forcing_tokenizer = self._groups.get("forcing", (None, None))
        self.num_rows, self.num_frames = self._state.shape[:2]
        self.num_bytes = sum(latents.num_bytes for latents, _ in self._groups.values())
        self.task: Task = described_task(self.header["settings"]["task"])
        self.fingerprint: str = self.header["fingerprint"]
        self.windows = np.array(self.header["windows"]) if "windows" in self.header else None
        self.dt = float(self.header["dt"])
        is_user = self.task.user_facts is not None
        values = self.header["values"] if is_user else self.header["settings"]["settings"]["parameters"]
        self.parameter_values = torch.tensor(values, dtype=torch.float64)
        found = self.parameters if is_user else self.parameters[:, :1].flatten()
        self.is_sampled = len(values) > 0 and not torch.equal(
            found, self.parameter_values[self.parameter_index]
        )
        if self.is_sampled and not is_user:
            raise ValueError("parameters that are not those of its settings")

    def _check(self) -> None:
        """Raise ValueError unless all arrays of the file fit each other."""
        num, task = self.num_rows, self.task
        fields = {
            "state": task.fields,
            **({"input": task.inputs} if task.inputs else {}),
            **({"forcing": task.forcing} if task.forcing else {}),
        }
        numbers = [self.parameter_index, self.trajectory, *self.split.values()]
        is_right = {
            "latents or tokenizers": fields.keys() == self._groups.keys()
            and all(
                latents.fits(num, codec, fields[name]) for name, (latents, codec) in self._groups.items()
            ),
            "parameters": self.parameters.shape == (num, len(task.parameters))
            and self.parameters.dtype == torch.float64
            and bool(self.parameters.isfinite().all()),
            "row numbers": len(self.parameter_index) == len(self.trajectory) == num
            and all(
                rows.dtype == torch.int64 and rows.ndim == 1 and len(rows) > 0 and is_within(rows, num - 1)
                for rows in numbers
            )
            and torch.equal(torch.cat(numbers[2:]).sort().values, torch.arange(num)),
            "time step": math.isfinite(self.dt) and (self.dt == 0 if task.is_steady else self.dt > 0),
            "fingerprint": isinstance(self.fingerprint, str),
        }
        if wrong := [name for name, fine in is_right.items() if not fine]:
            raise refusal(self.path, f"has {wrong[0]} that do not fit its other parts", "parts of one cache")

    def _reserve(self, fraction: float) -> None:
        """Move the last `fraction` of the training trajectories (of every parameter value) to the split
        "reserved"."""
        train = self.split["train"]
        numbers = self.trajectory[train].unique()
        is_kept = torch.isin(self.trajectory[train], numbers[: num_kept(len(numbers), fraction)])
        self.split |= {"train": train[is_kept], "reserved": train[~is_kept]}

    def scene(self) -> dict[str, Any]:
        """Fields, space axes and cell centres for a figure of a trajectory. Centres are those of the data
        file; without any, cells divide the task's domain equally."""
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

    def context(self, config: Config) -> int:
        """The input frames of validated and scored forecasts."""
        return context_frames(config, self.task.name, "noise" in self.header, self.num_frames)

    def rows_by_parameter(self, split: str, count: int) -> Tensor:
        """At most `count` rows of a split, evenly distributed over the parameter values."""
        rows = self.split[split]
        values = self.parameter_index[rows]
        groups = [rows[values == value] for value in values.unique()]
        picked = [row for turn in zip_longest(*groups) for row in turn if row is not None]
        return torch.stack(picked[:count])

    def row_blocks(self, rows: Tensor, num_frames: int, most: int) -> tuple[Tensor, ...]:
        """`rows` cut into blocks of at most `most` rows, whose fields of `num_frames` frames take at most
        DECODE_BYTES in float64; a block has at least one row."""
        row_bytes = 8 * num_frames * self.tokenizer.num_channels * math.prod(self.tokenizer.space)
        return rows.split(max(1, min(most, DECODE_BYTES // row_bytes)))

    def given(self, rows: Tensor, context: int, device: torch.device | str = "cpu") -> Tensor:
        """The latents that a forecast starts from: `context` frames, or the coefficient of a steady task."""
        return self.inputs(rows, device) if self.task.is_steady else self.batch(rows, 0, context, device)

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
        """Latents (B, length, *tokens, dim) of the forcing; arguments as of `batch`.

        The first frame follows the last, for forecasts that are longer than the data.
        """
        assert self._forcing is not None, f"{self.task.name} has no forcing"
        starts = torch.as_tensor(starts, dtype=torch.int64)
        if int(starts.min()) >= 0 and int(starts.max()) + length <= self.num_frames:
            return self._forcing.gather(rows, starts, length, torch.device(device))
        z = self._forcing.gather(rows, 0, self.num_frames, torch.device(device))
        frames = (starts.view(-1, 1) + torch.arange(length)) % self.num_frames
        return z[torch.arange(len(z), device=z.device)[:, None], send(frames.expand(len(z), -1), z.device)]

    def __reduce__(self) -> tuple:
        return Cache, (self.path, self.settings, "quick")


def place(
    caches: Iterable[Cache],
    device: torch.device | str,
    mode: Literal["auto", "mmap", "device"],
    fraction: float = 1.0,
) -> str:
    """Copy the latents of all `caches` to `device` once, or keep them mapped; returns "device" or "mmap".

    auto: copy if all together take at most `fraction` of the free memory of a GPU. On a CPU they stay mapped,
    because the page cache is one copy for all processes. Raises ValueError for damaged rows.
    """
    caches, device = list(caches), torch.device(device)
    if mode == "auto":
        fits = device.type == "cuda" and (
            sum(cache.num_bytes for cache in caches) <= fraction * torch.cuda.mem_get_info(device)[0]
        )
        mode = "device" if fits else "mmap"
    if mode == "device":
        for latents, _ in [group for cache in caches for group in cache._groups.values()]:
            latents.place(device)
    return mode


def open_cache(config: Config, task_name: str, verify: Literal["auto", "quick", "full"] = "auto") -> Cache:
    """The cache of `task_name`, checked against its seal and against `config`.

    verify: quick checks seal, size, header and settings in milliseconds; full checks every row as well; auto
    checks every row of a cache up to FULL_BYTES, and of a larger one each row when it is first read. Raises
    FileNotFoundError for a missing file, ValueError for a stale, truncated, altered or foreign one.
    """
    path = config.cache_path(task_name)
    if not path.is_file():
        raise FileNotFoundError(
            f"no cache of {task_name} at {path}; expected the latents there (key cache.root). Build it with "
            f"`{make_target('cache')}`."
        )
    cache = Cache(path, config.task[task_name], verify)
    stored, wanted = cache.header["settings"], cache_settings(config, task_name)
    if not isinstance(stored, dict) or not all(isinstance(stored.get(section), dict) for section in wanted):
        raise refusal(path, "does not say with what settings it was built", "the settings it was built with")
    changed = [
        f"{key} {stored[section].get(key)!r:.200} -> {wanted[section].get(key)!r}"
        for section in wanted
        for key in wanted[section] | stored[section]
        if stored[section].get(key) != wanted[section].get(key)
    ]
    if changed:
        raise refusal(path, f"is stale ({'; '.join(changed)})", "the settings it was built with")
    return cache


def _read_group(path: Path, file: h5py.File, name: str, header: dict[str, Any]) -> tuple[Latents, Tokenizer]:
    """The latents of the group `name` ("state", "input" or "forcing") and their tokenizer."""
    latents = Latents(path, dataset(file, f"{name}/latents"), dataset(file, f"{name}/checksums")[()])
    tensors = {key: torch.from_numpy(dataset(file, f"{name}/tokenizer/{key}")[()]) for key in TENSORS}
    if any(value.dtype != torch.float32 for value in tensors.values()):
        raise TypeError(
            f"a tokenizer of {', '.join(str(value.dtype) for value in tensors.values())}; expected float32"
        )
    return latents, Tokenizer.from_state(tensors, header["tokenizers"][name])


def cache_settings(config: Config, task_name: str) -> dict[str, dict]:
    """All settings that decide the content of the cache of `task_name`."""
    task, settings, data = config.spec(task_name), config.task[task_name], config.data
    origin = {"source": data.source, "seed": data.seed if data.source == "generate" else None}
    is_user = task.user_facts is not None
    return {
        "task": {
            **task.description,
            "fields": list(task.fields),
            "inputs": list(task.inputs),
            "positive": list(task.positive),
        },
        "settings": {key: getattr(settings, key) for key in USED_SETTINGS},
        "data": {
            **({"split": settings.split} if is_user else origin),
            **({"skip_missing": True} if is_user and settings.skip_missing else {}),
            "val_fraction": data.val_fraction,
            "test_fraction": data.test_fraction,
        },
        "cache": {"dtype": "float32"},  # there is no other: so fingerprints stay as they were
    }
