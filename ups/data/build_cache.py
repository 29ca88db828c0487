"""Building a latent cache: fit the tokenizers on the training split, encode every trajectory.

Two passes read the data, a few trajectories at a time. The first collects moments for the tokenizers. The
second writes latents and their checksums, and digests all values. ups/data/cache.py describes the layout of
the file.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from tqdm import tqdm

from ups.common.files import completing, explained, partial_path, reserve
from ups.common.place import make_target
from ups.config.schema import Config
from ups.data.cache import Cache, cache_settings, open_cache
from ups.data.layout import allocated
from ups.data.leakage import REMEDY, frame_digests, shared_frames
from ups.data.noise import noise_of, window_places
from ups.data.seal import FORMAT, SEAL_BYTES, write_seal
from ups.data.sources import (
    data_files,
    file_identity,
    open_source,
    split_of,
    table_of,
)
from ups.data.tokenizer import SLAB, PatchMoments, Tokenizer
from ups.data.written import written
from ups.tasks import Task
from ups.userdata.data_checks import Extremes, may_hold_fill_values, suspects
from ups.userdata.masks import is_wrong
from ups.userdata.trajectories import Trajectories

# float32 data read at a time. Eight times as much took half as long again, because of the processor's caches.
# Of a longer trajectory, SLAB numbers or one frame are read. With temporaries the build needs 25 to 40 times
# as much memory: 0.6 GiB, or 160 bytes for every number of a larger frame.
READ_BYTES = 2**22
HEADER_BYTES, ROW_BYTES = 2**20, 64  # allowance for everything but the latents, fixed and per row
COMPLETE = 0, 1.0  # dim and energy of the forcing's tokenizer: it keeps all modes
LIBVER = ("v110", "v110")  # object headers with checksums, read by HDF5 1.10 and later

Block = tuple[np.ndarray, range, np.ndarray]  # rows, frames, values


def is_up_to_date(config: Config, task_name: str) -> tuple[bool, str]:
    """Whether the cache fits the current settings and data files (`file_identity`), and the reason."""
    try:
        cache = open_cache(config, task_name, verify="quick")
    except (FileNotFoundError, ValueError) as error:
        return False, str(error)
    return is_of_data(config, cache)


def is_of_data(config: Config, cache: Cache) -> tuple[bool, str]:
    """Whether the data files are those that the cache was built from, or gone, and the reason."""
    paths = data_files(config, cache.task.name)
    if missing := [str(path) for path in paths if not path.exists()]:
        return True, f"the cache is whole; the data are no longer there ({missing[0]})"
    if file_identity(paths) != cache.header["files"]:
        return False, f"the data files changed since {cache.path} was built"
    return True, "settings and data files are as they were"


def plan(config: Config, task_name: str, codecs: dict[str, Tokenizer] | None = None) -> dict[str, Any]:
    """Rows, frames, space, latent shapes (by group) and bytes of the cache to be built.

    Without fitted `codecs`, a dim that is selected by energy counts as full rank: bytes is an upper bound.
    """
    task, settings = config.spec(task_name), config.task[task_name]
    num = settings.num_trajectories or open_source(config, task_name).num_trajectories
    rows = num * settings.num_files
    frames = -(-(settings.num_frames - settings.first_frame) // settings.time_stride)
    space = settings.cells(task.ndim)
    tokens = [size // settings.patch for size in space]
    shapes = {}
    for name, channels in channel_groups(task).items():
        if codecs:
            dim = codecs[name].dim
        elif settings.dim and name != "forcing":
            dim = settings.dim
        else:
            dim = settings.patch**task.ndim * len(task.channels[channels])
        shapes[name] = (rows, frames, *tokens, dim)
    values = sum(math.prod(shape) for shape in shapes.values())
    return {
        "rows": rows,
        "frames": frames,
        "space": space,
        "shapes": shapes,
        "bytes": 4 * values + rows * ROW_BYTES + HEADER_BYTES,
    }


@dataclass(frozen=True)
class _Inputs:
    """The data that a cache is built from: files, split and the tokenizers' groups of channels."""

    task: Task
    source: Trajectories
    num: int  # rows that are read in blocks: of one parameter value, or all of the user's
    split: dict[str, np.ndarray]
    groups: dict[str, slice]


