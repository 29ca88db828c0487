"""Building a latent cache: fit the tokenizer on the training split, encode every trajectory, measure what
that costs.

Two passes over the data, a few trajectories at a time: moments for the tokenizer, then latents, their
checksums, a digest of everything read, and the codec's floor on held-out trajectories. The layout of the file
is described in ups/data/cache.py.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ups.common.files import completing, explained, partial_path, parts_of, reserve
from ups.config import Config
from ups.data.cache import Cache, cache_settings, open_cache
from ups.data.layout import allocated
from ups.data.leakage import REMEDY, frame_digests, shared_frames
from ups.data.seal import FORMAT, SEAL_BYTES, write_seal
from ups.data.sources import (
    Source,
    data_files,
    open_sources,
    split_of,
    split_rows,
    table_of,
    trajectories_of,
)
from ups.data.tokenizer import SLAB, PatchMoments, Tokenizer
from ups.data.written import written
from ups.metrics.errors import rmse
from ups.metrics.intervals import ratio
from ups.metrics.spectra import rms
from ups.tasks import Task
from ups.userdata.data_checks import Extremes, asked, suspects
from ups.userdata.masks import is_wrong

# of float32 data held at a time, where trajectories are shorter; with eight times as many it took half as
# long again (the processor's caches). Of longer ones SLAB numbers are held, or one frame; with temporaries
# some 25 to 40 times that: 0.6 GiB, or 160 bytes for every number of a larger frame
READ_BYTES = 2**22
HEADER_BYTES, ROW_BYTES = 2**20, 64  # allowance for everything but the latents, fixed and per row
SAMPLES, SAMPLE_BYTES = 256, 2**14  # of a file, to tell it from another as large: 4 MiB, 10 ms
WHOLE = 0, 1.0  # dim and energy of the tokenizer of what is known in advance: nothing of it is left out
LIBVER = ("v110", "v110")  # object headers with checksums, read by HDF5 1.10 and later


def _identity(paths: Iterable[Path]) -> list[list]:
    """Name, size and time of change of every file, of a folder (zarr) of all in it, and a digest of a few of
    their bytes: cheap to compare. Another file may be as large and, copied with its time, as old."""
    found = []
    for path in (part for each in paths for part in parts_of(each)):
        parts = [part for part in ([path] if path.is_file() else sorted(path.rglob("*"))) if part.is_file()]
        count = min(len(parts), SAMPLES)
        digests = {
            parts[i]: _sampled(parts[i], SAMPLES // count)
            for i in (np.arange(count) * len(parts) // max(1, count)).tolist()
        }
        found += [
            [
                str(part.relative_to(path.parent)),
                part.stat().st_size,
                part.stat().st_mtime_ns,
                digests.get(part, ""),
            ]
            for part in parts
        ]
    return found


def _sampled(path: Path, num: int) -> str:
    """A digest of the first and last bytes of a file and of others between."""
    digest, size = hashlib.blake2b(digest_size=8), path.stat().st_size
    with path.open("rb") as file:
        for at in np.unique(np.linspace(0, max(0, size - SAMPLE_BYTES), num).astype(np.int64)).tolist():
            file.seek(at)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def is_up_to_date(config: Config, task_name: str) -> tuple[bool, str]:
    """Whether the cache stands for the current settings and data files (by size, time and some bytes), and
    the reason in words."""
    try:
        cache = open_cache(config, task_name, verify="quick")
    except (FileNotFoundError, ValueError) as error:
        return False, str(error)
    paths = data_files(config, task_name)
    if gone := [str(part) for path in paths for part in parts_of(path) if not part.exists()]:
        return True, f"the cache is whole; the data are no longer there ({gone[0]})"
    if _identity(paths) != cache.header["files"]:
        return False, f"the data files changed since {cache.path} was built"
    return True, "settings and data files are as they were"


def plan(config: Config, task_name: str, codecs: dict[str, Tokenizer] | None = None) -> dict[str, Any]:
    """Rows, frames, space, shapes of the latents by group and bytes of the cache to be built.

    Without fitted `codecs` a dim that is chosen by energy counts as full rank, so bytes is an upper bound.
    """
    task, settings = config.spec(task_name), config.task[task_name]
    num = settings.num_trajectories or open_sources(config, task_name)[0].num_trajectories
    rows = num * settings.num_files
    frames = -(-(settings.num_frames - settings.first_frame) // settings.time_stride)
    space = settings.cells(task.ndim)
    tokens = [size // settings.patch for size in space]
    shapes = {}
    for name, part in _channels(task).items():
        dim = (
            codecs[name].dim
            if codecs
            else settings.dim * (name != "forcing") or settings.patch**task.ndim * len(task.channels[part])
        )
        shapes[name] = (rows, frames, *tokens, dim)
    values = sum(math.prod(shape) for shape in shapes.values())
    return {
        "rows": rows,
        "frames": frames,
        "space": space,
        "shapes": shapes,
        "bytes": values * np.dtype(config.cache.dtype).itemsize + rows * ROW_BYTES + HEADER_BYTES,
    }


def build_cache(config: Config, task_name: str, progress: bool = True) -> Path:
    """Fit the tokenizer of `task_name` to its training split, encode every trajectory and write the cache;
    returns its path.

    Reads the data twice, some trajectories or, of long ones, some frames at a time.
    Raises FileNotFoundError (naming `make data`) or ValueError for data that are missing, not finite, too
    few to split, shared by two parts of the split, not written or not what the configuration says; OSError
    where the disk is full or may not be written. The file appears whole
    or not at all.
    """
    task, settings, used = config.spec(task_name), config.task[task_name], cache_settings(config, task_name)
    path, paths = config.cache_path(task_name), data_files(config, task_name)
    sources, files, groups = open_sources(config, task_name), _identity(paths), _channels(task)
    num, split = trajectories_of(config, task_name, sources), split_of(config, task_name, sources)
    table = table_of(config, task_name, sources)
    most, keys = plan(config, task_name)["bytes"], "cache.root or cache.dtype"
    with (
        completing(path, most, keys, is_continued=False) as held_file,
        tqdm(
            total=2 * num * len(sources),
            unit=" trajectories",
            desc=f"cache {task_name}",
            disable=not progress,
        ) as bar,
    ):
        mask = sources[0].mask
        moments = {
            name: PatchMoments(
                task.channels[part],
                task.positive,
                sources[0].space,
                settings.patch,
                None if mask is None else mask[part],
            )
            for name, part in groups.items()
        }
        extremes = Extremes(task.channels, task.offsets)
        for *_, u in _read(task, sources, num, config.cache.chunk, bar, split["train"]):
            for name, part in groups.items():
                moments[name].add(u[:, :, part])
            for some in u if asked(task) else ():
                extremes.add(some)
        codecs = {
            name: Tokenizer.from_moments(
                found, *(WHOLE if name == "forcing" else (settings.dim, settings.energy))
            )
            for name, found in moments.items()
        }
        needed = plan(config, task_name, codecs)
        with explained(path, needed["bytes"], keys):
            digest, partial = _digest_of(used, split), partial_path(path)
            reserve(held_file, needed["bytes"])
            _allocate(partial, needed["shapes"], config.cache.dtype)
            reserve(held_file, needed["bytes"])  # again: HDF5 gave back what was reserved before
            with h5py.File(partial, "r+", libver=LIBVER, locking=False) as file:
                stream = written(task, sources, _read(task, sources, num, config.cache.chunk, bar))
                arrays, floor = _encode(task, codecs, file, stream, split, digest)
                if found := suspects(sources[0], extremes):  # after what was never written
                    raise ValueError(
                        f"{found[0].where}: {found[0].what}; expected values of the field. "
                        f"To do: {found[0].do}."
                    )
                if _identity(paths) != files:
                    raise ValueError(
                        f"the data files of {task_name} changed while they were read; expected "
                        "them to stay as they are. Let `make data` finish, then run `make "
                        "cache` again."
                    )
                for name, codec in codecs.items():
                    arrays |= {
                        f"{name}/tokenizer/{key}": value.numpy() for key, value in codec.state_dict().items()
                    }
                arrays |= {
                    f"split/{name}": split_rows(index, len(sources), num) for name, index in split.items()
                }
                header = {
                    "settings": used,
                    "fingerprint": digest.hexdigest(),
                    "files": files,
                    "dt": sources[0].dt,
                    "boundary": task.boundary,
                    "tokenizers": {name: codec.meta() for name, codec in codecs.items()},
                    "coordinates": {
                        axis: list(map(float, at)) for axis, at in sources[0].coordinates.items()
                    },
                    "floor": floor,
                    **({} if table.values is None else {"values": table.values}),
                }
                arrays |= {
                    "parameters": table.parameters,
                    "parameter_index": table.index,
                    "trajectory": table.trajectory,
                    "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
                }
                for name, values in arrays.items():
                    file.create_dataset(name, data=values)
            write_seal(partial)
    return path


def _digest_of(settings: dict[str, Any], split: dict[str, np.ndarray]) -> Any:
    """What the fingerprint of a cache is made of before any value is read."""
    return hashlib.sha256(
        json.dumps([FORMAT, settings], sort_keys=True).encode()
        + b"".join(index.tobytes() for index in split.values())
    )


def same_sources(config: Config, cache: Cache) -> list[Source]:
    """`open_sources` of what `cache` was built from. Raises ValueError where the files hold other values.

    Files that are as old and as large as the cache says, with the same bytes where it looked, were not
    changed since; of others every value is read.
    """
    name = cache.task.name
    paths, sources = data_files(config, name), open_sources(config, name)
    num = trajectories_of(config, name, sources)
    if _identity(paths) == cache.header["files"]:
        return sources
    digest = _digest_of(cache_settings(config, name), split_of(config, name, sources))
    with tqdm(total=num * len(sources), unit=" trajectories", desc=f"data {name}", leave=False) as bar:
        for *_, u in _read(cache.task, sources, num, config.cache.chunk, bar):
            digest.update(u)
    if digest.hexdigest() != cache.fingerprint:
        raise ValueError(
            f"the data files of {name} in {paths[0].parent} hold other values than those that "
            f"{cache.path} was built from; expected the same, or truth and latents would be of "
            "different trajectories. Put the files back, or run `make cache` and train again."
        )
    return sources


def _channels(task: Task) -> dict[str, slice]:
    """Groups of channels with a tokenizer of their own, as slices of Task.channels."""
    num, end = len(task.inputs), len(task.inputs) + len(task.fields)
    return {
        "state": slice(num, end),
        **({"input": slice(num)} if num else {}),
        **({"forcing": slice(end, None)} if task.forcing else {}),
    }


def _read(
    task: Task, sources: Sequence[Source], num: int, chunk: int, bar: tqdm, chosen: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray, range, np.ndarray]]:
    """(file, trajectory indices, frames, values) of the first `num` trajectories of every file, or the
    `chosen` ones of them; of trajectories of more than SLAB numbers one by one, as many frames at a time as
    `PatchMoments` takes in."""
    num_frames, frame_size = sources[0].num_frames, len(task.channels) * math.prod(sources[0].space)
    chunk = max(1, min(chunk, READ_BYTES // (4 * num_frames * frame_size)))
    at_once = max(1, SLAB // frame_size)
    lowest = np.array([0.0 if name in task.positive else -np.inf for name in task.channels], np.float32)
    for number, source in enumerate(sources):
        for first in range(0, num, chunk):
            index = np.arange(first, min(first + chunk, num))
            bar.update(len(index))
            keep = np.isin(index, chosen) if chosen is not None else np.ones(len(index), bool)
            if not keep.any():
                continue
            for begin in range(0, num_frames, at_once):
                frames = range(begin, min(begin + at_once, num_frames))
                u = source.read(first, first + len(index), frames)
                is_bad = is_wrong(u, source.mask) | (u <= lowest.reshape(-1, *[1] * task.ndim))
                if is_bad.any():
                    row, frame, channel = at = tuple(np.argwhere(is_bad)[0])[:3]
                    name, value = task.channels[channel], u[at][is_bad[at]][0]
                    raise _wrong_number(task, source, name, float(value), first + row, begin + frame)
                yield number, index[keep], frames, u if keep.all() else u[keep]


def _wrong_number(task: Task, source: Source, name: str, value: float, row: int, frame: int) -> ValueError:
    """What to say of a value that no field can have there."""
    key = f"task.{task.name}"
    expected = "finite positive numbers" if name in task.positive else "finite numbers"
    path, place = source.place(row, frame)
    if task.user_facts is None:
        do = f"Run `make data` again, or keep it out by {key}.num_trajectories."
    elif np.isnan(value):
        do = (
            f"Write {key}.skip_missing: true to leave out frames in which cells have no number that have "
            "one elsewhere, or mend the file."
        )
    elif np.isfinite(value) and not (name in task.positive and value <= 0):
        expected, do = "none, as this cell has no number in other frames", "Mend the file."
    else:
        do = f"Mend the file, leave {name} out of {key}.positive, or keep it out by {key}.num_trajectories."
    return ValueError(f"{path} holds {value:g} in {name} of {place}; expected {expected}. {do}")


def _encode(
    task: Task,
    codecs: dict[str, Tokenizer],
    file: h5py.File,
    stream: Iterable[tuple[int, np.ndarray, range, np.ndarray]],
    split: dict[str, np.ndarray],
    digest: Any,
) -> tuple[dict[str, np.ndarray], dict]:
    """Write the latents of `stream` into `file`; returns the checksums of the rows and the floor.

    `digest` takes in every value that was read.
    """
    num, latents = sum(map(len, split.values())), {name: file[f"{name}/latents"] for name in codecs}
    num_rows = len(latents["state"])
    checksums = {f"{name}/checksums": np.zeros(num_rows, np.uint32) for name in codecs}
    # one table from the start: small results kept between large temporaries would fragment the heap, 70 KB
    # per trajectory
    errors = {
        name: torch.full((num_rows, codec.num_channels + 4), torch.nan, dtype=torch.float64)
        for name, codec in codecs.items()
    }
    measures: dict[str, CodecErrors] = {}
    seen = np.zeros(latents["state"].shape[:2], np.uint64)
    for number, index, frames, u in stream:
        digest.update(u)
        row = number * num + int(index[0])
        seen[row : row + len(u), frames.start : frames.stop] = frame_digests(u, task)
        for name, codec in codecs.items():
            fields, dtype = torch.from_numpy(u[:, :, _channels(task)[name]]), latents[name].dtype.name
            stored = codec.encode(codec.normalise(fields)).to(getattr(torch, dtype))
            if not stored.isfinite().all():
                raise ValueError(
                    f"latents of {task.name} overflow {dtype}; expected them below "
                    f"{torch.finfo(stored.dtype).max:.0f}. Set cache.dtype=float32."
                )
            latents[name][row : row + len(u), frames.start : frames.stop] = stored.numpy()
            sums = checksums[f"{name}/checksums"]
            for at, values in enumerate(stored.numpy(), row):
                sums[at] = zlib.crc32(values, int(sums[at]))
            held_out = torch.from_numpy(~np.isin(index, split["train"]))
            if held_out.any():
                measured = measures[name] = CodecErrors(codec) if frames.start == 0 else measures[name]
                measured.add(fields[held_out], stored[held_out])
                if frames.stop == latents[name].shape[1]:
                    errors[name][row : row + len(u)][held_out] = measured.result()
    rows = {part: split_rows(index, num_rows // num, num) for part, index in split.items()}
    part_of = np.empty(num_rows, "<U5")
    for part, chosen in rows.items():
        part_of[chosen] = part
    if shared := shared_frames(seen, part_of):
        raise ValueError(
            f"{task.name}: {shared}; expected no frame in two parts of the split, or test "
            f"errors are too good. To do: {REMEDY}."
        )
    floor = {
        part: {name: _floor(codecs[name].fields, errors[name][chosen]) for name in codecs}
        for part, chosen in rows.items()
        if part != "train"
    }
    return checksums, floor


class CodecErrors:
    """What a codec alone costs per trajectory, by some consecutive frames at a time."""

    def __init__(self, codec: Tokenizer) -> None:
        self.codec, self.norms, self.squares, self.last = codec, [], [], None

    def add(self, u: Tensor, stored: Tensor) -> None:
        """Take in the next frames `u` (n, T, C, *space), whose latents are stored as `stored`."""
        codec = self.codec
        w = codec.normalise(u)
        z, w_pred = codec.encode(w), codec.decode(stored.float())
        self.norms.append(torch.stack([rmse(codec.denormalise(w_pred), u), rms(u)]))
        change = (w if self.last is None else torch.cat([self.last, w], 1)).diff(dim=1)
        parts = ((w_pred - w), (w_pred - codec.decode(z)), change)
        self.squares.append(
            [(x.shape[1], x.double().square().flatten(1).mean(1, keepdim=True)) for x in parts]
        )
        self.last = w[:, -1:].clone()

    def result(self) -> Tensor:
        """(n, C + 4), float64: relative error per frame of each channel (mean over frames; NaN where the
        truth is zero throughout); relative error of the whole trajectory; mean squares, in normalised units,
        of the error, of the part of it that rounding to the stored type makes, and of the change from one
        frame to the next (NaN for one frame).
        """
        errors, sizes = torch.cat(self.norms, 2)
        total, size = (part.square().sum((1, 2)).sqrt() for part in (errors, sizes))
        columns = [ratio(errors, sizes).nanmean(1), ratio(total, size)[:, None]]
        for blocks in zip(*self.squares, strict=True):
            num = sum(count for count, _ in blocks)
            columns.append(
                sum(count / num * mean for count, mean in blocks if count) if num else blocks[0][1]
            )
        return torch.cat(columns, 1)


def _floor(fields: Sequence[str], errors: Tensor) -> dict[str, Any]:
    """Means of `CodecErrors` as JSON: nrmse, per field and overall; error and rounding over the one-step
    change."""
    *channels, total, error, rounding, change = (
        None if math.isnan(x) else x for x in errors.nanmean(0).tolist()
    )
    defined = [x for x in channels if x is not None]
    return {
        "nrmse": sum(defined) / len(defined) if defined else None,
        "nrmse_global": total,
        "fields": dict(zip(fields, channels, strict=True)),
        "over_change": math.sqrt(error / change) if change else None,
        "rounding_over_change": math.sqrt(rounding / change) if change else None,
    }


def _allocate(partial: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    """Make the HDF5 file with its latents, contiguous and page-aligned, not yet written."""
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
            file.create_dataset(f"{name}/latents", shape, dtype, dcpl=allocated())
