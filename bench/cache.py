"""Measure the latent cache against memory: building, opening, batches against memcpy, two processes.

    python -m bench.cache                       1 GiB of latents in a temporary folder
    python -m bench.cache --gib 0.1 --batch 32

Expected: less than 1 s from opening to the first batch; a batch as fast as memcpy of the same windows (a
single block of the same size is faster, because scattered windows wait for memory); two processes share one
copy: the latents count in the RSS of both, half in the PSS (proportional set size) of each, and not in
private memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch

from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.build_cache import build_cache, data_files
from ups.data.cache import Cache, open_cache

FRAMES, CELLS = 41, 256


def settings(folder: str, num: int, dim: int) -> Config:
    return load_config(
        None,
        [
            "data.tasks=[advection1d]",
            f"data.root={folder}/data",
            f"cache.root={folder}/cache",
            *(
                f"task.advection1d.{setting}"
                for setting in (
                    f"parameters=[1.0] num_trajectories={num} resolution={CELLS} num_frames={FRAMES} "
                    f"dim={dim} space_stride=1 time_stride=1"
                ).split()
            ),
        ],
    )


def write_noise(path: Path, num: int) -> None:
    """Write random numbers in PDEBench's layout; their values do not matter."""
    path.parent.mkdir(parents=True)
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.attrs["beta"] = 1.0
        file["x-coordinate"], file["t-coordinate"] = np.arange(CELLS) / CELLS, np.arange(FRAMES) / FRAMES
        tensor = file.create_dataset("tensor", (num, FRAMES, CELLS), "f4")
        for first in range(0, num, 500):
            count = min(500, num - first)
            tensor[first : first + count] = generator.standard_normal((count, FRAMES, CELLS), np.float32)


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def memory() -> dict[str, float]:
    """Return MiB of this process: resident, proportional set size, private."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    values = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return {
        "RSS": values["Rss"],
        "PSS": values["Pss"],
        "private": values["Private_Clean"] + values["Private_Dirty"],
    }


def drop_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reader(config: Config) -> None:
    """Behave as a training process does for memory: open, read every row once, report on request."""
    cache = open_cache(config, "advection1d")
    before = memory()
    for row in range(cache.num_rows):
        cache.batch([row], 0, cache.num_frames)
    print("ready", flush=True)
    sys.stdin.readline()
    print(
        "; ".join(f"{name} {value:.0f} MiB ({before[name]:.0f} opened)" for name, value in memory().items()),
        flush=True,
    )


def compare(cache: Cache, batch: int, length: int, repeats: int) -> list[float]:
    """Return median seconds of a random batch, of memcpy of such windows one by one, and of memcpy of the
    same number of bytes from one random place. They take turns, so that load affects all three.
    """
    frames, generator = cache._state.frames, torch.Generator().manual_seed(0)
    item = frames.shape[1] * 4
    windows = np.ndarray(len(frames) - length + 1, f"V{length * item}", frames.numpy(), strides=(item,))
    times: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        rows, others = torch.randint(cache.num_rows, (2, batch), generator=generator)
        starts = torch.randint(cache.num_frames - length + 1, (batch,), generator=generator)
        index = (others * cache.num_frames + starts).numpy()
        at = int(torch.randint(len(frames) - batch * length, (1,), generator=generator))
        times[0].append(seconds_of(lambda rows=rows, starts=starts: cache.batch(rows, starts, length)))
        times[1].append(seconds_of(lambda index=index: windows[index]))
        times[2].append(seconds_of(lambda at=at: frames[at : at + batch * length].clone()))
    return [float(np.median(values)) for values in times]


def cost_of_checks(config: Config, batch: int, length: int, is_first: bool) -> float:
    """Return the time of reading every row (in a newly opened cache if `is_first`) over that without checks:
    the median of alternating pairs.
    """
    ratios = []
    for _ in range(9):
        times = []
        for is_unchecked in (True, False):
            cache = open_cache(config, "advection1d", verify="quick" if is_first else "full")
            for row in range(0, cache.num_rows, 64):
                # map the pages first: the first touch is slow
                cache._state.frames[row * FRAMES : (row + 64) * FRAMES].sum()
            cache._state.is_placed = is_unchecked
            rows = torch.randperm(cache.num_rows).split(batch)
            times.append(
                seconds_of(lambda cache=cache, rows=rows: [cache.batch(some, 0, length) for some in rows])
            )
        ratios.append(times[1] / times[0])
    return float(np.median(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the latents")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--reader", nargs=2, metavar=("FOLDER", "NUM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.reader:
        return reader(settings(args.reader[0], int(args.reader[1]), args.dim))

    num = int(args.gib * 2**30 / (FRAMES * CELLS // 4 * args.dim * 4))
    with tempfile.TemporaryDirectory() as folder:
        config = settings(folder, num, args.dim)
        write_noise(data_files(config, "advection1d")[0], num)
        data_bytes = data_files(config, "advection1d")[0].stat().st_size
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = seconds_of(lambda: build_cache(config, "advection1d", progress=False))
        path = config.cache_path("advection1d")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"build        {seconds:8.1f} s   {data_bytes / seconds / 1e6:.0f} MB/s of data, peak memory "
            f"{peak:.0f} MiB ({base:.0f} before)"
        )

        for verify in ("quick", "full", "auto"):
            seconds = np.median(
                [
                    seconds_of(lambda verify=verify: open_cache(config, "advection1d", verify))
                    for _ in range(3)
                ]
            )
            print(f"open {verify:8s}{seconds * 1e3:8.1f} ms")
        for name, prepare in (("in page cache", lambda: None), ("from disk", lambda: drop_page_cache(path))):
            prepare()
            seconds = seconds_of(lambda: open_cache(config, "advection1d").batch(range(32), 0, 2))
            print(f"open and first batch, {name}: {seconds * 1e3:.1f} ms")

        print(
            f"every row once, compared with its checksum, over without: "
            f"{cost_of_checks(config, 32, FRAMES, True):.2f}; "
            f"read again, over without: {cost_of_checks(config, 32, 10, False):.2f} (32 x 10 frames)"
        )
        # the check maps every page, as a first epoch does
        cache = open_cache(config, "advection1d", verify="full")
        print(
            f"{'batch':>6} {'frames':>6} {'MiB':>8} {'us':>6} {'GB/s':>6} {'of memcpy: windows':>19} "
            f"{'one block':>10}"
        )
        for batch in args.batch:
            for length in (2, 10, FRAMES):
                size = batch * length * CELLS // 4 * args.dim * 4
                taken, scattered, block = compare(cache, batch, length, args.repeats)
                print(
                    f"{batch:6d} {length:6d} {size / 2**20:8.3f} {taken * 1e6:6.0f} "
                    f"{size / taken / 1e9:6.2f} {scattered / taken:19.2f} {block / taken:10.2f}"
                )

        command = [sys.executable, "-m", "bench.cache", "--dim", str(args.dim), "--reader", folder, str(num)]
        readers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in readers:
            assert process.stdout.readline() == "ready\n"
        for number, process in enumerate(readers):
            process.stdin.write("report\n")
            process.stdin.flush()
            print(f"process {number}: {process.stdout.readline().strip()}")
        for process in readers:
            process.communicate()


if __name__ == "__main__":
    main()