def build_cache(config: Config, task_name: str, progress: bool = True) -> Path:
    """Fit the tokenizers of `task_name` on its training split, encode every trajectory, write the cache and
    return its path. The file appears complete or not at all.

    Raises FileNotFoundError (naming `make data`); ValueError for data that are not finite, too few to split,
    shared by two splits, not written, or not as configured; OSError for a full or write-protected disk.
    """
    settings = config.task[task_name]
    path, paths = config.cache_path(task_name), data_files(config, task_name)
    files, data = file_identity(paths), _inputs(config, task_name)
    table = table_of(config, task_name, data.source)
    most, keys = plan(config, task_name)["bytes"], "cache.root"
    with (
        completing(path, most, keys, is_continued=False) as held_file,
        tqdm(
            total=2 * data.source.num_trajectories,
            unit=" trajectories",
            desc=f"cache {task_name}",
            disable=not progress,
        ) as bar,
    ):
        codecs, extremes = _fit(data, settings, config.cache.chunk, bar)
        needed = plan(config, task_name, codecs)
        with explained(path, needed["bytes"], keys):
            digest, partial = _start_digest(config, data), partial_path(path)
            reserve(held_file, needed["bytes"])
            _allocate(partial, needed["shapes"])
            reserve(held_file, needed["bytes"])  # again: HDF5 gave back what was reserved before
            with h5py.File(partial, "r+", libver=LIBVER, locking=False) as file:
                stream = written(data.source, _read(data, config.cache.chunk, bar))
                arrays = _encode(data, codecs, file, stream, digest)
                if found := suspects(data.source, extremes):
                    raise ValueError(
                        f"{data.source.path}: {found[0].what}; expected values of the field. "
                        f"To do: {found[0].do}."
                    )
                if file_identity(paths) != files:
                    raise ValueError(
                        f"the data files of {task_name} changed while they were read; expected them to stay "
                        f"as they are. Let `{make_target('data')}` finish, then run "
                        f"`{make_target('cache')}` again."
                    )
                header = {"settings": cache_settings(config, task_name), "fingerprint": digest.hexdigest()}
                header |= {"files": files, **_described(data, codecs)}
                if table.values is not None:
                    header["values"] = table.values
                arrays |= {
                    **_small_arrays(data, codecs),
                    "parameters": table.parameters,
                    "parameter_index": table.index,
                    "trajectory": table.trajectory,
                    "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
                }
                for name, values in arrays.items():
                    file.create_dataset(name, data=values)
            write_seal(partial)
    return path


def _described(data: _Inputs, codecs: dict[str, Tokenizer]) -> dict[str, Any]:
    """The header's part that describes the data."""
    source, train = data.source, data.split["train"]
    noise, places = noise_of(source, train[train < data.num]), window_places(source)
    return {
        "dt": source.dt,
        "boundary": data.task.boundary,
        "tokenizers": {name: codec.meta() for name, codec in codecs.items()},
        "coordinates": {axis: list(map(float, at)) for axis, at in source.coordinates.items()},
        **({"noise": noise} if noise else {}),
        **({} if places is None else {"windows": places.tolist()}),
    }


def _small_arrays(data: _Inputs, codecs: dict[str, Tokenizer]) -> dict[str, np.ndarray]:
    """The tokenizers and the rows of every split."""
    return {
        **{
            f"{name}/tokenizer/{key}": value.numpy()
            for name, codec in codecs.items()
            for key, value in codec.state_dict().items()
        },
        **{f"split/{name}": rows for name, rows in data.split.items()},
    }


def _inputs(config: Config, task_name: str) -> _Inputs:
    source, task = open_source(config, task_name), config.spec(task_name)
    num = source.num_trajectories // config.task[task_name].num_files
    return _Inputs(task, source, num, split_of(config, task_name, source), channel_groups(task))


def same_source(config: Config, cache: Cache) -> Trajectories:
    """`open_source` of the data that `cache` was built from. Raises ValueError if the files hold others.

    Files with the recorded identity count as unchanged; every value of other files is read.
    """
    name = cache.task.name
    paths, data = data_files(config, name), _inputs(config, name)
    if file_identity(paths) == cache.header["files"]:
        return data.source
    digest = _start_digest(config, data)
    total = data.source.num_trajectories
    with tqdm(total=total, unit=" trajectories", desc=f"data {name}", leave=False) as bar:
        for *_, u in _read(data, config.cache.chunk, bar):
            digest.update(u)
    if digest.hexdigest() != cache.fingerprint:
        raise ValueError(
            f"the data files of {name} in {paths[0].parent} hold other values than those that "
            f"{cache.path} was built from; expected the same, or truth and latents would be of "
            f"different trajectories. Put the files back, or run `{make_target('cache')}` and train again."
        )
    return data.source


def channel_groups(task: Task) -> dict[str, slice]:
    """Slices of Task.channels; each group has a tokenizer."""
    num, end = len(task.inputs), len(task.inputs) + len(task.fields)
    return {
        "state": slice(num, end),
        **({"input": slice(num)} if num else {}),
        **({"forcing": slice(end, None)} if task.forcing else {}),
    }


def _start_digest(config: Config, data: _Inputs) -> Any:
    """The fingerprint of a cache before any value is added: format, settings and the split of a file."""
    return hashlib.sha256(
        json.dumps([FORMAT, cache_settings(config, data.task.name)], sort_keys=True).encode()
        + b"".join(rows[rows < data.num].tobytes() for rows in data.split.values())
    )


def _read(data: _Inputs, chunk: int, bar: tqdm, selected: np.ndarray | None = None) -> Iterator[Block]:
    """Blocks of all rows, or of those `selected`.

    A trajectory of more than SLAB numbers comes alone, as many frames at a time as `PatchMoments` takes.
    Raises ValueError for values that are not finite, or not positive in a positive channel.
    """
    task, source = data.task, data.source
    num_frames, space = source.num_frames, source.space
    frame_size = len(task.channels) * math.prod(space)
    chunk = max(1, min(chunk, READ_BYTES // (4 * num_frames * frame_size)))
    at_once = max(1, SLAB // frame_size)
    lowest = np.array([0.0 if name in task.positive else -np.inf for name in task.channels], np.float32)
    for begin in range(0, source.num_trajectories, data.num):
        for first in range(begin, begin + data.num, chunk):
            index = np.arange(first, min(first + chunk, begin + data.num))
            bar.update(len(index))
            keep = np.isin(index, selected) if selected is not None else np.ones(len(index), bool)
            if not keep.any():
                continue
            for start in range(0, num_frames, at_once):
                frames = range(start, min(start + at_once, num_frames))
                u = source.read(first, first + len(index), frames)
                is_bad = is_wrong(u, source.mask) | (u <= lowest.reshape(-1, *[1] * task.ndim))
                if is_bad.any():
                    row, frame, channel = at = tuple(np.argwhere(is_bad)[0])[:3]
                    name, value = task.channels[channel], u[at][is_bad[at]][0]
                    raise _value_error(task, source, name, float(value), first + row, start + frame)
                yield index[keep], frames, u if keep.all() else u[keep]


def _value_error(
    task: Task, source: Trajectories, name: str, value: float, row: int, frame: int
) -> ValueError:
    """The error for a value that the field `name` cannot have."""
    key = f"task.{task.name}"
    expected = "finite positive numbers" if name in task.positive else "finite numbers"
    path, place = source.place(row, frame)
    if task.user_facts is None:
        do = f"Run `{make_target('data')}` again, or keep it out by {key}.num_trajectories."
    elif np.isnan(value):
        do = (
            f"Write {key}.skip_missing: true to leave out frames in which cells have no number that have "
            "one elsewhere, or fix the file."
        )
    elif np.isfinite(value) and not (name in task.positive and value <= 0):
        expected, do = "none, as this cell has no number in other frames", "Fix the file."
    else:
        do = f"Fix the file, leave {name} out of {key}.positive, or keep it out by {key}.num_trajectories."
    return ValueError(f"{path} holds {value:g} in {name} of {place}; expected {expected}. {do}")


def _fit(data: _Inputs, settings: Any, chunk: int, bar: tqdm) -> tuple[dict[str, Tokenizer], Extremes]:
    """The first pass: tokenizers of the training split, and its extreme values."""
    task, source = data.task, data.source
    moments = {}
    for name, channels in data.groups.items():
        mask = None if source.mask is None else source.mask[channels]
        moments[name] = PatchMoments(
            task.channels[channels], task.positive, source.space, settings.patch, mask
        )
    extremes = Extremes(task.channels, task.offsets)
    for *_, u in _read(data, chunk, bar, data.split["train"]):
        for name, channels in data.groups.items():
            moments[name].add(u[:, :, channels])
        for trajectory in u if may_hold_fill_values(task) else ():
            extremes.add(trajectory)
    codecs = {}
    for name, found in moments.items():
        dim, energy = COMPLETE if name == "forcing" else (settings.dim, settings.energy)
        codecs[name] = Tokenizer.from_moments(found, dim, energy)
    return codecs, extremes


def _encode(
    data: _Inputs, codecs: dict[str, Tokenizer], file: h5py.File, stream: Iterable[Block], digest: Any
) -> dict[str, np.ndarray]:
    """The second pass: write the latents of `stream` into `file`, add all values to `digest`, and return the
    checksums of the rows."""
    task = data.task
    latents = {name: file[f"{name}/latents"] for name in codecs}
    num_rows, num_frames = latents["state"].shape[:2]
    checksums = {f"{name}/checksums": np.zeros(num_rows, np.uint32) for name in codecs}
    frame_hashes = np.zeros((num_rows, num_frames), np.uint64)
    for index, frames, u in stream:
        digest.update(u)
        rows = slice(int(index[0]), int(index[0]) + len(u))
        frame_hashes[rows, frames.start : frames.stop] = frame_digests(u, task)
        for name, codec in codecs.items():
            fields = torch.from_numpy(u[:, :, data.groups[name]])
            stored = codec.encode(codec.normalise(fields)).numpy()
            latents[name][rows, frames.start : frames.stop] = stored
            sums = checksums[f"{name}/checksums"]
            for at, values in enumerate(stored, rows.start):
                sums[at] = zlib.crc32(values, int(sums[at]))
    split_of_row = np.empty(num_rows, "<U5")
    for split, rows in data.split.items():
        split_of_row[rows] = split
    if shared := shared_frames(frame_hashes, split_of_row):
        raise ValueError(
            f"{task.name}: {shared}; expected no frame in two splits, or test "
            f"errors are too good. To do: {REMEDY}."
        )
    return checksums


def _allocate(partial: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Create the HDF5 file with empty latents, contiguous and page-aligned."""
    with h5py.File(
        partial,
        "w",
        libver=LIBVER,
        locking=False,
        userblock_size=SEAL_BYTES,
        alignment_threshold=SEAL_BYTES,
        alignment_interval=SEAL_BYTES,
    ) as file:
        for name, shape in shapes.items():
            file.create_dataset(f"{name}/latents", shape, np.float32, dcpl=allocated())
